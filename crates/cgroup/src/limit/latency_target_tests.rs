use crate::{
    fake_machine::FakeMachine,
    limit::{
        PlannedValues, device,
        latency_target::{parse, plan, text},
        limits_file::{LimitsChange, LimitsFile},
        remove_limits, restored, set_limits, weight,
    },
};

const DISK: &str = "254:0";

fn target(target_us: u64) -> LimitsChange {
    LimitsChange { latency_target_us: Some(target_us), ..LimitsChange::default() }
}

/// A machine with a cgroup `/a` and a disk; `latency` is the content of its io.latency, if the
/// kernel has the file.
struct TargetBench {
    machine: FakeMachine,
    file: std::path::PathBuf,
}

impl TargetBench {
    fn new(latency: Option<&str>) -> Self {
        let machine = FakeMachine::v2("cpu io memory");
        machine.group("/a");
        machine.write("/a", "io.max", "");
        machine.write("/a", "io.stat", "");
        machine.write("/a", "cgroup.controllers", "cpu io memory\n");
        if let Some(text) = latency {
            machine.write("/a", "io.latency", text);
        }
        machine.disk(DISK, "vda");
        let file = machine.path("run/weir/cgroups.json");
        Self { machine, file }
    }

    fn set(&self, change: &LimitsChange) -> anyhow::Result<String> {
        let disk = device::resolve(&self.machine.roots(), DISK).expect("a disk").identity;
        let group = self.machine.group("/a");
        let report = set_limits(&self.machine.hierarchy(), &self.file, &group, &disk, change)?;
        Ok(report.text())
    }

    fn remove(&self) -> anyhow::Result<String> {
        let disk = device::resolve(&self.machine.roots(), DISK).expect("a disk").identity;
        let group = self.machine.group("/a");
        Ok(remove_limits(&self.machine.hierarchy(), &self.file, &group, &disk)?.text())
    }

    fn kernel(&self) -> String {
        self.machine.group("/a").read("io.latency").expect("a file")
    }
}

#[test]
fn targets_are_read_as_those_of_disks() {
    for (written, target_us) in [("5ms", 5000), ("10us", 10), ("1500us", 1500), ("0", 0), ("10500ns", 11)] {
        assert_eq!(parse(written), Ok(target_us), "{written}");
    }
    assert_eq!(text(5000), "5ms");
    let rule = parse("5").unwrap_err();
    assert!(rule.contains("no unit"), "{rule}");
    assert!(parse("1us").unwrap_err().contains("from 10us to 100s"));
}

#[test]
fn target_is_written_stored_and_removed() {
    let bench = TargetBench::new(Some(""));
    let report = bench.set(&target(5000)).unwrap();
    assert_eq!(bench.kernel(), "254:0 target=5000");
    assert!(
        report
            .starts_with("/a on /dev/vda: latency 5ms\nconfigured: latency 5ms\nnote: latency target 5ms is"),
        "{report}"
    );
    assert!(report.contains("no percentile") && report.contains("children of / "), "{report}");
    assert!(!report.contains("no limits yet"), "a target alone has an effect: {report}");
    // Another change keeps it.
    let report = bench.set(&LimitsChange::of(&[("bps-write", 4_000_000)])).unwrap();
    assert!(report.contains("configured: bps-w 3.8M, latency 5ms\n"), "{report}");
    let report = bench.remove().unwrap();
    assert_eq!((bench.kernel().as_str(), report.as_str()), ("254:0 target=0", "/a on /dev/vda: no limit\n"));
    assert_eq!(LimitsFile::load(&bench.file).unwrap(), LimitsFile::default());
}

#[test]
fn zero_removes_the_target_and_keeps_the_limits() {
    let bench = TargetBench::new(Some(""));
    bench
        .set(&LimitsChange { latency_target_us: Some(5000), ..LimitsChange::of(&[("bps-write", 5000)]) })
        .unwrap();
    let report = bench.set(&target(0)).unwrap();
    assert_eq!(report, "/a on /dev/vda: bps-write 5000\nconfigured: bps-w 5000\n");
    assert_eq!(bench.kernel(), "254:0 target=0");
}

#[test]
fn kernel_without_io_latency_is_an_error_that_changes_nothing() {
    let bench = TargetBench::new(None);
    let change = LimitsChange { latency_target_us: Some(5000), ..LimitsChange::of(&[("bps-write", 5000)]) };
    let error = bench.set(&change).unwrap_err().to_string();
    assert!(error.contains("CONFIG_BLK_CGROUP_IOLATENCY") && error.contains("weir throttle DISK"), "{error}");
    assert_eq!(LimitsFile::load(&bench.file).unwrap(), LimitsFile::default());
    assert_eq!(bench.machine.group("/a").read("io.max").unwrap(), "");
    assert!(!bench.machine.group("/a").has_file("io.latency"));
    // Nothing to remove is no error.
    bench
        .set(&LimitsChange { latency_target_us: Some(0), ..LimitsChange::of(&[("bps-write", 5000)]) })
        .unwrap();
}

