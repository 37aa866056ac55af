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
use policy::counter;

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
    /// Growth since an earlier moment; `None` if a total fell. Totals fall when a cgroup is made
    /// again, and in version 1 when one below it is removed.
    pub(crate) fn since(&self, earlier: &Self) -> Option<Self> {
        let [read_bytes, written_bytes, reads, writes, discarded_bytes, discards] =
            counter::growths(&earlier.counters(), &self.counters())?;
        Some(Self { read_bytes, written_bytes, reads, writes, discarded_bytes, discards })
    }

    /// Both together.
    #[must_use]
    pub(crate) fn plus(&self, other: &Self) -> Self {
        let [mut sums, more] = [self.counters(), other.counters()];
        sums.iter_mut().zip(more).for_each(|(sum, more)| *sum = sum.saturating_add(more));
        let [read_bytes, written_bytes, reads, writes, discarded_bytes, discards] = sums;
        Self { read_bytes, written_bytes, reads, writes, discarded_bytes, discards }
    }

    const fn counters(&self) -> [u64; 6] {
        let Self { read_bytes, written_bytes, reads, writes, discarded_bytes, discards } = *self;
        [read_bytes, written_bytes, reads, writes, discarded_bytes, discards]
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
