//! Descriptors passed over the control socket, as management software does: images that the daemon
//! may not open itself, and sockets that another process has bound.

use std::{
    fs::{self, File, OpenOptions},
    net::TcpListener,
    os::unix::{
        fs::PermissionsExt as _,
        net::{UnixListener, UnixStream},
    },
    path::Path,
};

use serde_json::{Value, json};

use crate::{
    harness::{
        MIB, Qmp, RawNbdClient, Scratch, Serve, TestClient, Weir, assert_contains, need_root, operator,
        pattern, text,
    },
    vhost_user::{features, front_end},
};

/// A daemon without disks, run as a user without access to root's files, and a client of its
/// socket.
fn unprivileged_daemon(scratch: &Scratch) -> (Weir, Qmp) {
    need_root("daemons of another user");
    let sockets = scratch.socket("qmp");
    for directory in [scratch.path(""), sockets.parent().expect("it is in one").to_owned()] {
        fs::set_permissions(directory, fs::Permissions::from_mode(0o777)).expect("the mode can be set");
    }
    let weir = Serve::new(scratch)
        .at_given_addresses()
        .wrapped_by(["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"])
        .args(["--object", "throttle-group,id=g", "--qmp", &operator::socket(scratch)])
        .start();
    let qmp = Qmp::negotiated(&scratch.socket("qmp"));
    (weir, qmp)
}

#[test]
fn inherited_socket_is_used_by_its_number() {
    // As programs that start QEMU do: no environment variable lists the passed descriptors.
    const STARTER: &str = "
import os, socket, sys
bound = socket.socket(socket.AF_UNIX)
bound.bind(sys.argv[1])
os.dup2(bound.fileno(), 9)
os.dup2(os.open('/dev/null', os.O_RDONLY), 10)
os.execv(sys.argv[2], sys.argv[2:])
";
    let scratch = Scratch::new();
    let socket = scratch.socket("bound");
    let serve = |arguments: &[&str]| {
        let _ = fs::remove_file(&socket);
        let starter = ["python3", "-c", STARTER, text(&socket)];
        Serve::new(&scratch).at_given_addresses().wrapped_by(starter).args(arguments)
    };
    let node = ["--blockdev", "null-co,node-name=a,size=1048576"];
    let server = |number: &str| format!("addr.type=fd,addr.str={number}");
    let export = ["--export", "nbd,id=e,node-name=a,name=a"];
    let weir = serve(&[&node[..], &["--nbd-server", &server("9")], &export].concat()).start();
    assert_eq!(RawNbdClient::negotiated(&socket, "a").1, MIB);
    weir.stop();
    assert!(socket.exists(), "weir must not remove a socket that it did not create");
    let export_option = "vhost-user-blk,id=v,node-name=a,addr.type=fd,addr.str=9";
    let weir = serve(&[&node[..], &["--export", export_option]].concat()).start();
    features(&mut front_end(&socket));
    weir.stop();
    let weir = serve(&["null:1M", "--name", "a", "--nbd", "fd:9"]).start();
    assert_eq!(RawNbdClient::negotiated(&socket, "a").1, MIB);
    weir.stop();
    for (number, why) in [("10", "fd:10: is no socket"), ("11", "fd:11: no such socket was passed")] {
        let stderr = serve(&[&node[..], &["--nbd-server", &server(number)]].concat()).fails();
        assert_contains(&stderr, &["--nbd-server addr.type=fd", why]);
    }
}

fn open(path: &Path, write: bool) -> File {
    OpenOptions::new().read(true).write(write).open(path).expect("root has the permission")
}

fn node(name: &str, set: &Value, more: &Value) -> Value {
    let filename = format!("/dev/fdset/{set}");
    let mut node =
        json!({ "driver": "raw", "node-name": name, "file": { "driver": "file", "filename": filename } });
    node.as_object_mut().expect("an object").extend(more.as_object().expect("an object").clone());
    node
}

