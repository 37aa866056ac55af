//! `weir image rebase`: changes the backing file of an image, as `qemu-img rebase` does.
//!
//! Unallocated ranges in which the old and the new backing file differ are copied into the image
//! first, so its content is the same before, during and after the command. With `-u` only the name
//! changes.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, anyhow, bail};
use clap::Args;
use console::{CommandFailure, on_reactor};
use image::{
    Image, Qcow2Image,
    open::MAX_CHAIN,
    qcow2::{GuestMapping, MappedRun, header::BackingReference},
};
use reactor::buffer::{IoBuffer, zero::is_zero};
use storage::{CacheMode, Durability, ImageFormat};

use super::{
    disk::{self, AllocationUnits, ExtentKind},
    image_args::{ImageArg, NamedImage, with_secrets},
    keys::{PassphraseArgs, PassphraseSet},
    opening::{self, OpenMode},
    progress::ProgressArgs,
    source::CopySource,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image rebase -f qcow2 -b new-base.qcow2 -F qcow2 vm1.qcow2
      Change the backing file. Where the two differ, the old content is copied into vm1.qcow2.
  weir image rebase -f qcow2 -b '' vm1.qcow2
      Remove the backing file: vm1.qcow2 then holds the whole disk.
  weir image rebase -f qcow2 -u -b /images/base.qcow2 -F qcow2 vm1.qcow2
      Record another name of the same backing file.

Exit status: 0 done, 1 failed, 2 wrong use of the command line.";

/// The options of `weir image rebase`.
#[derive(Debug, Args)]
pub struct RebaseArgs {
    #[command(flatten)]
    image: ImageArg,
    /// New backing file, relative to the image's directory; '' for none
    #[arg(short, long, value_name = "FILE")]
    backing: String,
    /// Format of the new backing file
    #[arg(short = 'F', long, value_name = "FORMAT", value_parser = opening::format_option())]
    backing_format: Option<ImageFormat>,
    /// Change only the name in the image; both files must have the same content, and neither needs
    /// to exist
    #[arg(short, long)]
    unsafe_backing: bool,
    /// Cache mode of the image: writeback, writethrough, none, directsync or unsafe
    #[arg(short = 't', long, value_name = "MODE", default_value_t, value_parser = settings::parse::<CacheMode>)]
    cache: CacheMode,
    /// Cache mode of the backing files
    #[arg(short = 'T', long, value_name = "MODE", default_value_t, value_parser = settings::parse::<CacheMode>)]
    source_cache: CacheMode,
    /// Read the backing files even if another process writes to them
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    keys: PassphraseArgs,
    #[command(flatten)]
    progress: ProgressArgs,
}

// The largest cluster: smaller pieces could not become zero clusters as a whole.
const STEP_BYTES: u64 = 2 << 20;

pub(crate) fn run(arguments: RebaseArgs) -> Result<(), CommandFailure> {
    let image = arguments.image.named()?;
    image.check_backing()?;
    let name = image.name();
    let backing = match (arguments.backing.as_str(), arguments.backing_format) {
        ("", _) => None,
        (_, None) => {
            let message = "the format of the new backing file is missing (-F raw or -F qcow2)";
            return Err(CommandFailure::Usage(anyhow!("{name}: {message}")));
        }
        (backing, Some(format)) => Some((backing.to_owned(), format)),
    };
    let keys = with_secrets(arguments.keys.read()?, &[&image])?;
    on_reactor(async move {
        if image.format_of_chain().await? == ImageFormat::Raw {
            return Err(CommandFailure::Usage(anyhow!("{name}: raw images have no backing file")));
        }
        Ok(rebase(&image, &arguments, backing, keys).await.with_context(|| name)?)
    })
}

async fn rebase(
    named_image: &NamedImage,
    arguments: &RebaseArgs,
    backing: Option<(String, ImageFormat)>,
    mut keys: PassphraseSet,
) -> anyhow::Result<()> {
    let mode = OpenMode { cache: arguments.cache, write: true, ..OpenMode::default() };
    let file = &named_image.path;
    let reference = backing
        .clone()
        .map(|(name, format)| BackingReference { name, format: Some(format.name().to_owned()) });
    if arguments.unsafe_backing {
        if let Some((name, _)) = &backing {
            opening::check_name(file, name)?;
        }
        let qcow2 = Qcow2Image::open_for_maintenance(named_image.storage(mode)?).await?;
        qcow2.set_backing(reference).await.context("its header cannot be changed")?;
        return Ok(qcow2.close().await?);
    }
    if let Some((name, format)) = &backing {
        check_no_loop(file, opening::resolve_backing(file, name)?, *format).await?;
    }
    let image = disk::open(file, Some(ImageFormat::Qcow2), named_image.open_mode(mode)?, &mut keys).await?;
    let Image::Qcow2(qcow2) = &*image else { unreachable!("it was opened as qcow2") };
    let sources = BackingPair::open(file, arguments, backing.as_ref(), &mut keys).await?;
    keys.check_used()?;
    // The header changes last: until then the image still reads from the old backing file.
    sources.copy_differences(qcow2, arguments).await?;
    qcow2.flush().await?;
    qcow2.set_backing(reference).await.context("its header cannot be changed")?;
    Ok(qcow2.close().await?)
}

/// Fails if the image is in its new backing chain. Opening it would only report a lock held by
/// this command.
async fn check_no_loop(file: &Path, backing: PathBuf, format: ImageFormat) -> anyhow::Result<()> {
    let mut next = Some((backing, format));
    // Bounded: the new chain itself may contain a loop.
    for _ in 0..MAX_CHAIN {
        let Some((path, format)) = next else { break };
        if opening::is_same(&path, file) {
            bail!("{}: would be its own backing file (choose another)", file.display());
        }
        next = match format {
            ImageFormat::Raw => None,
            ImageFormat::Qcow2 => opening::backing_in(&path, &opening::header_of(&path).await?)?,
        };
    }
    Ok(())
}

struct BackingPair {
    old: Option<CopySource>,
    new: Option<CopySource>,
}

impl BackingPair {
    async fn open(
        file: &Path,
        arguments: &RebaseArgs,
        new: Option<&(String, ImageFormat)>,
        keys: &mut PassphraseSet,
    ) -> anyhow::Result<Self> {
        let mode = OpenMode {
            cache: arguments.source_cache,
            force_share: arguments.force_share,
            ..OpenMode::default()
        };
        let source = async |path: &Path, format, keys: &mut PassphraseSet| -> anyhow::Result<CopySource> {
            let image = disk::open(path, Some(format), mode, keys).await?;
            Ok(CopySource::new([(path.display().to_string(), image)]))
        };
        let header = opening::header_of(file).await?;
        let old = match opening::backing_in(file, &header)? {
            Some((path, format)) => {
                Some(source(&path, format, &mut keys.backing_passphrases(&header)).await?)
            }
            None => None,
        };
        let new = match new {
            Some((name, format)) => {
                Some(source(&opening::resolve_backing(file, name)?, *format, keys).await?)
            }
            None => None,
        };
        Ok(Self { old, new })
    }

    /// Copies the ranges in which the old backing file differs from the new one.
    async fn copy_differences(&self, image: &Qcow2Image, arguments: &RebaseArgs) -> anyhow::Result<()> {
        let size = image.size_bytes();
        let blocks = AllocationUnits::of(image);
        let progress = arguments.progress.progress("rebasing", size);
        let mut at = 0;
        while at < size {
            for MappedRun { length, mapping } in image.map(at, size - at).await? {
                let end = at + length;
                // Only unallocated ranges read from the backing file, so only they can change.
                while mapping == GuestMapping::Unallocated && at < end {
                    let next = end.min((at / STEP_BYTES + 1) * STEP_BYTES);
                    self.copy_range(image, at, next, blocks).await?;
                    progress.advance(next - at);
                    at = next;
                }
                progress.advance(end - at);
                at = end;
            }
        }
        progress.end();
        Ok(())
    }

    /// Copies the differences in a range. Zeroes of the old backing file become zero clusters if
    /// the format has them.
    async fn copy_range(
        &self,
        image: &Qcow2Image,
        start: u64,
        end: u64,
        blocks: AllocationUnits,
    ) -> anyhow::Result<()> {
        let length = (end - start) as usize;
        let old = content(self.old.as_ref(), start, length).await?;
        let new = content(self.new.as_ref(), start, length).await?;
        if old.is_none() && new.is_none() {
            return Ok(());
        }
        // A missing backing file, and one that ends earlier, read as zeroes.
        let [old, new] = [old, new].map(|content| content.unwrap_or_else(|| IoBuffer::zeroed(length)));
        let (mut at, size) = (0, image.size_bytes());
        while at < length {
            let (next, offset) = (end_of_block(start, at, length, blocks.cluster), start + at as u64);
            // The disk's last cluster may be shorter.
            let is_whole_cluster = offset.is_multiple_of(blocks.cluster)
                && ((next - at) as u64 == blocks.cluster || start + next as u64 == size);
            let cluster = at..next;
            let differs = old[cluster.clone()] != new[cluster.clone()];
            if differs && is_whole_cluster && image.header().version >= 3 && is_zero(&old[cluster.clone()]) {
                let hidden = image.write_zero_clusters(offset, cluster.len() as u64).await;
                hidden.with_context(|| format!("hiding {} bytes at {offset}", cluster.len()))?;
            } else if differs {
                // Equal subclusters stay unallocated.
                for part in differences(&old, &new, start, cluster, blocks.subcluster) {
                    let (offset, bytes) = (start + part.start as u64, IoBuffer::copy_of(&old[part.clone()]));
                    let written = image.write(offset, bytes.into(), Durability::Cached).await;
                    written.with_context(|| format!("writing {} bytes at {offset}", part.len()))?;
                }
            }
            at = next;
        }
        Ok(())
    }
}

/// Blocks inside `range` in which two contents that begin at `start` differ; adjacent ones are
/// merged.
fn differences(old: &[u8], new: &[u8], start: u64, range: Range<usize>, block: u64) -> Vec<Range<usize>> {
    let mut found: Vec<Range<usize>> = Vec::new();
    let mut at = range.start;
    while at < range.end {
        let next = end_of_block(start, at, range.end, block);
        if old[at..next] != new[at..next] {
            match found.last_mut() {
                Some(last) if last.end == at => last.end = next,
                _ => found.push(at..next),
            }
        }
        at = next;
    }
    found
}

/// End of the block that contains byte `at` of a content that begins at `start`; `end` at most.
fn end_of_block(start: u64, at: usize, end: usize, block: u64) -> usize {
    let into = (start + at as u64) % block;
    end.min(at + (block - into) as usize)
}

/// Content of a backing file, with zeroes beyond its end; `None` if it reports zeroes for the
/// whole range.
async fn content(source: Option<&CopySource>, start: u64, length: usize) -> anyhow::Result<Option<IoBuffer>> {
    let Some(source) = source else { return Ok(None) };
    // A backing file may be shorter than the image.
    let available = source.size_bytes().saturating_sub(start).min(length as u64);
    let (mut at, mut data) = (0, false);
    while at < available && !data {
        for (length, kind) in source.status(start + at, available - at).await? {
            at += length;
            data |= kind == ExtentKind::Data;
        }
    }
    if !data {
        return Ok(None);
    }
    let mut bytes = IoBuffer::zeroed(length);
    bytes[..available as usize].copy_from_slice(&source.read(start, available as usize).await?);
    Ok(Some(bytes))
}
