//! A disk as a file of the host: its content, its permissions, and its removal when the daemon
//! ends.
//!
//! Needs `/dev/fuse` and the right to mount. Without them the tests say so and pass.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{Read as _, Write as _},
    os::unix::fs::{FileExt as _, MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::mpsc,
    thread,
    time::{Duration, Instant},
};

use nix::{
    libc,
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use serde_json::json;

use crate::harness::{
    DEADLINE, LoopDevice, MIB, Qmp, Scratch, Serve, TestClient, Weir, assert_contains, children, need_root,
    pattern, qemu_img, text, wait_for_programs,
};

/// Returns from the test if mounting is not possible, as in some containers.
macro_rules! need_fuse {
    () => {
        if !can_mount() {
            return;
        }
    };
}

#[allow(clippy::print_stderr, reason = "a test that does not run says so")]
pub(crate) fn can_mount() -> bool {
    let device = OpenOptions::new().read(true).write(true).open("/dev/fuse");
    let may_mount =
        Command::new("unshare").args(["--mount", "true"]).status().is_ok_and(|status| status.success());
    if device.is_err() || !may_mount {
        eprintln!(
            "skipped: /dev/fuse cannot be opened here, or nothing be mounted (run as root, with the device)"
        );
    }
    device.is_ok() && may_mount
}

/// An empty file as a mount point.
pub(crate) fn mount_point(scratch: &Scratch, name: &str) -> PathBuf {
    scratch.file(name, "")
}

fn serve(scratch: &Scratch, image: &Path, file: &Path, options: &str) -> Serve {
    Serve::new(scratch).arg(image).arg("--fuse").arg(format!("{}{options}", text(file)))
}

fn is_mounted(file: &Path) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").expect("procfs is mounted");
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(text(file)))
}

/// Waits until `file` is not a mount point any more; the kernel signals changes by `poll`.
#[track_caller]
pub(crate) fn wait_until_unmounted(file: &Path) {
    use nix::poll::{PollFd, PollFlags, poll};
    use std::os::fd::AsFd as _;
    let until = Instant::now() + DEADLINE;
    let mounts = File::open("/proc/self/mounts").expect("procfs is mounted");
    while is_mounted(file) {
        assert!(Instant::now() < until, "{} is still mounted", file.display());
        let mut polled = [PollFd::new(mounts.as_fd(), PollFlags::POLLPRI)];
        poll(&mut polled, 1000_u16).expect("it can be polled");
    }
}

pub(crate) fn python(script: &str, arguments: &[&str]) -> String {
    TestClient::new("python3").args(["-c", script]).args(arguments).succeeds()
}

fn direct() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).custom_flags(libc::O_DIRECT);
    options
}

#[test]
fn file_has_the_content_of_the_disk() {
    need_fuse!();
    let scratch = Scratch::new();
    let content = scratch.filled("content.raw", 8 * MIB + 4096);
    for format in ["raw", "qcow2"] {
        let (image, file) =
            (scratch.path(&format!("disk.{format}")), mount_point(&scratch, &format!("{format}.file")));
        qemu_img(["convert", "-O", format]).arg(&content).arg(&image).succeeds();
        let weir = serve(&scratch, &image, &file, "").arg("--format").arg(format).start();
        assert_eq!(fs::metadata(&file).expect("the file exists").len(), 8 * MIB + 4096);
        qemu_img(["compare", "-f", "raw", "-F", "raw"]).arg(&content).arg(&file).succeeds();
        let copy = scratch.path("copy.qcow2");
        qemu_img(["convert", "-f", "raw", "-O", "qcow2"]).arg(&file).arg(&copy).succeeds();
        qemu_img(["compare", "-f", "raw", "-F", "qcow2"]).arg(&content).arg(&copy).succeeds();
        // Overwrite the existing content.
        let zeroes = scratch.sparse("zeroes.raw", 8 * MIB + 4096);
        qemu_img(["convert", "-n", "-f", "raw", "-O", "raw"]).arg(&zeroes).arg(&file).succeeds();
        qemu_img(["convert", "-n", "-f", "raw", "-O", "raw", "-t", "none"])
            .arg(&content)
            .arg(&file)
            .succeeds();
        weir.stop();
        assert!(!is_mounted(&file));
        qemu_img(["compare", "-f", "raw", "-F", format]).arg(&content).arg(&image).succeeds();
        assert_eq!(fs::metadata(&file).expect("the mount point is a file").len(), 0);
    }
}

