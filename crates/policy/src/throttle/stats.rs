//! What can be said of a node afterwards: what passed, what waited for how long, and what it waits for now.
//!
//! Counting must cost next to nothing where nothing waits, so the histogram of waits exists only once something has.
//! Never decides anything.

use super::cost::Cost;
use super::limits::LimitKind;
use alloc::boxed::Box;

/// What has passed a node in one direction since it was added. Counted when it is admitted, not before.
///
/// Merged requests count as the requests the client sent. Saturates, as what is only ever shown may.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Counters {
    /// Requests admitted, at once or after waiting.
    pub requests: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Those that had to wait.
    pub throttled: u64,
    /// How long those waited, in nanoseconds, all added up.
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
}

/// How long requests waited, of those that did. All zero when none has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct WaitSummary {
    /// Half of them waited no longer than this, in nanoseconds; at most 5 % too high.
    pub p50_ns: u64,
    /// 99 of 100 waited no longer than this; at most 5 % too high.
    pub p99_ns: u64,
    /// The longest wait, exactly.
    pub max_ns: u64,
}

/// A node, as seen at one instant.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stats {
    /// Reads that have passed it.
    pub reads: Counters,
    /// Writes and discards that have passed it.
    pub writes: Counters,
    /// How long requests waited that passed it, whatever for.
    pub waits: WaitSummary,
    /// Nanoseconds during which work waited for this node's own limits, in either direction.
    pub limited_ns: u64,
    /// The limit of this node that work waits for; or waited for last, while work still waits.
    pub binding: Option<LimitKind>,
    /// By [`LimitKind::index`]: whole units that may pass at once before something waits; `None` where no limit is set.
    pub tokens: [Option<u64>; 6],
    /// By direction: requests that wait here or below.
    pub waiting: [usize; 2],
}

/// Octaves are cut into so many steps, so a value is reported at most 1/32 too high.
const STEPS: u64 = 32;
const STEP_BITS: u32 = STEPS.trailing_zeros();
/// Up to 2⁴⁸ ns, three days; what waits longer counts as that, but for the maximum.
const OCTAVES: usize = 48 - STEP_BITS as usize + 1;

/// Waits by length: a histogram whose steps grow with what they hold.
#[derive(Clone, Debug)]
pub(super) struct Waits {
    counts: Box<[u64; OCTAVES * STEPS as usize]>,
    total: u64,
    max_ns: u64,
}

impl Waits {
    pub(super) fn new() -> Self {
        Self { counts: Box::new([0; OCTAVES * STEPS as usize]), total: 0, max_ns: 0 }
    }

    pub(super) fn add(&mut self, wait_ns: u64, requests: u64) {
        let at = step_of(wait_ns);
        self.counts[at] = self.counts[at].saturating_add(requests);
        self.total = self.total.saturating_add(requests);
        self.max_ns = self.max_ns.max(wait_ns);
    }

    pub(super) fn summary(&self) -> WaitSummary {
        WaitSummary { p50_ns: self.percentile(50), p99_ns: self.percentile(99), max_ns: self.max_ns }
    }

    fn percentile(&self, percent: u64) -> u64 {
        let rank = (u128::from(self.total) * u128::from(percent)).div_ceil(100);
        let mut seen = 0;
        for (at, count) in self.counts.iter().enumerate() {
            seen += u128::from(*count);
            if seen >= rank && *count > 0 {
                return last_of(at).min(self.max_ns);
            }
        }
        self.max_ns
    }
}

fn step_of(ns: u64) -> usize {
    let octave = (u64::BITS - ns.leading_zeros()).saturating_sub(STEP_BITS + 1);
    // The first octave holds the values below STEPS singly, and so does the second up to 2 × STEPS.
    let step = if ns < STEPS { ns } else { STEPS * u64::from(octave) + (ns >> octave) };
    (step as usize).min(OCTAVES * STEPS as usize - 1)
}

/// The largest value that counts in this step.
fn last_of(step: usize) -> u64 {
    let (octave, within) = (step as u64 / STEPS, step as u64 % STEPS);
    if octave == 0 { within } else { ((within + STEPS + 1) << (octave - 1)) - 1 }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_step_ends_at_most_5_percent_above_what_it_holds(ns in prop_oneof![0..2000u64, 0..1u64 << 47]) {
            let last = last_of(step_of(ns));
            prop_assert!(last >= ns && (last - ns) * 20 <= ns, "{ns} counts as {last}");
            prop_assert_eq!(step_of(last), step_of(ns));
            prop_assert_eq!(step_of(last + 1), step_of(ns) + 1);
        }
    }

    #[test]
    fn percentiles_and_maximum() {
        let mut waits = Waits::new();
        assert_eq!(waits.summary(), WaitSummary::default());
        waits.add(10, 98);
        waits.add(1_000_000, 1);
        waits.add(u64::MAX, 1);
        let WaitSummary { p50_ns, p99_ns, max_ns } = waits.summary();
        assert_eq!((p50_ns, max_ns), (10, u64::MAX));
        assert!((1_000_000..1_050_000).contains(&p99_ns), "{p99_ns}");
    }
}
