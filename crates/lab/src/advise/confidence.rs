//! Confidence interval of a limit: its distribution over days made of similar hours.
//!
//! The bootstrap over blocks (Künsch, *The Jackknife and the Bootstrap for General Stationary
//! Observations*, 1989): hours are drawn repeatedly, and the smallest limit of the same form is
//! determined for each draw. Requests of an hour stay together, because they depend on each other.
//! Hours depend on each other as well, so an interval from a single day does not cover other days.
//!
//! A draw is never worse than the observation, and a smallest limit just suffices for the worst
//! observation. The upper end is therefore raised: it must suffice for an hour that fills the
//! bucket more than the fullest observed one, by as many standard deviations among the hours as
//! Student's distribution demands (Gosset, 1908). Few or very different hours make the interval
//! wide. `tests/coverage.rs` measures the coverage.

use policy::throttle::{RateLimit, ReservationUnit};
use serde::Serialize;

use super::{arrival_curve::LimitBuckets, search::SearchTerms, target::LatencyTarget};

const HOUR_NS: u64 = 3_600_000_000_000;
/// Traces shorter than this are divided into tenths.
const HOURS: u64 = 10;
const TENTHS: u64 = 10;
const MAX_BLOCKS: u64 = 1000;
/// Minimum number of blocks to draw from.
const MIN_BLOCKS: usize = 6;
const DRAWS: usize = 1000;
/// A fixed seed: the same trace always gives the same interval.
const SEED: u64 = 0x5EED;
/// Limits tried: from a third to four times the estimate, in steps of 6.6 %.
const SCALES: usize = 40;
const NARROWEST: f64 = 1.0 / 3.0;
const WIDEST: f64 = 4.0;
/// Histogram of the bucket's level on arrival, relative to the level at which a request waits too
/// long: from 1/32, with this many bits for each doubling.
const FULL_BITS: u32 = 4;
const FULL_FIRST: u64 = (1.0_f64 / 32.0).to_bits() >> (52 - FULL_BITS);
const FULL_STEPS: usize = 8 << FULL_BITS;

/// Division of a trace into blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TraceBlocks {
    block_ns: u64,
    pub(super) count: usize,
}

impl TraceBlocks {
    pub(super) fn new(length_ns: u64) -> Self {
        let block_ns = match length_ns / HOUR_NS {
            HOURS.. => HOUR_NS.max(length_ns.div_ceil(MAX_BLOCKS)),
            _ => length_ns / TENTHS + 1,
        };
        Self { block_ns, count: (length_ns / block_ns + 1) as usize }
    }

    #[inline]
    pub(super) const fn of(&self, at_ns: u64) -> usize {
        (at_ns / self.block_ns) as usize
    }

    /// Length of each block in seconds, for a trace of this length.
    pub(super) fn seconds(&self, length_ns: u64) -> f64 {
        self.block_ns.min(length_ns).max(1) as f64 / 1e9
    }

    pub(super) const fn name(&self) -> &'static str {
        match self.block_ns {
            HOUR_NS => "hours",
            _ if self.count as u64 > TENTHS => "parts",
            _ => "tenths",
        }
    }
}

/// Factors on the rate: the range of the smallest limit on 95 of 100 similar days.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct ConfidenceInterval {
    pub(super) low: f64,
    pub(super) high: f64,
}

impl ConfidenceInterval {
    /// Union of the drawn interval and its mirror image (the basic bootstrap; Davison and Hinkley,
    /// *Bootstrap Methods and their Application*, 1997, section 5.2). A trace contains few of the
    /// rarest moments, so its smallest limit is more often too small than too large, and a limit
    /// from a draw is smaller again by as much.
    pub(super) fn around(low: f64, high: f64) -> Self {
        Self { low: low.min(1.0 / high).min(1.0), high: high.max(1.0 / low).max(1.0) }
    }
}

