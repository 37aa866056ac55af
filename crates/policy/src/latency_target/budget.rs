//! The inner loop: the rate of all controlled members together, which keeps the device's mean
//! response time at a setpoint.
//!
//! The response time is the number of requests in flight divided by the completion rate (Little's
//! law). Rate limits cannot keep it constant by themselves: one percent above the capacity, it
//! grows by 10 ms each second. Therefore the budget is the measured completion rate, which on a
//! busy device is its capacity, plus the correction that brings the response time to the setpoint
//! within [`CORRECTION_S`]:
//!
//! ```text
//!   budget = completion rate of controlled members
//!          + completion rate of all · (setpoint − response time) / CORRECTION_S
//! ```
//!
//! Admitting as much as completes keeps the number in flight, like the window of PARDA, and follows
//! a device that becomes slower or faster within a step. A response time that is too long only
//! lowers the budget, one that is too short only raises it: otherwise the noise of a step's
//! completions, or a member that pauses, would move it.
//!
//! Never uses a capacity from outside.

use super::MemberSample;

/// Time in which an error of the response time is corrected, in seconds, and its minimum in steps.
/// Shorter times overcorrect, because a step measures the effect of the one before.
const CORRECTION_S: f64 = 0.08;
const CORRECTION_STEPS: f64 = 1.5;
/// Relative correction for a relative error of 1: for setpoints that are short in relation to
/// [`CORRECTION_S`].
const RELATIVE_GAIN: f64 = 0.02;
/// While the response time is below half of the setpoint or above twice, the relative correction
/// grows by this factor in each step: the distance to the right budget is unknown.
const ACCELERATION: f64 = 1.3;
const MAX_ACCELERATION: f64 = MAX_FALL / RELATIVE_GAIN;
/// Bounds of a correction, relative to the completion rate.
const MAX_RISE: f64 = 0.3;
const MAX_FALL: f64 = 0.5;
/// Completions from which one step measures the rate; fewer are averaged over several steps.
const MIN_COMPLETIONS: f64 = 50.0;

/// Throughput and queue of the device in a step.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResponseSample {
    pub(super) elapsed_s: f64,
    requests: f64,
    in_flight: f64,
    /// Units per second: of all members, and of the controlled ones.
    total_rate: f64,
    controlled_rate: f64,
    /// True if a controlled member waits for its cap.
    pub(super) is_waiting: bool,
}

impl ResponseSample {
    pub(super) fn new(
        samples: &[MemberSample<'_>],
        controlled: &[&MemberSample<'_>],
        elapsed_s: f64,
    ) -> Self {
        Self {
            elapsed_s,
            requests: samples.iter().map(|sample| sample.requests).sum::<u64>() as f64,
            // The number now is fresher than the mean. If it is lower, the mean decides, because an
            // instant without requests would raise the budget.
            in_flight: (samples.iter().flat_map(|sample| sample.in_flight).sum::<u64>() as f64)
                .max(samples.iter().map(|sample| sample.mean_in_flight).sum()),
            total_rate: samples.iter().map(MemberSample::units).sum::<f64>() / elapsed_s,
            controlled_rate: controlled.iter().map(|sample| sample.units()).sum::<f64>() / elapsed_s,
            is_waiting: controlled.iter().any(|sample| sample.is_waiting),
        }
    }
}

/// Bounds of a budget in units per second; the minimum has priority.
#[derive(Clone, Copy, Debug)]
pub(super) struct RateBounds {
    pub(super) minimum: f64,
    pub(super) maximum: f64,
}

/// Budget of the controlled members.
#[derive(Clone, Debug)]
pub(super) struct BudgetLoop {
    rate: f64,
    acceleration: f64,
    response_ns: f64,
    /// Averages over [`MIN_COMPLETIONS`].
    requests_per_s: f64,
    total_rate: f64,
    controlled_rate: f64,
}

impl BudgetLoop {
    /// A loop that starts with the present rate.
    pub(super) fn new(sample: &ResponseSample) -> Self {
        Self {
            rate: sample.controlled_rate,
            acceleration: 1.0,
            response_ns: 0.0,
            requests_per_s: sample.requests / sample.elapsed_s,
            total_rate: sample.total_rate,
            controlled_rate: sample.controlled_rate,
        }
    }

    /// Adds a step and returns the device's mean response time.
    pub(super) fn observe(&mut self, sample: &ResponseSample) -> f64 {
        let smoothing = (sample.requests / MIN_COMPLETIONS).clamp(0.1, 1.0);
        let mean = |mean: &mut f64, value: f64| *mean += (value - *mean) * smoothing;
        mean(&mut self.requests_per_s, sample.requests / sample.elapsed_s);
        mean(&mut self.total_rate, sample.total_rate);
        mean(&mut self.controlled_rate, sample.controlled_rate);
        // Without completions, the response time is at least the step.
        self.response_ns = sample.in_flight / self.requests_per_s.max(1.0 / sample.elapsed_s) * 1e9;
        self.response_ns
    }

    /// Rate of the controlled members in units per second, within `bounds`.
    pub(super) fn decide(&mut self, sample: &ResponseSample, setpoint_ns: f64, bounds: RateBounds) -> f64 {
        let correction_s = CORRECTION_S.max(CORRECTION_STEPS * sample.elapsed_s);
        let error_s = (setpoint_ns - self.response_ns) / 1e9;
        let relative_error = (setpoint_ns - self.response_ns) / setpoint_ns.max(self.response_ns);
        let is_far = relative_error < -0.5 || (relative_error > 0.5 && sample.is_waiting);
        self.acceleration =
            if is_far { (self.acceleration * ACCELERATION).min(MAX_ACCELERATION) } else { 1.0 };
        let relative = RELATIVE_GAIN * relative_error * self.acceleration;
        if error_s < 0.0 {
            let fall = (error_s / correction_s).min(relative).max(-MAX_FALL);
            self.rate = self.rate.min(self.controlled_rate + self.total_rate * fall);
        } else if sample.is_waiting {
            let rise = (error_s / correction_s).max(relative).min(MAX_RISE);
            self.rate = self.rate.max(self.controlled_rate) + self.total_rate * rise;
        }
        // Otherwise no member would use a larger budget.
        self.rate = self.rate.min(bounds.maximum).max(bounds.minimum);
        self.rate
    }
}
