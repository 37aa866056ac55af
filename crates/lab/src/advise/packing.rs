//! Placement of disks on as few devices as possible.
//!
//! First fit decreasing (Johnson, *Near-Optimal Bin Packing Algorithms*, 1973), by the work of each
//! tenant in each part of the trace: a device is full when its utilization in any part would exceed
//! a threshold. Thresholds are tried from high to low, until a simulation of each device with the
//! requests of all its tenants meets the target. Then smaller numbers of devices are tried, from
//! the lower bound upwards, with tenants spread evenly instead of by a threshold.

use std::{cmp::Reverse, collections::HashMap};

use simulator::{
    device::{DevicePlacement, SimulatedDevices},
    world::{DeviceModel, WorldSpec},
};

use super::{
    tenant_limits::AdviseSearch,
    trial::{SimulatedTrial, TrialResult},
};

/// Bound on identical devices.
const MAX_DEVICES: usize = 1000;
/// Number of tenants above which the exhaustive search is skipped; a set of them is a `u64`.
const MAX_EXHAUSTIVE_TENANTS: usize = 64;
/// Requests simulated in an exhaustive search before it is abandoned.
const MAX_SEARCH_REQUESTS: u64 = 5_000_000;
/// Thresholds of utilization, tried in this order.
const THRESHOLDS: [f64; 10] = [1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1];

/// The available devices: any number of one kind, or an inventory.
#[derive(Clone, Debug)]
pub(super) enum AvailableDevices {
    Identical(DeviceModel),
    Inventory(Vec<DeviceModel>),
}

impl AvailableDevices {
    fn max_count(&self) -> usize {
        match self {
            Self::Identical(_) => MAX_DEVICES,
            Self::Inventory(models) => models.len(),
        }
    }

    fn at(&self, place: usize) -> DeviceModel {
        match self {
            Self::Identical(model) => *model,
            Self::Inventory(models) => models[place],
        }
    }
}

/// A device with its tenants and their simulated results.
#[derive(Debug)]
pub(super) struct DeviceAssignment {
    /// Index of the device in the inventory; identical devices are numbered from 0.
    pub(super) device: usize,
    pub(super) tenants: Vec<usize>,
    pub(super) results: Vec<TrialResult>,
    /// Utilization in the busiest part of the trace.
    pub(super) busiest: f64,
}

#[derive(Debug)]
pub(super) struct Packing {
    pub(super) devices: Vec<DeviceAssignment>,
    /// Tenants that fit nowhere, even alone.
    pub(super) left_over: Vec<usize>,
    /// Lower bound on the number of devices, by the amount of work.
    pub(super) at_least: usize,
}

/// Packs all tenants that have requests.
pub(super) fn pack(search: &AdviseSearch<'_>, devices: &AvailableDevices) -> anyhow::Result<Packing> {
    let packer = Packer::new(search, devices);
    let mut packing = Packing { devices: Vec::new(), left_over: Vec::new(), at_least: packer.min_devices() };
    let mut order = Vec::new();
    for tenant in 0..search.tenants.tenants.len() {
        if search.tenants.tenants[tenant]
            .disks
            .iter()
            .all(|&disk| search.arrivals.streams[disk].iter().next().is_none())
        {
            continue;
        }
        // A tenant is left over if it misses the target on every device, even without neighbours.
        let mut fits = false;
        for kind in packer.kinds() {
            fits = fits || packer.meets_target(kind, &[tenant])?;
        }
        if fits { order.push(tenant) } else { packing.left_over.push(tenant) }
    }
    // Largest first, as first fit decreasing requires; the index makes equal peaks deterministic.
    order.sort_by_key(|&tenant| (Reverse((packer.peak(0, tenant) * 1e9) as u64), tenant));
    let mut best: Option<Vec<Vec<usize>>> = None;
    // From dense to loose: the first threshold whose packing passes the simulation wins.
    for threshold in THRESHOLDS {
        if let Some(bins) = packer.first_fit(&order, threshold)
            && packer.all_keep_target(&bins)?
        {
            best = Some(bins);
            break;
        }
    }
    // Then smaller numbers of devices than the first fit needed, or any if it failed. Each number
    // is tried with tenants spread evenly, then by exhaustive search if there are few tenants.
    let max_devices =
        best.as_ref().map_or(devices.max_count().min(order.len()), |bins| used(bins).saturating_sub(1));
    for count in (packing.at_least.max(1)..=max_devices).take(if order.is_empty() { 0 } else { MAX_DEVICES })
    {
        let bins = packer.spread(&order, count);
        let bins =
            if packer.all_keep_target(&bins)? { Some(bins) } else { packer.exhaustive(&order, count)? };
        if bins.is_some() {
            best = bins;
            break;
        }
    }
    let Some(bins) = best else {
        packing.left_over.extend(order);
        packing.left_over.sort_unstable();
        return Ok(packing);
    };
    for (device, mut tenants) in bins.into_iter().enumerate().filter(|(_, tenants)| !tenants.is_empty()) {
        tenants.sort_unstable();
        let results = packer.run(device, &tenants)?;
        let busiest = packer.busiest(device, &tenants);
        packing.devices.push(DeviceAssignment { device, tenants, results, busiest });
    }
    Ok(packing)
}

