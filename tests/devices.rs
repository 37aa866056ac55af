//! Block devices: sectors of 4096 bytes, a size that changes, discards. Needs root.

use std::fs;

use crate::harness::{LoopDevice, MIB, Scratch, Serve, TestClient, Weir, export_size, text};

#[test]
fn unaligned_writes_on_4k_sectors_keep_adjacent_data() {
    let scratch = Scratch::new();
    let file = scratch.filled("device", 4 * MIB);
    let mut expected = fs::read(&file).unwrap();
    let device = LoopDevice::attach(&file, 4096);
    let weir = Serve::new(&scratch).arg(device.path()).args(["--cache", "none", "--name", "disk"]).start();
    let script = "
for number in range(200):
    h.pwrite(bytes([number + 1]) * 700, number * 1000 + 3)
h.pwrite(b'end', h.get_size() - 3)
h.flush()
";
    weir.nbdsh("disk", script);
    for number in 0..200_usize {
        expected[number * 1000 + 3..][..700].fill(number as u8 + 1);
    }
    let end = expected.len() - 3;
    expected[end..].copy_from_slice(b"end");
    weir.stop();
    drop(device);
    assert!(fs::read(file).unwrap() == expected, "a write changed bytes outside of its range");
}

#[test]
fn random_requests_on_4k_sectors_are_verified() {
    let scratch = Scratch::new();
    let device = LoopDevice::attach(&scratch.sparse("device", 16 * MIB), 4096);
    let weir = Serve::new(&scratch).arg(device.path()).args(["--cache", "none", "--name", "disk"]).start();
    TestClient::new("fio")
        .args(["--name=verified", "--ioengine=nbd", "--rw=randwrite", "--size=16M", "--io_size=8M"])
        .arg("--bs=512")
        .args(["--iodepth=32", "--verify=crc32c", "--verify_fatal=1", "--do_verify=1", "--randseed=7"])
        .arg(format!("--uri={}", weir.uri("disk")))
        .arg(format!("--aux-path={}", scratch.path("").display()))
        .succeeds();
}

#[test]
fn grown_device_or_file_is_larger_for_the_next_client() {
    let scratch = Scratch::new();
    let file = scratch.sparse("device", 4 * MIB);
    let device = LoopDevice::attach(&file, 512);
    let weir = Serve::new(&scratch).arg(device.path()).args(["--name", "disk"]).start();
    let size = |weir: &Weir| export_size(&weir.uri("disk"));
    let grow = |file| fs::File::options().write(true).open(file).and_then(|file| file.set_len(6 * MIB));
    assert_eq!(size(&weir), 4 * MIB);
    grow(&file).unwrap();
    device.update_size();
    assert_eq!(size(&weir), 6 * MIB);
    weir.nbdsh("disk", "h.pwrite(b'new', 5 << 20)\nassert h.pread(3, 5 << 20) == b'new'");
    weir.stop();
    let file = scratch.sparse("disk.raw", MIB);
    let weir = Serve::new(&scratch).arg(&file).start();
    assert_eq!(size(&weir), MIB);
    grow(&file).unwrap();
    assert_eq!(size(&weir), 6 * MIB);
}

#[test]
fn discards_reach_the_device() {
    let scratch = Scratch::new();
    let file = scratch.filled("device", 8 * MIB);
    let device = LoopDevice::attach(&file, 512);
    let weir = Serve::new(&scratch).arg(device.path()).args(["--name", "disk"]).start();
    let script = "
kept = h.pread(1 << 20, 0)
h.trim(4 << 20, 1 << 20)
h.zero(1 << 20, 6 << 20)
h.flush()
assert h.pread(1 << 20, 0) == kept
assert not any(h.pread(1 << 20, 6 << 20))
";
    weir.nbdsh("disk", script);
    weir.stop();
    let allocated = std::os::unix::fs::MetadataExt::blocks(&fs::metadata(&file).unwrap()) * 512;
    assert!(allocated <= 4 * MIB, "{allocated} bytes are still allocated in {}", text(&file));
}

#[test]
fn grown_device_exposes_no_old_data() {
    let scratch = Scratch::new();
    let file = scratch.filled("device", 4 * MIB);
    let device = LoopDevice::attach(&file, 512);
    TestClient::new("qemu-img").args(["create", "-q", "-f", "qcow2", text(device.path()), "4G"]).succeeds();
    let weir = Serve::new(&scratch).args(["--format", "qcow2", "--name", "disk"]).arg(device.path()).start();
    let script = "
full = False
for cluster in range(64):
    try:
        h.pwrite(b'x' * 512, cluster << 16)
    except nbd.Error as error:
        assert error.errno == 'ENOSPC', error
        full = True
assert full
h.flush()
";
    weir.nbdsh("disk", script);
    let more = fs::read(&file).unwrap();
    let mut grown = fs::File::options().append(true).open(&file).unwrap();
    std::io::Write::write_all(&mut grown, &more).unwrap();
    grown.sync_all().unwrap();
    device.update_size();
    let script = "
h.pwrite(b'y' * 512, 3 << 30)
for cluster in range(64, 80):
    h.pwrite(b'y' * 512, cluster << 16)
for offset in [3 << 30] + [cluster << 16 for cluster in range(64, 80)]:
    assert h.pread(512, offset) == b'y' * 512
    assert not any(h.pread(65536 - 512, offset + 512)), hex(offset)
assert not any(h.pread(1 << 20, (3 << 30) + 65536))
h.flush()
";
    weir.nbdsh("disk", script);
    weir.stop();
    TestClient::new("qemu-img").args(["check", "-f", "qcow2", text(device.path())]).succeeds();
}
