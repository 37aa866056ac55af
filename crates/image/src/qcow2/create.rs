//! The metadata of a new image, and its preallocated clusters.
//!
//! ```text
//!   header │ refcount table │ refcount blocks │ L1 table │ LUKS header │ L2 tables │ guest data
//!                                                                        └─ if preallocated ──┘
//! ```
//!
//! The layout is complete before the first byte is written, so each cluster is written once and in
//! order. The header comes last, after a flush, and its first sector last of all: an interrupted
//! creation leaves no image instead of an incomplete one.
//!
//! Never relies on the previous content of the storage. Never opens a backing file: the caller
//! provides its size.

mod layout;
mod rules;

use self::layout::ImageLayout;
pub use self::rules::InvalidImageOption;
use super::{
    InvalidImage,
    entry::{ClusterMapping, EntryFormat, L1Entry, StandardCluster},
    header::{
        BackingReference, CompressionType, EncryptionMethod, FileRegion, Qcow2Header, autoclear, compatible,
        incompatible,
    },
    metadata_io, refcount_entries,
};
use reactor::{
    buffer::IoBuffer,
    error::{Error, Result as IoResult},
};
use storage::{Durability, Storage, ZeroOptions};

// Metadata is written in pieces of this many bytes.
const PIECE: usize = 1 << 20;
// Block size of most file systems: blocks of zeroes are not written.
const BLOCK: usize = 4096;
// Unit that a device writes atomically.
const SECTOR: u64 = 512;

/// Preallocation of a new image, as in qemu-img.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// No preallocation.
    #[default]
    Off,
    /// All guest clusters are mapped; the file is sparse.
    Metadata,
    /// As `Metadata`, and the file system has reserved the space.
    Falloc,
    /// As `Metadata`, and the space is filled with zeroes.
    Full,
}

/// Options of a new image. Defaults are QEMU's; the default size is 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// Size of the virtual disk in bytes; rounded up to sectors of 512.
    pub size_bytes: u64,
    /// Version: 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: u32,
    /// Cluster size: a power of two from 512 to 2 MiB.
    pub cluster_bytes: u64,
    /// Width of a refcount: a power of two from 1 to 64.
    pub refcount_bits: u32,
    /// True if refcount updates may be postponed.
    pub lazy_refcounts: bool,
    /// True if L2 entries are extended, with subclusters.
    pub extended_l2: bool,
    /// Compression method of compressed clusters.
    pub compression: CompressionType,
    /// Source of unallocated clusters.
    pub backing: Option<BackingReference>,
    /// Name of the external data file.
    pub data_file: Option<String>,
    /// True if the external data file is a consistent raw image.
    pub data_file_raw: bool,
    /// Preallocation.
    pub preallocation: Preallocation,
    /// LUKS header with its key slots, for an encrypted image.
    pub luks: Option<Vec<u8>>,
}

impl Default for CreateOptions {
    fn default() -> Self {
        Self {
            size_bytes: 0,
            version: 3,
            cluster_bytes: 65_536,
            refcount_bits: 16,
            lazy_refcounts: false,
            extended_l2: false,
            compression: CompressionType::Zlib,
            backing: None,
            data_file: None,
            data_file_raw: false,
            preallocation: Preallocation::Off,
            luks: None,
        }
    }
}

impl CreateOptions {
    /// Size of a file in which every guest cluster is mapped, without those clusters: header,
    /// refcounts, L1 table, all L2 tables, LUKS header. Guest data in an external data file counts
    /// as part of the image.
    ///
    /// # Errors
    /// The image would be too large for its cluster size.
    pub fn metadata_bytes(&self) -> Result<u64, InvalidImageOption> {
        let inside = Self { preallocation: Preallocation::Metadata, data_file: None, ..self.clone() };
        let layout = ImageLayout::of_any_size(&inside)?;
        Ok((layout.clusters - layout.guest_clusters) << layout.cluster_bits)
    }
}

