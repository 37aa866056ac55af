//! Which disk of this daemon has an image that another is to have: a lock tells no process from
//! itself, and the sandbox hides all others.

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
    /// Names the disk that is here, if it is the one that has locked the file.
    pub(crate) fn naming_holder(&self, error: OpenError) -> OpenError {
        let Some(locked) = &error.locked else { return error };
        let has_it = |running: &&std::rc::Rc<super::RunningDisk>| {
            let layers = running.disk.image().layers();
            layers.iter().flat_map(|layer| &layer.files).any(|file| *file.what == **locked)
        };
        match self.disks().iter().find(has_it) {
            Some(other) => {
                let OpenError { image, holder, locked, .. } = error;
                OpenError { holder, locked, ..held_by(other.disk.name(), image) }
            }
            None => error,
        }
    }

    /// The same of any error that may be one of these.
    pub(crate) fn naming_holder_of(&self, error: anyhow::Error) -> anyhow::Error {
        match error.downcast::<OpenError>() {
            Ok(error) => self.naming_holder(error).into(),
            Err(error) => error,
        }
    }
}
