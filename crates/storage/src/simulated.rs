//! A simulated disk: slow and out of order. After a crash, only flushed data is certain to survive.
//!
//! ```text
//!   write ─► in flight ──(takes effect)──► cached ──(flush completed after it did)──► durable
//!                 │                          │                                          │
//!   crash:        └──── each lost, applied whole or torn at blocks, in any order ───────┤
//!                                                                                       ▼
//!                                                                              content of the disk
//! ```
//!
//! Latencies, errors, tearing and order come from the reactor's seed. A request that is not aligned
//! to the block size fails an assertion: the code above ([`Align`](super::align::Align)) must not
//! submit it.
//!
//! As with a kernel, dropping a request's future does not cancel the request.
//!
//! A request that was in flight at the crash never completes: its future stays pending, like that
//! of a client on a crashed machine.

use std::{
    collections::BTreeMap,
    future::pending,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};

use policy::time::Duration;

use super::{
    BlockSize, Durability, Extent, ZeroOptions,
    align::{AlignedDevice, Alignment, ZeroCopyDevice},
    resize::ResizeError,
};
use reactor::{
    buffer::Segments,
    error::{Error, Result},
    now, sim, sleep_until, spawn_detached,
    ublk::RegisteredData,
};

/// Parameters of a simulated disk.
#[derive(Clone, Copy, Debug)]
pub struct Behaviour {
    /// Block size in bytes, a power of two; the disk's size is a multiple of it.
    pub block_bytes: usize,
    /// Maximum time to take effect, and again to complete; each is uniform from zero to this.
    pub latency: Duration,
    /// Probability that a request fails with EIO, 0 to 1. A failed write may be applied in part.
    pub error_probability: f64,
}

impl Default for Behaviour {
    fn default() -> Self {
        Self { block_bytes: 4096, latency: Duration::from_millis(1), error_probability: 0.0 }
    }
}

/// A simulated disk. Clones share the disk.
#[derive(Clone, Debug)]
pub struct SimulatedStorage {
    behaviour: Behaviour,
    state: Arc<Mutex<SimulatedStorageState>>,
}

/// Counters of the requests that a simulated disk has received.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SimulatedStorageCounters {
    /// Reads and queries of the allocation status.
    pub reads: u64,
    /// Bytes read.
    pub read_bytes: u64,
    /// Writes, write-zeroes and discards.
    pub writes: u64,
    /// Bytes written, zeroed and discarded.
    pub written_bytes: u64,
    /// Flushes.
    pub flushes: u64,
}

/// A write that is not durable yet.
#[derive(Debug)]
struct SimulatedWrite {
    first_block: usize,
    /// `None` for a block that a newer, durable write covers.
    blocks: Vec<Option<Box<[u8]>>>,
    completed: bool,
}

#[derive(Debug)]
struct SimulatedStorageState {
    /// Content that survives any crash.
    durable: Vec<u8>,
    /// Content that reads return.
    visible: Vec<u8>,
    /// Accepted writes that have not taken effect.
    in_flight: BTreeMap<u64, SimulatedWrite>,
    /// Visible writes that are not durable, in the order in which they took effect.
    cached: BTreeMap<u64, SimulatedWrite>,
    next_number: u64,
    crashed: bool,
    traffic: SimulatedStorageCounters,
}

impl SimulatedStorage {
    /// Creates a disk with this content.
    ///
    /// # Panics
    /// Panics if the block size is not a power of two, or the content's length not a multiple of
    /// it.
    pub fn new(content: Vec<u8>, behaviour: Behaviour) -> Self {
        assert!(
            behaviour.block_bytes.is_power_of_two() && content.len().is_multiple_of(behaviour.block_bytes)
        );
        let state = SimulatedStorageState {
            durable: content.clone(),
            visible: content,
            in_flight: BTreeMap::new(),
            cached: BTreeMap::new(),
            next_number: 0,
            crashed: false,
            traffic: SimulatedStorageCounters::default(),
        };
        Self { behaviour, state: Arc::new(Mutex::new(state)) }
    }

    /// Counters so far.
    pub fn traffic(&self) -> SimulatedStorageCounters {
        self.lock().traffic
    }

    /// True if a write, of a cancelled request too, has not taken effect.
    pub(crate) fn is_busy(&self) -> bool {
        !self.lock().in_flight.is_empty()
    }

    /// Reads the whole range, as a page cache does on a hint.
    pub(super) async fn will_need(&self, length: u64) {
        self.count_read(length);
        self.random_delay().await;
    }

