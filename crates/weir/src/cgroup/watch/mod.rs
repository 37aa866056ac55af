//! `weir cgroup watch`: runs what the kernel's limits cannot do by themselves: bursts, watermarks, limits of groups.
//!
//! ```text
//!   /run/weir/cgroups.json ──► pools ──────┐ due: io.stat, io.pressure ──► policy::steering ──► io.max      steered.rs
//!                                          │                                     ▲
//!   /sys/block/*/stat ──► watermark's controller, every 50 ms ── enforcement ────┘                         capacity by `weir probe`
//!
//!   beside it: what is left of bursts, for the next watch (levels.rs); a process that settles all if this one dies (guard.rs)
//! ```
//!
//! One thread and no lock: every file it reads answers within microseconds. It looks at what is due and sleeps until the next is; looking
//! costs at most [`SHARE_OF_A_CORE`], so that with many thousands of busy control groups it comes round later rather than take the machine.
//!
//! Never leaves a burst behind: what ends it settles all limits first, and what kills it leaves that to the guard.

mod guard;
mod levels;
mod reading;
mod steered;

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    sync::{
        Arc,
        mpsc::{self, RecvTimeoutError},
    },
    thread,
};

use anyhow::{Context as _, anyhow};
use block::device::{Device, Identity, Number, Observed};
use nix::time::{ClockId, clock_gettime};
use policy::{
    steering::Rates,
    throttle::Enforcement,
    time::{Duration, Instant},
    watermark::{Consumed, Watermark},
};

use super::{
    control_group::ControlGroup,
    hierarchy::{Hierarchy, Roots, Version},
    limit::{
        kept::{Entry, Kept, Stamp},
        locks::{self, Watched},
        pools::Sharing,
        settling,
        tell::{self, Telling},
    },
};
use crate::{
    Failure,
    cli::cgroup::WatchArgs,
    logging,
    plan::{LogFormat, LogSettings},
    probe::Store,
    serve::raise_descriptor_limit,
    signals::{Request, Signals},
};
use guard::Guard;
use levels::Left;
use steered::Steered;

pub(crate) use guard::run as guard;

/// Time between two samples of a device, as for weir's own disks.
const SAMPLE: Duration = Duration::from_millis(50);
/// Rounds are at least so far apart: members that are due nearly together are looked at together.
const ROUND: Duration = Duration::from_millis(10);
/// How soon a change of the file of limits is seen.
const FILE: Duration = Duration::from_millis(100);
/// How often who stands by looks whether a watch has ended.
const STAND_BY: Duration = Duration::from_millis(500);
/// How often levels are kept, and the guard is looked after.
const KEEP: Duration = Duration::from_secs(2);
/// How many pools, and limits that need no watch, are verified each time, and how many control groups are looked for: more would be a load
/// of its own where there are thousands.
const VERIFIED: usize = 64;
const LOOKED_FOR: usize = 1024;
/// Limits for which the files that a process may have open do, in any case.
const FEW: usize = 200;
/// How much of a core looking at control groups may take.
const SHARE_OF_A_CORE: f64 = 0.015;
/// Looks in a round that are always allowed, whatever they cost.
const ALWAYS_ALLOWED: usize = 4;

