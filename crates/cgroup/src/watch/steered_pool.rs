//! Steers one pool of limits: reads its control groups when due, and writes their rates.
//!
//! The share of a control group that was removed, or whose disk was, is divided among the remaining
//! members; an unreadable control group has no burst. Both are retried every second, and each
//! problem is logged once, as is its end. Never applies a limit to a disk that has taken over
//! another's number.

use std::path::PathBuf;

use block::device::{DeviceNumber, SysfsRoots};
use policy::{
    steering::{IoCounters, IoMaxRates, SteeringPool},
    throttle::{AdmissionCounters, Enforcement, Limits},
    time::{Duration, Instant},
    watermark::{GroupConsumption, Watermark},
};

use super::{
    leases::CgroupDemand,
    levels,
    reading::{self, OpenCgroupFiles},
};
use crate::{
    control_group::ControlGroup,
    hierarchy::CgroupHierarchy,
    limit::{limits_file::CgroupEntry, pools::LimitPool, settling, write},
};

/// Retry interval of a member with an error.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);
/// Members due later than this are rounded down to a multiple of [`ROUNDED_TO`].
const ROUNDED_FROM: Duration = Duration::from_millis(500);
const ROUNDED_TO: Duration = Duration::from_millis(100);

/// Log texts: the limits in force for a member with an error, and if the kernel refuses those.
const WITHOUT_BURSTS: &str = "its limits are in force without bursts meanwhile; other members are unaffected";
const AS_BEFORE: &str = "its previous limits, if any, stay in force; other members are unaffected";

#[derive(Debug)]
pub(super) struct SteeredPool {
    pub(super) limit_pool: LimitPool,
    roots: SysfsRoots,
    pool: SteeringPool,
    members: Vec<PoolMember>,
    /// True if a limit is divided, between members or directions: then it matters which of them
    /// wait.
    divided: bool,
    /// Counters of all members at the last reading, and the rate since the one before, for the
    /// watermark.
    last_counters: Option<(Instant, [AdmissionCounters; 2])>,
    rate: Option<GroupConsumption>,
    /// Time at which the next member is due; cached, because every round queries all pools.
    due: Instant,
    /// Earliest possible end of a burst, by the last decision.
    bursts_end: Option<Instant>,
    /// True if an input of the rates has changed since the last decision.
    undecided: bool,
    /// Levels of the buckets when they were last saved.
    saved_levels: [u64; 6],
}

#[derive(Debug)]
struct PoolMember {
    group: ControlGroup,
    device: DeviceNumber,
    entry: CgroupEntry,
    reading: Option<OpenCgroupFiles>,
    /// True if the kernel has accepted a limit.
    in_force: bool,
    due: Option<Instant>,
    /// Error that has been logged.
    error: Option<String>,
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RoundCounts {
    pub(super) reads: usize,
    pub(super) writes: usize,
}

/// True if two enforcements differ too little for a new decision.
fn nearly_same(one: Enforcement, other: Enforcement) -> bool {
    match (one, other) {
        (Enforcement::Scaled(one), Enforcement::Scaled(other)) => {
            let (one, other) = (one.thousandths(), other.thousandths());
            one.abs_diff(other) * 50 < one.max(other)
        }
        _ => one == other,
    }
}

impl SteeredPool {
    pub(super) fn new(
        hierarchy: &CgroupHierarchy,
        sharing: &LimitPool,
        saved: Option<&levels::SavedBursts>,
        now: Instant,
    ) -> anyhow::Result<Self> {
        let mut members = Vec::new();
        for entry in &sharing.members {
            let group = hierarchy.group(&entry.cgroup)?;
            members.push(PoolMember {
                group,
                device: entry.device()?,
                entry: entry.clone(),
                reading: None,
                in_force: false,
                due: Some(now),
                error: None,
            });
        }
        let pool = match saved {
            None => sharing.pool(now),
            Some(saved) => {
                // I/O since the levels were saved is charged to them afterwards.
                let mut pool = sharing.pool(saved.at());
                let saved_counters: Vec<_> = sharing
                    .members
                    .iter()
                    .map(|entry| saved.passed(&entry.cgroup, entry.device().ok()?))
                    .collect();
                pool.resume(saved.at(), saved.levels, &saved_counters);
                pool
            }
        };
        let divided = sharing.limits_are_divided();
        Ok(Self {
            limit_pool: sharing.clone(),
            roots: hierarchy.roots.device_roots(),
            pool,
            members,
            divided,
            last_counters: None,
            rate: None,
            due: now,
            bursts_end: None,
            undecided: true,
            saved_levels: [0; 6],
        })
    }

