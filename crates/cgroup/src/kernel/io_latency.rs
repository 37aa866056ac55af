//! Latency targets of a cgroup: io.latency of cgroup v2.
//!
//! ```text
//!   8:16 target=75000
//! ```
//!
//! Source: Documentation/admin-guide/cgroup-v2.rst, "IO Latency".

use block::device::DeviceNumber;

use super::{UnknownFormat, count, nested};

/// Target of each device, in microseconds.
pub(crate) fn targets(text: &str) -> Result<Vec<(DeviceNumber, u64)>, UnknownFormat> {
    nested::all("io.latency", text, |target: &mut u64, key, value| {
        if key == "target" {
            *target = count(value)?;
        }
        Some(())
    })
}
