//! States, order and bounds of the controller, with measurements made by hand.

use policy::histogram::LatencyHistogram;
use policy::latency_target::{
    GIVE_UP, IDLE, LatencyController, MemberClass, MemberSample, PercentileTarget, RETRY, RateCap, SLACK,
    TargetDirections, TargetState, UNIT_BYTES,
};
use policy::throttle::{LimitKind, NodeShare};
use policy::time::{Duration, Instant};

const STEP: Duration = Duration::from_millis(50);
const STEPS_PER_S: u64 = 20;
const BOUND_NS: u64 = 5_000_000;
const FAST_NS: u64 = 1_000_000;
const LATE_NS: u64 = 7_000_000;
/// Members of [`Measurements::new`].
const DB: u64 = 0;
const ONE: u64 = 1;
const OTHER: u64 = 2;

/// Measurements of a member in each step, while it has no cap. A cap reduces them in proportion.
struct Measured {
    class: MemberClass,
    share: NodeShare,
    floor: Option<u64>,
    requests: u64,
    bytes: u64,
    in_flight: u64,
    is_waiting: bool,
    latencies: [LatencyHistogram; 2],
}

impl Measured {
    /// 100 requests of 4 KiB in each step, 2,000 a second, with 20 in flight.
    fn new(class: MemberClass) -> Self {
        Self {
            class,
            share: NodeShare::default(),
            floor: None,
            requests: 100,
            bytes: 100 * 4096,
            in_flight: 20,
            is_waiting: true,
            latencies: [LatencyHistogram::new(), LatencyHistogram::new()],
        }
    }

    fn target(bound_ns: u64) -> Self {
        let target = PercentileTarget::new(bound_ns, 9900, TargetDirections::All).unwrap();
        Self { requests: 20, in_flight: 1, is_waiting: false, ..Self::new(MemberClass::Target(target)) }
    }

    fn set_latency(&mut self, latency_ns: u64) {
        self.latencies[0].clear();
        self.latencies[0].add(latency_ns, self.requests);
    }

    fn stop(&mut self) {
        (self.requests, self.bytes, self.in_flight, self.is_waiting) = (0, 0, 0, false);
        self.latencies[0].clear();
    }
}

struct Measurements {
    controller: LatencyController,
    now: Instant,
    members: Vec<Measured>,
}

impl Measurements {
    /// A target of 5 ms that is met, beside two busy members.
    fn new() -> Self {
        let ordinary = || Measured::new(MemberClass::Ordinary);
        let mut all = Self {
            controller: LatencyController::new(),
            now: Instant::from_nanos(1_000_000_000),
            members: vec![Measured::target(BOUND_NS), ordinary(), ordinary()],
        };
        all.members[0].set_latency(FAST_NS);
        all.run(STEP);
        all
    }

    fn run(&mut self, duration: Duration) {
        let end = self.now + duration;
        while self.now < end {
            let mut samples = Vec::new();
            for (key, member) in (0..).zip(&self.members) {
                let units = (member.bytes / member.requests.max(1) / UNIT_BYTES).max(1);
                let cap = self.controller.cap(key).map(RateCap::units_per_s);
                let allowed = cap.map_or(u64::MAX, |cap| cap / units / STEPS_PER_S);
                let requests = member.requests.min(allowed);
                let part = |number: u64| number * requests / member.requests.max(1);
                samples.push(MemberSample {
                    key,
                    class: member.class,
                    share: member.share,
                    floor: member.floor,
                    requests,
                    bytes: part(member.bytes),
                    mean_in_flight: 0.0,
                    in_flight: [
                        if member.requests == 0 { member.in_flight } else { part(member.in_flight) },
                        0,
                    ],
                    is_waiting: member.is_waiting,
                    latencies: Some(&member.latencies),
                });
            }
            self.now += STEP;
            self.controller.step(self.now, &samples);
        }
    }

    fn cap(&self, member: u64) -> u64 {
        self.controller.cap(member).expect("the member is capped").units_per_s()
    }

    fn db(&self) -> TargetState {
        self.controller.state(DB).expect("the member has a target")
    }

    #[track_caller]
    fn assert_no_caps(&self) {
        assert!((0..self.members.len() as u64).all(|member| self.controller.cap(member).is_none()));
    }
}

