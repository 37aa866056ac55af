//! Follows a backing chain from the top to its end: opens each file, reads its header and
//! resolves the names in it.
//!
//! Reads headers only. Tables are read when the images are opened, from the bottom up.

use std::path::{Path, PathBuf};

use super::{BackingChoice, ImageOptions, names};
use storage::{
    FileIdentity, ImageFormat, OpenError, Storage, StorageSpec, add_wrappers, open_async,
    probe::{self, Probed, check_format},
};

use crate::qcow2::{
    self, MetadataError,
    header::{EncryptionMethod, FileRegion, Qcow2Header},
};

/// Length limit of a chain. Each image costs caches, and a read may pass through all of
/// them.
pub const MAX_CHAIN: usize = 200;

/// An image of the chain whose header was read and whose tables were not.
pub(super) struct ChainLevel {
    /// Path or spec, for messages.
    pub(super) name: String,
    /// Its file, with delay, rate and fault wrappers.
    pub(super) storage: Storage,
    pub(super) read_only: bool,
    /// True if the format was probed; writes must not change the result of the next probe.
    pub(super) is_probed: bool,
    /// `None` for a raw image.
    pub(super) qcow2: Option<Qcow2Files>,
}

/// Header of a qcow2 image, and its data file.
pub(super) struct Qcow2Files {
    pub(super) header: Qcow2Header,
    pub(super) data: Option<Storage>,
}

impl ChainLevel {
    /// Location of its LUKS header, if it is encrypted.
    pub(super) fn luks(&self) -> Option<FileRegion> {
        self.qcow2.as_ref().and_then(|found| {
            found.header.encryption.filter(|_| found.header.crypt == EncryptionMethod::Luks)
        })
    }
}

/// Backing file to open next.
struct NextBackingFile {
    path: PathBuf,
    format: ImageFormat,
    /// Name of the image that refers to it.
    referrer: String,
}

/// Opens the files of the chain that begins with `spec`, topmost first; at least one.
pub(super) async fn find(spec: &str, options: &ImageOptions) -> Result<Vec<ChainLevel>, OpenError> {
    let mut seen = ChainFiles::default();
    let (top, mut next) = find_top(spec, options, &mut seen).await?;
    let mut levels = vec![top];
    while let Some(NextBackingFile { path, format, referrer: of }) = next {
        if levels.len() == MAX_CHAIN {
            let why = format!("the chain of backing files is longer than {MAX_CHAIN} images");
            return Err(OpenError::new(spec, why, "shorten it: `weir image commit` or `weir image rebase`"));
        }
        let (level, after) = find_backing(path, format, &of, options, &mut seen).await?;
        levels.push(level);
        next = after;
    }
    Ok(levels)
}

async fn find_top(
    spec: &str,
    options: &ImageOptions,
    seen: &mut ChainFiles,
) -> Result<(ChainLevel, Option<NextBackingFile>), OpenError> {
    let storage_options = &options.storage;
    let (path, is_remote) = match spec.parse() {
        Ok(StorageSpec::File(path)) => (Some(path), false),
        Ok(StorageSpec::Nbd(_) | StorageSpec::Rbd(_)) => (None, true),
        _ => (None, false),
    };
    let name = path.as_ref().map_or_else(|| spec.to_owned(), |path| path.display().to_string());
    let (bottom, probed) = open_storage(spec.to_owned(), storage_options.clone()).await?;
    seen.add(&bottom, &name)?;
    // Memory and null storage have no persistent header that a later probe could read.
    let is_probed = storage_options.format.is_none() && (path.is_some() || is_remote);
    let format = check_format(storage_options.format, probed, &name)?;
    warn_of_container(&name, probed);
    if storage_options.part.is_some() && format != ImageFormat::Raw {
        return Err(OpenError::new(
            &name,
            "is not raw: only raw images have offset and size options",
            "leave it out",
        ));
    }
    let level = ChainLevel {
        storage: add_wrappers(spec, bottom, storage_options.clone())?,
        name,
        read_only: storage_options.read_only,
        is_probed,
        qcow2: None,
    };
    read_references(level, path.as_deref(), format, options, seen).await
}

