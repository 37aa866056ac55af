//! The device below a disk: its capacity and its utilization.
//!
//! ```text
//!   disk ──► image ──► storage ──► file ──► file system ──► partition ──► whole disk   identity.rs
//!                        └──► imitated rate ──────────────────────────────► its budget storage/rate.rs
//!
//!   capacity:  measured by a probe │ the imitated rate │ none: the share of time it is busy
//! ```
//!
//! Watermarks use it: limits are enforced only at high utilization of the device. Utilization is
//! the larger of operations and bytes, each relative to the device's capacity. If the capacity was
//! not measured, utilization is the share of time in which the device had a request in flight. For
//! a device that processes many requests at once, that means little more than "not idle".
//!
//! Latency targets do not need the capacity: a [`LatencySampler`] throttles the disks that share a
//! [`SharedDevice`], which may also be a server.
//!
//! Disks on one device share one [`Device`]. Several observers may read it, each with its own
//! [`UtilizationMeter`].
//!
//! Never opens a device and never waits for it: the kernel's statistics, or the busy time of an
//! imitated device, are enough.

mod identity;
mod latency_members;
mod latency_sampler;
mod limited;
mod observed;
mod sampler;
mod statistics;

pub use identity::{DeviceIdentity, DeviceNumber, SysfsRoots};
pub use latency_members::SharedDevice;
pub use latency_sampler::{LatencySampler, TargetReport};
pub use observed::DeviceObserver;
pub use sampler::{SampledTarget, Sampler, SamplerTarget};
pub use statistics::{DeviceStatistics, StatisticsFile};

use std::{
    fmt, io,
    sync::{Arc, Mutex, PoisonError},
};

use policy::{
    throttle::ReservableCapacity,
    time::{Duration, Instant, NANOS_PER_SECOND},
    watermark::{DeviceLoad, MeasuredCapacity},
};

use storage::{
    Storage,
    rate::{Completed, RateBudget, RateOptions},
};

use crate::disk::Disk;

/// Minimum interval of a measurement; a shorter one would cover only a few requests.
const MIN_INTERVAL: Duration = Duration::from_millis(20);
/// Minimum interval that [`Device::utilization`] averages over.
const AVERAGING_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum age of a measurement's beginning.
const MAX_AVERAGING_INTERVAL: Duration = Duration::from_secs(3);

/// Upper bound of utilization, in thousandths: a thousand times the capacity.
const MAX_UTILIZATION: u32 = 1_000_000;

/// Source of a device's capacity.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CapacitySource {
    /// Measured by a probe.
    Probe,
    /// The rates of an imitated device.
    Rate,
    /// Unknown: utilization is the share of time during which the device is busy.
    BusyTime,
}

impl fmt::Display for CapacitySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Probe => "probe",
            Self::Rate => "rate",
            Self::BusyTime => "busy-time",
        })
    }
}

/// A physical device, or an imitated one.
#[derive(Debug)]
pub struct Device {
    kind: DeviceKind,
    name: String,
    capacity: Option<MeasuredCapacity>,
    /// Time of the measurement, in seconds since 1970, if it is known.
    probed_at_s: Option<u32>,
    recent: Mutex<RecentUtilization>,
}

/// Utilization shared by occasional readers: each gets an average over at least
/// [`AVERAGING_INTERVAL`].
#[derive(Clone, Copy, Debug, Default)]
struct RecentUtilization {
    /// Begun at least [`AVERAGING_INTERVAL`] before the next.
    older: UtilizationMeter,
    newer: UtilizationMeter,
    utilization: u32,
}

#[derive(Debug)]
enum DeviceKind {
    Physical { identity: DeviceIdentity, source: StatisticsFile },
    Imitated(Arc<RateBudget>),
}

/// Identity of a device while the program runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DeviceId {
    /// A physical disk.
    Physical(DeviceNumber),
    /// A budget, by its address: budgets may have no name.
    Imitated(usize),
}

