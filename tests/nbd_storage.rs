//! weir as a client of other NBD servers: nbdkit, qemu-nbd, qemu-storage-daemon and weir hold the
//! disk; independent clients use it through weir while the server is killed or misbehaves.
//!
//! All daemons run in the sandbox, which must let them reconnect.

mod images;
mod reconnects;
mod unavailable;

use std::{
    fs,
    io::{Read as _, Write as _},
    os::unix::net::{UnixListener, UnixStream},
    path::{Path, PathBuf},
    thread,
};

use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::{
    harness::{
        MIB, Qmp, Scratch, Serve, TestClient, Weir, assert_contains, need,
        operator::{find, run_failing, run_json, run_ok, socket, status, wait_until},
        qemu_img, text, weir_image,
    },
    tls::CertificateAuthority,
};

/// A server in the background. It is ready when the command that started it has exited.
struct BackgroundNbdServer {
    pid_file: PathBuf,
}

impl BackgroundNbdServer {
    #[track_caller]
    fn start(program: &str, arguments: &[&str], pid_file: PathBuf) -> Self {
        need(program);
        TestClient::new(program).args(arguments).succeeds();
        Self { pid_file }
    }

    fn nbdkit(scratch: &Scratch, socket: &Path, more: &[&str]) -> Self {
        let pid_file = scratch.path("nbdkit.pid");
        let _ = fs::remove_file(socket);
        let arguments = ["-U", text(socket), "-P", text(&pid_file)];
        Self::start("nbdkit", &[&arguments[..], more].concat(), pid_file.clone())
    }

    fn qemu_nbd(scratch: &Scratch, socket: &Path, more: &[&str]) -> Self {
        let pid_file = scratch.path("qemu-nbd.pid");
        let arguments = ["-t", "--fork", "-k", text(socket), "--pid-file", text(&pid_file)];
        Self::start("qemu-nbd", &[&arguments[..], more].concat(), pid_file.clone())
    }

    fn storage_daemon(scratch: &Scratch, socket: &Path, file: &Path) -> Self {
        let pid_file = scratch.path("storage-daemon.pid");
        let node = format!("driver=file,node-name=disk,filename={}", text(file));
        let server = format!("addr.type=unix,addr.path={}", text(socket));
        let arguments = [
            "--daemonize",
            "--pidfile",
            text(&pid_file),
            "--blockdev",
            &node,
            "--nbd-server",
            &server,
            "--export",
            "type=nbd,id=e,node-name=disk,name=disk,writable=on",
        ];
        Self::start("qemu-storage-daemon", &arguments, pid_file.clone())
    }

    /// Kills the server with SIGKILL, by `drop`.
    fn crash(self) {}
}

impl Drop for BackgroundNbdServer {
    fn drop(&mut self) {
        let number = fs::read_to_string(&self.pid_file).ok().and_then(|text| text.trim().parse().ok());
        let Some(pid) = number.map(Pid::from_raw) else { return };
        let _ = kill(pid, Signal::SIGKILL);
        let _ = fs::remove_file(&self.pid_file);
        // The server is not a child of this process: it has ended once it cannot be signalled.
        while kill(pid, None).is_ok() {
            thread::yield_now();
        }
    }
}

fn uri(socket: &Path, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={}", text(socket))
}

fn in_front(scratch: &Scratch, image: &str, more: &[&str]) -> Weir {
    let serve = Serve::new(scratch).args(["--name", "front", "--qmp", &socket(scratch)]);
    serve.args(["--sandbox", "require"]).args(more).arg(image).start()
}

