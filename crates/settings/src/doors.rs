//! Doors of one disk's own, and what is said of them: a socket for a virtual machine, a block
//! device or a file on this host.
//!
//! ```text
//!   --ublk=3,queues=2               place, then keys behind commas    read_keys
//!   { type = "ublk", queues = 2 }   the same keys in the config file  config::door
//!   {"type": "x-ublk", "queues": 2} and over QMP                      daemon::control::qmp
//! ```
//!
//! A kind of door is one file here: its keys stand in it once, for all three. Never looks whether
//! the host has what is asked for.

pub(crate) mod fuse;
mod nbd;
pub(crate) mod nbd_device;
pub(crate) mod ublk;
mod vhost_user_blk;

use std::{
    fmt,
    path::{Path, PathBuf},
};

pub use fuse::Fuse;
pub use nbd::Nbd;
pub use nbd_device::NbdDevice;
pub use ublk::Ublk;
pub use vhost_user_blk::{Socket, VhostUserBlk};

/// A door of one disk's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Door {
    /// A socket for a virtual machine.
    VhostUserBlk(VhostUserBlk),
    /// A block device of the kernel's ublk driver.
    Ublk(Ublk),
    /// A file.
    Fuse(Fuse),
    /// A block device of the kernel's NBD client.
    NbdDevice(NbdDevice),
}

impl Door {
    /// As the config file's `type` calls it.
    pub fn kind(&self) -> &'static str {
        match self {
            Self::VhostUserBlk(_) => "vhost-user-blk",
            Self::Ublk(_) => "ublk",
            Self::Fuse(_) => "fuse",
            Self::NbdDevice(_) => "nbd-device",
        }
    }

    /// Where it is, as text; of a device that the kernel is to choose, its kind.
    pub fn address(&self) -> String {
        match self {
            Self::VhostUserBlk(machine) => machine.address(),
            _ => self.path().map_or_else(|| self.kind().to_owned(), |path| path.display().to_string()),
        }
    }

    /// What no two doors can have; of a device that the kernel is to choose, nothing.
    pub fn path(&self) -> Option<PathBuf> {
        match self {
            Self::VhostUserBlk(machine) => machine.socket.path().map(Path::to_owned),
            Self::Ublk(ublk) => ublk.path(),
            Self::Fuse(fuse) => Some(fuse.file.clone()),
            Self::NbdDevice(device) => device.path(),
        }
    }

    /// The socket that is to be passed for it.
    pub fn passed(&self) -> Option<&str> {
        match self {
            Self::VhostUserBlk(VhostUserBlk { socket: Socket::Passed(name), .. }) => Some(name),
            _ => None,
        }
    }

    /// Bytes of a block as whoever is behind it sees the disk, and who that is; `None` where any
    /// byte can be the last.
    pub fn blocks(&self) -> Option<(u32, &'static str)> {
        match self {
            Self::VhostUserBlk(machine) => Some((machine.block_bytes, "a guest")),
            Self::Ublk(ublk) => Some((ublk.block_bytes, "the kernel")),
            Self::NbdDevice(device) => Some((device.block_bytes, "the kernel")),
            Self::Fuse(_) => None,
        }
    }

    /// Whether it refuses writes though the disk takes them.
    pub fn read_only(&self) -> bool {
        match self {
            Self::VhostUserBlk(machine) => machine.read_only,
            Self::Ublk(ublk) => ublk.read_only,
            Self::Fuse(fuse) => fuse.read_only,
            Self::NbdDevice(device) => device.read_only,
        }
    }
}

/// As it may be given again.
impl fmt::Display for Door {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VhostUserBlk(machine) => machine.fmt(f),
            Self::Ublk(ublk) => ublk.fmt(f),
            Self::Fuse(fuse) => fuse.fmt(f),
            Self::NbdDevice(device) => device.fmt(f),
        }
    }
}

