//! Quotas by volume of running disks and groups: counts the bytes, keeps the counts, and reports
//! when a quota is used up.
//!
//! ```text
//!   counters of disks ── each second ──► counts of the disk and its groups ──► `schedules`: limits
//!                                          │            ▲
//!                              every 10 s  ▼            │  start
//!                                        state file ────┘
//! ```
//!
//! The counters exist for every disk, so the path of a request has no part of this. A quota is
//! exceeded at most by the bytes of one sampling interval. Never loses data: a lost count only
//! admits more at full rate.

mod file;
mod store;

use std::{
    cell::{Cell, RefCell},
    cmp::Reverse,
    collections::{HashMap, HashSet},
    io, iter,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use api::{QuotaStatus, QuotaUse};
use block::{disk::Disk, layer::throttle::ThrottleGroup};
use policy::{
    schedule::{LimitSchedule, ScheduledLimits},
    time::Duration,
    volume_quota::{QuotaCounts, QuotaPeriod, VolumeAmount, VolumeCount, VolumeQuota},
};
use settings::{QuotaSetting, schedule};

pub(crate) use self::file::StoredCounts;
pub use self::file::file;
use self::store::{QuotaStore, StoredFile};
use crate::events::{EventLog, Kind, NewEvent};

/// Interval between samples while there is a quota: bounds the volume by which it is exceeded.
pub(crate) const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// A count is stored earlier after this part of its quota: bounds the loss of a crash in volume.
const SAVE_PARTS: u64 = 100;
/// Counts of removed objects that are kept, the latest ones: a file with them is read back.
const MAX_REMOVED: usize = 4096;

/// Counts of all quotas of the daemon.
#[derive(Debug, Default)]
pub struct QuotaCounters {
    /// By name of the disk or group. Those of removed objects stay until their periods end.
    counts: RefCell<HashMap<String, QuotaCounts>>,
    /// Last known bytes of disks, read and written.
    disks: RefCell<HashMap<String, DiskBytes>>,
    /// Quotas at the last sample of this process.
    known: RefCell<HashMap<String, KnownQuota>>,
    store: RefCell<Option<QuotaStore>>,
    /// True once the daemon has warned that counts cannot be stored.
    has_warned: Cell<bool>,
}

#[derive(Debug)]
struct DiskBytes {
    disk: Weak<Disk>,
    read_bytes: u64,
    written_bytes: u64,
}

#[derive(Clone, Copy, Debug)]
struct KnownQuota {
    quota: VolumeQuota,
    is_used_up: bool,
}

/// Disk or group with a quota.
struct QuotaMember<'a> {
    kind: &'static str,
    name: &'a str,
    quota: VolumeQuota,
    /// Reservation of the object and those inside, in bytes per second.
    reserved_bps: u64,
    schedule: &'a LimitSchedule,
}

impl QuotaCounters {
    /// Reads the counts that an earlier process stored for this daemon, and stores counts there
    /// from now on. `create` creates the directory, also without a quota: a client may set one
    /// later. A failure is logged if there is a quota (`is_needed`). Waits for a file system.
    pub fn open(
        &self,
        state: Option<&Path>,
        daemon: &str,
        is_needed: bool,
        create: impl FnOnce(&Path) -> io::Result<()>,
    ) {
        let file = file(state, daemon);
        let directory = file.parent().unwrap_or(Path::new(""));
        if let Err(error) = create(directory) {
            if is_needed {
                self.warn_not_stored(&file, &error.to_string());
            }
            return;
        }
        let counts = file::load(&file, daemon).unwrap_or_else(|error| {
            tracing::warn!(
                file = %file.display(),
                "the bytes counted against quotas start at 0, because the file with the earlier counts \
                 cannot be used: {error:#}"
            );
            HashMap::new()
        });
        self.counts.borrow_mut().extend(counts.clone());
        let stored = StoredFile { path: file, daemon: daemon.to_owned() };
        *self.store.borrow_mut() = Some(QuotaStore::new(stored, counts));
    }

    /// Directory of the state file, if counts are stored.
    pub fn directory(&self) -> Option<PathBuf> {
        self.store.borrow().as_ref().and_then(|store| store.path().parent().map(Path::to_owned))
    }

