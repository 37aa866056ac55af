//! A disk: an image, the layers above it, and the requests that a client may send. The only place
//! that composes layers and image.
//!
//! ```text
//!   export ──► Disk ──► throttle ─┬─► reads: prefetch ─────────────┬─► image ──► storage
//!                                 └─► changes: copy-before-write ──┘
//! ```
//!
//! An export validates each request first: inside the disk, not too long, permitted. The request
//! completes exactly once, with data or an error. The disk does not check again, and has no
//! dependency on protocols.
//!
//! A request first needs admission, which [`Disk::admit`] returns as a permit (`AdmissionPermit`).
//! All worker threads share a disk: every method takes `&self`, and the future of a request belongs
//! to the thread that made it.

mod bitmaps;
mod chain;
mod changes;
mod counters;
mod failures;
mod handover;
mod instant;
mod latency_meter;
mod size;
mod switch;
mod tracking;
mod unresponsive;
mod upgrade;
mod zeroes;

use std::sync::{
    Arc, LazyLock, OnceLock,
    atomic::{AtomicU64, Ordering},
};

pub use changes::{DiskPoint, QuiescedDisk};
use counters::DiskCounters;
pub use counters::DiskTotals;
use failures::RequestInfo;
pub use failures::{CancelToken, ErrorPolicies, Errors, Failures, OnError, RequestFailure};
use handover::Handover;
pub use handover::HoldError;
pub use instant::InstantDisk;
use latency_meter::InFlightRequests;
pub use latency_meter::{LatencyMeter, MeasuredRequests, MeterMode};
pub use tracking::TrackedDisk;
pub use upgrade::UpgradeRefusal;
pub use zeroes::DetectZeroes;

use event_listener::Event;
use policy::{
    prefetch::ReadAhead,
    request::Direction,
    throttle::{LevelCause, RequestCost, ThrottleError},
    time::Instant,
};

use image::{ChainDepthRun, Image};
use reactor::{
    buffer::{ReadTarget, Segments},
    error::{Error, Result},
    log_rate_limit::LogRateLimit,
    memory::{MemoryAccount, MemoryBudget, OutOfBudget},
    ublk::RegisteredData,
};
use storage::{Durability, Extent, ZeroOptions};

use crate::{
    current_image::CurrentImage,
    layer::{
        copy_before_write::{CopyBeforeWrite, PointFailure},
        prefetch::Prefetch,
        throttle::{DiskSettings, ThrottleGroup, ThrottleMember},
    },
    measures::{Measures, MeasuresSnapshot},
    recorder::{self, DiskOperation, RecordingSwitch, RequestRecord},
};

/// A virtual disk.
#[derive(Debug)]
pub struct Disk {
    name: Arc<str>,
    image: Arc<CurrentImage>,
    member: ThrottleMember,
    prefetch: Prefetch,
    copy_before_write: CopyBeforeWrite,
    counters: DiskCounters,
    failures: Arc<Failures>,
    memory: Arc<MemoryAccount>,
    /// State of handover, if the image can pass to another process.
    handover: Option<Handover>,
    discards: Discards,
    detect_zeroes: DetectZeroes,
    shrink_log: LogRateLimit,
    resized: Arc<Event>,
    /// Number of changes of the size that have begun.
    size_changes: AtomicU64,
    recording: RecordingSwitch,
    measures: OnceLock<Arc<Measures>>,
    latency_meter: LatencyMeter,
    opening_id: u64,
}

/// Unique number of an opening, also among processes: the sequence begins at a random number.
fn next_opening_id() -> u64 {
    static FIRST: LazyLock<u64> = LazyLock::new(|| fastrand::u64(..));
    static OPENED: AtomicU64 = AtomicU64::new(0);
    FIRST.wrapping_add(OPENED.fetch_add(1, Ordering::Relaxed))
}

/// Treatment of discards, and of write-zeroes that may deallocate.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Discards {
    /// The storage may deallocate the space.
    #[default]
    Unmap,
    /// The space stays allocated: a discard does nothing.
    Ignore,
}

/// Admission permit of a request, from [`Disk::admit`]. Every operation that limits apply to
/// requires one.
#[derive(Debug)]
#[must_use = "it has been charged for"]
pub struct AdmissionPermit {
    /// Number of client requests that it stands for.
    requests: u64,
    cancel_token: Option<Arc<CancelToken>>,
    /// Set if the disk is recorded or measured.
    times: Option<AdmissionTimes>,
    /// Lengths of merged requests that differ, if the disk is recorded or measured.
    lengths: Option<Box<[u64]>>,
    /// Set if the disk is a member of a device with a latency target.
    _in_flight: Option<InFlightRequests>,
}

