//! Destination of the log: standard error, or a file.
//!
//! A file system may be full, and the reader of a pipe may have stopped. A daemon continues to
//! serve disks in both cases: lines that cannot be written are dropped and counted, and the next
//! line that can be written is preceded by their number. A thread of the [`queue`] writes the
//! lines.

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
    JournalPriority,
    queue::{self, LogLine},
};

// Longest wait of a line for a slow reader. Later lines do not wait until a write has succeeded.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
// Bytes that a pipe accepts at once if poll(2) reports it writable (`PIPE_BUF`, pipe(7)).
const MAX_WRITE: usize = 4096;

// Mode of a new file: names of disks and clients are readable only for the owner and the group.
const MODE: u32 = 0o640;

// File that receives lines instead of standard error.
static FILE: Mutex<Option<(PathBuf, Arc<File>)>> = Mutex::new(None);

fn current() -> MutexGuard<'static, Option<(PathBuf, Arc<File>)>> {
    FILE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Appends lines to this file from now on. Returns the former file: closing a file may block, so
/// the caller drops it outside all locks that a writer needs.
///
/// # Errors
/// Fails if the file cannot be opened or is a block device. The destination is then unchanged.
pub(super) fn open(path: &Path) -> io::Result<Option<Arc<File>>> {
    let mut options = File::options();
    // Opening a FIFO without a reader then fails (ENXIO) instead of waiting for one.
    options.append(true).create(true).mode(MODE).custom_flags(O_NONBLOCK);
    let file = options.open(path)?;
    if file.metadata()?.file_type().is_block_device() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "is a block device"));
    }
    let next = (std::path::absolute(path)?, Arc::new(file));
    let former = current().replace(next);
    Ok(former.map(|(_, file)| file))
}

// Calls of [`reopen`] since the running one began; 0 if none runs.
static REOPENINGS: AtomicUsize = AtomicUsize::new(0);

/// Opens the file of [`open`] again, if there is one. Returns false if another call is in
/// progress: that call then opens the file once more. So a file system that does not respond
/// blocks at most one thread.
///
/// # Errors
/// Fails as [`open`], with the path of the file.
pub(super) fn reopen() -> Result<bool, (PathBuf, io::Error)> {
    if REOPENINGS.fetch_add(1, SeqCst) > 0 {
        return Ok(false);
    }
    loop {
        let calls = REOPENINGS.load(SeqCst);
        let result = reopen_once();
        // Fails if another call came in meanwhile: the file may have been renamed after this
        // opening.
        if REOPENINGS.compare_exchange(calls, 0, SeqCst, SeqCst).is_ok() {
            return result.map(|()| true);
        }
    }
}

fn reopen_once() -> Result<(), (PathBuf, io::Error)> {
    let path = current().as_ref().map(|(path, _)| path.clone());
    let Some(path) = path else { return Ok(()) };
    let former = open(&path).map_err(|error| (path, error))?;
    // The former writer may hold the last reference to the former file; dropping it could block
    // that thread for long. This reference keeps the file open until a new writer has taken over.
    queue::resume(write);
    if let Some(former) = former {
        close(former);
    }
    Ok(())
}

// Former log files that are to be closed.
struct ClosingFiles {
    files: Vec<Arc<File>>,
    has_thread: bool,
}

static CLOSING: Mutex<ClosingFiles> = Mutex::new(ClosingFiles { files: Vec::new(), has_thread: false });

fn closing_files() -> MutexGuard<'static, ClosingFiles> {
    CLOSING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Closes a file on a thread that ends when no former file is left. The file system of one may
/// never respond.
fn close(file: Arc<File>) {
    let mut closing = closing_files();
    closing.files.push(file);
    if !closing.has_thread {
        let started = thread::Builder::new().name(queue::THREAD.to_owned()).spawn(close_files);
        // If the thread cannot be started, the next reopening starts one.
        closing.has_thread = started.is_ok();
    }
}

