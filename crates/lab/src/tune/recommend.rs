//! A recommendation for a goal: the configuration, its gains and costs, its safety, and the
//! commands that apply it. Never reports a difference within noise.

use console::figures;

use super::{
    apply::{AppliedDisk, ApplyCommands},
    choice::GoalChoice,
    configurations::{ConfigurationSpace, DiskConfiguration, RequestPattern},
    goal::{CacheSafety, TuneGoal},
    samples::{MIN_ROUNDS, TuneSamples},
};
use crate::statistics::{Estimate, RankVerdict};

/// Maximum number of differences in the summary; the result's tables have all.
const MAX_LISTED: usize = 4;

#[derive(Clone, Debug)]
pub(super) struct Recommendation {
    pub(super) goal: TuneGoal,
    pub(super) configuration: DiskConfiguration,
    /// First configuration of the table; not significantly better if `settled` is false.
    leader: DiskConfiguration,
    pub(super) settled: bool,
    /// Gains relative to the default, the largest first.
    pub(super) gains: Vec<PatternDifference>,
    pub(super) costs: Vec<PatternDifference>,
    /// Additional memory compared with the default, for the disk that the options are for.
    pub(super) more_memory_bytes: u64,
    pub(super) commands: ApplyCommands,
    is_default: bool,
    is_compared: bool,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct PatternDifference {
    pub(super) pattern: RequestPattern,
    /// Speed relative to the default: 1 is equally fast.
    pub(super) ratio: Estimate,
}

impl Recommendation {
    pub(super) fn new(
        choice: &GoalChoice,
        samples: &TuneSamples,
        patterns: &[RequestPattern],
        space: &ConfigurationSpace,
        target: AppliedDisk<'_>,
    ) -> Self {
        let default = space.default_configuration();
        let configuration = choice.configuration;
        let mut gains = differences(samples, patterns, &default, &configuration);
        let mut costs = gains.clone();
        // The largest differences first in both lists.
        gains.retain(|difference| difference.ratio.median > 1.0);
        gains.sort_by(|one, other| other.ratio.median.total_cmp(&one.ratio.median));
        costs.retain(|difference| difference.ratio.median < 1.0);
        costs.sort_by(|one, other| one.ratio.median.total_cmp(&other.ratio.median));
        let memory = |configuration: &DiskConfiguration| configuration.memory_bytes(target.disk_bytes);
        Self {
            goal: choice.goal,
            configuration,
            leader: choice.leader,
            settled: choice.settled,
            gains,
            costs,
            more_memory_bytes: memory(&configuration).saturating_sub(memory(&default)),
            commands: ApplyCommands::new(&configuration, target),
            is_default: configuration == default,
            is_compared: [default, configuration]
                .iter()
                .all(|compared| samples.rounds(compared, patterns) >= MIN_ROUNDS),
        }
    }

    /// Table row: goal, configuration, safety, gains, costs.
    pub(super) fn row(&self) -> Vec<String> {
        let list_text = |list: &[PatternDifference]| match list {
            _ if self.is_default => "-".to_owned(),
            _ if !self.is_compared => "too few samples".to_owned(),
            [] => "nothing beyond noise".to_owned(),
            list => {
                let texts = list.iter().take(MAX_LISTED).map(PatternDifference::brief);
                let more = list.len().saturating_sub(MAX_LISTED);
                let more = (more > 0).then(|| format!("and {more} more"));
                texts.chain(more).collect::<Vec<_>>().join("\n")
            }
        };
        let memory = format!("{} more memory", figures::bytes(self.more_memory_bytes as f64));
        let remarks = [
            (self.is_default, "the default"),
            (!self.settled, "no difference shown"),
            (self.more_memory_bytes > 0, &memory),
        ];
        let remarks =
            remarks.into_iter().filter(|(applies, _)| *applies).map(|(_, remark)| format!("\n{remark}"));
        vec![
            self.goal.name().to_owned(),
            format!("{}{}", self.configuration, remarks.collect::<String>()),
            CacheSafety::of(self.configuration.cache).loses().to_owned(),
            list_text(&self.gains),
            list_text(&self.costs),
        ]
    }

