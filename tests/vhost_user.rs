//! Exports to virtual machines as operators configure them: options, config, the control socket,
//! sockets and their files. `tests/guest/virtual-machines` tests them with guests.

use std::{
    cell::RefCell,
    fs::{self, File},
    io::{IoSlice, Read as _, Write as _},
    os::{
        fd::AsRawFd as _,
        unix::{
            fs::FileTypeExt as _,
            net::{UnixListener, UnixStream},
        },
    },
    path::Path,
};

use nix::sys::socket::{ControlMessage, MsgFlags, sendmsg};
use serde_json::{Value, json};

use crate::{
    bench::bench,
    harness::{
        DEADLINE, MIB, Qmp, Scratch, Serve, TestClient, Weir, assert_contains, poll_until, qemu_img, qemu_io,
        text, weir_image,
    },
};

/// Sends `VHOST_USER_GET_FEATURES`; returns the features.
pub(crate) fn features(front_end: &mut UnixStream) -> u64 {
    number(front_end, 1)
}

/// Sends a request without payload; returns the 64-bit payload of the reply.
fn number(front_end: &mut UnixStream, code: u32) -> u64 {
    front_end.write_all(&[code, 1, 0].map(u32::to_le_bytes).concat()).expect("the daemon reads");
    let mut reply = [0; 20];
    front_end.read_exact(&mut reply).expect("an answer in time");
    assert_eq!(reply[..12], [code, 5, 8].map(u32::to_le_bytes).concat());
    u64::from_le_bytes(reply[12..].try_into().expect("eight bytes"))
}

/// Sends a message with numbers as its payload, and a file descriptor.
pub(crate) fn send_with_descriptor(
    front_end: &UnixStream,
    code: u32,
    numbers: &[u64],
    file: &File,
) -> nix::Result<()> {
    let payload: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
    let message = [[code, 1, payload.len() as u32].map(u32::to_le_bytes).concat(), payload].concat();
    let descriptors = [file.as_raw_fd()];
    let control = [ControlMessage::ScmRights(&descriptors)];
    let bytes = [IoSlice::new(&message)];
    let sent = sendmsg::<()>(front_end.as_raw_fd(), &bytes, &control, MsgFlags::MSG_NOSIGNAL, None)?;
    assert_eq!(sent, message.len());
    Ok(())
}

pub(crate) fn front_end(path: &Path) -> UnixStream {
    let stream = UnixStream::connect(path).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    stream.set_read_timeout(Some(DEADLINE)).expect("a socket has a timeout");
    stream
}

/// True if the next front end receives a reply.
fn is_accepted(path: &Path) -> bool {
    let mut stream = front_end(path);
    // The connection may be closed already.
    let _ = stream.write_all(&[1_u32.to_le_bytes(), 1_u32.to_le_bytes(), [0; 4]].concat());
    matches!(stream.read(&mut [0]), Ok(1..))
}

/// True if the daemon has closed the connection.
fn is_rejected(mut front_end: UnixStream) -> bool {
    matches!(front_end.read(&mut [0]), Ok(0) | Err(_))
}

fn exports(qmp: &mut Qmp) -> Vec<Value> {
    let status = qmp.command("x-weir-query-status", json!({}));
    status["exports"].as_array().expect("a list").clone()
}

/// A daemon with a disk, and a client of its control socket.
fn start_with_control(scratch: &Scratch) -> (Weir, Qmp) {
    let control = scratch.path("qmp");
    let weir = Serve::new(scratch)
        .arg(scratch.sparse("disk.raw", MIB))
        .args(["--qmp", &format!("unix:{}", text(&control))])
        .start();
    let qmp = Qmp::negotiated(&control);
    (weir, qmp)
}

