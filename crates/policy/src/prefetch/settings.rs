//! The settings of a disk's prefetch cache, as values. Names, meanings and defaults are those of
//! pcache (proposed for QEMU, KVM Forum 2016) where it had them.

use core::fmt;
use core::ops::RangeInclusive;
use core::str::FromStr;

use super::ahead::CHUNK_MAX_BYTES;

/// Whether to read ahead.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Never.
    Off,
    /// Whatever looks sequential, also where that has not paid.
    On,
    /// Where it pays: not of images that are in memory already or that others may write to.
    #[default]
    Auto,
}

impl Mode {
    /// Every mode.
    pub const ALL: [Self; 3] = [Self::Off, Self::On, Self::Auto];

    /// As it is written.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Auto => "auto",
        }
    }
}

impl fmt::Display for Mode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// No [`Mode`] has that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownMode;

impl fmt::Display for UnknownMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("is none of on, off and auto")
    }
}

impl core::error::Error for UnknownMode {}

impl FromStr for Mode {
    type Err = UnknownMode;

    fn from_str(text: &str) -> Result<Self, UnknownMode> {
        Self::ALL.into_iter().find(|mode| mode.name() == text).ok_or(UnknownMode)
    }
}

/// A setting that is a number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Setting {
    /// [`Settings::memory_bytes`].
    Memory,
    /// [`Settings::largest_request_bytes`].
    LargestRequest,
    /// [`Settings::window_min_bytes`].
    WindowMin,
    /// [`Settings::window_max_bytes`].
    WindowMax,
    /// [`Settings::streams`].
    Streams,
}

impl Setting {
    /// Every one.
    pub const ALL: [Self; 5] =
        [Self::Memory, Self::LargestRequest, Self::WindowMin, Self::WindowMax, Self::Streams];

    /// As users write it.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Memory => "prefetch-memory",
            Self::LargestRequest => "prefetch-largest-request",
            Self::WindowMin => "prefetch-window-min",
            Self::WindowMax => "prefetch-window-max",
            Self::Streams => "prefetch-streams",
        }
    }

    /// Values it may have: bytes, or streams.
    pub const fn range(self) -> RangeInclusive<u64> {
        match self {
            Self::Memory => 256 << 10..=1 << 40,
            // Larger ones than 32 MiB reach no export.
            Self::LargestRequest => 512..=32 << 20,
            // What is read at a time is never more.
            Self::WindowMin => 4 << 10..=CHUNK_MAX_BYTES,
            Self::WindowMax => 4 << 10..=64 << 20,
            Self::Streams => 1..=4096,
        }
    }
}

/// A disk's settings.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Whether to read ahead.
    pub mode: Mode,
    /// Bytes of data, read ahead or on its way, at most. 4 MiB unless set, from 256 KiB to 1 TiB.
    pub memory_bytes: u64,
    /// Larger requests are not looked at. 64 KiB unless set, from 512 B to 32 MiB.
    pub largest_request_bytes: u64,
    /// Bytes read ahead of a stream at first. 128 KiB unless set, from 4 KiB to 1 MiB; less where
    /// memory is short.
    pub window_min_bytes: u64,
    /// Most bytes read ahead of a stream. 2 MiB unless set, from `window_min_bytes` to 64 MiB, and
    /// at most half the memory.
    pub window_max_bytes: u64,
    /// Most streams that are read ahead of at a time. 256 unless set, from 1 to 4096.
    pub streams: u32,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            mode: Mode::Auto,
            memory_bytes: 4 << 20,
            largest_request_bytes: 64 << 10,
            window_min_bytes: 128 << 10,
            window_max_bytes: 2 << 20,
            streams: 256,
        }
    }
}

/// Why settings cannot be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Invalid {
    /// A value outside [`Setting::range`].
    OutOfRange {
        /// Of which setting.
        setting: Setting,
        /// The value.
        value: u64,
    },
    /// The smallest window above the largest.
    WindowsCross {
        /// [`Settings::window_min_bytes`].
        min: u64,
        /// [`Settings::window_max_bytes`].
        max: u64,
    },
}

impl fmt::Display for Invalid {
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
                Setting::WindowMin.name(),
                Setting::WindowMax.name()
            ),
        }
    }
}

impl core::error::Error for Invalid {}

impl Settings {
    /// The defaults, with nothing read ahead.
    pub fn off() -> Self {
        Self { mode: Mode::Off, ..Self::default() }
    }

    /// The value of one of them.
    pub fn get(&self, setting: Setting) -> u64 {
        match setting {
            Setting::Memory => self.memory_bytes,
            Setting::LargestRequest => self.largest_request_bytes,
            Setting::WindowMin => self.window_min_bytes,
            Setting::WindowMax => self.window_max_bytes,
            Setting::Streams => self.streams.into(),
        }
    }

    /// Changes the value of one of them; [`Settings::check`] says whether it may be.
    pub fn set(&mut self, setting: Setting, value: u64) {
        match setting {
            Setting::Memory => self.memory_bytes = value,
            Setting::LargestRequest => self.largest_request_bytes = value,
            Setting::WindowMin => self.window_min_bytes = value,
            Setting::WindowMax => self.window_max_bytes = value,
            Setting::Streams => self.streams = u32::try_from(value).unwrap_or(u32::MAX),
        }
    }

    /// Whether they can be put in force.
    ///
    /// # Errors
    /// [`Invalid`], the first that is wrong.
    pub fn check(&self) -> Result<(), Invalid> {
        for setting in Setting::ALL {
            let value = self.get(setting);
            if !setting.range().contains(&value) {
                return Err(Invalid::OutOfRange { setting, value });
            }
        }
        let (min, max) = (self.window_min_bytes, self.window_max_bytes);
        if min > max { Err(Invalid::WindowsCross { min, max }) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn what_is_wrong_is_named_with_its_range() {
        let with = |setting, value| {
            let mut settings = Settings::default();
            settings.set(setting, value);
            settings.check().map_err(|invalid| invalid.to_string())
        };
        assert_eq!(with(Setting::Memory, 1 << 30), Ok(()));
        let expect = "prefetch-memory (4096) is out of range; it may be from 262144 to 1099511627776";
        assert_eq!(with(Setting::Memory, 4096).unwrap_err(), expect);
        let expect = "prefetch-streams (0) is out of range; it may be from 1 to 4096";
        assert_eq!(with(Setting::Streams, 0).unwrap_err(), expect);
        assert!(with(Setting::Streams, 1 << 40).is_err());
        let expect = "prefetch-window-min (131072) is above prefetch-window-max (65536); the smallest window may not be larger than the largest";
        assert_eq!(with(Setting::WindowMax, 64 << 10).unwrap_err(), expect);
    }

    #[test]
    fn the_defaults_are_valid_and_a_mode_is_what_it_is_called() {
        assert_eq!(Settings::default().check(), Ok(()));
        assert_eq!(Settings::off().check(), Ok(()));
        for mode in Mode::ALL {
            assert_eq!(mode.to_string().parse(), Ok(mode));
        }
        assert!("yes".parse::<Mode>().is_err());
    }
}
