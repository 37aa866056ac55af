//! What passed a node, what waited and how long, and what it waits for now. The histogram of waits
//! is made at the first wait. Never decides anything.

use super::cost::Cost;
use super::limits::LimitKind;
use super::promise::Kept;
use crate::time::Instant;
use alloc::{boxed::Box, vec::Vec};

/// What has been admitted by a node in one direction since it was added. Merged requests count as
/// the client sent them. Saturates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests admitted, at once or after waiting.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those that had to wait.
    pub throttled: u64,
    /// How long those waited, in nanoseconds, added up.
    pub waited_ns: u64,
}

impl Counters {
    pub(super) const fn count(&mut self, cost: &Cost, waited_ns: Option<u64>) {
        self.requests = self.requests.saturating_add(cost.requests());
        self.bytes = self.bytes.saturating_add(cost.bytes());
        if let Some(waited_ns) = waited_ns {
            self.throttled = self.throttled.saturating_add(cost.requests());
            self.waited_ns = self.waited_ns.saturating_add(waited_ns.saturating_mul(cost.requests()));
        }
    }

    /// Both together.
    pub const fn plus(self, other: Self) -> Self {
        Self {
            requests: self.requests.saturating_add(other.requests),
            bytes: self.bytes.saturating_add(other.bytes),
            throttled: self.throttled.saturating_add(other.throttled),
            waited_ns: self.waited_ns.saturating_add(other.waited_ns),
        }
    }
}

/// How long requests waited, of those that did. All zero when none has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitSummary {
    /// Half of them waited no longer than this, in nanoseconds; right within 3.2 % or 1 µs.
    pub p50_ns: u64,
    /// 99 of 100 waited no longer than this; right within 3.2 % or 1 µs.
    pub p99_ns: u64,
    /// The longest wait, exactly.
    pub max_ns: u64,
}

/// How full a limit's bucket is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// Bytes or operations. Above `capacity` after a request larger than the bucket, and after a
    /// change to a smaller limit.
    pub units: u64,
    /// Bytes or operations of a full bucket, at least 1: the burst rate times the burst length, or
    /// a tenth of the rate without a burst. The second bucket, which limits the rate of a long
    /// burst, is not a part of it.
    pub capacity: u64,
    /// Nanoseconds after which it is empty, if nothing else passes.
    pub empty_in_ns: u64,
}

impl Level {
    /// Units until the bucket is full; a burst may spread them over its length.
    pub const fn room(&self) -> u64 {
        self.capacity.saturating_sub(self.units)
    }

    /// Level as a share of the capacity, at most 1.
    pub fn ratio(&self) -> f64 {
        (self.units as f64 / self.capacity.max(1) as f64).min(1.0)
    }
}

/// A node, as seen at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Reads that have passed it.
    pub reads: Counters,
    /// Writes and discards that have passed it.
    pub writes: Counters,
    /// How long requests waited that passed it, whatever for, since it was added.
    pub waits: WaitSummary,
    /// The same of those that passed in the last [`RECENT_NS`] to twice that.
    pub recent_waits: WaitSummary,
    /// Nanoseconds during which work waited for this node's own limits, in either direction.
    pub limited_ns: u64,
    /// The limit of this node that work waits for, or waited for within a second.
    pub binding: Option<LimitKind>,
    /// By [`LimitKind::index`]: units that may pass before something waits.
    pub tokens: [Option<u64>; 6],
    /// By [`LimitKind::index`]: what has passed and not run out of its bucket yet.
    pub levels: [Option<Level>; 6],
    /// By direction: requests that wait here or below.
    pub waiting: [usize; 2],
    /// What became of its own reservation; `None` without one.
    pub kept: Option<Kept>,
}

/// What of [`Stats`] adds up as long as a node is there, for another process that goes on with it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Counted {
    /// By direction.
    pub passed: [Counters; 2],
    /// As [`Stats::limited_ns`].
    pub limited_ns: u64,
    /// As [`Stats::kept`].
    pub kept: Option<Kept>,
    /// How many requests waited, by the step of the histogram that their wait is in; none of steps
    /// without any.
    pub waits: Vec<(u16, u32)>,
    /// The longest wait, in nanoseconds.
    pub longest_wait_ns: u64,
}