async fn find_backing(
    path: PathBuf,
    format: ImageFormat,
    referrer: &str,
    options: &ImageOptions,
    seen: &mut ChainFiles,
) -> Result<(ChainLevel, Option<NextBackingFile>), OpenError> {
    let name = format!("{referrer}: its backing file {}", path.display());
    // The part of an overlay beyond the end of a raw backing file reads as zeroes, so the
    // file may even be empty.
    let may_be_empty = format == ImageFormat::Raw;
    let storage_options =
        storage::OpenOptions { read_only: true, may_be_empty, ..backing_options(options, format) };
    let (storage, probed) = open_backing(&path, &name, storage_options, seen).await?;
    warn_of_container(&name, probed);
    let name = path.display().to_string();
    let level = ChainLevel { name, storage, read_only: true, is_probed: false, qcow2: None };
    read_references(level, Some(&path), format, options, seen).await
}

/// Reads the header, opens the data file and returns the backing file to open next.
async fn read_references(
    mut level: ChainLevel,
    path: Option<&Path>,
    format: ImageFormat,
    options: &ImageOptions,
    seen: &mut ChainFiles,
) -> Result<(ChainLevel, Option<NextBackingFile>), OpenError> {
    if format == ImageFormat::Raw {
        return Ok((level, None));
    }
    let header = qcow2::read_header(&level.storage).await.map_err(|error| invalid(&level, &error))?;
    check(&level, &header)?;
    let data = open_data_file(&level, path, &header, options, seen).await?;
    // `BackingChoice` in effect applies to the topmost image only: with `Nothing` the chain
    // ends here.
    let next = next(&level.name, path, &header, &options.backing)?;
    level.qcow2 = Some(Qcow2Files { header, data });
    Ok((level, next))
}

fn check(level: &ChainLevel, header: &Qcow2Header) -> Result<(), OpenError> {
    if header.crypt == EncryptionMethod::Aes {
        return Err(OpenError::new(
            &level.name,
            "has legacy encryption (\"aes\"), which is insecure and not supported",
            "convert it with qemu-img to an image encrypted with LUKS",
        ));
    }
    // Otherwise a guest of a raw disk could write a qcow2 header that names any file of
    // the host.
    if level.is_probed && (header.backing.is_some() || header.has_data_file()) {
        return Err(OpenError::new(
            &level.name,
            "looks like qcow2 and names other files, so its format must be given",
            "--format qcow2, if it is one: a guest may have written the header into a raw disk",
        ));
    }
    Ok(())
}

fn next(
    name: &str,
    path: Option<&Path>,
    header: &Qcow2Header,
    choice: &BackingChoice,
) -> Result<Option<NextBackingFile>, OpenError> {
    let (Some(backing), BackingChoice::AsInImage) = (&header.backing, choice) else { return Ok(None) };
    let refused = |why: String, remedy: &str| {
        OpenError::new(name, format!("its backing file {:?} {why}", backing.name), remedy)
    };
    let Some(format) = &backing.format else {
        return Err(refused(
            "has no format, and probing it is not safe".to_owned(),
            "write it into the image: qemu-img rebase -u -b BACKING -F raw|qcow2 IMAGE",
        ));
    };
    let format: ImageFormat = format.parse().map_err(|_| {
        refused(
            format!("has the format {format:?}; only raw and qcow2 are supported"),
            "convert it: qemu-img convert -O qcow2",
        )
    })?;
    let path = names::resolve(path, &backing.name).map_err(|why| {
        refused(why, "write a path into the image: qemu-img rebase -u -b PATH -F raw|qcow2 IMAGE")
    })?;
    Ok(Some(NextBackingFile { path, format, referrer: name.to_owned() }))
}

