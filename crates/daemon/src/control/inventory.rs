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

use std::{
    cell::{Cell, OnceCell, RefCell},
    collections::{BTreeMap, btree_map::Entry},
    path::{Path, PathBuf},
    rc::{Rc, Weak},
    sync::Arc,
};

use anyhow::{Context as _, anyhow};
use block::{
    disk::{Disk, Failures},
    image::Secret,
    layer::throttle::Group,
    reactor::{
        self, Worker,
        op::{self, Fd},
    },
    storage::{Root, rbd::Bell},
};
use event_listener::Event;
use export::nbd::{self, NotRemoved, Removal};
use policy::{
    access::Names,
    time::{Duration, Instant},
};
use settings::{Image, SocketAccess};

use super::{
    change::{Change, Listener},
    devices::{Devices, Listed},
    doors::{self, Entrance, Taken},
    fdsets::Sets,
    loaded::Loaded,
    recording::Recordings,
    serving::Serving,
};
pub(crate) use super::{
    exports::{Door, NewExport, RunningExport},
    running::{NodeBelow, RunningDisk, StorageNode},
};
use crate::{
    cluster::Cluster,
    events::{Deliveries, Events},
    listen::{Inherited, Listening},
    sandbox::Entered,
};

/// Why something was not done. Nothing has changed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Refused {
    #[error("disk {0}: there is none of this name (`weir status` lists them)")]
    NoDisk(String),
    #[error("group {0}: there is none of this name (`weir status` lists them)")]
    NoGroup(String),
    #[error("export {0}: there is none with this id (`weir status` lists them)")]
    NoExport(String),
    #[error("secret {0}: there is none of this name (`object-add` makes one)")]
    NoSecret(String),
    #[error("{0}: a disk or a group has this name already (choose another)")]
    NameTaken(String),
    #[error("export {0}: there is one with this id already (choose another)")]
    IdTaken(String),
    #[error("export {name}: there is one of this name at {address} already (choose another)")]
    ExportNameTaken { name: String, address: String },
    #[error("disk {0}: another command is at work on it (try again)")]
    Busy(String),
    #[error("disk {disk}: it is exported as {export} (remove the export first)")]
    Exported { disk: String, export: String },
    #[error("group {group}: {member} is in it (move it out first)")]
    HasMembers { group: String, member: String },
    #[error("export {id}: {connections} clients are connected (disconnect them, or remove it in mode hard)")]
    HasClients { id: String, connections: usize },
}

#[derive(Debug)]
pub(crate) enum End {
    /// A client of the control socket said `quit`.
    Asked,
    /// The last client has gone, and that was to be the end.
    Idle,
    /// It can accept no more clients.
    Broken(anyhow::Error),
}

/// Asks the daemon to end, once the main thread is free: answers before can still be sent.
pub(crate) type Ender = Rc<dyn Fn(End)>;

/// What doors and servers that are added later are made with.
pub(crate) struct DoorTerms {
    pub(crate) workers: Rc<Vec<Worker>>,
    /// Who may connect to sockets.
    pub(crate) access: SocketAccess,
    /// Of servers that are added later.
    pub(crate) nbd: nbd::Terms,
    /// Sockets that were passed to the daemon.
    pub(crate) inherited: RefCell<Inherited>,
}