/// Reads, writes, zeroes, trims, maps and copies the content of `file` through weir.
#[track_caller]
fn assert_served_through_weir(scratch: &Scratch, server: &str, backing: &str, file: &Path, export: &str) {
    let weir = in_front(scratch, backing, &["--format", "raw"]);
    let (front, copy) = (weir.uri("front"), scratch.path("copy.raw"));
    TestClient::new("nbdcopy").args([&front, text(&copy)]).describing(server).succeeds();
    assert!(fs::read(&copy).unwrap() == fs::read(file).unwrap(), "{server}: the disk differs");
    TestClient::new("qemu-io")
        .args(["-f", "raw"])
        .describing(server)
        .run_qemu_io(["write -P 7 1000 70000", "write -z 200k 64k", "discard 400k 64k", "flush"], &front);
    let script = "h.pwrite(b'\\x07' * 70000, 1000)\n\
                  h.zero(65536, 204800)\n\
                  h.flush()\n\
                  assert h.pread(70000, 1000) == b'\\x07' * 70000\n\
                  assert h.pread(65536, 204800) == bytes(65536)";
    weir.nbdsh("front", script);
    let content = fs::read(file).unwrap();
    assert!(content[1000..71_000].iter().all(|&byte| byte == 7), "{server}: it was not written");
    assert!(content[204_800..270_336].iter().all(|&byte| byte == 0), "{server}: it was not zeroed");
    // A hole on the server is a hole here.
    let map = TestClient::new("nbdinfo").args(["--map", "--json", &front]).describing(server).json();
    let hole = |entry: &serde_json::Value| entry["type"].as_u64() == Some(3);
    assert!(map.as_array().unwrap().iter().any(hole), "{server}, {export}: {map:#}");
    let reported = status(scratch, "0");
    let remote = &find(&reported, "disks", "front")["server"];
    assert_eq!((&remote["connected"], &remote["reconnections"]), (&json!(true), &json!(0)), "{reported:#}");
    weir.stop();
}

/// A file with 4 MiB of data, followed by a hole of 4 MiB.
fn half_filled(scratch: &Scratch) -> PathBuf {
    let file = scratch.filled("disk.raw", 4 * MIB);
    fs::File::options().write(true).open(&file).unwrap().set_len(8 * MIB).unwrap();
    file
}

#[test]
fn disks_of_all_servers_are_served_unchanged() {
    for kind in ["nbdkit", "qemu-nbd", "qemu-nbd, several clients", "qemu-storage-daemon", "weir"] {
        let scratch = Scratch::new();
        let (file, at) = (half_filled(&scratch), scratch.socket("back"));
        let plain = uri(&at, "");
        let (_server, _weir, backing) = match kind {
            "nbdkit" => {
                (Some(BackgroundNbdServer::nbdkit(&scratch, &at, &["file", text(&file)])), None, plain)
            }
            "qemu-nbd" => {
                (Some(BackgroundNbdServer::qemu_nbd(&scratch, &at, &["-f", "raw", text(&file)])), None, plain)
            }
            "qemu-storage-daemon" => {
                (Some(BackgroundNbdServer::storage_daemon(&scratch, &at, &file)), None, uri(&at, "disk"))
            }
            "weir" => {
                let own_scratch = Scratch::new();
                let weir = Serve::owning(own_scratch).args(["-f", "raw"]).arg(&file).start();
                let backing = weir.uri("disk");
                (None, Some(weir), backing)
            }
            _ => {
                let arguments = ["-e", "8", "-f", "raw", text(&file)];
                (Some(BackgroundNbdServer::qemu_nbd(&scratch, &at, &arguments)), None, plain)
            }
        };
        assert_served_through_weir(&scratch, kind, &backing, &file, kind);
    }
}

