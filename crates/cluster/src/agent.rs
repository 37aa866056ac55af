//! The thread that talks to etcd: writes this host's reports, reads its grants, and stands for
//! election.
//!
//! ```text
//!   main thread  Hosts ──reports, promises, commands──► inbox ──► Session ──► etcd
//!                  ▲                                      ▲          │
//!                  └───────── words ──────────────────────┼──────────┤ leads, if elected   leading
//!                                                watches ─┘          ▼
//!                                                              reports, grants
//! ```
//!
//! A session uses one member of etcd. Any failure ends it; the next session uses the next member
//! and reads everything anew. Hosts fall back to their fallback share by their own clocks, without
//! this thread. Watch events are handled in `hearing`.
//!
//! No request of a disk waits for this thread, and a stalled member never blocks the main thread.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::PathBuf,
    time::Duration,
};

use async_channel::{Receiver, Sender};
use policy::{
    cluster::{NAME_LEASE, Timing},
    time::Instant,
};
use serde_json::Value;

use super::{
    changing,
    etcd::{Compare, Error, Etcd, KeyValue, Operation, Terms},
    identity,
    keys::Key,
    known::{Known, Leases},
    leading::Leading,
    moving,
    offers::Outcome,
    outside::{self, draw, now},
    promising::{self, Refusal},
    status,
    stored::{Keeper, Stored},
    values::{self, Group, Identity, MAX_INSTANCE, Promises, Reports},
    watching::{Silence, forward},
    words::{Change, Input, Word},
};

/// Lease of a host's name in seconds: the time that the name stays taken after a machine is lost.
const NAME_TTL: u64 = NAME_LEASE.as_secs();
/// Lease of a host's reservations in seconds: long enough for a machine to reboot.
const PROMISE_TTL: u64 = 600;
const KEEP_NAME: Duration = Duration::from_secs(NAME_TTL / 3);
/// Age of a session whose end is logged only. A shorter one is reported: the next may fail as well.
const LASTING: Duration = Duration::from_secs(10);
/// Longest sleep of the loop.
const IDLE: Duration = Duration::from_secs(1);
/// Duration of a request that is logged as slow, and the interval between two such messages.
const SLOW: Duration = Duration::from_millis(300);
const BETWEEN_SLOW: Duration = Duration::from_secs(60);
/// First and last pause between two rounds over all members.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(2);

pub(super) struct Agent {
    pub(super) cluster: settings::Cluster,
    pub(super) terms: Terms,
    pub(super) machine_id: String,
    /// File with the limits for the next start.
    pub(super) file: PathBuf,
    /// Limits that the file had at the start.
    pub(super) recalled: BTreeMap<String, Stored>,
    pub(super) inbox: (Sender<Input>, Receiver<Input>),
    pub(super) words: Sender<Word>,
    pub(super) timing: Timing,
}

