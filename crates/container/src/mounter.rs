//! Mounting of images by `weir attach` and `weir detach`, as separate processes.
//!
//! Processes, because a child that hangs in the kernel can be abandoned, and because the server of
//! the device has to outlive the plugin.
//!
//! The mount state is read from the kernel each time and never cached: mounts may change while the
//! plugin is not running.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
    time::Duration,
};

use anyhow::Context as _;
use control::openers::is_mount_point;

use crate::child_process;

/// Timeout of a child: Docker waits two minutes for a mount.
const CHILD_TIMEOUT: Duration = Duration::from_secs(100);

/// Mounting of images, replaced in tests.
pub(crate) trait ImageMounter: Send + Sync {
    /// Mounts the file system in `image` at the directory `at`, with these options of
    /// `weir attach`.
    fn attach(&self, image: &Path, arguments: &[String], at: &Path) -> anyhow::Result<()>;
    /// Unmounts it. The image is unused when this returns.
    fn detach(&self, at: &Path) -> anyhow::Result<()>;
    /// True if a file system is mounted at `at`.
    fn is_mounted(&self, at: &Path) -> anyhow::Result<bool>;
}

/// Mounting by this program's own commands.
pub(crate) struct CommandMounter {
    pub(crate) program: PathBuf,
    /// Control socket of the daemon to attach through; `None` uses the default of `weir attach`.
    pub(crate) qmp: Option<String>,
}

impl ImageMounter for CommandMounter {
    fn attach(&self, image: &Path, arguments: &[String], at: &Path) -> anyhow::Result<()> {
        let mut command = Command::new(&self.program);
        command.arg("attach").arg(image).arg("--mount").arg(at).args(arguments);
        if let Some(qmp) = &self.qmp {
            command.args(["--qmp", qmp]);
        }
        child_process::run(&mut command, CHILD_TIMEOUT)?;
        // Part of a new ext file system. Databases require an empty directory, and so does Docker
        // if an image has files for the volume. e2fsck(8) creates it again when needed.
        let _ = fs::remove_dir(at.join("lost+found"));
        Ok(())
    }

    fn detach(&self, at: &Path) -> anyhow::Result<()> {
        child_process::run(Command::new(&self.program).arg("detach").arg(at), CHILD_TIMEOUT)
    }

    fn is_mounted(&self, at: &Path) -> anyhow::Result<bool> {
        // Reads mountinfo only: a stat of the mount point could hang with its device.
        is_mount_point(at).context("the mount table cannot be read")
    }
}
