//! A member's claim to the budget: weight, demand, and the minimum from its reservation and floor.
//!
//! Reservations are in requests and bytes, the budget is in units, so a reservation is converted
//! with the member's mean size of a request. Never looks at other members.

use super::division::BudgetClaim;
use super::{MemberClass, MemberSample};

/// Default floor of a member, and the bound of all default floors, as shares of the device's
/// highest recent throughput. Without the bound, a hundred members at their floors would fill the
/// device.
const DEFAULT_FLOOR: f64 = 0.01;
const MAX_DEFAULT_FLOORS: f64 = 0.1;
/// Demand of a member that does not wait, relative to its rate.
const HEADROOM: f64 = 1.5;
/// Members with equal caps would submit at the same instants, because their buckets were filled at
/// the same instant. Therefore parts are lowered and minima raised by up to this share, which
/// depends on the member's key.
const SPREAD: f64 = 0.03;
/// Number of requests over which the size is averaged.
const MEAN_REQUESTS: f64 = 20.0;

/// Default floor of each of `members`, in units per second.
pub(super) fn default_floor(peak_rate: f64, members: usize) -> f64 {
    peak_rate * DEFAULT_FLOOR.min(MAX_DEFAULT_FLOORS / members as f64)
}

/// A number below [`SPREAD`].
pub(super) fn spread(key: u64) -> f64 {
    let hash = key.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    SPREAD * hash as f64 / (1_u64 << 32) as f64
}

/// Mean size of a member's requests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MemberClaim {
    /// Units and bytes of a request; `None` before the first one.
    mean: Option<(f64, f64)>,
}

impl MemberClaim {
    pub(super) fn observe(&mut self, sample: &MemberSample<'_>) {
        if sample.requests == 0 {
            return;
        }
        let requests = sample.requests as f64;
        let (units, bytes) = (sample.units() / requests, sample.bytes as f64 / requests);
        let (mean_units, mean_bytes) = self.mean.unwrap_or((units, bytes));
        let smoothing = (requests / MEAN_REQUESTS).min(1.0);
        let towards = |mean: f64, value: f64| mean + (value - mean) * smoothing;
        self.mean = Some((towards(mean_units, units), towards(mean_bytes, bytes)));
    }

    /// The reservation in units per second; 0 if there is none. If requests and bytes are reserved,
    /// the one that is used up first counts ([`NodeShare::with_reservation`]).
    ///
    /// [`NodeShare::with_reservation`]: crate::throttle::NodeShare::with_reservation
    fn reservation(&self, sample: &MemberSample<'_>) -> f64 {
        let (units, bytes) = self.mean.unwrap_or((1.0, super::UNIT_BYTES as f64));
        let by_requests = sample.share.iops_reservation() as f64 * units;
        // Requests without bytes (zeroing, discards) use up none of the reserved bytes.
        let by_bytes = sample.share.bps_reservation() as f64 * units / bytes.max(1.0);
        match (by_requests > 0.0, by_bytes > 0.0) {
            (true, true) => by_requests.min(by_bytes),
            _ => by_requests.max(by_bytes),
        }
    }

    pub(super) fn claim(&self, sample: &MemberSample<'_>, default_floor: f64, elapsed_s: f64) -> BudgetClaim {
        let floor = sample.floor.map_or(default_floor, |floor| floor as f64);
        let minimum = floor.max(self.reservation(sample)) * (1.0 + spread(sample.key));
        BudgetClaim {
            weight: f64::from(sample.share.weight()),
            // Rounded up: a rate is a whole number, and 0 would be no limit.
            minimum: ((minimum + 0.999) as u64).max(1) as f64,
            demand: if sample.is_waiting { f64::INFINITY } else { sample.units() / elapsed_s * HEADROOM },
            is_spare: sample.class == MemberClass::SpareCapacity,
        }
    }
}
