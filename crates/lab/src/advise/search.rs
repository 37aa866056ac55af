//! The smallest limit at which a tenant's requests do not wait too long.
//!
//! ```text
//!   rates from the busiest hour's to the peak ─► arrival_curve: the burst that each rate needs
//!                                        │  the cheapest, and the smallest without a burst
//!                                        ▼
//!                                     finer rates around these two, three times ─► a limit in whole numbers,
//!                                                                                  verified request by request
//! ```
//!
//! No rate is below that of the busiest hour (or tenth of a short trace). Demand that lasts longer
//! is no burst, and a limit that only just suffices on this day would not suffice on another one.
//! The rate of a burst longer than a second is bounded by the smallest rate that needs no burst,
//! which is the maximum that the tenant ever needs.
//!
//! Pure: no I/O, no clock, and the same requests give the same limit.

use policy::throttle::{MAX_VALUE, RateLimit, ReservationUnit};

use super::{
    arrival_curve::{NO_BURST_S, RateHistogram, demand, late_requests, measure_rates},
    arrivals::{SLOT_NS, TraceArrival},
    target::LatencyTarget,
};

const COARSE: usize = 24;
const FINE: usize = 10;
const REFINEMENTS: usize = 3;
/// Byte rates are rounded to KiB.
const KIB: u64 = 1024;

/// Volume of a tenant's requests.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct RequestVolume {
    pub(super) requests: u64,
    pub(super) units: u64,
    /// Maximum units in one slot of `SLOT_NS`.
    pub(super) peak: u64,
    /// Rate per second in the busiest hour, or tenth of a short trace.
    pub(super) busiest: f64,
}

/// Criterion for limits.
#[derive(Clone, Copy, Debug)]
pub(super) struct SearchTerms {
    pub(super) target: LatencyTarget,
    /// Tolerated wait; less than the target's time if the device needs the rest.
    pub(super) wait_s: f64,
    /// Seconds over which a burst is spread to compare it with a rate.
    pub(super) over_s: f64,
}

/// The smallest limits of one unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SmallestLimits {
    /// The limit with the least capacity.
    pub(super) limit: RateLimit,
    /// The smallest rate that needs no burst.
    pub(super) steady: u64,
}

/// Units per second that may be admitted within `over_s`.
pub(super) fn capacity(limit: RateLimit, over_s: f64) -> f64 {
    limit.rate as f64 + limit.capacity() / over_s
}

/// Searches for the smallest limit of these requests, of which there must be at least one. `None`
/// if it would exceed the largest valid limit.
pub(super) fn smallest<A: Iterator<Item = TraceArrival>>(
    arrivals: impl Fn() -> A,
    unit: ReservationUnit,
    amount: &RequestVolume,
    terms: &SearchTerms,
) -> Option<SmallestLimits> {
    let allowed = terms.target.allowed_late(amount.requests);
    let mut points =
        MeasuredRates { allowed, terms: *terms, steady: f64::INFINITY, below: 0.0, best: Vec::new() };
    let mut measure = |rates: &[f64]| {
        points.add(&measure_rates(demand(arrivals(), unit), unit, rates, terms.wait_s));
        points.next()
    };
    // At this rate no request waits: a bucket of a tenth of a second holds two slots at their peak,
    // and the rate drains a slot in its time.
    let high = (2.0 * amount.peak as f64 / NO_BURST_S).max(amount.peak as f64 * 1e9 / SLOT_NS as f64);
    let low = amount.busiest.max(1.0);
    // Each pass over the requests measures all rates at once, so few passes are needed.
    let mut rates = spread(low, high.max(low).max(2.0), COARSE);
    for _ in 0..=REFINEMENTS {
        rates = measure(&rates);
    }
    let to_valid_rate = |units: f64| valid_rate(units, unit);
    // If no rate sufficed without a burst, the upper bound is tried in whole numbers.
    let steady = RateLimit { rate: to_valid_rate(points.steady.min(high)), ..RateLimit::NONE };
    let mut best = steady;
    if let Some(&(_, rate, size_s)) = points.cheapest() {
        let bursting = limit_with_burst(rate, size_s, steady.rate, to_valid_rate);
        // A burst pays only if it reduces the capacity within `over_s`.
        if capacity(bursting, terms.over_s) < capacity(steady, terms.over_s) {
            best = bursting;
        }
    }
    // Verified in whole numbers and with both buckets of a long burst.
    let holds =
        |limit: RateLimit| late_requests(demand(arrivals(), unit), unit, limit, 1.0, terms.wait_s) <= allowed;
    let grown = |limit: RateLimit| {
        // At least one more, or small rates would never grow by rounding.
        let grow = |rate: u64| to_valid_rate(rate as f64 * 1.01).max(rate + 1);
        let burst_rate = if limit.burst_rate > 0 { grow(limit.burst_rate) } else { 0 };
        RateLimit { rate: grow(limit.rate), burst_rate, ..limit }
    };
    let until_it_holds = |mut limit: RateLimit| {
        // Bounded: 200 steps of 1 % are a factor of seven, more than rounding ever needs.
        for _ in 0..200 {
            if holds(limit) {
                break;
            }
            limit = grown(limit);
        }
        limit
    };
    let limit = until_it_holds(best);
    let steady = if best == steady { limit.rate } else { until_it_holds(steady).rate };
    let is_valid = |limit: RateLimit| {
        limit.rate.max(limit.burst_rate) <= MAX_VALUE && limit.capacity() <= MAX_VALUE as f64
    };
    (is_valid(limit) && holds(limit)).then_some(SmallestLimits { limit, steady })
}

