//! The lines of a mountinfo file, with their ids.

use std::path::Path;

use crate::kernel::{mountinfo, mountinfo::Mount};

#[derive(Debug, Clone)]
pub(super) struct Row {
    pub(super) id: u64,
    pub(super) mount: Mount,
    pub(super) line: String,
}

pub(super) fn holding<'a>(rows: &'a [Row], path: &Path) -> Option<&'a Row> {
    let found = mountinfo::holding(rows.iter().map(|row| &row.mount), path)?;
    // The last of equal mounts: it hides those mounted below it.
    rows.iter().rfind(|row| row.mount == *found)
}

pub(super) fn parse(text: &str) -> Vec<Row> {
    let one = |line: &str| {
        let id = line.split(' ').next()?.parse().ok()?;
        let mount = mountinfo::parse(line).ok()?.pop()?;
        Some(Row { id, mount, line: line.to_owned() })
    };
    text.lines().filter_map(one).collect()
}