#[test]
fn passed_image_is_served_without_access_to_its_path() {
    let scratch = Scratch::new();
    let image = scratch.filled("disk.raw", MIB);
    fs::set_permissions(&image, fs::Permissions::from_mode(0o600)).expect("the mode can be set");
    let (weir, mut qmp) = unprivileged_daemon(&scratch);
    let by_name =
        json!({ "driver": "raw", "node-name": "d", "file": { "driver": "file", "filename": text(&image) } });
    let refused = qmp.command_error("blockdev-add", by_name).1;
    // Rejected by the sandbox, or, on a kernel without Landlock, by the mode of the file.
    let is_refused =
        refused.contains("the sandbox allows images only in ") || refused.contains("no permission");
    assert!(is_refused, "{refused}");
    let added =
        qmp.command_with_descriptor(open(&image, true), "add-fd", &json!({ "opaque": "rdwr:disk.raw" }));
    let set = &added["return"]["fdset-id"];
    qmp.command("blockdev-add", node("d", set, &json!({})));
    let message = qmp.command_error("blockdev-add", node("again", set, &json!({}))).1;
    assert_contains(&message, &["in use by another disk"]);
    let nbd = scratch.socket("nbd");
    let addr = json!({ "type": "unix", "data": { "path": text(&nbd) } });
    qmp.command("nbd-server-start", json!({ "addr": addr }));
    qmp.command("block-export-add", json!({ "type": "nbd", "id": "e", "node-name": "d", "writable": true }));
    // The disk has duplicated the descriptor; the set can be removed.
    let sets = qmp.command("query-fdsets", json!({}));
    assert_eq!(sets[0]["fds"][0]["opaque"], "rdwr:disk.raw");
    qmp.command("remove-fd", json!({ "fdset-id": set, "fd": sets[0]["fds"][0]["fd"] }));
    assert_eq!(qmp.command("query-fdsets", json!({})), json!([]));
    let mut client = RawNbdClient::negotiated(&nbd, "d").0;
    assert_eq!(client.read(512, 512).as_deref(), Ok(&pattern(1024)[512..]));
    drop(client);
    let uri = format!("nbd+unix:///d?socket={}", text(&nbd));
    TestClient::new("nbdsh")
        .args(["-u", &uri, "-c", "h.pwrite(b'x' * 512, 0)", "-c", "h.flush()"])
        .succeeds();
    assert_eq!(fs::read(&image).expect("root has the permission")[..512], [b'x'; 512]);
    qmp.command("block-export-del", json!({ "id": "e", "mode": "hard" }));
    qmp.event("BLOCK_EXPORT_DELETED");
    qmp.command("blockdev-del", json!({ "node-name": "d" }));
    drop(weir);
}

#[test]
fn access_mode_of_a_descriptor_is_respected() {
    let scratch = Scratch::new();
    let image = scratch.filled("disk.raw", MIB);
    let (_weir, mut qmp) = unprivileged_daemon(&scratch);
    let added = qmp.command_with_descriptor(open(&image, false), "add-fd", &json!({ "fdset-id": 7 }));
    assert_eq!(added["return"]["fdset-id"], 7);
    let seven = json!(7);
    let message = qmp.command_error("blockdev-add", node("w", &seven, &json!({}))).1;
    assert_contains(
        &message,
        &["/dev/fdset/7", "no descriptor of the set was opened for reading and writing"],
    );
    qmp.command("blockdev-add", node("r", &seven, &json!({ "read-only": true })));
    qmp.command("blockdev-add", node("a", &seven, &json!({ "auto-read-only": true })));
    let message = qmp.command_error("blockdev-add", node("n", &json!(8), &json!({}))).1;
    assert_contains(&message, &["there is no such set"]);
    for command in [json!({ "fdset-id": 7, "fd": 9999 }), json!({ "fdset-id": 9 })] {
        assert_contains(
            &qmp.command_error("remove-fd", command).1,
            &["File descriptor named 'fdset-id:", "not found"],
        );
    }
    let directory = File::open(scratch.path("")).expect("the file exists");
    qmp.command_with_descriptor(directory, "add-fd", &json!({ "fdset-id": 3 }));
    let message = qmp.command_error("blockdev-add", node("d", &json!(3), &json!({ "read-only": true }))).1;
    assert_contains(&message, &["is a directory"]);
}

