//! Limits that hold for the sum over many hosts: this daemon's side.
//!
//! ```text
//!   start:  ClusterMembership::prepare ─► reads etcd, or the state directory ─► groups at their fallback share
//!           … sandbox ─► ClusterMembership::start ─► the agent thread    agent, etcd, watch_events
//!   then:   main thread    counters ─► reports; grants ─► quotas in force    local_groups
//!           agent thread   if elected: reports ─► division ─► grants         leader
//! ```
//!
//! `policy::cluster` makes the decisions; its module documentation has the rules. This crate has
//! the clocks, the messages and the buckets of the tree. A disk's requests use only the tree: no
//! request waits for this crate. Without etcd a host returns to its fallback share by its own
//! clock.
//!
//! Never trusts that a value in etcd was written by weir: see `etcd_values`.

pub mod actor;
mod agent;
mod bootstrap;
mod changes;
mod environment;
mod etcd;
mod etcd_values;
mod fuzzing;
mod identity;
mod keys;
mod leader;
mod limit_file;
mod local_groups;
mod messages;
pub mod migration;
pub mod migration_offer;
mod peer_message;
mod peers;
mod requests;
mod reservations;
mod session_state;
mod status;
mod watch_events;
mod watch_task;
mod without_etcd;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    rc::{Rc, Weak},
    sync::{Arc, mpsc},
    thread,
};

use anyhow::{Context as _, bail, ensure};
use api::{ClusterAgreement, ClusterStatus};
use async_channel::{Receiver, Sender};
use block::layer::throttle::ThrottleGroup;
use cgroup::watch::CgroupLeases;
use policy::{
    cluster::{ClusterGroupLimits, Timing},
    throttle::Limits,
    time::Duration,
};
use sandbox::create_state_directory;
use settings::DesiredState;

use agent::EtcdAgent;
pub use bootstrap::check_start;
use bootstrap::{StartQuery, read_start_state, stored_start_state};
pub use etcd::EtcdCredentials;
use etcd::{EtcdError, EtcdParameters};
use etcd_values::HostReservations;
pub use fuzzing::etcd_values;
use keys::EtcdKeys;
pub(crate) use local_groups::LocalGroupState;
use local_groups::{LocalGroups, MembershipEvent};
pub use messages::GroupLimitChange;
use messages::{AgentInput, AgentMessage, PeerStatus};
use migration_offer::{MigrationAnswer, MigrationStep, ReceivedOffer};
use reservations::MAX_NAMED_HOSTS;
pub use reservations::ReservationRefusal;

use actor::ChangeOrigin;

/// Capacity of the queues to and from the agent thread.
const QUEUE_LENGTH: usize = 1024;
/// Number of different reasons for which a lost connection is reported until the host joins again.
const MAX_REPORTED_REASONS: usize = 32;
const AGENT_ENDED: &str = "the connection to etcd has ended; the log has the reason (restart weir)";
/// Time that a stop waits for the agent to release the host's name in etcd.
const LEAVE_TIMEOUT: Duration = Duration::from_secs(2);

/// Returns the ports of the etcd members, for the sandbox's rules.
pub fn ports(cluster: &settings::ClusterConfig) -> Vec<u16> {
    EtcdParameters::ports(cluster)
}

/// Directory of the file that stores the cluster's limits between runs.
pub fn directory(state: Option<&Path>, cluster: &settings::ClusterConfig) -> Option<PathBuf> {
    limit_file::file(state, &cluster.name).parent().map(Path::to_owned)
}

/// Warns that a local group has the name of a cluster-wide group and does not belong to it.
///
/// The cluster's limit does not count the group's requests: a mistake in a config file may let a
/// tenant exceed its limit.
fn warn_of_local_group(group: &str, cluster: &str) {
    tracing::warn!(
        group,
        cluster,
        "the cluster has limits for a group of this name, but this host's group does not belong to \
         it: its requests are not counted (set cluster = true in [group.{group}], or rename it)"
    );
}

