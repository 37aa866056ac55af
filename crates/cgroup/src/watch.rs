//! `weir cgroup watch`: extends the kernel's limits by bursts, watermarks, and limits of groups.
//!
//! ```text
//!   /run/weir/cgroups.json ──► pools ──────┐ due: io.stat, io.pressure ──► policy::steering ──► io.max      steered_pool.rs
//!                                          │                                     ▲
//!   /sys/block/*/stat ──► watermark's controller, every 50 ms ── enforcement ────┘                         disks.rs; capacity from `weir probe`
//!
//!   in addition: limits on disks that appear (appearing_disks.rs);
//!                limits that the kernel enforces alone are restored where they are lost (unsteered.rs, recreated.rs, systemd.rs);
//!                levels of bursts are saved for the next watch (levels.rs); a process settles all limits if this one dies (guard.rs)
//! ```
//!
//! One thread and no lock: every file that it reads answers within microseconds. read_budget.rs
//! bounds its CPU time: with thousands of busy control groups, each is read less often. The watch
//! settles all limits before it ends; if the watch is killed, its guard settles them.

mod appearing_disks;
pub(crate) mod arguments;
mod disks;
mod guard;
mod leases;
mod levels;
mod read_budget;
mod reading;
mod recreated;
mod steered_pool;
mod systemd;
mod unsteered;
mod watch_thread;

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    sync::{
        PoisonError,
        mpsc::{self, RecvTimeoutError},
    },
};

use anyhow::{Context as _, anyhow};
use appearing_disks::AppearingDisks;
use block::device::DeviceNumber;
use console::{
    CommandFailure, descriptors, logging,
    signals::{BlockedSignals, SignalRequest},
};
use disks::WatermarkDisks;
use guard::SettlingGuard;
pub(crate) use guard::run as guard;
pub use leases::{CgroupDemand, CgroupLeases, CgroupLessor};
use levels::SavedBursts;
use nix::time::ClockId;
use policy::{
    steering::IoMaxRates,
    throttle::Limits,
    time::{Duration, Instant},
    watermark::{DeviceConsumption, Watermark},
};
use read_budget::{ReadBudget, cpu_now};
use recreated::RecreatedGroups;
use settings::{LogFormat, LogSettings, state::CapacityStore};
use steered_pool::SteeredPool;
use systemd::SystemdUpdates;
use unsteered::UnsteeredPools;
pub use watch_thread::CgroupWatchThread;

use super::{
    control_group::Version,
    hierarchy::{CgroupHierarchy, KernelRoots},
    limit::{
        limits_file::{FileVersion, LimitsFile},
        locks::{self, LockedLimitsFile, WatchLock},
        pools::LimitPool,
        restored, settling,
    },
};
use crate::{cgroup_counters::KnownEnforcement, watch::arguments::WatchArgs};

/// Sampling interval of a device, the same as for weir's own disks.
const SAMPLE_INTERVAL: Duration = Duration::from_millis(50);
/// Minimum interval between rounds, so that members due nearly together share a wake-up.
const MIN_ROUND_INTERVAL: Duration = Duration::from_millis(10);
/// Interval at which the limits file is checked for changes.
const FILE_CHECK_INTERVAL: Duration = Duration::from_millis(100);
/// Interval at which levels are saved and the guard is checked.
const SAVE_INTERVAL: Duration = Duration::from_secs(2);
/// Pools verified at each interval [`SAVE_INTERVAL`]: bounds the load with thousands of pools.
const VERIFIED_POOLS: usize = 64;
/// Interval at which a persistent failure is logged again.
const LOG_INTERVAL: Duration = Duration::from_secs(60);
/// Number of limits for which the default limit on open files suffices.
const FEW_LIMITS: usize = 200;

