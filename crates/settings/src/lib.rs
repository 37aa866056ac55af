//! The configuration of weir as plain values: disks, their limits, groups, exports, threads.
//!
//! ```text
//!   command line ── arguments ─┐
//!                   tables of keys ─► ParsedConfig (values with origins) ─► check ─► DesiredState ─► serve
//!   config file ──── config ───┘
//! ```
//!
//! Both sources produce a [`ParsedConfig`], so each rule is checked once. A [`DesiredState`] is
//! consistent: indices are valid, names are unique, groups form trees, limits obey their rules.
//! Options of one command are defined beside that command, shared options in `arguments`. `parsers`
//! has the parsers of sizes, times and counts.
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

mod address;
pub mod arguments;
pub mod check;
mod clients;
mod cluster;
pub mod config;
pub mod control;
mod daemon;
mod diagnostics;
pub mod disk;
pub mod error_keys;
mod exports;
mod group;
mod groups;
mod http;
mod image;
pub mod image_info;
mod image_options;
pub mod key;
pub mod keyval;
mod latency;
pub mod log;
mod on_event;
mod option_syntax;
mod origins;
mod parsed;
mod parsers;
pub mod prefetch;
mod qcow2;
pub mod quota;
mod recordings;
mod remarks;
mod reservations;
mod sandbox;
pub mod schedule;
pub mod secret;
mod socket_access;
pub mod state;
pub mod suggest;
mod throttle;
mod tls;

use std::{fmt, ops::Deref, str::FromStr};

pub use address::{ListenAddress, parse_unix_socket};
pub use clients::parse_tls_name;
pub use cluster::{ClusterConfig, EtcdEndpoint, parse_cluster_name, parse_fallback_share};
pub use daemon::{DaemonConfig, MAX_WORKERS, MIN_MEMORY};
use diagnostics::Spanned;
pub use diagnostics::{ConfigError, Diagnostics, Origin};
pub use disk::{DiskConfig, ExportConfig};
pub use exports::{
    ExportTarget, FuseConfig, NbdDeviceConfig, NbdExportConfig, NbdServerConfig, UblkConfig,
    VhostUserBlkConfig, VhostUserSocket,
};
pub use group::GroupConfig;
pub use groups::nested_target_rule;
pub use http::{HttpConfig, parse_http_name};
pub use image::ImageLocation;
pub use image_options::ImageDescription;
pub use key::{ConfigKey, KeyLiteral};
pub use latency::{LatencyConfig, LatencySetting};
pub use log::{LogFormat, LogSettings};
pub use on_event::EventCommand;
pub use option_syntax::AddressedConfig;
pub use origins::{ConfigWithOrigins, KeyTable};
pub use parsed::ParsedConfig;
pub use parsers::{
    RuleError, connections, count, detect_zeroes, discards, duration, exact_size, limit_parser,
    long_duration, nearest_multiples, parse, polling, seconds, size, whole_seconds,
};
pub use qcow2::{Qcow2Settings, SecretSource};
pub use quota::QuotaSetting;
pub use recordings::RecordingConfig;
pub use sandbox::SandboxMode;
pub use socket_access::{FileOwner, SocketAccess, socket_mode};
pub use throttle::{SIZE_HEADING, ThrottleConfig};
pub use tls::{TlsConfig, TlsCredentialFiles, TlsMode};

/// A disk with the origins of its keys.
pub type DiskWithOrigins = ConfigWithOrigins<DiskConfig>;
/// A group with the origins of its keys.
pub type GroupWithOrigins = ConfigWithOrigins<GroupConfig>;

/// Desired state of a daemon.
#[derive(Clone, Debug, PartialEq)]
pub struct DesiredState {
    /// At least one disk unless there is a cluster, in the order of the config.
    pub disks: Vec<ConfigWithOrigins<DiskConfig>>,
    /// Groups, each after its parent, otherwise in the order of the config. A group may be empty.
    pub groups: Vec<ConfigWithOrigins<GroupConfig>>,
    /// NBD servers, each with a different endpoint.
    pub servers: Vec<NbdServerSpec>,
    /// Exports with a separate endpoint: each differs from all endpoints here and in `servers`.
    pub exports: Vec<ExportSpec>,
    /// Settings of the process.
    pub process: ProcessSpec,
}

/// NBD server: an endpoint and its exports.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdServerSpec {
    /// Endpoint to listen on.
    pub endpoint: ListenEndpoint,
    /// Set if disks without exports of their own are served here: true if they are read-only.
    /// `None` for an endpoint that only explicit exports name.
    pub default_read_only: Option<bool>,
    /// Exports with unique names. A single export is the default export as well.
    pub exports: Vec<NbdExportSpec>,
}

/// Endpoint of a server.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum ListenEndpoint {
    /// An address to bind.
    Address(ListenAddress),
    /// All sockets that the service manager passed.
    Inherited,
    /// One passed socket, by its name (`FileDescriptorName=`) or its number.
    Passed(String),
}

impl ListenEndpoint {
    /// The endpoint with an absolute path.
    #[must_use]
    pub fn absolute(&self) -> Self {
        match self {
            Self::Address(ListenAddress::Unix(path)) => {
                Self::Address(ListenAddress::Unix(std::path::absolute(path).unwrap_or_else(|_| path.clone())))
            }
            other => other.clone(),
        }
    }
}

impl FromStr for ListenEndpoint {
    type Err = String;

    /// Parses `fd:NAME` or an address.
    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("fd:") {
            Some("") => Err("has no name; write fd:NAME, with the name of FileDescriptorName=".to_owned()),
            Some(name) => Ok(Self::Passed(name.to_owned())),
            None => text.parse().map(Self::Address),
        }
    }
}

impl fmt::Display for ListenEndpoint {
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
pub struct NbdExportSpec {
    /// Export name; empty for the default export.
    pub name: String,
    /// Index in [`DesiredState::disks`].
    pub disk: usize,
    /// True if the export rejects writes to a writable disk.
    pub read_only: bool,
}

/// Export of a disk at a separate endpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExportSpec {
    /// Type, endpoint and settings of the export.
    pub target: ExportTarget,
    /// Index in [`DesiredState::disks`].
    pub disk: usize,
}

/// Policy for the control socket at the default address: [`control::ControlSocketLocation`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ControlSocketPolicy {
    /// No socket.
    Off,
    /// A socket, unless opening it fails.
    IfAvailable,
    /// A socket; a failure ends the daemon.
    Required,
}

/// Config of the process, with values derived from several keys.
#[derive(Clone, Debug, PartialEq)]
pub struct ProcessSpec {
    /// The config. Sockets without an owner belong to the daemon's user.
    pub config: ConfigWithOrigins<DaemonConfig>,
    /// Encryption of connections.
    pub tls: TlsConfig,
    /// Cluster whose limits this host shares; `None` without one.
    pub cluster: Option<ClusterConfig>,
    /// Warnings about keys of `[cluster]` that were given under their old names.
    pub(crate) rename_warnings: Vec<&'static str>,
}

impl Deref for ProcessSpec {
    type Target = DaemonConfig;

    fn deref(&self) -> &DaemonConfig {
        &self.config
    }
}
