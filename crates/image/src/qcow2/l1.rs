//! The active L1 table, held in memory completely: 8 bytes for each L2 table, 160 KiB for 10 TiB
//! with clusters of 64 KiB.
//!
//! Entries are valid: they were checked when they were read. Only a holder of the image's
//! `PendingMetadata` lock may change them.

use std::sync::atomic::{
    AtomicU64,
    Ordering::{Acquire, Release},
};

use super::{
    InvalidImage, big_endian,
    entry::{EntryFormat, L1Entry},
};

#[derive(Debug)]
pub(super) struct L1 {
    /// Offset in the file.
    pub(super) offset: u64,
    shape: EntryFormat,
    words: Box<[AtomicU64]>,
}

/// Entries in a sector, the unit of writing.
pub(super) const SECTOR_ENTRIES: usize = 64;

/// Pads a table to whole sectors. The rest of its last cluster is never read, so it is not written.
pub(super) fn padded(mut table: Vec<u8>) -> Vec<u8> {
    table.resize(table.len().max(1).next_multiple_of(SECTOR_ENTRIES * 8), 0);
    table
}

impl L1 {
    /// Decodes the table and checks that each L2 table lies inside the file.
    pub(super) fn parse(
        offset: u64,
        bytes: &[u8],
        shape: EntryFormat,
        file_bytes: u64,
    ) -> Result<Self, InvalidImage> {
        let mut words = Vec::with_capacity(bytes.len() / 8);
        for (index, word) in big_endian::words(bytes).enumerate() {
            let entry = L1Entry::decode(word, shape)?;
            if entry.offset != 0 && entry.offset + (1 << shape.cluster_bits) > file_bytes {
                let offset = entry.offset;
                return Err(InvalidImage::new(format!(
                    "L2 table {index} at {offset:#x} is beyond the end of the file ({file_bytes:#x})"
                )));
            }
            words.push(AtomicU64::new(word));
        }
        Ok(Self { offset, shape, words: words.into() })
    }

    /// Table of an image that must not be used yet.
    pub(super) fn empty(shape: EntryFormat) -> Self {
        Self { offset: 0, shape, words: Box::default() }
    }

    pub(super) fn len(&self) -> usize {
        self.words.len()
    }

    /// Entry `index`; an unallocated one beyond the end.
    pub(super) fn get(&self, index: usize) -> L1Entry {
        let word = self.words.get(index).map_or(0, |word| word.load(Acquire));
        L1Entry::decode(word, self.shape).unwrap_or(L1Entry::NONE)
    }

    pub(super) fn set(&self, index: usize, entry: L1Entry) {
        self.words[index].store(entry.encode(), Release);
    }

    /// Clears the `copied` flags: a new snapshot shares all L2 tables.
    pub(super) fn clear_copied(&self) {
        for index in 0..self.len() {
            self.set(index, L1Entry { copied: false, ..self.get(index) });
        }
    }

    /// Offsets of all allocated L2 tables.
    pub(super) fn tables(&self) -> impl Iterator<Item = u64> + '_ {
        (0..self.len()).map(|index| self.get(index).offset).filter(|offset| *offset != 0)
    }

    /// Offset in the file and content of a sector.
    pub(super) fn sector(&self, number: usize) -> (u64, Vec<u8>) {
        let first = number * SECTOR_ENTRIES;
        let last = (first + SECTOR_ENTRIES).min(self.len());
        let bytes =
            self.words[first..last].iter().flat_map(|word| word.load(Acquire).to_be_bytes()).collect();
        (self.offset + first as u64 * 8, bytes)
    }

    /// Content of the whole table.
    pub(super) fn bytes(&self) -> Vec<u8> {
        self.words.iter().flat_map(|word| word.load(Acquire).to_be_bytes()).collect()
    }
}
