//! Entry points of the fuzz targets for images of arbitrary bytes, and the properties that must
//! hold.
//!
//! | | Operations | Properties |
//! | --- | --- | --- |
//! | [`check()`] | check, repair | an image that a repair reports as consistent is consistent |
//! | [`open`] | open, query disk, snapshots, bitmaps, LUKS header | no extent is empty |
//! | [`lookup`] | requests, resizes, snapshots | reads return the written data; no new damage |
//!
//! All operations terminate. The properties of [`lookup`] hold for images that are consistent at
//! first.
//!
//! In this crate and not in `fuzz/`, because tests briefly run the same checks on damaged images.
//! Everything is in memory, on a simulated reactor that panics if tasks deadlock.
//!
//! Never derives a key, which is slow by design. Encrypted images get an arbitrary key.

#[cfg(test)]
#[path = "fuzzing_tests.rs"]
mod tests;

use std::sync::Arc;

use super::{
    CacheSettings, L2CacheSize, Qcow2Components, Qcow2Image,
    check::{self, Repair},
    header::{EncryptionMethod, Qcow2Header, autoclear},
    luks::{self, CipherKind, SectorCipher},
    read_header,
    snapshot::NewSnapshot,
};
use reactor::{buffer::IoBuffer, sim};
use storage::{Durability, Storage, ZeroOptions};

use crate::{Image, RawImage};

// Larger images only take more time.
const LARGEST: usize = 4 << 20;
// Size limit of other files of the image.
const MAX_OTHER_FILE_BYTES: u64 = 64 << 20;
// Size limit of a resize.
const MAX_DISK_BYTES: u64 = 16 << 20;
// Limit of queries and reads of an image: a disk of 2⁶⁰ bytes would take forever.
const MAX_QUERIES: usize = 500;
// Encoded size of a `FuzzRequest`.
const REQUEST_BYTES: usize = 6;
// Limit of requests to an image.
const MAX_REQUESTS: usize = 32;

/// Checks and repairs an image.
pub fn check(data: &[u8]) {
    with_content(data, async |content| {
        let image = Storage::with_content(&content).await;
        let Ok(found) = check::check(&image, Repair::Nothing).await else { return };
        for repair in [Repair::Leaks, Repair::All, Repair::Forced] {
            let image = Storage::with_content(&content).await;
            let Ok(repaired) = check::check(&image, repair).await else { continue };
            if repaired.corruptions + repaired.check_errors > 0 {
                continue;
            }
            let rechecked = check::check(&image, Repair::Nothing).await.expect("its header was read before");
            assert_eq!(
                (rechecked.corruptions, rechecked.check_errors, rechecked.leaks),
                (0, 0, repaired.leaks),
                "{found:?}"
            );
        }
    });
}

/// Opens an image for reading, for maintenance and for writing, with its snapshots, bitmaps and
/// LUKS header.
pub fn open(data: &[u8]) {
    with_content(data, async |content| {
        let storage = Storage::with_content(&content).await;
        let Ok(header) = read_header(&storage).await else { return };
        if let Some(place) = header.encryption {
            let _ = luks::read_header(&storage, place).await;
        }
        if let Ok(image) = Qcow2Image::open(parts(&content, &header, true).await).await {
            verify(&image).await;
            read_bitmaps(&image).await;
            for snapshot in image.snapshots().await.unwrap_or_default().iter().take(4) {
                let parts = parts(&content, &header, true).await;
                if let Ok(disk) = Qcow2Image::open_snapshot(parts, &snapshot.id()).await {
                    verify(&disk).await;
                }
            }
        }
        if let Ok(image) = Qcow2Image::open_for_maintenance(storage).await {
            let _ = image.snapshots().await;
            let _ = image.bitmaps().await;
            let _ = image.close().await;
        }
        if let Ok(image) = Qcow2Image::open(parts(&content, &header, false).await).await {
            let _ = image.close().await;
        }
    });
}

