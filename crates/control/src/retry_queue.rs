//! Unavailable disks: disks of the config whose storage did not answer at the start. They are
//! retried in the background.
//!
//! ```text
//!   start ─► not open after eight seconds ─► unavailable ─► the start continues without it
//!                                            │
//!                       open ─► listed with its exports, by the config of that moment
//!                         └ fails ─► reported, retried after ten seconds
//! ```
//!
//! A disk is listed while this task holds the lock ([`structure_lock`](super::structure_lock))
//! exclusively, like a reload. A reload includes unavailable disks: it updates their config, and
//! abandons those that the file no longer contains. A client that removes an unavailable disk
//! abandons it as well. The name of the disk, and the names and endpoints of its exports, stay
//! reserved.

#[cfg(test)]
mod tests;

use std::rc::{Rc, Weak};

use anyhow::{anyhow, ensure};
use api::UnavailableDisk;
use image::Image;
use policy::time::Duration;
use settings::{DesiredState, DiskWithOrigins};
use storage::rate::RateBudgets;

use super::{
    image_opening::{ImageOpenRequest, ImageOpenTask, UnavailableImage, UnavailableImageState},
    planned_export::{self, PlannedEndpoint, PlannedExport},
    reconcile::{PlanDifference, ReconcileReason, Reconciliation, source::FreshStart},
    registry::{Registry, RunningEndpoint, RunningExport},
    unavailable_disk::UnavailableDiskEntry,
};
use crate::events::{Kind, NewEvent};

/// Interval between two attempts to open an image.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);

impl Registry {
    /// Continues without a disk of the plan and retries it in the background.
    pub(crate) fn retry_later(self: &Rc<Self>, name: &str, plan: Rc<DesiredState>, image: UnavailableImage) {
        let UnavailableImage { request: opening, since, state } = image;
        let entry = Rc::new(UnavailableDiskEntry::new(name, since, plan));
        let first = match state {
            UnavailableImageState::Opening(opened) => Some(opened),
            UnavailableImageState::Failed(error) => {
                entry.reported_reason.replace(Some(format!("{error:#}")));
                None
            }
        };
        self.start_retry(name, entry, (opening, first));
    }

    fn start_retry(
        self: &Rc<Self>,
        name: &str,
        entry: Rc<UnavailableDiskEntry>,
        attempt: (ImageOpenRequest, Option<ImageOpenTask>),
    ) {
        let task = open_with_retries(Rc::downgrade(self), name.to_owned(), Rc::clone(&entry), attempt);
        entry.task.replace(Some(reactor::spawn_joinable(task)));
        if let Some(before) = self.disks.unavailable.borrow_mut().insert(name.to_owned(), entry) {
            before.cancel();
        }
    }

    /// Reports the disks that the start continues without.
    pub fn report_unavailable_disks(&self) {
        let all: Vec<_> = self.disks.unavailable.borrow().keys().cloned().collect();
        all.iter().for_each(|name| self.report_unavailable_disk(name));
    }

    pub(super) fn report_unavailable_disk(&self, name: &str) {
        let Some(entry) = self.disks.unavailable.borrow().get(name).cloned() else { return };
        let why = entry.reported_reason.borrow().clone();
        let image = entry.config().image.to_string();
        let message = match &why {
            None => format!("disk {name}: {image} does not answer; everything else is served meanwhile"),
            Some(why) => {
                format!("disk {name}: cannot be opened, retrying every {} s: {why}", RETRY_INTERVAL.as_secs())
            }
        };
        let event = NewEvent::new(Kind::DiskUnavailable, message).of_disk(name);
        self.events.record(event.with("image", image).with("reason", why));
    }

    /// True if this attempt is still the current one for the name.
    fn is_current_attempt(&self, name: &str, entry: &Rc<UnavailableDiskEntry>) -> bool {
        self.disks.unavailable.borrow().get(name).is_some_and(|known| Rc::ptr_eq(known, entry))
    }

    /// Lists a disk whose image is now open, with its exports. Atomic.
    async fn list_available(
        self: &Rc<Self>,
        name: &str,
        entry: &Rc<UnavailableDiskEntry>,
        image: Image,
    ) -> anyhow::Result<()> {
        ensure!(!self.lifecycle.is_upgrading.get(), "an upgrade is in progress");
        let (planned, plan) = (entry.config(), entry.plan());
        let difference = PlanDifference::of_disk(&plan, name);
        // Without a difference the config no longer contains the disk; dropping the image closes
        // it.
        let images = difference.new_disks.first().map(|&index| (index, image)).into_iter().collect();
        let _arrival = self.begin_adding(name)?;
        // Before `apply`, which checks that the name is free.
        self.disks.unavailable.borrow_mut().remove(name);
        let mut work = Reconciliation::new(ReconcileReason::Retry, self, &plan, None, RateBudgets::default());
        if let Err(error) = work.apply(&difference, images, &mut FreshStart).await {
            self.requeue_unavailable(name, entry, &mut work).await;
            return Err(error);
        }
        // Booked after listing, with failure tolerated: the disk was part of a start that
        // succeeded.
        self.book_later(name, [planned.settings.iops_reservation, planned.settings.bps_reservation]);
        if let Some(cluster) = self.cluster() {
            cluster.record_lowered_reservations(&**self);
        }
        tracing::info!(disk = name, after_s = entry.age(reactor::now()).as_secs(), "its image is open now");
        Ok(())
    }

