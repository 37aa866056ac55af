//! Recorded limits of a disk, as rates over time.

use recording::limit_history::LimitHistory;

use crate::limit_lines::LimitRates;

/// Limits that applied to a disk: its own and those of its groups.
pub(super) fn recorded_limits(history: &LimitHistory, disk: &str) -> LimitRates {
    let mut limits = LimitRates::default();
    history.visit(disk, &mut |in_force| {
        let change = in_force.change;
        limits.add_during(in_force.group, &change.limits, change.watermark, in_force.during_ns);
    });
    limits
}

#[cfg(test)]
mod tests {
    use policy::{
        throttle::{LimitKind, Limits},
        watermark::Watermark,
    };

    use super::*;
    use crate::{limit_lines::lines_of, result::ChartSeries};
    use recording::{LimitChange, LimitOwner};

    const S: u64 = 1_000_000_000;

    fn change(at_s: u64, owner: LimitOwner, name: &str, group: Option<&str>, iops: u64) -> LimitChange {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = iops;
        let (name, group) = (name.to_owned(), group.map(str::to_owned));
        LimitChange { at_ns: at_s * S, owner, name, group, limits, watermark: Watermark::ALWAYS }
    }

    fn drawn(history: &LimitHistory, disk: &str) -> Vec<(String, Vec<(f64, f64)>)> {
        let rates = [ChartSeries { name: "done".to_owned(), points: vec![(0.0, 90.0), (30.0, 90.0)] }];
        let lines = lines_of(&recorded_limits(history, disk).iops, &rates).0;
        lines.into_iter().map(|line| (line.name, line.points)).collect()
    }

    #[test]
    fn limit_change_is_a_step() {
        let mut history = LimitHistory::default();
        for (at_s, iops) in [(0, 100), (10, 100), (20, 200)] {
            history.note(change(at_s, LimitOwner::Disk, "vm1", None, iops));
        }
        let points = vec![(0.0, 100.0), (20.0, 200.0), (30.0, 200.0)];
        assert_eq!(drawn(&history, "vm1"), [("iops-total 100 → 200".to_owned(), points)]);
        assert_eq!(drawn(&history, "vm2"), []);
    }

    #[test]
    fn group_limit_applies_during_membership() {
        let mut history = LimitHistory::default();
        history.note(change(20, LimitOwner::Disk, "vm1", None, 0));
        history.note(change(0, LimitOwner::Disk, "vm1", None, 0));
        history.note(change(10, LimitOwner::Disk, "vm1", Some("gold"), 0));
        history.note(change(0, LimitOwner::Group, "gold", Some("host"), 100));
        history.note(change(15, LimitOwner::Group, "gold", Some("host"), 150));
        history.note(change(0, LimitOwner::Group, "host", None, 200));
        history.sort();
        let gold = vec![(10.0, 100.0), (15.0, 150.0), (20.0, 150.0)];
        let host = vec![(10.0, 200.0), (20.0, 200.0)];
        let expected =
            [("iops-total 100 → 150 of gold".to_owned(), gold), ("iops-total 200 of host".to_owned(), host)];
        assert_eq!(drawn(&history, "vm1"), expected);
    }

    #[test]
    fn cyclic_groups_are_cut_off() {
        let mut history = LimitHistory::default();
        history.note(change(0, LimitOwner::Disk, "vm1", Some("a"), 0));
        history.note(change(0, LimitOwner::Group, "a", Some("b"), 100));
        history.note(change(0, LimitOwner::Group, "b", Some("a"), 150));
        let names: Vec<_> = drawn(&history, "vm1").into_iter().map(|(name, _)| name).collect();
        assert_eq!(names, ["iops-total 100 of a", "iops-total 150 of b"]);
    }
}
