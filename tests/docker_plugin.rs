//! `weir docker-plugin`: Docker's volume plugin protocol, with the harness's own client, and with
//! Podman and a container where Podman is installed.
//!
//! Mounts use a file over FUSE and a loop device on it, because the host may lack ublk.

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::{UnixDatagram, UnixListener, UnixStream},
    path::{Path, PathBuf},
    thread,
};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use crate::harness::{
    Scratch, Serve, TestClient, Weir, assert_contains, need, need_root, text, wait_for_programs, weir,
};

/// A plugin, its directory, and the name of its volume, unique to the test.
struct PluginDaemon {
    scratch: Scratch,
    volume: String,
    weir: Weir,
}

impl PluginDaemon {
    fn start() -> Self {
        Self::at(Scratch::new())
    }

    fn at(scratch: Scratch) -> Self {
        let weir = serve(&scratch).start();
        Self { volume: volume_of(&scratch), scratch, weir }
    }

    fn restart(self, end: impl FnOnce(Weir)) -> Self {
        end(self.weir);
        Self::at(self.scratch)
    }

    fn connect(&self) -> UnixStream {
        UnixStream::connect(self.scratch.socket("plugin")).expect("the daemon listens")
    }

    /// Sends these bytes; returns the status and the JSON of the response.
    #[track_caller]
    fn send(&self, bytes: &[u8]) -> (u16, Value) {
        let mut stream = self.connect();
        // A request that is rejected early is not read completely.
        let _ = stream.write_all(bytes);
        let mut reply = Vec::new();
        let _ = stream.read_to_end(&mut reply);
        let reply = String::from_utf8(reply).expect("it answers in UTF-8");
        let (head, body) = reply.split_once("\r\n\r\n").unwrap_or_else(|| panic!("no answer: {reply:?}"));
        let status = head.split(' ').nth(1).and_then(|code| code.parse().ok());
        (status.unwrap_or_else(|| panic!("{head}")), serde_json::from_str(body).expect("it is JSON"))
    }

    #[track_caller]
    fn call(&self, path: &str, body: &Value) -> (u16, Value) {
        let body = body.to_string();
        let length = body.len();
        let head = format!("POST /{path} HTTP/1.1\r\nHost: weir\r\nContent-Length: {length}\r\n\r\n");
        self.send((head + &body).as_bytes())
    }

    #[track_caller]
    fn call_ok(&self, request: &str, body: &Value) -> Value {
        let (status, value) = self.call(&format!("VolumeDriver.{request}"), body);
        assert_eq!((status, &value["Err"]), (200, &json!("")), "{request} {body}: {value}");
        value
    }

    #[track_caller]
    fn call_error(&self, request: &str, body: &Value) -> String {
        let (status, value) = self.call(&format!("VolumeDriver.{request}"), body);
        assert_ne!(status, 200, "{request} {body}: {value}");
        value["Err"].as_str().expect("an error has a reason").to_owned()
    }

    fn image(&self) -> PathBuf {
        self.scratch.path("volumes").join(&self.volume).join("disk.qcow2")
    }

    /// A request body that names the volume.
    fn named(&self) -> Value {
        json!({ "Name": self.volume })
    }

    fn created_with(&self, options: Value) -> Value {
        json!({ "Name": self.volume, "Opts": options })
    }

    fn create(&self) {
        self.call_ok("Create", &self.created_with(small()));
    }

    fn remove(&self) {
        self.call_ok("Remove", &self.named());
    }

    fn mounted_at(&self) -> Value {
        self.call_ok("Path", &self.named())["Mountpoint"].clone()
    }
}

fn serve(scratch: &Scratch) -> Serve {
    let socket = format!("unix:{}", text(&scratch.socket("plugin")));
    Serve::subcommand("docker-plugin")
        .arg("--socket")
        .arg(socket)
        .arg("--directory")
        .arg(scratch.path("volumes"))
}

/// A name derived from the scratch directory, which is unique.
fn volume_of(scratch: &Scratch) -> String {
    let path = scratch.path("volumes");
    let directory = path.parent().and_then(Path::file_name).expect("it is in its own directory");
    format!("db-{}", text(Path::new(directory)).trim_start_matches("e2e."))
}

fn small() -> Value {
    json!({ "size": "16M", "iops-total": "100000" })
}

