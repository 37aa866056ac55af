//! Compares two snapshots of cgroups and tasks: counters become rates, waiting times become shares.
//!
//! Pure: snapshots in, rows out. A new cgroup or task has no rate; a removed one has no row.

use std::{
    collections::{BTreeMap, HashMap},
    path::{Path, PathBuf},
    time::Duration,
};

use block::device::DeviceNumber;
use policy::counter;

use super::{
    reading::{CgroupReading, DeviceAccount},
    tasks::{CgroupTask, TaskId},
};
use crate::{
    kernel::{io_stat::CgroupIoUsage, pressure::IoPressure},
    limit::{configured::ConfiguredLimits, limits_file::LimitsFile},
};

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CgroupSnapshot {
    pub(crate) at: Duration,
    /// A cgroup comes before its descendants.
    pub(crate) groups: Vec<SnapshotGroup>,
    pub(crate) limits_file: LimitsFile,
    /// Errors of cgroups that could not be read.
    pub(crate) errors: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SnapshotGroup {
    pub(crate) name: PathBuf,
    /// Counters of the cgroup and its descendants.
    pub(crate) reading: CgroupReading,
    /// Tasks of the cgroup itself; empty unless requested.
    pub(crate) tasks: BTreeMap<TaskId, CgroupTask>,
}

/// Rates per second.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct CgroupRate {
    pub(crate) read_bps: f64,
    pub(crate) write_bps: f64,
    /// Operations of a cgroup, system calls of a task.
    pub(crate) read_iops: f64,
    pub(crate) write_iops: f64,
}

impl CgroupRate {
    pub(crate) fn of(done: &CgroupIoUsage, time: Duration) -> Self {
        let per_second = |amount: u64| amount as f64 / time.as_secs_f64();
        Self {
            read_bps: per_second(done.read_bytes),
            write_bps: per_second(done.written_bytes),
            read_iops: per_second(done.reads),
            write_iops: per_second(done.writes),
        }
    }

    pub(crate) fn iops(&self) -> f64 {
        self.read_iops + self.write_iops
    }

