//! Latency targets of a cgroup: io.latency of cgroup v2.
//!
//! ```text
//!   8:16 target=75000
//! ```
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst, "IO Latency".

use block::device::Number;

use super::{Unknown, count, nested};

/// Target of each device, in microseconds.
pub(crate) fn targets(text: &str) -> Result<Vec<(Number, u64)>, Unknown> {
    nested::all("io.latency", text, |target: &mut u64, key, value| {
        if key == "target" {
            *target = count(value)?;
        }
        Some(())
    })
}
