//! Parsers of numbers and names for the command line and the config file.
//!
//! A parser returns a value, or the rule that the text breaks.

use std::{str::FromStr, time::Duration};

use block::disk::{DetectZeroes, Discards};
use policy::throttle::{LimitPart, LimitSetting};
use reactor::PollingMode;
use storage::{InvalidValue, parse_duration, parse_size};

/// Parses by `FromStr`; the error is the rule that the text breaks.
pub fn parse<T: FromStr<Err: RuleError>>(text: &str) -> Result<T, String> {
    text.parse().map_err(RuleError::rule)
}

/// Error without its value, which the message names already.
pub trait RuleError {
    /// Rule that was broken.
    fn rule(self) -> String;
}

impl RuleError for String {
    fn rule(self) -> String {
        self
    }
}

impl RuleError for InvalidValue {
    fn rule(self) -> String {
        self.rule.into_owned()
    }
}

impl RuleError for storage::InvalidOption {
    /// Includes the key, because the option has several.
    fn rule(self) -> String {
        format!("{}={} {}", self.key, self.value, self.rule)
    }
}

/// Parses a number of bytes: digits, optionally with a fraction and one of `K M G T P E` (powers of
/// 1024) or `KB MB …` (powers of 1000).
pub fn size(text: &str) -> Result<u64, String> {
    parse_size(text).map_err(RuleError::rule)
}

/// Parses a time: a number with `ns`, `us`, `ms` or `s`; or `0`.
pub fn duration(text: &str) -> Result<Duration, String> {
    parse_duration(text).map_err(RuleError::rule)
}

/// Parses a longer time: as [`duration`], or a whole number with `m` (minutes) or `h` (hours).
pub fn long_duration(text: &str) -> Result<Duration, String> {
    let long = |unit: char, seconds: u64| {
        let number: u64 = text.strip_suffix(unit)?.parse().ok()?;
        Some(Duration::from_secs(number.saturating_mul(seconds)))
    };
    match long('m', 60).or_else(|| long('h', 3600)) {
        Some(time) => Ok(time),
        // For a number without unit the hint about minutes would mislead.
        None if text.bytes().all(|byte| byte.is_ascii_digit()) => duration(text),
        None => duration(text).map_err(|rule| format!("{rule}; or minutes, 10m, or hours, 2h")),
    }
}

/// Longest time of busy polling: beyond it, polling never ends in practice.
const MAX_POLL: Duration = Duration::from_secs(1);

/// Parses a polling mode: `auto`, `off`, or a time of at most a second.
pub fn polling(text: &str) -> Result<PollingMode, String> {
    match text {
        "auto" => Ok(PollingMode::Auto),
        "off" => Ok(PollingMode::Off),
        _ => match duration(text).map_err(|rule| format!("is neither auto nor off, and {rule}"))? {
            Duration::ZERO => Ok(PollingMode::Off),
            limit if limit > MAX_POLL => Err("is too long; it must be at most 1s (0 never polls)".to_owned()),
            limit => Ok(PollingMode::UpTo(limit)),
        },
    }
}

/// Parses a count: only digits, as in QEMU.
pub fn count(text: &str) -> Result<u64, String> {
    // `parse` alone would accept a plus sign.
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return text.parse().map_err(|_| "is too large; a count is below 2 to the 64th".to_owned());
    }
    let per_second = text.strip_suffix("/s").filter(|number| count(number).is_ok());
    if let Some(number) = per_second {
        return Err(format!("is a rate; limits are per second already (write {number})"));
    }
    // The number that was probably meant is part of the message.
    Err(match size(text) {
        Ok(value) => {
            let value = decimal_suffix_value(text).unwrap_or(value);
            format!("is not a plain number; a count takes no suffix and no fraction (write {value})")
        }
        Err(_) => "is not a whole number of 0 or more".to_owned(),
    })
}