    fn count_read(&self, length: u64) {
        let traffic = &mut self.lock().traffic;
        traffic.reads += 1;
        traffic.read_bytes += length;
    }

    fn count_write(&self, length: u64) {
        let traffic = &mut self.lock().traffic;
        traffic.writes += 1;
        traffic.written_bytes += length;
    }

    /// Crashes the disk and returns its content after the crash. No request completes from then on.
    ///
    /// # Panics
    /// Panics outside the simulation.
    pub fn crash(&self) -> Vec<u8> {
        let mut state = self.lock();
        state.crashed = true;
        let mut content = std::mem::take(&mut state.durable);
        let cached = std::mem::take(&mut state.cached).into_values();
        let mut writes: Vec<_> = cached.chain(std::mem::take(&mut state.in_flight).into_values()).collect();
        sim::random(|random| {
            random.shuffle(&mut writes);
            for write in writes {
                // Fate of a write: 0 applies all blocks, 1 tears it at random blocks, 2 loses it.
                let outcome = random.u8(..3);
                for (block, data) in write.numbered() {
                    let applied = outcome == 0 || outcome == 1 && random.bool();
                    if applied {
                        put(&mut content, block, data);
                    }
                }
            }
        });
        content
    }

    fn lock(&self) -> MutexGuard<'_, SimulatedStorageState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits for a random time; never returns once the disk has crashed.
    async fn random_delay(&self) {
        let limit = self.behaviour.latency.as_nanos() as u64;
        let nanos = sim::random(|random| random.u64(..=limit));
        sleep_until(now() + Duration::from_nanos(nanos)).await;
        if self.lock().crashed {
            pending::<()>().await;
        }
    }

    fn chance_of_error(&self) -> bool {
        sim::random(fastrand::Rng::f64) < self.behaviour.error_probability
    }

    fn check(&self, offset: u64, length: usize) {
        let block = self.behaviour.block_bytes;
        assert!(
            (offset as usize).is_multiple_of(block) && length.is_multiple_of(block),
            "a request for {length} bytes at {offset} reached a disk of {block}-byte blocks"
        );
        assert!(offset as usize + length <= self.lock().visible.len(), "a request past the end of the disk");
    }

    /// Executes a write from acceptance to completion, even if the future is dropped.
    async fn put(&self, offset: u64, data: &[u8], durability: Durability) -> Result<()> {
        self.check(offset, data.len());
        let number = self.lock().accept(offset, data, self.behaviour.block_bytes);
        let disk = self.clone();
        let task = async move { disk.complete_write(number, durability).await };
        spawn_detached(task).await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn complete_write(&self, number: u64, durability: Durability) -> Result<()> {
        self.random_delay().await;
        if self.chance_of_error() {
            self.lock().fail_write(number);
            return Err(Error::IO);
        }
        let number = self.lock().take_effect(number);
        self.random_delay().await;
        let mut state = self.lock();
        // Still cached: a flush makes only completed writes durable.
        if let Some(write) = state.cached.get_mut(&number) {
            write.completed = true;
            if durability == Durability::Synchronous {
                state.persist(number);
            }
        }
        Ok(())
    }
}

impl SimulatedWrite {
    fn numbered(&self) -> impl Iterator<Item = (usize, &[u8])> {
        (self.first_block..).zip(&self.blocks).filter_map(|(block, data)| Some((block, data.as_deref()?)))
    }
}

fn put(content: &mut [u8], block: usize, data: &[u8]) {
    content[block * data.len()..][..data.len()].copy_from_slice(data);
}

impl SimulatedStorageState {
    fn number(&mut self) -> u64 {
        self.next_number += 1;
        self.next_number
    }

    fn accept(&mut self, offset: u64, data: &[u8], block_bytes: usize) -> u64 {
        let number = self.number();
        let blocks = data.chunks(block_bytes).map(|block| Some(block.into())).collect();
        let write = SimulatedWrite { first_block: offset as usize / block_bytes, blocks, completed: false };
        self.in_flight.insert(number, write);
        number
    }

    /// Makes a write visible; returns its new number, which orders it among the cached writes.
    fn take_effect(&mut self, number: u64) -> u64 {
        let write = self.in_flight.remove(&number).expect("takes effect once");
        for (block, data) in write.numbered() {
            put(&mut self.visible, block, data);
        }
        let number = self.number();
        self.cached.insert(number, write);
        number
    }