/// Confidence interval of the smallest limit for these requests; the error says why there is none.
pub(super) fn limit_interval(
    demand: impl Iterator<Item = (u64, f64)>,
    unit: ReservationUnit,
    limit: RateLimit,
    terms: &SearchTerms,
    blocks: TraceBlocks,
) -> Result<ConfidenceInterval, String> {
    // Geometric steps: the relative error of the interval is the same at both ends.
    let step = (WIDEST / NARROWEST).powf(1.0 / (SCALES - 1) as f64);
    let scales: Vec<f64> = (0..SCALES).map(|index| NARROWEST * step.powi(index as i32)).collect();
    let mut lanes: Vec<LimitBuckets> =
        scales.iter().map(|&factor| LimitBuckets::scaled(limit, unit, factor)).collect();
    let mut parts = vec![BlockHistogram::default(); blocks.count];
    let mut before = 0;
    for (at_ns, units) in demand {
        // One pass for all scales: each bucket has scaled rates.
        let after_s = (at_ns - before) as f64 / 1e9;
        before = at_ns;
        let part = &mut parts[blocks.of(at_ns)];
        part.requests += 1;
        // Allocated on first use: a trace may have a thousand blocks without requests.
        if part.full.is_empty() {
            part.full = vec![[0; FULL_STEPS]; SCALES];
        }
        for ((lane, over), full) in lanes.iter_mut().zip(&mut part.over).zip(&mut part.full) {
            let (fills, exceeds) = lane.fills(after_s, units, terms.wait_s);
            *over += u32::from(exceeds);
            let step = (fills.to_bits() >> (52 - FULL_BITS)).saturating_sub(FULL_FIRST) as usize;
            full[step.min(FULL_STEPS - 1)] += 1;
        }
    }
    // Idle blocks would dilute the draws without ever exceeding a limit.
    parts.retain(|part| part.requests > 0);
    let requests: u64 = parts.iter().map(|part| part.requests).sum();
    if requests < terms.target.min_requests() {
        return Err(format!(
            "the trace is too short: {} needs {} requests, but there are only {requests}",
            terms.target.name(),
            terms.target.min_requests()
        ));
    }
    if parts.len() < MIN_BLOCKS {
        let name = blocks.name();
        return Err(format!(
            "the trace is too short: only {} of its {} {name} have requests",
            parts.len(),
            blocks.count
        ));
    }
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut found: Vec<usize> = (0..DRAWS).map(|_| draw_scale(&parts, terms, &mut random)).collect();
    found.sort_unstable();
    let (low, high) = (found[DRAWS / 40], found[DRAWS - 1 - DRAWS / 40]);
    // The smallest limit lies between two of the scales.
    let low = if low == 0 { 0.0 } else { scales[low - 1] };
    let scale = |index: usize| scales.get(index).copied().unwrap_or(f64::INFINITY);
    let drawn = ConfidenceInterval::around(low, scale(high));
    Ok(ConfidenceInterval { high: drawn.high.max(scale(scale_for_unseen(&parts, &terms.target))), ..drawn })
}

/// The smallest scale that suffices for a part fuller than the fullest, by the spread of the parts.
fn scale_for_unseen(parts: &[BlockHistogram], target: &LatencyTarget) -> usize {
    let quantile = student_quantile(parts.len() - 1);
    let suffices = |scale: usize| {
        let full = parts.iter().map(|part| part.full_at(scale, target));
        // Sample variance with n - 1, since the mean is estimated from the same parts.
        let mean = full.clone().sum::<f64>() / parts.len() as f64;
        let variance = full.clone().map(|full| (full - mean).powi(2)).sum::<f64>() / (parts.len() - 1) as f64;
        full.fold(0.0, f64::max) + quantile * variance.sqrt() <= 1.0
    };
    (0..SCALES).find(|&scale| suffices(scale)).unwrap_or(SCALES)
}

/// The 0.995 quantile of Student's distribution (Abramowitz and Stegun, 26.7.5; 3 % too low for
/// five degrees of freedom, less for more).
fn student_quantile(freedom: usize) -> f64 {
    const NORMAL: f64 = 2.5758;
    let (z, n) = (NORMAL, freedom as f64);
    z + (z.powi(3) + z) / (4.0 * n) + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * n * n)
}

