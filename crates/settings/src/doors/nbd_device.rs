//! `--nbd-device /dev/nbdN[,connections=4,…]`: a block device of the kernel's NBD client, which
//! weir serves without a network. The config file has the same keys, and `device`.

use std::{fmt, path::PathBuf, str::FromStr};

use super::{
    Keyed, LEAST_BLOCK_BYTES, MAX_SECONDS, block_bytes, number, number_of_device, read_keys, write_keys,
};

/// Each is a socket, and a thread of the kernel.
const MAX_CONNECTIONS: u32 = 64;
/// Enough for weir to be started again.
const DEFAULT_DEAD_SECONDS: u32 = 60;

/// An export as a device of the kernel's NBD client.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NbdDevice {
    /// The `N` of `/dev/nbdN`; `None`: the first that is free.
    pub number: Option<u32>,
    /// Sockets between the kernel and weir; `None`: one for each worker.
    pub connections: Option<u16>,
    /// How long the kernel waits for an answer before it gives a connection up, in seconds; 0 is
    /// for ever, so that limits may hold a request as long as they must.
    pub timeout_s: u32,
    /// How long requests wait for weir to come back once it has gone, in seconds.
    pub dead_timeout_s: u32,
    /// A block as this host sees it, in bytes: a power of two from 512 to 4096.
    pub block_bytes: u32,
    /// Refuses writes though the disk takes them.
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
    /// The device, where its number was given.
    pub fn path(&self) -> Option<PathBuf> {
        self.number.map(|number| PathBuf::from(format!("/dev/nbd{number}")))
    }
}

impl Keyed for NbdDevice {
    const VALUES: &'static [&'static str] = &["connections", "timeout", "dead-timeout", "logical-block-size"];

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            // Fits.
            "connections" => {
                self.connections = Some(number(value, "connections", 1, MAX_CONNECTIONS)? as u16);
            }
            "timeout" => self.timeout_s = number(value, "seconds", 0, MAX_SECONDS)?,
            "dead-timeout" => self.dead_timeout_s = number(value, "seconds", 0, MAX_SECONDS)?,
            _ => self.block_bytes = block_bytes(value)?,
        }
        Ok(())
    }

    fn flags(&mut self) -> Vec<(&'static str, &mut bool)> {
        vec![("read-only", &mut self.read_only)]
    }

    fn said(&self) -> Vec<(&'static str, String)> {
        let Self { connections, timeout_s, dead_timeout_s, block_bytes, .. } = self;
        let mut said = Vec::new();
        said.extend(connections.map(|connections| ("connections", connections.to_string())));
        if *timeout_s != 0 {
            said.push(("timeout", timeout_s.to_string()));
        }
        if *dead_timeout_s != DEFAULT_DEAD_SECONDS {
            said.push(("dead-timeout", dead_timeout_s.to_string()));
        }
        if *block_bytes != LEAST_BLOCK_BYTES {
            said.push(("logical-block-size", block_bytes.to_string()));
        }
        said
    }
}

impl FromStr for NbdDevice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut export = Self { number: device(parts.next().unwrap_or_default())?, ..Self::default() };
        read_keys(&mut export, parts)?;
        Ok(export)
    }
}

/// The number of a device; `None` for `auto`.
pub(crate) fn device(text: &str) -> Result<Option<u32>, String> {
    if text == "auto" {
        return Ok(None);
    }
    let number = number_of_device(text.as_ref(), "/dev/nbd");
    number.map(Some).ok_or_else(|| {
        format!("{text:?} is no device of the kernel's NBD; write /dev/nbd0, or auto for one that is free")
    })
}

/// As it may be given again.
impl fmt::Display for NbdDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.number {
            Some(number) => write!(f, "/dev/nbd{number}")?,
            None => f.write_str("auto")?,
        }
        write_keys(self, &Self::default(), f)
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
        let wrong = "logical-block-size=0: is not the size of a block; that is 512, 1024, 2048 or 4096 bytes";
        assert_eq!("auto,logical-block-size=0".parse::<NbdDevice>().unwrap_err(), wrong);
    }
}
