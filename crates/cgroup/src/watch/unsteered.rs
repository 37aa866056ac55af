//! Limits that the kernel enforces alone, without steering: restored after a control group or disk
//! was missing or another program changed them, and lifted once they are no longer configured.

use std::{
    collections::{HashMap, HashSet},
    mem,
    path::PathBuf,
};

use policy::steering::IoMaxRates;

use super::round_robin;
use crate::{
    control_group::ControlGroup,
    hierarchy::CgroupHierarchy,
    limit::{limits_file::CgroupEntry, pools::LimitPool, settling, write, write::as_printed_by_kernel},
};

/// Pools verified at each interval: bounds the load with thousands of pools.
const VERIFIED: usize = 64;

pub(super) struct UnsteeredPools {
    hierarchy: CgroupHierarchy,
    all: Vec<LimitPool>,
    /// Index of the next pool to verify.
    next: usize,
    /// Errors logged, by pool: each once.
    logged: HashMap<String, Vec<String>>,
}

impl UnsteeredPools {
    pub(super) fn new(hierarchy: CgroupHierarchy) -> Self {
        Self { hierarchy, all: Vec::new(), next: 0, logged: HashMap::new() }
    }

    /// Adopts the pools that need no steering; returns the control groups whose limits were
    /// written.
    pub(super) fn adopt(&mut self, all: Vec<LimitPool>) -> Vec<PathBuf> {
        let limited = all.iter().filter(|pool| !pool.limits.is_unlimited());
        let limited = limited.flat_map(|pool| pool.members.iter().map(place)).collect();
        // A pool with only weights has no limit.
        let is_kernels = |pool: &LimitPool| !pool.needs_watch() && !pool.limits.is_unlimited();
        let before = mem::replace(&mut self.all, all.into_iter().filter(is_kernels).collect());
        self.lift(&before, &limited);
        // The file may have been edited by hand, without a write to the kernel.
        let before: HashMap<&str, &LimitPool> =
            before.iter().map(|pool| (pool.name.as_str(), pool)).collect();
        let is_changed = |pool: &LimitPool| before.get(pool.name.as_str()) != Some(&pool);
        let changed = (0..self.all.len()).filter(|index| is_changed(&self.all[*index])).collect();
        self.restore_all(changed)
    }

    /// Verifies the next pools in turn, and those with a `new` control group; returns the control
    /// groups whose limits were written.
    pub(super) fn verify(&mut self, new: &HashSet<PathBuf>) -> Vec<PathBuf> {
        let in_turn: Vec<usize> = round_robin(&mut self.next, self.all.len(), VERIFIED).collect();
        let is_new = |pool: &LimitPool| pool.members.iter().any(|entry| new.contains(&entry.cgroup));
        let is_due = |index: &usize| in_turn.contains(index) || is_new(&self.all[*index]);
        let due = (0..self.all.len()).filter(is_due).collect();
        self.restore_all(due)
    }

    fn restore_all(&mut self, indexes: Vec<usize>) -> Vec<PathBuf> {
        indexes.into_iter().flat_map(|index| self.restore(index)).collect()
    }

    /// Restores limits that the kernel lost together with a control group or a disk; a missing disk
    /// is logged once.
    fn restore(&mut self, index: usize) -> Vec<PathBuf> {
        let pool = &self.all[index];
        let roots = self.hierarchy.roots.device_roots();
        let mut errors = Vec::new();
        for entry in &pool.members {
            let existing = self.hierarchy.group(&entry.cgroup).ok().filter(ControlGroup::exists);
            let disk = existing.map_or(Ok(()), |group| settling::verify_disk(&group, entry, &roots));
            errors.extend(disk.err().map(|error| format!("{}: {error:#}", entry.cgroup.display())));
        }
        let mut restored = Vec::new();
        for (group, device, rates) in
            settling::settled_rates_of_pool(&self.hierarchy, pool.clone()).unwrap_or_default()
        {
            let differs = write::read_limits(&group, device)
                .is_ok_and(|kernel_rates| kernel_rates != as_printed_by_kernel(rates));
            match settling::enforce(&group, device, rates) {
                Ok(()) if differs => {
                    tracing::info!(
                        cgroup = %group.name.display(), %device,
                        "the kernel had other limits; the configured ones are written again"
                    );
                    restored.push(group.name);
                }
                Ok(()) => {}
                Err(error) => errors.push(format!("{error:#}")),
            }
        }
        self.log_new_errors(pool.name.clone(), errors);
        restored
    }

    fn log_new_errors(&mut self, name: String, errors: Vec<String>) {
        let logged = self.logged.remove(&name).unwrap_or_default();
        errors.iter().filter(|text| !logged.contains(*text)).for_each(|text| tracing::warn!("{text}"));
        if !errors.is_empty() {
            self.logged.insert(name, errors);
        }
    }

    /// Lifts limits that are no longer configured, if the kernel still has them: a limit removed
    /// just as it was restored, or deleted from the file.
    fn lift(&self, before: &[LimitPool], limited: &HashSet<(PathBuf, String)>) {
        for pool in before {
            if pool.members.iter().all(|entry| limited.contains(&place(entry))) {
                continue;
            }
            let settled = settling::settled_rates_of_pool(&self.hierarchy, pool.clone()).unwrap_or_default();
            for (group, device, rates) in settled {
                let is_limited = limited.contains(&(group.name.clone(), device.to_string()));
                let is_in_kernel = write::read_limits(&group, device)
                    .is_ok_and(|kernel_rates| kernel_rates == as_printed_by_kernel(rates));
                if !is_limited
                    && is_in_kernel
                    && let Err(error) = write::write_limits(&group, device, IoMaxRates::NONE)
                {
                    tracing::warn!("{error:#}");
                }
            }
        }
    }
}

fn place(entry: &CgroupEntry) -> (PathBuf, String) {
    (entry.cgroup.clone(), entry.device_text().to_owned())
}
