//! A complete HTML page.
//!
//! A page is self-contained: no external script, font or picture. It can be mailed and archived.
//! All text is escaped.

use std::fmt::Write as _;

use console::{figures, table::ColumnAlignment};

use super::{
    columns,
    drawing::SCALE,
    heat_map,
    html::escape,
    lines, palette,
    quantity::{self, short},
    samples::{IntervalKind, estimated},
};
use crate::{
    duration::duration,
    result::{Chart, Measure, MeasureUnit, ResultHeader, ResultTable},
};

const STYLE: &str = include_str!("page.css");
/// Length from which a cell is broken into lines.
const LONG: usize = 48;
/// Maximum number of columns of a table: with more, it is wider than a phone.
const MAX_COLUMNS: usize = 6;
/// Longer lists of measures are collapsed.
const MANY: usize = 40;

#[derive(Debug)]
pub(super) struct ReportPage {
    title: String,
    body: String,
}

impl ReportPage {
    pub(super) fn new(title: &str) -> Self {
        Self { title: title.to_owned(), body: format!("<h1>{}</h1>\n", escape(title)) }
    }

    pub(super) fn finish(self) -> String {
        let (title, body, version) = (escape(&self.title), self.body, env!("CARGO_PKG_VERSION"));
        // Generated from the palette, so that they match the colours in the charts.
        let (dark, dashes) = (palette::dark_rules(), palette::dash_rules(SCALE));
        format!(
            "<!DOCTYPE html>\n\
             <html lang=\"en\">\n\
             <head>\n\
             <meta charset=\"utf-8\">\n\
             <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\n\
             <meta name=\"generator\" content=\"weir {version}\">\n\
             <title>{title}</title>\n\
             <style>\n\
             {STYLE}{dashes}@media screen and (prefers-color-scheme: dark) {{\n\
             {dark}}}\n\
             </style>\n\
             </head>\n\
             <body>\n\
             <main>\n\
             {body}</main>\n\
             <footer>Drawn by weir {version}. <code>weir report A.json B.json</code> compares two \
             results.</footer>\n\
             </body>\n\
             </html>\n"
        )
    }

    pub(super) fn command(&mut self, header: &ResultHeader) {
        self.put(&format!("<p class=\"command\"><code>{}</code></p>", escape(&command(header))));
    }

    pub(super) fn facts(&mut self, header: &ResultHeader) {
        self.put("<dl>");
        for (name, fact) in facts(header) {
            self.put(&format!("<dt>{}</dt><dd>{}</dd>", escape(name), escape(&fact)));
        }
        self.put("</dl>");
    }

    pub(super) fn warning(&mut self, text: &str) {
        self.put(&format!("<p class=\"partial\" role=\"note\">{}</p>", escape(text)));
    }

    /// Adds paragraphs; one with several lines, such as a configuration, is shown verbatim.
    pub(super) fn summary(&mut self, paragraphs: &[String]) {
        for paragraph in paragraphs {
            let text = escape(paragraph.trim_end());
            let html = if text.contains('\n') {
                format!("<pre>{text}</pre>")
            } else {
                format!("<p class=\"summary\">{text}</p>")
            };
            self.put(&html);
        }
    }

    pub(super) fn heading(&mut self, text: &str) {
        self.put(&format!("<h2>{}</h2>", escape(text)));
    }

    pub(super) fn table(&mut self, shown: &ResultTable) {
        let stacked = if is_wide(shown) { " stacked" } else { "" };
        self.put(&format!("<section class=\"table{stacked}\">"));
        if !shown.title.is_empty() {
            self.put(&format!("<h3>{}</h3>", escape(&shown.title)));
        }
        self.put(&format!("<div class=\"wide\">{}</div>", table(shown)));
        if let Some(note) = &shown.note {
            self.put(&format!("<p class=\"note\">{}</p>", escape(note)));
        }
        self.put("</section>");
    }

    pub(super) fn chart(&mut self, chart: &Chart) -> anyhow::Result<()> {
        let (title, drawn) = match chart {
            Chart::Lines(lines) => (&lines.title, lines::html(lines)?),
            Chart::HeatMap(map) => (&map.title, heat_map::html(map)?),
        };
        self.figure(title, &drawn);
        Ok(())
    }

    /// Adds a figure: `drawn` is HTML, `title` is plain text.
    pub(super) fn figure(&mut self, title: &str, drawn: &str) {
        self.put(&format!("<figure><figcaption>{}</figcaption>{drawn}</figure>", escape(title)));
    }

