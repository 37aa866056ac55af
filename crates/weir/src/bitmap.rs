//! `weir bitmap`: dirty bitmaps of a disk of the running daemon, shown and changed while clients
//! use the disk.

use std::io::{IsTerminal as _, stdout};

use anyhow::anyhow;
use clap::{Args, Subcommand};
use console::{
    CommandFailure, figures, print, print_json,
    table::{ColumnAlignment, TextTable},
};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::client::{ControlAddress, ControlClient};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir bitmap vm1 add daily
      Record the parts of the disk that are written from now on, for incremental backups.
  weir bitmap vm1 list
      Bitmaps with the amount of data that they mark.
  weir bitmap vm1 merge weekly daily
      Add the marks of daily to weekly.
  weir bitmap vm1 disable weekly
      Keep its marks; `enable` records writes again.
  weir bitmap vm1 enable weekly
  weir bitmap vm1 clear weekly
      Remove all marks. Later writes are marked.
  weir bitmap vm1 remove daily
      Also removes an inconsistent bitmap: after a crash of the daemon, marks may be missing.

A bitmap is stored in the qcow2 image, unless it is transient: then it ends with the daemon, and at an upgrade. \
A bitmap that a backup or an NBD export uses cannot be changed. `weir image bitmap` changes the bitmaps of an image \
that no daemon serves.";

/// Arguments of `weir bitmap`.
#[derive(Debug, Args)]
pub(crate) struct BitmapArgs {
    /// Disk of the daemon
    #[arg(value_name = "DISK")]
    disk: String,
    #[command(subcommand)]
    command: BitmapCommand,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH", global = true)]
    qmp: Option<ControlAddress>,
}

#[derive(Debug, Subcommand)]
enum BitmapCommand {
    /// List the bitmaps
    List {
        /// Print the bitmaps as JSON
        #[arg(long)]
        json: bool,
    },
    /// Add a bitmap, which records writes from now on
    Add {
        /// Name of the new bitmap
        #[arg(value_name = "BITMAP")]
        bitmap: String,
        /// Bytes that a mark covers, a power of two from 512 to 2G [default: the cluster size, at
        /// least 4K]
        #[arg(short, long, value_name = "SIZE", value_parser = settings::size)]
        granularity: Option<u64>,
        /// Do not store it in the image
        #[arg(long)]
        transient: bool,
        /// Do not record writes
        #[arg(long)]
        disabled: bool,
    },
    /// Remove a bitmap
    Remove(BitmapName),
    /// Clear all marks of a bitmap
    Clear(BitmapName),
    /// Start to record writes
    Enable(BitmapName),
    /// Stop recording writes; the marks stay
    Disable(BitmapName),
    /// Add the marks of other bitmaps of the disk
    Merge {
        /// Bitmap that receives the marks
        #[arg(value_name = "BITMAP")]
        bitmap: String,
        /// Bitmaps whose marks are added
        #[arg(value_name = "OTHER", required = true)]
        sources: Vec<String>,
    },
}

#[derive(Debug, Args)]
struct BitmapName {
    /// Name of the bitmap
    #[arg(value_name = "BITMAP")]
    bitmap: String,
}

/// Disk of `query-block`.
#[derive(Debug, Deserialize)]
struct ListedDisk {
    device: String,
    inserted: ListedNode,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "kebab-case")]
struct ListedNode {
    #[serde(default)]
    dirty_bitmaps: Vec<Value>,
}

/// Bitmap, as QEMU's `BlockDirtyInfo`.
#[derive(Debug, Deserialize)]
struct ListedBitmap {
    name: String,
    count: u64,
    granularity: u64,
    recording: bool,
    busy: bool,
    persistent: bool,
    #[serde(default)]
    inconsistent: bool,
}

