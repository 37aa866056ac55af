//! A cgroup of cgroup v1's blkio controller; v2 is tested in a guest (`tests/guest/cgroups`).

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
    /// `None` on a host that has only cgroup v2, which the tests in the guest cover.
    pub(crate) fn new(label: &str) -> Option<Self> {
        // The root has one of these files, depending on the kernel's version.
        let has_file = |file: &str| Path::new(BLKIO).join(file).is_file();
        if !has_file("blkio.throttle.write_bps_device") && !has_file("blkio.throttle.io_service_bytes") {
            return None;
        }
        let name = format!("weir-test-{label}-{}", process::id());
        let directory = Path::new(BLKIO).join(&name);
        fs::create_dir(&directory).expect("root may make control groups");
        Some(Self { name, directory })
    }

    pub(crate) fn read(&self, file: &str) -> String {
        fs::read_to_string(self.directory.join(file)).expect("the controller has this file")
    }
}

impl Drop for BlkioGroup {
    fn drop(&mut self) {
        let removed = remove_emptied(&self.directory);
        assert!(removed.is_ok() || thread::panicking(), "{}: is left: {removed:?}", self.directory.display());
    }
}

/// Removes a cgroup after its processes have ended. The kernel removes a process from its cgroup
/// shortly after its end, without a notification.
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
