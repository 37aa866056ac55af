//! Measurements of a disk for the latency targets on its device: requests in flight, and times from
//! admission to completion.
//!
//! Waits for limits end at the admission, so they are not part of the latencies.
//!
//! A disk on a device without a target pays one relaxed load for each request. Latencies are
//! measured only if the disk or its group has a target. Never decides; see
//! [`policy::latency_target`].

use std::sync::{
    Arc, Mutex, OnceLock, PoisonError,
    atomic::{AtomicU8, AtomicU64, Ordering::Relaxed},
};

use policy::{histogram::LatencyHistogram, request::Direction};

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
    in_flight: Arc<AtomicU64>,
    /// By direction. Allocated with the first target, because most disks have none.
    latencies: OnceLock<Mutex<[LatencyHistogram; 2]>>,
}

/// Requests of one permit, counted in flight until it is dropped.
#[derive(Debug)]
pub(super) struct InFlightRequests {
    counter: Arc<AtomicU64>,
    requests: u64,
}

impl Drop for InFlightRequests {
    fn drop(&mut self) {
        self.counter.fetch_sub(self.requests, Relaxed);
    }
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

    /// Requests admitted and not completed, of those admitted since the start.
    pub fn in_flight(&self) -> u64 {
        self.in_flight.load(Relaxed)
    }

    /// Moves the latencies measured since the last call to `target`, by direction.
    pub fn take_latencies(&self, target: &mut [LatencyHistogram; 2]) {
        let Some(latencies) = self.latencies.get() else { return };
        // A histogram is valid after each step of an update.
        let mut latencies = latencies.lock().unwrap_or_else(PoisonError::into_inner);
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
        self.in_flight.fetch_add(requests, Relaxed);
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
        let latencies = self.latencies.get_or_init(Mutex::default);
        let mut latencies = latencies.lock().unwrap_or_else(PoisonError::into_inner);
        let direction: Direction = operation.direction();
        latencies[direction.index()].add(completed.nanos_since(admitted), requests.into());
    }
}
