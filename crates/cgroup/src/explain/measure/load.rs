//! The process that reads and writes inside the cgroup: weir again, controlled line by line.
//!
//! ```text
//!   explain --measure ──► weir cgroup load DIR          started, moved into the cgroup, then controlled
//!        {"direct-writes":{"bytes":4194304}} ──► stdin
//!                                     stdout ──► {"bytes":4194304,"nanoseconds":1002003004,…}
//! ```
//!
//! A separate process, because a cgroup contains whole processes and is charged with the pages
//! that they dirty. Its files are unlinked, so none remains. It exits when standard input closes.

use std::{
    fs::{File, OpenOptions},
    io::{self, BufRead as _, Read as _, Seek as _, SeekFrom, Write as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use anyhow::{Context as _, bail};
use console::CommandFailure;
use nix::fcntl::{OFlag, PosixFadviseAdvice, posix_fadvise};
use reactor::buffer::IoBuffer;
use serde::{Deserialize, Serialize};

use crate::explain::arguments::LoadArgs;

/// Request size in bytes: a multiple of the page size everywhere, and below every disk's maximum.
pub(super) const BLOCK: usize = 64 << 10;
const FLUSH_BLOCKS: u64 = 16;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum LoadOrder {
    /// Writes with O_DIRECT.
    DirectWrites { bytes: u64 },
    /// Writes into the page cache, and keeps the file open.
    BufferedWrites {
        bytes: u64,
        /// Upper bound of the duration, in milliseconds.
        ms: u64,
    },
    /// Alternates between writes and flushes.
    SyncedWrites { bytes: u64 },
    /// Reads with O_DIRECT.
    DirectReads { path: PathBuf, bytes: u64 },
    /// Reads through the page cache.
    Reads {
        path: PathBuf,
        bytes: u64,
        /// True to drop the file from the page cache first.
        forget: bool,
    },
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct LoadReply {
    pub(super) bytes: u64,
    pub(super) nanoseconds: u64,
    /// Descriptor of the file that was kept open.
    #[serde(default)]
    pub(super) open_fd: Option<i32>,
    #[serde(default)]
    pub(super) error: Option<String>,
}

pub(crate) fn run(arguments: &LoadArgs) -> Result<(), CommandFailure> {
    let mut open_file = None;
    for line in io::stdin().lock().lines() {
        let line = line.context("standard input")?;
        // An error is a reply as well: the parent continues with the next order.
        let reply = match serde_json::from_str(&line).context("malformed order") {
            Ok(order) => execute(&arguments.directory, &order, &mut open_file),
            Err(error) => Err(error),
        };
        let reply = reply
            .unwrap_or_else(|error| LoadReply { error: Some(format!("{error:#}")), ..LoadReply::default() });
        let mut text = serde_json::to_string(&reply).context("an answer")?;
        text.push('\n');
        let mut out = io::stdout().lock();
        // Flushed, because the parent waits for this line.
        out.write_all(text.as_bytes()).and_then(|()| out.flush()).context("standard output")?;
    }
    Ok(())
}

fn execute(directory: &Path, order: &LoadOrder, open_file: &mut Option<File>) -> anyhow::Result<LoadReply> {
    // Truncated, so that the dirty rest of the last file is not written back during this order.
    if let Some(file) = open_file.take() {
        let _ = file.set_len(0);
    }
    match order {
        LoadOrder::DirectWrites { bytes } => {
            let file = unlinked_file(directory)?;
            // Reopened, because `tempfile` opens files without O_DIRECT.
            let file = reopen(&file, OFlag::O_DIRECT)?;
            timed(*bytes, None, |buffer, _| (&file).write_all(buffer))
        }
        LoadOrder::BufferedWrites { bytes, ms } => {
            let file = unlinked_file(directory)?;
            let mut reply =
                timed(*bytes, Some(Duration::from_millis(*ms)), |buffer, _| (&file).write_all(buffer))?;
            // Kept open: closing would delete the file with its dirty pages.
            reply.open_fd = Some(file.as_raw_fd());
            *open_file = Some(file);
            Ok(reply)
        }
        LoadOrder::SyncedWrites { bytes } => {
            let file = unlinked_file(directory)?;
            timed(*bytes, None, |buffer, block| {
                (&file).write_all(buffer)?;
                if block % FLUSH_BLOCKS == FLUSH_BLOCKS - 1 { file.sync_data() } else { Ok(()) }
            })
        }
        LoadOrder::DirectReads { path, bytes } => {
            let file = open(path, OFlag::O_DIRECT)?;
            timed(*bytes, None, |buffer, _| (&file).read_exact(buffer))
        }
        LoadOrder::Reads { path, bytes, forget } => {
            let mut file = open(path, OFlag::empty())?;
            if *forget {
                posix_fadvise(&file, 0, 0, PosixFadviseAdvice::POSIX_FADV_DONTNEED)
                    .context("posix_fadvise(POSIX_FADV_DONTNEED)")?;
            }
            file.seek(SeekFrom::Start(0))?;
            timed(*bytes, None, |buffer, _| file.read_exact(buffer))
        }
    }
}

/// Calls `transfer` for each block until all are done or the time limit is reached.
fn timed(
    bytes: u64,
    time_limit: Option<Duration>,
    mut transfer: impl FnMut(&mut IoBuffer, u64) -> io::Result<()>,
) -> anyhow::Result<LoadReply> {
    let mut buffer = IoBuffer::zeroed(BLOCK);
    // Random data: disks and file systems that compress or deduplicate would write less.
    buffer.iter_mut().for_each(|byte| *byte = fastrand::u8(..));
    let begin = Instant::now();
    let mut done = 0;
    for block in 0..bytes.div_ceil(BLOCK as u64) {
        transfer(&mut buffer, block).with_context(|| format!("after {done} bytes"))?;
        done += BLOCK as u64;
        if time_limit.is_some_and(|limit| begin.elapsed() >= limit) {
            break;
        }
    }
    let nanoseconds = u64::try_from(begin.elapsed().as_nanos()).unwrap_or(u64::MAX);
    Ok(LoadReply { bytes: done, nanoseconds, open_fd: None, error: None })
}

pub(super) fn fill(mut file: &File, bytes: u64) -> anyhow::Result<()> {
    timed(bytes, None, |buffer, _| file.write_all(buffer)).map(drop)
}

pub(super) fn unlinked_file(directory: &Path) -> anyhow::Result<File> {
    tempfile::tempfile_in(directory)
        .with_context(|| format!("{}: cannot create a file there", directory.display()))
}

/// Reopens a file with other flags, through `/proc/self/fd` (open(2)).
pub(super) fn reopen(file: &File, flags: OFlag) -> anyhow::Result<File> {
    open(Path::new(&format!("/proc/self/fd/{}", file.as_raw_fd())), flags | OFlag::O_RDWR)
}

fn open(path: &Path, flags: OFlag) -> anyhow::Result<File> {
    let writes = flags.contains(OFlag::O_RDWR);
    let opened =
        OpenOptions::new().read(true).write(writes).custom_flags((flags - OFlag::O_RDWR).bits()).open(path);
    match opened {
        Err(error) if error.raw_os_error() == Some(nix::libc::EINVAL) && flags.contains(OFlag::O_DIRECT) => {
            bail!("the file system has no direct I/O")
        }
        opened => opened.with_context(|| path.display().to_string()),
    }
}
