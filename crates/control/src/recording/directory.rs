//! A recording that never ends: files in a directory, of an hour each, of which the oldest go.
//!
//! ```text
//!   2026-11-23T23-00-00.012Z.recording  ─► removed: too old, or one too many
//!   2026-11-24T00-00-00.003Z.recording
//!   2026-11-24T01-00-00.018Z.recording  ◄─ requests
//! ```
//!
//! A file is made when there is something to write to it. Where none can be written, that is said
//! once; nothing is recorded until it can again, and what was not is counted in the next file.
//! One daemon to a directory, which it has locked: only while one takes over from another both
//! write, and who has the lock removes. Never touches a file that is not called so.

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
    engine::Output,
    limits::{LimitsByOwner, LimitsInForce},
    names::Named,
    sink::{Progress, Sink},
};

/// Removed disks and groups whose limits the next file ends. A report draws the limits of further
/// ones up to its own end.
const MOST_REMOVED: usize = 10_000;
/// How long a directory that takes nothing is left alone.
const AGAIN: Duration = Duration::from_secs(10);
/// A file is at most so large a part of all: what is gone with the oldest.
const PART: u64 = 8;
const HOUR: u64 = 3600;
/// What disks are asked is not for everybody.
const MODE: u32 = 0o640;
const ENDING: &str = "Z.recording";

/// What is wrong, until it is not any more.
struct Stopped {
    /// Requests that were not recorded.
    lost: u64,
    again: Instant,
    /// As it was said.
    why: String,
}

pub(super) struct Directory {
    record: RecordingConfig,
    /// The file that is written, and its path.
    current: Option<(Sink, PathBuf)>,
    /// Its device and inode.
    file: (u64, u64),
    /// Since 1970.
    hour: u64,
    stopped: Option<Stopped>,
    has_ended: bool,
    progress: Arc<Progress>,
    /// None while another daemon has it.
    lock: Option<File>,
    /// How long ago each file that is there had ended, at a moment of a clock that nobody sets.
    ended: BTreeMap<OsString, (Duration, Instant)>,
    /// Files that should go and cannot be removed, as was said.
    stuck: BTreeSet<OsString>,
    /// Disks and groups that lost their limits while no file was open: the next file ends those
    /// that were removed since.
    removed: LimitsByOwner,
}

impl Directory {
    pub(super) fn new(record: RecordingConfig) -> Self {
        let progress = Arc::default();
        // At once, a look at what is there from before.
        let ended = BTreeMap::new();
        Self {
            record,
            current: None,
            file: (0, 0),
            hour: 0,
            stopped: None,
            has_ended: false,
            progress,
            lock: None,
            ended,
            stuck: BTreeSet::new(),
            removed: LimitsByOwner::new(),
        }
    }

    pub(super) fn progress(&self) -> &Arc<Progress> {
        &self.progress
    }

    /// Where requests go, unless there is nowhere.
    fn sink(&mut self, limits: &LimitsByOwner) -> Option<&mut Sink> {
        if self.current.is_none() {
            let now = reactor::real_time();
            if self.stopped.as_ref().is_some_and(|stopped| now < stopped.again) {
                return None;
            }
            match self.open(now, limits) {
                Ok(opened) => self.current = Some(opened),
                Err(error) => self.stop(&error, 0),
            }
        }
        self.current.as_mut().map(|(sink, _)| sink)
    }

    /// Limits that a file begins with: all that are in force, also of disks and groups that have
    /// none, since the file before may have had limits of theirs.
    fn first_limits(&mut self, limits: &LimitsByOwner) -> Vec<LimitsInForce> {
        let removed = std::mem::take(&mut self.removed).into_iter();
        let removed = removed.filter(|(owner, _)| !limits.contains_key(owner)).map(|(_, none)| none);
        limits.values().cloned().chain(removed).collect()
    }

    fn open(&mut self, now: Instant, limits: &LimitsByOwner) -> io::Result<(Sink, PathBuf)> {
        self.prune()?;
        let (file, path) = create(&self.record.directory)?;
        self.file = identity(&file.metadata()?);
        let mut sink = Sink::new(file.into(), now, Arc::clone(&self.progress))?;
        if let Some(stopped) = &self.stopped {
            sink.tell_lost(stopped.lost);
        }
        self.first_limits(limits).iter().for_each(|limits| sink.limits(limits, now));
        Ok((sink, path))
    }

