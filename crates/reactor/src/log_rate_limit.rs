//! Rate-limited logs: for lines that a client could cause by the thousand, one line per second for
//! each cause, with the number of suppressed ones.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use policy::time::Instant;

const SECOND_NS: u64 = 1_000_000_000;

/// Rate limit for one cause of one disk, file or server.
#[derive(Debug, Default)]
pub struct LogRateLimit {
    /// Time of the next permitted line.
    next_ns: AtomicU64,
    suppressed: AtomicU64,
}

impl LogRateLimit {
    /// If a line may be logged now, returns the number of lines suppressed since the last one;
    /// otherwise counts this one as suppressed and returns `None`.
    pub fn try_log(&self, now: Instant) -> Option<u64> {
        self.try_log_burst(now, 1)
    }

    /// As [`LogRateLimit::try_log`], with a burst of `at_once` lines before the rate of one per
    /// second applies: for rare events that should be logged in full.
    pub fn try_log_burst(&self, now: Instant, at_once: u64) -> Option<u64> {
        let (now_ns, next_ns) = (now.as_nanos(), self.next_ns.load(Relaxed));
        // A generic cell rate limiter: `next_ns` advances by a second for each line, and may lead
        // the present by `at_once` seconds. One of several concurrent callers wins; the rest are
        // suppressed.
        let after = next_ns.max(now_ns) + SECOND_NS;
        let is_permitted = now_ns + at_once * SECOND_NS >= after
            && self.next_ns.compare_exchange(next_ns, after, Relaxed, Relaxed).is_ok();
        if is_permitted {
            return Some(self.suppressed.swap(0, Relaxed));
        }
        self.suppressed.fetch_add(1, Relaxed);
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_second_reports_suppressed_count() {
        let rate_limit = LogRateLimit::default();
        let at = |ms: u64| rate_limit.try_log(Instant::from_nanos(ms * 1_000_000));
        assert_eq!((at(0), at(1), at(999)), (Some(0), None, None));
        assert_eq!((at(1000), at(1500), at(5000)), (Some(2), None, Some(1)));
    }

    #[test]
    fn burst_is_logged_in_full() {
        let rate_limit = LogRateLimit::default();
        let at = |ms: u64| rate_limit.try_log_burst(Instant::from_nanos(ms * 1_000_000), 3);
        assert_eq!(
            [at(5000), at(5000), at(5001), at(5002), at(5999)],
            [Some(0), Some(0), Some(0), None, None]
        );
        assert_eq!([at(6000), at(6001), at(9000), at(9000)], [Some(2), None, Some(1), Some(0)]);
    }
}
