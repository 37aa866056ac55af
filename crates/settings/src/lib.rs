//! The configuration of weir as plain values: disks, their limits, groups, exports, threads.
//!
//! ```text
//!   command line ── arguments ─┐
//!                   tables of keys ─► Draft (values with their places) ─► check ─► Plan ─► serve
//!   config file ──── config ───┘
//! ```
//!
//! Both sources produce a [`Draft`], so each rule is checked in one place. A [`Plan`] is
//! consistent: indices are valid, names are unique, groups form trees, limits obey their rules.
//! Options of one command are defined beside that command, shared options in `arguments`. `units`
//! parses sizes, times and counts.
//!
//! Never opens an image or a socket. Reads only the config file, passphrases and weir's own state
//! files (`state`).

/// Notation of sizes, as one sentence for the help of every command that accepts them.
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

/// Desired state of a daemon.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// At least one disk unless there is a cluster, in the order of the config.
    pub disks: Vec<Placed<DiskConfig>>,
    /// Groups, each after its parent, otherwise in the order of the config. A group may be empty.
    pub groups: Vec<Placed<GroupConfig>>,
    /// NBD servers, each with a different endpoint.
    pub servers: Vec<Server>,
    /// Exports with a separate endpoint: each differs from all endpoints here and in `servers`.
    pub doors: Vec<DoorExport>,
    /// Settings of the process.
    pub service: Service,
}

/// A disk that is added to a running daemon, with its exports.
#[derive(Clone, Debug, PartialEq)]
pub struct PlannedDisk {
    /// The disk.
    pub disk: Placed<DiskConfig>,
    /// NBD servers that export the disk.
    pub servers: Vec<Server>,
    /// Exports by other protocols.
    pub doors: Vec<DoorExport>,
}

/// NBD server: an endpoint and its exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Server {
    /// Endpoint to listen on.
    pub endpoint: Endpoint,
    /// Set if disks without exports of their own are served here: true if they are read-only.
    /// `None` for an endpoint that only explicit exports name.
    pub standard: Option<bool>,
    /// Exports with unique names. A single export is the default export as well.
    pub exports: Vec<Export>,
}

/// Endpoint of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum Endpoint {
    /// An address to bind.
    Address(Address),
    /// All sockets that the service manager passed.
    Inherited,
    /// One passed socket, by its name (`FileDescriptorName=`) or its number.
    Passed(String),
}

impl Endpoint {
    /// The endpoint with an absolute path.
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

    /// Parses `fd:NAME` or an address.
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

/// A disk with an NBD export name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Export {
    /// Export name; empty for the default export.
    pub name: String,
    /// Index in [`Plan::disks`].
    pub disk: usize,
    /// True if the export rejects writes to a writable disk.
    pub read_only: bool,
}

/// Export of a disk at a separate endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DoorExport {
    /// Type, endpoint and settings of the export.
    pub door: Door,
    /// Index in [`Plan::disks`].
    pub disk: usize,
}

/// Policy for the control socket at the default address: [`control::ControlSocket`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Standard {
    /// No socket.
    Off,
    /// A socket, unless opening it fails.
    Try,
    /// A socket; a failure ends the daemon.
    Must,
}

/// Config of the process, with values derived from several keys.
#[derive(Clone, Debug, PartialEq)]
pub struct Service {
    /// The config. Sockets without an owner belong to the daemon's user.
    pub config: Placed<DaemonConfig>,
    /// Encryption of connections.
    pub tls: Tls,
    /// Cluster whose limits this host shares; `None` without one.
    pub cluster: Option<Cluster>,
}

impl Deref for Service {
    type Target = DaemonConfig;

    fn deref(&self) -> &DaemonConfig {
        &self.config
    }
}
