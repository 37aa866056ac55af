//! Converts options and a config file to the simulated world.
//!
//! ```text
//!   --config FILE ─► config::load ─► DesiredState ─► disks known by name ─────┐
//!                                                                             ├─► SimulationSetup ─► WorldSpec, which grows
//!   --iops-total … ─► checked settings ─► settings of every disk of a trace ──┘       with the disks that a trace names
//! ```
//!
//! Settings that a daemon would reject are rejected here with the same message. Images are not
//! opened; only their size is read.

use std::{collections::HashMap, fs, io::Read as _, path::Path};

use anyhow::{Context as _, ensure};
use block::device::{DeviceIdentity, DeviceNumber, SysfsRoots};
use policy::{
    device_model::DeviceRates,
    throttle::{LimitSetting, Limits},
};
use settings::{DesiredState, config, state::CapacityStore};
use simulator::{
    device::{DevicePlacement, ServiceTimeSpec, StationSpec, server_count, service_from_rates},
    world::{DeviceModel, DiskGroupSpec, DiskSettings, DiskSpec, UNKNOWN_SIZE, WorldSpec},
};
use storage::{StorageSpec, delay::DelayOptions, rate::RateOptions};

use super::device_spec::DeviceSpec;
use crate::{
    limit_lines::LimitRates,
    probe,
    simulate::arguments::{DefaultDiskSettings, SimulateArgs},
};

/// Bound on disks: each has tables of some 200 KiB.
pub(crate) const MAX_DISKS: usize = 10_000;

#[derive(Clone, Debug)]
pub(crate) struct SimulationSetup {
    pub(crate) world: WorldSpec,
    /// Effects of the config file in a daemon that are not simulated.
    pub(crate) remarks: Vec<String>,
    kind: SetupKind,
}

#[derive(Clone, Debug)]
enum SetupKind {
    Config {
        file: String,
        by_name: HashMap<String, usize>,
    },
    /// Every disk of a trace gets these settings, on its own or a shared device.
    Any(Box<AnyDisk>),
}

#[derive(Clone, Debug)]
struct AnyDisk {
    disk: DiskSpec,
    station: Option<StationSpec>,
    budget: Option<DeviceRates>,
}

impl SimulationSetup {
    /// Setup from the command line; rejects settings that a daemon rejects, and unprobed devices.
    pub(crate) fn new(arguments: &SimulateArgs) -> Result<Self, console::CommandFailure> {
        let devices = &arguments.devices;
        let device =
            devices.device.as_ref().map(|spec| device_of(spec, devices.state.as_deref())).transpose()?;
        match &arguments.config {
            Some(path) => Ok(Self::of_config(path, device)?),
            None => {
                let terms =
                    arguments.terms().map_err(|error| console::CommandFailure::Usage(error.into()))?;
                let size = devices.size.unwrap_or(UNKNOWN_SIZE);
                at_size(terms.disk.to_disk_settings(), size).context("limits")?;
                Ok(Self::of_terms(&terms, size, devices.delay.as_ref(), devices.rate.as_ref(), device))
            }
        }
    }

