use crate::{
    fake_machine::FakeMachine,
    limit::{
        device,
        latency_target::{parse, text},
        limits_file::{LimitsChange, LimitsFile},
        remove_limits, restored, set_limits,
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
fn failed_change_restores_the_kernels_target() {
    let bench = TargetBench::new(Some("254:0 target=7000\n"));
    // The limits file cannot be written, because a directory has its name.
    std::fs::create_dir_all(&bench.file).unwrap();
    assert!(bench.set(&target(5000)).is_err());
    assert!(bench.kernel().contains("target=7000"), "{}", bench.kernel());
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
