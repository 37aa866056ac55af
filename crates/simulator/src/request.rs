//! A request of a simulation, without data.

pub use recording::Op;

/// A request of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Instant of its arrival.
    pub at_ns: u64,
    /// Index of its disk.
    pub disk: usize,
    /// Its operation.
    pub op: Op,
    /// In bytes; inside the disk, and 0 long for a flush.
    pub offset: u64,
    /// In bytes.
    pub length: u64,
}
