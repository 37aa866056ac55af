//! A request as a trace tells of it: when, which disk, what, where, how much.

/// A disk's index into the reader's names, in order of appearance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct DiskId(pub(crate) u32);

impl DiskId {
    pub(crate) fn index(self) -> usize {
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
    pub(crate) const ALL: [Self; 5] =
        [Self::Flush, Self::Read, Self::Write, Self::Discard, Self::WriteZeroes];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Flush => "flush",
            Self::Read => "read",
            Self::Write => "write",
            Self::Discard => "discard",
            Self::WriteZeroes => "write-zeroes",
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Record {
    /// Nanoseconds since the trace's first record.
    pub(crate) time_ns: u64,
    /// In bytes; 0 for a flush.
    pub(crate) offset: u64,
    /// In bytes: 0 only for a flush; `offset + length` fits into 64 bits.
    pub(crate) length: u64,
    /// From 1; several records may come of one line.
    pub(crate) line: u64,
    pub(crate) disk: DiskId,
    /// Which of several merged files; `Source::place` names it.
    pub(crate) file: u16,
    pub(crate) op: Op,
}

impl Record {
    /// By time, then order in the trace; `FW` of blkparse is a flush and then a write.
    #[inline]
    pub(super) fn order(&self) -> (u64, u64, Op) {
        (self.time_ns, self.line, self.op)
    }
}
