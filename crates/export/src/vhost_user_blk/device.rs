//! State that all queues of an export share: the disk, the offered features, the guest's choices,
//! and counters.

use std::{
    collections::BTreeMap,
    fmt::Display,
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicBool, AtomicU64,
            Ordering::{Relaxed, SeqCst},
        },
    },
    task::{Context, Poll},
};

use block::disk::Disk;
use event_listener::{Event, EventListener};
use pin_project_lite::pin_project;
use policy::time::Instant;
use reactor::{buffer::guest_copies, log_rate_limit::LogRateLimit};
use storage::Durability;

use super::{
    events::{ExportObserver, FrontEndEvent},
    features::VhostUserOffer,
    vring_event::NotAnEventfd,
};
use ::virtio::block::{self as requests, ID_BYTES, RangeLimits};

/// Number of log lines about switching the cache before they are rate-limited: a guest switches its
/// cache once or twice as it starts.
const SWITCH_LOG_BURST: u64 = 16;

/// A disk to be exported to virtual machines.
#[derive(Clone, Debug)]
pub struct VhostUserExport {
    /// Name in the log.
    pub id: Arc<str>,
    /// The disk.
    pub disk: Arc<Disk>,
    /// Features and parameters. The size is overwritten with the disk's current one.
    pub offer: VhostUserOffer,
    /// Serial number; a guest sees its first 20 bytes.
    pub serial: Arc<str>,
}

#[derive(Debug)]
pub(super) struct VhostUserDevice {
    pub(super) export: VhostUserExport,
    observer: Option<Arc<dyn ExportObserver>>,
    /// True if completed writes may stay in a cache until the next flush, as negotiated.
    write_cache: AtomicBool,
    /// Cache mode that the guest chose; the offered one while it has not chosen.
    chosen_write_cache: AtomicBool,
    /// Value of `requests` when the current front end connected.
    requests_before: AtomicU64,
    /// True once the log has a warning that this front end's memory may not be shared.
    pub(super) has_warned_of_memory: AtomicBool,
    /// True once the log has a warning that this front end's guest may assume another block size.
    pub(super) has_warned_of_block_size: AtomicBool,
    /// True once the log has an error that this front end's guest has lost writes.
    has_warned_of_loss: AtomicBool,
    /// True once the log has a warning that a ring of this front end is too short for its requests.
    pub(super) has_warned_of_short_ring: AtomicBool,
    /// True if the front end has to quiesce for an upgrade.
    is_quiescing: AtomicBool,
    /// Notified when `is_quiescing` changes.
    quiesce_changed: Event,
    missing_event_logs: LogRateLimit,
    cache_switch_logs: LogRateLimit,
    pub(super) broken_ring_logs: LogRateLimit,
    /// Broken rings that were reported and are not served again yet, with the time of the report.
    broken: Mutex<BTreeMap<u16, Instant>>,
    pub(super) kicks: AtomicU64,
    pub(super) calls: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) in_flight: AtomicU64,
    pub(super) copies: AtomicU64,
}

impl VhostUserDevice {
    pub(super) fn new(export: VhostUserExport) -> Self {
        let cache = || AtomicBool::new(export.offer.write_cache);
        let (write_cache, chosen_write_cache) = (cache(), cache());
        let (missing_event_logs, cache_switch_logs, broken_ring_logs, broken) = Default::default();
        let (kicks, calls, requests, in_flight, copies) = Default::default();
        let (has_warned_of_memory, has_warned_of_block_size, has_warned_of_loss) = Default::default();
        let (requests_before, has_warned_of_short_ring, is_quiescing) = Default::default();
        Self {
            export,
            observer: None,
            write_cache,
            chosen_write_cache,
            requests_before,
            has_warned_of_memory,
            has_warned_of_block_size,
            has_warned_of_loss,
            has_warned_of_short_ring,
            is_quiescing,
            quiesce_changed: Event::new(),
            missing_event_logs,
            cache_switch_logs,
            broken_ring_logs,
            broken,
            kicks,
            calls,
            requests,
            in_flight,
            copies,
        }
    }

