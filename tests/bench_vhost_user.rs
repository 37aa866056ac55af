//! `weir bench vhost-user:PATH`: the load of a virtual machine on a disk, and servers that fail.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::UnixListener,
    process::Command,
    thread,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::{Value, json};

use crate::{
    bench::{bench, bench_json, failed, interrupted, started},
    harness::{MIB, Qmp, Scratch, Serve, Weir, assert_contains, need, qemu_io, text},
};

struct ServedExport {
    weir: Weir,
    target: String,
}

fn served(scratch: &Scratch, exported: &str, arguments: &[&str]) -> ServedExport {
    let socket = scratch.socket("vm.sock");
    let weir = Serve::new(scratch)
        .args(arguments)
        .args(["--vhost-user-blk", &format!("unix:{}{exported}", text(&socket))])
        .start();
    ServedExport { weir, target: format!("vhost-user:{}", text(&socket)) }
}

#[test]
fn written_pattern_is_in_the_image() {
    let scratch = Scratch::new();
    let disk = scratch.filled("disk.raw", 4 * MIB);
    let ServedExport { weir, target } = served(&scratch, "", &[text(&disk)]);
    let printed = bench("-w --pattern 90 -c 64 -d 16 -s 64K --flush-interval 16", &target).succeeds();
    assert_contains(
        &printed,
        &["Sending 64 write requests, 65536 bytes each, 16 in parallel", "Run completed in "],
    );
    qemu_io(["-f", "raw"], ["read -P 90 0 4M"], weir.uri("disk"));
    // The bytes that a read returns must not be those that a later write sends.
    let report = bench_json("-w --pattern 165 --rwmixread 50 -c 1024 -d 200 -s 4K", &target);
    assert_eq!(report["weir"]["image"], target);
    let bytes = fs::read(&disk).unwrap();
    let blocks: Vec<&[u8]> = bytes.chunks(4096).collect();
    let filled_with = |fill: u8| blocks.iter().filter(|block| block.iter().all(|&byte| byte == fill)).count();
    assert_eq!(report["jobs"][0]["write"]["total_ios"], filled_with(165));
    assert_eq!(filled_with(165) + filled_with(90), 1024);
}

#[test]
fn blocks_may_be_larger_than_sectors() {
    let scratch = Scratch::new();
    let disk = scratch.filled("disk.raw", MIB);
    let ServedExport { weir, target } = served(&scratch, ",logical-block-size=4096", &[text(&disk)]);
    assert_contains(&bench("-s 512 -c 1", &target).fails(), &["supports only multiples of 4096 bytes"]);
    bench("-w --pattern 90 -c 256 -d 16 -s 4K", &target).succeeds();
    qemu_io(["-f", "raw"], ["read -P 90 0 1M"], weir.uri("disk"));
    bench("-c 256 -d 16 -s 4K", &target).succeeds();
}

#[test]
fn ready_line_contains_the_target() {
    let scratch = Scratch::new();
    let socket = scratch.socket("vm.sock");
    let address = format!("unix:{}", text(&socket));
    let weir =
        Serve::new(&scratch).at_given_addresses().args(["memory:1M", "--vhost-user-blk", &address]).start();
    let (_, target) = weir.ready_line().trim_end().rsplit_once("exports=").expect("it names them");
    assert_eq!(target, format!("vhost-user:{}", text(&socket)));
    bench("-c 10", target).succeeds();
}

#[test]
fn ready_line_contains_targets_of_qemu_options() {
    let scratch = Scratch::new();
    let (socket, nbd) = (scratch.socket("vm.sock"), scratch.socket("nbd.sock"));
    let export_option = format!("vhost-user-blk,id=v,node-name=d,addr.type=unix,addr.path={}", text(&socket));
    let server = format!("addr.type=unix,addr.path={}", text(&nbd));
    let weir = Serve::new(&scratch)
        .at_given_addresses()
        .args(["--blockdev", "null-co,node-name=d,size=1048576", "--nbd-server", &server])
        .args(["--export", &export_option, "--export", "nbd,id=n,node-name=d,name=disk"])
        .start();
    let (_, exports) = weir.ready_line().trim_end().rsplit_once("exports=").expect("it names them");
    for target in [format!("vhost-user:{}", text(&socket)), format!("nbd+unix:///disk?socket={}", text(&nbd))]
    {
        assert!(exports.contains(&target), "{exports}");
    }
}

