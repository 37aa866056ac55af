//! Loads in virtual time, on a disk with given latencies.

use std::sync::Arc;

use block::{disk::Disk, layer::throttle::DiskSettings};
use image::open_raw;
use reactor::{error::Error, now, sim, sleep_until, spawn};
use storage::OpenOptions;

use super::*;

fn pattern() -> OffsetPattern {
    OffsetPattern {
        offset: 0,
        step_bytes: 4096,
        last: (1 << 20) - 4096,
        backward: false,
        random: None,
        run: 1,
    }
}

fn load(count: u64, depth: u32) -> LoadSpec {
    LoadSpec { count, depth, readers: 1, block_bytes: 4096, pattern: pattern(), write: None, flush: None }
}

fn disk(spec: &str, rules: &[&str]) -> Arc<Disk> {
    let faults = rules.iter().map(|rule| rule.parse().unwrap()).collect();
    // Exact latencies make the elapsed time of each load exact.
    let delay = Some("read=1ms,write=1ms,flush=10ms".parse().unwrap());
    let image = open_raw(spec, OpenOptions { faults, delay, ..OpenOptions::default() }).unwrap();
    Arc::new(Disk::new("load", image, DiskSettings::default(), None).unwrap())
}

fn run_on_disk(job: impl Into<LoadJob>, rules: &'static [&str]) -> Result<LoadOutcome, Error> {
    let job = job.into();
    sim::run(1, async move { run_job(job, disk("memory:1M", rules)).await.map_err(|failed| failed.error) })
}

#[test]
fn queue_depth_is_reached() {
    for depth in [1, 8, 64] {
        let outcome = run_on_disk(load(640, depth), &[]).unwrap();
        assert_eq!(outcome.elapsed, Duration::from_millis(640 / u64::from(depth)), "depth {depth}");
    }
}

#[test]
fn draining_flush_follows_each_interval_of_writes() {
    let flush = Some(FlushSpec { interval: 64, drain: true });
    let outcome = run_on_disk(LoadSpec { write: Some(7), flush, ..load(640, 32) }, &[]).unwrap();
    // Ten times: 64 writes take 2 ms at depth 32, and the flush 10 ms.
    assert_eq!(outcome.elapsed, Duration::from_millis(10 * (2 + 10)));
}

#[test]
fn writes_continue_during_a_flush_without_drain() {
    let flush = Some(FlushSpec { interval: 64, drain: false });
    let outcome = run_on_disk(LoadSpec { write: Some(7), flush, ..load(640, 32) }, &[]).unwrap();
    assert!(outcome.elapsed < Duration::from_millis(50), "{:?}", outcome.elapsed);
}

#[test]
fn first_failure_ends_the_load_during_a_flush() {
    let flush = Some(FlushSpec { interval: 64, drain: true });
    let load = LoadSpec { write: Some(7), flush, ..load(640, 32) };
    for rule in ["kind=flush,error=EIO", "kind=write,offset=128K-129K,error=EIO"] {
        let rules: &'static [&str] = Box::leak(Box::new([rule]));
        assert_eq!(run_on_disk(load.clone(), rules), Err(Error::IO), "{rule}");
    }
}

#[test]
fn sequential_offsets_wrap_at_the_end() {
    let pattern = OffsetPattern { offset: 8192, step_bytes: 500_000, ..pattern() };
    let written = sim::run(1, async move {
        let disk = disk("memory:1M", &[]);
        run_job(LoadSpec { write: Some(7), pattern, ..load(6, 1) }, Arc::clone(&disk)).await.unwrap();
        let mut found = Vec::new();
        for offset in [8192, 508_192, 1_008_192, 459_616, 959_616, 411_040, 0] {
            let read = disk.image().read(offset, 1).await.unwrap();
            found.push((offset, read.to_vec()[0]));
        }
        found
    });
    let expect = [(8192, 7), (508_192, 7), (1_008_192, 7), (459_616, 7), (959_616, 7), (411_040, 7), (0, 0)];
    assert_eq!(written, expect);
}

