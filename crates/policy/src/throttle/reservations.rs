//! Admission control for reservations: checks them against the limits and the device above them.
//!
//! A reservation above the limits could not be honoured, so it is rejected when it is set, with the
//! numbers. Each node stores the sum of the reservations below it, so a check takes one step for
//! each level. Does not consider current use.

use super::limits::{InvalidLimit, LimitKind, Limits};
use super::share::NodeShare;
use crate::time::Date;
use core::fmt;

/// Unit of a reservation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ReservationUnit {
    /// Operations per second.
    Iops,
    /// Bytes per second.
    Bps,
}

impl ReservationUnit {
    /// Both, in the order of [`ReservationUnit::index`].
    pub const ALL: [Self; 2] = [Self::Iops, Self::Bps];

    /// 0 for operations, 1 for bytes.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Limits in this unit: total, reads, writes.
    pub(super) const fn limit_kinds(self) -> [LimitKind; 3] {
        match self {
            Self::Iops => [LimitKind::IopsTotal, LimitKind::IopsRead, LimitKind::IopsWrite],
            Self::Bps => [LimitKind::BpsTotal, LimitKind::BpsRead, LimitKind::BpsWrite],
        }
    }

    /// The setting for a reservation in this unit.
    pub const fn reservation(self) -> &'static str {
        match self {
            Self::Iops => "iops-reservation",
            Self::Bps => "bps-reservation",
        }
    }
}

impl fmt::Display for ReservationUnit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Iops => "IOPS",
            Self::Bps => "bytes per second",
        })
    }
}

/// Source of an upper bound for reservations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ReservationBound {
    /// A limit of the node or of a node above it.
    Limit,
    /// The configured rate of the simulated device.
    Rate,
    /// The measured capacity of the device; time of the probe in seconds since 1970.
    Probe(u32),
    /// A limit over many hosts, less what other hosts have reserved.
    Cluster,
    /// The measured capacity of storage that all hosts share, less what other hosts have reserved.
    Pool,
    /// A limit over many hosts, regardless of other reservations.
    Whole,
}

impl ReservationBound {
    /// True if other hosts influence the bound, so that a reservation may cease to fit without a
    /// local change.
    pub const fn is_shared(self) -> bool {
        matches!(self, Self::Cluster | Self::Pool | Self::Whole)
    }

    /// Remedy for the message, other than a lower reservation.
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::Limit => "raise the limit",
            Self::Rate => "raise that `rate`",
            Self::Probe(_) | Self::Pool => {
                "measure again with `weir probe`, or remove its file in capacity/ of the state \
                 directory, and restart weir"
            }
            Self::Cluster => "one on another host",
            Self::Whole => "raise that limit",
        }
    }
}

/// Reservations that exceed a bound.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReservationExceeded {
    /// Unit of the reservations.
    pub unit: ReservationUnit,
    /// Sum of the reservations, including the rejected one.
    pub requested: u64,
    /// The amount that can be reserved.
    pub available: u64,
    /// Source of the bound.
    pub bound: ReservationBound,
}

impl ReservationExceeded {
    /// The excess of the sum over the bound.
    pub const fn excess(&self) -> u64 {
        self.requested - self.available
    }
}

impl fmt::Display for ReservationExceeded {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unit, requested: asked, available, bound } = self;
        let (name, excess) = (unit.reservation(), self.excess());
        write!(f, "{name}: {asked} {unit} would be reserved, {excess} more than ")?;
        match bound {
            ReservationBound::Limit => write!(f, "the limit of {available}"),
            ReservationBound::Rate => write!(f, "the configured `rate` of {available}"),
            ReservationBound::Probe(at) => {
                write!(f, "the {available} that `weir probe` measured for the device, {} UTC", Date(*at))
            }
            ReservationBound::Cluster => {
                write!(f, "the {available} that the reservations of other hosts leave")
            }
            ReservationBound::Pool => {
                write!(
                    f,
                    "the {available} that the reservations of other hosts leave of the capacity \
                     that `weir probe` measured"
                )
            }
            ReservationBound::Whole => write!(f, "the limit of all hosts of {available}"),
        }?;
        write!(f, " (lower a reservation, or {})", bound.remedy())
    }
}

impl core::error::Error for ReservationExceeded {}

