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
use reactor::{buffer::guest_copies, seldom::Seldom};
use storage::Durability;

use super::{
    bell::NoEvent,
    features::Offer,
    happening::{Happening, Told},
};
use ::virtio::block::{self as requests, ID_BYTES, RangeLimits};

/// Number of log lines about switching the cache before they are rate-limited: a guest switches its
/// cache once or twice as it starts.
const SWITCHES_AT_ONCE: u64 = 16;

/// A disk to be exported to virtual machines.
#[derive(Clone, Debug)]
pub struct Export {
    /// Name in the log.
    pub id: Arc<str>,
    /// The disk.
    pub disk: Arc<Disk>,
    /// Features and parameters. The size is overwritten with the disk's current one.
    pub offer: Offer,
    /// Serial number; a guest sees its first 20 bytes.
    pub serial: Arc<str>,
}

#[derive(Debug)]
pub(super) struct Device {
    pub(super) export: Export,
    told: Option<Arc<dyn Told>>,
    /// Completed writes may stay in a cache until the next flush, as negotiated.
    write_cache: AtomicBool,
    /// The guest's choice, if it could choose, or else the offered setting.
    chosen_write_cache: AtomicBool,
    /// Value of `requests` when the current front end connected.
    requests_before: AtomicU64,
    /// Logged for this front end: its memory may not be shared.
    pub(super) is_doubted: AtomicBool,
    /// Logged for this front end: its guest may assume another block size.
    pub(super) is_out_of_step: AtomicBool,
    /// Logged for this front end: its guest has lost writes.
    is_told_of_loss: AtomicBool,
    /// Logged for this front end: a ring is too short for its requests.
    pub(super) is_ring_short: AtomicBool,
    /// The front end has to quiesce for an upgrade.
    resting: AtomicBool,
    /// Notified when `resting` changes.
    rests: Event,
    no_events: Seldom,
    switches: Seldom,
    pub(super) broken_rings: Seldom,
    /// Reported broken rings that are not served again yet, and since when.
    broken: Mutex<BTreeMap<u16, Instant>>,
    pub(super) kicks: AtomicU64,
    pub(super) calls: AtomicU64,
    pub(super) requests: AtomicU64,
    pub(super) in_flight: AtomicU64,
    pub(super) copies: AtomicU64,
}

impl Device {
    pub(super) fn new(export: Export) -> Self {
        let cache = || AtomicBool::new(export.offer.write_cache);
        let (write_cache, chosen_write_cache) = (cache(), cache());
        let (no_events, switches, broken_rings, broken) = Default::default();
        let (kicks, calls, requests, in_flight, copies) = Default::default();
        let (requests_before, is_doubted, is_out_of_step, is_told_of_loss, is_ring_short, resting) =
            Default::default();
        Self {
            export,
            told: None,
            write_cache,
            chosen_write_cache,
            requests_before,
            is_doubted,
            is_out_of_step,
            is_told_of_loss,
            is_ring_short,
            resting,
            rests: Event::new(),
            no_events,
            switches,
            broken_rings,
            broken,
            kicks,
            calls,
            requests,
            in_flight,
            copies,
        }
    }

    /// Quiesces or resumes the front end.
    pub(super) fn rest(&self, is_to: bool) {
        self.resting.store(is_to, SeqCst);
        self.rests.notify(usize::MAX);
    }

    pub(super) fn is_resting(&self) -> bool {
        self.resting.load(SeqCst)
    }

    /// Listener for the next change of [`Self::is_resting`].
    pub(super) fn rests(&self) -> EventListener {
        self.rests.listen()
    }

    pub(super) fn told_to(self, told: Arc<dyn Told>) -> Self {
        Self { told: Some(told), ..self }
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.export.disk
    }

    /// Current offer. A front end that reconnects does not repeat the guest's choice of a cache
    /// mode, so the earlier choice is offered.
    pub(super) fn offer(&self) -> Offer {
        Offer {
            size_bytes: self.disk().size_bytes(),
            opened: self.disk().opened(),
            write_cache: self.chosen_write_cache.load(Relaxed),
            ..self.export.offer.clone()
        }
    }

