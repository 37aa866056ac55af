//! Predicts the effect of other limits on recorded requests, including the reaction of the
//! clients.
//!
//! ```text
//!   recorded requests ─► chains: a request follows ─► engine ─► once to fill the buckets,
//!   of each disk         an earlier completion                  once to measure
//! ```
//!
//! A program with 32 requests in flight sends the next one when one completes: with half the limit
//! it sends half as many. Each request is therefore sent after the recorded delay since the
//! previous completion, and not at the recorded time. Its service time is the recorded one, or, on
//! devices with a latency target, the part of it that `recorded_device.rs` attributes to the
//! request itself: then the daemon's controller throttles the disks, and the others become faster.
//!
//! Chains that have ended begin again until all have ended once. The first round fills the
//! buckets, so that a burst that is used up has no effect on the measurement. Not modelled:
//! watermarks, read-ahead, and on devices without a latency target that a device becomes slower or
//! saturates under more load.
//!
//! Requests of a throttled disk were recorded at the rate of the limit, because clients wait for
//! completions. Sending them at the recorded times would show no effect of a higher limit and an
//! endless queue under a lower one. Recorded requests are therefore divided into chains: a request
//! follows the latest earlier completion without a follower, after the recorded delay. Clients
//! that do not wait for completions are treated as if they did, which understates the effect of a
//! limit that is too low.

use std::{
    cmp::Reverse,
    collections::{BTreeSet, BinaryHeap},
    sync::atomic::{AtomicBool, Ordering},
};

use policy::{latency_target::LatencySettings, prefetch};
pub use recording::{CompletedRequest, RequestOp};

use super::{
    client::RequestChain,
    device::{DevicePlacement, StationSpec},
    engine::{ResultRow, STEPS, SimulationEngine},
    recorded_device::{RecordedDevice, RecordedTimes},
    tally::RequestStatistics,
    world::{DiskGroupSpec, DiskSettings, DiskSpec, UNKNOWN_SIZE, WorldSpec},
};

/// A group with the settings to preview.
#[derive(Clone, Debug)]
pub struct PreviewGroup {
    /// Name for messages.
    pub name: String,
    /// Its limits and share.
    pub settings: DiskSettings,
    /// Index of its parent among the groups, smaller than its own.
    pub parent: Option<usize>,
}

/// A disk with the settings to preview and its recorded requests.
#[derive(Clone, Debug)]
pub struct PreviewDisk {
    /// Name for messages.
    pub name: String,
    /// Its limits and share.
    pub settings: DiskSettings,
    /// Index of its group.
    pub group: Option<usize>,
    /// Number of its device, which disks with the same number share. `None` if no latency target is
    /// in force on it: then service times do not depend on the load.
    pub device: Option<usize>,
    /// Recorded requests in any order.
    pub recording: Vec<CompletedRequest>,
}

/// Measurements of the requests of one or more disks.
#[derive(Clone, Debug, Default)]
pub struct PreviewResult(RequestStatistics);

impl PreviewResult {
    /// Measurements of recorded requests.
    pub fn of_recorded(recording: &[CompletedRequest]) -> Self {
        let mut statistics = RequestStatistics::default();
        for request in recording {
            let admitted_ns = request.arrived_ns.saturating_add(request.wait_ns);
            let ended_ns = admitted_ns.saturating_add(request.service_ns);
            statistics.record(request.arrived_ns, admitted_ns, ended_ns, request.length);
        }
        // The requests are in any order.
        statistics.first = recording.iter().map(|request| request.arrived_ns).min();
        Self(statistics)
    }

    /// Adds the measurements of another disk.
    pub fn add(&mut self, other: &Self) {
        self.0.add(&other.0);
    }

    /// Number of requests.
    pub fn requests(&self) -> u64 {
        self.0.requests
    }

    /// Seconds from the first request to the last completion.
    pub fn seconds(&self) -> f64 {
        self.0.seconds()
    }

