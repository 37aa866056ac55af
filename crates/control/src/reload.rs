//! The config file is read again, and its difference to what runs is applied as one change.
//!
//! ```text
//!   read ─► difference ─► open images, bind sockets      nothing has changed yet
//!                              │
//!        settings, groups, disks, exports                each can be undone, and is where one fails
//!                              │
//!        disks, groups and servers that are left over go     nobody uses them any more
//! ```
//!
//! One at a time. A command at the control socket may come in between: what it has changed then is
//! looked at again where it would do harm, and else the later wins.

mod difference;
mod foreseen;
mod renewed;
pub(crate) mod seats;
pub(crate) mod told;
mod unopened;

use std::{
    collections::{BTreeMap, BTreeSet, HashSet},
    fs,
    path::Path,
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail, ensure};
use block::layer::throttle::{Group, GroupSettings};
use cluster::actor::Actor;
use difference::Difference;
use export::nbd::{self, Removal};
use image::Image;
use policy::throttle::Share;
use renewed::Renewed;
use seats::{Node, Seat, promising_nothing};
use serde_json::{Value, json};
use settings::{DiskConfig, Draft, Endpoint, Plan, Record, SecretSource, config};

use super::{
    assemble::{self, Assembly},
    change::Change,
    loaded::Loaded,
    opening::{Silent, Trial},
    recording,
    registry::{DoorTerms, Refused, Registry, RunningDisk},
    serving::Serving,
    wanted::{self, Running, Wanted, Way},
};
use crate::listen;

/// Reads the config file again, and has run what it says. What has changed, in the order in which
/// it was.
///
/// # Errors
/// What is wrong in the file, with its line and key; what cannot be changed while weir runs; what
/// could not be done. Nothing has changed then.
pub async fn reload(registry: &Rc<Registry>) -> anyhow::Result<Vec<Value>> {
    let reloading = async {
        let told = reload_for(registry).await;
        registry.tell(&Change::Reloaded);
        told
    };
    Actor::reload().run(reloading).await
}

/// What [`reload`] would change, as it would tell it. Nothing changes.
///
/// # Errors
/// What a reload would be refused for, as far as that shows before it is done.
pub(crate) async fn foresee(registry: &Rc<Registry>) -> anyhow::Result<Vec<Value>> {
    let loaded = loaded(registry)?;
    let _turn = registry.turns.try_take().context("another reload is at work (try again)")?;
    let (draft, plan, moved, unopened) = read(registry, &loaded).await?;
    let difference = Difference::find(registry, &loaded.plan, (&draft, &plan)).await?;
    let recorded = recorded(&loaded.plan, (&draft, &plan)).await?;
    let renewed = Renewed::read(&plan).await?;
    let mut told = Work::new(registry, &loaded, &plan).foresee(&difference).await?;
    told.extend(renewed.told());
    told.extend(recorded);
    told.extend(moved);
    told.extend(unopened.told(registry));
    Ok(told)
}

fn loaded(registry: &Registry) -> anyhow::Result<Rc<Loaded>> {
    let loaded = registry.loaded.borrow().clone();
    let is_starting = loaded.is_none() && registry.config.is_some();
    ensure!(!is_starting, "weir has not heard yet that the one it takes over from has ended (try again)");
    let loaded = loaded.context(
        "weir was started without a config file, so there is nothing to reload (start it with --config FILE)",
    )?;
    ensure!(!registry.leaving.get(), "another weir is about to take over (try again)");
    Ok(loaded)
}

/// What of recordings is to change.
///
/// # Errors
/// What is wanted cannot be kept.
async fn recorded(before: &Plan, (draft, after): (&Draft, &Plan)) -> anyhow::Result<Vec<Value>> {
    let (before, after) = (before.service.record.as_ref(), after.service.record.as_ref());
    if let Some(wanted) = after.filter(|_| after != before).cloned() {
        let place = draft.service.record.as_ref().map(|said| said.place.to_string());
        let own = before.cloned();
        let checked = reactor::blocking(move || recording::check(&wanted, own.as_ref())).await;
        checked.with_context(|| place.unwrap_or_default())?;
    }
    let values = |record: Option<&Record>| vec![("record", json!(record.map(Record::to_string)))];
    Ok(told::settings("daemon", "", values(before), values(after)).collect())
}

