use std::os::unix::fs::symlink;

use super::*;
use crate::{fake_machine::FakeMachine, limit::write};

const MIB: u64 = 1 << 20;

fn machine() -> (FakeMachine, ControlGroup) {
    let machine = FakeMachine::v2("cpu io memory");
    let group = machine.group("/a");
    machine.write("/a", "io.max", "");
    machine.write("/a", "cgroup.controllers", "cpu io memory\n");
    (machine, group)
}

fn file(machine: &FakeMachine) -> std::path::PathBuf {
    machine.path("run/weir/cgroups.json")
}

fn nodes(machine: &FakeMachine) -> Vec<String> {
    let disks = MachineDisks::of(&machine.roots()).unwrap().disks;
    disks.iter().map(|disk| disk.number().to_string()).collect()
}

/// Makes a device lie above others.
fn above(machine: &FakeMachine, upper: &str, lower: &[&str]) {
    let slaves = machine.path("sys/devices").join(upper).join("slaves");
    fs::create_dir_all(&slaves).unwrap();
    for lower in lower {
        let name = lower.rsplit('/').next().unwrap();
        symlink(machine.path("sys/devices").join(lower), slaves.join(name)).unwrap();
    }
}

/// Stored limit on bytes written. The fake io.max has the last disk that was written, only.
fn limit(machine: &FakeMachine, group: &ControlGroup, number: &str) -> Option<u64> {
    let stored = LimitsFile::load(&file(machine)).unwrap();
    let entry = stored.entry(group, kernel::number(number).unwrap())?;
    let limits = stored.limits_of(entry).limits().unwrap();
    Some(limits.limit(policy::throttle::LimitKind::BpsWrite).rate)
}

/// Rate in the kernel on the disk that was written last.
fn last_written(machine: &FakeMachine, group: &ControlGroup, number: &str) -> Option<u64> {
    write::read_limits(group, crate::device::resolve(&machine.roots(), number).unwrap().identity.number())
        .unwrap()
        .bps[1]
}

#[test]
fn disks_are_those_that_can_carry_a_limit() {
    let (machine, _) = machine();
    for (number, name) in [
        ("8:0", "sda"),
        ("8:1", "sda/sda1"),
        ("8:16", "sdb"),
        ("1:0", "ram0"),
        ("252:0", "zram0"),
        ("7:0", "loop0"),
        ("7:1", "loop1"),
    ] {
        machine.disk(number, name);
    }
    fs::write(machine.path("sys/devices/loop1/size"), "0\n").unwrap();
    assert_eq!(nodes(&machine), ["7:0", "8:0", "8:16"]);
}

#[test]
fn members_of_devices_above_are_left_out() {
    let (machine, _) = machine();
    for (number, name) in
        [("8:0", "sda"), ("8:16", "sdb"), ("8:17", "sdb/sdb1"), ("8:32", "sdc"), ("8:33", "sdc/sdc1")]
    {
        machine.disk(number, name);
    }
    machine.disk("8:34", "sdc/sdc2");
    machine.disk("9:0", "md0");
    machine.disk("253:0", "dm-0");
    above(&machine, "md0", &["sda", "sdb/sdb1"]);
    above(&machine, "dm-0", &["md0", "sdc/sdc2"]);
    let all = MachineDisks::of(&machine.roots()).unwrap();
    // sdc has a partition that is used directly.
    assert_eq!(nodes(&machine), ["8:32", "253:0"]);
    let left_out = all.notices.iter().filter(|notice| notice.contains("is left out")).count();
    assert_eq!((left_out, all.notices.len()), (3, 4), "{:?}", all.notices);
    assert!(all.notices.iter().any(|notice| notice.contains("count on both")), "{:?}", all.notices);
}

