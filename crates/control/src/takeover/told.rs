//! What two daemons tell each other, as values: what there is, how clients and limits stand, and
//! who goes on.
//!
//! ```text
//!   the old one                       the new one
//!     Offer        ──────────────►      opens all of it
//!                  ◄──────────────    OpensAs, perhaps several; then Prepared, or Refused
//!     (stands still)
//!     Standing     ──────────────►      reads tables, takes clients in
//!                  ◄──────────────    Ready
//!     Yours        ──────────────►      serves
//! ```
//!
//! Until it says [`Word::Yours`] the old one may go on, and after that never. Only data, and how it
//! is read: nothing here is believed because it came.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Context as _, ensure};
use export::nbd::{MetaContext, MetaContexts, ReplyStyle, NbdSession};
use policy::{
    access::{AccessRules, NameRules, Network, NetworkRules, NameRule},
    throttle::{BucketContents, BucketSnapshot, Limits, LimitSetting},
};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::{
    counted::{OfDaemon, OfDisk, OfThrottle},
    identity::Identity,
};

/// Of these messages. Another one has other members, or means something else by them. Only what is
/// for the log alone may be missing: an older side does not tell it.
pub(crate) const FORMAT: u64 = 8;

/// A step that takes no more words.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) enum Word {
    /// It is about to open images of a cluster, which knows it by this number.
    OpensAs(u64),
    /// Everything is open that could be opened beside the other.
    Prepared,
    /// It cannot be: why.
    Refused(String),
    /// Clients can be served from now on.
    Ready,
    /// The other serves from now on.
    Yours,
}

/// Who has asked for what runs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum Origin<T> {
    /// A config file or a command line: the newcomer has to have it too.
    Config,
    /// A client of the control socket: what it takes to have it again.
    Added(T),
    /// The same, and it cannot be had again: why.
    Bound(String),
}

impl<T> Origin<T> {
    pub(super) fn is_added(&self) -> bool {
        matches!(self, Self::Added(_))
    }
}

/// A disk that was added.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct AddedDisk {
    /// The arguments of each `blockdev-add`, the lowest node's first.
    pub(super) nodes: Vec<Map<String, Value>>,
    /// Arguments of `x-weir-set`.
    pub(super) settings: Map<String, Value>,
    /// Keys of its table in a config file, if it was added by these. It has no nodes then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) keys: Option<Map<String, Value>>,
}

/// A group that was added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct AddedGroup {
    pub(super) name: String,
    pub(super) parent: Option<String>,
    /// Arguments of `x-weir-set`.
    pub(super) settings: Map<String, Value>,
}

/// An export over NBD that was added.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct AddedExport {
    pub(super) id: String,
    pub(super) description: String,
    pub(super) access: ToldAccess,
}

/// [`Access`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ToldAccess {
    allow: Vec<String>,
    deny: Vec<String>,
    names: Option<ToldNames>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ToldNames {
    /// A pattern, whether it is a glob, whether it allows.
    rules: Vec<(String, bool, bool)>,
    otherwise: bool,
}

impl From<&AccessRules> for ToldAccess {
    fn from(access: &AccessRules) -> Self {
        let texts = |networks: &[Network]| networks.iter().map(Network::to_string).collect();
        let AccessRules { networks: NetworkRules { allow, deny }, names } = access;
        let rule = |rule: &NameRule| (rule.pattern.clone(), rule.is_glob, rule.allow);
        let names = names.as_ref().map(|names| ToldNames {
            rules: names.rules.iter().map(rule).collect(),
            otherwise: names.default_allows,
        });
        Self { allow: texts(allow), deny: texts(deny), names }
    }
}

