//! A rate for each GiB of a disk: `iops-total-per-gib` and the like, with `-min` and `-max`.

const GIB: u128 = 1 << 30;

/// A rate for each GiB of a disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SizeRate {
    /// Units per second for each GiB; 0 is no limit.
    pub(super) per_gib: u64,
    /// Lower bound of the resulting rate; 0 is none.
    pub(super) min: u64,
    /// Upper bound of the resulting rate; 0 is none.
    pub(super) max: u64,
}

impl SizeRate {
    /// Rate of a disk of this size, rounded down, and not above `highest`; at least 1, because a
    /// rate of 0 is no limit.
    pub(super) fn at(self, size_bytes: u64, highest: u64) -> u64 {
        let rate = u128::from(size_bytes) * u128::from(self.per_gib) / GIB;
        let rate = u64::try_from(rate).unwrap_or(u64::MAX).max(1).max(self.min);
        rate.min(self.highest(highest))
    }

    /// Upper bound of the resulting rate, not above `highest`; 0 if the rate does not follow the
    /// size.
    pub(super) const fn highest(self, highest: u64) -> u64 {
        if self.per_gib == 0 {
            0
        } else if self.max > 0 && self.max < highest {
            self.max
        } else {
            highest
        }
    }
}
