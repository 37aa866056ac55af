//! Opening of the images of new disks, before the running state changes.
//!
//! A start opens local images one after another, in the order of the plan, so that of two disks
//! with one image always the second is rejected. All other images are opened concurrently; a disk
//! whose storage does not answer before the deadline of [`ImageOpenAttempt`] becomes unavailable
//! instead of failing the change, unless a client adds it.

use std::fs;

use anyhow::{Context as _, anyhow, ensure};
use image::Image;
use settings::{DiskWithOrigins, SecretSource};

use super::{PlanDifference, ReconcileReason, Reconciliation};
use crate::{
    image_opening::{ImageOpenAttempt, UnavailableImage, UnavailableImageState},
    reconcile::source::StartSource,
};

impl Reconciliation<'_> {
    /// Opens the images of the new disks, each with the index of its disk in the plan. Changes
    /// nothing else: dropping the images undoes it.
    ///
    /// # Errors
    /// The first image that cannot be opened, with its origin in the config file.
    pub async fn open(
        &mut self,
        difference: &PlanDifference,
        source: &dyn StartSource,
    ) -> anyhow::Result<Vec<(usize, Image)>> {
        self.check_sandbox(difference)?;
        let mut attempts = Vec::new();
        let mut images = Vec::new();
        for &index in &difference.new_disks {
            let planned = &self.plan.disks[index];
            let checked = self.registry.check_image(&planned.image).await;
            self.with_image_origin(planned, checked)?;
            let request = if self.occasion.is_of_client() {
                self.assembly.open_request_of_client(planned, self.registry).await?
            } else {
                if self.occasion != ReconcileReason::Start {
                    check_secret_files(planned).await?;
                }
                let request = self.assembly.open_request(planned).await;
                self.with_image_origin(planned, request)?
            };
            if self.occasion == ReconcileReason::Start && !planned.image.is_remote() {
                let opened = request.open().await;
                images.push((index, self.with_holder(planned, opened, &images)?));
            } else {
                let is_awaited = self.has_no_deadline(planned, source);
                attempts.push((index, ImageOpenAttempt::begin(request, is_awaited)));
            }
        }
        for (index, attempt) in attempts {
            let planned = &self.plan.disks[index];
            match attempt.outcome().await {
                Ok(opened) => images.push((index, self.with_holder(planned, opened, &images)?)),
                Err(image) if self.occasion.is_of_client() => return Err(self.unopened(planned, image)),
                Err(image) => self.unavailable.push((planned.name.clone(), image)),
            }
        }
        // Listed in the order of the plan, independent of the order of completion.
        images.sort_unstable_by_key(|(index, _)| *index);
        Ok(images)
    }

    /// True for disks without a deadline: disks that clients of the old process use, the only disk
    /// of a command line, and disks of a client that are in no file, whose keys set the timeouts.
    fn has_no_deadline(&self, planned: &DiskWithOrigins, source: &dyn StartSource) -> bool {
        match self.occasion {
            ReconcileReason::Start => self.is_only_disk() || source.has_disk(&planned.name),
            ReconcileReason::Add | ReconcileReason::Transfer => planned.image.path().is_none(),
            ReconcileReason::Reload | ReconcileReason::Retry => false,
        }
    }

    /// Error for a client, which retries by itself.
    fn unopened(&self, planned: &DiskWithOrigins, image: UnavailableImage) -> anyhow::Error {
        match image.state {
            UnavailableImageState::Failed(error) => self.registry.with_holder_if_lock_error(error, []),
            UnavailableImageState::Opening(_) => {
                anyhow!("{}: {image} (restore its file system, and add the disk again)", planned.image)
            }
        }
    }

    pub(super) fn is_only_disk(&self) -> bool {
        self.plan.disks.len() == 1 && !self.is_of_config_file()
    }

    /// Adds the disk that has the image open to an error, including disks that are opened together
    /// with it.
    fn with_holder(
        &self,
        planned: &DiskWithOrigins,
        opened: anyhow::Result<Image>,
        images: &[(usize, Image)],
    ) -> anyhow::Result<Image> {
        let images = images.iter().map(|(index, image)| (&*self.plan.disks[*index].name, image));
        let opened = opened.map_err(|error| self.registry.with_holder_if_lock_error(error, images));
        let opened = self.with_image_origin(planned, opened);
        match self.registry.cluster().and_then(|cluster| cluster.moved_to(&planned.name)) {
            // A lock held by the migration's target is the likely cause.
            Some(host) => opened.with_context(|| format!("disk {} has moved to host {host}", planned.name)),
            None => opened,
        }
    }

    /// Adds the origin of the image in the config file. On a command line the origin adds nothing.
    pub(super) fn with_image_origin<T>(
        &self,
        planned: &DiskWithOrigins,
        result: anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        match self.is_of_config_file() {
            true => result.with_context(|| planned.origin("image").clone()),
            false => result,
        }
    }
}

/// Fails if a passphrase comes from a pipe: a reload that waits for one blocks all later reloads.
pub(crate) async fn check_secret_files(disk: &DiskWithOrigins) -> anyhow::Result<()> {
    for source in &disk.qcow2.secrets {
        let SecretSource::File(path) = source else { continue };
        // A missing file passes here; the reader reports it.
        let of_call = path.clone();
        let metadata = reactor::run_blocking(move || fs::metadata(of_call)).await;
        let is_file = metadata.map_or(true, |metadata| metadata.is_file());
        ensure!(
            is_file,
            "disk {}: secret-file: {} is no regular file, and only a start waits for a pipe (use a \
             file, or restart weir)",
            disk.name,
            path.display()
        );
    }
    Ok(())
}