fn used(bins: &[Vec<usize>]) -> usize {
    bins.iter().filter(|bin| !bin.is_empty()).count()
}

struct Packer<'a> {
    search: &'a AdviseSearch<'a>,
    devices: &'a AvailableDevices,
    /// Seconds of work in each part of the trace, by kind of device and tenant.
    work: Vec<Vec<Vec<f64>>>,
    part_s: f64,
}

impl<'a> Packer<'a> {
    fn new(search: &'a AdviseSearch<'a>, devices: &'a AvailableDevices) -> Self {
        let blocks = search.criterion.blocks;
        let work = |model: DeviceModel| {
            let of_tenant = |tenant: usize| {
                let mut work = vec![0.0; blocks.count];
                let mut worked = ServiceTime::new(model);
                // Work is attributed to the arrival's block, although a backlog may be served
                // later.
                for (_, arrival) in search.arrivals.merged(&search.tenants.tenants[tenant].disks) {
                    work[blocks.of(arrival.at_ns)] += worked.add(arrival.op, arrival.length);
                }
                work
            };
            (0..search.tenants.tenants.len()).map(of_tenant).collect()
        };
        let kinds = match devices {
            AvailableDevices::Identical(_) => 1,
            AvailableDevices::Inventory(models) => models.len(),
        };
        let work = (0..kinds).map(|kind| work(devices.at(kind))).collect();
        Self { search, devices, work, part_s: blocks.seconds(search.arrivals.length_ns) }
    }

    fn kinds(&self) -> std::ops::Range<usize> {
        0..self.work.len()
    }

    fn kind(&self, device: usize) -> usize {
        device.min(self.work.len() - 1)
    }

    fn work_of(&self, device: usize, tenant: usize) -> &[f64] {
        &self.work[self.kind(device)][tenant]
    }

    fn peak(&self, device: usize, tenant: usize) -> f64 {
        self.work_of(device, tenant).iter().copied().fold(0.0, f64::max)
    }

    fn load(&self, device: usize, tenants: &[usize]) -> Vec<f64> {
        let mut sum = vec![0.0; self.search.criterion.blocks.count];
        for &tenant in tenants {
            sum.iter_mut().zip(self.work_of(device, tenant)).for_each(|(sum, work)| *sum += work);
        }
        sum
    }

    fn busiest(&self, device: usize, tenants: &[usize]) -> f64 {
        self.load(device, tenants).into_iter().fold(0.0, f64::max) / self.part_s
    }

