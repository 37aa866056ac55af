//! File systems that a volume may have: their names, how small they may be, and the programs that
//! make them.
//!
//! Never looks into one: what an image holds is known by its volume's options.

use std::{path::Path, process::Command};

use anyhow::Context as _;

use crate::program;

/// What a volume may be formatted with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum FileSystem {
    #[default]
    Ext4,
    Xfs,
    Btrfs,
}

impl FileSystem {
    const ALL: [Self; 3] = [Self::Ext4, Self::Xfs, Self::Btrfs];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    pub(crate) fn named(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|known| known.name() == name);
        found.ok_or_else(|| "is none of ext4, xfs and btrfs".to_owned())
    }

    /// Debian's package with the program that makes it.
    fn package(self) -> &'static str {
        match self {
            Self::Ext4 => "e2fsprogs",
            Self::Xfs => "xfsprogs",
            Self::Btrfs => "btrfs-progs",
        }
    }

    /// Fails with the rule.
    pub(crate) fn check_size(self, bytes: u64) -> Result<(), String> {
        // Of ext4 a journal needs some; the others' programs refuse what is less (mkfs.xfs(8),
        // mkfs.btrfs(8)).
        let (least, text) = match self {
            Self::Ext4 => (4 << 20, "4M"),
            Self::Xfs => (300 << 20, "300M"),
            Self::Btrfs => (114 << 20, "114M"),
        };
        // The largest file of an ext4 with blocks of 4 KiB, where the image may lie.
        const MOST: u64 = 16 << 40;
        match bytes {
            bytes if bytes < least => Err(format!("is too small; {} needs {text} at least", self.name())),
            bytes if bytes >= MOST => Err("is too large; a volume is below 16T".to_owned()),
            _ => Ok(()),
        }
    }

    /// Makes one in a file, as large as that.
    pub(crate) fn make(self, file: &Path) -> anyhow::Result<()> {
        let name = format!("mkfs.{}", self.name());
        let mut command = Command::new(&name);
        // Quiet, and though it is a file. Services may run without the administrator's PATH.
        command.args(match self {
            Self::Ext4 => &["-q", "-F"][..],
            Self::Xfs | Self::Btrfs => &["-q", "-f"],
        });
        command.arg(file).env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        program::run(&mut command, program::SOON)
            .with_context(|| format!("the file system cannot be made ({name} is in {})", self.package()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_bounds() {
        for known in FileSystem::ALL {
            assert!(known.check_size(1 << 30).is_ok());
            assert!(known.check_size(1 << 20).unwrap_err().starts_with("is too small; "));
            assert_eq!(known.check_size(u64::MAX).unwrap_err(), "is too large; a volume is below 16T");
            assert_eq!(FileSystem::named(known.name()), Ok(known));
        }
    }
}
