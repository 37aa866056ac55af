//! The list of disks and groups.

use console::{
    figures,
    figures::elided,
    screen::{DIMMED, THROTTLED},
};
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Rect},
    style::{Modifier, Style},
    text::{Line, Text},
    widgets::{Cell, Row, Table, TableState},
};

use crate::{
    client::{latency::RequestLatency, rates::NodeRate, report::StatusNode},
    top::{list, list::WeirTopColumn, state::TopState},
};

/// Widths of the numeric columns, from IOPS to HELD.
const NUMBERS: [u16; 7] = [6, 7, 8, 5, 5, 5, 5];
/// Width of the mark before a name.
const MARK: usize = 2;
/// Longest name of a limit: `iops-total`, `iops-write`.
const LIMIT: usize = 10;
/// Least width of a truncated text column.
const MIN_TEXT: usize = 12;
/// Least width of a group's name before its limit: first letter, ellipsis, last letter.
const MIN_GROUP: usize = 3;

/// Widths of the text columns, which share the width beside the numbers. A column that does not fit
/// is omitted; the details of the selected row have its content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct TextColumnWidths {
    name: usize,
    group: Option<usize>,
    held_by: Option<usize>,
    limits: Option<usize>,
}

impl TextColumnWidths {
    /// Assigns widths by priority: name, throttle cause, group, limits.
    fn new(width: usize, rows: &[list::TopRow<'_>]) -> Self {
        let longest = |get: &dyn Fn(&list::TopRow<'_>) -> usize| rows.iter().map(get).max().unwrap_or(0);
        let group_of = |row: &list::TopRow<'_>| {
            row.node.settings().group.as_ref().map_or(0, |group| group.chars().count())
        };
        let groups = longest(&group_of);
        // Independent of the limits in force, so that columns do not move while those change.
        let of_group = if groups == 0 { 0 } else { ": ".len() + LIMIT };
        let (held_by, min_width) = match groups {
            0 => (LIMIT, LIMIT),
            _ => (groups + of_group, groups.min(MIN_GROUP) + of_group),
        };
        let numbers: usize = NUMBERS.iter().map(|width| usize::from(*width) + 1).sum();
        let mut left = width.saturating_sub(numbers);
        let names = longest(&|row| row.name.chars().count()) + MARK;
        // A name may not take the width that the throttle cause needs.
        let name = names.max(MIN_TEXT + MARK).min(left.saturating_sub(min_width + 1).max(MIN_TEXT + MARK));
        left = left.saturating_sub(name);
        let mut next = |wanted: usize, min_width: usize| {
            let width = wanted.min(left.saturating_sub(1));
            (width >= min_width.min(wanted)).then(|| {
                left -= width + 1;
                width
            })
        };
        let held_by = next(held_by, min_width);
        let group = if groups == 0 { None } else { next(groups.max("GROUP▾".chars().count()), usize::MAX) };
        let limits = longest(&|row| figures::limits(&row.node.settings().limits).chars().count());
        let limits = next(limits.max("LIMITS".len()), MIN_TEXT);
        Self { name, group, held_by, limits }
    }
}

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &TopState) {
    let rows = state.rows();
    if rows.is_empty() {
        let text =
            if state.filter.is_empty() { " no disks and no groups" } else { " no names match the filter" };
        frame.render_widget(Line::styled(text, DIMMED), area);
        return;
    }
    let texts = TextColumnWidths::new(usize::from(area.width), &rows);
    let length = |width: usize| Constraint::Length(u16::try_from(width).unwrap_or(u16::MAX));
    let mut widths = vec![length(texts.name)];
    widths.extend(texts.group.map(length));
    widths.extend(NUMBERS.map(Constraint::Length));
    widths.extend([texts.held_by, texts.limits].into_iter().flatten().map(length));
    let shown = WeirTopColumn::ALL
        .into_iter()
        .filter(|column| *column != WeirTopColumn::Group || texts.group.is_some());
    let mut headings: Vec<Cell<'_>> = shown.map(|column| heading(state, column)).collect();
    headings.extend(texts.held_by.map(|_| Cell::from("HELD BY")));
    headings.extend(texts.limits.map(|_| Cell::from("LIMITS")));
    let table = Table::new(rows.iter().map(|item| row(item, texts)), widths)
        .header(Row::new(headings).style(Modifier::BOLD))
        .column_spacing(1)
        .row_highlight_style(Modifier::REVERSED);
    let mut place = TableState::new().with_selected(state.selected_row(&rows));
    frame.render_stateful_widget(table, area, &mut place);
}

