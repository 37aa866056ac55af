//! Instants as numbers: nanoseconds since an epoch that the caller chooses.
//!
//! The reactor counts from its start on the monotonic clock, the simulated reactor from zero.
//! Policy code only subtracts and compares, and never reads a clock.

use core::fmt;
use core::ops::{Add, AddAssign, Sub};
pub use core::time::Duration;

/// Nanoseconds in a second.
pub const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// A point on a monotonic clock, in nanoseconds since the epoch of that clock.
///
/// 64 bits of nanoseconds last 584 years, so additions saturate instead of failing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Instant(u64);

impl Instant {
    /// The clock's epoch.
    pub const ZERO: Self = Self(0);
    /// Later than any instant a clock reports; as a deadline it means "never".
    pub const MAX: Self = Self(u64::MAX);

    /// The instant `nanos` nanoseconds after the epoch.
    pub const fn from_nanos(nanos: u64) -> Self {
        Self(nanos)
    }

    /// Nanoseconds since the epoch.
    pub const fn as_nanos(self) -> u64 {
        self.0
    }

    /// Nanoseconds from `earlier` to `self`; zero if `earlier` is later. Workers read the clock
    /// before they acquire a group's lock, so instants may arrive out of order.
    pub const fn nanos_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
    }
}

/// A date and time in UTC, in seconds since 1970. Displayed as `2026-11-21 06:15:21`.
#[derive(Clone, Copy, Debug)]
pub struct Date(pub u32);

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (days, second) = (self.0 / 86_400, self.0 % 86_400);
        // Howard Hinnant, "chrono-Compatible Low-Level Date Algorithms": the year begins in March,
        // so that the leap day is its last day.
        let days = days + 719_468;
        let (era, day) = (days / 146_097, days % 146_097);
        let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
        let day = day - (365 * year + year / 4 - year / 100);
        let month = (5 * day + 2) / 153;
        let (date, month) = (day - (153 * month + 2) / 5 + 1, if month < 10 { month + 3 } else { month - 9 });
        let year = era * 400 + year + u32::from(month <= 2);
        let (hours, minutes, seconds) = (second / 3600, second / 60 % 60, second % 60);
        write!(f, "{year}-{month:02}-{date:02} {hours:02}:{minutes:02}:{seconds:02}")
    }
}

impl Add<Duration> for Instant {
    type Output = Self;
    fn add(self, rhs: Duration) -> Self {
        let nanos = u64::try_from(rhs.as_nanos()).unwrap_or(u64::MAX);
        Self(self.0.saturating_add(nanos))
    }
}

impl AddAssign<Duration> for Instant {
    fn add_assign(&mut self, rhs: Duration) {
        *self = *self + rhs;
    }
}

impl Sub for Instant {
    type Output = Duration;
    /// Returns zero if `rhs` is later, as [`Instant::nanos_since`] does.
    fn sub(self, rhs: Self) -> Duration {
        Duration::from_nanos(self.nanos_since(rhs))
    }
}
