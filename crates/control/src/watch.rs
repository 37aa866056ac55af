//! Watches the running state and records events. The only other sources of events are the servers
//! of NBD and vhost-user clients. Throttling by limits is only logged.
//!
//! ```text
//!   each second   disks, groups, devices ─► events::hysteresis ─────┐
//!   each change   Registry::notify, with the actor of the change ───┴─► EventLog::record
//! ```
//!
//! A sample takes a few hundred nanoseconds per disk, on the main thread. While all threads sleep
//! and no condition can change by time alone, no samples are taken, so an idle daemon does not wake
//! up.
//!
//! Never takes a lock that is held for longer, and never reads more from the kernel than a device's
//! statistics.

mod conditions;
pub(super) mod settings;

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet},
    convert::Infallible,
    rc::{Rc, Weak},
};

use block::disk::RequestFailure;
use cluster::actor;
use conditions::{WatchedConditions, WatchedDevices};
use policy::{
    request::Direction,
    time::{Duration, Instant},
};
use reactor::JoinHandle;
use serde_json::json;
use settings::{MemberSettingValues, changed_event};

use super::{
    change::RegistryChange,
    registry::{Registry, RunningEndpoint},
    throttle_log::ThrottleLog,
};
use crate::events::{Kind, NewEvent};

const SECOND: Duration = Duration::from_secs(1);
/// Age of a request at which its storage is reported as not answering.
const UNANSWERED_TIMEOUT: Duration = Duration::from_secs(10);

/// Samples every second while there is activity, and at each change, until the handle or the
/// registry is dropped. The exports `in_use` have openers from before an upgrade, which are not
/// reported.
pub fn watch_registry(registry: &Rc<Registry>, in_use: BTreeSet<String>) -> JoinHandle<()> {
    let watch = Rc::new(RefCell::new(EventWatch {
        in_use_before: in_use,
        throttle_log: ThrottleLog::starting_now(registry),
        ..EventWatch::default()
    }));
    // The first sample of a limit, reservation or watermark is only a baseline.
    watch.borrow_mut().sample(registry);
    watch.borrow_mut().record_existing(registry);
    let (listening, listener) = (Rc::downgrade(registry), Rc::downgrade(&watch));
    registry.listen(move |change| {
        if let (Some(registry), Some(watch)) = (listening.upgrade(), listener.upgrade()) {
            watch.borrow_mut().handle_change(&registry, change);
        }
    });
    let registry = Rc::downgrade(registry);
    let sample = move || Some(watch.borrow_mut().sample(&*Weak::upgrade(&registry)?));
    reactor::spawn_joinable(async move {
        let _gone: Option<Infallible> = sample_while_active(sample).await;
    })
}

/// Calls the function each second while there is activity, until it returns `None`. It returns true
/// if no condition can change by time alone.
async fn sample_while_active(mut sample: impl FnMut() -> Option<bool>) -> Option<Infallible> {
    loop {
        reactor::sleep_until(reactor::now() + SECOND).await;
        let sampled_at = reactor::now();
        // Created before the sample: otherwise a wake-up during the sample would be missed.
        let wake_up = reactor::next_wake_up();
        if !sample()? {
            continue;
        }
        wake_up.await;
        if reactor::now() - sampled_at > SECOND {
            // Activity that begins now is measured from this sample on.
            sample()?;
        }
    }
}

/// Kind of the object that a name belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemberKind {
    Disk,
    Group,
}

impl MemberKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Group => "group",
        }
    }

    fn with_subject(self, name: &str, event: NewEvent) -> NewEvent {
        match self {
            Self::Disk => event.of_disk(name),
            Self::Group => event.of_group(name),
        }
    }
}

#[derive(Default)]
struct EventWatch {
    known: BTreeMap<String, (MemberKind, MemberSettingValues)>,
    conditions: WatchedConditions,
    devices: WatchedDevices,
    stopped: BTreeSet<String>,
    backing_changed: BTreeSet<String>,
    /// Disks with an overdue request at a remote storage; true if that was reported.
    unanswered: BTreeMap<String, bool>,
    /// Disks and groups that a reload in progress has changed.
    reload_changes: Vec<String>,
    throttle_log: ThrottleLog,
    /// Devices and files of this host in use, by their exports' ids.
    used: BTreeMap<String, DeviceInUse>,
    /// Exports that were in use before an upgrade; their first sample causes no event.
    in_use_before: BTreeSet<String>,
}

/// Device or file of this host in use: a device by the kernel, a file by its openers.
struct DeviceInUse {
    disk: String,
    kind: &'static str,
    clients: usize,
    since: Instant,
}

impl DeviceInUse {
    fn use_event(&self, kind: Kind, export: &str) -> NewEvent {
        let verb = if kind == Kind::SessionStarted { "uses" } else { "has left" };
        let message = format!("a client of {} {verb} disk {}", self.kind, self.disk);
        NewEvent::new(kind, message).of_disk(&self.disk).with("export", export).with("type", self.kind)
    }

    fn end_event(&self, export: &str, connections: usize, now: Instant) -> NewEvent {
        let event = self.use_event(Kind::SessionEnded, export).with("connections", connections);
        event.with("seconds", (now - self.since).as_secs())
    }
}