/// What has keys, each with a value or a flag.
pub trait Keyed {
    /// The keys that take a value.
    const VALUES: &'static [&'static str];
    /// Keys of earlier versions, and the rule that a use of them breaks. Command line, config file
    /// and QMP refuse them with it.
    const REMOVED: &'static [(&'static str, &'static str)] = &[];

    /// Takes the value of one of [`Self::VALUES`].
    ///
    /// # Errors
    /// The rule that it breaks.
    fn set(&mut self, key: &str, value: &str) -> Result<(), String>;

    /// The keys that are on or off.
    fn flags(&mut self) -> Vec<(&'static str, &mut bool)>;

    /// The values that are not what they are if nothing is said.
    fn said(&self) -> Vec<(&'static str, String)>;
}

/// Reads `key=value`s, each once; a flag alone is on.
pub(crate) fn read_keys<'a, K: Keyed>(
    keyed: &mut K,
    parts: impl IntoIterator<Item = &'a str>,
) -> Result<(), String> {
    let mut seen: Vec<&str> = Vec::new();
    for part in parts {
        let (key, value) = part.split_once('=').unwrap_or((part, "on"));
        if seen.contains(&key) {
            return Err(format!("{key} is given twice (leave one away)"));
        }
        seen.push(key);
        let wrong = |rule: String| format!("{part}: {rule}");
        if K::VALUES.contains(&key) {
            keyed.set(key, value).map_err(wrong)?;
        } else if let Some((_, flag)) = keyed.flags().into_iter().find(|(name, _)| *name == key) {
            *flag = switch(value).map_err(wrong)?;
        } else if let Some((_, rule)) = K::REMOVED.iter().find(|(name, _)| *name == key) {
            return Err(format!("{part}: {rule}"));
        } else if key.is_empty() {
            return Err("has a comma with nothing behind it (leave it away)".to_owned());
        } else {
            return Err(format!("{part}: no such key (there {})", names(keyed)));
        }
    }
    Ok(())
}

/// `are queues, read-only and client`.
fn names<K: Keyed>(keyed: &mut K) -> String {
    let flags = keyed.flags();
    let mut names: Vec<_> = K::VALUES.iter().copied().chain(flags.iter().map(|(name, _)| *name)).collect();
    let last = names.pop().unwrap_or_default();
    if names.is_empty() { format!("is {last}") } else { format!("are {} and {last}", names.join(", ")) }
}

/// Writes what differs from `standard`, behind a comma each.
pub(crate) fn write_keys<K: Keyed + Clone>(
    keyed: &K,
    standard: &K,
    f: &mut fmt::Formatter<'_>,
) -> fmt::Result {
    for (key, value) in keyed.said() {
        write!(f, ",{key}={value}")?;
    }
    let (mut keyed, mut standard) = (keyed.clone(), standard.clone());
    for ((key, flag), (_, standard)) in keyed.flags().into_iter().zip(standard.flags()) {
        if flag != standard {
            write!(f, ",{key}={}", if *flag { "on" } else { "off" })?;
        }
    }
    Ok(())
}

fn switch(text: &str) -> Result<bool, String> {
    match text {
        // As the config file has it.
        "on" | "true" => Ok(true),
        "off" | "false" => Ok(false),
        _ => Err("is neither on nor off".to_owned()),
    }
}

/// A number of `what` from `least` to `most`.
fn number(text: &str, what: &str, least: u32, most: u32) -> Result<u32, String> {
    let number = text.parse().ok().filter(|number| (least..=most).contains(number));
    number.ok_or_else(|| format!("is not a number of {what}; that is from {least} to {most}"))
}

/// A day: of whoever wants to wait for ever, that is what a disk can be away.
const MAX_SECONDS: u32 = 86_400;

/// A sector: what blocks are where nothing is said.
const LEAST_BLOCK_BYTES: u32 = 512;
/// A page: larger blocks few kernels know.
const MAX_BLOCK_BYTES: u32 = 4096;

/// What a client's requests are multiples of.
fn block_bytes(text: &str) -> Result<u32, String> {
    let fits = |bytes: &u32| bytes.is_power_of_two() && (LEAST_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(bytes);
    let bytes = text.parse().ok().filter(fits);
    bytes.ok_or_else(|| "is not the size of a block; that is 512, 1024, 2048 or 4096 bytes".to_owned())
}

/// The `N` of a device's path that begins with `prefix`.
fn number_of_device(path: &Path, prefix: &str) -> Option<u32> {
    let digits = path.to_str()?.strip_prefix(prefix)?;
    let plain = digits == "0" || !digits.starts_with('0');
    digits.bytes().all(|byte| byte.is_ascii_digit()).then_some(())?;
    digits.parse().ok().filter(|number| plain && *number <= MAX_DEVICE)
}

/// A device's minor number has twenty bits.
const MAX_DEVICE: u32 = (1 << 20) - 1;
