//! A disk through several crashes, with streams one after another.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use block::{
    disk::Disk,
    layer::throttle::{BackgroundSettings, DiskSettings},
};
use image::Image;
use jobs::{
    job::{Job, JobKind, JobResult, JobState},
    stream::{Stream, StreamBase},
};
use policy::time::Duration;
use reactor::{JoinHandle, now, sim, sleep_until, spawn_joinable, timeout};
use storage::simulated::{Behaviour, SimulatedStorage};

use crate::{
    chain::{BLOCK_BYTES, Chain},
    client::{Client, EventCounts, Shared, chance, draw_prefetch, short_time},
    references, seeds,
};

/// Longer than any run.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

/// Streams of all seeds, and crashes.
#[derive(Clone, Copy, Debug, Default)]
struct StreamCounts {
    completed: u64,
    /// Of these, with an image that stayed below.
    up_to: u64,
    cancelled: u64,
    failed: u64,
    /// Bytes that were copied.
    copied: u64,
}

#[test]
fn chains_become_shorter_and_disks_survive_crashes() {
    let counts = Rc::new(RefCell::new(EventCounts::default()));
    let streams = Rc::new(Cell::new(StreamCounts::default()));
    let seeds = seeds::for_each("--test streams", 300, |seed| {
        let (counts, streams) = (Rc::clone(&counts), Rc::clone(&streams));
        sim::run(seed, async move {
            let life = DiskLife::draw(&counts, streams).await;
            timeout(FOREVER, life.run())
                .await
                .expect("every request is answered within a day of virtual time");
        });
    });
    let (counts, streams) = (*counts.borrow(), streams.get());
    if seeds >= 100 {
        let StreamCounts { completed, up_to, cancelled, failed, copied } = streams;
        let enough = [counts.failed, counts.cancelled, counts.flushed, counts.crashes, completed, up_to];
        assert!(
            enough.iter().all(|&count| count > seeds / 20)
                && [cancelled, failed].iter().all(|&count| count > seeds / 100)
                && copied > seeds * 1024,
            "too little happened in {seeds} seeds: {counts:?}, {streams:?}"
        );
    }
}

struct DiskLife {
    shared: Rc<Shared>,
    behaviour: Behaviour,
    chain: Chain,
    size_bytes: usize,
    clients: usize,
    crashes: usize,
    streams: Rc<Cell<StreamCounts>>,
}

impl DiskLife {
    async fn draw(counts: &Rc<RefCell<EventCounts>>, streams: Rc<Cell<StreamCounts>>) -> Self {
        let chain = Chain::draw().await;
        let image = chain.open_in_memory(true).await;
        let size_bytes = image.size_bytes() as usize;
        let content = image.read(0, size_bytes).await.expect("memory").to_vec();
        let errors = if chance(30) { sim::random(fastrand::Rng::f64) / 30.0 } else { 0.0 };
        let latency = Duration::from_micros(sim::random(|random| random.u64(..2000)));
        let shared = Shared::new(content, BLOCK_BYTES, counts, errors > 0.0);
        Self {
            shared: Rc::new(shared),
            behaviour: Behaviour { block_bytes: BLOCK_BYTES, latency, error_probability: errors },
            chain,
            size_bytes,
            clients: sim::random(|random| random.usize(1..=4)),
            crashes: sim::random(|random| random.usize(1..=3)),
            streams,
        }
    }

    async fn run(mut self) {
        for _ in 0..self.crashes {
            let Some((devices, disk)) = self.open().await else { continue };
            let (clients, operator) = self.start(&disk);
            sleep_until(now() + short_time()).await;
            if chance(50) {
                operator.cancel().await;
                stop(clients).await;
                self.crash(&devices).await;
            } else {
                let content = crash(&devices);
                // Cancels them: nothing is acknowledged after the crash.
                drop((operator, clients));
                self.check_crash(content).await;
            }
        }
        let Some((devices, disk)) = self.open().await else { return };
        let (clients, operator) = self.start(&disk);
        for client in clients {
            client.await;
        }
        operator.await;
        let client = Client { disk: Arc::clone(&disk), shared: Rc::clone(&self.shared) };
        client.read(0..self.size_bytes).await;
        // Repeated, since an injected error may fail a flush.
        while !client.flush().await && !disk.image().is_read_only() {}
        self.crash(&devices).await;
        self.stream_all().await;
    }

    /// Opens the chain; `None` if an injected error prevented it, for another attempt.
    async fn open(&self) -> Option<(Vec<SimulatedStorage>, Arc<Disk>)> {
        self.shared.sent.iter().chain(&self.shared.succeeded).for_each(|count| count.set(0));
        match self.chain.open_on_devices(self.behaviour).await {
            Ok((image, devices)) => {
                let disk = Disk::new("disk", image, DiskSettings::default(), None).expect("no reservations");
                disk.prefetch().set(draw_prefetch()).expect("in range");
                Some((devices, Arc::new(disk)))
            }
            Err(why) => {
                assert!(self.shared.may_fail, "{why}");
                None
            }
        }
    }

    fn start(&self, disk: &Arc<Disk>) -> (Vec<JoinHandle<()>>, JoinHandle<()>) {
        let client = || Client { disk: Arc::clone(disk), shared: Rc::clone(&self.shared) };
        let requests = || sim::random(|random| random.usize(1..40));
        let clients = (0..self.clients).map(|_| spawn_joinable(client().run(requests()))).collect();
        let operator = Operator {
            disk: Arc::clone(disk),
            may_fail: self.shared.may_fail,
            streams: Rc::clone(&self.streams),
        };
        (clients, spawn_joinable(operator.run(sim::random(|random| random.usize(1..4)))))
    }

