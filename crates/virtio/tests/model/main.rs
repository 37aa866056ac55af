//! Rings between two threads in every interleaving, with weak memory, checked by `loom`.
//!
//! The files under test are the parts of both formats and both halves that depend on memory
//! ordering. They are compiled a second time over words of the checker. For small configurations,
//! these properties are verified exhaustively, not only sampled:
//!
//! - a side that sleeps after requesting a notification receives it: a lost wake-up would be a
//!   deadlock;
//! - a side that sees a chain sees its descriptors, heads and lengths;
//! - the buffer of a chain belongs to one side at a time: the checker detects data races;
//! - each chain is taken once and completed once, also after the ring has wrapped.
//!
//! An eventfd is the checker's `Notify`, which stores one notification.

#[path = "../../src/ring/split/indices.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod indices;
#[path = "../../src/ring/packed/ownership.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod ownership;
#[path = "../../src/ring/driver/packed.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod packed;
#[path = "../../src/ring/position.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod position;
#[path = "../../src/ring/driver/split.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod split;

use loom::{
    cell::Cell,
    sync::{Arc, Notify},
    thread,
};

use cells::{Cells, Ordering};
use indices::Indices;
use ownership::DescriptorOwnership;
use packed::PackedDriver;
use position::RingPosition;
use split::SplitDriver;

/// Replaces `super::cells` of the files. A word is one atomic, whatever its width, as each word is
/// always accessed in one width.
mod cells {
    use std::sync::Arc;

    use loom::sync::atomic::AtomicU64;
    pub(super) use loom::sync::atomic::{Ordering, fence};

    #[derive(Clone, Debug)]
    pub(super) struct Cells(Arc<[AtomicU64]>);

    macro_rules! words {
        ($($load:ident $store:ident $word:ty),*) => {
            $(
                pub(super) fn $load(&self, offset: usize, order: Ordering) -> $word {
                    self.0[offset / 2].load(order) as $word
                }

                pub(super) fn $store(&self, offset: usize, value: $word, order: Ordering) {
                    self.0[offset / 2].store(u64::from(value), order);
                }
            )*
        };
    }

    impl Cells {
        pub(super) fn new(bytes: usize) -> Self {
            Self((0..bytes / 2).map(|_| AtomicU64::new(0)).collect())
        }

        words!(load_u16 store_u16 u16, load_u32 store_u32 u32, load_u64 store_u64 u64);

        pub(super) fn is_lost(&self) -> bool {
            false
        }
    }
}

/// Replaces `super::chain` of the files.
mod chain {
    pub(super) const DESCRIPTOR_BYTES: usize = 16;
    pub(super) mod flag {
        pub(in super::super) const NEXT: u16 = 1;
        pub(in super::super) const WRITE: u16 = 2;
    }
}

#[derive(Debug)]
#[allow(dead_code, reason = "to be shown")]
enum RingError {
    IndexJump { from: u16, to: u16, size: u16 },
    Head { head: u16, size: u16 },
    Endless,
}

#[derive(Clone, Copy)]
struct DriverBuffer {
    address: u64,
    bytes: u32,
}

impl DriverBuffer {
    fn flags(self) -> u16 {
        0
    }
}

#[derive(Debug)]
#[allow(dead_code, reason = "to be shown")]
struct NotInFlight(u32);

#[derive(Debug)]
struct UsedChain {
    id: u16,
    written: u32,
}

/// Operations of a driver, for both formats.
trait Driver: Sized + 'static {
    fn add(&mut self, buffers: &[DriverBuffer]) -> Option<u16>;
    fn wants_kick(&mut self) -> bool;
    fn next_used(&mut self) -> Result<Option<UsedChain>, NotInFlight>;
    fn silence(&mut self);
    fn listen(&mut self) -> bool;
}

