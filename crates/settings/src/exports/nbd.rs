//! `--nbd ADDRESS[,read-only]`: endpoint of an NBD server, and its rights.

use std::{fmt, str::FromStr, sync::LazyLock};

use crate::{
    ListenAddress, ListenEndpoint,
    key::{
        ConfigKey,
        KeyType::{Flag, Text},
        maybe, one, table,
    },
    option_syntax::{AddressedConfig, read_options, write_options},
    origins::KeyTable,
};

/// Endpoint for disks that are exported over NBD.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct NbdServerConfig {
    /// Address; never [`ListenEndpoint::Inherited`].
    pub endpoint: ListenEndpoint,
    /// True if the server rejects writes to writable disks.
    pub read_only: bool,
}

impl NbdServerConfig {
    /// Server at this endpoint, with defaults.
    pub fn new(at: ListenEndpoint) -> Self {
        Self { endpoint: at, read_only: false }
    }
}

impl KeyTable for NbdServerConfig {
    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<NbdServerConfig>>> = LazyLock::new(keys);
        &KEYS
    }
}

impl AddressedConfig for NbdServerConfig {
    const ADDRESS: &'static str = "listen";
    const MISSING_ADDRESS: Option<&'static str> = None;
}

type Config = NbdServerConfig;

// Names all fields, so that a new field is a compile error here. It needs a row in the table below,
// which the compiler does not check.
const _: fn(NbdServerConfig) = |NbdServerConfig { endpoint: _, read_only: _ }| ();

/// The table of keys.
fn keys() -> Vec<ConfigKey<NbdServerConfig>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "nbd" {
            "listen", Text, "ADDRESS", one!(endpoint), "required", Reexport, Separate,
                "unix:PATH, HOST:PORT, or fd:NAME for a socket passed by a service manager";
            "read-only", Flag, "", one!(read_only), "false", Reexport, Separate,
                "Reject writes, even if the disk accepts them";
        }
    }
}

impl Default for NbdServerConfig {
    fn default() -> Self {
        Self::new(ListenEndpoint::Address(ListenAddress::nbd_default()))
    }
}

/// An export at an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdExportConfig {
    /// Address of the server.
    pub listen: ListenEndpoint,
    /// Name of the export; `None` is the disk's.
    pub name: Option<String>,
    /// True if the export rejects writes to a writable disk.
    pub read_only: bool,
}

impl Default for NbdExportConfig {
    fn default() -> Self {
        Self { listen: ListenEndpoint::Address(ListenAddress::nbd_default()), name: None, read_only: false }
    }
}

impl KeyTable for NbdExportConfig {
    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<NbdExportConfig>>> = LazyLock::new(export_keys);
        &KEYS
    }
}

impl AddressedConfig for NbdExportConfig {
    const ADDRESS: &'static str = "listen";
    const MISSING_ADDRESS: Option<&'static str> =
        Some("no address (add listen = \"unix:PATH\" or \"HOST:PORT\")");
}

/// The table of an export of a disk.
fn export_keys() -> Vec<ConfigKey<NbdExportConfig>> {
    type Config = NbdExportConfig;
    const _: fn(NbdExportConfig) = |NbdExportConfig { listen: _, name: _, read_only: _ }| ();
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "nbd" {
            "listen", Text, "ADDRESS", one!(listen), "required", Reexport, Separate,
                "unix:PATH, HOST:PORT, or fd:NAME for a socket passed by a service manager; \
                 exports with the same address share a server";
            "name", Text, "NAME", maybe!(name), "the name of the disk", Reexport, Separate,
                "Export name that clients request, unique at the address";
            "read-only", Flag, "", one!(read_only), "false", Reexport, Separate,
                "Reject writes of its clients, even if others may write";
        }
    }
}

impl FromStr for NbdServerConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut nbd = Self::new(parts.next().unwrap_or_default().parse()?);
        read_options(&mut nbd, parts)?;
        Ok(nbd)
    }
}

/// Writes the text that parses as the same value.
impl fmt::Display for NbdServerConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.endpoint)?;
        write_options(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_round_trip() {
        for text in [
            "unix:/run/vm1.sock",
            "fd:nbd,read-only=on",
            "localhost:10809,read-only=on",
            "[::1]:7,read-only=on",
        ] {
            assert_eq!(text.parse::<NbdServerConfig>().unwrap().to_string(), text);
        }
        assert!("unix:/s,read-only".parse::<NbdServerConfig>().unwrap().read_only);
        assert!(!"unix:/s,read-only=off".parse::<NbdServerConfig>().unwrap().read_only);
        for (text, wrong) in [
            ("fd:", "has no name; write fd:NAME, with the name of FileDescriptorName="),
            ("unix:/s,readonly", "readonly: no such key (there is read-only)"),
        ] {
            assert_eq!(text.parse::<NbdServerConfig>().unwrap_err(), wrong);
        }
    }
}
