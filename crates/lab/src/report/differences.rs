//! Compares two results: measures that differ, the size of each difference, and its significance.
//!
//! Measures match by name and unit. Different machines are always pointed out.

use std::fmt::Write as _;

use serde::Serialize;

use super::{
    page::facts,
    quantity::{self, percent},
    samples::{IntervalKind, estimated, independent},
};
use crate::{
    result::{Better, Measure, MeasureUnit, ResultFile, ResultHeader, ResultTable, SamplesAre},
    statistics::{Estimate, RankVerdict, compare},
};

/// Expected share of false differences, the level of `statistics`.
const FALSE_DIFFERENCE_RATE: f64 = 0.05;
/// Number of measures from which the expected false differences are mentioned: one in twenty.
const MIN_MEASURES_FOR_NOTE: usize = 20;
/// Smaller relative differences of memory are overhead of the kernel.
const SAME_MEMORY: f64 = 0.02;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(super) enum DifferenceVerdict {
    Better,
    Worse,
    Same,
    /// Too few samples, or a division by zero.
    Unknown,
}

impl DifferenceVerdict {
    pub(super) fn text(self) -> &'static str {
        match self {
            Self::Better => "better",
            Self::Worse => "worse",
            Self::Same => "no difference",
            Self::Unknown => "unknown",
        }
    }
}

#[derive(Clone, Debug)]
pub(super) struct DifferenceRow {
    pub(super) name: String,
    pub(super) unit: MeasureUnit,
    pub(super) a: Estimate,
    pub(super) b: Estimate,
    /// B relative to A; NaN if one of them is 0.
    pub(super) ratio: Estimate,
    pub(super) outcome: DifferenceVerdict,
    pub(super) samples_are: SamplesAre,
    /// Interval kinds of A and B.
    pub(super) intervals: [IntervalKind; 2],
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub(super) struct DifferingFact {
    pub(super) what: &'static str,
    pub(super) a: String,
    pub(super) b: String,
}

#[derive(Clone, Debug)]
pub(super) struct Differences {
    pub(super) rows: Vec<DifferenceRow>,
    /// Including measures whose unit differs.
    pub(super) only_a: Vec<String>,
    pub(super) only_b: Vec<String>,
    pub(super) differing_facts: Vec<DifferingFact>,
}

impl Differences {
    pub(super) fn between(a: &ResultFile, b: &ResultFile) -> Self {
        let (list_a, list_b) = (&a.findings.measures, &b.findings.measures);
        let only_in = |list: &[Measure], other: &[Measure]| {
            let unmatched = list.iter().filter(|measure| counterpart(other, measure).is_none());
            unmatched.map(|measure| measure.name.clone()).collect()
        };
        Self {
            rows: list_a
                .iter()
                .filter_map(|one| Some(DifferenceRow::new(one, counterpart(list_b, one)?)))
                .collect(),
            only_a: only_in(list_a, list_b),
            only_b: only_in(list_b, list_a),
            differing_facts: differing_facts(&a.header, &b.header),
        }
    }

    pub(super) fn count(&self, outcome: DifferenceVerdict) -> usize {
        self.rows.iter().filter(|row| row.outcome == outcome).count()
    }

    fn decided(&self) -> usize {
        self.rows.len() - self.count(DifferenceVerdict::Unknown)
    }

    /// Number of measures in which a difference may be due to chance.
    fn decided_from_samples(&self) -> usize {
        let is_measured = |row: &&DifferenceRow| {
            row.outcome != DifferenceVerdict::Unknown && row.samples_are != SamplesAre::Exact
        };
        self.rows.iter().filter(is_measured).count()
    }

    pub(super) fn expected_by_chance(&self) -> f64 {
        self.decided_from_samples() as f64 * FALSE_DIFFERENCE_RATE
    }

    pub(super) fn conclusion(&self) -> String {
        let (decided, better, worse) =
            (self.decided(), self.count(DifferenceVerdict::Better), self.count(DifferenceVerdict::Worse));
        let measures = if decided == 1 { "measure" } else { "measures" };
        let mut text = match better + worse {
            _ if self.rows.is_empty() => {
                return "No measure is in both results: there is nothing to compare.".to_owned();
            }
            _ if decided == 0 => "No difference can be shown or excluded.".to_owned(),
            0 => format!("No real difference: none of {decided} {measures} differs by more than noise."),
            differ => format!(
                "{differ} of {decided} {measures} differ{} by more than noise: B is better in \
                 {better} and worse in {worse}.",
                if differ == 1 { "s" } else { "" }
            ),
        };
        // With many measures some differ by chance; the report states the expected number.
        let chance = self.expected_by_chance();
        let by_chance = self.decided_from_samples();
        if by_chance >= MIN_MEASURES_FOR_NOTE && better + worse > 0 {
            let _ = write!(text, " Of {by_chance} about {chance:.0} would differ by chance alone");
            text += if (better + worse) as f64 <= chance {
                ": this is no sign of a real difference."
            } else {
                ": single ones among them may be no real difference."
            };
        }
        let is_within = |row: &DifferenceRow| {
            row.samples_are == SamplesAre::Seconds && row.outcome != DifferenceVerdict::Unknown
        };
        if self.rows.iter().any(is_within) {
            text += " Some compare single runs, in which variation between runs cannot be \
                     distinguished from a real difference.";
        }
        match self.count(DifferenceVerdict::Unknown) {
            0 => {}
            1 => text += " One measure has too few samples to tell, or is zero.",
            unknown => {
                let _ = write!(text, " {unknown} measures have too few samples to tell, or are zero.");
            }
        }
        text
    }

