//! The configuration space of a virtio block device, byte by byte (virtio 1.3 § 5.2.4).
//!
//! | offset | field | offset | field |
//! | --- | --- | --- | --- |
//! | 0 | capacity, in sectors | 34 | num_queues |
//! | 8 | size_max: not offered | 36 | max_discard_sectors |
//! | 12 | seg_max | 40 | max_discard_seg |
//! | 16 | geometry: not offered | 44 | discard_sector_alignment |
//! | 20 | blk_size | 48 | max_write_zeroes_sectors |
//! | 24 | topology | 52 | max_write_zeroes_seg |
//! | 32 | writeback | 56 | write_zeroes_may_unmap |
//!
//! Later fields belong to features that are not offered, and read as zeroes. A front end may read
//! any range of any length, also past the end. Cloud Hypervisor reads from 0x100, where devices on
//! a memory-mapped bus have their configuration; that offset is treated as 0.
//!
//! Bytes behind the last whole block are not offered. An export is rejected at the start, and a
//! resize is rejected, if the size is not a multiple of the block size. A front end that reconnects
//! is rejected if blocks are larger than those its guest has read, because each small write would
//! fail; the in-flight area records the guest's block size. Smaller blocks are harmless.

use super::features::VhostUserOffer;
use ::virtio::block::SECTOR_BYTES;

/// Bytes that can be non-zero, rounded up to the structure's alignment.
const BYTES: usize = 60;
/// Offset of the configuration on a memory-mapped bus (virtio 1.3 § 4.2.2).
const MMIO_OFFSET: u32 = 0x100;
/// Offset of `blk_size`.
const BLOCK: u32 = 20;
/// Length of the fields from the capacity to `blk_size`.
pub const TO_BLOCK_BYTES: usize = BLOCK as usize + size_of::<u32>();
/// Offset of `writeback`, the one byte that a guest may write: 0 selects write-through, 1 a write
/// cache.
const WRITEBACK: u32 = 32;

/// Returns `count` bytes of the configuration from `offset`.
pub fn read(offer: &VhostUserOffer, writeback: bool, offset: u32, count: usize) -> Vec<u8> {
    let space = encode(offer, writeback);
    let from = usize::try_from(normalized_offset(offset)).map_or(BYTES, |from| from.min(BYTES));
    let available = &space[from..];
    let mut piece = available[..count.min(available.len())].to_vec();
    piece.resize(count, 0);
    piece
}

/// New value of `writeback` for a guest's write of `content` at `offset`; `None` for any write
/// other than of exactly this byte.
pub fn written_writeback(offset: u32, content: &[u8]) -> Option<bool> {
    match (normalized_offset(offset), content) {
        (WRITEBACK, [value]) => Some(*value != 0),
        _ => None,
    }
}

/// Value of `writeback` in any range of a configuration that a front end migrates from another back
/// end; `None` if the range does not contain it.
pub fn migrated_writeback(offset: u32, content: &[u8]) -> Option<bool> {
    let at = usize::try_from(WRITEBACK.checked_sub(normalized_offset(offset))?).ok()?;
    content.get(at).map(|value| *value != 0)
}

/// Offset and content of a configuration write that sets `writeback`.
pub fn writeback(enabled: bool) -> (u32, [u8; 1]) {
    (WRITEBACK, [enabled.into()])
}

/// True if a read of this range returns the whole capacity.
pub fn covers_capacity(offset: u32, count: usize) -> bool {
    normalized_offset(offset) == 0 && count >= size_of::<u64>()
}

/// True if a read of this range returns the whole block size.
pub fn covers_block_size(offset: u32, count: usize) -> bool {
    let from = normalized_offset(offset);
    from <= BLOCK && u64::from(from) + count as u64 >= u64::from(BLOCK) + size_of::<u32>() as u64
}

fn normalized_offset(offset: u32) -> u32 {
    offset.checked_sub(MMIO_OFFSET).unwrap_or(offset)
}

