//! Drawing of `weir cgroup top`: a title, the list, the keys.

use console::{
    figures,
    screen::{self, DIMMED, FAULT, THROTTLED},
};
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Layout, Rect},
    style::Modifier,
    text::{Line as Text, Span},
    widgets::{Cell, Row, Table, TableState},
};
use reactor::sanitize::sanitize;

use super::state::{CgroupTopState, TopColumn, TopLine};
use crate::show::{rates::CgroupRate, text};

const HELP: &str = "\
↑ ↓ k j PgUp PgDn Home End   choose
Enter t                      the tasks in the chosen cgroup and below it
Esc                          back to the cgroups
s                            sort by the next column
r                            the other way round
?                            this page
Ctrl-Z                       stop; `fg` continues
q Ctrl-C                     quit

WAITED is the share of the time in which a task of it waited for I/O, for a
limit or for the device. Rates are of all devices together, those of a task
are what it caused to be read and written, its CALLS those of the system.
";

pub(super) fn draw(frame: &mut Frame<'_>, state: &mut CgroupTopState) {
    if !screen::has_room(frame, "weir cgroup top") {
        return;
    }
    let rows = [Constraint::Length(1), Constraint::Min(8), Constraint::Length(1)];
    let [title, list, keys] = Layout::vertical(rows).areas(frame.area());
    // Without the heading; PgUp and PgDn move by this number.
    state.page = usize::from(list.height.saturating_sub(1)).max(1);
    draw_title(frame, title, state);
    draw_list(frame, list, state);
    draw_keys(frame, keys, state);
    if state.has_help {
        screen::help(frame, HELP);
    }
}

fn draw_title(frame: &mut Frame<'_>, area: Rect, state: &CgroupTopState) {
    let name = Span::styled(format!(" weir {} ", env!("CARGO_PKG_VERSION")), Modifier::BOLD);
    let status = match (&state.error, &state.tasks_of) {
        (Some(error), _) => Span::styled(error.clone(), FAULT),
        (None, Some(group)) => {
            Span::raw(format!("· tasks in {} and below", sanitize(&group.display().to_string())))
        }
        (None, None) => Span::raw(format!("· cgroups with limits or I/O: {}", state.rows.len())),
    };
    frame.render_widget(Text::from(vec![name, status]), area);
}

fn draw_list(frame: &mut Frame<'_>, area: Rect, state: &CgroupTopState) {
    let lines = state.lines();
    if lines.is_empty() {
        let message = if state.has_tasks() {
            " no task (Esc: back)"
        } else {
            " no cgroup has limits or has done any I/O"
        };
        return frame.render_widget(Text::styled(message, DIMMED), area);
    }
    let widths = [
        Constraint::Fill(3),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(8),
        Constraint::Length(7),
        Constraint::Fill(2),
    ];
    let heading = TopColumn::ALL.map(|column| heading(state, column));
    let rest = if state.has_tasks() { "CGROUP" } else { "LIMITS" };
    let table = Table::new(lines.iter().map(row), widths)
        .header(Row::new(heading.into_iter().chain([Cell::from(rest)])).style(Modifier::BOLD))
        .column_spacing(1)
        .row_highlight_style(Modifier::REVERSED);
    let mut table_state = TableState::new().with_selected(state.chosen(&lines));
    frame.render_stateful_widget(table, area, &mut table_state);
}

fn heading(state: &CgroupTopState, column: TopColumn) -> Cell<'static> {
    let title = match column {
        TopColumn::Name if state.has_tasks() => "    TID TASK",
        TopColumn::Name => "CGROUP",
        TopColumn::Reads => "READ/s",
        TopColumn::Writes => "WRITE/s",
        TopColumn::Operations if state.has_tasks() => "CALLS/s",
        TopColumn::Operations => "IOPS",
        TopColumn::Waited => "WAITED",
    };
    let arrow = match (state.column == column, state.reversed) {
        (false, _) => "",
        (true, false) => "▾",
        (true, true) => "▴",
    };
    let text = format!("{title}{arrow}");
    if column == TopColumn::Name { Cell::from(text) } else { right(text) }
}