    pub(super) fn table(&self) -> ResultTable {
        let row = |row: &DifferenceRow| {
            let estimate_text = |estimate: Estimate, interval: IntervalKind| {
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
                estimate_text(row.a, a),
                estimate_text(row.b, b),
            ]
        };
        let columns = ["measure", "B is", "difference", "between", "A", "B"];
        ResultTable::new("Measures that both have", columns, self.rows.iter().map(row).collect())
    }

    pub(super) fn facts_table(&self) -> ResultTable {
        let row = |other: &DifferingFact| vec![other.what.to_owned(), other.a.clone(), other.b.clone()];
        let note = Some("These differences alone may explain different measures.".to_owned());
        ResultTable {
            note,
            ..ResultTable::new("Not the same", ["", "A", "B"], self.differing_facts.iter().map(row).collect())
        }
    }
}

impl DifferenceRow {
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
fn exact(a: f64, b: f64, better: Better) -> (Estimate, DifferenceVerdict) {
    let ratio = if a == b { 1.0 } else { b / a };
    let ratio = if ratio.is_finite() && ratio > 0.0 { ratio } else { f64::NAN };
    let outcome = match (a == b, (b > a) == (better == Better::Higher)) {
        (true, _) => DifferenceVerdict::Same,
        (false, true) => DifferenceVerdict::Better,
        (false, false) => DifferenceVerdict::Worse,
    };
    (Estimate { median: ratio, low: ratio, high: ratio }, outcome)
}

fn outcome(a: &[f64], b: &[f64], better: Better) -> (Estimate, DifferenceVerdict) {
    // Identical samples, including all zeros, are equal without a test.
    if a == b {
        return (Estimate { median: 1.0, low: 1.0, high: 1.0 }, DifferenceVerdict::Same);
    }
    // A ratio needs values above zero, and a better direction does as well.
    if a.iter().chain(b).any(|sample| *sample <= 0.0) {
        let none = f64::NAN;
        return (Estimate { median: none, low: none, high: none }, DifferenceVerdict::Unknown);
    }
    // The verdict depends on the interval, the outcome on the better direction as well.
    let comparison = compare(a, b);
    let outcome = match (comparison.verdict, better) {
        (RankVerdict::Same, _) if !can_show_difference(a.len(), b.len()) => DifferenceVerdict::Unknown,
        (RankVerdict::Same, _) => DifferenceVerdict::Same,
        (RankVerdict::Higher, Better::Higher) | (RankVerdict::Lower, Better::Lower) => {
            DifferenceVerdict::Better
        }
        (RankVerdict::Higher, Better::Lower) | (RankVerdict::Lower, Better::Higher) => {
            DifferenceVerdict::Worse
        }
    };
    (comparison.ratio, outcome)
}

/// True if this many samples could show even the clearest difference.
fn can_show_difference(a: usize, b: usize) -> bool {
    compare(&vec![1.0; a], &vec![2.0; b]).verdict != RankVerdict::Same
}

fn counterpart<'a>(list: &'a [Measure], sought: &Measure) -> Option<&'a Measure> {
    list.iter().find(|measure| measure.name == sought.name && measure.unit == sought.unit)
}