impl ToldAccess {
    /// # Errors
    /// A network that is none.
    pub(super) fn access(&self) -> anyhow::Result<AccessRules> {
        let networks = |texts: &[String]| {
            texts.iter().map(|text| text.parse().map_err(anyhow::Error::msg)).collect::<anyhow::Result<_>>()
        };
        let rule = |(pattern, is_glob, allows): &(String, bool, bool)| NameRule {
            pattern: pattern.clone(),
            is_glob: *is_glob,
            allow: *allows,
        };
        let names = self
            .names
            .as_ref()
            .map(|names| NameRules { rules: names.rules.iter().map(rule).collect(), default_allows: names.otherwise });
        Ok(AccessRules {
            networks: NetworkRules { allow: networks(&self.allow)?, deny: networks(&self.deny)? },
            names,
        })
    }
}

/// What there is to be had. Descriptors, in this order: of each server's sockets, of the control
/// sockets, two for each file of each disk, and of each machine's socket.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Offer {
    pub(super) version: String,
    /// How often the service manager wants to hear of the daemon: it tells only the first.
    pub(super) watchdog_ns: Option<u64>,
    /// About how many descriptors will come with [`State`].
    pub(super) descriptors: u64,
    pub(super) servers: Vec<OfferedServer>,
    pub(super) control: Vec<PathBuf>,
    /// That were added, each behind the one that it is in.
    pub(super) groups: Vec<AddedGroup>,
    pub(super) disks: Vec<OfferedDisk>,
    pub(super) exports: Vec<OfferedExport>,
    pub(super) machines: Vec<OfferedMachine>,
    pub(super) devices: Vec<OfferedDevice>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfferedServer {
    /// As it was asked for.
    pub(super) endpoint: String,
    /// One for each socket: the file that goes with it.
    pub(super) sockets: Vec<Option<PathBuf>>,
    /// With how many clients at the most.
    pub(super) origin: Origin<usize>,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfferedDisk {
    pub(super) name: String,
    /// That are written to.
    pub(super) files: usize,
    pub(super) identity: Identity,
    pub(super) origin: Origin<AddedDisk>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfferedExport {
    pub(super) endpoint: String,
    pub(super) name: String,
    pub(super) disk: String,
    pub(super) read_only: bool,
    pub(super) bitmaps: Vec<String>,
    pub(super) origin: Origin<AddedExport>,
}

/// The door of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfferedMachine {
    /// Of its export.
    pub(super) id: String,
    pub(super) disk: String,
    pub(super) read_only: bool,
    /// Where it listens, with the file that goes with it; nowhere where it calls the machine.
    pub(super) listening: Option<(String, Option<PathBuf>)>,
    /// Its door, as the command line has it.
    pub(super) origin: Origin<String>,
}

impl OfferedMachine {
    /// For people.
    pub(super) fn place(&self) -> &str {
        self.listening.as_ref().map_or("its machine", |(name, _)| name)
    }
}

/// A device or a file of this host. It is opened once how it stands is known.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct OfferedDevice {
    /// Of its export.
    pub(super) id: String,
    /// As the config file calls it.
    pub(super) kind: String,
    /// As it was asked for.
    pub(super) address: String,
    pub(super) disk: String,
    pub(super) read_only: bool,
    /// Its door, as the command line has it.
    pub(super) origin: Origin<String>,
}

/// What becomes of it once everything is prepared.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) enum Standing {
    /// Everybody stands still.
    Still(Box<State>),
    /// The old one goes on: why.
    Refused(String),
}

