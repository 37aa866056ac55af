//! Merging: joins adjacent requests of a batch into one I/O.
//!
//! ```text
//!   batch    0 read 8K+4K   1 read 0+4K   2 write 64K+4K   3 read 4K+4K   4 flush   5 read 12K+4K
//!   plan    [1 3 0]                      [2]                             [4]       [5]
//! ```
//!
//! A device serves one long request faster than many adjacent short ones. QEMU's virtio-blk merges
//! the requests of a ring; this module does it for every export. It only plans: the caller gathers
//! the buffers, submits the I/O and completes each request.
//!
//! Never merges across barriers, nor requests with different flags. If two requests overlap and one
//! of them writes, the order between the two enclosing barriers does not change.

use alloc::vec::Vec;
use core::ops::Range;

/// Kind of a request, as far as merging distinguishes kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MergeOperation {
    /// Reads data.
    Read,
    /// Writes the data of the request.
    Write,
    /// Anything else, such as a flush or a discard. Requests are not merged across it.
    Barrier,
}

/// A request of a batch, considered for merging.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeCandidate {
    /// Kind of the request.
    pub operation: MergeOperation,
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes. A request of zero bytes is not merged, and may separate its neighbours.
    pub length: u64,
    /// Only requests with equal keys are merged: flags such as FUA, and any other required match.
    pub key: u32,
}

impl MergeCandidate {
    /// End of the range; `None` on overflow, so that nothing is adjacent to it.
    const fn end(&self) -> Option<u64> {
        self.offset.checked_add(self.length)
    }

    fn is_mergeable(&self) -> bool {
        self.operation != MergeOperation::Barrier
    }

    fn overlaps(&self, end_of_earlier: u64) -> bool {
        self.length > 0 && self.offset < end_of_earlier
    }
}

/// Maximum size of a merged request. A single request that exceeds it is not split.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MergeBounds {
    /// Number of requests, each with one buffer. 0 and 1 disable merging.
    pub segments: usize,
    /// Total bytes.
    pub bytes: u64,
}

impl Default for MergeBounds {
    /// Linux's `IOV_MAX` segments, and the largest payload that an NBD client may send without
    /// having negotiated block sizes.
    fn default() -> Self {
        Self { segments: 1024, bytes: 32 << 20 }
    }
}

/// Plans the merging of batches. Reuses its memory from one batch to the next.
#[derive(Debug, Default)]
pub struct MergePlanner {
    order: Vec<usize>,
    /// End of each group in `order`.
    ends: Vec<usize>,
}

impl MergePlanner {
    /// Returns a planner without allocating.
    pub const fn new() -> Self {
        Self { order: Vec::new(), ends: Vec::new() }
    }

