//! One cgroup: its directory, the files in it, its processes and children.
//!
//! A value that names a cgroup, and no handle: between two calls it may be removed, and another be
//! made under its name. Every call says so by its error.
//!
//! Never moves a process, and never removes a cgroup with anything in it: the kernel refuses.

use std::{
    fs::{self, OpenOptions},
    io::{self, Write as _},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, anyhow, bail};

/// What cgroup v2 lists the controllers in that a cgroup has.
const CONTROLLERS: &str = "cgroup.controllers";
/// What it lists those in that its children have.
const SUBTREE: &str = "cgroup.subtree_control";

/// How often a cgroup that its last process is leaving is looked at; version 1 tells nobody.
const LOOK: Duration = Duration::from_millis(1);

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Version {
    /// A hierarchy for each controller: `blkio`.
    V1,
    /// One for all: `io`.
    V2,
}

/// A cgroup in the hierarchy that limits block I/O.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) struct ControlGroup {
    pub(crate) version: Version,
    pub(crate) directory: PathBuf,
    /// Its path from the mount, such as `/system.slice/nginx.service`; `/` for the root.
    pub(crate) name: PathBuf,
}

impl ControlGroup {
    /// The text of one of its files.
    ///
    /// # Errors
    /// If it cannot be read: the cgroup is gone (ENOENT, or ENODEV while it goes), the controller
    /// is not enabled here (ENOENT), or the kernel has the file but not what is behind it
    /// (EOPNOTSUPP, as io.pressure with `psi=0`).
    pub(crate) fn read(&self, file: &str) -> io::Result<String> {
        fs::read_to_string(self.directory.join(file))
    }

    /// Writes to one of its files, by one write(2): the kernel takes each as a command of its own.
    ///
    /// # Errors
    /// The kernel's, which means that nothing of the text was taken.
    pub(crate) fn write(&self, file: &str, text: &str) -> io::Result<()> {
        let mut file = OpenOptions::new().write(true).truncate(true).open(self.directory.join(file))?;
        let written = file.write(text.as_bytes())?;
        if written == text.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
    }

    /// The processes in it, not those of its descendants. Those of other PID namespaces, which have
    /// no number here, are left out.
    pub(crate) fn processes(&self) -> io::Result<Vec<i32>> {
        let text = self.read("cgroup.procs")?;
        let parse = |line: &str| {
            line.parse::<i32>()
                .map_err(|_| io::Error::new(io::ErrorKind::InvalidData, "cgroup.procs: not a pid"))
        };
        let mut processes = text.lines().map(parse).collect::<io::Result<Vec<_>>>()?;
        processes.retain(|pid| *pid > 0);
        Ok(processes)
    }