/// How everything stands. Descriptors: of each client's socket, then of each machine's front end
/// its socket, those of its messages and those of a message that is not whole, then those of each
/// device. Bytes: what each client has sent and nobody has begun, then of each front end the
/// payload of each message and what has come of one that is not whole, then what each device's
/// queues or connections were asked and have not begun, one behind the other.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct State {
    /// When the old one began to stand still, on the clock that both have (CLOCK_MONOTONIC).
    pub(super) began_ns: u64,
    /// The number of the last event.
    pub(super) last_event: u64,
    pub(super) clients: Vec<Client>,
    pub(super) machines: Vec<StandingMachine>,
    /// Those that are gone meanwhile are left out, and so are those of ublk: the kernel has all of
    /// these, and gives them away when the old one has ended.
    pub(super) devices: Vec<StandingDevice>,
    pub(super) disks: Vec<StandingDisk>,
    pub(super) groups: Vec<StandingGroup>,
    pub(super) counted: OfDaemon,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Client {
    pub(super) endpoint: String,
    pub(super) export: String,
    style: Style,
    flags: u16,
    /// By their numbers.
    contexts: Vec<u32>,
    sizes_acknowledged: bool,
    minimum_block: u32,
    maximum_payload: u32,
    /// How many of the bytes are its.
    pub(super) received: u64,
    /// How many more are to be dropped.
    pub(super) skip: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
enum Style {
    Simple,
    Structured,
    Extended,
}

impl Client {
    pub(super) fn new(endpoint: &str, export: &str, session: &NbdSession, received: u64, skip: u64) -> Self {
        Self {
            endpoint: endpoint.to_owned(),
            export: export.to_owned(),
            style: match session.style {
                ReplyStyle::Simple => Style::Simple,
                ReplyStyle::Structured => Style::Structured,
                ReplyStyle::Extended => Style::Extended,
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

    /// What it agreed on with the other server, at the export of this number here.
    pub(super) fn session(&self, export: usize) -> anyhow::Result<NbdSession> {
        let mut contexts = MetaContexts::NONE;
        for id in &self.contexts {
            let context = MetaContext::from_id(*id).with_context(|| format!("no context has number {id}"))?;
            contexts.insert(context);
        }
        ensure!(self.minimum_block.is_power_of_two(), "a block of {} bytes", self.minimum_block);
        Ok(NbdSession {
            export,
            style: match self.style {
                Style::Simple => ReplyStyle::Simple,
                Style::Structured => ReplyStyle::Structured,
                Style::Extended => ReplyStyle::Extended,
            },
            flags: self.flags,
            contexts,
            sizes_acknowledged: self.sizes_acknowledged,
            minimum_block: self.minimum_block,
            maximum_payload: self.maximum_payload,
        })
    }
}

/// The front end that is connected there.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct StandingMachine {
    /// Of its export.
    pub(super) id: String,
    /// What it would say to be where it is.
    pub(super) said: Vec<Message>,
    /// What has come of a message that is not whole.
    pub(super) begun: Begun,
    /// For how long it has used the disk, if it has: nanoseconds.
    pub(super) used_ns: Option<u64>,
}

/// The beginning of a message.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Begun {
    pub(super) bytes: usize,
    pub(super) descriptors: usize,
}

/// Of vhost-user.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct Message {
    pub(super) code: u32,
    /// Of its payload.
    pub(super) bytes: usize,
    pub(super) descriptors: usize,
}

/// A device or a file of this host, between two requests.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct StandingDevice {
    /// Of its export.
    pub(super) id: String,
    pub(super) kind: StandingKind,
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) enum StandingKind {
    /// Of the kernel's NBD client: a socket each.
    NbdDevice { number: u32, connections: Vec<StandingConnection> },
    /// A file: the descriptor of its requests, and of who unmounts it if all are killed.
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
        /// Bytes of the file, where it ends before the disk.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        file_bytes: Option<u64>,
        /// Of its requests that have not begun.
        bytes: usize,
    },
}

#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct StandingConnection {
    /// How many of the bytes are its.
    pub(super) received: usize,
    /// How many more are to be dropped.
    pub(super) skip: u64,
}

