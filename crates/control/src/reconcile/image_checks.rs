//! Trial opening of the images of new disks, for `weir check-config`, `weir serve --check` and
//! `weir reload --dry-run`.
//!
//! Images are opened read-only, even if another program writes to them. Never takes a lock that
//! other processes would notice, and never reads a passphrase that can be read only once.

use std::{collections::BTreeMap, fs, io, path::Path};

use anyhow::{Context as _, anyhow};
use image::Image;
use nix::unistd::{AccessFlags, access};
use settings::{DiskWithOrigins, SecretSource};

use super::{PlanDifference, ReconcileReason, Reconciliation, check_secret_files};
use crate::{
    assemble, bitmaps, endpoints, image_opening::ImageOpenAttempt, listen::AddressConflictRule, trial_open,
};

impl Reconciliation<'_> {
    /// Tries the images of all new disks. Returns the indices of those whose storage does not
    /// answer, with the reasons, and all other errors, each with its origin in the config file.
    ///
    /// For a start, groups and disks are added to the registry, which must belong to no daemon.
    ///
    /// # Errors
    /// A group cannot be created.
    pub async fn check_images(
        &mut self,
        difference: &PlanDifference,
        conflict_rule: AddressConflictRule,
    ) -> anyhow::Result<(Vec<(usize, String)>, Vec<anyhow::Error>)> {
        if self.occasion == ReconcileReason::Start {
            // Creates the groups, so that disks are checked with their groups' reservations.
            self.place_members(difference, Vec::new())?;
        }
        let (mut unavailable, mut errors) = (Vec::new(), Vec::new());
        let mut files = match self.occasion {
            ReconcileReason::Start => trial_open::TrialFiles::default(),
            _ => trial_open::TrialFiles::of_running_disks(self.registry),
        };
        let mut attempts = BTreeMap::new();
        for &index in &difference.new_disks {
            let planned = &self.plan.disks[index];
            // All servers concurrently: each may take until the deadline.
            if planned.image.is_remote()
                && let Some(attempt) = self.begin_check(planned, conflict_rule, &mut errors).await
            {
                attempts.insert(index, attempt);
            }
        }
        for &index in &difference.new_disks {
            let planned = &self.plan.disks[index];
            let attempt = match attempts.remove(&index) {
                // Its error was already recorded above.
                None if planned.image.is_remote() => continue,
                None => self.begin_check(planned, conflict_rule, &mut errors).await,
                attempt => attempt,
            };
            let Some(attempt) = attempt else { continue };
            let result = match attempt.outcome().await {
                // A start has no deadline for an image on this host.
                Err(cause) if self.occasion == ReconcileReason::Start && !planned.image.is_remote() => {
                    Err(anyhow!("{cause}: a start waits until it answers (restore its file system)"))
                }
                Err(cause) => {
                    unavailable.push((index, cause.to_string()));
                    continue;
                }
                Ok(Err(error)) => Err(error),
                Ok(Ok(image)) => self.check_image(index, image, conflict_rule, &mut files).await,
            };
            errors.extend(result.with_context(|| planned.origin("image").clone()).err());
        }
        Ok((unavailable, errors))
    }

    async fn begin_check(
        &mut self,
        planned: &DiskWithOrigins,
        conflict_rule: AddressConflictRule,
        errors: &mut Vec<anyhow::Error>,
    ) -> Option<ImageOpenAttempt> {
        let origin = || planned.origin("image").clone();
        if let Some(path) = planned.image.path().filter(|_| !planned.read_only).map(Path::to_owned) {
            // The trial opens read-only, which does not show a missing write permission.
            let writable = move || if path.exists() { access(&path, AccessFlags::W_OK) } else { Ok(()) };
            let writable = reactor::run_blocking(writable).await.map_err(io::Error::from);
            errors.extend(writable.context("cannot be written").with_context(origin).err());
        }
        if !secrets_are_files(planned).await {
            // Only a start waits for a pipe.
            if self.occasion != ReconcileReason::Start {
                errors.extend(check_secret_files(planned).await.err());
            }
            return None;
        }
        let mut config = trial_open::trial_config(planned);
        // An image on another host does not reveal whether the daemon of this config has it open.
        config.force_share |= conflict_rule == AddressConflictRule::Tolerated;
        let opening = async {
            self.registry.check_image(&planned.image).await?;
            self.assembly.open_request(&config).await
        };
        match opening.await.with_context(origin) {
            Ok(request) => {
                let is_awaited = self.is_only_disk();
                Some(ImageOpenAttempt::begin(request, is_awaited))
            }
            Err(error) => {
                errors.push(error);
                None
            }
        }
    }

    async fn check_image(
        &mut self,
        index: usize,
        image: Image,
        conflict_rule: AddressConflictRule,
        files: &mut trial_open::TrialFiles,
    ) -> anyhow::Result<()> {
        let planned = &self.plan.disks[index];
        trial_open::check_marks(planned, &image)?;
        files.add(planned, &image)?;
        let group = planned.group.as_ref().filter(|_| self.occasion == ReconcileReason::Start);
        let group = group.and_then(|group| self.registry.groups.get(group).ok());
        // Checks the limits, reservations and memory of the disk as a side effect.
        let running = assemble::build_disk(&trial_open::trial_config(planned), group.as_ref(), image)?;
        bitmaps::find_bitmaps(&running, &planned.qcow2.bitmaps).await?;
        for export in self.plan.exports.iter().filter(|export| export.disk == index) {
            endpoints::check_size(&running.disk, &export.target)?;
        }
        if self.occasion == ReconcileReason::Start {
            self.registry.add_disk(running)?;
        }
        // A reload of a disk with handover takes no lock, whichever process has it.
        let takes_lock = self.occasion == ReconcileReason::Start || !planned.handover;
        let path = planned.image.path().filter(|_| !planned.force_share && takes_lock);
        if let Some(path) = path.map(Path::to_owned) {
            let read_only = planned.read_only;
            let in_use = reactor::run_blocking(move || storage::find_user(&path, read_only)).await;
            // With handover a start takes no lock: a weir process that has it may be about to
            // release it.
            let conflicts = |holder: Option<&str>| {
                conflict_rule == AddressConflictRule::Rejected && !planned.handover
                    || holder.is_some_and(|name| !name.starts_with("weir"))
            };
            if let Some(error) = in_use.filter(|error| conflicts(error.holder.as_deref())) {
                return Err(error.into());
            }
        }
        Ok(())
    }
}

/// False if a passphrase source can be read only once, by the daemon.
async fn secrets_are_files(planned: &DiskWithOrigins) -> bool {
    let sources = planned.qcow2.secrets.clone();
    if sources.is_empty() {
        return true;
    }
    let is_special = |path: &Path| fs::metadata(path).is_ok_and(|file| !file.is_file());
    let is_regular =
        move |source: &SecretSource| matches!(source, SecretSource::File(path) if !is_special(path));
    reactor::run_blocking(move || sources.iter().all(is_regular)).await
}