#[test]
fn writes_are_read_back() {
    need_fuse!();
    let scratch = Scratch::new();
    let file = mount_point(&scratch, "file");
    let image = scratch.sparse("disk.raw", 32 * MIB);
    let _weir = serve(&scratch, &image, &file, "").args(["--cache", "none"]).start();
    for (name, options) in [
        ("direct", &["--ioengine=io_uring", "--direct=1", "--iodepth=32", "--bs=4k"][..]),
        (
            "libaio",
            &["--ioengine=libaio", "--direct=1", "--iodepth=16", "--bsrange=512-60k", "--blockalign=512"],
        ),
        (
            "large",
            &["--ioengine=io_uring", "--direct=1", "--iodepth=4", "--bsrange=512k-3m", "--blockalign=4k"],
        ),
        (
            "buffered",
            &["--ioengine=psync", "--direct=0", "--numjobs=4", "--bsrange=512-60k", "--offset_increment=8M"],
        ),
        ("mapped", &["--ioengine=mmap", "--bs=4k"]),
    ] {
        TestClient::new("fio")
            .arg(format!("--name={name}"))
            .args(options)
            .args(["--rw=randwrite", "--io_size=24M", "--verify=crc32c", "--verify_fatal=1"])
            .args(["--do_verify=1", "--randseed=42", "--fsync=100", "--serialize_overlap=1"])
            .arg(if name == "buffered" { "--size=8M" } else { "--size=32M" })
            .arg(format!("--filename={}", text(&file)))
            .arg(format!("--aux-path={}", scratch.path("").display()))
            .succeeds();
    }
}

#[test]
fn file_system_on_the_exported_file() {
    need_fuse!();
    need_root("loop devices");
    let scratch = Scratch::new();
    let (image, file) = (scratch.path("disk.qcow2"), mount_point(&scratch, "file"));
    qemu_img(["create", "-q", "-f", "qcow2"]).arg(&image).arg("64M").succeeds();
    let weir = serve(&scratch, &image, &file, "").start();
    let device = LoopDevice::attach(&file, 512);
    TestClient::new("mkfs.ext4").args(["-q", text(device.path())]).succeeds();
    let directory = scratch.path("mount");
    fs::create_dir(&directory).expect("the directory can be created");
    let mount = || TestClient::new("mount").args([text(device.path()), text(&directory)]).succeeds();
    let umount = || {
        wait_for_programs();
        TestClient::new("umount").args([text(&directory)]).succeeds()
    };
    mount();
    let content = pattern(20 * MIB as usize);
    fs::write(directory.join("one"), &content).expect("there is room");
    fs::write(directory.join("two"), &content).expect("there is room");
    umount();
    mount();
    assert!(fs::read(directory.join("one")).expect("the file exists") == content);
    fs::remove_file(directory.join("two")).expect("the file exists");
    TestClient::new("fstrim").args([text(&directory)]).succeeds();
    umount();
    TestClient::new("e2fsck").args(["-fn", text(device.path())]).succeeds();
    drop(device);
    weir.stop();
    qemu_img(["check"]).arg(&image).succeeds();
}

/// The threads of the export set `PR_SET_IO_FLUSHER`. Under a loop device they could otherwise wait
/// for memory that only they can free.
#[test]
fn threads_set_io_flusher() {
    need_fuse!();
    let scratch = Scratch::new();
    let (image, file) = (scratch.sparse("disk.raw", 8 * MIB), mount_point(&scratch, "file"));
    let weir = serve(&scratch, &image, &file, "").args(["--log", "debug"]).start();
    // A thread sets the flag before its first reply.
    assert_eq!(fs::read(&file).expect("it is served").len() as u64, 8 * MIB);
    // Needs CAP_SYS_RESOURCE, which is capability 24.
    let status = fs::read_to_string("/proc/self/status").expect("procfs is mounted");
    let rights = status.lines().find_map(|line| line.strip_prefix("CapEff:")).expect("it has rights");
    let rights = u64::from_str_radix(rights.trim(), 16).expect("hexadecimal");
    if rights & 1 << 24 == 0 {
        weir.wait_for_log("this thread may wait for its own file");
        return;
    }
    // PF_MEMALLOC_NOIO and PF_LOCAL_THROTTLE (linux/sched.h), which PR_SET_IO_FLUSHER sets.
    const FLAGS: u64 = 0x8_0000 | 0x10_0000;
    let flags = |thread: fs::DirEntry| {
        let stat = fs::read_to_string(thread.path().join("stat")).expect("it does not end");
        // `flags` is field 9, the seventh after the name, which may contain spaces.
        let (_, fields) = stat.rsplit_once(") ").expect("a name in parentheses");
        fields.split(' ').nth(6).and_then(|flags| flags.parse::<u64>().ok()).expect("a number")
    };
    let threads =
        fs::read_dir(format!("/proc/{}/task", weir.pid())).expect("the process is running").flatten();
    assert!(
        threads.map(flags).any(|flags| flags & FLAGS == FLAGS),
        "no thread has the flags of PR_SET_IO_FLUSHER"
    );
}

