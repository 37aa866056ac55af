//! `weir cgroup watch`: runs what the kernel's limits cannot do: bursts, watermarks, limits of
//! groups.
//!
//! ```text
//!   /run/weir/cgroups.json ──► pools ──────┐ due: io.stat, io.pressure ──► policy::steering ──► io.max      steered.rs
//!                                          │                                     ▲
//!   /sys/block/*/stat ──► watermark's controller, every 50 ms ── enforcement ────┘                         disks.rs; capacity by `weir probe`
//!
//!   beside it: what the kernel keeps by itself is told again where it is lost (unsteered.rs, present.rs), to systemd too (systemd.rs);
//!              what is left of bursts, for the next watch (levels.rs); a process that settles all if this one dies (guard.rs)
//! ```
//!
//! One thread and no lock: every file it reads answers within microseconds. pace.rs bounds its
//! processor time: many thousands of busy control groups are looked at less often. It settles all
//! limits at its end; if it is killed, the guard does.

pub(crate) mod arguments;
mod disks;
mod guard;
mod lending;
mod levels;
mod pace;
mod present;
mod reading;
mod running;
mod steered;
mod systemd;
mod unsteered;

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::{
        PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
};

use anyhow::{Context as _, anyhow};
use block::device::Number;
use console::{
    Failure, descriptors, logging,
    signals::{Request, Signals},
};
use disks::Disks;
use guard::Guard;
pub(crate) use guard::run as guard;
pub use lending::{Doing, Lender, Lending};
use levels::Left;
use nix::time::ClockId;
use pace::{Pace, cpu_now};
use policy::{
    steering::Rates,
    throttle::Limits,
    time::{Duration, Instant},
    watermark::{Consumed, Watermark},
};
use present::Present;
pub use running::Running;
use settings::{LogFormat, LogSettings, state::Store};
use steered::Steered;
use systemd::Systemd;
use unsteered::Unsteered;

use super::{
    control_group::Version,
    hierarchy::{Hierarchy, Roots},
    limit::{
        kept::{Kept, Stamp},
        locks::{self, Locked, Watched},
        pools::Sharing,
        settling, weight,
    },
};
use crate::{figures::Known, watch::arguments::WatchArgs};

/// Between two samples of a device, as for weir's own disks.
const SAMPLE: Duration = Duration::from_millis(50);
/// Least time between rounds: members that are due nearly together are looked at together.
const ROUND: Duration = Duration::from_millis(10);
/// How soon a change of the file of limits is seen.
const FILE: Duration = Duration::from_millis(100);
/// How often levels are kept, and the guard is looked after.
const KEEP: Duration = Duration::from_secs(2);
/// Pools verified each time: more would be a load of its own where there are thousands.
const VERIFIED: usize = 64;
/// After which what goes on failing is told again.
const REMINDER: Duration = Duration::from_secs(60);
/// Limits for which the usual number of open files is enough.
const FEW: usize = 200;

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
        let kept = Kept::load(path)?;
        let weighted = weight::tell_again(&hierarchy, &kept, |_| true);
        return Ok(settling::settle_latest(&hierarchy, path, &kept).and(weighted)?);
    }
    let filter = arguments.log.unwrap_or_else(|| "info".to_owned());
    logging::start(&LogSettings { filter, format: LogFormat::Text, file: None })?;
    let signals = Signals::block_for_daemon().context("signals cannot be blocked")?;
    let watch = Watch::claim(hierarchy, path, Store::new(arguments.state.as_deref()))?;
    let (stop, stopped) = mpsc::channel();
    let hear = move |request| match request {
        Request::End(signal) => {
            tracing::info!(signal, "ending");
            stop.send(()).is_ok()
        }
        // At the end there is nothing to wait for.
        Request::EndAtOnce(_) | Request::HangUp | Request::ReopenLog | Request::Meaningless(_) => true,
    };
    signals.forward(hear).context("the thread that waits for signals")?;
    tracing::info!(limits = %path.display(), "ready");
    // Where there is no service manager, nobody needs to know.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    watch.until(&stopped)?;
    Ok(())
}

enum Ended {
    AsAsked,
    MadeWay,
}

struct Watch {
    hierarchy: Hierarchy,
    path: PathBuf,
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
    present: Present,
    steered: Vec<Steered>,
    /// The next pool to be verified.
    verified: usize,
    unsteered: Unsteered,
    systemd: Systemd,
    disks: Disks,
    buffer: Vec<u8>,
    pace: Pace,
    /// What others are told of watermarks.
    known: Known,
    /// Of the daemon's cluster.
    lending: Option<Lending>,
    /// When it was logged last that nothing more is lent.
    not_lent: Option<Instant>,
}

