//! One or two disks of a throttle group under several clients, through errors, cancellations and
//! crashes.

use std::{cell::RefCell, rc::Rc, sync::Arc};

use block::{
    disk::{Disk, DiskTotals},
    layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup},
};
use image::{Image, RawImage};
use policy::{
    throttle::{LimitKind, Limits, RateLimit},
    time::{Duration, Instant},
};
use reactor::{JoinHandle, error::Error, now, sim, sleep_until, spawn_joinable, timeout};
use storage::{
    Storage,
    align::Align,
    fault::{FaultRule, StorageRequestKind},
    simulated::{Behaviour, SimulatedStorage},
};

use crate::{
    client::{Client, EventCounts, Shared, chance, draw_prefetch, short_time},
    group_samples::GroupSamples,
    seeds,
};

/// Longer than any run; a run that exceeds it waits for a lost wake-up.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

/// Block size and number of blocks of a disk that is large enough for long requests.
const LARGE: (usize, usize) = (512, 400);
/// Size of the largest disk, which is read as a whole, in bytes.
const MAX_REQUEST: u64 = (LARGE.0 * LARGE.1) as u64;

#[test]
fn disks_meet_the_storage_contract() {
    let counts = Rc::new(RefCell::new(EventCounts::default()));
    let seeds = seeds::for_each("--test simulation", 1000, |seed| {
        run(seed, &counts);
    });
    let counts = *counts.borrow();
    if seeds >= 100 {
        let enough = [
            counts.failed,
            counts.cancelled,
            counts.flushed,
            counts.crashes,
            counts.waited,
            counts.read_ahead,
        ];
        assert!(
            enough.iter().all(|&count| count > seeds / 10),
            "too little happened in {seeds} seeds: {counts:?}"
        );
    }
}

#[test]
fn a_seed_is_deterministic() {
    let once = || {
        let counts = Rc::default();
        (run(11, &counts), format!("{counts:?}"))
    };
    assert_eq!(once(), once());
}

/// Returns the end of the run, in virtual time.
fn run(seed: u64, counts: &Rc<RefCell<EventCounts>>) -> Instant {
    let counts = Rc::clone(counts);
    sim::run(seed, async move {
        let group = ThrottleGroup::new("group", settings(draw_limits()), None).expect("drawn valid");
        let passed = Rc::new(RefCell::new(GroupSamples::new(&group, MAX_REQUEST)));
        let disks: Vec<_> = (0..sim::random(|random| random.usize(1..=2)))
            .map(|_| spawn_joinable(DiskLife::draw(&group, &counts, &passed).run()))
            .collect();
        for disk in disks {
            timeout(FOREVER, disk).await.expect("every request is answered within a day of virtual time");
        }
        passed.borrow().check();
        let stats = group.stats();
        counts.borrow_mut().waited += stats.reads.throttled + stats.writes.throttled;
        now()
    })
}

fn settings(limits: Limits) -> GroupSettings {
    GroupSettings { limits, ..GroupSettings::default() }
}

/// Draws no limits, or limits on the total of a group's requests.
fn draw_limits() -> Limits {
    let mut limits = Limits::default();
    let mut draw = |kind: LimitKind, min_rate: f64| {
        *limits.limit_mut(kind) = sim::random(|random| {
            let rate = (min_rate * 10_f64.powf(2.0 * random.f64())) as u64;
            match random.u8(..3) {
                0 => RateLimit { rate, ..RateLimit::NONE },
                form => {
                    let burst_length_s = if form == 1 { 1 } else { random.u64(1..4) };
                    RateLimit { rate, burst_rate: rate * random.u64(1..5), burst_length_s, ..RateLimit::NONE }
                }
            }
        });
    };
    if chance(40) {
        draw(LimitKind::IopsTotal, 20.0);
    }
    if chance(30) {
        draw(LimitKind::BpsTotal, 20_000.0);
    }
    limits
}

/// A disk through several crashes.
struct DiskLife {
    group: Arc<ThrottleGroup>,
    shared: Rc<Shared>,
    behaviour: Behaviour,
    faults: bool,
    content: Vec<u8>,
    clients: usize,
    crashes: usize,
}

