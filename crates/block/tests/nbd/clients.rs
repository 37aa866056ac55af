//! libnbd's and QEMU's clients in the clear.

use crate::server::{SIZE, Server};
use block::export::nbd::TlsPolicy;
use std::process::{Command, Output};

/// Runs a client from a Debian package.
pub(crate) fn run(package: &str, program: &str, arguments: &[&str]) -> Output {
    Command::new(program)
        .args(arguments)
        .output()
        .unwrap_or_else(|error| panic!("{program}: {error} (Debian package: {package})"))
}

/// Standard output of a client that has to succeed.
#[track_caller]
pub(crate) fn succeeds(package: &str, program: &str, arguments: &[&str]) -> String {
    let output = run(package, program, arguments);
    let errors = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{program} {arguments:?}: {errors}");
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// Both outputs of a client that has to fail.
#[track_caller]
pub(crate) fn fails(package: &str, program: &str, arguments: &[&str]) -> String {
    let output = run(package, program, arguments);
    let all = [output.stdout, output.stderr].concat();
    let all = String::from_utf8_lossy(&all).into_owned();
    assert!(!output.status.success(), "{program} {arguments:?} succeeded: {all}");
    all
}

pub(crate) const LIBNBD: &str = "libnbd-bin";
pub(crate) const QEMU: &str = "qemu-utils";

fn uri(socket: &str, export: &str) -> String {
    format!("nbd+unix:///{export}?socket={socket}")
}

#[test]
fn nbdinfo_sees_what_the_export_offers() {
    let server = Server::new(TlsPolicy::Off, None);
    let socket = server.listen_unix();
    let json = succeeds(LIBNBD, "nbdinfo", &["--json", &uri(&socket, "disk")]);
    for expect in [
        "\"protocol\": \"newstyle-fixed\"",
        "\"structured\": true",
        "\"export-name\": \"disk\"",
        "\"description\": \"a disk\"",
        "\"export-size\": 8388608",
        "\"base:allocation\"",
        "\"is_read_only\": false",
        "\"can_multi_conn\": true",
        "\"can_fast_zero\": true",
        "\"can_df\": true",
        "\"block_size_preferred\": 4096",
        "\"block_size_maximum\": 33554432",
    ] {
        assert!(json.contains(expect), "no {expect} in {json}");
    }
    let json = succeeds(LIBNBD, "nbdinfo", &["--json", &uri(&socket, "frozen")]);
    assert!(json.contains("\"is_read_only\": true") && json.contains("\"can_trim\": false"), "{json}");
}

#[test]
fn nbdinfo_lists_the_exports() {
    let server = Server::new(TlsPolicy::Off, None);
    let socket = server.listen_unix();
    let list = succeeds(LIBNBD, "nbdinfo", &["--list", &uri(&socket, "")]);
    for expect in ["export=\"\"", "export=\"disk\"", "export=\"frozen\"", "the default disk"] {
        assert!(list.contains(expect), "no {expect} in {list}");
    }
    fails(LIBNBD, "nbdinfo", &[&uri(&socket, "other")]);
    let unknown = fails(QEMU, "qemu-img", &["info", "-f", "raw", &uri(&socket, "other")]);
    assert!(unknown.contains("no export of this name"), "the server's message is shown: {unknown}");
}

#[test]
fn nbdcopy_there_and_back() {
    let server = Server::new(TlsPolicy::Off, None);
    let socket = server.listen_unix();
    let (from, to) = (server.scratch.0.join("from"), server.scratch.0.join("to"));
    let bytes: Vec<u8> =
        (0..SIZE as u32).map(|n| if n / 100_000 % 2 == 0 { 0 } else { (n % 251) as u8 }).collect();
    std::fs::write(&from, &bytes).unwrap();
    succeeds(LIBNBD, "nbdcopy", &["--flush", from.to_str().unwrap(), &uri(&socket, "")]);
    succeeds(LIBNBD, "nbdcopy", &[&uri(&socket, "disk"), to.to_str().unwrap()]);
    assert!(std::fs::read(&to).unwrap() == bytes, "what came back is not what was sent");

    let map = succeeds(LIBNBD, "nbdinfo", &["--map", &uri(&socket, "disk")]);
    assert!(map.contains("data") && map.contains("hole,zero"), "{map}");
}

#[test]
fn qemu_io_writes_zeroes_discards_and_reads() {
    let server = Server::new(TlsPolicy::Off, None);
    let socket = server.listen_unix();
    let disk = uri(&socket, "disk");
    let commands = [
        "write -P 0x11 0 1M",
        "write -f -P 0x22 1M 64k",
        "write -z 64k 64k",
        "write -z -u 128k 4k",
        "discard 256k 64k",
        "flush",
        "read -P 0x11 0 64k",
        "read -P 0 64k 68k",
        "read -P 0 256k 64k",
        "read -P 0x22 1M 64k",
        "read -P 0x11 513 1021",
    ];
    let mut arguments = vec!["-f", "raw"];
    commands.iter().for_each(|command| arguments.extend(["-c", command]));
    arguments.push(&disk);
    let output = succeeds(QEMU, "qemu-io", &arguments);
    assert!(!output.contains("verification failed") && !output.contains("error"), "{output}");

    let frozen = uri(&socket, "frozen");
    let refused = fails(QEMU, "qemu-io", &["-f", "raw", "-c", "write 0 512", &frozen]);
    assert!(refused.contains("read-only") || refused.contains("Permission"), "{refused}");
}

#[test]
fn qemu_img_converts_compares_and_maps() {
    let server = Server::new(TlsPolicy::Off, None);
    let socket = server.listen_unix();
    let disk = uri(&socket, "disk");
    let image = server.scratch.0.join("image");
    let bytes: Vec<u8> = (0..SIZE as u32).map(|n| if n < 1 << 20 { (n % 253) as u8 } else { 0 }).collect();
    std::fs::write(&image, bytes).unwrap();
    let image = image.to_str().unwrap();
    succeeds(QEMU, "qemu-img", &["convert", "-n", "-f", "raw", "-O", "raw", image, &disk]);
    succeeds(QEMU, "qemu-img", &["compare", "-f", "raw", "-F", "raw", image, &disk]);
    let map = succeeds(QEMU, "qemu-img", &["map", "-f", "raw", "--output=json", &disk]);
    assert!(map.contains("\"zero\": true") && map.contains("\"zero\": false"), "{map}");
    let info = succeeds(QEMU, "qemu-img", &["info", "-f", "raw", &disk]);
    assert!(info.contains("8 MiB"), "{info}");
}
