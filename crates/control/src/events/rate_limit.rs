//! Rate limit with a burst (a leaky bucket); events beyond it are counted.
//!
//! Never reads a clock: time is an argument.

use std::{collections::HashMap, sync::Arc};

use policy::time::Instant;

const SECOND_NS: u64 = 1_000_000_000;

#[derive(Clone, Copy, Debug)]
pub(super) struct EventRateLimit {
    burst: u64,
    /// Interval between two events at the sustained rate.
    interval_ns: u64,
    /// Level of the bucket, as the time until it is empty.
    level_ns: u64,
    at: Instant,
    dropped: u64,
}

impl EventRateLimit {
    pub(super) const fn new(burst: u64, per_second: u64) -> Self {
        Self { burst, interval_ns: SECOND_NS / per_second, level_ns: 0, at: Instant::ZERO, dropped: 0 }
    }

    /// Admits one event and returns the number of events dropped since the last admitted one;
    /// `None` drops and counts this event.
    pub(super) fn admit(&mut self, now: Instant) -> Option<u64> {
        self.admit_within(self.burst, now)
    }

    /// Level of the bucket at `now`.
    fn level_at(&self, now: Instant) -> u64 {
        self.level_ns.saturating_sub(now.nanos_since(self.at))
    }

    /// As [`EventRateLimit::admit`], with a smaller burst.
    fn admit_within(&mut self, burst: u64, now: Instant) -> Option<u64> {
        self.level_ns = self.level_at(now);
        // Calls on several threads may be slightly out of order; the clock of the bucket never runs
        // backwards.
        self.at = self.at.max(now);
        // One event must fit: at `burst - 1` intervals the level is full after this one.
        if self.level_ns > (burst - 1) * self.interval_ns {
            self.dropped += 1;
            return None;
        }
        self.level_ns += self.interval_ns;
        Some(std::mem::take(&mut self.dropped))
    }
}

/// Maximum number of disks with a share. Further disks have no share while all of these are active.
const MAX_SHARES: usize = 4096;
/// Divisors of burst and rate for the share of one disk.
const SHARE_BURST_DIVISOR: u64 = 8;
const SHARE_RATE_DIVISOR: u64 = 10;

/// Rate limit in which each disk has a share. Beyond its share a disk may use only half of the
/// common burst, so that other disks keep the rest.
#[derive(Clone, Debug)]
pub(super) struct SharedEventRateLimit {
    all: EventRateLimit,
    shares: HashMap<Arc<str>, EventRateLimit>,
}

impl SharedEventRateLimit {
    pub(super) fn new(burst: u64, per_second: u64) -> Self {
        Self { all: EventRateLimit::new(burst, per_second), shares: HashMap::new() }
    }

    /// As [`EventRateLimit::admit`], for an event about this disk, or about none.
    pub(super) fn admit(&mut self, disk: Option<&Arc<str>>, now: Instant) -> Option<u64> {
        let burst = self.all.burst;
        match disk.is_none_or(|disk| self.admit_to_share(disk, now)) {
            true => self.all.admit(now),
            false => self.all.admit_within((burst / 2).max(1), now),
        }
    }

    fn admit_to_share(&mut self, disk: &Arc<str>, now: Instant) -> bool {
        if !self.shares.contains_key(disk) {
            if self.shares.len() >= MAX_SHARES {
                // Only then, and not on every call: the scan is linear.
                self.shares.retain(|_, share| share.level_at(now) > 0);
            }
            if self.shares.len() >= MAX_SHARES {
                return false;
            }
            let EventRateLimit { burst, interval_ns: each_ns, .. } = self.all;
            let (burst, each_ns) = ((burst / SHARE_BURST_DIVISOR).max(1), each_ns * SHARE_RATE_DIVISOR);
            let share = EventRateLimit { burst, interval_ns: each_ns, level_ns: 0, at: now, dropped: 0 };
            self.shares.insert(Arc::clone(disk), share);
        }
        // A new share starts empty, so a disk has its full burst at once.
        self.shares.get_mut(disk).is_some_and(|share| share.admit(now).is_some())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_disk_leaves_others_their_share() {
        let mut rate_limit = SharedEventRateLimit::new(512, 10);
        let (noisy, quiet) = (Arc::from("noisy"), Arc::from("quiet"));
        let at = |ms: u64| Instant::from_nanos(ms * 1_000_000);
        let mut admitted = [0_u64; 2];
        // One hour: one guest reconnects every millisecond, another every ten seconds.
        for ms in 0..3_600_000 {
            admitted[0] += u64::from(rate_limit.admit(Some(&noisy), at(ms)).is_some());
            if ms % 10_000 == 5000 {
                admitted[1] += u64::from(rate_limit.admit(Some(&quiet), at(ms)).is_some());
            }
        }
        assert_eq!(admitted[1], 360, "all of the quiet one's");
        assert!((30_000..37_000).contains(&admitted[0]), "what is left is not wasted: {admitted:?}");
    }

    #[test]
    fn number_of_shares_is_bounded() {
        let mut rate_limit = SharedEventRateLimit::new(512, 10);
        let now = Instant::from_nanos(1);
        for disk in 0..3 * MAX_SHARES {
            rate_limit.admit(Some(&disk.to_string().into()), now);
        }
        assert_eq!(rate_limit.shares.len(), MAX_SHARES);
        // By then all shares are empty, and the next disk evicts them.
        let later = Instant::from_nanos(1000 * SECOND_NS);
        assert!(rate_limit.admit(Some(&"late".into()), later).is_some());
        assert_eq!(rate_limit.shares.len(), 1, "of those that are silent nothing is kept");
    }

    #[test]
    fn burst_then_sustained_rate() {
        let mut rate_limit = EventRateLimit::new(3, 10);
        let mut at = |ms: u64| rate_limit.admit(Instant::from_nanos(ms * 1_000_000));
        assert_eq!(
            [at(1000), at(1000), at(1000), at(1000), at(1050)],
            [Some(0), Some(0), Some(0), None, None]
        );
        assert_eq!([at(1100), at(1150), at(1200)], [Some(2), None, Some(1)]);
        assert_eq!([at(9000), at(9000), at(9000), at(9000)], [Some(0), Some(0), Some(0), None]);
    }
}