    pub(crate) fn of_config(path: &Path, device: Option<DeviceModel>) -> anyhow::Result<Self> {
        let plan = DesiredState::new(config::load(path)?, 0)?;
        let mut world = WorldSpec::default();
        let shared = device.map(|device| world.add_device(device));
        let by_name: HashMap<_, _> =
            plan.groups.iter().enumerate().map(|(index, group)| (&group.name, index)).collect();
        // The desired state lists groups in the order of their indices in the world.
        let index_of = |group: Option<&String>| group.and_then(|group| by_name.get(group).copied());
        for group in &plan.groups {
            let hold = group.settings.to_disk_settings();
            let parent = index_of(group.group.as_ref());
            world.groups.push(DiskGroupSpec { name: group.name.clone(), settings: hold, parent });
        }
        // Budgets with a name are shared by all disks that refer to it.
        let mut budgets = HashMap::new();
        for disk in &plan.disks {
            let size_bytes = size_of(&disk.image)?;
            let settings = at_size(disk.settings.to_disk_settings(), size_bytes)
                .with_context(|| format!("disk {}", disk.name))?;
            let mut place = DevicePlacement::default();
            if let Some(delay) = &disk.delay {
                place.station = Some(world.add_station(station_of(delay)));
            }
            if let Some(rate) = &disk.rate {
                let mut add = || world.add_budget(budget_of(rate));
                place.budget = Some(match &rate.shared {
                    Some(name) => *budgets.entry(name.clone()).or_insert_with(add),
                    None => add(),
                });
            }
            // A watermark observes the budget only: a station is no shared resource.
            let watched = place.budget.map(|_| DevicePlacement { station: None, ..place });
            // `--device` is for disks without a delay or rate in the config file.
            let (place, watched) = match shared {
                Some(shared) if place == DevicePlacement::default() => (shared, Some(shared)),
                _ => (place, watched),
            };
            world.disks.push(DiskSpec {
                name: disk.name.clone(),
                settings,
                group: index_of(disk.group.as_ref()),
                prefetch: disk.prefetch,
                size_bytes,
                place,
                sampled_device: watched,
            });
        }
        let names = world.disks.iter().enumerate().map(|(index, disk)| (disk.name.clone(), index));
        let by_name = names.collect();
        let faulty = plan.disks.iter().filter(|disk| !disk.faults.is_empty());
        let remark = |name| {
            format!(
                "The fault rules of the disk {name:?} are not simulated: its requests neither fail nor hang."
            )
        };
        let mut remarks: Vec<_> = faulty.map(|disk| remark(&disk.name)).collect();
        let disks = plan.disks.iter().map(|disk| (&disk.name, &disk.schedule));
        let schedules = plan.groups.iter().map(|group| (&group.name, &group.schedule)).chain(disks);
        remarks.extend(schedules.filter(|(_, schedule)| !schedule.entries.is_empty()).map(|(name, _)| {
            format!("The schedule of {name:?} is not simulated: its configured limits hold at all times.")
        }));
        let disks = plan.disks.iter().map(|disk| (&disk.name, &disk.settings));
        let members = plan.groups.iter().map(|group| (&group.name, &group.settings)).chain(disks);
        remarks.extend(
            members
                .filter(|(_, settings)| !settings.quota.is_none())
                .map(|(name, _)| format!("The quota of {name:?} is not simulated: it is never used up.")),
        );
        if let Some(shared) = shared {
            let with_own = world.disks.iter().filter(|disk| disk.place != shared).count();
            ensure!(
                with_own == 0 || with_own < world.disks.len(),
                "--device: it applies to no disk, because each in {} has a delay or rate (remove \
                 those, or leave --device out)",
                path.display()
            );
            if with_own > 0 {
                remarks.push(format!(
                    "--device applies to the disks without a delay or rate of their own: {} of {}.",
                    world.disks.len() - with_own,
                    world.disks.len()
                ));
            }
        }
        Ok(Self { world, remarks, kind: SetupKind::Config { file: path.display().to_string(), by_name } })
    }

    /// Setup for disks that are unknown beforehand. `device` is shared; `delay` and `rate` apply to
    /// each disk alone.
    pub(crate) fn of_terms(
        terms: &DefaultDiskSettings,
        size_bytes: u64,
        delay: Option<&DelayOptions>,
        rate: Option<&RateOptions>,
        device: Option<DeviceModel>,
    ) -> Self {
        let mut world = WorldSpec::default();
        // All disks are in the one group of the command line.
        let group = terms.group.as_ref().map(|(name, settings)| {
            world.groups.push(DiskGroupSpec {
                name: name.clone(),
                settings: settings.to_disk_settings(),
                parent: None,
            });
            0
        });
        let settings = terms.disk.to_disk_settings();
        let mut disk = DiskSpec {
            name: String::new(),
            settings: in_force(settings, size_bytes),
            group,
            prefetch: terms.prefetch,
            size_bytes,
            place: DevicePlacement::default(),
            sampled_device: None,
        };
        if let Some(device) = device {
            disk.place = world.add_device(device);
            disk.sampled_device = Some(disk.place);
        }
        // A shared budget is created once here; otherwise `DiskResolver::add` creates one for each
        // disk.
        let mut budget = rate.map(budget_of);
        if rate.is_some_and(|rate| rate.shared.is_some()) {
            disk.place.budget = budget.take().map(|budget| world.add_budget(budget));
            disk.sampled_device = Some(disk.place);
        }
        let any = AnyDisk { disk, station: delay.map(station_of), budget };
        Self { world, remarks: Vec::new(), kind: SetupKind::Any(Box::new(any)) }
    }

