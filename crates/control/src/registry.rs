//! What runs: disks, groups, servers and exports, each by its name.
//!
//! ```text
//!   export ──► disk ──► group ──► group …
//!      └──► server
//! ```
//!
//! An arrow is a use: nothing is removed while something uses it. Disks and groups share one space
//! of names, and listings are in their order. Belongs to the main thread, and never holds a borrow
//! across an await.
//!
//! Here are disks, groups and what all have in common; servers and exports are in `exported.rs`,
//! what they are given by its id in `objects.rs`, and what is heard of a disk in `watches.rs`.

mod arrivals;
mod by_name;
mod exported;
#[cfg(test)]
mod exported_tests;
pub(crate) mod holder;
mod objects;
mod refused;
mod watches;

use std::{
    cell::{Cell, OnceCell, RefCell},
    collections::{BTreeMap, BTreeSet, HashMap},
    path::{Path, PathBuf},
    rc::{Rc, Weak},
    sync::Arc,
};

use block::{disk::Disk, layer::throttle::Group};
use by_name::ByName;
#[cfg(test)]
pub(crate) use by_name::visits;
use cluster::Cluster;
pub(crate) use exported::DoorTerms;
use objects::KeptObject;
pub(crate) use objects::NamedObject;
use policy::time::{Duration, Instant};
use reactor::op::{self, Fd};
pub use refused::Refused;
use sandbox::{self, Entered};
use settings::{Endpoint, Image};
use storage::Root;
use watches::{look_at_changes, tell_failures, tell_sizes};

pub use super::exports::{Door, NewExport, RunningExport};
pub use super::running::RunningDisk;
pub(crate) use super::running::{NodeBelow, StorageNode};
use super::{
    change::{Change, Listener},
    devices::{Devices, Listed},
    fdsets::Sets,
    left_out::LeftOut,
    loaded::Loaded,
    recording::Recordings,
    serving::Serving,
    turns::Turns,
    unopened::Unopened,
};
use crate::{
    events::{Deliveries, Events},
    listen::Listening,
};

/// Why the daemon ends.
#[derive(Debug)]
pub enum End {
    /// A client of the control socket said `quit`.
    Asked,
    /// The last client has gone, and that was to be the end.
    Idle,
    /// It can accept no more clients.
    Broken(anyhow::Error),
}

/// Asks the daemon to end, once the main thread is free: answers before can still be sent.
pub(crate) type Ender = Rc<dyn Fn(End)>;

/// All that the daemon serves.
pub struct Registry {
    started: Instant,
    /// The config file.
    pub config: Option<PathBuf>,
    /// The config file as it was read last.
    pub loaded: RefCell<Option<Rc<Loaded>>>,
    /// What the config file says is put into effect: one at a time.
    pub turns: Turns,
    /// Another daemon is about to take over: nothing is changed meanwhile.
    pub leaving: Cell<bool>,
    /// Everything comes to its end.
    pub ending: Cell<bool>,
    /// How often the service manager wants to hear of the daemon.
    pub watchdog: Cell<Option<Duration>>,
    /// Another daemon is to let clients of the control sockets in.
    pub(crate) is_control_closed: Cell<bool>,
    /// Where figures are asked for over HTTP, by what two daemons call that.
    pub told: RefCell<Vec<(String, Vec<Listening>)>>,
    /// The control sockets, by their paths.
    pub(crate) control: RefCell<Vec<(PathBuf, Fd)>>,
    disks: ByName<Rc<RunningDisk>>,
    /// Names of the nodes below disks.
    below: RefCell<BTreeSet<String>>,
    /// Disks that were removed, and are being closed.
    closing: RefCell<Vec<String>>,
    /// Disks on their way to or from another host: their names are nobody else's.
    pub(crate) moving: RefCell<BTreeSet<String>>,
    /// Disks of the config that are not open yet.
    pub unopened: RefCell<BTreeMap<String, Rc<Unopened>>>,
    /// Disks that are being added: see [`Registry::arrival`].
    arriving: RefCell<BTreeSet<String>>,
    /// Tell of the failures of each disk, and of its length, while they are held.
    watches: RefCell<BTreeMap<String, Vec<reactor::JoinHandle<()>>>>,
    /// A disk has stopped, and nothing was resumed since.
    stopped: Cell<bool>,
    groups: ByName<Arc<Group>>,
    /// Of these, what clients of the control socket have added: no config has them.
    pub(crate) added_groups: RefCell<BTreeSet<String>>,
    servers: RefCell<Vec<Rc<Serving>>>,
    /// The first server of each endpoint.
    servers_at: RefCell<HashMap<Endpoint, Rc<Serving>>>,
    /// What own doors are made with: see [`Registry::let_doors`].
    door_terms: OnceCell<DoorTerms>,
    /// The daemon ends once the last client has gone.
    pub ends_when_idle: Cell<bool>,
    /// It is still starting: see [`Registry::keep_clients_out`].
    keeps_out: Cell<bool>,
    /// A device of this host has gone, and its export with it.
    lost_device: Cell<bool>,
    exports: ByName<Rc<RunningExport>>,
    /// Ids of each disk's exports, by the disk's name.
    exports_of_disks: RefCell<BTreeMap<String, BTreeSet<String>>>,
    /// The export whose endpoint is this path, for endpoints of one export alone.
    endpoints: RefCell<BTreeMap<PathBuf, String>>,
    /// Doors that open once another daemon has given them up, by the ids of their exports.
    pub awaited: RefCell<BTreeMap<String, settings::Door>>,
    devices: OnceCell<Devices>,
    /// Promises that found no room, by whose they are.
    pub left_out: RefCell<BTreeMap<String, LeftOut>>,
    cluster: OnceCell<Rc<Cluster>>,
    image_root: OnceCell<Root>,
    sandbox: OnceCell<Entered>,
    /// Objects by id, to which images and servers refer.
    objects: RefCell<BTreeMap<String, KeptObject>>,
    /// Sets of descriptors that clients have passed.
    pub(crate) descriptors: Sets,
    listeners: RefCell<Vec<Listener>>,
    /// Recordings of requests.
    pub recordings: Rc<Recordings>,
    /// Events.
    pub events: Events,
    /// Where events are handed on.
    pub deliveries: OnceCell<Rc<Deliveries>>,
    pub(crate) ender: Ender,
}

