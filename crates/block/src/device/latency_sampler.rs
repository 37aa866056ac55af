//! The sampler of latency targets: measures the disks of each device with a target every 50 ms, and
//! sets their caps.
//!
//! ```text
//!   disks ─► latency_members.rs ─► members ─► measurements ─► policy's LatencyController
//!     ▲                                                            │
//!     └───────────── throttle tree ◄───────────── caps ◄───────────┘
//! ```
//!
//! Runs on the reactor that created it. Without targets there is no task, and no disk is measured.
//!
//! Never decides a cap, and leaves none behind: caps are removed with the last target of a device.

use std::{
    cell::RefCell,
    collections::{BTreeMap, BTreeSet, HashMap, HashSet},
    rc::{self, Rc},
    sync::{Arc, Weak},
};

use policy::{
    histogram::LatencyHistogram,
    latency_target::{LatencyController, MemberClass, MemberSample, PercentileTarget, TargetState},
    request::Direction,
    time::{Duration, Instant},
};

use super::latency_members::{CappedNode, LatencyMember, SharedDevice, members_of};
use crate::{
    disk::{Disk, MeasuredRequests, MeterMode},
    layer::throttle::ThrottleGroup,
};
use reactor::{JoinHandle, now, sleep_until, spawn_joinable};

/// Interval between two steps, as [`LatencyController`] requires.
const INTERVAL: Duration = Duration::from_millis(50);
/// Minimum age of the latencies that reports cover; the maximum is twice that.
const RECENT: Duration = Duration::from_secs(10);
/// Time after a stop of a disk in which its requests do not count: those that waited for the end of
/// the stop complete then.
const AFTER_STOP: Duration = Duration::from_secs(1);

/// Samples the devices of disks with a latency target. Dropping it ends the sampling and leaves the
/// last caps in force.
#[derive(Debug, Default)]
pub struct LatencySampler {
    state: Rc<RefCell<LatencySamplerState>>,
    task: RefCell<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct LatencySamplerState {
    disks: BTreeMap<String, (Weak<Disk>, SharedDevice)>,
    /// Names of disks and groups with a target.
    with_target: BTreeSet<String>,
    /// True if disks, groups or settings have changed since the members were determined.
    is_stale: bool,
    devices: BTreeMap<SharedDevice, ControlledDevice>,
}

/// A device with at least one target.
#[derive(Debug, Default)]
struct ControlledDevice {
    controller: LatencyController,
    members: Vec<MeasuredMember>,
}

/// A member and its measurements.
#[derive(Debug)]
struct MeasuredMember {
    member: LatencyMember,
    /// Time of the last step.
    measured_at: Instant,
    /// Time until which the requests of a disk that was stopped do not count.
    stopped_until: Instant,
    measured: MeasuredRequests,
    is_waiting: bool,
    /// Of the last step, by direction.
    latencies: [LatencyHistogram; 2],
    recent: Option<RecentLatencies>,
}

/// The latencies that a target covers: two alternating histograms.
#[derive(Debug)]
struct RecentLatencies {
    newer: LatencyHistogram,
    older: LatencyHistogram,
    newer_since: Instant,
}

/// State of a latency target, for status and events.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TargetReport {
    /// The target.
    pub target: PercentileTarget,
    /// State of its control.
    pub state: TargetState,
    /// The target's percentile of the last 10 to 20 s, in nanoseconds; `None` without requests.
    pub measured_ns: Option<u64>,
}

impl LatencySampler {
    /// Samples these disks from now on, and only these; `groups` are all groups.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn watch(
        &self,
        disks: impl IntoIterator<Item = (Arc<Disk>, SharedDevice)>,
        groups: impl IntoIterator<Item = Arc<ThrottleGroup>>,
    ) {
        {
            let mut state = self.state.borrow_mut();
            state.disks.clear();
            state.with_target.clear();
            disks.into_iter().for_each(|(disk, device)| state.update_disk(&disk, device));
            groups.into_iter().for_each(|group| state.update_group(&group));
        }
        self.run_while_needed();
    }

    /// Adds a disk, or updates its device and its settings.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn update_disk(&self, disk: &Arc<Disk>, device: SharedDevice) {
        self.state.borrow_mut().update_disk(disk, device);
        self.run_while_needed();
    }

    /// Adds a group, or updates its settings.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn update_group(&self, group: &ThrottleGroup) {
        self.state.borrow_mut().update_group(group);
        self.run_while_needed();
    }

    /// Removes the disk or group with this name.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn forget(&self, name: &str) {
        self.state.borrow_mut().forget(name);
        self.run_while_needed();
    }

    /// State of the target of the disk or group with this name; the worst if its disks are on
    /// several devices. `None` if it has no target, or is not sampled yet.
    pub fn report(&self, name: &str) -> Option<TargetReport> {
        self.state.borrow().report(name)
    }

    /// True if a disk or a group has a target.
    pub fn has_targets(&self) -> bool {
        !self.state.borrow().with_target.is_empty()
    }

    fn run_while_needed(&self) {
        let mut task = self.task.borrow_mut();
        let mut state = self.state.borrow_mut();
        if state.with_target.is_empty() {
            // Removes all caps now.
            state.determine_members();
            *task = None;
        } else if task.is_none() {
            *task = Some(spawn_joinable(run(Rc::downgrade(&self.state))));
        }
    }
}

