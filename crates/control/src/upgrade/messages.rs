//! Messages of an upgrade: the running objects, the state of clients and limits, and the decision
//! which process continues.
//!
//! ```text
//!   old process                        new process
//!     UpgradeOffer    ─────────────►     opens all of it
//!                     ◄─────────────   OpensAs, any number; then Prepared, or Refused
//!     (quiesces)
//!     QuiesceOutcome  ─────────────►     reads metadata, assigns clients
//!                     ◄─────────────   Ready
//!     Yours           ─────────────►     serves
//! ```
//!
//! Until it sends [`UpgradeMessage::Yours`] the old process may resume; after that it never does.
//! Data and their validation only: no received value is trusted.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context as _, ensure};
use export::nbd::{MetaContext, MetaContexts, NbdSession, ReplyStyle};
use policy::{
    access::{AccessRules, NameRule, NameRules, Network, NetworkRules},
    throttle::{BucketContents, BucketSnapshot, LimitSetting, Limits},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    counters::{DaemonCounterState, DiskCounterState, ThrottleCounterState},
    identity::DiskIdentity,
};
use crate::quotas::StoredCounts;

/// Version of the format. It changes whenever members are added or change their meaning, except
/// members that may be missing, because an older process does not send them: those that are only
/// logged, counts of quotas, and names of overlays.
pub(crate) const UPGRADE_FORMAT: u64 = 8;

/// Message without attachments.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) enum UpgradeMessage {
    /// The new process is about to open images in a Ceph cluster, as the client with this id.
    OpensAs(u64),
    /// Everything that can be opened while the old process serves is open.
    Prepared,
    /// The upgrade failed, with the reason.
    Refused(String),
    /// The new process can serve.
    Ready,
    /// The new process serves from now on.
    Yours,
}

/// Source of a running object.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum ObjectOrigin<T> {
    /// Config file or command line: the new config must contain it, too.
    Config,
    /// Client of the control socket, with the parameters for adding it again.
    Added(T),
    /// Client of the control socket; it cannot be added again, with the reason.
    #[serde(rename = "bound")]
    NotTransferable(String),
}

impl<T> ObjectOrigin<T> {
    pub(super) fn is_added(&self) -> bool {
        matches!(self, Self::Added(_))
    }
}

/// Added disk.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct AddedDiskState {
    /// Arguments of each `blockdev-add`, lowest node first.
    pub(super) nodes: Vec<Map<String, Value>>,
    /// Arguments of `x-weir-set`.
    pub(super) settings: Map<String, Value>,
    /// Keys of its table in a config file, if it was added by keys. `nodes` then has only the nodes
    /// above it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) keys: Option<Map<String, Value>>,
    /// Its name before `blockdev-add` put nodes above it, if it was added by keys.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) lowest_name: Option<String>,
}

/// Added group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct AddedGroupState {
    pub(super) name: String,
    pub(super) parent: Option<String>,
    /// Arguments of `x-weir-set`.
    pub(super) settings: Map<String, Value>,
}

/// Added NBD export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct AddedExportState {
    pub(super) id: String,
    pub(super) description: String,
    pub(super) access: AccessState,
}

/// Form of [`AccessRules`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct AccessState {
    allow: Vec<String>,
    deny: Vec<String>,
    names: Option<NameRulesState>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct NameRulesState {
    /// Pattern, whether it is a glob, whether it allows.
    rules: Vec<(String, bool, bool)>,
    otherwise: bool,
}

impl From<&AccessRules> for AccessState {
    fn from(access: &AccessRules) -> Self {
        let texts = |networks: &[Network]| networks.iter().map(Network::to_string).collect();
        let AccessRules { networks: NetworkRules { allow, deny }, names } = access;
        let rule = |rule: &NameRule| (rule.pattern.clone(), rule.is_glob, rule.allow);
        let names = names.as_ref().map(|names| NameRulesState {
            rules: names.rules.iter().map(rule).collect(),
            otherwise: names.default_allows,
        });
        Self { allow: texts(allow), deny: texts(deny), names }
    }
}

impl AccessState {
    /// # Errors
    /// Fails if a network is invalid.
    pub(super) fn to_access(&self) -> anyhow::Result<AccessRules> {
        let networks = |texts: &[String]| {
            texts.iter().map(|text| text.parse().map_err(anyhow::Error::msg)).collect::<anyhow::Result<_>>()
        };
        let rule = |(pattern, is_glob, allows): &(String, bool, bool)| NameRule {
            pattern: pattern.clone(),
            is_glob: *is_glob,
            allow: *allows,
        };
        let names = self.names.as_ref().map(|names| NameRules {
            rules: names.rules.iter().map(rule).collect(),
            default_allows: names.otherwise,
        });
        Ok(AccessRules {
            networks: NetworkRules { allow: networks(&self.allow)?, deny: networks(&self.deny)? },
            names,
        })
    }
}

