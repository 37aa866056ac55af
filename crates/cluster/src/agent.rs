//! Thread with the connection to etcd: writes this host's reports, reads its grants, and stands for
//! election.
//!
//! ```text
//!   main thread  LocalGroups ──reports, reservations, commands──► inbox ──► EtcdSession ──► etcd
//!                   ▲                                               ▲           │
//!                   └─── events ────────────────────────────────────┼───────────┤ leads (leader)
//!                                                          watches ─┘           ▼
//!                                                                           reports, grants
//! ```
//!
//! A session uses one member of etcd. Any failure ends it; the next session uses the next member
//! and reads everything again. Each host returns to its fallback share by its own clock, without
//! this thread. Watch events are handled in `watch_events`.
//!
//! No request of a disk waits for this thread, and a stalled member never blocks the main thread.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::{SocketAddr, TcpListener},
    path::PathBuf,
    time::Duration,
};

use api::ClusterGroupChange;
use async_channel::{Receiver, Sender};
use policy::{
    cluster::{NAME_LEASE, Timing},
    time::Instant,
};
use reactor::select::{FirstReady, first};

use super::{
    changes,
    environment::{self, now, random},
    etcd::{EtcdClient, EtcdError, EtcdKeyValue, EtcdOperation, EtcdParameters, TransactionCondition},
    etcd_values::{self, GroupValue, HostIdentity, HostReports, HostReservations, MAX_INSTANCE},
    identity,
    keys::EtcdKey,
    leader::LeaderTerm,
    limit_file::{LimitSaver, StoredGroup},
    messages::{AgentInput, AgentMessage, GroupLimitChange},
    migration,
    peers::Peers,
    reservations::{self, ReservationRefusal},
    session_state::{HostLeases, SessionState},
    status,
    watch_task::{StallDetector, forward},
};

/// Lease of a host's name in seconds: the time that the name stays taken after a machine is lost.
const NAME_TTL: u64 = NAME_LEASE.as_secs();
/// Lease of a host's reservations in seconds: long enough for a machine to reboot.
const PROMISE_TTL: u64 = 600;
const KEEP_NAME: Duration = Duration::from_secs(NAME_TTL / 3);
/// Least duration of a session whose end is only logged. The end of a shorter one is reported,
/// since the next session may fail as well.
const MIN_NORMAL_SESSION: Duration = Duration::from_secs(10);
/// Longest sleep of the loop.
const MAX_SLEEP: Duration = Duration::from_secs(1);
/// Duration of a request that is logged as slow, and the interval between two such messages.
const SLOW_REQUEST: Duration = Duration::from_millis(300);
const SLOW_LOG_INTERVAL: Duration = Duration::from_secs(60);
/// First and last pause between two rounds over all members.
const FIRST_PAUSE: Duration = Duration::from_millis(200);
const LAST_PAUSE: Duration = Duration::from_secs(2);
/// Time until the next campaign of a host that has no leader and could not become one.
const CAMPAIGN_RETRY: Duration = Duration::from_millis(500);

pub(super) struct EtcdAgent {
    pub(super) cluster: settings::ClusterConfig,
    pub(super) terms: EtcdParameters,
    pub(super) machine_id: String,
    /// File with the limits for the next start.
    pub(super) file: PathBuf,
    /// Limits that the file had at the start.
    pub(super) recalled: BTreeMap<String, StoredGroup>,
    pub(super) inbox: (Sender<AgentInput>, Receiver<AgentInput>),
    pub(super) messages: Sender<AgentMessage>,
    pub(super) timing: Timing,
    /// Address for other hosts, and its listener.
    pub(super) peer_listener: Option<(SocketAddr, TcpListener)>,
}