/// Device of a disk, not resolved yet.
#[derive(Debug)]
enum UnderlyingDevice<'a> {
    File(u64),
    Imitated(&'a Arc<RateBudget>),
    Nothing,
}

/// The outermost imitated rate, or the bottom storage.
fn underlying_device(mut storage: &Storage) -> UnderlyingDevice<'_> {
    loop {
        storage = match storage {
            Storage::Wrapped(wrapped) => match wrapped.budget() {
                // An imitated rate hides the device below it.
                Some(budget) => return UnderlyingDevice::Imitated(budget),
                None => wrapped.inner(),
            },
            Storage::File(file) => return UnderlyingDevice::File(file.device().device_number()),
            Storage::Memory(_)
            | Storage::Nbd(_)
            | Storage::Null(_)
            | Storage::Rbd(_)
            | Storage::Simulated(_) => {
                return UnderlyingDevice::Nothing;
            }
        };
    }
}

/// Identity of the device under a disk, without reading statistics. `None` for disks in memory or
/// on other hosts.
///
/// # Errors
/// The file system is on no local disk, such as a network file system.
pub fn id_of(disk: &Disk, roots: &SysfsRoots) -> io::Result<Option<DeviceId>> {
    match underlying_device(disk.image().storage()) {
        UnderlyingDevice::Nothing => Ok(None),
        UnderlyingDevice::Imitated(budget) => Ok(Some(DeviceId::Imitated(Arc::as_ptr(budget).addr()))),
        UnderlyingDevice::File(number) => {
            let identity = DeviceIdentity::resolve(DeviceNumber::unpack(number), roots)?;
            Ok(Some(DeviceId::Physical(identity.number())))
        }
    }
}

impl Device {
    /// The device under a disk. `measured` returns the measured capacity of a disk, and the time of
    /// the measurement in seconds since 1970.
    ///
    /// `None` for disks without a local device.
    ///
    /// # Errors
    /// The file system is on no local disk, or that disk has no statistics.
    pub fn below_disk(
        disk: &Disk,
        roots: &SysfsRoots,
        measured: impl FnOnce(&DeviceIdentity) -> Option<(MeasuredCapacity, u32)>,
    ) -> io::Result<Option<Self>> {
        match underlying_device(disk.image().storage()) {
            UnderlyingDevice::Nothing => Ok(None),
            UnderlyingDevice::Imitated(budget) => Ok(Some(Self::imitated(budget, disk.name()))),
            UnderlyingDevice::File(number) => {
                let identity = DeviceIdentity::resolve(DeviceNumber::unpack(number), roots)?;
                let (capacity, probed_at_s) = measured(&identity).unzip();
                Ok(Some(Self { probed_at_s, ..Self::physical(identity, capacity)? }))
            }
        }
    }

    /// A physical disk, with its measured capacity.
    ///
    /// # Errors
    /// Fails if the disk has no statistics file.
    pub fn physical(identity: DeviceIdentity, capacity: Option<MeasuredCapacity>) -> io::Result<Self> {
        let source = StatisticsFile::open(identity.directory())?;
        let name = identity.node();
        Ok(Self::new(DeviceKind::Physical { identity, source }, name, capacity))
    }

    fn imitated(budget: &Arc<RateBudget>, disk: &str) -> Self {
        let options = budget.options();
        let name = match &options.shared {
            Some(name) => format!("rate:{name}"),
            None => format!("rate of {disk}"),
        };
        Self::new(DeviceKind::Imitated(Arc::clone(budget)), name, Some(capacity_of(options)))
    }

    fn new(kind: DeviceKind, name: String, capacity: Option<MeasuredCapacity>) -> Self {
        Self { kind, name, capacity, probed_at_s: None, recent: Mutex::default() }
    }

