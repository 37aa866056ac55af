//! Where the log goes: standard error, whatever becomes of it.
//!
//! A file system may be full, and whoever reads a pipe may have stopped. A daemon lives through
//! both, and goes on serving: what cannot be written is left out and counted, and the first line
//! that can be says how many there were.

use std::{
    io::{self, StderrLock, Write, stderr},
    os::fd::AsFd as _,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use settings::LogFormat;

use super::Priority;

/// How long a line waits for a reader who is slow. Those after it wait no more until he reads on.
const PATIENCE: Duration = Duration::from_secs(1);
/// A pipe that is ready takes so many bytes at once (`PIPE_BUF`, pipe(7)).
const AT_ONCE: usize = 4096;

/// Standard error, as a log of this format has it.
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
        let mut file = stderr().lock();
        let patience = if before.left_out == 0 { PATIENCE } else { Duration::ZERO };
        let mut gap = String::new();
        if before.is_torn {
            gap.push('\n');
        }
        if before.left_out > 0 {
            gap.push_str(&of_gap(self.0, before.left_out));
        }
        match put(&mut file, gap.as_bytes(), patience) {
            Ok(()) => *before = Before { left_out: 0, is_torn: false },
            Err(written) => {
                before.is_torn |= written > 0;
                before.left_out += 1;
                return Ok(line.len());
            }
        }
        if let Err(written) = put(&mut file, line, patience) {
            *before = Before { left_out: 1, is_torn: written > 0 };
        }
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The line about lines that are missing.
fn of_gap(format: LogFormat, left_out: u64) -> String {
    const MESSAGE: &str = "lines of the log could not be written and were left out";
    let priority = Priority::WARNING;
    match format {
        LogFormat::Text => format!("{priority}WARN {MESSAGE} left_out={left_out}\n"),
        LogFormat::Json => {
            format!("{priority}{{\"level\":\"WARN\",\"message\":\"{MESSAGE}\",\"left_out\":{left_out}}}\n")
        }
    }
}

/// Writes all of it, or says how many bytes could be.
fn put(file: &mut StderrLock<'_>, bytes: &[u8], patience: Duration) -> Result<(), usize> {
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
fn is_ready(file: &StderrLock<'_>, patience: Duration) -> bool {
    let timeout = PollTimeout::try_from(patience).unwrap_or(PollTimeout::ZERO);
    // What cannot be asked is tried.
    poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLOUT)], timeout) != Ok(0)
}
