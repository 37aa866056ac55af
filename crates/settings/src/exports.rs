//! Exports of one disk: an NBD server, a socket for a virtual machine, a block device or a file of
//! this host.
//!
//! Each type has a file with its table of keys. Never checks if the host supports an export.

mod fuse;
mod nbd;
mod nbd_device;
mod ublk;
mod vhost_user_blk;

use std::{
    fmt,
    path::{Path, PathBuf},
};

use crate::{key::KeyLiteral, option_syntax::AddressedConfig as _};
pub use fuse::FuseConfig;
pub use nbd::{NbdExportConfig, NbdServerConfig};
pub use nbd_device::NbdDeviceConfig;
pub use ublk::UblkConfig;
pub use vhost_user_blk::{VhostUserBlkConfig, VhostUserSocket};

/// An export that has its own endpoint: every type except `nbd`, whose exports share the endpoint
/// of a server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ExportTarget {
    /// A socket for a virtual machine.
    VhostUserBlk(VhostUserBlkConfig),
    /// A block device of the kernel's ublk driver.
    Ublk(UblkConfig),
    /// A file, by FUSE.
    Fuse(FuseConfig),
    /// A block device of the kernel's NBD client.
    NbdDevice(NbdDeviceConfig),
}

impl ExportTarget {
    /// Value of `type` in the config file.
    pub fn type_name(&self) -> &'static str {
        match self {
            Self::VhostUserBlk(_) => "vhost-user-blk",
            Self::Ublk(_) => "ublk",
            Self::Fuse(_) => "fuse",
            Self::NbdDevice(_) => "nbd-device",
        }
    }

    /// Text of its endpoint; the type, if the kernel chooses the device.
    pub fn address(&self) -> String {
        match self {
            Self::VhostUserBlk(machine) => machine.address(),
            _ => self.path().map_or_else(|| self.type_name().to_owned(), |path| path.display().to_string()),
        }
    }

    /// Path that must be unique among all exports; `None` if the kernel chooses the device.
    pub fn path(&self) -> Option<PathBuf> {
        match self {
            Self::VhostUserBlk(machine) => machine.socket.path().map(Path::to_owned),
            Self::Ublk(ublk) => ublk.path(),
            Self::Fuse(fuse) => Some(fuse.file.clone()),
            Self::NbdDevice(device) => device.path(),
        }
    }

    /// Name or number of the socket, if a service manager passed it to weir.
    pub fn inherited_name(&self) -> Option<&str> {
        match self {
            Self::VhostUserBlk(VhostUserBlkConfig { socket: VhostUserSocket::Inherited(name), .. }) => {
                Some(name)
            }
            _ => None,
        }
    }

    /// Logical block size in bytes, and the client that uses it; `None` if the disk may end at any
    /// byte.
    pub fn logical_block(&self) -> Option<(u32, &'static str)> {
        match self {
            Self::VhostUserBlk(machine) => Some((machine.block_bytes, "a guest")),
            Self::Ublk(ublk) => Some((ublk.block_bytes, "the kernel")),
            Self::NbdDevice(device) => Some((device.block_bytes, "the kernel")),
            Self::Fuse(_) => None,
        }
    }

    /// Names and values of the keys that differ from their defaults, the endpoint first.
    pub fn literals(&self) -> Vec<(&'static str, KeyLiteral)> {
        match self {
            Self::VhostUserBlk(machine) => machine.literals(),
            Self::Ublk(ublk) => ublk.literals(),
            Self::Fuse(fuse) => fuse.literals(),
            Self::NbdDevice(device) => device.literals(),
        }
    }

    /// True if the export rejects writes to a writable disk.
    pub fn read_only(&self) -> bool {
        match self {
            Self::VhostUserBlk(machine) => machine.read_only,
            Self::Ublk(ublk) => ublk.read_only,
            Self::Fuse(fuse) => fuse.read_only,
            Self::NbdDevice(device) => device.read_only,
        }
    }
}

