//! Divides the available rate of each limit among hosts. A pure function of integers.
//!
//! First each host gets its floor and its reservation, up to its demand. Then all are raised to one
//! level, scaled by weight, each up to its demand (weighted max-min fairness); reservations count
//! towards the level. Quota that exceeds all demands is distributed by weight, so that a host that
//! becomes busy has some at once.
//!
//! Never distributes more than is available. Less than two units for each host stay undistributed:
//! one from rounding down its quota, one from rounding the level. The order of the claims does not
//! matter.

use super::ByKind;
use crate::throttle::LimitKind;
use alloc::vec::Vec;

/// Wait after which a host is treated as demanding everything, whatever it reports, in nanoseconds.
const STARVED_AFTER_NS: u64 = 1_000_000_000;
/// Fraction bits of the fixed-point level.
const FRACTION_BITS: u32 = 32;
/// Cap on weights so that products fit into 128 bits: 10,000 disks with the largest weight.
const MAX_WEIGHT: u64 = 100_000_000;

/// Claim of one host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QuotaClaim {
    /// Unconditional part, in units per second.
    pub floor: ByKind,
    /// Sum of its disks' weights; values below 1 count as 1.
    pub weight: u64,
    /// Sum of its disks' reservations: operations and bytes per second.
    pub reserved: [u64; 2],
    /// Demand in units per second.
    pub demand: ByKind,
    /// Age of its oldest waiting request, in nanoseconds.
    pub waiting_ns: u64,
}

/// Divides the `available` rate of each limit, in units per second, and returns each host's part,
/// including its floor, in the order of the claims. If the floors do not fit, all are scaled down.
pub fn divide_quota(available: ByKind, claims: &[QuotaClaim]) -> Vec<ByKind> {
    let mut parts: Vec<ByKind> = claims.iter().map(|_| [0; 6]).collect();
    for kind in LimitKind::ALL {
        let at = kind.index();
        let divided =
            divide_limit(available[at], claims.iter().map(|claim| ClaimBounds::new(claim, kind)).collect());
        parts.iter_mut().zip(divided).for_each(|(part, units)| part[at] = units);
    }
    parts
}

struct ClaimBounds {
    weight: u128,
    floor: u128,
    min: u128,
    max: u128,
}

impl ClaimBounds {
    fn new(claim: &QuotaClaim, kind: LimitKind) -> Self {
        let at = kind.index();
        let demand = if claim.waiting_ns >= STARVED_AFTER_NS { u64::MAX } else { claim.demand[at] };
        let reserved = claim.reserved[usize::from(kind.counts_bytes())];
        let floor = claim.floor[at];
        let min = floor.max(reserved.min(demand));
        Self {
            weight: claim.weight.clamp(1, MAX_WEIGHT).into(),
            floor: floor.into(),
            min: min.into(),
            max: demand.into(),
        }
    }

    fn quota_at_level(&self, level: u128) -> u128 {
        ((level * self.weight) >> FRACTION_BITS).clamp(self.min, self.max)
    }

    /// As [`ClaimBounds::quota_at_level`], rounded up: no host gains the units that others lose by
    /// rounding.
    fn quota_at_level_rounded_up(&self, level: u128) -> u128 {
        (level * self.weight).div_ceil(1 << FRACTION_BITS).clamp(self.min, self.max)
    }
}

