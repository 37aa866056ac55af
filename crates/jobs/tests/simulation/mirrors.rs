//! Mirrors of a disk that guests change, and the disk after it was moved to the target.

use std::{
    cell::{Cell, RefCell},
    rc::Rc,
    sync::Arc,
};

use block::{
    disk::Disk,
    layer::throttle::{BackgroundSettings, DiskSettings},
};
use image::{Image, RawImage};
use jobs::{
    job::{Completion, Job, JobKind, JobResult, JobState},
    mirror::{MAX_PAUSE, Mirror, MirrorEnd, MirrorSizes},
    target::JobTarget,
};
use policy::{request::Direction, throttle::RequestCost, time::Duration};
use reactor::{JoinHandle, buffer::IoBuffer, now, sim, sleep_until, spawn_joinable, timeout};
use storage::{
    Durability, Storage,
    align::Align,
    simulated::{Behaviour, SimulatedStorage},
};

use crate::{
    guest::{DiskModel, UNIT, chance, check_disk, short_time, start_guests},
    seeds,
    world::{World, reopen},
};

/// Longer than any run; a run that exceeds it waits for a lost wake-up.
const FOREVER: Duration = Duration::from_millis(24 * 3600 * 1000);
/// Time after which the operator cancels a mirror that cannot be completed.
const PATIENCE: Duration = Duration::from_secs(300);

/// Results of all seeds: a simulation whose mirrors never fail or complete would prove nothing.
#[derive(Clone, Copy, Debug, Default)]
struct Results {
    switched: u64,
    crashed: u64,
    stayed: u64,
    cancelled: u64,
    cancelled_when_ready: u64,
    failed: u64,
    too_slow: u64,
    refused: u64,
}

#[test]
fn a_mirrored_disk_keeps_its_content_before_and_after_the_switch() {
    let results = Rc::new(Cell::new(Results::default()));
    let seeds = seeds::for_each("--test simulation", 300, |seed| {
        let results = Rc::clone(&results);
        sim::run(seed, async move {
            timeout(FOREVER, run(&results)).await.expect("everything ends within a day of virtual time");
        });
    });
    let Results { switched, crashed, stayed, cancelled, cancelled_when_ready, failed, too_slow, refused } =
        results.get();
    if seeds >= 100 {
        let counts = [switched, crashed, stayed, cancelled, cancelled_when_ready, failed, too_slow, refused];
        assert!(
            counts.iter().all(|&count| count > seeds / 100),
            "too little happened in {seeds} seeds: {:?}",
            results.get()
        );
    }
}

async fn run(results: &Cell<Results>) {
    let units = sim::random(|random| random.u64(4..50)) * 8;
    let world = World::draw(units, units * UNIT).await;
    let model = Rc::new(RefCell::new(DiskModel::new(world.numbers.clone())));
    let may_fail = Rc::new(Cell::new(world.source_may_fail));
    let guests = start_guests(&world.disk, &model, &may_fail, units..=units);
    sleep_until(now() + short_time()).await;
    let (mut counts, job) = (results.get(), Job::new("mirror-disk", JobKind::Mirror));
    let Some(mirror) = begin(&job, &world).await else {
        join(guests).await;
        return;
    };
    let operator = spawn_joinable(operate(Arc::clone(&job)));
    let owner = spawn_joinable(answer(Arc::clone(&job)));
    let end = mirror.run().await;
    // No other task has run since the switch.
    let at_end = model.borrow().clone();
    let crashed = (end.replaced.is_some() && chance(30)).then(|| world.target_device.crash());
    job.conclude(end.result.clone());
    let seen = operator.await;
    owner.await;
    counts.too_slow += u64::from(seen.is_slow);
    counts.refused += u64::from(seen.is_refused);
    assert!(!world.disk.has_job(), "nothing remains of the mirror");
    let MirrorEnd { result, replaced, .. } = end;
    match (&result, &replaced) {
        (JobResult::Completed, Some(_)) => counts.switched += 1,
        (JobResult::Completed, None) => counts.stayed += 1,
        (JobResult::Cancelled, _) => {
            counts.cancelled += 1;
            counts.cancelled_when_ready += u64::from(seen.is_ready);
        }
        (JobResult::Failed(error), _) => {
            let is_source = error.contains("the disk cannot be read") || error.contains("image of the disk");
            let is_expected = if is_source { world.source_may_fail } else { world.target_may_fail };
            assert!(is_expected, "{error}");
            counts.failed += 1;
        }
    }
    let Some(replaced) = replaced else {
        assert!(!Arc::ptr_eq(&world.disk.image(), &world.target.image), "the disk stays on its image");
        if result == JobResult::Completed {
            check_image(&world.target.image, &at_end, "the target of a mirror that stays").await;
        }
        join(guests).await;
        let model = model.borrow().clone();
        check_disk(&world.disk, &model, world.source_may_fail).await;
        return results.set(counts);
    };
    assert!(Arc::ptr_eq(&world.disk.image(), &world.target.image), "the disk uses the target");
    may_fail.set(world.source_may_fail || world.target_may_fail);
    if let Some(content) = crashed {
        counts.crashed += 1;
        results.set(counts);
        let target = reopen(&world.target.image, &content).await;
        let found = check_image(&target, &at_end, "a crash at the switch").await;
        let before = check_image(&replaced, &at_end, "the replaced image").await;
        // Cancelled changes included: a client may have read them.
        assert!(found == before, "the target equals the replaced image");
        for guest in guests {
            guest.cancel().await;
        }
        return;
    }
    check_image(&replaced, &at_end, "the replaced image").await;
    join(guests).await;
    let model = model.borrow().clone();
    check_disk(&world.disk, &model, may_fail.get()).await;
    // Errors of a qcow2 image may make it read-only, without a flush.
    while let Err(error) = world.disk.flush().await {
        assert!(world.target_may_fail, "{error}");
        if world.disk.image().is_read_only() {
            return results.set(counts);
        }
    }
    let content = world.target_device.crash();
    check_image(&reopen(&world.target.image, &content).await, &model, "a crash after a flush").await;
    results.set(counts);
}

