//! Stream: copies content of a disk's backing files into its image, which then needs fewer of them,
//! or none.
//!
//! ```text
//!   image ─► removed ─► removed ─► base
//!     ▲─── populate ───┘   │
//!     └────────────────────┘
//!   all populated ─► flush ─► quiesce ─► header ─► the image over the base ─► removed ones closed
//! ```
//!
//! Until the header names the base, the chain is as before, and has the same content at any
//! instant: a stream that fails, is cancelled or ends with the daemon leaves clusters that later
//! streams need not copy again. Zeroes stay without data.
//!
//! Clients' requests wait while the header is written, and for those in flight before.
//!
//! Never changes the content of the disk, and never writes to a backing file.

use std::{rc::Rc, sync::Arc};

use block::{
    disk::{AdmissionPermit, Disk, QuiescedDisk},
    layer::throttle::{BackgroundMember, BackgroundSettings},
};
use image::{
    Image, Qcow2Image,
    qcow2::{ExclusiveImage, POPULATE_BYTES, header::BackingReference, snapshot::SnapshotError},
};
use policy::{throttle::ThrottleError, time::Duration};
use reactor::{
    JoinHandle,
    error::Error,
    memory::{MemoryReservation, OutOfBudget},
    select::first,
};
use storage::{FilesClosed, RangeLocks, Storage};

use crate::{
    chain_walk::{ChainWalk, WalkOptions},
    job::{Job, JobResult, JobState},
    tasks::JobTasks,
};

/// Number of copies in flight.
const COPIES: usize = 8;
/// Longest wait for requests in flight. Later ones wait meanwhile.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(5);
/// Time until the next attempt, at first and at most: it doubles.
const QUIESCE_INTERVALS: [Duration; 2] = [Duration::from_secs(5), Duration::from_secs(60)];
/// Longest wait for the last check of the backing files. Requests wait meanwhile.
const CHECK_TIMEOUT: Duration = Duration::from_millis(500);
/// Longest wait for requests that still use the removed images.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(10);

/// Image of the chain that stays below.
#[derive(Clone, Debug)]
pub struct StreamBase {
    /// The image.
    pub image: Arc<Image>,
    /// What the header names it.
    pub reference: BackingReference,
}

/// Reason why a stream failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StreamError {
    /// The limits of the stream.
    #[error(transparent)]
    Throttle(#[from] ThrottleError),
    /// The budget has no memory for the copies.
    #[error(transparent)]
    Memory(#[from] OutOfBudget),
    /// The image has nothing below.
    #[error("its image has no backing file, so its chain cannot be shortened")]
    NoBacking,
    /// Another image is directly below, or none in the chain.
    #[error("there is no image between its image and the file that stays below it")]
    NothingBetween,
    /// The list of its snapshots cannot be read.
    #[error("the list of internal snapshots cannot be read: {error}")]
    Snapshots {
        /// Error of the image.
        error: SnapshotError,
    },
    /// Bytes that were cut off, and added again, would be those of the file that stays.
    #[error("the disk was resized, or a change of its size has failed (stream again)")]
    Resized,
    /// Snapshots read from the chain too.
    #[error(
        "its image has internal snapshots, whose content is in the backing files too (delete them first)"
    )]
    InternalSnapshots,
    /// The image cannot be written.
    #[error("its image is read-only")]
    ReadOnly,
    /// A backing file was changed by another program.
    #[error("another program has changed a backing file (check it, and restart weir)")]
    ChangedBelow,
    /// Writes to the image were lost.
    #[error("writes to its image were lost (restart weir, and check the image)")]
    LostWrites,
    /// The chain cannot be read.
    #[error("the chain cannot be read: {error}")]
    Walk {
        /// Error of a file.
        error: Error,
    },
    /// The copy failed.
    #[error("the data at offset {offset} cannot be copied: {error}{}", full_remedy(*error))]
    Copy {
        /// Offset in bytes.
        offset: u64,
        /// Error of a file.
        error: Error,
    },
    /// The image failed a flush.
    #[error("its image cannot be flushed: {error}{}", full_remedy(*error))]
    Flush {
        /// Error of the image.
        error: Error,
    },
    /// The header cannot be changed.
    #[error("the header of its image cannot be changed: {error}")]
    Header {
        /// Error of the image.
        error: Error,
    },
}

fn full_remedy(error: Error) -> &'static str {
    if error == Error::NO_SPACE { " (free space, and stream again)" } else { "" }
}

/// A stream that has not copied anything.
#[derive(Debug)]
pub struct Stream {
    job: Arc<Job>,
    disk: Arc<Disk>,
    /// The disk's image.
    image: Qcow2Image,
    base: Option<StreamBase>,
    member: Arc<BackgroundMember>,
    /// Changes of the disk's size before the walk.
    size_changes: u64,
    walk: ChainWalk,
    /// Held by the task that asks for admission.
    admission_turn: RangeLocks,
    /// For the copies in flight.
    _memory: MemoryReservation,
}

