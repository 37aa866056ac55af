//! The list of disks and groups.

use console::{
    figures,
    screen::{DIM, HELD},
};
use ratatui::{
    Frame,
    layout::{Alignment, Constraint, Rect},
    style::{Modifier, Style},
    text::{Line, Text},
    widgets::{Cell, Row, Table, TableState},
};

use crate::{
    client::{latency::Latency, rates::Rate, report::Node},
    top::{list, list::Column, state::State},
};

/// Columns of the group and the numbers; names and limits share what is left.
const WIDTHS: [u16; 9] = [0, 9, 6, 7, 8, 5, 5, 5, 5];

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &State) {
    let rows = state.rows();
    if rows.is_empty() {
        let text = if state.filter.is_empty() { " no disk and no group" } else { " nothing has such a name" };
        frame.render_widget(Line::styled(text, DIM), area);
        return;
    }
    let mut widths = WIDTHS.map(Constraint::Length).to_vec();
    widths[0] = Constraint::Fill(1);
    widths.push(Constraint::Fill(1));
    let heading = Column::ALL.map(|column| heading(state, column)).into_iter().chain([Cell::from("LIMITS")]);
    let table = Table::new(rows.iter().map(row), widths)
        .header(Row::new(heading).style(Modifier::BOLD))
        .column_spacing(1)
        .row_highlight_style(Modifier::REVERSED);
    let mut place = TableState::new().with_selected(state.chosen(&rows));
    frame.render_stateful_widget(table, area, &mut place);
}

fn heading(state: &State, column: Column) -> Cell<'static> {
    let is_sorted = state.order.column == column;
    let arrow = match (is_sorted, state.order.reversed) {
        (false, _) => "",
        (true, false) => "▾",
        (true, true) => "▴",
    };
    let text = format!("{}{arrow}", column.title());
    match column {
        Column::Name => Cell::from(format!("  {text}")),
        Column::Group => Cell::from(text),
        _ => right(text),
    }
}

fn row(row: &list::Row<'_>) -> Row<'static> {
    let of = |figure: fn(&Rate) -> String| right(row.rate.map_or_else(|| "-".to_owned(), figure));
    let latency = |of: fn(&Latency) -> u64| {
        let latency = row.rate.and_then(|rate| rate.latency);
        right(latency.as_ref().map_or_else(|| "-".to_owned(), |latency| figures::time(of(latency))))
    };
    let waiting = row.node.throttle().waiting.total();
    let held = row.rate.is_some_and(|rate| rate.limited > 0.0) || waiting > 0;
    let settings = row.node.settings();
    let (mark, style) = match row.node {
        Node::Group(_) => ("◆", Style::from(Modifier::BOLD)),
        Node::Disk(_) => (" ", Style::default()),
    };
    let figure = |cell: Cell<'static>| if held { cell.style(HELD) } else { cell };
    Row::new([
        Cell::from(format!("{mark} {}", row.name)),
        Cell::from(settings.group.clone().unwrap_or_else(|| "-".to_owned())),
        of(|rate| figures::count(rate.iops())),
        of(|rate| figures::bytes(rate.read_bps)),
        of(|rate| figures::bytes(rate.write_bps)),
        latency(|latency| latency.p50_ns),
        latency(|latency| latency.p99_ns),
        figure(right(waiting.to_string())),
        figure(of(|rate| figures::share(rate.limited))),
        Cell::from(figures::limits(&settings.limits)),
    ])
    .style(style)
}

fn right(text: String) -> Cell<'static> {
    Cell::from(Text::from(text).alignment(Alignment::Right))
}
