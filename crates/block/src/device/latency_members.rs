//! The members of a device with latency targets: which disks share the device, and which of them
//! the controller treats as one member.
//!
//! A disk is a member, with these exceptions for groups whose disks are all on one device:
//!
//! - The disks of a group with a target are one member. A target of a disk or group inside has no
//!   effect; the config and all commands reject it.
//! - The disks of a group with a reservation are one member, unless a disk or group inside has a
//!   target.
//!
//! Otherwise, each disk of a group with a target has that target, and each disk of a group with a
//! reservation has a part of it by weight.
//!
//! Prefetch has no node in the throttle tree, so it is part of its disk. Never samples or caps; see
//! `latency_sampler.rs`.

use std::{
    collections::{BTreeMap, HashMap},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    iter,
    sync::{Arc, Weak},
};

use policy::{
    latency_target::{MemberClass, PercentileTarget, RateCap},
    throttle::NodeShare,
};

use super::{Device, DeviceId, DeviceNumber, UnderlyingDevice, underlying_device};
use crate::{
    disk::Disk,
    layer::throttle::{DiskSettings, GroupSettings, ThrottleGroup},
};

/// A device or server whose performance disks share.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum SharedDevice {
    /// A device of this host, or an imitated one.
    Local(DeviceId),
    /// A file system without a local device: a network file system, or one in memory.
    FileSystem(DeviceNumber),
    /// An NBD server, or a pool of a Ceph cluster.
    Server(String),
    /// Nothing that other disks use: memory, for example. The number identifies the disk.
    Unshared(u64),
}

impl SharedDevice {
    /// The device of a disk. `device` is its [`Device`], if it has one.
    pub fn below_disk(disk: &Disk, device: Option<&Device>) -> Self {
        if let Some(device) = device {
            return Self::Local(device.id());
        }
        let storage = disk.image().storage();
        match underlying_device(storage) {
            UnderlyingDevice::File(number) => Self::FileSystem(DeviceNumber::unpack(number)),
            UnderlyingDevice::Imitated(budget) => Self::Local(DeviceId::Imitated(Arc::as_ptr(budget).addr())),
            UnderlyingDevice::Nothing => {
                storage.server().map_or_else(|| Self::Unshared(disk.opening_id()), Self::Server)
            }
        }
    }
}

/// The node of the throttle tree that a cap applies to.
#[derive(Clone, Debug)]
pub(super) enum CappedNode {
    Disk(Weak<Disk>),
    Group(Weak<ThrottleGroup>),
}

impl CappedNode {
    pub(super) fn set_cap(&self, cap: Option<RateCap>) {
        match self {
            Self::Disk(disk) => disk.upgrade().into_iter().for_each(|disk| disk.throttle().set_cap(cap)),
            Self::Group(group) => group.upgrade().into_iter().for_each(|group| group.set_cap(cap)),
        }
    }

    pub(super) fn take_cap_wait(&self) -> bool {
        match self {
            Self::Disk(disk) => disk.upgrade().is_some_and(|disk| disk.throttle().take_cap_wait()),
            Self::Group(group) => group.upgrade().is_some_and(|group| group.take_cap_wait()),
        }
    }

    /// Identifies the node while a reference to it exists.
    pub(super) fn address(&self) -> usize {
        match self {
            Self::Disk(disk) => disk.as_ptr().addr(),
            Self::Group(group) => group.as_ptr().addr(),
        }
    }
}

/// A member, as it is sampled.
#[derive(Debug)]
pub(super) struct LatencyMember {
    pub(super) key: u64,
    pub(super) node: CappedNode,
    /// The member does not keep them alive.
    pub(super) disks: Vec<Weak<Disk>>,
    pub(super) class: MemberClass,
    pub(super) share: NodeShare,
    pub(super) floor_permyriad: Option<u16>,
    /// Name of the disk or group that has the target.
    pub(super) target_owner: Option<String>,
}

/// A disk with its settings and the groups that contain it, innermost first.
struct PlacedDisk {
    disk: Arc<Disk>,
    device: SharedDevice,
    settings: DiskSettings,
    groups: Vec<(Arc<ThrottleGroup>, GroupSettings)>,
}

/// What the disks below a group have in common.
struct GroupSummary {
    device: SharedDevice,
    is_on_one_device: bool,
    has_target_below: bool,
    /// Sum of the weights of the disks.
    weights: u64,
}

type GroupSummaries = HashMap<*const ThrottleGroup, GroupSummary>;

