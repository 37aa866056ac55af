//! The limits that users set: six rates with their bursts, `iops-size` and `burst-for`; rates that
//! follow the size of a disk; and their rules.
//!
//! Command line, config file and control protocol share this table of settings
//! ([`LimitSetting::ALL`]), so names, ranges and rules cannot differ between them.
//!
//! Values are unsigned integers: a negative, fractional or infinite limit cannot be represented.
//! Never corrects a value silently: a wrong one is [`InvalidLimit`].

use super::size_rate::SizeRate;
use crate::request::Direction;
use core::fmt;

/// Maximum rate, burst rate, `iops-size`, and burst rate × burst length (QEMU's
/// `THROTTLE_VALUE_MAX`).
pub const MAX_VALUE: u64 = 1_000_000_000_000_000;

/// Maximum burst length of a setting, in seconds (32 bits in QEMU).
pub const MAX_BURST_LENGTH_S: u64 = u32::MAX as u64;

/// Kind of a limit: bytes or operations per second, of all requests, of reads or of writes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitKind {
    /// Bytes per second, reads and writes together.
    BpsTotal,
    /// Bytes read per second.
    BpsRead,
    /// Bytes written or discarded per second.
    BpsWrite,
    /// Operations per second, reads and writes together.
    IopsTotal,
    /// Read operations per second.
    IopsRead,
    /// Write and discard operations per second.
    IopsWrite,
}

impl LimitKind {
    /// All six, in the order of [`LimitKind::index`].
    pub const ALL: [Self; 6] =
        [Self::BpsTotal, Self::BpsRead, Self::BpsWrite, Self::IopsTotal, Self::IopsRead, Self::IopsWrite];

    /// Position in [`LimitKind::ALL`], for tables with an entry for each limit.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The four limits that apply to requests of this direction.
    pub const fn applying_to(direction: Direction) -> [Self; 4] {
        match direction {
            Direction::Read => [Self::BpsTotal, Self::BpsRead, Self::IopsTotal, Self::IopsRead],
            Direction::Write => [Self::BpsTotal, Self::BpsWrite, Self::IopsTotal, Self::IopsWrite],
        }
    }

    /// True for limits on bytes, false for limits on operations.
    pub const fn counts_bytes(self) -> bool {
        matches!(self, Self::BpsTotal | Self::BpsRead | Self::BpsWrite)
    }
}

/// A number of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitPart {
    /// The sustained rate.
    Rate,
    /// The rate during a burst (`-max`).
    BurstRate,
    /// Burst capacity in seconds at the burst rate (`-max-length`).
    BurstLength,
    /// The sustained rate for each GiB of a disk, in place of [`LimitPart::Rate`] (`-per-gib`).
    PerGib,
    /// Lower bound of the rate that follows from `-per-gib` (`-per-gib-min`).
    PerGibMin,
    /// Upper bound of the rate that follows from `-per-gib` (`-per-gib-max`).
    PerGibMax,
}

/// One of the numbers of [`Limits`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum LimitSetting {
    /// A number of one of the six limits.
    Limit(LimitKind, LimitPart),
    /// `iops-size`.
    IopsSize,
    /// `burst-for`: duration in seconds of a full burst of each limit with a burst rate.
    BurstFor,
}

use LimitKind::{BpsRead, BpsTotal, BpsWrite, IopsRead, IopsTotal, IopsWrite};
use LimitPart::{BurstLength, BurstRate, PerGib, PerGibMax, PerGibMin, Rate};
use LimitSetting::{BurstFor, IopsSize, Limit as Of};

/// The limits on operations.
const IOPS: [LimitKind; 3] = [IopsTotal, IopsRead, IopsWrite];
/// The limits on bytes.
const BPS: [LimitKind; 3] = [BpsTotal, BpsRead, BpsWrite];

