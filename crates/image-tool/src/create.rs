//! `weir image create`: creates a raw or qcow2 image, with the options of `qemu-img create`.
//!
//! Replaces an existing image that is not in use; removes a new file that could not be completed.

use std::{
    fs::{self, OpenOptions},
    io,
    os::unix::fs::FileTypeExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow};
use clap::Args;
use console::{CommandFailure, on_reactor, print};
use image::qcow2::{
    self,
    create::{CreateOptions, Preallocation},
    header::{BackingReference, CompressionType},
};
use reactor::{buffer::IoBuffer, sanitize::sanitize};
use storage::{Durability, ImageFormat, Storage, ZeroOptions};

use super::{
    encrypt::{Encryption, SecretArgs},
    opening::{self, OpenMode},
    options::FormatOptions,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image create -f qcow2 vm1.qcow2 20G
      An empty disk of 20 GiB.
  weir image create -f qcow2 -b base.qcow2 -F qcow2 vm1.qcow2
      An overlay with the content and the size of base.qcow2.
  weir image create -f qcow2 --secret-file key vm1.qcow2 20G
      Encrypted with LUKS; the file key holds the passphrase.
  weir image create -f qcow2 -o cluster_size=2M,preallocation=metadata vm1.qcow2 1T
      With options of the format; -o help lists all.

Exit status: 0 created, 1 failed, 2 wrong use of the command line.";

pub(super) const OPTIONS: &str = "\
Options of qcow2:
  backing_file=FILE       provides unallocated clusters (same as -b)
  backing_fmt=FORMAT      format of the backing file (same as -F)
  cluster_size=SIZE       512 to 2M, a power of two [64K]
  compat=LEVEL            0.10 (version 2) or 1.1 (version 3) [1.1]
  compression_type=TYPE   of compressed clusters: zlib or zstd [zlib]
  data_file=FILE          separate file for guest data
  data_file_raw=SWITCH    the data file is a valid raw image [off]
  encrypt.format=luks     encrypt the image; encrypt.key-secret=ID names an --object secret
  encrypt.cipher-alg=ALG  aes-128, aes-192 or aes-256 [aes-256]; encrypt.cipher-mode=MODE xts or cbc [xts]
  encrypt.hash-alg=HASH   of the key derivation [sha256]; encrypt.iter-time=MS its duration [2000]
  extended_l2=SWITCH      subclusters of 1/32 cluster; needs clusters of 16K or more [off]
  lazy_refcounts=SWITCH   write refcounts lazily [off]
  preallocation=MODE      off, metadata, falloc or full [off]
  refcount_bits=N         1 to 64, a power of two [16]
  size=SIZE               size of the disk
  encryption=off          for scripts; only encrypt.format=luks encrypts
Options of raw:
  preallocation=MODE      off, falloc or full [off]
  size=SIZE               size of the disk
A SWITCH is on or off; without a value it is on.
For scripts, both formats accept extent_size_hint=SIZE and nocow=SWITCH, hints for the host's file
system, which have no effect.
";

/// The options of `weir image create`.
#[derive(Debug, Args)]
pub struct CreateArgs {
    /// Image to create
    #[arg(value_name = "FILE", value_parser = opening::image_name())]
    file: Option<PathBuf>,
    /// Size of the disk [default: that of the backing file]
    #[arg(value_name = "SIZE", value_parser = settings::size)]
    size: Option<u64>,
    /// Format: raw or qcow2
    #[arg(short, long, value_name = "FORMAT", default_value = "raw", value_parser = opening::format_option())]
    format: ImageFormat,
    /// Backing file: provides unallocated clusters; relative to the image's directory
    #[arg(short, long, value_name = "FILE")]
    backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = opening::format_option())]
    backing_format: Option<ImageFormat>,
    /// Do not open the backing file, which may be missing; requires a size
    #[arg(short, long)]
    unsafe_backing: bool,
    /// Options of the format, such as cluster_size=2M,lazy_refcounts=on; help lists all
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    #[command(flatten)]
    secret: SecretArgs,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
}

