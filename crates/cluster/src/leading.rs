//! The leader's side: one election for all groups of the cluster, a `policy::cluster::Leader` for
//! each group.
//!
//! What it writes holds only while the leader's key is its own: each transaction compares its
//! revision and value. Grants of all groups of a host stand in one value, and those of many hosts
//! in one transaction, so that messages do not grow with groups.

use std::collections::{BTreeMap, BTreeSet};

use policy::{
    cluster::{Action, Leader, Term},
    time::Instant,
};

use super::{
    etcd::{Compare, Error, Etcd, KeyValue, MAX_BYTES, MAX_OPERATIONS, Operation},
    keys::{Key, Keys},
    known::Known,
    outside::{draw, now},
    stored::Stored,
    values::{self, Grants, Promises, Report, Reports},
    watching::{Watching, forward},
};

/// Grants that are taken away in a row: each is a transaction, and the lead must be kept meanwhile.
const MOST_SWEPT: usize = 32;

/// It is elected.
#[derive(Debug)]
pub(super) struct Leading {
    term: Term,
    keys: Keys,
    value: Vec<u8>,
    lease: i64,
    asked: Instant,
    kept_at: Instant,
    leaders: BTreeMap<String, Leader>,
    /// Since when nobody else can have led: by then it was elected, or its key was found still
    /// there after a time in which it could have ended.
    alone: Instant,
    /// When it last divided a group that has no limits any more.
    dropped: BTreeMap<String, Instant>,
    /// What was said last, for groups whose limits come later.
    reports: BTreeMap<String, BTreeMap<String, Report>>,
    /// When a host has said something last, and to this leader; or when this leader was elected.
    heard: BTreeMap<String, (Instant, bool)>,
    grants: BTreeMap<String, Grants>,
    changed: BTreeSet<String>,
    /// Groups that have more hosts than their limits can be divided among: told once.
    too_many: BTreeSet<String>,
    /// When limits were written again last.
    restored: BTreeMap<String, Instant>,
    /// When to look for grants of hosts that have left.
    sweep_at: Option<Instant>,
    /// Reports that are newer than this revision are watched.
    reports_at: i64,
    watching: Watching,
}

impl Leading {
    /// Takes the leader's key, if nobody has it.
    pub(super) async fn campaign(known: &Known, etcd: &mut Etcd) -> Result<Option<Self>, Error> {
        let (timing, keys) = (known.timing, known.keys.clone());
        let key = keys.key(Key::Leader);
        let asked = now();
        // Not shorter than this leader takes it for.
        let lease = timing.term_lease();
        let lease = etcd.grant_lease(lease.as_secs().max(1) + u64::from(lease.subsec_nanos() > 0)).await?;
        let leader = values::Leader { host: known.cluster.host.clone(), nonce: draw() };
        let value = values::write(&leader);
        let put = Operation::put(&key, &value, Some(lease));
        let done = etcd.transact(&[Compare::Absent(key)], &[put]).await?;
        if !done.held {
            etcd.revoke_lease(lease).await?;
            return Ok(None);
        }
        let alone = now();
        let term = Term { revision: done.revision.cast_unsigned(), nonce: leader.nonce };
        let (reports_at, found, watching) = read_reports(known, etcd).await?;
        let mut leading = Self {
            term,
            keys,
            value,
            lease,
            asked,
            kept_at: asked,
            leaders: BTreeMap::new(),
            alone,
            dropped: BTreeMap::new(),
            reports: BTreeMap::new(),
            heard: BTreeMap::new(),
            grants: BTreeMap::new(),
            changed: BTreeSet::new(),
            too_many: BTreeSet::new(),
            restored: BTreeMap::new(),
            // Of those that left before its election there may be some too.
            sweep_at: Some(now() + 2 * timing.lease),
            reports_at,
            watching,
        };
        found.iter().for_each(|(host, reports)| leading.on_reports(host, reports));
        // Of hosts that were there before nobody knows how long ago.
        leading.heard.values_mut().for_each(|(_, by_this_one)| *by_this_one = false);
        leading.follow(known);
        tracing::info!(cluster = %known.cluster.name, "this host divides the cluster's limits");
        Ok(Some(leading))
    }