async fn run(state: rc::Weak<RefCell<LatencySamplerState>>) {
    let mut next = now();
    while let Some(state) = state.upgrade() {
        state.borrow_mut().step(now());
        drop(state);
        // Not `next + INTERVAL` alone: after a delay, steps must not pile up.
        next = (next + INTERVAL).max(now() + INTERVAL / 2);
        sleep_until(next).await;
    }
}

impl LatencySamplerState {
    fn update_disk(&mut self, disk: &Arc<Disk>, device: SharedDevice) {
        let name = disk.name().to_string();
        self.set_target(&name, disk.throttle().settings().latency.target.is_some());
        self.disks.insert(name, (Arc::downgrade(disk), device));
    }

    fn update_group(&mut self, group: &ThrottleGroup) {
        self.set_target(group.name(), group.settings().latency.target.is_some());
    }

    fn forget(&mut self, name: &str) {
        self.set_target(name, false);
        self.disks.remove(name);
    }

    fn set_target(&mut self, name: &str, has_target: bool) {
        if !has_target {
            self.with_target.remove(name);
        } else if !self.with_target.contains(name) {
            self.with_target.insert(name.to_owned());
        }
        self.is_stale = true;
    }

    fn step(&mut self, now: Instant) {
        if self.is_stale {
            self.determine_members();
        }
        for device in self.devices.values_mut() {
            device.step(now);
        }
    }

    /// Determines the members of all devices again. Members and controllers that remain keep their
    /// state; caps of others are removed.
    fn determine_members(&mut self) {
        self.is_stale = false;
        let mut before = std::mem::take(&mut self.devices);
        let all_before = || before.values().flat_map(|device| &device.members);
        let nodes: Vec<CappedNode> = all_before().map(|measured| measured.member.node.clone()).collect();
        let disks: Vec<Weak<Disk>> =
            all_before().flat_map(|measured| measured.member.disks.clone()).collect();
        if !self.with_target.is_empty() {
            let placed =
                self.disks.values().filter_map(|(disk, device)| Some((disk.upgrade()?, device.clone())));
            for (device, members) in members_of(placed) {
                let controlled = before.remove(&device).unwrap_or_default().with_members(members);
                self.devices.insert(device, controlled);
            }
        }
        let all_now = || self.devices.values().flat_map(|device| &device.members);
        let remaining: HashSet<usize> = all_now().map(|measured| measured.member.node.address()).collect();
        for node in nodes.iter().filter(|node| !remaining.contains(&node.address())) {
            node.set_cap(None);
        }
        let remaining: HashSet<*const Disk> =
            all_now().flat_map(|measured| measured.member.disks.iter().map(Weak::as_ptr)).collect();
        let removed = disks.iter().filter(|disk| !remaining.contains(&disk.as_ptr()));
        removed.filter_map(Weak::upgrade).for_each(|disk| disk.latency_meter().set_mode(MeterMode::Off));
    }

    fn report(&self, name: &str) -> Option<TargetReport> {
        if !self.with_target.contains(name) {
            return None;
        }
        let devices = self.devices.values();
        let reports = devices.flat_map(|device| {
            let owned = |member: &&MeasuredMember| member.member.target_owner.as_deref() == Some(name);
            device.members.iter().filter(owned).filter_map(|member| member.report(&device.controller))
        });
        let severity = |report: &TargetReport| match report.state {
            TargetState::Met => (0, report.measured_ns),
            TargetState::Controlling => (1, report.measured_ns),
            TargetState::CannotBeMet { .. } => (2, report.measured_ns),
        };
        reports.max_by_key(severity)
    }
}

impl ControlledDevice {
    /// The device with these members; those that remain keep their measurements.
    fn with_members(self, members: Vec<LatencyMember>) -> Self {
        let by_key = |measured: MeasuredMember| (measured.member.key, measured);
        let mut before: HashMap<u64, MeasuredMember> = self.members.into_iter().map(by_key).collect();
        let continued = |member: LatencyMember| {
            let previous = before.remove(&member.key);
            MeasuredMember::new(member, previous)
        };
        Self { members: members.into_iter().map(continued).collect(), controller: self.controller }
    }

    fn step(&mut self, now: Instant) {
        for member in &mut self.members {
            member.measure(now);
        }
        let samples: Vec<_> = self.members.iter().map(|member| member.sample(&self.controller)).collect();
        self.controller.step(now, &samples);
        for MeasuredMember { member, .. } in &self.members {
            member.node.set_cap(self.controller.cap(member.key));
        }
    }
}

