//! What is said when a daemon cannot start: the image, the address, the command line, the config file.
//!
//! Each message names what is wrong, why, and what to do.

use std::{fs, net::TcpListener, os::unix::fs::PermissionsExt as _};

use crate::harness::{Client, MIB, Scratch, Serve, assert_says, text};

#[test]
fn a_missing_image_is_named() {
    let scratch = Scratch::new();
    let image = scratch.path("nothing.raw");
    assert_says(&Serve::new(&scratch).arg(&image).fails(), &[text(&image), "no such file"]);
}

#[test]
fn a_directory_is_no_image() {
    let scratch = Scratch::new();
    let said = Serve::new(&scratch).arg(scratch.path("")).fails();
    assert_says(&said, &[text(&scratch.path("")), "directory"]);
}

#[test]
fn an_empty_file_is_no_disk() {
    let scratch = Scratch::new();
    assert_says(&Serve::new(&scratch).arg("memory:0").fails(), &["memory:0", "size zero"]);
    assert_says(&Serve::new(&scratch).arg("memory:0").fails(), &["memory:0", "size zero"]);
    let image = scratch.sparse("empty.raw", 0);
    assert_says(&Serve::new(&scratch).arg(&image).fails(), &[text(&image), "size"]);
}

#[test]
fn a_terminal_is_no_disk() {
    let scratch = Scratch::new();
    assert_says(&Serve::new(&scratch).arg("/dev/zero").fails(), &["/dev/zero", "character device"]);
}

#[test]
fn permissions_are_named() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    fs::set_permissions(&image, fs::Permissions::from_mode(0o400)).unwrap();
    // Root is not asked for permission, unless it gives up the capabilities that say so.
    let without = [
        "setpriv",
        "--bounding-set",
        "-dac_override,-dac_read_search",
        "--inh-caps",
        "-dac_override,-dac_read_search",
    ];
    let root = nix::unistd::geteuid().is_root();
    let serve = || if root { Serve::new(&scratch).behind(without) } else { Serve::new(&scratch) };
    assert_says(&serve().arg(&image).fails(), &[text(&image), "ermission", "--read-only"]);
    serve().arg(&image).arg("--read-only").start().stop();
    fs::set_permissions(&image, fs::Permissions::from_mode(0o000)).unwrap();
    assert_says(&serve().arg(&image).arg("--read-only").fails(), &[text(&image), "ermission"]);
}

#[test]
fn a_port_in_use_is_named() {
    let scratch = Scratch::new();
    let theirs = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = theirs.local_addr().unwrap().to_string();
    let said = Serve::new(&scratch).where_said().args(["memory:1M", "--nbd", &address]).fails();
    assert_says(&said, &[&address, "the port is in use", "ss -ltnp"]);
}

#[test]
fn a_socket_in_use_is_left_alone_and_a_stale_one_replaced() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch).arg("memory:1M").start();
    let said = Serve::new(&scratch).arg("memory:2M").fails();
    assert_says(&said, &[text(weir.socket()), "in use"]);
    let size = |uri: &str| Client::new("nbdinfo").args(["--size", uri]).succeeds();
    assert_eq!(size(&weir.uri("memory")).trim(), MIB.to_string(), "the first still serves");
    let socket = weir.socket().to_owned();
    weir.crash();
    assert!(socket.exists(), "a killed daemon removes nothing");
    let weir = Serve::new(&scratch).arg("memory:2M").start();
    assert_eq!(size(&weir.uri("memory")).trim(), (2 * MIB).to_string());
    weir.stop();
    assert!(!socket.exists(), "the socket goes with the daemon");
}

#[test]
fn the_wrong_use_of_the_command_line_has_status_2() {
    let scratch = Scratch::new();
    for (arguments, parts) in [
        (&["memory:1M", "--frobnicate"][..], &["--frobnicate"][..]),
        (&["memory:1M", "--cache", "sometimes"], &["sometimes", "writethrough"]),
        (&["memory:1M", "--iops-total", "many"], &["--iops-total", "many"]),
        (
            &["memory:1M", "--iops-total", "1000", "--iops-total-max", "500"],
            &["iops-total-max", "500", "1000"],
        ),
        (&["memory:1M", "--iops-total", "10", "--iops-read", "10"], &["iops-", "total"]),
        (&["memory:1M", "memory:1M"], &["memory", "--name"]),
        (&[], &["IMAGE"]),
    ] {
        assert_says(&Serve::new(&scratch).args(arguments).rejects_usage(), parts);
    }
}

