//! Limits that the kernel enforces alone, without steering: restored after a control group or disk
//! was gone or another program changed them, and lifted once they are no longer configured.

use std::{
    collections::{HashMap, HashSet},
    mem,
    path::PathBuf,
};

use policy::steering::Rates;

use super::in_turn;
use crate::{
    control_group::ControlGroup,
    hierarchy::Hierarchy,
    limit::{kept::Entry, pools::Sharing, settling, tell, tell::as_kept},
};

/// Pools verified at each interval: bounds the load with thousands of pools.
const VERIFIED: usize = 64;

pub(super) struct Unsteered {
    hierarchy: Hierarchy,
    all: Vec<Sharing>,
    /// Index of the next pool to verify.
    next: usize,
    /// Errors logged, by pool: each once.
    said: HashMap<String, Vec<String>>,
}

impl Unsteered {
    pub(super) fn new(hierarchy: Hierarchy) -> Self {
        Self { hierarchy, all: Vec::new(), next: 0, said: HashMap::new() }
    }

    /// Adopts the pools that need no steering; returns the control groups whose limits were
    /// written.
    pub(super) fn adopt(&mut self, all: Vec<Sharing>) -> Vec<PathBuf> {
        let limited = all.iter().filter(|sharing| !sharing.limits.is_unlimited());
        let limited = limited.flat_map(|sharing| sharing.members.iter().map(place)).collect();
        // A pool with only weights has no limit.
        let is_kernels = |sharing: &Sharing| !sharing.needs_watch() && !sharing.limits.is_unlimited();
        let before = mem::replace(&mut self.all, all.into_iter().filter(is_kernels).collect());
        self.lift(&before, &limited);
        // The file may have been edited by hand, without a write to the kernel.
        let before: HashMap<&str, &Sharing> =
            before.iter().map(|sharing| (sharing.name.as_str(), sharing)).collect();
        let is_changed = |sharing: &Sharing| before.get(sharing.name.as_str()) != Some(&sharing);
        let changed = (0..self.all.len()).filter(|index| is_changed(&self.all[*index])).collect();
        self.hold_all(changed)
    }

    /// Verifies the next pools in turn, and those with a `new` control group; returns the control
    /// groups whose limits were written.
    pub(super) fn verify(&mut self, new: &HashSet<PathBuf>) -> Vec<PathBuf> {
        let in_turn: Vec<usize> = in_turn(&mut self.next, self.all.len(), VERIFIED).collect();
        let is_new = |sharing: &Sharing| sharing.members.iter().any(|entry| new.contains(&entry.cgroup));
        let is_due = |index: &usize| in_turn.contains(index) || is_new(&self.all[*index]);
        let due = (0..self.all.len()).filter(is_due).collect();
        self.hold_all(due)
    }

    fn hold_all(&mut self, which: Vec<usize>) -> Vec<PathBuf> {
        which.into_iter().flat_map(|index| self.hold(index)).collect()
    }

    /// Restores limits that the kernel lost together with a control group or a disk; a missing disk
    /// is logged once.
    fn hold(&mut self, index: usize) -> Vec<PathBuf> {
        let sharing = &self.all[index];
        let roots = self.hierarchy.roots.of_devices();
        let mut wrong = Vec::new();
        for entry in &sharing.members {
            let there = self.hierarchy.group(&entry.cgroup).ok().filter(ControlGroup::exists);
            let disk = there.map_or(Ok(()), |group| settling::same_disk(&group, entry, &roots));
            wrong.extend(disk.err().map(|error| format!("{}: {error:#}", entry.cgroup.display())));
        }
        let mut heard = Vec::new();
        for (group, device, rates) in
            settling::settled_of(&self.hierarchy, sharing.clone()).unwrap_or_default()
        {
            let differs = tell::told(&group, device).is_ok_and(|told| told != as_kept(rates));
            match settling::hold(&group, device, rates) {
                Ok(()) if differs => {
                    tracing::info!(cgroup = %group.name.display(), %device, "the kernel had other limits; it is told these again");
                    heard.push(group.name);
                }
                Ok(()) => {}
                Err(error) => wrong.push(format!("{error:#}")),
            }
        }
        self.say(sharing.name.clone(), wrong);
        heard
    }

    fn say(&mut self, name: String, wrong: Vec<String>) {
        let said = self.said.remove(&name).unwrap_or_default();
        wrong.iter().filter(|text| !said.contains(*text)).for_each(|text| tracing::warn!("{text}"));
        if !wrong.is_empty() {
            self.said.insert(name, wrong);
        }
    }

    /// Lifts limits that are no longer configured, if the kernel still has them: a limit removed
    /// just as it was restored, or deleted from the file.
    fn lift(&self, before: &[Sharing], limited: &HashSet<(PathBuf, String)>) {
        for sharing in before {
            if sharing.members.iter().all(|entry| limited.contains(&place(entry))) {
                continue;
            }
            let held = settling::settled_of(&self.hierarchy, sharing.clone()).unwrap_or_default();
            for (group, device, rates) in held {
                let is_limited = limited.contains(&(group.name.clone(), device.to_string()));
                let is_told = tell::told(&group, device).is_ok_and(|told| told == as_kept(rates));
                if !is_limited
                    && is_told
                    && let Err(error) = tell::tell(&group, device, Rates::NONE)
                {
                    tracing::warn!("{error:#}");
                }
            }
        }
    }
}

fn place(entry: &Entry) -> (PathBuf, String) {
    (entry.cgroup.clone(), entry.device_text().to_owned())
}
