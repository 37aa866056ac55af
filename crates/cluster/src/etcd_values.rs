//! Values in etcd: the types of `policy::cluster` as JSON, each with a format version.
//!
//! Anyone with access to etcd may have written a value. Garbage, newer versions and numbers out of
//! range are rejected with a reason.

use std::collections::{BTreeMap, BTreeSet};

use policy::{
    cluster::{self, ByKind, ClusterGroupLimits, MAX_HOSTS, ReportedDemand, Term},
    throttle::{LimitSetting, Limits},
};
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{DeserializeOwned, Error as _},
};

/// Version that is written, and the only one that is read.
const VERSION: u32 = 1;
/// Sum of all fallback shares in millionths of the limit, if a value has no share.
const EARLIER_DEFAULT_SUM_PPM: u32 = 20_000;
/// Maximum length of a value in bytes. Larger than etcd's default limit of a request, 1.5 MiB.
const MAX_BYTES: usize = 2 << 20;

/// Version of a value, read before its content.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

/// Serializes a value with its version.
pub(super) fn write<T: Serialize>(value: &T) -> Vec<u8> {
    let mut value = serde_json::to_value(value).unwrap_or_default();
    value["version"] = VERSION.into();
    value.to_string().into_bytes()
}

/// Parses a value of this version.
///
/// # Errors
/// Returns the reason, as the predicate of a sentence whose subject is the key.
pub(super) fn read<T: DeserializeOwned>(bytes: &[u8]) -> Result<T, String> {
    if bytes.len() > MAX_BYTES {
        return Err(format!("is too large, {} bytes", bytes.len()));
    }
    // The version first: the rest of a newer value may have another form.
    let versioned = serde_json::from_slice::<Versioned>(bytes)
        .map_err(|_| "was not written by weir: it has no version".to_owned())?;
    if versioned.version != VERSION {
        let version = versioned.version;
        return Err(format!(
            "has version {version}, but this weir supports {VERSION} (run one version on all hosts)"
        ));
    }
    serde_json::from_slice(bytes).map_err(|error| format!("is invalid: {error}"))
}

/// Holder of the leader's key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LeaderValue {
    pub(super) host: String,
    /// Random for each term: distinguishes terms of equal revision after etcd was restored.
    pub(super) nonce: u64,
}

/// Largest instance number. An instance is the wall-clock time in nanoseconds when the daemon
/// registered, or one more than the host's previous instance if that is larger.
pub(super) const MAX_INSTANCE: u64 = i64::MAX.cast_unsigned();

fn instance<'de, D: Deserializer<'de>>(from: D) -> Result<u64, D::Error> {
    let instance = u64::deserialize(from)?;
    match instance {
        0..=MAX_INSTANCE => Ok(instance),
        _ => Err(D::Error::custom("instance: is out of range")),
    }
}

/// Process that owns a host's name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HostIdentity {
    /// Identifies a run of the daemon on the host; larger in each later run.
    #[serde(deserialize_with = "instance")]
    pub(super) instance: u64,
    /// Machine id, boot id and pid namespace: `pid` is unique within them.
    pub(super) machine: String,
    pub(super) pid: u32,
    /// Start time of the process, in clock ticks since the boot.
    #[serde(rename = "began")]
    pub(super) start_ticks: u64,
    pub(super) weir: String,
}

/// Address of a host, for other hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct PeerValue {
    pub(super) address: std::net::SocketAddr,
}

/// Hosts whose agreement a host needs while etcd is unreachable, each with the address at which it
/// is asked; `None` if it has none. Only a host that all of these values name, with its own
/// address, may lead: another computer may have had its name before, and may be the one that is
/// asked.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct AskedHosts {
    pub(super) hosts: BTreeMap<String, Option<std::net::SocketAddr>>,
}

/// Limits over all hosts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupValue {
    /// Number of the latest change of the limits, counted from 1.
    pub(super) number: u32,
    /// Random for each change: distinguishes changes of equal number after etcd was restored.
    pub(super) nonce: u32,
    /// Limits by option name; absent ones have their defaults.
    pub(super) limits: BTreeMap<String, u64>,
    /// Maximum number of hosts that share the limits.
    pub(super) hosts: u32,
    /// Fallback share of one host, in millionths of the limit; `None` for the default.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) safe_share_ppm: Option<u32>,
    /// True if `safe_share_ppm` is the default for the number of hosts, and follows it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) has_default_share: bool,
    /// True after the group was removed. The value remains without limits, so that hosts that
    /// remember the earlier limits neither apply them nor restore them in etcd.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(super) removed: bool,
}

