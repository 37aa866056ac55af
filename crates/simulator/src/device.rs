//! The devices under the disks: how long each takes for a request, and how much of it is in use.
//!
//! ```text
//!                 ┌─► station   so many requests at a time, each takes as long as its kind and size say ─┐
//!   a request ────┤                                                                                      ├─► the later of the two
//!                 └─► budget    bytes and requests a second: lines that it stands in ────────────────────┘
//! ```
//!
//! The twins of block's `storage/delay.rs` (`--delay`) and `storage/rate.rs` (`--rate`), to the
//! nanosecond. A station may add a time for each byte, as for a probed device. Requests are served
//! in order, so each gets its end when it begins, and a device needs no events.

use std::{cmp::Reverse, collections::BinaryHeap};

use policy::{
    device::{CATCH_UP_NS, Lines, Rates},
    time::{Instant, NANOS_PER_SECOND},
};

use super::request::Op;

/// A device with a number of servers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StationSpec {
    /// Service time of a read.
    pub read: Service,
    /// Service time of a write.
    pub write: Service,
    /// Service time of a discard and of writing zeroes.
    pub zero: Service,
    /// Service time of a flush.
    pub flush: Service,
    /// `None` is any number.
    pub parallel: Option<usize>,
}

/// Service time of a request: a constant and a part for each byte.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Service {
    /// Constant part.
    pub base_ns: u64,
    /// Finite, not negative.
    pub byte_ns: f64,
}

impl Service {
    /// A service time that does not depend on the length.
    pub const fn fixed(base_ns: u64) -> Self {
        Self { base_ns, byte_ns: 0.0 }
    }

    fn of(&self, length: u64) -> u64 {
        if self.byte_ns == 0.0 {
            return self.base_ns;
        }
        self.base_ns.saturating_add((self.byte_ns * length as f64) as u64)
    }
}

/// The station and budget under a disk, by index; possibly shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Place {
    /// Index of the station; `None` if it takes no time.
    pub station: Option<usize>,
    /// Index of the budget; `None` if rates have no bound.
    pub budget: Option<usize>,
}

/// The devices of a simulation, with the requests that they serve.
#[derive(Clone, Debug, Default)]
pub struct Devices {
    stations: Vec<Station>,
    budgets: Vec<Lines>,
}

impl Devices {
    /// Adds new ones, idle.
    pub fn follow(&mut self, stations: &[StationSpec], budgets: &[Rates]) {
        self.stations.extend(stations[self.stations.len()..].iter().map(Station::new));
        self.budgets.extend(budgets[self.budgets.len()..].iter().copied().map(Lines::new));
    }

    /// Returns when the request ends. Requests begin in the order of their time.
    pub fn begin(&mut self, place: Place, op: Op, length: u64, now: u64) -> u64 {
        let mut end = now;
        // As in the daemon, where the rate lies over the delay, a flush costs no rate.
        if let (Some(budget), Some(direction)) = (place.budget, op.direction()) {
            let bytes = if matches!(op, Op::Read | Op::Write) { length } else { 0 };
            let done = self.budgets[budget].charge(direction, bytes, of_budget(now));
            end = end.max(done.as_nanos().saturating_sub(CATCH_UP_NS));
        }
        if let Some(station) = place.station {
            end = end.max(self.stations[station].begin(op, length, now));
        }
        end
    }

    /// Nanoseconds of full use by `now`.
    pub fn worked_ns(&self, place: Place, now: u64) -> u64 {
        let worked = |budget: usize| self.budgets[budget].worked(of_budget(now)).as_nanos();
        let budget = u64::try_from(place.budget.map_or(0, worked)).unwrap_or(u64::MAX);
        budget.max(place.station.map_or(0, |station| self.stations[station].worked_ns(now)))
    }
}

/// A budget was idle before the trace begins, as the daemon's is: it may be caught up at once.
const fn of_budget(now: u64) -> Instant {
    Instant::from_nanos(now.saturating_add(CATCH_UP_NS))
}

#[derive(Clone, Debug)]
struct Station {
    spec: StationSpec,
    free: BinaryHeap<Reverse<u64>>,
    /// Nanoseconds of all requests that have begun.
    work: u64,
}

impl Station {
    fn new(spec: &StationSpec) -> Self {
        let places = spec.parallel.unwrap_or(0);
        Self { spec: *spec, free: std::iter::repeat_n(Reverse(0), places).collect(), work: 0 }
    }

    fn begin(&mut self, op: Op, length: u64, now: u64) -> u64 {
        let service = match op {
            Op::Read => &self.spec.read,
            Op::Write => &self.spec.write,
            Op::Discard | Op::WriteZeroes => &self.spec.zero,
            Op::Flush => &self.spec.flush,
        };
        let takes = service.of(length);
        self.work = self.work.saturating_add(takes);
        match self.free.peek_mut() {
            Some(mut first) => {
                let end = now.max(first.0).saturating_add(takes);
                *first = Reverse(end);
                end
            }
            None => now.saturating_add(takes),
        }
    }

