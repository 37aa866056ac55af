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
//! Disks on one device share one [`Device`]. Several observers may read it, each with its own
//! [`Meter`].
//!
//! Never opens a device and never waits for it: the kernel's statistics and the lines of an
//! imitated device are enough.

mod identity;
mod limited;
mod observed;
mod sampler;
mod statistics;

pub use identity::{Identity, Number, Roots};
pub use observed::Observed;
pub use sampler::{Sampler, Subject, Target};
pub use statistics::{Source, Statistics};

use std::{
    fmt, io,
    sync::{Arc, Mutex, PoisonError},
};

use policy::{
    throttle::Reservable,
    time::{Duration, Instant, NANOS_PER_SECOND},
    watermark::{Capacity, Rates},
};

use storage::{
    Storage,
    rate::{Budget, Completed, RateOptions},
};

use crate::disk::Disk;

/// Minimum interval of a measurement; a shorter one would cover only a few requests.
const SHORTEST_MEASURE: Duration = Duration::from_millis(20);
/// Minimum interval that [`Device::use_now`] averages over.
const A_WHILE: Duration = Duration::from_secs(1);
/// Maximum age of a measurement's beginning.
const LONG_AGO: Duration = Duration::from_secs(3);

/// Upper bound of utilization, in thousandths: a thousand times the capacity.
const MOST: u32 = 1_000_000;

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
    kind: Kind,
    name: String,
    capacity: Option<Capacity>,
    /// Time of the measurement, in seconds since 1970, if it is known.
    probed_at_s: Option<u32>,
    lately: Mutex<Lately>,
}

/// Utilization shared by occasional readers: each gets an average over at least [`A_WHILE`].
#[derive(Clone, Copy, Debug, Default)]
struct Lately {
    /// Begun at least [`A_WHILE`] before the next.
    older: Meter,
    newer: Meter,
    told: u32,
}

#[derive(Debug)]
enum Kind {
    Physical { identity: Identity, source: Source },
    Imitated(Arc<Budget>),
}

/// Identity of a device while the program runs.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum DeviceId {
    /// A physical disk.
    Physical(Number),
    /// A budget, by its address: budgets may have no name.
    Imitated(usize),
}

/// Device of a disk, not resolved yet.
#[derive(Debug)]
enum Below<'a> {
    File(u64),
    Imitated(&'a Arc<Budget>),
    Nothing,
}

/// The outermost imitated rate, or the bottom storage.
fn below(mut storage: &Storage) -> Below<'_> {
    loop {
        storage = match storage {
            Storage::Wrapped(wrapped) => match wrapped.budget() {
                // An imitated rate hides the device below it.
                Some(budget) => return Below::Imitated(budget),
                None => wrapped.inner(),
            },
            Storage::File(file) => return Below::File(file.device().device_number()),
            Storage::Memory(_)
            | Storage::Nbd(_)
            | Storage::Null(_)
            | Storage::Rbd(_)
            | Storage::Simulated(_) => {
                return Below::Nothing;
            }
        };
    }
}