/// Bytes of the device's configuration space, starting at `offset`.
fn configuration(front_end: &mut UnixStream, offset: u32, count: u32) -> Vec<u8> {
    // VHOST_USER_SET_PROTOCOL_FEATURES, with CONFIG; then VHOST_USER_GET_CONFIG.
    let set_features = [16_u32.to_le_bytes(), 1_u32.to_le_bytes(), 8_u32.to_le_bytes()].concat();
    front_end
        .write_all(&[set_features, (1_u64 << 9).to_le_bytes().to_vec()].concat())
        .expect("the daemon reads");
    let get_config = [24, 1, 12 + count, offset, count, 0].map(u32::to_le_bytes).concat();
    front_end.write_all(&[get_config, vec![0; count as usize]].concat()).expect("the daemon reads");
    let mut reply = vec![0; 24 + count as usize];
    front_end.read_exact(&mut reply).expect("an answer in time");
    reply.split_off(24)
}

const READ_ONLY: u64 = 1 << 5;
const DISCARD: u64 = 1 << 13;
const WRITE_ZEROES: u64 = 1 << 14;

#[test]
fn export_options_over_qmp_reach_the_front_end() {
    let scratch = Scratch::new();
    let socket = scratch.path("vm");
    let (weir, mut qmp) = start_with_control(&scratch);
    let add = |more: Value| {
        let mut add = json!({"type": "vhost-user-blk", "id": "e", "node-name": "disk", "writable": true,
            "addr": {"type": "unix", "path": text(&socket)}});
        add.as_object_mut()
            .expect("it is an object")
            .extend(more.as_object().expect("it is an object").clone());
        add
    };
    let (segments, block, cache) = ((12, 4), (20, 4), (32, 1));
    let less = json!({"discard": false, "write-zeroes": false, "queue-size": 64, "writethrough": true,
        "logical-block-size": 4096});
    for (more, offered, most_segments, block_bytes, write_cache) in
        [(json!({}), DISCARD | WRITE_ZEROES, 126_u32, 512_u32, 1), (less, 0, 62, 4096, 0)]
    {
        qmp.command("block-export-add", add(more));
        let mut stream = front_end(&socket);
        assert_eq!(features(&mut stream) & (DISCARD | WRITE_ZEROES), offered);
        assert_eq!(configuration(&mut stream, segments.0, segments.1), most_segments.to_le_bytes());
        assert_eq!(configuration(&mut stream, block.0, block.1), block_bytes.to_le_bytes());
        assert_eq!(configuration(&mut stream, cache.0, cache.1), [write_cache]);
        qmp.command("block-export-del", json!({"id": "e", "mode": "hard"}));
        qmp.event("BLOCK_EXPORT_DELETED");
    }
    let nbd = json!({"type": "nbd", "id": "n", "node-name": "disk", "name": "n", "writethrough": true});
    let (_, message) = qmp.command_error("block-export-add", nbd);
    assert_contains(&message, &["writethrough", "cache = \"writethrough\""]);
    let (_, message) = qmp.command_error("block-export-add", add(json!({"logical-block-size": 8192})));
    assert_contains(&message, &["logical-block-size", "512, 1024, 2048 or 4096"]);
    let (_, message) = qmp.command_error("block-export-add", add(json!({"iothread": "io0"})));
    assert_contains(&message, &["iothread \"io0\" not found", "--workers"]);
    // `client` makes weir connect to the front end, which this sandbox does not permit.
    let (_, message) = qmp.command_error("block-export-add", add(json!({"client": true})));
    assert_contains(&message, &["does not allow this daemon to connect to a front end"]);
    weir.stop();
}

