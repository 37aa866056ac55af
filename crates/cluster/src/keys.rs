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
//!                   /peer/HOST           its address for other hosts
//!                   /asks/HOST           hosts that it asks while etcd is unreachable
//! ```
//!
//! Each host watches `all` and the keys below its own name, and with an address of its own `peer`;
//! the leader watches reports.
//!
//! `v1` is the version of keys and values: weir of another version has other keys, and never reads
//! these.

use settings::{check::check_object_name, parse_cluster_name};

use super::etcd::KeyRange;

/// Keys of one cluster; holds their prefix.
#[derive(Clone, Debug)]
pub(super) struct EtcdKeys(String);

/// Parsed key, with the name of its host or group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum EtcdKey<'a> {
    Leader,
    Group(&'a str),
    Host(&'a str),
    Reservation(&'a str),
    Report(&'a str),
    Grant(&'a str),
    /// Address of a host.
    Peer(&'a str),
    /// Hosts that a host asks.
    Asks(&'a str),
    /// Receiving host, and the disk.
    Move(&'a str, &'a str),
    /// Offering host, and the disk.
    Moved(&'a str, &'a str),
}

impl EtcdKeys {
    pub(super) fn new(cluster: &str) -> Self {
        Self(format!("/weir/v1/{cluster}/"))
    }

    pub(super) fn key(&self, key: EtcdKey<'_>) -> String {
        let prefix = &self.0;
        match key {
            EtcdKey::Leader => format!("{prefix}all/leader"),
            EtcdKey::Group(name) => format!("{prefix}all/group/{name}"),
            EtcdKey::Reservation(name) => format!("{prefix}all/promise/{name}"),
            EtcdKey::Host(name) => format!("{prefix}host/{name}/name"),
            EtcdKey::Grant(name) => format!("{prefix}host/{name}/grant"),
            EtcdKey::Report(name) => format!("{prefix}report/{name}"),
            EtcdKey::Peer(name) => format!("{prefix}peer/{name}"),
            EtcdKey::Asks(name) => format!("{prefix}asks/{name}"),
            EtcdKey::Move(host, disk) => format!("{prefix}host/{host}/move/{disk}"),
            EtcdKey::Moved(host, disk) => format!("{prefix}host/{host}/moved/{disk}"),
        }
    }

    /// Keys that all hosts watch.
    pub(super) fn shared(&self) -> KeyRange {
        KeyRange::Prefix(format!("{}all/", self.0))
    }

    /// Name, grant and migrations of a host.
    pub(super) fn below_host(&self, name: &str) -> KeyRange {
        KeyRange::Prefix(format!("{}host/{name}/", self.0))
    }

    /// Names, grants and migrations of all hosts.
    pub(super) fn below_all_hosts(&self) -> KeyRange {
        KeyRange::Prefix(format!("{}host/", self.0))
    }

    pub(super) fn groups(&self) -> KeyRange {
        KeyRange::Prefix(self.key(EtcdKey::Group("")))
    }

    pub(super) fn reservations(&self) -> KeyRange {
        KeyRange::Prefix(self.key(EtcdKey::Reservation("")))
    }

    pub(super) fn reports(&self) -> KeyRange {
        KeyRange::Prefix(self.key(EtcdKey::Report("")))
    }

    /// Addresses of hosts.
    pub(super) fn peers(&self) -> KeyRange {
        KeyRange::Prefix(self.key(EtcdKey::Peer("")))
    }

    /// Hosts that each host asks.
    pub(super) fn asks(&self) -> KeyRange {
        KeyRange::Prefix(self.key(EtcdKey::Asks("")))
    }

    pub(super) fn single(&self, key: EtcdKey<'_>) -> KeyRange {
        KeyRange::Key(self.key(key))
    }

    /// Parses a key. `None` if it is not weir's, or has a name that no config could have.
    pub(super) fn parse<'a>(&self, key: &'a str) -> Option<EtcdKey<'a>> {
        let rest = key.strip_prefix(&self.0)?;
        if rest == "all/leader" {
            return Some(EtcdKey::Leader);
        }
        let found = if let Some(name) = rest.strip_prefix("all/group/") {
            EtcdKey::Group(name)
        } else if let Some(name) = rest.strip_prefix("all/promise/") {
            EtcdKey::Reservation(name)
        } else if let Some(name) = rest.strip_prefix("report/") {
            EtcdKey::Report(name)
        } else if let Some(name) = rest.strip_prefix("peer/") {
            EtcdKey::Peer(name)
        } else if let Some(name) = rest.strip_prefix("asks/") {
            EtcdKey::Asks(name)
        } else {
            match rest.strip_prefix("host/")?.split_once('/')? {
                (name, "name") => EtcdKey::Host(name),
                (name, "grant") => EtcdKey::Grant(name),
                (host, rest) => match rest.split_once('/')? {
                    ("move", disk) => EtcdKey::Move(host, disk),
                    ("moved", disk) => EtcdKey::Moved(host, disk),
                    _ => return None,
                },
            }
        };
        let is_named = match found {
            EtcdKey::Leader => true,
            EtcdKey::Group(group) => check_object_name(group).is_ok(),
            EtcdKey::Host(host)
            | EtcdKey::Reservation(host)
            | EtcdKey::Report(host)
            | EtcdKey::Peer(host)
            | EtcdKey::Asks(host)
            | EtcdKey::Grant(host) => parse_cluster_name(host).is_ok(),
            EtcdKey::Move(host, disk) | EtcdKey::Moved(host, disk) => {
                parse_cluster_name(host).is_ok() && check_object_name(disk).is_ok()
            }
        };
        is_named.then_some(found)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_round_trip() {
        let keys = EtcdKeys::new("lab");
        for key in [
            EtcdKey::Leader,
            EtcdKey::Group("a/b"),
            EtcdKey::Host("h"),
            EtcdKey::Reservation("h"),
            EtcdKey::Report("h"),
            EtcdKey::Peer("h"),
            EtcdKey::Asks("h"),
            EtcdKey::Grant("h"),
            EtcdKey::Move("h", "vm/1"),
            EtcdKey::Moved("h", "vm1"),
        ] {
            assert_eq!(keys.parse(&keys.key(key)), Some(key));
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
            assert_eq!(keys.parse(other), None, "{other}");
        }
    }
}
