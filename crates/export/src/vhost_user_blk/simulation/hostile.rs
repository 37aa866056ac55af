//! A hostile guest: noise in its ring, malformed requests, jumping indices, endless kicks, and a
//! corrupt in-flight area.

use std::{cell::Cell, rc::Rc, sync::Arc};

use policy::time::Duration;

use super::{DISK_BYTES, FOREVER, VhostUserSimulationCounts, VolatileMemory, chance, count, sleep_randomly};
use crate::vhost_user_blk::{
    device::VhostUserDevice,
    features::virtio,
    queue::{QueueOrder, VhostUserQueue},
    session::EventKind,
    vring::{RingAreas, RingSettings},
    vring_event::simulated::SimulatedEvent,
};
use ::virtio::ring::{
    InflightQueueArea, RingLayout, RingParts,
    driver::{DriverBuffer, RingDriver},
};
use reactor::{
    guest::{GuestBytes, GuestMemory, Region},
    sim, spawn_joinable, timeout,
};

const MEMORY_BYTES: u64 = 0x1_0000;
const DRIVER: u64 = 0x4000;
const DEVICE: u64 = 0x6000;
const BUFFERS: u64 = 0x8000;

pub(super) struct HostileGuest {
    device: Arc<VhostUserDevice>,
    counts: Rc<Cell<VhostUserSimulationCounts>>,
    volatile_memory: VolatileMemory,
}

/// One ring of the guest.
struct HostileRing {
    memory: GuestMemory,
    layout: RingLayout,
    kick: SimulatedEvent,
    error: SimulatedEvent,
}

impl HostileGuest {
    pub(super) fn new(
        device: Arc<VhostUserDevice>,
        counts: &Rc<Cell<VhostUserSimulationCounts>>,
        volatile_memory: &VolatileMemory,
    ) -> Self {
        Self { device, counts: Rc::clone(counts), volatile_memory: Rc::clone(volatile_memory) }
    }

    pub(super) async fn run(self) {
        let memory =
            GuestMemory::new(vec![Region::on_heap(0, 0, MEMORY_BYTES as usize)]).expect("one region");
        let area = GuestMemory::new(vec![Region::on_heap(0, 0, 1 << 14)]).expect("one region");
        for _ in 0..sim::random(|random| random.usize(1..8)) {
            let attack = HostileRing::draw(memory.clone());
            let RingLayout { size, packed, .. } = attack.layout;
            if chance(20) {
                // In some runs the memory also changes by itself while the device reads it.
                self.volatile_memory
                    .borrow_mut()
                    .push(memory.range(0, MEMORY_BYTES as usize).expect("all of it"));
            }
            let inflight = chance(40).then(|| {
                let area = area.range(0, InflightQueueArea::bytes(size, packed)).expect("inside");
                if chance(50) {
                    noise(&area, 20);
                }
                area
            });
            let base = sim::random(|random| if random.bool() { 0x8000_8000 } else { random.u32(..) });
            let settings = attack.settings(base, inflight);
            // Impossible settings are rejected by `new`.
            let Ok(queue) = VhostUserQueue::new(0, settings, Arc::clone(&self.device)) else { continue };
            let weak_queue = Rc::downgrade(&queue);
            let (orders, received) = async_channel::unbounded();
            let event = Some(attack.kick.vring_event()).filter(|_| chance(90));
            orders.try_send(QueueOrder::Event(EventKind::Kick, event)).expect("there is room");
            let event = Some(attack.error.vring_event());
            orders.try_send(QueueOrder::Event(EventKind::Error, event)).expect("there is room");
            let before = self.device.requests.load(std::sync::atomic::Ordering::SeqCst);
            let serving = spawn_joinable(queue.serve(received));
            attack.run().await;
            // A queue whose ring is broken has already ended.
            let _ = orders.try_send(QueueOrder::Stop { abandoned: chance(30) });
            timeout(FOREVER, serving).await.expect("it ends");
            assert_eq!(weak_queue.strong_count(), 0, "tasks of a queue that has ended");
            let taken = self.device.requests.load(std::sync::atomic::Ordering::SeqCst) - before;
            let broken = u64::from(attack.error.count() > 0);
            count(&self.counts, |all| {
                all.attacks += taken;
                all.broken += broken;
            });
        }
        let in_flight = self.device.in_flight.load(std::sync::atomic::Ordering::SeqCst);
        assert_eq!(in_flight, 0, "requests are counted that are none");
    }
}

