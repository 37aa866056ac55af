//! `weir image bitmap`: persistent dirty bitmaps of a qcow2 image, with the options of `qemu-img
//! bitmap`.

use std::path::PathBuf;

use anyhow::{Context as _, anyhow};
use clap::{ArgAction, ArgMatches, Args, FromArgMatches};
use console::{CommandFailure, on_reactor};
use image::qcow2::{Qcow2Image, bitmap::DirtyBits};
use storage::ImageFormat;

use super::{
    image_args::{NamedImage, NamingArgs, named},
    opening::{self, OpenMode},
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image bitmap --add -g 64K vm1.qcow2 since-monday
      Record writes from now on.
  weir image bitmap --disable --merge monday --merge tuesday vm1.qcow2 week
      Stop recording in week, then add the marks of monday and tuesday, in this order.
  weir image bitmap --remove vm1.qcow2 since-monday

A bitmap that its last user did not store (in-use) may be inconsistent; it can only be removed.
Exit status: 0 done, 1 failed, 2 wrong use of the command line.";

#[derive(Clone, Debug, PartialEq, Eq)]
enum BitmapAction {
    Add,
    Remove,
    Clear,
    Enable,
    Disable,
    Merge(String),
}

#[derive(Debug, Args)]
struct BitmapOptions {
    /// Image
    #[arg(value_name = "FILE", value_parser = opening::image_name())]
    file: PathBuf,
    /// Name of the bitmap
    #[arg(value_name = "BITMAP")]
    bitmap: String,
    /// Granularity of a new bitmap in bytes, a power of two [default: the cluster size, at least
    /// 4K]
    #[arg(short, long, value_name = "SIZE", value_parser = settings::size, requires = "add")]
    granularity: Option<u64>,
    /// Image with the bitmaps to merge [default: FILE]
    #[arg(short = 'b', long, value_name = "FILE", value_parser = opening::image_name())]
    source_file: Option<PathBuf>,
    /// Format of the source image: qcow2
    #[arg(short = 'F', long, value_name = "FORMAT", requires = "source_file", value_parser = opening::format_option())]
    source_format: Option<ImageFormat>,
    /// Format of the image: qcow2
    #[arg(short, long, value_name = "FORMAT", value_parser = opening::format_option())]
    format: Option<ImageFormat>,
    #[command(flatten)]
    naming: NamingArgs,
}

#[derive(Debug, Args)]
#[group(required = true, multiple = true)]
#[command(next_help_heading = "Actions, run in the order given")]
struct BitmapActions {
    /// Add the bitmap and start to record
    #[arg(long, action = ArgAction::Count)]
    add: u8,
    /// Remove the bitmap
    #[arg(long, action = ArgAction::Count)]
    remove: u8,
    /// Clear all marks
    #[arg(long, action = ArgAction::Count)]
    clear: u8,
    /// Start to record writes
    #[arg(long, action = ArgAction::Count)]
    enable: u8,
    /// Stop recording writes
    #[arg(long, action = ArgAction::Count)]
    disable: u8,
    /// Add the marks of bitmap SOURCE; repeatable
    #[arg(long, value_name = "SOURCE")]
    merge: Vec<String>,
}

/// The options of `weir image bitmap`.
#[derive(Debug)]
pub struct BitmapArgs {
    options: BitmapOptions,
    actions: Vec<BitmapAction>,
}

impl FromArgMatches for BitmapArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let options = BitmapOptions::from_arg_matches(matches)?;
        let flags = [
            ("add", BitmapAction::Add),
            ("remove", BitmapAction::Remove),
            ("clear", BitmapAction::Clear),
            ("enable", BitmapAction::Enable),
            ("disable", BitmapAction::Disable),
        ];
        // The order of actions is significant, so clap's indices restore the order of the command
        // line.
        let mut actions: Vec<(usize, BitmapAction)> = Vec::new();
        for (name, action) in flags {
            if matches.get_count(name) > 0 {
                actions.extend(matches.indices_of(name).into_iter().flatten().map(|at| (at, action.clone())));
            }
        }
        let merges = matches.get_many::<String>("merge").into_iter().flatten();
        let indices = matches.indices_of("merge").into_iter().flatten();
        actions.extend(indices.zip(merges).map(|(at, source)| (at, BitmapAction::Merge(source.clone()))));
        actions.sort_by_key(|(at, _)| *at);
        Ok(Self { options, actions: actions.into_iter().map(|(_, action)| action).collect() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for BitmapArgs {
    fn augment_args(command: clap::Command) -> clap::Command {
        BitmapActions::augment_args(BitmapOptions::augment_args(command))
    }

    fn augment_args_for_update(command: clap::Command) -> clap::Command {
        Self::augment_args(command)
    }
}

pub(crate) fn run(arguments: BitmapArgs) -> Result<(), CommandFailure> {
    let BitmapArgs { options, actions } = arguments;
    let objects = options.naming.objects()?;
    let image = options.naming.named(&options.file, options.format, &objects)?;
    objects.check_used().map_err(|message| CommandFailure::Usage(anyhow!(message)))?;
    // As in qemu-img, --image-opts applies to FILE only.
    let source = options.source_file.as_ref();
    let source = source.map(|file| named(file, options.source_format, false, &objects)).transpose()?;
    let name = image.name();
    for image in [Some(&image), source.as_ref()].into_iter().flatten() {
        if image.format()? != ImageFormat::Qcow2 {
            return Err(anyhow!(
                "{}: raw images have no bitmaps (convert it with `weir image convert -O qcow2`)",
                image.name()
            )
            .into());
        }
    }
    if let Some(granularity) = options.granularity.filter(|size| !size.is_power_of_two()) {
        return Err(CommandFailure::Usage(anyhow!("--granularity {granularity}: is not a power of two")));
    }
    on_reactor(async move {
        // For maintenance: no key is needed, and bitmaps do not begin to record.
        let storage = image.storage(OpenMode { write: true, ..OpenMode::default() })?;
        let image = Qcow2Image::open_for_maintenance(storage).await.with_context(|| name.clone())?;
        let done = apply_action(&image, source.as_ref(), &options, &actions).await;
        // Closed even after an error: actions that succeeded are kept.
        let closed = image.close().await;
        done.with_context(|| name.clone())?;
        closed.with_context(|| name.clone())?;
        Ok(())
    })
}

async fn apply_action(
    image: &Qcow2Image,
    source_image: Option<&NamedImage>,
    options: &BitmapOptions,
    actions: &[BitmapAction],
) -> anyhow::Result<()> {
    let bitmap = &options.bitmap;
    for action in actions {
        match action {
            BitmapAction::Add => {
                let cluster = image.header().cluster_bytes().max(4096);
                let granularity = options.granularity.unwrap_or(cluster);
                image.add_bitmap(bitmap, granularity.trailing_zeros()).await?;
            }
            BitmapAction::Remove => image.remove_bitmap(bitmap).await?,
            BitmapAction::Clear => image.clear_bitmap(bitmap).await?,
            BitmapAction::Enable => image.enable_bitmap(bitmap, true).await?,
            BitmapAction::Disable => image.enable_bitmap(bitmap, false).await?,
            BitmapAction::Merge(source) => {
                let bits = source_bits(image, source_image, source).await?;
                image.merge_bitmap(bitmap, &bits).await?;
            }
        }
    }
    Ok(())
}

async fn source_bits(
    image: &Qcow2Image,
    source_image: Option<&NamedImage>,
    source: &str,
) -> anyhow::Result<DirtyBits> {
    let Some(source_image) = source_image else { return Ok(image.bitmap_bits(source).await?) };
    let context = || source_image.name();
    let storage = source_image.storage(OpenMode::default())?;
    let other = Qcow2Image::open_for_maintenance(storage).await.with_context(context)?;
    other.bitmap_bits(source).await.with_context(context)
}