impl Watch {
    fn claim(hierarchy: Hierarchy, path: &Path, store: Store) -> anyhow::Result<Self> {
        check(&hierarchy)?;
        Self::claim_soon(&hierarchy, path, &store)?.ok_or_else(|| {
            anyhow!(
                "{}: somebody watches these limits already (`weir cgroup watch` or `weir serve`)",
                path.display()
            )
        })
    }

    /// `None` if another still steers after a few seconds, and does not make way.
    fn claim_soon(hierarchy: &Hierarchy, path: &Path, store: &Store) -> anyhow::Result<Option<Self>> {
        let Some(watched) = Watched::claim(path)? else { return Ok(None) };
        let guard = Guard::start(path)?;
        Self::over(hierarchy.clone(), path, store.clone(), Some((watched, guard))).map(Some)
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

    /// Without a guard it must not grant what would have to be taken back.
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
        for result in [settling::settle(&hierarchy, &kept), weight::tell_again(&hierarchy, &kept, |_| true)] {
            if let Err(error) = result {
                tracing::warn!("{error:#}");
            }
        }
        let now = now();
        let mut watch = Self {
            path: path.to_owned(),
            alone,
            makes_way: false,
            file_at: now + FILE,
            sample_at: now,
            keep_at: now + KEEP,
            stamp,
            refused: None,
            kept: Kept::default(),
            present: Present::default(),
            steered: Vec::new(),
            verified: 0,
            unsteered: Unsteered::new(hierarchy.clone()),
            systemd: Systemd::default(),
            disks: Disks::new(store),
            buffer: Vec::new(),
            pace: Pace::new(now, cpu_now()),
            known: Known::default(),
            lending: None,
            not_lent: None,
            hierarchy,
        };
        watch.adopt(kept, &levels::load(path, now), now)?;
        Ok(watch)
    }

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

    /// Does what is due by now; returns when something is next.
    fn turn(&mut self, now: Instant) -> Instant {
        if now >= self.file_at {
            self.look_at_file(now, false);
            self.file_at = now + FILE;
        }
        if now >= self.sample_at {
            self.sample(now);
            self.sample_at = now + SAMPLE;
        }
        let lent = self.lend(now);
        self.round(now);
        self.tell_lenders(lent, now);
        if now >= self.keep_at {
            self.keep(now);
            self.keep_at = now + KEEP;
        }
        let due = self.steered.iter().map(Steered::due).min();
        let next = self.file_at.min(self.keep_at).min(due.unwrap_or(Instant::MAX).max(now + ROUND));
        let lent = self.lending.as_ref().and_then(|lending| lending.next(now));
        let next = lent.map_or(next, |lent| next.min(lent));
        if self.disks.is_empty() { next } else { next.min(self.sample_at) }
    }

    /// Begins to lend what a cluster lends.
    ///
    /// # Errors
    /// Groups of these names that have limits of their own; a guard that would end with the daemon.
    fn begin_to_lend(&mut self, lending: Lending) -> anyhow::Result<()> {
        guard::check(&self.hierarchy)?;
        let own = |name: &&String| self.kept.groups.get(*name).is_some_and(|group| !group.is_of_cluster());
        if let Some(name) = lending.safe_shares().keys().find(own) {
            return Err(anyhow!(
                "{}: group {name} has limits of its own there, and [cluster] names it in control-groups (give one of them another name)",
                self.path.display()
            ));
        }
        self.lending = Some(lending);
        Ok(())
    }

    /// Puts what is lent into the pools. Empty, as long as the safe shares are not in the file, or
    /// no guard listens.
    fn lend(&mut self, now: Instant) -> Vec<lending::Due> {
        let Some(lending) = self.lending.clone() else { return Vec::new() };
        let (mut due, safe) = (lending.due(now), lending.safe_shares());
        let published = self.publish_safe_shares(&safe, now);
        let guarded = self.tell_guard(lending.guarded_until(&due));
        if guarded.is_err() {
            due = Lending::safe(due, &safe);
        }
        for due in &due {
            if let Some(steered) = self.steered_of(&due.group) {
                steered.put(&due.limits, now);
            }
        }
        match guarded.and(published) {
            Ok(is_published) => {
                self.not_lent = None;
                // Else tried again at the next turn.
                if is_published { due } else { Vec::new() }
            }
            Err(error) => {
                // It is tried again many times a second, and names of files differ each time.
                if self.not_lent.is_none_or(|told| now >= told + REMINDER) {
                    tracing::error!("{error:#}; nothing more is lent to control groups meanwhile");
                    self.not_lent = Some(now);
                }
                Vec::new()
            }
        }
    }

    fn tell_guard(&mut self, takes_back_at: Option<Instant>) -> anyhow::Result<()> {
        self.alone.as_mut().map_or(Ok(()), |(_, guard)| guard.takes_back_at(takes_back_at))
    }

    fn steered_of(&mut self, group: &str) -> Option<&mut Steered> {
        self.steered.iter_mut().find(|steered| {
            steered.sharing.cluster && steered.sharing.name.strip_prefix("group ") == Some(group)
        })
    }

