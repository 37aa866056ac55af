//! A disk that is switched to a new overlay again and again while clients use it, through errors,
//! cancellations and crashes: flushed data is kept, and the chain stays valid.
//!
//! ```text
//!   clients ─► disk ─► overlay 2 ─► overlay 1 ─► base (raw or qcow2)
//!                       device 2     device 1     device 0         a crash is of all at once
//! ```
//!
//! Clients and model are those of `disks`. After each crash the chain is opened without repair.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use block::{disk::Disk, layer::throttle::DiskSettings};
use image::{
    Image, Qcow2Image, RawImage,
    qcow2::{
        Qcow2Components,
        create::{CreateOptions, create},
        header::BackingReference,
    },
};
use policy::time::Duration;
use reactor::{JoinHandle, now, sim, sleep_until, spawn_joinable, timeout};
use storage::{
    Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

use crate::{
    client::{Client, EventCounts, Shared, chance, draw_prefetch, short_time},
    references, seeds,
};

/// Longer than any run.
const FOREVER: Duration = Duration::from_secs(24 * 3600);
/// Time for changes in flight to complete: longer than any of them takes.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(3600);
const BLOCK_BYTES: usize = 512;
/// Longest chain. Each image makes a read slower.
const MAX_CHAIN: usize = 6;

#[test]
fn switched_disks_survive_crashes() {
    let counts = Rc::new(RefCell::new(EventCounts::default()));
    let switches = Rc::new(Cell::new(0));
    let seeds = seeds::for_each("--test simulation", 300, |seed| {
        let (counts, switches) = (Rc::clone(&counts), Rc::clone(&switches));
        sim::run(seed, async move {
            let life = DiskLife::draw(&counts, switches).await;
            timeout(FOREVER, life.run())
                .await
                .expect("every request is answered within a day of virtual time");
        });
    });
    let counts = *counts.borrow();
    if seeds >= 100 {
        let enough = [counts.failed, counts.cancelled, counts.flushed, counts.crashes, counts.read_ahead];
        assert!(
            enough.iter().all(|&count| count > seeds / 10) && switches.get() > seeds,
            "too little happened in {seeds} seeds: {counts:?}, {} switches",
            switches.get()
        );
    }
}

/// File of one image of the chain.
#[derive(Clone)]
struct Layer {
    content: Vec<u8>,
    is_raw: bool,
}

/// Devices of the chain, the base first. An overlay is added before the disk is switched to it.
type Devices = Rc<RefCell<Vec<(SimulatedStorage, bool)>>>;

/// A disk through several crashes.
struct DiskLife {
    shared: Rc<Shared>,
    behaviour: Behaviour,
    layers: Vec<Layer>,
    size_bytes: usize,
    clients: usize,
    crashes: usize,
    switches: Rc<Cell<u64>>,
}

impl DiskLife {
    async fn draw(tally: &Rc<RefCell<EventCounts>>, switches: Rc<Cell<u64>>) -> Self {
        let size_bytes = sim::random(|random| random.usize(8..60)) * BLOCK_BYTES;
        let is_raw = chance(50);
        let raw: Vec<u8> = sim::random(|random| (0..size_bytes).map(|_| random.u8(..)).collect());
        let (content, disk) = match is_raw {
            true => (raw.clone(), raw),
            false => (qcow2_file(size_bytes, false).await, vec![0; size_bytes]),
        };
        let errors = if chance(30) { sim::random(fastrand::Rng::f64) / 16.0 } else { 0.0 };
        let latency = Duration::from_micros(sim::random(|random| random.u64(..2000)));
        let shared = Shared::new(disk, BLOCK_BYTES, tally, errors > 0.0);
        Self {
            shared: Rc::new(shared),
            behaviour: Behaviour { block_bytes: BLOCK_BYTES, latency, error_probability: errors },
            layers: vec![Layer { content, is_raw }],
            size_bytes,
            clients: sim::random(|random| random.usize(1..=5)),
            crashes: sim::random(|random| random.usize(1..=3)),
            switches,
        }
    }

    async fn run(mut self) {
        for _ in 0..self.crashes {
            let Some((devices, disk)) = self.open().await else { continue };
            let (clients, operator) = self.start(&devices, &disk);
            sleep_until(now() + short_time()).await;
            if chance(50) {
                operator.cancel().await;
                stop(clients).await;
                self.crash(&devices).await;
            } else {
                self.crash(&devices).await;
                operator.cancel().await;
                stop(clients).await;
            }
            self.shared.counts.borrow_mut().read_ahead += disk.prefetch().stats().used_bytes;
        }
        let Some((devices, disk)) = self.open().await else { return };
        let (clients, operator) = self.start(&devices, &disk);
        for client in clients {
            client.await;
        }
        operator.await;
        let client = Client { disk: Arc::clone(&disk), shared: Rc::clone(&self.shared) };
        client.read(0..self.size_bytes).await;
        // Repeated, since an injected error may fail a flush.
        while !client.flush().await && !disk.image().is_read_only() {}
        self.crash(&devices).await;
    }

    /// Opens the chain; `None` if an injected error prevented it, for another attempt.
    async fn open(&self) -> Option<(Devices, Arc<Disk>)> {
        self.shared.sent.iter().chain(&self.shared.succeeded).for_each(|count| count.set(0));
        let mut devices = Vec::new();
        let mut below = None;
        for (at, layer) in self.layers.iter().enumerate() {
            let device = SimulatedStorage::new(layer.content.clone(), self.behaviour);
            let storage = Storage::Simulated(Align::new(device.clone()));
            devices.push((device, layer.is_raw));
            match open(storage, layer.is_raw, below.take(), at + 1 < self.layers.len()).await {
                Ok(image) => below = Some(Arc::new(image)),
                Err(why) => {
                    assert!(self.shared.may_fail, "{why}");
                    return None;
                }
            }
        }
        let top = Arc::into_inner(below.expect("a base")).expect("no other owner");
        let disk = Disk::new("disk", top, DiskSettings::default(), None).expect("no reservations");
        disk.prefetch().set(draw_prefetch()).expect("in range");
        Some((Rc::new(RefCell::new(devices)), Arc::new(disk)))
    }

    fn start(&self, devices: &Devices, disk: &Arc<Disk>) -> (Vec<JoinHandle<()>>, JoinHandle<()>) {
        let client = || Client { disk: Arc::clone(disk), shared: Rc::clone(&self.shared) };
        let requests = || sim::random(|random| random.usize(1..40));
        let clients = (0..self.clients).map(|_| spawn_joinable(client().run(requests()))).collect();
        let operator = Operator {
            disk: Arc::clone(disk),
            devices: Rc::clone(devices),
            behaviour: self.behaviour,
            size_bytes: self.size_bytes,
            may_fail: self.shared.may_fail,
            switches: Rc::clone(&self.switches),
        };
        (clients, spawn_joinable(operator.run(sim::random(|random| random.usize(..5)))))
    }

    /// Crashes all devices at once, and compares what is left with the model.
    async fn crash(&mut self, devices: &Devices) {
        let crashed =
            |(device, is_raw): &(SimulatedStorage, bool)| Layer { content: device.crash(), is_raw: *is_raw };
        self.layers = devices.borrow().iter().map(crashed).collect();
        let mut below: Option<Arc<Image>> = None;
        for layer in &self.layers {
            if !layer.is_raw {
                references::of(&layer.content).check();
            }
            let storage = Storage::with_content(&layer.content).await;
            below = Some(Arc::new(open(storage, layer.is_raw, below.take(), true).await.expect("valid")));
        }
        let mut found = vec![0; self.size_bytes];
        below.expect("a base").read(0, self.size_bytes).await.expect("valid").copy_to(&mut found);
        self.shared.model.borrow_mut().crash(found);
        self.shared.counts.borrow_mut().crashes += 1;
    }
}

/// Switches the disk to new overlays.
struct Operator {
    disk: Arc<Disk>,
    devices: Devices,
    behaviour: Behaviour,
    size_bytes: usize,
    may_fail: bool,
    switches: Rc<Cell<u64>>,
}

impl Operator {
    async fn run(self, count: usize) {
        for _ in 0..count {
            sleep_until(now() + short_time()).await;
            if self.devices.borrow().len() < MAX_CHAIN {
                self.switch().await;
            }
        }
    }

    async fn switch(&self) {
        // Durable from the start, as an overlay that was synced.
        let device = SimulatedStorage::new(qcow2_file(self.size_bytes, true).await, self.behaviour);
        let storage = Storage::Simulated(Align::new(device.clone()));
        let new = match open(storage, false, Some(self.disk.image()), false).await {
            Ok(new) => new,
            Err(why) => return assert!(self.may_fail, "{why}"),
        };
        let quiesced = self.disk.quiesce(QUIESCE_TIMEOUT).await.expect("changes complete");
        // Sometimes the operator stops waiting in the middle, and clients continue.
        let limit = if chance(30) { short_time() } else { QUIESCE_TIMEOUT };
        match timeout(limit, self.disk.flush_quiesced(&quiesced)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return assert!(self.may_fail, "{error}"),
            Err(_) => return assert!(limit < QUIESCE_TIMEOUT, "the storage answers"),
        }
        self.devices.borrow_mut().push((device, false));
        drop(self.disk.switch_image(&quiesced, Arc::new(new)));
        self.switches.set(self.switches.get() + 1);
    }
}

async fn open(
    storage: Storage,
    is_raw: bool,
    backing: Option<Arc<Image>>,
    read_only: bool,
) -> Result<Image, image::qcow2::OpenFailure> {
    if is_raw {
        let raw = RawImage::new(storage);
        return Ok(Image::Raw(if read_only { raw.read_only() } else { raw }));
    }
    let components = Qcow2Components { backing, read_only, ..Qcow2Components::of(storage) };
    Qcow2Image::open(components).await.map(Image::Qcow2)
}

/// The file of an empty image.
async fn qcow2_file(size_bytes: usize, has_backing: bool) -> Vec<u8> {
    let backing = BackingReference { name: "base".into(), format: Some("raw".into()) };
    let options = CreateOptions {
        size_bytes: size_bytes as u64,
        cluster_bytes: 1 << sim::random(|random| [9, 10, 12, 16][random.usize(..4)]),
        backing: has_backing.then_some(backing),
        ..CreateOptions::default()
    };
    let storage = Storage::with_content(&[]).await;
    create(&storage, None, &options).await.expect("valid");
    let mut file = storage.read_all().await.expect("memory");
    file.resize(file.len().next_multiple_of(BLOCK_BYTES), 0);
    file
}

async fn stop(clients: Vec<JoinHandle<()>>) {
    for client in clients {
        client.cancel().await;
    }
}
