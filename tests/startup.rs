//! Start of a daemon and its errors: the image, the address, the command line, the config file.
//!
//! Each message names the error, its reason, and a remedy.

use std::{
    fs,
    net::TcpListener,
    os::unix::{
        fs::PermissionsExt as _,
        net::{UnixDatagram, UnixListener, UnixStream},
    },
};

use nix::sys::signal::Signal;

use crate::{
    bench::bench_json,
    harness::{MIB, RawNbdClient, Scratch, Serve, TestClient, assert_contains, export_size, text, weir},
};

#[test]
fn invalid_images_are_named() {
    let scratch = Scratch::new();
    let missing = scratch.path("nothing.raw");
    let stderr = Serve::new(&scratch).arg(&missing).fails();
    assert_contains(&stderr, &[&format!("weir: {}: ", text(&missing)), "no such file"]);
    assert!(stderr.ends_with(')'), "the message must end with the remedy: {stderr}");
    let (directory, empty) = (scratch.path(""), scratch.sparse("empty.raw", 0));
    for (image, why) in [
        (text(&directory), "directory"),
        ("memory:0", "size zero"),
        (text(&empty), "size"),
        ("/dev/zero", "character device"),
    ] {
        assert_contains(&Serve::new(&scratch).arg(image).fails(), &[image, why]);
    }
}

#[test]
fn permissions_are_named() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    fs::set_permissions(&image, fs::Permissions::from_mode(0o400)).unwrap();
    // Root passes permission checks, unless it drops these capabilities.
    let dropped_capabilities = "-dac_override,-dac_read_search";
    let without = ["setpriv", "--bounding-set", dropped_capabilities, "--inh-caps", dropped_capabilities];
    let root = nix::unistd::geteuid().is_root();
    let serve = || if root { Serve::new(&scratch).wrapped_by(without) } else { Serve::new(&scratch) };
    assert_contains(&serve().arg(&image).fails(), &[text(&image), "ermission", "--read-only"]);
    serve().arg(&image).arg("--read-only").start().stop();
    fs::set_permissions(&image, fs::Permissions::from_mode(0o000)).unwrap();
    assert_contains(&serve().arg(&image).arg("--read-only").fails(), &[text(&image), "ermission"]);
}

#[test]
fn port_in_use_is_named() {
    let other_listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = other_listener.local_addr().unwrap().to_string();
    let stderr =
        Serve::with_own_scratch().at_given_addresses().args(["memory:1M", "--nbd", &address]).fails();
    assert_contains(&stderr, &[&address, "the port is in use", "ss -ltnp"]);
}

#[test]
fn socket_in_use_is_kept_and_a_stale_one_replaced() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch).arg("memory:1M").start();
    let stderr = Serve::new(&scratch).arg("memory:2M").fails();
    assert_contains(&stderr, &[text(weir.socket()), "in use"]);
    assert_eq!(export_size(&weir.uri("memory")), MIB, "the first daemon is still served");
    let socket = weir.socket().to_owned();
    weir.crash();
    assert!(socket.exists(), "a killed daemon removes nothing");
    let weir = Serve::new(&scratch).arg("memory:2M").start();
    assert_eq!(export_size(&weir.uri("memory")), 2 * MIB);
    weir.stop();
    assert!(!socket.exists(), "the daemon must remove its socket");
}

