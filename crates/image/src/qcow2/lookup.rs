//! Maps guest offsets to offsets in the file.
//!
//! ```text
//!   guest offset ─► L1 entry (memory) ─► slice of the L2 table (cache) ─► entry
//!                ─► piece: a run of bytes of one kind, contiguous in the file
//! ```
//!
//! A lookup that hits the cache does not wait. On a miss the slice is loaded once, even if several
//! requests need it.

use std::sync::Arc;

use super::{
    InvalidImage, Qcow2Image,
    big_endian::words,
    cache::L2Slice,
    entry::{ClusterMapping, L1Entry},
};
use reactor::error::Result;

/// Result of decoding an entry of the image.
type LookupResult<T> = std::result::Result<T, InvalidImage>;

/// Mapping of a piece.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GuestMapping {
    /// Read from the backing file; zeroes without one.
    Unallocated,
    /// Reads as zeroes, independent of the backing file.
    Zero {
        /// Host offset that is preallocated for the piece.
        host: Option<u64>,
    },
    /// Allocated in the qcow2 file or its data file.
    Data {
        /// Host offset of the first byte of the piece.
        host: u64,
        /// True if no snapshot shares it, so it may be written in place.
        copied: bool,
    },
    /// Part of a compressed cluster.
    Compressed {
        /// Offset of the compressed data in the file.
        offset: u64,
        /// Upper bound of the length of the compressed data.
        length: u64,
    },
}

/// A run of guest bytes with one mapping, contiguous in the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedRun {
    /// Length in bytes.
    pub length: u64,
    /// Mapping of the bytes.
    pub mapping: GuestMapping,
}

impl GuestMapping {
    /// True if a piece of `length` bytes can be extended by a piece that maps to `next`.
    fn extends(&self, length: u64, next: &Self) -> bool {
        match (self, next) {
            (Self::Unallocated, Self::Unallocated) => true,
            (Self::Zero { host: None }, Self::Zero { host: None }) => true,
            (Self::Zero { host: Some(host) }, Self::Zero { host: Some(next) }) => host + length == *next,
            (Self::Data { host, copied }, Self::Data { host: next, copied: also }) => {
                host + length == *next && copied == also
            }
            _ => false,
        }
    }
}

impl Qcow2Image {
    /// Returns the first piece of `length` bytes at `offset`; at most `length` bytes long.
    pub(super) async fn lookup(&self, offset: u64, length: u64) -> Result<MappedRun> {
        loop {
            if let Some(piece) = self.cached_mapping(offset, length) {
                return piece.map_err(|invalid| self.file.report_invalid(&invalid));
            }
            self.slice(self.slice_number(offset)).await?;
        }
    }

    /// Like [`Self::lookup`], but `None` if the slice is not cached.
    fn cached_mapping(&self, offset: u64, length: u64) -> Option<LookupResult<MappedRun>> {
        let index = self.l1_index(offset);
        let l1 = self.l1.load();
        if l1.get(index).offset == 0 {
            // Without an L2 table the whole range of the table is unallocated.
            let table_covers = 1_u64 << (self.shape.cluster_bits + self.l2_bits);
            let rest = table_covers - offset % table_covers;
            return Some(Ok(MappedRun { length: length.min(rest), mapping: GuestMapping::Unallocated }));
        }
        self.cache
            .load()
            .with_slice(self.slice_number(offset), |slice| self.run_in_slice(slice, offset, length))
    }

    fn run_in_slice(&self, slice: &L2Slice, offset: u64, length: u64) -> LookupResult<MappedRun> {
        let coverage = self.slice_coverage();
        let end = (offset + length).min((offset / coverage + 1) * coverage);
        let mut piece: Option<MappedRun> = None;
        let mut at = offset;
        while at < end {
            let (what, length) = self.part_of_cluster(slice, at)?;
            match &mut piece {
                None => piece = Some(MappedRun { length, mapping: what }),
                Some(piece) if piece.mapping.extends(piece.length, &what) => piece.length += length,
                Some(_) => break,
            }
            at += length;
        }
        let piece = piece.unwrap_or(MappedRun { length: 0, mapping: GuestMapping::Unallocated });
        Ok(MappedRun { length: piece.length.min(end - offset), ..piece })
    }

