//! Keys of a cluster in etcd, and their owners.
//!
//! ```text
//!   /weir/v1/CLUSTER/all/leader          the leader; with its lease
//!                   /all/group/GROUP     limits over all hosts; written by any host
//!                   /all/promise/HOST    a host's reservations and measured capacity; with a lease
//!                                        that outlives a run
//!                   /host/HOST/name      process that is this host; with a lease
//!                   /host/HOST/grant     its quota; the leader's, fenced by the first key
//!                   /host/HOST/move/DISK   a disk that another host offers it; with a lease
//!                   /host/HOST/moved/DISK  outcome of a disk's migration from it
//!                   /report/HOST         demand and quota of all its groups
//! ```
//!
//! Each host watches `all` and the keys below its own name; the leader watches reports.
//!
//! `v1` is the version of keys and values: weir of another version has other keys, and never reads
//! these.

use settings::{check::named, cluster_name};

use super::etcd::Range;

/// Keys of one cluster; holds their prefix.
#[derive(Clone, Debug)]
pub(super) struct Keys(String);

/// Parsed key, with the name of its host or group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key<'a> {
    Leader,
    Group(&'a str),
    Host(&'a str),
    Promise(&'a str),
    Report(&'a str),
    Grant(&'a str),
    /// Receiving host, and the disk.
    Move(&'a str, &'a str),
    /// Offering host, and the disk.
    Moved(&'a str, &'a str),
}

impl Keys {
    pub(super) fn of(cluster: &str) -> Self {
        Self(format!("/weir/v1/{cluster}/"))
    }

    pub(super) fn key(&self, key: Key<'_>) -> String {
        let prefix = &self.0;
        match key {
            Key::Leader => format!("{prefix}all/leader"),
            Key::Group(name) => format!("{prefix}all/group/{name}"),
            Key::Promise(name) => format!("{prefix}all/promise/{name}"),
            Key::Host(name) => format!("{prefix}host/{name}/name"),
            Key::Grant(name) => format!("{prefix}host/{name}/grant"),
            Key::Report(name) => format!("{prefix}report/{name}"),
            Key::Move(host, disk) => format!("{prefix}host/{host}/move/{disk}"),
            Key::Moved(host, disk) => format!("{prefix}host/{host}/moved/{disk}"),
        }
    }

    /// Keys that all hosts watch.
    pub(super) fn of_all(&self) -> Range {
        Range::Prefix(format!("{}all/", self.0))
    }

    /// Name, grant and migrations of a host.
    pub(super) fn of_host(&self, name: &str) -> Range {
        Range::Prefix(format!("{}host/{name}/", self.0))
    }

    /// Names, grants and migrations of all hosts.
    pub(super) fn of_hosts(&self) -> Range {
        Range::Prefix(format!("{}host/", self.0))
    }

    pub(super) fn groups(&self) -> Range {
        Range::Prefix(self.key(Key::Group("")))
    }

    pub(super) fn promises(&self) -> Range {
        Range::Prefix(self.key(Key::Promise("")))
    }

    pub(super) fn reports(&self) -> Range {
        Range::Prefix(self.key(Key::Report("")))
    }

    pub(super) fn one(&self, key: Key<'_>) -> Range {
        Range::Key(self.key(key))
    }

    /// Parses a key. `None` if it is not weir's, or has a name that no config could have.
    pub(super) fn read<'a>(&self, key: &'a str) -> Option<Key<'a>> {
        let rest = key.strip_prefix(&self.0)?;
        if rest == "all/leader" {
            return Some(Key::Leader);
        }
        let found = if let Some(name) = rest.strip_prefix("all/group/") {
            Key::Group(name)
        } else if let Some(name) = rest.strip_prefix("all/promise/") {
            Key::Promise(name)
        } else if let Some(name) = rest.strip_prefix("report/") {
            Key::Report(name)
        } else {
            match rest.strip_prefix("host/")?.split_once('/')? {
                (name, "name") => Key::Host(name),
                (name, "grant") => Key::Grant(name),
                (host, rest) => match rest.split_once('/')? {
                    ("move", disk) => Key::Move(host, disk),
                    ("moved", disk) => Key::Moved(host, disk),
                    _ => return None,
                },
            }
        };
        let is_named = match found {
            Key::Leader => true,
            Key::Group(group) => named(group).is_ok(),
            Key::Host(host) | Key::Promise(host) | Key::Report(host) | Key::Grant(host) => {
                cluster_name(host).is_ok()
            }
            Key::Move(host, disk) | Key::Moved(host, disk) => {
                cluster_name(host).is_ok() && named(disk).is_ok()
            }
        };
        is_named.then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let keys = Keys::of("lab");
        for key in [
            Key::Leader,
            Key::Group("a/b"),
            Key::Host("h"),
            Key::Promise("h"),
            Key::Report("h"),
            Key::Grant("h"),
            Key::Move("h", "vm/1"),
            Key::Moved("h", "vm1"),
        ] {
            assert_eq!(keys.read(&keys.key(key)), Some(key));
        }
        for other in [
            "",
            "/weir/v1/lab",
            "/weir/v1/lab2/all/leader",
            "/weir/v1/lab/all/group/",
            "/weir/v1/lab/host/name",
            "/weir/v1/lab/host/h/x",
            "/weir/v1/lab/host/h/move",
            "/weir/v1/lab/host/h/move/",
            "/weir/v1/lab/host//move/d",
            "/weir/v1/lab/host/h/moves/d",
            "/weir/v1/lab/x/y",
            // Names that no config file can have.
            "/weir/v1/lab/all/group/g\nold",
            "/weir/v1/lab/all/promise/h/i",
            "/weir/v1/lab/report/h h",
            "/weir/v1/lab/host/h\u{1b}[2J/name",
            "/weir/v1/lab/host/h/move/..",
            "/weir/v1/lab/host/h/moved/v\tm",
            &format!("/weir/v1/lab/host/h/move/{}", "x".repeat(4097)),
        ] {
            assert_eq!(keys.read(other), None, "{other}");
        }
    }
}
