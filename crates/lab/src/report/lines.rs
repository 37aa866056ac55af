//! Line charts over one x-axis: IOPS over time, a growing cache, the share of requests over
//! latency. Of thousands of points in a pixel column only first, last, minimum and maximum are
//! drawn.

use std::{fmt::Write as _, ops::Range};

use plotters::{
    coord::ranged1d::{KeyPointHint, NoDefaultFormatting, Ranged, ValueFormatter},
    prelude::{ChartBuilder, Circle, PathElement},
    style::{
        Color as _,
        text_anchor::{HPos, VPos},
    },
};

use super::{
    axis::{AxisScale, ScaleEnds},
    drawing::{self, Drawn, Sheet, SvgDrawing, letters, px},
    html::escape,
    palette::{ColourPair, GRID, INK, LIMIT, LINES, code},
};
use crate::{
    limit_lines::MAX_DRAWN,
    result::{ChartAxis, ChartSeries, Lines},
};

const WIDTH: f64 = 760.0;
const HEIGHT: f64 = 330.0;
const LEFT: f64 = 72.0;
const BELOW: f64 = 46.0;
const ABOVE: f64 = 30.0;
const RIGHT: f64 = 30.0;
const X_TICKS: usize = 8;
const Y_TICKS: usize = 5;
/// Pixel columns into which a line's points are grouped.
const COLUMNS: usize = 600;

pub(super) fn html(lines: &Lines) -> anyhow::Result<String> {
    let mut html = legend(lines);
    let _ = write!(html, "<div class=\"wide\">{}</div>", drawing(lines)?.inline());
    if let Some(note) = &lines.note {
        let _ = write!(html, "<p class=\"note\">{}</p>", escape(note));
    }
    let hidden = lines.series.len().saturating_sub(LINES.len());
    if hidden > 0 {
        let shown = LINES.len();
        let _ = write!(
            html,
            "<p class=\"note\">The first {shown} lines are drawn; the file has {hidden} more.</p>"
        );
    }
    Ok(html)
}

pub(super) fn alone(lines: &Lines) -> anyhow::Result<String> {
    let legend = legend_lines(lines);
    let legend: Vec<_> = legend.iter().map(|(series, colour)| (series.name.as_str(), colour.light)).collect();
    Ok(drawing(lines)?.alone(&legend))
}

fn drawn(lines: &Lines) -> Vec<&ChartSeries> {
    lines.series.iter().take(LINES.len()).collect()
}

/// Lines to draw, with their colours: the series, and the limits above them.
fn named(lines: &Lines) -> impl Iterator<Item = (&ChartSeries, ColourPair)> {
    let limits = drawn_limits(lines).map(|series| (series, LIMIT));
    lines.series.iter().zip(LINES).chain(limits)
}

/// Limits up to [`MAX_DRAWN`] names. A limit has a line for each time in which it was in force.
fn drawn_limits(lines: &Lines) -> impl Iterator<Item = &ChartSeries> {
    let mut names: Vec<&str> = Vec::new();
    lines.limits.iter().filter(move |limit| {
        let is_known = names.contains(&&*limit.name);
        let is_drawn = is_known || names.len() < MAX_DRAWN;
        if is_drawn && !is_known {
            names.push(&limit.name);
        }
        is_drawn
    })
}

/// Entries of the legend: each name of a limit once.
fn legend_lines(lines: &Lines) -> Vec<(&ChartSeries, ColourPair)> {
    let mut limits: Vec<(&ChartSeries, ColourPair)> = Vec::new();
    for limit in drawn_limits(lines) {
        if limits.iter().all(|(known, _)| known.name != limit.name) {
            limits.push((limit, LIMIT));
        }
    }
    lines.series.iter().zip(LINES).chain(limits).collect()
}

