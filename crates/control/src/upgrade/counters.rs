//! Transferred counters: the new process continues them, so that no counter decreases.
//!
//! Counters of the process itself (time, workers, caches) start at zero.

use std::{collections::BTreeMap, rc::Rc};

use api::ExportCounters;
use block::{
    disk::{Disk, DiskTotals, Errors},
    layer::throttle::ThrottleGroup,
    measures::{HistogramSnapshot, Measures, MeasuresSnapshot},
};
use export::nbd::RejectedClientCounts;
use policy::{
    prefetch,
    throttle::{self, AdmissionCounters, ReservationTimes},
};
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    events::{DeliveryCounters, Kind, RecordedEvent},
    registry::{Registry, RunningExport},
};

/// Counters of a disk.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct DiskCounterState {
    /// Reads, writes, bytes of both, merged requests.
    totals: [u64; 5],
    /// Merged reads, discards, their bytes, flushes, the end of the highest write. Not sent by
    /// 0.2.0 and older.
    #[serde(default)]
    further_totals: [u64; 5],
    /// Errors of reads, writes, flushes, discards.
    errors: [u64; 4],
    throttle: ThrottleCounterState,
    /// In the order of [`prefetch::PrefetchStats`].
    read_ahead: [u64; 9],
    /// `None` if no client reads measures.
    measures: Option<MeasuresState>,
}

impl DiskCounterState {
    pub(super) fn of(disk: &Disk) -> Self {
        let DiskTotals {
            reads,
            writes,
            read_bytes,
            written_bytes,
            merged_requests,
            merged_reads,
            discards,
            discarded_bytes,
            flushes,
            highest_write_end,
        } = disk.totals();
        let totals = [reads, writes, read_bytes, written_bytes, merged_requests];
        let further_totals = [merged_reads, discards, discarded_bytes, flushes, highest_write_end];
        let Errors { reads, writes, flushes, discards } = disk.failures().errors();
        Self {
            totals,
            further_totals,
            errors: [reads, writes, flushes, discards],
            throttle: disk.throttle().counters().into(),
            read_ahead: prefetch_numbers(&disk.prefetch().stats()),
            measures: disk.measures_snapshot().map(Into::into),
        }
    }

    pub(super) fn add_to(self, disk: &Disk) {
        let Self { totals, further_totals, errors, throttle, read_ahead, measures } = self;
        let [reads, writes, read_bytes, written_bytes, merged_requests] = totals;
        let [merged_reads, discards, discarded_bytes, flushes, highest_write_end] = further_totals;
        disk.add_totals(&DiskTotals {
            reads,
            writes,
            read_bytes,
            written_bytes,
            merged_requests,
            merged_reads,
            discards,
            discarded_bytes,
            flushes,
            highest_write_end,
        });
        let [reads, writes, flushes, discards] = errors;
        disk.failures().add_errors(Errors { reads, writes, flushes, discards });
        disk.throttle().add_counters(&throttle.into());
        disk.prefetch().add_stats(&prefetch_stats(read_ahead));
        if let Some(measures) = measures {
            Measures::count_on(disk.measure(), &measures.into());
        }
    }
}

fn prefetch_numbers(stats: &prefetch::PrefetchStats) -> [u64; 9] {
    let prefetch::PrefetchStats {
        hits,
        partial_hits,
        misses,
        skipped,
        waited,
        hit_bytes,
        read_ahead_bytes,
        used_bytes,
        wasted_bytes,
        memory_bytes: _,
        streams: _,
        is_gate_closed: _,
    } = *stats;
    [hits, partial_hits, misses, skipped, waited, hit_bytes, read_ahead_bytes, used_bytes, wasted_bytes]
}

fn prefetch_stats(counts: [u64; 9]) -> prefetch::PrefetchStats {
    let [hits, partial_hits, misses, skipped, waited, hit_bytes, read_ahead_bytes, used_bytes, wasted_bytes] =
        counts;
    prefetch::PrefetchStats {
        hits,
        partial_hits,
        misses,
        skipped,
        waited,
        hit_bytes,
        read_ahead_bytes,
        used_bytes,
        wasted_bytes,
        ..prefetch::PrefetchStats::default()
    }
}

/// Counters of the throttle layer for a disk or group.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ThrottleCounterState {
    /// By direction: requests, bytes, throttled requests, nanoseconds of waiting.
    passed: [[u64; 4]; 2],
    limited_ns: u64,
    /// Nanoseconds in which the reservation was met, and in which it was missed.
    kept: Option<[u64; 2]>,
    waits: Vec<(u16, u32)>,
    longest_wait_ns: u64,
}