    pub(super) fn measures(&mut self, list: &[Measure]) {
        let table = table(&measures(list));
        // A `details` element needs no script.
        let open = if list.len() <= MANY { " open" } else { "" };
        let count = list.len();
        self.put(&format!(
            "<details{open}><summary>{count} measured</summary><div class=\"wide\">{table}</div></details>"
        ));
    }

    fn put(&mut self, html: &str) {
        self.body += html;
        self.body.push('\n');
    }
}

/// The command as typed, without the program's directory.
pub(super) fn command(header: &ResultHeader) -> String {
    let program = |argument: &String| argument.rsplit('/').next().unwrap_or_default().to_owned();
    let quoted = |argument: &String| {
        let plain = |letter: char| letter.is_alphanumeric() || "-_./:=,+@%".contains(letter);
        let is_plain = !argument.is_empty() && argument.chars().all(plain);
        if is_plain { argument.clone() } else { format!("'{}'", argument.replace('\'', r"'\''")) }
    };
    let arguments = header.command.iter().skip(1).map(quoted);
    header.command.first().map(program).into_iter().chain(arguments).collect::<Vec<_>>().join(" ")
}

/// Known facts about the run.
pub(super) fn facts(header: &ResultHeader) -> Vec<(&'static str, String)> {
    let machine = &header.machine;
    let began = figures::date(u32::try_from(header.began).unwrap_or(u32::MAX));
    let elapsed = duration(header.seconds);
    let when = match header.began {
        0 if header.seconds == 0.0 => String::new(),
        0 => elapsed,
        _ => format!("{began} UTC, for {elapsed}"),
    };
    let device = header.device.as_ref().map_or_else(String::new, |device| {
        let system = device.file_system.as_ref().map(|name| format!(", {name}")).unwrap_or_default();
        format!("{} ({}){system}", device.node, device.key)
    });
    let (processors, memory) = (machine.processors, short(machine.memory_bytes as f64, MeasureUnit::Bytes));
    // A recording does not contain these figures.
    let of_machine = match machine.processors {
        0 => String::new(),
        _ => format!("{processors} × {}, {memory} of memory", machine.processor),
    };
    let facts = [
        ("When", when),
        ("Device", device),
        ("Machine", of_machine),
        ("Kernel", machine.kernel.clone()),
        ("weir", header.weir.clone()),
    ];
    facts.into_iter().filter(|(_, fact)| !fact.is_empty()).collect()
}

pub(super) fn measures(list: &[Measure]) -> ResultTable {
    let row = |measure: &Measure| {
        let [median, low, high] = quantity::estimate(estimated(measure), measure.unit);
        let interval = IntervalKind::of(measure).text(&low, &high);
        vec![measure.name.clone(), median, interval, measure.samples.len().to_string()]
    };
    let columns = ["measure", "median", "95 of 100 in", "samples"];
    ResultTable::new("Measured", columns, list.iter().map(row).collect())
}

/// True if a table is wider than a phone: cells have several lines or sentences, or there are many
/// columns. On a phone a row of such a table is a block, in which each cell is beside or below the
/// name of its column, so that no sideways scrolling is needed.
fn is_wide(shown: &ResultTable) -> bool {
    let is_long = |cell: &String| cell.contains('\n') || cell.chars().count() > LONG;
    shown.columns.len() > MAX_COLUMNS || shown.rows.iter().flatten().any(is_long)
}

fn table(shown: &ResultTable) -> String {
    let sides = columns::sides(shown);
    let is_wide = is_wide(shown);
    let class = |column: usize, text: &str| {
        let right = sides.get(column) == Some(&ColumnAlignment::Right);
        match text {
            _ if right => " class=\"number\"",
            text if text.contains('\n') => " class=\"lines\"",
            text if text.chars().count() > LONG => " class=\"long\"",
            _ => "",
        }
    };
    let mut html = "<table><thead><tr>".to_owned();
    for (column, name) in shown.columns.iter().enumerate() {
        let _ = write!(html, "<th scope=\"col\"{}>{}</th>", class(column, ""), escape(name));
    }
    html += "</tr></thead><tbody>\n";
    for row in &shown.rows {
        html += "<tr>";
        for (column, cell) in row.iter().enumerate() {
            let name = shown.columns.get(column).filter(|name| is_wide && !name.is_empty());
            let label = name.map_or_else(String::new, |name| format!(" data-label=\"{}\"", escape(name)));
            let _ = write!(html, "<td{}{label}>{}</td>", class(column, cell), escape(cell));
        }
        html += "</tr>\n";
    }
    html + "</tbody></table>"
}
