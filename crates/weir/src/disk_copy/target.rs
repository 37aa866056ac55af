//! Target of `weir backup` and `weir mirror`: a new file, or a block device, opened by this
//! process; or an image that the daemon opens.
//!
//! Never replaces a file, and never writes through the path of a file that it has opened: another
//! user of the directory could replace it.

use std::{
    fs::{self, File, FileType, OpenOptions},
    io::{self, ErrorKind, Read as _},
    os::unix::fs::{FileTypeExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf, absolute},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use image::{
    open::backing_name,
    qcow2::{
        create::CreateOptions,
        header::{BackingReference, Qcow2Header},
    },
};
use nix::libc::O_EXCL;
use settings::ImageLocation;
use storage::{ImageFormat, new_file::check_directory};

use crate::new_image::{UnusedFile, write_qcow2};

/// First bytes of a qcow2 image.
const QCOW2_MAGIC: [u8; 4] = *b"QFI\xfb";

/// A target that the command line names.
#[derive(Clone)]
pub(super) struct RequestedTarget<'a> {
    pub(super) location: ImageLocation,
    pub(super) format: Option<ImageFormat>,
    pub(super) size_bytes: u64,
    pub(super) is_incremental: bool,
    /// Last backup, below a new incremental one.
    pub(super) backing: Option<PathBuf>,
    /// Image of the disk, which is no backup.
    pub(super) disk_image: &'a Path,
}

/// A target that exists, and its file if this process has opened it.
pub(super) struct PreparedTarget {
    pub(super) location: ImageLocation,
    pub(super) format: ImageFormat,
    pub(super) file: Option<File>,
    /// The file, if this process has created it.
    pub(super) created: Option<UnusedFile>,
}

impl RequestedTarget<'_> {
    /// Opens a device or creates a file; a target at a server exists already.
    pub(super) fn prepare(self) -> anyhow::Result<PreparedTarget> {
        let location = self.location.clone().relative_to(&absolute(".")?);
        let Some(path) = location.path().map(Path::to_owned) else {
            ensure!(
                location.is_remote(),
                "{location}: is no target (use a new file, a block device, the URI of an \
                 NBD export, or rbd:POOL/IMAGE)"
            );
            self.check_existing(&location.to_string())?;
            let format = self.format.unwrap_or(ImageFormat::Raw);
            return Ok(PreparedTarget { location, format, file: None, created: None });
        };
        let name = path.display();
        match fs::metadata(&path) {
            Ok(existing) if existing.file_type().is_block_device() => {
                self.check_existing(&name.to_string())?;
                let file = open_device(&path)?;
                let format = self.format.unwrap_or(ImageFormat::Raw);
                return Ok(PreparedTarget { location, format, file: Some(file), created: None });
            }
            Ok(existing) => bail!("{name}: {}", existing_rule(existing.file_type())),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => bail!("{name}: cannot be created: {error} (check the directory)"),
        }
        // As the misspelt name of a device.
        check_directory(&path).map_err(|why| anyhow!("{name}: does not exist, and {why}"))?;
        let format = self.format.unwrap_or_else(|| format_by_name(&path));
        let backing = self.backing_of_new(&path, format)?;
        // It holds all data of the disk: only this user may read it.
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path);
        let file =
            file.map_err(|error| anyhow!("{name}: cannot be created: {error} (check the directory)"))?;
        // Removed after a failure from here on.
        let created = UnusedFile::new(&file, &path)?;
        let made = match format {
            ImageFormat::Raw => file.set_len(self.size_bytes).map_err(Into::into),
            ImageFormat::Qcow2 => {
                let options =
                    CreateOptions { size_bytes: self.size_bytes, backing, ..CreateOptions::default() };
                write_qcow2(&file, &path, options)
            }
        };
        made.with_context(|| format!("{name}: cannot be created"))?;
        Ok(PreparedTarget { location, format, file: Some(file), created: Some(created) })
    }

    /// Fails if an image that exists already would need another backing file.
    fn check_existing(&self, name: &str) -> anyhow::Result<()> {
        ensure!(
            self.backing.is_none(),
            "{name}: exists already, so it has no new backing file (an incremental backup to it needs the \
             content of the last backup in it; leave out --backing)"
        );
        Ok(())
    }

    /// The backing file of a new file at `path`: that of an incremental backup.
    fn backing_of_new(&self, path: &Path, format: ImageFormat) -> anyhow::Result<Option<BackingReference>> {
        if !self.is_incremental {
            return Ok(None);
        }
        let name = path.display();
        ensure!(
            format == ImageFormat::Qcow2,
            "{name}: a new file for an incremental backup is qcow2 (name it *.qcow2, or give --format qcow2)"
        );
        let Some(backing) = &self.backing else {
            bail!("{name}: a new file for an incremental backup needs the last backup (--backing FILE)");
        };
        let shown = backing.display();
        let found = fs::canonicalize(backing);
        let found = found.map_err(|error| anyhow!("{shown}: cannot be the backing file: {error}"))?;
        ensure!(found.is_file(), "{shown}: cannot be the backing file: it is no file (name the last backup)");
        ensure!(
            fs::canonicalize(self.disk_image).ok().as_ref() != Some(&found),
            "{shown}: is the image of the disk itself (name the last backup)"
        );
        let backing_format = backing_format(&found);
        let backing_format =
            backing_format.with_context(|| format!("{shown}: cannot be the backing file"))?;
        found.to_str().with_context(|| format!("{shown}: its name is not UTF-8"))?;
        // As `found`, so that files of one directory are recognized.
        let path = match (path.parent().and_then(|parent| fs::canonicalize(parent).ok()), path.file_name()) {
            (Some(directory), Some(name)) => directory.join(name),
            _ => path.to_owned(),
        };
        let stored = backing_name(&path, &found);
        Ok(Some(BackingReference { name: stored, format: Some(backing_format.name().into()) }))
    }
}

