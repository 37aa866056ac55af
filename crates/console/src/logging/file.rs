//! Destination of the log: standard error, or a file.
//!
//! A file system may be full, and whoever reads a pipe may have stopped. A daemon lives through
//! both, and goes on serving: what cannot be written is left out and counted, and the first line
//! that can be says how many there were.

use std::{
    fs::File,
    io::{self, Write, stderr},
    os::{
        fd::AsFd,
        unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use nix::{
    libc::O_NONBLOCK,
    poll::{PollFd, PollFlags, PollTimeout, poll},
};
use settings::LogFormat;

use super::Priority;

/// How long a line waits for a reader who is slow. Those after it wait no more until he reads on.
const PATIENCE: Duration = Duration::from_secs(1);
/// A pipe that is ready takes so many bytes at once (`PIPE_BUF`, pipe(7)).
const AT_ONCE: usize = 4096;

/// Mode of a new file: names of disks and clients are for the owner and the group alone.
const MODE: u32 = 0o640;

/// The file that receives lines instead of standard error.
static FILE: Mutex<Option<(PathBuf, File)>> = Mutex::new(None);

fn current() -> MutexGuard<'static, Option<(PathBuf, File)>> {
    FILE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Appends lines to this file from now on.
///
/// # Errors
/// The system's, or the path is a directory or a block device. The destination is then unchanged.
pub(super) fn open(path: &Path) -> io::Result<()> {
    let mut options = File::options();
    // Opening a pipe without a reader fails instead of waiting for one.
    options.append(true).create(true).mode(MODE).custom_flags(O_NONBLOCK);
    let file = options.open(path)?;
    if file.metadata()?.file_type().is_block_device() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is a block device"));
    }
    *current() = Some((std::path::absolute(path)?, file));
    Ok(())
}

/// Opens the file of [`open`] anew, if there is one.
///
/// # Errors
/// As [`open`], with the file's path.
pub(super) fn reopen() -> Result<(), (PathBuf, io::Error)> {
    let path = current().as_ref().map(|(path, _)| path.clone());
    path.map_or(Ok(()), |path| open(&path).map_err(|error| (path, error)))
}

/// Writer to standard error or the file, for a log of this format.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogFile(pub(super) LogFormat);

/// What became of the lines before.
struct Before {
    left_out: u64,
    /// The last was written in part.
    is_torn: bool,
}

static BEFORE: Mutex<Before> = Mutex::new(Before { left_out: 0, is_torn: false });

impl Write for LogFile {
    /// Takes a whole line, and never fails.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let mut before = BEFORE.lock().unwrap_or_else(PoisonError::into_inner);
        let file = current();
        let is_file = file.is_some();
        let (mut standard, mut own) = (stderr().lock(), file.as_ref().map(|(_, file)| file));
        let file: &mut dyn LogOutput = match &mut own {
            Some(file) => file,
            None => &mut standard,
        };
        let patience = if before.left_out == 0 { PATIENCE } else { Duration::ZERO };
        let mut gap = String::new();
        if before.is_torn {
            gap.push('\n');
        }
        if before.left_out > 0 {
            let priority = if is_file { String::new() } else { Priority::WARNING.to_string() };
            gap.push_str(&of_gap(self.0, &priority, before.left_out));
        }
        match put(file, gap.as_bytes(), patience) {
            Ok(()) => *before = Before { left_out: 0, is_torn: false },
            Err(written) => {
                before.is_torn |= written > 0;
                before.left_out += 1;
                return Ok(line.len());
            }
        }
        if let Err(written) = put(file, line, patience) {
            *before = Before { left_out: 1, is_torn: written > 0 };
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// A destination of lines.
trait LogOutput: Write + AsFd {}

impl<S: Write + AsFd> LogOutput for S {}

/// The line about lines that are missing.
fn of_gap(format: LogFormat, priority: &str, left_out: u64) -> String {
    const MESSAGE: &str = "lines of the log could not be written and were left out";
    match format {
        LogFormat::Text => format!("{priority}WARN {MESSAGE} left_out={left_out}\n"),
        LogFormat::Json => {
            format!("{priority}{{\"level\":\"WARN\",\"message\":\"{MESSAGE}\",\"left_out\":{left_out}}}\n")
        }
    }
}

/// Writes all of it, or says how many bytes could be.
fn put(file: &mut dyn LogOutput, bytes: &[u8], patience: Duration) -> Result<(), usize> {
    let mut written = 0;
    while written < bytes.len() {
        if !is_ready(file, patience) {
            return Err(written);
        }
        match file.write(&bytes[written..bytes.len().min(written + AT_ONCE)]) {
            Ok(count) if count > 0 => written += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return Err(written),
        }
    }
    Ok(())
}

/// Whether a write would not have to wait.
fn is_ready(file: &dyn LogOutput, patience: Duration) -> bool {
    let timeout = PollTimeout::try_from(patience).unwrap_or(PollTimeout::ZERO);
    // What cannot be asked is tried.
    poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLOUT)], timeout) != Ok(0)
}