    /// Leads on with another member of etcd, before its key has gone. Whether it still leads.
    pub(super) async fn go_on(&mut self, known: &Known, etcd: &mut Etcd) -> Result<bool, Error> {
        if !self.keep_alive(etcd).await? {
            return Ok(self.lost());
        }
        let found;
        (self.reports_at, found, self.watching) = read_reports(known, etcd).await?;
        let known: BTreeSet<String> = self.reports.values().flat_map(BTreeMap::keys).cloned().collect();
        // Who has left meanwhile was in nobody's watch.
        for host in known.iter().filter(|host| found.iter().all(|(there, _)| there != *host)) {
            self.on_gone(host);
        }
        found.iter().for_each(|(host, reports)| self.on_reports(host, reports));
        Ok(true)
    }

    /// Whether its key is there.
    async fn keep_alive(&mut self, etcd: &mut Etcd) -> Result<bool, Error> {
        self.kept_at = now();
        let asked = self.kept_at;
        if !etcd.keep_lease(self.lease).await? {
            return Ok(false);
        }
        if asked >= self.asked + policy::cluster::Timing::DEFAULT.term_lease() {
            // This process has slept: etcd may have had another leader, and lost it again.
            self.alone = now();
        }
        self.asked = asked;
        self.leaders.values_mut().for_each(|leader| leader.kept_alive(asked));
        Ok(true)
    }

    /// See the field.
    pub(super) const fn reports_at(&self) -> i64 {
        self.reports_at
    }

    pub(super) const fn term(&self) -> Term {
        self.term
    }

    /// When this leader heard of a host last.
    pub(super) fn heard(&self, host: &str) -> Option<Instant> {
        self.heard.get(host).filter(|(_, by_this_one)| *by_this_one).map(|(at, _)| *at)
    }

    /// Hosts that should have said something long ago: they have groups, and have not taken leave.
    pub(super) fn silent(&self, known: &Known) -> BTreeSet<String> {
        let long_ago = 2 * policy::cluster::Timing::DEFAULT.lease;
        let at = now();
        let silent = self.heard.iter().filter(|(_, (since, _))| at >= *since + long_ago);
        let takes_part = |promises: &Promises| promises.members.as_ref().is_none_or(|all| !all.is_empty());
        let silent = silent.filter(|(host, _)| known.promises.get(*host).is_some_and(takes_part));
        silent.map(|(host, _)| host.clone()).collect()
    }

    pub(super) fn next(&self) -> Instant {
        let leaders = self.leaders.values().map(Leader::next);
        leaders.chain(self.sweep_at).fold(self.kept_at + self.keep(), Instant::min)
    }

    /// How often its key's lease is prolonged: policy's own lease is as long as that.
    fn keep(&self) -> core::time::Duration {
        policy::cluster::Timing::DEFAULT.keep()
    }

    pub(super) fn on_reports(&mut self, host: &str, reports: &Reports) {
        let at = now();
        // One that was read before says nothing.
        let is_known =
            |(group, report)| self.reports.get(group).and_then(|all| all.get(host)) == Some(report);
        if reports.groups.is_empty() || !reports.groups.iter().all(is_known) {
            self.heard.insert(host.to_owned(), (at, true));
        }
        for (group, report) in &reports.groups {
            if let Some(leader) = self.leaders.get_mut(group) {
                leader.on_report(host, report.into(), at);
            }
            self.reports.entry(group.clone()).or_default().insert(host.to_owned(), report.clone());
        }
    }

    /// A host has given up its place, or somebody has for it: what is lent to it ends by itself.
    pub(super) fn on_gone(&mut self, host: &str) {
        self.heard.remove(host);
        self.reports.values_mut().for_each(|hosts| {
            hosts.remove(host);
        });
        self.leaders.values_mut().for_each(|leader| leader.on_gone(host));
        self.sweep_at.get_or_insert(now() + 2 * policy::cluster::Timing::DEFAULT.lease);
    }

    /// Limits as they are in etcd now. Of those that are not understood nobody is lent anything
    /// here: perhaps a leader who understands them is there soon.
    fn follow(&mut self, known: &Known) {
        let at = now();
        let is_understood = |name: &String| !known.not_understood.contains_key(name);
        let dropped = &mut self.dropped;
        self.leaders.retain(|name, _| {
            let stays = known.groups.contains_key(name) && is_understood(name);
            if !stays {
                dropped.insert(name.clone(), at);
            }
            stays
        });
        for (name, stored) in known.groups.iter().filter(|(name, _)| is_understood(name)) {
            if let Some(leader) = self.leaders.get_mut(name) {
                leader.on_spec(stored.spec, at);
                continue;
            }
            // Limits that come later do not wait as if somebody else had lent them: their hosts
            // would have their safe shares meanwhile.
            let since = self.dropped.remove(name).map_or(self.alone, |at| at.max(self.alone));
            let mut leader = Leader::new(self.term, stored.spec, known.timing, self.asked, since);
            for (host, report) in self.reports.get(name).into_iter().flatten() {
                leader.on_report(host, report.into(), at);
            }
            self.leaders.insert(name.clone(), leader);
        }
    }

