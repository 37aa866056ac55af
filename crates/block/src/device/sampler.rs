//! Samples devices twenty times a second, and lifts, scales or enforces the limits that have a
//! watermark.
//!
//! ```text
//!   device ── utilization ─┐
//!                          ├──► WatermarkController, one for each device ──► its groups
//!   groups ── consumption ─┘
//! ```
//!
//! A group with disks on several devices follows the device with the highest utilization.
//!
//! It is one task, on the thread that created the sampler, and runs only while there is a
//! watermark. [`Sampler::watch`] replaces all targets; [`Sampler::update`] and [`Sampler::forget`]
//! change one target and visit no other. The limits of a removed target are always enforced.
//!
//! Never guesses: the limits of a group without a device, or whose device cannot be read, are
//! enforced. Both are logged.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap, HashSet, hash_map::Entry},
    fmt,
    rc::{self, Rc},
    sync::{Arc, Weak},
};

use policy::{
    throttle::{AdmissionCounters, Enforcement, Limits},
    time::{Duration, Instant},
    watermark::{DeviceConsumption, GroupConsumption, Watermark},
};

use super::{Device, DeviceId, DeviceObserver};
use reactor::{JoinHandle, now, sleep_until, spawn_joinable};

/// Interval between two samples. The controller should settle within a second, and a device in use
/// completes requests in most intervals.
const INTERVAL: Duration = Duration::from_millis(50);

/// An object with limits and a watermark: a group, or a disk that is in no group. Identified by its
/// address.
pub trait SamplerTarget: fmt::Debug + Send + Sync {
    /// Name, for the log.
    fn name(&self) -> &str;
    /// Its watermark.
    fn watermark(&self) -> Watermark;
    /// Its own limits.
    fn limits(&self) -> Limits;
    /// Counters of admitted reads and writes.
    fn admitted(&self) -> [AdmissionCounters; 2];
    /// Sets the enforcement of its own limits.
    fn enforce(&self, enforcement: Enforcement);
}

/// A target with the devices under it.
#[derive(Clone, Debug)]
pub struct SampledTarget {
    /// The target. Sampled as long as it exists; the sampler does not keep it alive.
    pub target: Weak<dyn SamplerTarget>,
    /// Devices of all its disks; empty if they are in memory.
    pub devices: Vec<Arc<Device>>,
}

/// Samples devices. Dropping it ends the sampling; the last enforcement stays in force.
#[derive(Debug, Default)]
pub struct Sampler {
    state: Rc<RefCell<SamplerState>>,
    task: RefCell<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct SamplerState {
    /// Targets by address. The stored [`Weak`] keeps an address from being reused.
    watched: BTreeMap<usize, WatchedTarget>,
    devices: HashMap<DeviceId, ObservedDevice>,
}

/// A device with the number of targets on it.
#[derive(Debug)]
struct ObservedDevice {
    observed: DeviceObserver,
    targets: usize,
}

fn address(target: &Weak<dyn SamplerTarget>) -> usize {
    target.as_ptr().cast::<()>() as usize
}

#[derive(Debug)]
struct WatchedTarget {
    sampled: SampledTarget,
    /// Time of the last sample, and the counters at that time.
    last: Option<(Instant, [AdmissionCounters; 2])>,
    enforcement: Enforcement,
}

impl Sampler {
    /// Samples these targets from now on, and only these. Those without a watermark are ignored;
    /// the state of devices that stay is kept.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn watch(&self, subjects: Vec<SampledTarget>) {
        self.state.borrow_mut().replace(subjects);
        self.run_while_needed();
    }

    /// Samples this target on these devices from now on, unless it has no watermark.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn update(&self, sampled: SampledTarget) {
        self.state.borrow_mut().update(sampled);
        self.run_while_needed();
    }

    /// Removes a target.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn forget(&self, target: &Weak<dyn SamplerTarget>) {
        self.state.borrow_mut().forget(address(target));
        self.run_while_needed();
    }

    fn run_while_needed(&self) {
        let idle = self.state.borrow().devices.is_empty();
        let mut task = self.task.borrow_mut();
        if idle {
            *task = None;
        } else if task.is_none() {
            *task = Some(spawn_joinable(run(Rc::downgrade(&self.state))));
        }
    }
}

async fn run(state: rc::Weak<RefCell<SamplerState>>) {
    let mut next = now();
    while let Some(state) = state.upgrade() {
        let now = now();
        state.borrow_mut().sample(now);
        drop(state);
        // Not `next + INTERVAL` alone: after a delay, samples must not pile up.
        next = (next + INTERVAL).max(now + INTERVAL / 2);
        sleep_until(next).await;
    }
}

