//! The running objects by name: disks, groups, servers and exports.
//!
//! ```text
//!   export ──► disk ──► group ──► group …
//!      └──► server
//! ```
//!
//! An arrow is a use: an object in use cannot be removed. Disks and groups share one namespace, and
//! listings are sorted by name. Belongs to the main thread, and never holds a borrow across an
//! await.
//!
//! ```text
//!   disks, groups, exports, jobs, objects, lifecycle    one struct each, with its own state
//!   registry, export_changes, incomplete_objects        changes that concern several of them, or
//!                                                       that notify listeners
//! ```

mod disk_watches;
mod disks;
mod export_changes;
#[cfg(test)]
mod exported_tests;
mod exports;
mod groups;
pub(crate) mod image_holder;
mod incomplete_objects;
mod jobs;
mod lifecycle;
mod name_map;
mod objects;
mod registry_error;

use std::{
    cell::{OnceCell, RefCell},
    collections::{BTreeSet, HashMap},
    path::{Path, PathBuf},
    rc::{Rc, Weak},
    sync::Arc,
};

use block::{
    device::{SharedDevice, TargetReport},
    disk::Disk,
    layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup},
};
use cluster::ClusterMembership;
use disk_watches::{watch_failures, watch_image_changes, watch_size};
pub use disks::DiskRegistry;
pub(crate) use exports::EndpointParameters;
pub use exports::ExportRegistry;
pub use groups::GroupRegistry;
pub use jobs::{JobRegistry, RunningJob, await_ends};
pub(crate) use jobs::{StartingJob, SwitchTarget};
pub use lifecycle::Lifecycle;
use name_map::NameMap;
#[cfg(test)]
pub(crate) use name_map::visits;
pub(crate) use objects::{NamedObject, ObjectRegistry};
use policy::throttle;
pub use registry_error::RegistryError;
use sandbox::{self, EnteredSandbox};
use settings::ImageLocation;
use storage::Root;

pub use super::exports::{NewNbdExport, RunningEndpoint, RunningExport};
pub use super::running_disk::RunningDisk;
pub(crate) use super::running_disk::{LowerNode, ProtocolNode};
use super::{
    change::{ChangeListener, RegistryChange},
    devices::{DeviceWithDisks, DiskDevices},
    loaded_config::LoadedConfig,
    quotas::QuotaCounters,
    recording::Recordings,
    structure_lock::StructureGuard,
};
use crate::events::{DeliveryCounters, EventLog};

/// Reason for the end of the daemon.
#[derive(Debug)]
pub enum DaemonEnd {
    /// A client of the control socket sent `quit`.
    Quit,
    /// The last client disconnected, and the daemon was started to end then.
    Idle,
    /// The daemon cannot accept clients any more.
    Broken(anyhow::Error),
}

/// Requests the end of the daemon. Takes effect once the main thread is idle, so that pending
/// replies are sent.
pub(crate) type DaemonEndRequest = Rc<dyn Fn(DaemonEnd)>;

/// All objects that the daemon serves.
pub struct Registry {
    /// Path of the config file.
    pub config: Option<PathBuf>,
    /// Config of the last successful start or reload.
    pub loaded: RefCell<Option<Rc<LoadedConfig>>>,
    /// Phase of the daemon's life.
    pub lifecycle: Lifecycle,
    /// Disks.
    pub disks: DiskRegistry,
    /// Groups.
    pub groups: GroupRegistry,
    /// Jobs on disks.
    pub jobs: JobRegistry,
    /// Exports and NBD servers.
    pub exports: ExportRegistry,
    /// Secrets, credentials and rules that images and servers refer to.
    pub(crate) objects: ObjectRegistry,
    devices: OnceCell<DiskDevices>,
    cluster: OnceCell<Rc<ClusterMembership>>,
    image_root: OnceCell<Root>,
    sandbox: OnceCell<EnteredSandbox>,
    listeners: RefCell<Vec<ChangeListener>>,
    /// Recordings of requests.
    pub recordings: Rc<Recordings>,
    /// Bytes counted against quotas by volume.
    pub quotas: QuotaCounters,
    /// Events.
    pub events: EventLog,
    /// Counters of event deliveries.
    pub deliveries: OnceCell<Rc<DeliveryCounters>>,
}