    fn warn_not_stored(&self, file: &Path, why: &str) {
        if !self.has_warned.replace(true) {
            tracing::warn!(
                file = %file.display(),
                "the bytes counted against quotas are lost when this process ends, because they cannot be \
                 stored: {why} (set state in [daemon] to a writable directory)"
            );
        }
    }

    /// Counts of a disk or group with this quota, for another process or host. `None` without a
    /// quota: an earlier version may take over, which knows none.
    pub(crate) fn stored(&self, name: &str, quota: &VolumeQuota) -> Option<StoredCounts> {
        self.counts.borrow().get(name).filter(|_| !quota.is_none()).map(StoredCounts::of)
    }

    /// Continues the counts of another process or host.
    pub(crate) fn restore(&self, name: &str, stored: &StoredCounts) {
        self.counts.borrow_mut().insert(name.to_owned(), stored.to_counts());
    }

    /// True if a quota of this disk or group was used up at the last sample.
    pub(crate) fn is_used_up(&self, name: &str) -> bool {
        self.known.borrow().get(name).is_some_and(|known| known.is_used_up)
    }

    /// Counts the bytes since the last sample, changes periods, and records events. Returns true if
    /// there is a quota.
    pub(crate) fn sample(
        &self,
        disks: &[Arc<Disk>],
        groups: &[Arc<ThrottleGroup>],
        events: &EventLog,
    ) -> bool {
        let with_quota: HashSet<&str> = groups
            .iter()
            .filter(|group| !group.settings().quota.is_none())
            .map(|group| group.name())
            .collect();
        let is_counted = |disk: &&Arc<Disk>| {
            let group = || disk.throttle().group();
            !disk.throttle().settings().quota.is_none()
                || (!with_quota.is_empty()
                    && iter::successors(group(), |group| group.parent().cloned())
                        .any(|group| with_quota.contains(group.name())))
        };
        let counted: Vec<_> = disks.iter().filter(is_counted).collect();
        if counted.is_empty() && with_quota.is_empty() {
            self.disks.borrow_mut().clear();
            self.known.borrow_mut().clear();
            let mut counts = self.counts.borrow_mut();
            disks.iter().for_each(|disk| drop(counts.remove(disk.name().as_ref())));
            groups.iter().for_each(|group| drop(counts.remove(group.name())));
            return false;
        }
        let now_s = i64::try_from(schedule::now().as_secs()).unwrap_or(i64::MAX);
        // Bytes since the last sample belong to the period that the last sample has left: at most
        // one interval of a period counts in the one before it.
        for disk in &counted {
            self.count(disk);
        }
        // A disk that comes under a quota again starts at its counters of that time.
        let counted: HashSet<&str> = counted.iter().map(|disk| disk.name().as_ref()).collect();
        self.disks.borrow_mut().retain(|name, _| counted.contains(name.as_str()));
        let mut sampled = HashSet::new();
        for disk in disks {
            let (settings, scheduled) = (disk.throttle().settings(), disk.throttle().scheduled());
            let member = QuotaMember {
                kind: "disk",
                name: disk.name(),
                quota: settings.quota,
                reserved_bps: settings.share.bps_reservation(),
                schedule: &scheduled.schedule,
            };
            sampled.extend(self.update(&member, now_s, events));
        }
        for group in groups {
            let scheduled = group.scheduled();
            let member = QuotaMember {
                kind: "group",
                name: group.name(),
                quota: group.settings().quota,
                reserved_bps: group.reserved()[1],
                schedule: &scheduled.schedule,
            };
            sampled.extend(self.update(&member, now_s, events));
        }
        self.known.borrow_mut().retain(|name, _| sampled.contains(name));
        let mut counts = self.counts.borrow_mut();
        counts.retain(|name, counts| sampled.contains(name) || !is_over(counts, now_s));
        drop_oldest(&mut counts, &sampled, MAX_REMOVED);
        true
    }

    /// Counts the bytes of a disk since its last sample, before it leaves a group or the daemon.
    pub(crate) fn count_before_change(&self, disk: &Arc<Disk>) {
        // Others are under no quota, or have no baseline yet.
        if self.disks.borrow().contains_key(disk.name().as_ref()) {
            self.count(disk);
        }
    }

