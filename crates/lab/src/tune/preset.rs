//! Repeats published measurements on this machine, and reports which of their conclusions hold.
//!
//! The rows are measured in random order, round by round. A conclusion agrees only if the samples
//! show it. Figures of two machines are never compared directly: each is relative to a row of its
//! own table.

mod findings;
mod published;

use std::time::Duration;

use clap::ValueEnum;

use self::findings::PresetFindings;
use super::{
    TuneOutcome,
    choice::MARGIN,
    configurations::{DiskConfiguration, RequestPattern},
    run::{TuneRun, TuneRunParameters},
    samples::{MIN_ROUNDS, TuneSamples},
    search::{MeasurementTurn, TurnSource},
};
use crate::statistics::{RankComparison, RankVerdict, median};

/// Number of rounds of a table. A table never ends earlier: measuring until a difference shows
/// would find one by chance.
const MAX_ROUNDS: usize = 20;
/// Slices of a cell in a budget: twelve rounds with their opening and flushing.
const SLICES_PER_CELL: u32 = 48;

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Preset {
    /// Cache modes: random requests, and streams beside the raw disk
    CacheModes,
    /// Cluster sizes: streams beside the raw disk
    ClusterSize,
    /// An L2 cache for 1/128 of the disk beside one for all of it
    L2Cache,
    /// Prefetch: qemu-img bench with 1, 8 and 64 in flight, and random reads
    Pcache,
}

impl Preset {
    pub(super) fn tables(self) -> Vec<PublishedTable> {
        match self {
            Self::CacheModes => vec![published::random_by_cache_mode(), published::streams_by_cache_mode()],
            Self::ClusterSize => vec![published::streams_by_cluster_size()],
            Self::L2Cache => vec![published::random_by_l2_cache()],
            Self::Pcache => vec![published::reads_by_prefetch()],
        }
    }

    pub(super) fn clusters(self) -> Vec<u64> {
        let tables = self.tables();
        let rows = tables.iter().flat_map(|table| &table.rows);
        let mut clusters: Vec<_> =
            rows.filter_map(|row| Some(row.configuration.qcow2?.cluster_bytes)).collect();
        clusters.sort_unstable();
        clusters.dedup();
        clusters
    }

    pub(super) fn slices(self) -> u32 {
        let slices = |table: &PublishedTable| table.rows.len() * table.columns.len();
        self.tables().iter().map(slices).sum::<usize>() as u32
    }
}

#[derive(Clone, Debug)]
pub(super) struct PublishedTable {
    title: &'static str,
    columns: Vec<PublishedColumn>,
    rows: Vec<PublishedRow>,
    /// The row that all others are relative to.
    reference: &'static str,
    claims: Vec<PublishedClaim>,
}