#[test]
fn usage_errors_have_status_2() {
    let scratch = Scratch::new();
    for (arguments, parts) in [
        (&["memory:1M", "--iops-totl", "5"][..], &["weir: unexpected argument '--iops-totl' found"][..]),
        (&["memory:1M", "--cache", "sometimes"], &["sometimes", "writethrough"]),
        (&["memory:1M", "--iops-total", "many"], &["--iops-total", "many"]),
        (
            &["memory:1M", "--iops-total", "1000", "--iops-total-max", "500"],
            &["iops-total-max", "500", "1000"],
        ),
        (
            &["memory:1M", "--iops-total-max", "5"],
            &["weir: --iops-total-max 5: is set without iops-total; set iops-total too"],
        ),
        (&["memory:1M", "--iops-total", "10", "--iops-read", "10"], &["iops-", "total"]),
        (&["memory:1M", "memory:1M"], &["memory", "--name"]),
        (&[], &["IMAGE"]),
    ] {
        assert_contains(&Serve::new(&scratch).args(arguments).rejects_usage(), parts);
    }
    let outcome = weir(&[]).run();
    assert_eq!(outcome.code(), 2);
    // The list of commands, without those that weir runs internally.
    assert_contains(&outcome.stderr(), &["Usage: weir <COMMAND>", "\n  serve ", "\n  status "]);
    assert!(!outcome.stderr().contains("attach-keeper"), "{}", outcome.stderr());
    let version = weir(&["--version"]).succeeds();
    assert_eq!(version, concat!("weir ", env!("CARGO_PKG_VERSION"), "\n"));
}

#[test]
fn config_error_names_file_line_key_value_and_rule() {
    let scratch = Scratch::new();
    let check = |config: &str, parts: &[&str]| {
        let path = scratch.file("weir.toml", config);
        let stderr = Serve::new(&scratch).at_given_addresses().arg("--config").arg(&path).fails();
        assert_contains(&stderr, &["weir: ", text(&path)]);
        assert_contains(&stderr, parts);
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
        &[":3: disk.vm1.group = \"gold\"", "is not a group of this file", "[group.gold]"],
    );
    check(
        &format!("{disk}prefetch = \"maybe\"\n"),
        &[":3: disk.vm1.prefetch = \"maybe\"", "is not one of on, off and auto"],
    );
    check("[disk.vm1]\nimage = \"memory:1M\n", &[":2", "not TOML"]);
    check("[disk.vm1]\n", &["disk.vm1", "no image"]);
}

#[test]
fn config_file_without_disks_is_rejected() {
    let scratch = Scratch::new();
    let config = scratch.file("weir.toml", "[group.gold]\niops-total = 1000\n");
    let stderr = Serve::new(&scratch).at_given_addresses().arg("--config").arg(config).fails();
    assert_contains(&stderr, &["there is nothing to serve", "[disk.NAME]"]);
}

#[test]
fn config_file_selects_addresses() {
    let scratch = Scratch::new();
    scratch.filled("vm1.raw", 2 * MIB);
    let (first, second) = (scratch.socket("one"), scratch.socket("two"));
    let config = scratch.file(
        "weir.toml",
        format!(
            r#"
[daemon]
workers = 2
nbd = "unix:{second}"

[group.gold]
iops-total = 6000
iops-total-max = 12000
iops-total-max-length = 30

[disk.vm1]
image = "vm1.raw"       # beside this file
cache = "none"
group = "gold"
export = [{{ type = "nbd", listen = "unix:{first}" }}, {{ type = "nbd", listen = "unix:{second}", name = "first" }}]

[disk.vm2]
image = "memory:3M"
description = "scratch space"
"#,
            first = text(&first),
            second = text(&second),
        ),
    );
    let weir = Serve::new(&scratch).at_given_addresses().arg("--config").arg(config).start();
    let size = |socket: &std::path::Path, export: &str| {
        export_size(&format!("nbd+unix:///{export}?socket={}", text(socket)))
    };
    assert_eq!(size(&first, "vm1"), 2 * MIB);
    assert_eq!(size(&second, "first"), 2 * MIB);
    assert_eq!(size(&second, "vm2"), 3 * MIB);
    assert_contains(weir.ready_line(), &["vm1", "first", "vm2", text(&first), text(&second)]);
    weir.stop();
    assert!(!first.exists() && !second.exists(), "the daemon must remove its sockets");
}

