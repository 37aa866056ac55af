//! Presentation of results: an HTML page, a table on a terminal, and a comparison of two results.
//!
//! ```text
//!                    ┌─► page ─────┬─► lines ──────┐
//!   ResultFile ──────┤             ├─► heat_map ───┼─► drawing (plotters) ─► SVG in the page
//!   two of them ─► differences ────┴─► intervals ──┘      palette, axis, quantity
//!                    └─► text (a terminal)
//! ```
//!
//! Measures nothing and shows only the content of the file, so a file can be drawn again years
//! later on another machine.

mod arguments;
mod axis;
mod columns;
mod command;
mod differences;
mod drawing;
mod heat_map;
mod html;
mod intervals;
mod lines;
mod page;
mod palette;
mod pictures;
mod quantity;
mod samples;
mod save;
mod text;

pub use arguments::{EXAMPLES, ReportArgs};
pub use command::run;
use differences::Differences;
use page::ReportPage;

use super::result::ResultFile;

pub(crate) fn page(result: &ResultFile) -> anyhow::Result<String> {
    let ResultFile { header, findings, .. } = result;
    let mut page = ReportPage::new(&title(result));
    page.command(header);
    // Before the results, so that it is not overlooked.
    if let Some(warning) = result.warning() {
        page.warning(&warning);
    }
    for table in &findings.opening {
        page.table(table);
    }
    page.summary(&findings.summary);
    for chart in &findings.charts {
        page.chart(chart)?;
    }
    for table in &findings.tables {
        page.table(table);
    }
    if !findings.measures.is_empty() {
        page.heading("Numbers that other runs can be compared with");
        page.measures(&findings.measures);
    }
    page.heading("Where and how");
    page.facts(header);
    Ok(page.finish())
}

/// A result, and the name of its file.
#[derive(Clone, Copy)]
struct NamedResult<'a> {
    name: &'a str,
    result: &'a ResultFile,
}

fn comparison(a: NamedResult<'_>, b: NamedResult<'_>) -> anyhow::Result<String> {
    let differences = Differences::between(a.result, b.result);
    let mut page = ReportPage::new(&format!("{} beside {}", b.name, a.name));
    page.summary(&[differences.conclusion()]);
    for text in text::warnings(a, b) {
        page.warning(&text);
    }
    if !differences.differing_facts.is_empty() {
        page.table(&differences.facts_table());
    }
    if let Some(drawn) = intervals::html(&differences.rows)? {
        page.figure(
            "B in terms of A: to the right of 1× it is higher. Blue is better, orange worse, \
             hollow no difference.",
            &drawn,
        );
    }
    if !differences.rows.is_empty() {
        page.table(&differences.table());
    }
    for (name, only) in [("A", &differences.only_a), ("B", &differences.only_b)] {
        if !only.is_empty() {
            page.summary(&[format!("Only in {name}: {}.", only.join(", "))]);
        }
    }
    for (letter, NamedResult { name, result }) in [("A", a), ("B", b)] {
        page.heading(&format!("{letter}: {name}"));
        page.command(&result.header);
        page.facts(&result.header);
    }
    Ok(page.finish())
}

fn title(result: &ResultFile) -> String {
    let header = &result.header;
    // The first word is the program's name, the second the command.
    let name = header.command.get(1).filter(|argument| !argument.starts_with('-'));
    let name = match name.map(String::as_str) {
        Some("report") => "Recording".to_owned(),
        Some(name) => format!("weir {name}"),
        None => "weir".to_owned(),
    };
    match &header.device {
        Some(device) => format!("{name} on {}", device.node),
        None => name,
    }
}

#[cfg(test)]
mod tests;
