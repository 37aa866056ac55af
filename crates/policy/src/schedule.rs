//! Limits by the clock: which entry of a schedule holds at an instant, and until when.
//!
//! ```text
//!   instant ── offset of the zone ──► minute of the week ──► first entry that contains it
//! ```
//!
//! The clock of the zone decides. An hour that occurs twice when daylight saving time ends belongs
//! to its entry both times; an hour that is skipped belongs to none. Between two transitions of the
//! zone, the clock runs evenly, so the next change is either a boundary of an entry or a
//! transition.
//!
//! Never reads a clock or a time zone: both are arguments.

mod calendar;

use alloc::{string::String, sync::Arc, vec::Vec};

pub use calendar::{CalendarError, CalendarRange};

use crate::{
    throttle::{InvalidLimit, LimitSetting, Limits, NodeShare, ThrottleError},
    time_zone::ZoneRules,
    volume_quota::VolumeQuota,
};

/// Maximum number of entries of a schedule.
pub const MAX_ENTRIES: usize = 64;

const MINUTES_PER_WEEK: u32 = 7 * calendar::MINUTES_PER_DAY;
/// 1970-01-01 was a Thursday; a week begins on Monday.
const EPOCH_MINUTE: i64 = 3 * calendar::MINUTES_PER_DAY as i64;
/// Number of transitions of a zone in a week that are followed. A real zone has one at most.
const MAX_TRANSITIONS: usize = 16;

/// Limits that replace others of a disk or group at times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LimitSchedule {
    /// Time zone of the times, as in the IANA database; `None` is that of the host.
    pub time_zone: Option<String>,
    /// The first entry that contains the present time holds.
    pub entries: Vec<ScheduleEntry>,
}

/// Limits that hold at times.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScheduleEntry {
    /// The times.
    pub when: CalendarRange,
    /// Settings that hold in place of the configured ones; others stay in force.
    pub limits: Vec<(LimitSetting, u64)>,
}

/// State of a schedule at an instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScheduleState {
    /// Index of the entry that holds; `None` if the configured limits hold.
    pub entry: Option<usize>,
    /// Instant of the next change, in seconds since 1970; `None` if there is none.
    pub until_s: Option<i64>,
}

impl LimitSchedule {
    /// Entry that holds at `now_s`, in seconds since 1970, and the next change.
    pub fn state(&self, now_s: i64, zone: &impl ZoneRules) -> ScheduleState {
        let entry_at = |at_s: i64| self.entry_of(minute_of_week(at_s + zone.offset_s(at_s)));
        let entry = entry_at(now_s);
        let mut at_s = now_s;
        for _ in 0..MAX_TRANSITIONS {
            let local_s = at_s + zone.offset_s(at_s);
            let change_s = self.minutes_to_change(minute_of_week(local_s), entry);
            // `local_s` may be within a minute.
            let change_s = change_s.map(|minutes| at_s - local_s.rem_euclid(60) + i64::from(minutes) * 60);
            let Some(change_s) = change_s else { return ScheduleState { entry, until_s: None } };
            match zone.next_transition(at_s).filter(|transition_s| *transition_s <= change_s) {
                Some(transition_s) => at_s = transition_s,
                None => return ScheduleState { entry, until_s: Some(change_s) },
            }
            if entry_at(at_s) != entry {
                break;
            }
        }
        ScheduleState { entry, until_s: Some(at_s) }
    }

    /// Minutes from this one to the next that belongs to another entry than `entry`.
    fn minutes_to_change(&self, minute: u32, entry: Option<usize>) -> Option<u32> {
        (1..=MINUTES_PER_WEEK).find(|minutes| self.entry_of((minute + minutes) % MINUTES_PER_WEEK) != entry)
    }

    fn entry_of(&self, minute: u32) -> Option<usize> {
        self.entries.iter().position(|entry| entry.when.contains(minute))
    }

