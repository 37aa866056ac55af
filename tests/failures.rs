//! A disk that fails while it is served: the client gets the fitting error, and the daemon goes on.

use std::fs;

use crate::harness::{MIB, Scratch, Serve, nbdsh, nbdsh_command, need_root, text};

/// Becomes the daemon in a mount namespace where an image of 8 MiB lies on a tmpfs of 2 at `$0`.
const ON_A_SMALL_FILE_SYSTEM: &str =
    r#"mount -t tmpfs -o size=2M tmpfs "$0" && truncate -s 8M "$0/disk.raw" && exec "$@""#;

#[test]
fn a_full_file_system_is_no_space_for_the_client() {
    let scratch = Scratch::new();
    need_root("mounts");
    let mount = scratch.path("small");
    fs::create_dir(&mount).unwrap();
    let weir = Serve::new(&scratch)
        .behind(["unshare", "--mount", "sh", "-c", ON_A_SMALL_FILE_SYSTEM, text(&mount)])
        .arg(mount.join("disk.raw"))
        .start();
    let script = "
M = 1 << 20
written = 0
try:
    while written < 8 * M:
        h.pwrite(b'x' * 65536, written)
        written += 65536
    raise AssertionError('8 MiB fit into 2')
except nbd.Error as error:
    assert error.errno == 'ENOSPC', error
assert M <= written <= 2 * M, written
# What was written is there, and making room helps.
assert h.pread(65536, written - 65536) == b'x' * 65536
h.trim(M, 0)
h.pwrite(b'y' * 65536, written)
assert h.pread(65536, written) == b'y' * 65536
";
    weir.nbdsh("disk", script);
}

#[test]
fn a_file_that_was_truncated_is_an_error_and_never_old_memory() {
    let scratch = Scratch::new();
    for cache in ["writeback", "none"] {
        let image = scratch.filled("disk.raw", 4 * MIB);
        let weir = Serve::new(&scratch).arg(&image).args(["--cache", cache]).start();
        let ready = scratch.path("truncated");
        nbdsh(
            "
import os
h.connect_uri(arguments[0])
assert any(h.pread(4096, 3 << 20))
os.truncate(arguments[1], 1 << 20)
try:
    assert not any(h.pread(4096, 3 << 20)), 'old memory'
except nbd.Error as error:
    assert error.errno in ('EIO', 'EINVAL'), error
assert any(h.pread(4096, 0)), 'the rest is still served'
",
            [weir.uri("disk").as_str(), text(&image), text(&ready)],
        );
    }
}

#[test]
fn a_client_that_is_killed_in_the_middle_of_its_writes_harms_nobody() {
    use std::{
        io::{BufRead as _, BufReader},
        process::Stdio,
    };
    let weir = Serve::alone().args(["memory:64M", "--delay", "write=20ms"]).start();
    let script = format!(
        "
h.connect_uri({:?})
for number in range(64):
    h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(b'k' * 1000000)), number * 1000000)
print('busy', flush=True)
while h.aio_in_flight():
    h.poll(-1)
",
        weir.uri("memory")
    );
    let mut victim = nbdsh_command(&script).stdout(Stdio::piped()).spawn().expect("nbdsh was found");
    let mut line = String::new();
    BufReader::new(victim.stdout.take().expect("piped")).read_line(&mut line).expect("it prints");
    assert_eq!(line.trim(), "busy");
    victim.kill().expect("it is ours");
    victim.wait().expect("it is ours");
    let script = "
h.pwrite(b'survivor', 0)
h.flush()
assert h.pread(8, 0) == b'survivor'
";
    weir.nbdsh("memory", script);
}
