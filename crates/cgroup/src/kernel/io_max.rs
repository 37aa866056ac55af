//! The hard limits of a cgroup: io.max of cgroup v2.
//!
//! ```text
//!   8:16 rbps=2097152 wbps=max riops=max wiops=120
//! ```
//!
//! A device without limits has no line. What is written is one line of the same form, and the
//! kernel takes all of it or nothing. Source: Documentation/admin-guide/cgroup-v2.rst, "IO
//! Interface Files".

use block::device::Number;
use policy::steering::Rates;

use super::{Unknown, count, nested};

pub(crate) const FILE: &str = "io.max";
/// How the kernel writes that there is no limit.
const UNLIMITED: &str = "max";

/// The four rates in the order of the keys.
pub(crate) fn in_order(
    Rates { bps: [read_bps, write_bps], iops: [read_iops, write_iops] }: Rates,
) -> [Option<u64>; 4] {
    [read_bps, write_bps, read_iops, write_iops]
}

/// What is written to io.max to put these in force, with all four keys and without an end of line.
pub(crate) fn line(rates: Rates, device: Number) -> String {
    let text = |rate: Option<u64>| rate.map_or_else(|| UNLIMITED.to_owned(), |rate| rate.to_string());
    let [read_bps, write_bps, read_iops, write_iops] = in_order(rates).map(text);
    format!("{device} rbps={read_bps} wbps={write_bps} riops={read_iops} wiops={write_iops}")
}

fn set(rates: &mut Rates, key: &str, value: &str) -> Option<()> {
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

/// Every device of the file, in its order.
pub(crate) fn parse(text: &str) -> Result<Vec<(Number, Rates)>, Unknown> {
    nested::all(FILE, text, set)
}
