//! `--vhost-user-blk unix:PATH,queues=4,…`: a socket that connects a virtual machine to a disk, and
//! the features that are offered. The config file has the same keys.

use std::{
    fmt,
    path::{Path, PathBuf},
    str::FromStr,
    sync::LazyLock,
};

use super::{MIN_BLOCK_BYTES, parse_block_size, reject_comma};
use crate::{
    address::resolve_socket,
    diagnostics::Diagnostics,
    key::{
        ConfigKey, ConfigValue, KeyInput, KeyLiteral,
        KeyType::{Flag, Integer, Text},
        maybe, one, table,
    },
    option_syntax::{AddressedConfig, read_options, write_options},
    origins::{ConfigWithOrigins, KeyTable},
};

/// A message of the protocol has eight bits for the index of a virtqueue.
const MAX_QUEUES: u16 = 256;
/// Largest number of descriptors (virtio 1.3 § 2.7).
const MAX_QUEUE_SIZE: u16 = 1 << 15;
/// Enough for a guest with as many processors; unused queues cost nothing.
const DEFAULT_QUEUES: u16 = 16;
/// As other back ends; the guest's firmware and driver choose any size up to it.
const DEFAULT_QUEUE_SIZE: u16 = 1024;
/// A request has a header, data and a status.
const MIN_QUEUE_SIZE: u16 = 4;
/// Bytes of a serial number that a guest can read (virtio 1.3 § 5.2.6).
const MAX_SERIAL_BYTES: usize = 20;

/// Socket of a virtual machine.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum VhostUserSocket {
    /// `unix:PATH`, created by weir, or by the virtual machine if weir is the client.
    Path(PathBuf),
    /// `fd:NAME`, a passed socket: by its name (`FileDescriptorName=`) or its number.
    Inherited(String),
}

impl VhostUserSocket {
    /// Path of the socket, if it has one.
    pub fn path(&self) -> Option<&Path> {
        match self {
            Self::Path(path) => Some(path),
            Self::Inherited(_) => None,
        }
    }
}

impl FromStr for VhostUserSocket {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text.strip_prefix("fd:") {
            Some("") => Err("has no name; write fd:NAME, with the name of FileDescriptorName=".to_owned()),
            Some(name) => Ok(Self::Inherited(name.to_owned())),
            None if text.starts_with("unix:") => crate::parse_unix_socket(text).map(Self::Path),
            None => Err("is not a Unix socket; write unix:PATH, or fd:NAME for a passed one".to_owned()),
        }
    }
}

impl fmt::Display for VhostUserSocket {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Path(path) => write!(f, "unix:{}", path.display()),
            Self::Inherited(name) => write!(f, "fd:{name}"),
        }
    }
}

/// vhost-user-blk export.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct VhostUserBlkConfig {
    /// The socket.
    pub socket: VhostUserSocket,
    /// True if the virtual machine listens and weir connects.
    pub client: bool,
    /// Largest number of virtqueues.
    pub queues: u16,
    /// Largest size of a virtqueue in descriptors: a power of two.
    pub queue_size: u16,
    /// Serial number of the disk; `None` uses its name.
    pub serial: Option<String>,
    /// Logical block size in bytes: a power of two from 512 to 4096.
    pub block_bytes: u32,
    /// True to offer DISCARD.
    pub discard: bool,
    /// True to offer WRITE_ZEROES.
    pub write_zeroes: bool,
    /// True to offer a volatile write cache, unless the disk's cache mode has none. The guest may
    /// disable it.
    pub write_cache: bool,
    /// True if the export rejects writes to a writable disk.
    pub read_only: bool,
}

impl VhostUserBlkConfig {
    /// Export at this socket, with defaults.
    pub fn new(socket: VhostUserSocket) -> Self {
        Self {
            socket,
            client: false,
            queues: DEFAULT_QUEUES,
            queue_size: DEFAULT_QUEUE_SIZE,
            serial: None,
            block_bytes: MIN_BLOCK_BYTES,
            discard: true,
            write_zeroes: true,
            write_cache: true,
            read_only: false,
        }
    }

