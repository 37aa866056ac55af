//! One second of a disk or a group, packed into nine bytes.
//!
//! | | bits | steps |
//! | --- | --- | --- |
//! | operations and bytes per second, read and written | 9 each | 2 and 4 % |
//! | latency, median and 99th percentile | 7 each | 18 %, as in histograms |
//! | waiting requests | 6 | 25 % |
//! | ratios: waits, bucket, read-ahead, cache | 4 each | finest near 0 and 1 |
//!
//! Numbers are stored as logarithms, so that the error is relative: at most half a step. Unknown
//! differs from 0.

use std::array;

use block::measures::ROUND_BOUNDS_NS;
use serde_json::Number;

/// Values of one second; `None` if unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct ActivitySample {
    /// Operations read and written, then bytes read and written, per second.
    pub(super) rates: [Option<f64>; 4],
    /// Median and 99th percentile, in nanoseconds.
    pub(super) latency_ns: [Option<f64>; 2],
    pub(super) waiting: Option<f64>,
    /// Share of time throttled, bucket level, hits of read-ahead and of the L2 cache.
    pub(super) ratios: [Option<f64>; 4],
}

/// Number of latency buckets: one for each bound, and one above.
pub(super) const ROWS: usize = BOUNDS.len() + 1;
/// Number of requests in each latency bucket.
pub(super) type Latencies = [u32; ROWS];
/// Bounds of the latency buckets in nanoseconds, up to 5 s.
pub(super) const BOUNDS: [u64; 17] = {
    let mut bounds = [0; 17];
    let mut index = 0;
    while index < bounds.len() {
        bounds[index] = ROUND_BOUNDS_NS[index];
        index += 1;
    }
    bounds
};

/// Rounds to four digits: more are noise, and each change is sent up to ten times a second.
pub(super) fn rounded(value: f64) -> Number {
    if value == 0.0 || !value.is_finite() {
        return 0.into();
    }
    let scale = 10_f64.powi(3 - value.abs().log10().floor() as i32);
    let value = (value * scale).round() / scale;
    match value.fract() == 0.0 && value.abs() < 1e15 {
        true => (value as i64).into(),
        // Rounding may overflow for very small or large values.
        false => Number::from_f64(value).unwrap_or_else(|| 0.into()),
    }
}

/// A packed [`ActivitySample`].
pub(super) type PackedSample = [u8; 9];

/// Logarithmic scale from `min` to `max`, with codes for zero and unknown.
struct LogScale {
    bits: u32,
    min: f64,
    max: f64,
}

const OPERATIONS: LogScale = LogScale { bits: 9, min: 0.5, max: 2e7 };
const BYTES: LogScale = LogScale { bits: 9, min: 256.0, max: 1e12 };
const LATENCY: LogScale = LogScale { bits: 7, min: 1e3, max: 1e12 };
const WAITING: LogScale = LogScale { bits: 6, min: 1.0, max: 1e6 };
/// Values of a ratio; one more code is unknown.
const RATIOS: [f64; 15] = [0.0, 0.005, 0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97, 1.0];
const UNKNOWN_RATIO: u128 = RATIOS.len() as u128;

impl LogScale {
    /// Highest code, for `max`. 0 is unknown, 1 is zero.
    fn last(&self) -> u128 {
        (1 << self.bits) - 1
    }

    /// Number of steps between `min` and `max`.
    fn steps(&self) -> f64 {
        (self.last() - 2) as f64
    }

    fn code(&self, value: Option<f64>) -> u128 {
        let Some(value) = value else { return 0 };
        // Nearer to 0 than to `min`.
        if value < self.min / 2.0 {
            return 1;
        }
        let part = (value / self.min).ln() / (self.max / self.min).ln();
        2 + (part.clamp(0.0, 1.0) * self.steps()).round() as u128
    }

    fn value(&self, code: u128) -> Option<f64> {
        match code {
            0 => None,
            1 => Some(0.0),
            code => {
                let part = (code - 2) as f64 / self.steps();
                Some(self.min * (self.max / self.min).powf(part))
            }
        }
    }
}

fn code_of_ratio(value: Option<f64>) -> u128 {
    let Some(value) = value else { return UNKNOWN_RATIO };
    let distance = |ratio: &f64| (ratio - value).abs();
    let nearest =
        RATIOS.iter().enumerate().min_by(|(_, one), (_, other)| distance(one).total_cmp(&distance(other)));
    nearest.map_or(0, |(place, _)| place as u128)
}

fn ratio_of(code: u128) -> Option<f64> {
    RATIOS.get(code as usize).copied()
}

/// Scales in the order of their bits, without the ratios.
const SCALES: [LogScale; 7] = [OPERATIONS, OPERATIONS, BYTES, BYTES, LATENCY, LATENCY, WAITING];
const RATIO_BITS: u32 = 4;

impl ActivitySample {
    fn numbers(&self) -> [Option<f64>; 7] {
        let [reads, writes, read_bytes, written_bytes] = self.rates;
        let [median, high] = self.latency_ns;
        [reads, writes, read_bytes, written_bytes, median, high, self.waiting]
    }

    pub(super) fn pack(&self) -> PackedSample {
        let mut all = 0_u128;
        // The first value ends up in the highest bits; `unpack` reads from the lowest.
        for (scale, value) in SCALES.iter().zip(self.numbers()) {
            all = all << scale.bits | scale.code(value);
        }
        for value in self.ratios {
            all = all << RATIO_BITS | code_of_ratio(value);
        }
        let bytes = all.to_le_bytes();
        array::from_fn(|index| bytes[index])
    }