    pub(super) fn members(&self) -> impl Iterator<Item = (&ControlGroup, DeviceNumber)> {
        self.members.iter().map(|member| (&member.group, member.device))
    }

    /// Devices of all members, with repetitions.
    pub(super) fn devices(&self) -> impl Iterator<Item = DeviceNumber> {
        self.members.iter().map(|member| member.device)
    }

    /// Due time: immediately after a change; [`Instant::MAX`] if never.
    pub(super) fn due(&self) -> Instant {
        if self.undecided { Instant::ZERO } else { self.due }
    }

    pub(super) fn is_urgent(&self, now: Instant) -> bool {
        self.undecided || self.is_burst_over(now)
    }

    fn is_burst_over(&self, now: Instant) -> bool {
        self.bursts_end.is_some_and(|end| end <= now)
    }

    /// True if levels have changed since [`SteeredPool::saved_levels`].
    pub(super) fn has_spent(&self) -> bool {
        self.pool.levels() != self.saved_levels
    }

    pub(super) fn mark_saved(&mut self) {
        self.saved_levels = self.pool.levels();
    }

    pub(super) fn enforcement(&self) -> Enforcement {
        self.pool.enforcement()
    }

    pub(super) fn enforce(&mut self, enforcement: Enforcement, now: Instant, buffer: &mut Vec<u8>) {
        if !nearly_same(self.pool.enforcement(), enforcement) {
            if self.pool.enforcement() == Enforcement::Lifted {
                // I/O up to now must not be charged to limits that are enforced from now on.
                (0..self.members.len()).for_each(|index| self.read_member(index, now, buffer));
            }
            self.pool.enforce(enforcement);
            self.undecided = true;
        }
    }

    /// Replaces the limits, those of a cluster's group.
    pub(super) fn set_limits(&mut self, limits: &Limits, now: Instant) {
        if self.pool.limits() != limits {
            self.pool.set_limits(limits, now);
            self.undecided = true;
        }
    }

    /// True if the kernel has accepted the last decision for every existing control group.
    pub(super) fn is_in_force(&self) -> bool {
        let are_accepted = |(member, of_pool): (&PoolMember, &policy::steering::SteeredMember)| {
            member.in_force || of_pool.rates_set() == Some(IoMaxRates::NONE) || !member.group.exists()
        };
        !self.undecided && self.members.iter().zip(self.pool.members()).all(are_accepted)
    }

    pub(super) fn demand(&self, now: Instant) -> CgroupDemand {
        CgroupDemand { stats: self.pool.stats(), weight: self.pool.weight(now) }
    }

    /// Makes all members due; those due earlier stay first.
    pub(super) fn make_all_due(&mut self, now: Instant) {
        let earliest = |due: Option<Instant>| Some(due.map_or(now, |due| due.min(now)));
        self.members.iter_mut().for_each(|member| member.due = earliest(member.due));
        self.due = self.due.min(now);
    }

