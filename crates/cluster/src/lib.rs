//! Groups whose limits hold for the sum over many hosts: this daemon's part in that.
//!
//! ```text
//!   start:  Cluster::prepare ─► what etcd says, or what was known last ─► groups at their safe share
//!           … sandbox ─► Cluster::start ─► a thread that speaks with etcd    agent, hearing, etcd
//!   then:   main thread  hosts: counters ─► reports; grants ─► parts in force         hosts
//!           thread       one host of all leads: reports ─► division ─► grants         leading
//! ```
//!
//! The decisions are `policy::cluster`'s, whose rules stand at its head; here are clocks, messages
//! and the tree's buckets. A disk's request asks its tree alone: nothing here is on its way.
//! Without etcd a host falls to its safe share by its own clock.
//!
//! Never believes what is in etcd to be weir's: see `values`.

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

/// Of what arrives at the thread, and of words from there.
const MOST_QUEUED: usize = 1024;
/// How long a command waits for etcd: longer than all members are asked once.
const PATIENCE: Duration = Duration::from_secs(5);
/// For which it is told that a host is apart, until it has joined again.
const MOST_REASONS: usize = 32;
const ENDED: &str = "what speaks with etcd has ended, as the log says (restart weir)";
/// How long the end waits for the name to be given back.
const FAREWELL: Duration = Duration::from_secs(2);

/// Ports that the daemon calls for its cluster.
pub fn ports(cluster: &settings::Cluster) -> Vec<u16> {
    Terms::ports(cluster)
}

/// Where limits are kept between runs.
pub fn directory(state: Option<&Path>, cluster: &settings::Cluster) -> Option<PathBuf> {
    stored::file(state, &cluster.name).parent().map(Path::to_owned)
}

/// A group of this host is called as one of the cluster's, and is none: that may be a slip, by
/// which a tenant has more than its limit.
fn warn_of_namesake(group: &str, cluster: &str) {
    tracing::warn!(
        group,
        cluster,
        "the cluster has limits for a group of this name, and this host's takes no part in them: what passes here comes on top (cluster = true in [group.{group}], or another name)"
    );
}

/// The daemon around it.
pub trait Surroundings {
    /// What was measured of the devices below disks in such groups, of all of them together: in
    /// operations and bytes per second, 0 where it is not known.
    fn capacity(&self, is_shared: &dyn Fn(&str) -> bool) -> [u64; 2];

    /// Whether this host has a group of that name, the cluster's or its own.
    fn has_group(&self, name: &str) -> bool;

    /// This host has its part of the limits of the cluster of that name; or it is apart, for a
    /// reason: then its safe share holds once leases have run out.
    fn tell(&self, cluster: &str, host: &str, apart: Option<&str>);

    /// Promises again what was left out, as far as there is room for it by what is known here.
    fn promise_again(&self);

    /// Has disks and groups go on without some of what is promised to them, so that no more is
    /// than the cluster has room for.
    fn leave_out(&self, refusal: &Refusal);

    /// What was left out stays so for now, and what was promised again is so on all hosts.
    fn tell_promises(&self);

    /// This host's part of limits may have changed.
    fn follow_quota(&self);

    /// Limits of all hosts are others now, for a group that this host has or was asked about.
    fn tell_limits(&self, cluster: &str, group: &str, limits: [&Limits; 2], by: &Actor);

    /// This host leads, and another is not heard of any more; or, not `silent`, is again, or has
    /// left.
    fn tell_silent(&self, cluster: &str, host: &str, silent: bool);