impl GroupValue {
    pub(super) fn of(
        limits: &Limits,
        hosts: u32,
        safe_share_ppm: Option<u32>,
        number: u32,
        nonce: u32,
    ) -> Self {
        // Without defaults, the value stays short and depends only on what was configured.
        let set = LimitSetting::ALL
            .into_iter()
            .filter(|setting| limits.get(*setting) != Limits::default().get(*setting));
        let limits = set.map(|setting| (setting.name().to_owned(), limits.get(setting))).collect();
        Self { number, nonce, limits, hosts, safe_share_ppm, has_default_share: false, removed: false }
    }

    /// The fallback share of one host, unless it is the default.
    pub(super) fn configured_share_ppm(&self) -> Option<u32> {
        self.safe_share_ppm.filter(|_| !self.has_default_share)
    }

    /// These limits with the default fallback share: equal parts of 20 % of the limit for all
    /// hosts. It is written as a number, because earlier versions have another default.
    pub(super) fn with_default_share(self) -> Self {
        let share = ClusterGroupLimits::default_fallback_ppm(self.hosts);
        Self { safe_share_ppm: Some(share), has_default_share: true, ..self }
    }

    /// Returns these limits for this number of hosts, or, if the fallback share is not the default,
    /// for twice as many as before. A fallback share that no longer fits is reduced, so that the
    /// sum of all shares stays the same.
    ///
    /// # Errors
    /// Fails above [`MAX_HOSTS`], or if a limit is too low for that many hosts.
    pub(super) fn for_more_hosts(&self, hosts: u32, nonce: u32) -> Result<Self, String> {
        let doubled = self.hosts.saturating_mul(2);
        let hosts = if self.has_default_share { hosts.max(self.hosts) } else { doubled }.min(MAX_HOSTS);
        let mut more = Self { hosts, number: self.number.saturating_add(1), nonce, ..self.clone() };
        if hosts == self.hosts {
            return Err(format!("at most {MAX_HOSTS} hosts are supported"));
        }
        if self.has_default_share {
            let more = more.with_default_share();
            return more.spec().map(|_| more);
        }
        // The reduced share is at least 1 ppm; `spec` rejects it if the limit is too low even so.
        if more.spec().is_err() {
            let less = |ppm| u64::from(ppm) * u64::from(self.hosts) / u64::from(hosts);
            more.safe_share_ppm = self.safe_share_ppm.map(|ppm| less(ppm).max(1) as u32);
        }
        more.spec().map(|_| more)
    }

    /// Converts to the type of `policy`.
    ///
    /// # Errors
    /// Fails if the limits are invalid, or too low to be divided among the hosts.
    pub(super) fn spec(&self) -> Result<ClusterGroupLimits, String> {
        let mut limits = Limits::default();
        for (name, value) in &self.limits {
            let setting = LimitSetting::from_name(name).ok_or_else(|| format!("{name}: is not a limit"))?;
            limits.set(setting, *value).map_err(|invalid| format!("{name}: {}", invalid.rule))?;
        }
        limits
            .validate_in_force()
            .map_err(|invalid| format!("{}: {}", invalid.setting.name(), invalid.rule))?;
        // Number and nonce together: a restored etcd may reuse a number with other limits.
        let version = u64::from(self.number) << 32 | u64::from(self.nonce);
        // A value without a share was written by an earlier version, which computes this one.
        let earlier_default = EARLIER_DEFAULT_SUM_PPM / self.hosts.max(1);
        let share = self.safe_share_ppm.unwrap_or(earlier_default);
        let spec = ClusterGroupLimits::new(version, limits, self.hosts, Some(share));
        spec.map_err(|error| error.message("--hosts"))
    }

    pub(super) fn from_spec(spec: &ClusterGroupLimits, safe_share_ppm: Option<u32>) -> Self {
        let version = spec.version();
        Self::of(spec.limits(), spec.hosts(), safe_share_ppm, (version >> 32) as u32, version as u32)
    }
}

/// Reservations of a host by group, and the measured capacity of the devices below its disks, in
/// operations and bytes per second; a capacity of 0 is unknown.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HostReservations {
    pub(super) groups: BTreeMap<String, [u64; 2]>,
    pub(super) capacity: [u64; 2],
    /// Groups of the host that belong to the cluster; `None` from an older weir.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) members: Option<BTreeSet<String>>,
}

/// Reports of a host, by group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HostReports {
    pub(super) groups: BTreeMap<String, ReportValue>,
}

/// Grants to a host, by group.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct HostGrants {
    pub(super) groups: BTreeMap<String, GrantValue>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct TermValue {
    revision: u64,
    nonce: u64,
}

impl From<Term> for TermValue {
    fn from(Term { revision, nonce }: Term) -> Self {
        Self { revision, nonce }
    }
}

impl From<&TermValue> for Term {
    fn from(follows: &TermValue) -> Self {
        Self { revision: follows.revision, nonce: follows.nonce }
    }
}

