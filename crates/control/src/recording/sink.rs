//! Sink of a recording: a file, a pipe or a socket, written without blocking.
//!
//! A block is encoded once per second, or when it is full. Bytes that the file does not accept wait
//! in memory, up to [`MAX_BUFFERED_BYTES`]; beyond that, requests are dropped.

use std::{
    collections::{HashMap, VecDeque},
    io::{self, ErrorKind, Write},
    os::fd::OwnedFd,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::{SystemTime, UNIX_EPOCH},
};

use block::recorder::{DiskOperation, RequestRecord};
use nix::fcntl::{FcntlArg, OFlag, fcntl};
use policy::time::{Duration, Instant};
use recording::{LimitChange, RecordedTimes, RecordingEntry, RecordingWriter, RequestOp};

use super::{
    engine::RecordingOutput,
    limits::{LimitKey, LimitsByOwner, OwnerLimits},
    names::RecordedDiskEntry,
};

/// Maximum number of buffered bytes: some seconds of half a million requests per second.
const MAX_BUFFERED_BYTES: usize = 32 << 20;
/// Maximum age of a block when it is written; bounds the loss if the daemon is killed.
const MAX_BLOCK_AGE: Duration = Duration::from_secs(1);
/// Time that a reader has to receive the rest after the recording has ended.
const END_TIMEOUT: Duration = Duration::from_secs(10);

/// Counters of a recording, readable during and after it.
#[derive(Debug, Default)]
pub struct RecordingProgress {
    requests: AtomicU64,
    dropped: AtomicU64,
    bytes: AtomicU64,
    error: Mutex<Option<String>>,
}

impl RecordingProgress {
    pub fn requests(&self) -> u64 {
        self.requests.load(Relaxed)
    }

    pub fn dropped(&self) -> u64 {
        self.dropped.load(Relaxed)
    }

    /// Bytes written.
    pub fn bytes(&self) -> u64 {
        self.bytes.load(Relaxed)
    }

    /// Error that ended the recording.
    pub(crate) fn error(&self) -> Option<String> {
        self.error.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Subtracts requests that were counted as recorded but not written.
    pub(super) fn subtract_unwritten(&self, requests: u64) {
        self.requests.fetch_sub(requests, Relaxed);
    }

    /// Adds dropped requests.
    pub(super) fn add_dropped(&self, requests: u64) {
        self.dropped.fetch_add(requests, Relaxed);
    }

    fn fail(&self, error: &io::Error) {
        let why = match error.kind() {
            ErrorKind::BrokenPipe => "the reader has closed the recording".to_owned(),
            _ => error.to_string(),
        };
        self.error.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(why);
    }
}

pub(super) struct RecordingSink {
    writer: RecordingWriter<BufferedFile>,
    started: Instant,
    block_started: Instant,
    /// Deadline of the reader; set when the recording has ended.
    reader_deadline: Option<Instant>,
    /// Latest limits of each disk and group that changed while the buffer was full.
    pending_limits: HashMap<LimitKey, LimitChange>,
    /// Number of requests accepted since the file last held all of them.
    unwritten: u64,
    is_empty: bool,
    error: Option<io::Error>,
    progress: Arc<RecordingProgress>,
}

impl RecordingSink {
    /// Creates a sink. Times in the recording are relative to `now`.
    pub(super) fn new(file: OwnedFd, now: Instant, progress: Arc<RecordingProgress>) -> io::Result<Self> {
        // A regular file never returns EAGAIN; a pipe with a slow reader must not block the thread.
        let flags = OFlag::from_bits_retain(fcntl(&file, FcntlArg::F_GETFL)?);
        fcntl(&file, FcntlArg::F_SETFL(flags | OFlag::O_NONBLOCK))?;
        let clock_ns = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_nanos();
        let output =
            BufferedFile { file: file.into(), buffered: VecDeque::new(), written: 0, complete_bytes: 0 };
        let writer = RecordingWriter::new(output, u64::try_from(clock_ns).unwrap_or(u64::MAX))?;
        let (ends_by, error) = (None, None);
        Ok(Self {
            writer,
            started: now,
            block_started: now,
            reader_deadline: ends_by,
            pending_limits: HashMap::new(),
            unwritten: 0,
            is_empty: true,
            error,
            progress,
        })
    }

    /// Removes and returns the error that stopped the sink.
    pub(super) fn take_error(&mut self) -> Option<io::Error> {
        self.error.take()
    }

