//! Pools in virtual time, over a model of a kernel that enforces the rates it was set to.

use std::collections::HashMap;

use policy::{
    steering::{IoCounters, IoMaxRates, SteeredMember, SteeringPool},
    throttle::{CauseKind, Enforcement, LimitKind, LimitScale, LimitSetting, Limits},
    time::{Duration, Instant},
};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;
/// 20 MiB/s for five seconds, then 4 MiB/s.
const BURSTS: [(&str, u64); 3] =
    [("bps-write", 4 * MIB), ("bps-write-max", 20 * MIB), ("bps-write-max-length", 5)];
const STEP: Duration = Duration::from_millis(5);

fn limits(settings: &[(&str, u64)]) -> Limits {
    let mut limits = Limits::default();
    for (name, value) in settings {
        limits.set(LimitSetting::from_name(name).expect("a setting"), *value).expect("in range");
    }
    limits.validate().expect("valid");
    limits
}

/// Load of a member without limits: times in seconds, rates in bytes per second.
#[derive(Clone, Copy, Debug)]
struct Load {
    from_s: f64,
    until_s: f64,
    rate: f64,
    size: u64,
    direction: usize,
}

impl Load {
    const NONE: Self = Self { from_s: 0.0, until_s: 0.0, rate: 0.0, size: 4096, direction: 1 };

    fn greedy(size: u64) -> Self {
        Self { until_s: f64::INFINITY, rate: 1e12, size, ..Self::NONE }
    }
}

/// The kernel's state of a member: rates, and progress of the current request.
struct SimulatedKernel {
    load: Load,
    rates: IoMaxRates,
    passed: IoCounters,
    /// Budget in units: at most one request plus a tenth of a second at the rate.
    credit: [f64; 2],
    demanded_bytes: f64,
    waited: bool,
}

struct Bench {
    pool: SteeringPool,
    kernels: Vec<SimulatedKernel>,
    now: Instant,
    observations: usize,
    rate_changes: usize,
    due: HashMap<usize, Instant>,
    /// Bytes of all members in each step.
    history: Vec<u64>,
    by_member: Vec<Vec<u64>>,
}

impl Bench {
    fn new(settings: &[(&str, u64)], members: &[(u32, Load)]) -> Self {
        let mut pool = SteeringPool::new(&limits(settings), Instant::ZERO);
        members.iter().for_each(|(weight, _)| pool.add(SteeredMember::new(*weight)));
        let kernels = members
            .iter()
            .map(|(_, load)| SimulatedKernel {
                load: *load,
                rates: IoMaxRates::NONE,
                passed: IoCounters::default(),
                credit: [0.0; 2],
                demanded_bytes: 0.0,
                waited: false,
            })
            .collect::<Vec<_>>();
        let by_member = members.iter().map(|_| Vec::new()).collect();
        let mut bench = Self {
            pool,
            kernels,
            now: Instant::ZERO,
            observations: 0,
            rate_changes: 0,
            due: HashMap::new(),
            history: Vec::new(),
            by_member,
        };
        for member in 0..members.len() {
            bench.observe(member);
        }
        bench.apply_rates();
        bench
    }

    fn observe(&mut self, member: usize) {
        let kernel = &mut self.kernels[member];
        let waited = std::mem::take(&mut kernel.waited);
        self.pool.observe(member, self.now, kernel.passed, Some(waited));
        self.observations += 1;
    }

    fn apply_rates(&mut self) {
        let now = self.now;
        for (member, rates) in self.pool.decide(now) {
            self.kernels[member].rates = rates;
            self.rate_changes += 1;
        }
        for member in 0..self.kernels.len() {
            match self.pool.next_measurement(member, now) {
                Some(due) => self.due.insert(member, due),
                None => self.due.remove(&member),
            };
        }
    }

    fn run(&mut self, seconds: f64) {
        let until = self.now + Duration::from_secs_f64(seconds);
        while self.now < until {
            self.now += STEP;
            let before: u64 = self.kernels.iter().map(SimulatedKernel::bytes).sum();
            for (kernel, history) in self.kernels.iter_mut().zip(&mut self.by_member) {
                kernel.pass(self.now);
                history.push(kernel.bytes());
            }
            let after: u64 = self.kernels.iter().map(SimulatedKernel::bytes).sum();
            self.history.push(after - before);
            let due: Vec<usize> =
                self.due.iter().filter(|(_, due)| **due <= self.now).map(|(member, _)| *member).collect();
            due.iter().for_each(|member| self.observe(*member));
            if !due.is_empty() {
                self.apply_rates();
            }
        }
    }

