//! A request of a simulation, without data.

pub(crate) use recording::Op;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Request {
    pub(crate) at_ns: u64,
    pub(crate) disk: usize,
    pub(crate) op: Op,
    /// In bytes; inside the disk, and 0 long for a flush.
    pub(crate) offset: u64,
    pub(crate) length: u64,
}
