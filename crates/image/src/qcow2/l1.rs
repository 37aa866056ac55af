//! The active L1 table, all of it in memory: 8 bytes for each L2 table, 160 KiB for 10 TiB of 64
//! KiB clusters.
//!
//! Entries are valid, because they were checked when they were read. Whoever holds the image's
//! `Pending` may change them.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Release},
};

use super::{
    Invalid, big_endian,
    entry::{L1Entry, Shape},
};

/// See the head of this file.
#[derive(Debug)]
pub(super) struct L1 {
    /// In the file.
    pub(super) offset: u64,
    shape: Shape,
    words: Box<[AtomicU64]>,
}

/// Entries of a sector: what is written at once.
pub(super) const SECTOR_ENTRIES: usize = 64;

/// A table to its last sector. The rest of its clusters is read by nobody, and takes no room.
pub(super) fn padded(mut table: Vec<u8>) -> Vec<u8> {
    table.resize(table.len().max(1).next_multiple_of(SECTOR_ENTRIES * 8), 0);
    table
}

impl L1 {
    /// From the bytes in the file.
    pub(super) fn parse(offset: u64, bytes: &[u8], shape: Shape, file_bytes: u64) -> Result<Self, Invalid> {
        let mut words = Vec::with_capacity(bytes.len() / 8);
        for (index, word) in big_endian::words(bytes).enumerate() {
            let entry = L1Entry::decode(word, shape)?;
            if entry.offset != 0 && entry.offset + (1 << shape.cluster_bits) > file_bytes {
                let offset = entry.offset;
                return Err(Invalid::new(format!(
                    "L2 table {index} at {offset:#x} lies beyond the end of the file ({file_bytes:#x})"
                )));
            }
            words.push(AtomicU64::new(word));
        }
        Ok(Self { offset, shape, words: words.into() })
    }

    /// Of an image that is not to be used yet.
    pub(super) fn empty(shape: Shape) -> Self {
        Self { offset: 0, shape, words: Box::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.words.len()
    }

    /// An entry; none behind the last.
    pub(super) fn get(&self, index: usize) -> L1Entry {
        let word = self.words.get(index).map_or(0, |word| word.load(Acquire));
        L1Entry::decode(word, self.shape).unwrap_or(L1Entry::NONE)
    }

    pub(super) fn set(&self, index: usize, entry: L1Entry) {
        self.words[index].store(entry.encode(), Release);
    }

    /// No table is the active L1 table's alone.
    pub(super) fn clear_copied(&self) {
        for index in 0..self.len() {
            self.set(index, L1Entry { copied: false, ..self.get(index) });
        }
    }

    /// Offsets of all tables.
    pub(super) fn tables(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.len()).map(|index| self.get(index).offset).filter(|offset| *offset != 0)
    }

    /// The bytes of a sector, and where it lies in the file.
    pub(super) fn sector(&self, number: usize) -> (u64, Vec<u8>) {
        let first = number * SECTOR_ENTRIES;
        let last = (first + SECTOR_ENTRIES).min(self.len());
        let bytes =
            self.words[first..last].iter().flat_map(|word| word.load(Acquire).to_be_bytes()).collect();
        (self.offset + first as u64 * 8, bytes)
    }

    /// All bytes.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.load(Acquire).to_be_bytes()).collect()
    }
}