#[test]
fn file_behaves_as_documented() {
    need_fuse!();
    let scratch = Scratch::new();
    let file = mount_point(&scratch, "file");
    let image = scratch.filled("disk.raw", MIB);
    let weir = serve(&scratch, &image, &file, "").start();
    python(
        r#"
import errno, fcntl, mmap, os, sys
path, mib = sys.argv[1], 1 << 20

def refused(number, operation, *arguments):
    try:
        operation(*arguments)
    except OSError as error:
        assert error.errno == number, f"{operation}: {error}"
    else:
        raise AssertionError(f"{operation}{arguments} should have failed")

def fallocate(fd, mode, offset, length):
    import ctypes
    libc = ctypes.CDLL(None, use_errno=True)
    libc.fallocate64.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    if libc.fallocate64(fd, mode, offset, length) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))

KEEP_SIZE, PUNCH_HOLE, COLLAPSE, ZERO_RANGE, INSERT = 1, 2, 8, 16, 32
status = os.stat(path)
assert (status.st_size, status.st_nlink, status.st_mode >> 12) == (mib, 1, 8)
before = open(path, "rb").read()
assert len(before) == mib
# O_TRUNC does not change a disk of fixed size.
fd = os.open(path, os.O_RDWR | os.O_TRUNC)
assert os.pread(fd, mib + 1, 0) == before
assert os.pread(fd, 100, mib - 50) == before[-50:] and os.pread(fd, 100, mib) == b""
os.ftruncate(fd, mib)
refused(errno.EPERM, os.ftruncate, fd, mib + 512)
refused(errno.EPERM, os.ftruncate, fd, 512)
refused(errno.ENOSPC, os.pwrite, fd, b"x", mib)
assert os.pwrite(fd, b"x" * 100, mib - 50) == 50
assert os.pread(fd, 50, mib - 50) == b"x" * 50
# At any offset and length.
assert os.pwrite(fd, b"abc", 1001) == 3 and os.pread(fd, 5, 1000) == before[1000:1001] + b"abc" + before[1004:1005]
# Beyond the end: no space.
append = os.open(path, os.O_WRONLY | os.O_APPEND)
refused(errno.ENOSPC, os.write, append, b"x")
for flags in (os.O_SYNC, os.O_DSYNC, os.O_DIRECT):
    other = os.open(path, os.O_RDWR | flags)
    buffer = mmap.mmap(-1, 4096)
    buffer.write(b"d" * 4096)
    assert os.pwritev(other, [buffer], 8192) == 4096
    assert os.preadv(other, [buffer], 8192) == 4096 and buffer[:] == b"d" * 4096
    os.fsync(other)
    os.fdatasync(other)
    os.close(other)
# Holes.
fallocate(fd, PUNCH_HOLE | KEEP_SIZE, 65536, 131072)
assert os.pread(fd, 131072, 65536) == bytes(131072)
assert os.lseek(fd, 0, os.SEEK_HOLE) == 65536 and os.lseek(fd, 65536, os.SEEK_DATA) == 196608
assert os.lseek(fd, 196608, os.SEEK_HOLE) == mib and os.lseek(fd, 0, os.SEEK_END) == mib
assert os.lseek(fd, 100, os.SEEK_DATA) == 100
refused(errno.ENXIO, os.lseek, fd, mib, os.SEEK_DATA)
refused(errno.ENXIO, os.lseek, fd, mib, os.SEEK_HOLE)
fallocate(fd, ZERO_RANGE, 300000, 1000)
assert os.pread(fd, 1002, 299999) == before[299999:300000] + bytes(1000) + before[301000:301001]
fallocate(fd, ZERO_RANGE | KEEP_SIZE, mib - 10, 1000)
assert os.stat(path).st_size == mib and os.pread(fd, 10, mib - 10) == bytes(10)
refused(errno.ENOSPC, fallocate, fd, ZERO_RANGE, mib - 10, 1000)
refused(errno.ENOSPC, fallocate, fd, 0, 0, mib + 1)
for mode in (COLLAPSE, INSERT):
    refused(errno.EOPNOTSUPP, fallocate, fd, mode, 0, 4096)
# Mapped memory is coherent with the file.
try:
    mapped = mmap.mmap(fd, mib)
