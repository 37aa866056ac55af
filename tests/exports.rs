//! Exports that differ from a whole image under its own name: parts, snapshots, the default export,
//! a changed size, and an end with the last client. Compared with qemu-nbd where it has the
//! feature.

use std::{
    fs::{self, File},
    os::unix::{fs::PermissionsExt as _, net::UnixStream, process::ExitStatusExt as _},
    path::Path,
    process::{Command, Stdio},
};

use nix::{
    sys::{
        signal::{Signal, kill},
        stat::Mode,
    },
    unistd::{Pid, mkfifo},
};
use serde_json::{Value, json};

use crate::harness::{
    MIB, Qmp, Scratch, Serve, TestClient, WEIR, assert_contains, create_encrypted, export_size, nbdsh,
    need_root, pattern, qemu_img, qemu_io, text,
};

/// Runs a script with two connected handles, `ours` and `theirs`: the image exported by weir and by
/// qemu-nbd.
#[track_caller]
fn beside_qemu(weir: &str, qemu: &[&str], image: &Path, body: &str) {
    let prelude = "
ours = h
theirs = nbd.NBD()
for handle in (ours, theirs):
    handle.add_meta_context('base:allocation')
    handle.add_meta_context('qemu:allocation-depth')
ours.connect_uri(arguments[0])
theirs.connect_systemd_socket_activation(arguments[1:])
";
    let mut arguments = vec![weir, "qemu-nbd", "-r"];
    arguments.extend(qemu);
    arguments.push(text(image));
    nbdsh(&format!("{prelude}{body}"), arguments);
}

#[test]
fn range_of_a_file_is_a_disk() {
    let scratch = Scratch::new();
    let content = pattern(4 * MIB as usize);
    for cache in ["writeback", "none"] {
        let image = scratch.file("disk.raw", &content);
        let weir =
            Serve::new(&scratch).arg(&image).args(["-o", "offset=1000K,size=2M", "--cache", cache]).start();
        assert_eq!(export_size(&weir.uri("disk")), 2 * MIB);
        weir.nbdsh("disk", "h.pwrite(b'x' * 1000, 0)\nh.zero(1000, 2 * 1048576 - 1000)");
        let part =
            format!("driver=raw,offset=1024000,size=2M,file.driver=file,file.filename={}", text(&image));
        let served = format!("driver=raw,file.driver=nbd,file.export=disk,file.path={}", text(weir.socket()));
        qemu_img(["compare", "-U", "--image-opts", &part, &served]).succeeds();
        weir.stop();
        let mut expected = content.clone();
        expected[1000 << 10..][..1000].fill(b'x');
        expected[(1000 << 10) + 2 * MIB as usize - 1000..][..1000].fill(0);
        assert!(fs::read(&image).unwrap() == expected, "{cache}: data around the range has changed");
    }
    let image = scratch.sparse("disk.raw", MIB);
    let weir = Serve::new(&scratch).arg(&image).args(["-o", "offset=512K"]).start();
    assert_eq!(export_size(&weir.uri("disk")), MIB / 2);
    weir.stop();
    for (part, format) in
        [("offset=1M", &["-f", "raw"][..]), ("offset=4K,size=1M", &["-f", "raw"]), ("offset=1M", &[])]
    {
        let stderr = Serve::new(&scratch).arg(&image).args(["-o", part]).args(format).fails();
        let why = "as a raw file, and the part given by offset and size extends beyond its end";
        assert_contains(&stderr, &[text(&image), why]);
    }
    let stderr = Serve::new(&scratch).arg(&image).args(["-o", "size=4K", "-f", "qcow2"]).rejects_usage();
    assert_contains(&stderr, &["--options size=4K: is for raw images"]);
}

