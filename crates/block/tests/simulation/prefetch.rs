//! Read-ahead on the data path with slow storage. Correctness of the data under read-ahead is
//! tested by `disks` and `qcow2`, whose disks have prefetch caches with all settings.

use std::{cell::Cell, rc::Rc, sync::Arc};

use block::{disk::Disk, layer::throttle::DiskSettings};
use image::{
    Image, Qcow2Image, RawImage,
    qcow2::{
        Qcow2Components,
        create::{CreateOptions, create},
    },
};
use policy::{
    prefetch::{PrefetchConfig, PrefetchMode},
    request::Direction,
    throttle::RequestCost,
    time::Duration,
};
use reactor::{buffer::IoBuffer, now, sim, sleep_until, spawn_joinable};
use storage::{
    Durability, Storage,
    align::Align,
    fault::{FaultRule, StorageRequestKind},
    rate::{RateBudget, RateOptions},
    simulated::{Behaviour, SimulatedStorage},
};

use crate::seeds;

const BLOCK: usize = 4096;
const MIB: usize = 1 << 20;

fn disk(storage: Storage, settings: PrefetchConfig) -> Arc<Disk> {
    disk_of(Image::Raw(RawImage::new(storage)), settings)
}

fn disk_of(image: Image, settings: PrefetchConfig) -> Arc<Disk> {
    let disk = Disk::new("disk", image, DiskSettings::default(), None).expect("no limits");
    disk.prefetch().set(settings).expect("in range");
    Arc::new(disk)
}

fn slow(size_bytes: usize, delay: &str) -> Storage {
    let memory = Storage::memory(size_bytes as u64);
    memory.delayed(delay.parse().expect("valid"))
}

async fn read(disk: &Disk, block: usize) -> reactor::error::Result<u8> {
    let permit = disk.admit(Direction::Read, RequestCost::one(BLOCK as u64)).await;
    let data = disk.read(permit, (block * BLOCK) as u64, BLOCK).await?;
    assert_eq!(data.len(), BLOCK);
    Ok(data.to_vec()[0])
}

async fn write(disk: &Disk, block: usize, byte: u8) {
    let mut data = IoBuffer::new(BLOCK);
    data.fill(byte);
    let permit = disk.admit(Direction::Write, RequestCost::one(BLOCK as u64)).await;
    let offset = (block * BLOCK) as u64;
    disk.write(permit, offset, data.into(), Durability::Cached).await.expect("the disk is sound");
}

#[test]
fn a_read_ahead_that_a_write_overtakes_is_never_served() {
    let overtaken = Rc::new(Cell::new(0));
    let count = seeds::for_each("--test simulation", 500, |seed| {
        let overtaken = Rc::clone(&overtaken);
        sim::run(seed, async move {
            let behaviour = Behaviour { latency: Duration::from_millis(10), ..Behaviour::default() };
            let device = SimulatedStorage::new(vec![1; 64 * BLOCK], behaviour);
            let disk = disk(Storage::Simulated(Align::new(device)), PrefetchConfig::default());
            for block in 0..3 {
                read(&disk, block).await.expect("sound");
            }
            // Blocks 3 to 34 are in flight.
            let block = sim::random(|random| random.usize(3..35));
            sleep_until(now() + Duration::from_micros(sim::random(|random| random.u64(..5000)))).await;
            // A read of another block in flight, which must wait for its read-ahead.
            let other = spawn_joinable({
                let (disk, other) = (Arc::clone(&disk), if block == 34 { 3 } else { block + 1 });
                async move { read(&disk, other).await }
            });
            sleep_until(now() + Duration::from_micros(1)).await;
            // If it waits for a read-ahead, then the block that is overwritten now is in flight
            // too.
            let was_overtaken = disk.prefetch().stats().waited > 0;
            write(&disk, block, 2).await;
            assert_eq!(other.await, Ok(1));
            assert_eq!(read(&disk, block).await, Ok(2), "block {block}");
            sleep_until(now() + Duration::from_secs(1)).await;
            assert_eq!(read(&disk, block).await, Ok(2), "block {block}, later");
            overtaken.set(overtaken.get() + u64::from(was_overtaken));
        });
    });
    assert!(
        overtaken.get() >= count / 10,
        "{} of {count} writes overtook a read-ahead in flight",
        overtaken.get()
    );
}

#[test]
fn slow_storage_is_read_nearly_as_fast_by_one_request_at_a_time_as_by_many() {
    sim::run(1, async {
        // 200 MB/s with a latency of 5 ms: a disk behind a network.
        let (size, rate) = (64 * MIB, 200_000_000);
        let budget = Arc::new(RateBudget::new(RateOptions { read: Some(rate), ..RateOptions::default() }));
        let storage = slow(size, "read=5ms").with_rate(budget);
        let disk = disk(storage, PrefetchConfig { mode: PrefetchMode::On, ..PrefetchConfig::default() });
        let began = now();
        for block in 0..size / BLOCK {
            read(&disk, block).await.expect("sound");
        }
        let seconds = (now() - began).as_secs_f64();
        let utilization = size as f64 / seconds / rate as f64;
        assert!(utilization >= 0.8, "{:.0} % of the bandwidth", utilization * 100.0);
    });
}