#[test]
fn front_end_is_served_in_addition_to_nbd_clients() {
    let scratch = Scratch::new();
    let (control, socket) = (scratch.path("qmp"), scratch.path("vm"));
    // A stale socket of a killed daemon.
    drop(UnixListener::bind(&socket).expect("the socket can be bound"));
    let listen_option = format!("unix:{},queues=2,discard=off,serial=one", text(&socket));
    let weir = Serve::new(&scratch)
        .arg(scratch.sparse("disk.raw", MIB))
        .args(["--vhost-user-blk", &listen_option, "--qmp", &format!("unix:{}", text(&control))])
        .start();
    let mut qmp = Qmp::negotiated(&control);
    let kinds: Vec<_> = exports(&mut qmp).iter().map(|export| export["type"].clone()).collect();
    assert_eq!(kinds, ["nbd", "vhost-user-blk"]);

    let mut first = front_end(&socket);
    let offered = features(&mut first);
    assert_eq!(offered & (READ_ONLY | DISCARD), 0, "{offered:#x}");
    assert!(is_rejected(front_end(&socket)), "a second front end is accepted");
    assert_contains(&weir.wait_for_log("was rejected at disk disk"), &["client_rejected", "is connected"]);
    let export = exports(&mut qmp).pop().expect("there are exports");
    assert_eq!(
        (&export["connections"], &export["queues"], &export["disk"]),
        (&json!(1), &json!(0), &json!("disk"))
    );
    let process = format!("process={}", std::process::id());
    assert_contains(&weir.wait_for_log("a front end has connected"), &["export=disk@unix:", &process]);
    drop(first);
    assert_contains(&weir.wait_for_log("the front end has disconnected"), &["export=disk@unix:", &process]);
    // Until the daemon has noticed the disconnect, new front ends may be rejected.
    while !is_accepted(&socket) {}
    weir.stop();
    assert!(!socket.exists(), "the daemon must remove its socket");
}

#[test]
fn too_many_queues_are_reported() {
    /// `VHOST_USER_GET_QUEUE_NUM`.
    const QUEUES: u32 = 17;
    let scratch = Scratch::new();
    let socket = scratch.path("vm");
    let listen_option = format!("unix:{},queues=2", text(&socket));
    let weir = Serve::new(&scratch)
        .arg(scratch.sparse("disk.raw", MIB))
        .args(["--vhost-user-blk", &listen_option])
        .start();
    let mut more = front_end(&socket);
    assert_eq!(number(&mut more, QUEUES), 2);
    drop(more);
    let line = weir.wait_for_log("querying the number of queues");
    assert_contains(&line, &["WARN", "queues=2", "probably has more", "(give this export as many"]);
    let log = weir.stop();
    assert_eq!(log.matches("the number of queues").count(), 1, "{log}");
}

#[test]
fn exported_disk_is_resized_in_whole_blocks() {
    let scratch = Scratch::new();
    let (control, socket) = (scratch.path("qmp"), scratch.path("vm"));
    let disk = scratch.sparse("disk.raw", MIB);
    let serve = || {
        let listen_option = format!("unix:{},logical-block-size=4096", text(&socket));
        let serve =
            Serve::new(&scratch).arg(&disk).args(["--format", "raw", "--vhost-user-blk", &listen_option]);
        serve.args(["--qmp", &format!("unix:{}", text(&control))])
    };
    let weir = serve().start();
    let mut qmp = Qmp::negotiated(&control);
    let resize = |size: u64| json!({"node-name": "disk", "size": size});
    let (_, message) = qmp.command_error("block_resize", resize(MIB + 512));
    let sizes = "has blocks of 4096 bytes (make it 1048576 or 1052672)";
    assert_contains(&message, &["is not possible: export disk@unix:", sizes]);
    for (size, why) in [
        ("1049088", ["disk.raw: 1049088 bytes is not possible: export disk@unix:", sizes]),
        ("+1", ["disk.raw: the size 1048577 is not a multiple of 512", "1048576 or 1049088"]),
    ] {
        let resize = weir_image(&["resize", "-f", "raw", text(&disk), size]);
        let stderr = resize.env("WEIR_QMP", format!("unix:{}", text(&control))).fails();
        assert_contains(&stderr, &why);
    }
    assert_eq!(fs::metadata(&disk).expect("the file exists").len(), MIB);
    qmp.command("block_resize", resize(MIB + 4096));
    drop(qmp);
    weir.stop();
    serve().start().stop();
}

