//! Enforcement of a node's limits: as set, scaled, or temporarily lifted.
//!
//! Decided by the watermark ([`crate::watermark`]) and applied by a tree. Not a setting.

/// Factor on rates, in thousandths; at least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LimitScale(u32);

impl LimitScale {
    /// Rates as set.
    pub const ONE: Self = Self(1000);
    /// Factor 1000, practically lifted.
    pub const MAX: Self = Self(1_000_000);

    /// A factor in thousandths, clamped to the range from [`LimitScale::ONE`] to
    /// [`LimitScale::MAX`].
    pub fn from_thousandths(thousandths: u64) -> Self {
        let bounded = thousandths.clamp(u64::from(Self::ONE.0), u64::from(Self::MAX.0));
        Self(bounded as u32)
    }

    /// The factor in thousandths.
    pub const fn thousandths(self) -> u64 {
        self.0 as u64
    }

    /// `amount` times the factor, rounded down. Amounts below 2⁹⁸ cannot overflow.
    pub(super) const fn times(self, amount: u128) -> u128 {
        amount * self.0 as u128 / 1000
    }
}

/// Enforcement of a node's own limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Enforcement {
    /// As set.
    #[default]
    Enforced,
    /// All rates and burst sizes are multiplied by the same factor.
    Scaled(LimitScale),
    /// Requests neither wait for the limits nor are charged to them.
    Lifted,
}

impl Enforcement {
    /// The enforcement with the smaller factor: a group on several devices follows the busiest one.
    #[must_use]
    pub fn stricter(self, other: Self) -> Self {
        let factor = |enforcement: Self| match enforcement {
            Self::Enforced => 0,
            Self::Scaled(scale) => scale.thousandths(),
            Self::Lifted => u64::MAX,
        };
        if factor(self) <= factor(other) { self } else { other }
    }

    pub(crate) const fn scale(self) -> LimitScale {
        match self {
            Self::Scaled(scale) => scale,
            Self::Enforced | Self::Lifted => LimitScale::ONE,
        }
    }
}
