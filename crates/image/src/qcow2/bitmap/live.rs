//! Bits of a dirty bitmap that concurrent requests of all workers set without a lock.
//!
//! ```text
//!   chunks   │ none │ 4 KiB │ none │ 4 KiB │ …      a chunk is allocated by its first mark
//! ```
//!
//! Parts of the disk that are not written to use no memory. A bit that is already set is only
//! read, so workers that repeatedly write to the same part share the cache line without
//! contention. Bits are never cleared here: a resized or cleared bitmap is a new value.
//!
//! All accesses are relaxed: bits order no other memory, and they are copied to the file only while
//! no request is in flight.

use std::{
    ops::Range,
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use super::DirtyBits;

const WORD_BITS: u64 = u64::BITS as u64;
const CHUNK_WORDS: u64 = 512;
const CHUNK_BITS: u64 = CHUNK_WORDS * WORD_BITS;

type WordChunk = Box<[AtomicU64; CHUNK_WORDS as usize]>;

/// Bits that requests set concurrently. See the head of this file.
#[derive(Debug)]
pub(super) struct LiveBits {
    size_bytes: u64,
    granularity_bits: u32,
    chunks: Box<[OnceLock<WordChunk>]>,
}

fn new_chunk() -> WordChunk {
    Box::new([const { AtomicU64::new(0) }; CHUNK_WORDS as usize])
}

impl LiveBits {
    /// Copies the marks. The caller must bound their number.
    pub(super) fn of(bits: &DirtyBits) -> Self {
        let (size_bytes, granularity_bits) = (bits.size_bytes(), bits.granularity_bits());
        let chunks = bits.bytes().chunks((CHUNK_BITS / 8) as usize).map(|bytes| {
            let chunk = OnceLock::new();
            if bytes.iter().any(|byte| *byte != 0) {
                let words = chunk.get_or_init(new_chunk);
                for (word, bytes) in words.iter().zip(bytes.chunks((WORD_BITS / 8) as usize)) {
                    let mut padded = [0; 8];
                    padded[..bytes.len()].copy_from_slice(bytes);
                    word.store(u64::from_le_bytes(padded), Relaxed);
                }
            }
            chunk
        });
        Self { size_bytes, granularity_bits, chunks: chunks.collect() }
    }

    /// Copies the present marks. Marks that are set concurrently may be missing.
    pub(super) fn to_dirty_bits(&self) -> DirtyBits {
        let mut bits = DirtyBits::new(self.size_bytes, self.granularity_bits);
        for (number, chunk) in self.chunks.iter().enumerate() {
            if let Some(words) = chunk.get() {
                let bytes = words.iter().flat_map(|word| word.load(Relaxed).to_le_bytes());
                bits.fill(number * (CHUNK_BITS / 8) as usize, bytes);
            }
        }
        bits
    }

    /// Size of the disk in bytes.
    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// A bit covers `1 << granularity_bits` bytes.
    pub(super) fn granularity_bits(&self) -> u32 {
        self.granularity_bits
    }

    /// Marks every bit that the range touches; the part outside the disk is ignored. Returns true
    /// if at least one of these bits was clear.
    pub(super) fn mark(&self, range: Range<u64>) -> bool {
        let end = range.end.min(self.size_bytes);
        if range.start >= end {
            return false;
        }
        let last = (end - 1) >> self.granularity_bits;
        let mut bit = range.start >> self.granularity_bits;
        let mut is_new = false;
        while bit <= last {
            let word_end = (bit | (WORD_BITS - 1)).min(last);
            let mask = u64::MAX >> (WORD_BITS - 1 - (word_end - bit)) << (bit % WORD_BITS);
            let chunk = self.chunks[(bit / CHUNK_BITS) as usize].get_or_init(new_chunk);
            let word = &chunk[(bit % CHUNK_BITS / WORD_BITS) as usize];
            // Load before the read-modify-write: the common case leaves the cache line shared.
            if word.load(Relaxed) & mask != mask {
                is_new |= word.fetch_or(mask, Relaxed) & mask != mask;
            }
            bit = word_end + 1;
        }
        is_new
    }

    /// Length of the run of equal bits that begins at `at`, up to `end`; and true if the bits are
    /// set. Bytes beyond the end of the disk count as marked, the safe answer for a backup.
    pub(super) fn run(&self, at: u64, end: u64) -> (u64, bool) {
        let inside = end.min(self.size_bytes);
        if at >= inside {
            return (end - at, true);
        }
        let bits = ((inside - 1) >> self.granularity_bits) + 1;
        let first = at >> self.granularity_bits;
        let dirty = self.word(first) >> (first % WORD_BITS) & 1 == 1;
        let mut bit = first;
        while bit < bits {
            // No bit of an unallocated chunk is set.
            if !dirty && self.chunks[(bit / CHUNK_BITS) as usize].get().is_none() {
                bit = (bit / CHUNK_BITS + 1) * CHUNK_BITS;
                continue;
            }
            let word = if dirty { !self.word(bit) } else { self.word(bit) };
            // From `bit` to the end of the word: the bits that differ from the run's.
            let differing = word >> (bit % WORD_BITS);
            if differing != 0 {
                bit += u64::from(differing.trailing_zeros());
                break;
            }
            bit = (bit | (WORD_BITS - 1)) + 1;
        }
        let run_end = if bit >= bits { inside } else { bit << self.granularity_bits };
        (run_end - at, dirty)
    }

    /// As [`LiveBits::run`], of bits that are set here or in `other`. The next run may have the
    /// same value.
    pub(super) fn run_of_union(&self, other: Option<&Self>, at: u64, end: u64) -> (u64, bool) {
        let (length, dirty) = self.run(at, end);
        let Some(other) = other else { return (length, dirty) };
        match other.run(at, end) {
            (other_length, other_dirty) if other_dirty == dirty => match dirty {
                true => (length.max(other_length), true),
                false => (length.min(other_length), false),
            },
            (other_length, true) => (other_length, true),
            (_, false) => (length, true),
        }
    }

    /// Number of bytes that are marked here or in `other`, a bitmap of the same size and
    /// granularity; the last granule counts in full. Nothing is copied: a disk may have a gigabyte
    /// of bits.
    pub(super) fn marked_bytes_of_union(&self, other: Option<&Self>) -> u64 {
        let count = |number: usize, chunk: &OnceLock<WordChunk>| {
            let other = other.and_then(|other| other.chunks[number].get());
            let load =
                |words: Option<&WordChunk>, word: usize| words.map_or(0, |words| words[word].load(Relaxed));
            if chunk.get().is_none() && other.is_none() {
                return 0;
            }
            (0..CHUNK_WORDS as usize)
                .map(|word| u64::from((load(chunk.get(), word) | load(other, word)).count_ones()))
                .sum::<u64>()
        };
        let bits: u64 = self.chunks.iter().enumerate().map(|(number, chunk)| count(number, chunk)).sum();
        bits << self.granularity_bits
    }

    /// Word that contains this bit.
    fn word(&self, bit: u64) -> u64 {
        let chunk = self.chunks[(bit / CHUNK_BITS) as usize].get();
        chunk.map_or(0, |words| words[(bit % CHUNK_BITS / WORD_BITS) as usize].load(Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn runs(bits: &LiveBits, mut at: u64, end: u64) -> Vec<(u64, bool)> {
        let mut runs = Vec::new();
        while at < end {
            let (length, dirty) = bits.run(at, end);
            assert!(length > 0);
            runs.push((length, dirty));
            at += length;
        }
        runs
    }

    proptest! {
        #[test]
        fn live_bits_match_dirty_bits(
            size in 1..200_000_u64,
            before in prop::collection::vec((0..220_000_u64, 1..40_000_u64), 0..4),
            marks in prop::collection::vec((0..220_000_u64, 0..70_000_u64), 0..6),
            start in 0..200_000_u64,
        ) {
            // The smallest granularity, 512 bytes, so that the disk spans several chunks.
            let (size, unit) = (size * 512, 512);
            let mut expected = DirtyBits::new(size, 9);
            for (at, length) in before {
                expected.mark(at * unit..(at + length) * unit - 1);
            }
            let live = LiveBits::of(&expected);
            for (at, length) in marks {
                let range = at * unit + 7..(at + length) * unit;
                let old = expected.clone();
                if range.start < range.end {
                    expected.mark(range.clone());
                }
                prop_assert_eq!(live.mark(range), old != expected);
            }
            prop_assert_eq!(&live.to_dirty_bits(), &expected);
            prop_assert_eq!(live.marked_bytes_of_union(None), expected.marked_bytes());
            let (mut other, mut union) = (DirtyBits::new(size, 9), expected.clone());
            for bits in [&mut other, &mut union] {
                bits.mark(size / 3..size / 3 * 2);
            }
            prop_assert_eq!(live.marked_bytes_of_union(Some(&LiveBits::of(&other))), union.marked_bytes());
            let start = start * unit % size;
            let all_runs = runs(&live, 0, size);
            let mut at = 0;
            let dirty = all_runs.iter().filter_map(|(length, dirty)| {
                at += length;
                dirty.then(|| at - length..at)
            });
            prop_assert!(dirty.eq(expected.marked()));
            // Adjacent runs differ, and a query from the middle of a run ends where the run does.
            prop_assert!(all_runs.windows(2).all(|pair| pair[0].1 != pair[1].1));
            let part = runs(&live, start, size);
            prop_assert_eq!(part.iter().map(|(length, _)| length).sum::<u64>(), size - start);
            prop_assert_eq!(&all_runs[all_runs.len() - part.len() + 1..], &part[1..]);
            prop_assert_eq!(live.run(size, size + 512), (512, true));
        }
    }
}
