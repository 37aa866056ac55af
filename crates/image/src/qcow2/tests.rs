//! An open image compared with a plain array: random requests over every kind of image that weir
//! creates.

use std::sync::Arc;

use policy::time::Duration;
use proptest::prelude::*;

use super::{
    CacheSettings, L2CacheSize, Qcow2Components, Qcow2Image,
    big_endian::{u64_at, words},
    check::{Repair, check},
    create::{CreateOptions, Preallocation, create},
    header::{BackingReference, Qcow2Header, incompatible},
    metadata_io,
};
use reactor::{
    buffer::{IoBuffer, ReadTarget, Segments},
    error::Error,
    guest::{GuestMemory, Region},
    sim,
};
use storage::{Durability, Storage, ZeroOptions};

use crate::{Image, RawImage};

const SIZE: usize = 300 << 10;
const BACKING_SIZE: usize = 200 << 10;

#[derive(Clone, Debug)]
struct ImageVariant {
    options: CreateOptions,
    caches: CacheSettings,
    has_backing: bool,
}

fn kinds() -> impl Strategy<Value = ImageVariant> {
    let cluster_bits = prop_oneof![Just(9), Just(12), Just(16)];
    (cluster_bits, 0..=6_u32, any::<bool>(), any::<bool>(), 0..4_u32, any::<bool>()).prop_map(
        |(bits, order, extended, backing, cache, old)| {
            let bits = if extended { bits.max(14) } else { bits };
            let old = old && !extended;
            let options = CreateOptions {
                size_bytes: SIZE as u64,
                version: if old { 2 } else { 3 },
                cluster_bytes: 1 << bits,
                refcount_bits: if old { 16 } else { 1 << order },
                extended_l2: extended,
                backing: backing
                    .then(|| BackingReference { name: "base".into(), format: Some("raw".into()) }),
                ..CreateOptions::default()
            };
            let small = CacheSettings {
                l2: Some(L2CacheSize::Bytes(0)),
                entry_bytes: Some(512),
                ..CacheSettings::default()
            };
            let caches = if cache == 0 { small } else { CacheSettings::default() };
            ImageVariant { options, caches, has_backing: backing }
        },
    )
}

#[derive(Clone, Debug)]
enum DiskTestStep {
    Write(usize, usize, u8),
    Compressed(usize, u8),
    Zero(usize, usize, bool),
    Discard(usize, usize),
    Read(usize, usize),
    Flush,
    Reopen,
    Caches(bool),
}

fn ranges() -> impl Strategy<Value = (usize, usize)> {
    let length = prop_oneof![1..600_usize, 4096..9000_usize, 1..150_000_usize];
    (0..SIZE, length).prop_map(|(at, length)| (at, length.min(SIZE - at))).prop_flat_map(|(at, length)| {
        prop_oneof![
            Just((at, length)),
            Just((at & !511, (length + 511) & !511)),
            Just((at & !4095, (length + 4095) & !4095)),
            Just((at & !65535, 65536)),
        ]
        .prop_map(|(at, length)| (at, length.min(SIZE - at)))
    })
}

fn steps() -> impl Strategy<Value = DiskTestStep> {
    prop_oneof![
        6 => (ranges(), 1..=255_u8).prop_map(|((at, length), byte)| DiskTestStep::Write(at, length, byte)),
        2 => (0..SIZE, 1..=255_u8).prop_map(|(at, byte)| DiskTestStep::Compressed(at, byte)),
        2 => (ranges(), any::<bool>()).prop_map(|((at, length), unmap)| DiskTestStep::Zero(at, length, unmap)),
        2 => ranges().prop_map(|(at, length)| DiskTestStep::Discard(at, length)),
        3 => ranges().prop_map(|(at, length)| DiskTestStep::Read(at, length)),
        1 => Just(DiskTestStep::Flush),
        1 => Just(DiskTestStep::Reopen),
        1 => any::<bool>().prop_map(DiskTestStep::Caches),
    ]
}

struct DiskTestWorld {
    kind: ImageVariant,
    image: Qcow2Image,
    model: Vec<u8>,
    /// Discarded ranges: the old bytes or zeroes.
    open: Vec<bool>,
}

fn base(at: usize) -> u8 {
    (at / 300 % 251) as u8 | 1
}