/// The daemon's side of this crate: measurements, registry and events.
pub trait ClusterHooks {
    /// Measured capacity of the devices below the disks of groups that `is_shared` selects, as
    /// operations and bytes per second; 0 where it is unknown.
    fn capacity(&self, is_shared: &dyn Fn(&str) -> bool) -> [u64; 2];

    /// True if this host has a group of this name, local or of the cluster.
    fn has_group(&self, name: &str) -> bool;

    /// Reports that the host joined the cluster, or, with a `reason`, that it is disconnected: once
    /// leases have expired, its fallback share applies.
    fn report_connection(&self, cluster: &str, host: &str, reason: Option<&str>);

    /// Puts unmet reservations in force again, as far as they fit beside the known reservations.
    fn restore_reservations(&self);

    /// Suspends the reservations of disks and groups that the cluster refused, so that the
    /// remaining ones fit.
    fn suspend_reservations(&self, refusal: &ReservationRefusal);

    /// Reports the outcome: unmet reservations stay unmet for now; restored ones are known to all
    /// hosts.
    fn report_reservations(&self);

    /// Reports how this host works while etcd is unreachable: with a leader, which it reaches by
    /// agreement of this number of hosts (0: etcd elected it), or with its fallback shares.
    /// `detail` are the quotas in force, or the hosts that are missing.
    fn report_agreement(&self, cluster: &str, leader: Option<(&str, u64)>, detail: &str);

    /// Called after each step in which this host's quota may have changed.
    fn quota_changed(&self);

    /// Reports changed cluster-wide limits of a group that this host has, or whose change it made.
    /// `limits` are the old and the new ones.
    fn report_limits(&self, cluster: &str, group: &str, limits: [&Limits; 2], by: &ChangeOrigin);

    /// Reports that a host stopped reporting, or (with `is_silent` false) that it reports again or
    /// left. Only the leader calls this.
    fn report_silent_host(&self, cluster: &str, host: &str, is_silent: bool);

