//! Setting of the daemon's sandbox. Checks only the text.

use std::str::FromStr;

/// Rights that the daemon gives up after its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SandboxMode {
    /// All rights that the kernel can restrict; a warning names the remaining ones.
    #[default]
    On,
    /// All rights; the daemon does not start if the kernel cannot restrict one of them.
    Require,
    /// No rights.
    Off,
}

impl FromStr for SandboxMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "on" => Ok(Self::On),
            "require" => Ok(Self::Require),
            "off" => Ok(Self::Off),
            _ => Err("is not a sandbox mode (on, require, off)".to_owned()),
        }
    }
}

impl std::fmt::Display for SandboxMode {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::On => "on",
            Self::Require => "require",
            Self::Off => "off",
        })
    }
}