    /// Removes what is too old, and the oldest where there is too much; nothing of another daemon
    /// that records here too.
    fn prune(&mut self) -> io::Result<()> {
        if !self.lock() {
            return Ok(());
        }
        let now = reactor::real_time();
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.record.directory)? {
            let entry = entry?;
            let name = entry.file_name();
            if name.to_str().is_some_and(is_ours) {
                let known = entry.metadata()?;
                // Somebody else's, whatever it is called.
                if !known.is_file() {
                    continue;
                }
                let age = self.age(&name, now, known.modified()?);
                files.push((age, name, known.len()));
            }
        }
        // The newest first; of those that another daemon wrote at once, by their names.
        files.sort_by(|a, b| a.0.cmp(&b.0).then_with(|| b.1.cmp(&a.1)));
        self.ended.retain(|known, _| files.iter().any(|(_, name, _)| name == known));
        self.stuck.retain(|known| files.iter().any(|(_, name, _)| name == known));
        let mut room = self.record.limit - self.record.limit / PART;
        for (age, name, length) in files {
            room = room.saturating_sub(length);
            if age > self.record.keep || room == 0 {
                self.remove(name);
            }
        }
        Ok(())
    }

    /// One that stays, because somebody protects it, keeps nothing else from being recorded.
    fn remove(&mut self, name: OsString) {
        let path = self.record.directory.join(&name);
        match fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound && self.stuck.insert(name) => {
                tracing::warn!(
                    "record: {}: {error} (an old recording that stays takes room)",
                    path.display()
                );
            }
            _ => {}
        }
    }

    /// Locks it if nobody has; whether this daemon is the only one here.
    fn lock(&mut self) -> bool {
        if self.lock.is_none() {
            // A directory that cannot be read is told of where a file is to be made.
            self.lock = lock(&self.record.directory).ok().flatten();
        }
        self.lock.is_some()
    }

    /// Since it ended. The clock is asked once, when a file is first seen: however it is set
    /// afterwards, what was written a moment ago does not become old.
    fn age(&mut self, name: &OsStr, now: Instant, ended: SystemTime) -> Duration {
        let age = || (ended.elapsed().unwrap_or_default(), now);
        let &mut (before, at) = self.ended.entry(name.to_owned()).or_insert_with(age);
        before.saturating_add(Duration::from_nanos(now.nanos_since(at)))
    }

    /// The file that was written ends now.
    fn note_end(&mut self, path: &Path) {
        let name = path.file_name().unwrap_or_default().to_owned();
        self.ended.insert(name, (Duration::ZERO, reactor::real_time()));
    }

    /// Nothing can be written for a while; so many requests are lost by that.
    fn stop(&mut self, error: &io::Error, lost: u64) {
        let again = reactor::real_time() + AGAIN;
        let before = self.stopped.take();
        let why = error.to_string();
        if before.as_ref().is_none_or(|before| before.why != why) {
            let directory = self.record.directory.display();
            // The sandbox lets write where the directory was at the start.
            let way = match (&before, error.kind()) {
                (Some(_), ErrorKind::PermissionDenied) => "; one that was replaced needs weir started again",
                _ => "",
            };
            tracing::warn!("record: {directory}: {why} (nothing is recorded until that is mended{way})");
        }
        self.progress.lose(lost);
        self.stopped = Some(Stopped { lost: before.map_or(0, |before| before.lost) + lost, again, why });
    }

    fn lose(&mut self, requests: u64) {
        match (&mut self.current, &mut self.stopped) {
            (Some((sink, _)), _) => sink.lose(requests),
            (None, Some(stopped)) => {
                stopped.lost += requests;
                self.progress.lose(requests);
            }
            (None, None) => self.progress.lose(requests),
        }
    }

    /// Whether the file that is written is where it was made: it, or its directory, may have been
    /// moved or removed.
    fn is_there(&self) -> bool {
        let Some((_, path)) = &self.current else { return true };
        fs::symlink_metadata(path).is_ok_and(|there| identity(&there) == self.file)
    }

    /// Another file is begun, if there is a place for one.
    fn leave(&mut self) {
        if let Some((sink, _)) = self.current.take() {
            self.progress.take_back(sink.unwritten());
            let gone = io::Error::other("the file that was written was moved or removed");
            self.stop(&gone, sink.unwritten());
            if let Some(stopped) = &mut self.stopped {
                stopped.again = Instant::ZERO;
            }
        }
    }

    /// After a turn of the file: what came of it.
    fn look(&mut self, is_over: bool) {
        let Some((sink, _)) = &mut self.current else { return };
        if let Some(error) = sink.take_error() {
            let (sink, path) = self.current.take().expect("it is there");
            if sink.is_empty() {
                // A file without requests tells nothing.
                let _ = fs::remove_file(path);
            } else {
                // Where that fails, it is read up to its last whole block.
                let _ = sink.back_to_whole_blocks();
                self.note_end(&path);
            }
            self.progress.take_back(sink.unwritten());
            self.stop(&error, sink.unwritten());
        } else {
            if !sink.is_empty()
                && let Some(Stopped { lost, .. }) = self.stopped.take()
            {
                tracing::info!(lost, "record: recording goes on");
            }
            if is_over && let Some((_, path)) = self.current.take() {
                self.note_end(&path);
            }
        }
    }
}

