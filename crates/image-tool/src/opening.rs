//! Opens the storage of an image by file name and determines its format, for commands that access
//! its bytes.
//!
//! Without a given format, the signature decides between raw and qcow2. An image with another
//! format's signature is opened only as the format that the user gives ([`storage::probe`]).

use clap::builder::{PathBufValueParser, PossibleValuesParser, TypedValueParser};
use std::{
    collections::BTreeSet,
    ffi::OsStr,
    os::unix::{ffi::OsStrExt as _, fs::MetadataExt as _},
    path::{Path, PathBuf},
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, anyhow, bail};
use image::{
    open::{check_base, resolve},
    qcow2::{
        CacheSettings,
        header::Qcow2Header,
        read_header,
        snapshot::{InternalSnapshot, SnapshotTable},
    },
};
use policy::time::Duration;
pub(super) use settings::image_info::{is_nbd_uri, is_remote_or_null, referenced_path};
use storage::{
    CacheMode, ImageFormat, OpenError, OpenOptions, Storage, StoragePart, open_storage,
    probe::{self, Probed},
    probe_anywhere,
};

/// Parser of a format. `--help` lists the names only: a line for each would triple the length of
/// the pages.
pub(super) fn format_option() -> impl TypedValueParser<Value = ImageFormat> {
    PossibleValuesParser::new([ImageFormat::Raw, ImageFormat::Qcow2].map(ImageFormat::name))
        .try_map(|name| name.parse::<ImageFormat>())
}

/// Parser of an image's name. As in QEMU, `file:PATH` is the file PATH, regardless of its form.
pub(super) fn image_name() -> impl TypedValueParser<Value = PathBuf> {
    PathBufValueParser::new().try_map(|name| {
        // An existing file has precedence over a protocol, as its name may contain a colon.
        if let Some(protocol) = unsupported_protocol(&name).filter(|_| !name.exists()) {
            let file = Path::new(".").join(&name);
            return Err(format!(
                "the protocol {protocol} is not supported (for a file of this name, write {})",
                file.display()
            ));
        }
        without_prefix(&name).ok_or_else(|| "no path follows `file:`".to_owned())
    })
}

/// Protocol of QEMU that a name begins with, if weir has no such storage.
fn unsupported_protocol(name: &Path) -> Option<&str> {
    const KNOWN: [&str; 19] = [
        "blkdebug",
        "blklogwrites",
        "blkreplay",
        "blkverify",
        "fat",
        "ftp",
        "ftps",
        "gluster",
        "gluster+rdma",
        "gluster+tcp",
        "gluster+unix",
        "http",
        "https",
        "iscsi",
        "iser",
        "nfs",
        "nvme",
        "ssh",
        "vvfat",
    ];
    let (protocol, _) = name.to_str()?.split_once(':')?;
    KNOWN.contains(&protocol).then_some(protocol)
}

fn without_prefix(name: &Path) -> Option<PathBuf> {
    match name.as_os_str().as_bytes().strip_prefix(b"file:") {
        None => Some(name.to_owned()),
        Some(b"") => None,
        Some(path) => Some(local(Path::new(OsStr::from_bytes(path)))),
    }
}

/// Path in a form that always names a file of this host.
pub(super) fn local(path: &Path) -> PathBuf {
    if is_remote_or_null(path) || is_json(path) { Path::new(".").join(path) } else { path.to_owned() }
}

/// Parses the name of a format in an image.
pub(super) fn format_named(name: Option<&str>) -> anyhow::Result<ImageFormat> {
    match name {
        Some(name) => match name.parse() {
            Ok(format) => Ok(format),
            Err(_) => bail!("the format {name} is not supported (use raw or qcow2)"),
        },
        None => bail!("its format is missing"),
    }
}

/// Path of a backing or data file whose name is stored in an image. The name must be a path, not a
/// URI; a relative one starts at the image's directory.
pub(super) fn resolve_backing(image: &Path, name: &str) -> anyhow::Result<PathBuf> {
    let path = resolve(local_image(image), name).map_err(|why| unusable(image, name, &why))?;
    Ok(local(&path))
}

/// Checks the name of a file before a command stores it in an image. Does not open the file.
///
/// # Errors
/// Fails if the meaning of the name would depend on the working directory of a later command.
pub(super) fn check_name(image: &Path, name: &str) -> anyhow::Result<()> {
    check_base(local_image(image), name).map_err(|why| unusable(image, name, &why))
}

