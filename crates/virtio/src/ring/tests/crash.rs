//! A device is killed before any of its stores, and another one continues with its in-flight area:
//! each chain is served, none is completed twice, and completed ones are not served again.

use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind, resume_unwind},
    rc::Rc,
};

use super::world::{RingWorld, TakenChain};
use crate::{
    ring::{
        Virtqueue,
        access_hook::{RingAccess, with_hook},
    },
    seeds,
};

/// Panic payload of a killed device.
struct Killed;

/// A device, and the number of stores before it is killed.
struct KillableDevice {
    stores: Rc<Cell<u32>>,
    ring: Option<Virtqueue>,
    held: Vec<TakenChain>,
}

/// Result of a step.
enum After {
    Runs,
    /// It was killed, without notice to the driver.
    Killed,
    /// It stopped regularly, at this base.
    Stopped(u32),
}

impl KillableDevice {
    fn new(stores: u32) -> Self {
        Self { stores: Rc::new(Cell::new(stores)), ring: None, held: Vec::new() }
    }

    fn step(&mut self, world: &mut RingWorld, base: u32) -> After {
        let remaining_stores = Rc::clone(&self.stores);
        let hook = move |access| {
            if access == RingAccess::Store {
                // No store is left: the device is killed before this one.
                remaining_stores.set(
                    remaining_stores.get().checked_sub(1).unwrap_or_else(|| resume_unwind(Box::new(Killed))),
                );
            }
        };
        let step = AssertUnwindSafe(|| with_hook(hook, || self.act(world, base)));
        catch_unwind(step).unwrap_or_else(
            |end| {
                if end.is::<Killed>() { After::Killed } else { resume_unwind(end) }
            },
        )
    }

    fn act(&mut self, world: &mut RingWorld, base: u32) -> After {
        let mut ring = self.ring.take().unwrap_or_else(|| world.ring_with_inflight(base));
        match world.rng.u8(0..40) {
            0 if ring.in_flight() == 0 => return After::Stopped(ring.stop()),
            0 | 1 => world.put_back(&mut ring, &mut self.held),
            2..20 => {
                if let Some(chain) = ring.take().expect("a good ring") {
                    self.held.push(world.check_chain(chain));
                }
            }
            _ if self.held.is_empty() => {}
            _ => {
                let taken = self.held.swap_remove(world.rng.usize(0..self.held.len()));
                world.complete(&mut ring, taken);
            }
        }
        self.ring = Some(ring);
        After::Runs
    }
}

fn run(seed: u64) -> u64 {
    let (mut world, shape) = RingWorld::new(seed);
    // The base that the front end knows: for a ring that was not stopped, the one it sent at the
    // start.
    let mut base = shape.start();
    for _ in 0..world.rng.usize(1..8) {
        let mut device = KillableDevice::new(world.rng.u32(0..200));
        loop {
            match device.step(&mut world, base) {
                After::Runs => {}
                After::Killed => break,
                After::Stopped(at) => {
                    base = at;
                    break;
                }
            }
            // The driver acts between the device's steps, also after its last one.
            if world.rng.bool() {
                world.send();
            }
            if world.rng.u8(0..4) == 0 {
                world.collect();
            }
        }
    }
    // The last device is not killed.
    let mut ring = world.ring_with_inflight(base);
    while let Some(chain) = ring.take().expect("a good ring") {
        let taken = world.check_chain(chain);
        world.complete(&mut ring, taken);
    }
    assert!(ring.wants_call(), "the previous device may have owed a call");
    assert_eq!(ring.in_flight(), 0);
    world.collect();
    assert_eq!(world.waits_for(), 0, "{shape:?}: chains that were lost");
    world.returned
}

#[test]
fn device_killed_before_any_store_loses_and_repeats_nothing() {
    let mut resumed = 0;
    let seeds = seeds::for_each("--lib", 20_000, |seed| resumed += run(seed));
    assert!(seeds < 100 || resumed > 10 * seeds, "{resumed} chains");
}
