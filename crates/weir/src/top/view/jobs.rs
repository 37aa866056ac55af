//! Jobs that have not concluded, and jobs that have failed, below the list.

use std::{array, ops::Range};

use api::JobReport;
use console::{
    figures,
    figures::elided,
    screen::{DIMMED, FAULT},
};
use ratatui::{
    Frame,
    layout::{Alignment, Rect},
    style::{Modifier, Style},
    text::{Line, Text},
    widgets::{Cell, Row, Table},
};

use crate::{client::report::DaemonReport, jobs};

/// Length of a bar of progress.
const BAR: usize = 10;
/// Widths of the columns from DONE to LEFT.
const FIGURES: [u16; 3] = [BAR as u16 + 5, 8, 5];
/// Relative widths of the text columns, which share the rest: JOB, DISK, KIND, GROUP, STATE and
/// HELD BY.
const TEXTS: [u16; 6] = [13, 9, 7, 9, 8, 15];
/// Text columns of [`TEXTS`] that only a wide screen has.
const WIDE_TEXTS: Range<usize> = 2..4;
/// Width of the screen from which on all columns are shown.
const WIDE: u16 = 120;
/// The screen's height divided by the greatest height of the section.
const HEIGHT_PART: u16 = 6;

/// Jobs that are shown.
fn watched(report: &DaemonReport) -> impl Iterator<Item = &JobReport> {
    report.jobs.iter().filter(|job| jobs::is_watched(job))
}

/// Height of the section, 0 without jobs.
pub(super) fn height(report: &DaemonReport, screen_height: u16) -> u16 {
    match u16::try_from(watched(report).count()).unwrap_or(u16::MAX) {
        0 => 0,
        count => count.saturating_add(1).min(screen_height / HEIGHT_PART),
    }
}

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, report: &DaemonReport) {
    let all: Vec<_> = watched(report).collect();
    if area.height == 0 || all.is_empty() {
        return;
    }
    let rows = usize::from(area.height - 1);
    // The last line has the number of jobs that do not fit.
    let shown = if all.len() > rows { rows.saturating_sub(1) } else { rows };
    let texts = text_widths(area.width);
    let columns: [_; 9] = [
        ("  JOB", texts[0]),
        ("DISK", texts[1]),
        ("KIND", texts[2]),
        ("GROUP", texts[3]),
        ("STATE", texts[4]),
        ("DONE", FIGURES[0]),
        ("RATE", FIGURES[1]),
        ("LEFT", FIGURES[2]),
        ("HELD BY", texts[5]),
    ];
    let is_shown = |index: &usize| columns[*index].1 > 0;
    let heading = |index: usize| match columns[index].0 {
        title @ ("RATE" | "LEFT") => right(title.to_owned()),
        title => Cell::from(title),
    };
    let headings: Vec<_> = (0..columns.len()).filter(is_shown).map(heading).collect();
    let widths: Vec<_> = columns.iter().map(|(_, width)| *width).filter(|width| *width > 0).collect();
    let rows = all.iter().take(shown).map(|job| row(job, texts));
    let table = Table::new(rows, widths).header(Row::new(headings).style(Modifier::BOLD)).column_spacing(1);
    frame.render_widget(table, area);
    if shown < all.len() {
        let line = Rect { y: area.y + area.height - 1, height: 1, ..area };
        let rest = figures::counted((all.len() - shown) as u64, "more job");
        frame.render_widget(Line::styled(format!("  {rest} (weir jobs)"), DIMMED), line);
    }
}

/// Widths of the text columns; 0 for those that are not shown.
fn text_widths(width: u16) -> [u16; 6] {
    let is_shown = |index: usize| width >= WIDE || !WIDE_TEXTS.contains(&index);
    let parts: u16 = (0..TEXTS.len()).filter(|index| is_shown(*index)).map(|index| TEXTS[index]).sum();
    let spaces = (0..TEXTS.len()).filter(|index| is_shown(*index)).count() + FIGURES.len() - 1;
    let rest = width.saturating_sub(FIGURES.iter().sum::<u16>() + spaces as u16);
    array::from_fn(|index| if is_shown(index) { rest * TEXTS[index] / parts } else { 0 })
}

fn row(job: &JobReport, texts: [u16; 6]) -> Row<'static> {
    let state = super::truncated(Line::from(jobs::state(job)), texts[4]);
    let group = job.group.as_deref().unwrap_or("-");
    let done = jobs::done_ratio(job);
    let text =
        |text: &str, index: usize| (texts[index] > 0).then(|| Cell::from(elided(text, texts[index].into())));
    let id = elided(&job.id, usize::from(texts[0]).saturating_sub(2));
    let cells = [
        text(&format!("  {id}"), 0),
        text(&job.disk, 1),
        text(&job.kind, 2),
        text(group, 3),
        Some(Cell::from(state)),
        Some(Cell::from(format!("{} {:>4}", bar(done), figures::share(done)))),
        Some(right(jobs::rate(job))),
        Some(right(jobs::remaining_time(job))),
        Some(Cell::from(super::rows::limit_within(&jobs::held_by(job), texts[5].into()))),
    ];
    Row::new(cells.into_iter().flatten()).style(if job.error.is_some() { FAULT } else { Style::default() })
}

/// Bar of progress; full only at the end.
fn bar(ratio: f64) -> String {
    let full = ((ratio * BAR as f64) as usize).min(BAR);
    "█".repeat(full) + &"░".repeat(BAR - full)
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Text::from(text).alignment(Alignment::Right))
}
