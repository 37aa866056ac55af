//! `--fuse FILE[,growable,…]`: a disk as a file, mounted over an existing file. The config file has
//! the same keys, and `file`.

use std::{fmt, path::PathBuf, str::FromStr, sync::LazyLock};

use super::no_comma;
use crate::{
    addressed::{AddressedKeys, read_options, write_options},
    key::{
        Field, Key, KeyValue as _, Literal,
        ValueKind::{Flag, Path, Word},
        one, table,
    },
    placed::KeySet,
};

/// FUSE export.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fuse {
    /// Regular file that is covered by the mount.
    pub file: PathBuf,
    /// True if writes past the end and `truncate` grow the disk.
    pub growable: bool,
    /// Access of other users, subject to the file's mode; `None` enables it if the host permits.
    pub allow_other: Option<bool>,
    /// True if the export rejects writes to a writable disk.
    pub read_only: bool,
}

impl Fuse {
    /// Export over this file, with defaults.
    pub fn at(file: PathBuf) -> Self {
        Self { file, growable: false, allow_other: None, read_only: false }
    }
}

impl KeySet for Fuse {
    const REMOVED: &'static [(&'static str, &'static str)] =
        &[("io-uring", "was removed in weir 0.2.0; requests are read from /dev/fuse (remove the key)")];

    fn keys() -> &'static [Key<Self>] {
        static KEYS: LazyLock<Vec<Key<Fuse>>> = LazyLock::new(keys);
        &KEYS
    }
}

impl AddressedKeys for Fuse {
    const ADDRESS: &'static str = "file";
    const MISSING: Option<&'static str> = Some("no file (add file = \"PATH\")");
}

type Config = Fuse;

// A new field does not compile until it is named here, together with its row in the table below.
const _: fn(Fuse) = |Fuse { file: _, growable: _, allow_other: _, read_only: _ }| ();

/// The table.
fn keys() -> Vec<Key<Fuse>> {
    table! {
        // name, value, placeholder, field, default, change, transfer, help
        "fuse" {
            "file", Path, "FILE", file_field(), "required", Reexport, Apart,
                "Regular file that the disk is seen in place of";
            "allow-other", Word(&["auto", "on", "off"]), "MODE", allow_other(), "auto", Reexport, Apart,
                "Let other users than that of the daemon open the file, as its mode permits; auto: if the host allows it";
            "growable", Flag, "", one!(growable), "false", Reexport, Apart,
                "Let writes past the end and truncate make the disk larger";
            "read-only", Flag, "", one!(read_only), "false", Reexport, Apart,
                "Refuse writes, also where the disk accepts them";
        }
    }
}

fn file_field() -> Field<Fuse> {
    Field::new(
        |fuse: &mut Fuse, given| {
            fuse.file = given.directory.join(file(no_comma(given.text)?)?);
            Ok(())
        },
        |fuse| Some(fuse.file.write()),
    )
}

fn allow_other() -> Field<Fuse> {
    Field::new(
        |fuse: &mut Fuse, given| {
            fuse.allow_other = match given.text {
                "auto" => None,
                "on" => Some(true),
                "off" => Some(false),
                _ => return Err("is neither on, off nor auto".to_owned()),
            };
            Ok(())
        },
        |fuse| {
            let word = fuse.allow_other.map_or("auto", |on| if on { "on" } else { "off" });
            Some(Literal::Text(word.to_owned()))
        },
    )
}

impl Default for Fuse {
    /// Export without a file.
    fn default() -> Self {
        Self::at(PathBuf::new())
    }
}

impl FromStr for Fuse {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut fuse = Self::at(file(parts.next().unwrap_or_default())?);
        read_options(&mut fuse, parts)?;
        Ok(fuse)
    }
}

/// Parses the file of an export.
fn file(text: &str) -> Result<PathBuf, String> {
    match text {
        "" => Err("names no file (write one that is there)".to_owned()),
        _ if text.contains('\0') => Err("holds a NUL byte (leave it out)".to_owned()),
        path => Ok(PathBuf::from(path)),
    }
}

/// Writes the text that parses as the same value.
impl fmt::Display for Fuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        write_options(self, f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_said_again() {
        for text in ["disk.raw", "/run/vm1.raw,allow-other=off,growable=on,read-only=on"] {
            assert_eq!(text.parse::<Fuse>().unwrap().to_string(), text);
        }
        let fuse: Fuse = "a,allow-other=auto,growable".parse().unwrap();
        assert!(fuse.growable && fuse.allow_other.is_none());
        let fuse: Fuse = "a,allow-other=false,growable=true".parse().unwrap();
        assert!(fuse.growable && fuse.allow_other == Some(false));
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (text, wrong) in [
            ("", "names no file (write one that is there)"),
            (",growable", "names no file (write one that is there)"),
            ("a,allow-other=root", "allow-other=root: is neither on, off nor auto"),
            (
                "a,io-uring=on",
                "io-uring=on: was removed in weir 0.2.0; requests are read from /dev/fuse (remove the key)",
            ),
            ("a,grow", "grow: no such key (there are allow-other, growable and read-only)"),
        ] {
            assert_eq!(text.parse::<Fuse>().unwrap_err(), wrong);
        }
    }
}
