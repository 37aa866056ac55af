//! Counters and limits of control groups, for metrics and status: the kernel's present values, and
//! the enforcement that `watch` decided.
//!
//! ```text
//!   the limits file ────────────────► control groups, their devices and configured limits
//!   io.stat, io.max, io.pressure ───► work done, present limits, time waited
//!   watch, every other second ──────► whether a watermark enforces the limits
//! ```
//!
//! Reads files on the caller's thread, so it must not be called from a thread that serves requests.
//! Supports cgroup v2 only, like `watch`. Never writes.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use block::device::{DeviceIdentity, DeviceNumber, SysfsRoots as DeviceRoots};
use policy::{
    steering::IoMaxRates,
    throttle::{Enforcement, Limits},
};

use crate::{
    hierarchy::{CgroupHierarchy, KernelRoots},
    kernel::{io_max, io_stat, pressure},
    limit::limits_file::LimitsFile,
};

/// Limits reported at most, in the order of the file: each costs several hundred microseconds.
const MAX_FIGURES: usize = 4096;

/// A control group on a device, with its limits.
#[derive(Clone, Debug, PartialEq)]
pub struct CgroupFigures {
    /// Path from the mount of the cgroup hierarchy.
    pub cgroup: String,
    /// `/dev/vda`, or the number if the disk is absent.
    pub device: String,
    /// Group that the limits belong to; empty if they are the control group's own.
    pub group: String,
    /// As configured.
    pub limits: Limits,
    /// Percent of the device; 0 if there is no watermark.
    pub watermark: u8,
    /// Degree to which a watermark enforces the limits; `None` without one, or before it is
    /// decided.
    pub enforcement: Option<Enforcement>,
    /// Limits in force in the kernel (`io.max`).
    pub kernel_limits: IoMaxRates,
    /// Counters since the cgroup was created; `None` if it does not exist.
    pub counters: Option<CgroupIoCounters>,
}

/// The kernel's counters (`io.stat`).
#[allow(missing_docs, reason = "the names are self-explanatory")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CgroupIoCounters {
    pub reads: u64,
    pub writes: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub discards: u64,
    pub discarded_bytes: u64,
}

/// Time that tasks of a control group waited for I/O, over all devices (`io.pressure`).
#[derive(Clone, Debug, PartialEq)]
pub struct CgroupPressure {
    /// Path of the control group.
    pub cgroup: String,
    /// Microseconds in which at least one task waited.
    pub some_us: u64,
    /// Microseconds in which all runnable tasks waited.
    pub full_us: u64,
}

/// Enforcement decided by `watch`, which no file contains.
pub(crate) type KnownEnforcement = Arc<Mutex<HashMap<(PathBuf, DeviceNumber), Enforcement>>>;

/// Reads the figures; can be used from any thread.
#[derive(Clone, Debug)]
pub struct CgroupFiguresReader {
    path: PathBuf,
    roots: KernelRoots,
    known: KnownEnforcement,
}

impl CgroupFiguresReader {
    pub(crate) fn new(path: &Path, roots: KernelRoots, known: KnownEnforcement) -> Self {
        Self { path: path.to_owned(), roots, known }
    }

    /// All figures, and the waiting time of each control group. Empty if the limits file is
    /// unreadable, which `watch` reports.
    pub fn read(&self) -> (Vec<CgroupFigures>, Vec<CgroupPressure>) {
        let Ok(limits_file) = LimitsFile::load(&self.path) else { return Default::default() };
        let Ok(hierarchy) = CgroupHierarchy::discover(self.roots.clone()) else { return Default::default() };
        // Copied, so that the lock is not held while files are read.
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut reading =
            CgroupFilesCache { hierarchy: &hierarchy, cgroups: HashMap::new(), devices: HashMap::new() };
        let mut figures = Vec::new();
        for entry in limits_file.limits.iter().take(MAX_FIGURES) {
            // An entry that is invalid by itself is skipped; `watch` reports it.
            let shared = limits_file.limits_of(entry);
            let (Ok(number), Ok(limits), Ok(watermark)) =
                (entry.device(), shared.limits(), shared.watermark())
            else {
                continue;
            };
            let device = reading.device(number);
            let (stat, max) = reading.cgroup(&entry.cgroup);
            figures.push(CgroupFigures {
                cgroup: entry.cgroup.to_string_lossy().into_owned(),
                device,
                group: entry.group.clone().unwrap_or_default(),
                limits,
                watermark: watermark.percent(),
                enforcement: known.get(&(entry.cgroup.clone(), number)).copied(),
                kernel_limits: max.get(&number).copied().unwrap_or_default(),
                // io.stat has no line for a device without I/O: an existing cgroup then has zero
                // counters.
                counters: stat.as_ref().map(|stat| stat.get(&number).copied().unwrap_or_default()),
            });
        }
        let mut stalled: Vec<_> =
            reading.cgroups.into_iter().filter_map(|(cgroup, files)| files.stalled(&cgroup)).collect();
        // A hash map has no order, and metrics are easier to compare in a fixed one.
        stalled.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
        (figures, stalled)
    }
}

/// Caches the files of a control group, which may have limits on several devices.
struct CgroupFilesCache<'a> {
    hierarchy: &'a CgroupHierarchy,
    cgroups: HashMap<PathBuf, CgroupFiles>,
    devices: HashMap<DeviceNumber, String>,
}

/// `None` if the cgroup does not exist.
type DeviceCounters = Option<HashMap<DeviceNumber, CgroupIoCounters>>;