    /// Bytes per second of all members between two instants in seconds.
    fn rate(&self, from_s: f64, until_s: f64) -> f64 {
        let steps = |seconds: f64| (seconds / STEP.as_secs_f64()) as usize;
        self.history[steps(from_s)..steps(until_s)].iter().sum::<u64>() as f64 / (until_s - from_s)
    }

    fn rate_of(&self, member: usize, from_s: f64, until_s: f64) -> f64 {
        let at = |seconds: f64| self.by_member[member][(seconds / STEP.as_secs_f64()) as usize - 1] as f64;
        (at(until_s) - at(from_s)) / (until_s - from_s)
    }
}

impl SimulatedKernel {
    fn bytes(&self) -> u64 {
        self.passed.iter().map(|counters| counters.bytes).sum()
    }

    fn pass(&mut self, now: Instant) {
        let now_s = now.as_nanos() as f64 / 1e9;
        let Load { from_s, until_s, rate, size, direction } = self.load;
        let step_s = STEP.as_secs_f64();
        for (credit, rate, min_credit) in
            [(0, self.rates.bps[direction], size as f64), (1, self.rates.iops[direction], 1.0)]
        {
            let rate = rate.map_or(f64::INFINITY, |rate| rate as f64);
            // As in blk-throttle: unused budget accumulates up to a throttle slice (100 ms).
            let full = (rate / 10.0).max(min_credit);
            self.credit[credit] = if rate.is_finite() {
                (self.credit[credit] + rate * step_s).min(full)
            } else {
                f64::INFINITY
            };
        }
        self.demanded_bytes = if (from_s..until_s).contains(&now_s) {
            (self.demanded_bytes + rate * step_s).min((2 * size).max((rate * step_s) as u64) as f64)
        } else {
            0.0
        };
        // Without a rate, a member is bounded only by the host, here by 100 MB in a step.
        let mut left_bytes = 100_000_000;
        while self.demanded_bytes >= size as f64 && left_bytes > 0 {
            if self.credit[0] < size as f64 || self.credit[1] < 1.0 {
                self.waited = true;
                return;
            }
            left_bytes -= size;
            self.demanded_bytes -= size as f64;
            self.credit[0] -= size as f64;
            self.credit[1] -= 1.0;
            self.passed[direction].bytes += size;
            self.passed[direction].requests += 1;
        }
    }
}

#[track_caller]
fn assert_close(measured: f64, expected: f64, tolerance: f64) {
    assert!((measured / expected - 1.0).abs() <= tolerance, "{measured:.0} instead of {expected:.0}");
}

#[test]
fn burst_lasts_until_the_bucket_is_full() {
    let mut bench = Bench::new(&BURSTS, &[(100, Load::greedy(65_536))]);
    bench.run(40.0);
    assert_close(bench.rate(0.0, 5.0), 20.0 * MIB as f64, 0.01);
    // The bucket of 100 MiB fills at 20 − 4 MiB/s: 6.25 s.
    assert_close(bench.rate(0.0, 6.25), 20.0 * MIB as f64, 0.01);
    assert_close(bench.rate(6.5, 36.5), 4.0 * MIB as f64, 0.01);
}

#[test]
fn burst_recovers_as_the_bucket_leaks() {
    // 10 s busy, 10 s idle, busy again.
    let idle = Load { from_s: 20.0, ..Load::greedy(65_536) };
    let mut bench = Bench::new(&BURSTS, &[(100, Load { until_s: 10.0, ..Load::greedy(65_536) })]);
    bench.run(10.0);
    bench.kernels[0].load = idle;
    bench.run(20.0);
    // In ten seconds 40 MiB leak, enough for a burst of 40 ÷ 16 seconds.
    assert_close(bench.rate(20.1, 22.1), 20.0 * MIB as f64, 0.06);
    assert_close(bench.rate(23.0, 30.0), 4.0 * MIB as f64, 0.05);
}

#[test]
fn io_is_bounded_by_rate_plus_burst() {
    let settings = [("bps-write", 4 * MIB), ("bps-write-max", 20 * MIB), ("bps-write-max-length", 2)];
    let load = Load { rate: 7.0 * MIB as f64, ..Load::greedy(65_536) };
    let mut bench = Bench::new(&settings, &[(100, load)]);
    bench.run(60.0);
    // A demand of 7 MiB/s lies between rate and burst rate: the bucket is used up slowly.
    assert_close(bench.rate(0.0, 60.0), (4.0 * 60.0 + 40.0) / 60.0 * MIB as f64, 0.02);
}