    /// Fails a write, some of whose blocks may have been written.
    fn fail_write(&mut self, number: u64) {
        let mut write = self.in_flight.remove(&number).expect("fails once");
        for block in &mut write.blocks {
            if sim::random(fastrand::Rng::bool) {
                *block = None;
            }
        }
        self.in_flight.insert(number, write);
        self.take_effect(number);
    }

    /// Takes effect at once and durably: no client relies on when a size becomes durable.
    fn resize(&mut self, size_bytes: usize, block_bytes: usize) {
        assert!(self.in_flight.is_empty(), "a write is on its way while the disk is resized");
        for write in self.cached.values_mut() {
            write.blocks.truncate((size_bytes / block_bytes).saturating_sub(write.first_block));
        }
        self.visible.resize(size_bytes, 0);
        self.durable.resize(size_bytes, 0);
    }

    /// Makes a cached write durable. Older cached writes lose the blocks that it covers.
    fn persist(&mut self, number: u64) {
        let Some(write) = self.cached.remove(&number) else { return };
        for (block, data) in write.numbered() {
            put(&mut self.durable, block, data);
            for (_, older) in self.cached.range_mut(..number) {
                if let Some(index) = block.checked_sub(older.first_block)
                    && let Some(covered) = older.blocks.get_mut(index)
                {
                    *covered = None;
                }
            }
        }
    }
}

impl AlignedDevice for SimulatedStorage {
    fn alignment(&self) -> Alignment {
        Alignment { offset: self.behaviour.block_bytes as u64, memory: self.behaviour.block_bytes.min(512) }
    }

    fn page_bytes(&self) -> u64 {
        1
    }

    fn size_bytes(&self) -> u64 {
        self.lock().visible.len() as u64
    }

    async fn refresh_size(&self) -> Result<u64> {
        Ok(self.size_bytes())
    }

    async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        self.random_delay().await;
        self.lock().resize(size_bytes as usize, self.behaviour.block_bytes);
        Ok(())
    }

    fn description(&self) -> String {
        format!("simulated, {} bytes, blocks of {}", self.size_bytes(), self.behaviour.block_bytes)
    }

    fn read_only(&self) -> bool {
        false
    }

    fn block_size(&self) -> BlockSize {
        BlockSize { minimum: self.behaviour.block_bytes as u32, preferred: 4096 }
    }

    fn can_zero_fast(&self) -> bool {
        true
    }

    async fn read(&self, offset: u64, mut target: Segments) -> Result<Segments> {
        let length = target.len();
        self.check(offset, length);
        self.count_read(length as u64);
        self.random_delay().await;
        match self.lock().visible.get(offset as usize..offset as usize + length) {
            Some(bytes) => target.copy_from(bytes),
            // Truncated meanwhile: a resize does not lock out reads.
            None => return Err(Error::INVALID),
        }
        self.random_delay().await;
        if self.chance_of_error() { Err(Error::IO) } else { Ok(target) }
    }

    async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let mut bytes = vec![0; data.len()];
        data.copy_to(&mut bytes);
        self.count_write(bytes.len() as u64);
        self.put(offset, &bytes, durability).await
    }

    async fn read_buffered(&self, _offset: u64, _target: Segments) -> Result<Segments> {
        unreachable!("the size is a multiple of the block, so there is no tail")
    }

    async fn write_buffered(&self, _offset: u64, _data: Segments, _durability: Durability) -> Result<()> {
        unreachable!("the size is a multiple of the block, so there is no tail")
    }

    async fn flush(&self) -> Result<()> {
        // Covers only writes that completed before the flush began, as the contract says.
        self.lock().traffic.flushes += 1;
        let covered: Vec<u64> = {
            let state = self.lock();
            state.cached.iter().filter(|(_, write)| write.completed).map(|(&number, _)| number).collect()
        };
        self.random_delay().await;
        if self.chance_of_error() {
            return Err(Error::IO);
        }
        // In sequence, so that a crash may find only some of them durable.
        for number in covered {
            if sim::random(|random| random.u8(..8)) == 0 {
                self.random_delay().await;
            }
            self.lock().persist(number);
        }
        self.random_delay().await;
        Ok(())
    }

    async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        self.count_write(length);
        self.put(offset, &vec![0; length as usize], options.durability).await
    }

    async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.count_write(length);
        // A hint: a real disk may ignore it and keep the old bytes.
        if sim::random(fastrand::Rng::bool) {
            self.put(offset, &vec![0; length as usize], Durability::Cached).await?;
        }
        Ok(())
    }

    async fn block_status(&self, _offset: u64, length: u64) -> Result<Vec<Extent>> {
        self.count_read(0);
        Ok(vec![Extent { length, hole: false, zero: false }])
    }
}

