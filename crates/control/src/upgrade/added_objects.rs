//! Description of objects that clients of the control socket added, for an upgrade: disks, groups,
//! servers and exports that are in no config file.
//!
//! It contains how each was created, and its current settings. `add_transferred` adds them in
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
use policy::throttle::LimitSetting;
use serde_json::{Map, Value};
use settings::{
    DiskConfig, ExportTarget as Own, KeyTable as _, LatencyConfig, LatencySetting, QuotaSetting,
    VhostUserSocket, schedule,
};

use super::messages::{AddedDiskState, AddedExportState, AddedGroupState, ObjectOrigin, OfferedDevice};
use crate::{
    planned_export,
    reconcile::change_report::{self, NamedValue, throttle_values},
    registry::{NewNbdExport, Registry, RunningDisk, RunningExport},
    running_server::{AddedServer, RunningServer},
};

/// Creation and current settings of a disk.
pub(super) fn disk_origin(running: &RunningDisk) -> ObjectOrigin<AddedDiskState> {
    let nodes = running.creation_commands.as_deref().unwrap_or_default();
    // A disk of the config has neither commands nor the flag.
    if nodes.is_empty() && !running.is_added {
        return ObjectOrigin::Config;
    }
    if running.config().image.path().is_some_and(|path| path.starts_with("/dev/fdset")) {
        return ObjectOrigin::NotTransferable("its file was passed to the old process by add-fd".to_owned());
    }
    if !nodes.is_empty() && running.is_switched() {
        let why = "snapshots have changed the nodes that blockdev-add created";
        return ObjectOrigin::NotTransferable(why.to_owned());
    }
    if nodes.iter().any(|node| node.contains_key("encrypt")) || !running.config().qcow2.secrets.is_empty() {
        return ObjectOrigin::NotTransferable("only the old process has its passphrase".to_owned());
    }
    let keys = running.is_added.then(|| running.transferred_keys());
    if running.is_added && running.lower_nodes.is_empty() {
        return ObjectOrigin::Added(AddedDiskState { keys, ..AddedDiskState::default() });
    }
    let bottom = running.lower_nodes.last().filter(|_| running.is_added).map(|node| node.name.clone());
    let nodes = nodes.iter().cloned().map(with_absolute_paths).collect();
    let values = change_report::disk_values(&running.current_config())
        .into_iter()
        // Versions without rates for each GiB reject their names. Schedules are among the keys.
        .filter(|(key, value)| running.has_key(key) && !(is_size_rate(key) && *value == 0))
        .filter(|(key, _)| !is_of_schedule(key));
    let settings = set_arguments(running.disk.name(), values);
    ObjectOrigin::Added(AddedDiskState { nodes, settings, keys, lowest_name: bottom })
}

fn is_of_schedule(key: &str) -> bool {
    DiskConfig::key(key).is_some_and(|key| key.heading == schedule::HEADING)
}

fn is_size_rate(key: &str) -> bool {
    LimitSetting::OF_SIZE.iter().any(|setting| setting.name() == key)
}

/// Added groups, parents first.
pub(super) fn added_groups(registry: &Registry) -> Vec<AddedGroupState> {
    let depth =
        |group: &Arc<ThrottleGroup>| std::iter::successors(group.parent(), |group| group.parent()).count();
    let added = registry.groups.added_by_clients.borrow();
    let mut groups = registry.groups.all();
    groups.retain(|group| added.contains(group.name()));
    // Parents first, so that each parent exists when its members are added.
    groups.sort_by_key(depth);
    let state_of = |group: Arc<ThrottleGroup>| {
        let parent = group.parent().map(|parent| parent.name().to_owned());
        // The parent is set when the group is created.
        let throttled = throttle_values(&group.settings(), &group.scheduled().schedule, "").into_iter();
        let throttled = throttled.filter(|(key, _)| *key != "group" && !is_of_schedule(key));
        AddedGroupState {
            name: group.name().to_owned(),
            parent,
            settings: set_arguments(group.name(), throttled),
        }
    };
    groups.into_iter().map(state_of).collect()
}