pub(crate) fn run(arguments: WatchArgs) -> Result<(), CommandFailure> {
    let path = arguments.limits_file.path();
    let hierarchy = CgroupHierarchy::discover(KernelRoots::default())?;
    if arguments.settle {
        // Settling while another process steers would end its bursts.
        let Some(_watched) = WatchLock::take(path)? else {
            return Err(anyhow!(
                "{}: another process watches these limits, and would change them again (end it first)",
                path.display()
            )
            .into());
        };
        let limits_file = LimitsFile::load(path)?;
        let restored_result = restored::restore_weights_and_targets(&hierarchy, &limits_file, |_| true);
        return Ok(settling::settle_latest(&hierarchy, path, &limits_file).and(restored_result)?);
    }
    let filter = arguments.log.unwrap_or_else(|| "info".to_owned());
    logging::start(&LogSettings { filter, format: LogFormat::Text, file: None })?;
    let signals = BlockedSignals::block_for_daemon().context("signals cannot be blocked")?;
    let watch = CgroupWatch::claim(hierarchy, path, CapacityStore::new(arguments.state.as_deref()))?;
    let (stop, stopped) = mpsc::channel();
    let handle_signal = move |request| match request {
        SignalRequest::End(signal) => {
            tracing::info!(signal, "ending");
            stop.send(()).is_ok()
        }
        // Nothing in flight to wait for, so a second signal changes nothing.
        SignalRequest::EndAtOnce(_)
        | SignalRequest::HangUp
        | SignalRequest::ReopenLog
        | SignalRequest::Meaningless(_) => true,
    };
    signals.forward(handle_signal).context("the thread that waits for signals")?;
    tracing::info!(limits = %path.display(), "ready");
    // Fails without a service manager, which is no error.
    let _ = sd_notify::notify(&[sd_notify::NotifyState::Ready]);
    watch.run_until(&stopped)?;
    Ok(())
}

enum WatchEnd {
    Stopped,
    GaveWay,
}

struct CgroupWatch {
    hierarchy: CgroupHierarchy,
    path: PathBuf,
    /// Proof that no other process steers, and the guard that revokes grants; `None` in tests.
    lock_and_guard: Option<(WatchLock, SettlingGuard)>,
    /// True if it ends as soon as another process claims these limits.
    gives_way: bool,
    /// Next time to check the file, to sample the devices, and to save levels.
    file_at: Instant,
    sample_at: Instant,
    save_at: Instant,
    /// Version of the file that was adopted, and of the last one that was rejected with its error.
    file_version: FileVersion,
    rejected: Option<(FileVersion, String)>,
    limits_file: LimitsFile,
    recreated_groups: RecreatedGroups,
    steered_pools: Vec<SteeredPool>,
    /// Index of the next pool to verify.
    verified: usize,
    unsteered: UnsteeredPools,
    systemd: SystemdUpdates,
    disks: WatermarkDisks,
    /// Limits on disks that appear.
    appearing_disks: AppearingDisks,
    buffer: Vec<u8>,
    read_budget: ReadBudget,
    /// Enforcement by watermarks, for metrics.
    known: KnownEnforcement,
    /// Quota leased by the daemon's cluster.
    leases: Option<CgroupLeases>,
    /// Time of the last log message that leasing is suspended.
    last_lease_error: Option<Instant>,
}

impl CgroupWatch {
    fn claim(hierarchy: CgroupHierarchy, path: &Path, store: CapacityStore) -> anyhow::Result<Self> {
        check(&hierarchy)?;
        Self::try_claim(&hierarchy, path, &store)?.ok_or_else(|| {
            anyhow!(
                "{}: another process already watches these limits (`weir cgroup watch` or `weir serve`)",
                path.display()
            )
        })
    }

    /// Returns `None` if another process still steers after a few seconds and does not give way.
    fn try_claim(
        hierarchy: &CgroupHierarchy,
        path: &Path,
        store: &CapacityStore,
    ) -> anyhow::Result<Option<Self>> {
        let Some(watch_lock) = WatchLock::claim(path)? else { return Ok(None) };
        let guard = SettlingGuard::start(path)?;
        Self::start_with(hierarchy.clone(), path, store.clone(), Some((watch_lock, guard))).map(Some)
    }