/// Begins a mirror; `None` if an error of the source has prevented it.
async fn begin(job: &Arc<Job>, world: &World) -> Option<Mirror> {
    let (disk, target) = (&world.disk, &world.target);
    let settings = BackgroundSettings {
        bps_total: if chance(50) { sim::random(|random| 1 << random.u32(16..24)) } else { 0 },
        iops_total: if chance(10) { sim::random(|random| random.u64(10..2000)) } else { 0 },
        weight: chance(30).then(|| sim::random(|random| random.u32(1..1000))),
    };
    let max_pause = match chance(30) {
        true => Duration::from_micros(sim::random(|random| random.u64(..20_000))),
        false => MirrorSizes::default().max_pause,
    };
    let sizes = MirrorSizes { cluster_bytes: 1 << sim::random(|random| random.u32(9..15)), max_pause };
    let mirror = Mirror::begin(job, disk, target.clone(), settings, sizes).await;
    let mirror = match mirror {
        Ok(mirror) => mirror,
        Err(error) => {
            assert!(world.source_may_fail && !disk.has_job(), "{error}");
            return None;
        }
    };
    let refused =
        Mirror::begin(job, disk, target.clone(), settings, sizes).await.expect_err("one is running");
    assert!(refused.to_string().contains("another job"), "{refused}");
    Some(mirror)
}

/// What an operator has seen of a job.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// It was ready.
    is_ready: bool,
    /// An attempt to complete it has failed.
    is_slow: bool,
    /// The owner of the disk has refused the switch.
    is_refused: bool,
}

/// Answers the questions of a job, as the owner of its disk.
async fn answer(job: Arc<Job>) {
    loop {
        let changed = job.changed().listen();
        if job.state() == JobState::Concluded {
            return;
        }
        if job.is_asking() {
            if chance(30) {
                sleep_until(now() + short_time()).await;
            }
            job.answer(if chance(80) { Ok(()) } else { Err("refused".to_owned()) });
        }
        changed.await;
    }
}

/// Pauses, resumes, cancels and completes at random.
async fn operate(job: Arc<Job>) -> Seen {
    let mut seen = Seen::default();
    if chance(30) {
        sleep_until(now() + short_time()).await;
        if job.pause().is_ok() {
            sleep_until(now() + short_time()).await;
            let _ = job.resume();
        }
    }
    if chance(15) {
        sleep_until(now() + short_time()).await;
        let _ = job.cancel();
    }
    let is_over = |state| matches!(state, JobState::Ready | JobState::Concluded);
    if timeout(PATIENCE, wait_for_state(&job, is_over)).await.is_err() {
        let _ = job.cancel();
    }
    seen.is_ready = job.state() == JobState::Ready;
    sleep_until(now() + short_time()).await;
    if chance(10) {
        let _ = job.cancel();
    }
    let completion = if chance(80) { Completion::Switch } else { Completion::Stay };
    let _ = job.complete(completion);
    if chance(15) {
        sleep_until(now() + short_time()).await;
        let _ = job.cancel();
    }
    let ended = async {
        loop {
            let changed = job.changed().listen();
            let status = job.status();
            seen.is_slow |= status.remark.as_ref().is_some_and(|remark| remark.contains("next attempt"));
            seen.is_refused |= status.remark.is_some_and(|remark| remark == "refused");
            if status.state == JobState::Concluded {
                return;
            }
            if status.state == JobState::Ready && !status.is_completing && job.complete(completion).is_ok() {
                continue;
            }
            changed.await;
        }
    };
    if timeout(PATIENCE, ended).await.is_err() {
        let _ = job.cancel();
        job.concluded().await;
    }
    seen
}

