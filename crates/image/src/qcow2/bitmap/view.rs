//! Queries of a bitmap while the image is served.
//!
//! Used for backups: a client queries which parts of a disk changed since the last copy, and
//! copies those. A bitmap that records is answered from memory, up to the latest write. If the
//! image is read-only, the bits stay in the file and are read on demand, so a bitmap costs only
//! the memory of its table.
//!
//! Never shows a bitmap that does not record while its image is writable: it may move in the file,
//! or lack marks.
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Bitmap table" and "Bitmap data".

use std::sync::Arc;

use super::{
    BitmapEntry, BitmapError, RecordingBitmap,
    directory::{BitmapCluster, flag},
};
use reactor::error::{Error, Result};
use storage::MAX_EXTENTS;

use crate::qcow2::{InvalidImage, MetadataError, Qcow2Image, metadata_io, read_header};

// Clusters of bits per query.
const MAX_CLUSTERS: u32 = 16;

/// Reason why a bitmap cannot be queried.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BitmapViewError {
    /// No bitmap has this name, or its name is not text.
    #[error("there is no bitmap {0:?}")]
    NotFound(String),
    /// The bitmap does not record, and the image is writable.
    #[error("bitmap {0:?} does not record writes, and can be read only if the image is read-only")]
    Disabled(String),
    /// A backup uses the bitmap.
    #[error("bitmap {0:?} is in use by a backup (wait for its end, or cancel it)")]
    Busy(String),
    /// The image was written to without updating the bitmap.
    #[error("bitmap {0:?} is marked in-use and may be inconsistent")]
    Inconsistent(String),
    /// The bitmap cannot be read.
    #[error(transparent)]
    Metadata(#[from] MetadataError),
}

/// A bitmap for queries.
#[derive(Debug)]
pub struct BitmapView {
    image: Qcow2Image,
    name: Arc<str>,
    source: BitmapSource,
}

/// Location of the bits.
#[derive(Debug)]
enum BitmapSource {
    /// In the file.
    Stored { granularity_bits: u32, table: Vec<BitmapCluster> },
    /// In memory, where writes add marks. Looked up by name for each query, because another process
    /// may replace the bitmap while it uses the image.
    Recorded,
}

/// A run of bytes that are all marked or all unmarked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MarkedRun {
    /// Length in bytes, never zero.
    pub length: u64,
    /// True if the bitmap marks the run.
    pub dirty: bool,
}

impl Qcow2Image {
    /// Opens a bitmap by name.
    ///
    /// # Errors
    /// [`BitmapViewError`].
    pub async fn view_bitmap(&self, name: &str) -> std::result::Result<BitmapView, BitmapViewError> {
        // It must not keep the files of an earlier chain open.
        let view = |source| BitmapView { image: self.without_chain(), name: name.into(), source };
        if let Some(recorded) = self.recorded_bitmap(name) {
            // At the end of the backup its marks would vanish under the client that reads them.
            return match recorded.is_busy() {
                true => Err(BitmapViewError::Busy(name.to_owned())),
                false => Ok(view(BitmapSource::Recorded)),
            };
        }
        let is_foreign = !self.is_read_only() && !self.has_loaded_bitmaps();
        let entries = match is_foreign {
            true => self.bitmaps_of_other_process().await?,
            false => self.bitmaps().await?,
        };
        let entry = entries.iter().find(|entry| entry.name == name.as_bytes());
        let entry = entry.ok_or_else(|| BitmapViewError::NotFound(name.to_owned()))?;
        if is_foreign && entry.flags & flag::AUTO != 0 {
            // Another process uses the image and the bitmap. Its bits become available with
            // `take_over`.
            return Ok(view(BitmapSource::Recorded));
        }
        if entry.flags & flag::IN_USE != 0 {
            return Err(BitmapViewError::Inconsistent(name.to_owned()));
        }
        if !self.is_read_only() {
            return Err(BitmapViewError::Disabled(name.to_owned()));
        }
        self.check_table(entry, self.size_bytes()).map_err(MetadataError::from)?;
        let granularity_bits = entry.granularity_bits;
        // Bounded by the directory's rules: a few megabytes.
        Ok(view(BitmapSource::Stored { granularity_bits, table: self.bitmap_table(entry).await? }))
    }

    /// Reads the directory from the file, to which another process may write meanwhile.
    async fn bitmaps_of_other_process(&self) -> std::result::Result<Vec<BitmapEntry>, BitmapViewError> {
        let storage = self.file.storage();
        storage.refresh_size().await.map_err(MetadataError::from)?;
        Ok(self.bitmaps_of(&read_header(storage).await?).await?)
    }
}

impl From<BitmapError> for BitmapViewError {
    fn from(error: BitmapError) -> Self {
        Self::Metadata(match error {
            BitmapError::Failed(error) => error.into(),
            BitmapError::Invalid(invalid) => invalid.into(),
            other => InvalidImage::new(other.to_string()).into(),
        })
    }
}