/// Parses a number of seconds without a unit, as in QEMU.
pub fn seconds(text: &str) -> Result<u64, String> {
    let time = long_duration(text).ok().filter(|time| time.subsec_nanos() == 0);
    match (count(text), time) {
        (Err(_), Some(time)) => {
            let seconds = time.as_secs();
            Err(format!("is a time with a unit; this is a plain number of seconds (write {seconds})"))
        }
        (counted, _) => counted,
    }
}

/// Parses a number of seconds, or a time with a unit: `30`, `30s`, `2m`. Fractions of a second are
/// rejected.
pub fn whole_seconds(text: &str) -> Result<u64, String> {
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        return count(text);
    }
    match long_duration(text)? {
        time if time.subsec_nanos() > 0 => Err("has a fraction of a second (use whole seconds)".to_owned()),
        time => Ok(time.as_secs()),
    }
}

/// Parser of a limit's value: sizes for bytes, seconds for burst lengths, times for `burst-for`,
/// counts for the rest.
pub fn limit_parser(setting: LimitSetting) -> fn(&str) -> Result<u64, String> {
    match setting {
        LimitSetting::Limit(_, LimitPart::BurstLength) => seconds,
        LimitSetting::BurstFor => whole_seconds,
        _ if setting.is_size() => size,
        _ => count,
    }
}

/// Probable meaning of a count with a suffix: a power of 1000, since 1024 is for bytes only.
fn decimal_suffix_value(text: &str) -> Option<u64> {
    let (last, suffix) = text.char_indices().last()?;
    let power = "kmgtpe".find(suffix.to_ascii_lowercase())?;
    let number: f64 = text[..last].parse().ok()?;
    Some((number * 1000_f64.powi(power as i32 + 1)) as u64)
}

/// Parses a number of connections; 0 is unlimited.
pub fn connections(text: &str) -> Result<u32, String> {
    u32::try_from(count(text)?)
        .map_err(|_| format!("is too large; it may be {} at most, or 0 for any number", u32::MAX))
}

/// Parses the handling of discards: `unmap` or `ignore`.
pub fn discards(text: &str) -> Result<Discards, String> {
    match text {
        "unmap" => Ok(Discards::Unmap),
        "ignore" => Ok(Discards::Ignore),
        _ => Err("is neither unmap nor ignore".to_owned()),
    }
}

/// Parses the detection of zeroes: `off`, `on` or `unmap`.
pub fn detect_zeroes(text: &str) -> Result<DetectZeroes, String> {
    let found = DetectZeroes::ALL.into_iter().find(|mode| mode.name() == text);
    found.ok_or_else(|| "is not one of off, on and unmap".to_owned())
}

/// Formats a number of bytes exactly: `10M`, `1536M`, `1000`.
pub fn exact_size(value: u64) -> String {
    // The largest unit that divides the value, so that nothing is rounded.
    let exponent = if value == 0 { 0 } else { (value.trailing_zeros() / 10).min(4) };
    format!("{}{}", value >> (10 * exponent), ["", "K", "M", "G", "T"][exponent as usize])
}

