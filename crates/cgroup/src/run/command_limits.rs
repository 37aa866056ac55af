//! The limits of one command, while it runs.
//!
//! ```text
//!   rates only                         enforced by the kernel
//!   bursts, totals, a watermark        a watch in this process, on a private limits file
//!   --group                            the shared limits file of `weir cgroup watch`; if none runs, a watch in this process
//! ```
//!
//! Removed when the command ends, unless its cgroup remains.

use std::path::{Path, PathBuf};

use anyhow::Context as _;
use block::device::DeviceIdentity;
use console::logging;
use policy::{
    steering::IoMaxRates,
    throttle::{InvalidLimit, Limits},
};
use settings::{LogFormat, LogSettings, state::CapacityStore};

use crate::{
    control_group::{ControlGroup, Version},
    hierarchy::CgroupHierarchy,
    limit,
    limit::{
        limits_file,
        limits_file::{LimitsChange, LimitsFile},
        pools::LimitPool,
        write,
    },
    watch,
};

/// Limits in force. Dropping it removes them from the file; the kernel's remain with the cgroup.
pub(super) struct CommandLimits<'a> {
    hierarchy: &'a CgroupHierarchy,
    group: ControlGroup,
    device: Option<&'a DeviceIdentity>,
    /// Dropped first: it settles all limits before its file is removed.
    watch: Option<watch::CgroupWatchThread>,
    /// The shared limits file, if the entry has to be removed from it.
    shared: Option<PathBuf>,
    /// Directory of the private limits file, removed when dropped.
    _own: Option<tempfile::TempDir>,
    pub(super) notices: Vec<String>,
}

pub(super) struct CommandPaths<'a> {
    /// Limits file; `None` for the default.
    pub(super) limits: Option<&'a Path>,
    /// Directory with results of `weir probe`; `None` for the default.
    pub(super) state: Option<&'a Path>,
}

/// Puts limits in force on a new cgroup; on an error none is in force.
pub(super) fn apply_limits<'a>(
    hierarchy: &'a CgroupHierarchy,
    group: &ControlGroup,
    device: Option<&'a DeviceIdentity>,
    change: &LimitsChange,
    paths: &CommandPaths<'_>,
) -> anyhow::Result<CommandLimits<'a>> {
    let mut command_limits = CommandLimits {
        hierarchy,
        group: group.clone(),
        device,
        watch: None,
        shared: None,
        _own: None,
        notices: Vec::new(),
    };
    if change.is_empty() {
        // Version 1 counts nothing on a disk before its first limit, even an empty one.
        if let Some(device) = device.filter(|_| group.version == Version::V1) {
            write::write_limits(group, device.number(), IoMaxRates::NONE)?;
        }
        return Ok(command_limits);
    }
    let device = device.context("limits are for a disk")?;
    let file = if change.group.as_ref().is_some_and(|name| !name.is_empty()) {
        let file = paths.limits.unwrap_or(Path::new(limits_file::DEFAULT_PATH)).to_owned();
        command_limits.shared = Some(file.clone());
        file
    } else {
        let directory = tempfile::Builder::new().prefix("weir-cgroup.").tempdir();
        let directory = directory.context("the command's limits: a temporary directory cannot be created")?;
        let file = directory.path().join("limits.json");
        command_limits._own = Some(directory);
        file
    };
    if group.version == Version::V2 && needs_watch(group, device, change)? {
        // Standard error belongs to the command: log warnings and errors only.
        logging::start(&LogSettings { filter: "warn".to_owned(), format: LogFormat::Text, file: None })?;
        // Started before the limits are set: `limit::set_limits` would report that no watch runs.
        command_limits.watch =
            Some(watch::CgroupWatchThread::start_or_stand_by(&file, CapacityStore::new(paths.state))?);
    }
    command_limits.notices = limit::set_limits(hierarchy, &file, group, device, change)?.notices;
    Ok(command_limits)
}

impl CommandLimits<'_> {
    /// Stops steering, but keeps the entry in the file: the cgroup remains.
    pub(super) fn leave(mut self) {
        self.shared = None;
    }
}

impl Drop for CommandLimits<'_> {
    fn drop(&mut self) {
        drop(self.watch.take());
        if let (Some(file), Some(device)) = (self.shared.take(), self.device) {
            // Fails if the limits were never set; then there is nothing to remove.
            let _ = limit::remove_limits(self.hierarchy, &file, &self.group, device);
        }
    }
}

/// True if the kernel alone cannot enforce the change. A group always needs a watch, because it has
/// other members.
fn needs_watch(group: &ControlGroup, device: &DeviceIdentity, change: &LimitsChange) -> anyhow::Result<bool> {
    let mut limits_file = LimitsFile::default();
    limits_file.change(group, (device.number(), device.key()), change)?;
    Ok(!limits_file.groups.is_empty() || LimitPool::all(&limits_file)?.iter().any(LimitPool::needs_watch))
}

pub(super) fn limits(change: &LimitsChange) -> Result<Limits, InvalidLimit> {
    let mut limits = Limits::default();
    change.limits.iter().try_for_each(|&(setting, value)| limits.set(setting, value))?;
    limits.validate()?;
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use block::device::DeviceNumber;
    use policy::throttle::LimitKind;

    use super::*;
    use crate::fake_machine::FakeMachine;

    fn limits_change(name: &str, value: u64) -> LimitsChange {
        LimitsChange::of(&[(name, value)])
    }

    fn needs_watch(change: &LimitsChange) -> bool {
        let machine = FakeMachine::v2("io");
        machine.disk("254:0", "vda");
        let number = DeviceNumber { major: 254, minor: 0 };
        let disk = DeviceIdentity::resolve(number, &machine.roots().device_roots()).unwrap();
        super::needs_watch(&machine.group("/a"), &disk, change).unwrap()
    }

    fn burst(name: &str) -> LimitsChange {
        LimitsChange::of(&[(name, 1000), (&format!("{name}-max"), 2000)])
    }

    #[test]
    fn rates_alone_need_no_watch() {
        for name in ["bps-read", "bps-write", "iops-read", "iops-write"] {
            assert!(!needs_watch(&limits_change(name, 1000)), "{name}");
            assert!(needs_watch(&burst(name)), "{name}");
        }
        for name in ["bps-total", "iops-total"] {
            assert!(
                needs_watch(&limits_change(name, 1000)) && !needs_watch(&limits_change(name, 0)),
                "{name}"
            );
        }
        assert!(needs_watch(&LimitsChange { watermark: Some(90), ..LimitsChange::default() }));
        assert!(!needs_watch(&LimitsChange { watermark: Some(0), ..LimitsChange::default() }));
        assert!(needs_watch(&LimitsChange { group: Some("tenant".to_owned()), ..LimitsChange::default() }));
    }

    #[test]
    fn invalid_limits_are_rejected_first() {
        assert_eq!(limits(&limits_change("bps-write", 7)).unwrap().limit(LimitKind::BpsWrite).rate, 7);
        let error = limits(&limits_change("bps-write-max", 7)).unwrap_err().to_string();
        assert!(error.starts_with("bps-write-max"), "{error}");
    }
}
