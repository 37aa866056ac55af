//! Options of a volume: `docker volume create -o KEY=VALUE`.
//!
//! `size`, `format`, `fstype`, `mount-options` and `device` belong to volumes. All further options
//! are those of `weir attach`, with their names and rules, and are passed to it at each mount. All
//! are checked when the volume is created, so that a mistake is reported there and not when a
//! container starts.

use std::{collections::BTreeMap, path::Path};

use settings::{ConfigKey, ConfigWithOrigins, DiskConfig, KeyTable as _, Origin, suggest};
use storage::ImageFormat;

use crate::filesystem::VolumeFileSystem;

/// Given options by key.
pub(crate) type OptionValues = BTreeMap<String, String>;

const SIZE: &str = "size";
const FORMAT: &str = "format";
const FILE_SYSTEM: &str = "fstype";
const MOUNT_OPTIONS: &str = "mount-options";
const DEVICE: &str = "device";
/// Options of volumes.
const VOLUME_KEYS: [&str; 5] = [SIZE, FORMAT, FILE_SYSTEM, MOUNT_OPTIONS, DEVICE];
const GROUP: &str = "group";
const L2_CACHE_SIZE: &str = "l2-cache-size";

/// True if the key is passed to `weir attach`.
fn is_attach_option(key: &ConfigKey<DiskConfig>) -> bool {
    ["Limits", "Shares", "Reading ahead"].contains(&key.heading)
        || [GROUP, "cache", L2_CACHE_SIZE].contains(&key.name)
}

/// Values of `device`: options of `weir attach` without a value.
const DEVICES: [&str; 3] = ["ublk", "nbd", "fuse"];

/// Checked options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct VolumeOptions {
    pub(crate) size_bytes: u64,
    pub(crate) format: ImageFormat,
    pub(crate) file_system: VolumeFileSystem,
    given: OptionValues,
}

impl VolumeOptions {
    /// Checks the options. Fails with the key, the value and the rule.
    pub(crate) fn read(given: OptionValues) -> Result<Self, String> {
        let disk = ConfigWithOrigins::new(DiskConfig::default(), Origin::new("the options"));
        let mut builder = VolumeOptionsBuilder { size: None, format: None, file_system: None, disk };
        for (key, value) in &given {
            builder.set(key, value)?;
        }
        // Rules between options, such as a burst rate below its rate.
        builder.disk.into_checked().map_err(|error| error.to_string())?;
        let size_bytes = builder.size.ok_or("size: is missing (set the size of the volume: -o size=10G)")?;
        let format = builder.format.unwrap_or(ImageFormat::Qcow2);
        // `weir attach` would reject it only at the first mount.
        if let (Some(value), ImageFormat::Raw) = (given.get(L2_CACHE_SIZE), format) {
            return Err(format!("{L2_CACHE_SIZE}={value}: raw images have no L2 cache (remove the option)"));
        }
        let file_system = builder.file_system.unwrap_or_default();
        file_system.check_size(size_bytes).map_err(|rule| match given.get(SIZE) {
            Some(value) => format!("{SIZE}={value}: {rule}"),
            None => rule,
        })?;
        Ok(Self { size_bytes, format, file_system, given })
    }

    /// The options as given.
    pub(crate) fn given(&self) -> &OptionValues {
        &self.given
    }

    /// Arguments of `weir attach` besides image and mount point.
    pub(crate) fn attach_arguments(&self) -> Vec<String> {
        let mut arguments =
            vec![format!("--format={}", self.format.name()), format!("--fstype={}", self.file_system.name())];
        for (key, value) in &self.given {
            match key.as_str() {
                DEVICE => arguments.push(format!("--{value}")),
                // The image was created with `size`; `format` and `fstype` are passed above.
                SIZE | FORMAT | FILE_SYSTEM => {}
                key => arguments.push(format!("--{key}={value}")),
            }
        }
        arguments
    }
}

/// Options read so far.
struct VolumeOptionsBuilder {
    size: Option<u64>,
    format: Option<ImageFormat>,
    file_system: Option<VolumeFileSystem>,
    disk: ConfigWithOrigins<DiskConfig>,
}

impl VolumeOptionsBuilder {
    fn set(&mut self, name: &str, value: &str) -> Result<(), String> {
        let origin = Origin::new(format!("{name}={value}"));
        let to_error = |rule: String| origin.error(rule).to_string();
        match name {
            SIZE => self.size = Some(settings::size(value).map_err(to_error)?),
            FORMAT => self.format = Some(settings::parse(value).map_err(to_error)?),
            FILE_SYSTEM => self.file_system = Some(VolumeFileSystem::from_name(value).map_err(to_error)?),
            MOUNT_OPTIONS => check_mount_options(value).map_err(to_error)?,
            DEVICE if DEVICES.contains(&value) => {}
            DEVICE => return Err(to_error("is not one of ublk, nbd and fuse".to_owned())),
            _ => {
                let Some(key) = DiskConfig::key(name).filter(|key| is_attach_option(key)) else {
                    return Err(to_error(unknown_option(name)));
                };
                if name == GROUP {
                    check_group(value).map_err(to_error)?;
                }
                let set = self.disk.set(key, value, Path::new(""), origin);
                set.map_err(|error| error.to_string())?;
            }
        }
        Ok(())
    }
}

