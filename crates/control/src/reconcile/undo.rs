//! Roll-back of a reconciliation: its completed steps, undone in reverse order.

use std::{rc::Rc, sync::Arc};

use anyhow::{anyhow, bail};
use export::nbd::Removal;
use image::Image;
use settings::DiskConfig;

use super::{
    Reconciliation,
    seats::{self, Seat},
};
use crate::{change::Change, registry::RunningDisk, serving::Serving, wanted::Wanted};

/// Completed step, with what undoing it needs.
pub(crate) enum Done {
    Configured(Rc<RunningDisk>, Box<DiskConfig>),
    Seated(Vec<Seat>),
    GroupAdded(String),
    DiskAdded(String),
    ServerAdded(Rc<Serving>),
    /// `gone` is the change to announce if the export cannot be added again.
    ExportRemoved {
        wanted: Box<Wanted>,
        id: String,
        gone: Option<Change>,
    },
    ExportAdded(String),
}

impl Reconciliation<'_> {
    pub(crate) async fn undo(&mut self) {
        // Continues after a failed step, to undo as much as possible.
        while let Some(done) = self.done.pop() {
            if let Err(error) = self.undo_one(done).await {
                tracing::error!("a step of a reload could not be rolled back: {error:#} (restart weir)");
            }
        }
    }

    async fn undo_one(&self, done: Done) -> anyhow::Result<()> {
        match done {
            Done::Configured(running, before) => configure(&running, &before).await?,
            Done::Seated(before) => {
                seats::put(&before)?;
                // The previous state may violate a capacity measured since; it is restored all the
                // same.
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
                // With its old id, so that clients of the control socket see no change.
                if let Err(error) = wanted.add_by(self.registry, id).await {
                    gone.iter().for_each(|gone| self.registry.tell(gone));
                    return Err(error);
                }
            }
            // Nobody was told of it. A client that has connected meanwhile may have requests at
            // storage that does not answer.
            Done::ExportAdded(id) => {
                let disk = Arc::clone(&self.registry.exports.get(&id)?.disk.disk);
                drop(disk.run_unless_unresponsive(self.registry.removal(&id, Removal::Hard)?).await);
            }
        }
        Ok(())
    }
}

/// Applies all settings of the disk alone. A failure leaves some of them applied.
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
    // After both settings that determine the size of the reservation.
    running.disk.reserve_memory()?;
    running.disk.failures().set_policies(wanted.on_error);
    Ok(())
}