    /// Divides, and writes what comes of it. Whether it still leads.
    pub(super) async fn tend(&mut self, known: &Known, etcd: &mut Etcd) -> Result<bool, Error> {
        if now() >= self.kept_at + self.keep() && !self.keep_alive(etcd).await? {
            return Ok(self.lost());
        }
        self.follow(known);
        let at = now();
        let mut stands_down = false;
        for (group, leader) in &mut self.leaders {
            if at < leader.next() {
                continue;
            }
            let safe_share = known.groups.get(group).and_then(|stored| stored.group.safe_share_ppm);
            for action in leader.tick(at) {
                match action {
                    Action::StandDown => stands_down = true,
                    Action::Write(grants) => {
                        for (host, grant) in grants {
                            let grant = values::Grant::of(&grant, safe_share);
                            self.grants.entry(host.clone()).or_default().groups.insert(group.clone(), grant);
                            self.changed.insert(host);
                        }
                    }
                }
            }
        }
        if stands_down || !self.write(etcd).await? {
            let value = self.value.clone();
            let key = self.keys.key(Key::Leader);
            let mine = Operation::Delete(self.keys.one(Key::Leader));
            etcd.transact(&[Compare::Value(key, value)], &[mine]).await?;
            return Ok(self.lost());
        }
        self.restore(known, etcd).await?;
        self.make_room(known, etcd).await?;
        self.sweep(known, etcd).await?;
        Ok(true)
    }

    fn lost(&self) -> bool {
        tracing::info!("this host divides the cluster's limits no more");
        false
    }

    fn fence(&self) -> [Compare; 2] {
        let key = self.keys.key(Key::Leader);
        [
            Compare::Created(key.clone(), self.term.revision.cast_signed()),
            Compare::Value(key, self.value.clone()),
        ]
    }

