use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    checker::{GuaranteeChecker, GuaranteeFinding, GuaranteeVerdict, TimedReport},
    *,
};
use crate::client::latency;

/// A disk with these counters; `more` has settings and members of `throttle`.
fn disk(name: &str, requests: u64, bytes: u64, more: &Value) -> Value {
    let passed = json!({ "requests": requests, "bytes": bytes });
    let mut disk = json!({ "name": name, "weight": 100, "throttle": { "reads": passed } });
    for (key, value) in more.as_object().unwrap() {
        match key.as_str() {
            "waiting" | "limited-ns" | "throttle-cause" | "recent-wait-ns" => {
                disk["throttle"][key] = value.clone();
            }
            _ => disk[key] = value.clone(),
        }
    }
    disk
}

fn report_at(second: f64, disks: &[Value], groups: &[Value]) -> TimedReport {
    let uptime_ns = 1_000_000_000 + (second * 1e9) as u64;
    let report = json!({ "uptime-ns": uptime_ns, "disks": disks, "groups": groups });
    TimedReport {
        report: DaemonReport::read(&report.to_string()).unwrap(),
        requested_s: second,
        received_s: second,
    }
}

fn findings_of(
    reports: impl IntoIterator<Item = TimedReport>,
    wait_p99_ns: Option<u64>,
) -> Vec<GuaranteeFinding> {
    let mut checker = GuaranteeChecker::new(wait_p99_ns);
    reports.into_iter().for_each(|report| checker.add_report(report));
    checker.findings(|_| true)
}

fn verdicts(findings: &[GuaranteeFinding]) -> Vec<(&str, &str, GuaranteeVerdict)> {
    findings.iter().map(|finding| (&*finding.name, &*finding.guarantee, finding.verdict.clone())).collect()
}

/// Findings for a disk with a limit of 100 IOPS and these totals of admitted requests.
fn of_100(passed: &[u64]) -> Vec<GuaranteeFinding> {
    let limits = json!({ "limits": { "iops-total": 100 } });
    let reports = passed.iter().zip(0_u32..).map(|(&requests, second)| {
        report_at(second.into(), &[disk("vm1", requests, requests << 20, &limits)], &[])
    });
    findings_of(reports.collect::<Vec<_>>(), None)
}

#[test]
fn limit_admits_its_rate_and_one_burst_between_reports() {
    let held = GuaranteeVerdict::Held;
    assert_eq!(verdicts(&of_100(&[7, 117, 217, 317])), [("vm1", "iops-total", held.clone())]);
    // A burst of ten, and one more I/O of any size.
    assert_eq!(verdicts(&of_100(&[0, 111])), [("vm1", "iops-total", held)]);
    assert_eq!(verdicts(&of_100(&[0, 112])), [("vm1", "iops-total", GuaranteeVerdict::Broken)]);
    // Idle time before or after does not excuse an excess.
    assert_eq!(verdicts(&of_100(&[0, 0, 0, 130])), [("vm1", "iops-total", GuaranteeVerdict::Broken)]);
    assert_eq!(verdicts(&of_100(&[0, 130, 130, 130])), [("vm1", "iops-total", GuaranteeVerdict::Broken)]);
    assert_eq!(verdicts(&of_100(&[5, 5, 5])), [("vm1", "iops-total", GuaranteeVerdict::NoLoad)]);
}

#[test]
fn unclear_cases_are_not_checked() {
    let verdict_of = |more: [Value; 2], seconds: [f64; 2]| {
        let reports = more.iter().zip(seconds).zip([0, 1_000_000]);
        let reports = reports
            .map(|((more, second), requests)| report_at(second, &[disk("vm1", requests, 0, more)], &[]));
        findings_of(reports.collect::<Vec<_>>(), None).remove(0).verdict
    };
    let limits = |rate: u64| json!({ "limits": { "iops-total": rate } });
    assert_eq!(verdict_of([limits(100), limits(100)], [0.0, 1.0]), GuaranteeVerdict::Broken);
    let is_unclear = |verdict, why: &str| match verdict {
        GuaranteeVerdict::NotChecked(reason) => assert!(reason.contains(why), "{reason}"),
        other => panic!("{other:?}"),
    };
    is_unclear(verdict_of([limits(100), limits(200)], [0.0, 1.0]), "changed");
    is_unclear(verdict_of([limits(100), limits(100)], [1.0, 0.5]), "restarted");
    let by_size = json!({ "limits": { "iops-total": 100, "iops-size": 4096 } });
    is_unclear(verdict_of([by_size.clone(), by_size], [0.0, 1.0]), "iops-size");
    let mut lifted = limits(100);
    lifted["enforcement"] = json!("lifted");
    is_unclear(verdict_of([limits(100), lifted], [0.0, 1.0]), "watermark");
}