fn storage_answers_event(disk: &str) -> NewEvent {
    NewEvent::new(Kind::StorageRecovered, format!("the storage of disk {disk} answers again")).of_disk(disk)
}

impl EventWatch {
    /// Records the existing objects without events.
    fn record_existing(&mut self, registry: &Registry) {
        for running in registry.disks.all() {
            let settings = MemberSettingValues::of_disk(&running);
            self.known.insert(running.disk.name().to_string(), (MemberKind::Disk, settings));
        }
        for group in registry.groups.all() {
            self.known
                .insert(group.name().to_owned(), (MemberKind::Group, MemberSettingValues::of_group(&group)));
        }
    }

    /// Takes a sample. Returns true if no condition can change until some thread wakes up.
    fn sample(&mut self, registry: &Registry) -> bool {
        let now = reactor::now();
        let events = &registry.events;
        self.conditions.sample(registry, now);
        self.devices.sample(registry, now);
        for running in registry.disks.all() {
            let name = &**running.disk.name();
            if !running.disk.image().has_changed_below() {
                self.backing_changed.remove(name);
            } else if self.backing_changed.insert(name.to_owned()) {
                let message = format!("another program changed a backing file of disk {name}");
                events.record(NewEvent::new(Kind::BackingFileChanged, message).of_disk(name));
            }
        }
        self.report_device_use(registry);
        let is_all_reported = self.report_unanswered(registry);
        let limited_ns = self.conditions.limited_ns();
        self.throttle_log.log_if_due(registry, limited_ns, now);
        let is_all_logged = is_all_reported && self.throttle_log.is_unchanged(limited_ns);
        self.conditions.is_idle() && self.devices.is_idle() && is_all_logged
    }

    /// Reports remote storage that does not answer. Returns true if all overdue storage was
    /// reported.
    fn report_unanswered(&mut self, registry: &Registry) -> bool {
        let mut before = std::mem::take(&mut self.unanswered);
        for running in registry.disks.all() {
            let image = running.disk.image();
            let storage = image.storage();
            // Only storage at a server or in a Ceph cluster tracks the age of its requests.
            let Some(age) = storage.oldest_request().filter(|_| storage.is_remote()) else { continue };
            let name = running.disk.name().to_string();
            let was_reported = before.remove(&name).unwrap_or(false);
            // After a report, other requests of the disk may still be pending.
            let is_late = age >= UNANSWERED_TIMEOUT;
            if is_late && !was_reported {
                let seconds = age.as_secs();
                let message =
                    format!("the storage of disk {name} does not answer: a request has waited {seconds} s");
                let event =
                    NewEvent::new(Kind::StorageUnresponsive, message).of_disk(&name).with("seconds", seconds);
                let connected = storage.remote_status().map(|remote| remote.is_connected);
                registry.events.record(event.with("connected", connected));
            } else if was_reported && !is_late {
                registry.events.record(storage_answers_event(&name));
            }
            self.unanswered.insert(name, is_late);
        }
        for (name, _) in before.into_iter().filter(|(_, was_reported)| *was_reported) {
            registry.events.record(storage_answers_event(&name));
        }
        self.unanswered.values().all(|is_reported| *is_reported)
    }

    /// Reports changes in the use of devices and files. A use shorter than the sampling interval is
    /// not seen.
    fn report_device_use(&mut self, registry: &Registry) {
        let now = reactor::now();
        let mut before = std::mem::take(&mut self.used);
        for export in registry.exports.all() {
            let RunningEndpoint::Separate(endpoint) = &export.endpoint else { continue };
            let clients = endpoint.server.connections();
            if endpoint.device().is_none() || clients == 0 {
                continue;
            }
            let (disk, kind) = (export.disk.disk.name().to_string(), endpoint.kind());
            let before_use =
                before.remove(&export.id).unwrap_or(DeviceInUse { disk, kind, clients: 0, since: now });
            // The flag is consumed even if no event follows.
            if clients > before_use.clients && !self.in_use_before.remove(&export.id) {
                registry.events.record(
                    before_use.use_event(Kind::SessionStarted, &export.id).with("connections", clients),
                );
            } else if clients < before_use.clients {
                registry.events.record(before_use.end_event(&export.id, clients, now));
            }
            self.used.insert(export.id.clone(), DeviceInUse { clients, ..before_use });
        }
        for (id, seen) in before {
            registry.events.record(seen.end_event(&id, 0, now));
        }
    }