    /// Adds the bytes of a disk since its last sample to its count and those of its groups.
    fn count(&self, disk: &Arc<Disk>) {
        let totals = disk.totals();
        let (read_bytes, written_bytes) = (totals.read_bytes, totals.written_bytes);
        let sample = DiskBytes { disk: Arc::downgrade(disk), read_bytes, written_bytes };
        let before = self.disks.borrow_mut().insert(disk.name().to_string(), sample);
        // The first sample of a disk is a baseline: an earlier process counted the bytes before.
        let Some(before) = before.filter(|before| before.disk.as_ptr() == Arc::as_ptr(disk)) else { return };
        let read_bytes = read_bytes.saturating_sub(before.read_bytes);
        let written_bytes = written_bytes.saturating_sub(before.written_bytes);
        if read_bytes == 0 && written_bytes == 0 {
            return;
        }
        let mut counts = self.counts.borrow_mut();
        let mut add = |name: &str| {
            if let Some(counts) = counts.get_mut(name) {
                counts.add(read_bytes, written_bytes);
            }
        };
        add(disk.name());
        let group = disk.throttle().group();
        iter::successors(group, |group| group.parent().cloned()).for_each(|group| add(group.name()));
    }

    /// Changes to the present periods of a disk or group, and records an event if its quota has
    /// been used up, or is no longer. Returns its name if it has a quota.
    fn update(&self, member: &QuotaMember<'_>, now_s: i64, events: &EventLog) -> Option<String> {
        let &QuotaMember { name, ref quota, schedule, .. } = member;
        if quota.is_none() {
            // Counts of an object that another host or a config without the quota has: a period of
            // a later quota starts at 0.
            self.counts.borrow_mut().remove(name);
            return None;
        }
        // A zone that cannot be read is reported with the schedules.
        let zone = schedule::zone_rules(schedule)?;
        let mut all = self.counts.borrow_mut();
        let counts = all.entry(name.to_owned()).or_default();
        counts.advance(quota, now_s, &zone);
        let is_used_up = counts.is_used_up(quota);
        let until = counts.used_up_until_s(quota, now_s, &zone);
        drop(all);
        let known = KnownQuota { quota: *quota, is_used_up };
        let before = self.known.borrow_mut().insert(name.to_owned(), known);
        // The first sample of a process continues the state of an earlier one.
        if before.is_some_and(|before| before.is_used_up != is_used_up) {
            let until = until.and_then(|until_s| schedule::local_time(schedule, until_s));
            events.record(quota_event(member, is_used_up, until));
        }
        Some(name.to_owned())
    }

    /// Starts a write of the counts if one is due.
    pub(crate) fn save_if_due(&self) {
        let store = self.store.borrow();
        let Some(store) = &*store else {
            self.warn_not_stored(Path::new(""), "the daemon has no directory for them");
            return;
        };
        let counts = self.counts.borrow();
        store.save_if_due(&counts, |saved| self.are_far(&counts, saved));
    }

    /// True if a count has grown by a large part of its quota since the last write.
    fn are_far(&self, counts: &HashMap<String, QuotaCounts>, saved: &HashMap<String, QuotaCounts>) -> bool {
        let known = self.known.borrow();
        let is_far =
            |count: &Option<VolumeCount>, saved: Option<&VolumeCount>, amount: Option<VolumeAmount>| {
                let (Some(count), Some(amount)) = (count, amount) else { return false };
                let saved_bytes = saved.map_or(0, VolumeCount::bytes);
                count.bytes().abs_diff(saved_bytes) > amount.bytes / SAVE_PARTS
            };
        counts.iter().any(|(name, counts)| {
            let Some(KnownQuota { quota, .. }) = known.get(name) else { return false };
            let saved = saved.get(name);
            is_far(&counts.total, saved.and_then(|saved| saved.total.as_ref()), quota.total)
                || is_far(&counts.writes, saved.and_then(|saved| saved.writes.as_ref()), quota.writes)
        })
    }

    /// Stores all counts, before the process ends. Waits for a file system, for a bounded time.
    pub(crate) async fn save(&self) {
        let counts = self.counts.borrow().clone();
        let store = self.store.borrow().clone();
        if let Some(store) = store {
            store.save(counts).await;
        }
    }

