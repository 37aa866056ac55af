//! The default memory budget of the daemon.

use std::{fs, path::Path};

use anyhow::Context as _;
use nix::sys::resource::{RLIM_INFINITY, Resource, getrlimit};
use reactor::{
    buffer, guest,
    memory::{BudgetUsage, MemoryBudget},
};
use settings::{DiskWithOrigins, ProcessSpec, exact_size};

const CGROUPS: &str = "/sys/fs/cgroup";

/// Sets the budget, and reserves memory for buffers that threads keep for reuse: at most an eighth.
pub(super) fn set_budget(service: &ProcessSpec) -> anyhow::Result<()> {
    let total = service.memory.unwrap_or_else(|| default_budget(Path::new("/")).max(settings::MIN_MEMORY));
    let budget = MemoryBudget::process();
    budget.set_total(total);
    // Tables, stacks and requests need address space in addition to their data.
    guest::reserve_address_space(total.saturating_add(total / 4));
    // The main thread has a reactor as well.
    let threads = service.workers as u64 + 1;
    let pool_bytes = (total / 8 / threads).min(buffer::POOL_BYTES as u64);
    buffer::set_pool_limit(pool_bytes as usize);
    budget.reserve("buffers of the threads", 0, pool_bytes * threads).context("memory")
}

/// Warns if the disks in memory cannot be filled; their memory is allocated as they are written.
pub(super) fn warn_of_disks(disks: &[DiskWithOrigins]) {
    let sizes = disks.iter().filter_map(|disk| disk.image.memory_bytes());
    if let Some(warning) = warning(sizes, &MemoryBudget::process().usage()) {
        tracing::warn!("{warning}");
    }
}

fn warning(sizes: impl Iterator<Item = u64>, usage: &BudgetUsage) -> Option<String> {
    let BudgetUsage { total, reserved, max_requests: request_bytes, .. } = *usage;
    // Without a total budget, disks in memory have no bound either.
    let free = total.saturating_sub(reserved).saturating_sub(request_bytes);
    let together = sizes.fold(0, u64::saturating_add);
    // Rounded to whole MiB: an estimate, not a guarantee.
    let free_text = exact_size(free >> 20 << 20);
    (total != u64::MAX && together > free).then(|| {
        format!(
            "disks in memory have {} together, and the budget has memory for {free_text}: further \
             writes fail with ENOSPC (make them smaller, or raise --memory)",
            exact_size(together)
        )
    })
}

/// Default budget: four fifths of the smaller of the machine's memory and its cgroups' limits, but
/// at most half of what ulimit leaves, where mapped and unused memory counts as well.
fn default_budget(root: &Path) -> u64 {
    let machine = field(&read(&root.join("proc/meminfo")), "MemTotal:").map(|kib| kib << 10);
    let physical = groups(root).into_iter().chain(machine).min().map_or(u64::MAX, |bytes| bytes / 5 * 4);
    // RLIMIT_AS counts mappings that exist already, so only the rest is available.
    let mapped = field(&read(&root.join("proc/self/status")), "VmSize:").map_or(0, |kib| kib << 10);
    let limits = [Resource::RLIMIT_AS, Resource::RLIMIT_DATA].into_iter().filter_map(|resource| {
        let (soft, _) = getrlimit(resource).ok()?;
        (soft != RLIM_INFINITY).then(|| soft.saturating_sub(mapped) / 2)
    });
    limits.fold(physical, u64::min)
}

/// Limits of the process's cgroup and its ancestors, in bytes.
fn groups(root: &Path) -> Vec<u64> {
    let mut limits = Vec::new();
    for line in read(&root.join("proc/self/cgroup")).lines() {
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (hierarchy, files): (_, &[&str]) = match controllers {
            "" => (CGROUPS.to_owned(), &["memory.max", "memory.high"]),
            "memory" => (format!("{CGROUPS}/memory"), &["memory.limit_in_bytes"]),
            _ => continue,
        };
        let hierarchy = root.join(hierarchy.trim_start_matches('/'));
        let group = hierarchy.join(path.trim_start_matches('/'));
        for directory in group.ancestors().take_while(|directory| directory.starts_with(&hierarchy)) {
            let limit = |file: &&str| read(&directory.join(file)).trim().parse::<u64>().ok();
            limits.extend(files.iter().filter_map(limit));
        }
    }
    limits
}

/// Content of a file; an unreadable file is treated as empty.
fn read(path: &Path) -> String {
    fs::read_to_string(path).unwrap_or_default()
}

/// Number behind `name` at the beginning of a line.
fn field(text: &str, name: &str) -> Option<u64> {
    let rest = text.lines().find_map(|line| line.strip_prefix(name))?;
    rest.split_whitespace().next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_disks_larger_than_the_budget_cause_a_warning() {
        const MIB: u64 = 1 << 20;
        let usage = |total| BudgetUsage {
            total,
            reserved: 16 * MIB,
            pages: 0,
            connections: 0,
            requests: 0,
            max_requests: 64 * MIB,
            waiting: 0,
        };
        let warning_for = |total, sizes: &[u64]| warning(sizes.iter().copied(), &usage(total));
        for (total, sizes) in
            [(128 * MIB, &[][..]), (128 * MIB, &[24 * MIB, 24 * MIB]), (u64::MAX, &[1 << 60])]
        {
            assert_eq!(warning_for(total, sizes), None, "{sizes:?}");
        }
        for (sizes, together) in [(&[1024 * MIB][..], "1G"), (&[24 * MIB, 25 * MIB], "49M")] {
            let text = warning_for(128 * MIB, sizes).expect("too much");
            let expect =
                format!("disks in memory have {together} together, and the budget has memory for 48M: ");
            assert!(text.starts_with(&expect), "{text}");
        }
    }

    #[test]
    fn smallest_limit_determines_the_budget() {
        let root = tempfile::tempdir().expect("room");
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().expect("a directory")).expect("room");
            fs::write(path, text).expect("room");
        };
        assert_eq!(default_budget(root.path()), u64::MAX, "nothing is known");
        write("proc/meminfo", "MemTotal:     1000000 kB\nMemFree:  5 kB\n");
        assert_eq!(default_budget(root.path()), 819_200_000);
        write("proc/self/cgroup", "0::/a/b\n");
        write("sys/fs/cgroup/a/memory.max", "500000\n");
        write("sys/fs/cgroup/a/b/memory.max", "max\n");
        assert_eq!(default_budget(root.path()), 400_000);
        write("sys/fs/cgroup/a/b/memory.high", "50000\n");
        assert_eq!(default_budget(root.path()), 40_000);
        write("proc/self/cgroup", "7:cpu:/\n5:memory:/c\n");
        write("sys/fs/cgroup/memory/c/memory.limit_in_bytes", "9223372036854771712\n");
        write("sys/fs/cgroup/memory/memory.limit_in_bytes", "25000\n");
        assert_eq!(default_budget(root.path()), 20_000);
    }
}