    /// Quiesces or resumes the front end.
    pub(super) fn set_quiescing(&self, quiescing: bool) {
        self.is_quiescing.store(quiescing, SeqCst);
        self.quiesce_changed.notify(usize::MAX);
    }

    pub(super) fn is_quiescing(&self) -> bool {
        self.is_quiescing.load(SeqCst)
    }

    /// Listener for the next change of [`Self::is_quiescing`].
    pub(super) fn listen_to_quiesce(&self) -> EventListener {
        self.quiesce_changed.listen()
    }

    pub(super) fn with_observer(self, observer: Arc<dyn ExportObserver>) -> Self {
        Self { observer: Some(observer), ..self }
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.export.disk
    }

    /// Current offer. A front end that reconnects does not repeat the guest's choice of a cache
    /// mode, so the earlier choice is offered.
    pub(super) fn offer(&self) -> VhostUserOffer {
        VhostUserOffer {
            size_bytes: self.disk().size_bytes(),
            opened: self.disk().opening_id(),
            write_cache: self.chosen_write_cache.load(Relaxed),
            ..self.export.offer.clone()
        }
    }

    /// Parameters for validating requests.
    pub(super) fn limits(&self) -> requests::BlkDeviceConfig {
        let offer = &self.export.offer;
        // `None` makes the request type unsupported, as an unoffered feature requires.
        let ranges = |offered: bool, max_ranges: u32| {
            offered.then_some(RangeLimits { max_sectors: offer.max_erase_sectors, max_ranges })
        };
        requests::BlkDeviceConfig {
            bytes: self.disk().size_bytes(),
            block_bytes: offer.block_bytes.into(),
            read_only: offer.read_only,
            max_segments: offer.max_segments,
            discard: ranges(offer.discard, offer.max_discard_segments),
            write_zeroes: ranges(offer.write_zeroes, offer.max_write_zeroes_segments),
        }
    }

    /// Sets the negotiated mode and the guest's choice. Firmware without FLUSH support negotiates
    /// write-through but has chosen nothing, hence two values.
    pub(super) fn set_write_cache(&self, negotiated: bool, chosen: bool) {
        self.write_cache.store(negotiated, Relaxed);
        // Logged only if the guest's choice has changed, not at each renegotiation.
        let has_changed = self.chosen_write_cache.swap(chosen, Relaxed) != chosen;
        let line = || self.cache_switch_logs.try_log_burst(reactor::coarse_now(), SWITCH_LOG_BURST);
        if let Some(suppressed) = has_changed.then(line).flatten() {
            let export = &self.export.id;
            tracing::info!(%export, write_cache = chosen, suppressed, "the guest switched the write cache");
        }
    }

    /// Stores a guest's choice for the next front end.
    pub(super) fn remember_write_cache(&self, chosen: bool) {
        self.chosen_write_cache.store(chosen, Relaxed);
    }

    pub(super) fn warn_of_event(&self, queue: u16, why: &NotAnEventfd) {
        if let Some(suppressed) = self.missing_event_logs.try_log(reactor::coarse_now()) {
            tracing::warn!(export = %self.export.id, queue, %why, suppressed, "a ring is served without one of its eventfds");
        }
    }

    /// Reports an event to the observer, if there is one.
    pub(super) fn report(&self, event: &FrontEndEvent<'_>, suppressed: u64) {
        if let Some(observer) = &self.observer {
            observer.observe(&self.export.id, self.disk().name(), event, suppressed);
        }
    }

    /// Reports a broken ring, rate-limited: a guest can break and reset its rings thousands of
    /// times.
    pub(super) fn report_ring_broken(&self, ring: u16, why: &dyn Display) {
        if let Some(suppressed) = self.broken_ring_logs.try_log(reactor::coarse_now()) {
            // Stored only if the break is reported, so that no recovery is reported without it.
            self.broken().entry(ring).or_insert_with(reactor::now);
            self.report(&FrontEndEvent::RingBroken { ring, why }, suppressed);
        }
    }

