//! State of each cluster of a disk that a job copies: not saved, or saved; and claimed by a task
//! that reads it, or free.
//!
//! A point in time saves a cluster once, and claims only clusters that are not saved. A write
//! tracker saves a cluster when a task claims it, and a change makes it unsaved again.
//!
//! A bit for each cluster, and a list of the few claims. Never does I/O.

use std::ops::Range;

const WORD_BITS: u64 = u64::BITS as u64;

/// The states. Numbers are those of clusters.
#[derive(Debug)]
pub(super) struct ClusterStates {
    /// A bit for each cluster that is saved.
    saved: Box<[u64]>,
    count: u64,
    unsaved: u64,
    claims: Vec<Range<u64>>,
}

/// The first clusters of a range that are not saved.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum FirstUnsaved {
    /// All are saved.
    None,
    /// A task reads them.
    Claimed(Range<u64>),
    /// No task reads them.
    Free(Range<u64>),
}

impl ClusterStates {
    pub(super) fn new(count: u64) -> Self {
        let words = vec![0; count.div_ceil(WORD_BITS) as usize].into_boxed_slice();
        Self { saved: words, count, unsaved: count, claims: Vec::new() }
    }

    /// As [`ClusterStates::new`], with all clusters saved.
    pub(super) fn all_saved(count: u64) -> Self {
        let mut states = Self::new(count);
        if count > 0 {
            states.save(0..count);
        }
        states
    }

    /// Memory of the states of `count` clusters, in bytes.
    pub(super) fn memory_bytes(count: u64) -> u64 {
        count.div_ceil(WORD_BITS) * 8
    }

    /// Number of clusters.
    pub(super) fn count(&self) -> u64 {
        self.count
    }

    /// Number of clusters that are not saved, claimed ones included.
    pub(super) fn unsaved(&self) -> u64 {
        self.unsaved
    }

    /// The first run of clusters in `range` that are not saved.
    pub(super) fn first_unsaved(&self, range: Range<u64>) -> FirstUnsaved {
        let end = range.end.min(self.count);
        let Some(start) = self.next(range.start, end, false) else { return FirstUnsaved::None };
        let mut run = start..self.next(start, end, true).unwrap_or(end);
        for claim in &self.claims {
            if claim.contains(&start) {
                return FirstUnsaved::Claimed(start..run.end.min(claim.end));
            }
            if claim.start > start {
                run.end = run.end.min(claim.start);
            }
        }
        FirstUnsaved::Free(run)
    }

    /// The first run of clusters in `range` that are neither saved nor claimed.
    pub(super) fn first_free(&self, mut range: Range<u64>) -> Option<Range<u64>> {
        loop {
            match self.first_unsaved(range.clone()) {
                FirstUnsaved::None => return None,
                FirstUnsaved::Free(run) => return Some(run),
                FirstUnsaved::Claimed(run) => range.start = run.end,
            }
        }
    }

    /// Claims clusters, which must be free.
    pub(super) fn claim(&mut self, clusters: Range<u64>) {
        self.claims.push(clusters);
    }

    /// Changes a claim to its first part; the rest is free again. An empty part ends it.
    pub(super) fn narrow(&mut self, claim: &Range<u64>, end: u64) {
        let at = self.claims.iter().position(|other| other == claim).expect("it is claimed");
        if end == claim.start {
            self.claims.swap_remove(at);
        } else {
            self.claims[at].end = end;
        }
    }

    /// Marks clusters as saved; all of them must be unsaved.
    pub(super) fn save(&mut self, clusters: Range<u64>) {
        debug_assert!(!clusters.is_empty() && clusters.end <= self.count, "{clusters:?}");
        self.unsaved -= clusters.end - clusters.start;
        for word in clusters.start / WORD_BITS..clusters.end.div_ceil(WORD_BITS) {
            self.saved[word as usize] |= bits_of(word, &clusters);
        }
    }

