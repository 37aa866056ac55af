//! Hard limits of a cgroup: io.max of cgroup v2.
//!
//! ```text
//!   8:16 rbps=2097152 wbps=max riops=max wiops=120
//! ```
//!
//! A device without limits has no line. Writes use the same format, one line each, which the kernel
//! applies whole or not at all. Source: Documentation/admin-guide/cgroup-v2.rst, "IO Interface
//! Files".

use block::device::DeviceNumber;
use policy::steering::IoMaxRates;

use super::{UnknownFormat, count, nested};

pub(crate) const FILE: &str = "io.max";
const UNLIMITED: &str = "max";

pub(crate) fn in_order(
    IoMaxRates { bps: [read_bps, write_bps], iops: [read_iops, write_iops] }: IoMaxRates,
) -> [Option<u64>; 4] {
    [read_bps, write_bps, read_iops, write_iops]
}

/// Formats all four keys, without a newline: an omitted key would keep its old value.
pub(crate) fn line(rates: IoMaxRates, device: DeviceNumber) -> String {
    let text = |rate: Option<u64>| rate.map_or_else(|| UNLIMITED.to_owned(), |rate| rate.to_string());
    let [read_bps, write_bps, read_iops, write_iops] = in_order(rates).map(text);
    format!("{device} rbps={read_bps} wbps={write_bps} riops={read_iops} wiops={write_iops}")
}

fn set(rates: &mut IoMaxRates, key: &str, value: &str) -> Option<()> {
    let rate = match key {
        "rbps" => &mut rates.bps[0],
        "wbps" => &mut rates.bps[1],
        "riops" => &mut rates.iops[0],
        "wiops" => &mut rates.iops[1],
        _ => return Some(()),
    };
    *rate = if value == UNLIMITED { None } else { Some(count(value)?) };
    Some(())
}

pub(crate) fn parse(text: &str) -> Result<Vec<(DeviceNumber, IoMaxRates)>, UnknownFormat> {
    nested::all(FILE, text, set)
}
