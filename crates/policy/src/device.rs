//! An imitated device: how many bytes and requests a second it does, and when each request is done.
//!
//! Each rate has a **line**: the instant until which the device has work. A request is put at the
//! end of every line that applies to it, takes its bytes (or one) divided by the rate there, and is
//! done once it has passed on all of them:
//!
//! ```text
//!   line  ████████████████▒▒▒▒▒▒│ request completes here
//!         other requests   ours
//! ```
//!
//! An idle line may be caught up by [`CATCH_UP_NS`], or a client with one request at a time would
//! get less than the rate, as timers fire late and clients take time to answer.
//!
//! Never refuses a request; has no bursts and no shares.

use crate::request::Direction;
use crate::time::{Duration, Instant, NANOS_PER_SECOND};

/// How far behind the present a line may be and still be caught up, in nanoseconds.
pub const CATCH_UP_NS: u64 = 10_000_000;

/// Rates a second; `None` and 0 are unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Rates {
    /// Bytes, reads and writes together.
    pub bytes: Option<u64>,
    /// Requests of any kind.
    pub iops: Option<u64>,
    /// Bytes read.
    pub read: Option<u64>,
    /// Bytes written.
    pub write: Option<u64>,
}

/// The lines of a device.
#[derive(Clone, Debug)]
pub struct Lines {
    bytes: Option<Line>,
    iops: Option<Line>,
    by_direction: [Option<Line>; 2],
}

impl Lines {
    /// An idle device of these rates.
    pub fn new(rates: Rates) -> Self {
        let line = |rate: Option<u64>| rate.filter(|&rate| rate > 0).map(Line::new);
        Self {
            bytes: line(rates.bytes),
            iops: line(rates.iops),
            by_direction: [line(rates.read), line(rates.write)],
        }
    }

    /// When a request that comes now and moves so many bytes is done; [`Instant::ZERO`] without any
    /// rate. Zeroing and discarding are writes of no bytes: a device is not sent the zeroes.
    pub fn charge(&mut self, direction: Direction, bytes: u64, now: Instant) -> Instant {
        let of_direction = &mut self.by_direction[direction.index()];
        let lines = [(&mut self.iops, 1), (&mut self.bytes, bytes), (of_direction, bytes)];
        let end = |(line, units): (&mut Option<Line>, u64)| Some(line.as_mut()?.append(units, now));
        lines.into_iter().filter_map(end).fold(Instant::ZERO, Instant::max)
    }

    /// How long the device has worked by `now`: its busiest line's time since it was made.
    pub fn worked(&self, now: Instant) -> Duration {
        let [read, write] = &self.by_direction;
        let lines = [&self.bytes, &self.iops, read, write];
        lines.into_iter().flatten().map(|line| line.worked(now)).max().unwrap_or(Duration::ZERO)
    }
}

#[derive(Clone, Debug)]
struct Line {
    rate: u64,
    end: Instant,
    /// What the division left of a nanosecond, in units / rate, so that small requests add up.
    left_over: u64,
    work: Duration,
}

impl Line {
    const fn new(rate: u64) -> Self {
        Self { rate, end: Instant::ZERO, left_over: 0, work: Duration::ZERO }
    }

    /// Returns when they will have passed.
    fn append(&mut self, units: u64, now: Instant) -> Instant {
        let earliest = Instant::from_nanos(now.as_nanos().saturating_sub(CATCH_UP_NS));
        if self.end < earliest {
            (self.end, self.left_over) = (earliest, 0);
        }
        let scaled = u128::from(units) * u128::from(NANOS_PER_SECOND) + u128::from(self.left_over);
        let rate = u128::from(self.rate);
        let cost = Duration::from_nanos(u64::try_from(scaled / rate).unwrap_or(u64::MAX));
        self.left_over = (scaled % rate) as u64;
        self.end += cost;
        self.work = self.work.saturating_add(cost);
        self.end
    }

    fn worked(&self, now: Instant) -> Duration {
        self.work.saturating_sub(Duration::from_nanos(self.end.nanos_since(now)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_of_a_nanosecond_add_up() {
        // Three a nanosecond: each alone would cost nothing.
        let mut line = Line::new(3 * NANOS_PER_SECOND);
        let mut end = Instant::ZERO;
        for _ in 0..3_000_000 {
            end = line.append(1, Instant::ZERO);
        }
        assert_eq!(end.as_nanos(), 1_000_000);
    }
}
