//! A request of a simulation: when it comes, and what it asks for.
//!
//! Never carries data: what limits, prefetching and devices decide depends on none.

pub(crate) use crate::trace::Op;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    /// When it comes, in nanoseconds from the beginning.
    pub(crate) at_ns: u64,
    pub(crate) disk: usize,
    pub(crate) op: Op,
    /// The first byte, and how many; inside the disk. No bytes of a flush.
    pub(crate) offset: u64,
    pub(crate) length: u64,
}
