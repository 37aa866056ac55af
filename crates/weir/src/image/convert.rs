//! `weir image convert`: copies a disk into a new image, with the options of `qemu-img convert`.
//!
//! The new image gets its name when it is complete ([`unfinished`](super::unfinished)): whatever ends the command, nothing half-made has it.
//!
//! Compressed clusters are packed by all processors and written as they become ready; `-W` is about plain ones.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, anyhow, bail};
use block::{
    image::{Image, qcow2::create::CreateOptions},
    storage::CacheMode,
};
use clap::Args;

use super::{
    copy, create, disk, on_reactor,
    opening::{Format, How},
    options::Options,
    progress::Progress,
    source::Source,
    unfinished::{Interruption, Unfinished},
};
use crate::{Failure, plan};

/// Shown below the options.
pub(super) const EXAMPLES: &str = "\
Examples:
  weir image convert -O qcow2 vm1.raw vm1.qcow2
      The same disk as qcow2. Holes and zeroes take no room in it.
  weir image convert -f qcow2 -O qcow2 -c -o compression_type=zstd vm1.qcow2 archive.qcow2
      Compressed, on all processors.
  weir image convert -f qcow2 -O raw -m 16 -W -p vm1.qcow2 /dev/vg/vm1
      Onto a device, 16 requests at a time in any order, and how far it has come.

The new image has its name once it is complete; until then, and if the command is interrupted, the name is what it was.
Exit status: 0 copied, 1 failed, 2 wrong use of the command line.";

/// What `weir image convert` is told.
#[derive(Debug, Args)]
pub(crate) struct Arguments {
    /// What is copied, several one behind the other as one disk; and last where to
    #[arg(value_name = "FILE", num_args = 2.., required = true)]
    files: Vec<PathBuf>,
    /// The source's format [default: as its signature says]
    #[arg(short, long, value_name = "FORMAT")]
    format: Option<Format>,
    /// The new image's format
    #[arg(short = 'O', long, value_name = "FORMAT", default_value = "raw")]
    output_format: Format,
    /// Options of the new image, such as cluster_size=2M,lazy_refcounts=on; `weir image create -o help` lists them
    #[arg(short, value_name = "OPTIONS", conflicts_with = "no_create")]
    options: Vec<String>,
    /// Compress every cluster; qcow2 alone
    #[arg(short, long)]
    compress: bool,
    /// The new image's backing file, whose content what the source does not have itself must be
    #[arg(short = 'B', short_alias = 'b', long, value_name = "FILE", conflicts_with = "no_create")]
    backing: Option<String>,
    /// The backing file's format
    #[arg(short = 'F', long, value_name = "FORMAT", requires = "backing")]
    backing_format: Option<Format>,
    /// Write into an image that is there
    #[arg(short, long)]
    no_create: bool,
    /// That image reads as zeroes, so zeroes need not be written
    #[arg(long, requires = "no_create")]
    target_is_zero: bool,
    /// Leave out zeroes in runs of at least so many bytes; 0 leaves out none, and the new image is allocated throughout
    #[arg(short = 'S', long, value_name = "SIZE", default_value = "4K", value_parser = plan::size)]
    sparse_size: u64,
    /// Requests at a time, from 1 to 64
    #[arg(short = 'm', long, value_name = "N", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    parallel: u8,
    /// Write in any order, which is faster; what was written first may then not lie first
    #[arg(short = 'W', long)]
    out_of_order: bool,
    /// Bytes to write per second at most
    #[arg(short, long, value_name = "SIZE", value_parser = plan::size)]
    rate_limit: Option<u64>,
    /// The page cache for the new image: writeback, writethrough, none, directsync or unsafe
    #[arg(short = 't', long, value_name = "MODE", default_value = "unsafe", value_parser = plan::read::<CacheMode>)]
    cache: CacheMode,
    /// The page cache for the source
    #[arg(short = 'T', long, value_name = "MODE", default_value_t, value_parser = plan::read::<CacheMode>)]
    source_cache: CacheMode,
    /// Write zeroes for what cannot be read, and say so
    #[arg(long)]
    salvage: bool,
    /// Read the source although somebody else writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Show how far it has come
    #[arg(short, long)]
    progress: bool,
    /// Print nothing but errors
    #[arg(short, long)]
    quiet: bool,
}

/// Bytes that one task copies in one go: QEMU's figure, and the largest cluster.
const UNIT: u64 = 2 << 20;
/// The block of most file systems.
const FILE_BLOCK: u64 = 4096;

/// Copies.
///
/// # Errors
/// Whatever keeps it from being done; the target's name then stands for what it stood for.
pub(crate) fn run(arguments: Arguments) -> Result<(), Failure> {
    let (target, sources) = arguments.files.split_last().context("two files were required")?;
    check(&arguments).map_err(Failure::Usage)?;
    let interruption = Interruption::watch()?;
    let source = open_sources(sources, &arguments)?;
    let size = source.size_bytes();
    if arguments.no_create {
        return on_reactor(copy_into(source, target.clone(), target.clone(), arguments, None));
    }
    let place = Unfinished::new(target, &interruption)?;
    let wish = make(&place, target, size, &arguments)?;
    let zero = place.is_new() && wish.as_ref().is_none_or(|wish| wish.backing.is_none());
    let path = place.path().to_owned();
    on_reactor(copy_into(source, path, target.clone(), arguments, Some(zero)))?;
    Ok(place.finish()?)
}