/// Regression: the message advised to remove the socket of the existing export.
#[test]
fn error_names_the_export_that_uses_the_socket() {
    let scratch = Scratch::new();
    let (control, socket) = (scratch.socket("qmp"), scratch.socket("v.sock"));
    let address = format!("unix:{}", text(&control));
    let ServedExport { weir, target: _ } =
        served(&scratch, "", &["memory:1M", "--name", "d", "--qmp", &address]);
    let mut qmp = Qmp::negotiated(&control);
    let export_arguments = |id: &str| {
        let addr = json!({ "type": "unix", "path": text(&socket) });
        json!({ "type": "vhost-user-blk", "id": id, "node-name": "d", "allow-inactive": true, "addr": addr })
    };
    qmp.command("block-export-add", export_arguments("v"));
    let (_, why) = qmp.command_error("block-export-add", export_arguments("v2"));
    let rule = "the export v uses this path (give each export a path of its own)";
    assert_eq!(why, format!("unix:{}: {rule}", text(&socket)));
    bench("-c 10", format!("vhost-user:{}", text(&socket))).succeeds();
    // weir notices the disconnect with a short delay.
    let is_used = |export: &Value| export["id"] == "v" && export["connections"] != 0;
    while qmp.command("x-weir-query-status", json!({}))["exports"].as_array().unwrap().iter().any(is_used) {
        thread::yield_now();
    }
    qmp.command("block-export-del", json!({ "id": "v" }));
    let log = weir.stop();
    assert_contains(&log, &["an export was added export=v disk=d at=", "an export was removed export=v"]);
}

/// Also with more requests in flight than a ring has entries.
#[test]
fn every_request_of_every_queue_is_answered() {
    let scratch = Scratch::new();
    let ServedExport { weir: _weir, target } = served(&scratch, ",queues=2", &["memory:4M"]);
    for options in ["-d 1", "-d 1 --rate-iops 2000", "-d 32 --jobs 2", "-d 700", "-d 3 --readers 5 --jobs 2"]
    {
        let report = bench_json(&format!("-c 5000 {options}"), &target);
        assert_eq!(report["jobs"][0]["read"]["total_ios"], 5000, "{options}");
    }
}

#[test]
fn other_servers_are_measured() {
    let scratch = Scratch::new();
    let (socket, pid) = (scratch.socket("qemu.sock"), scratch.path("pid"));
    need("qemu-storage-daemon");
    let export = format!(
        "type=vhost-user-blk,id=e,node-name=d,addr.type=unix,addr.path={},writable=on,num-queues=2",
        text(&socket)
    );
    let status = Command::new("qemu-storage-daemon")
        .args(["--blockdev", "driver=null-co,node-name=d,size=4194304,read-zeroes=on", "--export", &export])
        .args(["--daemonize", "--pidfile", text(&pid)])
        .status();
    assert!(status.unwrap().success());
    let target = format!("vhost-user:{}", text(&socket));
    let read = bench("-c 5000 -d 64 --jobs 2 --stats", &target).run();
    let wrote = bench("-w -c 500 -d 8", &target).run();
    let refused = bench("-c 10 --jobs 3", &target).run();
    let pid = fs::read_to_string(pid).unwrap().trim().parse().unwrap();
    kill(Pid::from_raw(pid), Signal::SIGTERM).unwrap();
    assert_contains(&read.succeeded(), &["read: 5000 requests", "p99.99"]);
    wrote.succeeded();
    assert_contains(&refused.stderr(), &["has 2 queues, but each of the 3 jobs needs one"]);
}

#[test]
fn missing_server_feature_is_reported_before_any_request() {
    let scratch = Scratch::new();
    let disk = scratch.filled("disk.raw", MIB);
    let ServedExport { weir, target } =
        served(&scratch, ",queues=2,queue-size=128", &[text(&disk), "--read-only"]);
    assert_contains(&bench("-w -c 1", &target).fails(), &["is read-only (leave out -w"]);
    assert_contains(
        &bench("-c 3 --jobs 3", &target).fails(),
        &["has 2 queues, but each of the 3 jobs needs one", "smaller --jobs"],
    );
    assert_contains(&bench("-s 1000 -c 1", &target).fails(), &["supports only multiples of 512 bytes"]);
    assert_contains(
        &bench("-s 2M -d 1 -c 1", &target).fails(),
        &["has 1048576 bytes, fewer than one request of 2097152"],
    );
    assert_contains(&bench("-d 64 -c 1", &target).fails(), &["did not start its queues"]);
    assert_eq!(bench("-t none", &target).run().code(), 2);
    assert_eq!(bench("", "vhost-user:").run().code(), 2);
    bench("-d 32 -c 100", &target).succeeds();
    weir.stop();
    assert_contains(&bench("", target).fails(), &["cannot connect: No such file or directory"]);
}