#[derive(Clone, Debug)]
struct PublishedColumn {
    name: &'static str,
    pattern: RequestPattern,
    /// Pattern for a raw disk, which has no first writes.
    of_raw: Option<RequestPattern>,
    figure: PublishedFigure,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PublishedFigure {
    Median,
    /// The average of the fastest three of five runs; here, of three fifths of the samples.
    FastestThree,
}

#[derive(Clone, Debug)]
struct PublishedRow {
    name: String,
    configuration: DiskConfiguration,
    /// A figure for each column in the table's own unit; empty if only charts were published.
    published: Vec<f64>,
}

#[derive(Clone, Debug)]
struct PublishedClaim {
    text: &'static str,
    pairs: Vec<(String, String)>,
    column: usize,
    relation: ClaimRelation,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClaimRelation {
    Higher,
    Lower,
    NotLower,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ClaimAgreement {
    Agrees,
    NotSeen,
    Contradicted,
    NotMeasured,
}

impl PublishedColumn {
    fn new(name: &'static str, pattern: RequestPattern, figure: PublishedFigure) -> Self {
        Self { name, pattern, of_raw: None, figure }
    }

    fn of_raw(self, pattern: RequestPattern) -> Self {
        Self { of_raw: Some(pattern), ..self }
    }

    fn pattern(&self, configuration: &DiskConfiguration) -> RequestPattern {
        match self.of_raw {
            Some(pattern) if configuration.qcow2.is_none() => pattern,
            _ => self.pattern,
        }
    }
}

impl PublishedFigure {
    fn of(self, samples: &[f64]) -> f64 {
        match self {
            Self::Median => median(samples),
            Self::FastestThree => {
                let mut sorted = samples.to_vec();
                sorted.sort_unstable_by(|one, other| other.total_cmp(one));
                // At least one sample, but not more than there are.
                let count = (sorted.len() * 3 / 5).max(1).min(sorted.len());
                sorted[..count].iter().sum::<f64>() / count.max(1) as f64
            }
        }
    }
}

impl PublishedTable {
    fn row(&self, name: &str) -> Option<&PublishedRow> {
        self.rows.iter().find(|row| row.name == name)
    }

    fn samples(&self, samples: &TuneSamples, row: &str, column: usize) -> Vec<f64> {
        let Some(row) = self.row(row) else { return Vec::new() };
        samples.of(&row.configuration, &self.columns[column].pattern(&row.configuration))
    }

    fn patterns(&self, row: &PublishedRow) -> Vec<RequestPattern> {
        let mut patterns: Vec<RequestPattern> = Vec::new();
        for column in &self.columns {
            let pattern = column.pattern(&row.configuration);
            if !patterns.contains(&pattern) {
                patterns.push(pattern);
            }
        }
        patterns
    }

    fn agreement(&self, samples: &TuneSamples, claim: &PublishedClaim) -> ClaimAgreement {
        let column = &self.columns[claim.column];
        let cell = |name: &str| {
            let configuration = self.row(name)?.configuration;
            Some((configuration, column.pattern(&configuration)))
        };
        let pair_agreement = |(one, other): &(String, String)| {
            let (Some(one), Some(other)) = (cell(one), cell(other)) else {
                return ClaimAgreement::NotMeasured;
            };
            let Some(RankComparison { ratio, verdict }) =
                samples.compare_cells((&other.0, &other.1), (&one.0, &one.1))
            else {
                return ClaimAgreement::NotMeasured;
            };
            let has_enough = [one, other]
                .iter()
                .all(|(configuration, pattern)| samples.rounds(configuration, &[*pattern]) >= MIN_ROUNDS);
            // A claim is judged by the interval of the ratio, not by its median.
            match (claim.relation, verdict) {
                (ClaimRelation::Higher, RankVerdict::Higher) | (ClaimRelation::Lower, RankVerdict::Lower) => {
                    ClaimAgreement::Agrees
                }
                // The lack of a visible difference agrees only if a difference would be visible.
                (ClaimRelation::NotLower, _) if has_enough && ratio.low >= 1.0 - MARGIN => {
                    ClaimAgreement::Agrees
                }
                (_, RankVerdict::Same) => ClaimAgreement::NotSeen,
                _ => ClaimAgreement::Contradicted,
            }
        };
        // The worst pair decides: `ClaimAgreement` is ordered from best to worst.
        claim.pairs.iter().map(pair_agreement).max().unwrap_or(ClaimAgreement::NotMeasured)
    }

    fn rounds(&self, samples: &TuneSamples, without: &[DiskConfiguration]) -> usize {
        let rows = self.rows.iter().filter(|row| !without.contains(&row.configuration));
        rows.map(|row| samples.rounds(&row.configuration, &self.patterns(row))).min().unwrap_or(MAX_ROUNDS)
    }

    fn is_complete(&self, samples: &TuneSamples, without: &[DiskConfiguration]) -> bool {
        self.rounds(samples, without) >= MAX_ROUNDS
    }
}

pub(super) async fn measure(preset: Preset, parameters: TuneRunParameters) -> TuneOutcome {
    let TuneRunParameters { budget, seed, .. } = parameters;
    // Short enough that every cell has all its rounds within the budget.
    let slice = budget / (preset.slices() * SLICES_PER_CELL);
    let course = PresetCourse::new(preset, seed);
    let mut run = TuneRun::new(course, slice, parameters);
    let failed = run.measure(budget / 2, Duration::ZERO).await.err();
    run.progress.end();
    let TuneRun { course: PresetCourse { tables, samples, .. }, remarks, .. } = &run;
    let findings = PresetFindings { tables, samples, remarks }.findings();
    let text = findings::text(&findings);
    TuneOutcome { findings, text, details: serde_json::Value::Null, failed }
}

#[derive(Debug)]
struct PresetCourse {
    tables: Vec<PublishedTable>,
    clusters: Vec<u64>,
    samples: TuneSamples,
    random: fastrand::Rng,
    refused: Vec<DiskConfiguration>,
    /// Rounds started, and the remaining turns of the last.
    rounds: u32,
    queue: Vec<MeasurementTurn>,
}

impl PresetCourse {
    fn new(preset: Preset, seed: u64) -> Self {
        Self {
            tables: preset.tables(),
            clusters: preset.clusters(),
            samples: TuneSamples::default(),
            random: fastrand::Rng::with_seed(seed),
            refused: Vec::new(),
            rounds: 0,
            queue: Vec::new(),
        }
    }

    fn begin_round(&mut self) {
        let round = self.rounds;
        // Complete tables get no further rounds, so that they cannot end on a chance difference.
        let is_due = |table: &&PublishedTable| round == 0 || !table.is_complete(&self.samples, &self.refused);
        for table in self.tables.iter().filter(is_due) {
            for row in table.rows.iter().filter(|row| !self.refused.contains(&row.configuration)) {
                let mut patterns = table.patterns(row);
                self.random.shuffle(&mut patterns);
                self.queue.push(MeasurementTurn { configuration: row.configuration, patterns, round });
            }
        }
        // In random order, so that drift of the machine does not favour a row.
        self.random.shuffle(&mut self.queue);
        self.rounds += 1;
    }
}

impl TurnSource for PresetCourse {
    fn clusters(&self) -> Vec<u64> {
        self.clusters.clone()
    }

    fn next(&mut self, left: f64) -> Option<MeasurementTurn> {
        if left <= 0.0 {
            return None;
        }
        if self.queue.is_empty() {
            self.begin_round();
        }
        self.queue.pop()
    }

    fn record(&mut self, turn: &MeasurementTurn, pattern: RequestPattern, value: f64) {
        self.samples.add(turn.configuration, pattern, turn.round, value);
    }

    fn refuse(&mut self, configuration: DiskConfiguration) -> String {
        self.queue.retain(|turn| turn.configuration != configuration);
        self.refused.push(configuration);
        configuration.to_string()
    }

    fn leave_out(&mut self, cluster_bytes: u64) -> Vec<String> {
        let has_cluster_size = |row: &&PublishedRow| {
            row.configuration.qcow2.is_some_and(|qcow2| qcow2.cluster_bytes == cluster_bytes)
        };
        let rows: Vec<&PublishedRow> =
            self.tables.iter().flat_map(|table| &table.rows).filter(has_cluster_size).collect();
        self.refused.extend(rows.iter().map(|row| row.configuration));
        rows.iter().map(|row| format!("{}:", row.name)).collect()
    }

    fn is_at(&self) -> String {
        format!("round {} of {} rows", self.rounds, self.queue.len() + 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ALL: [Preset; 4] = [Preset::CacheModes, Preset::ClusterSize, Preset::L2Cache, Preset::Pcache];

    #[test]
    fn every_claim_refers_to_existing_rows_and_columns() {
        for table in ALL.into_iter().flat_map(Preset::tables) {
            assert!(table.row(table.reference).is_some(), "{}", table.title);
            for row in &table.rows {
                let count = row.published.len();
                assert!(count == 0 || count == table.columns.len(), "{}: {}", table.title, row.name);
            }
            for claim in &table.claims {
                assert!(claim.column < table.columns.len(), "{}", claim.text);
                for (one, other) in &claim.pairs {
                    assert!(table.row(one).is_some() && table.row(other).is_some(), "{}", claim.text);
                }
            }
        }
    }

    #[test]
    fn published_figures_agree_with_their_claims() {
        for table in ALL.into_iter().flat_map(Preset::tables) {
            let mut samples = TuneSamples::default();
            for row in table.rows.iter().filter(|row| !row.published.is_empty()) {
                for (column, value) in table.columns.iter().zip(&row.published) {
                    let pattern = column.pattern(&row.configuration);
                    for round in 0..8 {
                        let noise = 1.0 + f64::from(round % 3) * 0.001;
                        samples.add(row.configuration, pattern, round, value * noise);
                    }
                }
            }
            for claim in &table.claims {
                let expect = match table.rows[0].published.is_empty() {
                    true => ClaimAgreement::NotMeasured,
                    false => ClaimAgreement::Agrees,
                };
                assert_eq!(table.agreement(&samples, claim), expect, "{}", claim.text);
            }
        }
    }

    #[test]
    fn opposite_effect_differs_from_no_effect() {
        let table = published::streams_by_cluster_size();
        let claim = &table.claims[0];
        let agreement = |small: f64, large: f64| {
            let mut samples = TuneSamples::default();
            for (name, value) in [("64K", small), ("2M", large)] {
                let row = table.row(name).unwrap();
                for round in 0..8 {
                    let noise = 1.0 + f64::from(round) * 0.01;
                    samples.add(row.configuration, table.columns[2].pattern, round, value * noise);
                }
            }
            table.agreement(&samples, claim)
        };
        assert_eq!(agreement(100.0, 200.0), ClaimAgreement::Agrees);
        assert_eq!(agreement(200.0, 100.0), ClaimAgreement::Contradicted);
        assert_eq!(agreement(100.0, 100.0), ClaimAgreement::NotSeen);
    }

    #[test]
    fn no_harm_needs_enough_statistical_power() {
        let table = published::reads_by_prefetch();
        let claim = table.claims.iter().find(|claim| claim.relation == ClaimRelation::NotLower).unwrap();
        let agreement = |rounds: u32, noise: f64, factor: f64| {
            let mut samples = TuneSamples::default();
            for (name, value) in [("without", 100.0), ("with", 100.0 * factor)] {
                let row = table.row(name).unwrap();
                for round in 0..rounds {
                    let off = if name == "with" { noise * (f64::from(round % 5) - 2.0) } else { 0.0 };
                    let pattern = table.columns[claim.column].pattern;
                    samples.add(row.configuration, pattern, round, value * (1.0 + off));
                }
            }
            table.agreement(&samples, claim)
        };
        assert_eq!(agreement(5, 0.0, 1.0), ClaimAgreement::NotSeen, "five rounds show nothing");
        assert_eq!(agreement(20, 0.2, 1.0), ClaimAgreement::NotSeen, "nor does so much noise");
        assert_eq!(agreement(20, 0.01, 1.0), ClaimAgreement::Agrees);
        assert_eq!(agreement(20, 0.01, 0.8), ClaimAgreement::Contradicted);
    }

    #[test]
    fn fastest_three_of_five_are_averaged() {
        // The published runs of writethrough and their average: 577, 735, 637, 596, 574 and 656.
        let figure = PublishedFigure::FastestThree.of(&[577.0, 735.0, 637.0, 596.0, 574.0]);
        assert!((figure - 656.0).abs() < 0.5, "{figure}");
        assert!((PublishedFigure::FastestThree.of(&[7.0]) - 7.0).abs() < 1e-9);
    }
}