    /// Requests per second.
    pub fn operations_per_second(&self) -> f64 {
        self.0.per_second(self.0.requests)
    }

    /// Bytes per second.
    pub fn bytes_per_second(&self) -> f64 {
        self.0.per_second(self.0.bytes)
    }

    /// Quantile of the latency in nanoseconds; `part` is from 0 to 1.
    pub fn latency_ns(&self, part: f64) -> u64 {
        self.0.latency.value_at_quantile(part)
    }

    /// Quantile of the time until admission in nanoseconds; `part` is from 0 to 1.
    pub fn wait_ns(&self, part: f64) -> u64 {
        self.0.waited.value_at_quantile(part)
    }

    /// Share of requests that waited for longer than a microsecond, 0 to 1.
    pub fn waiting_ratio(&self) -> f64 {
        let waited = &self.0.waited;
        let at_once = waited.count_between(0, 1000);
        match waited.len() {
            0 => 0.0,
            all => (all - at_once.min(all)) as f64 / all as f64,
        }
    }
}

/// Measurements of a replay.
#[derive(Clone, Debug)]
pub struct ReplayResult {
    /// Of each disk.
    pub disks: Vec<PreviewResult>,
    /// Virtual time that was measured, in nanoseconds. Low limits stretch it beyond the time of the
    /// recording; with a latency target it ends at [`MAX_ROUND_NS`], with the rest of the requests
    /// left out.
    pub simulated_ns: u64,
}

/// Longest round of a replay with a latency target, in virtual time: twice the longest recording.
/// Each second of it is twenty steps of a controller, also while no limit admits a request.
pub const MAX_ROUND_NS: u64 = 1_200_000_000_000;

/// Simulates the recorded requests under these limits and returns the measurements of each disk.
/// `None` if `stop` was set meanwhile.
///
/// # Errors
/// Reservations of a group are invalid.
pub fn replay(
    groups: &[PreviewGroup],
    disks: &[PreviewDisk],
    stop: &AtomicBool,
) -> anyhow::Result<Option<ReplayResult>> {
    let devices = PreviewDevices::of(disks);
    let of_group = |settings| if devices.stations.is_empty() { without_target(settings) } else { settings };
    let world = WorldSpec {
        groups: groups
            .iter()
            .map(|group| DiskGroupSpec {
                name: group.name.clone(),
                settings: of_group(group.settings),
                parent: group.parent,
            })
            .collect(),
        disks: disks.iter().zip(&devices.places).map(|(known, place)| disk(known, *place)).collect(),
        stations: devices.stations.clone(),
        ..WorldSpec::default()
    };
    // Elsewhere, the recorded service times stand for the devices.
    let mut engine = SimulationEngine::new(&world, true)?;
    let all = || disks.iter().flat_map(|disk| &disk.recording);
    let begin = all().map(|request| request.arrived_ns).min().unwrap_or(0);
    let end =
        all().map(|request| request.arrived_ns + request.wait_ns + request.service_ns).max().unwrap_or(0);
    for (index, requests) in devices.requests.iter().enumerate() {
        for chain in chains(index, requests, begin, end) {
            engine.add_chain(chain);
        }
    }
    let max_round_ns = if devices.stations.is_empty() { u64::MAX } else { MAX_ROUND_NS };
    let mut phase = ReplayRound::new(disks);
    let mut first_ns = None;
    loop {
        let is_running = engine.run(STEPS);
        for row in engine.take_rows() {
            match first_ns {
                // This round only fills the buckets.
                None if phase.is_over(&row) || row.admitted_ns >= max_round_ns => {
                    first_ns = Some(row.admitted_ns.min(max_round_ns));
                    phase = ReplayRound::new(disks);
                }
                None => {}
                // Measured for as long as the first round lasted.
                Some(first_ns) if row.admitted_ns >= 2 * first_ns || phase.has_enough() => {
                    let simulated_ns = row.admitted_ns.min(2 * first_ns) - first_ns;
                    return Ok(Some(phase.finish(simulated_ns)));
                }
                Some(_) => {}
            }
            phase.add_result(&row);
        }
        // Limits may admit no request for a long time, in which there is no row.
        let now_ns = if devices.stations.is_empty() { 0 } else { engine.now_ns() };
        match first_ns {
            None if now_ns >= max_round_ns => {
                first_ns = Some(max_round_ns);
                phase = ReplayRound::new(disks);
            }
            Some(first_ns) if now_ns >= 2 * first_ns => return Ok(Some(phase.finish(first_ns))),
            _ => {}
        }
        if stop.load(Ordering::Relaxed) {
            return Ok(None);
        }
        if !is_running {
            // There are no requests.
            return Ok(Some(phase.finish(0)));
        }
    }
}

