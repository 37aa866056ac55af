//! Which configuration is recommended for a goal.
//!
//! ```text
//!   allowed for the goal ─► the fastest ─► those known to be as good, within 5 % ─► known to gain more than 5 % ─► the first of these
//!                                                                                 and the base
//! ```
//!
//! The first in a fixed order: the goal's base (the default, or for integrity the default with a
//! mode that is safe), then what changes least, then what takes least memory. So noise does not
//! decide between what is equally good, and another run on the same machine comes to the same.
//!
//! Never recommends a change that was not shown to gain more than 5 %.

use super::{
    goal::Goal,
    matrix::{Configuration, Pattern, Space},
    samples::{LEAST_ROUNDS, Samples},
};
use crate::statistics::{Comparison, Verdict, median};

/// A gain that nobody notices is worth no change; and below this, chance would decide between
/// equals.
pub(super) const MARGIN: f64 = 0.05;

/// As it is told with every recommendation.
pub(super) const RULE: &str = "Recommended is the first configuration, in this order, that was shown to be within 5 % of the fastest: \
     the default, fewest changes to it, least memory. A change is recommended only if it was shown to gain more than 5 %.";

/// What is recommended for a goal, and who else would do.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Choice {
    pub(super) goal: Goal,
    pub(super) configuration: Configuration,
    /// The fastest by its median; the recommended one is as good.
    pub(super) leader: Configuration,
    /// Whether more rounds would not change it.
    pub(super) settled: bool,
}

/// How one configuration stands to the goal's leader.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Standing {
    /// Known to be as good as the leader, but for what nobody notices.
    AsGood,
    /// Known to be slower by more than the margin.
    Behind,
    /// One or the other; more rounds will tell.
    Open,
}

/// How candidates come out for the goals, as far as was measured.
#[derive(Clone, Copy, Debug)]
pub(super) struct Scores<'a> {
    pub(super) samples: &'a Samples,
    pub(super) patterns: &'a [Pattern],
    pub(super) space: &'a Space,
}

impl Scores<'_> {
    /// How many times as fast as the default, for each round that both were in; empty if none of
    /// them is complete.
    pub(super) fn of(&self, goal: Goal, candidate: &Configuration) -> Vec<f64> {
        self.samples.quotients(&self.space.default_configuration(), candidate, &self.counted(goal))
    }

    /// How `other` stands to `base`, and from how many rounds that is known.
    pub(super) fn compare(
        &self,
        goal: Goal,
        base: &Configuration,
        other: &Configuration,
    ) -> (Comparison, usize) {
        let default = self.space.default_configuration();
        self.samples.compare(base, other, &self.counted(goal), &default)
    }

    /// Whether it was shown to gain more than what nobody notices.
    pub(super) fn gains(&self, goal: Goal, base: &Configuration, candidate: &Configuration) -> bool {
        let (Comparison { ratio, verdict }, rounds) = self.compare(goal, base, candidate);
        rounds >= LEAST_ROUNDS && verdict == Verdict::Higher && ratio.median > 1.0 + MARGIN
    }

    fn counted(&self, goal: Goal) -> Vec<Pattern> {
        self.patterns.iter().copied().filter(|pattern| goal.counts(pattern)).collect()
    }
}

/// Chooses among `candidates`; the base if nothing was shown to be better, `None` if nothing is
/// allowed for the goal.
pub(super) fn choose(goal: Goal, scores: &Scores<'_>, candidates: &[Configuration]) -> Option<Choice> {
    let space = scores.space;
    let base = goal.base(space)?;
    let measured: Vec<_> = candidates
        .iter()
        .filter(|candidate| goal.allows(candidate.cache))
        .map(|candidate| (*candidate, scores.of(goal, candidate)))
        .filter(|(_, scores)| !scores.is_empty())
        .collect();
    let fastest = measured.iter().max_by(|(_, one), (_, other)| median(one).total_cmp(&median(other)));
    let Some((leader, rounds)) = fastest.map(|(leader, scores)| (*leader, scores.len())) else {
        // Nobody knows of anything better.
        return Some(Choice { goal, configuration: base, leader: base, settled: false });
    };
    let standings: Vec<_> = measured
        .iter()
        .map(|(candidate, _)| (*candidate, standing(goal, scores, &leader, candidate)))
        .collect();
    let is_good = |candidate: &Configuration| *candidate == base || scores.gains(goal, &base, candidate);
    let good = standings
        .iter()
        .filter(|(candidate, standing)| *standing == Standing::AsGood && is_good(candidate))
        .map(|(candidate, _)| *candidate);
    let first = good.min_by_key(|candidate| {
        (*candidate != base, space.changes(candidate), candidate.memory_bytes(space.size_bytes))
    });
    let is_known =
        rounds >= LEAST_ROUNDS && standings.iter().all(|(_, standing)| *standing != Standing::Open);
    Some(Choice { goal, configuration: first.unwrap_or(base), leader, settled: first.is_some() && is_known })
}

pub(super) fn standing(
    goal: Goal,
    scores: &Scores<'_>,
    leader: &Configuration,
    candidate: &Configuration,
) -> Standing {
    if candidate == leader {
        return Standing::AsGood;
    }
    let (Comparison { ratio, .. }, rounds) = scores.compare(goal, leader, candidate);
    // By the interval, not by the middle: what is near to the margin is looked at for longer, or
    // noise would decide.
    if rounds < LEAST_ROUNDS {
        Standing::Open
    } else if ratio.high < 1.0 - MARGIN {
        Standing::Behind
    } else if ratio.low >= 1.0 - MARGIN {
        Standing::AsGood
    } else {
        Standing::Open
    }
}
