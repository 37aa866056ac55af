//! What policy needs to know of a request: its direction, its place and its size. Never its data.

/// Which of a disk's two queues a request waits in, and which buckets apply to it.
///
/// Discards and write-zeroes count as writes (QEMU's docs/throttle.txt: they change the disk).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Direction {
    /// Reads, also of holes that are answered without touching the disk.
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