/// Differing facts, except time and duration.
fn differing_facts(a: &ResultHeader, b: &ResultHeader) -> Vec<DifferingFact> {
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
            let larger = one.memory_bytes.max(other.memory_bytes) as f64;
            (&one.processor, one.processors) != (&other.processor, other.processors)
                || memory > larger * SAME_MEMORY
        }
        "Device" => a.device != b.device,
        name => fact(&facts_a, name) != fact(&facts_b, name),
    };
    let names = ["Device", "Machine", "Kernel", "weir"].into_iter().filter(|name| differs(name));
    names.map(|what| DifferingFact { what, a: fact(&facts_a, what), b: fact(&facts_b, what) }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn differences(outcomes: &[(DifferenceVerdict, usize)]) -> Differences {
        let estimate = Estimate { median: 1.0, low: 1.0, high: 1.0 };
        let row = |&outcome: &DifferenceVerdict| DifferenceRow {
            name: String::new(),
            unit: MeasureUnit::Count,
            a: estimate,
            b: estimate,
            ratio: estimate,
            outcome,
            samples_are: SamplesAre::Runs,
            intervals: [IntervalKind::Estimated; 2],
        };
        let rows = outcomes.iter().flat_map(|(outcome, count)| std::iter::repeat_n(outcome, *count)).map(row);
        Differences { rows: rows.collect(), only_a: vec![], only_b: vec![], differing_facts: vec![] }
    }

    #[test]
    fn significance_of_a_difference_is_reported() {
        use DifferenceVerdict::{Better, Same, Unknown, Worse};
        let cases: [(&[(DifferenceVerdict, usize)], &str); 8] = [
            (&[], "No measure is in both results: there is nothing to compare."),
            (&[(Same, 1)], "No real difference: none of 1 measure differs by more than noise."),
            (
                &[(Unknown, 2)],
                "No difference can be shown or excluded. 2 measures have too few samples to tell, \
                 or are zero.",
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
                "10 of 20 measures differ by more than noise: B is better in 0 and worse in 10. Of \
                 20 about 1 would differ by chance alone: single ones among them may be no real \
                 difference.",
            ),
        ];
        for (outcomes, expected) in cases {
            assert_eq!(differences(outcomes).conclusion(), expected);
        }
    }

    #[test]
    fn too_few_samples_are_unknown() {
        let verdict_of = |a: &[f64], b: &[f64]| outcome(a, b, Better::Lower).1;
        assert_eq!(verdict_of(&[1.0], &[9.0]), DifferenceVerdict::Unknown);
        assert_eq!(verdict_of(&[1.0], &[1.0]), DifferenceVerdict::Same);
        assert_eq!(verdict_of(&[0.0; 9], &[9.0; 9]), DifferenceVerdict::Unknown);
        assert_eq!(verdict_of(&[0.0; 9], &[0.0; 9]), DifferenceVerdict::Same);
        assert_eq!(verdict_of(&[1.0, 1.1, 1.2, 1.1], &[1.1, 1.2, 1.0, 1.1]), DifferenceVerdict::Same);
        assert_eq!(verdict_of(&[1.0, 1.1, 1.2, 1.1], &[9.1, 9.2, 9.0, 9.1]), DifferenceVerdict::Worse);
    }

    #[test]
    fn verdict_depends_on_the_kind_of_samples() {
        let measure_of = |samples_are, samples: &[f64]| Measure {
            samples_are,
            ..Measure::new("it", MeasureUnit::Nanoseconds, Better::Lower, samples.to_vec())
        };
        let outcome =
            |are, a: &[f64], b: &[f64]| DifferenceRow::new(&measure_of(are, a), &measure_of(are, b)).outcome;
        assert_eq!(outcome(SamplesAre::Exact, &[100.0], &[100.1]), DifferenceVerdict::Worse);
        assert_eq!(outcome(SamplesAre::Exact, &[0.0], &[1.0]), DifferenceVerdict::Worse);
        assert_eq!(outcome(SamplesAre::Exact, &[2.0], &[2.0]), DifferenceVerdict::Same);
        assert_eq!(outcome(SamplesAre::Runs, &[100.0], &[100.1]), DifferenceVerdict::Unknown);
        // A minute of one run each, with slow waves: the same machine at another time.
        let waves =
            |phase: f64| (0..60).map(move |second| 100.0 + 10.0 * (f64::from(second) / 9.0 + phase).sin());
        let (a, b): (Vec<_>, Vec<_>) = (waves(0.0).collect(), waves(2.0).collect());
        assert_eq!(outcome(SamplesAre::Seconds, &a, &b), DifferenceVerdict::Same);
        let b: Vec<_> = b.iter().map(|sample| sample * 2.0).collect();
        let row =
            DifferenceRow::new(&measure_of(SamplesAre::Seconds, &a), &measure_of(SamplesAre::Seconds, &b));
        assert_eq!(row.outcome, DifferenceVerdict::Worse);
        let differences =
            Differences { rows: vec![row], only_a: vec![], only_b: vec![], differing_facts: vec![] };
        assert!(differences.conclusion().contains("compare single runs"), "{}", differences.conclusion());
        let exact = measure_of(SamplesAre::Exact, &[1.0]);
        let rows = vec![DifferenceRow::new(&exact, &measure_of(SamplesAre::Exact, &[2.0])); 40];
        let differences = Differences { rows, ..differences };
        assert!(!differences.conclusion().contains("chance") && differences.expected_by_chance() == 0.0);
    }

    #[test]
    fn verdict_depends_on_the_better_direction() {
        let measure = |unit, better, middle: f64| {
            let samples = (0..9).map(|step| middle * (1.0 + f64::from(step) / 1e3)).collect();
            Measure::new("it", unit, better, samples)
        };
        for (better, outcome) in
            [(Better::Higher, DifferenceVerdict::Better), (Better::Lower, DifferenceVerdict::Worse)]
        {
            let [a, b] = [1.0, 2.0].map(|middle| measure(MeasureUnit::Iops, better, middle));
            assert_eq!(DifferenceRow::new(&a, &b).outcome, outcome);
            assert_ne!(DifferenceRow::new(&b, &a).outcome, outcome);
            assert_eq!(DifferenceRow::new(&a, &a).outcome, DifferenceVerdict::Same);
        }
        let seconds = measure(MeasureUnit::Seconds, Better::Lower, 1.0);
        assert!(
            counterpart(&[seconds], &measure(MeasureUnit::Iops, Better::Lower, 1.0)).is_none(),
            "another unit"
        );
    }
}