fn row(line: &TopLine) -> Row<'static> {
    let rate_cell = |figure: fn(&CgroupRate) -> String| right(text::cell(line.rate.as_ref().map(figure)));
    let waited = right(text::cell(line.waited.map(figures::share)));
    // Highlights lines that waited.
    let is_held = line.waited.is_some_and(|share| share > 0.0);
    Row::new([
        Cell::from(sanitize(&line.name)),
        rate_cell(|rate| figures::bytes(rate.read_bps)),
        rate_cell(|rate| figures::bytes(rate.write_bps)),
        rate_cell(|rate| figures::count(rate.iops())),
        if is_held { waited.style(THROTTLED) } else { waited },
        Cell::from(sanitize(&line.rest)),
    ])
}

fn draw_keys(frame: &mut Frame<'_>, area: Rect, state: &CgroupTopState) {
    let is_unknown = !state.options.are_waits_counted && state.rows.iter().all(|row| row.pressure.is_none());
    let line = if is_unknown && !state.rows.is_empty() {
        Text::styled(" WAITED is not known here: sysctl kernel.task_delayacct=1 · ? help · q quit", DIMMED)
    } else {
        let enter = if state.has_tasks() { "Esc cgroups" } else { "Enter tasks" };
        Text::styled(format!(" ↑↓ choose · {enter} · s sort · r reverse · ? help · q quit"), DIMMED)
    };
    frame.render_widget(line, area);
}

fn right(text: String) -> Cell<'static> {
    Cell::from(ratatui::text::Text::from(text).alignment(Alignment::Right))
}

#[cfg(test)]
mod tests {
    use ratatui::{Terminal, backend::TestBackend};

    use super::*;
    use crate::show::top::state::tests::{WISH, press, sampled};

    fn drawn(state: &mut CgroupTopState, width: u16, height: u16) -> String {
        let mut terminal = Terminal::new(TestBackend::new(width, height)).unwrap();
        terminal.draw(|frame| draw(frame, state)).unwrap();
        let buffer = terminal.backend().buffer();
        let line = |y| (0..width).map(|x| buffer[(x, y)].symbol()).collect::<String>().trim_end().to_owned();
        (0..height).map(line).collect::<Vec<_>>().join("\n").trim_end().to_owned()
    }

    #[test]
    fn list_of_cgroups_then_tasks_of_one() {
        let mut state = sampled();
        let text = drawn(&mut state, 100, 24);
        let lines: Vec<&str> = text.lines().collect();
        assert!(lines[0].ends_with("· cgroups with limits or I/O: 2"), "{text}");
        assert!(lines[1].contains("WRITE/s▾") && lines[1].ends_with("LIMITS"), "{text}");
        assert!(lines[2].starts_with("/system/a.db"), "{text}");
        for part in ["2.0M", "512", "75%", "bps-w 4M, iops-w 100"] {
            assert!(lines[2].contains(part), "{part}: {text}");
        }
        press(&mut state, "t");
        let text = drawn(&mut state, 100, 24);
        for part in
            ["· tasks in /system/a.db and below", "TID TASK", "CALLS/s", "7 dd", "8 a?b", "Esc cgroups"]
        {
            assert!(text.contains(part), "{part}: {text}");
        }
        press(&mut state, "?");
        assert!(drawn(&mut state, 80, 24).contains("any key closes"));
    }

    #[test]
    fn errors_and_missing_limits_are_shown() {
        let mut state = sampled();
        state.update(WISH, Err(anyhow::anyhow!("cgroup /a: removed meanwhile")));
        let text = drawn(&mut state, 80, 24);
        assert!(
            text.contains("cgroup /a: removed meanwhile") && text.contains("no cgroup has limits"),
            "{text}"
        );
        assert!(drawn(&mut state, 79, 24).starts_with("weir cgroup top needs 80×24; this terminal is 79×24"));
        let mut state = sampled();
        state.options.are_waits_counted = false;
        assert!(!drawn(&mut state, 80, 24).contains("task_delayacct"), "the cgroup's pressure tells");
        state.rows.iter_mut().for_each(|row| row.pressure = None);
        assert!(drawn(&mut state, 80, 24).contains("sysctl kernel.task_delayacct=1"));
    }
}