fn divide_limit(available: u64, mut claims: Vec<ClaimBounds>) -> Vec<u64> {
    let available = u128::from(available);
    // Floors that do not fit are scaled down first, then the reservations above the floors.
    scale_down_to_fit(available, &mut claims, |claim| (&mut claim.floor, 0));
    scale_down_to_fit(available, &mut claims, |claim| {
        let floor = claim.floor;
        (&mut claim.min, floor)
    });
    for claim in &mut claims {
        claim.max = claim.max.min(available).max(claim.min);
    }
    let sum = |level: u128| claims.iter().map(|claim| claim.quota_at_level_rounded_up(level)).sum::<u128>();
    // Binary search for the highest level that fits: the sum is monotonic in the level.
    let (mut fits, mut above) = (0, (available << FRACTION_BITS) + 1);
    while fits + 1 < above {
        let middle = fits + (above - fits) / 2;
        if sum(middle) <= available { fits = middle } else { above = middle }
    }
    let surplus = available.saturating_sub(sum(fits));
    // While some host has unmet demand, the rest is only what rounding has left.
    let surplus = if claims.iter().any(|want| want.quota_at_level(fits) < want.max) { 0 } else { surplus };
    let weights: u128 = claims.iter().map(|want| want.weight).sum();
    claims.iter().map(|want| (want.quota_at_level(fits) + surplus * want.weight / weights) as u64).collect()
}

