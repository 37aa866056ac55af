//! What a qcow2 image is opened with: the sizes of its metadata caches, and where its passphrases
//! are. The caches' names, defaults and rules are QEMU's (docs/qcow2-cache.txt); what they come to
//! depends on the image. Passphrases are read when the daemon starts: a plan can be printed.

use std::{fmt, path::PathBuf, str::FromStr};

use image::qcow2::{CacheSettings, L2Size};
use policy::time::Duration;

use super::{Place, Said, Wrong, size};

const FULL: &str = "full";

/// The caches and passphrases of a disk, as they were described.
#[derive(Clone, Debug, Default)]
pub struct Qcow2Draft {
    pub l2_cache_size: Option<Said<L2CacheSize>>,
    pub l2_cache_entry_size: Option<Said<u64>>,
    pub refcount_cache_size: Option<Said<u64>>,
    pub cache_size: Option<Said<u64>>,
    pub cache_clean_interval: Option<Said<CleanInterval>>,
    pub secrets: Vec<Said<SecretSource>>,
    pub bitmaps: Vec<Said<String>>,
}

/// The same, once it is known to make sense.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Qcow2Settings {
    /// Of the caches.
    pub caches: CacheSettings,
    /// One for each encrypted image of the chain, or one for all.
    pub secrets: Vec<SecretSource>,
    /// Names of those that clients may look at.
    pub bitmaps: Vec<String>,
    /// The first of all that was said, which has no effect on a raw image.
    pub said: Option<Place>,
}

/// `l2-cache-size`: bytes, or enough for the whole disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct L2CacheSize(pub L2Size);

impl FromStr for L2CacheSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if text == FULL {
            return Ok(Self(L2Size::Full));
        }
        size(text)
            .map(|bytes| Self(L2Size::Bytes(bytes)))
            .map_err(|rule| format!("{rule}; or \"full\", for the whole disk"))
    }
}

/// `cache-clean-interval`: seconds, as QEMU has it, or a time with its unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CleanInterval(pub Duration);

impl FromStr for CleanInterval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Ok(seconds) = text.parse::<u32>() {
            return Ok(Self(Duration::from_secs(seconds.into())));
        }
        let time = super::duration(text).map_err(|rule| format!("{rule}; a plain number is seconds"))?;
        Ok(Self(time))
    }
}

/// Where a passphrase is.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub enum SecretSource {
    /// It is all of this file.
    File(PathBuf),
    /// It is what can be read from this descriptor.
    Descriptor(u32),
}

impl fmt::Display for SecretSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::File(path) => write!(f, "{}", path.display()),
            Self::Descriptor(number) => write!(f, "descriptor {number}"),
        }
    }
}

impl Qcow2Draft {
    /// The settings, where they do not contradict each other.
    ///
    /// # Errors
    /// If all three sizes are given.
    pub fn check(&self) -> Result<Qcow2Settings, Wrong> {
        let both = self.l2_cache_size.is_some() && self.refcount_cache_size.is_some();
        if let (Some(total), true) = (&self.cache_size, both) {
            return Err(total.wrong(
                "cache-size, l2-cache-size and refcount-cache-size may not be set together (leave one out)",
            ));
        }
        let bytes = |said: &Option<Said<u64>>| said.as_ref().map(|said| said.value);
        let mut caches = CacheSettings {
            l2: self.l2_cache_size.as_ref().map(|said| said.value.0),
            entry_bytes: bytes(&self.l2_cache_entry_size),
            refcount_bytes: bytes(&self.refcount_cache_size),
            total_bytes: bytes(&self.cache_size),
            ..CacheSettings::default()
        };
        if let Some(said) = &self.cache_clean_interval {
            caches.clean_interval = said.value.0;
        }
        Ok(Qcow2Settings {
            caches,
            secrets: self.secrets.iter().map(|said| said.value.clone()).collect(),
            bitmaps: self.bitmaps.iter().map(|said| said.value.clone()).collect(),
            said: self.first_said(),
        })
    }

    fn first_said(&self) -> Option<Place> {
        fn place<T>(said: Option<&Said<T>>) -> Option<&Place> {
            said.map(|said| &said.place)
        }
        let sizes = [&self.l2_cache_entry_size, &self.refcount_cache_size, &self.cache_size];
        place(self.l2_cache_size.as_ref())
            .or_else(|| sizes.into_iter().find_map(|said| place(said.as_ref())))
            .or_else(|| place(self.cache_clean_interval.as_ref()))
            .or_else(|| place(self.secrets.first()))
            .or_else(|| place(self.bitmaps.first()))
            .cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said<T>(value: T) -> Option<Said<T>> {
        Some(Said::new(value, Place::new("--cache-size 1M")))
    }

    #[test]
    fn sizes_may_be_full() {
        assert_eq!("full".parse(), Ok(L2CacheSize(L2Size::Full)));
        assert_eq!("2M".parse(), Ok(L2CacheSize(L2Size::Bytes(2 << 20))));
        assert!("half".parse::<L2CacheSize>().unwrap_err().ends_with("or \"full\", for the whole disk"));
    }

    #[test]
    fn intervals_are_seconds() {
        assert_eq!("600".parse(), Ok(CleanInterval(Duration::from_secs(600))));
        assert_eq!("1500ms".parse(), Ok(CleanInterval(Duration::from_millis(1500))));
        assert_eq!("0".parse(), Ok(CleanInterval(Duration::ZERO)));
        assert!("soon".parse::<CleanInterval>().is_err());
    }

    #[test]
    fn two_sizes_are_enough() {
        let two =
            Qcow2Draft { cache_size: said(1 << 20), refcount_cache_size: said(1), ..Qcow2Draft::default() };
        assert_eq!(two.check().unwrap().caches.total_bytes, Some(1 << 20));
        let three = Qcow2Draft { l2_cache_size: said(L2CacheSize(L2Size::Full)), ..two };
        let wrong = three.check().unwrap_err().to_string();
        assert!(wrong.starts_with("--cache-size 1M: cache-size, l2-cache-size and refcount"), "{wrong}");
        assert_eq!(Qcow2Draft::default().check().unwrap(), Qcow2Settings::default());
    }
}