    pub(crate) fn plus(&self, other: &Self) -> Self {
        Self {
            read_bps: self.read_bps + other.read_bps,
            write_bps: self.write_bps + other.write_bps,
            read_iops: self.read_iops + other.read_iops,
            write_iops: self.write_iops + other.write_iops,
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CgroupRow {
    pub(crate) name: PathBuf,
    /// Ordered by number.
    pub(crate) devices: Vec<DeviceRow>,
    pub(crate) pressure: Option<IoPressure>,
    /// Share of the interval, 0 to 1, in which a task in the cgroup or below it waited for I/O,
    /// throttled or not.
    pub(crate) waited: Option<f64>,
    /// Tasks of the cgroup itself, ordered by id.
    pub(crate) tasks: Vec<TaskRow>,
}

impl CgroupRow {
    pub(crate) fn rate(&self) -> Option<CgroupRate> {
        self.devices.iter().filter_map(|device| device.rate).reduce(|sum, rate| sum.plus(&rate))
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DeviceRow {
    pub(crate) number: DeviceNumber,
    pub(crate) account: DeviceAccount,
    /// Limits in weir's file, including bursts and watermark.
    pub(crate) configured: Option<ConfiguredLimits>,
    /// `None` without an earlier snapshot, or if a counter fell.
    pub(crate) rate: Option<CgroupRate>,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct TaskRow {
    pub(crate) id: TaskId,
    pub(crate) task: CgroupTask,
    pub(crate) rate: Option<CgroupRate>,
    /// Share of the interval, 0 to 1, in which the task waited for I/O; `None` without delay
    /// accounting.
    pub(crate) waited: Option<f64>,
}

impl TaskRow {
    /// True if it has ever read, written or waited for a disk, as far as /proc is readable.
    pub(crate) fn has_io(&self) -> bool {
        let CgroupTask { io, waited, .. } = &self.task;
        io.is_some_and(|io| io.read_bytes > 0 || io.write_bytes > 0) || !waited.is_zero()
    }
}

#[derive(Clone, Copy, Debug)]
pub(crate) struct RowOptions {
    pub(crate) device: Option<DeviceNumber>,
    pub(crate) are_waits_counted: bool,
}

/// Rows of the later snapshot, with rates if there is an earlier one.
pub(crate) fn rows(
    earlier: Option<&CgroupSnapshot>,
    later: &CgroupSnapshot,
    wish: RowOptions,
) -> Vec<CgroupRow> {
    let time = earlier.map(|earlier| later.at.saturating_sub(earlier.at)).unwrap_or_default();
    // Equal times would divide by zero.
    let earlier = earlier.filter(|_| !time.is_zero());
    let before: HashMap<&Path, &SnapshotGroup> = earlier
        .into_iter()
        .flat_map(|earlier| &earlier.groups)
        .map(|seen| (seen.name.as_path(), seen))
        .collect();
    let grown = growth_with_descendants(&before, later);
    let comparison =
        SnapshotComparison { time, options: wish, limits_file: &later.limits_file, growth: &grown };
    let mut rows: Vec<CgroupRow> = later
        .groups
        .iter()
        .map(|seen| comparison.row(before.get(seen.name.as_path()).copied(), seen))
        .collect();
    // Both values are lower bounds, so the larger one is shown: the longest waiting time of one
    // task, and the pressure, an average over CPUs that undercounts tasks that migrate.
    let longest: Vec<(PathBuf, f64)> = rows.iter().filter_map(longest_wait).collect();
    for row in &mut rows {
        // A cgroup waits at least as long as its descendants' tasks.
        let below = longest.iter().filter(|(name, _)| name.starts_with(&row.name));
        row.waited = below.map(|&(_, share)| share).chain(row.waited).reduce(f64::max);
    }
    rows
}

fn longest_wait(row: &CgroupRow) -> Option<(PathBuf, f64)> {
    let longest = row.tasks.iter().filter_map(|task| task.waited).reduce(f64::max)?;
    Some((row.name.clone(), longest))
}

/// Growth of version 1's counters, summed up from each cgroup and its descendants. The kernel's own
/// recursive counters lose the share of a removed cgroup.
fn growth_with_descendants<'a>(
    before: &HashMap<&Path, &SnapshotGroup>,
    later: &'a CgroupSnapshot,
) -> HashMap<(&'a Path, DeviceNumber), CgroupIoUsage> {
    let mut growth: HashMap<(&Path, DeviceNumber), CgroupIoUsage> = HashMap::new();
    for seen in &later.groups {
        for (number, account) in &seen.reading.devices {
            let Some(own_usage) = account.own_usage else { continue };
            let earlier = before.get(seen.name.as_path()).and_then(|seen| seen.reading.devices.get(number));
            let earlier = earlier.and_then(|account| account.own_usage).unwrap_or_default();
            // A counter falls if the cgroup was recreated; then all of its present value is growth.
            let increase = own_usage.since(&earlier).unwrap_or(own_usage);
            // Each growth counts for the cgroup and for all above it.
            for above in seen.name.ancestors() {
                let sum = growth.entry((above, *number)).or_default();
                *sum = sum.plus(&increase);
            }
        }
    }
    growth
}

struct SnapshotComparison<'a> {
    time: Duration,
    options: RowOptions,
    limits_file: &'a LimitsFile,
    /// Growth of the counters of version 1 cgroups.
    growth: &'a HashMap<(&'a Path, DeviceNumber), CgroupIoUsage>,
}

impl SnapshotComparison<'_> {
    fn row(&self, before: Option<&SnapshotGroup>, now: &SnapshotGroup) -> CgroupRow {
        let devices = now
            .reading
            .devices
            .iter()
            .filter(|(number, _)| self.options.device.is_none_or(|selected| selected == **number));
        let earlier = |number: &DeviceNumber| {
            // io.stat omits a device without I/O: absent before means zero, not unknown.
            before.map(|before| before.reading.devices.get(number).copied().unwrap_or_default())
        };
        let device = |(number, account): (&DeviceNumber, &DeviceAccount)| DeviceRow {
            number: *number,
            account: *account,
            configured: ConfiguredLimits::of(self.limits_file, &now.name, *number),
            rate: earlier(number).and_then(|earlier| match account.own_usage {
                Some(_) => Some(CgroupRate::of(self.growth.get(&(now.name.as_path(), *number))?, self.time)),
                None => self.rate(&earlier.usage, &account.usage),
            }),
        };
        let pressure = now.reading.pressure;
        let pressure_before = before.and_then(|before| before.reading.pressure);
        let waited = pressure.zip(pressure_before).and_then(|(now, before)| {
            let grown_us = counter::growth(before.some.total_us, now.some.total_us)?;
            Some(self.share(Duration::from_micros(grown_us)))
        });
        let task_before = |id| before.and_then(|before| before.tasks.get(id));
        CgroupRow {
            name: now.name.clone(),
            devices: devices.map(device).collect(),
            pressure,
            waited,
            tasks: now.tasks.iter().map(|(id, task)| self.task(*id, task_before(id), task)).collect(),
        }
    }

    fn task(&self, id: TaskId, before: Option<&CgroupTask>, now: &CgroupTask) -> TaskRow {
        let rate = before.and_then(|before| self.rate(&usage(before)?, &usage(now)?));
        let waited = before.filter(|_| self.options.are_waits_counted);
        let waited = waited.and_then(|before| Some(self.share(now.waited.checked_sub(before.waited)?)));
        TaskRow { id, task: now.clone(), rate, waited }
    }

    fn rate(&self, before: &CgroupIoUsage, now: &CgroupIoUsage) -> Option<CgroupRate> {
        Some(CgroupRate::of(&now.since(before)?, self.time))
    }

    fn share(&self, part: Duration) -> f64 {
        (part.as_secs_f64() / self.time.as_secs_f64()).min(1.0)
    }
}

/// Converts a task's counters; its system calls count as operations.
fn usage(task: &CgroupTask) -> Option<CgroupIoUsage> {
    let io = task.io?;
    Some(CgroupIoUsage {
        read_bytes: io.read_bytes,
        written_bytes: io.write_bytes,
        reads: io.syscr,
        writes: io.syscw,
        ..CgroupIoUsage::default()
    })
}

#[cfg(test)]
pub(super) mod tests {
    use policy::steering::IoMaxRates;

    use super::*;
    use crate::{
        kernel::{pressure::PressureStall, proc_io::TaskIo},
        show::tasks::tests::id,
    };

    const DISK: DeviceNumber = DeviceNumber { major: 8, minor: 0 };
    const OTHER: DeviceNumber = DeviceNumber { major: 8, minor: 16 };
    const ALL: RowOptions = RowOptions { device: None, are_waits_counted: true };

    fn wrote(bytes: u64) -> DeviceAccount {
        DeviceAccount {
            usage: CgroupIoUsage { written_bytes: bytes, writes: bytes / 4096, ..CgroupIoUsage::default() },
            ..DeviceAccount::default()
        }
    }

    fn seen(name: &str, devices: &[(DeviceNumber, DeviceAccount)]) -> SnapshotGroup {
        let reading = CgroupReading { devices: devices.iter().copied().collect(), pressure: None };
        SnapshotGroup { name: name.into(), reading, tasks: BTreeMap::new() }
    }

    fn at(seconds: u64, groups: Vec<SnapshotGroup>) -> CgroupSnapshot {
        CgroupSnapshot { at: Duration::from_secs(seconds), groups, ..CgroupSnapshot::default() }
    }

    fn with_pressure(mut seen: SnapshotGroup, total_us: u64) -> SnapshotGroup {
        let some = PressureStall { total_us, ..PressureStall::default() };
        seen.reading.pressure = Some(IoPressure { some, full: None });
        seen
    }

    fn with_task(
        mut seen: SnapshotGroup,
        tid: i32,
        start: u64,
        waited_ms: u64,
        io: Option<TaskIo>,
    ) -> SnapshotGroup {
        let waited = Duration::from_millis(waited_ms);
        seen.tasks.insert(id(tid, start), CgroupTask { name: "dd".to_owned(), state: 'D', io, waited });
        seen
    }

    /// Two snapshots of an idle cgroup and of one with two tasks, the second of them unreadable.
    pub(in crate::show) fn snapshots() -> (CgroupSnapshot, CgroupSnapshot) {
        // No driver has this major number, so the device is named by its number on any machine.
        let device = DeviceNumber { major: 4095, minor: 1 };
        let group = |mib: u64, stalled_us, waited_ms, calls| {
            let mut account = wrote(mib << 20);
            account.limits = IoMaxRates { bps: [None, Some(4 << 20)], iops: [None, Some(100)] };
            let seen = with_pressure(seen("/system/a.db", &[(device, account)]), stalled_us);
            let io = TaskIo { write_bytes: mib << 20, syscw: calls, ..TaskIo::default() };
            with_task(seen, 7, 1, waited_ms, Some(io))
        };
        let earlier = at(10, vec![seen("/idle", &[]), group(6, 1_000_000, 1000, 6)]);
        let mut busy = group(10, 2_500_000, 1800, 10);
        if let Some(pressure) = &mut busy.reading.pressure {
            pressure.some.avg10 = 12.0;
        }
        let second_of_7 = TaskId { pid: 7, ..id(8, 2) };
        let task =
            CgroupTask { name: "a\nb".to_owned(), state: 'S', io: None, waited: Duration::from_millis(10) };
        let idle = CgroupTask { waited: Duration::ZERO, ..task.clone() };
        busy.tasks.insert(id(9, 2), idle);
        busy.tasks.insert(second_of_7, task);
        (earlier, at(12, vec![seen("/idle", &[]), busy]))
    }

    /// Rows of the two snapshots, with an additional device that has no rate.
    pub(in crate::show) fn sample() -> (Duration, Vec<CgroupRow>) {
        let (earlier, later) = snapshots();
        let mut rows = rows(Some(&earlier), &later, ALL);
        let usage = CgroupIoUsage { read_bytes: 4096, reads: 1, ..CgroupIoUsage::default() };
        let number = DeviceNumber { major: 4095, minor: 2 };
        rows[1].devices.push(DeviceRow {
            number,
            account: DeviceAccount { usage, ..DeviceAccount::default() },
            configured: None,
            rate: None,
        });
        (later.at - earlier.at, rows)
    }

    #[test]
    fn rates_are_counter_growth_per_second() {
        let earlier = at(10, vec![seen("/a", &[(DISK, wrote(4096))])]);
        let later = at(
            12,
            vec![
                seen("/a", &[(DISK, wrote(4096 + 8192)), (OTHER, wrote(40_960))]),
                seen("/new", &[(DISK, wrote(1))]),
            ],
        );
        let rows = rows(Some(&earlier), &later, ALL);
        let disk = rows[0].devices[0].rate.unwrap();
        assert_eq!((disk.write_bps, disk.write_iops, disk.read_bps), (4096.0, 1.0, 0.0));
        let other = rows[0].devices[1].rate.unwrap();
        assert_eq!(other.write_bps, 20_480.0, "the first it does to a device counts from nothing");
        assert_eq!(rows[0].rate().unwrap().write_bps, 24_576.0);
        assert_eq!(rows[1].devices[0].rate, None, "it was not there before");
        assert_eq!(rows[1].rate(), None);
    }

    #[test]
    fn removed_v1_cgroup_does_not_change_rates() {
        let account = |with_those_below: u64, own_mib: u64| DeviceAccount {
            own_usage: Some(wrote(own_mib << 20).usage),
            ..wrote(with_those_below << 20)
        };
        let earlier = at(
            10,
            vec![
                seen("/", &[(DISK, account(161_009, 100))]),
                seen("/a", &[(DISK, account(160_904, 160_904))]),
                seen("/x", &[(DISK, account(5, 5))]),
            ],
        );
        let later = at(
            12,
            vec![
                seen("/", &[(DISK, account(161_008, 102))]),
                seen("/a", &[(DISK, account(160_906, 160_906))]),
            ],
        );
        let rows = rows(Some(&earlier), &later, ALL);
        let mib = |row: usize| rows[row].devices[0].rate.unwrap().write_bps / f64::from(1 << 20);
        assert_eq!((mib(0), mib(1)), (2.0, 1.0), "2 MiB each of / and /a in 2 s");
    }

    #[test]
    fn totals_that_fall_have_no_rate() {
        let mib = |mib: u64| wrote(mib << 20);
        let earlier = at(10, vec![seen("/", &[(DISK, mib(161_005)), (OTHER, mib(7))])]);
        let later = at(12, vec![seen("/", &[(DISK, mib(161_000)), (OTHER, mib(9))])]);
        let row = &rows(Some(&earlier), &later, ALL)[0];
        assert_eq!(row.devices[0].rate, None);
        assert_eq!(row.devices[1].rate.unwrap().write_bps, f64::from(1 << 20));
        let pressure = |total_us| at(total_us, vec![with_pressure(seen("/a", &[]), total_us)]);
        let recreated = CgroupSnapshot { at: Duration::from_secs(9), ..pressure(1) };
        assert_eq!(rows(Some(&pressure(5)), &recreated, ALL)[0].waited, None, "it was made again");
    }

    #[test]
    fn single_snapshot_has_totals_only() {
        let now = at(5, vec![with_pressure(seen("/a", &[(DISK, wrote(4096))]), 100)]);
        for earlier in [None, Some(&now)] {
            let row = &rows(earlier, &now, ALL)[0];
            assert_eq!((row.devices[0].account, row.devices[0].rate, row.waited), (wrote(4096), None, None));
        }
    }

    #[test]
    fn device_option_selects_one_device() {
        let now = at(5, vec![seen("/a", &[(DISK, wrote(1)), (OTHER, wrote(2))])]);
        let row = &rows(None, &now, RowOptions { device: Some(OTHER), ..ALL })[0];
        assert_eq!(row.devices.iter().map(|device| device.number).collect::<Vec<_>>(), [OTHER]);
    }

    #[test]
    fn wait_share_is_the_larger_of_pressure_and_task() {
        let earlier = at(0, vec![with_pressure(seen("/a", &[]), 1_000_000)]);
        let later = at(2, vec![with_task(with_pressure(seen("/a", &[]), 2_500_000), 1, 1, 9000, None)]);
        assert_eq!(rows(Some(&earlier), &later, ALL)[0].waited, Some(0.75));
        let mut later = later;
        let (task_id, now) = (id(1, 1), with_task(seen("/a", &[]), 1, 1, 10_800, None));
        later.groups[0].tasks = now.tasks.clone();
        let mut earlier = earlier;
        let before = CgroupTask { waited: Duration::from_millis(9000), ..now.tasks[&task_id].clone() };
        earlier.groups[0].tasks.insert(task_id, before);
        assert_eq!(
            rows(Some(&earlier), &later, ALL)[0].waited,
            Some(0.9),
            "or that of a task, if it is larger"
        );
        let much = at(2, vec![with_pressure(seen("/a", &[]), 9_000_000)]);
        assert_eq!(rows(Some(&earlier), &much, ALL)[0].waited, Some(1.0), "never more than all of it");
    }

    #[test]
    fn without_pressure_wait_share_is_the_longest_task_wait() {
        let groups = |first: u64, second: u64| {
            vec![
                seen("/a", &[]),
                with_task(seen("/a/b", &[]), 1, 1, first, None),
                with_task(seen("/a/c", &[]), 2, 1, second, None),
                seen("/ab", &[]),
            ]
        };
        let (earlier, later) = (at(0, groups(500, 0)), at(1, groups(700, 600)));
        let waited =
            |options| rows(Some(&earlier), &later, options).iter().map(|row| row.waited).collect::<Vec<_>>();
        assert_eq!(waited(ALL), [Some(0.6), Some(0.2), Some(0.6), None]);
        assert_eq!(waited(RowOptions { are_waits_counted: false, ..ALL }), [None; 4]);
    }

    #[test]
    fn reused_pid_has_no_rate() {
        let io =
            |bytes: u64, calls: u64| Some(TaskIo { write_bytes: bytes, syscw: calls, ..TaskIo::default() });
        let group = |start, bytes, calls| vec![with_task(seen("/a", &[]), 7, start, 0, io(bytes, calls))];
        let (earlier, later) = (at(0, group(1, 100, 1)), at(2, group(1, 300, 5)));
        let row = &rows(Some(&earlier), &later, ALL)[0].tasks[0];
        let rate = row.rate.unwrap();
        assert_eq!((rate.write_bps, rate.write_iops, row.waited), (100.0, 2.0, Some(0.0)));
        let another = at(2, group(2, 300, 5));
        let row = &rows(Some(&earlier), &another, ALL)[0].tasks[0];
        assert_eq!((row.rate, row.waited), (None, None));
        assert!(row.has_io());
        let hidden = at(2, vec![with_task(seen("/a", &[]), 7, 1, 0, None)]);
        let row = &rows(Some(&earlier), &hidden, ALL)[0].tasks[0];
        assert_eq!((row.rate, row.has_io()), (None, false), "its counters cannot be read");
        let waited = at(2, vec![with_task(seen("/a", &[]), 7, 1, 10, None)]);
        assert!(rows(None, &waited, ALL)[0].tasks[0].has_io());
    }
}
