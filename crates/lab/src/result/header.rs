//! Origin of a result: command, time, machine and device.

use std::{
    fs,
    path::Path,
    time::{Instant, SystemTime, UNIX_EPOCH},
};

use block::device::{DeviceIdentity, DeviceNumber, SysfsRoots};
use serde::{Deserialize, Serialize};

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct ResultHeader {
    pub(crate) command: Vec<String>,
    /// Seconds since 1970 (UTC).
    pub(crate) began: u64,
    pub(crate) seconds: f64,
    pub(crate) weir: String,
    pub(crate) machine: MachineInfo,
    /// `None` if there is no device, or nothing was measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) device: Option<MeasuredDevice>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct MachineInfo {
    pub(crate) kernel: String,
    pub(crate) processor: String,
    /// Number of CPUs that this process may use.
    pub(crate) processors: usize,
    pub(crate) memory_bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) struct MeasuredDevice {
    /// Device node, such as `/dev/sda`.
    pub(crate) node: String,
    /// Its stable name, such as a serial number.
    pub(crate) key: String,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) file_system: Option<String>,
}

/// Created at the command's start, completed at its end.
#[derive(Clone, Copy, Debug)]
pub(crate) struct HeaderStart {
    clock: SystemTime,
    at: Instant,
}

impl ResultHeader {
    pub(crate) fn begin() -> HeaderStart {
        HeaderStart { clock: SystemTime::now(), at: Instant::now() }
    }
}

impl HeaderStart {
    /// Completes the header; `place` is the measured file or device.
    pub(crate) fn end(self, place: Option<&Path>) -> ResultHeader {
        ResultHeader {
            command: std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect(),
            began: self.clock.duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs()),
            seconds: self.at.elapsed().as_secs_f64(),
            weir: env!("CARGO_PKG_VERSION").to_owned(),
            machine: MachineInfo::this(),
            device: place.and_then(MeasuredDevice::under),
        }
    }
}

impl MachineInfo {
    /// Describes this machine; unknown fields are empty.
    pub(crate) fn this() -> Self {
        let read = |path| fs::read_to_string(path).unwrap_or_default();
        let kernel = |name: &str| read(format!("/proc/sys/kernel/{name}")).trim().to_owned();
        // Lines of `/proc/meminfo` and `/proc/cpuinfo` have the form `name : value`.
        let field = |text: &str, name: &str| {
            let line = text.lines().find(|line| line.starts_with(name))?;
            Some(line.split_once(':')?.1.trim().to_owned())
        };
        let memory = field(&read("/proc/meminfo".to_owned()), "MemTotal");
        let kib: u64 = memory.and_then(|text| text.split(' ').next()?.parse().ok()).unwrap_or(0);
        Self {
            kernel: format!("{} {} {}", kernel("ostype"), kernel("osrelease"), kernel("version")),
            processor: field(&read("/proc/cpuinfo".to_owned()), "model name").unwrap_or_default(),
            processors: std::thread::available_parallelism().map_or(1, usize::from),
            memory_bytes: kib << 10,
        }
    }
}

impl MeasuredDevice {
    /// The device that stores a file or directory, or the block device itself if `place` is one.
    pub(crate) fn under(place: &Path) -> Option<Self> {
        use std::os::unix::fs::{FileTypeExt as _, MetadataExt as _};
        let meta = fs::metadata(place).ok()?;
        let is_device = meta.file_type().is_block_device();
        let number = DeviceNumber::unpack(if is_device { meta.rdev() } else { meta.dev() });
        let identity = DeviceIdentity::resolve(number, &SysfsRoots::default()).ok()?;
        // A block device is measured without a file system.
        let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
        let file_system = if is_device { None } else { file_system(&mounts, number) };
        Some(Self { node: identity.node(), key: identity.key().to_owned(), file_system })
    }
}

/// File system type from proc_pid_mountinfo(5): the third field is the number, the first field
/// after ` - ` the type.
fn file_system(mounts: &str, number: DeviceNumber) -> Option<String> {
    let number = number.to_string();
    let line = mounts.lines().find(|line| line.split(' ').nth(2) == Some(&number))?;
    line.split_once(" - ")?.1.split(' ').next().map(str::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn header_describes_this_machine() {
        let header = ResultHeader::begin().end(None);
        assert!(header.machine.kernel.starts_with("Linux "), "{header:?}");
        assert!(header.machine.memory_bytes > 0 && header.machine.processors > 0, "{header:?}");
        assert!(header.began > 1_700_000_000 && header.seconds >= 0.0, "{header:?}");
        assert_eq!(header.weir, env!("CARGO_PKG_VERSION"));
    }

    #[test]
    fn file_system_is_found_by_device_number() {
        let mounts =
            "24 1 254:0 / / rw shared:1 - ext4 /dev/root rw\n25 24 0:23 / /dev/shm rw - tmpfs tmpfs rw\n";
        let at = |major, minor| file_system(mounts, DeviceNumber { major, minor });
        assert_eq!(at(254, 0).as_deref(), Some("ext4"));
        assert_eq!(at(0, 23).as_deref(), Some("tmpfs"));
        assert_eq!(at(9, 9), None);
    }
}