    /// Identity of the device.
    pub fn id(&self) -> DeviceId {
        match &self.kind {
            DeviceKind::Physical { identity, .. } => DeviceId::Physical(identity.number()),
            DeviceKind::Imitated(budget) => DeviceId::Imitated(Arc::as_ptr(budget).addr()),
        }
    }

    /// Display name: `/dev/vda`, `rate:NAME`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The physical disk, if it is one.
    pub fn identity(&self) -> Option<&DeviceIdentity> {
        match &self.kind {
            DeviceKind::Physical { identity, .. } => Some(identity),
            DeviceKind::Imitated(_) => None,
        }
    }

    /// Capacity; fields that were not measured are 0.
    pub fn capacity(&self) -> Option<MeasuredCapacity> {
        self.capacity
    }

    /// Capacity that reservations may use.
    pub fn reservable(&self) -> ReservableCapacity {
        let amounts = self.capacity.map(|capacity| capacity.reservable()).unwrap_or_default();
        ReservableCapacity { amounts, probed_at_s: self.probed_at_s }
    }

    /// Source of the capacity.
    pub fn capacity_source(&self) -> CapacitySource {
        match (&self.kind, &self.capacity) {
            (DeviceKind::Imitated(_), _) => CapacitySource::Rate,
            (DeviceKind::Physical { .. }, Some(_)) => CapacitySource::Probe,
            (DeviceKind::Physical { .. }, None) => CapacitySource::BusyTime,
        }
    }

    /// Recent utilization, in thousandths: over the last one to three seconds if it is read often,
    /// by any reader, and else since the last call, or since it was created.
    ///
    /// # Errors
    /// The statistics cannot be read; the device may be gone.
    pub fn utilization(&self, now: Instant) -> io::Result<u32> {
        // The result and the meters are replaced together.
        let mut recent = self.recent.lock().unwrap_or_else(PoisonError::into_inner);
        let is_older_than =
            |meter: &UtilizationMeter, time| meter.last.is_none_or(|(at, _)| now - at >= time);
        let is_old = is_older_than(&recent.older, MAX_AVERAGING_INTERVAL);
        // The older meter covers at least `AVERAGING_INTERVAL`, unless it is too old to be recent.
        let mut meter = if is_old { recent.newer } else { recent.older };
        if let Some(used) = meter.measure(self, now)? {
            recent.utilization = used;
        }
        if is_older_than(&recent.newer, AVERAGING_INTERVAL) {
            (recent.older, recent.newer) = (recent.newer, meter);
        }
        Ok(recent.utilization)
    }

    /// Counters of the kernel, or of an imitated device: those begin when it was created, and it is
    /// busy while its budget is.
    ///
    /// # Errors
    /// The statistics cannot be read; the device may be gone.
    pub fn statistics(&self, now: Instant) -> io::Result<DeviceStatistics> {
        match &self.kind {
            DeviceKind::Physical { source, .. } => source.read(),
            DeviceKind::Imitated(budget) => Ok(statistics_of(budget, now)),
        }
    }

    fn reading(&self, now: Instant) -> io::Result<DeviceReading> {
        match &self.kind {
            DeviceKind::Physical { source, .. } => source.read().map(DeviceReading::Statistics),
            DeviceKind::Imitated(budget) => Ok(DeviceReading::Worked(budget.busy_time(now))),
        }
    }
}

/// Capacity of an imitated device; a rate that is not set is unknown (0).
fn capacity_of(options: &RateOptions) -> MeasuredCapacity {
    let narrower = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min().unwrap_or(0);
    let iops = options.iops.unwrap_or(0);
    MeasuredCapacity {
        read_iops: iops,
        write_iops: iops,
        read_bps: narrower(options.bytes, options.read),
        write_bps: narrower(options.bytes, options.write),
    }
}

