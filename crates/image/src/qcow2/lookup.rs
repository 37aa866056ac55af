//! From a place on the disk to a place in the file.
//!
//! ```text
//!   guest offset ─► L1 entry (memory) ─► slice of the L2 table (cache) ─► entry
//!                ─► piece: so many bytes, alike and contiguous
//! ```
//!
//! A piece in the cache is found without waiting. Otherwise its slice is loaded once, also if
//! several requests wait for it.

use std::sync::Arc;

use super::{
    Invalid, Qcow2,
    big_endian::words,
    cache::Slice,
    entry::{Cluster, L1Entry},
};
use reactor::error::Result;

/// What was made of numbers in the image.
type Valid<T> = std::result::Result<T, Invalid>;

/// What the bytes of a piece are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum What {
    /// The backing file's; zeroes where there is none.
    Unallocated,
    /// Zeroes, whatever is below.
    Zero {
        /// A place in the file is kept for them.
        host: Option<u64>,
    },
    /// In the file (or the data file) at this offset.
    Data {
        /// Of the piece's first byte.
        host: u64,
        /// It is this disk's alone, and may be written in place.
        copied: bool,
    },
    /// Part of a compressed cluster.
    Compressed {
        /// Where its data begins.
        offset: u64,
        /// How many bytes it may have.
        length: u64,
    },
}

/// Bytes of the disk that are alike and lie together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// How many.
    pub length: u64,
    /// What they are.
    pub what: What,
}

impl What {
    /// Whether `next` goes on where `length` bytes of this end.
    fn goes_on(&self, length: u64, next: &Self) -> bool {
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

impl Qcow2 {
    /// The first piece of `length` bytes at `offset`, not longer than those.
    pub(super) async fn lookup(&self, offset: u64, length: u64) -> Result<Piece> {
        loop {
            if let Some(piece) = self.peek(offset, length) {
                return piece.map_err(|invalid| self.file.found(&invalid));
            }
            self.slice(self.slice_number(offset)).await?;
        }
    }

    /// The same, if it can be told without waiting.
    fn peek(&self, offset: u64, length: u64) -> Option<Valid<Piece>> {
        let index = self.l1_index(offset);
        let l1 = self.l1.load();
        if l1.get(index).offset == 0 {
            let table_covers = 1_u64 << (self.shape.cluster_bits + self.l2_bits);
            let rest = table_covers - offset % table_covers;
            return Some(Ok(Piece { length: length.min(rest), what: What::Unallocated }));
        }
        self.cache.load().with(self.slice_number(offset), |slice| self.piece_in(slice, offset, length))
    }

    fn piece_in(&self, slice: &Slice, offset: u64, length: u64) -> Valid<Piece> {
        let covers = self.slice_covers();
        let end = (offset + length).min((offset / covers + 1) * covers);
        let mut piece: Option<Piece> = None;
        let mut at = offset;
        while at < end {
            let (what, length) = self.part_of_cluster(slice, at)?;
            match &mut piece {
                None => piece = Some(Piece { length, what }),
                Some(piece) if piece.what.goes_on(piece.length, &what) => piece.length += length,
                Some(_) => break,
            }
            at += length;
        }
        let piece = piece.unwrap_or(Piece { length: 0, what: What::Unallocated });
        Ok(Piece { length: piece.length.min(end - offset), ..piece })
    }

    /// What lies at `at`, up to where it changes or its cluster ends.
    fn part_of_cluster(&self, slice: &Slice, at: u64) -> Valid<(What, u64)> {
        let shape = self.shape;
        let (word, map) = slice.get(self.entry_in_slice(at), shape.extended);
        let cluster_bytes = 1_u64 << shape.cluster_bits;
        let within = at & (cluster_bytes - 1);
        let standard = match self.decode_at(at, word, map)? {
            Cluster::Compressed { offset, length } => {
                return Ok((What::Compressed { offset, length }, cluster_bytes - within));
            }
            Cluster::Standard(standard) => standard,
        };
        let first = (within >> shape.subcluster_bits()) as u32;
        let bit = |map: u32, number: u32| map >> number & 1;
        let kind = |number: u32| (bit(standard.allocated, number), bit(standard.zero, number));
        let mut last = first + 1;
        while last < shape.subclusters() && kind(last) == kind(first) {
            last += 1;
        }
        let host = standard.host.map(|host| host + within);
        let what = match (kind(first), host) {
            ((1, _), Some(host)) => What::Data { host, copied: standard.copied },
            ((_, 1), host) => What::Zero { host },
            _ => What::Unallocated,
        };
        Ok((what, (u64::from(last) << shape.subcluster_bits()) - within))
    }

    /// What the entry of the guest cluster at `offset` says. In a data file each cluster lies where
    /// the disk has it (qcow2 specification, "Cluster mapping"): two entries could share one, and
    /// nothing is counted there.
    pub(super) fn decode_at(&self, offset: u64, word: u64, map: u64) -> Valid<Cluster> {
        let cluster = self.shape.decode(word, map)?;
        self.shape.check_place(cluster, offset)?;
        Ok(cluster)
    }

    /// The slice of this number, read if need be; `None` where there is no L2 table.
    pub(super) async fn slice(&self, number: u64) -> Result<Option<Arc<Slice>>> {
        loop {
            let cache = self.cache.load_full();
            if let Some(slice) = cache.get(number) {
                return Ok(Some(slice));
            }
            let _turn = self.loading.exclusive(number..number + 1).await;
            if let Some(slice) = cache.get(number) {
                return Ok(Some(slice));
            }
            let Some(offset) = self.slice_offset(number) else { return Ok(None) };
            let bytes = self.file.read(offset, self.slice_bytes()).await?;
            let slice = Arc::new(Slice::new(number, words(&bytes)));
            let inserted = {
                let _pending = self.pending();
                cache.insert(Arc::clone(&slice))
            };
            if inserted.is_ok() {
                return Ok(Some(slice));
            }
            // All that could make room has changes: they are written, and there is room.
            self.write_tables().await?;
        }
    }

    pub(super) fn l1_index(&self, offset: u64) -> usize {
        (offset >> (self.shape.cluster_bits + self.l2_bits)) as usize
    }

    /// Disk bytes that a slice describes.
    pub(super) fn slice_covers(&self) -> u64 {
        1 << (self.shape.cluster_bits + self.slice_bits())
    }

    /// Entries of a slice, as bits.
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

    /// Where a slice lies in the file; `None` where there is no L2 table.
    pub(super) fn slice_offset(&self, number: u64) -> Option<u64> {
        let per_table_bits = self.l2_bits - self.slice_bits();
        let L1Entry { offset, .. } = self.l1.load().get((number >> per_table_bits) as usize);
        (offset != 0).then(|| offset + (number & ((1 << per_table_bits) - 1)) * self.slice_bytes())
    }

    /// The number of the L2 table that a slice is part of.
    pub(super) fn table_of_slice(&self, number: u64) -> usize {
        (number >> (self.l2_bits - self.slice_bits())) as usize
    }
}
