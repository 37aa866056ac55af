//! The kinds of throttle causes: the limits of a node, and its cap.
//!
//! A cap has limits of the same kinds, but its rates are not a setting: a report that names one of
//! them would lead an operator to a limit that is not configured.

use super::limits::{LimitKind, LimitPart, LimitSetting};

/// Kind of a throttle cause.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum CauseKind {
    /// A limit of the node: as configured, or as the quota of a limit of many hosts.
    Limit(LimitKind),
    /// The cap of the node, which a controller set for the latency target of another member.
    LatencyTarget,
}

impl CauseKind {
    /// Name in reports: that of the limit's rate, such as `iops-total`, or `latency-target`.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Limit(kind) => LimitSetting::Limit(kind, LimitPart::Rate).name(),
            Self::LatencyTarget => "latency-target",
        }
    }
}
