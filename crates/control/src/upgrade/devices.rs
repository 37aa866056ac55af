//! Devices and files of this host in an upgrade, in both processes.
//!
//! ```text
//!   nbd-device   weir's ends of the sockets are passed; the kernel does not notice
//!   fuse         the descriptor of the FUSE device is passed
//!   ublk         stays with the old process until it has ended; then the new one recovers it, as
//!                after a kill, and the kernel reissues all requests without a reply
//! ```
//!
//! The new process opens none of them before it has received their state, and ublk devices only
//! after the old process has ended: if recovery fails, the device waits for the next start.

use std::{
    cell::RefCell,
    os::fd::{AsFd as _, OwnedFd},
    rc::Rc,
};

use anyhow::{Context as _, ensure};
use export::{
    fuse::{self, FuseFileOwner, FuseFileState},
    nbd::kernel_client::{self, QuiescedNbdSocket},
};

use super::{
    added_objects,
    channel::AttachmentReader,
    messages::{HostDeviceKind, HostDeviceState, NbdDeviceSocketState, ObjectOrigin, OfferedDevice},
    missing_text,
};
use crate::{
    endpoints::{HostEndpoint, TransferredEndpoint},
    planned_export::{PlannedEndpoint, PlannedExport},
    registry::{Registry, RunningExport},
};

/// Description of a device before the quiesce.
///
/// # Errors
/// Fails if the device cannot be transferred.
pub(super) fn describe_device(export: &RunningExport, host: &HostEndpoint) -> anyhow::Result<OfferedDevice> {
    let id = &export.id;
    if let HostEndpoint::Ublk(server) = host {
        ensure!(
            server.survives(),
            "export {id}: this kernel's ublk devices end with their process (restart weir)"
        );
    }
    let target =
        export.endpoint_config.as_ref().with_context(|| format!("export {id}: no config describes it"))?;
    Ok(OfferedDevice {
        id: id.clone(),
        kind: target.type_name().to_owned(),
        address: target.address(),
        disk: export.disk.disk.name().to_string(),
        read_only: export.read_only,
        origin: added_objects::endpoint_origin(export),
    })
}

/// State of a quiesced device. Appends its bytes and descriptors to those of the message.
pub(super) fn quiesced_state(
    id: &str,
    host: &HostEndpoint,
    bytes: &mut Vec<u8>,
    descriptors: &mut Vec<OwnedFd>,
) -> anyhow::Result<Option<HostDeviceState>> {
    let kind = match host {
        HostEndpoint::Ublk(_) => return Ok(None),
        HostEndpoint::NbdDevice(server) => {
            let kernel_client::QuiescedNbdDevice { number, connections } = server.quiesced_state();
            let mut sockets = Vec::new();
            for QuiescedNbdSocket { socket, bytes: received, skip } in connections {
                descriptors.push(socket.as_fd().try_clone_to_owned()?);
                sockets.push(NbdDeviceSocketState { received: received.len(), skip });
                bytes.extend(received);
            }
            HostDeviceKind::NbdDevice { number, connections: sockets }
        }
        HostEndpoint::Fuse(server) => {
            let Some(fuse::QuiescedFuseFile { mount, state: standing }) = server.quiesced_state()? else {
                return Ok(None);
            };
            let FuseFileState { owner, modified, openers, file_bytes, messages } = standing;
            descriptors.push(mount.device);
            let has_watcher = mount.watcher.is_some();
            descriptors.extend(mount.watcher);
            let kind = HostDeviceKind::Fuse {
                path: mount.path,
                by_helper: mount.by_helper,
                mount: mount.number,
                has_watcher,
                permissions: owner.permissions,
                uid: owner.uid,
                gid: owner.gid,
                modified,
                openers,
                file_bytes,
                bytes: messages.len(),
            };
            bytes.extend(messages);
            kind
        }
    };
    Ok(Some(HostDeviceState { id: id.to_owned(), kind }))
}

/// Devices to take over, each with its planned export in this config.
pub(super) struct AwaitedDevices(RefCell<Vec<(OfferedDevice, Option<PlannedExport>)>>);

impl AwaitedDevices {
    pub(super) fn new(offered: Vec<OfferedDevice>) -> Self {
        Self(RefCell::new(offered.into_iter().map(|device| (device, None)).collect()))
    }

    /// True if the old process has this export, so that it is opened later.
    pub(super) fn claim(&self, planned: &PlannedExport, registry: &Registry) -> bool {
        let PlannedEndpoint::Separate(target) = &planned.endpoint else { return false };
        let mut awaited = self.0.borrow_mut();
        let found = awaited.iter_mut().find(|(offered, by)| {
            by.is_none()
                && offered.kind == target.type_name()
                && offered.address == target.address()
                && offered.disk == planned.disk
        });
        let Some((offered, by)) = found else { return false };
        *by = Some(planned.clone());
        registry.exports.awaited_endpoints.borrow_mut().insert(offered.id.clone(), target.clone());
        true
    }

    /// Plans the added devices that are not in this config; returns them.
    ///
    /// # Errors
    /// A device cannot be opened here.
    pub(super) fn plan_added(&self, registry: &Registry) -> anyhow::Result<Vec<OfferedDevice>> {
        let mut added_devices = Vec::new();
        for (offered, by) in self.0.borrow_mut().iter_mut().filter(|(_, by)| by.is_none()) {
            let ObjectOrigin::Added(text) = &offered.origin else { continue };
            let named =
                || format!("export {}: it was added at run time, and cannot be added here", offered.id);
            let planned = added_objects::planned_device(offered, text).with_context(named)?;
            let PlannedEndpoint::Separate(target) = &planned.endpoint else { continue };
            registry.sandbox().map_or(Ok(()), |sandbox| sandbox.check_export(target)).with_context(named)?;
            registry.exports.awaited_endpoints.borrow_mut().insert(offered.id.clone(), target.clone());
            *by = Some(planned);
            added_devices.push(offered.clone());
        }
        Ok(added_devices)
    }

