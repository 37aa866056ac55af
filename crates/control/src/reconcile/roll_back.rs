//! Roll-back of a reconciliation: its completed steps, undone in reverse order.

use std::{os::fd::OwnedFd, rc::Rc, sync::Arc};

use export::nbd::Removal;
use settings::{DiskConfig, ListenEndpoint};

use super::{
    Reconciliation,
    placements::{self, MemberPlacement},
};
use crate::{
    change::RegistryChange,
    planned_export::PlannedExport,
    registry::{RunningDisk, RunningExport},
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
        export: Rc<RunningExport>,
        socket: Option<String>,
    },
}

impl Reconciliation<'_> {
    /// Undoes the completed steps. Returns the first error; all errors are logged.
    pub(crate) async fn roll_back(&mut self) -> Option<anyhow::Error> {
        // All removals begin first: each ends when the last client has disconnected.
        for done in &self.completed {
            if let CompletedStep::ExportAdded { export, .. } = done
                && self.is_listed(export)
            {
                drop(self.registry.begin_removal(&export.id, Removal::Hard));
            }
        }
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
                // The object of a client is removed next, which concerns no other object.
                if self.occasion.is_of_client() {
                    return Ok(());
                }
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
                self.give_back(socket.zip(listening));
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
            CompletedStep::ExportAdded { export, socket } => {
                // Its device may have been removed externally, and its id may be another export's.
                if !self.is_listed(&export) {
                    return Ok(());
                }
                let (disk, listening) = (Arc::clone(&export.disk.disk), export.try_clone_socket());
                let removal = self.registry.begin_removal(&export.id, Removal::Hard)?;
                drop(export);
                drop(disk.run_unless_unresponsive(removal).await);
                self.give_back(socket.zip(listening));
            }
        }
        Ok(())
    }

    fn is_listed(&self, export: &Rc<RunningExport>) -> bool {
        self.registry.exports.get(&export.id).is_ok_and(|known| Rc::ptr_eq(&known, export))
    }

    /// Keeps a passed socket, with its name, for the next export or server: the service manager
    /// passes it only once.
    pub(super) fn give_back(&self, socket: Option<(impl AsRef<str>, OwnedFd)>) {
        if let (Some((name, socket)), Ok(parameters)) = (socket, self.registry.exports.endpoint_parameters())
        {
            parameters.inherited.borrow_mut().give_back(name.as_ref(), socket);
        }
    }
}

/// Applies prefetch settings, cache sizes and error policies. After a failure some are applied.
pub(super) async fn apply_config(running: &RunningDisk, config: &DiskConfig) -> anyhow::Result<()> {
    let caches = config.qcow2.caches;
    running.disk.prefetch().set(config.prefetch)?;
    if caches != running.caches.get() {
        running.set_caches(caches).await?;
    }
    // After both settings that determine the size of the reservation.
    running.disk.reserve_memory()?;
    running.disk.failures().set_policies(config.on_error);
    Ok(())
}
