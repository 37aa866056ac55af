//! Tells systemd of limits that the kernel has been told by its files alone, or systemd would take
//! them back at its next occasion.
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

/// What systemd is still to be told.
#[derive(Default)]
pub(super) struct Systemd {
    /// Control groups of which it has perhaps not heard.
    unheard: HashSet<PathBuf>,
    /// Who tells it, and then knows which of them are still to be told.
    teller: Option<JoinHandle<HashSet<PathBuf>>>,
}

impl Systemd {
    /// It has perhaps not heard of these.
    pub(super) fn is_to_hear_of(&mut self, groups: impl IntoIterator<Item = PathBuf>) {
        self.unheard.extend(groups);
    }

    /// Has it told of what is kept, of those that it has not heard of; one after another, so not
    /// before the last telling is over.
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
