//! Resolves a cgroup named on the command line.
//!
//! ```text
//!   /sys/fs/cgroup/system.slice/x.service   a path, from / or from the hierarchy's root
//!   system.slice/x.service
//!   1234, self                              a process
//!   nginx, nginx.service, user.slice        a systemd unit, anywhere in the tree
//!   4f2e91d0c7aa, docker://4f2e91d0c7aa…    a container: its id, or at least 12 digits of it
//! ```
//!
//! Units and containers are found by the names of their cgroups, without a query to systemd or a
//! runtime. A container's cgroup is named by its 64 hexadecimal digits: `docker-ID.scope`,
//! `libpod-ID.scope`, `cri-containerd-ID.scope`, `crio-ID.scope`, or `ID`. If several match, the
//! error lists them.

use std::path::{Component, Path, PathBuf};

use anyhow::{Context as _, bail};

use super::{
    control_group::{ControlGroup, Version},
    hierarchy::CgroupHierarchy,
};

const ID_DIGITS: usize = 64;
/// Length of the ids that `docker ps` prints.
const MIN_ID_DIGITS: usize = 12;
/// Maximum number of digits of a pid, more than the kernel's limit of 2²² has (proc_sys_kernel(5),
/// pid_max).
const MAX_PID_DIGITS: usize = 10;
/// Prefixes by which `kubectl` and other tools name the runtime of an id.
const SCHEMES: [&str; 5] = ["docker://", "containerd://", "cri-o://", "podman://", "libpod://"];
const MAX_LISTED: usize = 10;

pub(crate) fn is_process(text: &str) -> bool {
    let is_pid =
        !text.is_empty() && text.len() <= MAX_PID_DIGITS && text.bytes().all(|byte| byte.is_ascii_digit());
    is_pid || text == "self"
}

pub(crate) fn resolve(hierarchy: &CgroupHierarchy, text: &str) -> anyhow::Result<ControlGroup> {
    let root = hierarchy.root_group()?;
    if text.is_empty() {
        bail!("cgroup \"\": empty (give a path, a systemd unit, a container's id or a pid)");
    }
    if text == "self" {
        let pid = i32::try_from(std::process::id()).context("this process has no pid")?;
        return hierarchy.group_of_pid(pid).with_context(|| format!("cgroup {text:?}"));
    }
    if is_process(text) {
        let pid = text.parse().with_context(|| format!("cgroup {text:?}: not a pid"))?;
        return hierarchy.group_of_pid(pid).with_context(|| format!("cgroup {text:?}"));
    }
    if let Some(id) = SCHEMES.iter().find_map(|scheme| text.strip_prefix(scheme)) {
        if !is_id(id) {
            bail!("cgroup {text:?}: {id:?} is no container's id (it has 12 to 64 hexadecimal digits)");
        }
        return only_match(text, root.version, find(&root, |name| is_container(name, id)));
    }
    // Paths take precedence over units: a relative path may have the form of a unit's name.
    if let Some(group) = by_path(hierarchy, text)? {
        return Ok(group);
    }
    if text.contains('/') {
        bail!(
            "cgroup {text:?}: no cgroup with this path below {} (`weir cgroup show` lists them)",
            root.directory.display()
        );
    }
    only_match(
        text,
        root.version,
        find(&root, |name| is_unit(name, text) || (is_id(text) && is_container(name, text))),
    )
}

/// True if `text` could have named the cgroup `name`, which may no longer exist.
pub(crate) fn could_have_named(hierarchy: &CgroupHierarchy, text: &str, name: &Path) -> bool {
    let last = name.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if let Some(id) = SCHEMES.iter().find_map(|scheme| text.strip_prefix(scheme)) {
        return is_id(id) && is_container(last, id);
    }
    if text.contains('/') {
        let path = Path::new(text);
        // A path below the mount point or from the root of the hierarchy.
        let below = hierarchy.root().and_then(|root| path.strip_prefix(root).ok()).unwrap_or(path);
        return Path::new("/").join(below) == name;
    }
    !text.is_empty() && (is_unit(last, text) || (is_id(text) && is_container(last, text)))
}

