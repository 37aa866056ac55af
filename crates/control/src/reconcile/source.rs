//! Where a start takes sockets, devices and open images from: the host, or an old process that
//! hands them over in an upgrade.

use std::{path::Path, time::Duration};

use settings::{ListenAddress, ListenEndpoint};
use storage::PassedFiles;

use crate::{
    listen::{Inherited, Listener},
    registry::Registry,
    wanted::Wanted,
};

/// What an old process hands over. The defaults are those of [`Fresh`].
pub trait Source {
    /// Files of images that are open already.
    fn passed(&self) -> Option<&PassedFiles> {
        None
    }

    /// True if clients already use a disk of this name, so that a start waits for it without a
    /// deadline.
    fn has_disk(&self, _name: &str) -> bool {
        false
    }

    /// True if sockets of this endpoint are handed over.
    fn has_server(&self, _endpoint: &ListenEndpoint) -> bool {
        false
    }

    /// Sockets of an NBD server, each time once; `None` if they are to be bound.
    fn listeners(&mut self, _endpoint: &ListenEndpoint) -> anyhow::Result<Option<Vec<Listener>>> {
        Ok(None)
    }

    /// The control socket at a path; `None` if it is to be bound.
    fn control(&mut self, _path: &Path) -> anyhow::Result<Option<Listener>> {
        Ok(None)
    }

    /// Sockets of an HTTP service, `metrics` or `http`; `None` if they are to be bound.
    fn told(&mut self, _what: &str, _address: &ListenAddress) -> anyhow::Result<Option<Vec<Listener>>> {
        Ok(None)
    }

    /// Puts the sockets of vhost-user-blk exports where these exports look for passed sockets.
    fn pass_machines(&mut self, _inherited: &mut Inherited) -> anyhow::Result<()> {
        Ok(())
    }

    /// True if an export is opened later, when the old process has released its device.
    fn puts_off(&self, _wanted: &Wanted, _registry: &Registry) -> bool {
        false
    }

    /// Number of sockets of the service manager; `None` if this process has them.
    fn inherited(&self) -> Option<usize> {
        None
    }

    /// Watchdog interval of the service manager, if it was passed to the old process.
    fn watchdog(&self) -> Option<Duration> {
        None
    }

    /// Fails if the config lacks something that the old process serves. Disks for which `is_late`
    /// returns true are opened after this check.
    fn check_config(&self, _registry: &Registry, _is_late: &dyn Fn(&str) -> bool) -> anyhow::Result<()> {
        Ok(())
    }
}

/// No old process: everything is opened and bound anew.
#[derive(Clone, Copy, Debug)]
pub struct Fresh;

impl Source for Fresh {}
