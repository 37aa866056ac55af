//! A result file: what `weir bench`, `weir tune` and `weir simulate` found, where, with what, and
//! how sure it is.
//!
//! ```text
//!   bench ────┐                           ┌─► FILE.json   kept, and read again by `weir report A.json B.json`
//!   tune ─────┼─► Findings ─► ResultFile ─┤
//!   simulate ─┘      +  Header            └─► FILE.html   one page to look at (`report/`)
//! ```
//!
//! The three have the same form, so that whatever shows or compares results needs to know none of
//! them: numbers with all their samples ([`Measure`]), tables, and charts as data. What is drawn is
//! always what is kept.
//!
//! Never holds a name or a number that was not measured or asked for, and no secret: the command is
//! kept as it was given.

pub(crate) mod arguments;
mod file;
mod header;

pub(crate) use file::{Kind, check, load, save, write};
pub(crate) use header::{Begun, Header};
#[cfg(test)]
pub(crate) use header::{Device, Machine};
use serde::{Deserialize, Serialize};

/// What a result file says of itself, so that nothing else is taken for one.
pub(crate) const FORMAT: &str = "weir-result";
/// The form of the file; one that is higher is refused.
pub(crate) const VERSION: u32 = 1;

/// Why a result is not complete that somebody ended early.
pub(crate) const INTERRUPTED: &str = "interrupted";

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ResultFile {
    pub(crate) format: String,
    pub(crate) version: u32,
    pub(crate) header: Header,
    /// Why it is not complete, for example that it was interrupted; what is there is right all the
    /// same.
    pub(crate) partial: Option<String>,
    pub(crate) findings: Findings,
    /// What one kind of result needs beyond that, for example to go on where it was interrupted;
    /// nobody else looks into it.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub(crate) details: serde_json::Value,
}

impl ResultFile {
    pub(crate) fn new(header: Header, findings: Findings) -> Self {
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
        Some(format!("This result is not complete: {why}. What is here was measured all the same."))
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Findings {
    /// What it comes to, a paragraph each.
    #[serde(default)]
    pub(crate) summary: Vec<String>,
    /// Numbers that another run's can be compared with.
    #[serde(default)]
    pub(crate) measures: Vec<Measure>,
    #[serde(default)]
    pub(crate) tables: Vec<Table>,
    #[serde(default)]
    pub(crate) charts: Vec<Chart>,
}

/// One number, and every sample that it was made of: the median counts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Measure {
    /// Unique in its file, and the same in every run of the same thing.
    pub(crate) name: String,
    pub(crate) unit: Unit,
    pub(crate) better: Better,
    /// Not empty, all finite.
    pub(crate) samples: Vec<f64>,
    #[serde(default)]
    pub(crate) samples_are: SamplesAre,
}

/// What a measure's samples are, which decides what they tell.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum SamplesAre {
    /// A run each: they differ as other runs will.
    #[default]
    Runs,
    /// Seconds of one run, or that run as a whole: what is near in time is alike, and how much
    /// another run would differ they do not tell.
    Seconds,
    /// Computed, not measured: again, it would be the same.
    Exact,
}

impl Measure {
    /// One whose samples are runs.
    pub(crate) fn new(name: impl Into<String>, unit: Unit, better: Better, samples: Vec<f64>) -> Self {
        Self { name: name.into(), unit, better, samples, samples_are: SamplesAre::Runs }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Unit {
    /// Operations per second.
    Iops,
    Bytes,
    BytesPerSecond,
    Nanoseconds,
    Seconds,
    /// From 0 to 1.
    Share,
    /// A factor of something else.
    Ratio,
    Count,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Better {
    /// Such as IOPS.
    Higher,
    /// Such as latency.
    Lower,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Table {
    pub(crate) title: String,
    pub(crate) columns: Vec<String>,
    /// As many cells each as there are columns.
    pub(crate) rows: Vec<Vec<String>>,
    /// What to know when reading it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) note: Option<String>,
}

impl Table {
    pub(crate) fn new<'a>(
        title: &str,
        columns: impl IntoIterator<Item = &'a str>,
        rows: Vec<Vec<String>>,
    ) -> Self {
        let columns = columns.into_iter().map(str::to_owned).collect();
        Self { title: title.to_owned(), columns, rows, note: None }
    }
}

/// A picture, as data.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "kebab-case")]
pub(crate) enum Chart {
    /// Something over something else, for example IOPS over time, or the share of requests over
    /// latency.
    Lines(Lines),
    HeatMap(HeatMap),
}

/// Lines over one x-axis.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Lines {
    pub(crate) title: String,
    pub(crate) x: Axis,
    pub(crate) y: Axis,
    /// One line each; at most eight can be told apart.
    pub(crate) series: Vec<Series>,
}

/// What one direction of a chart means.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Axis {
    pub(crate) label: String,
    pub(crate) unit: Unit,
    /// Each step a factor instead of a difference; all values are above 0 then.
    #[serde(default)]
    pub(crate) logarithmic: bool,
}

impl Axis {
    /// Each step a difference.
    pub(crate) fn new(label: &str, unit: Unit) -> Self {
        Self { label: label.to_owned(), unit, logarithmic: false }
    }

    /// Each step a factor.
    pub(crate) fn logarithmic(self) -> Self {
        Self { logarithmic: true, ..self }
    }
}

impl Lines {
    /// The share of requests that took no longer than so long: from 0 to 1 over nanoseconds.
    pub(crate) fn distribution(title: &str, series: Vec<Series>) -> Self {
        Self {
            title: title.to_owned(),
            x: Axis::new("latency", Unit::Nanoseconds).logarithmic(),
            y: Axis::new("requests", Unit::Share),
            series,
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct Series {
    pub(crate) name: String,
    /// (x, y), x not falling; all finite.
    pub(crate) points: Vec<(f64, f64)>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct HeatMap {
    pub(crate) title: String,
    pub(crate) unit: Unit,
    pub(crate) better: Better,
    pub(crate) columns: Vec<String>,
    pub(crate) rows: Vec<String>,
    /// As many as rows, each as many as columns; `None` was not measured.
    pub(crate) values: Vec<Vec<Option<f64>>>,
}
