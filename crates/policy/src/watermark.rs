//! The watermark: limits that hold only while the device is short.
//!
//! ```text
//!     use of the device
//!      100 % ┬──────────────── saturated: factor falls, the faster the longer it lasts ──► 1: as set
//!       98 % ├─ ─ ─ ─ ─ ─ ─ ─ ─ what the factor is steered to
//!  watermark ├──────────────── from here up: limits × factor
//!      − 5   ├──────────────── below this, and a larger factor changes nothing: lifted
//!        0 % ┴
//! ```
//!
//! A group with a watermark may exceed its limits as long as the device has room (io-throttle v16
//! for Linux, 2009). If it has none, the limits hold again, all multiplied by the largest factor
//! that the device allows. So the groups keep sharing in proportion to their limits, which
//! io-throttle did not achieve. If work without limits takes the device, the factor falls to 1.
//!
//! **The loop.** Use is smoothed over 150 ms, because one large request may fill a sample. The
//! factor is steered in proportion to the difference between use and 98 %, with a damping of 0.7. A
//! saturated device does not show how far the factor is off, so there it falls faster the longer
//! that lasts.
//!
//! If the factor rises and use does not follow, limits are not what holds the groups back: the
//! factor stops at four times, and below the watermark limits are lifted instead. This test keeps
//! one busy group among many from oscillating, because the factor that it needs is far from what
//! all take together. Nor does the factor rise while no group takes what it already allows: a
//! device that stalls would wind it up.
//!
//! Never looks at a device itself: samples come in, an [`Enforcement`] comes out.

mod consumption;

pub use consumption::{Consumed, Taken};

use crate::throttle::{Enforcement, Scale};
use crate::time::Instant;

/// What a device can do, as measured; 0 where that is unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Capacity {
    /// Read operations per second.
    pub read_iops: u64,
    /// Write operations per second.
    pub write_iops: u64,
    /// Bytes read per second.
    pub read_bps: u64,
    /// Bytes written per second.
    pub write_bps: u64,
}

/// What a device did: rates over some short time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Read operations per second.
    pub read_iops: u64,
    /// Write operations per second.
    pub write_iops: u64,
    /// Bytes read per second.
    pub read_bps: u64,
    /// Bytes written per second.
    pub write_bps: u64,
}

impl Capacity {
    /// How much of the device these rates are, in thousandths: the larger of operations and bytes.
    ///
    /// A mix takes the sum of what reads and writes take. `None` if that is unknown for all that
    /// was done. More than 1000 is possible: a device is at times faster than when it was measured.
    pub fn use_of(&self, rates: Rates) -> Option<u64> {
        let operations = part(rates.read_iops, self.read_iops, rates.write_iops, self.write_iops);
        let bytes = part(rates.read_bps, self.read_bps, rates.write_bps, self.write_bps);
        operations.max(bytes)
    }

    /// What can be promised, in operations and bytes per second: the slower of reading and writing.
    /// 0 where one of them is unknown.
    pub fn reservable(&self) -> [u64; 2] {
        [self.read_iops.min(self.write_iops), self.read_bps.min(self.write_bps)]
    }
}

fn part(read: u64, of_read: u64, write: u64, of_write: u64) -> Option<u64> {
    let one = |rate: u64, capacity: u64| {
        (capacity > 0)
            .then(|| u64::try_from(u128::from(rate) * 1000 / u128::from(capacity)).unwrap_or(u64::MAX))
    };
    match (one(read, of_read), one(write, of_write)) {
        (None, None) => None,
        (read, write) => Some(read.unwrap_or(0).saturating_add(write.unwrap_or(0))),
    }
}

/// Percent of a device in use from which on a group's limits hold; 0 is always.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Watermark(u8);

impl Watermark {
    /// Limits hold whatever the device does.
    pub const ALWAYS: Self = Self(0);

    /// A watermark of so many percent, or `None` above 100.
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

