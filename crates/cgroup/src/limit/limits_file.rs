//! The limits file: configured limits with bursts, watermarks and groups.
//!
//! ```text
//!   weir cgroup limit ──► /run/weir/cgroups.json ──► weir cgroup watch, its guard, weir cgroup show
//! ```
//!
//! In /run by default, so the file disappears at a reboot like the cgroups themselves. Written
//! atomically, under a lock (`locks.rs`). A file in an unknown format is an error that names it,
//! and is never overwritten. Never touches a cgroup.

use std::{
    collections::{BTreeMap, HashSet},
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Component, Path, PathBuf},
};

use anyhow::{Context as _, bail};
use block::device::{DeviceIdentity, DeviceNumber, SysfsRoots};
use policy::{
    steering::IoMaxRates,
    throttle::{LimitKind, LimitPart, LimitSetting, Limits, NodeShare},
    watermark::Watermark,
};
use serde::{Deserialize, Serialize};
use settings::state::atomic_file;

use crate::{control_group::ControlGroup, kernel};

pub(crate) const DEFAULT_PATH: &str = "/run/weir/cgroups.json";
/// Enough for some ten thousand control groups.
const MAX_FILE_BYTES: u64 = 16 << 20;
pub(crate) const DEFAULT_WEIGHT: u32 = 100;

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct LimitsFile {
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(crate) groups: BTreeMap<String, StoredLimits>,
    #[serde(default)]
    pub(crate) limits: Vec<CgroupEntry>,
    /// Limits of control groups on disks that appear.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) any_device: Vec<AnyDeviceEntry>,
}

/// Limit of a control group on each disk that has no entry yet.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct AnyDeviceEntry {
    /// Path from the mount of the cgroup hierarchy.
    pub(crate) cgroup: PathBuf,
    /// `None` if the limits are the cgroup's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    group: Option<String>,
    /// 0 if no weight was set.
    #[serde(default)]
    weight: u32,
    /// Target of io.latency in microseconds; 0 if none was set.
    #[serde(default, skip_serializing_if = "is_zero")]
    latency_target_us: u64,
    #[serde(default)]
    own: StoredLimits,
}

