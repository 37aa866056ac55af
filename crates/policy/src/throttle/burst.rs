//! The burst of a limit: the units that it admits and how long it lasts.
//!
//! The bucket leaks at the rate while a burst fills it, so a burst lasts longer than the burst
//! length. All displays of a duration use [`RateLimit::full_burst`].

use super::limits::RateLimit;

/// A burst after a time without requests that was long enough to empty the bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FullBurst {
    /// A burst length of one second: the bucket admits this many units at once, as in QEMU.
    AtOnce {
        /// Operations or bytes.
        units: u64,
    },
    /// Requests are admitted at the burst rate for this time, and then at the rate.
    Lasts {
        /// Duration in milliseconds, rounded: `burst_length_s · burst_rate ÷ (burst_rate − rate)`.
        ms: u64,
    },
    /// The burst rate equals the rate, so the bucket never fills.
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
    /// The burst of an empty bucket; `None` without a burst rate.
    pub const fn full_burst(&self) -> Option<FullBurst> {
        if self.rate == 0 || self.burst_rate == 0 {
            return None;
        }
        if self.burst_length_s <= 1 {
            return Some(FullBurst::AtOnce { units: self.burst_rate });
        }
        if self.burst_rate <= self.rate {
            return Some(FullBurst::Endless);
        }
        let surplus_rate = (self.burst_rate - self.rate) as u128;
        let burst_units = self.burst_length_s as u128 * self.burst_rate as u128 * 1000;
        let ms = (burst_units + surplus_rate / 2) / surplus_rate;
        // Only an invalid limit saturates: burst rate × burst length is at most `MAX_VALUE`.
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