/// Does what `weir cgroup watch` was asked.
///
/// # Errors
/// If cgroups cannot be limited here, the limits cannot be used, or somebody watches them already.
pub(crate) fn run(arguments: WatchArgs) -> Result<(), Failure> {
    let path = arguments.kept.path();
    let hierarchy = Hierarchy::discover(Roots::default())?;
    if arguments.settle {
        let Some(_watched) = Watched::take(path)? else {
            return Err(anyhow!(
                "{}: somebody watches these limits, and would change them again (end that first)",
                path.display()
            )
            .into());
        };
        return Ok(settling::settle_latest(&hierarchy, path, &Kept::load(path)?)?);
    }
    let filter = arguments.log.unwrap_or_else(|| "info".to_owned());
    logging::start(&LogSettings { filter, format: LogFormat::Text });
    let signals = Signals::block().context("signals cannot be blocked")?;
    let watch = Watch::claim(hierarchy, path, Store::new(arguments.state.as_deref()))?;
    let (stop, stopped) = mpsc::channel();
    let hear = move |request| match request {
        Request::End(signal) => {
            tracing::info!(signal, "ending");
            stop.send(()).is_ok()
        }
        Request::HangUp => true,
    };
    signals.forward(hear).context("the thread that waits for signals")?;
    tracing::info!(limits = %path.display(), "ready");
    // Where there is no service manager, nobody needs to know.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    watch.until(&stopped)?;
    Ok(())
}

/// A watch in a thread of its own; dropping this ends it, with all limits settled.
#[derive(Debug)]
pub(crate) struct Running {
    stop: Option<mpsc::Sender<()>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl Running {
    /// Watches the limits in this file. What devices can do is in the store.
    ///
    /// # Errors
    /// As [`run`].
    pub(crate) fn start(path: &Path, store: Store) -> anyhow::Result<Self> {
        let watch = Watch::claim(Hierarchy::discover(Roots::default())?, path, store)?;
        Self::run(move |stopped| watch.until(stopped).map(drop))
    }

    /// The same for a command that has its limits only as long as it runs: it steers while nobody else does, and makes way for who claims to.
    ///
    /// # Errors
    /// As [`run`], but for who watches them already.
    pub(crate) fn start_or_stand_by(path: &Path, store: Store) -> anyhow::Result<Self> {
        let hierarchy = Hierarchy::discover(Roots::default())?;
        let path = path.to_owned();
        let mut watch = Watch::stand_in(&hierarchy, &path, &store)?;
        let mut said = None;
        Self::run(move |stopped| {
            loop {
                let ended = watch.take().map_or(Ok(Ended::MadeWay), |watch| watch.until(stopped));
                if let Ok(Ended::AsAsked) = ended {
                    return Ok(());
                }
                match stopped.recv_timeout(STAND_BY) {
                    Err(RecvTimeoutError::Timeout) => {}
                    Ok(()) | Err(RecvTimeoutError::Disconnected) => return ended.map(drop),
                }
                let next = ended.and_then(|_| Watch::stand_in(&hierarchy, &path, &store));
                watch = next.unwrap_or_else(|error| {
                    let text = format!("limits of control groups: {error:#}");
                    if said.replace(text.clone()).as_ref() != Some(&text) {
                        tracing::error!("{text}");
                    }
                    None
                });
            }
        })
    }

    fn run(
        watch: impl FnOnce(&mpsc::Receiver<()>) -> anyhow::Result<()> + Send + 'static,
    ) -> anyhow::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let body = move || {
            if let Err(error) = watch(&stopped) {
                tracing::error!("limits of control groups: {error:#}");
            }
        };
        let thread = thread::Builder::new().name("cgroups".to_owned()).spawn(body);
        let thread = thread.context("the thread that watches control groups")?;
        Ok(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It has said what went wrong; if it could not settle, the guard has.
            let _ = thread.join();
        }
    }
}

/// Why a watch ended.
enum Ended {
    AsAsked,
    MadeWay,
}

