//! The answer to `x-weir-query-status` as this program reads it.
//!
//! Only what is shown is named here; a daemon may say more. What does not apply is absent in the
//! answer, and then a default here: no group, no limit, a counter of 0.
//!
//! Never written back: `--json` prints the daemon's own words.

use std::collections::BTreeMap;

use console::figures::Limits;
use policy::prefetch::{Mode, Setting};
use serde::Deserialize;
use serde_json::Value;
use settings::prefetch::short_name;

use super::latency::Counted;

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Report {
    pub(crate) version: String,
    /// Nanoseconds since the daemon started: what turns two reports' counters into rates.
    pub(crate) uptime_ns: u64,
    pub(crate) config: Option<String>,
    /// Whether it can make devices of this host; absent from one that does not say.
    pub(crate) makes_devices: Option<bool>,
    /// The hosts that share limits with this one, if there are some.
    pub(crate) cluster: Option<Cluster>,
    /// Absent from a daemon that has no budget.
    pub(crate) memory: Option<Memory>,
    pub(crate) disks: Vec<Disk>,
    /// Disks of the config file that nobody can have yet.
    pub(crate) unopened: Vec<Unopened>,
    /// In the order of their names.
    pub(crate) groups: Vec<Group>,
    pub(crate) devices: Vec<Device>,
    pub(crate) exports: Vec<Export>,
    pub(crate) servers: Vec<Server>,
    /// How long requests took since that is counted; asked for by itself.
    #[serde(skip)]
    pub(crate) latencies: Counted,
}

/// A disk whose image is not open yet.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Unopened {
    pub(crate) name: String,
    pub(crate) image: String,
    /// Since when it is being opened, in nanoseconds.
    pub(crate) age_ns: u64,
    /// Why it could not be opened when it was tried last; none where that is still under way.
    pub(crate) reason: Option<String>,
}

/// How this host stands with those that share limits with it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(crate) struct Cluster {
    pub(crate) name: String,
    pub(crate) connected: bool,
    /// Why not.
    pub(crate) reason: Option<String>,
}

/// A place where clients of NBD connect.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(crate) struct Server {
    pub(crate) address: String,
    /// What a config file calls it, if that has words for it.
    pub(crate) listen: Option<String>,
    /// There if it is for disks that do not say where they are exported.
    #[serde(rename = "default")]
    pub(crate) standard: Option<Standard>,
    /// No config has it.
    pub(crate) added: bool,
    pub(crate) connections: u64,
    pub(crate) refused: Refused,
}

/// How disks are exported that do not say where.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Standard {
    pub(crate) read_only: bool,
}

/// Clients that were, by why.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(crate) struct Refused {
    pub(crate) networks: u64,
    pub(crate) connections: u64,
    pub(crate) names: u64,
    pub(crate) exports: u64,
}

/// How clients reach a disk. What follows `queues` are figures of those to virtual machines.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Export {
    #[serde(rename = "type")]
    pub(crate) kind: String,
    pub(crate) disk: String,
    pub(crate) id: String,
    /// The node or the file, of a device of this host.
    pub(crate) device: Option<String>,
    /// Where that is mounted.
    pub(crate) mounts: Vec<String>,
    /// Devices that lie on it.
    pub(crate) holders: Vec<String>,
    pub(crate) queues: u64,
    pub(crate) requests: u64,
    pub(crate) in_flight: u64,
    pub(crate) kicks: u64,
    pub(crate) calls: u64,
    pub(crate) copies: u64,
    pub(crate) front_end: Option<FrontEnd>,
}

/// The process that uses one.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(crate) struct FrontEnd {
    pub(crate) pid: u32,
    pub(crate) name: String,
}

impl Export {
    /// Whether it is to virtual machines.
    pub(crate) fn is_to_machines(&self) -> bool {
        self.kind == "vhost-user-blk"
    }