/// QEMU's names without the prefix `throttling.`, and weir's `burst-for`, in the order that
/// [`LimitSetting::name`] computes.
const NAMES: [(LimitSetting, &str); 20] = [
    (Of(BpsTotal, Rate), "bps-total"),
    (Of(BpsTotal, BurstRate), "bps-total-max"),
    (Of(BpsTotal, BurstLength), "bps-total-max-length"),
    (Of(BpsRead, Rate), "bps-read"),
    (Of(BpsRead, BurstRate), "bps-read-max"),
    (Of(BpsRead, BurstLength), "bps-read-max-length"),
    (Of(BpsWrite, Rate), "bps-write"),
    (Of(BpsWrite, BurstRate), "bps-write-max"),
    (Of(BpsWrite, BurstLength), "bps-write-max-length"),
    (Of(IopsTotal, Rate), "iops-total"),
    (Of(IopsTotal, BurstRate), "iops-total-max"),
    (Of(IopsTotal, BurstLength), "iops-total-max-length"),
    (Of(IopsRead, Rate), "iops-read"),
    (Of(IopsRead, BurstRate), "iops-read-max"),
    (Of(IopsRead, BurstLength), "iops-read-max-length"),
    (Of(IopsWrite, Rate), "iops-write"),
    (Of(IopsWrite, BurstRate), "iops-write-max"),
    (Of(IopsWrite, BurstLength), "iops-write-max-length"),
    (IopsSize, "iops-size"),
    (BurstFor, "burst-for"),
];

/// Names of the settings that depend on the size of a disk, in the order that
/// [`LimitSetting::name`] computes.
const SIZE_NAMES: [(LimitSetting, &str); 18] = [
    (Of(BpsTotal, PerGib), "bps-total-per-gib"),
    (Of(BpsTotal, PerGibMin), "bps-total-per-gib-min"),
    (Of(BpsTotal, PerGibMax), "bps-total-per-gib-max"),
    (Of(BpsRead, PerGib), "bps-read-per-gib"),
    (Of(BpsRead, PerGibMin), "bps-read-per-gib-min"),
    (Of(BpsRead, PerGibMax), "bps-read-per-gib-max"),
    (Of(BpsWrite, PerGib), "bps-write-per-gib"),
    (Of(BpsWrite, PerGibMin), "bps-write-per-gib-min"),
    (Of(BpsWrite, PerGibMax), "bps-write-per-gib-max"),
    (Of(IopsTotal, PerGib), "iops-total-per-gib"),
    (Of(IopsTotal, PerGibMin), "iops-total-per-gib-min"),
    (Of(IopsTotal, PerGibMax), "iops-total-per-gib-max"),
    (Of(IopsRead, PerGib), "iops-read-per-gib"),
    (Of(IopsRead, PerGibMin), "iops-read-per-gib-min"),
    (Of(IopsRead, PerGibMax), "iops-read-per-gib-max"),
    (Of(IopsWrite, PerGib), "iops-write-per-gib"),
    (Of(IopsWrite, PerGibMin), "iops-write-per-gib-min"),
    (Of(IopsWrite, PerGibMax), "iops-write-per-gib-max"),
];

impl LimitSetting {
    /// The settings that depend on the size of a disk. A group has none of them.
    pub const OF_SIZE: [Self; 18] = {
        let mut all = [IopsSize; 18];
        let mut i = 0;
        while i < all.len() {
            all[i] = SIZE_NAMES[i].0;
            i += 1;
        }
        all
    };

