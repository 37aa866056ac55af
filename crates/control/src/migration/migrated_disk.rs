//! Description of a disk for another host: its keys as in a config file, read there by the same
//! rules, and its bucket levels.
//!
//! A property that is valid on one host only is rejected by name instead of being lost.

use std::{
    path::{Path, absolute},
    rc::Rc,
};

use anyhow::{Context as _, bail, ensure};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use settings::{
    DesiredState, Diagnostics, DiskConfig, ExportTarget, KeyTable as _, TlsConfig, VhostUserBlkConfig,
    VhostUserSocket, config, key::TransferPolicy,
};

use crate::{
    quotas::StoredCounts,
    registry::{NewNbdExport, Registry, RunningDisk, RunningEndpoint, RunningExport},
    upgrade::BucketLevelsState,
};

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct MigratedDisk {
    /// Keys of its table in a config file.
    keys: Map<String, Value>,
    pub(super) group: Option<MigratedDiskGroup>,
    /// Names of its NBD exports.
    pub(super) exports: Vec<String>,
    /// NBD address at the target; `None` for the target's only server.
    pub(super) listen: Option<String>,
    /// vhost-user sockets, in the syntax of the command line.
    #[serde(rename = "doors")]
    endpoints: Vec<String>,
    pub(super) filled: Option<BucketLevelsState>,
    /// Bytes counted against its quotas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) quota: Option<StoredCounts>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MigratedDiskGroup {
    pub(super) name: String,
    /// True if its limits are cluster-wide.
    pub(super) cluster: bool,
}

impl MigratedDisk {
    /// Describes a running disk.
    ///
    /// # Errors
    /// A property of the disk would be lost on another host.
    pub(super) fn describe(
        registry: &Registry,
        running: &RunningDisk,
        exports: &[Rc<RunningExport>],
        listen: Option<String>,
    ) -> anyhow::Result<Self> {
        check_migratable(running)?;
        let disk = &running.disk;
        let opened = disk.image();
        let keys =
            running.current_keys(|key| key.transfer == TransferPolicy::Transferred && key.name != "group");
        let group = disk.throttle().group().map(|group| MigratedDiskGroup {
            name: group.name().to_owned(),
            cluster: registry.cluster_of(group.name()).is_some(),
        });
        let (mut names, mut endpoints) = (Vec::new(), Vec::new());
        // Exports that are ending were removed by the user.
        for export in exports.iter().filter(|export| !export.is_ending()) {
            match &export.endpoint {
                RunningEndpoint::Nbd(..) => {
                    let new = export.nbd_parameters.as_ref().context("an export that is not known")?;
                    let NewNbdExport { id: _, name, description, access, disk: _, read_only: _, bitmaps } =
                        new;
                    ensure!(
                        access.allows_all() && bitmaps.is_empty() && description.is_empty(),
                        "export {}: its access rules, description and bitmaps cannot be migrated \
                         (remove them first)",
                        export.id
                    );
                    ensure!(
                        !export.read_only || opened.is_read_only(),
                        "export {}: a read-only export of a writable disk cannot be migrated \
                         (remove it first)",
                        export.id
                    );
                    names.push(name.clone());
                }
                RunningEndpoint::Separate(..) => endpoints.push(endpoint_text(export)?),
            }
        }
        // One name at two servers here becomes one export at the target's server.
        names.dedup();
        Ok(Self { keys, group, exports: names, listen, endpoints, filled: None, quota: None })
    }

    /// Disk config for this description, checked by the rules of a config file.
    ///
    /// # Errors
    /// First mistake of the description.
    pub(super) fn to_config(&self, name: &str) -> anyhow::Result<settings::DiskWithOrigins> {
        ensure!(!self.keys.contains_key("export"), "export: is not transferred as a key");
        let diagnostics = Diagnostics::default();
        // Relative paths were made absolute by the source, so the base directory has no effect.
        let disk = config::disk_from_json(name, &self.keys, Path::new("/"), &diagnostics);
        let disk = diagnostics.finish_first(disk)?.context("no disk")?;
        let planned = DesiredState::of_disk(disk, &[], &TlsConfig::Off, Diagnostics::default());
        let mut planned = planned.map_err(|all| all.into_iter().next().expect("a mistake"))?;
        Ok(planned.disks.remove(0))
    }

    /// Parses the vhost-user sockets.
    ///
    /// # Errors
    /// A text is no endpoint, or its path is relative.
    pub(super) fn endpoints(&self) -> anyhow::Result<Vec<ExportTarget>> {
        let read = |text: &String| {
            let config: VhostUserBlkConfig = text.parse().map_err(anyhow::Error::msg)?;
            ensure!(
                matches!(&config.socket, VhostUserSocket::Path(path) if path.is_absolute()),
                "{text}: is no absolute path"
            );
            Ok(ExportTarget::VhostUserBlk(config))
        };
        self.endpoints.iter().map(read).collect()
    }
}

fn check_migratable(running: &RunningDisk) -> anyhow::Result<()> {
    let image = running.disk.image();
    let storage = image.storage();
    ensure!(
        !storage.is_memory(),
        "its data is in this process's memory (only storage that other hosts reach can be migrated)"
    );
    ensure!(
        running.disk.failures().stopped_by().is_none(),
        "it has stopped at an error (`weir resume` resumes it)"
    );
    ensure!(!storage.has_lost_writes(), "writes to its image were lost (restart weir, and check the image)");
    ensure!(
        !running.disk.has_handover(),
        "handover: it moves with its virtual machine (configure the disk with handover on both hosts)"
    );
    ensure!(
        running.lower_nodes.is_empty(),
        "it consists of several nodes of blockdev-add, which cannot be migrated (add it with `weir disk add`)"
    );
    let config = running.config();
    let mut host_only_keys = DiskConfig::keys().iter().filter(|key| key.transfer == TransferPolicy::HostOnly);
    let host_only = host_only_keys.find(|key| !key.is_default(&config)).map(|key| key.name);
    if let Some(key) = host_only.or(running.host_local_option) {
        bail!("{key}: cannot be migrated (add the disk to the config file there instead)");
    }
    Ok(())
}

fn endpoint_text(export: &RunningExport) -> anyhow::Result<String> {
    let Some(ExportTarget::VhostUserBlk(config)) = &export.endpoint_config else {
        bail!("export {}: devices of this host cannot be migrated (`weir detach` removes one)", export.id);
    };
    let VhostUserSocket::Path(path) = &config.socket else {
        bail!("export {}: its socket was passed to this daemon, and cannot be opened elsewhere", export.id);
    };
    let socket = VhostUserSocket::Path(absolute(path)?);
    Ok(VhostUserBlkConfig { socket, ..config.clone() }.to_string())
}
