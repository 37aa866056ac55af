//! Destination of the log: standard error, or a file.
//!
//! A file system may be full, and whoever reads a pipe may have stopped. A daemon lives through
//! both, and goes on serving: what cannot be written is left out and counted, and the first line
//! that can be says how many there were. A thread of its [`queue`] writes the lines.

use std::{
    fs::File,
    io::{self, Write, stderr},
    os::{
        fd::AsFd,
        unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    },
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, MutexGuard, OnceLock, PoisonError,
        atomic::{AtomicUsize, Ordering::SeqCst},
    },
    thread,
    time::Duration,
};

use nix::{
    libc::O_NONBLOCK,
    poll::{PollFd, PollFlags, PollTimeout, poll},
    sys::signal::SigSet,
};
use settings::LogFormat;

use super::{
    Priority,
    queue::{self, LogLine},
};

/// How long a line waits for a reader who is slow. Those after it wait no more until he reads on.
const PATIENCE: Duration = Duration::from_secs(1);
/// A pipe that is ready takes so many bytes at once (`PIPE_BUF`, pipe(7)).
const AT_ONCE: usize = 4096;

/// Mode of a new file: names of disks and clients are for the owner and the group alone.
const MODE: u32 = 0o640;

/// The file that receives lines instead of standard error.
static FILE: Mutex<Option<(PathBuf, Arc<File>)>> = Mutex::new(None);

fn current() -> MutexGuard<'static, Option<(PathBuf, Arc<File>)>> {
    FILE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Appends lines to this file from now on. Returns the former file: closing a file may block, so
/// the caller drops it where that stops no writer.
///
/// # Errors
/// The system's, or the path is a directory or a block device. The destination is then unchanged.
pub(super) fn open(path: &Path) -> io::Result<Option<Arc<File>>> {
    let mut options = File::options();
    // Opening a pipe without a reader fails instead of waiting for one.
    options.append(true).create(true).mode(MODE).custom_flags(O_NONBLOCK);
    let file = options.open(path)?;
    if file.metadata()?.file_type().is_block_device() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is a block device"));
    }
    let next = (std::path::absolute(path)?, Arc::new(file));
    let former = current().replace(next);
    Ok(former.map(|(_, file)| file))
}

/// Calls of [`reopen`] since the running one began; 0 if none runs.
static REOPENINGS: AtomicUsize = AtomicUsize::new(0);

/// Opens the file of [`open`] again, if there is one. Returns false if another call is doing so:
/// that call then opens the file once more, and a file system that does not answer blocks one
/// thread at most.
///
/// # Errors
/// As [`open`], with the file's path.
pub(super) fn reopen() -> Result<bool, (PathBuf, io::Error)> {
    if REOPENINGS.fetch_add(1, SeqCst) > 0 {
        return Ok(false);
    }
    loop {
        let calls = REOPENINGS.load(SeqCst);
        let result = reopen_once();
        if REOPENINGS.compare_exchange(calls, 0, SeqCst, SeqCst).is_ok() {
            return result.map(|()| true);
        }
    }
}

fn reopen_once() -> Result<(), (PathBuf, io::Error)> {
    let path = current().as_ref().map(|(path, _)| path.clone());
    let Some(path) = path else { return Ok(()) };
    let former = open(&path).map_err(|error| (path, error))?;
    // The former writer may drop the last reference to the former file, and block. So the former
    // file stays referenced until a new writer has taken over.
    queue::resume(write);
    if let Some(former) = former {
        close(former);
    }
    Ok(())
}

/// Former files of the log that are to be closed.
struct Closing {
    files: Vec<Arc<File>>,
    has_thread: bool,
}

static CLOSING: Mutex<Closing> = Mutex::new(Closing { files: Vec::new(), has_thread: false });

fn closing() -> MutexGuard<'static, Closing> {
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes a file on a thread that ends once all former files are closed. Its file system may never
/// answer.
fn close(file: Arc<File>) {
    let mut closing = closing();
    closing.files.push(file);
    if !closing.has_thread {
        let started = thread::Builder::new().name(queue::THREAD.to_owned()).spawn(close_files);
        // If there is no thread now, the next reopening starts one.
        closing.has_thread = started.is_ok();
    }
}

fn close_files() {
    let _ = SigSet::all().thread_block();
    loop {
        let file = {
            let mut closing = closing();
            let file = closing.files.pop();
            closing.has_thread = file.is_some();
            file
        };
        if file.is_none() {
            return;
        }
        drop(file);
    }
}

/// Format of the log.
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// Writer to the queue of a log of this format.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogFile(pub(super) LogFormat);

/// What became of the lines before.
struct Before {
    left_out: u64,
    /// The last was written in part.
    is_torn: bool,
}

static BEFORE: Mutex<Before> = Mutex::new(Before { left_out: 0, is_torn: false });

fn before() -> MutexGuard<'static, Before> {
    BEFORE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Write for LogFile {
    /// Takes a whole line, and never fails or waits.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = FORMAT.set(self.0);
        queue::append(line, write);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a line, which may wait for the file system. Holds no lock on the file meanwhile, so that
/// it can be opened again.
fn write(LogLine { line, dropped }: LogLine) {
    let own = current().as_ref().map(|(_, file)| Arc::clone(file));
    // As it was before this line. A writer that waits for a former file does not hold it.
    let Before { left_out, is_torn } = *before();
    let left_out = left_out + dropped;
    let priority = if own.is_some() { String::new() } else { Priority::WARNING.to_string() };
    let patience = if left_out == dropped { PATIENCE } else { Duration::ZERO };
    let mut text = String::new();
    if is_torn {
        text.push('\n');
    }
    if left_out > 0 {
        text.push_str(&of_gap(FORMAT.get().copied().unwrap_or_default(), &priority, left_out));
    }
    let put = |bytes: &[u8]| match &own {
        Some(file) => put(&mut &**file, bytes, patience),
        None => put(&mut stderr().lock(), bytes, patience),
    };
    let lines = u64::from(!line.is_empty());
    *before() = match put(text.as_bytes()) {
        Err(written) => Before { left_out: left_out + lines, is_torn: is_torn || written > 0 },
        Ok(()) => match put(&line) {
            Ok(()) => Before { left_out: 0, is_torn: false },
            Err(written) => Before { left_out: lines, is_torn: written > 0 },
        },
    };
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
