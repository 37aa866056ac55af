//! What a disk is, for another host: its keys as they stand in a config file, read there by the
//! same rules, and what is in its buckets.
//!
//! What of a disk means something on one host alone is refused by name, rather than lost.

use std::{
    path::{Path, absolute},
    rc::Rc,
};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use settings::{
    DiskConfig, ExportTarget as DoorKind, KeyTable as _, Diagnostics, CheckedDisk, VhostUserSocket, TlsConfig, VhostUserBlkConfig, config,
    key::TransferPolicy,
};

use crate::{
    registry::{Door, NewExport, Registry, RunningDisk, RunningExport},
    takeover::Buckets,
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct MovedDisk {
    /// Of its section in a config file.
    keys: Map<String, Value>,
    pub(super) group: Option<GroupThere>,
    /// Over NBD, by their names.
    pub(super) exports: Vec<String>,
    /// Where it is exported over NBD; none: where the host listens.
    pub(super) listen: Option<String>,
    /// Sockets for virtual machines, as the command line has them.
    doors: Vec<String>,
    pub(super) filled: Option<Buckets>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupThere {
    pub(super) name: String,
    /// Its limits are the cluster's.
    pub(super) cluster: bool,
}

impl MovedDisk {
    /// As it runs here.
    ///
    /// # Errors
    /// What of it would be lost on another host.
    pub(super) fn of(
        registry: &Registry,
        running: &RunningDisk,
        exports: &[Rc<RunningExport>],
        listen: Option<String>,
    ) -> anyhow::Result<Self> {
        check(running)?;
        let disk = &running.disk;
        let opened = disk.image();
        let keys = running.keys_now(|key| key.transfer == TransferPolicy::Transferred && key.name != "group");
        let group = disk.throttle().group().map(|group| GroupThere {
            name: group.name().to_owned(),
            cluster: registry.cluster_of(group.name()).is_some(),
        });
        let (mut names, mut doors) = (Vec::new(), Vec::new());
        // The user has removed the ones that are ending.
        for export in exports.iter().filter(|export| !export.is_ending()) {
            match &export.door {
                Door::Nbd(..) => {
                    let new = export.new.as_ref().context("an export that is not known")?;
                    let NewExport { id: _, name, description, access, disk: _, read_only: _, bitmaps } = new;
                    ensure!(
                        access.allows_all() && bitmaps.is_empty() && description.is_empty(),
                        "export {}: who may have it, its description and its bitmaps do not move (remove them first)",
                        export.id
                    );
                    ensure!(
                        !export.read_only || opened.is_read_only(),
                        "export {}: that it is read-only does not move (remove it first)",
                        export.id
                    );
                    names.push(name.clone());
                }
                Door::Own(..) => doors.push(door(export)?),
            }
        }
        names.dedup();
        Ok(Self { keys, group, exports: names, listen, doors, filled: None })
    }

    /// The disk of this name that it stands for, by the rules of a config file.
    ///
    /// # Errors
    /// What is wrong with it.
    pub(super) fn planned(&self, name: &str) -> anyhow::Result<settings::PlacedDisk> {
        ensure!(!self.keys.contains_key("export"), "export: is not transferred as a key");
        let mistakes = Diagnostics::default();
        let disk = config::disk_from_json(name, &self.keys, Path::new("/"), &mistakes);
        let disk = mistakes.finish_first(disk)?.context("no disk")?;
        let planned = CheckedDisk::new(disk, &[], &TlsConfig::Off, Diagnostics::default());
        Ok(planned.map_err(|all| all.into_iter().next().expect("a mistake"))?.disk)
    }

    /// # Errors
    /// One that is none, or lies anywhere.
    pub(super) fn doors(&self) -> anyhow::Result<Vec<DoorKind>> {
        let read = |text: &String| {
            let door: VhostUserBlkConfig = text.parse().map_err(anyhow::Error::msg)?;
            ensure!(
                matches!(&door.socket, VhostUserSocket::Path(path) if path.is_absolute()),
                "{text}: is no whole path"
            );
            Ok(DoorKind::VhostUserBlk(door))
        };
        self.doors.iter().map(read).collect()
    }
}

fn check(running: &RunningDisk) -> anyhow::Result<()> {
    let storage = running.disk.image().storage();
    ensure!(
        !storage.is_memory(),
        "its data is in memory of this process (only what other hosts reach can move)"
    );
    ensure!(
        running.disk.failures().stopped_by().is_none(),
        "an error has stopped it (`weir resume` lets it go on)"
    );
    ensure!(!storage.has_lost_writes(), "writes to its image were lost (restart weir, and check the image)");
    ensure!(
        !running.disk.has_handover(),
        "handover: the machine that uses it takes it along by itself (have the disk with handover on both hosts)"
    );
    ensure!(
        running.below.is_empty(),
        "it was put together by blockdev-add of several nodes, which others do not know (add it with `weir disk add`)"
    );
    let config = &running.config;
    let mut stays = DiskConfig::keys().iter().filter(|key| key.transfer == TransferPolicy::HostOnly);
    let stays = stays.find(|key| !key.is_default(config)).map(|key| key.name);
    if let Some(key) = stays.or(running.only_here) {
        bail!("{key}: does not move to another host (have the disk in the config file there instead)");
    }
    Ok(())
}

fn door(export: &RunningExport) -> anyhow::Result<String> {
    let Some(DoorKind::VhostUserBlk(door)) = &export.said else {
        bail!("export {}: devices of this host do not move (`weir detach` removes one)", export.id);
    };
    let VhostUserSocket::Path(path) = &door.socket else {
        bail!("export {}: its socket was passed to this daemon, and cannot be opened elsewhere", export.id);
    };
    let socket = VhostUserSocket::Path(absolute(path)?);
    Ok(VhostUserBlkConfig { socket, ..door.clone() }.to_string())
}
