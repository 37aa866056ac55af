//! Two LRU lists of chunks, and the division of memory between them.
//!
//! ```text
//!   newest ◄─────────────── unread ────────────────► oldest      has blocks that were never read
//!   newest ◄─── read ───► oldest                                 kept for another reader
//! ```
//!
//! SARC (Gill and Modha, FAST 2005) divides a cache by the marginal utility of memory for either
//! list: a hit near the oldest end of a list would be a miss if the list were slightly shorter. The
//! list of read data replaces SARC's list of random data, which is not cached here.
//!
//! A chunk's stamp, the bytes that had entered the list before it, gives its distance from the end.
//! Never decides when to evict, only from which list.

use super::chunk::CacheChunk;
use alloc::vec::Vec;

const NONE: u32 = u32::MAX;
/// The oldest part (1 / n) of a list's bytes counts as near the end.
const LIST_END_FRACTION: u64 = 16;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ListKind {
    /// At least one block has not been read.
    Unread,
    /// All blocks have been read.
    Read,
}

#[derive(Clone, Copy, Debug)]
struct LruLinks {
    part: Option<ListKind>,
    newer: u32,
    older: u32,
    stamp: u64,
}

impl Default for LruLinks {
    fn default() -> Self {
        Self { part: None, newer: NONE, older: NONE, stamp: 0 }
    }
}

#[derive(Clone, Copy, Debug)]
struct LruList {
    newest: u32,
    oldest: u32,
    bytes: u64,
    entered_bytes: u64,
}

#[derive(Debug)]
struct ChunkSlot<T> {
    chunk: CacheChunk<T>,
    links: LruLinks,
}

#[derive(Debug)]
pub(super) struct ChunkLists<T> {
    slots: Vec<Option<ChunkSlot<T>>>,
    vacant: Vec<u32>,
    lists: [LruList; 2],
    /// Target size of the list of unread chunks, in bytes.
    unread_target: u64,
    memory_bytes: u64,
}

impl<T> ChunkLists<T> {
    pub(super) fn new(memory_bytes: u64) -> Self {
        let list = LruList { newest: NONE, oldest: NONE, bytes: 0, entered_bytes: 0 };
        let mut chunks = Self {
            slots: Vec::new(),
            vacant: Vec::new(),
            lists: [list; 2],
            unread_target: 0,
            memory_bytes: 0,
        };
        chunks.set_memory(memory_bytes);
        chunks
    }

    /// Sets the memory limit, and the initial division: three quarters for unread chunks.
    pub(super) fn set_memory(&mut self, memory_bytes: u64) {
        self.memory_bytes = memory_bytes;
        self.unread_target = memory_bytes / 4 * 3;
    }

    pub(super) const fn unread_target(&self) -> u64 {
        self.unread_target
    }

    pub(super) fn insert(&mut self, chunk: CacheChunk<T>) -> u32 {
        let slot = Some(ChunkSlot { chunk, links: LruLinks::default() });
        if let Some(number) = self.vacant.pop() {
            self.slots[number as usize] = slot;
            return number;
        }
        // A chunk needs at least a page, so there are far fewer than 2³².
        self.slots.push(slot);
        (self.slots.len() - 1) as u32
    }

    fn slot(&self, number: u32) -> &ChunkSlot<T> {
        self.slots[number as usize].as_ref().expect("an extent's chunk is there")
    }

    fn slot_mut(&mut self, number: u32) -> &mut ChunkSlot<T> {
        self.slots[number as usize].as_mut().expect("an extent's chunk is there")
    }

    pub(super) fn get(&self, number: u32) -> &CacheChunk<T> {
        &self.slot(number).chunk
    }

    pub(super) fn get_mut(&mut self, number: u32) -> &mut CacheChunk<T> {
        &mut self.slot_mut(number).chunk
    }

    pub(super) fn remove(&mut self, number: u32) -> CacheChunk<T> {
        self.unlink(number);
        self.vacant.push(number);
        self.slots[number as usize].take().expect("removed once").chunk
    }

    /// Moves a chunk to the newest end of its list: the unread list while any of its blocks is
    /// unread, otherwise the read list.
    pub(super) fn touch(&mut self, number: u32) {
        self.adjust_target(number);
        self.unlink(number);
        let chunk = self.get(number);
        let part = if chunk.open_blocks > 0 { ListKind::Unread } else { ListKind::Read };
        let bytes = chunk.footprint();
        let list = &mut self.lists[part as usize];
        let older = core::mem::replace(&mut list.newest, number);
        list.bytes += bytes;
        list.entered_bytes += bytes;
        let stamp = list.entered_bytes;
        if older == NONE {
            list.oldest = number;
        } else {
            self.slot_mut(older).links.newer = number;
        }
        self.slot_mut(number).links = LruLinks { part: Some(part), newer: NONE, older, stamp };
    }