fn heading(state: &TopState, column: WeirTopColumn) -> Cell<'static> {
    let is_sorted = state.order.column == column;
    let arrow = match (is_sorted, state.order.reversed) {
        (false, _) => "",
        (true, false) => "▾",
        (true, true) => "▴",
    };
    let text = format!("{}{arrow}", column.title());
    match column {
        WeirTopColumn::Name => Cell::from(format!("  {text}")),
        WeirTopColumn::Group => Cell::from(text),
        _ => right(text),
    }
}

fn row(row: &list::TopRow<'_>, texts: TextColumnWidths) -> Row<'static> {
    let rate_cell = |figure: fn(&NodeRate) -> String| right(row.rate.map_or_else(|| "-".to_owned(), figure));
    let latency = |get: fn(&RequestLatency) -> u64| {
        let latency = row.rate.and_then(|rate| rate.latency);
        right(latency.as_ref().map_or_else(|| "-".to_owned(), |latency| figures::time(get(latency))))
    };
    let waiting = row.node.throttle().waiting.total();
    let held = row.rate.is_some_and(|rate| rate.limited > 0.0) || waiting > 0;
    let settings = row.node.settings();
    let (mark, style) = match row.node {
        StatusNode::Group(_) => ("◆", Style::from(Modifier::BOLD)),
        StatusNode::Disk(_) => (" ", Style::default()),
    };
    let figure = |cell: Cell<'static>| if held { cell.style(THROTTLED) } else { cell };
    let text =
        |text: &str, width: usize| Cell::from(super::truncated(Line::from(text.to_owned()), width as u16));
    let name = elided(row.name, texts.name.saturating_sub(MARK));
    let mut cells = vec![text(&format!("{mark} {name}"), texts.name)];
    let group = settings.group.as_deref().unwrap_or("-");
    cells.extend(texts.group.map(|width| text(&elided(group, width), width)));
    cells.extend([
        rate_cell(|rate| figures::count(rate.iops())),
        rate_cell(|rate| figures::bytes(rate.read_bps)),
        rate_cell(|rate| figures::bytes(rate.write_bps)),
        latency(|latency| latency.p50_ns),
        latency(|latency| latency.p99_ns),
        figure(right(waiting.to_string())),
        figure(rate_cell(|rate| figures::share(rate.limited))),
    ]);
    let held_by = row.held_by.as_deref().unwrap_or("-");
    cells.extend(texts.held_by.map(|width| figure(text(&limit_within(held_by, width), width))));
    cells.extend(texts.limits.map(|width| text(&figures::limits(&settings.limits), width)));
    Row::new(cells).style(style)
}

/// `GROUP: LIMIT` within a width. Only the name of the group is shortened.
pub(super) fn limit_within(held_by: &str, width: usize) -> String {
    match held_by.rsplit_once(": ") {
        Some((group, limit)) => {
            let available = width.saturating_sub(limit.chars().count() + ": ".len());
            format!("{}: {limit}", elided(group, available))
        }
        None => held_by.to_owned(),
    }
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Text::from(text).alignment(Alignment::Right))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::top::state::tests::watched;

    #[track_caller]
    fn check(width: usize, names: &[&str], expect: TextColumnWidths) {
        assert_eq!(TextColumnWidths::new(width, &watched(2, names).rows()), expect);
    }

    #[test]
    fn throttle_cause_has_priority_over_groups_and_limits() {
        let texts = TextColumnWidths { name: 14, group: None, held_by: Some(16), limits: None };
        check(80, &["vm1"], texts);
        check(100, &["vm1"], TextColumnWidths { group: Some(6), limits: Some(13), ..texts });
        check(132, &["vm1"], TextColumnWidths { group: Some(6), limits: Some(17), ..texts });
    }

    #[test]
    fn group_is_shortened_before_its_limit() {
        let held_by = "a-group-with-a-long-name: iops-total";
        assert_eq!(limit_within(held_by, 15), "a…e: iops-total");
        assert_eq!(limit_within(held_by, 20), "a-gr…ame: iops-total");
        assert_eq!(limit_within(held_by, 36), held_by);
        assert_eq!(limit_within("iops-total", 12), "iops-total");
    }

    #[test]
    fn long_name_is_complete_if_it_fits() {
        let long = "a-disk-with-a-long-name-of-forty-letters";
        let texts = TextColumnWidths { name: 16, group: None, held_by: Some(15), limits: None };
        check(80, &[long], texts);
        let wide = TextColumnWidths { name: 42, group: Some(6), held_by: Some(16), limits: Some(17) };
        check(220, &[long], wide);
    }
}
