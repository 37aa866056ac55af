//! Models of the devices below the disks: service time of each request, and utilization.
//!
//! ```text
//!                 ┌─► station   a number of servers; the service time depends on operation and length ──┐
//!   a request ────┤                                                                                     ├─► the later of the two
//!                 └─► budget    bytes and requests per second, as queues ───────────────────────────────┘
//! ```
//!
//! These models are the counterparts of `delay.rs` (`--delay`) and `rate.rs` (`--rate`) of crate
//! `storage`, exact to the nanosecond. A station may add a time per byte, for probed devices.
//! Requests are served in order, so the completion time is known when a request begins, and a
//! device needs no events.

use std::{cmp::Reverse, collections::BinaryHeap};

use policy::{
    device_model::{DeviceRates, IDLE_CREDIT_NS, SimulatedDevice},
    time::{Instant, NANOS_PER_SECOND},
};

use super::request::RequestOp;

/// Parameters of a device with a number of servers.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct StationSpec {
    /// Service time of a read.
    pub read: ServiceTimeSpec,
    /// Service time of a write.
    pub write: ServiceTimeSpec,
    /// Service time of a discard and of writing zeroes.
    pub zero: ServiceTimeSpec,
    /// Service time of a flush.
    pub flush: ServiceTimeSpec,
    /// Number of servers; `None` for no limit.
    pub parallel: Option<usize>,
}

/// Service time of a request: a constant part and a part per byte.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct ServiceTimeSpec {
    /// Constant part in nanoseconds.
    pub base_ns: u64,
    /// Nanoseconds per byte; finite, not negative.
    pub byte_ns: f64,
}

impl ServiceTimeSpec {
    /// Service time independent of the length.
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

/// Station and budget below a disk, by index; may be shared by disks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct DevicePlacement {
    /// Index of the station; `None` if requests take no time.
    pub station: Option<usize>,
    /// Index of the budget; `None` for unlimited rates.
    pub budget: Option<usize>,
}

/// Devices of a simulation with the requests in service.
#[derive(Clone, Debug, Default)]
pub struct SimulatedDevices {
    stations: Vec<ServiceStation>,
    budgets: Vec<SimulatedDevice>,
}

impl SimulatedDevices {
    /// Adds an idle device for each entry of the slices beyond the number of existing devices.
    pub fn follow(&mut self, stations: &[StationSpec], budgets: &[DeviceRates]) {
        self.stations.extend(stations[self.stations.len()..].iter().map(ServiceStation::new));
        self.budgets.extend(budgets[self.budgets.len()..].iter().copied().map(SimulatedDevice::new));
    }

    /// Starts a request and returns its completion time. Must be called in order of time.
    pub fn begin(&mut self, place: DevicePlacement, op: RequestOp, length: u64, now: u64) -> u64 {
        let mut end = now;
        // As in the daemon: the time of the rate and that of the delay below it overlap, and a
        // flush is not charged.
        if let (Some(budget), Some(direction)) = (place.budget, op.direction()) {
            let bytes = if matches!(op, RequestOp::Read | RequestOp::Write) { length } else { 0 };
            let done = self.budgets[budget].charge(direction, bytes, of_budget(now));
            end = end.max(done.as_nanos().saturating_sub(IDLE_CREDIT_NS));
        }
        if let Some(station) = place.station {
            end = end.max(self.stations[station].begin(op, length, now));
        }
        end
    }

    /// As [`SimulatedDevices::begin`], for a request with a recorded service time. Without a
    /// station, it does not wait for others.
    pub(crate) fn begin_recorded(&mut self, place: DevicePlacement, service_ns: u64, now: u64) -> u64 {
        match place.station {
            Some(station) => self.stations[station].serve(service_ns, now),
            None => now.saturating_add(service_ns),
        }
    }

    /// Nanoseconds of full utilization up to `now`.
    pub fn worked_ns(&self, place: DevicePlacement, now: u64) -> u64 {
        let worked = |budget: usize| self.budgets[budget].worked(of_budget(now)).as_nanos();
        let budget = u64::try_from(place.budget.map_or(0, worked)).unwrap_or(u64::MAX);
        budget.max(place.station.map_or(0, |station| self.stations[station].worked_ns(now)))
    }
}

// Shifted by the credit of an idle device, so that a budget begins the trace with this credit, as
// the daemon's does.
const fn of_budget(now: u64) -> Instant {
    Instant::from_nanos(now.saturating_add(IDLE_CREDIT_NS))
}

#[derive(Clone, Debug)]
struct ServiceStation {
    spec: StationSpec,
    free: BinaryHeap<Reverse<u64>>,
    /// Total service time of all requests that have begun, in nanoseconds.
    work: u64,
}

impl ServiceStation {
    fn new(spec: &StationSpec) -> Self {
        let servers = spec.parallel.unwrap_or(0);
        Self { spec: *spec, free: std::iter::repeat_n(Reverse(0), servers).collect(), work: 0 }
    }

    fn begin(&mut self, op: RequestOp, length: u64, now: u64) -> u64 {
        let service = match op {
            RequestOp::Read => &self.spec.read,
            RequestOp::Write => &self.spec.write,
            RequestOp::Discard | RequestOp::WriteZeroes => &self.spec.zero,
            RequestOp::Flush => &self.spec.flush,
        };
        self.serve(service.of(length), now)
    }

    /// As [`ServiceStation::begin`], for a request with this service time.
    fn serve(&mut self, service_ns: u64, now: u64) -> u64 {
        self.work = self.work.saturating_add(service_ns);
        match self.free.peek_mut() {
            Some(mut first) => {
                // The earliest free server takes the request.
                let end = now.max(first.0).saturating_add(service_ns);
                *first = Reverse(end);
                end
            }
            None => now.saturating_add(service_ns),
        }
    }

