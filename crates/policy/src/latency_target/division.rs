//! Division of a budget among the controlled members.
//!
//! Ordinary members are served first, spare-capacity work gets the rest: so it is throttled before
//! any ordinary member waits. Within both, parts are proportional to weights, and what a member
//! does not demand goes to the others. Each part is at least the member's minimum.
//!
//! The sum is the budget, unless the minima exceed it or all demands are below it.

use alloc::vec::Vec;

/// Steps of the bisection: the resolution of a double.
const BISECTION_STEPS: usize = 60;

/// A member's claim to the budget; rates in units per second.
#[derive(Clone, Copy, Debug)]
pub(super) struct BudgetClaim {
    /// Greater than 0.
    pub(super) weight: f64,
    /// The larger of reservation and floor.
    pub(super) minimum: f64,
    /// May be infinite.
    pub(super) demand: f64,
    pub(super) is_spare: bool,
}

impl BudgetClaim {
    fn part(&self, level: f64) -> f64 {
        (self.weight * level).min(self.demand).max(self.minimum)
    }
}

/// Divides `budget`; returns the parts in the order of the claims.
pub(super) fn divide_budget(budget: f64, claims: &[BudgetClaim]) -> Vec<f64> {
    let of_class = |is_spare: bool| claims.iter().filter(move |claim| claim.is_spare == is_spare);
    let spare_minimum: f64 = of_class(true).map(|claim| claim.minimum).sum();
    let ordinary_level = level(budget - spare_minimum, of_class(false));
    let ordinary: f64 = of_class(false).map(|claim| claim.part(ordinary_level)).sum();
    let spare_level = level(budget - ordinary, of_class(true));
    let part = |claim: &BudgetClaim| claim.part(if claim.is_spare { spare_level } else { ordinary_level });
    claims.iter().map(part).collect()
}

/// Rate for each unit of weight with which the parts sum up to at most `budget`.
fn level<'a>(budget: f64, claims: impl Iterator<Item = &'a BudgetClaim> + Clone) -> f64 {
    let lightest = claims.clone().map(|claim| claim.weight).fold(f64::INFINITY, f64::min);
    // With this level, the lightest member alone would get the whole budget.
    let (mut low, mut high) = (0.0, budget.max(0.0) / lightest);
    for _ in 0..BISECTION_STEPS {
        let middle = (low + high) / 2.0;
        let sum: f64 = claims.clone().map(|claim| claim.part(middle)).sum();
        if sum <= budget { low = middle } else { high = middle }
    }
    low
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ALL: f64 = f64::INFINITY;

    fn ordinary(weight: f64, minimum: f64, demand: f64) -> BudgetClaim {
        BudgetClaim { weight, minimum, demand, is_spare: false }
    }

    fn spare(minimum: f64, demand: f64) -> BudgetClaim {
        BudgetClaim { weight: 100.0, minimum, demand, is_spare: true }
    }

    #[track_caller]
    fn check(budget: f64, claims: &[BudgetClaim], expect: &[f64]) {
        let parts = divide_budget(budget, claims);
        assert!(
            parts.len() == expect.len()
                && parts.iter().zip(expect).all(|(part, expect)| (part - expect).abs() < 1e-6),
            "{parts:?} instead of {expect:?}"
        );
    }

    #[test]
    fn weights_and_demands() {
        check(600.0, &[ordinary(100.0, 1.0, ALL), ordinary(200.0, 1.0, ALL)], &[200.0, 400.0]);
        check(600.0, &[ordinary(100.0, 1.0, ALL), ordinary(200.0, 1.0, 90.0)], &[510.0, 90.0]);
    }

    #[test]
    fn minimum_is_kept_at_the_cost_of_the_others() {
        check(600.0, &[ordinary(100.0, 1.0, ALL), ordinary(100.0, 400.0, ALL)], &[200.0, 400.0]);
        check(100.0, &[ordinary(100.0, 50.0, ALL), ordinary(100.0, 400.0, ALL)], &[50.0, 400.0]);
    }

    #[test]
    fn spare_capacity_work_is_throttled_first() {
        check(600.0, &[ordinary(1.0, 1.0, ALL), spare(10.0, ALL)], &[590.0, 10.0]);
        check(600.0, &[ordinary(1.0, 1.0, 500.0), spare(10.0, ALL)], &[500.0, 100.0]);
        check(600.0, &[spare(10.0, ALL), spare(10.0, 20.0)], &[580.0, 20.0]);
    }

    proptest! {
        #[test]
        fn sum_is_bounded_and_each_has_its_minimum(
            budget in 1.0..1e9,
            claims in prop::collection::vec(
                (1.0..10_000.0, 1.0..1e6, prop_oneof![Just(ALL), 0.0..1e9], any::<bool>()), 0..40),
        ) {
            let claims: Vec<BudgetClaim> = claims
                .into_iter()
                .map(|(weight, minimum, demand, is_spare)| BudgetClaim { weight, minimum, demand, is_spare })
                .collect();
            let parts = divide_budget(budget, &claims);
            let minimum: f64 = claims.iter().map(|claim| claim.minimum).sum();
            prop_assert!(parts.iter().sum::<f64>() <= budget.max(minimum) * (1.0 + 1e-9));
            for (part, claim) in parts.iter().zip(&claims) {
                prop_assert!(*part >= claim.minimum, "{:?} got {}", claim, part);
            }
            let met = |spare| claims.iter().zip(&parts).filter(|(claim, _)| claim.is_spare == spare)
                .all(|(claim, part)| *part >= claim.demand * (1.0 - 1e-9));
            let at_minimum = claims.iter().zip(&parts).filter(|(claim, _)| claim.is_spare)
                .all(|(claim, part)| *part <= claim.minimum + budget * 1e-9);
            prop_assert!(met(false) || at_minimum, "spare-capacity work is served first");
            let all = parts.iter().sum::<f64>();
            prop_assert!(all >= budget * (1.0 - 1e-6) || (met(false) && met(true)));
        }
    }
}
