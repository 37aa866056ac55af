//! Tracking of the changes of a disk in memory.

use policy::throttle::RequestCost;

use super::*;
use crate::layer::copy_before_write::DirtyClusters;
use image::{Image, RawImage};
use policy::time::Duration;
use reactor::sim;
use storage::{
    Durability, Storage, ZeroOptions,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

const CLUSTER: u64 = 64 << 10;
const SIZE: u64 = 8 << 20;
const OPTIONS: TrackerOptions = TrackerOptions { cluster_bytes: CLUSTER, copy_bytes: 0 };
const ZEROES: ZeroOptions =
    ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };

async fn tracked(image: Image) -> TrackedDisk {
    let disk = Arc::new(Disk::new("disk", image, Default::default(), None).expect("no limits"));
    disk.begin_tracking(OPTIONS).await.expect("nothing prevents it")
}

async fn tracked_memory() -> TrackedDisk {
    tracked(Image::Raw(RawImage::new(Storage::memory(SIZE)))).await
}

async fn admit(disk: &Disk) -> AdmissionPermit {
    disk.admit(Direction::Write, RequestCost::one(1)).await
}

async fn write(disk: &Disk, offset: u64) {
    let data = reactor::buffer::IoBuffer::copy_of(&[1; 4096]).into();
    disk.write(admit(disk).await, offset, data, Durability::Cached).await.expect("memory");
}

/// Claims everything that is dirty, and returns it.
fn claim_all(tracked: &TrackedDisk) -> Vec<DirtyClusters> {
    std::iter::from_fn(|| tracked.tracker().claim(0, SIZE)).collect()
}

fn copy_all(tracked: &TrackedDisk) {
    claim_all(tracked).into_iter().for_each(DirtyClusters::done);
}

/// First byte and end of each dirty run, which are copied then.
fn dirty(tracked: &TrackedDisk) -> Vec<(u64, u64)> {
    let claims = claim_all(tracked);
    let ranges = claims.iter().map(|claim| (claim.bytes().start, claim.bytes().end)).collect();
    claims.into_iter().for_each(DirtyClusters::done);
    ranges
}

#[test]
fn each_change_marks_its_clusters() {
    sim::run(1, async {
        let tracked = tracked_memory().await;
        let disk = tracked.disk();
        assert_eq!(dirty(&tracked), [(0, SIZE)], "the copy has nothing at first");
        assert_eq!((tracked.tracker().missing_bytes(), tracked.tracker().unvisited_bytes()), (0, 0));
        write(disk, CLUSTER - 512).await;
        assert_eq!(dirty(&tracked), [(0, 2 * CLUSTER)]);
        disk.write_zeroes(admit(disk).await, 2 * CLUSTER, 1, ZEROES).await.expect("memory");
        disk.discard(admit(disk).await, 4 * CLUSTER, 1, Durability::Cached).await.expect("memory");
        assert_eq!(dirty(&tracked), [(2 * CLUSTER, 3 * CLUSTER), (4 * CLUSTER, 5 * CLUSTER)]);
        tracked.end();
        write(disk, 0).await;
        assert_eq!(tracked.tracker().missing_bytes(), 0, "not after the end");
    });
}

#[test]
fn a_change_during_a_copy_is_copied_again_and_not_at_the_same_time() {
    sim::run(1, async {
        let tracked = tracked_memory().await;
        let tracker = Arc::clone(tracked.tracker());
        copy_all(&tracked);
        write(tracked.disk(), 0).await;
        let claim = tracker.claim(0, SIZE).expect("it is dirty");
        assert!(!claim.is_first());
        write(tracked.disk(), 0).await;
        assert!(tracker.claim(0, SIZE).is_none(), "older data could overwrite newer data");
        assert!(tracker.missing_bytes() > 0);
        claim.done();
        assert_eq!(dirty(&tracked), [(0, CLUSTER)]);
    });
}

#[test]
fn a_claim_that_is_narrowed_or_not_done_stays_dirty() {
    sim::run(1, async {
        let tracked = tracked_memory().await;
        let mut claim = tracked.tracker().claim(0, 8 * CLUSTER).expect("all are dirty");
        assert!(claim.is_first() && claim.bytes() == (0..8 * CLUSTER));
        claim.narrow(CLUSTER + 1);
        assert_eq!(claim.bytes(), 0..2 * CLUSTER);
        claim.done();
        drop(tracked.tracker().claim(0, CLUSTER).expect("the rest is dirty"));
        assert_eq!(tracked.tracker().unvisited_bytes(), SIZE - 2 * CLUSTER);
        write(tracked.disk(), CLUSTER).await;
        let claims = claim_all(&tracked);
        let found: Vec<_> = claims.iter().map(|claim| (claim.bytes(), claim.is_first())).collect();
        assert_eq!(found, [(CLUSTER..2 * CLUSTER, false), (2 * CLUSTER..SIZE, true)]);
    });
}

#[test]
fn a_write_is_marked_when_it_ends_and_when_it_is_cancelled() {
    sim::run(1, async {
        let behaviour = Behaviour { latency: Duration::from_secs(1), ..Behaviour::default() };
        let device = SimulatedStorage::new(vec![0; SIZE as usize], behaviour);
        let tracked = tracked(Image::Raw(RawImage::new(Storage::Simulated(Align::new(device))))).await;
        copy_all(&tracked);
        let cancelled = reactor::timeout(Duration::from_nanos(1), write(tracked.disk(), 0)).await;
        assert!(cancelled.is_err());
        assert_eq!(dirty(&tracked), [(0, CLUSTER)], "it may have taken effect");
        let disk = Arc::clone(tracked.disk());
        let writing = reactor::spawn_joinable(async move { write(&disk, 0).await });
        reactor::yield_now().await;
        assert_eq!(dirty(&tracked), [], "the copy would read the old data");
        writing.await;
        assert_eq!(dirty(&tracked), [(0, CLUSTER)]);
    });
}

#[test]
fn a_resize_ends_the_tracking_and_a_second_job_is_refused() {
    sim::run(1, async {
        let tracked = tracked_memory().await;
        let disk = Arc::clone(tracked.disk());
        assert!(matches!(disk.begin_tracking(OPTIONS).await, Err(PointFailure::Busy)));
        disk.resize(SIZE).await.expect("memory");
        let nothing = tracked.tracker().wait_for(|| Some(())).await;
        assert_eq!(nothing, Ok(()), "the size is the same");
        disk.resize(2 * SIZE).await.expect("memory");
        let failed = tracked.tracker().wait_for(|| Some(())).await;
        assert_eq!(failed, Err(PointFailure::Resized));
        drop(tracked);
        assert!(!disk.has_job());
        drop(disk.begin_tracking(OPTIONS).await.expect("the first one has ended"));
    });
}

#[test]
fn a_write_that_was_cancelled_before_takes_effect_before_the_tracking_begins() {
    sim::run(1, async {
        let behaviour = Behaviour { latency: Duration::from_secs(1), ..Behaviour::default() };
        let device = SimulatedStorage::new(vec![0; SIZE as usize], behaviour);
        let image = Image::Raw(RawImage::new(Storage::Simulated(Align::new(device))));
        let disk = Arc::new(Disk::new("disk", image, Default::default(), None).expect("no limits"));
        let cancelled = reactor::timeout(Duration::from_nanos(1), write(&disk, 0)).await;
        assert!(cancelled.is_err());
        let tracked = disk.begin_tracking(OPTIONS).await.expect("nothing prevents it");
        assert!(!disk.image().is_changing(), "the copy would lack it");
        drop(tracked);
    });
}
