//! What a daemon is to do, as plain values: which disks, under which limits, exported where, by how many threads.
//!
//! ```text
//!   command line ─┐
//!                 ├─► Draft (what was said, with its place) ─► check ─► Plan ─► serve
//!   config file ──┘
//! ```
//!
//! Both sources make the same [`Draft`], so that a rule is checked in one place and holds for both. A [`Plan`] is
//! consistent: indices are valid, names are unique, no group lies in itself, limits obey their rules.
//!
//! Never touches a file or a socket: what only the world can tell (is the image there? is the port free?) shows later.

mod address;
pub(crate) mod check;
mod draft;
mod groups;
mod image;
mod place;
pub(crate) mod prefetch;
mod qcow2;
mod remarks;
mod settings;
mod tls;
mod units;

use std::{path::PathBuf, time::Duration};

use block::storage::{CacheMode, Format, delay::DelayOptions, fault::FaultRule, rate::RateOptions};

pub(crate) use address::{Address, socket};
pub(crate) use draft::{DiskDraft, Draft, ExportDraft, GroupDraft, LimitsDraft, ServiceDraft};
pub(crate) use image::Image;
pub(crate) use place::{Place, Said, Wrong};
pub(crate) use prefetch::PrefetchDraft;
pub(crate) use qcow2::{CleanInterval, L2CacheSize, Qcow2Draft, Qcow2Settings, SecretSource};
pub(crate) use settings::{Settings, SettingsDraft};
pub(crate) use tls::{Credentials, Tls, TlsDraft, TlsMode};
pub(crate) use units::{Rule, connections, count, duration, read, size, workers};

/// Everything `weir serve` is to do.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Plan {
    /// At least one, in the order they were given.
    pub(crate) disks: Vec<Disk>,
    /// Each after the one it lies in, else in the order they were given; one may have no members.
    pub(crate) groups: Vec<Group>,
    /// At least one; no two at the same place.
    pub(crate) servers: Vec<Server>,
    /// What holds for the process.
    pub(crate) service: Service,
}

/// One disk.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Disk {
    /// Unique among disks and groups.
    pub(crate) name: String,
    /// What clients are told about it; may be empty.
    pub(crate) description: String,
    /// Where its bytes are.
    pub(crate) image: Image,
    /// How they are laid out; `None` is found by probing.
    pub(crate) format: Option<Format>,
    /// How the host's page cache is used.
    pub(crate) cache: CacheMode,
    /// What a qcow2 image is opened with.
    pub(crate) qcow2: Qcow2Settings,
    /// What is read ahead.
    pub(crate) prefetch: policy::prefetch::Settings,
    /// Refuses writes.
    pub(crate) read_only: bool,
    /// Opens the image though somebody else writes to it.
    pub(crate) force_share: bool,
    /// Latency added to imitate a slower device.
    pub(crate) delay: Option<DelayOptions>,
    /// Bandwidth of the device to imitate.
    pub(crate) rate: Option<RateOptions>,
    /// Errors to imitate, in order.
    pub(crate) faults: Vec<FaultRule>,
    /// What holds for it by itself.
    pub(crate) settings: Settings,
    /// Index in [`Plan::groups`] of the group whose settings hold for it too.
    pub(crate) group: Option<usize>,
}

/// What holds for several disks together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Group {
    /// Unique among groups and disks.
    pub(crate) name: String,
    /// What holds for all below it together.
    pub(crate) settings: Settings,
    /// Index in [`Plan::groups`], smaller than this group's, of the group that it lies in.
    pub(crate) parent: Option<usize>,
}

/// A place where clients connect, and what they find there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Server {
    /// The place.
    pub(crate) endpoint: Endpoint,
    /// At least one; names are unique. The only one of a server is also its default export.
    pub(crate) exports: Vec<Export>,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Endpoint {
    /// On an address to be bound.
    Address(Address),
    /// On all the sockets the service manager passed.
    Inherited,
}

/// A disk under a name that clients ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Export {
    /// Empty is the default export.
    pub(crate) name: String,
    /// Index in [`Plan::disks`].
    pub(crate) disk: usize,
}

/// What holds for the whole process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Service {
    /// Threads that do I/O, at least one.
    pub(crate) workers: usize,
    /// How long a thread looks for completions before it sleeps.
    pub(crate) poll: Duration,
    /// Clients at a time at each server; 0 is any number.
    pub(crate) max_connections: u32,
    /// Unix sockets where the daemon is controlled.
    pub(crate) qmp: Vec<PathBuf>,
    /// Encryption of connections.
    pub(crate) tls: Tls,
    /// What is logged.
    pub(crate) log: LogSettings,
    /// Where the process leaves its number once it serves.
    pub(crate) pid_file: Option<PathBuf>,
    /// Where `weir probe` left what devices can do; `None` is the usual place.
    pub(crate) state: Option<PathBuf>,
    /// Where images and everything they name must lie.
    pub(crate) image_root: Option<PathBuf>,
    /// The file of control groups' limits to watch; `None`: none are.
    pub(crate) cgroup_limits: Option<PathBuf>,
}

/// What is logged, and how.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct LogSettings {
    /// A level or a filter of tracing's `EnvFilter`, known to be valid.
    pub(crate) filter: String,
    /// The form of a line.
    pub(crate) format: LogFormat,
}

/// The form of a line of the log.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line.
    Json,
}

impl std::str::FromStr for LogFormat {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "text" => Ok(Self::Text),
            "json" => Ok(Self::Json),
            _ => Err("is not a log format; there are text and json".to_owned()),
        }
    }
}
