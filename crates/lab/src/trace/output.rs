//! An output file that is renamed to its final name when the command succeeds.
//!
//! A regular file is first written under a temporary name in the same directory; a pipe or a
//! terminal is written in place. Inputs are never overwritten. The process exits successfully when
//! the reader of its standard output closes the pipe.

use std::{
    fs::{self, File, Permissions},
    io::{self, Write},
    os::{
        fd::AsFd as _,
        unix::fs::{MetadataExt as _, PermissionsExt as _},
    },
    path::{Path, PathBuf},
    process::exit,
};

use anyhow::{Context as _, bail};
use tempfile::NamedTempFile;

/// Mode of a new file, before the umask.
const NEW_FILE: u32 = 0o666;

#[derive(Debug)]
pub(crate) enum TraceOutput {
    /// Renamed at the end.
    Temporary(NamedTempFile, PathBuf),
    /// A special file: a pipe or a terminal.
    InPlace(File),
    Standard(File),
}

impl TraceOutput {
    /// Creates an output. `inputs` are rejected as the output; the first argument names the option
    /// in errors.
    pub(crate) fn create<'a>(
        option: &str,
        path: &Path,
        inputs: impl IntoIterator<Item = &'a PathBuf>,
    ) -> anyhow::Result<Self> {
        let name = path.display();
        let cannot = || format!("{name}: cannot be written");
        // A symbolic link is kept: its target is replaced.
        let target = fs::canonicalize(path).unwrap_or_else(|_| path.to_owned());
        let earlier = fs::metadata(&target).ok();
        if let Some(earlier) = &earlier {
            let is_same = |input: &&PathBuf| {
                fs::metadata(input)
                    .is_ok_and(|input| (input.dev(), input.ino()) == (earlier.dev(), earlier.ino()))
            };
            if let Some(input) = inputs.into_iter().find(is_same) {
                bail!("{option}: {name} is {}, which is read (name another file)", input.display());
            }
        }
        // A pipe or a terminal cannot be replaced by renaming a file.
        if earlier.as_ref().is_some_and(|earlier| !earlier.is_file()) {
            return Ok(Self::InPlace(File::options().write(true).open(&target).with_context(cannot)?));
        }
        let directory = target.parent().filter(|parent| !parent.as_os_str().is_empty());
        // In the same directory, because a rename does not cross file systems.
        let file = tempfile::Builder::new()
            .prefix(".weir-unfinished.")
            .permissions(Permissions::from_mode(NEW_FILE))
            .tempfile_in(directory.unwrap_or(Path::new(".")))
            .with_context(cannot)?;
        if let Some(earlier) = earlier {
            // Best effort: the replaced file's mode is a convenience.
            let _ = file.as_file().set_permissions(earlier.permissions());
        }
        Ok(Self::Temporary(file, target))
    }

    /// # Errors
    /// Fails if the process has no standard output.
    pub(crate) fn standard() -> io::Result<Self> {
        Ok(Self::Standard(io::stdout().as_fd().try_clone_to_owned()?.into()))
    }

    /// Renames the file to its final name.
    pub(crate) fn finish(self) -> io::Result<()> {
        match self {
            Self::Temporary(file, target) => file.persist(target).map(drop).map_err(|error| error.error),
            Self::InPlace(_) | Self::Standard(_) => Ok(()),
        }
    }
}

impl Write for TraceOutput {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match self {
            Self::Temporary(file, _) => file.as_file_mut().write(bytes),
            Self::InPlace(file) => file.write(bytes),
            Self::Standard(file) => match file.write(bytes) {
                // As in `… | head`: the reader has finished, which `console::print` treats alike.
                Err(error) if error.kind() == io::ErrorKind::BrokenPipe => exit(0),
                written => written,
            },
        }
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