/// Sends requests to an image. The last byte of `data` is their number; [`REQUEST_BYTES`] for each
/// precede it.
pub fn lookup(data: &[u8]) {
    let Some((&count, rest)) = data.split_last() else { return };
    let count = usize::from(count) % MAX_REQUESTS;
    let Some(end) = rest.len().checked_sub(count * REQUEST_BYTES) else { return };
    let (content, requests) = rest.split_at(end);
    let requests: Vec<FuzzRequest> = requests.chunks_exact(REQUEST_BYTES).map(FuzzRequest::decode).collect();
    with_content(content, async move |content| {
        let storage = Storage::with_content(&content).await;
        let Ok(header) = read_header(&storage).await else { return };
        let was_consistent = is_consistent(&storage).await;
        let Ok(image) = Qcow2Image::open(parts(&content, &header, false).await).await else { return };
        for request in requests {
            request.execute(&image, was_consistent).await;
        }
        let _ = image.close().await;
        let after = check::check(image.file.storage(), Repair::Nothing).await;
        if was_consistent {
            let after = after.expect("its header was read before");
            assert_eq!((after.corruptions, after.check_errors), (0, 0), "{after:#?}");
        }
    });
}

/// A request to an open image.
#[derive(Clone, Copy, Debug)]
struct FuzzRequest {
    kind: u8,
    /// True if the offset counts backwards from the end of the disk.
    from_end: bool,
    offset: u64,
    length: u64,
    byte: u8,
}

impl FuzzRequest {
    fn decode(bytes: &[u8]) -> Self {
        Self {
            kind: bytes[0] & 0xf,
            from_end: bytes[0] & 0x80 != 0,
            offset: (u64::from(bytes[1]) << 8 | u64::from(bytes[2])) * 128 + u64::from(bytes[3]) * 2,
            length: (1 << (bytes[4] % 15)) + u64::from(bytes[5]),
            byte: bytes[5],
        }
    }

    /// The range, limited to the disk.
    fn range(self, size_bytes: u64) -> (u64, u64) {
        let offset = if self.from_end { size_bytes.saturating_sub(self.offset) } else { self.offset };
        let offset = offset.min(size_bytes);
        (offset, self.length.min(size_bytes - offset))
    }

    /// Executes the request. Errors are allowed for every image; only a consistent image must
    /// return the written data.
    async fn execute(self, image: &Qcow2Image, was_consistent: bool) {
        let (offset, length) = self.range(image.size_bytes());
        let zeroes =
            |may_unmap| ZeroOptions { may_unmap, only_if_fast: false, durability: Durability::Cached };
        match self.kind {
            0 => drop(image.read(offset, length as usize).await),
            1..=4 => self.write(image, offset, length, was_consistent).await,
            5 | 6 => drop(image.write_zeroes(offset, length, zeroes(self.kind == 5)).await),
            7 => drop(image.discard(offset, length).await),
            8 => drop(image.flush().await),
            9 => drop(image.resize((offset % MAX_DISK_BYTES).next_multiple_of(512)).await),
            10 | 11 => self.write_compressed(image, offset).await,
            12 => drop(image.create_snapshot(NewSnapshot { name: "new", date_s: 1, date_ns: 2 }).await),
            13 => drop(image.apply_snapshot("1").await),
            14 => drop(image.delete_snapshot("1").await),
            _ => drop(image.block_status(offset, length).await),
        }
    }

    async fn write(self, image: &Qcow2Image, offset: u64, length: u64, was_consistent: bool) {
        let mut data = IoBuffer::new(length as usize);
        data.fill(self.byte);
        if image.write(offset, data.into(), Durability::Cached).await.is_err() || !was_consistent {
            return;
        }
        let mut read = vec![!self.byte; length as usize];
        image.read(offset, read.len()).await.expect("it was just written").copy_to(&mut read);
        assert!(read.iter().all(|byte| *byte == self.byte), "{self:?}: something else is read");
    }

