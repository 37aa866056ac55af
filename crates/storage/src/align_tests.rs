//! `Align` over the simulated disk, compared with an array of bytes: many seeds, many requests in
//! flight, overlapping blocks.

use std::{cell::RefCell, rc::Rc};

use policy::time::Duration;

use super::*;
use reactor::{
    guest::{GuestMemory, Region},
    now, sim, sleep_until, spawn_joinable,
};

use crate::{
    Storage,
    simulated::{Behaviour, SimulatedStorage},
};

const BLOCK: usize = 512;
const SIZE: usize = 16 * BLOCK;

fn disk(seed: u64) -> (SimulatedStorage, Vec<u8>) {
    let mut content = vec![0; SIZE];
    fastrand::Rng::with_seed(seed).fill(&mut content);
    let behaviour =
        Behaviour { block_bytes: BLOCK, latency: Duration::from_micros(50), error_probability: 0.0 };
    (SimulatedStorage::new(content.clone(), behaviour), content)
}

/// Random segments of `length` bytes: own buffers or guest memory, aligned or not.
fn random_segments(mut length: usize) -> Segments {
    let mut segments = Segments::default();
    while length > 0 {
        let (piece_bytes, misalignment, is_guest_memory) =
            sim::random(|random| (random.usize(1..=length), random.usize(..2), random.bool()));
        if is_guest_memory {
            let memory = GuestMemory::new(vec![Region::on_heap(0, 0, piece_bytes + misalignment)])
                .expect("one region");
            segments.push(memory.range(misalignment as u64, piece_bytes).expect("inside"));
        } else {
            let mut buffer = IoBuffer::new(piece_bytes + misalignment);
            buffer.advance(misalignment);
            segments.push(buffer);
        }
        length -= piece_bytes;
    }
    segments
}

fn segments(bytes: &[u8]) -> Segments {
    let mut segments = random_segments(bytes.len());
    segments.copy_from(bytes);
    segments
}

async fn read(storage: &Align<SimulatedStorage>, offset: u64, length: usize) -> Vec<u8> {
    storage.read(offset, random_segments(length)).await.expect("no errors").to_vec()
}

/// Model of the clients: no request uses bytes that another request in flight uses.
struct AlignModel {
    bytes: Vec<u8>,
    busy: Vec<bool>,
}

impl AlignModel {
    /// Claims a range that no request uses: often a piece of a block, sometimes whole blocks.
    fn claim(&mut self) -> Option<Range<usize>> {
        let (start, length) = sim::random(|random| match random.u8(..4) {
            0 => (random.usize(..16) * BLOCK, random.usize(1..4) * BLOCK),
            1 => (random.usize(..SIZE), random.usize(1..3 * BLOCK)),
            _ => (random.usize(..SIZE), random.usize(1..100)),
        });
        let range = start..(start + length).min(SIZE);
        if self.busy[range.clone()].contains(&true) {
            return None;
        }
        self.busy[range.clone()].fill(true);
        Some(range)
    }
}

async fn client(storage: Rc<Align<SimulatedStorage>>, model: Rc<RefCell<AlignModel>>) {
    for _ in 0..12 {
        let Some(range) = model.borrow_mut().claim() else {
            sleep_until(now() + Duration::from_micros(10)).await;
            continue;
        };
        let (offset, length) = (range.start as u64, range.len() as u64);
        match sim::random(|random| random.u8(..5)) {
            0 => {
                let read = read(&storage, offset, range.len()).await;
                assert_eq!(read[..], model.borrow().bytes[range.clone()]);
            }
            1 => {
                let options =
                    ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };
                storage.write_zeroes(offset, length, options).await.expect("no errors");
                model.borrow_mut().bytes[range.clone()].fill(0);
            }
            _ => {
                let mut bytes = vec![0; range.len()];
                sim::random(|random| random.fill(&mut bytes));
                storage.write(offset, segments(&bytes), Durability::Cached).await.expect("no errors");
                model.borrow_mut().bytes[range.clone()].copy_from_slice(&bytes);
            }
        }
        model.borrow_mut().busy[range].fill(false);
    }
}

#[test]
fn concurrent_requests_that_share_blocks_never_touch_each_others_bytes() {
    for seed in 0..400 {
        sim::run(seed, async move {
            let (device, content) = disk(seed);
            let storage = Rc::new(Align::new(device));
            let model = Rc::new(RefCell::new(AlignModel { bytes: content, busy: vec![false; SIZE] }));
            let clients: Vec<_> =
                (0..12).map(|_| spawn_joinable(client(Rc::clone(&storage), Rc::clone(&model)))).collect();
            for client in clients {
                client.await;
            }
            let read = read(&storage, 0, SIZE).await;
            assert!(read[..] == model.borrow().bytes[..], "seed {seed}");
        });
    }
}

