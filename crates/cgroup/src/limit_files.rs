//! Limits in force in the kernel: io.max of version 2, four files of version 1.

use std::{collections::BTreeMap, io};

use anyhow::Context as _;
use block::device::DeviceNumber;
use nix::errno::Errno;
use policy::steering::IoMaxRates;

use crate::{
    control_group::{ControlGroup, Version},
    kernel::{blkio, io_max},
};

#[derive(Debug)]
pub(crate) struct LimitFile {
    pub(crate) name: &'static str,
    pub(crate) text: String,
    /// In the file's order; in version 1 each entry has only the rate of this file.
    pub(crate) limits: Vec<(DeviceNumber, IoMaxRates)>,
}

pub(crate) fn names(version: Version) -> &'static [&'static str] {
    match version {
        Version::V1 => &blkio::LIMITS,
        Version::V2 => &[io_max::FILE],
    }
}

/// Reads the limit files of a cgroup; missing files are omitted.
pub(crate) fn read(group: &ControlGroup) -> anyhow::Result<Vec<LimitFile>> {
    let mut files = Vec::new();
    for &name in names(group.version) {
        let text = match group.read(name) {
            Err(error) if is_missing(&error) => continue,
            text => text.with_context(|| name.to_owned())?,
        };
        let limits = match group.version {
            Version::V1 => blkio::limits(name, &text)?,
            Version::V2 => io_max::parse(&text)?,
        };
        files.push(LimitFile { name, text, limits });
    }
    Ok(files)
}

pub(crate) fn merged(files: &[LimitFile]) -> BTreeMap<DeviceNumber, IoMaxRates> {
    let mut all: BTreeMap<DeviceNumber, IoMaxRates> = BTreeMap::new();
    for (device, rates) in files.iter().flat_map(|file| &file.limits) {
        merge_rates(all.entry(*device).or_default(), *rates);
    }
    all
}

/// Merges the rates from another file of the same device.
pub(crate) fn merge_rates(rates: &mut IoMaxRates, other: IoMaxRates) {
    let merged_at =
        |index: usize| (rates.bps[index].or(other.bps[index]), rates.iops[index].or(other.iops[index]));
    let ((read_bps, read_iops), (write_bps, write_iops)) = (merged_at(0), merged_at(1));
    *rates = IoMaxRates { bps: [read_bps, write_bps], iops: [read_iops, write_iops] };
}

/// True if the cgroup is being removed or the kernel has disabled the file.
pub(crate) fn is_missing(error: &io::Error) -> bool {
    let error = Errno::from_raw(error.raw_os_error().unwrap_or(0));
    matches!(error, Errno::ENOENT | Errno::ESRCH | Errno::ENODEV | Errno::EOPNOTSUPP)
}