async fn open(kind: &ImageVariant, content: &[u8]) -> Qcow2Image {
    let backing = if kind.has_backing {
        let content: Vec<u8> = (0..BACKING_SIZE).map(base).collect();
        Some(Arc::new(Image::Raw(RawImage::new(Storage::with_content(&content).await).read_only())))
    } else {
        None
    };
    let storage = Storage::with_content(content).await;
    let parts = Qcow2Components { backing, caches: kind.caches, ..Qcow2Components::of(storage) };
    Qcow2Image::open(parts).await.expect("valid")
}

/// Guest memory whose content is not zero.
fn guest(bytes: usize) -> GuestMemory {
    let memory = GuestMemory::new(vec![Region::on_heap(0, 0, bytes)]).expect("one region");
    memory.range(0, bytes).expect("inside").fill(0, bytes, 0xa5);
    memory
}

impl DiskTestWorld {
    async fn new(kind: ImageVariant) -> Self {
        let storage = Storage::memory(512);
        create(&storage, None, &kind.options).await.expect("valid");
        let content = storage.read_all().await.expect("memory");
        let image = open(&kind, &content).await;
        let backed_bytes = if kind.has_backing { BACKING_SIZE } else { 0 };
        let model = (0..SIZE).map(|at| if at < backed_bytes { base(at) } else { 0 }).collect();
        Self { kind, image, model, open: vec![false; SIZE] }
    }

    fn set(&mut self, at: usize, length: usize, byte: impl Fn(usize) -> u8) {
        for at in at..at + length {
            self.model[at] = byte(at);
            self.open[at] = false;
        }
    }

    async fn check(&self, at: usize, length: usize) {
        let bytes = self.image.read(at as u64, length).await.expect("reads").to_vec();
        let memory = guest(length);
        let target = ReadTarget::Segments(memory.range(0, length).expect("inside").into());
        self.image.read_to(at as u64, target).await.expect("reads");
        let found = memory.range(0, length).expect("inside");
        assert_eq!(Segments::from(found).to_vec(), bytes, "in memory of a guest: {length:#x} at {at:#x}");
        for (index, byte) in bytes.iter().enumerate() {
            let (at, want) = (at + index, self.model[at + index]);
            assert!(
                *byte == want || self.open[at] && *byte == 0,
                "{byte} and not {want} at {at:#x} of {length:#x}"
            );
        }
    }

    async fn step(&mut self, step: &DiskTestStep) {
        match *step {
            DiskTestStep::Write(at, length, seed) => {
                let byte = |at: usize| seed.wrapping_add((at / 100) as u8);
                let data: Vec<u8> = (at..at + length).map(byte).collect();
                let data = IoBuffer::copy_of(&data).into();
                self.image.write(at as u64, data, Durability::Cached).await.expect("room");
                self.set(at, length, byte);
            }
            DiskTestStep::Compressed(at, seed) => {
                let cluster = self.kind.options.cluster_bytes as usize;
                let at = at / cluster * cluster;
                let length = cluster.min(SIZE - at);
                let data = IoBuffer::copy_of(&vec![seed; length]).into();
                self.image.write_compressed(at as u64, data).await.expect("room");
                self.set(at, length, |_| seed);
            }
            DiskTestStep::Zero(at, length, may_unmap) => {
                let options = ZeroOptions { may_unmap, only_if_fast: false, durability: Durability::Cached };
                self.image.write_zeroes(at as u64, length as u64, options).await.expect("room");
                self.set(at, length, |_| 0);
            }
            DiskTestStep::Discard(at, length) => {
                self.image.discard(at as u64, length as u64).await.expect("a hint");
                self.open[at..at + length].fill(true);
            }
            DiskTestStep::Read(at, length) => self.check(at, length).await,
            DiskTestStep::Flush => self.image.flush().await.expect("memory"),
            DiskTestStep::Reopen => {
                self.image.close().await.expect("memory");
                let content = self.image.storage().read_all().await.expect("memory");
                self.image = open(&self.kind, &content).await;
            }
            DiskTestStep::Caches(small) => {
                let l2 = Some(if small { L2CacheSize::Bytes(0) } else { L2CacheSize::Full });
                let settings = CacheSettings { l2, ..CacheSettings::default() };
                self.image.set_caches(settings).await.expect("valid");
            }
        }
    }
}