/// Settings by their names in the config file.
pub(super) type Told = Map<String, Value>;

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct StandingDisk {
    pub(super) name: String,
    pub(super) size_bytes: u64,
    /// Not where nobody holds one that is handed over: then it may be another process's.
    pub(super) is_laid_down: bool,
    pub(super) counted: OfDisk,
    pub(super) filled: Option<Buckets>,
    #[serde(default)]
    pub(super) set: Option<Told>,
    /// That record what is written. Their bits are in the file.
    pub(super) bitmaps: Vec<String>,
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct StandingGroup {
    pub(super) name: String,
    pub(super) counted: OfThrottle,
    pub(super) filled: Option<Buckets>,
    #[serde(default)]
    pub(super) set: Option<Told>,
}

/// [`Filled`]: settings by their names, levels in billionths as text, since JSON's numbers end
/// before.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(crate) struct Buckets {
    limits: BTreeMap<String, u64>,
    levels: [[String; 4]; 6],
}

impl From<BucketSnapshot> for Buckets {
    fn from(filled: BucketSnapshot) -> Self {
        let limits =
            LimitSetting::ALL.into_iter().map(|setting| (setting.name().to_owned(), filled.limits.get(setting)));
        let text = |level: BucketContents| {
            [level.main, level.deferred, level.burst, level.burst_deferred].map(|level| level.to_string())
        };
        Self { limits: limits.collect(), levels: filled.levels.map(text) }
    }
}

impl Buckets {
    /// # Errors
    /// What is none.
    pub(crate) fn filled(&self) -> anyhow::Result<BucketSnapshot> {
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
    use policy::throttle::{RateLimit, LimitKind};
    use proptest::prelude::*;

    use super::*;
    use crate::takeover::there_and_back;

    proptest! {
        #[test]
        fn what_a_client_agreed_on_comes_back(
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
            let client = Client::new("unix:/a", "vm1", &session, 7, 8);
            prop_assert_eq!(there_and_back(&client).session(3).unwrap(), session);
        }

        #[test]
        fn levels_come_back(levels: [[u128; 4]; 6], rate in 1_u64..1_000_000_000_000) {
            let mut limits = Limits::default();
            *limits.limit_mut(LimitKind::BpsWrite) = RateLimit { rate, burst_rate: 2 * rate, burst_length_s: 7 };
            limits.iops_size = 4096;
            let levels =
                levels.map(|[main, deferred, burst, burst_deferred]| BucketContents { main, deferred, burst, burst_deferred });
            let filled = BucketSnapshot { limits, levels };
            prop_assert_eq!(there_and_back(&Buckets::from(filled)).filled().unwrap(), filled);
        }
    }

    #[test]
    fn an_older_side_is_understood() {
        let group = StandingGroup {
            name: "gold".to_owned(),
            counted: policy::throttle::CumulativeStats::default().into(),
            filled: None,
            set: Some(Told::new()),
        };
        let mut told = serde_json::to_value(&group).unwrap();
        assert_eq!(told.as_object_mut().unwrap().remove("set"), Some(serde_json::json!({})));
        assert!(serde_json::from_value::<StandingGroup>(told).unwrap().set.is_none());
    }

    #[test]
    fn what_cannot_be_is_refused() {
        let session = NbdSession {
            export: 0,
            style: ReplyStyle::Simple,
            flags: 1,
            contexts: MetaContexts::NONE,
            sizes_acknowledged: false,
            minimum_block: 1,
            maximum_payload: 1 << 25,
        };
        let client = || Client::new("", "", &session, 0, 0);
        assert!(Client { contexts: vec![34], ..client() }.session(0).is_err());
        assert!(Client { minimum_block: 3, ..client() }.session(0).is_err());
        let full = || Buckets::from(BucketSnapshot { limits: Limits::default(), levels: Default::default() });
        let named = |name: &str, value| Buckets { limits: [(name.to_owned(), value)].into(), ..full() };
        assert!(named("iops-total", 5).filled().is_ok());
        assert!(named("iops-totally", 5).filled().is_err());
        assert!(named("iops-total", u64::MAX).filled().is_err());
        let mut levels = full().levels;
        levels[0][0] = "-1".to_owned();
        assert!(Buckets { levels, ..full() }.filled().is_err());
        assert!(serde_json::from_str::<Word>("\"later\"").is_err());
    }
}
