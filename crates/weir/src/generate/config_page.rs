//! weir.toml(5): the keys of the config file, from their tables.

use std::io;

use clap_mangen::roff::{Roff, bold, italic, roman};

use super::keys::{KeyRow, as_keys, sections};

const ABOUT: &str = "The config file of weir-serve(1) and of the service weir.service. It is TOML. \
    The keys are the names of the options of weir-serve(1), and their values have the same form. \
    Relative paths start at the directory of the file. An unknown key is an error. \
    weir-check-config(1) checks a file.";

/// The page, in roff.
pub(super) fn page(date: &str) -> io::Result<Vec<u8>> {
    let mut roff = Roff::new();
    let source = concat!("weir ", env!("CARGO_PKG_VERSION"));
    roff.control("TH", ["weir.toml", "5", date, source, "File Formats"]);
    roff.control("SH", ["NAME"]);
    roff.text([roman("weir.toml - config file of weir")]);
    roff.control("SH", ["SYNOPSIS"]);
    roff.text([roman("/etc/weir/weir.toml")]);
    roff.control("SH", ["DESCRIPTION"]);
    roff.text([roman(ABOUT)]);
    for section in sections() {
        let title = match section.kind {
            Some(kind) => format!("{} OF TYPE {kind}", section.title),
            None => section.title.to_owned(),
        };
        roff.control("SH", [title.as_str()]);
        roff.text([roman(format!("{}.", section.about))]);
        for row in &section.rows {
            key(&mut roff, row);
        }
    }
    roff.control("SH", ["FILES"]);
    roff.control("TP", []);
    roff.text([bold("/usr/share/doc/weir/docs/reference/config.schema.json")]);
    roff.text([roman("The schema of the file, for editors.")]);
    roff.control("SH", ["SEE ALSO"]);
    roff.text([
        bold("weir-serve"),
        roman("(1), "),
        bold("weir-check-config"),
        roman("(1), "),
        bold("weir-reload"),
        roman("(1)"),
    ]);
    let mut text = Vec::new();
    roff.to_writer(&mut text)?;
    Ok(text)
}

fn key(roff: &mut Roff, row: &KeyRow) {
    roff.control("TP", []);
    match row.placeholder {
        "" => roff.text([bold(row.name), roman(" = "), italic("true|false")]),
        placeholder => roff.text([bold(row.name), roman(" = "), italic(placeholder)]),
    };
    let plain = |text: &str| as_keys(text).replace('`', "");
    let default = match row.default {
        "" => String::new(),
        "required" => " (required)".to_owned(),
        default => format!(" [default: {}]", plain(default)),
    };
    let list = if row.is_list { " A list has several values." } else { "" };
    roff.text([roman(format!("{}{default}.{list}", row.meaning().replace('`', "")))]);
}
