//! What a user asks of weir, as plain values: disks, their limits, groups, exports, threads.
//!
//! ```text
//!   command line ── arguments ─┐
//!                              ├─► Draft (what was said, with its place) ─► check ─► Plan ─► serve
//!   config file ──── config ───┘
//! ```
//!
//! Both sources make the same [`Draft`], so a rule is checked in one place. A [`Plan`] is
//! consistent: indices are valid, names are unique, no group lies in itself, limits obey their
//! rules. The options of each command stand beside the command, those that several have in
//! `arguments`. `units` reads sizes, times and counts.
//!
//! Never opens an image or a socket. It reads the config file, passphrases, and what weir keeps for
//! itself between runs (`state`).

/// How sizes are written, in one sentence for the help of every command that takes some.
#[macro_export]
macro_rules! sizes {
    () => {
        "Sizes take K, M, G, T, P or E (powers of 1024; KB, MB and so on are powers of 1000), in either case."
    };
}

mod access;
mod address;
pub mod arguments;
pub mod check;
#[allow(missing_docs, reason = "a field is the option of its name, which docs/reference/config.md explains")]
mod clients;
mod cluster;
pub mod config;
pub mod control;
mod doors;
#[allow(missing_docs, reason = "a field is the option of its name, which docs/reference/config.md explains")]
mod draft;
mod groups;
mod http;
mod image;
mod image_options;
pub mod keyval;
pub mod log;
#[allow(missing_docs, reason = "a field is the option of its name, which docs/reference/config.md explains")]
pub mod on_error;
mod on_event;
mod place;
#[allow(missing_docs, reason = "a field is the option of its name, which docs/reference/config.md explains")]
pub mod prefetch;
mod promises;
#[allow(missing_docs, reason = "a field is the option of its name, which docs/reference/config.md explains")]
mod qcow2;
mod record;
mod remarks;
mod sandbox;
pub mod secret;
#[allow(missing_docs, reason = "a field is the option of its name, which docs/reference/config.md explains")]
mod shares;
pub mod state;
pub mod suggest;
#[allow(missing_docs, reason = "a field is the option of its name, which docs/reference/config.md explains")]
mod tls;
mod units;

use std::{fmt, path::PathBuf, str::FromStr};

pub use access::{Owner, SocketAccess, socket_mode};
pub use address::{Address, socket};
use block::disk::{DetectZeroes, Discards, ErrorPolicies};
pub use clients::{AccessDraft, tls_name};
pub use cluster::{Cluster, Etcd, cluster_name, safe_share};
pub use doors::{Door, Fuse, Keyed, Nbd, NbdDevice, Socket, Ublk, VhostUserBlk};
pub use draft::{DiskDraft, Draft, ExportDraft, GroupDraft, ServiceDraft};
pub use http::{Http, http_name};
pub use image::{Image, reached};
pub use image_options::ImageDescription;
pub use log::{LogFormat, LogSettings};
pub use on_error::OnErrorDraft;
pub use on_event::OnEvent;
pub use place::{Mistakes, Place, Said, Wrong};
use policy::access::Access;
pub use prefetch::PrefetchDraft;
pub use qcow2::{CleanInterval, L2CacheSize, Qcow2Draft, Qcow2Settings, SecretSource};
use reactor::Polling;
pub use record::Record;
pub use sandbox::Sandbox;
pub use shares::{LimitsDraft, Settings, SettingsDraft};
use storage::{CacheMode, Format, Part, delay::DelayOptions, fault::FaultRule, rate::RateOptions};
pub use tls::{Credentials, Tls, TlsDraft, TlsMode};
pub use units::{
    Rule, connections, count, detect_zeroes, discards, duration, exact_size, limit_parser, long_duration,
    polling, read, seconds, size, sizes_around, workers,
};

/// Everything `weir serve` is to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// At least one, in the order they were given.
    pub disks: Vec<Disk>,
    /// Each after the one it lies in, else in the order they were given; one may have no members.
    pub groups: Vec<Group>,
    /// No two at the same place.
    pub servers: Vec<Server>,
    /// Exports with a door of their own; no two at the same place, and none where a server is. At
    /// least one of these or of those.
    pub doors: Vec<DoorExport>,
    /// What holds for the process.
    pub service: Service,
}

/// One disk.
#[derive(Clone, Debug, PartialEq)]
pub struct Disk {
    /// Unique among disks and groups.
    pub name: String,
    /// What clients are told about it; may be empty.
    pub description: String,
    /// Who may have it over NBD.
    pub access: Access,
    /// Where its bytes are.
    pub image: Image,
    /// How they are laid out; `None` is found by probing.
    pub format: Option<Format>,
    /// The part of a raw image that is the disk.
    pub part: Option<Part>,
    /// The internal snapshot of a qcow2 image that is served in its place.
    pub snapshot: Option<String>,
    /// How the host's page cache is used.
    pub cache: CacheMode,
    /// What a qcow2 image is opened with.
    pub qcow2: Qcow2Settings,
    /// What is read ahead.
    pub prefetch: policy::prefetch::Settings,
    /// What is done about requests that the device fails.
    pub on_error: ErrorPolicies,
    /// What becomes of discards.
    pub discard: Discards,
    /// Whether writes are looked at for zeroes.
    pub detect_zeroes: DetectZeroes,
    /// Refuses writes.
    pub read_only: bool,
    /// Opens the image though somebody else writes to it.
    pub force_share: bool,
    /// Has the image locked only while a machine uses the disk, so that another daemon can take it
    /// over.
    pub handover: bool,
    /// How long requests wait for an NBD server that has gone; zero: not at all.
    pub reconnect_delay: policy::time::Duration,
    /// How long it is tried to reach an NBD server at first; zero: once.
    pub open_timeout: policy::time::Duration,
    /// Latency added to imitate a slower device.
    pub delay: Option<DelayOptions>,
    /// Bandwidth of the device to imitate.
    pub rate: Option<RateOptions>,
    /// Errors to imitate, in order.
    pub faults: Vec<FaultRule>,
    /// What holds for it by itself.
    pub settings: Settings,
    /// Index in [`Plan::groups`] of the group whose settings hold for it too.
    pub group: Option<usize>,
}

