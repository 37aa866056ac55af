//! A matrix of values, drawn: the better a value, the stronger its cell. Each value is also written
//! into its cell, so colour alone says nothing.

use std::fmt::Write as _;

use plotters::style::text_anchor::{HPos, VPos};

use super::{
    drawing::{self, Drawing, Drawn, LETTER_WIDTH, Sheet, letters},
    html::cut,
    palette::{CELLS, FAINT, INK, NO_CELL, ON_FAINT, ON_STRONG},
    quantity,
};
use crate::result::{Better, HeatMap};

const CELL_HEIGHT: f64 = 34.0;
const CELL_WIDTHS: (f64, f64) = (64.0, 100.0);
const NAME_WIDTHS: (f64, f64) = (40.0, 260.0);
/// Height of a line of the columns' names, and the most lines.
const LINE: f64 = 18.0;
const LINES: usize = 4;
const GAP: f64 = 2.0;
const MARGIN: f64 = 8.0;
/// Rows and columns that are drawn.
const MOST: usize = 64;

pub(super) fn html(map: &HeatMap) -> anyhow::Result<String> {
    let drawing = drawing(map)?.inline();
    let best = match map.better {
        Better::Higher => "higher",
        Better::Lower => "lower",
    };
    let mut html = format!(
        "<p class=\"note\">The stronger a cell, the better; {best} is better.</p><div class=\"wide\">{drawing}</div>"
    );
    if map.rows.len() > MOST || map.columns.len() > MOST {
        let (rows, columns) = (map.rows.len(), map.columns.len());
        let _ = write!(
            html,
            "<p class=\"note\">At most {MOST} rows and columns are drawn, of {rows} and {columns}.</p>"
        );
    }
    Ok(html)
}

pub(super) fn alone(map: &HeatMap) -> anyhow::Result<String> {
    Ok(drawing(map)?.alone(&[]))
}

fn drawing(map: &HeatMap) -> anyhow::Result<Drawing> {
    let layout = Layout::of(map);
    drawing::drawing(layout.size(), &map.title, |sheet| layout.paint(sheet, map))
}

struct Layout {
    rows: usize,
    columns: usize,
    name_width: f64,
    cell_width: f64,
    heads: Vec<Vec<String>>,
    head_height: f64,
}

impl Layout {
    fn of(map: &HeatMap) -> Self {
        let (rows, columns) = (map.rows.len().min(MOST), map.columns.len().min(MOST));
        let longest = |names: &[String]| names.iter().map(|name| name.chars().count()).max().unwrap_or(0);
        let room = |letters: usize, (least, most): (f64, f64)| {
            (letters as f64 * LETTER_WIDTH + 2.0 * MARGIN).clamp(least, most)
        };
        let cell_width = room(longest(&map.columns[..columns]), CELL_WIDTHS);
        let heads: Vec<_> =
            map.columns[..columns].iter().map(|name| wrapped(name, fitting(cell_width))).collect();
        let lines = heads.iter().map(Vec::len).max().unwrap_or(1);
        Self {
            rows,
            columns,
            name_width: room(longest(&map.rows[..rows]), NAME_WIDTHS),
            cell_width,
            heads,
            head_height: lines as f64 * LINE + MARGIN,
        }
    }

    fn size(&self) -> (f64, f64) {
        let width = self.name_width + self.columns as f64 * self.cell_width;
        (width.max(200.0), self.head_height + self.rows.max(1) as f64 * CELL_HEIGHT)
    }

    fn paint(&self, sheet: &Sheet, map: &HeatMap) -> Drawn {
        if self.rows == 0 || self.columns == 0 {
            return drawing::write(
                sheet,
                "no values",
                (MARGIN, self.head_height),
                letters(INK.light, HPos::Left, VPos::Top),
            );
        }
        for (column, lines) in self.heads.iter().enumerate() {
            let x = self.name_width + (column as f64 + 0.5) * self.cell_width;
            for (line, text) in lines.iter().rev().enumerate() {
                let y = self.head_height - MARGIN / 2.0 - (line as f64 + 0.5) * LINE;
                drawing::write(sheet, text, (x, y), letters(INK.light, HPos::Center, VPos::Center))?;
            }
        }
        let range = range(map);
        for (row, name) in map.rows.iter().take(self.rows).enumerate() {
            let y = self.head_height + (row as f64 + 0.5) * CELL_HEIGHT;
            let style = letters(INK.light, HPos::Right, VPos::Center);
            drawing::write(
                sheet,
                &cut(name, fitting(self.name_width)),
                (self.name_width - MARGIN, y),
                style,
            )?;
            for column in 0..self.columns {
                let value = map.values.get(row).and_then(|row| *row.get(column)?);
                self.cell(sheet, (row, column), value.filter(|value| value.is_finite()), range, map)?;
            }
        }
        Ok(())
    }