/// Returns a function that lists all disks of a registry.
fn disks_of(registry: Weak<Registry>) -> impl Fn() -> Vec<Arc<Disk>> {
    move || registry.upgrade().map(|registry| registry.disks.block_disks()).unwrap_or_default()
}

/// Returns a function that looks up a disk by its name.
fn disk_of(registry: Weak<Registry>) -> impl Fn(&str) -> Option<Arc<Disk>> {
    move |name| registry.upgrade()?.disks.find(name).map(|running| Arc::clone(&running.disk))
}

/// Returns a function that looks up a group by its name.
fn has_group_of(registry: Weak<Registry>) -> impl Fn(&str) -> bool {
    move |name| registry.upgrade().is_some_and(|registry| registry.groups.contains(name))
}

impl Registry {
    /// Empty registry of a daemon that this file configures.
    pub fn new(config: Option<PathBuf>, ender: DaemonEndRequest) -> Rc<Self> {
        let new = Rc::new_cyclic(|this: &Weak<Self>| Self {
            config,
            loaded: RefCell::default(),
            lifecycle: Lifecycle::new(ender),
            disks: DiskRegistry::default(),
            groups: GroupRegistry::default(),
            jobs: JobRegistry::default(),
            exports: ExportRegistry::default(),
            objects: ObjectRegistry::default(),
            devices: OnceCell::new(),
            cluster: OnceCell::new(),
            image_root: OnceCell::new(),
            sandbox: OnceCell::new(),
            listeners: RefCell::default(),
            recordings: Recordings::new(
                disks_of(this.clone()),
                disk_of(this.clone()),
                has_group_of(this.clone()),
            ),
            quotas: QuotaCounters::default(),
            events: EventLog::default(),
            deliveries: OnceCell::new(),
        });
        let recordings = Rc::clone(&new.recordings);
        new.listen(move |change| recordings.handle_change(change));
        new
    }

    /// Attaches the cluster; from now on groups can have cluster-wide limits.
    pub fn set_cluster(&self, cluster: Rc<ClusterMembership>) {
        let _ = self.cluster.set(cluster);
    }

    /// The cluster; `None` if the daemon is in none.
    pub fn cluster(&self) -> Option<&Rc<ClusterMembership>> {
        self.cluster.get()
    }

    /// The cluster, if the group's limits are cluster-wide.
    pub(crate) fn cluster_of(&self, group: &str) -> Option<&Rc<ClusterMembership>> {
        self.cluster().filter(|cluster| cluster.has_group(group))
    }

    /// Confines images that are opened from now on, and all files that they refer to, to a
    /// directory.
    pub fn confine(&self, root: Root) {
        // The first call wins, so the confinement can never be widened.
        let _ = self.image_root.set(root);
    }

    pub(crate) fn image_root(&self) -> Option<&Root> {
        self.image_root.get()
    }

    /// Records that the daemon has entered the sandbox.
    pub fn set_sandbox(&self, sandbox: EnteredSandbox) {
        let _ = self.sandbox.set(sandbox);
    }

    /// The sandbox; `None` if the daemon has not entered it.
    pub(crate) fn sandbox(&self) -> Option<&EnteredSandbox> {
        self.sandbox.get()
    }

    /// True if the daemon can create devices and files of this host as exports.
    pub(crate) fn makes_devices(&self) -> bool {
        sandbox::makes_devices(self.sandbox())
    }

