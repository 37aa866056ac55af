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
    hierarchy::CgroupHierarchy,
    limit::{
        limits_file::LimitsFile,
        settling::{self, MissingProperties},
    },
};

#[derive(Default)]
pub(super) struct SystemdUpdates {
    pending: HashSet<PathBuf>,
    /// Returns the control groups that are still to be set.
    update: Option<JoinHandle<HashSet<PathBuf>>>,
}

impl SystemdUpdates {
    pub(super) fn add(&mut self, groups: impl IntoIterator<Item = PathBuf>) {
        self.pending.extend(groups);
    }

    /// Starts setting the limits of the pending control groups, unless the last run is still
    /// active.
    pub(super) fn start_update(
        &mut self,
        hierarchy: &CgroupHierarchy,
        path: &Path,
        limits_file: &LimitsFile,
    ) {
        if let Some(update) = self.update.take_if(|teller| teller.is_finished()) {
            // The panic message has been printed.
            self.pending.extend(update.join().unwrap_or_default());
        }
        if self.pending.is_empty() || self.update.is_some() {
            return;
        }
        let (hierarchy, path, limits_file) = (hierarchy.clone(), path.to_owned(), limits_file.clone());
        let pending = mem::take(&mut self.pending);
        let body = move || {
            let mut remaining = HashSet::new();
            let unknown =
                settling::missing_in_systemd(&hierarchy, &limits_file, &pending).unwrap_or_default();
            for MissingProperties { group, .. } in unknown {
                match settling::update_systemd(&hierarchy, &path, &group) {
                    Ok(true) => {}
                    Ok(false) => drop(remaining.insert(group.name)),
                    Err(error) => tracing::warn!("{error:#}"),
                }
            }
            remaining
        };
        self.update = thread::Builder::new().name("systemd".to_owned()).spawn(body).ok();
    }
}