#[test]
fn snapshot_is_served_unchanged() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&image), "8M"]).succeeds();
    qemu_io(["-f", "qcow2"], ["write -P 1 0 3M"], &image);
    qemu_img(["snapshot", "-c", "before", text(&image)]).succeeds();
    qemu_io(["-f", "qcow2"], ["write -P 2 1M 4M"], &image);
    let weir = Serve::new(&scratch).arg(&image).args(["-f", "qcow2", "--snapshot", "before"]).start();
    let uri = weir.uri("disk");
    TestClient::new("nbdinfo").args(["--is", "read-only", &uri]).succeeds();
    qemu_io(["-r", "-f", "raw"], ["read -P 1 0 3M", "read -P 0 3M 5M"], &uri);
    let same = "assert ours.pread(8 << 20, 0) == theirs.pread(8 << 20, 0)";
    beside_qemu(&uri, &["-f", "qcow2", "-l", "before"], &image, same);
    weir.stop();
    let stderr = Serve::new(&scratch).arg(&image).args(["-f", "qcow2", "--snapshot", "after"]).fails();
    assert_contains(
        &stderr,
        &[text(&image), ": has no snapshot \"after\" (`weir image snapshot -l` lists all)"],
    );
    assert!(!stderr.contains("damage"), "{stderr}");
}

#[test]
fn empty_name_is_the_default_export() {
    let weir = Serve::with_own_scratch().args(["memory:1M", "--name", ""]).start();
    let list = TestClient::new("nbdinfo").args(["--list", "--json", &weir.uri("")]).json();
    assert_eq!(list["exports"][0]["export-name"], "");
    assert_eq!(list["exports"].as_array().map(Vec::len), Some(1));
    assert_eq!(export_size(&weir.uri("")), MIB);
}

#[test]
fn daemon_ends_with_its_last_client() {
    let weir = Serve::with_own_scratch().args(["memory:1M", "--exit-when-idle"]).start();
    // A connection without a handshake does not count as a client.
    drop(UnixStream::connect(weir.socket()).unwrap());
    let script = "
others = [nbd.NBD() for _ in range(3)]
for other in others:
    other.connect_uri(arguments[0])
for other in others:
    other.shutdown()
h.connect_uri(arguments[0])
h.pwrite(b'x' * 512, 0)
";
    // The last disconnect and the next connect are close together. Whichever the daemon sees first,
    // it must end once no client is left.
    let script = script.replace("h.connect_uri(arguments[0])\nh.pwrite", "h.pwrite");
    let script = script.replacen("others =", "h.connect_uri(arguments[0])\nothers =", 1);
    nbdsh(&script, [weir.uri("memory")]);
    let (status, log) = weir.wait();
    assert!(status.success(), "{status}: {log}");
    assert_contains(&log, &["stopping signal=\"idle\"", "writes=1", "stopped"]);
}

#[test]
fn later_clients_see_the_current_file_size() {
    let scratch = Scratch::new();
    let image = scratch.filled("disk.raw", 4 * MIB);
    let weir = Serve::new(&scratch).arg(&image).start();
    for bytes in [2 * MIB, 8 * MIB, 3 * MIB + 512, 0, 4 * MIB] {
        File::options().write(true).open(&image).unwrap().set_len(bytes).unwrap();
        assert_eq!(export_size(&weir.uri("disk")), bytes);
    }
    assert_contains(
        &weir.stop(),
        &["the size of the image was changed from outside", "old=4194304 new=2097152"],
    );
}

