//! Images as mounted file systems: what `weir attach` and `weir detach` do, as processes of their
//! own.
//!
//! As processes, because a kernel that does not answer then holds up a child that can be left, and
//! because what serves the device must outlive the plugin.
//!
//! Whether something is mounted is asked of the kernel each time, and never remembered: the plugin
//! may have been away, and so may the mount.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context as _;
use control::users::is_mount_point;

use crate::program;

/// Docker waits two minutes for a mount.
const TIME: Duration = Duration::from_secs(100);

/// How an image gets to where a container finds it.
pub(crate) trait Devices: Send + Sync {
    /// Mounts the file system in `image` at the directory `at`, with these options of `weir
    /// attach`.
    fn attach(&self, image: &Path, words: &[String], at: &Path) -> anyhow::Result<()>;
    /// Undoes it; the image is free when it returns.
    fn detach(&self, at: &Path) -> anyhow::Result<()>;
    /// Whether something is mounted there.
    fn is_mounted(&self, at: &Path) -> anyhow::Result<bool>;
}

/// By the program itself.
pub(crate) struct Weir {
    pub(crate) program: PathBuf,
    /// The control socket of the daemon to attach through, where one was named.
    pub(crate) qmp: Option<String>,
}

impl Devices for Weir {
    fn attach(&self, image: &Path, words: &[String], at: &Path) -> anyhow::Result<()> {
        let mut command = Command::new(&self.program);
        command.arg("attach").arg(image).arg("--mount").arg(at).args(words);
        if let Some(qmp) = &self.qmp {
            command.args(["--qmp", qmp]);
        }
        program::run(&mut command, TIME)?;
        // Of a new ext file system. Databases, and Docker where an image has files for the volume,
        // want it empty; e2fsck(8) makes the directory again when it needs one.
        let _ = fs::remove_dir(at.join("lost+found"));
        Ok(())
    }

    fn detach(&self, at: &Path) -> anyhow::Result<()> {
        program::run(Command::new(&self.program).arg("detach").arg(at), TIME)
    }

    fn is_mounted(&self, at: &Path) -> anyhow::Result<bool> {
        is_mount_point(at).context("what is mounted cannot be known")
    }
}