    /// Limits of each disk that is known by name, with those of its groups.
    pub(crate) fn limits_by_disk(&self) -> HashMap<String, LimitRates> {
        let of_disk = |disk: &DiskSpec| {
            let mut limits = LimitRates::default();
            limits.add(None, &disk.settings.limits);
            for group in self.world.groups_above(disk).map(|group| &self.world.groups[group]) {
                limits.add(Some(&group.name), &group.settings.limits);
            }
            (disk.name.clone(), limits)
        };
        self.world.disks.iter().map(of_disk).collect()
    }

    /// Upper bound of the number of independent parts.
    pub(crate) fn parts(&self) -> usize {
        match &self.kind {
            SetupKind::Config { .. } => self.world.parts().into_iter().max().map_or(1, |last| last + 1),
            SetupKind::Any(any)
                if any.disk.group.is_some() || any.disk.place != DevicePlacement::default() =>
            {
                1
            }
            SetupKind::Any(_) => usize::MAX,
        }
    }

    /// Maps a disk's index to its shard, including disks that are added later.
    pub(crate) fn shards(&self, world: &WorldSpec, shards: usize) -> impl Fn(usize) -> usize + use<> {
        let parts = match &self.kind {
            SetupKind::Config { .. } => world.parts(),
            SetupKind::Any(_) => Vec::new(),
        };
        move |disk| parts.get(disk).copied().unwrap_or(disk) % shards
    }

    /// A copy with another value of one limit: of the named disk or group, the only group, or all
    /// disks.
    pub(crate) fn with_limit(
        &self,
        limited: Option<&str>,
        setting: LimitSetting,
        value: u64,
    ) -> anyhow::Result<Self> {
        let mut setup = self.clone();
        // A swept value can contradict another limit, which is only detected here.
        let change = |name: &str, limits: &mut Limits| -> anyhow::Result<()> {
            let name = if name.is_empty() { "each disk" } else { name };
            let place = || format!("{name}: {setting}={value}");
            limits.set(setting, value).map_err(|invalid| anyhow::anyhow!("{}: {}", place(), invalid.rule))?;
            limits
                .validate()
                .map_err(|invalid| anyhow::anyhow!("{}: {} {}", place(), invalid.setting, invalid.rule))
        };
        let WorldSpec { groups, disks, .. } = &mut setup.world;
        let group = match limited {
            Some(name) => groups.iter_mut().find(|group| group.name == name),
            None if groups.len() == 1 => groups.first_mut(),
            None => None,
        };
        // A group takes precedence; without a name, the target must be unambiguous.
        match (group, limited, &mut setup.kind) {
            (Some(group), _, _) => change(&group.name, &mut group.settings.limits)?,
            (None, Some(name), SetupKind::Config { file, .. }) => {
                let disk = disks.iter_mut().find(|disk| disk.name == name);
                let disk = disk.with_context(|| format!("{name}: is no disk and no group of {file}"))?;
                change(&disk.name, &mut disk.settings.limits)?;
            }
            (None, Some(name), SetupKind::Any(_)) => {
                let advice = if groups.is_empty() {
                    format!("add --config FILE with this disk or group, or --group {name}")
                } else {
                    format!("the group is {}; for a disk, use --config FILE", groups[0].name)
                };
                anyhow::bail!(
                    "--sweep-of {name}: without --config a limit is that of --group or of each \
                     disk ({advice}, or leave --sweep-of out)"
                )
            }
            (None, None, SetupKind::Config { .. }) => match &mut disks[..] {
                [disk] => change(&disk.name, &mut disk.settings.limits)?,
                _ => {
                    anyhow::bail!("--sweep: there are several disks and groups (choose one with --sweep-of)")
                }
            },
            (None, None, SetupKind::Any(any)) => change("", &mut any.disk.settings.limits)?,
        }
        Ok(setup)
    }
}

