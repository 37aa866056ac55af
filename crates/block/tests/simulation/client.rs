//! A client of a disk: sends random requests in sequence, and compares every result with the model.
//!
//! Several clients on one disk are concurrent: their requests overlap in time, and, as the disk is
//! small, in range.

use std::{
    cell::{Cell, RefCell},
    ops::Range,
    rc::Rc,
    sync::Arc,
};

use block::{
    disk::Disk,
    layer::throttle::{GroupSettings, ThrottleGroup},
};
use policy::{
    prefetch::{PrefetchConfig, PrefetchMode},
    request::Direction,
    throttle::RequestCost,
    time::Duration,
};
use reactor::{
    buffer::{IoBuffer, ReadTarget, Segments},
    error::{Error, Result},
    sim, timeout,
};
use storage::{Durability, ZeroOptions};

use crate::{
    group_samples::GroupSamples,
    guest::GuestBuffer,
    model::{Model, Outcome},
};

/// Events of all seeds: a simulation without failures or crashes would prove nothing.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct EventCounts {
    pub(crate) answered: u64,
    pub(crate) failed: u64,
    pub(crate) cancelled: u64,
    pub(crate) flushed: u64,
    pub(crate) crashes: u64,
    pub(crate) waited: u64,
    /// Bytes that were read ahead and then read.
    pub(crate) read_ahead: u64,
}

/// State shared by the clients of one disk.
pub(crate) struct Shared {
    pub(crate) model: RefCell<Model>,
    pub(crate) counts: Rc<RefCell<EventCounts>>,
    pub(crate) passed: Rc<RefCell<GroupSamples>>,
    /// True if requests may fail.
    pub(crate) may_fail: bool,
    pub(crate) block_bytes: usize,
    /// True while the image is changed without the disk, so that nothing may be read ahead.
    pub(crate) bypassed: Cell<bool>,
    /// Number of reads and writes sent since the disk was opened.
    pub(crate) sent: [Cell<u64>; 2],
    /// Number of those that succeeded.
    pub(crate) succeeded: [Cell<u64>; 2],
}

impl Shared {
    /// State of a disk with this content, whose group has no limits.
    pub(crate) fn new(
        content: Vec<u8>,
        block_bytes: usize,
        counts: &Rc<RefCell<EventCounts>>,
        may_fail: bool,
    ) -> Self {
        let group = ThrottleGroup::new("group", GroupSettings::default(), None).expect("no limits");
        Self {
            model: RefCell::new(Model::new(content, block_bytes)),
            counts: Rc::clone(counts),
            passed: Rc::new(RefCell::new(GroupSamples::new(&group, 1 << 20))),
            may_fail,
            block_bytes,
            bypassed: Cell::new(false),
            sent: [Cell::new(0), Cell::new(0)],
            succeeded: [Cell::new(0), Cell::new(0)],
        }
    }
}

/// One client.
pub(crate) struct Client {
    pub(crate) disk: Arc<Disk>,
    pub(crate) shared: Rc<Shared>,
}

pub(crate) fn chance(percent: u32) -> bool {
    sim::random(|random| random.u32(..100)) < percent
}

impl Client {
    /// Sends this many requests, and waits for each.
    pub(crate) async fn run(self, requests: usize) {
        for _ in 0..requests {
            // Some requests are cancelled after a random time.
            let cancel_after = if chance(8) { Some(short_time()) } else { None };
            let Some(cancel_after) = cancel_after else {
                self.request().await;
                continue;
            };
            if timeout(cancel_after, self.request()).await.is_err() {
                self.shared.counts.borrow_mut().cancelled += 1;
            }
        }
    }

    async fn request(&self) {
        self.shared.passed.borrow_mut().sample();
        if chance(2) && !self.shared.bypassed.get() {
            self.disk.prefetch().set(draw_prefetch()).expect("in range");
        }
        match sim::random(|random| random.u32(..100)) {
            0..5 => self.scan().await,
            5..30 => self.read(self.range()).await,
            30..65 => self.write(Durability::Cached).await,
            65..75 => self.write(Durability::Synchronous).await,
            75..84 => _ = self.flush().await,
            84..91 => self.write_zeroes().await,
            91..97 => self.discard().await,
            _ => self.block_status().await,
        }
        self.shared.passed.borrow_mut().sample();
    }