/// All that is watched.
struct Watch {
    hierarchy: Hierarchy,
    path: PathBuf,
    store: Store,
    /// That nobody else steers, and who takes back what this one grants; `None` in tests.
    alone: Option<(Watched, Guard)>,
    /// Whether it ends for who claims these limits.
    makes_way: bool,
    /// When the file, the devices, and what is to be kept are looked at next.
    file_at: Instant,
    sample_at: Instant,
    keep_at: Instant,
    /// Of the file that was adopted, and of the last that could not be.
    stamp: Stamp,
    refused: Option<(Stamp, String)>,
    kept: Kept,
    /// Which directory each control group of those kept was, to tell one that was made again.
    present: Vec<Option<u64>>,
    /// Whose turn it is to be looked for there, and to have its limits verified.
    looked_for: usize,
    verified: usize,
    held: usize,
    steered: Vec<Steered>,
    /// Those that the kernel keeps by itself.
    unsteered: Vec<Sharing>,
    /// What was said of those, by their names: once each.
    said: HashMap<String, Vec<String>>,
    /// Control groups of which systemd has perhaps not heard, and who tells it: it may take its time.
    unheard: HashSet<PathBuf>,
    teller: Option<thread::JoinHandle<HashSet<PathBuf>>>,
    /// A device could not be looked at, and is tried again.
    device_is_missing: bool,
    devices: HashMap<Number, Observed>,
    /// Where files are read into.
    buffer: Vec<u8>,
    pace: Pace,
}

impl Watch {
    /// One that steers for as long as it is wanted.
    fn claim(hierarchy: Hierarchy, path: &Path, store: Store) -> anyhow::Result<Self> {
        check(&hierarchy)?;
        let watched = Watched::claim(path)?.ok_or_else(|| {
            anyhow!(
                "{}: somebody watches these limits already (`weir cgroup watch` or `weir serve`)",
                path.display()
            )
        })?;
        let guard = Guard::start(path)?;
        Self::over(hierarchy, path, store, Some((watched, guard)))
    }

    /// One that makes way; none, where somebody else steers, or claims to.
    fn stand_in(hierarchy: &Hierarchy, path: &Path, store: &Store) -> anyhow::Result<Option<Self>> {
        check(hierarchy)?;
        if Watched::is_wanted(path) {
            return Ok(None);
        }
        let Some(watched) = Watched::take(path)? else { return Ok(None) };
        let guard = Guard::start(path)?;
        let watch = Self::over(hierarchy.clone(), path, store.clone(), Some((watched, guard)))?;
        Ok(Some(Self { makes_way: true, ..watch }))
    }

    /// One of what is kept; whoever has no guard must not grant what would have to be taken back.
    fn over(
        hierarchy: Hierarchy,
        path: &Path,
        store: Store,
        alone: Option<(Watched, Guard)>,
    ) -> anyhow::Result<Self> {
        // Before it is read: what changes in between is seen as a change.
        let stamp = Stamp::of(path);
        let kept = Kept::load(path)?;
        // Also those that need no steering: the file may be of before the machine started.
        if let Err(error) = settling::settle(&hierarchy, &kept) {
            tracing::warn!("{error:#}");
        }
        let now = now();
        let mut watch = Self {
            hierarchy,
            path: path.to_owned(),
            store,
            alone,
            makes_way: false,
            file_at: now + FILE,
            sample_at: now,
            keep_at: now + KEEP,
            stamp,
            refused: None,
            kept: Kept::default(),
            present: Vec::new(),
            looked_for: 0,
            verified: 0,
            held: 0,
            steered: Vec::new(),
            unsteered: Vec::new(),
            said: HashMap::new(),
            unheard: HashSet::new(),
            teller: None,
            device_is_missing: false,
            devices: HashMap::new(),
            buffer: Vec::new(),
            pace: Pace::new(now, cpu_now()),
        };
        watch.adopt(kept, &levels::load(path, now), now)?;
        Ok(watch)
    }

