//! State that all queues of a device share: the disk, its parameters, and counters.

use std::sync::{
    Arc,
    atomic::{
        AtomicBool, AtomicU64, AtomicUsize,
        Ordering::{Relaxed, SeqCst},
    },
};

use block::disk::Disk;
use event_listener::Event;
use reactor::ublk::{UblkInfo, UblkParams};
use storage::Durability;

use super::request::{SECTOR_BYTES, UblkRequestRules};

/// A disk to be shown as a block device.
#[derive(Clone, Debug)]
pub struct UblkExport {
    /// Name in the log.
    pub id: Arc<str>,
    /// The disk.
    pub disk: Arc<Disk>,
    /// Parameters of the device.
    pub offer: UblkOffer,
}

/// Parameters of a device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkOffer {
    /// N of `/dev/ublkbN`; the kernel chooses it if `None`.
    pub number: Option<u32>,
    /// Number of queues.
    pub queues: u16,
    /// Largest number of requests in flight on each queue.
    pub depth: u16,
    /// Time in seconds for which requests wait after the server has ended, before the guard removes
    /// the device; 0 for no limit. Not passed to the kernel.
    pub dead_timeout_s: u32,
    /// Longest read or write in bytes: whole pages.
    pub max_request_bytes: u32,
    /// True if the device is read-only.
    pub read_only: bool,
    /// True if DISCARD is supported.
    pub discard: bool,
    /// True if WRITE_ZEROES is supported.
    pub write_zeroes: bool,
    /// True if completed writes may stay in a cache until a flush.
    pub write_cache: bool,
    /// Logical block size: a power of two from 512 bytes to a page.
    pub block_bytes: u32,
    /// Physical block size: a power of two from `block_bytes` to a page.
    pub physical_block_bytes: u32,
    /// Optimal I/O size: a power of two from 512 bytes.
    pub optimal_io_bytes: u32,
    /// Preferred alignment of discards: a power of two from `block_bytes`.
    pub discard_granularity_bytes: u32,
    /// True if the device belongs to the user of this process (`UBLK_F_UNPRIVILEGED_DEV`).
    pub unprivileged: bool,
    /// True to use zero copy if kernel and disk support it.
    pub zero_copy: bool,
}

impl Default for UblkOffer {
    /// A device with all features and one queue.
    fn default() -> Self {
        Self {
            number: None,
            queues: 1,
            depth: 128,
            dead_timeout_s: 0,
            // The kernel splits larger I/O. A larger value would lend memory that is rarely used.
            max_request_bytes: 256 << 10,
            read_only: false,
            discard: true,
            write_zeroes: true,
            write_cache: true,
            block_bytes: SECTOR_BYTES as u32,
            physical_block_bytes: 4096,
            optimal_io_bytes: 4096,
            discard_granularity_bytes: 4096,
            unprivileged: false,
            zero_copy: true,
        }
    }
}

/// Longest DISCARD or WRITE_ZEROES, in sectors: 1 GiB.
const MAX_ERASE_SECTORS: u32 = 1 << 21;

impl UblkOffer {
    /// Parameters in the driver's form, for a disk of this length.
    pub(super) fn params(&self, size_bytes: u64) -> UblkParams {
        let flags_if = |condition: bool, bits| if condition { bits } else { 0 };
        let erases = |offered: bool| flags_if(offered && !self.read_only, MAX_ERASE_SECTORS);
        let shift = |bytes: u32| bytes.ilog2() as u8;
        let mut params = UblkParams::default();
        params.attributes = flags_if(self.read_only, UblkParams::READ_ONLY)
            | flags_if(self.write_cache, UblkParams::VOLATILE_CACHE | UblkParams::FUA);
        params.logical_block_shift = shift(self.block_bytes);
        params.physical_block_shift = shift(self.physical_block_bytes);
        params.minimum_io_shift = params.physical_block_shift;
        params.optimal_io_shift = shift(self.optimal_io_bytes);
        params.max_sectors = self.max_request_bytes / SECTOR_BYTES as u32;
        params.sectors = size_bytes / SECTOR_BYTES;
        params.discard_granularity = self.discard_granularity_bytes;
        params.max_discard_sectors = erases(self.discard);
        params.max_write_zeroes_sectors = erases(self.write_zeroes);
        params.max_discard_segments = 1;
        params
    }
}