#[test]
fn paths_in_a_config_are_relative_to_it() {
    let scratch = Scratch::new();
    // The files are in the directory of the sockets, whose path is short.
    let [config, image] = ["weir.toml", "vm1.raw"].map(|name| scratch.socket(name));
    fs::write(image, [7; 4096]).unwrap();
    let two = "export = [{ type = \"nbd\", listen = \"unix:two\" }]";
    let disks = format!("[disk.vm1]\nimage = \"vm1.raw\"\n[disk.vm2]\nimage = \"null:1M\"\n{two}\n");
    fs::write(&config, format!("[daemon]\nnbd = \"unix:all\"\n{disks}")).unwrap();
    let weir = Serve::new(&scratch).at_given_addresses().arg("--config").arg(config).start();
    assert_eq!(RawNbdClient::negotiated(&scratch.socket("all"), "vm1").0.read(0, 4096), Ok(vec![7; 4096]));
    assert_eq!(RawNbdClient::negotiated(&scratch.socket("two"), "vm2").1, MIB);
    weir.stop();
}

#[test]
fn socket_activation_and_readiness() {
    let scratch = Scratch::new();
    let (path, notify) = (scratch.socket("their s"), scratch.socket("notify"));
    let control = format!("unix:{}", text(&scratch.socket("control")));
    let listener = UnixListener::bind(&path).unwrap();
    let manager = UnixDatagram::bind(&notify).unwrap();
    // The shell moves the socket to descriptor 3, as a service manager does.
    let script = "exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" \"$@\"";
    let weir = Serve::new(&scratch)
        .at_given_addresses()
        .wrapped_by(["sh", "-c", script])
        .reading(listener.try_clone().unwrap())
        .env("NOTIFY_SOCKET", &notify)
        .args(["null:1M", "--qmp", &control])
        .start();
    let uri = format!("nbd+unix:///null?socket={}", text(&path).replace(' ', "%20"));
    assert!(weir.ready_line().ends_with(&uri), "{}", weir.ready_line());
    let notification = || {
        let mut message = [0; 64];
        let length = manager.recv(&mut message).unwrap();
        String::from_utf8_lossy(&message[..length]).trim().to_owned()
    };
    assert_eq!(notification(), "READY=1");
    assert_eq!(RawNbdClient::negotiated(&path, "null").1, MIB);
    let at = format!("unix:{}", text(&path));
    let add = ["disk", "add", "another", "null:2M", "--nbd", &at, "--qmp", &control];
    crate::harness::weir(&add).succeeds();
    assert_eq!(RawNbdClient::negotiated(&path, "another").1, 2 * MIB);
    weir.signal(Signal::SIGTERM);
    assert_eq!(notification(), "STOPPING=1");
    assert!(weir.wait().0.success());
    assert!(path.exists(), "weir must not remove a socket that it did not create");
    drop(UnixStream::connect(&path).unwrap());
    listener.accept().expect("the passed socket still listens");
}