    /// A watch that gives way; `None` if another process steers or claims these limits.
    fn stand_by(
        hierarchy: &CgroupHierarchy,
        path: &Path,
        store: &CapacityStore,
    ) -> anyhow::Result<Option<Self>> {
        check(hierarchy)?;
        if WatchLock::is_wanted(path) {
            return Ok(None);
        }
        let Some(watch_lock) = WatchLock::take(path)? else { return Ok(None) };
        let guard = SettlingGuard::start(path)?;
        let watch = Self::start_with(hierarchy.clone(), path, store.clone(), Some((watch_lock, guard)))?;
        Ok(Some(Self { gives_way: true, ..watch }))
    }

    /// Starts steering. Without a guard (tests) it must not grant anything that has to be revoked.
    fn start_with(
        hierarchy: CgroupHierarchy,
        path: &Path,
        store: CapacityStore,
        lock_and_guard: Option<(WatchLock, SettlingGuard)>,
    ) -> anyhow::Result<Self> {
        // Before the file is read: a change in between is then seen as a change.
        let stamp = FileVersion::of(path);
        let kept = LimitsFile::load(path)?;
        // Including limits that need no steering: the file may predate the last reboot.
        for result in [
            settling::settle(&hierarchy, &kept),
            restored::restore_weights_and_targets(&hierarchy, &kept, |_| true),
        ] {
            if let Err(error) = result {
                tracing::warn!("{error:#}");
            }
        }
        let now = now();
        let mut watch = Self {
            path: path.to_owned(),
            lock_and_guard,
            gives_way: false,
            file_at: now + FILE_CHECK_INTERVAL,
            sample_at: now,
            save_at: now + SAVE_INTERVAL,
            file_version: stamp,
            rejected: None,
            limits_file: LimitsFile::default(),
            recreated_groups: RecreatedGroups::default(),
            steered_pools: Vec::new(),
            verified: 0,
            unsteered: UnsteeredPools::new(hierarchy.clone()),
            systemd: SystemdUpdates::default(),
            disks: WatermarkDisks::new(store),
            appearing_disks: AppearingDisks::new(),
            buffer: Vec::new(),
            read_budget: ReadBudget::new(now, cpu_now()),
            known: KnownEnforcement::default(),
            leases: None,
            last_lease_error: None,
            hierarchy,
        };
        watch.adopt(kept, &levels::load(path, now), now)?;
        Ok(watch)
    }

    fn run_until(mut self, stopped: &mpsc::Receiver<()>) -> anyhow::Result<WatchEnd> {
        loop {
            let file_at = self.file_at;
            let next = self.run_due(now());
            // Checked as often as the file, not in every turn.
            if self.gives_way && self.file_at != file_at && WatchLock::is_wanted(&self.path) {
                return self.end().map(|()| WatchEnd::GaveWay);
            }
            match stopped.recv_timeout(next - now()) {
                Err(RecvTimeoutError::Timeout) => {}
                Ok(()) | Err(RecvTimeoutError::Disconnected) => {
                    return self.end().map(|()| WatchEnd::Stopped);
                }
            }
        }
    }