    /// Ids of the exports.
    pub(super) fn ids(&self) -> Vec<String> {
        self.0.borrow().iter().map(|(offered, _)| offered.id.clone()).collect()
    }

    /// Fails if this config lacks a device, except for devices that follow later: those for which
    /// the function returns true. Its arguments are whether a client added the device, and the
    /// disk's name.
    pub(super) fn check_complete(
        &self,
        registry: &Registry,
        is_deferred: impl Fn(bool, &str) -> bool,
    ) -> anyhow::Result<()> {
        for (OfferedDevice { id, address, disk, read_only, origin, .. }, planned) in self.0.borrow().iter() {
            if planned.is_none() && is_deferred(origin.is_added(), disk) {
                continue;
            }
            let planned = planned.as_ref();
            let planned = planned.with_context(|| {
                let subject =
                    format!("export {id}: the running daemon has it at {address}, but this config does not");
                missing_text(subject, origin, registry)
            })?;
            ensure!(
                planned.is_read_only(registry)? == *read_only,
                "export {id}: the running daemon serves {address} with another value of read-only \
                 (use the same value, or restart)"
            );
        }
        Ok(())
    }

    /// Opens the transferred devices except ublk; they do not serve yet.
    pub(super) async fn open_transferred(
        &self,
        states: Vec<HostDeviceState>,
        pieces: &mut AttachmentReader<'_>,
        registry: &Rc<Registry>,
    ) -> anyhow::Result<()> {
        for HostDeviceState { id, kind } in states {
            // Only offered devices: the old process is not trusted to add one at this point.
            let planned =
                self.take(&id).with_context(|| format!("export {id}: the old process did not offer it"))?;
            let taken = transferred_endpoint(kind, pieces).with_context(|| format!("export {id}"))?;
            registry.exports.awaited_endpoints.borrow_mut().remove(&id);
            let (planned, is_added) = planned;
            let opened = planned.add_transferred(registry, id.clone(), taken).await;
            opened.with_context(|| format!("export {id}: it cannot be taken over"))?;
            registry.exports.get(&id)?.is_added.set(is_added);
        }
        // Devices without state were unmounted in the meantime.
        self.0.borrow_mut().retain(|(offered, _)| offered.kind == UBLK_KIND);
        let left = self.0.borrow();
        let is_left = |id: &String| left.iter().any(|(offered, _)| offered.id == *id);
        // Frees the ids of the devices that were unmounted.
        registry.exports.awaited_endpoints.borrow_mut().retain(|id, _| is_left(id));
        Ok(())
    }

    /// Recovers the ublk devices after the old process has ended; returns their number.
    pub(super) async fn recover(self, registry: &Rc<Registry>) -> usize {
        let mut recovered = 0;
        for (OfferedDevice { id, address, origin, .. }, planned) in self.0.into_inner() {
            registry.exports.awaited_endpoints.borrow_mut().remove(&id);
            let Some(planned) = planned else { continue };
            match planned.add_transferred(registry, id.clone(), TransferredEndpoint::Ublk).await {
                Ok(_) => {
                    recovered += 1;
                    if let Ok(export) = registry.exports.get(&id) {
                        export.is_added.set(origin.is_added());
                    }
                }
                Err(error) => {
                    let consequence = "its openers wait until weir is restarted";
                    tracing::error!(
                        export = id,
                        address,
                        "it cannot be taken over: {error:#} ({consequence})"
                    );
                }
            }
        }
        recovered
    }

    /// Takes the planned export of a device, and whether it was added.
    fn take(&self, id: &str) -> Option<(PlannedExport, bool)> {
        let mut awaited = self.0.borrow_mut();
        let at = awaited.iter().position(|(offered, _)| offered.id == *id && offered.kind != UBLK_KIND)?;
        let (offered, planned) = awaited.remove(at);
        Some((planned?, offered.origin.is_added()))
    }
}

const UBLK_KIND: &str = "ublk";

fn transferred_endpoint(
    kind: HostDeviceKind,
    pieces: &mut AttachmentReader<'_>,
) -> anyhow::Result<TransferredEndpoint> {
    Ok(match kind {
        HostDeviceKind::NbdDevice { number, connections } => {
            ensure!(!connections.is_empty(), "its sockets are missing");
            let mut sockets = Vec::new();
            for NbdDeviceSocketState { received, skip } in connections {
                let socket = pieces.descriptor()?.into();
                sockets.push(QuiescedNbdSocket { socket, bytes: pieces.bytes(received)?.to_vec(), skip });
            }
            TransferredEndpoint::NbdDevice(kernel_client::QuiescedNbdDevice { number, connections: sockets })
        }
        HostDeviceKind::Fuse {
            path,
            by_helper,
            mount: number,
            has_watcher,
            permissions,
            uid,
            gid,
            modified,
            openers,
            file_bytes,
            bytes,
        } => {
            let device = pieces.descriptor()?;
            let watcher = has_watcher.then(|| pieces.descriptor()).transpose()?;
            let messages = pieces.bytes(bytes)?.to_vec();
            let mount = fuse::TransferredMount { path, device, by_helper, number, watcher };
            let owner = FuseFileOwner { permissions, uid, gid };
            let state = FuseFileState { owner, modified, openers, file_bytes, messages };
            TransferredEndpoint::Fuse(fuse::QuiescedFuseFile { mount, state })
        }
    })
}
