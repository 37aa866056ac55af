//! A canvas for plotters, and its SVG element.
//!
//! plotters' coordinates are integers. Sheets are therefore [`SCALE`] times as large as displayed;
//! [`px`] and [`letters`] convert. Texts are cleaned here; plotters escapes them.

use std::fmt::Write as _;

use plotters::{
    coord::Shift,
    prelude::{
        DrawingArea, DrawingAreaErrorKind, IntoDrawingArea as _, PathElement, Rectangle, SVGBackend, Text,
    },
    style::{
        Color as _, IntoFont as _, RGBColor, TextStyle,
        text_anchor::{HPos, Pos, VPos},
    },
};

use super::{
    html::{clean, escape},
    palette::{GROUND, INK, code, dash_rules},
};

pub(super) const SCALE: i32 = 10;
/// Font size in pixels, in a drawing at its full width.
const LETTERS: f64 = 14.0;
/// Pixels; approximate, because the font depends on the reader.
pub(super) const LETTER_WIDTH: f64 = 7.6;
/// Ratio of plotters' font size, that of the letters' boxes, to the CSS size.
const BOX: f64 = 1.24;

/// Pixels of a chart in a separate file: title, legend row, line in the legend, margin.
const TITLE: f64 = 34.0;
const ROW: f64 = 20.0;
const SAMPLE: f64 = 28.0;
const MARGIN: f64 = 8.0;

pub(super) type Sheet<'a> = DrawingArea<SVGBackend<'a>, Shift>;
/// Drawing into a string never fails; the error type is plotters'.
pub(super) type Drawn = Result<(), DrawingAreaErrorKind<std::io::Error>>;

pub(super) fn px(pixels: f64) -> i32 {
    (pixels * f64::from(SCALE)).round() as i32
}

pub(super) fn letters(colour: RGBColor, horizontal: HPos, vertical: VPos) -> TextStyle<'static> {
    let size = LETTERS * BOX * f64::from(SCALE);
    ("sans-serif", size).into_font().color(&colour).pos(Pos::new(horizontal, vertical))
}

/// Writes a text at a position in pixels.
pub(super) fn write(sheet: &Sheet, text: &str, (x, y): (f64, f64), style: TextStyle) -> Drawn {
    sheet.draw(&Text::new(clean(text), (px(x), px(y)), style))
}

pub(super) fn line(sheet: &Sheet, from: (f64, f64), to: (f64, f64), colour: RGBColor, width: f64) -> Drawn {
    let ends = [from, to].map(|(x, y)| (px(x), px(y)));
    sheet.draw(&PathElement::new(ends, colour.stroke_width(px(width).unsigned_abs())))
}

/// Fills a rectangle with corners in pixels.
pub(super) fn fill(sheet: &Sheet, from: (f64, f64), to: (f64, f64), colour: RGBColor) -> Drawn {
    let corners = [from, to].map(|(x, y)| (px(x), px(y)));
    sheet.draw(&Rectangle::new(corners, colour.filled()))
}

pub(super) struct SvgDrawing {
    size: (f64, f64),
    /// Alternative text.
    shows: String,
    shapes: String,
}

pub(super) fn drawing(
    (width, height): (f64, f64),
    shows: &str,
    paint: impl FnOnce(&Sheet) -> Drawn,
) -> anyhow::Result<SvgDrawing> {
    let mut drawn = String::new();
    // Borrows the string until the sheet is dropped.
    let sheet = SVGBackend::with_string(&mut drawn, (px(width).unsigned_abs(), px(height).unsigned_abs()));
    let sheet = sheet.into_drawing_area();
    paint(&sheet)?;
    sheet.present()?;
    drop(sheet);
    // plotters' own tag has a fixed size and no alternative text.
    let shapes = drawn.split_once('>').map_or("", |(_, shapes)| shapes).to_owned();
    Ok(SvgDrawing { size: (width, height), shows: escape(shows), shapes })
}

impl SvgDrawing {
    /// Element for an HTML page. Shrinks to three quarters at most, so that letters stay readable.
    pub(super) fn inline(&self) -> String {
        let Self { size: (width, height), shows, shapes } = self;
        format!(
            "<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{shows}\" \
             style=\"max-width:{width}px;min-width:{:.0}px\">\n<title>{shows}</title>{shapes}",
            px(*width),
            px(*height),
            width * 0.75
        )
    }

    /// Standalone SVG file with title and legend, in light colours on an opaque background.
    pub(super) fn alone(&self, legend: &[(&str, RGBColor)]) -> String {
        let Self { size: (width, height), shows, shapes } = self;
        let (ground, ink, version) = (code(GROUND.light), code(INK.light), env!("CARGO_PKG_VERSION"));
        let mut marks = String::new();
        let (mut x, mut y) = (MARGIN, TITLE);
        for (name, colour) in legend.iter().filter(|(name, _)| !name.is_empty()) {
            // Legend entries wrap when a row is full.
            let wide = SAMPLE + name.chars().count() as f64 * LETTER_WIDTH + 2.0 * MARGIN;
            if x > MARGIN && x + wide > *width {
                (x, y) = (MARGIN, y + ROW);
            }
            let (colour, units, at) = (code(*colour), px(SAMPLE), x + SAMPLE + MARGIN / 2.0);
            let _ = writeln!(
                marks,
                "<svg x=\"{x}\" y=\"{}\" width=\"{SAMPLE}\" height=\"4\" viewBox=\"0 0 {units} 40\">\
                 <line x2=\"{units}\" y1=\"20\" y2=\"20\" stroke=\"{colour}\" stroke-width=\"30\"/></svg>\
                 <text x=\"{at:.1}\" y=\"{:.1}\" fill=\"{ink}\">{}</text>",
                y + 5.0,
                y + 12.0,
                escape(name)
            );
            x += wide;
        }
        // The chart is a nested SVG below the legend, in its own coordinates.
        let top = if marks.is_empty() { TITLE } else { y + ROW };
        format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" width=\"{width}\" height=\"{all}\" \
             viewBox=\"0 0 {width} {all}\" font-family=\"sans-serif\" font-size=\"{LETTERS}\" \
             role=\"img\" aria-label=\"{shows}\">\n\
             <!-- weir {version} -->\n\
             <title>{shows}</title>\n\
             <style>\n\
             {dashes}</style>\n\
             <rect width=\"100%\" height=\"100%\" fill=\"{ground}\"/>\n\
             <text x=\"{MARGIN}\" y=\"22\" font-weight=\"bold\" fill=\"{ink}\">{shows}</text>\n\
             {marks}<svg y=\"{top}\" width=\"{width}\" height=\"{height}\" viewBox=\"0 0 {} \
             {}\">{shapes}</svg>\n",
            px(*width),
            px(*height),
            all = top + height,
            dashes = dash_rules(SCALE),
        )
    }
}
