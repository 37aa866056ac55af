//! The tenants that are advised: single disks or groups of a config file, and their devices.
//!
//! ```text
//!   names of the trace, a config file, devices ─► SimulationSetup ─► WorldSpec ─► tenants
//! ```
//!
//! A tenant is the object that a limit would be set on: the group of a disk, or the disk. If a
//! member of a group is chosen, that group is open: its disks are tenants. The advice replaces the
//! limits that the file sets on tenants; other limits (of groups around them, of members of a
//! group) stay in force in every simulation. Prefetching is off.

use std::collections::{HashMap, HashSet};

use anyhow::anyhow;
use block::layer::throttle::DiskSettings;
use console::CommandFailure;
use policy::{
    latency_target::PercentileTarget,
    prefetch,
    throttle::{Limits, NodeShare},
    watermark::Watermark,
};
use settings::suggest;
use simulator::{
    device::DevicePlacement,
    world::{DiskSpec, UNKNOWN_SIZE, WorldSpec},
};

use super::{arguments::AdviseArgs, arrivals::TraceArrivals};
use crate::simulate::{DefaultDiskSettings, DiskResolver, SimulationSetup, device_of};

#[derive(Debug)]
pub(super) struct Tenants {
    /// With the limits of the config file.
    pub(super) world: WorldSpec,
    /// Without limits on tenants.
    pub(super) unlimited_world: WorldSpec,
    /// Index of the world's disk, by the trace's disk.
    pub(super) disks: Vec<usize>,
    pub(super) tenants: Vec<Tenant>,
    /// Index of the tenant, by the world's disk.
    pub(super) tenant_of: Vec<usize>,
    /// Groups that are no tenants because their disks are.
    open_groups: HashSet<usize>,
    /// The open groups and their ancestors: their limits stay in force.
    enclosing_groups: HashSet<usize>,
    /// True if any device has a service time.
    pub(super) has_device: bool,
    pub(super) remarks: Vec<String>,
}

#[derive(Clone, Debug)]
pub(super) struct Tenant {
    pub(super) name: String,
    /// Index of the group in the world; `None` for a disk.
    pub(super) group: Option<usize>,
    /// Indices in the trace.
    pub(super) disks: Vec<usize>,
    /// True if the target applies to it.
    pub(super) has_target: bool,
}

impl Tenant {
    pub(super) const fn kind(&self) -> &'static str {
        if self.group.is_some() { "group" } else { "disk" }
    }
}

/// A subset of the tenants as a separate world.
#[derive(Debug)]
pub(super) struct TenantWorld {
    pub(super) world: WorldSpec,
    pub(super) disks: Vec<usize>,
    pub(super) tenant_of: Vec<usize>,
}

impl Tenants {
    pub(super) fn new(arguments: &AdviseArgs, arrivals: &TraceArrivals) -> Result<Self, CommandFailure> {
        let devices = &arguments.devices;
        let device = match &devices.device[..] {
            [] => None,
            [only] if !devices.pack => Some(device_of(only, devices.state.as_deref())?),
            _ if devices.pack => None,
            _ => {
                return Err(CommandFailure::Usage(anyhow!(
                    "--device: several are given (--pack assigns disks to devices)"
                )));
            }
        };
        // Without a config file every disk of the trace is a tenant with default settings.
        let setup = match &arguments.config {
            Some(path) => SimulationSetup::of_config(path, device)?,
            None => {
                let disk = settings::ThrottleConfig::default();
                let terms =
                    DefaultDiskSettings { group: None, disk, prefetch: prefetch::PrefetchConfig::off() };
                SimulationSetup::of_terms(
                    &terms,
                    UNKNOWN_SIZE,
                    devices.delay.as_ref(),
                    devices.rate.as_ref(),
                    device,
                )
            }
        };
        let names = arrivals.streams.iter().map(|stream| stream.name.as_str());
        let mut tenants = Self::of_setup(&setup, names)?;
        tenants.restrict_target(&arguments.whom).map_err(|why| CommandFailure::Failed(anyhow!(why)))?;
        Ok(tenants)
    }

