//! A loop device on a file: with sectors of 4096 bytes, flush counters, and a size that can change.

use std::{
    fs,
    path::{Path, PathBuf},
};

use super::{TestClient, need_root, scratch::text};

pub(crate) struct LoopDevice {
    path: PathBuf,
}

impl LoopDevice {
    #[track_caller]
    pub(crate) fn attach(file: &Path, sector_bytes: u32) -> Self {
        need_root("loop devices");
        let sector = sector_bytes.to_string();
        let found = TestClient::new("losetup")
            .args(["--find", "--show", "--sector-size", &sector, text(file)])
            .succeeds();
        Self { path: found.trim().into() }
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) fn update_size(&self) {
        TestClient::new("losetup").args(["--set-capacity", text(&self.path)]).succeeds();
    }

    /// Flushes that the device has completed (the kernel's Documentation/block/stat.rst, field 16).
    pub(crate) fn flushes(&self) -> u64 {
        let name = self.path.file_name().expect("a device has a name").to_string_lossy();
        let statistics =
            fs::read_to_string(format!("/sys/block/{name}/stat")).expect("every block device has it");
        let field = statistics.split_whitespace().nth(15).expect("Linux 5.5 and newer count flushes");
        field.parse().expect("statistics are numbers")
    }
}

impl Drop for LoopDevice {
    fn drop(&mut self) {
        // A failure here would hide the test's own failure.
        let _ = TestClient::new("losetup").args(["--detach", text(&self.path)]).run();
    }
}