/// Reason why an image was not created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// An invalid option or combination of options.
    #[error(transparent)]
    Rule(#[from] InvalidImageOption),
    /// The storage has a fixed size (device, NBD server) that is too small.
    #[error("needs at least {needed} bytes, but there are only {present}")]
    NoSpace {
        /// Size of the new image in bytes.
        needed: u64,
        /// Size of the storage in bytes.
        present: u64,
    },
    /// The header violates a rule that involves several options.
    #[error("{0}")]
    Invalid(#[from] InvalidImage),
    /// The storage failed.
    #[error("cannot be written: {0}")]
    Storage(#[from] Error),
}

/// Creates an image on `storage`, which must be writable; its previous content is lost. `data` is
/// the storage of [`CreateOptions::data_file`], present if and only if that is.
///
/// Returns the header. Everything that was written is durable.
///
/// # Errors
/// [`CreateError`]. `storage` is unchanged after [`CreateError::Rule`] and
/// [`CreateError::NoSpace`]; otherwise it begins with zeroes.
pub async fn create(
    storage: &Storage,
    data: Option<&Storage>,
    options: &CreateOptions,
) -> Result<Qcow2Header, CreateError> {
    let options = options.checked()?;
    let layout = ImageLayout::of(&options)?;
    let header = header(&options, &layout);
    let encoded = header.encode()?;
    let old_end = storage.size_bytes();
    let needed = layout.clusters << layout.cluster_bits;
    if storage.has_fixed_size() && old_end < needed {
        return Err(CreateError::NoSpace { needed, present: old_end });
    }
    // An old header must not survive next to new tables.
    clear_header(storage).await?;
    let writer = ImageCreator { storage, old_end, layout: &layout, options: &options, header: &header };
    writer.write_tables().await?;
    match data {
        None => writer.allocate_file_space(storage, layout.data_offset, layout.data_bytes).await?,
        Some(data) => {
            metadata_io::grow(data, options.size_bytes).await?;
            writer.allocate_file_space(data, 0, options.size_bytes).await?;
            data.flush().await?;
        }
    }
    writer.write_header(&encoded).await?;
    Ok(header)
}

fn header(options: &CreateOptions, layout: &ImageLayout) -> Qcow2Header {
    let bit = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
    let luks_bytes = options.luks.as_ref().map(|luks| luks.len() as u64);
    Qcow2Header {
        version: options.version,
        cluster_bits: layout.cluster_bits,
        size_bytes: options.size_bytes,
        crypt: if options.luks.is_some() { EncryptionMethod::Luks } else { EncryptionMethod::None },
        l1_entries: layout.l1_entries as u32,
        l1_offset: layout.l1_offset,
        refcount_table_offset: layout.refcount_table_offset,
        refcount_table_clusters: layout.refcount_table_clusters as u32,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible: bit(options.data_file.is_some(), incompatible::DATA_FILE)
            | bit(options.compression != CompressionType::Zlib, incompatible::COMPRESSION)
            | bit(options.extended_l2, incompatible::EXTENDED_L2),
        compatible: bit(options.lazy_refcounts, compatible::LAZY_REFCOUNTS),
        autoclear: bit(options.data_file_raw, autoclear::RAW_DATA_FILE),
        refcount_order: options.refcount_bits.trailing_zeros(),
        compression: options.compression,
        backing: options.backing.clone(),
        data_file: options.data_file.clone(),
        bitmaps: None,
        encryption: luks_bytes.map(|length| FileRegion { offset: layout.luks_offset, length }),
        unknown_extensions: Vec::new(),
        later_fields: Vec::new(),
    }
}

/// Invalidates an image that was there before.
async fn clear_header(storage: &Storage) -> IoResult<()> {
    metadata_io::write(storage, 0, &[0; SECTOR as usize]).await?;
    storage.flush().await
}

struct ImageCreator<'a> {
    storage: &'a Storage,
    /// Previous size of the storage: bytes before it have arbitrary content, later ones read as
    /// zeroes.
    old_end: u64,
    layout: &'a ImageLayout,
    options: &'a CreateOptions,
    header: &'a Qcow2Header,
}

/// Sequential writes, gathered into larger pieces.
struct SequentialWriter<'a> {
    writer: &'a ImageCreator<'a>,
    offset: u64,
    gathered: Vec<u8>,
}

impl SequentialWriter<'_> {
    async fn put(&mut self, bytes: &[u8]) -> IoResult<()> {
        self.gathered.extend_from_slice(bytes);
        if self.gathered.len() >= PIECE { self.finish().await } else { Ok(()) }
    }

    async fn finish(&mut self) -> IoResult<()> {
        self.writer.put(self.offset, &self.gathered).await?;
        self.offset += self.gathered.len() as u64;
        self.gathered.clear();
        Ok(())
    }
}

