//! The watermark on a device of 22 MB/s: the cases of io-throttle v16's announcement (Andrea Righi,
//! linux-kernel, 3 May 2009) in virtual time. The results of io-throttle are printed as well, for
//! comparison.
//!
//! The device serves one request at a time; if *cached*, writes first go into memory of a bounded
//! size. Two clients write 1 MiB at a time, like dd.

use policy::request::Direction;
use policy::throttle::{
    AdmissionCounters, AdmissionResult, Enforcement, LimitKind, Limits, NodeId, NodeShare, PollDecision,
    RequestCost, ThrottleTree,
};
use policy::time::{Duration, Instant};
use policy::watermark::{
    DeviceConsumption, DeviceLoad, GroupConsumption, MeasuredCapacity, UtilizationSample, Watermark,
    WatermarkController,
};
use std::collections::VecDeque;
use std::mem;

const MB: u64 = 1_000_000;
const REQUEST: u64 = 1 << 20;
const DEVICE_BPS: u64 = 22 * MB;
/// Dirty memory that io-throttle's machine allowed, scaled down with the rest.
const CACHE: u64 = 32 * MB;
const TICK: Duration = Duration::from_micros(500);
const SAMPLE_TICKS: u64 = 100;

struct Client {
    disk: NodeId,
    limit_bps: u64,
    /// End of the load.
    until: Instant,
    from: Instant,
    /// Minimum interval between two requests.
    pace: Duration,
    sent: Instant,
    idle: bool,
    passed: u64,
    sampled: u64,
}

struct Model {
    tree: ThrottleTree<usize>,
    clients: Vec<Client>,
    watermark: Watermark,
    controller: WatermarkController,
    cached: bool,
    now: Instant,
    ticks: u64,
    /// Queue of the device: client, and remaining bytes of the request.
    queue: VecDeque<(usize, u64)>,
    /// Interval in which the device is stalled.
    stall: (Instant, Instant),
    dirty: u64,
    done: u64,
    sampled: u64,
    changes: Vec<(Instant, Enforcement)>,
}

impl Model {
    fn new(watermark: u8, cached: bool) -> Self {
        Self {
            tree: ThrottleTree::new(Instant::ZERO),
            clients: Vec::new(),
            watermark: Watermark::new(watermark).unwrap(),
            controller: WatermarkController::new(),
            cached,
            now: Instant::ZERO,
            ticks: 0,
            queue: VecDeque::new(),
            stall: (Instant::ZERO, Instant::ZERO),
            dirty: 0,
            done: 0,
            sampled: 0,
            changes: Vec::new(),
        }
    }