    /// More is promised of this group on all hosts, `promised` a second, than its limit has.
    fn tell_overpromised(&self, cluster: &str, group: &str, unit: &'static str, promised: [u64; 2]);
}

/// This daemon in its cluster. Belongs to the main thread.
pub struct Cluster {
    name: String,
    host: String,
    hosts: RefCell<Hosts>,
    specs: RefCell<BTreeMap<String, Spec>>,
    /// Hosts that this one, as it leads, has not heard of for long.
    silent: RefCell<Option<BTreeSet<String>>>,
    /// Groups for which etcd had no limits when it was asked last.
    without_limits: BTreeSet<String>,
    file: PathBuf,
    /// Disks of this host that others have taken, and which.
    moved: RefCell<BTreeMap<String, String>>,
    overpromised: RefCell<BTreeMap<(String, usize), [u64; 2]>>,
    /// What is promised here is being asked for.
    is_asking: Cell<bool>,
    is_connected: Cell<bool>,
    /// For which reasons it was told that this host is apart, since it was told that it has joined.
    told_apart: RefCell<BTreeSet<String>>,
    /// Groups of this host for which it was told that the cluster has another of the name.
    told_namesakes: RefCell<BTreeSet<String>>,
    /// Why not.
    reason: RefCell<String>,
    leader: RefCell<Option<String>>,
    /// Disks that other hosts offer.
    offers: (Sender<Offered>, Receiver<Offered>),
    /// Who waits for what becomes of an offer, by its number.
    awaited: RefCell<BTreeMap<u64, Sender<Answer>>>,
    input: Sender<Input>,
    words: Receiver<Word>,
    agent: RefCell<Option<Agent>>,
    /// The agent's.
    terms: Terms,
    /// To control groups.
    lending: Option<Lending>,
}

/// The thread and the task; dropping this leaves the cluster.
pub struct Running {
    input: Sender<Input>,
    ended: mpsc::Receiver<()>,
    _task: reactor::JoinHandle<()>,
}

impl Drop for Running {
    fn drop(&mut self) {
        if self.input.try_send(Input::Stop).is_ok() {
            // Where etcd does not answer, leases end by themselves.
            let _ = self.ended.recv_timeout(FAREWELL);
        }
    }
}

impl Cluster {
    /// Asks etcd for the limits of this host's groups; where it is away, they are those known last.
    /// None without a cluster.
    ///
    /// # Errors
    /// Certificates, a password or a name that are wrong; limits that nobody knows.
    pub async fn prepare(plan: &Plan) -> anyhow::Result<Option<Rc<Self>>> {
        let Some(cluster) = plan.service.cluster.clone() else { return Ok(None) };
        let file = stored::file(plan.service.state.as_deref(), &cluster.name);
        make_directory(&file, plan)
            .with_context(|| format!("cluster {}: {}", cluster.name, file.display()))?;
        let settings = cluster.clone();
        let own = Asked::of(plan, &cluster)?;
        let groups = own.groups.clone();
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

    /// Connections to etcd that are made from now on have these.
    pub fn renew(&self, proofs: Proofs) {
        self.terms.renew(proofs);
    }

    /// A new group takes part from now on, at its safe share, where the cluster has limits for it.
    ///
    /// # Errors
    /// If nobody can say whether it has.
    pub fn take_part(&self, group: &Arc<Group>) -> anyhow::Result<()> {
        let spec = self.spec(group.name())?;
        ensure!(
            !self.hosts.borrow().has(group.name()),
            "group {0}: control groups of this host have its part (name it otherwise, or leave {0} out of control-groups)",
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
                "group {group}: nobody knows its limits: {reason} (try again once etcd can be asked)"
            );
            if reason.is_empty() && !self.without_limits.contains(group) {
                let (file, name) = (self.file.clone(), group.to_owned());
                // It can be known at the next start, and need not be.
                reactor::spawn(async move {
                    reactor::blocking(move || stored::save_without_limits(&file, [name])).await;
                });
            }
            let when = if reason.is_empty() { "has" } else { "had, when etcd could be asked last," };
            tracing::warn!(
                group,
                "the cluster {when} no limits for this group yet (`weir throttle {group} --cluster --iops-total N` sets them)"
            );
        }
        Ok(spec)
    }

    /// What control groups are lent, if any take part.
    pub fn lending(&self) -> Option<Lending> {
        self.lending.clone()
    }

