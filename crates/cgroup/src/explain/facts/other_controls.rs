//! Swap space, and other kernel controls that affect I/O of the limited disks: io.cost, io.latency
//! and BFQ.

use std::path::{Path, PathBuf};

use block::device::DeviceNumber;

use super::{
    BackingDisk, Evidence, OtherControl, OtherControlKind, SwapArea,
    mounts::MountTable,
    reader::{FactReader, has_ended},
};
use crate::{
    control_group::{ControlGroup, Version},
    kernel::{io_latency, memory_stat, memory_stat::DirtyBytes, weight},
    limit::latency_target,
};

/// Swap areas in use (/proc/swaps, proc_swaps(5)).
pub(super) fn swaps(reader: &mut FactReader<'_>, mounts: &mut MountTable) -> Vec<SwapArea> {
    let file = reader.hierarchy.roots.proc.join("swaps");
    let text = reader.text(&file).unwrap_or_default();
    let mut swaps = Vec::new();
    for line in text.lines().skip(1) {
        let Some(name) = line.split_ascii_whitespace().next() else {
            continue;
        };
        let path = Path::new(name);
        // A swap area is a block device, or a file in a file system on one.
        let disk = reader.disks.disk_of_node(path).or_else(|| {
            let index = mounts.of_path(&mut reader.disks, path)?;
            match mounts.found[index].backing_disk {
                BackingDisk::Disk(disk) => Some(disk),
                BackingDisk::NoDisk | BackingDisk::Unknown(_) => None,
            }
        });
        let value = line.split_ascii_whitespace().collect::<Vec<_>>().join(" ");
        swaps.push(SwapArea { disk, evidence: Evidence::of(&file, value) });
    }
    swaps
}

/// Swap space that the cgroup uses; `None` if it uses none.
pub(super) fn swapped_bytes(group: &ControlGroup) -> Option<Evidence> {
    let text = group.read("memory.swap.current").ok()?;
    let bytes = text.trim().parse::<u64>().ok().filter(|bytes| *bytes > 0)?;
    Some(Evidence::of(&group.directory.join("memory.swap.current"), bytes.to_string()))
}

/// Dirty pages that are charged to a v2 cgroup without processes; `None` for other cgroups.
pub(super) fn remaining_dirty_pages(
    reader: &mut FactReader<'_>,
    group: &ControlGroup,
    has_no_processes: bool,
) -> Option<Evidence> {
    if !has_no_processes || group.version == Version::V1 || group.is_root() {
        return None;
    }
    let file = group.directory.join("memory.stat");
    let text = reader.text(&file)?;
    let DirtyBytes { dirty, writeback } = memory_stat::parse(&text).ok()?;
    let parts = [("file_dirty", dirty), ("file_writeback", writeback)];
    let lines = parts.iter().filter(|(_, bytes)| *bytes > 0).map(|(key, bytes)| format!("{key} {bytes}"));
    let lines: Vec<String> = lines.collect();
    (!lines.is_empty()).then(|| Evidence::of(&file, lines.join(", ")))
}

/// Controls that affect I/O in addition to limits: io.cost and the BFQ scheduler on the `limited`
/// disks, io.latency on all.
pub(super) fn controls(
    reader: &mut FactReader<'_>,
    group: &ControlGroup,
    limited: &[DeviceNumber],
) -> Vec<OtherControl> {
    let mut found = Vec::new();
    if group.version == Version::V2 {
        found.extend(io_cost_controls(reader, limited));
        found.extend(io_latency_controls(reader, group));
    }
    let mut seen = Vec::new();
    // A disk that several levels limit is reported once.
    for &disk in limited {
        if seen.contains(&disk) {
            continue;
        }
        seen.push(disk);
        let file =
            reader.hierarchy.roots.sys.join("dev/block").join(disk.to_string()).join("queue/scheduler");
        let text = reader.text(&file).unwrap_or_default();
        if weight::scheduler(&text) == Ok(Some("bfq")) {
            let evidence = Evidence::of(&file, text.trim());
            found.push(OtherControl { kind: OtherControlKind::Bfq, disk, evidence });
        }
    }
    found
}

fn io_cost_controls(reader: &mut FactReader<'_>, limited: &[DeviceNumber]) -> Vec<OtherControl> {
    let Some(file) = reader.hierarchy.unified.as_ref().map(|root| root.join("io.cost.qos")) else {
        return Vec::new();
    };
    let text = reader.text(&file).unwrap_or_default();
    let enabled = weight::cost_enabled(&text).unwrap_or_default();
    let enabled = enabled.into_iter().filter(|(disk, enabled)| *enabled && limited.contains(disk));
    enabled.map(|(disk, _)| control_on_disk(OtherControlKind::Cost, &file, &text, disk)).collect()
}

/// Latency targets of the cgroup, and those of its siblings and of its ancestors' siblings, for
/// which the kernel may throttle it. On any disk: a target also affects disks without limits.
fn io_latency_controls(reader: &mut FactReader<'_>, group: &ControlGroup) -> Vec<OtherControl> {
    let own = TargetFile::of(reader, group);
    let own_targets = own.targets.iter();
    let mut found: Vec<_> =
        own_targets.map(|(disk, _)| own.control(OtherControlKind::LatencyTarget, *disk)).collect();
    for level in std::iter::successors(Some(group.clone()), ControlGroup::parent) {
        let Some(parent) = level.parent() else { break };
        let siblings = match parent.children() {
            Ok(siblings) => siblings,
            Err(error) if has_ended(&error) => continue,
            Err(error) => {
                reader.gap(&parent.directory, error.to_string());
                continue;
            }
        };
        let level_targets = TargetFile::of(reader, &level).targets;
        for sibling in siblings.into_iter().filter(|sibling| sibling.name != level.name) {
            let file = TargetFile::of(reader, &sibling);
            for (disk, target_us) in &file.targets {
                // The kernel throttles no level with the same target or a lower one
                // (block/blk-iolatency.c, check_scale_change).
                if level_targets.iter().all(|(other, own_us)| other != disk || own_us > target_us) {
                    found.push(file.control(OtherControlKind::SiblingLatencyTarget, *disk));
                }
            }
        }
    }
    found
}

/// The io.latency of a cgroup.
struct TargetFile {
    file: PathBuf,
    text: String,
    /// Targets in microseconds.
    targets: Vec<(DeviceNumber, u64)>,
}

impl TargetFile {
    fn of(reader: &mut FactReader<'_>, group: &ControlGroup) -> Self {
        let file = group.directory.join(latency_target::FILE);
        let text = reader.text(&file).unwrap_or_default();
        let mut targets = io_latency::targets(&text).unwrap_or_default();
        targets.retain(|(_, target_us)| *target_us > 0);
        Self { file, text, targets }
    }

    fn control(&self, kind: OtherControlKind, disk: DeviceNumber) -> OtherControl {
        control_on_disk(kind, &self.file, &self.text, disk)
    }
}

fn control_on_disk(kind: OtherControlKind, file: &Path, text: &str, disk: DeviceNumber) -> OtherControl {
    let number = disk.to_string();
    let line = text.lines().find(|line| line.split_ascii_whitespace().next() == Some(&number));
    OtherControl { kind, disk, evidence: Evidence::of(file, line.unwrap_or_default()) }
}