fn by_path(hierarchy: &CgroupHierarchy, text: &str) -> anyhow::Result<Option<ControlGroup>> {
    let path = Path::new(text);
    if path.components().any(|component| component == Component::ParentDir) {
        bail!("cgroup {text:?}: contains \"..\" (write the path without)");
    }
    let root = hierarchy.root_group()?.directory;
    // The mount point is a symbolic link on some distributions.
    let real: PathBuf = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    let below = [path, &real].into_iter().find_map(|path| path.strip_prefix(&root).ok());
    // A path elsewhere may belong to another cgroup mount, which has a separate message.
    if below.is_none() {
        reject_other_hierarchy(hierarchy, text, &real)?;
    }
    let group = hierarchy.group(below.unwrap_or(path))?;
    Ok(group.exists().then_some(group))
}

/// Rejects the path of a cgroup in a hierarchy that does not limit block I/O.
fn reject_other_hierarchy(hierarchy: &CgroupHierarchy, text: &str, path: &Path) -> anyhow::Result<()> {
    if !path.is_absolute() || !path.is_dir() {
        return Ok(());
    }
    let mounts = hierarchy.roots.mounts()?;
    let mount = super::kernel::mountinfo::mount_containing(&mounts, path);
    if let Some(mount) = mount.filter(|mount| mount.kind.starts_with("cgroup")) {
        let here = hierarchy.root_group()?.directory;
        bail!(
            "cgroup {text:?}: the hierarchy mounted at {} does not limit block I/O (give one below {})",
            mount.point.display(),
            here.display()
        );
    }
    Ok(())
}

fn find(root: &ControlGroup, fits: impl Fn(&str) -> bool) -> Vec<ControlGroup> {
    let (mut found, mut left) = (Vec::new(), vec![root.clone()]);
    while let Some(group) = left.pop() {
        // A cgroup that is removed meanwhile has no children.
        for child in group.children().unwrap_or_default() {
            if child.name.file_name().and_then(|name| name.to_str()).is_some_and(&fits) {
                found.push(child.clone());
            }
            left.push(child);
        }
    }
    // A fixed order for the message about several candidates.
    found.sort_by(|one, other| one.name.cmp(&other.name));
    found
}

fn only_match(text: &str, version: Version, mut found: Vec<ControlGroup>) -> anyhow::Result<ControlGroup> {
    // In cgroup v1 a unit has a cgroup only in the hierarchies that its settings require
    // (systemd.resource-control(5)).
    let remedy = match version {
        Version::V1 => {
            "units and containers have a cgroup while they run, and on cgroup v1 a unit has one \
             for block I/O after `systemctl set-property --runtime UNIT IOAccounting=yes`"
        }
        Version::V2 => {
            "units and containers have a cgroup while they run; a container is found by its id, as \
             printed by `docker inspect --format '{{.Id}}' NAME`"
        }
    };
    match (found.pop(), found.len()) {
        (Some(only), 0) => Ok(only),
        (None, _) => bail!(
            "cgroup {text:?}: no cgroup, unit, container or process with this name ({remedy}; `weir \
             cgroup show` lists all)"
        ),
        (Some(last), others) => {
            found.push(last);
            let mut list: Vec<_> =
                found.iter().take(MAX_LISTED).map(|group| group.name.display().to_string()).collect();
            if found.len() > MAX_LISTED {
                list.push(format!("and {} more", found.len() - MAX_LISTED));
            }
            bail!(
                "cgroup {text:?}: ambiguous, {} cgroups match: {} (give the path of one)",
                others + 1,
                list.join(", ")
            )
        }
    }
}

/// A name without a suffix stands for a service, as for systemctl(1).
fn is_unit(name: &str, unit: &str) -> bool {
    // systemd prefixes `_` to names that could be the kernel's files (cg_escape): `_io.service`.
    let plain = name.strip_prefix('_').unwrap_or(name);
    [name, plain].iter().any(|name| *name == unit || name.strip_suffix(".service") == Some(unit))
}

fn is_id(text: &str) -> bool {
    (MIN_ID_DIGITS..=ID_DIGITS).contains(&text.len())
        && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

fn is_container(name: &str, id: &str) -> bool {
    let name = name.strip_suffix(".scope").unwrap_or(name);
    let (runtime, full_id) = name.rsplit_once('-').unwrap_or(("", name));
    // `libpod-conmon-ID.scope` contains the monitor of the container, not the container.
    let is_monitor = runtime.ends_with("conmon");
    // Names in the hierarchy have the whole id; the user may give its beginning.
    full_id.len() == ID_DIGITS && is_id(full_id) && full_id.starts_with(id) && !is_monitor
}

#[cfg(test)]
#[path = "target_tests.rs"]
mod tests;