impl Agent {
    /// Runs until `Input::Stop`.
    pub(super) fn run(self) -> std::io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        runtime.block_on(self.serve());
        Ok(())
    }

    async fn serve(self) {
        let mut session = Session {
            agent: &self,
            known: Known::new(self.cluster.clone(), self.timing, self.inbox.0.clone(), self.recalled.clone()),
            instance: 0,
            own_promises: None,
            reports: None,
            kept_at: Instant::ZERO,
            campaign_at: None,
            leading: None,
            told_silent: None,
            silence: Silence::new(self.timing.lease / 2),
            answered: None,
            strange: BTreeSet::new(),
            keeper: Keeper::default(),
            told_slow: None,
        };
        // A random first member: if one stalls, few hosts have to find another.
        let (mut member, mut pause) = (draw() as usize % Etcd::members(&self.terms).max(1), FIRST_PAUSE);
        loop {
            // A session that worked for long ended normally: the member was stopped, or a proxy
            // closed an idle watch. If the next member answers, nothing is reported.
            let mut has_lasted = false;
            let ended = match Etcd::connect(&self.terms, member).await {
                Ok(mut etcd) => {
                    member = etcd.at() + 1;
                    let began = now();
                    let ended = session.run(&mut etcd).await;
                    // Without a pause after a working session: leases run while no member is
                    // connected.
                    let has_worked = session.known.joined.is_some();
                    pause = if has_worked { Duration::ZERO } else { FIRST_PAUSE };
                    has_lasted = has_worked && now() - began >= LASTING;
                    if matches!(ended, Ok(End::Stopped)) {
                        session.leave(&mut etcd).await;
                        return;
                    }
                    session.keeper.keep(&self.file, &session.known.groups, Instant::MAX);
                    ended
                }
                Err(error) => Err(error),
            };
            session.end();
            let (why, lasts) = match ended {
                Ok(End::Stopped) => return,
                Ok(End::Broken(why)) => (why, false),
                Err(error) => (error.to_string(), matches!(error, Error::Refused(_))),
            };
            if has_lasted && !lasts {
                tracing::info!("cluster: etcd: {why}: trying the next member");
            } else if self.words.send(Word::Apart { why: why.clone(), lasts }).await.is_err() {
                return;
            }
            // Jitter, so that hosts do not reconnect at the same time.
            let until = now() + pause + pause.max(self.timing.tick).mul_f64((draw() % 256) as f64 / 256.0);
            pause = (pause * 2).clamp(FIRST_PAUSE, LAST_PAUSE);
            if self.answer_apart(until, &why, &session).await {
                return;
            }
        }
    }

    /// Answers commands without etcd until an instant. True if the agent has to stop.
    async fn answer_apart(&self, until: Instant, why: &str, session: &Session<'_>) -> bool {
        loop {
            let left = until - now();
            let Ok(input) = tokio::time::timeout(left, self.inbox.1.recv()).await else { return false };
            match input {
                Ok(Input::Stop) | Err(_) => return true,
                // The main thread judges by the last known reservations of other hosts.
                Ok(Input::Promise(_, answer)) => drop(answer.try_send(Ok(()))),
                Ok(Input::Change(_, answer) | Input::Forget(_, answer)) => {
                    let _ = answer.try_send(Err(format!("etcd is unreachable: {why}")));
                }
                Ok(Input::Move(_, answer)) => {
                    let _ = answer.try_send(Outcome::Apart(why.to_owned()));
                }
                Ok(Input::Status(answer)) => {
                    let _ = answer.try_send(status::last(&session.known, session.answered, why));
                }
                Ok(Input::Reports(_) | Input::Promises(_) | Input::Watched(..) | Input::Ended(..)) => {}
            }
        }
    }
}

enum End {
    Stopped,
    Broken(String),
}

/// State of the sessions, which follow each other, each with one member of etcd.
pub(super) struct Session<'a> {
    pub(super) agent: &'a Agent,
    pub(super) known: Known,
    /// Number of this run in its last registration.
    instance: u64,
    pub(super) own_promises: Option<Promises>,
    reports: Option<Reports>,
    kept_at: Instant,
    campaign_at: Option<Instant>,
    pub(super) leading: Option<Leading>,
    told_silent: Option<BTreeSet<String>>,
    pub(super) silence: Silence,
    /// Time of etcd's last answer.
    answered: Option<Instant>,
    /// Keys that were logged as foreign or unreadable.
    pub(super) strange: BTreeSet<String>,
    /// Stores the limits for the next start.
    pub(super) keeper: Keeper,
    told_slow: Option<Instant>,
}

