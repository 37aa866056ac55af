//! Latency targets: steps the controllers of `policy` twenty times a second, and sets the caps. The
//! counterpart of block's `device/latency_sampler.rs`.
//!
//! Disks with the same station or budget share a device; a disk without either shares none. Steps
//! are taken at multiples of the interval, and stop after [`MAX_IDLE_STEPS`] idle ones, when no cap
//! is left.
//!
//! Requests are recorded only on devices with a target; without one, no step is taken.

use std::{cmp::Reverse, collections::BinaryHeap};

use policy::{
    histogram::LatencyHistogram,
    latency_target::{
        LatencyController, LatencyMemberSettings, MemberClass, MemberSample, Membership, PlacedDisk, RateCap,
        memberships,
    },
    request::Direction,
    throttle::{NodeId, ThrottleTree},
    time::Instant,
};

use super::{
    device::DevicePlacement,
    flow::{EventQueue, SimulationEvent},
    state::SimulationState,
    world::DiskSettings,
};

// The same as in the daemon.
const INTERVAL_NS: u64 = 50_000_000;
// 10 s: caps end after 2 s without a request that waits for one.
const MAX_IDLE_STEPS: u32 = 200;

#[derive(Debug, Default)]
pub(super) struct SimulatedLatencySampler {
    disks: Vec<MeasuredDisk>,
    groups: Vec<LatencyMemberSettings>,
    has_target: bool,
    /// True if disks or groups were added since the members were determined.
    is_stale: bool,
    devices: Vec<SimulatedControl>,
    is_stepping: bool,
    idle_steps: u32,
}

/// A disk, with its requests that are admitted and not completed at the last step.
#[derive(Debug)]
struct MeasuredDisk {
    place: DevicePlacement,
    settings: LatencyMemberSettings,
    /// Innermost first.
    groups: Vec<usize>,
    /// True if a disk on its device has a target.
    is_controlled: bool,
    in_flight: BinaryHeap<Reverse<RequestInFlight>>,
}

/// A request. The order is that of completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct RequestInFlight {
    completed_ns: u64,
    admitted_ns: u64,
    bytes: u64,
    is_write: bool,
}

impl RequestInFlight {
    fn direction(&self) -> Direction {
        if self.is_write { Direction::Write } else { Direction::Read }
    }
}

#[derive(Debug)]
struct SimulatedControl {
    id: SimulatedDeviceKey,
    controller: LatencyController,
    members: Vec<SimulatedMember>,
}

/// Index of the device that disks share: of a station, a budget, or of the disk that shares none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum SimulatedDeviceKey {
    Budget(usize),
    Station(usize),
    Unshared(usize),
}

#[derive(Debug)]
struct SimulatedMember {
    owner: MemberOwner,
    disks: Vec<usize>,
    membership: Membership<usize>,
    requests: u64,
    bytes: u64,
    in_flight: [u64; 2],
    mean_in_flight: f64,
    /// Time of the last step.
    measured_ns: u64,
    is_waiting: bool,
    latencies: [LatencyHistogram; 2],
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MemberOwner {
    Group(usize),
    Disk(usize),
}

impl MemberOwner {
    /// Keys of disks are even, those of groups odd.
    const fn key(self) -> u64 {
        match self {
            Self::Disk(index) => 2 * index as u64,
            Self::Group(index) => 2 * index as u64 + 1,
        }
    }

    fn tree_and_node(self, state: &SimulationState) -> (usize, NodeId) {
        match self {
            Self::Group(index) => (state.groups[index].tree, state.groups[index].node),
            Self::Disk(index) => (state.disks[index].tree, state.disks[index].node),
        }
    }
}

const fn member_settings(settings: &DiskSettings) -> LatencyMemberSettings {
    LatencyMemberSettings { latency: settings.latency, share: settings.share }
}

impl SimulatedLatencySampler {
    pub(super) fn add_group(&mut self, settings: &DiskSettings) {
        self.add_target(settings);
        self.groups.push(member_settings(settings));
    }

    /// Adds a disk, whose groups are the given ones, innermost first.
    pub(super) fn add_disk(&mut self, place: DevicePlacement, settings: &DiskSettings, groups: Vec<usize>) {
        self.add_target(settings);
        let settings = member_settings(settings);
        let in_flight = BinaryHeap::new();
        self.disks.push(MeasuredDisk { place, settings, groups, is_controlled: false, in_flight });
    }