    fn handle_change(&mut self, registry: &Registry, change: &RegistryChange) {
        match change {
            // A reload may still be rolled back; events follow when it is final.
            RegistryChange::Listed { name } | RegistryChange::SettingsChanged { name } if is_reload() => {
                self.reload_changes.push(name.clone());
            }
            // Its completion is announced, with the settings of that moment.
            RegistryChange::Listed { name } | RegistryChange::SettingsChanged { name }
                if registry.disks.is_incomplete(name) => {}
            RegistryChange::Listed { name } => self.report_listed(registry, name),
            RegistryChange::SettingsChanged { name } => self.report_settings(registry, name),
            RegistryChange::Reloaded => {
                let mut reported = BTreeSet::new();
                for name in std::mem::take(&mut self.reload_changes) {
                    if !reported.insert(name.clone()) {
                        continue;
                    }
                    match self.known.contains_key(&name) == Self::find(registry, &name).is_some() {
                        true => self.report_settings(registry, &name),
                        false => self.report_listed(registry, &name),
                    }
                }
            }
            RegistryChange::Failed { disk, failure } => self.report_failure(registry, disk, failure),
            RegistryChange::Resumed { .. } => self.report_resumed(registry),
            // Jobs report their own events.
            RegistryChange::JobChanged { .. }
            | RegistryChange::JobReady { .. }
            | RegistryChange::JobIoFailed { .. }
            | RegistryChange::JobEnded { .. } => {}
            RegistryChange::ExportDeleted { .. } | RegistryChange::Stopped => {}
        }
    }

    fn report_listed(&mut self, registry: &Registry, name: &str) {
        let now = Self::find(registry, name);
        let before = self.known.remove(name);
        let (kind, member_kind) = match (&before, &now) {
            (None, Some((member_kind, _))) => (added_event_type(*member_kind), *member_kind),
            (Some((member_kind, _)), None) => (removed_event_type(*member_kind), *member_kind),
            // Removed and added again, for example by a roll-back: no event.
            _ => {
                self.known.extend(now.map(|now| (name.to_owned(), now)));
                return;
            }
        };
        self.known.extend(now.map(|now| (name.to_owned(), now)));
        // A later disk of this name starts in the running state.
        self.stopped.remove(name);
        let verb = if before.is_none() { "added" } else { "removed" };
        let event = with_actor(NewEvent::new(kind, format!("{} {name} was {verb}", member_kind.name())));
        registry.events.record(member_kind.with_subject(name, event));
    }

    fn find(registry: &Registry, name: &str) -> Option<(MemberKind, MemberSettingValues)> {
        if let Ok(running) = registry.disks.get(name) {
            return Some((MemberKind::Disk, MemberSettingValues::of_disk(&running)));
        }
        registry.groups.get(name).ok().map(|group| (MemberKind::Group, MemberSettingValues::of_group(&group)))
    }

    fn report_settings(&mut self, registry: &Registry, name: &str) {
        let Some((member_kind, now)) = Self::find(registry, name) else { return };
        let Some((_, before)) = self.known.insert(name.to_owned(), (member_kind, now.clone())) else {
            return;
        };
        let changes = now.changes_since(&before);
        if changes.is_empty() {
            return;
        }
        let author = actor::current_actor().map(|actor| format!(" by {}", actor.shown())).unwrap_or_default();
        let event = changed_event(&format!("{} {name} was changed{author}", member_kind.name()), &changes);
        registry.events.record(member_kind.with_subject(name, with_actor(event)));
    }

    fn report_failure(&mut self, registry: &Registry, disk: &str, failure: &RequestFailure) {
        let operation = match failure.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        let reason = failure.error.to_string();
        let message = format!("the device failed a {operation} of disk {disk}: {reason}");
        let event = NewEvent::new(Kind::ImageError, message).of_disk(disk).with("operation", operation);
        registry.events.record(event.with("reason", reason.as_str()));
        let is_stopped =
            registry.disks.get(disk).is_ok_and(|running| running.disk.failures().stopped_by().is_some());
        if failure.stops && is_stopped && self.stopped.insert(disk.to_owned()) {
            let message = format!("disk {disk} has stopped at an error: {reason} (`weir resume` resumes it)");
            let event = NewEvent::new(Kind::DiskStopped, message).of_disk(disk).with("operation", operation);
            registry.events.record(event.with("reason", reason));
        }
    }

    fn report_resumed(&mut self, registry: &Registry) {
        let is_running = |name: &String| {
            registry.disks.get(name).is_ok_and(|running| running.disk.failures().stopped_by().is_none())
        };
        let (resumed, stopped): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.stopped).into_iter().partition(is_running);
        self.stopped.extend(stopped);
        for name in resumed {
            let event = with_actor(NewEvent::new(Kind::DiskResumed, format!("disk {name} was resumed")));
            registry.events.record(event.of_disk(&name));
        }
    }
}

const fn added_event_type(kind: MemberKind) -> Kind {
    match kind {
        MemberKind::Disk => Kind::DiskAdded,
        MemberKind::Group => Kind::GroupAdded,
    }
}

const fn removed_event_type(kind: MemberKind) -> Kind {
    match kind {
        MemberKind::Disk => Kind::DiskRemoved,
        MemberKind::Group => Kind::GroupRemoved,
    }
}

/// True if the current change is made by a reload.
fn is_reload() -> bool {
    matches!(actor::current_actor(), Some(actor::ChangeOrigin::Reload { .. }))
}

/// Adds the actor of the current change, or the daemon itself.
fn with_actor(event: NewEvent) -> NewEvent {
    let author = actor::current_actor().map_or_else(|| json!({ "kind": "daemon" }), |actor| actor.to_json());
    event.with("by", author)
}
