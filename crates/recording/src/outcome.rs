//! Outcomes of requests, if a trace contains them; stored beside the records until they are
//! fetched.

use std::collections::HashMap;

use super::{
    disks::Disks,
    error::shown,
    file::Times,
    record::{DiskId, Record},
};

/// Measured outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome<'a> {
    /// Waiting and service time.
    pub times: Times,
    /// True if the request failed.
    pub has_failed: bool,
    /// Limit that it waited for last.
    pub limit: Option<&'a str>,
}

/// An outcome with the number of its limit.
#[derive(Clone, Copy, Debug)]
pub struct Noted {
    times: Times,
    has_failed: bool,
    limit: Option<DiskId>,
}

/// Outcomes of requests that were read and not fetched yet.
pub(super) struct Outcomes {
    // The window reorders records; their line identifies them afterwards.
    by_line: HashMap<u64, Noted>,
    limits: Disks,
}

impl Outcomes {
    pub(super) fn new() -> Self {
        Self { by_line: HashMap::new(), limits: Disks::default() }
    }

    pub(super) fn note(&mut self, line: u64, outcome: Told<'_>) -> Result<(), String> {
        let Told { times, has_failed, limit } = outcome;
        let number = |name: &[u8]| {
            self.limits.id(name).map_err(|_| format!("the limit's name {} is not one", shown(name)))
        };
        let limit = limit.map(number).transpose()?;
        self.by_line.insert(line, Noted { times, has_failed, limit });
        Ok(())
    }

    /// Removes and returns an outcome; must be called once for each request.
    pub(super) fn take(&mut self, record: &Record) -> Option<Noted> {
        self.by_line.remove(&record.line)
    }

    pub(super) fn named(&self, noted: Noted) -> Outcome<'_> {
        let Noted { times, has_failed, limit } = noted;
        Outcome { times, has_failed, limit: limit.map(|limit| &*self.limits.names()[limit.index()]) }
    }
}

/// An outcome as parsed from a trace.
pub(super) struct Told<'a> {
    pub(super) times: Times,
    pub(super) has_failed: bool,
    pub(super) limit: Option<&'a [u8]>,
}
