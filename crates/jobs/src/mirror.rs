//! Mirror: copies a disk to another image while clients change it, and then moves the disk there.
//!
//! ```text
//!   all clusters ──────────┐
//!   clients' changes mark ─┴► claim ─► zeroes ──────────────────────► write_zeroes ─┐
//!   clusters again            └─► data ─► admission ─► read ────────► write ────────┴─► done
//!
//!   running ─► few clusters are missing ─► ready ─► complete ─► pause: the rest is copied,
//!                                                               flushed, the disk is switched
//! ```
//!
//! Clients' changes go to the present image, and are copied afterwards: a slow target never delays
//! them. If clients change clusters faster than they are copied, the job does not become ready, and
//! says so.
//!
//! The switch happens while no change is in flight, and is attempted only if the missing clusters
//! can be copied within a part of [`MAX_PAUSE`]. If that does not succeed in time, clients continue
//! and the attempt is repeated, for [`COMPLETION_LIMIT`] at most. Until the switch the disk stays
//! on its image, so a failure of the target ends the job only. At the switch both images are
//! flushed: what clients have flushed is durable in the target. The owner of the disk, which runs
//! on another thread, [approves](Job::ask) the switch last.
//!
//! Never opens or closes an image.

use std::{
    cell::{Cell, RefCell},
    pin::pin,
    rc::Rc,
    sync::Arc,
};

use block::{
    disk::{AdmissionPermit, Disk, QuiescedDisk, TrackedDisk},
    layer::{
        copy_before_write::{DirtyClusters, PointFailure, TrackerOptions},
        throttle::{BackgroundMember, BackgroundSettings},
    },
};
use event_listener::Event;
use image::{Image, qcow2::bitmap::BitmapError};
use policy::{
    request::Direction,
    throttle::ThrottleError,
    time::{Duration, Instant},
};
use reactor::{
    JoinHandle,
    buffer::IoBuffer,
    error::Error,
    memory::OutOfBudget,
    select::{FirstReady, first},
};
use storage::RangeLocks;

use crate::{
    job::{Completion, Job, JobResult, SwitchAnswer},
    target::{JobTarget, TargetError},
    tasks::JobTasks,
};

/// Size of a cluster in bytes: the unit in which changes are copied. QEMU's default.
pub const CLUSTER_BYTES: u64 = 64 << 10;
/// Longest time for which clients' changes wait for a switch.
pub const MAX_PAUSE: Duration = Duration::from_millis(100);
/// Number of copies in flight.
const COPIES: usize = 16;
/// Longest copy, in clusters.
const COPY_CLUSTERS: u64 = 8;
/// Longest range of one query of the allocation status, in bytes.
const QUERY_BYTES: u64 = 1 << 30;
/// Part of [`MAX_PAUSE`] that the copies of the missing clusters may take, as a divisor.
const PAUSE_PARTS: u32 = 4;
/// Rate that is assumed before the first copies are measured, in bytes per second.
const ASSUMED_RATE: u64 = 64 << 20;
/// Amount of copied data after which older measurements lose half of their weight.
const RATE_WINDOW_BYTES: u64 = 64 << 20;
/// Interval at which the number of missing bytes must decrease.
const CONVERGENCE_INTERVAL: Duration = Duration::from_secs(10);
/// Time between two attempts to switch, at first and at most. Each may pause clients' changes.
const RETRY_INTERVALS: [Duration; 2] = [Duration::from_millis(500), Duration::from_secs(10)];
/// Time after which an operator must complete the job again, because all attempts were too slow.
pub const COMPLETION_LIMIT: Duration = Duration::from_secs(60);

/// Sizes of a mirror.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MirrorSizes {
    /// Size of a cluster in bytes, a power of two.
    pub cluster_bytes: u64,
    /// Longest time for which clients' changes wait for a switch.
    pub max_pause: Duration,
}

impl Default for MirrorSizes {
    fn default() -> Self {
        Self { cluster_bytes: CLUSTER_BYTES, max_pause: MAX_PAUSE }
    }
}

