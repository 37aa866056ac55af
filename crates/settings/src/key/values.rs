//! Types of keys' values: how each is parsed and written.

use std::{path::PathBuf, time::Duration};

use block::disk::{DetectZeroes, Discards, OnError};
use image::qcow2::L2CacheSize;
use policy::{access::Network, prefetch::PrefetchMode};
use reactor::PollingMode;
use storage::{
    CacheMode, ImageFormat, StoragePart, delay::DelayOptions, fault::FaultRule, rate::RateOptions,
    show_duration,
};

use super::{ConfigValue, KeyInput, KeyLiteral};
use crate::{
    EventCommand, FileOwner, ImageLocation, ListenAddress, ListenEndpoint, LogFormat, SandboxMode,
    SecretSource, TlsMode,
};

/// Types whose `Display` text parses as the same value.
macro_rules! texts {
    ($($type:ty),*) => { $(
        impl ConfigValue for $type {
            fn read(given: KeyInput<'_>) -> Result<Self, String> {
                crate::parse(given.text)
            }

            fn write(&self) -> KeyLiteral {
                KeyLiteral::Text(self.to_string())
            }
        }
    )* };
}

texts!(
    CacheMode,
    OnError,
    PrefetchMode,
    StoragePart,
    DelayOptions,
    RateOptions,
    FaultRule,
    Network,
    FileOwner,
    EventCommand,
    TlsMode,
    LogFormat,
    SandboxMode
);

impl ConfigValue for PollingMode {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        crate::polling(given.text)
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(match self {
            Self::Auto => "auto".to_owned(),
            Self::Off => "off".to_owned(),
            Self::UpTo(time) => show_duration(*time),
        })
    }
}

impl ConfigValue for ImageFormat {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        crate::parse(given.text)
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.name().to_owned())
    }
}

impl ConfigValue for Discards {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        crate::discards(given.text)
    }

    fn write(&self) -> KeyLiteral {
        let text = match self {
            Self::Unmap => "unmap",
            Self::Ignore => "ignore",
        };
        KeyLiteral::Text(text.to_owned())
    }
}

impl ConfigValue for DetectZeroes {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        crate::detect_zeroes(given.text)
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.name().to_owned())
    }
}

impl ConfigValue for String {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        Ok(given.text.to_owned())
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.clone())
    }
}

impl ConfigValue for bool {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        given.text.parse().map_err(|_| "is not a flag; write true or false".to_owned())
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Flag(*self)
    }
}

impl ConfigValue for u64 {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        Ok(given.number)
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Number(*self)
    }
}

/// A time that may have minutes or hours.
impl ConfigValue for Duration {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        crate::long_duration(given.text)
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(show_duration(*self))
    }
}

/// Types of plain numbers. The parser of a row bounds them.
macro_rules! numbers {
    ($($type:ty),*) => { $(
        impl ConfigValue for $type {
            fn read(given: KeyInput<'_>) -> Result<Self, String> {
                given.text.parse().map_err(|_| format!("is not a number from 0 to {}", <$type>::MAX))
            }

            fn write(&self) -> KeyLiteral {
                KeyLiteral::Number((*self).into())
            }
        }
    )* };
}

numbers!(u16, u32);

impl ConfigValue for ListenAddress {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        let address: Self = given.text.parse()?;
        address.relative_to(given.directory)
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.to_string())
    }
}

impl ConfigValue for ListenEndpoint {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        match given.text.parse()? {
            Self::Address(address) => address.relative_to(given.directory).map(Self::Address),
            other => Ok(other),
        }
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.to_string())
    }
}

impl ConfigValue for PathBuf {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        match given.text {
            "" => Err("is empty (set one, or remove the key)".to_owned()),
            // `join` keeps an absolute path.
            path => Ok(given.directory.join(path)),
        }
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.display().to_string())
    }
}

impl ConfigValue for SecretSource {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        ConfigValue::read(given).map(Self::File)
    }

    fn write(&self) -> KeyLiteral {
        KeyLiteral::Text(self.to_string())
    }
}

impl ConfigValue for ImageLocation {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        let image: Self = crate::parse(given.text)?;
        Ok(image.relative_to(given.directory))
    }

    /// Writes `file:` before a path that would otherwise parse as another kind of storage.
    fn write(&self) -> KeyLiteral {
        let text = self.to_string();
        // Compares the parsed value: `memory:1G` as a path would parse as memory.
        let is_unambiguous = text.parse::<Self>().is_ok_and(|read| read == *self);
        KeyLiteral::Text(if is_unambiguous { text } else { format!("file:{text}") })
    }
}

impl ConfigValue for L2CacheSize {
    fn read(given: KeyInput<'_>) -> Result<Self, String> {
        if given.text == "full" {
            return Ok(Self::Full);
        }
        crate::size(given.text)
            .map(Self::Bytes)
            .map_err(|rule| format!("{rule}; or \"full\", for the whole disk"))
    }

    fn write(&self) -> KeyLiteral {
        match self {
            Self::Full => KeyLiteral::Text("full".to_owned()),
            Self::Bytes(bytes) => KeyLiteral::Number(*bytes),
        }
    }
}

/// Parses a time with a unit, or seconds without one, as in QEMU.
pub(crate) fn seconds_or_time(text: &str) -> Result<Duration, String> {
    // QEMU's `cache-clean-interval` is in seconds; a number without unit has to mean the same here.
    if let Ok(seconds) = text.parse::<u32>() {
        return Ok(Duration::from_secs(seconds.into()));
    }
    crate::duration(text).map_err(|rule| format!("{rule}; a plain number is seconds"))
}

/// Writes whole seconds as a number, other times with a unit.
pub(crate) fn write_seconds(time: Duration) -> KeyLiteral {
    match time.subsec_nanos() {
        0 => KeyLiteral::Number(time.as_secs()),
        _ => KeyLiteral::Text(show_duration(time)),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read<V: ConfigValue>(text: &str) -> Result<V, String> {
        V::read(KeyInput { text, number: 0, directory: Path::new("") })
    }

    #[test]
    fn sizes_may_be_full() {
        assert_eq!(read("full"), Ok(L2CacheSize::Full));
        assert_eq!(read("2M"), Ok(L2CacheSize::Bytes(2 << 20)));
        assert!(read::<L2CacheSize>("half").unwrap_err().ends_with("or \"full\", for the whole disk"));
    }

    #[test]
    fn intervals_are_seconds() {
        assert_eq!(seconds_or_time("600"), Ok(Duration::from_secs(600)));
        assert_eq!(seconds_or_time("1500ms"), Ok(Duration::from_millis(1500)));
        assert_eq!(seconds_or_time("0"), Ok(Duration::ZERO));
        assert!(seconds_or_time("soon").is_err());
    }

    #[test]
    fn paths_round_trip() {
        let written = |text: &str| read::<ImageLocation>(text).unwrap().write().to_string();
        assert_eq!(written("file:memory:1G"), "file:memory:1G");
        assert_eq!(written("vm1.raw"), "vm1.raw");
    }
}
