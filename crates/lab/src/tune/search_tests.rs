//! The search on simulated machines: with noise, drift and occasional disturbances.

use std::collections::BTreeMap;

use policy::prefetch::PrefetchMode;
use storage::CacheMode;

use super::*;
use crate::tune::configurations::{L2Share, PatternOperation};

struct Machine {
    truth: fn(&DiskConfiguration, &RequestPattern) -> f64,
    random: fastrand::Rng,
    left: f64,
    all: f64,
}

impl Machine {
    fn new(truth: fn(&DiskConfiguration, &RequestPattern) -> f64, seed: u64, samples: u32) -> Self {
        let all = f64::from(samples);
        Self { truth, random: fastrand::Rng::with_seed(seed), left: all, all }
    }

    /// Speed with noise of 5 %. One of twenty samples is disturbed (down to a tenth), and the
    /// machine gradually becomes a third slower.
    fn measure(&mut self, configuration: &DiskConfiguration, pattern: &RequestPattern) -> f64 {
        let noise: f64 = (0..4).map(|_| self.random.f64() - 0.5).sum::<f64>() * 0.087;
        let held_up = if self.random.u32(..20) == 0 { 0.1 + 0.9 * self.random.f64() } else { 1.0 };
        let drift = 1.0 - 0.33 * (1.0 - self.left / self.all);
        self.left -= 1.0;
        10_000.0 * (self.truth)(configuration, pattern) * noise.exp() * held_up * drift
    }

    fn search(&mut self, mut search: ConfigurationSearch) -> ConfigurationSearch {
        while let Some(turn) = search.next(self.left / self.all) {
            for pattern in turn.patterns.clone() {
                if self.left <= 0.0 {
                    break;
                }
                let value = self.measure(&turn.configuration, &pattern);
                search.record(&turn, pattern, value);
            }
        }
        search
    }
}

fn search(seed: u64) -> ConfigurationSearch {
    continued(seed, TuneSamples::default())
}

fn continued(seed: u64, samples: TuneSamples) -> ConfigurationSearch {
    ConfigurationSearch::new(
        ConfigurationSpace::of_made_images(1 << 30),
        RequestPattern::all(),
        TuneGoal::ALL.to_vec(),
        samples,
        seed,
    )
}

fn names(search: &ConfigurationSearch) -> BTreeMap<&'static str, String> {
    search.choices().iter().map(|choice| (choice.goal.name(), choice.configuration.to_string())).collect()
}

/// Writes are faster with O_DIRECT, prefetch helps, large clusters cost first writes.
fn disk(configuration: &DiskConfiguration, pattern: &RequestPattern) -> f64 {
    let mut speed = match configuration.cache {
        CacheMode::None if pattern.writes() => 1.5,
        CacheMode::Writethrough if pattern.writes() => 0.3,
        CacheMode::Directsync if pattern.writes() => 0.45,
        CacheMode::Unsafe => 4.0,
        _ => 1.0,
    };
    if let Some(Qcow2Choice { cluster_bytes, l2 }) = configuration.qcow2 {
        if pattern.operation == PatternOperation::FirstWrite {
            speed /= (cluster_bytes as f64 / 65_536.0).sqrt();
        }
        if l2 == L2Share::Part(128) {
            speed *= 0.7;
        }
    }
    if configuration.prefetch == PrefetchMode::On
        && pattern.operation == PatternOperation::Read
        && pattern.depth == 1
    {
        speed *= 1.6;
    }
    speed
}

#[test]
fn two_seeds_recommend_the_best_configuration() {
    let expect = BTreeMap::from([
        ("throughput", "none, 64K, prefetch on".to_owned()),
        ("latency", "none, 64K, prefetch on".to_owned()),
        ("integrity", "directsync, 64K, prefetch on".to_owned()),
        ("balanced", "none, 64K, prefetch on".to_owned()),
    ]);
    for seed in [1, 2, 3] {
        let found = Machine::new(disk, seed, 14_000).search(search(seed + 10));
        assert_eq!(names(&found), expect, "seed {seed}");
    }
}

#[test]
fn equal_configurations_recommend_the_default_early() {
    for seed in [1, 2, 3] {
        let mut machine = Machine::new(|_, _| 1.0, seed, 50_000);
        let found = machine.search(search(seed));
        let bases = TuneGoal::ALL.map(|goal| goal.base(&found.space).unwrap());
        let choices = found.choices();
        assert!(choices.iter().map(|choice| choice.configuration).eq(bases), "{choices:?}");
        assert!(choices.iter().all(|choice| choice.settled), "{choices:?}");
        assert!(machine.left > 0.5 * machine.all, "{} of {} are left", machine.left, machine.all);
    }
}