    /// Nanoseconds of full utilization; always 0 for an unlimited station.
    fn worked_ns(&self, now: u64) -> u64 {
        let servers = self.free.len() as u64;
        let outstanding_ns: u64 = self.free.iter().map(|Reverse(end)| end.saturating_sub(now)).sum();
        self.work.saturating_sub(outstanding_ns).checked_div(servers).unwrap_or(0)
    }
}

/// Service time that yields a probed device's rates of 4 KiB requests and of bytes in 1 MiB
/// requests.
///
/// Both rates are met exactly, with linear interpolation between the sizes. If that would decrease
/// with length, only the rate of requests applies. A rate of 0 was not measured and is not a
/// limit.
pub fn service_from_rates(iops: u64, bps: u64, parallel: usize) -> ServiceTimeSpec {
    const SMALL: f64 = 4096.0;
    const LARGE: f64 = 1_048_576.0;
    let servers_ns = parallel as f64 * NANOS_PER_SECOND as f64;
    let service_time = |rate: u64, units: f64| if rate == 0 { 0.0 } else { servers_ns * units / rate as f64 };
    let (small, large) = (service_time(iops, 1.0), service_time(bps, LARGE));
    let byte_ns = ((large - small) / (LARGE - SMALL)).max(0.0);
    let base = (small - SMALL * byte_ns).max(0.0);
    ServiceTimeSpec { base_ns: base as u64, byte_ns }
}

// Assumed latency of a small request on an idle device in seconds: that of flash.
const IDLE_LATENCY_S: f64 = 100e-6;

/// Number of servers of a device that completes `iops` requests per second at `depth`.
///
/// `weir probe` stores no latency, so a request is assumed to take [`IDLE_LATENCY_S`], or longer at
/// low rates. At a depth of 32, a hard disk of 200 IOPS has one server, flash of 500,000 has 32.
pub fn server_count(iops: u64, depth: usize) -> usize {
    ((iops as f64 * IDLE_LATENCY_S).round() as usize).clamp(1, depth)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    fn station(parallel: Option<usize>) -> SimulatedDevices {
        let spec = StationSpec { read: ServiceTimeSpec::fixed(5 * MS), parallel, ..StationSpec::default() };
        devices(&[spec], &[])
    }

    fn devices(stations: &[StationSpec], budgets: &[DeviceRates]) -> SimulatedDevices {
        let mut devices = SimulatedDevices::default();
        devices.follow(stations, budgets);
        devices
    }

    const STATION: DevicePlacement = DevicePlacement { station: Some(0), budget: None };
    const BUDGET: DevicePlacement = DevicePlacement { station: None, budget: Some(0) };

    #[test]
    fn ten_reads_four_at_a_time_take_three_times_as_long() {
        let mut devices = station(Some(4));
        let ends: Vec<_> = (0..10).map(|_| devices.begin(STATION, RequestOp::Read, 512, 0) / MS).collect();
        assert_eq!(ends, [5, 5, 5, 5, 10, 10, 10, 10, 15, 15]);
        assert_eq!(devices.worked_ns(STATION, 10 * MS), 10 * MS);
        assert_eq!(devices.worked_ns(STATION, 15 * MS), 12_500_000, "half idle at the end");
        let mut unbounded = station(None);
        assert!((0..10).all(|_| unbounded.begin(STATION, RequestOp::Read, 512, 0) == 5 * MS));
    }

    #[test]
    fn a_line_passes_its_rate_and_catches_up_ten_milliseconds() {
        let spec = DeviceRates { bytes: Some(1000), write: Some(500), ..DeviceRates::default() };
        let mut devices = devices(&[], &[spec]);
        assert_eq!(devices.begin(BUDGET, RequestOp::Read, 1000, 0), 990 * MS, "idle until then");
        assert_eq!(devices.begin(BUDGET, RequestOp::Write, 1000, 0), 1990 * MS);
        assert_eq!(devices.begin(BUDGET, RequestOp::Discard, 1000, 0), 1990 * MS, "no bytes");
        assert_eq!(devices.begin(BUDGET, RequestOp::Flush, 0, 0), 0, "no rate at all");
        assert_eq!(devices.begin(BUDGET, RequestOp::Read, 1000, 5000 * MS), 5990 * MS);
        assert_eq!(devices.worked_ns(BUDGET, 5490 * MS), 2500 * MS);
    }

    #[test]
    fn single_request_has_the_latency_of_its_rate() {
        for (iops, at_a_time, alone_ns) in
            [(200, 1, 5 * MS), (10_000, 1, 100_000), (50_000, 5, 100_000), (500_000, 32, 64_000), (0, 1, 0)]
        {
            assert_eq!(server_count(iops, 32), at_a_time, "{iops}");
            assert_eq!(service_from_rates(iops, 0, at_a_time).of(4096), alone_ns, "{iops}");
        }
    }

    #[test]
    fn measured_rates_are_reproduced() {
        let service = service_from_rates(100_000, 1 << 30, 32);
        let a_second = |length| 32.0 * 1e9 / service.of(length) as f64;
        assert!((a_second(4096) / 100_000.0 - 1.0).abs() < 1e-3, "{}", a_second(4096));
        assert!((a_second(1 << 20) / 1024.0 - 1.0).abs() < 1e-3, "{}", a_second(1 << 20));
        assert_eq!(
            service_from_rates(0, 0, 32),
            ServiceTimeSpec::default(),
            "a rate that was not measured is not a limit"
        );
        assert_eq!(service_from_rates(1000, 0, 1).of(1 << 20), MS, "operations alone");
    }
}