    /// Status of the quota of a disk or group, for clients; `None` without one.
    pub fn status(
        &self,
        name: &str,
        quota: &VolumeQuota,
        scheduled: &ScheduledLimits,
    ) -> Option<QuotaStatus> {
        if quota.is_none() {
            return None;
        }
        let counts = self.counts.borrow().get(name).cloned().unwrap_or_default();
        let now_s = i64::try_from(schedule::now().as_secs()).unwrap_or(i64::MAX);
        let zone = schedule::zone_rules(&scheduled.schedule);
        let usage = |amount: Option<VolumeAmount>, count: &Option<VolumeCount>| {
            let VolumeAmount { bytes, period } = amount?;
            let end_s = zone.as_ref().map(|zone| period.end_s(now_s, zone));
            Some(QuotaUse {
                used_bytes: count.as_ref().map_or(0, VolumeCount::bytes),
                quota_bytes: bytes,
                period_end: end_s.and_then(|end_s| schedule::local_time(&scheduled.schedule, end_s)),
                period_end_s: end_s.and_then(|end_s| u64::try_from(end_s).ok()),
            })
        };
        Some(QuotaStatus {
            used_up: scheduled.is_quota_used_up,
            total: usage(quota.total, &counts.total),
            writes: usage(quota.writes, &counts.writes),
        })
    }
}

/// True if all periods of an object that is not here have ended, in each time zone.
fn is_over(counts: &QuotaCounts, now_s: i64) -> bool {
    let Some(zone) = schedule::zone_rules(&LimitSchedule::default()) else { return false };
    [&counts.total, &counts.writes].into_iter().flatten().all(|count| {
        let last = count.counts().iter().map(|count| count.index).max();
        // A period of one zone may begin more than a day after that of another.
        let margin = if count.period() == QuotaPeriod::Hour { 26 } else { 2 };
        last.is_none_or(|last| count.period().index(now_s, &zone) > last.saturating_add(margin))
    })
}

/// Removes the counts of objects that are not `present`, those with the earliest periods first,
/// except `max` ones.
fn drop_oldest(counts: &mut HashMap<String, QuotaCounts>, present: &HashSet<String>, max: usize) {
    if counts.len() <= present.len() + max {
        return;
    }
    let last_s = |counts: &QuotaCounts| {
        let all = [&counts.total, &counts.writes].into_iter().flatten();
        let last = |count: &VolumeCount| count.counts().iter().map(|count| count.index).max();
        all.filter_map(|count| Some(count.period().local_start_s(last(count)?))).max()
    };
    let mut removed: Vec<_> = counts
        .iter()
        .filter(|(name, _)| !present.contains(*name))
        .map(|(name, counts)| (Reverse(last_s(counts)), name.clone()))
        .collect();
    removed.sort_unstable();
    removed.iter().skip(max).for_each(|(_, name)| drop(counts.remove(name)));
}

/// Event of a quota that has been used up, or is no longer.
fn quota_event(member: &QuotaMember<'_>, is_used_up: bool, until: Option<String>) -> NewEvent {
    let QuotaMember { kind, name, quota, reserved_bps, .. } = member;
    // The limit in force is raised to the reservations.
    let quota = &VolumeQuota { rate_bps: quota.rate_bps.max(*reserved_bps), ..*quota };
    let amounts = [QuotaSetting::Total, QuotaSetting::Writes].map(|setting| (setting, setting.text(quota)));
    let amounts = amounts.into_iter().filter(|(_, text)| text != "0");
    let amounts = amounts.map(|(setting, text)| format!("{} {text}", setting.name())).collect::<Vec<_>>();
    let (amounts, rate) = (amounts.join(", "), QuotaSetting::Rate.text(quota));
    let event = match is_used_up {
        true => {
            let end = until.as_deref().map(|until| format!(" until {until}")).unwrap_or_default();
            let message =
                format!("{kind} {name} has used up its quota ({amounts}): at most {rate} bytes/s{end}");
            let event = NewEvent::new(Kind::QuotaUsedUp, message).with("rate-bps", quota.rate_bps);
            event.with("until", until)
        }
        false => {
            let message = format!("{kind} {name} is within its quota again ({amounts})");
            NewEvent::new(Kind::QuotaRenewed, message)
        }
    };
    if *kind == "disk" { event.of_disk(name) } else { event.of_group(name) }
}

#[cfg(test)]
mod tests;