/// Measurements of one round of the recorded requests.
struct ReplayRound {
    /// Remaining requests of each disk.
    remaining: Vec<usize>,
    results: Vec<RequestStatistics>,
    rows: usize,
    max_rows: usize,
}

impl ReplayRound {
    // Limit of repetitions by a disk whose requests are admitted faster than others'.
    const MAX_REPETITIONS: usize = 4;

    fn new(disks: &[PreviewDisk]) -> Self {
        let remaining: Vec<_> = disks.iter().map(|disk| disk.recording.len()).collect();
        let max_rows = Self::MAX_REPETITIONS * remaining.iter().sum::<usize>();
        Self { results: vec![RequestStatistics::default(); disks.len()], rows: 0, max_rows, remaining }
    }

    /// True if every disk completed a round with this row.
    fn is_over(&mut self, row: &ResultRow) -> bool {
        let remaining = &mut self.remaining[row.request.disk];
        *remaining = remaining.saturating_sub(1);
        self.remaining.iter().all(|left| *left == 0) || self.has_enough()
    }

    fn has_enough(&self) -> bool {
        self.rows >= self.max_rows
    }

    fn add_result(&mut self, row: &ResultRow) {
        self.rows += 1;
        let statistics = &mut self.results[row.request.disk];
        statistics.record(row.request.at_ns, row.admitted_ns, row.completed_ns, row.request.length);
    }

    fn finish(self, simulated_ns: u64) -> ReplayResult {
        ReplayResult { disks: self.results.into_iter().map(PreviewResult).collect(), simulated_ns }
    }
}

/// Without a device, service times do not depend on the load, so a target has no effect on them.
fn without_target(settings: DiskSettings) -> DiskSettings {
    DiskSettings { latency: LatencySettings::default(), ..settings }
}

fn disk(disk: &PreviewDisk, place: DevicePlacement) -> DiskSpec {
    DiskSpec {
        name: disk.name.clone(),
        settings: if place.station.is_some() { disk.settings } else { without_target(disk.settings) },
        group: disk.group,
        prefetch: prefetch::PrefetchConfig::off(),
        size_bytes: UNKNOWN_SIZE,
        place,
        sampled_device: None,
    }
}

/// The devices with latency targets, and the service times of the requests on them.
struct PreviewDevices {
    stations: Vec<StationSpec>,
    /// Station of each disk.
    places: Vec<DevicePlacement>,
    /// Requests of each disk, in the order of its recording.
    requests: Vec<Vec<ReplayedRequest>>,
}

/// A recorded request, with the service time in the replay.
#[derive(Clone, Copy)]
struct ReplayedRequest {
    recorded: CompletedRequest,
    service_ns: u64,
}

