//! `x-weir-set`: one command for every setting of a disk or a group.
//!
//! `weir throttle` and `weir prefetch` are its clients.

use std::rc::Rc;

use block::layer::throttle::{Group, GroupSettings};
use image::qcow2::{CacheSettings, Qcow2};
use serde_json::{Value, json};

use crate::users::Users;
use crate::{
    change::Change,
    inventory::{Inventory, RunningDisk},
    qmp::{
        arguments::Arguments,
        caches::{self, CacheChanges},
        command::Command,
        error::{Class, Error},
        errors::{self, PolicyChanges},
        json::shown,
        prefetch::{self, PrefetchChanges},
        settings::{self, Changes, LimitChanges, Naming},
    },
};

#[derive(Debug)]
pub(super) struct Set {
    name: String,
    /// Empty leaves the group.
    group: Option<String>,
    changes: Changes,
    caches: CacheChanges,
    prefetch: PrefetchChanges,
    policies: PolicyChanges,
}

impl Command for Set {
    const NAME: &'static str = "x-weir-set";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        let name = arguments.required("name")?;
        Self::read_of(arguments, name)
    }

    async fn run(self, inventory: Rc<Inventory>) -> Result<Value, Error> {
        match inventory.group(&self.name) {
            Ok(group) => self.set_group(&inventory, &group).await?,
            Err(_) => self.set_disk(&inventory).await?,
        }
        if self.changes.promise() {
            inventory.forget_left_out(&self.name);
        }
        inventory.tell(&Change::SettingsChanged { name: self.name });
        Ok(json!({}))
    }
}

impl Set {
    /// All but the name.
    pub(super) fn read_of(arguments: &mut Arguments, name: String) -> Result<Self, Error> {
        let group = arguments.optional("group")?;
        let limits = LimitChanges::read(arguments, Naming::Plain)?;
        let own = Changes::read_own(arguments, "")?;
        let caches = CacheChanges::read(arguments)?;
        let prefetch = PrefetchChanges::read(arguments, "")?;
        let policies = PolicyChanges::read(arguments, "")?;
        Ok(Self { name, group, changes: own.with_limits(limits), caches, prefetch, policies })
    }

    async fn set_group(&self, inventory: &Inventory, group: &Group) -> Result<(), Error> {
        if !self.caches.is_empty() {
            return Err(Error::generic(format!(
                "group {}: it has no caches; its disks' images have",
                group.name()
            )));
        }
        if !self.prefetch.is_empty() {
            return Err(Error::generic(format!(
                "group {}: nothing is read ahead for it; its disks have that",
                group.name()
            )));
        }
        if !self.policies.is_empty() {
            return Err(Error::generic(format!(
                "group {}: errors are its disks' affair (set it for each)",
                group.name()
            )));
        }
        let parent = group.parent().map_or("", |parent| parent.name());
        if self.group.as_deref().is_some_and(|wanted| wanted != parent) {
            let rule = "cannot be changed for a group: it stays in the group it was made in (disks can move)";
            return Err(Error::rule("group", rule));
        }
        set_group(inventory, group, self.changes.apply_to(group.settings())?).await
    }

    pub(super) async fn set_disk(&self, inventory: &Inventory) -> Result<(), Error> {
        let running = inventory.disk(&self.name)?;
        let disk = &running.disk;
        let caches = self.new_caches(&running)?;
        let prefetch = self.prefetch.apply_to(disk.prefetch().settings())?;
        let before = disk.throttle().settings();
        let settings = self.changes.apply_to_disk(before)?;
        let group = match self.group.as_deref() {
            None => disk.throttle().group(),
            Some("") => None,
            Some(name) => Some(inventory.group(name).map_err(|_| no_group(inventory, name))?),
        };
        let is_asked = self.group.is_some() || settings.watermark != before.watermark;
        if let Some(group) = group.as_ref().filter(|_| is_asked && settings.watermark.percent() > 0) {
            let rule = format_args!(
                "cannot be the disk's own: it is in group {0:?}, which has the watermark for its members (set it at {0:?})",
                group.name()
            );
            return Err(Error::rule("watermark", rule));
        }
        let of_disk = |error: &dyn std::fmt::Display| Error::generic(format!("disk {}: {error}", self.name));
        let before = (disk.prefetch().settings(), running.caches.get());
        disk.prefetch().set(prefetch).map_err(|invalid| of_disk(&invalid))?;
        if let Some((qcow2, caches)) = caches {
            qcow2.set_caches(caches).await.map_err(|error| of_disk(&error))?;
            running.caches.set(caches);
        }
        let changed = disk.reserve_memory().map_err(|error| of_disk(&error));
        let placed = (disk.throttle().settings(), disk.throttle().group());
        let mut changed = changed.and_then(|()| Ok(disk.throttle().place(settings, group.as_ref())?));
        if changed.is_ok() {
            changed = settle(inventory).await;
            if changed.is_err() {
                disk.throttle().place(placed.0, placed.1.as_ref())?;
                unsettle(inventory);
            }
        }
        if changed.is_err() {
            disk.prefetch().set(before.0).expect("it was in force");
            if let Some((qcow2, _)) = caches {
                qcow2.set_caches(before.1).await.map_err(|error| of_disk(&error))?;
                running.caches.set(before.1);
            }
            disk.reserve_memory().map_err(|error| of_disk(&error))?;
        } else {
            self.policies.apply_to(disk.failures());
        }
        changed
    }

