//! A run's result: paragraphs, numbers, tables, charts. All figures derive from the samples.

use console::{figures, table};

use super::{
    apply::AppliedDisk,
    choice::{GoalChoice, rule},
    configurations::{DiskConfiguration, RequestPattern},
    goal::TuneGoal,
    recommend::{Recommendation, percent},
    search::ConfigurationSearch,
};
use crate::{
    result::{
        Better, Chart, ChartAxis, ChartSeries, Findings, HeatMap, Lines, Measure, MeasureUnit, ResultTable,
    },
    statistics::{RankComparison, RankVerdict, estimate, median, steady},
};

const NOTE: &str = "Operations per second, medians with the interval of 95 %. Reads begin with an \
                    empty page cache, rereads hit it. A write counts once a flush at \
                    the end of its slice is answered. First writes go to an empty overlay over a \
                    backing file.";

#[derive(Clone, Debug)]
pub(super) struct ColdCacheCurve {
    pub(super) configuration: DiskConfiguration,
    /// (seconds, operations per second).
    pub(super) points: Vec<(f64, f64)>,
}

#[derive(Debug)]
pub(super) struct TuneFindings<'a> {
    pub(super) search: &'a ConfigurationSearch,
    pub(super) growth: &'a [ColdCacheCurve],
    pub(super) remarks: &'a [String],
    pub(super) target: AppliedDisk<'a>,
}

