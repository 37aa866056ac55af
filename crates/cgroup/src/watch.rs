//! `weir cgroup watch`: enforces what the kernel's limits cannot express: bursts, watermarks,
//! limits of groups.
//!
//! ```text
//!   /run/weir/cgroups.json ──► pools ──────┐ due: io.stat, io.pressure ──► policy::steering ──► io.max      steered.rs
//!                                          │                                     ▲
//!   /sys/block/*/stat ──► watermark's controller, every 50 ms ── enforcement ────┘                         disks.rs; capacity from `weir probe`
//!
//!   in addition: limits that the kernel enforces alone are restored where they are lost (unsteered.rs, present.rs, systemd.rs);
//!                levels of bursts are saved for the next watch (levels.rs); a process settles all limits if this one dies (guard.rs)
//! ```
//!
//! One thread and no lock: every file that it reads answers within microseconds. pace.rs bounds its
//! CPU time: with thousands of busy control groups, each is read less often. It settles all limits
//! before it ends; if it is killed, the guard does.

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

/// Sampling interval of a device, the same as for weir's own disks.
const SAMPLE: Duration = Duration::from_millis(50);
/// Minimum interval between rounds, so that members due nearly together share a wake-up.
const ROUND: Duration = Duration::from_millis(10);
/// Interval at which the limits file is checked for changes.
const FILE: Duration = Duration::from_millis(100);
/// Interval at which levels are saved and the guard is checked.
const KEEP: Duration = Duration::from_secs(2);
/// Pools verified at each interval [`KEEP`]: bounds the load with thousands of pools.
const VERIFIED: usize = 64;
/// Interval at which a persistent failure is logged again.
const REMINDER: Duration = Duration::from_secs(60);
/// Number of limits for which the default limit on open files suffices.
const FEW: usize = 200;

