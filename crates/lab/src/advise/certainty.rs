//! How sure a limit is: what it would be if the day had been made of other hours like these.
//!
//! The bootstrap over blocks (Künsch, *The Jackknife and the Bootstrap for General Stationary
//! Observations*, 1989): hours are drawn again and again, and each time the smallest limit of the
//! same form is looked for. Requests of an hour stay together, because they depend on each other.
//! Hours do as well, so an interval of a single day knows nothing of other days.
//!
//! What is drawn is never worse than what was seen, and a smallest limit just does for the worst
//! that was. So the upper end is no lower than where an hour would do that fills the bucket more
//! than the fullest of these, by as many standard deviations among them as Student's distribution
//! asks for (Gosset, 1908): few hours, or hours that differ, make it wide. How often what is told
//! holds is counted in `tests/coverage.rs`.

use policy::throttle::{Limit, Unit};
use serde::Serialize;

use super::{envelope::Buckets, search::Terms, target::Target};

const HOUR_NS: u64 = 3_600_000_000_000;
/// Shorter traces are cut into tenths.
const HOURS: u64 = 10;
const TENTHS: u64 = 10;
const MOST_BLOCKS: u64 = 1000;
/// With fewer there is nothing to draw from.
const LEAST_BLOCKS: usize = 6;
const DRAWS: usize = 1000;
/// A fixed seed: the same trace always gives the same interval.
const SEED: u64 = 0x5EED;
/// Limits are tried from a third to four times of what was found, 6.6 % apart.
const SCALES: usize = 40;
const NARROWEST: f64 = 1.0 / 3.0;
const WIDEST: f64 = 4.0;
/// How full the bucket of a limit is that a request meets, of what it may hold before that waits
/// too long: from a 32nd on, with so many bits of each doubling.
const FULL_BITS: u32 = 4;
const FULL_FIRST: u64 = (1.0_f64 / 32.0).to_bits() >> (52 - FULL_BITS);
const FULL_STEPS: usize = 8 << FULL_BITS;

/// The parts of a trace that are drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Blocks {
    block_ns: u64,
    pub(super) count: usize,
}

impl Blocks {
    pub(super) fn new(length_ns: u64) -> Self {
        let block_ns = match length_ns / HOUR_NS {
            HOURS.. => HOUR_NS.max(length_ns.div_ceil(MOST_BLOCKS)),
            _ => length_ns / TENTHS + 1,
        };
        Self { block_ns, count: (length_ns / block_ns + 1) as usize }
    }

    #[inline]
    pub(super) const fn of(&self, at_ns: u64) -> usize {
        (at_ns / self.block_ns) as usize
    }

    /// How long each is, of a trace of this length.
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

/// Times the rate: where the smallest limit lies in 95 of 100 such days.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub(super) struct Interval {
    pub(super) low: f64,
    pub(super) high: f64,
}

impl Interval {
    /// What was drawn, and its mirror image (the basic bootstrap; Davison and Hinkley, *Bootstrap
    /// Methods and their Application*, 1997, section 5.2). A trace has seen few of the rarest
    /// moments, so its smallest limit is more often too small than too large, and one that is drawn
    /// from it is smaller again by as much.
    pub(super) fn around(low: f64, high: f64) -> Self {
        Self { low: low.min(1.0 / high).min(1.0), high: high.max(1.0 / low).max(1.0) }
    }
}