#[test]
fn allocation_depth_matches_qemu() {
    let scratch = Scratch::new();
    let (base, middle, top) = (scratch.path("base"), scratch.path("middle"), scratch.path("top"));
    qemu_img(["create", "-q", "-f", "qcow2", text(&base), "1M"]).succeeds();
    qemu_io(["-f", "qcow2"], ["write 128k 128k"], &base);
    for (image, backing, size) in [(&middle, &base, "2M"), (&top, &middle, "4M")] {
        qemu_img(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", text(backing), text(image), size])
            .succeeds();
    }
    qemu_io(["-f", "qcow2"], ["write 64k 64k", "write -z 1900k 64k"], &middle);
    qemu_io(["-f", "qcow2"], ["write 0 64k", "write -c 3M 64k"], &top);
    let raw = scratch.sparse("raw", MIB);
    for (image, format) in [(&top, "qcow2"), (&base, "qcow2"), (&raw, "raw")] {
        let weir = Serve::new(&scratch).arg(image).args(["-f", format, "--read-only"]).start();
        let body = "
def depths(handle):
    found, at = [], 0
    while at < handle.get_size():
        def extents(context, start, entries, error):
            if context == 'qemu:allocation-depth':
                found.extend(d for n, d in zip(entries[::2], entries[1::2]) for _ in range(n // 512))
        handle.block_status(handle.get_size() - at, at, extents)
        at = len(found) * 512
    return found
assert depths(ours) == depths(theirs)
";
        beside_qemu(
            &weir.uri(text(Path::new(image.file_name().unwrap()))),
            &["-A", "-f", format],
            image,
            body,
        );
    }
}

#[test]
fn known_zeroes_are_sent_as_holes() {
    let scratch = Scratch::new();
    let image = scratch.path("disk.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", text(&image), "8M"]).succeeds();
    qemu_io(["-f", "qcow2"], ["write -P 7 1M 1M", "write -z 3M 1M", "write -P 0 5M 64k"], &image);
    let body = "
def kinds(handle, flags=0):
    found = []
    def chunk(data, offset, status, error):
        kind = {nbd.READ_DATA: 'data', nbd.READ_HOLE: 'hole'}[status]
        if found and found[-1][0] == kind:
            found[-1][1] += len(data)
        else:
            found.append([kind, len(data)])
    data = handle.pread_structured(handle.get_size() - 7, 7, chunk, flags)
    assert data == handle.pread(handle.get_size() - 7, 7)
    return found
";
    let weir = Serve::new(&scratch).arg(&image).args(["-f", "qcow2", "--read-only"]).start();
    let same = "
M = 1 << 20
assert kinds(ours) == kinds(theirs), (kinds(ours), kinds(theirs))
assert kinds(ours)[:2] == [['hole', M - 7], ['data', M]]
assert kinds(ours, nbd.CMD_FLAG_DF) == [['data', 8 * M - 7]]
assert ours.pread(4096, M - 2048) == bytes(2048) + b'\\x07' * 2048
";
    beside_qemu(&weir.uri("disk"), &["-f", "qcow2"], &image, &format!("{body}{same}"));
    weir.stop();
    let weir = Serve::new(&scratch).arg("memory:1M").start();
    let memory = "
h.connect_uri(arguments[0])
h.pwrite(b'x' * 65536, 65536)
assert kinds(h) == [['hole', 65529], ['data', 65536], ['hole', (1 << 20) - 131072]], kinds(h)
simple = nbd.NBD()
simple.set_request_structured_replies(False)
simple.connect_uri(arguments[0])
assert simple.pread(1 << 20, 0) == h.pread(1 << 20, 0)
";
    nbdsh(&format!("{body}{memory}"), [weir.uri("memory")]);
}

#[test]
fn bitmaps_of_backing_images_are_offered() {
    let scratch = Scratch::new();
    let (base, top) = (scratch.path("base.qcow2"), scratch.path("top.qcow2"));
    qemu_img(["create", "-q", "-f", "qcow2", text(&base), "1M"]).succeeds();
    qemu_img(["bitmap", "--add", text(&base), "since"]).succeeds();
    qemu_io(["-f", "qcow2"], ["write 0 128k"], &base);
    qemu_img(["create", "-q", "-f", "qcow2", "-F", "qcow2", "-b", text(&base), text(&top), "4M"]).succeeds();
    let map = |uri: &[&str]| -> Value {
        TestClient::new("nbdinfo").args(["--json", "--map=qemu:dirty-bitmap:since", "--"]).args(uri).json()
    };
    let qemu_map = map(&["[", "qemu-nbd", "-r", "-f", "qcow2", "-B", "since", text(&top), "]"]);
    let serve = || Serve::new(&scratch).arg(&top).args(["-f", "qcow2", "--bitmap", "since"]);
    assert_contains(&serve().fails(), &["bitmap \"since\": it is in a backing file", "--read-only"]);
    let weir = serve().arg("--read-only").start();
    assert_eq!(map(&[&weir.uri("top")]), qemu_map);
    assert_eq!(qemu_map[0]["length"], 128 << 10);
    weir.stop();
    let stderr = Serve::new(&scratch).arg(&top).args(["-f", "qcow2", "--bitmap", "until"]).fails();
    assert_contains(&stderr, &["there is no bitmap \"until\""]);
}

#[test]
fn sockets_are_private_by_default() {
    need_root("sockets of another owner");
    let open_to_all = ["sh", "-c", "umask 0; exec \"$@\"", "sh"];
    let serve = || Serve::with_own_scratch().wrapped_by(open_to_all).arg("memory:1M");
    let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
    let weir = serve().start();
    assert_eq!(mode(weir.socket()), 0o600);
    weir.stop();
    let weir = serve().args(["--socket-mode", "0660", "--socket-owner", "nobody:nogroup"]).start();
    assert_eq!(mode(weir.socket()), 0o660);
    let as_nobody = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups", "test", "-w"];
    let metadata = fs::metadata(weir.socket()).unwrap();
    assert_eq!(
        {
            use std::os::unix::fs::MetadataExt as _;
            (metadata.uid(), metadata.gid())
        },
        (65534, 65534)
    );
    // The directory is accessible for root only; the mode of the socket denies all others.
    fs::set_permissions(weir.socket().parent().unwrap(), fs::Permissions::from_mode(0o755)).unwrap();
    TestClient::new(as_nobody[0]).args(&as_nobody[1..]).arg(weir.socket()).succeeds();
    weir.stop();
    let stderr = serve().args(["--socket-owner", "no-such-user"]).fails();
    assert_contains(&stderr, &["there is no user \"no-such-user\"", "getent passwd"]);
}

#[test]
fn world_readable_keys_are_a_warning() {
    let scratch = Scratch::new();
    let keys = scratch.file("keys.psk", "user:00112233445566778899aabbccddeeff\n");
    for (mode, is_warning) in [(0o644, true), (0o640, false)] {
        fs::set_permissions(&keys, fs::Permissions::from_mode(mode)).unwrap();
        let weir = Serve::new(&scratch).args(["memory:1M", "--tls", "on", "--tls-psk", text(&keys)]).start();
        let log = weir.stop();
        assert_eq!(log.contains("every user of this host can read the pre-shared keys"), is_warning, "{log}");
    }
}

#[test]
fn signal_ends_a_daemon_waiting_for_a_passphrase() {
    let scratch = Scratch::new();
    let (image, pipe) = (scratch.path("disk.qcow2"), scratch.path("pipe"));
    create_encrypted(&image);
    mkfifo(&pipe, Mode::S_IRUSR | Mode::S_IWUSR).unwrap();
    let mut child = Command::new(WEIR)
        .args(["serve", "-f", "qcow2", "--secret-file", text(&pipe), "--nbd"])
        .arg(format!("unix:{}", text(&scratch.socket("nbd"))))
        .arg(&image)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    // The open returns once the daemon reads; the daemon then waits while this end stays open.
    let writer = File::options().write(true).open(&pipe).unwrap();
    kill(Pid::from_raw(child.id() as i32), Signal::SIGTERM).unwrap();
    let status = child.wait().unwrap();
    drop(writer);
    assert_eq!((status.code(), status.signal()), (Some(0), None));
}

#[test]
fn secret_file_must_be_in_the_image_root() {
    let scratch = Scratch::new();
    let inside = scratch.file("inside", "abc");
    let (other, qmp) = (Scratch::new(), scratch.socket("qmp"));
    let outside = other.file("outside", "abc");
    let _weir = Serve::new(&scratch)
        .args(["memory:1M", "--image-root", text(&scratch.path("")), "--qmp"])
        .arg(format!("unix:{}", text(&qmp)))
        .start();
    let mut client = Qmp::negotiated(&qmp);
    let secret = |file: &Path| json!({"qom-type": "secret", "id": "s", "file": text(file)});
    let (_, message) = client.command_error("object-add", secret(&outside));
    assert_contains(&message, &["Unable to read", "lies outside of the image root"]);
    client.command("object-add", secret(&inside));
}

#[test]
fn every_command_prints_the_version() {
    for command in [&["serve", "--version"][..], &["image", "create", "--version"], &["--version"]] {
        let stdout = TestClient::new(WEIR).args(command).succeeds();
        assert!(stdout.trim_end().ends_with(env!("CARGO_PKG_VERSION")), "{command:?}: {stdout}");
    }
}
