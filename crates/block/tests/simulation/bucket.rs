//! A second, naive implementation of leaky buckets: a level in floating point, leaked from one
//! observation to the next. The throttle layer is compared with it.

use policy::{
    request::Direction,
    throttle::{Enforcement, LimitKind, Limits, RateLimit},
    time::Instant,
};

/// Tolerance of floating point, in seconds: far below one request at any rate used here.
pub(crate) const SLACK_S: f64 = 1e-6;

#[derive(Clone, Copy, Debug, Default)]
struct Level {
    /// 0 if there is no such limit now.
    rate: f64,
    size: f64,
    level: f64,
    /// Level up to which requests are admitted: the size, or more after a change from a larger
    /// size.
    ceiling: f64,
    /// Upper bound of the level, after a disk joined whose charges are not modelled exactly.
    max_level: Option<f64>,
}

/// Rates and sizes of a limit's two levels; 0 for a missing one. Rates are whole units per second.
fn rates_and_sizes(limit: RateLimit, enforcement: Enforcement) -> [(f64, f64); 2] {
    let factor = match enforcement {
        Enforcement::Scaled(scale) => scale.thousandths() as f64 / 1000.0,
        Enforcement::Enforced | Enforcement::Lifted => 1.0,
    };
    let RateLimit { rate, burst_rate, burst_length_s, .. } = limit;
    let (rate, burst) = (rate as f64, burst_rate as f64);
    // As in QEMU: without a burst rate, a tenth of a second's worth.
    let size = if burst_rate == 0 { rate / 10.0 } else { burst * burst_length_s as f64 };
    let second = if burst_length_s > 1 { burst } else { 0.0 };
    [(rate, size), (second, second / 10.0)].map(|(rate, size)| ((rate * factor).floor(), size * factor))
}

/// Charge of a request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Charge {
    pub(crate) direction: Direction,
    pub(crate) bytes: f64,
    pub(crate) operations: f64,
}

/// All buckets of a group.
#[derive(Clone, Debug)]
pub(crate) struct Buckets {
    levels: Vec<(LimitKind, Level)>,
    /// True while nothing is limited; the buckets leak as with the last limits.
    is_idle: bool,
    last: Limits,
    enforcement: Enforcement,
    now: Instant,
}

impl Buckets {
    pub(crate) fn new(limits: &Limits, now: Instant) -> Self {
        let levels = LimitKind::ALL.into_iter().flat_map(|kind| [(kind, Level::default()); 2]).collect();
        let (enforcement, last) = (Enforcement::Enforced, *limits);
        let mut buckets = Self { levels, is_idle: false, last, enforcement, now };
        buckets.change(limits);
        buckets
    }

    /// Applies new limits, which take over the charges.
    pub(crate) fn change(&mut self, limits: &Limits) {
        let was_idle = std::mem::replace(&mut self.is_idle, limits.is_unlimited());
        if self.is_idle {
            return;
        }
        self.last = *limits;
        self.each(|level, rate, size| {
            let was_set = level.rate > 0.0 && !was_idle;
            level.rate = rate;
            if rate > 0.0 {
                // If nothing was limited before, the upper bound of a joined disk applies from now
                // on.
                let max_level = |full: f64| if was_set { full + size - level.size } else { full.max(size) };
                level.max_level = level.max_level.map(|full| max_level(full).max(0.0));
                level.size = size;
                level.ceiling = level.ceiling.min(level.level + size).max(size);
            }
        });
    }

    /// Applies another enforcement of the same limits; the levels stay.
    pub(crate) fn enforce(&mut self, enforcement: Enforcement) {
        self.enforcement = enforcement;
        self.each(|level, rate, size| {
            if rate > 0.0 {
                let max_level = level.max_level.map(|full| full + (size - level.size).max(0.0));
                let deferred = (level.ceiling - level.size).min((level.ceiling - size).max(0.0));
                *level = Level { rate, size, ceiling: size + deferred, max_level, ..*level };
            }
        });
    }

    fn each(&mut self, change: impl Fn(&mut Level, f64, f64)) {
        for (number, (kind, level)) in self.levels.iter_mut().enumerate() {
            let (rate, size) = rates_and_sizes(self.last.limit(*kind), self.enforcement)[number % 2];
            change(level, rate, size);
        }
    }

    pub(crate) fn leak_to(&mut self, now: Instant) {
        let elapsed_s = (now - self.now).as_secs_f64();
        self.now = now;
        for (_, level) in self.levels.iter_mut().filter(|(_, level)| level.rate > 0.0) {
            level.level = (level.level - level.rate * elapsed_s).max(0.0);
            level.max_level = level.max_level.map(|full| (full - level.rate * elapsed_s).max(0.0));
            // Capacity left over from a larger size disappears as the level leaks.
            level.ceiling = level.ceiling.min(level.level + level.size).max(level.size);
        }
    }

    /// Seconds until a request of this direction can be admitted.
    pub(crate) fn wait_s(&self, direction: Direction) -> f64 {
        let applying = LimitKind::applying_to(direction);
        let in_force = |(kind, level): &&(LimitKind, Level)| applying.contains(kind) && level.rate > 0.0;
        let levels = self.levels.iter().filter(|level| !self.is_idle && in_force(level));
        let over = |level: &Level| {
            let excess = level.max_level.map_or(0.0, |full| full - level.size);
            (level.level - level.ceiling).max(excess)
        };
        levels.map(|(_, level)| over(level) / level.rate).fold(0.0, f64::max)
    }

    /// Overfill of each bucket, at most the amount that leaks in a second.
    pub(crate) fn over(&self) -> Vec<f64> {
        let over = |(_, level): &(LimitKind, Level)| {
            let excess = level.max_level.map_or(0.0, |full| full - level.size);
            (level.level - level.ceiling).max(excess).clamp(0.0, level.rate)
        };
        self.levels.iter().map(over).collect()
    }

    /// Adds a disk that may have overfilled other buckets by `over`.
    pub(crate) fn joined(&mut self, over: &[f64]) {
        for ((_, level), over) in self.levels.iter_mut().zip(over) {
            let full = level.size + over;
            level.max_level = Some(level.max_level.map_or(full, |before| before.max(full)));
        }
    }

    /// Charges requests that were admitted at one instant. Panics if there is no order in which
    /// each finds room: in any order, all but the last must fit.
    pub(crate) fn charge(&mut self, charges: &[Charge]) {
        let levels = self.levels.iter_mut().filter(|(_, level)| !self.is_idle && level.rate > 0.0);
        for (kind, level) in levels {
            let units = |charge: &&Charge| if kind.counts_bytes() { charge.bytes } else { charge.operations };
            let counted =
                charges.iter().filter(|charge| LimitKind::applying_to(charge.direction).contains(kind));
            let (mut sum, mut largest) = (0.0, 0.0_f64);
            for charge in counted {
                sum += units(&charge);
                largest = largest.max(units(&charge));
            }
            level.level += sum;
            level.max_level = level.max_level.map(|full| full + sum);
            // The last request may overfill the bucket; the largest one as the last is the best
            // case.
            let before_last = level.level - largest;
            assert!(
                sum == 0.0 || before_last <= level.ceiling + SLACK_S * level.rate,
                "{kind:?} let too much pass at {:?}: {before_last} in a bucket of {}",
                self.now,
                level.ceiling
            );
        }
    }
}
