//! Whether an image could be opened, found without leaving a trace: it is opened for reading alone,
//! whoever else has it. So nobody is kept from it, and what a start would refuse because of who has
//! it, or because of what it says of itself, is to be asked beside.

use block::disk::Disk;
use image::Image;
use storage::{StorageIdentity, OpenError};

use super::registry::{Registry, holder::held_by};

/// How the image of a disk is opened to look at it.
pub(crate) fn alone(planned: &settings::PlacedDisk) -> settings::PlacedDisk {
    let mut looked = planned.clone();
    looked.read_only = true;
    looked.force_share = planned.image.path().is_some();
    looked.handover = false;
    looked
}

/// Fails where an image that was looked at says that nobody is to write to it.
pub(crate) fn check_marks(planned: &settings::PlacedDisk, image: &Image) -> Result<(), OpenError> {
    if planned.read_only { Ok(()) } else { image.check_marks(&planned.image.to_string()) }
}

/// Who would have which files open.
#[derive(Debug, Default)]
pub(crate) struct Files(Vec<Taken>);

#[derive(Debug)]
struct Taken {
    disk: String,
    /// The same for all names of a file.
    what: String,
    is_written: bool,
}

impl Files {
    /// Of the disks that run.
    pub(crate) fn of(registry: &Registry) -> Self {
        let mut files = Self::default();
        for running in registry.disks.all() {
            let disk: &Disk = &running.disk;
            // What is handed over is locked while a machine runs.
            if !disk.has_handover() {
                let written = !disk.image().is_read_only();
                let own = taken(disk.name(), disk.image(), written);
                files.0.extend(own.into_iter().map(|(file, _)| file));
            }
        }
        files
    }

    /// Those of an image that was looked at are the disk's from now on.
    ///
    /// # Errors
    /// As a start hears it from locks: another disk has one of them, by whatever name.
    pub(crate) fn take(&mut self, planned: &settings::PlacedDisk, image: &Image) -> Result<(), OpenError> {
        if planned.force_share || planned.handover {
            return Ok(());
        }
        let own = taken(&planned.name, image, !planned.read_only);
        for (file, path) in &own {
            let is_same = |other: &&Taken| other.what == file.what && (file.is_written || other.is_written);
            if let Some(other) = self.0.iter().find(is_same) {
                return Err(held_by(&other.disk, path.clone()));
            }
        }
        self.0.extend(own.into_iter().map(|(file, _)| file));
        Ok(())
    }
}

/// The files of an image, and what a start calls them.
fn taken(disk: &str, image: &Image, is_written: bool) -> Vec<(Taken, String)> {
    let mut all = Vec::new();
    let mut above: Option<String> = None;
    for layer in image.layers() {
        // What lies below is read.
        let is_written = is_written && above.is_none();
        let mut own: Option<String> = None;
        for StorageIdentity { key: what, path, .. } in layer.files {
            let Some(path) = path else { continue };
            let name = match (&own, &above) {
                (Some(own), _) => format!("{own}: its data file {path}"),
                (None, Some(above)) => format!("{above}: its backing file {path}"),
                (None, None) => path,
            };
            own.get_or_insert_with(|| name.clone());
            all.push((Taken { disk: disk.to_owned(), what, is_written }, name));
        }
        above = own.or(above);
    }
    all
}
