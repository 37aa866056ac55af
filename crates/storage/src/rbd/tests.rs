//! [`RbdStorage`] over the fake: bytes against a model, slots, durability, a lost lock, sizes; and
//! the hand-over between processes in [`hand_over`].

mod hand_over;

use std::{cell::RefCell, rc::Rc};

use proptest::prelude::*;

use super::{
    fake::{FakeRbd, OBJECT, full_of},
    *,
};
use reactor::{
    buffer::IoBuffer,
    guest::{GuestMemory, Region},
    now, sim, sleep_until, spawn_joinable, yield_now,
};

use crate::align::Align;

const SIZE: usize = 64 * OBJECT as usize;

fn rbd(fake: &FakeRbd, cache: CacheMode, read_only: bool) -> Align<RbdStorage<FakeRbd>> {
    opened(fake, RbdOptions { cache, read_only, force_share: false, passed: None })
}

fn opened(fake: &FakeRbd, options: RbdOptions) -> Align<RbdStorage<FakeRbd>> {
    let address = RbdAddress::read("vms/vm1").expect("an address");
    Align::new(RbdStorage::new(fake.clone(), &address, address.name(), options, SIZE as u64))
}

fn zeroes(may_unmap: bool) -> ZeroOptions {
    ZeroOptions { may_unmap, only_if_fast: false, durability: Durability::Cached }
}

async fn read(image: &Align<RbdStorage<FakeRbd>>, offset: u64, length: usize) -> Result<Vec<u8>> {
    Ok(image.read(offset, IoBuffer::new(length).into()).await?.to_vec())
}

#[derive(Clone, Debug)]
enum RbdStep {
    Write(u64, usize, u8),
    Zero(u64, u64, bool),
    Discard(u64, u64),
    Flush,
    Resize(u64),
}

fn step() -> impl Strategy<Value = RbdStep> {
    let range = || (0..SIZE as u64, 1..3 * OBJECT);
    prop_oneof![
        4 => (range(), 1_u8..).prop_map(|((at, length), byte)| RbdStep::Write(at, length as usize, byte)),
        2 => (range(), any::<bool>()).prop_map(|((at, length), unmap)| RbdStep::Zero(at, length, unmap)),
        2 => range().prop_map(|(at, length)| RbdStep::Discard(at, length)),
        1 => Just(RbdStep::Flush),
        1 => (1..128_u64).prop_map(|sectors| RbdStep::Resize(sectors * 4096)),
    ]
}

proptest! {
    #[test]
    fn bytes_are_as_in_a_vector(steps in prop::collection::vec(step(), 1..60), seed: u64) {
        sim::run(seed, async move {
            let fake = FakeRbd::new(SIZE);
            let image = rbd(&fake, CacheMode::None, false);
            let mut model = vec![0_u8; SIZE];
            for step in steps {
                let inside = |at: u64, length: u64| at + length <= model.len() as u64;
                match step {
                    RbdStep::Write(at, length, byte) => {
                        let expected = inside(at, length as u64);
                        let result = image.write(at, full_of(byte, length), Durability::Cached).await;
                        assert_eq!(result.is_ok(), expected);
                        if expected {
                            model[at as usize..at as usize + length].fill(byte);
                        }
                    }
                    RbdStep::Zero(at, length, unmap) => {
                        let expected = inside(at, length);
                        assert_eq!(image.write_zeroes(at, length, zeroes(unmap)).await.is_ok(), expected);
                        if expected {
                            model[at as usize..(at + length) as usize].fill(0);
                        }
                    }
                    RbdStep::Discard(at, length) => {
                        let expected = inside(at, length);
                        assert_eq!(image.discard(at, length).await.is_ok(), expected);
                        if expected {
                            model[at as usize..(at + length) as usize].fill(0);
                        }
                    }
                    RbdStep::Flush => assert_eq!(image.flush().await, Ok(())),
                    RbdStep::Resize(size) => {
                        assert_eq!(image.resize(size).await, Ok(()));
                        model.resize(size as usize, 0);
                    }
                }
                let content = read(&image, 0, model.len()).await.expect("it is there");
                assert!(content == model, "another content");
                // Holes are zero, and the extents cover the requested range, in order.
                let extents = image.block_status(0, model.len() as u64).await.expect("it is known");
                let mut at = 0;
                for Extent { length, hole, zero } in extents {
                    let bytes = &model[at..at + length as usize];
                    assert_eq!(hole, zero);
                    assert!(!zero || bytes.iter().all(|&byte| byte == 0), "a hole that is none at {at}");
                    at += length as usize;
                }
                assert_eq!(at, model.len());
            }
        });
    }
}