#[test]
fn block_sizes_and_missing_features_are_emulated() {
    let scratch = Scratch::new();
    let (file, at) = (half_filled(&scratch), scratch.socket("back"));
    let before = fs::read(&file).unwrap();
    for filters in [
        &[
            "--filter=blocksize-policy",
            "file",
            "FILE",
            "blocksize-minimum=4096",
            "blocksize-maximum=64K",
            "blocksize-preferred=4096",
            "blocksize-error-policy=error",
        ][..],
        &["--filter=nozero", "--filter=fua", "file", "FILE", "zeromode=none", "fuamode=emulate"],
        &["--filter=noextents", "--filter=multi-conn", "file", "FILE", "multi-conn-mode=disable"],
    ] {
        let arguments: Vec<_> = filters
            .iter()
            .map(|argument| if *argument == "FILE" { text(&file) } else { *argument })
            .collect();
        let server = BackgroundNbdServer::nbdkit(&scratch, &at, &arguments);
        let more = ["-f", "raw", "--cache", "writethrough", "--workers", "2"];
        let weir = in_front(&scratch, &uri(&at, ""), &more);
        let script = "for at in (1, 511, 4095, 65000, 1000000):\n    h.pwrite(b'\\x09' * 70001, \
                      at)\n    assert h.pread(70001, at) == b'\\x09' * 70001\nh.zero(9000, \
                      77)\nassert h.pread(9000, 77) == bytes(9000)\nh.pwrite(b'\\x05', \
                      8388607)\nassert h.pread(2, 8388606)[1] == 5";
        weir.nbdsh("front", script);
        weir.stop();
        server.crash();
        assert_ne!(fs::read(&file).unwrap(), before);
        fs::write(&file, &before).unwrap();
    }
}

/// Verifies fio's checksums through weir while the server is killed repeatedly.
fn killed_under_load(kind: &str, start: &dyn Fn(&Scratch, &Path, &Path) -> BackgroundNbdServer) {
    let scratch = Scratch::new();
    let (file, at) = (scratch.sparse("disk.raw", 32 * MIB), scratch.socket("back"));
    let mut server = Some(start(&scratch, &at, &file));
    let more = ["-f", "raw", "--reconnect-delay", "1m"];
    let weir = in_front(&scratch, &uri(&at, ""), &more);
    let writes = |status: &serde_json::Value| {
        find(status, "disks", "front")["writes"]["requests"].as_u64().unwrap_or(0)
    };
    thread::scope(|scope| {
        let fio = scope.spawn(|| {
            TestClient::new("fio")
                .args(["--name=verified", "--ioengine=nbd", "--rw=randwrite", "--size=32M", "--bs=4k"])
                .args([
                    "--io_size=48M",
                    "--iodepth=16",
                    "--verify=crc32c",
                    "--verify_fatal=1",
                    "--do_verify=1",
                ])
                .args(["--randseed=42", "--fsync=200", "--rate_iops=6000"])
                .arg(format!("--uri={}", weir.uri("front")))
                .arg(format!("--aux-path={}", scratch.path("").display()))
                .describing(kind)
                .succeeds()
        });
        for round in 1..=3_u64 {
            wait_until(&scratch, |status| writes(status) > 1500 * round);
            server.take().unwrap().crash();
            wait_until(&scratch, |status| find(status, "disks", "front")["server"]["connected"] == false);
            server = Some(start(&scratch, &at, &file));
            wait_until(&scratch, |status| {
                find(status, "disks", "front")["server"]["reconnections"].as_u64() >= Some(round)
            });
        }
        fio.join().expect("every block has its checksum");
    });
    weir.nbdsh("front", "h.flush()");
    let copy = scratch.path("copy.raw");
    TestClient::new("nbdcopy").args([weir.uri("front").as_str(), text(&copy)]).succeeds();
    let (read, stored) = (fs::read(&copy).unwrap(), fs::read(&file).unwrap());
    assert!(read == stored, "{kind}: the disk differs");
    weir.stop();
}

#[test]
fn killed_nbdkit_loses_nothing() {
    killed_under_load("nbdkit", &|scratch, at, file| {
        BackgroundNbdServer::nbdkit(scratch, at, &["file", text(file)])
    });
}

#[test]
fn killed_volatile_server_loses_nothing() {
    killed_under_load("nbdkit with a cache", &|scratch, at, file| {
        BackgroundNbdServer::nbdkit(scratch, at, &["--filter=cache", "file", text(file), "cache=writeback"])
    });
}

