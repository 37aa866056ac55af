//! Rates of a backup: spare capacity, a weight, or limits of its own.

use std::sync::Arc;

use block::{
    disk::Disk,
    layer::throttle::{BackgroundSettings, DiskSettings, GroupSettings, ThrottleGroup},
};
use image::{Image, RawImage};
use jobs::{
    backup::{Backup, BackupOptions, BackupSizes},
    job::{Job, JobKind, JobResult, JobStatus},
    target::JobTarget,
};
use policy::{
    latency_target::{RateCap, UNIT_BYTES},
    request::Direction,
    throttle::{LimitKind, Limits, RateLimit, RequestCost},
    time::Duration,
};
use reactor::{buffer::IoBuffer, now, sim, sleep_until, spawn_joinable, timeout};
use storage::{
    Durability, Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

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
    let target = JobTarget { image, is_zero: true, is_overlay: false, may_unmap: true };
    let options = BackupOptions { settings, ..BackupOptions::default() };
    let backup = Backup::begin(&job, disk, target, options).await.expect("valid");
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

#[test]
fn the_disks_own_limits_hold_back_a_backup_in_a_group() {
    sim::run(1, async {
        let group = group();
        let disk = disk(RATE / 2, Some(&group)).await;
        let (guest, backup) = rates(&disk, 6 * MIB, BackgroundSettings::default()).await;
        assert!(guest >= 5 && (1..=2).contains(&backup), "{guest} and {backup}");
    });
}

#[test]
fn the_cap_of_a_latency_target_holds_back_a_backup_with_and_without_a_weight() {
    sim::run(1, async {
        for (weight, has_group) in [(None, false), (None, true), (Some(100), true)] {
            let group = has_group.then(group);
            let disk = disk(0, group.as_ref()).await;
            // 4 MiB per second.
            disk.throttle().set_cap(Some(RateCap::new(4 * MIB / UNIT_BYTES)));
            let settings = BackgroundSettings { weight, ..BackgroundSettings::default() };
            let (guest, backup) = rates(&disk, MIB, settings).await;
            assert!(guest <= 1 && (2..=4).contains(&backup), "{weight:?}: {guest} and {backup}");
            assert!(disk.throttle().take_cap_wait(), "the controller sees that it waits");
        }
    });
}

#[test]
fn an_invalid_weight_is_an_error() {
    sim::run(1, async {
        let disk = disk(0, None).await;
        for weight in [0, 20_000] {
            let job = Job::new("backup-disk", JobKind::Backup);
            let image = Arc::new(Image::Raw(RawImage::new(Storage::memory(disk.size_bytes()))));
            let target = JobTarget { image, is_zero: true, is_overlay: false, may_unmap: true };
            let settings = BackgroundSettings { weight: Some(weight), ..BackgroundSettings::default() };
            let options = BackupOptions { settings, ..BackupOptions::default() };
            let refused = Backup::begin(&job, &disk, target, options).await;
            let error = refused.expect_err("out of range").to_string();
            assert!(error.contains("from 1 to 10000"), "{error}");
            assert!(!disk.has_job());
        }
    });
}

#[test]
fn a_paused_backup_copies_nothing_that_waited_for_admission() {
    sim::run(1, async {
        let group = group();
        let disk = disk(0, Some(&group)).await;
        let job = start(&disk, BackgroundSettings::default()).await;
        let guest = spawn_joinable(guest(Arc::clone(&disk), 1000 * MIB));
        let wait_s = async |seconds| sleep_until(now() + Duration::from_secs(seconds)).await;
        wait_s(1).await;
        job.pause().expect("it is running");
        guest.await;
        let copied = |job: &Job| job.status().progress.copied_bytes;
        let before = copied(&job);
        wait_s(2).await;
        assert_eq!(copied(&job), before);
        job.resume().expect("it is paused");
        wait_s(2).await;
        assert!(copied(&job) > before);
        job.cancel().expect("it is running");
        job.concluded().await;
    });
}

#[test]
fn a_target_that_does_not_answer_cannot_keep_a_failed_backup() {
    sim::run(1, async {
        let disk = disk(0, None).await;
        let job = Job::new("backup-disk", JobKind::Backup);
        let device = SimulatedStorage::new(vec![0; 64 * MIB as usize], Behaviour::default());
        // No request completes from now on.
        device.crash();
        let image = Arc::new(Image::Raw(RawImage::new(Storage::Simulated(Align::new(device)))));
        // A cluster for each task that writes old data, so that all of them wait for the target.
        let sizes = BackupSizes { max_buffer_bytes: 256 << 10, ..BackupSizes::default() };
        let target = JobTarget { image, is_zero: false, is_overlay: false, may_unmap: true };
        let options = BackupOptions { sizes, ..BackupOptions::default() };
        let backup = Backup::begin(&job, &disk, target, options).await.expect("valid");
        let running = spawn_joinable(backup.run());
        sleep_until(now() + Duration::from_secs(1)).await;
        // Beyond what the copies in flight have read.
        for offset in (32 * MIB..33 * MIB).step_by(64 << 10) {
            let permit = disk.admit(Direction::Write, RequestCost::one(4096)).await;
            let data = IoBuffer::copy_of(&[1; 4096]).into();
            disk.write(permit, offset, data, Durability::Cached).await.expect("memory");
            sleep_until(now() + Duration::from_millis(1)).await;
        }
        let result = timeout(Duration::from_secs(1), running).await.expect("at once");
        let JobResult::Failed(error) = result else { panic!("{result:?}") };
        assert!(error.contains("buffer of 0 MiB is full"), "{error}");
        assert!(!disk.has_job(), "the disk is free");
    });
}