pub(crate) fn run(arguments: CreateArgs) -> Result<(), CommandFailure> {
    if FormatOptions::ask_for_help(&arguments.options) {
        return Ok(print(OPTIONS)?);
    }
    let no_file =
        || CommandFailure::Usage(anyhow!("no file was named (weir image create --help has examples)"));
    let path = arguments.file.clone().ok_or_else(no_file)?;
    let name = path.display().to_string();
    let usage = |text: String| CommandFailure::Usage(anyhow!("{name}: {text}"));
    if opening::is_remote_or_null(&path) && !opening::is_nbd_uri(&path) {
        return Err(usage(
            "weir cannot create images there (use `rbd create`, or `qemu-img create -f qcow2` in a \
             Ceph cluster)"
                .to_owned(),
        ));
    }
    let mut options = FormatOptions::read(&arguments.options).map_err(usage)?;
    match arguments.format {
        ImageFormat::Raw => {
            if arguments.backing.is_some() {
                return Err(usage("-b: raw images have no backing file (use -f qcow2)".to_owned()));
            }
            if arguments.secret.is_given() {
                return Err(usage("raw images are not encrypted (use -f qcow2)".to_owned()));
            }
            let size = size(&mut options, &arguments).map_err(usage)?;
            let preallocation = preallocation(&mut options).map_err(usage)?.unwrap_or_default();
            take_hints(&mut options).map_err(usage)?;
            // Reports the remaining options as errors, so that none is ignored.
            options.finish("raw").map_err(usage)?;
            let size = size.ok_or_else(|| usage("the size is missing (add one: 20G)".to_owned()))?;
            create_raw(&path, size, preallocation, &name)?;
            print_unless_quiet(&arguments, format_args!("Formatting '{name}', fmt=raw size={size}"))
        }
        ImageFormat::Qcow2 => {
            let size = size(&mut options, &arguments).map_err(usage)?;
            let create_options =
                qcow2_options(&mut options, arguments.backing.clone(), arguments.backing_format);
            let mut create_options = create_options.map_err(usage)?;
            let secret = arguments.secret.read()?;
            if secret.is_some() {
                options.set_missing("encrypt.format", "luks");
            }
            let objects = arguments.secret.objects().map_err(usage)?;
            let encryption = Encryption::take(&mut options, secret.as_ref(), &objects);
            let encryption = encryption.map_err(usage)?;
            options.finish("qcow2").map_err(usage)?;
            create_options.size_bytes = match (size, backing_size(&create_options, &arguments, &path)?) {
                (Some(size), _) | (None, Some(size)) => size,
                (None, None) => return Err(usage("the size is missing (add one: 20G)".to_owned())),
            };
            let mut create_options = create_options.checked().map_err(|rule| usage(rule.to_string()))?;
            if let Some(encryption) = encryption {
                create_options.luks = Some(encryption.area().map_err(|why| anyhow!("{name}: {why}"))?);
            }
            create_qcow2(&path, &create_options, &name)?;
            print_unless_quiet(&arguments, format_args!("{}", formatting(&name, &create_options)))
        }
    }
}

fn print_unless_quiet(arguments: &CreateArgs, line: std::fmt::Arguments<'_>) -> Result<(), CommandFailure> {
    if arguments.quiet { Ok(()) } else { Ok(print(&format!("{line}\n"))?) }
}

fn size(options: &mut FormatOptions, arguments: &CreateArgs) -> Result<Option<u64>, String> {
    match (options.take_size("size")?, arguments.size) {
        (Some(_), Some(_)) => {
            Err("the size is given twice, as SIZE and with -o size (leave one of them out)".to_owned())
        }
        (option, size) => Ok(size.or(option)),
    }
}

pub(super) fn preallocation(options: &mut FormatOptions) -> Result<Option<Preallocation>, String> {
    options.take_as("preallocation", preallocation_mode)
}

pub(super) fn preallocation_mode(name: &str) -> Result<Preallocation, String> {
    match name {
        "off" => Ok(Preallocation::Off),
        "metadata" => Ok(Preallocation::Metadata),
        "falloc" => Ok(Preallocation::Falloc),
        "full" => Ok(Preallocation::Full),
        _ => Err("is none of off, metadata, falloc and full".to_owned()),
    }
}

