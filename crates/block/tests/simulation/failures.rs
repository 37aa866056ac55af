//! A device that fails and is repaired: a request that waits on a stopped disk is executed in the
//! end, exactly once, and cancelled requests do not wait.

use std::{cell::Cell, rc::Rc, sync::Arc};

use block::{
    disk::{CancelToken, Disk, DiskTotals, ErrorPolicies, OnError},
    layer::throttle::DiskSettings,
};
use image::{Image, RawImage};
use policy::{
    request::Direction,
    throttle::{LimitKind, Limits, RateLimit, RequestCost},
    time::Duration,
};
use reactor::{
    buffer::{IoBuffer, Segments},
    error::{Error, Result},
    now, sim, sleep_until, spawn_joinable, timeout,
};
use storage::{
    Durability, Storage, ZeroOptions,
    fault::{FaultRule, StorageRequestKind},
};

use crate::seeds;

const BLOCK: u64 = 4096;
const BLOCKS: u64 = 32;
const CLIENTS: u64 = 4;
const FOREVER: Duration = Duration::from_secs(24 * 3600);
const SECOND: Duration = Duration::from_secs(1);

/// A disk on a device where some requests of this kind fail, at most `count`, and each takes up to
/// 2 ms.
fn disk(
    kind: StorageRequestKind,
    error: Error,
    count: Option<u64>,
    probability: f64,
    policies: ErrorPolicies,
) -> Arc<Disk> {
    let seed = sim::random(|random| random.u64(..));
    let rule = FaultRule { kind: Some(kind), range: None, error, count, probability, seed };
    let latency = format!("{}us", sim::random(|random| random.u64(1..2000)));
    let storage = Storage::memory(CLIENTS * BLOCKS * BLOCK).with_faults(vec![rule]).delayed(
        format!("read={latency},write={latency},zero={latency},flush={latency}").parse().expect("valid"),
    );
    let image = Image::Raw(RawImage::new(storage));
    // A limit that is never reached: each request is charged, and none waits.
    let mut limits = Limits::default();
    *limits.limit_mut(LimitKind::IopsTotal) = RateLimit { rate: 1_000_000_000, ..RateLimit::NONE };
    let settings = DiskSettings { limits, ..DiskSettings::default() };
    let disk = Disk::new("disk", image, settings, None).expect("valid limits");
    disk.failures().set_policies(policies);
    Arc::new(disk)
}

fn on_writes(write: OnError) -> ErrorPolicies {
    ErrorPolicies { write, ..ErrorPolicies::default() }
}

async fn write(disk: &Disk, block: u64, byte: u8, cancel_token: &Arc<CancelToken>) -> Result<()> {
    let permit = disk.admit(Direction::Write, RequestCost::one(BLOCK)).await.with_cancel_token(cancel_token);
    let data = Segments::from(IoBuffer::copy_of(&[byte; BLOCK as usize]));
    disk.write(permit, block * BLOCK, data, Durability::Cached).await
}

async fn read(disk: &Disk, block: u64) -> Result<u8> {
    let permit = disk.admit(Direction::Read, RequestCost::one(BLOCK)).await;
    Ok(disk.read(permit, block * BLOCK, BLOCK as usize).await?.to_vec()[0])
}

async fn some_time(max: Duration) {
    let nanos = sim::random(|random| random.u64(..=max.as_nanos() as u64));
    sleep_until(now() + Duration::from_nanos(nanos)).await;
}

#[test]
fn writes_wait_until_a_full_device_has_space() {
    let stops = Cell::new(0);
    let seeds = seeds::for_each("--test simulation", 200, |seed| {
        stops.set(stops.get() + sim::run(seed, fill_and_make_room()));
    });
    assert!(seeds < 20 || stops.get() > seeds, "{} stops in {seeds} seeds", stops.get());
}

/// Returns how often the disk has stopped.
async fn fill_and_make_room() -> u64 {
    let failures = sim::random(|random| random.u64(1..20));
    let kind =
        [StorageRequestKind::Write, StorageRequestKind::Flush][sim::random(|random| random.usize(..2))];
    let policy = [OnError::Enospc, OnError::Stop][sim::random(|random| random.usize(..2))];
    let disk = disk(kind, Error::NO_SPACE, Some(failures), 0.3, on_writes(policy));
    let clients: Vec<_> =
        (0..CLIENTS).map(|client| spawn_joinable(work(Arc::clone(&disk), client))).collect();
    let stops = Rc::new(Cell::new(0));
    let (stopped_disk, count) = (Arc::clone(&disk), Rc::clone(&stops));
    // Resumes the disk after each stop.
    let operator = spawn_joinable(async move {
        loop {
            let failure = stopped_disk.failures().next(true).await;
            assert_eq!((failure.error, failure.direction), (Error::NO_SPACE, Direction::Write));
            count.set(count.get() + 1);
            // Requests in flight complete; then nothing happens until the disk is resumed.
            sleep_until(now() + SECOND).await;
            let before = stopped_disk.totals();
            some_time(SECOND * 100).await;
            assert_eq!(stopped_disk.totals(), before, "a stopped disk does nothing");
            assert_eq!(stopped_disk.failures().stopped_by(), Some(Error::NO_SPACE));
            assert!(stopped_disk.failures().resume());
        }
    });
    for client in clients {
        timeout(FOREVER, client).await.expect("waiting requests complete once there is space");
    }
    operator.cancel().await;
    let writes = CLIENTS * BLOCKS;
    let done = DiskTotals { writes, written_bytes: writes * BLOCK, ..disk.totals() };
    assert_eq!(disk.totals(), done, "each is counted once, when it has landed");
    assert_eq!(disk.throttle().stats().writes.requests, writes, "and has been charged once");
    let errors = disk.failures().errors();
    assert!(errors.writes + errors.flushes <= failures && errors.reads + errors.discards == 0, "{errors:?}");
    stops.get()
}