    /// Fails if the sandbox prevents opening the image.
    pub(crate) async fn check_image(&self, image: &ImageLocation) -> anyhow::Result<()> {
        match (self.sandbox(), image.path()) {
            (Some(sandbox), Some(path)) => sandbox.check_image(path).await,
            (Some(sandbox), None) if image.is_rbd() => sandbox.check_cluster(),
            (Some(sandbox), None) => image.remote().map_or(Ok(()), |uri| sandbox.check_remote(uri)),
            (None, _) => Ok(()),
        }
    }

    /// Calls the listener for each change of the running state.
    pub fn listen(&self, listener: impl Fn(&RegistryChange) + 'static) {
        self.listeners.borrow_mut().push(Rc::new(listener));
    }

    pub(crate) fn notify(&self, change: &RegistryChange) {
        // A copy: a listener may add another one.
        let listeners = self.listeners.borrow().clone();
        listeners.iter().for_each(|listener| listener(change));
    }

    /// Reads measured capacities from the state directory. Without this call,
    /// [`Registry::check_devices`] resolves no device.
    pub fn read_capacities(&self, state: Option<&Path>) {
        self.devices.get_or_init(|| DiskDevices::new(state));
    }

    /// Counts bytes against quotas by volume since the last sample; true if there is a quota.
    /// Call it before a disk is removed, or leaves a group.
    pub(crate) fn sample_quotas(&self) -> bool {
        self.quotas.sample(&self.disks.block_disks(), &self.groups.all(), &self.events)
    }

    /// Counts the last bytes against quotas, and stores the counts before the process ends.
    pub async fn store_quotas(&self) {
        // Also without a quota: it may have been removed since the last write.
        self.sample_quotas();
        self.quotas.save().await;
    }

    /// After each change, resolves the devices of the changed disk or group, once per name and pass
    /// of the executor. Must be called once.
    pub fn follow_devices(self: &Rc<Self>) {
        let (registry, changed) = (Rc::downgrade(self), Rc::new(RefCell::new(BTreeSet::new())));
        self.listen(move |change| {
            let (RegistryChange::Listed { name } | RegistryChange::SettingsChanged { name }) = change else {
                return;
            };
            // A nonempty set means that a task for this pass is already spawned.
            let is_due = !changed.borrow().is_empty();
            changed.borrow_mut().insert(name.clone());
            if is_due {
                return;
            }
            let (registry, changed) = (Weak::clone(&registry), Rc::clone(&changed));
            reactor::spawn(async move {
                // Further changes of this pass are collected before the check runs.
                reactor::yield_now().await;
                let names = changed.take();
                if let Some(registry) = registry.upgrade() {
                    let refused = names.iter().filter_map(|name| registry.check_device_of(name).err());
                    refused.for_each(|error| tracing::warn!("{error:#}"));
                }
            });
        });
    }

    /// Resolves the devices of one disk or group. Fails if a reservation exceeds the measured
    /// capacity of a device.
    pub(crate) fn check_device_of(&self, name: &str) -> anyhow::Result<()> {
        let Some(devices) = self.devices.get() else { return Ok(()) };
        let (disk, group) = (self.disks.find(name), self.groups.find(name));
        devices.update(name, disk.as_ref().map(|running| &running.disk), group.as_ref())
    }

    /// Resolves the devices of all disks. Fails if a reservation exceeds the measured capacity of a
    /// device.
    pub fn check_devices(&self) -> anyhow::Result<()> {
        let devices = self.devices.get();
        devices.map_or(Ok(()), |devices| devices.refresh(self.disks.block_disks(), self.groups.all()))
    }

    /// Devices with the disks that are stored on them.
    pub fn devices(&self) -> Vec<DeviceWithDisks> {
        self.devices.get().map(|devices| devices.list(self.disks.block_disks())).unwrap_or_default()
    }

    /// The device or server whose performance this disk shares with others; `None` before devices
    /// are known.
    pub fn shared_device(&self, disk: &Arc<Disk>) -> Option<SharedDevice> {
        Some(self.devices.get()?.shared_device(disk))
    }

