//! The leader: one election for all groups of the cluster, and a `policy::cluster::QuotaLeader` for
//! each group.
//!
//! Each transaction is fenced by the revision and value of the leader's key. The grants of all
//! groups of a host are one value, and values of many hosts share a transaction, so the number of
//! messages does not grow with the number of groups.

use std::collections::{BTreeMap, BTreeSet};

use policy::{
    cluster::{LeaderAction, QuotaLeader, Term},
    time::{Duration, Instant},
};

use super::{
    environment::{now, random},
    etcd::{
        EtcdClient, EtcdError, EtcdKeyValue, EtcdOperation, MAX_BYTES, MAX_OPERATIONS, TransactionCondition,
    },
    etcd_values::{self, AskedHosts, HostGrants, HostReports, HostReservations, PeerValue, ReportValue},
    keys::{EtcdKey, EtcdKeys},
    limit_file::StoredGroup,
    peers::Peers,
    session_state::SessionState,
    watch_task::{WatchTask, forward},
};

/// Grants deleted in a row: each is a transaction, and the leader has to renew its lease in
/// between.
const MAX_DELETED_GRANTS: usize = 32;

/// Interval between searches for hosts that have ended without leaving.
const PEER_SWEEP_INTERVAL: Duration = Duration::from_secs(10);

/// State of an elected leader.
#[derive(Debug)]
pub(super) struct LeaderTerm {
    term: Term,
    keys: EtcdKeys,
    value: Vec<u8>,
    lease: i64,
    lease_requested_at: Instant,
    kept_at: Instant,
    leaders: BTreeMap<String, QuotaLeader>,
    /// Earliest instant since which no other leader can have existed: the election, or the last
    /// renewal that found the key after a gap longer than the lease.
    sole_since: Instant,
    /// Last division of groups that have no limits any more.
    dropped: BTreeMap<String, Instant>,
    /// Last reports, for groups whose limits appear later.
    reports: BTreeMap<String, BTreeMap<String, ReportValue>>,
    /// Last report of each host, and whether this leader received it; for older hosts the election.
    last_reports: BTreeMap<String, (Instant, bool)>,
    grants: BTreeMap<String, HostGrants>,
    changed: BTreeSet<String>,
    /// Hosts whose grants changed, for those that report directly.
    changed_directly: BTreeSet<String>,
    /// Time of the next search for hosts that have ended without leaving.
    peer_sweep_at: Instant,
    /// Groups with more hosts than their limits can be divided among; logged once.
    too_many: BTreeSet<String>,
    /// Time at which lost limits were last restored, by group.
    restored: BTreeMap<String, Instant>,
    /// Time of the next search for grants of hosts that left.
    sweep_at: Option<Instant>,
    /// Revision up to which reports were read. Later ones are watched.
    reports_at: i64,
    watching: WatchTask,
}

impl LeaderTerm {
    /// Creates the leader's key, unless it exists.
    pub(super) async fn campaign(
        known: &SessionState,
        etcd: &mut EtcdClient,
    ) -> Result<Option<Self>, EtcdError> {
        let (timing, keys) = (known.timing, known.keys.clone());
        let key = keys.key(EtcdKey::Leader);
        let Some(asked_at) = asked_by_all(known, etcd).await? else { return Ok(None) };
        let requested_at = now();
        // Rounded up to seconds: etcd must not end the lease before this leader does.
        let lease = timing.term_lease();
        let lease = etcd.grant_lease(lease.as_secs().max(1) + u64::from(lease.subsec_nanos() > 0)).await?;
        let leader = etcd_values::LeaderValue { host: known.cluster.host.clone(), nonce: random() };
        let value = etcd_values::write(&leader);
        let put = EtcdOperation::put(&key, &value, Some(lease));
        // A host that joins now must be able to ask this one before it leads.
        let unchanged =
            [keys.peers(), keys.asks()].map(|range| TransactionCondition::UnchangedSince(range, asked_at));
        let [peers, asks] = unchanged;
        let result = etcd.transact(&[TransactionCondition::Absent(key), peers, asks], &[put]).await?;
        if !result.succeeded {
            etcd.revoke_lease(lease).await?;
            return Ok(None);
        }
        let alone = now();
        let term = Term { revision: result.revision.cast_unsigned(), nonce: leader.nonce };
        let (reports_at, found, watching) = read_reports(known, etcd).await?;
        let mut leading = Self {
            term,
            keys,
            value,
            lease,
            lease_requested_at: requested_at,
            kept_at: requested_at,
            leaders: BTreeMap::new(),
            sole_since: alone,
            dropped: BTreeMap::new(),
            reports: BTreeMap::new(),
            last_reports: BTreeMap::new(),
            grants: BTreeMap::new(),
            changed: BTreeSet::new(),
            changed_directly: BTreeSet::new(),
            peer_sweep_at: now() + PEER_SWEEP_INTERVAL,
            too_many: BTreeSet::new(),
            restored: BTreeMap::new(),
            // Hosts may have left before the election, and an earlier leader may not have swept.
            sweep_at: Some(now() + 2 * timing.lease),
            reports_at,
            watching,
        };
        found.iter().for_each(|(host, reports)| leading.on_reports(host, reports));
        // The age of reports from before the election is unknown.
        leading.last_reports.values_mut().for_each(|(_, by_this_one)| *by_this_one = false);
        leading.follow_limits(known);
        tracing::info!(cluster = %known.cluster.name, "this host leads the cluster and divides its limits");
        Ok(Some(leading))
    }