#[test]
fn failed_read_ends_after_all_writes_to_its_memory() {
    sim::run(1, async {
        let cluster = 65_536;
        let options = CreateOptions {
            size_bytes: 2 * cluster,
            backing: Some(BackingReference { name: "base".into(), format: Some("raw".into()) }),
            ..CreateOptions::default()
        };
        let storage = Storage::memory(512);
        create(&storage, None, &options).await.expect("valid");
        let image = Qcow2Image::open(Qcow2Components::of(storage)).await.expect("valid");
        let data = IoBuffer::copy_of(&vec![7; cluster as usize]);
        image.write(cluster, data.into(), Durability::Cached).await.expect("room");
        image.close().await.expect("memory");
        let content = image.storage().read_all().await.expect("memory");
        // The first cluster fails at once in the backing file; the second is slow.
        let base = Storage::memory(cluster).with_faults(vec!["kind=read".parse().expect("valid")]);
        let slow = Storage::with_content(&content).await.delayed("read=5ms".parse().expect("valid"));
        let backing = Some(Arc::new(Image::Raw(RawImage::new(base).read_only())));
        let image =
            Qcow2Image::open(Qcow2Components { backing, ..Qcow2Components::of(slow) }).await.expect("valid");
        let memory = guest(2 * cluster as usize);
        let place = |at, length| memory.range(at, length).expect("inside");
        let target = ReadTarget::Segments(place(0, 2 * cluster as usize).into());
        assert_eq!(image.read_to(0, target).await.err(), Some(Error::IO));
        let second = || Segments::from(place(cluster, cluster as usize)).to_vec();
        assert_eq!(second(), vec![7; cluster as usize], "it was not waited for");
        place(cluster, 8).write(0, b"others'!");
        reactor::sleep_until(reactor::now() + Duration::from_secs(1)).await;
        assert_eq!(second()[..8], *b"others'!");
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    #[test]
    fn image_behaves_like_an_array(kind in kinds(), steps in prop::collection::vec(steps(), 1..40), seed in any::<u64>()) {
        sim::run(seed, async move {
            let mut world = DiskTestWorld::new(kind).await;
            for step in &steps {
                world.step(step).await;
            }
            world.check(0, SIZE).await;
            world.step(&DiskTestStep::Reopen).await;
            world.check(0, SIZE).await;
            assert_eq!(world.image.write(SIZE as u64, IoBuffer::zeroed(1).into(), Durability::Cached).await, Err(Error::INVALID));
        });
    }
}

fn plain() -> ImageVariant {
    let options = CreateOptions { size_bytes: SIZE as u64, cluster_bytes: 4096, ..CreateOptions::default() };
    ImageVariant { options, caches: CacheSettings::default(), has_backing: false }
}

/// Content of an image whose first 64 KiB are written.
async fn written() -> Vec<u8> {
    let mut world = DiskTestWorld::new(plain()).await;
    world.step(&DiskTestStep::Write(0, 65_536, 7)).await;
    world.image.close().await.expect("memory");
    world.image.storage().read_all().await.expect("memory")
}

fn word(content: &mut [u8], offset: u64) -> &mut [u8] {
    &mut content[offset as usize..offset as usize + 8]
}

/// Offset of the first L2 table.
fn first_table(content: &[u8]) -> u64 {
    let header = Qcow2Header::parse(content).expect("valid");
    u64_at(content, header.l1_offset as usize) & 0x00ff_ffff_ffff_fe00
}

async fn parts_of(content: &[u8]) -> Qcow2Components {
    Qcow2Components::of(Storage::with_content(content).await)
}

#[test]
fn dirty_image_is_repaired_on_open() {
    sim::run(1, async {
        let mut content = written().await;
        let header = Qcow2Header::parse(&content).expect("valid");
        let block = u64_at(&content, header.refcount_table_offset as usize) as usize;
        content[block..block + 4096].fill(0);
        content[79] |= incompatible::DIRTY as u8;
        let image = Qcow2Image::open(parts_of(&content).await).await.expect("mended");
        assert_eq!(image.header().incompatible, 0);
        image.write(100 << 10, IoBuffer::zeroed(70_000).into(), Durability::Cached).await.expect("room");
        let read = image.read(0, 4096).await.expect("reads");
        assert_eq!(read.to_vec()[0], 7);
        image.close().await.expect("memory");
        let report = check(image.storage(), Repair::Nothing).await.expect("valid");
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
    });
}

#[test]
fn empty_compressed_write_is_rejected() {
    sim::run(1, async {
        let image = Qcow2Image::open(parts_of(&written().await).await).await.expect("an image");
        for offset in [0, 4096, SIZE as u64] {
            let refused = image.write_compressed(offset, IoBuffer::new(0).into()).await;
            assert_eq!(refused, Err(Error::INVALID), "{offset}");
        }
    });
}

#[test]
fn copied_flag_without_l2_table_is_harmless() {
    sim::run(1, async {
        let mut content = written().await;
        let l1 = Qcow2Header::parse(&content).expect("valid").l1_offset;
        word(&mut content, l1).copy_from_slice(&(1_u64 << 63).to_be_bytes());
        let image = Qcow2Image::open(parts_of(&content).await).await.expect("an image");
        image.write(0, IoBuffer::zeroed(5000).into(), Durability::Synchronous).await.expect("room");
        image.close().await.expect("memory");
        let report = check(image.storage(), Repair::Nothing).await.expect("a header");
        assert_eq!(report.corruptions, 0, "{report:?}");
    });
}

#[test]
fn a_long_sparse_file_is_closed_at_once() {
    sim::run(1, async {
        let content = written().await;
        let storage = Storage::memory(1 << 47);
        storage.write(0, IoBuffer::copy_of(&content).into(), Durability::Cached).await.expect("memory");
        let image = Qcow2Image::open(Qcow2Components { storage, ..parts_of(&content).await })
            .await
            .expect("an image");
        assert_eq!(image.close().await, Ok(()));
    });
}

#[test]
fn overlapping_tables_are_rejected_before_any_write() {
    sim::run(1, async {
        let mut content = written().await;
        let header = Qcow2Header::parse(&content).expect("valid");
        let l1 = header.l1_offset;
        word(&mut content, l1).copy_from_slice(&(header.refcount_table_offset | 1 << 63).to_be_bytes());
        let why = Qcow2Image::open(parts_of(&content).await).await.expect_err("overlap").to_string();
        assert!(why.contains("two tables overlap"), "{why}");
        let parts = Qcow2Components { read_only: true, ..parts_of(&content).await };
        assert!(Qcow2Image::open(parts).await.is_ok(), "to look at it");
    });
}

#[test]
fn guest_write_on_metadata_is_rejected_and_marks_the_image_corrupt() {
    for forged in [0, 4096, 1 << 40] {
        sim::run(1, async move {
            let mut content = written().await;
            let table = first_table(&content);
            word(&mut content, table).copy_from_slice(&(forged | 1_u64 << 63).to_be_bytes());
            let image = Qcow2Image::open(parts_of(&content).await).await.expect("not seen yet");
            let before = image.storage().read_all().await.expect("memory");
            let result = image.write(0, IoBuffer::zeroed(512).into(), Durability::Cached).await;
            if forged == 0 {
                // With offset 0 it is an unallocated cluster.
                assert_eq!(result, Ok(()));
                return;
            }
            assert_eq!(result, Err(Error::IO), "{forged:#x}");
            assert!(image.is_read_only());
            let retried = image.write(32_768, IoBuffer::zeroed(512).into(), Durability::Cached).await;
            assert_eq!(retried, Err(Error::NOT_PERMITTED));
            assert!(image.read(32_768, 512).await.is_ok(), "undamaged clusters can be read");
            assert_eq!(image.flush().await, Err(Error::IO));
            let after = image.storage().read_all().await.expect("memory");
            assert_eq!(image.header().incompatible, incompatible::CORRUPT);
            assert_eq!(before[512..], after[512..before.len()], "only the header has changed");
        });
    }
}

/// Components of an image whose storage fails according to `rule`.
async fn failing(content: &[u8], rule: &str) -> Qcow2Components {
    let parts = parts_of(content).await;
    let rules = vec![rule.parse().expect("a rule")];
    Qcow2Components { storage: parts.storage.with_faults(rules), ..parts }
}

#[test]
fn guest_data_on_metadata_is_not_freed() {
    sim::run(1, async {
        let mut content = written().await;
        let table = first_table(&content);
        word(&mut content, table).copy_from_slice(&(table | 1_u64 << 63).to_be_bytes());
        let image = Qcow2Image::open(parts_of(&content).await).await.expect("not seen yet");
        image.discard(0, 4096).await.expect("a change of the mapping alone");
        image.flush().await.expect("memory");
        while !image.is_read_only() {
            reactor::yield_now().await;
        }
        assert_eq!(image.refcount(table).await, Ok(1), "the cluster is not allocated again");
    });
}

#[test]
fn fua_write_in_place_flushes_no_unrelated_metadata() {
    sim::run(1, async {
        let content = written().await;
        let image = Qcow2Image::open(failing(&content, "kind=flush").await).await.expect("valid");
        let write = |offset: u64, durability| image.write(offset, IoBuffer::zeroed(4096).into(), durability);
        write(200 << 10, Durability::Cached).await.expect("room");
        assert_eq!(write(8192, Durability::Synchronous).await, Err(Error::IO), "its table has changes");
        let image = Qcow2Image::open(failing(&content, "kind=flush").await).await.expect("valid");
        image.write(8192, IoBuffer::zeroed(4096).into(), Durability::Synchronous).await.expect("in place");
        let allocates = image.write(200 << 10, IoBuffer::zeroed(4096).into(), Durability::Synchronous).await;
        assert_eq!(allocates, Err(Error::IO), "this one needs a flush");
    });
}

#[test]
fn failed_header_write_keeps_the_old_header() {
    for count in ["count=1", "probability=1"] {
        sim::run(1, async move {
            let content = written().await;
            let image = Qcow2Image::open(failing(&content, &format!("kind=flush,{count}")).await)
                .await
                .expect("valid");
            let changed = image.update_header(|header| header.size_bytes -= 512).await;
            assert_eq!(changed, Err(Error::IO));
            assert_eq!(image.header().size_bytes, SIZE as u64);
            let written_content = image.storage().read_all().await.expect("memory");
            assert_eq!(Qcow2Header::parse(&written_content[..4096]).expect("valid").size_bytes, SIZE as u64);
            // If the header could not be restored either, all writes are rejected.
            assert_eq!(image.is_read_only(), count != "count=1");
        });
    }
}

#[test]
fn growth_exposes_no_old_bytes() {
    sim::run(1, async {
        let image = DiskTestWorld::new(plain()).await.image;
        image.write(0, IoBuffer::copy_of(&[7; SIZE]).into(), Durability::Cached).await.expect("room");
        for size in [100 << 10, (50 << 10) + 512, 300 << 10, 1 << 30] {
            image.resize(size).await.expect("room");
            assert_eq!(image.size_bytes(), size);
        }
        let data = image.read(0, 300 << 10).await.expect("reads");
        let mut bytes = vec![0; 300 << 10];
        data.copy_to(&mut bytes);
        let first = bytes.iter().position(|byte| *byte != 7);
        assert_eq!(first, Some((50 << 10) + 512));
        assert!(bytes[(50 << 10) + 512..].iter().all(|byte| *byte == 0));
        image.close().await.expect("memory");
        let report = check(image.storage(), Repair::Nothing).await.expect("valid");
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
    });
}

#[test]
fn shrink_frees_refcounts() {
    sim::run(1, async {
        // A refcount block covers 64 clusters, and the tables of the mapping precede all data.
        let preallocation = Preallocation::Metadata;
        let options =
            CreateOptions { cluster_bytes: 512, refcount_bits: 64, preallocation, ..plain().options };
        let image = DiskTestWorld::new(ImageVariant { options, ..plain() }).await.image;
        let used = async |image: &Qcow2Image| {
            let header = image.header();
            let length = header.refcount_table_clusters as usize * 512;
            let table = metadata_io::read(image.storage(), header.refcount_table_offset, length)
                .await
                .expect("memory");
            words(&table).filter(|block| *block != 0).count()
        };
        assert!(used(&image).await >= SIZE / 512 / 64);
        image.resize(512).await.expect("possible");
        assert!(used(&image).await <= 2, "{} blocks", used(&image).await);
        image.resize(SIZE as u64).await.expect("room");
        image.write(0, IoBuffer::copy_of(&[7; SIZE]).into(), Durability::Cached).await.expect("room");
        image.close().await.expect("memory");
        let report = check(image.storage(), Repair::Nothing).await.expect("valid");
        assert_eq!((report.corruptions, report.leaks), (0, 0), "{report:?}");
    });
}

#[test]
fn unused_cache_slices_are_dropped_on_request() {
    sim::run(1, async {
        let content = written().await;
        let never = CacheSettings { clean_interval: Duration::ZERO, ..CacheSettings::default() };
        let image = Qcow2Image::open(Qcow2Components { caches: never, ..parts_of(&content).await })
            .await
            .expect("valid");
        let has_cache_after = async |seconds| {
            image.read(0, 512).await.expect("reads");
            reactor::sleep_until(reactor::now() + Duration::from_secs(seconds)).await;
            image.cache_statistics().bytes > 0
        };
        assert!(has_cache_after(10_000).await, "never");
        let often = CacheSettings { clean_interval: Duration::from_secs(1), ..never };
        image.set_caches(often).await.expect("valid");
        assert!(!has_cache_after(3).await, "after a second, or two");
        image.set_caches(never).await.expect("valid");
        assert!(has_cache_after(10_000).await, "never again");
    });
}