    /// Reports that the reservations of a group exceed its limit: `reserved` is their sum and the
    /// limit, in `unit` per second.
    fn report_overbooked(&self, cluster: &str, group: &str, unit: &'static str, reserved: [u64; 2]);
}

/// This daemon's membership in its cluster. Belongs to the main thread.
pub struct ClusterMembership {
    name: String,
    host: String,
    hosts: RefCell<LocalGroups>,
    specs: RefCell<BTreeMap<String, ClusterGroupLimits>>,
    /// Hosts that stopped reporting; `None` unless this host leads.
    silent_hosts: RefCell<Option<BTreeSet<String>>>,
    /// Groups without limits in etcd when etcd was last read.
    without_limits: BTreeSet<String>,
    file: PathBuf,
    /// Disks of this host that moved to another host, with that host's name.
    moved: RefCell<BTreeMap<String, String>>,
    overbooked: RefCell<BTreeMap<(String, usize), [u64; 2]>>,
    /// True while a request to record this host's reservations is in flight.
    is_recording: Cell<bool>,
    is_connected: Cell<bool>,
    /// Reasons already reported since the host last joined.
    reported_reasons: RefCell<BTreeSet<String>>,
    /// Local groups for which [`warn_of_local_group`] was called.
    warned_namesakes: RefCell<BTreeSet<String>>,
    /// Reason for the missing connection; empty while connected.
    reason: RefCell<String>,
    leader: RefCell<Option<String>>,
    /// How this host works without etcd, and whether that was reported.
    peers: RefCell<PeerStatus>,
    has_peers: bool,
    is_fallback_reported: Cell<bool>,
    /// Disks that other hosts offer to this one.
    offers: (Sender<ReceivedOffer>, Receiver<ReceivedOffer>),
    /// Receivers of answers to this host's offers, by the offer's number.
    answer_senders: RefCell<BTreeMap<u64, Sender<MigrationAnswer>>>,
    input: Sender<AgentInput>,
    messages: Receiver<AgentMessage>,
    agent: RefCell<Option<EtcdAgent>>,
    /// Shared with the agent, for renewed credentials.
    terms: EtcdParameters,
    /// Quotas of control groups.
    cgroup_leases: Option<CgroupLeases>,
}

/// The agent thread and the main thread's task. Dropping it leaves the cluster.
pub struct AgentHandle {
    input: Sender<AgentInput>,
    stopped: mpsc::Receiver<()>,
    _task: reactor::JoinHandle<()>,
}

impl Drop for AgentHandle {
    fn drop(&mut self) {
        if self.input.try_send(AgentInput::Stop).is_ok() {
            // Without an answer of etcd the leases expire.
            let _ = self.stopped.recv_timeout(LEAVE_TIMEOUT);
        }
    }
}

impl ClusterMembership {
    /// Reads the limits of this host's groups from etcd, or, if etcd is unreachable, from the state
    /// directory. `None` without a cluster in the config.
    ///
    /// # Errors
    /// Fails on wrong certificates, passwords or names, and if the limits of a group are unknown.
    pub async fn prepare(plan: &DesiredState) -> anyhow::Result<Option<Rc<Self>>> {
        let Some(cluster) = plan.process.cluster.clone() else { return Ok(None) };
        let file = limit_file::file(plan.process.state.as_deref(), &cluster.name);
        create_state_directory(file.parent().unwrap_or(Path::new("")), plan.process.user.as_ref())
            .with_context(|| format!("cluster {}: {}", cluster.name, file.display()))?;
        let settings = cluster.clone();
        let query = StartQuery::of(plan, &cluster)?;
        let groups = query.groups.clone();
        // Before the sandbox: certificates are readable and names can be resolved only now.
        let task = reactor::run_blocking(move || {
            let terms = EtcdParameters::new(&settings)?;
            let first = read_start_state(&EtcdKeys::new(&settings.name), &query, &terms);
            anyhow::Ok((terms, first))
        });
        let (terms, first) = task.await.with_context(|| format!("cluster {}", cluster.name))?;
        let mut reason = String::new();
        let recalled = limit_file::load_for_session(&file);
        let first = match first {
            Ok(mut first) => {
                first.add_stored_limits(&recalled);
                let unlimited = groups.into_iter().filter(|name| !first.specs.contains_key(name));
                let unlimited: Vec<_> = unlimited.collect();
                if !unlimited.is_empty() {
                    let file = file.clone();
                    reactor::run_blocking(move || limit_file::save_without_limits(&file, unlimited)).await;
                }
                first
            }
            // Only unreachability falls back to stored limits. A refusal (certificate, password,
            // foreign value) needs an administrator, so the start fails.
            Err(EtcdError::Refused(why)) => bail!("cluster {}: {why}", cluster.name),
            Err(error) => {
                reason = error.to_string();
                stored_start_state(&file, plan, &reason)
                    .with_context(|| format!("cluster {}", cluster.name))?
            }
        };
        let (to_agent, inbox) = async_channel::bounded(QUEUE_LENGTH);
        let (to_main, messages) = async_channel::bounded(QUEUE_LENGTH);
        let timing = Timing::DEFAULT;
        let mut hosts = LocalGroups::new(&cluster.host, timing, cluster.peer_address.is_some());
        let _ = hosts.handle_message(AgentMessage::Reservations(first.reservations), reactor::now());
        hosts.set_reporting(first.reporting);
        let control_groups = cluster.control_groups.clone();
        let lending = CgroupLeases::new(control_groups.iter().map(String::as_str));
        let (name, host) = (cluster.name.clone(), cluster.host.clone());
        let inbox = (to_agent.clone(), inbox);
        let machine_id = identity::machine_id();
        let known_terms = terms.clone();
        let listen = |address| {
            let listener = peers::bind(address);
            listener.map(|listener| (address, listener)).with_context(|| {
                format!(
                    "cluster {name}: peer-address {address}: cannot listen (write an address of this \
                     host, with a free port)"
                )
            })
        };
        let peer_listener = cluster.peer_address.map(listen).transpose()?;
        let has_peers = peer_listener.is_some();
        let agent = EtcdAgent {
            peer_listener,
            cluster,
            terms,
            machine_id,
            file: file.clone(),
            recalled,
            inbox,
            messages: to_main,
            timing,
        };
        let cluster = Self {
            name,
            host,
            hosts: RefCell::new(hosts),
            specs: RefCell::new(first.specs),
            silent_hosts: RefCell::default(),
            without_limits: limit_file::without_limits(&file),
            file,
            moved: RefCell::new(first.moved),
            overbooked: RefCell::default(),
            is_recording: Cell::new(false),
            is_connected: Cell::new(false),
            reported_reasons: RefCell::default(),
            warned_namesakes: RefCell::default(),
            reason: RefCell::new(reason),
            leader: RefCell::default(),
            peers: RefCell::default(),
            has_peers,
            is_fallback_reported: Cell::new(false),
            offers: async_channel::bounded(QUEUE_LENGTH),
            answer_senders: RefCell::default(),
            input: to_agent,
            messages,
            agent: RefCell::new(Some(agent)),
            terms: known_terms,
            cgroup_leases: (!control_groups.is_empty()).then_some(lending),
        };
        for group in &control_groups {
            let spec = cluster.spec(group)?;
            if let Some(leases) = &cluster.cgroup_leases {
                cluster.hosts.borrow_mut().add_control_groups(leases.lessor(group), spec);
            }
        }
        Ok(Some(Rc::new(cluster)))
    }

