//! A request as a trace tells of it: when, which disk, what, where, how much.

use policy::request::Direction;

/// A disk's index into the reader's names, in order of appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DiskId(pub u32);

impl DiskId {
    /// Index into the names of disks.
    pub fn index(self) -> usize {
        self.0 as usize
    }
}

/// What a request does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Op {
    /// Makes what was written durable.
    Flush,
    /// Reads.
    Read,
    /// Writes.
    Write,
    /// Lets go of what is there.
    Discard,
    /// Writes zeroes.
    WriteZeroes,
}

impl Op {
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

    /// Direction whose limits apply; `None` for a flush, which no limit applies to.
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
pub struct Record {
    /// Nanoseconds since the trace's first record.
    pub time_ns: u64,
    /// In bytes; 0 for a flush.
    pub offset: u64,
    /// In bytes: 0 only for a flush; `offset + length` fits into 64 bits.
    pub length: u64,
    /// From 1; several records may come of one line.
    pub line: u64,
    /// Its disk.
    pub disk: DiskId,
    /// Which of several merged files; `Source::place` names it.
    pub file: u16,
    /// Its operation.
    pub op: Op,
}

impl Record {
    /// By time, then order in the trace; `FW` of blkparse is a flush and then a write.
    #[inline]
    pub(super) fn order(&self) -> (u64, u64, Op) {
        (self.time_ns, self.line, self.op)
    }
}

/// A request as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Past {
    /// Nanoseconds, on one clock for all disks.
    pub arrived_ns: u64,
    /// Nanoseconds until its limits let it pass.
    pub wait_ns: u64,
    /// Nanoseconds from then until it was answered.
    pub service_ns: u64,
    /// In bytes; 0 for a flush.
    pub length: u64,
    /// What it did.
    pub op: Op,
}
