//! Whether a node's limits hold as they are set, more loosely, or not at all for the time being.
//!
//! The watermark ([`crate::watermark`]) decides it, and a tree carries it out. It is not a setting.

/// A factor that rates are multiplied by, in thousandths. At least 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Scale(u32);

impl Scale {
    /// Rates as they are set.
    pub const ONE: Self = Self(1000);
    /// A thousandfold, which is as good as lifted.
    pub const MAX: Self = Self(1_000_000);

    /// A factor in thousandths, brought into the range from [`Scale::ONE`] to [`Scale::MAX`].
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

/// How a node's own limits are applied.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Enforcement {
    /// As they are set.
    #[default]
    Enforced,
    /// All rates and burst sizes multiplied by the same factor.
    Scaled(Scale),
    /// Not asked and not charged.
    Lifted,
}

impl Enforcement {
    /// The one with the smaller factor: what lies on several devices goes by the shortest.
    #[must_use]
    pub fn stricter(self, other: Self) -> Self {
        let factor = |enforcement: Self| match enforcement {
            Self::Enforced => 0,
            Self::Scaled(scale) => scale.thousandths(),
            Self::Lifted => u64::MAX,
        };
        if factor(self) <= factor(other) { self } else { other }
    }

    pub(crate) const fn scale(self) -> Scale {
        match self {
            Self::Scaled(scale) => scale,
            Self::Enforced | Self::Lifted => Scale::ONE,
        }
    }
}
