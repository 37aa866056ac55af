//! Settings of a disk's prefetch cache. Names, meanings and defaults are those of pcache (proposed
//! for QEMU, KVM Forum 2016) where it has them.

use core::fmt;
use core::ops::RangeInclusive;
use core::str::FromStr;

use super::read_ahead::CHUNK_MAX_BYTES;

/// Mode of read-ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PrefetchMode {
    /// No read-ahead.
    Off,
    /// Read ahead of every stream, even if that has not paid off before.
    On,
    /// Read ahead if it pays. Not for images in memory or images that other processes may write to.
    #[default]
    Auto,
}

impl PrefetchMode {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::Off, Self::On, Self::Auto];

    /// Value of the mode in config files and options.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for PrefetchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Error for a name that is not a [`PrefetchMode`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPrefetchMode;

impl fmt::Display for UnknownPrefetchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("is not one of on, off and auto")
    }
}

impl core::error::Error for UnknownPrefetchMode {}

impl FromStr for PrefetchMode {
    type Err = UnknownPrefetchMode;

    fn from_str(text: &str) -> Result<Self, UnknownPrefetchMode> {
        Self::ALL.into_iter().find(|mode| mode.name() == text).ok_or(UnknownPrefetchMode)
    }
}

/// A numeric setting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PrefetchSetting {
    /// [`PrefetchConfig::memory_bytes`].
    Memory,
    /// [`PrefetchConfig::largest_request_bytes`].
    LargestRequest,
    /// [`PrefetchConfig::window_min_bytes`].
    WindowMin,
    /// [`PrefetchConfig::window_max_bytes`].
    WindowMax,
    /// [`PrefetchConfig::streams`].
    Streams,
}

impl PrefetchSetting {
    /// All settings.
    pub const ALL: [Self; 5] =
        [Self::Memory, Self::LargestRequest, Self::WindowMin, Self::WindowMax, Self::Streams];

    /// Key in config files.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "prefetch-memory",
            Self::LargestRequest => "prefetch-largest-request",
            Self::WindowMin => "prefetch-window-min",
            Self::WindowMax => "prefetch-window-max",
            Self::Streams => "prefetch-streams",
        }
    }

    /// Valid values: bytes, or a number of streams.
    pub const fn range(self) -> RangeInclusive<u64> {
        match self {
            Self::Memory => 256 << 10..=1 << 40,
            // No export accepts requests above 32 MiB.
            Self::LargestRequest => 512..=32 << 20,
            // A chunk cannot be larger.
            Self::WindowMin => 4 << 10..=CHUNK_MAX_BYTES,
            Self::WindowMax => 4 << 10..=64 << 20,
            Self::Streams => 1..=4096,
        }
    }
}

/// Settings of a disk's prefetch cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PrefetchConfig {
    /// Mode of read-ahead.
    pub mode: PrefetchMode,
    /// Maximum data in memory or in flight, in bytes. Default 4 MiB; 256 KiB to 1 TiB.
    pub memory_bytes: u64,
    /// Size above which requests are ignored, in bytes. Default 64 KiB; 512 B to 32 MiB.
    pub largest_request_bytes: u64,
    /// Initial window of a stream, in bytes. Default 128 KiB; 4 KiB to 1 MiB. Reduced if memory is
    /// short.
    pub window_min_bytes: u64,
    /// Maximum window of a stream, in bytes. Default 2 MiB; `window_min_bytes` to 64 MiB, and at
    /// most half the memory.
    pub window_max_bytes: u64,
    /// Maximum number of concurrent streams. Default 256; 1 to 4096.
    pub streams: u32,
}

impl Default for PrefetchConfig {
    fn default() -> Self {
        Self {
            mode: PrefetchMode::Auto,
            memory_bytes: 4 << 20,
            largest_request_bytes: 64 << 10,
            window_min_bytes: 128 << 10,
            window_max_bytes: 2 << 20,
            streams: 256,
        }
    }
}