    /// Mapping at `at`, and its length up to the next change or the end of the cluster.
    fn part_of_cluster(&self, slice: &L2Slice, at: u64) -> LookupResult<(GuestMapping, u64)> {
        let shape = self.shape;
        let (raw, map) = slice.get(self.entry_in_slice(at), shape.extended);
        let cluster_bytes = 1_u64 << shape.cluster_bits;
        let offset_in_cluster = at & (cluster_bytes - 1);
        let standard = match self.decode_at(at, raw, map)? {
            ClusterMapping::Compressed { offset, length } => {
                return Ok((GuestMapping::Compressed { offset, length }, cluster_bytes - offset_in_cluster));
            }
            ClusterMapping::Standard(standard) => standard,
        };
        let first = (offset_in_cluster >> shape.subcluster_bits()) as u32;
        let bit = |map: u32, number: u32| map >> number & 1;
        // Subclusters with the same two bits are contiguous in the host cluster and form one part.
        let kind = |number: u32| (bit(standard.allocated, number), bit(standard.zero, number));
        let mut last = first + 1;
        while last < shape.subclusters() && kind(last) == kind(first) {
            last += 1;
        }
        let host = standard.host.map(|host| host + offset_in_cluster);
        let mapping = match (kind(first), host) {
            ((1, _), Some(host)) => GuestMapping::Data { host, copied: standard.copied },
            ((_, 1), host) => GuestMapping::Zero { host },
            _ => GuestMapping::Unallocated,
        };
        Ok((mapping, (u64::from(last) << shape.subcluster_bits()) - offset_in_cluster))
    }

    /// Decodes the entry of the guest cluster at `offset`. In a data file each cluster must lie at
    /// its guest offset (qcow2 specification, "Cluster mapping"): clusters there have no
    /// refcounts, so sharing would go undetected.
    pub(super) fn decode_at(&self, offset: u64, raw: u64, map: u64) -> LookupResult<ClusterMapping> {
        let cluster = self.shape.decode(raw, map)?;
        self.shape.check_host_offset(cluster, offset)?;
        Ok(cluster)
    }

    /// Returns a slice, and reads it on a miss; `None` if there is no L2 table.
    pub(super) async fn slice(&self, number: u64) -> Result<Option<Arc<L2Slice>>> {
        loop {
            let cache = self.cache.load_full();
            if let Some(slice) = cache.get(number) {
                return Ok(Some(slice));
            }
            let _lock = self.loading.exclusive(number..number + 1).await;
            // Another task may have loaded it while this one waited.
            if let Some(slice) = cache.get(number) {
                return Ok(Some(slice));
            }
            let Some(offset) = self.slice_offset(number) else { return Ok(None) };
            let bytes = self.file.read(offset, self.slice_bytes()).await?;
            let slice = Arc::new(L2Slice::new(number, words(&bytes)));
            let inserted = {
                // Insertion changes the cache, which needs the lock of `PendingMetadata`.
                let _pending = self.pending();
                cache.insert(Arc::clone(&slice))
            };
            if inserted.is_ok() {
                return Ok(Some(slice));
            }
            // All candidates for eviction are dirty. Writing them makes them evictable.
            self.write_tables().await?;
        }
    }

    pub(super) fn l1_index(&self, offset: u64) -> usize {
        (offset >> (self.shape.cluster_bits + self.l2_bits)) as usize
    }

    /// Guest bytes that a slice maps.
    pub(super) fn slice_coverage(&self) -> u64 {
        1 << (self.shape.cluster_bits + self.slice_bits())
    }

    /// Number of entries of a slice, as a power of two.
    fn slice_bits(&self) -> u32 {
        self.entry_bytes_bits() - if self.shape.extended { 4 } else { 3 }
    }

    pub(super) fn slice_bytes(&self) -> u64 {
        1 << self.entry_bytes_bits()
    }

    pub(super) fn slice_number(&self, offset: u64) -> u64 {
        offset >> (self.shape.cluster_bits + self.slice_bits())
    }

    pub(super) fn entry_in_slice(&self, offset: u64) -> usize {
        ((offset >> self.shape.cluster_bits) & ((1 << self.slice_bits()) - 1)) as usize
    }

    /// Offset of a slice in the file; `None` if there is no L2 table.
    pub(super) fn slice_offset(&self, number: u64) -> Option<u64> {
        let per_table_bits = self.l2_bits - self.slice_bits();
        let L1Entry { offset, .. } = self.l1.load().get((number >> per_table_bits) as usize);
        (offset != 0).then(|| offset + (number & ((1 << per_table_bits) - 1)) * self.slice_bytes())
    }

    /// Index of the L2 table that a slice belongs to.
    pub(super) fn table_of_slice(&self, number: u64) -> usize {
        (number >> (self.l2_bits - self.slice_bits())) as usize
    }
}