    /// Who uses a device of this host: `/mnt/vm1 dm-0`.
    pub(crate) fn device_users(&self) -> Option<String> {
        let users: Vec<_> = self.mounts.iter().chain(&self.holders).map(String::as_str).collect();
        (!users.is_empty()).then(|| users.join(" "))
    }

    /// `qemu-system-x86 (1234)`.
    pub(crate) fn user(&self) -> Option<String> {
        self.front_end.as_ref().map(|FrontEnd { pid, name }| format!("{name} ({pid})"))
    }
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Disk {
    pub(crate) name: String,
    pub(crate) image: String,
    /// The whole of it, of a file.
    pub(crate) path: Option<String>,
    pub(crate) size: u64,
    pub(crate) read_only: bool,
    pub(crate) cache: Option<String>,
    pub(crate) format: String,
    pub(crate) l2_cache: Option<MetadataCache>,
    pub(crate) refcount_cache: Option<MetadataCache>,
    pub(crate) connections: u64,
    pub(crate) enforcement: Option<String>,
    pub(crate) reads: Work,
    pub(crate) writes: Work,
    #[serde(flatten)]
    pub(crate) settings: Settings,
    pub(crate) throttle: Throttle,
    pub(crate) read_ahead: ReadAhead,
    pub(crate) errors: Errors,
    pub(crate) on_read_error: Option<String>,
    pub(crate) on_write_error: Option<String>,
    /// `ok`, `nospace` or `failed`; absent where no error can stop it.
    pub(crate) io_status: Option<String>,
    /// Of an image in a cluster or at a server: how long the oldest request has been there, in
    /// nanoseconds.
    pub(crate) oldest_request: Option<u64>,
    pub(crate) memory: Memory,
    /// Of a disk at another NBD server.
    pub(crate) server: Option<Remote>,
}

/// How it stands with the server that has a disk.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Remote {
    pub(crate) connected: bool,
    pub(crate) reconnections: u64,
    pub(crate) unflushed_bytes: u64,
}

impl Disk {
    /// Why it is stopped, if it is: `nospace` or `failed`.
    pub(crate) fn stopped_by(&self) -> Option<&str> {
        self.io_status.as_deref().filter(|&status| status != "ok")
    }
}

/// What the daemon, or one disk, has of the memory for data, in bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Memory {
    /// All that may be used; of the daemon alone.
    pub(crate) total: Option<u64>,
    /// For metadata caches, read-ahead and buffers.
    pub(crate) reserved: u64,
    pub(crate) disks_in_memory: u64,
    /// Of requests in flight and unread replies.
    pub(crate) requests: u64,
    /// Requests that wait for memory.
    pub(crate) waiting: u64,
}

/// Requests that the device failed, since the disk was opened.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Errors {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) flushes: u64,
    pub(crate) discards: u64,
}

/// What was read ahead of a disk's readers since it was opened, and what is held now.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct ReadAhead {
    pub(crate) hits: u64,
    /// Reads of which a part was in memory.
    pub(crate) partial_hits: u64,
    pub(crate) misses: u64,
    pub(crate) skipped: u64,
    /// Of the hits, those that had to wait for data on its way.
    pub(crate) waited: u64,
    pub(crate) read_ahead_bytes: u64,
    /// Of these, bytes that somebody then read.
    pub(crate) used_bytes: u64,
    /// Of these, bytes that were dropped unread.
    pub(crate) wasted_bytes: u64,
    pub(crate) memory: u64,
    pub(crate) streams: u64,
    /// Whether nothing new is read ahead, because it does not pay.
    pub(crate) closed: bool,
    /// The share of reads answered from memory, wholly or in part, 0 to 1.
    pub(crate) hit_rate: Option<f64>,
    /// The share of what was read ahead that was used, 0 to 1.
    pub(crate) accuracy: Option<f64>,
}

