//! What clients of the control socket have added, as it is told in a takeover: disks, groups,
//! servers and exports that no config has.
//!
//! How each was made, and how it is set now. [`again`](super::again) is what a newcomer makes of it.
//!
//! The old process transfers the keys of a disk that was added by them, and else the arguments of
//! the commands that made an object, so there is no second description of a disk. The new process
//! does the same as for such a command inside its sandbox: a guest
//! may control the old process, which must not be able to do more than any client of the control
//! socket. It compares the result like every other disk. Objects of the old config that the new
//! config lacks are not transferred but reported: the operator has forgotten or removed them.
//! Passphrases, descriptor sets and TLS objects are not transferred, or a daemon would give secrets
//! away.

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

/// How a disk was made and is set.
pub(super) fn disk(running: &RunningDisk) -> Origin<AddedDisk> {
    let nodes = running.told.as_deref().unwrap_or_default();
    if nodes.is_empty() && !running.added {
        return Origin::Config;
    }
    if running.config.image.path().is_some_and(|path| path.starts_with("/dev/fdset")) {
        return Origin::Bound("its file was passed to the other by add-fd".to_owned());
    }
    if nodes.iter().any(|node| node.contains_key("encrypt")) || !running.config.qcow2.secrets.is_empty() {
        return Origin::Bound("only the other was told its passphrase".to_owned());
    }
    if running.added && !running.below.is_empty() {
        return Origin::Bound("blockdev-add put a node over it (remove that with blockdev-del)".to_owned());
    }
    if running.added {
        let keys = Some(running.keys_of_upgrade());
        return Origin::Added(AddedDisk { keys, ..AddedDisk::default() });
    }
    let nodes = nodes.iter().cloned().map(with_whole_paths).collect();
    let values =
        applied::of_disk(&running.current_config()).into_iter().filter(|(key, _)| running.has_key(key));
    let settings = settings(running.disk.name(), values);
    Origin::Added(AddedDisk { nodes, settings, keys: None })
}

/// Those that were added, each behind the one that it is in.
pub(super) fn groups(registry: &Registry) -> Vec<AddedGroup> {
    let depth = |group: &Arc<ThrottleGroup>| std::iter::successors(group.parent(), |group| group.parent()).count();
    let added = registry.groups.added.borrow();
    let mut groups = registry.groups.all();
    groups.retain(|group| added.contains(group.name()));
    groups.sort_by_key(depth);
    let tell = |group: Arc<ThrottleGroup>| {
        let parent = group.parent().map(|parent| parent.name().to_owned());
        // What it is in is said where it is made.
        let throttled = of_throttle(&group.settings(), "").into_iter().filter(|(key, _)| *key != "group");
        AddedGroup { name: group.name().to_owned(), parent, settings: settings(group.name(), throttled) }
    };
    groups.into_iter().map(tell).collect()
}

/// The arguments of `x-weir-set` for all of these; a size that nobody has said is 0 there.
fn settings(name: &str, values: impl IntoIterator<Item = Named>) -> Map<String, Value> {
    let value = |value: Value| if value.is_null() { json!(0) } else { value };
    let values = values.into_iter().map(|(key, said)| (key.to_owned(), value(said)));
    values.chain([("name".to_owned(), json!(name))]).collect()
}

/// The newcomer may be in another directory.
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

/// A server, and how many clients it may have.
pub(super) fn server(serving: &Serving) -> Origin<usize> {
    match serving.added.get() {
        None => Origin::Config,
        Some(Added { max_connections, has_objects: false }) => Origin::Added(max_connections),
        Some(_) => Origin::Bound("only the other has the objects for its TLS".to_owned()),
    }
}

/// An export over NBD.
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

/// One with a door of its own.
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

/// A device of the host that was added, as the newcomer is to have it.
pub(super) fn device(offered: &OfferedDevice, text: &str) -> anyhow::Result<wanted::Wanted> {
    let door = read_door(&offered.kind, text)?;
    Ok(wanted::Wanted {
        disk: offered.disk.clone(),
        read_only: offered.read_only,
        way: wanted::Way::Own(door),
    })
}
