//! Roll-back of a reconciliation: its completed steps, undone in reverse order.

use std::{os::fd::OwnedFd, rc::Rc, sync::Arc};

use anyhow::{anyhow, bail};
use export::nbd::Removal;
use image::Image;
use settings::{DiskConfig, ListenEndpoint};

use super::{
    Reconciliation,
    placements::{self, MemberPlacement},
};
use crate::{
    change::RegistryChange, planned_export::PlannedExport, registry::RunningDisk,
    running_server::RunningServer,
};

/// Completed step, with the state that undoes it.
pub(crate) enum CompletedStep {
    Configured(Rc<RunningDisk>, Box<DiskConfig>),
    MembersPlaced(Vec<MemberPlacement>),
    GroupAdded(String),
    DiskAdded(String),
    ServerAdded(Rc<RunningServer>),
    /// `deletion` is the notification to send if the export cannot be added again.
    ExportRemoved {
        planned: Box<PlannedExport>,
        id: String,
        deletion: Option<RegistryChange>,
    },
    /// `socket` is the name of the daemon's socket that it uses.
    ExportAdded {
        id: String,
        socket: Option<String>,
    },
}

impl Reconciliation<'_> {
    /// Undoes the completed steps. Returns the first error; all errors are logged.
    pub(crate) async fn roll_back(&mut self) -> Option<anyhow::Error> {
        let mut first = None;
        // Continues after a failed step, to undo as much as possible.
        while let Some(done) = self.completed.pop() {
            if let Err(error) = self.roll_back_step(done).await {
                tracing::error!("a step of a change could not be rolled back: {error:#} (restart weir)");
                first.get_or_insert(error);
            }
        }
        first
    }

    async fn roll_back_step(&self, done: CompletedStep) -> anyhow::Result<()> {
        match done {
            CompletedStep::Configured(running, before) => apply_config(&running, &before).await?,
            CompletedStep::MembersPlaced(before) => {
                placements::apply_all(&before)?;
                // The previous state may violate a capacity measured since; it is restored all the
                // same.
                if let Err(error) = self.registry.check_devices() {
                    tracing::warn!("{error:#}");
                }
            }
            CompletedStep::GroupAdded(name) => self.registry.remove_group(&name)?,
            CompletedStep::DiskAdded(name) => self.registry.remove_incomplete(&name).await?,
            CompletedStep::ServerAdded(serving) => {
                let listening = serving.try_clone_socket();
                self.registry.exports.remove_server(&serving);
                serving.stop().await;
                let socket = match &serving.endpoint {
                    ListenEndpoint::Passed(name) => Some(name.clone()),
                    ListenEndpoint::Address(_) | ListenEndpoint::Inherited => None,
                };
                self.give_back(socket, listening);
            }
            CompletedStep::ExportRemoved { planned, id, deletion: change } => {
                // With its old id, so that clients of the control socket see no change.
                if let Err(error) = planned.add_with_id(self.registry, id).await {
                    change.iter().for_each(|change| self.registry.notify(change));
                    return Err(error);
                }
            }
            // The export was never announced. A client that connected meanwhile may have requests
            // in flight at unresponsive storage; in that case the wait for them ends early.
            CompletedStep::ExportAdded { id, socket } => {
                // Its device may have been removed externally.
                let Ok(export) = self.registry.exports.get(&id) else { return Ok(()) };
                let disk = Arc::clone(&export.disk.disk);
                let listening =
                    export.own_endpoint().and_then(|endpoint| endpoint.vhost_user()?.try_clone_socket());
                drop(export);
                drop(disk.run_unless_unresponsive(self.registry.begin_removal(&id, Removal::Hard)?).await);
                self.give_back(socket, listening);
            }
        }
        Ok(())
    }

    /// Keeps a passed socket for the next attempt: the service manager passes it only once.
    fn give_back(&self, name: Option<String>, socket: Option<OwnedFd>) {
        if let (Some(name), Some(socket), Ok(parameters)) =
            (name, socket, self.registry.exports.endpoint_parameters())
        {
            parameters.inherited.borrow_mut().give_back(&name, socket);
        }
    }
}

/// Applies prefetch settings, cache sizes and error policies. After a failure some are applied.
pub(super) async fn apply_config(running: &RunningDisk, config: &DiskConfig) -> anyhow::Result<()> {
    let caches = config.qcow2.caches;
    running.disk.prefetch().set(config.prefetch)?;
    if caches != running.caches.get() {
        let Image::Qcow2(qcow2) = running.disk.image() else {
            bail!("cache sizes are for qcow2 images, and this one is raw (leave them out)");
        };
        qcow2.set_caches(caches).await.map_err(|error| anyhow!("{error}"))?;
        running.caches.set(caches);
    }
    // After both settings that determine the size of the reservation.
    running.disk.reserve_memory()?;
    running.disk.failures().set_policies(config.on_error);
    Ok(())
}
