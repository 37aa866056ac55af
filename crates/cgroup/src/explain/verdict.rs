//! The findings in one sentence, and its name for programs.

use std::fmt;

use super::findings::{Cause, Coverage, Finding};

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    NotLimited,
    /// It covers nothing that was found.
    Missed,
    /// It covers some of it.
    Leaks,
    Covered,
    /// Nothing was found that it could cover.
    Idle,
}

impl Verdict {
    pub(super) fn of(findings: &[Finding]) -> Self {
        let any = |coverage| findings.iter().any(|finding| finding.coverage == coverage);
        let unlimited = |finding: &&Finding| {
            matches!(
                finding.cause,
                Cause::NoLimit | Cause::RootCgroup | Cause::IoNotEnabled | Cause::NoThrottling
            )
        };
        if findings.iter().any(|finding| unlimited(&finding)) && !any(Coverage::Covered) {
            return Self::NotLimited;
        }
        let alarm = findings.iter().any(|finding| finding.coverage.alarms());
        match (alarm, any(Coverage::Covered) || any(Coverage::Partly)) {
            (true, false) => Self::Missed,
            (true, true) => Self::Leaks,
            (false, true) => Self::Covered,
            (false, false) => Self::Idle,
        }
    }

    pub(super) fn name(self) -> &'static str {
        match self {
            Self::NotLimited => "not-limited",
            Self::Missed => "missed",
            Self::Leaks => "leaks",
            Self::Covered => "covered",
            Self::Idle => "idle",
        }
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotLimited => "nothing is limited",
            Self::Missed => "the limit misses everything that was found",
            Self::Leaks => "a part of the I/O escapes the limit",
            Self::Covered => "the limit covers everything that was found",
            Self::Idle => "there is nothing that the limit could cover",
        })
    }
}