#[test]
fn disconnect_ends_the_load() {
    let scratch = Scratch::new();
    let ServedExport { weir, target } = served(&scratch, "", &["memory:1M", "--delay", "read=10ms"]);
    let client = started(&["-d", "4", "--runtime", "60s", &target]);
    weir.crash();
    let [_, stderr] = failed(client);
    assert_contains(&stderr, &["a request failed: the server has disconnected: the connection was closed\n"]);
}

#[test]
fn failed_request_is_reported_with_its_offset() {
    let scratch = Scratch::new();
    let control = scratch.path("qmp");
    let address = format!("unix:{}", text(&control));
    let disk = scratch.filled("disk.raw", 2 * MIB);
    let ServedExport { weir: _weir, target } = served(&scratch, "", &[text(&disk), "--qmp", &address]);
    let mut qmp = Qmp::negotiated(&control);
    let client = started(&["-d", "4", "-o", "1M", "--runtime", "60s", &target]);
    qmp.command("block_resize", json!({"node-name": "disk", "size": MIB}));
    let [_, stderr] = failed(client);
    assert_contains(
        &stderr,
        &[
            ": a request failed: a read at ",
            ": the server answered: Input/output error (its log may say why)\n",
        ],
    );
}

#[test]
fn interrupt_does_not_wait_for_replies() {
    let scratch = Scratch::new();
    let (file, control) = (scratch.path("result.json"), scratch.path("qmp"));
    let control_address = format!("unix:{}", text(&control));
    let arguments = ["memory:1M", "--delay", "read=60s", "--qmp", &control_address];
    let ServedExport { weir, target } = served(&scratch, "", &arguments);
    let mut qmp = Qmp::negotiated(&control);
    let client = started(&["-d", "4", "--result", text(&file), &target]);
    let mut in_flight = || {
        let status = qmp.command("x-weir-query-status", json!({}));
        let exports = status["exports"].as_array().unwrap();
        exports.iter().find(|export| export["type"] == "vhost-user-blk").unwrap()["in-flight"].clone()
    };
    while in_flight() != 4 {}
    weir.signal(Signal::SIGSTOP);
    let [printed, stderr] = interrupted(client);
    weir.crash();
    assert_contains(&stderr, &[": interrupted after "]);
    assert_contains(&printed, &["Requests not completed when the run ended: 4"]);
    let result: Value = serde_json::from_str(&fs::read_to_string(&file).unwrap()).unwrap();
    assert_eq!(result["partial"], "interrupted");
}

#[test]
fn invalid_reply_ends_the_load() {
    let scratch = Scratch::new();
    let socket = scratch.socket("odd.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        stream.write_all(b"SSH-2.0-OpenSSH_9.2p1\r\n").unwrap();
        let _ = stream.read_to_end(&mut Vec::new());
    });
    let stderr = bench("", format!("vhost-user:{}", text(&socket))).fails();
    assert_contains(&stderr, &["violates the vhost-user protocol: "]);
    server.join().unwrap();
}

#[test]
fn busy_server_is_reported() {
    let scratch = Scratch::new();
    let ServedExport { weir: _weir, target } = served(&scratch, "", &["memory:1M"]);
    let mut first = started(&["-d", "1", "--runtime", "60s", &target]);
    let stderr = bench("", &target).fails();
    first.kill().unwrap();
    first.wait().unwrap();
    assert_contains(
        &stderr,
        &["has closed the connection (it serves one client at a time: is another connected?)\n"],
    );
}

/// The server reads all it was sent before it closes: an orderly end.
#[test]
fn disconnect_differs_from_an_invalid_reply() {
    let scratch = Scratch::new();
    let socket = scratch.socket("brief.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // SET_OWNER and GET_FEATURES, which consist of a header only.
        stream.read_exact(&mut [0; 24]).unwrap();
    });
    let stderr = bench("", format!("vhost-user:{}", text(&socket))).fails();
    assert_contains(&stderr, &["has closed the connection (it serves one client at a time"]);
    server.join().unwrap();
}
