//! Description of objects that clients of the control socket added, for an upgrade: disks, groups,
//! servers and exports that are in no config file.
//!
//! It contains how each was created, and its current settings. [`again`](super::again) adds them in
//! the new process.
//!
//! A disk that was added by keys is described by its keys; other objects by the arguments of the
//! commands that created them, so that there is no second form of description. The new process
//! executes such a command inside its sandbox: a guest may control the old process, which must not
//! gain more rights than any client of the control socket has. The result is compared like every
//! other disk. Objects of the old config that the new config lacks are not transferred but
//! reported: the operator has forgotten or removed them. Passphrases, descriptor sets and TLS
//! objects are never transferred, as that would disclose secrets.

use std::{path::Path, sync::Arc};

use anyhow::anyhow;
use block::layer::throttle::ThrottleGroup;
use serde_json::{Map, Value, json};
use settings::{ExportTarget as Own, VhostUserSocket};

use super::told::{AddedDisk, AddedExport, AddedGroup, OfferedDevice, Origin};
use crate::{
    reconcile::applied::{self, Named, of_throttle},
    registry::{NewExport, Registry, RunningDisk, RunningExport},
    serving::{Added, Serving},
    wanted,
};

/// Creation and current settings of a disk.
pub(super) fn disk(running: &RunningDisk) -> Origin<AddedDisk> {
    let nodes = running.told.as_deref().unwrap_or_default();
    // A disk of the config has neither commands nor the flag.
    if nodes.is_empty() && !running.added {
        return Origin::Config;
    }
    if running.config.image.path().is_some_and(|path| path.starts_with("/dev/fdset")) {
        return Origin::Bound("its file was passed to the old process by add-fd".to_owned());
    }
    if nodes.iter().any(|node| node.contains_key("encrypt")) || !running.config.qcow2.secrets.is_empty() {
        return Origin::Bound("only the old process has its passphrase".to_owned());
    }
    let keys = running.added.then(|| running.keys_of_upgrade());
    if running.added && running.below.is_empty() {
        return Origin::Added(AddedDisk { keys, ..AddedDisk::default() });
    }
    let bottom = running.below.last().filter(|_| running.added).map(|node| node.name.clone());
    let nodes = nodes.iter().cloned().map(with_whole_paths).collect();
    let values =
        applied::of_disk(&running.current_config()).into_iter().filter(|(key, _)| running.has_key(key));
    let settings = settings(running.disk.name(), values);
    Origin::Added(AddedDisk { nodes, settings, keys, bottom })
}

/// Added groups, parents first.
pub(super) fn groups(registry: &Registry) -> Vec<AddedGroup> {
    let depth = |group: &Arc<ThrottleGroup>| std::iter::successors(group.parent(), |group| group.parent()).count();
    let added = registry.groups.added.borrow();
    let mut groups = registry.groups.all();
    groups.retain(|group| added.contains(group.name()));
    // Parents first, so that each parent exists when its members are added.
    groups.sort_by_key(depth);
    let tell = |group: Arc<ThrottleGroup>| {
        let parent = group.parent().map(|parent| parent.name().to_owned());
        // The parent is set when the group is created.
        let throttled = of_throttle(&group.settings(), "").into_iter().filter(|(key, _)| *key != "group");
        AddedGroup { name: group.name().to_owned(), parent, settings: settings(group.name(), throttled) }
    };
    groups.into_iter().map(tell).collect()
}

/// Arguments of `x-weir-set` for these settings; a size without a value is 0 there.
fn settings(name: &str, values: impl IntoIterator<Item = Named>) -> Map<String, Value> {
    let value = |value: Value| if value.is_null() { json!(0) } else { value };
    let values = values.into_iter().map(|(key, said)| (key.to_owned(), value(said)));
    values.chain([("name".to_owned(), json!(name))]).collect()
}

/// Makes paths absolute: the new process may run in another directory.
fn with_whole_paths(mut node: Map<String, Value>) -> Map<String, Value> {
    for (key, value) in &mut node {
        match value {
            Value::Object(inner) => *inner = with_whole_paths(std::mem::take(inner)),
            Value::String(path) if matches!(key.as_str(), "filename" | "path") => {
                let whole = std::path::absolute(&*path)
                    .ok()
                    .and_then(|path| path.into_os_string().into_string().ok());
                *path = whole.unwrap_or_else(|| std::mem::take(path));
            }
            _ => {}
        }
    }
    node
}

/// Origin of a server, with its maximum number of clients.
pub(super) fn server(serving: &Serving) -> Origin<usize> {
    match serving.added.get() {
        None => Origin::Config,
        Some(Added { max_connections, has_objects: false }) => Origin::Added(max_connections),
        Some(_) => Origin::Bound("only the old process has its TLS objects".to_owned()),
    }
}

/// Origin of an NBD export.
pub(super) fn export(export: &RunningExport) -> Origin<AddedExport> {
    match &export.new {
        Some(NewExport { id, description, access, .. }) if export.added.get() => Origin::Added(AddedExport {
            id: id.clone(),
            description: description.clone(),
            access: access.into(),
        }),
        _ => Origin::Config,
    }
}

/// Origin of an export with a separate endpoint.
pub(super) fn door(export: &RunningExport) -> Origin<String> {
    let Some(door) = export.said.as_ref().filter(|_| export.added.get()) else { return Origin::Config };
    let whole = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut door = door.clone();
    match &mut door {
        Own::VhostUserBlk(machine) => {
            if let VhostUserSocket::Path(path) = &mut machine.socket {
                *path = whole(path);
            }
        }
        Own::Fuse(fuse) => fuse.file = whole(&fuse.file),
        Own::Ublk(_) | Own::NbdDevice(_) => {}
    }
    Origin::Added(door.to_string())
}

pub(super) fn read_door(kind: &str, text: &str) -> anyhow::Result<Own> {
    let read = match kind {
        "ublk" => text.parse().map(Own::Ublk),
        "fuse" => text.parse().map(Own::Fuse),
        "nbd-device" => text.parse().map(Own::NbdDevice),
        _ => text.parse().map(Own::VhostUserBlk),
    };
    read.map_err(|rule: String| anyhow!("{text}: {rule}"))
}

/// Planned export for an added device of the host.
pub(super) fn device(offered: &OfferedDevice, text: &str) -> anyhow::Result<wanted::Wanted> {
    let door = read_door(&offered.kind, text)?;
    Ok(wanted::Wanted {
        disk: offered.disk.clone(),
        read_only: offered.read_only,
        way: wanted::Way::Own(door),
    })
}