#[test]
fn contended_rate_is_shared_by_weight() {
    let members = [(100, Load::greedy(65_536)), (300, Load::greedy(4096))];
    let mut bench = Bench::new(&[("bps-write", 8 * MIB)], &members);
    bench.run(20.0);
    assert_close(bench.rate_of(0, 2.0, 20.0), 2.0 * MIB as f64, 0.02);
    assert_close(bench.rate_of(1, 2.0, 20.0), 6.0 * MIB as f64, 0.02);
}

#[test]
fn unused_rate_is_given_to_the_busy_member() {
    let second = Load { from_s: 10.0, until_s: 20.0, ..Load::greedy(65_536) };
    let mut bench = Bench::new(&[("bps-write", 8 * MIB)], &[(100, Load::greedy(65_536)), (100, second)]);
    bench.run(32.0);
    assert_close(bench.rate_of(0, 2.0, 10.0), 8.0 * MIB as f64, 0.03);
    assert_close(bench.rate_of(0, 12.0, 20.0), 4.0 * MIB as f64, 0.03);
    assert_close(bench.rate_of(1, 12.0, 20.0), 4.0 * MIB as f64, 0.03);
    assert_close(bench.rate_of(0, 21.0, 32.0), 8.0 * MIB as f64, 0.03);
}

#[test]
fn absent_member_releases_its_part() {
    // An absent member's part is divided among the rest at once.
    let members = [(100, Load::greedy(65_536)), (300, Load::greedy(65_536))];
    let mut bench = Bench::new(&[("bps-write", 8 * MIB)], &members);
    bench.run(5.0);
    bench.pool.set_absent(1);
    let all = IoMaxRates { bps: [None, Some(8 * MIB)], iops: [None; 2] };
    assert_eq!(bench.pool.decide(bench.now), [(0, all)]);
    assert_eq!(bench.pool.rates_without_steering()[0], all);
    bench.observe(1);
    bench.apply_rates();
    bench.run(10.0);
    assert_close(bench.rate_of(1, 7.0, 15.0), 6.0 * MIB as f64, 0.03);
}

#[test]
fn unmeasurable_member_keeps_its_part() {
    // An unmeasurable member is not set to another rate, but counts as demanding everything.
    let members = [(100, Load::greedy(65_536)), (300, Load::NONE)];
    let mut bench = Bench::new(&[("bps-write", 8 * MIB)], &members);
    bench.run(8.0);
    assert_close(bench.rate_of(0, 6.0, 8.0), 8.0 * MIB as f64, 0.03);
    bench.pool.set_unmeasurable(1);
    let part = IoMaxRates { bps: [None, Some(2 * MIB)], iops: [None; 2] };
    assert_eq!(bench.pool.decide(bench.now), [(0, part)], "and nothing is decided for it");
    assert_eq!(bench.pool.rates_without_steering()[1].bps[1], Some(6 * MIB));
}

#[test]
fn bursting_member_is_measured_before_the_burst_can_end() {
    // 100 MiB at a surplus of 16 MiB/s.
    let mut bench = Bench::new(&BURSTS, &[(100, Load::greedy(65_536))]);
    assert_eq!(bench.pool.bursts_end(bench.now), Some(bench.now + Duration::from_millis(6250)));
    bench.run(10.0);
    assert_eq!(bench.pool.bursts_end(bench.now), None);
}

#[test]
fn a_large_request_behind_an_idle_members_part_is_seen() {
    // Each request is larger than the part that an idle member keeps for a second.
    let second = Load { from_s: 10.0, ..Load::greedy(MIB) };
    let mut bench = Bench::new(&[("bps-write", 4 * MIB)], &[(100, Load::greedy(65_536)), (100, second)]);
    bench.run(20.0);
    assert_close(bench.rate_of(1, 12.0, 20.0), 2.0 * MIB as f64, 0.1);
}

#[test]
fn total_limit_serves_the_direction_with_demand() {
    let reads = Load { direction: 0, ..Load::greedy(65_536) };
    let mut bench = Bench::new(&[("bps-total", 8 * MIB)], &[(100, reads)]);
    bench.run(10.0);
    assert_close(bench.rate(2.0, 10.0), 8.0 * MIB as f64, 0.03);
}