#[test]
fn exports_are_added_and_removed_over_qmp() {
    let scratch = Scratch::new();
    let socket = scratch.path("vm");
    let (weir, mut qmp) = start_with_control(&scratch);
    let address = json!({"type": "unix", "path": text(&socket)});
    let add =
        json!({"type": "vhost-user-blk", "id": "e", "node-name": "disk", "addr": address, "num-queues": 4});
    qmp.command("block-export-add", add.clone());
    let (_, message) = qmp.command_error("block-export-add", add);
    assert_eq!(message, "Block export id 'e' is already in use");
    let listed = qmp.command("query-block-exports", json!({}));
    let listed = listed.as_array().expect("a list").iter().find(|export| export["id"] == "e");
    assert_eq!(listed.expect("it is there")["type"], "vhost-user-blk");
    let mut stream = front_end(&socket);
    assert_ne!(features(&mut stream) & READ_ONLY, 0, "an export is read-only by default");
    let (_, message) = qmp.command_error("block-export-del", json!({"id": "e"}));
    assert_contains(&message, &["still in use: ", &format!("({})", std::process::id())]);
    qmp.command("block-export-del", json!({"id": "e", "mode": "hard"}));
    assert_eq!(qmp.event("BLOCK_EXPORT_DELETED"), json!({"id": "e"}));
    assert!(is_rejected(stream));
    assert!(!socket.exists());

    for (wrong, expect) in [
        (json!({"type": "fd", "str": "3"}), "no such socket was passed"),
        (json!({"type": "unix"}), "addr.path"),
        (json!({"type": "unix", "path": ""}), "write the socket's path"),
        (json!({"type": "unix", "path": scratch.path("no/where")}), "the directory"),
    ] {
        let add = json!({"type": "vhost-user-blk", "id": "f", "node-name": "disk", "addr": wrong});
        let (_, message) = qmp.command_error("block-export-add", add);
        assert_contains(&message, &[expect]);
    }
    weir.stop();
}

#[test]
fn front_end_connections_are_events_with_processes() {
    let scratch = Scratch::new();
    let socket = scratch.path("vm");
    let (weir, mut qmp) = start_with_control(&scratch);
    let add = json!({"type": "vhost-user-blk", "id": "e", "node-name": "disk", "writable": true,
        "addr": {"type": "unix", "path": text(&socket)}});
    qmp.command("block-export-add", add);
    let qmp = RefCell::new(qmp);
    let vhost_events = || {
        let all = qmp.borrow_mut().command("x-weir-query-events", json!({}));
        let is_of_one = |event: &&Value| event["data"]["type"] == "vhost-user-blk";
        all.as_array().expect("a list").iter().filter(is_of_one).cloned().collect::<Vec<_>>()
    };
    let kinds = |events: &[Value]| events.iter().map(|event| event["kind"].clone()).collect::<Vec<_>>();

    // Connections are reported however short they are.
    for _ in 0..2 {
        bench("-c 10 -s 4K", format!("vhost-user:{}", text(&socket))).succeeds();
    }
    let events = poll_until(|| Some(vhost_events()).filter(|events| events.len() == 4));
    assert_eq!(kinds(&events), ["session_started", "session_ended", "session_started", "session_ended"]);
    for pair in events.chunks(2) {
        let [started, ended] = [&pair[0], &pair[1]].map(|event| &event["data"]);
        assert_eq!((&started["export"], &pair[0]["disk"]), (&json!("e"), &json!("disk")));
        assert_eq!((&started["front-end"]["name"], &started["seconds"]), (&json!("weir"), &Value::Null));
        assert!(ended["front-end"] == started["front-end"] && ended["seconds"].is_u64(), "{pair:?}");
    }
    assert_ne!(events[0]["data"]["front-end"]["pid"], events[2]["data"]["front-end"]["pid"]);

    // A front end without a running ring does not count as a user of the disk.
    let mut first = front_end(&socket);
    features(&mut first);
    assert!(is_rejected(front_end(&socket)));
    first.write_all(&[0xff; 12]).expect("the daemon reads");
    assert!(is_rejected(first));
    let events = poll_until(|| Some(vhost_events().split_off(4)).filter(|events| events.len() >= 2));
    assert_eq!(kinds(&events), ["client_rejected", "client_disconnected"]);
    let own_pid = json!(std::process::id());
    let [rejected, fault] = [&events[0]["data"], &events[1]["data"]];
    assert_eq!(
        [&rejected["front-end"]["pid"], &rejected["connected"]["pid"], &fault["front-end"]["pid"]],
        [&own_pid; 3]
    );
    assert_contains(fault["reason"].as_str().expect("the event has a reason"), &["not a message"]);
    let log = weir.stop();
    for expect in ["was rejected at disk disk", "was disconnected from disk disk"] {
        assert_eq!(log.matches(expect).count(), 1, "one line is expected for each rejected client: {log}");
    }
}

