//! Reads the kernel's counters and limits of one cgroup.
//!
//! ```text
//!              version 2      version 1
//!   totals     io.stat        blkio.throttle.io_service_bytes[_recursive], …io_serviced[_recursive]
//!   limits     io.max         blkio.throttle.{read,write}_{bps,iops}_device
//!   targets    io.latency     none
//!   pressure   io.pressure    none
//! ```
//!
//! Totals include descendants. Version 1 counts nothing on a disk before the first limit of any
//! cgroup there (since Linux 6.10, where throttling starts with the first limit).

use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt as _};

use anyhow::Context as _;
use block::device::{DeviceIdentity, DeviceNumber, SysfsRoots};
use policy::steering::IoMaxRates;

use crate::{
    control_group::{ControlGroup, Version},
    kernel::{blkio, io_latency, io_stat, io_stat::CgroupIoUsage, pressure, pressure::IoPressure},
    limit::latency_target,
    limit_files,
};

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct DeviceAccount {
    /// Counters of the cgroup and its descendants.
    pub(crate) usage: CgroupIoUsage,
    /// Counters of the cgroup alone; version 1 only, where `usage` falls when a descendant is
    /// removed.
    pub(crate) own_usage: Option<CgroupIoUsage>,
    pub(crate) limits: IoMaxRates,
    /// Target of io.latency in microseconds; 0 without one.
    pub(crate) latency_target_us: u64,
}

impl DeviceAccount {
    fn is_empty(&self) -> bool {
        Self { own_usage: None, ..*self } == Self::default()
    }
}

#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct CgroupReading {
    /// Devices with limits or I/O.
    pub(crate) devices: BTreeMap<DeviceNumber, DeviceAccount>,
    pub(crate) pressure: Option<IoPressure>,
}

/// Reads a cgroup; `None` if it was removed. A cgroup without the controller has no devices.
pub(crate) fn read(group: &ControlGroup) -> anyhow::Result<Option<CgroupReading>> {
    // Identified by inode: another cgroup may be created with this name at any moment.
    let number = || fs::metadata(&group.directory).map(|metadata| metadata.ino()).ok();
    let Some(before) = number() else { return Ok(None) };
    let reading = match group.version {
        Version::V2 => read_v2(group),
        Version::V1 => read_v1(group),
    };
    // Reading files of a cgroup under removal fails with various errors.
    if reading.is_err() && number() != Some(before) {
        return Ok(None);
    }
    reading.with_context(|| format!("cgroup {}", group.name.display())).map(Some)
}

fn read_v2(group: &ControlGroup) -> anyhow::Result<CgroupReading> {
    let usage = io_stat::parse(&file(group, "io.stat")?)?;
    let limits = limit_files::merged(&limit_files::read(group)?);
    let pressure = match file(group, "io.pressure")?.as_str() {
        "" => None,
        text => Some(pressure::parse(text)?),
    };
    let mut devices = merged(usage, limits);
    for (device, target_us) in io_latency::targets(&file(group, latency_target::FILE)?)? {
        if target_us > 0 {
            devices.entry(device).or_default().latency_target_us = target_us;
        }
    }
    Ok(CgroupReading { devices, pressure })
}

fn read_v1(group: &ControlGroup) -> anyhow::Result<CgroupReading> {
    let totals = |name: &str| -> anyhow::Result<String> {
        // Recursive counters, comparable to version 2, exist since Linux 5.0.
        let text = file(group, &format!("{name}_recursive"))?;
        if text.is_empty() { file(group, name) } else { Ok(text) }
    };
    let usage = blkio::usage(&totals(blkio::BYTES)?, &totals(blkio::OPERATIONS)?)?;
    let limits = limit_files::merged(&limit_files::read(group)?);
    let mut devices = merged(usage, limits);
    // The non-recursive counters, whose growth is right when a descendant is removed.
    let own_usage = blkio::usage(&file(group, blkio::BYTES)?, &file(group, blkio::OPERATIONS)?)?;
    let own_usage: BTreeMap<DeviceNumber, CgroupIoUsage> = own_usage.into_iter().collect();
    for (device, account) in &mut devices {
        account.own_usage = Some(own_usage.get(device).copied().unwrap_or_default());
    }
    Ok(CgroupReading { devices, pressure: None })
}

fn merged(
    usage: impl IntoIterator<Item = (DeviceNumber, CgroupIoUsage)>,
    limits: impl IntoIterator<Item = (DeviceNumber, IoMaxRates)>,
) -> BTreeMap<DeviceNumber, DeviceAccount> {
    let mut devices: BTreeMap<DeviceNumber, DeviceAccount> = BTreeMap::new();
    for (device, usage) in usage {
        devices.entry(device).or_default().usage = usage;
    }
    for (device, limits) in limits {
        devices.entry(device).or_default().limits = limits;
    }
    // The kernel also lists devices without I/O and limits.
    devices.retain(|_, account| !account.is_empty());
    devices
}

