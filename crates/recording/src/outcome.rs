//! Outcomes of requests, if a trace contains them; stored separately from the records until they
//! are fetched.

use std::collections::HashMap;

use super::{
    disks::TraceDisks,
    error::shown,
    file::RecordedTimes,
    record::{DiskId, TraceRecord},
};

/// Measured outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestOutcome<'a> {
    /// Waiting and service time.
    pub times: RecordedTimes,
    /// True if the request failed.
    pub has_failed: bool,
    /// Limit that it waited for last.
    pub limit: Option<&'a str>,
}

/// An outcome as stored: the limit by its number.
#[derive(Clone, Copy, Debug)]
pub struct NumberedOutcome {
    times: RecordedTimes,
    has_failed: bool,
    limit: Option<DiskId>,
}

/// Outcomes of requests that were read and not fetched yet.
pub(super) struct Outcomes {
    // By line: the reorder window changes the order of records, but not their lines.
    by_line: HashMap<u64, NumberedOutcome>,
    limits: TraceDisks,
}

impl Outcomes {
    pub(super) fn new() -> Self {
        Self { by_line: HashMap::new(), limits: TraceDisks::default() }
    }

    pub(super) fn push(&mut self, line: u64, outcome: ParsedOutcome<'_>) -> Result<(), String> {
        let ParsedOutcome { times, has_failed, limit } = outcome;
        let number = |name: &[u8]| {
            self.limits.id(name).map_err(|_| format!("the name {} of a limit is invalid", shown(name)))
        };
        let limit = limit.map(number).transpose()?;
        self.by_line.insert(line, NumberedOutcome { times, has_failed, limit });
        Ok(())
    }

    /// Removes and returns an outcome; must be called once for each request.
    pub(super) fn remove(&mut self, record: &TraceRecord) -> Option<NumberedOutcome> {
        self.by_line.remove(&record.line)
    }

    pub(super) fn with_limit_names(&self, numbered: NumberedOutcome) -> RequestOutcome<'_> {
        let NumberedOutcome { times, has_failed, limit } = numbered;
        RequestOutcome { times, has_failed, limit: limit.map(|limit| &*self.limits.names()[limit.index()]) }
    }
}

/// An outcome as parsed from a trace.
pub(super) struct ParsedOutcome<'a> {
    pub(super) times: RecordedTimes,
    pub(super) has_failed: bool,
    pub(super) limit: Option<&'a [u8]>,
}