async fn reload_for(registry: &Rc<Registry>) -> anyhow::Result<Vec<Value>> {
    let loaded = loaded(registry)?;
    let _turn = registry.turns.try_take().context("another reload is at work (try again)")?;
    let (draft, plan, moved, unopened) = read(registry, &loaded).await?;
    let difference = Difference::find(registry, &loaded.plan, (&draft, &plan)).await?;
    let recorded = recorded(&loaded.plan, (&draft, &plan)).await?;
    let renewed = Renewed::read(&plan).await?;
    let mut work = Work::new(registry, &loaded, &plan);
    let applied = match (work.apply(&difference).await, registry.cluster()) {
        (Ok(()), Some(cluster)) => cluster.settle_promises(&**registry).await.map_err(anyhow::Error::msg),
        (applied, _) => applied,
    };
    if let Err(error) = applied {
        work.undo().await;
        if let Some(cluster) = registry.cluster() {
            cluster.promise(&**registry);
        }
        return Err(error);
    }
    for done in std::mem::take(&mut work.done) {
        if let Done::ExportRemoved { gone: Some(gone), .. } = done {
            registry.tell(&gone);
        }
    }
    for name in std::mem::take(&mut work.set) {
        registry.tell(&Change::SettingsChanged { name });
    }
    let mut of_unopened = unopened.told(registry);
    // First: they may be planned for groups that go.
    let whole = unopened.settle(registry);
    for (name, silent) in std::mem::take(&mut work.silent) {
        of_unopened.push(told::listed("disk", &name, "unopened"));
        registry.put_off((&name, Rc::clone(&whole)), silent);
        registry.tell_of_unopened(&name);
    }
    work.clear(&difference).await;
    let groups = plan.groups.iter().map(|group| (&group.name, group.settings));
    for (name, settings) in groups.chain(plan.disks.iter().map(|disk| (&disk.name, disk.settings))) {
        if !registry.is_left_out(name, settings.of_group().share) {
            registry.forget_left_out(name);
        }
    }
    let mut told = work.told;
    told.extend(renewed.told());
    renewed.settle(registry, &loaded);
    if !recorded.is_empty() {
        registry.recordings.keep_instead(plan.service.record.as_ref()).await;
        told.extend(recorded);
    }
    told.extend(moved);
    told.extend(of_unopened);
    if let Some(cluster) = registry.cluster() {
        for &index in &difference.new_disks {
            cluster.has_again(&plan.disks[index].name);
        }
    }
    for remark in whole.remarks() {
        tracing::warn!(name = remark.name, "{}", remark.remark);
    }
    // Also of those that only exports keep that no file has.
    let old = loaded.plan.servers.iter().map(|server| (&server.endpoint, None));
    for (endpoint, standard) in old.chain(plan.servers.iter().map(|new| (&new.endpoint, new.standard))) {
        if let Some(serving) = wanted::server(registry, endpoint) {
            serving.standard.set(standard);
        }
    }
    let Loaded { file, said, inherited, tls, budgets, .. } = &*loaded;
    let (file, said, inherited) = (file.clone(), said.clone(), *inherited);
    let (tls, budgets) = (tls.clone(), budgets.clone());
    registry.loaded.replace(Some(Rc::new(Loaded { file, said, inherited, plan: whole, tls, budgets })));
    Ok(told)
}

/// The file, without the disks that are on other hosts now, and what is told of these; and without
/// those that are not open yet. On another thread: the file may lie on a network.
async fn read(
    registry: &Registry,
    loaded: &Loaded,
) -> anyhow::Result<(Draft, Plan, Vec<Value>, unopened::Said)> {
    let (file, said, inherited) = (loaded.file.clone(), loaded.said.clone(), loaded.inherited);
    let reading = reactor::blocking(move || {
        let is_file = fs::metadata(&file).with_context(|| file.display().to_string())?.is_file();
        ensure!(is_file, "{}: is no regular file (put the config file back there)", file.display());
        let draft = config::load(&file)?;
        let draft = Draft { service: said.or(draft.service), ..draft };
        let plan = Plan::new(draft.clone(), inherited)?;
        anyhow::Ok((draft, plan))
    });
    let (draft, mut plan) = reading.await?;
    let moved = leave_out_moved(registry, &mut plan).await;
    let unopened = unopened::leave_out(registry, loaded, &mut plan).await?;
    Ok((draft, plan, moved, unopened))
}

