//! Detects zeroes in data that is copied, which need not be written.
//!
//! Never changes the data.
//!
//! Runs shorter than a grain (a file system's block or a cluster of the target) save nothing.

use std::ops::Range;

/// True if all bytes are zero; stops at the first block that is not.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Compilers turn blocks of this size into a few wide instructions.
    let blocks = bytes.chunks_exact(256);
    let rest = blocks.remainder();
    blocks.into_iter().all(|block| block.iter().fold(0, |all, &byte| all | byte) == 0)
        && rest.iter().all(|&byte| byte == 0)
}

/// Divides `bytes`, which begin at `offset` of the disk, into adjacent runs of data (true) and of
/// zeroes. A run of zeroes consists of grains of `grain` bytes, aligned on the disk, and has at
/// least `min_bytes` bytes or all of `bytes`.
pub fn runs(bytes: &[u8], offset: u64, grain: usize, min_bytes: usize) -> Vec<(Range<usize>, bool)> {
    let mut runs: Vec<(Range<usize>, bool)> = Vec::new();
    let mut at = 0;
    while at < bytes.len() {
        // Grains are aligned on the disk, so the first one may be partial.
        let into = ((offset + at as u64) % grain as u64) as usize;
        let end = bytes.len().min(at + grain - into);
        let data = !is_zero(&bytes[at..end]);
        match runs.last_mut() {
            Some((range, kind)) if *kind == data => range.end = end,
            _ => runs.push((at..end, data)),
        }
        at = end;
    }
    if min_bytes > grain {
        // Runs of zeroes that are too short are merged into the data around them.
        join_short(&mut runs, min_bytes.min(bytes.len()));
    }
    runs
}

fn join_short(runs: &mut Vec<(Range<usize>, bool)>, min_bytes: usize) {
    let mut joined: Vec<(Range<usize>, bool)> = Vec::with_capacity(runs.len());
    for (range, data) in runs.drain(..) {
        let data = data || range.len() < min_bytes;
        match joined.last_mut() {
            Some((last, kind)) if *kind == data => last.end = range.end,
            _ => joined.push((range, data)),
        }
    }
    *runs = joined;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn bytes(blocks: &str) -> Vec<u8> {
        blocks.bytes().flat_map(|block| [if block == b'0' { 0 } else { block }; 512]).collect()
    }

    fn data_of(blocks: &str, offset: u64, grain: usize, min_blocks: usize) -> Vec<(usize, usize)> {
        let runs = runs(&bytes(blocks), offset * 512, grain * 512, min_blocks * 512);
        let data = runs.into_iter().filter(|(_, data)| *data);
        data.map(|(range, _)| (range.start / 512, range.end / 512)).collect()
    }

    #[test]
    fn only_aligned_zero_grains_are_skipped() {
        assert_eq!(data_of("a00b0000", 0, 2, 2), [(0, 4)]);
        assert_eq!(data_of("a000b000", 0, 2, 2), [(0, 2), (4, 6)]);
        assert_eq!(data_of("0a00", 1, 2, 2), [(1, 3)], "grains lie where they lie on the disk");
        assert_eq!(data_of("0000", 0, 1, 1), []);
    }

    #[test]
    fn runs_that_are_too_short_are_written() {
        assert_eq!(data_of("a0b000c0", 0, 1, 3), [(0, 3), (6, 8)]);
        assert_eq!(data_of("00", 0, 1, 8), [], "all of it is zeroes");
        assert_eq!(data_of("0a", 0, 1, 8), [(0, 2)]);
    }

    proptest! {
        #[test]
        fn skipped_ranges_are_zero(blocks in "[0a]{1,40}", offset in 0_u64..9, grain in 1_usize..5, least in 1_usize..9) {
            let bytes = bytes(&blocks);
            let mut end = 0;
            for (range, data) in runs(&bytes, offset * 512, grain * 512, least * 512) {
                prop_assert_eq!(range.start, end);
                prop_assert!(data || bytes[range.clone()].iter().all(|&byte| byte == 0));
                end = range.end;
            }
            prop_assert_eq!(end, bytes.len());
        }

        #[test]
        fn one_byte_anywhere_is_found(length in 1_usize..2000, at in 0_usize..2000) {
            let mut bytes = vec![0; length];
            prop_assert!(is_zero(&bytes));
            bytes[at % length] = 1;
            prop_assert!(!is_zero(&bytes));
        }
    }
}