macro_rules! driver {
    ($driver:ident) => {
        impl Driver for $driver {
            fn add(&mut self, buffers: &[DriverBuffer]) -> Option<u16> {
                $driver::add(self, buffers, 0)
            }

            fn wants_kick(&mut self) -> bool {
                $driver::wants_kick(self)
            }

            fn next_used(&mut self) -> Result<Option<UsedChain>, NotInFlight> {
                $driver::next_used(self)
            }

            fn silence(&mut self) {
                $driver::suppress_calls(self);
            }

            fn listen(&mut self) -> bool {
                $driver::enable_calls(self)
            }
        }
    };
}

driver!(SplitDriver);
driver!(PackedDriver);

/// A chain taken by the device.
struct Chain {
    id: u16,
    /// Addresses of its buffers.
    addresses: Vec<u64>,
}

/// Operations of a device, for both formats.
trait Device: Sized + 'static {
    type Driver: Driver;

    /// Both halves of an unused ring.
    fn pair(size: u16, event_idx: bool) -> (Self::Driver, Self);
    fn take(&mut self) -> Result<Option<Chain>, RingError>;
    fn publish(&mut self, chain: &Chain, written: u32);
    fn wants_call(&mut self) -> bool;
    fn silence(&mut self);
    fn listen(&mut self) -> bool;
}

/// The device's half, with the descriptor table.
struct SplitDevice(Indices, Cells);

impl Device for SplitDevice {
    type Driver = SplitDriver;

    fn pair(size: u16, event_idx: bool) -> (SplitDriver, Self) {
        let entries = usize::from(size);
        let [table, available, used] = [16 * entries, 6 + 2 * entries, 6 + 8 * entries].map(Cells::new);
        let driver = SplitDriver::new(size, event_idx, [table.clone(), available.clone(), used.clone()]);
        (driver, Self(Indices::new(size, event_idx, available, used, 0), table))
    }

    fn take(&mut self) -> Result<Option<Chain>, RingError> {
        let Self(indices, table) = self;
        let Some(id) = indices.take()? else { return Ok(None) };
        let mut addresses = Vec::new();
        let mut at = id;
        loop {
            let offset = usize::from(at) * chain::DESCRIPTOR_BYTES;
            addresses.push(table.load_u64(offset, Ordering::Relaxed));
            let word = table.load_u64(offset + 8, Ordering::Relaxed);
            if (word >> 32) as u16 & chain::flag::NEXT == 0 {
                return Ok(Some(Chain { id, addresses }));
            }
            at = (word >> 48) as u16;
        }
    }

    fn publish(&mut self, chain: &Chain, written: u32) {
        self.0.publish(chain.id, written);
    }

    fn wants_call(&mut self) -> bool {
        self.0.wants_call()
    }

    fn silence(&mut self) {
        self.0.suppress_kicks();
    }

    fn listen(&mut self) -> bool {
        self.0.enable_kicks()
    }
}

impl Device for DescriptorOwnership {
    type Driver = PackedDriver;

    fn pair(size: u16, event_idx: bool) -> (PackedDriver, Self) {
        let cells = [16 * usize::from(size), 4, 4].map(Cells::new);
        let driver = PackedDriver::new(size, event_idx, cells.clone());
        (driver, Self::new(size, event_idx, cells, RingPosition::START))
    }

    fn take(&mut self) -> Result<Option<Chain>, RingError> {
        let mut addresses = Vec::new();
        let taken = Self::take(self, |address, _| {
            addresses.push(address);
            Ok(())
        })?;
        Ok(taken.map(|(id, _)| Chain { id, addresses }))
    }

    fn publish(&mut self, chain: &Chain, written: u32) {
        Self::publish(self, chain.id, chain.addresses.len() as u16, written);
    }

    fn wants_call(&mut self) -> bool {
        Self::wants_call(self)
    }

    fn silence(&mut self) {
        Self::suppress_kicks(self);
    }

    fn listen(&mut self) -> bool {
        Self::enable_kicks(self)
    }
}

