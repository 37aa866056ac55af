//! The metadata of a new image, and the space for preallocated clusters.
//!
//! ```text
//!   header │ refcount table │ refcount blocks │ L1 table │ LUKS header │ L2 tables │ guest data
//!                                                                        └── with preallocation ──┘
//! ```
//!
//! Everything has its place before the first byte is written, so each cluster is written once and
//! in order. The header comes last, after a flush, and its first sector last of all. So an
//! interrupted creation leaves no image, and never half of one.
//!
//! Never relies on what was in the storage before. Never opens a backing file: the caller knows its
//! size.

mod layout;
mod rules;

use self::layout::Layout;
pub use self::rules::BrokenRule;
use super::{
    Invalid, bytes,
    entry::{Cluster, L1Entry, Shape, Standard},
    header::{Backing, Compression, Crypt, Header, Place, autoclear, compatible, incompatible},
    numbers,
};
use reactor::{
    buffer::Buffer,
    error::{Error, Result as IoResult},
};
use storage::{Durability, Storage, ZeroOptions};

/// Metadata is written in pieces of this many bytes.
const PIECE: usize = 1 << 20;
/// The block of most file systems: zeroes that fill one need not be written.
const BLOCK: usize = 4096;
/// What a device writes whole or not at all.
const SECTOR: u64 = 512;

/// How much of a new image has its place from the beginning.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Preallocation {
    /// Nothing.
    #[default]
    Off,
    /// Every guest cluster has a place; the file is long enough, and has holes.
    Metadata,
    /// And the file system has set the room aside.
    Falloc,
    /// And it is filled with zeroes.
    Full,
}

/// What the new image is to be. The default is QEMU's, of size 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CreateOptions {
    /// The virtual disk, in bytes; rounded up to whole sectors of 512.
    pub size_bytes: u64,
    /// 2 (`compat=0.10`) or 3 (`compat=1.1`).
    pub version: u32,
    /// From 512 to 2 MiB, a power of two.
    pub cluster_bytes: u64,
    /// From 1 to 64, a power of two.
    pub refcount_bits: u32,
    /// Refcounts may be written late.
    pub lazy_refcounts: bool,
    /// L2 entries with subclusters.
    pub extended_l2: bool,
    /// Of clusters that will be compressed.
    pub compression: Compression,
    /// Where unallocated clusters are read from.
    pub backing: Option<Backing>,
    /// The name of the file for guest data.
    pub data_file: Option<String>,
    /// That file is a raw image by itself, and stays one.
    pub data_file_raw: bool,
    /// What has its place from the beginning.
    pub preallocation: Preallocation,
    /// A LUKS header with its key material; the image is then encrypted.
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
            compression: Compression::Zlib,
            backing: None,
            data_file: None,
            data_file_raw: false,
            preallocation: Preallocation::Off,
            luks: None,
        }
    }
}

impl CreateOptions {
    /// Size of a file that has a place for every guest cluster, without those clusters: header,
    /// refcounts, L1 table, all L2 tables, LUKS header. Guest data in an external data file counts
    /// as part of the image.
    ///
    /// # Errors
    /// The image would be too large for its clusters.
    pub fn metadata_bytes(&self) -> Result<u64, BrokenRule> {
        let inside = Self { preallocation: Preallocation::Metadata, data_file: None, ..self.clone() };
        let layout = Layout::of_any_size(&inside)?;
        Ok((layout.clusters - layout.guest_clusters) << layout.cluster_bits)
    }
}

