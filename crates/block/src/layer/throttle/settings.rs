//! Settings of a disk and of a group, as values that are compared and replaced as a whole.

use policy::{
    latency_target::LatencySettings,
    throttle::{Limits, NodeShare},
    volume_quota::VolumeQuota,
    watermark::Watermark,
};

/// Limits and share of a disk. The default is no limits and an equal share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DiskSettings {
    /// Its own limits, in addition to those of every group above it. May follow the disk's size
    /// ([`Limits::at_size`]).
    pub limits: Limits,
    /// Its share of its group's limits.
    pub share: NodeShare,
    /// Percent of its device's utilization below which its own limits are not enforced.
    pub watermark: Watermark,
    /// Its latency target, and its floor beside targets of others.
    pub latency: LatencySettings,
    /// Its quotas by volume, and the limit while one is used up.
    pub quota: VolumeQuota,
}

/// Limits and share of a group. The default is no limits and an equal share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupSettings {
    /// Limits that all disks below share. Never follow a size.
    pub limits: Limits,
    /// Its share of its parent's limits; has no effect without a parent.
    pub share: NodeShare,
    /// Percent of a device's utilization below which its limits are not enforced.
    pub watermark: Watermark,
    /// Its latency target, and its floor beside targets of others.
    pub latency: LatencySettings,
    /// Its quotas by volume, and the limit while one is used up.
    pub quota: VolumeQuota,
}

impl From<GroupSettings> for DiskSettings {
    fn from(settings: GroupSettings) -> Self {
        let GroupSettings { limits, share, watermark, latency, quota } = settings;
        Self { limits, share, watermark, latency, quota }
    }
}

impl From<DiskSettings> for GroupSettings {
    fn from(settings: DiskSettings) -> Self {
        let DiskSettings { limits, share, watermark, latency, quota } = settings;
        Self { limits, share, watermark, latency, quota }
    }
}
