//! Decides what to measure next, and when the results suffice.
//!
//! ```text
//!   stage 1   the default, and each factor changed alone                 rounds: every configuration once, in random order
//!      │                                                                   │
//!      │  levels with a gain for any goal                                   │ after five rounds: configurations behind for every goal drop out
//!      ▼                                                                   │ until every goal is settled, or the stage's time is over
//!   stage 2   their combinations, the most promising, with the best so far ─┘
//! ```
//!
//! Stage 2 lasts until every goal is settled among all measured configurations, or until the budget
//! is used up: undecided configurations of stage 1 take part again. A goal is therefore unsettled
//! only if the budget was too small, never because the search ended early.
//!
//! All configurations of a stage take turns, so that drift of the machine affects all of them.
//! Combinations depend on the samples alone, so a search can be resumed from samples.

use std::collections::HashMap;

use super::{
    choice::{CandidateStanding, GoalChoice, GoalScores, choose, standing},
    configurations::{ConfigurationSpace, DiskConfiguration, Qcow2Choice, RequestPattern},
    goal::TuneGoal,
    samples::{MIN_ROUNDS, TuneSamples},
};
use crate::statistics::median;

/// Minimum share of the time for stage 2.
const COMBINATIONS_SHARE: f64 = 0.45;
/// Maximum number of rounds of stage 1; the remaining time goes to stage 2.
const MAX_ROUNDS: usize = 30;
const MAX_COMBINATIONS: usize = 12;

#[derive(Debug)]
pub(super) struct ConfigurationSearch {
    pub(super) space: ConfigurationSpace,
    pub(super) patterns: Vec<RequestPattern>,
    goals: Vec<TuneGoal>,
    pub(super) samples: TuneSamples,
    random: fastrand::Rng,
    stage: SearchStage,
    candidates: Vec<DiskConfiguration>,
    rounds: usize,
    round: u32,
    queue: Vec<DiskConfiguration>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SearchStage {
    Factors,
    Combinations,
    Done,
}

/// All of `patterns` in order, with one configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct MeasurementTurn {
    pub(super) configuration: DiskConfiguration,
    pub(super) patterns: Vec<RequestPattern>,
    pub(super) round: u32,
}

pub(super) trait TurnSource {
    fn clusters(&self) -> Vec<u64>;
    /// `left` is the remaining share of the time, from 1 to 0; `None` ends the run.
    fn next(&mut self, left: f64) -> Option<MeasurementTurn>;
    /// Records a sample in operations per second.
    fn record(&mut self, turn: &MeasurementTurn, pattern: RequestPattern, value: f64);
    /// Excludes a configuration that cannot be opened; returns a description of the exclusion.
    fn refuse(&mut self, configuration: DiskConfiguration) -> String;
    /// Excludes a cluster size; returns the beginnings of sentences about it.
    fn leave_out(&mut self, cluster_bytes: u64) -> Vec<String>;
    /// The current round, for progress messages.
    fn is_at(&self) -> String;
}

impl TurnSource for ConfigurationSearch {
    fn clusters(&self) -> Vec<u64> {
        self.space.clusters.clone()
    }

    fn next(&mut self, left: f64) -> Option<MeasurementTurn> {
        if left <= 0.0 {
            self.stage = SearchStage::Done;
        }
        while self.queue.is_empty() && self.stage != SearchStage::Done {
            self.begin_round(left);
        }
        if self.stage == SearchStage::Done {
            return None;
        }
        let configuration = self.queue.pop()?;
        // In random order, so that no pattern always follows the same one.
        let mut patterns = self.patterns.clone();
        self.random.shuffle(&mut patterns);
        Some(MeasurementTurn { configuration, patterns, round: self.round })
    }

    fn record(&mut self, turn: &MeasurementTurn, pattern: RequestPattern, value: f64) {
        self.samples.add(turn.configuration, pattern, turn.round, value);
    }

    /// Excludes all configurations with its cache mode.
    fn refuse(&mut self, configuration: DiskConfiguration) -> String {
        let cache = configuration.cache;
        self.retain_configurations(|other| other.cache != cache);
        self.space.caches.retain(|&other| other != cache);
        cache.to_string()
    }

    fn leave_out(&mut self, cluster_bytes: u64) -> Vec<String> {
        self.retain_configurations(|candidate| {
            candidate.qcow2.is_none_or(|qcow2| qcow2.cluster_bytes != cluster_bytes)
        });
        self.space.clusters.retain(|&other| other != cluster_bytes);
        vec![format!("clusters of {}, because", settings::exact_size(cluster_bytes))]
    }