    /// Steers until somebody says so, nobody can any more, or another is to.
    fn until(mut self, stopped: &mpsc::Receiver<()>) -> anyhow::Result<Ended> {
        loop {
            let file_at = self.file_at;
            let next = self.turn(now());
            if self.makes_way && self.file_at != file_at && Watched::is_wanted(&self.path) {
                return self.end().map(|()| Ended::MadeWay);
            }
            match stopped.recv_timeout(next - now()) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return self.end().map(|()| Ended::AsAsked),
            }
        }
    }

    /// Does what is due by now, and says when something is next.
    fn turn(&mut self, now: Instant) -> Instant {
        if now >= self.file_at {
            self.look_at_file(now, false);
            self.file_at = now + FILE;
        }
        if now >= self.sample_at {
            self.sample(now);
            self.sample_at = now + SAMPLE;
        }
        self.round(now);
        if now >= self.keep_at {
            self.keep(now);
            self.keep_at = now + KEEP;
        }
        let due = self.steered.iter().map(Steered::due).min();
        let next = self.file_at.min(self.keep_at).min(due.unwrap_or(Instant::MAX).max(now + ROUND));
        if self.devices.is_empty() { next } else { next.min(self.sample_at) }
    }

    fn end(mut self) -> anyhow::Result<()> {
        self.look_at_file(now(), true);
        self.round(now());
        self.keep(now());
        // Their files are closed: settling needs some.
        self.steered.clear();
        // If it fails, the guard is not dismissed, and tries as well.
        settling::settle_latest(&self.hierarchy, &self.path, &self.kept)?;
        if let Some((_watched, guard)) = self.alone {
            guard.dismiss();
        }
        Ok(())
    }

    /// Takes over what is kept now, if it has changed; what could not be taken over before only with `again`.
    fn look_at_file(&mut self, now: Instant, again: bool) {
        let stamp = Stamp::of(&self.path);
        let was_refused = self.refused.as_ref().is_some_and(|(refused, _)| *refused == stamp);
        if stamp == self.stamp || (was_refused && !again) {
            return;
        }
        match self.take_over(stamp, now) {
            Ok(()) => self.refused = None,
            Err(error) => {
                let text = format!("{error:#}");
                if self.refused.as_ref().is_none_or(|(_, said)| *said != text) {
                    tracing::error!("{text}; what held before still does");
                }
                self.refused = Some((stamp, text));
            }
        }
    }

    fn take_over(&mut self, mut stamp: Stamp, now: Instant) -> anyhow::Result<()> {
        if stamp == Stamp::NONE && self.kept != Kept::default() {
            let path = self.path.display();
            locks::restore(&self.path, &self.kept).with_context(|| format!("{path}: was removed"))?;
            tracing::warn!(
                "{path}: was removed, and is written again (remove limits with `weir cgroup limit --remove`)"
            );
            stamp = Stamp::of(&self.path);
        }
        let kept = Kept::load(&self.path)?;
        let left = self.left(now);
        self.adopt(kept, &left, now)?;
        self.stamp = stamp;
        Ok(())
    }

    /// Watches these limits from now on. What has not changed goes on; a pool that has, and is left something, from there.
    fn adopt(&mut self, kept: Kept, left: &BTreeMap<String, Left>, now: Instant) -> anyhow::Result<()> {
        let all = Sharing::all(&kept)?;
        let asked: HashMap<&str, &Sharing> =
            all.iter().map(|sharing| (sharing.name.as_str(), sharing)).collect();
        let steered: HashMap<&str, &Sharing> =
            self.steered.iter().map(|steered| (steered.sharing.name.as_str(), &steered.sharing)).collect();
        let mut fresh = HashMap::new();
        for sharing in all.iter().filter(|sharing| sharing.needs_watch()) {
            if steered.get(sharing.name.as_str()) != Some(&sharing) {
                let steered = Steered::new(&self.hierarchy, sharing, left.get(&sharing.name), now)?;
                fresh.insert(sharing.name.clone(), steered);
            }
        }
        let (same, replaced): (Vec<_>, Vec<_>) = std::mem::take(&mut self.steered)
            .into_iter()
            .partition(|steered| asked.get(steered.sharing.name.as_str()) == Some(&&steered.sharing));
        self.steered = same;
        self.steered.extend(fresh.into_values());
        self.leave(&replaced, &kept);
        // Who has a weight alone is nobody's to limit.
        let is_kernels = |sharing: &Sharing| !sharing.needs_watch() && !sharing.limits.is_unlimited();
        let limited = all.iter().filter(|sharing| !sharing.limits.is_unlimited());
        let limited = limited.flat_map(|sharing| &sharing.members);
        let limited = limited.map(|entry| (entry.cgroup.clone(), entry.device_text().to_owned())).collect();
        let before = std::mem::replace(&mut self.unsteered, all.into_iter().filter(is_kernels).collect());
        self.lift(&before, &limited);
        // Who changed the file by hand has told nobody.
        let before: HashMap<&str, &Sharing> =
            before.iter().map(|sharing| (sharing.name.as_str(), sharing)).collect();
        let is_changed = |sharing: &Sharing| before.get(sharing.name.as_str()) != Some(&sharing);
        let changed: Vec<usize> =
            (0..self.unsteered.len()).filter(|index| is_changed(&self.unsteered[*index])).collect();
        changed.into_iter().for_each(|index| self.hold(index));
        self.look_at_devices(&kept, true)?;
        if kept.limits.len() > FEW {
            // Only then: a command that is started here would inherit it.
            raise_descriptor_limit();
        }
        // One that was made again since it was last looked for still is to be found.
        let known: HashMap<&Path, Option<u64>> = self
            .kept
            .limits
            .iter()
            .map(|entry| entry.cgroup.as_path())
            .zip(self.present.iter().copied())
            .collect();
        let present = |entry: &Entry| {
            known
                .get(entry.cgroup.as_path())
                .copied()
                .unwrap_or_else(|| inode(&self.hierarchy, &entry.cgroup))
        };
        let present = kept.limits.iter().map(present).collect();
        let is_new = |entry: &&Entry| !known.contains_key(entry.cgroup.as_path());
        self.unheard.extend(kept.limits.iter().filter(is_new).map(|entry| entry.cgroup.clone()));
        self.present = present;
        self.kept = kept;
        tracing::info!(
            pools = self.steered.len(),
            devices = self.devices.len(),
            "limits of control groups are watched"
        );
        Ok(())
    }

    /// Takes back what was told to those that are limited no more, where that is still what the kernel has: a limit that was removed in the
    /// moment in which it was told anew, or that somebody has taken out of the file.
    fn lift(&self, before: &[Sharing], limited: &HashSet<(PathBuf, String)>) {
        for sharing in before {
            let place = |entry: &Entry| (entry.cgroup.clone(), entry.device_text().to_owned());
            if sharing.members.iter().all(|entry| limited.contains(&place(entry))) {
                continue;
            }
            let held = settling::settled_of(&self.hierarchy, sharing.clone()).unwrap_or_default();
            for (group, device, rates) in held {
                let is_limited = limited.contains(&(group.name.clone(), device.to_string()));
                let is_told = tell::told(&group, device).is_ok_and(|told| told == tell::as_kept(rates));
                if !is_limited
                    && is_told
                    && let Err(error) = tell::tell(&group, device, Rates::NONE)
                {
                    tracing::warn!("{error:#}");
                }
            }
        }
    }

    /// Tells systemd what it has not heard of, in a thread of its own: whoever is told by the kernel's files waits for nobody.
    fn tell_systemd(&mut self) {
        if let Some(teller) = self.teller.take_if(|teller| teller.is_finished()) {
            // A panic there has been printed.
            self.unheard.extend(teller.join().unwrap_or_default());
        }
        if self.unheard.is_empty() || self.teller.is_some() {
            return;
        }
        let (hierarchy, path, kept) = (self.hierarchy.clone(), self.path.clone(), self.kept.clone());
        let unheard = std::mem::take(&mut self.unheard);
        let body = move || {
            let mut still = HashSet::new();
            let unknown = settling::unknown_to_systemd(&hierarchy, &kept, &unheard).unwrap_or_default();
            for Telling { group, .. } in unknown {
                match settling::tell_systemd(&hierarchy, &path, &group) {
                    Ok(true) => {}
                    Ok(false) => drop(still.insert(group.name)),
                    Err(error) => tracing::warn!("{error:#}"),
                }
            }
            still
        };
        self.teller = thread::Builder::new().name("systemd".to_owned()).spawn(body).ok();
    }

    /// Takes back what was granted to those that are steered no more: they may have been told something after the file was changed.
    fn leave(&self, replaced: &[Steered], kept: &Kept) {
        let settled = settling::settled(&self.hierarchy, kept).unwrap_or_default();
        for (group, device) in replaced.iter().flat_map(Steered::members) {
            let steered =
                self.steered.iter().any(|steered| steered.members().any(|member| member == (group, device)));
            if steered || !group.exists() {
                continue;
            }
            let own = settled.iter().find(|(other, number, _)| other == group && *number == device);
            let rates = own.map_or(Rates::NONE, |(.., rates)| *rates);
            if let Err(error) = settling::tell_if_different(group, device, rates) {
                tracing::warn!("{error:#}");
            }
        }
    }

    fn look_at_devices(&mut self, kept: &Kept, say: bool) -> anyhow::Result<()> {
        let mut before = std::mem::take(&mut self.devices);
        self.device_is_missing = false;
        for entry in &kept.limits {
            let number = entry.device()?;
            let looked_at = kept.shared(entry).watermark()? != Watermark::ALWAYS;
            if !looked_at || self.devices.contains_key(&number) {
                continue;
            }
            match before.remove(&number).map_or_else(|| self.observed(number), Ok) {
                Ok(observed) => drop(self.devices.insert(number, observed)),
                Err(error) => {
                    self.device_is_missing = true;
                    if say {
                        tracing::warn!(
                            "device {number}: {error:#}; limits with a watermark always hold there meanwhile"
                        );
                    }
                }
            }
        }
        Ok(())
    }

    fn observed(&self, number: Number) -> anyhow::Result<Observed> {
        let identity = Identity::resolve(number, &self.hierarchy.roots.of_devices())?;
        let capacity = self.store.capacity(identity.key());
        let device = Device::physical(identity, capacity)?;
        Ok(Observed::new(Arc::new(device)))
    }

    /// Looks at the devices, and decides how limits with a watermark are applied.
    fn sample(&mut self, now: Instant) {
        let mut consumed: HashMap<Number, Consumed> = HashMap::new();
        for steered in
            self.steered.iter_mut().filter(|steered| steered.sharing.watermark != Watermark::ALWAYS)
        {
            let Some(taken) = steered.taken() else { continue };
            let mut added = Vec::new();
            for device in steered.devices() {
                if !added.contains(&device) {
                    consumed.entry(device).or_default().add(&taken);
                    added.push(device);
                }
            }
        }
        for (number, observed) in &mut self.devices {
            observed.observe(now, consumed.get(number).map_or(0, Consumed::thousandths));
        }
        for steered in
            self.steered.iter_mut().filter(|steered| steered.sharing.watermark != Watermark::ALWAYS)
        {
            let watermark = steered.sharing.watermark;
            let mut of_device =
                |device| self.devices.get_mut(&device).and_then(|observed| observed.enforcement(watermark));
            let says = steered.devices().map(|device| of_device(device).unwrap_or_default());
            let strictest = says.collect::<Vec<_>>().into_iter().reduce(Enforcement::stricter);
            steered.enforce(strictest.unwrap_or_default(), now, &mut self.buffer);
        }
    }

    /// Looks at who is due, as far as that is affordable, and tells what has changed.
    fn round(&mut self, now: Instant) {
        let mut left = self.pace.allowed(now);
        let mut looks = 0;
        let due = |(index, steered): (usize, &Steered)| {
            let key = if steered.is_urgent(now) { Instant::ZERO } else { steered.due() };
            (steered.due() <= now).then_some((key, index))
        };
        let mut order: Vec<(Instant, usize)> = self.steered.iter().enumerate().filter_map(due).collect();
        let urgent = order.iter().filter(|(key, _)| *key == Instant::ZERO).count();
        // Who has waited longest comes first. Only as many as can be looked at are put in order: where a thousand are always due, that would
        // take more than looking at them.
        if order.len() > left + urgent {
            order.select_nth_unstable(left + urgent);
            order.truncate(left + urgent);
        }
        order.sort_unstable();
        for (_, index) in order {
            let round = self.steered[index].round(now, left, &mut self.buffer);
            left = left.saturating_sub(round.looks);
            looks += round.looks;
        }
        self.pace.spent(cpu_now(), looks);
    }

    fn left(&self, now: Instant) -> BTreeMap<String, Left> {
        let left = |steered: &'_ Steered| Some((steered.sharing.name.clone(), steered.left(now)?));
        self.steered.iter().filter_map(left).collect()
    }

    /// Keeps what is left of bursts, and looks after the guard.
    fn keep(&mut self, now: Instant) {
        let kept = if self.steered.iter().any(Steered::has_spent) {
            levels::save(&self.path, &self.left(now))
        } else {
            Ok(())
        };
        let guarded = self.alone.as_mut().map_or(Ok(()), |(_, guard)| guard.look_after());
        for result in [kept, guarded] {
            if let Err(error) = result {
                tracing::warn!("{error:#}");
            }
        }
        self.steered.iter_mut().for_each(Steered::kept);
        for index in in_turn(&mut self.verified, self.steered.len(), VERIFIED) {
            self.steered[index].verify();
        }
        if self.device_is_missing {
            let kept = self.kept.clone();
            let _ = self.look_at_devices(&kept, false);
        }
        // What was removed a moment ago is not to be told again.
        self.look_at_file(now, true);
        let new = self.new_groups();
        let in_turn: Vec<usize> = in_turn(&mut self.held, self.unsteered.len(), VERIFIED).collect();
        let is_new = |sharing: &Sharing| sharing.members.iter().any(|entry| new.contains(&entry.cgroup));
        let due: Vec<usize> = (0..self.unsteered.len())
            .filter(|index| in_turn.contains(index) || is_new(&self.unsteered[*index]))
            .collect();
        due.into_iter().for_each(|index| self.hold(index));
        self.unheard.extend(new);
        self.tell_systemd();
    }

    /// Control groups that were made, or made again under their name, since they were looked for: they have no limits.
    fn new_groups(&mut self) -> HashSet<PathBuf> {
        let mut new = HashSet::new();
        for index in in_turn(&mut self.looked_for, self.kept.limits.len(), LOOKED_FOR) {
            let cgroup = &self.kept.limits[index].cgroup;
            let inode = inode(&self.hierarchy, cgroup);
            if inode.is_some() && inode != self.present[index] {
                new.insert(cgroup.clone());
            }
            self.present[index] = inode;
        }
        new
    }

    /// Tells what the kernel is to keep by itself, if it does not: a control group that was made again has no limits, nor has one whose disk
    /// was away. Of a disk that is not there it is said once.
    fn hold(&mut self, index: usize) {
        let sharing = &self.unsteered[index];
        let roots = self.hierarchy.roots.of_devices();
        let mut wrong = Vec::new();
        for entry in &sharing.members {
            let there = self.hierarchy.group(&entry.cgroup).ok().filter(ControlGroup::exists);
            let disk = there.map_or(Ok(()), |group| settling::same_disk(&group, entry, &roots));
            wrong.extend(disk.err().map(|error| format!("{}: {error:#}", entry.cgroup.display())));
        }
        let held = settling::settled_of(&self.hierarchy, sharing.clone()).unwrap_or_default();
        for (group, device, rates) in held {
            let differs = tell::told(&group, device).is_ok_and(|told| told != tell::as_kept(rates));
            match settling::hold(&group, device, rates) {
                Ok(()) if differs => {
                    self.unheard.insert(group.name.clone());
                    tracing::info!(cgroup = %group.name.display(), %device, "the kernel had other limits; it is told these again");
                }
                Ok(()) => {}
                Err(error) => wrong.push(format!("{error:#}")),
            }
        }
        let name = sharing.name.clone();
        let said = self.said.remove(&name).unwrap_or_default();
        wrong.iter().filter(|text| !said.contains(*text)).for_each(|text| tracing::warn!("{text}"));
        if !wrong.is_empty() {
            self.said.insert(name, wrong);
        }
    }
}

