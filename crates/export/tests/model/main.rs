//! A split ring between two threads in every interleaving, with weak memory, tried by `loom`.
//!
//! The files under test are the ring's own indices and its driver's, compiled a second time over
//! words of the checker. What is shown for these small configurations, and not only sampled:
//!
//! - whoever sleeps after asking to be told is told: a wake-up that got lost would be a deadlock;
//! - who sees an index sees what it stands for: descriptors, heads, lengths;
//! - each chain arrives once and comes back once.
//!
//! An eventfd is the checker's `Notify`, which keeps one notification.

#[path = "../../src/virtio/ring/split/indices.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod indices;
#[path = "../../src/virtio/ring/driver/split.rs"]
#[allow(dead_code, reason = "the model needs a part of it")]
mod split;

use loom::{
    sync::{Arc, Notify},
    thread,
};

use cells::{Cells, Ordering};
use indices::Indices;
use split::Split;

/// What the files take from `super::cells`. A word is one atomic, whatever its width, as each is
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

/// What the files take from `super::chain`.
mod chain {
    pub(super) const DESCRIPTOR_BYTES: usize = 16;
    pub(super) mod flag {
        pub(in super::super) const NEXT: u16 = 1;
    }
}

#[derive(Debug)]
#[allow(dead_code, reason = "to be shown")]
enum Broken {
    Jump { from: u16, to: u16, size: u16 },
    Head { head: u16, size: u16 },
}

#[derive(Clone, Copy)]
struct Buffer {
    address: u64,
    bytes: u32,
}

impl Buffer {
    fn flags(self) -> u16 {
        0
    }
}

#[derive(Debug)]
#[allow(dead_code, reason = "to be shown")]
struct NotOut(u32);

#[derive(Debug)]
struct Used {
    id: u16,
    written: u32,
}

const SIZE: u16 = 2;
const CHAINS: u64 = 2;

/// An eventfd for each direction.
struct Events {
    kick: Notify,
    call: Notify,
}

/// Both halves of a ring that nobody has used, and the device's view of the table.
fn ring(event_idx: bool) -> (Split, Indices, Cells, Arc<Events>) {
    let size = usize::from(SIZE);
    let [table, available, used] = [16 * size, 6 + 2 * size, 6 + 8 * size].map(Cells::new);
    let driver = Split::new(SIZE, event_idx, [table.clone(), available.clone(), used.clone()]);
    let mut device = Indices::new(SIZE, event_idx, available, used, 0);
    assert!(device.wants_call(), "once, for the device before");
    (driver, device, table, Arc::new(Events { kick: Notify::new(), call: Notify::new() }))
}

/// Makes a chain available whose buffer says which one it is.
fn send(driver: &mut Split, number: u64, events: &Events) {
    driver.add(&[Buffer { address: number, bytes: 1 }], 0).expect("there is room");
    if driver.wants_kick() {
        events.kick.notify();
    }
}

/// Takes back all chains, asleep where there are none.
fn collect(driver: &mut Split, events: &Events) {
    let mut back = 0;
    while back < CHAINS {
        match driver.next_used().expect("it was out") {
            Some(used) => {
                assert_eq!(used.written, 100 + u32::from(used.id), "the length of this chain");
                back += 1;
            }
            None if driver.listen() => {}
            None => events.call.wait(),
        }
    }
    assert!(driver.next_used().expect("nothing").is_none());
}

/// Takes all chains, asleep where there are none; with `answers` it gives each back at once.
fn serve(device: &mut Indices, table: &Cells, events: &Events, answers: bool) {
    let mut taken = 0;
    device.silence();
    while taken < CHAINS {
        match device.take().expect("a good driver") {
            Some(head) => {
                let address = table.load_u64(usize::from(head) * 16, Ordering::Relaxed);
                assert_eq!(address, taken, "the descriptor of this chain");
                taken += 1;
                if answers {
                    answer(device, head, events);
                }
            }
            None if device.listen() => {}
            None => events.kick.wait(),
        }
    }
}

fn answer(device: &mut Indices, head: u16, events: &Events) {
    device.publish(head, 100 + u32::from(head));
    if device.wants_call() {
        events.call.notify();
    }
}

fn kicks(event_idx: bool) {
    loom::model(move || {
        let (mut driver, mut device, table, events) = ring(event_idx);
        let others = Arc::clone(&events);
        let thread = thread::spawn(move || {
            for number in 0..CHAINS {
                send(&mut driver, number, &others);
            }
        });
        serve(&mut device, &table, &events, false);
        thread.join().expect("it ends");
    });
}

fn calls(event_idx: bool) {
    loom::model(move || {
        let (mut driver, mut device, _, events) = ring(event_idx);
        for number in 0..CHAINS {
            send(&mut driver, number, &events);
        }
        let heads: Vec<u16> = (0..CHAINS).map(|_| device.take().expect("good").expect("there")).collect();
        let others = Arc::clone(&events);
        let thread = thread::spawn(move || {
            // In another order than they came.
            for head in heads.into_iter().rev() {
                answer(&mut device, head, &others);
            }
        });
        driver.silence();
        collect(&mut driver, &events);
        thread.join().expect("it ends");
    });
}

fn both(event_idx: bool) {
    let mut model = loom::model::Builder::new();
    // Enough for each side to fall asleep between any two words of the other.
    model.preemption_bound = Some(2);
    model.check(move || {
        let (mut driver, mut device, table, events) = ring(event_idx);
        let others = Arc::clone(&events);
        let thread = thread::spawn(move || {
            for number in 0..CHAINS {
                send(&mut driver, number, &others);
            }
            collect(&mut driver, &others);
        });
        serve(&mut device, &table, &events, true);
        thread.join().expect("it ends");
    });
}

#[test]
fn a_device_that_sleeps_is_kicked() {
    kicks(false);
}

#[test]
fn a_device_that_sleeps_is_kicked_by_event_index() {
    kicks(true);
}

#[test]
fn a_driver_that_sleeps_is_called() {
    calls(false);
}

#[test]
fn a_driver_that_sleeps_is_called_by_event_index() {
    calls(true);
}

#[test]
fn both_sides_sleep_and_wake() {
    both(false);
}

#[test]
fn both_sides_sleep_and_wake_by_event_index() {
    both(true);
}
