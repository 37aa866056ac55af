//! An export that runs, and how clients reach it: at a server of NBD, by its name there, or at a
//! door of its own. Knows nothing of other exports: which names are taken decides the
//! [registry](super::registry). Belongs to the main thread.

use std::{
    cell::Cell,
    path::{self, Path, PathBuf},
    rc::Rc,
    sync::Arc,
};

use anyhow::ensure;
use export::nbd::{NotRemoved, Removal};
use image::qcow2::bitmap::BitmapView;
use policy::access::AccessRules;

use super::{doors::Entrance, running::RunningDisk, serving::Serving};
use crate::users::Users;

/// An export of a disk.
pub struct RunningExport {
    /// Its name.
    pub id: String,
    /// The name clients ask for; unique at its server.
    pub(crate) name: String,
    /// Its disk.
    pub disk: Rc<RunningDisk>,
    /// Its endpoint.
    pub door: Door,
    /// What was said of a door of its own.
    pub said: Option<settings::ExportTarget>,
    /// What it was made of, over NBD.
    pub(crate) new: Option<NewExport>,
    pub(crate) read_only: bool,
    /// By a client of the control socket: no config has it.
    pub(crate) added: Cell<bool>,
    pub(super) ending: Cell<bool>,
}

/// How clients reach an export.
pub enum Door {
    /// By its name, and this number, at a server.
    Nbd(Rc<Serving>, usize),
    /// At one of its own.
    Own(Rc<Entrance>),
}

impl Door {
    /// As QEMU's `BlockExportType` calls it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Nbd(..) => "nbd",
            Self::Own(entrance) => entrance.kind(),
        }
    }

    pub(crate) fn address(&self) -> String {
        match self {
            Self::Nbd(serving, _) => serving.address(),
            Self::Own(entrance) => entrance.address().to_owned(),
        }
    }

    fn connections(&self) -> usize {
        match self {
            Self::Nbd(serving, number) => serving.server.connections_of(*number),
            Self::Own(entrance) => entrance.server.connections(),
        }
    }

    /// Of a device, whoever asks for [`Removal::Safe`] has looked who uses it: that takes time.
    pub(super) fn remove(&self, removal: Removal) -> Result<(), NotRemoved> {
        match self {
            Self::Nbd(serving, number) => serving.server.remove(*number, removal),
            Self::Own(entrance) => match (removal, entrance.server.connections()) {
                (Removal::IfUnused, connections @ 1..) if entrance.device().is_none() => {
                    Err(NotRemoved::InUse { connections })
                }
                _ => {
                    entrance.close();
                    Ok(())
                }
            },
        }
    }

    pub(super) async fn wait_until_unused(&self) {
        match self {
            Self::Nbd(serving, number) => serving.server.wait_until_unused(*number).await,
            Self::Own(entrance) => entrance.stop().await,
        }
    }
}

impl RunningExport {
    /// Its door, if that is its own.
    pub(crate) fn entrance(&self) -> Option<&Rc<Entrance>> {
        match &self.door {
            Door::Own(entrance) => Some(entrance),
            Door::Nbd(..) => None,
        }
    }

    /// Absolute path of the endpoint, where that is a socket or a file of this export alone.
    pub(crate) fn own_path(&self) -> Option<PathBuf> {
        path::absolute(self.said.as_ref()?.path()?).ok()
    }

    pub(crate) fn connections(&self) -> usize {
        self.door.connections()
    }

    /// What the disk's length is to be a multiple of, as long as this is there.
    pub(crate) fn block_bytes(&self) -> Option<u32> {
        match &self.door {
            Door::Nbd(..) => None,
            Door::Own(entrance) => entrance.block_bytes(),
        }
    }

    /// Who is connected, for people.
    pub(crate) fn clients(&self) -> String {
        match &self.door {
            Door::Nbd(serving, number) => serving.server.clients_of(*number),
            Door::Own(entrance) => match entrance.server.counters().front_end {
                Some(process) => process.to_string(),
                // It is in another container.
                None => "a machine".to_owned(),
            },
        }
    }

    /// Fails where a client is connected, or a device of this host is mounted, held or open.
    pub(crate) async fn check_unused(&self) -> anyhow::Result<()> {
        let (id, disk) = (&self.id, self.disk.disk.name());
        let device = match &self.door {
            Door::Own(entrance) => entrance.device().map(Path::to_owned),
            Door::Nbd(..) => None,
        };
        let Some(device) = device else {
            ensure!(
                self.connections() == 0,
                "export {id} of disk {disk}: in use: {} (let it go first)",
                self.clients()
            );
            return Ok(());
        };
        let users = reactor::run_blocking(move || Users::of(&device).with_processes().with_claims()).await;
        ensure!(users.is_empty(), "export {id} of disk {disk}: in use: {users} (let it go first)");
        Ok(())
    }

    /// It was removed, and its last clients are on their way out.
    pub(crate) fn is_ending(&self) -> bool {
        self.ending.get()
    }
}

/// An export to be added.
#[derive(Clone, Debug)]
pub struct NewExport {
    pub(crate) id: String,
    pub(crate) name: String,
    /// A line for people; may be empty.
    pub(crate) description: String,
    pub(crate) access: AccessRules,
    pub(crate) disk: String,
    pub(crate) read_only: bool,
    pub(crate) bitmaps: Arc<[BitmapView]>,
}