impl HostileRing {
    fn draw(memory: GuestMemory) -> Self {
        let packed = chance(50);
        let size = sim::random(|random| if packed { random.u16(1..100) } else { 1 << random.u16(..8) });
        let (event_idx, indirect) = (chance(50), chance(70));
        let parts = RingParts::of(size, packed, event_idx);
        let part = |at, (bytes, _)| memory.range(at, bytes).expect("inside");
        let layout = RingLayout {
            size,
            descriptors: part(0, parts.descriptors),
            driver: part(DRIVER, parts.driver),
            device: part(DEVICE, parts.device),
            packed,
            event_idx,
            indirect,
        };
        memory.range(0, BUFFERS as usize).expect("inside").fill(0, BUFFERS as usize, 0);
        Self { memory, layout, kick: SimulatedEvent::default(), error: SimulatedEvent::default() }
    }

    fn settings(&self, base: u32, inflight: Option<GuestBytes>) -> RingSettings {
        let RingLayout { size, descriptors, driver, device, packed, event_idx, indirect } =
            self.layout.clone();
        let flag_if = |condition: bool, bit| if condition { bit } else { 0 };
        RingSettings {
            size,
            areas: RingAreas { descriptors, driver, device },
            memory: self.memory.clone(),
            features: flag_if(packed, virtio::RING_PACKED)
                | flag_if(event_idx, virtio::EVENT_IDX)
                | flag_if(indirect, virtio::INDIRECT_DESC),
            base: if packed { base } else { 0 },
            inflight,
            loss: None,
            kick: None,
            call: None,
            error: None,
        }
    }

    async fn run(&self) {
        let mut driver = RingDriver::new(&self.layout);
        let harmless = chance(50);
        for _ in 0..sim::random(|random| random.usize(..60)) {
            match sim::random(|random| random.u8(..12)) {
                // Requests most often, because a ring that breaks early receives none.
                0..7 => self.send(&mut driver),
                7 if !harmless => noise(&self.layout.descriptors, 4),
                8 if !harmless => noise(&self.layout.driver, 2),
                9 if !harmless => noise(&self.layout.device, 2),
                10 => noise(&self.memory.range(BUFFERS, 0x8000).expect("inside"), 200),
                _ => sleep_randomly(Duration::from_millis(5)).await,
            }
            while driver.next_used().is_ok_and(|used| used.is_some()) {}
            for _ in 0..sim::random(|random| random.usize(..3)) {
                self.kick.signal();
            }
        }
        sleep_randomly(Duration::from_millis(50)).await;
    }

    fn send(&self, driver: &mut RingDriver) {
        let random_address = || BUFFERS + sim::random(|random| random.u64(..0x7000));
        let address = || if chance(95) { random_address() } else { sim::random(|random| random.u64(..)) };
        let at = random_address();
        let (kind, sector) = sim::random(|random| {
            let kinds = [0, 1, 4, 8, 11, 13, random.u32(..)];
            let sector =
                if random.u8(..4) == 0 { random.u64(..) } else { random.u64(..DISK_BYTES as u64 / 512) };
            (kinds[random.usize(..7)], sector)
        });
        let header = self.memory.range(at, 16).expect("inside");
        header.write(0, &kind.to_le_bytes());
        header.write(8, &sector.to_le_bytes());
        let mut buffers = vec![DriverBuffer { address: at, bytes: 16, writable: false }];
        let writes = kind == 0 || kind == 8;
        for _ in 0..sim::random(|random| random.usize(..4)) {
            let bytes = sim::random(|random| if random.bool() { 512 } else { random.u32(..5000) });
            buffers.push(DriverBuffer { address: address(), bytes, writable: writes ^ chance(5) });
        }
        if chance(95) {
            buffers.push(DriverBuffer { address: address(), bytes: 1, writable: true });
        }
        let table = self.memory.range(random_address(), 16 * buffers.len()).filter(|_| chance(30));
        let _ = match table {
            Some(table) => driver.add_indirect(&table, &buffers),
            None => driver.add(&buffers),
        };
    }
}

/// Writes up to `bytes` random bytes at random places.
fn noise(target: &GuestBytes, bytes: usize) {
    for _ in 0..sim::random(|random| random.usize(1..=bytes)) {
        let (at, byte) = sim::random(|random| (random.usize(..target.bytes()), random.u8(..)));
        target.write(at, &[byte]);
    }
}
