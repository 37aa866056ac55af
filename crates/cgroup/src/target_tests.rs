//! Texts of users, and the cgroups that they resolve to.

use super::{super::fake_machine::FakeMachine, *};

const ID: &str = "4426af4f45ae09720a1e50f220d19db5b71cfe897480d860f0bc761d7f4be69d";
const OTHER_ID: &str = "4426af4f45aeffffffffffffffffffffffffffffffffffffffffffffffffffff";

fn server() -> FakeMachine {
    let machine = FakeMachine::v2("cpu io memory");
    for name in [
        "/system.slice/nginx.service",
        "/system.slice/system-getty.slice/getty@tty1.service",
        "/system.slice/dev-disk-by\\x2duuid-4a.swap",
        "/system.slice/_io.service",
        "/user.slice/user-1000.slice/user@1000.service/app.slice/app.service",
        "/user.slice/user-1001.slice/user@1001.service/app.slice/app.service",
        "/weir",
    ] {
        machine.group(name);
    }
    machine
}

#[track_caller]
fn check(machine: &FakeMachine, text: &str, expect: &str) {
    let group = resolve(&machine.hierarchy(), text).unwrap_or_else(|error| panic!("{text}: {error:#}"));
    assert_eq!(group.name, Path::new(expect));
    assert!(group.exists());
}

#[track_caller]
fn refused(machine: &FakeMachine, text: &str, expect: &str) {
    let error = format!("{:#}", resolve(&machine.hierarchy(), text).expect_err(text));
    assert!(error.starts_with(&format!("cgroup {text:?}: ")) && error.contains(expect), "{error}");
}

#[test]
fn path_is_relative_to_host_or_cgroup_root() {
    let machine = server();
    let full_path = machine.root().join("system.slice/nginx.service");
    check(&machine, full_path.to_str().expect("UTF-8"), "/system.slice/nginx.service");
    for text in
        ["/system.slice/nginx.service", "system.slice/nginx.service", "/system.slice//nginx.service/", "weir"]
    {
        let expect = if text == "weir" { "/weir" } else { "/system.slice/nginx.service" };
        check(&machine, text, expect);
    }
    check(&machine, "/", "/");
    check(&machine, machine.root().to_str().expect("UTF-8"), "/");
    let link = machine.path("cgroup");
    std::os::unix::fs::symlink(machine.root(), &link).expect("linked");
    check(&machine, link.join("weir").to_str().expect("UTF-8"), "/weir");
}

#[test]
fn invalid_path_is_rejected() {
    let machine = server();
    refused(&machine, "", "empty (give a path, a systemd unit, a container's id or a pid)");
    refused(&machine, "/system.slice/../../etc", "contains \"..\"");
    refused(&machine, "..", "contains \"..\"");
    refused(&machine, "/system.slice/apache.service", "no cgroup with this path below");
    machine.write("/weir", "io.max", "");
    refused(&machine, "/weir/io.max", "no cgroup with this path below");
}

#[test]
fn path_in_another_hierarchy_is_rejected() {
    let machine = FakeMachine::v1();
    let wrong = machine.path("sys/fs/cgroup/memory/x");
    std::fs::create_dir(&wrong).expect("made");
    refused(
        &machine,
        wrong.to_str().expect("UTF-8"),
        "sys/fs/cgroup/memory does not limit block I/O (give one below ",
    );
    machine.group("/x");
    check(&machine, machine.root().join("x").to_str().expect("UTF-8"), "/x");
    check(&machine, "/x", "/x");
}

#[test]
fn a_process_is_in_its_cgroup() {
    let machine = server();
    machine.process(1234, "0::/system.slice/nginx.service\n");
    check(&machine, "1234", "/system.slice/nginx.service");
    machine.process(i32::try_from(std::process::id()).expect("small"), "0::/weir\n");
    check(&machine, "self", "/weir");
    refused(&machine, "1235", "process 1235: does not exist");
    refused(&machine, "9999999999", "not a pid");
}

#[test]
fn unit_is_found_at_any_depth() {
    let machine = server();
    for text in ["nginx", "nginx.service"] {
        check(&machine, text, "/system.slice/nginx.service");
    }
    check(&machine, "user.slice", "/user.slice");
    check(&machine, "user-1000.slice", "/user.slice/user-1000.slice");
    check(&machine, "getty@tty1", "/system.slice/system-getty.slice/getty@tty1.service");
    let swap = "dev-disk-by\\x2duuid-4a.swap";
    check(&machine, swap, &format!("/system.slice/{swap}"));
    check(&machine, "io.service", "/system.slice/_io.service");
    check(&machine, "io", "/system.slice/_io.service");
    refused(&machine, "apache", "no cgroup, unit, container or process with this name (");
    refused(&machine, "user-1000", "no cgroup, unit, container or process with this name (");
}

#[test]
fn ambiguous_unit_is_rejected_with_candidates() {
    let machine = server();
    refused(
        &machine,
        "app.service",
        "2 cgroups match: /user.slice/user-1000.slice/user@1000.service/app.slice/app.service, \
         /user.slice/user-1001.slice/user@1001.service/app.slice/app.service (give the path of one)",
    );
    for uid in 2000..2010 {
        machine.group(&format!("/user.slice/user-{uid}.slice/user@{uid}.service/app.slice/app.service"));
    }
    refused(&machine, "app", "/user@2007.service/app.slice/app.service, and 2 more (give the path of one)");
}

