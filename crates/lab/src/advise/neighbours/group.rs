//! A group over the device: its limit, and the shares in it.
//!
//! Its limit is a part of the device's capacity for requests like these, so that they wait in the
//! group and not in the device's queue. Unlimited tenants get a higher weight or a reservation in
//! it. Weights come first: they work at any size of the group, and use up none of the device's
//! reservable capacity. Disks of a group that keeps its limits get weights in it.

use policy::throttle::{NodeShare, RateLimit, ReservationUnit};

use super::{CLOSE, ConfirmedPlan, NeighbourPlan, Neighbours, TIGHTENINGS};
use crate::advise::{
    confidence::{ConfidenceInterval, interval_of_tried},
    tenant_limits::{amount, limits_of},
};

/// Reservable share of a group's limit: mClock needs the rest for weights.
const RESERVABLE: f64 = 0.9;
/// Weights of the unlimited tenants; the limited ones have 100.
const WEIGHTS: [u32; 4] = [200, 500, 1000, 5000];
/// Bisection steps over the group's part of the device.
const HALVINGS: u32 = 6;
/// Factors on the part found, tried for the confidence interval.
const SHARE_FACTORS: [f64; 13] = [0.4, 0.55, 0.7, 0.8, 0.88, 0.94, 1.0, 1.06, 1.12, 1.2, 1.35, 1.6, 2.0];

/// A group's part of the device, and its members' shares.
type GroupPart = (f64, Vec<NodeShare>);

