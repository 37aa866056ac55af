//! The simulated groups, disks and devices, as plain values.

pub use block::layer::throttle::DiskSettings;
use policy::{device_model::DeviceRates, prefetch, throttle::Limits};

use super::device::{DevicePlacement, StationSpec};

/// Size of disks whose size is unknown: no offset is beyond the end.
pub const UNKNOWN_SIZE: u64 = 1 << 63;

/// Disks, groups and devices to simulate.
#[derive(Clone, Debug, Default)]
pub struct WorldSpec {
    /// Groups, each after its parent.
    pub groups: Vec<DiskGroupSpec>,
    /// Disks.
    pub disks: Vec<DiskSpec>,
    /// Devices with service times.
    pub stations: Vec<StationSpec>,
    /// Devices with rate limits.
    pub budgets: Vec<DeviceRates>,
}

/// A group.
#[derive(Clone, Debug)]
pub struct DiskGroupSpec {
    /// Name for messages.
    pub name: String,
    /// Its limits and share.
    pub settings: DiskSettings,
    /// Index of its parent in [`WorldSpec::groups`], smaller than its own.
    pub parent: Option<usize>,
}

/// A disk.
#[derive(Clone, Debug)]
pub struct DiskSpec {
    /// Name for messages.
    pub name: String,
    /// Its limits and share.
    pub settings: DiskSettings,
    /// Index of its group.
    pub group: Option<usize>,
    /// Prefetch settings.
    pub prefetch: prefetch::PrefetchConfig,
    /// Size in bytes; [`UNKNOWN_SIZE`] if it is unknown.
    pub size_bytes: u64,
    /// Its device.
    pub place: DevicePlacement,
    /// Device whose utilization is sampled; `None` if the daemon would find none.
    pub sampled_device: Option<DevicePlacement>,
}

/// A device with service times and rate limits.
#[derive(Clone, Copy, Debug)]
pub struct DeviceModel {
    /// Its service times.
    pub station: StationSpec,
    /// Its rate limits; the default for none.
    pub rates: DeviceRates,
}

impl WorldSpec {
    /// Adds a station and returns its index.
    pub fn add_station(&mut self, spec: StationSpec) -> usize {
        self.stations.push(spec);
        self.stations.len() - 1
    }

    /// Adds a budget and returns its index.
    pub fn add_budget(&mut self, spec: DeviceRates) -> usize {
        self.budgets.push(spec);
        self.budgets.len() - 1
    }

    /// Adds a device and returns its indices. A budget is added only if a rate is limited.
    pub fn add_device(&mut self, device: DeviceModel) -> DevicePlacement {
        let DeviceModel { station, rates } = device;
        let station = Some(self.add_station(station));
        let budget = (rates != DeviceRates::default()).then(|| self.add_budget(rates));
        DevicePlacement { station, budget }
    }

    /// Adds a group with these limits for all disks without a group.
    pub fn add_common_group(&mut self, limits: Limits) {
        let group = self.groups.len();
        let settings = DiskSettings { limits, ..DiskSettings::default() };
        self.groups.push(DiskGroupSpec { name: String::new(), settings, parent: None });
        self.disks.iter_mut().for_each(|disk| disk.group = disk.group.or(Some(group)));
    }

    /// True if a disk or group has a limit.
    pub fn is_limited(&self) -> bool {
        let mut all_settings = self
            .disks
            .iter()
            .map(|disk| &disk.settings)
            .chain(self.groups.iter().map(|group| &group.settings));
        all_settings.any(|hold| hold.limits != Limits::default())
    }

    /// Groups above a disk, innermost first.
    pub fn groups_above<'a>(&'a self, disk: &DiskSpec) -> impl Iterator<Item = usize> + use<'a> {
        std::iter::successors(disk.group, |&group| self.groups[group].parent)
    }

    /// Index of the part of the world that contains each disk. Different parts share no group and
    /// no device.
    pub fn parts(&self) -> Vec<usize> {
        let groups = self.groups.len();
        let stations = groups + self.disks.len();
        let budgets = stations + self.stations.len();
        let mut sets: Vec<usize> = (0..budgets + self.budgets.len()).collect();
        let mut unite = |first: usize, second: usize| {
            let (first_root, second_root) = (root(&mut sets, first), root(&mut sets, second));
            sets[first_root.max(second_root)] = first_root.min(second_root);
        };
        for (index, group) in self.groups.iter().enumerate() {
            group.parent.into_iter().for_each(|parent| unite(index, parent));
        }
        for (index, disk) in self.disks.iter().enumerate() {
            let index = groups + index;
            disk.group.into_iter().for_each(|group| unite(index, group));
            disk.place.station.into_iter().for_each(|station| unite(index, stations + station));
            disk.place.budget.into_iter().for_each(|budget| unite(index, budgets + budget));
        }
        let mut numbers = std::collections::HashMap::new();
        let mut part = |index: usize| {
            let next = numbers.len();
            *numbers.entry(root(&mut sets, groups + index)).or_insert(next)
        };
        (0..self.disks.len()).map(&mut part).collect()
    }
}

impl DiskSpec {
    pub(crate) fn unlimited(&self) -> Self {
        Self {
            settings: DiskSettings::default(),
            group: None,
            prefetch: prefetch::PrefetchConfig::off(),
            ..self.clone()
        }
    }
}

/// Smallest element of the set, with path compression (union-find).
fn root(sets: &mut [usize], mut at: usize) -> usize {
    while sets[at] != at {
        sets[at] = sets[sets[at]];
        at = sets[at];
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(group: Option<usize>, station: Option<usize>) -> DiskSpec {
        DiskSpec {
            name: String::new(),
            settings: DiskSettings::default(),
            group,
            prefetch: prefetch::PrefetchConfig::off(),
            size_bytes: UNKNOWN_SIZE,
            place: DevicePlacement { station, budget: None },
            sampled_device: None,
        }
    }

    fn group(parent: Option<usize>) -> DiskGroupSpec {
        DiskGroupSpec { name: String::new(), settings: DiskSettings::default(), parent }
    }

    #[test]
    fn disks_with_shared_group_or_device_are_one_part() {
        let world = WorldSpec {
            groups: vec![group(None), group(Some(0)), group(None)],
            disks: vec![
                disk(Some(0), None),
                disk(None, None),
                disk(Some(1), None),
                disk(Some(2), Some(0)),
                disk(None, Some(0)),
                disk(None, Some(1)),
            ],
            stations: vec![StationSpec::default(); 2],
            budgets: Vec::new(),
        };
        assert_eq!(world.parts(), [0, 1, 0, 2, 2, 3]);
    }
}