    /// An unbounded station is never in use.
    fn worked_ns(&self, now: u64) -> u64 {
        let places = self.free.len() as u64;
        let to_come: u64 = self.free.iter().map(|Reverse(end)| end.saturating_sub(now)).sum();
        self.work.saturating_sub(to_come).checked_div(places).unwrap_or(0)
    }
}

/// A station with a probed device's rates, of 4 KiB requests and of bytes in 1 MiB requests.
///
/// Both figures are met exactly, sizes between them by a straight line; if that would fall, the
/// requests' figure alone holds. A figure of 0 was not measured and bounds nothing.
pub fn measured(iops: u64, bps: u64, parallel: usize) -> Service {
    const SMALL: f64 = 4096.0;
    const LARGE: f64 = 1_048_576.0;
    let places = parallel as f64 * NANOS_PER_SECOND as f64;
    let takes = |rate: u64, units: f64| if rate == 0 { 0.0 } else { places * units / rate as f64 };
    let (small, large) = (takes(iops, 1.0), takes(bps, LARGE));
    let byte_ns = ((large - small) / (LARGE - SMALL)).max(0.0);
    let base = (small - SMALL * byte_ns).max(0.0);
    Service { base_ns: base as u64, byte_ns }
}

/// The assumed latency, in seconds, of a small request on an idle device: the order of flash.
const ALONE_S: f64 = 100e-6;

/// How many requests at a time a device works on that does so many a second at `depth`.
///
/// `weir probe` keeps no latency, so a request is assumed to take [`ALONE_S`], or longer at low
/// rates: a hard disk of 200 a second works on one at a time, flash of 500,000 on 32.
pub fn places(iops: u64, depth: usize) -> usize {
    ((iops as f64 * ALONE_S).round() as usize).clamp(1, depth)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn station(parallel: Option<usize>) -> Devices {
        let spec = StationSpec { read: Service::fixed(5 * MS), parallel, ..StationSpec::default() };
        devices(&[spec], &[])
    }

    fn devices(stations: &[StationSpec], budgets: &[Rates]) -> Devices {
        let mut devices = Devices::default();
        devices.follow(stations, budgets);
        devices
    }

    const STATION: Place = Place { station: Some(0), budget: None };
    const BUDGET: Place = Place { station: None, budget: Some(0) };

    #[test]
    fn ten_reads_four_at_a_time_take_three_times_as_long() {
        let mut devices = station(Some(4));
        let ends: Vec<_> = (0..10).map(|_| devices.begin(STATION, Op::Read, 512, 0) / MS).collect();
        assert_eq!(ends, [5, 5, 5, 5, 10, 10, 10, 10, 15, 15]);
        assert_eq!(devices.worked_ns(STATION, 10 * MS), 10 * MS);
        assert_eq!(devices.worked_ns(STATION, 15 * MS), 12_500_000, "half idle at the end");
        let mut unbounded = station(None);
        assert!((0..10).all(|_| unbounded.begin(STATION, Op::Read, 512, 0) == 5 * MS));
    }

    #[test]
    fn a_line_passes_its_rate_and_catches_up_ten_milliseconds() {
        let spec = Rates { bytes: Some(1000), write: Some(500), ..Rates::default() };
        let mut devices = devices(&[], &[spec]);
        assert_eq!(devices.begin(BUDGET, Op::Read, 1000, 0), 990 * MS, "idle until then");
        assert_eq!(devices.begin(BUDGET, Op::Write, 1000, 0), 1990 * MS);
        assert_eq!(devices.begin(BUDGET, Op::Discard, 1000, 0), 1990 * MS, "no bytes");
        assert_eq!(devices.begin(BUDGET, Op::Flush, 0, 0), 0, "no rate at all");
        assert_eq!(devices.begin(BUDGET, Op::Read, 1000, 5000 * MS), 5990 * MS);
        assert_eq!(devices.worked_ns(BUDGET, 5490 * MS), 2500 * MS);
    }

    #[test]
    fn a_request_by_itself_takes_what_a_device_of_that_rate_can() {
        for (iops, at_a_time, alone_ns) in
            [(200, 1, 5 * MS), (10_000, 1, 100_000), (50_000, 5, 100_000), (500_000, 32, 64_000), (0, 1, 0)]
        {
            assert_eq!(places(iops, 32), at_a_time, "{iops}");
            assert_eq!(measured(iops, 0, at_a_time).of(4096), alone_ns, "{iops}");
        }
    }

    #[test]
    fn what_was_measured_comes_out_again() {
        let service = measured(100_000, 1 << 30, 32);
        let a_second = |length| 32.0 * 1e9 / service.of(length) as f64;
        assert!((a_second(4096) / 100_000.0 - 1.0).abs() < 1e-3, "{}", a_second(4096));
        assert!((a_second(1 << 20) / 1024.0 - 1.0).abs() < 1e-3, "{}", a_second(1 << 20));
        assert_eq!(measured(0, 0, 32), Service::default(), "nothing measured bounds nothing");
        assert_eq!(measured(1000, 0, 1).of(1 << 20), MS, "operations alone");
    }
}