/// The members of all devices with a target.
pub(super) fn members_of(
    disks: impl Iterator<Item = (Arc<Disk>, SharedDevice)>,
) -> BTreeMap<SharedDevice, Vec<LatencyMember>> {
    let placed: Vec<PlacedDisk> = disks.map(|(disk, device)| PlacedDisk::new(disk, device)).collect();
    let mut summaries = GroupSummaries::new();
    for disk in &placed {
        disk.summarize(&mut summaries);
    }
    // By device, and then by the address of the node.
    let mut members: BTreeMap<SharedDevice, BTreeMap<u64, LatencyMember>> = BTreeMap::new();
    for PlacedDisk { disk, device, settings, groups } in placed {
        let member = member_of(&disk, &settings, &groups, &summaries);
        let of_device = members.entry(device).or_default();
        of_device.entry(member.key).or_insert(member).disks.push(Arc::downgrade(&disk));
    }
    let has_target = |of_device: &BTreeMap<u64, LatencyMember>| {
        of_device.values().any(|member| matches!(member.class, MemberClass::Target(_)))
    };
    members.retain(|_, of_device| has_target(of_device));
    members.into_iter().map(|(device, of_device)| (device, of_device.into_values().collect())).collect()
}

impl PlacedDisk {
    fn new(disk: Arc<Disk>, device: SharedDevice) -> Self {
        let settings = disk.throttle().settings();
        let above = iter::successors(disk.throttle().group(), |group| group.parent().cloned());
        let groups = above.map(|group| (Arc::clone(&group), group.settings())).collect();
        Self { disk, device, settings, groups }
    }

    /// Adds the disk to the summaries of its groups.
    fn summarize(&self, summaries: &mut GroupSummaries) {
        let mut has_target = self.settings.latency.target.is_some();
        for (group, settings) in &self.groups {
            let empty = || GroupSummary {
                device: self.device.clone(),
                is_on_one_device: true,
                has_target_below: false,
                weights: 0,
            };
            let summary = summaries.entry(Arc::as_ptr(group)).or_insert_with(empty);
            summary.is_on_one_device &= summary.device == self.device;
            summary.has_target_below |= has_target;
            summary.weights += u64::from(self.settings.share.weight());
            has_target |= settings.latency.target.is_some();
        }
    }
}

/// The member that a disk belongs to, without its disks.
fn member_of(
    disk: &Arc<Disk>,
    settings: &DiskSettings,
    groups: &[(Arc<ThrottleGroup>, GroupSettings)],
    summaries: &GroupSummaries,
) -> LatencyMember {
    let summary = |group: &Arc<ThrottleGroup>| &summaries[&Arc::as_ptr(group)];
    // The outermost group with a target, so that nested targets have one meaning.
    let with_target = groups.iter().rev().find(|(_, settings)| settings.latency.target.is_some());
    let with_reservation = || {
        let is_reserved = |(group, settings): &&(Arc<ThrottleGroup>, GroupSettings)| {
            let is_reserved = settings.share.iops_reservation() > 0 || settings.share.bps_reservation() > 0;
            is_reserved && summary(group).is_on_one_device && !summary(group).has_target_below
        };
        groups.iter().rev().find(is_reserved)
    };
    let as_one = match with_target {
        Some(owner) => Some(owner).filter(|(group, _)| summary(group).is_on_one_device),
        None if settings.latency.target.is_none() => with_reservation(),
        None => None,
    };
    let target = with_target.map_or(settings.latency.target, |(_, settings)| settings.latency.target);
    let class = target.map_or(MemberClass::Ordinary, MemberClass::Target);
    let owner = with_target.map_or_else(|| disk.name().to_string(), |(group, _)| group.name().to_owned());
    let target_owner = target.map(|_: PercentileTarget| owner);
    if let Some((group, settings)) = as_one {
        return LatencyMember {
            key: key_of(group.name()),
            node: CappedNode::Group(Arc::downgrade(group)),
            disks: Vec::new(),
            class,
            share: settings.share,
            floor_permyriad: settings.latency.floor_permyriad,
            target_owner,
        };
    }
    let [mut iops, mut bps] = [settings.share.iops_reservation(), settings.share.bps_reservation()];
    for (group, of_group) in groups {
        let part = |reserved: u64| {
            let weight = u128::from(settings.share.weight());
            (u128::from(reserved) * weight / u128::from(summary(group).weights.max(1))) as u64
        };
        iops = iops.max(part(of_group.share.iops_reservation()));
        bps = bps.max(part(of_group.share.bps_reservation()));
    }
    let own_floor = settings.latency.floor_permyriad;
    LatencyMember {
        key: key_of(disk.name()),
        node: CappedNode::Disk(Arc::downgrade(disk)),
        disks: Vec::new(),
        class,
        share: settings.share.with_reservation(iops, bps),
        floor_permyriad: own_floor,
        target_owner,
    }
}

/// Key of a member. Disks and groups share one namespace. The hash has no random key, so that a
/// simulation with the same seed is deterministic.
fn key_of(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}
