//! Merging against a model of a disk: executing a plan has the same effect as executing the batch.

use policy::merge::{MergeBounds, MergeCandidate, MergeOperation, MergePlanner};
use proptest::prelude::*;

const DISK: usize = 64;

fn any_candidate() -> impl Strategy<Value = MergeCandidate> {
    // Few offsets and short lengths, so that adjacent and overlapping requests are common.
    let operation = prop_oneof![
        8 => Just(MergeOperation::Read),
        8 => Just(MergeOperation::Write),
        1 => Just(MergeOperation::Barrier),
    ];
    (operation, 0..56u64, 0..=8u64, 0..2u32).prop_map(|(operation, offset, length, key)| MergeCandidate {
        operation,
        offset,
        length,
        key: key * u32::from(operation == MergeOperation::Write),
    })
}

/// Shuffled pieces of sequential streams, with and without random requests.
fn any_batch() -> impl Strategy<Value = Vec<MergeCandidate>> {
    let stream = (any_candidate(), 1..6usize).prop_map(|(first, count)| {
        let step = first.length.max(1);
        (0..count as u64)
            .map(|i| MergeCandidate { offset: first.offset + i * step, ..first })
            .filter(|candidate| candidate.offset + candidate.length <= DISK as u64)
            .collect::<Vec<_>>()
    });
    prop::collection::vec(stream, 0..8).prop_map(|streams| streams.concat()).prop_shuffle()
}

/// A disk that records what each request of a batch has read.
struct Disk {
    bytes: Vec<u8>,
    read: Vec<Vec<u8>>,
}

impl Disk {
    fn new(batch: &[MergeCandidate]) -> Self {
        Self { bytes: (0..DISK as u8).collect(), read: vec![Vec::new(); batch.len()] }
    }

    fn carry_out(&mut self, batch: &[MergeCandidate], number: usize) {
        let MergeCandidate { operation, offset, length, .. } = batch[number];
        let range = offset as usize..(offset + length) as usize;
        match operation {
            MergeOperation::Read => self.read[number] = self.bytes[range].to_vec(),
            // Each request writes a different byte.
            MergeOperation::Write => self.bytes[range].fill(100 + number as u8),
            // The effect of a barrier is the state it sees, recorded as a read of the whole disk.
            MergeOperation::Barrier => self.read[number] = self.bytes.clone(),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn plan_has_the_effect_of_the_batch(
        batch in any_batch(),
        segments in 1..6usize,
        bytes in 1..40u64,
    ) {
        let mut one_by_one = Disk::new(&batch);
        (0..batch.len()).for_each(|number| one_by_one.carry_out(&batch, number));

        let mut planner = MergePlanner::new();
        let plan = planner.plan(&batch, MergeBounds { segments, bytes });
        let groups: Vec<_> = plan.groups().collect();
        let mut merged = Disk::new(&batch);
        groups.concat().iter().for_each(|number| merged.carry_out(&batch, *number));
        prop_assert_eq!(&merged.bytes, &one_by_one.bytes);
        prop_assert_eq!(&merged.read, &one_by_one.read);

        let mut numbers = groups.concat();
        numbers.sort_unstable();
        prop_assert_eq!(numbers, (0..batch.len()).collect::<Vec<_>>(), "each exactly once");
        prop_assert_eq!(plan.saved_requests(), batch.len() - groups.len());
    }

    #[test]
    fn a_group_is_one_request_of_one_kind_within_bounds(
        batch in any_batch(),
        segments in 1..6usize,
        bytes in 1..40u64,
    ) {
        let mut planner = MergePlanner::new();
        for group in planner.plan(&batch, MergeBounds { segments, bytes }).groups().filter(|group| group.len() > 1) {
            let members: Vec<_> = group.iter().map(|number| batch[*number]).collect();
            prop_assert!(members.len() <= segments);
            prop_assert!(members.iter().map(|member| member.length).sum::<u64>() <= bytes);
            for pair in members.windows(2) {
                prop_assert_eq!(pair[0].offset + pair[0].length, pair[1].offset);
                prop_assert_eq!((pair[0].operation, pair[0].key), (pair[1].operation, pair[1].key));
                prop_assert_ne!(pair[0].operation, MergeOperation::Barrier);
            }
            let (first, last) = (group.iter().min().unwrap(), group.iter().max().unwrap());
            let between = &batch[*first..=*last];
            prop_assert!(between.iter().all(|candidate| candidate.operation != MergeOperation::Barrier));
        }
    }

    #[test]
    fn adjacent_reads_are_all_merged(pieces in (1..40usize).prop_flat_map(|n| {
        Just((0..n as u64).collect::<Vec<_>>()).prop_shuffle()
    })) {
        let batch: Vec<_> = pieces
            .iter()
            .map(|piece| MergeCandidate { operation: MergeOperation::Read, offset: piece * 512, length: 512, key: 0 })
            .collect();
        let mut planner = MergePlanner::new();
        prop_assert_eq!(planner.plan(&batch, MergeBounds::default()).groups().len(), 1);
    }
}
