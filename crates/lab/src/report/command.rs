//! `weir report`: shows a result as tables or as a page, or compares two. Never changes a result
//! file.

use std::{
    io::{IsTerminal as _, stdout},
    path::{Path, PathBuf},
};

use anyhow::anyhow;
use console::{CommandFailure, print, print_json};
use serde::Serialize;

use super::{
    NamedResult,
    differences::{DifferenceVerdict, Differences, DifferingFact},
    pictures,
    samples::{IntervalKind, estimated},
    text,
};
use crate::{
    report::arguments::ReportArgs,
    result::{
        Better, MachineInfo, Measure, MeasureUnit, OutputKind, ResultFile, ResultHeader, SamplesAre, load,
        write,
    },
    simulate::SimulationSetup,
    statistics::Estimate,
    trace::recording_charts::{self, DrawnRecording},
};

/// Shows a result, or compares two.
///
/// # Errors
/// Fails on an unusable file, or with `--fail-on-worse` on a measure that got worse.
pub fn run(arguments: ReportArgs) -> Result<(), CommandFailure> {
    // Decided by content: recordings have no fixed extension.
    if recording_charts::is_recording(&arguments.a) {
        return show_recordings(&arguments);
    }
    let not_for_results = match (&arguments.b, &arguments.config, arguments.more.first()) {
        (_, Some(_), _) => {
            Some("--config: draws limits beside a recording, and this is a result (leave it out)".to_owned())
        }
        (_, _, Some(more)) => Some(format!("{}: two results can be compared (leave it out)", more.display())),
        (Some(_), ..) if arguments.charts.is_some() => {
            Some("--charts: not supported for a comparison (name one result)".to_owned())
        }
        _ => None,
    };
    if let Some(why) = not_for_results {
        return Err(CommandFailure::Usage(anyhow!(why)));
    }
    let a = load(&arguments.a)?;
    match &arguments.b {
        Some(path) => {
            let b = load(path)?;
            let (name_a, name_b) = (name(&arguments.a), name(path));
            let a = NamedResult { name: &name_a, result: &a };
            compare(&arguments, a, NamedResult { name: &name_b, result: &b })
        }
        None => Ok(show(&arguments, &a)?),
    }
}

fn show_recordings(arguments: &ReportArgs) -> Result<(), CommandFailure> {
    for (is_given, option, instead) in [
        (arguments.json, "--json", "`weir trace info --json` has the figures of a recording"),
        (arguments.fail_on_worse, "--fail-on-worse", "recordings are not compared"),
    ] {
        if is_given {
            return Err(CommandFailure::Usage(anyhow!("{option}: not for recordings ({instead})")));
        }
    }
    // The second argument may be a recording as well.
    let paths: Vec<PathBuf> =
        [&arguments.a].into_iter().chain(&arguments.b).chain(&arguments.more).cloned().collect();
    if let Some(other) = paths.iter().find(|path| !recording_charts::is_recording(path)) {
        let why = anyhow!("{}: is no recording, unlike the first (name recordings only)", other.display());
        return Err(CommandFailure::Usage(why));
    }
    let header_start = ResultHeader::begin();
    let setup = arguments.config.as_deref().map(|path| SimulationSetup::of_config(path, None)).transpose()?;
    let limits = setup.as_ref().map(SimulationSetup::limits_by_disk);
    let DrawnRecording { findings, began_s, seconds, partial } =
        recording_charts::draw(&paths, limits.as_ref())?;
    // Time and duration of the recording; the machine that draws it is irrelevant.
    let header =
        ResultHeader { began: began_s, seconds, machine: MachineInfo::default(), ..header_start.end(None) };
    let result = ResultFile { partial, ..ResultFile::new(header, findings) };
    show(arguments, &result)?;
    match &result.partial {
        Some(why) => Err(CommandFailure::Failed(anyhow!("not read to the end: {why}"))),
        None => Ok(()),
    }
}

fn name(path: &Path) -> String {
    path.display().to_string()
}

fn show(arguments: &ReportArgs, result: &ResultFile) -> anyhow::Result<()> {
    if let Some(path) = &arguments.report {
        write(path, OutputKind::Page, &super::page(result)?)?;
    }
    if let Some(directory) = &arguments.charts {
        pictures::save(&result.findings.charts, directory)?;
    }
    if arguments.json {
        return print_json(&result_report(result));
    }
    let written: Vec<&Path> =
        [&arguments.report, &arguments.charts].into_iter().flatten().map(PathBuf::as_path).collect();
    print(&text::result(result, &written, stdout().is_terminal()))
}