#[test]
fn flushed_and_fua_writes_survive() {
    sim::run(1, async {
        let fake = FakeRbd::new(SIZE).with_cache();
        let image = rbd(&fake, CacheMode::Writeback, false);
        image.write(0, full_of(1, 512), Durability::Cached).await.expect("written");
        assert_eq!(fake.after_a_crash()[0], 0, "it is in the cache");
        image.flush().await.expect("flushed");
        assert_eq!(fake.after_a_crash()[511], 1);
        image.write(512, full_of(2, 512), Durability::Synchronous).await.expect("written");
        assert_eq!(fake.after_a_crash()[512], 2);
        let through = rbd(&fake, CacheMode::Writethrough, false);
        through.write(1024, full_of(3, 512), Durability::Cached).await.expect("written");
        assert_eq!(fake.after_a_crash()[1024], 3);
        let unsafe_image = rbd(&fake, CacheMode::Unsafe, false);
        unsafe_image.write(2048, full_of(4, 512), Durability::Synchronous).await.expect("written");
        unsafe_image.flush().await.expect("nothing is done");
        assert_eq!(fake.after_a_crash()[2048], 0);
    });
}

#[test]
fn hung_cluster_holds_a_bounded_number_of_requests() {
    for seed in 0..20 {
        sim::run(seed, async {
            let fake = FakeRbd::new(SIZE);
            let image = Rc::new(rbd(&fake, CacheMode::None, false));
            assert_eq!(image.device().oldest_request(), None);
            fake.stop_answering();
            let started = now();
            let tasks: Vec<_> = (0..3 * slots::SLOTS)
                .map(|_| {
                    let image = Rc::clone(&image);
                    spawn_joinable(async move { read(&image, 0, 512).await.map(drop) })
                })
                .collect();
            sleep_until(started + Duration::from_secs(7)).await;
            let oldest = image.device().oldest_request().expect("there are some");
            assert!(oldest > Duration::from_millis(6_900) && oldest <= Duration::from_secs(7), "{oldest:?}");
            assert_eq!(fake.max_in_flight(), slots::SLOTS);
            // A cancelled request keeps its slot until the cluster has completed it.
            let mut tasks = tasks;
            drop(tasks.drain(..slots::SLOTS));
            sleep_until(now() + Duration::from_secs(1)).await;
            assert_eq!(fake.max_in_flight(), slots::SLOTS);
            fake.resume_answering();
            for task in tasks {
                assert_eq!(task.await, Ok(()));
            }
            while image.device().oldest_request().is_some() {
                sleep_until(now() + Duration::from_millis(1)).await;
            }
        });
    }
}

#[test]
fn reads_in_flight_are_no_changes() {
    sim::run(1, async {
        let fake = FakeRbd::new(SIZE);
        let image = Rc::new(rbd(&fake, CacheMode::None, false));
        fake.stop_answering();
        let reading = spawn_joinable({
            let image = Rc::clone(&image);
            async move { read(&image, 0, 512).await.map(drop) }
        });
        sleep_until(now() + Duration::from_secs(1)).await;
        assert!(image.device().oldest_request().is_some() && !image.device().is_changing());
        let writing = spawn_joinable({
            let image = Rc::clone(&image);
            async move { image.write(512, full_of(2, 512), Durability::Cached).await }
        });
        sleep_until(now() + Duration::from_secs(1)).await;
        assert!(image.device().is_changing());
        // Also if its client has cancelled it.
        drop(writing);
        sleep_until(now() + Duration::from_secs(1)).await;
        assert!(image.device().is_changing());
        fake.resume_answering();
        assert_eq!(reading.await, Ok(()));
        while image.device().is_changing() {
            sleep_until(now() + Duration::from_millis(1)).await;
        }
    });
}