#[test]
fn reservation_counts_while_requests_wait() {
    let verdict_of = |rate: u64, waiting: u64| {
        let more = json!({ "iops-reservation": 500, "waiting": { "reads": waiting } });
        let reports =
            (0..6).map(|second| report_at(second as f64, &[disk("vm1", second * rate, 0, &more)], &[]));
        findings_of(reports.collect::<Vec<_>>(), None).remove(0).verdict
    };
    assert_eq!(verdict_of(500, 3), GuaranteeVerdict::Held);
    assert_eq!(verdict_of(400, 3), GuaranteeVerdict::Broken);
    assert_eq!(verdict_of(400, 0), GuaranteeVerdict::NoLoad);
}

#[test]
fn shares_compare_disks_that_wait_together() {
    let with_reservation = |reserved: u64, rates: [u64; 2], waiting: u64| {
        let reports = (0..6_u64).map(|second| {
            let disk = |name, weight: u64, rate: u64| {
                let mut more = json!({ "group": "gold", "weight": weight, "waiting": { "writes": waiting } });
                more["iops-reservation"] = json!(if name == "a" { reserved } else { 0 });
                disk(name, second * rate, 0, &more)
            };
            let all = second * rates.iter().sum::<u64>();
            let limited = json!({
                "limits": { "iops-total": 1000 }, "throttle-cause": "iops-total", "limited-ns": second * 1_000_000_000,
            });
            let group = self::disk("gold", all, 0, &limited);
            report_at(second as f64, &[disk("a", 300, rates[0]), disk("b", 100, rates[1])], &[group])
        });
        findings_of(reports.collect::<Vec<_>>(), None)
    };
    let without_reservation = |rates, waiting| with_reservation(0, rates, waiting);
    let shares = |findings: &[GuaranteeFinding]| {
        let shares = findings.iter().filter(|finding| finding.guarantee == "share");
        shares.map(|finding| (finding.name.clone(), finding.verdict.clone())).collect::<Vec<_>>()
    };
    let both = |a, b| vec![("a".to_owned(), a), ("b".to_owned(), b)];
    assert_eq!(
        shares(&without_reservation([750, 250], 4)),
        both(GuaranteeVerdict::Held, GuaranteeVerdict::Held)
    );
    assert_eq!(
        shares(&without_reservation([500, 500], 4)),
        both(GuaranteeVerdict::Broken, GuaranteeVerdict::Held)
    );
    assert_eq!(shares(&without_reservation([500, 500], 0)), []);
    // The part of the capacity that weights should have divided is unknown.
    let why =
        GuaranteeVerdict::NotChecked("a disk of its group has a reservation, which comes before weights");
    assert_eq!(shares(&with_reservation(400, [750, 250], 4)), both(why.clone(), why));
}

#[test]
fn longest_wait_of_any_report_counts() {
    let verdict_of = |max_ns| {
        let waits = [1_000_000, 9_000_000, 2_000_000].into_iter().zip(0_u32..).map(|(p99, second)| {
            let more = json!({ "recent-wait-ns": { "p50": 1, "p99": p99, "max": p99 } });
            report_at(second.into(), &[disk("vm1", 0, 0, &more)], &[])
        });
        findings_of(waits.collect::<Vec<_>>(), Some(max_ns)).remove(0).verdict
    };
    assert_eq!(verdict_of(9_000_000), GuaranteeVerdict::Held);
    assert_eq!(verdict_of(8_999_999), GuaranteeVerdict::Broken);
}

