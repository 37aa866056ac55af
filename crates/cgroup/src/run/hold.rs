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
use block::device::Identity;
use console::logging;
use policy::{
    steering::Rates,
    throttle::{Invalid, Limits},
};
use settings::{LogFormat, LogSettings, state::Store};

use crate::{
    control_group::{ControlGroup, Version},
    hierarchy::Hierarchy,
    limit,
    limit::{
        kept,
        kept::{Change, Kept},
        pools::Sharing,
        tell,
    },
    watch,
};

/// Limits in force. Dropping it removes them from the file; the kernel's remain with the cgroup.
pub(super) struct Held<'a> {
    hierarchy: &'a Hierarchy,
    group: ControlGroup,
    device: Option<&'a Identity>,
    /// Dropped first: it settles all limits before its file is removed.
    watch: Option<watch::Running>,
    /// The shared limits file, if the entry has to be removed from it.
    shared: Option<PathBuf>,
    /// Directory of the private limits file, removed when dropped.
    _own: Option<tempfile::TempDir>,
    pub(super) notices: Vec<String>,
}

pub(super) struct Places<'a> {
    /// Limits file; `None` for the default.
    pub(super) limits: Option<&'a Path>,
    /// Directory with results of `weir probe`; `None` for the default.
    pub(super) state: Option<&'a Path>,
}

/// Puts limits in force on a new cgroup; on an error none is in force.
pub(super) fn hold<'a>(
    hierarchy: &'a Hierarchy,
    group: &ControlGroup,
    device: Option<&'a Identity>,
    change: &Change,
    places: &Places<'_>,
) -> anyhow::Result<Held<'a>> {
    let mut held = Held {
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
            tell::tell(group, device.number(), Rates::NONE)?;
        }
        return Ok(held);
    }
    let device = device.context("limits are for a disk")?;
    let file = if change.group.as_ref().is_some_and(|name| !name.is_empty()) {
        let file = places.limits.unwrap_or(Path::new(kept::USUAL)).to_owned();
        held.shared = Some(file.clone());
        file
    } else {
        let own = tempfile::Builder::new().prefix("weir-cgroup.").tempdir();
        let own = own.context("the command's limits: there is no room for a file of them")?;
        let file = own.path().join("limits.json");
        held._own = Some(own);
        file
    };
    if group.version == Version::V2 && needs_watch(group, device, change)? {
        // Standard error belongs to the command: log warnings and errors only.
        logging::start(&LogSettings { filter: "warn".to_owned(), format: LogFormat::Text, file: None })?;
        // Started before the limits are set: `limit::set` would report that no watch runs.
        held.watch = Some(watch::Running::start_or_stand_by(&file, Store::new(places.state))?);
    }
    held.notices = limit::set(hierarchy, &file, group, device, change)?.notices;
    Ok(held)
}

impl Held<'_> {
    /// Stops steering, but keeps the entry in the file: the cgroup remains.
    pub(super) fn leave(mut self) {
        self.shared = None;
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        drop(self.watch.take());
        if let (Some(file), Some(device)) = (self.shared.take(), self.device) {
            // Fails if the limits were never set; then there is nothing to remove.
            let _ = limit::remove(self.hierarchy, &file, &self.group, device);
        }
    }
}

/// True if the kernel alone cannot enforce the change. A group always needs a watch, because it has
/// other members.
fn needs_watch(group: &ControlGroup, device: &Identity, change: &Change) -> anyhow::Result<bool> {
    let mut kept = Kept::default();
    kept.change(group, (device.number(), device.key()), change)?;
    Ok(!kept.groups.is_empty() || Sharing::all(&kept)?.iter().any(Sharing::needs_watch))
}

pub(super) fn limits(change: &Change) -> Result<Limits, Invalid> {
    let mut limits = Limits::default();
    change.limits.iter().try_for_each(|&(setting, value)| limits.set(setting, value))?;
    limits.validate()?;
    Ok(limits)
}

#[cfg(test)]
mod tests {
    use block::device::Number;
    use policy::throttle::LimitKind;

    use super::*;
    use crate::machine::Machine;

    fn asked(name: &str, value: u64) -> Change {
        Change::of(&[(name, value)])
    }

    fn needs_watch(change: &Change) -> bool {
        let machine = Machine::v2("io");
        machine.disk("254:0", "vda");
        let number = Number { major: 254, minor: 0 };
        let disk = Identity::resolve(number, &machine.roots().of_devices()).unwrap();
        super::needs_watch(&machine.group("/a"), &disk, change).unwrap()
    }

    fn burst(name: &str) -> Change {
        Change::of(&[(name, 1000), (&format!("{name}-max"), 2000)])
    }

    #[test]
    fn rates_alone_are_the_kernel_s_own_business() {
        for name in ["bps-read", "bps-write", "iops-read", "iops-write"] {
            assert!(!needs_watch(&asked(name, 1000)), "{name}");
            assert!(needs_watch(&burst(name)), "{name}");
        }
        for name in ["bps-total", "iops-total"] {
            assert!(needs_watch(&asked(name, 1000)) && !needs_watch(&asked(name, 0)), "{name}");
        }
        assert!(needs_watch(&Change { watermark: Some(90), ..Change::default() }));
        assert!(!needs_watch(&Change { watermark: Some(0), ..Change::default() }));
        assert!(needs_watch(&Change { group: Some("tenant".to_owned()), ..Change::default() }));
    }

    #[test]
    fn limits_that_break_a_rule_are_found_before_anything_is_made() {
        assert_eq!(limits(&asked("bps-write", 7)).unwrap().limit(LimitKind::BpsWrite).rate, 7);
        let said = limits(&asked("bps-write-max", 7)).unwrap_err().to_string();
        assert!(said.starts_with("bps-write-max"), "{said}");
    }
}
