//! Zipf's distribution: some blocks are accessed much more often than others.
//!
//! Rejection-inversion (W. Hörmann and G. Derflinger, "Rejection-inversion to generate variates
//! from monotone discrete distributions", ACM TOMACS 6(3), 1996): a draw costs the same for any
//! number of blocks, without tables.
//!
//! ```text
//!   draw ─► rank: 0 is the hottest ─► scattered: position of that block
//! ```
//!
//! Ranks are scattered over the disk, so that hot neighbours do not favour cluster caches or
//! prefetching.

#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Zipf {
    count: u64,
    theta: f64,
    at_first: f64,
    at_last: f64,
    /// Distance from a rank below which no draw is rejected.
    sure: f64,
    scatter: ScatteredRanks,
}

impl Zipf {
    /// Rank `k` has probability proportional to `1 / (k + 1)^theta`. `count` is not 0, `theta`
    /// above 0 and finite; `seed` places the ranks.
    pub(crate) fn new(count: u64, theta: f64, seed: u64) -> Self {
        debug_assert!(count > 0 && theta > 0.0 && theta.is_finite());
        let at_first = integral(1.5, theta) - 1.0;
        let at_last = integral(count as f64 + 0.5, theta);
        let sure = 2.0 - inverse(integral(2.5, theta) - density(2.0, theta), theta);
        Self { count, theta, at_first, at_last, sure, scatter: ScatteredRanks::new(count, seed) }
    }

    pub(crate) fn draw(&self, random: &mut fastrand::Rng) -> u64 {
        self.scatter.place(self.rank(random))
    }

    fn rank(&self, random: &mut fastrand::Rng) -> u64 {
        loop {
            let u = self.at_last + random.f64() * (self.at_first - self.at_last);
            // Inverts the integral of the density, then rounds to the nearest rank.
            let x = inverse(u, self.theta);
            let k = (x.round() as u64).clamp(1, self.count);
            let rank = k as f64;
            // The first condition accepts nearly all draws without another logarithm.
            if rank - x <= self.sure || u >= integral(rank + 0.5, self.theta) - density(rank, self.theta) {
                return k - 1;
            }
        }
    }
}

fn density(x: f64, theta: f64) -> f64 {
    (-theta * x.ln()).exp()
}

/// Integral of the density from 1 to `x`; numerically stable for `theta` near 1.
fn integral(x: f64, theta: f64) -> f64 {
    let log = x.ln();
    let y = (1.0 - theta) * log;
    let factor = if y.abs() > 1e-8 { y.exp_m1() / y } else { 1.0 + y / 2.0 * (1.0 + y / 3.0) };
    factor * log
}

fn inverse(y: f64, theta: f64) -> f64 {
    let t = (y * (1.0 - theta)).max(-1.0);
    let factor = if t.abs() > 1e-8 { t.ln_1p() / t } else { 1.0 - t * (0.5 - t / 3.0) };
    (factor * y).exp()
}

/// Scatters ranks by a step coprime to their number (Knuth, *TAOCP* 3, section 6.4).
#[derive(Clone, Debug, PartialEq, Eq)]
struct ScatteredRanks {
    count: u64,
    step: u64,
    first: u64,
}

impl ScatteredRanks {
    fn new(count: u64, seed: u64) -> Self {
        // Multiples of the golden ratio are spread as evenly as possible.
        let golden = (count as f64 * 0.618_033_988_749_894_9) as u64;
        let step = (golden.max(1)..).find(|&step| gcd(step, count) == 1).unwrap_or(1);
        Self { count, step, first: fastrand::Rng::with_seed(seed).u64(..count) }
    }

    fn place(&self, rank: u64) -> u64 {
        let place =
            // 128 bits: on a large disk the product of rank and step exceeds 64.
            (u128::from(rank) * u128::from(self.step) + u128::from(self.first)) % u128::from(self.count);
        u64::try_from(place).unwrap_or_default()
    }
}

fn gcd(mut a: u64, mut b: u64) -> u64 {
    while b != 0 {
        (a, b) = (b, a % b);
    }
    a
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rank_frequencies_match_the_distribution() {
        const DRAWS: u32 = 200_000;
        for theta in [0.2, 0.99, 1.0, 1.2, 3.0] {
            let zipf = Zipf::new(1000, theta, 1);
            let mut random = fastrand::Rng::with_seed(7);
            let mut counts = vec![0_u32; 1000];
            (0..DRAWS).for_each(|_| counts[zipf.rank(&mut random) as usize] += 1);
            let sum: f64 = (1..=1000).map(|k| density(f64::from(k), theta)).sum();
            let expect = |k: usize| f64::from(DRAWS) * density(k as f64, theta) / sum;
            for k in [1, 2, 3, 10, 100, 1000] {
                let (expect, found) = (expect(k), f64::from(counts[k - 1]));
                assert!(
                    (found - expect).abs() <= 5.0 * expect.sqrt() + 1.0,
                    "θ {theta}, rank {k}: {found}, not {expect}"
                );
            }
        }
    }

    #[test]
    fn every_block_has_one_rank() {
        for count in [1, 2, 3, 6, 10, 97, 1000, 1024, 262_144] {
            let scatter = ScatteredRanks::new(count, 3);
            let mut blocks: Vec<_> = (0..count).map(|rank| scatter.place(rank)).collect();
            blocks.sort_unstable();
            assert!(blocks.into_iter().eq(0..count), "{count}");
        }
    }

    #[test]
    fn hot_blocks_are_far_from_each_other() {
        let scatter = ScatteredRanks::new(1 << 40, 1);
        let mut hottest: Vec<_> = (0..100).map(|rank| scatter.place(rank)).collect();
        hottest.sort_unstable();
        let nearest = hottest.windows(2).map(|pair| pair[1] - pair[0]).min();
        assert!(nearest > Some((1 << 40) / 500), "{nearest:?}");
    }

    #[test]
    fn extreme_sizes_and_exponents_can_be_drawn() {
        let mut random = fastrand::Rng::with_seed(1);
        for (count, theta) in [(1, 1.0), (u64::MAX, 0.5), (u64::MAX, 1.0), (u64::MAX, 50.0), (2, 1e-9)] {
            let zipf = Zipf::new(count, theta, 1);
            assert!((0..1000).all(|_| zipf.draw(&mut random) < count), "{count}, {theta}");
        }
    }
}
