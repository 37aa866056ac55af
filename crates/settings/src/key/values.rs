//! Types of keys' values: how each is parsed and written.

use std::{path::PathBuf, time::Duration};

use block::disk::{DetectZeroes, Discards, OnError};
use image::qcow2::L2Size;
use policy::{access::Network, prefetch::Mode};
use reactor::Polling;
use storage::{
    CacheMode, Format, Part, delay::DelayOptions, fault::FaultRule, rate::RateOptions, show_duration,
};

use super::{Given, KeyValue, Literal};
use crate::{Address, Endpoint, Image, LogFormat, OnEvent, Owner, Sandbox, SecretSource, TlsMode};

/// Types whose `Display` text parses as the same value.
macro_rules! texts {
    ($($type:ty),*) => { $(
        impl KeyValue for $type {
            fn read(given: Given<'_>) -> Result<Self, String> {
                crate::read(given.text)
            }

            fn write(&self) -> Literal {
                Literal::Text(self.to_string())
            }
        }
    )* };
}

texts!(
    CacheMode,
    OnError,
    Mode,
    Part,
    DelayOptions,
    RateOptions,
    FaultRule,
    Network,
    Owner,
    OnEvent,
    TlsMode,
    LogFormat,
    Sandbox
);

impl KeyValue for Polling {
    fn read(given: Given<'_>) -> Result<Self, String> {
        crate::polling(given.text)
    }

    fn write(&self) -> Literal {
        Literal::Text(match self {
            Self::Auto => "auto".to_owned(),
            Self::Off => "off".to_owned(),
            Self::UpTo(time) => show_duration(*time),
        })
    }
}

impl KeyValue for Format {
    fn read(given: Given<'_>) -> Result<Self, String> {
        crate::read(given.text)
    }

    fn write(&self) -> Literal {
        Literal::Text(self.name().to_owned())
    }
}

impl KeyValue for Discards {
    fn read(given: Given<'_>) -> Result<Self, String> {
        crate::discards(given.text)
    }

    fn write(&self) -> Literal {
        let text = match self {
            Self::Unmap => "unmap",
            Self::Ignore => "ignore",
        };
        Literal::Text(text.to_owned())
    }
}

impl KeyValue for DetectZeroes {
    fn read(given: Given<'_>) -> Result<Self, String> {
        crate::detect_zeroes(given.text)
    }

    fn write(&self) -> Literal {
        Literal::Text(self.name().to_owned())
    }
}

impl KeyValue for String {
    fn read(given: Given<'_>) -> Result<Self, String> {
        Ok(given.text.to_owned())
    }

    fn write(&self) -> Literal {
        Literal::Text(self.clone())
    }
}

impl KeyValue for bool {
    fn read(given: Given<'_>) -> Result<Self, String> {
        given.text.parse().map_err(|_| "is not a flag; write true or false".to_owned())
    }

    fn write(&self) -> Literal {
        Literal::Flag(*self)
    }
}

impl KeyValue for u64 {
    fn read(given: Given<'_>) -> Result<Self, String> {
        Ok(given.number)
    }

    fn write(&self) -> Literal {
        Literal::Number(*self)
    }
}

/// A time that may have minutes or hours.
impl KeyValue for Duration {
    fn read(given: Given<'_>) -> Result<Self, String> {
        crate::long_duration(given.text)
    }

    fn write(&self) -> Literal {
        Literal::Text(show_duration(*self))
    }
}

/// Types of plain numbers. The parser of a row bounds them.
macro_rules! numbers {
    ($($type:ty),*) => { $(
        impl KeyValue for $type {
            fn read(given: Given<'_>) -> Result<Self, String> {
                given.text.parse().map_err(|_| format!("is not a number from 0 to {}", <$type>::MAX))
            }

            fn write(&self) -> Literal {
                Literal::Number((*self).into())
            }
        }
    )* };
}

numbers!(u16, u32);

impl KeyValue for Address {
    fn read(given: Given<'_>) -> Result<Self, String> {
        let address: Self = given.text.parse()?;
        address.relative_to(given.directory)
    }

    fn write(&self) -> Literal {
        Literal::Text(self.to_string())
    }
}

impl KeyValue for Endpoint {
    fn read(given: Given<'_>) -> Result<Self, String> {
        match given.text.parse()? {
            Self::Address(address) => address.relative_to(given.directory).map(Self::Address),
            other => Ok(other),
        }
    }

    fn write(&self) -> Literal {
        Literal::Text(self.to_string())
    }
}

impl KeyValue for PathBuf {
    fn read(given: Given<'_>) -> Result<Self, String> {
        match given.text {
            "" => Err("is empty (write one, or leave the key out)".to_owned()),
            // `join` keeps an absolute path.
            path => Ok(given.directory.join(path)),
        }
    }

    fn write(&self) -> Literal {
        Literal::Text(self.display().to_string())
    }
}

impl KeyValue for SecretSource {
    fn read(given: Given<'_>) -> Result<Self, String> {
        KeyValue::read(given).map(Self::File)
    }

    fn write(&self) -> Literal {
        Literal::Text(self.to_string())
    }
}

impl KeyValue for Image {
    fn read(given: Given<'_>) -> Result<Self, String> {
        let image: Self = crate::read(given.text)?;
        Ok(image.relative_to(given.directory))
    }

    /// Writes `file:` before a path that would otherwise parse as another kind of storage.
    fn write(&self) -> Literal {
        let text = self.to_string();
        // Compares the parsed value: `memory:1G` as a path would parse as memory.
        let is_plain = text.parse::<Self>().is_ok_and(|read| read == *self);
        Literal::Text(if is_plain { text } else { format!("file:{text}") })
    }
}

impl KeyValue for L2Size {
    fn read(given: Given<'_>) -> Result<Self, String> {
        if given.text == "full" {
            return Ok(Self::Full);
        }
        crate::size(given.text)
            .map(Self::Bytes)
            .map_err(|rule| format!("{rule}; or \"full\", for the whole disk"))
    }

    fn write(&self) -> Literal {
        match self {
            Self::Full => Literal::Text("full".to_owned()),
            Self::Bytes(bytes) => Literal::Number(*bytes),
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
pub(crate) fn write_seconds(time: Duration) -> Literal {
    match time.subsec_nanos() {
        0 => Literal::Number(time.as_secs()),
        _ => Literal::Text(show_duration(time)),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn read<V: KeyValue>(text: &str) -> Result<V, String> {
        V::read(Given { text, number: 0, directory: Path::new("") })
    }

    #[test]
    fn sizes_may_be_full() {
        assert_eq!(read("full"), Ok(L2Size::Full));
        assert_eq!(read("2M"), Ok(L2Size::Bytes(2 << 20)));
        assert!(read::<L2Size>("half").unwrap_err().ends_with("or \"full\", for the whole disk"));
    }

    #[test]
    fn intervals_are_seconds() {
        assert_eq!(seconds_or_time("600"), Ok(Duration::from_secs(600)));
        assert_eq!(seconds_or_time("1500ms"), Ok(Duration::from_millis(1500)));
        assert_eq!(seconds_or_time("0"), Ok(Duration::ZERO));
        assert!(seconds_or_time("soon").is_err());
    }

    #[test]
    fn a_path_is_written_as_one() {
        let written = |text: &str| read::<Image>(text).unwrap().write().to_string();
        assert_eq!(written("file:memory:1G"), "file:memory:1G");
        assert_eq!(written("vm1.raw"), "vm1.raw");
    }
}
