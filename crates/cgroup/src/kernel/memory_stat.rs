//! Page cache of a cgroup that is not on disk yet: memory.stat of cgroup v2, one `key number` a
//! line.
//!
//! ```text
//!   file_dirty 1048576
//!   file_writeback 40960
//! ```
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst, "memory.stat".

use super::{UnknownFormat, count};

const FILE: &str = "memory.stat";

/// Bytes in the page cache that are not on their disk.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct DirtyBytes {
    /// Bytes whose writeback has not started.
    pub(crate) dirty: u64,
    pub(crate) writeback: u64,
}

impl DirtyBytes {
    pub(crate) fn total(self) -> u64 {
        self.dirty.saturating_add(self.writeback)
    }
}

/// Parses both keys; an absent key counts as 0.
pub(crate) fn parse(text: &str) -> Result<DirtyBytes, UnknownFormat> {
    let mut waiting = DirtyBytes::default();
    for line in text.lines() {
        let (field, rest) = if let Some(rest) = line.strip_prefix("file_dirty ") {
            (&mut waiting.dirty, rest)
        } else if let Some(rest) = line.strip_prefix("file_writeback ") {
            (&mut waiting.writeback, rest)
        } else {
            // Some fifty other keys.
            continue;
        };
        *field = count(rest).ok_or_else(|| UnknownFormat::new(FILE, line))?;
    }
    Ok(waiting)
}