    /// Runs all tasks that are due; returns the time of the next one.
    fn run_due(&mut self, now: Instant) -> Instant {
        if now >= self.file_at {
            self.check_file(now, false);
            self.appearing_disks.extend_if_changed(&self.hierarchy, &self.path, &self.limits_file);
            self.file_at = now + FILE_CHECK_INTERVAL;
        }
        if now >= self.sample_at {
            self.sample(now);
            self.sample_at = now + SAMPLE_INTERVAL;
        }
        // Leased quota is put into the pools before the round, and acknowledged after the kernel
        // has it.
        let due_leases = self.apply_leases(now);
        self.round(now);
        self.acknowledge_leases(due_leases, now);
        if now >= self.save_at {
            self.save_and_verify(now);
            self.save_at = now + SAVE_INTERVAL;
        }
        // Sleeps until the earliest of all events.
        let due = self.steered_pools.iter().map(SteeredPool::due).min();
        let next =
            self.file_at.min(self.save_at).min(due.unwrap_or(Instant::MAX).max(now + MIN_ROUND_INTERVAL));
        let next_lease = self.leases.as_ref().and_then(|leases| leases.next(now));
        let next = next_lease.map_or(next, |lease_at| next.min(lease_at));
        if self.disks.is_empty() { next } else { next.min(self.sample_at) }
    }

    /// Begins to enforce quota that a cluster leases.
    ///
    /// # Errors
    /// Fails if a group of this name has local limits, or the guard would end together with the
    /// daemon.
    fn begin_leasing(&mut self, leases: CgroupLeases) -> anyhow::Result<()> {
        guard::check(&self.hierarchy)?;
        // Local limits would be overwritten by the cluster's.
        let has_own_limits =
            |name: &&String| self.limits_file.groups.get(*name).is_some_and(|group| !group.is_of_cluster());
        if let Some(name) = leases.fallback_shares().keys().find(has_own_limits) {
            return Err(anyhow!(
                "{}: group {name} has limits of its own there, and [cluster] names it in \
                 control-groups (give one of them another name)",
                self.path.display()
            ));
        }
        self.leases = Some(leases);
        Ok(())
    }

    /// Puts leased quota into the pools. Returns nothing to acknowledge while the fallback shares
    /// are not in the file, or while the guard is unreachable.
    fn apply_leases(&mut self, now: Instant) -> Vec<leases::DueLimits> {
        let Some(leases) = self.leases.clone() else { return Vec::new() };
        let (mut due, fallback) = (leases.due(now), leases.fallback_shares());
        let published = self.publish_fallback_shares(&fallback, now);
        // The guard must have the deadline before the kernel has the quota.
        let guarded = self.set_guard_deadline(leases.guard_deadline(&due));
        if guarded.is_err() {
            due = CgroupLeases::to_fallback(due, &fallback);
        }
        for due in &due {
            if let Some(pool) = self.steered_pool(&due.group) {
                pool.set_limits(&due.limits, now);
            }
        }
        match guarded.and(published) {
            Ok(is_published) => {
                self.last_lease_error = None;
                // Otherwise retried in the next turn.
                if is_published { due } else { Vec::new() }
            }
            Err(error) => {
                // Rate-limited by time, not by text: it is retried many times a second, and file
                // names in the message differ.
                if self.last_lease_error.is_none_or(|logged_at| now >= logged_at + LOG_INTERVAL) {
                    tracing::error!(
                        "{error:#}; control groups lease no further quota until a retry succeeds"
                    );
                    self.last_lease_error = Some(now);
                }
                Vec::new()
            }
        }
    }

    fn set_guard_deadline(&mut self, revokes_at: Option<Instant>) -> anyhow::Result<()> {
        self.lock_and_guard.as_mut().map_or(Ok(()), |(_, guard)| guard.set_revocation(revokes_at))
    }

    fn steered_pool(&mut self, group: &str) -> Option<&mut SteeredPool> {
        self.steered_pools.iter_mut().find(|pool| {
            pool.limit_pool.cluster && pool.limit_pool.name.strip_prefix("group ") == Some(group)
        })
    }

