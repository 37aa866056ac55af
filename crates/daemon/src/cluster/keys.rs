//! The keys of a cluster in etcd, and which of them are whose.
//!
//! ```text
//!   /weir/v1/CLUSTER/leader          who leads; with a lease, so it goes with him
//!                   /group/GROUP     limits over all hosts; whoever changes them
//!                   /host/HOST       which process is that host; with a lease
//!                   /promise/HOST    what is promised there, and what was measured; with a lease
//!                   /report/HOST     what it wants and has, of all its groups
//!                   /grant/HOST      what it may have; the leader's, fenced by the first key
//! ```
//!
//! `v1` is the version of keys and values: a weir of another one has keys of its own, and never
//! reads these.

use super::etcd::Range;

/// A cluster's keys.
#[derive(Clone, Debug)]
pub(super) struct Keys(String);

/// What a key is, with the host's or the group's name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Key<'a> {
    Leader,
    Group(&'a str),
    Host(&'a str),
    Promise(&'a str),
    Report(&'a str),
    Grant(&'a str),
}

impl Keys {
    pub(super) fn of(cluster: &str) -> Self {
        Self(format!("/weir/v1/{cluster}/"))
    }

    pub(super) fn key(&self, key: Key<'_>) -> String {
        let prefix = &self.0;
        match key {
            Key::Leader => format!("{prefix}leader"),
            Key::Group(name) => format!("{prefix}group/{name}"),
            Key::Host(name) => format!("{prefix}host/{name}"),
            Key::Promise(name) => format!("{prefix}promise/{name}"),
            Key::Report(name) => format!("{prefix}report/{name}"),
            Key::Grant(name) => format!("{prefix}grant/{name}"),
        }
    }

    /// All of a kind: give a key of it with an empty name.
    pub(super) fn all(&self, kind: Key<'_>) -> Range {
        Range::Prefix(self.key(kind))
    }

    pub(super) fn one(&self, key: Key<'_>) -> Range {
        Range::Key(self.key(key))
    }

    /// None where it is none that weir knows.
    pub(super) fn read<'a>(&self, key: &'a str) -> Option<Key<'a>> {
        let rest = key.strip_prefix(&self.0)?;
        if rest == "leader" {
            return Some(Key::Leader);
        }
        let (kind, name) = rest.split_once('/')?;
        if name.is_empty() {
            return None;
        }
        match kind {
            "group" => Some(Key::Group(name)),
            "host" => Some(Key::Host(name)),
            "promise" => Some(Key::Promise(name)),
            "report" => Some(Key::Report(name)),
            "grant" => Some(Key::Grant(name)),
            _ => None,
        }
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
        ] {
            assert_eq!(keys.read(&keys.key(key)), Some(key));
        }
        for other in ["", "/weir/v1/lab", "/weir/v1/lab2/leader", "/weir/v1/lab/group/", "/weir/v1/lab/x/y"] {
            assert_eq!(keys.read(other), None, "{other}");
        }
    }
}