    fn new_caches<'a>(&self, running: &'a RunningDisk) -> Result<Option<(&'a Qcow2, CacheSettings)>, Error> {
        if self.caches.is_empty() {
            return Ok(None);
        }
        let qcow2 = caches::qcow2_of(running.disk.image(), &self.name)?;
        let settings = self.caches.apply_to(running.caches.get());
        // Before anything else is changed.
        settings
            .sizes(&qcow2.header())
            .map_err(|error| Error::generic(format!("disk {}: {error}", self.name)))?;
        Ok(Some((qcow2, settings)))
    }
}

/// Sets all of it, if other hosts have room for what it promises, or nothing.
pub(super) async fn set_group(
    inventory: &Inventory,
    group: &Group,
    settings: GroupSettings,
) -> Result<(), Error> {
    let before = group.settings();
    group.set(settings)?;
    let settled = settle(inventory).await;
    if settled.is_err() {
        // What is in force of a cluster's limits may be another by now.
        let limits = if group.lent().is_some() { group.settings().limits } else { before.limits };
        group.set(GroupSettings { limits, ..before })?;
        unsettle(inventory);
    }
    settled
}

/// Has the other hosts of the cluster know what is promised now; fails where they have no room.
pub(super) async fn settle(inventory: &Inventory) -> Result<(), Error> {
    let Some(cluster) = inventory.cluster().cloned() else { return Ok(()) };
    cluster.settle_promises(inventory).await.map_err(Error::generic)
}

/// What was not to be promised is not any more.
pub(super) fn unsettle(inventory: &Inventory) {
    if let Some(cluster) = inventory.cluster() {
        cluster.promise(inventory);
    }
}

/// Of a group to move into.
fn no_group(inventory: &Inventory, name: &str) -> Error {
    let name = shown(name);
    Error::new(
        Class::DeviceNotFound,
        match inventory.disk(&name) {
            Ok(_) => format!("{name:?} is a disk, not a group (name a group)"),
            Err(_) => {
                format!("there is no group {name:?} (`weir status` lists them; `weir group add` makes one)")
            }
        },
    )
}

/// `x-weir-query-status`.
#[derive(Debug)]
pub(super) struct QueryStatus {
    /// List disks, groups, devices and exports, whose number has no bound.
    lists: bool,
}

impl Command for QueryStatus {
    const NAME: &'static str = "x-weir-query-status";

    fn read(arguments: &mut Arguments) -> Result<Self, Error> {
        Ok(Self { lists: arguments.optional("lists")?.unwrap_or(true) })
    }

    async fn run(self, inventory: Rc<Inventory>) -> Result<Value, Error> {
        let mut answer = json!({
            "version": env!("CARGO_PKG_VERSION"),
            "uptime-ns": nanoseconds(inventory.uptime()),
            "makes-devices": inventory.makes_devices(),
            "memory": memory(),
            "servers": inventory.servers().iter().map(|one| server(one)).collect::<Vec<_>>(),
        });
        if self.lists {
            add_lists(&inventory, &mut answer);
        }
        if let Some(cluster) = inventory.cluster() {
            answer["cluster"] = cluster.summary();
        }
        if let Some(config) = &inventory.config {
            answer["config"] = json!(config);
        }
        Ok(answer)
    }
}

fn add_lists(inventory: &Rc<Inventory>, answer: &mut Value) {
    let (exports, members) = (inventory.exports(), inventory.members());
    let list_disk = |running: &Rc<RunningDisk>| {
        let mut answer = disk(running, &inventory.exports_of(running.disk.name()));
        add_left_out(inventory, running.disk.name(), &mut answer);
        answer
    };
    answer["disks"] = inventory.disks().iter().map(list_disk).collect();
    answer["groups"] = inventory.groups().iter().map(|one| group(inventory, one, &members)).collect();
    answer["devices"] = inventory.devices().iter().map(device).collect();
    answer["exports"] = exports.iter().map(|one| export(one)).collect();
    let unopened = inventory.describe_unopened();
    if !unopened.is_empty() {
        answer["unopened"] = json!(unopened);
    }
}

