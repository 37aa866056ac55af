//! Mounts of the cgroup hierarchies, and the version that limits block I/O.
//!
//! ```text
//!   unified   /sys/fs/cgroup           cgroup2                        v2 limits block I/O
//!   hybrid    /sys/fs/cgroup/unified   cgroup2, without `io`
//!             /sys/fs/cgroup/blkio     cgroup, with blkio             v1 limits block I/O
//! ```
//!
//! A controller is in one hierarchy at a time, so at most one version limits block I/O. mountinfo
//! has the mount points, cgroup.controllers the controllers (cgroups(7)). Read once, at the start:
//! controllers cannot move while in use.

use std::{
    fs, io,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail};

use super::{
    control_group::{ControlGroup, Version},
    kernel::{mountinfo, proc_cgroup},
};

/// Roots of the kernel's file systems; tests use other directories.
#[derive(Debug, Clone)]
pub(crate) struct KernelRoots {
    pub(crate) proc: PathBuf,
    pub(crate) sys: PathBuf,
    /// `/run`, where systemd marks that it is running.
    pub(crate) run: PathBuf,
}

impl Default for KernelRoots {
    fn default() -> Self {
        Self { proc: "/proc".into(), sys: "/sys".into(), run: "/run".into() }
    }
}

impl KernelRoots {
    pub(crate) fn mounts(&self) -> anyhow::Result<Vec<mountinfo::Mount>> {
        let path = self.mountinfo();
        let text = read(&path).with_context(|| path.display().to_string())?;
        Ok(mountinfo::parse(&text)?)
    }

    pub(crate) fn device_roots(&self) -> block::device::SysfsRoots {
        block::device::SysfsRoots { sys: self.sys.clone(), mounts: self.mountinfo() }
    }

    pub(crate) fn mountinfo(&self) -> PathBuf {
        self.proc.join("self/mountinfo")
    }
}

/// Reads a file as UTF-8, lossily: a name that is not UTF-8 does not hide the rest.
fn read(path: &Path) -> io::Result<String> {
    Ok(String::from_utf8_lossy(&fs::read(path)?).into_owned())
}

/// The mounted hierarchies that are relevant for block I/O.
#[derive(Debug, Clone)]
pub(crate) struct CgroupHierarchy {
    pub(crate) roots: KernelRoots,
    pub(crate) unified: Option<PathBuf>,
    pub(crate) blkio: Option<PathBuf>,
    pub(crate) memory_v1: Option<PathBuf>,
    version: Option<Version>,
    /// The cgroup mounted at [`CgroupHierarchy::root`]; differs from `/` in a container without a
    /// cgroup namespace.
    top: PathBuf,
}

impl CgroupHierarchy {
    /// Reads the mounts. Succeeds without any cgroup mount; [`CgroupHierarchy::root_group`] then
    /// fails.
    pub(crate) fn discover(roots: KernelRoots) -> anyhow::Result<Self> {
        let mounts = roots.mounts()?;
        // The first mount is the machine's own; those of containers follow.
        let v2 = mounts.iter().find(|mount| mount.kind == "cgroup2");
        let v1 = |controller| {
            mounts.iter().find(|mount| mount.kind == "cgroup" && mount.option(controller).is_some())
        };
        let blkio = v1("blkio");
        let has_io = v2.is_some_and(|mount| {
            let controllers = read(&mount.point.join("cgroup.controllers")).unwrap_or_default();
            controllers.split_ascii_whitespace().any(|controller| controller == "io")
        });
        // Each controller is in one hierarchy only; v2 without io and v1 with blkio is the hybrid
        // layout.
        let (version, mount) = match (has_io, blkio) {
            (true, _) => (Some(Version::V2), v2),
            (false, Some(_)) => (Some(Version::V1), blkio),
            (false, None) => (None, None),
        };
        let point = |mount: Option<&mountinfo::Mount>| mount.map(|mount| mount.point.clone());
        Ok(Self {
            unified: point(v2),
            blkio: point(blkio),
            memory_v1: point(v1("memory")),
            version,
            top: mount.map_or_else(|| "/".into(), |mount| mount.root.clone()),
            roots,
        })
    }

    pub(crate) fn version(&self) -> Option<Version> {
        self.version
    }

    pub(crate) fn root(&self) -> Option<&Path> {
        match self.version? {
            Version::V1 => self.blkio.as_deref(),
            Version::V2 => self.unified.as_deref(),
        }
    }

    pub(crate) fn root_group(&self) -> anyhow::Result<ControlGroup> {
        let (Some(version), Some(root)) = (self.version, self.root()) else {
            bail!(
                "cgroups: no mounted hierarchy has a controller for block I/O (mount cgroup v2, as \
                 `mount -t cgroup2 none /sys/fs/cgroup`, on a kernel with CONFIG_BLK_CGROUP, and not with \
                 cgroup_disable=io)"
            )
        };
        Ok(ControlGroup { version, directory: root.to_owned(), name: "/".into() })
    }

    /// The cgroup with a name such as `/system.slice/x.service`, existing or not.
    pub(crate) fn group(&self, name: &Path) -> anyhow::Result<ControlGroup> {
        // Component by component, so that `..` in a name cannot lead out of the mount.
        let mut group = self.root_group()?;
        for component in name.components() {
            match component {
                Component::RootDir | Component::CurDir => {}
                Component::Normal(part) => {
                    group.directory.push(part);
                    group.name.push(part);
                }
                Component::ParentDir | Component::Prefix(_) => {
                    bail!("cgroup {name:?}: it contains \"..\" (write the path without)")
                }
            }
        }
        Ok(group)
    }

    /// The cgroup of a process in the hierarchy that limits block I/O.
    pub(crate) fn group_of_pid(&self, pid: i32) -> anyhow::Result<ControlGroup> {
        let root = self.root_group()?;
        let file = self.roots.proc.join(pid.to_string()).join("cgroup");
        let text = read(&file).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => anyhow!("process {pid}: does not exist (it may have ended)"),
            _ => anyhow!("{}: {error}", file.display()),
        })?;
        let memberships = proc_cgroup::parse(&text)?;
        // Hierarchy 0 is v2 (cgroups(7)).
        let here = memberships.iter().find(|membership| match root.version {
            Version::V2 => membership.hierarchy == 0,
            Version::V1 => membership.controllers.iter().any(|name| name == "blkio"),
        });
        let path = &here.with_context(|| format!("{}: has no cgroup for block I/O", file.display()))?.path;
        let outside = || {
            format!(
                "process {pid}: its cgroup {} is outside of the mount {} (run it on the host, or \
                 in its container)",
                path.display(),
                root.directory.display()
            )
        };
        // The kernel prints paths from the root of the namespace; the mount may show a subtree
        // only.
        let name = path.strip_prefix(&self.top).ok().with_context(outside)?;
        let group = self.group(name).ok().with_context(outside)?;
        if !group.exists() {
            bail!("process {pid}: its cgroup {} has been removed (it is about to end)", path.display());
        }
        Ok(group)
    }

    /// True if systemd is the init system (sd_booted(3)).
    pub(crate) fn has_systemd(&self) -> bool {
        self.roots.run.join("systemd/system").is_dir()
    }
}

#[cfg(test)]
#[path = "hierarchy_tests.rs"]
mod tests;
