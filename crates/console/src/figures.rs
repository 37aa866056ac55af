//! Numbers as text for people: rates, sizes, times, and limits in short form.
//!
//! Measured values are rounded. Settings are exact, so that a displayed value can be typed in
//! again.

use std::collections::BTreeMap;

use policy::{
    throttle::{FullBurst, LimitKind, LimitPart, LimitSetting, RateLimit},
    time::Date,
};

/// Settings by name, such as `iops-total`. A setting of 0 may be missing.
pub type SettingValues = BTreeMap<String, u64>;

const UNITS: [&str; 5] = ["", "K", "M", "G", "T"];

/// Measured number in three or four characters, with powers of 1000: `0`, `998`, `12.3K`.
pub fn count(value: f64) -> String {
    scaled(value, 1000.0)
}

/// Number with a noun, which is passed in the singular: `1 client`, `2 clients`.
pub fn counted(number: u64, noun: &str) -> String {
    format!("{number} {noun}{}", if number == 1 { "" } else { "s" })
}

/// Measured bytes, with powers of 1024: `0`, `512`, `9.8M`.
pub fn bytes(value: f64) -> String {
    scaled(value, 1024.0)
}

/// Measured bytes for a sentence, with a unit where the number alone has none: `512 bytes`,
/// `9.8M`.
pub fn sized(bytes: u64) -> String {
    if bytes < 1024 { counted(bytes, "byte") } else { self::bytes(bytes as f64) }
}

fn scaled(value: f64, base: f64) -> String {
    let mut value = value.max(0.0);
    let mut unit = 0;
    // Compares the value as it will be printed: otherwise 999.7 becomes 1000 instead of 1.0K.
    while value.round() >= base && unit + 1 < UNITS.len() {
        value /= base;
        unit += 1;
    }
    // One decimal below 100 (`99.9K`). Without a unit it is only for fractions below 10: a count
    // of whole requests has no decimals.
    if value < 99.95 && unit > 0 || value < 9.95 && value.fract() > 0.05 {
        format!("{value:.1}{}", UNITS[unit])
    } else {
        format!("{value:.0}{}", UNITS[unit])
    }
}

/// Time in nanoseconds, with a unit: `85us`, `1.2ms`, `31ms`, `4.1s`.
pub fn time(nanoseconds: u64) -> String {
    let value = nanoseconds as f64;
    let (value, unit) = match nanoseconds {
        0..1_000 => return format!("{nanoseconds}ns"),
        // The limits between units are those of the rounded text: 999.5us is `1.0ms`, not
        // `1000us`.
        1_000..999_500 => (value / 1e3, "us"),
        999_500..999_500_000 => (value / 1e6, "ms"),
        _ => (value / 1e9, "s"),
    };
    if value < 9.95 { format!("{value:.1}{unit}") } else { format!("{value:.0}{unit}") }
}

/// Elapsed time in nanoseconds, in one or two units: `45s`, `12m`, `3h 5m`, `2d 7h`.
pub fn age(nanoseconds: u64) -> String {
    let seconds = nanoseconds / 1_000_000_000;
    let (minutes, hours, days) = (seconds / 60, seconds / 3600, seconds / 86_400);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds}s"),
        (0, 0, _) => format!("{minutes}m"),
        (0, ..) => format!("{hours}h {}m", minutes % 60),
        _ => format!("{days}d {}h", hours % 24),
    }
}

/// Fraction of 0 to 1 as a percentage: `0%`, `<1%`, `42%`.
pub fn share(value: f64) -> String {
    match value {
        0.0 => "0%".to_owned(),
        value if value < 0.005 => "<1%".to_owned(),
        value => format!("{:.0}%", value * 100.0),
    }
}

/// Limits in short form, `-` if none is set: `iops 1000↑5000×5s, bps-r 10M` (rate ↑ burst rate ×
/// burst length), or `iops 1000↑5000 for 30s` with `burst-for`.
pub fn limits(limits: &SettingValues) -> String {
    let shown: Vec<String> = LimitKind::ALL.iter().filter_map(|&kind| limit(limits, kind)).collect();
    if shown.is_empty() { "-".to_owned() } else { shown.join(", ") }
}

/// Full bursts, one line for each limit with a burst: `a full burst of iops-total lasts 40 s: …`.
pub fn full_bursts(limits: &SettingValues) -> Vec<String> {
    let bursts = LimitKind::ALL.into_iter().filter_map(|kind| full_burst(kind, rate_limit(limits, kind)));
    bursts.collect()
}