#[test]
fn killed_qemu_nbd_loses_nothing() {
    killed_under_load("qemu-nbd", &|scratch, at, file| {
        let arguments = ["-e", "8", "-f", "raw", "--cache=writeback", text(file)];
        BackgroundNbdServer::qemu_nbd(scratch, at, &arguments)
    });
}

#[test]
fn tcp_server_is_reconnected() {
    let (back_scratch, front_scratch) = (Scratch::new(), Scratch::new());
    let file = back_scratch.filled("disk.raw", MIB);
    let server = Serve::new(&back_scratch).on_tcp().args(["-f", "raw"]).arg(&file).start();
    let (server_uri, port) = (server.uri("disk"), server.port());
    let weir = in_front(&front_scratch, &server_uri, &["-f", "raw", "--reconnect-delay", "1m"]);
    weir.nbdsh("front", "h.pwrite(b'a' * 4096, 0)\nassert h.pread(4096, 0) == b'a' * 4096");
    server.crash();
    let server = Serve::new(&back_scratch).at_given_addresses().args(["-f", "raw"]).arg(&file);
    let server = server.arg(format!("--nbd=127.0.0.1:{port}")).start();
    weir.nbdsh("front", "assert h.pread(4096, 0) == b'a' * 4096\nh.pwrite(b'b' * 4096, 0)\nh.flush()");
    assert!(fs::read(&file).unwrap()[..4096].iter().all(|&byte| byte == b'b'));
    // The sandbox blocks connections to any other server.
    let refused = run_failing(&front_scratch, &["disk", "add", "b", "nbd://127.0.0.1:1/x", "-f", "raw"]);
    assert_contains(&refused, &["the sandbox allows connections only to the NBD servers known at the start"]);
    weir.stop();
    server.stop();
}

#[test]
fn unusable_server_is_rejected_by_name() {
    let scratch = Scratch::new();
    let (file, at) = (half_filled(&scratch), scratch.socket("back"));
    let assert_fails = |image: &str, more: &[&str], expect: &[&str]| {
        let stderr = Serve::new(&scratch).args(["-f", "raw"]).args(more).arg(image).fails();
        assert_contains(&stderr, expect);
    };
    assert_fails(&uri(&at, ""), &[], &["cannot connect: ", "start the server, or check the URI"]);
    for (image, more, expect) in [
        ("nbd://h/x?socket=y", &[][..], "takes no parameters"),
        ("nbd:h:port", &[], "is an unknown kind of NBD URI"),
        ("memory:1M", &["--reconnect-delay", "1s"], "is for images at NBD servers"),
        ("memory:1M", &["--open-timeout", "1s"], "is for images at NBD servers"),
    ] {
        let stderr = Serve::new(&scratch).args(["-f", "raw"]).args(more).arg(image).rejects_usage();
        assert_contains(&stderr, &[expect]);
    }
    let server = BackgroundNbdServer::nbdkit(&scratch, &at, &["-r", "file", text(&file)]);
    assert_fails(&uri(&at, ""), &[], &["the export is read-only at its server", "open it for reading only"]);
    in_front(&scratch, &uri(&at, ""), &["-f", "raw", "--read-only"]).stop();
    server.crash();
    let server = BackgroundNbdServer::qemu_nbd(&scratch, &at, &["-f", "raw", "-x", "disk", text(&file)]);
    assert_fails(&uri(&at, "other"), &[], &["refused export \"other\"", "check the export's name"]);
    assert_fails(&uri(&at, "disk").replace("nbd+", "nbds+"), &[], &["TLS failed"]);
    server.crash();
    for (greeting, expect) in [
        (&b"HTTP/1.1 400 Bad Request\r\n\r\n"[..], "it does not send an NBD greeting"),
        (&b"NBDMAGIC"[..], "cannot connect"),
        (&b"NBDMAGICIHAVEOPT\0\x03\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff"[..],
         "a reply has a wrong magic number"),
    ] {
        let at = scratch.socket("liar");
        let _ = fs::remove_file(&at);
        let listener = UnixListener::bind(&at).unwrap();
        let hostile_server = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let _ = stream.write_all(greeting);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        });
        assert_fails(&uri(&at, ""), &[], &[expect]);
        hostile_server.join().unwrap();
    }
}