/// A client that must not see any error.
async fn work(disk: Arc<Disk>, client: u64) {
    let cancel_token = Arc::default();
    for block in client * BLOCKS..(client + 1) * BLOCKS {
        write(&disk, block, block as u8, &cancel_token).await.expect("held, not failed");
        if sim::random(fastrand::Rng::bool) {
            disk.flush().await.expect("held, not failed");
        }
        let written = sim::random(|random| random.u64(client * BLOCKS..=block));
        assert_eq!(read(&disk, written).await, Ok(written as u8));
    }
}

#[test]
fn cancelled_and_final_requests_receive_the_error() {
    seeds::for_each("--test simulation", 50, |seed| {
        sim::run(seed, async {
            let disk =
                disk(StorageRequestKind::Write, Error::NO_SPACE, None, 1.0, on_writes(OnError::Enospc));
            let cancel_token: [Arc<CancelToken>; 2] = Default::default();
            let attempt = |token: usize, block: u64| {
                let (disk, cancel_token) = (Arc::clone(&disk), Arc::clone(&cancel_token[token]));
                spawn_joinable(async move { write(&disk, block, 1, &cancel_token).await })
            };
            let (cancelled, kept) = (attempt(0, 0), attempt(1, 1));
            disk.failures().next(true).await;
            sleep_until(now() + SECOND).await;
            let (cancelled_untried, waiting_untried) = (attempt(0, 2), attempt(1, 3));
            sleep_until(now() + SECOND).await;
            cancel_token[0].cancel();
            for request in [cancelled, cancelled_untried] {
                assert_eq!(timeout(SECOND, request).await, Ok(Err(Error::NO_SPACE)));
            }
            assert!(!kept.is_finished() && !waiting_untried.is_finished(), "the other requests still wait");
            disk.failures().stop_waiting();
            for held in [kept, waiting_untried, attempt(1, 4)] {
                assert_eq!(timeout(SECOND, held).await, Ok(Err(Error::NO_SPACE)));
            }
            assert_eq!(disk.failures().stopped_by(), None);
            assert_eq!(disk.totals(), DiskTotals::default(), "nothing has landed, so nothing is counted");
        });
    });
}

#[test]
fn errors_without_stop_are_reported_and_counted() {
    let (report, enospc) = (ErrorPolicies::default(), on_writes(OnError::Enospc));
    for (kind, error, policies) in [
        (StorageRequestKind::Read, Error::IO, enospc),
        (StorageRequestKind::Write, Error::IO, enospc),
        (StorageRequestKind::Zero, Error::NO_SPACE, report),
        (StorageRequestKind::Flush, Error::NO_SPACE, report),
        (StorageRequestKind::Discard, Error::IO, report),
    ] {
        sim::run(1, async move {
            let disk = disk(kind, error, None, 1.0, policies);
            let permit = || disk.admit(Direction::Write, RequestCost::one(BLOCK));
            let result = match kind {
                StorageRequestKind::Read => read(&disk, 0).await.map(drop),
                StorageRequestKind::Write => write(&disk, 0, 1, &Arc::default()).await,
                StorageRequestKind::Zero => {
                    let options =
                        ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };
                    disk.write_zeroes(permit().await, 0, BLOCK, options).await
                }
                StorageRequestKind::Discard => {
                    disk.discard(permit().await, 0, BLOCK, Durability::Cached).await
                }
                _ => disk.flush().await,
            };
            assert_eq!(result, Err(error), "{kind:?}");
            let failure = disk.failures().next(false).await;
            assert_eq!((failure.error, failure.stops, disk.failures().stopped_by()), (error, false, None));
            let errors = disk.failures().errors();
            let counts = [errors.reads, errors.writes, errors.flushes, errors.discards];
            let expect = match kind {
                StorageRequestKind::Read => [1, 0, 0, 0],
                StorageRequestKind::Flush => [0, 0, 1, 0],
                StorageRequestKind::Discard => [0, 0, 0, 1],
                _ => [0, 1, 0, 0],
            };
            assert_eq!(counts, expect, "{kind:?}");
            assert_eq!(disk.totals(), DiskTotals::default(), "{kind:?}");
        });
    }
}
