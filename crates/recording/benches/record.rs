//! Cost of recording a request: on the worker that passes it to its ring, and on the thread that
//! takes it from there, encodes and compresses it. One iteration is one request.
//!
//! At half a million requests per second the single writing thread has 2000 ns for each. The
//! requests are reads of 4 KiB at random offsets, 32 in flight, half a million per second, of 16
//! disks, half of which wait for a limit.
//!
//! A result is that of the fastest of many batches: other load on the machine only adds to it.

use std::{
    hint::black_box,
    io::{self, Write},
    time::{Duration, Instant as Clock},
};

use block::recorder::{self, Collector, DiskOperation, RecordingSwitch, RequestRecord};
use criterion::{Bencher, Criterion, criterion_group, criterion_main};
use policy::time::Instant;
use recording::{RecordedTimes, RecordingEntry, RecordingWriter, RequestOp};

// Below the capacity of a ring.
const BATCH: usize = 30_000;
const DISKS: u32 = 16;
const BETWEEN_NS: u64 = 2000;
const PLACES: u64 = 1 << 28;

/// A batch of requests in order of completion.
fn requests(random: &mut fastrand::Rng, begin_ns: u64) -> Vec<RequestRecord> {
    let mut requests: Vec<RequestRecord> = (0..BATCH as u64)
        .map(|number| {
            let disk = random.u32(..DISKS);
            let arrived = begin_ns + number * BETWEEN_NS + random.u64(..BETWEEN_NS);
            let wait = if disk.is_multiple_of(2) { random.u64(1_000_000..20_000_000) } else { 0 };
            // About the duration of 32 requests at that rate.
            let service = 64_000 + random.u64(..16_000) + random.u64(..16_000);
            RequestRecord {
                disk,
                operation: DiskOperation::Read,
                offset: random.u64(..PLACES) * 4096,
                length: 4096,
                requests: 1,
                has_failed: false,
                arrived: Instant::from_nanos(arrived),
                admitted: Instant::from_nanos(arrived + wait),
                throttle_cause: None,
                completed: Instant::from_nanos(arrived + wait + service),
            }
        })
        .collect();
    requests.sort_by_key(|request| request.completed);
    requests
}

/// Counts the bytes that are written.
#[derive(Default)]
struct CountingWriter(u64);

impl Write for CountingWriter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += black_box(bytes).len() as u64;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Reports the duration of the fastest batch to criterion for every iteration.
fn timed(mut batch: impl FnMut() -> Duration) -> impl FnMut(&mut Bencher<'_>) {
    move |bencher: &mut Bencher<'_>| {
        bencher.iter_custom(|iterations| {
            let batches = iterations.div_ceil(BATCH as u64);
            let fastest = (0..batches).map(|_| batch()).min().expect("there is one");
            fastest.mul_f64(iterations as f64 / BATCH as f64)
        });
    }
}

#[expect(clippy::print_stderr, reason = "criterion reports times only")]
fn record(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("record");
    let mut random = fastrand::Rng::with_seed(1);
    let mut collector = Collector::begin().expect("there is no other");
    let recorded = RecordingSwitch::default();
    let sample = requests(&mut random, 0);
    group.bench_function(
        "handed to the ring",
        timed(|| {
            let begin = Clock::now();
            sample.iter().for_each(|request| recorder::record(*black_box(request), &recorded));
            let elapsed = begin.elapsed();
            assert!(!collector.take(|_| ()), "there was room for all");
            elapsed
        }),
    );

    let names: Vec<String> = (0..DISKS).map(|disk| format!("vm{disk}")).collect();
    let mut writer = RecordingWriter::new(CountingWriter::default(), 0).expect("it only counts");
    let (mut written, mut begin_ns) = (0_u64, 0);
    group.bench_function(
        "taken, packed and compressed",
        timed(|| {
            requests(&mut random, begin_ns).iter().for_each(|request| recorder::record(*request, &recorded));
            begin_ns += BATCH as u64 * BETWEEN_NS;
            written += BATCH as u64;
            let begin = Clock::now();
            let has_lost = collector.take(|request: &RequestRecord| {
                let wait_ns = request.admitted.nanos_since(request.arrived);
                let service_ns = request.completed.nanos_since(request.admitted);
                let entry = RecordingEntry {
                    arrival_ns: request.arrived.as_nanos(),
                    times: Some(RecordedTimes { wait_ns, service_ns }),
                    offset: request.offset,
                    length: request.length,
                    op: RequestOp::Read,
                    has_failed: request.has_failed,
                    disk: request.disk,
                    limit: (wait_ns > 0).then_some(request.disk),
                };
                let (disk, limit) = (|| &*names[request.disk as usize], || "iops-total");
                writer.push(entry, disk, limit).expect("it only counts");
            });
            // Before the block is full, so that the fastest batch includes its share of
            // compression.
            writer.end_block().expect("it only counts");
            assert!(!has_lost, "there was room for all");
            begin.elapsed()
        }),
    );
    group.finish();
    let bytes = writer.output().0 as f64 / written as f64;
    eprintln!("record: {bytes:.1} bytes a request");
    assert!(bytes <= 12.0, "a request at a random place takes 12 bytes at most");
}

criterion_group! {
    name = recording;
    config = Criterion::default()
        .warm_up_time(Duration::from_millis(300))
        .measurement_time(Duration::from_secs(2))
        .sample_size(20);
    targets = record
}
criterion_main!(recording);