    /// Adds a client that sends from `from_s` to `until_s`, with a limit and a watermark unless
    /// `limit_bps` is 0.
    fn add(&mut self, limit_bps: u64, from_s: u64, until_s: u64) -> usize {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::BpsTotal).rate = limit_bps;
        let disk = self.tree.add(None, limits, NodeShare::default()).unwrap();
        self.clients.push(Client {
            disk,
            limit_bps,
            until: s(until_s),
            from: s(from_s),
            pace: Duration::ZERO,
            sent: Instant::ZERO,
            idle: true,
            passed: 0,
            sampled: 0,
        });
        self.clients.len() - 1
    }

    fn run_until(&mut self, end: Instant) {
        while self.now < end {
            self.now += TICK;
            self.ticks += 1;
            // Each client has a queue depth of 1, like dd with direct I/O.
            for client in 0..self.clients.len() {
                let Client { disk, idle, from, until, pace, sent, .. } = self.clients[client];
                if idle && from <= self.now && self.now < until && sent + pace <= self.now {
                    self.clients[client].idle = false;
                    self.clients[client].sent = self.now;
                    let cost = RequestCost::one(REQUEST);
                    match self.tree.submit(disk, Direction::Write, cost, client, self.now) {
                        AdmissionResult::Admitted(client) => self.queue.push_back((client, REQUEST)),
                        AdmissionResult::Queued(_) => {}
                    }
                }
            }
            while let PollDecision::Admit(client) = self.tree.poll(self.now) {
                self.queue.push_back((client, REQUEST));
            }
            self.serve();
            if self.ticks.is_multiple_of(SAMPLE_TICKS) {
                self.sample();
            }
        }
    }

    fn serve(&mut self) {
        if self.stall.0 <= self.now && self.now < self.stall.1 {
            return;
        }
        // Bytes that the device transfers in one tick.
        let mut capacity = DEVICE_BPS / (1_000_000_000 / TICK.as_nanos() as u64);
        if self.cached {
            let drained = capacity.min(self.dirty);
            self.dirty -= drained;
            self.done += drained;
            // The cache accepts requests in order, as far as they fit.
            while let Some((client, length)) = self.queue.pop_front() {
                if self.dirty + length > CACHE {
                    self.queue.push_front((client, length));
                    break;
                }
                self.dirty += length;
                self.complete(client);
            }
            return;
        }
        while let Some((client, left)) = self.queue.pop_front() {
            let now = left.min(capacity);
            capacity -= now;
            self.done += now;
            if left > now {
                self.queue.push_front((client, left - now));
                return;
            }
            self.complete(client);
        }
    }

    fn complete(&mut self, client: usize) {
        let client = &mut self.clients[client];
        client.passed += REQUEST;
        client.idle = true;
    }

    fn sample(&mut self) {
        let per_second = 1_000_000_000 / (TICK.as_nanos() as u64 * SAMPLE_TICKS);
        let completed = self.done - mem::replace(&mut self.sampled, self.done);
        let mut consumed = DeviceConsumption::default();
        for client in self.clients.iter_mut().filter(|client| client.limit_bps > 0) {
            let mut limits = Limits::default();
            limits.limit_mut(LimitKind::BpsWrite).rate = client.limit_bps;
            let passed = |bytes| {
                [AdmissionCounters::default(), AdmissionCounters { bytes, ..AdmissionCounters::default() }]
            };
            let before = passed(mem::replace(&mut client.sampled, client.passed));
            let elapsed = TICK * SAMPLE_TICKS as u32;
            let taken = GroupConsumption::since(&before, &passed(client.passed), elapsed, limits);
            consumed.add(&taken.expect("no counter falls"));
        }
        let capacity = MeasuredCapacity { write_bps: DEVICE_BPS, ..MeasuredCapacity::default() };
        let rates = DeviceLoad { write_bps: completed * per_second, ..DeviceLoad::default() };
        // Only writes occur, so the capacity of reads may stay unknown.
        let used = capacity.utilization(rates).unwrap();
        self.controller.observe(self.now, UtilizationSample::new(used, &consumed));
        let enforcement = self.controller.enforcement(self.watermark);
        if self.changes.last().is_none_or(|(_, last)| *last != enforcement) {
            self.changes.push((self.now, enforcement));
        }
        for client in &self.clients {
            self.tree.enforce(client.disk, enforcement, self.now);
        }
    }

    /// Bytes per second of every client.
    fn rates(&mut self, from_s: u64, until_s: u64) -> Vec<f64> {
        self.run_until(s(from_s));
        self.rates_until(s(until_s))
    }

    fn rates_until(&mut self, end: Instant) -> Vec<f64> {
        let before: Vec<_> = self.clients.iter().map(|client| client.passed).collect();
        let seconds = (end - self.now).as_secs_f64();
        self.run_until(end);
        self.clients
            .iter()
            .zip(before)
            .map(|(client, before)| (client.passed - before) as f64 / seconds)
            .collect()
    }

    /// Number of times that limits were lifted or enforced again after this second.
    fn transitions_after(&self, second: u64) -> usize {
        let states = self.changes.iter().map(|(at, enforcement)| (*at, *enforcement == Enforcement::Lifted));
        let all: Vec<_> = states.collect();
        all.windows(2).filter(|pair| pair[1].0 > s(second) && pair[0].1 != pair[1].1).count()
    }
}

fn s(seconds: u64) -> Instant {
    Instant::from_nanos(seconds * 1_000_000_000)
}

/// One case of the table: two streams for 60 s, without the first five.
fn run_case(limited: bool, watermark: u8, cached: bool) -> [f64; 2] {
    let mut model = Model::new(watermark, cached);
    for limit in [4 * MB, 2 * MB] {
        model.add(if limited { limit } else { 0 }, 0, 1000);
    }
    let rates = model.rates(5, 60);
    assert_eq!(model.transitions_after(5), 0, "{:?}", model.changes);
    [rates[0] / MB as f64, rates[1] / MB as f64]
}