/// Whether there is something that can be steered.
fn check(hierarchy: &Hierarchy) -> anyhow::Result<()> {
    if hierarchy.version() != Some(Version::V2) {
        return Err(anyhow!(
            "bursts, watermarks and groups of control groups need cgroup v2 with its io controller, and there is none \
             here (rates alone work with v1: `weir cgroup limit`)"
        ));
    }
    Ok(())
}

/// The next of so many, from where it stopped the last time.
fn in_turn(next: &mut usize, all: usize, at_a_time: usize) -> impl Iterator<Item = usize> + use<> {
    let first = if *next < all { *next } else { 0 };
    let many = all.min(at_a_time);
    *next = first + many;
    (first..first + many).map(move |index| index % all)
}

/// Which directory a control group is; `None` if there is none.
fn inode(hierarchy: &Hierarchy, cgroup: &Path) -> Option<u64> {
    let group = hierarchy.group(cgroup).ok()?;
    fs::metadata(&group.directory).ok().map(|metadata| metadata.ino())
}

/// How many control groups may be looked at, so that the watch as a whole costs no more than it should.
#[derive(Debug)]
struct Pace {
    last: Instant,
    /// What the thread had used at the last round.
    cpu: Duration,
    /// Seconds of a processor that one look takes, with its part of all else; smoothed.
    look_s: f64,
    /// Looks that may be made.
    saved: f64,
}

