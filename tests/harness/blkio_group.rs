//! A control group of cgroup v1's blkio on this machine, gone with its test. What needs cgroup v2 is tested in a guest (`tests/guest/cgroups`).

use std::{
    fs,
    path::{Path, PathBuf},
    process, thread,
    time::Instant,
};

use super::DEADLINE;

/// Where it is mounted, as everywhere.
const BLKIO: &str = "/sys/fs/cgroup/blkio";

/// Directly below the root.
pub(crate) struct BlkioGroup {
    pub(crate) name: String,
    pub(crate) directory: PathBuf,
}

impl BlkioGroup {
    /// `None` on a machine that has cgroup v2 alone, where the guest's tests are the ones.
    pub(crate) fn new(what: &str) -> Option<Self> {
        // The root has either, by the kernel's version.
        let has = |file: &str| Path::new(BLKIO).join(file).is_file();
        if !has("blkio.throttle.write_bps_device") && !has("blkio.throttle.io_service_bytes") {
            return None;
        }
        let name = format!("weir-test-{what}-{}", process::id());
        let directory = Path::new(BLKIO).join(&name);
        fs::create_dir(&directory).expect("root may make control groups");
        Some(Self { name, directory })
    }

    pub(crate) fn read(&self, file: &str) -> String {
        fs::read_to_string(self.directory.join(file)).expect("a file of the kernel's")
    }
}

impl Drop for BlkioGroup {
    fn drop(&mut self) {
        let until = Instant::now() + DEADLINE;
        // The kernel takes a process out of its cgroup a little after it has ended.
        let removed = loop {
            let removed = fs::remove_dir(&self.directory);
            if removed.is_ok() || Instant::now() > until {
                break removed;
            }
        };
        assert!(removed.is_ok() || thread::panicking(), "{}: is left: {removed:?}", self.directory.display());
    }
}