/// Full burst of one limit, with the formula of its duration. `None` if the limit has no burst.
pub fn full_burst(kind: LimitKind, limit: RateLimit) -> Option<String> {
    let name = LimitSetting::Limit(kind, LimitPart::Rate).name();
    let number = |value| limit_value(kind, value);
    Some(match limit.full_burst()? {
        FullBurst::AtOnce { units } => {
            let unit = if kind.counts_bytes() { "bytes" } else { "operations" };
            format!("a full burst of {name} is {} {unit} at once", number(units))
        }
        FullBurst::Lasts { ms } => {
            let RateLimit { rate, burst_rate, burst_length_s, burst_for_s } = limit;
            let [rate, burst_rate] = [rate, burst_rate].map(number);
            // `Display` of f64 prints only the decimals that exist; milliseconds give three at
            // most.
            let duration = format!("a full burst of {name} lasts {} s", ms as f64 / 1000.0);
            match burst_for_s {
                0 => format!("{duration}: {burst_length_s} s × {burst_rate} ÷ ({burst_rate} − {rate})"),
                _ => duration,
            }
        }
        FullBurst::Endless => format!("a burst of {name} does not end: its burst rate equals its rate"),
    })
}

/// The limit of a kind, from settings by name.
pub fn rate_limit(limits: &SettingValues, kind: LimitKind) -> RateLimit {
    let value = |setting: LimitSetting| limits.get(setting.name()).copied().unwrap_or(0);
    RateLimit {
        rate: value(LimitSetting::Limit(kind, LimitPart::Rate)),
        burst_rate: value(LimitSetting::Limit(kind, LimitPart::BurstRate)),
        burst_length_s: value(LimitSetting::Limit(kind, LimitPart::BurstLength)).max(1),
        burst_for_s: value(LimitSetting::BurstFor),
    }
}

/// Text shortened to `max_chars` characters. The ellipsis replaces the middle, because names often
/// differ at their ends.
pub fn elided(text: &str, max_chars: usize) -> String {
    let count = text.chars().count();
    if count <= max_chars {
        return text.to_owned();
    }
    let kept = max_chars.saturating_sub(1);
    // The ellipsis is one of the characters; of an odd rest the start gets one more.
    let start: String = text.chars().take(kept.div_ceil(2)).collect();
    let end: String = text.chars().skip(count - kept / 2).collect();
    format!("{}…{}", start.trim_end(), end.trim_start())
}

/// Size, or limit in bytes, exactly as a setting is written if that fits in six characters,
/// otherwise rounded: `20M`, `9.5M`.
pub fn size(value: u64) -> String {
    let exact = settings::exact_size(value);
    if exact.len() <= 6 { exact } else { bytes(value as f64) }
}

fn limit(limits: &SettingValues, kind: LimitKind) -> Option<String> {
    let RateLimit { rate, burst_rate, burst_length_s, burst_for_s } = rate_limit(limits, kind);
    let mut text = match rate {
        0 => format!("{} {}", short(kind), size_rate(limits, kind)?),
        _ => format!("{} {}", short(kind), limit_value(kind, rate)),
    };
    if burst_rate > 0 {
        text += &format!("↑{}", limit_value(kind, burst_rate));
    }
    // A length of 1 s is the default (QEMU's `*-max-length`).
    if burst_length_s > 1 {
        text += &format!("×{burst_length_s}s");
    }
    if burst_rate > 0 && burst_for_s > 0 {
        text += &format!(" for {burst_for_s}s");
    }
    Some(text)
}

/// A rate for each GiB of a disk, with its bounds: `3/GiB`, `3/GiB (100 to 16000)`.
fn size_rate(limits: &SettingValues, kind: LimitKind) -> Option<String> {
    let value = |part| {
        let setting = LimitSetting::Limit(kind, part);
        let value = limits.get(setting.name()).copied().filter(|value| *value > 0)?;
        Some(limit_value(kind, value))
    };
    let per_gib = value(LimitPart::PerGib)?;
    let bounds = match (value(LimitPart::PerGibMin), value(LimitPart::PerGibMax)) {
        (None, None) => String::new(),
        (Some(min), None) => format!(" (at least {min})"),
        (None, Some(max)) => format!(" (at most {max})"),
        (Some(min), Some(max)) => format!(" ({min} to {max})"),
    };
    Some(format!("{per_gib}/GiB{bounds}"))
}

/// A rate or an amount of a limit: `500`, `20M`.
fn limit_value(kind: LimitKind, value: u64) -> String {
    if kind.counts_bytes() { size(value) } else { value.to_string() }
}

fn short(kind: LimitKind) -> &'static str {
    match kind {
        LimitKind::BpsTotal => "bps",
        LimitKind::BpsRead => "bps-r",
        LimitKind::BpsWrite => "bps-w",
        LimitKind::IopsTotal => "iops",
        LimitKind::IopsRead => "iops-r",
        LimitKind::IopsWrite => "iops-w",
    }
}