#[test]
fn target_is_restored_unless_another_program_set_one() {
    let bench = TargetBench::new(Some(""));
    bench.set(&target(5000)).unwrap();
    let limits_file = LimitsFile::load(&bench.file).unwrap();
    let restore = || {
        restored::restore_weights_and_targets(&bench.machine.hierarchy(), &limits_file, |_| true).unwrap();
        bench.kernel()
    };
    bench.machine.write("/a", "io.latency", "");
    assert_eq!(restore(), "254:0 target=5000");
    bench.machine.write("/a", "io.latency", "254:0 target=9000\n");
    assert_eq!(restore(), "254:0 target=9000\n");
}

/// Makes BFQ the scheduler of the disk, which then divides it by weight.
fn use_bfq(bench: &TargetBench) {
    let queue = bench.machine.path("sys/devices/vda/queue");
    std::fs::create_dir_all(&queue).unwrap();
    std::fs::write(queue.join("scheduler"), "none [bfq]\n").unwrap();
}

fn weight_and_target() -> LimitsChange {
    LimitsChange { weight: Some(300), ..target(5000) }
}

#[test]
fn failed_weight_does_not_prevent_the_target() {
    let bench = TargetBench::new(Some(""));
    use_bfq(&bench);
    bench.machine.write("/a", "io.bfq.weight", "default 100\n");
    bench.set(&weight_and_target()).unwrap();
    let limits_file = LimitsFile::load(&bench.file).unwrap();
    // After a reboot without BFQ.
    std::fs::write(bench.machine.path("sys/devices/vda/queue/scheduler"), "[none] bfq\n").unwrap();
    bench.machine.write("/a", "io.latency", "");
    let restored = restored::restore_weights_and_targets(&bench.machine.hierarchy(), &limits_file, |_| true);
    assert!(format!("{:#}", restored.unwrap_err()).contains("nothing divides /dev/vda by weight"));
    assert_eq!(bench.kernel(), "254:0 target=5000");
}

#[test]
fn failed_change_restores_the_kernels_values() {
    for (before, after) in [("default 100\n", "254:0 default"), ("254:0 70\n", "254:0 70")] {
        let bench = TargetBench::new(Some("254:0 target=7000\n"));
        use_bfq(&bench);
        bench.machine.write("/a", "io.bfq.weight", before);
        let (hierarchy, group) = (bench.machine.hierarchy(), bench.machine.group("/a"));
        let weight = || group.read("io.bfq.weight").unwrap();
        let disk = device::resolve(&bench.machine.roots(), DISK).expect("a disk").identity;
        let planned = PlannedValues {
            weight: weight::plan(&hierarchy, &group, &disk, Some(300), false).unwrap(),
            target: plan(&group, disk.number(), Some(5000)).unwrap(),
        };
        let files = LimitsFile::default();
        let stored = planned.write(&hierarchy, &group, &disk, [&files, &files], || {
            assert_eq!([weight(), bench.kernel()], ["254:0 300", "254:0 target=5000"]);
            anyhow::bail!("the disk is full")
        });
        assert_eq!(stored.unwrap_err().to_string(), "the disk is full");
        assert_eq!([weight(), bench.kernel()], [after, "254:0 target=7000"]);
    }
}

#[test]
fn refused_weight_leaves_the_target() {
    let bench = TargetBench::new(Some("254:0 target=7000\n"));
    use_bfq(&bench);
    // There is no io.bfq.weight.
    assert!(bench.set(&weight_and_target()).is_err());
    assert_eq!(bench.kernel(), "254:0 target=7000\n", "it was not written");
}

#[test]
fn unreadable_target_is_a_notice() {
    let bench = TargetBench::new(Some("unknown\n"));
    let report = bench.set(&LimitsChange::of(&[("bps-write", 5000)])).unwrap();
    assert!(report.contains("note: the latency target in force is unknown: "), "{report}");
    assert!(LimitsFile::load(&bench.file).unwrap() != LimitsFile::default());
}

#[test]
fn target_of_another_program_stays_and_is_reported() {
    let bench = TargetBench::new(Some("254:0 target=7000\n"));
    let error = bench.remove().unwrap_err().to_string();
    assert!(error.contains("its latency target of 7ms was set by another program"), "{error}");
    bench.set(&LimitsChange::of(&[("bps-write", 5000)])).unwrap();
    let report = bench.remove().unwrap();
    assert!(report.starts_with("/a on /dev/vda: latency 7ms\nnote: its latency target of 7ms"), "{report}");
    assert_eq!(bench.kernel(), "254:0 target=7000\n");
    bench.set(&target(0)).unwrap();
    assert_eq!(bench.kernel(), "254:0 target=0");
}

#[test]
fn version_1_has_no_latency_targets() {
    let machine = FakeMachine::v1();
    let group = machine.group("/a");
    for file in crate::kernel::blkio::LIMITS {
        machine.write("/a", file, "");
    }
    machine.disk(DISK, "vda");
    let disk = device::resolve(&machine.roots(), DISK).expect("a disk").identity;
    let file = machine.path("run/weir/cgroups.json");
    let error =
        set_limits(&machine.hierarchy(), &file, &group, &disk, &target(5000)).unwrap_err().to_string();
    assert!(error.starts_with("latency targets need cgroup v2"), "{error}");
}