#[test]
fn blocklisted_writer_fails_all_requests() {
    sim::run(1, async {
        let fake = FakeRbd::new(SIZE);
        let image = rbd(&fake, CacheMode::None, false);
        image.write(0, full_of(1, 512), Durability::Cached).await.expect("written");
        fake.blocklist_self();
        assert_eq!(image.write(0, full_of(2, 512), Durability::Cached).await, Err(Error::IO));
        assert_eq!(image.flush().await, Err(Error::IO));
        let before = fake.max_in_flight();
        assert_eq!(read(&image, 0, 512).await, Err(Error::IO));
        assert_eq!(image.block_status(0, 512).await, Err(Error::IO));
        assert_eq!(fake.max_in_flight(), before, "no further request reached the cluster");
        assert_eq!(fake.after_a_crash()[0], 1);
    });
}

#[test]
fn cluster_errors_map_to_client_errors() {
    sim::run(1, async {
        let fake = FakeRbd::new(SIZE);
        let image = rbd(&fake, CacheMode::None, false);
        for (errno, expected) in [
            (libc::ENOSPC, Error::NO_SPACE),
            (libc::EDQUOT, Error::NO_SPACE),
            (libc::ENOENT, Error::IO),
            (libc::ETIMEDOUT, Error::IO),
        ] {
            fake.fail(1, errno);
            assert_eq!(image.write(0, full_of(1, 512), Durability::Cached).await, Err(expected));
        }
        assert_eq!(image.write(0, full_of(1, 512), Durability::Cached).await, Ok(()), "it continues");
        fake.fail(1, libc::EIO);
        assert_eq!(image.flush().await, Err(Error::IO));
        assert_eq!(image.flush().await, Ok(()), "the next one asks again");
    });
}

#[test]
fn read_only_image_rejects_changes() {
    sim::run(1, async {
        let image = rbd(&FakeRbd::new(SIZE), CacheMode::None, true);
        let denied = Err(Error::NOT_PERMITTED);
        assert_eq!(image.write(0, full_of(1, 512), Durability::Cached).await, denied);
        assert_eq!(image.write_zeroes(0, 512, zeroes(true)).await, denied);
        assert_eq!(image.discard(0, 512).await, denied);
        assert_eq!(image.resize(4096).await, Err(ResizeError::ReadOnly));
        assert_eq!(read(&image, 0, 512).await.map(|bytes| bytes.len()), Ok(512));
    });
}

#[test]
fn removed_read_only_image_fails_reads() {
    sim::run(1, async {
        let fake = FakeRbd::new(SIZE);
        let image = rbd(&fake, CacheMode::None, true);
        assert_eq!(image.device().poll_interval(), Some(POLL_INTERVAL));
        assert_eq!(image.device().poll_size().await, Ok(SIZE as u64));
        assert!(read(&image, 0, 512).await.is_ok());
        fake.remove_from_outside();
        assert_eq!(image.device().poll_size().await, Ok(SIZE as u64));
        assert_eq!(read(&image, 0, 512).await, Err(Error::IO));
        assert_eq!(rbd(&fake, CacheMode::None, false).device().poll_interval(), None);
    });
}

#[test]
fn external_resize_is_noticed() {
    sim::run(1, async {
        let fake = FakeRbd::new(SIZE);
        let image = Rc::new(rbd(&fake, CacheMode::None, false));
        let sizes = Rc::new(RefCell::new(Vec::new()));
        let watch = {
            let (image, sizes) = (Rc::clone(&image), Rc::clone(&sizes));
            spawn_joinable(async move {
                for _ in 0..2 {
                    image.device().resize_notifier().notified().await;
                    let size = image.device().poll_size().await;
                    sizes.borrow_mut().push(size);
                }
            })
        };
        yield_now().await;
        fake.resize_from_outside(2 * SIZE);
        while sizes.borrow().is_empty() {
            yield_now().await;
        }
        assert_eq!(image.size_bytes(), 2 * SIZE as u64);
        image.write(SIZE as u64, full_of(1, 512), Durability::Cached).await.expect("inside");
        // Shrunk, and read before the notification was processed.
        fake.resize_from_outside(4096);
        assert!(read(&image, SIZE as u64, 512).await.is_err());
        watch.await;
        assert_eq!(*sizes.borrow(), [Ok(2 * SIZE as u64), Ok(4096)]);
        assert_eq!(read(&image, SIZE as u64, 512).await, Err(Error::INVALID));
    });
}

