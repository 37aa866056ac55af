//! A snapshot of the requested cgroups and their descendants.
//!
//! Cgroups without limits and I/O are skipped, unless named or all are requested. A cgroup that is
//! created or removed meanwhile may be missed.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::bail;
use block::device::DeviceNumber;

use super::{
    rates::{CgroupSnapshot, RowOptions, SnapshotGroup},
    reading, tasks,
};
use crate::{
    control_group::ControlGroup,
    device,
    hierarchy::CgroupHierarchy,
    limit::limits_file::{CgroupEntry, LimitsFile},
    target,
};

pub(super) struct CgroupSurvey {
    hierarchy: CgroupHierarchy,
    named: Vec<ControlGroup>,
    limits: PathBuf,
    device: Option<DeviceNumber>,
    has_all: bool,
    pub(super) notices: Vec<String>,
    began: Instant,
}

impl CgroupSurvey {
    /// Selects these cgroups and their descendants, or all; `has_all` includes those without limits
    /// and I/O.
    pub(super) fn new(
        hierarchy: CgroupHierarchy,
        limits: &Path,
        groups: &[String],
        device: Option<&str>,
        has_all: bool,
    ) -> anyhow::Result<Self> {
        let mut named = groups
            .iter()
            .map(|group| target::resolve(&hierarchy, group))
            .collect::<anyhow::Result<Vec<_>>>()?;
        if named.is_empty() {
            named.push(hierarchy.root_group()?);
        }
        let device = device.map(|device| device::resolve(&hierarchy.roots, device)).transpose()?;
        Ok(Self {
            named,
            limits: limits.to_owned(),
            device: device.as_ref().map(|target| target.identity.number()),
            has_all,
            notices: device.map(|target| target.notices).unwrap_or_default(),
            began: Instant::now(),
            hierarchy,
        })
    }

    /// Notices about limits whose cgroup was removed.
    pub(super) fn missing(&self, limits_file: &LimitsFile) -> Vec<String> {
        let is_missing =
            |entry: &&CgroupEntry| !self.hierarchy.group(&entry.cgroup).is_ok_and(|group| group.exists());
        let line = |entry: &CgroupEntry| {
            let (cgroup, device) = (entry.cgroup.display(), entry.device_text());
            format!(
                "{cgroup} was removed; its limits on {device} are kept for a new cgroup of this \
                 name (remove them: `weir cgroup limit {cgroup} --device {device} --remove`)"
            )
        };
        limits_file.limits.iter().filter(is_missing).map(line).collect()
    }

    pub(super) fn row_options(&self) -> RowOptions {
        RowOptions {
            device: self.device,
            are_waits_counted: tasks::has_delay_accounting(&self.hierarchy.roots.proc),
        }
    }

    /// Takes a snapshot, which includes the errors of single cgroups; fails if all named cgroups
    /// were removed.
    pub(super) fn snapshot(&self, has_tasks: bool) -> anyhow::Result<CgroupSnapshot> {
        let mut snapshot = CgroupSnapshot { at: self.began.elapsed(), ..CgroupSnapshot::default() };
        // An unreadable limits file does not hide the kernel's counters.
        match LimitsFile::load(&self.limits) {
            Ok(limits_file) => snapshot.limits_file = limits_file,
            Err(error) => snapshot.errors.push(format!("{error:#}")),
        }
        // By name, so that a cgroup below two named ones appears once.
        let mut found = BTreeMap::new();
        // The waiting time of tasks is the best lower bound of a cgroup's.
        let has_tasks = has_tasks || self.row_options().are_waits_counted;
        for group in &self.named {
            self.gather(group, true, has_tasks, &mut found, &mut snapshot);
        }
        if found.is_empty() && !self.named.iter().any(ControlGroup::exists) {
            let names: Vec<_> = self.named.iter().map(|group| group.name.display().to_string()).collect();
            bail!("cgroup {}: removed meanwhile", names.join(", "));
        }
        snapshot.groups = found.into_values().collect();
        Ok(snapshot)
    }

    fn gather(
        &self,
        group: &ControlGroup,
        is_named: bool,
        has_tasks: bool,
        found: &mut BTreeMap<PathBuf, SnapshotGroup>,
        snapshot: &mut CgroupSnapshot,
    ) {
        match self.read_group(group, is_named, has_tasks, &snapshot.limits_file) {
            Ok(Some(seen)) => drop(found.insert(group.name.clone(), seen)),
            Ok(None) => {}
            Err(error) => snapshot.errors.push(format!("{error:#}")),
        }
        // Removed meanwhile: then it has no descendants either.
        for child in group.children().unwrap_or_default() {
            self.gather(&child, false, has_tasks, found, snapshot);
        }
    }

