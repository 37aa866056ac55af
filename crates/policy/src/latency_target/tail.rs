//! The outer loop: tests if a target is met, and moves the setpoint of the response time.
//!
//! A member at queue depth 1 completes 200 to 1,000 requests a second, so the 99th percentile of
//! 50 ms is the maximum of 10 to 50 latencies: noise. Late completions, those above the bound, are
//! counted instead. If the percentile is exactly met, their number is binomial with the share that
//! the percentile allows, whatever the distribution of latencies:
//!
//! - *Test*: a CUSUM (Page, "Continuous Inspection Schemes", Biometrika 1954) between the allowed
//!   share and twice that. Each late completion adds 1 to a score, each completion subtracts
//!   1 / ln 2 of the allowed share, and the score is never negative. The target is missed at a
//!   score of 3. Four late completions in a row suffice, as do about 600 completions of which 2 %
//!   are late; with at most the allowed share, the score falls on average.
//! - *Setpoint*: stochastic approximation of a quantile (Robbins and Monro, Annals of Mathematical
//!   Statistics 1951) on a logarithmic scale. A late completion lowers the setpoint by 4 %, and
//!   each completion raises it by the share of that which balances [`AIM`] of the allowed ones.
//!   While not even half the bound is exceeded, it rises faster.
//!
//! Never sees the device; [`adapt`](TailLoop::adapt) receives its response time.

use super::{MemberSample, PercentileTarget};
use crate::histogram::LatencyHistogram;
use crate::request::Direction;

/// Score from which the target is missed, and the largest score: a met target clears it with 400
/// completions at the 99th percentile.
const MISSED: f64 = 3.0;
const MAX_SCORE: f64 = 6.0;
/// Score that a completion subtracts, in allowed shares: the log-likelihood ratio of a share q
/// against 2 q, divided by ln 2.
const DRIFT: f64 = core::f64::consts::LOG2_E;

/// First setpoint, relative to the bound.
const START: f64 = 0.5;
/// Relative change of the setpoint for a late completion, and its maximum in one step.
const GAIN: f64 = 0.04;
const MAX_FALL: f64 = 0.2;
/// Part of the allowed late completions that the setpoint aims at. The rest is for transients, and
/// for the noise of 10-second windows.
const AIM: f64 = 0.3;
/// Relative rise of the setpoint for a completion while half of the bound is met, and its maximum
/// in one step.
const FAST_RISE: f64 = 0.005;
const MAX_RISE: f64 = 0.1;
/// The response time, relative to the setpoint, above which late completions are the fault of the
/// inner loop, which has not settled, and below which the setpoint has no effect.
const UNSETTLED: f64 = 1.5;
const UNUSED: f64 = 0.75;
/// Bounds of the setpoint relative to the target. Members with large requests can have longer
/// response times than the target's.
const SETPOINTS: (f64, f64) = (0.01, 20.0);

/// Test and setpoint of one target.
#[derive(Clone, Debug)]
pub(super) struct TailLoop {
    target: PercentileTarget,
    score: f64,
    setpoint_ns: f64,
    /// In the last step: completions, those above the bound, and those above half of it.
    completions: f64,
    late: f64,
    above_half: f64,
    /// Seconds since the last completion or the last time without requests in flight.
    stalled_s: f64,
    /// Since the test was restarted.
    latencies: LatencyHistogram,
}

impl TailLoop {
    pub(super) fn new(target: PercentileTarget) -> Self {
        Self {
            target,
            score: 0.0,
            setpoint_ns: target.bound_ns() as f64 * START,
            completions: 0.0,
            late: 0.0,
            above_half: 0.0,
            stalled_s: 0.0,
            latencies: LatencyHistogram::new(),
        }
    }

    pub(super) fn target(&self) -> PercentileTarget {
        self.target
    }

    /// Adds the completions of a step to the test.
    pub(super) fn observe(&mut self, sample: &MemberSample<'_>, elapsed_s: f64) {
        (self.completions, self.late, self.above_half) = (0.0, 0.0, 0.0);
        let bound_ns = self.target.bound_ns();
        let covered = |direction: &Direction| self.target.directions().covers(*direction);
        let histograms = sample.latencies.iter().flat_map(|by_direction| {
            Direction::ALL.into_iter().filter(covered).map(|direction| &by_direction[direction.index()])
        });
        for histogram in histograms {
            self.completions += histogram.count() as f64;
            self.late += histogram.count_above(bound_ns);
            self.above_half += histogram.count_above(bound_ns / 2);
            self.latencies.merge(histogram);
        }
        // While requests are in flight and none completes for longer than the bound, each step
        // counts as a late completion: a client at depth 1 submits no others meanwhile.
        let in_flight = Direction::ALL.into_iter().filter(covered).map(|of| sample.in_flight[of.index()]);
        let is_stalled = sample.requests == 0 && in_flight.sum::<u64>() > 0;
        self.stalled_s = if is_stalled { self.stalled_s + elapsed_s } else { 0.0 };
        if self.stalled_s * 1e9 > bound_ns as f64 {
            (self.completions, self.late, self.above_half) = (1.0, 1.0, 1.0);
        }
        let allowed = self.target.late_share() * self.completions;
        self.score = (self.score + self.late - DRIFT * allowed).clamp(0.0, MAX_SCORE);
    }

    pub(super) fn is_missed(&self) -> bool {
        self.score >= MISSED
    }

    /// True if the score is 0: at the 99th percentile, after 400 completions without a late one.
    pub(super) fn is_clearly_met(&self) -> bool {
        self.score <= 0.0
    }

    /// Forgets all completions; the setpoint is kept.
    pub(super) fn restart_test(&mut self) {
        self.score = 0.0;
        self.latencies.clear();
    }

    /// The target's percentile since the test was restarted.
    pub(super) fn percentile_ns(&self) -> u64 {
        self.latencies.percentile_ns(self.target.permyriad())
    }

    /// Mean response time of the device at which the target is met.
    pub(super) fn setpoint_ns(&self) -> f64 {
        self.setpoint_ns
    }

    /// Moves the setpoint after [`TailLoop::observe`]; `response_ns` is the device's response time.
    /// `is_at_minimum` is true if the inner loop cannot shorten it.
    pub(super) fn adapt(&mut self, response_ns: f64, is_at_minimum: bool) {
        let allowed = self.target.late_share() * self.completions;
        let is_settled = response_ns < self.setpoint_ns * UNSETTLED || is_at_minimum;
        let mut change = 0.0;
        if response_ns > self.setpoint_ns * UNUSED && (is_settled || self.late <= allowed) {
            let fast = if self.above_half <= allowed { FAST_RISE * self.completions } else { 0.0 };
            change += (GAIN * AIM * allowed + fast).min(MAX_RISE);
        }
        if is_settled {
            change -= (GAIN * self.late).min(MAX_FALL);
        }
        let (lowest, highest) = SETPOINTS;
        let bound_ns = self.target.bound_ns() as f64;
        self.setpoint_ns = (self.setpoint_ns * (1.0 + change)).clamp(bound_ns * lowest, bound_ns * highest);
    }
}
