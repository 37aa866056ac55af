//! Refund of spare capacity: counts prefetched data that guests have read.
//!
//! A guest is charged for its requests, wherever the data comes from. Prefetched data would be
//! charged twice, so the spare capacity is refunded.
//!
//! Not attributed to guests: levels are sums. Never refunds more than was charged.

use super::cost::BILLION;

/// Prefetched data that guests have read since the last
/// [refund](super::ThrottleTree::try_admit_read_ahead).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SpareRefund {
    bytes: u64,
    /// Number of read-aheads, in billionths.
    requests: u64,
}

impl SpareRefund {
    /// No refund.
    pub const NONE: Self = Self { bytes: 0, requests: 0 };

    /// Adds `bytes`, at most `read_ahead_bytes`, that guests have read for the first time from a
    /// read-ahead charged as `read_ahead_bytes`. Refunds the same fraction of its operations.
    pub fn add(&mut self, bytes: u64, read_ahead_bytes: u64) {
        let bytes = bytes.min(read_ahead_bytes);
        let billionths = (u128::from(bytes) * u128::from(BILLION)).checked_div(u128::from(read_ahead_bytes));
        self.bytes = self.bytes.saturating_add(bytes);
        // At most a billion.
        self.requests = self.requests.saturating_add(billionths.unwrap_or(0) as u64);
    }

    /// Refunded bytes.
    pub const fn bytes(self) -> u64 {
        self.bytes
    }

    /// Operations charged for the data under this `iops-size`, in billionths. Exact, apart from
    /// rounding, if all or none of the read-aheads were above it, otherwise a lower bound.
    pub(super) fn operations(self, iops_size: u64) -> u128 {
        // The sum of the maxima is at least the maximum of the sums.
        let by_size = (u128::from(self.bytes) * u128::from(BILLION)).checked_div(u128::from(iops_size));
        u128::from(self.requests).max(by_size.unwrap_or(0))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::throttle::cost::RequestCost;
    use proptest::prelude::*;

    const OPERATION: u128 = BILLION as u128;

    fn refund(parts: &[(u64, u64)]) -> SpareRefund {
        let mut sum = SpareRefund::NONE;
        parts.iter().for_each(|(bytes, charged)| sum.add(*bytes, *charged));
        sum
    }

    #[test]
    fn piecewise_use_refunds_the_whole_charge() {
        let pieces = refund(&[(4096, 131_072); 32]);
        assert_eq!(pieces.bytes(), 131_072);
        assert_eq!(pieces.operations(0), OPERATION);
        assert_eq!(pieces.operations(1 << 20), OPERATION);
        assert_eq!(pieces.operations(4096), 32 * OPERATION);
        assert_eq!(refund(&[(65_536, 131_072)]).operations(0), OPERATION / 2);
    }

    #[test]
    fn refund_never_exceeds_the_charge() {
        assert_eq!(refund(&[(8192, 4096), (1, 0)]), refund(&[(4096, 4096)]));
        let saturated = refund(&[(u64::MAX, u64::MAX); 3]);
        assert_eq!((saturated.bytes(), saturated.operations(0)), (u64::MAX, 3 * OPERATION));
    }

    proptest! {
        #[test]
        fn operations_are_never_more_than_were_charged(
            parts in prop::collection::vec((1..1_000_000u64, 1..1_000_000u64), 1..20),
            iops_size in prop_oneof![Just(0), 512..300_000u64],
        ) {
            let charged: u128 = parts.iter().map(|(_, charged_bytes)| RequestCost::one(*charged_bytes).operations(iops_size)).sum();
            prop_assert!(refund(&parts).operations(iops_size) <= charged);
            // Refunded together or one by one.
            let one_by_one: u128 =
                parts.iter().map(|part| refund(&[*part]).operations(iops_size)).sum();
            prop_assert!(one_by_one <= charged);
        }
    }
}