    // The list above its target is shortened. If neither is, read data is evicted first.
    pub(super) fn victim(&self) -> Option<u32> {
        let [unread, read] = &self.lists;
        let read_first =
            read.bytes > self.memory_bytes - self.unread_target || unread.bytes <= self.unread_target;
        let (first, second) = if read_first { (read, unread) } else { (unread, read) };
        [first.oldest, second.oldest].into_iter().find(|number| *number != NONE)
    }

    /// Adjusts the division after a hit near the end of a list.
    fn adjust_target(&mut self, number: u32) {
        let ChunkSlot { chunk, links } = self.slot(number);
        let (Some(part), bytes) = (links.part, chunk.footprint()) else { return };
        let list = &self.lists[part as usize];
        let total = self.lists[0].bytes + self.lists[1].bytes;
        // While everything fits, no hit would have been a miss.
        if total + total / LIST_END_FRACTION < self.memory_bytes || list.oldest == NONE {
            return;
        }
        let oldest = self.slot(list.oldest).links.stamp;
        // Stamps are positions in bytes, so the difference is the distance from the oldest end.
        if links.stamp - oldest > list.bytes / LIST_END_FRACTION {
            return;
        }
        // Bounds keep a minimum of both lists, so that each can still produce hits to learn from.
        let (min, max) = (self.memory_bytes / 4, self.memory_bytes / 16 * 15);
        self.unread_target = match part {
            ListKind::Unread => (self.unread_target + bytes).min(max),
            ListKind::Read => self.unread_target.saturating_sub(bytes).max(min),
        };
    }

    fn unlink(&mut self, number: u32) {
        let ChunkSlot { chunk, links } = self.slot_mut(number);
        let bytes = chunk.footprint();
        let LruLinks { part, newer, older, .. } = core::mem::take(links);
        let Some(part) = part else { return };
        self.lists[part as usize].bytes -= bytes;
        if newer == NONE {
            self.lists[part as usize].newest = older;
        } else {
            self.slot_mut(newer).links.older = older;
        }
        if older == NONE {
            self.lists[part as usize].oldest = newer;
        } else {
            self.slot_mut(older).links.newer = newer;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefetch::ReadAhead;
    use crate::time::Instant;

    const CHUNK: u64 = 128 << 10;

    fn full_lists(count: u64) -> (ChunkLists<()>, Vec<u32>) {
        let mut chunks = ChunkLists::new(count * CHUNK);
        let numbers: Vec<_> = (0..count)
            .map(|_| chunks.insert(CacheChunk::new((), &(0..CHUNK), &ReadAhead::NOTHING, Instant::ZERO)))
            .collect();
        numbers.iter().for_each(|number| chunks.touch(*number));
        (chunks, numbers)
    }

    fn read(chunks: &mut ChunkLists<()>, number: u32) {
        chunks.get_mut(number).settle_rest();
        chunks.touch(number);
    }

    #[test]
    fn read_chunks_are_evicted_first_in_lru_order() {
        let (mut chunks, numbers) = full_lists(8);
        assert_eq!(chunks.victim(), Some(numbers[0]), "nothing was read");
        read(&mut chunks, numbers[5]);
        read(&mut chunks, numbers[2]);
        // The unread list is at its target, so read data is evicted.
        assert_eq!(chunks.victim(), Some(numbers[5]));
        chunks.remove(numbers[5]);
        assert_eq!(chunks.victim(), Some(numbers[2]));
        chunks.remove(numbers[2]);
        assert_eq!(chunks.victim(), Some(numbers[0]));
        chunks.touch(numbers[0]);
        assert_eq!(chunks.victim(), Some(numbers[1]));
    }

    #[test]
    fn memory_follows_marginal_hits() {
        let (mut chunks, numbers) = full_lists(32);
        for number in &numbers[..8] {
            read(&mut chunks, *number);
        }
        let initial_target = chunks.unread_target();
        for _ in 0..4 {
            // Hits at the oldest end of the read list: with slightly less memory they would be
            // misses.
            let oldest = chunks.lists[ListKind::Read as usize].oldest;
            chunks.touch(oldest);
        }
        assert!(chunks.unread_target() < initial_target);
        let lowered_target = chunks.unread_target();
        for _ in 0..8 {
            let oldest = chunks.lists[ListKind::Unread as usize].oldest;
            chunks.touch(oldest);
        }
        assert!(chunks.unread_target() > lowered_target);
    }
}