/// Format of a file by its name.
fn format_by_name(path: &Path) -> ImageFormat {
    let is_named_qcow2 = path.extension().is_some_and(|extension| extension == "qcow2");
    if is_named_qcow2 { ImageFormat::Qcow2 } else { ImageFormat::Raw }
}

/// Format of the last backup. The content alone does not decide: a guest can write the header of a
/// qcow2 image to its disk, which a raw backup then begins with.
fn backing_format(path: &Path) -> anyhow::Result<ImageFormat> {
    let header = beginning(path)?;
    let format = format_by_name(path);
    match format {
        ImageFormat::Qcow2 => drop(Qcow2Header::parse(&header)?),
        ImageFormat::Raw => ensure!(
            !header.starts_with(&QCOW2_MAGIC),
            "its content begins as that of a qcow2 image, but its name does not end in .qcow2, so it may \
             be a raw backup of a disk with such content (rename it to *.qcow2 if it is qcow2; otherwise \
             make a full backup in qcow2)"
        ),
    }
    Ok(format)
}

/// Beginning of a file, with the header of an image.
fn beginning(path: &Path) -> io::Result<Vec<u8>> {
    let mut header = vec![0; 1 << 16];
    let mut file = File::open(path)?;
    let mut length = 0;
    loop {
        match file.read(&mut header[length..])? {
            0 => break,
            count => length += count,
        }
    }
    header.truncate(length);
    Ok(header)
}

/// Opens a block device that neither a mount nor another user in the kernel has claimed; they
/// cannot claim it while it is open.
fn open_device(path: &Path) -> anyhow::Result<File> {
    let opened = OpenOptions::new().read(true).write(true).custom_flags(O_EXCL).open(path);
    opened.map_err(|error| {
        let name = path.display();
        match error.kind() {
            ErrorKind::ResourceBusy => {
                anyhow!("{name}: is mounted or in use by the kernel (unmount it, or use another target)")
            }
            _ => anyhow!("{name}: cannot be written: {error} (check its permissions)"),
        }
    })
}

/// Rule that a file of this type violates, which exists and is no block device.
fn existing_rule(kind: FileType) -> &'static str {
    if kind.is_file() {
        "exists already (remove it, or choose another file)"
    } else if kind.is_dir() {
        "is a directory, which exists already (name a new file in it)"
    } else {
        "is neither a file nor a block device (name a new file)"
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn last_backup_has_the_format_of_its_name_and_content() {
        let directory = tempfile::tempdir().expect("a directory");
        let [raw, qcow2, bare] = ["a:b.raw", "a:b.qcow2", "b.bak"].map(|name| directory.path().join(name));
        fs::write(&raw, [0; 512]).expect("writable");
        let options = CreateOptions { size_bytes: 1 << 20, ..CreateOptions::default() };
        for path in [&qcow2, &bare] {
            let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).expect("new");
            write_qcow2(&file, path, options.clone()).expect("valid");
        }
        let target = directory.path().join("next.qcow2");
        let reference = |backing: &Path| {
            let requested = RequestedTarget {
                location: target.to_str().expect("UTF-8").parse().expect("a path"),
                format: None,
                size_bytes: 1 << 20,
                is_incremental: true,
                backing: Some(backing.to_owned()),
                disk_image: Path::new("none"),
            };
            let reference = requested.backing_of_new(&target, ImageFormat::Qcow2)?;
            let BackingReference { name, format } = reference.expect("it is incremental");
            anyhow::Ok((name, format.expect("it is known")))
        };
        assert_eq!(reference(&raw).expect("raw"), ("./a:b.raw".into(), "raw".into()));
        assert_eq!(reference(&qcow2).expect("qcow2"), ("./a:b.qcow2".into(), "qcow2".into()));
        let refused = format!("{:#}", reference(&bare).expect_err("it may be either"));
        assert!(refused.contains("rename it to *.qcow2"), "{refused}");
    }

    #[test]
    fn no_file_is_created_beside_devices() {
        let requested = RequestedTarget {
            location: "/dev/weir-none".parse().expect("a path"),
            format: None,
            size_bytes: 4096,
            is_incremental: false,
            backing: None,
            disk_image: Path::new("none"),
        };
        let error = requested.prepare().err().expect("a reboot would delete it").to_string();
        assert!(error.contains("/dev/weir-none: does not exist, and its directory /dev"), "{error}");
        assert!(!Path::new("/dev/weir-none").exists());
    }

    #[test]
    fn only_the_created_file_is_removed() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("b.raw");
        let location: ImageLocation = path.to_str().expect("UTF-8").parse().expect("a path");
        let requested = RequestedTarget {
            location,
            format: None,
            size_bytes: 4096,
            is_incremental: false,
            backing: None,
            disk_image: Path::new("none"),
        };
        let prepared = requested.clone().prepare().expect("it is new");
        let created = prepared.created.and_then(UnusedFile::keep).expect("it is created");
        assert!(path.exists(), "a file that a backup may use stays");
        fs::rename(&path, directory.path().join("moved")).expect("it exists");
        fs::write(&path, "other").expect("it can be written");
        let error = created.remove().expect_err("it is another file");
        assert_eq!(error.to_string(), "another file has its name");
        assert!(path.exists());
        fs::rename(directory.path().join("moved"), &path).expect("it exists");
        created.remove().expect("it is the file");
        assert!(!path.exists());
        drop(requested.prepare().expect("it is new"));
        assert!(!path.exists(), "an unused file is removed");
    }
}
