//! Limits of a disk or a group over time: the lines that charts draw over its activity.
//!
//! A line shows the object's own limit, else the limit of the nearest group above that has one,
//! separately for operations and bytes. A change ends the line and begins a new one, so memory
//! grows with changes, not with time. Beyond a fixed number of lines the oldest is dropped, and its
//! successor is extended to the dropped line's begin.

use std::{collections::BTreeMap, sync::Arc};

use api::{ActivityObject, LimitInterval};
use policy::throttle::{LimitKind, LimitPart, LimitSetting};
use serde_json::Value;

/// Maximum number of lines of one disk or group. At most eight limits are set at a time.
const MAX_LINES: usize = 24;
/// Growth of the allocation, in lines: most objects have one or two.
const GROWTH: usize = 4;
/// End of a line that continues.
const OPEN_END: u64 = u64::MAX;

/// A limit to draw.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DrawnLimit {
    setting: LimitSetting,
    /// Group above that has the limit; `None` for the object's own.
    group: Option<Arc<str>>,
    value: u64,
}

/// Line from a second since the Epoch until before another.
#[derive(Debug)]
struct LimitLine {
    drawn: DrawnLimit,
    from: u64,
    until: u64,
}

/// Recent lines, ordered by their begin.
#[derive(Debug, Default)]
pub(super) struct LimitLines(Vec<LimitLine>);

/// Limits to draw for a disk or a group now.
pub(super) fn drawn_limits(
    object: &ActivityObject,
    groups: &BTreeMap<Arc<str>, ActivityObject>,
) -> Vec<DrawnLimit> {
    let above = |object: &ActivityObject| {
        let name = object.get("group")?.as_str()?;
        groups.get_key_value(name)
    };
    let own_and_above = std::iter::successors(Some((None, object)), |(_, object)| {
        above(object).map(|(name, group)| (Some(name), group))
    });
    let holders: Vec<_> = own_and_above.map(|(of, object)| (of, limits(object))).collect();
    let of_unit = |bytes: bool| {
        let is_of_unit = move |(kind, ..): &&(LimitKind, LimitSetting, u64)| kind.counts_bytes() == bytes;
        let mut each = holders.iter().map(move |(of, limits)| (of, limits.iter().filter(is_of_unit)));
        let nearest = each.find(|(_, limits)| limits.clone().next().is_some());
        nearest.into_iter().flat_map(|(of, limits)| {
            limits.map(move |&(_, setting, value)| DrawnLimit { setting, group: of.cloned(), value })
        })
    };
    [false, true].into_iter().flat_map(of_unit).collect()
}

/// Rates and burst rates that are set.
fn limits(object: &ActivityObject) -> Vec<(LimitKind, LimitSetting, u64)> {
    let all = object.get("limits").and_then(Value::as_object);
    let rate = |(name, value): (&String, &Value)| match LimitSetting::from_name(name)? {
        setting @ LimitSetting::Limit(kind, LimitPart::Rate | LimitPart::BurstRate) => {
            Some((kind, setting, value.as_u64().filter(|value| *value > 0)?))
        }
        _ => None,
    };
    all.into_iter().flatten().filter_map(rate).collect()
}

impl LimitLines {
    /// Records the limits that are in force from this second on.
    pub(super) fn add(&mut self, second: u64, drawn: Vec<DrawnLimit>) {
        for line in self.0.iter_mut().filter(|line| line.until == OPEN_END) {
            // Changed or removed, or now covered by another group's limit.
            if !drawn.contains(&line.drawn) {
                line.until = second;
            }
        }
        for drawn in drawn {
            if !self.0.iter().any(|line| line.until == OPEN_END && line.drawn == drawn) {
                self.begin(second, drawn);
            }
        }
    }

    fn begin(&mut self, second: u64, drawn: DrawnLimit) {
        if self.0.len() >= MAX_LINES {
            self.drop_oldest();
        }
        // Grows by few lines at a time: a vector would double.
        if self.0.len() == self.0.capacity() {
            self.0.reserve_exact(GROWTH);
        }
        self.0.push(LimitLine { drawn, from: second, until: OPEN_END });
    }

    fn drop_oldest(&mut self) {
        // Lines that continue are never dropped: they are the limits in force.
        let ended = self.0.iter().enumerate().filter(|(_, line)| line.until != OPEN_END);
        let Some((place, _)) = ended.min_by_key(|(_, line)| line.until) else { return };
        let LimitLine { drawn, from, until } = self.0.remove(place);
        let follows = |line: &&mut LimitLine| line.from == until && line.drawn.setting == drawn.setting;
        if let Some(next) = self.0.iter_mut().find(follows) {
            next.from = from;
        }
    }

