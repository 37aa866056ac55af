//! Buckets of a limit divided over hosts: capacity moves between them, and none is created.
//!
//! ```text
//!     ▕       ▏                    ▕▒▒▒▒▒▒▒▏ new capacity comes filled, except the
//!     ▕       ▏ ─┬─ capacity       ▕       ▏ credit that another host gave up
//!     ▕▓level▓▏  │                 ▕       ▏
//!     ▕▓▓▓▓▓▓▓▏      larger ──►    ▕▓level▓▏       smaller ──►  capacity that does not fit is given up
//! ```
//!
//! The free capacity of all parts together therefore grows by leaks only and never exceeds the
//! burst of the cluster-wide limit. A new quota grants no burst: its buckets start full.

use super::{LEVEL_SCALE, LeakyBucket, NodeBuckets};
use crate::throttle::enforcement::LimitScale;
use crate::throttle::limits::{LimitKind, Limits};

impl LeakyBucket {
    /// Fills capacity beyond that of `before` plus `credit`; returns the capacity given up. In
    /// billionths of a unit.
    fn fill_new_capacity(&mut self, before: &Self, credit: u128) -> u128 {
        // Negative if a request has overrun the bucket: that excess remains. At most 10¹⁸ × 10⁹.
        let room = |rate: u64, size: u128, level: u128| {
            if rate == 0 { 0 } else { size.cast_signed().saturating_sub(level.cast_signed()) }
        };
        let room_before = room(before.rate, before.size, before.level).saturating_add(credit.cast_signed());
        let room_now = room(self.rate, self.size, self.level);
        self.level += room_now.saturating_sub(room_before).max(0).cast_unsigned();
        // The burst bucket holds only a tenth of a second at its rate, so its capacity is not
        // moved.
        let burst_room_before = room(before.burst_rate, before.burst_size, before.burst_level);
        let burst_room_now = room(self.burst_rate, self.burst_size, self.burst_level);
        self.burst_level += burst_room_now.saturating_sub(burst_room_before).max(0).cast_unsigned();
        room_before.saturating_sub(room_now).max(0).cast_unsigned()
    }
}

impl NodeBuckets {
    /// As [`NodeBuckets::change`], for a changed quota of a limit that is divided over hosts. Free
    /// capacity is added only by `credit`; returns the capacity given up. Both in whole units.
    pub(in crate::throttle) fn set_quota(&mut self, limits: &Limits, credit: [u64; 6]) -> [u64; 6] {
        let before = self.buckets;
        self.change(limits, LimitScale::ONE);
        let given_up = LimitKind::ALL.map(|kind| {
            let at = kind.index();
            let credited =
                self.buckets[at].fill_new_capacity(&before[at], u128::from(credit[at]) * LEVEL_SCALE);
            u64::try_from(credited / LEVEL_SCALE).unwrap_or(u64::MAX)
        });
        self.restart_trend();
        given_up
    }
}