pub(crate) fn run(arguments: WatchArgs) -> Result<(), Failure> {
    let path = arguments.kept.path();
    let hierarchy = Hierarchy::discover(Roots::default())?;
    if arguments.settle {
        // Settling while another process steers would end its bursts.
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
        // Nothing in flight to wait for, so a second signal changes nothing.
        Request::EndAtOnce(_) | Request::HangUp | Request::ReopenLog | Request::Meaningless(_) => true,
    };
    signals.forward(hear).context("the thread that waits for signals")?;
    tracing::info!(limits = %path.display(), "ready");
    // Fails without a service manager, which is no error.
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
    /// Proof that no other process steers, and the guard that revokes grants; `None` in tests.
    alone: Option<(Watched, Guard)>,
    /// True if it ends as soon as another process claims these limits.
    makes_way: bool,
    /// Next time to check the file, to sample the devices, and to save levels.
    file_at: Instant,
    sample_at: Instant,
    keep_at: Instant,
    /// Version of the file that was adopted, and of the last one that was rejected with its error.
    stamp: Stamp,
    refused: Option<(Stamp, String)>,
    kept: Kept,
    present: Present,
    steered: Vec<Steered>,
    /// Index of the next pool to verify.
    verified: usize,
    unsteered: Unsteered,
    systemd: Systemd,
    disks: Disks,
    buffer: Vec<u8>,
    pace: Pace,
    /// Enforcement by watermarks, for metrics.
    known: Known,
    /// Quota leased by the daemon's cluster.
    lending: Option<Lending>,
    /// Time of the last log message that leasing is suspended.
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

    /// Returns `None` if another process still steers after a few seconds and does not give way.
    fn claim_soon(hierarchy: &Hierarchy, path: &Path, store: &Store) -> anyhow::Result<Option<Self>> {
        let Some(watched) = Watched::claim(path)? else { return Ok(None) };
        let guard = Guard::start(path)?;
        Self::over(hierarchy.clone(), path, store.clone(), Some((watched, guard))).map(Some)
    }

    /// A watch that gives way; `None` if another process steers or claims these limits.
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

    /// Starts steering. Without a guard (tests) it must not grant anything that has to be revoked.
    fn over(
        hierarchy: Hierarchy,
        path: &Path,
        store: Store,
        alone: Option<(Watched, Guard)>,
    ) -> anyhow::Result<Self> {
        // Before the file is read: a change in between is then seen as a change.
        let stamp = Stamp::of(path);
        let kept = Kept::load(path)?;
        // Including limits that need no steering: the file may predate the last reboot.
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
            // Checked as often as the file, not in every turn.
            if self.makes_way && self.file_at != file_at && Watched::is_wanted(&self.path) {
                return self.end().map(|()| Ended::MadeWay);
            }
            match stopped.recv_timeout(next - now()) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => return self.end().map(|()| Ended::AsAsked),
            }
        }
    }

    /// Does everything that is due; returns the time of the next event.
    fn turn(&mut self, now: Instant) -> Instant {
        if now >= self.file_at {
            self.look_at_file(now, false);
            self.file_at = now + FILE;
        }
        if now >= self.sample_at {
            self.sample(now);
            self.sample_at = now + SAMPLE;
        }
        // Leased quota is put into the pools before the round, and acknowledged after the kernel
        // has it.
        let lent = self.lend(now);
        self.round(now);
        self.tell_lenders(lent, now);
        if now >= self.keep_at {
            self.keep(now);
            self.keep_at = now + KEEP;
        }
        // Sleeps until the earliest of all events.
        let due = self.steered.iter().map(Steered::due).min();
        let next = self.file_at.min(self.keep_at).min(due.unwrap_or(Instant::MAX).max(now + ROUND));
        let lent = self.lending.as_ref().and_then(|lending| lending.next(now));
        let next = lent.map_or(next, |lent| next.min(lent));
        if self.disks.is_empty() { next } else { next.min(self.sample_at) }
    }

    /// Begins to enforce quota that a cluster leases.
    ///
    /// # Errors
    /// A group of this name has local limits; the guard would end together with the daemon.
    fn begin_to_lend(&mut self, lending: Lending) -> anyhow::Result<()> {
        guard::check(&self.hierarchy)?;
        // Local limits would be overwritten by the cluster's.
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

    /// Puts leased quota into the pools. Returns nothing to acknowledge while the fallback shares
    /// are not in the file, or while the guard is unreachable.
    fn lend(&mut self, now: Instant) -> Vec<lending::Due> {
        let Some(lending) = self.lending.clone() else { return Vec::new() };
        let (mut due, safe) = (lending.due(now), lending.safe_shares());
        let published = self.publish_safe_shares(&safe, now);
        // The guard must have the deadline before the kernel has the quota.
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
                // Otherwise retried in the next turn.
                if is_published { due } else { Vec::new() }
            }
            Err(error) => {
                // Rate-limited by time, not by text: it is retried many times a second, and file
                // names in the message differ.
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

    /// Writes the fallback shares to the file. Returns true if the file has them, so that the guard
    /// would fall back to them.
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
        // Adopted at once, so that the own change is not taken for one by another process.
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
        // The last change of the file and the last counters are taken into account.
        self.look_at_file(now(), true);
        self.round(now());
        self.keep(now());
        // Closes their files: settling needs some descriptors.
        self.steered.clear();
        // On failure the guard stays and tries as well.
        settling::settle_latest(&self.hierarchy, &self.path, &self.kept)?;
        if let Some((_watched, guard)) = self.alone {
            guard.dismiss();
        }
        Ok(())
    }

    /// Adopts a changed file; retries one that was rejected before only with `again`.
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

    /// Watches these limits from now on. Unchanged pools continue; changed ones continue from
    /// `left`.
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
        // All fresh pools exist: an error above left the old pools in force.
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
            // Only if needed: a command started by this process would inherit the limit.
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

    /// Revokes grants of control groups that are no longer steered; the grants may be newer than
    /// the change of the file.
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
                // Idle members may now use the device: their use must be known once limits are
                // enforced.
                steered.look_now(now);
            }
            let says = self.disks.enforcement(steered.devices(), steered.sharing.watermark);
            steered.enforce(says, now, &mut self.buffer);
        }
    }

    /// Reads due members within the CPU budget, and writes changed rates.
    fn round(&mut self, now: Instant) {
        let mut left = self.pace.allowed(now);
        let mut looks = 0;
        let due = |(index, steered): (usize, &Steered)| {
            let key = if steered.is_urgent(now) { Instant::ZERO } else { steered.due() };
            (steered.due() <= now).then_some((key, index))
        };
        let mut order: Vec<(Instant, usize)> = self.steered.iter().enumerate().filter_map(due).collect();
        let urgent = order.iter().filter(|(key, _)| *key == Instant::ZERO).count();
        // The longest overdue come first. Only as many as the budget allows are sorted: with a
        // thousand always due, sorting all would cost more than reading them.
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

    /// Publishes the enforcement of limits with a watermark.
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
        // First: a limit that was just removed must not be restored below.
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

/// Succeeds if limits of control groups can be watched on this machine.
///
/// # Errors
/// The reason why not.
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

/// The next `at_a_time` indices in round-robin order.
fn in_turn(next: &mut usize, all: usize, at_a_time: usize) -> impl Iterator<Item = usize> + use<> {
    let first = if *next < all { *next } else { 0 };
    let many = all.min(at_a_time);
    *next = first + many;
    (first..first + many).map(move |index| index % all)
}

/// Time since boot, including suspend: saved levels outlive the process.
pub fn now() -> Instant {
    Instant::from_nanos(pace::clock(ClockId::CLOCK_BOOTTIME).as_nanos() as u64)
}

#[cfg(test)]
mod tests;