fn encode(offer: &VhostUserOffer, writeback: bool) -> [u8; BYTES] {
    let mut space = [0; BYTES];
    let mut store = |at: usize, bytes: &[u8]| space[at..at + bytes.len()].copy_from_slice(bytes);
    // Capacity counts sectors, but only whole blocks are offered.
    let block = offer.block_bytes.max(1);
    let remainder = offer.size_bytes % u64::from(block);
    store(0, &((offer.size_bytes - remainder) / SECTOR_BYTES).to_le_bytes());
    store(12, &offer.segments().to_le_bytes());
    store(BLOCK as usize, &offer.block_bytes.to_le_bytes());
    // Topology counts in blocks. Its first field is the binary logarithm of physical per logical
    // block.
    let physical_blocks = (offer.physical_block_bytes / block).max(1);
    store(24, &[physical_blocks.ilog2() as u8]);
    // min_io_size: smaller writes need a read-modify-write of a physical block.
    let min_io_blocks = u16::try_from(physical_blocks).unwrap_or(u16::MAX);
    store(26, &min_io_blocks.to_le_bytes());
    store(28, &(offer.optimal_io_bytes / block).to_le_bytes());
    store(WRITEBACK as usize, &[u8::from(writeback)]);
    store(34, &offer.queues.to_le_bytes());
    let alignment = (u64::from(offer.discard_alignment_bytes) / SECTOR_BYTES).max(1) as u32;
    if !offer.read_only && offer.discard {
        store(36, &offer.max_erase_sectors.to_le_bytes());
        store(40, &offer.max_discard_segments.to_le_bytes());
        store(44, &alignment.to_le_bytes());
    }
    if !offer.read_only && offer.write_zeroes {
        store(48, &offer.max_erase_sectors.to_le_bytes());
        store(52, &offer.max_write_zeroes_segments.to_le_bytes());
        // write_zeroes_may_unmap: zeroed ranges may be deallocated if the request allows it.
        store(56, &[1]);
    }
    space
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn offer() -> VhostUserOffer {
        VhostUserOffer {
            size_bytes: (1 << 30) + 700,
            queues: 4,
            optimal_io_bytes: 65536,
            max_discard_segments: 7,
            max_write_zeroes_segments: 1,
            ..VhostUserOffer::default()
        }
    }

    /// The layout as a C compiler lays it out, field by field.
    #[test]
    fn fields_have_the_specified_offsets() {
        let space = read(&offer(), true, 0, 60);
        let number = |at: usize, bytes: usize| {
            space[at..at + bytes].iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
        };
        assert_eq!(number(0, 8), (1 << 21) + 1, "whole sectors");
        assert_eq!((number(8, 4), number(12, 4), number(16, 4)), (0, 126, 0), "segments, no geometry");
        assert_eq!(number(20, 4), 512);
        assert_eq!((number(24, 1), number(25, 1), number(26, 2), number(28, 4)), (3, 0, 8, 128));
        assert_eq!((number(32, 1), number(33, 1), number(34, 2)), (1, 0, 4));
        assert_eq!((number(36, 4), number(40, 4), number(44, 4)), (1 << 21, 7, 8));
        assert_eq!((number(48, 4), number(52, 4), number(56, 4)), (1 << 21, 1, 1));
        assert_eq!(read(&offer(), false, 32, 1), [0]);
    }

    /// Capacity and discards count in sectors with any block size (virtio 1.3 § 5.2.4).
    #[test]
    fn blocks_may_be_larger_than_sectors() {
        let number = |block_bytes, at: u32, bytes| {
            let size_bytes = (1 << 20) + 4096 + 2048 + 512;
            let offer = VhostUserOffer { block_bytes, size_bytes, discard_alignment_bytes: 65536, ..offer() };
            let space = read(&offer, true, at, bytes);
            space.iter().rev().fold(0_u64, |number, byte| number << 8 | u64::from(*byte))
        };
        for (block, capacity, physical_blocks_log2, optimal) in
            [(512, 2061, 3, 128), (1024, 2060, 2, 64), (2048, 2060, 1, 32), (4096, 2056, 0, 16)]
        {
            assert_eq!((number(block, 0, 8), number(block, 20, 4)), (capacity, block.into()));
            let topology = (number(block, 24, 1), number(block, 26, 2), number(block, 28, 4));
            assert_eq!(topology, (physical_blocks_log2, 1 << physical_blocks_log2, optimal), "{block}");
            assert_eq!((number(block, 36, 4), number(block, 44, 4)), (1 << 21, 128), "{block}");
        }
    }

    /// Without indirect descriptors, a longer request could never be placed.
    #[test]
    fn a_request_fits_into_the_ring() {
        for (queue_size, expect) in [(1024, 126), (128, 126), (127, 125), (64, 62), (4, 2), (1, 1)] {
            let space = read(&VhostUserOffer { queue_size, ..offer() }, true, 12, 4);
            assert_eq!(space, u32::to_le_bytes(expect), "{queue_size}");
        }
    }

    #[test]
    fn unoffered_requests_have_zero_limits() {
        let space = read(&VhostUserOffer { discard: false, ..offer() }, true, 36, 24);
        assert_eq!((&space[..12], space[20]), (&[0; 12][..], 1));
        let space = read(&VhostUserOffer { write_zeroes: false, ..offer() }, true, 36, 24);
        assert_eq!((space[4], &space[12..]), (7, &[0; 12][..]));
        assert_eq!(read(&VhostUserOffer { read_only: true, ..offer() }, true, 36, 24), [0; 24]);
    }

    #[test]
    fn partial_reads_cover_the_right_fields() {
        for (offset, count, block) in [
            (0, 60, true),
            (0, 24, true),
            (20, 4, true),
            (0x100, 96, true),
            (0, 23, false),
            (21, 4, false),
            (0, 0, false),
        ] {
            assert_eq!(covers_block_size(offset, count), block, "{offset} {count}");
        }
        assert!(
            covers_capacity(0, 8)
                && covers_capacity(0x100, 60)
                && !covers_capacity(0, 7)
                && !covers_capacity(1, 8)
        );
    }

    #[test]
    fn only_the_write_cache_can_be_written() {
        assert_eq!(written_writeback(32, &[0]), Some(false));
        assert_eq!(written_writeback(32, &[1]), Some(true));
        assert_eq!(written_writeback(0x120, &[1]), Some(true), "behind a memory-mapped bus");
        for (offset, content) in
            [(32, &[][..]), (32, &[1, 0]), (31, &[0, 1]), (0, &[1]), (33, &[1]), (u32::MAX, &[1])]
        {
            assert_eq!(written_writeback(offset, content), None, "{offset} {content:?}");
        }
        let migrated = |offset, writeback| migrated_writeback(offset, &read(&offer(), writeback, offset, 20));
        assert_eq!((migrated(20, true), migrated(32, false)), (Some(true), Some(false)));
        assert_eq!((migrated(0, true), migrated(33, true), migrated(0x200, true)), (None, None, None));
    }

    proptest! {
        /// A range of the configuration equals that range of the whole, padded with zeroes.
        #[test]
        fn any_range_can_be_read(offset: u32, small in 0_u32..0x200, count in 0_usize..200) {
            let space = read(&offer(), true, 0, 0x1000);
            for offset in [offset, small] {
                let from = offset.checked_sub(0x100).unwrap_or(offset) as usize;
                let expected: Vec<u8> =
                    (from..from + count).map(|at| space.get(at).copied().unwrap_or(0)).collect();
                prop_assert_eq!(read(&offer(), true, offset, count), expected);
            }
        }
    }
}
