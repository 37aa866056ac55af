//! The cgroup of one command: creation and removal.
//!
//! ```text
//!   version 2   /sys/fs/cgroup/weir/run-PID          or below --parent
//!   version 1   /sys/fs/cgroup/blkio/weir/run-PID
//! ```
//!
//! All are below one cgroup without processes, as version 2 requires. Later commands remove cgroups
//! that were left for processes that outlived theirs. The kernel refuses to remove a cgroup with a
//! process.

use std::{
    io,
    path::{Path, PathBuf},
    process, thread,
    time::Duration,
};

use anyhow::{anyhow, bail};
use console::print_error;
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::{
    control_group::{ControlGroup, Version},
    hierarchy::CgroupHierarchy,
};

/// Name of the common parent, below the root.
const PARENT: &str = "weir";
/// Prefix of the name, followed by the pid of its creator.
const PREFIX: &str = "run-";

/// Attempts to create a cgroup while other commands keep removing [`PARENT`].
const TRIES: usize = 100;

/// Total time to wait for killed processes. A process blocked in a device driver does not die.
const KILL_TIMEOUT: Duration = Duration::from_secs(10);
const POLL_INTERVAL: Duration = Duration::from_millis(10);
const REMOVAL_TIMEOUT: Duration = Duration::from_secs(1);

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct RemainingCgroup {
    pub(super) directory: PathBuf,
    pub(super) processes: Vec<i32>,
}

/// Removed when dropped, if the kernel permits.
pub(super) struct CommandCgroup {
    group: ControlGroup,
    /// True if the parent is [`PARENT`], which is removed with its last child.
    has_default_parent: bool,
}

impl CommandCgroup {
    /// Creates the cgroup and enables the controllers for limits; on an error nothing remains.
    pub(super) fn make(
        hierarchy: &CgroupHierarchy,
        parent: Option<ControlGroup>,
        name: Option<&str>,
    ) -> anyhow::Result<Self> {
        let is_ours_above = parent.is_none();
        let default_name = format!("{PREFIX}{}", process::id());
        let name = name.unwrap_or(&default_name);
        let group = match parent {
            Some(parent) => create(&parent, name)?,
            None => create_below_default_parent(hierarchy, name)?,
        };
        let cgroup = Self { group, has_default_parent: is_ours_above };
        let root = hierarchy.root_group()?;
        if root.version == Version::V2 {
            // Without memory the kernel cannot attribute dirty pages, and no limit applies to
            // buffered writes.
            let has_memory =
                root.controllers().is_ok_and(|controllers| controllers.iter().any(|name| name == "memory"));
            let wanted: &[&str] = if has_memory { &["io", "memory"] } else { &["io"] };
            cgroup.group.enable_controllers(wanted)?;
        }
        Ok(cgroup)
    }

    pub(super) fn group(&self) -> &ControlGroup {
        &self.group
    }

    /// Processes still in or below the cgroup; with `kill`, only those that survive SIGKILL.
    pub(super) fn end(&self, kill: bool) -> Vec<i32> {
        if kill { kill_all(&self.group) } else { processes_below(&self.group) }
    }

    /// Removes the cgroup, unless it contains these processes.
    pub(super) fn remove(self, processes: Vec<i32>) -> Option<RemainingCgroup> {
        if processes.is_empty() {
            match remove_all(&self.group, REMOVAL_TIMEOUT) {
                Ok(()) => return None,
                Err(error) => print_error(&anyhow::Error::new(error).context(format!(
                    "cgroup {}: cannot be removed (remove it with rmdir {})",
                    self.group.name.display(),
                    self.group.directory.display()
                ))),
            }
        }
        Some(RemainingCgroup { directory: self.group.directory.clone(), processes })
    }
}

impl Drop for CommandCgroup {
    fn drop(&mut self) {
        // Already removed in the normal case; with a process in it, it remains.
        let _ = remove_all(&self.group, Duration::ZERO);
        if let Some(parent) = self.group.parent().filter(|_| self.has_default_parent) {
            // Fails while another command's cgroup is below it.
            let _ = parent.remove();
        }
    }
}

/// Creates the cgroup below [`PARENT`], which another command may remove at any moment with its own
/// cgroup; then tries again.
fn create_below_default_parent(hierarchy: &CgroupHierarchy, name: &str) -> anyhow::Result<ControlGroup> {
    let parent = hierarchy.group(Path::new(PARENT))?;
    for _ in 0..TRIES {
        match ControlGroup::create(&hierarchy.root_group()?, PARENT) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
                return Err(creation_error(&parent.name, &error));
            }
            // The parent exists: created now or earlier.
            Ok(_) | Err(_) => remove_stale(&parent, &hierarchy.roots.proc),
        }
        match ControlGroup::create(&parent, name) {
            // Another command removed the parent since.
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            made => return made.map_err(|error| creation_error(&parent.name.join(name), &error)),
        }
    }
    bail!("cgroup {}: other commands keep removing it (give --parent)", parent.name.display())
}

fn create(parent: &ControlGroup, name: &str) -> anyhow::Result<ControlGroup> {
    ControlGroup::create(parent, name).map_err(|error| creation_error(&parent.name.join(name), &error))
}