impl PreviewDevices {
    fn of(disks: &[PreviewDisk]) -> Self {
        let replayed = |recorded: &CompletedRequest| ReplayedRequest {
            recorded: *recorded,
            service_ns: recorded.service_ns,
        };
        let mut devices = Self {
            stations: Vec::new(),
            places: vec![DevicePlacement::default(); disks.len()],
            requests: disks.iter().map(|disk| disk.recording.iter().map(replayed).collect()).collect(),
        };
        let numbers: BTreeSet<usize> = disks.iter().filter_map(|disk| disk.device).collect();
        for (station, number) in numbers.into_iter().enumerate() {
            let on_device: Vec<usize> =
                (0..disks.len()).filter(|&index| disks[index].device == Some(number)).collect();
            let times = |request: &CompletedRequest| {
                let admitted_ns = request.arrived_ns.saturating_add(request.wait_ns);
                RecordedTimes { admitted_ns, completed_ns: admitted_ns.saturating_add(request.service_ns) }
            };
            let requests: Vec<RecordedTimes> =
                on_device.iter().flat_map(|&index| disks[index].recording.iter().map(times)).collect();
            let RecordedDevice { parallel, service_ns } = RecordedDevice::of(&requests);
            devices.stations.push(StationSpec { parallel, ..StationSpec::default() });
            let mut service_ns = service_ns.into_iter();
            for index in on_device {
                devices.places[index].station = Some(station);
                for (request, service_ns) in devices.requests[index].iter_mut().zip(service_ns.by_ref()) {
                    request.service_ns = service_ns;
                }
            }
        }
        devices
    }
}

/// A reconstructed chain.
struct ReconstructedChain {
    chain: RequestChain,
    /// Completion time of its last request.
    free_ns: u64,
    /// Longest duration of one of its requests.
    longest_ns: u64,
}

/// Divides requests into chains, from the start of the recording to its end. Of the completed
/// requests without a follower, the latest is followed.
fn chains(disk: usize, requests: &[ReplayedRequest], begin_ns: u64, end_ns: u64) -> Vec<RequestChain> {
    let mut requests = requests.to_vec();
    requests.sort_by_key(|request| request.recorded.arrived_ns);
    let mut chains: Vec<ReconstructedChain> = Vec::new();
    let mut in_flight: BinaryHeap<Reverse<(u64, usize)>> = BinaryHeap::new();
    let mut idle: Vec<usize> = Vec::new();
    for ReplayedRequest { recorded: request, service_ns } in requests {
        // Chains whose request had completed by the arrival of this one are free to send it.
        while let Some(&Reverse((at, chain))) = in_flight.peek()
            && at <= request.arrived_ns
        {
            in_flight.pop();
            idle.push(chain);
        }
        // The latest completion is the most probable cause of this request. Without one, another
        // request must have been in flight: a new chain.
        let place = idle.pop().unwrap_or_else(|| {
            chains.push(ReconstructedChain {
                chain: RequestChain::new(disk),
                free_ns: begin_ns,
                longest_ns: 0,
            });
            chains.len() - 1
        });
        let ReconstructedChain { chain, free_ns, longest_ns } = &mut chains[place];
        let think_ns = request.arrived_ns - *free_ns;
        chain.add(think_ns, request.op, request.length, service_ns);
        let took_ns = request.wait_ns + request.service_ns;
        *free_ns = request.arrived_ns + took_ns;
        *longest_ns = took_ns.max(*longest_ns);
        in_flight.push(Reverse((*free_ns, place)));
    }
    let repeated = |ReconstructedChain { chain, free_ns, longest_ns }: ReconstructedChain| {
        chain.with_repetition(end_ns.saturating_sub(free_ns), longest_ns, end_ns - begin_ns)
    };
    chains.into_iter().map(repeated).collect()
}

#[cfg(test)]
mod target_tests;
#[cfg(test)]
mod tests {
    use policy::throttle::{LimitKind, Limits, RateLimit};

    use super::*;
    use crate::client::{ClientSpec, ClosedLoopClient};

    const MS: u64 = 1_000_000;
    const SECOND: u64 = 1000 * MS;

