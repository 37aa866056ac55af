//! Origin of sockets, devices and open images: the host, the old process of an upgrade, or the
//! client that adds a disk.

use std::{os::fd::OwnedFd, path::Path, time::Duration};

use settings::{ListenAddress, ListenEndpoint};
use storage::PassedFiles;

use crate::{
    listen::{BoundListener, InheritedSockets},
    planned_export::PlannedExport,
    registry::Registry,
};

/// Objects that the old process transfers. The defaults are those of [`FreshStart`].
pub trait StartSource {
    /// Files of images that are already open.
    fn passed(&self) -> Option<&PassedFiles> {
        None
    }

    /// True if clients already use a disk of this name, so that a start waits for it without a
    /// deadline.
    fn has_disk(&self, _name: &str) -> bool {
        false
    }

    /// True if sockets of this endpoint are transferred.
    fn has_server(&self, _endpoint: &ListenEndpoint) -> bool {
        false
    }

    /// Sockets of an NBD server, each returned once; `None` if they must be bound.
    fn listeners(&mut self, _endpoint: &ListenEndpoint) -> anyhow::Result<Option<Vec<BoundListener>>> {
        Ok(None)
    }

    /// Control socket at a path; `None` if it must be bound.
    fn control(&mut self, _path: &Path) -> anyhow::Result<Option<BoundListener>> {
        Ok(None)
    }

    /// Sockets of an HTTP service, `metrics` or `http`; `None` if they must be bound.
    fn http_listeners(
        &mut self,
        _kind: &str,
        _address: &ListenAddress,
    ) -> anyhow::Result<Option<Vec<BoundListener>>> {
        Ok(None)
    }

    /// Adds the sockets of vhost-user-blk exports to the passed sockets, where these exports find
    /// them.
    fn pass_vhost_user_sockets(&mut self, _inherited: &mut InheritedSockets) -> anyhow::Result<()> {
        Ok(())
    }

    /// Socket that a client passed for an export, with its name; returned once.
    fn passed_socket(&mut self, _planned: &PlannedExport) -> Option<(String, OwnedFd)> {
        None
    }

    /// True if an export is opened later, after the old process has released its device.
    fn opens_later(&self, _planned: &PlannedExport, _registry: &Registry) -> bool {
        false
    }

    /// Number of sockets of the service manager; `None` if this process has them.
    fn inherited_sockets(&self) -> Option<usize> {
        None
    }

    /// Watchdog interval of the service manager, if it was passed to the old process.
    fn watchdog(&self) -> Option<Duration> {
        None
    }

    /// Fails if the config lacks an object that the old process serves. Disks for which `is_late`
    /// returns true are opened after this check.
    fn check_config(&self, _registry: &Registry, _is_late: &dyn Fn(&str) -> bool) -> anyhow::Result<()> {
        Ok(())
    }
}

/// Source without an old process: everything is opened and bound anew.
#[derive(Clone, Copy, Debug)]
pub struct FreshStart;

impl StartSource for FreshStart {}