#[derive(Debug)]
pub(super) struct UblkDevice {
    pub(super) id: Arc<str>,
    disk: Arc<Disk>,
    read_only: bool,
    max_request_bytes: u64,
    durability: Durability,
    pub(super) requests: AtomicU64,
    pub(super) in_flight: AtomicU64,
    /// Bytes that were copied on a zero-copy device.
    pub(super) copied: Arc<AtomicU64>,
    /// One flag for each [`UblkShutdown`]. Once one is set, requests wait neither for limits nor
    /// for an operator to resume the disk.
    shutdown: [AtomicBool; 2],
    /// True while the device quiesces: no request is started.
    quiescing: AtomicBool,
    /// Number of quiesced queues.
    pub(super) quiesced_queues: AtomicUsize,
    /// Notified when the device ends, quiesces or resumes.
    pub(super) changed: Event,
}

/// Requested shutdown of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum UblkShutdown {
    /// The kernel stops it and waits for its requests, so requests that a stopped disk holds fail.
    Stop,
    /// The device stays for the next process, which also receives the requests that were not
    /// started.
    Leave,
}

impl UblkDevice {
    /// Creates the state of a device that was made or taken over. The kernel's parameters apply,
    /// which may differ from the offer of this process.
    pub(super) fn new(export: &UblkExport, info: &UblkInfo, params: &UblkParams) -> Self {
        let cached = params.attributes & UblkParams::VOLATILE_CACHE != 0;
        Self {
            id: Arc::clone(&export.id),
            disk: Arc::clone(&export.disk),
            read_only: export.offer.read_only || params.attributes & UblkParams::READ_ONLY != 0,
            max_request_bytes: u64::from(info.max_request_bytes),
            durability: if cached { Durability::Cached } else { Durability::Synchronous },
            requests: AtomicU64::default(),
            in_flight: AtomicU64::default(),
            copied: Arc::default(),
            shutdown: Default::default(),
            quiescing: AtomicBool::new(false),
            quiesced_queues: AtomicUsize::new(0),
            changed: Event::new(),
        }
    }

    pub(super) fn disk(&self) -> &Disk {
        &self.disk
    }

    /// Current rules for validating requests.
    pub(super) fn rules(&self) -> UblkRequestRules {
        UblkRequestRules {
            size_bytes: self.disk.size_bytes(),
            read_only: self.read_only,
            max_io_bytes: self.max_request_bytes,
            durability: self.durability,
        }
    }

    /// Quiesces the queues, or resumes them.
    pub(super) fn set_quiescing(&self, quiescing: bool) {
        self.quiescing.store(quiescing, SeqCst);
        self.changed.notify(usize::MAX);
    }

    pub(super) fn is_quiescing(&self) -> bool {
        self.quiescing.load(SeqCst)
    }

    /// Ends the device; that also ends a quiesce.
    pub(super) fn shut_down(&self, shutdown: UblkShutdown) {
        // Quiesced queues have to run to end.
        self.quiescing.store(false, SeqCst);
        self.shutdown[shutdown as usize].store(true, SeqCst);
        self.changed.notify(usize::MAX);
    }

    pub(super) fn is_shutting_down(&self, shutdown: UblkShutdown) -> bool {
        self.shutdown[shutdown as usize].load(SeqCst)
    }

    pub(super) fn count(&self, taken: u64) {
        self.requests.fetch_add(taken, Relaxed);
        self.in_flight.fetch_add(taken, Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_parameters_match_the_offer() {
        let params = UblkOffer::default().params(1 << 30);
        assert_eq!((params.sectors, params.max_sectors, params.attributes), (1 << 21, 512, 0b1100));
        assert_eq!((params.logical_block_shift, params.physical_block_shift), (9, 12));
        assert_eq!(params.max_discard_sectors, 1 << 21);
        let params = UblkOffer { block_bytes: 4096, ..UblkOffer::default() }.params(1 << 30);
        assert_eq!((params.logical_block_shift, params.physical_block_shift), (12, 12));
        assert_eq!((params.sectors, params.max_sectors), (1 << 21, 512), "in sectors all the same");
        let params =
            UblkOffer { read_only: true, write_cache: false, ..UblkOffer::default() }.params(1 << 30);
        assert_eq!(
            (params.attributes, params.max_discard_sectors, params.max_write_zeroes_sectors),
            (1, 0, 0)
        );
        let params = UblkOffer { discard: false, ..UblkOffer::default() }.params(1 << 30);
        assert_eq!((params.max_discard_sectors, params.max_write_zeroes_sectors), (0, 1 << 21));
    }
}
