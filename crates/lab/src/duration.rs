//! Duration of a run or a recording, as `weir report` and `weir trace info` print it.

use console::figures;

/// Formats seconds, rounded: `5.0s`, `1m 59s`, `3h 5m`.
pub(crate) fn duration(seconds: f64) -> String {
    const HOUR_S: f64 = 3600.0;
    match seconds.round() {
        _ if seconds == 0.0 => "0s".to_owned(),
        _ if seconds < 59.5 => figures::time((seconds * 1e9) as u64),
        whole if whole < HOUR_S => format!("{:.0}m {:.0}s", (whole / 60.0).floor(), whole % 60.0),
        _ => figures::age(((seconds / 60.0).round() * 60e9) as u64),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_rounded_and_not_cut() {
        let seconds = [0.0, 0.25, 5.048, 24.9, 59.6, 118.7, 3599.4, 3599.6, 7199.0, 90_000.0];
        let shown = ["0s", "250ms", "5.0s", "25s", "1m 0s", "1m 59s", "59m 59s", "1h 0m", "2h 0m", "1d 1h"];
        assert_eq!(seconds.map(duration), shown);
    }
}
