//! Limits that hold for the sum over many hosts: this daemon's side.
//!
//! ```text
//!   start:  Cluster::prepare ─► reads etcd, or the state directory ─► groups at their fallback share
//!           … sandbox ─► Cluster::start ─► the thread that talks to etcd             agent, hearing, etcd
//!   then:   main thread    counters ─► reports; grants ─► quotas in force            hosts
//!           agent thread   if elected: reports ─► division ─► grants                 leading
//! ```
//!
//! Decisions are `policy::cluster`'s, which states the rules at its head. This crate has the
//! clocks, the messages and the buckets of the tree. Requests of disks depend on the tree alone: no
//! request waits for this crate. Without etcd a host falls back to its fallback share by its own
//! clock.
//!
//! Never trusts that a value in etcd was written by weir: see `values`.

pub mod actor;
mod agent;
mod changing;
mod etcd;
mod first;
mod fuzzing;
mod hearing;
mod hosts;
mod identity;
mod keys;
mod known;
mod leading;
pub mod moving;
pub mod offers;
mod outside;
mod promising;
mod status;
mod stored;
mod values;
mod watching;
mod words;

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    fs, io,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    rc::{Rc, Weak},
    sync::{Arc, mpsc},
    thread,
};

use anyhow::{Context as _, bail, ensure};
use api::{ClusterReport, ClusterStatus, LocalQuota};
use async_channel::{Receiver, Sender};
use block::layer::throttle::Group;
use cgroup::watch::Lending;
use policy::{
    cluster::{Spec, Timing},
    throttle::Limits,
    time::Duration,
};
use serde_json::{Value, json};
use settings::Plan;

use agent::Agent;
pub use etcd::Proofs;
use etcd::{Error, Terms};
pub use first::check;
use first::{Asked, first, known};
pub use fuzzing::etcd_values;
pub(crate) use hosts::Standing;
use hosts::{Hosts, Turn};
use keys::Keys;
use offers::{Answer, Offered, Outcome, Said, Step};
pub use promising::Refusal;
use values::Promises;
pub use words::Change;
use words::{Input, Word};

use actor::Actor;

/// Bound of the queues to and from the agent thread.
const MOST_QUEUED: usize = 1024;
/// Time that a command waits for etcd: longer than one round of requests to all members.
const PATIENCE: Duration = Duration::from_secs(5);
/// Number of different reasons for which a lost connection is reported until the host joins again.
const MOST_REASONS: usize = 32;
const ENDED: &str = "the connection to etcd has ended; the log has the reason (restart weir)";
/// Time that a stop waits for the agent to release the host's name in etcd.
const FAREWELL: Duration = Duration::from_secs(2);

/// Returns the ports of the etcd members, for the sandbox's rules.
pub fn ports(cluster: &settings::Cluster) -> Vec<u16> {
    Terms::ports(cluster)
}

/// Directory of the file that stores the cluster's limits between runs.
pub fn directory(state: Option<&Path>, cluster: &settings::Cluster) -> Option<PathBuf> {
    stored::file(state, &cluster.name).parent().map(Path::to_owned)
}

/// Warns that a local group has the name of a cluster-wide group and does not belong to it.
///
/// The group's requests come on top of the cluster's limit: a tenant may exceed its limit by a slip
/// in a config file.
fn warn_of_namesake(group: &str, cluster: &str) {
    tracing::warn!(
        group,
        cluster,
        "the cluster has limits for a group of this name, but this host's group does not belong to it: its requests come on top (set cluster = true in [group.{group}], or rename it)"
    );
}

/// The daemon's side of this crate: measurements, registry and events.
pub trait Surroundings {
    /// Measured capacity of the devices below the disks of groups that `is_shared` selects, as
    /// operations and bytes per second; 0 where it is unknown.
    fn capacity(&self, is_shared: &dyn Fn(&str) -> bool) -> [u64; 2];

    /// True if this host has a group of this name, local or of the cluster.
    fn has_group(&self, name: &str) -> bool;

    /// Reports that the host joined the cluster, or, with the reason in `apart`, that it is
    /// disconnected: once leases have expired, its fallback share applies.
    fn tell(&self, cluster: &str, host: &str, apart: Option<&str>);

    /// Puts unmet reservations in force again, as far as the known reservations leave room.
    fn promise_again(&self);

    /// Suspends reservations of disks and groups that the cluster refused, so that the rest fits.
    fn leave_out(&self, refusal: &Refusal);