#[test]
fn a_config_error_names_file_line_key_value_and_rule() {
    let scratch = Scratch::new();
    let check = |config: &str, parts: &[&str]| {
        let path = scratch.file("weir.toml", config);
        let said = Serve::new(&scratch).where_said().arg("--config").arg(&path).fails();
        assert_says(&said, &["weir: ", text(&path)]);
        assert_says(&said, parts);
    };
    let disk = "[disk.vm1]\nimage = \"memory:1M\"\n";
    check(
        &format!("{disk}iops-total = 1000\niops-total-max = 500\n"),
        &[":4: disk.vm1.iops-total-max = 500", "a burst rate must be at least the rate"],
    );
    check(&format!("{disk}cahce = \"none\"\n"), &[":3: disk.vm1.cahce", "did you mean \"cache\"?"]);
    check(
        &format!("{disk}cache = \"sometimes\"\n"),
        &[":3: disk.vm1.cache = \"sometimes\"", "not a cache mode"],
    );
    check(
        &format!("{disk}group = \"gold\"\n"),
        &[":3: disk.vm1.group = \"gold\"", "is no group of this file", "[group.gold]"],
    );
    check(
        &format!("{disk}prefetch = \"maybe\"\n"),
        &[":3: disk.vm1.prefetch = \"maybe\"", "is none of on, off and auto"],
    );
    check("[disk.vm1]\nimage = \"memory:1M\n", &[":2", "not TOML"]);
    check("[disk.vm1]\n", &["disk.vm1", "no image"]);
}

#[test]
fn a_config_file_without_disks_is_refused() {
    let scratch = Scratch::new();
    let config = scratch.file("weir.toml", "[group.gold]\niops-total = 1000\n");
    let said = Serve::new(&scratch).where_said().arg("--config").arg(config).fails();
    assert_says(&said, &["there is nothing to serve", "[disk.NAME]"]);
}

#[test]
fn a_config_file_serves_disks_where_it_says() {
    let scratch = Scratch::new();
    scratch.filled("vm1.raw", 2 * MIB);
    let (one, two) = (scratch.socket("one"), scratch.socket("two"));
    let config = scratch.file(
        "weir.toml",
        format!(
            r#"
[daemon]
workers = 2
nbd = "unix:{two}"

[group.gold]
iops-total = 6000
iops-total-max = 12000
iops-total-max-length = 30

[disk.vm1]
image = "vm1.raw"       # beside this file
cache = "none"
group = "gold"
export = [{{ type = "nbd", listen = "unix:{one}" }}, {{ type = "nbd", listen = "unix:{two}", name = "first" }}]

[disk.vm2]
image = "memory:3M"
description = "scratch space"
"#,
            one = text(&one),
            two = text(&two),
        ),
    );
    let weir = Serve::new(&scratch).where_said().arg("--config").arg(config).start();
    let size = |socket: &std::path::Path, export: &str| {
        let uri = format!("nbd+unix:///{export}?socket={}", text(socket));
        Client::new("nbdinfo").args(["--size", &uri]).succeeds().trim().to_owned()
    };
    assert_eq!(size(&one, "vm1"), (2 * MIB).to_string());
    assert_eq!(size(&two, "first"), (2 * MIB).to_string());
    assert_eq!(size(&two, "vm2"), (3 * MIB).to_string());
    assert_says(weir.ready_line(), &["vm1", "first", "vm2", text(&one), text(&two)]);
    weir.stop();
    assert!(!one.exists() && !two.exists(), "the sockets go with the daemon");
}

#[test]
fn a_thousand_disks_start_and_answer() {
    let scratch = Scratch::new();
    let socket = scratch.socket("nbd");
    let mut config = format!("[daemon]\nnbd = \"unix:{}\"\n", text(&socket));
    for number in 0..1000 {
        config.push_str(&format!("[disk.vm{number}]\nimage = \"memory:{}M\"\n", number % 7 + 1));
    }
    let config = scratch.file("weir.toml", config);
    let weir = Serve::new(&scratch).where_said().arg("--config").arg(&config).start();
    let list = Client::new("nbdinfo")
        .args(["--list", "--json", &format!("nbd+unix:///?socket={}", text(&socket))])
        .succeeds();
    let list: serde_json::Value = serde_json::from_str(&list).expect("nbdinfo prints JSON");
    assert_eq!(list["exports"].as_array().map(Vec::len), Some(1000));
    for number in [0_u64, 1, 499, 999] {
        let uri = format!("nbd+unix:///vm{number}?socket={}", text(&socket));
        let size = Client::new("nbdinfo").args(["--size", &uri]).succeeds();
        assert_eq!(size.trim(), ((number % 7 + 1) * MIB).to_string());
    }
    weir.stop();
}

#[test]
fn the_ready_line_has_a_uri_to_paste() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch).on_tcp().args(["memory:1M", "--name", "disk"]).start();
    assert_says(weir.ready_line(), &[&weir.uri("disk")]);
    assert_eq!(Client::new("nbdinfo").args(["--size", &weir.uri("disk")]).succeeds().trim(), MIB.to_string());
}

#[test]
fn the_pid_file_is_there_while_the_daemon_is() {
    let scratch = Scratch::new();
    let file = scratch.path("pid");
    let weir = Serve::new(&scratch).arg("memory:1M").arg("--pid-file").arg(&file).start();
    assert_eq!(fs::read_to_string(&file).unwrap().trim(), weir.pid().to_string());
    weir.stop();
    assert!(!file.exists());
}