    /// All settings of a disk: [`LimitSetting::ALL`], then [`LimitSetting::OF_SIZE`].
    pub fn of_disk() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().chain(Self::OF_SIZE)
    }

    /// All twenty that do not depend on a size, limit by limit, `iops-size` and `burst-for` last:
    /// the order for help texts and listings.
    pub const ALL: [Self; 20] = {
        let mut all = [IopsSize; 20];
        let mut i = 0;
        while i < all.len() {
            all[i] = NAMES[i].0;
            i += 1;
        }
        all
    };

    /// The settings that QEMU has: all but `burst-for`.
    pub fn of_qemu() -> impl Iterator<Item = Self> {
        Self::ALL.into_iter().filter(|setting| *setting != BurstFor)
    }

    /// Key or option of the setting, such as `iops-total-max-length`.
    pub const fn name(self) -> &'static str {
        match self {
            Of(kind, part @ (Rate | BurstRate | BurstLength)) => NAMES[kind.index() * 3 + part as usize].1,
            Of(kind, part) => SIZE_NAMES[kind.index() * 3 + part as usize - PerGib as usize].1,
            IopsSize => NAMES[NAMES.len() - 2].1,
            BurstFor => NAMES[NAMES.len() - 1].1,
        }
    }

    /// The setting with exactly this name.
    pub fn from_name(name: &str) -> Option<Self> {
        NAMES.iter().chain(&SIZE_NAMES).find(|(_, known)| *known == name).map(|(setting, _)| *setting)
    }

    /// Maximum value that [`Limits::set`] accepts.
    pub const fn maximum(self) -> u64 {
        match self {
            Of(_, BurstLength) | BurstFor => MAX_BURST_LENGTH_S,
            _ => MAX_VALUE,
        }
    }

    /// True if the value is a number of bytes (possibly per second), which users may write as
    /// `10M`.
    pub const fn is_size(self) -> bool {
        match self {
            Of(kind, part) => kind.counts_bytes() && !matches!(part, BurstLength),
            IopsSize => true,
            BurstFor => false,
        }
    }

    /// True if the value is a number of seconds.
    pub const fn is_seconds(self) -> bool {
        matches!(self, Of(_, BurstLength) | BurstFor)
    }
}

impl fmt::Display for LimitSetting {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// One limit: a rate in units (bytes or operations) per second, and its burst.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RateLimit {
    /// Sustained rate in units per second; 0 is no limit.
    pub rate: u64,
    /// Burst rate in units per second; with 0 the burst capacity is a tenth of a second at `rate`.
    pub burst_rate: u64,
    /// Burst capacity in seconds at `burst_rate`; at least 1. The bucket leaks at `rate` meanwhile,
    /// so a full burst lasts longer: [`RateLimit::full_burst`].
    pub burst_length_s: u64,
    /// Duration of a full burst in seconds, from which the capacity is computed; with 0,
    /// `burst_length_s` applies.
    pub burst_for_s: u64,
}

impl RateLimit {
    /// No limit: the default.
    pub const NONE: Self = Self { rate: 0, burst_rate: 0, burst_length_s: 1, burst_for_s: 0 };
}

impl Default for RateLimit {
    fn default() -> Self {
        Self::NONE
    }
}

/// Limits of a disk or a group. The default limits nothing.
///
/// Values may break the rules until [`Limits::validate`] is called.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Limits {
    limits: [RateLimit; 6],
    /// Size in bytes above which a request counts as `size / iops_size` operations: 6 KiB at 4096
    /// is 1.5. With 0 every request counts as one.
    pub iops_size: u64,
    /// Rates that follow the size of a disk, by [`LimitKind::index`].
    pub(super) size_rates: [SizeRate; 6],
}

impl Limits {
    /// The limit of a kind.
    pub const fn limit(&self, kind: LimitKind) -> RateLimit {
        self.limits[kind.index()]
    }

    /// Mutable access to the limit of a kind.
    pub const fn limit_mut(&mut self, kind: LimitKind) -> &mut RateLimit {
        &mut self.limits[kind.index()]
    }

    /// The value of one setting.
    pub const fn get(&self, setting: LimitSetting) -> u64 {
        match setting {
            Of(kind, Rate) => self.limit(kind).rate,
            Of(kind, BurstRate) => self.limit(kind).burst_rate,
            Of(kind, BurstLength) => self.limit(kind).burst_length_s,
            Of(kind, PerGib) => self.size_rates[kind.index()].per_gib,
            Of(kind, PerGibMin) => self.size_rates[kind.index()].min,
            Of(kind, PerGibMax) => self.size_rates[kind.index()].max,
            IopsSize => self.iops_size,
            BurstFor => self.burst_for_s(),
        }
    }

    /// Value of `burst-for`, which all limits have in common.
    const fn burst_for_s(&self) -> u64 {
        let (mut max_s, mut i) = (0, 0);
        while i < self.limits.len() {
            if self.limits[i].burst_for_s > max_s {
                max_s = self.limits[i].burst_for_s;
            }
            i += 1;
        }
        max_s
    }