/// All running objects. Descriptors, in this order: sockets of each server, control sockets, two
/// for each file of each disk, listening sockets of vhost-user exports.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct UpgradeOffer {
    pub(super) version: String,
    /// Watchdog interval; the service manager passes it only to the first process.
    pub(super) watchdog_ns: Option<u64>,
    /// Estimated number of descriptors that are passed with [`ProcessState`].
    pub(super) descriptors: u64,
    pub(super) servers: Vec<OfferedServer>,
    pub(super) control: Vec<PathBuf>,
    /// Added groups, parents first.
    pub(super) groups: Vec<AddedGroupState>,
    pub(super) disks: Vec<OfferedDisk>,
    pub(super) exports: Vec<OfferedExport>,
    pub(super) machines: Vec<OfferedVhostUser>,
    pub(super) devices: Vec<OfferedDevice>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfferedServer {
    /// Endpoint as configured.
    pub(super) endpoint: String,
    /// For each socket, the socket file that weir created.
    pub(super) sockets: Vec<Option<PathBuf>>,
    /// For an added server, its maximum number of clients.
    pub(super) origin: ObjectOrigin<usize>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfferedDisk {
    pub(super) name: String,
    /// Number of its writable files.
    pub(super) files: usize,
    pub(super) identity: DiskIdentity,
    pub(super) origin: ObjectOrigin<AddedDiskState>,
    /// Names of the nodes that snapshots have put over it. An older process has none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) overlay_nodes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfferedExport {
    pub(super) endpoint: String,
    pub(super) name: String,
    pub(super) disk: String,
    pub(super) read_only: bool,
    pub(super) bitmaps: Vec<String>,
    pub(super) origin: ObjectOrigin<AddedExportState>,
}

/// vhost-user export.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfferedVhostUser {
    /// Export id.
    pub(super) id: String,
    pub(super) disk: String,
    pub(super) read_only: bool,
    /// Address and socket file; `None` if weir connects to the front end.
    pub(super) listening: Option<(String, Option<PathBuf>)>,
    /// For an added export, its endpoint in the syntax of the command line.
    pub(super) origin: ObjectOrigin<String>,
}

impl OfferedVhostUser {
    /// Address for messages.
    pub(super) fn address_text(&self) -> &str {
        self.listening.as_ref().map_or("its machine", |(name, _)| name)
    }
}

/// Device or file of this host. It is opened when its state is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfferedDevice {
    /// Export id.
    pub(super) id: String,
    /// Kind, as in the config file.
    pub(super) kind: String,
    /// Address as configured.
    pub(super) address: String,
    pub(super) disk: String,
    pub(super) read_only: bool,
    /// For an added export, its endpoint in the syntax of the command line.
    pub(super) origin: ObjectOrigin<String>,
}

/// Answer of the old process to [`UpgradeMessage::Prepared`].
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) enum QuiesceOutcome {
    /// All clients are quiesced.
    Still(Box<ProcessState>),
    /// The old process resumes, with the reason.
    Refused(String),
}

/// State of a quiesced process. Descriptors: the socket of each client; for each front end its
/// socket, those of its messages and those of an incomplete message; those of each device. Bytes:
/// the unparsed bytes of each client; for each front end the payload of each message and an
/// incomplete message; the unparsed requests of each device's queues or connections.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ProcessState {
    /// Start of the pause, on CLOCK_MONOTONIC.
    pub(super) began_ns: u64,
    /// Number of the last event.
    pub(super) last_event: u64,
    pub(super) clients: Vec<ClientState>,
    pub(super) machines: Vec<FrontEndState>,
    /// Excludes devices that were removed meanwhile, and ublk devices: the kernel has their state,
    /// and releases them when the old process has ended.
    pub(super) devices: Vec<HostDeviceState>,
    pub(super) disks: Vec<TransferredDisk>,
    pub(super) groups: Vec<TransferredGroup>,
    pub(super) counted: DaemonCounterState,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ClientState {
    pub(super) endpoint: String,
    pub(super) export: String,
    style: ReplyStyleState,
    flags: u16,
    /// Ids of its metadata contexts.
    contexts: Vec<u32>,
    sizes_acknowledged: bool,
    minimum_block: u32,
    maximum_payload: u32,
    /// Number of its unparsed bytes.
    pub(super) received: u64,
    /// Number of bytes of payload that are still to be received and dropped.
    pub(super) skip: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum ReplyStyleState {
    Simple,
    Structured,
    Extended,
}

impl ClientState {
    pub(super) fn new(endpoint: &str, export: &str, session: &NbdSession, received: u64, skip: u64) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            export: export.to_owned(),
            style: match session.style {
                ReplyStyle::Simple => ReplyStyleState::Simple,
                ReplyStyle::Structured => ReplyStyleState::Structured,
                ReplyStyle::Extended => ReplyStyleState::Extended,
            },
            flags: session.flags,
            contexts: session.contexts.iter().map(MetaContext::id).collect(),
            sizes_acknowledged: session.sizes_acknowledged,
            minimum_block: session.minimum_block,
            maximum_payload: session.maximum_payload,
            received,
            skip,
        }
    }

    /// Negotiated session, at the export with this number here.
    pub(super) fn to_session(&self, export: usize) -> anyhow::Result<NbdSession> {
        let mut contexts = MetaContexts::NONE;
        for id in &self.contexts {
            let context = MetaContext::from_id(*id).with_context(|| format!("no context has number {id}"))?;
            contexts.insert(context);
        }
        // Range checks use it as a mask.
        ensure!(self.minimum_block.is_power_of_two(), "a block of {} bytes", self.minimum_block);
        Ok(NbdSession {
            export,
            style: match self.style {
                ReplyStyleState::Simple => ReplyStyle::Simple,
                ReplyStyleState::Structured => ReplyStyle::Structured,
                ReplyStyleState::Extended => ReplyStyle::Extended,
            },
            flags: self.flags,
            contexts,
            sizes_acknowledged: self.sizes_acknowledged,
            minimum_block: self.minimum_block,
            maximum_payload: self.maximum_payload,
        })
    }
}

