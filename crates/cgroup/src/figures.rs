//! What control groups do that have limits, for whoever tells of it: as the kernel counts it at
//! this moment, and as the watch enforces it.
//!
//! ```text
//!   the file of limits ─────────────► which control groups, on which devices, held to what
//!   io.stat, io.max, io.pressure ───► what they have done, may do now, have waited
//!   the watch, every other second ──► whether a watermark lets limits hold
//! ```
//!
//! Reads files on the thread of who asks, so it is not for one that has something to do. Only of
//! cgroup v2: there is no watch elsewhere. Never writes.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

use block::device::{Identity, Number, Roots as DeviceRoots};
use policy::{
    steering::Rates,
    throttle::{Enforcement, Limits},
};

use crate::{
    hierarchy::{Hierarchy, Roots},
    kernel::{io_max, io_stat, pressure},
    limit::kept::Kept,
};

/// Limits that are told of, the first in the file: some hundred microseconds each.
const MOST: usize = 4096;

/// A control group on a device, with its limits there.
#[derive(Clone, Debug, PartialEq)]
pub struct Figure {
    /// Its path from where control groups are mounted.
    pub cgroup: String,
    /// `/dev/vda`, or the number of a disk that is not there.
    pub device: String,
    /// Whose limits these are, if not its own; else empty.
    pub group: String,
    /// As configured.
    pub limits: Limits,
    /// Percent; 0 is none.
    pub watermark: u8,
    /// How far a watermark has limits hold; `None` without one, or before that is known.
    pub enforcement: Option<Enforcement>,
    /// What the kernel holds it to now.
    pub told: Rates,
    /// What it has done since it was made; `None` of one that is not there.
    pub done: Option<Done>,
}

/// Counted by the kernel.
#[allow(missing_docs, reason = "the names say it")]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    pub reads: u64,
    pub writes: u64,
    pub read_bytes: u64,
    pub written_bytes: u64,
    pub discards: u64,
    pub discarded_bytes: u64,
}

/// How long tasks of a control group have waited for I/O, of all devices.
#[derive(Clone, Debug, PartialEq)]
pub struct Stalled {
    /// Its path.
    pub cgroup: String,
    /// Microseconds in which some task waited.
    pub some_us: u64,
    /// In which all did that could have run.
    pub all_us: u64,
}

/// What the watch knows and no file tells.
pub(crate) type Known = Arc<Mutex<HashMap<(PathBuf, Number), Enforcement>>>;

/// Reads figures, from any thread.
#[derive(Clone, Debug)]
pub struct Reader {
    path: PathBuf,
    roots: Roots,
    known: Known,
}

impl Reader {
    pub(crate) fn new(path: &Path, roots: Roots, known: Known) -> Self {
        Self { path: path.to_owned(), roots, known }
    }

    /// All there are, and what their tasks have waited. Nothing where the file of limits cannot be
    /// read: the watch has said so.
    pub fn read(&self) -> (Vec<Figure>, Vec<Stalled>) {
        let Ok(kept) = Kept::load(&self.path) else { return Default::default() };
        let Ok(hierarchy) = Hierarchy::discover(self.roots.clone()) else { return Default::default() };
        let known = self.known.lock().unwrap_or_else(PoisonError::into_inner).clone();
        let mut reading = Reading { hierarchy: &hierarchy, cgroups: HashMap::new(), devices: HashMap::new() };
        let mut figures = Vec::new();
        for entry in kept.limits.iter().take(MOST) {
            let shared = kept.shared(entry);
            let (Ok(number), Ok(limits), Ok(watermark)) =
                (entry.device(), shared.limits(), shared.watermark())
            else {
                continue;
            };
            let device = reading.device(number);
            let (stat, max) = reading.cgroup(&entry.cgroup);
            figures.push(Figure {
                cgroup: entry.cgroup.to_string_lossy().into_owned(),
                device,
                group: entry.group.clone().unwrap_or_default(),
                limits,
                watermark: watermark.percent(),
                enforcement: known.get(&(entry.cgroup.clone(), number)).copied(),
                told: max.get(&number).copied().unwrap_or_default(),
                done: stat.as_ref().map(|stat| stat.get(&number).copied().unwrap_or_default()),
            });
        }
        let mut stalled: Vec<_> =
            reading.cgroups.into_iter().filter_map(|(cgroup, files)| files.stalled(&cgroup)).collect();
        stalled.sort_by(|a, b| a.cgroup.cmp(&b.cgroup));
        (figures, stalled)
    }
}

/// A control group may have limits on several devices, and its files are read once.
struct Reading<'a> {
    hierarchy: &'a Hierarchy,
    cgroups: HashMap<PathBuf, Files>,
    devices: HashMap<Number, String>,
}

/// None of one that is not there.
type Stat = Option<HashMap<Number, Done>>;