    /// Rolls back the steps of a failed retry, and returns the disk to the retry queue. No event
    /// reports these steps: the disk was never announced.
    async fn requeue_unavailable(
        self: &Rc<Self>,
        name: &str,
        entry: &Rc<UnavailableDiskEntry>,
        work: &mut Reconciliation<'_>,
    ) {
        let position = |export: Rc<RunningExport>| match &export.endpoint {
            RunningEndpoint::Nbd(serving, number) => Some((Rc::clone(serving), export.name.clone(), *number)),
            RunningEndpoint::Separate(..) => None,
        };
        let positions: Vec<_> = self.exports.of_disk(name).into_iter().filter_map(position).collect();
        // First, so that the server keeps the export's position for the next attempt.
        positions.iter().for_each(|(serving, name, number)| serving.server.reserve_again(name, *number));
        work.roll_back().await;
        if self.disks.get(name).is_ok() {
            tracing::error!(
                "disk {name}: could not be added completely, and its remains could not be removed"
            );
            positions.iter().for_each(|(serving, name, _)| serving.server.release_reserved(name));
            return;
        }
        self.disks.unavailable.borrow_mut().insert(name.to_owned(), Rc::clone(entry));
    }

    /// Configs of all unavailable disks.
    pub(super) fn unavailable_configs(&self) -> Vec<DiskWithOrigins> {
        self.disks.unavailable.borrow().values().map(|entry| entry.config()).collect()
    }

    /// Applies a new config to an unavailable disk. If it must be opened with other options, the
    /// new attempt replaces the running one.
    pub(super) fn replan_unavailable(
        self: &Rc<Self>,
        name: &str,
        plan: Rc<DesiredState>,
        attempt: Option<(ImageOpenRequest, Option<ImageOpenTask>)>,
    ) {
        let Some(entry) = self.disks.unavailable.borrow().get(name).cloned() else { return };
        // Positions of exports that the new plan lacks are released before the plan is replaced.
        let planned = PlannedExport::of_disk(&plan, name);
        self.release_reserved_names(name, &entry, |old| !planned.contains(old));
        match attempt {
            None => entry.replace_config(plan),
            Some(attempt) => {
                self.start_retry(name, Rc::new(UnavailableDiskEntry::new(name, entry.since, plan)), attempt);
            }
        }
    }

    /// Abandons an unavailable disk. Returns false if there is none with this name.
    pub(crate) fn abandon_unavailable(&self, name: &str) -> bool {
        let Some(entry) = self.disks.unavailable.borrow_mut().remove(name) else { return false };
        entry.cancel();
        self.release_reserved_names(name, &entry, |_| true);
        true
    }

    /// Releases the positions that NBD servers hold for exports which are no longer planned.
    fn release_reserved_names(
        &self,
        name: &str,
        entry: &UnavailableDiskEntry,
        is_gone: impl Fn(&PlannedExport) -> bool,
    ) {
        for export in PlannedExport::of_disk(&entry.plan(), name).iter().filter(|export| is_gone(export)) {
            if let PlannedEndpoint::Nbd { endpoint, name, .. } = &export.endpoint
                && let Some(serving) = planned_export::find_server(self, endpoint)
            {
                serving.server.release_reserved(name);
            }
        }
    }

    /// Unavailable disks, for `weir status`.
    pub(super) fn unavailable_disks(&self) -> Vec<UnavailableDisk> {
        let now = reactor::now();
        self.disks.unavailable.borrow().values().map(|entry| entry.to_status(now)).collect()
    }
}

/// Opens the image, retrying as long as necessary, and lists its disk.
async fn open_with_retries(
    registry: Weak<Registry>,
    name: String,
    entry: Rc<UnavailableDiskEntry>,
    (opening, mut first): (ImageOpenRequest, Option<ImageOpenTask>),
) {
    loop {
        // The migration's target may hold the disk although the lock of this host's image is free
        // again: a dead host loses its lock.
        let moved = registry.upgrade().and_then(|registry| registry.cluster()?.moved_to(&name));
        let opened = match first.take() {
            _ if moved.is_some() => Err(anyhow!("the disk has moved to host {}", moved.unwrap_or_default())),
            Some(first) => first.await,
            None => opening.clone().open().await,
        };
        // Weak until here: a task that waits for storage must not keep the registry alive.
        let Some(registry) = registry.upgrade() else { return };
        // The lock is released before the sleep below; a reload may run between two attempts.
        let listed = {
            let _guard = registry.lifecycle.structure_lock.lock().await;
            if registry.lifecycle.is_ending.get() || !registry.is_current_attempt(&name, &entry) {
                return;
            }
            match opened {
                Ok(image) => registry.list_available(&name, &entry, image).await,
                Err(error) => Err(error),
            }
        };
        let Err(error) = listed else { return };
        if !registry.is_current_attempt(&name, &entry) {
            return;
        }
        let why = format!("{error:#}");
        // Reported once per reason, not once per attempt.
        if entry.reported_reason.borrow().as_ref() != Some(&why) {
            entry.reported_reason.replace(Some(why));
            registry.report_unavailable_disk(&name);
        }
        drop(registry);
        reactor::sleep_until(reactor::now() + RETRY_INTERVAL).await;
    }
}
