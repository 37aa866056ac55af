//! `--record DIR[,keep=TIME,limit=SIZE]`: all that disks are asked is kept for a while. The config
//! file has the same keys, and `directory`.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use crate::doors::{Keyed, read_keys, write_keys};

/// What is kept of what disks are asked.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Record {
    /// Where the files lie.
    pub directory: PathBuf,
    /// How long.
    pub keep: Duration,
    /// Bytes of all of them.
    pub limit: u64,
}

/// A file has an hour.
const LEAST_KEEP: Duration = Duration::from_secs(3600);
/// Some files, each of several blocks.
const LEAST_LIMIT: u64 = 16 << 20;

impl Record {
    /// There, with nothing else said.
    pub fn at(directory: PathBuf) -> Self {
        Self { directory, keep: Duration::from_secs(24 * 3600), limit: 1 << 30 }
    }
}

impl Keyed for Record {
    const VALUES: &'static [&'static str] = &["keep", "limit"];

    fn set(&mut self, key: &str, value: &str) -> Result<(), String> {
        match key {
            "keep" => match crate::long_duration(value)? {
                keep if keep < LEAST_KEEP => return Err("is too short; it is at least 1h".to_owned()),
                keep => self.keep = keep,
            },
            _ => match crate::size(value)? {
                limit if limit < LEAST_LIMIT => return Err("is too little; it is at least 16M".to_owned()),
                limit => self.limit = limit,
            },
        }
        Ok(())
    }

    fn flags(&mut self) -> Vec<(&'static str, &mut bool)> {
        Vec::new()
    }

    fn said(&self) -> Vec<(&'static str, String)> {
        let standard = Self::at(PathBuf::new());
        let keep = (self.keep != standard.keep).then(|| ("keep", format!("{}s", self.keep.as_secs())));
        let limit = (self.limit != standard.limit).then(|| ("limit", crate::exact_size(self.limit)));
        keep.into_iter().chain(limit).collect()
    }
}

impl FromStr for Record {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut parts = text.split(',');
        let mut record = Self::at(directory(parts.next().unwrap_or_default())?);
        read_keys(&mut record, parts)?;
        Ok(record)
    }
}

/// Where files may lie.
pub(crate) fn directory(text: &str) -> Result<PathBuf, String> {
    match text {
        "" => Err("names no directory (write one that is there)".to_owned()),
        _ if text.contains('\0') => Err("holds a NUL byte (leave it out)".to_owned()),
        path => Ok(PathBuf::from(path)),
    }
}

/// As it may be given again.
impl fmt::Display for Record {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.directory.display())?;
        write_keys(self, &Self::at(self.directory.clone()), f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_said_is_read_and_said_again() {
        for text in ["/var/lib/weir/day", "day,keep=7200s,limit=64M"] {
            assert_eq!(text.parse::<Record>().unwrap().to_string(), text);
        }
        assert_eq!("day,keep=2h".parse::<Record>().unwrap().keep, Duration::from_secs(7200));
    }

    #[test]
    fn what_cannot_be_is_named() {
        for (text, wrong) in [
            ("", "names no directory (write one that is there)"),
            ("day,keep=10m", "keep=10m: is too short; it is at least 1h"),
            ("day,limit=1M", "limit=1M: is too little; it is at least 16M"),
            ("day,hours=2", "hours=2: no such key (there are keep and limit)"),
        ] {
            assert_eq!(text.parse::<Record>().unwrap_err(), wrong);
        }
    }
}