except OSError as error:
    # Before Linux 6.6.
    assert error.errno == errno.ENODEV and tuple(map(int, os.uname().release.split(".")[:2])) < (6, 6)
else:
    mapped[500000:500003] = b"map"
    assert os.pread(fd, 3, 500000) == b"map"
    os.pwrite(fd, b"write", 500100)
    assert mapped[500100:500105] == b"write"
    mapped[600000:600003] = b"end"
    mapped.flush()
    mapped.close()
# Copies within the kernel.
assert os.copy_file_range(fd, fd, 4096, 0, 700000) == 4096
assert os.pread(fd, 4096, 700000) == os.pread(fd, 4096, 0)
# Operations that a disk does not support.
refused(errno.ENOTTY, fcntl.ioctl, fd, 0x5401)
refused(errno.EOPNOTSUPP, os.setxattr, path, "user.name", b"value")
refused(errno.ENOTDIR, os.stat, path + "/below")
fcntl.flock(fd, fcntl.LOCK_EX)
fcntl.lockf(fd, fcntl.LOCK_EX)
os.utime(path, (1, 1))
os.chmod(path, 0o640)
os.chown(path, 7, 8)
status = os.stat(path)
assert (status.st_mode & 0o7777, status.st_uid, status.st_gid) == (0o640, 7, 8)
space = os.statvfs(path)
assert space.f_blocks * space.f_frsize == mib and space.f_bavail == 0
"#,
        &[text(&file)],
    );
    let now = fs::read(&file).expect("it can be read");
    weir.stop();
    assert!(fs::read(&image).expect("the file exists") == now, "all data is in the image");
}

#[test]
fn file_grows_with_growable() {
    need_fuse!();
    let scratch = Scratch::new();
    for format in ["raw", "qcow2"] {
        let (image, file) =
            (scratch.path(&format!("disk.{format}")), mount_point(&scratch, &format!("{format}.file")));
        qemu_img(["create", "-q", "-f", format]).arg(&image).arg("1M").succeeds();
        let weir = serve(&scratch, &image, &file, ",growable").args(["--format", format]).start();
        python(
            r#"
import os, sys
path, mib = sys.argv[1], 1 << 20
fd = os.open(path, os.O_RDWR)
assert os.pwrite(fd, b"x" * 1000, 2 * mib) == 1000
assert os.stat(path).st_size == 2 * mib + 1000 and os.pread(fd, 3000, 2 * mib) == b"x" * 1000
append = os.open(path, os.O_WRONLY | os.O_APPEND)
for _ in range(3):
    assert os.write(append, b"a" * 512) == 512
assert os.pread(fd, 4096, 2 * mib + 1000) == b"a" * 1536
os.ftruncate(fd, 4 * mib)
assert os.stat(path).st_size == 4 * mib and os.pread(fd, 512, 4 * mib - 512) == bytes(512)
os.posix_fallocate(fd, 4 * mib, mib)
assert os.stat(path).st_size == 5 * mib
"#,
            &[text(&file)],
        );
        // As `cp` does: truncate, then write from the beginning.
        let content = scratch.filled("content.raw", 3 * MIB);
        if format == "raw" {
            TestClient::new("cp").arg(&content).arg(&file).succeeds();
            assert_eq!(fs::metadata(&file).expect("the file exists").len(), 3 * MIB);
            qemu_img(["compare", "-f", "raw", "-F", "raw"]).arg(&content).arg(&file).succeeds();
        }
        weir.stop();
        qemu_img(["check"]).arg(&image).run();
    }
}

#[test]
fn file_of_any_length_in_bytes_can_be_resized() {
    need_fuse!();
    let scratch = Scratch::new();
    let (file, control) = (mount_point(&scratch, "file"), scratch.socket("qmp"));
    let content = pattern(100_003);
    let image = scratch.file("disk.raw", &content);
    let _weir = serve(&scratch, &image, &file, "")
        .args(["--cache", "none", "--format", "raw", "--qmp", &format!("unix:{}", text(&control))])
        .start();
    let seen = OpenOptions::new().read(true).write(true).open(&file).expect("the file can be opened");
    assert_eq!(seen.metadata().expect("it is open").len(), 100_003);
    assert!(fs::read(&file).expect("it can be read") == content);
    seen.write_all_at(b"end", 100_000).expect("the range is inside of the file");
    let mut qmp = Qmp::negotiated(&control);
    for size in [1 << 20, 50 << 10] {
        qmp.command("block_resize", json!({ "node-name": "disk", "size": size }));
        assert_eq!(seen.metadata().expect("it is open").len(), size);
        assert_eq!(seen.read_at(&mut [0; 10], size).expect("a read at the end of the file"), 0);
        seen.write_all_at(b"new end", size - 7).expect("the range is inside of the file");
    }
}

