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

use std::{
    cell::{Cell, RefCell},
    collections::{HashMap, HashSet},
    io, iter,
    path::{Path, PathBuf},
    sync::{Arc, Weak},
};

use api::{QuotaStatus, QuotaUse};
use block::{disk::Disk, layer::throttle::ThrottleGroup};
use policy::{
    schedule::{LimitSchedule, ScheduledLimits},
    time::{Duration, Instant},
    volume_quota::{QuotaCounts, VolumeAmount, VolumeCount, VolumeQuota},
};
use settings::{QuotaSetting, schedule};

pub(crate) use self::file::StoredCounts;
pub use self::file::file;
use crate::events::{EventLog, Kind, NewEvent};

/// Interval between samples while there is a quota: bounds the volume by which it is exceeded.
pub(crate) const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum age of a stored count that has changed: bounds the loss of a crash in time.
const SAVE_INTERVAL: Duration = Duration::from_secs(10);
/// A count is stored earlier after this part of its quota: bounds the loss of a crash in volume.
const SAVE_PARTS: u64 = 100;

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

/// State file with its content.
#[derive(Debug)]
struct QuotaStore {
    file: PathBuf,
    /// Identifies the daemon in the file.
    daemon: String,
    saved_at: Instant,
    saved: HashMap<String, QuotaCounts>,
}

/// Disk or group with a quota.
struct QuotaMember<'a> {
    kind: &'static str,
    name: &'a str,
    quota: VolumeQuota,
    schedule: &'a LimitSchedule,
}

impl QuotaCounters {
    /// Reads the counts that an earlier process stored for this daemon, and stores counts there
    /// from now on. `create` creates the directory; without it, an existing one is used. Waits for
    /// a file system.
    pub fn open(
        &self,
        state: Option<&Path>,
        daemon: &str,
        create: Option<impl FnOnce(&Path) -> io::Result<()>>,
    ) {
        let file = file(state, daemon);
        let directory = file.parent().unwrap_or(Path::new(""));
        if let Some(Err(error)) = create.map(|create| create(directory)) {
            self.warn_not_stored(&file, &error.to_string());
            return;
        }
        if !directory.is_dir() {
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
        let saved_at = reactor::now();
        *self.store.borrow_mut() =
            Some(QuotaStore { file, daemon: daemon.to_owned(), saved_at, saved: counts });
    }

    /// Directory of the state file, if counts are stored.
    pub fn directory(&self) -> Option<PathBuf> {
        self.store.borrow().as_ref().and_then(|store| store.file.parent().map(Path::to_owned))
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

    /// Counts of a disk or group, for another process or host.
    pub(crate) fn stored(&self, name: &str) -> Option<StoredCounts> {
        self.counts.borrow().get(name).map(StoredCounts::of)
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
        let has_quota = disks.iter().any(|disk| !disk.throttle().settings().quota.is_none())
            || groups.iter().any(|group| !group.settings().quota.is_none());
        if !has_quota {
            self.disks.borrow_mut().clear();
            self.known.borrow_mut().clear();
            return false;
        }
        let now_s = i64::try_from(schedule::now().as_secs()).unwrap_or(i64::MAX);
        // Bytes since the last sample belong to the period that the last sample has left: at most
        // one interval of a period counts in the one before it.
        for disk in disks {
            self.count(disk);
        }
        self.disks.borrow_mut().retain(|_, known| known.disk.strong_count() > 0);
        let mut sampled = HashSet::new();
        for disk in disks {
            let (quota, scheduled) = (disk.throttle().settings().quota, disk.throttle().scheduled());
            let member =
                QuotaMember { kind: "disk", name: disk.name(), quota, schedule: &scheduled.schedule };
            sampled.extend(self.update(&member, now_s, events));
        }
        for group in groups {
            let scheduled = group.scheduled();
            let (quota, schedule) = (group.settings().quota, &scheduled.schedule);
            let member = QuotaMember { kind: "group", name: group.name(), quota, schedule };
            sampled.extend(self.update(&member, now_s, events));
        }
        self.known.borrow_mut().retain(|name, _| sampled.contains(name));
        self.counts.borrow_mut().retain(|name, counts| sampled.contains(name) || !is_over(counts, now_s));
        true
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
        let now = reactor::now();
        let counts = self.counts.borrow();
        let mut store = self.store.borrow_mut();
        let Some(store) = &mut *store else {
            drop(counts);
            self.warn_not_stored(Path::new(""), "the daemon has no directory for them");
            return;
        };
        let is_due = *counts != store.saved
            && (now - store.saved_at >= SAVE_INTERVAL || self.are_far(&counts, &store.saved));
        if !is_due {
            return;
        }
        (store.saved_at, store.saved) = (now, counts.clone());
        let (file, daemon, counts) = (store.file.clone(), store.daemon.clone(), counts.clone());
        let write = move || (file::save(&file, &daemon, &counts), file);
        reactor::spawn(async move {
            let (result, file) = reactor::run_blocking(write).await;
            if let Err(error) = result {
                tracing::warn!(file = %file.display(), "the bytes counted against quotas cannot be stored: {error}");
            }
        });
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

    /// Stores all counts, before the process ends.
    pub(crate) async fn save(&self) {
        let counts = self.counts.borrow().clone();
        let store = self.store.borrow().as_ref().map(|store| (store.file.clone(), store.daemon.clone()));
        let Some((file, daemon)) = store else { return };
        let shown = file.display().to_string();
        let result = reactor::run_blocking(move || file::save(&file, &daemon, &counts)).await;
        if let Err(error) = result {
            tracing::warn!(file = shown, "the bytes counted against quotas cannot be stored: {error}");
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
        // An hour of one zone may begin a day after that of another.
        last.is_none_or(|last| count.period().index(now_s, &zone) > last + 25)
    })
}

/// Event of a quota that has been used up, or is no longer.
fn quota_event(member: &QuotaMember<'_>, is_used_up: bool, until: Option<String>) -> NewEvent {
    let QuotaMember { kind, name, quota, .. } = member;
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