fn drawing(lines: &Lines) -> anyhow::Result<SvgDrawing> {
    let series = drawn(lines);
    let points = || named(lines).flat_map(|(series, _)| &series.points);
    let placed = |axis: &ChartAxis, value: f64| value.is_finite() && !(axis.logarithmic && value <= 0.0);
    // A point outside of an axis must not widen the second axis.
    let points = || points().filter(|(x, y)| placed(&lines.x, *x) && placed(&lines.y, *y));
    let x = AxisScale::over(points().map(|point| point.0), &lines.x, ScaleEnds::Values, X_TICKS);
    let y = AxisScale::over(points().map(|point| point.1), &lines.y, ScaleEnds::Ticks, Y_TICKS);
    drawing::drawing((WIDTH, HEIGHT), &lines.title, |sheet| {
        paint(sheet, lines, &series, &x, &y)?;
        if points().next().is_none() {
            let at = (WIDTH / 2.0, HEIGHT / 2.0);
            drawing::write(sheet, "no values", at, letters(INK.light, HPos::Center, VPos::Center))?;
        }
        Ok(())
    })
}

/// HTML of the legend; empty for a single unnamed line.
fn legend(lines: &Lines) -> String {
    if named(lines).all(|(series, _)| series.name.is_empty()) {
        return String::new();
    }
    let mut html = "<ul class=\"legend\">".to_owned();
    for (series, colour) in legend_lines(lines) {
        let (colour, name, scale) = (code(colour.light), escape(&series.name), drawing::SCALE);
        let _ = write!(
            html,
            "<li><svg viewBox=\"0 0 {} {}\" aria-hidden=\"true\"><line x1=\"0\" y1=\"{}\" \
             x2=\"{}\" y2=\"{}\" stroke=\"{colour}\" stroke-width=\"{}\"/></svg>{name}</li>",
            28 * scale,
            10 * scale,
            5 * scale,
            28 * scale,
            5 * scale,
            3 * scale
        );
    }
    html + "</ul>"
}

fn paint(sheet: &Sheet, lines: &Lines, series: &[&ChartSeries], x: &AxisScale, y: &AxisScale) -> Drawn {
    let mut chart = ChartBuilder::on(sheet)
        .margin_top(px(ABOVE))
        .margin_right(px(RIGHT))
        .x_label_area_size(px(BELOW))
        .y_label_area_size(px(LEFT))
        .build_cartesian_2d(PlottersRange(x), PlottersRange(y))?;
    let style = || letters(INK.light, HPos::Center, VPos::Center);
    chart
        .configure_mesh()
        .disable_x_mesh()
        .bold_line_style(GRID.light.stroke_width(px(1.0).unsigned_abs()))
        .axis_style(INK.light.stroke_width(px(1.0).unsigned_abs()))
        .set_all_tick_mark_size(px(4.0))
        .label_style(style())
        .draw()?;
    let upwards = letters(INK.light, HPos::Left, VPos::Top);
    drawing::write(sheet, &lines.y.label, (4.0, 4.0), upwards)?;
    let rightwards = letters(INK.light, HPos::Right, VPos::Bottom);
    drawing::write(sheet, &lines.x.label, (WIDTH - RIGHT, HEIGHT - 4.0), rightwards)?;
    for (series, colour) in series.iter().zip(LINES) {
        let style = colour.light.stroke_width(px(2.0).unsigned_abs());
        let mut points = chart_points(series, x, y);
        if lines.steps {
            points = stepped(&points);
        }
        // A single point has no line, so it is drawn as a dot.
        if let &[only] = points.as_slice() {
            chart.draw_series([Circle::new(only, px(3.5), colour.light.filled())])?;
        }
        chart.draw_series([PathElement::new(points, style)])?;
    }
    for limit in drawn_limits(lines) {
        let points = until_next(&chart_points(limit, x, y));
        let style = LIMIT.light.stroke_width(px(1.5).unsigned_abs());
        chart.draw_series([PathElement::new(points, style)])?;
    }
    Ok(())
}

