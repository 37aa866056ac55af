//! Disks in groups in groups, through the real layer: tasks ask, wait and give up, while limits and
//! shares change, disks move, and limits are enforced more loosely or not at all. In the end,
//! sometimes, all limits are lifted while requests wait.
//!
//! What is recorded is held against naive buckets and sums ([`check`]); what cannot be seen from
//! outside is asked for now and then ([`World::observe`]): what waits is counted right, and waits
//! for a bucket that has no room.
//!
//! Four of five seeds draw only requests that are paid at once; of these every bucket is followed
//! exactly. In the others requests are up to many slices long.

mod check;
mod world;

use std::rc::Rc;

use policy::{
    request::Direction,
    throttle::Cost,
    time::{Duration, Instant},
};
use reactor::{JoinHandle, now, sim, sleep_until, spawn_joinable, timeout};

use crate::{
    bucket::Charge,
    client::chance,
    nested::{check::Log, world::World},
    seeds,
};

/// Longer than any run; one that is not over by then waits for something that does not come.
const FOREVER: Duration = Duration::from_secs(7 * 24 * 3600);

#[test]
fn every_level_holds_whatever_changes() {
    let mut tally = Tally::default();
    let seeds = seeds::for_each("--test simulation", "every_level_holds_whatever_changes", 3200, |seed| {
        let of_seed = sim::run(seed, run());
        tally.waited += of_seed.waited;
        tally.changed += of_seed.changed;
        tally.refused += of_seed.refused;
        tally.moved_waiting += of_seed.moved_waiting;
    });
    let Tally { waited, changed, refused, moved_waiting } = tally;
    let enough = waited > 10 * seeds && changed > seeds && refused > seeds / 10 && moved_waiting > seeds / 4;
    assert!(seeds < 100 || enough, "too little happened in {seeds} seeds: {tally:?}");
}

/// So that a simulation in which nothing happens does not pass for one that went well.
#[derive(Clone, Copy, Debug, Default)]
struct Tally {
    waited: u64,
    changed: u64,
    refused: u64,
    /// Moves of disks with requests waiting.
    moved_waiting: u64,
}

/// One run. Says what happened in it.
async fn run() -> Tally {
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
    let mut tally = world.tally.borrow().to_owned();
    tally.waited = world.throttled();
    tally
}

async fn ask_repeatedly(world: Rc<World>, disk: usize, times: usize) {
    // Requests of one task in flight together, so that some wait behind others of the same task.
    let mut inflight: Vec<JoinHandle<()>> = Vec::new();
    for _ in 0..times {
        if chance(30) {
            sleep_until(now() + Duration::from_micros(sim::random(|random| random.u64(..100_000)))).await;
        }
        inflight.push(spawn_joinable(ask(Rc::clone(&world), disk)));
        if inflight.len() > 2 {
            inflight.remove(0).await;
        }
    }
    for request in inflight {
        request.await;
    }
}

async fn ask(world: Rc<World>, disk: usize) {
    let direction = if chance(50) { Direction::Read } else { Direction::Write };
    let cost = draw_cost(world.exact);
    let charge = Charge { direction, bytes: cost.bytes() as f64, operations: cost.requests() as f64 };
    let patience = match sim::random(|random| random.u8(..12)) {
        0 => Duration::ZERO,
        1 => Duration::from_micros(sim::random(|random| random.u64(..300_000))),
        _ => FOREVER,
    };
    let request = world.log.borrow_mut().asked(disk, charge, world.is_unlimited(disk));
    // Polls the admission first, so what was admitted by then is known to have been.
    let passed = timeout(patience, world.member(disk).admit(direction, cost)).await.is_ok();
    world.log.borrow_mut().ended(request, passed);
}

/// Sizes as they come; where all is to be followed exactly, none so large that it is paid for in
/// slices.
fn draw_cost(exact: bool) -> Cost {
    sim::random(|random| match random.u8(..4) {
        0 if exact => {
            Cost::merged(&(0..random.usize(1..4)).map(|_| random.u64(1..16_384)).collect::<Vec<_>>())
        }
        0 => Cost::one(random.u64(65_536..2_000_000)),
        1 => Cost::one(512),
        _ => Cost::one(random.u64(1..49_152)),
    })
}

/// Changes something now and then, and looks around before.
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

/// When nothing else happens: then it is clear which settings were in force.
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

/// What the log is kept in.
type SharedLog = std::cell::RefCell<Log>;