#[test]
fn read_only_file_rejects_writes() {
    need_fuse!();
    let scratch = Scratch::new();
    let file = mount_point(&scratch, "file");
    let image = scratch.filled("disk.raw", MIB);
    for options in [&["--read-only"][..], &[]] {
        let suffix = if options.is_empty() { ",read-only" } else { "" };
        let weir = serve(&scratch, &image, &file, suffix).args(options).start();
        assert!(fs::read(&file).expect("it can be read") == pattern(MIB as usize));
        let refused = OpenOptions::new().write(true).open(&file).expect_err("it is read-only");
        assert_eq!(refused.raw_os_error(), Some(libc::EROFS));
        weir.stop();
    }
}

#[test]
fn several_openers_and_several_exports() {
    need_fuse!();
    let scratch = Scratch::new();
    let control = scratch.socket("qmp");
    let files = ["one", "two"].map(|name| mount_point(&scratch, &format!("{name}.file")));
    let config = scratch.path("weir.toml");
    let disks = ["one", "two"].iter().zip(&files).map(|(name, file)| {
        let image = scratch.sparse(&format!("{name}.raw"), 16 * MIB);
        format!(
            "[disk.{name}]\nimage = {:?}\nexport = [{{ type = \"fuse\", file = {:?} }}]\n",
            text(&image),
            text(file)
        )
    });
    fs::write(&config, disks.collect::<String>()).expect("the file can be written");
    let weir = Serve::new(&scratch)
        .at_given_addresses()
        .args(["--config", text(&config), "--qmp", &format!("unix:{}", text(&control)), "--workers", "2"])
        .start();
    let jobs: Vec<_> = files
        .iter()
        .map(|file| {
            Command::new("fio")
                .args(["--name=shared", "--ioengine=io_uring", "--direct=1", "--rw=randwrite", "--bs=4k"])
                .args(["--size=4M", "--offset_increment=4M", "--numjobs=4", "--iodepth=8", "--verify=crc32c"])
                .args(["--do_verify=1", "--verify_fatal=1", "--group_reporting"])
                .arg(format!("--filename={}", text(file)))
                .arg(format!("--aux-path={}", scratch.path("").display()))
                .stdout(Stdio::null())
                .spawn()
                .expect("fio is there")
        })
        .collect();
    for mut job in jobs {
        assert!(job.wait().expect("the child can be waited for").success());
    }
    let opened: Vec<_> = (0..3).map(|_| File::open(&files[0]).expect("the file exists")).collect();
    let mut qmp = Qmp::negotiated(&control);
    let status = qmp.command("x-weir-query-status", json!({}));
    let export = status["exports"].as_array().expect("a list").iter().find(|export| export["disk"] == "one");
    let export = export.unwrap_or_else(|| panic!("{status}"));
    assert_eq!(
        (&export["type"], &export["connections"], &export["openers"]),
        (&json!("fuse"), &json!(3), &json!(3))
    );
    assert!(export["requests"].as_u64() > Some(1000), "{export}");
    // Without `mode: hard`, an export in use is not removed.
    let id = export["id"].clone();
    qmp.command_error("block-export-del", json!({ "id": id }));
    drop(opened);
    python("import sys, os\nos.close(os.open(sys.argv[1], os.O_RDONLY))", &[text(&files[1])]);
    qmp.command("block-export-del", json!({ "id": id, "mode": "hard" }));
    qmp.event("BLOCK_EXPORT_DELETED");
    assert!(!is_mounted(&files[0]) && is_mounted(&files[1]));
    // With QEMU's options.
    let mut export_arguments = json!({ "type": "fuse", "id": "again", "node-name": "one", "mountpoint": text(&files[0]),
        "writable": true, "growable": true, "allow-other": "off", "io-uring": true });
    let (_, refused) = qmp.command_error("block-export-add", export_arguments.clone());
    assert_contains(&refused, &["'io-uring'", "was removed"]);
    export_arguments.as_object_mut().expect("an object").remove("io-uring");
    qmp.command("block-export-add", export_arguments);
    assert_eq!(fs::metadata(&files[0]).expect("the file exists").len(), 16 * MIB);
    weir.stop();
    assert!(!is_mounted(&files[0]) && !is_mounted(&files[1]));
}

