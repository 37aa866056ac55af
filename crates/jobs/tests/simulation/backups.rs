//! Backups of a disk that guests change.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use block::{disk::Disk, layer::throttle::BackgroundSettings};
use jobs::{
    backup::{Backup, BackupOptions, BackupSizes},
    job::{Job, JobKind, JobResult, JobState},
    target::JobTarget,
};
use policy::time::Duration;
use reactor::{now, sim, sleep_until, spawn_joinable, timeout};

use crate::{
    guest::{DiskModel, UNIT, chance, check_disk, resizes, short_time, start_guests},
    seeds,
    world::World,
};

/// Longer than any run; a run that exceeds it waits for a lost wake-up.
pub(crate) const FOREVER: Duration = Duration::from_millis(24 * 3600 * 1000);

/// Results of all seeds: a simulation whose backups never fail or complete would prove nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Results {
    completed: u64,
    cancelled: u64,
    full: u64,
    failed: u64,
}

#[test]
fn a_backup_equals_the_disk_at_its_instant() {
    let results = Rc::new(Cell::new(Results::default()));
    let seeds = seeds::for_each("--test simulation", 300, |seed| {
        let results = Rc::clone(&results);
        sim::run(seed, async move {
            timeout(FOREVER, run(&results)).await.expect("everything ends within a day of virtual time");
        });
    });
    let Results { completed, cancelled, full, failed } = results.get();
    if seeds >= 100 {
        assert!(
            [completed, cancelled, full, failed].iter().all(|&count| count > seeds / 50),
            "too little happened in {seeds} seeds: {:?}",
            results.get()
        );
    }
}

async fn run(results: &Cell<Results>) {
    let units = sim::random(|random| random.u64(4..50)) * 8;
    let max_units = units + sim::random(|random| random.u64(0..4)) * 8;
    let world = World::draw(units, max_units * UNIT + if chance(30) { 4096 } else { 0 }).await;
    let model = Rc::new(RefCell::new(DiskModel::new(world.numbers.clone())));
    let may_fail = Rc::new(Cell::new(world.source_may_fail));
    let tasks = start_guests(&world.disk, &model, &may_fail, resizes(units, max_units));
    sleep_until(now() + short_time()).await;
    // Small, so that it is reached in some seeds.
    let max_buffer_bytes = if chance(40) { sim::random(|random| random.u64(0..8000)) } else { 64 << 20 };
    let sizes = BackupSizes { cluster_bytes: 1 << sim::random(|random| random.u32(9..15)), max_buffer_bytes };
    let backup = one_backup(&world.disk, &model, &world.target, sizes);
    let result = backup.await;
    for task in tasks {
        task.await;
    }
    let mut counts = results.get();
    match result {
        JobResult::Completed => counts.completed += 1,
        JobResult::Cancelled => counts.cancelled += 1,
        JobResult::Failed(error) if error.contains("buffer") || error.contains("cut off") => {
            assert!(max_buffer_bytes < 64 << 20, "{error}");
            counts.full += 1;
        }
        JobResult::Failed(error) => {
            let is_source = error.contains("the disk cannot be read");
            let is_expected = if is_source { world.source_may_fail } else { world.target_may_fail };
            assert!(is_expected, "{error}");
            counts.failed += 1;
        }
    }
    results.set(counts);
    assert!(!world.disk.has_job(), "nothing remains of the backup");
    let model = model.borrow().clone();
    check_disk(&world.disk, &model, world.source_may_fail).await;
}

/// Runs a backup, and compares the target with the disk at the instant.
async fn one_backup(
    disk: &Arc<Disk>,
    model: &Rc<RefCell<DiskModel>>,
    target: &JobTarget,
    sizes: BackupSizes,
) -> JobResult {
    let job = Job::new("backup-disk", JobKind::Backup);
    let settings = BackgroundSettings {
        bps_total: if chance(50) { sim::random(|random| 1 << random.u32(16..24)) } else { 0 },
        iops_total: if chance(10) { sim::random(|random| random.u64(10..2000)) } else { 0 },
        weight: chance(30).then(|| sim::random(|random| random.u32(1..1000))),
    };
    let options = BackupOptions { settings, sizes, bitmap: None };
    let backup =
        Backup::begin(&job, disk, target.clone(), options.clone()).await.expect("nothing prevents it");
    // No other task has run since the instant.
    let at_instant = model.borrow().clone();
    assert!(disk.has_job());
    let refused = Backup::begin(&job, disk, target.clone(), options).await.expect_err("one is running");
    assert!(refused.to_string().contains("another job"), "{refused}");
    let operator = spawn_joinable(operate(Arc::clone(&job)));
    let result = backup.run().await;
    job.conclude(result.clone());
    assert_eq!(job.concluded().await, result);
    drop(operator);
    if result == JobResult::Completed {
        let size_bytes = at_instant.units.len() as u64 * UNIT;
        let progress = job.status().progress;
        assert_eq!(progress.done_bytes, size_bytes, "each byte is done once");
        // Read repeatedly: the target's reads may fail.
        let found = loop {
            if let Ok(found) = target.image.read(0, size_bytes as usize).await {
                break found.to_vec();
            }
        };
        at_instant.check("the backup", 0, &found);
    }
    result
}

/// Pauses, resumes and cancels at random.
pub(crate) async fn operate(job: Arc<Job>) {
    if chance(30) {
        sleep_until(now() + short_time()).await;
        if job.pause().is_ok() {
            sleep_until(now() + short_time()).await;
            // The old data of changes may have failed it meanwhile.
            let is_resumed = job.resume().is_ok();
            let has_ended = matches!(job.state(), JobState::Aborting | JobState::Concluded);
            assert!(is_resumed || has_ended, "it is paused, and nothing else resumes it");
        }
    }
    if chance(15) {
        sleep_until(now() + short_time()).await;
        let _ = job.cancel();
    }
}