#[expect(
    clippy::print_stdout,
    reason = "`cargo test -- --nocapture` shows the table of the announcement beside ours"
)]
fn print(case: &str, measured: [f64; 2], expected: [f64; 2]) {
    println!(
        "{case:34} {:5.1} and {:4.1} MB/s   (io-throttle v16: {:4.1} and {:4.1})",
        measured[0], measured[1], expected[0], expected[1]
    );
}

#[track_caller]
fn assert_within(percent: f64, measured: f64, expected: f64) {
    assert!((measured / expected - 1.0).abs() * 100.0 <= percent, "{measured} is not {expected}");
}

#[test]
fn two_streams_share_the_device_as_announced() {
    let cases = [
        ("1 unlimited, cached", false, 0, true, [19.7, 21.1]),
        ("2 unlimited, direct", false, 0, false, [12.0, 11.7]),
        ("3 4 and 2 MB/s, cached", true, 0, true, [6.3, 2.4]),
        ("4 4 and 2 MB/s, direct", true, 0, false, [4.2, 2.1]),
        ("5 watermark 90, cached", true, 90, true, [32.0, 21.4]),
        ("6 watermark 90, direct", true, 90, false, [14.0, 11.0]),
        ("7 watermark 100, cached", true, 100, true, [28.2, 23.4]),
        ("8 watermark 100, direct", true, 100, false, [14.3, 11.7]),
    ];
    for (name, limited, watermark, cached, seed) in cases {
        let [first, second] = run_case(limited, watermark, cached);
        print(name, [first, second], seed);
        if !limited {
            assert_within(1.0, first + second, 22.0);
        } else if watermark == 0 {
            assert_within(1.0, first, 4.0);
            assert_within(1.0, second, 2.0);
        } else {
            // Under a watermark the whole device is used, in proportion to the limits of 4 and 2
            // MB/s.
            assert!(first + second >= 0.95 * 22.0, "{first} + {second}");
            assert_within(5.0, first / second, 2.0);
        }
    }
}

#[test]
fn single_stream_gets_the_whole_device() {
    for (limit, idle) in [(2 * MB, 30), (MB, 30), (MB / 4, 100)] {
        for (watermark, stall_ms) in [(50, 0), (90, 0), (100, 0), (90, 300), (90, 1000)] {
            let mut model = Model::new(watermark, false);
            model.add(limit, 0, 1000);
            for _ in 0..idle {
                model.add(limit, 1000, 1000);
            }
            // A stalled device has no throughput, so utilization falls: the factor must not wind
            // up.
            model.stall = (s(2), s(2) + Duration::from_millis(stall_ms));
            let rates = model.rates(5, 30);
            let context =
                format!("{limit}, watermark {watermark}, {stall_ms} ms: {rates:?}, {:?}", model.changes);
            assert!(rates[0] >= 0.95 * DEVICE_BPS as f64, "{context}");
            assert_eq!(model.transitions_after(5), 0, "{context}");
        }
    }
}

#[test]
fn below_the_watermark_limits_are_lifted() {
    for (watermark, lifted) in [(90, true), (40, false)] {
        let mut model = Model::new(watermark, false);
        let client = model.add(2 * MB, 0, 1000);
        // Half of the device, five times the limit.
        model.clients[client].pace = Duration::from_millis(96);
        let rates = model.rates(1, 20);
        assert_within(2.0, rates[0], REQUEST as f64 / 0.096);
        assert_eq!(model.controller.enforcement(model.watermark) == Enforcement::Lifted, lifted);
        assert_eq!(model.transitions_after(1), 0, "{:?}", model.changes);
    }
}

#[test]
fn unlimited_stream_leaves_limited_ones_their_limits() {
    let mut model = Model::new(90, false);
    model.add(4 * MB, 0, 1000);
    model.add(2 * MB, 0, 1000);
    // A queue depth that keeps the device busy, whatever the limited streams do.
    for _ in 0..16 {
        model.add(0, 20, 40);
    }
    model.run_until(s(20));
    let rates = model.rates(22, 40);
    assert_eq!(model.controller.enforcement(model.watermark), Enforcement::Enforced);
    assert!(rates[0] <= 4.04 * MB as f64 && rates[1] <= 2.02 * MB as f64, "{rates:?}");
    let rates = model.rates(42, 60);
    assert!(rates[0] + rates[1] >= 0.95 * DEVICE_BPS as f64, "the device is theirs again: {rates:?}");
    assert_within(5.0, rates[0] / rates[1], 2.0);
}

