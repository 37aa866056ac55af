//! Events, requests to the store and its answers, and processes with clocks of their own.

use crate::cluster::{Grant, Report, Spec, Term};
use crate::time::Instant;
use alloc::boxed::Box;
use alloc::vec::Vec;

#[derive(Debug)]
pub(super) enum Event {
    HostTicks(usize, u64),
    HostRuns(usize, u64),
    ToHost(usize, u64, Option<Term>, Option<Grant>),
    LeaderTicks(usize, u64),
    LeaderRuns(usize, u64),
    ToLeader(usize, u64, Answer),
    AtStore(usize, u64, Ask),
}

#[derive(Debug)]
pub(super) enum Ask {
    Host,
    Name,
    Report(Box<Report>),
    Campaign(u64, Instant),
    KeepAlive(Term, Instant),
    Read,
    Write(Term, Vec<(usize, Grant)>),
    Sweep(Term, usize, Box<Grant>),
}

#[derive(Clone, Debug)]
pub(super) enum Answer {
    Elected(Term, Spec, Instant),
    Kept(Instant),
    Deposed(Term),
    Read(Spec, Vec<(usize, Report)>),
    Gone(usize),
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) ppm: i64,
    pub(super) offset: u64,
    pub(super) paused_until: u64,
    pub(super) is_cut: bool,
    /// Number of the run. Events for earlier runs are dropped.
    pub(super) run: u64,
}

impl Place {
    pub(super) fn local(&self, now: u64) -> u64 {
        let off = i128::from(now) * i128::from(self.ppm) / 1_000_000;
        (i128::from(now) + off) as u64 + self.offset
    }

    /// True time of an instant of this clock, rounded up.
    pub(super) fn real(&self, local: u64) -> u64 {
        let since = i128::from(local.saturating_sub(self.offset));
        (since * 1_000_000 / i128::from(1_000_000 + self.ppm)) as u64 + 1
    }
}
