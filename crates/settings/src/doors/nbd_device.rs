//! `--nbd-device /dev/nbdN[,connections=4,…]`: a block device of the kernel's NBD client, served
//! over socket pairs. The config file has the same keys, and `device`.

use std::{fmt, path::PathBuf, str::FromStr, sync::LazyLock};

use super::{LEAST_BLOCK_BYTES, MAX_SECONDS, block_bytes, no_comma, number, number_of_device};
use crate::{
    addressed::{AddressedKeys, read_options, write_options},
    key::{
        Field, Key, Literal,
        ValueKind::{Flag, Integer, Text},
        maybe, one, table,
    },
    placed::KeySet,
};

/// Each connection is a socket and a kernel thread.
const MAX_CONNECTIONS: u32 = 64;
/// Long enough for a restart of weir.
const DEFAULT_DEAD_SECONDS: u32 = 60;

/// Export as a device of the kernel's NBD client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdDevice {
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

impl Default for NbdDevice {
    fn default() -> Self {
        Self {
            number: None,
            connections: None,
            timeout_s: 0,
            dead_timeout_s: DEFAULT_DEAD_SECONDS,
            block_bytes: LEAST_BLOCK_BYTES,
            read_only: false,
        }
    }
}

impl NbdDevice {
    /// Path of the device, if its number was given.
    pub fn path(&self) -> Option<PathBuf> {
        self.number.map(|_| PathBuf::from(self.device()))
    }

    /// Text of the device; `auto` if the kernel chooses it.
    fn device(&self) -> String {
        self.number.map_or_else(|| "auto".to_owned(), |number| format!("/dev/nbd{number}"))
    }
}

impl KeySet for NbdDevice {
    fn keys() -> &'static [Key<Self>] {
        static KEYS: LazyLock<Vec<Key<NbdDevice>>> = LazyLock::new(keys);
        &KEYS
    }
}

impl AddressedKeys for NbdDevice {
    const ADDRESS: &'static str = "device";
    const MISSING: Option<&'static str> =
        Some("no device (add device = \"/dev/nbd0\", or \"auto\" for one that is free)");
}

type Config = NbdDevice;

// A new field does not compile until it is named here, together with its row in the table below.
const _: fn(NbdDevice) = |NbdDevice {
                              number: _,
                              connections: _,
                              timeout_s: _,
                              dead_timeout_s: _,
                              block_bytes: _,
                              read_only: _,
                          }| ();

/// The table.
fn keys() -> Vec<Key<NbdDevice>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "nbd-device" {
            "device", Text, "/dev/nbdN", device_field(), "required", Reexport, Apart,
                "Block device of the kernel's NBD client, such as /dev/nbd0; auto is the first that is free";
            "connections", Integer, "N", maybe!(connections, |text| number(text, "connections", 1, MAX_CONNECTIONS)), "one for each worker", Reexport, Apart,
                "Sockets between the kernel and weir, from 1 to 64";
            "timeout", Integer, "SECONDS", one!(timeout_s, |text| number(text, "seconds", 0, MAX_SECONDS)), "0", Reexport, Apart,
                "Seconds that the kernel waits for a reply before it gives a connection up; 0 is for ever";
            "dead-timeout", Integer, "SECONDS", one!(dead_timeout_s, |text| number(text, "seconds", 0, MAX_SECONDS)), "60", Reexport, Apart,
                "Seconds that requests wait for weir to come back";
            "logical-block-size", Integer, "N", one!(block_bytes, block_bytes), "512", Reexport, Apart,
                "Bytes of a block: 512, 1024, 2048 or 4096";
            "read-only", Flag, "", one!(read_only), "false", Reexport, Apart,
                "Refuse writes, also where the disk accepts them";
        }
    }
}

fn device_field() -> Field<NbdDevice> {
    Field::new(
        |export: &mut NbdDevice, given| {
            export.number = device(no_comma(given.text)?)?;
            Ok(())
        },
        |export| Some(Literal::Text(export.device())),
    )
}

impl FromStr for NbdDevice {
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
    let number = number_of_device(text.as_ref(), "/dev/nbd");
    number.map(Some).ok_or_else(|| {
        format!("{text:?} is no device of the kernel's NBD; write /dev/nbd0, or auto for one that is free")
    })
}

/// Writes the text that parses as the same value.
impl fmt::Display for NbdDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.device())?;
        write_options(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_said_again() {
        for text in [
            "auto",
            "/dev/nbd0",
            "/dev/nbd15,connections=4,timeout=30,dead-timeout=0,logical-block-size=4096,read-only=on",
        ] {
            assert_eq!(text.parse::<NbdDevice>().unwrap().to_string(), text);
        }
    }

    #[test]
    fn what_cannot_be_is_named() {
        let no_device = |text| {
            format!(
                "{text:?} is no device of the kernel's NBD; write /dev/nbd0, or auto for one that is free"
            )
        };
        for text in ["", "/dev/nbd", "/dev/nbd00", "/dev/nbd+1", "/dev/nbd0p1", "/dev/nbd1048576", "nbd0"] {
            assert_eq!(text.parse::<NbdDevice>().unwrap_err(), no_device(text));
        }
        let wrong = "connections=65: is not a number of connections; that is from 1 to 64";
        assert_eq!("auto,connections=65".parse::<NbdDevice>().unwrap_err(), wrong);
    }
}
