//! Label values of metrics: directions, limits and owners.

use block::measures::Whose;
use policy::{
    request::Direction,
    throttle::{LimitKind, Part, Setting},
};

pub(super) fn name_of(direction: Direction) -> &'static str {
    match direction {
        Direction::Read => "read",
        Direction::Write => "write",
    }
}

pub(super) fn name_of_owner(whose: Whose) -> &'static str {
    match whose {
        Whose::Disk => "disk",
        Whose::Group => "group",
        Whose::Above => "above",
    }
}

pub(super) const fn name_of_limit(kind: LimitKind) -> &'static str {
    Setting::Limit(kind, Part::Rate).name()
}