impl Output for Directory {
    fn take(&mut self, finished: &RequestRecord, named: &Named, limits: &LimitsByOwner) {
        match self.sink(limits) {
            Some(sink) => sink.take(finished, named),
            None => self.lose(finished.requests.max(1).into()),
        }
    }

    fn limits(&mut self, limits: &LimitsInForce, at: Instant) {
        if let Some((sink, _)) = &mut self.current {
            sink.limits(limits, at);
        } else if limits.is_none() && self.removed.len() < MOST_REMOVED {
            self.removed.insert(limits.key(), limits.clone());
        }
    }

    fn turn(&mut self, lost: u64) {
        if lost > 0 {
            self.lose(lost);
        }
        let hour = seconds(SystemTime::now()) / HOUR;
        let is_another = std::mem::replace(&mut self.hour, hour) != hour;
        if !self.is_there() {
            self.leave();
        }
        self.lock();
        if let Some((sink, _)) = &mut self.current {
            let is_over = is_another || self.has_ended || sink.bytes() >= self.record.limit / PART;
            if is_over {
                sink.cut();
            }
            sink.turn();
            self.look(is_over);
        }
        if is_another && let Err(error) = self.prune() {
            self.stop(&error, 0);
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
/// Where it is no directory, or no file can be made in it.
pub(super) fn check(directory: &Path) -> io::Result<()> {
    let (_, path) = create(directory)?;
    fs::remove_file(path)
}

/// Whether no other daemon records there. `own` is where this one does, or one that it takes over
/// from.
///
/// # Errors
/// Where it cannot be opened.
pub(super) fn is_free(directory: &Path, own: Option<&Path>) -> io::Result<bool> {
    let there = identity(&fs::metadata(directory)?);
    let is_own = own.is_some_and(|own| fs::metadata(own).is_ok_and(|own| identity(&own) == there));
    Ok(is_own || lock(directory)?.is_some())
}

/// Locked as long as it is open; `None` where another has it. Where a file system has no locks,
/// nobody is kept apart.
fn lock(directory: &Path) -> io::Result<Option<File>> {
    let file = File::open(directory)?;
    let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
    Ok((locked != Err(Errno::WOULDBLOCK)).then_some(file))
}

fn create(directory: &Path) -> io::Result<(File, PathBuf)> {
    let mut clock = SystemTime::now();
    loop {
        let path = directory.join(name(clock));
        match File::options().write(true).create_new(true).mode(MODE).open(&path) {
            Ok(file) => return Ok((file, path)),
            // Somebody was as fast.
            Err(error) if error.kind() == ErrorKind::AlreadyExists => clock += Duration::from_millis(1),
            Err(error) => return Err(error),
        }
    }
}

/// `2026-11-24T01-00-00.018Z.recording`: in the order of time, and a name on other systems, too.
fn name(clock: SystemTime) -> String {
    let since = clock.duration_since(UNIX_EPOCH).unwrap_or_default();
    let date = date(u32::try_from(since.as_secs()).unwrap_or(u32::MAX)).replace(' ', "T").replace(':', "-");
    format!("{date}.{:03}{ENDING}", since.subsec_millis())
}

fn is_ours(name: &str) -> bool {
    let pattern = "0000-00-00T00-00-00.000";
    name.strip_suffix(ENDING).is_some_and(|time| {
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