async fn open_data_file(
    level: &ChainLevel,
    path: Option<&Path>,
    header: &Qcow2Header,
    options: &ImageOptions,
    seen: &mut ChainFiles,
) -> Result<Option<Storage>, OpenError> {
    if !header.has_data_file() {
        return Ok(None);
    }
    let Some(name) = &header.data_file else {
        return Err(OpenError::new(
            &level.name,
            "has an external data file, but does not name it",
            "write its name into the image: qemu-img amend -o data_file=NAME",
        ));
    };
    let path = names::resolve(path, name).map_err(|why| {
        let remedy = "write a path into the image: qemu-img amend -o data_file=PATH";
        OpenError::new(&level.name, format!("its data file {name:?} {why}"), remedy)
    })?;
    let name = format!("{}: its data file {}", level.name, path.display());
    let (read_only, handover) = (level.read_only, options.storage.handover);
    let storage_options =
        storage::OpenOptions { read_only, handover, ..backing_options(options, ImageFormat::Raw) };
    open_backing(&path, &name, storage_options, seen).await.map(|(storage, _)| Some(storage))
}

/// Options of a file behind the image. Delay, rate and faults are not inherited.
fn backing_options(options: &ImageOptions, format: ImageFormat) -> storage::OpenOptions {
    let top = &options.storage;
    storage::OpenOptions {
        cache: top.cache,
        format: Some(format),
        force_share: top.force_share,
        root: top.root.clone(),
        passed_files: top.passed_files.clone(),
        ..storage::OpenOptions::default()
    }
}

/// Opens a file behind the image; `name` includes the image that refers to it.
async fn open_backing(
    path: &Path,
    name: &str,
    mut options: storage::OpenOptions,
    seen: &mut ChainFiles,
) -> Result<(Storage, Probed), OpenError> {
    // Checked before the locks are taken: a loop would otherwise be reported as a lock
    // conflict.
    let at = path.to_owned();
    let identity = reactor::run_blocking(move || FileIdentity::of_path(&at)).await;
    seen.check(identity, name)?;
    let Some(text) = path.to_str() else {
        return Err(OpenError::new(name, "its name is not UTF-8", "rename it or its directory"));
    };
    // Sharing a data file that is written to is never safe; `force_share` covers readers only.
    options.force_share &= options.read_only;
    let opened = open_storage(format!("file:{text}"), options).await;
    let (storage, probed) = opened.map_err(|error| OpenError { image: name.to_owned(), ..error })?;
    seen.add(&storage, name)?;
    Ok((storage, probed))
}

/// Logs that an image looks like a file that must be unpacked or converted first.
fn warn_of_container(image: &str, probed: Probed) {
    if let Some(warning) = probe::warning(probed) {
        tracing::warn!(image, "{warning}");
    }
}

async fn open_storage(spec: String, options: storage::OpenOptions) -> Result<(Storage, Probed), OpenError> {
    open_async(&spec, &options).await
}

fn invalid(level: &ChainLevel, error: &MetadataError) -> OpenError {
    let name = &level.name;
    match error {
        MetadataError::Invalid(error) if level.is_probed => {
            let why = format!("looks like qcow2, but cannot be used: {error}");
            OpenError::new(name, why, "--format raw serves its bytes as they are")
        }
        MetadataError::Invalid(error) => OpenError::new(
            name,
            format!("is not a usable qcow2 image: {error}"),
            "`weir image check` checks the whole image",
        ),
        MetadataError::Storage(error) => {
            OpenError::new(name, format!("its header cannot be read: {error}"), "check the device")
        }
    }
}

/// Files of the chain so far, by device and inode, because several names can lead to
/// one file.
#[derive(Default)]
struct ChainFiles(Vec<FileIdentity>);

impl ChainFiles {
    fn check(&self, file: Option<FileIdentity>, name: &str) -> Result<(), OpenError> {
        if file.is_some_and(|file| self.0.contains(&file)) {
            let remedy = "an image cannot be its own backing file: `weir image rebase -u` sets another";
            return Err(OpenError::new(name, "is already in the chain, which is a loop", remedy));
        }
        Ok(())
    }

    fn add(&mut self, storage: &Storage, name: &str) -> Result<(), OpenError> {
        let file = storage.file_identity();
        self.check(file, name)?;
        self.0.extend(file);
        Ok(())
    }
}