/// The server's side of the handshake for a disk of 1 MiB ("Fixed newstyle negotiation").
fn shake_hands(stream: &mut UnixStream) {
    let mut greeting = b"NBDMAGICIHAVEOPT".to_vec();
    greeting.extend([0, 3]);
    stream.write_all(&greeting).unwrap();
    stream.read_exact(&mut [0; 4]).unwrap();
    loop {
        let mut header = [0; 16];
        stream.read_exact(&mut header).unwrap();
        let option = u32::from_be_bytes(header[8..12].try_into().unwrap());
        let length = u32::from_be_bytes(header[12..].try_into().unwrap());
        stream.read_exact(&mut vec![0; length as usize]).unwrap();
        let mut reply = |kind: u32, data: &[u8]| {
            let mut bytes = 0x0003_e889_0455_65a9_u64.to_be_bytes().to_vec();
            bytes.extend([option, kind, data.len() as u32].map(u32::to_be_bytes).concat());
            bytes.extend(data);
            stream.write_all(&bytes).unwrap();
        };
        match option {
            7 => {
                let size = [&[0, 0][..], &MIB.to_be_bytes(), &5_u16.to_be_bytes()].concat();
                reply(3, &size);
                reply(1, &[]);
                return;
            }
            _ => reply(0x8000_0001, &[]),
        }
    }
}

/// Receives the next request, a read; returns its cookie.
fn request(stream: &mut UnixStream) -> Option<[u8; 8]> {
    let mut header = [0; 28];
    stream.read_exact(&mut header).ok()?;
    header[8..16].try_into().ok()
}

#[test]
fn hostile_or_silent_server_affects_no_other_disk() {
    let scratch = Scratch::new();
    let at = scratch.socket("liar");
    let listener = UnixListener::bind(&at).unwrap();
    let (release, released) = std::sync::mpsc::channel::<()>();
    let hostile_server = thread::spawn(move || {
        for fault in 0..4 {
            let (mut stream, _) = listener.accept().unwrap();
            shake_hands(&mut stream);
            let Some(cookie) = request(&mut stream) else { continue };
            let reply = [&0x6744_6698_u32.to_be_bytes()[..], &[0; 4], &cookie].concat();
            let _ = match fault {
                // Half of the requested data.
                0 => stream.write_all(&[&reply[..], &[1; 256]].concat()),
                1 => stream.write_all(&[0xff; 4096]),
                2 => stream.write_all(&[&reply[..8], &[7; 8]].concat()),
                // No reply until the test has observed the pending request.
                _ => released.recv().map_err(std::io::Error::other),
            };
        }
    });
    let weir = Serve::new(&scratch)
        .args(["-f", "raw", "--name", "liar", "--name", "good", "--qmp", &socket(&scratch), "--read-only"])
        // The option applies to remote images only, so not to the disk in memory.
        .args(["--open-timeout", "1m"])
        .args([uri(&at, "").as_str(), "memory:1M"])
        .start();
    for fault in 0..3 {
        wait_until(&scratch, |status| {
            let remote = &find(status, "disks", "liar")["server"];
            remote["connected"] == true && remote["reconnections"] == fault
        });
        weir.nbdsh(
            "liar",
            "try:\n    h.pread(512, 0)\n    raise SystemExit(1)\nexcept nbd.Error as e:\n    assert e.errnum",
        );
        weir.nbdsh("good", "assert h.pread(4096, 0) == bytes(4096)");
    }
    wait_until(&scratch, |status| find(status, "disks", "liar")["server"]["reconnections"] == 3);
    thread::scope(|scope| {
        let waiting = scope.spawn(|| {
            weir.nbdsh(
                "liar",
                "try:\n    h.pread(512, 0)\n    raise SystemExit(1)\nexcept nbd.Error as e:\n    \
                 assert e.errnum",
            );
        });
        // The age of the oldest request is reported, and disk `good` is served.
        wait_until(&scratch, |status| {
            find(status, "disks", "liar")["oldest-request"].as_u64() > Some(1_000_000)
        });
        weir.nbdsh("good", "assert h.pread(4096, 0) == bytes(4096)");
        release.send(()).unwrap();
        waiting.join().expect("the request fails after the server has ended");
    });
    hostile_server.join().unwrap();
    weir.stop();
}

