//! `weir attach --list`: devices of this host that weir serves, and their users.

use std::{
    io::{IsTerminal as _, stdout},
    ops::Not,
    path::PathBuf,
};

use console::{
    CommandFailure, figures, print, print_json,
    table::{ColumnAlignment, TextTable},
};
use control::openers::{DeviceOpeners, OpenerProcess};
use serde::Serialize;

use super::{detach::attachment_at, kind::AttachKind, orphans, record::AttachmentRecord};
use crate::client::{ControlAddress, ControlClient, report::DaemonReport};

#[derive(Debug, Serialize)]
#[serde(rename_all = "kebab-case")]
struct AttachmentRow {
    name: String,
    device: PathBuf,
    /// Kind of the device.
    #[serde(rename = "type")]
    kind: String,
    image: String,
    size: Option<u64>,
    mounts: Vec<PathBuf>,
    holders: Vec<String>,
    /// Processes that still use an unmounted file system of the device.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    processes: Vec<String>,
    /// The keeper process; `None` for a device of `weir serve` or if the keeper died.
    pid: Option<u32>,
    /// True if its server responds.
    alive: bool,
    /// True if its keeper was killed before the attachment was complete.
    #[serde(skip_serializing_if = "Not::not")]
    broken: bool,
}

pub(super) fn run(json: bool, qmp: Option<ControlAddress>) -> Result<(), CommandFailure> {
    let rows = rows(qmp)?;
    if json {
        return Ok(print_json(&rows)?);
    }
    let mut table = TextTable::new([
        ("NAME", ColumnAlignment::Left),
        ("DEVICE", ColumnAlignment::Left),
        ("TYPE", ColumnAlignment::Left),
        ("SIZE", ColumnAlignment::Right),
        ("USED BY", ColumnAlignment::Left),
        ("PID", ColumnAlignment::Right),
        ("IMAGE", ColumnAlignment::Left),
    ]);
    let dash = || "-".to_owned();
    for AttachmentRow { name, device, kind, image, size, mounts, holders, processes, pid, alive, broken } in
        rows
    {
        let mounts = mounts.iter().map(|point| point.display().to_string());
        let users: Vec<_> = mounts.chain(holders).chain(processes).collect();
        table.row(vec![
            name,
            device.display().to_string(),
            match (broken, alive) {
                (true, _) => format!("{kind}, incomplete"),
                (false, true) => kind,
                (false, false) => format!("{kind}, orphaned"),
            },
            size.map_or_else(dash, |bytes| figures::bytes(bytes as f64)),
            if users.is_empty() { dash() } else { users.join(" ") },
            pid.map_or_else(dash, |pid| pid.to_string()),
            image,
        ]);
    }
    Ok(print(&table.render(stdout().is_terminal()))?)
}

fn rows(qmp: Option<ControlAddress>) -> Result<Vec<AttachmentRow>, CommandFailure> {
    let mut rows = served(qmp)?;
    for device in orphans::devices() {
        if rows.iter().any(|row| row.device == device) {
            continue;
        }
        let DeviceOpeners { mounts, holders, .. } = DeviceOpeners::of_device(&device);
        rows.push(AttachmentRow {
            name: device.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            device,
            kind: AttachKind::Ublk.name().to_owned(),
            image: "-".to_owned(),
            size: None,
            mounts,
            holders,
            processes: Vec::new(),
            pid: None,
            alive: false,
            broken: false,
        });
    }
    Ok(rows)
}

/// Attachments, and devices that a daemon exports.
fn served(qmp: Option<ControlAddress>) -> Result<Vec<AttachmentRow>, CommandFailure> {
    let mut rows = Vec::new();
    for place in AttachmentRecord::all()? {
        let record = place.attached();
        let broken = record.is_none();
        let Some(attached) = record.map_or_else(|| attachment_at(&place), |record| Ok(Some(record)))? else {
            continue;
        };
        let report = attached.qmp.parse().ok().and_then(|target| status(&target));
        // A server that responds but does not have the disk counts as dead too.
        let size = report.as_ref().and_then(|report| size_of(report, &attached.name));
        let users = DeviceOpeners::of_device(&attached.device);
        let mount = place.request().and_then(|request| request.mount);
        let users = match mount {
            // Costly, as it reads /proc of all processes; only an unexpected unmount needs it.
            Some(mount) if !users.mounts.contains(&mount.directory) => users.with_file_system_users(),
            _ => users,
        };
        let DeviceOpeners { mounts, holders, processes, .. } = users;
        rows.push(AttachmentRow {
            name: attached.name,
            device: attached.device,
            kind: attached.kind.name().to_owned(),
            image: attached.image,
            size,
            mounts,
            holders,
            processes: processes.iter().map(OpenerProcess::to_string).collect(),
            pid: (!place.is_abandoned()?).then_some(attached.keeper),
            alive: size.is_some(),
            broken,
        });
    }
    let is_address_given = qmp.is_some();
    let target =
        ControlAddress::choose(qmp).map_err(|message| CommandFailure::Usage(anyhow::Error::msg(message)))?;
    let report = match ControlClient::connect(&target).and_then(|mut client| client.status()) {
        Ok(report) => report,
        Err(error) if is_address_given => return Err(error.into()),
        Err(_) => return Ok(rows),
    };
    for export in &report.exports {
        let Some(device) = export.device.as_ref().map(PathBuf::from) else { continue };
        // An attachment by this daemon is listed above, under its own name.
        if rows.iter().any(|row| row.name == export.id) {
            continue;
        }
        let image = report.disks.iter().find(|disk| disk.name == export.disk);
        rows.push(AttachmentRow {
            name: export.id.clone(),
            device,
            kind: export.kind.trim_start_matches("x-").to_owned(),
            image: image.map(|disk| disk.image.clone()).unwrap_or_default(),
            size: size_of(&report, &export.disk),
            mounts: export.mounts.iter().flatten().map(PathBuf::from).collect(),
            holders: export.holders.clone().unwrap_or_default(),
            processes: Vec::new(),
            pid: None,
            alive: true,
            broken: false,
        });
    }
    Ok(rows)
}

fn status(target: &ControlAddress) -> Option<DaemonReport> {
    ControlClient::connect(target).ok()?.status().ok()
}

fn size_of(report: &DaemonReport, disk: &str) -> Option<u64> {
    report.disks.iter().find(|found| found.name == disk).map(|disk| disk.size)
}