    /// Sets the credentials of later connections to etcd.
    pub fn renew(&self, proofs: EtcdCredentials) {
        self.terms.set_credentials(proofs);
    }

    /// Adds a group at its fallback share, if the cluster has limits for it.
    ///
    /// # Errors
    /// Fails if etcd is unreachable and the group's limits are unknown, or if control groups of
    /// this host use this quota.
    pub fn add_group(&self, group: &Arc<ThrottleGroup>) -> anyhow::Result<()> {
        let spec = self.spec(group.name())?;
        ensure!(
            // A group has one quota per host. Disks and control groups together would use it twice.
            !self.hosts.borrow().has(group.name()),
            "group {0}: control groups of this host use its quota (rename it, or remove {0} from \
             control-groups)",
            group.name()
        );
        self.hosts.borrow_mut().add(group, spec);
        Ok(())
    }

    fn spec(&self, group: &str) -> anyhow::Result<Option<ClusterGroupLimits>> {
        let spec = self.specs.borrow().get(group).copied();
        if spec.is_none() {
            let reason = self.reason.borrow();
            ensure!(
                reason.is_empty() || self.without_limits.contains(group),
                "group {group}: its limits are unknown: {reason} (try again once etcd is reachable)"
            );
            if reason.is_empty() && !self.without_limits.contains(group) {
                let (file, name) = (self.file.clone(), group.to_owned());
                // An optimization: the next start without etcd then does not fail for this group.
                reactor::spawn(async move {
                    reactor::run_blocking(move || limit_file::save_without_limits(&file, [name])).await;
                });
            }
            let when = if reason.is_empty() { "has" } else { "had, when etcd was last reachable," };
            tracing::warn!(
                group,
                "the cluster {when} no limits for this group yet (`weir throttle {group} --cluster \
                 --iops-total N` sets them)"
            );
        }
        Ok(spec)
    }

    /// Quotas of this host's control groups, if the config names any.
    pub fn cgroup_leases(&self) -> Option<CgroupLeases> {
        self.cgroup_leases.clone()
    }

    /// Removes a group, which then has no quota on this host.
    pub fn remove_group(&self, group: &str) {
        self.hosts.borrow_mut().remove(group);
    }

    /// True if the cluster sets the limits of this group.
    pub fn has_group(&self, group: &str) -> bool {
        self.hosts.borrow().has(group)
    }