/// Connected vhost-user front end.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct FrontEndState {
    /// Export id.
    pub(super) id: String,
    /// Messages that bring a new server into the same state.
    pub(super) said: Vec<VhostMessageState>,
    /// Received part of an incomplete message.
    pub(super) begun: PartialMessage,
    /// Time for which it has used the disk, in nanoseconds, if it has.
    pub(super) used_ns: Option<u64>,
}

/// Sizes of an incomplete message.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct PartialMessage {
    pub(super) bytes: usize,
    pub(super) descriptors: usize,
}

/// vhost-user message.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct VhostMessageState {
    pub(super) code: u32,
    /// Size of its payload.
    pub(super) bytes: usize,
    pub(super) descriptors: usize,
}

/// State of a quiesced device or file of this host.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct HostDeviceState {
    /// Export id.
    pub(super) id: String,
    pub(super) kind: HostDeviceKind,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) enum HostDeviceKind {
    /// Kernel NBD client, one socket for each connection.
    NbdDevice { number: u32, connections: Vec<NbdDeviceSocketState> },
    /// FUSE file, with the descriptor of its requests, and that of the process that unmounts it if
    /// all servers are killed.
    Fuse {
        path: PathBuf,
        by_helper: bool,
        mount: Option<u64>,
        has_watcher: bool,
        permissions: u32,
        uid: u32,
        gid: u32,
        modified: (u64, u32),
        openers: usize,
        /// Size of the file in bytes, if it is shorter than the disk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        file_bytes: Option<u64>,
        /// Size of its unparsed requests.
        bytes: usize,
    },
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct NbdDeviceSocketState {
    /// Number of its unparsed bytes.
    pub(super) received: usize,
    /// Number of bytes of payload that are still to be received and dropped.
    pub(super) skip: u64,
}

/// Settings by their names in the config file.
pub(super) type SettingsState = Map<String, Value>;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct TransferredDisk {
    pub(super) name: String,
    pub(super) size_bytes: u64,
    /// False for a disk with handover that no guest holds: another process may have it open.
    pub(super) is_laid_down: bool,
    pub(super) counted: DiskCounterState,
    pub(super) filled: Option<BucketLevelsState>,
    #[serde(default)]
    pub(super) set: Option<SettingsState>,
    /// Bytes counted against its quotas. Omitted without, because older versions reject the field.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) quota: Option<StoredCounts>,
    /// Names of recording dirty bitmaps. Their bits are in the image.
    pub(super) bitmaps: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct TransferredGroup {
    pub(super) name: String,
    pub(super) counted: ThrottleCounterState,
    pub(super) filled: Option<BucketLevelsState>,
    #[serde(default)]
    pub(super) set: Option<SettingsState>,
    /// As [`TransferredDisk::quota`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) quota: Option<StoredCounts>,
}

/// Form of [`BucketSnapshot`]: settings by name; levels in billionths as text, since they exceed
/// the range of JSON numbers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct BucketLevelsState {
    limits: BTreeMap<String, u64>,
    levels: [[String; 4]; 6],
}

impl From<BucketSnapshot> for BucketLevelsState {
    fn from(filled: BucketSnapshot) -> Self {
        let limits = LimitSetting::ALL
            .into_iter()
            .map(|setting| (setting.name().to_owned(), filled.limits.get(setting)));
        let text = |level: BucketContents| {
            [level.main, level.deferred, level.burst, level.burst_deferred].map(|level| level.to_string())
        };
        Self { limits: limits.collect(), levels: filled.levels.map(text) }
    }
}

impl BucketLevelsState {
    /// # Errors
    /// A limit or level is invalid.
    pub(crate) fn to_levels(&self) -> anyhow::Result<BucketSnapshot> {
        let mut limits = Limits::default();
        for (name, value) in &self.limits {
            let setting = LimitSetting::ALL.into_iter().find(|setting| setting.name() == name);
            let setting = setting.with_context(|| format!("no limit is called {name:?}"))?;
            limits.set(setting, *value).map_err(|invalid| anyhow::anyhow!("{name}: {}", invalid.rule))?;
        }
        let mut levels = [BucketContents::default(); 6];
        for (level, text) in levels.iter_mut().zip(&self.levels) {
            let number = |at: usize| text[at].parse::<u128>().context("a level that is no number");
            *level = BucketContents {
                main: number(0)?,
                deferred: number(1)?,
                burst: number(2)?,
                burst_deferred: number(3)?,
            };
        }
        Ok(BucketSnapshot { limits, levels })
    }
}

#[cfg(test)]
mod tests {
    use policy::throttle::{LimitKind, RateLimit};
    use proptest::prelude::*;

    use super::*;
    use crate::upgrade::round_trip;

    proptest! {
        #[test]
        fn negotiated_session_round_trips(
            style in prop_oneof![Just(ReplyStyle::Simple), Just(ReplyStyle::Structured), Just(ReplyStyle::Extended)],
            flags: u16,
            ids in proptest::collection::vec(1_u32..=33, 0..5),
            sizes_acknowledged: bool,
            bits in 0_u32..16,
            maximum_payload: u32,
        ) {
            let mut contexts = MetaContexts::NONE;
            for id in ids {
                contexts.insert(MetaContext::from_id(id).unwrap());
            }
            let minimum_block = 1 << bits;
            let session =
                NbdSession { export: 3, style, flags, contexts, sizes_acknowledged, minimum_block, maximum_payload };
            let client = ClientState::new("unix:/a", "vm1", &session, 7, 8);
            prop_assert_eq!(round_trip(&client).to_session(3).unwrap(), session);
        }

        #[test]
        fn bucket_levels_round_trip(levels: [[u128; 4]; 6], rate in 1_u64..1_000_000_000_000) {
            let mut limits = Limits::default();
            *limits.limit_mut(LimitKind::BpsWrite) = RateLimit { rate, burst_rate: 2 * rate, burst_length_s: 7, ..RateLimit::NONE };
            limits.iops_size = 4096;
            let levels =
                levels.map(|[main, deferred, burst, burst_deferred]| BucketContents { main, deferred, burst, burst_deferred });
            let filled = BucketSnapshot { limits, levels };
            prop_assert_eq!(round_trip(&BucketLevelsState::from(filled)).to_levels().unwrap(), filled);
        }
    }

    #[test]
    fn older_format_without_settings_is_accepted() {
        let group = TransferredGroup {
            name: "gold".to_owned(),
            counted: policy::throttle::CumulativeStats::default().into(),
            filled: None,
            set: Some(SettingsState::new()),
            quota: None,
        };
        // An older process does not send `set`, which is only logged.
        let mut value = serde_json::to_value(&group).unwrap();
        assert_eq!(value.as_object_mut().unwrap().remove("set"), Some(serde_json::json!({})));
        assert!(serde_json::from_value::<TransferredGroup>(value).unwrap().set.is_none());
    }

    #[test]
    fn invalid_values_are_rejected() {
        let session = NbdSession {
            export: 0,
            style: ReplyStyle::Simple,
            flags: 1,
            contexts: MetaContexts::NONE,
            sizes_acknowledged: false,
            minimum_block: 1,
            maximum_payload: 1 << 25,
        };
        let client = || ClientState::new("", "", &session, 0, 0);
        assert!(ClientState { contexts: vec![34], ..client() }.to_session(0).is_err());
        assert!(ClientState { minimum_block: 3, ..client() }.to_session(0).is_err());
        let full = || {
            BucketLevelsState::from(BucketSnapshot { limits: Limits::default(), levels: Default::default() })
        };
        let named =
            |name: &str, value| BucketLevelsState { limits: [(name.to_owned(), value)].into(), ..full() };
        assert!(named("iops-total", 5).to_levels().is_ok());
        assert!(named("iops-totally", 5).to_levels().is_err());
        assert!(named("iops-total", u64::MAX).to_levels().is_err());
        let mut levels = full().levels;
        levels[0][0] = "-1".to_owned();
        assert!(BucketLevelsState { levels, ..full() }.to_levels().is_err());
        assert!(serde_json::from_str::<UpgradeMessage>("\"later\"").is_err());
    }
}