impl Stream {
    /// Begins a stream of all images below that of the disk, or of those above `base`. The job is
    /// running then. Until its end the disk must not be switched to another image.
    ///
    /// # Errors
    /// [`StreamError`].
    pub async fn begin(
        job: &Arc<Job>,
        disk: &Arc<Disk>,
        base: Option<StreamBase>,
        settings: BackgroundSettings,
    ) -> Result<Self, StreamError> {
        let Image::Qcow2(image) = &*disk.image() else { return Err(StreamError::NoBacking) };
        let image = image.clone();
        if image.is_read_only() {
            return Err(StreamError::ReadOnly);
        }
        let removed = removed_images(&image, base.as_ref()).count();
        let is_in_chain = base.as_ref().is_none_or(|base| {
            image.backing().is_some_and(|below| below.chain().any(|image| std::ptr::eq(image, &*base.image)))
        });
        match removed {
            0 if base.is_none() => return Err(StreamError::NoBacking),
            0 => return Err(StreamError::NothingBetween),
            _ if !is_in_chain => return Err(StreamError::NothingBetween),
            _ => {}
        }
        let snapshots = image.snapshots().await.map_err(|error| StreamError::Snapshots { error })?;
        if !snapshots.is_empty() {
            return Err(StreamError::InternalSnapshots);
        }
        let member = Arc::new(BackgroundMember::new(settings)?);
        // Before the size is read.
        let size_changes = disk.size_changes();
        let size_bytes = disk.size_bytes();
        let unit_bytes = image.header().cluster_bytes();
        let copies = COPIES as u64 * POPULATE_BYTES.max(unit_bytes);
        let memory = MemoryReservation::new(disk.memory().budget(), "the buffers of a stream", copies)?;
        let walk = ChainWalk::new(
            size_bytes,
            WalkOptions {
                depths: 2..removed as u32 + 2,
                skips_zeroes: base.is_none(),
                // Version 2 has no zero clusters.
                writes_zeroes: image.header().version < 3,
                unit_bytes,
            },
        );
        job.start(size_bytes);
        Ok(Self {
            job: Arc::clone(job),
            disk: Arc::clone(disk),
            image,
            base,
            member,
            size_changes,
            walk,
            admission_turn: RangeLocks::default(),
            _memory: memory,
        })
    }

    /// Member of the throttle tree that the stream is charged to; its settings can be changed.
    pub fn member(&self) -> &Arc<BackgroundMember> {
        &self.member
    }

    /// Copies everything and removes the images from the chain, unless the job is cancelled first.
    /// Then the job is [aborting](Job::abort), or running if it has succeeded: the caller
    /// [concludes](Job::conclude) it with the result.
    pub async fn run(self) -> JobResult {
        let job = Arc::clone(&self.job);
        let cancelled = async {
            job.cancelled().await;
            None
        };
        let stream = Rc::new(self);
        let copied = first(async { Some(Self::copy(&stream).await) }, cancelled).await.into_output();
        let shortened = match copied {
            Some(Ok(())) => stream.shorten().await,
            Some(Err(error)) => Err(error),
            None => Ok(None),
        };
        let result = match shortened {
            Ok(Some(replaced)) => {
                let base = stream.base.clone();
                // The removed images are closed when nothing refers to them.
                drop(stream);
                close_removed(replaced, base.as_ref(), &job).await;
                return JobResult::Completed;
            }
            Ok(None) => JobResult::Cancelled,
            Err(error) => JobResult::Failed(error.to_string()),
        };
        job.abort();
        result
    }

    /// Populates the image, and flushes it.
    async fn copy(stream: &Rc<Self>) -> Result<(), StreamError> {
        let tasks = Rc::new(JobTasks::new(COPIES));
        // Dropping the handles cancels the tasks.
        let _running: Vec<JoinHandle<()>> = (0..COPIES)
            .map(|_| {
                let (stream, tasks) = (Rc::clone(stream), Rc::clone(&tasks));
                reactor::spawn_joinable(async move { tasks.end(stream.copy_pieces().await) })
            })
            .collect();
        tasks.all_ended().await?;
        Ok(())
    }

    async fn copy_pieces(&self) -> Result<(), StreamError> {
        let base = self.base.as_ref().map(|base| &*base.image);
        loop {
            self.job.wait_while_paused().await;
            let step = self.walk.next(&self.disk, async || self.admit(0).await).await;
            let step = step.map_err(|error| StreamError::Walk { error })?;
            self.job.add_done(step.skipped_bytes, 0);
            let Some(piece) = step.piece else { return Ok(()) };
            let (offset, length) = (piece.range.start, piece.range.end - piece.range.start);
            let admitted_bytes = if piece.is_zero { 0 } else { length };
            let permit = self.admit(admitted_bytes).await;
            let populated = self.disk.populate(permit, offset, length, base).await;
            let populated = populated.map_err(|error| StreamError::Copy { offset, error })?;
            // A cluster of zeroes and data.
            let more_bytes = populated.copied_bytes.saturating_sub(admitted_bytes);
            if more_bytes > 0 {
                drop(self.disk.charge_background_later(&self.member, more_bytes));
            }
            self.job.add_done(piece.progress_bytes, populated.copied_bytes);
        }
    }