#[test]
fn limit_is_set_on_all_disks_and_on_new_ones() {
    let (machine, group) = machine();
    let hierarchy = machine.hierarchy();
    machine.disk("8:0", "sda");
    machine.disk("8:16", "sdb");
    let change = LimitsChange::of(&[("bps-write", 20 * MIB)]);
    let report = set(&hierarchy, &file(&machine), &group, &change).unwrap();
    assert_eq!(report.reports.len(), 2);
    assert!(report.text().contains("disks that appear need `weir cgroup watch`"), "{}", report.text());
    assert_eq!(["8:0", "8:16"].map(|disk| limit(&machine, &group, disk)), [Some(20 * MIB); 2]);
    assert_eq!(last_written(&machine, &group, "8:16"), Some(20 * MIB));
    assert_eq!(extend(&hierarchy, &file(&machine)).unwrap(), 0);
    // Other limits of one disk stay.
    let sdb = crate::device::resolve(&machine.roots(), "8:16").unwrap().identity;
    let own = LimitsChange::of(&[("bps-write", 5 * MIB)]);
    set_limits(&hierarchy, &file(&machine), &group, &sdb, &own).unwrap();
    machine.disk("8:32", "sdc");
    assert_eq!(extend(&hierarchy, &file(&machine)).unwrap(), 1);
    let limits = ["8:0", "8:16", "8:32"].map(|disk| limit(&machine, &group, disk));
    assert_eq!(limits, [Some(20 * MIB), Some(5 * MIB), Some(20 * MIB)]);
    assert_eq!(last_written(&machine, &group, "8:32"), Some(20 * MIB));
    // A disk that is absent, and its entry.
    fs::remove_file(machine.path("sys/dev/block/8:32")).unwrap();
    let mut report = remove(&hierarchy, &file(&machine), &group).unwrap();
    assert!(report.take_failure().is_none());
    assert_eq!(["8:0", "8:16"].map(|disk| limit(&machine, &group, disk)), [None; 2]);
    assert_eq!(LimitsFile::load(&file(&machine)).unwrap(), LimitsFile::default());
    assert!(remove(&hierarchy, &file(&machine), &group).is_err());
}

#[test]
fn one_disk_is_excepted_by_other_limits_and_not_by_a_removal() {
    let (machine, group) = machine();
    let hierarchy = machine.hierarchy();
    machine.disk("8:0", "sda");
    machine.disk("8:16", "sdb");
    let sdb = crate::device::resolve(&machine.roots(), "8:16").unwrap().identity;
    let check = || check_removal_of_one(&LimitsFile::load(&file(&machine)).unwrap(), &group, &sdb);
    check().unwrap();
    set(&hierarchy, &file(&machine), &group, &LimitsChange::of(&[("bps-write", 20 * MIB)])).unwrap();
    let error = check().unwrap_err().to_string();
    assert!(error.contains("/a --device any --remove") && error.contains("--bps-write 0"), "{error}");
    // As the message says.
    set_limits(&hierarchy, &file(&machine), &group, &sdb, &LimitsChange::of(&[("bps-write", 0)])).unwrap();
    assert_eq!(extend(&hierarchy, &file(&machine)).unwrap(), 0);
    assert_eq!(["8:0", "8:16"].map(|disk| limit(&machine, &group, disk)), [Some(20 * MIB), Some(0)]);
}

#[test]
fn removed_disks_are_notices_and_failures_name_the_others() {
    let (machine, group) = machine();
    machine.disk("8:0", "sda");
    machine.disk("8:16", "sdb");
    let [sda, sdb] = &MachineDisks::of(&machine.roots()).unwrap().disks[..] else { panic!("two disks") };
    let refused = |disk: &DeviceIdentity, errno: nix::errno::Errno| {
        let line = format!("{} wbps=5", disk.number());
        Err(write::refusal(&group, "io.max", &line, &errno.into()))
    };
    let (roots, mut report) = (machine.roots(), AnyDeviceReport::default());
    // The kernel has removed the disk, and sysfs has it still.
    report.add(&roots, &group, sdb, refused(sdb, nix::errno::Errno::ENODEV));
    assert!(report.take_failure().is_none());
    assert_eq!(report.notices, ["/dev/sdb was removed meanwhile, and is left out"]);
    // Another error, and another disk that has the limit.
    let change = LimitsChange::of(&[("bps-write", 20 * MIB)]);
    report.add(&roots, &group, sda, refused(sda, nix::errno::Errno::EINVAL));
    let changed = set_limits(&machine.hierarchy(), &file(&machine), &group, sdb, &change);
    report.add(&roots, &group, sdb, changed);
    let failure = format!("{:#}", report.take_failure().unwrap());
    assert!(failure.starts_with("failed on /dev/sda; changed on /dev/sdb: cgroup /a: io.max: "), "{failure}");
    // Without an entry in sysfs, any error is that of a removed disk.
    fs::remove_file(machine.path("sys/dev/block/8:16")).unwrap();
    report.add(&roots, &group, sdb, refused(sdb, nix::errno::Errno::EINVAL));
    assert!(report.take_failure().is_none());
    // The cgroup was removed, not the disk.
    fs::remove_dir_all(&group.directory).unwrap();
    report.add(&roots, &group, sda, refused(sda, nix::errno::Errno::ENODEV));
    assert!(report.take_failure().is_some());
}