    /// Parameters for validating requests.
    pub(super) fn limits(&self) -> requests::Device {
        let offer = &self.export.offer;
        // `None` makes the request type unsupported, as an unoffered feature requires.
        let ranges = |offered: bool, max_ranges: u32| {
            offered.then_some(RangeLimits { max_sectors: offer.max_erase_sectors, max_ranges })
        };
        requests::Device {
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
        let is_news = self.chosen_write_cache.swap(chosen, Relaxed) != chosen;
        let line = || self.switches.line_of(reactor::recently(), SWITCHES_AT_ONCE);
        if let Some(left_out) = is_news.then(line).flatten() {
            let export = &self.export.id;
            tracing::info!(%export, write_cache = chosen, left_out, "the guest switched the write cache");
        }
    }

    /// Stores a guest's choice for the next front end.
    pub(super) fn remember_write_cache(&self, chosen: bool) {
        self.chosen_write_cache.store(chosen, Relaxed);
    }

    pub(super) fn warn_of_event(&self, queue: u16, why: &NoEvent) {
        if let Some(left_out) = self.no_events.line(reactor::recently()) {
            tracing::warn!(export = %self.export.id, queue, %why, left_out, "a ring does without an event");
        }
    }

    /// Reports an event to the observer, if there is one.
    pub(super) fn tell(&self, happening: &Happening<'_>, left_out: u64) {
        if let Some(told) = &self.told {
            told.hear(&self.export.id, self.disk().name(), happening, left_out);
        }
    }

    /// Reports a broken ring, rate-limited: a guest can break and reset its rings thousands of
    /// times.
    pub(super) fn ring_broke(&self, ring: u16, why: &dyn Display) {
        if let Some(left_out) = self.broken_rings.line(reactor::recently()) {
            // Remembered only if reported, so that each report has at most one counterpart.
            self.broken().entry(ring).or_insert_with(reactor::now);
            self.tell(&Happening::RingBroken { ring, why }, left_out);
        }
    }

    /// Reports that a ring that was broken is served again.
    pub(super) fn ring_begins(&self, ring: u16) {
        let since = self.broken().remove(&ring);
        if let Some(since) = since {
            self.tell(&Happening::RingServed { ring, after: reactor::now() - since }, 0);
        }
    }

    /// Resets the state of the previous front end.
    pub(super) fn begin_anew(&self) {
        self.broken().clear();
        self.requests_before.store(self.requests.load(Relaxed), Relaxed);
        self.is_doubted.store(false, Relaxed);
        self.is_out_of_step.store(false, Relaxed);
        self.is_told_of_loss.store(false, Relaxed);
        self.is_ring_short.store(false, Relaxed);
    }

    /// Logs, once for each front end, that a request is not aligned to blocks: the driver is wrong
    /// or was told another block size.
    pub(super) fn tell_part_of_block(&self) {
        if !self.is_out_of_step.swap(true, Relaxed) {
            tracing::warn!(
                export = %self.export.id,
                block_bytes = self.export.offer.block_bytes,
                "a request of a guest is not of whole blocks, and such ones get I/O errors: has logical-block-size changed since its machine started? (give it back, or start the machine anew)"
            );
        }
    }

    /// Logs, once for each front end, that a request with the offered number of segments does not
    /// fit into the ring: Linux would then stop submitting requests.
    pub(super) fn tell_short_ring(&self, size: u16) {
        if !self.is_ring_short.swap(true, Relaxed) {
            let (export, segments) = (&self.export.id, self.export.offer.segments());
            tracing::warn!(
                %export, descriptors = size, segments,
                "a ring has room for no request of as many segments as the guest was told, nor indirect ones: \
                 its driver may stand still (give this export queue-size={size}, or the machine larger rings)"
            );
        }
    }

    /// Logs, once for each front end, that a killed process has lost unflushed writes of this
    /// guest.
    pub(super) fn tell_of_loss(&self) {
        if !self.is_told_of_loss.swap(true, Relaxed) {
            tracing::error!(
                export = %self.export.id,
                "a weir that was killed had acknowledged writes that no flush had covered, and they are lost: \
                 each flush of this guest fails until it resets the device (restart the guest; the cache mode \
                 writethrough, or write-cache=off, loses nothing)"
            );
        }
    }

    /// Logs, once, that a kicked ring never contained a request. Skipped if the front end has sent
    /// a request on any ring: then the driver's writes are visible here.
    pub(super) fn doubt_memory(&self, queue: u16) {
        let has_sent = self.requests.load(Relaxed) != self.requests_before.load(Relaxed);
        if !has_sent && !self.is_doubted.swap(true, Relaxed) {
            tracing::warn!(
                export = %self.export.id, queue,
                "a ring is kicked, and nothing ever was in it: is the guest's memory shared? (share=on of QEMU's memory backend)"
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
    pub(super) struct Counted<F> {
        #[pin]
        pub(super) io: F,
        pub(super) device: Arc<Device>,
    }
}

impl<F: Future<Output = ()>> Future for Counted<F> {
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