#[test]
fn unaligned_write_keeps_a_concurrent_write_around_it() {
    for seed in 0..400 {
        sim::run(seed, async move {
            let storage = Rc::new(Align::new(disk(seed).0));
            // Whole blocks in aligned memory: the fast path.
            let large = IoBuffer::copy_of(&[1; 2 * BLOCK]);
            let mut writes = vec![(0, Segments::from(large))];
            writes.extend([(10, segments(&[2; 5])), (BLOCK as u64 - 3, segments(&[3; 6]))]);
            sim::random(|random| random.shuffle(&mut writes));
            let writes: Vec<_> = writes
                .into_iter()
                .map(|(offset, data)| {
                    let storage = Rc::clone(&storage);
                    spawn_joinable(async move {
                        let wait = sim::random(|random| random.u64(..100_000));
                        sleep_until(now() + Duration::from_nanos(wait)).await;
                        storage.write(offset, data, Durability::Cached).await
                    })
                })
                .collect();
            for write in writes {
                write.await.expect("no errors");
            }
            let read = read(&storage, 0, 2 * BLOCK).await;
            for (at, byte) in read.iter().enumerate() {
                let expected: &[u8] = match at {
                    10..15 => &[1, 2],
                    509..515 => &[1, 3],
                    _ => &[1],
                };
                assert!(expected.contains(byte), "seed {seed}: {byte} at {at}");
            }
        });
    }
}

#[test]
fn cancelled_unaligned_write_changes_no_other_bytes() {
    for seed in 0..400 {
        sim::run(seed, async move {
            let (device, content) = disk(seed);
            let storage = Rc::new(Align::new(device));
            let cancelled_write = {
                let storage = Rc::clone(&storage);
                spawn_joinable(async move {
                    let _ = storage.write(0, segments(&[1; 10]), Durability::Cached).await;
                })
            };
            let wait = sim::random(|random| random.u64(..200_000));
            sleep_until(now() + Duration::from_nanos(wait)).await;
            cancelled_write.cancel().await;
            storage.write(10, segments(&[2; 20]), Durability::Cached).await.expect("no errors");
            sleep_until(now() + Duration::from_secs(1)).await;
            let read = read(&storage, 0, BLOCK).await;
            assert!(read[..10] == [1; 10] || read[..10] == content[..10], "seed {seed}");
            assert_eq!(read[10..30], [2; 20], "seed {seed}: acknowledged");
            assert_eq!(read[30..], content[30..BLOCK], "seed {seed}: never written");
        });
    }
}

/// A caller that waits until the storage is idle must not miss a read-modify-write that has not
/// begun to write.
#[test]
fn storage_is_busy_until_cancelled_writes_have_taken_effect() {
    let mut late = 0;
    for seed in 0..400 {
        late += u32::from(sim::run(seed, async move {
            let (device, _) = disk(seed);
            let storage = Rc::new(Storage::Simulated(Align::new(device)));
            let cancelled_write = {
                let storage = Rc::clone(&storage);
                spawn_joinable(async move {
                    let _ = storage.write(10, segments(&[1; 900]), Durability::Cached).await;
                })
            };
            let wait = sim::random(|random| random.u64(..200_000));
            sleep_until(now() + Duration::from_nanos(wait)).await;
            cancelled_write.cancel().await;
            let was_busy = storage.is_busy();
            while storage.is_busy() {
                sleep_until(now() + Duration::from_micros(1)).await;
            }
            let read = async || storage.read(0, IoBuffer::new(SIZE)).await.expect("no errors").to_vec();
            let idle = read().await;
            sleep_until(now() + Duration::from_secs(1)).await;
            assert!(read().await == idle, "seed {seed}: a write took effect later");
            was_busy
        }));
    }
    assert!(late > 40, "only {late} writes were in flight when they were cancelled");
}

#[test]
fn synchronous_and_flushed_unaligned_writes_survive_a_crash() {
    for seed in 0..200 {
        let (crashed, expected) = sim::run(seed, async move {
            let (device, mut expected) = disk(seed);
            let storage = Align::new(device);
            storage.write(700, segments(&[1; 900]), Durability::Cached).await.expect("no errors");
            storage.flush().await.expect("no errors");
            storage.write(1500, segments(&[2; 300]), Durability::Synchronous).await.expect("no errors");
            expected[700..1600].fill(1);
            expected[1500..1800].fill(2);
            (storage.device().crash(), expected)
        });
        assert!(crashed == expected, "seed {seed}");
    }
}

#[test]
fn discard_leaves_partial_blocks_alone() {
    for seed in 0..20 {
        sim::run(seed, async move {
            let (device, content) = disk(seed);
            let storage = Align::new(device);
            storage.discard(100, 3 * BLOCK as u64).await.expect("no errors");
            let read = read(&storage, 0, SIZE).await;
            assert_eq!(read[..BLOCK], content[..BLOCK]);
            assert_eq!(read[3 * BLOCK..], content[3 * BLOCK..]);
        });
    }
}