#[test]
fn growth_by_a_program_notifies_the_front_end() {
    need_fuse!();
    let scratch = Scratch::new();
    let (file, vhost_socket) = (mount_point(&scratch, "file"), scratch.socket("machine"));
    let image = scratch.sparse("disk.raw", MIB);
    let listen_option = format!("unix:{}", text(&vhost_socket));
    let _weir = serve(&scratch, &image, &file, ",growable")
        .args(["-f", "raw", "--vhost-user-blk", &listen_option])
        .start();
    // A front end that implements only the reads of the configuration space.
    python(
        r#"
import os, socket, struct, sys
path, at = sys.argv[1:]
front_end = socket.socket(socket.AF_UNIX)
front_end.settimeout(300)
front_end.connect(at)
def send(code, payload, descriptors=[]):
    socket.send_fds(front_end, [struct.pack("=III", code, 1, len(payload)) + payload], descriptors)
def receive(channel, count):
    data = b""
    while len(data) < count:
        data += channel.recv(count - len(data)) or sys.exit("the connection has ended")
    return data
def capacity():
    send(24, struct.pack("=III", 0, 8, 0) + bytes(8))
    return struct.unpack("=Q", receive(front_end, 12 + 12 + 8)[24:])[0] * 512
config, back_end_requests = 1 << 9, 1 << 5
send(16, struct.pack("=Q", config | back_end_requests))
news, theirs = socket.socketpair()
news.settimeout(300)
send(21, b"", [theirs.fileno()])
assert capacity() == 1 << 20
os.truncate(path, 2 << 20)
config_change = 2
assert struct.unpack("=III", receive(news, 12))[0] == config_change
assert capacity() == 2 << 20
"#,
        &[text(&file), text(&vhost_socket)],
    );
}

#[test]
fn limits_hold_and_waiting_clients_can_be_killed() {
    need_fuse!();
    let scratch = Scratch::new();
    let file = mount_point(&scratch, "file");
    let image = scratch.filled("disk.raw", MIB);
    let _weir = serve(&scratch, &image, &file, "").args(["--iops-total", "20"]).start();
    let seen = direct().open(&file).expect("the file can be opened");
    drop(seen);
    let began = Instant::now();
    let reads = python(
        "import os, sys\n\
         fd = os.open(sys.argv[1], os.O_RDONLY)\n\
         for at in range(30): os.pread(fd, 512, at * 8192)\n\
         print(30)",
        &[text(&file)],
    );
    assert_eq!(reads.trim(), "30");
    // A tenth of a second's worth is admitted immediately.
    assert!(began.elapsed() >= Duration::from_millis(27 * 50), "30 reads passed in {:?}", began.elapsed());
    // A killed client does not wait for the limit: 1 MiB counts as one request, and there are many.
    let mut reader = Command::new("dd")
        .arg(format!("if={}", text(&file)))
        .args(["of=/dev/null", "bs=512"])
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .expect("dd is there");
    kill(Pid::from_raw(reader.id().cast_signed()), Signal::SIGKILL).expect("the child can be killed");
    reader.wait().expect("the child can be waited for");
}

/// A truncation discards the removed range; the log reports it at most once a second.
#[test]
fn size_changes_are_throttled() {
    need_fuse!();
    let scratch = Scratch::new();
    let file = mount_point(&scratch, "file");
    let image = scratch.sparse("disk.raw", MIB);
    let weir = serve(&scratch, &image, &file, ",growable").args(["--iops-total", "20"]).start();
    let began = Instant::now();
    python(
        "import os, sys\n\
         fd = os.open(sys.argv[1], os.O_RDWR)\n\
         for at in range(30): os.ftruncate(fd, (at % 2 + 1) * 65536)",
        &[text(&file)],
    );
    assert!(
        began.elapsed() >= Duration::from_millis(27 * 50),
        "30 truncations passed in {:?}",
        began.elapsed()
    );
    let log = weir.stop();
    let lines = log.lines().filter(|line| line.contains("the disk was truncated")).count();
    let seconds = began.elapsed().as_secs() as usize;
    assert!((1..=seconds + 2).contains(&lines), "{lines} lines in {seconds} s:\n{log}");
}

#[test]
fn leftovers_of_a_killed_daemon_are_removed() {
    need_fuse!();
    let scratch = Scratch::new();
    let file = mount_point(&scratch, "file");
    let image = scratch.filled("disk.raw", MIB);
    for round in 0..4 {
        let weir = serve(&scratch, &image, &file, "").start();
        assert!(fs::read(&file).expect("it can be read") == pattern(MIB as usize), "round {round}");
        let opened = File::open(&file).expect("the file exists");
        weir.crash();
        let lost = opened.read_at(&mut [0; 10], 0).expect_err("no server");
        let errors = [libc::ENOTCONN, libc::ECONNABORTED];
        assert!(lost.raw_os_error().is_some_and(|errno| errors.contains(&errno)), "{lost}");
        if round % 2 == 0 {
            // A watcher process unmounts it.
            wait_until_unmounted(&file);
            assert_eq!(fs::metadata(&file).expect("the mount point is a file").len(), 0);
        }
    }
}

