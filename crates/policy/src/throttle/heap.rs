//! An indexed heap: any item can be moved or removed in O(log n).
//!
//! The standard library's heap cannot change a key, which is a scheduler's most frequent operation.
//! A node has four children and entries contain their keys, for fewer levels and cache misses.
//!
//! Items are small numbers; a table maps each to its position. Items with equal keys have no order.

use alloc::vec::Vec;

const CHILDREN: usize = 4;
/// Position of an item that is not in the heap.
const ABSENT: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
struct HeapEntry<K> {
    key: K,
    item: u32,
}

#[derive(Debug)]
pub(super) struct IndexedHeap<K> {
    entries: Vec<HeapEntry<K>>,
    /// Index in `entries` of each item.
    positions: Vec<u32>,
}

impl<K: Copy + Ord> IndexedHeap<K> {
    pub(super) const fn new() -> Self {
        Self { entries: Vec::new(), positions: Vec::new() }
    }

    pub(super) const fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    pub(super) fn first(&self) -> Option<(K, u32)> {
        self.entries.first().map(|entry| (entry.key, entry.item))
    }

    pub(super) fn contains(&self, item: u32) -> bool {
        self.position(item).is_some()
    }

    pub(super) fn set(&mut self, item: u32, key: K) {
        let entry = HeapEntry { key, item };
        match self.position(item) {
            Some(at) if key < self.entries[at].key => self.rise(at, entry),
            Some(at) => self.sink(at, entry),
            None => {
                let needed = item as usize + 1;
                if self.positions.len() < needed {
                    self.positions.resize(needed, ABSENT);
                }
                self.entries.push(entry);
                self.rise(self.entries.len() - 1, entry);
            }
        }
    }

    pub(super) fn remove(&mut self, item: u32) {
        let Some(at) = self.position(item) else { return };
        self.positions[item as usize] = ABSENT;
        let removed = self.entries[at];
        let Some(last) = self.entries.pop() else { return };
        if last.item == item {
            return;
        }
        if last.key < removed.key {
            self.rise(at, last);
        } else {
            self.sink(at, last);
        }
    }

    /// Changes every key. `change` must be monotonic, so that the order is preserved.
    pub(super) fn map_keys(&mut self, change: impl Fn(K) -> K) {
        for entry in &mut self.entries {
            entry.key = change(entry.key);
        }
    }

    fn position(&self, item: u32) -> Option<usize> {
        self.positions.get(item as usize).filter(|at| **at != ABSENT).map(|at| *at as usize)
    }

    fn put(&mut self, at: usize, entry: HeapEntry<K>) {
        self.entries[at] = entry;
        self.positions[entry.item as usize] = at as u32;
    }

    /// Moves `entry` up from `at` to its position. Overwrites the entry at `at`.
    fn rise(&mut self, mut at: usize, entry: HeapEntry<K>) {
        while at > 0 {
            let parent = (at - 1) / CHILDREN;
            if self.entries[parent].key <= entry.key {
                break;
            }
            self.put(at, self.entries[parent]);
            at = parent;
        }
        self.put(at, entry);
    }

    /// Moves `entry` down from `at` to its position. Overwrites the entry at `at`.
    fn sink(&mut self, mut at: usize, entry: HeapEntry<K>) {
        loop {
            let first = at * CHILDREN + 1;
            let children = first..(first + CHILDREN).min(self.entries.len());
            let Some(smallest) = children.min_by_key(|child| self.entries[*child].key) else { break };
            if entry.key <= self.entries[smallest].key {
                // The last entry fills the hole. It may belong above or below it, because it can
                // come from another subtree.
                break;
            }
            self.put(at, self.entries[smallest]);
            at = smallest;
        }
        self.put(at, entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::collections::BTreeMap;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn matches_a_sorted_map(steps in prop::collection::vec((0..40u32, prop::option::weighted(0.7, 0..100u32)), 1..400)) {
            let mut heap = IndexedHeap::new();
            let mut model = BTreeMap::new();
            for (item, key) in steps {
                match key {
                    // The item makes keys unique, and thereby the minimum.
                    Some(key) => {
                        heap.set(item, (key, item));
                        model.insert(item, (key, item));
                    }
                    None => {
                        heap.remove(item);
                        model.remove(&item);
                    }
                }
                prop_assert_eq!(heap.contains(item), model.contains_key(&item));
                prop_assert_eq!(heap.first().map(|(key, _)| key), model.values().min().copied());
                prop_assert_eq!(heap.is_empty(), model.is_empty());
            }
            while let Some((key, item)) = heap.first() {
                prop_assert_eq!(model.remove(&item), Some(key));
                prop_assert!(model.values().all(|other| *other > key));
                heap.remove(item);
            }
            prop_assert!(model.is_empty());
        }
    }
}