#[test]
fn failed_read_ahead_is_reported_by_the_read_only() {
    sim::run(1, async {
        let bad: FaultRule = FaultRule {
            kind: Some(StorageRequestKind::Read),
            range: Some((20 * BLOCK) as u64..(21 * BLOCK) as u64),
            error: reactor::error::Error::IO,
            count: None,
            probability: 1.0,
            seed: 0,
        };
        let storage = slow(MIB, "read=1ms").with_faults(vec![bad]);
        let disk = disk(storage, PrefetchConfig::default());
        for block in 0..60 {
            let expect = if block == 20 { Err(reactor::error::Error::IO) } else { Ok(0) };
            assert_eq!(read(&disk, block).await, expect, "block {block}");
        }
        assert!(disk.prefetch().stats().hits > 10);
    });
}

#[test]
fn close_waits_for_read_aheads() {
    sim::run(1, async {
        let disk = disk(slow(MIB, "read=50ms"), PrefetchConfig::default());
        for block in 0..2 {
            read(&disk, block).await.expect("sound");
        }
        let reader = |block| {
            let disk = Arc::clone(&disk);
            spawn_joinable(async move { read(&disk, block).await })
        };
        // The read-ahead of the third read arrives together with it.
        let (third, fourth) = (reader(2), reader(3));
        let began = now();
        sleep_until(began + Duration::from_millis(25)).await;
        disk.close().await.expect("memory");
        assert_eq!(now() - began, Duration::from_millis(50));
        assert_eq!((third.await, fourth.await), (Ok(0), Ok(0)));
        assert_eq!(disk.prefetch().stats().memory_bytes, 0);
        // Still readable, but without read-ahead.
        for block in 4..20 {
            read(&disk, block).await.expect("sound");
        }
        assert_eq!(disk.prefetch().stats().memory_bytes, 0);
    });
}

#[test]
fn auto_mode_does_not_read_ahead_from_memory() {
    sim::run(1, async {
        let memory = || Storage::memory(MIB as u64);
        for mode in [PrefetchMode::Auto, PrefetchMode::On] {
            let disk = disk(memory(), PrefetchConfig { mode, ..PrefetchConfig::default() });
            for block in 0..100 {
                read(&disk, block).await.expect("sound");
            }
            let hits = disk.prefetch().stats().hits;
            assert_eq!(
                (disk.prefetch().settings().mode, hits > 0),
                (mode, mode == PrefetchMode::On),
                "{hits} hits"
            );
        }
    });
}

#[test]
fn read_ahead_is_fair_among_a_hundred_readers() {
    const READERS: usize = 100;
    sim::run(1, async {
        let size = READERS * 8 * MIB;
        let budget =
            Arc::new(RateBudget::new(RateOptions { read: Some(600_000_000), ..RateOptions::default() }));
        let storage = slow(size, "read=100us").with_rate(budget);
        let settings = PrefetchConfig { memory_bytes: 64 << 20, ..PrefetchConfig::default() };
        let disk = disk(storage, settings);
        let answered: Rc<Vec<Cell<usize>>> = Rc::new((0..READERS).map(|_| Cell::new(0)).collect());
        let readers: Vec<_> = (0..READERS)
            .map(|reader| {
                let (disk, answered) = (Arc::clone(&disk), Rc::clone(&answered));
                spawn_joinable(async move {
                    for block in 0.. {
                        read(&disk, reader * (8 * MIB / BLOCK) + block).await.expect("sound");
                        answered[reader].set(block + 1);
                    }
                })
            })
            .collect();
        sleep_until(now() + Duration::from_secs(1)).await;
        let total: usize = answered.iter().map(Cell::get).sum();
        let slowest = answered.iter().map(Cell::get).min().expect("there are readers");
        for reader in readers {
            reader.cancel().await;
        }
        assert!(
            slowest * READERS * 3 >= total,
            "the slowest had {slowest} of {total}: {answered:?} {:?}",
            disk.prefetch().stats()
        );
        assert!(total * BLOCK > 400_000_000, "{total} in a second");
    });
}

#[test]
fn holes_are_not_read_ahead() {
    sim::run(1, async {
        let storage = slow(512, "read=100us");
        let options = CreateOptions { size_bytes: 4 * MIB as u64, ..CreateOptions::default() };
        create(&storage, None, &options).await.expect("memory");
        let image = Qcow2Image::open(Qcow2Components::of(storage)).await.expect("new");
        let disk = disk_of(Image::Qcow2(image), PrefetchConfig::default());
        write(&disk, 512, 7).await;
        for block in 0..4 * MIB / BLOCK {
            assert_eq!(read(&disk, block).await, Ok(if block == 512 { 7 } else { 0 }));
        }
        let stats = disk.prefetch().stats();
        // The only allocated cluster.
        assert_eq!(stats.read_ahead_bytes, 65536);
        assert!(stats.hits > 10, "{stats:?}");
    });
}
