//! The bits of one bitmap in memory.
//!
//! At most 512 MiB, by the format's rules; 20 MiB for 10 TiB at a granularity of 64 KiB.

use std::ops::Range;

/// Bits of a bitmap. See the head of this file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DirtyBits {
    size_bytes: u64,
    granularity_bits: u32,
    bytes: Vec<u8>,
}

impl DirtyBits {
    /// Creates a bitmap without marks.
    pub fn new(size_bytes: u64, granularity_bits: u32) -> Self {
        let bits = size_bytes.div_ceil(1 << granularity_bits);
        Self { size_bytes, granularity_bits, bytes: vec![0; bits.div_ceil(8) as usize] }
    }

    /// Size of the bits for such a disk, in bytes.
    pub(super) fn bytes_for(size_bytes: u64, granularity_bits: u32) -> u64 {
        size_bytes.div_ceil(1 << granularity_bits).div_ceil(8)
    }

    /// Number of marked bytes; the last granule counts in full.
    pub fn marked_bytes(&self) -> u64 {
        let bits: u64 = self.bytes.iter().map(|byte| u64::from(byte.count_ones())).sum();
        bits << self.granularity_bits
    }

    /// Returns the marks for a disk of another size: added parts are unmarked, marks beyond the
    /// end are dropped.
    pub(super) fn resized(&self, size_bytes: u64) -> Self {
        let mut resized = Self::new(size_bytes, self.granularity_bits);
        resized.fill(0, self.bytes.iter().copied());
        resized
    }

    /// Size of the disk in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    /// A bit covers `1 << granularity_bits` bytes.
    pub fn granularity_bits(&self) -> u32 {
        self.granularity_bits
    }

    /// Bits as stored: the first one is the least significant bit of the first byte.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Copies stored bytes to byte `at`; bits after the last one are cleared.
    pub(super) fn fill(&mut self, at: usize, stored: impl Iterator<Item = u8>) {
        for (byte, stored) in self.bytes.iter_mut().skip(at).zip(stored) {
            *byte = stored;
        }
        let tail = self.size_bytes.div_ceil(1 << self.granularity_bits) % 8;
        if let Some(last) = self.bytes.last_mut().filter(|_| tail > 0) {
            *last &= (1 << tail) - 1;
        }
    }

    /// Marks every bit that the range touches; the part outside the disk is ignored.
    pub fn mark(&mut self, range: Range<u64>) {
        let end = range.end.min(self.size_bytes);
        if range.start >= end {
            return;
        }
        let (first, last) = (range.start >> self.granularity_bits, (end - 1) >> self.granularity_bits);
        let (from_first, to_last) = (u8::MAX << (first % 8), u8::MAX >> (7 - last % 8));
        let (first, last) = ((first / 8) as usize, (last / 8) as usize);
        if first == last {
            self.bytes[first] |= from_first & to_last;
        } else {
            self.bytes[first] |= from_first;
            self.bytes[first + 1..last].fill(u8::MAX);
            self.bytes[last] |= to_last;
        }
    }

    /// Marked ranges of the disk; adjacent ones are merged.
    pub fn marked(&self) -> impl Iterator<Item = Range<u64>> + '_ {
        let bits = self.size_bytes.div_ceil(1 << self.granularity_bits);
        let mut at = 0;
        std::iter::from_fn(move || {
            at = self.next(at, bits, true);
            if at == bits {
                return None;
            }
            let start = at;
            at = self.next(at, bits, false);
            Some(start << self.granularity_bits..(at << self.granularity_bits).min(self.size_bytes))
        })
    }

    /// First bit from `at` on that equals `set`; `bits` if there is none.
    fn next(&self, mut at: u64, bits: u64, set: bool) -> u64 {
        let skip = if set { 0 } else { u8::MAX };
        while at < bits {
            let byte = self.bytes[(at / 8) as usize];
            if at.is_multiple_of(8) && byte == skip {
                at += 8;
            } else if (byte >> (at % 8) & 1 == 1) == set {
                return at;
            } else {
                at += 1;
            }
        }
        bits
    }

    /// Adds the marks of another bitmap of any granularity.
    pub fn merge(&mut self, other: &Self) {
        for range in other.marked() {
            self.mark(range);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marked_bits_are_returned_as_runs() {
        let mut bits = DirtyBits::new(100_000, 9);
        for range in [0..1, 511..513, 5000..9000, 99_999..200_000, 7..7] {
            bits.mark(range);
        }
        assert_eq!(bits.marked().collect::<Vec<_>>(), [0..1024, 4608..9216, 99_840..100_000]);
        let mut coarse = DirtyBits::new(100_000, 16);
        coarse.merge(&bits);
        assert_eq!(coarse.marked().next(), Some(0..100_000));
        assert_eq!(coarse.marked().count(), 1);
    }

    #[test]
    fn resize_keeps_the_common_part() {
        let mut bits = DirtyBits::new(5 << 16, 16);
        bits.mark(3 << 16..5 << 16);
        let less = bits.resized((3 << 16) + 512);
        let only = |bits: &DirtyBits| (bits.marked().next(), bits.marked().count());
        assert_eq!(only(&less), (Some(3 << 16..(3 << 16) + 512), 1));
        assert_eq!(only(&less.resized(9 << 16)), (Some(3 << 16..4 << 16), 1));
    }

    #[test]
    fn bits_beyond_the_end_are_ignored() {
        let mut bits = DirtyBits::new(5 << 16, 16);
        bits.fill(0, [0xff; 100].into_iter());
        assert_eq!(bits.bytes(), [0x1f]);
    }
}