    /// State of the latency target of the disk or group with this name; `None` if it has none.
    pub fn latency_report(&self, name: &str) -> Option<TargetReport> {
        self.devices.get()?.latency_report(name)
    }

    /// True if a disk or a group has a latency target.
    pub(crate) fn has_latency_targets(&self) -> bool {
        self.devices.get().is_some_and(DiskDevices::has_latency_targets)
    }

    /// Adds a disk.
    ///
    /// # Errors
    /// Its name is in use.
    pub fn add_disk(self: &Rc<Self>, disk: RunningDisk) -> Result<(), RegistryError> {
        let name = disk.disk.name().to_string();
        self.check_name(&name)?;
        self.list_disk(name, Rc::new(disk));
        Ok(())
    }

    fn list_disk(self: &Rc<Self>, name: String, disk: Rc<RunningDisk>) {
        let failures = watch_failures(Rc::downgrade(self), name.clone(), Arc::clone(disk.disk.failures()));
        let sizes = watch_size(Rc::downgrade(self), name.clone(), Arc::clone(disk.disk.resized()));
        let mut watches = vec![reactor::spawn_joinable(failures), reactor::spawn_joinable(sizes)];
        let image = disk.disk.image();
        let storage = image.storage();
        if let Some(notifier) = storage.resize_notifier() {
            let (notifier, every) = (Arc::clone(notifier), storage.poll_interval());
            let changes = watch_image_changes(Rc::downgrade(self), name.clone(), notifier, every);
            // Only images in a Ceph cluster have a notifier.
            watches.push(reactor::spawn_joinable(changes));
        }
        self.disks.insert(name.clone(), disk, watches);
        self.notify(&RegistryChange::Listed { name });
    }

    /// Removes a disk without exports from the list and notifies listeners.
    pub(crate) fn remove_from_list(&self, name: &str) -> Result<Rc<RunningDisk>, RegistryError> {
        let disk = self.unlist(name)?;
        self.notify(&RegistryChange::Listed { name: name.to_owned() });
        Ok(disk)
    }

    fn unlist(&self, name: &str) -> Result<Rc<RunningDisk>, RegistryError> {
        let disk = self.disks.get(name)?;
        if let Some(export) = self.exports.of_disk(name).first() {
            return Err(RegistryError::Exported { disk: name.to_owned(), export: export.id.clone() });
        }
        self.jobs.check_idle(name)?;
        // Its last bytes count against the quotas of its groups.
        self.quotas.count_before_change(&disk.disk);
        self.disks.remove(name);
        Ok(disk)
    }

    /// Removes an unused disk, and closes it.
    pub(crate) async fn remove_disk(&self, name: &str) -> Result<(), RegistryError> {
        let disk = self.unlist(name)?;
        // Before `notify`, whose listeners book unmet reservations, and before the image is
        // closed, which may take long.
        let (member, before) = (disk.disk.throttle(), disk.disk.throttle().settings());
        let unreserved = DiskSettings { share: before.share.with_reservation(0, 0), ..before };
        log_unreleased(name, member.configure_and_move(unreserved, member.group().as_ref()));
        self.notify(&RegistryChange::Listed { name: name.to_owned() });
        let _closing = self.disks.mark_closing(name);
        disk.close().await;
        // The last reference: no request can reopen the files, so waiting for them terminates.
        if let Ok(disk) = Rc::try_unwrap(disk) {
            disk.wait_until_free().await;
        }
        Ok(())
    }

    /// Removes an unused disk and returns it, for use as a node below another disk.
    pub(crate) fn take_out_disk(self: &Rc<Self>, name: &str) -> Result<RunningDisk, RegistryError> {
        let busy = match Rc::try_unwrap(self.remove_from_list(name)?) {
            // A request in flight holds a reference; the disk is listed again and reported as busy.
            Ok(disk) if Arc::strong_count(&disk.disk) == 1 => return Ok(disk),
            Ok(disk) => Rc::new(disk),
            Err(disk) => disk,
        };
        self.list_disk(name.to_owned(), busy);
        Err(RegistryError::Busy(name.to_owned()))
    }