    pub(super) fn sentence(&self) -> String {
        let mut text = format!("For {}: {}", self.goal.name(), self.configuration);
        if self.is_default && self.settled {
            text += " (the default: nothing was shown to be better)";
        } else if !self.settled {
            text += " (no difference shown)";
        }
        text += ".";
        let list_text = |list: &[PatternDifference]| {
            let texts: Vec<_> = list.iter().take(MAX_LISTED).map(PatternDifference::text).collect();
            let more = list.len().saturating_sub(MAX_LISTED);
            texts.join("; ") + &if more > 0 { format!("; and {more} more") } else { String::new() }
        };
        if !self.is_default && !self.is_compared {
            text += " Gains and costs relative to the default are unknown: there are too few samples.";
        } else if !self.is_default {
            let none = |verb: &str| format!(" {verb} nothing beyond noise.");
            text += &match self.gains.as_slice() {
                [] => none("Gains"),
                gains => format!(" Gains beside the default: {}.", list_text(gains)),
            };
            text += &match self.costs.as_slice() {
                [] => none("Costs"),
                costs => format!(" Costs: {}.", list_text(costs)),
            };
        }
        if self.more_memory_bytes > 0 {
            text += &format!(" Needs {} more memory.", figures::bytes(self.more_memory_bytes as f64));
        }
        text += &format!(" Safety: {}.", CacheSafety::of(self.configuration.cache).description());
        if !self.settled && self.leader != self.configuration {
            text += &format!(" Ahead so far: {}; more --budget can show whether it is better.", self.leader);
        } else if !self.settled {
            text += " More --budget can show whether another one is better.";
        }
        text
    }

    pub(super) fn how(&self) -> Vec<(&'static str, String)> {
        let ApplyCommands { create, weir, qemu_drive, qemu_blockdev, libvirt, without } =
            self.commands.clone();
        let create = create.map(|line| ("image", line));
        let without = without.map(|line| ("missing", line.to_owned()));
        create
            .into_iter()
            .chain([("weir", weir), ("QEMU", qemu_drive), ("or", qemu_blockdev), ("libvirt", libvirt)])
            .chain(without)
            .collect()
    }
}

impl PatternDifference {
    /// Short form without the interval, which the tables of patterns have.
    fn brief(&self) -> String {
        format!("{:+.0} % {}", (self.ratio.median - 1.0) * 100.0, self.pattern)
    }

    fn text(&self) -> String {
        format!("{} {}", percent(&self.ratio), self.pattern)
    }
}

pub(super) fn percent(ratio: &Estimate) -> String {
    let percent = |value: f64| (value - 1.0) * 100.0;
    format!("{:+.0} % [{:+.0}, {:+.0}]", percent(ratio.median), percent(ratio.low), percent(ratio.high))
}

fn differences(
    samples: &TuneSamples,
    patterns: &[RequestPattern],
    base: &DiskConfiguration,
    other: &DiskConfiguration,
) -> Vec<PatternDifference> {
    let difference = |pattern: &RequestPattern| {
        let comparison = samples.compare_cells((base, pattern), (other, pattern))?;
        let is_one = comparison.verdict != RankVerdict::Same;
        is_one.then_some(PatternDifference { pattern: *pattern, ratio: comparison.ratio })
    };
    patterns.iter().filter_map(difference).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tune::apply::DiskOrigin;

    #[test]
    fn gains_and_costs_have_confidence_intervals() {
        let space = ConfigurationSpace::of_made_images(1 << 30);
        let patterns = RequestPattern::all();
        let [default, other] = [space.default_configuration(), space.one_at_a_time()[2]];
        let mut samples = TuneSamples::default();
        for round in 0..8 {
            for pattern in &patterns {
                let noise = 1.0 + f64::from(round % 3) * 0.01;
                let gain = if pattern.writes() { 2.0 } else { 0.5 };
                samples.add(default, *pattern, round, 1000.0 * noise);
                samples.add(other, *pattern, round, 1000.0 * noise * gain);
            }
        }
        let target = AppliedDisk { name: "a.qcow2", disk_bytes: 100 << 30, kind: DiskOrigin::New };
        let choice =
            GoalChoice { goal: TuneGoal::Balanced, configuration: other, leader: other, settled: true };
        let recommendation = Recommendation::new(&choice, &samples, &patterns, &space, target);
        let text = recommendation.sentence();
        assert!(text.starts_with("For balanced: none, 64K. Gains beside the default: +100 % ["), "{text}");
        assert!(text.contains("Costs: -50 % ["), "{text}");
        assert!(
            text.contains("Safety: survives a power failure of the host with guests that flush"),
            "{text}"
        );
        let choice = GoalChoice { configuration: default, settled: false, ..choice };
        let text = Recommendation::new(&choice, &samples, &patterns, &space, target).sentence();
        assert!(text.contains("(no difference shown)"), "{text}");
        assert!(text.contains(&format!(" Ahead so far: {other}; more --budget ")), "{text}");
        let settled = GoalChoice { settled: true, leader: default, ..choice };
        let text = Recommendation::new(&settled, &samples, &patterns, &space, target).sentence();
        assert!(text.contains("(the default: nothing was shown to be better)"), "{text}");
    }
}
