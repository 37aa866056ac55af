//! Rates of a backup: spare capacity, a weight, or limits of its own.

use std::sync::Arc;

use block::{
    disk::Disk,
    layer::throttle::{BackgroundSettings, DiskSettings, GroupSettings, ThrottleGroup},
};
use image::{Image, RawImage};
use jobs::{
    backup::{Backup, BackupSizes, BackupTarget},
    job::{Job, JobKind, JobResult, JobStatus},
};
use policy::{
    request::Direction,
    throttle::{LimitKind, Limits, RateLimit, RequestCost},
    time::Duration,
};
use reactor::{now, sim, sleep_until, spawn_joinable};
use storage::Storage;

const MIB: u64 = 1 << 20;
/// Limit of the group in bytes per second.
const RATE: u64 = 16 * MIB;
const REQUEST: u64 = 64 << 10;
/// Time for which a case runs.
const TIME_S: u64 = 4;

fn limits(rate: u64) -> Limits {
    let mut limits = Limits::default();
    *limits.limit_mut(LimitKind::BpsTotal) = RateLimit { rate, ..RateLimit::NONE };
    limits
}

/// A disk with data, which is not sparse.
async fn disk(limit: u64, group: Option<&Arc<ThrottleGroup>>) -> Arc<Disk> {
    let content = vec![7; 64 * MIB as usize];
    let image = Image::Raw(RawImage::new(Storage::with_content(&content).await));
    let settings = DiskSettings { limits: limits(limit), ..DiskSettings::default() };
    Arc::new(Disk::new("disk", image, settings, group).expect("valid"))
}

fn group() -> Arc<ThrottleGroup> {
    let settings = GroupSettings { limits: limits(RATE), ..GroupSettings::default() };
    ThrottleGroup::new("group", settings, None).expect("valid")
}

async fn start(disk: &Arc<Disk>, settings: BackgroundSettings) -> Arc<Job> {
    let job = Job::new("backup-disk", JobKind::Backup);
    let image = Arc::new(Image::Raw(RawImage::new(Storage::memory(disk.size_bytes()))));
    let target = BackupTarget { image, is_zero: true };
    let backup = Backup::begin(&job, disk, target, settings, BackupSizes::default()).await.expect("valid");
    let concluded = Arc::clone(&job);
    reactor::spawn(async move {
        let result = backup.run().await;
        concluded.conclude(result);
    });
    job
}

/// Bytes per second that a guest is admitted, with at most `bps` of demand.
async fn guest(disk: Arc<Disk>, bps: u64) -> u64 {
    let end = now() + Duration::from_millis(TIME_S * 1000);
    let pause = Duration::from_nanos(1_000_000_000 * REQUEST / bps);
    let mut admitted = 0;
    let mut next = now();
    while now() < end {
        let _ = disk.admit(Direction::Read, RequestCost::one(REQUEST)).await;
        admitted += REQUEST;
        next = (next + pause).max(now());
        sleep_until(next).await;
    }
    admitted / TIME_S
}

/// Runs a guest with this demand beside a backup; returns the rates of both in MiB/s.
async fn rates(disk: &Arc<Disk>, demand: u64, settings: BackgroundSettings) -> (u64, u64) {
    let job = start(disk, settings).await;
    let guest = spawn_joinable(guest(Arc::clone(disk), demand)).await;
    let JobStatus { progress, .. } = job.status();
    job.cancel().expect("it is running");
    assert_eq!(job.concluded().await, JobResult::Cancelled);
    (guest / MIB, progress.copied_bytes / MIB / TIME_S)
}

#[test]
fn a_backup_gets_what_the_members_of_the_group_leave() {
    sim::run(1, async {
        let group = group();
        let disk = disk(0, Some(&group)).await;
        let (guest, backup) = rates(&disk, 12 * MIB, BackgroundSettings::default()).await;
        assert!(guest >= 11, "the guest is not delayed: {guest}");
        assert!((3..=4).contains(&backup), "{backup}");
    });
}

#[test]
fn a_backup_gets_almost_nothing_beside_a_guest_at_the_limit() {
    sim::run(1, async {
        let group = group();
        let disk = disk(0, Some(&group)).await;
        let (guest, backup) = rates(&disk, 1000 * MIB, BackgroundSettings::default()).await;
        assert!(guest >= 16, "{guest}");
        assert_eq!(backup, 0);
    });
}

#[test]
fn a_weight_gives_a_share() {
    sim::run(1, async {
        let group = group();
        let disk = disk(0, Some(&group)).await;
        let settings = BackgroundSettings { weight: Some(100), ..BackgroundSettings::default() };
        let (guest, backup) = rates(&disk, 1000 * MIB, settings).await;
        assert!((7..=9).contains(&guest) && (7..=9).contains(&backup), "{guest} and {backup}");
    });
}

#[test]
fn limits_of_the_backup_apply_with_and_without_a_group() {
    sim::run(1, async {
        let settings = BackgroundSettings { bps_total: 2 * MIB, ..BackgroundSettings::default() };
        for group in [None, Some(group())] {
            let disk = disk(0, group.as_ref()).await;
            let (_, backup) = rates(&disk, MIB, settings).await;
            assert!((1..=2).contains(&backup), "{backup}");
        }
    });
}

#[test]
fn without_a_group_a_backup_gets_what_the_disks_own_limits_leave() {
    sim::run(1, async {
        let disk = disk(RATE, None).await;
        let (guest, backup) = rates(&disk, 12 * MIB, BackgroundSettings::default()).await;
        assert!(guest >= 11 && (3..=4).contains(&backup), "{guest} and {backup}");
    });
}