impl EtcdAgent {
    /// Runs until `AgentInput::Stop`.
    pub(super) fn run(self) -> std::io::Result<()> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build()?;
        runtime.block_on(self.serve());
        Ok(())
    }

    async fn serve(mut self) {
        let listener = self.peer_listener.take();
        let peers = listener.and_then(|(own_address, listener)| {
            let inbox = self.inbox.0.clone();
            let peers = Peers::new(&self.cluster, own_address, listener, &self.terms, self.timing, inbox);
            peers.map_err(|error| tracing::error!(%error, "cluster: peer-address: it is not used")).ok()
        });
        let mut session = EtcdSession {
            agent: &self,
            known: SessionState::new(
                self.cluster.clone(),
                self.timing,
                self.inbox.0.clone(),
                self.recalled.clone(),
            ),
            instance: 0,
            own_reservations: None,
            reports: None,
            kept_at: Instant::ZERO,
            campaign_at: None,
            leading: None,
            reported_silent: None,
            silence: StallDetector::new(self.timing.lease / 2),
            answered: None,
            logged_keys: BTreeSet::new(),
            keeper: LimitSaver::default(),
            slow_logged_at: None,
            peers,
            probe_at: None,
            why: String::new(),
        };
        // A random first member: if one stalls, few hosts have to find another.
        let (mut member, mut pause) =
            (random() as usize % EtcdClient::members(&self.terms).max(1), FIRST_PAUSE);
        loop {
            // A session that worked for long ended normally: the member was stopped, or a proxy
            // closed an idle watch. If the next member answers, nothing is reported.
            let mut has_lasted = false;
            let Some(connected) = self.connect(member, &mut session).await else { return };
            let result = match connected {
                Ok(mut etcd) => {
                    member = etcd.at() + 1;
                    let began = now();
                    let result = session.run(&mut etcd).await;
                    // Without a pause after a working session: leases run while no member is
                    // connected.
                    let has_worked = session.known.joined.is_some();
                    pause = if has_worked { Duration::ZERO } else { FIRST_PAUSE };
                    has_lasted = has_worked && now() - began >= MIN_NORMAL_SESSION;
                    if matches!(result, Ok(SessionEnd::Stopped)) {
                        session.leave(&mut etcd).await;
                        return;
                    }
                    session.keeper.save_if_due(&self.file, &session.known.groups, Instant::MAX);
                    result
                }
                Err(error) => Err(error),
            };
            session.end();
            session.probe_at = None;
            let (why, is_permanent) = match result {
                Ok(SessionEnd::Stopped) => return,
                Ok(SessionEnd::Broken(why)) => (why, false),
                Err(error) => (error.to_string(), matches!(error, EtcdError::Refused(_))),
            };
            if has_lasted && !is_permanent {
                tracing::info!("cluster: etcd: {why}: trying the next member");
            } else if self
                .messages
                .send(AgentMessage::Disconnected { why: why.clone(), is_permanent })
                .await
                .is_err()
            {
                return;
            }
            // Jitter, so that hosts do not reconnect at the same time.
            let until = now() + pause + pause.max(self.timing.tick).mul_f64((random() % 256) as f64 / 256.0);
            pause = (pause * 2).clamp(FIRST_PAUSE, LAST_PAUSE);
            session.why.clone_from(&why);
            if self.serve_disconnected(until, &mut session).await {
                return;
            }
        }
    }

    /// Connects to a member. Meanwhile a host that can be reached by others answers them, since an
    /// attempt may take seconds. `None` if the agent has to stop.
    async fn connect(
        &self,
        member: usize,
        session: &mut EtcdSession<'_>,
    ) -> Option<Result<EtcdClient, EtcdError>> {
        let mut attempt = Box::pin(EtcdClient::connect(&self.terms, member));
        if session.peers.is_none() || session.instance == 0 {
            return Some(attempt.await);
        }
        loop {
            session.perform_disconnected().await;
            let input = tokio::time::timeout(session.next_disconnected() - now(), self.inbox.1.recv());
            match first(&mut attempt, input).await {
                FirstReady::One(connected) => return Some(connected),
                FirstReady::Other(Ok(input)) => {
                    if session.handle_disconnected(input.ok()).await {
                        return None;
                    }
                }
                FirstReady::Other(Err(_)) => {}
            }
        }
    }

    /// Answers commands and other hosts without etcd until an instant. True if the agent has to
    /// stop.
    async fn serve_disconnected(&self, until: Instant, session: &mut EtcdSession<'_>) -> bool {
        loop {
            session.perform_disconnected().await;
            let left = until.min(session.next_disconnected()) - now();
            match tokio::time::timeout(left, self.inbox.1.recv()).await {
                Ok(input) => {
                    if session.handle_disconnected(input.ok()).await {
                        return true;
                    }
                }
                Err(_) if now() >= until => return false,
                Err(_) => {}
            }
        }
    }
}