    /// Reports the outcome: unmet reservations stay unmet for now; restored ones are known to all
    /// hosts.
    fn tell_promises(&self);

    /// Called after each step in which this host's quota may have changed.
    fn follow_quota(&self);

    /// Reports changed cluster-wide limits of a group that this host has, or whose change it made.
    /// `limits` are the old and the new ones.
    fn tell_limits(&self, cluster: &str, group: &str, limits: [&Limits; 2], by: &Actor);

    /// Reports that a host stopped reporting, or (with `silent` false) that it reports again or
    /// left. Only the leader calls this.
    fn tell_silent(&self, cluster: &str, host: &str, silent: bool);

    /// Reports that the reservations of a group exceed its limit: `promised` is their sum and the
    /// limit, in `unit` per second.
    fn tell_overpromised(&self, cluster: &str, group: &str, unit: &'static str, promised: [u64; 2]);
}

/// This daemon's membership in its cluster. Belongs to the main thread.
pub struct Cluster {
    name: String,
    host: String,
    hosts: RefCell<Hosts>,
    specs: RefCell<BTreeMap<String, Spec>>,
    /// Hosts that stopped reporting; `None` unless this host leads.
    silent: RefCell<Option<BTreeSet<String>>>,
    /// Groups without limits in etcd when etcd was last read.
    without_limits: BTreeSet<String>,
    file: PathBuf,
    /// Disks of this host that moved to another host, with that host's name.
    moved: RefCell<BTreeMap<String, String>>,
    overpromised: RefCell<BTreeMap<(String, usize), [u64; 2]>>,
    /// True while a request to record this host's reservations is in flight.
    is_asking: Cell<bool>,
    is_connected: Cell<bool>,
    /// Reasons already reported since the host last joined.
    told_apart: RefCell<BTreeSet<String>>,
    /// Local groups for which [`warn_of_namesake`] was called.
    told_namesakes: RefCell<BTreeSet<String>>,
    /// Reason for the missing connection; empty while connected.
    reason: RefCell<String>,
    leader: RefCell<Option<String>>,
    /// Disks that other hosts offer to this one.
    offers: (Sender<Offered>, Receiver<Offered>),
    /// Receivers of answers to this host's offers, by the offer's number.
    awaited: RefCell<BTreeMap<u64, Sender<Answer>>>,
    input: Sender<Input>,
    words: Receiver<Word>,
    agent: RefCell<Option<Agent>>,
    /// Shared with the agent, for renewed credentials.
    terms: Terms,
    /// Quotas of control groups.
    lending: Option<Lending>,
}

/// The agent thread and the main thread's task. Dropping it leaves the cluster.
pub struct Running {
    input: Sender<Input>,
    ended: mpsc::Receiver<()>,
    _task: reactor::JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.input.try_send(Input::Stop).is_ok() {
            // Without an answer of etcd the leases expire.
            let _ = self.ended.recv_timeout(FAREWELL);
        }
    }
}