fn close_files() {
    let _ = SigSet::all().thread_block();
    loop {
        let file = {
            let mut closing = closing_files();
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

// Format of the log, set by the first line.
static FORMAT: OnceLock<LogFormat> = OnceLock::new();

/// Writer that appends to the queue.
#[derive(Clone, Copy, Debug)]
pub(super) struct LogFile(pub(super) LogFormat);

// Result of the lines before this one.
struct LogGap {
    suppressed: u64,
    // The last line was written partly: the next one begins with a newline.
    is_torn: bool,
}

static BEFORE: Mutex<LogGap> = Mutex::new(LogGap { suppressed: 0, is_torn: false });

fn gap() -> MutexGuard<'static, LogGap> {
    BEFORE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Write for LogFile {
    /// Appends a whole line to the queue. Never fails and never waits.
    fn write(&mut self, line: &[u8]) -> io::Result<usize> {
        let _ = FORMAT.set(self.0);
        queue::append(line, write);
        Ok(line.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes a line; may wait for the file system. Holds no lock on the file, so that [`reopen`] can
/// replace it meanwhile.
fn write(LogLine { line, dropped }: LogLine) {
    let log_file = current().as_ref().map(|(_, file)| Arc::clone(file));
    // Copied, not held: a writer that waits for a former file must not block its successor.
    let LogGap { suppressed, is_torn } = *gap();
    let suppressed = suppressed + dropped;
    let priority = if log_file.is_some() { String::new() } else { JournalPriority::WARNING.to_string() };
    // Lines were lost at the destination (not only in the queue): do not wait again for each line.
    let timeout = if suppressed == dropped { WRITE_TIMEOUT } else { Duration::ZERO };
    let mut text = String::new();
    if is_torn {
        text.push('\n');
    }
    if suppressed > 0 {
        text.push_str(&gap_line(FORMAT.get().copied().unwrap_or_default(), &priority, suppressed));
    }
    let write_bytes = |bytes: &[u8]| match &log_file {
        Some(file) => put(&mut &**file, bytes, timeout),
        None => put(&mut stderr().lock(), bytes, timeout),
    };
    // A line without text only reports the drops of the queue, and is not a line itself.
    let lines = u64::from(!line.is_empty());
    *gap() = match write_bytes(text.as_bytes()) {
        Err(written) => LogGap { suppressed: suppressed + lines, is_torn: is_torn || written > 0 },
        Ok(()) => match write_bytes(&line) {
            Ok(()) => LogGap { suppressed: 0, is_torn: false },
            Err(written) => LogGap { suppressed: lines, is_torn: written > 0 },
        },
    };
}

// Destination that can be polled.
trait LogOutput: Write + AsFd {}

impl<S: Write + AsFd> LogOutput for S {}

/// Line that reports the number of missing lines.
fn gap_line(format: LogFormat, priority: &str, suppressed: u64) -> String {
    const MESSAGE: &str = "log lines were lost because they could not be written";
    match format {
        LogFormat::Text => format!("{priority}WARN {MESSAGE} suppressed={suppressed}\n"),
        LogFormat::Json => {
            format!(
                "{priority}{{\"level\":\"WARN\",\"message\":\"{MESSAGE}\",\"suppressed\":{suppressed}}}\n"
            )
        }
    }
}

/// Writes all bytes. On failure returns the number of bytes written.
fn put(file: &mut dyn LogOutput, bytes: &[u8], timeout: Duration) -> Result<(), usize> {
    let mut written = 0;
    while written < bytes.len() {
        if !is_ready(file, timeout) {
            return Err(written);
        }
        // At most PIPE_BUF bytes: a larger write to a pipe could block although poll(2) reported
        // it writable.
        match file.write(&bytes[written..bytes.len().min(written + MAX_WRITE)]) {
            Ok(count) if count > 0 => written += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            _ => return Err(written),
        }
    }
    Ok(())
}

/// True if a write of [`MAX_WRITE`] bytes does not block. Waits for that at most `wait`.
fn is_ready(file: &dyn LogOutput, wait: Duration) -> bool {
    let timeout = PollTimeout::try_from(wait).unwrap_or(PollTimeout::ZERO);
    // If poll itself fails, the write is tried.
    poll(&mut [PollFd::new(file.as_fd(), PollFlags::POLLOUT)], timeout) != Ok(0)
}
