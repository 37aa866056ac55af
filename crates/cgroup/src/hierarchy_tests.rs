//! Discovery of the hierarchies on machines of every kind.

use super::{super::fake_machine::FakeMachine, *};

#[test]
fn version_2_limits_block_io_where_its_root_has_the_controller() {
    let machine = FakeMachine::v2("cpuset cpu io memory");
    let hierarchy = machine.hierarchy();
    assert_eq!((hierarchy.version(), hierarchy.root()), (Some(Version::V2), Some(machine.root().as_path())));
    assert_eq!((&hierarchy.blkio, &hierarchy.memory_v1), (&None, &None));
    assert_eq!(hierarchy.unified, Some(machine.root()));
}

#[test]
fn v1_is_used_where_it_has_blkio() {
    let machine = FakeMachine::v1();
    let hierarchy = machine.hierarchy();
    assert_eq!((hierarchy.version(), hierarchy.root()), (Some(Version::V1), Some(machine.root().as_path())));
    assert_eq!(hierarchy.unified, Some(machine.path("sys/fs/cgroup/unified")));
    assert_eq!(hierarchy.memory_v1, Some(machine.path("sys/fs/cgroup/memory")));
}

#[test]
fn no_version_without_controller() {
    let machine = FakeMachine::v2("cpu memory iolike");
    let hierarchy = machine.hierarchy();
    assert_eq!((hierarchy.version(), hierarchy.root()), (None, None));
    let error = hierarchy.group_of_pid(1).expect_err("no hierarchy").to_string();
    assert!(
        error.starts_with("cgroups: no mounted hierarchy has a controller for block I/O (mount "),
        "{error}"
    );
}

#[test]
fn unreadable_mountinfo_is_an_error() {
    let machine = FakeMachine::v2("io");
    fs::write(machine.roots().mountinfo(), "no mount\n").expect("written");
    let error = CgroupHierarchy::discover(machine.roots()).expect_err("unknown").to_string();
    assert!(error.starts_with("mountinfo: unknown line format: \"no mount\""), "{error}");
    fs::remove_file(machine.roots().mountinfo()).expect("removed");
    let error = format!("{:#}", CgroupHierarchy::discover(machine.roots()).expect_err("missing"));
    assert!(error.contains("proc/self/mountinfo: No such file"), "{error}");
}

#[test]
fn first_cgroup_mount_is_the_hosts() {
    let machine = FakeMachine::v2("io");
    machine.mount(&machine.path("containers/x/cgroup"), "/docker/x", "cgroup2 cgroup rw");
    assert_eq!(machine.hierarchy().root(), Some(machine.root().as_path()));
}

#[test]
fn a_process_is_in_the_cgroup_of_the_hierarchy_that_limits() {
    let machine = FakeMachine::v2("io");
    machine.group("/system.slice/a:b.service");
    machine.process(7, "1:name=systemd:/elsewhere\n0::/system.slice/a:b.service\n");
    let group = machine.hierarchy().group_of_pid(7).expect("there");
    assert_eq!(group.name, Path::new("/system.slice/a:b.service"));
    assert_eq!(group.directory, machine.root().join("system.slice/a:b.service"));

    let machine = FakeMachine::v1();
    machine.group("/x");
    machine.process(7, "9:cpu,blkio:/x\n1:name=systemd:/elsewhere\n0::/other\n");
    assert_eq!(machine.hierarchy().group_of_pid(7).expect("there"), machine.group("/x"));
}

#[test]
fn root_is_a_cgroup() {
    let machine = FakeMachine::v2("io");
    machine.process(2, "0::/\n");
    let group = machine.hierarchy().group_of_pid(2).expect("there");
    assert!(group.is_root() && group == machine.hierarchy().root_group().expect("mounted"));
}

#[test]
fn process_without_a_cgroup_is_an_error_with_reason() {
    #[track_caller]
    fn check(machine: &FakeMachine, expect: &str) {
        let error = format!("{:#}", machine.hierarchy().group_of_pid(7).expect_err("none"));
        assert!(error.contains(expect), "{error}");
    }
    let machine = FakeMachine::v2("io");
    check(&machine, "process 7: does not exist (it may have ended)");
    machine.process(7, "0::/gone.service (deleted)\n");
    check(&machine, "process 7: its cgroup /gone.service (deleted) has been removed");
    machine.process(7, "0::/../../outside\n");
    check(&machine, "its cgroup /../../outside is outside of the mount");
    machine.process(7, "1:name=systemd:/x\n");
    check(&machine, "has no cgroup for block I/O");
    machine.process(7, "what\n");
    check(&machine, "/proc/PID/cgroup: unknown line format: \"what\"");
}

#[test]
fn container_without_cgroup_namespace_hides_the_host_prefix() {
    let machine = FakeMachine::v2("io");
    fs::write(machine.roots().mountinfo(), "").expect("written");
    machine.mount(&machine.root(), "/docker/4f", "cgroup2 cgroup ro");
    machine.group("/inner");
    machine.process(7, "0::/docker/4f/inner\n");
    assert_eq!(machine.hierarchy().group_of_pid(7).expect("there"), machine.group("/inner"));
    machine.process(7, "0::/docker/4e\n");
    let error = machine.hierarchy().group_of_pid(7).expect_err("outside").to_string();
    assert!(error.contains("its cgroup /docker/4e is outside of the mount"), "{error}");
}

#[test]
fn systemd_is_detected_by_its_runtime_directory() {
    let machine = FakeMachine::v2("io");
    assert!(!machine.hierarchy().has_systemd());
    fs::create_dir_all(machine.path("run/systemd/system")).expect("made");
    assert!(machine.hierarchy().has_systemd());
}

#[test]
fn hierarchies_of_this_host_are_found() {
    let hierarchy = CgroupHierarchy::discover(KernelRoots::default()).expect("mounts are always there");
    if hierarchy.version().is_some() {
        let group =
            hierarchy.group_of_pid(i32::try_from(std::process::id()).expect("small")).expect("in one");
        assert!(
            group.exists() && group.directory.starts_with(hierarchy.root().expect("mounted")),
            "{group:?}"
        );
    }
}
