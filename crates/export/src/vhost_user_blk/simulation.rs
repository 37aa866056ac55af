//! Simulated machines and their disks: rings in memory that front ends remap, queues that are
//! stopped, abandoned and killed, and hostile guests.
//!
//! - Every request of a well-behaved guest completes exactly once with the right status, however
//!   often its queue ends in between; reads agree with the model of the disk, and flushed data
//!   survives a crash (`machine`).
//! - Writes to a guest's memory are in the dirty log, whenever the log begins.
//! - Hostile guests (`hostile`) on the same disk, or in the same group, affect no other guest.
//! - The group's limits hold.
//! - Every queue ends when ordered to, and none of its tasks is left.
//!
//! Events are simulated; the rest of a queue is the production code. `WEIR_SEED=n` runs one seed,
//! `WEIR_SEEDS=n` the first n. A failure prints the command that repeats it.

mod hostile;
mod machine;

use std::{
    cell::{Cell, RefCell},
    rc::{Rc, Weak},
    sync::Arc,
};

use policy::{throttle::NodeShare, time::Duration};

use self::{hostile::HostileGuest, machine::SimulatedGuest};
use super::{
    device::{VhostUserDevice, VhostUserExport},
    features::VhostUserOffer,
    queue::{QueueOrder, VhostUserQueue},
    session::EventKind,
    vring::RingSettings,
};
use crate::{
    model::Model,
    passed::GroupSamples,
    random::{self, chance, sleep_randomly},
    seeds,
};
use ::virtio::ring::access_hook::with_hook;
use block::{
    disk::{Disk, ErrorPolicies, OnError},
    layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup},
};
use image::{Image, RawImage};
use reactor::{
    JoinHandle,
    guest::{DirtyLog, GuestBytes},
    now, sim, sleep_until, spawn_joinable, timeout,
};
use storage::{
    Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

const FOREVER: Duration = Duration::from_secs(24 * 3600);
const BLOCK: usize = 512;
const DISK_BYTES: usize = 128 * BLOCK;
/// Maximum length of merged requests, in bytes.
const MAX_REQUEST: u64 = 256 << 10;
const SERIAL: &str = "a serial number that is too long";

/// Events counted over all seeds; the test fails if one of them is too rare.
#[derive(Clone, Copy, Debug, Default)]
struct VhostUserSimulationCounts {
    answered: u64,
    failed: u64,
    flushed: u64,
    logged: u64,
    called: u64,
    stops: u64,
    abandoned: u64,
    kills: u64,
    /// Rings that were started with requests of the previous queue.
    resumed: u64,
    waited: u64,
    /// Requests taken from hostile guests, and their rings that broke.
    attacks: u64,
    broken: u64,
}

#[test]
fn guests_are_served_whatever_others_do() {
    let counts = Rc::new(Cell::new(VhostUserSimulationCounts::default()));
    let seeds = seeds::for_each("--lib", 600, |seed| {
        let volatile_memory = VolatileMemory::default();
        let world = run(Rc::clone(&counts), Rc::clone(&volatile_memory));
        let mut random = fastrand::Rng::with_seed(!seed);
        // Hostile memory also changes while the device reads it.
        let change = move |_| {
            if random.u8(..) == 0
                && let Some(target) = random.choice(&*volatile_memory.borrow())
            {
                target.write(random.usize(..target.bytes()), &[random.u8(..)]);
            }
        };
        with_hook(change, || sim::run(seed, world));
    });
    let all = counts.get();
    if seeds >= 100 {
        let happened = [
            all.answered / 10,
            all.failed,
            all.flushed,
            all.logged,
            all.called,
            all.stops,
            all.abandoned,
            all.kills,
            all.resumed,
            all.waited,
            all.attacks / 10,
            all.broken,
        ];
        assert!(happened.iter().all(|&count| count > seeds / 10), "too little happened: {all:?}");
    }
}

fn count(counts: &Cell<VhostUserSimulationCounts>, change: impl FnOnce(&mut VhostUserSimulationCounts)) {
    let mut all = counts.get();
    change(&mut all);
    counts.set(all);
}

/// Memory that changes at any time.
type VolatileMemory = Rc<RefCell<Vec<GuestBytes>>>;

async fn run(counts: Rc<Cell<VhostUserSimulationCounts>>, volatile_memory: VolatileMemory) {
    let settings = GroupSettings { limits: random::limits(30), ..GroupSettings::default() };
    let group = ThrottleGroup::new("group", settings, None).expect("drawn valid");
    let samples = Rc::new(RefCell::new(GroupSamples::new(&group, MAX_REQUEST)));
    let lives: Vec<_> = (0..sim::random(|random| random.usize(1..=2)))
        .map(|_| spawn_joinable(SimulatedDiskLife::draw(&group, &counts, &samples, &volatile_memory).run()))
        .collect();
    for life in lives {
        timeout(FOREVER, life).await.expect("every request completes within a day of virtual time");
    }
    samples.borrow().check();
    let stats = group.stats();
    count(&counts, |all| all.waited += stats.reads.throttled + stats.writes.throttled);
}

/// One disk, the guests that use it, and a model of its content.
struct SimulatedDiskLife {
    disk: Arc<Disk>,
    storage: SimulatedStorage,
    hostile: Vec<JoinHandle<()>>,
    model: Rc<RefCell<Model>>,
    may_fail: bool,
    /// The guests' choice of the write cache, and the number of changes.
    cache: Rc<Cell<(bool, u64)>>,
    device: Arc<VhostUserDevice>,
    samples: Rc<RefCell<GroupSamples>>,
    counts: Rc<Cell<VhostUserSimulationCounts>>,
}

impl SimulatedDiskLife {
    fn draw(
        group: &Arc<ThrottleGroup>,
        tally: &Rc<Cell<VhostUserSimulationCounts>>,
        passed: &Rc<RefCell<GroupSamples>>,
        volatile_memory: &VolatileMemory,
    ) -> Self {
        let may_fail = chance(30);
        let error_probability = if may_fail { sim::random(fastrand::Rng::f64) / 8.0 } else { 0.0 };
        let latency = Duration::from_micros(sim::random(|random| random.u64(..2000)));
        let content: Vec<u8> = sim::random(|random| (0..DISK_BYTES).map(|_| random.u8(..)).collect());
        let behaviour = Behaviour { block_bytes: BLOCK, latency, error_probability };
        let (storage, disk) = open(content.clone(), behaviour, group);
        let device = export(&disk, false);
        let mut hostile = Vec::new();
        for _ in 0..sim::random(|random| random.usize(..=2)) {
            let guest = if chance(50) {
                // On the same disk, read-only.
                HostileGuest::new(export(&disk, true), tally, volatile_memory)
            } else {
                let (_, other) = open(vec![0; DISK_BYTES], behaviour, group);
                HostileGuest::new(export(&other, false), tally, volatile_memory)
            };
            hostile.push(spawn_joinable(guest.run()));
        }
        Self {
            disk,
            storage,
            hostile,
            model: Rc::new(RefCell::new(Model::new(content, BLOCK))),
            may_fail,
            cache: Rc::new(Cell::new((device.offer().write_cache, 0))),
            device,
            samples: Rc::clone(passed),
            counts: Rc::clone(tally),
        }
    }

    async fn run(mut self) {
        let resuming = (self.may_fail && chance(30)).then(|| {
            // With the stop policy, requests do not fail.
            self.may_fail = false;
            let policies = ErrorPolicies { read: OnError::Stop, write: OnError::Stop };
            self.disk.failures().set_policies(policies);
            let disk = Arc::clone(&self.disk);
            spawn_joinable(async move {
                loop {
                    sleep_randomly(Duration::from_millis(100)).await;
                    disk.failures().resume();
                }
            })
        });
        let machines: Vec<_> = (0..sim::random(|random| random.usize(1..=2)))
            .map(|_| {
                let machine = SimulatedGuest::draw(&self);
                spawn_joinable(SimulatedFrontEnd::new(machine, Rc::clone(&self.counts)).run())
            })
            .collect();
        let mut killed = false;
        for machine in machines {
            killed |= machine.await;
        }
        for hostile in self.hostile {
            hostile.await;
        }
        let in_flight = self.device.in_flight.load(std::sync::atomic::Ordering::SeqCst);
        assert!(killed || in_flight == 0, "{in_flight} requests are still counted");
        self.model.borrow_mut().crash(self.storage.crash());
        if let Some(resuming) = resuming {
            resuming.cancel().await;
        }
    }
}

fn open(content: Vec<u8>, behaviour: Behaviour, group: &Arc<ThrottleGroup>) -> (SimulatedStorage, Arc<Disk>) {
    let storage = SimulatedStorage::new(content, behaviour);
    let image = Image::Raw(RawImage::new(Storage::Simulated(Align::new(storage.clone()))));
    let share = NodeShare::new(sim::random(|random| random.u32(1..1000))).expect("in range");
    let reserved = share.with_reservation(sim::random(|random| random.u64(..10)), 0);
    let settings = DiskSettings { share: reserved, ..DiskSettings::default() };
    // A group without limits accepts any reservation.
    let disk = Disk::new("disk", image, settings, Some(group));
    (storage, Arc::new(disk.expect("the group accepts the reservation")))
}

fn export(disk: &Arc<Disk>, read_only: bool) -> Arc<VhostUserDevice> {
    let offer = VhostUserOffer {
        size_bytes: DISK_BYTES as u64,
        read_only,
        write_cache: chance(80),
        ..VhostUserOffer::default()
    };
    Arc::new(VhostUserDevice::new(VhostUserExport {
        id: "vm".into(),
        disk: Arc::clone(disk),
        offer,
        serial: SERIAL.into(),
    }))
}

/// A front end as a queue sees it: starts the queue, ends it in one of several ways, and replaces
/// its memory and events while it runs.
struct SimulatedFrontEnd {
    machine: Rc<SimulatedGuest>,
    counts: Rc<Cell<VhostUserSimulationCounts>>,
    /// Value for SET_VRING_BASE.
    base: u32,
    killed: bool,
}

/// A running queue.
struct RunningQueue {
    orders: async_channel::Sender<QueueOrder>,
    serving: JoinHandle<u32>,
    /// Upgradable while any task of the queue is left.
    queue: Weak<VhostUserQueue>,
}

impl SimulatedFrontEnd {
    fn new(machine: Rc<SimulatedGuest>, counts: Rc<Cell<VhostUserSimulationCounts>>) -> Self {
        Self { base: machine.start(), machine, counts, killed: false }
    }

    /// Runs to the end; true if a queue was killed.
    async fn run(mut self) -> bool {
        let guest = spawn_joinable(Rc::clone(&self.machine).run());
        for _ in 0..sim::random(|random| random.usize(..6)) {
            let running = self.start();
            self.change_repeatedly(&running).await;
            self.machine.wait_random_moment().await;
            self.end(running).await;
            if chance(70) {
                sleep_randomly(Duration::from_millis(20)).await;
            }
        }
        let running = self.start();
        self.change_repeatedly(&running).await;
        guest.await;
        self.stop(running).await;
        self.killed
    }

    fn start(&mut self) -> RunningQueue {
        let machine = &self.machine;
        if machine.has_inflight() && machine.has_pending_requests() {
            count(&self.counts, |all| all.resumed += 1);
        }
        let (memory, areas) = machine.map();
        let settings = RingSettings {
            size: machine.shape.size,
            areas,
            memory,
            features: machine.features(),
            base: self.base,
            inflight: machine.inflight(),
            loss: None,
            kick: None,
            call: None,
            error: None,
        };
        let queue = VhostUserQueue::new(0, settings, Arc::clone(&machine.device)).expect("a good ring");
        let (kick, call) = (self.machine.new_kick(), self.machine.new_call());
        queue.set_simulated_events(kick.map(|counter| counter.vring_event()), call.vring_event());
        let (orders, received) = async_channel::unbounded();
        RunningQueue { orders, queue: Rc::downgrade(&queue), serving: spawn_joinable(queue.serve(received)) }
    }

    /// Replaces an event of a ring.
    fn replace_event(&self, running: &RunningQueue, kind: EventKind) {
        let event = match kind {
            EventKind::Kick => self.machine.new_kick(),
            _ => Some(self.machine.new_call()),
        };
        let order = QueueOrder::Event(kind, event.map(|counter| counter.vring_event()));
        running.orders.try_send(order).expect("the queue runs");
    }

    async fn change_repeatedly(&self, running: &RunningQueue) {
        for _ in 0..sim::random(|random| random.usize(..4)) {
            self.machine.wait_random_moment().await;
            self.change(running).await;
        }
    }

    async fn change(&self, running: &RunningQueue) {
        match sim::random(|random| random.u8(..4)) {
            0 => self.replace_event(running, EventKind::Kick),
            1 => self.replace_event(running, EventKind::Call),
            2 => self.machine.switch_write_cache(),
            _ => {
                // Other mappings of the same memory, with another log or none from now on.
                let log = chance(70).then(|| DirtyLog::on_heap(64));
                self.machine.log_changes();
                let (memory, areas) = self.machine.map_with(log.clone());
                let (in_use, is_in_use) = async_channel::bounded(1);
                let order = QueueOrder::Memory(memory, areas, in_use);
                running.orders.try_send(order).expect("the queue runs");
                let _ = timeout(FOREVER, is_in_use.recv()).await.expect("the memory is replaced");
                self.machine.set_log(log);
            }
        }
    }

    async fn end(&mut self, running: RunningQueue) {
        // Without an in-flight area, a guest loses the requests that a queue leaves.
        match sim::random(|random| random.u8(..4)) {
            1 if self.machine.has_inflight() => {
                count(&self.counts, |all| all.abandoned += 1);
                let was_stopped = chance(30);
                if was_stopped {
                    running.orders.try_send(QueueOrder::Stop { abandoned: false }).expect("the queue runs");
                    sleep_randomly(Duration::from_millis(5)).await;
                }
                if chance(50) {
                    let _ = running.orders.try_send(QueueOrder::Stop { abandoned: true });
                } else {
                    drop(running.orders);
                }
                let end = timeout(FOREVER, running.serving).await;
                let base = end.expect("a queue ends without its front end");
                // If it had stopped before, its front end has received the base.
                if was_stopped && !self.machine.is_inflight_in_use() {
                    self.base = base;
                }
                assert_eq!(running.queue.strong_count(), 0, "tasks of a queue that has ended");
            }
            2 if self.machine.has_inflight() => {
                count(&self.counts, |all| all.kills += 1);
                self.killed = true;
                drop(running.serving);
                // Its I/O ends before the front end is notified; otherwise it would write
                // concurrently with the next queue.
                while running.queue.strong_count() > 0 {
                    sleep_until(now() + Duration::from_millis(1)).await;
                }
            }
            _ => self.stop(running).await,
        }
    }

    async fn stop(&mut self, running: RunningQueue) {
        count(&self.counts, |all| all.stops += 1);
        running.orders.try_send(QueueOrder::Stop { abandoned: false }).expect("the queue runs");
        let end = timeout(FOREVER, running.serving).await;
        self.base = end.expect("the queue ends on request");
        assert_eq!(running.queue.strong_count(), 0, "tasks of a queue that has ended");
        assert!(!self.machine.is_inflight_in_use(), "the in-flight area contradicts the base");
    }
}
