//! How long a ring is left alone in which looking found nothing.
//!
//! Where the driver has no kick, the ring is looked at after each pause. Where it has one, that is
//! heard at once; only a kick that is rung without end, and for nothing, has to wait.
//!
//! A value: no clock, no thread.

use policy::time::Duration;

/// The first pause. Each look in vain doubles it.
const FIRST: Duration = Duration::from_micros(200);
const LONGEST: Duration = Duration::from_millis(10);
/// Kicks for nothing that are heard at once. One or two are usual: the request was found before.
const FREE_KICKS: u32 = 16;

#[derive(Debug, Default)]
pub(super) struct Idle {
    /// Requests taken in all, at the last look.
    taken: Option<u64>,
    /// Looks since then that found nothing.
    vain: u32,
}

impl Idle {
    /// The pause before the next look, or before the kick is heard again. `taken`: requests that
    /// were taken in all so far.
    pub(super) fn pause(&mut self, taken: u64, has_kick: bool) -> Duration {
        let found = self.taken.replace(taken) != Some(taken);
        self.vain = if found { 0 } else { self.vain.saturating_add(1) };
        match (has_kick, self.vain.checked_sub(FREE_KICKS)) {
            (true, None) => Duration::ZERO,
            (true, Some(vain)) => doubled(vain),
            (false, _) => doubled(self.vain),
        }
    }
}

fn doubled(times: u32) -> Duration {
    // 200 µs doubled six times is longer than the longest.
    (FIRST * (1 << times.min(6))).min(LONGEST)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pauses_us(idle: &mut Idle, taken: u64, has_kick: bool, count: usize) -> Vec<u128> {
        (0..count).map(|_| idle.pause(taken, has_kick).as_micros()).collect()
    }

    #[test]
    fn without_a_kick_pauses_double_until_something_is_found() {
        let mut idle = Idle::default();
        let doubled = [200, 400, 800, 1600, 3200, 6400, 10_000, 10_000];
        assert_eq!(pauses_us(&mut idle, 0, false, 8), doubled);
        assert_eq!(pauses_us(&mut idle, 1, false, 8), doubled);
    }

    #[test]
    fn a_kick_waits_only_after_many_for_nothing() {
        let mut idle = Idle::default();
        let mut expected = vec![0; 16];
        expected.extend([200, 400, 800, 1600, 3200, 6400, 10_000, 10_000]);
        assert_eq!(pauses_us(&mut idle, 7, true, 24), expected);
        assert_eq!(pauses_us(&mut idle, 8, true, 24), expected);
    }

    #[test]
    fn kicks_that_bring_something_never_wait() {
        let mut idle = Idle::default();
        assert!((0..100).all(|kick| idle.pause(kick / 15, true) == Duration::ZERO));
    }
}
