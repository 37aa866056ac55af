//! State that the collectors share: disks, the boot time, and unreadable files (gaps).

use std::{
    fs,
    path::Path,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use super::{Evidence, disks::DiskStack};
use crate::{hierarchy::CgroupHierarchy, kernel::proc_stat::TICK};

pub(super) struct FactReader<'a> {
    pub(super) hierarchy: &'a CgroupHierarchy,
    pub(super) disks: DiskStack<'a>,
    pub(super) clock: BootClock,
    pub(super) gaps: Vec<Evidence>,
}

impl<'a> FactReader<'a> {
    pub(super) fn new(hierarchy: &'a CgroupHierarchy) -> Self {
        let roots = &hierarchy.roots;
        Self { hierarchy, disks: DiskStack::new(roots), clock: BootClock::new(&roots.proc), gaps: Vec::new() }
    }

    pub(super) fn gap(&mut self, path: &Path, text: impl Into<String>) {
        self.gaps.push(Evidence::of(path, text));
    }

    /// Content of a file. An unreadable file is recorded as a gap; a missing one is not.
    pub(super) fn text(&mut self, path: &Path) -> Option<String> {
        match fs::read(path) {
            Ok(bytes) => Some(String::from_utf8_lossy(&bytes).into_owned()),
            Err(error) if has_ended(&error) => None,
            Err(error) => {
                self.gap(path, error.to_string());
                None
            }
        }
    }
}

/// True if the process or cgroup has ended since it was listed.
pub(super) fn has_ended(error: &std::io::Error) -> bool {
    matches!(
        nix::errno::Errno::from_raw(error.raw_os_error().unwrap_or(0)),
        nix::errno::Errno::ENOENT | nix::errno::Errno::ESRCH | nix::errno::Errno::ENODEV
    )
}

#[derive(Debug)]
pub(super) struct BootClock {
    booted: Option<SystemTime>,
}

impl BootClock {
    /// Clock that begins at `btime` of /proc/stat (proc_stat(5)).
    pub(super) fn new(proc: &Path) -> Self {
        let text = fs::read_to_string(proc.join("stat")).unwrap_or_default();
        let seconds = text.lines().find_map(|line| line.strip_prefix("btime ")?.trim().parse().ok());
        Self { booted: seconds.and_then(|seconds| UNIX_EPOCH.checked_add(Duration::from_secs(seconds))) }
    }

    pub(super) fn start_time(&self, ticks: u64) -> Option<SystemTime> {
        let tick_ms = u64::try_from(TICK.as_millis()).ok()?;
        self.booted?.checked_add(Duration::from_millis(ticks.saturating_mul(tick_ms)))
    }
}
