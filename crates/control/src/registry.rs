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
//! ```text
//!   disks, groups, exports, objects, lifecycle    a struct each, with its own state
//!   registry, exported, arrivals                  changes that concern several of them, or that
//!                                                 listeners hear of
//! ```

mod arrivals;
mod by_name;
mod disks;
mod exported;
#[cfg(test)]
mod exported_tests;
mod exports;
mod groups;
pub(crate) mod holder;
mod lifecycle;
mod objects;
mod refused;
mod watches;

use std::{
    cell::{OnceCell, RefCell},
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
    rc::{Rc, Weak},
    sync::Arc,
};

use block::{disk::Disk, layer::throttle::ThrottleGroup};
use by_name::ByName;
#[cfg(test)]
pub(crate) use by_name::visits;
use cluster::ClusterMembership;
pub use disks::Disks;
pub(crate) use exports::DoorTerms;
pub use exports::Exports;
pub use groups::Groups;
pub use lifecycle::Lifecycle;
pub(crate) use objects::{NamedObject, Objects};
pub use refused::Refused;
use sandbox::{self, EnteredSandbox};
use settings::ImageLocation;
use storage::Root;
use watches::{look_at_changes, tell_failures, tell_sizes};

pub use super::exports::{Door, NewExport, RunningExport};
pub use super::running::RunningDisk;
pub(crate) use super::running::{NodeBelow, StorageNode};
use super::{
    change::{Change, Listener},
    devices::{Devices, Listed},
    loaded::Loaded,
    recording::Recordings,
};
use crate::events::{Deliveries, Events};

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
    /// The config file.
    pub config: Option<PathBuf>,
    /// The config file as it was read last.
    pub loaded: RefCell<Option<Rc<Loaded>>>,
    /// The phases of the daemon's life.
    pub lifecycle: Lifecycle,
    /// Disks.
    pub disks: Disks,
    /// Groups.
    pub groups: Groups,
    /// Exports and NBD servers.
    pub exports: Exports,
    /// Secrets, credentials and rules, to which images and servers refer.
    pub(crate) objects: Objects,
    devices: OnceCell<Devices>,
    cluster: OnceCell<Rc<ClusterMembership>>,
    image_root: OnceCell<Root>,
    sandbox: OnceCell<EnteredSandbox>,
    listeners: RefCell<Vec<Listener>>,
    /// Recordings of requests.
    pub recordings: Rc<Recordings>,
    /// Events.
    pub events: Events,
    /// Where events are handed on.
    pub deliveries: OnceCell<Rc<Deliveries>>,
}

/// All disks of a registry, at any time.
fn disks_of(registry: Weak<Registry>) -> impl Fn() -> Vec<Arc<Disk>> {
    move || registry.upgrade().map(|registry| registry.disks.block_disks()).unwrap_or_default()
}

/// Lookup of a disk by its name.
fn disk_of(registry: Weak<Registry>) -> impl Fn(&str) -> Option<Arc<Disk>> {
    move |name| registry.upgrade()?.disks.find(name).map(|running| Arc::clone(&running.disk))
}

/// Lookup of a group by its name.
fn has_group_of(registry: Weak<Registry>) -> impl Fn(&str) -> bool {
    move |name| registry.upgrade().is_some_and(|registry| registry.groups.contains(name))
}

impl Registry {
    /// Nothing yet, for a daemon that was configured by this file.
    pub fn new(config: Option<PathBuf>, ender: Ender) -> Rc<Self> {
        let new = Rc::new_cyclic(|this: &Weak<Self>| Self {
            config,
            loaded: RefCell::default(),
            lifecycle: Lifecycle::new(ender),
            disks: Disks::default(),
            groups: Groups::default(),
            exports: Exports::default(),
            objects: Objects::default(),
            devices: OnceCell::new(),
            cluster: OnceCell::new(),
            image_root: OnceCell::new(),
            sandbox: OnceCell::new(),
            listeners: RefCell::default(),
            recordings: Recordings::of(
                disks_of(this.clone()),
                disk_of(this.clone()),
                has_group_of(this.clone()),
            ),
            events: Events::default(),
            deliveries: OnceCell::new(),
        });
        let recordings = Rc::clone(&new.recordings);
        new.listen(move |change| recordings.follow(change));
        new
    }

    /// Groups may be those of a cluster from now on.
    pub fn join(&self, cluster: Rc<ClusterMembership>) {
        let _ = self.cluster.set(cluster);
    }

    /// None where it is in none.
    pub fn cluster(&self) -> Option<&Rc<ClusterMembership>> {
        self.cluster.get()
    }

