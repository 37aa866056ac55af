//! A latency target: a percentile of the response times of a member, and its bound.
//!
//! Never measures; see `tail.rs`.

use crate::request::Direction;

/// Requests that a target covers.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum TargetDirections {
    /// Reads and writes.
    #[default]
    All,
    /// Reads only.
    Reads,
    /// Writes only, including discards.
    Writes,
}

impl TargetDirections {
    /// True if requests of this direction count.
    pub fn covers(self, direction: Direction) -> bool {
        match self {
            Self::All => true,
            Self::Reads => direction == Direction::Read,
            Self::Writes => direction == Direction::Write,
        }
    }
}

/// Latency settings of a disk or a group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct LatencySettings {
    /// Its target.
    pub target: Option<PercentileTarget>,
    /// Rate that it keeps while targets of others are enforced, in hundredths of a percent of the
    /// device's throughput; `None` for the default ([`MemberSample::floor`](super::MemberSample)).
    pub floor_permyriad: Option<u16>,
}

impl LatencySettings {
    /// Largest floor: the whole device.
    pub const MAX_FLOOR_PERMYRIAD: u16 = 10_000;
}

/// A bound on a percentile of the times from admission to completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct PercentileTarget {
    bound_ns: u64,
    permyriad: u16,
    directions: TargetDirections,
}

impl PercentileTarget {
    /// Valid percentiles, in ten-thousandths: 50 % to 99.99 %.
    pub const PERMYRIADS: core::ops::RangeInclusive<u16> = 5000..=9999;
    /// Valid bounds in nanoseconds: 10 µs to 100 s.
    pub const BOUNDS_NS: core::ops::RangeInclusive<u64> = 10_000..=100_000_000_000;

    /// A target of `permyriad` ten-thousandths of the requests within `bound_ns`: 9900 is the 99th
    /// percentile. `None` outside of [`PercentileTarget::PERMYRIADS`] or
    /// [`PercentileTarget::BOUNDS_NS`].
    pub const fn new(bound_ns: u64, permyriad: u16, directions: TargetDirections) -> Option<Self> {
        // Not `contains` and `then_some`, which are not constant.
        let (bounds, permyriads) = (Self::BOUNDS_NS, Self::PERMYRIADS);
        let is_bound = bound_ns >= *bounds.start() && bound_ns <= *bounds.end();
        let is_percentile = permyriad >= *permyriads.start() && permyriad <= *permyriads.end();
        if is_bound && is_percentile { Some(Self { bound_ns, permyriad, directions }) } else { None }
    }

    /// The bound in nanoseconds.
    pub const fn bound_ns(self) -> u64 {
        self.bound_ns
    }

    /// The percentile in ten-thousandths.
    pub const fn permyriad(self) -> u16 {
        self.permyriad
    }

    /// The requests that count.
    pub const fn directions(self) -> TargetDirections {
        self.directions
    }

    /// Share of completions that may exceed the bound.
    pub(super) fn late_share(self) -> f64 {
        1.0 - f64::from(self.permyriad) / 10_000.0
    }
}