#[test]
fn vhost_user_socket_is_passed_by_name() {
    // As a service manager does; `$0` is the first socket, and so on.
    const MANAGER: &str = "
import fcntl, os, socket, sys
paths, program = sys.argv[1:3], sys.argv[3:]
made = []
for path in paths:
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(path)
    listening.listen()
    made.append(fcntl.fcntl(listening, fcntl.F_DUPFD, 10))
for number, descriptor in enumerate(made):
    os.dup2(descriptor, 3 + number)
os.environ.update(LISTEN_FDS='2', LISTEN_FDNAMES='clients:vm1', LISTEN_PID=str(os.getpid()))
os.execv(program[0], program)
";
    let scratch = Scratch::new();
    let [clients, vhost_socket] = ["clients", "machine"].map(|name| scratch.socket(name));
    let start = |name: &str| {
        for path in [&clients, &vhost_socket] {
            let _ = fs::remove_file(path);
        }
        let export = format!("export = [{{ type = \"vhost-user-blk\", listen = \"fd:{name}\" }}]");
        let disks = format!("[disk.a]\nimage = \"null:1M\"\n[disk.b]\nimage = \"null:2M\"\n{export}\n");
        let config = scratch.file("weir.toml", disks);
        let manager = ["python3", "-c", MANAGER, text(&clients), text(&vhost_socket)];
        Serve::new(&scratch).at_given_addresses().wrapped_by(manager).arg("--config").arg(config)
    };
    // The config names the socket by its name or its number; the remaining socket is used for NBD.
    for name in ["vm1", "4"] {
        let weir = start(name).start();
        bench_json("-c 1", format!("vhost-user:{}", text(&vhost_socket)));
        assert_eq!(RawNbdClient::negotiated(&clients, "a").1, MIB);
        weir.stop();
        assert!(vhost_socket.exists(), "weir must not remove a socket that it did not create");
    }
    // One disk uses both sockets by name, also after an upgrade.
    for path in [&clients, &vhost_socket] {
        fs::remove_file(path).unwrap();
    }
    let control = format!("unix:{}", text(&scratch.socket("control")));
    let both = ["null:1M", "--vhost-user-blk", "fd:vm1", "--nbd", "fd:clients,read-only", "--qmp", &control];
    let manager = ["python3", "-c", MANAGER, text(&clients), text(&vhost_socket)];
    let weir = Serve::new(&scratch).at_given_addresses().wrapped_by(manager).args(both).start();
    let (nbd, vhost) =
        (format!("null?socket={}", text(&clients)), format!("vhost-user:{}", text(&vhost_socket)));
    assert_contains(weir.ready_line(), &[&nbd, &vhost]);
    let next = Serve::new(&scratch).at_given_addresses().args(both).arg("--takeover").start();
    assert!(weir.wait().0.success());
    bench_json("-c 1", &vhost);
    assert_eq!(RawNbdClient::negotiated(&clients, "null").1, MIB);
    next.stop();
    assert!(vhost_socket.exists() && clients.exists(), "weir must not remove sockets that it did not create");
    let taken = ["null:1M", "--vhost-user-blk", "fd:vm1", "--nbd", "fd:vm1"];
    assert_contains(
        &Serve::new(&scratch).at_given_addresses().args(taken).rejects_usage(),
        &["fd:vm1", "another export has the same address"],
    );
    assert_contains(
        &start("vm2").fails(),
        &["fd:vm2: no such socket was passed, or it is in use (sockets left: 2; names: clients, vm1; "],
    );
}

#[test]
fn log_is_json_on_request() {
    let weir = Serve::with_own_scratch().args(["null:1M", "--log-format", "json"]).start();
    let ready: serde_json::Value = serde_json::from_str(weir.ready_line()).expect("it is JSON");
    assert_eq!(ready["message"], "ready", "{ready:#}");
}

#[test]
fn daemon_with_1000_disks_starts_and_replies() {
    let scratch = Scratch::new();
    let socket = scratch.socket("nbd");
    let mut config = format!("[daemon]\nnbd = \"unix:{}\"\n", text(&socket));
    for number in 0..1000 {
        config.push_str(&format!("[disk.vm{number}]\nimage = \"memory:{}M\"\n", number % 7 + 1));
    }
    let config = scratch.file("weir.toml", config);
    let weir = Serve::new(&scratch).at_given_addresses().arg("--config").arg(&config).start();
    let list = TestClient::new("nbdinfo")
        .args(["--list", "--json", &format!("nbd+unix:///?socket={}", text(&socket))])
        .json();
    assert_eq!(list["exports"].as_array().map(Vec::len), Some(1000));
    for number in [0_u64, 1, 499, 999] {
        let uri = format!("nbd+unix:///vm{number}?socket={}", text(&socket));
        assert_eq!(export_size(&uri), (number % 7 + 1) * MIB);
    }
    weir.stop();
}

