//! Cost of a request in time, and the slices in which a large one is charged.
//!
//! Charged at once, a request of 4 MiB at 1 MB/s would delay all siblings by four seconds. It is
//! therefore charged in slices of 90 ms, with the siblings' requests in between, and admitted with
//! the last one. The buckets of every level are charged the same fractions, which add up to the
//! whole exactly.
//!
//! Stateless: everything follows from the request, the limits in force and the part charged so far.

use core::ops::Range;

/// Duration of a slice at the scarcest limit: a small request behind a large one should complete
/// within 100 ms. The difference is for the timer and the transfer.
pub(super) const SLICE_NS: u64 = 90_000_000;

/// Parts of a whole request. A part of the largest request (32 MiB, by NBD) is less than a byte.
pub(super) const WHOLE_REQUEST: u32 = 1 << 30;

/// Cap on the cost of a single request in the schedule, about 19 hours, so that sums cannot
/// overflow. Buckets are charged in full.
pub(super) const MAX_COST_NS: u64 = 1 << 46;

/// `billionths / rate`: time that the units take at a rate per second, in nanoseconds. Rounded up,
/// at most [`MAX_COST_NS`].
pub(super) fn time_for(billionths: u128, rate: u64) -> u64 {
    // Up to 18 units this fits into 64 bits; a 128-bit division is a library call.
    let ns = match u64::try_from(billionths) {
        Ok(small) => small.div_ceil(rate),
        Err(_) => u64::try_from(billionths.div_ceil(u128::from(rate))).unwrap_or(u64::MAX),
    };
    ns.min(MAX_COST_NS)
}

/// Share of `amount` that belongs to a part of a request. Adjacent parts add up exactly.
pub(super) fn proportional_part(amount: u128, part: &Range<u32>) -> u128 {
    if *part == (0..WHOLE_REQUEST) {
        return amount;
    }
    // 2⁶⁴ bytes have 2⁹⁴ billionths, times 2³⁰ fits. Sums of several requests saturate.
    let upto = |end: u32| amount.saturating_mul(u128::from(end)) / u128::from(WHOLE_REQUEST);
    upto(part.end) - upto(part.start)
}

/// Size of a slice, in parts of [`WHOLE_REQUEST`], of a request that takes `total_ns`. At least one
/// operation: at 2 IOPS two waiting requests are served one by one, not both at the end.
pub(super) fn slice_size(total_ns: u64, operation_ns: u64) -> u32 {
    let slice_ns = SLICE_NS.max(operation_ns);
    if total_ns <= slice_ns {
        return WHOLE_REQUEST;
    }
    // Both at most 2⁴⁶: the product fits into 128 bits, and the quotient is below `WHOLE_REQUEST`.
    // Rounded up; otherwise ten tenths would leave a remainder for an eleventh service.
    (u128::from(slice_ns) * u128::from(WHOLE_REQUEST)).div_ceil(u128::from(total_ns)) as u32
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn parts_add_up_to_the_whole(amount in 0..u128::from(u64::MAX) * 1_000_000_000, cuts in prop::collection::vec(0..=WHOLE_REQUEST, 0..20)) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut sum = 0;
            let mut charged = 0;
            for cut in cuts.into_iter().chain([WHOLE_REQUEST]) {
                sum += proportional_part(amount, &(charged..cut));
                charged = cut;
            }
            prop_assert_eq!(sum, amount);
        }
    }

    #[test]
    fn a_large_request_is_cut_into_slices() {
        assert_eq!(slice_size(SLICE_NS, 0), WHOLE_REQUEST);
        assert_eq!(slice_size(4 * SLICE_NS, 0), WHOLE_REQUEST / 4);
        assert_eq!(slice_size(10 * SLICE_NS, 5 * SLICE_NS), WHOLE_REQUEST / 2, "but an operation at least");
        assert_eq!(slice_size(10 * SLICE_NS, 10 * SLICE_NS), WHOLE_REQUEST);
        assert_eq!(slice_size(MAX_COST_NS, 0), 1374);
    }
}