fn s(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn target_that_is_met_causes_no_caps() {
    let mut all = Measurements::new();
    // One of 200 completions is late; two may be.
    for _ in 0..100 {
        all.members[0].set_latency(FAST_NS);
        all.run(9 * STEP);
        all.members[0].latencies[0].add(LATE_NS, 1);
        all.run(STEP);
        assert_eq!(all.db(), TargetState::Met);
        all.assert_no_caps();
    }
}

#[test]
fn late_completions_cap_the_others_at_once() {
    let mut all = Measurements::new();
    all.members[0].set_latency(LATE_NS);
    all.run(STEP);
    assert_eq!(all.db(), TargetState::Controlling);
    assert!(all.controller.cap(DB).is_none());
    assert!(all.cap(ONE) <= 2000 && all.cap(OTHER) <= 2000);
    let limits = all.controller.cap(ONE).unwrap().limits();
    assert_eq!(limits.limit(LimitKind::IopsTotal).rate, all.cap(ONE));
    assert_eq!(limits.limit(LimitKind::BpsTotal).rate, all.cap(ONE) * 65_536);
}

#[test]
fn caps_rise_while_the_response_time_is_short() {
    let mut all = Measurements::new();
    all.members[0].set_latency(LATE_NS);
    all.run(STEP);
    all.members[1..].iter_mut().for_each(|member| member.requests *= 10);
    let before = all.cap(ONE);
    all.members[0].set_latency(FAST_NS);
    all.run(s(1));
    assert!(all.cap(ONE) > 2 * before, "{} after {before}", all.cap(ONE));
}

/// The others' requests are slow by themselves: in flight for 10 ms.
#[test]
fn setpoint_rises_quickly_while_half_of_the_bound_is_met() {
    let mut all = Measurements::new();
    all.members[0].set_latency(LATE_NS);
    all.run(STEP);
    all.members[0].set_latency(FAST_NS);
    all.run(s(4));
    assert!(all.cap(ONE) > 1500, "{}", all.cap(ONE));
}

#[test]
fn requests_that_do_not_complete_are_late() {
    let mut all = Measurements::new();
    (all.members[0].requests, all.members[0].in_flight) = (0, 1);
    all.members[0].latencies[0].clear();
    all.run(4 * STEP);
    assert_eq!(all.db(), TargetState::Controlling);
}

#[test]
fn uncovered_directions_are_not_judged() {
    let mut all = Measurements::new();
    let target = PercentileTarget::new(BOUND_NS, 9900, TargetDirections::Writes).unwrap();
    all.members[0].class = MemberClass::Target(target);
    all.members[0].set_latency(LATE_NS);
    all.run(s(1));
    assert_eq!(all.db(), TargetState::Met);
    all.members[0].latencies.swap(0, 1);
    all.run(s(1));
    assert_eq!(all.db(), TargetState::Controlling);
}

#[test]
fn spare_capacity_work_is_throttled_first() {
    let mut all = Measurements::new();
    all.members[1].class = MemberClass::SpareCapacity;
    all.members[0].set_latency(LATE_NS);
    all.run(STEP);
    assert!(all.cap(ONE) < 60, "1 % of 4,400 a second and rounding, not {}", all.cap(ONE));
    assert!(all.cap(OTHER) > 1500, "{}", all.cap(OTHER));
}

#[test]
fn reservation_and_floor_are_kept() {
    let mut all = Measurements::new();
    all.members[0].set_latency(LATE_NS);
    all.members[1].share = NodeShare::default().with_reservation(700, 0);
    all.members[2].floor = Some(90);
    all.run(s(4));
    assert!((700..=722).contains(&all.cap(ONE)), "{}", all.cap(ONE));
    assert!((90..=94).contains(&all.cap(OTHER)), "{}", all.cap(OTHER));
}

#[test]
fn reservations_are_those_of_the_requests_in_use() {
    let mut all = Measurements::new();
    all.members[0].set_latency(LATE_NS);
    // 30 requests a second of 1 MiB are 480 units; 10 MB/s in requests of 4 KiB are 2,442.
    all.members[1].share = NodeShare::default().with_reservation(30, 0);
    all.members[1].bytes = all.members[1].requests << 20;
    all.members[2].share = NodeShare::default().with_reservation(0, 10_000_000);
    all.run(s(4));
    assert!((480..=496).contains(&all.cap(ONE)), "{}", all.cap(ONE));
    assert!((2442..=2516).contains(&all.cap(OTHER)), "{}", all.cap(OTHER));
}

#[test]
fn weights_divide_the_budget() {
    let mut all = Measurements::new();
    all.members[1].share = NodeShare::new(300).unwrap();
    all.members[0].set_latency(LATE_NS);
    all.run(2 * STEP);
    let ratio = all.cap(ONE) as f64 / all.cap(OTHER) as f64;
    assert!((2.9..3.1).contains(&ratio), "{ratio}");
}

#[test]
fn looser_target_is_capped_for_a_stricter_one() {
    let mut all = Measurements::new();
    all.members.push(Measured::target(2 * BOUND_NS));
    all.members.push(Measured::target(BOUND_NS));
    all.members[3].set_latency(FAST_NS);
    all.members[4].set_latency(FAST_NS);
    all.run(STEP);
    all.members[0].set_latency(LATE_NS);
    all.run(STEP);
    assert!(all.controller.cap(3).is_some(), "the looser target");
    assert!(all.controller.cap(4).is_none(), "an equal target");
}

#[test]
fn target_that_cannot_be_met_releases_the_others() {
    let mut all = Measurements::new();
    // Latencies beside members above their minimum do not count as those alone.
    all.members[0].set_latency(4 * LATE_NS);
    all.run(10 * STEP);
    all.members[0].set_latency(LATE_NS);
    let mut given_up = None;
    for _ in 0..200 {
        all.run(STEP);
        if let TargetState::CannotBeMet { alone_ns, retry } = all.db() {
            given_up = Some((all.now, alone_ns, retry));
            break;
        }
    }
    let (at, alone_ns, retry) = given_up.expect("given up within 10 s");
    assert!(at >= Instant::from_nanos(1_000_000_000) + GIVE_UP);
    assert!(alone_ns.abs_diff(LATE_NS) <= LATE_NS / 32, "{alone_ns}");
    assert_eq!(retry, at + RETRY);
    all.assert_no_caps();
    all.run(RETRY - STEP);
    assert_eq!(all.db(), TargetState::CannotBeMet { alone_ns, retry });
    all.assert_no_caps();
    all.run(2 * STEP);
    assert_eq!(all.db(), TargetState::Controlling);
}

#[test]
fn new_load_ends_a_release() {
    let mut all = Measurements::new();
    all.members[0].set_latency(LATE_NS);
    all.run(s(12));
    assert!(matches!(all.db(), TargetState::CannotBeMet { .. }));
    all.run(s(6));
    assert!(matches!(all.db(), TargetState::CannotBeMet { .. }));
    all.members[1].requests *= 5;
    all.run(s(3));
    assert_eq!(all.db(), TargetState::Controlling);
}

#[test]
fn target_that_is_met_again_ends_a_release() {
    let mut all = Measurements::new();
    all.members[0].set_latency(LATE_NS);
    all.run(s(12));
    all.members[0].set_latency(FAST_NS);
    all.run(s(3));
    assert_eq!(all.db(), TargetState::Met);
    all.assert_no_caps();
}

#[test]
fn slack_removes_caps() {
    let mut all = Measurements::new();
    all.members[0].set_latency(LATE_NS);
    all.run(STEP);
    all.members[0].set_latency(FAST_NS);
    all.members[1..].iter_mut().for_each(|member| (member.is_waiting, member.in_flight) = (false, 1));
    all.run(SLACK - STEP);
    assert_eq!(all.db(), TargetState::Controlling);
    all.run(2 * STEP);
    assert_eq!(all.db(), TargetState::Met);
    all.assert_no_caps();
}

#[test]
fn idle_target_removes_caps() {
    let mut all = Measurements::new();
    all.members[0].set_latency(LATE_NS);
    all.run(STEP);
    all.members[0].stop();
    all.run(IDLE - STEP);
    assert_eq!(all.db(), TargetState::Controlling);
    all.run(STEP);
    assert_eq!(all.db(), TargetState::Met);
    all.assert_no_caps();
}

#[test]
fn long_gap_between_steps_removes_caps() {
    let mut all = Measurements::new();
    all.members[0].set_latency(LATE_NS);
    all.run(STEP);
    assert!(all.controller.cap(ONE).is_some());
    all.now += s(2);
    all.run(STEP);
    all.assert_no_caps();
}

#[test]
fn target_without_other_members_is_reported() {
    let mut all = Measurements::new();
    all.members.truncate(1);
    all.members[0].set_latency(LATE_NS);
    all.run(s(6));
    assert!(matches!(all.db(), TargetState::CannotBeMet { .. }), "{:?}", all.db());
}
