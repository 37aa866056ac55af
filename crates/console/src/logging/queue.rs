//! Queue of log lines for a thread that writes them.
//!
//! The file system of a log may stop responding, and the reader of a pipe may stop reading. A
//! thread that serves disks must not wait for either, so it only appends a line here. Beyond
//! [`MAX_QUEUED_BYTES`], lines are dropped and counted, and the log reports their number before the
//! next line.
//!
//! ```text
//!   threads ── line ──► queue ──► writer, a thread that ends once the queue is empty ──► file
//!                └─ full: dropped += 1
//! ```
//!
//! The first line of a burst starts the writer. So a process that has logged nothing has no such
//! thread, and a writer has the privileges of the thread that starts it. After a new file was
//! opened, a new writer starts ([`resume`]), because the former one may be blocked on the former
//! file.

use std::{
    collections::VecDeque,
    sync::{Condvar, Mutex, MutexGuard, PoisonError},
    thread,
    time::Duration,
};

use nix::sys::signal::SigSet;

// Bytes of queued lines: thousands of lines, such as those of a start with many disks.
const MAX_QUEUED_BYTES: usize = 1 << 20;
// Longest wait for queued lines at the end of the process.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(2);
/// Name of the writer's thread.
pub const THREAD: &str = "log";

/// Line, and the number of lines that were dropped before it.
pub(super) struct LogLine {
    pub(super) line: Vec<u8>,
    pub(super) dropped: u64,
}

type WriteLine = fn(LogLine);

struct LogQueue {
    entries: VecDeque<LogLine>,
    bytes: usize,
    // Lines dropped since the last one that was appended.
    dropped: u64,
    // Number of the current writer; `None` if none runs.
    writer: Option<u64>,
    writers: u64,
    // Function for lines for which no thread could be started; `flush` then calls it.
    write: Option<WriteLine>,
}

static QUEUE: Mutex<LogQueue> = Mutex::new(LogQueue::new());
static EMPTY: Condvar = Condvar::new();

fn lock() -> MutexGuard<'static, LogQueue> {
    QUEUE.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LogQueue {
    const fn new() -> Self {
        Self { entries: VecDeque::new(), bytes: 0, dropped: 0, writer: None, writers: 0, write: None }
    }

    fn append(&mut self, line: &[u8]) {
        if self.bytes + line.len() > MAX_QUEUED_BYTES {
            self.dropped += 1;
            return;
        }
        self.bytes += line.len();
        let dropped = std::mem::take(&mut self.dropped);
        self.entries.push_back(LogLine { line: line.to_vec(), dropped });
    }

    /// Next line. An empty one reports drops at the end of the queue.
    fn next(&mut self) -> Option<LogLine> {
        if let Some(entry) = self.entries.pop_front() {
            self.bytes -= entry.line.len();
            return Some(entry);
        }
        let dropped = std::mem::take(&mut self.dropped);
        (dropped > 0).then(|| LogLine { line: Vec::new(), dropped })
    }

    /// Number of a new writer, which replaces the current one.
    fn next_writer(&mut self) -> u64 {
        self.writers += 1;
        self.writer = Some(self.writers);
        // A former writer finds another number here after its write and ends.
        self.writers
    }

    fn is_empty(&self) -> bool {
        self.entries.is_empty() && self.dropped == 0
    }

    fn start_writer(&mut self, write: WriteLine) {
        self.write = Some(write);
        let number = self.next_writer();
        let started = thread::Builder::new().name(THREAD.to_owned()).spawn(move || run(number, write));
        // If the thread cannot be started, the next line tries again.
        if started.is_err() {
            self.writer = None;
        }
    }
}

/// Appends a line, which a thread passes to `write`. Never waits for the destination.
pub(super) fn append(line: &[u8], write: WriteLine) {
    let mut queue = lock();
    queue.append(line);
    if queue.writer.is_none() {
        queue.start_writer(write);
    }
}

/// Replaces the writer, if one runs.
pub(super) fn resume(write: WriteLine) {
    let mut queue = lock();
    if queue.writer.is_some() {
        queue.start_writer(write);
    }
}

/// Waits until all lines are written, at most two seconds. Returns true if they are. Blocks.
/// Writes the lines itself if no thread could be started.
pub fn flush() -> bool {
    let mut queue = lock();
    if let (None, false, Some(write)) = (queue.writer, queue.is_empty(), queue.write) {
        let number = queue.next_writer();
        drop(queue);
        write_lines(number, write);
        queue = lock();
    }
    let waits = |queue: &mut LogQueue| queue.writer.is_some();
    let waited = EMPTY.wait_timeout_while(queue, FLUSH_TIMEOUT, waits);
    waited.unwrap_or_else(PoisonError::into_inner).0.writer.is_none()
}

fn run(number: u64, write: WriteLine) {
    // Signals are for the threads that await them.
    let _ = SigSet::all().thread_block();
    write_lines(number, write);
}

/// Writes lines until the queue is empty or another writer replaces this one. The lock is released
/// during each write.
fn write_lines(number: u64, write: WriteLine) {
    loop {
        let entry = {
            let mut queue = lock();
            if queue.writer != Some(number) {
                return;
            }
            let Some(entry) = queue.next() else {
                queue.writer = None;
                EMPTY.notify_all();
                return;
            };
            entry
        };
        write(entry);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_full_queue_drops_lines_and_reports_their_number() {
        let mut queue = LogQueue::new();
        let line = vec![b'x'; MAX_QUEUED_BYTES / 4];
        (0..7).for_each(|_| queue.append(&line));
        let taken: Vec<_> = (0..2).filter_map(|_| queue.next()).map(|entry| entry.dropped).collect();
        assert_eq!(taken, [0, 0]);
        queue.append(b"short");
        queue.append(&vec![b'x'; MAX_QUEUED_BYTES]);
        let taken: Vec<_> =
            std::iter::from_fn(|| queue.next()).map(|entry| (entry.line.len(), entry.dropped)).collect();
        assert_eq!(taken, [(MAX_QUEUED_BYTES / 4, 0), (MAX_QUEUED_BYTES / 4, 0), (5, 3), (0, 1)]);
        assert_eq!(queue.bytes, 0);
    }

    #[test]
    fn a_flush_writes_the_lines_that_no_thread_could_be_started_for() {
        static WRITTEN: Mutex<Vec<Vec<u8>>> = Mutex::new(Vec::new());
        {
            let mut queue = lock();
            queue.write = Some(|line| WRITTEN.lock().unwrap().push(line.line));
            queue.append(b"one");
            queue.append(b"two");
        }
        assert!(flush());
        assert_eq!(*WRITTEN.lock().unwrap(), [b"one", b"two"]);
        assert!(lock().is_empty());
    }
}
