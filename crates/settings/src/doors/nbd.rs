//! `--nbd ADDRESS[,read-only]`: endpoint of an NBD server, and its rights.

use std::{fmt, str::FromStr, sync::LazyLock};

use crate::{
    Address, Endpoint,
    addressed::{AddressedKeys, read_options, write_options},
    key::{
        Key,
        ValueKind::{Flag, Text},
        maybe, one, table,
    },
    placed::KeySet,
};

/// Endpoint for disks that are exported over NBD.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Nbd {
    /// Address; never [`Endpoint::Inherited`].
    pub at: Endpoint,
    /// True if the server rejects writes to writable disks.
    pub read_only: bool,
}

impl Nbd {
    /// Server at this endpoint, with defaults.
    pub fn at(at: Endpoint) -> Self {
        Self { at, read_only: false }
    }
}

impl KeySet for Nbd {
    fn keys() -> &'static [Key<Self>] {
        static KEYS: LazyLock<Vec<Key<Nbd>>> = LazyLock::new(keys);
        &KEYS
    }
}

impl AddressedKeys for Nbd {
    const ADDRESS: &'static str = "listen";
    const MISSING: Option<&'static str> = None;
}

type Config = Nbd;

// A new field does not compile until it is named here, together with its row in the table below.
const _: fn(Nbd) = |Nbd { at: _, read_only: _ }| ();

/// The table.
fn keys() -> Vec<Key<Nbd>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "nbd" {
            "listen", Text, "ADDRESS", one!(at), "required", Reexport, Apart,
                "unix:PATH, HOST:PORT, or fd:NAME for a socket that a service manager passed";
            "read-only", Flag, "", one!(read_only), "false", Reexport, Apart,
                "Refuse writes, also where the disk accepts them";
        }
    }
}

impl Default for Nbd {
    fn default() -> Self {
        Self::at(Endpoint::Address(Address::standard()))
    }
}

/// An export at an NBD server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdExport {
    /// Address of the server.
    pub listen: Endpoint,
    /// Name of the export; `None` is the disk's.
    pub name: Option<String>,
    /// True if the export rejects writes to a writable disk.
    pub read_only: bool,
}

impl Default for NbdExport {
    fn default() -> Self {
        Self { listen: Endpoint::Address(Address::standard()), name: None, read_only: false }
    }
}

impl KeySet for NbdExport {
    fn keys() -> &'static [Key<Self>] {
        static KEYS: LazyLock<Vec<Key<NbdExport>>> = LazyLock::new(export_keys);
        &KEYS
    }
}

impl AddressedKeys for NbdExport {
    const ADDRESS: &'static str = "listen";
    const MISSING: Option<&'static str> = Some("no address (add listen = \"unix:PATH\" or \"HOST:PORT\")");
}

/// The table of an export of a disk.
fn export_keys() -> Vec<Key<NbdExport>> {
    type Config = NbdExport;
    const _: fn(NbdExport) = |NbdExport { listen: _, name: _, read_only: _ }| ();
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "nbd" {
            "listen", Text, "ADDRESS", one!(listen), "required", Reexport, Apart,
                "unix:PATH, HOST:PORT, or fd:NAME for a socket that a service manager passed; exports with the same address share a server";
            "name", Text, "NAME", maybe!(name), "the name of the disk", Reexport, Apart,
                "Name that clients ask for, unique at the address";
            "read-only", Flag, "", one!(read_only), "false", Reexport, Apart,
                "Refuse writes of its clients, though others may write";
        }
    }
}

impl FromStr for Nbd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut nbd = Self::at(parts.next().unwrap_or_default().parse()?);
        read_options(&mut nbd, parts)?;
        Ok(nbd)
    }
}

/// Writes the text that parses as the same value.
impl fmt::Display for Nbd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.at)?;
        write_options(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_said_again() {
        for text in [
            "unix:/run/vm1.sock",
            "fd:nbd,read-only=on",
            "localhost:10809,read-only=on",
            "[::1]:7,read-only=on",
        ] {
            assert_eq!(text.parse::<Nbd>().unwrap().to_string(), text);
        }
        assert!("unix:/s,read-only".parse::<Nbd>().unwrap().read_only);
        assert!(!"unix:/s,read-only=off".parse::<Nbd>().unwrap().read_only);
        for (text, wrong) in [
            ("fd:", "has no name; write fd:NAME, as FileDescriptorName= has it"),
            ("unix:/s,readonly", "readonly: no such key (there is read-only)"),
        ] {
            assert_eq!(text.parse::<Nbd>().unwrap_err(), wrong);
        }
    }
}
