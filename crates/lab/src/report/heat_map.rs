//! Heat map of a matrix. Each value is also written into its cell, so that no information depends
//! on colour alone.
//!
//! Values of any unit: the better, the stronger the colour. Ratios: blue is better than 1×, orange
//! worse; the colour is stronger further from 1×, and differences within noise have none. Columns
//! that do not fit on a phone are drawn in bands, which lie side by side on wider screens.

use std::{fmt::Write as _, ops::Range};

use console::figures::elided;
use plotters::style::{
    FontTransform,
    text_anchor::{HPos, VPos},
};

use super::{
    drawing::{self, Drawn, LETTER_WIDTH, Sheet, SvgDrawing, letters},
    palette::{BETTER, CELLS, ColourPair, FAINT, INK, NO_CELL, ON_FAINT, ON_STRONG, WORSE},
    quantity,
};
use crate::result::{Better, HeatMap, MeasureUnit};

const CELL_HEIGHT: f64 = 34.0;
const CELL_WIDTHS: (f64, f64) = (34.0, 80.0);
const NAME_WIDTHS: (f64, f64) = (40.0, 190.0);
/// Width of a band: that of a phone without its margins.
const BAND: f64 = 356.0;
/// Column names are rotated, and end at the cells.
const HEAD_HEIGHTS: (f64, f64) = (40.0, 260.0);
const LINE: f64 = 15.0;
/// Lines of a row's name.
const LINES: usize = 2;
const GAP: f64 = 2.0;
const MARGIN: f64 = 8.0;
/// Bound on the rows and columns drawn.
const MAX_COLUMNS: usize = 64;
/// Ratios, and their inverses, from which the colour is one step stronger. Ratios nearer to 1 have
/// no colour.
const STEPS: [f64; 4] = [1.05, 1.3, 2.0, 4.0];

pub(super) fn html(map: &HeatMap) -> anyhow::Result<String> {
    let best = match map.better {
        Better::Higher => "higher",
        Better::Lower => "lower",
    };
    let note = match map.unit {
        MeasureUnit::Ratio => format!(
            "Blue is better than 1×, orange worse; {best} is better. Without colour: no difference \
             beyond noise{}.",
            if map.noise.is_empty() { ", or 5 %" } else { "" }
        ),
        _ => format!("The stronger a cell, the better; {best} is better."),
    };
    let mut html = format!("<p class=\"note\">{note}</p><div class=\"bands\">");
    for band in bands(map) {
        html += &drawing(map, band)?.inline();
    }
    html += "</div>";
    if map.rows.len() > MAX_COLUMNS || map.columns.len() > MAX_COLUMNS {
        let (rows, columns) = (map.rows.len(), map.columns.len());
        let _ = write!(
            html,
            "<p class=\"note\">At most {MAX_COLUMNS} rows and columns are drawn, of {rows} and {columns}.</p>"
        );
    }
    Ok(html)
}

pub(super) fn alone(map: &HeatMap) -> anyhow::Result<String> {
    Ok(drawing(map, 0..map.columns.len().min(MAX_COLUMNS))?.alone(&[]))
}

fn drawing(map: &HeatMap, columns: Range<usize>) -> anyhow::Result<SvgDrawing> {
    let layout = HeatMapLayout::of(map, columns);
    drawing::drawing(layout.size(), &map.title, |sheet| layout.paint(sheet, map))
}

/// Bands of columns of about the same width; one empty band if there are no columns.
fn bands(map: &HeatMap) -> Vec<Range<usize>> {
    let columns = map.columns.len().min(MAX_COLUMNS);
    let HeatMapLayout { name_width, cell_width, .. } = HeatMapLayout::of(map, 0..columns);
    // At least one column in a band, however wide its cells are.
    let max_columns = (((BAND - name_width) / cell_width) as usize).max(1);
    let bands = columns.div_ceil(max_columns).max(1);
    (0..bands).map(|band| band * columns / bands..(band + 1) * columns / bands).collect()
}

fn value(map: &HeatMap, row: usize, column: usize) -> Option<f64> {
    map.values.get(row).and_then(|row| *row.get(column)?).filter(|value| value.is_finite())
}

/// Formats a value; ratios to two digits and without their sign, which the note explains.
fn shown(value: f64, unit: MeasureUnit) -> String {
    match value {
        _ if unit != MeasureUnit::Ratio => quantity::short(value, unit),
        _ if !(-10.0..1e4).contains(&value) => quantity::short(value, unit),
        _ if value.abs() < 10.0 => format!("{value:.2}"),
        _ => format!("{value:.0}"),
    }
}

struct HeatMapLayout {
    rows: usize,
    columns: Range<usize>,
    names: Vec<Vec<String>>,
    name_width: f64,
    cell_width: f64,
    head_height: f64,
}

