//! Leaky buckets, once more and naively: a level in floating point, leaked from one look to the
//! next. What the throttle layer does is held against these.

use policy::{
    request::Direction,
    throttle::{Enforcement, Limit, LimitKind, Limits},
    time::Instant,
};

/// How far floating point may be off, in seconds: far below a request at any rate that is tried
/// here.
pub(crate) const SLACK_S: f64 = 1e-6;

#[derive(Clone, Copy, Debug)]
struct Level {
    rate: f64,
    size: f64,
    level: f64,
}

impl Level {
    /// The one or two levels of a limit; none where there is no limit.
    fn of(limit: Limit) -> Vec<Self> {
        let Limit { rate, burst_rate, burst_length_s } = limit;
        let (rate, burst) = (rate as f64, burst_rate as f64);
        let size = if burst_rate == 0 { rate / 10.0 } else { burst * burst_length_s as f64 };
        let mut levels = Vec::new();
        if rate > 0.0 {
            levels.push(Self { rate, size, level: 0.0 });
            if burst_length_s > 1 {
                levels.push(Self { rate: burst, size: burst / 10.0, level: 0.0 });
            }
        }
        levels
    }
}

/// A request as a bucket sees it.
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
    now: Instant,
}

impl Buckets {
    pub(crate) fn new(limits: &Limits, now: Instant) -> Self {
        let of = |kind: LimitKind| Level::of(limits.limit(kind)).into_iter().map(move |level| (kind, level));
        Self { levels: LimitKind::ALL.into_iter().flat_map(of).collect(), now }
    }

    /// The same limits, enforced otherwise: what is in the buckets stays. Rates are whole units a
    /// second.
    pub(crate) fn enforce(&mut self, limits: &Limits, enforcement: Enforcement) {
        let factor = match enforcement {
            Enforcement::Scaled(scale) => scale.thousandths() as f64 / 1000.0,
            Enforcement::Enforced | Enforcement::Lifted => 1.0,
        };
        let fresh = Self::new(limits, self.now).levels;
        for ((_, level), (_, fresh)) in self.levels.iter_mut().zip(fresh) {
            *level =
                Level { rate: (fresh.rate * factor).floor(), size: fresh.size * factor, level: level.level };
        }
    }

    pub(crate) fn leak_to(&mut self, now: Instant) {
        let elapsed_s = (now - self.now).as_secs_f64();
        self.now = now;
        for (_, level) in &mut self.levels {
            level.level = (level.level - level.rate * elapsed_s).max(0.0);
        }
    }

    /// Seconds until a request of this direction may pass.
    pub(crate) fn wait_s(&self, direction: Direction) -> f64 {
        let applying = LimitKind::applying_to(direction);
        let levels = self.levels.iter().filter(|(kind, _)| applying.contains(kind));
        levels.map(|(_, level)| (level.level - level.size) / level.rate).fold(0.0, f64::max)
    }

    /// Charges what passed at one instant. Panics if no order of them is one in which each found
    /// room: whatever the order, all but the last fit.
    pub(crate) fn charge(&mut self, charges: &[Charge]) {
        for (kind, level) in &mut self.levels {
            let units = |charge: &&Charge| if kind.counts_bytes() { charge.bytes } else { charge.operations };
            let counted =
                charges.iter().filter(|charge| LimitKind::applying_to(charge.direction).contains(kind));
            let (mut sum, mut largest) = (0.0, 0.0_f64);
            for charge in counted {
                sum += units(&charge);
                largest = largest.max(units(&charge));
            }
            level.level += sum;
            let before_last = level.level - largest;
            assert!(
                sum == 0.0 || before_last <= level.size + SLACK_S * level.rate,
                "{kind:?} let too much pass at {:?}: {before_last} in a bucket of {}",
                self.now,
                level.size
            );
        }
    }
}
