//! A guest that changes its disk, and the model of what the disk may contain.
//!
//! The model has a list of possible contents for each unit of the disk: one after a success; more
//! after a failed, discarded or cancelled change. A cancelled change may take effect at any later
//! time, so it remains possible for ever. Each unit belongs to one guest, which sends one request
//! at a time, so that no request overlaps another one in the model. On the disk, the units of
//! several guests share clusters.

use std::{
    cell::{Cell, RefCell},
    ops::{Range, RangeInclusive},
    rc::Rc,
    sync::Arc,
};

use block::disk::Disk;
use policy::{request::Direction, throttle::RequestCost, time::Duration};
use reactor::{
    JoinHandle,
    buffer::IoBuffer,
    error::{Error, Result},
    now, sim, sleep_until, spawn_joinable, timeout,
};
use storage::{Durability, ZeroOptions};

/// Size of a unit in bytes.
pub(crate) const UNIT: u64 = 512;
/// Number of units that a guest owns in sequence.
const STRIPE: u64 = 5;

/// Possible contents of a unit: numbers of writes, 0 for zeroes.
#[derive(Clone, Debug)]
pub(crate) struct UnitModel {
    possible: Vec<u64>,
    /// Changes that were cancelled, which may still take effect.
    cancelled: Vec<u64>,
}

/// Model of a disk.
#[derive(Clone, Debug)]
pub(crate) struct DiskModel {
    pub(crate) units: Vec<UnitModel>,
    next: u64,
}

/// A guest.
struct Guest {
    disk: Arc<Disk>,
    model: Rc<RefCell<DiskModel>>,
    number: u64,
    guests: u64,
    /// True if its requests may fail now.
    may_fail: Rc<Cell<bool>>,
    /// True if it cancels some changes; otherwise it resizes the disk. The simulated storage does
    /// not accept a resize while a cancelled write is in flight.
    cancels: bool,
    /// Number of units that are never cut off; the first guest owns all others.
    fixed_units: u64,
    /// True if a resize has failed for good: the size is unknown.
    has_lost_resize: Cell<bool>,
    /// Number of units of the disk at most.
    max_units: u64,
}

pub(crate) fn chance(percent: u32) -> bool {
    sim::random(|random| random.u32(..100)) < percent
}

/// A duration up to 100 ms, uniform on a logarithmic scale.
pub(crate) fn short_time() -> Duration {
    Duration::from_nanos(sim::random(|random| 10_f64.powf(3.0 + 5.0 * random.f64())) as u64)
}

/// Content of a unit: zeroes, or bytes that identify the write.
pub(crate) fn content(number: u64) -> Vec<u8> {
    if number == 0 {
        return vec![0; UNIT as usize];
    }
    let bytes = (number.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1).to_le_bytes();
    bytes.into_iter().cycle().take(UNIT as usize).collect()
}

impl DiskModel {
    /// The model of a disk whose units have these contents.
    pub(crate) fn new(numbers: impl IntoIterator<Item = u64>) -> Self {
        let unit = |number| UnitModel { possible: vec![number], cancelled: Vec::new() };
        let units: Vec<_> = numbers.into_iter().map(unit).collect();
        Self { next: units.len() as u64 + 1000, units }
    }

    fn number(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn each(&mut self, range: Range<u64>, change: impl Fn(&mut UnitModel)) {
        self.units[range.start as usize..range.end as usize].iter_mut().for_each(change);
    }

    /// Panics unless the disk may contain `found` at `first`.
    pub(crate) fn check(&self, event: &str, first: u64, found: &[u8]) {
        for (index, bytes) in found.chunks(UNIT as usize).enumerate() {
            let unit = &self.units[first as usize + index];
            let mut possible = unit.possible.iter().chain(&unit.cancelled);
            assert!(
                possible.any(|&number| content(number) == bytes),
                "{event}: unit {} has {:02x?}, possible are {unit:?}",
                first as usize + index,
                &bytes[..8]
            );
        }
    }
}

/// Sizes of a disk of `units` that guests resize to `max_units` at most.
pub(crate) fn resizes(units: u64, max_units: u64) -> RangeInclusive<u64> {
    (units / 2).max(8).next_multiple_of(8)..=max_units
}

/// Starts guests, which send some requests each and resize the disk within `sizes`, in units.
pub(crate) fn start_guests(
    disk: &Arc<Disk>,
    model: &Rc<RefCell<DiskModel>>,
    may_fail: &Rc<Cell<bool>>,
    sizes: RangeInclusive<u64>,
) -> Vec<JoinHandle<()>> {
    let guests = sim::random(|random| random.u64(1..4));
    let requests = sim::random(|random| random.usize(5..60));
    let cancels = chance(50);
    let guest = |number| Guest {
        cancels,
        has_lost_resize: Cell::new(false),
        disk: Arc::clone(disk),
        model: Rc::clone(model),
        number,
        guests,
        may_fail: Rc::clone(may_fail),
        fixed_units: *sizes.start(),
        max_units: *sizes.end(),
    };
    (0..guests).map(|number| spawn_joinable(guest(number).run(requests))).collect()
}

impl Guest {
    /// Sends this many requests.
    async fn run(self, requests: usize) {
        for _ in 0..requests {
            sleep_until(now() + short_time()).await;
            self.request().await;
        }
    }

