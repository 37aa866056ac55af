//! `--snapshot`: a temporary qcow2 file in front of the image, which takes the writes and goes with
//! the server.

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

/// Where QEMU has them: what outgrows memory belongs on a disk.
const DIRECTORY: &str = "/var/tmp";

/// The file. It needs no name once it is open, and loses it when this is dropped.
pub(super) struct Overlay {
    _file: NamedTempFile,
}

impl Overlay {
    /// Makes one in front of `image`, which is then that. `format` is the image's where it does not
    /// say it itself.
    pub(super) fn over(image: &mut ServedImage, format: Option<&str>) -> anyhow::Result<Self> {
        let directory = env::var_os("TMPDIR").map_or_else(|| PathBuf::from(DIRECTORY), PathBuf::from);
        let file = tempfile::Builder::new().prefix("weir-snapshot-").tempfile_in(&directory);
        let file = file.with_context(|| format!("a temporary file in {}", directory.display()))?;
        let backing = absolute(&image.file)?;
        let format = match image.format.as_deref().or(format) {
            Some(format) => format,
            None => probed(&backing)?,
        };
        // By a process of its own: the daemon that is to come has yet to block its signals, which
        // is to be done before there are threads.
        let made = Command::new(env::current_exe().context("this program cannot find itself")?)
            .arg0("weir")
            .args(["image", "create", "-q", "-f", "qcow2", "-F", format, "-b"])
            .arg(&backing)
            .arg(file.path())
            .stdin(Stdio::null())
            .output()
            .context("no process can be started")?;
        if !made.status.success() {
            let said = String::from_utf8_lossy(&made.stderr);
            bail!("--snapshot: {}", said.trim_end().trim_start_matches("weir: "));
        }
        let path = file.path().to_str().context("the temporary directory is not UTF-8")?;
        image.file = path.to_owned();
        image.format = Some("qcow2".to_owned());
        Ok(Self { _file: file })
    }
}

/// What the image begins with says what it is. Nobody writes to it, so that no guest can make it
/// look like something else.
fn probed(path: &Path) -> anyhow::Result<&'static str> {
    let mut magic = Vec::new();
    let mut options = File::options();
    // Opening a named pipe, which is never an image, would wait for a writer.
    options.read(true).custom_flags(nix::libc::O_NONBLOCK);
    let read = options.open(path).and_then(|file| file.take(4).read_to_end(&mut magic));
    read.with_context(|| format!("Could not open '{}'", path.display()))?;
    Ok(if magic == *b"QFI\xfb" { "qcow2" } else { "raw" })
}