    /// First entry that never holds, because earlier ones contain all its times.
    pub fn unreachable_entry(&self) -> Option<usize> {
        let mut holds = [false; MAX_ENTRIES];
        for entry in (0..MINUTES_PER_WEEK).filter_map(|minute| self.entry_of(minute)) {
            if let Some(holds) = holds.get_mut(entry) {
                *holds = true;
            }
        }
        holds.iter().take(self.entries.len()).position(|holds| !holds)
    }

    /// First entry that contradicts the configured limits of a disk, or of a group, with the broken
    /// rule.
    pub fn contradiction(&self, configured: &Limits, is_group: bool) -> Option<(usize, InvalidLimit)> {
        let check = |(index, entry): (usize, &ScheduleEntry)| {
            let limits = configured.with_settings(&entry.limits);
            let limits = limits.and_then(|limits| limits.validate_for(is_group));
            Some((index, limits.err()?))
        };
        self.entries.iter().enumerate().find_map(check)
    }
}

fn minute_of_week(local_s: i64) -> u32 {
    let minute = (local_s.div_euclid(60) + EPOCH_MINUTE).rem_euclid(i64::from(MINUTES_PER_WEEK));
    // Below the minutes of a week.
    minute as u32
}

/// A schedule with the entry that holds, and the state of the quota by volume.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ScheduledLimits {
    /// The schedule; without entries by default.
    pub schedule: Arc<LimitSchedule>,
    /// Its state when it was last computed.
    pub state: ScheduleState,
    /// True if the quota by volume is used up.
    pub is_quota_used_up: bool,
}

/// Settings from which limits in force are computed.
#[derive(Clone, Copy, Debug)]
pub struct ConfiguredLimits {
    /// Limits as configured.
    pub limits: Limits,
    /// Quota by volume.
    pub quota: VolumeQuota,
    /// Share, with the reservation of the node; that of a group includes its members'.
    pub share: NodeShare,
    /// Size of the disk; a group has none.
    pub size_bytes: Option<u64>,
}

impl ScheduledLimits {
    /// The limits in force, from those configured, the size of the disk, its share, and its quota:
    /// [`ScheduledLimits::without_quota`] and [`ScheduledLimits::used_up_rate_bps`] together, as in
    /// a throttle tree.
    ///
    /// # Errors
    /// As [`ScheduledLimits::without_quota`].
    pub fn in_force(&self, configured: &ConfiguredLimits) -> Result<Limits, ThrottleError> {
        let limits = self.without_quota(configured)?;
        let rate_bps = self.used_up_rate_bps(&configured.quota);
        Ok(limits.with_used_up_rate(rate_bps, configured.share.bps_reservation()))
    }

    /// `quota-rate` while the quota is used up, in bytes per second; otherwise 0.
    pub const fn used_up_rate_bps(&self, quota: &VolumeQuota) -> u64 {
        if self.is_quota_used_up && !quota.is_none() { quota.rate_bps } else { 0 }
    }

    /// The limits without those of a used-up quota. Reservations must fit into these: a quota does
    /// not make a valid configuration invalid while it is used up. A limit for each GiB is raised
    /// to the reservation of the disk ([`Limits::at_size_with`]).
    ///
    /// # Errors
    /// [`ThrottleError::Limits`]: the configured limits break a rule. [`ThrottleError::Schedule`]:
    /// they contradict an entry of the schedule.
    pub fn without_quota(&self, configured: &ConfiguredLimits) -> Result<Limits, ThrottleError> {
        let &ConfiguredLimits { limits: configured, share, size_bytes, .. } = configured;
        let is_group = size_bytes.is_none();
        configured.validate_for(is_group)?;
        if let Some((index, invalid)) = self.schedule.contradiction(&configured, is_group) {
            return Err(ThrottleError::Schedule(index, invalid));
        }
        let entry = self.state.entry.and_then(|entry| self.schedule.entries.get(entry));
        let limits = entry.map_or(Ok(configured), |entry| configured.with_settings(&entry.limits))?;
        Ok(size_bytes.map_or(limits, |size_bytes| limits.at_size_with(size_bytes, share)))
    }
}

#[cfg(test)]
mod tests;