impl HeatMapLayout {
    fn of(map: &HeatMap, columns: Range<usize>) -> Self {
        let rows = map.rows.len().min(MAX_COLUMNS);
        let room = |letters: usize, (min, max): (f64, f64)| {
            (letters as f64 * LETTER_WIDTH + 2.0 * MARGIN).clamp(min, max)
        };
        let longest = |names: &mut dyn Iterator<Item = &String>| {
            names.map(|name| name.chars().count()).max().unwrap_or(0)
        };
        // Widths are determined over all columns, so that the bands are aligned.
        let column_count = map.columns.len().min(MAX_COLUMNS);
        let cells =
            (0..rows).flat_map(|row| (0..column_count).filter_map(move |column| value(map, row, column)));
        let cells: Vec<String> = cells.map(|value| shown(value, map.unit)).collect();
        let max_letters = fitting(NAME_WIDTHS.1);
        let names: Vec<_> = map.rows[..rows].iter().map(|name| wrapped(name, max_letters)).collect();
        Self {
            rows,
            name_width: room(longest(&mut names.iter().flatten()), NAME_WIDTHS),
            names,
            cell_width: room(longest(&mut cells.iter()), CELL_WIDTHS) - GAP,
            head_height: room(longest(&mut map.columns[..column_count].iter()), HEAD_HEIGHTS),
            columns,
        }
    }

    fn size(&self) -> (f64, f64) {
        let width = self.name_width + self.columns.len() as f64 * self.cell_width;
        (width.max(200.0), self.head_height + self.rows.max(1) as f64 * CELL_HEIGHT)
    }

    fn paint(&self, sheet: &Sheet, map: &HeatMap) -> Drawn {
        if self.rows == 0 || self.columns.is_empty() {
            return drawing::write(
                sheet,
                "no values",
                (MARGIN, self.head_height),
                letters(INK.light, HPos::Left, VPos::Top),
            );
        }
        let upright = letters(INK.light, HPos::Left, VPos::Center).transform(FontTransform::Rotate270);
        for (place, name) in map.columns[self.columns.clone()].iter().enumerate() {
            let x = self.name_width + (place as f64 + 0.5) * self.cell_width;
            let name = elided(name, fitting(self.head_height));
            drawing::write(sheet, &name, (x, self.head_height - MARGIN / 2.0), upright.clone())?;
        }
        let range = range(map);
        for (row, lines) in self.names.iter().enumerate() {
            let middle = self.head_height + (row as f64 + 0.5) * CELL_HEIGHT - GAP / 2.0;
            let style = letters(INK.light, HPos::Right, VPos::Center);
            for (line, text) in lines.iter().enumerate() {
                // Lines are centred around the middle of the row.
                let y = middle + (line as f64 - (lines.len() as f64 - 1.0) / 2.0) * LINE;
                drawing::write(sheet, text, (self.name_width - MARGIN, y), style.clone())?;
            }
            for (place, column) in self.columns.clone().enumerate() {
                let colours = match value(map, row, column) {
                    None => CellColours { fill: NO_CELL, text: ON_FAINT },
                    Some(value) if map.unit == MeasureUnit::Ratio => {
                        let is_noise =
                            map.noise.get(row).and_then(|row| row.get(column)).copied().unwrap_or(false);
                        ratio_colours(value, map.better, is_noise)
                    }
                    Some(value) => {
                        let step = strength(value, range, map.better);
                        let text = if step < FAINT { ON_FAINT } else { ON_STRONG };
                        CellColours { fill: CELLS[step], text }
                    }
                };
                let text =
                    value(map, row, column).map_or_else(|| "–".to_owned(), |value| shown(value, map.unit));
                self.cell(sheet, row, place, &text, colours)?;
            }
        }
        Ok(())
    }

    fn cell(&self, sheet: &Sheet, row: usize, place: usize, text: &str, colours: CellColours) -> Drawn {
        let left = self.name_width + place as f64 * self.cell_width;
        let top = self.head_height + row as f64 * CELL_HEIGHT;
        let (right, bottom) = (left + self.cell_width - GAP, top + CELL_HEIGHT - GAP);
        drawing::fill(sheet, (left, top), (right, bottom), colours.fill.light)?;
        let centre = (f64::midpoint(left, right), f64::midpoint(top, bottom));
        drawing::write(sheet, text, centre, letters(colours.text.light, HPos::Center, VPos::Center))
    }
}

fn fitting(width: f64) -> usize {
    ((width - 2.0 * MARGIN) / LETTER_WIDTH) as usize
}