enum SessionEnd {
    Stopped,
    Broken(String),
}

/// State of the sessions, which follow each other, each with one member of etcd.
pub(super) struct EtcdSession<'a> {
    pub(super) agent: &'a EtcdAgent,
    pub(super) known: SessionState,
    /// Number of this run in its last registration.
    pub(super) instance: u64,
    pub(super) own_reservations: Option<HostReservations>,
    pub(super) reports: Option<HostReports>,
    kept_at: Instant,
    pub(super) campaign_at: Option<Instant>,
    pub(super) leading: Option<LeaderTerm>,
    reported_silent: Option<BTreeSet<String>>,
    pub(super) silence: StallDetector,
    /// Time of etcd's last answer.
    pub(super) answered: Option<Instant>,
    /// Keys that were logged as foreign or unreadable.
    pub(super) logged_keys: BTreeSet<String>,
    /// Stores the limits for the next start.
    pub(super) keeper: LimitSaver,
    slow_logged_at: Option<Instant>,
    /// Connections to other hosts.
    pub(super) peers: Option<Peers>,
    /// Time at which etcd is read to find out whether it answers: another host lost it.
    pub(super) probe_at: Option<Instant>,
    /// Reason why there is no session.
    pub(super) why: String,
}

impl EtcdSession<'_> {
    /// Resets the state of one session. Leadership belongs to its key: the next session may
    /// continue it.
    fn end(&mut self) {
        (self.known.joined, self.campaign_at) = (None, None);
    }

    pub(super) async fn send(&self, message: AgentMessage) -> Result<(), EtcdError> {
        let stopped_error = |_| EtcdError::Unreachable(anyhow::anyhow!("the daemon is ending"));
        self.agent.messages.send(message).await.map_err(stopped_error)
    }

    async fn run(&mut self, etcd: &mut EtcdClient) -> Result<SessionEnd, EtcdError> {
        self.known.number += 1;
        self.end();
        let host = self.agent.cluster.host.clone();
        let mut ranges = vec![self.known.keys.shared(), self.known.keys.below_host(&host)];
        if self.peers.is_some() {
            ranges.push(self.known.keys.peers());
        }
        let (revision, found) = etcd.read(&ranges).await?;
        self.begin_with_peers(revision, etcd.cluster().map(str::to_owned)).await?;
        let mut watching = Vec::new();
        for range in &ranges {
            // Watches start at the revision after the read, so that no change is lost between the
            // two.
            let watch = etcd.watch(range, revision + 1).await?;
            watching.push(forward(watch, self.known.number, self.agent.inbox.0.clone()));
        }
        (self.known.leader, self.known.foreign_leader_revision) = (None, None);
        self.known.reservations.clear();
        self.known.peers.clear();
        self.known.unreadable_groups.clear();
        // 0 marks limits as absent in etcd until the read below finds them; the leader writes lost
        // ones.
        self.known.groups.values_mut().for_each(|stored| stored.changed = 0);
        self.known.reservations_revision = revision;
        self.silence = StallDetector::new(self.agent.timing.lease / 2);
        // The own name and grant come last: joining needs the leader, and a grant needs the
        // limits.
        let (mut own_value, mut grant_value) = (None, None);
        for value in found.into_iter().flatten() {
            self.silence.note_value(&value);
            match self.known.keys.parse(&value.key) {
                Some(EtcdKey::Host(name)) if name == host => own_value = Some(value),
                Some(EtcdKey::Grant(name)) if name == host => grant_value = Some(value),
                _ => self.on_put(&value).await?,
            }
        }
        // A removal is remembered in etcd only. If etcd lost it, the name is free.
        self.known.groups.retain(|_, stored| stored.changed != 0 || !stored.group.removed);
        self.send(AgentMessage::LeaderChanged { leader: self.known.leader.clone() }).await?;
        self.send(AgentMessage::Reservations(self.known.reservations.clone())).await?;
        self.join(etcd, own_value.as_ref()).await?;
        self.update_peers();
        // A former leadership continues only if its key survived the change of the member.
        let leads = |leading: &LeaderTerm| {
            self.known.leader.as_ref().is_some_and(|(term, _)| *term == leading.term())
        };
        if let Some(mut leading) = self.leading.take().filter(leads)
            && self.known.joined.is_some()
            && leading.resume(&self.known, etcd).await?
        {
            self.leading = Some(leading);
        }
        if let Some(value) = grant_value {
            self.on_put(&value).await?;
        }
        if self.known.leader.is_none() {
            self.schedule_campaign(Duration::ZERO);
        }
        loop {
            self.perform_due(etcd).await?;
            self.answered = Some(now());
            let wait = self.next() - now();
            let Ok(input) = tokio::time::timeout(wait, self.agent.inbox.1.recv()).await else { continue };
            match input {
                Err(_) | Ok(AgentInput::Stop) => return Ok(SessionEnd::Stopped),
                Ok(AgentInput::Ended(number, why)) if number == self.known.number => {
                    return Ok(SessionEnd::Broken(why));
                }
                Ok(AgentInput::Watched(number, events)) if number == self.known.number => {
                    for event in events {
                        self.on_event(etcd, event).await?;
                    }
                }
                Ok(AgentInput::Peer(from, message, permit)) => {
                    drop(permit);
                    self.on_peer(&from, *message).await?;
                }
                // Of an earlier session, whose tasks may still have been sending.
                Ok(AgentInput::Watched(..) | AgentInput::Ended(..)) => {}
                Ok(AgentInput::Reports(reports)) => {
                    if self.known.joined.is_some() {
                        etcd.put(
                            &self.known.keys.key(EtcdKey::Report(&host)),
                            &etcd_values::write(&reports),
                            None,
                        )
                        .await?;
                        self.silence.note_report(now());
                    }
                    self.reports = Some(reports);
                }
                Ok(AgentInput::Reservations(reservations)) => {
                    self.own_reservations = Some(reservations);
                    self.write_reservations(etcd).await?;
                }
                Ok(AgentInput::ReserveIfFits(reservations, sender)) => {
                    let result = self.reserve_if_fits(etcd, reservations).await?;
                    let _ = sender.try_send(result);
                }
                Ok(AgentInput::Change(change, sender)) => {
                    let result = self.change(etcd, &change).await?;
                    let _ = sender.try_send(result);
                }
                Ok(AgentInput::Forget(host, sender)) => {
                    let result = changes::forget_host(&self.known, etcd, &host).await?;
                    let _ = sender.try_send(result);
                }
                Ok(AgentInput::Move(step, sender)) => {
                    let result = migration::perform_step(&self.known, etcd, *step).await?;
                    let _ = sender.try_send(result);
                }
                Ok(AgentInput::Status(sender)) => {
                    let report = status::current(&self.known, self.leading.as_ref(), etcd).await?;
                    let _ = sender.try_send(self.with_peers(report));
                }
            }
        }
    }

    /// Time of the next action, if no input arrives.
    fn next(&self) -> Instant {
        let leading = self.leading.as_ref().map(LeaderTerm::next);
        let keep = self.known.joined.map(|_| self.kept_at + KEEP_NAME);
        let all = [
            leading,
            keep,
            self.campaign_at,
            self.silence.due(),
            self.keeper.due(),
            self.probe_at,
            self.peers.as_ref().and_then(Peers::register_at),
            Some(now() + MAX_SLEEP),
        ];
        all.into_iter().flatten().min().unwrap_or(Instant::ZERO)
    }

    /// Performs the actions that are due: renews leases, campaigns, leads.
    async fn perform_due(&mut self, etcd: &mut EtcdClient) -> Result<(), EtcdError> {
        self.keeper.save_if_due(&self.agent.file, &self.known.groups, now());
        if let Some(HostLeases { name, reservations: promises }) = self.known.joined
            && now() >= self.kept_at + KEEP_NAME
        {
            self.kept_at = now();
            // Before renewing: a member of another etcd cluster must not count as this one.
            etcd.check_others().await?;
            if !etcd.keep_lease(name).await? || !etcd.keep_lease(promises).await? {
                self.known.joined = None;
                // The lease expired, perhaps during a suspend. Another host may have the name by
                // now.
                let own_value =
                    etcd.read_one(self.known.keys.single(EtcdKey::Host(&self.agent.cluster.host))).await?;
                self.join(etcd, own_value.as_ref()).await?;
            }
        }
        let has_ended = |value: &mut EtcdKeyValue| {
            let own_identity = identity::own_identity(&self.agent.machine_id, 0);
            etcd_values::read::<HostIdentity>(&value.value)
                .is_ok_and(|other| identity::has_ended(&other, &own_identity))
        };
        if let Some(value) = self.known.namesake.take_if(has_ended) {
            self.join(etcd, Some(&value)).await?;
        }
        if self.silence.due().is_some_and(|due| now() >= due) {
            let (keys, host) = (&self.known.keys, &self.agent.cluster.host);
            let ranges =
                [keys.single(EtcdKey::Leader), keys.below_host(host), keys.single(EtcdKey::Report(host))];
            let (_, found) = etcd.read(&ranges).await?;
            // The watch of reports is the leader's; changes before its start were read, not
            // watched.
            let known = self.leading.as_ref().map_or(i64::MAX, LeaderTerm::reports_at);
            let report = keys.key(EtcdKey::Report(host));
            let watched = |value: &&EtcdKeyValue| value.key != report || value.mod_revision > known;
            if self.silence.check(found.iter().flatten().filter(watched), now()) {
                return Err(EtcdError::Unreachable(anyhow::anyhow!(
                    "etcd {}: a watch has stalled",
                    etcd.member()
                )));
            }
        }
        // Compares the revision: a real leader may have replaced the value meanwhile.
        if let Some(revision) = self.known.foreign_leader_revision.take() {
            let range = self.known.keys.single(EtcdKey::Leader);
            let compare = TransactionCondition::Changed(self.known.keys.key(EtcdKey::Leader), revision);
            etcd.transact(&[compare], &[EtcdOperation::Delete(range)]).await?;
        }
        if self.probe_at.is_some_and(|at| now() >= at) {
            self.probe_at = None;
            etcd.keys(&[self.known.keys.single(EtcdKey::Leader)]).await?;
        }
        self.register_peer(etcd).await?;
        if self.campaign_at.is_some_and(|at| now() >= at) {
            self.campaign_at = None;
            if self.known.joined.is_some() && self.known.leader.is_none() {
                self.campaign(etcd).await?;
                if let Some(leading) = &self.leading {
                    self.known.leader = Some((leading.term(), self.agent.cluster.host.clone()));
                    self.send(AgentMessage::LeaderChanged { leader: self.known.leader.clone() }).await?;
                }
            }
        }
        if let Some(leading) = &mut self.leading
            && !leading.perform_due(&self.known, etcd, self.peers.as_ref()).await?
        {
            self.leading = None;
        }
        let silent_hosts = self.leading.as_ref().map(|leading| leading.silent_hosts(&self.known));
        if silent_hosts != self.reported_silent {
            self.reported_silent.clone_from(&silent_hosts);
            self.send(AgentMessage::Silent(silent_hosts)).await?;
        }
        self.log_slow_requests(etcd);
        Ok(())
    }

    /// Logs slow requests: a report and its grant are several requests within one lease.
    fn log_slow_requests(&mut self, etcd: &mut EtcdClient) {
        let slowest = etcd.take_slowest();
        if slowest > SLOW_REQUEST
            && self.slow_logged_at.is_none_or(|logged_at| now() >= logged_at + SLOW_LOG_INTERVAL)
        {
            self.slow_logged_at = Some(now());
            tracing::warn!(
                etcd = etcd.member(),
                took_ms = slowest.as_millis() as u64,
                "cluster: etcd is slow: quota leases may expire before they are renewed; the \
                 fallback share applies then"
            );
        }
    }

    /// Stands for election, unless this host has promised other hosts not to.
    async fn campaign(&mut self, etcd: &mut EtcdClient) -> Result<(), EtcdError> {
        if self.peers.as_ref().is_none_or(Peers::may_campaign) {
            self.leading = LeaderTerm::campaign(&self.known, etcd).await?;
        }
        if self.leading.is_none() {
            // Another host was faster, or this one may not lead yet.
            self.schedule_campaign(CAMPAIGN_RETRY);
        }
        Ok(())
    }

    /// Schedules a campaign after a random part of a tick, so that hosts do not all campaign at the
    /// same time.
    pub(super) fn schedule_campaign(&mut self, after: Duration) {
        let tick = self.agent.timing.tick.mul_f64((random() % 1024) as f64 / 1024.0);
        self.campaign_at = Some(now() + after + tick);
    }

    /// Takes this host's name, unless another live process has it.
    pub(super) async fn join(
        &mut self,
        etcd: &mut EtcdClient,
        existing: Option<&EtcdKeyValue>,
    ) -> Result<(), EtcdError> {
        let host = self.agent.cluster.host.clone();
        let key = self.known.keys.key(EtcdKey::Host(&host));
        self.known.namesake = None;
        let own_identity = identity::own_identity(&self.agent.machine_id, 0);
        let other = existing.map(|value| etcd_values::read::<HostIdentity>(&value.value));
        let has_lease = existing.is_some_and(|value| value.lease != 0);
        let before = match &other {
            None => 0,
            // A key without a lease belongs to no host: a host always attaches one.
            Some(_) if !has_lease => 0,
            Some(Ok(other))
                if (other.pid, other.start_ticks, &other.machine)
                    == (own_identity.pid, own_identity.start_ticks, &own_identity.machine) =>
            {
                0
            }
            Some(Ok(other)) if identity::has_ended(other, &own_identity) => other.instance,
            Some(Ok(other)) => {
                self.known.namesake = existing.cloned();
                return self.report_name_taken(&format!("process {} of another daemon", other.pid)).await;
            }
            Some(Err(why)) => return self.report_name_taken(&format!("a value that {why}")).await,
        };
        let report = etcd.read_one(self.known.keys.single(EtcdKey::Report(&host))).await?;
        let report = report.and_then(|value| etcd_values::read::<HostReports>(&value.value).ok());
        let reported = report.map_or(0, |reports| {
            reports.groups.values().map(etcd_values::ReportValue::instance).max().unwrap_or(0)
        });
        let instance = match self.instance {
            current if current >= reported.max(before) && current > 0 => current,
            // The clock is a hint: if etcd lost the earlier run's number, the new one is still
            // larger.
            _ => environment::wall_clock_ns().max(reported + 1).max(before + 1).min(MAX_INSTANCE),
        };
        let lease = etcd.grant_lease(NAME_TTL).await?;
        let reservations_lease = etcd.grant_lease(PROMISE_TTL).await?;
        let compare = match existing {
            None => TransactionCondition::Absent(key.clone()),
            Some(value) => TransactionCondition::Changed(key.clone(), value.mod_revision),
        };
        let value = etcd_values::write(&identity::own_identity(&self.agent.machine_id, instance));
        let result = etcd.transact(&[compare], &[EtcdOperation::put(&key, &value, Some(lease))]).await?;
        if !result.succeeded {
            // Another process was faster. The watch reports it.
            return Ok(());
        }
        let leases = HostLeases { name: lease, reservations: reservations_lease };
        (self.instance, self.known.joined, self.kept_at) = (instance, Some(leases), now());
        if let Some(peers) = &mut self.peers {
            peers.set_member(true);
            peers.register_again();
        }
        // The main thread then records its reservations again: other hosts may have made some
        // since.
        self.send(AgentMessage::Joined { instance }).await
    }

    async fn report_name_taken(&mut self, by: &str) -> Result<(), EtcdError> {
        if let Some(peers) = &mut self.peers {
            peers.set_member(false);
        }
        let host = &self.agent.cluster.host;
        let why = format!(
            "the name {host:?} is taken in cluster {:?} by {by} (give each host a different name)",
            self.agent.cluster.name
        );
        self.send(AgentMessage::Disconnected { why, is_permanent: true }).await
    }

    /// Writes this host's reservations, unless a reservation of another host is not yet known here.
    pub(super) async fn write_reservations(&mut self, etcd: &mut EtcdClient) -> Result<(), EtcdError> {
        let (Some(own_reservations), Some(HostLeases { reservations: lease, .. })) =
            (&self.own_reservations, self.known.joined)
        else {
            return Ok(());
        };
        let key = self.known.keys.key(EtcdKey::Reservation(&self.agent.cluster.host));
        let put = EtcdOperation::put(&key, &etcd_values::write(own_reservations), Some(lease));
        let range = self.known.keys.reservations();
        for _ in 0..3 {
            // Fails if any reservation changed after the revision that this host has read.
            let compare =
                TransactionCondition::UnchangedSince(range.clone(), self.known.reservations_revision);
            let result = etcd.transact(&[compare], std::slice::from_ref(&put)).await?;
            if result.succeeded {
                return Ok(());
            }
            self.read_reservations(etcd).await?;
        }
        // The reservations are in force already. The leader reports an overbooked limit.
        etcd.transact(&[], &[put]).await.map(drop)
    }

    /// Writes these reservations if the sum over all hosts fits. Of two concurrent writers one is
    /// refused. Reservations that etcd has for this host already always fit.
    async fn reserve_if_fits(
        &mut self,
        etcd: &mut EtcdClient,
        own_reservations: HostReservations,
    ) -> Result<Result<(), ReservationRefusal>, EtcdError> {
        // Reservations are recorded when the host joins.
        let Some(HostLeases { reservations: lease, .. }) = self.known.joined else { return Ok(Ok(())) };
        let host = self.agent.cluster.host.clone();
        let put = EtcdOperation::put(
            &self.known.keys.key(EtcdKey::Reservation(&host)),
            &etcd_values::write(&own_reservations),
            Some(lease),
        );
        let range = self.known.keys.reservations();
        for _ in 0..5 {
            let limits = |group: &str| self.known.groups.get(group).map(|stored| *stored.spec.limits());
            if let Some(refusal) =
                reservations::check(&self.known.reservations, &host, &own_reservations, limits)
            {
                return Ok(Err(refusal));
            }
            let compare =
                TransactionCondition::UnchangedSince(range.clone(), self.known.reservations_revision);
            if etcd.transact(&[compare], std::slice::from_ref(&put)).await?.succeeded {
                self.known.reservations.insert(host, own_reservations.clone());
                self.own_reservations = Some(own_reservations);
                return Ok(Ok(()));
            }
            self.read_reservations(etcd).await?;
        }
        Ok(Err(ReservationRefusal::busy()))
    }

    /// Changes a group's limits.
    ///
    /// A concurrent reservation of another host does not reject the change: the change is checked
    /// again with that reservation. Neither does a leader that restores lost limits, which may be
    /// older than the limits known here. The change is applied to the local state before it is
    /// acknowledged: otherwise, if etcd lost it right afterwards, this host would attribute the
    /// change to another host.
    async fn change(
        &mut self,
        etcd: &mut EtcdClient,
        change: &GroupLimitChange,
    ) -> Result<Result<ClusterGroupChange, String>, EtcdError> {
        let version =
            |known: &SessionState| known.groups.get(&change.group).map(|stored| stored.spec.version());
        let before = version(&self.known);
        if change.removes {
            // A host may have left just now; the watch may lag behind.
            self.read_reservations(etcd).await?;
        }
        for _ in 0..5 {
            match changes::change_group(&self.known, etcd, change).await? {
                Some(Ok(stored)) => {
                    let report = changes::change_report(&self.known, &change.group, &stored.group);
                    self.on_limits(change.group.clone(), stored, change.by.clone()).await?;
                    if change.removes {
                        changes::delete_old_removal_marks(&self.known, etcd).await?;
                    }
                    return Ok(Ok(report));
                }
                Some(Err(why)) => return Ok(Err(why)),
                None => {}
            }
            self.read_reservations(etcd).await?;
            let found = etcd.read_one(self.known.keys.single(EtcdKey::Group(&change.group))).await?;
            let number = found
                .as_ref()
                .and_then(|value| etcd_values::read::<GroupValue>(&value.value).ok())
                .map(|group| group.number);
            match (found, self.known.groups.get_mut(&change.group)) {
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
            "group {}: it was changed at the same time by another client (check `weir cluster \
             status`, and try again)",
            change.group
        )))
    }

    /// Reads the reservations from etcd, independent of the watch.
    pub(super) async fn read_reservations(&mut self, etcd: &mut EtcdClient) -> Result<(), EtcdError> {
        let (revision, found) = etcd.read(&[self.known.keys.reservations()]).await?;
        let keys = &self.known.keys;
        let names: BTreeSet<_> = found
            .iter()
            .flatten()
            .filter_map(|value| match keys.parse(&value.key) {
                Some(EtcdKey::Reservation(name)) => Some(name),
                _ => None,
            })
            .collect();
        self.known.reservations.retain(|name, _| names.contains(name.as_str()));
        for value in found.iter().flatten() {
            if matches!(self.known.keys.parse(&value.key), Some(EtcdKey::Reservation(_))) {
                self.on_put(value).await?;
            }
        }
        self.known.reservations_revision = revision;
        self.send(AgentMessage::Reservations(self.known.reservations.clone())).await
    }

    /// Releases the name and the leadership. No quota is in force on this host any more.
    async fn leave(&mut self, etcd: &mut EtcdClient) {
        if let Some(leading) = self.leading.take() {
            leading.resign(etcd).await;
        }
        let (keys, host) = (&self.known.keys, &self.agent.cluster.host);
        if let Some(HostLeases { name, reservations: lease }) = self.known.joined.take() {
            // Reservations stay for the next run, until their lease expires.
            let remaining = self
                .own_reservations
                .as_ref()
                .filter(|own_reservations| !own_reservations.groups.is_empty())
                .map(|own| {
                    let groups = own.groups.clone();
                    HostReservations { groups, capacity: [0; 2], members: Some(BTreeSet::new()) }
                });
            let reservation_key = EtcdKey::Reservation(host);
            let operation = match remaining {
                Some(remaining) => EtcdOperation::put(
                    &keys.key(reservation_key),
                    &etcd_values::write(&remaining),
                    Some(lease),
                ),
                None => EtcdOperation::Delete(keys.single(reservation_key)),
            };
            let report = EtcdOperation::Delete(keys.single(EtcdKey::Report(host)));
            let peer =
                [EtcdKey::Peer(host), EtcdKey::Asks(host)].map(|key| EtcdOperation::Delete(keys.single(key)));
            let [peer, asks] = peer;
            // The name is revoked last: until then no other run can take it and see stale keys.
            // Best effort: leases expire without this as well.
            let _ = etcd.transact(&[], &[report, operation, peer, asks]).await;
            let _ = etcd.revoke_lease(name).await;
        }
        self.keeper.finish(&self.agent.file, &self.known.groups).await;
    }
}

pub(super) fn unreachable_error(why: &str) -> String {
    format!("etcd is unreachable: {why}")
}