    /// Continues with another member of etcd, before the key expires. True if it still leads.
    pub(super) async fn resume(
        &mut self,
        known: &SessionState,
        etcd: &mut EtcdClient,
    ) -> Result<bool, EtcdError> {
        if !self.keep_alive(etcd).await? {
            return Ok(self.log_lost());
        }
        let found;
        (self.reports_at, found, self.watching) = read_reports(known, etcd).await?;
        let known: BTreeSet<String> = self.reports.values().flat_map(BTreeMap::keys).cloned().collect();
        // Hosts that left between the two watches.
        // Removed first, then re-added by the reports that were found.
        for host in known.iter().filter(|host| found.iter().all(|(reporting, _)| reporting != *host)) {
            self.on_report_deleted(host);
        }
        found.iter().for_each(|(host, reports)| self.on_reports(host, reports));
        Ok(true)
    }

    /// Renews the lease of the key. False if it expired.
    async fn keep_alive(&mut self, etcd: &mut EtcdClient) -> Result<bool, EtcdError> {
        self.kept_at = now();
        let requested_at = self.kept_at;
        if !etcd.keep_lease(self.lease).await? {
            return Ok(false);
        }
        if requested_at >= self.lease_requested_at + policy::cluster::Timing::DEFAULT.term_lease() {
            // The process slept. Meanwhile another leader may have been elected and lost its key.
            self.sole_since = now();
        }
        self.lease_requested_at = requested_at;
        self.leaders.values_mut().for_each(|leader| leader.on_key_renewed(requested_at));
        Ok(true)
    }

    /// Revision up to which reports were read.
    pub(super) const fn reports_at(&self) -> i64 {
        self.reports_at
    }

    pub(super) const fn term(&self) -> Term {
        self.term
    }

    /// Time of a host's last report to this leader.
    pub(super) fn last_report_at(&self, host: &str) -> Option<Instant> {
        self.last_reports.get(host).filter(|(_, by_this_one)| *by_this_one).map(|(at, _)| *at)
    }

    /// Hosts that are overdue with a report: they have groups and did not leave the cluster.
    pub(super) fn silent_hosts(&self, known: &SessionState) -> BTreeSet<String> {
        let long_ago = 2 * policy::cluster::Timing::DEFAULT.lease;
        let at = now();
        let silent_hosts = self.last_reports.iter().filter(|(_, (since, _))| at >= *since + long_ago);
        let takes_part =
            |reservations: &HostReservations| reservations.members.as_ref().is_none_or(|all| !all.is_empty());
        let silent_hosts =
            silent_hosts.filter(|(host, _)| known.reservations.get(*host).is_some_and(takes_part));
        silent_hosts.map(|(host, _)| host.clone()).collect()
    }

    /// Time of the next division.
    pub(super) fn next_division(&self) -> Instant {
        self.leaders.values().map(QuotaLeader::next).min().unwrap_or(Instant::MAX)
    }

    pub(super) fn next(&self) -> Instant {
        let leaders = self.leaders.values().map(QuotaLeader::next);
        leaders.chain(self.sweep_at).fold(self.kept_at + self.renewal_interval(), Instant::min)
    }