    /// Fails for a client at a passed socket: weir listens on that.
    ///
    /// # Errors
    /// Returns the violated rule as a message.
    pub fn check(&self) -> Result<(), String> {
        if self.client && self.socket.path().is_none() {
            return Err("client: needs unix:PATH (weir listens on passed sockets)".to_owned());
        }
        Ok(())
    }

    /// Bytes of the serial number that a guest reads, for a disk of this name.
    pub(crate) fn guest_serial<'a>(&'a self, disk: &'a str) -> &'a [u8] {
        // Cut at a byte, not at a character: the guest reads bytes.
        let serial = self.serial.as_deref().unwrap_or(disk).as_bytes();
        &serial[..serial.len().min(MAX_SERIAL_BYTES)]
    }

    /// Text of the socket.
    pub fn address(&self) -> String {
        self.socket.to_string()
    }
}

impl KeyTable for VhostUserBlkConfig {
    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<VhostUserBlkConfig>>> = LazyLock::new(keys);
        &KEYS
    }

    fn check_rules(export: &ConfigWithOrigins<Self>, diagnostics: &Diagnostics) {
        diagnostics.ok_or_report(export.check().map_err(|rule| export.own_origin().error(rule)));
    }
}

impl AddressedConfig for VhostUserBlkConfig {
    const ADDRESS: &'static str = "listen";
    const MISSING_ADDRESS: Option<&'static str> = Some("no socket (add listen = \"unix:PATH\")");
}

type Config = VhostUserBlkConfig;

// Names all fields, so that a new field is a compile error here. It needs a row in the table below,
// which the compiler does not check.
const _: fn(VhostUserBlkConfig) = |VhostUserBlkConfig {
                                       socket: _,
                                       client: _,
                                       queues: _,
                                       queue_size: _,
                                       serial: _,
                                       block_bytes: _,
                                       discard: _,
                                       write_zeroes: _,
                                       write_cache: _,
                                       read_only: _,
                                   }| ();

/// The table of keys.
fn keys() -> Vec<ConfigKey<VhostUserBlkConfig>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "vhost-user-blk" {
            "listen", Text, "unix:PATH", one!(socket), "required", Reexport, Separate,
                "Unix socket for the virtual machine, or fd:NAME for a socket passed by a service manager";
            "queues", Integer, "N", one!(queues, parse_queues), "16", Reexport, Separate,
                "Maximum number of virtqueues, from 1 to 256";
            "queue-size", Integer, "N", one!(queue_size, parse_queue_size), "1024", Reexport, Separate,
                "Maximum size of a virtqueue in descriptors: a power of two from 4 to 32768";
            "serial", Text, "TEXT", maybe!(serial, parse_serial), "the name of the disk", Reexport, Separate,
                "Serial number for the guest, at most 20 bytes";
            "logical-block-size", Integer, "N", one!(block_bytes, parse_block_size), "512", Reexport, Separate,
                "Logical block size in bytes: 512, 1024, 2048 or 4096";
            "discard", Flag, "", one!(discard), "true", Reexport, Separate,
                "Offer discards";
            "write-zeroes", Flag, "", one!(write_zeroes), "true", Reexport, Separate,
                "Offer writes of zeroes without data";
            "write-cache", Flag, "", one!(write_cache), "true", Reexport, Separate,
                "Offer a volatile write cache, if the cache mode of the disk has one";
            "read-only", Flag, "", one!(read_only), "false", Reexport, Separate,
                "Reject writes, even if the disk accepts them";
            "client", Flag, "", one!(client), "false", Reexport, Separate,
                "Connect to the socket, on which the virtual machine listens";
        }
    }
}

impl Default for VhostUserBlkConfig {
    /// Export without a socket.
    fn default() -> Self {
        Self::new(VhostUserSocket::Path(PathBuf::new()))
    }
}

