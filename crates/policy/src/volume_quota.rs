//! Quotas by volume: bytes that a disk or group may transfer in each calendar period at full rate.
//!
//! ```text
//!   instant ── offset of the zone ──► index of the period ──► a later period: the count starts at 0
//!   bytes of a sampling interval ───────────────────────────► count ≥ amount: used up
//! ```
//!
//! A used-up quota is a limit, never an error:
//! [`Limits::with_used_up_rate`](crate::throttle::Limits::with_used_up_rate) computes it, and
//! [`ScheduledLimits::in_force`](crate::schedule::ScheduledLimits::in_force) puts it together with
//! the configured limits.
//!
//! Periods have indices that rise with the clock of the zone, so an hour that occurs twice is one
//! period. The clock may step. The last periods that it has shown keep their counts, so that a step
//! grants no amount twice unless the clock shows many periods. Not related to the quota leases of
//! [`cluster`](crate::cluster), which divide rates.
//!
//! Never reads a clock or a time zone: both are arguments.

use alloc::vec::Vec;

use crate::time_zone::ZoneRules;

/// Largest amount of a quota in bytes: an exbibyte.
pub const MAX_BYTES: u64 = 1 << 60;
/// Number of periods whose counts are kept: the present one, and others that the clock showed.
const MAX_COUNTS: usize = 4;
/// Number of transitions of a zone in a period that are followed. A real zone has two at most.
const MAX_TRANSITIONS: usize = 16;
const HOUR_S: i64 = 3600;
const DAY_S: i64 = 24 * HOUR_S;
/// 1970-01-01 was a Thursday; a week begins on Monday (ISO 8601).
const EPOCH_WEEKDAY: i64 = 3;

/// Calendar period of a quota, on the clock of a time zone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum QuotaPeriod {
    /// An hour, from minute 0.
    Hour,
    /// A day, from midnight.
    Day,
    /// A week, from Monday.
    Week,
    /// A month, from its first day.
    Month,
}

impl QuotaPeriod {
    /// All periods, the shortest first.
    pub const ALL: [Self; 4] = [Self::Hour, Self::Day, Self::Week, Self::Month];

    /// Word of the config file.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Hour => "hour",
            Self::Day => "day",
            Self::Week => "week",
            Self::Month => "month",
        }
    }

    /// The period with this name.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|period| period.name() == name)
    }

    /// Index of the period that contains `at_s`, in seconds since 1970. A later period has a larger
    /// index.
    pub fn index(self, at_s: i64, zone: &impl ZoneRules) -> i64 {
        let local_s = at_s.saturating_add(zone.offset_s(at_s));
        let day = local_s.div_euclid(DAY_S);
        match self {
            Self::Hour => local_s.div_euclid(HOUR_S),
            Self::Day => day,
            Self::Week => (day + EPOCH_WEEKDAY).div_euclid(7),
            Self::Month => month_of(day),
        }
    }

    /// First second of a period on the clock of its zone, since 1970 on that clock. Saturates:
    /// indices may be from a file.
    pub fn local_start_s(self, index: i64) -> i64 {
        // Far beyond each clock, and each product below fits.
        let index = index.clamp(-(1 << 32), 1 << 32);
        match self {
            Self::Hour => index * HOUR_S,
            Self::Day => index * DAY_S,
            Self::Week => (index * 7 - EPOCH_WEEKDAY) * DAY_S,
            Self::Month => first_day_of(index) * DAY_S,
        }
    }

    /// Instant at which the next period begins, in seconds since 1970.
    pub fn end_s(self, now_s: i64, zone: &impl ZoneRules) -> i64 {
        let index = self.index(now_s, zone);
        let mut at_s = now_s;
        for _ in 0..MAX_TRANSITIONS {
            // Between two transitions the clock runs evenly.
            let end_s = self.local_start_s(index + 1) - zone.offset_s(at_s);
            match zone.next_transition(at_s).filter(|transition_s| *transition_s <= end_s) {
                Some(transition_s) => at_s = transition_s,
                None => return end_s,
            }
            if self.index(at_s, zone) > index {
                break;
            }
        }
        at_s
    }
}

/// Index of the month that contains a day since 1970: 12 × year + month, from 0. The algorithm is
/// `civil_from_days` of Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms".
fn month_of(day: i64) -> i64 {
    // Years of this calendar begin in March, so that the leap day is the last one.
    let day = day + 719_468;
    let era = day.div_euclid(146_097);
    let day_of_era = day.rem_euclid(146_097);
    let year = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year + year / 4 - year / 100);
    let month_from_march = (5 * day_of_year + 2) / 153;
    (era * 400 + year) * 12 + month_from_march + 2
}

/// First day of a month, since 1970: `days_from_civil` of the same source.
fn first_day_of(month: i64) -> i64 {
    let from_march = month - 2;
    let (year, month_from_march) = (from_march.div_euclid(12), from_march.rem_euclid(12));
    let (era, year_of_era) = (year.div_euclid(400), year.rem_euclid(400));
    let day_of_year = (153 * month_from_march + 2) / 5;
    era * 146_097 + year_of_era * 365 + year_of_era / 4 - year_of_era / 100 + day_of_year - 719_468
}

/// Bytes in each period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct VolumeAmount {
    /// From 1 to [`MAX_BYTES`].
    pub bytes: u64,
    /// The period.
    pub period: QuotaPeriod,
}