    /// Interval at which the lease of the key is renewed. Policy takes the same lease for its own.
    fn renewal_interval(&self) -> Duration {
        policy::cluster::Timing::DEFAULT.key_renewal_interval()
    }

    pub(super) fn on_reports(&mut self, host: &str, reports: &HostReports) {
        let at = now();
        // A report that was read before is no sign of life.
        let is_known =
            |(group, report)| self.reports.get(group).and_then(|all| all.get(host)) == Some(report);
        if reports.groups.is_empty() || !reports.groups.iter().all(is_known) {
            self.last_reports.insert(host.to_owned(), (at, true));
        }
        for (group, report) in &reports.groups {
            if let Some(leader) = self.leaders.get_mut(group) {
                leader.on_report(host, report.into(), at);
            }
            self.reports.entry(group.clone()).or_default().insert(host.to_owned(), report.clone());
        }
    }

    /// Handles the deletion of a host's report. Its grants expire by themselves.
    pub(super) fn on_report_deleted(&mut self, host: &str) {
        self.last_reports.remove(host);
        self.reports.values_mut().for_each(|hosts| {
            hosts.remove(host);
        });
        self.leaders.values_mut().for_each(|leader| leader.on_host_removed(host));
        self.sweep_at.get_or_insert(now() + 2 * policy::cluster::Timing::DEFAULT.lease);
    }

    /// Follows the limits in etcd. Groups with unreadable limits get no grants from this leader; a
    /// newer weir that can read them may become the leader.
    fn follow_limits(&mut self, known: &SessionState) {
        let at = now();
        let is_understood = |name: &String| !known.unreadable_groups.contains_key(name);
        let dropped = &mut self.dropped;
        self.leaders.retain(|name, _| {
            let is_followed = known.groups.contains_key(name) && is_understood(name);
            if !is_followed {
                dropped.insert(name.clone(), at);
            }
            is_followed
        });
        for (name, stored) in known.groups.iter().filter(|(name, _)| is_understood(name)) {
            if let Some(leader) = self.leaders.get_mut(name) {
                leader.on_spec(stored.spec, at);
                continue;
            }
            // Limits created after the election need not wait for grants of an earlier leader:
            // there are none. Otherwise hosts would stay at their fallback share meanwhile.
            let since = self.dropped.remove(name).map_or(self.sole_since, |at| at.max(self.sole_since));
            let mut leader =
                QuotaLeader::new(self.term, stored.spec, known.timing, self.lease_requested_at, since);
            for (host, report) in self.reports.get(name).into_iter().flatten() {
                leader.on_report(host, report.into(), at);
            }
            self.leaders.insert(name.clone(), leader);
        }
    }

    /// Divides the limits and writes the grants. True if it still leads.
    pub(super) async fn perform_due(
        &mut self,
        known: &SessionState,
        etcd: &mut EtcdClient,
        peers: Option<&Peers>,
    ) -> Result<bool, EtcdError> {
        if now() >= self.kept_at + self.renewal_interval() && !self.keep_alive(etcd).await? {
            return Ok(self.log_lost());
        }
        if self.divide(known) || !self.write(etcd).await? {
            // Deletes the key only if it is still this leader's, and gives up the leadership either
            // way.
            let value = self.value.clone();
            let key = self.keys.key(EtcdKey::Leader);
            let deletion = EtcdOperation::Delete(self.keys.single(EtcdKey::Leader));
            etcd.transact(&[TransactionCondition::Value(key, value)], &[deletion]).await?;
            return Ok(self.log_lost());
        }
        // After the write: it has shown that no other host was elected.
        if let Some(peers) = peers {
            for (host, grants) in self.take_direct(|host| peers.is_direct(host)) {
                peers.send_grants(&host, &grants);
            }
        }
        self.restore_limits(known, etcd).await?;
        self.raise_hosts(known, etcd).await?;
        self.delete_stale_grants(known, etcd).await?;
        self.remove_ended_peers(known, etcd, peers).await?;
        Ok(true)
    }

    /// Changed grants of the hosts that are selected.
    pub(super) fn take_direct(&mut self, is_direct: impl Fn(&str) -> bool) -> Vec<(String, HostGrants)> {
        let changed = std::mem::take(&mut self.changed_directly).into_iter();
        let direct = changed.filter(|host| is_direct(host));
        direct.filter_map(|host| self.grants.get(&host).cloned().map(|grants| (host, grants))).collect()
    }

