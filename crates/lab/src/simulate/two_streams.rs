//! The two streams of io-throttle v16 for Linux (2009), in their eight cases, compared with the
//! original figures.
//!
//! Two `dd if=/dev/zero bs=1M count=256` each write a file on one disk of some 22 MB/s: without
//! limits, with 4 and 2 MB/s, and with these above a watermark of 90 or 100 percent. With
//! `oflag=direct`, a stream has one write in flight, else up to `cache` dirty bytes; the figures of
//! 2009 imply some 30 to 100 MiB.

use console::table::ColumnAlignment;
use policy::{device_model::DeviceRates, throttle::LimitKind, watermark::Watermark};
use simulator::{
    client::ClientSpec,
    device::DevicePlacement,
    engine::WorldError,
    request::RequestOp,
    world::{DiskSettings, DiskSpec, WorldSpec},
};

use super::scenario_table::{ScenarioTable, disk, one_limit, run};

const MIB: u64 = 1 << 20;
const COUNT: u64 = 256;
const DEVICE_BPS: u64 = 22 * MIB;

struct StreamsCase {
    /// True for limits of 4 and 2 MiB per second.
    limited: bool,
    watermark: u8,
    direct: bool,
    /// `dd`'s figures of 2009, in MB/s.
    then: [f64; 2],
}

const fn case(limited: bool, watermark: u8, direct: bool, then: [f64; 2]) -> StreamsCase {
    StreamsCase { limited, watermark, direct, then }
}

const CASES: [StreamsCase; 8] = [
    case(false, 0, false, [19.7, 21.1]),
    case(false, 0, true, [12.0, 11.7]),
    case(true, 0, false, [6.3, 2.4]),
    case(true, 0, true, [4.2, 2.1]),
    case(true, 90, false, [32.0, 21.4]),
    case(true, 90, true, [14.0, 11.0]),
    case(true, 100, false, [28.2, 23.4]),
    case(true, 100, true, [14.3, 11.7]),
];

struct StreamRates {
    /// The rates that each `dd` would report, in MB/s.
    streams: [f64; 2],
    together: [f64; 2],
}

/// Simulates all cases. `cache_bytes` bounds the dirty bytes of each stream.
pub(super) fn simulate_all(cache_bytes: u64) -> Result<ScenarioTable, WorldError> {
    let mut rows = Vec::new();
    let mut measures = Vec::new();
    for (number, case) in (1..).zip(&CASES) {
        let StreamRates { streams, together } = simulate(case, cache_bytes)?;
        let [one, other] = streams.map(|rate| format!("{rate:.1}"));
        let [then_one, then_other] = case.then.map(|rate| format!("{rate:.1}"));
        rows.push(vec![
            number.to_string(),
            match (case.limited, case.watermark) {
                (false, _) => "none".to_owned(),
                (true, 0) => "4 and 2 MB/s".to_owned(),
                (true, percent) => format!("4 and 2 MB/s from {percent} % on"),
            },
            if case.direct { "direct" } else { "writeback" }.to_owned(),
            one,
            then_one,
            other,
            then_other,
            format!("{:.1} + {:.1}", together[0], together[1]),
        ]);
        for (stream, rate) in (1..).zip(streams) {
            measures.push((format!("case {number}, stream {stream}"), rate));
        }
    }
    let note = format!(
        "MB/s as dd says it, of 10⁶ bytes; limits and the device's 22 MB/s are of 2²⁰. The device \
         is a line of bytes, without seeks; a stream in writeback has at most {} MiB dirty and \
         ends when its last page is (cache=SIZE), which is why its figures may exceed the \
         device's. WHILE BOTH is what each wrote to the device while both did.",
        cache_bytes / MIB
    );
    Ok(ScenarioTable {
        title: "Two streams on one device of 22 MB/s, as io-throttle v16 had them in 2009",
        columns: vec![
            ("CASE", ColumnAlignment::Right),
            ("LIMITS", ColumnAlignment::Left),
            ("I/O", ColumnAlignment::Left),
            ("STREAM 1", ColumnAlignment::Right),
            ("2009", ColumnAlignment::Right),
            ("STREAM 2", ColumnAlignment::Right),
            ("2009", ColumnAlignment::Right),
            ("WHILE BOTH", ColumnAlignment::Right),
        ],
        rows,
        note,
        measures,
    })
}

