//! qcow2 images under several clients, through errors, cancellations and crashes: what was flushed is there, and the image is valid.
//!
//! The clients and the model of what each byte may be are those of `disks`; between them and the simulated disk lies an image. After
//! every crash the file is what a power failure leaves of it: writes since the last flush lost, torn and in any order. It is then opened as it is;
//! the guest's bytes must be what the model allows, and every cluster that something refers to must be counted, and referred to once. A bitmap that
//! says that it is right must mark all that was changed since it was made.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use block::{
    buffer::Buffer,
    disk::Disk,
    image::{
        Image, Qcow2,
        qcow2::{
            CacheSettings, L2Size, Parts,
            bitmap::BitmapError,
            create::{CreateOptions, create},
        },
    },
    layer::throttle::{DiskSettings, Group, GroupSettings},
    reactor::{JoinHandle, now, sim, sleep_until, spawn_joinable, timeout},
    storage::{
        Durability, Storage,
        align::Align,
        memory::Memory,
        simulated::{Behaviour, Simulated},
    },
};
use policy::time::Duration;

use crate::{
    client::{Client, Shared, Tally, chance, short_time},
    model::Model,
    passed::Passed,
    references, seeds,
};

/// Longer than any run.
const FOREVER: Duration = Duration::from_secs(24 * 3600);

#[test]
fn images_survive_crashes() {
    let tally = Rc::new(RefCell::new(Tally::default()));
    let seeds = seeds::for_each("--test simulation", "images_survive_crashes", 300, |seed| {
        let tally = Rc::clone(&tally);
        sim::run(seed, async move {
            let life = Life::draw(&tally).await;
            timeout(FOREVER, life.run())
                .await
                .expect("every request is answered within a day of virtual time");
        });
    });
    let tally = *tally.borrow();
    if seeds >= 100 {
        let happened = [tally.failed, tally.cancelled, tally.flushed, tally.crashes];
        assert!(
            happened.iter().all(|&count| count > seeds / 10),
            "too little happened in {seeds} seeds: {tally:?}"
        );
    }
}

/// An image from one crash to the next, until the last.
struct Life {
    shared: Rc<Shared>,
    behaviour: Behaviour,
    caches: CacheSettings,
    /// Of the file.
    content: Vec<u8>,
    clients: usize,
    crashes: usize,
    /// The disk when the bitmap was made, if there is one.
    before: Option<Vec<u8>>,
    /// After the last crash, it said that it was right.
    is_bitmap_good: bool,
}

/// A bit of it is for so many bytes, as bits.
const GRANULARITY_BITS: u32 = 9;
const BITMAP: &str = "changes";

impl Life {
    async fn draw(tally: &Rc<RefCell<Tally>>) -> Self {
        let options = draw_options();
        let block_bytes =
            if options.cluster_bytes >= 4096 && !options.extended_l2 && chance(50) { 4096 } else { 512 };
        let blocks = sim::random(|random| random.usize(8..100));
        let options = CreateOptions { size_bytes: (blocks * block_bytes) as u64, ..options };
        let storage = memory(&[]).await;
        create(&storage, None, &options).await.expect("drawn valid");
        let has_bitmap = options.version >= 3 && chance(50);
        let mut content = content_of(&storage).await;
        if has_bitmap {
            content = with_bitmap(&content).await;
        }
        content.resize(content.len().next_multiple_of(block_bytes), 0);
        let group = Group::new("group", GroupSettings::default(), None).expect("no limits");
        let errors = if chance(30) { sim::random(fastrand::Rng::f64) / 16.0 } else { 0.0 };
        let small =
            CacheSettings { l2: Some(L2Size::Bytes(0)), entry_bytes: Some(512), ..CacheSettings::default() };
        let latency = Duration::from_micros(sim::random(|random| random.u64(..2000)));
        let shared = Shared {
            model: RefCell::new(Model::new(vec![0; blocks * block_bytes], block_bytes)),
            tally: Rc::clone(tally),
            passed: Rc::new(RefCell::new(Passed::new(&group, 1 << 20))),
            may_fail: errors > 0.0,
            block_bytes,
            sent: [Cell::new(0), Cell::new(0)],
        };
        Self {
            shared: Rc::new(shared),
            behaviour: Behaviour { block_bytes, latency, error_probability: errors },
            caches: if chance(50) { small } else { CacheSettings::default() },
            content,
            clients: sim::random(|random| random.usize(1..=6)),
            crashes: sim::random(|random| random.usize(1..=3)),
            before: has_bitmap.then(|| vec![0; blocks * block_bytes]),
            is_bitmap_good: has_bitmap,
        }
    }