    /// Lower bound from the total work. All work has to complete by the end of the trace: a
    /// backlog at that time would miss any latency target.
    fn min_devices(&self) -> usize {
        let length_s = (self.search.arrivals.length_ns as f64 / 1e9).max(self.part_s);
        // The most favourable kind of device gives a valid lower bound for a mixed inventory.
        let all = |kind: usize| self.work[kind].iter().flatten().sum::<f64>() / length_s;
        let min_devices = self.kinds().map(all).fold(f64::INFINITY, f64::min);
        // Tolerates a small backlog at the end.
        ((min_devices - 0.05).ceil() as usize).max(1)
    }

    fn first_fit(&self, order: &[usize], threshold: f64) -> Option<Vec<Vec<usize>>> {
        let mut bins: Vec<(Vec<usize>, Vec<f64>)> = Vec::new();
        for &tenant in order {
            let fits = |device: usize, load: &[f64]| {
                load.iter()
                    .zip(self.work_of(device, tenant))
                    .all(|(load, work)| load + work <= threshold * self.part_s)
            };
            // First fit: earlier devices are filled before a new one is opened.
            let place = bins.iter().enumerate().position(|(device, (_, load))| fits(device, load));
            let place = match place {
                Some(place) => place,
                None => loop {
                    if bins.len() == self.devices.max_count() {
                        return None;
                    }
                    bins.push((Vec::new(), vec![0.0; self.search.criterion.blocks.count]));
                    let device = bins.len() - 1;
                    // Of identical devices, none would have more room: a tenant above the threshold
                    // gets one for itself. In an inventory, the next device is tried.
                    if fits(device, &bins[device].1) || self.work.len() == 1 {
                        break device;
                    }
                },
            };
            let (tenants, load) = &mut bins[place];
            tenants.push(tenant);
            load.iter_mut().zip(self.work_of(place, tenant)).for_each(|(load, work)| *load += work);
        }
        Some(bins.into_iter().map(|(tenants, _)| tenants).collect())
    }

    /// Assigns each tenant in order to the device whose peak utilization with that tenant is
    /// lowest.
    fn spread(&self, order: &[usize], count: usize) -> Vec<Vec<usize>> {
        let mut bins = vec![Vec::new(); count];
        for &tenant in order {
            let with = |(device, tenants): (usize, &Vec<usize>)| {
                let mut tenants = tenants.clone();
                tenants.push(tenant);
                (self.busiest(device, &tenants), device)
            };
            let least_loaded =
                bins.iter().enumerate().map(with).min_by(|one, other| one.0.total_cmp(&other.0));
            if let Some((_, device)) = least_loaded {
                bins[device].push(tenant);
            }
        }
        bins
    }

    /// Backtracking over all assignments, tenant by tenant. Prunes: additional requests never make
    /// a device faster, so an infeasible set has no feasible superset.
    fn exhaustive(&self, order: &[usize], count: usize) -> anyhow::Result<Option<Vec<Vec<usize>>>> {
        if order.len() > MAX_EXHAUSTIVE_TENANTS {
            return Ok(None);
        }
        let mut search =
            ExhaustiveSearch { packer: self, order, left: MAX_SEARCH_REQUESTS, known: HashMap::new() };
        let mut bins = vec![0; count];
        let found = search.place_next(0, &mut bins)?;
        let tenants_of = |bin: &u64| {
            (0..order.len()).filter(|place| bin >> place & 1 == 1).map(|place| order[place]).collect()
        };
        Ok(found.then(|| bins.iter().map(tenants_of).collect()))
    }

