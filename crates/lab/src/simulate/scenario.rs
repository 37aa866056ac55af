//! Scenarios from the documentation of QEMU and io-throttle: a burst, groups, queues of different
//! depth, and the two streams of 2009. Each has its own limits and clients, and its table compares
//! the result with the original's.

use console::table::columns;
use policy::throttle::{LimitKind, Limits, RateLimit};
use simulator::{
    client::ClientSpec,
    engine::{ResultRow, WorldError},
    request::RequestOp,
    world::{DiskGroupSpec, DiskSettings, WorldSpec},
};

use super::{
    scenario_table::{ScenarioTable, disk, one_limit, run},
    two_streams,
    workload::Scenario,
};

pub(crate) fn simulate(scenario: &Scenario) -> Result<ScenarioTable, WorldError> {
    match scenario {
        Scenario::TwoStreams { cache_bytes } => two_streams::simulate_all(*cache_bytes),
        Scenario::Burst => burst(),
        Scenario::Group => group(),
        Scenario::Depths => depths(),
    }
}

fn reader(disk: usize, length: u64, depth: u32, seconds: u64) -> ClientSpec {
    ClientSpec {
        disk,
        op: RequestOp::Read,
        length,
        region: 0..1 << 30,
        random: Some(disk as u64),
        depth,
        think_ns: 0,
        count: None,
        time: 0..seconds * SECOND,
    }
}

const SECOND: u64 = 1_000_000_000;

fn rate(rows: &[ResultRow], disk: usize, seconds: std::ops::Range<u64>) -> f64 {
    let time = seconds.start * SECOND..seconds.end * SECOND;
    let passed =
        rows.iter().filter(|row| row.request.disk == disk && time.contains(&row.admitted_ns)).count();
    passed as f64 / (seconds.end - seconds.start) as f64
}

fn rounded(value: f64) -> String {
    if value.fract() == 0.0 { format!("{value:.0}") } else { format!("{value:.1}") }
}

fn compared_cells(
    name: &str,
    simulated: f64,
    published_rate: f64,
    measures: &mut Vec<(String, f64)>,
) -> [String; 2] {
    measures.push((name.to_owned(), simulated));
    [rounded(simulated), rounded(published_rate)]
}

/// "Perform I/O on hd0.qcow2 at a rate of 2000 IOPS for 1 minute before it's throttled down to 100
/// IOPS"; 8 KiB count as two operations, 6 KiB as one and a half.
fn burst() -> Result<ScenarioTable, WorldError> {
    let mut limits = Limits::default();
    *limits.limit_mut(LimitKind::IopsTotal) =
        RateLimit { rate: 100, burst_rate: 2000, burst_length_s: 60, ..RateLimit::NONE };
    limits.iops_size = 4096;
    let sizes = [4096, 6144, 8192];
    let disks = sizes.map(|size| disk(&format!("of {} KiB", size / 1024), limits, None));
    let world = WorldSpec { disks: disks.into(), ..WorldSpec::default() };
    // 80 seconds cover the burst of one minute and the rate after it.
    let clients: Vec<_> = sizes.iter().enumerate().map(|(disk, size)| reader(disk, *size, 64, 80)).collect();
    let rows = run(&world, &clients)?;
    let mut measures = Vec::new();
    let row = |(index, size): (usize, &u64)| {
        // Larger requests count as several operations, and both rates are in operations.
        let counts = *size as f64 / 4096.0;
        let mut row = vec![settings::exact_size(*size), rounded(counts)];
        row.extend(compared_cells(
            &format!("burst of {size}"),
            rate(&rows, index, 0..60),
            2000.0 / counts,
            &mut measures,
        ));
        row.extend(compared_cells(
            &format!("after of {size}"),
            rate(&rows, index, 70..80),
            100.0 / counts,
            &mut measures,
        ));
        row
    };
    Ok(ScenarioTable {
        title: "iops-total=100,iops-total-max=2000,iops-total-max-length=60,iops-size=4096: \
                requests a second",
        columns: columns(&["REQUEST"], &["COUNTS AS", "FIRST MINUTE", "SAID", "FROM 70 S ON", "SAID"]),
        rows: sizes.iter().enumerate().map(row).collect(),
        note: "Three disks with these limits, each with a client that always has 64 requests \
               waiting. The bucket holds 2000 × 60 operations and meanwhile runs out at 100 a \
               second, so the burst ends after 63 seconds."
            .to_owned(),
        measures,
    })
}