#[test]
fn ready_line_contains_a_uri() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch).on_tcp().args(["memory:1M", "--name", "disk"]).start();
    assert_contains(weir.ready_line(), &[&weir.uri("disk")]);
    assert_eq!(export_size(&weir.uri("disk")), MIB);

    let weir = Serve::new(&scratch).args(["memory:2M", "--name", "vm 1"]).start();
    assert!(weir.ready_line().ends_with(&weir.uri("vm%201")), "{}", weir.ready_line());
    assert_eq!(export_size(&weir.uri("vm%201")), 2 * MIB);

    let weir = Serve::new(&scratch).at_given_addresses().args(["memory:3M", "--nbd", "localhost:0"]).start();
    let (_, uri) = weir.ready_line().rsplit_once("exports=").expect("it names them");
    assert!(uri.starts_with("nbd://localhost:"), "{uri}");
    assert_eq!(export_size(uri), 3 * MIB);
}

#[test]
fn pid_file_exists_while_the_daemon_runs() {
    let scratch = Scratch::new();
    let file = scratch.path("pid");
    let weir = Serve::new(&scratch).arg("memory:1M").arg("--pid-file").arg(&file).start();
    assert_eq!(fs::read_to_string(&file).unwrap().trim(), weir.pid().to_string());
    let socket = weir.socket().to_owned();
    weir.stop();
    assert!(!file.exists() && !socket.exists());
}

#[test]
fn pid_file_belongs_to_one_daemon() {
    let scratch = Scratch::new();
    let (file, other) = (scratch.path("pid"), format!("unix:{}", text(&scratch.socket("other"))));
    let second = || {
        Serve::new(&scratch)
            .at_given_addresses()
            .args(["memory:1M", "--nbd", &other, "--pid-file"])
            .arg(&file)
    };
    fs::write(&file, "4000000000\n").unwrap();
    let weir = Serve::new(&scratch).arg("memory:1M").arg("--pid-file").arg(&file).start();
    let number = weir.pid().to_string();
    assert_eq!(fs::read_to_string(&file).unwrap().trim(), number, "a stale file is replaced");
    assert_contains(&second().fails(), &[&format!("is locked by process {number} (stop it first")]);
    assert_eq!(fs::read_to_string(&file).unwrap().trim(), number);
    // A crash leaves the file behind.
    weir.crash();
    assert!(file.exists());
    second().start().stop();
    assert!(!file.exists());
    fs::write(&file, "hi\n").unwrap();
    assert_contains(&second().fails(), &["does not contain a process ID"]);
    assert_eq!(fs::read_to_string(&file).unwrap(), "hi\n");
}

#[test]
fn oversized_memory_disk_is_a_warning() {
    let log = Serve::with_own_scratch().args(["memory:1G", "--memory", "128M"]).start().stop();
    assert_contains(&log, &["WARN", "disks in memory have 1G together", "ENOSPC"]);
    let log = Serve::with_own_scratch().args(["memory:16M", "--memory", "128M"]).start().stop();
    assert!(!log.contains("WARN"), "{log}");
}

#[test]
fn reservation_above_its_limit_is_rejected() {
    let scratch = Scratch::new();
    let arguments = ["memory:1M", "--iops-reservation", "500", "--iops-total", "10"];
    for more in [&[][..], &["--group", "g"]] {
        let stderr = Serve::new(&scratch).args(arguments).args(more).rejects_usage();
        assert_contains(
            &stderr,
            &["--iops-reservation 500: 500 IOPS would be reserved, 490 more than the limit of 10"],
        );
        assert!(!stderr.contains("no effect"), "{stderr}");
    }
    let file = scratch
        .file("weir.toml", "[disk.a]\nimage = \"memory:1M\"\niops-total = 10\niops-reservation = 500\n");
    let stderr = Serve::new(&scratch).at_given_addresses().arg("--config").arg(&file).fails();
    assert_contains(&stderr, &[":4: disk.a.iops-reservation = 500: 500 IOPS would be reserved"]);
}