    /// Reads up to `max_reads` due members, or all if a burst may be over, and writes changed
    /// rates.
    pub(super) fn round(&mut self, now: Instant, max_reads: usize, buffer: &mut Vec<u8>) -> RoundCounts {
        let mut round = RoundCounts::default();
        // The end of a burst must not wait for the next round.
        let max_reads = if self.is_burst_over(now) { usize::MAX } else { max_reads };
        let due =
            |(index, member): (usize, &PoolMember)| Some((member.due.filter(|due| *due <= now)?, index));
        let mut order: Vec<(Instant, usize)> = self.members.iter().enumerate().filter_map(due).collect();
        // The longest overdue first, or members at the end of a long list would starve.
        order.sort_unstable();
        for (_, index) in order.into_iter().take(max_reads) {
            self.read_member(index, now, buffer);
            self.members[index].due = None;
            round.reads += 1;
        }
        if round.reads == 0 && !self.undecided {
            return round;
        }
        if round.reads > 0 {
            self.update_rate(now);
        }
        self.undecided = false;
        // Decide once for all members that were read: each level affects all rates.
        for (index, rates) in self.pool.decide(now) {
            if self.members[index].reading.is_none() {
                self.pool.retry_setting(index);
                continue;
            }
            round.writes += usize::from(self.write_rates(index, rates, now));
        }
        self.bursts_end = self.pool.bursts_end(now);
        for index in 0..self.members.len() {
            // Members beyond `max_reads` stay due.
            if self.members[index].due.is_none_or(|due| due > now) {
                self.members[index].due = self.next_look(index, now);
            }
        }
        // Cached for `due`.
        self.due = self.members.iter().filter_map(|member| member.due).min().unwrap_or(Instant::MAX);
        round
    }

    fn next_look(&self, index: usize, now: Instant) -> Option<Instant> {
        if self.members[index].reading.is_none() || self.members[index].error.is_some() {
            return Some(now + RETRY_INTERVAL);
        }
        let due = match self.limit_pool.watermark {
            // The cluster needs the demand of its groups even if no limit could be exceeded.
            Watermark::ALWAYS if !self.limit_pool.cluster => self.pool.next_measurement(index, now)?,
            _ => self.pool.next_measurement_of_any(index, now),
        };
        // Idle members are read together: separate wake-ups for a thousand of them would double the
        // cost.
        if due.nanos_since(now) < ROUNDED_FROM.as_nanos() as u64 {
            return Some(due);
        }
        Some(Instant::from_nanos(due.as_nanos() - due.as_nanos() % ROUNDED_TO.as_nanos() as u64))
    }

    fn read_member(&mut self, index: usize, now: Instant, buffer: &mut Vec<u8>) {
        let member = &mut self.members[index];
        if member.reading.is_none()
            && let Err(error) = settling::verify_disk(&member.group, &member.entry, &self.roots)
        {
            member.in_force = false;
            self.pool.set_absent(index);
            self.log_error(index, &error, "other members are unaffected");
            self.undecided = true;
            return;
        }
        let (device, was_open) = (member.device, member.reading.is_some());
        let mut seen = self.read(index, buffer);
        if was_open && seen.as_ref().is_err_and(reading::is_removed) {
            // A cgroup recreated with this name has lost its limits.
            self.members[index].reading = None;
            self.pool.retry_setting(index);
            seen = self.read(index, buffer);
        }
        let member = &mut self.members[index];
        match seen {
            Ok((counters, waited)) => {
                self.pool.observe(index, now, counters, waited);
                if member.error.is_some() {
                    self.pool.retry_setting(index);
                }
            }
            Err(mut error) => {
                member.reading = None;
                let mut consequence = WITHOUT_BURSTS;
                if member.group.exists() {
                    // Unknown use: no burst may be granted.
                    self.pool.set_unmeasurable(index);
                    let settled = self.pool.rates_without_steering()[index];
                    let write_result = settling::write_if_different(&member.group, device, settled);
                    member.in_force = write_result.is_ok();
                    if let Err(refused) = write_result {
                        error = error.context(format!("{refused:#}"));
                        consequence = AS_BEFORE;
                    }
                } else {
                    self.pool.set_absent(index);
                }
                self.log_error(index, &error, consequence);
                self.undecided = true;
            }
        }
    }

    fn read(&mut self, index: usize, buffer: &mut Vec<u8>) -> anyhow::Result<(IoCounters, Option<bool>)> {
        let member = &mut self.members[index];
        let reading = match &mut member.reading {
            Some(reading) => reading,
            none => {
                // The controller may be missing after a reboot, or if the parent was recreated.
                if member.group.exists() {
                    settling::enable_controllers(&member.group)?;
                }
                none.insert(OpenCgroupFiles::open(&member.group, self.divided)?)
            }
        };
        reading.read(member.device, buffer)
    }