impl AnyDeviceEntry {
    /// Change that sets these limits on a disk that has appeared.
    pub(crate) fn change_for_new_disk(&self) -> anyhow::Result<LimitsChange> {
        let limits = self.own.limits()?;
        let set = LimitSetting::ALL
            .into_iter()
            .filter(|setting| limits.get(*setting) != Limits::default().get(*setting));
        Ok(LimitsChange {
            limits: set.map(|setting| (setting, limits.get(setting))).collect(),
            watermark: Some(self.own.watermark).filter(|percent| *percent > 0),
            weight: (self.weight != 0).then_some(self.weight),
            latency_target_us: (self.latency_target_us != 0).then_some(self.latency_target_us),
            group: self.group.clone(),
            cluster: false,
        })
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct StoredLimits {
    #[serde(default)]
    limits: BTreeMap<String, u64>,
    #[serde(default)]
    watermark: u8,
    /// True if the group belongs to a cluster-wide limit. The limits are then this host's fallback
    /// share, in force while the daemon has no quota lease.
    #[serde(default, skip_serializing_if = "is_not")]
    cluster: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
const fn is_not(value: &bool) -> bool {
    !*value
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "as serde calls it")]
const fn is_zero(value: &u64) -> bool {
    *value == 0
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case", deny_unknown_fields)]
pub(crate) struct CgroupEntry {
    /// Path from the mount of the cgroup hierarchy.
    pub(crate) cgroup: PathBuf,
    device: String,
    /// The disk's permanent identity, which also identifies its measured capacity.
    pub(crate) device_key: String,
    /// `None` if the limits are the cgroup's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) group: Option<String>,
    /// 0 if no weight was set.
    #[serde(default)]
    weight: u32,
    /// Target of io.latency in microseconds; 0 if none was set.
    #[serde(default, skip_serializing_if = "is_zero")]
    latency_target_us: u64,
    #[serde(default)]
    own: StoredLimits,
}

/// A change; absent settings stay as they are.
#[derive(Clone, Debug, Default)]
pub(crate) struct LimitsChange {
    /// New values; 0 removes a limit.
    pub(crate) limits: Vec<(LimitSetting, u64)>,
    pub(crate) watermark: Option<u8>,
    pub(crate) weight: Option<u32>,
    /// Target of io.latency in microseconds; 0 removes it.
    pub(crate) latency_target_us: Option<u64>,
    /// Empty to leave the group.
    pub(crate) group: Option<String>,
    /// Requires that the group belongs to a cluster-wide limit.
    pub(crate) cluster: bool,
}

impl LimitsChange {
    pub(crate) fn of_rates(IoMaxRates { bps, iops }: IoMaxRates) -> Self {
        const KINDS: [LimitKind; 4] =
            [LimitKind::BpsRead, LimitKind::BpsWrite, LimitKind::IopsRead, LimitKind::IopsWrite];
        let rates = bps.into_iter().chain(iops).zip(KINDS);
        let limits =
            rates.filter_map(|(rate, kind)| Some((LimitSetting::Limit(kind, LimitPart::Rate), rate?)));
        Self { limits: limits.collect(), ..Self::default() }
    }

    #[cfg(test)]
    pub(crate) fn of(limits: &[(&str, u64)]) -> Self {
        let setting =
            |&(name, value): &(&str, u64)| (LimitSetting::from_name(name).expect("a setting"), value);
        Self { limits: limits.iter().map(setting).collect(), ..Self::default() }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.limits.is_empty()
            && self.watermark.is_none()
            && self.weight.is_none()
            && self.latency_target_us.is_none()
            && self.group.is_none()
    }
}

impl StoredLimits {
    /// The fallback share in a cluster's group.
    pub(crate) fn of_cluster(fallback: &Limits) -> Self {
        let set = LimitSetting::ALL
            .into_iter()
            .filter(|setting| fallback.get(*setting) != Limits::default().get(*setting));
        let limits = set.map(|setting| (setting.name().to_owned(), fallback.get(setting))).collect();
        Self { limits, watermark: 0, cluster: true }
    }

    pub(crate) const fn is_of_cluster(&self) -> bool {
        self.cluster
    }

    pub(crate) fn limits(&self) -> anyhow::Result<Limits> {
        let mut limits = Limits::default();
        for (name, &value) in &self.limits {
            let Some(setting) = LimitSetting::from_name(name) else { bail!("{name} is no limit") };
            limits.set(setting, value).map_err(|invalid| anyhow::anyhow!("{invalid}"))?;
        }
        limits.validate_in_force().map_err(|invalid| anyhow::anyhow!("{invalid}"))?;
        Ok(limits)
    }

    pub(crate) fn watermark(&self) -> anyhow::Result<Watermark> {
        Watermark::new(self.watermark).with_context(|| format!("watermark {} is above 100", self.watermark))
    }

    fn change(&mut self, change: &LimitsChange) {
        for (setting, value) in &change.limits {
            // A burst length of 0 s is invalid and must be rejected, not treated as a removal.
            let is_length = matches!(setting, LimitSetting::Limit(_, LimitPart::BurstLength));
            if *value == 0 && !is_length {
                self.limits.remove(setting.name());
                self.drop_burst_of(*setting, change);
            } else {
                self.limits.insert(setting.name().to_owned(), *value);
            }
        }
        self.reset_burst_times(change);
        self.watermark = change.watermark.unwrap_or(self.watermark);
    }

    /// Removes burst lengths that a given `burst-for` replaces, and `burst-for` with the last burst
    /// rate, unless the same change sets them.
    fn reset_burst_times(&mut self, change: &LimitsChange) {
        let is_given = |name: &str| change.limits.iter().any(|(setting, _)| setting.name() == name);
        let burst_for = LimitSetting::BurstFor.name();
        let parts = |part| LimitKind::ALL.map(|kind| LimitSetting::Limit(kind, part).name());
        if is_given(burst_for) && self.limits.contains_key(burst_for) {
            for length in parts(LimitPart::BurstLength).into_iter().filter(|length| !is_given(length)) {
                self.limits.remove(length);
            }
        }
        let has_burst = parts(LimitPart::BurstRate).iter().any(|rate| self.limits.contains_key(*rate));
        if !has_burst && !is_given(burst_for) {
            self.limits.remove(burst_for);
        }
    }

    /// Removes the burst of a removed limit, unless the same change sets it.
    fn drop_burst_of(&mut self, limit: LimitSetting, change: &LimitsChange) {
        let LimitSetting::Limit(kind, LimitPart::Rate) = limit else { return };
        for part in [LimitPart::BurstRate, LimitPart::BurstLength].map(|part| LimitSetting::Limit(kind, part))
        {
            if change.limits.iter().all(|(setting, _)| *setting != part) {
                self.limits.remove(part.name());
            }
        }
    }
}

impl CgroupEntry {
    pub(crate) fn device(&self) -> anyhow::Result<DeviceNumber> {
        kernel::number(&self.device).with_context(|| format!("{:?} is no device's number", self.device))
    }

    /// The device number as text, `254:0`.
    pub(crate) fn device_text(&self) -> &str {
        &self.device
    }

    /// The disk's number, if the disk exists and its number has not been reassigned to another
    /// disk.
    pub(crate) fn disk(&self, roots: &SysfsRoots) -> anyhow::Result<DeviceNumber> {
        let number = self.device()?;
        let identity = match DeviceIdentity::resolve(number, roots) {
            Ok(identity) => identity,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                bail!("device {number} is absent (its limits stay in the limits file)")
            }
            // A disk that cannot be identified is not necessarily another disk.
            Err(_) => return Ok(number),
        };
        if !identity.may_match(&self.device_key) {
            bail!(
                "device {number} is another disk now: {} instead of {} (set its limits again: \
                 `weir cgroup limit`)",
                identity.key(),
                self.device_key
            );
        }
        Ok(number)
    }

    /// True if `device` could name the entry's disk, even a removed one: by its number, or by
    /// any path.
    pub(crate) fn could_be_on(&self, device: &str, known: Option<DeviceNumber>) -> bool {
        match known {
            Some(number) => self.device().is_ok_and(|entry_number| entry_number == number),
            None => self.device == device || device.starts_with('/'),
        }
    }

    pub(crate) fn weight(&self) -> u32 {
        if self.weight == 0 { DEFAULT_WEIGHT } else { self.weight }
    }

    pub(crate) fn given_weight(&self) -> Option<u32> {
        (self.weight != 0).then_some(self.weight)
    }

    /// Target of io.latency, if one was set.
    pub(crate) fn latency_target_us(&self) -> Option<u64> {
        (self.latency_target_us != 0).then_some(self.latency_target_us)
    }
}

impl LimitsFile {
    /// The entry's own limits, or those of its group.
    pub(crate) fn limits_of<'a>(&'a self, entry: &'a CgroupEntry) -> &'a StoredLimits {
        static NONE: StoredLimits = StoredLimits { limits: BTreeMap::new(), watermark: 0, cluster: false };
        match &entry.group {
            None => &entry.own,
            Some(group) => self.groups.get(group).unwrap_or(&NONE),
        }
    }

    pub(crate) fn entry(&self, group: &ControlGroup, device: DeviceNumber) -> Option<&CgroupEntry> {
        let device = device.to_string();
        self.limits.iter().find(|entry| entry.cgroup == group.name && entry.device == device)
    }

    /// Changes the limits of a control group on a device; on an error nothing is changed.
    pub(crate) fn change(
        &mut self,
        group: &ControlGroup,
        (device, device_key): (DeviceNumber, &str),
        change: &LimitsChange,
    ) -> anyhow::Result<()> {
        // Work on a copy, so that a failed check leaves `self` unchanged.
        let mut next = self.clone();
        let number = device.to_string();
        let known = next.limits.iter().position(|entry| entry.cgroup == group.name && entry.device == number);
        let index = known.unwrap_or_else(|| {
            next.limits.push(CgroupEntry {
                cgroup: group.name.clone(),
                device: number,
                device_key: device_key.to_owned(),
                group: None,
                weight: 0,
                latency_target_us: 0,
                own: StoredLimits::default(),
            });
            next.limits.len() - 1
        });
        let entry = &mut next.limits[index];
        // A disk with a reused number may have another identity now.
        entry.device_key = device_key.to_owned();
        entry.weight = change.weight.unwrap_or(entry.weight);
        entry.latency_target_us = change.latency_target_us.unwrap_or(entry.latency_target_us);
        if let Some(name) = &change.group {
            if name.is_empty() {
                entry.group = None;
            } else {
                entry.group = Some(name.clone());
                // The group's limits replace its own ones.
                entry.own = StoredLimits::default();
            }
        }
        let shared = match &entry.group {
            None => &mut entry.own,
            Some(name) => {
                let stored = next.groups.entry(name.clone()).or_default();
                if change.cluster && !stored.cluster {
                    bail!(
                        "group {name} belongs to no cluster here (list it in control-groups of \
                         [cluster], and give the daemon the same file: cgroup-limits)"
                    );
                }
                if stored.cluster
                    && (!change.limits.is_empty() || change.watermark.is_some_and(|percent| percent > 0))
                {
                    bail!(
                        "the limits of group {name} are the cluster's, for all hosts (`weir \
                         throttle {name} --cluster` changes them there)"
                    );
                }
                stored
            }
        };
        shared.change(change);
        next.check_fallback_shares()?;
        // The group that it left may have no member any more.
        next.drop_empty_groups();
        next.check()?;
        *self = next;
        Ok(())
    }

    /// Removes an entry. Returns false if there was none.
    pub(crate) fn remove(&mut self, group: &ControlGroup, device: DeviceNumber) -> bool {
        let device = device.to_string();
        !self.remove_where(|entry| entry.cgroup == group.name && entry.device == device).is_empty()
    }

    pub(crate) fn remove_where(&mut self, is_meant: impl Fn(&CgroupEntry) -> bool) -> Vec<CgroupEntry> {
        let (forgotten, limits) = std::mem::take(&mut self.limits).into_iter().partition(is_meant);
        self.limits = limits;
        self.drop_empty_groups();
        forgotten
    }

    /// Changes the limits of a control group on disks that appear. In a group, its limits apply.
    pub(crate) fn change_any_device(
        &mut self,
        group: &ControlGroup,
        change: &LimitsChange,
    ) -> anyhow::Result<()> {
        let known = self.any_device.iter().position(|entry| entry.cgroup == group.name);
        let index = known.unwrap_or_else(|| {
            let (cgroup, own) = (group.name.clone(), StoredLimits::default());
            self.any_device.push(AnyDeviceEntry {
                cgroup,
                group: None,
                weight: 0,
                latency_target_us: 0,
                own,
            });
            self.any_device.len() - 1
        });
        let entry = &mut self.any_device[index];
        entry.weight = change.weight.unwrap_or(entry.weight);
        entry.latency_target_us = change.latency_target_us.unwrap_or(entry.latency_target_us);
        if let Some(name) = &change.group {
            entry.group = (!name.is_empty()).then(|| name.clone());
            entry.own = StoredLimits::default();
        }
        if entry.group.is_none() {
            entry.own.change(change);
        }
        self.check()
    }

    /// Removes the limits of a control group on disks that appear. Returns false without any.
    pub(crate) fn remove_any_device(&mut self, cgroup: &Path) -> bool {
        let before = self.any_device.len();
        self.any_device.retain(|entry| entry.cgroup != cgroup);
        self.any_device.len() < before
    }

    fn drop_empty_groups(&mut self) {
        let limits = &self.limits;
        self.groups.retain(|name, shared| {
            // A cluster's group exists by the daemon's config file, with or without members.
            shared.cluster || limits.iter().any(|entry| entry.group.as_ref() == Some(name))
        });
    }

    /// Rejects a fallback share below the kernel's minimum. The kernel accepts no rate below 2, so
    /// many members would exceed a small share together.
    fn check_fallback_shares(&self) -> anyhow::Result<()> {
        for (name, shared) in self.groups.iter().filter(|(_, shared)| shared.cluster) {
            let members =
                self.limits.iter().filter(|entry| entry.group.as_ref() == Some(name)).count() as u64;
            let limits = shared.limits()?;
            for kind in LimitKind::ALL {
                let is_total = matches!(kind, LimitKind::BpsTotal | LimitKind::IopsTotal);
                // A total is split in two directions with a minimum of 2 each.
                let (rate, min_rate) = (limits.limit(kind).rate, members * if is_total { 4 } else { 2 });
                if rate > 0 && rate < min_rate {
                    bail!(
                        "group {name}: the fallback share of this host is {rate} per second of {}, \
                         and the kernel needs at least {min_rate} for {members} control groups (raise \
                         it: `weir throttle {name} --cluster --safe-share`)",
                        LimitSetting::Limit(kind, LimitPart::Rate).name()
                    );
                }
            }
        }
        Ok(())
    }

    /// Replaces the clusters' groups by `groups`; a group with members stays even if it is not
    /// listed.
    pub(crate) fn replace_cluster_groups(&mut self, groups: &BTreeMap<String, Limits>) {
        let limits = &self.limits;
        self.groups.retain(|name, shared| {
            !shared.cluster
                || groups.contains_key(name)
                || limits.iter().any(|entry| entry.group.as_ref() == Some(name))
        });
        for (name, fallback) in groups {
            self.groups.insert(name.clone(), StoredLimits::of_cluster(fallback));
        }
    }

    /// File with only the entries whose limits belong to a cluster.
    pub(crate) fn only_cluster_entries(mut self) -> Self {
        let groups = &self.groups;
        let is_leased = |entry: &CgroupEntry| {
            let group = entry.group.as_ref().and_then(|name| groups.get(name));
            group.is_some_and(StoredLimits::is_of_cluster)
        };
        self.limits.retain(is_leased);
        self
    }

    fn check(&self) -> anyhow::Result<()> {
        for entry in &self.any_device {
            let context = || format!("cgroup {} on any device", entry.cgroup.display());
            entry.own.limits().and_then(|_| entry.own.watermark()).with_context(context)?;
            if entry.weight != 0 && !NodeShare::WEIGHTS.contains(&entry.weight) {
                return Err(anyhow::anyhow!("weight {} is not from 1 to 10000", entry.weight))
                    .with_context(context);
            }
        }
        for (name, shared) in &self.groups {
            shared.limits().and_then(|_| shared.watermark()).with_context(|| format!("group {name}"))?;
        }
        // The file can be edited by hand, so every invariant is checked.
        let mut seen = HashSet::new();
        for entry in &self.limits {
            if !seen.insert((&entry.cgroup, &entry.device)) {
                bail!("cgroup {} is listed twice for device {}", entry.cgroup.display(), entry.device);
            }
            let context = || format!("cgroup {}", entry.cgroup.display());
            if entry.cgroup.components().any(|component| component == Component::ParentDir) {
                return Err(anyhow::anyhow!("the path contains \"..\"")).with_context(context);
            }
            entry.own.limits().and_then(|_| entry.own.watermark()).with_context(context)?;
            entry.device().with_context(context)?;
            if entry.weight != 0 && !NodeShare::WEIGHTS.contains(&entry.weight) {
                return Err(anyhow::anyhow!("weight {} is not from 1 to 10000", entry.weight))
                    .with_context(context);
            }
            if let Some(name) = entry.group.as_ref().filter(|name| !self.groups.contains_key(*name)) {
                return Err(anyhow::anyhow!("there is no group {name}")).with_context(context);
            }
        }
        Ok(())
    }

    /// Reads the file; empty if it does not exist.
    pub(crate) fn load(path: &Path) -> anyhow::Result<Self> {
        let read = || -> anyhow::Result<Self> {
            let Some(text) = atomic_file::read(path, MAX_FILE_BYTES)? else { return Ok(Self::default()) };
            let limits_file: Self = serde_json::from_slice(&text)?;
            limits_file.check()?;
            Ok(limits_file)
        };
        read().with_context(|| {
            format!(
                "{}: these limits are invalid (correct the file, or remove it and set them again)",
                path.display()
            )
        })
    }

    /// The file's limits, or `before` if the file is unreadable or was removed.
    pub(crate) fn latest(path: &Path, before: &Self) -> Self {
        let latest = path.exists().then(|| Self::load(path).ok()).flatten();
        latest.unwrap_or_else(|| before.clone())
    }

    /// Replaces the file atomically; on an error the old file remains.
    pub(super) fn save(&self, path: &Path) -> anyhow::Result<()> {
        let write = || -> anyhow::Result<()> {
            let mut text = serde_json::to_vec_pretty(self)?;
            text.push(b'\n');
            // Synced: the user may have chosen a location that survives a reboot.
            Ok(atomic_file::write(path, &text, true)?)
        };
        write().with_context(|| {
            format!("{} cannot be written (give another file with --limits)", path.display())
        })
    }
}

/// Version of the file: differs after each change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct FileVersion(Option<(u64, i64, i64)>);

impl FileVersion {
    pub(crate) const NONE: Self = Self(None);

    pub(crate) fn of(path: &Path) -> Self {
        Self(
            fs::metadata(path).ok().map(|metadata| (metadata.ino(), metadata.mtime(), metadata.mtime_nsec())),
        )
    }
}

#[cfg(test)]
#[path = "limits_file_tests.rs"]
mod tests;
