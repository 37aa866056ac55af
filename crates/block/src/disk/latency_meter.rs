//! Measurements of a disk for the latency targets on its device: completed requests, requests in
//! flight, and times from admission to completion.
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
    /// Requests, for members of a device with a target.
    Requests,
    /// Latencies too, for disks with a target.
    Latencies,
}

/// The measurement of one disk.
#[derive(Debug, Default)]
pub struct LatencyMeter {
    /// A [`MeterMode`].
    mode: AtomicU8,
    requests: Arc<Mutex<RequestMeter>>,
    /// By direction. Allocated with the first target, because most disks have none.
    latencies: OnceLock<Mutex<[LatencyHistogram; 2]>>,
}

/// Requests of a disk since the last measurement.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct MeasuredRequests {
    /// Completed requests. Those of earlier processes do not count.
    pub completed: u64,
    /// Bytes that they moved: discards and zeroing move none.
    pub bytes: u64,
    /// Requests admitted and not completed, by direction, of those admitted since the start of the
    /// measurement.
    pub in_flight: [u64; 2],
    /// Mean number of requests in flight.
    pub mean_in_flight: f64,
}

#[derive(Clone, Copy, Debug, Default)]
struct RequestMeter {
    in_flight: [u64; 2],
    /// Requests in flight times nanoseconds until `until`, since the last measurement.
    integral: u128,
    until: Instant,
    completed: u64,
    bytes: u64,
}

impl RequestMeter {
    /// Threads read their clocks before they acquire the lock, so instants may arrive out of order.
    fn advance_to(&mut self, now: Instant) {
        let in_flight: u64 = self.in_flight.iter().sum();
        self.integral += u128::from(in_flight) * u128::from(now.nanos_since(self.until));
        self.until = self.until.max(now);
    }
}

/// Requests of one permit, counted in flight until it is dropped.
#[derive(Debug)]
pub(super) struct InFlightRequests {
    meter: Arc<Mutex<RequestMeter>>,
    direction: Direction,
    requests: u64,
}

impl Drop for InFlightRequests {
    fn drop(&mut self) {
        let mut meter = lock(&self.meter);
        // A task may be dropped while its thread exits.
        if has_reactor() {
            meter.advance_to(coarse_now());
        }
        let in_flight = &mut meter.in_flight[self.direction.index()];
        *in_flight = in_flight.saturating_sub(self.requests);
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

    /// The requests since the last call, which was `elapsed_ns` before `now`.
    pub fn take_requests(&self, now: Instant, elapsed_ns: u64) -> MeasuredRequests {
        let mut meter = lock(&self.requests);
        meter.advance_to(now);
        MeasuredRequests {
            completed: std::mem::take(&mut meter.completed),
            bytes: std::mem::take(&mut meter.bytes),
            in_flight: meter.in_flight,
            mean_in_flight: std::mem::take(&mut meter.integral) as f64 / elapsed_ns.max(1) as f64,
        }
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

    /// Counts a permit's requests in flight, if the device has a target. Requests without bytes are
    /// queries of metadata, and are not counted.
    pub(super) fn begin(&self, direction: Direction, requests: u64, bytes: u64) -> Option<InFlightRequests> {
        if self.is_off() || bytes == 0 {
            return None;
        }
        let mut meter = lock(&self.requests);
        meter.advance_to(coarse_now());
        meter.in_flight[direction.index()] += requests;
        drop(meter);
        Some(InFlightRequests { meter: Arc::clone(&self.requests), direction, requests })
    }

    /// Counts requests that succeeded, if the device has a target.
    pub(super) fn complete(&self, operation: DiskOperation, requests: u64, bytes: u64) {
        if self.is_off() {
            return;
        }
        let moves_data = matches!(operation, DiskOperation::Read | DiskOperation::Write);
        let mut meter = lock(&self.requests);
        meter.completed += requests;
        meter.bytes += if moves_data { bytes } else { 0 };
    }

    fn is_off(&self) -> bool {
        self.mode.load(Relaxed) == MeterMode::Off as u8
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