#[test]
fn volume_is_an_image_with_a_file_system() {
    let plugin = PluginDaemon::start();
    let (status, activated) = plugin.call("Plugin.Activate", &json!({}));
    assert_eq!((status, activated), (200, json!({ "Implements": ["VolumeDriver"] })));
    plugin.create();
    let image = plugin.image();
    let info = weir(&["image", "info", "--json", text(&image)]).json();
    assert_eq!((&info["format"], &info["virtual-size"]), (&json!("qcow2"), &json!(16 << 20)));
    let raw = plugin.scratch.path("raw");
    weir(&["image", "convert", text(&image), text(&raw)]).succeeds();
    TestClient::new("e2fsck").args(["-f", "-n", text(&raw)]).succeeds();
    let names: Vec<_> =
        fs::read_dir(image.parent().unwrap()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names.len(), 3, "expected only record, image and mount point: {names:?}");
    plugin.remove();
    assert!(!image.parent().unwrap().exists());
    plugin.weir.stop();
}

#[test]
fn volumes_survive_kill_and_restart_of_the_plugin() {
    let mut plugin = PluginDaemon::start();
    plugin.create();
    plugin = plugin.restart(Weir::crash);
    assert_eq!(
        plugin.call_ok("List", &json!({}))["Volumes"],
        json!([{ "Name": plugin.volume, "Mountpoint": "" }])
    );
    plugin = plugin.restart(|weir| drop(weir.stop()));
    plugin.create();
    let volume = &plugin.call_ok("Get", &plugin.named())["Volume"];
    assert_eq!(volume["Status"]["options"], small());
    plugin.remove();
    plugin.weir.stop();
}

#[test]
fn invalid_volume_is_rejected_at_creation() {
    let plugin = PluginDaemon::start();
    let create = |options: Value| plugin.call_error("Create", &plugin.created_with(options));
    assert_contains(&create(json!({})), &["size: is missing"]);
    assert_contains(&create(json!({ "size": "16M", "sise": "1" })), &["sise=1: ", "did you mean size?"]);
    assert_contains(
        &create(json!({ "size": "16M", "iops-total": "1000", "iops-total-max": "500" })),
        &["iops-total-max=500: ", "at least the rate"],
    );
    let user = json!({ "Name": plugin.volume, "ID": "a" });
    assert_contains(&plugin.call_error("Mount", &user), &["there is no volume db-"]);
    assert_contains(&plugin.call_error("Remove", &plugin.named()), &["there is no volume db-"]);
    assert_eq!(plugin.call_ok("List", &json!({}))["Volumes"], json!([]));
    plugin.weir.stop();
}

#[test]
fn hostile_requests_do_not_affect_others() {
    let plugin = PluginDaemon::start();
    let silent_clients: Vec<_> = (0..8).map(|_| plugin.connect()).collect();
    let endless = format!("POST / HTTP/1.1\r\nX: {}", "x".repeat(1 << 20));
    assert_eq!(plugin.send(endless.as_bytes()).0, 431);
    assert_eq!(plugin.send(b"POST / HTTP/1.1\r\nContent-Length: 999999999999\r\n\r\n").0, 413);
    assert_eq!(plugin.send(b"GET /VolumeDriver.List HTTP/1.1\r\n\r\n").0, 405);
    assert_eq!(plugin.send(b"\0\0\0\0\r\n\r\n").0, 400);
    for name in ["../../../etc", "/etc/passwd", "a/../../b", "", "."] {
        assert_contains(
            &plugin.call_error("Create", &json!({ "Name": name, "Opts": { "size": "16M" } })),
            &["is not a volume name"],
        );
    }
    thread::scope(|scope| {
        for _ in 0..64 {
            scope.spawn(|| plugin.call_ok("List", &json!({})));
        }
    });
    drop(silent_clients);
    plugin.weir.stop();
}

#[test]
fn directory_and_socket_belong_to_one_plugin() {
    let plugin = PluginDaemon::start();
    assert_contains(&serve(&plugin.scratch).fails(), &["another `weir docker-plugin` uses this directory"]);
    let other = Scratch::new();
    let socket = format!("unix:{}", text(&plugin.scratch.socket("plugin")));
    let second =
        Serve::subcommand("docker-plugin").args(["--socket", &socket, "--directory", text(&other.path("v"))]);
    assert_contains(&second.fails(), &["in use: another process listens there"]);
    let socket = plugin.scratch.socket("plugin");
    plugin.weir.stop();
    assert!(!socket.exists());
}