    /// A random range, from one byte to a few blocks, half of the time whole blocks.
    fn range(&self) -> Range<usize> {
        let (block, size) = (self.shared.block_bytes, self.shared.model.borrow().size_bytes());
        sim::random(|random| {
            if random.bool() {
                let first = random.usize(..size / block);
                let count = random.usize(1..=(size / block - first).min(3));
                return first * block..(first + count) * block;
            }
            let longest = match random.u8(..20) {
                0 => size,
                1..10 => 40,
                _ => 5 * block / 2,
            };
            let start = random.usize(..size);
            start..random.usize(start + 1..=size.min(start + longest))
        })
    }

    /// Reads sequentially, forward or backward, with or without gaps, up to the disk's end.
    async fn scan(&self) {
        let (size, block) = (self.shared.model.borrow().size_bytes(), self.shared.block_bytes);
        let (start, length, step, count) = sim::random(|random| {
            let length = if random.bool() { block } else { random.usize(1..=2 * block) };
            let gap = if random.u8(..3) == 0 { random.usize(..4 * block) } else { 0 };
            let step = (length + gap) as i64 * if random.u8(..3) == 0 { -1 } else { 1 };
            (random.usize(..size), length, step, random.usize(3..30))
        });
        let mut at = start;
        for _ in 0..count {
            if at + length > size {
                break;
            }
            self.read(at..at + length).await;
            match at.checked_add_signed(step as isize) {
                Some(next) => at = next,
                None => break,
            }
        }
    }

    fn count(&self, direction: usize) {
        let sent = &self.shared.sent[direction];
        sent.set(sent.get() + 1);
    }

    fn succeeded(&self, direction: usize) {
        let succeeded = &self.shared.succeeded[direction];
        succeeded.set(succeeded.get() + 1);
    }

    /// Reads and compares.
    pub(crate) async fn read(&self, range: Range<usize>) {
        self.count(0);
        let began = self.shared.model.borrow_mut().begin();
        let result = {
            let permit = self.disk.admit(Direction::Read, RequestCost::one(range.len() as u64)).await;
            if chance(50) {
                self.disk.read(permit, range.start as u64, range.len()).await.map(|data| data.to_vec())
            } else {
                // Half of the reads go to guest memory, in pieces of any alignment.
                let guest_buffer = GuestBuffer::new(range.len());
                let target = ReadTarget::Segments(guest_buffer.segments());
                self.disk.read_to(permit, range.start as u64, target).await.map(|data| {
                    let found = guest_buffer.found();
                    assert_eq!(data.to_vec(), found, "it is elsewhere");
                    found
                })
            }
        };
        if let Ok(found) = self.check_result(result) {
            self.succeeded(0);
            assert_eq!(found.len(), range.len());
            self.shared.model.borrow().check_read(began, range.start, &found);
        }
    }

    async fn write(&self, durability: Durability) {
        self.count(1);
        let range = self.range();
        let (number, data) = self.shared.model.borrow_mut().begin_write(range.clone());
        let permit = self.disk.admit(Direction::Write, RequestCost::one(data.len() as u64)).await;
        let result = self.disk.write(permit, range.start as u64, in_pieces(&data), durability).await;
        self.end_change(number, result, durability);
    }

    async fn write_zeroes(&self) {
        self.count(1);
        let range = self.range();
        let number = self.shared.model.borrow_mut().begin_zeroes(range.clone());
        let durability = if chance(30) { Durability::Synchronous } else { Durability::Cached };
        let options = ZeroOptions { may_unmap: chance(50), only_if_fast: chance(20), durability };
        let permit = self.disk.admit(Direction::Write, RequestCost::one(range.len() as u64)).await;
        let result = self.disk.write_zeroes(permit, range.start as u64, range.len() as u64, options).await;
        if options.only_if_fast && result == Err(Error::UNSUPPORTED) {
            self.shared.model.borrow_mut().end_change(number, Outcome::Open);
            return;
        }
        self.end_change(number, result, durability);
    }

    fn end_change(&self, number: usize, result: Result<()>, durability: Durability) {
        let outcome = match (self.check_result(result), durability) {
            (Err(_), _) => Outcome::Open,
            (Ok(()), Durability::Cached) => Outcome::Applied,
            (Ok(()), Durability::Synchronous) => Outcome::Durable,
        };
        if outcome != Outcome::Open {
            self.succeeded(1);
        }
        self.shared.model.borrow_mut().end_change(number, outcome);
    }