#[test]
fn invalid_vhost_user_exports_fail_the_start() {
    let scratch = Scratch::new();
    let [first, second] = ["one.raw", "two.raw"].map(|name| scratch.sparse(name, MIB));
    let serve = || Serve::new(&scratch).at_given_addresses().arg(&first);
    let socket = format!("unix:{}", text(&scratch.path("vm")));
    let stderr = serve().arg(&second).args(["--vhost-user-blk", &socket]).rejects_usage();
    assert_contains(&stderr, &["--vhost-user-blk: times given: 1, images: 2"]);
    let both = ["--vhost-user-blk", &socket, "--vhost-user-blk", &socket];
    let stderr = serve().arg(&second).args(both).rejects_usage();
    assert_contains(&stderr, &["another export has the same address"]);
    let stderr = serve().args(["--vhost-user-blk", &socket, "--nbd", &socket]).rejects_usage();
    assert_contains(&stderr, &["another export has the same address"]);
    let stderr = serve().args(["--vhost-user-blk", &socket, "--qmp", &socket]).rejects_usage();
    assert_contains(&stderr, &["disks are exported at this socket"]);
    let stderr = serve().args(["--vhost-user-blk", "localhost:1"]).rejects_usage();
    assert_contains(&stderr, &["is not a Unix socket"]);
    let file = scratch.file("file", "precious");
    let stderr = serve().args(["--vhost-user-blk", &format!("unix:{}", text(&file))]).fails();
    assert_contains(&stderr, &["a file that is not a socket exists there"]);
    assert_eq!(fs::read_to_string(&file).expect("the file exists"), "precious");

    let odd = scratch.sparse("odd.raw", MIB + 1012);
    for check in [&[][..], &["--check"]] {
        let serve = Serve::new(&scratch).at_given_addresses().arg(&odd).args(["--vhost-user-blk", &socket]);
        let stderr = serve.args(check).fails();
        assert_contains(
            &stderr,
            &["disk odd: has 1049588 bytes", "the last 500", "weir image resize", "1049600"],
        );
    }
    assert!(!scratch.path("vm").exists());

    let odd = scratch.sparse("odd.raw", MIB + 512);
    let large = format!("{socket},logical-block-size=4096");
    let stderr =
        Serve::new(&scratch).at_given_addresses().arg(&odd).args(["--vhost-user-blk", &large]).fails();
    assert_contains(&stderr, &["not a multiple of 4096", "the last 512", "weir image resize", "1052672"]);

    let config = |export: &str| {
        let text = format!("[disk.one]\nimage = \"one.raw\"\nformat = \"raw\"\nexport = {{ {export} }}\n");
        Serve::new(&scratch).at_given_addresses().arg("--config").arg(scratch.file("weir.toml", text))
    };
    let stderr = config("type = \"vhost-user-blk\"").fails();
    assert_contains(&stderr, &["weir.toml:4", "no socket"]);
    let stderr = config("type = \"vhost-user-blk\", listen = \"unix:vm\", queues = 0").fails();
    assert_contains(&stderr, &["is not a number of queues"]);
    let stderr = config("type = \"vhost-user-blk\", listen = \"unix:vm,queues=4\"").fails();
    assert_contains(&stderr, &["weir.toml:4", "has a comma", "are keys here"]);
    let stderr = config("type = \"vhost-user-blk\", listen = \"unix:vm\", name = \"x\"").fails();
    assert_contains(&stderr, &["name"]);
    let keys = "queues = 4, logical-block-size = 2048, read-only = true";
    let weir = config(&format!("type = \"vhost-user-blk\", listen = \"unix:vm\", {keys}")).start();
    let path = scratch.path("vm");
    assert!(fs::metadata(&path).expect("the file exists").file_type().is_socket());
    let mut stream = front_end(&path);
    assert_ne!(features(&mut stream) & READ_ONLY, 0);
    assert_eq!(configuration(&mut stream, 20, 4), 2048_u32.to_le_bytes());
    weir.stop();
}

