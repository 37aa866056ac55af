//! The watermark: enforces limits only while the device is busy.
//!
//! ```text
//!     utilization
//!      100 % ┬──────────────── saturated: factor falls, ever faster ─────────────────► 1: as set
//!       98 % ├─ ─ ─ ─ ─ ─ ─ ─ ─ target of the control loop
//!  watermark ├──────────────── from here: limits × factor
//!      − 5   ├──────────────── below this, if a larger factor has no effect: lifted
//!        0 % ┴
//! ```
//!
//! A group with a watermark may exceed its limits while the device has spare capacity (io-throttle
//! v16 for Linux, 2009). If it has none, the limits apply again, all multiplied by the largest
//! factor that the device allows. The groups therefore keep sharing in proportion to their limits,
//! which io-throttle did not achieve. If unlimited work saturates the device, the factor falls to
//! 1.
//!
//! **The loop.** Utilization is smoothed over 150 ms, because one large request may fill a sample.
//! The factor changes in proportion to the difference between utilization and 98 %, with a damping
//! of 0.7. Saturation hides the size of the error, so on a saturated device the factor falls faster
//! the longer that lasts.
//!
//! If the factor rises and utilization does not follow, the groups are not throttled by the limits:
//! the factor stops at four times, and below the watermark the limits are lifted instead. Without
//! this test one busy group among many would oscillate, because the factor that it needs is far
//! from the ratio of all groups together. Nor does the factor rise while no group reaches the
//! limits that it already allows: a stalled device would wind it up.
//!
//! Never measures a device itself: samples are the input, an [`Enforcement`] is the output.

mod consumption;

pub use consumption::{DeviceConsumption, GroupConsumption};

use crate::throttle::{Enforcement, LimitScale};
use crate::time::Instant;

/// Measured capacity of a device; 0 where unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MeasuredCapacity {
    /// Read operations per second.
    pub read_iops: u64,
    /// Write operations per second.
    pub write_iops: u64,
    /// Bytes read per second.
    pub read_bps: u64,
    /// Bytes written per second.
    pub write_bps: u64,
}

/// Measured rates of a device, averaged over a short time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceLoad {
    /// Read operations per second.
    pub read_iops: u64,
    /// Write operations per second.
    pub write_iops: u64,
    /// Bytes read per second.
    pub read_bps: u64,
    /// Bytes written per second.
    pub write_bps: u64,
}

impl MeasuredCapacity {
    /// Utilization at these rates, in thousandths: the larger of operations and bytes.
    ///
    /// For a mix, the utilizations of reads and writes are added. `None` if no capacity is known.
    /// May exceed 1000: a device can be faster than when it was measured.
    pub fn utilization(&self, rates: DeviceLoad) -> Option<u64> {
        let operations =
            combined_utilization(rates.read_iops, self.read_iops, rates.write_iops, self.write_iops);
        let bytes = combined_utilization(rates.read_bps, self.read_bps, rates.write_bps, self.write_bps);
        operations.max(bytes)
    }

    /// Rates that can be reserved, in operations and bytes per second: the smaller of reading and
    /// writing; 0 if either is unknown.
    pub fn reservable(&self) -> [u64; 2] {
        [self.read_iops.min(self.write_iops), self.read_bps.min(self.write_bps)]
    }
}

fn combined_utilization(read: u64, read_capacity: u64, write: u64, write_capacity: u64) -> Option<u64> {
    let utilization = |rate: u64, capacity: u64| {
        (capacity > 0)
            .then(|| u64::try_from(u128::from(rate) * 1000 / u128::from(capacity)).unwrap_or(u64::MAX))
    };
    match (utilization(read, read_capacity), utilization(write, write_capacity)) {
        (None, None) => None,
        (read, write) => Some(read.unwrap_or(0).saturating_add(write.unwrap_or(0))),
    }
}

/// Utilization in percent from which a group's limits apply; 0 means always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Watermark(u8);

impl Watermark {
    /// Limits always apply.
    pub const ALWAYS: Self = Self(0);

    /// A watermark in percent; `None` above 100.
    pub fn new(percent: u8) -> Option<Self> {
        (percent <= 100).then_some(Self(percent))
    }

    /// The percentage.
    pub const fn percent(self) -> u8 {
        self.0
    }

    const fn bit(self) -> u128 {
        1 << self.0
    }

    /// Utilization from which limits apply. At most the target, because measured utilization hardly
    /// reaches 100 %.
    fn upper(self) -> f64 {
        (f64::from(self.0) / 100.0).min(TARGET)
    }

    /// Utilization below which limits may be lifted again.
    fn lower(self) -> f64 {
        self.upper() - HYSTERESIS
    }
}