/// A scale as plotters' range: positions from 0 to 1, labels at its ticks only.
struct PlottersRange<'a>(&'a AxisScale);

impl Ranged for PlottersRange<'_> {
    type FormatOption = NoDefaultFormatting;
    type ValueType = f64;

    fn map(&self, position: &f64, (from, to): (i32, i32)) -> i32 {
        from + (position * f64::from(to - from)).round() as i32
    }

    fn key_points<Hint: KeyPointHint>(&self, hint: Hint) -> Vec<f64> {
        let ticks = if hint.weight().allow_light_points() { &[] } else { self.0.ticks.as_slice() };
        ticks.iter().map(|tick| tick.position).collect()
    }

    fn range(&self) -> Range<f64> {
        0.0..1.0
    }
}

impl ValueFormatter<f64> for PlottersRange<'_> {
    fn format_ext(&self, position: &f64) -> String {
        let tick = self.0.ticks.iter().find(|tick| (tick.position - position).abs() < 1e-12);
        tick.map_or_else(String::new, |tick| tick.label.clone())
    }
}

/// Step function over the whole width of the chart.
fn stepped(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let (Some(&(_, first)), Some(&(_, last))) = (points.first(), points.last()) else { return vec![] };
    [(0.0, first)].into_iter().chain(until_next(points)).chain([(1.0, last)]).collect()
}

/// Constant from each point until the next.
fn until_next(points: &[(f64, f64)]) -> Vec<(f64, f64)> {
    let corners = points.windows(2).flat_map(|pair| [pair[0], (pair[1].0, pair[0].1)]);
    corners.chain(points.last().copied()).collect()
}

