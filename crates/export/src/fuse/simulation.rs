//! Simulated kernels and their disk: programs that read and write, get signals and are killed,
//! queues that are stopped, file systems that are unmounted under load, and malformed messages.
//!
//! - Every request is answered exactly once, correctly, by the queue that read it; reads agree with
//!   the model of the disk, and data covered by an fsync or O_DSYNC survives a crash.
//! - A request that is interrupted while it waits for limits ends at once without an effect.
//! - The group's limits hold.
//! - A quiesced export does no I/O, and continues here or in another process in the same state.
//! - Every queue ends with nothing in flight and no memory held.
//!
//! `WEIR_SEED=n` runs one seed, `WEIR_SEEDS=n` the first n. A failure prints the command that
//! repeats it.

mod cuts;
pub(super) mod kernel;

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::{Arc, atomic::Ordering::SeqCst},
};

use block::{
    disk::Disk,
    layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup},
};
use image::{Image, RawImage};
use policy::time::Duration;
use reactor::{JoinHandle, sim, spawn_joinable, timeout};
use storage::{
    Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

use self::kernel::SimulatedFuseConnection;
use super::{
    channel::FuseChannel,
    device::{FuseDevice, FuseExport, FuseFileOwner},
    encode,
    queue::{FuseQueue, FuseQueueEnd},
};
use crate::{
    model::{Model, Outcome},
    passed::GroupSamples,
    random::{self, chance, sleep_randomly},
    seeds,
};

const FOREVER: Duration = Duration::from_secs(24 * 3600);
const BLOCK: usize = 512;
const DISK_BYTES: usize = 128 * BLOCK;
const MAX_REQUEST: u64 = 256 << 10;

/// `FUSE_…`
const SETATTR: u32 = 4;
const READ: u32 = 15;
const WRITE: u32 = 16;
const FSYNC: u32 = 20;
const INTERRUPT: u32 = 36;
const FALLOCATE: u32 = 43;
const LSEEK: u32 = 46;

/// Events counted over all seeds; the test fails if one of them is too rare.
#[derive(Clone, Copy, Debug, Default)]
struct FuseSimulationCounts {
    answered: u64,
    failed: u64,
    flushed: u64,
    interrupted: u64,
    stopped: u64,
    unmounted: u64,
    merged: u64,
    waited: u64,
    quiesces: u64,
    put_back: u64,
    taken_over: u64,
}

#[test]
fn programs_are_served_whatever_happens() {
    let counts = Rc::new(Cell::new(FuseSimulationCounts::default()));
    let seeds = seeds::for_each("--lib", 600, |seed| {
        sim::run(seed, run(Rc::clone(&counts)));
    });
    let all = counts.get();
    if seeds >= 100 {
        let FuseSimulationCounts {
            answered,
            failed,
            flushed,
            interrupted,
            stopped,
            unmounted,
            merged,
            waited,
            ..
        } = all;
        let FuseSimulationCounts { quiesces: rests, put_back, taken_over, .. } = all;
        let happened = [answered / 10, failed, flushed, interrupted, stopped, unmounted, merged, waited];
        let happened = [&happened[..], &[rests, put_back, taken_over]].concat();
        assert!(happened.iter().all(|&count| count > seeds / 10), "too little happened: {all:?}");
    }
}

fn count(counts: &Cell<FuseSimulationCounts>, change: impl FnOnce(&mut FuseSimulationCounts)) {
    let mut all = counts.get();
    change(&mut all);
    counts.set(all);
}

/// A file system, the programs that use it, and a model of the disk's content.
struct FuseWorld {
    device: RefCell<Arc<FuseDevice>>,
    queues: RefCell<Vec<JoinHandle<FuseQueueEnd>>>,
    connection: Rc<SimulatedFuseConnection>,
    model: RefCell<Model>,
    samples: RefCell<GroupSamples>,
    may_fail: bool,
    /// True once the export is stopped or unmounted while requests are in flight.
    is_ended: Cell<bool>,
    counts: Rc<Cell<FuseSimulationCounts>>,
}

async fn run(tally: Rc<Cell<FuseSimulationCounts>>) {
    let settings = GroupSettings { limits: random::limits(40), ..GroupSettings::default() };
    let group = ThrottleGroup::new("group", settings, None).expect("drawn valid");
    let may_fail = chance(30);
    let error_probability = if may_fail { sim::random(fastrand::Rng::f64) / 8.0 } else { 0.0 };
    let latency = Duration::from_micros(sim::random(|random| random.u64(..2000)));
    let content: Vec<u8> = sim::random(|random| (0..DISK_BYTES).map(|_| random.u8(..)).collect());
    let behaviour = Behaviour { block_bytes: BLOCK, latency, error_probability };
    let (storage, disk) = open(content.clone(), behaviour, &group);
    let (_, other) = open(vec![0; DISK_BYTES], behaviour, &group);
    let world = Rc::new(FuseWorld {
        device: RefCell::new(device(&disk)),
        queues: RefCell::default(),
        connection: Rc::default(),
        model: RefCell::new(Model::new(content, BLOCK)),
        samples: RefCell::new(GroupSamples::new(&group, MAX_REQUEST)),
        may_fail,
        is_ended: Cell::new(false),
        counts: Rc::clone(&tally),
    });
    let (hostile, hostile_connection) = (device(&other), Rc::<SimulatedFuseConnection>::default());
    let serve = |device: &Arc<FuseDevice>, connection: &Rc<SimulatedFuseConnection>| {
        let channel = FuseChannel::Simulated(connection.descriptor());
        spawn_joinable(FuseQueue::new(Arc::clone(device), channel).serve())
    };
    for _ in 0..sim::random(|random| random.usize(1..=3)) {
        let queue = serve(&world.device.borrow(), &world.connection);
        world.queues.borrow_mut().push(queue);
    }
    let hostile_queue = serve(&hostile, &hostile_connection);
    let programs: Vec<_> = (0..sim::random(|random| random.usize(1..=6)))
        .map(|_| spawn_joinable(Rc::clone(&world).program()))
        .collect();
    let noise_task = spawn_joinable(send_random_messages(Rc::clone(&hostile_connection)));
    for _ in 0..sim::random(|random| random.usize(..4)) {
        sleep_randomly(Duration::from_millis(50)).await;
        world.rest(&disk).await;
    }
    if chance(40) {
        sleep_randomly(Duration::from_secs(1)).await;
        world.end().await;
    }
    let queues = world.queues.take();
    let mut all = Vec::new();
    // Requests that a stopped queue has not read are answered when the device is closed.
    if world.is_ended.get() {
        for queue in queues {
            all.push(timeout(FOREVER, queue).await.expect("a queue ends"));
        }
        assert_eq!(world.connection.unanswered(), 0, "requests that were read and not answered");
        world.connection.unmount();
        for program in programs {
            timeout(FOREVER, program).await.expect("every program ends");
        }
    } else {
        for program in programs {
            timeout(FOREVER, program).await.expect("every program ends within a day of virtual time");
        }
        world.connection.unmount();
        for queue in queues {
            all.push(timeout(FOREVER, queue).await.expect("a queue ends"));
        }
    }
    assert!(all.iter().all(|end| matches!(end, FuseQueueEnd::Gone | FuseQueueEnd::Stopped)), "{all:?}");
    noise_task.await;
    hostile_connection.unmount();
    timeout(FOREVER, hostile_queue).await.expect("a queue ends");
    for (device, disk) in [(&*world.device.borrow(), &disk), (&hostile, &other)] {
        assert_eq!(device.in_flight.load(SeqCst), 0);
        assert_eq!(disk.memory().used(), 0, "memory was not released");
    }
    world.model.borrow_mut().crash(storage.crash());
    world.samples.borrow().check();
    let stats = group.stats();
    count(&tally, |all| {
        all.waited += stats.reads.throttled + stats.writes.throttled;
        all.merged += disk.totals().merged_requests;
    });
}

fn open(content: Vec<u8>, behaviour: Behaviour, group: &Arc<ThrottleGroup>) -> (SimulatedStorage, Arc<Disk>) {
    let storage = SimulatedStorage::new(content, behaviour);
    let image = Image::Raw(RawImage::new(Storage::Simulated(Align::new(storage.clone()))));
    let disk = Disk::new("disk", image, DiskSettings::default(), Some(group));
    (storage, Arc::new(disk.expect("nothing is reserved")))
}

fn device(disk: &Arc<Disk>) -> Arc<FuseDevice> {
    let owner = FuseFileOwner { permissions: 0o600, uid: 0, gid: 0 };
    let disk = Arc::clone(disk);
    Arc::new(FuseDevice::new(FuseExport {
        id: "file".into(),
        disk,
        read_only: false,
        growable: false,
        owner,
    }))
}

impl FuseWorld {
    /// Quiesces everything, and continues in the same or another process.
    async fn rest(&self, disk: &Arc<Disk>) {
        let device = Arc::clone(&self.device.borrow());
        let queues = self.queues.borrow().len();
        device.set_quiescing(true);
        let at_rest = async {
            loop {
                let changed = device.clients_changed.listen();
                if device.quiesced_queue_count() == queues {
                    return;
                }
                changed.await;
            }
        };
        timeout(FOREVER, at_rest).await.expect("it comes to rest");
        let totals = disk.totals();
        sleep_randomly(Duration::from_millis(20)).await;
        assert_eq!(disk.totals(), totals, "something was done in a rest");
        let state = device.state();
        let put_back = encode::split(&state.messages).expect("they are messages").len() as u64;
        assert!(put_back <= self.connection.unanswered() as u64, "more is put back than was asked");
        // With one queue, its descriptor can be passed on, as the server does in an upgrade.
        let is_taken_over = queues == 1 && chance(50);
        count(&self.counts, |all| {
            all.quiesces += 1;
            all.put_back += put_back;
            all.taken_over += u64::from(is_taken_over);
        });
        if !is_taken_over {
            device.set_quiescing(false);
            return;
        }
        assert_eq!(device.in_flight.load(SeqCst), 0);
        let old_queue = self.queues.take().remove(0);
        old_queue.cancel().await;
        let new_device = self::device(disk);
        assert!(new_device.restore(&state));
        let channel = FuseChannel::Simulated(self.connection.descriptor_with_number(0));
        self.queues
            .borrow_mut()
            .push(spawn_joinable(FuseQueue::new(Arc::clone(&new_device), channel).serve()));
        *self.device.borrow_mut() = new_device;
    }

    async fn end(&self) {
        self.is_ended.set(true);
        if chance(50) {
            count(&self.counts, |all| all.stopped += 1);
            self.device.borrow().stop();
        } else {
            count(&self.counts, |all| all.unmounted += 1);
            self.connection.unmount();
        }
    }

    /// Sends requests, singly or several at once.
    async fn program(self: Rc<Self>) {
        for _ in 0..sim::random(|random| random.usize(1..12)) {
            let tasks: Vec<_> = (0..sim::random(|random| random.usize(1..=8)))
                .map(|number| spawn_joinable(Rc::clone(&self).request(number)))
                .collect();
            for request in tasks {
                request.await;
            }
            if chance(30) {
                sleep_randomly(Duration::from_millis(20)).await;
            }
        }
    }

    async fn request(self: Rc<Self>, number: usize) {
        self.samples.borrow_mut().sample();
        // Requests sent together are often adjacent.
        let blocks = sim::random(|random| random.usize(1..=8));
        let (start, length) = if chance(50) {
            (number * 8 * BLOCK, 8 * BLOCK)
        } else {
            let start = sim::random(|random| random.usize(..DISK_BYTES));
            (start, (blocks * BLOCK).min(DISK_BYTES - start))
        };
        let range = start..start + length;
        match sim::random(|random| random.u8(..10)) {
            0..4 => {
                let began = self.model.borrow_mut().begin();
                let body = read_or_write(range.start, length, 0);
                if let Some(found) = self.request_reply(READ, &body, &[]).await {
                    assert_eq!(found.len(), length, "it lies inside the disk");
                    self.model.borrow().check_read(began, range.start, &found);
                }
            }
            4..8 => {
                let durable = chance(20);
                let flags = if durable { libc::O_DSYNC } else { 0 };
                let (change, data) = self.model.borrow_mut().begin_write(range.clone());
                let body = read_or_write(range.start, length, flags as u32);
                let outcome = match self.request_reply(WRITE, &body, &data).await {
                    Some(reply) => {
                        assert_eq!(reply[..4], (length as u32).to_ne_bytes(), "all was written");
                        if durable { Outcome::Durable } else { Outcome::Applied }
                    }
                    None => Outcome::Open,
                };
                self.model.borrow_mut().end_change(change, outcome);
            }
            8 => {
                let change = self.model.borrow_mut().begin_zeroes(range.clone());
                let mode = if chance(50) {
                    libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE
                } else {
                    libc::FALLOC_FL_ZERO_RANGE
                };
                let mut body = vec![0; 32];
                body[8..16].copy_from_slice(&(range.start as u64).to_ne_bytes());
                body[16..24].copy_from_slice(&(length as u64).to_ne_bytes());
                body[24..28].copy_from_slice(&mode.to_ne_bytes());
                let done = self.request_reply(FALLOCATE, &body, &[]).await;
                let outcome = if done.is_some() { Outcome::Applied } else { Outcome::Open };
                self.model.borrow_mut().end_change(change, outcome);
            }
            _ => {
                let began = self.model.borrow_mut().begin();
                if self.request_reply(FSYNC, &[0; 16], &[]).await.is_some() {
                    count(&self.counts, |all| all.flushed += 1);
                    self.model.borrow_mut().end_flush(began);
                }
            }
        }
    }

    /// Body of the reply; `None` if the request failed with an expected error.
    async fn request_reply(&self, opcode: u32, body: &[u8], data: &[u8]) -> Option<Vec<u8>> {
        let unique = self.connection.send(opcode, body, data, true);
        if self.is_ended.get() {
            // It may have been sent too late to be read.
            return self.connection.answer(unique).await.ok();
        }
        let mut is_interrupted = false;
        let result = if chance(10) {
            let delay = Duration::from_nanos(sim::random(|random| random.u64(..50_000_000)));
            match timeout(delay, self.connection.answer(unique)).await {
                Ok(result) => result,
                Err(_) => {
                    is_interrupted = true;
                    self.connection.send(INTERRUPT, &unique.to_ne_bytes(), &[], false);
                    self.connection.answer(unique).await
                }
            }
        } else {
            self.connection.answer(unique).await
        };
        match result {
            Ok(reply) => {
                count(&self.counts, |all| all.answered += 1);
                return Some(reply);
            }
            // Only requests that were interrupted may fail with EINTR.
            Err(libc::EINTR) if is_interrupted => count(&self.counts, |all| all.interrupted += 1),
            Err(_) if self.is_ended.get() => {}
            Err(libc::EIO) if self.may_fail => count(&self.counts, |all| all.failed += 1),
            Err(errno) => panic!("opcode {opcode} failed with {errno}"),
        }
        None
    }
}

/// `fuse_read_in` or `fuse_write_in`.
fn read_or_write(offset: usize, length: usize, flags: u32) -> Vec<u8> {
    let mut body = vec![0; 40];
    body[8..16].copy_from_slice(&(offset as u64).to_ne_bytes());
    body[16..20].copy_from_slice(&(length as u32).to_ne_bytes());
    body[32..36].copy_from_slice(&flags.to_ne_bytes());
    body
}

/// Malformed messages: of any length, with any numbers.
async fn send_random_messages(hostile_connection: Rc<SimulatedFuseConnection>) {
    const OPCODES: [u32; 7] = [SETATTR, READ, WRITE, FSYNC, INTERRUPT, FALLOCATE, LSEEK];
    for _ in 0..sim::random(|random| random.usize(..40)) {
        let mut message: Vec<u8> = sim::random(|random| {
            let length = random.usize(..300);
            (0..length).map(|_| if random.bool() { 0 } else { random.u8(..) }).collect()
        });
        let length = message.len();
        if let Some(length_field) = message.get_mut(..4)
            && chance(90)
        {
            length_field.copy_from_slice(&(length as u32).to_ne_bytes());
        }
        if let Some(opcode) = message.get_mut(4..8) {
            let drawn = sim::random(|random| *random.choice(&OPCODES).expect("there are some"));
            opcode.copy_from_slice(&drawn.to_ne_bytes());
        }
        hostile_connection.send_raw(message);
        if chance(20) {
            sleep_randomly(Duration::from_millis(10)).await;
        }
    }
}