/// Maximum number of levels of a tree: a disk, and nested groups above it. Each level adds to the
/// cost of every decision; three (disk, tenant, host) cover the known uses.
pub const MAX_LEVELS: usize = 8;

/// Reason why a tree rejected a setting. The tree is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ThrottleError {
    /// The limits break a rule.
    Limits(InvalidLimit),
    /// The limits contradict an entry of their schedule: its index, and the broken rule.
    Schedule(usize, InvalidLimit),
    /// A reservation exceeds a bound.
    Overbooked(ReservationExceeded),
    /// The node would be deeper than [`MAX_LEVELS`].
    TooDeep,
    /// Limits or a watermark for a group whose limits are divided over hosts.
    Leased,
    /// A weight outside of [`NodeShare::WEIGHTS`].
    Weight(u32),
}

impl fmt::Display for ThrottleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limits(invalid) => invalid.fmt(f),
            Self::Schedule(index, invalid) => write!(
                f,
                "the limits contradict schedule[{index}]: {invalid} (change that entry in the config file, \
                 and reload)"
            ),
            Self::Overbooked(overbooked) => overbooked.fmt(f),
            Self::Leased => f.write_str(
                "limits: the cluster sets those of this group, for all hosts and without a \
                 watermark (change them with `weir throttle GROUP --cluster`)",
            ),
            Self::Weight(weight) => write!(
                f,
                "weight: {weight} is out of range; a weight is from {} to {}",
                NodeShare::WEIGHTS.start(),
                NodeShare::WEIGHTS.end()
            ),
            Self::TooDeep => write!(
                f,
                "group: nested too deeply; the maximum is {} levels, disks included (choose a \
                 group on a higher level)",
                MAX_LEVELS
            ),
        }
    }
}

impl core::error::Error for ThrottleError {}

impl From<InvalidLimit> for ThrottleError {
    fn from(invalid: InvalidLimit) -> Self {
        Self::Limits(invalid)
    }
}

impl From<ReservationExceeded> for ThrottleError {
    fn from(overbooked: ReservationExceeded) -> Self {
        Self::Overbooked(overbooked)
    }
}

/// Reservable capacity of the device below a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReservableCapacity {
    /// Operations and bytes per second; 0 means unknown and is no bound.
    pub amounts: [u64; 2],
    /// Time of the probe in seconds since 1970; `None` for a simulated device.
    pub probed_at_s: Option<u32>,
}

/// Capacity that a node can divide among its children.
#[derive(Clone, Copy, Debug)]
pub(super) struct CapacitySupply {
    pub(super) limits: Limits,
    pub(super) device: ReservableCapacity,
}

impl CapacitySupply {
    pub(super) fn check(&self, reserved: [u64; 2]) -> Result<(), ReservationExceeded> {
        for unit in ReservationUnit::ALL {
            let requested = reserved[unit.index()];
            let of_device = self.device.probed_at_s.map_or(ReservationBound::Rate, ReservationBound::Probe);
            let bounds = [
                (ReservationBound::Limit, max_sustained_rate(&self.limits, unit)),
                (of_device, self.device.amounts[unit.index()]),
            ];
            for (bound, available) in bounds {
                if available > 0 && requested > available {
                    return Err(ReservationExceeded { unit, requested, available, bound });
                }
            }
        }
        Ok(())
    }
}

/// Maximum sustained rate under these limits, reads and writes together; 0 if unbounded.
fn max_sustained_rate(limits: &Limits, unit: ReservationUnit) -> u64 {
    let [total, read, write] = unit.limit_kinds();
    let rate = |kind| limits.limit(kind).rate;
    if rate(total) > 0 {
        rate(total)
    // A limit on one direction alone does not bound the sum of both.
    } else if rate(read) > 0 && rate(write) > 0 {
        rate(read) + rate(write)
    } else {
        0
    }
}

/// Part of the parent's capacity that a node reserves: its own reservation, or the sum of those
/// below it if that is larger.
pub(super) fn reserved_by(share: NodeShare, reserved_below: [u64; 2]) -> [u64; 2] {
    let own_reservation = [share.iops_reservation(), share.bps_reservation()];
    ReservationUnit::ALL.map(|unit| own_reservation[unit.index()].max(reserved_below[unit.index()]))
}
