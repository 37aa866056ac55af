//! How requests fared, where a trace tells: kept beside its records, for who asks for it.

use std::collections::HashMap;

use super::{
    disks::Disks,
    error::shown,
    file::Times,
    record::{DiskId, Record},
};

/// How a request fared, as it was measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Outcome<'a> {
    /// Waiting and service time.
    pub times: Times,
    /// True if the request ended with an error.
    pub has_failed: bool,
    /// What it waited for last.
    pub limit: Option<&'a str>,
}

/// The same, with the number of the limit.
#[derive(Clone, Copy, Debug)]
pub struct Noted {
    times: Times,
    has_failed: bool,
    limit: Option<DiskId>,
}

/// Of requests that were read and not asked for yet.
pub(super) struct Outcomes {
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

    /// To be asked once of each request.
    pub(super) fn take(&mut self, record: &Record) -> Option<Noted> {
        self.by_line.remove(&record.line)
    }

    pub(super) fn named(&self, noted: Noted) -> Outcome<'_> {
        let Noted { times, has_failed, limit } = noted;
        Outcome { times, has_failed, limit: limit.map(|limit| &*self.limits.names()[limit.index()]) }
    }
}

/// As a trace tells it.
pub(super) struct Told<'a> {
    pub(super) times: Times,
    pub(super) has_failed: bool,
    pub(super) limit: Option<&'a [u8]>,
}