/// Leaves out disks that other hosts of the cluster have taken, as a start does, and tells where
/// they are. One whose image is a file that nobody has locked is taken back; nothing keeps two
/// hosts from writing to another image.
async fn leave_out_moved(registry: &Registry, plan: &mut Plan) -> Vec<Value> {
    let moved = registry.cluster().map(|cluster| cluster.moved()).unwrap_or_default();
    let mut out = BTreeMap::new();
    for (disk, host) in moved.into_iter().filter(|(disk, _)| registry.disk(disk).is_err()) {
        let Some(planned) = plan.disks.iter().find(|planned| planned.name == disk) else { continue };
        let is_free = match planned.image.path().map(Path::to_owned) {
            Some(path) => {
                let read_only = planned.read_only;
                let is_free =
                    move || fs::File::open(&path).is_ok() && storage::in_use(&path, read_only).is_none();
                reactor::blocking(is_free).await
            }
            None => false,
        };
        if !is_free {
            out.insert(disk, host);
        }
    }
    plan.leave_out(|disk| out.contains_key(disk));
    out.iter().map(|(disk, host)| told::left_out(disk, host)).collect()
}

/// A pipe may never say its passphrase, and every later reload would wait for this one.
async fn check_secrets(disk: &settings::PlacedDisk) -> anyhow::Result<()> {
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

struct Work<'a> {
    registry: &'a Rc<Registry>,
    loaded: &'a Loaded,
    plan: &'a Plan,
    /// What is to be undone, the last first.
    done: Vec<Done>,
    /// Disks and groups with other settings, to be told once nothing is undone any more.
    set: BTreeSet<String>,
    told: Vec<Value>,
    /// New disks that nobody answers for.
    silent: Vec<(String, Silent)>,
}

/// Something that was done, with what it takes to undo it.
enum Done {
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
    fn new(registry: &'a Rc<Registry>, loaded: &'a Loaded, plan: &'a Plan) -> Self {
        let (done, set, told, silent) = (Vec::new(), BTreeSet::new(), Vec::new(), Vec::new());
        Self { registry, loaded, plan, done, set, told, silent }
    }
}

impl Work<'_> {
    async fn apply(&mut self, difference: &Difference) -> anyhow::Result<()> {
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
            self.told.push(told::exported(told, &wanted.disk, "removed"));
        }
        let silent = &self.silent;
        let is_open = |wanted: &&Wanted| silent.iter().all(|(disk, _)| *disk != wanted.disk);
        for wanted in difference.new_exports.iter().filter(is_open) {
            let export = wanted.add(self.registry).await.map_err(|error| self.at(wanted, error))?;
            self.done.push(Done::ExportAdded(export.id.clone()));
            self.told.push(told::exported(wanted.told(self.registry), &wanted.disk, "added"));
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
        let (now, wanted) = (told::of_disk_alone(&before), told::of_disk_alone(planned));
        if now == wanted {
            return Ok(());
        }
        let name = running.disk.name();
        self.done.push(Done::Configured(Rc::clone(running), Box::new(before)));
        configure(running, planned).await.with_context(|| format!("disk {name}"))?;
        self.set.insert(name.to_string());
        self.told.extend(told::settings("disk", name, now, wanted));
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
            self.told.push(told::listed("disk", &planned.name, "added"));
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
            self.told.push(told::listed("group", &planned.name, "added"));
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
            let differences: Vec<_> = told::settings(kind, &name, now.values(), seat.values()).collect();
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

    async fn undo(&mut self) {
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
    async fn clear(&mut self, difference: &Difference) {
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
                Ok(()) => self.told.push(told::listed("disk", name, "removed")),
                Err(refused) => tracing::warn!("a disk that the config file does not have stays: {refused}"),
            }
        }
        for name in &difference.old_groups {
            match self.registry.remove_group(name) {
                Ok(()) => self.told.push(told::listed("group", name, "removed")),
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