#[test]
fn random_offsets_cover_the_disk_and_repeat_for_a_seed() {
    let written = |seed| {
        sim::run(1, async move {
            let disk = disk("memory:1M", &[]);
            let load = LoadSpec {
                write: Some(7),
                pattern: OffsetPattern { random: Some(seed), ..pattern() },
                ..load(256, 16)
            };
            run_job(load, Arc::clone(&disk)).await.unwrap();
            let read = disk.image().read(0, 1 << 20).await.unwrap();
            let mut all = vec![0; 1 << 20];
            read.copy_to(&mut all);
            all.chunks(4096).map(|block| block[0] == 7).collect::<Vec<_>>()
        })
    };
    // About 256 × (1 − 1/e) = 162 blocks are hit.
    let blocks = written(3).iter().filter(|&&block| block).count();
    assert!((120..200).contains(&blocks), "256 draws of 256 blocks hit {blocks}");
    assert_eq!(written(3), written(3));
    assert_ne!(written(3), written(4));
}

fn blocks(load: LoadSpec) -> Vec<usize> {
    sim::run(1, async move {
        let disk = disk("memory:1M", &[]);
        run_job(LoadSpec { write: Some(7), ..load }, Arc::clone(&disk)).await.unwrap();
        let mut all = vec![0; 1 << 20];
        disk.image().read(0, 1 << 20).await.unwrap().copy_to(&mut all);
        let blocks = all.chunks(4096).enumerate();
        blocks.filter(|(_, block)| block[0] == 7).map(|(number, _)| number).collect()
    })
}

#[test]
fn readers_start_equidistant_and_the_slowest_is_reported() {
    let load = LoadSpec { readers: 4, ..load(20, 1) };
    let expect: Vec<usize> = (0..4).flat_map(|reader| (0..5).map(move |block| reader * 63 + block)).collect();
    assert_eq!(blocks(load.clone()), expect);
    assert_eq!(run_on_disk(load, &[]).map(|outcome| outcome.slowest), Ok(5));
}

#[test]
fn backward_wraps_from_the_start_to_the_end() {
    let load =
        LoadSpec { pattern: OffsetPattern { offset: 8192, backward: true, ..pattern() }, ..load(5, 1) };
    assert_eq!(blocks(load), [0, 1, 2, 254, 255]);
}

#[test]
fn sequential_run_follows_each_random_offset() {
    let written =
        blocks(LoadSpec { pattern: OffsetPattern { random: Some(1), run: 4, ..pattern() }, ..load(12, 1) });
    assert!((9..=12).contains(&written.len()), "{written:?}");
    let follow = written.windows(2).filter(|pair| pair[0] + 1 == pair[1]).count();
    assert!(follow >= 8, "{written:?}");
}

#[test]
fn latencies_are_those_of_the_disk() {
    let outcome = run_on_disk(load(640, 8), &[]).unwrap();
    let reads = &outcome.measured.reads;
    assert_eq!((reads.len(), outcome.measured.writes.len()), (640, 0));
    assert!(
        reads.equivalent(reads.min(), 1_000_000) && reads.equivalent(reads.max(), 1_000_000),
        "{reads:?}"
    );
}

#[test]
fn read_percentage_does_not_change_offsets() {
    let mixed = |percent| {
        let pattern = OffsetPattern { random: Some(3), ..pattern() };
        let job = LoadJob {
            read_percent: percent,
            ..LoadSpec { write: Some(7), pattern, ..load(10_000, 16) }.into()
        };
        run_on_disk(job, &[]).unwrap().measured
    };
    let measured = mixed(70);
    assert!((6850..7150).contains(&measured.reads.len()), "{} reads", measured.reads.len());
    assert_eq!(measured.answered(), 10_000);
    assert_eq!(mixed(0).reads.len(), 0);
}

#[test]
fn flush_interval_counts_writes_only() {
    let flush = Some(FlushSpec { interval: 64, drain: true });
    let job = LoadJob { read_percent: 50, ..LoadSpec { write: Some(7), flush, ..load(6400, 32) }.into() };
    let measured = run_on_disk(job, &[]).unwrap().measured;
    assert_eq!(measured.flushes.len(), measured.writes.len() / 64);
}