/// Of a limit that was found to be the smallest for these requests. The error is why there is none.
pub(super) fn interval(
    demand: impl Iterator<Item = (u64, f64)>,
    unit: Unit,
    limit: Limit,
    terms: &Terms,
    blocks: Blocks,
) -> Result<Interval, String> {
    let step = (WIDEST / NARROWEST).powf(1.0 / (SCALES - 1) as f64);
    let scales: Vec<f64> = (0..SCALES).map(|index| NARROWEST * step.powi(index as i32)).collect();
    let mut lanes: Vec<Buckets> = scales.iter().map(|&times| Buckets::scaled(limit, unit, times)).collect();
    let mut parts = vec![Part::default(); blocks.count];
    let mut before = 0;
    for (at_ns, units) in demand {
        let after_s = (at_ns - before) as f64 / 1e9;
        before = at_ns;
        let part = &mut parts[blocks.of(at_ns)];
        part.requests += 1;
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
    parts.retain(|part| part.requests > 0);
    let requests: u64 = parts.iter().map(|part| part.requests).sum();
    if requests < terms.target.enough() {
        return Err(format!(
            "too short to say: {} takes {} requests, and there are {requests}",
            terms.target.name(),
            terms.target.enough()
        ));
    }
    if parts.len() < LEAST_BLOCKS {
        let name = blocks.name();
        return Err(format!(
            "too short to say: only {} of its {} {name} have requests",
            parts.len(),
            blocks.count
        ));
    }
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut found: Vec<usize> = (0..DRAWS).map(|_| draw(&parts, terms, &mut random)).collect();
    found.sort_unstable();
    let (low, high) = (found[DRAWS / 40], found[DRAWS - 1 - DRAWS / 40]);
    // The smallest lies between two of the scales.
    let low = if low == 0 { 0.0 } else { scales[low - 1] };
    let scale = |index: usize| scales.get(index).copied().unwrap_or(f64::INFINITY);
    let drawn = Interval::around(low, scale(high));
    Ok(Interval { high: drawn.high.max(scale(for_unseen(&parts, &terms.target))), ..drawn })
}

/// The smallest scale that does for a part that is fuller than the fullest, by as much as parts
/// differ.
fn for_unseen(parts: &[Part], target: &Target) -> usize {
    let times = student(parts.len() - 1);
    let does = |scale: usize| {
        let full = parts.iter().map(|part| part.full_at(scale, target));
        let mean = full.clone().sum::<f64>() / parts.len() as f64;
        let variance = full.clone().map(|full| (full - mean).powi(2)).sum::<f64>() / (parts.len() - 1) as f64;
        full.fold(0.0, f64::max) + times * variance.sqrt() <= 1.0
    };
    (0..SCALES).find(|&scale| does(scale)).unwrap_or(SCALES)
}

/// What 995 of 1000 means of such samples are below, in standard deviations: Student's distribution
/// of so many degrees of freedom (Abramowitz and Stegun, 26.7.5; 3 % too low for five, and less for
/// more).
fn student(freedom: usize) -> f64 {
    const NORMAL: f64 = 2.5758;
    let (z, n) = (NORMAL, freedom as f64);
    z + (z.powi(3) + z) / (4.0 * n) + (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / (96.0 * n * n)
}

/// Requests of those whose target decides at one limit: by tenant, those that took too long and
/// all, in each block.
pub(super) type Judged = Vec<(Vec<u32>, Vec<u32>)>;

/// Of limits that were tried, each with whom it is judged by: between which the one lies that keeps
/// the target, the largest if `is_highest`, else the smallest. `None` if that cannot be told.
pub(super) fn between(tried: &[(f64, Judged)], is_highest: bool, target: &Target) -> Option<(f64, f64)> {
    let blocks = tried.first()?.1.first()?.0.len();
    let any = |block: &usize| tried.iter().any(|(_, judged)| judged.iter().any(|(_, all)| all[*block] > 0));
    let blocks: Vec<usize> = (0..blocks).filter(any).collect();
    if blocks.len() < LEAST_BLOCKS {
        return None;
    }
    let mut random = fastrand::Rng::with_seed(SEED);
    let mut found = Vec::with_capacity(DRAWS);
    for _ in 0..DRAWS {
        let drawn: Vec<usize> = blocks.iter().map(|_| blocks[random.usize(..blocks.len())]).collect();
        let holds = |judged: &Judged| {
            judged.iter().all(|(over, all)| {
                let sum = |of: &[u32]| drawn.iter().map(|&block| u64::from(of[block])).sum::<u64>();
                sum(over) <= target.allowed(sum(all))
            })
        };
        let holding = tried.iter().filter(|(_, judged)| holds(judged)).map(|(level, _)| *level);
        let best = if is_highest { holding.reduce(f64::max) } else { holding.reduce(f64::min) };
        found.push(best.unwrap_or(if is_highest { 0.0 } else { f64::INFINITY }));
    }
    found.sort_unstable_by(f64::total_cmp);
    let (low, high) = (found[DRAWS / 40], found[DRAWS - 1 - DRAWS / 40]);
    // It lies between one that was tried and the next.
    let levels = || tried.iter().map(|(level, _)| *level);
    Some(if is_highest {
        (low, levels().filter(|&level| level > high).fold(f64::INFINITY, f64::min))
    } else {
        (levels().filter(|&level| level < low).fold(0.0, f64::max), high)
    })
}

#[derive(Clone)]
struct Part {
    requests: u64,
    /// By scale: requests that waited too long.
    over: [u32; SCALES],
    /// And how many met a bucket how full; empty without requests.
    full: Vec<[u32; FULL_STEPS]>,
}

impl Default for Part {
    fn default() -> Self {
        Self { requests: 0, over: [0; SCALES], full: Vec::new() }
    }
}

impl Part {
    /// How full a bucket met those that the target counts, at a scale; no less than that.
    fn full_at(&self, scale: usize, target: &Target) -> f64 {
        let (mut above, allowed) = (0, target.allowed(self.requests));
        for (step, &count) in self.full[scale].iter().enumerate().rev() {
            above += u64::from(count);
            if above > allowed {
                return f64::from_bits((FULL_FIRST + step as u64 + 1) << (52 - FULL_BITS));
            }
        }
        0.0
    }
}

/// The smallest scale that does in as many parts, drawn at random.
fn draw(parts: &[Part], terms: &Terms, random: &mut fastrand::Rng) -> usize {
    let (mut requests, mut over) = (0, [0_u64; SCALES]);
    for _ in parts {
        let part = &parts[random.usize(..parts.len())];
        requests += part.requests;
        over.iter_mut().zip(part.over).for_each(|(sum, over)| *sum += u64::from(over));
    }
    let allowed = terms.target.allowed(requests);
    // Larger limits never hold longer.
    over.partition_point(|&over| over > allowed)
}
