//! A request of a simulation, without data.

pub use recording::RequestOp;

/// A request of a simulation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SimulatedRequest {
    /// Arrival in nanoseconds.
    pub at_ns: u64,
    /// Index of its disk.
    pub disk: usize,
    /// Its operation.
    pub op: RequestOp,
    /// Offset in bytes; a request lies inside the disk, and a flush has length 0.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}
