//! Random choices that the simulations of exports share; all come from the simulation's seed.

use policy::{
    throttle::{LimitKind, Limits, RateLimit},
    time::Duration,
};
use reactor::{now, sim, sleep_until};

pub(crate) fn chance(percent: u32) -> bool {
    sim::random(|random| random.u32(..100)) < percent
}

/// Sleeps for a random time up to a maximum, distributed evenly over its logarithm.
pub(crate) async fn sleep_randomly(max_duration: Duration) {
    let share = sim::random(|random| 10_f64.powf(-4.0 * random.f64()));
    sleep_until(now() + Duration::from_nanos((max_duration.as_nanos() as f64 * share) as u64)).await;
}

/// Random limits: on requests with a chance of `iops_chance` per cent, on bytes in 30 per cent of
/// cases.
pub(crate) fn limits(iops_chance: u32) -> Limits {
    let mut limits = Limits::default();
    let mut draw = |kind: LimitKind, min_rate: f64| {
        *limits.limit_mut(kind) = sim::random(|random| {
            let rate = (min_rate * 10_f64.powf(2.0 * random.f64())) as u64;
            // Half of the limits have no burst rate.
            let burst_rate = if random.bool() { 0 } else { rate * random.u64(1..5) };
            RateLimit { rate, burst_rate, burst_length_s: 1, ..RateLimit::NONE }
        });
    };
    if chance(iops_chance) {
        draw(LimitKind::IopsTotal, 100.0);
    }
    if chance(30) {
        draw(LimitKind::BpsTotal, 200_000.0);
    }
    limits
}