    /// Writes the fallback shares to the file. Returns true if the file has them, so that the guard
    /// would fall back to them.
    fn publish_fallback_shares(
        &mut self,
        fallback_shares: &BTreeMap<String, Limits>,
        now: Instant,
    ) -> anyhow::Result<bool> {
        let mut limits_file = self.limits_file.clone();
        limits_file.replace_cluster_groups(fallback_shares);
        if limits_file == self.limits_file {
            return Ok(true);
        }
        let Some(mut locked) = LockedLimitsFile::try_open(&self.path)? else { return Ok(false) };
        locked.limits_file.replace_cluster_groups(fallback_shares);
        locked.save()?;
        drop(locked);
        // Adopted at once: `check_file` would treat this change as one by another process.
        self.load_changed_file(FileVersion::of(&self.path), now)?;
        Ok(true)
    }

    fn acknowledge_leases(&mut self, due_leases: Vec<leases::DueLimits>, now: Instant) {
        let Some(leases) = self.leases.clone() else { return };
        for due in due_leases {
            let pool = self.steered_pool(&due.group);
            let is_in_force = pool.as_ref().is_none_or(|pool| pool.is_in_force());
            let demand = pool.map(|pool| pool.demand(now));
            leases.acknowledge(&due, is_in_force, demand);
        }
    }

    fn end(mut self) -> anyhow::Result<()> {
        // Reads the last change of the file and the last counters.
        self.check_file(now(), true);
        self.round(now());
        self.save_and_verify(now());
        // Closes their files: settling needs some descriptors.
        self.steered_pools.clear();
        // On failure the guard stays and tries as well.
        settling::settle_latest(&self.hierarchy, &self.path, &self.limits_file)?;
        if let Some((_watched, guard)) = self.lock_and_guard {
            guard.dismiss();
        }
        Ok(())
    }

    /// Adopts a changed file; retries one that was rejected before only with `retry`.
    fn check_file(&mut self, now: Instant, retry: bool) {
        let file_version = FileVersion::of(&self.path);
        let was_refused = self.rejected.as_ref().is_some_and(|(refused, _)| *refused == file_version);
        if file_version == self.file_version || (was_refused && !retry) {
            return;
        }
        match self.load_changed_file(file_version, now) {
            Ok(()) => self.rejected = None,
            Err(error) => {
                let text = format!("{error:#}");
                if self.rejected.as_ref().is_none_or(|(_, logged)| *logged != text) {
                    tracing::error!("{text}; the previous limits stay in force");
                }
                self.rejected = Some((file_version, text));
            }
        }
    }

    fn load_changed_file(&mut self, mut file_version: FileVersion, now: Instant) -> anyhow::Result<()> {
        if file_version == FileVersion::NONE && self.limits_file != LimitsFile::default() {
            let path = self.path.display();
            locks::restore(&self.path, &self.limits_file).with_context(|| format!("{path}: was removed"))?;
            tracing::warn!(
                "{path}: was removed, and is written again (remove limits with `weir cgroup limit --remove`)"
            );
            file_version = FileVersion::of(&self.path);
        }
        let limits_file = LimitsFile::load(&self.path)?;
        let saved = self.saved_levels(now);
        self.adopt(limits_file, &saved, now)?;
        self.file_version = file_version;
        Ok(())
    }