#[test]
fn backup_over_nbd_shares_the_disks_limits() {
    let scratch = Scratch::new();
    let (control, socket) = (scratch.path("qmp"), scratch.path("vm"));
    let weir = Serve::new(&scratch)
        .arg(scratch.sparse("disk.raw", MIB))
        .args(["--vhost-user-blk", &format!("unix:{}", text(&socket))])
        .args(["--qmp", &format!("unix:{}", text(&control))])
        .start();
    let mut stream = front_end(&socket);
    features(&mut stream);
    let mut qmp = Qmp::negotiated(&control);
    let add = json!({"type": "nbd", "id": "backup", "node-name": "disk", "name": "backup"});
    qmp.command("block-export-add", add);
    let uri = weir.uri("backup");
    qemu_img(["compare", "-f", "raw", "-F", "raw", &uri, text(&scratch.sparse("zeroes.raw", MIB))])
        .succeeds();
    TestClient::new("qemu-io").args(["-r", "-f", "raw", "-c", "read 0 1M", &uri]).succeeds();
    TestClient::new("qemu-io").args(["-f", "raw", "-c", "write 0 512", &uri]).fails();
    let disk = &qmp.command("x-weir-query-status", json!({}))["disks"][0];
    assert!(
        disk["reads"]["bytes"].as_u64() >= Some(MIB),
        "the reads over vhost-user are not counted: {disk}"
    );
    let vhost_export =
        |qmp: &mut Qmp| exports(qmp).into_iter().find(|export| export["type"] == "vhost-user-blk");
    let seen = vhost_export(&mut qmp).expect("it is there");
    assert_eq!(seen["front-end"]["pid"], json!(std::process::id()));
    features(&mut stream);
    weir.stop();
}

#[test]
fn handover_image_is_unlocked_without_a_front_end() {
    let scratches = [Scratch::new(), Scratch::new()];
    let image = scratches[0].sparse("disk.raw", MIB);
    let serve = |scratch: &Scratch, image: &Path, more: &[&str]| {
        let socket = format!("unix:{}", text(&scratch.path("vm")));
        let control = format!("unix:{}", text(&scratch.path("qmp")));
        let serve = Serve::new(scratch).arg(image).args(["--handover", "--vhost-user-blk", &socket]);
        serve.args(["--qmp", &control]).args(more)
    };
    let weirs = scratches.each_ref().map(|scratch| serve(scratch, &image, &["--format", "raw"]).start());
    qemu_io(["-f", "raw"], ["write -P 7 0 4k"], &image);
    for (weir, scratch) in weirs.iter().zip(&scratches) {
        assert!(is_accepted(&scratch.path("vm")));
        TestClient::new("qemu-io").args(["-f", "raw", "-c", "read 0 512", &weir.uri("disk")]).fails();
    }
    let mut qmp = Qmp::negotiated(&scratches[0].path("qmp"));
    let (_, message) = qmp.command_error("block_resize", json!({"node-name": "disk", "size": 2 * MIB}));
    assert_contains(&message, &["only while a virtual machine runs on it (start the virtual machine first"]);
    drop(qmp);
    weirs.into_iter().for_each(|weir| _ = weir.stop());

    let [scratch, _] = scratches;
    let stderr = serve(&scratch, &image, &["--read-only"]).rejects_usage();
    assert_contains(&stderr, &["--handover: is for writable disks only"]);
    let stderr = serve(&scratch, Path::new("memory:1M"), &[]).rejects_usage();
    assert_contains(&stderr, &["--handover: is for images in files"]);
}

#[test]
fn weir_connects_to_a_listening_front_end() {
    let scratch = Scratch::new();
    let socket = scratch.path("vm");
    let listen_option = format!("unix:{},client", text(&socket));
    let weir = Serve::new(&scratch)
        .at_given_addresses()
        .arg(scratch.sparse("disk.raw", MIB))
        .args(["--vhost-user-blk", &listen_option])
        .start();
    assert_contains(weir.ready_line(), &[",client"]);
    let line = weir.wait_for_log("cannot connect to a front end");
    assert_contains(&line, &["export=disk", text(&socket), "No such file or directory"]);
    // A different error is logged, once.
    drop(UnixListener::bind(&socket).expect("the socket can be bound"));
    assert_contains(&weir.wait_for_log("Connection refused"), &["export=disk"]);
    // The front end's socket appears later, and again after it was removed.
    for _ in 0..2 {
        let _ = fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).expect("the socket can be bound");
        let (mut stream, _) = listener.accept().expect("weir connects");
        stream.set_read_timeout(Some(DEADLINE)).expect("a socket has a timeout");
        features(&mut stream);
    }
    weir.stop();
    assert!(socket.exists(), "weir must not remove the socket of the front end");
}

