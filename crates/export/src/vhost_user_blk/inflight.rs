//! The in-flight area: records which requests are in flight, so that they are served exactly once
//! after this process has died and another continues ("Inflight I/O tracking").
//!
//! This back end creates the area; the front end keeps it and passes it back when it reconnects.
//! This file defines its size and the part of each ring; the ring defines the content of its part.
//!
//! ```text
//!   ring 0 │ ring 1 │ … │ the guest's choices and known block size: 64 bytes, in areas made here
//! ```

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{
            AtomicU64,
            Ordering::{AcqRel, Acquire, Release},
        },
    },
};

use reactor::guest::{GuestBytes, GuestMemory, MappingQuota, Region, RegionError};
use rustix::{
    fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create},
    io::pwrite,
};

use super::{
    features::{MAX_QUEUE_SIZE, MAX_QUEUES},
    message::InflightInfo,
};
use ::virtio::ring::InflightQueueArea;

/// Failure to create or map an area.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    #[error("an in-flight area for {queues} rings of {queue_size}, at most {MAX_QUEUES} of {MAX_QUEUE_SIZE}")]
    Shape { queues: u16, queue_size: u16 },
    #[error("an in-flight area of {is} bytes, its rings need {due}")]
    TooSmall { is: u64, due: u64 },
    #[error("cannot create the in-flight area: {0}")]
    Make(#[from] io::Error),
    #[error("the in-flight area: {0}")]
    Map(#[from] RegionError),
}

/// Bytes behind the parts of the rings. They hold the guest's choice of a write cache and the block
/// size that it has read, because front ends repeat neither.
const CHOICE_BYTES: u64 = 64;
/// Mark at their beginning: an area of another back end has no choice.
const CHOICE_MARK: u64 = u64::from_le_bytes(*b"weir-wce");
/// Offset of the choice: 0 for none, or one of these.
const CHOICE_AT: usize = 8;
const CACHED: u64 = 1;
const THROUGH: u64 = 2;
/// Offset of the block size, in bytes; 0 if it is unknown.
const BLOCK_AT: usize = 16;
/// Offset of the loss state: whether the guest loses writes with this process.
const LOSS_AT: usize = 24;
const WOULD_LOSE: u64 = 1;
const HAS_LOST: u64 = 2;
/// Offset of the number of the disk's opening ([`Disk::opening_id`](block::disk::Disk::opening_id))
/// that would lose them.
const OPENED_AT: usize = 32;

/// Distance between the parts of two rings, in bytes.
fn part_bytes(queue_size: u16, packed: bool) -> u64 {
    InflightQueueArea::bytes(queue_size, packed) as u64
}

/// Creates an area without requests in flight or choices; returns its length in bytes. The file is
/// sealed: its length cannot change any more.
///
/// # Errors
/// [`InflightError`].
pub fn create(queues: u16, queue_size: u16, packed: bool) -> Result<(OwnedFd, u64), InflightError> {
    check_shape(queues, queue_size)?;
    let rings = u64::from(queues) * part_bytes(queue_size, packed);
    let bytes = rings + CHOICE_BYTES;
    let make = || {
        let file = memfd_create("weir-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes)?;
        pwrite(&file, &CHOICE_MARK.to_le_bytes(), rings)?;
        // Unsealed, the front end could truncate the file, and accesses here would raise SIGBUS.
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        rustix::io::Result::Ok(file)
    };
    Ok((make().map_err(io::Error::from)?, bytes))
}

fn check_shape(queues: u16, queue_size: u16) -> Result<(), InflightError> {
    // Bounds the size of an area before anything is allocated or multiplied.
    let is_valid = (1..=MAX_QUEUES).contains(&queues) && (1..=MAX_QUEUE_SIZE).contains(&queue_size);
    if is_valid { Ok(()) } else { Err(InflightError::Shape { queues, queue_size }) }
}

/// An area that a front end has passed.
#[derive(Debug)]
pub struct InflightArea {
    memory: GuestMemory,
    /// The front end's description.
    info: InflightInfo,
    /// Distance between the parts of rings, in an area that was created here: it has room for
    /// larger rings than the front end has requested.
    stride: Option<u64>,
    /// Location of the guest's choices.
    choice: Option<GuestBytes>,
    loss: Option<Arc<UnflushedWrites>>,
}

/// Record of whether acknowledged, unflushed writes of the guest would be lost with this process,
/// or were lost with an earlier one. A disk that loses its cache without an error would leave its
/// guest with data that does not exist.
///
/// Shared by all rings of a front end.
#[derive(Debug)]
pub struct UnflushedWrites {
    state_bytes: GuestBytes,
    opened: u64,
    /// Number of writes that would have been lost when they were acknowledged.
    recorded: AtomicU64,
    /// Held from the check of the disk until its result is stored.
    check_lock: Mutex<()>,
}

impl UnflushedWrites {
    fn new(state_bytes: GuestBytes, opened: u64) -> Self {
        Self { state_bytes, opened, recorded: AtomicU64::new(0), check_lock: Mutex::default() }
    }

    /// True if writes were lost. Permanent until the guest resets its device, because the lost
    /// ranges are unknown.
    pub fn has_happened(&self) -> bool {
        self.state_bytes.load_u64(LOSS_AT, Acquire) == HAS_LOST
    }

    /// Evaluates the record when a front end passes the area. If another opening of the disk would
    /// have lost writes, they are lost; after a mere reconnect the opening is still the same.
    pub fn evaluate(&self) {
        let is_alive = self.state_bytes.load_u64(OPENED_AT, Acquire) == self.opened;
        // WOULD_LOSE of a live opening is normal after a reconnect: its cache still has the writes.
        if self.state_bytes.load_u64(LOSS_AT, Acquire) == WOULD_LOSE && !is_alive {
            self.state_bytes.store_u64(LOSS_AT, HAS_LOST, Release);
        }
    }

    /// Carries the state over to a new area. A reset machine passes another area, but that does not
    /// make its earlier writes durable.
    pub fn inherit(&self, previous: &Self) {
        if previous.state_bytes.load_u64(LOSS_AT, Acquire) == WOULD_LOSE {
            let _lock = self.lock();
            self.set(true);
        }
    }

    /// Records a write that would be lost; call it before the write is acknowledged.
    pub fn record_write(&self, would_lose: impl FnOnce() -> bool) {
        let _lock = self.lock();
        // Before the state is stored: a flush that reads the count earlier does not clear this
        // write.
        self.recorded.fetch_add(1, AcqRel);
        self.set(would_lose());
    }

    /// Number of recorded writes; call it before a flush, which covers these.
    pub fn recorded_writes(&self) -> u64 {
        self.recorded.load(Acquire)
    }

    /// Clears the record after a successful flush, unless more writes were recorded since
    /// [`Self::recorded_writes`] returned this number. Losses of other clients of the disk do not
    /// concern this guest.
    pub fn flushed(&self, recorded: u64, would_lose: impl FnOnce() -> bool) {
        let _lock = self.lock();
        self.set(self.recorded_writes() != recorded && would_lose());
    }

    fn set(&self, would_lose: bool) {
        if !self.has_happened() {
            // The opening first: a reader that sees WOULD_LOSE must find the opening that it refers
            // to.
            self.state_bytes.store_u64(OPENED_AT, self.opened, Release);
            self.state_bytes.store_u64(LOSS_AT, if would_lose { WOULD_LOSE } else { 0 }, Release);
        }
    }

    fn lock(&self) -> MutexGuard<'_, ()> {
        self.check_lock.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl InflightArea {
    /// Maps the area for the opening `opened` of the disk
    /// ([`Disk::opening_id`](block::disk::Disk::opening_id)). Counts in `quota` until it is
    /// unmapped.
    ///
    /// # Errors
    /// [`InflightError`], also if the file is shorter than the front end's description.
    pub fn map(
        info: &InflightInfo,
        file: OwnedFd,
        quota: &MappingQuota,
        opened: u64,
    ) -> Result<Self, InflightError> {
        let &InflightInfo { bytes, file_offset, queues, queue_size, .. } = info;
        check_shape(queues, queue_size)?;
        // The layout of the rings is not known yet; split rings need less.
        let min_bytes = u64::from(queues) * part_bytes(queue_size, false);
        if bytes < min_bytes {
            return Err(InflightError::TooSmall { is: bytes, due: min_bytes });
        }
        // No address refers to the area, so it is mapped at guest address 0.
        let region = Region::map(file, 0, 0, bytes, file_offset, quota)?;
        let memory = GuestMemory::new(vec![region])?;
        let choice = bytes.checked_sub(CHOICE_BYTES).filter(|at| *at >= min_bytes);
        let choice = choice.and_then(|at| memory.range(at, CHOICE_BYTES as usize));
        let choice = choice.filter(|area| area.is_aligned(8) && area.load_u64(0, Acquire) == CHOICE_MARK);
        let stride = choice.as_ref().map(|_| (bytes - CHOICE_BYTES) / u64::from(queues));
        // Checked, because the front end may pass another number of queues than it requested.
        let stride = stride.filter(|stride| stride.is_multiple_of(64));
        let loss = choice.clone().map(|state_bytes| Arc::new(UnflushedWrites::new(state_bytes, opened)));
        Ok(Self { memory, info: *info, stride, choice, loss })
    }

    /// See [`UnflushedWrites`]; `None` for an area of another back end.
    pub fn loss(&self) -> Option<&Arc<UnflushedWrites>> {
        self.loss.as_ref()
    }

    /// The front end's description, and the area's file.
    pub fn description(&self) -> Option<(InflightInfo, BorrowedFd<'_>)> {
        let (file, _) = self.memory.regions().next()?.file()?;
        Some((self.info, file))
    }

    /// The guest's choice of a write cache; `None` if none is recorded.
    pub fn write_cache(&self) -> Option<bool> {
        match self.choice.as_ref()?.load_u64(CHOICE_AT, Acquire) {
            CACHED => Some(true),
            THROUGH => Some(false),
            _ => None,
        }
    }

    /// Records the guest's choice, if the area has room for it.
    pub fn store_write_cache(&self, enabled: bool) {
        if let Some(choice) = &self.choice {
            choice.store_u64(CHOICE_AT, if enabled { CACHED } else { THROUGH }, Release);
        }
    }

    /// Block size that the guest has read, in bytes; `None` if none is recorded.
    pub fn block_bytes(&self) -> Option<u64> {
        let block_bytes = self.choice.as_ref()?.load_u64(BLOCK_AT, Acquire);
        (block_bytes > 0).then_some(block_bytes)
    }

    /// Records the guest's block size, if the area has room for it.
    pub fn store_block_bytes(&self, block_bytes: u32) {
        if let Some(choice) = &self.choice {
            choice.store_u64(BLOCK_AT, block_bytes.into(), Release);
        }
    }

    /// Part of a ring of `size` descriptors; `None` if the area has no room for it.
    pub fn part(&self, ring: u16, size: u16, packed: bool) -> Option<GuestBytes> {
        let part_size = self.stride.unwrap_or_else(|| part_bytes(self.info.queue_size, packed));
        let (begin, needed) = (u64::from(ring) * part_size, InflightQueueArea::bytes(size, packed));
        if ring >= self.info.queues || needed as u64 > part_size || begin + part_size > self.info.bytes {
            return None;
        }
        self.memory.range(begin, needed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// More than a test maps.
    fn ample_quota() -> MappingQuota {
        MappingQuota::new(16, 1 << 47)
    }

    fn info(bytes: u64, queues: u16, queue_size: u16) -> InflightInfo {
        InflightInfo { bytes, file_offset: 0, queues, queue_size, padded: true }
    }

    #[test]
    fn rings_have_parts_that_do_not_touch() {
        // From the structures of the specification: 16 + 128 · 16, and 32 + 128 · 32, rounded up.
        for (packed, stride) in [(false, 2112), (true, 4160)] {
            let (file, bytes) = create(2, 128, packed).expect("made");
            assert_eq!(bytes, 2 * stride + 64);
            let area = InflightArea::map(&info(bytes, 2, 128), file, &ample_quota(), 0).expect("mapped");
            let part = |ring, size| area.part(ring, size, packed).map(|part| part.guest_address());
            assert_eq!((part(0, 128), part(1, 128), part(1, 7)), (Some(0), Some(stride), Some(stride)));
            assert_eq!((part(2, 128), part(0, 256)), (None, None));
            let last = area.part(1, 128, packed).expect("it is there");
            assert_eq!(last.bytes() as u64, stride, "up to the choice");
        }
    }

    #[test]
    fn area_has_room_for_larger_rings_than_requested() {
        for packed in [false, true] {
            let (file, bytes) = create(2, 1024, packed).expect("made");
            let map = |queues| {
                let file = file.try_clone().expect("a descriptor");
                InflightArea::map(&info(bytes, queues, 128), file, &ample_quota(), 0).expect("mapped")
            };
            let parts = [0, 1].map(|ring| map(2).part(ring, 1024, packed).expect("there").guest_address());
            assert_eq!(parts, [0, part_bytes(1024, packed)]);
            // Parts of any length keep the alignment.
            for queues in 1..=MAX_QUEUES {
                let file = file.try_clone().expect("a descriptor");
                let area = InflightArea::map(&info(bytes, queues, 2), file, &ample_quota(), 0);
                let part = area.ok().and_then(|area| area.part(queues - 1, 2, packed));
                assert!(part.is_none_or(|part| part.is_aligned(64)), "{queues}");
            }
        }
    }

    #[test]
    fn area_of_split_rings_does_not_fit_a_packed_ring() {
        let (file, bytes) = create(1, 128, false).expect("made");
        let area = InflightArea::map(&info(bytes, 1, 128), file, &ample_quota(), 0).expect("mapped");
        assert!(area.part(0, 128, false).is_some());
        assert!(area.part(0, 128, true).is_none());
    }

    #[test]
    fn write_cache_choice_is_stored_in_own_areas_only() {
        for packed in [false, true] {
            let (file, bytes) = create(3, 128, packed).expect("made");
            let duplicate = || file.try_clone().expect("a descriptor");
            let map = |bytes| {
                InflightArea::map(&info(bytes, 3, 128), duplicate(), &ample_quota(), 0).expect("mapped")
            };
            assert_eq!(map(bytes).write_cache(), None);
            for enabled in [false, true] {
                map(bytes).store_write_cache(enabled);
                assert_eq!(map(bytes).write_cache(), Some(enabled));
            }
            // An area of another back end, or one that the front end describes differently.
            let rings = bytes - CHOICE_BYTES;
            map(rings).store_write_cache(false);
            assert_eq!((map(rings).write_cache(), map(bytes).write_cache()), (None, Some(true)));
            let choice = |number: u64| {
                pwrite(&file, &number.to_le_bytes(), rings + CHOICE_AT as u64).expect("written");
                map(bytes).write_cache()
            };
            assert_eq!((choice(3), choice(0)), (None, None));
            let ring = |ring| map(bytes).part(ring, 128, packed).expect("there").load_u64(0, Acquire);
            assert_eq!([0, 1, 2].map(ring), [0; 3], "nothing of it in a ring's part");
        }
    }

    #[test]
    fn block_size_is_stored_in_own_areas_only() {
        let (file, bytes) = create(1, 128, true).expect("made");
        let duplicate = || file.try_clone().expect("a descriptor");
        let map =
            |bytes| InflightArea::map(&info(bytes, 1, 128), duplicate(), &ample_quota(), 0).expect("mapped");
        assert_eq!(map(bytes).block_bytes(), None);
        map(bytes).store_block_bytes(4096);
        assert_eq!((map(bytes).block_bytes(), map(bytes).write_cache()), (Some(4096), None));
        map(bytes).store_write_cache(true);
        assert_eq!((map(bytes).block_bytes(), map(bytes).write_cache()), (Some(4096), Some(true)));
        map(bytes - CHOICE_BYTES).store_block_bytes(512);
        assert_eq!((map(bytes - CHOICE_BYTES).block_bytes(), map(bytes).block_bytes()), (None, Some(4096)));
    }

    #[test]
    fn area_description_is_validated() {
        let map = |info: InflightInfo| {
            InflightArea::map(&info, create(1, 4, false).expect("made").0, &ample_quota(), 0)
        };
        assert!(map(info(128, 1, 4)).is_ok());
        assert!(matches!(map(info(127, 1, 4)), Err(InflightError::TooSmall { is: 127, due: 128 })));
        assert!(matches!(map(info(1 << 40, 1, 4)), Err(InflightError::Map(_))), "longer than its file");
        for (queues, size) in [(0, 4), (1, 0), (257, 4), (1, 32769)] {
            assert!(matches!(map(info(u64::MAX, queues, size)), Err(InflightError::Shape { .. })));
            assert!(create(queues, size, true).is_err());
        }
    }

    #[test]
    fn own_area_is_sealed_against_shrinking() {
        let (file, bytes) = create(1, 128, true).expect("made");
        assert!(ftruncate(&file, bytes - 1).is_err());
        assert!(ftruncate(&file, bytes + 1).is_err());
    }

    #[test]
    fn flushed_guest_is_unaffected_by_losses_of_others() {
        let (file, bytes) = create(1, 4, false).expect("made");
        let area = |opened| {
            let file = file.try_clone().expect("a descriptor");
            InflightArea::map(&info(bytes, 1, 4), file, &ample_quota(), opened).expect("mapped")
        };
        let is_lost_with = |opened: u64| {
            let loss_state =
                || area(opened).loss().expect("made here").state_bytes.load_u64(LOSS_AT, Acquire);
            match loss_state() {
                0 => false,
                WOULD_LOSE => true,
                other => panic!("{other}"),
            }
        };
        let own_area = area(7);
        let loss = own_area.loss().expect("made here");
        loss.flushed(loss.recorded_writes(), || true);
        assert!(!is_lost_with(7), "it has not written");
        loss.record_write(|| true);
        let recorded = loss.recorded_writes();
        loss.record_write(|| true);
        loss.flushed(recorded, || true);
        assert!(is_lost_with(7), "a write was acknowledged beside the flush");
        loss.flushed(loss.recorded_writes(), || true);
        assert!(!is_lost_with(7));

        loss.record_write(|| true);
        let (file, bytes) = create(1, 4, false).expect("made");
        let other = InflightArea::map(&info(bytes, 1, 4), file, &ample_quota(), 7).expect("mapped");
        let replacing = other.loss().expect("made here");
        replacing.inherit(loss);
        assert_eq!(
            replacing.state_bytes.load_u64(LOSS_AT, Acquire),
            WOULD_LOSE,
            "another area makes nothing safe"
        );

        area(7).loss().expect("made here").evaluate();
        assert!(!loss.has_happened(), "the process that would lose it runs");
        area(8).loss().expect("made here").evaluate();
        assert!(loss.has_happened());
    }
}