/// "Hd1, hd2 and hd4 are all members of a group named 'foo'; hd3 and hd5 are members of 'bar', hd6
/// is left alone."
fn group() -> Result<ScenarioTable, WorldError> {
    let group = |name: &str, rate| DiskGroupSpec {
        name: name.to_owned(),
        settings: DiskSettings { limits: one_limit(LimitKind::IopsTotal, rate), ..DiskSettings::default() },
        parent: None,
    };
    let group_of_disk = [Some(0), Some(0), Some(1), Some(0), Some(1), None];
    let alone = one_limit(LimitKind::IopsTotal, 5000);
    let disk = |(index, group): (usize, &Option<usize>)| {
        let limits = if group.is_none() { alone } else { Limits::default() };
        disk(&format!("hd{}", index + 1), limits, *group)
    };
    let world = WorldSpec {
        groups: vec![group("foo", 6000), group("bar", 3000)],
        disks: group_of_disk.iter().enumerate().map(disk).collect(),
        ..WorldSpec::default()
    };
    // The first second is not measured: the bucket is full at first.
    let clients: Vec<_> = (0..group_of_disk.len()).map(|disk| reader(disk, 4096, 32, 11)).collect();
    let rows = run(&world, &clients)?;
    let mut measures = Vec::new();
    let row = |(index, group): (usize, &Option<usize>)| {
        let (name, limit, share) = match group {
            Some(0) => ("foo", 6000, 2000.0),
            Some(_) => ("bar", 3000, 1500.0),
            None => ("-", 5000, 5000.0),
        };
        let disk = format!("hd{}", index + 1);
        let mut row = vec![disk.clone(), name.to_owned(), limit.to_string()];
        row.extend(compared_cells(&disk, rate(&rows, index, 1..11), share, &mut measures));
        row
    };
    Ok(ScenarioTable {
        title: "Disks that share limits: requests a second",
        columns: columns(&["DISK", "GROUP"], &["IOPS-TOTAL", "SIMULATED", "AN EQUAL SHARE"]),
        rows: group_of_disk.iter().enumerate().map(row).collect(),
        note: "Each disk has a client that always has 32 requests waiting; from the second second on."
            .to_owned(),
        measures,
    })
}

/// Two clients of one limit with 1 and 64 requests in flight; QEMU favours the latter.
fn depths() -> Result<ScenarioTable, WorldError> {
    /// Rates measured with qemu-storage-daemon 7.2.
    const QEMU: [f64; 2] = [738.0, 1290.0];
    let hold = DiskSettings { limits: one_limit(LimitKind::IopsTotal, 2000), ..DiskSettings::default() };
    let world = WorldSpec {
        groups: vec![DiskGroupSpec { name: "group".to_owned(), settings: hold, parent: None }],
        disks: vec![
            disk("depth 1", Limits::default(), Some(0)),
            disk("depth 64", Limits::default(), Some(0)),
        ],
        ..WorldSpec::default()
    };
    let clients = [reader(0, 4096, 1, 11), reader(1, 4096, 64, 11)];
    let rows = run(&world, &clients)?;
    let mut measures = Vec::new();
    let row = |disk: usize| {
        let name = &world.disks[disk].name;
        let mut row = vec![name.clone()];
        row.extend(compared_cells(name, rate(&rows, disk, 1..11), QEMU[disk], &mut measures));
        row
    };
    Ok(ScenarioTable {
        title: "Two clients of a group with iops-total=2000: requests a second",
        columns: columns(&["CLIENT"], &["SIMULATED", "QEMU 7.2"]),
        rows: (0..2).map(row).collect(),
        note:
            "A short queue is at no disadvantage: siblings share the time of the scarcest limit, not turns."
                .to_owned(),
        measures,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measures(scenario: &Scenario) -> Vec<(String, f64)> {
        simulate(scenario).unwrap().measures
    }

    #[test]
    fn burst_scenario_matches_its_description() {
        let expected = [2000.0, 100.0, 2000.0 / 1.5, 100.0 / 1.5, 1000.0, 50.0];
        for ((name, simulated), expected) in measures(&Scenario::Burst).iter().zip(expected) {
            assert!((simulated / expected - 1.0).abs() < 0.02, "{name}: {simulated} instead of {expected}");
        }
    }

    #[test]
    fn only_disks_of_a_group_share_its_limit() {
        let expected = [2000.0, 2000.0, 1500.0, 2000.0, 1500.0, 5000.0];
        for ((name, simulated), expected) in measures(&Scenario::Group).iter().zip(expected) {
            assert!((simulated / expected - 1.0).abs() < 0.01, "{name}: {simulated} instead of {expected}");
        }
    }

    #[test]
    fn short_queue_gets_its_share() {
        for (name, simulated) in measures(&Scenario::Depths) {
            assert!((simulated / 1000.0 - 1.0).abs() < 0.05, "{name}: {simulated}");
        }
    }
}