struct CgroupFiles {
    stat: DeviceCounters,
    max: HashMap<DeviceNumber, IoMaxRates>,
    pressure: Option<pressure::IoPressure>,
}

impl CgroupFiles {
    fn stalled(&self, cgroup: &Path) -> Option<CgroupPressure> {
        let pressure = self.pressure?;
        let all_us = pressure.full.map_or(0, |full| full.total_us);
        let cgroup = cgroup.to_string_lossy().into_owned();
        Some(CgroupPressure { cgroup, some_us: pressure.some.total_us, full_us: all_us })
    }
}

impl CgroupFilesCache<'_> {
    fn device(&mut self, number: DeviceNumber) -> String {
        let roots: DeviceRoots = self.hierarchy.roots.device_roots();
        let name = || {
            DeviceIdentity::resolve(number, &roots).map_or_else(|_| number.to_string(), |known| known.node())
        };
        self.devices.entry(number).or_insert_with(name).clone()
    }

    fn cgroup(&mut self, name: &Path) -> (&DeviceCounters, &HashMap<DeviceNumber, IoMaxRates>) {
        if !self.cgroups.contains_key(name) {
            let files = self.files(name);
            self.cgroups.insert(name.to_owned(), files);
        }
        let CgroupFiles { stat, max, .. } = &self.cgroups[name];
        (stat, max)
    }

    fn files(&self, name: &Path) -> CgroupFiles {
        let group = self.hierarchy.group(name).ok();
        let text = |file: &str| group.as_ref().and_then(|group| group.read(file).ok());
        let stat = text("io.stat").and_then(|text| io_stat::parse(&text).ok());
        let max = text("io.max").and_then(|text| io_max::parse(&text).ok());
        CgroupFiles {
            stat: stat.map(|all| all.into_iter().map(|(number, usage)| (number, usage.into())).collect()),
            max: max.unwrap_or_default().into_iter().collect(),
            pressure: text("io.pressure").and_then(|text| pressure::parse(&text).ok()),
        }
    }
}

impl From<io_stat::CgroupIoUsage> for CgroupIoCounters {
    fn from(usage: io_stat::CgroupIoUsage) -> Self {
        Self {
            reads: usage.reads,
            writes: usage.writes,
            read_bytes: usage.read_bytes,
            written_bytes: usage.written_bytes,
            discards: usage.discards,
            discarded_bytes: usage.discarded_bytes,
        }
    }
}

#[cfg(test)]
mod tests {
    use policy::throttle::{LimitKind, LimitScale};

    use super::*;
    use crate::{fake_machine::FakeMachine, limit::limits_file::LimitsChange};

    const DISK: (DeviceNumber, &str) = (DeviceNumber { major: 254, minor: 0 }, "number 254:0, 1048576 bytes");

    #[test]
    fn figures_have_limits_counters_and_pressure() {
        let machine = FakeMachine::v2("io");
        machine.disk("254:0", "vda");
        let mut limits_file = LimitsFile::default();
        for (name, group) in [("a", None), ("b", Some("tenant".to_owned())), ("gone", None)] {
            let limited = machine.group(name);
            let change = LimitsChange {
                group,
                watermark: Some(80),
                ..LimitsChange::of(&[("iops-read", 100), ("bps-total", 4096)])
            };
            limits_file.change(&limited, DISK, &change).unwrap();
        }
        std::fs::remove_dir(machine.root().join("gone")).unwrap();
        for name in ["a", "b"] {
            machine.write(
                name,
                "io.stat",
                "8:0 rbytes=1 wbytes=1 rios=1 wios=1 dbytes=0 dios=0\n\
                 254:0 rbytes=8192 wbytes=512 rios=2 wios=1 dbytes=7 dios=3\n",
            );
            machine.write(name, "io.max", "254:0 rbps=max wbps=max riops=50 wiops=max\n");
        }
        let pressure = "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n\
                        full avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n";
        machine.write("a", "io.pressure", pressure);
        let path = machine.path("cgroups.json");
        settings::state::atomic_file::write(&path, &serde_json::to_vec(&limits_file).unwrap(), false)
            .unwrap();
        let known = KnownEnforcement::default();
        let scaled = Enforcement::Scaled(LimitScale::from_thousandths(2000));
        known.lock().unwrap().insert(("a".into(), DISK.0), scaled);

        let (figures, stalled) = CgroupFiguresReader::new(&path, machine.roots(), known).read();
        let [a, b, removed] = &figures[..] else { panic!("{figures:?}") };
        assert_eq!((&*a.cgroup, &*a.device, &*a.group, a.watermark), ("a", "/dev/vda", "", 80));
        assert_eq!((a.limits.limit(LimitKind::IopsRead).rate, a.enforcement), (100, Some(scaled)));
        assert_eq!(a.kernel_limits.iops, [Some(50), None]);
        let done = CgroupIoCounters {
            reads: 2,
            writes: 1,
            read_bytes: 8192,
            written_bytes: 512,
            discards: 3,
            discarded_bytes: 7,
        };
        assert_eq!(a.counters, Some(done));
        assert_eq!((&*b.group, b.enforcement), ("tenant", None));
        assert_eq!(
            (&*removed.cgroup, removed.counters, removed.kernel_limits),
            ("gone", None, IoMaxRates::NONE)
        );
        assert_eq!(stalled, [CgroupPressure { cgroup: "a".into(), some_us: 2_500_000, full_us: 1_500_000 }]);
    }
}