impl Cluster {
    /// Reads the limits of this host's groups from etcd, or, if etcd is unreachable, from the state
    /// directory. `None` without a cluster in the config.
    ///
    /// # Errors
    /// Fails on wrong certificates, passwords or names, and if the limits of a group are unknown.
    pub async fn prepare(plan: &Plan) -> anyhow::Result<Option<Rc<Self>>> {
        let Some(cluster) = plan.service.cluster.clone() else { return Ok(None) };
        let file = stored::file(plan.service.state.as_deref(), &cluster.name);
        make_directory(&file, plan)
            .with_context(|| format!("cluster {}: {}", cluster.name, file.display()))?;
        let settings = cluster.clone();
        let own = Asked::of(plan, &cluster)?;
        let groups = own.groups.clone();
        // Before the sandbox: certificates are readable and names can be resolved only now.
        let asked = reactor::blocking(move || {
            let terms = Terms::new(&settings)?;
            let first = first(&Keys::of(&settings.name), &own, &terms);
            anyhow::Ok((terms, first))
        });
        let (terms, first) = asked.await.with_context(|| format!("cluster {}", cluster.name))?;
        let mut reason = String::new();
        let recalled = stored::recall(&file);
        let first = match first {
            Ok(mut first) => {
                first.recall(&recalled);
                let bare = groups.into_iter().filter(|name| !first.specs.contains_key(name));
                let bare: Vec<_> = bare.collect();
                if !bare.is_empty() {
                    let file = file.clone();
                    reactor::blocking(move || stored::save_without_limits(&file, bare)).await;
                }
                first
            }
            // Only unreachability falls back to stored limits. A refusal (certificate, password,
            // foreign value) needs an administrator, so the start fails.
            Err(Error::Refused(why)) => bail!("cluster {}: {why}", cluster.name),
            Err(error) => {
                reason = error.to_string();
                known(&file, plan, &reason).with_context(|| format!("cluster {}", cluster.name))?
            }
        };
        let (to_agent, inbox) = async_channel::bounded(MOST_QUEUED);
        let (to_main, words) = async_channel::bounded(MOST_QUEUED);
        let timing = Timing::DEFAULT;
        let mut hosts = Hosts::new(&cluster.host, timing);
        let _ = hosts.hear(Word::Promises(first.promises), reactor::now());
        let control_groups = cluster.control_groups.clone();
        let lending = Lending::new(control_groups.iter().map(String::as_str));
        let (name, host) = (cluster.name.clone(), cluster.host.clone());
        let inbox = (to_agent.clone(), inbox);
        let machine_id = identity::machine_id();
        let known_terms = terms.clone();
        let agent =
            Agent { cluster, terms, machine_id, file: file.clone(), recalled, inbox, words: to_main, timing };
        let cluster = Self {
            name,
            host,
            hosts: RefCell::new(hosts),
            specs: RefCell::new(first.specs),
            silent: RefCell::default(),
            without_limits: stored::without_limits(&file),
            file,
            moved: RefCell::new(first.moved),
            overpromised: RefCell::default(),
            is_asking: Cell::new(false),
            is_connected: Cell::new(false),
            told_apart: RefCell::default(),
            told_namesakes: RefCell::default(),
            reason: RefCell::new(reason),
            leader: RefCell::default(),
            offers: async_channel::bounded(MOST_QUEUED),
            awaited: RefCell::default(),
            input: to_agent,
            words,
            agent: RefCell::new(Some(agent)),
            terms: known_terms,
            lending: (!control_groups.is_empty()).then_some(lending),
        };
        for group in &control_groups {
            let spec = cluster.spec(group)?;
            if let Some(lending) = &cluster.lending {
                cluster.hosts.borrow_mut().add_control_groups(lending.lender(group), spec);
            }
        }
        Ok(Some(Rc::new(cluster)))
    }

    /// Sets the credentials of later connections to etcd.
    pub fn renew(&self, proofs: Proofs) {
        self.terms.renew(proofs);
    }

    /// Adds a group at its fallback share, if the cluster has limits for it.
    ///
    /// # Errors Fails if etcd is unreachable and the group's limits are unknown, or if control
    /// groups of this host use this quota.
    pub fn take_part(&self, group: &Arc<Group>) -> anyhow::Result<()> {
        let spec = self.spec(group.name())?;
        ensure!(
            // A group has one quota per host. Disks and control groups together would use it twice.
            !self.hosts.borrow().has(group.name()),
            "group {0}: control groups of this host use its quota (rename it, or remove {0} from control-groups)",
            group.name()
        );
        self.hosts.borrow_mut().add(group, spec);
        Ok(())
    }

