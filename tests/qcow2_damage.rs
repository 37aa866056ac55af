//! Damaged images: `weir image check` beside `qemu-img check`.
//!
//! ```text
//!   seed ─► damaged image ─► check ─► repair ─► repair by force
//!                              │         │           │
//!                              ▼         ▼           ▼
//!                 sees what QEMU sees    QEMU finds nothing, or weir refused
//!                                        every guest byte is as before, or reported as lost
//! ```
//!
//! weir's check, repair and reads run in this process, on a simulated reactor and in memory,
//! because there are many images. qemu-img runs where its answer decides: its check where weir
//! found nothing or claims a complete repair, and its reads where a repair changed the file.
//!
//! An image comes from its seed alone: `WEIR_SEED=N WEIR_DAMAGED=1` repeats one. A plain run tries
//! a few, `make soak` 20,000.

mod images;

use std::{
    collections::BTreeMap,
    env, fs,
    ops::AddAssign,
    path::PathBuf,
    sync::Arc,
    sync::{
        Mutex,
        atomic::{AtomicU64, Ordering},
    },
    thread,
};

use fastrand::Rng;
use image::{
    Image, RawImage,
    qcow2::{
        CacheSettings, Qcow2Components, Qcow2Image,
        check::{CheckReport, GuestRange, Repair, check},
        header::{EncryptionMethod, Qcow2Header},
        luks::{CipherKind, SectorCipher},
        read_header,
    },
};
use reactor::sim;
use storage::Storage;

use self::images::{BASE, ImageTemplate, KEY, open_arguments, templates};
use crate::harness::{Scratch, TestClient, qemu_img};

/// Maximum number of bytes of a disk that are read; damage may increase its size.
const MAX_BYTES: u64 = 512 << 10;
/// Number of parts that QEMU reads one by one if it cannot read the whole disk.
const SAMPLES: usize = 24;
/// Interval of images that QEMU reads in any case, and checks after a forced repair as well.
const THOROUGH_INTERVAL: u64 = 8;
/// Maximum number of failures that are printed.
const MAX_SHOWN: usize = 20;

fn setting(name: &str, default: u64) -> u64 {
    env::var(name).map_or(default, |text| text.parse().expect("a number"))
}

#[test]
fn repair_keeps_all_data_and_satisfies_qemu() {
    compare(setting("WEIR_SEED", 1), setting("WEIR_DAMAGED", 200));
}

/// Numbers of images by result.
#[derive(Clone, Copy, Debug, Default)]
struct DamageTally {
    /// Neither program finds damage.
    intact: u64,
    /// The header is unusable.
    unusable: u64,
    /// Everything was repaired, and QEMU agrees.
    repaired: u64,
    /// A repair left ambiguous content unchanged.
    refused: u64,
    /// Refused images that a forced repair repaired completely.
    forced: u64,
    /// Repairs for which QEMU read the disk before and after.
    read_by_qemu: u64,
}

impl AddAssign for DamageTally {
    fn add_assign(&mut self, more: Self) {
        self.intact += more.intact;
        self.unusable += more.unusable;
        self.repaired += more.repaired;
        self.refused += more.refused;
        self.forced += more.forced;
        self.read_by_qemu += more.read_by_qemu;
    }
}

/// Tests the images of `many` seeds, on all processors.
pub(crate) fn compare(first: u64, many: u64) {
    let scratch = Scratch::new();
    let templates = templates(&scratch.path("."));
    let next = AtomicU64::new(first);
    let failures: Mutex<Vec<String>> = Mutex::default();
    let totals: Mutex<DamageTally> = Mutex::default();
    let threads = thread::available_parallelism().map_or(1, usize::from) as u64;
    thread::scope(|scope| {
        for number in 0..setting("WEIR_THREADS", threads) {
            let directory = scratch.path(&format!("thread-{number}"));
            let (templates, next, failures, totals) = (&templates, &next, &failures, &totals);
            scope.spawn(move || {
                let worker = DamageWorker::new(directory, templates);
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= first + many {
                        return;
                    }
                    match worker.run(templates, seed) {
                        Ok(counts) => *totals.lock().expect("no panic holds it") += counts,
                        Err(failure) => {
                            println!("{failure}\n");
                            failures.lock().expect("no panic holds it").push(failure);
                        }
                    }
                }
            });
        }
    });
    let totals = totals.into_inner().expect("all threads have ended");
    println!("{many} images from seed {first}: {totals:?}");
    let failures = failures.into_inner().expect("all threads have ended");
    let shown = failures.iter().take(MAX_SHOWN).cloned().collect::<Vec<_>>().join("\n\n");
    assert!(failures.is_empty(), "{} of {many} images:\n{shown}", failures.len());
}

