//! Limits at the size of a disk, from those that are given for each GiB, and the rules of these.
//!
//! ```text
//!   Limits as configured ── at_size(size) ──► limits in force, all of them plain rates
//! ```
//!
//! A small disk with a reservation gets at least the rate that it reserves
//! ([`Limits::at_size_with`]): otherwise a disk could be shrunk until its config is invalid.
//!
//! The names, without `-max`, and the multiplication are those of the capacity-based QoS of
//! OpenStack's Cinder, whose GB are GiB. A tree of limits has no sizes: [`Limits::at_size`] comes
//! before it.

use super::{
    limits::{InvalidLimit, LimitKind, LimitPart, LimitRule, LimitSetting, Limits, MAX_VALUE},
    reservations::ReservationUnit,
    share::NodeShare,
    size_rate::SizeRate,
};

impl Limits {
    /// True if a limit depends on the size of the disk.
    pub fn follows_size(&self) -> bool {
        self.size_rates.iter().any(|rate| rate.per_gib > 0)
    }

    /// The limits in force for a disk of this size: each rate for each GiB becomes a rate between
    /// its bounds, and not above the burst rate. Other limits are unchanged. Valid if these limits
    /// are.
    #[must_use]
    pub fn at_size(&self, size_bytes: u64) -> Self {
        let mut limits = *self;
        for kind in LimitKind::ALL {
            let size_rate = core::mem::take(&mut limits.size_rates[kind.index()]);
            if size_rate.per_gib > 0 {
                limits.limit_mut(kind).rate = size_rate.at(size_bytes, self.highest_rate(kind));
            }
        }
        limits
    }

    /// As [`Limits::at_size`], for a disk with this share: rates for each GiB are raised, within
    /// their bounds, to the reservation of the disk.
    #[must_use]
    pub fn at_size_with(&self, size_bytes: u64, share: NodeShare) -> Self {
        let mut limits = self.at_size(size_bytes);
        limits.raise_to(self, ReservationUnit::Iops, share.iops_reservation());
        limits.raise_to(self, ReservationUnit::Bps, share.bps_reservation());
        limits
    }

    /// Raises the rates of a unit that follow the size, as `configured`, until they cover
    /// `reserved` or are at their upper bounds.
    fn raise_to(&mut self, configured: &Self, unit: ReservationUnit, reserved: u64) {
        let [total, read, write] = unit.limit_kinds();
        let rate = |limits: &Self, kind| limits.limit(kind).rate;
        let kinds: &[LimitKind] = if rate(self, total) > 0 {
            &[total]
        // A limit on one direction alone does not bound the sum of both.
        } else if rate(self, read) > 0 && rate(self, write) > 0 {
            // `read` again, if `write` cannot be raised by its half.
            &[read, write, read]
        } else {
            return;
        };
        for (index, &kind) in kinds.iter().enumerate() {
            let sum = rate(self, total).saturating_add(rate(self, read)).saturating_add(rate(self, write));
            let missing = reserved.saturating_sub(sum);
            let missing = if kinds.len() > 1 && index == 0 { missing.div_ceil(2) } else { missing };
            let highest = configured.size_rates[kind.index()].highest(configured.highest_rate(kind));
            let raised = rate(self, kind).saturating_add(missing).min(highest);
            let limit = self.limit_mut(kind);
            limit.rate = limit.rate.max(raised);
        }
    }

    /// Upper bound of a rate for each GiB, apart from its own bounds. As in Cinder, where `-max` is
    /// also the upper bound of the rate.
    const fn highest_rate(&self, kind: LimitKind) -> u64 {
        let burst_rate = self.limit(kind).burst_rate;
        if burst_rate > 0 { burst_rate } else { MAX_VALUE }
    }

    /// As [`Limits::validate`], for limits of a group, and others that do not follow a size.
    pub fn validate_in_force(&self) -> Result<(), InvalidLimit> {
        match LimitSetting::OF_SIZE.into_iter().find(|&setting| self.get(setting) > 0) {
            Some(setting) => Err(self.invalid(setting, LimitRule::NeedsDisk)),
            None => self.validate(),
        }
    }

    /// Checks the limits of a disk, or of a group.
    ///
    /// # Errors
    /// [`InvalidLimit`] with the first broken rule.
    pub fn validate_for(&self, is_group: bool) -> Result<(), InvalidLimit> {
        if is_group { self.validate_in_force() } else { self.validate() }
    }

