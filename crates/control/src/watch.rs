//! Watches the running state and records events. The only other sources of events are the servers
//! of NBD and vhost-user clients. Throttling by limits is only logged.
//!
//! ```text
//!   each second   disks, groups, devices ─► events::judge ─┐
//!   each change   Registry::tell, by events::actor ───────┴─► Events::tell
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
use conditions::{Conditions, Devices};
use policy::{
    request::Direction,
    time::{Duration, Instant},
};
use reactor::JoinHandle;
use serde_json::json;
use settings::{Changed, Settings};

use super::{
    change::Change,
    held_back::HeldBack,
    registry::{Door, Registry},
};
use crate::events::{Kind, News};

const SECOND: Duration = Duration::from_secs(1);
/// Age of a request at which its storage is reported as not answering.
const LATE: Duration = Duration::from_secs(10);

/// Samples every second while there is activity, and at each change, until the handle or the
/// registry is dropped. The exports `in_use` have openers from before an upgrade, which are not
/// reported.
pub fn watch(registry: &Rc<Registry>, in_use: BTreeSet<String>) -> JoinHandle<()> {
    let watch =
        Rc::new(RefCell::new(Watch { in_use, held_back: HeldBack::from_now(registry), ..Watch::default() }));
    // The first sample of a limit, reservation or watermark is only a baseline.
    watch.borrow_mut().look(registry);
    watch.borrow_mut().adopt(registry);
    let (listening, listener) = (Rc::downgrade(registry), Rc::downgrade(&watch));
    registry.listen(move |change| {
        if let (Some(registry), Some(watch)) = (listening.upgrade(), listener.upgrade()) {
            watch.borrow_mut().follow(&registry, change);
        }
    });
    let registry = Rc::downgrade(registry);
    let look = move || Some(watch.borrow_mut().look(&*Weak::upgrade(&registry)?));
    reactor::spawn_joinable(async move {
        let _gone: Option<Infallible> = look_on(look).await;
    })
}

/// Samples until `look` returns `None`; `look` returns true if no condition can change by time
/// alone.
async fn look_on(mut look: impl FnMut() -> Option<bool>) -> Option<Infallible> {
    loop {
        reactor::sleep_until(reactor::now() + SECOND).await;
        let looked = reactor::now();
        // Created before the sample: a wake-up during the sample must not be missed.
        let somebody_wakes = reactor::next_wake_up();
        if !look()? {
            continue;
        }
        somebody_wakes.await;
        if reactor::now() - looked > SECOND {
            // Activity that begins now is measured from this sample on.
            look()?;
        }
    }
}

/// Kind of the object that a name belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    Disk,
    Group,
}

impl Of {
    const fn name(self) -> &'static str {
        match self {
            Self::Disk => "disk",
            Self::Group => "group",
        }
    }

    fn about(self, name: &str, news: News) -> News {
        match self {
            Self::Disk => news.of_disk(name),
            Self::Group => news.of_group(name),
        }
    }
}

#[derive(Default)]
struct Watch {
    known: BTreeMap<String, (Of, Settings)>,
    conditions: Conditions,
    devices: Devices,
    stopped: BTreeSet<String>,
    backing_changed: BTreeSet<String>,
    /// Disks with an overdue request at a remote storage; true if that was reported.
    unanswered: BTreeMap<String, bool>,
    /// Disks and groups that a reload in progress has changed.
    put_off: Vec<String>,
    held_back: HeldBack,
    /// Devices and files of this host in use, by their exports' ids.
    used: BTreeMap<String, InUse>,
    /// Exports that were in use before an upgrade; their first sample causes no event.
    in_use: BTreeSet<String>,
}

/// Device or file of this host in use: a device by the kernel, a file by its openers.
struct InUse {
    disk: String,
    kind: &'static str,
    clients: usize,
    since: Instant,
}

impl InUse {
    fn news(&self, kind: Kind, export: &str) -> News {
        let verb = if kind == Kind::ClientIn { "uses" } else { "has left" };
        let message = format!("a client of {} {verb} disk {}", self.kind, self.disk);
        News::new(kind, message).of_disk(&self.disk).with("export", export).with("type", self.kind)
    }

    fn gone(&self, export: &str, connections: usize, now: Instant) -> News {
        let news = self.news(Kind::ClientOut, export).with("connections", connections);
        news.with("seconds", (now - self.since).as_secs())
    }
}