    /// Watches these limits from now on. Unchanged pools continue; changed ones continue from
    /// `saved`.
    fn adopt(
        &mut self,
        limits_file: LimitsFile,
        saved: &BTreeMap<String, SavedBursts>,
        now: Instant,
    ) -> anyhow::Result<()> {
        let all = LimitPool::all(&limits_file)?;
        let configured: HashMap<&str, &LimitPool> =
            all.iter().map(|limit_pool| (limit_pool.name.as_str(), limit_pool)).collect();
        let current: HashMap<&str, &LimitPool> =
            self.steered_pools.iter().map(|pool| (pool.limit_pool.name.as_str(), &pool.limit_pool)).collect();
        let mut fresh = HashMap::new();
        for limit_pool in all.iter().filter(|sharing| sharing.needs_watch()) {
            if current.get(limit_pool.name.as_str()) != Some(&limit_pool) {
                let pool = SteeredPool::new(&self.hierarchy, limit_pool, saved.get(&limit_pool.name), now)?;
                fresh.insert(limit_pool.name.clone(), pool);
            }
        }
        // All fresh pools exist: an error above left the old pools in force.
        let (same, replaced): (Vec<_>, Vec<_>) = std::mem::take(&mut self.steered_pools)
            .into_iter()
            .partition(|pool| configured.get(pool.limit_pool.name.as_str()) == Some(&&pool.limit_pool));
        self.steered_pools = same;
        self.steered_pools.extend(fresh.into_values());
        self.revoke_grants(&replaced, &limits_file);
        let restored = self.unsteered.adopt(all);
        self.systemd.add(restored);
        self.disks.adopt(&self.hierarchy, &limits_file)?;
        if limits_file.limits.len() > FEW_LIMITS {
            // Only if needed: a command started by this process would inherit the limit.
            descriptors::raise_limit();
        }
        let unknown = self.recreated_groups.adopt(&self.hierarchy, &limits_file);
        self.systemd.add(unknown);
        self.limits_file = limits_file;
        tracing::info!(
            pools = self.steered_pools.len(),
            devices = self.disks.len(),
            "limits of control groups are watched"
        );
        Ok(())
    }

    /// Revokes grants of control groups that are no longer steered; the grants may be newer than
    /// the change of the file.
    fn revoke_grants(&self, replaced: &[SteeredPool], limits_file: &LimitsFile) {
        let settled = settling::settled_rates(&self.hierarchy, limits_file).unwrap_or_default();
        for (group, device) in replaced.iter().flat_map(SteeredPool::members) {
            let is_steered =
                self.steered_pools.iter().any(|pool| pool.members().any(|member| member == (group, device)));
            if is_steered || !group.exists() {
                continue;
            }
            let own_rates = settled.iter().find(|(other, number, _)| other == group && *number == device);
            let rates = own_rates.map_or(IoMaxRates::NONE, |(.., rates)| *rates);
            if let Err(error) = settling::write_if_different(group, device, rates) {
                tracing::warn!("{error:#}");
            }
        }
    }

    fn sample(&mut self, now: Instant) {
        let mut consumed: HashMap<DeviceNumber, DeviceConsumption> = HashMap::new();
        for pool in
            self.steered_pools.iter_mut().filter(|pool| pool.limit_pool.watermark != Watermark::ALWAYS)
        {
            let Some(consumption) = pool.consumption() else { continue };
            let mut added = Vec::new();
            for device in pool.devices() {
                if !added.contains(&device) {
                    consumed.entry(device).or_default().add(&consumption);
                    added.push(device);
                }
            }
        }
        let busy = self.disks.observe(now, &consumed);
        for pool in
            self.steered_pools.iter_mut().filter(|pool| pool.limit_pool.watermark != Watermark::ALWAYS)
        {
            if pool.devices().any(|device| busy.contains(&device)) {
                // Idle members may now use the device: their use must be known once limits are
                // enforced.
                pool.make_all_due(now);
            }
            let enforcement = self.disks.enforcement(pool.devices(), pool.limit_pool.watermark);
            pool.enforce(enforcement, now, &mut self.buffer);
        }
    }

    /// Reads due members within the CPU budget, and writes changed rates.
    fn round(&mut self, now: Instant) {
        let mut allowed = self.read_budget.allowed(now);
        let mut reads = 0;
        let due = |(index, pool): (usize, &SteeredPool)| {
            let key = if pool.is_urgent(now) { Instant::ZERO } else { pool.due() };
            (pool.due() <= now).then_some((key, index))
        };
        let mut order: Vec<(Instant, usize)> =
            self.steered_pools.iter().enumerate().filter_map(due).collect();
        let urgent = order.iter().filter(|(key, _)| *key == Instant::ZERO).count();
        // The longest overdue come first. Only as many as the budget allows are sorted: with a
        // thousand always due, sorting all would cost more than reading them.
        if order.len() > allowed + urgent {
            order.select_nth_unstable(allowed + urgent);
            order.truncate(allowed + urgent);
        }
        order.sort_unstable();
        for (_, index) in order {
            let round = self.steered_pools[index].round(now, allowed, &mut self.buffer);
            allowed = allowed.saturating_sub(round.reads);
            reads += round.reads;
        }
        self.read_budget.charge(cpu_now(), reads);
    }

