//! A request as a trace tells of it: when, which disk, what, where, how much.

/// A disk of a trace: its index into the names that the reader keeps, in the order in which they
/// appear.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct DiskId(pub(crate) u32);

impl DiskId {
    pub(crate) fn index(self) -> usize {
        self.0 as usize
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Op {
    /// Makes sure of what was written before. Has no place and no length.
    Flush,
    Read,
    Write,
    /// Gives up what is there.
    Discard,
    /// Writes zeroes, without sending them.
    WriteZeroes,
}

impl Op {
    pub(crate) const ALL: [Self; 5] =
        [Self::Flush, Self::Read, Self::Write, Self::Discard, Self::WriteZeroes];

    /// Its name in weir's CSV.
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
    /// When it came, in nanoseconds since the trace's first record.
    pub(crate) time_ns: u64,
    /// Where it begins, in bytes; 0 for a flush.
    pub(crate) offset: u64,
    /// How much it is, in bytes: never 0 but for a flush, where it always is; `offset + length`
    /// fits into 64 bits.
    pub(crate) length: u64,
    /// The line that tells of it, from 1, for messages; several records may come of one line.
    pub(crate) line: u64,
    pub(crate) disk: DiskId,
    /// The file that tells of it, where several are read as one; its name is `Source::place`'s.
    pub(crate) file: u16,
    pub(crate) op: Op,
}

impl Record {
    /// What decides which of two records comes first: the time, and where that is the same the
    /// order in the trace. A line that tells of a flush and a write (`FW` of blkparse) means them
    /// in this order.
    #[inline]
    pub(super) fn order(&self) -> (u64, u64, Op) {
        (self.time_ns, self.line, self.op)
    }
}
