//! Layout of `weir top`.
//!
//! ```text
//!   title      the daemon and its uptime
//!   list       disks and groups, as many as fit
//!   jobs       those that have not concluded or have failed, if there are any
//!   charts     operations and bytes of the selected row, with its limits as lines
//!   details    its settings, waits and prefetching
//!   keys       or the result of the last action
//! ```

mod charts;
mod details;
mod jobs;
mod rows;
mod windows;

use console::{
    figures,
    screen::{self, DIMMED, FAULT},
};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::Modifier,
    text::{Line, Span},
};

use super::state::{TopMode, TopState};

pub(super) fn draw(frame: &mut Frame<'_>, state: &mut TopState) {
    if !screen::has_room(frame, "weir top") {
        return;
    }
    let area = frame.area();
    let job_rows = jobs::height(&state.report, area.height);
    // A third for the charts, but at least seven rows for the list. Jobs take rows of the charts.
    let charts = (area.height / 3).clamp(9, 20) - job_rows;
    let [title, list, jobs, pictures, facts, keys] = Layout::vertical([
        Constraint::Length(1),
        Constraint::Min(8),
        Constraint::Length(job_rows),
        Constraint::Length(charts),
        Constraint::Length(5),
        Constraint::Length(1),
    ])
    .areas(area);
    // Set at each drawing, because PgDn moves by the number of rows that the list shows.
    state.page_rows = usize::from(list.height.saturating_sub(1)).max(1);
    draw_title(frame, title, state);
    rows::draw(frame, list, state);
    jobs::draw(frame, jobs, &state.report);
    let all = state.rows();
    if let Some(row) = all.get(state.selected_row(&all)) {
        charts::draw(frame, pictures, state, row);
        details::draw(frame, facts, state, row);
    }
    draw_keys(frame, keys, state);
    match &state.mode {
        TopMode::List | TopMode::Filter(_) => {}
        TopMode::Edit(edit) => windows::draw_edit(frame, area, edit),
        TopMode::Help => screen::help(frame, windows::HELP),
    }
}

fn draw_title(frame: &mut Frame<'_>, area: Rect, state: &TopState) {
    let TopState { report, target, query_error, .. } = state;
    let name = Span::styled(format!(" weir {} ", report.version), Modifier::BOLD);
    let line = match query_error {
        Some(error) => Line::from(vec![name, Span::styled(format!("no response, retrying: {error}"), FAULT)]),
        None => {
            let (disks, groups) = (count(report.disks.len(), "disk"), count(report.groups.len(), "group"));
            let age = figures::age(report.uptime_ns);
            let last = match state.rates.interval_ns {
                0 => String::new(),
                interval_ns => format!(" · last {}", figures::time(interval_ns)),
            };
            let facts = format!("· up {age} · {disks}, {groups}{last} · {target}");
            Line::from(vec![name, Span::raw(facts)])
        }
    };
    frame.render_widget(truncated(line, area.width), area);
}

/// Truncates a line to the width, with an ellipsis.
fn truncated(line: Line<'static>, width: u16) -> Line<'static> {
    let width = usize::from(width);
    if line.width() <= width {
        return line;
    }
    let mut left = width.saturating_sub(1);
    let mut spans = Vec::new();
    'cut: for span in line.spans {
        let mut text = String::new();
        for character in span.content.chars() {
            // East Asian characters take two columns.
            let wide = Span::raw(character.to_string()).width();
            if wide > left {
                text.push('…');
                spans.push(Span::styled(text, span.style));
                break 'cut;
            }
            left -= wide;
            text.push(character);
        }
        spans.push(Span::styled(text, span.style));
    }
    Line { spans, ..line }
}

fn count(number: usize, noun: &str) -> String {
    figures::counted(number as u64, noun)
}

fn draw_keys(frame: &mut Frame<'_>, area: Rect, state: &TopState) {
    let line = match (&state.mode, &state.notice) {
        (TopMode::Filter(field), _) => {
            let (text, column) = field.window(usize::from(area.width).saturating_sub(10));
            frame.set_cursor_position((area.x + 9 + column as u16, area.y));
            Line::from(vec![Span::styled(" filter: ", Modifier::BOLD), Span::raw(text)])
        }
        (_, Some(notice)) => Line::styled(format!(" {notice}"), Modifier::BOLD),
        _ => Line::styled(
            " ↑↓ select · s sort · r reverse · / filter · t change limits · ? help · q quit",
            DIMMED,
        ),
    };
    frame.render_widget(truncated(line, area.width), area);
}

#[cfg(test)]
mod tests;