/// While it is held, a disk is being closed.
struct Closing<'a> {
    all: &'a RefCell<Vec<String>>,
    name: &'a str,
}

impl<'a> Closing<'a> {
    fn begin(all: &'a RefCell<Vec<String>>, name: &'a str) -> Self {
        all.borrow_mut().push(name.to_owned());
        Self { all, name }
    }
}

impl Drop for Closing<'_> {
    fn drop(&mut self) {
        let mut all = self.all.borrow_mut();
        // One that was added again, and removed again, has the same name.
        if let Some(at) = all.iter().position(|name| name == self.name) {
            all.swap_remove(at);
        }
    }
}

/// All disks of a registry, at any time.
fn disks_of(registry: Weak<Registry>) -> impl Fn() -> Vec<Arc<Disk>> {
    move || registry.upgrade().map(|registry| registry.block_disks()).unwrap_or_default()
}

/// Lookup of a disk by its name.
fn disk_of(registry: Weak<Registry>) -> impl Fn(&str) -> Option<Arc<Disk>> {
    move |name| registry.upgrade()?.disks.get(name).map(|running| Arc::clone(&running.disk))
}

/// Lookup of a group by its name.
fn has_group_of(registry: Weak<Registry>) -> impl Fn(&str) -> bool {
    move |name| registry.upgrade().is_some_and(|registry| registry.groups.get(name).is_some())
}

impl Registry {
    /// Nothing yet, for a daemon that was configured by this file.
    pub fn new(config: Option<PathBuf>, ender: Ender) -> Rc<Self> {
        let new = Rc::new_cyclic(|this: &Weak<Self>| Self {
            started: reactor::now(),
            config,
            loaded: RefCell::default(),
            turns: Turns::default(),
            leaving: Cell::new(false),
            ending: Cell::new(false),
            watchdog: Cell::new(None),
            is_control_closed: Cell::new(false),
            told: RefCell::default(),
            control: RefCell::default(),
            disks: ByName::default(),
            below: RefCell::default(),
            closing: RefCell::default(),
            moving: RefCell::default(),
            unopened: RefCell::default(),
            arriving: RefCell::default(),
            watches: RefCell::default(),
            stopped: Cell::new(false),
            groups: ByName::default(),
            added_groups: RefCell::default(),
            servers: RefCell::default(),
            servers_at: RefCell::default(),
            door_terms: OnceCell::new(),
            ends_when_idle: Cell::new(false),
            keeps_out: Cell::new(false),
            lost_device: Cell::new(false),
            exports: ByName::default(),
            exports_of_disks: RefCell::default(),
            endpoints: RefCell::default(),
            awaited: RefCell::default(),
            devices: OnceCell::new(),
            left_out: RefCell::default(),
            cluster: OnceCell::new(),
            image_root: OnceCell::new(),
            sandbox: OnceCell::new(),
            objects: RefCell::default(),
            descriptors: Sets::default(),
            listeners: RefCell::default(),
            recordings: Recordings::of(
                disks_of(this.clone()),
                disk_of(this.clone()),
                has_group_of(this.clone()),
            ),
            events: Events::default(),
            deliveries: OnceCell::new(),
            ender,
        });
        let recordings = Rc::clone(&new.recordings);
        new.listen(move |change| recordings.follow(change));
        new
    }