struct Files {
    stat: Stat,
    max: HashMap<Number, Rates>,
    pressure: Option<pressure::Pressure>,
}

impl Files {
    fn stalled(&self, cgroup: &Path) -> Option<Stalled> {
        let pressure = self.pressure?;
        let all_us = pressure.full.map_or(0, |full| full.total_us);
        let cgroup = cgroup.to_string_lossy().into_owned();
        Some(Stalled { cgroup, some_us: pressure.some.total_us, all_us })
    }
}

impl Reading<'_> {
    fn device(&mut self, number: Number) -> String {
        let roots: DeviceRoots = self.hierarchy.roots.of_devices();
        let name =
            || Identity::resolve(number, &roots).map_or_else(|_| number.to_string(), |known| known.node());
        self.devices.entry(number).or_insert_with(name).clone()
    }

    fn cgroup(&mut self, name: &Path) -> (&Stat, &HashMap<Number, Rates>) {
        if !self.cgroups.contains_key(name) {
            let files = self.files(name);
            self.cgroups.insert(name.to_owned(), files);
        }
        let Files { stat, max, .. } = &self.cgroups[name];
        (stat, max)
    }

    fn files(&self, name: &Path) -> Files {
        let group = self.hierarchy.group(name).ok();
        let text = |file: &str| group.as_ref().and_then(|group| group.read(file).ok());
        let stat = text("io.stat").and_then(|text| io_stat::parse(&text).ok());
        let max = text("io.max").and_then(|text| io_max::parse(&text).ok());
        Files {
            stat: stat.map(|all| all.into_iter().map(|(number, usage)| (number, usage.into())).collect()),
            max: max.unwrap_or_default().into_iter().collect(),
            pressure: text("io.pressure").and_then(|text| pressure::parse(&text).ok()),
        }
    }
}

impl From<io_stat::Usage> for Done {
    fn from(usage: io_stat::Usage) -> Self {
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
    use policy::throttle::{LimitKind, Scale};

    use super::*;
    use crate::{limit::kept::Change, machine::Machine};

    const DISK: (Number, &str) = (Number { major: 254, minor: 0 }, "number 254:0, 1048576 bytes");

    #[test]
    fn a_control_group_is_told_with_what_it_may_does_and_waits() {
        let machine = Machine::v2("io");
        machine.disk("254:0", "vda");
        let mut kept = Kept::default();
        for (name, group) in [("a", None), ("b", Some("tenant".to_owned())), ("gone", None)] {
            let limited = machine.group(name);
            let change = Change {
                group,
                watermark: Some(80),
                ..Change::of(&[("iops-read", 100), ("bps-total", 4096)])
            };
            kept.change(&limited, DISK, &change).unwrap();
        }
        std::fs::remove_dir(machine.root().join("gone")).unwrap();
        for name in ["a", "b"] {
            machine.write(name, "io.stat", "8:0 rbytes=1 wbytes=1 rios=1 wios=1 dbytes=0 dios=0\n254:0 rbytes=8192 wbytes=512 rios=2 wios=1 dbytes=7 dios=3\n");
            machine.write(name, "io.max", "254:0 rbps=max wbps=max riops=50 wiops=max\n");
        }
        let pressure = "some avg10=0.00 avg60=0.00 avg300=0.00 total=2500000\n\
                        full avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n";
        machine.write("a", "io.pressure", pressure);
        let path = machine.path("cgroups.json");
        settings::state::whole_file::write(&path, &serde_json::to_vec(&kept).unwrap(), false).unwrap();
        let known = Known::default();
        let scaled = Enforcement::Scaled(Scale::from_thousandths(2000));
        known.lock().unwrap().insert(("a".into(), DISK.0), scaled);

        let (figures, stalled) = Reader::new(&path, machine.roots(), known).read();
        let [a, b, gone] = &figures[..] else { panic!("{figures:?}") };
        assert_eq!((&*a.cgroup, &*a.device, &*a.group, a.watermark), ("a", "/dev/vda", "", 80));
        assert_eq!((a.limits.limit(LimitKind::IopsRead).rate, a.enforcement), (100, Some(scaled)));
        assert_eq!(a.told.iops, [Some(50), None]);
        let done = Done {
            reads: 2,
            writes: 1,
            read_bytes: 8192,
            written_bytes: 512,
            discards: 3,
            discarded_bytes: 7,
        };
        assert_eq!(a.done, Some(done));
        assert_eq!((&*b.group, b.enforcement), ("tenant", None));
        assert_eq!((&*gone.cgroup, gone.done, gone.told), ("gone", None, Rates::NONE));
        assert_eq!(stalled, [Stalled { cgroup: "a".into(), some_us: 2_500_000, all_us: 1_500_000 }]);
    }
}
