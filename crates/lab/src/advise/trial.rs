//! Simulated latencies of tenants: their requests run through the daemon's own decisions, as in
//! `weir simulate`, on modelled devices.
//!
//! Late requests are counted exactly; percentiles have an error of at most 1 %. Flushes take time
//! on a device but are not judged, since no limit delays them.

use std::sync::atomic::{AtomicBool, Ordering};

use recording::RequestOp;
use serde::Serialize;
use simulator::{engine::SimulationEngine, request::SimulatedRequest, world::WorldSpec};

use super::{arrivals::TraceArrival, confidence::TraceBlocks, target::LatencyTarget};
use crate::latencies::{self, Latencies};

/// Some 240 MB. A trial with more waiting requests is abandoned.
const MAX_WAITING: usize = 2_000_000;
const BATCH: usize = 4096;

/// Criterion for late requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct TrialCriterion {
    pub(super) target: LatencyTarget,
    /// True to judge the whole latency, including the device; false for the wait at limits alone.
    pub(super) is_latency: bool,
    pub(super) blocks: TraceBlocks,
}

/// Results of one tenant.
#[derive(Clone, Debug)]
pub(super) struct TrialResult {
    pub(super) requests: u64,
    pub(super) bytes: u64,
    pub(super) latency: Latencies,
    pub(super) waited: Latencies,
    /// Requests that were throttled at all.
    pub(super) throttled: u64,
    /// Late requests, in total and by block.
    pub(super) late: u64,
    pub(super) late_in: Vec<u32>,
    pub(super) requests_in: Vec<u32>,
    first_ns: u64,
    last_ns: u64,
    /// True if the trial was abandoned: the rest is unknown.
    pub(super) abandoned: bool,
}

/// Times in nanoseconds; rates from the first request to the end of the last.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) struct TrialFigures {
    pub(super) iops: f64,
    pub(super) bps: f64,
    pub(super) latency_p50_ns: u64,
    /// At the percentile of the target, like `wait_ns`.
    pub(super) latency_ns: u64,
    pub(super) wait_p50_ns: u64,
    pub(super) wait_ns: u64,
    /// Share of throttled requests, 0 to 1.
    pub(super) held: f64,
}

impl TrialResult {
    fn new(blocks: usize) -> Self {
        let [latency, waited] = [(); 2].map(|()| latencies::growing());
        Self {
            requests: 0,
            bytes: 0,
            latency,
            waited,
            throttled: 0,
            late: 0,
            late_in: vec![0; blocks],
            requests_in: vec![0; blocks],
            first_ns: u64::MAX,
            last_ns: 0,
            abandoned: false,
        }
    }

    /// True if no more requests were late than the target allows.
    pub(super) fn holds(&self, target: &LatencyTarget) -> bool {
        !self.abandoned && self.late <= target.allowed_late(self.requests)
    }

    /// The judged time at the target's percentile.
    pub(super) fn judged_ns(&self, criterion: &TrialCriterion) -> u64 {
        let times = if criterion.is_latency { &self.latency } else { &self.waited };
        times.value_at_quantile(criterion.target.share())
    }

    pub(super) fn figures(&self, target: &LatencyTarget) -> TrialFigures {
        let seconds = self.last_ns.saturating_sub(self.first_ns) as f64 / 1e9;
        let a_second = |count: u64| if seconds > 0.0 { count as f64 / seconds } else { 0.0 };
        TrialFigures {
            iops: a_second(self.requests),
            bps: a_second(self.bytes),
            latency_p50_ns: self.latency.value_at_quantile(0.5),
            latency_ns: self.latency.value_at_quantile(target.share()),
            wait_p50_ns: self.waited.value_at_quantile(0.5),
            wait_ns: self.waited.value_at_quantile(target.share()),
            held: self.throttled as f64 / self.requests.max(1) as f64,
        }
    }
}

/// A world and the owners of its disks.
#[derive(Debug)]
pub(super) struct SimulatedTrial<'a> {
    pub(super) world: &'a WorldSpec,
    /// Index of the world's disk, by the trace's disk.
    pub(super) disks: &'a [usize],
    /// Index of the tenant, by the world's disk.
    pub(super) tenants: &'a [usize],
    /// Number of tenants.
    pub(super) count: usize,
}

impl SimulatedTrial<'_> {
    /// Simulates the requests. Fails if a daemon would reject the settings, or if `stop` is set.
    pub(super) fn run(
        &self,
        arrivals: impl Iterator<Item = (usize, TraceArrival)>,
        criterion: &TrialCriterion,
        stop: &AtomicBool,
    ) -> anyhow::Result<Vec<TrialResult>> {
        let mut engine = SimulationEngine::new(self.world, true)?;
        let mut results: Vec<TrialResult> =
            (0..self.count).map(|_| TrialResult::new(criterion.blocks.count)).collect();
        let mut pending = 0;
        for (disk, TraceArrival { at_ns, op, length }) in arrivals {
            engine.arrive(SimulatedRequest { at_ns, disk: self.disks[disk], op, offset: 0, length }, stop);
            pending += 1;
            if pending == BATCH {
                // Rows are drained in batches, so that memory stays bounded for long traces.
                pending = 0;
                self.note(&mut engine, criterion, &mut results);
                // Under a limit far too low the queue grows without bound; the target is missed
                // anyway.
                if engine.waiting() > MAX_WAITING {
                    results.iter_mut().for_each(|result| result.abandoned = true);
                    return Ok(results);
                }
                anyhow::ensure!(!stop.load(Ordering::Relaxed), "interrupted");
            }
        }
        // Drains the queue after the last arrival, in batches for prompt cancellation.
        while engine.run(BATCH) {
            anyhow::ensure!(!stop.load(Ordering::Relaxed), "interrupted");
            self.note(&mut engine, criterion, &mut results);
        }
        self.note(&mut engine, criterion, &mut results);
        Ok(results)
    }

    fn note(&self, engine: &mut SimulationEngine, criterion: &TrialCriterion, results: &mut [TrialResult]) {
        for row in engine.take_rows() {
            let SimulatedRequest { at_ns, disk, op, length, .. } = row.request;
            if op == RequestOp::Flush {
                continue;
            }
            let result = &mut results[self.tenants[disk]];
            let (wait_ns, latency_ns) = (row.admitted_ns - at_ns, row.completed_ns - at_ns);
            result.requests += 1;
            result.bytes = result.bytes.saturating_add(length);
            result.throttled += u64::from(wait_ns > 0);
            latencies::note(&mut result.waited, wait_ns);
            latencies::note(&mut result.latency, latency_ns);
            result.requests_in[criterion.blocks.of(at_ns)] += 1;
            if (if criterion.is_latency { latency_ns } else { wait_ns }) > criterion.target.time_ns {
                result.late += 1;
                result.late_in[criterion.blocks.of(at_ns)] += 1;
            }
            result.first_ns = result.first_ns.min(at_ns);
            result.last_ns = result.last_ns.max(row.completed_ns);
        }
    }
}
