//! `--record DIR[,keep=TIME,limit=SIZE]`: recordings of all requests, kept for a limited time. The
//! config file has the same keys, and `directory`.

use std::{fmt, path::PathBuf, str::FromStr, sync::LazyLock, time::Duration};

use crate::{
    key::{
        ConfigKey, ConfigValue as _, KeyField, KeyLiteral,
        KeyType::{Path, Size, Text},
        table,
    },
    option_syntax::{AddressedConfig, read_options, write_options},
    origins::KeyTable,
};

/// Settings of the recordings.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecordingConfig {
    /// Directory of the files.
    pub directory: PathBuf,
    /// Age at which a recording is removed.
    pub keep: Duration,
    /// Maximum length of all files together, in bytes.
    pub limit: u64,
}

/// Minimum of `keep`: a file covers an hour.
const MIN_KEEP: Duration = Duration::from_secs(3600);
/// Minimum of `limit`: a few files, each of several blocks.
const MIN_LIMIT: u64 = 16 << 20;

impl RecordingConfig {
    /// Recordings in this directory, with defaults.
    pub fn new(directory: PathBuf) -> Self {
        Self { directory, keep: Duration::from_secs(24 * 3600), limit: 1 << 30 }
    }
}

impl KeyTable for RecordingConfig {
    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<RecordingConfig>>> = LazyLock::new(keys);
        &KEYS
    }
}

impl AddressedConfig for RecordingConfig {
    const ADDRESS: &'static str = "directory";
    const MISSING_ADDRESS: Option<&'static str> = Some("no directory (add directory = \"PATH\")");
}

// Names all fields, so that a new field is a compile error here. It needs a row in the table below,
// which the compiler does not check.
const _: fn(RecordingConfig) = |RecordingConfig { directory: _, keep: _, limit: _ }| ();

/// The table of keys.
fn keys() -> Vec<ConfigKey<RecordingConfig>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "record" {
            "directory", Path, "DIR", directory_field(), "required", Apply, Separate,
                "Directory of the recordings, which exists";
            "keep", Text, "TIME", keep(), "24h", Apply, Separate,
                "Remove recordings that ended longer ago; at least 1h";
            "limit", Size, "SIZE", limit(), "1G", Apply, Separate,
                "Bytes of all recordings at most; at least 16M";
        }
    }
}

fn directory_field() -> KeyField<RecordingConfig> {
    KeyField::new(
        |record: &mut RecordingConfig, given| {
            record.directory = given.directory.join(directory(given.text)?);
            Ok(())
        },
        |record| Some(record.directory.write()),
    )
}

fn keep() -> KeyField<RecordingConfig> {
    KeyField::new(
        |record: &mut RecordingConfig, given| match crate::long_duration(given.text)? {
            keep if keep < MIN_KEEP => Err("is too short; it must be at least 1h".to_owned()),
            keep => {
                record.keep = keep;
                Ok(())
            }
        },
        |record| Some(KeyLiteral::Text(format!("{}s", record.keep.as_secs()))),
    )
}

fn limit() -> KeyField<RecordingConfig> {
    KeyField::new(
        |record: &mut RecordingConfig, given| match given.number {
            limit if limit < MIN_LIMIT => Err("is too small; it must be at least 16M".to_owned()),
            limit => {
                record.limit = limit;
                Ok(())
            }
        },
        |record| Some(KeyLiteral::Text(crate::exact_size(record.limit))),
    )
}

impl Default for RecordingConfig {
    /// Recordings without a directory.
    fn default() -> Self {
        Self::new(PathBuf::new())
    }
}

impl FromStr for RecordingConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut record = Self::new(directory(parts.next().unwrap_or_default())?);
        read_options(&mut record, parts)?;
        Ok(record)
    }
}

/// Parses the directory.
fn directory(text: &str) -> Result<PathBuf, String> {
    match text {
        "" => Err("is empty (write an existing directory)".to_owned()),
        _ if text.contains('\0') => Err("has a NUL byte (remove it)".to_owned()),
        path => Ok(PathBuf::from(path)),
    }
}

/// Writes the text that parses as the same value.
impl fmt::Display for RecordingConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.directory.display())?;
        write_options(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_round_trip() {
        for text in ["/var/lib/weir/day", "day,keep=7200s,limit=64M"] {
            assert_eq!(text.parse::<RecordingConfig>().unwrap().to_string(), text);
        }
        assert_eq!("day,keep=2h".parse::<RecordingConfig>().unwrap().keep, Duration::from_secs(7200));
    }

    #[test]
    fn invalid_options_name_their_rule() {
        for (text, wrong) in [
            ("", "is empty (write an existing directory)"),
            ("day,keep=10m", "keep=10m: is too short; it must be at least 1h"),
            ("day,limit=1M", "limit=1M: is too small; it must be at least 16M"),
            ("day,hours=2", "hours=2: no such key (there are keep and limit)"),
        ] {
            assert_eq!(text.parse::<RecordingConfig>().unwrap_err(), wrong);
        }
    }
}
