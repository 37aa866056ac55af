//! A published table with the figures of this machine, and the conclusions that agree. Each figure
//! is relative to a row of the same table.

use console::{figures, table};

use super::{ClaimAgreement, ClaimRelation, PublishedTable};
use crate::{
    result::{Better, Chart, Findings, HeatMap, Measure, MeasureUnit, ResultTable},
    tune::samples::TuneSamples,
};

#[derive(Debug)]
pub(super) struct PresetFindings<'a> {
    pub(super) tables: &'a [PublishedTable],
    pub(super) samples: &'a TuneSamples,
    pub(super) remarks: &'a [String],
}

impl PresetFindings<'_> {
    pub(super) fn findings(&self) -> Findings {
        let mut findings = Findings::default();
        for published in self.tables {
            let claims = self.claims(published);
            findings.summary.extend(
                claims.rows.iter().map(|row| format!("{}: \"{}\": {}.", published.title, row[0], row[1])),
            );
            findings.tables.extend([self.table(published), claims]);
            findings.charts.push(Chart::HeatMap(self.heat_map(published)));
            findings.measures.extend(self.measures(published));
        }
        findings.summary.extend(self.remarks.iter().cloned());
        findings
    }

    fn ratios(&self, published: &PublishedTable, row: usize, column: usize) -> (Option<f64>, Option<f64>) {
        let figure = published.columns[column].figure;
        let samples = |name: &str| published.samples(self.samples, name, column);
        let (values, base) = (samples(&published.rows[row].name), samples(published.reference));
        let measured =
            (!values.is_empty() && !base.is_empty()).then(|| figure.of(&values) / figure.of(&base));
        let published_of = |row: &super::PublishedRow| row.published.get(column).copied();
        // Published ratios are relative to the same row as the measured ones.
        let published_ratio =
            published_of(&published.rows[row]).zip(published.row(published.reference).and_then(published_of));
        (published_ratio.map(|(value, base)| value / base), measured)
    }

    fn table(&self, published: &PublishedTable) -> ResultTable {
        let reference = published.reference;
        let heads = published.columns.iter().flat_map(|column| {
            [format!("{}: IOPS", column.name), "beside".to_owned(), "published".to_owned()]
        });
        let row = |index: usize| {
            let name = published.rows[index].name.clone();
            let cells = (0..published.columns.len()).flat_map(|column| {
                let samples = published.samples(self.samples, &name, column);
                let measured = (!samples.is_empty()).then(|| published.columns[column].figure.of(&samples));
                let (published_ratio, ratio) = self.ratios(published, index, column);
                [measured.map_or_else(dash, figures::count), shown(ratio), shown(published_ratio)]
            });
            std::iter::once(name.clone()).chain(cells).collect()
        };
        ResultTable {
            title: published.title.to_owned(),
            columns: std::iter::once(String::new()).chain(heads).collect(),
            rows: (0..published.rows.len()).map(row).collect(),
            note: Some(format!(
                "\"beside\" and \"published\" are ratios to the row {reference}, here and there."
            )),
        }
    }

    fn claims(&self, published: &PublishedTable) -> ResultTable {
        let row = |claim: &super::PublishedClaim| {
            let verdict = match (published.agreement(self.samples, claim), claim.relation) {
                (ClaimAgreement::Agrees, ClaimRelation::NotLower) => "agrees (no harm above 5 %)",
                (ClaimAgreement::Agrees, _) => "agrees",
                (ClaimAgreement::Contradicted, _) => "does not agree: the opposite was measured",
                (ClaimAgreement::NotSeen, ClaimRelation::NotLower) => {
                    "undecided: more rounds are needed to rule out harm"
                }
                (ClaimAgreement::NotSeen, _) => "does not agree: no difference beyond noise was measured",
                (ClaimAgreement::NotMeasured, _) => "not measured",
            };
            vec![claim.text.to_owned(), verdict.to_owned()]
        };
        let title = format!("{}: conclusions", published.title);
        ResultTable::new(&title, ["Conclusion", "Here"], published.claims.iter().map(row).collect())
    }

    fn heat_map(&self, published: &PublishedTable) -> HeatMap {
        let columns = published.columns.iter();
        let row = |row: usize| {
            let columns = 0..published.columns.len();
            columns.flat_map(|column| <[_; 2]>::from(self.ratios(published, row, column))).collect()
        };
        HeatMap {
            title: format!("{}, beside {}", published.title, published.reference),
            unit: MeasureUnit::Ratio,
            better: Better::Higher,
            columns: columns
                .flat_map(|column| [format!("{}, published", column.name), format!("{}, here", column.name)])
                .collect(),
            rows: published.rows.iter().map(|row| row.name.clone()).collect(),
            values: (0..published.rows.len()).map(row).collect(),
            noise: Vec::new(),
        }
    }

    fn measures(&self, published: &PublishedTable) -> Vec<Measure> {
        let mut measures = Vec::new();
        for row in &published.rows {
            for (index, column) in published.columns.iter().enumerate() {
                let samples = published.samples(self.samples, &row.name, index);
                if !samples.is_empty() {
                    let name = format!("{}: {}: {}", published.title, row.name, column.name);
                    measures.push(Measure::new(name, MeasureUnit::Iops, Better::Higher, samples));
                }
            }
        }
        measures
    }
}

pub(super) fn text(findings: &Findings) -> String {
    let mut text = String::new();
    for found in &findings.tables {
        // The published table has many long headings, so a terminal shows them as a row.
        let count = found.columns.len();
        let sides = (0..count).map(|index| {
            (
                "",
                if index == 0 || count == 2 {
                    table::ColumnAlignment::Left
                } else {
                    table::ColumnAlignment::Right
                },
            )
        });
        let mut shown = table::TextTable::new(sides.collect::<Vec<_>>());
        shown.row(found.columns.clone());
        found.rows.iter().for_each(|row| shown.row(row.clone()));
        text += &format!("{}{}\n", found.title, shown.render(false));
        if let Some(note) = &found.note {
            text += &format!("{note}\n\n");
        }
    }
    text
}

fn shown(ratio: Option<f64>) -> String {
    ratio.map_or_else(dash, |ratio| format!("{ratio:.2}"))
}

fn dash() -> String {
    "-".to_owned()
}