    /// The cgroups directly below, by name.
    pub(crate) fn children(&self) -> io::Result<Vec<Self>> {
        let mut children = Vec::new();
        for entry in fs::read_dir(&self.directory)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                children.push(self.child(Path::new(&entry.file_name())));
            }
        }
        children.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(children)
    }

    /// Whether it is the topmost that can be seen.
    pub(crate) fn is_root(&self) -> bool {
        self.name.parent().is_none()
    }

    pub(crate) fn parent(&self) -> Option<Self> {
        let name = self.name.parent()?.to_owned();
        let directory = self.directory.parent()?.to_owned();
        Some(Self { version: self.version, directory, name })
    }

    /// Makes a cgroup below another.
    ///
    /// # Errors
    /// If the name is not that of a directory (no slash, not `..`), or the kernel's: it exists, may
    /// not be made here, or there are too many.
    pub(crate) fn create(parent: &Self, name: &str) -> io::Result<Self> {
        // A newline is what the kernel refuses, since names are in files of lines.
        if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\n', '\0']) {
            let message = format!("{name:?} is no name for a cgroup");
            return Err(io::Error::new(io::ErrorKind::InvalidInput, message));
        }
        let group = parent.child(Path::new(name));
        fs::create_dir(&group.directory)?;
        Ok(group)
    }

    /// Removes it.
    ///
    /// # Errors
    /// If a process or a cgroup is in it (EBUSY), or it may not be removed.
    pub(crate) fn remove(self) -> io::Result<()> {
        fs::remove_dir(&self.directory)
    }

    /// Removes it as soon as its last process has left it: one that was waited for is gone before
    /// the kernel has taken it out. One that is not there any more is no error.
    ///
    /// # Errors
    /// As [`remove`](Self::remove), after so long.
    pub(crate) fn remove_within(&self, longest: Duration) -> io::Result<()> {
        let begin = Instant::now();
        loop {
            match self.clone().remove() {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
                Err(error) if error.kind() == io::ErrorKind::ResourceBusy && begin.elapsed() < longest => {
                    thread::sleep(LOOK);
                }
                removed => return removed,
            }
        }
    }

    pub(crate) fn exists(&self) -> bool {
        self.directory.is_dir()
    }

    /// Whether it has a file of this name, which depends on its controllers.
    pub(crate) fn has(&self, file: &str) -> bool {
        self.directory.join(file).exists()
    }

    /// The controllers that this cgroup has; of v2.
    pub(crate) fn controllers(&self) -> io::Result<Vec<String>> {
        Ok(words(&self.read(CONTROLLERS)?))
    }

    /// Has the levels above hand these controllers down, so that this cgroup has them. Of v1, where
    /// a cgroup has what its hierarchy has, nothing is done.
    ///
    /// What has been enabled stays so, also if a lower level refuses: controllers without settings
    /// limit nothing.
    ///
    /// # Errors
    /// If a level refuses; it says which and why.
    pub(crate) fn enable(&self, controllers: &[&str]) -> anyhow::Result<()> {
        if self.version == Version::V1 {
            return Ok(());
        }
        let has = self.controllers().with_context(|| self.about(CONTROLLERS))?;
        if controllers.iter().all(|wanted| has.iter().any(|name| name == wanted)) {
            return Ok(());
        }
        let mut above: Vec<_> = std::iter::successors(self.parent(), Self::parent).collect();
        above.reverse();
        for level in above {
            level.hand_down(controllers)?;
        }
        Ok(())
    }

    fn hand_down(&self, controllers: &[&str]) -> anyhow::Result<()> {
        let has = self.controllers().with_context(|| self.about(CONTROLLERS))?;
        let hands_down = words(&self.read(SUBTREE).with_context(|| self.about(SUBTREE))?);
        let mut change = Vec::new();
        for &wanted in controllers {
            if hands_down.iter().any(|name| name == wanted) {
                continue;
            }
            if !has.iter().any(|name| name == wanted) {
                bail!(
                    "cgroup {}: it has no {wanted} controller (the kernel lacks it, or it is bound to cgroup v1: see \
                     /proc/cgroups)",
                    self.name.display()
                );
            }
            change.push(format!("+{wanted}"));
        }
        if change.is_empty() {
            return Ok(());
        }
        let change = change.join(" ");
        self.write(SUBTREE, &change).map_err(|error| self.refusal(&change, &error))
    }

    /// Why a level does not hand controllers down: cgroup-v2.rst, "No Internal Process Constraint"
    /// and "Threads".
    fn refusal(&self, change: &str, error: &io::Error) -> anyhow::Error {
        let mend = match error.raw_os_error().map(nix::errno::Errno::from_raw) {
            Some(nix::errno::Errno::EBUSY) => {
                "it has processes of its own, and only the root may have both: move them into a child of it"
            }
            Some(nix::errno::Errno::EACCES | nix::errno::Errno::EPERM) => "run as root, or have it delegated",
            Some(nix::errno::Errno::EROFS) => "cgroups are mounted read-only here: do it on the host",
            Some(nix::errno::Errno::EOPNOTSUPP) => {
                "it is of threads, which take no such controller: see its cgroup.type"
            }
            Some(nix::errno::Errno::ENOENT | nix::errno::Errno::ENODEV) => "it has been removed",
            _ => "see the kernel's log",
        };
        anyhow!("cgroup {}: {SUBTREE} refuses \"{change}\": {error} ({mend})", self.name.display())
    }

    fn about(&self, file: &str) -> String {
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
mod tests;