    /// Divides the limits that are due. True if the leadership has ended.
    pub(super) fn divide(&mut self, known: &SessionState) -> bool {
        self.follow_limits(known);
        let at = now();
        let mut stands_down = false;
        for (group, leader) in &mut self.leaders {
            if at < leader.next() {
                continue;
            }
            let safe_share = known.groups.get(group).and_then(|stored| stored.group.safe_share_ppm);
            for action in leader.tick(at) {
                match action {
                    LeaderAction::StandDown => stands_down = true,
                    LeaderAction::Write(grants) => {
                        for (host, grant) in grants {
                            let grant = etcd_values::GrantValue::of(&grant, safe_share);
                            self.grants.entry(host.clone()).or_default().groups.insert(group.clone(), grant);
                            self.changed_directly.insert(host.clone());
                            self.changed.insert(host);
                        }
                    }
                }
            }
        }
        stands_down
    }

    /// Deletes the keys of hosts that have ended without leaving: while their agreement is needed,
    /// there is none, and no new host can lead.
    ///
    /// Such a host may run and be cut off. It asks this host, which leads and refuses.
    async fn remove_ended_peers(
        &mut self,
        known: &SessionState,
        etcd: &mut EtcdClient,
        peers: Option<&Peers>,
    ) -> Result<(), EtcdError> {
        if now() < self.peer_sweep_at {
            return Ok(());
        }
        self.peer_sweep_at = now() + PEER_SWEEP_INTERVAL;
        let found = etcd.keys(&[self.keys.below_all_hosts(), self.keys.peers()]).await?;
        let (mut named, mut addressed) = (BTreeSet::new(), BTreeSet::new());
        for value in found.iter().flatten() {
            match self.keys.parse(&value.key) {
                Some(EtcdKey::Host(host)) => drop(named.insert(host)),
                Some(EtcdKey::Peer(host)) => drop(addressed.insert(host)),
                _ => {}
            }
        }
        let is_direct = |host: &&str| peers.is_some_and(|peers| peers.is_direct(host));
        let ended = addressed.difference(&named).copied();
        let ended = ended.filter(|host| *host != known.cluster.host && !is_direct(host));
        for host in ended.take(MAX_DELETED_GRANTS) {
            let mut compare = self.fencing_conditions().to_vec();
            compare.push(TransactionCondition::Absent(self.keys.key(EtcdKey::Host(host))));
            let deletions = [EtcdKey::Peer(host), EtcdKey::Asks(host)]
                .map(|key| EtcdOperation::Delete(self.keys.single(key)));
            if etcd.transact(&compare, &deletions).await?.succeeded {
                tracing::info!(host, "the host has ended: its agreement is not needed any more");
            }
        }
        Ok(())
    }

    fn log_lost(&self) -> bool {
        tracing::info!("this host no longer leads the cluster");
        false
    }

    fn fencing_conditions(&self) -> [TransactionCondition; 2] {
        // Revision and value: a restored etcd may reuse a revision, the nonce in the value differs.
        let key = self.keys.key(EtcdKey::Leader);
        [
            TransactionCondition::Created(key.clone(), self.term.revision.cast_signed()),
            TransactionCondition::Value(key, self.value.clone()),
        ]
    }

