//! Watches devices and lifts, scales or enforces the limits that have a watermark, twenty times a
//! second.
//!
//! ```text
//!   device ── use ────────┐
//!                         ├──► policy::watermark::Controller, one a device ──► enforcement of its groups
//!   groups ── consumed ───┘
//! ```
//!
//! A group with disks on several devices follows the device with the least room.
//!
//! It is one task, on the thread that made the sampler, and runs only while something has a
//! watermark. [`Sampler::watch`] replaces all targets; [`Sampler::update`] and [`Sampler::forget`]
//! change one target and visit no other. The limits of a removed target are always enforced.
//!
//! Never guesses: a group without a device is enforced as it is set, and so is one whose device
//! cannot be read. Both are logged.

use std::{
    cell::RefCell,
    collections::{BTreeMap, HashMap, HashSet, hash_map::Entry},
    fmt,
    rc::{self, Rc},
    sync::{Arc, Weak},
};

use policy::{
    throttle::{Counters, Enforcement, Limits},
    time::{Duration, Instant},
    watermark::{Consumed, Taken, Watermark},
};

use super::{Device, DeviceId, Observed};
use reactor::{JoinHandle, now, sleep_until, spawn_joinable};

/// Time between two samples. Within a second the controller is to have found its way, and a device
/// does something in most of them.
const INTERVAL: Duration = Duration::from_millis(50);

/// Something with limits and a watermark: a group, or a disk without one. Told apart by its
/// address.
pub trait Target: fmt::Debug + Send + Sync {
    /// What it is called.
    fn name(&self) -> &str;
    /// The watermark set for it.
    fn watermark(&self) -> Watermark;
    /// Its own limits.
    fn limits(&self) -> Limits;
    /// What has passed, reads and writes.
    fn passed(&self) -> [Counters; 2];
    /// Enforces its own limits so much from now on.
    fn enforce(&self, enforcement: Enforcement);
}

/// A target with the devices under it.
#[derive(Clone, Debug)]
pub struct Subject {
    /// What is held to its limits, or not. Watched as long as it is there; the watching does not
    /// keep it.
    pub target: Weak<dyn Target>,
    /// All that its disks lie on; empty if they are in memory.
    pub devices: Vec<Arc<Device>>,
}

/// Watches devices. Dropping it ends the watching; enforcement stays as it was then.
#[derive(Debug, Default)]
pub struct Sampler {
    state: Rc<RefCell<State>>,
    task: RefCell<Option<JoinHandle<()>>>,
}

#[derive(Debug, Default)]
struct State {
    /// Targets by address. The stored [`Weak`] keeps an address from being reused.
    watched: BTreeMap<usize, Watched>,
    devices: HashMap<DeviceId, ObservedDevice>,
}

/// A device with the number of targets on it.
#[derive(Debug)]
struct ObservedDevice {
    observed: Observed,
    targets: usize,
}

fn address(target: &Weak<dyn Target>) -> usize {
    target.as_ptr().cast::<()>() as usize
}

#[derive(Debug)]
struct Watched {
    subject: Subject,
    /// When it was last looked at, and what had passed by then.
    last: Option<(Instant, [Counters; 2])>,
    enforcement: Enforcement,
}

impl Sampler {
    /// Watches these from now on, and only these. Those without a watermark are left out; what is
    /// known of devices that stay is kept.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn watch(&self, subjects: Vec<Subject>) {
        self.state.borrow_mut().replace(subjects);
        self.run_while_needed();
    }

    /// Watches this target on these devices from now on, unless it has no watermark.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn update(&self, subject: Subject) {
        self.state.borrow_mut().update(subject);
        self.run_while_needed();
    }

    /// Stops watching a target.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn forget(&self, target: &Weak<dyn Target>) {
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

async fn run(state: rc::Weak<RefCell<State>>) {
    let mut next = now();
    while let Some(state) = state.upgrade() {
        let now = now();
        state.borrow_mut().sample(now);
        drop(state);
        // Not `next + INTERVAL` alone: after a late one, samples do not pile up.
        next = (next + INTERVAL).max(now + INTERVAL / 2);
        sleep_until(next).await;
    }
}

impl State {
    fn replace(&mut self, subjects: Vec<Subject>) {
        let stay: HashSet<usize> = subjects.iter().map(|subject| address(&subject.target)).collect();
        // Before targets are forgotten, so that the state of a device with new targets stays.
        for subject in subjects {
            self.update(subject);
        }
        let gone: Vec<usize> = self.watched.keys().copied().filter(|target| !stay.contains(target)).collect();
        for target in gone {
            self.forget(target);
        }
    }

    fn update(&mut self, subject: Subject) {
        let key = address(&subject.target);
        let target = subject.target.upgrade().filter(|target| target.watermark() != Watermark::ALWAYS);
        let Some(target) = target else { return self.forget(key) };
        let before = self.watched.remove(&key);
        if subject.devices.is_empty() && before.as_ref().is_none_or(|known| !known.subject.devices.is_empty())
        {
            tracing::warn!(
                name = target.name(),
                "the watermark has no effect, because no disk here lies on a device; limits are always enforced"
            );
        }
        for device in &subject.devices {
            let observed = || ObservedDevice { observed: Observed::new(Arc::clone(device)), targets: 0 };
            self.devices.entry(device.id()).or_insert_with(observed).targets += 1;
        }
        let (mut last, mut enforcement) = (None, Enforcement::Enforced);
        if let Some(known) = before {
            (last, enforcement) = (known.last, known.enforcement);
            self.release(&known.subject.devices);
        }
        self.watched.insert(key, Watched { subject, last, enforcement });
    }

    fn forget(&mut self, target: usize) {
        if let Some(mut gone) = self.watched.remove(&target) {
            gone.apply(Enforcement::Enforced);
            self.release(&gone.subject.devices);
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
        let mut consumed: HashMap<DeviceId, Consumed> = HashMap::new();
        for watched in self.watched.values_mut() {
            let Some(taken) = watched.taken(now) else { continue };
            for device in &watched.subject.devices {
                consumed.entry(device.id()).or_default().add(&taken);
            }
        }
        let nothing = Consumed::default();
        for (id, ObservedDevice { observed, .. }) in &mut self.devices {
            observed.observe(now, consumed.get(id).unwrap_or(&nothing));
        }
        let Self { watched, devices } = self;
        for watched in watched.values_mut() {
            let Some(target) = watched.subject.target.upgrade() else { continue };
            let watermark = target.watermark();
            let of_device =
                |device: &Arc<Device>| devices.get_mut(&device.id())?.observed.enforcement(watermark);
            let says: Vec<_> = watched.subject.devices.iter().map(of_device).collect();
            watched.apply(
                says.into_iter()
                    .map(Option::unwrap_or_default)
                    .reduce(Enforcement::stricter)
                    .unwrap_or_default(),
            );
        }
    }
}

impl Watched {
    fn apply(&mut self, enforcement: Enforcement) {
        if let (true, Some(target)) = (enforcement != self.enforcement, self.subject.target.upgrade()) {
            self.enforcement = enforcement;
            target.enforce(enforcement);
        }
    }

    /// What has passed since the last time, beside what the limits would have let pass; `None` the
    /// first time, and where a counter fell.
    fn taken(&mut self, now: Instant) -> Option<Taken> {
        let target = self.subject.target.upgrade()?;
        let passed = target.passed();
        let (at, before) = self.last.replace((now, passed))?;
        Taken::since(&before, &passed, now - at, target.limits())
    }
}

#[cfg(test)]
#[path = "sampler_tests.rs"]
mod tests;
