//! Disks in nested groups, through the real layer: tasks ask for admission, wait and cancel, while
//! limits and shares change, disks move, and limits are scaled or lifted. In some seeds all limits
//! are lifted at the end while requests wait.
//!
//! The log of events is compared with naive buckets and sums ([`check`]). Properties that the log
//! does not show are sampled ([`World::observe`]): waiting requests are counted correctly, and wait
//! for a full bucket.
//!
//! Four of five seeds draw only requests up to a slice; for these every bucket is modelled exactly.
//! In the others requests are up to many slices long.

mod check;
mod world;

use std::rc::Rc;

use policy::{
    request::Direction,
    throttle::RequestCost,
    time::{Duration, Instant},
};
use reactor::{JoinHandle, now, sim, sleep_until, spawn_joinable, timeout};

use crate::{
    bucket::Charge,
    client::chance,
    nested::{check::Log, world::World},
    seeds,
};

/// Longer than any run; a run that exceeds it waits for a lost wake-up.
const FOREVER: Duration = Duration::from_secs(7 * 24 * 3600);

#[test]
fn limits_hold_at_every_level_during_changes() {
    let mut totals = EventTotals::default();
    let seeds = seeds::for_each("--test simulation", 3200, |seed| {
        let counts = sim::run(seed, run());
        totals.waited += counts.waited;
        totals.changed += counts.changed;
        totals.refused += counts.refused;
        totals.moved_waiting += counts.moved_waiting;
    });
    let EventTotals { waited, changed, refused, moved_waiting } = totals;
    let enough = waited > 10 * seeds && changed > seeds && refused > seeds / 10 && moved_waiting > seeds / 4;
    assert!(seeds < 100 || enough, "too little happened in {seeds} seeds: {totals:?}");
}

/// Events of all seeds: a simulation in which nothing happens would prove nothing.
#[derive(Clone, Copy, Debug, Default)]
struct EventTotals {
    waited: u64,
    changed: u64,
    refused: u64,
    /// Moves of disks with waiting requests.
    moved_waiting: u64,
}

/// One run; returns its events.
async fn run() -> EventTotals {
    let exact = chance(80);
    let world = Rc::new(World::draw(exact));
    let disks: Vec<_> = (0..world.disks())
        .flat_map(|disk| (0..sim::random(|random| random.usize(1..=4))).map(move |_| disk))
        .map(|disk| {
            let times = sim::random(|random| random.usize(1..25));
            spawn_joinable(ask_repeatedly(Rc::clone(&world), disk, times))
        })
        .collect();
    let changing = spawn_joinable(change(Rc::clone(&world)));
    for disk in disks {
        timeout(FOREVER, disk).await.expect("every request passes within a week of virtual time");
    }
    changing.cancel().await;
    world.check_end();
    let mut totals = world.totals.borrow().to_owned();
    totals.waited = world.throttled();
    totals
}

async fn ask_repeatedly(world: Rc<World>, disk: usize, times: usize) {
    // Several requests of one task are in flight, so that some wait behind others of the same task.
    let mut inflight: Vec<JoinHandle<()>> = Vec::new();
    for _ in 0..times {
        if chance(30) {
            sleep_until(now() + Duration::from_micros(sim::random(|random| random.u64(..100_000)))).await;
        }
        inflight.push(spawn_joinable(submit(Rc::clone(&world), disk)));
        if inflight.len() > 2 {
            inflight.remove(0).await;
        }
    }
    for request in inflight {
        request.await;
    }
}

async fn submit(world: Rc<World>, disk: usize) {
    let direction = if chance(50) { Direction::Read } else { Direction::Write };
    let cost = draw_cost(world.exact);
    let charge = Charge { direction, bytes: cost.bytes() as f64, operations: cost.requests() as f64 };
    let cancel_after = match sim::random(|random| random.u8(..12)) {
        0 => Duration::ZERO,
        1 => Duration::from_micros(sim::random(|random| random.u64(..300_000))),
        _ => FOREVER,
    };
    let request = world.log.borrow_mut().requested(disk, charge, world.is_unlimited(disk));
    // Polls the admission first, so a request that was admitted by then counts as admitted.
    let passed = timeout(cancel_after, world.member(disk).admit(direction, cost)).await.is_ok();
    world.log.borrow_mut().ended(request, passed);
}

/// Draws a size; in an exact world at most a slice.
fn draw_cost(exact: bool) -> RequestCost {
    sim::random(|random| match random.u8(..4) {
        0 if exact => {
            RequestCost::merged(&(0..random.usize(1..4)).map(|_| random.u64(1..16_384)).collect::<Vec<_>>())
        }
        0 => RequestCost::one(random.u64(65_536..2_000_000)),
        1 => RequestCost::one(512),
        _ => RequestCost::one(random.u64(1..49_152)),
    })
}

/// Makes some changes, with a sample before each.
async fn change(world: Rc<World>) {
    for _ in 0..sim::random(|random| random.usize(..30)) {
        odd_moment(&world).await;
        world.observe();
        world.change();
    }
    if chance(30) {
        odd_moment(&world).await;
        world.observe();
        world.lift();
    }
}

/// Waits for an instant without other events, so that the settings in force are unambiguous.
async fn odd_moment(world: &World) {
    let wait_ns = sim::random(|random| 10_f64.powf(6.0 + 3.5 * random.f64()) as u64 | 1);
    let mut at: Instant = now() + Duration::from_nanos(wait_ns);
    loop {
        sleep_until(at).await;
        if world.log.borrow().entries.last().is_none_or(|entry| entry.at != now()) {
            return;
        }
        at += Duration::from_nanos(1);
    }
}

/// The log, shared by the tasks.
type SharedLog = std::cell::RefCell<Log>;