/// Positions from 0 to 1 in both directions; at most four points for each pixel column.
fn chart_points(series: &ChartSeries, x: &AxisScale, y: &AxisScale) -> Vec<(f64, f64)> {
    let place = |&(at, value): &(f64, f64)| Some((x.position(at)?, y.position(value)?));
    let all: Vec<(f64, f64)> = series.points.iter().filter_map(place).collect();
    // Short series are drawn completely.
    if all.len() <= 2 * COLUMNS {
        return all;
    }
    let column = |point: &(f64, f64)| (point.0 * COLUMNS as f64) as usize;
    let mut reduced = Vec::new();
    for column in all.chunk_by(|one, other| column(one) == column(other)) {
        let by_value = |one: &&(f64, f64), other: &&(f64, f64)| one.1.total_cmp(&other.1);
        let extremes = [column.iter().min_by(by_value), column.iter().max_by(by_value)];
        let mut shown: Vec<&(f64, f64)> =
            [column.first(), column.last()].into_iter().chain(extremes).flatten().collect();
        // References into one slice: their addresses restore the order of the series.
        shown.sort_by_key(|point| std::ptr::from_ref(*point));
        shown.dedup_by_key(|point| std::ptr::from_ref(*point));
        reduced.extend(shown.into_iter().copied());
    }
    reduced
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::MeasureUnit;

    fn lines(series: Vec<ChartSeries>) -> Lines {
        Lines {
            title: "IOPS over time".to_owned(),
            x: ChartAxis::new("time", MeasureUnit::Seconds),
            y: ChartAxis::new("IOPS", MeasureUnit::Iops),
            steps: false,
            series,
            limits: Vec::new(),
            note: None,
        }
    }

    fn series(name: &str, points: &[(f64, f64)]) -> ChartSeries {
        ChartSeries { name: name.to_owned(), points: points.to_vec() }
    }

    #[test]
    fn line_spans_the_plot() {
        let svg = html(&lines(vec![series("a<b", &[(0.0, 0.0), (10.0, 20_000.0)])])).unwrap();
        assert!(svg.contains("aria-label=\"IOPS over time\""), "{svg}");
        assert!(svg.contains("</svg>a&lt;b</li>"), "{svg}");
        // Coordinates are tenths of pixels.
        let right = px(WIDTH - RIGHT) - 1;
        let bottom = px(HEIGHT - BELOW) - 1;
        let path = format!("points=\"{},{bottom} {right},{} \"", px(LEFT), px(ABOVE));
        assert!(svg.contains(&path), "{path} in {svg}");
        for text in ["5K", "20K", "10s", "time", "IOPS"] {
            assert!(svg.contains(&format!(">\n{text}\n</text>")), "{text} in {svg}");
        }
    }

    #[test]
    fn number_of_lines_is_bounded() {
        let many =
            (0..11).map(|number| series(&format!("line {number}"), &[(0.0, 1.0), (1.0, 2.0)])).collect();
        let svg = html(&lines(many)).unwrap();
        assert_eq!(
            svg.matches("<polyline fill=\"none\" opacity=\"1\" stroke=\"#0072B2\"").count(),
            1,
            "{svg}"
        );
        assert!(svg.contains("line 7") && !svg.contains("line 8"), "{svg}");
        assert!(svg.contains("The first 8 lines are drawn; the file has 3 more."), "{svg}");
    }

    #[test]
    fn limit_is_a_named_dashed_line() {
        let rates = series("vm1", &[(0.0, 14.0), (10.0, 15.0)]);
        let limits = vec![series("iops-total 15 of vm1", &[(0.0, 15.0), (5.0, 20.0), (10.0, 20.0)])];
        let lines = Lines { limits, ..lines(vec![rates]) };
        let svg = html(&lines).unwrap();
        assert!(svg.contains("</svg>iops-total 15 of vm1</li>"), "{svg}");
        let colour = code(LIMIT.light);
        let line = svg.lines().find(|line| line.contains("<polyline") && line.contains(&colour));
        let points = line.expect("a line").split("points=\"").nth(1).unwrap();
        assert_eq!(points.split('"').next().unwrap().split_whitespace().count(), 5, "two steps: {points}");
        let dashes = crate::report::palette::dash_rules(drawing::SCALE);
        assert!(dashes.contains(&format!("[stroke=\"{colour}\"]{{stroke-dasharray")), "{dashes}");
    }

    #[test]
    fn empty_and_single_point_series_are_drawn() {
        assert!(html(&lines(vec![])).unwrap().contains("no values"));
        assert!(html(&lines(vec![series("", &[])])).unwrap().contains("no values"));
        let svg = html(&lines(vec![series("", &[(1.0, 5.0)])])).unwrap();
        assert!(svg.contains("<circle") && !svg.contains("no values"), "{svg}");
    }

    #[test]
    fn step_value_lasts_until_the_next() {
        let stairs = [(0.0, 0.0), (0.2, 0.0), (0.2, 0.0), (0.2, 0.5), (0.6, 0.5), (0.6, 1.0), (1.0, 1.0)];
        assert_eq!(stepped(&[(0.2, 0.0), (0.2, 0.5), (0.6, 1.0)]), stairs);
        assert!(stepped(&[]).is_empty());
    }

    #[test]
    fn long_series_keeps_its_spikes() {
        let mut points: Vec<(f64, f64)> = (0..100_000).map(|second| (f64::from(second), 100.0)).collect();
        points[54_321].1 = 0.0;
        points[77_777].1 = 200.0;
        let (x, y) = (&lines(vec![]).x, &lines(vec![]).y);
        let x = AxisScale::over(points.iter().map(|point| point.0), x, ScaleEnds::Values, 6);
        let y = AxisScale::over(points.iter().map(|point| point.1), y, ScaleEnds::Ticks, 6);
        let reduced = chart_points(&series("", &points), &x, &y);
        assert!(reduced.len() <= 4 * (COLUMNS + 1), "{}", reduced.len());
        assert!(reduced.is_sorted_by(|one, other| one.0 <= other.0));
        for extreme in [0.0, 1.0] {
            assert_eq!(reduced.iter().filter(|place| place.1 == extreme).count(), 1);
        }
    }
}