    /// Writes changed grants. False if the key is no longer this leader's.
    async fn write(&mut self, etcd: &mut EtcdClient) -> Result<bool, EtcdError> {
        let changed = std::mem::take(&mut self.changed).into_iter();
        let values = changed
            .map(|host| (self.keys.key(EtcdKey::Grant(&host)), etcd_values::write(&self.grants[&host])));
        for batch in split_transactions(values.collect()) {
            let puts: Vec<_> =
                batch.iter().map(|(key, value)| EtcdOperation::put(key, value, None)).collect();
            if !etcd.transact(&self.fencing_conditions(), &puts).await?.succeeded {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes limits again that etcd lost.
    async fn restore_limits(&mut self, known: &SessionState, etcd: &mut EtcdClient) -> Result<(), EtcdError> {
        let is_lost = |(name, stored): &(&String, &StoredGroup)| {
            stored.changed == 0 && !stored.group.removed && !known.unreadable_groups.contains_key(*name)
        };
        for (name, stored) in known.groups.iter().filter(is_lost) {
            let last = self.restored.get(name);
            if last.is_some_and(|last| now() < *last + known.timing.lease) {
                continue;
            }
            self.restored.insert(name.clone(), now());
            let key = self.keys.key(EtcdKey::Group(name));
            let mut compare = self.fencing_conditions().to_vec();
            compare.push(TransactionCondition::Absent(key.clone()));
            let put = EtcdOperation::put(&key, &etcd_values::write(&stored.group), None);
            if etcd.transact(&compare, &[put]).await?.succeeded {
                tracing::warn!(
                    group = %name,
                    "etcd lost this group's limits: this host's copy was written again"
                );
            }
        }
        Ok(())
    }

    /// Divides limits among more hosts, if more take part than the limits were made for.
    async fn raise_hosts(&mut self, known: &SessionState, etcd: &mut EtcdClient) -> Result<(), EtcdError> {
        let crowded = self
            .leaders
            .iter()
            .filter(|(_, leader)| leader.has_too_many_hosts())
            .map(|(name, leader)| (name.clone(), leader.host_count()));
        for (name, count) in crowded.collect::<Vec<_>>() {
            let Some(StoredGroup { group, changed, .. }) = known.groups.get(&name) else { continue };
            let more = match group.for_more_hosts(count, random() as u32) {
                Ok(more) => more,
                Err(why) => {
                    if self.too_many.insert(name.clone()) {
                        tracing::error!(
                            group = %name,
                            hosts = group.hosts,
                            "more hosts have this group than its limits are divided among, and \
                             they cannot be divided further: {why}; each further host may exceed \
                             them by its fallback share (raise the limit)"
                        );
                    }
                    continue;
                }
            };
            let key = self.keys.key(EtcdKey::Group(&name));
            let mut compare = self.fencing_conditions().to_vec();
            compare.push(TransactionCondition::Changed(key.clone(), *changed));
            let result = etcd
                .transact(&compare, &[EtcdOperation::put(&key, &etcd_values::write(&more), None)])
                .await?;
            if result.succeeded {
                tracing::info!(group = %name, hosts = more.hosts, "the limits are divided among more hosts");
                if more.safe_share_ppm != group.safe_share_ppm && !more.has_default_share {
                    let percent = more.safe_share_ppm.map(|ppm| f64::from(ppm) / 10_000.0);
                    tracing::warn!(
                        group = %name, percent,
                        "the fallback share was too much for this number of hosts and was reduced"
                    );
                }
            }
        }
        Ok(())
    }

    /// Deletes grants of hosts that left. These keys have no lease and would stay.
    ///
    /// A host left if neither its name nor its report exists. It may return meanwhile and then
    /// keeps its new grant. A deleted grant has expired by then.
    async fn delete_stale_grants(
        &mut self,
        known: &SessionState,
        etcd: &mut EtcdClient,
    ) -> Result<(), EtcdError> {
        if self.sweep_at.is_none_or(|at| now() < at) {
            return Ok(());
        }
        self.sweep_at = None;
        let found = etcd.keys(&[self.keys.below_all_hosts(), self.keys.reports()]).await?;
        let (mut present, mut grants) = (BTreeSet::new(), Vec::new());
        for value in found.iter().flatten() {
            match self.keys.parse(&value.key) {
                Some(EtcdKey::Host(host) | EtcdKey::Report(host)) => drop(present.insert(host)),
                Some(EtcdKey::Grant(host)) => grants.push((host, value)),
                _ => {}
            }
        }
        grants.retain(|(host, _)| !present.contains(host));
        let at = now();
        let may_hold = |host: &str| self.leaders.values().any(|leader| leader.may_have_lease(host, at));
        let (leased, stale): (Vec<_>, Vec<_>) = grants.into_iter().partition(|(host, _)| may_hold(host));
        for (host, value) in stale.iter().take(MAX_DELETED_GRANTS) {
            let mut compare = self.fencing_conditions().to_vec();
            // The host may have returned: neither its keys nor a new grant may exist.
            let absent = [EtcdKey::Host(host), EtcdKey::Report(host)]
                .map(|key| TransactionCondition::Absent(self.keys.key(key)));
            compare.extend(absent);
            compare.push(TransactionCondition::Changed(value.key.clone(), value.mod_revision));
            let deletion = EtcdOperation::Delete(self.keys.single(EtcdKey::Grant(host)));
            if etcd.transact(&compare, &[deletion]).await?.succeeded {
                self.grants.remove(*host);
            }
        }
        if stale.len() > MAX_DELETED_GRANTS || !leased.is_empty() {
            self.sweep_at = Some(now() + known.timing.lease);
        }
        Ok(())
    }

    /// Ends the leadership, so that another host can be elected at once.
    pub(super) async fn resign(self, etcd: &mut EtcdClient) {
        let _ = etcd.revoke_lease(self.lease).await;
    }
}

/// Revision at which every host with an address asked this host, at its address, for its
/// agreement; `None` if one does not: that host may take part in an agreement of which this one
/// would not know.
async fn asked_by_all(known: &SessionState, etcd: &mut EtcdClient) -> Result<Option<i64>, EtcdError> {
    let (host, address) = (&known.cluster.host, known.cluster.peer_address);
    let (revision, found) = etcd.read(&[known.keys.peers(), known.keys.asks()]).await?;
    let (mut peers, mut asking) = (BTreeSet::new(), BTreeSet::new());
    for value in found.iter().flatten() {
        match known.keys.parse(&value.key) {
            Some(EtcdKey::Peer(name)) if name == host => {
                let peer = etcd_values::read::<PeerValue>(&value.value);
                if peer.is_ok_and(|peer| Some(peer.address) != address) {
                    return Ok(None);
                }
            }
            Some(EtcdKey::Peer(name)) => drop(peers.insert(name)),
            Some(EtcdKey::Asks(name)) if name == host => {}
            Some(EtcdKey::Asks(name)) => {
                let asked = etcd_values::read::<AskedHosts>(&value.value);
                if asked.is_ok_and(|asked| asked.hosts.get(host) == Some(&address)) {
                    asking.insert(name);
                }
            }
            _ => {}
        }
    }
    let missing = peers.into_iter().find(|name| !asking.contains(name));
    if let Some(missing) = missing {
        tracing::debug!(host = missing, "the host does not ask this one yet, which therefore cannot lead");
    }
    Ok(missing.is_none().then_some(revision))
}

/// Reads all reports, and watches from the next revision on.
async fn read_reports(
    known: &SessionState,
    etcd: &mut EtcdClient,
) -> Result<(i64, Vec<(String, HostReports)>, WatchTask), EtcdError> {
    let range = known.keys.reports();
    let (revision, found) = etcd.read(std::slice::from_ref(&range)).await?;
    let watch = etcd.watch(&range, revision + 1).await?;
    let read = |value: &EtcdKeyValue| match (known.keys.parse(&value.key), etcd_values::read(&value.value)) {
        (Some(EtcdKey::Report(host)), Ok(reports)) => Some((host.to_owned(), reports)),
        _ => None,
    };
    let found = found.iter().flatten().filter_map(read).collect();
    Ok((revision, found, forward(watch, known.number, known.inbox.clone())))
}

/// Splits values into transactions within etcd's bounds.
fn split_transactions(values: Vec<(String, Vec<u8>)>) -> Vec<Vec<(String, Vec<u8>)>> {
    let mut parcels: Vec<Vec<_>> = Vec::new();
    let mut bytes = 0;
    for (key, value) in values {
        bytes += key.len() + value.len();
        match parcels.last_mut().filter(|parcel| parcel.len() < MAX_OPERATIONS && bytes <= MAX_BYTES) {
            Some(parcel) => parcel.push((key, value)),
            None => {
                bytes = key.len() + value.len();
                parcels.push(vec![(key, value)]);
            }
        }
    }
    parcels
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transactions_stay_within_etcds_bounds() {
        let sizes = |count: usize, bytes: usize| {
            let parcels = split_transactions(vec![(String::new(), vec![0; bytes]); count]);
            parcels.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(sizes(0, 1), [0; 0]);
        assert_eq!(sizes(300, 100), [128, 128, 44]);
        assert_eq!(sizes(7, MAX_BYTES / 3), [3, 3, 1]);
        assert_eq!(sizes(2, MAX_BYTES * 2), [1, 1]);
    }
}
