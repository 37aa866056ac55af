//! I/O counters of a cgroup and its descendants by device: io.stat of cgroup v2.
//!
//! ```text
//!   8:16 rbytes=1459200 wbytes=314773504 rios=192 wios=353 dbytes=0 dios=0
//! ```
//!
//! Discards exist since Linux 4.19. Controllers add keys (`cost.usage`, `use_delay`, `depth`),
//! which are skipped. Source: Documentation/admin-guide/cgroup-v2.rst, "IO Interface Files".

use std::ops::ControlFlow;

use block::device::DeviceNumber;
use policy::counter;

use super::{UnknownFormat, count, nested};

const FILE: &str = "io.stat";

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CgroupIoUsage {
    pub(crate) read_bytes: u64,
    pub(crate) written_bytes: u64,
    pub(crate) reads: u64,
    pub(crate) writes: u64,
    pub(crate) discarded_bytes: u64,
    pub(crate) discards: u64,
}

impl CgroupIoUsage {
    /// Growth since an earlier reading; `None` if a counter fell. Counters fall when a cgroup is
    /// recreated, and in version 1 when a descendant is removed.
    pub(crate) fn since(&self, earlier: &Self) -> Option<Self> {
        let [read_bytes, written_bytes, reads, writes, discarded_bytes, discards] =
            counter::growths(&earlier.counters(), &self.counters())?;
        Some(Self { read_bytes, written_bytes, reads, writes, discarded_bytes, discards })
    }

    /// Sum of two usages, saturating.
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

/// Counters of each listed device. A device without a line has done no I/O.
pub(crate) fn parse(text: &str) -> Result<Vec<(DeviceNumber, CgroupIoUsage)>, UnknownFormat> {
    nested::all(FILE, text, CgroupIoUsage::set)
}

/// Counters of one device. Allocates nothing and stops after the device's line.
pub(crate) fn find(text: &str, device: DeviceNumber) -> Result<Option<CgroupIoUsage>, UnknownFormat> {
    let mut found = None;
    nested::scan(FILE, text, CgroupIoUsage::set, |number, usage| {
        if number == device {
            found = Some(usage);
            return ControlFlow::Break(());
        }
        ControlFlow::Continue(())
    })?;
    Ok(found)
}
