use super::*;
use crate::fake_machine::FakeMachine;

/// A machine with a disk, control groups with an io.max each, and a limits file.
struct LimitBench {
    machine: FakeMachine,
    groups: Vec<ControlGroup>,
    disk: DeviceIdentity,
}

impl LimitBench {
    fn v2(names: &[&str]) -> Self {
        let machine = FakeMachine::v2("cpu io memory");
        let group = |name: &&str| {
            let group = machine.group(name);
            machine.write(name, "io.max", "");
            machine.write(name, "cgroup.controllers", "cpu io memory\n");
            group
        };
        let groups = names.iter().map(group).collect();
        Self::new(machine, groups)
    }

    fn new(machine: FakeMachine, groups: Vec<ControlGroup>) -> Self {
        machine.disk("254:0", "vda");
        let disk = device::resolve(&machine.roots(), "254:0").expect("a disk").identity;
        Self { machine, groups, disk }
    }

    fn file(&self) -> std::path::PathBuf {
        self.machine.path("run/weir/cgroups.json")
    }

    fn set(&self, index: usize, change: &LimitsChange) -> anyhow::Result<LimitReport> {
        set_limits(&self.machine.hierarchy(), &self.file(), &self.groups[index], &self.disk, change)
    }

    fn remove(&self, index: usize) -> anyhow::Result<LimitReport> {
        remove_limits(&self.machine.hierarchy(), &self.file(), &self.groups[index], &self.disk)
    }

    /// Limit on bytes written per second in the kernel.
    fn kernel_write_bps(&self, index: usize) -> Option<u64> {
        write::read_limits(&self.groups[index], self.disk.number()).expect("told").bps[1]
    }
}

fn in_group(limits: &[(&str, u64)], weight: Option<u32>) -> LimitsChange {
    LimitsChange { group: Some("tenant".to_owned()), weight, ..LimitsChange::of(limits) }
}

#[test]
fn limit_is_written_stored_and_removed() {
    let bench = LimitBench::v2(&["/a"]);
    let outcome = bench.set(0, &LimitsChange::of(&[("bps-write", 4_000_000), ("iops-read", 100)])).unwrap();
    assert_eq!(
        outcome.text(),
        "/a on /dev/vda: bps-write 4000000, iops-read 100\nconfigured: bps-w 3.8M, iops-r 100\n"
    );
    assert_eq!(bench.kernel_write_bps(0), Some(4_000_000));
    let limits_file = LimitsFile::load(&bench.file()).unwrap();
    assert!(limits_file.entry(&bench.groups[0], bench.disk.number()).is_some());
    assert_eq!(bench.remove(0).unwrap().text(), "/a on /dev/vda: no limit\n");
    assert_eq!(bench.kernel_write_bps(0), None);
    let error = format!("{:#}", bench.remove(0).unwrap_err());
    assert!(error.contains("has no limit on /dev/vda"), "{error}");
}

#[test]
fn limit_is_removed_without_the_controller() {
    let bench = LimitBench::v2(&["a"]);
    bench.set(0, &LimitsChange::of(&[("bps-write", 20)])).unwrap();
    std::fs::remove_file(bench.machine.root().join("a/io.max")).unwrap();
    assert_eq!(bench.kernel_write_bps(0), None);
    bench.remove(0).unwrap();
    assert_eq!(LimitsFile::load(&bench.file()).unwrap(), LimitsFile::default());
    assert!(!bench.machine.root().join("a/io.max").exists());
}

#[test]
fn joining_a_group_reports_replaced_limits() {
    let bench = LimitBench::v2(&["a"]);
    bench.machine.write("a", "io.max", "254:0 rbps=7 wbps=8 riops=max wiops=max\n");
    let outcome = bench.set(0, &in_group(&[("bps-write", 100)], None)).unwrap();
    assert!(outcome.notices.iter().any(|notice| notice.contains("another program")), "{:?}", outcome.notices);
}

#[test]
fn foreign_limits_stay_unless_named() {
    let bench = LimitBench::v2(&["/a"]);
    bench.machine.write("/a", "io.max", "254:0 rbps=1000000 wbps=2000000 riops=max wiops=max\n");
    let outcome = bench.set(0, &LimitsChange::of(&[("bps-write", 5_000_000)])).unwrap();
    assert!(outcome.notices[0].contains("another program"), "{:?}", outcome.notices);
    let kernel_rates = write::read_limits(&bench.groups[0], bench.disk.number()).unwrap();
    assert_eq!(kernel_rates.bps, [Some(1_000_000), Some(5_000_000)]);
    let bench = LimitBench::v2(&["/b"]);
    bench.machine.write("/b", "io.max", "254:0 rbps=1000000 wbps=max riops=max wiops=max\n");
    assert!(bench.set(0, &LimitsChange::of(&[("bps-write-max", 5_000_000)])).is_err());
    assert_eq!(
        write::read_limits(&bench.groups[0], bench.disk.number()).unwrap().bps,
        [Some(1_000_000), None]
    );
}

