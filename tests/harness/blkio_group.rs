//! A control group of cgroup v1's blkio; v2 is tested in a guest (`tests/guest/cgroups`).

use std::{
    fs,
    io::{self, ErrorKind},
    path::{Path, PathBuf},
    process, thread,
    time::Instant,
};

use super::{DEADLINE, pause};

const BLKIO: &str = "/sys/fs/cgroup/blkio";

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
        let removed = remove_emptied(&self.directory);
        assert!(removed.is_ok() || thread::panicking(), "{}: is left: {removed:?}", self.directory.display());
    }
}

/// The kernel takes a process out of its group a little after its end, and tells nobody.
pub(crate) fn remove_emptied(directory: &Path) -> io::Result<()> {
    let until = Instant::now() + DEADLINE;
    loop {
        match fs::remove_dir(directory) {
            Err(error) if error.kind() == ErrorKind::ResourceBusy && Instant::now() < until => {
                pause();
            }
            removed => return removed,
        }
    }
}