    /// Lines that end after that second, converted by `clock_ms`.
    pub(super) fn intervals(&self, after: u64, clock_ms: impl Fn(u64) -> u64) -> Vec<LimitInterval> {
        let intervals = self.0.iter().filter(|line| line.until > after).map(|line| {
            let DrawnLimit { setting, group: of, value } = &line.drawn;
            LimitInterval {
                name: setting.name(),
                group: of.as_deref().map(str::to_owned),
                value: *value,
                start_ms: clock_ms(line.from),
                end_ms: (line.until != OPEN_END).then(|| clock_ms(line.until)),
            }
        });
        intervals.collect()
    }

    /// Maximum of the allocation of all lines, in bytes.
    #[cfg(test)]
    pub(super) const MAX_BYTES: usize = MAX_LINES * size_of::<LimitLine>();

    #[cfg(test)]
    pub(super) fn size_bytes(&self) -> usize {
        self.0.capacity() * size_of::<LimitLine>()
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn object(value: Value) -> ActivityObject {
        let Value::Object(object) = value else { panic!("an object") };
        object
    }

    fn of(limits: Value) -> Vec<DrawnLimit> {
        drawn_limits(&object(json!({ "limits": limits })), &BTreeMap::new())
    }

    /// Name, value, begin and end, in seconds.
    fn shown_lines(lines: &LimitLines) -> Vec<(&'static str, u64, u64, Option<u64>)> {
        let all = lines.intervals(0, |second| second).into_iter();
        all.map(|line| (line.name, line.value, line.start_ms, line.end_ms)).collect()
    }

    #[test]
    fn a_line_ends_when_its_limit_changes() {
        let mut lines = LimitLines::default();
        lines.add(10, of(json!({ "iops-total": 2000, "iops-total-max": 3000, "iops-size": 4096 })));
        let size = lines.size_bytes();
        (11..1000).for_each(|second| {
            lines.add(second, of(json!({ "iops-total": 2000, "iops-total-max": 3000, "iops-size": 8192 })));
        });
        lines.add(1000, of(json!({ "iops-total": 500, "iops-total-max": 3000 })));
        lines.add(1001, of(json!({})));
        let line = |name, value, from, until| (name, value, from, Some(until));
        assert_eq!(
            shown_lines(&lines),
            [
                line("iops-total", 2000, 10, 1000),
                line("iops-total-max", 3000, 10, 1001),
                line("iops-total", 500, 1000, 1001),
            ]
        );
        assert_eq!(lines.size_bytes(), size);
        // Lines that ended before that time are omitted.
        assert_eq!(lines.intervals(1000, |second| second).len(), 2);
    }

    #[test]
    fn each_unit_shows_the_nearest_limit() {
        let groups = [
            ("outer", json!({ "group": null, "limits": { "bps-read": 9, "iops-total": 8 } })),
            ("inner", json!({ "group": "outer", "limits": { "iops-write": 7, "iops-write-max": 70 } })),
        ];
        let groups = groups.map(|(name, group)| (name.into(), object(group))).into();
        let disk = object(json!({ "group": "inner", "limits": { "bps-total-max-length": 5 } }));
        let mut lines = LimitLines::default();
        lines.add(1, drawn_limits(&disk, &groups));
        let limited_disk = object(json!({ "group": "inner", "limits": { "iops-total": 3 } }));
        lines.add(2, drawn_limits(&limited_disk, &groups));
        let groups = lines.intervals(0, |second| second).into_iter().map(|line| line.group);
        let all: Vec<_> = groups.zip(shown_lines(&lines)).collect();
        let in_group = |group: &str| Some(group.to_owned());
        let expected = [
            (in_group("inner"), ("iops-write", 7, 1, Some(2))),
            (in_group("inner"), ("iops-write-max", 70, 1, Some(2))),
            (in_group("outer"), ("bps-read", 9, 1, None)),
            (None, ("iops-total", 3, 2, None)),
        ];
        assert_eq!(all, expected);
    }

    #[test]
    fn lines_are_bounded() {
        let mut lines = LimitLines::default();
        for second in 100..10_000 {
            lines.add(second, of(json!({ "iops-total": second, "bps-total": 5 })));
            assert!(lines.0.len() <= MAX_LINES && lines.size_bytes() <= LimitLines::MAX_BYTES);
        }
        let shown = shown_lines(&lines);
        assert_eq!(shown.len(), MAX_LINES);
        assert!(shown.contains(&("bps-total", 5, 100, None)));
        // The oldest known line is extended over those that were dropped.
        let first = shown.iter().find(|(name, ..)| *name == "iops-total").unwrap();
        assert_eq!((first.1, first.2, first.3), (9_977, 100, Some(9_978)));
    }
}