async fn wait_for_state(job: &Job, is_reached: impl Fn(JobState) -> bool) {
    loop {
        let changed = job.changed().listen();
        if is_reached(job.state()) {
            return;
        }
        changed.await;
    }
}

async fn join(guests: Vec<JoinHandle<()>>) {
    for guest in guests {
        guest.await;
    }
}

/// Reads an image, whose reads may fail, and compares it with the model.
async fn check_image(image: &Image, model: &DiskModel, event: &str) -> Vec<u8> {
    let found = loop {
        if let Ok(found) = image.read(0, model.units.len() * UNIT as usize).await {
            break found.to_vec();
        }
    };
    model.check(event, 0, &found);
    found
}

#[test]
fn a_slow_target_delays_a_change_by_one_pause_at_most() {
    sim::run(1, async {
        let size_bytes = 1 << 20;
        let image = Image::Raw(RawImage::new(Storage::memory(size_bytes)));
        let disk = Arc::new(Disk::new("disk", image, DiskSettings::default(), None).expect("no limits"));
        let behaviour = Behaviour { latency: Duration::from_secs(1), ..Behaviour::default() };
        let device = SimulatedStorage::new(vec![0; size_bytes as usize], behaviour);
        let image = Arc::new(Image::Raw(RawImage::new(Storage::Simulated(Align::new(device)))));
        let target = JobTarget { image, is_zero: true, is_overlay: false, may_unmap: true };
        let job = Job::new("mirror-disk", JobKind::Mirror);
        let sizes = MirrorSizes::default();
        let mirror = Mirror::begin(&job, &disk, target, BackgroundSettings::default(), sizes).await;
        let running = spawn_joinable(mirror.expect("nothing prevents it").run());
        reactor::spawn({
            let job = Arc::clone(&job);
            async move {
                loop {
                    let changed = job.changed().listen();
                    job.answer(Ok(()));
                    changed.await;
                }
            }
        });
        wait_for_state(&job, |state| state == JobState::Ready).await;
        job.complete(Completion::Switch).expect("it is ready");
        let (mut longest, mut was_slow) = (Duration::from_nanos(0), false);
        for _ in 0..4000 {
            sleep_until(now() + Duration::from_millis(20)).await;
            let began = now();
            let permit = disk.admit(Direction::Write, RequestCost::one(4096)).await;
            let data = IoBuffer::copy_of(&[1; 4096]).into();
            disk.write(permit, 0, data, Durability::Cached).await.expect("memory");
            longest = longest.max(now() - began);
            was_slow |= job.status().remark.is_some_and(|remark| remark.contains("next attempt"));
        }
        assert!(
            was_slow && longest > Duration::from_nanos(0) && longest <= MAX_PAUSE,
            "{was_slow} {longest:?}"
        );
        let remark = job.status().remark.expect("it has given up");
        assert!(remark.contains("complete the job again"), "{remark}");
        job.complete(Completion::Switch).expect("it is ready");
        let MirrorEnd { result, replaced, .. } = running.await;
        assert_eq!(result, JobResult::Completed, "after the writes");
        assert!(replaced.is_some());
    });
}

#[test]
fn a_target_of_another_size_is_refused_and_a_resize_ends_the_job() {
    sim::run(1, async {
        let memory = |bytes| Image::Raw(RawImage::new(Storage::memory(bytes)));
        let disk = Disk::new("disk", memory(1 << 20), DiskSettings::default(), None).expect("no limits");
        let (disk, job) = (Arc::new(disk), Job::new("mirror-disk", JobKind::Mirror));
        let target = |bytes| {
            let image = Arc::new(memory(bytes));
            JobTarget { image, is_zero: true, is_overlay: false, may_unmap: true }
        };
        let (settings, sizes) = (BackgroundSettings::default(), MirrorSizes::default());
        for bytes in [1 << 19, 1 << 21] {
            let refused = Mirror::begin(&job, &disk, target(bytes), settings, sizes).await;
            let error = refused.expect_err("another size").to_string();
            assert!(error.contains("use a target of the same size"), "{error}");
        }
        let mirror = Mirror::begin(&job, &disk, target(1 << 20), settings, sizes).await;
        let running = spawn_joinable(mirror.expect("nothing prevents it").run());
        wait_for_state(&job, |state| state == JobState::Ready).await;
        disk.resize(1 << 21).await.expect("memory");
        let MirrorEnd { result, replaced, .. } = running.await;
        assert_eq!(result, JobResult::Failed("the disk was resized (start again)".into()));
        assert!(replaced.is_none() && !disk.has_job());
    });
}
