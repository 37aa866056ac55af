//! The images of a seed: a disk with content, and the target of its backup.

use std::sync::Arc;

use block::{
    disk::{DetectZeroes, Discards, Disk},
    layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup},
};
use image::{
    Image, Qcow2Image, RawImage,
    qcow2::{
        CacheSettings, Qcow2Components,
        create::{CreateOptions, create},
        header::BackingReference,
    },
};
use jobs::target::JobTarget;
use policy::{
    throttle::{LimitKind, Limits, RateLimit},
    time::Duration,
};
use reactor::{buffer::IoBuffer, sim};
use storage::{
    Durability, Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

use crate::guest::{UNIT, chance, content};

/// Images and parameters of a seed.
pub(crate) struct World {
    pub(crate) disk: Arc<Disk>,
    pub(crate) target: JobTarget,
    /// Storage of the target.
    pub(crate) target_device: SimulatedStorage,
    /// Numbers of the initial contents of the units.
    pub(crate) numbers: Vec<u64>,
    pub(crate) source_may_fail: bool,
    pub(crate) target_may_fail: bool,
}

impl World {
    /// Draws a disk of `units`, and a target of `target_bytes`.
    pub(crate) async fn draw(units: u64, target_bytes: u64) -> Self {
        let numbers: Vec<u64> = (1..=units).map(|number| if chance(30) { 0 } else { number }).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|&number| content(number)).collect();
        let source_errors = draw_errors();
        let target_errors = draw_errors();
        let source = if chance(50) {
            raw(&bytes, draw_behaviour(source_errors)).0
        } else {
            let (file, backing) = qcow2_file(&bytes).await;
            open(file, draw_behaviour(source_errors), backing.as_deref()).await.0
        };
        let group = chance(50).then(draw_group);
        let disk = Disk::new("disk", source, DiskSettings::default(), group.as_ref()).expect("valid");
        let disk = disk
            .with_discards(if chance(70) { Discards::Unmap } else { Discards::Ignore })
            .with_detect_zeroes(DetectZeroes::ALL[sim::random(|random| random.usize(..3))]);
        let behaviour = draw_behaviour(target_errors);
        let ((target, target_device), is_zero) = draw_target(target_bytes, behaviour).await;
        Self {
            disk: Arc::new(disk),
            target: JobTarget { image: Arc::new(target), is_zero, is_overlay: false, may_unmap: chance(70) },
            target_device,
            numbers,
            source_may_fail: source_errors > 0.0,
            target_may_fail: target_errors > 0.0,
        }
    }
}

fn draw_errors() -> f64 {
    if chance(40) { sim::random(fastrand::Rng::f64) / 50.0 } else { 0.0 }
}

fn draw_group() -> Arc<ThrottleGroup> {
    let mut limits = Limits::default();
    let rate = sim::random(|random| random.u64(1 << 20..64 << 20));
    *limits.limit_mut(LimitKind::BpsTotal) = RateLimit { rate, ..RateLimit::NONE };
    ThrottleGroup::new("group", GroupSettings { limits, ..GroupSettings::default() }, None).expect("valid")
}

/// A disk whose image has bitmaps.
pub(crate) struct BitmapWorld {
    pub(crate) disk: Arc<Disk>,
    /// Storage of the image.
    pub(crate) device: SimulatedStorage,
    /// Content of the image's backing file.
    pub(crate) backing: Option<Vec<u8>>,
    /// Numbers of the initial contents of the units.
    pub(crate) numbers: Vec<u64>,
    pub(crate) source_may_fail: bool,
    pub(crate) target_may_fail: bool,
    target_behaviour: Behaviour,
}

/// Target of a backup in a chain, and its storage.
pub(crate) struct ChainTarget {
    pub(crate) target: JobTarget,
    pub(crate) device: SimulatedStorage,
    /// True if it is a qcow2 image.
    pub(crate) is_qcow2: bool,
}

fn draw_behaviour(errors: f64) -> Behaviour {
    Behaviour {
        block_bytes: if chance(50) { 4096 } else { 512 },
        latency: Duration::from_micros(sim::random(|random| random.u64(..3000))),
        error_probability: errors,
    }
}

impl BitmapWorld {
    pub(crate) async fn draw(units: u64) -> Self {
        let numbers: Vec<u64> = (1..=units).map(|number| if chance(30) { 0 } else { number }).collect();
        let bytes: Vec<u8> = numbers.iter().flat_map(|&number| content(number)).collect();
        let (source_errors, target_errors) = (draw_errors(), draw_errors());
        let (file, backing) = qcow2_file(&bytes).await;
        let (image, device) = open(file, draw_behaviour(source_errors), backing.as_deref()).await;
        let group = chance(50).then(draw_group);
        let disk = Disk::new("disk", image, DiskSettings::default(), group.as_ref()).expect("valid");
        Self {
            disk: Arc::new(disk),
            device,
            backing,
            numbers,
            source_may_fail: source_errors > 0.0,
            target_may_fail: target_errors > 0.0,
            target_behaviour: draw_behaviour(target_errors),
        }
    }

    /// A disk of this size with content, on storage without errors.
    pub(crate) async fn of_size(size_bytes: u64) -> Self {
        let options = CreateOptions { size_bytes, ..CreateOptions::default() };
        let image = Qcow2Image::open(components(created(&options).await, None).await).await.expect("new");
        let data = IoBuffer::copy_of(&vec![1; size_bytes as usize]).into();
        image.write(0, data, Durability::Cached).await.expect("memory");
        image.close().await.expect("memory");
        let file = image.storage().read_all().await.expect("memory");
        let (image, device) = open(file, Behaviour::default(), None).await;
        let disk = Disk::new("disk", image, DiskSettings::default(), None).expect("valid");
        Self {
            disk: Arc::new(disk),
            device,
            backing: None,
            numbers: Vec::new(),
            source_may_fail: false,
            target_may_fail: false,
            target_behaviour: Behaviour::default(),
        }
    }