/// Size of a model.
#[derive(Clone, Copy)]
struct Shape {
    /// Number of descriptors of the ring.
    size: u16,
    event_idx: bool,
    chains: u64,
    /// Number of descriptors of the first chain, and of every second one; the rest have one. So a
    /// packed ring that wraps reaches the middle of an earlier chain.
    descriptors: u64,
    /// Maximum number of preemptions in one execution; it keeps the number of executions small,
    /// where exploring all would need minutes. A sleep between any two words of the peer needs two.
    interruptions: Option<usize>,
}

impl Shape {
    fn new(event_idx: bool, size: u16, chains: u64, descriptors: u64, interruptions: Option<usize>) -> Self {
        Self { size, event_idx, chains, descriptors, interruptions }
    }

    /// Addresses in the descriptors of this chain.
    fn addresses(self, number: u64) -> impl Iterator<Item = u64> {
        let count = if number.is_multiple_of(2) { self.descriptors } else { 1 };
        (0..count).map(move |part| number << 8 | part)
    }
}

/// State that both sides share in addition to the ring.
struct World {
    shape: Shape,
    /// An eventfd for each direction.
    kick: Notify,
    call: Notify,
    /// For each chain the value that its driver writes, and then its device.
    buffers: Vec<Cell<u64>>,
}

/// Both halves of an unused ring, and the shared state.
fn world<D: Device>(shape: Shape) -> (D::Driver, D, Arc<World>) {
    let (driver, mut device) = D::pair(shape.size, shape.event_idx);
    assert!(device.wants_call(), "once, for the device before");
    let buffers = (0..shape.chains).map(|_| Cell::new(0)).collect();
    (driver, device, Arc::new(World { shape, kick: Notify::new(), call: Notify::new(), buffers }))
}

/// Chains that the driver has sent: their ids and their numbers.
type Sent = Vec<(u16, u64)>;

impl World {
    /// Makes a chain available whose buffers contain its number, if there is space.
    fn send(&self, driver: &mut impl Driver, number: u64) -> Option<(u16, u64)> {
        let buffers = self.shape.addresses(number).map(|address| DriverBuffer { address, bytes: 1 });
        self.buffers[number as usize].set(number + 1);
        let id = driver.add(&buffers.collect::<Vec<_>>())?;
        if driver.wants_kick() {
            self.kick.notify();
        }
        Some((id, number))
    }

    fn send_all(&self, driver: &mut impl Driver) -> Sent {
        (0..self.shape.chains).map(|number| self.send(driver, number).expect("there is room")).collect()
    }

    /// Makes the chains after `sent` available and takes all completed ones; sleeps when idle.
    fn drive(&self, driver: &mut impl Driver, mut sent: Sent) {
        let mut completed = 0;
        while completed < self.shape.chains {
            while completed + (sent.len() as u64) < self.shape.chains
                && let Some(chain) = self.send(driver, completed + sent.len() as u64)
            {
                sent.push(chain);
            }
            match driver.next_used().expect("it was out") {
                Some(used) => {
                    let at = sent.iter().position(|&(id, _)| id == used.id).expect("it was sent");
                    let (_, number) = sent.remove(at);
                    assert_eq!(u64::from(used.written), 100 + number, "the length of this chain");
                    assert_eq!(self.buffers[number as usize].get(), 100 + number, "the answer");
                    completed += 1;
                }
                // A chain was completed meanwhile: look again instead of sleeping.
                None if driver.listen() => {}
                None => self.call.wait(),
            }
        }
        assert!(driver.next_used().expect("nothing").is_none());
    }

    /// Takes all chains; sleeps when there are none. With `completes` it completes each at once.
    fn serve(&self, device: &mut impl Device, completes: bool) {
        let mut taken = 0;
        device.silence();
        while taken < self.shape.chains {
            match device.take().expect("a good driver") {
                Some(chain) => {
                    self.check(&chain, taken);
                    taken += 1;
                    if completes {
                        self.answer(device, &chain);
                    }
                }
                // A chain was made available meanwhile: look again instead of sleeping.
                None if device.listen() => {}
                None => self.kick.wait(),
            }
        }
    }

