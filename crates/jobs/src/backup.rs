//! Backup: copies a disk to another image, as it was at one instant, while clients change it.
//!
//! ```text
//!   plan.rs: what remains ─► zeroes ───────────────────────► nothing, or write_zeroes ─┐
//!                        └─► data ─► admission ─► read ──► target ─────────────────────┼─► flush
//!   clients' changes ─► old data, buffered ──────────────► target ─────────────────────┘
//! ```
//!
//! [`COPIES`] tasks copy what no change has saved; [`SAVED_WRITERS`] tasks write the old data of
//! changed clusters, which is never delayed, since it occupies a bounded buffer. So a paused or
//! throttled backup still writes old data.
//!
//! Ranges that read as zeroes are not copied. The target receives zeroes as zeroes, which it can
//! store without allocating space.
//!
//! With a bitmap, the bitmap begins anew at the instant. An incremental backup copies only what the
//! bitmap marked until then. Its target has the content of the last backup: below it, as a backing
//! file that is not open here, or in it.
//!
//! Never changes the disk. If the backup fails or is cancelled, the target has undefined content;
//! its owner removes it.

mod plan;

use std::{convert::Infallible, ops::Range, rc::Rc, sync::Arc};

use block::{
    disk::{AdmissionPermit, Disk, DiskPoint},
    layer::{
        copy_before_write::{OldData, PointFailure, PointInTime, PointOptions},
        throttle::{BackgroundMember, BackgroundSettings},
    },
};
use image::{
    Image,
    qcow2::bitmap::{BitmapError, RotatedBitmap},
};
use policy::{request::Direction, throttle::ThrottleError};
use reactor::{JoinHandle, select::first};
use storage::RangeLocks;

use self::plan::{Piece, Plan};
use crate::{
    job::{Job, JobResult},
    target::{JobTarget, TargetError},
    tasks::JobTasks,
};

/// Size of a cluster in bytes: the unit of copy-before-write. QEMU's default.
pub const CLUSTER_BYTES: u64 = 64 << 10;
/// Bound of the buffer for old data, in bytes.
pub const MAX_BUFFER_BYTES: u64 = 64 << 20;
/// Number of copies in flight.
const COPIES: usize = 16;
/// Number of writes of old data in flight.
const SAVED_WRITERS: usize = 4;
/// Longest copy, in bytes.
const COPY_BYTES: u64 = 512 << 10;

/// Sizes of a backup.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BackupSizes {
    /// Size of a cluster in bytes, a power of two.
    pub cluster_bytes: u64,
    /// Bound of the buffer for old data, in bytes: see [`PointOptions::max_buffer_bytes`].
    pub max_buffer_bytes: u64,
}

impl Default for BackupSizes {
    fn default() -> Self {
        Self { cluster_bytes: CLUSTER_BYTES, max_buffer_bytes: MAX_BUFFER_BYTES }
    }
}

/// Options of a backup.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BackupOptions {
    /// Limits and weight.
    pub settings: BackgroundSettings,
    /// Sizes.
    pub sizes: BackupSizes,
    /// Bitmap that begins anew at the instant.
    pub bitmap: Option<BackupBitmap>,
}

/// Bitmap of a backup.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BackupBitmap {
    /// Name of a bitmap of the disk's image.
    pub name: String,
    /// True if only its marks are copied.
    pub is_incremental: bool,
}