    /// Resumes all disks that stopped at an error.
    pub(crate) fn resume(&self) {
        for running in self.disks.all() {
            running.disk.failures().resume();
        }
        // QMP's RESUME follows only a STOP.
        if self.disks.stopped.replace(false) {
            self.notify(&RegistryChange::Resumed { all: true });
        }
    }

    /// Resumes one disk that stopped at an error.
    pub(crate) fn resume_disk(&self, name: &str) -> Result<(), RegistryError> {
        let disk = self.disks.get(name)?;
        // Computed before the resume: the disk may stop again at once, which is reported
        // separately.
        let is_stopped = |other: &Rc<RunningDisk>| other.disk.failures().stopped_by().is_some();
        let all = !self.disks.all().iter().any(|other| !Rc::ptr_eq(other, &disk) && is_stopped(other));
        if disk.disk.failures().resume() {
            self.disks.stopped.set(!all);
            self.notify(&RegistryChange::Resumed { all });
        }
        Ok(())
    }

    pub(crate) fn add_group(&self, group: &Arc<ThrottleGroup>) -> Result<(), RegistryError> {
        self.check_name(group.name())?;
        self.groups.insert(group);
        self.notify(&RegistryChange::Listed { name: group.name().to_owned() });
        Ok(())
    }

    pub(crate) fn remove_group(&self, name: &str) -> Result<(), RegistryError> {
        let group = self.groups.get(name)?;
        // The counter avoids a pass over all disks for an empty group.
        if group.members() > 0
            && let Some(member) = self.members_of(&group).into_iter().next()
        {
            return Err(RegistryError::HasMembers { group: name.to_owned(), member });
        }
        // An unavailable disk enters its group once it opens, and a disk whose migration fails
        // enters it again, so both count as members.
        let disks = &self.disks;
        let member = disks.unavailable_member_of(name).or_else(|| disks.migrating_member_of(name));
        if let Some(member) = member {
            return Err(RegistryError::HasMembers { group: name.to_owned(), member });
        }
        self.groups.remove(name);
        let before = group.settings();
        let unreserved = GroupSettings { share: before.share.with_reservation(0, 0), ..before };
        log_unreleased(name, group.set(unreserved));
        if let Some(cluster) = self.cluster() {
            cluster.remove_group(name);
        }
        self.notify(&RegistryChange::Listed { name: name.to_owned() });
        Ok(())
    }

    /// Names of a group's members: disks first, then groups, each sorted. For several groups see
    /// [`Registry::members`].
    pub(crate) fn members_of(&self, group: &Arc<ThrottleGroup>) -> Vec<String> {
        self.members().remove(&Arc::as_ptr(group)).unwrap_or_default()
    }

    /// Names of the members of each non-empty group, collected in one pass.
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

    /// Waits until no reload is in progress, and keeps reloads from starting while the guard lives.
    /// `None` during a start, which includes its commands.
    ///
    /// # Errors
    /// An upgrade is in progress.
    pub(crate) async fn lock_structure(&self) -> Result<Option<StructureGuard<'_>>, RegistryError> {
        if self.lifecycle.are_clients_delayed.get() {
            return Ok(None);
        }
        let guard = self.lifecycle.structure_lock.lock_shared().await;
        if self.lifecycle.is_upgrading.get() {
            return Err(RegistryError::TakenOver);
        }
        Ok(Some(guard))
    }

    pub(crate) fn check_name(&self, name: &str) -> Result<(), RegistryError> {
        if self.disks.has_name(name) || self.groups.contains(name) {
            return Err(RegistryError::NameTaken(name.to_owned()));
        }
        Ok(())
    }
}

fn log_unreleased(name: &str, released: Result<(), throttle::ThrottleError>) {
    if let Err(error) = released {
        tracing::error!("{name}: was removed, but its reservation could not be released: {error}");
    }
}