/// Removes the options that set hints of btrfs and XFS on the file. They do not affect the image's
/// content; their values are checked and then ignored.
pub(super) fn take_hints(options: &mut FormatOptions) -> Result<(), String> {
    options.take_size("extent_size_hint")?;
    options.take_switch("nocow")?;
    Ok(())
}

/// Version of qcow2 for the option `compat`.
pub(super) fn take_version(options: &mut FormatOptions) -> Result<Option<u32>, String> {
    options.take_as("compat", |value| match value {
        "0.10" | "v2" => Ok(2),
        "1.1" | "v3" => Ok(3),
        _ => Err("is neither 0.10 nor 1.1".to_owned()),
    })
}

/// Reads all options except for the size. `backing` is the value of -b, and `format` that of -F.
pub(super) fn qcow2_options(
    options: &mut FormatOptions,
    backing: Option<String>,
    format: Option<ImageFormat>,
) -> Result<CreateOptions, String> {
    let default = CreateOptions::default();
    let backing_file = options.take("backing_file");
    // The option has precedence over -F; for the name below, -b has precedence over the option.
    let backing_format = options.take("backing_fmt").or(format.map(|format| format.name().to_owned()));
    let version = take_version(options)?;
    let compression = options.take_as("compression_type", |value| match value {
        "zlib" => Ok(CompressionType::Zlib),
        "zstd" => Ok(CompressionType::Zstd),
        _ => Err("is neither zlib nor zstd".to_owned()),
    })?;
    let number = |value: &str| value.parse().map_err(|_| "is not a whole number".to_owned());
    let backing = backing.or(backing_file);
    if backing.as_deref() == Some("") {
        return Err("the backing file has no name (leave -b out for none)".to_owned());
    }
    if options.take_switch("encryption")? == Some(true) {
        return Err(
            "encryption=on: this legacy encryption is insecure and not supported (use encrypt.format=luks)"
                .to_owned(),
        );
    }
    take_hints(options)?;
    if backing.is_none() && backing_format.is_some() {
        return Err("a backing format was given without a backing file (-b)".to_owned());
    }
    if backing.is_some() && backing_format.is_none() {
        return Err("the format of the backing file is missing (-F raw or -F qcow2)".to_owned());
    }
    Ok(CreateOptions {
        version: version.unwrap_or(default.version),
        cluster_bytes: options.take_size("cluster_size")?.unwrap_or(default.cluster_bytes),
        refcount_bits: options.take_as("refcount_bits", number)?.unwrap_or(default.refcount_bits),
        lazy_refcounts: options.take_switch("lazy_refcounts")?.unwrap_or(false),
        extended_l2: options.take_switch("extended_l2")?.unwrap_or(false),
        compression: compression.unwrap_or(default.compression),
        backing: backing.map(|name| BackingReference { name, format: backing_format }),
        data_file: options.take("data_file"),
        data_file_raw: options.take_switch("data_file_raw")?.unwrap_or(false),
        preallocation: preallocation(options)?.unwrap_or_default(),
        ..default
    })
}

/// Size of the backing file's disk; `None` without a backing file, or if it must not be opened.
fn backing_size(
    options: &CreateOptions,
    arguments: &CreateArgs,
    path: &Path,
) -> Result<Option<u64>, CommandFailure> {
    let Some(backing) = &options.backing else { return Ok(None) };
    if arguments.unsafe_backing {
        opening::check_name(path, &backing.name)?;
        return Ok(None);
    }
    // Relative to the image, as every later open resolves it.
    let place = opening::resolve_backing(path, &backing.name)?;
    if opening::is_same(&place, path) {
        let error = anyhow!("{}: would be its own backing file (choose another)", path.display());
        return Err(CommandFailure::Usage(error));
    }
    let format = opening::format_named(backing.format.as_deref())
        .with_context(|| format!("{}: is the backing file", place.display()))?;
    virtual_size(&place, format).map(Some)
}