#[test]
fn socket_activation_and_readiness() {
    let scratch = Scratch::new();
    let (path, notify) = (scratch.socket("plugin"), scratch.socket("notify"));
    let listener = UnixListener::bind(&path).unwrap();
    let manager = UnixDatagram::bind(&notify).unwrap();
    let script = "exec 3<&0 0</dev/null; LISTEN_FDS=1 LISTEN_PID=$$ exec \"$0\" \"$@\"";
    let weir = Serve::subcommand("docker-plugin")
        .args(["--directory", text(&scratch.path("volumes"))])
        .wrapped_by(["sh", "-c", script])
        .reading(listener)
        .env("NOTIFY_SOCKET", &notify)
        .start();
    let mut message = [0; 64];
    let length = manager.recv(&mut message).unwrap();
    assert_eq!(message[..length].trim_ascii(), b"READY=1");
    let plugin = PluginDaemon { volume: volume_of(&scratch), scratch, weir };
    assert_eq!(plugin.call_ok("List", &json!({}))["Volumes"], json!([]));
    plugin.weir.signal(Signal::SIGTERM);
    assert!(plugin.weir.wait().0.success());
}

/// Unmounts the volume if the test fails while it is mounted.
struct UnmountOnPanic(PathBuf);

impl Drop for UnmountOnPanic {
    fn drop(&mut self) {
        if thread::panicking() {
            let _ = weir(&["detach", text(&self.0)]).run();
        }
    }
}

fn mount(plugin: &PluginDaemon, user: &str) -> UnmountOnPanic {
    let mounted = plugin.call_ok("Mount", &json!({ "Name": plugin.volume, "ID": user }));
    UnmountOnPanic(mounted["Mountpoint"].as_str().expect("a path").into())
}

fn unmount(plugin: &PluginDaemon, user: &str) {
    wait_for_programs();
    plugin.call_ok("Unmount", &json!({ "Name": plugin.volume, "ID": user }));
}

fn is_mounted(path: &Path) -> bool {
    TestClient::new("mountpoint").args(["-q", text(path)]).run().code() == 0
}

#[test]
fn data_in_a_volume_persists() {
    need_root("mounts");
    let mut plugin = PluginDaemon::start();
    plugin.create();
    let at = mount(&plugin, "a");
    assert_eq!(fs::read_dir(&at.0).unwrap().count(), 0, "a new volume is empty");
    fs::write(at.0.join("file"), "kept").unwrap();
    mount(&plugin, "b");
    assert_contains(
        &plugin.call_error("Remove", &plugin.named()),
        &["is mounted: several containers are using it (a, b)"],
    );
    unmount(&plugin, "a");
    assert!(is_mounted(&at.0), "container b still uses the volume");
    // Volumes stay mounted after a kill of the plugin, and after an orderly end.
    plugin = plugin.restart(Weir::crash);
    assert_eq!(fs::read_to_string(at.0.join("file")).unwrap(), "kept");
    plugin = plugin.restart(|weir| drop(weir.stop()));
    assert_eq!(fs::read_to_string(at.0.join("file")).unwrap(), "kept");
    unmount(&plugin, "b");
    assert!(!is_mounted(&at.0));
    let at = mount(&plugin, "c");
    assert_eq!(fs::read_to_string(at.0.join("file")).unwrap(), "kept");
    unmount(&plugin, "c");
    plugin.remove();
    plugin.weir.stop();
}

#[test]
fn lost_mount_is_restored() {
    need_root("mounts");
    let plugin = PluginDaemon::start();
    plugin.create();
    let at = mount(&plugin, "a");
    weir(&["detach", text(&at.0)]).succeeds();
    assert_eq!(plugin.mounted_at(), "");
    let remounted = mount(&plugin, "a");
    assert!(is_mounted(&remounted.0));
    unmount(&plugin, "a");
    plugin.remove();
    plugin.weir.stop();
}

