//! Mounts of a process: /proc/PID/mountinfo.
//!
//! ```text
//!   36 35 98:0 /mnt1 /mnt2 rw,noatime master:1 - ext3 /dev/root rw,errors=continue
//!         │    │     │     │          └ optional fields, any number up to the hyphen
//!         │    │     │     options    kind   source   super options
//!         │    root  point
//!         number
//! ```
//!
//! Blanks, tabs, newlines, backslashes and hashes in names are octal, `\040`; so are commas inside
//! values of super options, which are unescaped one by one ([`Mount::option`]). Source:
//! proc_pid_mountinfo(5).

use std::{
    ffi::OsString,
    os::unix::ffi::OsStringExt as _,
    path::{Path, PathBuf},
};

use block::device::DeviceNumber;

use super::{UnknownFormat, number};

const FILE: &str = "mountinfo";

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    /// Device number; major 0 if the file system has no device.
    pub(crate) number: DeviceNumber,
    /// Directory of the file system that is mounted, such as `/`.
    pub(crate) root: PathBuf,
    pub(crate) point: PathBuf,
    /// File system type, such as `ext4` or `fuse.sshfs`.
    pub(crate) kind: String,
    /// Source in a format that depends on the file system, such as `/dev/vda`.
    pub(crate) source: String,
    /// Mount options, such as `rw,noatime`.
    pub(crate) options: String,
    /// Options of the file system, such as `rw,lowerdir=/a:/b`, still escaped.
    pub(crate) super_options: String,
}

impl Mount {
    /// Value of an option of the file system; empty for an option without a value.
    pub(crate) fn option(&self, name: &str) -> Option<PathBuf> {
        self.super_options.split(',').find_map(|option| match option.split_once('=') {
            Some((key, value)) => (key == name).then(|| unescape(value)),
            None => (option == name).then(PathBuf::new),
        })
    }
}

/// Mounts in mounting order: a later mount hides earlier ones below its mount point.
pub(crate) fn parse(text: &str) -> Result<Vec<Mount>, UnknownFormat> {
    text.lines().map(|line| parse_line(line).ok_or_else(|| UnknownFormat::new(FILE, line))).collect()
}

/// The mount that contains a path, which must be absolute and without symbolic links.
pub(crate) fn mount_containing<'a>(
    mounts: impl IntoIterator<Item = &'a Mount>,
    path: &Path,
) -> Option<&'a Mount> {
    // Of two mounts on the same point the later one hides the earlier; `max_by_key` returns the
    // last.
    mounts
        .into_iter()
        .filter(|mount| path.starts_with(&mount.point))
        .max_by_key(|mount| mount.point.components().count())
}

fn parse_line(line: &str) -> Option<Mount> {
    // Split at single blanks: a source may be empty.
    let mut fields = line.split(' ');
    let number = number(fields.nth(2)?)?;
    let (root, point, options) = (fields.next()?, fields.next()?, fields.next()?);
    fields.find(|field| *field == "-")?;
    let (kind, source) = (fields.next()?, fields.next()?);
    // Some file systems write unescaped blanks into their options.
    let super_options = fields.collect::<Vec<_>>().join(" ");
    Some(Mount {
        number,
        root: unescape(root),
        point: unescape(point),
        kind: kind.to_owned(),
        source: unescape(source).to_string_lossy().into_owned(),
        options: options.to_owned(),
        super_options,
    })
}

/// Replaces octal escapes; a backslash without three octal digits remains.
fn unescape(text: &str) -> PathBuf {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        if first == b'\\'
            && let Some((byte, after)) = octal(after)
        {
            bytes.push(byte);
            rest = after;
        } else {
            bytes.push(first);
            rest = after;
        }
    }
    OsString::from_vec(bytes).into()
}

fn octal(text: &[u8]) -> Option<(u8, &[u8])> {
    let (digits, after) = text.split_at_checked(3)?;
    let value = digits.iter().try_fold(0_u32, |value, digit| {
        matches!(digit, b'0'..=b'7').then(|| value * 8 + u32::from(digit - b'0'))
    })?;
    Some((u8::try_from(value).ok()?, after))
}