/// Measurements of a device since the last sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UtilizationSample {
    /// Utilization in thousandths ([`MeasuredCapacity::utilization`], or the busy time of the
    /// device).
    pub utilization: u64,
    /// Consumption of all groups as a multiple of their limits, in thousandths
    /// ([`DeviceConsumption::combined_multiple`]).
    pub combined_multiple: u64,
    /// Consumption of the group with the largest multiple ([`DeviceConsumption::max_multiple`]).
    pub max_multiple: u64,
}

impl UtilizationSample {
    /// A sample with utilization `used`, in thousandths, and the groups' consumption.
    pub fn new(used: u64, consumed: &DeviceConsumption) -> Self {
        Self {
            utilization: used,
            combined_multiple: consumed.combined_multiple(),
            max_multiple: consumed.max_multiple(),
        }
    }
}

/// Target utilization while limits apply. At saturation the device would decide the shares, not the
/// limits.
const TARGET: f64 = 0.98;
const SATURATED: f64 = 0.99;
const HYSTERESIS: f64 = 0.05;
const SMOOTHING_S: f64 = 0.15;
/// Relative change of the factor per second, for each unit of relative error of utilization. With
/// `SMOOTHING_S` this gives a damping ratio of 0.7.
const GAIN: f64 = 1.0 / (2.0 * SMOOTHING_S);
/// Rate at which the factor falls on a saturated device, per second; growth of that rate per
/// second; its maximum.
const FALL_RATE: f64 = 0.07;
const FALL_ACCELERATION: f64 = 4.0;
const MAX_FALL_RATE: f64 = 2.5;
/// If the factor has risen to this multiple since utilization last responded, the limits throttle
/// no group.
const UNRESPONSIVE_FACTOR: f64 = 4.0;
/// Utilization has responded if it rose by this factor and by this share of the device.
const RESPONSE_FACTOR: f64 = 1.1;
const MIN_RESPONSE: f64 = 0.02;
/// A factor of this many times the recent multiple of the greediest group throttles no group.
const SLACK_FACTOR: f64 = 1.25;
const RECENT_S: f64 = 2.0;
/// Time between samples, in seconds, above which the earlier one is discarded.
const STALE_S: f64 = 1.0;

/// Decides how the limits of all groups with a watermark on one device are enforced.
///
/// Call [`observe`](WatermarkController::observe) about every 50 ms, then
/// [`enforcement`](WatermarkController::enforcement) for every watermark in use on the device; the
/// state of all others is dropped.
#[derive(Clone, Debug)]
pub struct WatermarkController {
    last: Option<Instant>,
    /// Smoothed utilization; 1 is the whole device.
    utilization: f64,
    /// Smoothed multiples of the limits: of all groups together, and of the greediest.
    combined_multiple: f64,
    max_multiple: f64,
    /// Decaying maximum of `max_multiple`.
    recent_max_multiple: f64,
    /// Watermarks requested since the last sample, one bit for each percentage.
    requested: u128,
    /// Watermarks whose limits apply, one bit for each percentage.
    enforced: u128,
    factor: f64,
    /// Factor and utilization when utilization last responded to the factor.
    last_response: (f64, f64),
    /// Seconds for which smoothed utilization, and every single sample, has been saturated.
    saturated_s: f64,
    full_s: f64,
}

impl Default for WatermarkController {
    fn default() -> Self {
        Self::new()
    }
}

impl WatermarkController {
    /// A controller without samples; limits are lifted.
    pub const fn new() -> Self {
        Self {
            last: None,
            utilization: 0.0,
            combined_multiple: 0.0,
            max_multiple: 0.0,
            recent_max_multiple: 0.0,
            requested: 0,
            enforced: 0,
            factor: 1.0,
            last_response: (1.0, 0.0),
            saturated_s: 0.0,
            full_s: 0.0,
        }
    }

    /// Current enforcement of limits with this watermark.
    pub fn enforcement(&mut self, watermark: Watermark) -> Enforcement {
        self.requested |= watermark.bit();
        if watermark == Watermark::ALWAYS {
            Enforcement::Enforced
        } else if self.enforced & watermark.bit() == 0 {
            Enforcement::Lifted
        } else {
            match LimitScale::from_thousandths((self.factor * 1000.0) as u64) {
                LimitScale::ONE => Enforcement::Enforced,
                scale => Enforcement::Scaled(scale),
            }
        }
    }

    /// Smoothed utilization in thousandths.
    pub fn utilization(&self) -> u64 {
        (self.utilization * 1000.0) as u64
    }

