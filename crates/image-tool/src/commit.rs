//! `weir image commit`: moves the content of an image down into its backing file, as `qemu-img
//! commit` does.
//!
//! The backing file is complete and flushed before anything is removed from the image: if the
//! command fails at any point, the image still contains the same disk.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use anyhow::{Context as _, bail};
use clap::Args;
use console::{CommandFailure, on_reactor, print};
use image::{Image, open::MAX_CHAIN};
use storage::{CacheMode, ImageFormat};

use super::{
    copy, disk,
    image_args::{ImageArg, NamedImage, with_secrets},
    keys::{PassphraseArgs, PassphraseSet},
    opening::{self, OpenMode},
    progress::ProgressArgs,
    source::CopySource,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image commit -f qcow2 snapshot.qcow2
      Commit to the backing file; the image is empty afterwards.
  weir image commit -f qcow2 -d -b base.qcow2 newest.qcow2
      Commit to an image further down, with the images between; newest.qcow2 is not changed.

Exit status: 0 done, 1 failed, 2 wrong use of the command line.";

/// The options of `weir image commit`.
#[derive(Debug, Args)]
pub struct CommitArgs {
    #[command(flatten)]
    image: ImageArg,
    /// Image of the backing chain to commit to, together with the images between, relative to the
    /// image's directory; implies -d [default: the backing file]
    #[arg(short, long, value_name = "FILE")]
    base: Option<String>,
    /// Do not empty the image afterwards
    #[arg(short, long)]
    drop: bool,
    /// Cache mode: writeback, writethrough, none, directsync or unsafe
    #[arg(short = 't', long, value_name = "MODE", default_value_t, value_parser = settings::parse::<CacheMode>)]
    cache: CacheMode,
    /// Write rate limit in bytes per second
    #[arg(short, long, value_name = "SIZE", value_parser = settings::size)]
    rate_limit: Option<u64>,
    #[command(flatten)]
    keys: PassphraseArgs,
    #[command(flatten)]
    progress: ProgressArgs,
}

const TASKS: usize = 8;
const UNIT: u64 = 1 << 20;

pub(crate) fn run(arguments: CommitArgs) -> Result<(), CommandFailure> {
    let image = arguments.image.named()?;
    image.check_backing()?;
    let keys = with_secrets(arguments.keys.read()?, &[&image])?;
    on_reactor(async move {
        let name = image.name();
        let layers = layers(&image, &arguments).await?;
        commit(&image, &layers, &arguments, keys).await.with_context(|| name)?;
        if !arguments.progress.quiet {
            print("Image committed.\n")?;
        }
        Ok(())
    })
}

type ChainLayer = (PathBuf, ImageFormat);

/// Images from the given one down to the target of the commit.
async fn layers(subject: &NamedImage, arguments: &CommitArgs) -> anyhow::Result<Vec<ChainLayer>> {
    let mut layers = vec![(subject.path.clone(), subject.format_of_chain().await?)];
    let base =
        arguments.base.as_deref().map(|base| opening::resolve_backing(&subject.path, base)).transpose()?;
    loop {
        let (path, format) = layers.last().context("the first is there")?.clone();
        let name = path.display().to_string();
        let backing = backing_file(&path, format).await?;
        let Some((below, below_format)) = backing else {
            let reason = match &arguments.base {
                Some(base) => {
                    format!(
                        "{base} is not in the backing chain (`weir image info --backing-chain` \
                         shows the chain)"
                    )
                }
                None => "has no backing file (there is nothing to commit to)".to_owned(),
            };
            bail!("{name}: {reason}");
        };
        // Compared by file, not by name: the chain may name it differently.
        let is_base = base.as_ref().is_none_or(|base| opening::is_same(&below, base));
        layers.push((below, below_format));
        if is_base {
            check_end(&layers).await?;
            return Ok(layers);
        }
        if layers.len() == MAX_CHAIN {
            bail!("{name}: the chain of backing files is longer than {MAX_CHAIN} images");
        }
    }
}

/// Backing file of an image.
async fn backing_file(path: &Path, format: ImageFormat) -> anyhow::Result<Option<ChainLayer>> {
    match format {
        ImageFormat::Raw => Ok(None),
        ImageFormat::Qcow2 => opening::backing_in(path, &opening::header_of(path).await?),
    }
}

/// Fails if the backing chain below these images leads back to one of them.
async fn check_end(layers: &[ChainLayer]) -> anyhow::Result<()> {
    let mut seen: Vec<PathBuf> = Vec::new();
    for (path, format) in layers {
        let mut next = Some((path.clone(), *format));
        // Only the chain of the last image has not been read yet.
        let is_last = seen.len() + 1 == layers.len();
        while let Some((path, format)) = next {
            if seen.iter().any(|other| opening::is_same(other, &path)) {
                bail!(
                    "{}: is in its own backing chain, which is a loop (set another backing file with \
                     `weir image rebase -u`)",
                    path.display()
                );
            }
            next = if is_last && seen.len() < MAX_CHAIN { backing_file(&path, format).await? } else { None };
            seen.push(path);
        }
    }
    Ok(())
}

async fn commit(
    named_image: &NamedImage,
    layers: &[ChainLayer],
    arguments: &CommitArgs,
    mut keys: PassphraseSet,
) -> anyhow::Result<()> {
    let Some(((base_path, base_format), above)) = layers.split_last() else { bail!("there is no image") };
    let mode = OpenMode {
        cache: arguments.cache,
        write: true,
        rate_bps: arguments.rate_limit,
        ..OpenMode::default()
    };
    let mut sources = Vec::new();
    for (index, (path, format)) in above.iter().enumerate() {
        // Only the first image is written to. All are opened without backing files: each
        // contributes its own content.
        let mode = OpenMode { write: index == 0, without_backing: true, rate_bps: None, ..mode };
        let mode = if index == 0 { named_image.open_mode(mode)? } else { mode };
        sources.push((path.display().to_string(), disk::open(path, Some(*format), mode, &mut keys).await?));
    }
    let base = disk::open(base_path, Some(*base_format), mode, &mut keys).await?;
    keys.check_used()?;
    let size = sources.iter().map(|(_, image)| image.size_bytes()).max().unwrap_or(0);
    let base_bytes = base.size_bytes();
    // Grown before copying; the added range reads as zeroes.
    if base_bytes < size {
        base.resize(size).await.with_context(|| format!("{}: cannot be grown", base_path.display()))?;
    }
    // Each layer is walked completely.
    let total = size * sources.len() as u64;
    let progress = Arc::new(arguments.progress.progress("committing", total));
    // From the lowest image upwards, so that newer content overwrites older. Beyond the end of the
    // image below, each hides the content of the target.
    let mut below_bytes = base_bytes;
    for source in sources.iter().rev() {
        let layer = CopySource::new([source.clone()]).layer_on(below_bytes);
        let copied = copy::copy(layer, Arc::clone(&base), copy_options(), Arc::clone(&progress)).await;
        copied.with_context(|| format!("{}: committing to it failed", base_path.display()))?;
        below_bytes = source.1.size_bytes();
    }
    // Durable before the image is emptied: otherwise a crash could lose both copies.
    base.flush().await.with_context(|| format!("{}: cannot be flushed", base_path.display()))?;
    base.close().await.with_context(|| format!("{}: cannot be completed", base_path.display()))?;
    let (_, top) = &sources[0];
    // Emptied last. With -b the images between are not changed, so the top keeps its content.
    if let (false, None, Image::Qcow2(top)) = (arguments.drop, &arguments.base, &**top) {
        top.make_empty().await.context("everything was committed, but the image could not be emptied")?;
    }
    top.close().await?;
    progress.end();
    Ok(())
}

fn copy_options() -> copy::CopyOptions {
    copy::CopyOptions {
        hides_backing: false,
        tasks: TASKS,
        in_order: false,
        compressed: false,
        target_is_zero: false,
        may_unmap: true,
        // Zeroes must overwrite the target, including those that are stored as data.
        sparse: 65_536,
        grain: 65_536,
        // Only the image's own content: around it the target is already correct.
        align: 1,
        unit: UNIT,
        salvage: false,
        quiet: false,
    }
}
