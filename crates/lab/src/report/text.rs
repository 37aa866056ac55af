//! Results on a terminal: the page's tables, and the titles of charts. Control characters in a
//! result file are never printed.

use std::{fmt::Write as _, path::Path};

use console::table;

use super::{NamedResult, columns, differences::Differences, html::clean, page};
use crate::result::{Chart, ResultFile, ResultTable};

/// Formats a result. `written` lists the page and the directory of charts, if they were written.
pub(super) fn result(result: &ResultFile, written: &[&Path], bold: bool) -> String {
    let ResultFile { header, findings, .. } = result;
    let mut text = format!("{}\n", clean(&page::command(header)));
    for (name, fact) in page::facts(header) {
        let _ = writeln!(text, "{name:<8} {}", clean(&fact));
    }
    if let Some(warning) = result.warning() {
        let _ = writeln!(text, "\n{}", clean(&warning));
    }
    for table in &findings.opening {
        text += &titled(table, bold);
    }
    for paragraph in &findings.summary {
        let _ = writeln!(text, "\n{}", clean(paragraph.trim_end()));
    }
    for table in &findings.tables {
        text += &titled(table, bold);
    }
    text += &titled(&page::measures(&findings.measures), bold);
    // A terminal shows the titles of the charts only.
    let charts: Vec<String> = findings.charts.iter().map(|chart| clean(chart_title(chart))).collect();
    if !charts.is_empty() {
        let how = if written.is_empty() { ", which --report FILE.html and --charts DIR draw" } else { "" };
        let _ = writeln!(text, "\nCharts{how}: {}", charts.join("; "));
    }
    text + &written_files(written)
}

/// A line for each file or directory that was written.
fn written_files(written: &[&Path]) -> String {
    let line = |path: &&Path| format!("Written: {}\n", clean(&path.display().to_string()));
    let lines: String = written.iter().map(line).collect();
    if lines.is_empty() { lines } else { format!("\n{lines}") }
}

pub(super) fn comparison(
    differences: &Differences,
    a: NamedResult<'_>,
    b: NamedResult<'_>,
    written: &[&Path],
    bold: bool,
) -> String {
    let mut text = String::new();
    for (letter, NamedResult { name, result }) in [("A", a), ("B", b)] {
        let command = page::command(&result.header);
        let _ = writeln!(text, "{letter}: {} ({})", clean(name), clean(&command));
    }
    for warning in warnings(a, b) {
        let _ = writeln!(text, "{}", clean(&warning));
    }
    text += &titled(&differences.facts_table(), bold);
    text += &titled(&differences.table(), bold);
    for (letter, only) in [("A", &differences.only_a), ("B", &differences.only_b)] {
        for (index, name) in only.iter().enumerate() {
            let separator = if index == 0 { "\n" } else { "" };
            let _ = writeln!(text, "{separator}only in {letter}: {}", clean(name));
        }
    }
    let _ = writeln!(text, "\n{}", differences.conclusion());
    text + &written_files(written)
}

pub(super) fn warnings(a: NamedResult<'_>, b: NamedResult<'_>) -> Vec<String> {
    let warning = |letter, NamedResult { name, result }: NamedResult<'_>| {
        let why = result.partial.as_ref()?;
        Some(format!("{letter} ({name}) is not complete: {why}."))
    };
    [warning("A", a), warning("B", b)].into_iter().flatten().collect()
}

pub(super) fn chart_title(chart: &Chart) -> &str {
    match chart {
        Chart::Lines(lines) => &lines.title,
        Chart::HeatMap(map) => &map.title,
    }
}

fn titled(shown: &ResultTable, bold: bool) -> String {
    let columns = shown.columns.iter().map(String::as_str).zip(columns::sides(shown));
    let mut table = table::TextTable::new(columns.collect::<Vec<_>>());
    for row in &shown.rows {
        let line =
            |column, number| row.get(column).and_then(|cell: &String| cell.lines().nth(number)).unwrap_or("");
        // A cell with several lines becomes several rows of the terminal's table.
        let lines = row.iter().map(|cell| cell.lines().count()).max().unwrap_or(0);
        for number in 0..lines.max(1) {
            table.row((0..shown.columns.len()).map(|column| line(column, number).to_owned()).collect());
        }
    }
    if shown.rows.is_empty() {
        return String::new();
    }
    let note = shown.note.as_ref().map(|note| clean(note) + "\n").unwrap_or_default();
    let title = if shown.title.is_empty() { String::new() } else { clean(&shown.title) + "\n" };
    format!("\n{title}{}{note}", table.render(bold))
}