/// Why an image was not created.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum CreateError {
    /// Options that exclude each other, or a value that cannot be.
    #[error(transparent)]
    Rule(#[from] BrokenRule),
    /// A device or an NBD server, which keeps its size, is too small.
    #[error("needs at least {needed} bytes, and there are {present}")]
    NoRoom {
        /// Bytes of the new image.
        needed: u64,
        /// Bytes of the storage.
        present: u64,
    },
    /// The header breaks a rule that no single option does.
    #[error("{0}")]
    Invalid(#[from] Invalid),
    /// The storage failed.
    #[error("cannot be written: {0}")]
    Storage(#[from] Error),
}

/// Makes an image of `storage`, which is opened for writing and as long as it likes; whatever it
/// held is gone. `data` is the storage of [`CreateOptions::data_file`], and there if and only if
/// that is.
///
/// Returns the header that was written. It is on stable storage then, with everything else.
///
/// # Errors
/// [`CreateError`]. `storage` then begins with zeroes, unless a rule was broken or there is no
/// room: then it is untouched.
pub async fn create(
    storage: &Storage,
    data: Option<&Storage>,
    options: &CreateOptions,
) -> Result<Header, CreateError> {
    let options = options.checked()?;
    let layout = Layout::of(&options)?;
    let header = header(&options, &layout);
    let encoded = header.encode()?;
    let old_end = storage.size_bytes();
    let needed = layout.clusters << layout.cluster_bits;
    if storage.keeps_size() && old_end < needed {
        return Err(CreateError::NoRoom { needed, present: old_end });
    }
    clear_header(storage).await?;
    let writer = Writer { storage, old_end, layout: &layout, options: &options, header: &header };
    writer.write_tables().await?;
    match data {
        None => writer.make_room(storage, layout.data_offset, layout.data_bytes).await?,
        Some(data) => {
            bytes::grow(data, options.size_bytes).await?;
            writer.make_room(data, 0, options.size_bytes).await?;
            data.flush().await?;
        }
    }
    writer.write_header(&encoded).await?;
    Ok(header)
}

fn header(options: &CreateOptions, layout: &Layout) -> Header {
    let bit = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
    let luks_bytes = options.luks.as_ref().map(|luks| luks.len() as u64);
    Header {
        version: options.version,
        cluster_bits: layout.cluster_bits,
        size_bytes: options.size_bytes,
        crypt: if options.luks.is_some() { Crypt::Luks } else { Crypt::None },
        l1_entries: layout.l1_entries as u32,
        l1_offset: layout.l1_offset,
        refcount_table_offset: layout.refcount_table_offset,
        refcount_table_clusters: layout.refcount_table_clusters as u32,
        snapshots: 0,
        snapshots_offset: 0,
        incompatible: bit(options.data_file.is_some(), incompatible::DATA_FILE)
            | bit(options.compression != Compression::Zlib, incompatible::COMPRESSION)
            | bit(options.extended_l2, incompatible::EXTENDED_L2),
        compatible: bit(options.lazy_refcounts, compatible::LAZY_REFCOUNTS),
        autoclear: bit(options.data_file_raw, autoclear::RAW_DATA_FILE),
        refcount_order: options.refcount_bits.trailing_zeros(),
        compression: options.compression,
        backing: options.backing.clone(),
        data_file: options.data_file.clone(),
        bitmaps: None,
        encryption: luks_bytes.map(|length| Place { offset: layout.luks_offset, length }),
        others: Vec::new(),
        later_fields: Vec::new(),
    }
}

/// An image that was there before is none from now on.
async fn clear_header(storage: &Storage) -> IoResult<()> {
    bytes::write(storage, 0, &[0; SECTOR as usize]).await?;
    storage.flush().await
}

struct Writer<'a> {
    storage: &'a Storage,
    /// What the file has before this may be anything; from here on it reads as zeroes.
    old_end: u64,
    layout: &'a Layout,
    options: &'a CreateOptions,
    header: &'a Header,
}

/// Bytes that follow each other in the file, gathered into larger pieces.
struct Stream<'a> {
    writer: &'a Writer<'a>,
    offset: u64,
    gathered: Vec<u8>,
}

impl Stream<'_> {
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