    /// Lets nobody in at the control sockets, or whoever comes from now on. Of two processes that
    /// wait for clients of one socket, the kernel tells only one.
    pub(crate) fn close_control(&self, is_closed: bool) {
        self.is_control_closed.set(is_closed);
        if is_closed {
            self.control.borrow().iter().for_each(|(_, socket)| op::interrupt(socket));
        }
    }

    /// Time since the start.
    pub fn uptime(&self) -> Duration {
        reactor::now() - self.started
    }

    /// Groups may be those of a cluster from now on.
    pub fn join(&self, cluster: Rc<Cluster>) {
        let _ = self.cluster.set(cluster);
    }

    /// None where it is in none.
    pub fn cluster(&self) -> Option<&Rc<Cluster>> {
        self.cluster.get()
    }

    /// The cluster, if a group's limits are its.
    pub(crate) fn cluster_of(&self, group: &str) -> Option<&Rc<Cluster>> {
        self.cluster().filter(|cluster| cluster.has(group))
    }

    /// Images that are opened from now on must lie in this directory, and all they name.
    pub fn confine(&self, root: Root) {
        // Nobody widens it again.
        let _ = self.image_root.set(root);
    }

    pub(crate) fn image_root(&self) -> Option<&Root> {
        self.image_root.get()
    }

    /// From now on the daemon is in the sandbox.
    pub fn enter(&self, sandbox: Entered) {
        let _ = self.sandbox.set(sandbox);
    }

    /// None where the daemon is in none.
    pub(crate) fn sandbox(&self) -> Option<&Entered> {
        self.sandbox.get()
    }

    /// Whether disks can be given devices and files of this host.
    pub(crate) fn makes_devices(&self) -> bool {
        sandbox::makes_devices(self.sandbox())
    }

    /// Fails where the sandbox keeps an image from being opened.
    pub(crate) async fn check_image(&self, image: &Image) -> anyhow::Result<()> {
        match (self.sandbox(), image.path()) {
            (Some(sandbox), Some(path)) => sandbox.check_image(path).await,
            (Some(sandbox), None) if image.is_rbd() => sandbox.check_cluster(),
            (Some(sandbox), None) => image.remote().map_or(Ok(()), |uri| sandbox.check_remote(uri)),
            (None, _) => Ok(()),
        }
    }

    /// Calls the listener for each change of the running state.
    pub fn listen(&self, listener: impl Fn(&Change) + 'static) {
        self.listeners.borrow_mut().push(Rc::new(listener));
    }

    pub(crate) fn tell(&self, change: &Change) {
        // A copy, because a listener may add another.
        let listeners = self.listeners.borrow().clone();
        listeners.iter().for_each(|listener| listener(change));
    }

    /// Reads what devices were measured to do from the state directory. Without it,
    /// [`Registry::check_devices`] finds no device.
    pub fn know_devices(&self, state: Option<&Path>) {
        self.devices.get_or_init(|| Devices::new(state));
    }

    /// From now on finds, after each change, the devices below the disk or group that has changed, once
    /// for each name of a turn. Called once.
    pub fn follow_devices(self: &Rc<Self>) {
        let (registry, changed) = (Rc::downgrade(self), Rc::new(RefCell::new(BTreeSet::new())));
        self.listen(move |change| {
            let (Change::Listed { name } | Change::SettingsChanged { name }) = change else { return };
            let is_due = !changed.borrow().is_empty();
            changed.borrow_mut().insert(name.clone());
            if is_due {
                return;
            }
            let (registry, changed) = (Weak::clone(&registry), Rc::clone(&changed));
            reactor::spawn(async move {
                // More come before anything else has its turn.
                reactor::yield_now().await;
                let names = changed.take();
                if let Some(registry) = registry.upgrade() {
                    let refused = names.iter().filter_map(|name| registry.check_device_of(name).err());
                    refused.for_each(|error| tracing::warn!("{error:#}"));
                }
            });
        });
    }

    /// Finds the device of one disk, or those of a group. Fails if more is reserved than a device
    /// was measured to do.
    pub(crate) fn check_device_of(&self, name: &str) -> anyhow::Result<()> {
        let Some(devices) = self.devices.get() else { return Ok(()) };
        let (disk, group) = (self.disks.get(name), self.groups.get(name));
        devices.follow(name, disk.as_ref().map(|running| &running.disk), group.as_ref())
    }