    async fn write_compressed(self, image: &Qcow2Image, offset: u64) {
        let cluster = image.header().cluster_bytes();
        let offset = offset & !(cluster - 1);
        let length = cluster.min(image.size_bytes() - offset);
        let mut data = IoBuffer::new(length as usize);
        data.fill(self.byte);
        let _ = image.write_compressed(offset, data.into()).await;
    }
}

/// Runs `test` with `data` as the content of an image, unless it is empty or too large.
fn with_content(data: &[u8], test: impl AsyncFnOnce(Vec<u8>) + 'static) {
    if data.is_empty() || data.len() > LARGEST {
        return;
    }
    let content = data.to_vec();
    sim::run(1, async move { test(content).await });
}

async fn is_consistent(storage: &Storage) -> bool {
    let report = check::check(storage, Repair::Nothing).await;
    report.is_ok_and(|report| report.corruptions + report.check_errors == 0)
}

/// Components of an image: memory in place of the files that its header names, an arbitrary key,
/// and the smallest caches.
async fn parts(content: &[u8], header: &Qcow2Header, read_only: bool) -> Qcow2Components {
    let other = |bytes: u64| {
        let bytes = bytes.min(MAX_OTHER_FILE_BYTES).next_multiple_of(512);
        Storage::memory(bytes)
    };
    let backing = match &header.backing {
        Some(_) => Some(Arc::new(Image::Raw(
            RawImage::new(Storage::with_content(&[0xba; 40_000]).await).read_only(),
        ))),
        None => None,
    };
    let key: [u8; 64] = std::array::from_fn(|index| index as u8);
    Qcow2Components {
        storage: Storage::with_content(content).await,
        backing,
        data: header.has_data_file().then(|| other(header.size_bytes)),
        cipher: (header.crypt == EncryptionMethod::Luks)
            .then(|| SectorCipher::new(CipherKind::DEFAULT, &key).expect("a key")),
        read_only,
        caches: CacheSettings {
            l2: Some(L2CacheSize::Bytes(0)),
            entry_bytes: Some(512),
            clean_interval: policy::time::Duration::ZERO,
            ..CacheSettings::default()
        },
    }
}

/// Queries the status of the whole disk and reads the front of each extent.
async fn verify(image: &Qcow2Image) {
    let size = image.size_bytes();
    let mut at = 0;
    for _ in 0..MAX_QUERIES {
        if at >= size {
            return;
        }
        let Ok(extents) = image.block_status(at, size - at).await else {
            // Later clusters may be valid.
            at += image.header().cluster_bytes();
            continue;
        };
        let lengths: Vec<u64> = extents.iter().map(|extent| extent.length).collect();
        let sum = lengths.iter().try_fold(0, |sum: u64, length| sum.checked_add(*length));
        assert!(!lengths.contains(&0) && sum.is_some_and(|sum| sum > 0 && sum <= size - at), "{lengths:?}");
        for length in lengths {
            let _ = image.read(at, length.min(700) as usize).await;
            at += length;
        }
    }
}

async fn read_bitmaps(image: &Qcow2Image) {
    if image.header().autoclear & autoclear::BITMAPS == 0 {
        return;
    }
    for entry in image.bitmaps().await.unwrap_or_default().iter().take(4) {
        let Ok(view) = image.view_bitmap(&entry.name()).await else { continue };
        let size = image.size_bytes();
        let mut at = 0;
        for _ in 0..MAX_QUERIES {
            let Some(length) = size.checked_sub(at).filter(|length| *length > 0) else { break };
            let Ok(runs) = view.marked(at, length).await else { break };
            let sum: u64 = runs.iter().map(|run| run.length).sum();
            assert!(sum > 0 && sum <= length, "{runs:?}");
            at += sum;
        }
    }
}