impl ThrottleCounterState {
    pub(super) fn of(group: &ThrottleGroup) -> Self {
        group.counters().into()
    }

    pub(super) fn add_to(self, group: &ThrottleGroup) {
        group.add_counters(&self.into());
    }
}

impl From<throttle::CumulativeStats> for ThrottleCounterState {
    fn from(counted: throttle::CumulativeStats) -> Self {
        let throttle::CumulativeStats {
            passed,
            throttled_ns: limited_ns,
            reservation_times: kept,
            waits,
            longest_wait_ns,
        } = counted;
        let numbers = |AdmissionCounters { requests, bytes, throttled, waited_ns }| {
            [requests, bytes, throttled, waited_ns]
        };
        let kept = kept.map(|ReservationTimes { met_ns, missed_ns }| [met_ns, missed_ns]);
        Self { passed: passed.map(numbers), limited_ns, kept, waits, longest_wait_ns }
    }
}

impl From<ThrottleCounterState> for throttle::CumulativeStats {
    fn from(state: ThrottleCounterState) -> Self {
        let ThrottleCounterState { passed, limited_ns, kept, waits, longest_wait_ns } = state;
        let counters = |[requests, bytes, throttled, waited_ns]: [u64; 4]| AdmissionCounters {
            requests,
            bytes,
            throttled,
            waited_ns,
        };
        let kept = kept.map(|[met_ns, missed_ns]| ReservationTimes { met_ns, missed_ns });
        Self {
            passed: passed.map(counters),
            throttled_ns: limited_ns,
            reservation_times: kept,
            waits,
            longest_wait_ns,
        }
    }
}

/// Latencies of a disk, and its time by throttle cause.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct MeasuresState {
    latency: [HistogramState; 3],
    #[serde(default)]
    discarding_ns: u64,
    waits: [HistogramState; 2],
    waiting_ns: [u64; 2],
    held_ns: [[[u64; 2]; 6]; 3],
}

/// Nonempty buckets of a histogram, and the sum of all values in nanoseconds.
#[derive(Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct HistogramState {
    counts: BTreeMap<u16, u64>,
    sum_ns: u64,
}

impl From<MeasuresSnapshot> for MeasuresState {
    fn from(measured: MeasuresSnapshot) -> Self {
        let MeasuresSnapshot { latency, discarding_ns, waits, waiting_ns, held_ns } = measured;
        let spread = |spread: HistogramSnapshot| {
            let counts = (0..).zip(spread.counts().iter().copied()).filter(|(_, count)| *count > 0);
            HistogramState { counts: counts.collect(), sum_ns: spread.sum_ns }
        };
        Self { latency: latency.map(spread), discarding_ns, waits: waits.map(spread), waiting_ns, held_ns }
    }
}

impl From<MeasuresState> for MeasuresSnapshot {
    fn from(state: MeasuresState) -> Self {
        let MeasuresState { latency, discarding_ns, waits, waiting_ns, held_ns } = state;
        let histogram = |HistogramState { counts, sum_ns }: HistogramState| {
            let mut all = vec![0; counts.last_key_value().map_or(0, |(last, _)| usize::from(*last) + 1)];
            counts.into_iter().for_each(|(index, count)| all[usize::from(index)] = count);
            HistogramSnapshot::new(all, sum_ns)
        };
        Self {
            latency: latency.map(histogram),
            discarding_ns,
            waits: waits.map(histogram),
            waiting_ns,
            held_ns,
        }
    }
}

/// Counters of the daemon: servers, endpoints and events.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct DaemonCounterState {
    /// By endpoint: clients rejected by network, number of connections, name and export.
    servers: BTreeMap<String, [u64; 4]>,
    /// By export id: requests, kicks, calls, copies, copied bytes.
    #[serde(rename = "doors")]
    endpoints: BTreeMap<String, [u64; 5]>,
    /// By event type: recorded, dropped.
    event_counts: BTreeMap<String, [u64; 2]>,
    /// Events as clients receive them, oldest first.
    events: Vec<Value>,
    /// Delivered, failed, skipped.
    deliveries: Option<[u64; 3]>,
}