    /// From which use on limits hold. No device is ever measured at quite 100 %.
    fn upper(self) -> f64 {
        (f64::from(self.0) / 100.0).min(TARGET)
    }

    /// Below which use they no longer do.
    fn lower(self) -> f64 {
        self.upper() - HYSTERESIS
    }
}

/// What was seen of a device since the last sample.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sample {
    /// How much of the device was in use, in thousandths ([`Capacity::use_of`], or its busy time).
    pub used: u64,
    /// How many times their limits all groups took together, in thousandths
    /// ([`Consumed::together`]).
    pub together: u64,
    /// The same of the group that took most of its own ([`Consumed::most`]).
    pub most: u64,
}

impl Sample {
    /// A sample of a device in use by `used` thousandths, by those who took this.
    pub fn new(used: u64, consumed: &Consumed) -> Self {
        Self { used, together: consumed.together(), most: consumed.most() }
    }
}

/// What use is steered to while limits hold; at saturation the device would share, not the limits.
const TARGET: f64 = 0.98;
const SATURATED: f64 = 0.99;
const HYSTERESIS: f64 = 0.05;
const SMOOTHING_S: f64 = 0.15;
/// Part of the relative error that the factor moves by a second; damps by 0.7.
const GAIN: f64 = 1.0 / (2.0 * SMOOTHING_S);
/// How fast the factor falls on a saturated device, by second, and how much faster each second.
const FALL: f64 = 0.07;
const FALL_FASTER: f64 = 4.0;
const FALL_FASTEST: f64 = 2.5;
/// A factor that has risen so many times without use rising is not what holds anybody back.
const UNANSWERED: f64 = 4.0;
/// Use has risen if it has by this factor, and by so much of the device.
const ANSWER: f64 = 1.1;
const LEAST_ANSWER: f64 = 0.02;
/// A factor so many times above what the greediest group took lately holds nobody.
const UNBOUND: f64 = 1.25;
const LATELY_S: f64 = 2.0;
/// Samples further apart than this, in seconds, say nothing of what was between them.
const STALE_S: f64 = 1.0;

/// Decides how the limits of all groups with a watermark on one device are enforced.
///
/// Call [`observe`](Controller::observe) about every 50 ms, and then
/// [`enforcement`](Controller::enforcement) for every watermark on the device: others are
/// forgotten.
#[derive(Clone, Debug)]
pub struct Controller {
    last: Option<Instant>,
    /// Smoothed, 1 being all of the device.
    used: f64,
    /// Smoothed, 1 being the limits: what all took together, and who took most of its own.
    together: f64,
    most: f64,
    /// The largest of the latter for a while.
    most_lately: f64,
    /// By watermark: asked for since the last sample.
    asked: u128,
    /// By watermark: limits hold.
    holding: u128,
    factor: f64,
    /// Factor and use when use last answered to the factor.
    answered: (f64, f64),
    /// Seconds for which smoothed use, and for which every sample, has been saturated.
    saturated_s: f64,
    full_s: f64,
}

impl Default for Controller {
    fn default() -> Self {
        Self::new()
    }
}

impl Controller {
    /// A controller that has seen nothing, and lifts.
    pub const fn new() -> Self {
        Self {
            last: None,
            used: 0.0,
            together: 0.0,
            most: 0.0,
            most_lately: 0.0,
            asked: 0,
            holding: 0,
            factor: 1.0,
            answered: (1.0, 0.0),
            saturated_s: 0.0,
            full_s: 0.0,
        }
    }

    /// How limits with this watermark are to be enforced, by what has been observed.
    pub fn enforcement(&mut self, watermark: Watermark) -> Enforcement {
        self.asked |= watermark.bit();
        if watermark == Watermark::ALWAYS {
            Enforcement::Enforced
        } else if self.holding & watermark.bit() == 0 {
            Enforcement::Lifted
        } else {
            match Scale::from_thousandths((self.factor * 1000.0) as u64) {
                Scale::ONE => Enforcement::Enforced,
                scale => Enforcement::Scaled(scale),
            }
        }
    }

