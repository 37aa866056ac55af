//! Roll-back: what a reconciliation has done, and how each step is undone, the last first.

use std::rc::Rc;

use anyhow::{anyhow, bail};
use export::nbd::Removal;
use image::Image;
use settings::DiskConfig;

use super::{
    Reconciliation,
    seats::{self, Seat},
};
use crate::{change::Change, registry::RunningDisk, serving::Serving, wanted::Wanted};

/// Something that was done, with what it takes to undo it.
pub(crate) enum Done {
    Configured(Rc<RunningDisk>, Box<DiskConfig>),
    Seated(Vec<Seat>),
    GroupAdded(String),
    DiskAdded(String),
    ServerAdded(Rc<Serving>),
    /// With what is to be told of it once it is not put back.
    ExportRemoved {
        wanted: Box<Wanted>,
        id: String,
        gone: Option<Change>,
    },
    ExportAdded(String),
}

impl Reconciliation<'_> {
    pub(crate) async fn undo(&mut self) {
        while let Some(done) = self.done.pop() {
            if let Err(error) = self.undo_one(done).await {
                tracing::error!("what a reload had changed could not be put back: {error:#} (restart weir)");
            }
        }
    }

    async fn undo_one(&self, done: Done) -> anyhow::Result<()> {
        match done {
            Done::Configured(running, before) => configure(&running, &before).await?,
            Done::Seated(before) => {
                seats::put(&before)?;
                if let Err(error) = self.registry.check_devices() {
                    tracing::warn!("{error:#}");
                }
            }
            Done::GroupAdded(name) => self.registry.remove_group(&name)?,
            Done::DiskAdded(name) => self.registry.take_back(&name).await?,
            Done::ServerAdded(serving) => {
                self.registry.exports.remove_server(&serving);
                serving.stop().await;
            }
            Done::ExportRemoved { wanted, id, gone } => {
                if let Err(error) = wanted.add_by(self.registry, id).await {
                    gone.iter().for_each(|gone| self.registry.tell(gone));
                    return Err(error);
                }
            }
            // Nobody was told of it.
            Done::ExportAdded(id) => drop(self.registry.removal(&id, Removal::Hard)?.await),
        }
        Ok(())
    }
}

/// Puts all in force. Where it fails, some is.
pub(super) async fn configure(running: &RunningDisk, wanted: &DiskConfig) -> anyhow::Result<()> {
    let caches = wanted.qcow2.caches;
    running.disk.prefetch().set(wanted.prefetch)?;
    if caches != running.caches.get() {
        let Image::Qcow2(qcow2) = running.disk.image() else {
            bail!("cache sizes are for qcow2 images, and this one is raw (leave them out)");
        };
        qcow2.set_caches(caches).await.map_err(|error| anyhow!("{error}"))?;
        running.caches.set(caches);
    }
    running.disk.reserve_memory()?;
    running.disk.failures().set_policies(wanted.on_error);
    Ok(())
}