/// Arguments of `x-weir-set` for these settings; a size without a value is 0 there. Latency
/// settings with their defaults are omitted, because a new process without latency targets rejects
/// them.
fn set_arguments(name: &str, values: impl IntoIterator<Item = NamedValue>) -> Map<String, Value> {
    let is_default_latency = |(key, value): &NamedValue| {
        let setting = LatencySetting::from_name(key);
        setting.is_some_and(|setting| {
            value.is_null() || value.as_str() == Some(&LatencyConfig::default().text(setting))
        })
    };
    // Older versions reject the names.
    let is_no_quota = |(key, value): &NamedValue| {
        QuotaSetting::from_name(key).is_some() && (value.is_null() || *value == 0)
    };
    let values = values.into_iter().filter(|value| !is_default_latency(value) && !is_no_quota(value));
    let value = |value: Value| if value.is_null() { 0.into() } else { value };
    let values = values.map(|(key, setting)| (key.to_owned(), value(setting)));
    values.chain([("name".to_owned(), name.into())]).collect()
}

/// Makes paths absolute: the new process may have another working directory.
fn with_absolute_paths(mut node: Map<String, Value>) -> Map<String, Value> {
    for (key, value) in &mut node {
        match value {
            Value::Object(inner) => *inner = with_absolute_paths(std::mem::take(inner)),
            Value::String(path) if matches!(key.as_str(), "filename" | "path") => {
                let absolute = std::path::absolute(&*path)
                    .ok()
                    .and_then(|path| path.into_os_string().into_string().ok());
                *path = absolute.unwrap_or_else(|| std::mem::take(path));
            }
            _ => {}
        }
    }
    node
}

/// Origin of a server, with its maximum number of clients.
pub(super) fn server_origin(serving: &RunningServer) -> ObjectOrigin<usize> {
    match serving.added.get() {
        None => ObjectOrigin::Config,
        Some(AddedServer { max_connections, has_objects: false }) => ObjectOrigin::Added(max_connections),
        Some(_) => ObjectOrigin::NotTransferable("only the old process has its TLS objects".to_owned()),
    }
}

/// Origin of an NBD export.
pub(super) fn export_origin(export: &RunningExport) -> ObjectOrigin<AddedExportState> {
    match &export.nbd_parameters {
        Some(NewNbdExport { id, description, access, .. }) if export.is_added.get() => {
            ObjectOrigin::Added(AddedExportState {
                id: id.clone(),
                description: description.clone(),
                access: access.into(),
            })
        }
        _ => ObjectOrigin::Config,
    }
}

/// Origin of an export with a separate endpoint.
pub(super) fn endpoint_origin(export: &RunningExport) -> ObjectOrigin<String> {
    let Some(target) = export.endpoint_config.as_ref().filter(|_| export.is_added.get()) else {
        return ObjectOrigin::Config;
    };
    let absolute = |path: &Path| std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
    let mut target = target.clone();
    match &mut target {
        Own::VhostUserBlk(config) => {
            if let VhostUserSocket::Path(path) = &mut config.socket {
                *path = absolute(path);
            }
        }
        Own::Fuse(fuse) => fuse.file = absolute(&fuse.file),
        Own::Ublk(_) | Own::NbdDevice(_) => {}
    }
    ObjectOrigin::Added(target.to_string())
}

pub(super) fn parse_endpoint(kind: &str, text: &str) -> anyhow::Result<Own> {
    let read = match kind {
        "ublk" => text.parse().map(Own::Ublk),
        "fuse" => text.parse().map(Own::Fuse),
        "nbd-device" => text.parse().map(Own::NbdDevice),
        _ => text.parse().map(Own::VhostUserBlk),
    };
    read.map_err(|rule: String| anyhow!("{text}: {rule}"))
}

/// Planned export for an added device of the host.
pub(super) fn planned_device(
    offered: &OfferedDevice,
    text: &str,
) -> anyhow::Result<planned_export::PlannedExport> {
    let target = parse_endpoint(&offered.kind, text)?;
    Ok(planned_export::PlannedExport {
        disk: offered.disk.clone(),
        read_only: offered.read_only,
        endpoint: planned_export::PlannedEndpoint::Separate(target),
    })
}