/// Multiples of the block size next to a size that is none: `512 or 1024`; never 0.
pub fn nearest_multiples(size_bytes: u64, block_bytes: u64) -> String {
    // Rounded down and up, as suggestions.
    let below = Some(size_bytes / block_bytes * block_bytes).filter(|size| *size > 0);
    let sizes = below.into_iter().chain(size_bytes.checked_next_multiple_of(block_bytes));
    sizes.map(|size| size.to_string()).collect::<Vec<_>>().join(" or ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggested_sizes_are_multiples_of_the_block() {
        assert_eq!(nearest_multiples(1000, 512), "512 or 1024");
        assert_eq!(nearest_multiples(1, 4096), "4096");
        assert_eq!(nearest_multiples(u64::MAX, 4096), (u64::MAX - 4095).to_string());
    }

    #[test]
    fn polling_is_a_word_or_a_time() {
        assert_eq!(polling("auto"), Ok(PollingMode::Auto));
        assert_eq!((polling("off"), polling("0")), (Ok(PollingMode::Off), Ok(PollingMode::Off)));
        assert_eq!(polling("50us"), Ok(PollingMode::UpTo(Duration::from_micros(50))));
        let rule = polling("always").unwrap_err();
        assert!(rule.starts_with("is neither auto nor off, and is "), "{rule}");
        assert_eq!(polling("2s"), Err("is too long; it must be at most 1s (0 never polls)".to_owned()));
    }

    #[test]
    fn missing_or_extra_units_are_named() {
        let no_unit = "has no unit (write 5s for seconds, or 5ms)";
        assert_eq!(duration("5"), Err(no_unit.to_owned()));
        assert_eq!(long_duration("5"), Err(no_unit.to_owned()));
        assert!(duration("five").unwrap_err().starts_with("is not a duration"));
        for (text, write) in [("50MB/s", "50MB"), ("50M/s", "50M"), ("1GBps", "1GB")] {
            let rule = format!("is a rate; limits are per second already (write {write})");
            assert_eq!(size(text), Err(rule));
        }
        assert!(size("much/s").unwrap_err().starts_with("is not a size"));
        assert_eq!(count("1000/s"), Err("is a rate; limits are per second already (write 1000)".to_owned()));
    }

    #[test]
    fn a_burst_length_with_a_unit_is_named_in_seconds() {
        let length = limit_parser(LimitSetting::from_name("iops-total-max-length").expect("a limit"));
        assert_eq!(length("30"), Ok(30));
        for (text, seconds) in [("30s", 30), ("2m", 120), ("5000ms", 5)] {
            let rule = format!("is a time with a unit; this is a plain number of seconds (write {seconds})");
            assert_eq!(length(text), Err(rule));
        }
        assert_eq!(length("500ms"), Err("is not a whole number of 0 or more".to_owned()));
    }

    #[test]
    fn a_time_is_in_whole_seconds() {
        let times = ["30", "30s", "2m", "1h", "5000ms", "0"].map(whole_seconds);
        assert_eq!(times, [30, 30, 120, 3600, 5, 0].map(Ok));
        assert_eq!(whole_seconds("1.5s"), Err("has a fraction of a second (use whole seconds)".to_owned()));
        assert!(whole_seconds("soon").unwrap_err().ends_with("or minutes, 10m, or hours, 2h"));
        assert!(whole_seconds("99999999999999999999").unwrap_err().starts_with("is too large"));
    }

    #[test]
    fn counts_are_plain() {
        let check = |text: &str, rule: &str| assert_eq!(count(text).unwrap_err(), rule, "{text}");
        assert_eq!(count("1000"), Ok(1000));
        assert_eq!(count("18446744073709551615"), Ok(u64::MAX));
        check("1K", "is not a plain number; a count takes no suffix and no fraction (write 1000)");
        check("10k", "is not a plain number; a count takes no suffix and no fraction (write 10000)");
        check("1.5M", "is not a plain number; a count takes no suffix and no fraction (write 1500000)");
        check("1.5", "is not a plain number; a count takes no suffix and no fraction (write 1)");
        check("0x10", "is not a plain number; a count takes no suffix and no fraction (write 16)");
        for text in ["", "-1", "+1", "1e3", "١", "many", "k", "-1k", "infk"] {
            check(text, "is not a whole number of 0 or more");
        }
        check("18446744073709551616", "is too large; a count is below 2 to the 64th");
    }

    #[test]
    fn connections_fit_32_bits() {
        assert_eq!(connections("4294967295"), Ok(u32::MAX));
        assert!(connections("4294967296").unwrap_err().starts_with("is too large"));
    }

    #[test]
    fn set_sizes_are_exact() {
        let sizes = [0, 1000, 1024, 10 << 20, 1536 << 20, 1 << 40, 3 << 50].map(exact_size);
        assert_eq!(sizes, ["0", "1000", "1K", "10M", "1536M", "1T", "3072T"]);
    }
}
