//! Whether a promise can be kept: reservations against the limits and the device above them.
//!
//! A promise above the limits would be broken silently, so it is refused when it is made, with the
//! figures. Each node stores the sum of the promises below it, so a check costs one step for each
//! level. Never considers what is in use.

use super::limits::{Invalid, LimitKind, Limits};
use super::share::Share;
use crate::time::Date;
use core::fmt;

/// What a reservation is measured in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Unit {
    /// Operations per second.
    Iops,
    /// Bytes per second.
    Bps,
}

impl Unit {
    /// Both, in the order of [`Unit::index`].
    pub const ALL: [Self; 2] = [Self::Iops, Self::Bps];

    /// 0 for operations, 1 for bytes.
    pub const fn index(self) -> usize {
        self as usize
    }

    /// The setting that promises it.
    pub const fn reservation(self) -> &'static str {
        match self {
            Self::Iops => "iops-reservation",
            Self::Bps => "bps-reservation",
        }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Iops => "IOPS",
            Self::Bps => "bytes per second",
        })
    }
}

/// What promises have to fit in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bound {
    /// A limit of the node itself or of one above it.
    Limit,
    /// The rate of the device below, which is imitated.
    Rate,
    /// What a probe measured of the device below, at this time in seconds since 1970.
    Probe(u32),
    /// What other hosts leave of a limit over many hosts.
    Cluster,
    /// What other hosts leave of what is below all of them, as probes measured it.
    Pool,
    /// A limit over many hosts, whatever others are promised.
    Whole,
}

impl Bound {
    /// Whether other hosts have to do with it: what fits now may not later, though nothing is
    /// changed here.
    pub const fn is_shared(self) -> bool {
        matches!(self, Self::Cluster | Self::Pool | Self::Whole)
    }

    /// What helps besides a lower reservation.
    pub const fn remedy(self) -> &'static str {
        match self {
            Self::Limit => "raise the limit",
            Self::Rate => "raise the rate that is imitated",
            Self::Probe(_) | Self::Pool => {
                "measure again with `weir probe`, or remove its file in capacity/ of the state directory, and \
                 restart weir"
            }
            Self::Cluster => "one on another host",
            Self::Whole => "raise that limit",
        }
    }
}

/// More is promised than can be kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overbooked {
    /// What is promised.
    pub unit: Unit,
    /// How much of it in all, with the promise that is refused.
    pub asked: u64,
    /// How much there is.
    pub available: u64,
    /// What sets that bound.
    pub bound: Bound,
}

impl Overbooked {
    /// By how much too much.
    pub const fn excess(&self) -> u64 {
        self.asked - self.available
    }
}

impl fmt::Display for Overbooked {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { unit, asked, available, bound } = self;
        let (name, excess) = (unit.reservation(), self.excess());
        write!(f, "{name}: {asked} {unit} would be promised, {excess} more than ")?;
        match bound {
            Bound::Limit => write!(f, "the limit of {available}"),
            Bound::Rate => write!(f, "the imitated rate of {available}"),
            Bound::Probe(at) => {
                write!(f, "the {available} that `weir probe` measured of the device, {} UTC", Date(*at))
            }
            Bound::Cluster => write!(f, "what the cluster's other hosts leave of {available}"),
            Bound::Pool => {
                write!(f, "the {available} that other hosts leave of what `weir probe` measured below all")
            }
            Bound::Whole => write!(f, "the limit of all hosts of {available}"),
        }?;
        write!(f, " (lower a reservation, or {})", bound.remedy())
    }
}

impl core::error::Error for Overbooked {}

/// How many levels a tree may have: a disk, and groups in groups above it. Each costs every
/// decision; nobody has asked for more than three (disk, tenant, host).
pub const MAX_LEVELS: usize = 8;

/// Why a tree did not take a setting. Everything is then as it was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Refused {
    /// Limits that break a rule.
    Limits(Invalid),
    /// A reservation that cannot be kept.
    Overbooked(Overbooked),
    /// A node below [`MAX_LEVELS`] others.
    TooDeep,
    /// Limits, or a watermark, of a group whose limits are divided over hosts.
    Lent,
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Limits(invalid) => invalid.fmt(f),
            Self::Overbooked(overbooked) => overbooked.fmt(f),
            Self::Lent => f.write_str(
                "limits: they are a cluster's, and hold on all its hosts, whatever a device does (`weir throttle GROUP --cluster` changes them)",
            ),
            Self::TooDeep => write!(
                f,
                "group: nested too deeply; there may be {} levels, disks included (put it into a group further up)",
                MAX_LEVELS
            ),
        }
    }
}

impl core::error::Error for Refused {}

impl From<Invalid> for Refused {
    fn from(invalid: Invalid) -> Self {
        Self::Limits(invalid)
    }
}

impl From<Overbooked> for Refused {
    fn from(overbooked: Overbooked) -> Self {
        Self::Overbooked(overbooked)
    }
}

/// What can be promised of the device below a node.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reservable {
    /// In operations and bytes per second; 0 is unknown, and bounds nothing.
    pub amounts: [u64; 2],
    /// When a probe measured it, in seconds since 1970; `None` where the device is imitated.
    pub probed_at_s: Option<u32>,
}

/// What a node has to give its children.
#[derive(Clone, Copy, Debug)]
pub(super) struct Supply {
    pub(super) limits: Limits,
    pub(super) device: Reservable,
}

impl Supply {
    pub(super) fn check(&self, promised: [u64; 2]) -> Result<(), Overbooked> {
        for unit in Unit::ALL {
            let asked = promised[unit.index()];
            let of_device = self.device.probed_at_s.map_or(Bound::Rate, Bound::Probe);
            let bounds = [
                (Bound::Limit, most_that_passes(&self.limits, unit)),
                (of_device, self.device.amounts[unit.index()]),
            ];
            for (bound, available) in bounds {
                if available > 0 && asked > available {
                    return Err(Overbooked { unit, asked, available, bound });
                }
            }
        }
        Ok(())
    }
}

/// What these limits ever let pass in a second, reads and writes together; 0 if that has no bound.
fn most_that_passes(limits: &Limits, unit: Unit) -> u64 {
    let [total, read, write] = match unit {
        Unit::Iops => [LimitKind::IopsTotal, LimitKind::IopsRead, LimitKind::IopsWrite],
        Unit::Bps => [LimitKind::BpsTotal, LimitKind::BpsRead, LimitKind::BpsWrite],
    };
    let rate = |kind| limits.limit(kind).rate;
    if rate(total) > 0 {
        rate(total)
    } else if rate(read) > 0 && rate(write) > 0 {
        rate(read) + rate(write)
    } else {
        0
    }
}

/// What a node takes of its parent's supply: its own promise, or the sum below it if that is more.
pub(super) fn demand(share: Share, promised_below: [u64; 2]) -> [u64; 2] {
    let own = [share.iops_reservation(), share.bps_reservation()];
    Unit::ALL.map(|unit| own[unit.index()].max(promised_below[unit.index()]))
}
