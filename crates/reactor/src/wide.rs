//! The ring of a reactor: with entries of 64 bytes, or of 128, which commands of FUSE take.
//!
//! The kernel has one size for all entries of a ring (or lets them be mixed, from 6.19 on), and
//! longer ones cost every operation a little. So they are longer only where the kernel has FUSE
//! over io_uring switched on, which no distribution does by itself.

use std::{io, sync::OnceLock};

use io_uring::{IoUring, Parameters, Submitter, cqueue, squeue};

pub(super) enum Ring {
    Plain(IoUring),
    Wide(IoUring<squeue::Entry128>),
}

/// Whether the rings of this process take commands of FUSE: what the kernel said when it was asked
/// first.
pub fn takes_fuse_commands() -> bool {
    static WIDE: OnceLock<bool> = OnceLock::new();
    const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
    *WIDE.get_or_init(|| std::fs::read(SWITCH).is_ok_and(|value| value.starts_with(b"Y")))
}

macro_rules! either {
    ($self:expr, $ring:ident => $what:expr) => {
        match $self {
            Self::Plain($ring) => $what,
            Self::Wide($ring) => $what,
        }
    };
}

impl Ring {
    pub(super) fn params(&self) -> &Parameters {
        either!(self, ring => ring.params())
    }

    pub(super) fn submitter(&self) -> Submitter<'_> {
        either!(self, ring => ring.submitter())
    }

    pub(super) fn submit_and_wait(&self, want: usize) -> io::Result<usize> {
        either!(self, ring => ring.submit_and_wait(want))
    }

    /// Entries that are queued, and whether the kernel has put off work or completions.
    pub(super) fn queued(&mut self) -> (usize, bool) {
        either!(self, ring => {
            let submission = ring.submission();
            (submission.len(), submission.taskrun() || submission.cq_overflow())
        })
    }

    pub(super) fn has_completions(&mut self) -> bool {
        either!(self, ring => !ring.completion().is_empty() || ring.submission().taskrun())
    }

    pub(super) fn completion(&mut self) -> cqueue::CompletionQueue<'_> {
        either!(self, ring => ring.completion())
    }

    /// Queues an entry; `false` where there is no room.
    ///
    /// # Safety
    /// What it refers to is there until it has completed.
    pub(super) unsafe fn push(&mut self, entry: &squeue::Entry) -> bool {
        match self {
            // SAFETY: passed on to the caller.
            Self::Plain(ring) => unsafe { ring.submission().push(entry) }.is_ok(),
            // SAFETY: passed on to the caller.
            Self::Wide(ring) => unsafe { ring.submission().push(&entry.clone().into()) }.is_ok(),
        }
    }

    /// Queues a long entry; `false` where there is no room.
    ///
    /// # Safety
    /// As for [`Ring::push`].
    ///
    /// # Panics
    /// If the ring has short ones.
    pub(super) unsafe fn push_long(&mut self, entry: &squeue::Entry128) -> bool {
        match self {
            Self::Plain(_) => panic!("this thread's ring has short entries"),
            // SAFETY: passed on to the caller.
            Self::Wide(ring) => unsafe { ring.submission().push(entry) }.is_ok(),
        }
    }
}