    /// Starts the agent thread, with the rights that the sandbox leaves, and the main thread's
    /// task.
    pub fn start(self: &Rc<Self>, hooks: Weak<dyn ClusterHooks>) -> anyhow::Result<AgentHandle> {
        let agent = self.agent.take().context("the cluster's agent thread was started already")?;
        let (end, stopped) = mpsc::channel();
        let thread = thread::Builder::new().name("cluster".to_owned()).spawn(move || {
            if let Err(error) = agent.run() {
                tracing::error!(
                    %error,
                    "the thread for etcd has failed: the fallback share applies (restart weir)"
                );
            }
            // The receiver is gone if the stop timed out.
            let _ = end.send(());
        });
        thread.context("the thread for etcd")?;
        let cluster = Rc::clone(self);
        let task = reactor::spawn_joinable(async move {
            let mut next = reactor::now();
            loop {
                let now = reactor::now();
                let message = match next - now {
                    Duration::ZERO => None,
                    left => match reactor::timeout(left, cluster.messages.recv()).await {
                        Ok(Ok(message)) => Some(message),
                        // The agent ended. Ticks go on, so that leases expire.
                        Ok(Err(_)) => {
                            reactor::sleep_until(next).await;
                            None
                        }
                        Err(_) => None,
                    },
                };
                let Some(hooks) = hooks.upgrade() else { return };
                match message {
                    Some(message) => cluster.handle_message(message, &*hooks),
                    None => {
                        cluster.tick(&hooks);
                        next = reactor::now() + Timing::DEFAULT.tick;
                    }
                }
            }
        });
        Ok(AgentHandle { input: self.input.clone(), stopped, _task: task })
    }

    fn tick(self: &Rc<Self>, hooks: &Rc<dyn ClusterHooks>) {
        self.record_reservations(hooks);
        if self.is_leader() && self.is_connected.get() {
            // Only the leader reports an overbooked limit, or each host would.
            let overbooked = self.hosts.borrow().overbooked(&self.specs.borrow());
            let before = self.overbooked.replace(overbooked.clone());
            for ((group, unit), reserved) in overbooked {
                if !before.contains_key(&(group.clone(), unit)) {
                    hooks.report_overbooked(&self.name, &group, ["iops", "bps"][unit], reserved);
                }
            }
        }
        self.warn_of_namesakes(&**hooks);
        let reports = self.hosts.borrow_mut().tick(reactor::now());
        self.report_fallback(&**hooks);
        hooks.quota_changed();
        if let Some(reports) = reports {
            let _ = self.input.try_send(AgentInput::Reports(reports));
        }
    }
    // The tick also drops expired leases, so it has to run without messages from the agent too.

    /// Reports once that the leases have expired while neither etcd nor a leader is reached.
    fn report_fallback(&self, hooks: &dyn ClusterHooks) {
        let peers = self.peers.borrow();
        let is_cut_off = self.has_peers && !self.is_connected.get() && peers.leader.is_none();
        if !is_cut_off || self.is_fallback_reported.get() || self.is_joining() {
            return;
        }
        let states = self.hosts.borrow().states();
        if !states.is_empty() && states.iter().all(|state| !state.is_leased) {
            self.is_fallback_reported.set(true);
            let missing = peers.missing.iter().map(|(host, why)| format!("{host} {why}"));
            let missing: Vec<_> = missing.take(MAX_NAMED_HOSTS).collect();
            hooks.report_agreement(&self.name, None, &missing.join(", "));
        }
    }

    /// Reports a leader that this host reaches without etcd.
    fn handle_peers(&self, status: PeerStatus, hooks: &dyn ClusterHooks) {
        let before = self.peers.replace(status.clone());
        let is_new = before.leader != status.leader || before.hosts != status.hosts;
        if let Some(leader) = status.leader.filter(|_| is_new && !self.is_connected.get()) {
            self.is_fallback_reported.set(false);
            let quotas = self.hosts.borrow().quotas();
            hooks.report_agreement(&self.name, Some((&leader, status.hosts as u64)), &quotas);
        }
    }

    /// The leader that this host reaches without etcd.
    fn agreement(&self) -> Option<ClusterAgreement> {
        let peers = self.peers.borrow();
        let leader = peers.leader.clone().filter(|_| !self.is_connected.get())?;
        Some(ClusterAgreement { leader, agreed_hosts: peers.hosts as u64 })
    }