fn compare(arguments: &ReportArgs, a: NamedResult<'_>, b: NamedResult<'_>) -> Result<(), CommandFailure> {
    let differences = Differences::between(a.result, b.result);
    if let Some(path) = &arguments.report {
        write(path, OutputKind::Page, &super::comparison(a, b)?)?;
    }
    if arguments.json {
        print_json(&comparison_report(&differences, a.name, b.name))?;
    } else {
        let written: Vec<&Path> = arguments.report.as_deref().into_iter().collect();
        print(&text::comparison(&differences, a, b, &written, stdout().is_terminal()))?;
    }
    // After the output, which a script may want to keep.
    if arguments.fail_on_worse && differences.count(DifferenceVerdict::Worse) > 0 {
        return Err(CommandFailure::Found(1));
    }
    Ok(())
}

/// Output of `weir report --json` for one result.
#[derive(Serialize)]
struct ResultReport<'a> {
    header: &'a ResultHeader,
    partial: Option<&'a str>,
    summary: &'a [String],
    measures: Vec<MeasureReport<'a>>,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct MeasureReport<'a> {
    name: &'a str,
    unit: MeasureUnit,
    better: Better,
    estimate: Estimate,
    /// Number of samples.
    samples: usize,
    samples_are: SamplesAre,
}

/// Output of `weir report --json` for two results.
#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct ComparisonReport<'a> {
    a: &'a str,
    b: &'a str,
    not_the_same: &'a [DifferingFact],
    measures: Vec<DifferenceReport<'a>>,
    only_in_a: &'a [String],
    only_in_b: &'a [String],
    /// Numbers of measures.
    better: usize,
    worse: usize,
    expected_by_chance: f64,
    conclusion: String,
}

#[derive(Serialize)]
#[serde(rename_all = "kebab-case")]
struct DifferenceReport<'a> {
    name: &'a str,
    unit: MeasureUnit,
    a: Estimate,
    b: Estimate,
    ratio: Estimate,
    verdict: DifferenceVerdict,
    samples_are: SamplesAre,
}

/// The estimate for JSON: without the interval of a single sample. Numbers that JSON lacks
/// (infinite, NaN) become null.
fn reported(estimate: Estimate, interval: IntervalKind) -> Estimate {
    match interval {
        IntervalKind::OneRun => Estimate { low: f64::NAN, high: f64::NAN, ..estimate },
        IntervalKind::Exact | IntervalKind::Estimated => estimate,
    }
}

fn result_report(result: &ResultFile) -> ResultReport<'_> {
    ResultReport {
        header: &result.header,
        partial: result.partial.as_deref(),
        summary: &result.findings.summary,
        measures: result.findings.measures.iter().map(measure_report).collect(),
    }
}

fn measure_report(measure: &Measure) -> MeasureReport<'_> {
    MeasureReport {
        name: &measure.name,
        unit: measure.unit,
        better: measure.better,
        estimate: reported(estimated(measure), IntervalKind::of(measure)),
        samples: measure.samples.len(),
        samples_are: measure.samples_are,
    }
}

fn comparison_report<'a>(differences: &'a Differences, a: &'a str, b: &'a str) -> ComparisonReport<'a> {
    let rows = differences.rows.iter().map(|row| DifferenceReport {
        name: &row.name,
        unit: row.unit,
        a: reported(row.a, row.intervals[0]),
        b: reported(row.b, row.intervals[1]),
        ratio: reported(row.ratio, row.intervals[0].both(row.intervals[1])),
        verdict: row.outcome,
        samples_are: row.samples_are,
    });
    ComparisonReport {
        a,
        b,
        not_the_same: &differences.differing_facts,
        measures: rows.collect(),
        only_in_a: &differences.only_a,
        only_in_b: &differences.only_b,
        better: differences.count(DifferenceVerdict::Better),
        worse: differences.count(DifferenceVerdict::Worse),
        expected_by_chance: differences.expected_by_chance(),
        conclusion: differences.conclusion(),
    }
}