#[test]
fn runtime_ends_the_load_and_warm_up_is_excluded() {
    let job = LoadJob {
        ramp: Duration::from_millis(2500),
        runtime: Some(Duration::from_millis(3500)),
        ..load(u64::MAX, 4).into()
    };
    let outcome = run_on_disk(job.clone(), &[]).unwrap();
    assert_eq!(outcome.elapsed, Duration::from_millis(3500));
    let seconds: Vec<_> = outcome.measured.seconds.iter().map(|second| second.reads).collect();
    assert!(seconds.len() == 3 && seconds.iter().all(|reads| (3996..=4004).contains(reads)), "{seconds:?}");
    let outcome = run_on_disk(LoadJob { load: load(1000, 4), ..job }, &[]).unwrap();
    assert!((249..=251).contains(&outcome.elapsed.as_millis()), "{:?}", outcome.elapsed);
}

fn slowly() -> Option<OpenLoop> {
    Some(OpenLoop { per_second: 100.0, spacing: Spacing::Fixed })
}

#[test]
fn open_loop_requests_wait_at_full_queue_depth() {
    let outcome = run_on_disk(LoadJob { arrivals: slowly(), ..load(101, 8).into() }, &[]).unwrap();
    assert_eq!(outcome.elapsed, Duration::from_millis(1001), "the last is due after a second");
    assert_eq!((outcome.measured.late.max(), outcome.measured.behind), (0, Duration::ZERO));
    // Capacity for 1000 per second, arrivals of 2000: the hundredth waits for half of the earlier
    // ones.
    let arrivals = Some(OpenLoop { per_second: 2000.0, spacing: Spacing::Fixed });
    let outcome = run_on_disk(LoadJob { arrivals, ..load(100, 1).into() }, &[]).unwrap();
    let reads = &outcome.measured.reads;
    assert!(reads.equivalent(reads.max(), 50_500_000), "{}", reads.max());
    assert!(reads.equivalent(reads.min(), 1_000_000), "{}", reads.min());
    assert!(outcome.measured.late.equivalent(outcome.measured.late.max(), 49_500_000));
}

#[test]
fn final_lag_behind_the_schedule_is_reported() {
    let arrivals = Some(OpenLoop { per_second: 2000.0, spacing: Spacing::Fixed });
    let runtime = Some(Duration::from_secs(1));
    let outcome = run_on_disk(LoadJob { arrivals, runtime, ..load(u64::MAX, 1).into() }, &[]).unwrap();
    assert_eq!(outcome.measured.reads.len(), 1000);
    assert_eq!(outcome.measured.behind, Duration::from_millis(500));
}

#[test]
fn stop_does_not_wait_for_the_next_arrival() {
    let stop = LoadStop::default();
    let arrivals = Some(OpenLoop { per_second: 0.001, spacing: Spacing::Fixed });
    let job = LoadJob { arrivals, stop: stop.clone(), ..load(1000, 2).into() };
    let outcome = sim::run(1, async move {
        spawn(async move {
            sleep_until(now() + Duration::from_secs(1)).await;
            assert!(stop.stop() && !stop.stop(), "it is stopped once");
        });
        run_job(job, disk("memory:1M", &[])).await.unwrap()
    });
    assert_eq!((outcome.elapsed, outcome.measured.reads.len()), (Duration::from_secs(1), 1));
}

#[test]
fn samples_before_a_failure_are_kept() {
    let failed = sim::run(1, async {
        run_job(load(640, 1), disk("memory:1M", &["kind=read,offset=128K-129K,error=EIO"])).await.unwrap_err()
    });
    assert_eq!((failed.error, failed.outcome.measured.reads.len()), (Error::IO, 32));
    assert_eq!(failed.request.to_string(), "a read at 131072");
}

#[test]
fn jobs_share_requests_and_rate() {
    let parts = LoadJob { arrivals: slowly(), ..load(10, 4).into() }.split(3);
    assert_eq!(parts.iter().map(|job| job.load.count).collect::<Vec<_>>(), [4, 3, 3]);
    let rate: f64 = parts.iter().filter_map(|job| job.arrivals).map(|arrivals| arrivals.per_second).sum();
    assert!((rate - 100.0).abs() < 1e-9);
    assert!(parts[0].stop.stop() && parts[2].stop.is_stopped(), "all of them stop together");
    assert_eq!(parts[2].part, JobPart { number: 2, count: 3 });
}