    /// Upper bound of the number of accepted requests that are not in the file.
    pub(super) fn unwritten(&self) -> u64 {
        self.unwritten
    }

    /// True if no request is in the file.
    pub(super) fn is_empty(&self) -> bool {
        self.is_empty
    }

    /// Number of bytes written to the file.
    pub(super) fn bytes(&self) -> u64 {
        self.writer.output().written
    }

    /// Truncates a regular file to its last complete block; readers stop at a partial block.
    pub(super) fn truncate_to_blocks(&self) -> io::Result<()> {
        let BufferedFile { file, complete_bytes: complete, .. } = self.writer.output();
        file.set_len(*complete)
    }

    /// Counts dropped requests, and records their number in the file.
    pub(super) fn drop_requests(&mut self, requests: u64) {
        self.progress.add_dropped(requests);
        self.record_dropped(requests);
    }

    /// Records a number of dropped requests in the file.
    pub(super) fn record_dropped(&mut self, requests: u64) {
        self.writer.add_lost(requests);
    }

    pub(super) fn add_request(&mut self, request: &RequestRecord, recorded_disk: &RecordedDiskEntry) {
        let parts = u64::from(request.requests.max(1));
        if self.error.is_some() || self.writer.output().buffered.len() > MAX_BUFFERED_BYTES {
            return self.drop_requests(parts);
        }
        let nanos = |from: Instant, to: Instant| to.nanos_since(from);
        let limit = request.throttle_cause.and_then(|cause| recorded_disk.cause_name(cause));
        let length = request.length / parts;
        let times = RecordedTimes {
            wait_ns: nanos(request.arrived, request.admitted),
            service_ns: nanos(request.admitted, request.completed),
        };
        // Merged requests are recorded as separate requests with equal times and lengths.
        for part in 0..parts {
            let offset = request.offset + part * length;
            let entry = RecordingEntry {
                arrival_ns: nanos(self.started, request.arrived),
                times: Some(times),
                offset,
                length,
                op: op(request.operation),
                has_failed: request.has_failed,
                disk: request.disk,
                limit: limit.map(|(number, _)| number),
            };
            let written =
                self.writer.push(entry, || &recorded_disk.name, || limit.map_or("", |(_, name)| name));
            self.record_error(written);
        }
        self.unwritten += parts;
        self.progress.requests.fetch_add(parts, Relaxed);
    }

    /// Records limits that are in force from `at` on.
    pub(super) fn add_limits(&mut self, limits: &OwnerLimits, at: Instant) {
        let change = limits.change(at.nanos_since(self.started));
        self.pending_limits.insert(limits.key(), change);
        self.write_limits();
    }

    /// Passes withheld limits to the writer, if the buffer has space.
    fn write_limits(&mut self) {
        if self.error.is_some() || self.writer.output().buffered.len() > MAX_BUFFERED_BYTES {
            return;
        }
        for (_, change) in std::mem::take(&mut self.pending_limits) {
            let written = self.writer.change_limits(change);
            self.record_error(written);
        }
    }

    /// Encodes the current block.
    pub(super) fn encode_block(&mut self) {
        self.block_started = reactor::real_time();
        let written = self.writer.end_block();
        self.record_error(written);
    }

    /// Encodes a block that is due, and writes as much as the file accepts.
    pub(super) fn write_due(&mut self) {
        self.write_limits();
        let age = reactor::real_time().nanos_since(self.block_started);
        if age >= u64::try_from(MAX_BLOCK_AGE.as_nanos()).unwrap_or(u64::MAX) {
            self.encode_block();
        }
        if self.error.is_none() {
            let written = self.writer.output_mut().write_pending(&self.progress);
            self.record_error(written);
        }
        // The file ends with a complete block at this point.
        if self.writer.is_block_empty() && self.writer.output().buffered.is_empty() && self.error.is_none() {
            self.is_empty &= self.unwritten == 0;
            self.unwritten = 0;
            let output = self.writer.output_mut();
            output.complete_bytes = output.written;
        }
    }

    fn record_error(&mut self, written: io::Result<()>) {
        if let Err(error) = written {
            self.error.get_or_insert(error);
        }
    }
}

/// Output of a recording that a client reads through a pipe or socket while it is made.
impl RecordingOutput for RecordingSink {
    fn add_request(&mut self, finished: &RequestRecord, named: &RecordedDiskEntry, _: &LimitsByOwner) {
        self.add_request(finished, named);
    }

    fn add_limits(&mut self, limits: &OwnerLimits, at: Instant) {
        self.add_limits(limits, at);
    }

