//! Permanent recording: one file per hour in a directory, oldest files removed.
//!
//! ```text
//!   2026-11-23T23-00-00.012Z.recording  ─► removed: too old, or above the size limit
//!   2026-11-24T00-00-00.003Z.recording
//!   2026-11-24T01-00-00.018Z.recording  ◄─ requests
//! ```
//!
//! A file is created with its first record. If writing fails, that is logged once, and records are
//! dropped and counted until it succeeds again; the next file contains their number. One daemon per
//! directory, which it locks; during an upgrade two processes write, and only the one with the lock
//! removes files. Never touches a file with another form of name.

use std::{
    collections::{BTreeMap, BTreeSet},
    ffi::{OsStr, OsString},
    fs::{self, File},
    io::{self, ErrorKind},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use block::recorder::RequestRecord;
use console::figures::date;
use policy::time::Instant;
use rustix::{
    fs::{FlockOperation, flock},
    io::Errno,
};
use settings::RecordingConfig;

use super::{
    engine::RecordingOutput,
    limits::{LimitsByOwner, OwnerLimits},
    names::RecordedDiskEntry,
    sink::{RecordingProgress, RecordingSink},
};

/// Maximum number of removed disks and groups whose limits the next file ends. Reports draw the
/// limits of further ones up to the end of the report.
const MAX_REMOVED_OWNERS: usize = 10_000;
/// Interval between attempts after a write error.
const RETRY_INTERVAL: Duration = Duration::from_secs(10);
/// Quotient of the size limit of all files and the maximum size of one file. Bounds the loss when
/// the oldest file is removed.
const FILE_SIZE_DIVISOR: u64 = 8;
const HOUR_SECONDS: u64 = 3600;
/// Mode of the files; access patterns are not public.
const FILE_MODE: u32 = 0o640;
const FILE_SUFFIX: &str = "Z.recording";

/// Interruption by a write error.
struct WriteInterruption {
    /// Number of requests that were not recorded.
    lost: u64,
    retry_at: Instant,
    /// Logged reason; a different one is logged again.
    why: String,
}

pub(super) struct RecordingDirectory {
    record: RecordingConfig,
    /// Current file and its path.
    current: Option<(RecordingSink, PathBuf)>,
    /// Device and inode of the current file.
    file: (u64, u64),
    /// Current hour, in hours since 1970.
    hour: u64,
    stopped: Option<WriteInterruption>,
    has_ended: bool,
    progress: Arc<RecordingProgress>,
    /// Lock of the directory; `None` while another daemon has it.
    lock: Option<File>,
    /// Age of each existing file when first seen, and that instant of the monotonic clock.
    first_seen: BTreeMap<OsString, (Duration, Instant)>,
    /// Files that could not be removed and were logged.
    stuck: BTreeSet<OsString>,
    /// Disks and groups that lost their limits while no file was open. The next file ends the
    /// limits of those that were removed.
    removed: LimitsByOwner,
}

impl RecordingDirectory {
    pub(super) fn new(record: RecordingConfig) -> Self {
        let progress = Arc::default();
        // `hour` 0 makes the first call of `turn` prune existing files.
        let empty = BTreeMap::new();
        Self {
            record,
            current: None,
            file: (0, 0),
            hour: 0,
            stopped: None,
            has_ended: false,
            progress,
            lock: None,
            first_seen: empty,
            stuck: BTreeSet::new(),
            removed: LimitsByOwner::new(),
        }
    }

    pub(super) fn progress(&self) -> &Arc<RecordingProgress> {
        &self.progress
    }

    /// Sink of the current file; opens a file if necessary. `None` while interrupted.
    fn open_sink(&mut self, limits: &LimitsByOwner) -> Option<&mut RecordingSink> {
        if self.current.is_none() {
            let now = reactor::real_time();
            if self.stopped.as_ref().is_some_and(|stopped| now < stopped.retry_at) {
                return None;
            }
            match self.open(now, limits) {
                Ok(opened) => self.current = Some(opened),
                Err(error) => self.interrupt(&error, 0),
            }
        }
        self.current.as_mut().map(|(sink, _)| sink)
    }

    /// Limits at the start of a file: all in force, including empty ones of disks and groups that
    /// may have had limits in the previous file.
    fn first_limits(&mut self, limits: &LimitsByOwner) -> Vec<OwnerLimits> {
        let removed = std::mem::take(&mut self.removed).into_iter();
        let removed = removed.filter(|(owner, _)| !limits.contains_key(owner)).map(|(_, none)| none);
        limits.values().cloned().chain(removed).collect()
    }

    fn open(&mut self, now: Instant, limits: &LimitsByOwner) -> io::Result<(RecordingSink, PathBuf)> {
        self.prune()?;
        let (file, path) = create(&self.record.directory)?;
        self.file = identity(&file.metadata()?);
        let mut sink = RecordingSink::new(file.into(), now, Arc::clone(&self.progress))?;
        if let Some(stopped) = &self.stopped {
            sink.record_dropped(stopped.lost);
        }
        self.first_limits(limits).iter().for_each(|limits| sink.add_limits(limits, now));
        Ok((sink, path))
    }

    /// Removes files that are too old, and the oldest files above the size limit. Does nothing
    /// while another daemon holds the lock.
    fn prune(&mut self) -> io::Result<()> {
        if !self.try_lock() {
            return Ok(());
        }
        let now = reactor::real_time();
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.record.directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_str().is_some_and(is_recording_name) {
                let known = entry.metadata()?;
                // Not one of weir's files, although it is named like one.
                if !known.is_file() {
                    continue;
                }
                let age = self.age(&name, now, known.modified()?);
                files.push((age, name, known.len()));
            }
        }
        // Newest first. Files that two processes wrote at the same time are ordered by name.
        files.sort_by(|a, b| a.0.cmp(&b.0).then_with(|| b.1.cmp(&a.1)));
        self.first_seen.retain(|known, _| files.iter().any(|(_, name, _)| name == known));
        self.stuck.retain(|known| files.iter().any(|(_, name, _)| name == known));
        // One part is kept free for the current file, which grows to that size.
        let mut remaining = self.record.limit - self.record.limit / FILE_SIZE_DIVISOR;
        for (age, name, length) in files {
            remaining = remaining.saturating_sub(length);
            if age > self.record.keep || remaining == 0 {
                self.remove(name);
            }
        }
        Ok(())
    }

    /// Removes a file. A failure does not interrupt the recording.
    fn remove(&mut self, name: OsString) {
        let path = self.record.directory.join(&name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound && self.stuck.insert(name) => {
                tracing::warn!("record: {}: {error} (an old recording could not be removed)", path.display());
            }
            _ => {}
        }
    }

    /// Tries to lock the directory. True if this daemon has the lock.
    fn try_lock(&mut self) -> bool {
        if self.lock.is_none() {
            // Ignored: creating the next file reports the error.
            self.lock = lock(&self.record.directory).ok().flatten();
        }
        self.lock.is_some()
    }

    /// Time since the end of a file. The wall clock is read only when the file is first seen, so
    /// that setting the clock does not make recent files old.
    fn age(&mut self, name: &OsStr, now: Instant, ended_at: SystemTime) -> Duration {
        let age = || (ended_at.elapsed().unwrap_or_default(), now);
        let &mut (before, at) = self.first_seen.entry(name.to_owned()).or_insert_with(age);
        before.saturating_add(Duration::from_nanos(now.nanos_since(at)))
    }

    /// Records the end of the current file.
    fn record_end(&mut self, path: &Path) {
        let name = path.file_name().unwrap_or_default().to_owned();
        self.first_seen.insert(name, (Duration::ZERO, reactor::real_time()));
    }

    /// Interrupts the recording after an error; `lost` requests were not recorded.
    fn interrupt(&mut self, error: &io::Error, lost: u64) {
        let next_attempt = reactor::real_time() + RETRY_INTERVAL;
        let before = self.stopped.take();
        let why = error.to_string();
        if before.as_ref().is_none_or(|before| before.why != why) {
            let directory = self.record.directory.display();
            // The sandbox permits writing only to the directory that existed at the start.
            let remedy = match (&before, error.kind()) {
                (Some(_), ErrorKind::PermissionDenied) => "; after replacing the directory, restart weir",
                _ => "",
            };
            tracing::warn!("record: {directory}: {why} (nothing is recorded until this is fixed{remedy})");
        }
        self.progress.add_dropped(lost);
        self.stopped = Some(WriteInterruption {
            lost: before.map_or(0, |before| before.lost) + lost,
            retry_at: next_attempt,
            why,
        });
    }

    fn count_dropped(&mut self, requests: u64) {
        match (&mut self.current, &mut self.stopped) {
            (Some((sink, _)), _) => sink.drop_requests(requests),
            (None, Some(stopped)) => {
                stopped.lost += requests;
                self.progress.add_dropped(requests);
            }
            (None, None) => self.progress.add_dropped(requests),
        }
    }

    /// True if the current file is still at its path; it or its directory may have been moved or
    /// removed.
    fn is_current_in_place(&self) -> bool {
        let Some((_, path)) = &self.current else { return true };
        fs::symlink_metadata(path).is_ok_and(|there| identity(&there) == self.file)
    }

    /// Abandons the current file and retries at once.
    fn abandon_current(&mut self) {
        if let Some((sink, _)) = self.current.take() {
            self.progress.subtract_unwritten(sink.unwritten());
            let error = io::Error::other("the file that was written was moved or removed");
            self.interrupt(&error, sink.unwritten());
            if let Some(stopped) = &mut self.stopped {
                stopped.retry_at = Instant::ZERO;
            }
        }
    }

    /// Handles errors and the end of the current file after its sink's `write_due`.
    fn handle_turn_result(&mut self, ends_file: bool) {
        let Some((sink, _)) = &mut self.current else { return };
        if let Some(error) = sink.take_error() {
            let (sink, path) = self.current.take().expect("it is there");
            if sink.is_empty() {
                // A file without requests has no value.
                let _ = fs::remove_file(path);
            } else {
                // On failure, readers use the file up to its last complete block.
                let _ = sink.truncate_to_blocks();
                self.record_end(&path);
            }
            self.progress.subtract_unwritten(sink.unwritten());
            self.interrupt(&error, sink.unwritten());
        } else {
            if !sink.is_empty()
                && let Some(WriteInterruption { lost, .. }) = self.stopped.take()
            {
                tracing::info!(lost, "record: recording resumes");
            }
            if ends_file && let Some((_, path)) = self.current.take() {
                self.record_end(&path);
            }
        }
    }
}

