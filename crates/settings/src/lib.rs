//! What a user asks of weir, as plain values: disks, their limits, groups, exports, threads.
//!
//! ```text
//!   command line ── arguments ─┐
//!                   tables of keys ─► Draft (values with their places) ─► check ─► Plan ─► serve
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
mod addressed;
pub mod arguments;
pub mod check;
mod clients;
mod cluster;
pub mod config;
pub mod control;
mod daemon;
pub mod disk;
mod doors;
mod draft;
mod group;
mod groups;
mod http;
mod image;
pub mod image_info;
mod image_options;
pub mod key;
pub mod keyval;
pub mod log;
pub mod on_error;
mod on_event;
mod place;
mod placed;
pub mod prefetch;
mod promises;
mod qcow2;
mod record;
mod remarks;
mod sandbox;
pub mod secret;
mod shares;
pub mod state;
pub mod suggest;
mod tls;
mod units;

use std::{fmt, ops::Deref, str::FromStr};

pub use access::{Owner, SocketAccess, socket_mode};
pub use address::{Address, socket};
pub use addressed::AddressedKeys;
pub use clients::tls_name;
pub use cluster::{Cluster, Etcd, cluster_name, safe_share};
pub use daemon::{DaemonConfig, LEAST_MEMORY, MAX_WORKERS};
pub use disk::{DiskConfig, ExportConfig};
pub use doors::{Door, Fuse, Nbd, NbdDevice, NbdExport, Socket, Ublk, VhostUserBlk};
pub use draft::Draft;
pub use group::GroupConfig;
pub use http::{Http, http_name};
pub use image::Image;
pub use image_options::ImageDescription;
pub use key::{Key, Literal};
pub use log::{LogFormat, LogSettings};
pub use on_event::OnEvent;
use place::Said;
pub use place::{Mistakes, Place, Wrong};
pub use placed::{KeySet, Placed};
pub use qcow2::{Qcow2Settings, SecretSource};
pub use record::Record;
pub use sandbox::Sandbox;
pub use shares::Settings;
pub use tls::{Credentials, Tls, TlsMode};
pub use units::{
    Rule, connections, count, detect_zeroes, discards, duration, exact_size, limit_parser, long_duration,
    polling, read, seconds, size, sizes_around,
};

/// A disk with the places of its keys.
pub type PlacedDisk = Placed<DiskConfig>;
/// A group with the places of its keys.
pub type PlacedGroup = Placed<GroupConfig>;

/// Everything `weir serve` is to do.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// At least one, in the order they were given.
    pub disks: Vec<Placed<DiskConfig>>,
    /// Each after the one it lies in, else in the order they were given; one may have no members.
    pub groups: Vec<Placed<GroupConfig>>,
    /// No two at the same place.
    pub servers: Vec<Server>,
    /// Exports with a door of their own; no two at the same place, and none where a server is. At
    /// least one of these or of those.
    pub doors: Vec<DoorExport>,
    /// What holds for the process.
    pub service: Service,
}

/// A disk that is added to those of a daemon, with its exports.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedDisk {
    /// The disk.
    pub disk: Placed<DiskConfig>,
    /// The NBD servers where it is exported.
    pub servers: Vec<Server>,
    /// Its exports by other protocols.
    pub doors: Vec<DoorExport>,
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

/// The config of the process, with what follows from several of its keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// The config. Unless it states an owner of sockets, that is the user of the daemon.
    pub config: Placed<DaemonConfig>,
    /// Encryption of connections.
    pub tls: Tls,
    /// The hosts that share limits with this one; `None`: no cluster.
    pub cluster: Option<Cluster>,
}

impl Deref for Service {
    type Target = DaemonConfig;

    fn deref(&self) -> &DaemonConfig {
        &self.config
    }
}