/// Beside a running daemon in its default sandbox, which creates no devices.
#[test]
fn daemon_without_devices_does_not_prevent_volumes() {
    need_root("mounts");
    let scratch = Scratch::new();
    let address = format!("unix:{}", text(&scratch.socket("qmp")));
    let daemon = Serve::new(&scratch)
        .args(["memory:1M", "--group", "gold", "--iops-total", "5000", "--qmp", &address])
        .start();
    let weir = serve(&scratch).env("WEIR_QMP", &address).start();
    let plugin = PluginDaemon { volume: volume_of(&scratch), scratch, weir };
    plugin.create();
    let at = mount(&plugin, "a");
    fs::write(at.0.join("file"), "kept").unwrap();
    unmount(&plugin, "a");
    plugin.remove();
    plugin.call_ok("Create", &plugin.created_with(json!({ "size": "16M", "group": "gold" })));
    let user = json!({ "Name": plugin.volume, "ID": "a" });
    let refused = plugin.call_error("Mount", &user);
    assert_contains(&refused, &["makes no devices", "group gold exists only there", "--sandbox off"]);
    plugin.remove();
    plugin.weir.stop();
    daemon.stop();
}

/// Podman with all of its state in the scratch directory, and an image with a shell.
struct Podman {
    arguments: Vec<String>,
    settings: Vec<String>,
}

impl Podman {
    fn new(scratch: &Scratch) -> Self {
        let configuration = format!(
            "[containers]\n\
             log_driver = \"none\"\n\
             [engine]\n\
             volume_plugin_timeout = 100\n\
             [engine.volume_plugins]\n\
             weir = {:?}\n",
            text(&scratch.socket("plugin"))
        );
        let configuration = scratch.file("containers.conf", configuration);
        let [root, run] = ["root", "run"].map(|name| text(&scratch.path(name)).to_owned());
        let options = [
            ["--root", root.as_str()],
            ["--runroot", run.as_str()],
            ["--storage-driver", "vfs"],
            ["--cgroup-manager", "cgroupfs"],
            ["--events-backend", "none"],
            // crun rejects a host that has both versions of control groups.
            ["--runtime", "runc"],
        ];
        let settings = vec![format!("CONTAINERS_CONF={}", text(&configuration))];
        let podman = Self { arguments: options.concat().into_iter().map(str::to_owned).collect(), settings };
        let tree = scratch.path("tree");
        fs::create_dir_all(tree.join("bin")).unwrap();
        fs::copy("/bin/busybox", tree.join("bin/sh")).expect("busybox-static is there (run `make deps`)");
        let archive = scratch.path("tree.tar");
        TestClient::new("tar").args(["-C", text(&tree), "-cf", text(&archive), "."]).succeeds();
        podman.succeeds(&["import", "--quiet", text(&archive), "shell"]);
        podman
    }

    fn client(&self, arguments: &[&str]) -> TestClient {
        need("podman");
        TestClient::new("env").args(&self.settings).arg("podman").args(&self.arguments).args(arguments)
    }

    #[track_caller]
    fn succeeds(&self, arguments: &[&str]) -> String {
        self.client(arguments).succeeds()
    }

    /// Runs a script in a container with the volume at `/data`; asserts success.
    #[track_caller]
    fn runs(&self, volume: &str, script: &str) {
        let volume = format!("--volume={volume}:/data");
        // Podman's default limits exceed those of root in a container.
        let limits = ["--network=none", "--ulimit=nofile=1000:1000", "--ulimit=nproc=1000:1000", &volume];
        let arguments =
            [&["run", "--rm", "--quiet"][..], &limits, &["shell", "/bin/sh", "-c", script]].concat();
        self.succeeds(&arguments);
    }
}

#[test]
fn container_uses_a_volume() {
    need_root("containers");
    let plugin = PluginDaemon::start();
    let podman = Podman::new(&plugin.scratch);
    let volume = plugin.volume.as_str();
    podman.succeeds(&[
        "volume",
        "create",
        "--driver=weir",
        "-o",
        "size=16M",
        "-o",
        "iops-total=100000",
        volume,
    ]);
    let listed = podman.succeeds(&["volume", "ls", "--format={{.Driver}} {{.Name}}"]);
    assert_eq!(listed.trim(), format!("weir {volume}"));
    podman.runs(volume, "echo kept > /data/file");
    assert_eq!(plugin.mounted_at(), "", "the volume is unmounted after the last container");
    // Checked by exit status: podman may miss the output of a short-lived container.
    podman.runs(volume, "read line < /data/file && [ \"$line\" = kept ]");
    let refused = podman.client(&["volume", "create", "--driver=weir", "-o", "size=much", "other"]).fails();
    assert_contains(&refused, &["size=much: is not a size"]);
    podman.succeeds(&["volume", "rm", volume]);
    assert_eq!(plugin.call_ok("List", &json!({}))["Volumes"], json!([]));
    plugin.weir.stop();
}