    /// Finds the devices below all disks. Fails if more is reserved than a device was measured to do.
    pub fn check_devices(&self) -> anyhow::Result<()> {
        let devices = self.devices.get();
        devices.map_or(Ok(()), |devices| devices.refresh(self.block_disks(), self.groups()))
    }

    /// The devices below disks.
    pub fn devices(&self) -> Vec<Listed> {
        self.devices.get().map(|devices| devices.list(self.block_disks())).unwrap_or_default()
    }

    fn block_disks(&self) -> Vec<Arc<Disk>> {
        self.disks.all().iter().map(|running| Arc::clone(&running.disk)).collect()
    }

    /// All open disks, by name.
    pub fn disks(&self) -> Vec<Rc<RunningDisk>> {
        self.disks.all()
    }

    /// The disk with this name.
    ///
    /// # Errors
    /// There is none, or it is not open.
    pub fn disk(&self, name: &str) -> Result<Rc<RunningDisk>, Refused> {
        self.disks.get(name).ok_or_else(|| match self.is_unopened(name) {
            true => Refused::NotOpen(name.to_owned()),
            false => Refused::NoDisk(name.to_owned()),
        })
    }

    /// Adds a disk.
    ///
    /// # Errors
    /// Its name is in use.
    pub fn add_disk(self: &Rc<Self>, disk: RunningDisk) -> Result<(), Refused> {
        let name = disk.disk.name().to_string();
        self.check_name(&name)?;
        self.list_disk(name, Rc::new(disk));
        Ok(())
    }

    fn list_disk(self: &Rc<Self>, name: String, disk: Rc<RunningDisk>) {
        let failures = tell_failures(Rc::downgrade(self), name.clone(), Arc::clone(disk.disk.failures()));
        let sizes = tell_sizes(Rc::downgrade(self), name.clone(), Arc::clone(disk.disk.resized()));
        let mut watches = vec![reactor::spawn_joinable(failures), reactor::spawn_joinable(sizes)];
        let storage = disk.disk.image().storage();
        if let Some(bell) = storage.bell() {
            let (bell, every) = (Arc::clone(bell), storage.look_every());
            let changes = look_at_changes(Rc::downgrade(self), name.clone(), bell, every);
            watches.push(reactor::spawn_joinable(changes));
        }
        self.watches.borrow_mut().insert(name.clone(), watches);
        self.below.borrow_mut().extend(disk.below.iter().map(|node| node.name.clone()));
        self.disks.insert(name.clone(), disk);
        self.tell(&Change::Listed { name });
    }

    /// Takes a disk that is not exported off the list, and says so.
    pub(crate) fn unlist_disk(&self, name: &str) -> Result<Rc<RunningDisk>, Refused> {
        let disk = self.disk(name)?;
        if let Some(export) = self.exports_of(name).first() {
            return Err(Refused::Exported { disk: name.to_owned(), export: export.id.clone() });
        }
        self.disks.remove(name);
        for node in &disk.below {
            self.below.borrow_mut().remove(&node.name);
        }
        self.watches.borrow_mut().remove(name);
        self.tell(&Change::Listed { name: name.to_owned() });
        Ok(disk)
    }

    /// Removes a disk that nobody uses, and closes it.
    pub(crate) async fn remove_disk(&self, name: &str) -> Result<(), Refused> {
        let disk = self.unlist_disk(name)?;
        let _closing = Closing::begin(&self.closing, name);
        disk.close().await;
        if let Ok(disk) = Rc::try_unwrap(disk) {
            disk.until_free().await;
        }
        Ok(())
    }

    /// Whether a disk that is on no list is still being written, or on its way to another host.
    pub fn has_unlisted(&self) -> bool {
        !self.closing.borrow().is_empty() || !self.moving.borrow().is_empty()
    }

    /// A disk that is on no list, and what becomes of it: one that was removed and is still being
    /// written, that is not whole yet, or is on its way from or to another host.
    pub(crate) fn in_between(&self) -> Option<(String, &'static str)> {
        let first = |set: &RefCell<BTreeSet<String>>| set.borrow().first().cloned();
        let closing = self.closing.borrow().first().cloned().map(|name| (name, "removed"));
        let moving = || first(&self.moving).map(|name| (name, "moved"));
        closing.or_else(moving).or_else(|| first(&self.arriving).map(|name| (name, "added")))
    }

