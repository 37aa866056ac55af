//! Watermarks: samples the devices twenty times a second, and lifts, scales or enforces limits.
//! The counterpart of block's `device/sampler.rs`. Utilization is the share of time that the device
//! worked since the last sample.
//!
//! Samples are taken at multiples of the interval, so that independent disks do not influence each
//! other, and stop after [`MAX_IDLE_SAMPLES`] idle ones. Without a device, limits are always
//! enforced.

use policy::{
    throttle::{AdmissionCounters, Enforcement, Limits, NodeId},
    time::{Duration, Instant},
    watermark::{DeviceConsumption, GroupConsumption, UtilizationSample, Watermark, WatermarkController},
};

use super::{
    device::DevicePlacement,
    flow::{EventQueue, SimulationEvent},
    state::SimulationState,
    world::{DiskSettings, DiskSpec},
};

// The same as in the daemon.
const INTERVAL_NS: u64 = 50_000_000;
// 10 s: a controller's memory of utilization, smoothed over 150 ms, is then below its resolution.
const MAX_IDLE_SAMPLES: u32 = 200;

#[derive(Debug, Default)]
pub(super) struct WatermarkSampler {
    targets: Vec<WatermarkTarget>,
    devices: Vec<SampledDevice>,
    is_sampling: bool,
    /// Number of consecutive samples without any work.
    idle_samples: u32,
}

#[derive(Debug)]
struct WatermarkTarget {
    owner: TargetOwner,
    limits: Limits,
    watermark: Watermark,
    /// Indices in [`WatermarkSampler::devices`].
    devices: Vec<usize>,
    /// Time and counters of the last sample.
    last: (u64, [AdmissionCounters; 2]),
    enforcement: Enforcement,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TargetOwner {
    Group(usize),
    Disk(usize),
}

#[derive(Debug)]
struct SampledDevice {
    place: DevicePlacement,
    controller: WatermarkController,
    /// Time and work of the last sample.
    last: (u64, u64),
}

impl WatermarkSampler {
    pub(super) fn add_group(&mut self, index: usize, settings: &DiskSettings, now: u64) {
        self.add(TargetOwner::Group(index), settings, now);
    }

    /// Adds a disk. Its device counts as sampled and idle: a daemon serves the disk before its
    /// first request.
    pub(super) fn add_disk(&mut self, index: usize, disk: &DiskSpec, state: &mut SimulationState) {
        if disk.group.is_none() {
            self.add(TargetOwner::Disk(index), &disk.settings, state.now);
        }
        let Some(place) = disk.sampled_device else { return };
        let groups = std::iter::successors(disk.group, |&group| state.groups[group].parent);
        let all: Vec<TargetOwner> =
            groups.map(TargetOwner::Group).chain([TargetOwner::Disk(index)]).collect();
        for owner in all {
            let Some(target) = self.targets.iter_mut().find(|target| target.owner == owner) else { continue };
            let existing = self.devices.iter().position(|device| device.place == place);
            let device = existing.unwrap_or_else(|| {
                self.devices.push(SampledDevice::new(place, state));
                self.devices.len() - 1
            });
            if !target.devices.contains(&device) {
                target.devices.push(device);
            }
            target.decide(&mut self.devices, state);
        }
    }

    fn add(&mut self, owner: TargetOwner, settings: &DiskSettings, now: u64) {
        if settings.watermark != Watermark::ALWAYS {
            let DiskSettings { limits, watermark, .. } = *settings;
            self.targets.push(WatermarkTarget {
                owner,
                limits,
                watermark,
                devices: Vec::new(),
                last: (last_sample(now), [AdmissionCounters::default(); 2]),
                enforcement: Enforcement::Enforced,
            });
        }
    }

    pub(super) fn begin(&mut self, flow: &mut EventQueue) {
        if !self.devices.is_empty() {
            self.is_sampling = true;
            flow.schedule(0, SimulationEvent::Sample);
        }
    }

    /// True if a request after idleness must take a sample first, for the last multiple of the
    /// interval.
    pub(super) fn is_due(&mut self) -> bool {
        // Any request ends the idle period, also while samples are still being taken.
        self.idle_samples = 0;
        !self.is_sampling && !self.devices.is_empty()
    }