/// The image itself if it is a file of this host, in whose directory relative names begin; `None`
/// for a remote image.
fn local_image(image: &Path) -> Option<&Path> {
    Some(image).filter(|image| !is_remote_or_null(image))
}

fn unusable(image: &Path, name: &str, why: &str) -> anyhow::Error {
    anyhow!("{}: its backing or data file {name:?} {why}", image.display())
}

/// True if both paths lead to one file, by the same name, a symbolic link or a hard link.
pub(super) fn is_same(one: &Path, other: &Path) -> bool {
    let identity = |path: &Path| path.metadata().map(|file| (file.dev(), file.ino())).ok();
    one == other || identity(one).is_some_and(|file| Some(file) == identity(other))
}

#[derive(Clone, Copy, Debug, Default)]
pub(super) struct OpenMode {
    pub(super) cache: CacheMode,
    pub(super) write: bool,
    /// Allow other processes to write to it.
    pub(super) force_share: bool,
    /// Limit in bytes per second; not 0.
    pub(super) rate_bps: Option<u64>,
    /// True to open it without its backing file.
    pub(super) without_backing: bool,
    pub(super) described: DescribedOptions,
}

/// Options from the user's description of one image (`--image-opts`, `json:`); they do not apply to
/// its backing and data files.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct DescribedOptions {
    pub(super) part: Option<StoragePart>,
    /// Overrides the command's cache mode.
    pub(super) cache: Option<CacheMode>,
    pub(super) caches: CacheSettings,
    pub(super) reconnect_delay: Duration,
    pub(super) open_timeout: Duration,
}

impl OpenMode {
    /// Replaces the remedy of a lock conflict by one for commands that change an image.
    pub(super) fn adapt_remedy(self, mut error: OpenError) -> OpenError {
        if self.write && error.why.starts_with("locked") && !error.held_here {
            let is_weir = error.holder.as_deref().is_some_and(|name| name.starts_with("weir"));
            let or = if is_weir { ", or take the disk from it with `weir disk remove`" } else { "" };
            // The usual remedy offers a read-only open or a shared one, which does not help a
            // command that writes.
            error.remedy = format!("stop it first{or}");
        }
        error
    }
}

/// Format given by the user, or else that of the signature. Warns of a compressed file, an archive
/// or a foreign format: a guest cannot use its bytes as a disk.
pub(super) fn format(path: &Path, given: Option<ImageFormat>) -> anyhow::Result<ImageFormat> {
    if let Some(format) = given {
        warn_if_container(path);
        return Ok(format);
    }
    let name = path.display().to_string();
    let probed = match path.to_str().filter(|_| is_remote_or_null(path)) {
        Some(elsewhere) => probe_anywhere(elsewhere)?,
        None => probe::probe(path).with_context(|| format!("{name}: cannot be read"))?,
    };
    let format = probe::check_format(None, probed, &name)?;
    warn_of_container(path, probed);
    Ok(format)
}

/// Warns of a file of this host whose bytes a guest cannot use as a disk. Errors are reported by
/// the later open.
pub(super) fn warn_if_container(path: &Path) {
    if !is_remote_or_null(path)
        && let Ok(probed) = probe::probe(path)
    {
        warn_of_container(path, probed);
    }
}

/// Prints the warning once for each image of a command.
fn warn_of_container(path: &Path, probed: Probed) {
    static WARNED: Mutex<BTreeSet<PathBuf>> = Mutex::new(BTreeSet::new());
    if let Some(warning) = probe::warning(probed)
        && WARNED.lock().unwrap_or_else(PoisonError::into_inner).insert(path.to_owned())
    {
        console::print_notice(&format!("{}: {warning}", path.display()));
    }
}

pub(super) fn storage(path: &Path, mode: OpenMode) -> anyhow::Result<Storage> {
    Ok(open_storage(&spec(path)?, options(mode)?).map_err(|error| mode.adapt_remedy(error))?)
}

pub(super) fn spec(path: &Path) -> anyhow::Result<String> {
    let text = path
        .to_str()
        .with_context(|| format!("{}: the name is not UTF-8 (use another path)", path.display()))?;
    Ok(if is_remote_or_null(path) { text.to_owned() } else { format!("file:{text}") })
}

fn is_json(path: &Path) -> bool {
    path.as_os_str().as_encoded_bytes().starts_with(b"json:")
}

