//! Whether the daemon gives up rights once it serves. Only the text is judged here.

use std::str::FromStr;

/// Which rights the daemon gives up once all is open.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Sandbox {
    /// Those that the kernel lets it, and a warning says which are left.
    #[default]
    On,
    /// All; where the kernel lacks what it takes, there is no daemon.
    Require,
    /// None.
    Off,
}

impl FromStr for Sandbox {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "on" => Ok(Self::On),
            "require" => Ok(Self::Require),
            "off" => Ok(Self::Off),
            _ => Err("is no sandbox; there are on, require and off".to_owned()),
        }
    }
}

impl std::fmt::Display for Sandbox {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::On => "on",
            Self::Require => "require",
            Self::Off => "off",
        })
    }
}
