//! Rate limit for front ends that repeatedly connect without using the disk. A front end that
//! cannot be served reconnects every second while its machine runs, and a log line each time adds
//! nothing.

use std::sync::{Mutex, MutexGuard, PoisonError};

use policy::time::{Duration, Instant};

/// Interval at which the same reason is logged again.
const REPEAT_INTERVAL: Duration = Duration::from_secs(600);

/// State of one export.
#[derive(Debug, Default)]
pub(super) struct FutileAttempts(Mutex<Option<LastAttempt>>);

/// The attempt that was logged last.
#[derive(Debug)]
struct LastAttempt {
    process: Option<u32>,
    why: String,
    logged_at: Instant,
    suppressed: u64,
}

impl FutileAttempts {
    /// True if an attempt of this process was logged within [`REPEAT_INTERVAL`].
    pub(super) fn was_logged_recently(&self, process: Option<u32>, now: Instant) -> bool {
        self.last().as_ref().is_some_and(|last| last.process == process && last.is_fresh(now))
    }

    /// Records an attempt that did not use the disk; `unseen` similar ones were already omitted.
    /// Returns the number of omitted lines if this attempt is to be logged.
    pub(super) fn record_attempt(
        &self,
        process: Option<u32>,
        why: &str,
        unseen: u64,
        now: Instant,
    ) -> Option<u64> {
        let mut last = self.last();
        let same = last.as_mut().filter(|last| last.process == process && last.why == why);
        let suppressed = match same {
            Some(same) if same.is_fresh(now) => {
                // Counted, so that the next line of the same reason reports the number of omitted
                // ones.
                same.suppressed += 1 + unseen;
                return None;
            }
            Some(same) => same.suppressed + unseen,
            None => unseen,
        };
        *last = Some(LastAttempt { process, why: why.to_owned(), logged_at: now, suppressed: 0 });
        Some(suppressed)
    }

    /// Resets the state when a front end uses the disk, so that the next failure is logged.
    pub(super) fn forget(&self) {
        *self.last() = None;
    }

    fn last(&self) -> MutexGuard<'_, Option<LastAttempt>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl LastAttempt {
    fn is_fresh(&self, now: Instant) -> bool {
        now - self.logged_at < REPEAT_INTERVAL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_reasons_are_rate_limited_and_new_ones_are_logged() {
        let attempts = FutileAttempts::default();
        let at = |seconds: u64| Instant::from_nanos(seconds * 1_000_000_000);
        let record =
            |process, why, unseen, seconds| attempts.record_attempt(Some(process), why, unseen, at(seconds));
        assert!(!attempts.was_logged_recently(Some(1), at(0)));
        assert_eq!(
            [record(1, "a", 0, 0), record(1, "a", 0, 1), record(1, "a", 2, 599)],
            [Some(0), None, None]
        );
        assert!(
            attempts.was_logged_recently(Some(1), at(599)) && !attempts.was_logged_recently(Some(2), at(599))
        );
        assert!(!attempts.was_logged_recently(Some(1), at(600)));
        assert_eq!([record(1, "a", 1, 600), record(1, "a", 0, 601)], [Some(5), None]);
        assert_eq!(record(1, "b", 0, 602), Some(0), "another reason");
        assert_eq!(record(2, "b", 0, 603), Some(0), "another machine");
        attempts.forget();
        assert!(!attempts.was_logged_recently(Some(2), at(604)));
        assert_eq!(record(2, "b", 0, 604), Some(0), "it has used the disk meanwhile");
    }
}