impl BitmapView {
    /// Name of the bitmap.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// True if it is a bitmap of this image.
    pub fn is_of(&self, image: &Qcow2Image) -> bool {
        Arc::ptr_eq(&self.image.state, &image.state)
    }

    /// True if both are bitmaps of the same image; names may repeat in a chain.
    pub fn is_of_the_same_image(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.image.state, &other.image.state)
    }

    /// Returns the marks from `offset` on: 1 to [`MAX_EXTENTS`] contiguous runs that cover at
    /// most `length` bytes and may end earlier. `length` must not be zero. Beyond the end of the
    /// image, which an overlay may exceed, nothing is marked.
    ///
    /// # Errors
    /// [`Error::INVALID`] if `length` is zero; [`Error::SHUTDOWN`] while another process uses the
    /// image, or if that process removed the bitmap; or the storage's error.
    pub async fn marked(&self, offset: u64, length: u64) -> Result<Vec<MarkedRun>> {
        let end = offset.checked_add(length).filter(|_| length > 0).ok_or(Error::INVALID)?;
        let end = end.min(self.image.size_bytes());
        if offset >= end {
            return Ok(vec![MarkedRun { length, dirty: false }]);
        }
        match &self.source {
            BitmapSource::Recorded => {
                let recorded = self.image.recorded_bitmap(&self.name).ok_or(Error::SHUTDOWN)?;
                Ok(recorded_runs(&recorded, offset, end))
            }
            BitmapSource::Stored { granularity_bits, table } => {
                let stored = StoredBitmap { image: &self.image, granularity_bits: *granularity_bits, table };
                stored.runs(offset, end).await
            }
        }
    }
}

fn recorded_runs(recorded: &RecordingBitmap, mut at: u64, end: u64) -> Vec<MarkedRun> {
    let (bits, earlier) = recorded.live_bits();
    let mut runs = Vec::new();
    while at < end && runs.len() < MAX_EXTENTS {
        let (length, dirty) = bits.run_of_union(earlier.as_deref(), at, end);
        push(&mut runs, length, dirty);
        at += length;
    }
    runs
}

/// A bitmap in the file.
struct StoredBitmap<'a> {
    image: &'a Qcow2Image,
    granularity_bits: u32,
    table: &'a [BitmapCluster],
}

impl StoredBitmap<'_> {
    async fn runs(&self, offset: u64, end: u64) -> Result<Vec<MarkedRun>> {
        let cluster_bytes = 1_u64 << self.image.shape.cluster_bits;
        let mut runs = Vec::new();
        let mut reads = 0;
        let mut at = offset;
        while at < end {
            let bit = at >> self.granularity_bits;
            let index = bit / (cluster_bytes * 8);
            // The directory's rules bound the bits of a disk to less than 2⁶³ bytes, so nothing
            // overflows.
            let span_end = end.min(((index + 1) * cluster_bytes * 8) << self.granularity_bits);
            match self.table.get(index as usize).ok_or(Error::INVALID)? {
                BitmapCluster::Zeroes => push(&mut runs, span_end - at, false),
                BitmapCluster::Ones => push(&mut runs, span_end - at, true),
                BitmapCluster::Stored(_) if reads == MAX_CLUSTERS => break,
                BitmapCluster::Stored(place) => {
                    reads += 1;
                    let bits =
                        metadata_io::read(self.image.file.storage(), *place, cluster_bytes as usize).await?;
                    if !self.scan(&bits, index * cluster_bytes * 8, at, span_end, &mut runs) {
                        break;
                    }
                }
            }
            if runs.len() >= MAX_EXTENTS {
                break;
            }
            at = span_end;
        }
        runs.truncate(MAX_EXTENTS);
        Ok(runs)
    }

    /// Appends the runs from `at` to `end`. `bits` are their bits, of which the first has the
    /// number `first`. Returns false if there are too many runs.
    fn scan(&self, bits: &[u8], first: u64, mut at: u64, end: u64, runs: &mut Vec<MarkedRun>) -> bool {
        while at < end {
            let bit = (at >> self.granularity_bits) - first;
            let dirty = bits[(bit / 8) as usize] & 1 << (bit % 8) != 0;
            let next = end.min(((at >> self.granularity_bits) + 1) << self.granularity_bits);
            push(runs, next - at, dirty);
            // One run above the limit proves that the last one within it is complete.
            if runs.len() > MAX_EXTENTS {
                return false;
            }
            at = next;
        }
        true
    }
}

