//! What the kernel holds a cgroup to: io.max of version 2, four files of version 1.

use std::{collections::BTreeMap, io};

use anyhow::Context as _;
use block::device::Number;
use nix::errno::Errno;
use policy::steering::Rates;

use crate::{
    control_group::{ControlGroup, Version},
    kernel::{blkio, io_max},
};

#[derive(Debug)]
pub(crate) struct LimitFile {
    pub(crate) name: &'static str,
    pub(crate) text: String,
    /// In the file's order; of version 1, with the one rate that the file is for.
    pub(crate) limits: Vec<(Number, Rates)>,
}

pub(crate) fn names(version: Version) -> &'static [&'static str] {
    match version {
        Version::V1 => &blkio::LIMITS,
        Version::V2 => &[io_max::FILE],
    }
}

/// The files of limits of a cgroup, without those that it does not have.
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

pub(crate) fn merged(files: &[LimitFile]) -> BTreeMap<Number, Rates> {
    let mut all: BTreeMap<Number, Rates> = BTreeMap::new();
    for (device, rates) in files.iter().flat_map(|file| &file.limits) {
        add(all.entry(*device).or_default(), *rates);
    }
    all
}

/// Adds what a further file says of the same device.
pub(crate) fn add(rates: &mut Rates, more: Rates) {
    let of = |index: usize| (rates.bps[index].or(more.bps[index]), rates.iops[index].or(more.iops[index]));
    let ((read_bps, read_iops), (write_bps, write_iops)) = (of(0), of(1));
    *rates = Rates { bps: [read_bps, write_bps], iops: [read_iops, write_iops] };
}

/// The cgroup is gone or going, or the kernel has the file switched off.
pub(crate) fn is_missing(error: &io::Error) -> bool {
    let error = Errno::from_raw(error.raw_os_error().unwrap_or(0));
    matches!(error, Errno::ENOENT | Errno::ESRCH | Errno::ENODEV | Errno::EOPNOTSUPP)
}