#[test]
fn zeroing_is_split_and_thick_zeroes_are_not_fast() {
    sim::run(1, async {
        let fake = FakeRbd::new(0);
        fake.resize_from_outside(600 << 20);
        let image = rbd(&fake, CacheMode::None, false);
        image.resize(600 << 20).await.expect("resized");
        image.write_zeroes(4096, (600 << 20) - 4096, zeroes(true)).await.expect("zeroed");
        assert!(fake.longest() <= 256 << 20, "{}", fake.longest());
        let fast = ZeroOptions { only_if_fast: true, ..zeroes(false) };
        assert_eq!(image.write_zeroes(0, 4096, fast).await, Err(Error::UNSUPPORTED));
        assert_eq!(image.block_status(0, 4096).await.map(|all| all[0].hole), Ok(true));
        image.write_zeroes(0, 4096, zeroes(false)).await.expect("zeroed");
        assert_eq!(image.block_status(0, 4096).await.map(|all| all[0].hole), Ok(false), "allocated");
    });
}

#[test]
fn without_object_map_everything_is_data() {
    sim::run(1, async {
        let image = rbd(&FakeRbd::new(SIZE).without_map(), CacheMode::None, false);
        let full_extent = Extent { length: SIZE as u64, hole: false, zero: false };
        assert_eq!(image.block_status(0, SIZE as u64).await, Ok(vec![full_extent]));
    });
}

#[test]
fn extents_are_bounded() {
    let pieces: Vec<_> = (0..MAX_EXTENTS as u64 / 2).map(|n| n * 20 + 10..n * 20 + 20).collect();
    let all = extents(&(0..1_000_000), &pieces, true);
    assert_eq!(all.len(), MAX_EXTENTS);
    assert_eq!(all.iter().map(|extent| extent.length).sum::<u64>(), pieces.last().expect("one").end);
    let with_rest = extents(&(0..1_000_000), &pieces[..3], false);
    assert_eq!(with_rest.iter().map(|extent| extent.length).sum::<u64>(), 1_000_000);
    // Objects extend beyond both ends.
    let clamped = extents(&(100..200), &[50..120, 180..300], false);
    let lengths: Vec<_> = clamped.iter().map(|extent| (extent.length, extent.hole)).collect();
    assert_eq!(lengths, [(20, false), (60, true), (20, false)]);
}

#[test]
fn a_guest_s_memory_is_read_into_and_written_from() {
    sim::run(1, async {
        let fake = FakeRbd::new(SIZE);
        let image = rbd(&fake, CacheMode::None, false);
        let memory = GuestMemory::new(vec![Region::on_heap(0, 0, 4096)]).expect("one region");
        let guest_bytes = memory.range(0, 4096).expect("inside");
        guest_bytes.fill(0, 4096, 9);
        image.write(0, guest_bytes.clone().into(), Durability::Cached).await.expect("written");
        guest_bytes.fill(0, 4096, 0);
        image.read(0, guest_bytes.clone().into()).await.expect("read");
        let mut bytes = [0; 4096];
        guest_bytes.read(0, &mut bytes);
        assert_eq!(bytes, [9; 4096]);
    });
}

#[test]
fn close_reaches_the_backend() {
    sim::run(1, async {
        let fake = FakeRbd::new(SIZE);
        let image = rbd(&fake, CacheMode::None, false);
        image.device().close().await.expect("closed");
        assert!(fake.is_closed());
    });
}