    fn cell(
        &self,
        sheet: &Sheet,
        (row, column): (usize, usize),
        value: Option<f64>,
        range: (f64, f64),
        map: &HeatMap,
    ) -> Drawn {
        let left = self.name_width + column as f64 * self.cell_width;
        let top = self.head_height + row as f64 * CELL_HEIGHT;
        let (right, bottom) = (left + self.cell_width - GAP, top + CELL_HEIGHT - GAP);
        let step = value.map(|value| strength(value, range, map.better));
        let colour = step.map_or(NO_CELL, |step| CELLS[step]);
        drawing::fill(sheet, (left, top), (right, bottom), colour.light)?;
        let ink = if step.is_some_and(|step| step >= FAINT) { ON_STRONG } else { ON_FAINT };
        let text = value.map_or_else(|| "–".to_owned(), |value| quantity::short(value, map.unit));
        let centre = (f64::midpoint(left, right), f64::midpoint(top, bottom));
        drawing::write(sheet, &text, centre, letters(ink.light, HPos::Center, VPos::Center))
    }
}

fn fitting(width: f64) -> usize {
    ((width - 2.0 * MARGIN) / LETTER_WIDTH) as usize
}

/// Broken between words; what does not fit is cut.
fn wrapped(name: &str, most: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in name.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= most => {
                line.push(' ');
                *line += word;
            }
            _ => lines.push(word.to_owned()),
        }
    }
    if lines.len() > LINES {
        let rest = lines.split_off(LINES - 1).join(" ");
        lines.push(rest);
    }
    lines.iter().map(|line| cut(line, most)).collect()
}

fn range(map: &HeatMap) -> (f64, f64) {
    let values = map.values.iter().flatten().flatten().filter(|value| value.is_finite());
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &value| (low.min(value), high.max(value)))
}

/// By factors if values span more than ten times, or all but the largest would look alike.
fn strength(value: f64, (low, high): (f64, f64), better: Better) -> usize {
    let share = if low > 0.0 && high / low > 10.0 {
        (value.ln() - low.ln()) / (high.ln() - low.ln())
    } else if high > low {
        // Halved first: the difference of two numbers may be larger than any number.
        (value / 2.0 - low / 2.0) / (high / 2.0 - low / 2.0)
    } else {
        0.5
    };
    let good = match better {
        Better::Higher => share,
        Better::Lower => 1.0 - share,
    };
    (good.clamp(0.0, 1.0) * CELLS.len() as f64).min(CELLS.len() as f64 - 1.0) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::result::Unit;

    fn map(values: Vec<Vec<Option<f64>>>) -> HeatMap {
        HeatMap {
            title: "p99 by cache and cluster".to_owned(),
            unit: Unit::Nanoseconds,
            better: Better::Lower,
            columns: vec!["64K".to_owned(), "<b>".to_owned()],
            rows: vec!["none".to_owned(), "a name that is far too long for the place there is".to_owned()],
            values,
        }
    }

    #[test]
    fn each_value_is_written_into_its_cell() {
        let svg = html(&map(vec![vec![Some(85e3), Some(1.2e6)], vec![None, Some(3e6)]])).unwrap();
        for text in
            ["85us", "1.2ms", "3ms", "–", "none", "64K", "&lt;b&gt;", "a name that is f…place there is"]
        {
            assert!(svg.contains(&format!(">\n{text}\n</text>")), "{text} in {svg}");
        }
        assert!(svg.contains("lower is better"), "{svg}");
        assert_eq!(svg.matches("<rect").count(), 4);
    }

    #[test]
    fn a_matrix_may_have_holes_and_no_end() {
        assert!(html(&map(vec![])).unwrap().contains("<rect"));
        let mut large = map(vec![vec![Some(1.0); 200]; 3]);
        large.columns = vec!["x".to_owned(); 200];
        let svg = html(&large).unwrap();
        assert!(svg.contains("At most 64 rows and columns are drawn, of 2 and 200."), "{svg}");
        assert!(html(&HeatMap { rows: vec![], ..map(vec![]) }).unwrap().contains("no values"));
    }

    #[test]
    fn long_names_are_broken_between_words() {
        assert_eq!(wrapped("random read 4K ×32", 12), ["random read", "4K ×32"]);
        assert_eq!(wrapped("a b c d e f g h", 1), ["a", "b", "c", "…"]);
        assert_eq!(wrapped("writethrough", 7), ["wri…ugh"]);
        assert_eq!(wrapped(" ", 7), [""; 0]);
    }

    #[test]
    fn the_best_stand_out_most() {
        let best = CELLS.len() - 1;
        assert_eq!(strength(10.0, (1.0, 10.0), Better::Higher), best);
        assert_eq!(strength(10.0, (1.0, 10.0), Better::Lower), 0);
        assert_eq!(strength(1e3, (1.0, 1e6), Better::Higher), best / 2);
        assert_eq!(strength(5.0, (5.0, 5.0), Better::Higher), best / 2);
        assert_eq!(strength(f64::MAX, (f64::MIN, f64::MAX), Better::Higher), best);
    }
}