    fn spec(&self, group: &str) -> anyhow::Result<Option<Spec>> {
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
                    reactor::blocking(move || stored::save_without_limits(&file, [name])).await;
                });
            }
            let when = if reason.is_empty() { "has" } else { "had, when etcd was last reachable," };
            tracing::warn!(
                group,
                "the cluster {when} no limits for this group yet (`weir throttle {group} --cluster --iops-total N` sets them)"
            );
        }
        Ok(spec)
    }

    /// Quotas of this host's control groups, if the config names any.
    pub fn lending(&self) -> Option<Lending> {
        self.lending.clone()
    }

    /// Removes a group, which then has no quota on this host.
    pub fn leave(&self, group: &str) {
        self.hosts.borrow_mut().remove(group);
    }

    /// True if the cluster sets the limits of this group.
    pub fn has(&self, group: &str) -> bool {
        self.hosts.borrow().has(group)
    }

    /// Starts the agent thread, with the rights that the sandbox leaves, and the main thread's
    /// task.
    pub fn start(self: &Rc<Self>, around: Weak<dyn Surroundings>) -> anyhow::Result<Running> {
        let agent = self.agent.take().context("the cluster runs already")?;
        let (end, ended) = mpsc::channel();
        let thread = thread::Builder::new().name("cluster".to_owned()).spawn(move || {
            if let Err(error) = agent.run() {
                tracing::error!(%error, "the thread for etcd has failed: the fallback share applies (restart weir)");
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
                let word = match next - now {
                    Duration::ZERO => None,
                    left => match reactor::timeout(left, cluster.words.recv()).await {
                        Ok(Ok(word)) => Some(word),
                        // The agent ended. Ticks go on, so that leases expire.
                        Ok(Err(_)) => {
                            reactor::sleep_until(next).await;
                            None
                        }
                        Err(_) => None,
                    },
                };
                let Some(around) = around.upgrade() else { return };
                match word {
                    Some(word) => cluster.hear(word, &*around),
                    None => {
                        cluster.tick(&around);
                        next = reactor::now() + Timing::DEFAULT.tick;
                    }
                }
            }
        });
        Ok(Running { input: self.input.clone(), ended, _task: task })
    }

    fn tick(self: &Rc<Self>, around: &Rc<dyn Surroundings>) {
        self.ask_promises(around);
        if self.is_leader() && self.is_connected.get() {
            // Only the leader reports an overbooked limit, or each host would.
            let over = self.hosts.borrow().overpromised(&self.specs.borrow());
            let before = self.overpromised.replace(over.clone());
            for ((group, unit), promised) in over {
                if !before.contains_key(&(group.clone(), unit)) {
                    around.tell_overpromised(&self.name, &group, ["iops", "bps"][unit], promised);
                }
            }
        }
        self.tell_namesakes(&**around);
        let reports = self.hosts.borrow_mut().tick(reactor::now());
        around.follow_quota();
        if let Some(reports) = reports {
            let _ = self.input.try_send(Input::Reports(reports));
        }
    }
    // The tick also drops expired leases, so it has to run without any word from the agent.

    /// Calls [`warn_of_namesake`] once for each group.
    fn tell_namesakes(&self, around: &dyn Surroundings) {
        let mut told = self.told_namesakes.borrow_mut();
        for (group, spec) in &*self.specs.borrow() {
            let is_namesake = !spec.limits().is_unlimited() && !self.has(group) && around.has_group(group);
            if is_namesake && told.insert(group.clone()) {
                warn_of_namesake(group, &self.name);
            } else if !is_namesake {
                told.remove(group);
            }
        }
    }

    /// Records this host's reservations in etcd after a start, a change or an outage.
    ///
    /// Refused reservations become unmet. Disks do not wait for the answer.
    fn ask_promises(self: &Rc<Self>, around: &Rc<dyn Surroundings>) {
        if self.is_asking.get() {
            return;
        }
        if self.is_connected.get() {
            around.promise_again();
        }
        let Some(promised) = self.promised(&**around) else {
            around.tell_promises();
            return;
        };
        self.is_asking.set(true);
        let (cluster, around) = (Rc::clone(self), Rc::clone(around));
        reactor::spawn(async move {
            if let Err(refusal) = cluster.settle(promised).await {
                around.leave_out(&refusal);
                cluster.hosts.borrow_mut().ask_again();
            }
            cluster.is_asking.set(false);
        });
    }

    fn hear_silence(&self, silent: Option<BTreeSet<String>>, around: &dyn Surroundings) {
        let before = self.silent.replace(silent.clone()).unwrap_or_default();
        // Only the leader receives reports. The next leader starts with an empty set.
        let Some(silent) = silent else { return };
        silent.difference(&before).for_each(|host| around.tell_silent(&self.name, host, true));
        before.difference(&silent).for_each(|host| around.tell_silent(&self.name, host, false));
    }

    fn hear(&self, word: Word, around: &dyn Surroundings) {
        let word = match word {
            Word::Offered(offered) => {
                // A full queue drops the offer; its host withdraws it after a timeout.
                let _ = self.offers.0.try_send(*offered);
                return;
            }
            Word::Answered { disk, answer } => {
                self.hear_answer(disk, answer);
                return;
            }
            Word::Silent(silent) => {
                self.hear_silence(silent, around);
                return;
            }
            word => word,
        };
        if let Word::Group { name, spec, by } = &word {
            let before = self.specs.borrow_mut().insert(name.clone(), *spec);
            let none = Limits::default();
            let limits = [before.as_ref().map_or(&none, Spec::limits), spec.limits()];
            // A change made by a client of this host is reported even if no local group uses the
            // limit.
            if limits[0] != limits[1] && (by.is_some() || self.has(name)) {
                around.tell_limits(&self.name, name, limits, by.as_ref().unwrap_or(&Actor::AnotherHost));
            }
        }
        let (turn, reports) = self.hosts.borrow_mut().hear(word, reactor::now());
        around.follow_quota();
        if let Some(reports) = reports {
            let _ = self.input.try_send(Input::Reports(reports));
        }
        match turn {
            Some(Turn::Joined) if !self.is_connected.replace(true) => {
                self.reason.borrow_mut().clear();
                self.told_apart.borrow_mut().clear();
                around.tell(&self.name, &self.host, None);
            }
            Some(Turn::Apart { why, lasts }) => {
                self.reason.replace(why.clone());
                self.is_connected.set(false);
                let mut told = self.told_apart.borrow_mut();
                // The agent retries all members in turn. Each may fail for another reason.
                let is_new = lasts && told.len() < MOST_REASONS && !told.contains(&why);
                if told.is_empty() || is_new {
                    around.tell(&self.name, &self.host, Some(&why));
                    told.insert(why);
                }
            }
            Some(Turn::Led(leader)) => drop(self.leader.replace(leader)),
            Some(Turn::Joined) | None => {}
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

    /// Number of hosts that stopped reporting; `None` unless this host leads.
    pub fn silent(&self) -> Option<usize> {
        self.silent.borrow().as_ref().map(BTreeSet::len)
    }

    /// State of each local group that belongs to a cluster-wide limit.
    pub fn standings(&self) -> Vec<Standing> {
        self.hosts.borrow().standings()
    }

    /// Report for `weir cluster status`. Waits up to `PATIENCE` for etcd.
    pub async fn status(&self) -> ClusterReport {
        let (answer, answered) = async_channel::bounded(1);
        let report = match self.give(Input::Status(answer)) {
            Ok(()) => match reactor::timeout(PATIENCE, answered.recv()).await {
                Ok(Ok(shown)) => shown,
                _ => status::apart("etcd does not answer in time"),
            },
            Err(why) => status::apart(why),
        };
        let quota = |standing: Standing| LocalQuota { name: standing.group, leased: standing.is_leased };
        ClusterReport {
            name: self.name.clone(),
            host: self.host.clone(),
            here: self.standings().into_iter().map(quota).collect(),
            ..report
        }
    }

    /// Changes or removes the limits of a group on all hosts.
    ///
    /// # Errors
    /// Returns the reason as a message.
    pub async fn change(&self, change: Change) -> Result<Value, String> {
        let is_here = self.has(&change.group);
        if is_here && change.removes {
            let name = &change.group;
            return Err(format!(
                "group {name}: in use on {} (remove [group.{name}] from the config file here, and reload)",
                self.host
            ));
        }
        // Taken here, not in the agent: the actor is known on the main thread, during the poll.
        let change = Change { by: actor::now_acting(), ..change };
        let mut done = self.ask(|answer| Input::Change(change, answer)).await?;
        if is_here {
            done["used"] = json!(true);
        }
        Ok(done)
    }

    /// Records this host's reservations in etcd, if all hosts' reservations then fit.
    ///
    /// # Errors
    /// Returns the reason of a refusal; the caller undoes its change. Without etcd the last known
    /// reservations of all hosts decide.
    pub async fn settle_promises(&self, around: &dyn Surroundings) -> Result<(), String> {
        match self.promised(around) {
            Some(promised) => self.settle(promised).await.map_err(|refusal| refusal.why),
            None => Ok(()),
        }
    }

    async fn settle(&self, promised: Promises) -> Result<(), Refusal> {
        let (answer, answered) = async_channel::bounded(1);
        if self.give(Input::Promise(promised, answer)).is_err() {
            return Ok(());
        }
        // After a timeout the next session records them again.
        match reactor::timeout(PATIENCE, answered.recv()).await {
            Ok(Ok(done)) => done,
            _ => Ok(()),
        }
    }

    /// This host's reservations, if they changed since the last call.
    fn promised(&self, around: &dyn Surroundings) -> Option<Promises> {
        let capacity = around.capacity(&|group| self.has(group));
        self.hosts.borrow_mut().promised(capacity)
    }

    /// Reservations of other hosts in a group, as text for a message; empty without any.
    pub fn elsewhere(&self, group: &str) -> String {
        self.hosts.borrow().elsewhere(group)
    }

    /// Name of the host that a disk moved to.
    pub fn moved_to(&self, disk: &str) -> Option<String> {
        self.moved.borrow().get(disk).cloned()
    }

    /// Records that a disk moved to another host, or (`None`) that it is back.
    pub fn know_moved(&self, disk: &str, to: Option<&str>) {
        let mut moved = self.moved.borrow_mut();
        match to {
            Some(to) => drop(moved.insert(disk.to_owned(), to.to_owned())),
            None => drop(moved.remove(disk)),
        }
    }

    /// Records that a disk that moved away exists here again without a migration.
    pub fn has_again(&self, disk: &str) {
        if self.moved.borrow_mut().remove(disk).is_some() {
            let step = Step::Own { disk: disk.to_owned() };
            let _ = self.give(Input::Move(Box::new(step), async_channel::bounded(1).0));
        }
    }

    /// Disks of the config file that moved to other hosts.
    pub fn moved(&self) -> BTreeMap<String, String> {
        self.moved.borrow().clone()
    }

    /// Reason why the last start could not check in etcd for disks that moved away.
    pub fn unasked(&self) -> Option<String> {
        Some(self.reason.borrow().clone()).filter(|reason| !reason.is_empty())
    }

    /// True after the start until etcd's first answer.
    pub fn is_joining(&self) -> bool {
        !self.is_connected.get() && self.reason.borrow().is_empty()
    }

    /// Deletes the keys of a host that will not return.
    ///
    /// # Errors
    /// Returns the reason as a message.
    pub async fn forget(&self, host: String) -> Result<Value, String> {
        self.ask(|answer| Input::Forget(host, answer)).await
    }

    /// Name of this host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Next disk that another host offers; `None` after the end of the agent.
    pub async fn next_offer(&self) -> Option<Offered> {
        self.offers.1.recv().await.ok()
    }

    /// Answers to the offer of this number, until the receiver is dropped.
    pub fn answers(&self, number: u64) -> Receiver<Answer> {
        let (sender, receiver) = async_channel::bounded(4);
        let mut awaited = self.awaited.borrow_mut();
        awaited.retain(|_, sender| !sender.is_closed());
        awaited.insert(number, sender);
        receiver
    }

    fn hear_answer(&self, disk: String, answer: Answer) {
        let sent = self.awaited.borrow().get(&answer.number).map(|sender| sender.try_send(answer.clone()));
        if !matches!(sent, Some(Ok(()))) && answer.said != Said::Taken {
            // The offer is an earlier run's, or the receiver gave up. Withdrawing it frees the
            // other host.
            let step = Step::Withdraw { to: answer.by, disk, number: answer.number };
            let _ = self.input.try_send(Input::Move(Box::new(step), async_channel::bounded(1).0));
        }
    }

    /// Performs one step of a migration. `None` if the outcome is unknown.
    pub async fn step(&self, step: Step) -> Option<Outcome> {
        let (answer, answered) = async_channel::bounded(1);
        if let Err(why) = self.give(Input::Move(Box::new(step), answer)) {
            return Some(Outcome::Apart(why.to_owned()));
        }
        reactor::timeout(PATIENCE, answered.recv()).await.ok()?.ok()
    }

    /// Records lower reservations in etcd before any later step.
    pub fn promise(&self, around: &dyn Surroundings) {
        // With a full queue the next session records them.
        if let Some(promised) = self.promised(around) {
            let _ = self.input.try_send(Input::Promises(promised));
        }
    }

    /// Sends to the agent; the error is the text for the user.
    fn give(&self, input: Input) -> Result<(), &'static str> {
        self.input.try_send(input).map_err(|error| match error.is_closed() {
            true => ENDED,
            false => "too many requests at once (try again)",
        })
    }

    async fn ask(&self, input: impl FnOnce(Sender<Result<Value, String>>) -> Input) -> Result<Value, String> {
        let (answer, answered) = async_channel::bounded(1);
        self.give(input(answer))?;
        match reactor::timeout(PATIENCE, answered.recv()).await {
            Ok(Ok(done)) => done,
            _ => Err(
                "etcd does not answer in time; the change may have been made (check `weir cluster status`)"
                    .to_owned(),
            ),
        }
    }
}

/// Creates the state directory for the user that the daemon runs as after its start.
fn make_directory(file: &Path, plan: &Plan) -> io::Result<()> {
    let Some(directory) = file.parent() else { return Ok(()) };
    fs::create_dir_all(directory)?;
    if let Some(owner) = &plan.service.user
        && let Ok((uid, gid)) = sandbox::ids(owner)
        && fs::metadata(directory)?.uid() != uid
    {
        std::os::unix::fs::chown(directory, Some(uid), Some(gid))?;
    }
    Ok(())
}
