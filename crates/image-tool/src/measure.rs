//! `weir image measure`: size of the file that an image needs, as printed by `qemu-img measure`.
//!
//! ```text
//!   header, refcounts, L1, all L2 tables, LUKS header │ clusters with data   required
//!                                                     │ all clusters         fully allocated
//!   bitmap directory, tables, bits                                           bitmaps
//! ```
//!
//! Based on the allocation of the source. Guest data is never read, so zeroes that are stored as
//! data count as data.

use std::{ops::Range, path::PathBuf, sync::Arc};

use anyhow::{Context as _, anyhow};
use clap::Args;
use console::{CommandFailure, on_reactor, print};
use image::{
    Image,
    qcow2::{GuestMapping, MappedRun, bitmap, create::Preallocation},
};
use serde::Serialize;
use storage::ImageFormat;

use super::{
    ImageOutput, ImageOutputArgs, create,
    disk::ExtentKind,
    encrypt::{self, SecretObjects},
    image_args::{NamedImage, NamingArgs, with_secrets},
    keys::PassphraseArgs,
    map,
    opening::{self, OpenMode},
    options::FormatOptions,
    qemu_format,
    snapshot_selector::SnapshotSelector,
    source::CopySource,
    sparse,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image measure -O qcow2 vm1.raw
      Size of a qcow2 file with the data of vm1.raw, and of a fully allocated one.
  weir image measure -O qcow2 -o cluster_size=2M --size 1T --output=json
      The same for an empty disk of 1 TiB, in the JSON form of qemu-img.

Exit status: 0 shown, 1 failed, 2 wrong use of the command line.";

/// The options of `weir image measure`.
#[derive(Debug, Args)]
pub struct MeasureArgs {
    /// Image to be copied
    #[arg(value_name = "FILE", value_parser = opening::image_name(), conflicts_with = "size")]
    file: Option<PathBuf>,
    /// Format of the image [default: detected]
    #[arg(short, long, value_name = "FORMAT", value_parser = opening::format_option())]
    format: Option<ImageFormat>,
    /// Measure an empty disk of this size instead
    #[arg(long, value_name = "SIZE", value_parser = settings::size)]
    size: Option<u64>,
    /// Format of the new image
    #[arg(short = 'O', long, value_name = "FORMAT", default_value = "raw", value_parser = opening::format_option())]
    output_format: ImageFormat,
    /// Options of the new image, such as cluster_size=2M,preallocation=full; help lists all
    #[arg(short, value_name = "OPTIONS")]
    options: Vec<String>,
    /// Measure this internal snapshot instead of the current disk: its id or name, or
    /// snapshot.id=ID,snapshot.name=NAME
    #[arg(short = 'l', long, value_name = "SNAPSHOT", value_parser = settings::parse::<SnapshotSelector>)]
    snapshot: Option<SnapshotSelector>,
    #[command(flatten)]
    output: ImageOutputArgs,
    /// Read the image even if another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    keys: PassphraseArgs,
    #[command(flatten)]
    naming: NamingArgs,
}

pub(crate) fn run(arguments: MeasureArgs) -> Result<(), CommandFailure> {
    if FormatOptions::ask_for_help(&arguments.options) {
        return Ok(print(create::OPTIONS)?);
    }
    let usage = |message: String| CommandFailure::Usage(anyhow!(message));
    let objects = arguments.naming.objects()?;
    let file = arguments.file.as_ref();
    let file = file.map(|file| arguments.naming.named(file, arguments.format, &objects)).transpose()?;
    let target = MeasureTarget::read(&arguments, &objects).map_err(usage)?;
    objects.check_used().map_err(usage)?;
    let measured = match (file, arguments.size) {
        (Some(file), _) => measure_file(file, target, &arguments)?,
        (None, Some(size)) => {
            let has_file_options = arguments.format.is_some() || arguments.snapshot.is_some();
            if has_file_options || arguments.force_share || arguments.naming.image_opts {
                let message = "-f, -l, -U and --image-opts apply to FILE, not to --size";
                return Err(CommandFailure::Usage(anyhow!(message)));
            }
            arguments.keys.read()?.check_used()?;
            target.measure(size, &MeasuredContents::default())?
        }
        (None, None) => {
            let message = "no FILE was named and no --size given (weir image measure --help has examples)";
            return Err(CommandFailure::Usage(anyhow!(message)));
        }
    };
    print(&match arguments.output.kind() {
        ImageOutput::Human => measured.text(),
        ImageOutput::Json => qemu_format::json(&measured),
    })?;
    Ok(())
}

fn measure_file(
    file: NamedImage,
    target: MeasureTarget,
    arguments: &MeasureArgs,
) -> Result<MeasuredSize, CommandFailure> {
    let mode = OpenMode { force_share: arguments.force_share, ..OpenMode::default() };
    let selector = arguments.snapshot.clone();
    let mut keys = with_secrets(arguments.keys.read()?, &[&file])?;
    on_reactor(async move {
        let image = file.open_at(mode, &mut keys, selector.as_ref()).await?;
        keys.check_used()?;
        let bitmaps = match &*image {
            Image::Qcow2(qcow2) if qcow2.header().version >= 3 => {
                Some(qcow2.bitmaps().await.with_context(|| file.name())?)
            }
            _ => None,
        };
        let size = image.size_bytes();
        let sparse = match &*image {
            Image::Qcow2(qcow2) => sparse::is_sparse(&file.path, &qcow2.header()).await?,
            Image::Raw(_) => false,
        };
        let holes_of = sparse.then(|| Arc::clone(&image));
        let source = CopySource::new([(file.name(), image)]);
        let mut contents = MeasuredContents { bitmaps, is_of_image: true, data_clusters: 0 };
        if let Some(cluster_bytes) = target.cluster_bytes() {
            contents.data_clusters = data_clusters(&source, holes_of.as_deref(), cluster_bytes).await?;
        }
        Ok(target.measure(size, &contents)?)
    })
}

/// Number of target clusters that data of the source touches. Clusters of `holes_of`, the source
/// itself, count as data only where its file has no hole.
async fn data_clusters(
    source: &CopySource,
    holes_of: Option<&Image>,
    cluster_bytes: u64,
) -> anyhow::Result<u64> {
    let size = source.size_bytes();
    let (mut at, mut next, mut count) = (0, 0, 0);
    let mut add = |range: Range<u64>| {
        // Ranges arrive in order; a cluster that two of them touch counts once.
        let first = (range.start / cluster_bytes).max(next);
        next = range.end.div_ceil(cluster_bytes);
        count += next.saturating_sub(first);
    };
    while at < size {
        for (length, kind) in source.status(at, size - at).await? {
            let end = at + length;
            match holes_of {
                Some(image) if kind == ExtentKind::Data => {
                    data_in_file(image, at..end).await?.into_iter().for_each(&mut add);
                }
                _ if kind == ExtentKind::Data => add(at..end),
                _ => {}
            }
            at = end;
        }
    }
    Ok(count)
}

/// Parts of a range of data that are not holes of the image's file.
async fn data_in_file(image: &Image, range: Range<u64>) -> anyhow::Result<Vec<Range<u64>>> {
    let Image::Qcow2(qcow2) = image else { return Ok(vec![range]) };
    let (mut at, mut data) = (range.start, Vec::new());
    while at < range.end {
        for MappedRun { length, mapping } in qcow2.map(at, range.end - at).await? {
            match mapping {
                GuestMapping::Data { host, .. } => {
                    let parts = map::extents_in_file(qcow2.storage(), host, length).await?;
                    let parts = parts.into_iter().filter(|(.., is_zero)| !is_zero);
                    data.extend(parts.map(|(into, length, _)| at + into..at + into + length));
                }
                _ => data.push(at..at + length),
            }
            at += length;
        }
    }
    Ok(data)
}

/// Contents of the new image; empty by default.
#[derive(Debug, Default)]
struct MeasuredContents {
    /// Bitmaps of the source; `None` if its format has none.
    bitmaps: Option<Vec<bitmap::BitmapEntry>>,
    is_of_image: bool,
    data_clusters: u64,
}

/// Format and options of the new image, without its size.
#[derive(Debug)]
enum MeasureTarget {
    Raw,
    Qcow2(Box<image::qcow2::create::CreateOptions>),
}

impl MeasureTarget {
    fn read(arguments: &MeasureArgs, objects: &SecretObjects) -> Result<Self, String> {
        let mut options = FormatOptions::read(&arguments.options)?;
        if options.has("size") {
            return Err("-o size: the size is that of FILE or --size (leave one of them out)".to_owned());
        }
        match arguments.output_format {
            ImageFormat::Raw => {
                let preallocation = create::preallocation(&mut options)?;
                if preallocation == Some(Preallocation::Metadata) {
                    return Err("preallocation=metadata: raw images have no metadata".to_owned());
                }
                create::take_hints(&mut options)?;
                if objects.has_unused() {
                    return Err("--object: raw images are not encrypted (use -O qcow2)".to_owned());
                }
                options.finish("raw")?;
                Ok(Self::Raw)
            }
            ImageFormat::Qcow2 => {
                let mut create_options = create::qcow2_options(&mut options, None, None)?;
                let luks_bytes = encrypt::luks_bytes(&mut options, objects)?;
                options.finish("qcow2")?;
                // Only the length of the LUKS header matters.
                create_options.luks = luks_bytes.map(|bytes| vec![0; usize::try_from(bytes).unwrap_or(0)]);
                Ok(Self::Qcow2(Box::new(create_options)))
            }
        }
    }

    fn cluster_bytes(&self) -> Option<u64> {
        match self {
            Self::Raw => None,
            Self::Qcow2(wish) => Some(wish.cluster_bytes),
        }
    }

    fn measure(&self, size: u64, contents: &MeasuredContents) -> anyhow::Result<MeasuredSize> {
        let Self::Qcow2(options) = self else {
            let size = size.checked_next_multiple_of(512).context("sizes are below 8E")?;
            return Ok(MeasuredSize { required: size, fully_allocated: size, bitmaps: None });
        };
        let mut options = options.checked()?;
        options.size_bytes = size;
        let options = options.checked()?;
        let cluster_bytes = options.cluster_bytes;
        let metadata = options.metadata_bytes()?;
        let fully_allocated = metadata + options.size_bytes.next_multiple_of(cluster_bytes);
        let is_allocated = matches!(options.preallocation, Preallocation::Falloc | Preallocation::Full);
        // It is unknown which zeroes would have to hide data of the backing file, so all clusters
        // count.
        let is_overlay = options.backing.is_some() && contents.is_of_image;
        let required = match is_allocated || is_overlay {
            true => fully_allocated,
            false => metadata + contents.data_clusters * cluster_bytes,
        };
        // Version 2 has no bitmaps; qemu-img then prints no size for them.
        let bitmaps = contents.bitmaps.as_ref().filter(|_| options.version >= 3);
        let bitmaps = bitmaps.map(|bitmaps| bitmap::copied_bytes(bitmaps, size, cluster_bytes));
        Ok(MeasuredSize { required, fully_allocated, bitmaps })
    }
}

/// `BlockMeasureInfo` of QEMU's qapi/block-core.json, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
struct MeasuredSize {
    required: u64,
    fully_allocated: u64,
    /// Additional bytes for bitmaps, if the source can have them and the new image can keep them.
    #[serde(skip_serializing_if = "Option::is_none")]
    bitmaps: Option<u64>,
}

impl MeasuredSize {
    fn text(self) -> String {
        let Self { required, fully_allocated, bitmaps } = self;
        let mut text = format!("required size: {required}\nfully allocated size: {fully_allocated}\n");
        if let Some(bitmaps) = bitmaps {
            text += &format!("bitmaps size: {bitmaps}\n");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, clap::Parser)]
    struct MeasureTestLine {
        #[command(flatten)]
        arguments: MeasureArgs,
    }

    fn measured(line: &str, contents: &MeasuredContents) -> MeasuredSize {
        let tokens = ["measure"].into_iter().chain(line.split(' '));
        let MeasureTestLine { arguments } = clap::Parser::try_parse_from(tokens).expect(line);
        let target = MeasureTarget::read(&arguments, &SecretObjects::default()).expect(line);
        target.measure(arguments.size.unwrap(), contents).expect(line)
    }

    #[test]
    fn sizes_are_those_of_qemu_img() {
        // Printed by qemu-img 7.2.
        for (line, required, fully_allocated) in [
            ("--size 1000", 1024, 1024),
            ("-O qcow2 --size 0", 196_608, 196_608),
            ("-O qcow2 --size 1000", 327_680, 393_216),
            ("-O qcow2 --size 1G", 393_216, 1_074_135_040),
            ("-O qcow2 --size 1.5G", 458_752, 1_611_071_488),
            ("-O qcow2 -o preallocation=falloc --size 1G", 1_074_135_040, 1_074_135_040),
            ("-O qcow2 -o cluster_size=512 --size 10M", 209_920, 10_695_680),
            ("-O qcow2 -o cluster_size=512,refcount_bits=64 --size 10G", 346_283_520, 11_083_701_760),
            ("-O qcow2 -o refcount_bits=1,cluster_size=2M --size 20T", 92_274_688, 21_990_324_830_208),
            ("-O qcow2 --size 2P", 343_650_009_088, 2_252_143_463_694_336),
            ("-O qcow2 -o refcount_bits=64 --size 2P", 549_890_228_224, 2_252_349_703_913_472),
            ("-O qcow2 -o cluster_size=2M --size 2000P", 10_737_472_765_952, 2_251_810_551_158_013_952),
            ("-O qcow2 -o backing_file=a,backing_fmt=raw --size 1G", 393_216, 1_074_135_040),
            ("-O qcow2 -o encrypt.format=luks --size 1G", 2_490_368, 1_076_232_192),
        ] {
            let expect = MeasuredSize { required, fully_allocated, bitmaps: None };
            assert_eq!(measured(line, &MeasuredContents::default()), expect, "{line}");
        }
    }

    #[test]
    fn bitmaps_need_their_bits_a_table_and_a_directory() {
        let entry = bitmap::BitmapEntry {
            table_offset: 0,
            table_entries: 1,
            flags: 0,
            granularity_bits: 16,
            name: b"b0".to_vec(),
            extra: Vec::new(),
        };
        let contents = MeasuredContents { bitmaps: Some(vec![entry]), is_of_image: true, data_clusters: 17 };
        let found = measured("-O qcow2 --size 1G", &contents);
        assert_eq!((found.required, found.bitmaps), (1_507_328, Some(196_608)));
        let text = "required size: 1507328\nfully allocated size: 1074135040\nbitmaps size: 196608\n";
        assert_eq!(found.text(), text);
        let found = measured("-O qcow2 -o cluster_size=2M --size 1G", &contents);
        assert_eq!(found.bitmaps, Some(6_291_456));
        assert_eq!(measured("-O qcow2 -o compat=0.10 --size 1G", &contents).bitmaps, None);
        let overlay = measured("-O qcow2 -o backing_file=a,backing_fmt=raw --size 1G", &contents);
        assert_eq!(overlay.required, overlay.fully_allocated);
    }
}
