//! The hard limits of a cgroup: io.max of cgroup v2.
//!
//! ```text
//!   8:16 rbps=2097152 wbps=max riops=max wiops=120
//! ```
//!
//! A device without limits has no line. What is written is one line of the same form, and the kernel takes all of it or nothing.
//! Source: Documentation/admin-guide/cgroup-v2.rst, "IO Interface Files".

use block::device::Number;

use super::{Unknown, count, nested};

const FILE: &str = "io.max";
/// How the kernel writes that there is no limit.
const UNLIMITED: &str = "max";

/// The limits on one device; `None` is none, as the kernel's `max`.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Rates {
    /// Bytes read in a second.
    pub(crate) read_bps: Option<u64>,
    /// Bytes written in a second.
    pub(crate) write_bps: Option<u64>,
    /// Reads in a second.
    pub(crate) read_iops: Option<u64>,
    /// Writes in a second.
    pub(crate) write_iops: Option<u64>,
}

impl Rates {
    /// What is written to io.max to put these in force, with all four keys and without an end of line.
    pub(crate) fn line(&self, device: Number) -> String {
        let text = |rate: Option<u64>| rate.map_or_else(|| UNLIMITED.to_owned(), |rate| rate.to_string());
        format!(
            "{device} rbps={} wbps={} riops={} wiops={}",
            text(self.read_bps),
            text(self.write_bps),
            text(self.read_iops),
            text(self.write_iops)
        )
    }

    fn set(&mut self, key: &str, value: &str) -> Option<()> {
        let rate = match key {
            "rbps" => &mut self.read_bps,
            "wbps" => &mut self.write_bps,
            "riops" => &mut self.read_iops,
            "wiops" => &mut self.write_iops,
            _ => return Some(()),
        };
        *rate = if value == UNLIMITED { None } else { Some(count(value)?) };
        Some(())
    }
}

/// Every device of the file, in its order.
///
/// # Errors
/// If a line is of no known form.
pub(crate) fn parse(text: &str) -> Result<Vec<(Number, Rates)>, Unknown> {
    nested::all(FILE, text, Rates::set)
}
