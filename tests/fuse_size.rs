//! Size of a disk's file over FUSE in bytes, its allocated space, and space reserved for it.

use std::{
    fs::{self, OpenOptions},
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
};

use serde_json::json;

use crate::{
    fuse::{can_mount, mount_point, python},
    harness::{MIB, Qmp, Scratch, Serve, Weir, pattern, qemu_img, text},
};

/// Calls `fallocate(2)`, and raises OSError as `os` functions do.
const FALLOCATE: &str = r#"
import ctypes, errno, os, sys
KEEP_SIZE, PUNCH_HOLE, ZERO_RANGE = 1, 2, 16
libc = ctypes.CDLL(None, use_errno=True)
libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
def fallocate(fd, mode, offset, length):
    if libc.fallocate64(fd, mode, offset, length) != 0:
        raise OSError(ctypes.get_errno(), "fallocate")
def refused(number, *arguments):
    try:
        fallocate(*arguments)
    except OSError as error:
        assert error.errno == number, error
    else:
        raise AssertionError(f"fallocate{arguments} should have failed")
"#;

/// Serves a new image of this size; returns the image and the file of the export.
fn serve(scratch: &Scratch, format: &str, size: &str, options: &[&str]) -> (Weir, PathBuf, PathBuf) {
    let (image, file) =
        (scratch.path(&format!("disk.{format}")), mount_point(scratch, &format!("{format}.file")));
    qemu_img(["create", "-q", "-f", format]).arg(&image).arg(size).succeeds();
    let weir = Serve::new(scratch)
        .arg(&image)
        .args(["--format", format, "--fuse", &format!("{},growable", text(&file))])
        .args(options)
        .start();
    (weir, image, file)
}

#[test]
fn file_ends_at_any_byte_and_grows_with_zeroes() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    for (format, cache) in [("raw", "writeback"), ("raw", "none"), ("qcow2", "writeback"), ("qcow2", "none")]
    {
        let _ = fs::remove_file(scratch.path(&format!("disk.{format}")));
        let (weir, image, file) = serve(&scratch, format, "1M", &["--cache", cache]);
        python(
            r#"
import os, sys
path = sys.argv[1]
fd = os.open(path, os.O_RDWR)
def size():
    assert os.fstat(fd).st_size == os.stat(path).st_size == os.lseek(fd, 0, os.SEEK_END)
    return os.fstat(fd).st_size
os.pwrite(fd, b"x" * 1048576, 0)
for cut, end in [(1000003, 1048576), (700001, 700003), (700000, 700400), (5000, 1048576), (4097, 5003), (1, 513), (0, 3)]:
    os.pwrite(fd, b"y" * (size() - cut), cut)
    os.ftruncate(fd, cut)
    assert size() == cut and os.pread(fd, 1 << 21, 0)[cut:] == b""
    os.ftruncate(fd, end)
    assert size() == end, (cut, end, size())
    assert os.pread(fd, 1 << 21, cut) == bytes(end - cut), (cut, end)
    os.ftruncate(fd, 1048576)
    assert os.pread(fd, 1 << 21, cut) == bytes(1048576 - cut), (cut, end)
# Writes past the end, and appended ones, set the size in bytes.
os.ftruncate(fd, 0)
os.pwrite(fd, b"a" * 10, 1000)
assert size() == 1010
append = os.open(path, os.O_WRONLY | os.O_APPEND)
for length in (1, 7, 512, 4095):
    assert os.write(append, b"b" * length) == length
assert size() == 1010 + 4615 and os.pread(fd, 1 << 20, 0) == bytes(1000) + b"a" * 10 + b"b" * 4615
emptied = os.open(path, os.O_RDWR | os.O_TRUNC)
assert size() == 0 and os.pread(fd, 1000, 0) == b""
os.write(emptied, b"the end")
assert size() == 7
"#,
            &[text(&file)],
        );
        weir.stop();
        let mut content = fs::read(&image).expect("the file exists");
        if format == "raw" {
            assert_eq!(content, b"the end");
        } else {
            // Sizes of the image are whole sectors.
            let raw = scratch.path("content");
            qemu_img(["convert", "-f", format, "-O", "raw"]).arg(&image).arg(&raw).succeeds();
            content = fs::read(&raw).expect("it was made");
            assert_eq!(content.len(), 512);
            assert!(content.starts_with(b"the end\0") && content[7..] == [0; 505]);
        }
    }
}

