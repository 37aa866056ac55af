//! The five cache modes: use of the page cache, flushes of the device, and the integrity of the
//! data.
//!
//! A loop device counts the flushes that reach it.

use std::fs;

use nix::libc::O_DIRECT;

use crate::harness::{LoopDevice, MIB, Scratch, Serve, Weir, nbdsh, text};

/// Mode, true if it bypasses the page cache, flushes caused by 16 writes, flushes caused by a FLUSH
/// after them.
const MODES: [(&str, bool, u64, u64); 5] = [
    ("writeback", false, 0, 1),
    ("writethrough", false, 16, 0),
    ("none", true, 0, 1),
    ("directsync", true, 16, 0),
    ("unsafe", false, 0, 0),
];

/// True if the daemon has a file open with O_DIRECT (the `flags` of proc_pid_fdinfo(5) are octal).
fn opens_directly(weir: &Weir, path: &str) -> bool {
    let process = format!("/proc/{}", weir.pid());
    let descriptors = fs::read_dir(format!("{process}/fd")).unwrap().map(|entry| entry.unwrap());
    let disk_descriptors = descriptors
        .filter(|entry| fs::read_link(entry.path()).is_ok_and(|target| target.to_str() == Some(path)));
    let flags: Vec<i32> = disk_descriptors
        .map(|entry| {
            let info =
                fs::read_to_string(format!("{process}/fdinfo/{}", entry.file_name().display())).unwrap();
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap();
            i32::from_str_radix(flags.trim(), 8).unwrap()
        })
        .collect();
    assert!(!flags.is_empty(), "the daemon has {path} open");
    flags.iter().any(|flags| flags & O_DIRECT != 0)
}

#[test]
fn modes_use_or_bypass_the_page_cache() {
    let scratch = Scratch::new();
    let modes = MODES.map(|(mode, direct, ..)| (mode, direct));
    // `off` is an alias of `none`.
    for (mode, direct) in modes.into_iter().chain([("off", true)]) {
        let image = scratch.sparse("disk.raw", MIB);
        let weir = Serve::new(&scratch).arg(&image).args(["--cache", mode]).start();
        assert_eq!(opens_directly(&weir, text(&image)), direct, "{mode}");
    }
}

#[test]
fn modes_flush_as_documented() {
    let scratch = Scratch::new();
    let device = LoopDevice::attach(&scratch.sparse("device", 8 * MIB), 512);
    for (mode, _, by_writes, by_flush) in MODES {
        let weir = Serve::new(&scratch).arg(device.path()).args(["--cache", mode, "--name", "disk"]).start();
        let before = device.flushes();
        let uri = weir.uri("disk");
        // One at a time: writes in flight together may share a flush.
        nbdsh("h.connect_uri(arguments[0])\nfor i in range(16): h.pwrite(b'x' * 4096, i * 65536)", [&uri]);
        let written = device.flushes() - before;
        nbdsh("h.connect_uri(arguments[0])\nh.pwrite(b'y' * 4096, 0)\nh.flush()", [&uri]);
        let flushed = device.flushes() - before - written;
        if by_writes == 0 {
            assert_eq!((written, flushed), (0, by_flush), "{mode}");
        } else {
            assert!(written >= by_writes, "{mode}: {written} flushes for {by_writes} writes");
        }
        weir.stop();
    }
}

#[test]
fn fua_is_durable_in_every_mode_but_unsafe() {
    let scratch = Scratch::new();
    let device = LoopDevice::attach(&scratch.sparse("device", 8 * MIB), 512);
    for (mode, ..) in MODES {
        let weir = Serve::new(&scratch).arg(device.path()).args(["--cache", mode, "--name", "disk"]).start();
        let before = device.flushes();
        weir.nbdsh("disk", "for i in range(8): h.pwrite(b'x' * 4096, i * 65536, nbd.CMD_FLAG_FUA)");
        let flushes = device.flushes() - before;
        assert_eq!(flushes >= 8, mode != "unsafe", "{mode}: {flushes} flushes for 8 writes with FUA");
        weir.stop();
    }
}