    fn write_due(&mut self, lost: u64) {
        if lost > 0 {
            self.drop_requests(lost);
        }
        self.write_due();
    }

    fn end(&mut self) {
        self.encode_block();
        self.reader_deadline = Some(reactor::real_time() + END_TIMEOUT);
    }

    fn has_ended(&mut self) -> bool {
        let is_whole = self.writer.output().buffered.is_empty();
        if !is_whole && self.reader_deadline.is_some_and(|by| reactor::real_time() >= by) {
            self.record_error(Err(io::Error::other("the reader has not read the rest in time")));
        }
        if let Some(error) = &self.error {
            self.progress.fail(error);
        }
        self.error.is_some() || self.reader_deadline.is_some() && is_whole
    }
}

/// File with a buffer of the bytes that it has not accepted yet.
struct BufferedFile {
    file: std::fs::File,
    buffered: VecDeque<u8>,
    written: u64,
    /// Bytes written up to the end of the last complete block.
    complete_bytes: u64,
}

impl BufferedFile {
    fn write_pending(&mut self, progress: &RecordingProgress) -> io::Result<()> {
        while !self.buffered.is_empty() {
            // First contiguous part of the ring buffer; the next iteration writes the second.
            let (first, _) = self.buffered.as_slices();
            match self.file.write(first) {
                Ok(0) => return Err(ErrorKind::WriteZero.into()),
                Ok(count) => {
                    self.buffered.drain(..count);
                    self.written += count as u64;
                    progress.bytes.fetch_add(count as u64, Relaxed);
                }
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(()),
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }
}

impl Write for BufferedFile {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.buffered.extend(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

fn op(operation: DiskOperation) -> RequestOp {
    match operation {
        DiskOperation::Read => RequestOp::Read,
        DiskOperation::Write => RequestOp::Write,
        DiskOperation::WriteZeroes => RequestOp::WriteZeroes,
        DiskOperation::Flush => RequestOp::Flush,
        DiskOperation::Discard => RequestOp::Discard,
    }
}

#[cfg(test)]
impl RecordingSink {
    /// Writes half of the pending bytes and then fails, as on a full disk.
    pub(super) fn write_half_block(&mut self) {
        self.encode_block();
        let output = self.writer.output_mut();
        let half = output.buffered.len() / 2;
        assert!(half > 0, "there is a block to be written");
        let part: Vec<u8> = output.buffered.drain(..half).collect();
        output.file.write_all(&part).expect("the disk has space");
        self.record_error(Err(ErrorKind::StorageFull.into()));
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read as _, thread};

    use nix::unistd::pipe;

    use super::*;

    #[test]
    fn slow_reader_drops_requests_in_bounded_memory() {
        let (reader, writer) = pipe().unwrap();
        let progress = Arc::<RecordingProgress>::default();
        let mut sink = RecordingSink::new(writer, Instant::ZERO, Arc::clone(&progress)).unwrap();
        let named = RecordedDiskEntry::without_group(0, "vm1");
        let mut random = 1_u64;
        let mut submitted = 0;
        // Fills the pipe, then the buffer.
        while progress.dropped() < 1000 {
            // Knuth's MMIX generator, so that the data do not compress.
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let at = |nanos: u64| Instant::from_nanos(submitted * 1000 + nanos % 1_000_000);
            sink.add_request(
                &RequestRecord {
                    disk: 0,
                    operation: DiskOperation::Read,
                    offset: random >> 20 << 9,
                    length: 512,
                    requests: 1,
                    has_failed: false,
                    arrived: at(0),
                    admitted: at(random >> 44),
                    throttle_cause: None,
                    completed: at(1_000_000 + (random >> 30)),
                },
                &named,
            );
            submitted += 1;
            if submitted % 10_000 == 0 {
                RecordingOutput::write_due(&mut sink, 0);
            }
        }
        assert!(sink.writer.output().buffered.capacity() < 3 * MAX_BUFFERED_BYTES);
        assert_eq!(progress.requests() + progress.dropped(), submitted);
        // Once the reader reads, it receives everything that was buffered.
        let read = thread::spawn(move || File::from(reader).read_to_end(&mut Vec::new()).unwrap());
        sink.end();
        while !sink.has_ended() {
            RecordingOutput::write_due(&mut sink, 0);
        }
        drop(sink);
        assert_eq!((read.join().unwrap() as u64, progress.error()), (progress.bytes(), None));
    }
}