fn answers(disk: &str) -> News {
    News::new(Kind::StorageAnswers, format!("the storage of disk {disk} answers again")).of_disk(disk)
}

impl Watch {
    /// Records the existing objects without events.
    fn adopt(&mut self, registry: &Registry) {
        for running in registry.disks.all() {
            let settings = Settings::of_disk(&running);
            self.known.insert(running.disk.name().to_string(), (Of::Disk, settings));
        }
        for group in registry.groups.all() {
            self.known.insert(group.name().to_owned(), (Of::Group, Settings::of_group(&group)));
        }
    }

    /// Takes a sample. Returns true if no condition can change until some thread wakes up.
    fn look(&mut self, registry: &Registry) -> bool {
        let now = reactor::now();
        let events = &registry.events;
        self.conditions.look(registry, now);
        self.devices.look(registry, now);
        for running in registry.disks.all() {
            let name = &**running.disk.name();
            if !running.disk.image().has_changed_below() {
                self.backing_changed.remove(name);
            } else if self.backing_changed.insert(name.to_owned()) {
                let message = format!("another program changed a backing file of disk {name}");
                events.tell(News::new(Kind::BackingFileChanged, message).of_disk(name));
            }
        }
        self.look_at_devices(registry);
        let all_is_told = self.look_for_answers(registry);
        let limited_ns = self.conditions.limited_ns();
        self.held_back.look(registry, limited_ns, now);
        let is_told = all_is_told && self.held_back.has_told(limited_ns);
        self.conditions.are_still() && self.devices.are_still() && is_told
    }

    /// Reports remote storage that does not answer. Returns true if all overdue storage was
    /// reported.
    fn look_for_answers(&mut self, registry: &Registry) -> bool {
        let mut before = std::mem::take(&mut self.unanswered);
        for running in registry.disks.all() {
            let storage = running.disk.image().storage();
            // Only storage at a server or in a Ceph cluster tracks the age of its requests.
            let Some(age) = storage.oldest_request().filter(|_| storage.is_remote()) else { continue };
            let name = running.disk.name().to_string();
            let was_told = before.remove(&name).unwrap_or(false);
            // After a report, other requests of the disk may still be pending.
            let is_late = age >= LATE;
            if is_late && !was_told {
                let seconds = age.as_secs();
                let message =
                    format!("the storage of disk {name} does not answer: a request has waited {seconds} s");
                let news = News::new(Kind::StorageSilent, message).of_disk(&name).with("seconds", seconds);
                let connected = storage.remote_status().map(|remote| remote.is_connected);
                registry.events.tell(news.with("connected", connected));
            } else if was_told && !is_late {
                registry.events.tell(answers(&name));
            }
            self.unanswered.insert(name, is_late);
        }
        for (name, _) in before.into_iter().filter(|(_, was_told)| *was_told) {
            registry.events.tell(answers(&name));
        }
        self.unanswered.values().all(|is_told| *is_told)
    }

    /// Reports changes in the use of devices and files. A use shorter than the sampling interval is
    /// not seen.
    fn look_at_devices(&mut self, registry: &Registry) {
        let now = reactor::now();
        let mut before = std::mem::take(&mut self.used);
        for export in registry.exports.all() {
            let Door::Own(entrance) = &export.door else { continue };
            let clients = entrance.server.connections();
            if entrance.device().is_none() || clients == 0 {
                continue;
            }
            let (disk, kind) = (export.disk.disk.name().to_string(), entrance.kind());
            let seen = before.remove(&export.id).unwrap_or(InUse { disk, kind, clients: 0, since: now });
            // The flag is consumed even if no event follows.
            if clients > seen.clients && !self.in_use.remove(&export.id) {
                registry.events.tell(seen.news(Kind::ClientIn, &export.id).with("connections", clients));
            } else if clients < seen.clients {
                registry.events.tell(seen.gone(&export.id, clients, now));
            }
            self.used.insert(export.id.clone(), InUse { clients, ..seen });
        }
        for (id, seen) in before {
            registry.events.tell(seen.gone(&id, 0, now));
        }
    }