    /// The cluster, if a group's limits are its.
    pub(crate) fn cluster_of(&self, group: &str) -> Option<&Rc<ClusterMembership>> {
        self.cluster().filter(|cluster| cluster.has_group(group))
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
    pub fn enter(&self, sandbox: EnteredSandbox) {
        let _ = self.sandbox.set(sandbox);
    }

    /// None where the daemon is in none.
    pub(crate) fn sandbox(&self) -> Option<&EnteredSandbox> {
        self.sandbox.get()
    }

    /// Whether disks can be given devices and files of this host.
    pub(crate) fn makes_devices(&self) -> bool {
        sandbox::makes_devices(self.sandbox())
    }

    /// Fails where the sandbox keeps an image from being opened.
    pub(crate) async fn check_image(&self, image: &ImageLocation) -> anyhow::Result<()> {
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

    /// From now on finds, after each change, the devices below the disk or group that has changed,
    /// once for each name of a turn. Called once.
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
        let (disk, group) = (self.disks.find(name), self.groups.find(name));
        devices.follow(name, disk.as_ref().map(|running| &running.disk), group.as_ref())
    }

    /// Finds the devices below all disks. Fails if more is reserved than a device was measured to
    /// do.
    pub fn check_devices(&self) -> anyhow::Result<()> {
        let devices = self.devices.get();
        devices.map_or(Ok(()), |devices| devices.refresh(self.disks.block_disks(), self.groups.all()))
    }

    /// The devices below disks.
    pub fn devices(&self) -> Vec<Listed> {
        self.devices.get().map(|devices| devices.list(self.disks.block_disks())).unwrap_or_default()
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
        if let Some(bell) = storage.resize_notifier() {
            let (bell, every) = (Arc::clone(bell), storage.poll_interval());
            let changes = look_at_changes(Rc::downgrade(self), name.clone(), bell, every);
            watches.push(reactor::spawn_joinable(changes));
        }
        self.disks.insert(name.clone(), disk, watches);
        self.tell(&Change::Listed { name });
    }

    /// Takes a disk that is not exported off the list, and says so.
    pub(crate) fn unlist_disk(&self, name: &str) -> Result<Rc<RunningDisk>, Refused> {
        let disk = self.disks.get(name)?;
        if let Some(export) = self.exports.of_disk(name).first() {
            return Err(Refused::Exported { disk: name.to_owned(), export: export.id.clone() });
        }
        self.disks.remove(name);
        self.tell(&Change::Listed { name: name.to_owned() });
        Ok(disk)
    }

    /// Removes a disk that nobody uses, and closes it.
    pub(crate) async fn remove_disk(&self, name: &str) -> Result<(), Refused> {
        let disk = self.unlist_disk(name)?;
        let _closing = self.disks.closing(name);
        disk.close().await;
        if let Ok(disk) = Rc::try_unwrap(disk) {
            disk.until_free().await;
        }
        Ok(())
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
        for running in self.disks.all() {
            running.disk.failures().resume();
        }
        if self.disks.stopped.replace(false) {
            self.tell(&Change::Resumed { all: true });
        }
    }

    /// The same of one disk.
    pub(crate) fn resume_disk(&self, name: &str) -> Result<(), Refused> {
        let disk = self.disks.get(name)?;
        // It may stop again at once, and then that is told.
        let is_stopped = |other: &Rc<RunningDisk>| other.disk.failures().stopped_by().is_some();
        let all = !self.disks.all().iter().any(|other| !Rc::ptr_eq(other, &disk) && is_stopped(other));
        if disk.disk.failures().resume() {
            self.disks.stopped.set(!all);
            self.tell(&Change::Resumed { all });
        }
        Ok(())
    }

    pub(crate) fn add_group(&self, group: &Arc<ThrottleGroup>) -> Result<(), Refused> {
        self.check_name(group.name())?;
        self.groups.insert(group);
        self.tell(&Change::Listed { name: group.name().to_owned() });
        Ok(())
    }

    pub(crate) fn remove_group(&self, name: &str) -> Result<(), Refused> {
        let group = self.groups.get(name)?;
        if group.members() > 0
            && let Some(member) = self.members_of(&group).into_iter().next()
        {
            return Err(Refused::HasMembers { group: name.to_owned(), member });
        }
        if let Some(member) = self.disks.unavailable_member_of(name) {
            return Err(Refused::HasMembers { group: name.to_owned(), member });
        }
        self.groups.remove(name);
        if let Some(cluster) = self.cluster() {
            cluster.remove_group(name);
        }
        self.tell(&Change::Listed { name: name.to_owned() });
        Ok(())
    }

    /// Names of a group's members: disks first, each kind in its order. For several groups see
    /// [`Registry::members`].
    pub(crate) fn members_of(&self, group: &Arc<ThrottleGroup>) -> Vec<String> {
        self.members().remove(&Arc::as_ptr(group)).unwrap_or_default()
    }

    /// Names of the members of each group that has some, in one walk.
    pub(crate) fn members(&self) -> HashMap<*const ThrottleGroup, Vec<String>> {
        let mut members: HashMap<_, Vec<_>> = HashMap::new();
        let mut add = |group: Option<&Arc<ThrottleGroup>>, name: &str| {
            if let Some(group) = group {
                members.entry(Arc::as_ptr(group)).or_default().push(name.to_owned());
            }
        };
        for running in self.disks.all() {
            add(running.disk.throttle().group().as_ref(), running.disk.name());
        }
        for group in self.groups.all() {
            add(group.parent(), group.name());
        }
        members
    }

    pub(crate) fn check_name(&self, name: &str) -> Result<(), Refused> {
        if self.disks.has_name(name) || self.groups.contains(name) {
            return Err(Refused::NameTaken(name.to_owned()));
        }
        Ok(())
    }
}