#[derive(Debug)]
pub(crate) struct DiskResolver<'a> {
    setup: &'a SimulationSetup,
    /// Index in the world, by the trace's number.
    pub(crate) known: Vec<usize>,
    /// Name of the trace's first disk, if it is mapped to the only disk of the config file, which
    /// has another name.
    stand_in: Option<String>,
}

impl<'a> DiskResolver<'a> {
    pub(crate) fn new(setup: &'a SimulationSetup) -> Self {
        Self { setup, known: Vec::new(), stand_in: None }
    }

    /// Resolves the next disk; adds a new one to the world. The caller adds the location in the
    /// trace to an error.
    pub(crate) fn add(&mut self, name: &str, world: &mut WorldSpec) -> Result<(), String> {
        let index = match &self.setup.kind {
            SetupKind::Any(any) => {
                let AnyDisk { disk, station, budget } = &**any;
                if world.disks.len() == MAX_DISKS {
                    return Err(format!("there are more than {MAX_DISKS} disks (split the trace)"));
                }
                let mut place = disk.place;
                let mut watched = disk.sampled_device;
                if let Some(station) = station {
                    place.station = Some(world.add_station(*station));
                }
                if let Some(budget) = budget {
                    place.budget = Some(world.add_budget(*budget));
                    watched = Some(DevicePlacement { station: None, ..place });
                }
                world.disks.push(DiskSpec {
                    name: name.to_owned(),
                    place,
                    sampled_device: watched,
                    ..disk.clone()
                });
                world.disks.len() - 1
            }
            SetupKind::Config { file, by_name } => match by_name.get(name) {
                Some(index) if self.stand_in.is_none() => *index,
                _ if by_name.len() == 1 && self.known.is_empty() => {
                    // A trace with one disk fits a config file with one disk, whatever their names
                    // are.
                    self.stand_in = Some(name.to_owned());
                    0
                }
                _ => return Err(self.unknown(name, file, &world.disks)),
            },
        };
        self.known.push(index);
        Ok(())
    }

    fn unknown(&self, name: &str, file: &str, disks: &[DiskSpec]) -> String {
        const MAX_NAMED: usize = 5;
        if let Some(taken) = &self.stand_in {
            let only = &disks[0].name;
            return format!(
                "the disk {name:?} is the second of the trace, but {file} has only {only:?}, to \
                 which {taken:?} was mapped (add [disk.{name:?}])"
            );
        }
        let mut names: Vec<_> = disks.iter().take(MAX_NAMED).map(|disk| format!("{:?}", disk.name)).collect();
        if disks.len() > MAX_NAMED {
            names.push(format!("{} more", disks.len() - MAX_NAMED));
        }
        format!("the disk {name:?} is not in {file}, which has {} (add [disk.{name:?}])", names.join(", "))
    }
}

/// Model of a device that was specified or probed; `state` is the directory of `weir probe`.
pub(crate) fn device_of(spec: &DeviceSpec, state: Option<&Path>) -> anyhow::Result<DeviceModel> {
    Ok(match spec {
        DeviceSpec::Modelled { delay, rate } => {
            DeviceModel { station: station_of(delay), rates: budget_of(rate) }
        }
        DeviceSpec::Probed(path) => {
            DeviceModel { station: probed(path, &CapacityStore::new(state))?, rates: DeviceRates::default() }
        }
    })
}