/// Directory of one thread with the files that QEMU reads.
struct DamageWorker {
    directory: PathBuf,
    base: Vec<u8>,
}

/// Parts of the disk (key `None`) and of each snapshot (its name); a part is `None` if unreadable.
type DiskContents = BTreeMap<Option<String>, Vec<Option<Vec<u8>>>>;

/// An image in memory with its backing file and data file.
#[derive(Clone)]
struct DamagedImage {
    bytes: Vec<u8>,
    base: Vec<u8>,
    data: Option<Vec<u8>>,
    grain: u64,
}

impl DamageWorker {
    fn new(directory: PathBuf, templates: &[ImageTemplate]) -> Self {
        fs::create_dir(&directory).expect("the directory can be created");
        let above = directory.parent().expect("the path has a parent");
        let base = fs::read(above.join(BASE)).expect("it was made");
        fs::write(directory.join(BASE), &base).expect("the file can be written");
        fs::copy(above.join(KEY), directory.join(KEY)).expect("the file can be written");
        for (name, content) in templates.iter().filter_map(|template| template.data.as_ref()) {
            fs::write(directory.join(name), content).expect("the file can be written");
        }
        Self { directory, base }
    }

    fn run(&self, templates: &[ImageTemplate], seed: u64) -> Result<DamageTally, String> {
        let mut random = Rng::with_seed(seed);
        let template = &templates[random.usize(..templates.len())];
        let (bytes, damage) = template.damaged(&mut random);
        let label = format!("seed {seed}: {}: {damage}\n", template.options);
        let data = template.data.as_ref().map(|(_, content)| content.clone());
        let content = DamagedImage { bytes, base: self.base.clone(), data, grain: template.grain };
        // QEMU repeats only some of weir's checks.
        let is_thorough = seed.is_multiple_of(THOROUGH_INTERVAL);
        self.examine(template, content, &mut random, is_thorough).map_err(|failure| label + &failure)
    }

    fn examine(
        &self,
        template: &ImageTemplate,
        content: DamagedImage,
        random: &mut Rng,
        is_thorough: bool,
    ) -> Result<DamageTally, String> {
        let Some((found, _)) = repaired(&content, Repair::Nothing) else {
            return Ok(DamageTally { unusable: 1, ..DamageTally::default() });
        };
        if is_clean(&found) {
            self.qemu_finds_nothing(template, &content.bytes, "weir finds nothing", &found)?;
            return Ok(DamageTally { intact: 1, ..DamageTally::default() });
        }
        let before = disks(&content);
        let is_readable = before.get(&None).is_some_and(|parts| parts.iter().all(Option::is_some));
        let mut counts = DamageTally::default();
        let mut by_qemu = None;
        for repair in [Repair::All, Repair::Forced] {
            let Some((report, bytes)) = repaired(&content, repair) else {
                return Ok(DamageTally { unusable: 1, ..counts });
            };
            let label = format!("{repair:?}");
            let after = DamagedImage { bytes, ..content.clone() };
            if repair == Repair::All && !report.lost.is_empty() {
                return Err(format!("lost without force: {report:#?}"));
            }
            let is_changed = after.bytes != content.bytes;
            if is_changed {
                compare_disks(&before, &disks(&after), template.grain, &report)
                    .map_err(|failure| format!("{label}, read by weir: {failure}\n{report:#?}"))?;
            }
            if is_changed && !template.is_encrypted && (is_thorough || !is_readable) {
                let samples =
                    by_qemu.get_or_insert_with(|| self.read(template, &content.bytes, None, random));
                let parts: Vec<u64> = samples.keys().copied().collect();
                let read = self.read(template, &after.bytes, Some(&parts), random);
                compare_samples(samples, &read, template.grain, &report)
                    .map_err(|failure| format!("{label}, read by QEMU: {failure}\n{report:#?}"))?;
                counts.read_by_qemu += 1;
            }
            if is_clean(&report) && (is_thorough || repair == Repair::All) {
                self.qemu_finds_nothing(template, &after.bytes, &label, &report)?;
            }
            match (repair, is_clean(&report)) {
                (Repair::All, true) => return Ok(DamageTally { repaired: 1, ..counts }),
                (Repair::All, false) => counts.refused += 1,
                (_, is_clean) => counts.forced += u64::from(is_clean),
            }
        }
        Ok(counts)
    }