/// Content of a file; empty if the cgroup lacks it or the kernel disabled it. A cgroup under
/// removal loses its files before its directory, so an open file may fail as well.
fn file(group: &ControlGroup, name: &str) -> anyhow::Result<String> {
    match group.read(name) {
        Ok(text) => Ok(text),
        Err(error) if limit_files::is_missing(&error) => Ok(String::new()),
        Err(error) => Err(error).with_context(|| format!("{name}: cannot be read")),
    }
}

/// `/dev/vda`; the number if the device was removed.
pub(crate) fn node(number: DeviceNumber) -> String {
    let identity = DeviceIdentity::resolve(number, &SysfsRoots::default());
    identity.map_or_else(|_| number.to_string(), |identity| identity.node())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fake_machine::FakeMachine;

    fn with(machine: FakeMachine, files: &[(&str, &str)]) -> (FakeMachine, ControlGroup) {
        let group = machine.group("/a");
        files.iter().for_each(|(name, text)| machine.write("/a", name, text));
        (machine, group)
    }

    const DISK: DeviceNumber = DeviceNumber { major: 8, minor: 0 };

    #[test]
    fn version_2_has_all_in_four_files() {
        let (_machine, group) = with(
            FakeMachine::v2("io"),
            &[
                (
                    "io.stat",
                    "8:16 rbytes=0 wbytes=0 rios=0 wios=0\n\
                     8:0 rbytes=4096 wbytes=8192 rios=1 wios=2 dbytes=0 dios=0\n",
                ),
                ("io.max", "8:0 rbps=max wbps=4000000 riops=max wiops=100\n"),
                ("io.latency", "8:0 target=5000\n8:32 target=0\n"),
                (
                    "io.pressure",
                    "some avg10=1.50 avg60=0.00 avg300=0.00 total=7000\n\
                     full avg10=0.00 avg60=0.00 avg300=0.00 total=5000\n",
                ),
            ],
        );
        let reading = read(&group).unwrap().unwrap();
        let usage = CgroupIoUsage {
            read_bytes: 4096,
            written_bytes: 8192,
            reads: 1,
            writes: 2,
            ..CgroupIoUsage::default()
        };
        let limits = IoMaxRates { bps: [None, Some(4_000_000)], iops: [None, Some(100)] };
        assert_eq!(
            reading.devices,
            BTreeMap::from([(
                DISK,
                DeviceAccount { usage, own_usage: None, limits, latency_target_us: 5000 }
            )]),
            "and no idle device"
        );
        assert_eq!(reading.pressure.unwrap().some.total_us, 7000);
    }

    #[test]
    fn version_1_has_a_file_for_each_limit() {
        let counted = |name: &str| format!("8:0 Read {name}\n8:0 Write 8192\n8:0 Total 9000\nTotal 9000\n");
        let bytes = counted("4096");
        let (_machine, group) = with(
            FakeMachine::v1(),
            &[
                ("blkio.throttle.io_service_bytes", "Total 0\n"),
                ("blkio.throttle.io_service_bytes_recursive", &bytes),
                ("blkio.throttle.io_serviced", "8:0 Read 1\n8:0 Write 2\n8:0 Total 3\nTotal 3\n"),
                ("blkio.throttle.read_bps_device", ""),
                ("blkio.throttle.write_bps_device", "8:0 4000000\n"),
                ("blkio.throttle.read_iops_device", "8:16 7\n"),
                ("blkio.throttle.write_iops_device", ""),
            ],
        );
        let reading = read(&group).unwrap().unwrap();
        let disk = reading.devices[&DISK];
        assert_eq!(
            (disk.usage.read_bytes, disk.usage.writes),
            (4096, 2),
            "descendants are included where the kernel includes them"
        );
        let own_usage = disk.own_usage.expect("version 1 reports it");
        assert_eq!((own_usage.read_bytes, own_usage.writes), (0, 2), "and without");
        assert_eq!(disk.limits, IoMaxRates { bps: [None, Some(4_000_000)], ..IoMaxRates::NONE });
        let other = reading.devices[&DeviceNumber { major: 8, minor: 16 }];
        assert_eq!(other.limits, IoMaxRates { iops: [Some(7), None], ..IoMaxRates::NONE });
        assert_eq!(reading.pressure, None);
    }

    #[test]
    fn missing_files_are_empty_and_removed_cgroup_is_none() {
        let (machine, group) = with(FakeMachine::v2("io"), &[]);
        assert_eq!(
            read(&group).unwrap(),
            Some(CgroupReading::default()),
            "the controller is not enabled for it"
        );
        fs::write(group.directory.join("io.max"), "8:0 rbps=many\n").unwrap();
        let error = format!("{:#}", read(&group).unwrap_err());
        assert!(error.starts_with("cgroup /a: io.max: unknown line format"), "{error}");
        drop(machine);
        assert_eq!(read(&group).unwrap(), None);
    }
}