fn push(runs: &mut Vec<MarkedRun>, length: u64, dirty: bool) {
    match runs.last_mut() {
        Some(last) if last.dirty == dirty => last.length += length,
        _ => runs.push(MarkedRun { length, dirty }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::{
        Qcow2Components,
        bitmap::directory::{self, BitmapEntry},
        create::{CreateOptions, create},
        header::{BitmapsExtension, FileRegion, autoclear},
    };
    use reactor::sim;
    use storage::Storage;

    const SIZE: u64 = 1 << 30;

    /// An image with clusters of 512 bytes and a bitmap `b`, in which a bit covers 64 KiB and a
    /// cluster has 4096 bits.
    async fn image(flags: u32, table: &[BitmapCluster], bits: &[u8], read_only: bool) -> Qcow2Image {
        let storage = Storage::memory(512);
        let options = CreateOptions { size_bytes: SIZE, cluster_bytes: 512, ..CreateOptions::default() };
        let mut header = create(&storage, None, &options).await.expect("valid");
        let at = storage.size_bytes().next_multiple_of(512);
        let entry = BitmapEntry {
            table_offset: at + 512,
            table_entries: table.len() as u32,
            flags,
            granularity_bits: 16,
            name: b"b".to_vec(),
            extra: Vec::new(),
        };
        let place = |bits: &BitmapCluster| match bits {
            BitmapCluster::Stored(place) => BitmapCluster::Stored(at + place),
            other => *other,
        };
        let stored: Vec<_> = table.iter().map(place).collect();
        let directory = directory::encode(&[entry]);
        metadata_io::write(&storage, at, &directory).await.expect("memory");
        metadata_io::write(&storage, at + 512, &directory::encode_table(&stored)).await.expect("memory");
        metadata_io::write(&storage, at + 1024, bits).await.expect("memory");
        metadata_io::grow(&storage, at + 1024 + 512).await.expect("memory");
        header.bitmaps = Some(BitmapsExtension {
            count: 1,
            directory: FileRegion { offset: at, length: directory.len() as u64 },
        });
        header.autoclear = autoclear::BITMAPS;
        metadata_io::write(&storage, 0, &header.encode().expect("valid")).await.expect("memory");
        Qcow2Image::open(Qcow2Components { read_only, ..Qcow2Components::of(storage) }).await.expect("valid")
    }

    fn runs(marked: &[MarkedRun]) -> Vec<(u64, bool)> {
        marked.iter().map(|run| (run.length >> 16, run.dirty)).collect()
    }

    #[test]
    fn marks_are_read_across_clusters_of_bits() {
        sim::run(1, async {
            let table = [
                BitmapCluster::Ones,
                BitmapCluster::Stored(1024),
                BitmapCluster::Zeroes,
                BitmapCluster::Ones,
            ];
            let view = image(0, &table, &[0b0000_0110], true).await.view_bitmap("b").await.expect("there");
            let all = view.marked(0, SIZE).await.expect("readable");
            assert_eq!(runs(&all), [(4096, true), (1, false), (2, true), (8189, false), (4096, true)]);
            let part = view.marked((4097 << 16) + 512, 512).await.expect("readable");
            assert_eq!(part, [MarkedRun { length: 512, dirty: true }]);
            let run = |length, dirty| Ok(vec![MarkedRun { length, dirty }]);
            assert_eq!(view.marked(SIZE - 1, 2).await, run(1, true), "up to the end of its image");
            assert_eq!(view.marked(SIZE, 2).await, run(2, false), "behind it");
            assert_eq!(view.marked(0, 0).await, Err(Error::INVALID));
        });
    }

    #[test]
    fn reply_is_bounded_and_resumes_at_its_end() {
        sim::run(1, async {
            let table = [0, 1, 2, 3].map(|cluster| BitmapCluster::Stored(1024 + cluster * 512));
            let view = image(0, &table, &[0x55; 4 * 512], true).await.view_bitmap("b").await.expect("there");
            let reply = view.marked(0, SIZE).await.expect("readable");
            assert_eq!(reply.len(), MAX_EXTENTS);
            assert!(
                reply
                    .iter()
                    .zip([true, false].into_iter().cycle())
                    .all(|(run, dirty)| *run == MarkedRun { length: 65536, dirty })
            );
            let next = view.marked(256 << 16, 65536).await.expect("readable");
            assert_eq!(next, [MarkedRun { length: 65536, dirty: true }]);
        });
    }

    #[test]
    fn unusable_bitmaps_are_not_listed() {
        sim::run(1, async {
            let table = [BitmapCluster::Zeroes; 4];
            let error =
                image(flag::IN_USE, &table, &[], true).await.view_bitmap("b").await.expect_err("in use");
            assert_eq!(error, BitmapViewError::Inconsistent("b".to_owned()));
            let error = image(0, &table, &[], true).await.view_bitmap("c").await.expect_err("another");
            assert_eq!(error, BitmapViewError::NotFound("c".to_owned()));
            let error = image(0, &table, &[], false).await.view_bitmap("b").await.expect_err("writable");
            assert_eq!(error, BitmapViewError::Disabled("b".to_owned()));
            let error = image(0, &table[..3], &[], true).await.view_bitmap("b").await.expect_err("too short");
            assert!(error.to_string().contains("too short"), "{error}");
        });
    }
}
