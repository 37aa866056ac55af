//! Change from root to another user.
//!
//! The C library changes every thread of the process (nptl(7)); the kernel then clears all
//! capabilities.

use std::{fs, io, os::unix::fs::MetadataExt as _, path::Path};

use anyhow::{Context as _, anyhow, ensure};
use nix::unistd::{Gid, Group, Uid, User, geteuid, setgid, setgroups, setuid};
use rustix::process::{DumpableBehavior, set_dumpable_behavior};
use settings::FileOwner;

pub(super) fn is_root() -> bool {
    geteuid().is_root()
}

/// The user and groups to change to.
#[derive(Debug)]
pub(super) struct RunAsUser {
    user: Uid,
    group: Gid,
    /// The user's supplementary groups in the system's database.
    groups: Vec<Gid>,
}

/// Numeric user and group ID of an owner, for files that are to belong to it.
///
/// # Errors
/// As [`find`].
pub fn ids(owner: &FileOwner) -> anyhow::Result<(u32, u32)> {
    find(owner).map(|identity| (identity.user.as_raw(), identity.group.as_raw()))
}

/// Creates a directory of state files, for the user that the daemon runs as after its start.
///
/// # Errors
/// The directory cannot be created, or cannot be given to the user.
pub fn create_state_directory(directory: &Path, user: Option<&FileOwner>) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    if let Some(owner) = user
        && let Ok((uid, gid)) = ids(owner)
        && fs::metadata(directory)?.uid() != uid
    {
        std::os::unix::fs::chown(directory, Some(uid), Some(gid))?;
    }
    Ok(())
}

/// Looks up an owner.
///
/// # Errors
/// Fails if there is no such user or group, or the process is not root.
pub(super) fn find(owner: &FileOwner) -> anyhow::Result<RunAsUser> {
    let name = owner.user.as_deref().context("user: names no user")?;
    let known = match name.parse() {
        Ok(number) => User::from_uid(Uid::from_raw(number))?,
        Err(_) => Some(User::from_name(name)?.with_context(|| {
            format!("user: there is no user {name:?} (create it with `useradd --system {name}`)")
        })?),
    };
    let user = known.as_ref().map_or_else(|| name.parse().map(Uid::from_raw), |user| Ok(user.uid))?;
    ensure!(is_root() || user == geteuid(), "user: only root can change to another user (leave it out)");
    let primary_group = known.as_ref().map(|user| user.gid);
    let group = owner.group.as_deref().map(group).transpose()?.or(primary_group);
    let group = group.with_context(|| {
        format!("user: the system does not know the group of user {name} (write {name}:GROUP)")
    })?;
    let groups = known.map(|user| groups_of(&user.name)).transpose()?.unwrap_or_default();
    Ok(RunAsUser { user, group, groups })
}

fn group(name: &str) -> anyhow::Result<Gid> {
    if let Ok(number) = name.parse() {
        return Ok(Gid::from_raw(number));
    }
    let known = Group::from_name(name)?;
    let missing = || anyhow!("user: there is no group {name:?} (create it with `groupadd --system {name}`)");
    known.map(|group| group.gid).ok_or_else(missing)
}

fn groups_of(name: &str) -> anyhow::Result<Vec<Gid>> {
    let name = std::ffi::CString::new(name)?;
    // getgrouplist returns the given group too; it is filtered out, because setgid sets the group.
    Ok(nix::unistd::getgrouplist(&name, Gid::from_raw(u32::MAX))?
        .into_iter()
        .filter(|group| group.as_raw() != u32::MAX)
        .collect())
}

impl RunAsUser {
    /// Changes the user permanently.
    pub(super) fn switch(&self) -> anyhow::Result<()> {
        if !is_root() {
            return Ok(());
        }
        // Groups before the user: afterwards the process may not change them.
        setgroups(&self.groups).context("user: the groups cannot be set")?;
        setgid(self.group).context("user: the group cannot be set")?;
        setuid(self.user).context("user: the user cannot be changed")?;
        // setuid clears the flag. Set again, so that privileged users can attach and dump core as
        // before.
        set_dumpable_behavior(DumpableBehavior::Dumpable).context("user")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn missing_user_or_group_is_named_with_the_command_that_creates_it() {
        let refused = |owner: &str| find(&owner.parse().unwrap()).unwrap_err().to_string();
        assert!(refused("no-such-user").contains("`useradd --system no-such-user`"));
        let uid = geteuid();
        assert!(refused(&format!("{uid}:no-such-group")).contains("`groupadd --system no-such-group`"));
        let identity = find(&format!("{uid}:7").parse().unwrap()).unwrap();
        assert_eq!((identity.user, identity.group), (uid, Gid::from_raw(7)));
    }
}
