//! Destination of a load: a disk in this process, or a server's. An enum, so that a request needs
//! no dynamic dispatch.

use std::{rc::Rc, sync::Arc};

use block::disk::Disk;
use export::{nbd, vhost_user_blk};
use policy::{request::Direction, throttle::RequestCost};
use reactor::{buffer::IoBuffer, error::Result};
use storage::Durability;

#[derive(Clone, Debug)]
pub(crate) enum LoadTarget {
    Disk(Arc<Disk>),
    Nbd(Rc<nbd::client::NbdClient>),
    /// Determines length and content of requests itself.
    VhostUser(Rc<vhost_user_blk::client::VhostUserClient>),
}

impl From<Arc<Disk>> for LoadTarget {
    fn from(disk: Arc<Disk>) -> Self {
        Self::Disk(disk)
    }
}

impl LoadTarget {
    pub(super) async fn read(&self, offset: u64, length: usize) -> Result<()> {
        match self {
            Self::Disk(disk) => {
                // The benchmark's disk has no limits, but the admission is part of the measured
                // path.
                let pass = disk.admit(Direction::Read, RequestCost::one(length as u64)).await;
                disk.read(pass, offset, length).await.map(drop)
            }
            Self::Nbd(client) => client.read(offset, length).await.map(drop),
            Self::VhostUser(client) => client.read(offset).await,
        }
    }

    pub(super) async fn write(&self, offset: u64, data: IoBuffer) -> Result<()> {
        match self {
            Self::Disk(disk) => {
                let pass = disk.admit(Direction::Write, RequestCost::one(data.len() as u64)).await;
                disk.write(pass, offset, data.into(), Durability::Cached).await
            }
            Self::Nbd(client) => client.write(offset, data.into(), false).await,
            Self::VhostUser(client) => client.write(offset).await,
        }
    }

    pub(crate) async fn flush(&self) -> Result<()> {
        match self {
            Self::Disk(disk) => disk.flush().await,
            Self::Nbd(client) => client.flush().await,
            Self::VhostUser(client) => client.flush().await,
        }
    }

    /// True for a server's disk.
    pub(super) fn is_remote(&self) -> bool {
        !matches!(self, Self::Disk(_))
    }

    /// True for servers and Ceph clusters, which may become unresponsive.
    pub(super) fn may_never_answer(&self) -> bool {
        match self {
            Self::Disk(disk) => disk.image().storage().is_remote(),
            Self::Nbd(_) | Self::VhostUser(_) => true,
        }
    }

    /// Reason of the last error, if known.
    pub(crate) fn fault(&self) -> Option<String> {
        match self {
            Self::Disk(_) => None,
            Self::Nbd(client) => client.fault(),
            Self::VhostUser(client) => client.fault(),
        }
    }
}