#[test]
fn other_exports_see_whole_sectors() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let control = scratch.socket("qmp");
    let (_weir, _, file) = serve(&scratch, "qcow2", "1M", &["--qmp", &format!("unix:{}", text(&control))]);
    let seen = OpenOptions::new().read(true).write(true).open(&file).expect("the file can be opened");
    seen.write_all_at(&[7; 4096], 0).expect("the range is inside of the file");
    seen.set_len(1000).expect("it is growable");
    let mut qmp = Qmp::negotiated(&control);
    let mut size = || {
        let nodes = qmp.command("query-named-block-nodes", json!({}));
        nodes[0]["image"]["virtual-size"].as_u64()
    };
    assert_eq!((seen.metadata().expect("it is open").len(), size()), (1000, Some(1024)));
    // A new size that another client sets applies to the file too.
    qmp.command("block_resize", json!({ "node-name": "disk", "size": 8192 }));
    assert_eq!(seen.metadata().expect("it is open").len(), 8192);
    let mut found = [1; 7192];
    seen.read_exact_at(&mut found, 1000).expect("the range is inside of the file");
    assert_eq!(found, [0; 7192]);
    let (_, refused) = qmp.command_error("block_resize", json!({ "node-name": "disk", "size": 1000 }));
    assert!(refused.contains("multiple of 512"), "{refused}");
}

/// Allocated bytes of a file.
fn space(path: &Path) -> u64 {
    fs::metadata(path).expect("the file exists").blocks() * 512
}

#[test]
fn file_reports_the_allocated_space_of_its_image() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    for format in ["raw", "qcow2"] {
        let (weir, image, file) = serve(&scratch, format, "1G", &[]);
        assert!(space(&file) < MIB, "{format}: an empty disk has {} allocated bytes", space(&file));
        let seen = OpenOptions::new().write(true).open(&file).expect("the file can be opened");
        seen.write_all_at(&pattern(5 * MIB as usize), 100 * MIB).expect("the range is inside of the file");
        seen.sync_all().expect("there is room");
        let taken = space(&file);
        assert!((5 * MIB..7 * MIB).contains(&taken), "{format}: {taken} of 5 MiB");
        assert_eq!(taken, space(&image), "{format}");
        seen.set_len(1000).expect("it is growable");
        assert!(space(&file) < MIB, "{format}: {} of 1000 bytes", space(&file));
        weir.stop();
    }
    // Allocated ranges of a backing file count as allocated.
    let base = scratch.filled("base.raw", 3 * MIB);
    let overlay = scratch.path("overlay.qcow2");
    qemu_img(["create", "-q", "-f", "qcow2", "-F", "raw", "-b", text(&base)]).arg(&overlay).succeeds();
    let file = mount_point(&scratch, "overlay.file");
    let _weir = Serve::new(&scratch).arg(&overlay).args(["--format", "qcow2", "--fuse", text(&file)]).start();
    assert_eq!(space(&file), 3 * MIB, "no more than the disk's size");
}

#[test]
fn fallocate_reserves_space_or_is_unsupported() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    for cache in ["writeback", "none"] {
        let _ = fs::remove_file(scratch.path("disk.raw"));
        let (weir, image, file) = serve(&scratch, "raw", "1M", &["--cache", cache]);
        let script = r#"
mib, fd = 1 << 20, os.open(sys.argv[1], os.O_RDWR)
def seen():
    status = os.fstat(fd)
    return status.st_size, status.st_blocks * 512
assert seen()[1] < 65536
os.pwrite(fd, b"x" * 1000, 100)
fallocate(fd, 0, 1, mib - 1)
size, space = seen()
assert size == mib and space >= mib, (size, space)
assert os.pread(fd, 1200, 0) == bytes(100) + b"x" * 1000 + bytes(100)
# Past the end: it grows, in bytes.
fallocate(fd, 0, mib - 100, mib + 7)
size, space = seen()
assert size == 2 * mib - 93 and space >= 2 * mib - 4096, (size, space)
# Or keeps its size.
fallocate(fd, KEEP_SIZE, size, 2 * mib)
assert seen()[0] == size and seen()[1] >= size + 2 * mib, seen()
os.ftruncate(fd, size - 1)
assert seen()[1] < size + mib, "a cut gives the space back"
os.ftruncate(fd, size)
before = seen()[1]
fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 65536, mib)
assert seen() == (size, before - mib), (seen(), before)
fallocate(fd, PUNCH_HOLE | KEEP_SIZE, size - 10, mib)
assert seen()[0] == size
os.pwrite(fd, b"z" * 20, size - 20)
before = seen()[1]
fallocate(fd, ZERO_RANGE | KEEP_SIZE, size - 10, mib)
assert seen()[0] == size and seen()[1] >= before + mib - 8192 and os.pread(fd, 100, size - 20) == b"z" * 10 + bytes(10)
fallocate(fd, ZERO_RANGE, size - 15, 100)
assert seen()[0] == size + 85 and os.pread(fd, 200, size - 20) == b"z" * 5 + bytes(100)
for mode in (PUNCH_HOLE, 8, 32, 64):
    refused(errno.EOPNOTSUPP, fd, mode, 0, 4096)
