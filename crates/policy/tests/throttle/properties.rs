//! What holds of every group, whatever the limits, the members and the requests.

use crate::timeline::{Timeline, Workload};
use policy::request::Direction;
use policy::throttle::{
    Admission, Cost, Decision, Group, LimitKind, Limits, MemberId, Part, Setting, Share, Ticket,
};
use policy::time::{Duration, Instant};
use proptest::prelude::*;
use std::collections::{HashMap, VecDeque};

/// Valid limits of every shape: some kinds unlimited, total or split, with and without bursts.
fn any_limits() -> impl Strategy<Value = Limits> {
    let one = (0..5_000u64, 0..6u64, 1..8u64);
    (prop::array::uniform6(one), any::<[bool; 2]>(), prop_oneof![Just(0), 512..65_536u64]).prop_map(
        |(numbers, use_total, iops_size)| {
            let mut limits = Limits::default();
            for (kind, (rate, factor, length)) in LimitKind::ALL.into_iter().zip(numbers) {
                let is_total = matches!(kind, LimitKind::BpsTotal | LimitKind::IopsTotal);
                if rate < 1000 || is_total != use_total[usize::from(kind.counts_bytes())] {
                    continue;
                }
                let rate = if kind.counts_bytes() { rate * 1000 } else { rate };
                limits.limit_mut(kind).rate = rate;
                limits.limit_mut(kind).burst_rate = rate * factor;
                limits.limit_mut(kind).burst_length_s = if factor == 0 { 1 } else { length };
                limits.iops_size = if kind.counts_bytes() { 0 } else { iops_size };
            }
            limits
        },
    )
}

fn any_direction() -> impl Strategy<Value = Direction> {
    prop::sample::select(&Direction::ALL[..])
}

#[derive(Clone, Debug)]
enum Step {
    Join,
    Leave(usize),
    Request(usize, Direction, Vec<u64>),
    Cancel(usize),
    Change(Limits),
    /// Time passes; and sometimes an instant comes that is older than the last.
    Pass(u64, u64),
    /// Time passes up to the deadline, exactly.
    Meet,
}

fn any_step() -> impl Strategy<Value = Step> {
    prop_oneof![
        2 => Just(Step::Join),
        1 => (0..8usize).prop_map(Step::Leave),
        20 => (0..8usize, any_direction(), prop::collection::vec(0..100_000u64, 1..4))
            .prop_map(|(member, direction, lengths)| Step::Request(member, direction, lengths)),
        3 => (0..64usize).prop_map(Step::Cancel),
        1 => any_limits().prop_map(Step::Change),
        4 => (0..200_000_000u64, 0..5_000_000u64).prop_map(|(ahead, back)| Step::Pass(ahead, back)),
        4 => Just(Step::Meet),
    ]
}

/// A group, and what must be true of it: who waits, in which order.
struct Checked {
    group: Group<u64>,
    now: Instant,
    members: Vec<MemberId>,
    tickets: Vec<(Ticket, u64)>,
    waiting: HashMap<(MemberId, Direction), VecDeque<u64>>,
    owner: HashMap<u64, (MemberId, Direction)>,
    next_token: u64,
    out: u64,
}

impl Checked {
    fn new(limits: Limits) -> Self {
        let mut group = Group::new(limits, Instant::ZERO).unwrap();
        Self {
            members: vec![group.join(Share::default())],
            group,
            now: Instant::ZERO,
            tickets: Vec::new(),
            waiting: HashMap::new(),
            owner: HashMap::new(),
            next_token: 0,
            out: 0,
        }
    }

    fn waiting_in_all(&self) -> usize {
        self.waiting.values().map(VecDeque::len).sum()
    }

    fn take(&mut self, step: &Step) {
        match step {
            Step::Join => self.members.push(self.group.join(Share::default())),
            Step::Leave(at) => self.leave(*at),
            Step::Request(at, direction, lengths) => self.request(*at, *direction, lengths),
            Step::Cancel(at) => self.cancel(*at),
            Step::Change(limits) => self.group.set_limits(*limits, self.now).unwrap(),
            Step::Pass(ahead, back) => {
                self.poll_all();
                self.now += Duration::from_nanos(*ahead);
                let older = Instant::from_nanos(self.now.as_nanos().saturating_sub(*back));
                self.poll_all();
                self.poll_all_at(older);
            }
            Step::Meet => {
                self.poll_all();
            }
        }
    }

    fn request(&mut self, at: usize, direction: Direction, lengths: &[u64]) {
        if self.members.is_empty() {
            return;
        }
        let member = self.members[at % self.members.len()];
        let token = self.next_token;
        self.next_token += 1;
        match self.group.request(member, direction, Cost::merged(lengths), token, self.now) {
            Admission::Admitted(admitted) => {
                assert_eq!(admitted, token);
                let before =
                    self.waiting.iter().filter(|((_, d), queue)| *d == direction && !queue.is_empty());
                assert_eq!(before.count(), 0, "overtook a request of its direction");
                self.out += 1;
            }
            Admission::Queued(ticket) => {
                self.tickets.push((ticket, token));
                self.owner.insert(token, (member, direction));
                self.waiting.entry((member, direction)).or_default().push_back(token);
            }
        }
    }