    pub(super) fn unpack(packed: &PackedSample) -> Self {
        let mut all = packed.iter().rev().fold(0_u128, |all, byte| all << 8 | u128::from(*byte));
        let mut ratios = [None; 4];
        for value in ratios.iter_mut().rev() {
            *value = ratio_of(all & 15);
            all >>= RATIO_BITS;
        }
        let mut numbers = [None; 7];
        for (scale, value) in SCALES.iter().zip(&mut numbers).rev() {
            *value = scale.value(all & scale.last());
            all >>= scale.bits;
        }
        let [reads, writes, read_bytes, written_bytes, median, high, waiting] = numbers;
        Self {
            rates: [reads, writes, read_bytes, written_bytes],
            latency_ns: [median, high],
            waiting,
            ratios,
        }
    }

    /// Sample of several seconds: means, but the maximum of the 99th percentiles.
    pub(super) fn merge<'a>(all: impl Iterator<Item = &'a PackedSample>) -> Self {
        let all: Vec<_> = all.map(Self::unpack).collect();
        let mean = |get: &dyn Fn(&Self) -> Option<f64>| {
            let known: Vec<f64> = all.iter().filter_map(get).collect();
            (!known.is_empty()).then(|| known.iter().sum::<f64>() / known.len() as f64)
        };
        let highest = all.iter().filter_map(|sample| sample.latency_ns[1]).max_by(f64::total_cmp);
        Self {
            rates: array::from_fn(|index| mean(&|sample| sample.rates[index])),
            latency_ns: [mean(&|sample| sample.latency_ns[0]), highest],
            waiting: mean(&|sample| sample.waiting),
            ratios: array::from_fn(|index| mean(&|sample| sample.ratios[index])),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn round_trip(sample: ActivitySample) -> ActivitySample {
        ActivitySample::unpack(&sample.pack())
    }

    #[test]
    fn unknown_differs_from_zero() {
        assert_eq!(round_trip(ActivitySample::default()), ActivitySample::default());
        let zero = ActivitySample {
            rates: [Some(0.0); 4],
            latency_ns: [Some(0.0); 2],
            waiting: Some(0.0),
            ratios: [Some(0.0); 4],
        };
        assert_eq!(round_trip(zero), zero);
        assert_eq!(SCALES.iter().map(|scale| scale.bits).sum::<u32>() + 4 * RATIO_BITS, 72);
    }

    #[test]
    fn numbers_round_trip_within_half_a_step() {
        for (rate, bytes) in [(1.0, 512.0), (17.0, 4096.0), (2000.0, 8_192_000.0), (1.5e6, 3e10)] {
            for (latency, waiting) in [(3_800.0, 1.0), (81_000.0, 7.0), (4e9, 25_000.0)] {
                let sample = ActivitySample {
                    rates: [Some(rate), Some(rate * 1.01), Some(bytes), Some(bytes * 1.7)],
                    latency_ns: [Some(latency), Some(latency * 3.0)],
                    waiting: Some(waiting),
                    ratios: [Some(0.0), Some(0.333), Some(0.998), None],
                };
                let decoded = round_trip(sample);
                let is_near = |one: Option<f64>, other: Option<f64>, part: f64| {
                    (one.unwrap() / other.unwrap() - 1.0).abs() <= part
                };
                for (place, part) in [(0, 0.018), (1, 0.018), (2, 0.023), (3, 0.023)] {
                    assert!(is_near(decoded.rates[place], sample.rates[place], part), "{decoded:?}");
                }
                for place in 0..2 {
                    assert!(
                        is_near(decoded.latency_ns[place], sample.latency_ns[place], 0.09),
                        "{decoded:?}"
                    );
                }
                assert!(is_near(decoded.waiting, sample.waiting, 0.13), "{decoded:?}");
                assert_eq!(decoded.ratios, [Some(0.0), Some(0.3), Some(1.0), None]);
            }
        }
    }

    #[test]
    fn values_are_clamped_to_the_scale() {
        let sample = ActivitySample {
            rates: [Some(1e30); 4],
            waiting: Some(f64::INFINITY),
            ..ActivitySample::default()
        };
        let decoded = round_trip(sample);
        assert!(
            (decoded.rates[0].unwrap() / 2e7 - 1.0).abs() < 1e-6
                && (decoded.waiting.unwrap() / 1e6 - 1.0).abs() < 1e-6
        );
        assert_eq!(
            round_trip(ActivitySample { waiting: Some(f64::NAN), ..ActivitySample::default() }).waiting,
            Some(1.0)
        );
    }

    #[test]
    fn seconds_together_are_their_mean_and_the_highest_99th_percentile() {
        let second = |rate, high| {
            ActivitySample {
                rates: [Some(rate); 4],
                latency_ns: [Some(1e6), Some(high)],
                ..ActivitySample::default()
            }
            .pack()
        };
        let all = [second(1000.0, 1e6), second(3000.0, 8e6), ActivitySample::default().pack()];
        let together = ActivitySample::merge(all.iter());
        assert!((together.rates[0].unwrap() / 2000.0 - 1.0).abs() < 0.02, "{together:?}");
        assert!((together.latency_ns[1].unwrap() / 8e6 - 1.0).abs() < 0.1, "{together:?}");
        assert_eq!(together.waiting, None);
    }
}