    /// Adds a sample taken at `now`.
    pub fn observe(&mut self, now: Instant, sample: UtilizationSample) {
        let elapsed_s = self.last.map_or(STALE_S, |last| now.nanos_since(last) as f64 / 1e9);
        self.last = Some(now);
        if elapsed_s >= STALE_S {
            // Start at zero: a single sample must not count as sustained utilization.
            (self.utilization, self.combined_multiple, self.max_multiple, self.recent_max_multiple) =
                (0.0, 0.0, 0.0, 0.0);
            (self.saturated_s, self.full_s) = (0.0, 0.0);
        }
        let elapsed_s = elapsed_s.min(SMOOTHING_S);
        let smoothing = elapsed_s / (SMOOTHING_S + elapsed_s);
        // First-order low-pass filters with a common time constant.
        self.utilization += (as_fraction(sample.utilization) - self.utilization) * smoothing;
        self.combined_multiple +=
            (as_fraction(sample.combined_multiple) - self.combined_multiple) * smoothing;
        self.max_multiple += (as_fraction(sample.max_multiple) - self.max_multiple) * smoothing;
        self.full_s =
            if as_fraction(sample.utilization) >= SATURATED { self.full_s + elapsed_s } else { 0.0 };
        self.recent_max_multiple =
            self.max_multiple.max(self.recent_max_multiple * (1.0 - elapsed_s / RECENT_S));
        let was_enforced = self.enforced != 0;
        if was_enforced {
            self.adjust_factor(elapsed_s);
        }
        self.update_enforced();
        if self.enforced != 0 && !was_enforced {
            // Start at the current multiple of the limits, so that enforcement changes no rate
            // abruptly.
            self.factor = self.combined_multiple.clamp(1.0, max_factor());
            self.last_response = (self.factor, self.utilization);
            self.saturated_s = 0.0;
        }
    }

    fn adjust_factor(&mut self, elapsed_s: f64) {
        let is_saturated = self.utilization >= SATURATED;
        let change = if is_saturated {
            self.saturated_s += elapsed_s;
            let fall = (FALL_RATE + FALL_ACCELERATION * self.saturated_s).min(MAX_FALL_RATE);
            // Bursty requests (writeback) produce samples far above the capacity with zeros between
            // them. The zeros raise the factor, so it must fall by as much.
            -fall.max(GAIN * (self.utilization - TARGET) / TARGET)
        } else {
            self.saturated_s = 0.0;
            GAIN * (TARGET - self.utilization) / TARGET
        };
        let (last_factor, last_utilization) = self.last_response;
        let rose = self.utilization >= last_utilization * RESPONSE_FACTOR + MIN_RESPONSE;
        // A fall of utilization is not a response to the factor either, but demand has changed.
        let fell = self.utilization <= last_utilization / RESPONSE_FACTOR - MIN_RESPONSE;
        if change <= 0.0 || rose || fell {
            self.last_response = (self.factor, self.utilization);
        } else if self.factor >= last_factor * UNRESPONSIVE_FACTOR {
            return;
        }
        let is_full = is_saturated || self.full_s >= SMOOTHING_S;
        // No increase on a full device, nor if a larger factor would admit nothing more.
        if change <= 0.0 || !(self.throttles_no_group() || is_full) {
            self.factor *= 1.0 + change * elapsed_s;
        }
        if is_full {
            // On a full device the factor is capped at the recent use, so that limits throttle at
            // once.
            self.factor = self.factor.min(self.recent_max_multiple * SLACK_FACTOR);
        }
        self.factor = self.factor.clamp(1.0, max_factor());
    }

    fn throttles_no_group(&self) -> bool {
        self.factor > self.recent_max_multiple * SLACK_FACTOR
    }

    fn update_enforced(&mut self) {
        let is_unresponsive = self.throttles_no_group()
            || self.factor >= (self.last_response.0 * UNRESPONSIVE_FACTOR).min(max_factor());
        let applies = |watermark: &Watermark| {
            let is_enforced = self.enforced & watermark.bit() != 0;
            self.utilization >= watermark.upper()
                || is_enforced && (self.utilization >= watermark.lower() || !is_unresponsive)
        };
        // Only watermarks in use are kept; `ALWAYS` (0) needs no state.
        let in_use = (1..=100).map(Watermark).filter(|watermark| self.requested & watermark.bit() != 0);
        self.enforced = in_use.filter(applies).fold(0, |holding, watermark| holding | watermark.bit());
        self.requested = 0;
    }
}

fn as_fraction(thousandths: u64) -> f64 {
    thousandths as f64 / 1000.0
}

fn max_factor() -> f64 {
    LimitScale::MAX.thousandths() as f64 / 1000.0
}
