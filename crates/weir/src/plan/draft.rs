//! What was said, before it is known to make sense: every value well formed by itself, with the place it was said at.

use std::{path::PathBuf, time::Duration};

use block::storage::{CacheMode, Format, delay::DelayOptions, fault::FaultRule, rate::RateOptions};
use policy::throttle::Setting;

use super::{
    Address, Image, LogFormat, Place, PrefetchDraft, Qcow2Draft, Said, SettingsDraft, tls::TlsDraft,
};

/// All that the command line and the config file said.
#[derive(Clone, Debug, Default)]
pub(crate) struct Draft {
    pub(crate) disks: Vec<DiskDraft>,
    pub(crate) groups: Vec<GroupDraft>,
    pub(crate) service: ServiceDraft,
}

/// Limits as they were set, one by one.
pub(crate) type LimitsDraft = Vec<Said<(Setting, u64)>>;

/// A disk as it was described.
#[derive(Clone, Debug)]
pub(crate) struct DiskDraft {
    pub(crate) name: Said<String>,
    pub(crate) description: Option<Said<String>>,
    pub(crate) image: Said<Image>,
    pub(crate) format: Option<Said<Format>>,
    pub(crate) cache: Option<Said<CacheMode>>,
    pub(crate) qcow2: Qcow2Draft,
    pub(crate) prefetch: PrefetchDraft,
    pub(crate) read_only: bool,
    /// Where it was asked for, if it was.
    pub(crate) force_share: Option<Place>,
    pub(crate) settings: SettingsDraft,
    pub(crate) group: Option<Said<String>>,
    pub(crate) delay: Option<Said<DelayOptions>>,
    pub(crate) rate: Option<Said<RateOptions>>,
    pub(crate) faults: Vec<Said<FaultRule>>,
    /// None: wherever the daemon serves what says nothing.
    pub(crate) exports: Vec<ExportDraft>,
}

/// An export as it was described.
#[derive(Clone, Debug)]
pub(crate) struct ExportDraft {
    pub(crate) listen: Said<Address>,
    /// None: as the disk.
    pub(crate) name: Option<Said<String>>,
}

/// A group as it was described.
#[derive(Clone, Debug)]
pub(crate) struct GroupDraft {
    pub(crate) name: Said<String>,
    pub(crate) settings: SettingsDraft,
    /// The group it lies in.
    pub(crate) group: Option<Said<String>>,
}

/// What was said about the process.
#[derive(Clone, Debug, Default)]
pub(crate) struct ServiceDraft {
    /// Where disks are served that say nothing themselves.
    pub(crate) nbd: Vec<Said<Address>>,
    /// Sockets of the control protocol.
    pub(crate) qmp: Vec<Said<PathBuf>>,
    pub(crate) workers: Option<Said<usize>>,
    pub(crate) poll: Option<Said<Duration>>,
    pub(crate) max_connections: Option<Said<u32>>,
    pub(crate) tls: TlsDraft,
    pub(crate) log: Option<Said<String>>,
    pub(crate) log_format: Option<Said<LogFormat>>,
    pub(crate) pid_file: Option<Said<PathBuf>>,
    pub(crate) state: Option<Said<PathBuf>>,
    pub(crate) image_root: Option<Said<PathBuf>>,
    /// The file of control groups' limits to watch.
    pub(crate) cgroup_limits: Option<Said<PathBuf>>,
}

impl ServiceDraft {
    /// These settings, and `other`'s where these say nothing.
    pub(crate) fn or(self, other: Self) -> Self {
        Self {
            nbd: if self.nbd.is_empty() { other.nbd } else { self.nbd },
            qmp: if self.qmp.is_empty() { other.qmp } else { self.qmp },
            workers: self.workers.or(other.workers),
            poll: self.poll.or(other.poll),
            max_connections: self.max_connections.or(other.max_connections),
            tls: self.tls.or(other.tls),
            log: self.log.or(other.log),
            log_format: self.log_format.or(other.log_format),
            pid_file: self.pid_file.or(other.pid_file),
            state: self.state.or(other.state),
            image_root: self.image_root.or(other.image_root),
            cgroup_limits: self.cgroup_limits.or(other.cgroup_limits),
        }
    }
}
