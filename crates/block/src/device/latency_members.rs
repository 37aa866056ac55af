//! The members of devices with latency targets, among the running disks.
//!
//! [`policy::latency_target::memberships`] decides which disks are one member. Prefetch has no node
//! in the throttle tree, so it is part of its disk. Never samples or caps; see
//! `latency_sampler.rs`.

use std::{
    collections::BTreeMap,
    hash::{DefaultHasher, Hash as _, Hasher as _},
    iter,
    sync::{Arc, Weak},
};

use policy::{
    latency_target::{LatencyMemberSettings, MemberClass, Membership, PlacedDisk, RateCap, memberships},
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
        let image = disk.image();
        let storage = image.storage();
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

/// The members of all devices with a target.
pub(super) fn members_of(
    disks: impl Iterator<Item = (Arc<Disk>, SharedDevice)>,
) -> BTreeMap<SharedDevice, Vec<LatencyMember>> {
    let mut groups: BTreeMap<usize, Arc<ThrottleGroup>> = BTreeMap::new();
    let mut running = Vec::new();
    let mut placed = Vec::new();
    for (disk, device) in disks {
        let above = iter::successors(disk.throttle().group(), |group| group.parent().cloned());
        let above = above.map(|group| {
            let GroupSettings { latency, share, .. } = group.settings();
            let address = Arc::as_ptr(&group).addr();
            groups.insert(address, group);
            (address, LatencyMemberSettings { latency, share })
        });
        let above = above.collect();
        let DiskSettings { latency, share, .. } = disk.throttle().settings();
        placed.push(PlacedDisk { device, settings: LatencyMemberSettings { latency, share }, groups: above });
        running.push(disk);
    }
    // By device, and then by key.
    let mut members: BTreeMap<SharedDevice, BTreeMap<u64, LatencyMember>> = BTreeMap::new();
    let all = memberships(&placed);
    for ((disk, membership), PlacedDisk { device, .. }) in running.iter().zip(all).zip(placed) {
        let member = member(disk, &membership, &groups);
        let of_device = members.entry(device).or_default();
        of_device.entry(member.key).or_insert(member).disks.push(Arc::downgrade(disk));
    }
    let has_target = |of_device: &BTreeMap<u64, LatencyMember>| {
        of_device.values().any(|member| matches!(member.class, MemberClass::Target(_)))
    };
    members.retain(|_, of_device| has_target(of_device));
    members.into_iter().map(|(device, of_device)| (device, of_device.into_values().collect())).collect()
}

/// The member of a disk, without its disks.
fn member(
    disk: &Arc<Disk>,
    membership: &Membership<usize>,
    groups: &BTreeMap<usize, Arc<ThrottleGroup>>,
) -> LatencyMember {
    let Membership { group, class, share, floor_permyriad, target_group } = *membership;
    let (name, node) = match group.map(|group| &groups[&group]) {
        Some(group) => (group.name(), CappedNode::Group(Arc::downgrade(group))),
        None => (&**disk.name(), CappedNode::Disk(Arc::downgrade(disk))),
    };
    let owner = target_group.map_or(&**disk.name(), |group| groups[&group].name());
    let is_target = matches!(class, MemberClass::Target(_));
    LatencyMember {
        key: key_of(name),
        node,
        disks: Vec::new(),
        class,
        share,
        floor_permyriad,
        target_owner: is_target.then(|| owner.to_owned()),
    }
}

/// Key of a member. Disks and groups share one namespace. The hash has no random key, so that a
/// simulation with the same seed is deterministic.
fn key_of(name: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    name.hash(&mut hasher);
    hasher.finish()
}
