//! Summary of the findings in one sentence, and its name for programs.

use super::findings::{Cause, Coverage, CoverageFinding};

named! { Verdict {
    NotLimited = "not-limited" / "nothing is limited",
    Missed = "missed" / "the limit misses everything that was found",
    Leaks = "leaks" / "a part of the I/O escapes the limit",
    Covered = "covered" / "the limit covers everything that was found",
    Idle = "idle" / "there is nothing that the limit could cover",
} }

impl Verdict {
    pub(super) fn of(findings: &[CoverageFinding]) -> Self {
        let any = |coverage| findings.iter().any(|finding| finding.coverage == coverage);
        let unlimited = |finding: &&CoverageFinding| {
            matches!(
                finding.cause,
                Cause::NoLimit | Cause::RootCgroup | Cause::IoNotEnabled | Cause::NoThrottling
            )
        };
        // An absent limit is reported as such, not as a limit that everything escapes.
        if findings.iter().any(|finding| unlimited(&finding)) && !any(Coverage::Covered) {
            return Self::NotLimited;
        }
        let alarm = findings.iter().any(|finding| finding.coverage.is_failure());
        match (alarm, any(Coverage::Covered) || any(Coverage::Partly)) {
            (true, false) => Self::Missed,
            (true, true) => Self::Leaks,
            (false, true) => Self::Covered,
            (false, false) => Self::Idle,
        }
    }
}
