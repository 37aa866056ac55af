//! Files, relatives and controllers of a cgroup.

use nix::errno::Errno;

use super::{super::fake_machine::FakeMachine, *};

#[test]
fn files_are_read_and_written() {
    let machine = FakeMachine::v2("io");
    let group = machine.group("/a");
    machine.write("/a", "io.max", "8:0 rbps=1 wbps=max riops=max wiops=max\n");
    group.write("io.max", "8:0 rbps=2").expect("written");
    assert_eq!(group.read("io.max").expect("there"), "8:0 rbps=2", "as a shell's `>` does");
    assert_eq!(group.write("io.weight", "1").expect_err("no such file").kind(), io::ErrorKind::NotFound);
    assert!(!group.directory.join("io.weight").exists(), "a file that the kernel does not have is not made");
    assert_eq!(group.read("io.weight").expect_err("no such file").kind(), io::ErrorKind::NotFound);
}

#[test]
fn processes_of_other_pid_namespaces_are_not_listed() {
    let machine = FakeMachine::v2("io");
    let group = machine.group("/a");
    machine.write("/a", "cgroup.procs", "17\n0\n4194303\n0\n");
    assert_eq!(group.processes().expect("there"), [17, 4_194_303]);
    machine.write("/a", "cgroup.procs", "");
    assert_eq!(group.processes().expect("there"), [0_i32; 0]);
    machine.write("/a", "cgroup.procs", "17\nx\n");
    assert_eq!(group.processes().expect_err("not a pid").to_string(), "cgroup.procs: not a pid");
}

#[test]
fn a_tree_is_walked_both_ways() {
    let machine = FakeMachine::v2("io");
    let (a, b) = (machine.group("/a"), machine.group("/a/b.slice"));
    machine.group("/a/a b");
    machine.write("/a", "io.max", "");
    let names: Vec<_> = a.children().expect("there").into_iter().map(|child| child.name).collect();
    assert_eq!(names, [Path::new("/a/a b"), Path::new("/a/b.slice")]);
    assert_eq!(b.parent(), Some(a.clone()));
    let root = a.parent().expect("the root");
    assert!(root.is_root() && !a.is_root());
    assert_eq!((root.name.as_path(), root.directory.as_path()), (Path::new("/"), machine.root().as_path()));
    assert_eq!(root.parent(), None);
}

#[test]
fn cgroup_is_created_and_removed() {
    let machine = FakeMachine::v2("io");
    let parent = machine.group("/a");
    let group = ControlGroup::create(&parent, "weir-1").expect("made");
    assert_eq!(group, machine.group("/a/weir-1"));
    assert!(group.exists());
    let duplicate_error = ControlGroup::create(&parent, "weir-1").expect_err("there already");
    assert_eq!(duplicate_error.kind(), io::ErrorKind::AlreadyExists);
    group.clone().remove().expect("empty");
    assert!(!group.exists());
    assert_eq!(group.remove().expect_err("gone").kind(), io::ErrorKind::NotFound);
    for name in ["", ".", "..", "a/b", "../b", "a\nb", "a\0b"] {
        let error = ControlGroup::create(&parent, name).expect_err("no name");
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{name:?}");
    }
}

/// A machine with cgroups down to `/a/b/c`; the levels between have these controllers.
fn levels(controllers: &str) -> (FakeMachine, ControlGroup) {
    let machine = FakeMachine::v2("cpu io memory");
    let group = machine.group("/a/b/c");
    for (level, hands_down) in [("/", "io\n"), ("/a", "\n"), ("/a/b", "")] {
        machine.write(level, SUBTREE_CONTROL_FILE, hands_down);
    }
    for level in ["/a", "/a/b"] {
        machine.write(level, CONTROLLERS_FILE, controllers);
    }
    machine.write("/a/b/c", CONTROLLERS_FILE, "");
    (machine, group)
}

#[test]
fn missing_controllers_are_enabled_at_every_level() {
    let (machine, group) = levels("io memory");
    group.enable_controllers(&["io", "memory"]).expect("enabled");
    let written =
        ["/", "/a", "/a/b"].map(|level| machine.group(level).read(SUBTREE_CONTROL_FILE).expect("there"));
    assert_eq!(written, ["+memory", "+io +memory", "+io +memory"]);
    assert!(group.read(SUBTREE_CONTROL_FILE).is_err(), "its own children are not concerned");
}

#[test]
fn enabled_controllers_are_not_written_again() {
    let (machine, group) = levels("");
    machine.write("/a/b/c", CONTROLLERS_FILE, "cpu io\n");
    group.enable_controllers(&["io"]).expect("there already");
    assert_eq!(machine.group("/").read(SUBTREE_CONTROL_FILE).expect("there"), "io\n");
    let v1 = FakeMachine::v1();
    v1.group("/a").enable_controllers(&["io"]).expect("nothing to do");
}

#[test]
fn the_level_that_lacks_a_controller_is_named() {
    let (_machine, group) = levels("memory");
    let error = group.enable_controllers(&["io"]).expect_err("not handed down").to_string();
    assert!(error.starts_with("cgroup /a: it has no io controller (the kernel lacks it"), "{error}");
}

#[test]
fn refusals_name_cause_and_remedy() {
    let machine = FakeMachine::v2("io");
    let group = machine.group("/a");
    let check = |errno: Errno, expect: &str| {
        let error = group.describe_refusal("+io", &errno.into()).to_string();
        assert!(error.starts_with("cgroup /a: cgroup.subtree_control refuses \"+io\": "), "{error}");
        assert!(error.contains(expect), "{error}");
    };
    check(Errno::EBUSY, "it has processes itself");
    check(Errno::EPERM, "run as root");
    check(Errno::EACCES, "run as root");
    check(Errno::EROFS, "mounted read-only");
    check(Errno::EOPNOTSUPP, "it is threaded");
    check(Errno::ENODEV, "it has been removed");
}

#[test]
fn read_error_names_the_file() {
    let machine = FakeMachine::v2("io");
    let group = machine.group("/a");
    let error = format!("{:#}", group.enable_controllers(&["io"]).expect_err("no such file"));
    assert!(error.starts_with("cgroup /a: cgroup.controllers cannot be read: No such file"), "{error}");
}