#[test]
fn stale_mount_is_removed_by_the_next_daemon() {
    need_fuse!();
    let scratch = Scratch::new();
    let file = mount_point(&scratch, "file");
    let image = scratch.filled("disk.raw", MIB);
    let weir = serve(&scratch, &image, &file, "").start();
    kill_watchers(&weir);
    weir.crash();
    let error = fs::metadata(&file).expect_err("no server");
    let errors = [libc::ENOTCONN, libc::ECONNABORTED];
    assert!(error.raw_os_error().is_some_and(|errno| errors.contains(&errno)), "{error}");
    let weir = serve(&scratch, &image, &file, "").start();
    assert!(fs::read(&file).expect("it can be read") == pattern(MIB as usize));
    weir.stop();
    assert!(!is_mounted(&file));
}

/// Kills the watchers of mounts. All children of the daemon are watchers; their command lines do
/// not identify them right after the fork.
fn kill_watchers(weir: &Weir) {
    let killed = children(weir.pid()).filter(|pid| kill(*pid, Signal::SIGKILL).is_ok()).count();
    assert!(killed > 0, "no watcher was running");
}

#[test]
fn external_unmount_ends_the_export() {
    need_fuse!();
    let scratch = Scratch::new();
    let (file, control) = (mount_point(&scratch, "file"), scratch.socket("qmp"));
    let image = scratch.filled("disk.raw", MIB);
    let weir =
        serve(&scratch, &image, &file, "").args(["--qmp", &format!("unix:{}", text(&control))]).start();
    let mut qmp = Qmp::negotiated(&control);
    let opened = File::open(&file).expect("the file exists");
    // The image is busy while a file is open.
    TestClient::new("umount").args([text(&file)]).fails();
    drop(opened);
    wait_for_programs();
    TestClient::new("umount").args([text(&file)]).succeeds();
    weir.wait_for_log("unmounted from outside");
    qmp.event("BLOCK_EXPORT_DELETED");
    // The disk is still served.
    weir.nbdsh("disk", "assert h.get_size() == 1 << 20");
    weir.stop();
}

#[test]
fn file_of_an_unprivileged_user_is_private() {
    need_fuse!();
    need_root("other users");
    let scratch = Scratch::new();
    let (file, image) = (mount_point(&scratch, "file"), scratch.filled("disk.raw", MIB));
    const NOBODY: u32 = 65_534;
    for path in [&scratch.path(""), &file, &image] {
        chown(path, Some(NOBODY), Some(NOBODY)).expect("root has the permission");
    }
    fs::set_permissions(scratch.path(""), Permissions::from_mode(0o755)).expect("root has the permission");
    chown(scratch.socket(""), Some(NOBODY), Some(NOBODY)).expect("root has the permission");
    let _open = WorldAccessibleFuseDevice::new();
    let as_nobody = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups"];
    let serve = |scratch: &Scratch, image: &Path, file: &Path, options| {
        serve(scratch, image, file, options).env("HOME", scratch.path("")).wrapped_by(as_nobody)
    };
    for (options, allow_other) in [(",allow-other=off", false), ("", false)] {
        let weir = serve(&scratch, &image, &file, options).start();
        let read = TestClient::new("setpriv").args(&as_nobody[1..]).args(["cmp", text(&file), text(&image)]);
        read.succeeds();
        assert_eq!(
            fs::metadata(&file).is_ok(),
            allow_other,
            "root may access the file only with allow-other"
        );
        weir.stop();
        assert!(!is_mounted(&file));
    }
    // Also after a kill.
    let weir = serve(&scratch, &image, &file, "").start();
    weir.crash();
    wait_until_unmounted(&file);
    let stderr = serve(&scratch, &image, &file, ",allow-other=on").fails();
    assert_contains(&stderr, &["user_allow_other", "/etc/fuse.conf"]);
}

/// The device with the mode that udev sets: read-write for all. In a container only root may open
/// it.
struct WorldAccessibleFuseDevice(Permissions);

impl WorldAccessibleFuseDevice {
    fn new() -> Self {
        let before = fs::metadata("/dev/fuse").expect("the file exists").permissions();
        fs::set_permissions("/dev/fuse", Permissions::from_mode(0o666)).expect("root has the permission");
        Self(before)
    }
}

