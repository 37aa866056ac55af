//! The tables of keys in the reference of the config file.
//!
//! ```text
//!   <!-- keys: disk, Image, Access -->   section `disk`, its headings Image and Access
//!   | Key | Value | …
//!   <!-- end -->
//! ```
//!
//! Text outside the markers is kept.

use std::fmt::Write as _;

use settings::key::{ChangePolicy, KeyType};

use super::keys::{KeyRow, as_keys, sections};

/// Document in docs/reference.
pub(super) const DOCUMENT: &str = "config.md";

const BEGIN: &str = "<!-- keys: ";
const END: &str = "<!-- end -->";

/// The document with updated tables.
///
/// # Errors
/// If a marker has no end or names no table.
pub(super) fn updated(document: &str) -> anyhow::Result<String> {
    let mut rest = document;
    let mut text = String::new();
    while let Some((before, after)) = rest.split_once(BEGIN) {
        // If ` -->` is missing, nothing remains after the selector: the search for END then fails.
        let (selector, after) = after.split_once(" -->\n").unwrap_or((after, ""));
        let (_, after) =
            after.split_once(END).ok_or_else(|| anyhow::anyhow!("{BEGIN}{selector}: no {END} below"))?;
        write!(text, "{before}{BEGIN}{selector} -->\n{}{END}", table(selector)?)?;
        rest = after;
    }
    Ok(text + rest)
}

/// Table of a section; only of the given headings if there are any, as in `disk, Image`.
fn table(selector: &str) -> anyhow::Result<String> {
    let mut parts = selector.split(", ");
    let name = parts.next().unwrap_or_default();
    let headings: Vec<_> = parts.collect();
    let sections = sections();
    let section = sections.iter().find(|section| section.name == name);
    let section = section.ok_or_else(|| anyhow::anyhow!("{BEGIN}{selector}: no table {name}"))?;
    let rows = section.rows.iter().filter(|row| headings.is_empty() || headings.contains(&row.heading));
    let lines: Vec<_> = rows.map(line).collect();
    anyhow::ensure!(!lines.is_empty(), "{BEGIN}{selector}: no keys below {headings:?}");
    let head = "| Key | Value | Meaning | Default | Reload |\n| --- | --- | --- | --- | --- |\n";
    Ok(head.to_owned() + &lines.concat())
}

fn line(row: &KeyRow) -> String {
    let reload = match row.change {
        ChangePolicy::Apply => "live",
        ChangePolicy::Reexport => "export",
        ChangePolicy::Reject => "no",
    };
    let default = match row.default {
        "" if row.value == KeyType::Flag && row.has_default => "`false`".to_owned(),
        "" => "none".to_owned(),
        default => as_keys(default),
    };
    format!(
        "| `{}` | {} | {} | {default} | {reload} |\n",
        row.name,
        value(row),
        row.meaning().replace('|', "\\|")
    )
}

fn value(row: &KeyRow) -> String {
    let words = |words: &[&str]| words.iter().map(|word| format!("`{word}`")).collect::<Vec<_>>().join(", ");
    let single = match row.value {
        KeyType::Flag => "`true`, `false`".to_owned(),
        KeyType::Word(all) => words(all),
        KeyType::WordOr(all) => format!("{} or {}", words(all), placeholder(row)),
        KeyType::Count | KeyType::Integer => "number".to_owned(),
        KeyType::Size => "size".to_owned(),
        KeyType::Seconds => "seconds".to_owned(),
        KeyType::Time => "seconds, or a time".to_owned(),
        KeyType::Path => "path".to_owned(),
        KeyType::Text => placeholder(row),
        KeyType::Table => "table".to_owned(),
    };
    if row.is_list { format!("{single}, or a list") } else { single }
}

/// The placeholder without alternatives: `TIME` of `TIME|auto|off`.
fn placeholder(row: &KeyRow) -> String {
    format!("`{}`", row.placeholder.split('|').next().unwrap_or_default())
}