    pub(super) fn check_size_rates(&self) -> Result<(), InvalidLimit> {
        LimitKind::ALL.into_iter().try_for_each(|kind| self.check_size_rate(kind))
    }

    fn check_size_rate(&self, kind: LimitKind) -> Result<(), InvalidLimit> {
        use LimitPart::{BurstRate, PerGib, PerGibMax, PerGibMin, Rate};
        let of = |part| LimitSetting::Limit(kind, part);
        let SizeRate { per_gib, min, max } = self.size_rates[kind.index()];
        let rate = self.limit(kind).rate;
        let burst_rate = self.limit(kind).burst_rate;
        let rules = [
            (per_gib > 0 && rate > 0, PerGib, LimitRule::ExcludesRate(of(Rate), rate)),
            (min > 0 && per_gib == 0, PerGibMin, LimitRule::Needs(of(PerGib))),
            (max > 0 && per_gib == 0, PerGibMax, LimitRule::Needs(of(PerGib))),
            (max > 0 && min > max, PerGibMin, LimitRule::AtMostBound(of(PerGibMax), max)),
            (burst_rate > 0 && burst_rate < min, BurstRate, LimitRule::AtLeastRate(of(PerGibMin), min)),
        ];
        match rules.into_iter().find(|(is_broken, ..)| *is_broken) {
            Some((_, part, rule)) => Err(self.invalid(of(part), rule)),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::{
        borrow::ToOwned,
        string::{String, ToString},
        vec::Vec,
    };

    const GIB_BYTES: u64 = 1 << 30;

    fn limits(settings: &[(&str, u64)]) -> Result<Limits, String> {
        let given: Vec<_> = settings
            .iter()
            .map(|&(name, value)| (LimitSetting::from_name(name).expect("a setting"), value))
            .collect();
        Limits::default().with_settings(&given).map_err(|invalid| invalid.to_string())
    }

    fn rate(settings: &[(&str, u64)], size_bytes: u64) -> u64 {
        let limits = limits(settings).expect("valid").at_size(size_bytes);
        assert_eq!(limits.validate_in_force(), Ok(()));
        limits.limit(LimitKind::IopsTotal).rate
    }

    #[test]
    fn rates_follow_the_size_between_their_bounds() {
        let bounded =
            [("iops-total-per-gib", 3), ("iops-total-per-gib-min", 100), ("iops-total-per-gib-max", 16_000)];
        for (gib, expect) in [(1, 100), (33, 100), (34, 102), (1000, 3000), (5333, 15_999), (6000, 16_000)] {
            assert_eq!(rate(&bounded, gib * GIB_BYTES), expect, "{gib} GiB");
        }
        let free = [("iops-total-per-gib", 3)];
        for (bytes, expect) in [(0, 1), (GIB_BYTES / 2, 1), (GIB_BYTES * 3 / 2, 4), (u64::MAX, (3 << 34) - 1)]
        {
            assert_eq!(rate(&free, bytes), expect, "{bytes} bytes");
        }
        assert_eq!(rate(&[("iops-total-per-gib", MAX_VALUE)], u64::MAX), MAX_VALUE);
    }

    #[test]
    fn reservation_raises_the_rates_that_follow_the_size() {
        let share = NodeShare::default().with_reservation(150, 0);
        let at_1_gib = |settings: &[(&str, u64)]| {
            let raised = limits(settings).expect("valid").at_size_with(GIB_BYTES, share);
            assert_eq!(raised.validate_in_force(), Ok(()));
            [LimitKind::IopsTotal, LimitKind::IopsRead, LimitKind::IopsWrite]
                .map(|kind| raised.limit(kind).rate)
        };
        for (settings, expect) in [
            (&[("iops-total-per-gib", 100)][..], [150, 0, 0]),
            (&[("iops-total-per-gib", 200)], [200, 0, 0]),
            (&[("iops-total-per-gib", 100), ("iops-total-per-gib-max", 120)], [120, 0, 0]),
            (&[("iops-total-per-gib", 100), ("iops-total-max", 130)], [130, 0, 0]),
            (&[("iops-total", 100)], [100, 0, 0]),
            (&[("iops-read-per-gib", 100)], [0, 100, 0]),
            (&[("iops-read-per-gib", 10), ("iops-write", 20)], [0, 130, 20]),
            (&[("iops-read", 20), ("iops-write-per-gib", 10)], [0, 20, 130]),
            (&[("iops-read-per-gib", 10), ("iops-write-per-gib", 20)], [0, 70, 80]),
            (&[("iops-read-per-gib", 10), ("iops-write-per-gib", 20), ("iops-write-max", 30)], [0, 120, 30]),
            (&[("bps-total-per-gib", 10)], [0; 3]),
        ] {
            assert_eq!(at_1_gib(settings), expect, "{settings:?}");
        }
    }

    #[test]
    fn burst_rate_bounds_the_rate() {
        let burst = [("iops-total-per-gib", 10), ("iops-total-max", 500)];
        assert_eq!(rate(&burst, 20 * GIB_BYTES), 200);
        assert_eq!(rate(&burst, 100 * GIB_BYTES), 500);
        let at_100 = limits(&burst).expect("valid").at_size(100 * GIB_BYTES);
        assert_eq!(at_100.limit(LimitKind::IopsTotal).burst_rate, 500);
    }

    #[test]
    fn other_limits_are_unchanged() {
        let mixed = [("iops-read-per-gib", 7), ("bps-total", 9), ("iops-size", 4096)];
        let limits = limits(&mixed).expect("valid");
        let at_size = limits.at_size(2 * GIB_BYTES);
        assert_eq!(at_size.limit(LimitKind::IopsRead).rate, 14);
        assert_eq!((at_size.limit(LimitKind::BpsTotal).rate, at_size.iops_size), (9, 4096));
        assert!(limits.follows_size() && !at_size.follows_size());
        assert_eq!(at_size.at_size(0), at_size);
    }

    #[test]
    fn contradictions_are_named() {
        for (settings, expect) in [
            (
                &[("iops-total", 5), ("iops-total-per-gib", 3)][..],
                "iops-total-per-gib (3) cannot be set together with iops-total (5); use one of them, 0 \
                 removes the other",
            ),
            (
                &[("iops-total", 5), ("iops-read-per-gib", 3)],
                "iops-total (5) cannot be set together with iops-read-per-gib (3); use either the total or \
                 read and write",
            ),
            (
                &[("bps-total-per-gib", 5), ("bps-write", 3)],
                "bps-total-per-gib (5) cannot be set together with bps-write (3); use either the total or \
                 read and write",
            ),
            (
                &[("iops-total-per-gib-min", 3)],
                "iops-total-per-gib-min (3) is set without iops-total-per-gib; set iops-total-per-gib too",
            ),
            (
                &[("iops-read-per-gib", 1), ("iops-read-per-gib-min", 9), ("iops-read-per-gib-max", 8)],
                "iops-read-per-gib-min (9) is above iops-read-per-gib-max (8); the lower bound must be at \
                 most the upper",
            ),
            (
                &[("iops-read-per-gib", 1), ("iops-read-per-gib-min", 9), ("iops-read-max", 8)],
                "iops-read-max (8) is below iops-read-per-gib-min (9); a burst rate must be at least the rate",
            ),
        ] {
            assert_eq!(limits(settings), Err(expect.to_owned()));
        }
    }

    #[test]
    fn removing_the_rate_removes_bounds_and_burst() {
        let set = [
            ("iops-total-per-gib", 3),
            ("iops-total-per-gib-min", 1),
            ("iops-total-per-gib-max", 9),
            ("iops-total-max", 9),
            ("iops-size", 4096),
        ];
        let given = |name| LimitSetting::from_name(name).expect("a setting");
        let before = limits(&set).expect("valid");
        let removed = before.with_settings(&[(given("iops-total-per-gib"), 0)]);
        assert_eq!(removed, Ok(Limits::default()));
        let replaced = before.with_settings(&[(given("iops-total-per-gib"), 0), (given("iops-total"), 5)]);
        let replaced = replaced.expect("valid");
        assert_eq!((replaced.get(given("iops-total-max")), replaced.iops_size), (9, 4096));
        assert!(!replaced.follows_size());
    }

    #[test]
    fn groups_have_no_size() {
        let limits = limits(&[("iops-total-per-gib", 3)]).expect("valid for a disk");
        let refused = limits.validate_in_force().map_err(|invalid| invalid.to_string());
        let rule = "iops-total-per-gib (3) follows the size of a disk, and a group has none; set it for the \
                    disks";
        assert_eq!(refused, Err(rule.to_owned()));
    }
}