    /// Removes a group from this host's part.
    pub fn leave(&self, group: &str) {
        self.hosts.borrow_mut().remove(group);
    }

    /// Whether the limits of a group are the cluster's.
    pub fn has(&self, group: &str) -> bool {
        self.hosts.borrow().has(group)
    }

    /// Starts the thread, with what rights are left, and the task.
    pub fn start(self: &Rc<Self>, around: Weak<dyn Surroundings>) -> anyhow::Result<Running> {
        let agent = self.agent.take().context("the cluster runs already")?;
        let (end, ended) = mpsc::channel();
        let thread = thread::Builder::new().name("cluster".to_owned()).spawn(move || {
            if let Err(error) = agent.run() {
                tracing::error!(%error, "etcd cannot be asked: the safe share holds (restart weir)");
            }
            // Nobody waits any more, perhaps.
            let _ = end.send(());
        });
        thread.context("the thread that speaks with etcd")?;
        let cluster = Rc::clone(self);
        let task = reactor::spawn_joinable(async move {
            let mut next = reactor::now();
            loop {
                let now = reactor::now();
                let word = match next - now {
                    Duration::ZERO => None,
                    left => match reactor::timeout(left, cluster.words.recv()).await {
                        Ok(Ok(word)) => Some(word),
                        // The thread has ended: leases run out.
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

    /// As [`warn_of_namesake`], once.
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

    /// Asks for what is promised here where all hosts do not know it yet: after a start, and after
    /// a time without etcd. What finds no room is left out: nobody's disk waits for that.
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
        // Who does not lead any more knows nothing of them.
        let Some(silent) = silent else { return };
        silent.difference(&before).for_each(|host| around.tell_silent(&self.name, host, true));
        before.difference(&silent).for_each(|host| around.tell_silent(&self.name, host, false));
    }

    fn hear(&self, word: Word, around: &dyn Surroundings) {
        let word = match word {
            Word::Offered(offered) => {
                // Those that find no room are withdrawn by their hosts.
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
                // Each member may have another reason, and is asked again and again.
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

    /// For `weir status`.
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

    /// True while etcd answers.
    pub fn is_connected(&self) -> bool {
        self.is_connected.get()
    }

    /// True while this host is the leader.
    pub fn is_leader(&self) -> bool {
        self.leader.borrow().as_deref() == Some(&self.host)
    }

    /// How many hosts this one, if it leads, has not heard of for long.
    pub fn silent(&self) -> Option<usize> {
        self.silent.borrow().as_ref().map(BTreeSet::len)
    }

    /// State of each group that belongs to a cluster-wide limit.
    pub fn standings(&self) -> Vec<Standing> {
        self.hosts.borrow().standings()
    }

    /// What `weir cluster status` shows.
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

    /// Changes a group on all hosts.
    ///
    /// # Errors
    /// Why it was not done.
    pub async fn change(&self, change: Change) -> Result<Value, String> {
        let is_here = self.has(&change.group);
        if is_here && change.removes {
            let name = &change.group;
            return Err(format!(
                "group {name}: it is on {} (take [group.{name}] out of the config file here, and reload)",
                self.host
            ));
        }
        let change = Change { by: actor::now_acting(), ..change };
        let mut done = self.ask(|answer| Input::Change(change, answer)).await?;
        if is_here {
            done["used"] = json!(true);
        }
        Ok(done)
    }

    /// Has all hosts know what is promised here now, if they have room for it.
    ///
    /// # Errors
    /// Why it cannot be promised; whoever has changed it takes it back. Without etcd what is known
    /// here of the others has to do.
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
        // Where it is too late, it is asked for again once etcd answers.
        match reactor::timeout(PATIENCE, answered.recv()).await {
            Ok(Ok(done)) => done,
            _ => Ok(()),
        }
    }

    /// What is promised here, where that is something else than before.
    fn promised(&self, around: &dyn Surroundings) -> Option<Promises> {
        let capacity = around.capacity(&|group| self.has(group));
        self.hosts.borrow_mut().promised(capacity)
    }

    /// What others have promised of a group, as words; empty where nobody has.
    pub fn elsewhere(&self, group: &str) -> String {
        self.hosts.borrow().elsewhere(group)
    }

    /// The host that has taken a disk of this one.
    pub fn moved_to(&self, disk: &str) -> Option<String> {
        self.moved.borrow().get(disk).cloned()
    }

    /// A disk has gone to another host, or is here again.
    pub fn know_moved(&self, disk: &str, to: Option<&str>) {
        let mut moved = self.moved.borrow_mut();
        match to {
            Some(to) => drop(moved.insert(disk.to_owned(), to.to_owned())),
            None => drop(moved.remove(disk)),
        }
    }

    /// A disk that had moved away is here by other means than a move.
    pub fn has_again(&self, disk: &str) {
        if self.moved.borrow_mut().remove(disk).is_some() {
            let step = Step::Own { disk: disk.to_owned() };
            let _ = self.give(Input::Move(Box::new(step), async_channel::bounded(1).0));
        }
    }

    /// Disks of the config file that other hosts have taken.
    pub fn moved(&self) -> BTreeMap<String, String> {
        self.moved.borrow().clone()
    }

    /// Why etcd could not be asked whether disks of the config file are on other hosts.
    pub fn unasked(&self) -> Option<String> {
        Some(self.reason.borrow().clone()).filter(|reason| !reason.is_empty())
    }

    /// It has been started, and etcd has not said yet whether it is in.
    pub fn is_joining(&self) -> bool {
        !self.is_connected.get() && self.reason.borrow().is_empty()
    }

    /// Takes away what a host has left behind that will not come back.
    ///
    /// # Errors
    /// Why it was not done.
    pub async fn forget(&self, host: String) -> Result<Value, String> {
        self.ask(|answer| Input::Forget(host, answer)).await
    }

    /// Name of this host.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// The next disk that another host offers.
    pub async fn next_offer(&self) -> Option<Offered> {
        self.offers.1.recv().await.ok()
    }

    /// What becomes of the offer of this number, while that is held.
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
            // Nobody here knows of it: the offer is of an earlier run, or came too late.
            let step = Step::Withdraw { to: answer.by, disk, number: answer.number };
            let _ = self.input.try_send(Input::Move(Box::new(step), async_channel::bounded(1).0));
        }
    }

    /// One step of a move. None: nobody knows whether it was done.
    pub async fn step(&self, step: Step) -> Option<Outcome> {
        let (answer, answered) = async_channel::bounded(1);
        if let Err(why) = self.give(Input::Move(Box::new(step), answer)) {
            return Some(Outcome::Apart(why.to_owned()));
        }
        reactor::timeout(PATIENCE, answered.recv()).await.ok()?.ok()
    }

    /// Has etcd know of what is promised now, before any later step: less than before.
    pub fn promise(&self, around: &dyn Surroundings) {
        // What finds no room in the queue is told by the next session.
        if let Some(promised) = self.promised(around) {
            let _ = self.input.try_send(Input::Promises(promised));
        }
    }

    /// Hands something to the thread, or says why that cannot be.
    fn give(&self, input: Input) -> Result<(), &'static str> {
        self.input.try_send(input).map_err(|error| match error.is_closed() {
            true => ENDED,
            false => "too much is asked at once (try again)",
        })
    }

    async fn ask(&self, input: impl FnOnce(Sender<Result<Value, String>>) -> Input) -> Result<Value, String> {
        let (answer, answered) = async_channel::bounded(1);
        self.give(input(answer))?;
        match reactor::timeout(PATIENCE, answered.recv()).await {
            Ok(Ok(done)) => done,
            _ => Err("etcd does not answer in time; it may have been done (`weir cluster status` tells)"
                .to_owned()),
        }
    }
}

/// Whoever the daemon goes on as writes there.
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