    /// Waits until work of `bytes` is admitted and the job is not paused.
    async fn admit(&self, bytes: u64) -> AdmissionPermit {
        // One task at a time asks for admission, so a pause stops all but that one before they are
        // charged.
        let _turn = self.admission_turn.exclusive(0..1).await;
        self.job.wait_while_paused().await;
        let permit = self.disk.admit_background(&self.member, bytes).await;
        // A pause during the wait; the work is charged already.
        self.job.wait_while_paused().await;
        permit
    }

    /// Removes the images from the chain; returns the disk's image before that. `None` if the job
    /// was cancelled.
    async fn shorten(&self) -> Result<Option<Arc<Image>>, StreamError> {
        let cancelled = async {
            self.job.cancelled().await;
            None
        };
        let quiesced = first(async { Some(self.quiesce().await) }, cancelled).await.into_output();
        let Some((quiesced, exclusive)) = quiesced.transpose()?.filter(|_| !self.job.is_cancelled()) else {
            return Ok(None);
        };
        // A file system that does not answer must not delay clients; then a change is not proven.
        let is_changed = reactor::timeout(CHECK_TIMEOUT, self.image.check_below()).await;
        if is_changed.unwrap_or_else(|_| self.image.has_changed_below()) {
            return Err(StreamError::ChangedBelow);
        }
        if self.base.is_some() && self.disk.size_changes() != self.size_changes {
            return Err(StreamError::Resized);
        }
        // A later flush succeeds although the page cache has lost the writes.
        if self.disk.image().files().any(Storage::has_lost_writes) {
            return Err(StreamError::LostWrites);
        }
        let base = self.base.as_ref().map(|base| (Arc::clone(&base.image), base.reference.clone()));
        let shorter = exclusive.replace_backing(base).await.map_err(|error| StreamError::Header { error })?;
        let replaced = self.disk.switch_image(&quiesced, Arc::new(Image::Qcow2(shorter)));
        drop((exclusive, quiesced));
        // Less than before, so it fits.
        if let Err(error) = self.disk.reserve_memory() {
            tracing::error!(disk = %self.disk.name(), %error, "the memory of a disk cannot be reserved");
        }
        Ok(Some(replaced))
    }

    /// Waits until no request is in flight: neither a change, nor one that its client has
    /// cancelled, nor a read.
    async fn quiesce(&self) -> Result<(QuiescedDisk<'_>, ExclusiveImage<'_>), StreamError> {
        let [mut interval, longest] = QUIESCE_INTERVALS;
        loop {
            self.job.wait_while_paused().await;
            // Most of it before clients' changes wait.
            self.image.flush().await.map_err(|error| StreamError::Flush { error })?;
            let end = reactor::now() + QUIESCE_TIMEOUT;
            if let Ok(quiesced) = self.disk.quiesce(QUIESCE_TIMEOUT).await
                && let Ok(exclusive) = reactor::timeout(end - reactor::now(), self.image.drain()).await
            {
                if self.job.state() == JobState::Paused {
                    continue;
                }
                self.job.set_remark(None);
                return Ok((quiesced, exclusive));
            }
            let seconds = QUIESCE_TIMEOUT.as_secs();
            self.job.set_remark(Some(format!("requests in flight have not completed within {seconds} s")));
            reactor::sleep_until(reactor::now() + interval).await;
            interval = (interval * 2).min(longest);
        }
    }
}

/// The images between the disk's image and the base, or all below it.
fn removed_images<'a>(
    image: &'a Qcow2Image,
    base: Option<&'a StreamBase>,
) -> impl Iterator<Item = &'a Image> {
    let below = image.backing().into_iter().flat_map(Image::chain);
    below.take_while(move |image| base.is_none_or(|base| !std::ptr::eq(*image, &*base.image)))
}

/// Waits until no request uses the removed images any more, and their files are closed.
async fn close_removed(replaced: Arc<Image>, base: Option<&StreamBase>, job: &Job) {
    let Image::Qcow2(image) = &*replaced else { return };
    let closed = FilesClosed::of(removed_images(image, base).flat_map(Image::files));
    drop(replaced);
    if !closed.within(CLOSE_TIMEOUT).await {
        let patience_s = CLOSE_TIMEOUT.as_secs();
        tracing::warn!(
            job = %job.id(), patience_s,
            "requests still use images that were removed from a chain; their files are closed afterwards"
        );
    }
}
