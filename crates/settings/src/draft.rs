//! What was said: every value well formed by itself, with its place.

use std::path::PathBuf;

use reactor::Polling;

use super::{
    AccessDraft, Address, Cluster, DiskConfig, GroupConfig, LogFormat, Nbd, OnEvent, Owner, Placed, Record,
    Said, Sandbox, tls::TlsDraft,
};

/// All that the command line and the config file said.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    pub disks: Vec<Placed<DiskConfig>>,
    pub groups: Vec<Placed<GroupConfig>>,
    pub service: ServiceDraft,
}

/// What was said about the process.
#[derive(Clone, Debug, Default)]
pub struct ServiceDraft {
    /// Where disks are served that say nothing themselves.
    pub nbd: Vec<Said<Nbd>>,
    pub socket_mode: Option<Said<u32>>,
    pub socket_owner: Option<Said<Owner>>,
    pub exit_when_idle: Option<Said<bool>>,
    /// Sockets of the control protocol.
    pub qmp: Vec<Said<PathBuf>>,
    /// Whether there is to be one where commands look; none: if none is named, and it can be had.
    pub control: Option<Said<bool>>,
    /// Where figures are told over HTTP.
    pub metrics: Option<Said<Address>>,
    /// Who is told of events beside the log.
    pub on_event: Option<Said<OnEvent>>,
    /// Where the page is, and programs ask and change over HTTP.
    pub http: Option<Said<Address>>,
    pub http_token_file: Option<Said<PathBuf>>,
    /// As what browsers may call this host there.
    pub http_name: Vec<Said<String>>,
    pub workers: Option<Said<usize>>,
    pub poll: Option<Said<Polling>>,
    pub max_connections: Option<Said<u32>>,
    pub max_connections_per_address: Option<Said<u32>>,
    /// Who may connect over NBD.
    pub access: AccessDraft,
    pub memory: Option<Said<u64>>,
    pub tls: TlsDraft,
    pub log: Option<Said<String>>,
    pub log_format: Option<Said<LogFormat>>,
    pub log_file: Option<Said<PathBuf>>,
    pub pid_file: Option<Said<PathBuf>>,
    pub state: Option<Said<PathBuf>>,
    pub image_root: Option<Said<PathBuf>>,
    /// The file of control groups' limits to watch.
    pub cgroup_limits: Option<Said<PathBuf>>,
    pub record: Option<Said<Record>>,
    pub cluster: Option<Said<Cluster>>,
    pub sandbox: Option<Said<Sandbox>>,
    pub user: Option<Said<Owner>>,
}

impl ServiceDraft {
    /// These settings, and `other`'s where these say nothing.
    pub fn or(self, other: Self) -> Self {
        // They are one setting: which control sockets there are. One where commands look is beside
        // the others.
        let (control, qmp) = match self.control {
            Some(Said { value: true, .. }) if self.qmp.is_empty() => (self.control, other.qmp),
            None if self.qmp.is_empty() => (other.control, other.qmp),
            control => (control, self.qmp),
        };
        Self {
            nbd: if self.nbd.is_empty() { other.nbd } else { self.nbd },
            socket_mode: self.socket_mode.or(other.socket_mode),
            socket_owner: self.socket_owner.or(other.socket_owner),
            exit_when_idle: self.exit_when_idle.or(other.exit_when_idle),
            control,
            qmp,
            metrics: self.metrics.or(other.metrics),
            on_event: self.on_event.or(other.on_event),
            http: self.http.or(other.http),
            http_token_file: self.http_token_file.or(other.http_token_file),
            http_name: if self.http_name.is_empty() { other.http_name } else { self.http_name },
            workers: self.workers.or(other.workers),
            poll: self.poll.or(other.poll),
            max_connections: self.max_connections.or(other.max_connections),
            max_connections_per_address: self
                .max_connections_per_address
                .or(other.max_connections_per_address),
            access: self.access.or(other.access),
            memory: self.memory.or(other.memory),
            tls: self.tls.or(other.tls),
            log: self.log.or(other.log),
            log_format: self.log_format.or(other.log_format),
            log_file: self.log_file.or(other.log_file),
            pid_file: self.pid_file.or(other.pid_file),
            state: self.state.or(other.state),
            image_root: self.image_root.or(other.image_root),
            cgroup_limits: self.cgroup_limits.or(other.cgroup_limits),
            record: self.record.or(other.record),
            cluster: self.cluster.or(other.cluster),
            sandbox: self.sandbox.or(other.sandbox),
            user: self.user.or(other.user),
        }
    }
}
