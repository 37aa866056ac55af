//! The refcount table in memory: the offset of each refcount block, up to the last block.
//!
//! A table has at least one cluster and is mostly empty: with clusters of 64 KiB it has 8192
//! entries, of which a file uses one for each 2 GiB. Entries after the last block use no memory.

/// Offsets of refcount blocks by index; 0 for a missing block.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(in super::super) struct RefcountTable {
    /// Entries up to the last block, or to one that was removed later.
    offsets: Vec<u64>,
    entries: usize,
}

impl RefcountTable {
    /// Creates a table of `entries` empty entries.
    pub(in super::super) fn empty(entries: usize) -> Self {
        Self { offsets: Vec::new(), entries }
    }

    /// Number of entries in the file, including empty ones.
    pub(in super::super) fn entries(&self) -> usize {
        self.entries
    }

    /// Offset of a block; 0 if it is missing or beyond the table.
    pub(in super::super) fn get(&self, block: usize) -> u64 {
        self.offsets.get(block).copied().unwrap_or(0)
    }

    /// Sets the offset of a block; 0 removes it.
    ///
    /// # Panics
    /// Panics if `block` is beyond the table.
    pub(in super::super) fn set(&mut self, block: usize, offset: u64) {
        assert!(block < self.entries, "block {block} of a table with {} entries", self.entries);
        if block >= self.offsets.len() {
            if offset == 0 {
                return;
            }
            self.offsets.resize(block + 1, 0);
        }
        self.offsets[block] = offset;
    }

    /// Appends empty entries, up to `entries` in total.
    pub(in super::super) fn grow(&mut self, entries: usize) {
        self.entries = self.entries.max(entries);
    }

    /// Indices and offsets of all blocks.
    pub(in super::super) fn blocks(&self) -> impl Iterator<Item = (usize, u64)> + '_ {
        self.offsets.iter().copied().enumerate().filter(|(_, offset)| *offset != 0)
    }

    /// Content of the whole table as stored in the file.
    pub(in super::super) fn bytes(&self) -> Vec<u8> {
        let mut bytes: Vec<u8> = self.offsets.iter().flat_map(|offset| offset.to_be_bytes()).collect();
        bytes.resize(self.entries * 8, 0);
        bytes
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_entries_take_no_memory() {
        let mut table = RefcountTable::empty(8192);
        table.set(8000, 0);
        table.set(2, 0x20000);
        assert_eq!(table.offsets.len(), 3);
        assert_eq!((table.entries(), table.get(1), table.get(2), table.get(9000)), (8192, 0, 0x20000, 0));
        assert_eq!(table.blocks().collect::<Vec<_>>(), [(2, 0x20000)]);
        table.set(2, 0);
        assert_eq!(table.blocks().count(), 0);
    }

    #[test]
    fn encoded_bytes_match_the_whole_table() {
        let mut table = RefcountTable::empty(4);
        table.set(1, 0x10000);
        table.grow(8);
        let mut bytes = [0; 64];
        bytes[8..16].copy_from_slice(&0x10000_u64.to_be_bytes());
        assert_eq!(table.bytes(), bytes);
    }
}