    /// Marks clusters as not saved, whatever they were before.
    pub(super) fn unsave(&mut self, clusters: Range<u64>) {
        for word in clusters.start / WORD_BITS..clusters.end.div_ceil(WORD_BITS) {
            let bits = bits_of(word, &clusters);
            let saved = &mut self.saved[word as usize];
            self.unsaved += u64::from((*saved & bits).count_ones());
            *saved &= !bits;
        }
    }

    /// Number of claimed clusters.
    pub(super) fn claimed(&self) -> u64 {
        self.claims.iter().map(|claim| claim.end - claim.start).sum()
    }

    /// The first cluster from `start` to `end` whose saved bit is `is_saved`.
    fn next(&self, start: u64, end: u64, is_saved: bool) -> Option<u64> {
        let mut at = start;
        while at < end {
            let word = self.saved[(at / WORD_BITS) as usize];
            let sought = (if is_saved { word } else { !word }) >> (at % WORD_BITS);
            if sought != 0 {
                let found = at + u64::from(sought.trailing_zeros());
                return (found < end).then_some(found);
            }
            at = (at / WORD_BITS + 1) * WORD_BITS;
        }
        None
    }
}

/// Bits of a word for these clusters, of which it has at least one.
fn bits_of(word: u64, clusters: &Range<u64>) -> u64 {
    let (from, to) = (clusters.start.max(word * WORD_BITS), clusters.end.min((word + 1) * WORD_BITS));
    u64::MAX >> (WORD_BITS - (to - from)) << (from % WORD_BITS)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The states against one value for each cluster.
        #[test]
        fn states_equal_a_list(
            count in 1_u64..300,
            steps in prop::collection::vec((0_u64..300, 1_u64..90, 0_u64..5), 1..40),
        ) {
            let mut states = ClusterStates::new(count);
            // 0: not saved, 1: claimed, 2: saved.
            let mut list = vec![0_u8; count as usize];
            let mut claims: Vec<Range<u64>> = Vec::new();
            for (start, length, step) in steps {
                let (start, end) = (start.min(count - 1), (start + length).min(count));
                let range = start..end.max(start + 1);
                match step {
                    0 => if let Some(run) = states.first_free(range) {
                        list[run.start as usize..run.end as usize].fill(1);
                        states.claim(run.clone());
                        claims.push(run);
                    },
                    1 | 2 => if let Some(claim) = claims.pop() {
                        // Saves a part, and frees the rest.
                        let middle = claim.start + (claim.end - claim.start) / step;
                        states.narrow(&claim, claim.start);
                        if middle > claim.start {
                            states.save(claim.start..middle);
                        }
                        list[claim.start as usize..middle as usize].fill(2);
                        list[middle as usize..claim.end as usize].fill(0);
                    },
                    3 => {
                        // Claims of clusters that are not saved stay.
                        states.unsave(range.clone());
                        for at in range.start..range.end {
                            if list[at as usize] == 2 { list[at as usize] = 0 }
                        }
                    }
                    _ => {
                        let first = (range.start..range.end).find(|&at| list[at as usize] != 2);
                        let found = states.first_unsaved(range.clone());
                        match first {
                            None => prop_assert_eq!(found, FirstUnsaved::None),
                            Some(first) => {
                                let state = list[first as usize];
                                let run_end = (first..range.end)
                                    .find(|&at| list[at as usize] != state).unwrap_or(range.end);
                                match found {
                                    FirstUnsaved::Free(run) => prop_assert!(state == 0 && run == (first..run_end)),
                                    // Adjacent claims are separate.
                                    FirstUnsaved::Claimed(run) => {
                                        prop_assert!(state == 1 && run.start == first && run.end <= run_end);
                                    }
                                    FirstUnsaved::None => prop_assert!(false),
                                }
                            }
                        }
                    }
                }
                let unsaved = list.iter().filter(|&&state| state != 2).count() as u64;
                prop_assert_eq!(states.unsaved(), unsaved);
            }
        }
    }
}
