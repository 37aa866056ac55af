//! Counters of references, one for each cluster of the file.
//!
//! ```text
//!   chunk of 4096 clusters ─► few are in use: a sorted list │ many: an array
//! ```
//!
//! Memory grows with the number of referenced clusters, never with the apparent size of the file:
//! a sparse file of 8 EiB costs nothing. An array takes two bytes for each cluster; larger numbers
//! are stored in a map beside it.
//!
//! Never overflows: additions saturate.

use std::{collections::BTreeMap, ops::Range};

// Clusters in a chunk.
const CHUNK: u64 = 4096;
// A longer list becomes an array, which then takes no more memory.
const MAX_LIST: usize = 1024;
// Value in an array that refers to the map of large numbers.
const LARGE: u16 = u16::MAX;

/// Counters by cluster. See the head of this file.
#[derive(Debug, Default)]
pub(super) struct ReferenceCounts {
    chunks: BTreeMap<u64, CountChunk>,
    /// Numbers of at least [`LARGE`], by cluster.
    large: BTreeMap<u64, u64>,
}

#[derive(Debug)]
enum CountChunk {
    /// Index in the chunk and number, ascending. Numbers may be 0 after a `put`.
    List(Vec<(u16, u16)>),
    Array(Box<[u16]>),
}

impl CountChunk {
    fn get(&self, place: u16) -> u16 {
        match self {
            Self::List(list) => {
                list.binary_search_by_key(&place, |(at, _)| *at).map_or(0, |found| list[found].1)
            }
            Self::Array(array) => array[usize::from(place)],
        }
    }

    fn put(&mut self, place: u16, number: u16) {
        match self {
            Self::List(list) => match list.binary_search_by_key(&place, |(at, _)| *at) {
                Ok(found) => list[found].1 = number,
                Err(_) if list.len() == MAX_LIST => {
                    let mut array = vec![0; CHUNK as usize].into_boxed_slice();
                    for (at, number) in list.iter() {
                        array[usize::from(*at)] = *number;
                    }
                    array[usize::from(place)] = number;
                    *self = Self::Array(array);
                }
                Err(at) => list.insert(at, (place, number)),
            },
            Self::Array(array) => array[usize::from(place)] = number,
        }
    }
}

impl ReferenceCounts {
    /// Count of a cluster.
    pub(super) fn get(&self, cluster: u64) -> u64 {
        match self.chunks.get(&(cluster / CHUNK)).map_or(0, |chunk| chunk.get((cluster % CHUNK) as u16)) {
            LARGE => self.large.get(&cluster).copied().unwrap_or(LARGE.into()),
            small => small.into(),
        }
    }

    /// Increases the count of a cluster.
    pub(super) fn add(&mut self, cluster: u64, more: u64) {
        let number = self.get(cluster).saturating_add(more);
        self.put(cluster, number);
    }

    /// Sets the count of a cluster.
    pub(super) fn put(&mut self, cluster: u64, number: u64) {
        let small = u16::try_from(number).unwrap_or(LARGE);
        if small == LARGE {
            self.large.insert(cluster, number);
        }
        let chunk = self.chunks.entry(cluster / CHUNK).or_insert_with(|| CountChunk::List(Vec::new()));
        chunk.put((cluster % CHUNK) as u16, small);
    }

    /// Clusters of a range with a nonzero count, ascending.
    pub(super) fn used(&self, range: Range<u64>) -> impl Iterator<Item = u64> + '_ {
        let chunks = range.start / CHUNK..range.end.div_ceil(CHUNK);
        self.chunks.range(chunks).flat_map(move |(number, chunk)| {
            let first = number * CHUNK;
            let indices: Vec<u16> = match chunk {
                CountChunk::List(list) => {
                    list.iter().filter(|(_, count)| *count > 0).map(|(at, _)| *at).collect()
                }
                CountChunk::Array(array) => {
                    (0..CHUNK as u16).filter(|at| array[usize::from(*at)] > 0).collect()
                }
            };
            let range = range.clone();
            indices
                .into_iter()
                .map(move |at| first + u64::from(at))
                .filter(move |cluster| range.contains(cluster))
        })
    }

    /// Last cluster with a nonzero count.
    pub(super) fn last_used(&self) -> Option<u64> {
        let last = self.chunks.last_key_value()?.0 * CHUNK;
        self.used(last..last + CHUNK).last()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn counts_match_a_map(
            steps in proptest::collection::vec((0_u64..20_000, 1_u64..40_000), 1..3000),
        ) {
            let mut plain = BTreeMap::new();
            let mut counts = ReferenceCounts::default();
            for (cluster, more) in steps {
                *plain.entry(cluster).or_insert(0) += more;
                counts.add(cluster, more);
            }
            prop_assert!(plain.iter().all(|(cluster, number)| counts.get(*cluster) == *number));
            let used: Vec<_> = counts.used(100..15_000).collect();
            prop_assert_eq!(used, plain.range(100..15_000).map(|(cluster, _)| *cluster).collect::<Vec<_>>());
            prop_assert_eq!(counts.last_used(), plain.last_key_value().map(|(cluster, _)| *cluster));
        }
    }

    #[test]
    fn full_chunk_keeps_counts_and_saturates() {
        let mut counts = ReferenceCounts::default();
        for cluster in 0..CHUNK {
            counts.add(cluster, cluster % 3 + 1);
        }
        assert!((0..CHUNK).all(|cluster| counts.get(cluster) == cluster % 3 + 1));
        counts.add(7, u64::MAX);
        assert_eq!((counts.get(7), counts.get(u64::MAX)), (u64::MAX, 0));
        counts.put(7, 0);
        assert_eq!(counts.get(7), 0);
    }
}
