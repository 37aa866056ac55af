//! Complete simulations of a cluster: their output, and reproducibility by the seed.

use super::*;

static NOT_STOPPED: AtomicBool = AtomicBool::new(false);

fn simulated(text: &str, iops: u64, seed: u64) -> (ClusterSummary, run::ClusterOutcome) {
    let spec: ClusterSpec = text.parse().unwrap();
    let mut limits = Limits::default();
    limits.limit_mut(LimitKind::IopsTotal).rate = iops;
    let limits = ClusterGroupLimits::new(1, limits, spec.hosts as u32, spec.safe_share_ppm).unwrap();
    let outcome = run::run(&spec, limits, seed, &NOT_STOPPED, |_| {});
    (ClusterSummary::new(&spec, &limits, seed, &outcome, Vec::new()), outcome)
}

#[test]
fn quotas_follow_demand_and_repeat_for_a_seed() {
    let text = "hosts=30,disks=2,seconds=40,fallback-share=0.06%";
    let (summary, outcome) = simulated(text, 6000, 3);
    assert_eq!((summary.changes, summary.violation.as_deref()), (4, None));
    assert!(summary.most_in_force > 0.9 && summary.most_in_force <= 1.0, "{}", summary.most_in_force);
    let steady = summary.steady.as_ref().unwrap();
    assert!(steady.unused.unwrap() < 0.1, "{steady:?}");
    assert!(steady.near > 0.9, "{steady:?}");
    let json_of =
        |(summary, _): (ClusterSummary, run::ClusterOutcome)| serde_json::to_string(&summary).unwrap();
    let findings = findings::of(&summary, &outcome);
    assert_eq!(findings.charts.len(), 3);
    assert_eq!(json_of((summary, outcome)), json_of(simulated(text, 6000, 3)));
    assert_ne!(json_of(simulated(text, 6000, 3)), json_of(simulated(text, 6000, 4)));
}

#[test]
fn idle_etcd_load_stays_below_its_bound() {
    let (summary, _) = simulated("hosts=100,disks=1,seconds=30,change=0", 10_000, 1);
    let steady = summary.steady.unwrap();
    assert!(steady.requests_per_100_hosts <= 50.0, "{steady:?}");
    // At least one report per lease, or the lease would expire.
    assert!(steady.reports >= 100.0 / 5.0, "{steady:?}");
    assert!(steady.written_bytes > 100.0 * steady.reports, "{steady:?}");
}

#[test]
fn limit_is_never_exceeded_under_faults() {
    let text = "hosts=20,disks=1,seconds=60,leader-deaths=2,etcd-stops=1,cuts=2,crashes=2,away=7s,drift=400";
    for seed in 1..4 {
        let (summary, _) = simulated(text, 4000, seed);
        assert_eq!(summary.violation, None, "seed {seed}");
        // Faults that end after the end of the simulation are not reported.
        assert!(summary.faults.len() > 6, "seed {seed}: {:?}", summary.faults);
    }
}

#[test]
fn fallback_share_is_in_force_without_etcd() {
    let text = "hosts=10,disks=1,seconds=60,change=0,busy=50,idle=50";
    let (with, _) = simulated(text, 2000, 1);
    let (without, outcome) = simulated(&format!("{text},etcd-stops=9,away=100s"), 2000, 1);
    assert!(with.all.in_force > without.all.in_force + 0.2, "{with:?} {without:?}");
    // 20 % of the limit for all hosts together.
    let in_force = outcome.samples.last().unwrap().in_force;
    assert!((0.19..0.21).contains(&in_force), "{without:?}");
    assert!(without.text().contains("etcd stops"));
}