    /// Number of hosts that have agreed on this host's leader while etcd is unreachable, including
    /// this one; 0 without an agreement.
    pub fn agreed_hosts(&self) -> u64 {
        self.agreement().map_or(0, |agreement| agreement.agreed_hosts)
    }

    /// Calls [`warn_of_local_group`] once for each group.
    fn warn_of_namesakes(&self, hooks: &dyn ClusterHooks) {
        let mut warned = self.warned_namesakes.borrow_mut();
        for (group, spec) in &*self.specs.borrow() {
            let is_namesake =
                !spec.limits().is_unlimited() && !self.has_group(group) && hooks.has_group(group);
            if is_namesake && warned.insert(group.clone()) {
                warn_of_local_group(group, &self.name);
            } else if !is_namesake {
                warned.remove(group);
            }
        }
    }

    /// Records this host's reservations in etcd after a start, a change or an outage.
    ///
    /// Refused reservations become unmet. Disks do not wait for the answer.
    fn record_reservations(self: &Rc<Self>, hooks: &Rc<dyn ClusterHooks>) {
        if self.is_recording.get() {
            return;
        }
        if self.is_connected.get() {
            hooks.restore_reservations();
        }
        let Some(reservations) = self.changed_reservations(&**hooks) else {
            hooks.report_reservations();
            return;
        };
        self.is_recording.set(true);
        let (cluster, hooks) = (Rc::clone(self), Rc::clone(hooks));
        reactor::spawn(async move {
            if let Err(refusal) = cluster.record_and_wait(reservations).await {
                hooks.suspend_reservations(&refusal);
                cluster.hosts.borrow_mut().resend_reservations();
            }
            cluster.is_recording.set(false);
        });
    }

    fn handle_silent_hosts(&self, silent_hosts: Option<BTreeSet<String>>, hooks: &dyn ClusterHooks) {
        let before = self.silent_hosts.replace(silent_hosts.clone()).unwrap_or_default();
        // Only the leader receives reports. The next leader starts with an empty set.
        let Some(silent_hosts) = silent_hosts else { return };
        silent_hosts.difference(&before).for_each(|host| hooks.report_silent_host(&self.name, host, true));
        before.difference(&silent_hosts).for_each(|host| hooks.report_silent_host(&self.name, host, false));
    }

    fn handle_message(&self, message: AgentMessage, hooks: &dyn ClusterHooks) {
        let message = match message {
            AgentMessage::Offered(offered) => {
                // A full queue drops the offer; its host withdraws it after a timeout.
                let _ = self.offers.0.try_send(*offered);
                return;
            }
            AgentMessage::Answered { disk, answer } => {
                self.handle_answer(disk, answer);
                return;
            }
            AgentMessage::Peers(status) => {
                self.handle_peers(status, hooks);
                return;
            }
            AgentMessage::Silent(silent_hosts) => {
                self.handle_silent_hosts(silent_hosts, hooks);
                return;
            }
            message => message,
        };
        if let AgentMessage::Group { name, spec, by } = &message {
            let before = self.specs.borrow_mut().insert(name.clone(), *spec);
            let none = Limits::default();
            let limits = [before.as_ref().map_or(&none, ClusterGroupLimits::limits), spec.limits()];
            // A change made by a client of this host is reported even if no local group uses the
            // limit.
            if limits[0] != limits[1] && (by.is_some() || self.has_group(name)) {
                hooks.report_limits(
                    &self.name,
                    name,
                    limits,
                    by.as_ref().unwrap_or(&ChangeOrigin::AnotherHost),
                );
            }
        }
        let (event, reports) = self.hosts.borrow_mut().handle_message(message, reactor::now());
        hooks.quota_changed();
        if let Some(reports) = reports {
            let _ = self.input.try_send(AgentInput::Reports(reports));
        }
        match event {
            Some(MembershipEvent::Joined) if !self.is_connected.replace(true) => {
                self.reason.borrow_mut().clear();
                self.is_fallback_reported.set(false);
                self.reported_reasons.borrow_mut().clear();
                hooks.report_connection(&self.name, &self.host, None);
            }
            Some(MembershipEvent::Disconnected { why, lasts }) => {
                self.reason.replace(why.clone());
                self.is_connected.set(false);
                let mut reported = self.reported_reasons.borrow_mut();
                // The agent retries all members in turn. Each may fail for another reason.
                let is_new = lasts && reported.len() < MAX_REPORTED_REASONS && !reported.contains(&why);
                if reported.is_empty() || is_new {
                    hooks.report_connection(&self.name, &self.host, Some(&why));
                    reported.insert(why);
                }
            }
            Some(MembershipEvent::LeaderChanged(leader)) => drop(self.leader.replace(leader)),
            Some(MembershipEvent::Joined) | None => {}
        }
    }