#[test]
fn when_demand_ends_limits_are_lifted_within_two_seconds() {
    let mut model = Model::new(90, false);
    model.add(4 * MB, 0, 10);
    model.add(2 * MB, 0, 10);
    model.run_until(s(9));
    assert_ne!(model.controller.enforcement(model.watermark), Enforcement::Lifted);
    model.run_until(s(12));
    assert_eq!(model.controller.enforcement(model.watermark), Enforcement::Lifted);
}

#[test]
fn a_device_that_stalled_is_shared_as_before_within_a_second() {
    for milliseconds in [100, 200, 300, 500, 700, 1000, 1500, 3000] {
        let mut model = Model::new(90, false);
        model.add(4 * MB, 0, 1000);
        model.add(2 * MB, 0, 1000);
        let end = s(10) + Duration::from_millis(milliseconds);
        model.stall = (s(10), end);
        model.run_until(end + Duration::from_secs(1));
        let rates = model.rates_until(end + Duration::from_secs(4));
        assert!(rates[0] + rates[1] >= 0.9 * DEVICE_BPS as f64, "after {milliseconds} ms: {rates:?}");
        assert_within(12.0, rates[0] / rates[1], 2.0);
    }
}

#[test]
fn utilization_is_the_larger_of_operations_and_bytes() {
    let capacity = MeasuredCapacity { read_iops: 1000, write_iops: 500, read_bps: 10_000, write_bps: 0 };
    let rates = DeviceLoad { read_iops: 100, write_iops: 100, read_bps: 9000, write_bps: 5 };
    assert_eq!(capacity.utilization(rates), Some(900));
    assert_eq!(capacity.utilization(DeviceLoad { read_bps: 0, ..rates }), Some(300));
    assert_eq!(MeasuredCapacity::default().utilization(rates), None);
    assert_eq!(capacity.reservable(), [500, 0]);
    assert!(Watermark::new(100).is_some() && Watermark::new(101).is_none());
}

/// A device that receives writes in pieces of 4 MiB, like writeback: most samples see nothing, some
/// see four times its capacity. Consumption under limits of 6 MB/s is measured only every few
/// samples, as for control groups. Returns the factor after a minute, and the utilization in its
/// second half.
fn bursty_device(watermark: u8, every: u64) -> (f64, f64) {
    const LIMITS: f64 = 6e6;
    const DEVICE: f64 = 20e6;
    const LUMP: f64 = 4_194_304.0;
    let watermark = Watermark::new(watermark).unwrap();
    let mut controller = WatermarkController::new();
    let (mut gathered, mut factor, mut done) = (0.0, f64::INFINITY, 0.0);
    let (mut multiple, mut bytes_since_measurement) = (0, 0.0);
    for sample in 1..=1200_u64 {
        // Admitted bytes accumulate in the page cache and are written in whole lumps.
        gathered += (LIMITS * factor).min(DEVICE) * 0.05;
        let mut passed = 0.0;
        while gathered >= LUMP {
            gathered -= LUMP;
            passed += LUMP;
        }
        if sample > 600 {
            done += passed;
        }
        bytes_since_measurement += passed;
        if sample.is_multiple_of(every) {
            multiple = (bytes_since_measurement / 0.05 / every as f64 / LIMITS * 1000.0) as u64;
            bytes_since_measurement = 0.0;
        }
        let used = (passed / 0.05 / DEVICE * 1000.0) as u64;
        let observation =
            UtilizationSample { utilization: used, combined_multiple: multiple, max_multiple: multiple };
        controller.observe(Instant::from_nanos(sample * 50_000_000), observation);
        factor = match controller.enforcement(watermark) {
            Enforcement::Lifted => f64::INFINITY,
            Enforcement::Enforced => 1.0,
            Enforcement::Scaled(scale) => scale.thousandths() as f64 / 1000.0,
        };
    }
    (factor, done / 30.0 / DEVICE)
}

#[test]
fn bursty_writeback_does_not_wind_up_the_factor() {
    for (watermark, every) in [(90, 1), (100, 1), (90, 2), (100, 2), (90, 3)] {
        let (factor, used) = bursty_device(watermark, every);
        // 20 of 6 MB/s is a factor of 3.33: far above it nothing is throttled, and shares are lost.
        let context = format!("watermark {watermark}, every {every}: {factor:.2} times, {used:.3} used");
        assert!((2.8..4.2).contains(&factor), "{context}");
        assert!(used > 0.93, "{context}");
    }
}
