//! Finds the disk of this daemon that has an image open. Error messages need it: file locks do not
//! identify a user within the same process, and the sandbox hides other processes.

use image::Image;
use storage::OpenError;

use super::Registry;

const REMEDY: &str = "export one disk twice, or make both read-only";

/// Error: a disk of this daemon has the image open.
pub(crate) fn held_error(disk: &str, image: String) -> OpenError {
    let why = format!("in use by the disk {disk:?}");
    OpenError {
        image,
        why,
        remedy: REMEDY.to_owned(),
        holder: None,
        locked: None,
        held_here: false,
        may_pass: false,
    }
}

impl Registry {
    /// Adds to an error the disk of this daemon that has locked the file, if there is one.
    pub(crate) fn with_holder(&self, error: OpenError) -> OpenError {
        self.with_holder_among(error, [])
    }

    /// As [`Registry::with_holder`], for an error that may be an [`OpenError`]. The iterator yields
    /// images that are not listed yet, with the names of their disks.
    pub(crate) fn with_holder_if_lock_error<'a>(
        &self,
        error: anyhow::Error,
        candidates: impl IntoIterator<Item = (&'a str, &'a Image)>,
    ) -> anyhow::Error {
        match error.downcast::<OpenError>() {
            Ok(error) => self.with_holder_among(error, candidates).into(),
            Err(error) => error,
        }
    }

    fn with_holder_among<'a>(
        &self,
        error: OpenError,
        candidates: impl IntoIterator<Item = (&'a str, &'a Image)>,
    ) -> OpenError {
        // Only errors of locks name a file.
        let Some(locked) = &error.locked else { return error };
        let has_file = |image: &Image| {
            image.layers().iter().flat_map(|layer| &layer.files).any(|file| *file.key == **locked)
        };
        let running = self.disks.all();
        let listed = running.iter().find(|running| has_file(&running.disk.image()));
        let listed = listed.map(|running| running.disk.name().to_string());
        let other =
            || candidates.into_iter().find(|(_, image)| has_file(image)).map(|(disk, _)| disk.to_owned());
        match listed.or_else(other) {
            Some(disk) => {
                let OpenError { image, holder, locked, .. } = error;
                OpenError { holder, locked, ..held_error(&disk, image) }
            }
            None => error,
        }
    }
}
