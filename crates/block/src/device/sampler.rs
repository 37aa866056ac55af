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
//! watermark. It is told everything that it should watch at once ([`Sampler::watch`]), whenever
//! that changes. What is no longer watched is enforced as it is set.
//!
//! Never guesses: a group without a device is enforced as it is set, and so is one whose device
//! cannot be read. Both are logged.

use std::{
    cell::RefCell,
    collections::HashMap,
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
use crate::reactor::{JoinHandle, now, sleep_until, spawn_joinable};

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
    watched: Vec<Watched>,
    devices: HashMap<DeviceId, Observed>,
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
        let mut before = std::mem::take(&mut self.watched);
        let mut devices = std::mem::take(&mut self.devices);
        for subject in subjects {
            let Some(target) = subject.target.upgrade() else { continue };
            if target.watermark() == Watermark::ALWAYS {
                continue;
            }
            let known = before.iter().position(|known| known.subject.target.ptr_eq(&subject.target));
            if subject.devices.is_empty()
                && known.is_none_or(|index| !before[index].subject.devices.is_empty())
            {
                tracing::warn!(
                    name = target.name(),
                    "the watermark has no effect, because no disk here lies on a device; limits are always enforced"
                );
            }
            for device in &subject.devices {
                let kept = self.devices.contains_key(&device.id());
                if !kept {
                    let kept = devices.remove(&device.id());
                    let observed = kept.unwrap_or_else(|| Observed::new(Arc::clone(device)));
                    self.devices.insert(device.id(), observed);
                }
            }
            let watched = match known {
                Some(index) => Watched { subject, ..before.swap_remove(index) },
                None => Watched { subject, last: None, enforcement: Enforcement::Enforced },
            };
            self.watched.push(watched);
        }
        for mut gone in before {
            gone.apply(Enforcement::Enforced);
        }
    }

    fn sample(&mut self, now: Instant) {
        let mut consumed: HashMap<DeviceId, Consumed> = HashMap::new();
        for watched in &mut self.watched {
            let Some(taken) = watched.taken(now) else { continue };
            for device in &watched.subject.devices {
                consumed.entry(device.id()).or_default().add(&taken);
            }
        }
        let nothing = Consumed::default();
        for (id, observed) in &mut self.devices {
            observed.observe(now, consumed.get(id).unwrap_or(&nothing));
        }
        let Self { watched, devices } = self;
        for watched in watched {
            let Some(target) = watched.subject.target.upgrade() else { continue };
            let watermark = target.watermark();
            let of_device = |device: &Arc<Device>| devices.get_mut(&device.id())?.enforcement(watermark);
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
    /// first time.
    fn taken(&mut self, now: Instant) -> Option<Taken> {
        let target = self.subject.target.upgrade()?;
        let passed = target.passed();
        let (at, before) = self.last.replace((now, passed))?;
        Some(Taken::since(&before, &passed, now - at, target.limits()))
    }
}

#[cfg(test)]
mod tests;
