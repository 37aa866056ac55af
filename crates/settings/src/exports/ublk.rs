//! `--ublk[=N][,queues=4,…]`: a block device of the kernel's ublk driver, `/dev/ublkbN`. The config
//! file has the same keys, and `number`.

use std::{fmt, path::PathBuf, str::FromStr, sync::LazyLock};

use super::{MAX_DEVICE, MAX_SECONDS, MIN_BLOCK_BYTES, parse_block_size, parse_number};
use crate::{
    key::{
        ConfigKey,
        KeyType::{Flag, Integer},
        maybe, one, table,
    },
    option_syntax::{AddressedConfig, read_options, write_options},
    origins::KeyTable,
};

/// `UBLK_MAX_NR_QUEUES` of the driver.
const MAX_QUEUES: u32 = 4096;
/// `UBLK_MAX_QUEUE_DEPTH` of linux/ublk_cmd.h.
const MAX_QUEUE_DEPTH: u32 = 4096;
const DEFAULT_QUEUE_DEPTH: u16 = 128;

/// An export as a ublk device.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UblkConfig {
    /// The `N` of `/dev/ublkbN`; `None` for the first free number.
    pub number: Option<u32>,
    /// Hardware queues; `None`: one for each worker.
    pub queues: Option<u16>,
    /// Requests in flight in each queue.
    pub queue_depth: u16,
    /// Time that requests wait for weir to restart before they fail and the device is removed, in
    /// seconds; 0 is unlimited.
    pub dead_timeout_s: u32,
    /// Logical block size in bytes: a power of two from 512 to 4096.
    pub block_bytes: u32,
    /// True to offer DISCARD.
    pub discard: bool,
    /// True to offer WRITE_ZEROES.
    pub write_zeroes: bool,
    /// True to offer a volatile write cache, unless the disk's cache mode has none.
    pub write_cache: bool,
    /// True if the export rejects writes to a writable disk.
    pub read_only: bool,
    /// True to create the device for the daemon's user, which need not be root.
    pub unprivileged: bool,
    /// True to use zero copy if kernel and image support it.
    pub zero_copy: bool,
}

impl Default for UblkConfig {
    fn default() -> Self {
        Self {
            number: None,
            queues: None,
            queue_depth: DEFAULT_QUEUE_DEPTH,
            // A timeout would lose the unwritten data of a mounted file system.
            dead_timeout_s: 0,
            block_bytes: MIN_BLOCK_BYTES,
            discard: true,
            write_zeroes: true,
            write_cache: true,
            read_only: false,
            unprivileged: false,
            zero_copy: true,
        }
    }
}

impl UblkConfig {
    /// Path of the device, if its number was given.
    pub fn path(&self) -> Option<PathBuf> {
        self.number.map(|number| PathBuf::from(format!("/dev/ublkb{number}")))
    }
}

impl KeyTable for UblkConfig {
    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<UblkConfig>>> = LazyLock::new(keys);
        &KEYS
    }
}

impl AddressedConfig for UblkConfig {
    const ADDRESS: &'static str = "number";
    const MISSING_ADDRESS: Option<&'static str> = None;
}

type Config = UblkConfig;

// Names all fields, so that a new field is a compile error here. It needs a row in the table below,
// which the compiler does not check.
const _: fn(UblkConfig) = |UblkConfig {
                               number: _,
                               queues: _,
                               queue_depth: _,
                               dead_timeout_s: _,
                               block_bytes: _,
                               discard: _,
                               write_zeroes: _,
                               write_cache: _,
                               read_only: _,
                               unprivileged: _,
                               zero_copy: _,
                           }| ();

/// The table of keys.
fn keys() -> Vec<ConfigKey<UblkConfig>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "ublk" {
            "number", Integer, "N", maybe!(number, parse_device_number), "the first free one", Reexport, Separate,
                "The N of /dev/ublkbN";
            "queues", Integer, "N", maybe!(queues, |text| parse_number(text, "queues", 1, MAX_QUEUES)), "one per worker", Reexport, Separate,
                "Hardware queues, from 1 to 4096";
            "queue-depth", Integer, "N", one!(queue_depth, |text| parse_number(text, "requests", 1, MAX_QUEUE_DEPTH)), "128", Reexport, Separate,
                "Queue depth: requests of a queue in flight, from 1 to 4096";
            "dead-timeout", Integer, "SECONDS", one!(dead_timeout_s, |text| parse_number(text, "seconds", 0, MAX_SECONDS)), "0", Reexport, Separate,
                "Seconds that requests wait for weir to restart before they fail and the device is \
                 removed; 0 is forever";
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
            "unprivileged", Flag, "", one!(unprivileged), "false", Reexport, Separate,
                "Create an unprivileged device, for the daemon's user, which need not be root";
            "zero-copy", Flag, "", one!(zero_copy), "true", Reexport, Separate,
                "Use zero copy if kernel and image support it";
        }
    }
}

impl FromStr for UblkConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (first, rest) = text.split_once(',').map_or((text, None), |(first, rest)| (first, Some(rest)));
        let mut ublk = Self::default();
        let mut keys = Some(text);
        // The first part is a device number, or empty (`--ublk=`, `--ublk=,queues=2`), or a key.
        if first.bytes().all(|byte| byte.is_ascii_digit()) {
            keys = rest;
            let number = || parse_device_number(first).map_err(|rule| format!("{first}: {rule}"));
            ublk.number = (!first.is_empty()).then(number).transpose()?;
        }
        read_options(&mut ublk, keys.into_iter().flat_map(|keys| keys.split(',')))?;
        Ok(ublk)
    }
}

/// Parses the number of a device.
fn parse_device_number(text: &str) -> Result<u32, String> {
    let number = text.parse::<u32>().ok().filter(|number| *number <= MAX_DEVICE);
    number.ok_or_else(|| format!("is not a device number from 0 to {MAX_DEVICE}"))
}

/// Writes the text that parses as the same value.
impl fmt::Display for UblkConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(number) = self.number {
            write!(f, "{number}")?;
        }
        write_options(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_round_trip() {
        for text in [
            "",
            "0",
            "3,queues=4,queue-depth=64,dead-timeout=60,logical-block-size=4096",
            ",discard=off,write-zeroes=off,write-cache=off,read-only=on",
            ",zero-copy=off",
        ] {
            assert_eq!(text.parse::<UblkConfig>().unwrap().to_string(), text);
        }
        let short: UblkConfig = "queues=2,read-only,unprivileged".parse().unwrap();
        assert_eq!(short.to_string(), ",queues=2,read-only=on,unprivileged=on");
        assert_eq!("dead-timeout=0".parse(), Ok(UblkConfig::default()), "requests wait for ever");
        assert_eq!("7".parse::<UblkConfig>().unwrap().path(), Some(PathBuf::from("/dev/ublkb7")));
    }

    #[test]
    fn invalid_options_name_their_rule() {
        for (text, wrong) in [
            ("1048576", "1048576: is not a device number from 0 to 1048575"),
            ("0,queues=0", "queues=0: is not a number of queues from 1 to 4096"),
            ("0,queue-depth=5000", "queue-depth=5000: is not a number of requests from 1 to 4096"),
            ("dead-timeout=86401", "dead-timeout=86401: is not a number of seconds from 0 to 86400"),
        ] {
            assert_eq!(text.parse::<UblkConfig>().unwrap_err(), wrong);
        }
        let unknown = "/dev/ublkb0".parse::<UblkConfig>().unwrap_err();
        assert!(
            unknown.starts_with("/dev/ublkb0: no such key (there are queues, queue-depth, "),
            "{unknown}"
        );
    }
}