impl MeasuredMember {
    /// A member that continues the measurements of `previous`, if it has the same disks.
    fn new(member: LatencyMember, previous: Option<Self>) -> Self {
        let target = match member.class {
            MemberClass::Target(target) => Some(target),
            MemberClass::SpareCapacity | MemberClass::Ordinary => None,
        };
        let mode = if target.is_some() { MeterMode::Latencies } else { MeterMode::Requests };
        let disks = member.disks.iter().filter_map(Weak::upgrade);
        disks.for_each(|disk| disk.latency_meter().set_mode(mode));
        let (mut measured_at, mut stopped_until, mut recent) = (None, Instant::ZERO, None);
        if let Some(previous) = previous {
            let (before, after) = (&previous.member.disks, &member.disks);
            let is_same = before.len() == after.len()
                && before.iter().zip(after).all(|(before, after)| before.ptr_eq(after));
            measured_at = is_same.then_some(previous.measured_at);
            stopped_until = previous.stopped_until;
            recent = previous.recent.filter(|_| previous.member.class == member.class);
        }
        let measured_at = measured_at.unwrap_or_else(|| {
            // A new interval begins for all of them.
            let disks = member.disks.iter().filter_map(Weak::upgrade);
            disks.for_each(|disk| _ = disk.latency_meter().take_requests(now(), 1));
            now()
        });
        Self {
            recent: target.map(|_| recent.unwrap_or_else(|| RecentLatencies::new(now()))),
            member,
            measured: MeasuredRequests::default(),
            measured_at,
            stopped_until,
            is_waiting: false,
            latencies: Default::default(),
        }
    }

    fn measure(&mut self, now: Instant) {
        self.measured = MeasuredRequests::default();
        let elapsed_ns = now.nanos_since(std::mem::replace(&mut self.measured_at, now));
        self.latencies.iter_mut().for_each(LatencyHistogram::clear);
        for disk in self.member.disks.iter().filter_map(Weak::upgrade) {
            let meter = disk.latency_meter();
            let requests = meter.take_requests(now, elapsed_ns);
            // Requests of a stopped disk wait for weir and not for the device.
            if disk.failures().stopped_by().is_some() || disk.is_released() {
                self.stopped_until = now + AFTER_STOP;
            }
            if now < self.stopped_until {
                meter.take_latencies(&mut Default::default());
                continue;
            }
            self.measured.completed += requests.completed;
            self.measured.bytes += requests.bytes;
            self.measured.mean_in_flight += requests.mean_in_flight;
            for (sum, count) in self.measured.in_flight.iter_mut().zip(requests.in_flight) {
                *sum += count;
            }
            if self.recent.is_some() {
                meter.take_latencies(&mut self.latencies);
            }
        }
        self.is_waiting = self.member.node.take_cap_wait();
        if let (Some(recent), MemberClass::Target(target)) = (&mut self.recent, self.member.class) {
            recent.advance_to(now);
            let covered =
                Direction::ALL.into_iter().filter(|direction| target.directions().covers(*direction));
            covered.for_each(|direction| recent.newer.merge(&self.latencies[direction.index()]));
        }
    }

    fn sample(&self, controller: &LatencyController) -> MemberSample<'_> {
        let LatencyMember { key, class, share, floor_permyriad, .. } = self.member;
        let floor = floor_permyriad.map(|permyriad| controller.floor_rate(permyriad));
        let MeasuredRequests { completed, bytes, in_flight, mean_in_flight } = self.measured;
        MemberSample {
            key,
            class,
            share,
            floor,
            requests: completed,
            bytes,
            in_flight,
            mean_in_flight,
            is_waiting: self.is_waiting,
            latencies: self.recent.is_some().then_some(&self.latencies),
        }
    }

    fn report(&self, controller: &LatencyController) -> Option<TargetReport> {
        let MemberClass::Target(target) = self.member.class else { return None };
        let measured_ns = self.recent.as_ref()?.percentile_ns(target.permyriad());
        let state = controller.state(self.member.key).unwrap_or(TargetState::Met);
        Some(TargetReport { target, state, measured_ns })
    }
}

impl RecentLatencies {
    fn new(now: Instant) -> Self {
        Self { newer: LatencyHistogram::new(), older: LatencyHistogram::new(), newer_since: now }
    }

    fn advance_to(&mut self, now: Instant) {
        let age = now - self.newer_since;
        if age < RECENT {
            return;
        }
        std::mem::swap(&mut self.newer, &mut self.older);
        self.newer.clear();
        if age >= RECENT * 2 {
            self.older.clear();
        }
        self.newer_since = now;
    }

    fn percentile_ns(&self, permyriad: u16) -> Option<u64> {
        let mut both = self.older.clone();
        both.merge(&self.newer);
        (both.count() > 0).then(|| both.percentile_ns(permyriad))
    }
}