/// For how much of an interval, in nanoseconds, requests of a disk or a group waited for limits,
/// its own or those of groups above: for at least as long as any of these was limited (`above_ns`),
/// but no longer than its waits that ended come to together (`waited_ns`), unless something waits
/// still.
pub fn limited_with_groups(
    own_ns: u64,
    above_ns: impl IntoIterator<Item = u64>,
    waited_ns: u64,
    still_waits: bool,
) -> u64 {
    let most = if still_waits { u64::MAX } else { waited_ns };
    own_ns.max(above_ns.into_iter().max().unwrap_or(0).min(most))
}

/// What of [`Stats`] costs next to nothing to ask for: for who looks at thousands each second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Brief {
    /// As [`Stats::limited_ns`].
    pub limited_ns: u64,
    /// As [`Stats::binding`].
    pub binding: Option<LimitKind>,
    /// As [`Stats::waiting`].
    pub waiting: [usize; 2],
    /// As [`Stats::kept`].
    pub kept: Option<Kept>,
}

/// How long a wait counts among the recent ones, in nanoseconds; at most twice as long.
pub const RECENT_NS: u64 = 10_000_000_000;

/// Waits are counted in units of 2¹⁰ ns, about a microsecond: nobody is told of less.
const UNIT_BITS: u32 = 10;
/// Steps in an octave. A value counts as the middle of its step, off by 1/32 at most.
const STEPS: u64 = 16;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Up to 2⁴² ns, 73 minutes; longer waits count as that.
const OCTAVES: usize = 32 - STEP_BITS as usize + 1;
const ALL_STEPS: usize = OCTAVES * STEPS as usize;

/// A histogram of waits: less than 2 KiB, since 10,000 disks may have three.
#[derive(Clone, Debug)]
pub(super) struct Waits {
    counts: Box<[u32; ALL_STEPS]>,
    max_ns: u64,
}

impl Waits {
    pub(super) fn new() -> Self {
        Self { counts: Box::new([0; ALL_STEPS]), max_ns: 0 }
    }

    pub(super) fn add(&mut self, wait_ns: u64, requests: u64) {
        self.max_ns = self.max_ns.max(wait_ns);
        let requests = u32::try_from(requests).unwrap_or(u32::MAX);
        let at = step_of(wait_ns);
        if let Some(sum) = self.counts[at].checked_add(requests) {
            self.counts[at] = sum;
        } else {
            // After four billion, only the proportions are kept.
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.counts[at] = self.counts[at].saturating_add(requests);
        }
    }

    pub(super) fn summary(&self) -> WaitSummary {
        WaitSummary { p50_ns: self.percentile(50), p99_ns: self.percentile(99), max_ns: self.max_ns }
    }

    fn percentile(&self, percent: u64) -> u64 {
        let total: u64 = self.counts.iter().map(|count| u64::from(*count)).sum();
        let rank = (u128::from(total) * u128::from(percent)).div_ceil(100);
        let mut seen = 0;
        for (at, count) in self.counts.iter().enumerate() {
            seen += u128::from(*count);
            if seen >= rank && *count > 0 {
                return middle_of(at).min(self.max_ns);
            }
        }
        self.max_ns
    }
}

fn step_of(ns: u64) -> usize {
    let units = ns >> UNIT_BITS;
    let octave = (u64::BITS - units.leading_zeros()).saturating_sub(STEP_BITS + 1);
    // The first two octaves hold the values below 2 × STEPS singly.
    let step = if units < STEPS { units } else { STEPS * u64::from(octave) + (units >> octave) };
    (step as usize).min(ALL_STEPS - 1)
}

/// The middle of a step, in nanoseconds.
fn middle_of(step: usize) -> u64 {
    let (octave, within) = (step as u64 / STEPS, step as u64 % STEPS);
    let (first, width) =
        if octave == 0 { (within, 1) } else { ((within + STEPS) << (octave - 1), 1 << (octave - 1)) };
    (first << UNIT_BITS) + ((width << UNIT_BITS) / 2)
}

/// The waits since the start, and of these the recent ones: two histograms that take turns, the
/// older of which is forgotten when the newer is [`RECENT_NS`] old.
#[derive(Clone, Debug)]
pub(super) struct AllWaits {
    all: Waits,
    /// The newer first.
    recent: [Waits; 2],
    /// When the newer was begun.
    begun: Instant,
}