impl SamplerState {
    fn replace(&mut self, targets: Vec<SampledTarget>) {
        let remaining: HashSet<usize> = targets.iter().map(|sampled| address(&sampled.target)).collect();
        // New targets first, so that the state of a device that loses its old targets is kept.
        for sampled in targets {
            self.update(sampled);
        }
        let removed: Vec<usize> =
            self.watched.keys().copied().filter(|target| !remaining.contains(target)).collect();
        for target in removed {
            self.forget(target);
        }
    }

    fn update(&mut self, sampled: SampledTarget) {
        let key = address(&sampled.target);
        let target = sampled.target.upgrade().filter(|target| target.watermark() != Watermark::ALWAYS);
        let Some(target) = target else { return self.forget(key) };
        let before = self.watched.remove(&key);
        // Logged when the devices disappear, not at every update.
        if sampled.devices.is_empty()
            && before.as_ref().is_none_or(|previous| !previous.sampled.devices.is_empty())
        {
            tracing::warn!(
                name = target.name(),
                "the watermark has no effect without a disk on a local device: limits are always \
                 enforced"
            );
        }
        for device in &sampled.devices {
            // Counted before the old devices are released, so that a device in both keeps its
            // state.
            let observed =
                || ObservedDevice { observed: DeviceObserver::new(Arc::clone(device)), targets: 0 };
            self.devices.entry(device.id()).or_insert_with(observed).targets += 1;
        }
        let (mut last, mut enforcement) = (None, Enforcement::Enforced);
        if let Some(previous) = before {
            (last, enforcement) = (previous.last, previous.enforcement);
            self.release(&previous.sampled.devices);
        }
        self.watched.insert(key, WatchedTarget { sampled, last, enforcement });
    }

    fn forget(&mut self, target: usize) {
        if let Some(mut removed) = self.watched.remove(&target) {
            // Nothing samples it any more, so lifted limits must not stay lifted.
            removed.apply(Enforcement::Enforced);
            self.release(&removed.sampled.devices);
        }
    }

    /// Removes a target from these devices.
    fn release(&mut self, devices: &[Arc<Device>]) {
        for device in devices {
            if let Entry::Occupied(mut shared) = self.devices.entry(device.id()) {
                shared.get_mut().targets -= 1;
                if shared.get().targets == 0 {
                    shared.remove();
                }
            }
        }
    }

    fn sample(&mut self, now: Instant) {
        // Sums up the consumption of all targets first, then observes the devices, then enforces:
        // all decisions of a sample are based on the same observations.
        let mut consumed: HashMap<DeviceId, DeviceConsumption> = HashMap::new();
        for watched in self.watched.values_mut() {
            let Some(consumption) = watched.consumption(now) else { continue };
            for device in &watched.sampled.devices {
                consumed.entry(device.id()).or_default().add(&consumption);
            }
        }
        let none = DeviceConsumption::default();
        for (id, ObservedDevice { observed, .. }) in &mut self.devices {
            observed.observe(now, consumed.get(id).unwrap_or(&none));
        }
        let Self { watched, devices } = self;
        for watched in watched.values_mut() {
            let Some(target) = watched.sampled.target.upgrade() else { continue };
            let watermark = target.watermark();
            let enforcement_of =
                |device: &Arc<Device>| devices.get_mut(&device.id())?.observed.enforcement(watermark);
            // The device that demands the strictest enforcement decides.
            let enforcements: Vec<_> = watched.sampled.devices.iter().map(enforcement_of).collect();
            watched.apply(
                enforcements
                    .into_iter()
                    .map(Option::unwrap_or_default)
                    .reduce(Enforcement::stricter)
                    .unwrap_or_default(),
            );
        }
    }
}

impl WatchedTarget {
    fn apply(&mut self, enforcement: Enforcement) {
        if let (true, Some(target)) = (enforcement != self.enforcement, self.sampled.target.upgrade()) {
            self.enforcement = enforcement;
            target.enforce(enforcement);
        }
    }

    /// Consumption since the last sample, relative to the limits; `None` for the first sample, and
    /// if a counter decreased.
    fn consumption(&mut self, now: Instant) -> Option<GroupConsumption> {
        let target = self.sampled.target.upgrade()?;
        let passed = target.admitted();
        let (at, before) = self.last.replace((now, passed))?;
        GroupConsumption::since(&before, &passed, now - at, target.limits())
    }
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