/// Scales one value of each claim down towards its floor, by the same factor, until all fit.
fn scale_down_to_fit(
    available: u128,
    claims: &mut [ClaimBounds],
    mut value_and_floor: impl FnMut(&mut ClaimBounds) -> (&mut u128, u128),
) {
    let (mut floors, mut above_floors) = (0, 0);
    for claim in claims.iter_mut() {
        let (number, floor) = value_and_floor(claim);
        floors += floor;
        above_floors += number.saturating_sub(floor);
    }
    // Floors of zero make this the same scaling for the first and the second call.
    let remaining = available.saturating_sub(floors);
    if above_floors <= remaining {
        return;
    }
    for claim in claims {
        let (number, floor) = value_and_floor(claim);
        *number = floor + number.saturating_sub(floor) * remaining / above_floors;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const IOPS: usize = LimitKind::IopsTotal.index();

    fn claim(weight: u64, floor: u64, reserved: u64, demand: u64) -> QuotaClaim {
        let iops_only = |units| core::array::from_fn(|at| if at == IOPS { units } else { 0 });
        QuotaClaim {
            floor: iops_only(floor),
            weight,
            reserved: [reserved, 0],
            demand: iops_only(demand),
            waiting_ns: 0,
        }
    }

    fn parts(available: u64, claims: &[QuotaClaim]) -> Vec<u64> {
        let all = core::array::from_fn(|at| if at == IOPS { available } else { 0 });
        divide_quota(all, claims).into_iter().map(|part| part[IOPS]).collect()
    }

    const ALL: u64 = u64::MAX;

    #[test]
    fn reservations_then_weights_then_surplus_by_weight() {
        assert_eq!(parts(600, &[claim(100, 0, 0, ALL), claim(200, 0, 0, ALL)]), [200, 400]);
        assert_eq!(
            parts(600, &[claim(100, 0, 0, 50), claim(1, 0, 0, ALL), claim(1, 0, 0, ALL)]),
            [50, 275, 275]
        );
        assert_eq!(
            parts(600, &[claim(1, 0, 400, ALL), claim(1, 0, 0, ALL), claim(1, 0, 0, ALL)]),
            [400, 100, 100]
        );
        assert_eq!(parts(600, &[claim(1, 0, 400, 0), claim(1, 0, 0, ALL)]), [0, 600], "not wanted");
        assert_eq!(parts(600, &[claim(1, 0, 0, 100), claim(1, 0, 0, 200)]), [250, 350]);
        assert_eq!(parts(600, &[]), [0; 0]);
    }

    #[test]
    fn reservations_that_do_not_fit_are_scaled_and_floors_kept() {
        assert_eq!(parts(100, &[claim(1, 10, 200, ALL), claim(1, 10, 0, ALL)]), [90, 10]);
        assert_eq!(parts(100, &[claim(1, 0, 300, ALL), claim(1, 0, 100, ALL)]), [75, 25]);
        assert_eq!(parts(10, &[claim(1, 30, 0, 0), claim(1, 10, 0, 0)]), [7, 2]);
    }

    #[test]
    fn starved_host_demands_everything() {
        let stuck = QuotaClaim { waiting_ns: STARVED_AFTER_NS, ..claim(1, 0, 0, 1) };
        assert_eq!(parts(100, &[stuck, claim(1, 0, 0, ALL)]), [50, 50]);
    }

    fn claims() -> impl Strategy<Value = Vec<QuotaClaim>> {
        let demand = prop_oneof![Just(ALL), 0..2_000u64, 0..1_000_000_000_000_000u64];
        let any_claim = (1..20_000u64, 0..20u64, 0..500u64, demand);
        prop::collection::vec(
            any_claim.prop_map(|(weight, floor, reserved, demand)| claim(weight, floor, reserved, demand)),
            1..30,
        )
    }

    proptest! {
        #[test]
        fn never_distributes_more_than_available_and_nearly_all(available in prop_oneof![1000..100_000u64, 1..=1_000_000_000_000_000u64], claims in claims()) {
            let sum: u64 = parts(available, &claims).iter().sum();
            prop_assert!(sum <= available);
            prop_assert!(sum + 2 * claims.len() as u64 > available, "{} of {}", sum, available);
        }

        #[test]
        fn no_starvation_and_no_gain_from_exaggerated_demand(available in 20_000..1_000_000u64, claims in claims()) {
            let weights: u64 = claims.iter().map(|claim| claim.weight).sum();
            let reserved: u64 = claims.iter().map(|claim| claim.reserved[0].max(claim.floor[IOPS])).sum();
            for (claim, part) in claims.iter().zip(parts(available, &claims)) {
                let (fair, demand) = (available.saturating_sub(reserved) * claim.weight / weights, claim.demand[IOPS]);
                prop_assert!(part + 2 >= demand.min(fair).max(claim.reserved[0].min(demand)).max(claim.floor[IOPS]));
            }
            // All others demand everything: a host that exaggerates gets its share or reservation.
            let mut busy = claims.clone();
            busy.iter_mut().for_each(|claim| claim.demand[IOPS] = ALL);
            let greedy = busy[0];
            let share = available * greedy.weight / weights;
            prop_assert!(parts(available, &busy)[0] <= share.max(greedy.reserved[0]).max(greedy.floor[IOPS]) + 1);
        }

        #[test]
        fn higher_demand_does_not_lower_the_quota_of_its_host(available in 1_000..1_000_000u64, claims in claims(), more in 0..1_000_000u64) {
            // Rounding may leave undistributed units in one division and distribute them in the
            // next.
            let rounding = 2 * claims.len() as u64;
            let before = parts(available, &claims);
            let mut higher_claims = claims.clone();
            higher_claims[0].demand[IOPS] = higher_claims[0].demand[IOPS].saturating_add(more);
            let after = parts(available, &higher_claims);
            prop_assert!(after[0] + rounding >= before[0], "{} became {}", before[0], after[0]);
            for (before, after) in before.iter().zip(&after).skip(1) {
                prop_assert!(*after <= before + rounding);
            }
        }

        #[test]
        fn larger_limit_lowers_no_quota(available in 1_000..1_000_000u64, claims in claims(), more in 0..1_000_000u64) {
            let rounding = 2 * claims.len() as u64;
            for (before, after) in parts(available, &claims).into_iter().zip(parts(available + more, &claims)) {
                prop_assert!(after + rounding >= before);
            }
        }

        #[test]
        fn order_of_claims_does_not_matter(available in 1..1_000_000u64, claims in claims(), turn in 0..30usize) {
            let mut rotated = claims.clone();
            let rotation = turn % claims.len();
            rotated.rotate_left(rotation);
            let mut parts_of_claims = parts(available, &claims);
            parts_of_claims.rotate_left(rotation);
            prop_assert_eq!(parts_of_claims, parts(available, &rotated));
        }
    }
}