    async fn discard(&self) {
        self.count(1);
        let range = self.range();
        let number = self.shared.model.borrow_mut().begin_zeroes(range.clone());
        let durability = if chance(20) { Durability::Synchronous } else { Durability::Cached };
        let permit = self.disk.admit(Direction::Write, RequestCost::one(range.len() as u64)).await;
        let result = self.disk.discard(permit, range.start as u64, range.len() as u64, durability).await;
        // A hint: even after a success the content is undefined.
        if self.check_result(result).is_ok() {
            self.succeeded(1);
        }
        self.shared.model.borrow_mut().end_change(number, Outcome::Open);
    }

    /// Flushes; returns whether it succeeded.
    pub(crate) async fn flush(&self) -> bool {
        let began = self.shared.model.borrow_mut().begin();
        let result = self.check_result(self.disk.flush().await);
        if result.is_ok() {
            self.shared.model.borrow_mut().end_flush(began);
            self.shared.counts.borrow_mut().flushed += 1;
        }
        result.is_ok()
    }

    async fn block_status(&self) {
        let range = self.range();
        let permit = self.disk.admit(Direction::Read, RequestCost::one(0)).await;
        let result = self.disk.block_status(&permit, range.start as u64, range.len() as u64).await;
        if let Ok(extents) = self.check_result(result) {
            assert!(!extents.is_empty() && extents.iter().all(|extent| extent.length > 0), "{extents:?}");
            assert!(
                extents.iter().map(|extent| extent.length).sum::<u64>() <= range.len() as u64,
                "{extents:?}"
            );
        }
    }

    fn check_result<T>(&self, result: Result<T>) -> Result<T> {
        let mut counts = self.shared.counts.borrow_mut();
        counts.answered += 1;
        if let Err(error) = &result {
            counts.failed += 1;
            assert!(self.shared.may_fail, "a request failed though the disk never does: {error}");
            // If the header can neither be written nor restored, the image becomes read-only.
            let is_closed = *error == Error::NOT_PERMITTED && self.disk.image().is_read_only();
            let is_expected = [Error::IO, Error::NO_SPACE].contains(error) || is_closed;
            assert!(is_expected, "an error of unknown origin: {error}");
        }
        result
    }
}

/// Draws settings of a prefetch cache: any mode, and windows that suit a small disk.
pub(crate) fn draw_prefetch() -> PrefetchConfig {
    sim::random(|random| {
        let window_min_bytes = 4096 << random.u32(..4);
        PrefetchConfig {
            mode: random.choice(PrefetchMode::ALL).expect("there are some"),
            memory_bytes: 256 << 10,
            largest_request_bytes: 512 << random.u32(..8),
            window_min_bytes,
            window_max_bytes: window_min_bytes << random.u32(..4),
            streams: random.u32(1..8),
        }
    })
}

/// A duration up to a second, uniform on a logarithmic scale.
pub(crate) fn short_time() -> Duration {
    let nanos = sim::random(|random| 10_f64.powf(3.0 + 6.0 * random.f64()));
    Duration::from_nanos(nanos as u64)
}

/// A buffer with any alignment.
fn misaligned(bytes: &[u8]) -> IoBuffer {
    let skip = sim::random(|random| if random.bool() { 0 } else { random.usize(..600) });
    let mut buffer = IoBuffer::zeroed(skip + bytes.len());
    buffer.advance(skip);
    buffer.copy_from_slice(bytes);
    buffer
}

/// Splits bytes randomly into one segment or several.
fn in_pieces(bytes: &[u8]) -> Segments {
    let mut segments = Segments::default();
    let mut remaining = bytes;
    while !remaining.is_empty() {
        let is_last = chance(60);
        let count =
            if is_last { remaining.len() } else { sim::random(|random| random.usize(1..=remaining.len())) };
        let (piece, tail) = remaining.split_at(count);
        if chance(50) {
            segments.push(misaligned(piece));
        } else {
            segments.append(GuestBuffer::holding(piece).segments());
        }
        remaining = tail;
    }
    segments
}
