//! `--nbd ADDRESS[,read-only]`: where clients of NBD connect, and what they may do there.

use std::{fmt, str::FromStr};

use super::{Keyed, read_keys, write_keys};
use crate::Endpoint;

/// A place where disks are exported over NBD.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Nbd {
    /// Never all the sockets that were passed.
    pub at: Endpoint,
    /// Refuses writes though the disks take them.
    pub read_only: bool,
}

impl Nbd {
    /// There, with nothing else said.
    pub fn at(at: Endpoint) -> Self {
        Self { at, read_only: false }
    }
}

impl Keyed for Nbd {
    const VALUES: &'static [&'static str] = &[];

    fn set(&mut self, _: &str, _: &str) -> Result<(), String> {
        Ok(())
    }

    fn flags(&mut self) -> Vec<(&'static str, &mut bool)> {
        vec![("read-only", &mut self.read_only)]
    }

    fn said(&self) -> Vec<(&'static str, String)> {
        Vec::new()
    }
}

impl FromStr for Nbd {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut nbd = Self::at(parts.next().unwrap_or_default().parse()?);
        read_keys(&mut nbd, parts)?;
        Ok(nbd)
    }
}

/// As it may be given again.
impl fmt::Display for Nbd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.at)?;
        write_keys(self, &Self::at(self.at.clone()), f)
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
            ("unix:/s,read-only=1", "read-only=1: is neither on nor off"),
            ("unix:/s,read-only,read-only", "read-only is given twice (leave one away)"),
        ] {
            assert_eq!(text.parse::<Nbd>().unwrap_err(), wrong);
        }
    }
}