    fn put(&self, bytes: &[u8]) {
        fs::write(self.directory.join("image"), bytes).expect("the file can be written");
    }

    fn qemu_finds_nothing(
        &self,
        template: &ImageTemplate,
        bytes: &[u8],
        label: &str,
        report: &CheckReport,
    ) -> Result<(), String> {
        self.put(bytes);
        let check = qemu_img(["check"]).args(open_arguments("image", template.is_encrypted));
        let outcome = check.inside(&self.directory).run();
        let output = format!("{}{}", outcome.stderr(), outcome.stdout());
        // The damage changed the name of another file, or enabled the old encryption: then QEMU has
        // checked nothing else.
        let is_about_others = ["No such file", "'encrypt.key-secret' is required"];
        if outcome.status() == Some(0) || is_about_others.iter().any(|message| output.contains(message)) {
            return Ok(());
        }
        let first = output.lines().take(8).collect::<Vec<_>>().join("\n");
        Err(format!("{label}, and qemu-img check ({:?}) says:\n{first}\nweir: {report:#?}", outcome.status()))
    }

    /// Parts that QEMU can read, by number: the whole disk, or single parts if that fails.
    fn read(
        &self,
        template: &ImageTemplate,
        bytes: &[u8],
        parts: Option<&[u64]>,
        random: &mut Rng,
    ) -> BTreeMap<u64, Vec<u8>> {
        self.put(bytes);
        let grain = template.grain;
        let convert = qemu_img(["convert", "-f", "qcow2", "-O", "raw", "image", "disk"]);
        let size = u64::from_be_bytes(
            bytes.get(24..32).map_or([0; 8], |size| size.try_into().expect("eight bytes")),
        );
        if size <= MAX_BYTES && convert.inside(&self.directory).run().status() == Some(0) {
            let disk = fs::read(self.directory.join("disk")).expect("it was just made");
            return (0..).zip(disk.chunks(grain as usize).map(<[u8]>::to_vec)).collect();
        }
        let count = size.min(MAX_BYTES) / grain;
        let parts = match parts {
            Some(parts) => random_choice(parts.to_vec(), random),
            None => random_choice((0..count).collect(), random),
        };
        // An error may end all reads of an open image, so it is reopened for each part.
        let mut script = String::new();
        for part in &parts {
            let offset = part * grain;
            script += &format!("open -r -o driver=qcow2 image\nread -v {offset} {grain}\nclose\n");
        }
        let printed = TestClient::new("qemu-io").with_stdin(&script).inside(&self.directory).run().stdout();
        dumps(&printed, grain)
    }
}

fn random_choice(mut parts: Vec<u64>, random: &mut Rng) -> Vec<u64> {
    random.shuffle(&mut parts);
    parts.truncate(SAMPLES);
    parts
}

/// The parts in the output of `read -v`: lines of an offset, sixteen bytes, and text.
fn dumps(printed: &str, grain: u64) -> BTreeMap<u64, Vec<u8>> {
    let mut read: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    for line in printed.lines() {
        let line = line.rsplit("qemu-io> ").next().unwrap_or(line);
        let Some((offset, rest)) = line.split_once(":  ") else { continue };
        let Ok(offset) = u64::from_str_radix(offset, 16) else { continue };
        let bytes = rest.split(' ').take(16).filter_map(|byte| u8::from_str_radix(byte, 16).ok());
        read.entry(offset / grain).or_default().extend(bytes);
    }
    read.retain(|_, bytes| bytes.len() as u64 == grain);
    read
}

