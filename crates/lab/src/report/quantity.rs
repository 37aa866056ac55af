//! Formats quantities in a report: a number, its scale and its unit, in about ten characters.
//!
//! Unlike `figures`, it distinguishes neighbouring ticks, allows negative differences, and accepts
//! any number from a result file.

use crate::{result::MeasureUnit, statistics::Estimate};

/// A divisor and its suffix, in ascending order.
type UnitStep = (f64, &'static str);

const DECIMAL: [UnitStep; 5] = [(1.0, ""), (1e3, "K"), (1e6, "M"), (1e9, "G"), (1e12, "T")];
const KIB: f64 = 1024.0;
const BINARY: [UnitStep; 5] =
    [(1.0, ""), (KIB, "K"), (KIB * KIB, "M"), (KIB * KIB * KIB, "G"), (KIB * KIB * KIB * KIB, "T")];
const BINARY_RATE: [UnitStep; 5] =
    [(1.0, "/s"), (KIB, "K/s"), (KIB * KIB, "M/s"), (KIB * KIB * KIB, "G/s"), (KIB * KIB * KIB * KIB, "T/s")];
const NANOSECONDS: [UnitStep; 4] = [(1.0, "ns"), (1e3, "us"), (1e6, "ms"), (1e9, "s")];
const SECONDS: [UnitStep; 4] = [(1e-9, "ns"), (1e-6, "us"), (1e-3, "ms"), (1.0, "s")];
const SHARE: [UnitStep; 1] = [(0.01, "%")];
const RATIO: [UnitStep; 1] = [(1.0, "×")];

/// Numbers above this, and below its inverse, are printed with an exponent.
const MAX_WITHOUT_EXPONENT: f64 = 1e7;

fn steps(unit: MeasureUnit) -> &'static [UnitStep] {
    match unit {
        MeasureUnit::Iops | MeasureUnit::Count => &DECIMAL,
        MeasureUnit::Bytes => &BINARY,
        MeasureUnit::BytesPerSecond => &BINARY_RATE,
        MeasureUnit::Nanoseconds => &NANOSECONDS,
        MeasureUnit::Seconds => &SECONDS,
        MeasureUnit::Share => &SHARE,
        MeasureUnit::Ratio => &RATIO,
    }
}

pub(super) fn scale(unit: MeasureUnit, magnitude: f64) -> UnitStep {
    let steps = steps(unit);
    let zero = || if unit == MeasureUnit::Seconds { SECONDS[3] } else { steps[0] };
    if magnitude == 0.0 {
        return zero();
    }
    // The threshold for three digits: 999.7 becomes 1K, not 1000.
    let reaches = |&&(factor, _): &&UnitStep| magnitude.abs() / factor >= 0.9995;
    steps.iter().rev().find(reaches).copied().unwrap_or(steps[0])
}

/// Formats with three digits: `0`, `1.23K`, `85us`, `-4.2%`, `1.02×`.
pub(super) fn short(value: f64, unit: MeasureUnit) -> String {
    let step = scale(unit, value);
    let magnitude = (value / step.0).abs();
    let digits = if magnitude > 0.0 { 2.0 - magnitude.log10().floor() } else { 0.0 };
    with_digits(value, step, digits.clamp(0.0, 9.0) as usize)
}

/// Formats a median and its interval with enough digits to distinguish its ends: `10.00K`, `9.97K`,
/// `10.03K`.
pub(super) fn estimate(estimate: Estimate, unit: MeasureUnit) -> [String; 3] {
    let Estimate { median, low, high } = estimate;
    let step = scale(unit, median);
    let digits = |value: f64| {
        let magnitude = (value / step.0).abs();
        if magnitude > 0.0 && magnitude.is_finite() { -magnitude.log10().floor() } else { 0.0 }
    };
    // Down to the first digit of the width (two digits if that is 1 or 2), and at most six digits
    // of the median.
    let digits = digits((high - low) / 3.0).min(digits(median) + 5.0).max(digits(median) + 2.0);
    let digits = digits.clamp(0.0, 9.0) as usize;
    let is_exact = low == median && high == median;
    [median, low, high]
        .map(|value| if is_exact { with_digits(value, step, digits) } else { in_full(value, step, digits) })
}

fn in_full(value: f64, (factor, suffix): UnitStep, digits: usize) -> String {
    let value = value / factor;
    if is_far_off(value) { format!("{value:.1e}{suffix}") } else { format!("{value:.digits$}{suffix}") }
}