/// What the process has of its budget; `total` is absent where nothing bounds it.
fn memory() -> Value {
    let Usage { total, reserved, pages, connections, requests, most_requests, waiting } =
        Budget::process().usage();
    let mut answer = json!({
        "reserved": reserved,
        "disks-in-memory": pages,
        "connections": connections,
        "requests": requests,
        "most-requests": most_requests,
        "waiting": waiting,
    });
    if total != u64::MAX {
        answer["total"] = json!(total);
    }
    answer
}

fn nanoseconds(duration: policy::time::Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

fn disk(running: &Rc<RunningDisk>, exports: &[Rc<RunningExport>]) -> Value {
    let disk = &running.disk;
    let DiskSettings { limits, share, watermark } = disk.throttle().settings();
    let totals = disk.totals();
    let mut answer = json!({
        "name": &**disk.name(),
        "image": running.config.image.to_string(),
        "size": disk.size_bytes(),
        "read-only": disk.image().is_read_only(),
        "cache": running.config.cache.name(),
        "connections": exports.iter().map(|export| export.connections()).sum::<usize>(),
        "reads": { "requests": totals.reads, "bytes": totals.read_bytes },
        "writes": { "requests": totals.writes, "bytes": totals.written_bytes },
        "merged-requests": totals.merged_requests,
        "memory": { "reserved": disk.memory().reserved(), "requests": disk.memory().used() },
        "throttle": throttle(&disk.throttle().stats()),
        "prefetch": prefetch::settings(&disk.prefetch().settings()),
        "read-ahead": prefetch::statistics(&disk.prefetch().stats()),
    });
    if let Some(remote) = disk.image().storage().remote() {
        answer["server"] = json!({
            "connected": remote.is_connected,
            "reconnections": remote.reconnections,
            "unflushed-bytes": remote.unflushed_bytes,
        });
    }
    if let Some(path) = running.config.image.path().and_then(|path| path::absolute(path).ok()) {
        answer["path"] = json!(path.display().to_string());
    }
    errors::describe(disk.failures(), &mut answer);
    let storage = disk.image().storage();
    if storage.is_far() {
        answer["oldest-request"] = json!(storage.oldest_request().map_or(0, nanoseconds));
    }
    answer["format"] = json!(disk.image().format().name());
    if let Image::Qcow2(qcow2) = disk.image() {
        (answer["l2-cache"], answer["refcount-cache"]) = caches::statistics(qcow2);
    }
    add_settings(&mut answer, &limits, share, watermark, disk.throttle().enforcement());
    if let Some(group) = disk.throttle().group() {
        answer["group"] = json!(group.name());
    }
    answer
}

fn device(listed: &Listed) -> Value {
    let Listed { device, disks } = listed;
    let mut answer = json!({
        "name": device.name(),
        "disks": disks,
        "capacity-source": device.capacity_source().to_string(),
    });
    if let Some(Capacity { read_iops, write_iops, read_bps, write_bps }) = device.capacity() {
        let figures = [
            ("read-iops", read_iops),
            ("write-iops", write_iops),
            ("read-bps", read_bps),
            ("write-bps", write_bps),
        ];
        let known = figures.into_iter().filter(|&(_, figure)| figure > 0);
        answer["capacity"] =
            known.map(|(name, figure)| (name.to_owned(), json!(figure))).collect::<Map<_, _>>().into();
    }
    if let Ok(thousandths) = device.use_now(reactor::now()) {
        answer["use"] = json!(f64::from(thousandths) / 1000.0);
    }
    answer
}

fn group(inventory: &Inventory, group: &Arc<Group>, members: &HashMap<*const Group, Vec<String>>) -> Value {
    let GroupSettings { limits, share, watermark } = group.settings();
    let mut answer = json!({
        "name": group.name(),
        "disks": members.get(&Arc::as_ptr(group)).map_or(&[][..], Vec::as_slice),
        "throttle": throttle(&group.stats()),
    });
    add_settings(&mut answer, &limits, share, watermark, group.enforcement());
    if let Some(lent) = group.lent() {
        // Above are the part in force here, and what it is a part of.
        answer["cluster"] = json!({ "limits": settings::set(&lent.whole), "leased": limits != lent.safe });
    }
    add_left_out(inventory, group.name(), &mut answer);
    if let Some(parent) = group.parent() {
        answer["group"] = json!(parent.name());
    }
    answer
}

/// What it is not promised though its config says so.
fn add_left_out(inventory: &Inventory, name: &str, answer: &mut Value) {
    if let Some(one) = inventory.left_out.borrow().get(name) {
        answer["promise-left-out"] = one.described();
    }
}

/// Reservations and the watermark are absent where there are none.
fn add_settings(
    answer: &mut Value,
    limits: &Limits,
    share: Share,
    watermark: Watermark,
    enforcement: Enforcement,
) {
    answer["weight"] = json!(share.weight());
    answer["limits"] = settings::set(limits);
    for (name, reservation) in
        [("iops-reservation", share.iops_reservation()), ("bps-reservation", share.bps_reservation())]
    {
        if reservation > 0 {
            answer[name] = json!(reservation);
        }
    }
    if watermark.percent() > 0 {
        answer["watermark"] = json!(watermark.percent());
        let (word, scale) = match enforcement {
            Enforcement::Enforced => ("enforced", None),
            Enforcement::Lifted => ("lifted", None),
            Enforcement::Scaled(scale) => ("scaled", Some(scale.thousandths())),
        };
        answer["enforcement"] = json!(word);
        if let Some(thousandths) = scale {
            answer["scale"] = json!(thousandths as f64 / 1000.0);
        }
    }
}

fn export(export: &RunningExport) -> Value {
    let mut answer = json!({
        "type": export.door.kind(),
        "name": export.name,
        "id": export.id,
        "disk": &**export.disk.disk.name(),
        "address": export.door.address(),
        "connections": export.connections(),
        "read-only": export.read_only || export.disk.disk.image().is_read_only(),
    });
    let Door::Own(entrance) = &export.door else { return answer };
    if let (Some(answer), Value::Object(statistics)) = (answer.as_object_mut(), entrance.server.statistics())
    {
        answer.extend(statistics);
    }
    if let Some(device) = entrance.device() {
        let Users { mounts, holders, .. } = Users::of(device);
        answer["device"] = json!(device);
        answer["mounts"] = json!(mounts);
        answer["holders"] = json!(holders);
    }
    answer
}

/// A place where clients of NBD connect.
fn server(serving: &Serving) -> Value {
    let Refused { networks, connections, names, exports } = serving.server.refused();
    let mut answer = json!({
        "address": serving.address(),
        "connections": serving.server.connections(),
        "refused": {
            "networks": networks, "connections": connections, "names": names, "exports": exports,
        },
        "added": serving.added.get().is_some(),
    });
    if let Some(written) = serving.written() {
        answer["listen"] = json!(written);
    }
    if let Some(read_only) = serving.standard.get() {
        answer["default"] = json!({ "read-only": read_only });
    }
    answer
}

fn throttle(stats: &Stats) -> Value {
    let Stats { reads, writes, waits, recent_waits, limited_ns, binding, tokens, levels, waiting, kept } =
        stats;
    let [reads_waiting, writes_waiting] = waiting;
    let mut answer = json!({
        "reads": counters(reads),
        "writes": counters(writes),
        "waiting": { "reads": reads_waiting, "writes": writes_waiting },
        "limited-ns": limited_ns,
        "tokens": by_limit(tokens, |units| json!(units)),
        "buckets": by_limit(levels, |level| json!({ "level": level.units, "capacity": level.capacity })),
    });
    for (name, waits) in [("wait-ns", waits), ("recent-wait-ns", recent_waits)] {
        if waits.max_ns > 0 {
            answer[name] = json!({ "p50": waits.p50_ns, "p99": waits.p99_ns, "max": waits.max_ns });
        }
    }
    if let Some(kept) = kept {
        answer["reservation"] = json!({ "met-ns": kept.met_ns, "missed-ns": kept.missed_ns });
    }
    if let Some(kind) = binding {
        answer["binding"] = json!(limit_name(*kind));
    }
    answer
}

fn counters(counters: &Counters) -> Value {
    json!({
        "requests": counters.requests,
        "bytes": counters.bytes,
        "throttled": counters.throttled,
        "waited-ns": counters.waited_ns,
    })
}

/// An object with the limits that are set as its keys.
fn by_limit<V>(values: &[Option<V>; 6], show: impl Fn(&V) -> Value) -> Value {
    let entry = |kind: LimitKind| Some((limit_name(kind).to_owned(), show(values[kind.index()].as_ref()?)));
    Value::Object(LimitKind::ALL.into_iter().filter_map(entry).collect::<Map<_, _>>())
}

const fn limit_name(kind: LimitKind) -> &'static str {
    Setting::Limit(kind, Part::Rate).name()
}
