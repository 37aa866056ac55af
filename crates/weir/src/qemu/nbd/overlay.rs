//! `--snapshot`: a temporary qcow2 overlay of the image, which receives the writes and is deleted
//! with the server.

use std::{
    env,
    fs::File,
    io::Read as _,
    os::unix::{fs::OpenOptionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf, absolute},
    process::{Command, Stdio},
};

use anyhow::{Context as _, bail};
use tempfile::NamedTempFile;

use super::image::ServedImage;

/// QEMU's default directory: an overlay can outgrow a tmpfs.
const DIRECTORY: &str = "/var/tmp";

/// The overlay file. Its name is removed on drop, once the server has it open.
pub(super) struct SnapshotOverlay {
    _file: NamedTempFile,
}

impl SnapshotOverlay {
    /// Creates an overlay of `image` and replaces `image` by it. `format` is used if `image` has
    /// none.
    pub(super) fn over(image: &mut ServedImage, format: Option<&str>) -> anyhow::Result<Self> {
        let directory = env::var_os("TMPDIR").map_or_else(|| PathBuf::from(DIRECTORY), PathBuf::from);
        let file = tempfile::Builder::new().prefix("weir-snapshot-").tempfile_in(&directory);
        let file = file.with_context(|| format!("a temporary file in {}", directory.display()))?;
        // A relative backing file would be resolved from the overlay's directory.
        let backing = absolute(&image.file)?;
        let format = match image.format.as_deref().or(format) {
            Some(format) => format,
            None => probe_format(&backing)?,
        };
        // In a child process: creating it here would start threads, and the daemon blocks its
        // signals before any thread exists.
        let output = Command::new(env::current_exe().context("this program cannot find itself")?)
            .arg0("weir")
            .args(["image", "create", "-q", "-f", "qcow2", "-F", format, "-b"])
            .arg(&backing)
            .arg(file.path())
            .stdin(Stdio::null())
            .output()
            .context("no process can be started")?;
        if !output.status.success() {
            let stderr = String::from_utf8_lossy(&output.stderr);
            bail!("--snapshot: {}", stderr.trim_end().trim_start_matches("weir: "));
        }
        let path = file.path().to_str().context("the temporary directory is not UTF-8")?;
        image.file = path.to_owned();
        image.format = Some("qcow2".to_owned());
        Ok(Self { _file: file })
    }
}

/// Format from the image's magic number. Safe here: the image is only read, so no guest can change
/// its header.
fn probe_format(path: &Path) -> anyhow::Result<&'static str> {
    let mut magic = Vec::new();
    let mut options = File::options();
    // Opening a named pipe, which is never an image, would wait for a writer.
    options.read(true).custom_flags(nix::libc::O_NONBLOCK);
    let read = options.open(path).and_then(|file| file.take(4).read_to_end(&mut magic));
    read.with_context(|| format!("Could not open '{}'", path.display()))?;
    Ok(if magic == *b"QFI\xfb" { "qcow2" } else { "raw" })
}