fn is_far_off(value: f64) -> bool {
    value != 0.0 && !(1.0 / MAX_WITHOUT_EXPONENT..MAX_WITHOUT_EXPONENT).contains(&value.abs())
}

/// Formats with at most `digits` decimals, without trailing zeros.
pub(super) fn with_digits(value: f64, (factor, suffix): UnitStep, digits: usize) -> String {
    let value = value / factor;
    if is_far_off(value) {
        return format!("{value:.1e}{suffix}");
    }
    let text = format!("{value:.digits$}");
    let text = if text.contains('.') { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    // A value that rounds to zero has neither sign nor decimal suffix.
    match (text, suffix) {
        ("0" | "-0", "K" | "M" | "G" | "T") => "0".to_owned(),
        ("-0", _) => format!("0{suffix}"),
        _ => format!("{text}{suffix}"),
    }
}

pub(super) fn percent(ratio: f64) -> String {
    let percent = (ratio - 1.0) * 100.0;
    if !percent.is_finite() {
        return "-".to_owned();
    }
    if percent.abs() >= 10_000.0 {
        return format!("{percent:+.1e}%");
    }
    let text = format!("{percent:+.1}%");
    if matches!(text.as_str(), "+0.0%" | "-0.0%") { "0.0%".to_owned() } else { text }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn three_digits_and_a_unit() {
        let iops = [0.0, 0.4, 998.4, 999.7, 12_345.0, 123_456.0, 1e12, -1500.0]
            .map(|value| short(value, MeasureUnit::Iops));
        assert_eq!(iops, ["0", "0.4", "998", "1K", "12.3K", "123K", "1T", "-1.5K"]);
        let times =
            [0.0, 85_000.0, 1_234_567.0, 4.1e9, 90e9].map(|value| short(value, MeasureUnit::Nanoseconds));
        assert_eq!(times, ["0ns", "85us", "1.23ms", "4.1s", "90s"]);
        assert_eq!(
            [0.0, 0.0025, 61.0].map(|value| short(value, MeasureUnit::Seconds)),
            ["0s", "2.5ms", "61s"]
        );
        assert_eq!([4096.0, 1_073_741_824.0].map(|value| short(value, MeasureUnit::Bytes)), ["4K", "1G"]);
        assert_eq!(short(10_485_760.0, MeasureUnit::BytesPerSecond), "10M/s");
        assert_eq!([0.0, 0.4237, 1.0].map(|value| short(value, MeasureUnit::Share)), ["0%", "42.4%", "100%"]);
        assert_eq!(short(1.018, MeasureUnit::Ratio), "1.02×");
    }

    #[test]
    fn interval_ends_have_enough_digits() {
        let shown = |median, low, high| estimate(Estimate { median, low, high }, MeasureUnit::Iops);
        assert_eq!(shown(1e4, 9970.0, 10_030.0), ["10.00K", "9.97K", "10.03K"]);
        assert_eq!(shown(1e4, 5e3, 2e4), ["10.0K", "5.0K", "20.0K"]);
        assert_eq!(shown(999.0, 998.0, 1001.0), ["999", "998", "1001"]);
        assert_eq!(shown(5.0, 5.0, 5.0), ["5", "5", "5"]);
        assert_eq!(shown(0.0, 0.0, 0.0), ["0", "0", "0"]);
        assert_eq!(shown(f64::MAX, f64::MIN, f64::MAX)[0], "1.8e296T");
    }

    #[test]
    fn shown_numbers_are_short() {
        for value in [f64::MAX, f64::MIN, f64::MIN_POSITIVE, 5e-324, -1e-30, 123_456_789.123, 1e19] {
            for unit in [
                MeasureUnit::Iops,
                MeasureUnit::Bytes,
                MeasureUnit::Nanoseconds,
                MeasureUnit::Seconds,
                MeasureUnit::Share,
                MeasureUnit::Ratio,
            ] {
                let text = short(value, unit);
                assert!(text.len() <= 12, "{text}");
            }
        }
    }

    #[test]
    fn differences_have_a_sign() {
        let shown = [1.0, 1.124, 0.5, 1.000_01, f64::INFINITY, f64::NAN, 1e9].map(percent);
        assert_eq!(shown, ["0.0%", "+12.4%", "-50.0%", "0.0%", "-", "-", "+1.0e11%"]);
    }
}