/// JSON form of [`cluster::HostReport`], which documents the fields. `follows` is its
/// `followed_term`, `spec` its `version`, `safe` its `fallback`, `given` its
/// `released_capacity`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct ReportValue {
    #[serde(deserialize_with = "instance")]
    instance: u64,
    number: u64,
    follows: Option<TermValue>,
    seq: u64,
    pub(super) leased: ByKind,
    spec: u64,
    pub(super) safe: ByKind,
    given: ByKind,
    pub(super) demand: ByKind,
    waiting_ns: u64,
    weight: u64,
    reserved: [u64; 2],
}

impl ReportValue {
    pub(super) const fn instance(&self) -> u64 {
        self.instance
    }

    /// The leader that the host obeys.
    pub(super) fn followed_term(&self) -> Option<Term> {
        self.follows.as_ref().map(Term::from)
    }

    pub(super) const fn waiting_ns(&self) -> u64 {
        self.waiting_ns
    }

    pub(super) const fn weight(&self) -> u64 {
        self.weight
    }
}

impl From<&cluster::HostReport> for ReportValue {
    fn from(report: &cluster::HostReport) -> Self {
        let cluster::HostReport {
            instance,
            report_number: number,
            followed_term: follows,
            seq,
            leased,
            version,
            fallback: safe,
            released_capacity: given,
            demand: wants,
        } = report.clone();
        let ReportedDemand { demand, waiting_ns, weight, reserved } = wants;
        let follows = follows.map(TermValue::from);
        Self {
            instance,
            number,
            follows,
            seq,
            leased,
            spec: version,
            safe,
            given,
            demand,
            waiting_ns,
            weight,
            reserved,
        }
    }
}

impl From<&ReportValue> for cluster::HostReport {
    fn from(report: &ReportValue) -> Self {
        let ReportValue { demand, waiting_ns, weight, reserved, .. } = *report;
        Self {
            instance: report.instance,
            report_number: report.number,
            followed_term: report.follows.as_ref().map(Term::from),
            seq: report.seq,
            leased: report.leased,
            version: report.spec,
            fallback: report.safe,
            released_capacity: report.given,
            demand: ReportedDemand { demand, waiting_ns, weight, reserved },
        }
    }
}

/// JSON form of [`cluster::QuotaGrant`]; `answers` is its `report_number`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GrantValue {
    term: TermValue,
    instance: u64,
    answers: u64,
    seq: u64,
    spec: GroupValue,
    pub(super) leased: ByKind,
    credit: ByKind,
}

impl GrantValue {
    pub(super) fn of(grant: &cluster::QuotaGrant, safe_share_ppm: Option<u32>) -> Self {
        let cluster::QuotaGrant { term, instance, report_number: answers, seq, spec, leased, credit } =
            *grant;
        Self {
            term: term.into(),
            instance,
            answers,
            seq,
            spec: GroupValue::from_spec(&spec, safe_share_ppm),
            leased,
            credit,
        }
    }

    /// Converts to the type of `policy`.
    ///
    /// # Errors
    /// Fails if its limits are invalid.
    pub(super) fn read(&self) -> Result<cluster::QuotaGrant, String> {
        Ok(cluster::QuotaGrant {
            term: Term::from(&self.term),
            instance: self.instance,
            report_number: self.answers,
            seq: self.seq,
            spec: self.spec.spec()?,
            leased: self.leased,
            credit: self.credit,
        })
    }
}

#[cfg(test)]
mod tests {
    use policy::{cluster::simulated::StoreValue, throttle::LimitKind};
    use proptest::prelude::*;
    use simulator::cluster_values;

    use super::*;

    fn limits(rate: u64) -> Limits {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = rate;
        limits
    }

    #[test]
    fn newer_versions_and_garbage_are_rejected() {
        let group = GroupValue::of(&limits(1000), 16, None, 3, 7);
        assert_eq!(read::<GroupValue>(&write(&group)).as_ref(), Ok(&group));
        let newer = String::from_utf8(write(&group)).unwrap().replace("\"version\":1", "\"version\":2");
        assert!(read::<GroupValue>(newer.as_bytes()).unwrap_err().contains("has version 2"));
        for garbage in ["", "{}", "[]", "\u{0}", "{\"version\":1}", "{\"version\":\"1\"}"] {
            assert!(read::<GroupValue>(garbage.as_bytes()).is_err(), "{garbage}");
        }
    }