impl DaemonCounterState {
    pub(super) fn of(registry: &Registry) -> Self {
        let servers = registry.exports.servers().into_iter().map(|serving| {
            let RejectedClientCounts { networks, connections, names, exports } =
                serving.server.rejected_counts();
            (super::endpoint_name(&serving.endpoint), [networks, connections, names, exports])
        });
        let endpoints = registry.exports.all().into_iter().filter_map(|export| {
            let ExportCounters { requests, kicks, calls, copies, copied_bytes, .. } =
                export.own_endpoint()?.server.counters();
            let [kicks, calls, copies, copied] =
                [kicks, calls, copies, copied_bytes].map(|count| count.unwrap_or(0));
            Some((export.id.clone(), [requests?, kicks, calls, copies, copied]))
        });
        let counts = registry.events.counts().into_iter();
        let deliveries = registry.deliveries.get().map(|counts| counts.counts());
        Self {
            servers: servers.collect(),
            endpoints: endpoints.collect(),
            event_counts: counts.map(|(kind, counts)| (kind.name().to_owned(), counts)).collect(),
            // In their public form, which both versions understand.
            events: registry.events.since(0).iter().map(|event| event.to_json()).collect(),
            deliveries,
        }
    }

    /// Adds all counters except those of endpoints: see [`DaemonCounterState::add_to_endpoint`].
    pub(super) fn add_to(&mut self, registry: &Registry) {
        for serving in registry.exports.servers() {
            if let Some([networks, connections, names, exports]) =
                self.servers.remove(&super::endpoint_name(&serving.endpoint))
            {
                serving.server.add_counts(RejectedClientCounts { networks, connections, names, exports });
            }
        }
        let counts = std::mem::take(&mut self.event_counts);
        // Event types that this version does not know are dropped.
        let counts = counts.iter().filter_map(|(name, counts)| Some((Kind::named(name)?, *counts)));
        let events = self.events.drain(..).filter_map(|event| RecordedEvent::from_json(&event));
        registry.events.merge_transferred(events.collect(), counts);
        if let Some(deliveries) = self.deliveries.take() {
            registry.deliveries.get_or_init(Rc::<DeliveryCounters>::default).add_counts(deliveries);
        }
    }

    /// Adds the counters of an export's endpoint, by the id that it had in the old process.
    pub(super) fn add_to_endpoint(&mut self, id: &str, export: &RunningExport) {
        if let (Some(counts), Some(endpoint)) = (self.endpoints.remove(id), export.own_endpoint()) {
            let [requests, kicks, calls, copies, copied_bytes] = counts.map(Some);
            let before =
                ExportCounters { requests, kicks, calls, copies, copied_bytes, ..ExportCounters::default() };
            endpoint.server.count_on(&before);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::upgrade::round_trip;

    proptest! {
        #[test]
        fn measures_round_trip(
            spreads in proptest::collection::vec(
                (proptest::collection::vec(prop_oneof![Just(0), any::<u64>()], 0..200), any::<u64>()),
                5,
            ),
            discarding_ns: u64,
            waiting_ns: [u64; 2],
            held_ns: [[[u64; 2]; 6]; 3],
        ) {
            let spread = |at: usize| {
                let (mut counts, sum_ns) = spreads[at].clone();
                // Trailing empty buckets are not transferred.
                counts.truncate(counts.iter().rposition(|count| *count > 0).map_or(0, |last| last + 1));
                HistogramSnapshot::new(counts, sum_ns)
            };
            let (latency, waits) = ([0, 1, 2].map(spread), [3, 4].map(spread));
            let measured = MeasuresSnapshot { latency, discarding_ns, waits, waiting_ns, held_ns };
            let transferred = round_trip(&MeasuresState::from(measured.clone()));
            prop_assert_eq!(MeasuresSnapshot::from(transferred), measured);
        }

        #[test]
        fn throttle_counters_round_trip(
            passed: [[u64; 4]; 2],
            limited_ns: u64,
            kept: Option<[u64; 2]>,
            waits: Vec<(u16, u32)>,
            longest_wait_ns: u64,
        ) {
            let counted = throttle::CumulativeStats::from(ThrottleCounterState { passed, limited_ns, kept, waits, longest_wait_ns });
            let transferred = round_trip(&ThrottleCounterState::from(counted.clone()));
            prop_assert_eq!(throttle::CumulativeStats::from(transferred), counted);
        }

        #[test]
        fn prefetch_counters_round_trip(counts: [u64; 9]) {
            prop_assert_eq!(prefetch_numbers(&prefetch_stats(counts)), counts);
        }
    }
}