    /// Whether the file has them, so that the guard would fall back to them.
    fn publish_safe_shares(&mut self, safe: &BTreeMap<String, Limits>, now: Instant) -> anyhow::Result<bool> {
        let mut kept = self.kept.clone();
        kept.publish(safe);
        if kept == self.kept {
            return Ok(true);
        }
        let Some(mut locked) = Locked::open_at_once(&self.path)? else { return Ok(false) };
        locked.kept.publish(safe);
        locked.save()?;
        drop(locked);
        self.take_over(Stamp::of(&self.path), now)?;
        Ok(true)
    }

    fn tell_lenders(&mut self, lent: Vec<lending::Due>, now: Instant) {
        let Some(lending) = self.lending.clone() else { return };
        for due in lent {
            let steered = self.steered_of(&due.group);
            let is_in_force = steered.as_ref().is_none_or(|steered| steered.is_in_force());
            let doing = steered.map(|steered| steered.doing(now));
            lending.told(&due, is_in_force, doing);
        }
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

    /// Adopts the file if it has changed; one that was refused before only with `again`.
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

    /// Watches these limits from now on. Unchanged pools go on; changed ones go on from `left`.
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
        let told = self.unsteered.adopt(all);
        self.systemd.is_to_hear_of(told);
        self.disks.adopt(&self.hierarchy, &kept)?;
        if kept.limits.len() > FEW {
            // Only then: a command that is started here would inherit it.
            descriptors::raise_limit();
        }
        let unknown = self.present.adopt(&self.hierarchy, &kept);
        self.systemd.is_to_hear_of(unknown);
        self.kept = kept;
        tracing::info!(
            pools = self.steered.len(),
            devices = self.disks.len(),
            "limits of control groups are watched"
        );
        Ok(())
    }

    /// Takes back grants of those steered no more: they may have come after the file's change.
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
        let busy = self.disks.observe(now, &consumed);
        for steered in
            self.steered.iter_mut().filter(|steered| steered.sharing.watermark != Watermark::ALWAYS)
        {
            if steered.devices().any(|device| busy.contains(&device)) {
                // Idle members may use it now: their use is to be known when limits come to hold.
                steered.look_now(now);
            }
            let says = self.disks.enforcement(steered.devices(), steered.sharing.watermark);
            steered.enforce(says, now, &mut self.buffer);
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
        // Who has waited longest comes first. Only as many as can be looked at are sorted: where a
        // thousand are always due, that would cost more than looking at them.
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

    /// Tells how far limits with a watermark hold.
    fn publish(&self) {
        let watched = self.steered.iter().filter(|steered| steered.sharing.watermark != Watermark::ALWAYS);
        let told = watched.flat_map(|steered| {
            let enforcement = steered.enforcement();
            steered.members().map(move |(group, device)| ((group.name.clone(), device), enforcement))
        });
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = told.collect();
    }

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
        self.publish();
        for index in in_turn(&mut self.verified, self.steered.len(), VERIFIED) {
            self.steered[index].verify();
        }
        self.disks.look_for_missing(&self.hierarchy, &self.kept);
        // What was removed a moment ago is not to be told again.
        self.look_at_file(now, true);
        let new = self.present.new_groups(&self.hierarchy);
        let told = self.unsteered.verify(&new);
        if let Err(error) = weight::tell_again(&self.hierarchy, &self.kept, |cgroup| new.contains(cgroup)) {
            tracing::warn!("{error:#}");
        }
        self.systemd.is_to_hear_of(told);
        self.systemd.is_to_hear_of(new);
        self.systemd.tell(&self.hierarchy, &self.path, &self.kept);
    }
}

/// Whether limits of control groups can be watched on this machine.
///
/// # Errors
/// Why not.
pub fn check_machine() -> anyhow::Result<()> {
    check(&Hierarchy::discover(Roots::default())?)
}

fn check(hierarchy: &Hierarchy) -> anyhow::Result<()> {
    if hierarchy.version() != Some(Version::V2) {
        return Err(anyhow!(
            "bursts, watermarks and groups of control groups need cgroup v2 with its io controller, and there is none \
             here (rates alone work with v1: `weir cgroup limit`)"
        ));
    }
    Ok(())
}

/// The next so many, from where it stopped the last time.
fn in_turn(next: &mut usize, all: usize, at_a_time: usize) -> impl Iterator<Item = usize> + use<> {
    let first = if *next < all { *next } else { 0 };
    let many = all.min(at_a_time);
    *next = first + many;
    (first..first + many).map(move |index| index % all)
}

/// Since the machine started, asleep or not: levels outlive the process.
pub fn now() -> Instant {
    Instant::from_nanos(pace::clock(ClockId::CLOCK_BOOTTIME).as_nanos() as u64)
}

#[cfg(test)]
mod tests;