#[test]
fn unneeded_measurements_are_skipped() {
    // A single member with limits that the kernel supports needs no steering.
    let alone = Bench::new(&[("bps-write", 8 * MIB), ("iops-read", 100)], &[(100, Load::greedy(4096))]);
    assert_eq!(alone.pool.next_measurement(0, Instant::ZERO), None);
    let mut idle = Bench::new(&BURSTS, &[(100, Load::NONE)]);
    idle.run(60.0);
    assert!(idle.observations <= 62, "{} looks in a minute", idle.observations);
    assert_eq!(idle.rate_changes, 1);
}

#[test]
fn steady_load_sets_rates_once() {
    let mut bench = Bench::new(
        &[("bps-write", 8 * MIB)],
        &[(100, Load::greedy(65_536)), (200, Load::greedy(65_536)), (100, Load::NONE)],
    );
    bench.run(5.0);
    let changes_before = bench.rate_changes;
    bench.run(30.0);
    assert!(bench.rate_changes - changes_before <= 2, "{} more reports", bench.rate_changes - changes_before);
}

#[test]
fn a_watermark_scales_and_lifts() {
    let mut bench = Bench::new(&[("bps-write", 4 * MIB)], &[(100, Load::greedy(65_536))]);
    bench.pool.enforce(Enforcement::Scaled(LimitScale::from_thousandths(3500)));
    assert_eq!(
        bench.pool.decide(Instant::ZERO),
        [(0, IoMaxRates { bps: [None, Some(14 * MIB)], iops: [None; 2] })]
    );
    bench.pool.enforce(Enforcement::Lifted);
    assert_eq!(bench.pool.decide(Instant::ZERO), [(0, IoMaxRates::NONE)]);
    assert_eq!(
        bench.pool.rates_without_steering(),
        [IoMaxRates { bps: [None, Some(4 * MIB)], iops: [None; 2] }]
    );
}

#[test]
fn rates_fall_before_others_rise() {
    let second = Load { from_s: 5.0, ..Load::greedy(65_536) };
    let mut bench = Bench::new(&[("bps-write", 8 * MIB)], &[(100, second), (100, Load::greedy(65_536))]);
    bench.run(4.0);
    bench.kernels[0].waited = true;
    bench.now += Duration::from_millis(100);
    bench.observe(0);
    bench.observe(1);
    let changes = bench.pool.decide(bench.now);
    assert_eq!(changes.iter().map(|(member, _)| *member).collect::<Vec<_>>(), [1, 0]);
}

#[test]
fn operations_larger_than_iops_size_count_as_several() {
    let settings = [("iops-write", 100), ("iops-size", 4096)];
    for (size, expect) in [(4096, 100.0 * 4096.0), (65_536, 100.0 * 4096.0), (512, 100.0 * 512.0)] {
        let mut bench = Bench::new(&settings, &[(100, Load::greedy(size))]);
        bench.run(20.0);
        assert_close(bench.rate(1.0, 20.0), expect, 0.05);
    }
}

#[test]
fn resumed_pool_grants_no_second_burst() {
    let mut bench = Bench::new(&BURSTS, &[(100, Load::greedy(65_536))]);
    bench.run(4.0);
    bench.observe(0);
    bench.pool.decide(bench.now);
    let (levels, passed) = (bench.pool.levels(), bench.pool.members()[0].passed());
    // A second at the burst rate passes without a measurement.
    let since = bench.now;
    bench.due.clear();
    bench.run(1.0);
    let mut pool = SteeringPool::new(bench.pool.limits(), since);
    pool.add(SteeredMember::new(100));
    pool.resume(since, levels, &[passed]);
    bench.pool = pool;
    bench.observe(0);
    bench.apply_rates();
    bench.run(25.0);
    assert_close(bench.rate(0.0, 6.2), 20.0 * MIB as f64, 0.02);
    assert_close(bench.rate(6.5, 30.0), 4.0 * MIB as f64, 0.02);
}

/// Two members that use the rates they are set to for a second.
fn busy(pool: &mut SteeringPool, now: &mut Instant, passed: &mut [IoCounters; 2], busy: [bool; 2]) {
    for _ in 0..10 {
        *now += Duration::from_millis(100);
        for member in 0..2 {
            let rate = pool.members()[member].rates_set().map_or(0, |rates| rates.bps[1].unwrap_or(0));
            if busy[member] {
                passed[member][1].bytes += rate / 10;
                passed[member][1].requests += 1;
            }
            pool.observe(member, *now, passed[member], Some(false));
        }
        pool.decide(*now);
    }
}