    fn is_at(&self) -> String {
        let stage = match self.stage {
            SearchStage::Factors => "one factor at a time",
            SearchStage::Combinations => "combinations",
            SearchStage::Done => "done",
        };
        format!("{stage}: round {} of {} configurations", self.rounds, self.candidates.len())
    }
}

impl ConfigurationSearch {
    /// Searches `space` for the best configuration for these goals, by these patterns. `samples`
    /// may be empty.
    pub(super) fn new(
        space: ConfigurationSpace,
        patterns: Vec<RequestPattern>,
        goals: Vec<TuneGoal>,
        samples: TuneSamples,
        seed: u64,
    ) -> Self {
        let candidates = space.one_at_a_time();
        let round = samples.next_round();
        let mut search = Self {
            space,
            patterns,
            goals,
            samples,
            random: fastrand::Rng::with_seed(seed),
            stage: SearchStage::Factors,
            candidates,
            rounds: 0,
            round,
            queue: Vec::new(),
        };
        // Samples of an earlier run count as rounds.
        search.rounds = search.rounds_so_far();
        search
    }

    fn retain_configurations(&mut self, keeps: impl Fn(&DiskConfiguration) -> bool) {
        self.candidates.retain(&keeps);
        self.queue.retain(&keeps);
    }

    /// Choices according to the samples so far; empty without samples.
    pub(super) fn choices(&self) -> Vec<GoalChoice> {
        if self.samples.configurations.is_empty() {
            return Vec::new();
        }
        let scores = self.scores();
        self.goals.iter().filter_map(|&goal| choose(goal, &scores, &self.samples.configurations)).collect()
    }

