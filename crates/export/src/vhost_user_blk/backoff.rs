//! Pauses of a ring in which polling found nothing.
//!
//! A driver without a kick is polled after each pause. A driver with a kick is served at once; only
//! kicks that repeatedly bring no request are delayed.
//!
//! A value: no clock, no thread.

use policy::time::Duration;

/// First pause; doubled after each poll without a request.
const FIRST: Duration = Duration::from_micros(200);
const MAX_IDLE: Duration = Duration::from_millis(10);
/// Kicks without a request that are not delayed. One or two are usual: the request was found before
/// its kick arrived.
const FREE_KICKS: u32 = 16;

#[derive(Debug, Default)]
pub(super) struct IdleBackoff {
    /// Number of requests taken until the last poll.
    taken: Option<u64>,
    /// Polls without a request since then.
    fruitless: u32,
}

impl IdleBackoff {
    /// Pause before the next poll, or before the next kick is handled. `taken`: number of requests
    /// taken so far.
    pub(super) fn pause(&mut self, taken: u64, has_kick: bool) -> Duration {
        let found = self.taken.replace(taken) != Some(taken);
        // Any progress resets the pause: a driver that submits is polled closely.
        self.fruitless = if found { 0 } else { self.fruitless.saturating_add(1) };
        match (has_kick, self.fruitless.checked_sub(FREE_KICKS)) {
            (true, None) => Duration::ZERO,
            (true, Some(attempts)) => doubled(attempts),
            (false, _) => doubled(self.fruitless),
        }
    }
}

fn doubled(times: u32) -> Duration {
    // 200 µs doubled six times exceeds the longest pause.
    (FIRST * (1 << times.min(6))).min(MAX_IDLE)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses_us(idle: &mut IdleBackoff, taken: u64, has_kick: bool, count: usize) -> Vec<u128> {
        (0..count).map(|_| idle.pause(taken, has_kick).as_micros()).collect()
    }

    #[test]
    fn pauses_double_until_a_request_is_found() {
        let mut idle = IdleBackoff::default();
        let doubled = [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000];
        assert_eq!(pauses_us(&mut idle, 0, false, 8), doubled);
        assert_eq!(pauses_us(&mut idle, 1, false, 8), doubled);
    }

    #[test]
    fn kicks_are_delayed_only_after_many_empty_ones() {
        let mut idle = IdleBackoff::default();
        let mut expected = vec![0; 16];
        expected.extend([200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(pauses_us(&mut idle, 7, true, 24), expected);
        assert_eq!(pauses_us(&mut idle, 8, true, 24), expected);
    }

    #[test]
    fn kicks_with_requests_are_never_delayed() {
        let mut idle = IdleBackoff::default();
        assert!((0..100).all(|kick| idle.pause(kick / 15, true) == Duration::ZERO));
    }
}