#[test]
fn too_low_memory_limit_is_reported_with_a_sufficient_one() {
    let scratch = Scratch::new();
    let serve = |limit: &str| {
        let limit = format!("--nofile={limit}:{limit}");
        let listen_option = format!("unix:{},queues=200", text(&scratch.socket("machine")));
        let serve = Serve::new(&scratch).wrapped_by(["prlimit", &limit]).arg("memory:1M");
        serve.args(["--vhost-user-blk", &listen_option])
    };
    let stderr = serve("200").fails();
    assert_contains(
        &stderr,
        &[
            "descriptors: 217 are reserved for virtual machines with 200 queues, which leaves ",
            " of the limit of 200",
            "LimitNOFILE= of its service, or `ulimit -Hn`",
            "fewer queues",
        ],
    );
    let checked = serve("200").at_given_addresses().arg("--check").fails();
    assert_contains(&checked, &["descriptors: 217 are reserved for virtual machines with 200 queues"]);
    let enough = stderr.split_once("it needs ").and_then(|(_, rest)| rest.split(' ').next());
    serve(enough.expect("a number")).start().stop();
    let stderr = serve("9").fails();
    assert_contains(&stderr, &["a worker cannot be started: Too many open files", "LimitNOFILE="]);
}

#[test]
fn nbd_and_vhost_user_confusion_is_reported() {
    let scratch = Scratch::new();
    let (vhost_socket, nbd) = (scratch.socket("machine"), scratch.socket("nbd"));
    let at = |path: &Path| format!("unix:{}", text(path));
    let weir = Serve::new(&scratch)
        .at_given_addresses()
        .args(["memory:1M", "--vhost-user-blk", &at(&vhost_socket), "--nbd", &at(&nbd)])
        .start();
    // A client of NBD waits for the server's greeting.
    let client = UnixStream::connect(&vhost_socket).expect("the daemon listens");
    let line = weir.wait_for_log("has sent nothing for 10 s");
    let process = format!("process={}", std::process::id());
    assert_contains(&line, &["is it an NBD client? (this socket is for vhost-user-blk", &process]);
    drop(client);
    let mut front_end = front_end(&nbd);
    front_end.write_all(&[1, 1, 0].map(u32::to_le_bytes).concat()).expect("the daemon reads");
    assert_contains(&weir.wait_for_log("speaks vhost-user"), &["this socket is for NBD", "--vhost-user-blk"]);
    weir.stop();
}

#[test]
fn front_end_cannot_use_all_descriptors() {
    let scratch = Scratch::new();
    let socket = scratch.socket("machine");
    // 640 exceeds the maximum of one front end, but the reserve for other clients lowers its share.
    let weir = Serve::new(&scratch)
        .wrapped_by(["prlimit", "--nofile=640"])
        .arg(scratch.sparse("disk.raw", MIB))
        .args(["--vhost-user-blk", &format!("unix:{}", text(&socket))])
        .start();
    let memory = tempfile::tempfile_in("/dev/shm").expect("a file in memory");
    memory.set_len(509 * 4096).expect("the memory file can be resized");
    let greedy = front_end(&socket);
    // VHOST_USER_ADD_MEM_REG; the connection may be closed before the last message.
    for at in (0..509).map(|number| number * 4096) {
        if send_with_descriptor(&greedy, 37, &[0, at, 4096, (1 << 32) + at, at], &memory).is_err() {
            break;
        }
    }
    assert!(is_rejected(greedy));
    weir.wait_for_log("too few left in this process");
    assert!(is_accepted(&socket));
}