    fn add_target(&mut self, settings: &DiskSettings) {
        self.is_stale = true;
        self.has_target |= settings.latency.target.is_some();
    }

    /// True if a disk or group has a target: then all requests must pass the throttle trees.
    pub(super) const fn has_target(&self) -> bool {
        self.has_target
    }

    /// Records an admitted request if a disk on its device has a target, and begins to step if no
    /// step is scheduled.
    pub(super) fn record(
        &mut self,
        disk: usize,
        direction: Direction,
        bytes: u64,
        (admitted_ns, completed_ns): (u64, u64),
        flow: &mut EventQueue,
    ) {
        if !self.has_target {
            return;
        }
        self.update_members();
        // No step would remove the request.
        if !self.disks[disk].is_controlled {
            return;
        }
        let is_write = direction == Direction::Write;
        let request = RequestInFlight { completed_ns, admitted_ns, bytes, is_write };
        self.disks[disk].in_flight.push(Reverse(request));
        self.idle_steps = 0;
        if !self.is_stepping {
            self.schedule_next(flow, admitted_ns);
        }
    }

    fn schedule_next(&mut self, flow: &mut EventQueue, now: u64) {
        let next = (now - now % INTERVAL_NS).checked_add(INTERVAL_NS);
        self.is_stepping = self.idle_steps < MAX_IDLE_STEPS && next.is_some();
        if let (true, Some(next)) = (self.is_stepping, next) {
            flow.schedule(next, SimulationEvent::ControlLatency);
        }
    }

    /// Takes a step and schedules the next one; returns the trees in which requests may be admitted
    /// now.
    pub(super) fn step(&mut self, state: &mut SimulationState) -> Vec<usize> {
        self.update_members();
        let is_idle = state.flow.is_idle() && self.disks.iter().all(|disk| disk.in_flight.is_empty());
        self.idle_steps = if is_idle { self.idle_steps + 1 } else { 0 };
        let mut changed = Vec::new();
        let Self { disks, devices, .. } = self;
        for device in devices {
            device.step(disks, state, &mut changed);
        }
        self.schedule_next(&mut state.flow, state.now);
        changed
    }

    fn update_members(&mut self) {
        if std::mem::take(&mut self.is_stale) {
            self.determine_members();
        }
    }

    /// Members are only added, so controllers keep their state.
    fn determine_members(&mut self) {
        let placed = self.disks.iter().enumerate().map(|(index, disk)| {
            let device = match disk.place {
                DevicePlacement { budget: Some(budget), .. } => SimulatedDeviceKey::Budget(budget),
                DevicePlacement { station: Some(station), .. } => SimulatedDeviceKey::Station(station),
                DevicePlacement { .. } => SimulatedDeviceKey::Unshared(index),
            };
            let groups = disk.groups.iter().map(|&group| (group, self.groups[group])).collect();
            PlacedDisk { device, settings: disk.settings, groups }
        });
        let placed: Vec<_> = placed.collect();
        let all = memberships(&placed);
        let is_controlled = |device: SimulatedDeviceKey| {
            let mut on_device = placed.iter().zip(&all).filter(|(disk, _)| disk.device == device);
            on_device.any(|(_, membership)| matches!(membership.class, MemberClass::Target(_)))
        };
        self.devices.iter_mut().for_each(|device| device.members.clear());
        for (index, (disk, membership)) in placed.iter().zip(&all).enumerate() {
            self.disks[index].is_controlled = is_controlled(disk.device);
            if !self.disks[index].is_controlled {
                continue;
            }
            let existing = self.devices.iter().position(|device| device.id == disk.device);
            let device = existing.unwrap_or_else(|| {
                let controller = LatencyController::new();
                self.devices.push(SimulatedControl { id: disk.device, controller, members: Vec::new() });
                self.devices.len() - 1
            });
            self.devices[device].add_disk(index, *membership);
        }
    }
}

impl SimulatedControl {
    fn add_disk(&mut self, disk: usize, membership: Membership<usize>) {
        let owner = membership.group.map_or(MemberOwner::Disk(disk), MemberOwner::Group);
        match self.members.iter_mut().find(|member| member.owner == owner) {
            Some(member) => member.disks.push(disk),
            None => self.members.push(SimulatedMember {
                owner,
                disks: vec![disk],
                membership,
                requests: 0,
                bytes: 0,
                in_flight: [0; 2],
                mean_in_flight: 0.0,
                measured_ns: 0,
                is_waiting: false,
                latencies: Default::default(),
            }),
        }
    }

