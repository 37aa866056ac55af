//! The settings of a disk and of a group, as values: compared, kept and replaced as a whole.

use policy::{
    throttle::{Limits, Share},
    watermark::Watermark,
};

/// What a disk is held to and entitled to. The default is no limits and an equal share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskSettings {
    /// Its own limits, which hold besides those of every group above it.
    pub limits: Limits,
    /// Its share of what the group it is in may have.
    pub share: Share,
    /// Percent of its device's use below which its own limits are not enforced.
    pub watermark: Watermark,
}

/// What a group's members are held to together, and what the group is entitled to. The default is
/// no limits and an equal share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSettings {
    /// The limits that all disks below share.
    pub limits: Limits,
    /// Its share of what the group it is in may have; without one, nothing contends.
    pub share: Share,
    /// Percent of a device's use below which its limits are not enforced.
    pub watermark: Watermark,
}
