//! The simulated driver: a virtual clock, an order of execution drawn from a seed, and no kernel.
//!
//! The next task to run is picked at random among the ready ones; if none is ready, the clock jumps
//! to the next timer. A seed determines the whole run, so it reproduces a failure. A run with
//! waiting tasks that nothing can wake is a hang, and panics.

use std::{
    cell::{Cell, RefCell},
    future::Future,
};

use policy::time::Instant;

use super::{Reactor, ReactorDriver, executor::Executor, with_current};

pub(super) struct SimulatedDriver {
    seed: u64,
    now: Cell<Instant>,
    random: RefCell<fastrand::Rng>,
}

impl SimulatedDriver {
    pub(super) fn now(&self) -> Instant {
        self.now.get()
    }

    pub(super) fn random_bool(&self) -> bool {
        self.random.borrow_mut().bool()
    }

    fn iterate(reactor: &Reactor) {
        let ReactorDriver::Sim(sim) = &reactor.driver else {
            unreachable!("entered with the simulated driver")
        };
        reactor.executor.receive();
        if let Some(runnable) = reactor.executor.pop_any(|count| sim.random.borrow_mut().usize(..count)) {
            runnable.run();
            return;
        }
        let next = reactor.timers.borrow().earliest();
        let Some(next) = next else {
            panic!("seed {}: hang: tasks wait, but no task is ready and no timer is set", sim.seed);
        };
        sim.now.set(sim.now.get().max(next));
        loop {
            let due = reactor.timers.borrow_mut().pop_due(sim.now.get());
            let Some(waker) = due else { break };
            waker.wake();
        }
    }
}

/// Runs `future`, and all tasks that it spawns, in virtual time until `future` completes.
///
/// # Panics
/// Panics on a hang (see above), or if a reactor runs on this thread already.
pub fn run<T: 'static>(seed: u64, future: impl Future<Output = T> + 'static) -> T {
    let sim = SimulatedDriver {
        seed,
        now: Cell::new(Instant::ZERO),
        random: RefCell::new(fastrand::Rng::with_seed(seed)),
    };
    let executor = Executor::new().expect("an eventfd");
    Reactor::enter(executor, ReactorDriver::Sim(sim), Box::pin(future), SimulatedDriver::iterate)
}

/// The simulation's random numbers, for simulated storages and clients. One seed thereby determines
/// everything.
///
/// # Panics
/// Panics outside of [`run`].
pub fn random<T>(f: impl FnOnce(&mut fastrand::Rng) -> T) -> T {
    with_current(|reactor| match &reactor.driver {
        ReactorDriver::Sim(sim) => f(&mut sim.random.borrow_mut()),
        ReactorDriver::Uring(_) => panic!("random numbers exist in a simulation only"),
    })
}