    /// Schedules the next sample if anything may change until then.
    pub(super) fn schedule_next(&mut self, flow: &mut EventQueue, now: u64) {
        let next = last_sample(now).checked_add(INTERVAL_NS);
        self.is_sampling = self.idle_samples < MAX_IDLE_SAMPLES && next.is_some();
        if let (true, Some(next)) = (self.is_sampling, next) {
            flow.schedule(next, SimulationEvent::Sample);
        }
    }

    /// Takes a sample and applies it; returns the trees in which requests may be admitted now.
    pub(super) fn sample(&mut self, state: &mut SimulationState) -> Vec<usize> {
        let at = last_sample(state.now);
        let mut idle = state.flow.is_idle();
        let mut consumptions: Vec<DeviceConsumption> =
            self.devices.iter().map(|_| DeviceConsumption::default()).collect();
        for target in &mut self.targets {
            // First all targets, because several may share a device: its sample needs their sum.
            let Some(consumption) = target.utilization_since_last_sample(state, at) else { continue };
            for &device in &target.devices {
                consumptions[device].add(&consumption);
            }
        }
        for (observed, consumed) in self.devices.iter_mut().zip(consumptions) {
            idle &= !observed.observe(state.worked_ns(observed.place), at, &consumed);
        }
        // Idle if no device worked and no other event is pending.
        self.idle_samples = if idle { self.idle_samples + 1 } else { 0 };
        let Self { targets, devices, .. } = self;
        targets.iter_mut().filter_map(|target| target.decide(devices, state)).collect()
    }
}

/// Latest multiple of the interval up to this time.
const fn last_sample(now: u64) -> u64 {
    now - now % INTERVAL_NS
}

impl TargetOwner {
    fn tree_and_node(self, state: &SimulationState) -> (usize, NodeId) {
        match self {
            Self::Group(index) => (state.groups[index].tree, state.groups[index].node),
            Self::Disk(index) => (state.disks[index].tree, state.disks[index].node),
        }
    }
}

impl SampledDevice {
    fn new(place: DevicePlacement, state: &SimulationState) -> Self {
        let at = last_sample(state.now);
        let mut controller = WatermarkController::new();
        // The device counts as sampled and idle at this time.
        controller.observe(Instant::from_nanos(at), UtilizationSample::new(0, &DeviceConsumption::default()));
        Self { place, controller, last: (at, state.worked_ns(place)) }
    }

    fn observe(&mut self, worked_ns: u64, at: u64, consumed: &DeviceConsumption) -> bool {
        let (last_at, last_worked_ns) = std::mem::replace(&mut self.last, (at, worked_ns));
        let elapsed_ns = at.saturating_sub(last_at);
        let worked_ns = worked_ns.saturating_sub(last_worked_ns);
        if elapsed_ns > 0 {
            let used = u128::from(worked_ns) * 1000 / u128::from(elapsed_ns);
            let used = u64::try_from(used).unwrap_or(u64::MAX);
            let sample = UtilizationSample::new(used, consumed);
            self.controller.observe(Instant::from_nanos(at), sample);
        }
        worked_ns > 0
    }
}

impl WatermarkTarget {
    /// Applies the decision of its devices; returns its tree if that changes anything.
    fn decide(&mut self, devices: &mut [SampledDevice], state: &mut SimulationState) -> Option<usize> {
        let decisions = self.devices.iter();
        let decisions = decisions.map(|&device| devices[device].controller.enforcement(self.watermark));
        // With several devices the strictest decision applies.
        let enforcement = decisions.reduce(Enforcement::stricter).unwrap_or_default();
        if enforcement == self.enforcement {
            return None;
        }
        self.enforcement = enforcement;
        let (tree_index, node) = self.owner.tree_and_node(state);
        let now = Instant::from_nanos(state.now);
        state.trees[tree_index].tree.enforce(node, enforcement, now);
        Some(tree_index)
    }

    /// Work that passed since the last sample, compared with the limits; `None` if no time passed.
    fn utilization_since_last_sample(
        &mut self,
        state: &SimulationState,
        at: u64,
    ) -> Option<GroupConsumption> {
        let (tree_index, node) = self.owner.tree_and_node(state);
        let stats = state.trees[tree_index].tree.stats(node, Instant::from_nanos(state.now));
        let passed = [stats.reads, stats.writes];
        let (last_at, before) = std::mem::replace(&mut self.last, (at, passed));
        let elapsed_ns = at.checked_sub(last_at).filter(|&elapsed| elapsed > 0)?;
        GroupConsumption::since(&before, &passed, Duration::from_nanos(elapsed_ns), self.limits)
    }
}
