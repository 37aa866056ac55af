//! Status of exports and NBD servers: a part of [`DaemonStatus`](crate::DaemonStatus).

use std::fmt;

use serde::{Deserialize, Serialize};

/// A listener for NBD clients.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct ServerStatus {
    /// Address that clients connect to.
    pub address: String,
    /// Address in the notation of the config file. Absent if the config cannot express it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub listen: Option<String>,
    /// Present if disks without an explicit export are exported here.
    #[serde(rename = "default", skip_serializing_if = "Option::is_none")]
    pub default_export: Option<DefaultExport>,
    /// True if the listener was added by a command and is in no config.
    pub added: bool,
    /// Number of connections.
    pub connections: u64,
    /// Clients that were rejected.
    pub refused: RefusedClients,
}

/// Options for the exports of disks without an explicit export.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct DefaultExport {
    /// True if clients may not write.
    pub read_only: bool,
}

/// Number of rejected clients, by reason.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct RefusedClients {
    /// Their address is not allowed.
    pub networks: u64,
    /// There were too many connections.
    pub connections: u64,
    /// Their TLS identity is not allowed.
    pub names: u64,
    /// The export does not exist, or they have no access to it.
    pub exports: u64,
}

/// One way for clients to reach a disk. Which of the optional members are present depends on its
/// type.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ExportStatus {
    /// `nbd`, `vhost-user-blk`, `ublk`, `fuse` or `nbd-device`.
    #[serde(rename = "type")]
    pub kind: String,
    /// Name for clients.
    pub name: String,
    /// Identifier in QMP.
    pub id: String,
    /// Name of the disk.
    pub disk: String,
    /// Endpoint that clients connect to.
    pub address: String,
    /// Number of connections.
    pub connections: u64,
    /// True if clients may not write.
    pub read_only: bool,
    /// Device node or file on this host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Mount points of the device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mounts: Option<Vec<String>>,
    /// Devices that are stacked on it, for example `dm-0`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub holders: Option<Vec<String>>,
    /// Counters of its type.
    #[serde(flatten)]
    pub counters: ExportCounters,
}

/// Counters of an export. Those that do not apply to its type are absent.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case", default)]
pub struct ExportCounters {
    /// Virtqueues of a guest, or queues of a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub queues: Option<u64>,
    /// Requests received.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub requests: Option<u64>,
    /// Requests that have not completed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub in_flight: Option<u64>,
    /// Notifications from the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kicks: Option<u64>,
    /// Notifications to the guest.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub calls: Option<u64>,
    /// Buffers copied because the disk could not use the guest's memory directly.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copies: Option<u64>,
    /// Process that is the front end of a vhost-user export.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub front_end: Option<FrontEndProcess>,
    /// Processes that have the file of a FUSE export open.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub openers: Option<u64>,
    /// Socket pairs of a kernel NBD device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sockets: Option<u64>,
    /// Connections of a kernel NBD device that were replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replaced: Option<u64>,
    /// True for a ublk device that this process took over from another.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub taken_over: Option<bool>,
    /// True for a ublk device that stays when its server ends.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub survives: Option<bool>,
    /// Memory of a ublk device for the data of requests.
    #[serde(rename = "buffer-bytes", skip_serializing_if = "Option::is_none")]
    pub buffer_bytes: Option<u64>,
    /// True if a ublk device uses zero copy.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub zero_copy: Option<bool>,
    /// Bytes that were copied although `zero-copy` is on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copied_bytes: Option<u64>,
}

impl ExportCounters {
    /// Number of virtqueues, or of queues of a device. A kernel NBD device has one queue for each
    /// socket pair.
    pub fn queue_count(&self) -> Option<u64> {
        self.queues.or(self.sockets)
    }
}

/// Process that is the front end of a vhost-user export.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq, Serialize)]
#[serde(default)]
pub struct FrontEndProcess {
    /// Its identifier.
    pub pid: u32,
    /// Its name, as the kernel reports it.
    pub name: String,
}

impl fmt::Display for FrontEndProcess {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pid, name } = self;
        // The name is empty if the kernel did not reveal it.
        if name.is_empty() { write!(f, "process {pid}") } else { write!(f, "{name} ({pid})") }
    }
}
