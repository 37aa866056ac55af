//! Lines of a mountinfo file, each with its mount ID.

use std::path::Path;

use crate::kernel::{mountinfo, mountinfo::Mount};

#[derive(Debug, Clone)]
pub(super) struct MountRow {
    pub(super) id: u64,
    pub(super) mount: Mount,
    pub(super) line: String,
}

pub(super) fn mount_containing<'a>(rows: &'a [MountRow], path: &Path) -> Option<&'a MountRow> {
    let found = mountinfo::mount_containing(rows.iter().map(|row| &row.mount), path)?;
    // The last of equal mounts: it hides the earlier ones.
    rows.iter().rfind(|row| row.mount == *found)
}

pub(super) fn parse(text: &str) -> Vec<MountRow> {
    let parse_line = |line: &str| {
        let id = line.split(' ').next()?.parse().ok()?;
        let mount = mountinfo::parse(line).ok()?.pop()?;
        Some(MountRow { id, mount, line: line.to_owned() })
    };
    text.lines().filter_map(parse_line).collect()
}
