//! A result file: findings of `weir bench`, `weir tune` and `weir simulate`, with machine, command
//! and samples.
//!
//! ```text
//!   bench ────┐                           ┌─► FILE.json   stored, and read by `weir report A.json B.json`
//!   tune ─────┼─► Findings ─► ResultFile ─┤
//!   simulate ─┘      +  ResultHeader      └─► FILE.html   a page (`report/`)
//! ```
//!
//! All have the same format: numbers with all samples ([`Measure`]), tables, and charts as data.
//! Reports draw only stored data. Contains no secret: the command is stored as given.

pub(crate) mod arguments;
mod file;
mod header;

pub(crate) use file::{OutputKind, check, load, save, write};
#[cfg(test)]
pub(crate) use header::MeasuredDevice;
pub(crate) use header::{HeaderStart, MachineInfo, ResultHeader};
use serde::{Deserialize, Serialize};

pub(crate) const FORMAT: &str = "weir-result";
/// Higher versions are rejected.
pub(crate) const VERSION: u32 = 1;

pub(crate) const INTERRUPTED: &str = "interrupted";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ResultFile {
    pub(crate) format: String,
    pub(crate) version: u32,
    pub(crate) header: ResultHeader,
    /// Reason why the result is incomplete; its content is valid nevertheless.
    pub(crate) partial: Option<String>,
    pub(crate) findings: Findings,
    /// Private data of one kind of result, for example to resume it.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub(crate) details: serde_json::Value,
}

impl ResultFile {
    pub(crate) fn new(header: ResultHeader, findings: Findings) -> Self {
        Self {
            format: FORMAT.to_owned(),
            version: VERSION,
            header,
            partial: None,
            findings,
            details: serde_json::Value::Null,
        }
    }

    pub(crate) fn warning(&self) -> Option<String> {
        let why = self.partial.as_ref()?;
        Some(format!("This result is not complete: {why}. The values shown were measured nevertheless."))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Findings {
    /// One paragraph each.
    #[serde(default)]
    pub(crate) summary: Vec<String>,
    /// Tables before the charts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) opening: Vec<ResultTable>,
    #[serde(default)]
    pub(crate) measures: Vec<Measure>,
    #[serde(default)]
    pub(crate) tables: Vec<ResultTable>,
    #[serde(default)]
    pub(crate) charts: Vec<Chart>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Measure {
    /// Unique in its file, and the same in every run.
    pub(crate) name: String,
    pub(crate) unit: MeasureUnit,
    pub(crate) better: Better,
    /// Not empty, all finite.
    pub(crate) samples: Vec<f64>,
    #[serde(default)]
    pub(crate) samples_are: SamplesAre,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SamplesAre {
    /// Samples of independent runs.
    #[default]
    Runs,
    /// Seconds of one run: neighbours are correlated, and the variation between runs is unknown.
    Seconds,
    /// Computed; the same in every run.
    Exact,
}

impl Measure {
    pub(crate) fn new(name: impl Into<String>, unit: MeasureUnit, better: Better, samples: Vec<f64>) -> Self {
        Self { name: name.into(), unit, better, samples, samples_are: SamplesAre::Runs }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum MeasureUnit {
    Iops,
    Bytes,
    BytesPerSecond,
    Nanoseconds,
    Seconds,
    Share,
    Ratio,
    Count,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Better {
    Higher,
    Lower,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ResultTable {
    pub(crate) title: String,
    pub(crate) columns: Vec<String>,
    pub(crate) rows: Vec<Vec<String>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
}

impl ResultTable {
    pub(crate) fn new<'a>(
        title: &str,
        columns: impl IntoIterator<Item = &'a str>,
        rows: Vec<Vec<String>>,
    ) -> Self {
        let columns = columns.into_iter().map(str::to_owned).collect();
        Self { title: title.to_owned(), columns, rows, note: None }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Chart {
    Lines(Lines),
    HeatMap(HeatMap),
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Lines {
    pub(crate) title: String,
    pub(crate) x: ChartAxis,
    pub(crate) y: ChartAxis,
    /// True for a step function.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) steps: bool,
    /// At most eight lines can be distinguished.
    pub(crate) series: Vec<ChartSeries>,
    /// Limits on the drawn series, as dashed step functions.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) limits: Vec<ChartSeries>,
    /// A sentence below the chart.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ChartAxis {
    pub(crate) label: String,
    pub(crate) unit: MeasureUnit,
    /// Requires values above 0.
    #[serde(default)]
    pub(crate) logarithmic: bool,
}

impl ChartAxis {
    pub(crate) fn new(label: &str, unit: MeasureUnit) -> Self {
        Self { label: label.to_owned(), unit, logarithmic: false }
    }

    pub(crate) fn logarithmic(self) -> Self {
        Self { logarithmic: true, ..self }
    }
}

impl Lines {
    /// Chart of the share of requests that took at most a given latency, in nanoseconds.
    pub(crate) fn distribution(title: &str, series: Vec<ChartSeries>) -> Self {
        Self {
            title: title.to_owned(),
            x: ChartAxis::new("latency", MeasureUnit::Nanoseconds).logarithmic(),
            y: ChartAxis::new("requests", MeasureUnit::Share),
            steps: true,
            series,
            limits: Vec::new(),
            note: None,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ChartSeries {
    pub(crate) name: String,
    /// x never decreases; all values are finite.
    pub(crate) points: Vec<(f64, f64)>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct HeatMap {
    pub(crate) title: String,
    pub(crate) unit: MeasureUnit,
    pub(crate) better: Better,
    pub(crate) columns: Vec<String>,
    pub(crate) rows: Vec<String>,
    /// One list for each row; `None` was not measured.
    pub(crate) values: Vec<Vec<Option<f64>>>,
    /// True for values whose difference from 1 is within noise, in the same form; empty if unknown.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) noise: Vec<Vec<bool>>,
}
