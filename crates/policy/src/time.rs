//! Instants as numbers: nanoseconds since an epoch that only the caller knows.
//!
//! The reactor counts from its own start on the monotonic clock, the simulated one from zero.
//! Policy code only subtracts and compares. It never reads a clock.

use core::ops::{Add, AddAssign, Sub};
pub use core::time::Duration;

/// Nanoseconds in a second.
pub const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// A point on a monotonic clock, in nanoseconds since that clock's own epoch.
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

    /// Nanoseconds from `earlier` to `self`; zero if `earlier` is later: workers read the clock
    /// before they take a group's lock, so their instants may arrive out of order.
    pub const fn nanos_since(self, earlier: Self) -> u64 {
        self.0.saturating_sub(earlier.0)
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
    /// Zero if `rhs` is later, as [`Instant::nanos_since`].
    fn sub(self, rhs: Self) -> Duration {
        Duration::from_nanos(self.nanos_since(rhs))
    }
}
