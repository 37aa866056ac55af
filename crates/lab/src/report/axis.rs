//! Scale of a chart's axis: positions of values, and labelled ticks.
//!
//! ```text
//!   values ─► low … high ─► ticks at 1, 2 or 5 × a power of ten ─► positions from 0 to 1, where plotters draws them
//! ```
//!
//! The scales of the crate `plotters` loop or panic on extreme spans (0 or 10³⁰⁰), and a file from
//! another source may contain any number. Values are therefore mapped to 0 to 1 first.

use super::quantity;
use crate::result::{ChartAxis, MeasureUnit};

/// Largest value of an axis; larger ones are drawn at its edge, so that differences stay finite.
const MAX_VALUE: f64 = 1e30;
const MIN_VALUE: f64 = 1e-30;
/// Spans smaller than this, relative to the values, are rounding errors.
const NO_SPAN: f64 = 1e-9;
/// Decades; narrower logarithmic scales have linear ticks.
const NARROW: f64 = 0.7;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ScaleEnds {
    Values,
    /// At ticks. A linear scale includes zero; a logarithmic one of at least [`NARROW`] decades
    /// ends at powers of ten.
    Ticks,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct AxisTick {
    pub(super) position: f64,
    pub(super) label: String,
}

#[derive(Clone, Debug)]
pub(super) struct AxisScale {
    logarithmic: bool,
    /// Bounds of the values, or of their logarithms; finite, `low < high`.
    low: f64,
    high: f64,
    pub(super) ticks: Vec<AxisTick>,
}

impl AxisScale {
    /// Creates a scale with about the given number of ticks. Values that it cannot represent are
    /// ignored.
    pub(super) fn over(
        values: impl Iterator<Item = f64>,
        axis: &ChartAxis,
        ends: ScaleEnds,
        max_ticks: usize,
    ) -> Self {
        let shown = values.filter_map(|value| representable(value, axis.logarithmic));
        let (low, high) = shown
            .fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), value| (low.min(value), high.max(value)));
        let mut scale = Self { logarithmic: axis.logarithmic, low, high, ticks: Vec::new() };
        if axis.logarithmic {
            scale.widen_logarithmic(ends);
        } else {
            scale.widen_linear(axis.unit, ends, max_ticks);
        }
        // Ticks outside of the scale, by rounding of its ends, are dropped.
        scale.ticks = scale
            .named(axis.unit, max_ticks)
            .into_iter()
            .map(|(value, label)| AxisTick {
                position: scale.along(transformed(value, axis.logarithmic)),
                label,
            })
            .filter(|tick| (-1e-6..=1.0 + 1e-6).contains(&tick.position))
            .map(|tick| AxisTick { position: tick.position.clamp(0.0, 1.0), ..tick })
            .collect();
        scale
    }

    /// Position from 0 to 1; `None` if the scale cannot represent the value.
    pub(super) fn position(&self, value: f64) -> Option<f64> {
        Some(self.along(representable(value, self.logarithmic)?))
    }

    fn along(&self, transformed: f64) -> f64 {
        (transformed - self.low) / (self.high - self.low)
    }

    fn widen_logarithmic(&mut self, ends: ScaleEnds) {
        if self.low > self.high {
            (self.low, self.high) = (0.0, 1.0);
        }
        if ends == ScaleEnds::Ticks && self.high - self.low >= NARROW {
            (self.low, self.high) = (self.low.floor(), self.high.ceil());
        }
        if self.high - self.low < NO_SPAN {
            (self.low, self.high) = (self.low - 0.15, self.high + 0.15);
        }
    }

    fn widen_linear(&mut self, unit: MeasureUnit, ends: ScaleEnds, max_ticks: usize) {
        if self.low > self.high {
            (self.low, self.high) = (0.0, 0.0);
        }
        if ends == ScaleEnds::Ticks {
            (self.low, self.high) = (self.low.min(0.0), self.high.max(0.0));
        }
        let magnitude = self.low.abs().max(self.high.abs());
        if magnitude < MIN_VALUE {
            (self.low, self.high) = (0.0, quantity::scale(unit, 0.0).0);
        } else if self.high - self.low <= magnitude * NO_SPAN {
            (self.low, self.high) = (self.low - magnitude / 10.0, self.high + magnitude / 10.0);
        }
        if ends == ScaleEnds::Ticks {
            let (step, _) = self.step(unit, max_ticks);
            // The tolerance keeps an end that is a tick from being extended by a whole step.
            self.low = (self.low / step + 1e-6).floor().min(0.0) * step;
            self.high = (self.high / step - 1e-6).ceil().max(0.0) * step;
        }
    }

    fn step(&self, unit: MeasureUnit, max_ticks: usize) -> (f64, (f64, &'static str)) {
        let shown = quantity::scale(unit, self.low.abs().max(self.high.abs()));
        (nice((self.high - self.low) / shown.0 / max_ticks.max(1) as f64) * shown.0, shown)
    }

    fn named(&self, unit: MeasureUnit, max_ticks: usize) -> Vec<(f64, String)> {
        if !self.logarithmic {
            return self.at_equal_differences(unit, max_ticks);
        }
        if self.high - self.low < NARROW {
            // Within less than a decade linear ticks are easier to read.
            let (low, high) = (10f64.powf(self.low), 10f64.powf(self.high));
            return Self { logarithmic: false, low, high, ticks: Vec::new() }
                .at_equal_differences(unit, max_ticks);
        }
        self.at_equal_factors(unit, max_ticks)
    }

    fn at_equal_differences(&self, unit: MeasureUnit, max_ticks: usize) -> Vec<(f64, String)> {
        let (step, shown) = self.step(unit, max_ticks);
        // As many decimals as the step needs, so that neighbouring labels differ.
        let digits = (-(step / shown.0).log10() - 1e-6).ceil().clamp(0.0, 9.0) as usize;
        let (first, last) = ((self.low / step - 1e-6).ceil(), (self.high / step + 1e-6).floor());
        // Up to the requested number of steps, and a rounded step at each end; a single tick if
        // steps vanish in rounding. More steps, or NaN, are rounding errors: no ticks.
        let count = if last - first <= (max_ticks + 2) as f64 { (last - first) as usize + 1 } else { 0 };
        let value = |number: usize| (first + number as f64) * step;
        (0..count)
            .map(|number| (value(number), quantity::with_digits(value(number), shown, digits)))
            .collect()
    }

    fn at_equal_factors(&self, unit: MeasureUnit, max_ticks: usize) -> Vec<(f64, String)> {
        // Sizes get powers of two, which are round numbers in KiB and MiB.
        let binary = matches!(unit, MeasureUnit::Bytes | MeasureUnit::BytesPerSecond);
        let (base, mantissas): (f64, &[f64]) = if binary { (2.0, &[1.0]) } else { (10.0, &[1.0, 2.0, 5.0]) };
        let per_decade = base.log10();
        let (first, last) = ((self.low / per_decade).floor() as i32, (self.high / per_decade).ceil() as i32);
        let powers = (self.high - self.low) / per_decade;
        let mantissas = if powers * mantissas.len() as f64 <= max_ticks as f64 { mantissas } else { &[1.0] };
        let stride = ((powers / max_ticks.max(1) as f64).ceil() as i32).max(1);
        let powers = (first..=last).filter(|power| power.rem_euclid(stride) == 0);
        powers
            .flat_map(|power| mantissas.iter().map(move |mantissa| mantissa * base.powi(power)))
            .map(|value| (value, quantity::short(value, unit)))
            .collect()
    }
}