refused(errno.EFBIG, fd, 0, mib, (1 << 63) - mib - 1)
assert seen()[0] == size + 85
"#;
        python(&format!("{FALLOCATE}{script}"), &[text(&file)]);
        weir.stop();
        assert_eq!(fs::metadata(&image).expect("the file exists").len(), 2 * MIB - 93 + 85);
    }
    let (_weir, _, file) = serve(&scratch, "qcow2", "1M", &[]);
    let script = r#"
mib, fd = 1 << 20, os.open(sys.argv[1], os.O_RDWR)
for mode in (0, KEEP_SIZE):
    for offset in (0, mib - 10, mib, 5 * mib):
        refused(errno.EOPNOTSUPP, fd, mode, offset, 4096)
        assert os.fstat(fd).st_size == mib, "nothing has grown"
# The C library's fallback writes zeroes instead.
os.posix_fallocate(fd, mib - 100, mib)
assert os.fstat(fd).st_size == 2 * mib - 100
os.pwrite(fd, b"x" * 2 * mib, 0)
fallocate(fd, ZERO_RANGE, 2 * mib - 7, 1000)
assert os.fstat(fd).st_size == 2 * mib + 993
assert os.pread(fd, 4096, 2 * mib - 10) == b"xxx" + bytes(1000)
fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 100, 4 * mib)
assert os.fstat(fd).st_size == 2 * mib + 993 and not any(os.pread(fd, 4 * mib, 100))
"#;
    python(&format!("{FALLOCATE}{script}"), &[text(&file)]);
}

#[test]
fn fixed_size_disk_reserves_within_its_size() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let (image, file) = (scratch.sparse("disk.raw", MIB), mount_point(&scratch, "file"));
    let _weir = Serve::new(&scratch).arg(&image).args(["--fuse", text(&file)]).start();
    let script = r#"
mib, fd = 1 << 20, os.open(sys.argv[1], os.O_RDWR)
for mode in (0, KEEP_SIZE):
    refused(errno.ENOSPC, fd, mode, 0, mib + 1)
    refused(errno.ENOSPC, fd, mode, mib, 1)
assert os.fstat(fd).st_blocks < 128
fallocate(fd, 0, 0, mib)
assert os.fstat(fd).st_blocks * 512 >= mib and os.fstat(fd).st_size == mib
"#;
    python(&format!("{FALLOCATE}{script}"), &[text(&file)]);
}

#[test]
fn upgrade_keeps_the_size_in_bytes() {
    if !can_mount() {
        return;
    }
    let scratch = Scratch::new();
    let (image, file) = (scratch.path("disk.qcow2"), mount_point(&scratch, "file"));
    qemu_img(["create", "-q", "-f", "qcow2"]).arg(&image).arg("1M").succeeds();
    let control = format!("unix:{}", text(&scratch.socket("the-control")));
    let serve = || {
        Serve::new(&scratch)
            .arg(&image)
            .args(["--format", "qcow2", "--fuse", &format!("{},growable", text(&file))])
            .env("WEIR_QMP", &control)
    };
    let old = serve().start();
    let seen = OpenOptions::new().read(true).write(true).open(&file).expect("the file can be opened");
    seen.write_all_at(&[7; 4096], 0).expect("the range is inside of the file");
    seen.set_len(1000).expect("it is growable");
    let new = serve().arg("--takeover").start();
    let (status, log) = old.wait();
    assert!(status.success(), "{log}");
    let size = || seen.metadata().expect("it is open").len();
    assert_eq!(size(), 1000);
    seen.write_all_at(b"the end", 1003).expect("it is growable");
    assert_eq!(size(), 1010);
    seen.set_len(4096).expect("it is growable");
    let mut found = [1; 3096];
    seen.read_exact_at(&mut found, 1000).expect("the range is inside of the file");
    assert!(found.starts_with(b"\0\0\0the end") && found[10..] == [0; 3086]);
    drop(seen);
    new.stop();
}
