//! The burst of a limit: the units that it admits and how long it lasts.
//!
//! The bucket leaks at the rate while a burst fills it, so a burst lasts longer than the burst
//! length. `burst-for` gives the duration instead, from which the capacity follows. All displays of
//! a duration use [`RateLimit::full_burst`].

use super::limits::RateLimit;

/// Resolution of levels and capacities: parts of a unit.
pub(super) const LEVEL_SCALE: u128 = 1_000_000_000;

/// Units of a tenth of a second at this rate, in billionths.
pub(super) const fn tenth_of_a_second(rate: u64) -> u128 {
    rate as u128 * (LEVEL_SCALE / 10)
}

/// A burst after a time without requests that was long enough to empty the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FullBurst {
    /// A burst length of one second without `burst-for`: the bucket admits this many units at once,
    /// as in QEMU.
    AtOnce {
        /// Operations or bytes.
        units: u64,
    },
    /// Requests are admitted at the burst rate for this time, and then at the rate.
    Lasts {
        /// Duration in milliseconds, rounded: `capacity ÷ (burst_rate − rate)`, in which the
        /// capacity is `burst_length_s · burst_rate`, or follows from `burst_for_s`.
        ms: u64,
    },
    /// The burst rate equals the rate, so the bucket does not fill.
    Endless,
}

impl FullBurst {
    /// Duration in nanoseconds; `None` if the burst is admitted at once or does not end.
    pub const fn duration_ns(self) -> Option<u64> {
        match self {
            Self::Lasts { ms } => Some(ms.saturating_mul(1_000_000)),
            Self::AtOnce { .. } | Self::Endless => None,
        }
    }
}

impl RateLimit {
    /// Capacity of the bucket in billionths of a unit; 0 without a rate.
    pub const fn capacity_billionths(&self) -> u128 {
        let Self { rate, burst_rate, burst_length_s, burst_for_s } = *self;
        if rate == 0 {
            return 0;
        }
        // A tenth of a second at the rate, as in QEMU.
        let without_burst = tenth_of_a_second(rate);
        if burst_rate == 0 {
            return without_burst;
        }
        if burst_for_s == 0 {
            return burst_rate as u128 * burst_length_s as u128 * LEVEL_SCALE;
        }
        // The bucket fills at the surplus. If that is small, a burst must not admit less than none.
        let with_burst = burst_rate.saturating_sub(rate) as u128 * burst_for_s as u128 * LEVEL_SCALE;
        if with_burst > without_burst { with_burst } else { without_burst }
    }

    /// Capacity of the bucket in units.
    pub fn capacity(&self) -> f64 {
        self.capacity_billionths() as f64 / LEVEL_SCALE as f64
    }

    /// True if a second bucket limits the rate of the burst. Otherwise a burst is admitted at once.
    pub const fn has_burst_rate_bucket(&self) -> bool {
        self.burst_rate > 0 && (self.burst_length_s > 1 || self.burst_for_s > 0)
    }

    /// Burst length in seconds with at least this capacity, for QEMU's interfaces, which have no
    /// `burst-for`.
    pub const fn equivalent_length_s(&self) -> u64 {
        if self.burst_for_s == 0 || self.rate == 0 || self.burst_rate == 0 {
            return self.burst_length_s;
        }
        // Fits: at most `burst_for_s` or, for a small surplus, one second.
        self.capacity_billionths().div_ceil(self.burst_rate as u128 * LEVEL_SCALE) as u64
    }

    /// The burst of an empty bucket; `None` without a burst rate.
    pub const fn full_burst(&self) -> Option<FullBurst> {
        if self.rate == 0 || self.burst_rate == 0 {
            return None;
        }
        if !self.has_burst_rate_bucket() {
            return Some(FullBurst::AtOnce { units: self.burst_rate });
        }
        if self.burst_rate <= self.rate {
            return Some(FullBurst::Endless);
        }
        let surplus = (self.burst_rate - self.rate) as u128 * (LEVEL_SCALE / 1000);
        let ms = (self.capacity_billionths() + surplus / 2) / surplus;
        // Only an invalid limit saturates: the capacity is at most `MAX_VALUE`.
        Some(FullBurst::Lasts { ms: if ms > u64::MAX as u128 { u64::MAX } else { ms as u64 } })
    }
}

/// The part of a burst that is available: the free part of a limit's bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BurstBalance {
    /// The burst of a full balance.
    pub full_burst: FullBurst,
    /// Free part of the capacity in millionths: 1,000,000 after a long idle time, 0 when requests
    /// are admitted at the rate only.
    pub free_ppm: u32,
    /// Time in nanoseconds after which the balance is 0 if requests are admitted as in the last two
    /// to four seconds. `None` while the balance does not decrease, or if it is too early to tell.
    pub used_up_in_ns: Option<u64>,
    /// Time in nanoseconds after which the balance is full if nothing is admitted.
    pub full_in_ns: u64,
}

impl BurstBalance {
    /// Free part of the capacity, 0 to 1.
    pub fn ratio(&self) -> f64 {
        f64::from(self.free_ppm) / f64::from(WHOLE_PPM)
    }
}

/// A full balance, in millionths.
pub(super) const WHOLE_PPM: u32 = 1_000_000;