/// The value or its logarithm, within bounds; `None` if the scale cannot represent it.
fn representable(value: f64, logarithmic: bool) -> Option<f64> {
    let exists = value.is_finite() && !(logarithmic && value <= 0.0);
    let bounded =
        if logarithmic { value.clamp(MIN_VALUE, MAX_VALUE) } else { value.clamp(-MAX_VALUE, MAX_VALUE) };
    exists.then(|| transformed(bounded, logarithmic))
}

fn transformed(value: f64, logarithmic: bool) -> f64 {
    if logarithmic { value.log10() } else { value }
}

/// Rounds up to 1, 2 or 5 × a power of ten.
fn nice(value: f64) -> f64 {
    let power = 10f64.powf(value.log10().floor());
    let mantissa = value / power;
    power * [1.0, 2.0, 5.0].into_iter().find(|nice| mantissa <= nice + 1e-9).unwrap_or(10.0)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn axis(unit: MeasureUnit, logarithmic: bool) -> ChartAxis {
        ChartAxis { label: String::new(), unit, logarithmic }
    }

    fn labels(values: &[f64], unit: MeasureUnit, logarithmic: bool, ends: ScaleEnds) -> Vec<String> {
        let scale = AxisScale::over(values.iter().copied(), &axis(unit, logarithmic), ends, 6);
        scale.ticks.into_iter().map(|tick| tick.label).collect()
    }

    #[test]
    fn ticks_are_round_numbers() {
        let iops = labels(&[9_100.0, 23_456.0], MeasureUnit::Iops, false, ScaleEnds::Ticks);
        assert_eq!(iops, ["0", "5K", "10K", "15K", "20K", "25K"]);
        let seconds = labels(&[0.0, 30.0], MeasureUnit::Seconds, false, ScaleEnds::Values);
        assert_eq!(seconds, ["0s", "5s", "10s", "15s", "20s", "25s", "30s"]);
        assert_eq!(
            labels(&[0.9, 1.1], MeasureUnit::Ratio, false, ScaleEnds::Values),
            ["0.9×", "0.95×", "1×", "1.05×", "1.1×"]
        );
        assert_eq!(
            labels(&[-30.0, 20.0], MeasureUnit::Count, false, ScaleEnds::Ticks),
            ["-30", "-20", "-10", "0", "10", "20"]
        );
    }

    #[test]
    fn logarithmic_ticks_are_powers() {
        let times = labels(&[2e3, 3e8], MeasureUnit::Nanoseconds, true, ScaleEnds::Values);
        assert_eq!(times, ["10us", "100us", "1ms", "10ms", "100ms"]);
        let sizes = labels(&[65_536.0, 2_097_152.0], MeasureUnit::Bytes, true, ScaleEnds::Values);
        assert_eq!(sizes, ["64K", "128K", "256K", "512K", "1M", "2M"]);
        let narrow = labels(&[0.95, 1.05], MeasureUnit::Ratio, true, ScaleEnds::Values);
        assert_eq!(narrow, ["0.96×", "0.98×", "1×", "1.02×", "1.04×"]);
        assert_eq!(
            labels(&[3e3, 4e5], MeasureUnit::Iops, true, ScaleEnds::Ticks),
            ["1K", "10K", "100K", "1M"]
        );
    }

    #[test]
    fn empty_and_single_value_axes_have_a_scale() {
        assert_eq!(
            labels(&[], MeasureUnit::Iops, false, ScaleEnds::Ticks).first().map(String::as_str),
            Some("0")
        );
        for ends in [ScaleEnds::Values, ScaleEnds::Ticks] {
            for logarithmic in [false, true] {
                let scale =
                    AxisScale::over([7.0; 3].into_iter(), &axis(MeasureUnit::Iops, logarithmic), ends, 6);
                assert!((0.0..=1.0).contains(&scale.position(7.0).unwrap()), "{scale:?}");
                assert!(!scale.ticks.is_empty(), "{scale:?}");
            }
        }
    }

    #[test]
    fn zero_is_not_on_a_logarithmic_scale() {
        let scale = AxisScale::over(
            [0.0, -5.0, 1.0, 10.0].into_iter(),
            &axis(MeasureUnit::Iops, true),
            ScaleEnds::Values,
            6,
        );
        assert_eq!((scale.position(0.0), scale.position(-5.0)), (None, None));
        assert_eq!((scale.position(1.0), scale.position(10.0)), (Some(0.0), Some(1.0)));
    }

    proptest! {
        #[test]
        fn any_numbers_have_a_scale(
            values in prop::collection::vec(any::<f64>(), 0..6),
            logarithmic: bool,
            rounded: bool,
            unit in prop::sample::select(vec![MeasureUnit::Iops, MeasureUnit::Bytes, MeasureUnit::Nanoseconds, MeasureUnit::Seconds, MeasureUnit::Share]),
        ) {
            let ends = if rounded { ScaleEnds::Ticks } else { ScaleEnds::Values };
            let scale = AxisScale::over(values.iter().copied(), &axis(unit, logarithmic), ends, 6);
            for position in values.iter().filter_map(|&value| scale.position(value)) {
                prop_assert!((-1e-6..=1.0 + 1e-6).contains(&position), "{position} {scale:?}");
            }
            prop_assert!(scale.ticks.len() <= 24, "{scale:?}");
            // A label with an exponent is no real quantity of a disk; such labels may be equal.
            let differ = |one: &AxisTick, other: &AxisTick| one.label != other.label || one.label.contains('e');
            prop_assert!(scale.ticks.is_sorted_by(|a, b| a.position < b.position && differ(a, b)), "{scale:?}");
        }
    }
}
