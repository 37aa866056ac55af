//! A temporary cgroup with the limits of another.
//!
//! ```text
//!   parent ──► the examined cgroup           limits, processes
//!          └─► weir-explain-PID              the same limits; those of the parent and above apply to both
//! ```
//!
//! A sibling, not a child: a cgroup of version 2 with processes cannot enable controllers for
//! children (cgroup-v2.rst, "No Internal Process Constraint"), while the parent enables them for
//! all. Measuring therefore uses quota of the parent only. Version 1 uses the same layout.

use std::{io, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use block::device::DeviceNumber;
use console::print_error;
use policy::steering::IoMaxRates;

use crate::{
    control_group::{ControlGroup, Version},
    kernel::{blkio, io_stat, io_stat::CgroupIoUsage},
    limit::write,
};

/// Lower bound of memory.high. Twice the written amount makes a writer reach its share of dirty
/// pages in seconds; below this bound weir itself would be reclaimed.
const MIN_MEMORY_BYTES: u64 = 24 << 20;
const LEFT_WITHIN: Duration = Duration::from_secs(5);

/// Removed when dropped.
#[derive(Debug)]
pub(super) struct TemporaryCgroup {
    group: ControlGroup,
    disks: Vec<DeviceNumber>,
}

impl TemporaryCgroup {
    pub(super) fn beside(
        examined: &ControlGroup,
        name: &str,
        limits: &[(DeviceNumber, IoMaxRates)],
    ) -> anyhow::Result<Self> {
        // Version 1's root can have limits. It has no sibling, so the copy is created below it.
        let parent =
            examined.parent().or_else(|| (examined.version == Version::V1).then(|| examined.clone()));
        let Some(parent) = parent else {
            bail!(
                "cgroup {}: the root has no sibling to measure in (name a cgroup below it)",
                examined.name.display()
            );
        };
        let group = ControlGroup::create(&parent, name).with_context(|| {
            format!("cgroup {}: cannot create a cgroup there to measure in", parent.name.display())
        })?;
        let cgroup = Self { group, disks: limits.iter().map(|(disk, _)| *disk).collect() };
        for (disk, rates) in limits {
            write::write_limits(&cgroup.group, *disk, *rates)
                .with_context(|| format!("the limits on {disk} cannot be copied"))?;
        }
        Ok(cgroup)
    }

    /// Returns a closure that removes the cgroup, for the signal handler.
    pub(super) fn removal(&self) -> impl Fn() + Send + 'static + use<> {
        let (group, disks) = (self.group.clone(), self.disks.clone());
        move || remove(&group, &disks)
    }

    /// Lowers memory.high so that a writer of `bytes` soon waits. Returns true on success.
    pub(super) fn restrict_memory(&self, bytes: u64) -> bool {
        let memory = bytes.saturating_mul(2).max(MIN_MEMORY_BYTES).to_string();
        self.group.version == Version::V2 && self.group.write("memory.high", &memory).is_ok()
    }

    pub(super) fn unrestrict_memory(&self) {
        let _ = self.group.write("memory.high", "max");
    }

    pub(super) fn enter(&self, process: u32) -> anyhow::Result<()> {
        let moved = self.group.write("cgroup.procs", &process.to_string());
        moved.with_context(|| format!("cgroup {}: no process can be moved there", self.group.name.display()))
    }

    pub(super) fn usage(&self, disk: DeviceNumber) -> anyhow::Result<CgroupIoUsage> {
        let group = &self.group;
        let read = |file: &str| group.read(file).with_context(|| file.to_owned());
        let found = match group.version {
            Version::V1 => blkio::find(&read(blkio::BYTES)?, &read(blkio::OPERATIONS)?, disk)?,
            // Without the io controller there are no counters.
            Version::V2 => match group.read("io.stat") {
                Ok(text) => io_stat::find(&text, disk)?,
                Err(error) if error.kind() == io::ErrorKind::NotFound => None,
                Err(error) => return Err(error).context("io.stat"),
            },
        };
        Ok(found.unwrap_or_default())
    }
}

impl Drop for TemporaryCgroup {
    fn drop(&mut self) {
        remove(&self.group, &self.disks);
    }
}

fn remove(group: &ControlGroup, disks: &[DeviceNumber]) {
    // Lift the limits first: a throttled process cannot exit before its request completes.
    for disk in disks {
        let _ = write::write_limits(group, *disk, IoMaxRates::NONE);
    }
    if let Err(error) = group.remove_within(LEFT_WITHIN) {
        print_error(&anyhow!("{}: left behind: {error} (remove it with rmdir)", group.directory.display()));
    }
}
