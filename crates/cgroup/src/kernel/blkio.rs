//! Limits and counters of a cgroup of version 1: blkio.throttle.*.
//!
//! ```text
//!   read_bps_device   8:0 20971520          a device without a limit has no line; separated by a tab in Linux 2.6
//!   io_service_bytes  8:0 Read 4096
//!                     8:0 Write 8192
//!                     8:0 Sync 4096         the same bytes, divided into sync and async
//!                     8:0 Async 8192
//!                     8:0 Discard 0         since Linux 4.19
//!                     8:0 Total 12288
//!                     Total 12288           of all devices
//!   io_serviced       the same, in operations
//! ```
//!
//! Counters exclude descendants. Source: admin-guide/cgroup-v1/blkio-controller.rst.

use block::device::DeviceNumber;
use policy::steering::IoMaxRates;

use super::{UnknownFormat, count, io_stat::CgroupIoUsage, nested::NAMELESS, number};

/// Names of the limit files, in the order of [`IoMaxRates`].
pub(crate) const LIMITS: [&str; 4] = [
    "blkio.throttle.read_bps_device",
    "blkio.throttle.write_bps_device",
    "blkio.throttle.read_iops_device",
    "blkio.throttle.write_iops_device",
];
pub(crate) const BYTES: &str = "blkio.throttle.io_service_bytes";
pub(crate) const OPERATIONS: &str = "blkio.throttle.io_serviced";

/// Parses one of [`LIMITS`]: its devices, each with the rate that this file sets.
pub(crate) fn limits(file: &str, text: &str) -> Result<Vec<(DeviceNumber, IoMaxRates)>, UnknownFormat> {
    let parse = |line: &str| {
        let mut fields = line.split_ascii_whitespace();
        let (device, rate) = (number(fields.next()?)?, count(fields.next()?)?);
        // Each file sets one of the four rates.
        let rate_of = |name: &str| (file == name).then_some(rate);
        let [read_bps, write_bps, read_iops, write_iops] = LIMITS.map(rate_of);
        let rates = IoMaxRates { bps: [read_bps, write_bps], iops: [read_iops, write_iops] };
        fields.next().is_none().then_some((device, rates))
    };
    text.lines().map(|line| parse(line).ok_or_else(|| UnknownFormat::new("blkio.throttle", line))).collect()
}

/// Counters of each device, from the text of [`BYTES`] and [`OPERATIONS`], ordered by number.
pub(crate) fn usage(
    bytes: &str,
    operations: &str,
) -> Result<Vec<(DeviceNumber, CgroupIoUsage)>, UnknownFormat> {
    let mut found = std::collections::BTreeMap::<DeviceNumber, CgroupIoUsage>::new();
    for (file, text) in [(BYTES, bytes), (OPERATIONS, operations)] {
        for_each_counter(file, text, |device, kind, total| {
            let usage = found.entry(device).or_default();
            let field = match (kind, file == BYTES) {
                ("Read", true) => &mut usage.read_bytes,
                ("Write", true) => &mut usage.written_bytes,
                ("Discard", true) => &mut usage.discarded_bytes,
                ("Read", false) => &mut usage.reads,
                ("Write", false) => &mut usage.writes,
                ("Discard", false) => &mut usage.discards,
                // Sync, Async and Total count the same requests again.
                _ => return,
            };
            *field = total;
        })?;
    }
    Ok(found.into_iter().collect())
}

pub(crate) fn find(
    bytes: &str,
    operations: &str,
    device: DeviceNumber,
) -> Result<Option<CgroupIoUsage>, UnknownFormat> {
    let mut all = usage(bytes, operations)?.into_iter();
    Ok(all.find_map(|(number, usage)| (number == device).then_some(usage)))
}

fn for_each_counter(
    file: &'static str,
    text: &str,
    mut show: impl FnMut(DeviceNumber, &str, u64),
) -> Result<(), UnknownFormat> {
    for line in text.lines() {
        let unknown = || UnknownFormat::new(file, line);
        let mut fields = line.split_ascii_whitespace();
        let (first, second, third) = (fields.next(), fields.next(), fields.next());
        match (first, second, third, fields.next()) {
            (Some(device), Some(kind), Some(total), None) => {
                let total = count(total).ok_or_else(unknown)?;
                if !NAMELESS.contains(&device) {
                    show(number(device).ok_or_else(unknown)?, kind, total);
                }
            }
            // The sum over all devices has no device number.
            (Some("Total"), Some(total), None, None) => {
                count::<u64>(total).ok_or_else(unknown)?;
            }
            _ => return Err(unknown()),
        }
    }
    Ok(())
}