impl Neighbours<'_> {
    /// A plan with a group that admits this part of the device, in the unit that costs it most.
    pub(super) fn grouped(&self, part: f64, shares: &[NodeShare]) -> NeighbourPlan {
        let unit = self.common_unit();
        let mut by_unit = [None; 2];
        by_unit[unit.index()] =
            Some(RateLimit { rate: (part * self.capacity(unit)).max(1.0) as u64, ..RateLimit::NONE });
        NeighbourPlan {
            limits: vec![None; self.tenants.len()],
            group: Some((limits_of(by_unit), shares.to_vec())),
        }
    }

    fn common_unit(&self) -> ReservationUnit {
        let work = |unit: ReservationUnit| {
            self.loads.iter().filter(|load| load.unit == unit).map(|load| load.work_s).sum::<f64>()
        };
        if work(ReservationUnit::Iops) >= work(ReservationUnit::Bps) {
            ReservationUnit::Iops
        } else {
            ReservationUnit::Bps
        }
    }

    /// Units per second that the device completes of all these requests together.
    fn capacity(&self, unit: ReservationUnit) -> f64 {
        let units_of = |tenant: &usize| {
            amount(self.search.arrivals, &self.search.tenants.tenants[*tenant].disks, unit).units
        };
        // Average cost of the whole mix: units divided by the seconds that all of them take.
        let units: u64 = self.tenants.iter().map(units_of).sum();
        units as f64 / self.loads.iter().map(|load| load.work_s).sum::<f64>()
    }

    /// True if a group can divide the device between limited and unlimited tenants.
    fn can_be_grouped(&self, limited: &[bool]) -> bool {
        let is_grouped =
            |&disk: &usize| self.tenant_world.world.disks[self.tenant_world.disks[disk]].group.is_some();
        !self.disks.iter().any(is_grouped) && limited.contains(&true) && limited.contains(&false)
    }

    /// The largest part of the device with which a group suffices, given shares that may depend on
    /// the part; `None` if no part suffices.
    fn largest(
        &mut self,
        shares: impl Fn(f64) -> Vec<NodeShare>,
        limited: &[bool],
    ) -> anyhow::Result<Option<GroupPart>> {
        let mut best = None;
        let (mut low, mut high) = (0.1, 1.0);
        for _ in 0..HALVINGS {
            let middle = f64::midpoint(low, high);
            // Reservations must also fit into the tightened plans that `confirm` may try.
            let shares = shares(middle * 0.95_f64.powi(TIGHTENINGS as i32 + 1));
            let plan = self.grouped(middle, &shares);
            let results = self.run(&plan, false)?;
            self.record_tried(None, &plan, &results);
            // Bisection assumes that a smaller group never harms the unlimited tenants.
            if self.keeps(&results, |place| !limited[place]) {
                (low, best) = (middle, Some((middle, shares)));
            } else {
                high = middle;
            }
        }
        Ok(best)
    }

    /// The smallest weight of the unlimited tenants at which a group suffices with nearly the
    /// largest part of the device.
    pub(super) fn by_weight(&mut self, limited: &[bool]) -> anyhow::Result<Option<GroupPart>> {
        if !self.can_be_grouped(limited) {
            return Ok(None);
        }
        let mut best: Option<GroupPart> = None;
        for weight in WEIGHTS {
            let heavy = NodeShare::new(weight).expect("it is a weight");
            let shares: Vec<NodeShare> = limited
                .iter()
                .map(|&is_limited| if is_limited { NodeShare::default() } else { heavy })
                .collect();
            let found = self.largest(|_| shares.clone(), limited)?;
            if let Some(found) =
                // Weights ascend, so a larger weight replaces a smaller one only with a clear
                // advantage.
                found.filter(|found| best.as_ref().is_none_or(|best| found.0 > best.0 * CLOSE))
            {
                best = Some(found);
            }
        }
        Ok(best)
    }

    /// The largest part of the device for a group with reservations for the unlimited tenants;
    /// `None` if such a group is impossible or does not suffice.
    pub(super) fn by_reservation(&mut self, limited: &[bool]) -> anyhow::Result<Option<GroupPart>> {
        if !self.can_be_grouped(limited) {
            return Ok(None);
        }
        let unit = self.common_unit();
        let capacity = self.capacity(unit);
        let demand = |place: usize| {
            if limited[place] {
                return 0.0;
            }
            // Converted to the group's unit by the cost on the device.
            let load = &self.loads[place];
            let rate = if load.steady.is_finite() { load.steady } else { load.units };
            if load.unit == unit { rate } else { rate * load.unit_s * capacity }
        };
        let demands: Vec<f64> = (0..self.tenants.len()).map(demand).collect();
        let sum: f64 = demands.iter().sum();
        let shares = |part: f64| {
            // Scaled down in proportion if the reservations exceed the reservable part.
            let factor = (part * capacity * RESERVABLE / sum).min(1.0);
            let share = |&rate: &f64| {
                let reservation = (rate * factor) as u64;
                let share = NodeShare::default();
                match unit {
                    ReservationUnit::Iops => share.with_reservation(reservation, 0),
                    ReservationUnit::Bps => share.with_reservation(0, reservation),
                }
            };
            demands.iter().map(share).collect::<Vec<_>>()
        };
        self.largest(shares, limited)
    }

    /// The smallest weight with which the tenants with a target keep it in their common group,
    /// whose limits stay.
    pub(super) fn by_existing_group_weight(&mut self) -> anyhow::Result<Option<ConfirmedPlan>> {
        let Some(group) = self.common else { return Ok(None) };
        if !self.has_target.contains(&true) || !self.has_target.contains(&false) {
            return Ok(None);
        }
        let limits = self.search.tenants.world.groups[group].settings.limits;
        for weight in WEIGHTS {
            let heavy = NodeShare::new(weight).expect("it is a weight");
            let shares = self
                .has_target
                .iter()
                .map(|&has_target| if has_target { heavy } else { NodeShare::default() });
            let group = Some((limits, shares.collect()));
            let plan = NeighbourPlan { limits: vec![None; self.tenants.len()], group };
            let results = self.run(&plan, true)?;
            self.record_tried(None, &plan, &results);
            if self.keeps_all(&results, |_| true) {
                return Ok(Some((plan, results, true)));
            }
        }
        Ok(None)
    }

    /// Confidence interval of the group's limit, over days made of similar hours.
    pub(super) fn interval_of_group(
        &self,
        part: f64,
        shares: &[NodeShare],
        limited: &[bool],
    ) -> anyhow::Result<Option<ConfidenceInterval>> {
        if !self.is_all_searched() {
            return Ok(None);
        }
        let mut tried = Vec::with_capacity(SHARE_FACTORS.len());
        for factor in SHARE_FACTORS {
            // Reservations must fit into a smaller group.
            let scaled = |rate: u64| (rate as f64 * factor.min(1.0)) as u64;
            let share = |share: &NodeShare| {
                share.with_reservation(scaled(share.iops_reservation()), scaled(share.bps_reservation()))
            };
            let plan = self.grouped(part * factor, &shares.iter().map(share).collect::<Vec<_>>());
            let results = self.run(&plan, false)?;
            tried.push((factor, self.late_requests(&results, |place| !limited[place])));
        }
        let found = interval_of_tried(&tried, true, &self.search.criterion.target);
        Ok(found.map(|(low, high)| ConfidenceInterval::around(low, high)))
    }
}
