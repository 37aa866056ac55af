//! What is simulated, as plain values: groups, disks, and the devices below them. What
//! [`setup`](super::setup) makes of options and a config file.

pub(crate) use block::layer::throttle::DiskSettings;
use policy::{device::Rates, prefetch};

use super::device::{Place, StationSpec};

/// The size of a disk of which none is known: no offset is past its end.
pub(crate) const UNKNOWN_SIZE: u64 = 1 << 63;

#[derive(Clone, Debug, Default)]
pub(crate) struct World {
    /// Each after the one it lies in.
    pub(crate) groups: Vec<Group>,
    pub(crate) disks: Vec<Disk>,
    pub(crate) stations: Vec<StationSpec>,
    pub(crate) budgets: Vec<Rates>,
}

/// What holds for several disks together.
#[derive(Clone, Debug)]
pub(crate) struct Group {
    pub(crate) name: String,
    /// What its members are held to together; the same as a disk may be.
    pub(crate) hold: DiskSettings,
    /// Its index in [`World::groups`], smaller than this group's.
    pub(crate) parent: Option<usize>,
}

#[derive(Clone, Debug)]
pub(crate) struct Disk {
    pub(crate) name: String,
    pub(crate) hold: DiskSettings,
    pub(crate) group: Option<usize>,
    pub(crate) prefetch: prefetch::Settings,
    /// [`UNKNOWN_SIZE`] at most.
    pub(crate) size_bytes: u64,
    pub(crate) place: Place,
    /// What a watermark looks at; none where the daemon would find no device either.
    pub(crate) watched: Option<Place>,
}

impl World {
    pub(crate) fn add_station(&mut self, spec: StationSpec) -> usize {
        self.stations.push(spec);
        self.stations.len() - 1
    }

    pub(crate) fn add_budget(&mut self, spec: Rates) -> usize {
        self.budgets.push(spec);
        self.budgets.len() - 1
    }

    /// A device of both; a budget only where something is bounded.
    pub(crate) fn add_device(&mut self, (station, budget): (StationSpec, Rates)) -> Place {
        let station = Some(self.add_station(station));
        let budget = (budget != Rates::default()).then(|| self.add_budget(budget));
        Place { station, budget }
    }

    /// The groups that a disk is in, its own first.
    pub(crate) fn groups_above<'a>(&'a self, disk: &Disk) -> impl Iterator<Item = usize> + use<'a> {
        std::iter::successors(disk.group, |&group| self.groups[group].parent)
    }

    /// By disk: the number of the part of the world that it is in. What is in different parts has
    /// nothing to do with each other: no group and no device is in both.
    pub(crate) fn parts(&self) -> Vec<usize> {
        let groups = self.groups.len();
        let stations = groups + self.disks.len();
        let budgets = stations + self.stations.len();
        let mut sets: Vec<usize> = (0..budgets + self.budgets.len()).collect();
        let mut unite = |one: usize, other: usize| {
            let (one, other) = (root(&mut sets, one), root(&mut sets, other));
            sets[one.max(other)] = one.min(other);
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

impl Disk {
    /// The same without limits, its own and those of groups, and with nothing read ahead.
    pub(crate) fn unlimited(&self) -> Self {
        Self {
            hold: DiskSettings::default(),
            group: None,
            prefetch: prefetch::Settings::off(),
            ..self.clone()
        }
    }
}

/// The smallest of the set, all on the way there made to know it.
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

    fn disk(group: Option<usize>, station: Option<usize>) -> Disk {
        Disk {
            name: String::new(),
            hold: DiskSettings::default(),
            group,
            prefetch: prefetch::Settings::off(),
            size_bytes: UNKNOWN_SIZE,
            place: Place { station, budget: None },
            watched: None,
        }
    }

    fn group(parent: Option<usize>) -> Group {
        Group { name: String::new(), hold: DiskSettings::default(), parent }
    }

    #[test]
    fn what_shares_a_group_or_a_device_is_one_part() {
        let world = World {
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