    pub(super) fn scores(&self) -> GoalScores<'_> {
        GoalScores { samples: &self.samples, patterns: &self.patterns, space: &self.space }
    }

    fn rounds_so_far(&self) -> usize {
        let rounds = |candidate| self.samples.rounds(candidate, &self.patterns);
        self.candidates.iter().map(rounds).min().unwrap_or(0)
    }

    fn begin_round(&mut self, left: f64) {
        if self.rounds >= MIN_ROUNDS && self.stage == SearchStage::Factors {
            // Configurations that are behind the leader for every goal cost time without a chance
            // of being recommended.
            self.candidates = self.still_competitive();
            // Stage 2 begins when stage 1 has decided, or has used its share of the time.
            let is_late = left < COMBINATIONS_SHARE;
            if is_late || self.rounds >= MAX_ROUNDS || self.is_settled() {
                return self.begin_combinations();
            }
        } else if self.rounds >= MIN_ROUNDS {
            let open: Vec<_> = self.choices().into_iter().filter(|choice| !choice.settled).collect();
            if open.is_empty() {
                self.stage = SearchStage::Done;
                return;
            }
            // Only the open goals get further rounds.
            self.candidates = self.undecided(&open);
        }
        self.rounds += 1;
        self.round = self.samples.next_round();
        self.queue = self.candidates.clone();
        self.random.shuffle(&mut self.queue);
    }

    fn begin_combinations(&mut self) {
        self.stage = SearchStage::Combinations;
        let mut candidates = vec![self.space.default_configuration()];
        let scores = self.scores();
        for goal in &self.goals {
            let choice = choose(*goal, &scores, &self.samples.configurations);
            // A base is always measured: it is recommended if nothing better is shown.
            candidates.extend(goal.base(&self.space));
            candidates.extend(choice.map(|choice| choice.leader));
        }
        candidates.extend(self.combinations());
        self.candidates = self.distinct(candidates);
        self.rounds = self.rounds_so_far();
    }

    /// Configurations that decide the unsettled goals: the default, the goals' bases, and all that
    /// may be as good as the leader.
    fn undecided(&self, open: &[GoalChoice]) -> Vec<DiskConfiguration> {
        let scores = self.scores();
        let mut candidates = vec![self.space.default_configuration()];
        for GoalChoice { goal, leader, .. } in open {
            candidates.extend(goal.base(&self.space));
            let measured = self.samples.configurations.iter().copied();
            candidates.extend(measured.filter(|candidate| {
                goal.allows(candidate.cache)
                    && standing(*goal, &scores, leader, candidate) != CandidateStanding::Behind
            }));
        }
        self.distinct(candidates)
    }

    /// Removes duplicates and configurations that have been excluded.
    fn distinct(&self, candidates: Vec<DiskConfiguration>) -> Vec<DiskConfiguration> {
        let ConfigurationSpace { caches, clusters, .. } = &self.space;
        let mut distinct: Vec<DiskConfiguration> = Vec::new();
        for candidate in candidates {
            let is_possible = caches.contains(&candidate.cache)
                && candidate.qcow2.is_none_or(|qcow2| clusters.contains(&qcow2.cluster_bytes));
            if is_possible && !distinct.contains(&candidate) {
                distinct.push(candidate);
            }
        }
        distinct
    }

    /// True if more rounds would change nothing for any goal.
    fn is_settled(&self) -> bool {
        let scores = self.scores();
        self.goals
            .iter()
            .all(|&goal| choose(goal, &scores, &self.candidates).is_none_or(|choice| choice.settled))
    }

    /// Drops candidates that are behind the leader for every goal that allows them, but never the
    /// default or a base.
    fn still_competitive(&self) -> Vec<DiskConfiguration> {
        let scores = self.scores();
        let leaders: Vec<_> = self
            .goals
            .iter()
            .filter_map(|&goal| choose(goal, &scores, &self.candidates))
            .map(|choice| (choice.goal, choice.leader))
            .collect();
        let keeps = |candidate: &DiskConfiguration| {
            leaders.iter().any(|(goal, leader)| {
                goal.base(&self.space).as_ref() == Some(candidate)
                    || goal.allows(candidate.cache)
                        && standing(*goal, &scores, leader, candidate) != CandidateStanding::Behind
            })
        };
        let default = self.space.default_configuration();
        self.candidates
            .iter()
            .copied()
            .filter(|candidate| *candidate == default || keeps(candidate))
            .collect()
    }

    fn combinations(&self) -> Vec<DiskConfiguration> {
        let scores = self.scores();
        let default = self.space.default_configuration();
        let factors = self.space.one_at_a_time();
        let gains: HashMap<(TuneGoal, DiskConfiguration), f64> = self
            .goals
            .iter()
            .flat_map(|&goal| factors.iter().map(move |factor| (goal, *factor)))
            .map(|(goal, factor)| {
                let quotients = scores.of(goal, &factor);
                ((goal, factor), if quotients.is_empty() { 1.0 } else { median(&quotients) })
            })
            .collect();
        // Unmeasured factors count as no gain.
        let gains =
            |goal: TuneGoal, factor: &DiskConfiguration| gains.get(&(goal, *factor)).copied().unwrap_or(1.0);
        let mattered = |configuration: &DiskConfiguration| {
            self.goals.iter().any(|&goal| {
                // Integrity's combinations need a safe mode.
                let is_needed = goal == TuneGoal::Integrity && goal.allows(configuration.cache);
                is_needed || goal.allows(configuration.cache) && scores.gains(goal, &default, configuration)
            })
        };
        // Only changes that helped on their own are combined.
        let helpful: Vec<_> =
            factors.iter().copied().filter(|factor| *factor == default || mattered(factor)).collect();
        let is_helpful = |part: DiskConfiguration| helpful.contains(&part);
        let predicted_gain = |combination: &DiskConfiguration| {
            let parts = parts(combination, &default);
            // Predicted as if the gains of the parts were independent.
            let gain_for = |goal: &TuneGoal| parts.iter().map(|part| gains(*goal, part)).product::<f64>();
            // Relative to the goal's best: a combination need not be good for every goal.
            let best = |goal: &TuneGoal| {
                let allowed = factors.iter().filter(|factor| goal.allows(factor.cache));
                allowed.map(|factor| gains(*goal, factor)).fold(f64::MIN_POSITIVE, f64::max)
            };
            let allowed = self.goals.iter().filter(|goal| goal.allows(combination.cache));
            allowed.map(|goal| gain_for(goal) / best(goal)).fold(0.0, f64::max)
        };
        let mut list: Vec<_> = self
            .space
            .all()
            .into_iter()
            .filter(|one| self.space.changes(one) >= 2 && parts(one, &default).into_iter().all(is_helpful))
            .map(|one| (predicted_gain(&one), one))
            // A combination must be predicted to beat the best single change of some goal.
            .filter(|(gain, _)| *gain > 1.0)
            .collect();
        list.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        list.truncate(MAX_COMBINATIONS);
        list.into_iter().map(|(_, one)| one).collect()
    }
}

fn parts(configuration: &DiskConfiguration, default: &DiskConfiguration) -> Vec<DiskConfiguration> {
    let mut parts = vec![
        DiskConfiguration { cache: configuration.cache, ..*default },
        DiskConfiguration { prefetch: configuration.prefetch, ..*default },
    ];
    if let (Some(chosen), Some(usual)) = (configuration.qcow2, default.qcow2) {
        let with = |qcow2| DiskConfiguration { qcow2: Some(qcow2), ..*default };
        parts.push(with(Qcow2Choice { cluster_bytes: chosen.cluster_bytes, ..usual }));
        parts.push(with(Qcow2Choice { l2: chosen.l2, ..usual }));
    }
    parts.retain(|part| part != default);
    parts
}

#[cfg(test)]
#[path = "search_tests.rs"]
mod tests;