    /// Writes decided rates; returns true on success.
    fn write_rates(&mut self, index: usize, rates: IoMaxRates, now: Instant) -> bool {
        let member = &mut self.members[index];
        // Limits vanish with their disk: without one in force, the number may belong to another
        // disk.
        let kernel_rates = write::read_limits(&member.group, member.device).ok();
        let lost = member.in_force && kernel_rates == Some(IoMaxRates::NONE);
        let disk = if lost { member.entry.disk(&self.roots).map(drop) } else { Ok(()) };
        match disk
            .and_then(|()| settling::write_unless_equal(&member.group, member.device, kernel_rates, rates))
        {
            Ok(()) => {
                member.in_force = rates != IoMaxRates::NONE;
                let cgroup = member.group.name.display();
                tracing::debug!(
                    %cgroup,
                    device = %member.device,
                    bps = ?rates.bps,
                    iops = ?rates.iops,
                    after_us = super::now().nanos_since(now) / 1000,
                    "rates written"
                );
                if member.reading.is_some() && member.error.take().is_some() {
                    tracing::info!(%cgroup, "exists again");
                }
                true
            }
            Err(error) => {
                self.pool.retry_setting(index);
                // Its disk may have been removed: checked again at the next reading.
                (self.members[index].reading, self.members[index].in_force) = (None, false);
                self.log_error(index, &error, AS_BEFORE);
                false
            }
        }
    }

    /// Restores limits that another program has overwritten.
    pub(super) fn verify(&mut self) {
        for index in 0..self.members.len() {
            let member = &self.members[index];
            let expected = self.pool.members()[index].rates_set();
            let Some(expected) = expected.filter(|_| member.error.is_none()) else { continue };
            if write::read_limits(&member.group, member.device)
                .is_ok_and(|kernel_rates| kernel_rates != write::as_printed_by_kernel(expected))
            {
                tracing::info!(
                    cgroup = %member.group.name.display(), device = %member.device,
                    "another program has changed its limits; they are written again"
                );
                self.pool.retry_setting(index);
                // Limits vanish with their disk: verify the disk at the next reading.
                self.members[index].reading = None;
                self.members[index].due = Some(Instant::ZERO);
                self.undecided = true;
            }
        }
    }

    fn log_error(&mut self, index: usize, error: &anyhow::Error, consequence: &str) {
        let member = &mut self.members[index];
        let is_removed = !member.group.exists();
        let message = if is_removed { "it was removed".to_owned() } else { format!("{error:#}") };
        if member.error.as_ref() != Some(&message) {
            let cgroup = member.group.name.display();
            if is_removed {
                tracing::info!(
                    %cgroup,
                    "was removed; its limits are kept for a new cgroup of this name (remove them \
                     with `weir cgroup limit --remove`)"
                );
            } else {
                tracing::warn!(%cgroup, "{message}; {consequence}");
            }
            member.error = Some(message);
        }
    }

    pub(super) fn consumption(&self) -> Option<GroupConsumption> {
        self.rate
    }

    fn update_rate(&mut self, now: Instant) {
        let counters = *self.pool.passed();
        if let Some((at, before)) = self.last_counters.replace((now, counters)).filter(|(at, _)| *at < now) {
            self.rate = GroupConsumption::since(&before, &counters, now - at, *self.pool.limits());
        }
    }

    /// Levels of the buckets, for the next watch; `None` if all are empty, as initially.
    pub(super) fn saved_bursts(&self, at: Instant) -> Option<levels::SavedBursts> {
        if self.pool.levels() == [0; 6] {
            return None;
        }
        let members = self.members.iter().zip(self.pool.members());
        let counters = members.filter_map(|(controlled, member)| {
            Some((PathBuf::from(&controlled.group.name), controlled.device, member.passed()?))
        });
        Some(levels::SavedBursts::new(at, self.pool.levels(), counters))
    }

    #[cfg(test)]
    pub(super) fn forget_files(&mut self) {
        self.members.iter_mut().for_each(|member| member.reading = None);
    }
}