impl TuneFindings<'_> {
    pub(super) fn recommendations(&self) -> Vec<Recommendation> {
        let choices = self.search.choices();
        choices.iter().map(|choice| self.recommendation(choice)).collect()
    }

    fn recommendation(&self, choice: &GoalChoice) -> Recommendation {
        let search = self.search;
        Recommendation::new(choice, &search.samples, &search.patterns, &search.space, self.target)
    }

    pub(super) fn findings(&self) -> Findings {
        let recommendations = self.recommendations();
        let opening = (!recommendations.is_empty()).then(|| recommended(&recommendations));
        let mut tables = vec![self.scores()];
        tables.extend(recommendations.iter().map(apply));
        tables.extend(self.search.patterns.iter().filter_map(|pattern| self.pattern(pattern)));
        Findings {
            opening: opening.into_iter().collect(),
            summary: self.remarks.to_vec(),
            measures: self.measures(),
            tables,
            charts: self.charts(),
        }
    }

    pub(super) fn text(&self, bold: bool) -> String {
        let mut text = String::new();
        let ResultTable { columns, rows, .. } = self.scores();
        // On a terminal only the goals are columns.
        let goals = TuneGoal::ALL.map(|goal| goal.name().to_uppercase());
        let numbers: Vec<_> = std::iter::once("ROUNDS").chain(goals.iter().map(String::as_str)).collect();
        let heads = table::columns(&["CONFIGURATION"], &numbers);
        if columns.len() == heads.len() {
            let mut shown = table::TextTable::new(heads);
            rows.into_iter().for_each(|row| shown.row(row));
            text += &shown.render(bold);
        }
        let recommendations = self.recommendations();
        for (index, recommendation) in recommendations.iter().enumerate() {
            text += &format!("\n{}\n", recommendation.sentence());
            let is_same = |earlier: &&Recommendation| earlier.configuration == recommendation.configuration;
            // Equal configurations have equal commands, which are printed once.
            if let Some(earlier) = recommendations[..index].iter().find(is_same) {
                text += &format!("  with the same options as for {}\n", earlier.goal.name());
                continue;
            }
            for (purpose, line) in recommendation.how() {
                let line = line.replace('\n', &format!("\n{:12}", ""));
                text += &format!("  {purpose:<9} {line}\n");
            }
        }
        text += &match recommendations.as_slice() {
            [] => "Nothing was measured.\n".to_owned(),
            all => format!("\n{}\n", rule(all.iter().all(|one| one.settled))),
        };
        for remark in self.remarks {
            text += &format!("{remark}\n");
        }
        text
    }

    /// The default, then all others by speed for the goal that includes every pattern.
    fn ordered(&self) -> Vec<DiskConfiguration> {
        let search = self.search;
        let (scores, default) = (search.scores(), search.space.default_configuration());
        let mut ordered = search.samples.configurations.clone();
        let score = |configuration: &DiskConfiguration| {
            let quotients = scores.of(TuneGoal::Balanced, configuration);
            if quotients.is_empty() { f64::NEG_INFINITY } else { median(&quotients) }
        };
        // The sort is stable: equal scores keep the order of the first sample.
        ordered.sort_by(|one, other| {
            let is_default = |configuration: &DiskConfiguration| *configuration == default;
            is_default(other).cmp(&is_default(one)).then(score(other).total_cmp(&score(one)))
        });
        ordered
    }

    fn scores(&self) -> ResultTable {
        let search = self.search;
        let scores = search.scores();
        let row = |configuration: &DiskConfiguration| {
            let score_of = |goal: TuneGoal| {
                let quotients = scores.of(goal, configuration);
                match (quotients.is_empty(), goal.allows(configuration.cache)) {
                    (true, _) => "-".to_owned(),
                    (false, allowed) => {
                        let text = format!("{:.2}", median(&quotients));
                        if allowed { text } else { format!("({text})") }
                    }
                }
            };
            let rounds = search.samples.rounds(configuration, &search.patterns);
            [configuration.to_string(), rounds.to_string()]
                .into_iter()
                .chain(TuneGoal::ALL.map(score_of))
                .collect()
        };
        let columns = ["Configuration", "Rounds"].into_iter().chain(TuneGoal::ALL.map(TuneGoal::name));
        let rows = self.ordered().iter().map(row).collect();
        let note = "The geometric mean over what counts for the goal, by quotients of the same round; \
                    1 is as fast as the default. In brackets: not safe enough for the goal.";
        ResultTable {
            note: Some(note.to_owned()),
            ..ResultTable::new("Speed beside the default", columns, rows)
        }
    }

    fn pattern(&self, pattern: &RequestPattern) -> Option<ResultTable> {
        let samples = &self.search.samples;
        let default = self.search.space.default_configuration();
        let row = |configuration: &DiskConfiguration| {
            let values = samples.of(configuration, pattern);
            if values.is_empty() {
                return None;
            }
            let all = estimate(&values);
            let default_comparison = samples.compare_cells((&default, pattern), (configuration, pattern));
            let [median, low, high] = [all.median, all.low, all.high].map(figures::count);
            let cells = vec![
                configuration.to_string(),
                median,
                format!("{low} to {high}"),
                default_comparison.map_or_else(String::new, |comparison| versus_default(&comparison)),
                values.len().to_string(),
            ];
            Some((all.median, cells))
        };
        let mut rows: Vec<_> = samples.configurations.iter().filter_map(row).collect();
        // The fastest first.
        rows.sort_by(|(one, _), (other, _)| other.total_cmp(one));
        let rows: Vec<_> = rows.into_iter().map(|(_, cells)| cells).collect();
        let columns = ["Configuration", "IOPS", "Interval", "Beside the default", "Samples"];
        let title = pattern.to_string();
        (!rows.is_empty())
            .then(|| ResultTable { note: Some(NOTE.to_owned()), ..ResultTable::new(&title, columns, rows) })
    }

    fn measures(&self) -> Vec<Measure> {
        let samples = &self.search.samples;
        let mut measures = Vec::new();
        for configuration in &samples.configurations {
            for pattern in &self.search.patterns {
                let samples = samples.of(configuration, pattern);
                if !samples.is_empty() {
                    let name = format!("{configuration}: {pattern}");
                    measures.push(Measure::new(name, MeasureUnit::Iops, Better::Higher, samples));
                }
            }
        }
        measures
    }

    fn charts(&self) -> Vec<Chart> {
        let samples = &self.search.samples;
        let default = self.search.space.default_configuration();
        let patterns = &self.search.patterns;
        let compared = |configuration: &DiskConfiguration| {
            let cell = |pattern| samples.compare_cells((&default, pattern), (configuration, pattern));
            patterns.iter().map(cell).collect()
        };
        let ordered = self.ordered();
        let cells: Vec<Vec<Option<RankComparison>>> = ordered.iter().map(compared).collect();
        let value = |cell: &Option<RankComparison>| cell.as_ref().map(|comparison| comparison.ratio.median);
        let is_noise = |cell: &Option<RankComparison>| {
            cell.as_ref().is_some_and(|comparison| comparison.verdict == RankVerdict::Same)
        };
        let mut charts = Vec::new();
        if !samples.configurations.is_empty() {
            charts.push(Chart::HeatMap(HeatMap {
                title: "Speed beside the default, by pattern".to_owned(),
                unit: MeasureUnit::Ratio,
                better: Better::Higher,
                columns: patterns.iter().map(ToString::to_string).collect(),
                rows: ordered.iter().map(ToString::to_string).collect(),
                values: cells.iter().map(|row| row.iter().map(value).collect()).collect(),
                noise: cells.iter().map(|row| row.iter().map(is_noise).collect()).collect(),
            }));
        }
        if !self.growth.is_empty() {
            charts.push(Chart::Lines(self.growth_chart()));
        }
        charts
    }

    fn growth_chart(&self) -> Lines {
        let series = |growth: &ColdCacheCurve| {
            let rates: Vec<_> = growth.points.iter().map(|&(_, rate)| rate).collect();
            let steady = steady(&rates);
            // The start of the steady part shows how long the cache takes to warm up.
            let begins = growth.points.get(steady.start).map_or(0.0, |&(at, _)| at);
            ChartSeries {
                name: format!("{} (steady from {begins:.1} s)", growth.configuration),
                points: growth.points.clone(),
            }
        };
        Lines {
            title: "Random reads of 4K from a cold L2 cache".to_owned(),
            x: ChartAxis::new("Time", MeasureUnit::Seconds),
            y: ChartAxis::new("Operations per second", MeasureUnit::Iops),
            steps: false,
            limits: Vec::new(),
            note: None,
            series: self.growth.iter().map(series).collect(),
        }
    }
}

fn versus_default(comparison: &RankComparison) -> String {
    match comparison.verdict {
        RankVerdict::Same => "no difference".to_owned(),
        RankVerdict::Higher | RankVerdict::Lower => percent(&comparison.ratio),
    }
}

fn recommended(recommendations: &[Recommendation]) -> ResultTable {
    let columns = ["For", "Use", "A power failure loses", "Gains", "Costs"];
    let rows = recommendations.iter().map(Recommendation::row).collect();
    let settled = recommendations.iter().all(|recommendation| recommendation.settled);
    ResultTable { note: Some(rule(settled)), ..ResultTable::new("Recommended", columns, rows) }
}

fn apply(recommendation: &Recommendation) -> ResultTable {
    let title = format!("For {}: {}", recommendation.goal.name(), recommendation.configuration);
    let rows =
        recommendation.how().into_iter().map(|(purpose, line)| vec![purpose.to_owned(), line]).collect();
    ResultTable::new(&title, ["For", "What to type"], rows)
}
