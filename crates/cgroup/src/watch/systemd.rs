//! Tells systemd of limits that were written to the kernel's files, or systemd would undo them.
//!
//! In a thread of its own: it may take its time to answer, and bursts wait for nobody.

use std::{
    collections::HashSet,
    mem,
    path::{Path, PathBuf},
    thread::{self, JoinHandle},
};

use crate::{
    hierarchy::Hierarchy,
    limit::{kept::Kept, settling, tell::Telling},
};

#[derive(Default)]
pub(super) struct Systemd {
    unheard: HashSet<PathBuf>,
    /// Returns those still to be told.
    teller: Option<JoinHandle<HashSet<PathBuf>>>,
}

impl Systemd {
    pub(super) fn is_to_hear_of(&mut self, groups: impl IntoIterator<Item = PathBuf>) {
        self.unheard.extend(groups);
    }

    /// Tells what is kept of the unheard, once the last telling is over.
    pub(super) fn tell(&mut self, hierarchy: &Hierarchy, path: &Path, kept: &Kept) {
        if let Some(teller) = self.teller.take_if(|teller| teller.is_finished()) {
            // A panic there has been printed.
            self.unheard.extend(teller.join().unwrap_or_default());
        }
        if self.unheard.is_empty() || self.teller.is_some() {
            return;
        }
        let (hierarchy, path, kept) = (hierarchy.clone(), path.to_owned(), kept.clone());
        let unheard = mem::take(&mut self.unheard);
        let body = move || {
            let mut still = HashSet::new();
            let unknown = settling::unknown_to_systemd(&hierarchy, &kept, &unheard).unwrap_or_default();
            for Telling { group, .. } in unknown {
                match settling::tell_systemd(&hierarchy, &path, &group) {
                    Ok(true) => {}
                    Ok(false) => drop(still.insert(group.name)),
                    Err(error) => tracing::warn!("{error:#}"),
                }
            }
            still
        };
        self.teller = thread::Builder::new().name("systemd".to_owned()).spawn(body).ok();
    }
}
