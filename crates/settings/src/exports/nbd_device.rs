//! `--nbd-device /dev/nbdN[,connections=4,…]`: a block device of the kernel's NBD client, served
//! over socket pairs. The config file has the same keys, and `device`.

use std::{fmt, path::PathBuf, str::FromStr, sync::LazyLock};

use super::{
    MAX_SECONDS, MIN_BLOCK_BYTES, parse_block_size, parse_device_number, parse_number, reject_comma,
};
use crate::{
    key::{
        ConfigKey, KeyField, KeyLiteral,
        KeyType::{Flag, Integer, Text},
        maybe, one, table,
    },
    option_syntax::{AddressedConfig, read_options, write_options},
    origins::KeyTable,
};

/// Each connection is a socket and a kernel thread.
const MAX_CONNECTIONS: u32 = 64;
/// Long enough for a restart of weir.
const DEFAULT_DEAD_SECONDS: u32 = 60;

/// Export as a device of the kernel's NBD client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdDeviceConfig {
    /// The `N` of `/dev/nbdN`; `None` for the first free device.
    pub number: Option<u32>,
    /// Sockets between the kernel and weir; `None`: one for each worker.
    pub connections: Option<u16>,
    /// Time that the kernel waits for a reply before it drops a connection, in seconds; 0 is
    /// unlimited, so that limits may throttle a request for any time.
    pub timeout_s: u32,
    /// Time that requests wait for weir to reconnect, in seconds.
    pub dead_timeout_s: u32,
    /// Logical block size in bytes: a power of two from 512 to 4096.
    pub block_bytes: u32,
    /// True if the export rejects writes to a writable disk.
    pub read_only: bool,
}

impl Default for NbdDeviceConfig {
    fn default() -> Self {
        Self {
            number: None,
            connections: None,
            timeout_s: 0,
            dead_timeout_s: DEFAULT_DEAD_SECONDS,
            block_bytes: MIN_BLOCK_BYTES,
            read_only: false,
        }
    }
}

impl NbdDeviceConfig {
    /// Path of the device, if its number was given.
    pub fn path(&self) -> Option<PathBuf> {
        self.number.map(|_| PathBuf::from(self.device()))
    }

    /// Text of the device; `auto` if the kernel chooses it.
    fn device(&self) -> String {
        self.number.map_or_else(|| "auto".to_owned(), |number| format!("/dev/nbd{number}"))
    }
}

impl KeyTable for NbdDeviceConfig {
    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<NbdDeviceConfig>>> = LazyLock::new(keys);
        &KEYS
    }
}

impl AddressedConfig for NbdDeviceConfig {
    const ADDRESS: &'static str = "device";
    const MISSING_ADDRESS: Option<&'static str> =
        Some("no device (add device = \"/dev/nbd0\", or \"auto\" for one that is free)");
}

type Config = NbdDeviceConfig;

// Names all fields, so that a new field is a compile error here. It needs a row in the table below,
// which the compiler does not check.
const _: fn(NbdDeviceConfig) = |NbdDeviceConfig {
                                    number: _,
                                    connections: _,
                                    timeout_s: _,
                                    dead_timeout_s: _,
                                    block_bytes: _,
                                    read_only: _,
                                }| ();

/// The table of keys.
fn keys() -> Vec<ConfigKey<NbdDeviceConfig>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "nbd-device" {
            "device", Text, "/dev/nbdN", device_field(), "required", Reexport, Separate,
                "Block device of the kernel's NBD client, such as /dev/nbd0; auto is the first free one";
            "connections", Integer, "N", maybe!(connections, |text| parse_number(text, "connections", 1, MAX_CONNECTIONS)), "one per worker", Reexport, Separate,
                "Sockets between the kernel and weir, from 1 to 64";
            "timeout", Integer, "SECONDS", one!(timeout_s, |text| parse_number(text, "seconds", 0, MAX_SECONDS)), "0", Reexport, Separate,
                "Seconds that the kernel waits for a reply before it closes a connection; 0 is forever";
            "dead-timeout", Integer, "SECONDS", one!(dead_timeout_s, |text| parse_number(text, "seconds", 0, MAX_SECONDS)), "60", Reexport, Separate,
                "Seconds that requests wait for weir to restart";
            "logical-block-size", Integer, "N", one!(block_bytes, parse_block_size), "512", Reexport, Separate,
                "Logical block size in bytes: 512, 1024, 2048 or 4096";
            "read-only", Flag, "", one!(read_only), "false", Reexport, Separate,
                "Reject writes, even if the disk accepts them";
        }
    }
}

fn device_field() -> KeyField<NbdDeviceConfig> {
    KeyField::new(
        |export: &mut NbdDeviceConfig, given| {
            export.number = device(reject_comma(given.text)?)?;
            Ok(())
        },
        |export| Some(KeyLiteral::Text(export.device())),
    )
}

impl FromStr for NbdDeviceConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut export = Self { number: device(parts.next().unwrap_or_default())?, ..Self::default() };
        read_options(&mut export, parts)?;
        Ok(export)
    }
}

/// Parses the device; `None` for `auto`.
fn device(text: &str) -> Result<Option<u32>, String> {
    if text == "auto" {
        return Ok(None);
    }
    // Rejects links and other names: the number is passed to the kernel.
    let number = parse_device_number(text.as_ref(), "/dev/nbd");
    number.map(Some).ok_or_else(|| {
        format!(
            "{text:?} is not a device of the kernel's NBD client; write /dev/nbd0, or auto for a free one"
        )
    })
}

/// Writes the text that parses as the same value.
impl fmt::Display for NbdDeviceConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device())?;
        write_options(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_round_trip() {
        for text in [
            "auto",
            "/dev/nbd0",
            "/dev/nbd15,connections=4,timeout=30,dead-timeout=0,logical-block-size=4096,read-only=on",
        ] {
            assert_eq!(text.parse::<NbdDeviceConfig>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn invalid_options_name_their_rule() {
        let no_device = |text| {
            format!(
                "{text:?} is not a device of the kernel's NBD client; write /dev/nbd0, or auto for a free one"
            )
        };
        for text in ["", "/dev/nbd", "/dev/nbd00", "/dev/nbd+1", "/dev/nbd0p1", "/dev/nbd1048576", "nbd0"] {
            assert_eq!(text.parse::<NbdDeviceConfig>().unwrap_err(), no_device(text));
        }
        let wrong = "connections=65: is not a number of connections from 1 to 64";
        assert_eq!("auto,connections=65".parse::<NbdDeviceConfig>().unwrap_err(), wrong);
    }
}
