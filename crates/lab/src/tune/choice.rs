//! Chooses the configuration that is recommended for a goal.
//!
//! ```text
//!   allowed for the goal ─► the fastest ─► those proven as good, within 5 % ─► proven to gain more than 5 % ─► the first of these
//!                                                                              and the base
//! ```
//!
//! The fixed order: the goal's base (the default, or for integrity the default with a safe mode),
//! then the fewest changes, then the least memory. Noise therefore does not decide between equals,
//! and another run chooses the same. A recommended change was shown to gain more than 5 %.

use super::{
    configurations::{ConfigurationSpace, DiskConfiguration, RequestPattern},
    goal::TuneGoal,
    samples::{MIN_ROUNDS, TuneSamples},
};
use crate::statistics::{RankComparison, RankVerdict, median};

/// Smaller gains do not justify a change, and chance would decide between equals.
pub(super) const MARGIN: f64 = 0.05;

const RULE: &str = "Recommended is the first configuration, in this order, that was shown to be \
                    within 5 % of the fastest: the default settings, then the fewest changes to \
                    them, then the least memory. A change is recommended only if it was shown to \
                    gain more than 5 %.";

/// Appended to [`RULE`] if the measurement did not settle every goal.
const NOT_SETTLED: &str = " Where no difference was shown, the whole budget was too little to \
                           decide: the goal's base is named (the default, or for integrity the \
                           default with a safe cache mode), and another may be ahead in the table. \
                           More --budget can settle it.";

/// Explanation of the recommendations; differs if not all are `settled`.
pub(super) fn rule(settled: bool) -> String {
    if settled { RULE.to_owned() } else { format!("{RULE}{NOT_SETTLED}") }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) struct GoalChoice {
    pub(super) goal: TuneGoal,
    pub(super) configuration: DiskConfiguration,
    pub(super) leader: DiskConfiguration,
    pub(super) settled: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CandidateStanding {
    AsGood,
    Behind,
    Open,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct GoalScores<'a> {
    pub(super) samples: &'a TuneSamples,
    pub(super) patterns: &'a [RequestPattern],
    pub(super) space: &'a ConfigurationSpace,
}

impl GoalScores<'_> {
    /// Speed relative to the default, for each round of both; empty if none is complete.
    pub(super) fn of(&self, goal: TuneGoal, candidate: &DiskConfiguration) -> Vec<f64> {
        self.samples.quotients(&self.space.default_configuration(), candidate, &self.counted(goal))
    }

    /// Speed of `other` relative to `base`, and the number of rounds that it is based on.
    pub(super) fn compare(
        &self,
        goal: TuneGoal,
        base: &DiskConfiguration,
        other: &DiskConfiguration,
    ) -> (RankComparison, usize) {
        let default = self.space.default_configuration();
        self.samples.compare(base, other, &self.counted(goal), &default)
    }

    pub(super) fn gains(
        &self,
        goal: TuneGoal,
        base: &DiskConfiguration,
        candidate: &DiskConfiguration,
    ) -> bool {
        let (RankComparison { ratio, verdict }, rounds) = self.compare(goal, base, candidate);
        rounds >= MIN_ROUNDS && verdict == RankVerdict::Higher && ratio.median > 1.0 + MARGIN
    }

    fn counted(&self, goal: TuneGoal) -> Vec<RequestPattern> {
        self.patterns.iter().copied().filter(|pattern| goal.counts(pattern)).collect()
    }
}

/// The base if nothing was shown to be better, including open cases: then the choice is not
/// settled, and another seed would not choose another configuration. `None` if nothing is allowed
/// for the goal.
pub(super) fn choose(
    goal: TuneGoal,
    scores: &GoalScores<'_>,
    candidates: &[DiskConfiguration],
) -> Option<GoalChoice> {
    let space = scores.space;
    let base = goal.base(space)?;
    let measured: Vec<_> = candidates
        .iter()
        .filter(|candidate| goal.allows(candidate.cache))
        .map(|candidate| (*candidate, scores.of(goal, candidate)))
        .filter(|(_, scores)| !scores.is_empty())
        .collect();
    // By the median: a single fast round does not make a leader.
    let fastest = measured.iter().max_by(|(_, one), (_, other)| median(one).total_cmp(&median(other)));
    let Some((leader, rounds)) = fastest.map(|(leader, scores)| (*leader, scores.len())) else {
        return Some(GoalChoice { goal, configuration: base, leader: base, settled: false });
    };
    let standings: Vec<_> = measured
        .iter()
        .map(|(candidate, _)| (*candidate, standing(goal, scores, &leader, candidate)))
        .collect();
    let is_good = |candidate: &DiskConfiguration| *candidate == base || scores.gains(goal, &base, candidate);
    let good = standings
        .iter()
        .filter(|(candidate, standing)| *standing == CandidateStanding::AsGood && is_good(candidate))
        .map(|(candidate, _)| *candidate);
    // The order stated by [`RULE`].
    let order = |candidate: &DiskConfiguration| {
        (*candidate != base, space.changes(candidate), candidate.memory_bytes(space.size_bytes))
    };
    let first = good.min_by_key(order).filter(|first| {
        // A candidate later in the order cannot replace the first, so it need not be decided.
        let is_open = |(candidate, standing): &(DiskConfiguration, CandidateStanding)| {
            *standing == CandidateStanding::Open && order(candidate) <= order(first)
        };
        rounds >= MIN_ROUNDS && !standings.iter().any(is_open)
    });
    Some(GoalChoice { goal, configuration: first.unwrap_or(base), leader, settled: first.is_some() })
}

pub(super) fn standing(
    goal: TuneGoal,
    scores: &GoalScores<'_>,
    leader: &DiskConfiguration,
    candidate: &DiskConfiguration,
) -> CandidateStanding {
    if candidate == leader {
        return CandidateStanding::AsGood;
    }
    let (RankComparison { ratio, .. }, rounds) = scores.compare(goal, leader, candidate);
    // By the interval, not the median: candidates near the margin need more rounds.
    if rounds < MIN_ROUNDS {
        CandidateStanding::Open
    } else if ratio.high < 1.0 - MARGIN {
        CandidateStanding::Behind
    } else if ratio.low >= 1.0 - MARGIN {
        CandidateStanding::AsGood
    } else {
        CandidateStanding::Open
    }
}
