//! A simulated device with limited bandwidth and IOPS: computes when each request completes.
//!
//! Each rate has a **line**: the instant until which the device is busy. A request is appended to
//! every line that applies to it, occupies each for its bytes (or one request) divided by the rate,
//! and completes at the end of the slowest:
//!
//! ```text
//!   line  ████████████████▒▒▒▒▒▒│ completion
//!         other requests   this one
//! ```
//!
//! An idle line may start up to [`IDLE_CREDIT_NS`] in the past. Without that, a client with a queue
//! depth of 1 would get less than the rate, because timers fire late and clients need time to
//! react.
//!
//! Never rejects a request; has no bursts and no shares.

use crate::request::Direction;
use crate::time::{Duration, Instant, NANOS_PER_SECOND};

/// Time that an idle line may catch up, in nanoseconds.
pub const IDLE_CREDIT_NS: u64 = 10_000_000;

/// Rates per second; `None` and 0 are unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceRates {
    /// Bytes of reads and writes.
    pub bytes: Option<u64>,
    /// Requests of any kind.
    pub iops: Option<u64>,
    /// Bytes read.
    pub read: Option<u64>,
    /// Bytes written.
    pub write: Option<u64>,
}

/// The lines of one device.
#[derive(Clone, Debug)]
pub struct SimulatedDevice {
    bytes: Option<RateLine>,
    iops: Option<RateLine>,
    by_direction: [Option<RateLine>; 2],
}

impl SimulatedDevice {
    /// An idle device with these rates.
    pub fn new(rates: DeviceRates) -> Self {
        let line = |rate: Option<u64>| rate.filter(|&rate| rate > 0).map(RateLine::new);
        Self {
            bytes: line(rates.bytes),
            iops: line(rates.iops),
            by_direction: [line(rates.read), line(rates.write)],
        }
    }

    /// Completion time of a request of `bytes` that arrives at `now`; [`Instant::ZERO`] if no rate
    /// is set. Charge zeroing and discards as writes of no bytes: they transfer no data.
    pub fn charge(&mut self, direction: Direction, bytes: u64, now: Instant) -> Instant {
        let of_direction = &mut self.by_direction[direction.index()];
        let lines = [(&mut self.iops, 1), (&mut self.bytes, bytes), (of_direction, bytes)];
        let end = |(line, units): (&mut Option<RateLine>, u64)| Some(line.as_mut()?.append(units, now));
        lines.into_iter().filter_map(end).fold(Instant::ZERO, Instant::max)
    }

    /// Busy time of the device until `now`: that of its busiest line since creation.
    pub fn worked(&self, now: Instant) -> Duration {
        let [read, write] = &self.by_direction;
        let lines = [&self.bytes, &self.iops, read, write];
        lines.into_iter().flatten().map(|line| line.worked(now)).max().unwrap_or(Duration::ZERO)
    }
}

#[derive(Clone, Debug)]
struct RateLine {
    rate: u64,
    end: Instant,
    /// Remainder of the last division, in units of 1 / rate ns, so that small requests add up.
    remainder: u64,
    total_busy: Duration,
}

impl RateLine {
    const fn new(rate: u64) -> Self {
        Self { rate, end: Instant::ZERO, remainder: 0, total_busy: Duration::ZERO }
    }

    /// Returns the completion time of the appended units.
    fn append(&mut self, units: u64, now: Instant) -> Instant {
        let earliest = Instant::from_nanos(now.as_nanos().saturating_sub(IDLE_CREDIT_NS));
        if self.end < earliest {
            // The remainder belongs to work before the idle time and is dropped with it.
            (self.end, self.remainder) = (earliest, 0);
        }
        // 128 bits: units times 10⁹ exceed 64 bits above 18 GB.
        let scaled = u128::from(units) * u128::from(NANOS_PER_SECOND) + u128::from(self.remainder);
        let rate = u128::from(self.rate);
        let cost = Duration::from_nanos(u64::try_from(scaled / rate).unwrap_or(u64::MAX));
        self.remainder = (scaled % rate) as u64;
        self.end += cost;
        self.total_busy = self.total_busy.saturating_add(cost);
        self.end
    }

    fn worked(&self, now: Instant) -> Duration {
        // The part of the work that lies in the future is not done yet.
        self.total_busy.saturating_sub(Duration::from_nanos(self.end.nanos_since(now)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fractions_of_a_nanosecond_add_up() {
        // Three units per nanosecond: without the remainder, each would cost nothing.
        let mut line = RateLine::new(3 * NANOS_PER_SECOND);
        let mut end = Instant::ZERO;
        for _ in 0..3_000_000 {
            end = line.append(1, Instant::ZERO);
        }
        assert_eq!(end.as_nanos(), 1_000_000);
    }
}