    /// Reports that a ring that was broken is served again.
    pub(super) fn report_ring_served(&self, ring: u16) {
        let since = self.broken().remove(&ring);
        if let Some(since) = since {
            self.report(&FrontEndEvent::RingRecovered { ring, broken_for: reactor::now() - since }, 0);
        }
    }

    /// Resets the state of the previous front end.
    pub(super) fn reset_front_end(&self) {
        self.broken().clear();
        self.requests_before.store(self.requests.load(Relaxed), Relaxed);
        self.has_warned_of_memory.store(false, Relaxed);
        self.has_warned_of_block_size.store(false, Relaxed);
        self.has_warned_of_loss.store(false, Relaxed);
        self.has_warned_of_short_ring.store(false, Relaxed);
    }

    /// Logs, once for each front end, that a request is not aligned to blocks: the driver is
    /// faulty, or it read another block size when it started.
    pub(super) fn warn_of_unaligned_request(&self) {
        if !self.has_warned_of_block_size.swap(true, Relaxed) {
            tracing::warn!(
                export = %self.export.id,
                block_bytes = self.export.offer.block_bytes,
                "a guest's request is not aligned to blocks, and fails: has logical-block-size \
                 changed since its machine started? (restore it, or stop and start the machine)"
            );
        }
    }

    /// Logs, once for each front end, that a request with the offered number of segments does not
    /// fit into the ring: Linux would then stop submitting requests.
    pub(super) fn warn_of_short_ring(&self, size: u16) {
        if !self.has_warned_of_short_ring.swap(true, Relaxed) {
            let (export, segments) = (&self.export.id, self.export.offer.segments());
            tracing::warn!(
                %export, descriptors = size, segments,
                "a ring is too small for requests with the offered number of segments, and the \
                 driver uses no indirect descriptors: it may hang (give this export \
                 queue-size={size}, or the machine larger rings)"
            );
        }
    }

    /// Logs, once for each front end, that a killed process has lost unflushed writes of this
    /// guest.
    pub(super) fn warn_of_loss(&self) {
        if !self.has_warned_of_loss.swap(true, Relaxed) {
            tracing::error!(
                export = %self.export.id,
                "a killed weir process has lost writes that it had acknowledged and not flushed: \
                 each flush of this guest fails until it resets the device (restart the guest; the \
                 cache mode writethrough, or write-cache=off, loses nothing)"
            );
        }
    }

    /// Logs, once, that a kicked ring never contained a request. Skipped if the front end has sent
    /// a request on any ring: then the driver's writes are visible here.
    pub(super) fn warn_of_unshared_memory(&self, queue: u16) {
        let has_sent = self.requests.load(Relaxed) != self.requests_before.load(Relaxed);
        if !has_sent && !self.has_warned_of_memory.swap(true, Relaxed) {
            tracing::warn!(
                export = %self.export.id, queue,
                "the driver kicks a ring that has never contained a request: is the guest's memory \
                 shared? (set share=on of QEMU's memory backend)"
            );
        }
    }

    fn broken(&self) -> MutexGuard<'_, BTreeMap<u16, Instant>> {
        self.broken.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Durability of a completed write.
    pub(super) fn durability(&self) -> Durability {
        if self.write_cache.load(Relaxed) { Durability::Cached } else { Durability::Synchronous }
    }

    /// Reply to GET_ID: the serial number, padded with zeroes by the caller.
    pub(super) fn id(&self) -> &[u8] {
        let serial = self.export.serial.as_bytes();
        &serial[..serial.len().min(ID_BYTES)]
    }
}

pin_project! {
    /// A request's I/O; counts the bounce copies that it makes.
    pub(super) struct CopyCountingIo<F> {
        #[pin]
        pub(super) io: F,
        pub(super) device: Arc<VhostUserDevice>,
    }
}

impl<F: Future<Output = ()>> Future for CopyCountingIo<F> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let this = self.project();
        // The counter belongs to the thread; nothing else runs on it during this poll.
        let before = guest_copies().count;
        let polled = this.io.poll(context);
        let copies = guest_copies().count - before;
        if copies > 0 {
            this.device.copies.fetch_add(copies, Relaxed);
        }
        polled
    }
}