    fn all_keep_target(&self, bins: &[Vec<usize>]) -> anyhow::Result<bool> {
        for (device, tenants) in bins.iter().enumerate() {
            // A device with twice its capacity of work in any part cannot meet a target: the long
            // simulation is skipped.
            if !tenants.is_empty()
                && (self.busiest(device, tenants) > 2.0 || !self.meets_target(device, tenants)?)
            {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn meets_target(&self, device: usize, tenants: &[usize]) -> anyhow::Result<bool> {
        Ok(self.run(device, tenants)?.iter().all(|result| result.holds(&self.search.criterion.target)))
    }

    fn run(&self, device: usize, tenants: &[usize]) -> anyhow::Result<Vec<TrialResult>> {
        let all_tenants = self.search.tenants;
        let mut tenant_world = all_tenants.world_of(&all_tenants.unlimited_world, tenants);
        let place = tenant_world.world.add_device(self.devices.at(self.kind(device)));
        tenant_world.world.disks.iter_mut().for_each(|disk| disk.place = place);
        let disks: Vec<usize> =
            tenants.iter().flat_map(|&tenant| all_tenants.tenants[tenant].disks.iter().copied()).collect();
        let trial = SimulatedTrial {
            world: &tenant_world.world,
            disks: &tenant_world.disks,
            tenants: &tenant_world.tenant_of,
            count: tenants.len(),
        };
        trial.run(self.search.arrivals.merged(&disks), &self.search.criterion, self.search.stop)
    }
}

/// Exhaustive search. A set of tenants is a bit mask of their positions in the order.
struct ExhaustiveSearch<'a> {
    packer: &'a Packer<'a>,
    order: &'a [usize],
    /// Budget of requests to simulate.
    left: u64,
    /// Cache: true if a set keeps the target on a kind of device.
    known: HashMap<(usize, u64), bool>,
}

impl ExhaustiveSearch<'_> {
    fn place_next(&mut self, place: usize, bins: &mut [u64]) -> anyhow::Result<bool> {
        if place == self.order.len() {
            return Ok(true);
        }
        for device in 0..bins.len() {
            let kind = self.packer.kind(device);
            // Empty devices of one kind are interchangeable: only the first is tried.
            if bins[device] == 0
                && (0..device).any(|other| bins[other] == 0 && self.packer.kind(other) == kind)
            {
                continue;
            }
            let before = bins[device];
            bins[device] |= 1 << place;
            // Depth-first; the assignment is undone below if the rest does not fit.
            if self.meets_target(kind, bins[device])? && self.place_next(place + 1, bins)? {
                return Ok(true);
            }
            bins[device] = before;
        }
        Ok(false)
    }

    fn meets_target(&mut self, kind: usize, set: u64) -> anyhow::Result<bool> {
        if let Some(&is_met) = self.known.get(&(kind, set)) {
            return Ok(is_met);
        }
        let members = (0..self.order.len()).filter(|place| set >> place & 1 == 1);
        let tenants: Vec<usize> = members.map(|place| self.order[place]).collect();
        let all_tenants = self.packer.search.tenants;
        let disks = tenants.iter().flat_map(|&tenant| &all_tenants.tenants[tenant].disks);
        let requests: u64 = disks.map(|&disk| self.packer.search.arrivals.streams[disk].requests).sum();
        // Out of budget counts as infeasible: the search then returns without a result.
        let Some(left) = self.left.checked_sub(requests) else { return Ok(false) };
        self.left = left;
        let is_met =
            self.packer.busiest(kind, &tenants) <= 2.0 && self.packer.meets_target(kind, &tenants)?;
        self.known.insert((kind, set), is_met);
        Ok(is_met)
    }
}

/// Accumulates the service time of a device, in seconds.
struct ServiceTime {
    devices: SimulatedDevices,
    place: DevicePlacement,
    before_ns: u64,
}

impl ServiceTime {
    fn new(model: DeviceModel) -> Self {
        let mut world = WorldSpec::default();
        let place = world.add_device(model);
        let mut devices = SimulatedDevices::default();
        devices.follow(&world.stations, &world.budgets);
        Self { devices, place, before_ns: 0 }
    }

    fn add(&mut self, op: recording::RequestOp, length: u64) -> f64 {
        // All requests begin at time 0: only the accumulated service time is of interest.
        self.devices.begin(self.place, op, length, 0);
        // Far in the future, when all work is complete.
        let worked_ns = self.devices.worked_ns(self.place, u64::MAX / 2);
        (worked_ns - std::mem::replace(&mut self.before_ns, worked_ns)) as f64 / 1e9
    }
}