fn virtual_size(path: &Path, format: ImageFormat) -> Result<u64, CommandFailure> {
    let storage = opening::storage(path, OpenMode { force_share: true, ..OpenMode::default() })?;
    if format == ImageFormat::Raw {
        return Ok(storage.size_bytes());
    }
    let header = on_reactor(async move { Ok(qcow2::read_header(&storage).await) })?;
    Ok(header.with_context(|| path.display().to_string())?.size_bytes)
}

struct NewFile {
    path: PathBuf,
    is_new: bool,
}

impl NewFile {
    /// Creates the file, or opens an existing one unless it is in use.
    fn open(path: &Path) -> anyhow::Result<(Self, Storage)> {
        if opening::is_nbd_uri(path) {
            let storage = opening::storage(path, OpenMode { write: true, ..OpenMode::default() })?;
            return Ok((Self { path: path.to_owned(), is_new: false }, storage));
        }
        let name = path.display();
        // `create_new` distinguishes a new file, which is removed after a failure, from an existing
        // one.
        let created = OpenOptions::new().write(true).create_new(true).open(path);
        let is_new = match created {
            Ok(file) => {
                // Storage rejects a file without a size.
                file.set_len(MIN_FILE).with_context(|| format!("{name}: cannot be created"))?;
                true
            }
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => false,
            Err(error) => return Err(anyhow!("{name}: cannot be created: {error} (check the directory)")),
        };
        let new_file = Self { path: path.to_owned(), is_new };
        let metadata = fs::metadata(path).with_context(|| format!("{name}: cannot be read"))?;
        // An existing empty file, such as one of mktemp(1).
        if metadata.is_file() && metadata.len() == 0 {
            let file = OpenOptions::new().write(true).open(path);
            file.and_then(|file| file.set_len(MIN_FILE))
                .with_context(|| format!("{name}: cannot be created"))?;
        }
        let storage = opening::storage(path, OpenMode { write: true, ..OpenMode::default() })?;
        Ok((new_file, storage))
    }

    fn finish(mut self) {
        self.is_new = false;
    }
}

impl Drop for NewFile {
    fn drop(&mut self) {
        if self.is_new {
            let _ = fs::remove_file(&self.path);
        }
    }
}

const MIN_FILE: u64 = 512;
// Bytes at the start of a device or export that a new raw image clears, as qemu-img does: they
// contain the signature of every format.
const HEADER_BYTES: u64 = 512;

/// Creates the file and its metadata. Messages refer to the image as `name`.
pub(super) fn create_qcow2(path: &Path, options: &CreateOptions, name: &str) -> Result<(), CommandFailure> {
    let (file, storage) = NewFile::open(path)?;
    // The image's lock is taken first, so that two commands for one image do not share a data
    // file.
    let data = match &options.data_file {
        None => None,
        Some(data) => {
            let place = opening::resolve_backing(path, data)?;
            if place == path {
                return Err(CommandFailure::Usage(anyhow!(
                    "data_file={data}: is the image itself (name another)"
                )));
            }
            Some(NewFile::open(&place)?)
        }
    };
    let is_file = is_regular(path)?;
    let options = options.clone();
    let (data_file, data) = data.unzip();
    let work = async move {
        // Only after the locks are taken: an image in use must not be truncated.
        if is_file {
            empty(&storage).await?;
        }
        if let Some(data) = &data {
            empty(data).await?;
        }
        Ok(qcow2::create::create(&storage, data.as_ref(), &options).await)
    };
    on_reactor(work)?.with_context(|| name.to_owned())?;
    // Complete: from now on a drop leaves the file.
    file.finish();
    if let Some(file) = data_file {
        file.finish();
    }
    Ok(())
}

fn is_regular(path: &Path) -> anyhow::Result<bool> {
    if opening::is_nbd_uri(path) {
        return Ok(false);
    }
    let kind = fs::metadata(path).with_context(|| format!("{}: cannot be read", path.display()))?.file_type();
    Ok(!kind.is_block_device())
}