    /// Use of the device in thousandths, smoothed.
    pub fn used(&self) -> u64 {
        (self.used * 1000.0) as u64
    }

    /// Takes in what was seen up to `now`.
    pub fn observe(&mut self, now: Instant, sample: Sample) {
        let elapsed_s = self.last.map_or(STALE_S, |last| now.nanos_since(last) as f64 / 1e9);
        self.last = Some(now);
        if elapsed_s >= STALE_S {
            // One sample alone proves no use.
            (self.used, self.together, self.most, self.most_lately) = (0.0, 0.0, 0.0, 0.0);
            (self.saturated_s, self.full_s) = (0.0, 0.0);
        }
        let elapsed_s = elapsed_s.min(SMOOTHING_S);
        let fresh = elapsed_s / (SMOOTHING_S + elapsed_s);
        self.used += (in_ones(sample.used) - self.used) * fresh;
        self.together += (in_ones(sample.together) - self.together) * fresh;
        self.most += (in_ones(sample.most) - self.most) * fresh;
        self.full_s = if in_ones(sample.used) >= SATURATED { self.full_s + elapsed_s } else { 0.0 };
        self.most_lately = self.most.max(self.most_lately * (1.0 - elapsed_s / LATELY_S));
        let held = self.holding != 0;
        if held {
            self.steer(elapsed_s);
        }
        self.judge();
        if self.holding != 0 && !held {
            self.factor = self.together.clamp(1.0, largest());
            self.answered = (self.factor, self.used);
            self.saturated_s = 0.0;
        }
    }

    fn steer(&mut self, elapsed_s: f64) {
        let is_saturated = self.used >= SATURATED;
        let change = if is_saturated {
            self.saturated_s += elapsed_s;
            let fall = (FALL + FALL_FASTER * self.saturated_s).min(FALL_FASTEST);
            // With requests in lumps (writeback), use is at times far above what the device can do,
            // and nothing in between, which makes the factor rise: it must fall by as much.
            -fall.max(GAIN * (self.used - TARGET) / TARGET)
        } else {
            self.saturated_s = 0.0;
            GAIN * (TARGET - self.used) / TARGET
        };
        let (factor_then, used_then) = self.answered;
        let rose = self.used >= used_then * ANSWER + LEAST_ANSWER;
        // Use that falls has not answered either, but demand has changed.
        let fell = self.used <= used_then / ANSWER - LEAST_ANSWER;
        if change <= 0.0 || rose || fell {
            self.answered = (self.factor, self.used);
        } else if self.factor >= factor_then * UNANSWERED {
            return;
        }
        let is_full = is_saturated || self.full_s >= SMOOTHING_S;
        // A larger one would hold back nobody less, and a device that is full needs none.
        if change <= 0.0 || !(self.is_unbound() || is_full) {
            self.factor *= 1.0 + change * elapsed_s;
        }
        if is_full {
            self.factor = self.factor.min(self.most_lately * UNBOUND);
        }
        self.factor = self.factor.clamp(1.0, largest());
    }

    fn is_unbound(&self) -> bool {
        self.factor > self.most_lately * UNBOUND
    }

    fn judge(&mut self) {
        let unanswered = self.is_unbound() || self.factor >= (self.answered.0 * UNANSWERED).min(largest());
        let holds = |watermark: &Watermark| {
            let held = self.holding & watermark.bit() != 0;
            self.used >= watermark.upper() || held && (self.used >= watermark.lower() || !unanswered)
        };
        let asked = (1..=100).map(Watermark).filter(|watermark| self.asked & watermark.bit() != 0);
        self.holding = asked.filter(holds).fold(0, |holding, watermark| holding | watermark.bit());
        self.asked = 0;
    }
}

fn in_ones(thousandths: u64) -> f64 {
    thousandths as f64 / 1000.0
}

fn largest() -> f64 {
    Scale::MAX.thousandths() as f64 / 1000.0
}