    async fn run(mut self) {
        for _ in 0..self.crashes {
            let Some((device, disk)) = self.open().await else { continue };
            let clients = self.start(&disk);
            sleep_until(now() + short_time()).await;
            if chance(20) {
                for client in clients {
                    client.await;
                }
                let closing = spawn_joinable(async move {
                    // Nobody waits for how it ends.
                    let _ = disk.image().close().await;
                });
                sleep_until(now() + short_time()).await;
                self.crash(&device).await;
                closing.cancel().await;
            } else if chance(50) {
                stop(clients).await;
                self.crash(&device).await;
            } else {
                self.crash(&device).await;
                stop(clients).await;
            }
        }
        let Some((device, disk)) = self.open().await else { return };
        let leaks = references::of(&self.content).leaks;
        for client in self.start(&disk) {
            client.await;
        }
        let client = Client { disk: Arc::clone(&disk), shared: Rc::clone(&self.shared) };
        let size = self.shared.model.borrow().size_bytes();
        client.read(0..size).await;
        while !client.flush().await {}
        if chance(50) {
            while disk.image().close().await.is_err() {}
            self.crash(&device).await;
            assert!(
                self.before.is_none() || self.is_bitmap_good || self.shared.may_fail,
                "closed in order, and the bitmap is not right"
            );
            let now = references::of(&self.content).leaks;
            assert!(now <= leaks || self.shared.may_fail, "closed in order, and {now} leaks, not {leaks}");
        } else {
            self.crash(&device).await;
        }
    }

    /// `None` where an error kept it from being opened: the next time it may be.
    async fn open(&self) -> Option<(Simulated, Arc<Disk>)> {
        self.shared.sent.iter().for_each(|sent| sent.set(0));
        let device = Simulated::new(self.content.clone(), self.behaviour);
        let storage = Storage::Simulated(Align::new(device.clone()));
        let opened = Qcow2::open(parts(storage, self.caches)).await;
        let image = match opened {
            Ok(image) => image,
            Err(why) => {
                assert!(self.shared.may_fail, "{why}");
                return None;
            }
        };
        let disk = Disk::new("disk", Image::Qcow2(image), DiskSettings::default(), None)
            .expect("nothing is promised");
        Some((device, Arc::new(disk)))
    }

    fn start(&self, disk: &Arc<Disk>) -> Vec<JoinHandle<()>> {
        let client = || Client { disk: Arc::clone(disk), shared: Rc::clone(&self.shared) };
        let requests = || sim::random(|random| random.usize(1..40));
        (0..self.clients).map(|_| spawn_joinable(client().run(requests()))).collect()
    }

    async fn crash(&mut self, device: &Simulated) {
        self.content = device.crash();
        references::of(&self.content).check();
        let storage = memory(&self.content).await;
        let image =
            Qcow2::open(Parts { read_only: true, ..parts(storage, self.caches) }).await.expect("valid");
        let mut guest = vec![0; image.size_bytes() as usize];
        image.read(0, guest.len()).await.expect("valid").copy_to(&mut guest);
        self.look_at_bitmap(&image, &guest).await;
        self.shared.model.borrow_mut().crash(guest);
        self.shared.tally.borrow_mut().crashes += 1;
    }

    /// One that is right marks every difference; one that is not is made again.
    async fn look_at_bitmap(&mut self, image: &Qcow2, guest: &[u8]) {
        let Some(before) = &self.before else { return };
        let bits = match image.bitmap_bits(BITMAP).await {
            Ok(bits) => bits,
            Err(BitmapError::InUse(_)) => {
                self.is_bitmap_good = false;
                self.content = with_bitmap(&self.content).await;
                let block_bytes = self.shared.block_bytes;
                self.content.resize(self.content.len().next_multiple_of(block_bytes), 0);
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

/// The file with a bitmap that marks nothing, instead of the one that it may have.
async fn with_bitmap(content: &[u8]) -> Vec<u8> {
    let image = Qcow2::open_for_upkeep(memory(content).await).await.expect("valid");
    match image.remove_bitmap(BITMAP).await {
        Ok(()) | Err(BitmapError::NotFound(_)) => {}
        Err(why) => panic!("{why}"),
    }
    image.add_bitmap(BITMAP, GRANULARITY_BITS).await.expect("room");
    image.close().await.expect("memory");
    content_of(image.storage()).await
}

fn parts(storage: Storage, caches: CacheSettings) -> Parts {
    Parts { storage, backing: None, data: None, cipher: None, read_only: false, caches }
}

fn draw_options() -> CreateOptions {
    let extended_l2 = chance(25);
    let version = if !extended_l2 && chance(25) { 2 } else { 3 };
    let bits = if extended_l2 { 14 } else { sim::random(|random| [9, 9, 10, 12, 16][random.usize(..5)]) };
    let refcount_bits = if version == 2 { 16 } else { sim::random(|random| 1 << random.u32(..7)) };
    CreateOptions {
        version,
        extended_l2,
        cluster_bytes: 1 << bits,
        refcount_bits,
        ..CreateOptions::default()
    }
}

async fn memory(content: &[u8]) -> Storage {
    let storage = Storage::Memory(Memory::new((content.len() as u64).max(512)).expect("small"));
    if !content.is_empty() {
        let data = Buffer::copy_of(content).into();
        storage.write(0, data, Durability::Cached).await.expect("memory");
    }
    storage
}

async fn content_of(storage: &Storage) -> Vec<u8> {
    storage.read(0, Buffer::new(storage.size_bytes() as usize)).await.expect("memory").to_vec()
}

async fn stop(clients: Vec<JoinHandle<()>>) {
    for client in clients {
        client.cancel().await;
    }
}