#[test]
fn speedup_between_stages_favours_no_combination() {
    let space = ConfigurationSpace::of_made_images(1 << 30);
    let default = space.default_configuration();
    let combinations = space.all().into_iter().filter(|one| space.changes(one) == 2).take(12);
    let stages = [space.one_at_a_time(), std::iter::once(default).chain(combinations).collect()];
    for seed in 0..20 {
        let mut machine = Machine::new(|_, _| 1.0, seed, 14_000);
        let mut samples = TuneSamples::default();
        for (later, stage) in [1.0, 1.15].into_iter().zip(&stages) {
            for _ in 0..10 {
                let round = samples.next_round();
                for configuration in stage {
                    for pattern in RequestPattern::all() {
                        let value = machine.measure(configuration, &pattern) * later;
                        samples.add(*configuration, pattern, round, value);
                    }
                }
            }
        }
        let found = continued(seed, samples);
        let bases = TuneGoal::ALL.map(|goal| goal.base(&space).unwrap());
        let chosen: Vec<_> = found.choices().iter().map(|choice| choice.configuration).collect();
        assert_eq!(chosen, bases, "seed {seed}");
    }
}

#[test]
fn two_seeds_recommend_the_same_on_a_noisy_machine() {
    // An unsettled goal is reported as no difference shown.
    let all: Vec<BTreeMap<_, _>> = (0..40)
        .map(|seed| {
            let found = Machine::new(disk, seed, 14 * 22 * 14).search(search(seed + 70));
            let settled = found.choices().into_iter().filter(|choice| choice.settled);
            settled.map(|choice| (choice.goal.name(), choice.configuration.to_string())).collect()
        })
        .collect();
    let agree = |one: &BTreeMap<_, String>, other: &BTreeMap<_, String>| {
        one.iter().all(|(goal, name)| other.get(goal).is_none_or(|other_name| other_name == name))
    };
    let pairs =
        all.iter().enumerate().flat_map(|(at, one)| all[..at].iter().map(move |other| agree(one, other)));
    let (same, count) = (pairs.clone().filter(|same| *same).count(), pairs.count());
    assert!(same * 100 >= count * 95, "{same} of {count} pairs: {all:#?}");
    let settled: usize = all.iter().map(BTreeMap::len).sum();
    assert!(settled * 100 >= 40 * 4 * 85, "{settled} of 160 are settled: {all:#?}");
}

#[test]
fn search_stops_early_only_when_conclusions_are_stable() {
    // A gain equal to the margin remains undecided after any number of rounds.
    let truth = |configuration: &DiskConfiguration, _: &RequestPattern| {
        if configuration.prefetch == PrefetchMode::On { 1.05 } else { 1.0 }
    };
    for seed in 0..4 {
        let mut machine = Machine::new(truth, seed, 14 * 22 * 60);
        let found = machine.search(search(seed));
        let is_settled = found.choices().iter().all(|choice| choice.settled);
        assert!(is_settled || machine.left <= 0.0, "seed {seed}: {} are left", machine.left);
    }
}

#[test]
fn budget_is_kept_and_partial_results_are_reported() {
    let mut machine = Machine::new(disk, 1, 100);
    let found = machine.search(search(1));
    let measured: usize = RequestPattern::all()
        .iter()
        .flat_map(|pattern| {
            found.samples.configurations.iter().map(move |configuration| (configuration, pattern))
        })
        .map(|(configuration, pattern)| found.samples.cell(configuration, pattern).count())
        .sum();
    assert_eq!(measured, 100, "all of the time, and not more");
    let bases = TuneGoal::ALL.map(|goal| goal.base(&found.space).unwrap());
    assert!(found.choices().iter().map(|choice| choice.configuration).eq(bases));
    assert!(found.choices().iter().all(|choice| !choice.settled));
    // No time for combinations.
    let mut machine = Machine::new(disk, 1, 14 * 22 * 3);
    let found = machine.search(search(1));
    assert_eq!(names(&found)["balanced"], "writeback, 64K", "three rounds prove nothing");
}

#[test]
fn gains_below_the_margin_are_not_recommended() {
    let truth = |configuration: &DiskConfiguration, _: &RequestPattern| {
        if configuration.prefetch == PrefetchMode::On { 1.03 } else { 1.0 }
    };
    for seed in [1, 2] {
        let found = Machine::new(truth, seed, 50_000).search(search(seed));
        assert_eq!(names(&found)["balanced"], "writeback, 64K");
    }
}

#[test]
fn search_resumes_from_earlier_samples() {
    let mut machine = Machine::new(disk, 1, 14 * 22 * 6);
    let first = machine.search(search(1));
    assert_eq!(first.stage, SearchStage::Done);
    let before = first.samples.next_round();
    let mut machine = Machine::new(disk, 2, 9_000);
    let found = machine.search(continued(2, first.samples.clone()));
    assert!(found.samples.next_round() > before);
    assert_eq!(names(&found)["balanced"], "none, 64K, prefetch on");
}

#[test]
fn unsupported_cache_mode_is_excluded() {
    let mut search = search(1);
    let mut machine = Machine::new(disk, 1, 9_000);
    while let Some(turn) = search.next(machine.left / machine.all) {
        if turn.configuration.cache.is_direct() {
            search.refuse(turn.configuration);
            continue;
        }
        for pattern in turn.patterns.clone() {
            let value = machine.measure(&turn.configuration, &pattern);
            search.record(&turn, pattern, value);
        }
    }
    let names = names(&search);
    assert_eq!(
        (names["integrity"].as_str(), names["balanced"].as_str()),
        ("writethrough, 64K, prefetch on", "writeback, 64K, prefetch on")
    );
}