fn check(arguments: &Arguments) -> anyhow::Result<()> {
    let raw = arguments.output_format == Format::Raw;
    if raw && arguments.compress {
        bail!("-c: raw images cannot be compressed (use -O qcow2)");
    }
    if raw && arguments.backing.is_some() {
        bail!("-B: raw images have no backing file (use -O qcow2)");
    }
    if !arguments.sparse_size.is_multiple_of(512) || arguments.sparse_size > UNIT {
        bail!("-S {}: is no multiple of 512 up to {UNIT}", arguments.sparse_size);
    }
    if arguments.rate_limit == Some(0) {
        bail!("-r 0: nothing would ever be written (leave it away for no limit)");
    }
    Ok(())
}

fn open_sources(paths: &[PathBuf], arguments: &Arguments) -> Result<Source, Failure> {
    let how = How { cache: arguments.source_cache, force_share: arguments.force_share, ..How::default() };
    let (paths, format) = (paths.to_vec(), arguments.format);
    let only_top = arguments.backing.is_some();
    on_reactor(async move {
        let mut images = Vec::new();
        for path in paths {
            images.push((path.display().to_string(), disk::open(&path, format, how).await?));
        }
        let source = Source::new(images);
        Ok(if only_top { source.only_top() } else { source })
    })
}

/// Makes the new image; for qcow2, what it was asked to be.
fn make(
    place: &Unfinished,
    target: &Path,
    size: u64,
    arguments: &Arguments,
) -> Result<Option<CreateOptions>, Failure> {
    let name = target.display().to_string();
    let usage = |text: String| Failure::Usage(anyhow!("{name}: {text}"));
    let mut options = Options::read(&arguments.options).map_err(usage)?;
    let larger = options.take_size("size").map_err(usage)?;
    let size = larger.unwrap_or(size);
    match arguments.output_format {
        Format::Raw => {
            let preallocation = create::preallocation(&mut options).map_err(usage)?.unwrap_or_default();
            options.finish("raw").map_err(usage)?;
            create::create_raw(place.path(), size, preallocation, &name)?;
            Ok(None)
        }
        Format::Qcow2 => {
            let backing = (arguments.backing.clone(), arguments.backing_format);
            let mut wish = create::qcow2_options(&mut options, backing).map_err(usage)?;
            options.finish("qcow2").map_err(usage)?;
            wish.size_bytes = size;
            let wish = wish.checked().map_err(|rule| usage(rule.to_string()))?;
            create::create_qcow2(place.path(), &wish, &name)?;
            Ok(Some(wish))
        }
    }
}

/// Copies into the image at `path`, which is going to be called `name`. `new_is_zero`: whether a new one reads as zeroes; `None` for one that
/// was there.
async fn copy_into(
    source: Source,
    path: PathBuf,
    name: PathBuf,
    arguments: Arguments,
    new_is_zero: Option<bool>,
) -> Result<(), Failure> {
    let name = name.display().to_string();
    let how = How { cache: arguments.cache, write: true, rate_bps: arguments.rate_limit, ..How::default() };
    let target = disk::open(&path, Some(arguments.output_format), how).await?;
    let (size, room) = (source.size_bytes(), target.size_bytes());
    if room < size {
        return Err(anyhow!("{name}: has {room} bytes, and the source {size} (resize it first)").into());
    }
    let progress =
        Arc::new(Progress::new(&format!("copying to {name}"), size, arguments.progress, arguments.quiet));
    let how = how_to_copy(&target, &arguments, new_is_zero.unwrap_or(arguments.target_is_zero));
    copy::copy(source, Arc::clone(&target), how, Arc::clone(&progress))
        .await
        .with_context(|| format!("{name}: copying failed"))?;
    close(&target).await.with_context(|| format!("{name}: cannot be completed"))?;
    progress.end();
    Ok(())
}

/// Ends the use of the image: everything is where it belongs, and on stable storage as far as the cache mode cares.
async fn close(image: &Image) -> block::error::Result<()> {
    image.flush().await?;
    image.close().await
}

fn how_to_copy(target: &Image, arguments: &Arguments, target_is_zero: bool) -> copy::How {
    let sparse = arguments.sparse_size;
    let blocks = disk::blocks(target);
    // Less than a file's block saves nothing; and who asks for less than that is given it.
    let grain =
        blocks.map_or(FILE_BLOCK.min(sparse.next_power_of_two().max(512)), |blocks| blocks.subcluster);
    let align = blocks.map_or(grain, |blocks| blocks.cluster);
    let unit = if arguments.compress { align } else { UNIT };
    copy::How {
        tasks: arguments.parallel.into(),
        in_order: !arguments.out_of_order && !arguments.compress,
        compressed: arguments.compress,
        target_is_zero,
        sparse: sparse as usize,
        grain: if arguments.compress { align } else { grain } as usize,
        align,
        unit,
        salvage: arguments.salvage,
    }
}
