//! A disk: an image, the layers above it, and the requests that a client may send to both. The only
//! place that composes.
//!
//! ```text
//!   export ──► Disk ──► throttle ──► prefetch ──► image ──► storage
//! ```
//!
//! An export validates each request before it comes here: inside the disk, not too long, permitted.
//! The request leaves with data or an error, exactly once. The disk does not check again, and knows
//! nothing of protocols.
//!
//! All worker threads share it: every method takes `&self`, and the future of a request belongs to
//! the thread that made it.

mod failures;
mod handover;
mod silence;
mod takeover;
mod zeroes;

use std::sync::{
    Arc, LazyLock, OnceLock,
    atomic::{AtomicU64, Ordering},
};

use failures::Request;
pub use failures::{ErrorPolicies, Errors, Failure, Failures, OnError, Patience};
use handover::Handover;
pub use handover::NotHeld;
pub use silence::Closed;
pub use takeover::NotTaken;
pub use zeroes::DetectZeroes;

use event_listener::Event;
use policy::{
    prefetch::Ahead,
    request::Direction,
    throttle::{Cost, Held, Refused},
    time::Instant,
};

use image::{Depth, Image};
use reactor::{
    buffer::{Segments, Target},
    error::{Error, Result},
    guest::Place,
    memory::{Account, Budget, NotEnough},
    seldom::Seldom,
    ublk::Registered,
};
use storage::{Durability, Extent, ResizeError, ZeroOptions};

use crate::{
    layer::{
        prefetch::Prefetch,
        throttle::{DiskSettings, Group, Member},
    },
    measures::{Measured, Measures},
    recorder::{self, Finished, Operation, Recorded},
};

/// A virtual disk.
#[derive(Debug)]
pub struct Disk {
    name: Arc<str>,
    image: Arc<Image>,
    member: Member,
    prefetch: Prefetch,
    counters: Counters,
    failures: Arc<Failures>,
    memory: Arc<Account>,
    /// Where another process may have the image, in between.
    handover: Option<Handover>,
    discards: Discards,
    detect_zeroes: DetectZeroes,
    cuts: Seldom,
    resized: Arc<Event>,
    recorded: Recorded,
    measures: OnceLock<Arc<Measures>>,
    opened: u64,
}

/// A number that nobody else has, in this process or another.
fn next_opening() -> u64 {
    static FIRST: LazyLock<u64> = LazyLock::new(|| fastrand::u64(..));
    static OPENED: AtomicU64 = AtomicU64::new(0);
    FIRST.wrapping_add(OPENED.fetch_add(1, Ordering::Relaxed))
}

/// What becomes of discards, and of zeroes that may be holes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Discards {
    /// The storage may have the space back.
    #[default]
    Unmap,
    /// The space stays allocated: a discard does nothing.
    Ignore,
}

/// A request's permission to move data, from [`Disk::admit`]: nothing that limits hold for can be
/// done without.
#[derive(Debug)]
#[must_use = "it has been charged for"]
pub struct Pass {
    /// How many requests of the client's it stands for.
    requests: u64,
    patience: Option<Arc<Patience>>,
    /// Of a disk that is recorded or measured.
    times: Option<Times>,
    /// Of each request, where they differ, of such a disk.
    lengths: Option<Box<[u64]>>,
}

#[derive(Clone, Copy, Debug)]
struct Times {
    arrived: Instant,
    admitted: Instant,
    held: Option<Held>,
}

impl Times {
    /// Of what waited for nothing.
    fn at(now: Instant) -> Self {
        Self { arrived: now, admitted: now, held: None }
    }
}

impl Pass {
    /// Where the disk stops, the request is held only while somebody waits for it.
    pub fn while_awaited(self, patience: &Arc<Patience>) -> Self {
        Self { patience: Some(Arc::clone(patience)), ..self }
    }
}

/// What has been done, since the disk was opened: requests that succeeded, as clients asked, before
/// anything was merged.
#[derive(Debug, Default)]
pub struct Counters {
    reads: AtomicU64,
    writes: AtomicU64,
    read_bytes: AtomicU64,
    written_bytes: AtomicU64,
    merged_requests: AtomicU64,
}

/// [`Counters`] at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Reads.
    pub reads: u64,
    /// Writes, write-zeroes and discards.
    pub writes: u64,
    /// Bytes of the reads.
    pub read_bytes: u64,
    /// Bytes of the writes, write-zeroes and discards.
    pub written_bytes: u64,
    /// Requests that were saved: a merge of `n` requests saves `n - 1`.
    pub merged_requests: u64,
}