impl Drop for WorldAccessibleFuseDevice {
    fn drop(&mut self) {
        fs::set_permissions("/dev/fuse", self.0.clone()).expect("root has the permission");
    }
}

#[test]
fn file_mode_applies_to_other_users() {
    need_fuse!();
    need_root("other users");
    let scratch = Scratch::new();
    let (file, image) = (mount_point(&scratch, "file"), scratch.filled("disk.raw", MIB));
    fs::set_permissions(scratch.path(""), Permissions::from_mode(0o755)).expect("root has the permission");
    fs::set_permissions(&file, Permissions::from_mode(0o604)).expect("root has the permission");
    let weir = serve(&scratch, &image, &file, "").start();
    let status = fs::metadata(&file).expect("the file exists");
    assert_eq!((status.mode() & 0o7777, status.uid()), (0o604, 0));
    let as_nobody = || TestClient::new("setpriv").args(["--reuid=65534", "--regid=65534", "--clear-groups"]);
    as_nobody().args(["cmp", text(&file), text(&image)]).succeeds();
    as_nobody()
        .args(["dd", "if=/dev/zero", &format!("of={}", text(&file)), "count=1", "conv=notrunc"])
        .fails();
    fs::set_permissions(&file, Permissions::from_mode(0o600)).expect("root has the permission");
    as_nobody().args(["cat", text(&file)]).fails();
    weir.stop();
}

#[test]
fn invalid_mount_points_are_named() {
    need_fuse!();
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    let fifo = scratch.path("fifo");
    TestClient::new("mkfifo").arg(&fifo).succeeds();
    for (path, wrong) in [
        (scratch.path("missing"), "no such file (create an empty one"),
        ("/usr/bin".into(), "not a regular file"),
        (fifo, "not a regular file"),
        ("/dev/null".into(), "not a regular file"),
    ] {
        assert_contains(&serve(&scratch, &image, &path, "").fails(), &[text(&path), wrong]);
    }
    let file = mount_point(&scratch, "file");
    let _weir = serve(&scratch, &image, &file, "").start();
    let other = Scratch::new();
    let stderr = serve(&other, &other.sparse("other.raw", MIB), &file, "").fails();
    assert_contains(&stderr, &["already a mount point"]);
}

#[test]
fn daemon_ends_while_its_file_is_in_use() {
    need_fuse!();
    let scratch = Scratch::new();
    let file = mount_point(&scratch, "file");
    let image = scratch.filled("disk.raw", MIB);
    let weir = serve(&scratch, &image, &file, "").args(["--iops-total", "100"]).start();
    let (begun_sender, has_begun) = mpsc::channel();
    let readers: Vec<_> = (0..8)
        .map(|_| {
            let (seen, begun_sender) = (File::open(&file).expect("it is served"), begun_sender.clone());
            thread::spawn(move || {
                loop {
                    if let Err(error) = seen.read_at(&mut [0; 4096], 0) {
                        return error.raw_os_error();
                    }
                    let _ = begun_sender.send(());
                }
            })
        })
        .collect();
    for _ in 0..100 {
        has_begun.recv().expect("a reader");
    }
    weir.stop();
    assert!(!is_mounted(&file));
    for reader in readers {
        let error = reader.join().expect("no panic");
        let ends = [libc::ENOTCONN, libc::ESHUTDOWN, libc::ECONNABORTED];
        assert!(error.is_some_and(|error| ends.contains(&error)), "{error:?}");
    }
}

#[test]
fn image_may_be_the_mount_point() {
    need_fuse!();
    let scratch = Scratch::new();
    let (content, image) = (scratch.filled("content.raw", MIB), scratch.path("disk.qcow2"));
    qemu_img(["convert", "-O", "qcow2"]).arg(&content).arg(&image).succeeds();
    let weir = serve(&scratch, &image, &image, "").start();
    qemu_img(["compare", "-f", "raw", "-F", "raw"]).arg(&content).arg(&image).succeeds();
    OpenOptions::new()
        .write(true)
        .open(&image)
        .and_then(|mut file| file.write_all(b"new"))
        .expect("the file can be written");
    weir.stop();
    let mut new = Vec::new();
    File::open(&content).and_then(|mut file| file.read_to_end(&mut new)).expect("the file exists");
    new[..3].copy_from_slice(b"new");
    fs::write(&content, new).expect("the file can be written");
    qemu_img(["compare", "-f", "raw", "-F", "qcow2"]).arg(&content).arg(&image).succeeds();
}