/// Reason why a backup failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BackupError {
    /// The disk, or the buffer for its old data.
    #[error(transparent)]
    Point(#[from] PointFailure),
    /// The limits of the backup.
    #[error(transparent)]
    Throttle(#[from] ThrottleError),
    /// The bitmap cannot be used.
    #[error(transparent)]
    Bitmap(#[from] BitmapError),
    /// The disk's image has no bitmaps.
    #[error("its image is raw, which has no bitmaps (make a full backup without a bitmap)")]
    NoBitmaps,
    /// The target is smaller than the disk.
    #[error("the target has {target_bytes} bytes, and the disk {disk_bytes} (use a larger target)")]
    TooSmall {
        /// Size of the target in bytes.
        target_bytes: u64,
        /// Size of the disk in bytes.
        disk_bytes: u64,
    },
    /// The target failed.
    #[error(transparent)]
    Target(#[from] TargetError),
}

impl BackupError {
    /// Direction of the I/O that has failed.
    fn failed_io(&self) -> Option<Direction> {
        match self {
            Self::Point(PointFailure::Read { .. }) => Some(Direction::Read),
            Self::Target(_) => Some(Direction::Write),
            _ => None,
        }
    }
}

/// A backup that has a point in time, and has not copied anything.
#[derive(Debug)]
pub struct Backup {
    job: Arc<Job>,
    point: DiskPoint,
    target: JobTarget,
    bitmap: Option<RotatedBitmap>,
}

/// State that the tasks of a backup share.
struct BackupWork {
    job: Arc<Job>,
    point: DiskPoint,
    target: JobTarget,
    plan: Plan,
    tasks: JobTasks<BackupError>,
    /// Held by the task that asks for admission.
    admission_turn: RangeLocks,
}

impl Backup {
    /// Begins a backup: its content is that of the disk at an instant during this call. The job is
    /// running then.
    ///
    /// # Errors
    /// [`BackupError`]: invalid limits, a target that is too small, a bitmap that cannot be used,
    /// or no point in time can begin.
    pub async fn begin(
        job: &Arc<Job>,
        disk: &Arc<Disk>,
        target: JobTarget,
        options: BackupOptions,
    ) -> Result<Self, BackupError> {
        let BackupOptions { settings, sizes, bitmap } = options;
        let cluster_bytes = sizes.cluster_bytes.max(target.unit_bytes());
        let check_size = |disk_bytes| match target.image.size_bytes() {
            target_bytes if target_bytes < disk_bytes => {
                Err(BackupError::TooSmall { target_bytes, disk_bytes })
            }
            _ => Ok(()),
        };
        // Before clients' changes wait.
        check_size(disk.size_bytes())?;
        let member = Arc::new(BackgroundMember::new(settings)?);
        let options = PointOptions {
            cluster_bytes,
            max_buffer_bytes: sizes.max_buffer_bytes,
            // The target's metadata caches included.
            copy_bytes: COPIES as u64 * COPY_BYTES.max(cluster_bytes) + target.image.max_cache_bytes(),
        };
        let at_instant = async |point: &PointInTime| {
            // The disk may have grown since.
            check_size(point.size_bytes())?;
            let rotated = match &bitmap {
                Some(bitmap) => Some(rotate(&disk.image(), point, bitmap).await?),
                None => None,
            };
            Ok::<_, BackupError>((rotated, point.unsaved_bytes()))
        };
        let (point, (rotated, bytes)) = disk.begin_point_in_time_with(member, options, at_instant).await?;
        job.set_point(point.point());
        job.start(bytes);
        Ok(Self { job: Arc::clone(job), point, target, bitmap: rotated })
    }

    /// Takes the bitmap that has begun anew. The caller [drops its earlier
    /// marks](RotatedBitmap::drop_earlier) when the target is closed after a success.
    pub fn take_bitmap(&mut self) -> Option<RotatedBitmap> {
        self.bitmap.take()
    }

    /// Name of the bitmap that has begun anew.
    pub fn bitmap_name(&self) -> Option<&str> {
        self.bitmap.as_ref().map(RotatedBitmap::name)
    }

    /// Member of the throttle tree that the backup is charged to; its settings can be changed.
    pub fn member(&self) -> &Arc<BackgroundMember> {
        self.point.point().member()
    }

    /// Copies everything and flushes the target, unless the job is cancelled first. Then the job
    /// is [aborting](Job::abort), or running if it has succeeded: the caller closes the target, and
    /// [concludes](Job::conclude) the job with the result.
    pub async fn run(self) -> JobResult {
        // A bitmap that the caller has not taken has all marks again at the end.
        let Self { job, point, target, bitmap: _bitmap } = self;
        let shared = Rc::new(BackupWork {
            plan: Plan::new(COPY_BYTES.max(point.point().cluster_bytes())),
            job: Arc::clone(&job),
            point,
            target: target.clone(),
            tasks: JobTasks::new(COPIES + SAVED_WRITERS),
            admission_turn: RangeLocks::default(),
        });
        // Dropping the handles cancels the tasks.
        let tasks = BackupWork::start(&shared);
        let cancelled = async {
            job.cancelled().await;
            Ok(())
        };
        // All tasks may wait for a target that does not answer.
        let copying = async { first(shared.tasks.all_ended(), shared.point_failed()).await.into_output() };
        let copied = first(copying, cancelled).await.into_output();
        // Before the tasks, which the executor drops later.
        shared.point.end();
        drop(tasks);
        let flushed = async {
            copied?;
            target.flush().await?;
            Ok::<(), BackupError>(())
        };
        let cancelled = async {
            job.cancelled().await;
            Ok(())
        };
        let result = match first(flushed, cancelled).await.into_output() {
            _ if job.is_cancelled() => JobResult::Cancelled,
            Ok(()) => JobResult::Completed,
            Err(error) => {
                error.failed_io().into_iter().for_each(|direction| job.note_failed_io(direction));
                JobResult::Failed(error.to_string())
            }
        };
        if result != JobResult::Completed {
            job.abort();
        }
        result
    }
}

/// Lets a bitmap begin anew, and selects what the backup copies.
async fn rotate(
    image: &Image,
    point: &PointInTime,
    bitmap: &BackupBitmap,
) -> Result<RotatedBitmap, BackupError> {
    let Image::Qcow2(image) = image else { return Err(BackupError::NoBitmaps) };
    // Changes that their clients have cancelled may be in flight.
    let rotated = image.drain().await.rotate_bitmap(&bitmap.name)?;
    if bitmap.is_incremental {
        point.select(|at, end| rotated.earlier_run(at, end));
    }
    Ok(rotated)
}

impl BackupWork {
    fn start(self: &Rc<Self>) -> Vec<JoinHandle<()>> {
        let copies = (0..COPIES).map(|_| {
            let shared = Rc::clone(self);
            reactor::spawn_joinable(async move { shared.tasks.end(shared.copy_pieces().await) })
        });
        let writers = (0..SAVED_WRITERS).map(|_| {
            let shared = Rc::clone(self);
            reactor::spawn_joinable(async move { shared.tasks.end(shared.write_old_data().await) })
        });
        copies.chain(writers).collect()
    }

    /// Waits until the point in time has failed.
    async fn point_failed(&self) -> Result<(), BackupError> {
        match self.point.point().wait_for(|_| None::<Infallible>).await {
            Ok(never) => match never {},
            Err(failure) => Err(failure.into()),
        }
    }

    /// Waits until a copy of `bytes` is admitted and the job is not paused.
    async fn admit(&self, bytes: u64) -> AdmissionPermit {
        // One task at a time asks for admission, so a pause stops all but that one before they are
        // charged.
        let _turn = self.admission_turn.exclusive(0..1).await;
        self.job.wait_while_paused().await;
        let permit = self.point.disk().admit_background(self.point.point().member(), bytes).await;
        // A pause during the wait; the copy is charged already.
        self.job.wait_while_paused().await;
        permit
    }

    /// Copies pieces of the plan until nothing remains.
    async fn copy_pieces(&self) -> Result<(), BackupError> {
        loop {
            self.job.wait_while_paused().await;
            let Some(piece) = self.plan.next(&self.point).await? else { return Ok(()) };
            match piece.kind() {
                Piece::Zeroes(range) => {
                    self.job.wait_while_paused().await;
                    for zeroes in self.point.point().skip_zeroes(range) {
                        self.write_zeroes(zeroes).await?;
                    }
                }
                Piece::Data(range) => {
                    let permit = self.admit(range.end - range.start).await;
                    for data in self.point.read(permit, range.clone()).await? {
                        self.write(data).await?;
                    }
                }
            }
        }
    }

    /// Writes old data of changed clusters until nothing remains.
    async fn write_old_data(&self) -> Result<(), BackupError> {
        while let Some(data) = self.point.point().next_old_data().await? {
            self.write(data).await?;
        }
        Ok(())
    }

    /// Writes data to the target; zeroes in it as zeroes.
    async fn write(&self, data: OldData) -> Result<(), BackupError> {
        let Some(bytes) = data.data() else {
            return self.write_zeroes(data.offset()..data.offset() + data.length_bytes()).await;
        };
        let copied = self.target.write(data.offset(), bytes, |range| data.segments(range)).await?;
        self.job.add_done(data.length_bytes(), copied);
        Ok(())
    }

    async fn write_zeroes(&self, range: Range<u64>) -> Result<(), BackupError> {
        if !self.target.is_zero {
            self.target.write_zeroes(range.clone()).await?;
        }
        self.job.add_done(range.end - range.start, 0);
        Ok(())
    }
}