#[test]
fn tls_with_certificates_and_with_a_pre_shared_key() {
    let scratch = Scratch::new();
    let authority = CertificateAuthority::new(&scratch, "authority");
    let (back_scratch, file) = (Scratch::new(), half_filled(&scratch));
    let certificates = ["--tls", "required", "--tls-certificates", authority.path(), "--tls-verify-peer"];
    let server = Serve::new(&back_scratch).on_tcp().args(certificates).args(["-f", "raw"]).arg(&file).start();
    let port = server.port();
    let place = |host: &str, more: &str| {
        format!("nbds://{host}:{port}/disk?tls-certificates={}{more}", authority.path())
    };
    let weir = in_front(&scratch, &place("127.0.0.1", ""), &["-f", "raw", "--reconnect-delay", "1m"]);
    weir.nbdsh("front", "h.pwrite(b's' * 100000, 5)\nassert h.pread(100000, 5) == b's' * 100000\nh.flush()");
    weir.stop();
    let refused = |image: &str| Serve::new(&scratch).args(["-f", "raw"]).arg(image).fails();
    let misnamed = refused(&place("127.0.0.1", "&tls-hostname=other"));
    assert_contains(&misnamed, &["TLS failed", "certificate verify failed: hostname mismatch"]);
    let other_authority = CertificateAuthority::new(&scratch, "stranger");
    let elsewhere = format!("nbds://127.0.0.1:{port}/disk?tls-certificates={}", other_authority.path());
    assert_contains(&refused(&elsewhere), &["TLS failed", "certificate verify failed"]);
    assert_contains(&refused(&format!("nbd://127.0.0.1:{port}/disk")), &["the server requires TLS"]);
    let nameless = place("127.0.0.1", "")
        .replace(authority.path(), text(&authority.without_client(&scratch, "nameless")));
    assert_contains(
        &refused(&nameless),
        &["closed the connection during TLS", "does it require a certificate?"],
    );
    let keys = scratch.file("keys.psk", "alice:00112233445566778899aabbccddeeff\n");
    // A server that does not know the key is rejected, whatever certificate it has.
    let by_key = format!("nbds://alice@127.0.0.1:{port}/disk?tls-psk-file={}", text(&keys));
    assert_contains(&refused(&by_key), &["the server presents a certificate instead of the pre-shared key"]);
    server.stop();
    let at = scratch.socket("back");
    let arguments = ["--tls=require", &format!("--tls-psk={}", text(&keys)), "file", text(&file)];
    let server = BackgroundNbdServer::nbdkit(&scratch, &at, &arguments);
    let place = format!("nbds+unix://alice@/?socket={}&tls-psk-file={}", text(&at), text(&keys));
    let weir = in_front(&scratch, &place, &["-f", "raw"]);
    weir.nbdsh("front", "assert h.pread(100000, 5) == b's' * 100000");
    weir.stop();
    let other = scratch.file("other.psk", "alice:ff112233445566778899aabbccddeeff\n");
    let unknown = refused(&place.replace(text(&keys), text(&other)));
    assert_contains(&unknown, &["TLS failed"]);
    server.crash();
}