    /// A target of an incremental backup after `last`, or of a full one without it.
    pub(crate) async fn draw_target(&self, size_bytes: u64, last: Option<&[u8]>) -> ChainTarget {
        let behaviour = self.target_behaviour;
        let is_qcow2 = chance(60);
        let is_overlay = is_qcow2 && last.is_some();
        let (image, device) = if is_qcow2 {
            let mut options = options(size_bytes);
            if is_overlay {
                options.backing = Some(BackingReference { name: "last".into(), format: Some("raw".into()) });
            }
            let file = created(&options).await.read_all().await.expect("memory");
            // Without its backing file, as the daemon opens it.
            open(file, behaviour, None).await
        } else {
            let mut bytes = last.unwrap_or_default().to_vec();
            bytes.resize(size_bytes.max(bytes.len() as u64) as usize, 0);
            let device = simulated(bytes, behaviour);
            (Image::Raw(RawImage::new(storage(&device))), device)
        };
        let target =
            JobTarget { image: Arc::new(image), is_zero: last.is_none(), is_overlay, may_unmap: chance(70) };
        ChainTarget { target, device, is_qcow2 }
    }
}

fn simulated(mut bytes: Vec<u8>, behaviour: Behaviour) -> SimulatedStorage {
    bytes.resize(bytes.len().next_multiple_of(behaviour.block_bytes), 0);
    SimulatedStorage::new(bytes, behaviour)
}

fn storage(device: &SimulatedStorage) -> Storage {
    Storage::Simulated(Align::new(device.clone()))
}

/// Opens a qcow2 file on storage that never fails.
pub(crate) async fn open_file(file: Vec<u8>, backing: Option<&[u8]>) -> Qcow2Image {
    let storage = Storage::with_content(&file).await;
    Qcow2Image::open(components(storage, backing).await).await.expect("valid")
}

fn raw(bytes: &[u8], behaviour: Behaviour) -> (Image, SimulatedStorage) {
    let device = simulated(bytes.to_vec(), behaviour);
    (Image::Raw(RawImage::new(storage(&device))), device)
}

/// A target with or without content.
async fn draw_target(bytes: u64, behaviour: Behaviour) -> ((Image, SimulatedStorage), bool) {
    if chance(40) {
        return (empty_qcow2(bytes, behaviour).await, true);
    }
    let is_zero = chance(50);
    (raw(&vec![if is_zero { 0 } else { 0xee }; bytes as usize], behaviour), is_zero)
}

/// Opens what is left of a target after a crash.
pub(crate) async fn reopen(target: &Image, content: &[u8]) -> Image {
    let storage = Storage::with_content(content).await;
    match target {
        Image::Raw(_) => Image::Raw(RawImage::new(storage)),
        Image::Qcow2(_) => {
            Image::Qcow2(Qcow2Image::open(components(storage, None).await).await.expect("it is valid"))
        }
    }
}

fn options(size_bytes: u64) -> CreateOptions {
    let bits = sim::random(|random| [9, 12, 16][random.usize(..3)]);
    CreateOptions { size_bytes, cluster_bytes: 1 << bits, ..CreateOptions::default() }
}

async fn components(storage: Storage, backing: Option<&[u8]>) -> Qcow2Components {
    let backing = match backing {
        Some(bytes) => {
            Some(Arc::new(Image::Raw(RawImage::new(Storage::with_content(bytes).await).read_only())))
        }
        None => None,
    };
    Qcow2Components {
        storage,
        backing,
        data: None,
        cipher: None,
        read_only: false,
        caches: CacheSettings::default(),
    }
}

async fn created(options: &CreateOptions) -> Storage {
    let storage = Storage::with_content(&[]).await;
    create(&storage, None, options).await.expect("valid options");
    storage
}

async fn empty_qcow2(size_bytes: u64, behaviour: Behaviour) -> (Image, SimulatedStorage) {
    let file = created(&options(size_bytes)).await.read_all().await.expect("memory");
    open(file, behaviour, None).await
}

/// A qcow2 file with this content, some of it in a backing file, and that file's content.
async fn qcow2_file(bytes: &[u8]) -> (Vec<u8>, Option<Vec<u8>>) {
    let mut options = options(bytes.len() as u64);
    let has_backing = chance(40);
    if has_backing {
        options.backing = Some(BackingReference { name: "base".into(), format: Some("raw".into()) });
    }
    let backing = has_backing.then_some(bytes);
    let storage = created(&options).await;
    let image = Qcow2Image::open(components(storage, backing).await).await.expect("new");
    for (index, unit) in bytes.chunks(UNIT as usize).enumerate() {
        let is_zero = unit.iter().all(|&byte| byte == 0);
        if has_backing && chance(50) || is_zero && !has_backing {
            continue;
        }
        let data = IoBuffer::copy_of(unit).into();
        image.write(index as u64 * UNIT, data, Durability::Cached).await.expect("memory");
    }
    image.close().await.expect("memory");
    (image.storage().read_all().await.expect("memory"), backing.map(<[u8]>::to_vec))
}

/// Opens an image on storage that may fail.
async fn open(file: Vec<u8>, behaviour: Behaviour, backing: Option<&[u8]>) -> (Image, SimulatedStorage) {
    loop {
        let device = simulated(file.clone(), behaviour);
        match Qcow2Image::open(components(storage(&device), backing).await).await {
            Ok(image) => return (Image::Qcow2(image), device),
            Err(error) => assert!(behaviour.error_probability > 0.0, "{error}"),
        }
    }
}
