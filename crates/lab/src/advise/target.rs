//! The latency target: a percentile of requests and the time that they may take.

use std::{str::FromStr, time::Duration};

use policy::latency_target::PercentileTarget;

/// `p99=10ms`: 99 of 100 requests take at most 10 ms.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct LatencyTarget {
    /// Percent, between 0 and 100.
    percentile: f64,
    pub(super) time_ns: u64,
}

impl LatencyTarget {
    #[cfg(test)]
    pub(super) const fn new(percentile: f64, time_ns: u64) -> Self {
        Self { percentile, time_ns }
    }

    #[cfg(test)]
    pub(super) fn time_s(&self) -> f64 {
        self.time_ns as f64 / 1e9
    }

    /// The same percentile with another time.
    pub(super) const fn with_time(self, time_ns: u64) -> Self {
        Self { time_ns, ..self }
    }

    /// The percentile in ten-thousandths, if the daemon keeps latency targets of it.
    pub(super) fn permyriad(&self) -> Option<u16> {
        let permyriad = (self.percentile * 100.0).round();
        let is_exact = (permyriad - self.percentile * 100.0).abs() < 1e-6;
        // In range: percentiles are from 0 to 99.999.
        let permyriad = permyriad as u16;
        (is_exact && PercentileTarget::PERMYRIADS.contains(&permyriad)).then_some(permyriad)
    }

    /// Number of requests, of this total, that may take longer: those above the percentile, with
    /// the rounding of histograms.
    pub(super) fn allowed_late(&self, requests: u64) -> u64 {
        // Rounded up: the percentile itself must lie within the time.
        let within = (requests as f64 * self.percentile / 100.0).ceil();
        requests.saturating_sub(within as u64)
    }

    pub(super) fn share(&self) -> f64 {
        self.percentile / 100.0
    }

    /// Minimum number of requests for a meaningful percentile: ten must lie above it.
    pub(super) fn min_requests(&self) -> u64 {
        (10.0 / (1.0 - self.share()) - 1e-6).ceil() as u64
    }

    /// Formats the percentile, such as `p99`.
    pub(super) fn name(&self) -> String {
        format!("p{}", self.percentile)
    }
}

impl FromStr for LatencyTarget {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let form = "is not of the form pPERCENT=TIME, such as p99=10ms or p99.9=50ms";
        let (name, time) = text.split_once('=').ok_or(form)?;
        let percent = name.strip_prefix(['p', 'P']).ok_or(form)?;
        let digits = percent.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        let percentile: f64 = percent.parse().map_err(|_| form)?;
        if !(digits && percentile > 0.0 && percentile <= 99.999) {
            return Err(format!("{percent} is no percentile above 0 and up to 99.999"));
        }
        let time: Duration = settings::duration(time).map_err(|rule| format!("{time} {rule}"))?;
        let time_ns = u64::try_from(time.as_nanos()).map_err(|_| "is longer than a trace can be")?;
        Ok(Self { percentile, time_ns })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn latency_target_is_parsed() {
        assert_eq!("p99=10ms".parse(), Ok(LatencyTarget::new(99.0, 10_000_000)));
        assert_eq!("p99.9=0".parse(), Ok(LatencyTarget::new(99.9, 0)));
        for (text, why) in [
            ("p99", "is not of the form"),
            ("99=1ms", "is not of the form"),
            ("p=1ms", "is not of the form"),
            ("p100=1ms", "100 is no percentile"),
            ("p0=1ms", "0 is no percentile"),
            ("pinf=1ms", "inf is no percentile"),
            ("p1e1=1ms", "1e1 is no percentile"),
            ("p99=fast", "fast is not a duration"),
        ] {
            let error = text.parse::<LatencyTarget>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
        }
    }

    #[test]
    fn p99_allows_one_late_request_in_a_hundred() {
        let target = LatencyTarget::new(99.0, 0);
        assert_eq!(
            [1, 99, 100, 199, 200, 1000].map(|requests| target.allowed_late(requests)),
            [0, 0, 1, 1, 2, 10]
        );
        let permyriad = |percentile| LatencyTarget::new(percentile, 0).permyriad();
        assert_eq!(
            [99.0, 99.9, 50.0, 49.0, 99.999, 99.99].map(permyriad),
            [Some(9900), Some(9990), Some(5000), None, None, Some(9999)]
        );
        assert_eq!((target.min_requests(), LatencyTarget::new(99.9, 0).min_requests()), (1000, 10_000));
    }
}
