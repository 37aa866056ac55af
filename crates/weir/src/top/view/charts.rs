//! Charts of one disk or group: operations and bytes per second of the last minutes, with limits as
//! lines.
//!
//! Shows the row's own limits; if it has no limit of a unit, those of the nearest group above that
//! has one.

use api::MemberSettings;
use console::screen::{DIMMED, THROTTLED, has_no_colours};
use console::{
    figures,
    figures::{SettingValues, elided},
};
use policy::throttle::{LimitKind, LimitPart, LimitSetting};
use ratatui::{
    Frame,
    layout::{Constraint, Layout, Rect},
    style::{Color, Style},
    symbols::Marker,
    text::{Line, Span},
    widgets::{Axis, Block, Chart, Dataset, GraphType},
};

use crate::{
    client::report::DaemonReport,
    top::{
        history::{RatePoint, WINDOW},
        list::TopRow,
        state::TopState,
    },
};

/// Styles of reads, writes and their sum, in charts and legends.
const READS: Style = Style::new().fg(Color::Green);
const WRITES: Style = Style::new().fg(Color::Magenta);
const TOTAL: Style = Style::new().fg(Color::Cyan);

/// Markers of reads, writes and their sum, with their symbols in the title. On a terminal without
/// colours the markers distinguish them.
fn markers(plain: bool) -> [(Marker, &'static str); 3] {
    if plain {
        [(Marker::Dot, "• "), (Marker::Bar, "▄ "), (Marker::Block, "█ ")]
    } else {
        [(Marker::Braille, ""); 3]
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum ChartUnit {
    Operations,
    Bytes,
}

pub(super) fn draw(frame: &mut Frame<'_>, area: Rect, state: &TopState, row: &TopRow<'_>) {
    let [left, right] = Layout::horizontal([Constraint::Fill(1), Constraint::Fill(1)]).areas(area);
    draw_one(frame, left, state, row, ChartUnit::Operations);
    draw_one(frame, right, state, row, ChartUnit::Bytes);
}

/// Points of a chart: seconds before now, and a rate.
type ChartPoints = Vec<(f64, f64)>;

fn draw_one(frame: &mut Frame<'_>, area: Rect, state: &TopState, row: &TopRow<'_>, unit: ChartUnit) {
    let now = state.reported_at.as_secs_f64();
    let points = |value: fn(&RatePoint, ChartUnit) -> f64| -> ChartPoints {
        state.history.of(row.name).map(|point| (point.at - now, value(point, unit))).collect()
    };
    let series = [
        (points(read), READS),
        (points(write), WRITES),
        (points(|point, unit| read(point, unit) + write(point, unit)), TOTAL),
    ];
    let (limits, of_group) = limits_of(&state.report, row.node.settings(), unit);
    let top = top(&series, &limits);
    let from = -WINDOW.as_secs_f64();
    let lines: Vec<ChartPoints> = limits
        .iter()
        .filter(|&&limit| limit as f64 <= top)
        .map(|&limit| vec![(from, limit as f64), (0.0, limit as f64)])
        .collect();
    let markers = markers(has_no_colours());
    // Limits are drawn first, below the curves.
    let limits = lines.iter().map(|line| dataset(line, THROTTLED, Marker::Braille));
    // The sum is drawn first, so that it hides neither reads nor writes.
    let measured = series.iter().zip(markers).rev();
    let measured = measured.map(|((points, style), (marker, _))| dataset(points, *style, marker));
    let name = match unit {
        ChartUnit::Operations => "IOPS",
        ChartUnit::Bytes => "bytes/s",
    };
    // The corners of the frame take two columns.
    let available = usize::from(area.width).saturating_sub(2);
    let mut frame_of =
        Block::bordered().border_style(DIMMED).title(title(name, row.name, markers, available));
    if let Some(group) = of_group {
        let group = elided(group, available.saturating_sub(" limit of  ".len()));
        frame_of = frame_of.title_bottom(Line::styled(format!(" limit of {group} "), THROTTLED));
    }
    let chart = Chart::new(limits.chain(measured).collect())
        .block(frame_of)
        .x_axis(Axis::default().style(DIMMED).bounds([from, 0.0]).labels(["-2m", "-1m", "now"]))
        .y_axis(Axis::default().style(DIMMED).bounds([0.0, top]).labels(labels(top, unit)))
        .legend_position(None);
    frame.render_widget(chart, area);
}

/// Title of a chart within a width. Only the name is shortened, not the unit and the legend.
fn title(unit: &str, name: &str, markers: [(Marker, &str); 3], available: usize) -> Line<'static> {
    let mut spans = Vec::new();
    for ((text, style), (_, sign)) in
        [("reads ", READS), ("writes ", WRITES), ("sum ", TOTAL)].into_iter().zip(markers)
    {
        spans.push(Span::styled(format!("{text}{sign}"), style));
    }
    let rest = Line::from(spans.clone()).width() + format!("  {unit}: ").len();
    let name = elided(name, available.saturating_sub(rest));
    spans.insert(0, Span::raw(format!(" {name} {unit}: ")));
    Line::from(spans)
}

fn dataset(points: &ChartPoints, style: Style, marker: Marker) -> Dataset<'_> {
    Dataset::default().data(points).style(style).marker(marker).graph_type(GraphType::Line)
}

fn read(point: &RatePoint, unit: ChartUnit) -> f64 {
    f64::from(if unit == ChartUnit::Bytes { point.read_bps } else { point.read_iops })
}

fn write(point: &RatePoint, unit: ChartUnit) -> f64 {
    f64::from(if unit == ChartUnit::Bytes { point.write_bps } else { point.write_iops })
}

/// Rates and burst rates in force, and the group they belong to if they are not the row's own.
fn limits_of<'a>(
    report: &'a DaemonReport,
    settings: &'a MemberSettings,
    unit: ChartUnit,
) -> (Vec<u64>, Option<&'a str>) {
    let own_limits = set_limits(&settings.limits, unit);
    if !own_limits.is_empty() {
        return (own_limits, None);
    }
    let above = report.groups_above(settings).into_iter();
    let mut above = above.map(|group| (set_limits(&group.settings.limits, unit), group.name.as_str()));
    match above.find(|(limits, _)| !limits.is_empty()) {
        Some((limits, group)) => (limits, Some(group)),
        None => (Vec::new(), None),
    }
}