/// Reason why settings are invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum InvalidPrefetchSettings {
    /// A value is outside of [`PrefetchSetting::range`].
    OutOfRange {
        /// The setting.
        setting: PrefetchSetting,
        /// Its value.
        value: u64,
    },
    /// The minimum window exceeds the maximum.
    WindowsCross {
        /// [`PrefetchConfig::window_min_bytes`].
        min: u64,
        /// [`PrefetchConfig::window_max_bytes`].
        max: u64,
    },
}

impl fmt::Display for InvalidPrefetchSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::OutOfRange { setting, value } => {
                let (name, range) = (setting.name(), setting.range());
                write!(
                    f,
                    "{name} ({value}) is out of range; it may be from {} to {}",
                    range.start(),
                    range.end()
                )
            }
            Self::WindowsCross { min, max } => write!(
                f,
                "{} ({min}) is above {} ({max}); the smallest window may not be larger than the largest",
                PrefetchSetting::WindowMin.name(),
                PrefetchSetting::WindowMax.name()
            ),
        }
    }
}

impl core::error::Error for InvalidPrefetchSettings {}

impl PrefetchConfig {
    /// The defaults with read-ahead off.
    pub fn off() -> Self {
        Self { mode: PrefetchMode::Off, ..Self::default() }
    }

    /// Value of one setting.
    pub fn get(&self, setting: PrefetchSetting) -> u64 {
        match setting {
            PrefetchSetting::Memory => self.memory_bytes,
            PrefetchSetting::LargestRequest => self.largest_request_bytes,
            PrefetchSetting::WindowMin => self.window_min_bytes,
            PrefetchSetting::WindowMax => self.window_max_bytes,
            PrefetchSetting::Streams => self.streams.into(),
        }
    }

    /// Changes one setting without validation; see [`PrefetchConfig::validate`].
    pub fn set(&mut self, setting: PrefetchSetting, value: u64) {
        match setting {
            PrefetchSetting::Memory => self.memory_bytes = value,
            PrefetchSetting::LargestRequest => self.largest_request_bytes = value,
            PrefetchSetting::WindowMin => self.window_min_bytes = value,
            PrefetchSetting::WindowMax => self.window_max_bytes = value,
            PrefetchSetting::Streams => self.streams = u32::try_from(value).unwrap_or(u32::MAX),
        }
    }

    /// Validates the settings.
    ///
    /// # Errors
    /// [`InvalidPrefetchSettings`] for the first error found.
    pub fn validate(&self) -> Result<(), InvalidPrefetchSettings> {
        for setting in PrefetchSetting::ALL {
            let value = self.get(setting);
            if !setting.range().contains(&value) {
                return Err(InvalidPrefetchSettings::OutOfRange { setting, value });
            }
        }
        let (min, max) = (self.window_min_bytes, self.window_max_bytes);
        if min > max { Err(InvalidPrefetchSettings::WindowsCross { min, max }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn errors_name_setting_and_range() {
        let with = |setting, value| {
            let mut settings = PrefetchConfig::default();
            settings.set(setting, value);
            settings.validate().map_err(|invalid| invalid.to_string())
        };
        assert_eq!(with(PrefetchSetting::Memory, 1 << 30), Ok(()));
        let expect = "prefetch-memory (4096) is out of range; it may be from 262144 to 1099511627776";
        assert_eq!(with(PrefetchSetting::Memory, 4096).unwrap_err(), expect);
        let expect = "prefetch-streams (0) is out of range; it may be from 1 to 4096";
        assert_eq!(with(PrefetchSetting::Streams, 0).unwrap_err(), expect);
        assert!(with(PrefetchSetting::Streams, 1 << 40).is_err());
        let expect = "prefetch-window-min (131072) is above prefetch-window-max (65536); the \
                      smallest window may not be larger than the largest";
        assert_eq!(with(PrefetchSetting::WindowMax, 64 << 10).unwrap_err(), expect);
    }

    #[test]
    fn defaults_are_valid_and_modes_round_trip() {
        assert_eq!(PrefetchConfig::default().validate(), Ok(()));
        assert_eq!(PrefetchConfig::off().validate(), Ok(()));
        for mode in PrefetchMode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("yes".parse::<PrefetchMode>().is_err());
    }
}