#[test]
fn latency_covers_requests_between_two_queries() {
    let counts = |requests: [u64; 3]| {
        let [short, long, endless] = requests;
        let response = json!([{ "name": "db", "latencies": [
            { "above-ns": 5_000_000, "at-most-ns": 10_000_000, "requests": short },
            { "above-ns": 10_000_000, "at-most-ns": 12_000_000, "requests": long },
            { "above-ns": 4_096_000_000_000_u64, "requests": endless },
        ] }]);
        latency::read(response).unwrap()
    };
    let between = |before: [u64; 3], now: [u64; 3]| {
        let mut latencies = LatencyCheck::new(10_000_000);
        latencies.add_histograms(counts(before));
        latencies.add_histograms(counts(now));
        let found = latencies.findings(|_| true).remove(0);
        (found.measured, found.verdict)
    };
    assert_eq!(between([0, 900, 9], [990, 910, 9]), ("7.5ms".to_owned(), GuaranteeVerdict::Held));
    assert_eq!(between([0, 0, 0], [989, 11, 0]), ("11ms".to_owned(), GuaranteeVerdict::Broken));
    assert_eq!(between([0, 0, 0], [0, 0, 1]).1, GuaranteeVerdict::Broken);
    assert_eq!(between([5, 5, 5], [5, 5, 5]).1, GuaranteeVerdict::NoLoad);
    assert!(matches!(between([9, 0, 0], [5, 0, 0]).1, GuaranteeVerdict::NotChecked(_)));
}

#[test]
fn latency_target_is_judged_by_the_last_report() {
    let verdict_of = |control: &Value| {
        let more = json!({ "latency-target": "5ms", "latency-percentile": "99", "latency-control": control });
        let [finding] = &findings_of([report_at(0.0, &[disk("db", 1, 1, &more)], &[])], None)[..] else {
            panic!("one finding");
        };
        (finding.measured.clone(), finding.verdict.clone())
    };
    let met = json!({ "state": "met", "target-ns": 5_000_000 });
    assert_eq!(verdict_of(&met), ("no requests".to_owned(), GuaranteeVerdict::NoLoad));
    let met = json!({ "state": "controlling", "target-ns": 5_000_000, "measured-ns": 4_600_000 });
    assert_eq!(verdict_of(&met), ("4.6ms".to_owned(), GuaranteeVerdict::Held));
    let missed = json!({
        "state": "cannot-be-met", "target-ns": 5_000_000, "measured-ns": 30_000_000, "alone-ns": 7_100_000
    });
    assert_eq!(verdict_of(&missed), ("30ms, 7.1ms alone".to_owned(), GuaranteeVerdict::Broken));
}

#[test]
fn table_has_a_line_for_each_guarantee() {
    let findings = of_100(&[0, 50, 100, 150]);
    assert_eq!(
        text(&findings),
        "NAME  GUARANTEE   EXPECTED         MEASURED        VERDICT\n\
         vm1   iops-total  100/s, burst 10  50/s, excess 0  held\n"
    );
}

proptest! {
    /// The output of a leaky bucket is never a violation, at any sampling; twice as much is one.
    #[test]
    fn bucket_output_is_never_a_violation(
        rate in 20_u64..2000,
        burst in prop::option::of((1_u64..5, 1_u64..4)),
        demands in prop::collection::vec(0_u64..4000, 2..40),
    ) {
        let (burst_rate, length) = burst.map_or((0, 1), |(times, length)| (rate * times, length));
        let size = if burst_rate == 0 { rate as f64 / 10.0 } else { (burst_rate * length) as f64 };
        let (mut level, mut passed) = (0.0_f64, 0);
        let limits = json!({
            "limits": { "iops-total": rate, "iops-total-max": burst_rate, "iops-total-max-length": length },
        });
        let mut reports = [Vec::new(), Vec::new()];
        for (index, requests) in demands.iter().enumerate() {
            let second = index as f64 / 2.0;
            for (times, reports) in (1..).zip(&mut reports) {
                reports.push(report_at(second, &[disk("vm1", passed * times, passed << 20, &limits)], &[]));
            }
            for _ in 0..*requests {
                if level <= size {
                    level += 1.0;
                    passed += 1;
                }
            }
            level = (level - rate as f64 / 2.0).max(0.0);
        }
        let [once, twice] = reports.map(|reports| findings_of(reports, None).remove(0).verdict);
        prop_assert_ne!(&once, &GuaranteeVerdict::Broken);
        // Twice as much is an excess only if the bucket was full for long enough.
        let seconds = (demands.len() - 1) as f64 / 2.0;
        if passed as f64 > 0.75 * (rate as f64 * seconds + 2.0 * size) + 4.0 {
            prop_assert_eq!(twice, GuaranteeVerdict::Broken);
        }
    }
}
