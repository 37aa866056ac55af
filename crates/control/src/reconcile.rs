//! Brings the running state to a desired one: the difference between both, as one change.
//!
//! ```text
//!   difference ─► open images, bind sockets              nothing has changed yet
//!                        │
//!      settings, groups, disks, exports                  each step can be rolled back
//!                        │
//!      removed disks, groups and servers are closed      no client uses them
//! ```
//!
//! A command at the control socket may come between two steps. Steps that it could harm check the
//! running state again; otherwise the later change wins.

pub(crate) mod applied;
pub(crate) mod difference;
mod dry_run;
pub(crate) mod seats;

use std::{
    collections::{BTreeSet, HashSet},
    fs,
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use block::layer::throttle::{Group, GroupSettings};
use difference::Difference;
use export::nbd::{self, Removal};
use image::Image;
use policy::throttle::Share;
use seats::{Node, Seat, promising_nothing};
use serde_json::Value;
use settings::{DiskConfig, Endpoint, Plan, SecretSource};

use super::{
    assemble::{self, Assembly},
    change::Change,
    listen,
    loaded::Loaded,
    opening::{Silent, Trial},
    registry::{DoorTerms, Refused, Registry, RunningDisk},
    serving::Serving,
    wanted::{self, Running, Wanted, Way},
};

/// A pipe may never say its passphrase, and every later reload would wait for this one.
pub(crate) async fn check_secrets(disk: &settings::PlacedDisk) -> anyhow::Result<()> {
    for source in &disk.qcow2.secrets {
        let SecretSource::File(path) = source else { continue };
        // What is not there is told by whoever reads it.
        let of_call = path.clone();
        let metadata = reactor::blocking(move || fs::metadata(of_call)).await;
        let is_file = metadata.map_or(true, |metadata| metadata.is_file());
        ensure!(
            is_file,
            "disk {}: secret-file: {} is no file, and only a start waits for what it says (use a file, or restart weir)",
            disk.name,
            path.display()
        );
    }
    Ok(())
}

pub(crate) struct Work<'a> {
    registry: &'a Rc<Registry>,
    loaded: &'a Loaded,
    plan: &'a Plan,
    /// What is to be undone, the last first.
    pub(crate) done: Vec<Done>,
    /// Disks and groups with other settings, to be told once nothing is undone any more.
    pub(crate) set: BTreeSet<String>,
    pub(crate) told: Vec<Value>,
    /// New disks that nobody answers for.
    pub(crate) silent: Vec<(String, Silent)>,
}

/// Something that was done, with what it takes to undo it.
pub(crate) enum Done {
    Configured(Rc<RunningDisk>, Box<DiskConfig>),
    Seated(Vec<Seat>),
    GroupAdded(String),
    DiskAdded(String),
    ServerAdded(Rc<Serving>),
    /// With what is to be told of it once it is not put back.
    ExportRemoved {
        wanted: Box<Wanted>,
        id: String,
        gone: Option<Change>,
    },
    ExportAdded(String),
}

impl<'a> Work<'a> {
    pub(crate) fn new(registry: &'a Rc<Registry>, loaded: &'a Loaded, plan: &'a Plan) -> Self {
        let (done, set, told, silent) = (Vec::new(), BTreeSet::new(), Vec::new(), Vec::new());
        Self { registry, loaded, plan, done, set, told, silent }
    }
}