impl ZeroCopyDevice for SimulatedStorage {
    async fn read_registered(&self, offset: u64, buffer: &RegisteredData) -> Option<Result<()>> {
        let guest_bytes = buffer.place()?.clone();
        Some(self.read(offset, guest_bytes.into()).await.map(drop))
    }

    async fn write_registered(
        &self,
        offset: u64,
        buffer: &RegisteredData,
        durability: Durability,
    ) -> Option<Result<()>> {
        let guest_bytes = buffer.place()?.clone();
        Some(self.write(offset, guest_bytes.into(), durability).await)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use reactor::{buffer::IoBuffer, spawn, spawn_joinable};

    const BLOCK: usize = 512;
    const BEHAVIOUR: Behaviour =
        Behaviour { block_bytes: BLOCK, latency: Duration::from_micros(100), error_probability: 0.0 };

    async fn write(disk: &SimulatedStorage, block: usize, blocks: usize, byte: u8) {
        let data = IoBuffer::copy_of(&vec![byte; blocks * BLOCK]);
        disk.write((block * BLOCK) as u64, data.into(), Durability::Cached).await.expect("no errors here");
    }

    #[test]
    fn flushed_writes_survive_a_crash_and_others_may_be_lost_or_torn() {
        let mut outcomes = HashSet::new();
        for seed in 0..200 {
            let content = sim::run(seed, async {
                let disk = SimulatedStorage::new(vec![0; 4 * BLOCK], BEHAVIOUR);
                write(&disk, 0, 2, 1).await;
                disk.flush().await.expect("no errors here");
                write(&disk, 1, 2, 2).await;
                let writer = disk.clone();
                spawn(async move { write(&writer, 3, 1, 3).await });
                disk.crash()
            });
            let blocks: Vec<u8> = content.iter().step_by(BLOCK).copied().collect();
            assert_eq!(blocks[0], 1, "seed {seed}: flushed");
            assert!(
                [1, 2].contains(&blocks[1]) && [0, 2].contains(&blocks[2]) && [0, 3].contains(&blocks[3])
            );
            outcomes.insert(blocks);
        }
        assert_eq!(outcomes.len(), 8, "lost, applied and torn all happen: {outcomes:?}");
    }

    #[test]
    fn a_flushed_write_is_not_undone_by_an_older_one() {
        for seed in 0..200 {
            let content = sim::run(seed, async {
                let disk = SimulatedStorage::new(vec![0; BLOCK], BEHAVIOUR);
                write(&disk, 0, 1, 1).await;
                let data = IoBuffer::copy_of(&[2; BLOCK]).into();
                disk.write(0, data, Durability::Synchronous).await.expect("no errors here");
                disk.crash()
            });
            assert_eq!(content[0], 2, "seed {seed}");
        }
    }

    #[test]
    fn completes_out_of_order_and_never_after_a_crash() {
        let mut orders = HashSet::new();
        for seed in 0..50 {
            let order = sim::run(seed, async {
                let disk = SimulatedStorage::new(vec![0; 8 * BLOCK], BEHAVIOUR);
                let (sender, receiver) = async_channel::unbounded();
                for block in 0..3 {
                    let (disk, sender) = (disk.clone(), sender.clone());
                    spawn(async move {
                        write(&disk, block, 1, 1).await;
                        sender.send(block).await.expect("the receiver lives");
                    });
                }
                let mut order = Vec::new();
                for _ in 0..3 {
                    order.push(receiver.recv().await.expect("three writes complete"));
                }
                let late_writer = disk.clone();
                let lost_write = spawn_joinable(async move { write(&late_writer, 0, 1, 1).await });
                disk.crash();
                sleep_until(now() + Duration::from_secs(1)).await;
                assert!(!lost_write.is_finished());
                order
            });
            orders.insert(order);
        }
        assert_eq!(orders.len(), 6, "every order of three");
    }

    #[test]
    #[should_panic(expected = "reached a disk of 512-byte blocks")]
    fn unaligned_requests_are_an_assertion() {
        sim::run(1, async {
            let disk = SimulatedStorage::new(vec![0; BLOCK], BEHAVIOUR);
            let _ = disk.read(1, IoBuffer::new(1).into()).await;
        });
    }
}