pub(crate) struct Inventory {
    started: Instant,
    pub(crate) config: Option<PathBuf>,
    /// The config file as it was read last.
    pub(crate) loaded: RefCell<Option<Rc<Loaded>>>,
    /// It is being read again.
    pub(crate) reloading: Cell<bool>,
    /// Another daemon is about to take over: nothing is changed meanwhile.
    pub(crate) leaving: Cell<bool>,
    /// Everything comes to its end.
    pub(crate) ending: Cell<bool>,
    /// How often the service manager wants to hear of the daemon.
    pub(crate) watchdog: Cell<Option<Duration>>,
    /// Another daemon is to let clients of the control sockets in.
    pub(crate) is_control_closed: Cell<bool>,
    /// Where figures are asked for over HTTP, by what two daemons call that.
    pub(crate) told: RefCell<Vec<(String, Vec<Listening>)>>,
    /// The control sockets, by their paths.
    pub(crate) control: RefCell<Vec<(PathBuf, Fd)>>,
    disks: RefCell<BTreeMap<String, Rc<RunningDisk>>>,
    /// Tell of the failures of each disk, and of its length, while they are held.
    watches: RefCell<BTreeMap<String, Vec<reactor::JoinHandle<()>>>>,
    /// A disk has stopped, and nothing was resumed since.
    stopped: Cell<bool>,
    groups: RefCell<BTreeMap<String, Arc<Group>>>,
    servers: RefCell<Vec<Rc<Serving>>>,
    /// What own doors are made with: see [`Inventory::let_doors`].
    door_terms: OnceCell<DoorTerms>,
    /// The daemon ends once the last client has gone.
    pub(crate) ends_when_idle: Cell<bool>,
    /// It is still starting: see [`Inventory::keep_clients_out`].
    keeps_out: Cell<bool>,
    /// A device of this host has gone, and its export with it.
    lost_device: Cell<bool>,
    exports: RefCell<BTreeMap<String, Rc<RunningExport>>>,
    /// Doors that open once another daemon has given them up, by the ids of their exports.
    pub(crate) awaited: RefCell<BTreeMap<String, settings::Door>>,
    devices: OnceCell<Devices>,
    cluster: OnceCell<Rc<Cluster>>,
    image_root: OnceCell<Root>,
    sandbox: OnceCell<Entered>,
    secrets: RefCell<BTreeMap<String, Secret>>,
    /// Keys of TLS that servers can be given.
    credentials: RefCell<BTreeMap<String, nbd::TlsServer>>,
    /// Rules about names that servers can be given.
    names: RefCell<BTreeMap<String, Names>>,
    /// Sets of descriptors that clients have passed.
    pub(crate) descriptors: Sets,
    listeners: RefCell<Vec<Listener>>,
    pub(crate) recordings: Rc<Recordings>,
    pub(crate) events: Events,
    /// Where events are handed on.
    pub(crate) deliveries: OnceCell<Rc<Deliveries>>,
    pub(crate) ender: Ender,
}

/// All disks of an inventory, at any time.
fn disks_of(inventory: Weak<Inventory>) -> impl Fn() -> Vec<Arc<Disk>> {
    move || inventory.upgrade().map(|inventory| inventory.block_disks()).unwrap_or_default()
}