#[test]
fn out_of_range_is_an_error() {
    sim::run(1, async {
        let storage = Align::new(disk(1).0);
        let size = SIZE as u64;
        assert_eq!(storage.read(size, IoBuffer::new(1).into()).await.err(), Some(Error::INVALID));
        assert_eq!(storage.read(u64::MAX, IoBuffer::new(1).into()).await.err(), Some(Error::INVALID));
        let one_byte = || Segments::from(IoBuffer::copy_of(&[1]));
        assert_eq!(storage.write(size, one_byte(), Durability::Cached).await, Err(Error::INVALID));
        assert_eq!(storage.discard(1, u64::MAX).await, Err(Error::INVALID));
        assert_eq!(storage.block_status(0, 0).await, Err(Error::INVALID));
    });
}

/// Reads, writes and zeroes anywhere in the disk's old size, while it is shrunk to `smallest`.
async fn run_during_shrink(storage: Rc<Align<SimulatedStorage>>, smallest: usize) {
    for _ in 0..20 {
        let (start, length) = sim::random(|random| (random.usize(..SIZE), random.usize(1..3 * BLOCK)));
        let range = start..(start + length).min(SIZE);
        let offset = range.start as u64;
        let result = match sim::random(|random| random.u8(..4)) {
            0 => storage.read(offset, IoBuffer::new(range.len()).into()).await.map(drop),
            1 => {
                let options =
                    ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };
                storage.write_zeroes(offset, range.len() as u64, options).await
            }
            2 => storage.discard(offset, range.len() as u64).await,
            _ => storage.write(offset, segments(&vec![0xff; range.len()]), Durability::Cached).await,
        };
        match result {
            Err(error) => assert_eq!(error, Error::INVALID),
            Ok(()) => continue,
        }
        assert!(range.end > smallest, "a request inside failed: {range:?} of {smallest}");
    }
}

#[test]
fn shrink_rejects_requests_in_flight_beyond_the_end() {
    let mut refused = 0;
    for seed in 0..300 {
        refused += sim::run(seed, async move {
            let (device, _) = disk(seed);
            let storage = Rc::new(Align::new(device));
            let smallest = sim::random(|random| random.usize(1..16)) * BLOCK;
            let clients: Vec<_> =
                (0..6).map(|_| spawn_joinable(run_during_shrink(Rc::clone(&storage), smallest))).collect();
            let pause = sim::random(|random| random.u64(..1000));
            sleep_until(now() + Duration::from_micros(pause)).await;
            assert_eq!(storage.resize(smallest as u64).await, Ok(()));
            let waiting = clients.iter().filter(|client| !client.is_finished()).count();
            for client in clients {
                client.await;
            }
            assert_eq!(storage.size_bytes(), smallest as u64);
            assert_eq!(storage.resize(SIZE as u64).await, Ok(()));
            let added = read(&storage, smallest as u64, SIZE - smallest).await;
            assert!(added.iter().all(|&byte| byte == 0), "seed {seed}: truncated bytes reappeared");
            waiting
        });
    }
    assert!(refused > 300, "too little was in flight: {refused}");
}

#[test]
fn a_size_ends_with_a_block() {
    sim::run(1, async {
        let storage = Align::new(disk(1).0);
        let unaligned = Err(ResizeError::Unaligned { multiple: BLOCK as u64 });
        assert_eq!(storage.resize(0).await, unaligned);
        assert_eq!(storage.resize(1000).await, unaligned);
        assert_eq!(storage.size_bytes(), SIZE as u64);
    });
}

#[test]
fn a_size_is_not_read_during_a_resize() {
    sim::run(1, async move {
        let storage = Rc::new(Align::new(disk(1).0));
        let mut resize = std::pin::pin!(storage.resize(BLOCK as u64));
        let is_pending = std::future::poll_fn(|context| {
            std::task::Poll::Ready(resize.as_mut().poll(context).is_pending())
        });
        assert!(is_pending.await, "the device takes a moment");
        sleep_until(now() + Duration::from_nanos(1)).await;
        let refreshing = Rc::clone(&storage);
        let refreshed = spawn_joinable(async move { refreshing.refresh_size().await });
        assert_eq!(resize.await, Ok(()));
        assert_eq!(refreshed.await, Ok(BLOCK as u64));
    });
}

#[test]
fn cancelled_resize_excludes_writes_until_it_ends() {
    for seed in 0..50 {
        sim::run(seed, async move {
            let storage = Rc::new(Align::new(disk(seed).0));
            {
                let mut resize = std::pin::pin!(storage.resize(BLOCK as u64));
                let is_pending = std::future::poll_fn(|context| {
                    std::task::Poll::Ready(resize.as_mut().poll(context).is_pending())
                });
                assert!(is_pending.await, "the device takes a moment");
                sleep_until(now() + Duration::from_nanos(1)).await;
            }
            let written = storage.write(BLOCK as u64, random_segments(BLOCK), Durability::Cached).await;
            assert_eq!((written, storage.size_bytes()), (Err(Error::INVALID), BLOCK as u64));
        });
    }
}
