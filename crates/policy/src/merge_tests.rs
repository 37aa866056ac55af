//! Merging of single batches. `tests/merge.rs` tests random ones.

use super::*;
use MergeOperation::{Barrier, Read, Write};

const K: u64 = 1024;

const fn of(operation: MergeOperation, offset: u64, length: u64) -> MergeCandidate {
    MergeCandidate { operation, offset, length, key: 0 }
}

const fn read(offset: u64, length: u64) -> MergeCandidate {
    of(Read, offset, length)
}

const fn write(offset: u64, length: u64) -> MergeCandidate {
    of(Write, offset, length)
}

const fn flush() -> MergeCandidate {
    of(Barrier, 0, 0)
}

#[track_caller]
fn check_within(bounds: MergeBounds, batch: &[MergeCandidate], expected: &[&[usize]]) {
    let mut planner = MergePlanner::new();
    let plan = planner.plan(batch, bounds);
    assert_eq!(plan.groups().collect::<Vec<_>>(), expected);
    assert_eq!(plan.saved_requests(), batch.len() - expected.len());
}

#[track_caller]
fn check(batch: &[MergeCandidate], expected: &[&[usize]]) {
    check_within(MergeBounds::default(), batch, expected);
}

#[test]
fn adjacent_requests_of_one_kind_become_one() {
    // Batches of zero and one request.
    check(&[], &[]);
    check(&[read(0, 4 * K)], &[&[0]]);
    check(&[flush()], &[&[0]]);
    // Adjacent requests, in any order of arrival. Without adjacent ones, the order of arrival.
    check(&[read(0, 4 * K), read(4 * K, 8 * K), read(12 * K, 512)], &[&[0, 1, 2]]);
    check(&[write(8 * K, K), write(0, 4 * K), write(4 * K, 4 * K)], &[&[1, 2, 0]]);
    check(&[read(100 * K, K), read(0, K), write(50 * K, K)], &[&[0], &[1], &[2]]);
    // A gap or an overlap of one byte prevents merging of reads. Overlapping reads do not conflict.
    check(&[read(0, 4095), read(4096, 4096)], &[&[0], &[1]]);
    check(&[read(0, 4097), read(4096, 4096)], &[&[0], &[1]]);
    check(&[read(0, K), read(0, K), read(K, K)], &[&[0], &[1, 2]]);
    // Reads merge with reads, writes with writes.
    check(&[write(4 * K, K), read(0, K), write(5 * K, K), read(K, K)], &[&[1, 3], &[0, 2]]);
    check(&[read(0, K), write(K, K)], &[&[0], &[1]]);
    // Different flags prevent merging.
    let fua = MergeCandidate { key: 1, ..write(K, K) };
    check(&[write(0, K), fua, write(2 * K, K)], &[&[0], &[1], &[2]]);
    check(&[MergeCandidate { offset: 0, ..fua }, fua], &[&[0, 1]]);
    // No overflow at the largest offset.
    let last = read(u64::MAX - 1, 1);
    check(&[last, read(u64::MAX, 1), read(u64::MAX, u64::MAX)], &[&[0, 1], &[2]]);
    check(&[write(0, u64::MAX), write(u64::MAX, u64::MAX)], &[&[0], &[1]]);
    // Requests of zero bytes are not merged.
    check(&[read(0, K), read(K, 0), read(2 * K, K)], &[&[0], &[1], &[2]]);
    check(&[write(0, K), write(K, 0), write(K, K), write(2 * K, K)], &[&[0], &[1], &[2, 3]]);
    check(&[write(K, 0), write(0, K), write(K, 2 * K)], &[&[0], &[1], &[2]]);
}

#[test]
fn nothing_is_merged_across_a_barrier() {
    let at = |place| write(place * K, K);
    check(
        &[[0, 1].map(at).as_slice(), &[flush(), at(2), flush(), flush()], &[3, 4].map(at)].concat(),
        &[&[0, 1], &[2], &[3], &[4], &[5], &[6, 7]],
    );
}

#[test]
fn the_documented_example() {
    let batch = [read(8 * K, 4 * K), read(0, 4 * K), write(64 * K, 4 * K), read(4 * K, 4 * K), flush()];
    let batch = [&batch[..], &[read(12 * K, 4 * K)]].concat();
    check(&batch, &[&[1, 3, 0], &[2], &[4], &[5]]);
}

#[test]
fn conflict_preserves_order_between_barriers() {
    check(&[write(0, K), write(K, K), write(0, 512)], &[&[0], &[1], &[2]]);
    check(&[write(K, K), read(0, 4 * K), write(2 * K, K)], &[&[0], &[1], &[2]]);
    check(
        &[write(K, K), write(0, K), flush(), write(K, K), write(0, K), write(0, K)],
        &[&[1, 0], &[2], &[3], &[4], &[5]],
    );
}

#[test]
fn merging_stops_at_the_bounds() {
    let batch: Vec<_> = (0..5).map(|i| read(i * K, K)).collect();
    let bounds = |segments, bytes| MergeBounds { segments, bytes };
    check_within(bounds(2, u64::MAX), &batch, &[&[0, 1], &[2, 3], &[4]]);
    check_within(bounds(9, 3 * K), &batch, &[&[0, 1, 2], &[3, 4]]);
    check_within(bounds(9, 3 * K - 1), &batch, &[&[0, 1], &[2, 3], &[4]]);
    check_within(bounds(0, 0), &batch, &[&[0], &[1], &[2], &[3], &[4]]);
    check_within(bounds(9, K), &[read(0, 9 * K), read(9 * K, K)], &[&[0], &[1]]);
}

#[test]
fn a_planner_forgets_the_batch_before() {
    let mut planner = MergePlanner::new();
    let batch = [read(0, K), read(K, K)];
    assert_eq!(planner.plan(&batch, MergeBounds::default()).saved_requests(), 1);
    assert_eq!(planner.plan(&batch[..1], MergeBounds::default()).groups().collect::<Vec<_>>(), [[0]]);
}
