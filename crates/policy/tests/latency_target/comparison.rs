//! The table of decision 72: settling time, percentile and throughput of several laws.

use crate::device::S;
use crate::laws::{AimdLaw, LogarithmicLaw, QueueDepthLaw, WindowLaw};
use crate::scenario::{Change, JUDGED_NS, Law, LoadScenario, Run, WeirLaw};
use crate::seeds::for_each;

const SEEDS: u64 = 20;

type Loads = [(&'static str, fn(u64) -> LoadScenario); 4];
type Laws = [(&'static str, fn() -> Box<dyn Law>); 8];

const LOADS: Loads = [
    ("on, doubled", |_| LoadScenario::required(&[Change::Depth(64), Change::Depth(128)])),
    ("on, half the speed", |_| LoadScenario::required(&[Change::Depth(64), Change::Speed(0.5)])),
    ("on, twice the speed", |_| LoadScenario::required(&[Change::Depth(64), Change::Speed(2.0)])),
    ("random", LoadScenario::random),
];

const LAWS: Laws = [
    ("two loops", || Box::new(WeirLaw::equal())),
    ("queue depth, a tenth late", || Box::new(QueueDepthLaw::new(0.1))),
    ("queue depth, 1 % late", || Box::new(QueueDepthLaw::new(0.01))),
    ("window, L = 2.5 ms", || Box::new(WindowLaw::new(2.5e6))),
    ("window, L = 3.5 ms", || Box::new(WindowLaw::new(3.5e6))),
    ("AIMD, + 1 %, − 10 %", || Box::new(AimdLaw::new(0.01, 0.1))),
    ("AIMD, + 2 %, − 30 %", || Box::new(AimdLaw::new(0.02, 0.3))),
    ("logarithmic PI, 2 ms", || Box::new(LogarithmicLaw::new(2.0e6, 0.1, 0.5))),
];

#[test]
#[ignore = "prints a table, and judges nothing"]
#[expect(clippy::print_stdout, reason = "the table is the result")]
fn laws_compared() {
    println!(
        "| Load | Law | Settled, median and worst | p99 of 10 s, median and worst | Missed | Share, median and least |"
    );
    println!("| --- | --- | --- | --- | --- | --- |");
    for (load, scenario) in LOADS {
        let mut oracles = Vec::new();
        for_each("--test latency_target", SEEDS, |seed| {
            oracles.push((seed, [0, 1].map(|segment| scenario(seed).oracle(seed, segment))));
        });
        for (name, law) in LAWS {
            let runs: Vec<(Run, [f64; 2])> = oracles
                .iter()
                .map(|(seed, oracle)| (scenario(*seed).run(*seed, law().as_mut()), *oracle))
                .collect();
            println!("| {load} | {name} | {} |", row(&runs));
        }
    }
}

fn row(runs: &[(Run, [f64; 2])]) -> String {
    let segments = || runs.iter().flat_map(|(run, oracle)| run.segments.iter().zip(oracle));
    let settled_s = sorted(segments().map(|(segment, _)| segment.settled_ns as f64 / S as f64));
    let worst_ms = sorted(segments().map(|(segment, _)| segment.worst_ns as f64 * 1000.0 / S as f64));
    let share = sorted(segments().map(|(segment, oracle)| segment.others_iops / oracle));
    let missed = segments().filter(|(segment, _)| segment.worst_ns > JUDGED_NS).count();
    let (middle, last) = (settled_s.len() / 2, settled_s.len() - 1);
    format!(
        "{:.1} s, {:.1} s | {:.1} ms, {:.1} ms | {missed} of {} | {:.0} %, {:.0} %",
        settled_s[middle],
        settled_s[last],
        worst_ms[middle],
        worst_ms[last],
        settled_s.len(),
        share[middle] * 100.0,
        share[0] * 100.0
    )
}

fn sorted(values: impl Iterator<Item = f64>) -> Vec<f64> {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    values
}