#[test]
fn qcow2_over_nbd_is_read_by_both_tools() {
    let scratch = Scratch::new();
    let (image, at) = (scratch.path("disk.qcow2"), scratch.socket("back"));
    qemu_img(["create", "-q", "-f", "qcow2", "-o", "preallocation=full", text(&image), "8M"]).succeeds();
    let server = BackgroundNbdServer::qemu_nbd(&scratch, &at, &["-e", "8", "-f", "raw", text(&image)]);
    let back_uri = uri(&at, "");
    let weir = in_front(&scratch, &back_uri, &["-f", "qcow2"]);
    weir.nbdsh(
        "front",
        "h.pwrite(b'q' * 300000, 70000)\nh.flush()\nassert h.pread(300000, 70000) == b'q' * 300000",
    );
    weir.stop();
    let copy = scratch.path("copy.raw");
    weir_image(&["convert", "-f", "qcow2", "-O", "raw", &back_uri, text(&copy)]).succeeds();
    assert!(fs::read(&copy).unwrap()[70_000..370_000].iter().all(|&byte| byte == b'q'));
    let info = weir_image(&["info", "-f", "qcow2", "--output", "json", &back_uri]).json();
    assert_eq!(info["virtual-size"], json!(8 * MIB), "{info:#}");
    assert!(info["actual-size"].is_null(), "{info:#}");
    let refused = weir_image(&["convert", "-f", "raw", "-O", "raw", text(&copy), &back_uri]).fails();
    assert_contains(&refused, &["weir cannot create images there (create it first, and add -n)"]);
    weir_image(&["compare", "-f", "qcow2", "-F", "raw", &back_uri, text(&copy)]).succeeds();
    server.crash();
    weir_image(&["check", "-f", "qcow2", text(&image)]).succeeds();
    qemu_img(["check", "-f", "qcow2", text(&image)]).succeeds();
}

#[test]
fn remote_disk_is_added_resized_and_removed_over_qmp() {
    let scratch = Scratch::new();
    let (file, at) = (half_filled(&scratch), scratch.socket("back"));
    let server = BackgroundNbdServer::nbdkit(&scratch, &at, &["file", text(&file)]);
    let serve = Serve::new(&scratch).args(["--name", "m", "--qmp", &socket(&scratch), "--sandbox", "off"]);
    let weir = serve.arg("memory:1M").start();
    let mut qmp = Qmp::negotiated(&scratch.socket("qmp"));
    let place = json!({"type": "unix", "path": text(&at)});
    let node = json!({"driver": "nbd", "node-name": "n", "server": place, "reconnect-delay": 60, "open-timeout": 60});
    qmp.command("blockdev-add", node);
    let export = json!({"type": "nbd", "id": "n", "node-name": "n", "name": "n", "writable": true});
    qmp.command("block-export-add", export);
    weir.nbdsh("n", "h.pwrite(b'n' * 4096, 0)\nh.flush()");
    assert_eq!(fs::read(&file).unwrap()[0], b'n');
    let named = qmp.command("query-named-block-nodes", json!({}));
    assert!(named.as_array().unwrap().iter().any(|node| node["drv"] == "nbd"), "{named:#}");
    // nbdkit reports the size that the file has when a client connects.
    fs::File::options().write(true).open(&file).unwrap().set_len(16 * MIB).unwrap();
    let resize = |size: u64| json!({"node-name": "n", "size": size});
    let (_, refused) = qmp.command_error("block_resize", resize(12 * MIB));
    assert_contains(&refused, &["its size at the NBD server is 16777216 bytes"]);
    qmp.command("block_resize", resize(16 * MIB));
    let reported = status(&scratch, "0");
    assert_eq!(find(&reported, "disks", "n")["size"], json!(16 * MIB));
    qmp.command("block-export-del", json!({"id": "n"}));
    qmp.command("blockdev-del", json!({"node-name": "n"}));
    run_ok(
        &scratch,
        &[
            "disk",
            "add",
            "d",
            &uri(&at, ""),
            "-f",
            "raw",
            "--reconnect-delay",
            "1500ms",
            "--open-timeout",
            "1m",
        ],
    );
    weir.nbdsh("d", "assert h.pread(4096, 0) == b'n' * 4096");
    let listed = run_json(&scratch, &["status", "--json"]);
    assert_eq!(find(&listed, "disks", "d")["server"]["connected"], json!(true));
    weir.stop();
    server.crash();
}