fn unknown_option(name: &str) -> String {
    let attach_options = DiskConfig::keys().iter().filter(|key| is_attach_option(key)).map(|key| key.name);
    match suggest::nearest(name, VOLUME_KEYS.into_iter().chain(attach_options)) {
        Some(other) => format!("is not a volume option (did you mean {other}?)"),
        None => "is not a volume option (`weir docker-plugin --help` lists them)".to_owned(),
    }
}

/// Checks mount options: they become one word of a command line, and part of log messages.
fn check_mount_options(value: &str) -> Result<(), String> {
    let is_plain = |c: char| c.is_ascii_graphic();
    let options = value.split(',');
    if value.is_empty() || !value.chars().all(is_plain) || options.clone().any(str::is_empty) {
        return Err("is not a list of mount options (such as noatime,discard)".to_owned());
    }
    // These would change the meaning of the mount, or access paths of the host.
    match options.into_iter().find(|option| ["bind", "rbind", "move", "remount", "loop"].contains(option)) {
        Some(option) => Err(format!("{option} is not allowed for a volume (remove it)")),
        None => Ok(()),
    }
}

fn check_group(name: &str) -> Result<(), String> {
    match name {
        "" => Err("the name is empty".to_owned()),
        _ if name.chars().any(char::is_control) => {
            Err("the name has a control character (remove it)".to_owned())
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(options: &[(&str, &str)]) -> Result<VolumeOptions, String> {
        VolumeOptions::read(
            options.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect(),
        )
    }

    #[track_caller]
    fn refused(options: &[(&str, &str)], expect: &str) {
        assert_eq!(read(options).unwrap_err(), expect);
    }

    #[test]
    fn a_volume_needs_a_size_alone() {
        let options = read(&[("size", "10G")]).unwrap();
        assert_eq!((options.size_bytes, options.format), (10 << 30, ImageFormat::Qcow2));
        assert_eq!(options.attach_arguments(), ["--format=qcow2", "--fstype=ext4"]);
        refused(&[], "size: is missing (set the size of the volume: -o size=10G)");
    }

    #[test]
    fn attach_options_are_passed_on() {
        let options = read(&[
            ("size", "1G"),
            ("format", "raw"),
            ("fstype", "xfs"),
            ("group", "gold"),
            ("iops-total", "2000"),
            ("iops-total-max", "4000"),
            ("prefetch", "off"),
            ("weight", "200"),
            ("mount-options", "noatime,discard"),
            ("device", "fuse"),
        ]);
        assert_eq!(
            options.unwrap().attach_arguments(),
            [
                "--format=raw",
                "--fstype=xfs",
                "--fuse",
                "--group=gold",
                "--iops-total=2000",
                "--iops-total-max=4000",
                "--mount-options=noatime,discard",
                "--prefetch=off",
                "--weight=200"
            ]
        );
    }

    /// Every mistake is reported with its own rule when the volume is created.
    #[test]
    fn mistakes_name_key_value_and_rule() {
        let with = |key: &str, value: &str| read(&[("size", "1G"), (key, value)]).unwrap_err();
        for (key, value, expect) in [
            ("sizes", "1", "sizes=1: is not a volume option (did you mean size?)"),
            ("zzz", "", "zzz=: is not a volume option (`weir docker-plugin --help` lists them)"),
            ("format", "vmdk", "format=vmdk: is not a format that weir serves (raw, qcow2)"),
            ("fstype", "ntfs", "fstype=ntfs: is not one of ext4, xfs and btrfs"),
            ("device", "scsi", "device=scsi: is not one of ublk, nbd and fuse"),
            ("prefetch", "maybe", "prefetch=maybe: is not one of on, off and auto"),
            ("group", "", "group=: the name is empty"),
            ("weight", "0", "weight=0: is out of range; a weight is from 1 to 10000"),
            ("watermark", "101", "watermark=101: is out of range; a watermark is from 0 to 100 percent"),
            ("iops-total", "-5", "iops-total=-5: is not a whole number of 0 or more"),
            ("prefetch-streams", "0", "prefetch-streams=0: is out of range; it may be from 1 to 4096"),
            (
                "mount-options",
                "noatime,--help /",
                "mount-options=noatime,--help /: is not a list of mount options (such as noatime,discard)",
            ),
            ("mount-options", "bind", "mount-options=bind: bind is not allowed for a volume (remove it)"),
        ] {
            assert_eq!(with(key, value), expect);
        }
        refused(
            &[("size", "1G"), ("format", "raw"), ("l2-cache-size", "1M")],
            "l2-cache-size=1M: raw images have no L2 cache (remove the option)",
        );
        let error = read(&[("size", "1G"), ("iops-total", "1000"), ("iops-total-max", "500")]).unwrap_err();
        assert!(error.starts_with("iops-total-max=500: "), "{error}");
        let small = read(&[("size", "100M"), ("fstype", "xfs")]).unwrap_err();
        assert!(small.starts_with("size=100M: "), "{small}");
    }

    #[test]
    fn options_are_found_by_name() {
        for key in VOLUME_KEYS.into_iter().chain([GROUP, L2_CACHE_SIZE, "weight", "iops-total"]) {
            let error = read(&[("size", "1G"), (key, "\u{1}")]).unwrap_err();
            assert!(!error.contains("not a volume option"), "{error}");
        }
    }
}
