//! Busy polling: how long a queue polls its ring before it sleeps. A kick costs the guest a trap
//! and this process a wake-up, tens of microseconds each on a virtual machine; polling costs a
//! processor that other threads may need, the guest's among them.
//!
//! The queue polls only while none of its requests is in flight, and only if the last sleep was so
//! short that polling would have found the next request. After polling without success it skips
//! polling: once after the first failure, twice after the second, then four times, and so on. A
//! driver that needs this processor never submits while the queue polls, so polling soon stops.
//!
//! A value: no clock, no thread.

use policy::time::{Duration, Instant};

/// Longest time of polling. A wake-up takes about as long on a virtual machine; QEMU's
/// `poll-max-ns` is half of it.
const MAX_POLL_TIME: Duration = Duration::from_micros(64);
/// Largest number of sleeps without polling after repeated failures. With the cheapest sleeps and
/// wake-ups, polling then takes 2 % of the time.
const MAX_SKIPPED: u32 = 1024;

#[derive(Debug, Default)]
pub(super) struct BusyPolling {
    /// True if the last sleep was so short that polling is worthwhile.
    is_worthwhile: bool,
    since: Option<Instant>,
    /// Time of the last poll.
    last_poll: Option<Instant>,
    /// `penalty`: number of sleeps without polling after the next failure; `skipped`: number left.
    penalty: u32,
    skipped: u32,
}

impl BusyPolling {
    /// Records that the ring had a request, or that a request has ended.
    pub(super) fn record_progress(&mut self) {
        if self.since.take().is_some() {
            self.penalty = 0;
        }
        self.last_poll = None;
    }

    /// Records that nothing was found; true to poll again, false to sleep.
    pub(super) fn should_poll(&mut self, now: Instant) -> bool {
        if !self.is_worthwhile {
            return false;
        }
        if self.since.is_none() && self.skipped > 0 {
            self.skipped -= 1;
            return false;
        }
        let since = *self.since.get_or_insert(now);
        // An unchanged clock, as in simulation, must not poll forever.
        if now - since < MAX_POLL_TIME && self.last_poll.replace(now) != Some(now) {
            return true;
        }
        (self.since, self.last_poll) = (None, None);
        // Exponential backoff: failures cost processor time that the guest may need.
        self.penalty = (self.penalty * 2).clamp(1, MAX_SKIPPED);
        self.skipped = self.penalty;
        false
    }

    /// Records a wake-up after a sleep of this duration.
    pub(super) fn record_sleep(&mut self, slept: Duration) {
        self.is_worthwhile = slept <= MAX_POLL_TIME;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const STEP: Duration = Duration::from_micros(1);

    /// Polls until it sleeps; returns the number of polls, each of which advances `now` by
    /// [`STEP`].
    fn count_polls(polling: &mut BusyPolling, now: &mut Instant) -> u64 {
        let mut polls = 0;
        while polling.should_poll(*now) {
            polls += 1;
            *now += STEP;
        }
        polls
    }

    #[test]
    fn polling_starts_only_after_a_short_sleep() {
        let (mut polling, mut now) = (BusyPolling::default(), Instant::ZERO);
        assert_eq!(count_polls(&mut polling, &mut now), 0, "nothing is known");
        polling.record_sleep(MAX_POLL_TIME + STEP);
        assert_eq!(count_polls(&mut polling, &mut now), 0, "it would have looked in vain");
        polling.record_sleep(MAX_POLL_TIME);
        assert_eq!(count_polls(&mut polling, &mut now), 64);
    }

    #[test]
    fn polling_continues_while_it_finds_requests() {
        let (mut polling, mut now) = (BusyPolling::default(), Instant::ZERO);
        polling.record_sleep(STEP);
        for _ in 0..100 {
            for _ in 0..63 {
                assert!(polling.should_poll(now));
                now += STEP;
            }
            polling.record_progress();
        }
    }

    #[test]
    fn fruitless_polling_backs_off_until_a_success() {
        let (mut polling, mut now) = (BusyPolling::default(), Instant::ZERO);
        polling.record_sleep(STEP);
        let mut skipped_sleeps = Vec::new();
        let mut slept = 0;
        while skipped_sleeps.len() < 14 {
            match count_polls(&mut polling, &mut now) {
                0 => slept += 1,
                _ => skipped_sleeps.push(std::mem::take(&mut slept)),
            }
        }
        assert_eq!(skipped_sleeps, [0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 1024, 1024]);
        for _ in 0..1024 {
            assert!(!polling.should_poll(now));
        }
        assert!(polling.should_poll(now));
        polling.record_progress();
        assert_eq!(count_polls(&mut polling, &mut now), 64, "it pays again");
        assert_eq!(count_polls(&mut polling, &mut now), 0);
        assert_eq!(count_polls(&mut polling, &mut now), 64);
    }
}