fn creation_error(name: &Path, error: &io::Error) -> anyhow::Error {
    let remedy = match error.kind() {
        io::ErrorKind::AlreadyExists => "give another --name",
        io::ErrorKind::PermissionDenied => "run as root, or give a --parent that is delegated to you",
        io::ErrorKind::ReadOnlyFilesystem => "cgroups are mounted read-only here: do it on the host",
        _ => "give another --name or --parent",
    };
    anyhow!("cgroup {}: cannot be created: {error} ({remedy})", name.display())
}

/// Removes cgroups left by commands whose weir process has ended.
fn remove_stale(parent: &ControlGroup, proc: &Path) {
    for group in parent.children().unwrap_or_default() {
        let name = group.name.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        // Names given by `--name` are never swept.
        let pid = name.strip_prefix(PREFIX).filter(|pid| pid.parse::<u32>().is_ok());
        if pid.is_some_and(|pid| !proc.join(pid).exists()) {
            let _ = remove_all(&group, Duration::ZERO);
        }
    }
}

/// Removes a cgroup and its descendants; waits up to `longest` for the last processes of each.
fn remove_all(group: &ControlGroup, longest: Duration) -> io::Result<()> {
    for child in group.children()? {
        remove_all(&child, longest)?;
    }
    group.remove_within(longest)
}

fn processes_below(group: &ControlGroup) -> Vec<i32> {
    let mut processes = group.processes().unwrap_or_default();
    for child in group.children().unwrap_or_default() {
        processes.extend(processes_below(&child));
    }
    processes
}

/// Kills all processes in or below a cgroup; returns the survivors.
fn kill_all(group: &ControlGroup) -> Vec<i32> {
    let mut waited = Duration::ZERO;
    loop {
        let processes = processes_below(group);
        if processes.is_empty() || waited >= KILL_TIMEOUT {
            return processes;
        }
        // cgroup.kill (version 2, since Linux 5.14) also catches processes that are being forked.
        if group.write("cgroup.kill", "1").is_err() {
            for &pid in &processes {
                // Fails if the process has exited since.
                let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
            }
        }
        // Polling: these are no children of weir, and version 1 has no notification of an empty
        // cgroup.
        thread::sleep(POLL_INTERVAL);
        waited += POLL_INTERVAL;
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::fake_machine::FakeMachine;

    /// A machine of version 1, where cgroups are plain directories, on which this process runs.
    fn machine() -> FakeMachine {
        let machine = FakeMachine::v1();
        machine.process(process::id().cast_signed(), "7:blkio:/\n");
        machine
    }

    fn groups(machine: &FakeMachine) -> Vec<PathBuf> {
        let mut found = vec![machine.hierarchy().root_group().unwrap()];
        let mut next = 0;
        while next < found.len() {
            found.extend(found[next].children().unwrap());
            next += 1;
        }
        found.into_iter().skip(1).map(|group| group.name).collect()
    }

    fn made(machine: &FakeMachine, name: Option<&str>) -> anyhow::Result<CommandCgroup> {
        CommandCgroup::make(&machine.hierarchy(), None, name)
    }

    #[test]
    fn default_parent_is_removed_with_the_last_child() {
        let machine = machine();
        let cgroup = made(&machine, None).unwrap();
        let run_path = PathBuf::from(format!("/weir/run-{}", process::id()));
        assert_eq!(groups(&machine), [PathBuf::from("/weir"), run_path]);
        let second = made(&machine, Some("second")).unwrap();
        ControlGroup::create(second.group(), "of the command").unwrap();
        assert_eq!(second.remove(Vec::new()), None);
        assert_eq!(groups(&machine).len(), 2, "the other is still there");
        drop(cgroup);
        assert!(groups(&machine).is_empty());
    }

    #[test]
    fn duplicate_and_invalid_names_are_rejected() {
        let machine = machine();
        let _first = made(&machine, Some("a")).unwrap();
        for name in ["a", "..", "b/c", ""] {
            let error = format!("{:#}", made(&machine, Some(name)).map(drop).unwrap_err());
            assert!(error.contains("cannot be created") && error.contains("--name"), "{name}: {error}");
        }
        assert_eq!(groups(&machine).len(), 2);
    }

    #[test]
    fn stale_cgroups_are_removed_when_empty() {
        let machine = machine();
        let parent = machine.root().join("weir");
        for name in ["run-100", "run-200", "run-300", "by hand"] {
            fs::create_dir_all(parent.join(name)).unwrap();
        }
        machine.process(200, "7:blkio:/weir/run-200\n");
        // Stands for a process: the file keeps the directory from being removed.
        fs::write(parent.join("run-300/cgroup.procs"), "7\n").unwrap();
        let _place = made(&machine, Some("new")).unwrap();
        let remaining = ["/weir", "/weir/by hand", "/weir/new", "/weir/run-200", "/weir/run-300"];
        assert_eq!(groups(&machine), remaining.map(PathBuf::from));
    }

    #[test]
    fn processes_that_outlive_the_command_keep_it() {
        let machine = machine();
        let cgroup = made(&machine, Some("a")).unwrap();
        let directory = cgroup.group().directory.clone();
        fs::create_dir(directory.join("below")).unwrap();
        fs::write(directory.join("below/cgroup.procs"), "7\n8\n").unwrap();
        let processes = cgroup.end(false);
        assert_eq!(processes, [7, 8]);
        assert_eq!(cgroup.remove(processes), Some(RemainingCgroup { directory, processes: vec![7, 8] }));
        assert_eq!(groups(&machine).len(), 3);
    }
}