fn simulate(case: &StreamsCase, cache_bytes: u64) -> Result<StreamRates, WorldError> {
    let place = DevicePlacement { station: None, budget: Some(0) };
    let stream = |name: &str, rate: u64| {
        let limits = one_limit(LimitKind::BpsWrite, if case.limited { rate } else { 0 });
        let watermark = Watermark::new(case.watermark).unwrap_or_default();
        let hold = DiskSettings { limits, watermark, ..DiskSettings::default() };
        DiskSpec { settings: hold, place, sampled_device: Some(place), ..disk(name, limits, None) }
    };
    let world = WorldSpec {
        disks: vec![stream("cgrp1", 4 * MIB), stream("cgrp2", 2 * MIB)],
        budgets: vec![DeviceRates { bytes: Some(DEVICE_BPS), ..DeviceRates::default() }],
        ..WorldSpec::default()
    };
    let depth = if case.direct { 1 } else { (cache_bytes / MIB).clamp(1, COUNT) as u32 };
    let client = |disk| ClientSpec {
        disk,
        op: RequestOp::Write,
        length: MIB,
        region: 0..COUNT * MIB,
        random: None,
        depth,
        think_ns: 0,
        count: Some(COUNT),
        time: 0..u64::MAX,
    };
    let rows = run(&world, &[client(0), client(1)])?;
    let rows_of = |disk: usize| rows.iter().filter(move |row| row.request.disk == disk);
    let end_ns = [0, 1].map(|disk| {
        // Buffered: `dd` ends when its last write enters the cache, before it reaches the device.
        let ends = rows_of(disk).map(|row| if case.direct { row.completed_ns } else { row.request.at_ns });
        ends.max().unwrap_or(0)
    });
    let written = [0, 1].map(|disk| rows_of(disk).map(|row| row.completed_ns).max().unwrap_or(0));
    let both = written[0].min(written[1]);
    let megabytes = |count: u64, ns: u64| (count * MIB) as f64 / 1e6 / (ns.max(1) as f64 / 1e9);
    let until = |disk| rows_of(disk).filter(|row| row.completed_ns <= both).count() as u64;
    Ok(StreamRates {
        streams: end_ns.map(|end| megabytes(COUNT, end)),
        together: [0, 1].map(|disk| megabytes(until(disk), both)),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn figures(case: usize) -> StreamRates {
        simulate(&CASES[case - 1], 64 * MIB).unwrap()
    }

    fn assert_near(simulated: f64, expected: f64) {
        assert!((simulated / expected - 1.0).abs() < 0.05, "{simulated} instead of {expected}");
    }

    #[test]
    fn limits_are_met_as_in_the_2009_measurement() {
        let [one, other] = figures(4).streams;
        assert_near(one, 4.2);
        assert_near(other, 2.1);
    }

    #[test]
    fn without_limits_both_get_half_of_the_device() {
        let [one, other] = figures(2).together;
        assert_near(one, 11.5);
        assert_near(other, 11.5);
    }

    #[test]
    fn above_the_watermark_limits_set_the_shares_of_a_busy_device() {
        for case in [6, 8] {
            let [one, other] = figures(case).together;
            assert!(one + other > 0.9 * 22.0 * 1.048, "case {case}: {one} + {other}");
            assert!((1.6..2.4).contains(&(one / other)), "case {case}: {one} / {other}");
        }
    }

    #[test]
    fn cached_stream_exceeds_the_device_rate() {
        let [one, other] = figures(1).streams;
        assert!(one + other > 23.0, "{one} + {other}");
    }
}