    fn cancel(&mut self, at: usize) {
        if self.tickets.is_empty() {
            return;
        }
        let (ticket, token) = self.tickets.swap_remove(at % self.tickets.len());
        let queue = self.waiting.get_mut(&self.owner[&token]).unwrap();
        let place = queue.iter().position(|waiting| *waiting == token);
        assert_eq!(self.group.cancel(ticket), place.map(|_| token));
        if let Some(place) = place {
            queue.remove(place);
            self.out += 1;
        }
    }

    fn leave(&mut self, at: usize) {
        if self.members.is_empty() {
            return;
        }
        let member = self.members.swap_remove(at % self.members.len());
        let mut expected: Vec<_> = Direction::ALL
            .into_iter()
            .flat_map(|direction| {
                self.waiting.insert((member, direction), VecDeque::new()).unwrap_or_default()
            })
            .collect();
        expected.sort_unstable();
        let given_back = self.group.leave(member);
        assert_eq!(given_back, expected);
        self.out += given_back.len() as u64;
    }

    /// Polls until nothing more may pass; returns the deadline if something waits.
    fn poll_all_at(&mut self, now: Instant) -> Option<Instant> {
        loop {
            match self.group.poll(now) {
                Decision::Admit(token) => {
                    let queue = self.waiting.get_mut(&self.owner[&token]).unwrap();
                    assert_eq!(queue.pop_front(), Some(token), "not the first of its queue");
                    self.out += 1;
                }
                Decision::Wait { until } => {
                    assert!(self.waiting_in_all() > 0 && until > now);
                    return Some(until);
                }
                Decision::Idle => {
                    assert_eq!(self.waiting_in_all(), 0, "idle with work waiting");
                    return None;
                }
            }
        }
    }

    fn poll_all(&mut self) -> Option<Instant> {
        self.poll_all_at(self.now)
    }

    /// Lets time pass to the next deadline: something passes then, and not a nanosecond before.
    fn meet_deadline(&mut self) -> bool {
        let Some(until) = self.poll_all() else { return false };
        let (waiting, before) = (self.waiting_in_all(), Instant::from_nanos(until.as_nanos() - 1));
        if before >= self.now {
            assert_eq!(self.poll_all_at(before), Some(until), "the deadline moved");
        }
        self.now = self.now.max(until);
        self.poll_all();
        assert!(self.waiting_in_all() < waiting, "nothing passed at the deadline");
        true
    }
}

proptest! {
    #[test]
    fn every_request_comes_out_once_in_order_and_on_time(
        limits in any_limits(),
        steps in prop::collection::vec(any_step(), 1..200),
    ) {
        let mut checked = Checked::new(limits);
        for step in &steps {
            checked.take(step);
            if matches!(step, Step::Meet) {
                checked.meet_deadline();
            }
            let waiting = Direction::ALL.map(|direction| checked.group.waiting(direction));
            prop_assert_eq!(waiting.iter().sum::<usize>(), checked.waiting_in_all());
        }
        while checked.meet_deadline() {}
        prop_assert_eq!(checked.out, checked.next_token);
    }

    #[test]
    fn no_second_sees_more_than_the_rate_and_the_burst(
        limits in any_limits(),
        workloads in prop::collection::vec((any_direction(), 0..40_000u64, 1..16u64, 50..5_000u64), 1..6),
        late_ms in 0..10u64,
    ) {
        let mut disks = timeline_of(&limits).with_late_timers(Duration::from_millis(late_ms));
        for (direction, length, depth, latency_us) in &workloads {
            let latency = Duration::from_micros(*latency_us);
            let workload = Workload { direction: *direction, ..Workload::READS };
            disks.add(workload.of(*length).depth(*depth).latency(latency));
        }
        disks.run_until(crate::timeline::s(6));
        let largest = workloads.iter().map(|(_, length, ..)| *length).max().unwrap_or(0);
        for kind in LimitKind::ALL.into_iter().filter(|kind| limits.limit(*kind).rate > 0) {
            let applies = |direction| LimitKind::applying_to(direction).contains(&kind);
            let most = disks.most_in_any_second(|direction, bytes| match (applies(direction), kind.counts_bytes()) {
                (false, _) => 0,
                (true, true) => bytes,
                (true, false) => 1,
            });
            let one_over = if kind.counts_bytes() { largest } else { 1 };
            prop_assert!(most <= allowance(&limits, kind) + one_over, "{:?}: {} in a second", kind, most);
        }
    }
}

/// What may pass in a second beside the one request that makes the bucket run over.
fn allowance(limits: &Limits, kind: LimitKind) -> u64 {
    let limit = limits.limit(kind);
    let size =
        if limit.burst_rate == 0 { limit.rate.div_ceil(10) } else { limit.burst_rate * limit.burst_length_s };
    let in_the_long_run = limit.rate + size;
    if limit.burst_length_s > 1 {
        in_the_long_run.min(limit.burst_rate + limit.burst_rate.div_ceil(10))
    } else {
        in_the_long_run
    }
}

fn timeline_of(limits: &Limits) -> Timeline {
    let settings: Vec<_> = Setting::ALL
        .into_iter()
        .filter(|setting| {
            !matches!(setting, Setting::Limit(_, Part::BurstLength)) || limits.get(*setting) > 1
        })
        .map(|setting| format!("{setting}={}", limits.get(setting)))
        .collect();
    Timeline::new(&settings.join(","))
}
