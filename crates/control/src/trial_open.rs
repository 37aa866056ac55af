//! Trial opening of images for a dry run, without side effects: the image is opened read-only and
//! without locks, so that its current user is not affected. Errors that a real start would get from
//! locks, or from marks in the image, are checked separately.

use block::disk::Disk;
use image::Image;
use storage::{OpenError, StorageIdentity};

use super::registry::{Registry, image_holder::held_error};

/// Variant of a disk's config for a trial opening: read-only and unlocked.
pub(crate) fn trial_config(planned: &settings::DiskWithOrigins) -> settings::DiskWithOrigins {
    let mut config = planned.clone();
    config.read_only = true;
    // Locks exist for files only; an NBD server or Ceph image is opened read-only in any case.
    config.force_share = planned.image.path().is_some();
    config.handover = false;
    config
}

/// Fails if marks in the image forbid writing, unless the disk is read-only.
pub(crate) fn check_marks(planned: &settings::DiskWithOrigins, image: &Image) -> Result<(), OpenError> {
    if planned.read_only { Ok(()) } else { image.check_marks(&planned.image.to_string()) }
}

/// Files that disks would have open.
#[derive(Debug, Default)]
pub(crate) struct TrialFiles(Vec<TrialFile>);

#[derive(Debug)]
struct TrialFile {
    disk: String,
    /// Identity of the file, independent of its name.
    identity: String,
    is_written: bool,
}

impl TrialFiles {
    /// Files of the running disks.
    pub(crate) fn of_running_disks(registry: &Registry) -> Self {
        let mut files = Self::default();
        for running in registry.disks.all() {
            let disk: &Disk = &running.disk;
            // Images with handover are locked only while a guest runs.
            if !disk.has_handover() {
                let written = !disk.image().is_read_only();
                let disk_files = image_files(disk.name(), &disk.image(), written);
                files.0.extend(disk_files.into_iter().map(|(file, _)| file));
            }
        }
        files
    }

    /// Adds the files of an image from a trial opening.
    ///
    /// # Errors
    /// Another disk has one of the files open; the error is the one that a start gets from the
    /// lock.
    pub(crate) fn add(
        &mut self,
        planned: &settings::DiskWithOrigins,
        image: &Image,
    ) -> Result<(), OpenError> {
        if planned.force_share || planned.handover {
            return Ok(());
        }
        let disk_files = image_files(&planned.name, image, !planned.read_only);
        for (file, path) in &disk_files {
            // Readers may share a file, as their locks do.
            let is_same =
                |other: &&TrialFile| other.identity == file.identity && (file.is_written || other.is_written);
            if let Some(other) = self.0.iter().find(is_same) {
                return Err(held_error(&other.disk, path.clone()));
            }
        }
        self.0.extend(disk_files.into_iter().map(|(file, _)| file));
        Ok(())
    }
}

/// Files of an image, each with its name in error messages.
fn image_files(disk: &str, image: &Image, is_written: bool) -> Vec<(TrialFile, String)> {
    let mut all = Vec::new();
    let mut above: Option<String> = None;
    for layer in image.layers() {
        // Backing files are opened read-only.
        let is_written = is_written && above.is_none();
        let mut layer_name: Option<String> = None;
        for StorageIdentity { key: file_key, path, .. } in layer.files {
            let Some(path) = path else { continue };
            let name = match (&layer_name, &above) {
                (Some(layer_name), _) => format!("{layer_name}: its data file {path}"),
                (None, Some(above)) => format!("{above}: its backing file {path}"),
                (None, None) => path,
            };
            layer_name.get_or_insert_with(|| name.clone());
            all.push((TrialFile { disk: disk.to_owned(), identity: file_key, is_written }, name));
        }
        above = layer_name.or(above);
    }
    all
}