    pub(super) fn of_setup<'a>(
        setup: &SimulationSetup,
        names: impl Iterator<Item = &'a str>,
    ) -> anyhow::Result<Self> {
        let mut world = setup.world.clone();
        let mut known = DiskResolver::new(setup);
        for name in names {
            known.add(name, &mut world).map_err(|why| anyhow!(why))?;
        }
        // Offsets are not stored, so a prefetcher would see meaningless sequences.
        world.disks.iter_mut().for_each(|disk| disk.prefetch = prefetch::PrefetchConfig::off());
        let disks = known.known;
        // Without service times the target can only be about waits at limits.
        let takes_time = |place: &DevicePlacement| place.station.is_some() || place.budget.is_some();
        let has_device = world.disks.iter().any(|disk| takes_time(&disk.place));
        let remarks = setup.remarks.clone();
        let mut all_tenants = Self {
            unlimited_world: WorldSpec::default(),
            world,
            disks,
            tenants: Vec::new(),
            tenant_of: Vec::new(),
            open_groups: HashSet::new(),
            enclosing_groups: HashSet::new(),
            has_device,
            remarks,
        };
        // Tenants are determined last: they depend on the groups of all disks.
        all_tenants.determine_tenants();
        Ok(all_tenants)
    }

    /// Determines the tenants.
    pub(super) fn determine_tenants(&mut self) {
        self.tenants.clear();
        self.tenant_of = vec![usize::MAX; self.world.disks.len()];
        let mut of_group = HashMap::new();
        for (of_trace, &of_world) in self.disks.iter().enumerate() {
            let disk = &self.world.disks[of_world];
            let group = disk.group.filter(|group| !self.open_groups.contains(group));
            let tenants = &mut self.tenants;
            let mut add = |name: &str| {
                tenants.push(Tenant { name: name.to_owned(), group, disks: Vec::new(), has_target: true });
                tenants.len() - 1
            };
            let tenant = match group {
                Some(group) => *of_group.entry(group).or_insert_with(|| add(&self.world.groups[group].name)),
                None => add(&disk.name),
            };
            self.tenants[tenant].disks.push(of_trace);
            self.tenant_of[of_world] = tenant;
        }
        // A copy without tenants' limits is the starting point of every search.
        let mut unlimited_world = self.world.clone();
        (0..self.tenants.len())
            .for_each(|tenant| self.set_limits(&mut unlimited_world, tenant, Limits::default()));
        self.unlimited_world = unlimited_world;
    }

    /// Restricts the target to these tenants, if any is named.
    pub(super) fn restrict_target(&mut self, selected: &[String]) -> Result<(), String> {
        let is_tenant =
            |tenants: &Self, name: &String| tenants.tenants.iter().any(|tenant| tenant.name == *name);
        let unknown: Vec<&String> = selected.iter().filter(|name| !is_tenant(self, name)).collect();
        if !unknown.is_empty() {
            let group_of = |name: &String| {
                let disk = self.disks.iter().find(|disk| self.world.disks[**disk].name == *name);
                disk.and_then(|disk| self.world.disks[*disk].group)
            };
            // A named disk inside a group opens that group; any other unknown name is an error.
            let groups: Result<_, _> =
                unknown.iter().map(|name| group_of(name).ok_or_else(|| self.unknown(name))).collect();
            self.open_groups = groups?;
            let parent = |group: &usize| self.world.groups[*group].parent;
            let above = |&group: &usize| std::iter::successors(Some(group), parent);
            self.enclosing_groups = self.open_groups.iter().flat_map(above).collect();
            // Opening a group turns its disks into tenants, which changes all indices.
            self.determine_tenants();
        }
        if let Some(group) = selected.iter().find(|name| !is_tenant(self, name)) {
            return Err(format!(
                "{group}: so is a disk in it (--for takes a group or disks of it, not both)"
            ));
        }
        if !selected.is_empty() {
            self.tenants.iter_mut().for_each(|tenant| tenant.has_target = selected.contains(&tenant.name));
        }
        Ok(())
    }

    fn unknown(&self, name: &str) -> String {
        let names = self.tenants.iter().map(|tenant| tenant.name.as_str());
        match suggest::nearest(name, names) {
            Some(near) => format!("{name}: the trace has no requests of it (did you mean {near}?)"),
            None => format!(
                "{name}: the trace has no requests of a disk or group of this name (weir trace \
                 info lists its disks)"
            ),
        }
    }

    /// Sets the limits of a tenant.
    pub(super) fn set_limits(&self, world: &mut WorldSpec, tenant: usize, limits: Limits) {
        self.hold(world, tenant, |hold| {
            hold.limits = limits;
            // A watermark would lift the limits at times; then no target could be guaranteed.
            hold.watermark = Watermark::ALWAYS;
        });
    }

    /// True if the daemon accepts a latency target of the tenant: no group around it, and no group
    /// or disk in it, has one (`settings::nested_target_rule`) or gets one by the same advice.
    pub(super) fn may_have_latency_target(&self, tenant: usize) -> bool {
        let world = &self.world;
        let own = self.tenants[tenant].group;
        let is_set = |settings: &DiskSettings| settings.latency.target.is_some();
        let group_has_target = |group: usize| {
            let is_advised = |other: &Tenant| other.has_target && other.group == Some(group);
            is_set(&world.groups[group].settings) || self.tenants.iter().any(is_advised)
        };
        let mut around = world.groups_above(self.first_disk(tenant));
        if around.any(|above| Some(above) != own && group_has_target(above)) {
            return false;
        }
        let Some(own) = own else { return true };
        let is_inside = |group: Option<usize>| {
            std::iter::successors(group, |&group| world.groups[group].parent).any(|above| above == own)
        };
        // Also disks and groups of the file that the trace has no requests of.
        let has_disk = world.disks.iter().any(|disk| is_set(&disk.settings) && is_inside(disk.group));
        let has_group = (0..world.groups.len())
            .any(|group| is_inside(world.groups[group].parent) && group_has_target(group));
        let has_advised_disk = (0..self.tenants.len()).any(|other| {
            let Tenant { group, has_target, .. } = self.tenants[other];
            group.is_none() && has_target && is_inside(self.first_disk(other).group)
        });
        !has_disk && !has_group && !has_advised_disk
    }

    /// Sets the latency target of a tenant, which the daemon's controller keeps.
    pub(super) fn set_latency_target(&self, world: &mut WorldSpec, tenant: usize, target: PercentileTarget) {
        self.hold(world, tenant, |hold| hold.latency.target = Some(target));
    }

    /// Settings of a tenant in the config file.
    pub(super) fn configured(&self, tenant: usize) -> &DiskSettings {
        let Tenant { group, disks, .. } = &self.tenants[tenant];
        match group {
            Some(group) => &self.world.groups[*group].settings,
            None => &self.world.disks[self.disks[disks[0]]].settings,
        }
    }

    /// Groups with limits around a tenant that are open or around an open one; innermost first.
    pub(super) fn limited_around(&self, tenant: usize) -> impl Iterator<Item = usize> + '_ {
        let groups = self.world.groups_above(self.first_disk(tenant));
        groups.filter(|group| {
            self.enclosing_groups.contains(group)
                && self.world.groups[*group].settings.limits != Limits::default()
        })
    }

    /// The open group with limits that contains all of these tenants as disks.
    pub(super) fn common_group(&self, tenants: &[usize]) -> Option<usize> {
        let group = self.first_disk(*tenants.first()?).group?;
        let is_in = |tenant: &usize| self.first_disk(*tenant).group == Some(group);
        let is_limited = self.limited_around(tenants[0]).any(|limited| limited == group);
        (self.open_groups.contains(&group) && is_limited && tenants.iter().all(is_in)).then_some(group)
    }

    fn first_disk(&self, tenant: usize) -> &DiskSpec {
        &self.world.disks[self.disks[self.tenants[tenant].disks[0]]]
    }

    pub(super) fn share(&self, world: &mut WorldSpec, tenant: usize, share: NodeShare) {
        self.hold(world, tenant, |hold| hold.share = share);
    }

    fn hold(&self, world: &mut WorldSpec, tenant: usize, change: impl Fn(&mut DiskSettings)) {
        let Tenant { group, disks, .. } = &self.tenants[tenant];
        match group {
            Some(group) => change(&mut world.groups[*group].settings),
            None => change(&mut world.disks[self.disks[disks[0]]].settings),
        }
    }

    /// A world with the disks of these tenants, all groups, and only the devices that they use.
    pub(super) fn world_of(&self, world: &WorldSpec, tenants: &[usize]) -> TenantWorld {
        let mut tenant_world = TenantWorld {
            world: WorldSpec { groups: world.groups.clone(), ..WorldSpec::default() },
            disks: Vec::new(),
            tenant_of: Vec::new(),
        };
        tenant_world.disks = vec![usize::MAX; self.disks.len()];
        let (mut stations, mut budgets) = (HashMap::new(), HashMap::new());
        for (place, &tenant) in tenants.iter().enumerate() {
            for &of_trace in &self.tenants[tenant].disks {
                let mut disk = world.disks[self.disks[of_trace]].clone();
                // Stations and budgets are renumbered on first use, so that shared ones stay
                // shared.
                let mut moved = |at: DevicePlacement| DevicePlacement {
                    station: at.station.map(|station| {
                        *stations
                            .entry(station)
                            .or_insert_with(|| tenant_world.world.add_station(world.stations[station]))
                    }),
                    budget: at.budget.map(|budget| {
                        *budgets
                            .entry(budget)
                            .or_insert_with(|| tenant_world.world.add_budget(world.budgets[budget]))
                    }),
                };
                (disk.place, disk.sampled_device) = (moved(disk.place), disk.sampled_device.map(&mut moved));
                tenant_world.disks[of_trace] = tenant_world.world.disks.len();
                tenant_world.world.disks.push(disk);
                tenant_world.tenant_of.push(place);
            }
        }
        tenant_world
    }

    /// Sets of tenants that share a device, or an open group with limits.
    pub(super) fn neighbours(&self) -> Vec<Vec<usize>> {
        #[derive(PartialEq, Eq, Hash)]
        enum SharedResource {
            Station(usize),
            Budget(usize),
            Group(usize),
        }
        // Union of sets: two tenants with a common resource join their sets.
        let mut first: HashMap<SharedResource, usize> = HashMap::new();
        let mut sets: Vec<Vec<usize>> = (0..self.tenants.len()).map(|tenant| vec![tenant]).collect();
        let mut set_of: Vec<usize> = (0..self.tenants.len()).collect();
        for (disk, &tenant) in self.tenant_of.iter().enumerate().filter(|(_, tenant)| **tenant != usize::MAX)
        {
            let DevicePlacement { station, budget } = self.world.disks[disk].place;
            let devices =
                station.map(SharedResource::Station).into_iter().chain(budget.map(SharedResource::Budget));
            for common in devices.chain(self.limited_around(tenant).map(SharedResource::Group)) {
                // The first tenant at a resource represents it; later ones join its set.
                let other = set_of[*first.entry(common).or_insert(tenant)];
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