/// Truncates a file, so that the new image reads as zeroes where nothing is written. Devices keep
/// their size.
async fn empty(storage: &Storage) -> anyhow::Result<()> {
    if storage.size_bytes() <= MIN_FILE {
        return Ok(());
    }
    let min_bytes = u64::from(storage.block_size().minimum).max(MIN_FILE);
    match storage.resize(min_bytes).await {
        Ok(()) | Err(storage::ResizeError::BlockDevice { .. }) => Ok(()),
        Err(error) => Err(error).context("cannot be emptied"),
    }
}

/// Creates a raw image. Messages refer to it as `name`.
pub(super) fn create_raw(
    path: &Path,
    size: u64,
    preallocation: Preallocation,
    name: &str,
) -> Result<(), CommandFailure> {
    let size = size.next_multiple_of(512);
    if preallocation == Preallocation::Metadata {
        return Err(CommandFailure::Usage(anyhow!(
            "{name}: preallocation=metadata: raw images have no metadata"
        )));
    }
    let (file, storage) = NewFile::open(path)?;
    let is_file = is_regular(path)?;
    on_reactor(async move {
        if is_file {
            empty(&storage).await?;
            storage.write_zeroes(0, storage.size_bytes(), ZEROES).await?;
            if size > 0 {
                storage.resize(size).await.context("cannot have this size")?;
            }
        } else if storage.size_bytes() < size {
            return Err(CommandFailure::Failed(anyhow!(
                "has {} bytes, but the image needs {size}",
                storage.size_bytes()
            )));
        } else {
            // Otherwise the header of an earlier image would decide the format that a later
            // command probes.
            let header = IoBuffer::zeroed(HEADER_BYTES.min(storage.size_bytes()) as usize);
            storage.write(0, header.into(), Durability::Cached).await?;
        }
        match preallocation {
            Preallocation::Off | Preallocation::Metadata => {}
            Preallocation::Falloc => {
                storage.write_zeroes(0, size, ZeroOptions { may_unmap: false, ..ZEROES }).await?;
            }
            Preallocation::Full => fill(&storage, size).await?,
        }
        Ok(storage.flush().await?)
    })
    .map_err(|failure| named(failure, name))?;
    if size == 0 && is_file {
        // Only a file can be a disk of zero bytes; storage does not resize to zero.
        let emptied = OpenOptions::new().write(true).open(path).and_then(|file| file.set_len(0));
        emptied.with_context(|| format!("{name}: cannot be emptied"))?;
    }
    file.finish();
    Ok(())
}

const ZEROES: ZeroOptions =
    ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };

async fn fill(storage: &Storage, size: u64) -> anyhow::Result<()> {
    const PIECE: u64 = 1 << 20;
    let mut at = 0;
    while at < size {
        let length = PIECE.min(size - at) as usize;
        storage.write(at, IoBuffer::zeroed(length).into(), Durability::Cached).await?;
        at += length as u64;
    }
    Ok(())
}

fn named(failure: CommandFailure, name: &str) -> CommandFailure {
    match failure {
        CommandFailure::Failed(error) => CommandFailure::Failed(error.context(name.to_owned())),
        other => other,
    }
}

/// The line that qemu-img prints.
fn formatting(name: &str, options: &CreateOptions) -> String {
    let switch = |is_on: bool| if is_on { "on" } else { "off" };
    let compression = match options.compression {
        CompressionType::Zlib => "zlib",
        CompressionType::Zstd => "zstd",
    };
    let mut line = format!(
        "Formatting '{name}', fmt=qcow2 cluster_size={} extended_l2={} \
         compression_type={compression} size={}",
        options.cluster_bytes,
        switch(options.extended_l2),
        options.size_bytes
    );
    if options.version < 3 {
        line += " compat=0.10";
    }
    if let Some(BackingReference { name, format }) = &options.backing {
        line += &format!(" backing_file={name}");
        if let Some(format) = format {
            line += &format!(" backing_fmt={format}");
        }
    }
    if let Some(data) = &options.data_file {
        line += &format!(" data_file={data} data_file_raw={}", switch(options.data_file_raw));
    }
    if options.luks.is_some() {
        line += " encrypt.format=luks";
    }
    line += &format!(
        " lazy_refcounts={} refcount_bits={}",
        switch(options.lazy_refcounts),
        options.refcount_bits
    );
    sanitize(&line)
}