#[test]
fn missing_or_surplus_descriptors_are_harmless() {
    let scratch = Scratch::new();
    let _weir = operator::start(&scratch, &[]);
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let none = "No file descriptor supplied via SCM_RIGHTS";
    assert_eq!(qmp.command_error("getfd", json!({ "fdname": "a" })).1, none);
    assert_eq!(qmp.command_error("add-fd", json!({})).1, none);
    let pipe = std::io::pipe().expect("a pipe");
    assert!(
        qmp.command_with_descriptor(&pipe.0, "getfd", &json!({ "fdname": "0a" }))["error"]["desc"]
            .is_string()
    );
    assert!(qmp.command_with_descriptor(&pipe.0, "getfd", &json!({ "fdname": "a" }))["return"].is_object());
    assert!(qmp.command_with_descriptor(&pipe.0, "query-status", &json!({}))["return"].is_object());
    // Names of descriptors belong to one connection.
    let mut other = Qmp::negotiated(&scratch.socket("qmp"));
    assert_eq!(
        other.command_error("closefd", json!({ "fdname": "a" })).1,
        "File descriptor named 'a' not found"
    );
    qmp.command("closefd", json!({ "fdname": "a" }));
    qmp.command_error("closefd", json!({ "fdname": "a" }));
    // A pipe is not a socket; the daemon closes it.
    qmp.command_with_descriptor(&pipe.0, "getfd", &json!({ "fdname": "p" }));
    let export = json!({ "type": "vhost-user-blk", "id": "v", "node-name": "a", "addr": { "type": "fd", "str": "p" } });
    assert_contains(&qmp.command_error("block-export-add", export).1, &["fd:p: is no socket"]);
    qmp.command_error("closefd", json!({ "fdname": "p" }));
    // Descriptors of a disconnected client are closed.
    qmp.command_with_descriptor(&pipe.1, "getfd", &json!({ "fdname": "w" }));
    drop((qmp, pipe.1));
    let mut reader = pipe.0;
    assert_eq!(std::io::Read::read(&mut reader, &mut [0]).expect("the daemon has closed the pipe"), 0);
}

#[test]
fn sockets_bound_by_a_client_are_used() {
    let scratch = Scratch::new();
    let weir = Serve::new(&scratch)
        .at_given_addresses()
        .args(["--blockdev", "null-co,node-name=a,size=1048576", "--qmp", &operator::socket(&scratch)])
        .start();
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let socket = TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = socket.local_addr().expect("it is bound").port();
    qmp.command_with_descriptor(&socket, "getfd", &json!({ "fdname": "nbd" }));
    drop(socket);
    let addr = json!({ "type": "fd", "data": { "str": "nbd" } });
    qmp.command("nbd-server-start", json!({ "addr": addr }));
    qmp.command("block-export-add", json!({ "type": "nbd", "id": "e", "node-name": "a" }));
    TestClient::new("nbdinfo").args(["--size", &format!("nbd://127.0.0.1:{port}/a")]).succeeds();
    assert_contains(&qmp.command_error("nbd-server-start", json!({ "addr": addr })).1, &["already running"]);
    qmp.command("nbd-server-stop", json!({}));
    assert_contains(
        &qmp.command_error("nbd-server-start", json!({ "addr": addr })).1,
        &["fd:nbd: no such socket was passed"],
    );
    let vhost_socket = scratch.socket("machine");
    qmp.command_with_descriptor(
        UnixListener::bind(&vhost_socket).expect("the socket can be bound"),
        "getfd",
        &json!({ "fdname": "v" }),
    );
    let export = json!({ "type": "vhost-user-blk", "id": "v", "node-name": "a", "addr": { "type": "fd", "str": "v" } });
    qmp.command("block-export-add", export);
    UnixStream::connect(&vhost_socket).expect("a listener");
    drop(weir);
}
