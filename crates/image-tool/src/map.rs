//! `weir image map`: allocation of a disk through its backing chain, as printed by `qemu-img map`.
//!
//! Never reads guest data: zeroes are those that the file reports.

use std::fmt::Write as _;

use anyhow::{Context as _, bail};
use clap::Args;
use console::{CommandFailure, on_reactor, print};
use image::{
    Image, Qcow2Image,
    qcow2::{GuestMapping, MappedRun},
};
use reactor::sanitize::sanitize;
use storage::Storage;

use super::{
    ImageOutput, ImageOutputArgs, disk,
    image_args::{ImageArg, with_secrets},
    keys::PassphraseArgs,
    opening::OpenMode,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image map -f qcow2 vm1.qcow2
      Show the file and offset of all data.
  weir image map -f qcow2 --output=json -s 1G -l 64M vm1.qcow2
      Show 64 MiB from 1 GiB on, including zeroes and unallocated ranges, as JSON.

Exit status: 0 shown, 1 failed, 2 wrong use of the command line.";

/// The options of `weir image map`.
#[derive(Debug, Args)]
pub struct MapArgs {
    #[command(flatten)]
    image: ImageArg,
    #[command(flatten)]
    output: ImageOutputArgs,
    /// Offset of the first byte to show
    #[arg(short, long, value_name = "OFFSET", default_value = "0", value_parser = settings::size)]
    start_offset: u64,
    /// Number of bytes to show [default: to the end]
    #[arg(short = 'l', long, value_name = "SIZE", value_parser = settings::size)]
    max_length: Option<u64>,
    /// Read the image even if another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    #[command(flatten)]
    keys: PassphraseArgs,
}

pub(crate) fn run(arguments: MapArgs) -> Result<(), CommandFailure> {
    let named_image = arguments.image.named()?;
    let mut keys = with_secrets(arguments.keys.read()?, &[&named_image])?;
    on_reactor(async move {
        let name = named_image.name();
        let mode = OpenMode { force_share: arguments.force_share, ..OpenMode::default() };
        let image = named_image.open(mode, &mut keys).await?;
        keys.check_used()?;
        let size = image.size_bytes();
        let start = arguments.start_offset.min(size);
        let end = arguments.max_length.and_then(|length| start.checked_add(length)).unwrap_or(size).min(size);
        let mut map = ImageMap::default();
        map.add(&image, named_image.offset(), start, end)
            .await
            .with_context(|| format!("{name}: the allocation cannot be read"))?;
        if start == end {
            // An entry even for an empty range: scripts read the last entry.
            let name = disk::data_file(&image);
            map.0.push(MappedExtent {
                zero: false,
                ..MappedExtent::unallocated(arguments.start_offset, 0, 0, name)
            });
        }
        print(&match arguments.output.kind() {
            ImageOutput::Json => map.json(),
            ImageOutput::Human => map.text().with_context(|| name)?,
        })?;
        Ok(())
    })
}

/// A run of the disk: `MapEntry` of QEMU's qapi/block-core.json.
#[derive(Clone, Debug, PartialEq, Eq)]
struct MappedExtent {
    start: u64,
    length: u64,
    /// Position in the backing chain; 0 for the image itself.
    depth: u32,
    /// True if some image of the chain has it allocated.
    present: bool,
    zero: bool,
    data: bool,
    compressed: bool,
    /// Offset in the file.
    offset: Option<u64>,
    file: String,
}

impl MappedExtent {
    fn continues(&self, next: &Self) -> bool {
        let same = |entry: &Self| (entry.depth, entry.present, entry.zero, entry.data, entry.compressed);
        same(self) == same(next)
            && self.offset.map(|offset| offset + self.length) == next.offset
            // As in QEMU, adjacent entries merge only if they are adjacent in the file as well.
            && self.file == next.file
    }
}

#[derive(Debug, Default)]
struct ImageMap(Vec<MappedExtent>);

impl ImageMap {
    fn push(&mut self, entry: MappedExtent) {
        match self.0.last_mut() {
            Some(last) if last.continues(&entry) => last.length += entry.length,
            _ => self.0.push(entry),
        }
    }

    /// Adds a range of the chain. Iterative, with a stack: the image determines the depth of the
    /// chain. A raw disk begins at `offset` of its file.
    async fn add(&mut self, top: &Image, offset: u64, start: u64, end: u64) -> anyhow::Result<()> {
        let mut left = vec![(top, 0, start, end)];
        while let Some((image, depth, start, end)) = left.pop() {
            match image {
                _ if start == end => {}
                Image::Raw(_) => {
                    let offset = if depth == 0 { offset } else { 0 };
                    self.add_raw(image, depth, offset, start, end).await?;
                }
                Image::Qcow2(qcow2) => {
                    let file = disk::data_file(image);
                    let (covered, below) = self.add_qcow2(qcow2, &file, depth, start, end).await?;
                    // Pushed in reverse: the range of the backing file is processed before the
                    // rest of this image.
                    if covered < end {
                        left.push((image, depth, covered, end));
                    }
                    if let (Some((from, to)), Some(backing)) = (below, qcow2.backing()) {
                        left.push((backing, depth + 1, from, to));
                    }
                }
            }
        }
        Ok(())
    }

    async fn add_raw(
        &mut self,
        image: &Image,
        depth: u32,
        offset: u64,
        mut start: u64,
        end: u64,
    ) -> anyhow::Result<()> {
        while start < end {
            for extent in image.block_status(start, end - start).await? {
                let (zero, length) = (extent.zero, extent.length);
                self.push(MappedExtent {
                    present: true,
                    zero,
                    data: !zero,
                    offset: Some(offset + start),
                    ..MappedExtent::unallocated(start, length, depth, disk::data_file(image))
                });
                start += length;
            }
        }
        Ok(())
    }

    /// Adds the image's own pieces up to the first range that its backing file provides. Returns
    /// the end of the part that was covered, and that range.
    async fn add_qcow2(
        &mut self,
        qcow2: &Qcow2Image,
        file: &str,
        depth: u32,
        start: u64,
        end: u64,
    ) -> anyhow::Result<(u64, Option<(u64, u64)>)> {
        let encrypted = qcow2.header().encryption.is_some();
        let mut at = start;
        // A shorter backing file provides nothing beyond its end.
        let below_end = qcow2.backing().map_or(0, Image::size_bytes);
        for MappedRun { length, mapping } in qcow2.map(start, end - start).await? {
            let unallocated = MappedExtent::unallocated(at, length, depth, file.to_owned());
            at += length;
            let entry = match mapping {
                GuestMapping::Unallocated if unallocated.start < below_end => {
                    let end = at.min(below_end);
                    return Ok((end, Some((unallocated.start, end))));
                }
                GuestMapping::Unallocated => unallocated,
                GuestMapping::Zero { host } => MappedExtent { present: true, offset: host, ..unallocated },
                // No offset: the bytes in the file are not those of the guest.
                GuestMapping::Data { .. } if encrypted => {
                    MappedExtent { present: true, zero: false, data: true, ..unallocated }
                }
                GuestMapping::Data { host, .. } => {
                    // Holes of the file, as in preallocated clusters, are zeroes.
                    for (into, length, zero) in extents_in_file(qcow2.storage(), host, length).await? {
                        let start = unallocated.start + into;
                        let offset = Some(host + into);
                        self.push(MappedExtent {
                            start,
                            length,
                            present: true,
                            zero,
                            data: true,
                            offset,
                            ..unallocated.clone()
                        });
                    }
                    continue;
                }
                GuestMapping::Compressed { .. } => {
                    MappedExtent { present: true, zero: false, data: true, compressed: true, ..unallocated }
                }
            };
            self.push(entry);
        }
        Ok((at, None))
    }

    fn json(&self) -> String {
        let lines: Vec<_> = self.0.iter().map(MappedExtent::json).collect();
        format!("[{}]\n", lines.join(",\n"))
    }

    fn text(&self) -> anyhow::Result<String> {
        let mut text = format!("{:<16}{:<16}{:<16}{}\n", "Offset", "Length", "Mapped to", "File");
        for entry in self.0.iter().filter(|entry| entry.data && !entry.zero) {
            let Some(offset) = entry.offset else {
                bail!(
                    "has encrypted or compressed clusters, whose data has no plain location in the \
                     file (use --output=json)"
                );
            };
            let file = sanitize(&entry.file);
            let _ =
                writeln!(text, "{:<16}{:<16}{:<16}{file}", hex(entry.start), hex(entry.length), hex(offset));
        }
        Ok(text)
    }
}

/// Pieces of a range of the file, which may extend beyond its end: offset in the range, length,
/// and true if the piece is zeroes.
pub(super) async fn extents_in_file(
    storage: &Storage,
    offset: u64,
    length: u64,
) -> anyhow::Result<Vec<(u64, u64, bool)>> {
    let available = storage.size_bytes().saturating_sub(offset).min(length);
    let (mut at, mut pieces) = (0, Vec::new());
    while at < available {
        for extent in storage.block_status(offset + at, available - at).await? {
            pieces.push((at, extent.length, extent.zero));
            at += extent.length;
        }
    }
    if at < length {
        // Clusters beyond the end of the file read as zeroes.
        pieces.push((at, length - at, true));
    }
    Ok(pieces)
}

impl MappedExtent {
    fn unallocated(start: u64, length: u64, depth: u32, file: String) -> Self {
        Self {
            start,
            length,
            depth,
            present: false,
            zero: true,
            data: false,
            compressed: false,
            offset: None,
            file,
        }
    }

    fn json(&self) -> String {
        let Self { start, length, depth, present, zero, data, compressed, offset, .. } = self;
        let offset = offset.map_or_else(String::new, |offset| format!(", \"offset\": {offset}"));
        format!(
            "{{ \"start\": {start}, \"length\": {length}, \"depth\": {depth}, \"present\": \
             {present}, \"zero\": {zero}, \"data\": {data}, \"compressed\": {compressed}{offset}}}"
        )
    }
}

/// Number in the form of C's `%#x`.
fn hex(number: u64) -> String {
    if number == 0 { "0".to_owned() } else { format!("{number:#x}") }
}