/// Quotas of a disk or a group. The default is none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VolumeQuota {
    /// Of reads and writes together.
    pub total: Option<VolumeAmount>,
    /// Of writes, write-zeroes and discards.
    pub writes: Option<VolumeAmount>,
    /// Limit while one of them is used up, in bytes per second; 0 without a quota.
    pub rate_bps: u64,
}

impl VolumeQuota {
    /// True without a quota.
    pub const fn is_none(&self) -> bool {
        self.total.is_none() && self.writes.is_none()
    }
}

/// Bytes that were counted in a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PeriodCount {
    /// Index of the period ([`QuotaPeriod::index`]).
    pub index: i64,
    /// The bytes.
    pub bytes: u64,
}

/// Bytes counted against one amount: of the present period, and of others that the clock showed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeCount {
    /// Kind of the periods.
    period: QuotaPeriod,
    /// The present period first; at most [`MAX_COUNTS`].
    counts: Vec<PeriodCount>,
}

impl VolumeCount {
    /// A count of zero in the period with this index.
    pub fn new(period: QuotaPeriod, index: i64) -> Self {
        Self { period, counts: Vec::from([PeriodCount { index, bytes: 0 }]) }
    }

    /// A stored count; `None` without a period.
    pub fn restore(period: QuotaPeriod, counts: &[PeriodCount]) -> Option<Self> {
        let counts = counts.get(..counts.len().min(MAX_COUNTS)).filter(|counts| !counts.is_empty())?;
        Some(Self { period, counts: counts.to_vec() })
    }

    /// Kind of its periods.
    pub const fn period(&self) -> QuotaPeriod {
        self.period
    }

    /// All counts, that of the present period first.
    pub fn counts(&self) -> &[PeriodCount] {
        &self.counts
    }

    /// Bytes of the present period.
    pub fn bytes(&self) -> u64 {
        self.counts[0].bytes
    }

    /// Counts bytes in the present period.
    pub fn add(&mut self, bytes: u64) {
        self.counts[0].bytes = self.counts[0].bytes.saturating_add(bytes);
    }

    /// Changes to the period with this index; true if it is another one.
    ///
    /// The period continues its count if the clock has shown it before. A later one starts at 0. An
    /// earlier one was not counted: the clock has stepped back, and the count is kept.
    pub fn advance(&mut self, index: i64) -> bool {
        let present = self.counts[0];
        if index == present.index {
            return false;
        }
        match self.counts.iter().position(|count| count.index == index) {
            Some(known) => self.counts.swap(0, known),
            None => {
                let bytes = if index > present.index { 0 } else { present.bytes };
                self.counts.insert(0, PeriodCount { index, bytes });
            }
        }
        if self.counts.len() > MAX_COUNTS {
            // The earliest one, which is the least likely to come again; never the present one.
            let earliest = (1..self.counts.len()).min_by_key(|&count| self.counts[count].index);
            earliest.map(|earliest| self.counts.remove(earliest));
        }
        true
    }
}

/// Counts of a disk or group, for each of its amounts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct QuotaCounts {
    /// Against [`VolumeQuota::total`].
    pub total: Option<VolumeCount>,
    /// Against [`VolumeQuota::writes`].
    pub writes: Option<VolumeCount>,
}

impl QuotaCounts {
    /// Changes to the periods that contain `now_s`, in seconds since 1970; true if a counted period
    /// has changed. A quota with another kind of period starts at 0, and another amount keeps the
    /// count.
    pub fn advance(&mut self, quota: &VolumeQuota, now_s: i64, zone: &impl ZoneRules) -> bool {
        let mut has_changed = false;
        for (count, amount) in [(&mut self.total, quota.total), (&mut self.writes, quota.writes)] {
            let Some(period) = amount.map(|amount| amount.period) else {
                *count = None;
                continue;
            };
            let index = period.index(now_s, zone);
            match count {
                Some(count) if count.period == period => has_changed |= count.advance(index),
                count => *count = Some(VolumeCount::new(period, index)),
            }
        }
        has_changed
    }

    /// Counts bytes of an interval.
    pub fn add(&mut self, read_bytes: u64, written_bytes: u64) {
        if let Some(total) = &mut self.total {
            total.add(read_bytes.saturating_add(written_bytes));
        }
        if let Some(writes) = &mut self.writes {
            writes.add(written_bytes);
        }
    }

    /// True if an amount is used up.
    pub fn is_used_up(&self, quota: &VolumeQuota) -> bool {
        [(&self.total, quota.total), (&self.writes, quota.writes)].into_iter().any(|(count, amount)| {
            amount.is_some_and(|amount| count.as_ref().is_some_and(|count| count.bytes() >= amount.bytes))
        })
    }

    /// End of the throttled time at the present counts, in seconds since 1970; `None` if no amount
    /// is used up.
    pub fn used_up_until_s(&self, quota: &VolumeQuota, now_s: i64, zone: &impl ZoneRules) -> Option<i64> {
        let until = |(count, amount): (&Option<VolumeCount>, Option<VolumeAmount>)| {
            let amount = amount?;
            let is_used_up = count.as_ref().is_some_and(|count| count.bytes() >= amount.bytes);
            is_used_up.then(|| amount.period.end_s(now_s, zone))
        };
        [(&self.total, quota.total), (&self.writes, quota.writes)].into_iter().filter_map(until).max()
    }
}

#[cfg(test)]
mod tests;
