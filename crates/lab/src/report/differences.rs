//! Compares two results: measures that differ, the size of each difference, and its significance.
//!
//! Measures match by name and unit. Different machines are always pointed out.

use std::fmt::Write as _;

use super::{
    page::facts,
    quantity::{self, percent},
    samples::{IntervalKind, estimated, independent},
};
use crate::{
    result::{Better, Header, Measure, ResultFile, SamplesAre, Table, Unit},
    statistics::{Estimate, Verdict, compare},
};

/// Expected share of false differences, the level of `statistics`.
const BY_CHANCE: f64 = 0.05;
/// Number of measures from which the expected false differences are mentioned: one in twenty.
const WORTH_SAYING: usize = 20;
/// Smaller relative differences of memory are overhead of the kernel.
const SAME_MEMORY: f64 = 0.02;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Better,
    Worse,
    Same,
    /// Too few samples, or a division by zero.
    Unknown,
}

impl Outcome {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Same => "no difference",
            Self::Unknown => "cannot be told",
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct Row {
    pub(super) name: String,
    pub(super) unit: Unit,
    pub(super) a: Estimate,
    pub(super) b: Estimate,
    /// B relative to A; NaN if one of them is 0.
    pub(super) ratio: Estimate,
    pub(super) outcome: Outcome,
    pub(super) samples_are: SamplesAre,
    /// Interval kinds of A and B.
    pub(super) intervals: [IntervalKind; 2],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Other {
    pub(super) what: &'static str,
    pub(super) a: String,
    pub(super) b: String,
}

#[derive(Clone, Debug)]
pub(super) struct Differences {
    pub(super) rows: Vec<Row>,
    /// Including measures whose unit differs.
    pub(super) only_a: Vec<String>,
    pub(super) only_b: Vec<String>,
    pub(super) others: Vec<Other>,
}

impl Differences {
    pub(super) fn between(a: &ResultFile, b: &ResultFile) -> Self {
        let (list_a, list_b) = (&a.findings.measures, &b.findings.measures);
        let alone = |list: &[Measure], other: &[Measure]| {
            let alone = list.iter().filter(|measure| counterpart(other, measure).is_none());
            alone.map(|measure| measure.name.clone()).collect()
        };
        Self {
            rows: list_a.iter().filter_map(|one| Some(Row::new(one, counterpart(list_b, one)?))).collect(),
            only_a: alone(list_a, list_b),
            only_b: alone(list_b, list_a),
            others: others(&a.header, &b.header),
        }
    }

    pub(super) fn count(&self, outcome: Outcome) -> usize {
        self.rows.iter().filter(|row| row.outcome == outcome).count()
    }

    fn told(&self) -> usize {
        self.rows.len() - self.count(Outcome::Unknown)
    }

    /// Number of measures in which a difference may be due to chance.
    fn told_by_chance(&self) -> usize {
        let is_measured =
            |row: &&Row| row.outcome != Outcome::Unknown && row.samples_are != SamplesAre::Exact;
        self.rows.iter().filter(is_measured).count()
    }

    pub(super) fn expected_by_chance(&self) -> f64 {
        self.told_by_chance() as f64 * BY_CHANCE
    }

    pub(super) fn conclusion(&self) -> String {
        let (told, better, worse) = (self.told(), self.count(Outcome::Better), self.count(Outcome::Worse));
        let measures = if told == 1 { "measure" } else { "measures" };
        let mut text = match better + worse {
            _ if self.rows.is_empty() => {
                return "No measure is in both results: there is nothing to compare.".to_owned();
            }
            _ if told == 0 => "Whether there is a difference cannot be told.".to_owned(),
            0 => format!("No real difference: none of {told} {measures} differs by more than noise."),
            differ => format!(
                "{differ} of {told} {measures} differ{} by more than noise: B is better in {better} and worse in {worse}.",
                if differ == 1 { "s" } else { "" }
            ),
        };
        // With many measures some differ by chance; the reader should know how many.
        let chance = self.expected_by_chance();
        let by_chance = self.told_by_chance();
        if by_chance >= WORTH_SAYING && better + worse > 0 {
            let _ = write!(text, " Of {by_chance} about {chance:.0} would differ by chance alone");
            text += if (better + worse) as f64 <= chance {
                ": this is no sign of a real difference."
            } else {
                ": single ones among them may be no real difference."
            };
        }
        let is_within = |row: &Row| row.samples_are == SamplesAre::Seconds && row.outcome != Outcome::Unknown;
        if self.rows.iter().any(is_within) {
            text += " Some were compared within one run each: a difference between the runs themselves is not told from one between the things.";
        }
        match self.count(Outcome::Unknown) {
            0 => {}
            1 => text += " One measure has too few samples to tell, or is zero.",
            unknown => {
                let _ = write!(text, " {unknown} measures have too few samples to tell, or are zero.");
            }
        }
        text
    }

    pub(super) fn table(&self) -> Table {
        let row = |row: &Row| {
            let told = |estimate: Estimate, interval: IntervalKind| {
                let [median, low, high] = quantity::estimate(estimate, row.unit);
                match interval {
                    IntervalKind::Estimated => format!("{median} [{low}, {high}]"),
                    IntervalKind::Exact | IntervalKind::OneRun => {
                        format!("{median} ({})", interval.text(&low, &high))
                    }
                }
            };
            let [a, b] = row.intervals;
            vec![
                row.name.clone(),
                row.outcome.text().to_owned(),
                percent(row.ratio.median),
                a.both(b).text(&percent(row.ratio.low), &percent(row.ratio.high)),
                told(row.a, a),
                told(row.b, b),
            ]
        };
        let columns = ["measure", "B is", "difference", "between", "A", "B"];
        Table::new("Measures that both have", columns, self.rows.iter().map(row).collect())
    }

    pub(super) fn others_table(&self) -> Table {
        let row = |other: &Other| vec![other.what.to_owned(), other.a.clone(), other.b.clone()];
        let note = Some("Measures may differ for these reasons alone.".to_owned());
        Table { note, ..Table::new("Not the same", ["", "A", "B"], self.others.iter().map(row).collect()) }
    }
}

impl Row {
    fn new(a: &Measure, b: &Measure) -> Self {
        // The weaker kind decides: seconds of one run make a comparison of runs impossible.
        let samples_are = match [a.samples_are, b.samples_are] {
            [SamplesAre::Exact, SamplesAre::Exact] => SamplesAre::Exact,
            both if both.contains(&SamplesAre::Seconds) => SamplesAre::Seconds,
            _ => SamplesAre::Runs,
        };
        let (ratio, outcome) = if samples_are == SamplesAre::Exact {
            exact(estimated(a).median, estimated(b).median, a.better)
        } else {
            outcome(&independent(a), &independent(b), a.better)
        };
        let (name, unit) = (a.name.clone(), a.unit);
        let intervals = [a, b].map(IntervalKind::of);
        Self { name, unit, a: estimated(a), b: estimated(b), ratio, outcome, samples_are, intervals }
    }
}

/// Computed values are exact: they differ unless they are equal.
fn exact(a: f64, b: f64, better: Better) -> (Estimate, Outcome) {
    let ratio = if a == b { 1.0 } else { b / a };
    let ratio = if ratio.is_finite() && ratio > 0.0 { ratio } else { f64::NAN };
    let outcome = match (a == b, (b > a) == (better == Better::Higher)) {
        (true, _) => Outcome::Same,
        (false, true) => Outcome::Better,
        (false, false) => Outcome::Worse,
    };
    (Estimate { median: ratio, low: ratio, high: ratio }, outcome)
}

fn outcome(a: &[f64], b: &[f64], better: Better) -> (Estimate, Outcome) {
    // Identical samples, including all zeros, are equal without a test.
    if a == b {
        return (Estimate { median: 1.0, low: 1.0, high: 1.0 }, Outcome::Same);
    }
    // A ratio needs values above zero, and a better direction does as well.
    if a.iter().chain(b).any(|sample| *sample <= 0.0) {
        let none = f64::NAN;
        return (Estimate { median: none, low: none, high: none }, Outcome::Unknown);
    }
    // The verdict depends on the interval, the outcome on the better direction as well.
    let comparison = compare(a, b);
    let outcome = match (comparison.verdict, better) {
        (Verdict::Same, _) if !tells(a.len(), b.len()) => Outcome::Unknown,
        (Verdict::Same, _) => Outcome::Same,
        (Verdict::Higher, Better::Higher) | (Verdict::Lower, Better::Lower) => Outcome::Better,
        (Verdict::Higher, Better::Lower) | (Verdict::Lower, Better::Higher) => Outcome::Worse,
    };
    (comparison.ratio, outcome)
}

/// True if this many samples could show even the clearest difference.
fn tells(a: usize, b: usize) -> bool {
    compare(&vec![1.0; a], &vec![2.0; b]).verdict != Verdict::Same
}

fn counterpart<'a>(list: &'a [Measure], of: &Measure) -> Option<&'a Measure> {
    list.iter().find(|measure| measure.name == of.name && measure.unit == of.unit)
}

