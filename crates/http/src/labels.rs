//! Label values of metrics: directions, limits, and owners of limits (disk, its group, a group
//! above that).

use block::measures::CauseLevel;
use policy::{
    request::Direction,
    throttle::{LimitKind, LimitPart, LimitSetting},
};

pub(super) fn direction_label(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}

pub(super) fn level_label(level: CauseLevel) -> &'static str {
    match level {
        CauseLevel::Disk => "disk",
        CauseLevel::Group => "group",
        CauseLevel::Above => "above",
    }
}

pub(super) const fn limit_label(kind: LimitKind) -> &'static str {
    LimitSetting::Limit(kind, LimitPart::Rate).name()
}