    /// A range of units that the guest owns.
    fn range(&self) -> Range<u64> {
        let fixed = self.fixed_units;
        let stripes = fixed / STRIPE;
        let current = self.model.borrow().units.len() as u64;
        if (self.number == 0 && current > fixed && chance(20)) || stripes < self.guests {
            let first = if stripes < self.guests { 0 } else { fixed };
            return sim::random(|random| {
                let start = random.u64(first..current);
                start..random.u64(start + 1..=current)
            });
        }
        sim::random(|random| {
            let own = stripes / self.guests;
            let stripe = random.u64(..own) * self.guests + self.number;
            let start = random.u64(..STRIPE);
            let end = random.u64(start + 1..=STRIPE);
            stripe * STRIPE + start..stripe * STRIPE + end
        })
    }

    async fn request(&self) {
        if self.number == 0 && !self.cancels && !self.has_lost_resize.get() && chance(4) {
            return self.resize().await;
        }
        let range = self.range();
        match sim::random(|random| random.u32(..100)) {
            0..30 => self.read(range).await,
            30..80 => self.change(range).await,
            80..90 => {
                let _ = self.check_result(self.disk.flush().await);
            }
            _ => self.discard(range).await,
        }
    }

    async fn read(&self, range: Range<u64>) {
        let length = (range.end - range.start) * UNIT;
        let permit = self.disk.admit(Direction::Read, RequestCost::one(length)).await;
        let result = self.disk.read(permit, range.start * UNIT, length as usize).await;
        if let Ok(found) = self.check_result(result) {
            self.model.borrow().check("a guest's read", range.start, &found.to_vec());
        }
    }

    /// Writes or zeroes; some changes are cancelled.
    async fn change(&self, range: Range<u64>) {
        let is_zero = chance(30);
        let number = if is_zero { 0 } else { self.model.borrow_mut().number() };
        let length = (range.end - range.start) * UNIT;
        let offset = range.start * UNIT;
        let durability = if chance(20) { Durability::Synchronous } else { Durability::Cached };
        let changing = async {
            let permit = self.disk.admit(Direction::Write, RequestCost::one(length)).await;
            if is_zero && chance(70) {
                let options = ZeroOptions { may_unmap: chance(50), only_if_fast: false, durability };
                return self.disk.write_zeroes(permit, offset, length, options).await;
            }
            let mut data = IoBuffer::new(length as usize);
            data.chunks_mut(UNIT as usize).for_each(|unit| unit.copy_from_slice(&content(number)));
            self.disk.write(permit, offset, data.into(), durability).await
        };
        let limit = if self.cancels && chance(8) { short_time() } else { Duration::from_millis(1 << 40) };
        let result = timeout(limit, changing).await;
        let mut model = self.model.borrow_mut();
        match result {
            Err(_) => model.each(range, |unit| unit.cancelled.push(number)),
            Ok(result) => match self.check_result(result) {
                Ok(()) => model.each(range, |unit| unit.possible = vec![number]),
                Err(_) => model.each(range, |unit| unit.possible.push(number)),
            },
        }
    }

    async fn discard(&self, range: Range<u64>) {
        let length = (range.end - range.start) * UNIT;
        let permit = self.disk.admit(Direction::Write, RequestCost::one(length)).await;
        let result = self.disk.discard(permit, range.start * UNIT, length, Durability::Cached).await;
        let _ = self.check_result(result);
        self.model.borrow_mut().each(range, |unit| unit.possible.push(0));
    }

    /// Shrinks or grows the disk.
    async fn resize(&self) {
        let units = sim::random(|random| random.u64(self.fixed_units..=self.max_units));
        // Multiples of the largest block.
        let units = (units / 8 * 8).max(self.fixed_units.next_multiple_of(8));
        let current = self.model.borrow().units.len() as u64;
        // The content after a failed resize is unknown, so it is repeated. Some errors last.
        for _ in 0..100 {
            if self.disk.resize(units * UNIT).await.is_ok() {
                let zero = UnitModel { possible: vec![0], cancelled: Vec::new() };
                self.model.borrow_mut().units.resize(units as usize, zero);
                return;
            }
            assert!(self.may_fail.get(), "a resize from {current} to {units} units failed");
        }
        self.model.borrow_mut().units.truncate(units.min(current) as usize);
        self.has_lost_resize.set(true);
    }

    fn check_result<T>(&self, result: Result<T>) -> Result<T> {
        if let Err(error) = &result {
            assert!(self.may_fail.get(), "a request failed, and nothing fails here: {error}");
            let expected = [Error::IO, Error::NO_SPACE, Error::NOT_PERMITTED];
            assert!(expected.contains(error), "an error of unknown origin: {error}");
        }
        result
    }
}

/// Reads the disk to the end, and compares it with the model.
pub(crate) async fn check_disk(disk: &Disk, model: &DiskModel, may_fail: bool) {
    let bytes = model.units.len() * UNIT as usize;
    model.check("the end", 0, &content_of(disk, bytes, may_fail).await);
}

/// Content of a disk, whose reads may fail.
pub(crate) async fn content_of(disk: &Disk, bytes: usize, may_fail: bool) -> Vec<u8> {
    loop {
        let permit = disk.admit(Direction::Read, RequestCost::one(bytes as u64)).await;
        match disk.read(permit, 0, bytes).await {
            Ok(found) => return found.to_vec(),
            Err(error) => assert!(may_fail, "{error}"),
        }
    }
}