#[test]
fn small_quota_cuts_lower_higher_rates() {
    let mut now = Instant::from_nanos(0);
    let mut pool = SteeringPool::new(&limits(&[("bps-write", 100 * MIB)]), now);
    pool.add(SteeredMember::new(100));
    pool.add(SteeredMember::new(100));
    let mut passed = [IoCounters::default(); 2];
    // Idle and busy members: neither may keep a rate that other hosts may have by now.
    for members in [[false, false], [true, false], [true, true]] {
        for thousandths in [1000_u64, 999, 996, 960, 910, 905, 1000] {
            busy(&mut pool, &mut now, &mut passed, members);
            let part = 100 * MIB * thousandths / 1000;
            pool.set_limits(&limits(&[("bps-write", part)]), now);
            pool.decide(now);
            let rates_set = pool.members().iter().filter_map(|member| member.rates_set()?.bps[1]);
            let sum: u64 = rates_set.sum();
            assert!(sum <= part, "{members:?}: rates of {sum} for a part of {part}");
            assert!(sum > part * 9 / 10, "{members:?}: rates of only {sum} for a part of {part}");
        }
    }
}

#[test]
fn full_use_counts_as_throttled() {
    let mut now = Instant::from_nanos(0);
    let mut pool = SteeringPool::new(&limits(&[("bps-write", 100 * MIB)]), now);
    pool.add(SteeredMember::new(100));
    pool.add(SteeredMember::new(300));
    pool.decide(now);
    let mut passed = [IoCounters::default(); 2];
    busy(&mut pool, &mut now, &mut passed, [false, false]);
    assert_eq!((pool.stats().throttled_ns, pool.weight(now)), (0, 0));
    busy(&mut pool, &mut now, &mut passed, [true, false]);
    let stats = pool.stats();
    assert_eq!(stats.throttle_cause, Some(CauseKind::Limit(LimitKind::BpsWrite)));
    assert!((800_000_000..=1_000_000_000).contains(&stats.throttled_ns), "{}", stats.throttled_ns);
    assert_eq!((stats.writes.bytes, pool.weight(now)), (passed[0][1].bytes, 100));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// The sum of the rates in force never exceeds the limit, whatever the members do.
    #[test]
    fn the_parts_never_add_up_to_more_than_the_limit(
        rate in 1_000_u64..100_000_000,
        burst in prop_oneof![Just(0_u64), 1_u64..5],
        total in any::<bool>(),
        members in prop::collection::vec((1_u32..1000, 0.0..10.0, 0.0..10.0, 0.0..50_000_000.0, 512_u64..262_144, 0_usize..2), 1..6),
    ) {
        let name = if total { "bps-total" } else { "bps-write" };
        let burst_name = format!("{name}-max");
        let mut settings = vec![(name, rate)];
        if burst > 0 {
            settings.push((&burst_name, rate * (burst + 1)));
        }
        let loads: Vec<(u32, Load)> = members
            .iter()
            .map(|&(weight, from_s, lasts_s, rate, size, direction)| {
                (weight, Load { from_s, until_s: from_s + lasts_s, rate, size, direction })
            })
            .collect();
        let mut bench = Bench::new(&settings, &loads);
        let max_rate = rate * (burst + 1);
        for _ in 0..100 {
            bench.run(0.1);
            let rates_set = |member: &SteeredMember| member.rates_set().map_or(0, |told| told.bps.into_iter().flatten().sum::<u64>());
            let sum: u64 = bench.pool.members().iter().map(rates_set).sum();
            // A fall of less than 0.5 % is not set, and an unlimited direction does not count.
            prop_assert!(sum as f64 <= max_rate as f64 * 1.005 + members.len() as f64 * 4.0, "rates of {} for a limit of {}", sum, max_rate);
        }
        // In the long run I/O is bounded by the rate, the bucket, and one request of each member.
        let largest: u64 = members.iter().map(|member| member.4).sum();
        let bucket_allowance = if burst > 0 { (max_rate + max_rate / 10) as f64 } else { rate as f64 / 10.0 * members.len() as f64 + rate as f64 / 10.0 };
        let passed: f64 = bench.kernels.iter().filter(|kernel| total || kernel.load.direction == 1).map(|kept| kept.bytes() as f64).sum();
        prop_assert!(passed <= rate as f64 * 10.0 * 1.01 + bucket_allowance + 2.0 * largest as f64, "{} passed at {}", passed, rate);
    }
}