    /// Crashes all devices at once, and compares what is left with the model. No client may be
    /// running.
    async fn crash(&mut self, devices: &[SimulatedStorage]) {
        self.check_crash(crash(devices)).await;
    }

    async fn check_crash(&mut self, content: Vec<Vec<u8>>) {
        for (layer, content) in self.chain.0.iter_mut().zip(content) {
            layer.content = content;
        }
        for number in self.chain.numbers().await {
            if !self.chain.0[number].is_raw {
                references::of(&self.chain.0[number].content).check();
            }
        }
        let image = self.chain.open_in_memory(true).await;
        let mut found = vec![0; self.size_bytes];
        image.read(0, self.size_bytes).await.expect("valid").copy_to(&mut found);
        self.shared.model.borrow_mut().crash(found);
        self.shared.counts.borrow_mut().crashes += 1;
    }

    /// Removes the whole chain, without clients and errors.
    async fn stream_all(&mut self) {
        let image = self.chain.open_in_memory(false).await;
        let before = image.read(0, self.size_bytes).await.expect("memory").to_vec();
        let has_chain = image.backing().is_some();
        let disk = Disk::new("disk", image, DiskSettings::default(), None).expect("no reservations");
        let operator = Operator { disk: Arc::new(disk), may_fail: false, streams: Rc::clone(&self.streams) };
        if has_chain {
            assert_eq!(operator.stream(None, false).await, JobResult::Completed);
        }
        operator.disk.close().await.expect("memory");
        let top = self.chain.0.last_mut().expect("an image");
        top.content = operator.disk.image().storage().read_all().await.expect("memory");
        assert_eq!(self.chain.numbers().await.len(), 1, "no backing file remains");
        let image = self.chain.open_in_memory(true).await;
        let after = image.read(0, self.size_bytes).await.expect("memory").to_vec();
        assert!(before == after, "the content is the same");
    }
}

/// What a crash of all devices at once leaves.
fn crash(devices: &[SimulatedStorage]) -> Vec<Vec<u8>> {
    devices.iter().map(SimulatedStorage::crash).collect()
}

/// Streams the disk.
struct Operator {
    disk: Arc<Disk>,
    may_fail: bool,
    streams: Rc<Cell<StreamCounts>>,
}

impl Operator {
    async fn run(self, count: usize) {
        for _ in 0..count {
            sleep_until(now() + short_time()).await;
            let depth = self.disk.image().chain().count();
            if depth < 2 {
                return;
            }
            let stays = (depth > 2 && chance(50)).then(|| sim::random(|random| random.usize(2..depth)));
            self.stream(stays, true).await;
        }
    }

    /// Streams all images, or those above that with this position in the chain.
    async fn stream(&self, stays: Option<usize>, is_disturbed: bool) -> JobResult {
        let image = self.disk.image();
        let depth = image.chain().count();
        let base = stays.map(|position| base_at(&image, position));
        let job = Job::new("stream-disk", JobKind::Stream);
        let settings = BackgroundSettings {
            bps_total: if chance(30) { sim::random(|random| 1 << random.u32(14..20)) } else { 0 },
            ..BackgroundSettings::default()
        };
        drop(image);
        let stream = match Stream::begin(&job, &self.disk, base, settings).await {
            Ok(stream) => stream,
            // The image may have become read-only, and its snapshots cannot be read.
            Err(error) => {
                assert!(self.may_fail, "{error}");
                return JobResult::Failed(error.to_string());
            }
        };
        let operator = spawn_joinable(operate(Arc::clone(&job), is_disturbed));
        let result = stream.run().await;
        job.conclude(result.clone());
        drop(operator);
        let mut counts = self.streams.get();
        match &result {
            JobResult::Completed => {
                counts.completed += 1;
                counts.up_to += u64::from(stays.is_some());
                let expected = stays.map_or(1, |position| 1 + depth - position);
                assert_eq!(self.disk.image().chain().count(), expected, "the chain is shorter");
                assert_eq!(
                    job.status().progress.done_bytes,
                    self.disk.size_bytes(),
                    "each byte is done once"
                );
            }
            JobResult::Cancelled => counts.cancelled += 1,
            JobResult::Failed(error) => {
                assert!(self.may_fail, "{error}");
                counts.failed += 1;
            }
        }
        counts.copied += job.status().progress.copied_bytes;
        self.streams.set(counts);
        result
    }
}

/// The image with this position in the chain, as its overlay names it.
fn base_at(image: &Image, position: usize) -> StreamBase {
    let Some(Image::Qcow2(above)) = image.chain().nth(position - 1) else {
        panic!("a raw image has nothing below")
    };
    StreamBase {
        image: Arc::clone(above.shared_backing().expect("an image below")),
        reference: above.header().backing.expect("its name"),
    }
}

/// Pauses, resumes and cancels at random.
async fn operate(job: Arc<Job>, is_disturbed: bool) {
    if is_disturbed && chance(30) {
        sleep_until(now() + short_time()).await;
        if job.pause().is_ok() {
            sleep_until(now() + short_time()).await;
            // Work in flight may have failed meanwhile.
            let is_resumed = job.resume().is_ok();
            let has_ended = matches!(job.state(), JobState::Aborting | JobState::Concluded);
            assert!(is_resumed || has_ended, "it is paused, and nothing else resumes it");
        }
    }
    if is_disturbed && chance(25) {
        sleep_until(now() + short_time()).await;
        // It may have ended.
        let _ = job.cancel();
    }
}

async fn stop(clients: Vec<JoinHandle<()>>) {
    for client in clients {
        client.cancel().await;
    }
}
