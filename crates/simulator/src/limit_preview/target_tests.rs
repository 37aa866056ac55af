//! Previews of latency targets against simulations of the same clients on the same device.

use policy::latency_target::{LatencySettings, PercentileTarget, TargetDirections};

use super::*;
use crate::{
    client::{ClientSpec, ClosedLoopClient},
    device::ServiceTimeSpec,
};

const MS: u64 = 1_000_000;
const SECOND: u64 = 1000 * MS;

fn target(bound_ns: u64) -> DiskSettings {
    let target = PercentileTarget::new(bound_ns, 9900, TargetDirections::All);
    DiskSettings {
        latency: LatencySettings { target, ..LatencySettings::default() },
        ..DiskSettings::default()
    }
}

/// Requests of `db` at depth 1 and of two disks at depth 32, from second 4 to 20, on a device that
/// serves three requests at a time.
fn recorded(db: DiskSettings) -> Vec<Vec<CompletedRequest>> {
    let mut world = WorldSpec::default();
    // Times differ by the length, or the three servers would work in lockstep.
    let service = ServiceTimeSpec { base_ns: MS / 2, byte_ns: 50.0 };
    let station = world.add_station(StationSpec {
        read: service,
        write: service,
        parallel: Some(3),
        ..Default::default()
    });
    let place = DevicePlacement { station: Some(station), budget: None };
    for settings in [db, DiskSettings::default(), DiskSettings::default()] {
        let known =
            PreviewDisk { name: String::new(), settings, group: None, device: None, recording: Vec::new() };
        world.disks.push(disk(&known, place));
    }
    let mut engine = SimulationEngine::new(&world, true).unwrap();
    for (disk, depth, length) in [(0, 1, 4096), (1, 32, 8192), (2, 32, 16_384)] {
        engine.add_client(ClosedLoopClient::new(ClientSpec {
            disk,
            op: RequestOp::Read,
            length,
            region: 0..1 << 30,
            random: Some(disk as u64),
            depth,
            think_ns: 50_000,
            count: None,
            time: 0..20 * SECOND,
        }));
    }
    while engine.run(STEPS) {}
    let mut all = vec![Vec::new(); 3];
    for row in engine.take_rows().filter(|row| row.request.at_ns >= 4 * SECOND) {
        all[row.request.disk].push(CompletedRequest {
            arrived_ns: row.request.at_ns,
            wait_ns: row.admitted_ns - row.request.at_ns,
            service_ns: row.completed_ns - row.admitted_ns,
            length: row.request.length,
            op: row.request.op,
        });
    }
    all
}

/// The preview of these settings of `db`, from a recording.
fn previewed(
    db: DiskSettings,
    recording: &[Vec<CompletedRequest>],
    device: Option<usize>,
) -> Vec<PreviewResult> {
    let settings = [db, DiskSettings::default(), DiskSettings::default()];
    let disks: Vec<_> = settings
        .into_iter()
        .zip(recording)
        .map(|(settings, recording)| PreviewDisk {
            name: String::new(),
            settings,
            group: None,
            device,
            recording: recording.clone(),
        })
        .collect();
    replayed(&disks).disks
}

fn replayed(disks: &[PreviewDisk]) -> ReplayResult {
    replay(&[], disks, &AtomicBool::new(false)).unwrap().unwrap()
}

fn assert_near(predicted: &[PreviewResult], recording: &[Vec<CompletedRequest>], context: &str) {
    for (disk, (predicted, recording)) in predicted.iter().zip(recording).enumerate() {
        let measured = PreviewResult::of_recorded(recording);
        for (name, figure) in [
            ("iops", PreviewResult::operations_per_second as fn(&PreviewResult) -> f64),
            ("p50", |result| result.latency_ns(0.5) as f64),
            ("p99", |result| result.latency_ns(0.99) as f64),
        ] {
            let ratio = figure(predicted) / figure(&measured);
            // Tails of throttled disks depend on each step of the controller.
            if disk > 0 && name == "p99" {
                continue;
            }
            assert!((0.85..1.15).contains(&ratio), "{context}: {name} of disk {disk}: {ratio}");
        }
    }
}

#[test]
fn preview_of_a_target_runs_the_controller() {
    let (without, with) = (recorded(DiskSettings::default()), recorded(target(5 * MS)));
    let p99 = |results: &[PreviewResult]| results[0].latency_ns(0.99);
    assert!(PreviewResult::of_recorded(&without[0]).latency_ns(0.99) > 15 * MS, "it is slow");
    let predicted = previewed(target(5 * MS), &without, Some(0));
    assert!(p99(&predicted) <= 5 * MS * 11 / 10, "{}", p99(&predicted));
    assert_near(&predicted, &with, "a new target");
    // The other way round: the disks were recorded while they were throttled.
    assert_near(&previewed(DiskSettings::default(), &with, Some(0)), &without, "no target");
    // No change.
    assert_near(&previewed(target(5 * MS), &with, Some(0)), &with, "the same target");
}

#[test]
fn round_of_a_limit_that_admits_hardly_anything_is_bounded() {
    let mut limits = policy::throttle::Limits::default();
    // A request of 4 KiB takes 20 minutes, and all of them more than a year.
    limits.limit_mut(policy::throttle::LimitKind::BpsTotal).rate = 3;
    let slow = DiskSettings { limits, ..target(5 * MS) };
    let request = |number| CompletedRequest {
        arrived_ns: number * MS,
        wait_ns: 0,
        service_ns: MS / 2,
        length: 4096,
        op: RequestOp::Read,
    };
    let disk = |settings| PreviewDisk {
        name: String::new(),
        settings,
        group: None,
        device: Some(0),
        recording: (0..30_000).map(request).collect(),
    };
    let bounded = replayed(&[disk(slow)]);
    assert_eq!(bounded.simulated_ns, MAX_ROUND_NS);
    assert!(bounded.disks[0].requests() <= 2, "{}", bounded.disks[0].requests());
    let usual = replayed(&[disk(target(5 * MS))]);
    assert!(usual.simulated_ns.abs_diff(30 * SECOND) < SECOND, "{}", usual.simulated_ns);
}

#[test]
fn target_on_an_unknown_device_has_no_effect() {
    let without = recorded(DiskSettings::default());
    assert_near(&previewed(target(5 * MS), &without, None), &without, "no device");
}
