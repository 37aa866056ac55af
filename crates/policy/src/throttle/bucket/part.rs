//! Buckets of a limit that is divided over hosts: room moves between them, and none arises.
//!
//! ```text
//!     ▕       ▏                    ▕▒▒▒▒▒▒▒▏ what is new comes full, but for the room
//!     ▕       ▏ ─┬─ room           ▕       ▏ that another host gave up for it
//!     ▕▓level▓▏  │                 ▕       ▏
//!     ▕▓▓▓▓▓▓▓▏      larger ──►    ▕▓level▓▏       smaller ──►  what no longer fits is given up
//! ```
//!
//! So the room of all parts together grows by what leaks alone, and is never above the whole
//! limit's burst. Never gives a burst to a part that was made anew: it comes full.

use super::{Bucket, Buckets, UNIT};
use crate::throttle::enforcement::Scale;
use crate::throttle::limits::{LimitKind, Limits};

impl Bucket {
    /// Fills what is more room than there was `before` and than `credit`; returns the room that is
    /// lost; both in billionths of a unit.
    fn confine(&mut self, before: &Self, credit: u128) -> u128 {
        // Below 0 where a request made the bucket run over: that is owed still. At most 10¹⁸ × 10⁹.
        let room = |rate: u64, size: u128, level: u128| {
            if rate == 0 { 0 } else { size.cast_signed().saturating_sub(level.cast_signed()) }
        };
        let had = room(before.rate, before.size, before.level).saturating_add(credit.cast_signed());
        let has = room(self.rate, self.size, self.level);
        self.level += has.saturating_sub(had).max(0).cast_unsigned();
        // The burst's own rate is a tenth of a second's worth: not handed over.
        let burst_had = room(before.burst_rate, before.burst_size, before.burst_level);
        let burst_has = room(self.burst_rate, self.burst_size, self.burst_level);
        self.burst_level += burst_has.saturating_sub(burst_had).max(0).cast_unsigned();
        had.saturating_sub(has).max(0).cast_unsigned()
    }
}

impl Buckets {
    /// As [`Buckets::change`], for another part of a limit: room, in whole units, comes with
    /// `credit` alone, and what is given up is returned.
    pub(in crate::throttle) fn divide(&mut self, limits: &Limits, credit: [u64; 6]) -> [u64; 6] {
        let before = self.buckets;
        self.change(limits, Scale::ONE);
        LimitKind::ALL.map(|kind| {
            let at = kind.index();
            let given = self.buckets[at].confine(&before[at], u128::from(credit[at]) * UNIT);
            u64::try_from(given / UNIT).unwrap_or(u64::MAX)
        })
    }
}