impl RecordingOutput for RecordingDirectory {
    fn add_request(&mut self, finished: &RequestRecord, named: &RecordedDiskEntry, limits: &LimitsByOwner) {
        match self.open_sink(limits) {
            Some(sink) => sink.add_request(finished, named),
            None => self.count_dropped(finished.requests.max(1).into()),
        }
    }

    fn add_limits(&mut self, limits: &OwnerLimits, at: Instant) {
        if let Some((sink, _)) = &mut self.current {
            sink.add_limits(limits, at);
        } else if limits.is_none() && self.removed.len() < MAX_REMOVED_OWNERS {
            self.removed.insert(limits.key(), limits.clone());
        }
    }

    fn write_due(&mut self, lost: u64) {
        if lost > 0 {
            self.count_dropped(lost);
        }
        let hour = seconds(SystemTime::now()) / HOUR_SECONDS;
        // By the wall clock, so that files begin at full hours.
        let is_new_hour = std::mem::replace(&mut self.hour, hour) != hour;
        if !self.is_current_in_place() {
            self.abandon_current();
        }
        self.try_lock();
        if let Some((sink, _)) = &mut self.current {
            let ends_file =
                is_new_hour || self.has_ended || sink.bytes() >= self.record.limit / FILE_SIZE_DIVISOR;
            if ends_file {
                sink.encode_block();
            }
            sink.write_due();
            self.handle_turn_result(ends_file);
        }
        // Also without requests, or an idle daemon would keep old files.
        if is_new_hour && let Err(error) = self.prune() {
            self.interrupt(&error, 0);
        }
    }