/// Date and time in UTC, from seconds since 1970.
pub fn date(seconds: u32) -> String {
    Date(seconds).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_name_is_shortened_in_the_middle() {
        assert_eq!(["häuser", "read, depth 64", ""].map(|name| elided(name, 6)), ["häuser", "rea…64", ""]);
        assert_eq!(elided("abc", 0), "…");
    }

    #[test]
    fn measured_numbers_are_short() {
        let counts = [0.0, 0.4, 9.0, 998.4, 999.7, 12_345.0, 123_456.0, 1e12, 1e18].map(count);
        assert_eq!(counts, ["0", "0.4", "9", "998", "1.0K", "12.3K", "123K", "1.0T", "1000000T"]);
        let sizes = [512.0, 1024.0, 10_485_760.0, 1_073_741_824.0].map(bytes);
        assert_eq!(sizes, ["512", "1.0K", "10.0M", "1.0G"]);
        let exact_sizes = [0, 1, 33, 1023, 10_035].map(sized);
        assert_eq!(exact_sizes, ["0 bytes", "1 byte", "33 bytes", "1023 bytes", "9.8K"]);
        let times = [0, 999, 85_000, 1_234_567, 31_000_000, 999_600_000, 4_100_000_000].map(time);
        assert_eq!(times, ["0ns", "999ns", "85us", "1.2ms", "31ms", "1.0s", "4.1s"]);
        assert_eq!([0.0, 0.001, 0.42, 1.0].map(share), ["0%", "<1%", "42%", "100%"]);
        let ages = [9, 700, 11_100, 200_000].map(|seconds| age(seconds * 1_000_000_000));
        assert_eq!(ages, ["9s", "11m", "3h 5m", "2d 7h"]);
    }

    #[test]
    fn limits_are_abbreviated() {
        let set = |pairs: &[(&str, u64)]| {
            limits(&pairs.iter().map(|&(name, value)| (name.to_owned(), value)).collect())
        };
        assert_eq!(set(&[]), "-");
        let burst = [("iops-total", 1000), ("iops-total-max", 5000), ("iops-total-max-length", 5)];
        assert_eq!(set(&burst), "iops 1000↑5000×5s");
        let lasts = |settings: &[(&str, u64)]| {
            let limits = settings.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
            full_bursts(&limits)
        };
        assert_eq!(lasts(&burst), ["a full burst of iops-total lasts 6.25 s: 5 s × 5000 ÷ (5000 − 1000)"]);
        let of_thirty_seconds =
            [("iops-total", 500), ("iops-total-max", 2000), ("iops-total-max-length", 30)];
        assert_eq!(
            lasts(&of_thirty_seconds),
            ["a full burst of iops-total lasts 40 s: 30 s × 2000 ÷ (2000 − 500)"]
        );
        let endless = [("bps-read", 500), ("bps-read-max", 500), ("bps-read-max-length", 2)];
        assert_eq!(lasts(&endless), ["a burst of bps-read does not end: its burst rate equals its rate"]);
        let for_a_time = [("iops-total", 500), ("iops-total-max", 2000), ("burst-for", 30)];
        assert_eq!(lasts(&for_a_time), ["a full burst of iops-total lasts 30 s"]);
        assert_eq!(set(&for_a_time), "iops 500↑2000 for 30s");
        let at_once = [("bps-read", 1 << 20), ("bps-read-max", 5 << 20)];
        assert_eq!(lasts(&at_once), ["a full burst of bps-read is 5M bytes at once"]);
        assert_eq!(lasts(&[("bps-read", 500)]), [""; 0], "without a burst");
        assert_eq!(
            set(&[("bps-read", 10 << 20), ("bps-read-max-length", 1), ("iops-write", 7)]),
            "bps-r 10M, iops-w 7"
        );
        assert_eq!(set(&[("bps-total", 10_000_000), ("bps-total-max", 12_345_678_901)]), "bps 9.5M↑11.5G");
        let per_gib = [("iops-total-per-gib", 3), ("iops-total-per-gib-min", 100), ("iops-total-max", 500)];
        assert_eq!(set(&per_gib), "iops 3/GiB (at least 100)↑500");
        let bounded = [
            ("bps-read-per-gib", 1 << 20),
            ("bps-read-per-gib-min", 5 << 20),
            ("bps-read-per-gib-max", 1 << 30),
        ];
        assert_eq!(set(&bounded), "bps-r 1M/GiB (5M to 1G)");
        assert_eq!([999, 4608, 10_000, 3_221_225_984].map(size), ["999", "4608", "10000", "3.0G"]);
    }

    #[test]
    fn dates_match_the_calendar() {
        assert_eq!(date(0), "1970-01-01 00:00:00");
        assert_eq!(date(951_782_399), "2000-02-28 23:59:59");
        assert_eq!(date(951_782_400), "2000-02-29 00:00:00");
        assert_eq!(date(1_795_241_721), "2026-11-21 06:15:21");
        assert_eq!(date(u32::MAX), "2106-02-07 06:28:15");
    }
}