fn is_clean(report: &CheckReport) -> bool {
    report.corruptions + report.leaks + report.check_errors == 0
}

/// The report of a repair and the file after it; `None` if the header is unusable.
fn repaired(content: &DamagedImage, repair: Repair) -> Option<(CheckReport, Vec<u8>)> {
    let bytes = content.bytes.clone();
    sim::run(1, async move {
        let storage = Storage::with_content(&bytes).await;
        let report = check(&storage, repair).await.ok()?;
        Some((report, storage.read_all().await.expect("storage in memory can be read")))
    })
}

/// All data that weir reads from an image.
fn disks(content: &DamagedImage) -> DiskContents {
    let content = content.clone();
    sim::run(1, async move {
        let mut disks = DiskContents::new();
        let storage = Storage::with_content(&content.bytes).await;
        let Ok(header) = read_header(&storage).await else { return disks };
        let Ok(image) = Qcow2Image::open(parts(&content, &header).await).await else { return disks };
        let snapshots = image.snapshots().await.unwrap_or_default();
        disks.insert(None, read_all(&image, content.grain).await);
        for snapshot in snapshots.iter().take(4) {
            let parts = parts(&content, &header).await;
            let Ok(disk) = Qcow2Image::open_snapshot(parts, &snapshot.id()).await else { continue };
            disks.insert(Some(snapshot.name().into_owned()), read_all(&disk, content.grain).await);
        }
        disks
    })
}

async fn read_all(image: &Qcow2Image, grain: u64) -> Vec<Option<Vec<u8>>> {
    let mut read = Vec::new();
    for part in 0..image.size_bytes().min(MAX_BYTES) / grain {
        let mut bytes = vec![0; grain as usize];
        let data = image.read(part * grain, bytes.len()).await.ok();
        read.push(data.map(|data| {
            data.copy_to(&mut bytes);
            bytes
        }));
    }
    read
}

async fn parts(content: &DamagedImage, header: &Qcow2Header) -> Qcow2Components {
    let backing = match &header.backing {
        Some(_) => {
            Some(Arc::new(Image::Raw(RawImage::new(Storage::with_content(&content.base).await).read_only())))
        }
        None => None,
    };
    let data = match &content.data {
        Some(data) if header.has_data_file() => Some(Storage::with_content(data).await),
        _ => None,
    };
    // Any key shows whether the same bytes are decrypted.
    let key: [u8; 64] = std::array::from_fn(|index| index as u8);
    Qcow2Components {
        storage: Storage::with_content(&content.bytes).await,
        backing,
        data,
        cipher: (header.crypt == EncryptionMethod::Luks)
            .then(|| SectorCipher::new(CipherKind::DEFAULT, &key).expect("a key")),
        read_only: true,
        caches: CacheSettings::default(),
    }
}

fn is_lost(lost: &[GuestRange], snapshot: &Option<String>, offset: u64) -> bool {
    lost.iter().any(|range| {
        range.snapshot == *snapshot && (range.offset..range.offset + range.length).contains(&offset)
    })
}

fn compare_disks(
    before: &DiskContents,
    after: &DiskContents,
    grain: u64,
    report: &CheckReport,
) -> Result<(), String> {
    for (name, parts) in before {
        let now = after.get(name).ok_or_else(|| format!("{name:?} cannot be opened any more"))?;
        for (number, part) in parts.iter().enumerate() {
            let offset = number as u64 * grain;
            if part.is_some() && now.get(number) != Some(part) && !is_lost(&report.lost, name, offset) {
                return Err(format!("{name:?} changed at {offset:#x}"));
            }
        }
    }
    Ok(())
}

fn compare_samples(
    before: &BTreeMap<u64, Vec<u8>>,
    after: &BTreeMap<u64, Vec<u8>>,
    grain: u64,
    report: &CheckReport,
) -> Result<(), String> {
    for (number, part) in before {
        let offset = number * grain;
        if after.get(number) != Some(part) && !is_lost(&report.lost, &None, offset) {
            let now = after.get(number).map(|bytes| bytes[0]);
            return Err(format!("changed at {offset:#x} from {:#x}… to {now:x?}", part[0]));
        }
    }
    Ok(())
}