/// By tenant with a target: late requests and all requests, in each block.
pub(super) type LateRequests = Vec<(Vec<u32>, Vec<u32>)>;

/// Range of the limit that keeps the target, from limits tried with their judged requests: the
/// largest if `is_highest`, else the smallest. `None` with too few blocks.
pub(super) fn interval_of_tried(
    tried: &[(f64, LateRequests)],
    is_highest: bool,
    target: &LatencyTarget,
) -> Option<(f64, f64)> {
    let blocks = tried.first()?.1.first()?.0.len();
    // Blocks without judged requests carry no information about the target.
    let any = |block: &usize| {
        tried.iter().any(|(_, late_requests)| late_requests.iter().any(|(_, all)| all[*block] > 0))
    };
    let blocks: Vec<usize> = (0..blocks).filter(any).collect();
    if blocks.len() < MIN_BLOCKS {
        return None;
    }
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut found = Vec::with_capacity(DRAWS);
    for _ in 0..DRAWS {
        // The same draw is applied to all levels and tenants, which keeps them comparable.
        let drawn: Vec<usize> = blocks.iter().map(|_| blocks[random.usize(..blocks.len())]).collect();
        let holds = |late_requests: &LateRequests| {
            late_requests.iter().all(|(over, all)| {
                let sum = |counts: &[u32]| drawn.iter().map(|&block| u64::from(counts[block])).sum::<u64>();
                sum(over) <= target.allowed_late(sum(all))
            })
        };
        let holding = tried.iter().filter(|(_, late_requests)| holds(late_requests)).map(|(level, _)| *level);
        let best = if is_highest { holding.reduce(f64::max) } else { holding.reduce(f64::min) };
        found.push(best.unwrap_or(if is_highest { 0.0 } else { f64::INFINITY }));
    }
    // Infinite values sort to the end: draws for which no tried level suffices.
    found.sort_unstable_by(f64::total_cmp);
    let (low, high) = (found[DRAWS / 40], found[DRAWS - 1 - DRAWS / 40]);
    // The true value lies between two tried ones.
    let levels = || tried.iter().map(|(level, _)| *level);
    Some(if is_highest {
        (low, levels().filter(|&level| level > high).fold(f64::INFINITY, f64::min))
    } else {
        (levels().filter(|&level| level < low).fold(0.0, f64::max), high)
    })
}

#[derive(Clone)]
struct BlockHistogram {
    requests: u64,
    /// Late requests by scale.
    over: [u32; SCALES],
    /// Histogram of bucket levels by scale; empty without requests.
    full: Vec<[u32; FULL_STEPS]>,
}

impl Default for BlockHistogram {
    fn default() -> Self {
        Self { requests: 0, over: [0; SCALES], full: Vec::new() }
    }
}

impl BlockHistogram {
    /// Relative bucket level at the target's percentile, rounded up to a step.
    fn full_at(&self, scale: usize, target: &LatencyTarget) -> f64 {
        let (mut above, allowed) = (0, target.allowed_late(self.requests));
        for (step, &count) in self.full[scale].iter().enumerate().rev() {
            above += u64::from(count);
            if above > allowed {
                return f64::from_bits((FULL_FIRST + step as u64 + 1) << (52 - FULL_BITS));
            }
        }
        0.0
    }
}

/// The smallest scale that suffices for a random draw of as many parts.
fn draw_scale(parts: &[BlockHistogram], terms: &SearchTerms, random: &mut fastrand::Rng) -> usize {
    let (mut requests, mut over) = (0, [0_u64; SCALES]);
    for _ in parts {
        let part = &parts[random.usize(..parts.len())];
        requests += part.requests;
        over.iter_mut().zip(part.over).for_each(|(sum, over)| *sum += u64::from(over));
    }
    let allowed = terms.target.allowed_late(requests);
    // Sorted: larger limits never delay more requests.
    over.partition_point(|&over| over > allowed)
}