    fn saved_levels(&self, now: Instant) -> BTreeMap<String, SavedBursts> {
        let saved = |pool: &'_ SteeredPool| Some((pool.limit_pool.name.clone(), pool.saved_bursts(now)?));
        self.steered_pools.iter().filter_map(saved).collect()
    }

    /// Publishes the enforcement of limits with a watermark.
    fn publish_enforcement(&self) {
        let with_watermark =
            self.steered_pools.iter().filter(|pool| pool.limit_pool.watermark != Watermark::ALWAYS);
        let enforcements = with_watermark.flat_map(|pool| {
            let enforcement = pool.enforcement();
            pool.members().map(move |(group, device)| ((group.name.clone(), device), enforcement))
        });
        *self.known.lock().unwrap_or_else(PoisonError::into_inner) = enforcements.collect();
    }

    fn save_and_verify(&mut self, now: Instant) {
        let save_result = if self.steered_pools.iter().any(SteeredPool::has_spent) {
            levels::save(&self.path, &self.saved_levels(now))
        } else {
            Ok(())
        };
        let guarded = self.lock_and_guard.as_mut().map_or(Ok(()), |(_, guard)| guard.heartbeat());
        for result in [save_result, guarded] {
            if let Err(error) = result {
                tracing::warn!("{error:#}");
            }
        }
        self.steered_pools.iter_mut().for_each(SteeredPool::mark_saved);
        self.publish_enforcement();
        for index in round_robin(&mut self.verified, self.steered_pools.len(), VERIFIED_POOLS) {
            self.steered_pools[index].verify();
        }
        self.disks.retry_missing(&self.hierarchy, &self.limits_file);
        // First: a limit that was just removed must not be restored below.
        self.check_file(now, true);
        let new = self.recreated_groups.new_groups(&self.hierarchy);
        let restored = self.unsteered.verify(&new);
        if let Err(error) =
            restored::restore_weights_and_targets(&self.hierarchy, &self.limits_file, |cgroup| {
                new.contains(cgroup)
            })
        {
            tracing::warn!("{error:#}");
        }
        self.systemd.add(restored);
        self.systemd.add(new);
        self.systemd.start_update(&self.hierarchy, &self.path, &self.limits_file);
    }
}

/// Succeeds if limits of control groups can be watched on this machine.
///
/// # Errors
/// Returns the reason why they cannot.
pub fn check_machine() -> anyhow::Result<()> {
    check(&CgroupHierarchy::discover(KernelRoots::default())?)
}

fn check(hierarchy: &CgroupHierarchy) -> anyhow::Result<()> {
    if hierarchy.version() != Some(Version::V2) {
        return Err(anyhow!(
            "bursts, watermarks and groups of control groups need cgroup v2 with its io \
             controller, and there is none here (rates alone work with v1: `weir cgroup limit`)"
        ));
    }
    Ok(())
}

/// The next `at_a_time` indices in round-robin order.
fn round_robin(next: &mut usize, all: usize, at_a_time: usize) -> impl Iterator<Item = usize> + use<> {
    let first = if *next < all { *next } else { 0 };
    let many = all.min(at_a_time);
    *next = first + many;
    (first..first + many).map(move |index| index % all)
}

/// Time since boot, including suspend: saved levels outlive the process.
pub fn now() -> Instant {
    Instant::from_nanos(read_budget::clock(ClockId::CLOCK_BOOTTIME).as_nanos() as u64)
}

#[cfg(test)]
mod tests;