    /// Divides a batch, given in order of arrival, into groups; each group can be one I/O.
    ///
    /// O(n) for most batches with nothing to merge, otherwise O(n log n).
    pub fn plan(&mut self, batch: &[MergeCandidate], bounds: MergeBounds) -> MergePlan<'_> {
        self.order.clear();
        self.ends.clear();
        self.order.extend(0..batch.len());
        let mut start = 0;
        while start < batch.len() {
            let mergeable = batch[start..].iter().take_while(|candidate| candidate.is_mergeable()).count();
            match mergeable {
                0 | 1 => self.ends.push(start + 1),
                _ if !may_have_neighbours(&batch[start..start + mergeable]) => {
                    self.ends.extend(start + 1..=start + mergeable);
                }
                _ => self.plan_run(batch, start..start + mergeable, bounds),
            }
            start += mergeable.max(1);
        }
        MergePlan { order: &self.order, ends: &self.ends }
    }

    /// Plans a run: at least two reads and writes without a barrier between them.
    fn plan_run(&mut self, batch: &[MergeCandidate], run: Range<usize>, bounds: MergeBounds) {
        let first_group = self.ends.len();
        let order = &mut self.order[run.clone()];
        // The index makes the order total, so equal requests stay in order of arrival.
        order.sort_unstable_by_key(|&i| (batch[i].operation, batch[i].key, batch[i].offset, i));
        let mut bytes = 0;
        let mut group_start = run.start;
        for at in run.clone() {
            let candidate = &batch[self.order[at]];
            let joins = at > run.start
                && at - group_start < bounds.segments
                && bounds.bytes.checked_sub(bytes).is_some_and(|room| candidate.length <= room)
                && are_adjacent(&batch[self.order[at - 1]], candidate);
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

        // Sorting has moved reads before writes. If an overlap makes that visible, merging is
        // abandoned for the whole run and each request becomes a group, in order of arrival.
        let merged = self.ends.len() - first_group < run.len();
        if !merged || self.has_conflict(batch, run.clone()) {
            self.ends.truncate(first_group);
            self.ends.extend(run.clone().map(|at| at + 1));
            for at in run {
                self.order[at] = at;
            }
        }
    }

    /// True if two requests of the run overlap and one of them writes.
    fn has_conflict(&mut self, batch: &[MergeCandidate], run: Range<usize>) -> bool {
        if batch[run.clone()].iter().all(|candidate| candidate.operation == MergeOperation::Read) {
            return false;
        }
        // A temporary order by offset, appended to the plan's own order and truncated below.
        let scratch = self.order.len();
        self.order.extend(run);
        self.order[scratch..].sort_unstable_by_key(|&i| batch[i].offset);
        let (mut end_of_writes, mut end_of_all) = (0, 0);
        // Sorted by offset, a request overlaps an earlier one only if it begins before the furthest
        // end so far. Reads conflict with writes only, so the two ends are separate.
        let conflict = self.order[scratch..].iter().any(|&i| {
            let candidate = &batch[i];
            let end = candidate.end().unwrap_or(u64::MAX);
            let is_write = candidate.operation == MergeOperation::Write;
            let conflicts = candidate.overlaps(if is_write { end_of_all } else { end_of_writes });
            if is_write {
                end_of_writes = end_of_writes.max(end);
            }
            end_of_all = end_of_all.max(end);
            conflicts
        });
        self.order.truncate(scratch);
        conflict
    }
}

/// True if some request may begin where another ends. A hash collision may cause a wrong true;
/// false is always right.
///
/// Without this check, most of the planning time would be spent on sorting batches in vain. It is
/// linear: a small hash table marks where requests begin, and their ends are looked up in it.
fn may_have_neighbours(run: &[MergeCandidate]) -> bool {
    // 8192 bits. With 32 requests, one batch in eight is sorted in vain; with many, all are.
    let mut begins = [0u64; 128];
    let bit_of = |offset: u64| {
        // The top bits of a product with 2⁶⁴ divided by the golden ratio (Knuth, TAOCP 6.4).
        let hash = offset.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 51;
        ((hash >> 6) as usize, 1 << (hash & 63))
    };
    for candidate in run {
        let (word, bit) = bit_of(candidate.offset);
        begins[word] |= bit;
    }
    run.iter().any(|candidate| {
        let (word, bit) = bit_of(candidate.offset.wrapping_add(candidate.length));
        begins[word] & bit != 0
    })
}

fn are_adjacent(earlier: &MergeCandidate, later: &MergeCandidate) -> bool {
    earlier.operation == later.operation
        && earlier.key == later.key
        && earlier.length > 0
        && later.length > 0
        && earlier.end() == Some(later.offset)
}

/// A batch, divided into groups.
///
/// Executing group after group has the same effect as executing the batch in order of arrival.
/// Groups between two barriers may run concurrently if their requests could have.
#[derive(Clone, Copy, Debug)]
pub struct MergePlan<'a> {
    order: &'a [usize],
    ends: &'a [usize],
}

impl<'a> MergePlan<'a> {
    /// The groups: indices into the batch, in order of rising offset, contiguous on the disk.
    pub fn groups(&self) -> impl ExactSizeIterator<Item = &'a [usize]> + use<'a> {
        let Self { order, ends } = *self;
        let mut start = 0;
        ends.iter().map(move |&end| &order[core::mem::replace(&mut start, end)..end])
    }

    /// Number of requests saved by merging.
    pub const fn saved_requests(&self) -> usize {
        self.order.len() - self.ends.len()
    }
}

#[cfg(test)]
#[path = "merge_tests.rs"]
mod tests;