    /// Whether the key was its own.
    async fn write(&mut self, etcd: &mut Etcd) -> Result<bool, Error> {
        let changed = std::mem::take(&mut self.changed).into_iter();
        let values =
            changed.map(|host| (self.keys.key(Key::Grant(&host)), values::write(&self.grants[&host])));
        for parcel in parcels(values.collect()) {
            let puts: Vec<_> = parcel.iter().map(|(key, value)| Operation::put(key, value, None)).collect();
            if !etcd.transact(&self.fence(), &puts).await?.held {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Writes limits anew that etcd has lost.
    async fn restore(&mut self, known: &Known, etcd: &mut Etcd) -> Result<(), Error> {
        let is_lost = |(name, stored): &(&String, &Stored)| {
            stored.changed == 0 && !stored.group.removed && !known.not_understood.contains_key(*name)
        };
        for (name, stored) in known.groups.iter().filter(is_lost) {
            let last = self.restored.get(name);
            if last.is_some_and(|last| now() < *last + known.timing.lease) {
                continue;
            }
            self.restored.insert(name.clone(), now());
            let key = self.keys.key(Key::Group(name));
            let mut compare = self.fence().to_vec();
            compare.push(Compare::Absent(key.clone()));
            let put = Operation::put(&key, &values::write(&stored.group), None);
            if etcd.transact(&compare, &[put]).await?.held {
                tracing::warn!(group = %name, "etcd had lost this group's limits: those that were known here are written there again");
            }
        }
        Ok(())
    }

    /// Divides limits among more hosts, where more have come.
    async fn make_room(&mut self, known: &Known, etcd: &mut Etcd) -> Result<(), Error> {
        let crowded =
            self.leaders.iter().filter(|(_, leader)| leader.is_crowded()).map(|(name, _)| name.clone());
        for name in crowded.collect::<Vec<_>>() {
            let Some(Stored { group, changed, .. }) = known.groups.get(&name) else { continue };
            let more = match group.for_more_hosts(draw() as u32) {
                Ok(more) => more,
                Err(why) => {
                    if self.too_many.insert(name.clone()) {
                        tracing::error!(
                            group = %name,
                            hosts = group.hosts,
                            "more hosts take part than the limits were made for, and they cannot be divided among more: {why}; by as many safe shares they may be exceeded (raise the limit)"
                        );
                    }
                    continue;
                }
            };
            let key = self.keys.key(Key::Group(&name));
            let mut compare = self.fence().to_vec();
            compare.push(Compare::Changed(key.clone(), *changed));
            let done = etcd.transact(&compare, &[Operation::put(&key, &values::write(&more), None)]).await?;
            if done.held {
                tracing::info!(group = %name, hosts = more.hosts, "the limits are divided among more hosts");
                if more.safe_share_ppm != group.safe_share_ppm {
                    let percent = more.safe_share_ppm.map(|ppm| f64::from(ppm) / 10_000.0);
                    tracing::warn!(group = %name, percent, "the safe share was too much for so many hosts, and is less now");
                }
            }
        }
        Ok(())
    }

    /// Takes away grants of hosts that have left: their keys have no lease, and would stay there.
    ///
    /// A host has left when neither its name nor its report is there; it may be back before this is
    /// done, and then keeps what is new. What is taken away is worth nothing by then.
    async fn sweep(&mut self, known: &Known, etcd: &mut Etcd) -> Result<(), Error> {
        if self.sweep_at.is_none_or(|at| now() < at) {
            return Ok(());
        }
        self.sweep_at = None;
        let found = etcd.keys(&[self.keys.of_hosts(), self.keys.reports()]).await?;
        let (mut there, mut grants) = (BTreeSet::new(), Vec::new());
        for value in found.iter().flatten() {
            match self.keys.read(&value.key) {
                Some(Key::Host(host) | Key::Report(host)) => drop(there.insert(host)),
                Some(Key::Grant(host)) => grants.push((host, value)),
                _ => {}
            }
        }
        grants.retain(|(host, _)| !there.contains(host));
        let at = now();
        let may_hold = |host: &str| self.leaders.values().any(|leader| leader.may_hold(host, at));
        let (held, over): (Vec<_>, Vec<_>) = grants.into_iter().partition(|(host, _)| may_hold(host));
        for (host, value) in over.iter().take(MOST_SWEPT) {
            let mut compare = self.fence().to_vec();
            let absent = [Key::Host(host), Key::Report(host)].map(|key| Compare::Absent(self.keys.key(key)));
            compare.extend(absent);
            compare.push(Compare::Changed(value.key.clone(), value.mod_revision));
            let gone = Operation::Delete(self.keys.one(Key::Grant(host)));
            if etcd.transact(&compare, &[gone]).await?.held {
                self.grants.remove(*host);
            }
        }
        if over.len() > MOST_SWEPT || !held.is_empty() {
            self.sweep_at = Some(now() + known.timing.lease);
        }
        Ok(())
    }

    /// Another can be elected at once.
    pub(super) async fn resign(self, etcd: &mut Etcd) {
        let _ = etcd.revoke_lease(self.lease).await;
    }
}

/// What hosts say at a revision, and what they say from then on.
async fn read_reports(
    known: &Known,
    etcd: &mut Etcd,
) -> Result<(i64, Vec<(String, Reports)>, Watching), Error> {
    let range = known.keys.reports();
    let (revision, found) = etcd.read(std::slice::from_ref(&range)).await?;
    let watch = etcd.watch(&range, revision + 1).await?;
    let read = |value: &KeyValue| match (known.keys.read(&value.key), values::read(&value.value)) {
        (Some(Key::Report(host)), Ok(reports)) => Some((host.to_owned(), reports)),
        _ => None,
    };
    let found = found.iter().flatten().filter_map(read).collect();
    Ok((revision, found, forward(watch, known.number, known.inbox.clone())))
}

/// What one transaction may take, each.
fn parcels(values: Vec<(String, Vec<u8>)>) -> Vec<Vec<(String, Vec<u8>)>> {
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
    fn a_transaction_has_no_more_operations_nor_bytes_than_etcd_takes() {
        let sizes = |count: usize, bytes: usize| {
            let parcels = parcels(vec![(String::new(), vec![0; bytes]); count]);
            parcels.iter().map(Vec::len).collect::<Vec<_>>()
        };
        assert_eq!(sizes(0, 1), [0; 0]);
        assert_eq!(sizes(300, 100), [128, 128, 44]);
        assert_eq!(sizes(7, MAX_BYTES / 3), [3, 3, 1]);
        assert_eq!(sizes(2, MAX_BYTES * 2), [1, 1]);
    }
}