impl Work<'_> {
    pub(crate) async fn apply(&mut self, difference: &Difference) -> anyhow::Result<()> {
        self.check_doors(difference)?;
        let images = self.open(difference).await?;
        let servers = self.bind()?;
        for &index in &difference.kept_disks {
            let planned = &self.plan.disks[index];
            self.configure(&self.registry.disk(&planned.name)?, planned).await?;
        }
        self.seat(difference, images)?;
        for serving in &servers {
            self.registry.add_server(serving);
            self.done.push(Done::ServerAdded(Rc::clone(serving)));
        }
        let running = Running::of(self.registry);
        for wanted in &difference.old_exports {
            let Some(export) = running.find(wanted) else { continue };
            let told = wanted.told(self.registry);
            // Images took their time to open.
            export.check_unused().await?;
            let gone = self.registry.removal(&export.id, Removal::Safe)?.await;
            self.done.push(Done::ExportRemoved {
                wanted: Box::new(wanted.clone()),
                id: export.id.clone(),
                gone,
            });
            self.told.push(applied::exported(told, &wanted.disk, "removed"));
        }
        let silent = &self.silent;
        let is_open = |wanted: &&Wanted| silent.iter().all(|(disk, _)| *disk != wanted.disk);
        for wanted in difference.new_exports.iter().filter(is_open) {
            let export = wanted.add(self.registry).await.map_err(|error| self.at(wanted, error))?;
            self.done.push(Done::ExportAdded(export.id.clone()));
            self.told.push(applied::exported(wanted.told(self.registry), &wanted.disk, "added"));
        }
        // Who comes first finds everything.
        for serving in servers {
            self.registry.accept(&serving);
        }
        Ok(())
    }

    /// What the sandbox would keep from being opened, before anything is.
    fn check_doors(&self, difference: &Difference) -> anyhow::Result<()> {
        let Some(sandbox) = self.registry.sandbox() else { return Ok(()) };
        for wanted in &difference.new_exports {
            if let Way::Own(door) = &wanted.way {
                sandbox.check_door(door).map_err(|error| self.at(wanted, error))?;
            }
        }
        Ok(())
    }

    /// With where the file asks for an export, and for which.
    fn at(&self, wanted: &Wanted, error: anyhow::Error) -> anyhow::Error {
        let place = difference::place_of(self.plan, wanted);
        let place = place.map(|place| format!("{place}: ")).unwrap_or_default();
        let address = match &wanted.way {
            Way::Own(door) => door.address(),
            Way::Nbd { endpoint, .. } => endpoint.to_string(),
        };
        let at = match error.to_string().starts_with(&address) {
            true => String::new(),
            false => format!(" at {address}"),
        };
        error.context(format!("{place}disk {}{at}", wanted.disk))
    }

    /// The same of the first export at a server that is not there.
    fn place_of_first(&self, server: &settings::Server) -> String {
        let disk = server.exports.first().map(|export| &self.plan.disks[export.disk]);
        let Some(disk) = disk else { return "daemon".to_owned() };
        if !disk.exports.is_empty() {
            let export = disk.nbd_exports().find(|(_, export)| export.listen == server.endpoint);
            let place = export.and_then(|(index, _)| disk.item("export", index, ""));
            return format!("{}: disk {}", place.unwrap_or_else(|| disk.place("name")), disk.name);
        }
        let address = match &server.endpoint {
            Endpoint::Address(address) => address.to_string(),
            Endpoint::Inherited | Endpoint::Passed(_) => "the sockets that were passed".to_owned(),
        };
        format!(
            "{}: has no export, and [daemon] no nbd, so it is for NBD at {address} (write its export, such as {{ type = \"nbd\", listen = \"unix:PATH\" }})",
            disk.place("name")
        )
    }

    async fn open(&mut self, difference: &Difference) -> anyhow::Result<Vec<(usize, Image)>> {
        let root = self.registry.image_root().cloned();
        let mut assembly = Assembly::new(root, self.loaded.budgets.clone());
        let mut trials = Vec::new();
        for &index in &difference.new_disks {
            let planned = &self.plan.disks[index];
            let place = || planned.place("image").to_string();
            self.registry.check_image(&planned.image).await.with_context(place)?;
            check_secrets(planned).await?;
            let opening = assembly.opening(planned).await.with_context(place)?;
            trials.push((index, Trial::begin(opening, false)));
        }
        let mut images = Vec::new();
        for (index, trial) in trials {
            let planned = &self.plan.disks[index];
            let place = || planned.place("image").to_string();
            let moved = self.registry.cluster().and_then(|cluster| cluster.moved_to(&planned.name));
            let opened = match trial.outcome().await {
                Ok(opened) => opened,
                Err(silent) => {
                    self.silent.push((planned.name.clone(), silent));
                    continue;
                }
            };
            let opened = opened.map_err(|error| self.registry.naming_holder_of(error)).with_context(place);
            let opened = match moved {
                Some(host) => {
                    opened.with_context(|| format!("disk {} has moved to host {host}", planned.name))
                }
                None => opened,
            };
            images.push((index, opened?));
        }
        Ok(images)
    }

    /// Servers at addresses that have none, with nobody let in yet.
    fn bind(&self) -> anyhow::Result<Vec<Rc<Serving>>> {
        let DoorTerms { workers, inherited, .. } = self.registry.door_terms()?;
        let service = &self.plan.service;
        let is_new = |server: &&settings::Server| wanted::server(self.registry, &server.endpoint).is_none();
        let serve = |server: &settings::Server| {
            let place = || self.place_of_first(server);
            if let (Some(sandbox), Endpoint::Address(address)) = (self.registry.sandbox(), &server.endpoint) {
                sandbox.check_address(address).with_context(place)?;
            }
            let listeners = listen::open(&server.endpoint, &service.sockets, &mut inherited.borrow_mut());
            let listeners = listeners.with_context(place)?;
            let nbd =
                nbd::Server::new(self.loaded.tls.clone(), assemble::terms(service, &self.registry.events));
            Ok(Serving::new(nbd, server.endpoint.clone(), listeners, workers))
        };
        self.plan.servers.iter().filter(is_new).map(serve).collect()
    }

    /// Puts in force what can be changed of a disk but its limits, shares and group.
    async fn configure(&mut self, running: &Rc<RunningDisk>, planned: &DiskConfig) -> anyhow::Result<()> {
        let before = running.current_config();
        let (now, wanted) = (applied::of_disk_alone(&before), applied::of_disk_alone(planned));
        if now == wanted {
            return Ok(());
        }
        let name = running.disk.name();
        self.done.push(Done::Configured(Rc::clone(running), Box::new(before)));
        configure(running, planned).await.with_context(|| format!("disk {name}"))?;
        self.set.insert(name.to_string());
        self.told.extend(applied::settings("disk", name, now, wanted));
        Ok(())
    }

    /// Limits, shares, promises, groups and disks, as one: nothing is awaited in between.
    fn seat(&mut self, difference: &Difference, images: Vec<(usize, Image)>) -> anyhow::Result<()> {
        let groups = self.make_groups(difference)?;
        let group_of = |disk: &settings::PlacedDisk| {
            disk.group.as_ref().and_then(|group| self.registry.group(group).ok())
        };
        let mut seats = Vec::new();
        for (planned, group) in self.plan.groups.iter().zip(&groups) {
            let now = Seat::now(&Node::Group(Arc::clone(group)));
            seats.push(Seat { settings: self.of_group(planned, &now.settings), ..now });
        }
        for &index in &difference.kept_disks {
            let planned = &self.plan.disks[index];
            let node = Node::Disk(Arc::clone(&self.registry.disk(&planned.name)?.disk));
            seats.push(Seat { node, settings: self.of_disk(planned), group: group_of(planned) });
        }
        self.put(difference, seats)?;
        for (index, image) in images {
            let planned = &self.plan.disks[index];
            self.registry.add_disk(assemble::disk(planned, group_of(planned).as_ref(), image)?)?;
            self.done.push(Done::DiskAdded(planned.name.clone()));
            self.told.push(applied::listed("disk", &planned.name, "added"));
        }
        // What a device was measured to do may be less than is promised now.
        self.registry.check_devices()
    }

    fn of_group(&self, planned: &settings::PlacedGroup, now: &GroupSettings) -> GroupSettings {
        let mut settings = planned.settings.of_group();
        settings.share = self.kept(&planned.name, settings.share);
        if planned.cluster {
            // What is in force of the cluster's limits is not the file's.
            settings.limits = now.limits;
        }
        settings
    }

    fn of_disk(&self, planned: &settings::PlacedDisk) -> GroupSettings {
        let mut settings = planned.settings.of_group();
        settings.share = self.kept(&planned.name, settings.share);
        settings
    }

    /// What found no room and is asked for again waits as before: a reload is not refused for it.
    fn kept(&self, name: &str, share: Share) -> Share {
        if self.registry.is_left_out(name, share) { promising_nothing(share) } else { share }
    }

    /// All groups of the plan, in its order. New ones promise nothing yet.
    fn make_groups(&mut self, difference: &Difference) -> anyhow::Result<Vec<Arc<Group>>> {
        let mut groups: Vec<Arc<Group>> = Vec::new();
        for (index, planned) in self.plan.groups.iter().enumerate() {
            if !difference.new_groups.contains(&index) {
                groups.push(self.registry.group(&planned.name)?);
                continue;
            }
            let wanted = planned.settings.of_group();
            let bare = GroupSettings { share: promising_nothing(wanted.share), ..wanted };
            let parent = planned.group.as_ref().map(|parent| self.registry.group(parent)).transpose()?;
            let group = Group::new(&planned.name, bare, parent.as_ref())
                .with_context(|| format!("group {}", planned.name))?;
            self.registry.add_group(&group)?;
            if let Some(cluster) = self.registry.cluster().filter(|_| planned.cluster) {
                cluster.take_part(&group)?;
            }
            self.done.push(Done::GroupAdded(planned.name.clone()));
            self.told.push(applied::listed("group", &planned.name, "added"));
            groups.push(group);
        }
        Ok(groups)
    }

    /// Puts those in force that differ from what is, and tells what of them was there before.
    fn put(&mut self, difference: &Difference, seats: Vec<Seat>) -> anyhow::Result<()> {
        let new_groups = difference.new_groups.iter().map(|&index| self.plan.groups[index].name.as_str());
        let new_groups: HashSet<_> = new_groups.collect();
        let (mut before, mut after, mut told) = (Vec::new(), Vec::new(), Vec::new());
        for seat in seats {
            let (kind, name) = seat.named();
            let now = Seat::now(&seat.node);
            let differences: Vec<_> = applied::settings(kind, &name, now.values(), seat.values()).collect();
            if !differences.is_empty() {
                told.extend(differences.into_iter().filter(|_| !new_groups.contains(&*name)));
                before.push(now);
                after.push(seat);
            }
        }
        self.set.extend(after.iter().map(|seat| seat.named().1));
        // What is to go keeps no promise from those that stay.
        for seat in self.leaving(difference)? {
            after.push(seat.clone().without_promises());
            before.push(seat);
        }
        self.done.push(Done::Seated(before));
        seats::put(&after)?;
        self.told.extend(told);
        Ok(())
    }

    /// The disks and groups that are removed in the end, as they are now.
    fn leaving(&self, difference: &Difference) -> anyhow::Result<Vec<Seat>> {
        let disk = |name: &String| Ok(Node::Disk(Arc::clone(&self.registry.disk(name)?.disk)));
        let group = |name: &String| Ok(Node::Group(self.registry.group(name)?));
        let disks = difference.old_disks.iter().map(disk);
        let nodes = disks.chain(difference.old_groups.iter().map(group));
        nodes.map(|node| node.map(|node| Seat::now(&node))).collect()
    }

    pub(crate) async fn undo(&mut self) {
        while let Some(done) = self.done.pop() {
            if let Err(error) = self.undo_one(done).await {
                tracing::error!("what a reload had changed could not be put back: {error:#} (restart weir)");
            }
        }
    }

    async fn undo_one(&self, done: Done) -> anyhow::Result<()> {
        match done {
            Done::Configured(running, before) => configure(&running, &before).await?,
            Done::Seated(before) => {
                seats::put(&before)?;
                if let Err(error) = self.registry.check_devices() {
                    tracing::warn!("{error:#}");
                }
            }
            Done::GroupAdded(name) => self.registry.remove_group(&name)?,
            Done::DiskAdded(name) => self.registry.take_back(&name).await?,
            Done::ServerAdded(serving) => {
                self.registry.remove_server(&serving);
                serving.stop().await;
            }
            Done::ExportRemoved { wanted, id, gone } => {
                if let Err(error) = wanted.add_by(self.registry, id).await {
                    gone.iter().for_each(|gone| self.registry.tell(gone));
                    return Err(error);
                }
            }
            // Nobody was told of it.
            Done::ExportAdded(id) => drop(self.registry.removal(&id, Removal::Hard)?.await),
        }
        Ok(())
    }

    /// Removes a disk whose exports were removed before. Their last requests may be in flight.
    async fn remove_old_disk(&self, name: &str) -> Result<(), Refused> {
        let exports = self.registry.exports_of(name);
        if let Some(export) = exports.iter().find(|export| !export.is_ending()) {
            return Err(Refused::Exported { disk: name.to_owned(), export: export.id.clone() });
        }
        drop(exports);
        self.registry.remove_disk_and_exports(name, Removal::Safe).await
    }

    /// Removes what the file does not have any more, and nobody uses.
    pub(crate) async fn clear(&mut self, difference: &Difference) {
        let endpoints: Vec<&Endpoint> = self.plan.servers.iter().map(|server| &server.endpoint).collect();
        for server in &self.loaded.plan.servers {
            let Some(serving) = wanted::server(self.registry, &server.endpoint) else { continue };
            if !endpoints.contains(&&server.endpoint) && !self.registry.has_exports(&serving) {
                self.registry.remove_server(&serving);
                serving.stop().await;
            }
        }
        for name in &difference.old_disks {
            match self.remove_old_disk(name).await {
                Ok(()) => self.told.push(applied::listed("disk", name, "removed")),
                Err(refused) => tracing::warn!("a disk that the config file does not have stays: {refused}"),
            }
        }
        for name in &difference.old_groups {
            match self.registry.remove_group(name) {
                Ok(()) => self.told.push(applied::listed("group", name, "removed")),
                Err(refused) => tracing::warn!("a group that the config file does not have stays: {refused}"),
            }
        }
    }
}

/// Puts all in force. Where it fails, some is.
async fn configure(running: &RunningDisk, wanted: &DiskConfig) -> anyhow::Result<()> {
    let caches = wanted.qcow2.caches;
    running.disk.prefetch().set(wanted.prefetch)?;
    if caches != running.caches.get() {
        let Image::Qcow2(qcow2) = running.disk.image() else {
            bail!("cache sizes are for qcow2 images, and this one is raw (leave them out)");
        };
        qcow2.set_caches(caches).await.map_err(|error| anyhow!("{error}"))?;
        running.caches.set(caches);
    }
    running.disk.reserve_memory()?;
    running.disk.failures().set_policies(wanted.on_error);
    Ok(())
}