#[test]
fn burst_without_a_watch_names_the_command_to_run() {
    let bench = LimitBench::v2(&["/a"]);
    let burst =
        LimitsChange::of(&[("bps-write", 4 << 20), ("bps-write-max", 20 << 20), ("bps-write-max-length", 5)]);
    let outcome = bench.set(0, &burst).unwrap();
    assert_eq!(bench.kernel_write_bps(0), Some(4 << 20));
    assert!(
        outcome.notices.iter().any(|notice| notice.contains("weir cgroup watch")),
        "{:?}",
        outcome.notices
    );
    let _watched = WatchLock::take(&bench.file()).unwrap().unwrap();
    assert!(bench.set(0, &burst).unwrap().notices.is_empty());
}

#[test]
fn new_member_takes_its_share_by_weight() {
    let bench = LimitBench::v2(&["/a", "/b"]);
    bench.set(0, &in_group(&[("bps-write", 9_000_000)], None)).unwrap();
    assert_eq!(bench.kernel_write_bps(0), Some(9_000_000));
    bench.set(1, &in_group(&[], Some(200))).unwrap();
    assert_eq!((bench.kernel_write_bps(0), bench.kernel_write_bps(1)), (Some(3_000_000), Some(6_000_000)));
    bench.remove(1).unwrap();
    assert_eq!((bench.kernel_write_bps(0), bench.kernel_write_bps(1)), (Some(9_000_000), None));
}

#[test]
fn refused_change_is_rolled_back() {
    let bench = LimitBench::v2(&["/a", "/b"]);
    bench.set(0, &in_group(&[("bps-write", 9_000_000)], None)).unwrap();
    let before = std::fs::read_to_string(bench.file()).unwrap();
    // As if the controller had been disabled.
    std::fs::remove_file(bench.groups[1].directory.join("io.max")).unwrap();
    let error = format!("{:#}", bench.set(1, &in_group(&[], Some(200))).unwrap_err());
    assert!(error.contains("/b: io.max"), "{error}");
    assert_eq!(bench.kernel_write_bps(0), Some(9_000_000));
    assert_eq!(std::fs::read_to_string(bench.file()).unwrap(), before);
}

#[test]
fn weight_is_written_to_the_active_mechanism() {
    let bench = LimitBench::v2(&["/a"]);
    let weight = LimitsChange { weight: Some(300), ..LimitsChange::default() };
    let error = format!("{:#}", bench.set(0, &weight).unwrap_err());
    assert!(error.contains("nothing divides /dev/vda by weight"), "{error}");
    let queue = bench.disk.directory().join("queue");
    std::fs::create_dir(&queue).unwrap();
    std::fs::write(queue.join("scheduler"), "none mq-deadline [bfq]\n").unwrap();
    bench.machine.write("/a", "io.bfq.weight", "default 100\n");
    let outcome = bench.set(0, &LimitsChange { weight: Some(3000), ..LimitsChange::default() }).unwrap();
    assert_eq!(bench.groups[0].read("io.bfq.weight").unwrap(), "254:0 1000");
    assert!(
        outcome.notices[0].contains("written as 1000, the maximum") && outcome.notices[0].contains("BFQ"),
        "{:?}",
        outcome.notices
    );
    bench.machine.write("/", "io.cost.qos", "254:0 enable=1 ctrl=auto rpct=0.00\n");
    bench.machine.write("/a", "io.weight", "default 100\n");
    bench.set(0, &weight).unwrap();
    assert_eq!(bench.groups[0].read("io.weight").unwrap(), "254:0 300");
    bench.remove(0).unwrap();
    assert_eq!(bench.groups[0].read("io.weight").unwrap(), "254:0 default");
}

#[test]
fn unsupported_limits_of_root_and_v1_are_rejected() {
    let bench = LimitBench::v2(&["/"]);
    let error = format!("{:#}", bench.set(0, &LimitsChange::of(&[("bps-write", 5)])).unwrap_err());
    assert!(error.contains("the root cgroup has no limits"), "{error}");

    let machine = FakeMachine::v1();
    let group = machine.group("/a");
    crate::kernel::blkio::LIMITS.into_iter().for_each(|file| machine.write("/a", file, ""));
    let bench = LimitBench::new(machine, vec![group]);
    let outcome = bench.set(0, &LimitsChange::of(&[("bps-write", 5000)])).unwrap();
    assert!(outcome.notices[0].contains("buffered writes"), "{:?}", outcome.notices);
    assert_eq!(bench.kernel_write_bps(0), Some(5000));
    for (refused, feature) in [
        (LimitsChange::of(&[("bps-write", 5000), ("bps-write-max", 9000)]), "bursts"),
        (
            LimitsChange::of(&[("bps-write", 0), ("bps-total", 9000)]),
            "bursts and limits on reads and writes together",
        ),
        (LimitsChange { watermark: Some(90), ..LimitsChange::of(&[]) }, "watermarks"),
        (in_group(&[("bps-write", 5000)], None), "groups"),
        (LimitsChange { weight: Some(90), ..LimitsChange::of(&[]) }, "weights"),
    ] {
        let error = format!("{:#}", bench.set(0, &refused).unwrap_err());
        assert!(error.contains(feature) && error.contains("cgroup v2"), "{error}");
    }
    assert_eq!(bench.kernel_write_bps(0), Some(5000));
}

