//! Measurements of a disk for the latency targets on its device: requests in flight, and times from
//! admission to completion.
//!
//! Waits for limits end at the admission, so they are not part of the latencies.
//!
//! A disk on a device without a target pays one relaxed load for each request. Latencies are
//! measured only if the disk or its group has a target. Never decides; see
//! [`policy::latency_target`].

use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError,
    atomic::{AtomicU8, Ordering::Relaxed},
};

use policy::{histogram::LatencyHistogram, request::Direction, time::Instant};
use reactor::{coarse_now, has_reactor};

use crate::recorder::{DiskOperation, RequestRecord};

/// Extent of a measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(u8)]
pub enum MeterMode {
    /// Nothing is measured.
    #[default]
    Off,
    /// Requests in flight, for members of a device with a target.
    InFlight,
    /// Latencies too, for disks with a target.
    Latencies,
}

/// The measurement of one disk.
#[derive(Debug, Default)]
pub struct LatencyMeter {
    /// A [`MeterMode`].
    mode: AtomicU8,
    in_flight: Arc<Mutex<InFlightCounter>>,
    /// By direction. Allocated with the first target, because most disks have none.
    latencies: OnceLock<Mutex<[LatencyHistogram; 2]>>,
}

/// Number of requests in flight, and its integral over time.
#[derive(Clone, Copy, Debug, Default)]
struct InFlightCounter {
    requests: u64,
    /// Requests times nanoseconds until `until`, since the last measurement.
    integral: u128,
    until: Instant,
}

impl InFlightCounter {
    /// Threads read their clocks before they acquire the lock, so instants may arrive out of order.
    fn advance_to(&mut self, now: Instant) {
        self.integral += u128::from(self.requests) * u128::from(now.nanos_since(self.until));
        self.until = self.until.max(now);
    }
}

/// Requests of one permit, counted in flight until it is dropped.
#[derive(Debug)]
pub(super) struct InFlightRequests {
    counter: Arc<Mutex<InFlightCounter>>,
    requests: u64,
}

impl Drop for InFlightRequests {
    fn drop(&mut self) {
        let mut counter = lock(&self.counter);
        // A task may be dropped while its thread exits.
        if has_reactor() {
            counter.advance_to(coarse_now());
        }
        counter.requests = counter.requests.saturating_sub(self.requests);
    }
}

/// The content is valid after each step of an update.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl LatencyMeter {
    /// Starts or ends the measurement. Requests that are in flight at a start are not counted.
    pub fn set_mode(&self, mode: MeterMode) {
        let before = self.mode.swap(mode as u8, Relaxed);
        if mode == MeterMode::Latencies && before != mode as u8 {
            // Latencies of an earlier target may be left.
            self.take_latencies(&mut Default::default());
        }
    }

    /// Requests admitted and not completed, of those admitted since the start; and their mean
    /// number since the last call, which was `elapsed_ns` before `now`.
    pub fn take_in_flight(&self, now: Instant, elapsed_ns: u64) -> (u64, f64) {
        let mut counter = lock(&self.in_flight);
        counter.advance_to(now);
        let integral = std::mem::take(&mut counter.integral);
        (counter.requests, integral as f64 / elapsed_ns.max(1) as f64)
    }

    /// Moves the latencies measured since the last call to `target`, by direction.
    pub fn take_latencies(&self, target: &mut [LatencyHistogram; 2]) {
        let Some(latencies) = self.latencies.get() else { return };
        let mut latencies = lock(latencies);
        for (taken, measured) in target.iter_mut().zip(latencies.iter_mut()) {
            taken.merge(measured);
            measured.clear();
        }
    }

    /// Counts a permit's requests in flight, if the device has a target.
    pub(super) fn begin(&self, requests: u64) -> Option<InFlightRequests> {
        if self.mode.load(Relaxed) == MeterMode::Off as u8 {
            return None;
        }
        let mut counter = lock(&self.in_flight);
        counter.advance_to(coarse_now());
        counter.requests += requests;
        drop(counter);
        Some(InFlightRequests { counter: Arc::clone(&self.in_flight), requests })
    }

    pub(super) fn measures_latencies(&self) -> bool {
        self.mode.load(Relaxed) == MeterMode::Latencies as u8
    }

    /// Adds the latency of a request that succeeded. Flushes do not count: they are not admitted.
    pub(super) fn add(&self, finished: &RequestRecord) {
        let RequestRecord { operation, requests, admitted, completed, has_failed, .. } = *finished;
        if has_failed || operation == DiskOperation::Flush {
            return;
        }
        let mut latencies = lock(self.latencies.get_or_init(Mutex::default));
        let direction: Direction = operation.direction();
        latencies[direction.index()].add(completed.nanos_since(admitted), requests.into());
    }
}