#[derive(Clone, Copy, Debug)]
struct AdmissionTimes {
    arrived: Instant,
    admitted: Instant,
    throttle_cause: Option<LevelCause>,
}

impl AdmissionTimes {
    /// Times of a request that did not wait.
    fn at(now: Instant) -> Self {
        Self { arrived: now, admitted: now, throttle_cause: None }
    }
}

impl AdmissionPermit {
    /// Not recorded, and without latencies: it is no request of a client.
    fn background() -> Self {
        Self { requests: 1, cancel_token: None, times: None, lengths: None, _in_flight: None }
    }

    /// Attaches a cancel token: if the disk stops, the request waits only until it is cancelled.
    pub fn with_cancel_token(self, cancel_token: &Arc<CancelToken>) -> Self {
        Self { cancel_token: Some(Arc::clone(cancel_token)), ..self }
    }
}

impl Disk {
    /// Creates a disk over `image`, in `group` if there is one.
    ///
    /// # Errors
    /// [`ThrottleError`]: invalid limits, or a reservation that does not fit into the group.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub fn new(
        name: &str,
        image: Image,
        settings: DiskSettings,
        group: Option<&Arc<ThrottleGroup>>,
    ) -> std::result::Result<Self, ThrottleError> {
        // The only fallible step, so a failure leaves nothing behind.
        let member = ThrottleMember::new(settings, image.size_bytes(), group)?;
        image.watch_backing();
        let handover = image.is_handed_over().then(Handover::default);
        let image = Arc::new(CurrentImage::new(image));
        let prefetch = Prefetch::new(&image);
        Ok(Self {
            opening_id: next_opening_id(),
            name: name.into(),
            image,
            member,
            prefetch,
            copy_before_write: CopyBeforeWrite::default(),
            counters: DiskCounters::default(),
            failures: Arc::default(),
            memory: MemoryAccount::new(MemoryBudget::process()),
            handover,
            discards: Discards::default(),
            detect_zeroes: DetectZeroes::default(),
            shrink_log: LogRateLimit::default(),
            resized: Arc::default(),
            size_changes: AtomicU64::new(0),
            recording: RecordingSwitch::default(),
            measures: OnceLock::new(),
            latency_meter: LatencyMeter::default(),
        })
    }

    /// Sets the treatment of discards.
    pub fn with_discards(self, discards: Discards) -> Self {
        Self { discards, ..self }
    }

    /// Treatment of discards.
    pub fn discards(&self) -> Discards {
        self.discards
    }

    /// Sets the detection of zeroes in writes.
    pub fn with_detect_zeroes(self, detect_zeroes: DetectZeroes) -> Self {
        Self { detect_zeroes, ..self }
    }

    /// Detection of zeroes in writes.
    pub fn detect_zeroes(&self) -> DetectZeroes {
        self.detect_zeroes
    }

    /// Number of this opening, unique among all disks and processes. Cached content is valid for
    /// one opening.
    pub fn opening_id(&self) -> u64 {
        self.opening_id
    }

    /// Name in config, logs and exports.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// Image that stores the disk now: see [`Disk::switch_image`].
    pub fn image(&self) -> Arc<Image> {
        self.image.shared()
    }

    /// Its limits and its group, which can be changed while it runs.
    pub fn throttle(&self) -> &ThrottleMember {
        &self.member
    }

    /// Its prefetch cache, whose settings can be changed while it runs.
    pub fn prefetch(&self) -> &Prefetch {
        &self.prefetch
    }

    /// Account of the memory that its requests and caches use.
    pub fn memory(&self) -> &Arc<MemoryAccount> {
        &self.memory
    }

    /// Reserves memory for its metadata caches and read-ahead. Call it after opening the disk, or
    /// changing their sizes.
    ///
    /// # Errors
    /// [`OutOfBudget`]; the previous reservation stays in force.
    pub fn reserve_memory(&self) -> std::result::Result<(), OutOfBudget> {
        let bytes = self.image.with(Image::max_cache_bytes) + self.prefetch.max_bytes();
        self.reserve_bytes(bytes)
    }

    /// As [`Disk::reserve_memory`], for the caches of other images than the present one: before the
    /// disk is [switched](Disk::switch_image) to them.
    ///
    /// # Errors
    /// As [`Disk::reserve_memory`].
    pub fn reserve_memory_for(&self, images: &[&Image]) -> std::result::Result<(), OutOfBudget> {
        let caches: u64 = images.iter().map(|image| image.max_cache_bytes()).sum();
        self.reserve_bytes(caches + self.prefetch.max_bytes_of_any_image())
    }

    fn reserve_bytes(&self, bytes: u64) -> std::result::Result<(), OutOfBudget> {
        self.memory.reserve("its metadata caches and read-ahead", bytes)
    }

    /// Renames the disk, which keeps its image, limits and caches.
    #[must_use]
    pub fn renamed(self, name: &str) -> Self {
        Self { name: name.into(), ..self }
    }

    /// Notified when the size has changed, for any reason.
    pub fn resized(&self) -> &Arc<Event> {
        &self.resized
    }

    /// Failed requests and the error policies, which can be changed while it runs.
    pub fn failures(&self) -> &Arc<Failures> {
        &self.failures
    }

    /// Recording state, which can be changed while it runs.
    pub fn recording(&self) -> &RecordingSwitch {
        &self.recording
    }

    /// Latency measurement, which starts with the first call.
    pub fn measure(&self) -> &Arc<Measures> {
        self.measures.get_or_init(Arc::default)
    }

    /// Results of the measurement; `None` if it was not started.
    pub fn measures_snapshot(&self) -> Option<MeasuresSnapshot> {
        self.measures.get().map(|measures| measures.snapshot())
    }

    /// Measurements for the latency targets on its device.
    pub fn latency_meter(&self) -> &LatencyMeter {
        &self.latency_meter
    }

    /// Current size in bytes.
    pub fn size_bytes(&self) -> u64 {
        self.image.with(Image::size_bytes)
    }

    /// Counters so far.
    pub fn totals(&self) -> DiskTotals {
        self.counters.totals()
    }

    /// Adds the counters of another process that served the disk before.
    pub fn add_totals(&self, totals: &DiskTotals) {
        self.counters.add(totals);
    }

    /// Waits until the limits of the disk and of the groups above it admit a request, and charges
    /// it. `cost` may stand for several merged requests.
    ///
    /// Separate from the I/O, so that the caller can cancel a request before anything has happened:
    /// a dropped future is not charged.
    pub async fn admit(&self, direction: Direction, cost: RequestCost) -> AdmissionPermit {
        let (requests, bytes, arrived) = (cost.requests(), cost.bytes(), self.clock());
        // Lengths are copied only for a recording or a measurement.
        let lengths = arrived.and_then(|_| cost.lengths()).map(Box::from);
        let cause = self.member.admit(direction, cost).await;
        let times = arrived.map(|arrived| AdmissionTimes {
            arrived,
            admitted: reactor::coarse_now(),
            throttle_cause: cause,
        });
        let in_flight = self.latency_meter.begin(direction, requests, bytes);
        AdmissionPermit { requests, cancel_token: None, times, lengths, _in_flight: in_flight }
    }

    /// As [`Disk::admit`], for a request that must not wait: it is charged at once, and later
    /// requests wait until the limits have made up for it.
    pub fn charge_unconditionally(&self, direction: Direction, cost: &RequestCost) -> AdmissionPermit {
        self.member.charge_unconditionally(direction, cost);
        AdmissionPermit {
            requests: cost.requests(),
            cancel_token: None,
            times: self.clock().map(AdmissionTimes::at),
            lengths: None,
            _in_flight: self.latency_meter.begin(direction, cost.requests(), cost.bytes()),
        }
    }

    /// Reads `length` bytes at `offset`; bytes that were read ahead are copied from memory. If
    /// merged requests fail together, it is unknown which of them did: retry each by
    /// [`Disk::retry_read`].
    pub async fn read(&self, permit: AdmissionPermit, offset: u64, length: usize) -> Result<Segments> {
        self.read_to(permit, offset, ReadTarget::Anywhere(length)).await
    }

    /// As [`Disk::read`], into `target`. If that is guest memory, the guest may reuse it only after
    /// the future has completed: a dropped future leaves reads in flight that still write there.
    pub async fn read_to(
        &self,
        permit: AdmissionPermit,
        offset: u64,
        target: ReadTarget,
    ) -> Result<Segments> {
        if self.may_wait() {
            // Boxed: the unusual path must not enlarge the future of every read.
            return Box::pin(self.read_until_done(permit, offset, target, true)).await;
        }
        let length = target.len() as u64;
        let result = self.prefetched(&permit, offset, target).await;
        self.finish_once(DiskOperation::Read, (offset, length), &permit, result)
    }

    /// Reads one of the merged requests after [`Disk::read`] has failed for all.
    pub async fn retry_read(&self, permit: AdmissionPermit, offset: u64, length: usize) -> Result<Segments> {
        self.retry_read_to(permit, offset, ReadTarget::Anywhere(length)).await
    }

    /// As [`Disk::retry_read`], for [`Disk::read_to`].
    pub async fn retry_read_to(
        &self,
        permit: AdmissionPermit,
        offset: u64,
        target: ReadTarget,
    ) -> Result<Segments> {
        self.read_until_done(permit, offset, target, false).await
    }

    /// Attempts a read until its result can be returned, with or without the prefetch cache.
    async fn read_until_done(
        &self,
        permit: AdmissionPermit,
        offset: u64,
        target: ReadTarget,
        with_prefetch: bool,
    ) -> Result<Segments> {
        let range = (offset, target.len() as u64);
        let attempt = async || match with_prefetch {
            true => self.prefetched(&permit, offset, target.duplicate()).await,
            false => self.image.get().read_to(offset, target.duplicate()).await,
        };
        self.run_until_done(DiskOperation::Read, range, &permit, attempt).await
    }

    /// True if its image may support zero copy: see [`Disk::read_registered`].
    pub fn supports_registered(&self) -> bool {
        self.image.with(Image::takes_registered)
    }

    /// As [`Disk::read_to`], into the registered buffer of a ublk request. Zero copy, unless data
    /// was read ahead, or the image or the buffer does not support it.
    pub async fn read_registered(
        &self,
        permit: AdmissionPermit,
        offset: u64,
        buffer: &RegisteredData,
    ) -> Result<()> {
        let range = (offset, buffer.bytes() as u64);
        let attempt = async || {
            let may = |ahead: &ReadAhead, refund| self.member.try_read_ahead(&ahead.cost(), refund);
            self.prefetch.read_registered(offset, buffer, permit.requests, may).await
        };
        if self.may_wait() {
            return Box::pin(self.run_until_done(DiskOperation::Read, range, &permit, attempt)).await;
        }
        let result = attempt().await;
        self.finish_once(DiskOperation::Read, range, &permit, result)
    }

    /// As [`Disk::write`], from the registered buffer of a ublk request.
    ///
    /// # Errors
    /// As [`Disk::write`].
    pub async fn write_registered(
        &self,
        permit: AdmissionPermit,
        offset: u64,
        buffer: &RegisteredData,
        durability: Durability,
    ) -> Result<()> {
        self.check_writable()?;
        if self.detect_zeroes != DetectZeroes::Off {
            // Detection must read the data, so it needs a copy.
            let data = buffer.copy_out()?.into();
            return Box::pin(self.write(permit, offset, data, durability)).await;
        }
        let range = (offset, buffer.bytes() as u64);
        let attempt = async || {
            let (change, image) = self.begin_change(range.0, range.1).await;
            let writing = image.write_registered(offset, buffer, durability);
            change.end(self.prefetch.change(range.0, range.1, writing).await)
        };
        if self.may_wait() {
            return Box::pin(self.run_until_done(DiskOperation::Write, range, &permit, attempt)).await;
        }
        let result = attempt().await;
        self.finish_once(DiskOperation::Write, range, &permit, result)
    }

    fn prefetched(
        &self,
        permit: &AdmissionPermit,
        offset: u64,
        target: ReadTarget,
    ) -> impl Future<Output = Result<Segments>> {
        let may = |ahead: &ReadAhead, refund| self.member.try_read_ahead(&ahead.cost(), refund);
        self.prefetch.read(offset, target, permit.requests, may)
    }

    /// True if [`Disk::will_need`] has an effect.
    pub fn can_read_ahead(&self) -> bool {
        self.image.with(Image::can_read_ahead)
    }

    /// Hints that `length` bytes at `offset` will be read soon; the storage may read them ahead.
    pub async fn will_need(&self, _: AdmissionPermit, offset: u64, length: u64) {
        let Ok(_guard) = self.enter().await else { return };
        self.image.get().advise_willneed(offset, length).await;
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] on a read-only disk, or the image's error.
    pub async fn write(
        &self,
        permit: AdmissionPermit,
        offset: u64,
        data: Segments,
        durability: Durability,
    ) -> Result<()> {
        self.check_writable()?;
        let length = data.len() as u64;
        if self.detect_zeroes != DetectZeroes::Off && data.is_zero() {
            return Box::pin(self.write_detected_zeroes(&permit, (offset, length), durability)).await;
        }
        if !self.may_wait() {
            let (change, image) = self.begin_change(offset, length).await;
            let prefetched = self.prefetch.begin_change(offset, length);
            let result = image.write(offset, data, durability).await;
            self.prefetch.end_change(prefetched);
            let result = change.end(result);
            return self.finish_once(DiskOperation::Write, (offset, length), &permit, result);
        }
        // `data` is duplicated, so that the write can be repeated after the disk is resumed.
        let write = async || {
            let (change, image) = self.begin_change(offset, length).await;
            let writing = image.write(offset, data.duplicate(), durability);
            change.end(self.prefetch.change(offset, length, writing).await)
        };
        Box::pin(self.run_until_done(DiskOperation::Write, (offset, length), &permit, write)).await
    }

    /// Makes all completed writes durable. Not throttled: it transfers no data.
    ///
    /// # Errors
    /// The image's error; writes since the last flush may then be lost.
    pub async fn flush(&self) -> Result<()> {
        self.flush_for(None).await
    }

    /// As [`Disk::flush`], with a cancel token: if the disk stops, it waits only until it is
    /// cancelled.
    pub async fn flush_for(&self, patience: Option<&Arc<CancelToken>>) -> Result<()> {
        if self.is_released() {
            // Everything was written when the image was handed over.
            return Ok(());
        }
        let times = self.clock().map(AdmissionTimes::at);
        // A flush is not admitted, and transfers no data that a rate would limit.
        let permit = AdmissionPermit {
            requests: 1,
            cancel_token: patience.cloned(),
            times,
            lengths: None,
            _in_flight: None,
        };
        let flush = async || self.image.get().flush().await;
        self.run_until_done(DiskOperation::Flush, (0, 0), &permit, flush).await
    }

    /// See [`Image::has_volatile_writes`].
    pub fn has_volatile_writes(&self) -> bool {
        self.image.with(Image::has_volatile_writes)
    }

    /// Makes `length` bytes at `offset` read as zeroes.
    ///
    /// # Errors
    /// [`Error::UNSUPPORTED`] if `options.only_if_fast` is set and zeroing would be slow,
    /// [`Error::NOT_PERMITTED`] on a read-only disk, or the image's error.
    pub async fn write_zeroes(
        &self,
        permit: AdmissionPermit,
        offset: u64,
        length: u64,
        options: ZeroOptions,
    ) -> Result<()> {
        self.check_writable()?;
        let options = ZeroOptions { may_unmap: self.may_unmap(options.may_unmap), ..options };
        self.zero(DiskOperation::WriteZeroes, &permit, (offset, length), options).await
    }

    /// Discards `length` bytes at `offset`, which read as undefined content afterwards.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] on a read-only disk, or the image's error.
    pub async fn discard(
        &self,
        permit: AdmissionPermit,
        offset: u64,
        length: u64,
        durability: Durability,
    ) -> Result<()> {
        self.check_writable()?;
        let discard = async || {
            if self.discards == Discards::Ignore {
                return Ok(());
            }
            // A discard is a hint: not executed if its old data cannot be kept.
            let Some((change, image)) = self.begin_discard(offset, length).await else { return Ok(()) };
            change.end(self.prefetch.change(offset, length, image.discard(offset, length)).await)
        };
        self.run_until_done(DiskOperation::Discard, (offset, length), &permit, discard).await?;
        // Storage has no durable discard: a flush follows instead.
        match durability {
            Durability::Cached => Ok(()),
            Durability::Synchronous => self.flush_for(permit.cancel_token.as_ref()).await,
        }
    }

    /// Allocation status from `offset` on: adjacent extents, which cover at least a part of
    /// `length` bytes. One permit for a read of zero bytes covers all calls for a client's query,
    /// since only metadata is read.
    pub async fn block_status(&self, _: &AdmissionPermit, offset: u64, length: u64) -> Result<Vec<Extent>> {
        let _guard = self.enter().await?;
        self.image.get().block_status(offset, length).await
    }

    /// Depth in the backing chain at which a range is allocated: see [`Image::allocation_depth`].
    /// The permit is as for [`Disk::block_status`].
    pub async fn allocation_depth(
        &self,
        _: &AdmissionPermit,
        offset: u64,
        length: u64,
    ) -> Result<Vec<ChainDepthRun>> {
        let _guard = self.enter().await?;
        self.image.get().allocation_depth(offset, length).await
    }

    /// Closes the disk: stops reading ahead, and writes the format's cached metadata. Must be the
    /// last call.
    pub async fn close(&self) -> Result<()> {
        self.fail_job(PointFailure::Closed);
        self.prefetch.stop().await;
        if self.is_released() {
            return Ok(());
        }
        self.image.shared().close().await
    }

    /// Attempts a request until its result can be returned, and counts it.
    async fn run_until_done<T>(
        &self,
        operation: DiskOperation,
        range: (u64, u64),
        permit: &AdmissionPermit,
        attempt: impl AsyncFnMut() -> Result<T>,
    ) -> Result<T> {
        let _guard = self.enter().await?;
        let request = self.request(operation, range, permit);
        // A retry does not recover writes that the page cache has lost: the client must see the
        // error.
        let may_hold = || !self.image.with(|image| image.storage().has_lost_writes());
        let result = self.failures.run_until_done(request, may_hold, attempt).await;
        self.record(&request, permit, result.is_err());
        let result = result?;
        self.count(&request);
        Ok(result)
    }

    /// Counts a request that was attempted once, with its result.
    fn finish_once<T>(
        &self,
        operation: DiskOperation,
        range: (u64, u64),
        permit: &AdmissionPermit,
        result: Result<T>,
    ) -> Result<T> {
        let request = self.request(operation, range, permit);
        match &result {
            Ok(_) => self.count(&request),
            Err(error) => self.failures.report(&request, *error),
        }
        self.record(&request, permit, result.is_err());
        result
    }

    fn request<'a>(
        &'a self,
        operation: DiskOperation,
        (offset, length): (u64, u64),
        permit: &'a AdmissionPermit,
    ) -> RequestInfo<'a> {
        let cancel_token = permit.cancel_token.as_deref();
        RequestInfo { disk: &self.name, operation, offset, length, requests: permit.requests, cancel_token }
    }

    fn count(&self, request: &RequestInfo<'_>) {
        self.counters.count(request);
        if request.operation != DiskOperation::Flush {
            self.latency_meter.complete(request.operation, request.requests, request.length);
        }
    }

    fn record(&self, request: &RequestInfo<'_>, permit: &AdmissionPermit, has_failed: bool) {
        // Merged reads that failed are retried one by one, and each retry is recorded.
        let is_retried = has_failed && request.operation == DiskOperation::Read && request.requests > 1;
        let (Some(times), false) = (permit.times, is_retried) else { return };
        let (recorded, measures) = (self.recording.get(), self.measures.get());
        let finished = RequestRecord {
            disk: recorded.unwrap_or_default(),
            operation: request.operation,
            offset: request.offset,
            length: request.length,
            requests: u32::try_from(request.requests).unwrap_or(u32::MAX),
            has_failed,
            arrived: times.arrived,
            admitted: times.admitted,
            throttle_cause: times.throttle_cause,
            completed: reactor::coarse_now(),
        };
        // The measurement counts a merged request with its number of requests; the recording lists
        // each.
        if let Some(measures) = measures {
            measures.count(&finished);
        }
        if self.latency_meter.measures_latencies() {
            self.latency_meter.add(&finished);
        }
        if recorded.is_none() {
            return;
        }
        match &permit.lengths {
            None => recorder::record(finished, &self.recording),
            Some(lengths) => {
                let mut offset = request.offset;
                for &length in lengths {
                    recorder::record(
                        RequestRecord { offset, length, requests: 1, ..finished },
                        &self.recording,
                    );
                    offset += length;
                }
            }
        }
    }

    /// Current time, if the disk is recorded or measured.
    fn clock(&self) -> Option<Instant> {
        let is_timed = self.recording.get().is_some()
            || self.measures.get().is_some()
            || self.latency_meter.measures_latencies();
        is_timed.then(reactor::coarse_now)
    }

    /// True if a request that begins now may have to wait in the middle, so that it must keep its
    /// data.
    fn may_wait(&self) -> bool {
        self.failures.may_wait() || self.handover.is_some()
    }

    fn check_writable(&self) -> Result<()> {
        if self.image.with(Image::is_read_only) { Err(Error::NOT_PERMITTED) } else { Ok(()) }
    }
}