#[test]
fn limits_missing_in_systemd_have_settled_rates() {
    let bench = LimitBench::v2(&["/system.slice/a.service", "/system.slice/b.scope", "/other"]);
    let hierarchy = bench.machine.hierarchy();
    for index in 0..3 {
        bench.set(index, &in_group(&[("bps-write", 90)], None)).unwrap();
    }
    let limits_file = LimitsFile::load(&bench.file()).unwrap();
    let cgroups = limits_file.limits.iter().map(|entry| entry.cgroup.clone()).collect();
    let unknown = || settling::missing_in_systemd(&hierarchy, &limits_file, &cgroups).unwrap();
    assert!(unknown().is_empty(), "there is no systemd");
    std::fs::create_dir_all(bench.machine.path("run/systemd/system")).unwrap();
    let units: Vec<_> =
        unknown().into_iter().map(|missing| (missing.group, missing.properties[1].clone())).collect();
    let property = "IOWriteBandwidthMax=/dev/vda 30".to_owned();
    assert_eq!(units, [(bench.groups[0].clone(), property.clone()), (bench.groups[1].clone(), property)]);
    let write_property = |directory_name: &str, unit: &str, property: &str, text: &str| {
        let directory = bench.machine.path("run/systemd").join(directory_name).join(format!("{unit}.d"));
        std::fs::create_dir_all(&directory).unwrap();
        std::fs::write(directory.join(format!("50-{property}.conf")), format!("[Service]\n{text}\n"))
            .unwrap();
    };
    write_property("system.control", "a.service", "IOWriteBandwidthMax", "IOWriteBandwidthMax=/dev/vdb 30");
    write_property("transient", "b.scope", "IOReadIOPSMax", "IOReadIOPSMax=/dev/vda 30");
    let units: Vec<_> = unknown().into_iter().map(|missing| missing.group).collect();
    assert_eq!(units, [bench.groups[0].clone()], "that was another disk");
}

#[test]
fn weight_and_target_missing_in_systemd_are_set_alone() {
    let bench = LimitBench::v2(&["/system.slice/a.service"]);
    let hierarchy = bench.machine.hierarchy();
    let group = "/system.slice/a.service";
    let queue = bench.disk.directory().join("queue");
    std::fs::create_dir(&queue).unwrap();
    std::fs::write(queue.join("scheduler"), "[bfq]\n").unwrap();
    bench.machine.write(group, "io.bfq.weight", "default 100\n");
    bench.machine.write(group, "io.latency", "");
    let change =
        LimitsChange { weight: Some(3000), latency_target_us: Some(5000), ..LimitsChange::default() };
    bench.set(0, &change).unwrap();
    std::fs::create_dir_all(bench.machine.path("run/systemd/system")).unwrap();
    let limits_file = LimitsFile::load(&bench.file()).unwrap();
    let cgroups = limits_file.limits.iter().map(|entry| entry.cgroup.clone()).collect();
    let missing = || {
        let missing = settling::missing_in_systemd(&hierarchy, &limits_file, &cgroups).unwrap();
        missing.into_iter().flat_map(|missing| missing.properties).collect::<Vec<_>>()
    };
    let weight = "IODeviceWeight=/dev/vda 1000";
    assert_eq!(missing(), [weight, "IODeviceLatencyTargetSec=/dev/vda 5000us"]);
    let directory = bench.machine.path("run/systemd/system.control/a.service.d");
    std::fs::create_dir_all(&directory).unwrap();
    let text = "[Service]\nIODeviceLatencyTargetSec=/dev/vda 5ms\n";
    std::fs::write(directory.join("50-IODeviceLatencyTargetSec.conf"), text).unwrap();
    assert_eq!(missing(), [weight]);
    // Set by another program meanwhile.
    bench.machine.write(group, "io.bfq.weight", "254:0 50\n");
    assert!(missing().is_empty());
}

#[test]
fn cluster_group_has_the_limits_written_by_its_daemon() {
    let bench = LimitBench::v2(&["/a"]);
    let publish = |rate| {
        let mut fallback = Limits::default();
        fallback.limit_mut(policy::throttle::LimitKind::BpsWrite).rate = rate;
        let mut locked = LockedLimitsFile::open(&bench.file()).unwrap();
        locked
            .limits_file
            .replace_cluster_groups(&std::collections::BTreeMap::from([("gold".to_owned(), fallback)]));
        locked.save().unwrap();
    };
    let joining = LimitsChange { group: Some("gold".to_owned()), cluster: true, ..LimitsChange::default() };
    let refused = bench.set(0, &joining).unwrap_err().to_string();
    assert!(refused.contains("group gold belongs to no cluster here"), "{refused}");
    publish(0);
    let report = bench.set(0, &joining).unwrap().text();
    assert!(report.contains("the cluster has no limits for group gold yet"), "{report}");
    publish(800_000);
    bench.set(0, &joining).unwrap();
    assert_eq!(bench.kernel_write_bps(0), Some(800_000), "the fallback share");
}
