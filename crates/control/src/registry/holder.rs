//! Which disk of this daemon has an image that another is to have: a lock tells no process from
//! itself, and the sandbox hides all others.

use image::Image;
use storage::OpenError;

use super::Registry;

const REMEDY: &str = "export one disk twice, or make both read-only";

/// That a disk has the image which is called so.
pub(crate) fn held_by(disk: &str, image: String) -> OpenError {
    let why = format!("the disk {disk:?} has it");
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
    /// Names the disk of this daemon that has locked the file, if it is one.
    pub(crate) fn naming_holder(&self, error: OpenError) -> OpenError {
        self.naming_holder_or(error, [])
    }

    /// The same of any error that may be one of these; `others` are images that are not listed yet,
    /// with the names of their disks.
    pub(crate) fn naming_holder_of<'a>(
        &self,
        error: anyhow::Error,
        others: impl IntoIterator<Item = (&'a str, &'a Image)>,
    ) -> anyhow::Error {
        match error.downcast::<OpenError>() {
            Ok(error) => self.naming_holder_or(error, others).into(),
            Err(error) => error,
        }
    }

    fn naming_holder_or<'a>(
        &self,
        error: OpenError,
        others: impl IntoIterator<Item = (&'a str, &'a Image)>,
    ) -> OpenError {
        let Some(locked) = &error.locked else { return error };
        let has_it = |image: &Image| {
            image.layers().iter().flat_map(|layer| &layer.files).any(|file| *file.key == **locked)
        };
        let running = self.disks.all();
        let listed = running.iter().find(|running| has_it(running.disk.image()));
        let listed = listed.map(|running| running.disk.name().to_string());
        let other = || others.into_iter().find(|(_, image)| has_it(image)).map(|(disk, _)| disk.to_owned());
        match listed.or_else(other) {
            Some(disk) => {
                let OpenError { image, holder, locked, .. } = error;
                OpenError { holder, locked, ..held_by(&disk, image) }
            }
            None => error,
        }
    }
}
