//! `weir image info`: shows the header of an image, with the fields of `qemu-img info`.
//!
//! Never reads guest data; follows backing files only with `--backing-chain`.

use std::{
    collections::HashSet,
    fmt::Write as _,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, bail};
use clap::Args;
use console::{CommandFailure, on_reactor, print};
use image::{
    open::MAX_CHAIN,
    qcow2::{
        self, MetadataError, bitmap,
        header::{Qcow2Header, autoclear},
        luks::{self, KeySlot, LuksHeader},
        snapshot::InternalSnapshot,
    },
};
use reactor::sanitize::sanitize;
use serde_json::{Map, Value, json};
use settings::image_info::add_header_facts;
use storage::{ImageFormat, Storage};

use super::{
    ImageOutput, ImageOutputArgs,
    image_args::ImageArg,
    opening::{self, OpenMode},
    qemu_format::{self, human},
    snapshot,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image info vm1.qcow2
      Size, format and features.
  weir image info --backing-chain --output=json vm1.qcow2
      The same for the image and its backing files, in the JSON form of qemu-img.

Exit status: 0 shown, 1 failed, 2 wrong use of the command line.";

/// The options of `weir image info`.
#[derive(Debug, Args)]
pub struct ImageInfoArgs {
    #[command(flatten)]
    image: ImageArg,
    #[command(flatten)]
    output: ImageOutputArgs,
    /// Show the backing files as well
    #[arg(long)]
    backing_chain: bool,
    /// Read the image even if another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
}

pub(crate) fn run(arguments: ImageInfoArgs) -> Result<(), CommandFailure> {
    let mode = OpenMode { force_share: arguments.force_share, ..OpenMode::default() };
    let image = arguments.image.named()?;
    let file = &image.path;
    let mut shown = vec![show(file, image.format, image.open_mode(mode)?)?];
    if arguments.backing_chain {
        let mut seen = HashSet::from([identity(file)?]);
        let mut overlay = file.clone();
        while let Some((name, format)) = shown.last().and_then(|last| last.backing.clone()) {
            let path = opening::resolve_backing(&overlay, &name)?;
            // Files are compared, not names: a loop may use several names of one file.
            if !seen.insert(identity(&path)?) {
                bail_in(
                    &path,
                    "is in its own backing chain (change a backing file with `weir image rebase`)",
                )?;
            }
            if shown.len() == MAX_CHAIN {
                bail_in(
                    file,
                    "has more backing files than weir supports (shorten the chain with `weir image \
                     commit` or `rebase`)",
                )?;
            }
            shown.push(show(&path, format, mode)?);
            overlay = path;
        }
    }
    let text = match (arguments.output.kind(), arguments.backing_chain) {
        (ImageOutput::Human, _) => shown.iter().map(ImageReport::text).collect::<Vec<_>>().join("\n"),
        (ImageOutput::Json, false) => qemu_format::json(&shown[0].json),
        (ImageOutput::Json, true) => {
            qemu_format::json(&shown.iter().map(|shown| &shown.json).collect::<Vec<_>>())
        }
    };
    print(&text)?;
    Ok(())
}

fn bail_in(path: &Path, message: &str) -> anyhow::Result<()> {
    bail!("{}: {message}", path.display())
}

/// Identity of an image, to detect a loop in a chain.
#[derive(PartialEq, Eq, Hash)]
enum ChainMember {
    File(u64, u64),
    Elsewhere(PathBuf),
}

fn identity(path: &Path) -> anyhow::Result<ChainMember> {
    Ok(match metadata(path)? {
        Some(metadata) => ChainMember::File(metadata.dev(), metadata.ino()),
        None => ChainMember::Elsewhere(path.to_owned()),
    })
}

/// Metadata of the file; `None` if the image is not a file of this host.
fn metadata(path: &Path) -> anyhow::Result<Option<fs::Metadata>> {
    if opening::is_remote_or_null(path) {
        return Ok(None);
    }
    fs::metadata(path).map(Some).with_context(|| format!("{}: cannot be read", path.display()))
}

struct ImageReport {
    json: Value,
    snapshots: Vec<InternalSnapshot>,
    backing: Option<(String, Option<ImageFormat>)>,
}

fn show(path: &Path, format: Option<ImageFormat>, mode: OpenMode) -> Result<ImageReport, CommandFailure> {
    let format = opening::format(path, format)?;
    let mut json = json!({
        "filename": path.display().to_string(),
        "format": format.name(),
        "dirty-flag": false,
    });
    if let Some(metadata) = metadata(path)? {
        // st_blocks counts units of 512 bytes (inode(7)).
        json["actual-size"] = (metadata.blocks() * 512).into();
    }
    let storage = opening::storage(path, mode)?;
    let mut backing = None;
    let mut listed = Vec::new();
    match format {
        ImageFormat::Raw => json["virtual-size"] = storage.size_bytes().into(),
        ImageFormat::Qcow2 => {
            let at = path.to_owned();
            let read = on_reactor(async move { Ok(read(&storage, &at).await) })?;
            let ImageDetails { header, snapshots, bitmaps, luks } = read?;
            add_header_facts(&header, &mut json);
            let data = &mut json["format-specific"]["data"];
            if let Some(luks) = luks {
                data["encrypt"] = encryption(&luks);
            }
            if !bitmaps.is_empty() {
                data["bitmaps"] = bitmaps.iter().map(bitmap_json).collect();
            }
            if !snapshots.is_empty() {
                json["snapshots"] = snapshots.iter().map(snapshot::to_json).collect();
            }
            listed = snapshots;
            backing = header.backing.as_ref().map(|backing| {
                // An unknown format must not prevent the display: the next image is then probed.
                let format = opening::format_named(backing.format.as_deref()).ok();
                (backing.name.clone(), format)
            });
            if let Some((name, _)) = &backing {
                json["full-backing-filename"] =
                    opening::referenced_path(path, name).display().to_string().into();
            }
        }
    }
    Ok(ImageReport { json, snapshots: listed, backing })
}

struct ImageDetails {
    header: Qcow2Header,
    snapshots: Vec<InternalSnapshot>,
    bitmaps: Vec<bitmap::BitmapEntry>,
    luks: Option<LuksHeader>,
}

async fn read(storage: &Storage, path: &Path) -> Result<ImageDetails, anyhow::Error> {
    let context = || path.display().to_string();
    let header = qcow2::read_header(storage).await.with_context(context)?;
    let snapshots = opening::snapshots_in(storage, path).await?;
    let bitmaps = match header.bitmaps {
        Some(bitmaps) if header.autoclear & autoclear::BITMAPS != 0 => {
            // Damaged bitmaps must not prevent the display of the rest.
            match bitmap::read(storage, &header, bitmaps).await {
                Err(MetadataError::Invalid(fault)) => {
                    console::print_notice(&format!(
                        "{}: its bitmaps cannot be read: {fault} (`weir image check` shows the damage)",
                        path.display()
                    ));
                    Vec::new()
                }
                read => read.with_context(context)?,
            }
        }
        _ => Vec::new(),
    };
    let luks = match header.encryption {
        Some(place) => Some(luks::read_header(storage, place).await.with_context(context)?),
        None => None,
    };
    Ok(ImageDetails { header, snapshots, bitmaps, luks })
}

fn encryption(luks: &LuksHeader) -> Value {
    let slot = |slot: &KeySlot| {
        let mut shown = json!({ "active": slot.active, "key-offset": slot.offset });
        if slot.active {
            shown["iters"] = slot.iterations.into();
            shown["stripes"] = slot.stripes.into();
        }
        shown
    };
    json!({
        "format": "luks",
        "cipher-alg": format!("aes-{}", luks.cipher.key_bits()),
        "cipher-mode": luks.cipher.chaining_name(),
        "ivgen-alg": luks.cipher.iv_name().split(':').next(),
        "hash-alg": luks.hash.name(),
        "uuid": luks.uuid,
        "payload-offset": luks.payload_offset,
        "master-key-iters": luks.digest_iterations,
        "slots": luks.slots.iter().map(slot).collect::<Vec<_>>(),
    })
}

fn bitmap_json(entry: &bitmap::BitmapEntry) -> Value {
    let flags = [(bitmap::flag::IN_USE, "in-use"), (bitmap::flag::AUTO, "auto")];
    let flags: Vec<_> =
        flags.iter().filter(|(bit, _)| entry.flags & bit != 0).map(|(_, name)| *name).collect();
    json!({ "name": entry.name(), "granularity": 1_u64 << entry.granularity_bits, "flags": flags })
}

impl ImageReport {
    /// Lines as printed by qemu-img.
    fn text(&self) -> String {
        let json = &self.json;
        let string = |key: &str| json[key].as_str().unwrap_or_default().to_owned();
        let size = |key: &str| json[key].as_u64().unwrap_or(0);
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            let value = sanitize(&value);
            let _ = writeln!(text, "{name}: {value}");
        };
        line("image", string("filename"));
        line("file format", string("format"));
        line("virtual size", format!("{} ({} bytes)", human(size("virtual-size")), size("virtual-size")));
        let is_known = json["actual-size"].is_u64();
        line("disk size", if is_known { human(size("actual-size")) } else { "unavailable".to_owned() });
        if json["encrypted"] == true {
            line("encrypted", "yes".into());
        }
        if json["cluster-size"].is_u64() {
            line("cluster_size", size("cluster-size").to_string());
        }
        if json["dirty-flag"] == true {
            line("cleanly shut down", "no".into());
        }
        if json["backing-filename"].is_string() {
            let (name, full) = (string("backing-filename"), string("full-backing-filename"));
            let actual = if name == full { String::new() } else { format!(" (actual path: {full})") };
            line("backing file", name + &actual);
        }
        if json["backing-filename-format"].is_string() {
            line("backing file format", string("backing-filename-format"));
        }
        text.push_str(&snapshot::list(&self.snapshots));
        if let Some(data) = json["format-specific"]["data"].as_object() {
            text.push_str("Format specific information:\n");
            members(&mut text, data, 1);
        }
        text
    }
}

fn members(text: &mut String, values: &Map<String, Value>, depth: usize) {
    for (key, value) in values {
        one(text, &key.replace('-', " "), value, depth);
    }
}

fn one(text: &mut String, key: &str, value: &Value, depth: usize) {
    let indent = "    ".repeat(depth);
    let _ = match value {
        Value::Object(values) => {
            let _ = writeln!(text, "{indent}{key}:");
            return members(text, values, depth + 1);
        }
        Value::Array(values) => {
            let _ = writeln!(text, "{indent}{key}:");
            for (index, value) in values.iter().enumerate() {
                one(text, &format!("[{index}]"), value, depth + 1);
            }
            return;
        }
        Value::String(word) => writeln!(text, "{indent}{key}: {}", sanitize(word)),
        other => writeln!(text, "{indent}{key}: {other}"),
    };
}
