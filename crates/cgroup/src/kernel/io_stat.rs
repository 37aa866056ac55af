//! What a cgroup and its descendants have done to each device: io.stat of cgroup v2.
//!
//! ```text
//!   8:16 rbytes=1459200 wbytes=314773504 rios=192 wios=353 dbytes=0 dios=0
//! ```
//!
//! Discards are there since Linux 4.19. Controllers add keys (`cost.usage`, `use_delay`, `depth`),
//! which are skipped. Source: Documentation/admin-guide/cgroup-v2.rst, "IO Interface Files".

use std::ops::ControlFlow;

use block::device::Number;

use super::{Unknown, count, nested};

const FILE: &str = "io.stat";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) discarded_bytes: u64,
    pub(crate) discards: u64,
}

impl Usage {
    /// What was done since an earlier moment. Lower totals are a new beginning, as of a cgroup that
    /// was made again: then all of them count.
    #[must_use]
    pub(crate) fn since(&self, earlier: &Self) -> Self {
        let difference = |now: u64, then: u64| now.checked_sub(then).unwrap_or(now);
        Self {
            read_bytes: difference(self.read_bytes, earlier.read_bytes),
            written_bytes: difference(self.written_bytes, earlier.written_bytes),
            reads: difference(self.reads, earlier.reads),
            writes: difference(self.writes, earlier.writes),
            discarded_bytes: difference(self.discarded_bytes, earlier.discarded_bytes),
            discards: difference(self.discards, earlier.discards),
        }
    }

    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        let total = match key {
            "rbytes" => &mut self.read_bytes,
            "wbytes" => &mut self.written_bytes,
            "rios" => &mut self.reads,
            "wios" => &mut self.writes,
            "dbytes" => &mut self.discarded_bytes,
            "dios" => &mut self.discards,
            _ => return Some(()),
        };
        *total = count(value)?;
        Some(())
    }
}

/// A device of which nothing is said has done nothing.
pub(crate) fn parse(text: &str) -> Result<Vec<(Number, Usage)>, Unknown> {
    nested::all(FILE, text, Usage::set)
}

/// One device of the file. Allocates nothing, and reads no further than the device.
pub(crate) fn find(text: &str, device: Number) -> Result<Option<Usage>, Unknown> {
    let mut found = None;
    nested::scan(FILE, text, Usage::set, |number, usage| {
        if number == device {
            found = Some(usage);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    })?;
    Ok(found)
}