impl Session<'_> {
    /// Resets the state of one session. Leadership belongs to its key: the next session may
    /// continue it.
    fn end(&mut self) {
        (self.known.joined, self.campaign_at) = (None, None);
    }

    pub(super) async fn tell(&self, word: Word) -> Result<(), Error> {
        let gone = |_| Error::Unreachable(anyhow::anyhow!("the daemon ends"));
        self.agent.words.send(word).await.map_err(gone)
    }

    async fn run(&mut self, etcd: &mut Etcd) -> Result<End, Error> {
        self.known.number += 1;
        self.end();
        let host = self.agent.cluster.host.clone();
        let ranges = [self.known.keys.of_all(), self.known.keys.of_host(&host)];
        let (revision, found) = etcd.read(&ranges).await?;
        let mut watching = Vec::new();
        for range in &ranges {
            // Watches start at the revision after the read, so that no change is lost between the
            // two.
            let watch = etcd.watch(range, revision + 1).await?;
            watching.push(forward(watch, self.known.number, self.agent.inbox.0.clone()));
        }
        (self.known.leader, self.known.usurped) = (None, None);
        self.known.promises.clear();
        self.known.not_understood.clear();
        // 0 marks limits as absent in etcd until the read below finds them; the leader writes lost
        // ones.
        self.known.groups.values_mut().for_each(|stored| stored.changed = 0);
        self.known.promises_at = revision;
        self.silence = Silence::new(self.agent.timing.lease / 2);
        // The own name and grant come last: joining needs the leader, and a grant needs the
        // limits.
        let (mut own, mut granted) = (None, None);
        for value in found.into_iter().flatten() {
            self.silence.saw(&value);
            match self.known.keys.read(&value.key) {
                Some(Key::Host(name)) if name == host => own = Some(value),
                Some(Key::Grant(name)) if name == host => granted = Some(value),
                _ => self.on_put(&value).await?,
            }
        }
        // A removal is remembered in etcd only. If etcd lost it, the name is free.
        self.known.groups.retain(|_, stored| stored.changed != 0 || !stored.group.removed);
        self.tell(Word::Led { leader: self.known.leader.clone() }).await?;
        self.tell(Word::Promises(self.known.promises.clone())).await?;
        self.join(etcd, own.as_ref()).await?;
        // A former leadership continues only if its key survived the change of the member.
        let leads =
            |leading: &Leading| self.known.leader.as_ref().is_some_and(|(term, _)| *term == leading.term());
        if let Some(mut leading) = self.leading.take().filter(leads)
            && self.known.joined.is_some()
            && leading.go_on(&self.known, etcd).await?
        {
            self.leading = Some(leading);
        }
        if let Some(value) = granted {
            self.on_put(&value).await?;
        }
        if self.known.leader.is_none() {
            self.stand(Duration::ZERO);
        }
        loop {
            self.tend(etcd).await?;
            self.answered = Some(now());
            let wait = self.next() - now();
            let Ok(input) = tokio::time::timeout(wait, self.agent.inbox.1.recv()).await else { continue };
            match input {
                Err(_) | Ok(Input::Stop) => return Ok(End::Stopped),
                Ok(Input::Ended(number, why)) if number == self.known.number => return Ok(End::Broken(why)),
                Ok(Input::Watched(number, events)) if number == self.known.number => {
                    for event in events {
                        self.on_event(etcd, event).await?;
                    }
                }
                // Of an earlier session, whose tasks may still have been sending.
                Ok(Input::Watched(..) | Input::Ended(..)) => {}
                Ok(Input::Reports(reports)) => {
                    if self.known.joined.is_some() {
                        etcd.put(&self.known.keys.key(Key::Report(&host)), &values::write(&reports), None)
                            .await?;
                        self.silence.said(now());
                    }
                    self.reports = Some(reports);
                }
                Ok(Input::Promises(promises)) => {
                    self.own_promises = Some(promises);
                    self.promise(etcd).await?;
                }
                Ok(Input::Promise(promises, answer)) => {
                    let done = self.promise_if(etcd, promises).await?;
                    let _ = answer.try_send(done);
                }
                Ok(Input::Change(change, answer)) => {
                    let done = self.change(etcd, &change).await?;
                    let _ = answer.try_send(done);
                }
                Ok(Input::Forget(host, answer)) => {
                    let done = changing::forget(&self.known, etcd, &host).await?;
                    let _ = answer.try_send(done);
                }
                Ok(Input::Move(step, answer)) => {
                    let done = moving::step(&self.known, etcd, *step).await?;
                    let _ = answer.try_send(done);
                }
                Ok(Input::Status(answer)) => {
                    let shown = status::connected(&self.known, self.leading.as_ref(), etcd).await?;
                    let _ = answer.try_send(shown);
                }
            }
        }
    }

    /// Time of the next action, if no input arrives.
    fn next(&self) -> Instant {
        let leading = self.leading.as_ref().map(Leading::next);
        let keep = self.known.joined.map(|_| self.kept_at + KEEP_NAME);
        let all =
            [leading, keep, self.campaign_at, self.silence.due(), self.keeper.due(), Some(now() + IDLE)];
        all.into_iter().flatten().min().unwrap_or(Instant::ZERO)
    }

    /// Performs the actions that are due: renews leases, campaigns, leads.
    async fn tend(&mut self, etcd: &mut Etcd) -> Result<(), Error> {
        self.keeper.keep(&self.agent.file, &self.known.groups, now());
        if let Some(Leases { name, promises }) = self.known.joined
            && now() >= self.kept_at + KEEP_NAME
        {
            self.kept_at = now();
            // Before renewing: a member of another etcd cluster must not count as this one.
            etcd.check_others().await?;
            if !etcd.keep_lease(name).await? || !etcd.keep_lease(promises).await? {
                self.known.joined = None;
                // The lease expired, perhaps during a suspend. Another host may have the name by
                // now.
                let own = etcd.read_one(self.known.keys.one(Key::Host(&self.agent.cluster.host))).await?;
                self.join(etcd, own.as_ref()).await?;
            }
        }
        let has_ended = |value: &mut KeyValue| {
            let own = identity::own(&self.agent.machine_id, 0);
            values::read::<Identity>(&value.value).is_ok_and(|other| identity::has_ended(&other, &own))
        };
        if let Some(value) = self.known.namesake.take_if(has_ended) {
            self.join(etcd, Some(&value)).await?;
        }
        if self.silence.due().is_some_and(|due| now() >= due) {
            let (keys, host) = (&self.known.keys, &self.agent.cluster.host);
            let ranges = [keys.one(Key::Leader), keys.of_host(host), keys.one(Key::Report(host))];
            let (_, found) = etcd.read(&ranges).await?;
            // The watch of reports is the leader's; changes before its start were read, not
            // watched.
            let known = self.leading.as_ref().map_or(i64::MAX, Leading::reports_at);
            let report = keys.key(Key::Report(host));
            let watched = |value: &&KeyValue| value.key != report || value.mod_revision > known;
            if self.silence.look(found.iter().flatten().filter(watched), now()) {
                return Err(Error::Unreachable(anyhow::anyhow!(
                    "etcd {}: a watch has stalled",
                    etcd.member()
                )));
            }
        }
        // Compares the revision: a real leader may have replaced the value meanwhile.
        if let Some(revision) = self.known.usurped.take() {
            let range = self.known.keys.one(Key::Leader);
            let compare = Compare::Changed(self.known.keys.key(Key::Leader), revision);
            etcd.transact(&[compare], &[Operation::Delete(range)]).await?;
        }
        if self.campaign_at.is_some_and(|at| now() >= at) {
            self.campaign_at = None;
            if self.known.joined.is_some() && self.known.leader.is_none() {
                self.leading = Leading::campaign(&self.known, etcd).await?;
                if let Some(leading) = &self.leading {
                    self.known.leader = Some((leading.term(), self.agent.cluster.host.clone()));
                    self.tell(Word::Led { leader: self.known.leader.clone() }).await?;
                }
            }
        }
        if let Some(leading) = &mut self.leading
            && !leading.tend(&self.known, etcd).await?
        {
            self.leading = None;
        }
        let silent = self.leading.as_ref().map(|leading| leading.silent(&self.known));
        if silent != self.told_silent {
            self.told_silent.clone_from(&silent);
            self.tell(Word::Silent(silent)).await?;
        }
        self.tell_of_slowness(etcd);
        Ok(())
    }

    /// Logs slow requests: a report and its grant are several requests within one lease.
    fn tell_of_slowness(&mut self, etcd: &mut Etcd) {
        let took = etcd.take_slowest();
        if took > SLOW && self.told_slow.is_none_or(|told| now() >= told + BETWEEN_SLOW) {
            self.told_slow = Some(now());
            tracing::warn!(
                etcd = etcd.member(),
                took_ms = took.as_millis() as u64,
                "cluster: etcd is slow: quota leases may expire before they are renewed; the fallback share applies then"
            );
        }
    }

    /// Schedules a campaign after a random part of a tick, so that hosts do not all stand at once.
    pub(super) fn stand(&mut self, after: Duration) {
        let tick = self.agent.timing.tick.mul_f64((draw() % 1024) as f64 / 1024.0);
        self.campaign_at = Some(now() + after + tick);
    }

    /// Takes this host's name, unless another live process has it.
    pub(super) async fn join(&mut self, etcd: &mut Etcd, taken: Option<&KeyValue>) -> Result<(), Error> {
        let host = self.agent.cluster.host.clone();
        let key = self.known.keys.key(Key::Host(&host));
        self.known.namesake = None;
        let own = identity::own(&self.agent.machine_id, 0);
        let other = taken.map(|value| values::read::<Identity>(&value.value));
        let has_lease = taken.is_some_and(|value| value.lease != 0);
        let before = match &other {
            None => 0,
            // Without a lease it is no host's: a host always attaches one.
            Some(_) if !has_lease => 0,
            Some(Ok(other))
                if (other.pid, other.began, &other.machine) == (own.pid, own.began, &own.machine) =>
            {
                0
            }
            Some(Ok(other)) if identity::has_ended(other, &own) => other.instance,
            Some(Ok(other)) => {
                self.known.namesake = taken.cloned();
                return self.is_taken(&format!("process {} of another daemon", other.pid)).await;
            }
            Some(Err(why)) => return self.is_taken(&format!("a value that {why}")).await,
        };
        let report = etcd.read_one(self.known.keys.one(Key::Report(&host))).await?;
        let report = report.and_then(|value| values::read::<Reports>(&value.value).ok());
        let reported = report
            .map_or(0, |reports| reports.groups.values().map(values::Report::instance).max().unwrap_or(0));
        let instance = match self.instance {
            own if own >= reported.max(before) && own > 0 => own,
            // The clock is a hint: if etcd lost the earlier run's number, the new one is still
            // larger.
            _ => outside::clock().max(reported + 1).max(before + 1).min(MAX_INSTANCE),
        };
        let lease = etcd.grant_lease(NAME_TTL).await?;
        let promises = etcd.grant_lease(PROMISE_TTL).await?;
        let compare = match taken {
            None => Compare::Absent(key.clone()),
            Some(value) => Compare::Changed(key.clone(), value.mod_revision),
        };
        let value = values::write(&identity::own(&self.agent.machine_id, instance));
        let done = etcd.transact(&[compare], &[Operation::put(&key, &value, Some(lease))]).await?;
        if !done.held {
            // Another process was faster. The watch reports it.
            return Ok(());
        }
        let leases = Leases { name: lease, promises };
        (self.instance, self.known.joined, self.kept_at) = (instance, Some(leases), now());
        // The main thread then records its reservations again: other hosts may have made some
        // since.
        self.tell(Word::Joined { instance }).await
    }

    async fn is_taken(&self, by: &str) -> Result<(), Error> {
        let host = &self.agent.cluster.host;
        let why = format!(
            "the name {host:?} is taken in cluster {:?} by {by} (give each host a different name)",
            self.agent.cluster.name
        );
        self.tell(Word::Apart { why, lasts: true }).await
    }

    /// Writes this host's reservations, unless a reservation of another host is not yet known here.
    pub(super) async fn promise(&mut self, etcd: &mut Etcd) -> Result<(), Error> {
        let (Some(own), Some(Leases { promises: lease, .. })) = (&self.own_promises, self.known.joined)
        else {
            return Ok(());
        };
        let key = self.known.keys.key(Key::Promise(&self.agent.cluster.host));
        let put = Operation::put(&key, &values::write(own), Some(lease));
        let all = self.known.keys.promises();
        for _ in 0..3 {
            // Fails if any reservation changed after the revision by which this one was judged.
            let compare = Compare::NotSince(all.clone(), self.known.promises_at);
            let done = etcd.transact(&[compare], std::slice::from_ref(&put)).await?;
            if done.held {
                return Ok(());
            }
            self.read_promises(etcd).await?;
        }
        // The reservations are in force already. The leader reports an overbooked limit.
        etcd.transact(&[], &[put]).await.map(drop)
    }

    /// Writes these reservations if the sum over all hosts fits. Of two concurrent writers one is
    /// refused. Reservations that etcd has for this host already always fit.
    async fn promise_if(&mut self, etcd: &mut Etcd, own: Promises) -> Result<Result<(), Refusal>, Error> {
        // Reservations are recorded when the host joins.
        let Some(Leases { promises: lease, .. }) = self.known.joined else { return Ok(Ok(())) };
        let host = self.agent.cluster.host.clone();
        let put =
            Operation::put(&self.known.keys.key(Key::Promise(&host)), &values::write(&own), Some(lease));
        let all = self.known.keys.promises();
        for _ in 0..5 {
            let limits = |group: &str| self.known.groups.get(group).map(|stored| *stored.spec.limits());
            if let Some(refusal) = promising::judge(&self.known.promises, (&host, &own), limits) {
                return Ok(Err(refusal));
            }
            let compare = Compare::NotSince(all.clone(), self.known.promises_at);
            if etcd.transact(&[compare], std::slice::from_ref(&put)).await?.held {
                self.known.promises.insert(host, own.clone());
                self.own_promises = Some(own);
                return Ok(Ok(()));
            }
            self.read_promises(etcd).await?;
        }
        Ok(Err(Refusal::busy()))
    }

    /// Changes a group's limits.
    ///
    /// Concurrent reservations of other hosts do not refuse a change: it is judged again with them.
    /// Nor does a leader that restores lost limits, which may be older than the limits known here.
    /// The change is applied to the local state before it is acknowledged: if etcd lost it right
    /// after, this host would otherwise take it for another host's change.
    async fn change(&mut self, etcd: &mut Etcd, change: &Change) -> Result<Result<Value, String>, Error> {
        let version = |known: &Known| known.groups.get(&change.group).map(|stored| stored.spec.version());
        let before = version(&self.known);
        if change.removes {
            // A host may have left just now; the watch may lag behind.
            self.read_promises(etcd).await?;
        }
        for _ in 0..5 {
            match changing::change(&self.known, etcd, change).await? {
                Some(Ok(stored)) => {
                    let shown = changing::shown(&self.known, &change.group, &stored.group);
                    self.on_limits(change.group.clone(), stored, change.by.clone()).await?;
                    if change.removes {
                        changing::forget_removed(&self.known, etcd).await?;
                    }
                    return Ok(Ok(shown));
                }
                Some(Err(why)) => return Ok(Err(why)),
                None => {}
            }
            self.read_promises(etcd).await?;
            let there = etcd.read_one(self.known.keys.one(Key::Group(&change.group))).await?;
            let number = there
                .as_ref()
                .and_then(|value| values::read::<Group>(&value.value).ok())
                .map(|group| group.number);
            match (there, self.known.groups.get_mut(&change.group)) {
                // An older number is the leader's restored copy: the change is retried on top of
                // it.
                (Some(value), Some(known)) if number.is_some_and(|number| number < known.group.number) => {
                    known.changed = value.mod_revision;
                }
                (Some(value), _) => self.on_put(&value).await?,
                (None, Some(lost)) => lost.changed = 0,
                (None, None) => {}
            }
            if version(&self.known) != before {
                break;
            }
        }
        Ok(Err(format!(
            "group {}: it was changed at the same time by another client (check `weir cluster status`, and try again)",
            change.group
        )))
    }

    /// Reads the reservations from etcd, independent of the watch.
    pub(super) async fn read_promises(&mut self, etcd: &mut Etcd) -> Result<(), Error> {
        let (revision, found) = etcd.read(&[self.known.keys.promises()]).await?;
        let keys = &self.known.keys;
        let names: BTreeSet<_> = found
            .iter()
            .flatten()
            .filter_map(|value| match keys.read(&value.key) {
                Some(Key::Promise(name)) => Some(name),
                _ => None,
            })
            .collect();
        self.known.promises.retain(|name, _| names.contains(name.as_str()));
        for value in found.iter().flatten() {
            if matches!(self.known.keys.read(&value.key), Some(Key::Promise(_))) {
                self.on_put(value).await?;
            }
        }
        self.known.promises_at = revision;
        self.tell(Word::Promises(self.known.promises.clone())).await
    }

    /// Releases the name and the leadership. No quota is in force on this host any more.
    async fn leave(&mut self, etcd: &mut Etcd) {
        if let Some(leading) = self.leading.take() {
            leading.resign(etcd).await;
        }
        let (keys, host) = (&self.known.keys, &self.agent.cluster.host);
        if let Some(Leases { name, promises: lease }) = self.known.joined.take() {
            // Reservations stay for the next run, until their lease expires.
            let waits = self.own_promises.as_ref().filter(|own| !own.groups.is_empty()).map(|own| {
                let groups = own.groups.clone();
                Promises { groups, capacity: [0; 2], members: Some(BTreeSet::new()) }
            });
            let promise = Key::Promise(host);
            let promise = match waits {
                Some(waits) => Operation::put(&keys.key(promise), &values::write(&waits), Some(lease)),
                None => Operation::Delete(keys.one(promise)),
            };
            let report = Operation::Delete(keys.one(Key::Report(host)));
            // The name is revoked last: until then no other run can take it and see stale keys.
            // Best effort: leases expire without this as well.
            let _ = etcd.transact(&[], &[report, promise]).await;
            let _ = etcd.revoke_lease(name).await;
        }
        self.keeper.end(&self.agent.file, &self.known.groups).await;
    }
}