impl Inventory {
    /// Nothing yet, for a daemon that was configured by this file.
    pub(crate) fn new(config: Option<PathBuf>, ender: Ender) -> Rc<Self> {
        let new = Rc::new_cyclic(|this: &Weak<Self>| Self {
            started: reactor::now(),
            config,
            loaded: RefCell::default(),
            reloading: Cell::new(false),
            leaving: Cell::new(false),
            ending: Cell::new(false),
            watchdog: Cell::new(None),
            is_control_closed: Cell::new(false),
            told: RefCell::default(),
            control: RefCell::default(),
            disks: RefCell::default(),
            watches: RefCell::default(),
            stopped: Cell::new(false),
            groups: RefCell::default(),
            servers: RefCell::default(),
            door_terms: OnceCell::new(),
            ends_when_idle: Cell::new(false),
            keeps_out: Cell::new(false),
            lost_device: Cell::new(false),
            exports: RefCell::default(),
            awaited: RefCell::default(),
            devices: OnceCell::new(),
            cluster: OnceCell::new(),
            image_root: OnceCell::new(),
            sandbox: OnceCell::new(),
            secrets: RefCell::default(),
            credentials: RefCell::default(),
            names: RefCell::default(),
            descriptors: Sets::default(),
            listeners: RefCell::default(),
            recordings: Recordings::of(disks_of(this.clone())),
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

    pub(crate) fn uptime(&self) -> Duration {
        reactor::now() - self.started
    }

    /// Groups may be those of a cluster from now on.
    pub(crate) fn join(&self, cluster: Rc<Cluster>) {
        let _ = self.cluster.set(cluster);
    }

    /// None where it is in none.
    pub(crate) fn cluster(&self) -> Option<&Rc<Cluster>> {
        self.cluster.get()
    }

    /// The cluster, if a group's limits are its.
    pub(crate) fn cluster_of(&self, group: &str) -> Option<&Rc<Cluster>> {
        self.cluster().filter(|cluster| cluster.has(group))
    }

    /// Images that are opened from now on must lie in this directory, and all they name.
    pub(crate) fn confine(&self, root: Root) {
        // Nobody widens it again.
        let _ = self.image_root.set(root);
    }

    pub(crate) fn image_root(&self) -> Option<&Root> {
        self.image_root.get()
    }

    /// From now on the daemon is in the sandbox.
    pub(crate) fn enter(&self, sandbox: Entered) {
        let _ = self.sandbox.set(sandbox);
    }

    /// What is opened from now on lets nobody in before [`Inventory::let_clients_in`], but devices
    /// of this host: the kernel reads one to make it.
    pub(crate) fn keep_clients_out(&self) {
        self.keeps_out.set(true);
    }

    /// Everything that is open, and is opened later, has clients from now on.
    pub(crate) fn let_clients_in(self: &Rc<Self>) {
        self.keeps_out.set(false);
        for serving in self.servers() {
            self.accept(&serving);
        }
        for export in self.exports() {
            if let Door::Own(entrance) = &export.door {
                self.accept_at(&export.id, entrance);
            }
        }
    }

    /// Lets clients of NBD in there, unless that has to wait.
    pub(crate) fn accept(&self, serving: &Serving) {
        if !self.keeps_out.get() {
            let ender = Rc::clone(&self.ender);
            serving.accept(move |error| ender(End::Broken(error)));
        }
    }

    /// None where the daemon is in none.
    pub(crate) fn sandbox(&self) -> Option<&Entered> {
        self.sandbox.get()
    }

    /// Fails where the sandbox keeps an image from being opened.
    pub(crate) fn check_image(&self, image: &Image) -> anyhow::Result<()> {
        match (self.sandbox(), image.path()) {
            (Some(sandbox), Some(path)) => sandbox.check_image(path),
            (Some(sandbox), None) if image.is_rbd() => sandbox.check_cluster(),
            (Some(sandbox), None) => image.remote().map_or(Ok(()), |uri| sandbox.check_remote(uri)),
            (None, _) => Ok(()),
        }
    }

    pub(crate) fn listen(&self, listener: impl Fn(&Change) + 'static) {
        self.listeners.borrow_mut().push(Rc::new(listener));
    }

    pub(crate) fn tell(&self, change: &Change) {
        // A copy, because a listener may add another.
        let listeners = self.listeners.borrow().clone();
        listeners.iter().for_each(|listener| listener(change));
    }

    /// Finds the devices below the disks, now and after each change. Called once. Fails if more is
    /// reserved than a device was measured to do.
    pub(crate) fn look_at_devices(self: &Rc<Self>, state: Option<&Path>) -> anyhow::Result<()> {
        let devices = self.devices.get_or_init(|| Devices::new(state));
        devices.refresh(self.block_disks(), self.groups())?;
        let inventory = Rc::downgrade(self);
        self.listen(move |change| {
            if let (Some(inventory), Change::Listed { .. } | Change::SettingsChanged { .. }) =
                (inventory.upgrade(), change)
                && let Some(devices) = inventory.devices.get()
                && let Err(error) = devices.refresh(inventory.block_disks(), inventory.groups())
            {
                tracing::warn!("{error:#}");
            }
        });
        Ok(())
    }

    /// Fails if more is reserved than a device was measured to do.
    pub(crate) fn check_devices(&self) -> anyhow::Result<()> {
        let devices = self.devices.get();
        devices.map_or(Ok(()), |devices| devices.refresh(self.block_disks(), self.groups()))
    }

    pub(crate) fn devices(&self) -> Vec<Listed> {
        self.devices.get().map(|devices| devices.list(self.block_disks())).unwrap_or_default()
    }

    fn block_disks(&self) -> Vec<Arc<Disk>> {
        self.disks.borrow().values().map(|running| Arc::clone(&running.disk)).collect()
    }

    pub(crate) fn add_secret(&self, id: &str, secret: Secret) -> Result<(), Refused> {
        if self.secrets.borrow().contains_key(id) {
            return Err(Refused::NameTaken(id.to_owned()));
        }
        self.secrets.borrow_mut().insert(id.to_owned(), secret);
        Ok(())
    }

    pub(crate) fn secret(&self, id: &str) -> Result<Secret, Refused> {
        self.secrets.borrow().get(id).cloned().ok_or_else(|| Refused::NoSecret(id.to_owned()))
    }

    /// Whether there was one. Images that it opened stay open.
    pub(crate) fn remove_secret(&self, id: &str) -> bool {
        self.secrets.borrow_mut().remove(id).is_some()
    }

    pub(crate) fn secrets(&self) -> Vec<String> {
        self.secrets.borrow().keys().cloned().collect()
    }

    pub(crate) fn add_credentials(&self, id: &str, keys: nbd::TlsServer) -> Result<(), Refused> {
        match self.credentials.borrow_mut().entry(id.to_owned()) {
            Entry::Occupied(_) => Err(Refused::NameTaken(id.to_owned())),
            Entry::Vacant(free) => {
                free.insert(keys);
                Ok(())
            }
        }
    }

    pub(crate) fn credentials(&self, id: &str) -> Option<nbd::TlsServer> {
        self.credentials.borrow().get(id).cloned()
    }

    /// Whether there were any. Servers that have them keep them.
    pub(crate) fn remove_credentials(&self, id: &str) -> bool {
        self.credentials.borrow_mut().remove(id).is_some()
    }

    pub(crate) fn add_names(&self, id: &str, names: Names) -> Result<(), Refused> {
        match self.names.borrow_mut().entry(id.to_owned()) {
            Entry::Occupied(_) => Err(Refused::NameTaken(id.to_owned())),
            Entry::Vacant(free) => {
                free.insert(names);
                Ok(())
            }
        }
    }

    pub(crate) fn names(&self, id: &str) -> Option<Names> {
        self.names.borrow().get(id).cloned()
    }

    /// Whether there were any. Servers that have them keep them.
    pub(crate) fn remove_names(&self, id: &str) -> bool {
        self.names.borrow_mut().remove(id).is_some()
    }

    pub(crate) fn disks(&self) -> Vec<Rc<RunningDisk>> {
        self.disks.borrow().values().cloned().collect()
    }

    pub(crate) fn disk(&self, name: &str) -> Result<Rc<RunningDisk>, Refused> {
        self.disks.borrow().get(name).cloned().ok_or_else(|| Refused::NoDisk(name.to_owned()))
    }

    pub(crate) fn add_disk(self: &Rc<Self>, disk: RunningDisk) -> Result<(), Refused> {
        let name = disk.disk.name().to_string();
        self.check_name(&name)?;
        self.list_disk(name, Rc::new(disk));
        Ok(())
    }

    fn list_disk(self: &Rc<Self>, name: String, disk: Rc<RunningDisk>) {
        let failures = tell_failures(Rc::downgrade(self), name.clone(), Arc::clone(disk.disk.failures()));
        let sizes = tell_sizes(Rc::downgrade(self), name.clone(), Arc::clone(disk.disk.resized()));
        let mut watches = vec![reactor::spawn_joinable(failures), reactor::spawn_joinable(sizes)];
        if let Some(bell) = disk.disk.image().storage().bell() {
            let changes = look_at_changes(Rc::downgrade(self), name.clone(), Arc::clone(bell));
            watches.push(reactor::spawn_joinable(changes));
        }
        self.watches.borrow_mut().insert(name.clone(), watches);
        self.disks.borrow_mut().insert(name.clone(), disk);
        self.tell(&Change::Listed { name });
    }

    /// Takes a disk that is not exported off the list, and says so.
    fn unlist_disk(&self, name: &str) -> Result<Rc<RunningDisk>, Refused> {
        let disk = self.disk(name)?;
        let exports = self.exports();
        if let Some(export) = exports.iter().find(|export| Rc::ptr_eq(&export.disk, &disk)) {
            return Err(Refused::Exported { disk: name.to_owned(), export: export.id.clone() });
        }
        self.disks.borrow_mut().remove(name);
        self.watches.borrow_mut().remove(name);
        self.tell(&Change::Listed { name: name.to_owned() });
        Ok(disk)
    }

    /// Removes a disk that nobody uses, and closes it.
    pub(crate) async fn remove_disk(&self, name: &str) -> Result<(), Refused> {
        self.unlist_disk(name)?.close().await;
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

    /// Lets all disks go on that an error has stopped; how many there were.
    pub(crate) fn resume(&self) -> usize {
        let resumed = self.disks().iter().filter(|running| running.disk.failures().resume()).count();
        if self.stopped.replace(false) {
            self.tell(&Change::Resumed);
        }
        resumed
    }

    /// Whether an error has stopped a disk.
    pub(crate) fn is_stopped(&self) -> bool {
        self.disks.borrow().values().any(|running| running.disk.failures().stopped_by().is_some())
    }

    pub(crate) fn is_below(&self, name: &str) -> bool {
        self.disks.borrow().values().any(|disk| disk.below.iter().any(|node| node.name == name))
    }

    pub(crate) fn groups(&self) -> Vec<Arc<Group>> {
        self.groups.borrow().values().cloned().collect()
    }

    pub(crate) fn group(&self, name: &str) -> Result<Arc<Group>, Refused> {
        self.groups.borrow().get(name).cloned().ok_or_else(|| Refused::NoGroup(name.to_owned()))
    }

    pub(crate) fn add_group(&self, group: &Arc<Group>) -> Result<(), Refused> {
        self.check_name(group.name())?;
        self.groups.borrow_mut().insert(group.name().to_owned(), Arc::clone(group));
        self.tell(&Change::Listed { name: group.name().to_owned() });
        Ok(())
    }

    pub(crate) fn remove_group(&self, name: &str) -> Result<(), Refused> {
        let group = self.group(name)?;
        if let Some(member) = self.members_of(&group).into_iter().next() {
            return Err(Refused::HasMembers { group: name.to_owned(), member });
        }
        self.groups.borrow_mut().remove(name);
        if let Some(cluster) = self.cluster() {
            cluster.leave(name);
        }
        self.tell(&Change::Listed { name: name.to_owned() });
        Ok(())
    }

    pub(crate) fn members_of(&self, group: &Arc<Group>) -> Vec<String> {
        let disks = self.disks.borrow();
        let inside = |disk: &&Rc<RunningDisk>| {
            disk.disk.throttle().group().is_some_and(|of_disk| Arc::ptr_eq(&of_disk, group))
        };
        let disks = disks.values().filter(inside).map(|disk| disk.disk.name().to_string());
        let groups = self.groups.borrow();
        let below = |other: &&Arc<Group>| other.parent().is_some_and(|parent| Arc::ptr_eq(parent, group));
        disks.chain(groups.values().filter(below).map(|group| group.name().to_owned())).collect()
    }

    pub(crate) fn check_name(&self, name: &str) -> Result<(), Refused> {
        let taken = self.disks.borrow().contains_key(name) || self.groups.borrow().contains_key(name);
        if taken || self.is_below(name) {
            return Err(Refused::NameTaken(name.to_owned()));
        }
        Ok(())
    }

    pub(crate) fn servers(&self) -> Vec<Rc<Serving>> {
        self.servers.borrow().clone()
    }

    pub(crate) fn add_server(self: &Rc<Self>, serving: &Rc<Serving>) {
        self.servers.borrow_mut().push(Rc::clone(serving));
        if self.ends_when_idle.get() {
            // It may wait for ever, and must keep nothing by it.
            let (server, inventory) = (Arc::clone(&serving.server), Rc::downgrade(self));
            reactor::spawn(async move {
                server
                    .wait_while(|_| inventory.upgrade().is_some_and(|inventory| !inventory.is_idle()))
                    .await;
                if let Some(inventory) = inventory.upgrade() {
                    (inventory.ender)(End::Idle);
                }
            });
        }
    }

    /// Takes a server off the list. Whoever has it ends it.
    pub(crate) fn remove_server(&self, serving: &Rc<Serving>) {
        self.servers.borrow_mut().retain(|known| !Rc::ptr_eq(known, serving));
    }

    /// Takes a server away with all its exports; returns when its last client has gone.
    pub(crate) async fn stop_server(self: &Rc<Self>, serving: &Rc<Serving>) {
        self.remove_server(serving);
        serving.close();
        for export in self.exports() {
            if matches!(&export.door, Door::Nbd(of, _) if Rc::ptr_eq(of, serving)) {
                let _ = self.remove_export(&export.id, Removal::Hard);
            }
        }
        serving.stop().await;
    }

    pub(crate) fn has_exports(&self, serving: &Rc<Serving>) -> bool {
        let is_there =
            |export: &Rc<RunningExport>| matches!(&export.door, Door::Nbd(at, _) if Rc::ptr_eq(at, serving));
        self.exports.borrow().values().any(is_there)
    }

    /// Whether clients have been served, and none is left.
    fn is_idle(&self) -> bool {
        let served = || {
            self.servers.borrow().iter().any(|serving| serving.server.has_served())
                || self.entrances().iter().any(|entrance| entrance.server.has_served())
        };
        self.connections() == 0 && (self.lost_device.get() || served())
    }

    pub(crate) fn connections(&self) -> usize {
        let nbd: usize = self.servers.borrow().iter().map(|serving| serving.server.connections()).sum();
        nbd + self.entrances().iter().map(|entrance| entrance.server.connections()).sum::<usize>()
    }

    /// Doors of one export's own.
    pub(crate) fn entrances(&self) -> Vec<Rc<Entrance>> {
        let exports = self.exports.borrow();
        let entrance = |export: &Rc<RunningExport>| match &export.door {
            Door::Own(entrance) => Some(Rc::clone(entrance)),
            Door::Nbd(..) => None,
        };
        exports.values().filter_map(entrance).collect()
    }

    /// A disk may have another length: who sees it through a door of its own is told.
    fn look_at_size(&self, disk: &Rc<RunningDisk>) {
        for export in self.exports.borrow().values() {
            if let Door::Own(entrance) = &export.door
                && Rc::ptr_eq(&export.disk, disk)
            {
                entrance.server.look_at_size();
            }
        }
    }

    /// Those included whose last clients are on their way out.
    pub(crate) fn exports(&self) -> Vec<Rc<RunningExport>> {
        self.exports.borrow().values().cloned().collect()
    }

    pub(crate) fn export(&self, id: &str) -> Result<Rc<RunningExport>, Refused> {
        self.exports.borrow().get(id).cloned().ok_or_else(|| Refused::NoExport(id.to_owned()))
    }

    /// Whether there is an export with this id, or is to be one.
    pub(crate) fn has_id(&self, id: &str) -> bool {
        self.exports.borrow().contains_key(id) || self.awaited.borrow().contains_key(id)
    }

    pub(crate) fn add_export(&self, serving: &Rc<Serving>, new: NewExport) -> Result<(), Refused> {
        let disk = self.disk(&new.disk)?;
        if self.has_id(&new.id) {
            return Err(Refused::IdTaken(new.id));
        }
        let export = nbd::Export {
            name: new.name.as_str().into(),
            description: new.description.as_str().into(),
            disk: Arc::clone(&disk.disk),
            read_only: new.read_only,
            bitmaps: Arc::clone(&new.bitmaps),
            access: new.access.clone(),
        };
        let Some(number) = serving.server.add(export) else {
            return Err(Refused::ExportNameTaken { name: new.name, address: serving.address() });
        };
        let export = RunningExport {
            id: new.id.clone(),
            name: new.name.clone(),
            disk,
            door: Door::Nbd(Rc::clone(serving), number),
            said: None,
            read_only: new.read_only,
            ending: Cell::new(false),
            new: Some(new),
        };
        self.exports.borrow_mut().insert(export.id.clone(), Rc::new(export));
        Ok(())
    }

    /// Where the queues of own doors run from now on, and who may connect to their sockets.
    pub(crate) fn let_doors(
        &self,
        workers: &Rc<Vec<Worker>>,
        access: &SocketAccess,
        nbd: nbd::Terms,
        inherited: Inherited,
    ) {
        let (workers, access) = (Rc::clone(workers), access.clone());
        let _ = self.door_terms.set(DoorTerms { workers, access, nbd, inherited: RefCell::new(inherited) });
    }

    /// What [`Inventory::let_doors`] was told.
    ///
    /// # Errors
    /// Before it was.
    pub(crate) fn door_terms(&self) -> anyhow::Result<&DoorTerms> {
        self.door_terms.get().context("nothing runs yet")
    }

    /// An export with a door of its own, which is open when this returns, and made of what another
    /// daemon had if that is passed. Its address.
    pub(crate) async fn add_door(
        self: &Rc<Self>,
        id: String,
        disk: Rc<RunningDisk>,
        read_only: bool,
        door: &settings::Door,
        taken: Option<Taken>,
    ) -> anyhow::Result<String> {
        if self.has_id(&id) {
            return Err(Refused::IdTaken(id).into());
        }
        self.sandbox().map_or(Ok(()), |sandbox| sandbox.check_door(door))?;
        let DoorTerms { workers, access, inherited, .. } = self.door_terms()?;
        let read_only = read_only || door.read_only() || disk.disk.image().is_read_only();
        // What another has is not served before it gives it up.
        let is_at_once = taken.is_none();
        let taken = Cell::new(taken);
        let terms = doors::Terms { id: &id, disk: &disk, read_only, access, inherited, workers, taken };
        let entrance = doors::open(door, &terms).await?;
        let address = entrance.address().to_owned();
        if (is_at_once && entrance.device().is_some()) || !self.keeps_out.get() {
            self.accept_at(&id, &entrance);
        }
        // Making a device takes a while, in which others have their turn.
        let name = disk.disk.name().to_string();
        let refused = match self.disk(&name) {
            Ok(still) if Rc::ptr_eq(&still, &disk) && !self.exports.borrow().contains_key(&id) => None,
            Ok(still) if Rc::ptr_eq(&still, &disk) => Some(Refused::IdTaken(id.clone())),
            _ => Some(Refused::NoDisk(name.clone())),
        };
        if let Some(refused) = refused {
            entrance.stop().await;
            return Err(refused.into());
        }
        if self.ends_when_idle.get() {
            let (server, inventory) = (Arc::clone(&entrance.server), Rc::downgrade(self));
            reactor::spawn(async move {
                let busy = || inventory.upgrade().is_some_and(|inventory| !inventory.is_idle());
                server.wait_while(Box::new(busy)).await;
                if let Some(inventory) = inventory.upgrade() {
                    (inventory.ender)(End::Idle);
                }
            });
        }
        let export = RunningExport {
            id: id.clone(),
            name,
            disk,
            door: Door::Own(entrance),
            said: Some(door.clone()),
            new: None,
            read_only,
            ending: Cell::new(false),
        };
        self.exports.borrow_mut().insert(id, Rc::new(export));
        Ok(address)
    }

    fn accept_at(self: &Rc<Self>, id: &str, entrance: &Rc<Entrance>) {
        let (inventory, id) = (Rc::downgrade(self), id.to_owned());
        entrance.accept(move |result| {
            if let Some(inventory) = inventory.upgrade() {
                inventory.door_ended(&id, result);
            }
        });
    }

    /// Nobody closed it: its device was removed from outside, or it can let nobody in any more.
    fn door_ended(self: &Rc<Self>, id: &str, result: std::io::Result<()>) {
        let Ok(export) = self.export(id) else { return };
        let Door::Own(entrance) = &export.door else { return };
        let address = entrance.address();
        if entrance.device().is_none() {
            if let Err(error) = result {
                let error = anyhow!("{address}: no machine can connect any more: {error} (restart weir)");
                (self.ender)(End::Broken(error));
            }
            return;
        }
        match result {
            Ok(()) => tracing::info!(export = id, device = address, "the device has gone"),
            Err(error) => tracing::error!(export = id, device = address, %error, "the device has broken"),
        }
        self.lost_device.set(true);
        // It has no clients any more.
        let _ = self.remove_export(id, Removal::Hard);
    }

    /// No client finds the export any more when this returns. Its id and its disk stay in use until
    /// its last client is gone and [`Change::ExportDeleted`] follows.
    pub(crate) fn remove_export(self: &Rc<Self>, id: &str, removal: Removal) -> Result<(), Refused> {
        reactor::spawn(self.removal(id, removal)?);
        Ok(())
    }

    /// The same, and waits for its last client once it is polled.
    pub(crate) fn removal(
        self: &Rc<Self>,
        id: &str,
        removal: Removal,
    ) -> Result<impl Future<Output = ()> + 'static, Refused> {
        let export = self.export(id)?;
        let is_gone = match export.door.remove(removal) {
            Ok(()) => false,
            // Removed already, and on its way out: nothing is left to refuse.
            Err(NotRemoved::Unknown) => true,
            Err(NotRemoved::InUse { connections }) => {
                return Err(Refused::HasClients { id: id.to_owned(), connections });
            }
        };
        export.ending.set(true);
        let inventory = Rc::clone(self);
        Ok(async move {
            if is_gone {
                return;
            }
            export.door.wait_until_unused().await;
            inventory.exports.borrow_mut().remove(&export.id);
            inventory.tell(&Change::ExportDeleted { id: export.id.clone() });
            if inventory.ends_when_idle.get() && inventory.is_idle() {
                (inventory.ender)(End::Idle);
            }
        })
    }
}

/// Whoever gives a disk another length, each of its exports sees it: a program may have written
/// behind the end of a file that shows it.
async fn tell_sizes(inventory: Weak<Inventory>, disk: String, resized: Arc<Event>) {
    let mut next = resized.listen();
    loop {
        next.await;
        next = resized.listen();
        let Some(inventory) = inventory.upgrade() else { return };
        if let Ok(running) = inventory.disk(&disk) {
            inventory.look_at_size(&running);
        }
    }
}

/// Looks at the size of an image whenever its cluster says that somebody has changed it.
async fn look_at_changes(inventory: Weak<Inventory>, disk: String, bell: Arc<Bell>) {
    loop {
        bell.rung().await;
        let Some(inventory) = inventory.upgrade() else { return };
        if let Ok(running) = inventory.disk(&disk)
            && let Err(error) = running.disk.look_again().await
        {
            tracing::warn!(disk, %error, "cannot see whether the image was resized");
        }
    }
}

/// Says at once that a disk was stopped, and of other failures the last in a second, as QEMU does:
/// their rate is in the hand of clients.
async fn tell_failures(inventory: Weak<Inventory>, disk: String, failures: Arc<Failures>) {
    let mut failure = failures.next(false).await;
    loop {
        let Some(inventory) = inventory.upgrade() else { return };
        inventory.tell(&Change::Failed { disk: disk.clone(), failure });
        if failure.stops && failures.stopped_by().is_some() && !inventory.stopped.replace(true) {
            inventory.tell(&Change::Stopped);
        }
        drop(inventory);
        failure = match reactor::timeout(Duration::from_secs(1), failures.next(true)).await {
            Ok(failure) => failure,
            Err(_) => failures.next(false).await,
        };
    }
}