impl Writer<'_> {
    /// Everything between the header and the guest's data, in the order of the drawing above.
    async fn write_tables(&self) -> IoResult<()> {
        let layout = self.layout;
        let mut stream = Stream { writer: self, offset: layout.refcount_table_offset, gathered: Vec::new() };
        // A table has 8 MiB at most, the L1 table 32.
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

    /// Whatever survives a crash in here, an image is there only if all of its header is.
    async fn write_header(&self, encoded: &[u8]) -> IoResult<()> {
        self.storage.flush().await?;
        let (front, rest) = encoded.split_at(SECTOR as usize);
        if !rest.is_empty() {
            self.put(SECTOR, rest).await?;
            self.storage.flush().await?;
        }
        bytes::write(self.storage, 0, front).await?;
        self.storage.flush().await
    }

    /// Writes what is not zero; zeroes take no room.
    async fn put(&self, offset: u64, content: &[u8]) -> IoResult<()> {
        bytes::grow(self.storage, offset + content.len() as u64).await?;
        let is_zero = |block: &[u8]| block.iter().all(|byte| *byte == 0);
        let blocks: Vec<_> = content.chunks(BLOCK).collect();
        let mut from = 0;
        for run in blocks.chunk_by(|left, right| is_zero(left) == is_zero(right)) {
            let to = content.len().min(from + run.len() * BLOCK);
            let at = offset + from as u64;
            if !is_zero(run[0]) {
                bytes::write(self.storage, at, &content[from..to]).await?;
            } else if at < self.old_end {
                let length = ((to - from) as u64).min(self.old_end - at);
                self.storage.write_zeroes(at, length, ZEROES).await?;
            }
            from = to;
        }
        Ok(())
    }

    /// Numbers in whole clusters.
    fn table(&self, entries: impl Iterator<Item = u64>, clusters: u64) -> Vec<u8> {
        let mut bytes: Vec<u8> = entries.flat_map(u64::to_be_bytes).collect();
        bytes.resize(clusters as usize * self.layout.cluster_bytes(), 0);
        bytes
    }

    fn refcount_block(&self, block: u64) -> Vec<u8> {
        let order = self.header.refcount_order;
        let mut bytes = vec![0; self.layout.cluster_bytes()];
        let numbers = numbers::count(bytes.len() as u64, order);
        let used = self.layout.clusters.saturating_sub(block * numbers).min(numbers);
        for index in 0..used as usize {
            numbers::put(&mut bytes, order, index, 1);
        }
        bytes
    }

    fn l2_table(&self, table: u64) -> Vec<u8> {
        let shape = Shape {
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

    /// With subclusters, all of them are still the backing file's, and only have their place.
    /// Encrypted zeroes would not be read as zeroes where none were written, so there a cluster
    /// says that it is zero.
    fn preallocated(&self, cluster: u64) -> Cluster {
        let host = self.layout.data_offset + (cluster << self.layout.cluster_bits);
        let is_zero = self.options.luks.is_some() && self.options.version >= 3;
        let (allocated, zero) = match (self.options.extended_l2, is_zero) {
            (true, _) => (0, 0),
            (false, true) => (0, 1),
            (false, false) => (1, 0),
        };
        Cluster::Standard(Standard { host: Some(host), copied: true, allocated, zero })
    }

    /// Sees to it that guest data that was preallocated is there, and reads as zeroes.
    async fn make_room(&self, storage: &Storage, offset: u64, length: u64) -> IoResult<()> {
        if length == 0 {
            return Ok(());
        }
        let old_end = storage.size_bytes();
        bytes::grow(storage, offset + length).await?;
        match self.options.preallocation {
            Preallocation::Full => write_zeroes(storage, offset, length).await,
            Preallocation::Falloc => {
                let options = ZeroOptions { may_unmap: false, ..ZEROES };
                storage.write_zeroes(offset, length, options).await
            }
            // What was there before the file became longer, as on a block device.
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
        storage.write(at, Buffer::zeroed(piece as usize).into(), Durability::Cached).await?;
        at += piece;
    }
    Ok(())
}

#[cfg(test)]
mod tests;