#[test]
fn path_has_precedence_over_unit_names() {
    let machine = server();
    machine.group(&format!("/system.slice/docker-{ID}.scope/user.slice"));
    check(&machine, "user.slice", "/user.slice");
}

#[test]
fn containers_of_all_runtimes_are_found() {
    for name in [
        format!("/system.slice/docker-{ID}.scope"),
        format!("/docker/{ID}"),
        format!("/machine.slice/libpod-{ID}.scope"),
        format!("/libpod_parent/libpod-{ID}"),
        format!("/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{ID}.scope"),
        format!(
            "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-podc704ef4c_297a.slice/cri-containerd-{ID}.scope"
        ),
        format!("/kubepods.slice/kubepods-podc704ef4c_297a.slice/crio-{ID}.scope"),
        format!("/kubepods/burstable/podc704ef4c-297a-4b5c-8d6e-4426af4f45ae/{ID}"),
        format!("/system.slice/nerdctl-{ID}.scope"),
    ] {
        let machine = server();
        machine.group(&name);
        machine.group(&format!("{name}/container"));
        for text in [
            ID.to_owned(),
            ID[..12].to_owned(),
            format!("docker://{ID}"),
            format!("containerd://{ID}"),
            format!("cri-o://{}", &ID[..20]),
        ] {
            check(&machine, &text, &name);
        }
    }
}

#[test]
fn a_container_is_found_in_version_1_too() {
    let machine = FakeMachine::v1();
    machine.group(&format!("/docker/{ID}"));
    check(&machine, &ID[..12], &format!("/docker/{ID}"));
    refused(
        &machine,
        "nginx",
        "a unit has one for block I/O after `systemctl set-property --runtime UNIT IOAccounting=yes`",
    );
}

#[test]
fn container_monitor_is_not_the_container() {
    let machine = server();
    machine.group(&format!("/machine.slice/libpod-{ID}.scope"));
    machine.group(&format!("/machine.slice/libpod-conmon-{ID}.scope"));
    machine.group(&format!("/system.slice/crio-conmon-{ID}.scope"));
    machine.group(&format!("/system.slice/var-lib-docker-containers-{ID}-mounts-shm.mount"));
    check(&machine, ID, &format!("/machine.slice/libpod-{ID}.scope"));
}

#[test]
fn ambiguous_id_prefix_is_rejected_with_candidates() {
    let machine = server();
    machine.group(&format!("/docker/{ID}"));
    machine.group(&format!("/docker/{OTHER_ID}"));
    refused(
        &machine,
        &ID[..12],
        &format!("2 cgroups match: /docker/{ID}, /docker/{OTHER_ID} (give the path of one)"),
    );
    check(&machine, &ID[..13], &format!("/docker/{ID}"));
}

#[test]
fn invalid_container_id_is_rejected() {
    let machine = server();
    machine.group(&format!("/docker/{ID}"));
    refused(&machine, &ID[..11], "no cgroup, unit, container or process with this name (");
    for id in ["", "4426af4f45a", "4426AF4F45AE", "../../../../etc"] {
        refused(
            &machine,
            &format!("docker://{id}"),
            "is no container's id (it has 12 to 64 hexadecimal digits)",
        );
    }
    refused(&machine, "docker://000000000000", "no cgroup, unit, container or process with this name (");
}

#[test]
fn an_id_of_decimal_digits_is_no_pid() {
    let machine = server();
    let id = "1".repeat(64);
    machine.group(&format!("/docker/{id}"));
    check(&machine, &id[..12], &format!("/docker/{id}"));
}

#[test]
fn no_cgroup_without_an_io_controller() {
    let machine = FakeMachine::v2("cpu");
    let error = resolve(&machine.hierarchy(), "/").expect_err("none").to_string();
    assert!(error.starts_with("cgroups: no mounted hierarchy has a controller for block I/O"), "{error}");
}

#[test]
fn removed_cgroup_is_matched_by_name() {
    let machine = server();
    let hierarchy = machine.hierarchy();
    let root = machine.root();
    let matches = |text: &str, name: &str| could_have_named(&hierarchy, text, Path::new(name));
    let service = "/system.slice/nginx.service";
    let below = root.join("system.slice/nginx.service");
    for text in ["nginx", "nginx.service", service, "system.slice/nginx.service", below.to_str().unwrap()] {
        assert!(matches(text, service), "{text}");
    }
    // A path must match completely, and an empty text matches nothing.
    for text in ["", "/", "/nginx.service", "ginx", "slice/nginx.service"] {
        assert!(!matches(text, service), "{text}");
    }
    let id = "4f2e91d0c7aa".repeat(6)[..64].to_owned();
    let container = format!("/system.slice/docker-{id}.scope");
    for text in [&id, &id[..12], &format!("docker://{id}")] {
        assert!(matches(text, &container), "{text}");
    }
    assert!(!matches(&id[..11], &container) && !matches(&id[1..20], &container));
}