/// Differing facts, except time and duration.
fn others(a: &Header, b: &Header) -> Vec<Other> {
    let (facts_a, facts_b) = (facts(a), facts(b));
    let fact = |facts: &[(&str, String)], name| {
        facts
            .iter()
            .find(|(known, _)| *known == name)
            .map_or_else(|| "-".to_owned(), |(_, fact)| fact.clone())
    };
    // Memory varies slightly with the kernel on identical machines, so it is compared with
    // tolerance.
    let differs = |name| match name {
        "Machine" => {
            let (one, other) = (&a.machine, &b.machine);
            let memory = one.memory_bytes.abs_diff(other.memory_bytes) as f64;
            let most = one.memory_bytes.max(other.memory_bytes) as f64;
            (&one.processor, one.processors) != (&other.processor, other.processors)
                || memory > most * SAME_MEMORY
        }
        "Device" => a.device != b.device,
        name => fact(&facts_a, name) != fact(&facts_b, name),
    };
    let names = ["Device", "Machine", "Kernel", "weir"].into_iter().filter(|name| differs(name));
    names.map(|what| Other { what, a: fact(&facts_a, what), b: fact(&facts_b, what) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differences(outcomes: &[(Outcome, usize)]) -> Differences {
        let estimate = Estimate { median: 1.0, low: 1.0, high: 1.0 };
        let row = |&outcome: &Outcome| Row {
            name: String::new(),
            unit: Unit::Count,
            a: estimate,
            b: estimate,
            ratio: estimate,
            outcome,
            samples_are: SamplesAre::Runs,
            intervals: [IntervalKind::Estimated; 2],
        };
        let rows = outcomes.iter().flat_map(|(outcome, count)| std::iter::repeat_n(outcome, *count)).map(row);
        Differences { rows: rows.collect(), only_a: vec![], only_b: vec![], others: vec![] }
    }

    #[test]
    fn it_is_said_whether_the_difference_is_real() {
        use Outcome::{Better, Same, Unknown, Worse};
        let cases: [(&[(Outcome, usize)], &str); 8] = [
            (&[], "No measure is in both results: there is nothing to compare."),
            (&[(Same, 1)], "No real difference: none of 1 measure differs by more than noise."),
            (
                &[(Unknown, 2)],
                "Whether there is a difference cannot be told. 2 measures have too few samples to tell, or are zero.",
            ),
            (
                &[(Unknown, 1), (Worse, 1)],
                "1 of 1 measure differs by more than noise: B is better in 0 and worse in 1. \
                 One measure has too few samples to tell, or is zero.",
            ),
            (&[(Same, 50)], "No real difference: none of 50 measures differs by more than noise."),
            (
                &[(Same, 5), (Worse, 1), (Better, 2)],
                "3 of 8 measures differ by more than noise: B is better in 2 and worse in 1.",
            ),
            (
                &[(Same, 38), (Better, 2)],
                "2 of 40 measures differ by more than noise: B is better in 2 and worse in 0. \
                 Of 40 about 2 would differ by chance alone: this is no sign of a real difference.",
            ),
            (
                &[(Same, 10), (Worse, 10)],
                "10 of 20 measures differ by more than noise: B is better in 0 and worse in 10. \
                 Of 20 about 1 would differ by chance alone: single ones among them may be no real difference.",
            ),
        ];
        for (outcomes, expected) in cases {
            assert_eq!(differences(outcomes).conclusion(), expected);
        }
    }

    #[test]
    fn what_cannot_be_told_is_not_called_the_same() {
        let of = |a: &[f64], b: &[f64]| outcome(a, b, Better::Lower).1;
        assert_eq!(of(&[1.0], &[9.0]), Outcome::Unknown);
        assert_eq!(of(&[1.0], &[1.0]), Outcome::Same);
        assert_eq!(of(&[0.0; 9], &[9.0; 9]), Outcome::Unknown);
        assert_eq!(of(&[0.0; 9], &[0.0; 9]), Outcome::Same);
        assert_eq!(of(&[1.0, 1.1, 1.2, 1.1], &[1.1, 1.2, 1.0, 1.1]), Outcome::Same);
        assert_eq!(of(&[1.0, 1.1, 1.2, 1.1], &[9.1, 9.2, 9.0, 9.1]), Outcome::Worse);
    }

    #[test]
    fn what_samples_are_decides_what_they_tell() {
        let of = |samples_are, samples: &[f64]| Measure {
            samples_are,
            ..Measure::new("it", Unit::Nanoseconds, Better::Lower, samples.to_vec())
        };
        let outcome = |are, a: &[f64], b: &[f64]| Row::new(&of(are, a), &of(are, b)).outcome;
        assert_eq!(outcome(SamplesAre::Exact, &[100.0], &[100.1]), Outcome::Worse);
        assert_eq!(outcome(SamplesAre::Exact, &[0.0], &[1.0]), Outcome::Worse);
        assert_eq!(outcome(SamplesAre::Exact, &[2.0], &[2.0]), Outcome::Same);
        assert_eq!(outcome(SamplesAre::Runs, &[100.0], &[100.1]), Outcome::Unknown);
        // A minute of one run each, with slow waves: the same machine at another time.
        let waves =
            |phase: f64| (0..60).map(move |second| 100.0 + 10.0 * (f64::from(second) / 9.0 + phase).sin());
        let (a, b): (Vec<_>, Vec<_>) = (waves(0.0).collect(), waves(2.0).collect());
        assert_eq!(outcome(SamplesAre::Seconds, &a, &b), Outcome::Same);
        let b: Vec<_> = b.iter().map(|sample| sample * 2.0).collect();
        let row = Row::new(&of(SamplesAre::Seconds, &a), &of(SamplesAre::Seconds, &b));
        assert_eq!(row.outcome, Outcome::Worse);
        let told = Differences { rows: vec![row], only_a: vec![], only_b: vec![], others: vec![] };
        assert!(told.conclusion().contains("within one run each"), "{}", told.conclusion());
        let exact = of(SamplesAre::Exact, &[1.0]);
        let rows = vec![Row::new(&exact, &of(SamplesAre::Exact, &[2.0])); 40];
        let told = Differences { rows, ..told };
        assert!(!told.conclusion().contains("chance") && told.expected_by_chance() == 0.0);
    }

    #[test]
    fn which_way_is_better_decides() {
        let measure = |unit, better, middle: f64| {
            let samples = (0..9).map(|step| middle * (1.0 + f64::from(step) / 1e3)).collect();
            Measure::new("it", unit, better, samples)
        };
        for (better, outcome) in [(Better::Higher, Outcome::Better), (Better::Lower, Outcome::Worse)] {
            let [a, b] = [1.0, 2.0].map(|middle| measure(Unit::Iops, better, middle));
            assert_eq!(Row::new(&a, &b).outcome, outcome);
            assert_ne!(Row::new(&b, &a).outcome, outcome);
            assert_eq!(Row::new(&a, &a).outcome, Outcome::Same);
        }
        let seconds = measure(Unit::Seconds, Better::Lower, 1.0);
        assert!(counterpart(&[seconds], &measure(Unit::Iops, Better::Lower, 1.0)).is_none(), "another unit");
    }
}
