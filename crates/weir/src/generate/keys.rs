//! Tables of keys for the generators, without the types of the configs.

use policy::schedule::ScheduleEntry;
use settings::{
    AddressedConfig, ClusterConfig, ConfigKey, DaemonConfig, DiskConfig, FuseConfig, GroupConfig, KeyTable,
    NbdDeviceConfig, NbdExportConfig, RecordingConfig, UblkConfig, VhostUserBlkConfig,
    key::{ChangePolicy, KeyType},
};

/// A row of a table.
pub(super) struct KeyRow {
    pub(super) name: &'static str,
    pub(super) heading: &'static str,
    pub(super) value: KeyType,
    pub(super) placeholder: &'static str,
    pub(super) default: &'static str,
    pub(super) help: &'static str,
    pub(super) change: ChangePolicy,
    pub(super) is_list: bool,
    /// True if the config has a value although the key is not given.
    pub(super) has_default: bool,
}

impl KeyRow {
    /// The help without parts that apply to options only: repetition and dashes.
    pub(super) fn meaning(&self) -> String {
        as_keys(&self.help.replace("; repeatable", ""))
    }
}

impl<T: Default> From<&'static ConfigKey<T>> for KeyRow {
    fn from(key: &'static ConfigKey<T>) -> Self {
        Self {
            name: key.name,
            heading: key.heading,
            value: key.value,
            placeholder: key.placeholder,
            default: key.default,
            help: &key.help,
            change: key.change,
            is_list: key.is_list(),
            has_default: key.write(&T::default()).is_some(),
        }
    }
}

/// A table of a config file.
pub(super) struct KeySection {
    /// Name in the schema.
    pub(super) name: &'static str,
    /// Header of the table in a file.
    pub(super) title: &'static str,
    /// Meaning of the table.
    pub(super) about: &'static str,
    /// Value of the key `type`, for tables of exports.
    pub(super) kind: Option<&'static str>,
    pub(super) rows: Vec<KeyRow>,
}

impl KeySection {
    fn of<T: KeyTable>(name: &'static str, title: &'static str, about: &'static str) -> Self {
        let rows = T::keys().iter().map(KeyRow::from).collect();
        Self { name, title, about, kind: None, rows }
    }

    fn export<T: AddressedConfig>(kind: &'static str, name: &'static str, about: &'static str) -> Self {
        Self { kind: Some(kind), ..Self::of::<T>(name, "export", about) }
    }
}

/// All tables of a config file, the five exports last.
pub(super) fn sections() -> Vec<KeySection> {
    vec![
        KeySection::of::<DaemonConfig>("daemon", "[daemon]", "The process"),
        KeySection::of::<RecordingConfig>("record", "record", "Recordings of all requests"),
        KeySection::of::<ClusterConfig>(
            "cluster",
            "[cluster]",
            "The hosts that share limits, and their etcd",
        ),
        KeySection::of::<GroupConfig>("group", "[group.NAME]", "Limits that disks and other groups share"),
        KeySection::of::<DiskConfig>("disk", "[disk.NAME]", "A disk"),
        KeySection::of::<ScheduleEntry>(
            "schedule",
            "[[disk.NAME.schedule]], [[group.NAME.schedule]]",
            "Limits that hold at times",
        ),
        KeySection::export::<NbdExportConfig>("nbd", "export-nbd", "An export at an NBD server"),
        KeySection::export::<VhostUserBlkConfig>(
            "vhost-user-blk",
            "export-vhost-user-blk",
            "A socket for a virtual machine",
        ),
        KeySection::export::<UblkConfig>("ublk", "export-ublk", "A block device of the kernel's ublk driver"),
        KeySection::export::<FuseConfig>("fuse", "export-fuse", "The disk as a file, by FUSE"),
        KeySection::export::<NbdDeviceConfig>(
            "nbd-device",
            "export-nbd-device",
            "A block device of the kernel's NBD client",
        ),
    ]
}

/// The name of a key in place of the name of its option: `` `read-only` `` for `--read-only`.
pub(super) fn as_keys(help: &str) -> String {
    let word = |word: &str| match word.strip_prefix("--") {
        Some(name) => {
            // The dashes may be followed by punctuation, which is not part of the name.
            let end = name.find(|c: char| !c.is_ascii_lowercase() && c != '-').unwrap_or(name.len());
            format!("`{}`{}", &name[..end], &name[end..])
        }
        None => word.to_owned(),
    };
    help.split(' ').map(word).collect::<Vec<_>>().join(" ")
}