    fn check(&self, chain: &Chain, number: u64) {
        let due: Vec<_> = self.shape.addresses(number).collect();
        assert_eq!(chain.addresses, due, "the descriptors of this chain");
        assert_eq!(self.buffers[number as usize].get(), number + 1, "the requested number");
    }

    fn answer(&self, device: &mut impl Device, chain: &Chain) {
        let number = chain.addresses[0] >> 8;
        self.buffers[number as usize].set(100 + number);
        device.publish(chain, 100 + number as u32);
        if device.wants_call() {
            self.call.notify();
        }
    }
}

/// Explores all executions.
fn model(shape: Shape, run: impl Fn() + Send + Sync + 'static) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = shape.interruptions;
    model.check(run);
}

fn kicks<D: Device>(shape: Shape) {
    model(shape, move || {
        let (mut driver, mut device, world) = world::<D>(shape);
        let thread_world = Arc::clone(&world);
        let thread = thread::spawn(move || thread_world.send_all(&mut driver));
        world.serve(&mut device, false);
        thread.join().expect("it ends");
    });
}

fn calls<D: Device>(shape: Shape) {
    model(shape, move || {
        let (mut driver, mut device, world) = world::<D>(shape);
        let sent = world.send_all(&mut driver);
        let chains: Vec<_> =
            (0..shape.chains).map(|_| device.take().expect("good").expect("there")).collect();
        let thread_world = Arc::clone(&world);
        let thread = thread::spawn(move || {
            // In reverse order of taking.
            for chain in chains.iter().rev() {
                thread_world.answer(&mut device, chain);
            }
        });
        driver.silence();
        world.drive(&mut driver, sent);
        thread.join().expect("it ends");
    });
}

fn both<D: Device>(shape: Shape) {
    model(shape, move || {
        let (mut driver, mut device, world) = world::<D>(shape);
        let thread_world = Arc::clone(&world);
        let thread = thread::spawn(move || thread_world.drive(&mut driver, Sent::new()));
        world.serve(&mut device, true);
        thread.join().expect("it ends");
    });
}

/// Each line is a model: event index or not, descriptors of the ring, chains, descriptors of a
/// chain, preemptions.
macro_rules! models {
    ($kind:ident, $device:ty, $($name:ident: $model:ident($($part:expr),*);)*) => {
        mod $kind {
            use super::*;

            $(
                #[test]
                fn $name() {
                    $model::<$device>(Shape::new($($part),*));
                }
            )*
        }
    };
}

models! { of_a_split_ring, SplitDevice,
    a_device_that_sleeps_is_kicked: kicks(false, 2, 2, 1, None);
    a_device_that_sleeps_is_kicked_by_event_index: kicks(true, 2, 2, 1, None);
    a_device_sees_the_whole_of_a_chain: kicks(true, 4, 2, 2, Some(4));
    a_driver_that_sleeps_is_called: calls(false, 2, 2, 1, None);
    a_driver_that_sleeps_is_called_by_event_index: calls(true, 2, 2, 1, None);
    both_sides_sleep_and_wake: both(false, 2, 2, 1, Some(2));
    both_sides_sleep_and_wake_by_event_index: both(true, 2, 2, 1, Some(2));
    both_sides_go_round: both(true, 2, 3, 2, Some(2));
}

models! { of_a_packed_ring, DescriptorOwnership,
    a_device_that_sleeps_is_kicked: kicks(false, 2, 2, 1, Some(4));
    a_device_that_sleeps_is_kicked_by_event_index: kicks(true, 2, 2, 1, Some(4));
    a_device_sees_the_whole_of_a_chain: kicks(true, 4, 2, 2, Some(4));
    a_driver_that_sleeps_is_called: calls(false, 2, 2, 1, None);
    a_driver_that_sleeps_is_called_by_event_index: calls(true, 2, 2, 1, None);
    both_sides_sleep_and_wake: both(false, 2, 2, 1, Some(2));
    both_sides_sleep_and_wake_by_event_index: both(true, 2, 2, 1, Some(2));
    both_sides_go_round: both(true, 2, 3, 2, Some(2));
}