/// What a cache has done since the image was opened or the cache was given another size.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct MetadataCache {
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) evictions: u64,
    pub(crate) bytes: u64,
    pub(crate) limit: u64,
    /// Bytes of the disk that so much memory covers.
    pub(crate) covered: u64,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Group {
    pub(crate) name: String,
    /// Its own members; those of groups in it are theirs.
    pub(crate) disks: Vec<String>,
    pub(crate) enforcement: Option<String>,
    /// By what its limits are multiplied while `scaled`.
    pub(crate) scale: Option<f64>,
    #[serde(flatten)]
    pub(crate) settings: Settings,
    pub(crate) throttle: Throttle,
    /// What its limits are a part of, where those are a cluster's.
    pub(crate) cluster: Option<Whole>,
}

/// Limits of all hosts together.
#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(default)]
pub(crate) struct Whole {
    pub(crate) limits: Limits,
    /// This host has more of them than its safe share.
    pub(crate) leased: bool,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Settings {
    pub(crate) group: Option<String>,
    pub(crate) weight: Option<u64>,
    pub(crate) iops_reservation: Option<u64>,
    pub(crate) bps_reservation: Option<u64>,
    /// What the cluster has no room for.
    pub(crate) promise_left_out: Option<LeftOut>,
    pub(crate) watermark: Option<u64>,
    /// The nineteen, as far as they are set.
    pub(crate) limits: Limits,
    pub(crate) prefetch: Option<Prefetch>,
}

/// A promise that other hosts leave no room for.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct LeftOut {
    pub(crate) iops_reservation: Option<u64>,
    pub(crate) bps_reservation: Option<u64>,
    pub(crate) why: String,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Prefetch {
    pub(crate) mode: String,
    /// The others, by their names without `prefetch-`.
    #[serde(flatten)]
    pub(crate) numbers: BTreeMap<String, u64>,
}

impl Prefetch {
    pub(crate) fn is_on(&self) -> bool {
        self.mode != Mode::Off.name()
    }

    /// The mode, and whether the gate is closed: `auto`, `auto closed`.
    pub(crate) fn state(&self, read_ahead: &ReadAhead) -> String {
        let is_closed = self.is_on() && read_ahead.closed;
        format!("{}{}", self.mode, if is_closed { " closed" } else { "" })
    }

    pub(crate) fn memory(&self) -> u64 {
        self.numbers.get(short_name(Setting::Memory)).copied().unwrap_or(0)
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Work {
    pub(crate) requests: u64,
    pub(crate) bytes: u64,
    /// The sum of the waits of those that had to wait.
    pub(crate) waited_ns: u64,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Throttle {
    pub(crate) reads: Work,
    pub(crate) writes: Work,
    pub(crate) waiting: Waiting,
    /// How long requests waited, since the start; absent while none has.
    pub(crate) wait_ns: Option<Waits>,
    /// The same of the last ten to twenty seconds. Not for tables, which show an interval.
    pub(crate) recent_wait_ns: Option<Waits>,
    /// Time during which work waited for these very limits.
    pub(crate) limited_ns: u64,
    pub(crate) binding: Option<String>,
    /// The bucket of each limit that is set, by the limit's name.
    pub(crate) buckets: BTreeMap<String, BucketLevel>,
}

/// Level and capacity of a limit's bucket, in operations or bytes.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct BucketLevel {
    pub(crate) level: u64,
    pub(crate) capacity: u64,
}

impl BucketLevel {
    /// Level as a share of the capacity, at most 1.
    pub(crate) fn ratio(self) -> f64 {
        (self.level as f64 / self.capacity.max(1) as f64).min(1.0)
    }
}

impl Throttle {
    pub(crate) fn waited_ns(&self) -> u64 {
        self.reads.waited_ns.saturating_add(self.writes.waited_ns)
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Waiting {
    pub(crate) reads: u64,
    pub(crate) writes: u64,
}

impl Waiting {
    pub(crate) fn total(self) -> u64 {
        self.reads.saturating_add(self.writes)
    }
}

#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Waits {
    pub(crate) p50: u64,
    pub(crate) p99: u64,
    pub(crate) max: u64,
}

#[derive(Clone, Debug, Default, Deserialize, PartialEq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Device {
    pub(crate) name: String,
    pub(crate) disks: Vec<String>,
    pub(crate) capacity: Capacity,
    /// How that is known: `probe`, `rate` or `busy-time`.
    pub(crate) capacity_source: Option<String>,
    /// The share of it that is in use, 0 to 1.
    #[serde(rename = "use")]
    pub(crate) used: Option<f64>,
}

/// Operations and bytes that a device can do in a second; 0 is unknown.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "kebab-case", default)]
pub(crate) struct Capacity {
    pub(crate) read_iops: u64,
    pub(crate) write_iops: u64,
    pub(crate) read_bps: u64,
    pub(crate) write_bps: u64,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Node<'a> {
    Disk(&'a Disk),
    Group(&'a Group),
}

impl<'a> Node<'a> {
    /// `disk` or `group`: also the table of the config file that it is in.
    pub(crate) fn kind(self) -> &'static str {
        match self {
            Self::Disk(_) => "disk",
            Self::Group(_) => "group",
        }
    }

    pub(crate) fn settings(self) -> &'a Settings {
        match self {
            Self::Disk(disk) => &disk.settings,
            Self::Group(group) => &group.settings,
        }
    }

    pub(crate) fn throttle(self) -> &'a Throttle {
        match self {
            Self::Disk(disk) => &disk.throttle,
            Self::Group(group) => &group.throttle,
        }
    }
}

impl Report {
    pub(crate) fn read(value: &Value) -> Result<Self, serde_json::Error> {
        let mut report = Self::deserialize(value)?;
        // As the daemon lists them: `group` finds them by this order.
        report.groups.sort_by(|one, other| one.name.cmp(&other.name));
        Ok(report)
    }