#[test]
fn errors_are_complete_and_without_errno() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    let (image, socket) = (text(&image), format!("unix:{}", text(&scratch.socket("other"))));
    let _holds = Serve::new(&scratch).arg(image).start();
    let lost = "/nonexistent/file";
    let below_a_file = format!("{image}/x");
    let serving = |more: &[&str]| -> Vec<String> {
        let line = ["serve", "memory:1M", "--nbd", &socket];
        line.iter().chain(more).map(|argument| (*argument).to_owned()).collect()
    };
    let line =
        |arguments: &[&str]| arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>();
    let mut lines = vec![
        serving(&["--image-root", lost]),
        serving(&["--pid-file", lost]),
        serving(&["--tls", "on", "--tls-psk", lost]),
        serving(&["--tls", "on", "--tls-certificates", lost]),
        line(&["serve", "--config", lost]),
        line(&["serve", "-f", "qcow2", "--secret-file", lost, "--nbd", &socket, lost]),
        line(&["serve", image, "--nbd", &socket]),
        line(&["serve", "memory:1M", "--nbd", "unix:/nonexistent/s"]),
        line(&["bench", "nbd+unix:///x?socket=/nonexistent/s"]),
        line(&["image", "convert", "-f", "raw", "-O", "qcow2", image, text(&scratch.path("o"))]),
        line(&["image", "compare", lost, image]),
        line(&["image", "create", "-f", "raw", lost, "1M"]),
        line(&["image", "create", "-f", "qcow2", &below_a_file, "1M"]),
        line(&["image", "bitmap", "--add", lost, "b"]),
        line(&["image", "snapshot", "-l", lost]),
        line(&["image", "resize", "-f", "raw", image, "2M"]),
        line(&["status", "--qmp", "unix:/nonexistent/s"]),
        line(&["cgroup", "show", lost]),
    ];
    for command in
        ["serve", "bench", "image info", "image check", "image map", "probe", "tune", "simulate", "report"]
    {
        for path in [lost, &below_a_file, "/proc/self/mem"] {
            let mut arguments: Vec<_> = command.split(' ').collect();
            arguments.push(path);
            lines.push(line(&arguments));
        }
    }
    for arguments in lines {
        let arguments: Vec<_> = arguments.iter().map(String::as_str).collect();
        let stderr = weir(&arguments).fails();
        let first = stderr.lines().next().unwrap_or_default();
        assert!(first.starts_with("weir: "), "{arguments:?}: {stderr}");
        assert!(!first.contains("os error"), "{arguments:?}: {stderr}");
        let mut parts: Vec<_> = first.split([':', '(', ')']).map(str::trim).collect();
        parts.retain(|part| !part.is_empty());
        parts.sort_unstable();
        assert!(parts.windows(2).all(|pair| pair[0] != pair[1]), "{arguments:?} repeats a text: {stderr}");
    }
}

/// The memory of bitmaps is counted in full, because a guest may mark every bit; the image is
/// refused and its bitmap is unchanged.
#[test]
fn bitmaps_that_do_not_fit_into_memory_are_refused() {
    let scratch = Scratch::new();
    let image = scratch.path("image");
    weir(&["image", "create", "-q", "-f", "qcow2", text(&image), "1T"]).succeeds();
    let serve = || Serve::new(&scratch).arg(&image).args(["--memory", "128M"]);
    for (granularity, name) in [("64K", "coarse"), ("512", "fine")] {
        weir(&["image", "bitmap", "--add", "-g", granularity, text(&image), name]).succeeds();
    }
    let stderr = serve().fails();
    assert_contains(
        &stderr,
        &["bitmaps that record writes: 256 MiB are required", "of the 128 MiB", "--memory"],
    );
    serve().arg("--read-only").start().stop();
    weir(&["image", "bitmap", "--remove", text(&image), "fine"]).succeeds();
    serve().start().stop();
}