    /// Takes a disk that nobody uses out, to be put back as a part of another.
    pub(crate) fn take_disk(self: &Rc<Self>, name: &str) -> Result<RunningDisk, Refused> {
        let kept = match Rc::try_unwrap(self.unlist_disk(name)?) {
            Ok(disk) if Arc::strong_count(&disk.disk) == 1 => return Ok(disk),
            Ok(disk) => Rc::new(disk),
            Err(disk) => disk,
        };
        self.list_disk(name.to_owned(), kept);
        Err(Refused::Busy(name.to_owned()))
    }

    /// Lets all disks go on that an error has stopped.
    pub(crate) fn resume(&self) {
        for running in self.disks() {
            running.disk.failures().resume();
        }
        if self.stopped.replace(false) {
            self.tell(&Change::Resumed { all: true });
        }
    }

    /// The same of one disk.
    pub(crate) fn resume_disk(&self, name: &str) -> Result<(), Refused> {
        let disk = self.disk(name)?;
        // It may stop again at once, and then that is told.
        let is_stopped = |other: &Rc<RunningDisk>| other.disk.failures().stopped_by().is_some();
        let all = !self.disks().iter().any(|other| !Rc::ptr_eq(other, &disk) && is_stopped(other));
        if disk.disk.failures().resume() {
            self.stopped.set(!all);
            self.tell(&Change::Resumed { all });
        }
        Ok(())
    }

    /// Whether an error has stopped a disk.
    pub(crate) fn is_stopped(&self) -> bool {
        self.disks.any(|running| running.disk.failures().stopped_by().is_some())
    }

    /// Whether a disk of the config is not open yet.
    pub fn is_unopened(&self, disk: &str) -> bool {
        self.unopened.borrow().contains_key(disk)
    }

    fn unopened_member_of(&self, group: &str) -> Option<String> {
        let unopened = self.unopened.borrow();
        let member = unopened.iter().find(|(_, one)| one.group().as_deref() == Some(group));
        member.map(|(name, _)| name.clone())
    }

    pub(crate) fn is_below(&self, name: &str) -> bool {
        self.below.borrow().contains(name)
    }

    /// All groups, by name.
    pub fn groups(&self) -> Vec<Arc<Group>> {
        self.groups.all()
    }

    /// The group with this name.
    ///
    /// # Errors
    /// There is none.
    pub fn group(&self, name: &str) -> Result<Arc<Group>, Refused> {
        self.groups.get(name).ok_or_else(|| Refused::NoGroup(name.to_owned()))
    }

    pub(crate) fn add_group(&self, group: &Arc<Group>) -> Result<(), Refused> {
        self.check_name(group.name())?;
        self.groups.insert(group.name().to_owned(), Arc::clone(group));
        self.tell(&Change::Listed { name: group.name().to_owned() });
        Ok(())
    }

    pub(crate) fn remove_group(&self, name: &str) -> Result<(), Refused> {
        let group = self.group(name)?;
        if group.members() > 0
            && let Some(member) = self.members_of(&group).into_iter().next()
        {
            return Err(Refused::HasMembers { group: name.to_owned(), member });
        }
        if let Some(member) = self.unopened_member_of(name) {
            return Err(Refused::HasMembers { group: name.to_owned(), member });
        }
        self.groups.remove(name);
        self.added_groups.borrow_mut().remove(name);
        if let Some(cluster) = self.cluster() {
            cluster.leave(name);
        }
        self.tell(&Change::Listed { name: name.to_owned() });
        Ok(())
    }

    /// Names of a group's members: disks first, each kind in its order. For several groups see
    /// [`Registry::members`].
    pub(crate) fn members_of(&self, group: &Arc<Group>) -> Vec<String> {
        self.members().remove(&Arc::as_ptr(group)).unwrap_or_default()
    }

    /// Names of the members of each group that has some, in one walk.
    pub(crate) fn members(&self) -> HashMap<*const Group, Vec<String>> {
        let mut members: HashMap<_, Vec<_>> = HashMap::new();
        let mut add = |group: Option<&Arc<Group>>, name: &str| {
            if let Some(group) = group {
                members.entry(Arc::as_ptr(group)).or_default().push(name.to_owned());
            }
        };
        for running in self.disks() {
            add(running.disk.throttle().group().as_ref(), running.disk.name());
        }
        for group in self.groups() {
            add(group.parent(), group.name());
        }
        members
    }

    pub(crate) fn check_name(&self, name: &str) -> Result<(), Refused> {
        let taken = self.disks.contains(name) || self.groups.contains(name);
        let moves = self.moving.borrow().contains(name);
        if taken || moves || self.is_below(name) || self.is_unopened(name) {
            return Err(Refused::NameTaken(name.to_owned()));
        }
        Ok(())
    }
}