/// Identity of the device under a disk, without reading statistics. `None` for disks in memory or
/// on other hosts.
///
/// # Errors
/// The file system is on no local disk, such as a network file system.
pub fn id_of(disk: &Disk, roots: &Roots) -> io::Result<Option<DeviceId>> {
    match below(disk.image().storage()) {
        Below::Nothing => Ok(None),
        Below::Imitated(budget) => Ok(Some(DeviceId::Imitated(Arc::as_ptr(budget).addr()))),
        Below::File(number) => {
            let identity = Identity::resolve(Number::unpack(number), roots)?;
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
    pub fn under(
        disk: &Disk,
        roots: &Roots,
        measured: impl FnOnce(&Identity) -> Option<(Capacity, u32)>,
    ) -> io::Result<Option<Self>> {
        match below(disk.image().storage()) {
            Below::Nothing => Ok(None),
            Below::Imitated(budget) => Ok(Some(Self::imitated(budget, disk.name()))),
            Below::File(number) => {
                let identity = Identity::resolve(Number::unpack(number), roots)?;
                let (capacity, probed_at_s) = measured(&identity).unzip();
                Ok(Some(Self { probed_at_s, ..Self::physical(identity, capacity)? }))
            }
        }
    }

    /// A physical disk, with its measured capacity.
    ///
    /// # Errors
    /// It has no statistics.
    pub fn physical(identity: Identity, capacity: Option<Capacity>) -> io::Result<Self> {
        let source = Source::open(identity.directory())?;
        let name = identity.node();
        Ok(Self::new(Kind::Physical { identity, source }, name, capacity))
    }

    fn imitated(budget: &Arc<Budget>, disk: &str) -> Self {
        let options = budget.options();
        let name = match &options.shared {
            Some(name) => format!("rate:{name}"),
            None => format!("rate of {disk}"),
        };
        Self::new(Kind::Imitated(Arc::clone(budget)), name, Some(capacity_of(options)))
    }

    fn new(kind: Kind, name: String, capacity: Option<Capacity>) -> Self {
        Self { kind, name, capacity, probed_at_s: None, lately: Mutex::default() }
    }

    /// Identity of the device.
    pub fn id(&self) -> DeviceId {
        match &self.kind {
            Kind::Physical { identity, .. } => DeviceId::Physical(identity.number()),
            Kind::Imitated(budget) => DeviceId::Imitated(Arc::as_ptr(budget).addr()),
        }
    }

    /// Name for people: `/dev/vda`, `rate:NAME`.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The physical disk, if it is one.
    pub fn identity(&self) -> Option<&Identity> {
        match &self.kind {
            Kind::Physical { identity, .. } => Some(identity),
            Kind::Imitated(_) => None,
        }
    }

    /// Capacity; fields that were not measured are 0.
    pub fn capacity(&self) -> Option<Capacity> {
        self.capacity
    }

    /// Capacity that reservations may use.
    pub fn reservable(&self) -> Reservable {
        let amounts = self.capacity.map(|capacity| capacity.reservable()).unwrap_or_default();
        Reservable { amounts, probed_at_s: self.probed_at_s }
    }

    /// Source of the capacity.
    pub fn capacity_source(&self) -> CapacitySource {
        match (&self.kind, &self.capacity) {
            (Kind::Imitated(_), _) => CapacitySource::Rate,
            (Kind::Physical { .. }, Some(_)) => CapacitySource::Probe,
            (Kind::Physical { .. }, None) => CapacitySource::BusyTime,
        }
    }

    /// Recent utilization, in thousandths: over the last one to three seconds if it is read often,
    /// by any reader, and else since the last call, or since it was created.
    ///
    /// # Errors
    /// The statistics cannot be read; the device may be gone.
    pub fn use_now(&self, now: Instant) -> io::Result<u32> {
        // The result and the meters are replaced together.
        let mut lately = self.lately.lock().unwrap_or_else(PoisonError::into_inner);
        let is_for = |meter: &Meter, time| meter.last.is_none_or(|(at, _)| now - at >= time);
        let is_old = is_for(&lately.older, LONG_AGO);
        // The older meter covers at least `A_WHILE`, unless it is too old to be recent.
        let mut meter = if is_old { lately.newer } else { lately.older };
        if let Some(used) = meter.measure(self, now)? {
            lately.told = used;
        }
        if is_for(&lately.newer, A_WHILE) {
            (lately.older, lately.newer) = (lately.newer, meter);
        }
        Ok(lately.told)
    }

    /// Counters of the kernel, or of an imitated device: those begin when it was created, and it is
    /// busy while its budget is.
    ///
    /// # Errors
    /// The statistics cannot be read; the device may be gone.
    pub fn statistics(&self, now: Instant) -> io::Result<Statistics> {
        match &self.kind {
            Kind::Physical { source, .. } => source.read(),
            Kind::Imitated(budget) => Ok(statistics_of(budget, now)),
        }
    }

    fn reading(&self, now: Instant) -> io::Result<Reading> {
        match &self.kind {
            Kind::Physical { source, .. } => source.read().map(Reading::Statistics),
            Kind::Imitated(budget) => Ok(Reading::Worked(budget.worked(now))),
        }
    }
}

/// Capacity of an imitated device; a rate that is not set is unknown (0).
fn capacity_of(options: &RateOptions) -> Capacity {
    let narrower = |one: Option<u64>, other: Option<u64>| one.into_iter().chain(other).min().unwrap_or(0);
    let iops = options.iops.unwrap_or(0);
    Capacity {
        read_iops: iops,
        write_iops: iops,
        read_bps: narrower(options.bytes, options.read),
        write_bps: narrower(options.bytes, options.write),
    }
}

/// Counters of an imitated device, in the form of the kernel's.
fn statistics_of(budget: &Budget, now: Instant) -> Statistics {
    let Completed { requests: [reads, writes], bytes: [read_bytes, written_bytes], in_flight } =
        budget.completed();
    let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
    let (busy_ms, queued_ms) = (milliseconds(budget.worked(now)), milliseconds(in_flight));
    Statistics { reads, read_bytes, writes, written_bytes, busy_ms, queued_ms }
}

/// State of a device at one moment.
#[derive(Clone, Copy, Debug)]
enum Reading {
    Statistics(Statistics),
    Worked(Duration),
}

/// Last reading of one observer: utilization is the difference of two readings.
#[derive(Clone, Copy, Debug, Default)]
pub struct Meter {
    last: Option<(Instant, Reading)>,
}

impl Meter {
    /// Utilization of `device` since the last measurement, in thousandths. `None` for the first
    /// call, before 20 ms have passed, and if a total decreased.
    ///
    /// May exceed 1000 a little: a measured capacity is a median, and requests complete in bursts.
    ///
    /// # Errors
    /// The statistics cannot be read; the device may be gone.
    pub fn measure(&mut self, device: &Device, now: Instant) -> io::Result<Option<u32>> {
        let last = match self.last {
            Some((at, _)) if now - at < SHORTEST_MEASURE => return Ok(None),
            last => last,
        };
        let reading = device.reading(now)?;
        self.last = Some((now, reading));
        Ok(last.and_then(|(at, before)| used(device.capacity.as_ref(), before, reading, now - at)))
    }
}

/// Utilization of a device between two readings that are `elapsed` apart, in thousandths; `None` if
/// a total decreased.
fn used(capacity: Option<&Capacity>, before: Reading, after: Reading, elapsed: Duration) -> Option<u32> {
    match (before, after) {
        (Reading::Worked(before), Reading::Worked(after)) => {
            Some(thousandths(after.checked_sub(before)?.as_nanos(), elapsed.as_nanos()))
        }
        (Reading::Statistics(before), Reading::Statistics(after)) => {
            let done = after.since(&before)?;
            // The kernel counts in milliseconds, which may exceed the interval a little.
            let busy = || thousandths(u128::from(done.busy_ms), elapsed.as_millis()).min(1000);
            Some(capacity.and_then(|capacity| share(capacity, &done, elapsed)).unwrap_or_else(busy))
        }
        // Both readings are of the same device, and so of the same type.
        _ => None,
    }
}

/// Utilization of a device whose capacity is known; `None` if a direction without a known capacity
/// was used.
fn share(capacity: &Capacity, done: &Statistics, elapsed: Duration) -> Option<u32> {
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
    let rates = Rates {
        read_iops: a_second(done.reads),
        write_iops: a_second(done.writes),
        read_bps: a_second(done.read_bytes),
        write_bps: a_second(done.written_bytes),
    };
    capacity.use_of(rates).map(|used| u32::try_from(used).unwrap_or(u32::MAX).min(MOST))
}

fn thousandths(part: u128, whole: u128) -> u32 {
    u32::try_from(part * 1000 / whole.max(1)).unwrap_or(u32::MAX).min(MOST)
}

#[cfg(test)]
mod tests;