impl Disk {
    /// A disk of this name over `image`, in `group` if there is one.
    ///
    /// # Errors
    /// [`Refused`]: limits that break a rule, or a reservation that the group cannot keep.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn new(
        name: &str,
        image: Image,
        settings: DiskSettings,
        group: Option<&Arc<Group>>,
    ) -> std::result::Result<Self, Refused> {
        let member = Member::new(settings, group)?;
        image.watch_backing();
        let handover = image.is_handed_over().then(Handover::default);
        let image = Arc::new(image);
        let prefetch = Prefetch::new(&image);
        Ok(Self {
            opened: next_opening(),
            name: name.into(),
            image,
            member,
            prefetch,
            counters: Counters::default(),
            failures: Arc::default(),
            memory: Account::new(Budget::process()),
            handover,
            discards: Discards::default(),
            detect_zeroes: DetectZeroes::default(),
            cuts: Seldom::default(),
            resized: Arc::default(),
            recorded: Recorded::default(),
            measures: OnceLock::new(),
        })
    }

    /// The same disk, with another answer to discards.
    pub fn with_discards(self, discards: Discards) -> Self {
        Self { discards, ..self }
    }

    /// What becomes of discards.
    pub fn discards(&self) -> Discards {
        self.discards
    }

    /// The same disk, with another look at what is written.
    pub fn with_detect_zeroes(self, detect_zeroes: DetectZeroes) -> Self {
        Self { detect_zeroes, ..self }
    }

    /// Whether writes are looked at for zeroes.
    pub fn detect_zeroes(&self) -> DetectZeroes {
        self.detect_zeroes
    }

    /// Which opening of it this is: no other has this number, of whatever disk and process. What is
    /// kept in memory lives as long.
    pub fn opened(&self) -> u64 {
        self.opened
    }

    /// The name in config, logs and exports.
    pub fn name(&self) -> &Arc<str> {
        &self.name
    }

    /// The image behind it.
    pub fn image(&self) -> &Image {
        &self.image
    }

    /// Its limits and its group: to look at and to change while it runs.
    pub fn throttle(&self) -> &Member {
        &self.member
    }

    /// What is read ahead of its readers: to look at and to change while it runs.
    pub fn prefetch(&self) -> &Prefetch {
        &self.prefetch
    }

    /// What its requests and caches have of the process's memory.
    pub fn memory(&self) -> &Arc<Account> {
        &self.memory
    }

    /// Sets aside what its metadata caches and its read-ahead may take. For whoever has opened it,
    /// or has changed those.
    ///
    /// # Errors
    /// [`NotEnough`]; what was set aside before still is.
    pub fn reserve_memory(&self) -> std::result::Result<(), NotEnough> {
        let bytes = self.image.most_cache_bytes() + self.prefetch.most_bytes();
        self.memory.reserve("its metadata caches and read-ahead", bytes)
    }

    /// The same disk under another name: image, limits and what is in memory are what they were.
    #[must_use]
    pub fn renamed(self, name: &str) -> Self {
        Self { name: name.into(), ..self }
    }

    /// Notified when it has been given another length, by whomever.
    pub fn resized(&self) -> &Arc<Event> {
        &self.resized
    }

    /// What the device failed, and what is done about it: to look at and to change while it runs.
    pub fn failures(&self) -> &Arc<Failures> {
        &self.failures
    }

    /// Whether its requests are recorded, and as whose: to be changed while it runs.
    pub fn recorded(&self) -> &Recorded {
        &self.recorded
    }

    /// Counts from the first call on how long its requests take.
    pub fn measure(&self) -> &Arc<Measures> {
        self.measures.get_or_init(Arc::default)
    }

    /// What was counted of that; none where nobody has asked for it.
    pub fn measured(&self) -> Option<Measured> {
        self.measures.get().map(|measures| measures.measured())
    }

    /// Bytes, now.
    pub fn size_bytes(&self) -> u64 {
        self.image.size_bytes()
    }

    /// What has been done so far.
    pub fn totals(&self) -> Totals {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Totals {
            reads: get(&self.counters.reads),
            writes: get(&self.counters.writes),
            read_bytes: get(&self.counters.read_bytes),
            written_bytes: get(&self.counters.written_bytes),
            merged_requests: get(&self.counters.merged_requests),
        }
    }

    /// Counts on from what another process has done with it.
    pub fn count_on(&self, totals: &Totals) {
        let add = |counter: &AtomicU64, more: u64| {
            let _ = counter.fetch_add(more, Ordering::Relaxed);
        };
        add(&self.counters.reads, totals.reads);
        add(&self.counters.writes, totals.writes);
        add(&self.counters.read_bytes, totals.read_bytes);
        add(&self.counters.written_bytes, totals.written_bytes);
        add(&self.counters.merged_requests, totals.merged_requests);
    }

    /// Waits until a request may pass the limits of the disk and of the groups above it, and
    /// charges it. `cost` may stand for several that were merged.
    ///
    /// Apart from the I/O itself so that whoever asks can give up while nothing has happened: a
    /// dropped future is charged nothing.
    pub async fn admit(&self, direction: Direction, cost: Cost) -> Pass {
        let (requests, arrived) = (cost.requests(), self.clock());
        let lengths = arrived.and_then(|_| cost.lengths()).map(Box::from);
        let held = self.member.admit(direction, cost).await;
        let times = arrived.map(|arrived| Times { arrived, admitted: reactor::recently(), held });
        Pass { requests, patience: None, times, lengths }
    }

    /// As [`Disk::admit`], for what can wait no longer: it is charged, and what comes after it
    /// waits until the limits have made up for it.
    pub fn admit_anyway(&self, direction: Direction, cost: &Cost) -> Pass {
        self.member.admit_anyway(direction, cost);
        Pass { requests: cost.requests(), patience: None, times: self.clock().map(Times::at), lengths: None }
    }

    /// Reads `length` bytes at `offset`; those that are in memory already are not read again. If
    /// several requests of a client fail together, which of them did is not known: each is to be
    /// tried by [`Disk::retry_read`].
    pub async fn read(&self, pass: Pass, offset: u64, length: usize) -> Result<Segments> {
        self.read_to(pass, offset, Target::Anywhere(length)).await
    }

    /// The same, with the data where `target` wants it. If that is a guest's memory, the guest may
    /// use it for something else only when the future has come to its end: dropped before, it
    /// leaves reads behind that still write there.
    pub async fn read_to(&self, pass: Pass, offset: u64, target: Target) -> Result<Segments> {
        if self.may_hold() {
            return Box::pin(self.read_or_hold(pass, offset, target, true)).await;
        }
        let length = target.len() as u64;
        let result = self.prefetched(&pass, offset, target).await;
        self.ended(Operation::Read, (offset, length), &pass, result)
    }

    /// Reads a part of what [`Disk::read`] failed to read as a whole.
    pub async fn retry_read(&self, pass: Pass, offset: u64, length: usize) -> Result<Segments> {
        self.retry_read_to(pass, offset, Target::Anywhere(length)).await
    }

    /// The same for [`Disk::read_to`].
    pub async fn retry_read_to(&self, pass: Pass, offset: u64, target: Target) -> Result<Segments> {
        self.read_or_hold(pass, offset, target, false).await
    }

    /// Attempts a read until its client is to know how it ended; with or without what was read
    /// ahead.
    async fn read_or_hold(
        &self,
        pass: Pass,
        offset: u64,
        target: Target,
        with_prefetch: bool,
    ) -> Result<Segments> {
        let range = (offset, target.len() as u64);
        let attempt = async || match with_prefetch {
            true => self.prefetched(&pass, offset, target.again()).await,
            false => self.image.read_to(offset, target.again()).await,
        };
        self.done(Operation::Read, range, &pass, attempt).await
    }

    /// Whether data may move between its image and where a request's is, as far as nothing has to
    /// look at it: see [`Disk::read_registered`].
    pub fn takes_registered(&self) -> bool {
        self.image.takes_registered()
    }

    /// As [`Disk::read_to`], with the data where a request's is. Nobody copies it, unless it was
    /// read ahead, or the image or the place is none that this can be done with.
    pub async fn read_registered(&self, pass: Pass, offset: u64, buffer: &Registered) -> Result<()> {
        let range = (offset, buffer.bytes() as u64);
        let attempt = async || {
            let may = |ahead: &Ahead, given_back| self.member.spare(&ahead.cost(), given_back);
            self.prefetch.read_registered(offset, buffer, pass.requests, may).await
        };
        if self.may_hold() {
            return Box::pin(self.done(Operation::Read, range, &pass, attempt)).await;
        }
        let result = attempt().await;
        self.ended(Operation::Read, range, &pass, result)
    }

    /// As [`Disk::write`], of a request's data where it is.
    ///
    /// # Errors
    /// As there.
    pub async fn write_registered(
        &self,
        pass: Pass,
        offset: u64,
        buffer: &Registered,
        durability: Durability,
    ) -> Result<()> {
        self.check_writable()?;
        if self.detect_zeroes != DetectZeroes::Off {
            let data = buffer.take()?.into();
            return Box::pin(self.write(pass, offset, data, durability)).await;
        }
        let range = (offset, buffer.bytes() as u64);
        let attempt = async || {
            let writing = self.image.write_registered(offset, buffer, durability);
            self.prefetch.change(range.0, range.1, writing).await
        };
        if self.may_hold() {
            return Box::pin(self.done(Operation::Write, range, &pass, attempt)).await;
        }
        let result = attempt().await;
        self.ended(Operation::Write, range, &pass, result)
    }

    /// Whether reads and writes need not wait for anything but limits: see [`Disk::read_now`].
    pub fn is_instant(&self) -> bool {
        !self.may_hold()
            && !self.prefetch.is_on()
            && self.detect_zeroes == DetectZeroes::Off
            && self.image.is_instant()
    }

    /// As [`Disk::admit`], for requests that come together and might pass without waiting: tells of
    /// each in its order whether it does, and then it has been charged.
    pub fn admit_now(
        &self,
        requests: impl Iterator<Item = (Direction, Cost)>,
        mut answer: impl FnMut(Option<Pass>),
    ) {
        let times = self.clock().map(Times::at);
        self.member.admit_now(requests, |cost, passes| {
            answer(passes.then(|| Pass { requests: cost.requests(), patience: None, times, lengths: None }));
        });
    }

    /// As [`Disk::read_to`], without a future; `None` from a disk that is not
    /// [instant](Disk::is_instant).
    pub fn read_now(&self, pass: &Pass, offset: u64, into: &[Place]) -> Option<Result<()>> {
        let length = into.iter().map(Place::bytes).sum::<usize>() as u64;
        let result = self.image.read_now(offset, into)?;
        Some(self.ended(Operation::Read, (offset, length), pass, result))
    }

    /// As [`Disk::write`], without a future; `None` from a disk that is not
    /// [instant](Disk::is_instant).
    pub fn write_now(&self, pass: &Pass, offset: u64, from: &[Place]) -> Option<Result<()>> {
        let length = from.iter().map(Place::bytes).sum::<usize>() as u64;
        let change = self.prefetch.change_begins(offset, length);
        let result = self.image.write_now(offset, from);
        self.prefetch.change_ends(change);
        Some(self.ended(Operation::Write, (offset, length), pass, result?))
    }

    fn prefetched(&self, pass: &Pass, offset: u64, target: Target) -> impl Future<Output = Result<Segments>> {
        let may = |ahead: &Ahead, given_back| self.member.spare(&ahead.cost(), given_back);
        self.prefetch.read(offset, target, pass.requests, may)
    }

    /// Whether [`Disk::will_need`] reads anything.
    pub fn can_read_ahead(&self) -> bool {
        self.image.can_read_ahead()
    }

    /// Says that `length` bytes at `offset` will be read soon: a hint, on which as much may be
    /// read.
    pub async fn will_need(&self, _: Pass, offset: u64, length: u64) {
        let Ok(_inside) = self.enter().await else { return };
        self.image.will_need(offset, length).await;
    }

    /// Writes `data` at `offset`.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] on a read-only disk, or the image's.
    pub async fn write(&self, pass: Pass, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        self.check_writable()?;
        let length = data.len() as u64;
        if self.detect_zeroes != DetectZeroes::Off && data.is_zero() {
            return Box::pin(self.write_seen_zeroes(&pass, (offset, length), durability)).await;
        }
        if !self.may_hold() {
            let change = self.prefetch.change_begins(offset, length);
            let result = self.image.write(offset, data, durability).await;
            self.prefetch.change_ends(change);
            return self.ended(Operation::Write, (offset, length), &pass, result);
        }
        let write = async || {
            let writing = self.image.write(offset, data.again(), durability);
            self.prefetch.change(offset, length, writing).await
        };
        Box::pin(self.done(Operation::Write, (offset, length), &pass, write)).await
    }

    /// Makes all completed writes durable. Never throttled: it moves no data of its own.
    ///
    /// # Errors
    /// The image's; what was written since the last flush must then be taken for lost.
    pub async fn flush(&self) -> Result<()> {
        self.flush_for(None).await
    }

    /// The same, held by a stopped disk only while somebody waits for it.
    pub async fn flush_for(&self, patience: Option<&Arc<Patience>>) -> Result<()> {
        if self.is_let_go() {
            // It was written before.
            return Ok(());
        }
        let times = self.clock().map(Times::at);
        let pass = Pass { requests: 1, patience: patience.cloned(), times, lengths: None };
        let flush = async || self.image.flush().await;
        self.done(Operation::Flush, (0, 0), &pass, flush).await
    }

    /// See [`Image::would_lose`].
    pub fn would_lose(&self) -> bool {
        self.image.would_lose()
    }

    /// Makes `length` bytes at `offset` read as zeroes.
    ///
    /// # Errors
    /// [`Error::UNSUPPORTED`] where it was to be fast and is not, [`Error::NOT_PERMITTED`] on a
    /// read-only disk, or the image's.
    pub async fn write_zeroes(
        &self,
        pass: Pass,
        offset: u64,
        length: u64,
        options: ZeroOptions,
    ) -> Result<()> {
        self.check_writable()?;
        let options = ZeroOptions { may_unmap: self.may_unmap(options.may_unmap), ..options };
        self.zero(Operation::WriteZeroes, &pass, (offset, length), options).await
    }

    /// Says that `length` bytes at `offset` are no longer needed; what they read as afterwards is
    /// undefined.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] on a read-only disk, or the image's.
    pub async fn discard(&self, pass: Pass, offset: u64, length: u64, durability: Durability) -> Result<()> {
        self.check_writable()?;
        let discard = async || match self.discards {
            Discards::Unmap => self.prefetch.change(offset, length, self.image.discard(offset, length)).await,
            Discards::Ignore => Ok(()),
        };
        self.done(Operation::Discard, (offset, length), &pass, discard).await?;
        match durability {
            Durability::Cached => Ok(()),
            Durability::Synchronous => self.flush_for(pass.patience.as_ref()).await,
        }
    }

    /// What is allocated from `offset` on: extents that follow each other, covering at least a part
    /// of `length` bytes. One pass for a read of no bytes answers for all that a query asks: what
    /// is read for it are tables.
    pub async fn block_status(&self, _: &Pass, offset: u64, length: u64) -> Result<Vec<Extent>> {
        let _inside = self.enter().await?;
        self.image.block_status(offset, length).await
    }

    /// How far down the chain of files a range is allocated: see [`Image::allocation_depth`]. A
    /// pass is as good as for [`Disk::block_status`].
    pub async fn allocation_depth(&self, _: &Pass, offset: u64, length: u64) -> Result<Vec<Depth>> {
        let _inside = self.enter().await?;
        self.image.allocation_depth(offset, length).await
    }

    /// Gives it another size: see [`Image::resize`].
    pub async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        let _inside = self.enter().await?;
        let old = self.size_bytes();
        // All of it: it may have been cut off from outside, too, and nobody has looked since.
        self.prefetch.change(0, u64::MAX, self.image.resize(size_bytes)).await?;
        if size_bytes != old {
            self.resized.notify(usize::MAX);
        }
        // Whoever may write to a file that shows it may do so all day.
        if size_bytes < old
            && let Some(left_out) = self.cuts.line(reactor::recently())
        {
            tracing::warn!(
                disk = %self.name,
                old,
                new = size_bytes,
                left_out,
                "the disk was cut; what lay past its new end is lost"
            );
        }
        Ok(())
    }

    /// Reserves space for a range, which may lie past the end: see [`Image::reserve`].
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] on a read-only disk, or the image's.
    pub async fn reserve(&self, _: Pass, offset: u64, length: u64) -> Result<()> {
        self.check_writable()?;
        let _inside = self.enter().await?;
        self.image.reserve(offset, length).await
    }

    /// Looks whether the image was resized from outside; returns its size in bytes.
    ///
    /// # Errors
    /// The storage does not report its size.
    pub async fn refresh_size(&self) -> Result<u64> {
        let before = self.size_bytes();
        let size_bytes = self.image.refresh_size().await?;
        self.compare_size(before, size_bytes);
        Ok(size_bytes)
    }

    /// The same, where the image has told that it was changed; clients are told too.
    ///
    /// # Errors
    /// It cannot be seen.
    pub async fn look_again(&self) -> Result<u64> {
        let before = self.size_bytes();
        let size_bytes = self.image.look_again().await?;
        self.heard_of_size(before, size_bytes);
        Ok(size_bytes)
    }

    fn heard_of_size(&self, before: u64, size_bytes: u64) {
        self.compare_size(before, size_bytes);
        if size_bytes != before {
            self.resized.notify(usize::MAX);
        }
    }

    fn compare_size(&self, before: u64, size_bytes: u64) {
        if size_bytes != before {
            tracing::warn!(
                disk = %self.name,
                old = before,
                new = size_bytes,
                "somebody else changed the size of the image; clients that come now see the new one"
            );
            self.prefetch.forget();
        }
    }

    /// The last thing that is done with a disk: nothing is read ahead any more, and what a format
    /// keeps in memory reaches the file.
    pub async fn close(&self) -> Result<()> {
        self.prefetch.stop().await;
        if self.is_let_go() {
            return Ok(());
        }
        self.image.close().await
    }

    /// Attempts a request until its client is to know how it ended, and counts it.
    async fn done<T>(
        &self,
        operation: Operation,
        range: (u64, u64),
        pass: &Pass,
        attempt: impl AsyncFnMut() -> Result<T>,
    ) -> Result<T> {
        let _inside = self.enter().await?;
        let request = self.request(operation, range, pass);
        // What the page cache has lost no second attempt brings back: the client must know.
        let may_hold = || !self.image.storage().has_lost_writes();
        let result = self.failures.until_done(request, may_hold, attempt).await;
        self.record(&request, pass, result.is_err());
        let result = result?;
        self.count(&request);
        Ok(result)
    }

    /// Counts a request that was attempted once, whatever came of it.
    fn ended<T>(&self, operation: Operation, range: (u64, u64), pass: &Pass, result: Result<T>) -> Result<T> {
        let request = self.request(operation, range, pass);
        match &result {
            Ok(_) => self.count(&request),
            Err(error) => self.failures.tell(&request, *error),
        }
        self.record(&request, pass, result.is_err());
        result
    }

    fn request<'a>(
        &'a self,
        operation: Operation,
        (offset, length): (u64, u64),
        pass: &'a Pass,
    ) -> Request<'a> {
        let patience = pass.patience.as_deref();
        Request { disk: &self.name, operation, offset, length, requests: pass.requests, patience }
    }

    fn count(&self, request: &Request<'_>) {
        if request.operation != Operation::Flush {
            self.counters.count(request.operation.direction(), request.requests, request.length);
        }
    }

    fn record(&self, request: &Request<'_>, pass: &Pass, has_failed: bool) {
        // Of merged reads that fail each is tried again, and tells for itself.
        let is_tried_again = has_failed && request.operation == Operation::Read && request.requests > 1;
        let (Some(times), false) = (pass.times, is_tried_again) else { return };
        let (recorded, measures) = (self.recorded.get(), self.measures.get());
        let finished = Finished {
            disk: recorded.unwrap_or_default(),
            operation: request.operation,
            offset: request.offset,
            length: request.length,
            requests: u32::try_from(request.requests).unwrap_or(u32::MAX),
            has_failed,
            arrived: times.arrived,
            admitted: times.admitted,
            held: times.held,
            ended: reactor::recently(),
        };
        if let Some(measures) = measures {
            measures.count(&finished);
        }
        if recorded.is_none() {
            return;
        }
        match &pass.lengths {
            None => recorder::tell(finished, &self.recorded),
            Some(lengths) => {
                let mut offset = request.offset;
                for &length in lengths {
                    recorder::tell(Finished { offset, length, requests: 1, ..finished }, &self.recorded);
                    offset += length;
                }
            }
        }
    }

    /// The time, if the disk is recorded or measured.
    fn clock(&self) -> Option<Instant> {
        let is_asked = self.recorded.get().is_some() || self.measures.get().is_some();
        is_asked.then(reactor::recently)
    }

    /// Whether a request that begins now may have to wait, and so is attempted with more care.
    fn may_hold(&self) -> bool {
        self.failures.may_hold() || self.handover.is_some()
    }

    fn check_writable(&self) -> Result<()> {
        if self.image.is_read_only() { Err(Error::NOT_PERMITTED) } else { Ok(()) }
    }
}

impl Counters {
    fn count(&self, direction: Direction, requests: u64, bytes: u64) {
        let (of_requests, of_bytes) = match direction {
            Direction::Read => (&self.reads, &self.read_bytes),
            Direction::Write => (&self.writes, &self.written_bytes),
        };
        of_requests.fetch_add(requests, Ordering::Relaxed);
        of_bytes.fetch_add(bytes, Ordering::Relaxed);
        if requests > 1 {
            self.merged_requests.fetch_add(requests - 1, Ordering::Relaxed);
        }
    }
}
