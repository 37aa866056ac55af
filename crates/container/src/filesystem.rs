//! A new volume's image, with an empty file system in it.
//!
//! The file system is made when the volume is created, in a file: whatever keeps it from being made
//! is then an error of `docker volume create`, and the first mount is like every other. For a qcow2
//! image that file is converted, which costs what is in it.
//!
//! Leaves nothing behind where it fails: the caller clears the volume's directory.

use std::{fs, path::Path, process::Command, time::Duration};

use anyhow::Context as _;
use block::storage::Format;

use crate::{options::Options, program};

/// Docker waits two minutes for a volume; each of the three steps takes seconds at most.
const TIME: Duration = Duration::from_secs(35);

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

    fn make(self, file: &Path) -> anyhow::Result<()> {
        let name = format!("mkfs.{}", self.name());
        let mut command = Command::new(&name);
        // Quiet, and though it is a file. Services may run without the administrator's PATH.
        command.args(match self {
            Self::Ext4 => &["-q", "-F"][..],
            Self::Xfs | Self::Btrfs => &["-q", "-f"],
        });
        command.arg(file).env("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin");
        program::run(&mut command, TIME)
            .with_context(|| format!("the file system cannot be made ({name} is in {})", self.package()))
    }
}

/// Makes `image`, which is not there yet, beside which other files may be made. `weir` is the
/// program itself.
pub(crate) fn make_image(weir: &Path, image: &Path, options: &Options) -> anyhow::Result<()> {
    let raw = match options.format {
        Format::Raw => image.to_owned(),
        Format::Qcow2 => image.with_extension("unformatted"),
    };
    fs::File::create_new(&raw)
        .and_then(|file| file.set_len(options.size_bytes.next_multiple_of(4096)))
        .with_context(|| format!("{}: cannot be made", raw.display()))?;
    options.file_system.make(&raw)?;
    if options.format == Format::Qcow2 {
        let mut command = Command::new(weir);
        command.args(["image", "convert", "-q", "-f", "raw", "-O", "qcow2"]).arg(&raw).arg(image);
        program::run(&mut command, TIME)?;
        fs::remove_file(&raw).with_context(|| format!("{}: cannot be removed", raw.display()))?;
    }
    // Before the volume is said to be there.
    let image = fs::File::open(image).and_then(|image| image.sync_all());
    image.context("the image cannot be written")
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

    #[test]
    fn a_raw_image_has_a_file_system() {
        let directory = tempfile::tempdir().unwrap();
        let image = directory.path().join("disk.raw");
        let given = [("size", "8M"), ("format", "raw")];
        let given = given.map(|(key, value)| (key.to_owned(), value.to_owned())).into();
        make_image(Path::new("/nonexistent"), &image, &Options::read(given).unwrap()).unwrap();
        let content = fs::read(&image).unwrap();
        assert_eq!(content.len(), 8 << 20);
        assert_eq!(content[0x438..0x43a], [0x53, 0xef], "the signature of ext4");
    }
}
