//! Probing of formats: only raw images are served without an explicit format, and a guest cannot
//! make its disk look like another format.

use std::fs;

use crate::harness::{MIB, Scratch, Serve, assert_contains, qemu_img, text};

#[test]
fn only_raw_is_served_without_a_format() {
    let scratch = Scratch::new();
    for (format, name) in [("vmdk", "vmdk"), ("vdi", "vdi"), ("vhdx", "vhdx"), ("qed", "qed")] {
        let image = scratch.path(&format!("disk.{format}"));
        qemu_img(["create", "-q", "-f", format, text(&image), "8M"]).succeeds();
        let stderr = Serve::new(&scratch).arg(&image).fails();
        assert_contains(&stderr, &[text(&image), &format!("looks like {name}"), "--format raw"]);
    }
}

#[test]
fn raw_image_that_begins_like_qcow2_needs_a_format() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    std::os::unix::fs::FileExt::write_all_at(
        &fs::File::options().write(true).open(&image).unwrap(),
        b"QFI\xfb",
        0,
    )
    .unwrap();
    let stderr = Serve::new(&scratch).arg(&image).fails();
    assert_contains(&stderr, &["disk.raw: looks like qcow2", "--format raw"]);
    let weir = Serve::new(&scratch).arg(&image).args(["--format", "raw"]).start();
    weir.nbdsh("disk", "assert h.pread(4, 0) == b'QFI\\xfb'");
}

#[test]
fn guest_cannot_forge_a_header_on_a_probed_disk() {
    let scratch = Scratch::new();
    let image = scratch.sparse("disk.raw", MIB);
    let weir = Serve::new(&scratch).arg(&image).start();
    let script = "
def refused(call, *arguments):
    try:
        call(*arguments)
    except nbd.Error as error:
        assert error.errno == 'EPERM', error
    else:
        raise AssertionError(f'{arguments} should have been refused')
refused(h.pwrite, b'QFI\\xfb', 0)
refused(h.pwrite, b'QFI\\xfb' + bytes(65536), 0)
# A header written in parts is detected as well.
h.pwrite(b'QF', 0)
refused(h.pwrite, b'I\\xfb', 2)
h.pwrite(b'QEDx', 0)
refused(h.zero, 1, 3)
# Any other data, and other offsets, are permitted.
h.pwrite(b'QFI\\xfb', 512)
h.pwrite(b'\\xeb\\x3c\\x90' + b'boot' * 100, 0)
h.flush()
";
    weir.nbdsh("disk", script);
    weir.wait_for_log("look like another format");
    weir.stop();
    Serve::new(&scratch).arg(&image).start().stop();
}

#[test]
fn explicit_format_permits_any_content() {
    let weir = Serve::sparse(MIB).args(["--format", "raw"]).start();
    weir.nbdsh("disk", "h.pwrite(b'QFI\\xfb', 0)\nassert h.pread(4, 0) == b'QFI\\xfb'");
}

#[test]
fn unsupported_format_is_wrong_usage() {
    let stderr = Serve::with_own_scratch().args(["memory:1M", "--format", "vmdk"]).rejects_usage();
    assert_contains(&stderr, &["vmdk", "--format"]);
}
