//! A request in a trace: time, disk, operation, offset, length.

use policy::request::Direction;

/// Index of a disk into the reader's names, in order of appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskId(pub u32);

impl DiskId {
    /// Index into the names of disks.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// Operation of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RequestOp {
    /// Makes completed writes durable.
    Flush,
    /// Reads data.
    Read,
    /// Writes data.
    Write,
    /// Deallocates a range.
    Discard,
    /// Writes zeroes.
    WriteZeroes,
}

impl RequestOp {
    /// All operations.
    pub const ALL: [Self; 5] = [Self::Flush, Self::Read, Self::Write, Self::Discard, Self::WriteZeroes];

    /// Name in weir's CSV.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Flush => "flush",
            Self::Read => "read",
            Self::Write => "write",
            Self::Discard => "discard",
            Self::WriteZeroes => "write-zeroes",
        }
    }

    /// Direction whose limits apply; `None` for a flush, to which no limit applies.
    pub const fn direction(self) -> Option<Direction> {
        match self {
            Self::Read => Some(Direction::Read),
            Self::Write | Self::Discard | Self::WriteZeroes => Some(Direction::Write),
            Self::Flush => None,
        }
    }
}

/// A request of a trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceRecord {
    /// Nanoseconds since the trace's first record.
    pub time_ns: u64,
    /// Offset in bytes; 0 for a flush.
    pub offset: u64,
    /// Length in bytes: 0 only for a flush; `offset + length` fits into 64 bits.
    pub length: u64,
    /// Line in the file, from 1; several records may have one line.
    pub line: u64,
    /// Number of its disk.
    pub disk: DiskId,
    /// Number of its file among merged ones; `RecordSource::place` returns the name.
    pub file: u16,
    /// Operation.
    pub op: RequestOp,
}

impl TraceRecord {
    /// Sort key: time, then order in the trace. `FW` of blkparse is a flush followed by a write.
    #[inline]
    pub(super) fn order(&self) -> (u64, u64, RequestOp) {
        (self.time_ns, self.line, self.op)
    }
}

/// A completed request with its measured times.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompletedRequest {
    /// Arrival in nanoseconds, on one clock for all disks.
    pub arrived_ns: u64,
    /// Nanoseconds until its limits admitted it.
    pub wait_ns: u64,
    /// Nanoseconds from admission to completion.
    pub service_ns: u64,
    /// Length in bytes; 0 for a flush.
    pub length: u64,
    /// Operation.
    pub op: RequestOp,
}