/// Reason why a mirror failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MirrorError {
    /// The disk.
    #[error(transparent)]
    Disk(#[from] PointFailure),
    /// The limits of the mirror.
    #[error(transparent)]
    Throttle(#[from] ThrottleError),
    /// The target has another size than the disk.
    #[error("the target has {target_bytes} bytes, and the disk {disk_bytes} (use a target of the same size)")]
    Size {
        /// Size of the target in bytes.
        target_bytes: u64,
        /// Size of the disk in bytes.
        disk_bytes: u64,
    },
    /// The disk has a dirty bitmap.
    #[error(
        "the dirty bitmap {name} would not exist in the target (remove it, and make a full backup with a \
         new one after the disk has moved)"
    )]
    Bitmap {
        /// Name of the bitmap.
        name: String,
    },
    /// The list of dirty bitmaps cannot be read.
    #[error(transparent)]
    Bitmaps(#[from] BitmapError),
    /// Clients cannot change the disk.
    #[error("the disk is read-only (`weir backup` copies it)")]
    ReadOnly,
    /// The target failed.
    #[error(transparent)]
    Target(#[from] TargetError),
    /// The image of the disk failed the flush before the switch, or has lost writes.
    #[error("the image of the disk cannot be flushed: {error}")]
    Flush {
        /// Error of the image.
        error: Error,
    },
    /// The budget has no memory for the caches of the target.
    #[error(transparent)]
    Memory(#[from] OutOfBudget),
}

impl MirrorError {
    /// Direction of the I/O that has failed.
    fn failed_io(&self) -> Option<Direction> {
        match self {
            Self::Disk(PointFailure::Read { .. }) => Some(Direction::Read),
            Self::Target(_) | Self::Flush { .. } => Some(Direction::Write),
            _ => None,
        }
    }
}

/// Reservation of memory for the caches of both images, until it is dropped.
#[derive(Debug)]
pub struct ReservedCaches(Arc<Disk>);

impl Drop for ReservedCaches {
    fn drop(&mut self) {
        // Less than before, so it fits.
        let _ = self.0.reserve_memory();
    }
}

/// End of a mirror.
#[derive(Debug)]
pub struct MirrorEnd {
    /// Result.
    pub result: JobResult,
    /// The previous image of the disk, if the disk was switched to the target.
    pub replaced: Option<Arc<Image>>,
    /// Dropped after the image that the disk does not use is closed.
    pub caches: ReservedCaches,
}

/// A mirror that tracks changes, and has not copied anything.
#[derive(Debug)]
pub struct Mirror {
    job: Arc<Job>,
    tracked: TrackedDisk,
    member: Arc<BackgroundMember>,
    target: JobTarget,
    sizes: MirrorSizes,
    caches: ReservedCaches,
}

/// State that the tasks of a mirror share.
struct MirrorWork {
    job: Arc<Job>,
    tracked: TrackedDisk,
    member: Arc<BackgroundMember>,
    target: JobTarget,
    sizes: MirrorSizes,
    tasks: JobTasks<MirrorError>,
    rate: RefCell<CopyRate>,
    /// Where the next claim begins.
    cursor: Cell<u64>,
    /// Length of the next query of the allocation status.
    query_bytes: Cell<u64>,
    /// Held by the task that claims clusters.
    claim_turn: RangeLocks,
    /// Held by the task that asks for admission.
    admission_turn: RangeLocks,
    /// True while clients' changes wait for the copies.
    is_urgent: Cell<bool>,
    urgent: Event,
}

/// Measured rate of one copy.
#[derive(Clone, Copy, Debug, Default)]
struct CopyRate {
    bytes: u64,
    nanos: u64,
}

/// Result of an attempt to complete.
enum Attempt {
    /// The previous image, if the disk was switched.
    Done(Option<Arc<Image>>),
    /// It was not possible within [`MirrorSizes::max_pause`].
    TooSlow,
    /// The owner of the disk has refused it, for this reason.
    Refused(String),
    /// The job was cancelled, or an operator wants another completion.
    Changed,
}

impl CopyRate {
    fn add(&mut self, bytes: u64, time: Duration) {
        self.bytes += bytes;
        self.nanos += time.as_nanos() as u64;
        if self.bytes > RATE_WINDOW_BYTES {
            self.bytes /= 2;
            self.nanos /= 2;
        }
    }

    /// Bytes that all copies together can copy in a time.
    fn bytes_in(&self, time: Duration) -> u64 {
        let rate = match self.nanos {
            0 => u128::from(ASSUMED_RATE),
            nanos => u128::from(self.bytes) * 1_000_000_000 / u128::from(nanos) * COPIES as u128,
        };
        (rate * time.as_nanos() / 1_000_000_000) as u64
    }
}

impl Mirror {
    /// Begins a mirror: changes of the disk are tracked from now on. The job is running then.
    ///
    /// # Errors
    /// [`MirrorError`]: a read-only disk, one with dirty bitmaps, invalid limits, a target of
    /// another size, or changes cannot be tracked.
    pub async fn begin(
        job: &Arc<Job>,
        disk: &Arc<Disk>,
        target: JobTarget,
        settings: BackgroundSettings,
        sizes: MirrorSizes,
    ) -> Result<Self, MirrorError> {
        let check_size = |disk_bytes| match target.image.size_bytes() {
            target_bytes if target_bytes != disk_bytes => Err(MirrorError::Size { target_bytes, disk_bytes }),
            _ => Ok(()),
        };
        if disk.image().is_read_only() {
            return Err(MirrorError::ReadOnly);
        }
        // Before clients' changes wait.
        check_size(disk.size_bytes())?;
        check_bitmaps(disk).await?;
        let member = Arc::new(BackgroundMember::new(settings)?);
        let options = TrackerOptions {
            cluster_bytes: sizes.cluster_bytes,
            copy_bytes: COPIES as u64 * COPY_CLUSTERS * sizes.cluster_bytes,
        };
        disk.reserve_memory_for(&[&disk.image(), &target.image])?;
        let caches = ReservedCaches(Arc::clone(disk));
        let tracked = disk.begin_tracking(options).await?;
        check_size(tracked.tracker().size_bytes())?;
        job.start(tracked.tracker().size_bytes());
        Ok(Self { job: Arc::clone(job), tracked, member, target, sizes, caches })
    }

    /// Member of the throttle tree that the mirror is charged to; its settings can be changed.
    pub fn member(&self) -> &Arc<BackgroundMember> {
        &self.member
    }

    /// Copies until an operator completes the job, and then completes it, unless it is cancelled
    /// or fails first. Then the job is [aborting](Job::abort), else ready: the caller closes the
    /// image that the disk does not use, and [concludes](Job::conclude) the job with the result.
    /// Meanwhile the owner of the disk [answers](Job::answer) its questions.
    pub async fn run(self) -> MirrorEnd {
        let Self { job, tracked, member, target, sizes, caches } = self;
        let shared = Rc::new(MirrorWork {
            job: Arc::clone(&job),
            tracked,
            member,
            target,
            sizes,
            tasks: JobTasks::new(COPIES),
            rate: RefCell::default(),
            cursor: Cell::new(0),
            query_bytes: Cell::new(COPY_CLUSTERS * sizes.cluster_bytes),
            claim_turn: RangeLocks::default(),
            admission_turn: RangeLocks::default(),
            is_urgent: Cell::new(false),
            urgent: Event::new(),
        });
        // Dropping the handles cancels the tasks.
        let tasks = MirrorWork::start(&shared);
        let failed = async { shared.tasks.all_ended().await.map(|()| None) };
        let cancelled = async {
            job.cancelled().await;
            Ok(None)
        };
        let interrupted = async { first(failed, cancelled).await.into_output() };
        let mut converging = pin!(shared.converge());
        let ended = match first(converging.as_mut(), interrupted).await {
            FirstReady::One(ended) => ended,
            // The owner has approved the switch of an equal target.
            FirstReady::Other(_) if !job.withdraw() => converging.await,
            FirstReady::Other(ended) => ended,
        };
        // Before the tasks, which the executor drops later.
        shared.tracked.end();
        drop(tasks);
        let (result, replaced) = match ended {
            _ if job.is_cancelled() => (JobResult::Cancelled, None),
            Ok(replaced) => (JobResult::Completed, replaced),
            Err(error) => {
                error.failed_io().into_iter().for_each(|direction| job.note_failed_io(direction));
                (JobResult::Failed(error.to_string()), None)
            }
        };
        if result != JobResult::Completed {
            job.abort();
        }
        MirrorEnd { result, replaced, caches }
    }
}

impl MirrorWork {
    fn start(self: &Rc<Self>) -> Vec<JoinHandle<()>> {
        let copies = (0..COPIES).map(|_| {
            let shared = Rc::clone(self);
            reactor::spawn_joinable(async move {
                let result = shared.copy_clusters().await;
                shared.tasks.end(result);
            })
        });
        copies.collect()
    }

    /// Copies clusters until it fails.
    async fn copy_clusters(&self) -> Result<(), MirrorError> {
        loop {
            self.job.wait_while_paused().await;
            let claim = self.claim().await?;
            self.copy(claim).await?;
            self.job.set_missing(self.tracked.tracker().missing_bytes());
        }
    }

    /// Longest copy, in bytes.
    fn copy_bytes(&self) -> u64 {
        COPY_CLUSTERS * self.sizes.cluster_bytes
    }

    /// Waits for the next clusters that the target lacks.
    async fn claim(&self) -> Result<DirtyClusters, PointFailure> {
        let tracker = self.tracked.tracker();
        // One task at a time waits, so that a change does not wake all of them.
        let _turn = self.claim_turn.exclusive(0..1).await;
        let claim = tracker.wait_for(|| tracker.claim(self.cursor.get(), self.query_bytes.get())).await?;
        self.cursor.set(claim.bytes().end);
        Ok(claim)
    }

    async fn copy(&self, mut claim: DirtyClusters) -> Result<(), MirrorError> {
        // Only what was never written to a new target reads as zeroes there.
        let target = JobTarget { is_zero: self.target.is_zero && claim.is_first(), ..self.target.clone() };
        let zero_bytes = self.leading_zeroes(&claim).await?;
        if zero_bytes > 0 {
            claim.narrow(zero_bytes);
            if !target.is_zero {
                target.write_zeroes(claim.bytes()).await?;
            }
            claim.done();
            return Ok(());
        }
        claim.narrow(self.copy_bytes());
        let bytes = claim.bytes();
        let length_bytes = bytes.end - bytes.start;
        let permit = self.admit(length_bytes).await;
        let began = reactor::now();
        match self.tracked.read(permit, bytes.clone()).await? {
            None if target.is_zero => {}
            None => target.write_zeroes(bytes).await?,
            Some(data) => {
                let data = Arc::new(data);
                let segments = |range: std::ops::Range<usize>| {
                    let mut view = IoBuffer::view_of_frozen(&data);
                    view.advance(range.start);
                    view.truncate(range.len());
                    view.into()
                };
                let copied_bytes = target.write(bytes.start, &data, segments).await?;
                self.job.add_done(0, copied_bytes);
            }
        }
        self.rate.borrow_mut().add(length_bytes, reactor::now() - began);
        claim.done();
        Ok(())
    }

    /// Length of whole clusters at the start of a claim that read as zeroes. Queries become longer
    /// as long as they find nothing else.
    async fn leading_zeroes(&self, claim: &DirtyClusters) -> Result<u64, PointFailure> {
        let bytes = claim.bytes();
        let extents = self.tracked.block_status(bytes.clone()).await?;
        let zeroes: u64 = extents.iter().take_while(|extent| extent.zero).map(|extent| extent.length).sum();
        if zeroes >= bytes.end - bytes.start {
            self.query_bytes.set((self.query_bytes.get() * 2).min(QUERY_BYTES));
            return Ok(bytes.end - bytes.start);
        }
        self.query_bytes.set(self.copy_bytes());
        Ok(zeroes - zeroes % self.sizes.cluster_bytes)
    }

    /// Waits until a copy of `bytes` is admitted, or clients' changes wait for it. A paused job has
    /// no copies that wait for admission, except one.
    async fn admit(&self, bytes: u64) -> AdmissionPermit {
        let disk = self.tracked.disk();
        let urgent = async {
            self.until_urgent().await;
            disk.charge_background_later(&self.member, bytes)
        };
        let admitted = async {
            let _turn = self.admission_turn.exclusive(0..1).await;
            self.job.wait_while_paused().await;
            let permit = disk.admit_background(&self.member, bytes).await;
            // A pause during the wait; the copy is charged already.
            self.job.wait_while_paused().await;
            permit
        };
        first(urgent, admitted).await.into_output()
    }

    async fn until_urgent(&self) {
        loop {
            let listener = self.urgent.listen();
            if self.is_urgent.get() {
                return;
            }
            listener.await;
        }
    }

    fn set_urgent(&self, is_urgent: bool) {
        self.is_urgent.set(is_urgent);
        self.urgent.notify(usize::MAX);
    }

    /// Makes the job ready, and completes it when an operator wants it. Returns the previous image
    /// if the disk was switched.
    async fn converge(&self) -> Result<Option<Arc<Image>>, MirrorError> {
        self.until_few_missing().await?;
        self.job.reach_goal().await;
        loop {
            let completion = self.job.completion().await;
            // Boxed: the type of the future would be too deep for the compiler.
            match Box::pin(self.complete(completion)).await? {
                Attempt::Done(replaced) => return Ok(replaced),
                Attempt::Changed => {}
                Attempt::Refused(reason) => self.job.give_up_completion(reason),
                Attempt::TooSlow => self.job.give_up_completion(format!(
                    "the last changes could not be copied and flushed within {} ms for {} s (complete the job \
                     again at a time with fewer writes, or use a faster target)",
                    self.sizes.max_pause.as_millis(),
                    COMPLETION_LIMIT.as_secs()
                )),
            }
        }
    }

    /// Attempts to complete the job repeatedly, until [`COMPLETION_LIMIT`] is over.
    async fn complete(&self, completion: Completion) -> Result<Attempt, MirrorError> {
        let give_up = reactor::now() + COMPLETION_LIMIT;
        let mut interval = RETRY_INTERVALS[0];
        while self.job.is_wanted(completion) {
            // Outside of the pause, in which little is left to be flushed then.
            self.target.flush().await?;
            let flushed = self.tracked.disk().image().flush().await;
            flushed.map_err(|error| MirrorError::Flush { error })?;
            match reactor::timeout(give_up - reactor::now(), self.until_few_missing()).await {
                Ok(reached) => reached?,
                Err(_) => return Ok(Attempt::TooSlow),
            }
            match Box::pin(self.attempt(completion)).await? {
                Attempt::TooSlow if reactor::now() + interval >= give_up => return Ok(Attempt::TooSlow),
                Attempt::TooSlow => {}
                ended => return Ok(ended),
            }
            let ms = self.sizes.max_pause.as_millis();
            self.job.set_remark(Some(format!(
                "the last changes cannot be copied and flushed within {ms} ms; the next attempt follows soon \
                 (use a faster target, or a time with fewer writes)"
            )));
            reactor::sleep_until(reactor::now() + interval).await;
            interval = (interval * 2).min(RETRY_INTERVALS[1]);
        }
        Ok(Attempt::Changed)
    }

    /// Waits until everything was copied once, and the missing clusters can be copied in a pause.
    async fn until_few_missing(&self) -> Result<(), PointFailure> {
        let tracker = self.tracked.tracker();
        let are_few = || {
            let max_bytes = self.rate.borrow().bytes_in(self.sizes.max_pause / PAUSE_PARTS);
            // At least one cluster, which may be fast enough.
            let max_bytes = max_bytes.max(self.sizes.cluster_bytes);
            (tracker.unvisited_bytes() == 0 && tracker.missing_bytes() <= max_bytes).then_some(())
        };
        let mut before = u64::MAX;
        loop {
            match reactor::timeout(CONVERGENCE_INTERVAL, tracker.wait_for(are_few)).await {
                Ok(reached) => {
                    self.job.set_remark(None);
                    return reached;
                }
                Err(_) if tracker.unvisited_bytes() == 0 => {
                    let missing = tracker.missing_bytes();
                    let remark = (missing >= before).then(|| {
                        format!(
                            "clients change data as fast as it is copied: {} MiB are missing (give the job \
                             higher limits or a weight, use a faster target, or limit the disk)",
                            missing >> 20
                        )
                    });
                    self.job.set_remark(remark);
                    before = missing;
                }
                Err(_) => {}
            }
        }
    }

    /// Attempts to complete the job. Clients' changes wait for [`MirrorSizes::max_pause`] at most.
    async fn attempt(&self, completion: Completion) -> Result<Attempt, MirrorError> {
        let disk = self.tracked.disk();
        let began: Instant = reactor::now();
        let end = began + self.sizes.max_pause;
        let Ok(quiesced) = disk.quiesce(self.sizes.max_pause).await else { return Ok(Attempt::TooSlow) };
        // Detached: its failure would be lost, and the clients' next flush might succeed.
        let image = disk.image();
        let flushing = reactor::spawn_detached(async move {
            image.flush().await?;
            // Of an earlier flush. The target's storage would hide it.
            if image.storage().has_lost_writes() { Err(Error::IO) } else { Ok(()) }
        });
        self.set_urgent(true);
        let copied = reactor::timeout(end - reactor::now(), self.copy_rest(&quiesced)).await;
        self.set_urgent(false);
        match copied {
            Ok(result) => result?,
            Err(_) => return Ok(Attempt::TooSlow),
        }
        let mut flush = pin!(async {
            self.target.flush().await?;
            let flushed = flushing.await.unwrap_or(Err(Error::SHUTDOWN));
            flushed.map_err(|error| MirrorError::Flush { error })
        });
        match reactor::timeout(end - reactor::now(), flush.as_mut()).await {
            Ok(flushed) => flushed?,
            Err(_) => {
                drop(quiesced);
                // Not dropped: its failure would be lost.
                flush.await?;
                return Ok(Attempt::TooSlow);
            }
        }
        self.tracked.tracker().check()?;
        if disk.size_bytes() != self.target.image.size_bytes() {
            return Err(PointFailure::Resized.into());
        }
        if !self.job.is_wanted(completion) {
            return Ok(Attempt::Changed);
        }
        if completion == Completion::Stay {
            return Ok(Attempt::Done(None));
        }
        // No bitmap is being added, since that passes the gate.
        match reactor::timeout(end - reactor::now(), check_bitmaps(disk)).await {
            Ok(Err(refused @ MirrorError::Bitmap { .. })) => {
                return Ok(Attempt::Refused(refused.to_string()));
            }
            Ok(checked) => checked?,
            Err(_) => return Ok(Attempt::TooSlow),
        }
        let answer = match reactor::timeout(end - reactor::now(), self.job.ask()).await {
            Ok(answer) => answer,
            Err(_) if self.job.withdraw() => return Ok(Attempt::TooSlow),
            // In the last moment.
            Err(_) => SwitchAnswer::Approved,
        };
        match answer {
            SwitchAnswer::Approved => {
                let replaced = disk.switch_image(&quiesced, Arc::clone(&self.target.image));
                self.job.note_pause(reactor::now() - began);
                Ok(Attempt::Done(Some(replaced)))
            }
            SwitchAnswer::Refused(reason) => Ok(Attempt::Refused(reason)),
            SwitchAnswer::Withdrawn => Ok(Attempt::Changed),
        }
    }

    /// Waits until the target equals the disk, whose changes wait.
    async fn copy_rest(&self, quiesced: &QuiescedDisk<'_>) -> Result<(), PointFailure> {
        let tracker = self.tracked.tracker();
        self.tracked.await_cancelled(quiesced).await;
        tracker.mark_cancelled();
        tracker.wait_for(|| (tracker.missing_bytes() == 0).then_some(())).await
    }
}

/// Fails if the disk has a dirty bitmap: the target would not have it, and a later incremental
/// backup would lack changes.
async fn check_bitmaps(disk: &Disk) -> Result<(), MirrorError> {
    match disk.bitmap_statuses().await?.into_iter().next() {
        Some(bitmap) => Err(MirrorError::Bitmap { name: bitmap.name }),
        None => Ok(()),
    }
}