/// Breaks a name between words; the rest is elided in the middle.
fn wrapped(name: &str, max_letters: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in name.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= max_letters => {
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
    lines.iter().map(|line| elided(line, max_letters)).collect()
}

fn range(map: &HeatMap) -> (f64, f64) {
    let values = map.values.iter().flatten().flatten().filter(|value| value.is_finite());
    values.fold((f64::INFINITY, f64::NEG_INFINITY), |(low, high), &value| (low.min(value), high.max(value)))
}

/// Colours of a cell and of its text.
struct CellColours {
    fill: ColourPair,
    text: ColourPair,
}

/// Colours of a ratio.
fn ratio_colours(value: f64, better: Better, is_noise: bool) -> CellColours {
    // Half and twice have the same strength; zero counts as an extreme ratio.
    let factor = if value < 1.0 { 1.0 / value.max(f64::MIN_POSITIVE) } else { value };
    let reached = STEPS.iter().filter(|step| factor >= **step).count();
    let Some(step) = reached.checked_sub(1).filter(|_| !is_noise) else {
        return CellColours { fill: NO_CELL, text: ON_FAINT };
    };
    let good = (value > 1.0) == (better == Better::Higher);
    CellColours {
        fill: if good { BETTER[step] } else { WORSE[step] },
        text: if step < STEPS.len() / 2 { ON_FAINT } else { ON_STRONG },
    }
}

/// Colour step of a value; on a logarithmic scale if values span more than a factor of ten, where a
/// linear one would show differences of the largest only.
fn strength(value: f64, (low, high): (f64, f64), better: Better) -> usize {
    let share = if low > 0.0 && high / low > 10.0 {
        (value.ln() - low.ln()) / (high.ln() - low.ln())
    } else if high > low {
        // Halved first: the difference of two finite numbers may overflow.
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
    use crate::result::MeasureUnit;

    fn map(values: Vec<Vec<Option<f64>>>) -> HeatMap {
        HeatMap {
            title: "p99 by cache and cluster".to_owned(),
            unit: MeasureUnit::Nanoseconds,
            better: Better::Lower,
            columns: vec!["64K".to_owned(), "<b>".to_owned()],
            rows: vec!["none".to_owned(), "a name that is far too long for the place there is".to_owned()],
            values,
            noise: Vec::new(),
        }
    }

    #[test]
    fn each_value_is_written_into_its_cell() {
        let svg = html(&map(vec![vec![Some(85e3), Some(1.2e6)], vec![None, Some(3e6)]])).unwrap();
        let rows = ["none", "a name that is far too", "long for th…e there is"];
        for text in ["85us", "1.2ms", "3ms", "–", "64K", "&lt;b&gt;"].into_iter().chain(rows) {
            assert!(svg.contains(&format!(">\n{text}\n</text>")), "{text} in {svg}");
        }
        assert!(svg.contains("lower is better"), "{svg}");
        assert_eq!(svg.matches("<rect").count(), 4);
    }

    #[test]
    fn missing_and_infinite_cells_are_drawn() {
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
        assert_eq!(wrapped("a b c d e f g h", 1), ["a", "…"]);
        assert_eq!(wrapped("writethrough", 7), ["wri…ugh"]);
        assert_eq!(wrapped(" ", 7), [""; 0]);
    }

    #[test]
    fn names_of_configurations_and_patterns_are_not_cut() {
        let names = ["writethrough, 512K, L2 1/128, prefetch", "sequential first write 1M ×32"];
        let lines = wrapped(names[0], fitting(NAME_WIDTHS.1));
        assert_eq!(lines.join(" "), names[0]);
        assert_eq!(elided(names[1], fitting(HEAD_HEIGHTS.1)), names[1]);
    }

    #[test]
    fn noise_has_neither_colour_of_a_quotient() {
        let colour = |value, better, is_noise| ratio_colours(value, better, is_noise).fill.light;
        for (value, higher, lower) in [
            (0.2, WORSE[3], BETTER[3]),
            (0.44, WORSE[2], BETTER[2]),
            (1.07, BETTER[0], WORSE[0]),
            (1.5, BETTER[1], WORSE[1]),
            (9.0, BETTER[3], WORSE[3]),
            (1.0, NO_CELL, NO_CELL),
            (0.0, WORSE[3], BETTER[3]),
        ] {
            assert_eq!(colour(value, Better::Higher, false), higher.light, "{value}");
            assert_eq!(colour(value, Better::Lower, false), lower.light, "{value}");
            assert_eq!(colour(value, Better::Higher, true), NO_CELL.light, "{value}");
        }
    }

    #[test]
    fn wide_maps_are_split_into_bands() {
        let mut wide = map(vec![vec![Some(1.5); 22]; 2]);
        wide.columns = (0..22).map(|number| format!("random read 4K ×{number}")).collect();
        wide.unit = MeasureUnit::Ratio;
        let bands = bands(&wide);
        assert_eq!(bands.iter().map(ExactSizeIterator::len).sum::<usize>(), 22);
        assert!(bands.windows(2).all(|pair| pair[0].end == pair[1].start), "{bands:?}");
        assert!(
            bands.iter().all(|band| HeatMapLayout::of(&wide, band.clone()).size().0 <= BAND),
            "{bands:?}"
        );
        let svg = html(&wide).unwrap();
        assert_eq!((svg.matches("<svg").count(), svg.matches(">\n1.50\n<").count()), (bands.len(), 44));
    }

    #[test]
    fn best_cells_have_the_most_contrast() {
        let best = CELLS.len() - 1;
        assert_eq!(strength(10.0, (1.0, 10.0), Better::Higher), best);
        assert_eq!(strength(10.0, (1.0, 10.0), Better::Lower), 0);
        assert_eq!(strength(1e3, (1.0, 1e6), Better::Higher), best / 2);
        assert_eq!(strength(5.0, (5.0, 5.0), Better::Higher), best / 2);
        assert_eq!(strength(f64::MAX, (f64::MIN, f64::MAX), Better::Higher), best);
    }
}