impl Pace {
    /// Before anything is known: what a slow machine takes.
    const FIRST_LOOK_S: f64 = 50e-6;
    /// As many as so much of a second's worth may be made at once.
    const MOST_SAVED_S: f64 = 0.2;

    fn new(now: Instant, cpu: Duration) -> Self {
        Self { last: now, cpu, look_s: Self::FIRST_LOOK_S, saved: 0.0 }
    }

    fn allowed(&mut self, now: Instant) -> usize {
        let elapsed_s = now.nanos_since(self.last) as f64 / 1e9;
        self.last = now;
        let affordable = SHARE_OF_A_CORE / self.look_s;
        self.saved = (self.saved + elapsed_s * affordable).min(Self::MOST_SAVED_S * affordable);
        (self.saved as usize).max(ALWAYS_ALLOWED)
    }

    /// So many looks were made, and the thread has used so much ever since.
    fn spent(&mut self, cpu: Duration, looks: usize) {
        if looks > 0 {
            let used = cpu.saturating_sub(self.cpu).as_secs_f64();
            self.cpu = cpu;
            self.look_s += (used / looks as f64 - self.look_s) * 0.05;
            self.look_s = self.look_s.max(1e-7);
        }
        self.saved = (self.saved - looks as f64).max(0.0);
    }
}

/// Since the machine started, asleep or not: levels outlive the process.
fn now() -> Instant {
    Instant::from_nanos(clock(ClockId::CLOCK_BOOTTIME).as_nanos() as u64)
}

fn cpu_now() -> Duration {
    clock(ClockId::CLOCK_THREAD_CPUTIME_ID)
}

fn clock(id: ClockId) -> Duration {
    // Both clocks are always there (clock_gettime(2)).
    clock_gettime(id).map(Duration::from).unwrap_or_default()
}

#[cfg(test)]
mod tests;