    /// Changes one setting, in its own unit. Fails and changes nothing if the value exceeds
    /// [`LimitSetting::maximum`]. Does not check other rules; see [`Limits::validate`].
    pub fn set(&mut self, setting: LimitSetting, value: u64) -> Result<(), InvalidLimit> {
        if value > setting.maximum() {
            return Err(InvalidLimit { setting, value, rule: LimitRule::AtMost(setting.maximum()) });
        }
        match setting {
            Of(kind, Rate) => self.limit_mut(kind).rate = value,
            Of(kind, BurstRate) => self.limit_mut(kind).burst_rate = value,
            Of(kind, BurstLength) => self.limit_mut(kind).burst_length_s = value,
            Of(kind, PerGib) => self.size_rates[kind.index()].per_gib = value,
            Of(kind, PerGibMin) => self.size_rates[kind.index()].min = value,
            Of(kind, PerGibMax) => self.size_rates[kind.index()].max = value,
            IopsSize => self.iops_size = value,
            BurstFor => self.limits.iter_mut().for_each(|limit| limit.burst_for_s = value),
        }
        Ok(())
    }

    /// Applies settings in the order given, and resets dependent ones that are not given: the burst
    /// and the bounds of a limit that is removed, the length of a burst that is removed,
    /// `iops-size` with the last limit on operations, `burst-for` with the last burst rate, and all
    /// lengths if `burst-for` is given.
    ///
    /// # Errors
    /// [`InvalidLimit`] with the first broken [`LimitRule`].
    pub fn with_settings(mut self, given: &[(LimitSetting, u64)]) -> Result<Self, InvalidLimit> {
        for &(setting, value) in given {
            self.set(setting, value)?;
        }
        self.reset_dependents(|setting| given.iter().any(|(given, _)| *given == setting));
        self.validate()?;
        Ok(self)
    }

    fn reset_dependents(&mut self, is_given: impl Fn(LimitSetting) -> bool) {
        let is_removed = |limits: &Self, setting| is_given(setting) && limits.get(setting) == 0;
        for kind in LimitKind::ALL {
            let [rate, burst, length] = [Rate, BurstRate, BurstLength].map(|part| Of(kind, part));
            let per_gib = Of(kind, PerGib);
            if is_removed(self, per_gib) {
                for bound in [PerGibMin, PerGibMax].map(|part| Of(kind, part)) {
                    if !is_given(bound) {
                        // Zero is in range.
                        let _ = self.set(bound, 0);
                    }
                }
            }
            let without_rate = (is_removed(self, rate) || is_removed(self, per_gib)) && !self.has_rate(kind);
            if (without_rate || is_removed(self, burst)) && !is_given(length) {
                self.limit_mut(kind).burst_length_s = 1;
            }
            if without_rate && !is_given(burst) {
                self.limit_mut(kind).burst_rate = 0;
            }
        }
        let rates = IOPS.into_iter().flat_map(|kind| [Of(kind, Rate), Of(kind, PerGib)]);
        let is_last = rates.into_iter().any(|rate| is_removed(self, rate))
            && IOPS.iter().all(|&kind| !self.has_rate(kind));
        if is_last && !is_given(IopsSize) {
            self.iops_size = 0;
        }
        self.reset_burst_times(is_given);
    }

    fn reset_burst_times(&mut self, is_given: impl Fn(LimitSetting) -> bool) {
        let rates = LimitKind::ALL.map(|kind| Of(kind, BurstRate));
        let is_changed =
            LimitKind::ALL.iter().any(|&kind| is_given(Of(kind, Rate)) || is_given(Of(kind, PerGib)))
                || rates.iter().any(|&rate| is_given(rate));
        if is_changed && !is_given(BurstFor) && rates.iter().all(|&rate| self.get(rate) == 0) {
            self.limits.iter_mut().for_each(|limit| limit.burst_for_s = 0);
        }
        if is_given(BurstFor) && self.get(BurstFor) > 0 {
            for kind in LimitKind::ALL {
                if !is_given(Of(kind, BurstLength)) {
                    self.limit_mut(kind).burst_length_s = 1;
                }
            }
        }
    }

