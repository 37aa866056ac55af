//! Weights, and the mechanisms that enforce them: io.weight, io.bfq.weight, io.cost.qos,
//! queue/scheduler.
//!
//! ```text
//!   io.weight         default 100            for devices without a line
//!                     8:0 200
//!   blkio.bfq.weight  100                    cgroup v1, and io.bfq.weight before Linux 5.4
//!   io.cost.qos       8:0 enable=1 ctrl=auto rpct=95.00 …
//!   queue/scheduler   none [mq-deadline] kyber bfq
//! ```
//!
//! Source: cgroup-v2.rst, "IO Interface Files"; Documentation/block/bfq-iosched.rst;
//! Documentation/ABI/stable/sysfs-block.

use block::device::DeviceNumber;

use super::{UnknownFormat, count, nested, number};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct CgroupWeights {
    /// Weight on devices that are not listed.
    pub(crate) default: Option<u32>,
    pub(crate) devices: Vec<(DeviceNumber, u32)>,
}

impl CgroupWeights {
    pub(crate) fn on(&self, device: DeviceNumber) -> Option<u32> {
        let entry = self.devices.iter().find(|(number, _)| *number == device);
        entry.map(|(_, weight)| *weight).or(self.default)
    }
}

/// Parses io.weight or io.bfq.weight.
pub(crate) fn weights(text: &str) -> Result<CgroupWeights, UnknownFormat> {
    let mut weights = CgroupWeights::default();
    for line in text.lines() {
        let unknown = || UnknownFormat::new("io.weight", line);
        let mut fields = line.split_ascii_whitespace();
        match (fields.next(), fields.next(), fields.next()) {
            (Some(weight), None, _) | (Some("default"), Some(weight), None) => {
                weights.default = Some(count(weight).ok_or_else(unknown)?);
            }
            (Some(device), Some(weight), None) => {
                weights.devices.push(number(device).zip(count(weight)).ok_or_else(unknown)?);
            }
            _ => return Err(unknown()),
        }
    }
    Ok(weights)
}

/// Devices that io.cost.qos lists, each with true if io.cost is enabled.
pub(crate) fn cost_enabled(text: &str) -> Result<Vec<(DeviceNumber, bool)>, UnknownFormat> {
    nested::all("io.cost.qos", text, |enabled: &mut bool, key, value| {
        if key == "enable" {
            *enabled = count::<u8>(value)? != 0;
        }
        Some(())
    })
}

/// The active scheduler; `None` if the device offers no choice.
pub(crate) fn scheduler(text: &str) -> Result<Option<&str>, UnknownFormat> {
    let mut schedulers = text.split_ascii_whitespace();
    let marked = schedulers.clone().find_map(|name| name.strip_prefix('[')?.strip_suffix(']'));
    match (marked, schedulers.next(), schedulers.next()) {
        (Some(marked), ..) => Ok(Some(marked)),
        (None, None, _) => Ok(None),
        // A device without a request queue prints `none` without brackets.
        (None, Some(only), None) => Ok(Some(only)),
        (None, Some(_), Some(_)) => Err(UnknownFormat::new("queue/scheduler", text.trim_end())),
    }
}