#[test]
fn any_offset_and_length_gives_the_bytes_of_a_plain_array() {
    let scratch = Scratch::new();
    for (mode, ..) in MODES {
        // The size is not a multiple of any sector size.
        let image = scratch.sparse("disk.raw", 3 * MIB + 777);
        let weir = Serve::new(&scratch).arg(&image).args(["--cache", mode]).start();
        nbdsh(MODEL, [weir.uri("disk").as_str(), text(&scratch.path("expected"))]);
        weir.stop();
        assert!(
            fs::read(&image).unwrap() == fs::read(scratch.path("expected")).unwrap(),
            "{mode}: the file differs"
        );
    }
}

#[test]
fn tmpfs_is_served_or_the_error_names_working_modes() {
    let scratch = Scratch::new();
    let directory =
        tempfile::Builder::new().prefix("weir.").tempdir_in("/dev/shm").expect("/dev/shm is a tmpfs");
    let image = directory.path().join("disk.raw");
    for (mode, direct, ..) in MODES {
        fs::File::create(&image).and_then(|file| file.set_len(MIB)).unwrap();
        let serve = || Serve::new(&scratch).arg(&image).args(["--cache", mode]);
        // Support of O_DIRECT on tmpfs depends on the kernel (6.6 and newer have it).
        if direct && !takes_o_direct(&image) {
            let stderr = serve().fails();
            crate::harness::assert_contains(&stderr, &["disk.raw", "O_DIRECT", mode, "writeback"]);
            continue;
        }
        let weir = serve().start();
        weir.nbdsh(
            "disk",
            "h.pwrite(b'unaligned', 4093)
h.flush()
assert h.pread(11, 4092) == b'\\0unaligned\\0'",
        );
        weir.stop();
        assert_eq!(fs::read(&image).unwrap()[4093..4102], *b"unaligned", "{mode}");
    }
}

fn takes_o_direct(path: &std::path::Path) -> bool {
    use std::os::unix::fs::OpenOptionsExt as _;
    fs::File::options().read(true).custom_flags(O_DIRECT).open(path).is_ok()
}

/// Random reads, writes, zeroes and flushes at random offsets, several in flight where they do not
/// overlap, against a bytearray; the expected final content is written to the second argument.
const MODEL: &str = r#"
import random
random.seed(20)
h.connect_uri(arguments[0])
size = h.get_size()
model = bytearray(size)

def place(most):
    length = random.choice([1, 2, 511, 512, 513, 4095, 4096, 4097, 8192, random.randrange(1, most)])
    offset = random.choice([random.randrange(size), random.randrange(size) & ~511, random.randrange(size) & ~4095, size - length])
    offset = min(offset, size - length)
    return offset, length

def one_at_a_time(turns):
    for turn in range(turns):
        offset, length = place(200_000)
        kind = random.random()
        if kind < 0.5:
            data = random.randbytes(length)
            h.pwrite(data, offset, random.choice([0, nbd.CMD_FLAG_FUA]))
            model[offset:offset + length] = data
        elif kind < 0.6:
            h.zero(length, offset, random.choice([0, nbd.CMD_FLAG_NO_HOLE]))
            model[offset:offset + length] = bytes(length)
        elif kind < 0.65:
            h.flush()
        else:
            assert h.pread(length, offset) == model[offset:offset + length], (turn, offset, length)

def neighbours_at_once(turns):
    # Writes that share sectors but no byte: each must survive read-modify-write of whole sectors by concurrent writes.
    for turn in range(turns):
        at = random.randrange(size - 20_000)
        cookies = []
        pieces = []
        while len(pieces) < 24:
            length = random.randrange(1, 800)
            pieces.append((at, random.randbytes(length)))
            at += length + random.choice([0, 0, 1, 100])
            if at > size - 1000:
                break
        random.shuffle(pieces)
        for offset, data in pieces:
            cookies.append(h.aio_pwrite(nbd.Buffer.from_bytearray(bytearray(data)), offset))
            model[offset:offset + len(data)] = data
        while cookies:
            cookies = [cookie for cookie in cookies if not h.aio_command_completed(cookie)]
            if cookies:
                h.poll(-1)
        start = min(offset for offset, data in pieces)
        assert h.pread(at - start, start) == model[start:at], turn

one_at_a_time(300)
neighbours_at_once(60)
one_at_a_time(100)
h.flush()
assert h.pread(size, 0) == model
open(arguments[1], 'wb').write(model)
"#;