    /// True if no limit is set.
    pub fn is_unlimited(&self) -> bool {
        self.limits.iter().all(|limit| limit.rate == 0) && !self.follows_size()
    }

    /// True if a limit of this kind is set, as a rate or for each GiB.
    pub(super) const fn has_rate(&self, kind: LimitKind) -> bool {
        self.limit(kind).rate > 0 || self.size_rates[kind.index()].per_gib > 0
    }

    /// Checks all rules, in QEMU's order, and returns the first error.
    pub fn validate(&self) -> Result<(), InvalidLimit> {
        // QEMU's throttle_is_valid checks conflicts before it checks single values.
        for part in [Rate, BurstRate] {
            self.check_total_alone(BPS, part)?;
            self.check_total_alone(IOPS, part)?;
        }
        self.check_size_rates()?;
        if self.iops_size > 0 && IOPS.iter().all(|&kind| !self.has_rate(kind)) {
            return Err(self.invalid(IopsSize, LimitRule::NeedsIops));
        }
        if self.iops_size > MAX_VALUE {
            return Err(self.invalid(IopsSize, LimitRule::AtMost(MAX_VALUE)));
        }
        LimitKind::ALL.iter().try_for_each(|&kind| self.check_limit(kind))?;
        self.check_burst_for()
    }

    fn check_burst_for(&self) -> Result<(), InvalidLimit> {
        let burst_for_s = self.burst_for_s();
        if burst_for_s == 0 {
            return Ok(());
        }
        if LimitKind::ALL.iter().all(|&kind| self.limit(kind).burst_rate == 0) {
            return Err(self.invalid(BurstFor, LimitRule::NeedsBurstRate));
        }
        for kind in LimitKind::ALL {
            let RateLimit { rate, burst_rate, burst_length_s, .. } = self.limit(kind);
            let (burst, length) = (Of(kind, BurstRate), Of(kind, BurstLength));
            // A length of 1 is the default.
            if burst_length_s > 1 {
                return Err(self.invalid(length, LimitRule::ExcludesBurstFor(burst_for_s)));
            }
            if burst_for_s > MAX_VALUE / burst_rate.saturating_sub(rate).max(1) {
                return Err(self.invalid(BurstFor, LimitRule::BurstTooLarge(burst, burst_rate)));
            }
        }
        Ok(())
    }

    fn check_total_alone(
        &self,
        [total, read, write]: [LimitKind; 3],
        part: LimitPart,
    ) -> Result<(), InvalidLimit> {
        // A rate, and a rate for each GiB, are the same limit.
        let setting_of = |kind| match part {
            Rate if self.get(Of(kind, Rate)) == 0 => Of(kind, PerGib),
            part => Of(kind, part),
        };
        let of_total = setting_of(total);
        for other in [read, write].map(setting_of) {
            if self.get(of_total) > 0 && self.get(other) > 0 {
                return Err(self.invalid(of_total, LimitRule::Excludes(other, self.get(other))));
            }
        }
        Ok(())
    }

    fn check_limit(&self, kind: LimitKind) -> Result<(), InvalidLimit> {
        let RateLimit { rate, burst_rate, burst_length_s: length, .. } = self.limit(kind);
        let (base, burst) = (Of(kind, Rate), Of(kind, BurstRate));
        let rules = [
            (rate > MAX_VALUE, Rate, LimitRule::AtMost(MAX_VALUE)),
            (burst_rate > MAX_VALUE, BurstRate, LimitRule::AtMost(MAX_VALUE)),
            (length == 0, BurstLength, LimitRule::AtLeastOneSecond),
            (length > 1 && burst_rate == 0, BurstLength, LimitRule::Needs(burst)),
            (
                length > MAX_VALUE / burst_rate.max(1),
                BurstLength,
                LimitRule::BurstTooLarge(burst, burst_rate),
            ),
            (burst_rate > 0 && !self.has_rate(kind), BurstRate, LimitRule::Needs(base)),
            (burst_rate > 0 && burst_rate < rate, BurstRate, LimitRule::AtLeastRate(base, rate)),
        ];
        match rules.into_iter().find(|(is_broken, ..)| *is_broken) {
            Some((_, part, rule)) => Err(self.invalid(Of(kind, part), rule)),
            None => Ok(()),
        }
    }

