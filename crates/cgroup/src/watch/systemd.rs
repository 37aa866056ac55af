//! Sets limits in systemd that were written to the kernel's files; systemd would undo them
//! otherwise.
//!
//! Runs in a separate thread: systemd may respond slowly, and bursts must not wait.

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
    /// Returns the control groups that are still to be set.
    teller: Option<JoinHandle<HashSet<PathBuf>>>,
}

impl Systemd {
    pub(super) fn is_to_hear_of(&mut self, groups: impl IntoIterator<Item = PathBuf>) {
        self.unheard.extend(groups);
    }

    /// Starts setting the limits of the pending control groups, unless the last run is still
    /// active.
    pub(super) fn tell(&mut self, hierarchy: &Hierarchy, path: &Path, kept: &Kept) {
        if let Some(teller) = self.teller.take_if(|teller| teller.is_finished()) {
            // The panic message has been printed.
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