pub(crate) fn run(arguments: BitmapArgs) -> Result<(), CommandFailure> {
    let BitmapArgs { disk, command, qmp } = arguments;
    let mut client = ControlClient::reach(qmp)?.with_timeout(ControlClient::LONG)?;
    let report = client.status()?;
    if !report.disks.iter().any(|known| known.name == disk) {
        return Err(anyhow!(report.unknown_disk_error(&disk)).into());
    }
    let on = |bitmap: &str| json!({ "node": disk, "name": bitmap });
    let (bitmap, command, parameters, done) = match command {
        BitmapCommand::List { json } => return list(&mut client, &disk, json),
        BitmapCommand::Add { bitmap, granularity, transient, disabled } => {
            let mut parameters = on(&bitmap);
            parameters["persistent"] = (!transient).into();
            parameters["disabled"] = disabled.into();
            if let Some(granularity) = granularity {
                parameters["granularity"] = granularity.into();
            }
            (bitmap, "block-dirty-bitmap-add", parameters, "added")
        }
        BitmapCommand::Remove(BitmapName { bitmap }) => {
            let parameters = on(&bitmap);
            (bitmap, "block-dirty-bitmap-remove", parameters, "removed")
        }
        BitmapCommand::Clear(BitmapName { bitmap }) => {
            let parameters = on(&bitmap);
            (bitmap, "block-dirty-bitmap-clear", parameters, "cleared")
        }
        BitmapCommand::Enable(BitmapName { bitmap }) => {
            let parameters = on(&bitmap);
            (bitmap, "block-dirty-bitmap-enable", parameters, "records writes")
        }
        BitmapCommand::Disable(BitmapName { bitmap }) => {
            let parameters = on(&bitmap);
            (bitmap, "block-dirty-bitmap-disable", parameters, "does not record writes any more")
        }
        BitmapCommand::Merge { bitmap, sources } => {
            let parameters = json!({ "node": disk, "target": bitmap, "bitmaps": sources });
            (bitmap, "block-dirty-bitmap-merge", parameters, "has the marks of all")
        }
    };
    client.execute(command, parameters)?;
    Ok(print(&format!("{disk}: {bitmap}: {done}\n"))?)
}

fn list(client: &mut ControlClient, disk: &str, json: bool) -> Result<(), CommandFailure> {
    let disks: Vec<ListedDisk> = client.execute_typed("query-block", Value::Null)?;
    let found = disks.into_iter().find(|listed| listed.device == disk);
    let bitmaps = found.map(|listed| listed.inserted.dirty_bitmaps).unwrap_or_default();
    if json {
        return Ok(print_json(&bitmaps)?);
    }
    if bitmaps.is_empty() {
        return Ok(print(&format!("{disk}: no bitmaps\n"))?);
    }
    let mut table = TextTable::new([
        ("BITMAP", ColumnAlignment::Left),
        ("MARKED", ColumnAlignment::Right),
        ("GRANULARITY", ColumnAlignment::Right),
        ("STATE", ColumnAlignment::Left),
    ]);
    for bitmap in bitmaps {
        let bitmap: ListedBitmap = serde_json::from_value(bitmap)
            .map_err(|error| anyhow!("the daemon sent a malformed bitmap: {error}"))?;
        let marked = match bitmap.inconsistent {
            true => "-".to_owned(),
            false => figures::bytes(bitmap.count as f64),
        };
        let granularity = figures::bytes(bitmap.granularity as f64);
        table.row(vec![bitmap.name.clone(), marked, granularity, state(&bitmap)]);
    }
    Ok(print(&table.render(stdout().is_terminal()))?)
}

fn state(bitmap: &ListedBitmap) -> String {
    let state = match bitmap {
        ListedBitmap { inconsistent: true, .. } => "inconsistent",
        ListedBitmap { recording: true, .. } => "recording",
        ListedBitmap { .. } => "disabled",
    };
    let transient = if bitmap.persistent { "" } else { ", transient" };
    let busy = if bitmap.busy { ", in use by a backup" } else { "" };
    format!("{state}{transient}{busy}")
}
