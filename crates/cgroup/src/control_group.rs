//! One cgroup: its directory, files, processes and children.
//!
//! The value is a path, not a handle: another process may remove or recreate the cgroup between two
//! calls, which then fail with ENOENT or ENODEV. The kernel refuses to remove a cgroup in use.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};

/// The controllers of a cgroup of v2.
const CONTROLLERS_FILE: &str = "cgroup.controllers";
/// The controllers that are enabled for its children.
const SUBTREE_CONTROL_FILE: &str = "cgroup.subtree_control";

/// Polling interval until the last process has left: version 1 has no notification.
const POLL_INTERVAL: Duration = Duration::from_millis(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Version {
    /// One hierarchy for each controller; block I/O is in `blkio`.
    V1,
    /// One unified hierarchy; block I/O is in `io`.
    V2,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ControlGroup {
    pub(crate) version: Version,
    pub(crate) directory: PathBuf,
    /// Path below the mount point, such as `/system.slice/nginx.service`; `/` for the root.
    pub(crate) name: PathBuf,
}

impl ControlGroup {
    /// Reads a file of the cgroup. ENOENT or ENODEV: the cgroup was removed, or the controller is
    /// not enabled; EOPNOTSUPP: the feature is disabled, such as io.pressure with `psi=0`.
    pub(crate) fn read(&self, file: &str) -> io::Result<String> {
        fs::read_to_string(self.directory.join(file))
    }

    /// Writes with one write(2): the kernel parses each write on its own and applies it whole or
    /// not at all.
    pub(crate) fn write(&self, file: &str, text: &str) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).truncate(true).open(self.directory.join(file))?;
        let written = file.write(text.as_bytes())?;
        if written == text.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// Processes in the cgroup itself, without descendants. Processes of other PID namespaces,
    /// which the kernel lists as 0, are omitted.
    pub(crate) fn processes(&self) -> io::Result<Vec<i32>> {
        let text = self.read("cgroup.procs")?;
        let parse = |line: &str| {
            line.parse::<i32>()
                .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "cgroup.procs: not a pid"))
        };
        let mut processes = text.lines().map(parse).collect::<io::Result<Vec<_>>>()?;
        // Such a process cannot be examined or killed from here.
        processes.retain(|pid| *pid > 0);
        Ok(processes)
    }

    pub(crate) fn children(&self) -> io::Result<Vec<Self>> {
        let mut children = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                children.push(self.child(Path::new(&entry.file_name())));
            }
        }
        // The kernel's order is not fixed.
        children.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(children)
    }

    pub(crate) fn is_root(&self) -> bool {
        self.name.parent().is_none()
    }

    pub(crate) fn parent(&self) -> Option<Self> {
        let name = self.name.parent()?.to_owned();
        let directory = self.directory.parent()?.to_owned();
        Some(Self { version: self.version, directory, name })
    }

    pub(crate) fn create(parent: &Self, name: &str) -> io::Result<Self> {
        // The kernel rejects a newline, because files such as /proc/PID/cgroup list names by line.
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\n', '\0']) {
            let message = format!("{name:?} is no name for a cgroup");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let group = parent.child(Path::new(name));
        fs::create_dir(&group.directory)?;
        Ok(group)
    }

    pub(crate) fn remove(self) -> io::Result<()> {
        fs::remove_dir(&self.directory)
    }

    /// Removes the cgroup after its last process has left, or fails after `longest`. The kernel
    /// keeps a cgroup busy for a moment after its last process was reaped. Succeeds if the cgroup
    /// is already removed.
    pub(crate) fn remove_within(&self, longest: Duration) -> io::Result<()> {
        let begin = Instant::now();
        loop {
            match self.clone().remove() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && begin.elapsed() < longest => {
                    thread::sleep(POLL_INTERVAL);
                }
                removed => return removed,
            }
        }
    }

    pub(crate) fn exists(&self) -> bool {
        self.directory.is_dir()
    }

    pub(crate) fn has_file(&self, file: &str) -> bool {
        self.directory.join(file).exists()
    }

    pub(crate) fn controllers(&self) -> io::Result<Vec<String>> {
        Ok(words(&self.read(CONTROLLERS_FILE)?))
    }

    /// Enables controllers for the cgroup in all levels above; no effect in v1. If a lower level
    /// refuses, upper levels remain changed: an enabled controller without settings limits nothing.
    pub(crate) fn enable_controllers(&self, controllers: &[&str]) -> anyhow::Result<()> {
        if self.version == Version::V1 {
            return Ok(());
        }
        let available = self.controllers().with_context(|| self.read_context(CONTROLLERS_FILE))?;
        // Without a write if nothing is missing: an unprivileged user may then set limits, too.
        if controllers.iter().all(|wanted| available.iter().any(|name| name == wanted)) {
            return Ok(());
        }
        let mut above: Vec<_> = std::iter::successors(self.parent(), Self::parent).collect();
        // From the root down: a level can enable for its children only what its parent enabled for
        // it.
        above.reverse();
        for level in above {
            level.enable_in_subtree(controllers)?;
        }
        Ok(())
    }

    fn enable_in_subtree(&self, controllers: &[&str]) -> anyhow::Result<()> {
        let available = self.controllers().with_context(|| self.read_context(CONTROLLERS_FILE))?;
        let enabled =
            words(&self.read(SUBTREE_CONTROL_FILE).with_context(|| self.read_context(SUBTREE_CONTROL_FILE))?);
        let mut change = Vec::new();
        for &wanted in controllers {
            // Repeating `+io` would be harmless, but fails with EBUSY in a cgroup that has
            // processes.
            if enabled.iter().any(|name| name == wanted) {
                continue;
            }
            if !available.iter().any(|name| name == wanted) {
                bail!(
                    "cgroup {}: it has no {wanted} controller (the kernel lacks it, or it is bound \
                     to cgroup v1: see /proc/cgroups)",
                    self.name.display()
                );
            }
            change.push(format!("+{wanted}"));
        }
        if change.is_empty() {
            return Ok(());
        }
        let change = change.join(" ");
        self.write(SUBTREE_CONTROL_FILE, &change).map_err(|error| self.describe_refusal(&change, &error))
    }

    /// Source: cgroup-v2.rst, "No Internal Process Constraint" and "Threads".
    fn describe_refusal(&self, change: &str, error: &io::Error) -> anyhow::Error {
        let remedy = match error.raw_os_error().map(nix::errno::Errno::from_raw) {
            Some(nix::errno::Errno::EBUSY) => {
                "it has processes itself, and only the root may have both: move them into a child cgroup"
            }
            Some(nix::errno::Errno::EACCES | nix::errno::Errno::EPERM) => "run as root, or have it delegated",
            Some(nix::errno::Errno::EROFS) => "cgroups are mounted read-only here: do it on the host",
            Some(nix::errno::Errno::EOPNOTSUPP) => {
                "it is threaded, and this controller is for whole processes: see its cgroup.type"
            }
            Some(nix::errno::Errno::ENOENT | nix::errno::Errno::ENODEV) => "it has been removed",
            _ => "see the kernel's log",
        };
        anyhow!(
            "cgroup {}: {SUBTREE_CONTROL_FILE} refuses \"{change}\": {error} ({remedy})",
            self.name.display()
        )
    }

    fn read_context(&self, file: &str) -> String {
        format!("cgroup {}: {file} cannot be read", self.name.display())
    }

    fn child(&self, name: &Path) -> Self {
        Self { version: self.version, directory: self.directory.join(name), name: self.name.join(name) }
    }
}

fn words(text: &str) -> Vec<String> {
    text.split_ascii_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
#[path = "control_group_tests.rs"]
mod tests;
