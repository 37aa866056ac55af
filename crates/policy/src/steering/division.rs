//! Divides a rate among members: by demand if that fits, otherwise by weight.
//!
//! Always distributes exactly the rate: what exceeds all demands is divided by weight.

use alloc::vec::Vec;

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RateClaim {
    /// Greater than 0.
    pub(super) weight: f64,
    /// Demand in units per second; may be infinite.
    pub(super) demand: f64,
}

/// Divides `rate`; returns the parts in the order of the claims.
///
/// A claim below its share by weight is met, and the remainder is divided among the rest, again
/// by weight (max-min fairness). What remains then is added to all by weight.
pub(super) fn divide_rate(rate: f64, claims: &[RateClaim]) -> Vec<f64> {
    let mut parts: Vec<f64> = claims.iter().map(|_| 0.0).collect();
    let mut open: Vec<usize> = (0..claims.len()).collect();
    let mut remaining = rate;
    // In ascending order of demand per weight, one pass suffices: an unmet claim is never followed
    // by one that could be met.
    open.sort_by(|&left_index, &right_index| {
        let level = |index: usize| claims[index].demand / claims[index].weight;
        level(left_index).total_cmp(&level(right_index))
    });
    let mut weights: f64 = claims.iter().map(|claim| claim.weight).sum();
    for &index in &open {
        let RateClaim { weight, demand } = claims[index];
        let share = remaining * weight / weights;
        parts[index] = demand.min(share);
        remaining -= parts[index];
        weights -= weight;
    }
    let weights: f64 = claims.iter().map(|claim| claim.weight).sum();
    for (part, claim) in parts.iter_mut().zip(claims) {
        *part += remaining.max(0.0) * claim.weight / weights;
    }
    parts
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: f64 = f64::INFINITY;

    #[track_caller]
    fn check(rate: f64, claims: &[(f64, f64)], expect: &[f64]) {
        let claims: Vec<RateClaim> =
            claims.iter().map(|&(weight, demand)| RateClaim { weight, demand }).collect();
        let parts = divide_rate(rate, &claims);
        assert!(
            parts.iter().zip(expect).all(|(part, expect)| (part - expect).abs() < 1e-6),
            "{parts:?} instead of {expect:?}"
        );
    }

    #[test]
    fn unmet_demand_is_divided_by_weight() {
        check(600.0, &[(100.0, ALL), (200.0, ALL)], &[200.0, 400.0]);
        check(600.0, &[(100.0, ALL)], &[600.0]);
        check(600.0, &[], &[]);
    }

    #[test]
    fn unused_share_is_divided_among_the_rest() {
        check(600.0, &[(100.0, 50.0), (100.0, ALL), (100.0, ALL)], &[50.0, 275.0, 275.0]);
        check(600.0, &[(300.0, 90.0), (100.0, 1000.0), (200.0, ALL)], &[90.0, 170.0, 340.0]);
    }

    #[test]
    fn surplus_is_divided_by_weight() {
        check(600.0, &[(100.0, 0.0), (200.0, 0.0)], &[200.0, 400.0]);
        check(600.0, &[(100.0, 100.0), (100.0, 200.0)], &[250.0, 350.0]);
    }

    proptest! {
        #[test]
        fn whole_rate_is_distributed_without_starvation(
            rate in 1.0..1e12,
            claims in prop::collection::vec((1.0..10_000.0, prop_oneof![Just(ALL), 0.0..1e12]), 1..40),
        ) {
            let claims: Vec<RateClaim> = claims.into_iter().map(|(weight, demand)| RateClaim { weight, demand }).collect();
            let parts = divide_rate(rate, &claims);
            let sum: f64 = parts.iter().sum();
            prop_assert!((sum - rate).abs() <= rate * 1e-9, "{} given out of {}", sum, rate);
            let weights: f64 = claims.iter().map(|claim| claim.weight).sum();
            for (part, claim) in parts.iter().zip(&claims) {
                let share = rate * claim.weight / weights;
                prop_assert!(*part >= claim.demand.min(share) * (1.0 - 1e-9), "{:?} got {}", claim, part);
            }
        }
    }
}