    fn read_group(
        &self,
        group: &ControlGroup,
        is_named: bool,
        has_tasks: bool,
        limits_file: &LimitsFile,
    ) -> anyhow::Result<Option<SnapshotGroup>> {
        let Some(mut reading) = reading::read(group)? else { return Ok(None) };
        // Configured limits are shown even if the kernel has no limit at present.
        for entry in limits_file.limits.iter().filter(|entry| entry.cgroup == group.name) {
            reading.devices.entry(entry.device()?).or_default();
        }
        let has_devices = match self.device {
            Some(device) => reading.devices.contains_key(&device),
            None => !reading.devices.is_empty(),
        };
        // Named cgroups are always shown.
        if !is_named && !has_devices && !self.has_all {
            return Ok(None);
        }
        let tasks = if has_tasks { tasks::read(group, &self.hierarchy.roots.proc)? } else { BTreeMap::new() };
        Ok(Some(SnapshotGroup { name: group.name.clone(), reading, tasks }))
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::fake_machine::FakeMachine;

    fn machine(groups: &[(&str, &str)]) -> FakeMachine {
        let machine = FakeMachine::v2("cpu io memory");
        for (name, stat) in [("/", "")].iter().chain(groups) {
            machine.group(name);
            machine.write(name, "io.stat", stat);
        }
        machine
    }

    const WROTE: &str = "8:0 rbytes=0 wbytes=4096 rios=0 wios=1\n";

    const NO_LIMITS: &str = "/nowhere";

    fn survey(
        machine: &FakeMachine,
        limits: impl AsRef<Path>,
        groups: &[&str],
        has_all: bool,
    ) -> CgroupSurvey {
        let groups: Vec<String> = groups.iter().map(|&group| group.to_owned()).collect();
        CgroupSurvey::new(machine.hierarchy(), limits.as_ref(), &groups, None, has_all).unwrap()
    }

    fn names(snapshot: &CgroupSnapshot) -> Vec<String> {
        snapshot.groups.iter().map(|seen| seen.name.display().to_string()).collect()
    }

    #[test]
    fn busy_cgroups_below_the_named_ones_are_listed() {
        let machine = machine(&[("/a", ""), ("/a/b", WROTE), ("/a/b/c", ""), ("/d", WROTE)]);
        let listed = |groups: &[&str], has_all| {
            names(&survey(&machine, NO_LIMITS, groups, has_all).snapshot(false).unwrap())
        };
        assert_eq!(listed(&[], false), ["/", "/a/b", "/d"]);
        assert_eq!(listed(&["/a"], false), ["/a", "/a/b"]);
        assert_eq!(listed(&["/a/b", "/a"], false), ["/a", "/a/b"], "once each");
        assert_eq!(listed(&["/a"], true), ["/a", "/a/b", "/a/b/c"]);
    }

    #[test]
    fn configured_limits_are_shown_without_kernel_limits() {
        let machine = machine(&[("/a", ""), ("/b", "")]);
        let file = machine.path("limits.json");
        let text = r#"{"limits": [{"cgroup": "/a", "device": "8:16", "device-key": "x", "own": {"limits": {"bps-read": 7}}}]}"#;
        fs::write(&file, text).unwrap();
        let snapshot = survey(&machine, &file, &[], false).snapshot(false).unwrap();
        assert_eq!(names(&snapshot), ["/", "/a"]);
        let device = DeviceNumber { major: 8, minor: 16 };
        assert!(snapshot.groups[1].reading.devices.contains_key(&device));
    }

    #[test]
    fn unreadable_cgroup_does_not_hide_others() {
        let machine = machine(&[("/a", "what is this\n"), ("/b", WROTE)]);
        let snapshot = survey(&machine, NO_LIMITS, &[], false).snapshot(false).unwrap();
        assert_eq!(names(&snapshot), ["/", "/b"]);
        assert_eq!(snapshot.errors.len(), 1);
        assert!(snapshot.errors[0].starts_with("cgroup /a: io.stat: "), "{:?}", snapshot.errors);
    }

    #[test]
    fn survey_fails_once_all_named_cgroups_are_removed() {
        let machine = machine(&[("/a", WROTE), ("/b", WROTE)]);
        let survey = survey(&machine, NO_LIMITS, &["/a", "/b"], false);
        fs::remove_dir_all(machine.root().join("a")).unwrap();
        assert_eq!(names(&survey.snapshot(false).unwrap()), ["/b"]);
        fs::remove_dir_all(machine.root().join("b")).unwrap();
        let error = survey.snapshot(false).unwrap_err().to_string();
        assert_eq!(error, "cgroup /a, /b: removed meanwhile");
    }
}
