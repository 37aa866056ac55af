//! The direction of a request. Policy sees direction, offset and size, never the data.

/// Direction of a request: selects the queue of the disk and the buckets that apply.
///
/// Discards and write-zeroes count as writes (QEMU's docs/throttle.txt: they change the disk).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Reads, including reads of holes, which do not reach the storage.
    Read,
    /// Writes, write-zeroes and discards.
    Write,
}

impl Direction {
    /// Both directions, in the order of [`Direction::index`].
    pub const ALL: [Self; 2] = [Self::Read, Self::Write];

    /// 0 for reads, 1 for writes.
    pub const fn index(self) -> usize {
        self as usize
    }
}
