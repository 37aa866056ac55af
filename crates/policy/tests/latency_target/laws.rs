//! Other control laws, for comparison: decision 72 has the results.
//!
//! The windows of [`QueueDepthLaw`] and [`WindowLaw`] are enforced exactly: a completion starts the
//! next request. weir's throttle tree cannot do that, so these two are better here than they would
//! be with rates.

use policy::request::Direction;

use crate::device::{Allowance, MS, Sample};
use crate::scenario::{BOUND_NS, Law, shared_rate};

/// Queue depth as in Linux's block/blk-iolatency.c: halved when a window of 100 ms is missed,
/// raised by a sixteenth of the largest depth otherwise, at most every 500 ms. The kernel's window
/// is missed if a tenth of its requests are late, on a rotating device if their mean is.
/// `late_share` replaces the tenth.
pub(crate) struct QueueDepthLaw {
    pub(crate) late_share: f64,
    depth: u32,
    changed_ns: u64,
}

impl QueueDepthLaw {
    const MAX_DEPTH: u32 = 128;

    pub(crate) fn new(late_share: f64) -> Self {
        Self { late_share, depth: Self::MAX_DEPTH, changed_ns: 0 }
    }
}

impl Law for QueueDepthLaw {
    fn interval_ns(&self) -> u64 {
        100 * MS
    }

    fn step(&mut self, now_ns: u64, samples: &[Sample]) -> Vec<Allowance> {
        let (late, completions) = late_of(&samples[0]);
        if completions > 0.0 && now_ns - self.changed_ns >= 500 * MS {
            let is_missed = late >= (completions * self.late_share).max(1.0);
            self.depth = if is_missed { self.depth / 2 } else { self.depth + Self::MAX_DEPTH / 16 };
            self.depth = self.depth.clamp(1, Self::MAX_DEPTH);
            self.changed_ns = now_ns;
        }
        windows(self.depth, samples.len())
    }
}

/// Window as in PARDA (Gulati, Ahmad, Waldspurger, FAST 2009): each member's window becomes
/// (1 − γ) w + γ (L / Lavg · w + β), where Lavg is the smoothed mean latency. The threshold L is a
/// mean, so it is set to a part of the target.
pub(crate) struct WindowLaw {
    pub(crate) threshold_ns: f64,
    window: f64,
    mean_ns: f64,
}

impl WindowLaw {
    const GAMMA: f64 = 0.2;
    const BETA: f64 = 1.0;
    const SMOOTHING: f64 = 0.3;

    pub(crate) fn new(threshold_ns: f64) -> Self {
        Self { threshold_ns, window: 64.0, mean_ns: 0.0 }
    }
}

impl Law for WindowLaw {
    fn step(&mut self, _: u64, samples: &[Sample]) -> Vec<Allowance> {
        let in_flight: u32 = samples.iter().map(|sample| sample.in_flight).sum();
        let requests: u64 = samples.iter().map(|sample| sample.requests).sum();
        if requests > 0 {
            let mean_ns = f64::from(in_flight) * self.interval_ns() as f64 / requests as f64;
            self.mean_ns += (mean_ns - self.mean_ns) * Self::SMOOTHING;
            let aimed = self.threshold_ns / self.mean_ns.max(1.0) * self.window + Self::BETA;
            self.window = ((1.0 - Self::GAMMA) * self.window + Self::GAMMA * aimed).clamp(1.0, 64.0);
        }
        windows(self.window as u32, samples.len())
    }
}

/// Additive increase and multiplicative decrease of the admitted rate, at most every 100 ms:
/// reduced by `decrease` if the target was missed, raised by `increase` of the largest rate so far
/// otherwise.
pub(crate) struct AimdLaw {
    pub(crate) increase: f64,
    pub(crate) decrease: f64,
    rate: f64,
    max_rate: f64,
}

impl AimdLaw {
    pub(crate) fn new(increase: f64, decrease: f64) -> Self {
        Self { increase, decrease, rate: 1e6, max_rate: 0.0 }
    }
}

impl Law for AimdLaw {
    fn interval_ns(&self) -> u64 {
        100 * MS
    }

    fn step(&mut self, _: u64, samples: &[Sample]) -> Vec<Allowance> {
        let (late, completions) = late_of(&samples[0]);
        let others: u64 = samples[1..].iter().map(|sample| sample.requests).sum();
        let rate = others as f64 * 1e9 / self.interval_ns() as f64;
        self.max_rate = self.max_rate.max(rate);
        if late > 0.01 * completions && late >= 1.0 {
            self.rate = (self.rate.min(self.max_rate) * (1.0 - self.decrease)).max(self.max_rate / 100.0);
        } else {
            self.rate += self.increase * self.max_rate;
        }
        shared_rate(self.rate, samples.len())
    }
}

/// A proportional-integral controller of the logarithm of the rate. Its error is the logarithm of
/// the setpoint over the device's mean response time.
pub(crate) struct LogarithmicLaw {
    pub(crate) setpoint_ns: f64,
    pub(crate) proportional: f64,
    pub(crate) integral_per_s: f64,
    rate: f64,
    error: f64,
}

impl LogarithmicLaw {
    pub(crate) fn new(setpoint_ns: f64, proportional: f64, integral_per_s: f64) -> Self {
        Self { setpoint_ns, proportional, integral_per_s, rate: 20_000.0, error: 0.0 }
    }
}

impl Law for LogarithmicLaw {
    fn step(&mut self, _: u64, samples: &[Sample]) -> Vec<Allowance> {
        let in_flight: u32 = samples.iter().map(|sample| sample.in_flight).sum();
        let requests: u64 = samples.iter().map(|sample| sample.requests).sum();
        let interval_s = self.interval_ns() as f64 / 1e9;
        let response_ns = f64::from(in_flight.max(1)) / requests.max(1) as f64 * interval_s * 1e9;
        let error = (self.setpoint_ns / response_ns).ln().clamp(-2.0, 1.0);
        let change = self.proportional * (error - self.error) + self.integral_per_s * interval_s * error;
        self.error = error;
        self.rate = (self.rate * change.exp()).clamp(70.0, 20_000.0);
        shared_rate(self.rate, samples.len())
    }
}

fn late_of(sample: &Sample) -> (f64, f64) {
    let reads = &sample.latencies[Direction::Read.index()];
    (reads.count_above(BOUND_NS), reads.count() as f64)
}

fn windows(window: u32, clients: usize) -> Vec<Allowance> {
    let limited = Allowance { window: Some(window), ..Allowance::default() };
    (0..clients).map(|client| if client == 0 { Allowance::default() } else { limited }).collect()
}