    fn follow(&mut self, registry: &Registry, change: &Change) {
        match change {
            // A reload may still be rolled back; events follow when it is final.
            Change::Listed { name } | Change::SettingsChanged { name } if is_reload() => {
                self.put_off.push(name.clone());
            }
            Change::Listed { name } if registry.disks.is_arriving(name) => {}
            Change::Listed { name } => self.listed(registry, name),
            Change::SettingsChanged { name } => self.settings_changed(registry, name),
            Change::Reloaded => {
                let mut told = BTreeSet::new();
                for name in std::mem::take(&mut self.put_off) {
                    if !told.insert(name.clone()) {
                        continue;
                    }
                    match self.known.contains_key(&name) == Self::find(registry, &name).is_some() {
                        true => self.settings_changed(registry, &name),
                        false => self.listed(registry, &name),
                    }
                }
            }
            Change::Failed { disk, failure } => self.failed(registry, disk, failure),
            Change::Resumed { .. } => self.resumed(registry),
            Change::ExportDeleted { .. } | Change::Stopped => {}
        }
    }

    fn listed(&mut self, registry: &Registry, name: &str) {
        let now = Self::find(registry, name);
        let before = self.known.remove(name);
        let (kind, of) = match (&before, &now) {
            (None, Some((of, _))) => (added(*of), *of),
            (Some((of, _)), None) => (removed(*of), *of),
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
        let news = by(News::new(kind, format!("{} {name} was {verb}", of.name())));
        registry.events.tell(of.about(name, news));
    }

    fn find(registry: &Registry, name: &str) -> Option<(Of, Settings)> {
        if let Ok(running) = registry.disks.get(name) {
            return Some((Of::Disk, Settings::of_disk(&running)));
        }
        registry.groups.get(name).ok().map(|group| (Of::Group, Settings::of_group(&group)))
    }

    fn settings_changed(&mut self, registry: &Registry, name: &str) {
        let Some((of, now)) = Self::find(registry, name) else { return };
        let Some((_, before)) = self.known.insert(name.to_owned(), (of, now.clone())) else { return };
        let changes = now.since(&before);
        if changes.is_empty() {
            return;
        }
        let who = actor::current_actor().map(|actor| format!(" by {}", actor.shown())).unwrap_or_default();
        let news = Changed::news(&format!("{} {name} was changed{who}", of.name()), &changes);
        registry.events.tell(of.about(name, by(news)));
    }

    fn failed(&mut self, registry: &Registry, disk: &str, failure: &RequestFailure) {
        let operation = match failure.direction {
            Direction::Read => "read",
            Direction::Write => "write",
        };
        let reason = failure.error.to_string();
        let message = format!("the device failed a {operation} of disk {disk}: {reason}");
        let news = News::new(Kind::ImageError, message).of_disk(disk).with("operation", operation);
        registry.events.tell(news.with("reason", reason.as_str()));
        let is_stopped =
            registry.disks.get(disk).is_ok_and(|running| running.disk.failures().stopped_by().is_some());
        if failure.stops && is_stopped && self.stopped.insert(disk.to_owned()) {
            let message = format!("disk {disk} has stopped at an error: {reason} (`weir resume` resumes it)");
            let news = News::new(Kind::DiskStopped, message).of_disk(disk).with("operation", operation);
            registry.events.tell(news.with("reason", reason));
        }
    }

    fn resumed(&mut self, registry: &Registry) {
        let goes_on = |name: &String| {
            registry.disks.get(name).is_ok_and(|running| running.disk.failures().stopped_by().is_none())
        };
        let (resumed, stopped): (Vec<_>, Vec<_>) =
            std::mem::take(&mut self.stopped).into_iter().partition(goes_on);
        self.stopped.extend(stopped);
        for name in resumed {
            let news = by(News::new(Kind::DiskResumed, format!("disk {name} was resumed")));
            registry.events.tell(news.of_disk(&name));
        }
    }
}

const fn added(of: Of) -> Kind {
    match of {
        Of::Disk => Kind::DiskAdded,
        Of::Group => Kind::GroupAdded,
    }
}

const fn removed(of: Of) -> Kind {
    match of {
        Of::Disk => Kind::DiskRemoved,
        Of::Group => Kind::GroupRemoved,
    }
}

/// True if the current change is made by a reload.
fn is_reload() -> bool {
    matches!(actor::current_actor(), Some(actor::ChangeOrigin::Reload(_)))
}

/// Adds the actor of the current change, or the daemon itself.
fn by(news: News) -> News {
    let who = actor::current_actor().map_or_else(|| json!({ "kind": "daemon" }), |actor| actor.to_json());
    news.with("by", who)
}
