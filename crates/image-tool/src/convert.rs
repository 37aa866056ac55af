//! `weir image convert`: copies a disk into a new image, with the options of `qemu-img convert`.
//!
//! The new image gets its name when it is complete (`temporary_target`). Compressed clusters are
//! always written out of order, as soon as they are ready; `-W` concerns uncompressed ones.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use console::{CommandFailure, on_reactor, print, signal_cleanup::SignalCleanup};
use image::{
    Image,
    qcow2::{create::Preallocation, header::EncryptionMethod},
};
use storage::{CacheMode, ImageFormat};

use super::{
    bitmap_copy::BitmapCopier,
    copy, create, disk,
    encrypt::{Encryption, SecretObjects},
    image_args::{NamedImage, NamingArgs, named, with_secrets},
    keys::{self, PassphraseArgs, PassphraseSet},
    opening::{self, OpenMode},
    options::FormatOptions,
    progress::ProgressArgs,
    snapshot_selector::SnapshotSelector,
    source::CopySource,
    temporary_target::UnfinishedFile,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image convert -O qcow2 vm1.raw vm1.qcow2
      Convert to qcow2. Holes and zeroes take no space in the new image.
  weir image convert -f qcow2 -O qcow2 -c -o compression_type=zstd vm1.qcow2 archive.qcow2
      Compress, on all processors.
  weir image convert -l before-upgrade -O qcow2 --bitmaps vm1.qcow2 vm2.qcow2
      Copy the content of a snapshot, with the bitmaps of incremental backups.
  weir image convert -O qcow2 -o encrypt.format=luks --target-secret-file key vm1.raw vm1.qcow2
      Encrypt the new image; --secret-file decrypts an encrypted source.
  weir image convert -f qcow2 -O raw -m 16 -W -p vm1.qcow2 /dev/vg/vm1
      Copy to a device, with 16 requests in flight, out of order, with progress.

The new image gets its name when it is complete. If the command fails or is interrupted, an existing file remains.
If the command is killed with SIGKILL, an incomplete copy remains (.NAME.….unfinished) and can be deleted.
Exit status: 0 copied, 1 failed, 2 wrong use of the command line.";

/// The options of `weir image convert`.
#[derive(Debug, Args)]
pub struct ImageConvertArgs {
    /// Source images, concatenated to one disk if several; the last FILE is the target
    #[arg(value_name = "FILE", value_parser = opening::image_name())]
    files: Vec<PathBuf>,
    /// Format of the source [default: detected]
    #[arg(short, long, value_name = "FORMAT", value_parser = opening::format_option())]
    format: Option<ImageFormat>,
    /// Format of the new image [default: raw]
    #[arg(short = 'O', long, value_name = "FORMAT", value_parser = opening::format_option())]
    output_format: Option<ImageFormat>,
    /// Options of the new image, such as cluster_size=2M,lazy_refcounts=on; help lists all
    #[arg(short, value_name = "OPTIONS", conflicts_with = "no_create")]
    options: Vec<String>,
    /// Read this internal snapshot instead of the current disk: its id or name, or
    /// snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT", value_parser = settings::parse::<SnapshotSelector>)]
    snapshot: Option<SnapshotSelector>,
    /// Copy the persistent bitmaps as well; only from qcow2 to qcow2
    #[arg(long)]
    bitmaps: bool,
    /// Skip bitmaps that may be inconsistent
    #[arg(long, requires = "bitmaps")]
    skip_broken_bitmaps: bool,
    /// Compress every cluster; only for qcow2
    #[arg(short, long)]
    compress: bool,
    /// Backing file of the new image: its content must equal the source where the source is
    /// unallocated; with -n, the backing file that the target has, or gets later with `rebase -u`
    #[arg(short = 'B', short_alias = 'b', long, value_name = "FILE")]
    backing: Option<String>,
    /// Format of the backing file
    #[arg(short = 'F', long, value_name = "FORMAT", requires = "backing", value_parser = opening::format_option())]
    backing_format: Option<ImageFormat>,
    /// Write into an existing image
    #[arg(short, long)]
    no_create: bool,
    /// The existing image reads as zeroes, so zeroes need not be written
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// Skip runs of zeroes of at least SIZE bytes; 0 skips none, and the new image is fully
    /// allocated
    #[arg(short = 'S', long, value_name = "SIZE", default_value = "4K", value_parser = settings::size)]
    sparse_size: u64,
    /// Number of requests in flight, from 1 to 64
    #[arg(short = 'm', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    parallel: u8,
    /// Write out of order, which is faster, but may fragment the new image
    #[arg(short = 'W', long)]
    out_of_order: bool,
    /// Write rate limit in bytes per second
    #[arg(short, long, value_name = "SIZE", value_parser = settings::size)]
    rate_limit: Option<u64>,
    /// Cache mode of the new image: writeback, writethrough, none, directsync or unsafe
    #[arg(short = 't', long, value_name = "MODE", default_value = "unsafe", value_parser = settings::parse::<CacheMode>)]
    cache: CacheMode,
    /// Cache mode of the source
    #[arg(short = 'T', long, value_name = "MODE", default_value_t, value_parser = settings::parse::<CacheMode>)]
    source_cache: CacheMode,
    /// Write zeroes for unreadable ranges, and report them
    #[arg(long)]
    salvage: bool,
    /// Read the source even if another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    keys: PassphraseArgs,
    #[command(flatten)]
    target_keys: TargetKeyArgs,
    #[command(flatten)]
    naming: NamingArgs,
    /// Parse the last FILE, an existing image, as options of QEMU's block drivers
    #[arg(long, requires = "no_create", conflicts_with = "output_format")]
    target_image_opts: bool,
    #[command(flatten)]
    progress: ProgressArgs,
}

#[derive(Debug, Args)]
struct TargetKeyArgs {
    /// Passphrase of the new image (-o encrypt.format=luks) or of the existing one; then those of
    /// its backing files
    #[arg(long, value_name = "FILE")]
    target_secret_file: Vec<PathBuf>,
    /// Open file descriptor to read the passphrase from
    #[arg(long, value_name = "N", conflicts_with = "target_secret_file")]
    target_secret_fd: Vec<u32>,
}

impl TargetKeyArgs {
    fn is_given(&self) -> bool {
        !(self.target_secret_file.is_empty() && self.target_secret_fd.is_empty())
    }
}

// Largest item of a copy in bytes, unless a cluster is larger. With items of 2 MiB, as in QEMU, the
// data of all tasks is no longer in the processor's cache when it is written.
const UNIT: u64 = 512 << 10;
// Largest run of zeroes that -S can require, as in QEMU.
const MAX_SPARSE: u64 = 2 << 20;
// Block size of most file systems.
const FILE_BLOCK: u64 = 4096;

pub(crate) fn run(arguments: ImageConvertArgs) -> Result<(), CommandFailure> {
    if FormatOptions::ask_for_help(&arguments.options) {
        return Ok(print(create::OPTIONS)?);
    }
    let Some((target, sources)) = arguments.files.split_last().filter(|(_, sources)| !sources.is_empty())
    else {
        let message =
            anyhow!("two files are required, a source and a target (weir image convert --help has examples)");
        return Err(CommandFailure::Usage(message));
    };
    let options = FormatOptions::read(&arguments.options);
    let options =
        options.map_err(|message| CommandFailure::Usage(anyhow!("{}: {message}", target.display())))?;
    // Both forms of the option: only then do unallocated ranges of the source stay unallocated.
    let has_backing = arguments.backing.is_some() || options.has("backing_file");
    let objects = arguments.naming.objects()?;
    let source = |file: &PathBuf| arguments.naming.named(file, arguments.format, &objects);
    let sources = sources.iter().map(source).collect::<Result<Vec<_>, _>>()?;
    // A name with `json:` describes an existing image as well.
    let target_image = named(target, arguments.output_format, arguments.target_image_opts, &objects)?;
    let output_format = match (target_image.format, arguments.target_image_opts) {
        (Some(format), _) => format,
        (None, false) => ImageFormat::Raw,
        // Not probed: a guest may have written the header.
        (None, true) => {
            let message = "the format of the target is missing (add driver=raw or driver=qcow2)";
            return Err(CommandFailure::Usage(anyhow!("{}: {message}", target.display())));
        }
    };
    check(&arguments, output_format, &sources, has_backing).map_err(CommandFailure::Usage)?;
    let is_file = !opening::is_remote_or_null(&target_image.path) && target_image.path == *target;
    if !arguments.no_create && !is_file {
        let message =
            anyhow!("{}: weir cannot create images there (create it first, and add -n)", target.display());
        return Err(CommandFailure::Usage(message));
    }
    let target = &target_image.path;
    // Writing to the source would destroy it before it is read.
    if sources.iter().any(|source| opening::is_same(&source.path, target)) {
        let message =
            anyhow!("{}: is both source and target (give the new image another name)", target.display());
        return Err(CommandFailure::Usage(message));
    }
    // From here on signals remove the unfinished file.
    let cleanup = SignalCleanup::start()?;
    let (source, bitmap_copier) = open_sources(sources, has_backing, &arguments)?;
    let target_keys =
        keys::read(&arguments.target_keys.target_secret_file, &arguments.target_keys.target_secret_fd)?;
    if arguments.no_create {
        objects.check_used().map_err(|message| CommandFailure::Usage(anyhow!(message)))?;
        let target_keys = with_secrets(target_keys, &[&target_image])?;
        let target = ConvertTarget {
            name: target.clone(),
            image: target_image,
            format: output_format,
            is_zero: arguments.target_is_zero,
        };
        return on_reactor(copy_into(source, bitmap_copier, target, target_keys, arguments));
    }
    // The target is written under a temporary name, so a failure leaves the previous file.
    let place = UnfinishedFile::new(target, &cleanup)?;
    let secrets = TargetSecrets { keys: target_keys, objects };
    let created =
        create_target(&place, target, source.size_bytes(), secrets, output_format, options, &arguments)?;
    let target = ConvertTarget {
        image: NamedImage::plain(place.path().to_owned(), Some(output_format)),
        name: target.clone(),
        format: output_format,
        is_zero: place.is_new() && !created.has_backing,
    };
    on_reactor(copy_into(source, bitmap_copier, target, created.keys, arguments))?;
    Ok(place.finish()?)
}

fn check(
    arguments: &ImageConvertArgs,
    output_format: ImageFormat,
    sources: &[NamedImage],
    has_backing: bool,
) -> anyhow::Result<()> {
    let raw = output_format == ImageFormat::Raw;
    if raw && arguments.compress {
        bail!("-c: raw images cannot be compressed (use -O qcow2)");
    }
    if raw && arguments.backing.is_some() {
        bail!("-B: raw images have no backing file (use -O qcow2)");
    }
    if raw && arguments.bitmaps {
        bail!("--bitmaps: raw images have no bitmaps (use -O qcow2)");
    }
    if raw && arguments.target_keys.is_given() {
        bail!("raw images are not encrypted (use -O qcow2; --secret-file is for the source)");
    }
    if sources.len() > 1 && arguments.bitmaps {
        bail!("--bitmaps: several images as one disk have no bitmaps (copy them one by one)");
    }
    if sources.len() > 1 && has_backing {
        bail!("-B: several images as one disk have no backing file (copy them one by one)");
    }
    if sources.len() > 1 && arguments.snapshot.is_some() {
        bail!("-l: applies to a single image (copy them one by one)");
    }
    if !arguments.sparse_size.is_multiple_of(512) || arguments.sparse_size > MAX_SPARSE {
        bail!("-S {}: is not a multiple of 512 up to {MAX_SPARSE}", arguments.sparse_size);
    }
    if arguments.rate_limit == Some(0) {
        bail!("-r 0: must be above 0 (leave it out for no limit)");
    }
    Ok(())
}

fn open_sources(
    sources: Vec<NamedImage>,
    has_backing: bool,
    arguments: &ImageConvertArgs,
) -> Result<(CopySource, Option<BitmapCopier>), CommandFailure> {
    let mode =
        OpenMode { cache: arguments.source_cache, force_share: arguments.force_share, ..OpenMode::default() };
    let selector = arguments.snapshot.clone();
    let bitmaps = arguments.bitmaps;
    let skip_broken = arguments.skip_broken_bitmaps;
    let mut keys = with_secrets(arguments.keys.read()?, &sources.iter().collect::<Vec<_>>())?;
    on_reactor(async move {
        let mut images = Vec::new();
        for source in sources {
            let image = source.open_at(mode, &mut keys, selector.as_ref()).await?;
            images.push((source.name(), image));
        }
        keys.check_used()?;
        let bitmap_copier = match &images[..] {
            [(name, image)] if bitmaps => Some(BitmapCopier::of(image, name, skip_broken).await?),
            _ => None,
        };
        // Unallocated ranges stay unallocated: the new image reads them from its own backing file.
        let below_bytes = images.first().and_then(|(_, image)| image.backing()).map_or(0, Image::size_bytes);
        let source = CopySource::new(images);
        Ok((if has_backing { source.layer_on(below_bytes) } else { source }, bitmap_copier))
    })
}

/// Secrets that a new image may be encrypted with.
struct TargetSecrets {
    keys: PassphraseSet,
    objects: SecretObjects,
}

struct CreatedTarget {
    has_backing: bool,
    keys: PassphraseSet,
}

fn create_target(
    place: &UnfinishedFile,
    target: &Path,
    size: u64,
    secrets: TargetSecrets,
    output_format: ImageFormat,
    mut options: FormatOptions,
    arguments: &ImageConvertArgs,
) -> Result<CreatedTarget, CommandFailure> {
    let TargetSecrets { keys, objects } = secrets;
    let name = target.display().to_string();
    let usage = |text: String| CommandFailure::Usage(anyhow!("{name}: {text}"));
    let larger = options.take_size("size").map_err(usage)?;
    // `-o size=` may enlarge the copy; the added range reads as zeroes.
    let size = larger.unwrap_or(size);
    match output_format {
        ImageFormat::Raw => {
            if objects.has_unused() {
                return Err(usage("--object: raw images are not encrypted (use -O qcow2)".to_owned()));
            }
            let preallocation = create::preallocation(&mut options).map_err(usage)?.unwrap_or_default();
            create::take_hints(&mut options).map_err(usage)?;
            options.finish("raw").map_err(usage)?;
            create::create_raw(place.path(), size, preallocation, &name)?;
            Ok(CreatedTarget { has_backing: false, keys: PassphraseSet::default() })
        }
        ImageFormat::Qcow2 => {
            let create_options =
                create::qcow2_options(&mut options, arguments.backing.clone(), arguments.backing_format);
            let mut create_options = create_options.map_err(usage)?;
            let encryption = Encryption::take(&mut options, keys.first(), &objects);
            let encryption = encryption.map_err(usage)?;
            options.finish("qcow2").map_err(usage)?;
            // With a backing file the passphrase may be that of the backing file.
            if encryption.is_none() && create_options.backing.is_none() && keys.first().is_some() {
                let message = "a passphrase was given without encrypt.format=luks";
                return Err(usage(message.to_owned()));
            }
            if arguments.compress && create_options.preallocation != Preallocation::Off {
                let message =
                    "-c: compressed clusters cannot be preallocated (leave out preallocation, or -c)";
                return Err(usage(message.to_owned()));
            }
            create_options.size_bytes = size;
            let mut create_options = create_options.checked().map_err(|rule| usage(rule.to_string()))?;
            if let Some(encryption) = &encryption {
                create_options.luks = Some(encryption.area().map_err(|why| anyhow!("{name}: {why}"))?);
            }
            create::create_qcow2(place.path(), &create_options, &name)?;
            let own_keys =
                encryption.filter(|_| keys.first().is_none()).map(|own| PassphraseSet::one(own.secret));
            Ok(CreatedTarget {
                has_backing: create_options.backing.is_some(),
                keys: own_keys.unwrap_or(keys),
            })
        }
    }
}

struct ConvertTarget {
    image: NamedImage,
    name: PathBuf,
    format: ImageFormat,
    is_zero: bool,
}

async fn copy_into(
    source: CopySource,
    bitmap_copier: Option<BitmapCopier>,
    target: ConvertTarget,
    mut keys: PassphraseSet,
    arguments: ImageConvertArgs,
) -> Result<(), CommandFailure> {
    let name = target.name.display().to_string();
    let mode = OpenMode {
        cache: arguments.cache,
        write: true,
        rate_bps: arguments.rate_limit,
        ..OpenMode::default()
    };
    let path = &target.image.path;
    let image = disk::open(path, Some(target.format), target.image.open_mode(mode)?, &mut keys).await?;
    keys.check_used()?;
    let (size, available) = (source.size_bytes(), image.size_bytes());
    if available < size {
        return Err(anyhow!("{name}: has {available} bytes, and the source {size} (resize it first)").into());
    }
    let hides_backing = check_target(&image, path, &arguments).with_context(|| name.clone())?;
    if let Some(bitmap_copier) = &bitmap_copier {
        bitmap_copier.check_target(&image).await.with_context(|| name.clone())?;
    }
    let progress = Arc::new(arguments.progress.progress(&format!("copying to {name}"), size));
    let copy_options = copy::CopyOptions {
        hides_backing,
        may_unmap: !target.image.keeps_place,
        ..how_to_copy(&image, &arguments, target.is_zero)
    };
    copy::copy(source, Arc::clone(&image), copy_options, Arc::clone(&progress))
        .await
        .with_context(|| format!("{name}: copying failed"))?;
    // Flushed before the file gets its name, so that the name never refers to incomplete data.
    image.flush().await.with_context(|| format!("{name}: cannot be completed"))?;
    image.close().await.with_context(|| format!("{name}: cannot be completed"))?;
    drop(image);
    if let Some(bitmap_copier) = &bitmap_copier {
        // After the disk: storing a bitmap opens the closed image again.
        bitmap_copier.store(path).await.with_context(|| format!("{name}: --bitmaps"))?;
    }
    progress.end();
    Ok(())
}

/// Checks that the options fit the target. Returns true if the target gets its backing file later.
fn check_target(target: &Image, path: &Path, arguments: &ImageConvertArgs) -> anyhow::Result<bool> {
    let Image::Qcow2(qcow2) = target else { return Ok(false) };
    let header = qcow2.header();
    let mut is_attached_later = false;
    if let (true, Some(backing)) = (arguments.no_create, &arguments.backing) {
        opening::check_name(path, backing)?;
        let current = header.backing.as_ref().map(|own| opening::referenced_path(path, &own.name));
        match current {
            Some(current) if opening::is_same(&current, &opening::referenced_path(path, backing)) => {}
            Some(current) => bail!(
                "-B {backing}: the target has the backing file {}, so data of {backing} would be \
                 missing (leave -B out, or set the backing file with `weir image rebase -u` first)",
                current.display()
            ),
            None if arguments.target_is_zero => bail!(
                "--target-is-zero: zeroes must be written to hide the content of {backing} (leave it out)"
            ),
            None => {
                is_attached_later = true;
                console::print_notice(&format!(
                    "{}: -B {backing}: the target has no backing file yet (set it with `weir image \
                     rebase -u`; until then, data of {backing} reads as zeroes)",
                    path.display()
                ));
            }
        }
    }
    if arguments.compress && header.crypt != EncryptionMethod::None {
        bail!("-c: an encrypted image has no compressed clusters (leave out -c, or the encryption)");
    }
    if arguments.compress && header.has_data_file() {
        bail!("-c: an image with an external data file has no compressed clusters (leave out one of them)");
    }
    if arguments.target_is_zero && header.backing.is_some() {
        bail!("--target-is-zero: the image has a backing file, so it may not read as zeroes (leave it out)");
    }
    Ok(is_attached_later)
}

fn how_to_copy(target: &Image, arguments: &ImageConvertArgs, target_is_zero: bool) -> copy::CopyOptions {
    let sparse = arguments.sparse_size;
    let blocks = disk::blocks(target);
    // Less than a file system block saves nothing, unless the user selects finer runs with -S.
    let grain =
        blocks.map_or(FILE_BLOCK.min(sparse.next_power_of_two().max(512)), |blocks| blocks.subcluster);
    let align = blocks.map_or(grain, |blocks| blocks.cluster);
    let unit = if arguments.compress { align } else { UNIT.max(align).max(sparse.next_power_of_two()) };
    copy::CopyOptions {
        hides_backing: false,
        tasks: arguments.parallel.into(),
        in_order: !arguments.out_of_order && !arguments.compress,
        compressed: arguments.compress,
        target_is_zero,
        may_unmap: true,
        sparse: sparse as usize,
        grain: if arguments.compress { align } else { grain } as usize,
        align,
        unit,
        salvage: arguments.salvage,
        quiet: arguments.progress.quiet,
    }
}
