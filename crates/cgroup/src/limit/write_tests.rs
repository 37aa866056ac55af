use std::fs;

use super::*;
use crate::fake_machine::FakeMachine;

const DISK: DeviceNumber = DeviceNumber { major: 254, minor: 0 };

fn rates(bps_write: u64, iops_read: u64) -> IoMaxRates {
    IoMaxRates { bps: [None, Some(bps_write)], iops: [Some(iops_read), None] }
}

#[test]
fn all_keys_are_set_in_one_write() {
    let machine = FakeMachine::v2("io memory");
    let group = machine.group("/a");
    machine.write("/a", "io.max", "");
    write_limits(&group, DISK, rates(20 << 20, 100)).unwrap();
    assert_eq!(group.read("io.max").unwrap().trim_end(), "254:0 rbps=max wbps=20971520 riops=100 wiops=max");
    assert_eq!(read_limits(&group, DISK).unwrap(), rates(20 << 20, 100));
    assert_eq!(read_limits(&group, DeviceNumber { major: 8, minor: 0 }).unwrap(), IoMaxRates::NONE);
}

#[test]
fn more_operations_than_the_kernel_counts_are_no_limit() {
    let machine = FakeMachine::v2("io");
    let group = machine.group("/a");
    machine.write("/a", "io.max", "");
    write_limits(&group, DISK, rates(5, 1 << 32)).unwrap();
    assert_eq!(read_limits(&group, DISK).unwrap().iops, [None; 2]);
}

fn v1_files(machine: &FakeMachine, name: &str) {
    blkio::LIMITS.into_iter().for_each(|file| machine.write(name, file, ""));
}

#[test]
fn v1_has_a_file_for_each_key() {
    let machine = FakeMachine::v1();
    let group = machine.group("/a");
    v1_files(&machine, "/a");
    write_limits(&group, DISK, rates(20 << 20, 100)).unwrap();
    assert_eq!(group.read("blkio.throttle.write_bps_device").unwrap().trim_end(), "254:0 20971520");
    assert_eq!(group.read("blkio.throttle.read_bps_device").unwrap().trim_end(), "254:0 0");
    fs::remove_file(group.directory.join("blkio.throttle.read_bps_device")).unwrap();
    let error = format!("{:#}", read_limits(&group, DISK).unwrap_err());
    assert!(error.starts_with("cgroup /a: blkio.throttle.read_bps_device: No such file"), "{error}");
}

#[test]
fn partial_v1_write_is_rolled_back() {
    let machine = FakeMachine::v1();
    let group = machine.group("/a");
    v1_files(&machine, "/a");
    machine.write("/a", "blkio.throttle.write_bps_device", "254:0 4096\n");
    let refusing = group.directory.join("blkio.throttle.read_iops_device");
    fs::set_permissions(&refusing, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
    // Root may write to any file, but no user to a directory.
    fs::remove_file(&refusing).unwrap();
    fs::create_dir(&refusing).unwrap();
    assert!(read_limits(&group, DISK).is_err());
    // The old limits are read first; that error prevents any write.
    write_limits(&group, DISK, rates(1 << 20, 100)).unwrap_err();
    assert_eq!(group.read("blkio.throttle.write_bps_device").unwrap(), "254:0 4096\n");
}

#[test]
fn write_all_rolls_back_on_error() {
    let machine = FakeMachine::v2("io");
    let (a, b) = (machine.group("/a"), machine.group("/b"));
    machine.write("/a", "io.max", "254:0 rbps=max wbps=4096 riops=max wiops=max\n");
    let hierarchy = machine.hierarchy();
    let before = IoMaxRates { bps: [None, Some(4096)], iops: [None; 2] };
    let limit_write = |group: &ControlGroup, before| LimitWrite {
        group: group.clone(),
        device: (DISK, "/dev/vda".to_owned()),
        rates: rates(1, 2),
        before,
    };
    let error =
        write_all(&hierarchy, &[limit_write(&a, before), limit_write(&b, IoMaxRates::NONE)]).unwrap_err();
    assert!(format!("{error:#}").contains("/b"), "{error:#}");
    assert_eq!(read_limits(&a, DISK).unwrap(), IoMaxRates { bps: [None, Some(4096)], iops: [None; 2] });
}

#[test]
fn units_are_distinguished_from_other_cgroups() {
    let machine = FakeMachine::v2("io");
    assert_eq!(unit_of(&machine.group("/system.slice/db.service")), Some("db.service"));
    assert_eq!(unit_of(&machine.group("/system.slice/db.service/worker")), None);
    assert_eq!(unit_of(&machine.group("/weir/run-1")), None);
    assert_eq!(unit_of(&machine.group("/system.slice/_cpu.service")), Some("cpu.service"));
    // Units of a user's manager, or of systemd in a container, are not the system's units of that
    // name.
    assert_eq!(
        unit_of(&machine.group("/user.slice/user-1000.slice/user@1000.service/app.slice/db.service")),
        None
    );
    assert_eq!(unit_of(&machine.group("/machine.slice/docker-3f1c.scope/system.slice/nginx.service")), None);
    assert_eq!(
        properties("/dev/vda", rates(20 << 20, 100)),
        [
            "IOReadBandwidthMax=/dev/vda infinity",
            "IOWriteBandwidthMax=/dev/vda 20971520",
            "IOReadIOPSMax=/dev/vda 100",
            "IOWriteIOPSMax=/dev/vda infinity",
        ]
    );
}
