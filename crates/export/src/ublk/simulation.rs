//! Simulated devices: clients that send requests in any order, disks that are slow and fail, and
//! processes that are killed, leave their device to the next, or stop it.
//!
//! - Data is copied to lent memory, or zero-copy; data from the prefetch cache, and data outside
//!   registered buffers, is copied in either case.
//! - Every request is answered exactly once, however many processes fetched it (`kernel`).
//! - Reads agree with the model of the disk, and data covered by a flush or FUA survives a crash.
//! - The group's limits hold, also across processes.
//! - A queue ends when its device stops or is left, with none of its tasks left.
//!
//! `WEIR_SEED=n` runs one seed, `WEIR_SEEDS=n` the first n. A failure prints the command that
//! repeats it.

pub(super) mod kernel;

use std::{
    cell::{Cell, RefCell},
    rc::{Rc, Weak},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    },
};

use policy::{prefetch::PrefetchConfig, time::Duration};

use self::kernel::SimulatedUblkDriver;
use super::{
    channel::UblkChannel,
    device::{UblkDevice, UblkExport, UblkOffer, UblkShutdown},
    queue::UblkIoQueue,
};
use crate::{
    model::{Model, Outcome},
    passed::GroupSamples,
    random::{self, chance, sleep_randomly},
    seeds,
};
use block::{
    disk::Disk,
    layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup},
};
use image::{Image, RawImage};
use reactor::{
    JoinHandle, now, sim, sleep_until, spawn_joinable, timeout,
    ublk::{UblkDescriptor, UblkInfo},
    yield_now,
};
use storage::{
    Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

const FOREVER: Duration = Duration::from_secs(24 * 3600);
const BLOCK: usize = 512;
const DISK_BYTES: usize = 128 * BLOCK;
const MAX_SECTORS: usize = 16;
/// Maximum length of merged requests, in bytes.
const MAX_REQUEST: u64 = 256 << 10;

/// Events counted over all seeds; the test fails if one of them is too rare.
#[derive(Clone, Copy, Debug, Default)]
struct UblkSimulationCounts {
    answered: u64,
    failed: u64,
    flushed: u64,
    kills: u64,
    leaves: u64,
    quiesces: u64,
    reissued: u64,
    merged: u64,
    waited: u64,
    /// Bytes of zero-copy devices that were not copied.
    stayed: u64,
    copied: u64,
    found: u64,
}

#[test]
fn devices_survive_killed_and_replaced_processes() {
    let counts = Rc::new(Cell::new(UblkSimulationCounts::default()));
    let seeds = seeds::for_each("--lib", 600, |seed| sim::run(seed, run(Rc::clone(&counts))));
    let all = counts.get();
    if seeds >= 100 {
        let happened = [
            all.answered / 10,
            all.failed,
            all.flushed,
            all.kills,
            all.leaves,
            all.quiesces,
            all.reissued,
            all.merged,
            all.waited,
            all.stayed,
            all.copied,
            all.found,
        ];
        assert!(happened.iter().all(|&count| count > seeds / 10), "too little happened: {all:?}");
    }
}

async fn run(counts: Rc<Cell<UblkSimulationCounts>>) {
    let settings = GroupSettings { limits: random::limits(30), ..GroupSettings::default() };
    let group = ThrottleGroup::new("group", settings, None).expect("drawn valid");
    let may_fail = chance(30);
    let behaviour = Behaviour {
        block_bytes: BLOCK,
        latency: Duration::from_micros(sim::random(|random| random.u64(..2000))),
        error_probability: if may_fail { sim::random(fastrand::Rng::f64) / 8.0 } else { 0.0 },
    };
    let content: Vec<u8> = sim::random(|random| (0..DISK_BYTES).map(|_| random.u8(..)).collect());
    let storage = SimulatedStorage::new(content.clone(), behaviour);
    let image = Image::Raw(RawImage::new(Storage::Simulated(Align::new(storage.clone()))));
    let disk = Disk::new("disk", image, DiskSettings::default(), Some(&group)).expect("no reservation");
    let (write_cache, depth) = (chance(80), sim::random(|random| random.u16(1..=12)));
    let most_bytes = (MAX_SECTORS * BLOCK) as u32;
    let offer = UblkOffer { write_cache, depth, max_request_bytes: most_bytes, ..UblkOffer::default() };
    let export = UblkExport { id: "device".into(), disk: Arc::new(disk), offer };
    let world = Rc::new(UblkWorld {
        kernel: SimulatedUblkDriver::new(depth, most_bytes as usize, chance(50)),
        copied: Arc::default(),
        model: RefCell::new(Model::new(content, BLOCK)),
        samples: RefCell::new(GroupSamples::new(&group, MAX_REQUEST)),
        export,
        may_fail,
        next: Cell::new(0),
        counts,
    });
    let clients: Vec<_> = (0..sim::random(|random| random.usize(1..=12)))
        .map(|_| spawn_joinable(Rc::clone(&world).ask()))
        .collect();
    let all_asked = Rc::new(Cell::new(false));
    let processes = spawn_joinable(Rc::clone(&world).processes(Rc::clone(&all_asked)));
    for client in clients {
        timeout(FOREVER, client).await.expect("every request is answered within a day of virtual time");
    }
    all_asked.set(true);
    timeout(FOREVER, processes).await.expect("a device that stops has an end");
    world.samples.borrow().check();
    world.model.borrow_mut().crash(storage.crash());
    let stats = group.stats();
    world.count(|all| {
        all.waited += stats.reads.throttled + stats.writes.throttled;
        all.merged += world.export.disk.totals().merged_requests;
        all.reissued += world.kernel.reissued();
        all.found += world.export.disk.prefetch().stats().hits;
        let copied = world.copied.load(SeqCst);
        all.copied += copied;
        if world.kernel.is_zero_copy() {
            let totals = world.export.disk.totals();
            all.stayed += (totals.read_bytes + totals.written_bytes).saturating_sub(copied);
        } else {
            // Copies by the kernel are not counted here.
            assert_eq!(copied, 0, "of lent memory nothing is copied");
        }
    });
}

/// One device, served by a sequence of processes.
struct UblkWorld {
    kernel: SimulatedUblkDriver,
    /// Bytes that the processes have copied.
    copied: Arc<AtomicU64>,
    model: RefCell<Model>,
    samples: RefCell<GroupSamples>,
    export: UblkExport,
    may_fail: bool,
    /// The sector behind the most recent request of any client.
    next: Cell<usize>,
    counts: Rc<Cell<UblkSimulationCounts>>,
}

/// A process that serves.
struct SimulatedUblkProcess {
    device: Arc<UblkDevice>,
    serving: JoinHandle<()>,
    /// Upgradable while any task of the queue is left.
    queue: Weak<UblkIoQueue>,
}

impl UblkWorld {
    fn count(&self, change: impl FnOnce(&mut UblkSimulationCounts)) {
        let mut all = self.counts.get();
        change(&mut all);
        self.counts.set(all);
    }

    /// Runs processes in sequence; the last stops the device.
    async fn processes(self: Rc<Self>, all_asked: Rc<Cell<bool>>) {
        for _ in 0..sim::random(|random| random.usize(..6)) {
            let process = self.begin();
            sleep_randomly(Duration::from_millis(50)).await;
            while chance(30) {
                self.rest(&process).await;
                if chance(50) {
                    break;
                }
                process.device.set_quiescing(false);
                sleep_randomly(Duration::from_millis(20)).await;
            }
            self.end(process).await;
            if chance(50) {
                sleep_randomly(Duration::from_millis(20)).await;
            }
        }
        let process = self.begin();
        while !all_asked.get() {
            self.samples.borrow_mut().sample();
            sleep_until(now() + Duration::from_millis(10)).await;
        }
        self.kernel.stop();
        timeout(FOREVER, process.serving).await.expect("it ends with its device");
        self.all_gone(&process.queue).await;
        assert_eq!(process.device.in_flight.load(SeqCst), 0, "requests are counted that are none");
    }

    fn begin(&self) -> SimulatedUblkProcess {
        let UblkExport { offer, .. } = &self.export;
        let info = UblkInfo::new(1, offer.depth, offer.max_request_bytes);
        let device = Arc::new(UblkDevice::new(&self.export, &info, &offer.params(DISK_BYTES as u64)));
        let channel = UblkChannel::Simulated(self.kernel.channel(&self.copied));
        let queue = UblkIoQueue::new(channel, offer.depth, Arc::clone(&device));
        let weak = Rc::downgrade(&queue);
        let serving = spawn_joinable(async move {
            // A process that is killed before it has begun receives no request.
            let _ = queue.begin().await;
            queue.serve().await;
        });
        SimulatedUblkProcess { device, serving, queue: weak }
    }

    /// Quiesces the queue, and checks that no I/O happens meanwhile.
    async fn rest(&self, process: &SimulatedUblkProcess) {
        let device = &process.device;
        device.set_quiescing(true);
        timeout(FOREVER, async {
            loop {
                let changed = device.changed.listen();
                if device.quiesced_queues.load(SeqCst) == 1 {
                    return;
                }
                changed.await;
            }
        })
        .await
        .expect("it comes to rest");
        let moved = self.export.disk.totals();
        sleep_randomly(Duration::from_millis(20)).await;
        assert_eq!(self.export.disk.totals(), moved, "something was done in a rest");
        self.count(|all| all.quiesces += 1);
    }

    async fn end(&self, process: SimulatedUblkProcess) {
        let SimulatedUblkProcess { device, serving, queue } = process;
        if chance(50) {
            self.count(|all| all.leaves += 1);
            device.shut_down(UblkShutdown::Leave);
            timeout(FOREVER, serving).await.expect("it leaves its device");
            assert_eq!(device.in_flight.load(SeqCst), 0, "requests are counted that are none");
            self.kernel.end_process();
        } else {
            self.count(|all| all.kills += 1);
            self.kernel.end_process();
            if device.is_quiescing() {
                // Requests that were put back are not started any more.
                device.shut_down(UblkShutdown::Leave);
            }
            // Its I/O must end first, or it would write concurrently with the next process; in
            // reality the file stays locked until then.
            timeout(FOREVER, serving).await.expect("what it has begun ends");
        }
        self.all_gone(&queue).await;
    }

    async fn all_gone(&self, queue: &Weak<UblkIoQueue>) {
        for _ in 0..1000 {
            if queue.strong_count() == 0 {
                return;
            }
            yield_now().await;
        }
        panic!("tasks of a queue that has ended");
    }

    /// One client, with one request at a time.
    async fn ask(self: Rc<Self>) {
        for _ in 0..sim::random(|random| random.usize(..40)) {
            if chance(5) {
                let settings = if chance(50) { PrefetchConfig::default() } else { PrefetchConfig::off() };
                self.export.disk.prefetch().set(settings).expect("valid");
            }
            self.send_random_request().await;
            self.samples.borrow_mut().sample();
            if chance(50) {
                sleep_randomly(Duration::from_millis(5)).await;
            }
        }
    }

    async fn send_random_request(&self) {
        const FUA: u32 = 1 << 13;
        let (first, sectors) = sim::random(|random| {
            let sectors = random.usize(1..=MAX_SECTORS);
            let last = DISK_BYTES / BLOCK - sectors;
            // Most requests are adjacent to an earlier one, so that they are merged.
            let follows = random.u8(..4) > 0 && self.next.get() <= last;
            (if follows { self.next.get() } else { random.usize(..=last) }, sectors)
        });
        self.next.set(first + sectors);
        let range = first * BLOCK..(first + sectors) * BLOCK;
        let descriptor = |operation| UblkDescriptor::new(operation, first as u64, sectors as u32);
        match sim::random(|random| random.u8(..12)) {
            0..4 => {
                let began = self.model.borrow_mut().begin();
                let (result, found) = self.kernel.ask(descriptor(0), Vec::new(), range.len()).await;
                if self.succeeded(result, range.len()) {
                    self.model.borrow().check_read(began, range.start, &found);
                }
            }
            4..8 => {
                let fua = chance(20);
                let (number, data) = self.model.borrow_mut().begin_write(range.clone());
                let operation = if fua { 1 | FUA } else { 1 };
                let (result, _) = self.kernel.ask(descriptor(operation), data, 0).await;
                let succeeded = self.succeeded(result, range.len());
                self.changed(number, succeeded, fua);
            }
            8 => {
                let number = self.model.borrow_mut().begin_zeroes(range.clone());
                let (result, _) = self.kernel.ask(descriptor(5), Vec::new(), 0).await;
                let succeeded = self.succeeded(result, range.len());
                self.changed(number, succeeded, false);
            }
            9 => {
                let number = self.model.borrow_mut().begin_zeroes(range.clone());
                let (result, _) = self.kernel.ask(descriptor(3), Vec::new(), 0).await;
                self.succeeded(result, range.len());
                self.model.borrow_mut().end_change(number, Outcome::Open);
            }
            10 => {
                let began = self.model.borrow_mut().begin();
                let (result, _) = self.kernel.ask(UblkDescriptor::new(2, 0, 0), Vec::new(), 0).await;
                if self.succeeded(result, 0) {
                    self.model.borrow_mut().end_flush(began);
                    self.count(|all| all.flushed += 1);
                }
            }
            _ => {
                let past_end = UblkDescriptor::new(1, (DISK_BYTES / BLOCK) as u64, 1);
                let (result, _) = self.kernel.ask(past_end, vec![1; BLOCK], 0).await;
                assert_eq!(result, -libc::EIO, "a write behind the end");
            }
        }
    }

    fn changed(&self, number: usize, succeeded: bool, fua: bool) {
        let outcome = match succeeded {
            false => Outcome::Open,
            true if fua || !self.export.offer.write_cache => Outcome::Durable,
            true => Outcome::Applied,
        };
        self.model.borrow_mut().end_change(number, outcome);
    }

    fn succeeded(&self, result: i32, bytes: usize) -> bool {
        self.count(|all| all.answered += 1);
        if result < 0 {
            assert!(self.may_fail, "it failed with {result}, and nothing may");
            self.count(|all| all.failed += 1);
        } else {
            assert_eq!(result as usize, bytes, "a request was done in part");
        }
        result >= 0
    }
}
