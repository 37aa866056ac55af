//! Limits while a quota by volume is used up.
//!
//! ```text
//!   limits ──┬─ total ─────────────► at most the rate
//!            └─ of one direction ──► the other one gets the rest of the rate
//! ```
//!
//! Never counts bytes: see [`volume_quota`](crate::volume_quota).

use super::limits::{LimitKind, Limits, RateLimit};

impl Limits {
    /// Limits while a quota is used up, from those that hold otherwise, all of them plain rates:
    /// reads and writes together get at most `rate_bps` bytes per second, or `reserved_bps` if the
    /// reservations are higher, since they hold at all times. Valid if these limits are. Without a
    /// rate, these limits.
    ///
    /// A limit of one direction below that rate stays in force, and the other direction gets the
    /// rest: a total limit beside it is invalid.
    #[must_use]
    pub fn with_used_up_rate(&self, rate_bps: u64, reserved_bps: u64) -> Self {
        if rate_bps == 0 {
            return *self;
        }
        let rate = rate_bps.max(reserved_bps);
        let mut limited = *self;
        let [total, read, write] =
            [LimitKind::BpsTotal, LimitKind::BpsRead, LimitKind::BpsWrite].map(|kind| self.limit(kind));
        let lower = |limit: RateLimit| (limit.rate > 0 && limit.rate < rate).then_some(limit.rate);
        let plain = |rate| RateLimit { rate, ..RateLimit::default() };
        let (of_total, of_read, of_write) = match (lower(read), lower(write)) {
            (None, None) if lower(total).is_some() => {
                let burst_rate = total.burst_rate.min(rate);
                (RateLimit { burst_rate, ..total }, plain(0), plain(0))
            }
            (None, None) => (plain(rate), plain(0), plain(0)),
            (Some(read), None) => (plain(0), plain(read), plain(rate - read)),
            (None, Some(write)) => (plain(0), plain(rate - write), plain(write)),
            (Some(read), Some(write)) if read + write <= rate => (plain(0), plain(read), plain(write)),
            (Some(read), Some(write)) => {
                // In proportion. Each is at least 1, because a rate of 0 is no limit.
                let share = u128::from(rate) * u128::from(read) / u128::from(read + write);
                let read = u64::try_from(share).unwrap_or(rate).clamp(1, rate.saturating_sub(1).max(1));
                (plain(0), plain(read), plain((rate - read).max(1)))
            }
        };
        *limited.limit_mut(LimitKind::BpsTotal) = of_total;
        *limited.limit_mut(LimitKind::BpsRead) = of_read;
        *limited.limit_mut(LimitKind::BpsWrite) = of_write;
        if LimitKind::ALL.iter().all(|&kind| limited.limit(kind).burst_rate == 0) {
            // `burst-for` without a burst is invalid.
            LimitKind::ALL.iter().for_each(|&kind| limited.limit_mut(kind).burst_for_s = 0);
        }
        limited
    }
}
