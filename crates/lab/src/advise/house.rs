//! Who is advised: disks by themselves or the groups of a config file, and what they lie on.
//!
//! ```text
//!   names of the trace, a config file, devices ─► simulate's Setup ─► World ─► tenants
//! ```
//!
//! A tenant is what a limit would be set on: the group that a disk is in, or the disk. What the
//! file holds tenants to is what is to be replaced; what it says of others (groups around them,
//! members of a group) stays in force in every simulation, but reading ahead does not.

use std::collections::HashMap;

use anyhow::anyhow;
use block::layer::throttle::DiskSettings;
use console::Failure;
use policy::{
    prefetch,
    throttle::{Limits, Share},
    watermark::Watermark,
};
use settings::suggest;

use super::{arguments::AdviseArgs, arrivals::Arrivals};
use crate::simulate::{Names, Place, Setup, Terms, UNKNOWN_SIZE, World, device_of};

#[derive(Debug)]
pub(super) struct House {
    /// With the limits that the config file has.
    pub(super) world: World,
    /// Without the limits of tenants.
    pub(super) bare: World,
    /// The world's disk by the trace's.
    pub(super) disks: Vec<usize>,
    pub(super) tenants: Vec<Tenant>,
    /// The tenant by the world's disk.
    pub(super) tenant_of: Vec<usize>,
    /// Whether anything takes time.
    pub(super) has_device: bool,
    pub(super) remarks: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Tenant {
    pub(super) name: String,
    /// By index in the world; else it is a disk.
    pub(super) group: Option<usize>,
    /// Of the trace.
    pub(super) disks: Vec<usize>,
    /// Whether the target is for it.
    pub(super) is_kept: bool,
}

impl Tenant {
    pub(super) const fn kind(&self) -> &'static str {
        if self.group.is_some() { "group" } else { "disk" }
    }
}

/// A part of a house as a world of its own.
#[derive(Debug)]
pub(super) struct Room {
    pub(super) world: World,
    pub(super) disks: Vec<usize>,
    pub(super) tenant_of: Vec<usize>,
}

impl House {
    pub(super) fn new(arguments: &AdviseArgs, arrivals: &Arrivals) -> Result<Self, Failure> {
        let devices = &arguments.devices;
        let device = match &devices.device[..] {
            [] => None,
            [only] if !devices.pack => Some(device_of(only, devices.state.as_deref())?),
            _ if devices.pack => None,
            _ => {
                return Err(Failure::Usage(anyhow!(
                    "--device: there are several (--pack says which disks go onto which)"
                )));
            }
        };
        let setup = match &arguments.config {
            Some(path) => Setup::of_config(path, device)?,
            None => {
                let disk = settings::Settings::default();
                let terms = Terms { group: None, disk, prefetch: prefetch::Settings::off() };
                Setup::of_terms(&terms, UNKNOWN_SIZE, (devices.delay.as_ref(), devices.rate.as_ref()), device)
            }
        };
        let names = arrivals.streams.iter().map(|stream| stream.name.as_str());
        let mut house = Self::of_setup(&setup, names)?;
        house.choose(&arguments.whom).map_err(|why| Failure::Failed(anyhow!(why)))?;
        Ok(house)
    }