/// The next valid rate, rounded up; to KiB for bytes.
pub(super) fn valid_rate(units: f64, unit: ReservationUnit) -> u64 {
    match unit {
        ReservationUnit::Iops => (units.ceil() as u64).clamp(1, MAX_VALUE),
        ReservationUnit::Bps => (units / KIB as f64).ceil().clamp(1.0, (MAX_VALUE / KIB) as f64) as u64 * KIB,
    }
}

/// A limit of this rate with a bucket of `size_s` seconds of it; bursts longer than a second run at
/// `steady`.
fn limit_with_burst(rate: f64, size_s: f64, steady: u64, to_valid_rate: impl Fn(f64) -> u64) -> RateLimit {
    let size = rate * size_s;
    let rate = to_valid_rate(rate);
    let fast = steady.max(rate);
    // The length is rounded up and the rate fitted to it, so the bucket is never smaller than
    // needed.
    let burst_length_s = (size / fast as f64).ceil().max(1.0) as u64;
    let burst_rate = to_valid_rate(size / burst_length_s as f64).max(rate);
    if burst_length_s == 1 {
        return RateLimit { rate, burst_rate, ..RateLimit::NONE };
    }
    RateLimit { rate, burst_rate: fast, burst_length_s, ..RateLimit::NONE }
}

fn spread(low: f64, high: f64, count: usize) -> Vec<f64> {
    let step = (high / low).powf(1.0 / (count - 1) as f64);
    (0..count).map(|index| low * step.powi(index as i32)).collect()
}

/// Results of the rates measured so far.
struct MeasuredRates {
    allowed: u64,
    terms: SearchTerms,
    /// The smallest rate known to suffice without a burst, and the largest known to be
    /// insufficient.
    steady: f64,
    below: f64,
    /// Capacity, rate, and bucket size in seconds of the rate; sorted by rate.
    best: Vec<(f64, f64, f64)>,
}

impl MeasuredRates {
    fn add(&mut self, lanes: &[RateHistogram]) {
        for histogram in lanes {
            let rate = histogram.rate();
            if histogram.over <= self.allowed {
                self.steady = self.steady.min(rate);
            } else {
                self.below = self.below.max(rate);
                // A burst lasts at least one second, at no less than the limit's rate.
                let size_s = histogram.size_s(self.allowed, self.terms.wait_s).max(1.0);
                self.best.push((rate * (1.0 + size_s / self.terms.over_s), rate, size_s));
            }
        }
        self.best.sort_by(|one, other| one.1.total_cmp(&other.1));
    }

    fn cheapest(&self) -> Option<&(f64, f64, f64)> {
        self.best.iter().min_by(|one, other| one.0.total_cmp(&other.0))
    }

    /// Rates to measure next: around the smallest one that needs no burst, and around the cheapest.
    fn next(&self) -> Vec<f64> {
        let mut rates = Vec::with_capacity(2 * FINE);
        // Refines the boundary between insufficient and sufficient rates without a burst.
        if self.steady.is_finite() && self.below > 0.0 && self.below < self.steady {
            rates.extend(&spread(self.below, self.steady, FINE + 2)[1..=FINE]);
        }
        if let Some(&(_, best, _)) = self.cheapest() {
            // The cheapest rate lies between its measured neighbours if capacity is unimodal in the
            // rate.
            let place = self.best.iter().position(|point| point.1 == best).unwrap_or(0);
            let low = self.best[place.saturating_sub(1)].1;
            let high = self.best[(place + 1).min(self.best.len() - 1)].1;
            if low < high {
                rates.extend(&spread(low, high, FINE + 2)[1..=FINE]);
            }
        }
        rates
    }
}
