//! Cgroups of a process: /proc/PID/cgroup.
//!
//! ```text
//!   7:blkio:/system.slice            cgroup v1: a hierarchy's number, its controllers, the path from its root
//!   1:name=systemd:/user.slice       a named hierarchy without controllers
//!   0::/user.slice/session-1.scope   cgroup v2
//! ```
//!
//! Paths outside the reader's cgroup namespace begin with `/..`; that of a removed cgroup (its last
//! process is a zombie) ends in ` (deleted)`. Source: cgroups(7), cgroup_namespaces(7).

use std::path::PathBuf;

use super::{UnknownFormat, count};

const FILE: &str = "/proc/PID/cgroup";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct CgroupMembership {
    /// Number of the hierarchy; 0 for cgroup v2.
    pub(crate) hierarchy: u32,
    /// Empty for cgroup v2; `name=systemd` for a named hierarchy.
    pub(crate) controllers: Vec<String>,
    /// Path from the hierarchy's root.
    pub(crate) path: PathBuf,
}

pub(crate) fn parse(text: &str) -> Result<Vec<CgroupMembership>, UnknownFormat> {
    text.lines().map(|line| parse_line(line).ok_or_else(|| UnknownFormat::new(FILE, line))).collect()
}

fn parse_line(line: &str) -> Option<CgroupMembership> {
    // At most three fields: a cgroup's name may contain colons.
    let mut fields = line.splitn(3, ':');
    let hierarchy = count(fields.next()?)?;
    let controllers = fields.next()?;
    let path = fields.next().filter(|path| path.starts_with('/'))?;
    let controllers = controllers.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect();
    Some(CgroupMembership { hierarchy, controllers, path: path.into() })
}
