//! Merging: which of the requests that wait together may become one I/O.
//!
//! ```text
//!   batch    0 read 8K+4K   1 read 0+4K   2 write 64K+4K   3 read 4K+4K   4 flush   5 read 12K+4K
//!   plan    [1 3 0]                      [2]                             [4]       [5]
//! ```
//!
//! A device serves one long request sooner than many adjacent short ones. virtio-blk merges what it
//! finds in its ring; this does the same for every export. It only plans: the caller gathers the
//! buffers, issues the I/O and answers each request.
//!
//! Never joins across barriers, nor requests with different flags. If two requests overlap and one
//! of them writes, everything between the two barriers stays in its order.

use alloc::vec::Vec;
use core::ops::Range;

/// What a request does, as far as merging cares.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Operation {
    /// Reads data.
    Read,
    /// Writes data that comes with it.
    Write,
    /// Anything else, such as a flush or a discard: a barrier that nothing is merged across.
    Barrier,
}

/// A request that might be merged with others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Candidate {
    /// What it does.
    pub operation: Operation,
    /// First byte.
    pub offset: u64,
    /// Bytes. A request of none is not merged, and may keep its neighbours apart.
    pub length: u64,
    /// Requests of different keys are not merged: flags such as FUA, or what else must be equal.
    pub key: u32,
}

impl Candidate {
    /// `None` if it overflows, where nothing is adjacent.
    const fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.length)
    }

    fn is_plain(&self) -> bool {
        self.operation != Operation::Barrier
    }

    fn overlaps(&self, end_of_earlier: u64) -> bool {
        self.length > 0 && self.offset < end_of_earlier
    }
}

/// How large a merged request may become. A single request beyond it stays as it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    /// Requests, each bringing one buffer. With 0 or 1, nothing is merged.
    pub segments: usize,
    /// Bytes, all together.
    pub bytes: u64,
}

impl Default for Bounds {
    /// Linux's `IOV_MAX`; the largest request that every NBD server must accept.
    fn default() -> Self {
        Self { segments: 1024, bytes: 32 << 20 }
    }
}

/// Makes plans, and keeps the memory for it from one to the next.
#[derive(Debug, Default)]
pub struct Planner {
    order: Vec<usize>,
    /// Where each group ends in `order`.
    ends: Vec<usize>,
}

impl Planner {
    /// A planner that has allocated nothing.
    pub const fn new() -> Self {
        Self { order: Vec::new(), ends: Vec::new() }
    }

    /// Divides a batch, given in the order of arrival, into groups that may be one I/O each.
    ///
    /// O(n) for most batches with nothing to merge, else O(n log n).
    pub fn plan(&mut self, batch: &[Candidate], bounds: Bounds) -> Plan<'_> {
        self.order.clear();
        self.ends.clear();
        self.order.extend(0..batch.len());
        let mut start = 0;
        while start < batch.len() {
            let plain = batch[start..].iter().take_while(|candidate| candidate.is_plain()).count();
            match plain {
                0 | 1 => self.ends.push(start + 1),
                _ if !may_have_neighbours(&batch[start..start + plain]) => {
                    self.ends.extend(start + 1..=start + plain);
                }
                _ => self.plan_run(batch, start..start + plain, bounds),
            }
            start += plain.max(1);
        }
        Plan { order: &self.order, ends: &self.ends }
    }

    /// A run: at least two reads and writes without a barrier.
    fn plan_run(&mut self, batch: &[Candidate], run: Range<usize>, bounds: Bounds) {
        let first_group = self.ends.len();
        let order = &mut self.order[run.clone()];
        // The index makes the order total, so equal requests stay in the order of arrival.
        order.sort_unstable_by_key(|&i| (batch[i].operation, batch[i].key, batch[i].offset, i));
        let mut bytes = 0;
        let mut group_start = run.start;
        for at in run.clone() {
            let candidate = &batch[self.order[at]];
            let joins = at > run.start
                && at - group_start < bounds.segments
                && bounds.bytes.checked_sub(bytes).is_some_and(|room| candidate.length <= room)
                && adjacent(&batch[self.order[at - 1]], candidate);
            if joins {
                bytes += candidate.length;
                continue;
            }
            if at > run.start {
                self.ends.push(at);
            }
            group_start = at;
            bytes = candidate.length;
        }
        self.ends.push(run.end);

        let merged = self.ends.len() - first_group < run.len();
        if !merged || self.has_conflict(batch, run.clone()) {
            self.ends.truncate(first_group);
            self.ends.extend(run.clone().map(|at| at + 1));
            for at in run {
                self.order[at] = at;
            }
        }
    }

    /// Whether two requests of the run overlap and one of them writes.
    fn has_conflict(&mut self, batch: &[Candidate], run: Range<usize>) -> bool {
        if batch[run.clone()].iter().all(|candidate| candidate.operation == Operation::Read) {
            return false;
        }
        // Sorted behind the plan's own order, and taken off again below.
        let scratch = self.order.len();
        self.order.extend(run);
        self.order[scratch..].sort_unstable_by_key(|&i| batch[i].offset);
        let (mut end_of_writes, mut end_of_all) = (0, 0);
        let conflict = self.order[scratch..].iter().any(|&i| {
            let candidate = &batch[i];
            let end = candidate.end().unwrap_or(u64::MAX);
            let writes = candidate.operation == Operation::Write;
            let conflicts = candidate.overlaps(if writes { end_of_all } else { end_of_writes });
            if writes {
                end_of_writes = end_of_writes.max(end);
            }
            end_of_all = end_of_all.max(end);
            conflicts
        });
        self.order.truncate(scratch);
        conflict
    }
}

/// Whether some request may begin where another ends; `false` is certain, `true` is not.
///
/// Sorting most batches in vain would be most of what planning costs. This is linear: it marks
/// where requests begin in a small table, by a hash, and looks up where they end.
fn may_have_neighbours(run: &[Candidate]) -> bool {
    // With 32 requests, one batch in eight is sorted in vain; with many, all are.
    let mut begins = [0u64; 128];
    let place = |offset: u64| {
        // The top bits of a product with 2⁶⁴ divided by the golden ratio (Knuth, TAOCP 6.4).
        let hash = offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 51;
        ((hash >> 6) as usize, 1 << (hash & 63))
    };
    for candidate in run {
        let (word, bit) = place(candidate.offset);
        begins[word] |= bit;
    }
    run.iter().any(|candidate| {
        let (word, bit) = place(candidate.offset.wrapping_add(candidate.length));
        begins[word] & bit != 0
    })
}

fn adjacent(earlier: &Candidate, later: &Candidate) -> bool {
    earlier.operation == later.operation
        && earlier.key == later.key
        && earlier.length > 0
        && later.length > 0
        && earlier.end() == Some(later.offset)
}

/// A batch, divided into groups.
///
/// Carried out group after group, it does what the batch in its order of arrival does. Groups
/// between barriers may run together whenever the requests might have.
#[derive(Clone, Copy, Debug)]
pub struct Plan<'a> {
    order: &'a [usize],
    ends: &'a [usize],
}

impl<'a> Plan<'a> {
    /// The groups: indices into the batch, by rising offset, end to end without a gap.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = &'a [usize]> + use<'a> {
        let Self { order, ends } = *self;
        let mut start = 0;
        ends.iter().map(move |&end| &order[core::mem::replace(&mut start, end)..end])
    }

    /// How many requests merging saves.
    pub const fn merged(&self) -> usize {
        self.order.len() - self.ends.len()
    }
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;
