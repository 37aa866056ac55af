//! File systems of volumes: names, minimum sizes, and the programs that create them.
//!
//! Never reads a file system: the volume's options state what its image has.

use std::{path::Path, process::Command};

use anyhow::Context as _;

use crate::child_process;

/// File system of a volume.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum VolumeFileSystem {
    #[default]
    Ext4,
    Xfs,
    Btrfs,
}

impl VolumeFileSystem {
    const ALL: [Self; 3] = [Self::Ext4, Self::Xfs, Self::Btrfs];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Ext4 => "ext4",
            Self::Xfs => "xfs",
            Self::Btrfs => "btrfs",
        }
    }

    pub(crate) fn from_name(name: &str) -> Result<Self, String> {
        let found = Self::ALL.into_iter().find(|known| known.name() == name);
        found.ok_or_else(|| "is not one of ext4, xfs and btrfs".to_owned())
    }

    /// Debian package of the program that creates it.
    fn package(self) -> &'static str {
        match self {
            Self::Ext4 => "e2fsprogs",
            Self::Xfs => "xfsprogs",
            Self::Btrfs => "btrfs-progs",
        }
    }

    /// Fails with the rule.
    pub(crate) fn check_size(self, bytes: u64) -> Result<(), String> {
        // ext4 needs space for a journal. The other minimum sizes are those of mkfs.xfs(8) and
        // mkfs.btrfs(8).
        let (min_bytes, text) = match self {
            Self::Ext4 => (4 << 20, "4M"),
            Self::Xfs => (300 << 20, "300M"),
            Self::Btrfs => (114 << 20, "114M"),
        };
        // The largest file on ext4 with blocks of 4 KiB, where the image may be stored.
        const MAX_FILE_BYTES: u64 = 16 << 40;
        match bytes {
            bytes if bytes < min_bytes => Err(format!("is too small; {} needs at least {text}", self.name())),
            // Not equal either: the image has metadata besides the data.
            bytes if bytes >= MAX_FILE_BYTES => {
                Err("is too large; a volume must be smaller than 16T".to_owned())
            }
            _ => Ok(()),
        }
    }

    /// Creates one in a file, with the file's size.
    pub(crate) fn create(self, file: &Path) -> anyhow::Result<()> {
        let name = format!("mkfs.{}", self.name());
        let mut command = Command::new(&name);
        // Quiet, and forced: the target is a regular file. A service may have a PATH without sbin.
        command.args(match self {
            Self::Ext4 => &["-q", "-F"][..],
            Self::Xfs | Self::Btrfs => &["-q", "-f"],
        });
        command.arg(file).env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        child_process::run(&mut command, child_process::SHORT_TIMEOUT)
            .with_context(|| format!("the file system cannot be created ({name} is in {})", self.package()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_bounds() {
        for known in VolumeFileSystem::ALL {
            assert!(known.check_size(1 << 30).is_ok());
            assert!(known.check_size(1 << 20).unwrap_err().starts_with("is too small; "));
            assert_eq!(
                known.check_size(u64::MAX).unwrap_err(),
                "is too large; a volume must be smaller than 16T"
            );
            assert_eq!(VolumeFileSystem::from_name(known.name()), Ok(known));
        }
    }
}