/// Writes the text that parses as the same value.
impl fmt::Display for ExportTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::VhostUserBlk(machine) => machine.fmt(f),
            Self::Ublk(ublk) => ublk.fmt(f),
            Self::Fuse(fuse) => fuse.fmt(f),
            Self::NbdDevice(device) => device.fmt(f),
        }
    }
}

/// Rejects a comma: the keys after a comma in an option are separate keys in a config file.
fn reject_comma(text: &str) -> Result<&str, String> {
    match text.contains(',') {
        true => {
            Err("has a comma; options after a comma are keys here (such as queues = 4 or discard = false)"
                .to_owned())
        }
        false => Ok(text),
    }
}

/// Parses a number from `min` to `max`; the error names its `unit`.
fn parse_number<N: TryFrom<u32>>(text: &str, unit: &str, min: u32, max: u32) -> Result<N, String> {
    let number = text.parse().ok().filter(|number| (min..=max).contains(number));
    let number = number.and_then(|number| N::try_from(number).ok());
    number.ok_or_else(|| format!("is not a number of {unit} from {min} to {max}"))
}

/// One day. A longer timeout needs 0, which is unlimited.
const MAX_SECONDS: u32 = 86_400;

/// Sector size, the default block size.
const MIN_BLOCK_BYTES: u32 = 512;
/// Page size: few kernels support larger blocks.
const MAX_BLOCK_BYTES: u32 = 4096;

/// Parses a logical block size.
fn parse_block_size(text: &str) -> Result<u32, String> {
    let fits = |bytes: &u32| bytes.is_power_of_two() && (MIN_BLOCK_BYTES..=MAX_BLOCK_BYTES).contains(bytes);
    let bytes = text.parse().ok().filter(fits);
    bytes.ok_or_else(|| "is not a logical block size: 512, 1024, 2048 or 4096 bytes".to_owned())
}

/// Parses the `N` of a device path with this prefix.
fn parse_device_number(path: &Path, prefix: &str) -> Option<u32> {
    let digits = path.to_str()?.strip_prefix(prefix)?;
    // `/dev/nbd01` is another file than `/dev/nbd1`.
    let plain = digits == "0" || !digits.starts_with('0');
    digits.bytes().all(|byte| byte.is_ascii_digit()).then_some(())?;
    digits.parse().ok().filter(|number| plain && *number <= MAX_DEVICE)
}

/// Minor numbers of devices have 20 bits.
const MAX_DEVICE: u32 = (1 << 20) - 1;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_a_power_of_two_up_to_a_page() {
        assert_eq!(["512", "1024", "2048", "4096"].map(parse_block_size), [512, 1024, 2048, 4096].map(Ok));
        for text in ["0", "256", "513", "4K", "8192", ""] {
            let rule = "is not a logical block size: 512, 1024, 2048 or 4096 bytes";
            assert_eq!(parse_block_size(text), Err(rule.to_owned()), "{text}");
        }
    }

    #[test]
    fn option_keys_are_unique_and_typed() {
        for (text, wrong) in [
            ("0,", "has a trailing comma (remove it)"),
            ("0,discard=maybe", "discard=maybe: is neither on nor off"),
            ("0,discard=1", "discard=1: is neither on nor off"),
            ("0,queues=1,queues=2", "queues is given twice (remove one)"),
            ("0,read-only,read-only", "read-only is given twice (remove one)"),
            (
                "0,logical-block-size=4K",
                "logical-block-size=4K: is not a logical block size: 512, 1024, 2048 or 4096 bytes",
            ),
        ] {
            assert_eq!(text.parse::<UblkConfig>().unwrap_err(), wrong);
        }
        let unknown = "0,queue=1".parse::<UblkConfig>().unwrap_err();
        assert!(unknown.starts_with("queue=1: no such key (there are queues, "), "{unknown}");
    }
}