    #[test]
    fn fallback_shares_never_exceed_the_limit() {
        let more = |hosts, safe_share_ppm| {
            let more =
                GroupValue::of(&limits(1000), hosts, safe_share_ppm, 3, 7).for_more_hosts(hosts + 1, 8);
            more.map(|more| (more.hosts, more.safe_share_ppm, more.number, more.nonce))
        };
        assert_eq!(more(16, None), Ok((32, None, 4, 8)));
        assert_eq!(more(16, Some(5000)), Ok((32, Some(5000), 4, 8)), "it fits");
        assert_eq!(more(3, Some(300_000)), Ok((6, Some(150_000), 4, 8)));
        assert_eq!(more(1, Some(1_000_000)), Ok((2, Some(500_000), 4, 8)));
        assert!(more(600, Some(10)).unwrap_err().contains("1000 is too low"));
        assert!(more(MAX_HOSTS, None).is_err());
        let default = GroupValue::of(&limits(1000), 3, None, 3, 7).with_default_share();
        let more = default.for_more_hosts(4, 8).unwrap();
        assert_eq!(
            (default.safe_share_ppm, more.hosts, more.safe_share_ppm),
            (Some(66_666), 4, Some(50_000))
        );
    }

    #[test]
    fn invalid_limits_are_rejected() {
        let spec = |name: &str, value| {
            let mut group = GroupValue::of(&limits(1000), 16, None, 1, 1);
            group.limits.insert(name.to_owned(), value);
            group.spec()
        };
        assert!(spec("iops-total", 5000).is_ok());
        assert!(spec("iops-totally", 5).unwrap_err().contains("is not a limit"));
        assert!(spec("iops-total-max", 5).is_err());
        assert!(spec("iops-total", u64::MAX).is_err());
        assert!(GroupValue::of(&limits(10), 100, None, 1, 1).spec().unwrap_err().contains("at least 100"));
        assert!(GroupValue::of(&limits(10), 0, None, 1, 1).spec().unwrap_err().contains("hosts"));
    }

    #[test]
    fn simulated_values_have_the_length_of_stored_ones() {
        let term = Term { revision: 17, nonce: u64::MAX };
        let wants = ReportedDemand {
            demand: [u64::MAX, 2, 3, 44, 5, 6],
            waiting_ns: 1 << 40,
            weight: 300,
            reserved: [70, 0],
        };
        let by_kind = [0, 0, 0, 1234, 0, 0];
        for follows in [None, Some(term)] {
            let report = cluster::HostReport {
                instance: 1 << 50,
                report_number: 12,
                followed_term: follows,
                seq: 3,
                leased: by_kind,
                version: 7 << 32 | 5,
                fallback: by_kind,
                released_capacity: [0; 6],
                demand: wants,
            };
            let written =
                HostReports { groups: BTreeMap::from([("group".to_owned(), ReportValue::from(&report))]) };
            assert_eq!(cluster_values::length(StoreValue::Report(&report)), write(&written).len() as u64);
        }
        let spec = ClusterGroupLimits::new(7 << 32 | 5, limits(1000), 16, None).unwrap();
        let grant = cluster::QuotaGrant {
            term,
            instance: 9,
            report_number: 8,
            seq: 7,
            spec,
            leased: by_kind,
            credit: by_kind,
        };
        let written =
            HostGrants { groups: BTreeMap::from([("group".to_owned(), GrantValue::of(&grant, None))]) };
        assert_eq!(cluster_values::length(StoreValue::Grant(&grant)), write(&written).len() as u64);
    }

    proptest! {
        #[test]
        fn reports_and_grants_round_trip(
            numbers in prop::array::uniform8(any::<u64>()), by_kind in prop::array::uniform6(any::<u64>()), leads in any::<bool>(),
        ) {
            let [instance, number, revision, nonce, seq, waiting_ns, weight, answers] = numbers;
            let instance = instance / 2;
            let term = Term { revision, nonce };
            let wants = ReportedDemand { demand: by_kind, waiting_ns, weight, reserved: [seq, number] };
            let report = cluster::HostReport {
                instance, report_number: number, followed_term: leads.then_some(term), seq, leased: by_kind, version: nonce,
                fallback: by_kind, released_capacity: by_kind, demand: wants,
            };
            let written = HostReports { groups: BTreeMap::from([("g".to_owned(), ReportValue::from(&report))]) };
            let parsed = read::<HostReports>(&write(&written)).unwrap();
            prop_assert_eq!(cluster::HostReport::from(&parsed.groups["g"]), report);
            let spec = ClusterGroupLimits::new(7 << 32 | 5, limits(1000), 16, Some(99)).unwrap();
            let grant = cluster::QuotaGrant { term, instance, report_number: answers, seq, spec, leased: by_kind, credit: by_kind };
            let written = HostGrants { groups: BTreeMap::from([("g".to_owned(), GrantValue::of(&grant, Some(99)))]) };
            let parsed = read::<HostGrants>(&write(&written)).unwrap();
            prop_assert_eq!(parsed.groups["g"].read(), Ok(grant));
        }

        #[test]
        fn any_bytes_parse_or_fail(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = read::<HostReports>(&bytes);
            let _ = read::<HostGrants>(&bytes);
            let _ = read::<GroupValue>(&bytes).map(|group| group.spec());
        }
    }
}