fn set_limits(limits: &SettingValues, unit: ChartUnit) -> Vec<u64> {
    let kinds = LimitKind::ALL.into_iter().filter(|kind| kind.counts_bytes() == (unit == ChartUnit::Bytes));
    let settings = kinds
        .flat_map(|kind| [LimitPart::Rate, LimitPart::BurstRate].map(|part| LimitSetting::Limit(kind, part)));
    let values = settings.filter_map(|setting| limits.get(setting.name()).copied());
    values.filter(|&value| value > 0).collect()
}

/// Upper bound of the axis: above all measured rates and nearby limits. Limits far above the
/// measured rates are omitted, as the curves would shrink to nothing.
fn top(series: &[(ChartPoints, Style)], limits: &[u64]) -> f64 {
    let rates = series.iter().flat_map(|(points, _)| points.iter().map(|&(_, rate)| rate));
    let measured = rates.fold(0.0, f64::max);
    let limits = limits.iter().map(|&limit| limit as f64);
    let in_sight = limits.filter(|&limit| limit <= measured * 4.0).fold(measured, f64::max);
    if in_sight > 0.0 { in_sight * 1.25 } else { 1.0 }
}

fn labels(top: f64, unit: ChartUnit) -> [String; 3] {
    let label = |value: f64| {
        let text = if unit == ChartUnit::Bytes { figures::bytes(value) } else { figures::count(value) };
        format!("{text:>6}")
    };
    [label(0.0), label(top / 2.0), label(top)]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_colours_each_line_has_its_own_marker() {
        let signs = markers(true).map(|(_, sign)| sign);
        assert!(signs[0] != signs[1] && signs[1] != signs[2] && signs[0] != signs[2]);
        let title = title("IOPS", "vm1", markers(true), 80).to_string();
        assert_eq!(title, " vm1 IOPS: reads • writes ▄ sum █ ");
    }

    #[test]
    fn only_limits_near_the_rates_are_drawn() {
        let series = [(vec![(-1.0, 900.0), (0.0, 1000.0)], READS)];
        assert_eq!(top(&series, &[1000, 3000]), 3750.0);
        assert_eq!(top(&series, &[1000, 5000]), 1250.0);
        assert_eq!(top(&[], &[1000]), 1.0, "nothing was measured yet");
    }
}