impl ImageCreator<'_> {
    /// Writes everything between header and guest data, in the order of the drawing above.
    async fn write_tables(&self) -> IoResult<()> {
        let layout = self.layout;
        let mut stream =
            SequentialWriter { writer: self, offset: layout.refcount_table_offset, gathered: Vec::new() };
        // In memory as a whole: the refcount table has at most 8 MiB, the L1 table 32.
        let blocks = (0..layout.refcount_blocks).map(|block| layout.refcount_block_offset(block));
        stream.put(&self.table(blocks, layout.refcount_table_clusters)).await?;
        for block in 0..layout.refcount_blocks {
            stream.put(&self.refcount_block(block)).await?;
        }
        let tables = (0..layout.l1_entries).map(|table| match layout.l2_offset(table) {
            Some(offset) => L1Entry { offset, copied: true }.encode(),
            None => L1Entry::NONE.encode(),
        });
        stream.put(&self.table(tables, layout.l1_clusters)).await?;
        if let Some(luks) = &self.options.luks {
            stream.put(luks).await?;
            stream.put(&vec![0; luks.len().next_multiple_of(layout.cluster_bytes()) - luks.len()]).await?;
        }
        for table in 0..layout.l2_tables {
            stream.put(&self.l2_table(table)).await?;
        }
        stream.finish().await
    }

    /// Writes the header so that a crash leaves either no image or a complete one.
    async fn write_header(&self, encoded: &[u8]) -> IoResult<()> {
        self.storage.flush().await?;
        let (front, rest) = encoded.split_at(SECTOR as usize);
        if !rest.is_empty() {
            self.put(SECTOR, rest).await?;
            self.storage.flush().await?;
        }
        metadata_io::write(self.storage, 0, front).await?;
        self.storage.flush().await
    }

    /// Writes content except for blocks of zeroes, which stay unallocated in the file.
    async fn put(&self, offset: u64, content: &[u8]) -> IoResult<()> {
        metadata_io::grow(self.storage, offset + content.len() as u64).await?;
        let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
        let blocks: Vec<_> = content.chunks(BLOCK).collect();
        let mut from = 0;
        for run in blocks.chunk_by(|left, right| is_zero(left) == is_zero(right)) {
            let to = content.len().min(from + run.len() * BLOCK);
            let at = offset + from as u64;
            if !is_zero(run[0]) {
                metadata_io::write(self.storage, at, &content[from..to]).await?;
            } else if at < self.old_end {
                let length = ((to - from) as u64).min(self.old_end - at);
                self.storage.write_zeroes(at, length, ZEROES).await?;
            }
            from = to;
        }
        Ok(())
    }

    /// Encodes a table of 64-bit entries, padded to whole clusters.
    fn table(&self, entries: impl Iterator<Item = u64>, clusters: u64) -> Vec<u8> {
        let mut bytes: Vec<u8> = entries.flat_map(u64::to_be_bytes).collect();
        bytes.resize(clusters as usize * self.layout.cluster_bytes(), 0);
        bytes
    }

    fn refcount_block(&self, block: u64) -> Vec<u8> {
        let order = self.header.refcount_order;
        let mut bytes = vec![0; self.layout.cluster_bytes()];
        let numbers = refcount_entries::entry_count(bytes.len() as u64, order);
        let used = self.layout.clusters.saturating_sub(block * numbers).min(numbers);
        for index in 0..used as usize {
            refcount_entries::put(&mut bytes, order, index, 1);
        }
        bytes
    }

    fn l2_table(&self, table: u64) -> Vec<u8> {
        let shape = EntryFormat {
            cluster_bits: self.layout.cluster_bits,
            extended: self.options.extended_l2,
            data_file: self.options.data_file.is_some(),
            version: self.options.version,
        };
        let entries = 1_u64 << self.header.l2_bits();
        let first = table * entries;
        let last = (first + entries).min(self.layout.guest_clusters);
        let mut bytes = Vec::with_capacity(self.layout.cluster_bytes());
        for cluster in first..last {
            let (entry, map) = shape.encode(self.preallocated(cluster));
            bytes.extend(entry.to_be_bytes());
            if shape.extended {
                bytes.extend(map.to_be_bytes());
            }
        }
        bytes.resize(self.layout.cluster_bytes(), 0);
        bytes
    }

    /// L2 entry of a preallocated cluster. With subclusters it has a host cluster and all
    /// subclusters stay unallocated. In an encrypted image zeroes in the file would decrypt to
    /// garbage, so the entry is a zero cluster.
    fn preallocated(&self, cluster: u64) -> ClusterMapping {
        let host = self.layout.data_offset + (cluster << self.layout.cluster_bits);
        let is_zero = self.options.luks.is_some() && self.options.version >= 3;
        let (allocated, zero) = match (self.options.extended_l2, is_zero) {
            (true, _) => (0, 0),
            (false, true) => (0, 1),
            (false, false) => (1, 0),
        };
        ClusterMapping::Standard(StandardCluster { host: Some(host), copied: true, allocated, zero })
    }

    /// Ensures that preallocated guest clusters are in the file and read as zeroes.
    async fn allocate_file_space(&self, storage: &Storage, offset: u64, length: u64) -> IoResult<()> {
        if length == 0 {
            return Ok(());
        }
        let old_end = storage.size_bytes();
        metadata_io::grow(storage, offset + length).await?;
        match self.options.preallocation {
            Preallocation::Full => write_zeroes(storage, offset, length).await,
            Preallocation::Falloc => {
                let options = ZeroOptions { may_unmap: false, ..ZEROES };
                storage.write_zeroes(offset, length, options).await
            }
            // The previous content, before the file grew; on a block device all of it.
            Preallocation::Metadata | Preallocation::Off if offset < old_end => {
                storage.write_zeroes(offset, length.min(old_end - offset), ZEROES).await
            }
            Preallocation::Metadata | Preallocation::Off => Ok(()),
        }
    }
}

const ZEROES: ZeroOptions =
    ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };

async fn write_zeroes(storage: &Storage, offset: u64, length: u64) -> IoResult<()> {
    let mut at = offset;
    while at < offset + length {
        let piece = (offset + length - at).min(PIECE as u64);
        storage.write(at, IoBuffer::zeroed(piece as usize).into(), Durability::Cached).await?;
        at += piece;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