    pub(crate) fn find(&self, name: &str) -> Option<Node<'_>> {
        let disk = self.disks.iter().find(|disk| disk.name == name).map(Node::Disk);
        disk.or_else(|| self.group(name).map(Node::Group))
    }

    pub(crate) fn group(&self, name: &str) -> Option<&Group> {
        let found = self.groups.binary_search_by(|group| group.name.as_str().cmp(name)).ok()?;
        self.groups.get(found)
    }

    /// From its own upwards; at most as many as there are groups, whatever the answer says.
    pub(crate) fn groups_above(&self, settings: &Settings) -> Vec<&Group> {
        let mut above = Vec::new();
        let mut next = settings.group.as_deref();
        while let Some(group) = next.and_then(|name| self.group(name)) {
            if above.len() == self.groups.len() {
                break;
            }
            above.push(group);
            next = group.settings.group.as_deref();
        }
        above
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        let disks = self.disks.iter().map(|disk| disk.name.as_str());
        disks.chain(self.groups.iter().map(|group| group.name.as_str()))
    }

    pub(crate) fn no_such_disk(&self, name: &str) -> String {
        let unknown = || format!("{name}: no disk has this name (`weir status` lists them)");
        self.not_open_yet(name).unwrap_or_else(unknown)
    }

    pub(crate) fn is_unopened(&self, disk: &str) -> bool {
        self.unopened.iter().any(|one| one.name == disk)
    }

    fn not_open_yet(&self, name: &str) -> Option<String> {
        self.is_unopened(name)
            .then(|| format!("{name}: its image is not open yet (`weir status` tells since when, and why)"))
    }

    /// Why nothing has this name.
    pub(crate) fn no_such(&self, name: &str) -> String {
        if name.is_empty() {
            return "the name is empty (`weir status` lists disks and groups)".to_owned();
        }
        if let Some(why) = self.not_open_yet(name) {
            return why;
        }
        let advice = match settings::suggest::nearest(name, self.names()) {
            Some(near) => format!("did you mean {near:?}?"),
            None => "`weir status` lists them".to_owned(),
        };
        format!("{name}: no disk and no group has this name ({advice})")
    }
}