    fn iops(rate: u64) -> DiskSettings {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::IopsTotal).rate = rate;
        DiskSettings { limits, ..DiskSettings::default() }
    }

    fn bytes(rate: u64) -> DiskSettings {
        let mut limits = Limits::default();
        limits.limit_mut(LimitKind::BpsTotal).rate = rate;
        DiskSettings { limits, ..DiskSettings::default() }
    }

    /// Recording of disks with these limits and devices under clients with fixed depths, from
    /// second 10 to 25.
    fn record(
        groups: &[PreviewGroup],
        disks: &[(DiskSettings, Option<usize>)],
        clients: &[(usize, u32, u64)],
    ) -> Vec<Vec<CompletedRequest>> {
        let mut world = WorldSpec {
            groups: groups
                .iter()
                .map(|group| DiskGroupSpec {
                    name: group.name.clone(),
                    settings: group.settings,
                    parent: group.parent,
                })
                .collect(),
            ..WorldSpec::default()
        };
        for (settings, group) in disks {
            let recorded_disk = PreviewDisk {
                name: String::new(),
                settings: *settings,
                group: *group,
                device: None,
                recording: Vec::new(),
            };
            let service = crate::device::ServiceTimeSpec::fixed(MS / 5);
            let station =
                world.add_station(StationSpec { read: service, write: service, ..Default::default() });
            world.disks.push(DiskSpec {
                place: DevicePlacement { station: Some(station), budget: None },
                ..disk(&recorded_disk, DevicePlacement::default())
            });
        }
        let mut engine = SimulationEngine::new(&world, true).unwrap();
        for &(disk, depth, length) in clients {
            engine.add_client(ClosedLoopClient::new(ClientSpec {
                disk,
                op: RequestOp::Read,
                length,
                region: 0..1 << 30,
                random: Some(disk as u64),
                depth,
                think_ns: 20_000,
                count: None,
                time: 0..25 * SECOND,
            }));
        }
        while engine.run(STEPS) {}
        let mut all = vec![Vec::new(); disks.len()];
        for row in engine.take_rows() {
            let request = row.request;
            if request.at_ns >= 10 * SECOND {
                all[request.disk].push(CompletedRequest {
                    arrived_ns: request.at_ns,
                    wait_ns: row.admitted_ns - request.at_ns,
                    service_ns: row.completed_ns - row.admitted_ns,
                    length: request.length,
                    op: request.op,
                });
            }
        }
        all
    }

    fn replayed(groups: &[PreviewGroup], disks: Vec<PreviewDisk>) -> Vec<PreviewResult> {
        replay(groups, &disks, &AtomicBool::new(false)).unwrap().unwrap().disks
    }

    fn alone(settings: DiskSettings, past: Vec<CompletedRequest>) -> PreviewResult {
        let recorded_disk =
            PreviewDisk { name: "a".into(), settings, group: None, device: None, recording: past };
        replayed(&[], vec![recorded_disk]).remove(0)
    }

    /// Fails unless rate, latencies and waits agree within a tenth.
    fn assert_near(predicted: &PreviewResult, measured: &PreviewResult, context: &str) {
        let figures = |result: &PreviewResult| {
            [
                result.operations_per_second(),
                result.bytes_per_second(),
                result.latency_ns(0.5) as f64,
                result.latency_ns(0.99) as f64,
                result.wait_ns(0.5) as f64,
            ]
        };
        for (predicted_figure, measured_figure) in figures(predicted).into_iter().zip(figures(measured)) {
            let is_near = (predicted_figure / measured_figure.max(1.0) - 1.0).abs() < 0.1
                || (predicted_figure < 2e4 && measured_figure < 2e4);
            assert!(is_near, "{context}: {predicted_figure} was predicted, {measured_figure} was measured");
        }
    }

    #[test]
    fn preview_of_steady_load_is_within_10_percent() {
        let settings = [
            ("2000", iops(2000)),
            ("500", iops(500)),
            ("8000", iops(8000)),
            ("none", DiskSettings::default()),
            ("10 MiB/s", bytes(10 << 20)),
        ];
        for depth in [1, 32] {
            let all: Vec<_> = settings
                .iter()
                .map(|(name, settings)| {
                    (name, *settings, record(&[], &[(*settings, None)], &[(0, depth, 4096)]).remove(0))
                })
                .collect();
            for (before, _, recording) in &all {
                for (after, settings, measured) in &all {
                    let predicted = alone(*settings, recording.clone());
                    let context = format!("depth {depth}, from {before} to {after}");
                    assert_near(&predicted, &PreviewResult::of_recorded(measured), &context);
                }
            }
        }
    }

    #[test]
    fn used_burst_is_not_available_again() {
        let mut long = iops(1000);
        *long.limits.limit_mut(LimitKind::IopsTotal) =
            RateLimit { rate: 1000, burst_rate: 5000, burst_length_s: 2, ..RateLimit::NONE };
        let recording = record(&[], &[(iops(1000), None)], &[(0, 32, 4096)]).remove(0);
        let result = alone(long, recording);
        assert!(
            (result.operations_per_second() / 1000.0 - 1.0).abs() < 0.05,
            "{}",
            result.operations_per_second()
        );
    }

    #[test]
    fn group_members_affect_each_other() {
        let of = |rate| [PreviewGroup { name: "g".into(), settings: iops(rate), parent: None }];
        let disks = [(DiskSettings::default(), Some(0)), (DiskSettings::default(), Some(0))];
        let clients = [(0, 1, 4096), (1, 64, 4096)];
        let recordings = record(&of(3000), &disks, &clients);
        let measured = record(&of(1000), &disks, &clients);
        let recorded_disks = recordings.into_iter().map(|recording| PreviewDisk {
            name: String::new(),
            settings: DiskSettings::default(),
            group: Some(0),
            device: None,
            recording,
        });
        let predicted = replayed(&of(1000), recorded_disks.collect());
        for (disk, (predicted, measured_disk)) in predicted.iter().zip(&measured).enumerate() {
            assert_near(predicted, &PreviewResult::of_recorded(measured_disk), &format!("disk {disk}"));
        }
    }

    #[test]
    fn sparse_client_keeps_its_rate() {
        // A request every 10 ms, which takes 1 ms.
        let recording: Vec<_> = (0..1000)
            .map(|number| CompletedRequest {
                arrived_ns: number * 10 * MS,
                wait_ns: 0,
                service_ns: MS,
                length: 4096,
                op: RequestOp::Write,
            })
            .collect();
        let result = alone(DiskSettings::default(), recording.clone());
        assert!(result.requests().abs_diff(1000) <= 1, "{}", result.requests());
        assert!((result.operations_per_second() / 100.0 - 1.0).abs() < 0.01);
        assert!((result.latency_ns(0.99) as f64 / 1e6 - 1.0).abs() < 0.02);
        assert_eq!(result.waiting_ratio(), 0.0);
        assert!(alone(iops(50), recording).waiting_ratio() > 0.9);
    }

    #[test]
    fn instant_completions_keep_the_recorded_rate() {
        // Batches of 32 for which the recorder sees no service time: a single chain without
        // pauses.
        let batches = |between_ns: u64, wait_ns: u64| {
            let recording = (0..3200).map(|number| CompletedRequest {
                arrived_ns: number / 32 * between_ns,
                wait_ns,
                service_ns: 0,
                length: 4096,
                op: RequestOp::Read,
            });
            recording.collect::<Vec<_>>()
        };
        let result = alone(DiskSettings::default(), batches(92_000, 0));
        let recorded = 32.0 / 92e-6;
        let ratio = result.operations_per_second() / recorded;
        assert!((0.9..1.1).contains(&ratio), "{ratio}");
        // Unthrottled speed is unknown for clients that a limit throttled.
        let result = alone(DiskSettings::default(), batches(32 * MS, 32 * MS));
        let clients = 32.0;
        assert!(result.operations_per_second() <= clients * 1.3e5, "{}", result.operations_per_second());
    }

    #[test]
    fn no_requests_no_result() {
        let result = alone(iops(10), Vec::new());
        assert_eq!((result.requests(), result.operations_per_second(), result.latency_ns(0.5)), (0, 0.0, 0));
        let stopped = replay(&[], &[], &AtomicBool::new(true)).unwrap();
        assert!(stopped.is_none());
    }
}