impl AllWaits {
    pub(super) fn new(now: Instant) -> Self {
        Self { all: Waits::new(), recent: [Waits::new(), Waits::new()], begun: now }
    }

    pub(super) fn add(&mut self, wait_ns: u64, requests: u64, now: Instant) {
        let age_ns = now.nanos_since(self.begun);
        if age_ns >= RECENT_NS {
            self.recent.swap(0, 1);
            self.recent[0] = Waits::new();
            if age_ns >= 2 * RECENT_NS {
                self.recent[1] = Waits::new();
            }
            self.begun = now;
        }
        self.all.add(wait_ns, requests);
        self.recent[0].add(wait_ns, requests);
    }

    pub(super) fn all(&self) -> WaitSummary {
        self.all.summary()
    }

    /// Tells all of them: for [`AllWaits::count_on`].
    pub(super) fn tell(&self, counted: &mut Counted) {
        let steps = (0..).zip(self.all.counts.iter().copied());
        counted.waits = steps.filter(|(_, count)| *count > 0).collect();
        counted.longest_wait_ns = self.all.max_ns;
    }

    /// Adds what waited elsewhere, not of late. A step that there is not counts as the longest.
    pub(super) fn count_on(&mut self, counted: &Counted) {
        self.all.max_ns = self.all.max_ns.max(counted.longest_wait_ns);
        for &(step, count) in &counted.waits {
            let sum = &mut self.all.counts[usize::from(step).min(ALL_STEPS - 1)];
            *sum = sum.saturating_add(count);
        }
    }

    pub(super) fn recent(&self, now: Instant) -> WaitSummary {
        match now.nanos_since(self.begun) {
            age_ns if age_ns >= 2 * RECENT_NS => WaitSummary::default(),
            age_ns if age_ns >= RECENT_NS => self.recent[0].summary(),
            _ => {
                let mut both = self.recent[0].clone();
                both.max_ns = both.max_ns.max(self.recent[1].max_ns);
                for (count, older) in both.counts.iter_mut().zip(self.recent[1].counts.iter()) {
                    *count = count.saturating_add(*older);
                }
                both.summary()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_wait_is_told_within_a_thirty_second_or_half_a_microsecond(ns in prop_oneof![0..100_000u64, 0..1u64 << 42]) {
            let told = middle_of(step_of(ns));
            prop_assert!(told.abs_diff(ns) <= (ns / 32).max(512), "{ns} is told as {told}");
            prop_assert_eq!(step_of(told), step_of(ns));
        }
    }

    #[test]
    fn recent_waits_are_forgotten_and_all_are_not() {
        let at = |seconds: u64| Instant::from_nanos(seconds * 1_000_000_000);
        let mut waits = AllWaits::new(at(100));
        waits.add(1 << 30, 1000, at(100));
        for second in 111..130 {
            waits.add(1 << 20, 10, at(second));
            let longest = if second < 121 { 1 << 30 } else { 1 << 20 };
            assert_eq!(waits.recent(at(second)).max_ns, longest, "at {second} s");
        }
        assert!(waits.recent(at(130)).p99_ns < 1 << 21 && waits.all().p99_ns > 1 << 29);
        assert_ne!(waits.recent(at(140)), WaitSummary::default());
        assert_eq!(waits.recent(at(141)), WaitSummary::default(), "nothing has waited for long");
    }

    #[test]
    fn percentiles_and_maximum() {
        let mut waits = Waits::new();
        assert_eq!(waits.summary(), WaitSummary::default());
        waits.add(100_000, 98);
        waits.add(1_000_000, 1);
        waits.add(u64::MAX, 1);
        let WaitSummary { p50_ns, p99_ns, max_ns } = waits.summary();
        assert!(p50_ns.abs_diff(100_000) <= 3_200, "{p50_ns}");
        assert!(p99_ns.abs_diff(1_000_000) <= 32_000, "{p99_ns}");
        assert_eq!(max_ns, u64::MAX);
    }

    #[test]
    fn a_count_that_is_full_halves_them_all() {
        let mut waits = Waits::new();
        waits.add(1_000, u64::from(u32::MAX));
        waits.add(1 << 30, 1 << 31);
        let half_of_each = waits.summary();
        waits.add(1_000, 2);
        assert_eq!(waits.summary(), half_of_each);
        assert!(half_of_each.p50_ns < 1_024 && half_of_each.p99_ns > 1 << 29);
    }
}
