//! `--fuse FILE[,growable,…]`: a disk as a file, mounted over an existing file. The config file has
//! the same keys, and `file`.

use std::{fmt, path::PathBuf, str::FromStr, sync::LazyLock};

use super::reject_comma;
use crate::{
    key::{
        ConfigKey, ConfigValue as _, KeyField, KeyLiteral,
        KeyType::{Flag, Path, Word},
        one, table,
    },
    option_syntax::{AddressedConfig, read_options, write_options},
    origins::KeyTable,
};

/// FUSE export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FuseConfig {
    /// Regular file that is covered by the mount.
    pub file: PathBuf,
    /// True if writes past the end and `truncate` grow the disk.
    pub growable: bool,
    /// Access of other users, subject to the file's mode; `None` enables it if the host permits.
    pub allow_other: Option<bool>,
    /// True if the export rejects writes to a writable disk.
    pub read_only: bool,
}

impl FuseConfig {
    /// Export over this file, with defaults.
    pub fn new(file: PathBuf) -> Self {
        Self { file, growable: false, allow_other: None, read_only: false }
    }
}

impl KeyTable for FuseConfig {
    const REMOVED: &'static [(&'static str, &'static str)] =
        &[("io-uring", "was removed in weir 0.2.0; requests are read from /dev/fuse (remove the key)")];

    fn keys() -> &'static [ConfigKey<Self>] {
        static KEYS: LazyLock<Vec<ConfigKey<FuseConfig>>> = LazyLock::new(keys);
        &KEYS
    }
}

impl AddressedConfig for FuseConfig {
    const ADDRESS: &'static str = "file";
    const MISSING_ADDRESS: Option<&'static str> = Some("no file (add file = \"PATH\")");
}

type Config = FuseConfig;

// Names all fields, so that a new field is a compile error here. It needs a row in the table below,
// which the compiler does not check.
const _: fn(FuseConfig) = |FuseConfig { file: _, growable: _, allow_other: _, read_only: _ }| ();

/// The table of keys.
fn keys() -> Vec<ConfigKey<FuseConfig>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "fuse" {
            "file", Path, "FILE", file_field(), "required", Reexport, Separate,
                "Regular file in whose place the disk appears";
            "allow-other", Word(&["auto", "on", "off"]), "MODE", allow_other(), "auto", Reexport, Separate,
                "Allow users other than the daemon's to open the file, as its mode permits; auto: \
                 if the host allows it";
            "growable", Flag, "", one!(growable), "false", Reexport, Separate,
                "Allow writes past the end, and truncate, to grow the disk";
            "read-only", Flag, "", one!(read_only), "false", Reexport, Separate,
                "Reject writes, even if the disk accepts them";
        }
    }
}

fn file_field() -> KeyField<FuseConfig> {
    KeyField::new(
        |fuse: &mut FuseConfig, given| {
            fuse.file = given.directory.join(parse_file(reject_comma(given.text)?)?);
            Ok(())
        },
        |fuse| Some(fuse.file.write()),
    )
}

fn allow_other() -> KeyField<FuseConfig> {
    KeyField::new(
        |fuse: &mut FuseConfig, given| {
            fuse.allow_other = match given.text {
                "auto" => None,
                "on" => Some(true),
                "off" => Some(false),
                _ => return Err("is neither on, off nor auto".to_owned()),
            };
            Ok(())
        },
        |fuse| {
            let keyword = fuse.allow_other.map_or("auto", |on| if on { "on" } else { "off" });
            Some(KeyLiteral::Text(keyword.to_owned()))
        },
    )
}

impl Default for FuseConfig {
    /// Export without a file.
    fn default() -> Self {
        Self::new(PathBuf::new())
    }
}

impl FromStr for FuseConfig {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut fuse = Self::new(parse_file(parts.next().unwrap_or_default())?);
        read_options(&mut fuse, parts)?;
        Ok(fuse)
    }
}

/// Parses the file of an export.
fn parse_file(text: &str) -> Result<PathBuf, String> {
    match text {
        "" => Err("is empty (write an existing file)".to_owned()),
        _ if text.contains('\0') => Err("has a NUL byte (remove it)".to_owned()),
        path => Ok(PathBuf::from(path)),
    }
}

/// Writes the text that parses as the same value.
impl fmt::Display for FuseConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        write_options(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_round_trip() {
        for text in ["disk.raw", "/run/vm1.raw,allow-other=off,growable=on,read-only=on"] {
            assert_eq!(text.parse::<FuseConfig>().unwrap().to_string(), text);
        }
        let fuse: FuseConfig = "a,allow-other=auto,growable".parse().unwrap();
        assert!(fuse.growable && fuse.allow_other.is_none());
        let fuse: FuseConfig = "a,allow-other=false,growable=true".parse().unwrap();
        assert!(fuse.growable && fuse.allow_other == Some(false));
    }

    #[test]
    fn invalid_options_name_their_rule() {
        for (text, wrong) in [
            ("", "is empty (write an existing file)"),
            (",growable", "is empty (write an existing file)"),
            ("a,allow-other=root", "allow-other=root: is neither on, off nor auto"),
            (
                "a,io-uring=on",
                "io-uring=on: was removed in weir 0.2.0; requests are read from /dev/fuse (remove the key)",
            ),
            ("a,grow", "grow: no such key (there are allow-other, growable and read-only)"),
        ] {
            assert_eq!(text.parse::<FuseConfig>().unwrap_err(), wrong);
        }
    }
}