pub(super) fn options(mode: OpenMode) -> anyhow::Result<OpenOptions> {
    let rate = match mode.rate_bps {
        Some(rate) => {
            Some(format!("bytes={rate}").parse().with_context(|| format!("{rate} bytes per second"))?)
        }
        None => None,
    };
    Ok(OpenOptions {
        cache: mode.described.cache.unwrap_or(mode.cache),
        part: mode.described.part,
        reconnect_delay: mode.described.reconnect_delay,
        open_timeout: mode.described.open_timeout,
        read_only: !mode.write,
        force_share: mode.force_share,
        may_be_empty: true,
        rate,
        ..OpenOptions::default()
    })
}

pub(super) async fn header_of(path: &Path) -> anyhow::Result<Qcow2Header> {
    let storage = storage(path, OpenMode { force_share: true, ..OpenMode::default() })?;
    read_header(&storage).await.with_context(|| path.display().to_string())
}

/// Reads the snapshots of an image, and warns if their table is damaged.
pub(super) async fn snapshots_in(storage: &Storage, path: &Path) -> anyhow::Result<Vec<InternalSnapshot>> {
    let context = || path.display().to_string();
    let header = read_header(storage).await.with_context(context)?;
    let table = SnapshotTable::read(storage, &header).await.with_context(context)?;
    warn_of_faults(&table, &header, path);
    Ok(table.snapshots)
}

/// Prints one line for all faults: there may be many.
fn warn_of_faults(table: &SnapshotTable, header: &Qcow2Header, path: &Path) {
    let mut faults = table.decode_errors(header);
    let Some(first) = faults.next() else { return };
    let more = match faults.count() {
        0 => String::new(),
        count => format!(", and {count} more faults"),
    };
    console::print_notice(&format!(
        "{}: its snapshot table is damaged: {first}{more} (`weir image check` shows the damage)",
        path.display()
    ));
}

pub(super) fn backing_in(
    path: &Path,
    header: &Qcow2Header,
) -> anyhow::Result<Option<(PathBuf, ImageFormat)>> {
    let Some(backing) = &header.backing else { return Ok(None) };
    let format = format_named(backing.format.as_deref()).with_context(|| {
        format!(
            "{}: its backing file {} (set its format with `weir image rebase -u`)",
            path.display(),
            backing.name
        )
    })?;
    Ok(Some((resolve_backing(path, &backing.name)?, format)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefix_of_a_file_is_no_part_of_its_name() {
        let read = |name: &str| without_prefix(Path::new(name)).map(|path| path.display().to_string());
        for (name, path) in [
            ("file:a:b.qcow2", "a:b.qcow2"),
            ("file:/images/a", "/images/a"),
            ("file:nbd://a", "./nbd://a"),
            ("file:file:a", "file:a"),
            ("./file:a", "./file:a"),
            ("a:b", "a:b"),
            ("nbd://host/a", "nbd://host/a"),
        ] {
            assert_eq!(read(name).as_deref(), Some(path), "{name}");
        }
        assert_eq!(read("file:"), None);
    }

    #[test]
    fn protocols_without_storage_here_are_recognized() {
        for (name, protocol) in [
            ("ssh://host/disk", Some("ssh")),
            ("fat:rw:.", Some("fat")),
            ("gluster+tcp://host/volume/disk", Some("gluster+tcp")),
            ("./ssh://host/disk", None),
            ("file:ssh:x", None),
            ("nbd://host/disk", None),
            ("vm:1.raw", None),
        ] {
            assert_eq!(unsupported_protocol(Path::new(name)), protocol, "{name}");
        }
    }

    #[test]
    fn backing_names_refer_to_local_files() {
        let path = |image: &str, name: &str| {
            resolve_backing(Path::new(image), name).map(|path| path.display().to_string())
        };
        assert_eq!(path("/images/vm.qcow2", "file:base").unwrap(), "/images/base");
        assert_eq!(path("vm.qcow2", "./nbd:a").unwrap(), "./nbd:a");
        assert_eq!(path("vm.qcow2", "file:nbd:a").unwrap(), "./nbd:a");
        assert_eq!(path("rbd:pool/vm", "/images/base").unwrap(), "/images/base");
        for image in ["rbd:pool/vm", "nbd://host/vm"] {
            let refused = path(image, "base").unwrap_err().to_string();
            assert!(refused.contains("use an absolute path"), "{image}: {refused}");
        }
        for name in ["nbd://host/disk", "nbd+unix:///?socket=/s", "rbd:pool/image", "json:{}", "a:b"] {
            for image in ["vm.qcow2", "/images/vm.qcow2", "rbd:pool/vm", "nbd://host/vm"] {
                let refused = path(image, name).unwrap_err().to_string();
                assert!(refused.contains("only paths are supported"), "{image}, {name}: {refused}");
            }
        }
    }
}