#[test]
fn latency_target_is_set_on_all_disks_and_on_new_ones() {
    let (machine, group) = machine();
    let hierarchy = machine.hierarchy();
    machine.write("/a", "io.latency", "");
    machine.write("/a", "io.stat", "");
    machine.disk("8:0", "sda");
    let targets = || {
        let stored = LimitsFile::load(&file(&machine)).unwrap();
        stored.limits.iter().map(CgroupEntry::latency_target_us).collect::<Vec<_>>()
    };
    let kernel = || group.read("io.latency").unwrap();
    let target = |target_us| LimitsChange { latency_target_us: Some(target_us), ..LimitsChange::default() };
    let report = set(&hierarchy, &file(&machine), &group, &target(5000)).unwrap();
    assert!(report.text().contains("/a on /dev/sda: latency 5ms"), "{}", report.text());
    assert_eq!((targets(), kernel()), (vec![Some(5000)], "8:0 target=5000".to_owned()));
    machine.disk("8:16", "sdb");
    assert_eq!(extend(&hierarchy, &file(&machine)).unwrap(), 1);
    assert_eq!((targets(), kernel()), (vec![Some(5000); 2], "8:16 target=5000".to_owned()));
    // The kernel's file of the fake machine has the last line only.
    set(&hierarchy, &file(&machine), &group, &target(0)).unwrap();
    assert_eq!((targets(), kernel()), (vec![None; 2], "8:16 target=0".to_owned()));
    machine.disk("8:32", "sdc");
    extend(&hierarchy, &file(&machine)).unwrap();
    assert_eq!(targets(), [None; 3]);
    set(&hierarchy, &file(&machine), &group, &target(7000)).unwrap();
    let mut report = remove(&hierarchy, &file(&machine), &group).unwrap();
    assert!(report.take_failure().is_none());
    assert_eq!((targets(), kernel()), (Vec::new(), "8:32 target=0".to_owned()));
}

#[test]
fn latency_target_without_io_latency_changes_nothing() {
    let (machine, group) = machine();
    machine.disk("8:0", "sda");
    machine.disk("8:16", "sdb");
    let change =
        LimitsChange { latency_target_us: Some(5000), ..LimitsChange::of(&[("bps-write", 20 * MIB)]) };
    let error = set(&machine.hierarchy(), &file(&machine), &group, &change).unwrap_err().to_string();
    assert!(error.contains("CONFIG_BLK_CGROUP_IOLATENCY"), "{error}");
    assert_eq!(LimitsFile::load(&file(&machine)).unwrap(), LimitsFile::default());
    assert_eq!(group.read("io.max").unwrap(), "");
}

#[test]
fn members_of_a_group_join_it_on_new_disks() {
    let (machine, group) = machine();
    let hierarchy = machine.hierarchy();
    machine.disk("8:0", "sda");
    let change = LimitsChange {
        group: Some("tenant".to_owned()),
        weight: Some(200),
        ..LimitsChange::of(&[("bps-write", 20 * MIB)])
    };
    set(&hierarchy, &file(&machine), &group, &change).unwrap();
    machine.disk("8:16", "sdb");
    assert_eq!(extend(&hierarchy, &file(&machine)).unwrap(), 1);
    let stored = LimitsFile::load(&file(&machine)).unwrap();
    let groups: Vec<_> = stored.limits.iter().map(|entry| (entry.group.as_deref(), entry.weight())).collect();
    assert_eq!(groups, [(Some("tenant"), 200); 2]);
    // Half each, until the watch divides it.
    assert_eq!(last_written(&machine, &group, "8:16"), Some(10 * MIB));
}

#[test]
fn invalid_limit_is_not_stored() {
    let (machine, group) = machine();
    machine.disk("8:0", "sda");
    let change = LimitsChange::of(&[("bps-write-max", 5)]);
    assert!(set(&machine.hierarchy(), &file(&machine), &group, &change).is_err());
    assert_eq!(LimitsFile::load(&file(&machine)).unwrap(), LimitsFile::default());
}