impl DiskLife {
    fn draw(
        group: &Arc<ThrottleGroup>,
        tally: &Rc<RefCell<EventCounts>>,
        passed: &Rc<RefCell<GroupSamples>>,
    ) -> Self {
        // Mostly tiny disks, so that requests overlap.
        let (block_bytes, blocks) = match sim::random(|random| random.u32(..100)) {
            0..4 => LARGE,
            4..50 => (4096, 5),
            _ => (512, 16),
        };
        let errors = if chance(30) { sim::random(fastrand::Rng::f64) / 8.0 } else { 0.0 };
        let latency = Duration::from_micros(sim::random(|random| random.u64(..2000)));
        let faults = chance(20);
        let content: Vec<u8> =
            sim::random(|random| (0..block_bytes * blocks).map(|_| random.u8(..)).collect());
        let shared = Shared {
            passed: Rc::clone(passed),
            ..Shared::new(content.clone(), block_bytes, tally, errors > 0.0 || faults)
        };
        Self {
            group: Arc::clone(group),
            shared: Rc::new(shared),
            behaviour: Behaviour { block_bytes, latency, error_probability: errors },
            faults,
            content,
            clients: sim::random(|random| random.usize(1..=5)),
            crashes: sim::random(|random| random.usize(..=3)),
        }
    }

    async fn run(mut self) {
        for _ in 0..self.crashes {
            let (device, disk) = self.open();
            let clients = self.start(&disk);
            sleep_until(now() + short_time()).await;
            // A crash cancels the clients' requests in flight; in some seeds the clients stop
            // first.
            if chance(50) {
                stop(clients).await;
                self.crash(&device);
            } else {
                self.crash(&device);
                stop(clients).await;
            }
            self.check_count(&disk);
            self.shared.counts.borrow_mut().read_ahead += disk.prefetch().stats().used_bytes;
        }
        let (device, disk) = self.open();
        for client in self.start(&disk) {
            client.await;
        }
        self.check_end(&disk).await;
        self.check_count(&disk);
        self.crash(&device);
    }

    fn open(&self) -> (SimulatedStorage, Arc<Disk>) {
        self.shared.sent.iter().chain(&self.shared.succeeded).for_each(|count| count.set(0));
        let device = SimulatedStorage::new(self.content.clone(), self.behaviour);
        let mut storage = Storage::Simulated(Align::new(device.clone()));
        if self.faults {
            storage = storage.with_faults(vec![full_disk()]);
        }
        let image = Image::Raw(RawImage::new(storage));
        let settings = DiskSettings::default();
        let disk = Disk::new("disk", image, settings, Some(&self.group)).expect("no reservations");
        disk.prefetch().set(draw_prefetch()).expect("in range");
        (device, Arc::new(disk))
    }

    fn start(&self, disk: &Arc<Disk>) -> Vec<JoinHandle<()>> {
        let client = || Client { disk: Arc::clone(disk), shared: Rc::clone(&self.shared) };
        let requests = || sim::random(|random| random.usize(1..40));
        (0..self.clients).map(|_| spawn_joinable(client().run(requests()))).collect()
    }

    fn crash(&mut self, device: &SimulatedStorage) {
        self.content = device.crash();
        self.shared.model.borrow_mut().crash(self.content.clone());
        self.shared.counts.borrow_mut().crashes += 1;
    }

    /// Checks the final content, which a flush makes durable.
    async fn check_end(&self, disk: &Arc<Disk>) {
        let client = Client { disk: Arc::clone(disk), shared: Rc::clone(&self.shared) };
        let size = self.content.len();
        client.read(0..size).await;
        while !client.flush().await {}
    }

    /// Checks that the disk counted every request that succeeded, and none that was not sent. A
    /// cancelled one may have succeeded.
    fn check_count(&self, disk: &Disk) {
        let DiskTotals { reads, writes, .. } = disk.totals();
        for (direction, counted) in [reads, writes].into_iter().enumerate() {
            let range = self.shared.succeeded[direction].get()..=self.shared.sent[direction].get();
            assert!(range.contains(&counted), "{counted} counted, and there were {range:?}");
        }
    }
}

/// Cancels the clients' tasks.
async fn stop(clients: Vec<JoinHandle<()>>) {
    for client in clients {
        client.cancel().await;
    }
}

/// Fails every tenth write for lack of space, without an effect.
fn full_disk() -> FaultRule {
    FaultRule {
        kind: Some(StorageRequestKind::Write),
        range: None,
        error: Error::NO_SPACE,
        count: None,
        probability: 0.1,
        seed: sim::random(|random| random.u64(..)),
    }
}