impl ConfigValue for VhostUserSocket {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        match reject_comma(given.text)?.parse()? {
            Self::Path(path) => resolve_socket(given.directory, &path).map(Self::Path),
            passed @ Self::Inherited(_) => Ok(passed),
        }
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.to_string())
    }
}

impl FromStr for VhostUserBlkConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut export = Self::new(parts.next().unwrap_or_default().parse()?);
        read_options(&mut export, parts)?;
        export.check()?;
        Ok(export)
    }
}

/// Writes the text that parses as the same value.
impl fmt::Display for VhostUserBlkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.address())?;
        write_options(self, f)
    }
}

/// Parses the number of virtqueues.
fn parse_queues(text: &str) -> Result<u16, String> {
    let number = text.parse().ok().filter(|number| (1..=MAX_QUEUES).contains(number));
    number.ok_or_else(|| format!("is not a number of queues from 1 to {MAX_QUEUES}"))
}

/// Parses the size of a virtqueue.
fn parse_queue_size(text: &str) -> Result<u16, String> {
    let fits = |size: &u16| size.is_power_of_two() && (MIN_QUEUE_SIZE..=MAX_QUEUE_SIZE).contains(size);
    let size = text.parse().ok().filter(fits);
    size.ok_or_else(|| {
        format!("is not a queue size: a power of two from {MIN_QUEUE_SIZE} to {MAX_QUEUE_SIZE}")
    })
}

/// Parses a serial number.
fn parse_serial(text: &str) -> Result<String, String> {
    if text.is_empty() {
        return Err("is empty (remove it to use the disk's name)".to_owned());
    }
    if text.len() > MAX_SERIAL_BYTES {
        return Err(format!("is {} bytes long; a serial number has at most {MAX_SERIAL_BYTES}", text.len()));
    }
    if text.chars().any(|character| character.is_control() || character == ',') {
        return Err("has a comma or a control character (remove it)".to_owned());
    }
    Ok(text.to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_round_trip() {
        for text in [
            "unix:/run/vm1.sock",
            "unix:vm1.sock,queues=4,queue-size=128,serial=disk-1,logical-block-size=4096",
            "unix:/s,discard=off,write-zeroes=off,write-cache=off,read-only=on,client=on",
            "fd:vm1,queues=4",
        ] {
            assert_eq!(text.parse::<VhostUserBlkConfig>().unwrap().to_string(), text);
        }
        let short: VhostUserBlkConfig = "unix:/s,read-only,client".parse().unwrap();
        assert!(short.read_only && short.client);
        let of_file: VhostUserBlkConfig = "unix:/s,discard=false,read-only=true".parse().unwrap();
        assert!(of_file.read_only && !of_file.discard);
        let plain: VhostUserBlkConfig = "unix:/s".parse().unwrap();
        assert!(plain.discard && plain.write_zeroes && !plain.read_only && !plain.client);
    }

    #[test]
    fn invalid_options_name_their_rule() {
        for (text, wrong) in [
            ("localhost:1", "is not a Unix socket; write unix:PATH, or fd:NAME for a passed one"),
            ("fd:", "has no name; write fd:NAME, with the name of FileDescriptorName="),
            ("fd:vm1,client", "client: needs unix:PATH (weir listens on passed sockets)"),
            ("unix:/s,queues=0", "queues=0: is not a number of queues from 1 to 256"),
            ("unix:/s,queue-size=100", "queue-size=100: is not a queue size: a power of two from 4 to 32768"),
            ("unix:/s,serial=", "serial=: is empty (remove it to use the disk's name)"),
            (
                "unix:/s,serial=123456789012345678901",
                "serial=123456789012345678901: is 21 bytes long; a serial number has at most 20",
            ),
        ] {
            assert_eq!(text.parse::<VhostUserBlkConfig>().unwrap_err(), wrong);
        }
    }
}