    /// Summary for `weir status`.
    pub fn summary(&self) -> ClusterStatus {
        let connected = self.is_connected.get();
        ClusterStatus {
            name: self.name.clone(),
            host: self.host.clone(),
            connected,
            leader: self.leader.borrow().clone(),
            reason: (!connected).then(|| self.reason.borrow().clone()),
            agreement: self.agreement(),
        }
    }

    /// True while etcd answers and this host has its name.
    pub fn is_connected(&self) -> bool {
        self.is_connected.get()
    }

    /// True while this host is the leader.
    pub fn is_leader(&self) -> bool {
        self.leader.borrow().as_deref() == Some(&self.host)
    }

    /// Number of hosts that stopped reporting; `None` unless this host is the leader.
    pub fn unreachable_hosts(&self) -> Option<usize> {
        self.silent_hosts.borrow().as_ref().map(BTreeSet::len)
    }

    /// State of each local group that belongs to a cluster-wide limit.
    pub fn group_states(&self) -> Vec<LocalGroupState> {
        self.hosts.borrow().states()
    }

    /// This host's reservations, if they changed since the last call.
    fn changed_reservations(&self, hooks: &dyn ClusterHooks) -> Option<HostReservations> {
        let capacity = hooks.capacity(&|group| self.has_group(group));
        self.hosts.borrow_mut().update_reservations(capacity)
    }

    /// Reservations of other hosts in a group, as text for a message; empty without any.
    pub fn reservations_elsewhere(&self, group: &str) -> String {
        self.hosts.borrow().reserved_elsewhere(group)
    }

    /// Name of the host that a disk moved to.
    pub fn moved_to(&self, disk: &str) -> Option<String> {
        self.moved.borrow().get(disk).cloned()
    }

    /// Records that a disk moved to another host, or (`None`) that it is back.
    pub fn set_moved(&self, disk: &str, to: Option<&str>) {
        let mut moved = self.moved.borrow_mut();
        match to {
            Some(to) => drop(moved.insert(disk.to_owned(), to.to_owned())),
            None => drop(moved.remove(disk)),
        }
    }

    /// Records that a disk that moved away exists here again without a migration.
    pub fn forget_moved(&self, disk: &str) {
        if self.moved.borrow_mut().remove(disk).is_some() {
            let step = MigrationStep::Reclaim { disk: disk.to_owned() };
            let _ = self.send(AgentInput::Move(Box::new(step), async_channel::bounded(1).0));
        }
    }

    /// Disks of the config file that moved to other hosts.
    pub fn moved(&self) -> BTreeMap<String, String> {
        self.moved.borrow().clone()
    }

    /// Reason why the last start could not check in etcd for disks that moved away.
    pub fn start_failure(&self) -> Option<String> {
        Some(self.reason.borrow().clone()).filter(|reason| !reason.is_empty())
    }

    /// True after the start until etcd's first answer.
    pub fn is_joining(&self) -> bool {
        !self.is_connected.get() && self.reason.borrow().is_empty()
    }

    /// Name of this host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Records lower reservations in etcd before any later step.
    pub fn record_lowered_reservations(&self, hooks: &dyn ClusterHooks) {
        // With a full queue the next session records them.
        if let Some(reservations) = self.changed_reservations(hooks) {
            let _ = self.input.try_send(AgentInput::Reservations(reservations));
        }
    }
}
