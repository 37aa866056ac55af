//! Random interleavings of driver and device: each chain is taken once and completed once, and no
//! wake-up is lost.

use fastrand::Rng;

use super::world::{RingWorld, TakenChain};
use crate::{ring::Virtqueue, seeds};

/// Both sides, each of which may sleep.
struct RingTraffic {
    world: RingWorld,
    ring: Option<Virtqueue>,
    held: Vec<TakenChain>,
    device_sleeps: bool,
    driver_sleeps: bool,
}

impl RingTraffic {
    fn driver(&mut self, adding: bool) {
        let world = &mut self.world;
        if std::mem::take(&mut world.called) {
            self.driver_sleeps = false;
        }
        if adding {
            for _ in 0..world.rng.usize(0..4) {
                world.send();
            }
            world.kick();
        }
        if self.driver_sleeps {
            return;
        }
        if world.rng.bool() {
            world.driver.suppress_calls();
        }
        world.collect();
        if !adding || world.rng.bool() {
            self.driver_sleeps = !world.driver.enable_calls();
        }
    }

    fn device(&mut self, ending: bool) {
        let world = &mut self.world;
        let ring = self.ring.as_mut().expect("there is one");
        if std::mem::take(&mut world.kicked) {
            self.device_sleeps = false;
        }
        if !self.device_sleeps {
            if world.rng.bool() {
                ring.suppress_kicks();
            }
            let max_chains = if ending { usize::MAX } else { world.rng.usize(0..5) };
            for _ in 0..max_chains {
                let Some(chain) = ring.take().expect("a good ring") else { break };
                self.held.push(world.check_chain(chain));
            }
        }
        // Requests complete in random order, after random delays.
        let ready = if ending { self.held.len() } else { world.rng.usize(0..=self.held.len()) };
        for _ in 0..ready {
            let taken = self.held.swap_remove(world.rng.usize(0..self.held.len()));
            world.complete(ring, taken);
        }
        world.called |= ring.wants_call();
        if !self.device_sleeps && (ending || world.rng.bool()) {
            self.device_sleeps = !ring.enable_kicks();
        }
    }

    /// Stops the ring and continues it with a new device that has no state of the old one.
    fn hand_over(&mut self) {
        let mut ring = self.ring.take().expect("there is one");
        self.world.put_back(&mut ring, &mut self.held);
        for taken in self.held.drain(..).rev() {
            self.world.complete(&mut ring, taken);
        }
        assert_eq!(ring.in_flight(), 0);
        let _owed_call = ring.wants_call();
        let base = ring.stop();
        self.ring = Some(self.world.ring(base));
        // A front end kicks a ring that it starts.
        self.device_sleeps = false;
    }
}

fn run(seed: u64) -> u64 {
    let (world, shape) = RingWorld::new(seed);
    let ring = Some(world.ring(shape.start()));
    let mut traffic =
        RingTraffic { world, ring, held: Vec::new(), device_sleeps: false, driver_sleeps: false };
    let mut steps = Rng::with_seed(!seed);
    for _ in 0..steps.usize(20..300) {
        match steps.u8(0..40) {
            0 => traffic.hand_over(),
            1..20 => traffic.driver(true),
            _ => traffic.device(false),
        }
    }
    // Both sides process everything and then sleep: a lost wake-up leaves chains in flight.
    for _ in 0..4 * usize::from(shape.size) + 4 {
        traffic.driver(false);
        traffic.device(true);
    }
    assert!(traffic.device_sleeps && traffic.driver_sleeps);
    assert_eq!(traffic.world.waits_for(), 0, "{shape:?}: chains that were never completed");
    traffic.world.returned
}

#[test]
fn each_chain_completes_once_and_no_wake_up_is_lost() {
    let mut returned = 0;
    let seeds = seeds::for_each("--lib", 20_000, |seed| {
        returned += run(seed);
    });
    assert!(seeds < 100 || returned > 10 * seeds, "{returned} chains");
}
