//! `--fuse FILE[,growable,…]`: a disk as a file, over one that is there. The config file has the
//! same keys, and `file`.

use std::{fmt, path::PathBuf, str::FromStr};

use super::{Keyed, read_keys, switch, write_keys};

/// An export as a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fuse {
    /// The regular file that the disk is seen in place of.
    pub file: PathBuf,
    /// Writing past the end and `truncate` make the disk larger.
    pub growable: bool,
    /// Who else than the user who serves it may open it, as the file's mode says; `None`: where
    /// the host lets weir say so.
    pub allow_other: Option<bool>,
    /// Refuses writes though the disk takes them.
    pub read_only: bool,
}

impl Fuse {
    /// Over this file, with nothing else said.
    pub fn at(file: PathBuf) -> Self {
        Self { file, growable: false, allow_other: None, read_only: false }
    }
}

impl Keyed for Fuse {
    const VALUES: &'static [&'static str] = &["allow-other"];
    const REMOVED: &'static [(&'static str, &'static str)] =
        &[("io-uring", "was removed in weir 0.2.0; requests are read from /dev/fuse (remove the key)")];

    fn set(&mut self, _: &str, value: &str) -> Result<(), String> {
        self.allow_other = match value {
            "auto" => None,
            _ => Some(switch(value).map_err(|_| "is neither on, off nor auto")?),
        };
        Ok(())
    }

    fn flags(&mut self) -> Vec<(&'static str, &mut bool)> {
        vec![("growable", &mut self.growable), ("read-only", &mut self.read_only)]
    }

    fn said(&self) -> Vec<(&'static str, String)> {
        let word = |on: bool| if on { "on" } else { "off" };
        self.allow_other.map(|on| ("allow-other", word(on).to_owned())).into_iter().collect()
    }
}

impl FromStr for Fuse {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut fuse = Self::at(file(parts.next().unwrap_or_default())?);
        read_keys(&mut fuse, parts)?;
        Ok(fuse)
    }
}

/// The file of an export.
pub(crate) fn file(text: &str) -> Result<PathBuf, String> {
    match text {
        "" => Err("names no file (write one that is there)".to_owned()),
        _ if text.contains('\0') => Err("holds a NUL byte (leave it out)".to_owned()),
        path => Ok(PathBuf::from(path)),
    }
}

/// As it may be given again.
impl fmt::Display for Fuse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file.display())?;
        write_keys(self, &Self::at(self.file.clone()), f)
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
