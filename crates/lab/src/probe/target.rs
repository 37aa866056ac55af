//! The measured object: a temporary file in a directory, or a device.
//!
//! The file is never linked (open(2), `O_TMPFILE`), or unlinked at once if the file system lacks
//! that, so it disappears with the process. A device is written to only on request and if unused
//! (`in_use`).

use std::{
    fs,
    os::{fd::AsRawFd as _, unix::fs::FileTypeExt as _},
    path::Path,
    rc::Rc,
};

use anyhow::{Context as _, bail, ensure};
use image::{Image, open_raw};
use nix::sys::statvfs::fstatvfs;
use storage::{CacheMode, ImageFormat, OpenError, OpenOptions};

use super::in_use::{self, ExclusiveDevice};

/// Default size of the test file: larger than the caches of most devices.
const DEFAULT_SIZE: u64 = 1 << 30;
pub(super) const MIN_SIZE: u64 = 8 << 20;

#[derive(Clone, Copy, Debug)]
pub(super) struct ProbeOptions<'a> {
    pub(super) path: &'a Path,
    pub(super) size_bytes: Option<u64>,
    pub(super) write: bool,
    /// True to write despite a known signature.
    pub(super) force: bool,
}

#[derive(Debug)]
pub(super) struct ProbeTarget {
    pub(super) image: Rc<Image>,
    pub(super) size_bytes: u64,
    pub(super) kind: ProbeTargetKind,
    /// Device number in the encoding of stat(2).
    pub(super) device_number: u64,
    _held: ProbeTargetGuard,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProbeTargetKind {
    File,
    Device { writable: bool },
}

#[derive(Debug)]
enum ProbeTargetGuard {
    File { _file: fs::File },
    Device { _claim: Option<ExclusiveDevice> },
}

impl ProbeTarget {
    pub(super) fn open(options: ProbeOptions<'_>) -> anyhow::Result<Self> {
        let name = options.path.display();
        let metadata = fs::metadata(options.path).with_context(|| format!("{name}: cannot be probed"))?;
        if metadata.is_dir() {
            ensure!(
                !options.write,
                "{name}: is a directory, where a file is written without --write (leave it out)"
            );
            Self::in_directory(options)
        } else if metadata.file_type().is_block_device() {
            Self::device(options, &metadata)
        } else {
            bail!("{name}: is neither a directory nor a block device (name the directory that it is in)")
        }
    }

    fn in_directory(options: ProbeOptions<'_>) -> anyhow::Result<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let name = options.path.display();
        let file = tempfile::tempfile_in(options.path).with_context(|| {
            format!("{name}: cannot create a file there (choose a directory that you may write to)")
        })?;
        // Blocks available to this user: root's reserve must not be used up.
        let space = fstatvfs(&file).with_context(|| format!("{name}: its free space is unknown"))?;
        let free = space.fragment_size().saturating_mul(space.blocks_available());
        let size_bytes = whole_blocks(options.size_bytes.unwrap_or(DEFAULT_SIZE.min(free / 4)));
        ensure!(
            size_bytes >= MIN_SIZE,
            "{name}: {size_bytes} bytes are too few to be measured (make room, or give --size \
             {MIN_SIZE} or more)"
        );
        ensure!(
            size_bytes <= free,
            "{name}: {size_bytes} bytes are more than the {free} that are free (give a smaller --size)"
        );
        file.set_len(size_bytes)
            .with_context(|| format!("{name}: cannot create a file of {size_bytes} bytes"))?;
        // The unlinked file has no other name.
        let image = opened(options.path, &format!("file:/proc/self/fd/{}", file.as_raw_fd()), false)?;
        let device_number = file.metadata()?.dev();
        Ok(Self {
            image,
            size_bytes,
            kind: ProbeTargetKind::File,
            device_number,
            _held: ProbeTargetGuard::File { _file: file },
        })
    }

    fn device(options: ProbeOptions<'_>, metadata: &fs::Metadata) -> anyhow::Result<Self> {
        use std::os::unix::fs::MetadataExt as _;
        let name = options.path.display();
        // The claim precedes the open for writing.
        let claim =
            options.write.then(|| in_use::claim(options.path, metadata.rdev(), options.force)).transpose()?;
        let text =
            options.path.to_str().with_context(|| format!("{name}: not UTF-8 (use another name of it)"))?;
        let image = opened(options.path, &format!("file:{text}"), !options.write)?;
        let size_bytes = whole_blocks(image.size_bytes().min(options.size_bytes.unwrap_or(u64::MAX)));
        ensure!(
            size_bytes >= MIN_SIZE,
            "{name}: {size_bytes} bytes are too few to be measured (it takes {MIN_SIZE} at least)"
        );
        Ok(Self {
            image,
            size_bytes,
            kind: ProbeTargetKind::Device { writable: options.write },
            device_number: metadata.rdev(),
            _held: ProbeTargetGuard::Device { _claim: claim },
        })
    }
}

fn opened(path: &Path, spec: &str, read_only: bool) -> anyhow::Result<Rc<Image>> {
    let options = OpenOptions {
        cache: CacheMode::None,
        format: Some(ImageFormat::Raw),
        read_only,
        ..OpenOptions::default()
    };
    // Errors name the user's path instead of the descriptor's.
    let image =
        open_raw(spec, options).map_err(|error| OpenError { image: path.display().to_string(), ..error })?;
    Ok(Rc::new(image))
}

fn whole_blocks(bytes: u64) -> u64 {
    bytes >> 20 << 20
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(path: &Path, size_bytes: Option<u64>, write: bool) -> String {
        format!(
            "{:#}",
            ProbeTarget::open(ProbeOptions { path, size_bytes, write, force: false }).unwrap_err()
        )
    }

    #[test]
    fn unsuitable_targets_are_rejected() {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path();
        let named = |rest: &str| format!("{}: {rest}", path.display());
        assert_eq!(
            refused(path, None, true),
            named("is a directory, where a file is written without --write (leave it out)")
        );
        assert_eq!(
            refused(path, Some(1 << 20), false),
            named("1048576 bytes are too few to be measured (make room, or give --size 8388608 or more)")
        );
        assert!(refused(path, Some(1 << 60), false).contains("that are free (give a smaller --size)"));
        let file = path.join("a.raw");
        fs::write(&file, "x").unwrap();
        assert!(
            refused(&file, None, false)
                .ends_with("is neither a directory nor a block device (name the directory that it is in)")
        );
        assert!(refused(&path.join("none"), None, false).contains("cannot be probed: No such file"));
    }
}
