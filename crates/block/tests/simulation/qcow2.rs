//! qcow2 images under several clients, through errors, cancellations and crashes: flushed data is
//! kept, and the image stays valid.
//!
//! Clients and model are those of `disks`; an image is between them and the simulated disk. After
//! each crash the file is in a state that a power failure can leave: writes since the last flush
//! are lost, torn and in any order. It is then opened without repair. The guest's bytes must be
//! those that the model allows, every referenced cluster must be counted, and clusters with the
//! COPIED flag must have one reference. A bitmap that is marked as consistent must include all
//! changes since it was created.
//!
//! - `kind`: the image of a seed: version, cluster size, refcounts, subclusters, a backing file, a
//!   data file, encryption.
//! - `keeper`: snapshots and compressed clusters.

mod keeper;
mod kind;

use std::{cell::RefCell, rc::Rc, sync::Arc};

use block::{disk::Disk, layer::throttle::DiskSettings};
use image::{Image, Qcow2Image, qcow2::bitmap::BitmapError};
use policy::time::Duration;
use reactor::{JoinHandle, now, sim, sleep_until, spawn_joinable, timeout};
use storage::{
    Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

use self::{
    keeper::{KnownSnapshots, MaintenanceTask},
    kind::{Files, ImageKind, disk},
};
use crate::{
    client::{Client, EventCounts, Shared, chance, draw_prefetch, short_time},
    references, seeds,
};

/// Longer than any run.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

#[test]
fn images_survive_crashes() {
    let counts = Rc::new(RefCell::new(EventCounts::default()));
    let seeds = seeds::for_each("--test simulation", 300, |seed| {
        let counts = Rc::clone(&counts);
        sim::run(seed, async move {
            let image_life = ImageLife::draw(&counts).await;
            timeout(FOREVER, image_life.run())
                .await
                .expect("every request is answered within a day of virtual time");
        });
    });
    let counts = *counts.borrow();
    if seeds >= 100 {
        let enough = [counts.failed, counts.cancelled, counts.flushed, counts.crashes, counts.read_ahead];
        assert!(
            enough.iter().all(|&count| count > seeds / 10),
            "too little happened in {seeds} seeds: {counts:?}"
        );
    }
}

/// An image through several crashes.
struct ImageLife {
    kind: ImageKind,
    shared: Rc<Shared>,
    snapshots: Rc<RefCell<KnownSnapshots>>,
    behaviour: Behaviour,
    files: Files,
    clients: usize,
    crashes: usize,
    /// Content of the disk when the bitmap was created, if there is one.
    before: Option<Vec<u8>>,
    /// True if the bitmap was marked as consistent after the last crash.
    is_bitmap_good: bool,
}

/// Granularity of the bitmap: bytes per bit, as a power of two.
const GRANULARITY_BITS: u32 = 9;
const BITMAP: &str = "changes";

/// The devices of the files.
struct Devices {
    image: SimulatedStorage,
    data: Option<SimulatedStorage>,
}

impl Devices {
    /// Crashes both at once.
    fn crash(&self) -> Files {
        Files { image: self.image.crash(), data: self.data.as_ref().map(SimulatedStorage::crash) }
    }
}

impl ImageLife {
    async fn draw(tally: &Rc<RefCell<EventCounts>>) -> Self {
        let kind = ImageKind::draw();
        let (mut files, disk) = kind.create().await;
        let has_bitmap = kind.options.version >= 3 && chance(50);
        if has_bitmap {
            files.image = with_bitmap(&files.image).await;
            files.image.resize(files.image.len().next_multiple_of(kind.block_bytes), 0);
        }
        let before = has_bitmap.then(|| disk.clone());
        let block_bytes = kind.block_bytes;
        // Most seeds inject no errors, so that no request may fail.
        let errors = if chance(30) { sim::random(fastrand::Rng::f64) / 16.0 } else { 0.0 };
        let latency = Duration::from_micros(sim::random(|random| random.u64(..2000)));
        let kept =
            if kind.snapshots { KnownSnapshots::with_first(disk.clone()) } else { KnownSnapshots::default() };
        let shared = Shared::new(disk, block_bytes, tally, errors > 0.0);
        Self {
            kind,
            shared: Rc::new(shared),
            snapshots: Rc::new(RefCell::new(kept)),
            behaviour: Behaviour { block_bytes, latency, error_probability: errors },
            files,
            clients: sim::random(|random| random.usize(1..=6)),
            crashes: sim::random(|random| random.usize(1..=3)),
            before,
            is_bitmap_good: has_bitmap,
        }
    }

    async fn run(mut self) {
        for _ in 0..self.crashes {
            let Some((devices, disk)) = self.open().await else { continue };
            let keeper = self.start_keeper(&disk);
            let clients = self.start(&disk);
            sleep_until(now() + short_time()).await;
            if chance(20) {
                for client in clients {
                    client.await;
                }
                // Crashes while the image is being closed.
                let closing = spawn_joinable(async move {
                    // Its result is ignored: the crash may come first.
                    let _ = disk.close().await;
                });
                sleep_until(now() + short_time()).await;
                self.files = devices.crash();
                closing.cancel().await;
            } else if chance(50) {
                stop(clients).await;
                self.files = devices.crash();
            } else {
                self.files = devices.crash();
                stop(clients).await;
            }
            // The keeper is cancelled only after the crash: it must not cancel a change of the
            // whole image.
            keeper.cancel().await;
            self.check().await;
        }
        let Some((devices, disk)) = self.open().await else { return };
        let leaks = references::of(&self.files.image).leaks;
        let keeper = self.start_keeper(&disk);
        for client in self.start(&disk) {
            client.await;
        }
        keeper.await;
        self.shared.counts.borrow_mut().read_ahead += disk.prefetch().stats().used_bytes;
        let client = Client { disk: Arc::clone(&disk), shared: Rc::clone(&self.shared) };
        let size = self.shared.model.borrow().size_bytes();
        client.read(0..size).await;
        // Repeated, since an injected error may fail a flush.
        while !client.flush().await && !disk.image().is_read_only() {}
        if chance(50) {
            while disk.close().await.is_err() && !disk.image().is_read_only() {}
            self.files = devices.crash();
            self.check().await;
            assert!(
                self.before.is_none() || self.is_bitmap_good || self.shared.may_fail,
                "closed in order, and the bitmap is not right"
            );
            let now = references::of(&self.files.image).leaks;
            assert!(now <= leaks || self.shared.may_fail, "closed in order, and {now} leaks, not {leaks}");
        } else {
            self.files = devices.crash();
            self.check().await;
        }
    }

    /// Opens the image; `None` if an injected error prevented it, for another attempt.
    async fn open(&self) -> Option<(Devices, Arc<Disk>)> {
        self.shared.sent.iter().chain(&self.shared.succeeded).for_each(|count| count.set(0));
        self.shared.bypassed.set(false);
        let device = |content: &Vec<u8>| SimulatedStorage::new(content.clone(), self.behaviour);
        let devices =
            Devices { image: device(&self.files.image), data: self.files.data.as_ref().map(device) };
        let storage = |device: &SimulatedStorage| Storage::Simulated(Align::new(device.clone()));
        let parts = self.kind.parts(storage(&devices.image), devices.data.as_ref().map(storage), false).await;
        let image = match Qcow2Image::open(parts).await {
            Ok(image) => image,
            Err(why) => {
                assert!(self.shared.may_fail, "{why}");
                return None;
            }
        };
        let disk =
            Disk::new("disk", Image::Qcow2(image), DiskSettings::default(), None).expect("no reservations");
        disk.prefetch().set(draw_prefetch()).expect("in range");
        Some((devices, Arc::new(disk)))
    }

    fn start(&self, disk: &Arc<Disk>) -> Vec<JoinHandle<()>> {
        let client = || Client { disk: Arc::clone(disk), shared: Rc::clone(&self.shared) };
        let requests = || sim::random(|random| random.usize(1..40));
        (0..self.clients).map(|_| spawn_joinable(client().run(requests()))).collect()
    }

    fn start_keeper(&self, disk: &Arc<Disk>) -> JoinHandle<()> {
        let keeper = MaintenanceTask {
            kind: self.kind.clone(),
            disk: Arc::clone(disk),
            shared: Rc::clone(&self.shared),
            snapshots: Rc::clone(&self.snapshots),
        };
        spawn_joinable(keeper.run(sim::random(|random| random.usize(..12))))
    }

    /// Checks the state after a crash.
    async fn check(&mut self) {
        references::of(&self.files.image).check();
        let mut snapshots = self.snapshots.take();
        snapshots.check(&self.kind, &self.files, &self.shared).await;
        self.snapshots.replace(snapshots);
        let image = Qcow2Image::open(self.kind.in_memory(&self.files, true).await).await.expect("valid");
        let found = disk(&image).await;
        self.look_at_bitmap(&image, &found).await;
        self.shared.model.borrow_mut().crash(found);
        self.shared.counts.borrow_mut().crashes += 1;
    }

    /// Checks that a consistent bitmap marks every difference; an inconsistent one is replaced.
    async fn look_at_bitmap(&mut self, image: &Qcow2Image, guest: &[u8]) {
        let Some(before) = &self.before else { return };
        let bits = match image.bitmap_bits(BITMAP).await {
            Ok(bits) => bits,
            Err(BitmapError::InUse(_)) => {
                self.is_bitmap_good = false;
                self.files.image = with_bitmap(&self.files.image).await;
                let block_bytes = self.shared.block_bytes;
                self.files.image.resize(self.files.image.len().next_multiple_of(block_bytes), 0);
                self.before = Some(guest.to_vec());
                return;
            }
            Err(why) => panic!("{why}"),
        };
        self.is_bitmap_good = true;
        let mut marked = vec![false; guest.len()];
        for range in bits.marked() {
            marked[range.start as usize..range.end as usize].fill(true);
        }
        let unmarked = (0..guest.len()).find(|&at| guest[at] != before[at] && !marked[at]);
        assert_eq!(unmarked, None, "changed, and not marked");
    }
}

/// The file with an empty bitmap, which replaces an existing one.
async fn with_bitmap(content: &[u8]) -> Vec<u8> {
    let image = Qcow2Image::open_for_maintenance(Storage::with_content(content).await).await.expect("valid");
    match image.remove_bitmap(BITMAP).await {
        Ok(()) | Err(BitmapError::NotFound(_)) => {}
        Err(why) => panic!("{why}"),
    }
    image.add_bitmap(BITMAP, GRANULARITY_BITS).await.expect("room");
    image.close().await.expect("memory");
    image.storage().read_all().await.expect("memory")
}

async fn stop(clients: Vec<JoinHandle<()>>) {
    for client in clients {
        client.cancel().await;
    }
}