    pub(super) fn of_setup<'a>(setup: &Setup, names: impl Iterator<Item = &'a str>) -> anyhow::Result<Self> {
        let mut world = setup.world.clone();
        let mut known = Names::new(setup);
        for name in names {
            known.add(name, &mut world).map_err(|why| anyhow!(why))?;
        }
        world.disks.iter_mut().for_each(|disk| disk.prefetch = prefetch::Settings::off());
        let disks = known.known;
        let mut tenants: Vec<Tenant> = Vec::new();
        let mut tenant_of = vec![usize::MAX; world.disks.len()];
        let mut of_group = HashMap::new();
        for (of_trace, &of_world) in disks.iter().enumerate() {
            let group = world.disks[of_world].group;
            let mut add = |name: &str| {
                tenants.push(Tenant { name: name.to_owned(), group, disks: Vec::new(), is_kept: true });
                tenants.len() - 1
            };
            let tenant = match group {
                Some(group) => *of_group.entry(group).or_insert_with(|| add(&world.groups[group].name)),
                None => add(&world.disks[of_world].name),
            };
            tenants[tenant].disks.push(of_trace);
            tenant_of[of_world] = tenant;
        }
        let takes_time = |place: &Place| place.station.is_some() || place.budget.is_some();
        let has_device = world.disks.iter().any(|disk| takes_time(&disk.place));
        let remarks = setup.remarks.clone();
        let bare = world.clone();
        let mut house = Self { world, bare, disks, tenants, tenant_of, has_device, remarks };
        let mut bare = std::mem::take(&mut house.bare);
        (0..house.tenants.len()).for_each(|tenant| house.limit(&mut bare, tenant, Limits::default()));
        house.bare = bare;
        Ok(house)
    }

    /// The target is for these alone, if any is named.
    pub(super) fn choose(&mut self, whom: &[String]) -> Result<(), String> {
        for name in whom {
            if !self.tenants.iter().any(|tenant| tenant.name == *name) {
                return Err(self.unknown(name));
            }
        }
        if !whom.is_empty() {
            self.tenants.iter_mut().for_each(|tenant| tenant.is_kept = whom.contains(&tenant.name));
        }
        Ok(())
    }

    fn unknown(&self, name: &str) -> String {
        let member = self.world.disks.iter().position(|disk| disk.name == name);
        if let Some(group) = member.and_then(|disk| self.world.disks[disk].group) {
            let group = &self.world.groups[group].name;
            return format!(
                "{name}: is advised together with its group (--for {group}); which limit of another member would spare it is told without --config (name the device with --rate, --delay or --device, and --for {name})"
            );
        }
        let names = self.tenants.iter().map(|tenant| tenant.name.as_str());
        match suggest::nearest(name, names) {
            Some(near) => format!("{name}: the trace has no requests of it (did you mean {near}?)"),
            None => format!(
                "{name}: the trace has no requests of a disk or group of this name (weir trace info lists its disks)"
            ),
        }
    }

    /// Holds a tenant to these limits.
    pub(super) fn limit(&self, world: &mut World, tenant: usize, limits: Limits) {
        self.hold(world, tenant, |hold| {
            hold.limits = limits;
            // What is lifted now and then holds nothing that could be promised.
            hold.watermark = Watermark::ALWAYS;
        });
    }

    /// What the config file holds a tenant to.
    pub(super) fn held(&self, tenant: usize) -> &DiskSettings {
        let Tenant { group, disks, .. } = &self.tenants[tenant];
        match group {
            Some(group) => &self.world.groups[*group].hold,
            None => &self.world.disks[self.disks[disks[0]]].hold,
        }
    }

    pub(super) fn share(&self, world: &mut World, tenant: usize, share: Share) {
        self.hold(world, tenant, |hold| hold.share = share);
    }

    fn hold(&self, world: &mut World, tenant: usize, change: impl Fn(&mut DiskSettings)) {
        let Tenant { group, disks, .. } = &self.tenants[tenant];
        match group {
            Some(group) => change(&mut world.groups[*group].hold),
            None => change(&mut world.disks[self.disks[disks[0]]].hold),
        }
    }

    /// These tenants' disks of a world, with all groups, and with the devices that they lie on.
    pub(super) fn room(&self, world: &World, tenants: &[usize]) -> Room {
        let mut room = Room {
            world: World { groups: world.groups.clone(), ..World::default() },
            disks: Vec::new(),
            tenant_of: Vec::new(),
        };
        room.disks = vec![usize::MAX; self.disks.len()];
        let (mut stations, mut budgets) = (HashMap::new(), HashMap::new());
        for (place, &tenant) in tenants.iter().enumerate() {
            for &of_trace in &self.tenants[tenant].disks {
                let mut disk = world.disks[self.disks[of_trace]].clone();
                let mut moved = |at: Place| Place {
                    station: at.station.map(|station| {
                        *stations
                            .entry(station)
                            .or_insert_with(|| room.world.add_station(world.stations[station]))
                    }),
                    budget: at.budget.map(|budget| {
                        *budgets.entry(budget).or_insert_with(|| room.world.add_budget(world.budgets[budget]))
                    }),
                };
                (disk.place, disk.watched) = (moved(disk.place), disk.watched.map(&mut moved));
                room.disks[of_trace] = room.world.disks.len();
                room.world.disks.push(disk);
                room.tenant_of.push(place);
            }
        }
        room
    }

    /// Tenants that share a device, together.
    pub(super) fn neighbours(&self) -> Vec<Vec<usize>> {
        let mut devices: HashMap<(bool, usize), usize> = HashMap::new();
        let mut sets: Vec<Vec<usize>> = (0..self.tenants.len()).map(|tenant| vec![tenant]).collect();
        let mut set_of: Vec<usize> = (0..self.tenants.len()).collect();
        for (disk, &tenant) in self.tenant_of.iter().enumerate().filter(|(_, tenant)| **tenant != usize::MAX)
        {
            let Place { station, budget } = self.world.disks[disk].place;
            for device in station.map(|at| (true, at)).into_iter().chain(budget.map(|at| (false, at))) {
                let other = set_of[*devices.entry(device).or_insert(tenant)];
                let own = set_of[tenant];
                if own != other {
                    let moved = std::mem::take(&mut sets[own]);
                    moved.iter().for_each(|&tenant| set_of[tenant] = other);
                    sets[other].extend(moved);
                }
            }
        }
        sets.retain(|set| !set.is_empty());
        sets.iter_mut().for_each(|set| set.sort_unstable());
        sets
    }
}