    fn end(&mut self) {
        self.has_ended = true;
    }

    fn has_ended(&mut self) -> bool {
        self.has_ended && self.current.is_none()
    }
}

/// # Errors
/// The path is no directory, or no file can be created in it.
pub(super) fn check(directory: &Path) -> io::Result<()> {
    let (_, path) = create(directory)?;
    fs::remove_file(path)
}

/// True if no other daemon records in the directory. `own` is the directory of this daemon or of
/// the old process.
///
/// # Errors
/// The directory cannot be opened.
pub(super) fn is_free(directory: &Path, own: Option<&Path>) -> io::Result<bool> {
    let directory_identity = identity(&fs::metadata(directory)?);
    let is_own =
        own.is_some_and(|own| fs::metadata(own).is_ok_and(|own| identity(&own) == directory_identity));
    Ok(is_own || lock(directory)?.is_some())
}

/// Locks the directory while the returned file is open; `None` if another process holds the lock. A
/// file system without locks gives no exclusion.
fn lock(directory: &Path) -> io::Result<Option<File>> {
    let file = File::open(directory)?;
    let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
    // Other errors mean that the file system has no locks.
    Ok((locked != Err(Errno::WOULDBLOCK)).then_some(file))
}

fn create(directory: &Path) -> io::Result<(File, PathBuf)> {
    let mut clock = SystemTime::now();
    loop {
        let path = directory.join(file_name(clock));
        match File::options().write(true).create_new(true).mode(FILE_MODE).open(&path) {
            Ok(file) => return Ok((file, path)),
            // Another process created the file in the same millisecond.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => clock += Duration::from_millis(1),
            Err(error) => return Err(error),
        }
    }
}

/// File name `2026-11-24T01-00-00.018Z.recording`: sorts by time and is valid on other systems.
fn file_name(clock: SystemTime) -> String {
    let since = clock.duration_since(UNIX_EPOCH).unwrap_or_default();
    let date = date(u32::try_from(since.as_secs()).unwrap_or(u32::MAX)).replace(' ', "T").replace(':', "-");
    format!("{date}.{:03}{FILE_SUFFIX}", since.subsec_millis())
}

fn is_recording_name(name: &str) -> bool {
    let pattern = "0000-00-00T00-00-00.000";
    name.strip_suffix(FILE_SUFFIX).is_some_and(|time| {
        time.len() == pattern.len()
            && time.bytes().zip(pattern.bytes()).all(|(byte, like)| match like {
                b'0' => byte.is_ascii_digit(),
                other => byte == other,
            })
    })
}

fn identity(file: &fs::Metadata) -> (u64, u64) {
    (file.dev(), file.ino())
}

fn seconds(clock: SystemTime) -> u64 {
    clock.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
#[path = "directory_tests.rs"]
mod tests;
