//! Cost of a request: its bytes, and the operations it counts as.
//!
//! Merging must not change the cost: requests merged into one I/O are charged as the client sent
//! them. `iops-size` may change while a request waits, so lengths are stored and operations are
//! computed on admission. Independent of the position on the disk.

use alloc::boxed::Box;

/// Resolution of operations: 6 KiB with an `iops-size` of 4096 counts as 1.5.
pub(super) const BILLION: u64 = 1_000_000_000;

/// Cost of one request, or of several merged into one I/O.
///
/// Flushes have no cost: they bypass the tree.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RequestCost {
    bytes: u64,
    lengths: RequestLengths,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum RequestLengths {
    /// The common case, which needs no allocation.
    Equal {
        count: u64,
        length: u64,
    },
    Mixed(Box<[u64]>),
}

impl RequestCost {
    /// Cost of one request of `length` bytes. A request of zero bytes counts as an operation.
    pub const fn one(length: u64) -> Self {
        Self::equal(1, length)
    }

    /// Cost of `count` requests of `length` bytes each.
    pub const fn equal(count: u64, length: u64) -> Self {
        Self { bytes: count.saturating_mul(length), lengths: RequestLengths::Equal { count, length } }
    }

    /// Cost of requests of these lengths, admitted as one I/O. No lengths have no cost.
    ///
    /// Allocates only if the lengths differ.
    pub fn merged(lengths: &[u64]) -> Self {
        let bytes = lengths.iter().fold(0, |sum: u64, length| sum.saturating_add(*length));
        let first = lengths.first().copied().unwrap_or(0);
        let lengths = if lengths.iter().all(|length| *length == first) {
            RequestLengths::Equal { count: lengths.len() as u64, length: first }
        } else {
            RequestLengths::Mixed(lengths.into())
        };
        Self { bytes, lengths }
    }

    /// Total bytes.
    pub const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Number of requests that the client sent.
    pub const fn requests(&self) -> u64 {
        match &self.lengths {
            RequestLengths::Equal { count, .. } => *count,
            RequestLengths::Mixed(lengths) => lengths.len() as u64,
        }
    }

    /// Length of each request, if they differ.
    pub const fn lengths(&self) -> Option<&[u64]> {
        match &self.lengths {
            RequestLengths::Equal { .. } => None,
            RequestLengths::Mixed(lengths) => Some(lengths),
        }
    }

    /// Operations under this `iops-size`, in billionths, rounded up.
    pub(super) fn operations(&self, iops_size: u64) -> u128 {
        match &self.lengths {
            RequestLengths::Equal { count, length } => u128::from(*count) * operations_of(*length, iops_size),
            RequestLengths::Mixed(lengths) => {
                lengths.iter().map(|length| operations_of(*length, iops_size)).sum()
            }
        }
    }
}

fn operations_of(length: u64, iops_size: u64) -> u128 {
    if iops_size == 0 || length <= iops_size {
        return u128::from(BILLION);
    }
    // Below 18 GB a 64-bit division suffices; the 128-bit one is a library call.
    match length.checked_mul(BILLION) {
        Some(scaled) => u128::from(scaled.div_ceil(iops_size)),
        None => (u128::from(length) * u128::from(BILLION)).div_ceil(u128::from(iops_size)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const OPERATION: u128 = BILLION as u128;

    #[test]
    fn without_iops_size_each_request_is_one_operation() {
        assert_eq!(RequestCost::one(0).operations(0), OPERATION);
        assert_eq!(RequestCost::one(1 << 30).operations(0), OPERATION);
        assert_eq!(RequestCost::merged(&[512, 4096, 512]).operations(0), 3 * OPERATION);
    }

    #[test]
    fn a_request_above_iops_size_counts_in_proportion() {
        assert_eq!(RequestCost::one(8192).operations(4096), 2 * OPERATION);
        assert_eq!(RequestCost::one(6144).operations(4096), 3 * OPERATION / 2);
        assert_eq!(RequestCost::one(4096).operations(4096), OPERATION);
        assert_eq!(RequestCost::one(1).operations(4096), OPERATION);
    }

    #[test]
    fn merging_does_not_change_the_cost() {
        for lengths in [&[4096; 5][..], &[512, 6144, 100_000], &[7], &[]] {
            let separate_cost: u128 =
                lengths.iter().map(|length| RequestCost::one(*length).operations(4096)).sum();
            let merged = RequestCost::merged(lengths);
            assert_eq!(merged.operations(4096), separate_cost);
            assert_eq!(merged.bytes(), lengths.iter().sum());
            assert_eq!(merged.requests(), lengths.len() as u64);
            assert!(merged.lengths().is_none_or(|stored| stored == lengths));
            let mean_length = merged.bytes() / merged.requests().max(1);
            assert_eq!(merged.lengths().is_none(), lengths.iter().all(|length| *length == mean_length));
        }
    }

    #[test]
    fn the_largest_lengths_do_not_overflow() {
        assert_eq!(RequestCost::one(u64::MAX).operations(1), u128::from(u64::MAX) * OPERATION);
        assert_eq!(RequestCost::merged(&[u64::MAX, 1]).bytes(), u64::MAX);
    }
}