fn station_of(delay: &DelayOptions) -> StationSpec {
    let fixed = |time: std::time::Duration| {
        ServiceTimeSpec::fixed(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX))
    };
    StationSpec {
        read: fixed(delay.read),
        write: fixed(delay.write),
        zero: fixed(delay.zero),
        flush: fixed(delay.flush),
        parallel: delay.parallel,
    }
}

fn budget_of(rate: &RateOptions) -> DeviceRates {
    DeviceRates { bytes: rate.bytes, iops: rate.iops, read: rate.read, write: rate.write }
}

/// Model from `weir probe`'s record of the device. Missing write figures are taken from reads.
fn probed(path: &Path, store: &CapacityStore) -> anyhow::Result<StationSpec> {
    use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
    let name = path.display();
    let metadata = fs::metadata(path).with_context(|| {
        format!("{name}: is no known device (name a directory or a device, or give read=100us,…)")
    })?;
    let is_device = metadata.file_type().is_block_device();
    // A device is the measured object itself; a directory lies on one.
    let number = DeviceNumber::unpack(if is_device { metadata.rdev() } else { metadata.dev() });
    let identity = DeviceIdentity::resolve(number, &SysfsRoots::default())
        .with_context(|| format!("{name}: is on no device (give its latency: --device read=100us,…)"))?;
    let capacity = store.capacity(identity.key()).with_context(|| {
        format!("{name}: {} has not been measured (measure it: weir probe {name})", identity.node())
    })?;
    // Capacities were measured at this depth, so the model cannot have more parallel servers.
    let parallel = server_count(capacity.read_iops.max(capacity.write_iops), probe::DEPTH);
    let read = service_from_rates(capacity.read_iops, capacity.read_bps, parallel);
    let write = match (capacity.write_iops, capacity.write_bps) {
        (0, 0) => read,
        (iops, bps) => service_from_rates(iops, bps, parallel),
    };
    // Flushes are not measured; one is modelled as a small write.
    let flush = ServiceTimeSpec { byte_ns: 0.0, ..write };
    Ok(StationSpec { read, write, zero: flush, flush, parallel: Some(parallel) })
}

/// Settings of a disk of this size.
///
/// # Errors
/// A limit depends on the size, and the size is unknown.
fn at_size(settings: DiskSettings, size_bytes: u64) -> anyhow::Result<DiskSettings> {
    ensure!(
        size_bytes != UNKNOWN_SIZE || !settings.limits.follows_size(),
        "a rate for each GiB needs the size of the disk, which is unknown (give --size, or an image that exists)"
    );
    Ok(in_force(settings, size_bytes))
}

/// Settings with the limits that the daemon enforces on a disk of this size: rates for each GiB
/// are raised to the reservation.
fn in_force(settings: DiskSettings, size_bytes: u64) -> DiskSettings {
    DiskSettings { limits: settings.limits.at_size_with(size_bytes, settings.share), ..settings }
}

/// Size of an image, as far as known without opening it.
fn size_of(image: &settings::ImageLocation) -> anyhow::Result<u64> {
    Ok(match image.to_spec()?.parse::<StorageSpec>()? {
        StorageSpec::Memory(bytes) | StorageSpec::Null(bytes) => bytes,
        StorageSpec::File(path) => size_of_file(&path).unwrap_or(UNKNOWN_SIZE),
        StorageSpec::Nbd(_) | StorageSpec::Rbd(_) => UNKNOWN_SIZE,
    })
}

/// Length of a raw file, or size in a qcow2 header (QEMU's docs/interop/qcow2.txt: 8 bytes at 24).
fn size_of_file(path: &Path) -> Option<u64> {
    const MAGIC: &[u8] = b"QFI\xfb";
    let metadata = fs::metadata(path).ok().filter(fs::Metadata::is_file)?;
    let mut head = [0; 32];
    let is_image = fs::File::open(path).and_then(|mut file| file.read_exact(&mut head)).is_ok();
    let size = match is_image && head.starts_with(MAGIC) {
        true => u64::from_be_bytes(head[24..].try_into().ok()?),
        false => metadata.len(),
    };
    Some(size.min(UNKNOWN_SIZE))
}
