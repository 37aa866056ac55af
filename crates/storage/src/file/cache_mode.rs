//! QEMU's cache modes by name.

use std::{fmt, str::FromStr};

use crate::InvalidValue;

/// Use of the host's page cache, and the point at which a write completes. The table is in
/// [`file`](super); names and meaning are QEMU's.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CacheMode {
    /// Through the page cache; durable once flushed. The default of QEMU and qemu-nbd.
    #[default]
    Writeback,
    /// Through the page cache; every write is durable on completion.
    Writethrough,
    /// O_DIRECT; durable once flushed. `off` is another name for it.
    None,
    /// O_DIRECT; every write is durable on completion.
    Directsync,
    /// Through the page cache; flushes are ignored. A crash of the host may lose everything.
    Unsafe,
}

impl CacheMode {
    /// All modes, in the order in which messages list them.
    pub const ALL: [Self; 5] =
        [Self::Writeback, Self::Writethrough, Self::None, Self::Directsync, Self::Unsafe];

    /// True if it bypasses the page cache with O_DIRECT.
    pub const fn is_direct(self) -> bool {
        matches!(self, Self::None | Self::Directsync)
    }

    /// True if the client should see a volatile write cache, which it must flush.
    pub const fn has_write_cache(self) -> bool {
        !matches!(self, Self::Writethrough | Self::Directsync)
    }

    /// The name, as on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Writeback => "writeback",
            Self::Writethrough => "writethrough",
            Self::None => "none",
            Self::Directsync => "directsync",
            Self::Unsafe => "unsafe",
        }
    }
}

impl fmt::Display for CacheMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for CacheMode {
    type Err = InvalidValue;
    fn from_str(text: &str) -> Result<Self, InvalidValue> {
        if text == "off" {
            return Ok(Self::None);
        }
        Self::ALL.into_iter().find(|mode| mode.name() == text).ok_or_else(|| {
            InvalidValue::new(text, "is not a cache mode (writeback, writethrough, none, directsync, unsafe)")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_qemus() {
        for mode in CacheMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert_eq!("off".parse(), Ok(CacheMode::None));
        assert!("write-back".parse::<CacheMode>().is_err());
        assert_eq!(CacheMode::default(), CacheMode::Writeback);
    }
}