/// What holds for several disks together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Unique among groups and disks.
    pub name: String,
    /// What holds for all below it together.
    pub settings: Settings,
    /// Index in [`Plan::groups`], smaller than this group's, of the group that it lies in.
    pub parent: Option<usize>,
    /// Its limits are those of the cluster, over all hosts.
    pub cluster: bool,
}

/// A place where clients connect, and what they find there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// The place.
    pub endpoint: Endpoint,
    /// Of a place for disks that do not say where they are exported: whether they are read-only
    /// there. None where all that are there have said so.
    pub standard: Option<bool>,
    /// At least one; names are unique. The only one of a server is also its default export.
    pub exports: Vec<Export>,
}

/// Where a server listens.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// On an address to be bound.
    Address(Address),
    /// On all the sockets the service manager passed.
    Inherited,
    /// On a socket that was passed, by its name (`FileDescriptorName=`) or its number.
    Passed(String),
}

impl Endpoint {
    /// The same from whatever directory it is seen.
    #[must_use]
    pub fn whole(&self) -> Self {
        match self {
            Self::Address(Address::Unix(path)) => {
                Self::Address(Address::Unix(std::path::absolute(path).unwrap_or_else(|_| path.clone())))
            }
            other => other.clone(),
        }
    }
}

impl FromStr for Endpoint {
    type Err = String;

    /// `fd:NAME`, or an address.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("fd:") {
            Some("") => Err("has no name; write fd:NAME, as FileDescriptorName= has it".to_owned()),
            Some(name) => Ok(Self::Passed(name.to_owned())),
            None => text.parse().map(Self::Address),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address(address) => address.fmt(f),
            Self::Inherited => f.write_str("inherited sockets"),
            Self::Passed(name) => write!(f, "fd:{name}"),
        }
    }
}

/// A disk under a name that clients ask for.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Empty is the default export.
    pub name: String,
    /// Index in [`Plan::disks`].
    pub disk: usize,
    /// Refuses writes though the disk takes them.
    pub read_only: bool,
}

/// A disk with a door of its own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoorExport {
    /// Which, where, and what is offered there.
    pub door: Door,
    /// Index in [`Plan::disks`].
    pub disk: usize,
}

/// What is done about the control socket that nobody named: [`control::ControlSocket`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standard {
    /// There is none.
    Off,
    /// There is one if it can be had.
    Try,
    /// Without it there is no daemon.
    Must,
}

/// What holds for the whole process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Service {
    /// Threads that do I/O, at least one.
    pub workers: usize,
    /// Whether, and how long, a thread looks for completions before it sleeps.
    pub poll: Polling,
    /// Clients at a time at each server; 0 is any number.
    pub max_connections: u32,
    /// Of them from one address; 0 is any number, `None` nine tenths.
    pub max_connections_per_address: Option<u32>,
    /// Who may connect over NBD.
    pub access: Access,
    /// Bytes of memory for data; `None` is a part of what there is.
    pub memory: Option<u64>,
    /// Who may connect to Unix sockets of exports.
    pub sockets: SocketAccess,
    /// End once the last client has gone.
    pub exit_when_idle: bool,
    /// Unix sockets where the daemon is controlled.
    pub qmp: Vec<PathBuf>,
    /// Whether it is also controlled where nobody said, and commands look.
    pub control: Standard,
    /// Where figures are told over HTTP; `None`: nowhere.
    pub metrics: Option<Address>,
    /// Who is told of events beside the log.
    pub on_event: Option<OnEvent>,
    /// Where the page is, over HTTP; `None`: nowhere.
    pub http: Option<Http>,
    /// Encryption of connections.
    pub tls: Tls,
    /// What is logged.
    pub log: LogSettings,
    /// Where the process leaves its number once it serves.
    pub pid_file: Option<PathBuf>,
    /// Where `weir probe` left what devices can do; `None` is the usual place.
    pub state: Option<PathBuf>,
    /// Where images and everything they name must lie.
    pub image_root: Option<PathBuf>,
    /// The file of control groups' limits to watch; `None`: none are.
    pub cgroup_limits: Option<PathBuf>,
    /// What is kept of what disks are asked; `None`: nothing.
    pub record: Option<Record>,
    /// The hosts that share limits with this one; `None`: none do.
    pub cluster: Option<Cluster>,
    /// Which rights it gives up once all is open.
    pub sandbox: Sandbox,
    /// Who it goes on as then; `None`: as it was started.
    pub user: Option<Owner>,
}