    pub(super) const fn invalid(&self, setting: LimitSetting, rule: LimitRule) -> InvalidLimit {
        InvalidLimit { setting, value: self.get(setting), rule }
    }
}

/// A setting that breaks a rule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InvalidLimit {
    /// The setting.
    pub setting: LimitSetting,
    /// Its value.
    pub value: u64,
    /// The broken rule.
    pub rule: LimitRule,
}

/// Rules for limits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitRule {
    /// A total limit excludes a read or write limit of the same unit (the other setting, with its
    /// value).
    Excludes(LimitSetting, u64),
    /// `iops-size` needs a limit on operations.
    NeedsIops,
    /// Maximum value.
    AtMost(u64),
    /// A burst length is at least one second.
    AtLeastOneSecond,
    /// A burst length above 1 needs a burst rate, and a burst rate needs a rate.
    Needs(LimitSetting),
    /// Burst rate (this setting, with its value) × burst length is at most [`MAX_VALUE`].
    BurstTooLarge(LimitSetting, u64),
    /// A burst rate is at least the rate (this setting, with its value).
    AtLeastRate(LimitSetting, u64),
    /// `burst-for` needs a burst rate.
    NeedsBurstRate,
    /// A burst length excludes `burst-for` (its value).
    ExcludesBurstFor(u64),
    /// A rate for each GiB excludes the rate of the same limit (the other setting, with its value).
    ExcludesRate(LimitSetting, u64),
    /// A lower bound is at most the upper bound (the other setting, with its value).
    AtMostBound(LimitSetting, u64),
    /// A rate for each GiB applies to a disk.
    NeedsDisk,
}

impl fmt::Display for InvalidLimit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { setting, value, rule } = self;
        write!(f, "{setting} ({value}) {rule}")
    }
}

impl fmt::Display for LimitRule {
    /// Formats the predicate of a sentence whose subject is the setting with its value.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Excludes(other, other_value) => write!(
                f,
                "cannot be set together with {other} ({other_value}); use either the total or read and write"
            ),
            Self::NeedsIops => {
                write!(f, "has no limit to apply to; it needs iops-total, iops-read or iops-write")
            }
            Self::AtMost(maximum) => write!(f, "is too large; it may be {maximum} at most"),
            Self::AtLeastOneSecond => write!(f, "is too short; a burst length must be at least 1 second"),
            Self::Needs(missing) => write!(f, "is set without {missing}; set {missing} too"),
            Self::BurstTooLarge(burst, rate) => {
                write!(f, "is too long for {burst} ({rate}); their product may be {MAX_VALUE} at most")
            }
            Self::AtLeastRate(base, rate) => {
                write!(f, "is below {base} ({rate}); a burst rate must be at least the rate")
            }
            Self::NeedsBurstRate => {
                write!(f, "has no burst to apply to; it needs a burst rate, such as iops-total-max")
            }
            Self::ExcludesBurstFor(seconds) => write!(
                f,
                "cannot be set together with burst-for ({seconds}); use one of them, burst-for 0 removes it"
            ),
            Self::ExcludesRate(other, other_value) => write!(
                f,
                "cannot be set together with {other} ({other_value}); use one of them, 0 removes the other"
            ),
            Self::AtMostBound(bound, value) => {
                write!(f, "is above {bound} ({value}); the lower bound must be at most the upper")
            }
            Self::NeedsDisk => {
                write!(f, "follows the size of a disk, and a group has none; set it for the disks")
            }
        }
    }
}

impl core::error::Error for InvalidLimit {}

#[cfg(test)]
#[path = "limits_tests.rs"]
mod tests;
