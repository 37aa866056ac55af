//! What was said: every value well formed by itself, with its place.

use std::path::PathBuf;

use block::disk::{DetectZeroes, Discards};
use policy::time::Duration;
use reactor::Polling;
use storage::{CacheMode, Format, Part, delay::DelayOptions, fault::FaultRule, rate::RateOptions};

use super::{
    AccessDraft, Address, Cluster, Door, Endpoint, Image, LogFormat, Nbd, OnErrorDraft, OnEvent, Owner,
    Place, PrefetchDraft, Qcow2Draft, Record, Said, Sandbox, SettingsDraft, tls::TlsDraft,
};

/// All that the command line and the config file said.
#[derive(Clone, Debug, Default)]
pub struct Draft {
    pub disks: Vec<DiskDraft>,
    pub groups: Vec<GroupDraft>,
    pub service: ServiceDraft,
}

/// A disk as it was described.
#[derive(Clone, Debug)]
pub struct DiskDraft {
    pub name: Said<String>,
    pub description: Option<Said<String>>,
    /// Who may have it over NBD.
    pub access: AccessDraft,
    pub image: Said<Image>,
    pub format: Option<Said<Format>>,
    pub part: Option<Said<Part>>,
    pub snapshot: Option<Said<String>>,
    pub cache: Option<Said<CacheMode>>,
    pub qcow2: Qcow2Draft,
    pub prefetch: PrefetchDraft,
    pub on_error: OnErrorDraft,
    pub discard: Option<Said<Discards>>,
    pub detect_zeroes: Option<Said<DetectZeroes>>,
    pub read_only: bool,
    /// Where it was asked for, if it was.
    pub force_share: Option<Place>,
    /// Where it was asked for, if it was.
    pub handover: Option<Place>,
    pub reconnect_delay: Option<Said<Duration>>,
    pub open_timeout: Option<Said<Duration>>,
    pub settings: SettingsDraft,
    pub group: Option<Said<String>>,
    pub delay: Option<Said<DelayOptions>>,
    pub rate: Option<Said<RateOptions>>,
    pub faults: Vec<Said<FaultRule>>,
    /// What clients ask for where the daemon serves what says nothing; none: the disk's name.
    pub export_name: Option<Said<String>>,
    /// None: wherever the daemon serves what says nothing, unless it has doors of its own.
    pub exports: Vec<ExportDraft>,
    /// Doors of its own.
    pub doors: Vec<Said<Door>>,
}

impl DiskDraft {
    /// Whether it refuses writes, as a snapshot does without being told.
    pub fn is_read_only(&self) -> bool {
        self.read_only || self.snapshot.is_some() || self.image.value.is_snapshot()
    }

    /// Whether it says itself where it is exported.
    pub fn says_where(&self) -> bool {
        !self.exports.is_empty() || !self.doors.is_empty()
    }
}

/// An export as it was described.
#[derive(Clone, Debug)]
pub struct ExportDraft {
    pub listen: Said<Endpoint>,
    /// None: as the disk.
    pub name: Option<Said<String>>,
    pub read_only: bool,
}

/// A group as it was described.
#[derive(Clone, Debug)]
pub struct GroupDraft {
    pub name: Said<String>,
    pub settings: SettingsDraft,
    /// The group it lies in.
    pub group: Option<Said<String>>,
    /// Where it was said that its limits are the cluster's, if it was.
    pub cluster: Option<Place>,
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