    /// Takes a step; adds the trees with a changed cap to `changed`.
    fn step(&mut self, disks: &mut [MeasuredDisk], state: &mut SimulationState, changed: &mut Vec<usize>) {
        for member in &mut self.members {
            member.measure(disks, state);
        }

        let samples: Vec<_> = self.members.iter().map(|member| member.sample(&self.controller)).collect();
        let now = Instant::from_nanos(state.now);
        self.controller.step(now, &samples);
        for SimulatedMember { owner, .. } in &self.members {
            let cap = self.controller.cap(owner.key()).map(RateCap::limits);
            let (tree_index, node) = owner.tree_and_node(state);
            let tree: &mut ThrottleTree<u32> = &mut state.trees[tree_index].tree;
            if tree.cap(node) != cap {
                tree.set_cap(node, cap, now).expect("a cap is valid");
                changed.push(tree_index);
            }
        }
    }
}

impl SimulatedMember {
    fn measure(&mut self, disks: &mut [MeasuredDisk], state: &mut SimulationState) {
        (self.requests, self.bytes, self.in_flight) = (0, 0, [0; 2]);
        let since = std::mem::replace(&mut self.measured_ns, state.now);
        let mut integral = 0_u64;
        self.latencies.iter_mut().for_each(LatencyHistogram::clear);
        for &disk in &self.disks {
            let in_flight = &mut disks[disk].in_flight;
            while let Some(Reverse(request)) =
                in_flight.peek().copied().filter(|Reverse(request)| request.completed_ns <= state.now)
            {
                in_flight.pop();
                self.requests += 1;
                integral += request.completed_ns.saturating_sub(request.admitted_ns.max(since));
                self.bytes += request.bytes;
                let latency_ns = request.completed_ns - request.admitted_ns;
                self.latencies[request.direction().index()].add(latency_ns, 1);
            }
            in_flight.iter().for_each(|Reverse(request)| self.in_flight[request.direction().index()] += 1);
            let until_now = |Reverse(request): &Reverse<RequestInFlight>| {
                state.now.saturating_sub(request.admitted_ns.max(since))
            };
            integral += in_flight.iter().map(until_now).sum::<u64>();
        }
        self.mean_in_flight = integral as f64 / (state.now - since).max(1) as f64;
        let (tree_index, node) = self.owner.tree_and_node(state);
        self.is_waiting = state.trees[tree_index].tree.take_cap_wait(node);
    }

    fn sample(&self, controller: &LatencyController) -> MemberSample<'_> {
        let Membership { class, share, floor_permyriad, .. } = self.membership;
        let floor = floor_permyriad.map(|permyriad| controller.floor_rate(permyriad));
        let is_target = matches!(class, MemberClass::Target(_));
        MemberSample {
            key: self.owner.key(),
            class,
            share,
            floor,
            requests: self.requests,
            bytes: self.bytes,
            in_flight: self.in_flight,
            mean_in_flight: self.mean_in_flight,
            is_waiting: self.is_waiting,
            latencies: is_target.then_some(&self.latencies),
        }
    }
}

#[cfg(test)]
mod tests {
    use policy::latency_target::{LatencySettings, PercentileTarget, TargetDirections};

    use super::*;

    #[test]
    fn requests_on_devices_without_a_target_are_not_stored() {
        let target = PercentileTarget::new(5_000_000, 9900, TargetDirections::All);
        let with_target = LatencySettings { target, ..LatencySettings::default() };
        let on = |station| DevicePlacement { station: Some(station), budget: None };
        let (mut sampler, mut flow) = (SimulatedLatencySampler::default(), EventQueue::default());
        sampler.add_disk(on(0), &DiskSettings { latency: with_target, ..Default::default() }, Vec::new());
        sampler.add_disk(on(1), &DiskSettings::default(), Vec::new());
        let mut record = |sampler: &mut SimulatedLatencySampler, disk: usize| {
            sampler.record(disk, Direction::Read, 4096, (0, 1_000_000), &mut flow);
            sampler.disks[disk].in_flight.len()
        };
        assert_eq!(record(&mut sampler, 1), 0);
        assert!(!sampler.is_stepping);
        assert_eq!(record(&mut sampler, 0), 1);
        // A disk with a target on the other device.
        sampler.add_disk(on(1), &DiskSettings { latency: with_target, ..Default::default() }, Vec::new());
        assert_eq!([1, 2].map(|disk| record(&mut sampler, disk)), [1, 1]);
    }
}