/// Counters of an imitated device, in the form of the kernel's.
fn statistics_of(budget: &RateBudget, now: Instant) -> DeviceStatistics {
    let Completed { requests: [reads, writes], bytes: [read_bytes, written_bytes], in_flight } =
        budget.completed();
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let (busy_ms, queued_ms) = (milliseconds(budget.busy_time(now)), milliseconds(in_flight));
    DeviceStatistics { reads, read_bytes, writes, written_bytes, busy_ms, queued_ms }
}

/// State of a device at one moment.
#[derive(Clone, Copy, Debug)]
enum DeviceReading {
    Statistics(DeviceStatistics),
    Worked(Duration),
}

/// Last reading of one observer: utilization is the difference of two readings.
#[derive(Clone, Copy, Debug, Default)]
pub struct UtilizationMeter {
    last: Option<(Instant, DeviceReading)>,
}

impl UtilizationMeter {
    /// Utilization of `device` since the last measurement, in thousandths. `None` for the first
    /// call, before 20 ms have passed, and if a total decreased.
    ///
    /// May exceed 1000 a little: a measured capacity is a median, and requests complete in bursts.
    ///
    /// # Errors
    /// The statistics cannot be read; the device may be gone.
    pub fn measure(&mut self, device: &Device, now: Instant) -> io::Result<Option<u32>> {
        let last = match self.last {
            Some((at, _)) if now - at < MIN_INTERVAL => return Ok(None),
            last => last,
        };
        let reading = device.reading(now)?;
        self.last = Some((now, reading));
        Ok(last.and_then(|(at, before)| {
            utilization_between(device.capacity.as_ref(), before, reading, now - at)
        }))
    }
}

/// Utilization of a device between two readings that are `elapsed` apart, in thousandths; `None` if
/// a total decreased.
fn utilization_between(
    capacity: Option<&MeasuredCapacity>,
    before: DeviceReading,
    after: DeviceReading,
    elapsed: Duration,
) -> Option<u32> {
    match (before, after) {
        (DeviceReading::Worked(before), DeviceReading::Worked(after)) => {
            Some(thousandths(after.checked_sub(before)?.as_nanos(), elapsed.as_nanos()))
        }
        (DeviceReading::Statistics(before), DeviceReading::Statistics(after)) => {
            let done = after.since(&before)?;
            // The kernel counts in milliseconds, which may exceed the interval a little.
            let busy = || thousandths(u128::from(done.busy_ms), elapsed.as_millis()).min(1000);
            Some(capacity.and_then(|capacity| capacity_share(capacity, &done, elapsed)).unwrap_or_else(busy))
        }
        // Both readings are of the same device, and so of the same type.
        _ => None,
    }
}

/// Utilization of a device whose capacity is known; `None` if a direction without a known capacity
/// was used.
fn capacity_share(capacity: &MeasuredCapacity, done: &DeviceStatistics, elapsed: Duration) -> Option<u32> {
    let a_second = |amount: u64| {
        let scaled = u128::from(amount) * u128::from(NANOS_PER_SECOND) / elapsed.as_nanos().max(1);
        u64::try_from(scaled).unwrap_or(u64::MAX)
    };
    // A direction that was used but not measured makes the result unknown.
    let unknown = |done: u64, iops: u64, bps: u64| done > 0 && iops == 0 && bps == 0;
    if unknown(done.reads, capacity.read_iops, capacity.read_bps)
        || unknown(done.writes, capacity.write_iops, capacity.write_bps)
    {
        return None;
    }
    let rates = DeviceLoad {
        read_iops: a_second(done.reads),
        write_iops: a_second(done.writes),
        read_bps: a_second(done.read_bytes),
        write_bps: a_second(done.written_bytes),
    };
    capacity.utilization(rates).map(|used| u32::try_from(used).unwrap_or(u32::MAX).min(MAX_UTILIZATION))
}

fn thousandths(part: u128, total: u128) -> u32 {
    u32::try_from(part * 1000 / total.max(1)).unwrap_or(u32::MAX).min(MAX_UTILIZATION)
}

#[cfg(test)]
mod tests;
