//! Chart of differences: the distance of each from 1×, with its interval.
//!
//! ```text
//!   read, depth 1      ──●──      │
//!   read, depth 64                │      ───●─────
//!                      0.9×      1×      1.1×
//! ```
//!
//! The scale is logarithmic, so that twice and half have the same distance from 1×.

use console::figures::elided;
use plotters::{
    prelude::Circle,
    style::{
        Color as _,
        text_anchor::{HPos, VPos},
    },
};

use super::{
    axis::{AxisScale, ScaleEnds},
    differences::{DifferenceRow, DifferenceVerdict},
    drawing::{self, Drawn, LETTER_WIDTH, Sheet, letters, px},
    palette::{ColourPair, GRID, GROUND, INK, LINES},
};
use crate::result::{ChartAxis, MeasureUnit};

const WIDTH: f64 = 760.0;
const ROW: f64 = 24.0;
const ABOVE: f64 = 10.0;
const BELOW: f64 = 34.0;
const NAMES: (f64, f64) = (80.0, 300.0);
const RIGHT: f64 = 30.0;
const TICKS: usize = 6;
/// Bound on the rows drawn; rows that differ come first.
const MAX_ROWS: usize = 50;

pub(super) fn html(rows: &[DifferenceRow]) -> anyhow::Result<Option<String>> {
    let rows = shown(rows);
    if rows.is_empty() {
        return Ok(None);
    }
    let axis = ChartAxis::new("", MeasureUnit::Ratio).logarithmic();
    // 1× is always on the scale, as the reference.
    let values = rows.iter().flat_map(|row| [row.ratio.low, row.ratio.high]).chain([1.0]);
    let scale = AxisScale::over(values, &axis, ScaleEnds::Values, TICKS);
    let longest = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0) as f64;
    let left = (longest * LETTER_WIDTH + 16.0).clamp(NAMES.0, NAMES.1);
    let height = ABOVE + rows.len() as f64 * ROW + BELOW;
    let drawing = drawing::drawing((WIDTH, height), "B in terms of A, with intervals", |sheet| {
        paint(sheet, &rows, &scale, left)
    })?;
    Ok(Some(format!("<div class=\"wide\">{}</div>", drawing.inline())))
}

/// Rows to draw, at most [`MAX_ROWS`], differences first.
fn shown(rows: &[DifferenceRow]) -> Vec<&DifferenceRow> {
    let drawable = |row: &&DifferenceRow| {
        let ratio = row.ratio;
        [ratio.low, ratio.median, ratio.high].iter().all(|value| value.is_finite() && *value > 0.0)
    };
    let mut shown: Vec<&DifferenceRow> = rows.iter().filter(drawable).collect();
    if shown.len() > MAX_ROWS {
        // A stable sort: equal rows keep the order of the file.
        shown.sort_by_key(|row| !differs(row));
        shown.truncate(MAX_ROWS);
    }
    shown
}

fn differs(row: &DifferenceRow) -> bool {
    matches!(row.outcome, DifferenceVerdict::Better | DifferenceVerdict::Worse)
}

fn colour(outcome: DifferenceVerdict) -> ColourPair {
    match outcome {
        DifferenceVerdict::Better => LINES[0],
        DifferenceVerdict::Worse => LINES[1],
        DifferenceVerdict::Same | DifferenceVerdict::Unknown => INK,
    }
}

fn paint(sheet: &Sheet, rows: &[&DifferenceRow], scale: &AxisScale, left: f64) -> Drawn {
    let bottom = ABOVE + rows.len() as f64 * ROW;
    let x = |position: f64| left + position * (WIDTH - left - RIGHT);
    let at = |value: f64| x(scale.position(value).unwrap_or(0.0));
    for tick in &scale.ticks {
        let x = x(tick.position);
        drawing::line(sheet, (x, ABOVE), (x, bottom), GRID.light, 1.0)?;
        let style = letters(INK.light, HPos::Center, VPos::Top);
        drawing::write(sheet, &tick.label, (x, bottom + 8.0), style)?;
    }
    drawing::line(sheet, (at(1.0), ABOVE), (at(1.0), bottom), INK.light, 1.5)?;
    for (index, row) in rows.iter().enumerate() {
        let y = ABOVE + (index as f64 + 0.5) * ROW;
        let name = elided(&row.name, ((left - 16.0) / LETTER_WIDTH) as usize);
        drawing::write(sheet, &name, (left - 10.0, y), letters(INK.light, HPos::Right, VPos::Center))?;
        let colour = colour(row.outcome).light;
        drawing::line(sheet, (at(row.ratio.low), y), (at(row.ratio.high), y), colour, 3.0)?;
        let middle = (px(at(row.ratio.median)), px(y));
        // Hollow without a difference, which is visible without colours.
        let inside = if differs(row) { colour } else { GROUND.light };
        sheet.draw(&Circle::new(middle, px(5.0), colour.filled()))?;
        sheet.draw(&Circle::new(middle, px(3.0), inside.filled()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{report::samples::IntervalKind, result::SamplesAre, statistics::Estimate};

    fn row(name: &str, ratio: (f64, f64, f64), outcome: DifferenceVerdict) -> DifferenceRow {
        let (low, median, high) = ratio;
        let ratio = Estimate { median, low, high };
        let samples_are = SamplesAre::Runs;
        let intervals = [IntervalKind::Estimated; 2];
        DifferenceRow {
            name: name.to_owned(),
            unit: MeasureUnit::Iops,
            a: ratio,
            b: ratio,
            ratio,
            outcome,
            samples_are,
            intervals,
        }
    }

    #[test]
    fn rows_without_ratio_are_not_drawn() {
        let infinite = row("new", (1.0, f64::INFINITY, f64::INFINITY), DifferenceVerdict::Same);
        assert_eq!(
            html(&[infinite.clone(), row("gone", (0.0, 0.0, 0.0), DifferenceVerdict::Worse)]).unwrap(),
            None
        );
        let svg =
            html(&[infinite, row("reads", (0.9, 0.95, 0.99), DifferenceVerdict::Worse)]).unwrap().unwrap();
        assert!(svg.contains(">\nreads\n") && !svg.contains(">\nnew\n"), "{svg}");
        assert!(svg.contains(">\n1×\n"), "no difference is on the scale: {svg}");
    }

    #[test]
    fn differing_rows_are_drawn_first() {
        let mut rows = vec![row("same", (0.9, 1.0, 1.1), DifferenceVerdict::Same); 2 * MAX_ROWS];
        rows.push(row("differs", (1.1, 1.2, 1.3), DifferenceVerdict::Better));
        let svg = html(&rows).unwrap().unwrap();
        assert_eq!(svg.matches(">\nsame\n").count(), MAX_ROWS - 1);
        assert!(svg.contains(">\ndiffers\n"), "{svg}");
    }
}
