//! `weir image snapshot`: internal snapshots of qcow2 images, with the options of `qemu-img
//! snapshot`.

use std::{
    path::PathBuf,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, anyhow};
use clap::Args;
use console::{
    CommandFailure, figures, on_reactor, print,
    table::{ColumnAlignment, TextTable},
};
use image::qcow2::{
    Qcow2Image,
    snapshot::{InternalSnapshot, NewSnapshot},
};
use serde_json::{Value, json};
use storage::{ImageFormat, OpenError, Storage};

use super::{
    image_args::NamingArgs,
    opening::{self, OpenMode},
    qemu_format::human,
};

pub(super) const EXAMPLES: &str = "\
Examples:
  weir image snapshot -l vm1.qcow2
      List the snapshots in the image.
  weir image snapshot -c before-upgrade vm1.qcow2
      Create a snapshot of the current disk.
  weir image snapshot -a before-upgrade vm1.qcow2
      Revert the disk to the snapshot. The current content is lost.
  weir image snapshot -d before-upgrade vm1.qcow2
      Delete the snapshot and free the clusters that only it uses.

A snapshot is named by its id or its name. An id takes precedence over an equal name of another snapshot.
Exit status: 0 done, 1 failed, 2 wrong use of the command line.";

/// The options of `weir image snapshot`.
#[derive(Debug, Args)]
pub struct SnapshotArgs {
    /// Image
    #[arg(value_name = "FILE", value_parser = opening::image_name())]
    file: PathBuf,
    /// List the snapshots (default)
    #[arg(short, long)]
    list: bool,
    /// Create a snapshot with this name
    #[arg(short, long, value_name = "NAME", conflicts_with = "list")]
    create: Option<String>,
    /// Revert the disk to this snapshot
    #[arg(short, long, value_name = "SNAPSHOT", conflicts_with_all = ["list", "create"])]
    apply: Option<String>,
    /// Delete this snapshot
    #[arg(short, long, value_name = "SNAPSHOT", conflicts_with_all = ["list", "create", "apply"])]
    delete: Option<String>,
    /// Read the image even if another process writes to it
    #[arg(short = 'U', long)]
    force_share: bool,
    /// Print nothing
    #[arg(short, long)]
    quiet: bool,
    #[command(flatten)]
    naming: NamingArgs,
}

pub(crate) fn run(arguments: SnapshotArgs) -> Result<(), CommandFailure> {
    let objects = arguments.naming.objects()?;
    let image = arguments.naming.named(&arguments.file, None, &objects)?;
    objects.check_used().map_err(|message| CommandFailure::Usage(anyhow!(message)))?;
    let path = &image.path;
    let name = image.name();
    if image.format()? != ImageFormat::Qcow2 {
        return Err(anyhow!(
            "{name}: raw images have no snapshots (convert it with `weir image convert -O qcow2`)"
        )
        .into());
    }
    let action = [
        arguments.create.map(SnapshotAction::Create),
        arguments.apply.map(SnapshotAction::Apply),
        arguments.delete.map(SnapshotAction::Delete),
    ];
    if let Some(action) = action.into_iter().flatten().next() {
        let storage = image.storage(OpenMode { write: true, ..OpenMode::default() });
        let storage = storage.map_err(|error| adapt_remedy(error, &action))?;
        return on_reactor(apply_action(storage, action, name));
    }
    let mode = OpenMode { force_share: arguments.force_share, ..OpenMode::default() };
    let (storage, at) = (image.storage(mode)?, path.clone());
    let text = list(&on_reactor(async move { Ok(opening::snapshots_in(&storage, &at).await?) })?);
    if !arguments.quiet {
        print(&text)?;
    }
    Ok(())
}

enum SnapshotAction {
    Create(String),
    Apply(String),
    Delete(String),
}

/// Replaces the remedy of a lock conflict: an image in use cannot be changed from outside.
fn adapt_remedy(mut error: anyhow::Error, action: &SnapshotAction) -> anyhow::Error {
    let locked = error.downcast_mut::<OpenError>().filter(|error| error.why.starts_with("locked"));
    if let Some(locked) = locked {
        locked.remedy = match action {
            SnapshotAction::Create(_) => {
                "stop it first; while it runs, `weir image convert` from an NBD export of the disk \
                 makes a copy, and no snapshot can be taken"
            }
            SnapshotAction::Apply(_) | SnapshotAction::Delete(_) => {
                "stop it first: the snapshots of an image in use cannot be changed"
            }
        }
        .to_owned();
    }
    error
}

async fn apply_action(storage: Storage, action: SnapshotAction, name: String) -> Result<(), CommandFailure> {
    let image = Qcow2Image::open_for_maintenance(storage).await.with_context(|| name.clone())?;
    let done = match action {
        SnapshotAction::Create(title) => {
            let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
            // The format's date ends in 2106.
            let date_s = u32::try_from(now.as_secs()).unwrap_or(u32::MAX);
            let new = NewSnapshot { name: &title, date_s, date_ns: now.subsec_nanos() };
            image.create_snapshot(new).await.map(drop)
        }
        SnapshotAction::Apply(snapshot) => image.apply_snapshot(&snapshot).await,
        SnapshotAction::Delete(snapshot) => image.delete_snapshot(&snapshot).await,
    };
    let closed = image.close().await;
    done.with_context(|| name.clone())?;
    closed.with_context(|| name.clone())?;
    Ok(())
}

pub(super) fn to_json(snapshot: &InternalSnapshot) -> Value {
    const NANOS: u64 = 1_000_000_000;
    let mut json = json!({
        "id": snapshot.id(),
        "name": snapshot.name(),
        "vm-state-size": snapshot.vm_state_bytes,
        "date-sec": snapshot.date_s,
        "date-nsec": snapshot.date_ns,
        "vm-clock-sec": snapshot.vm_clock_ns / NANOS,
        "vm-clock-nsec": snapshot.vm_clock_ns % NANOS,
    });
    if let Some(instructions) = snapshot.instructions.filter(|count| *count != u64::MAX) {
        json["icount"] = instructions.into();
    }
    json
}

pub(super) fn list(snapshots: &[InternalSnapshot]) -> String {
    if snapshots.is_empty() {
        return String::new();
    }
    let mut table = TextTable::new([
        ("ID", ColumnAlignment::Left),
        ("TAG", ColumnAlignment::Left),
        ("VM SIZE", ColumnAlignment::Right),
        ("DATE", ColumnAlignment::Right),
        ("VM CLOCK", ColumnAlignment::Right),
        ("ICOUNT", ColumnAlignment::Right),
    ]);
    for snapshot in snapshots {
        table.row(vec![
            snapshot.id().into_owned(),
            snapshot.name().into_owned(),
            human(snapshot.vm_state_bytes),
            figures::date(snapshot.date_s),
            clock(snapshot.vm_clock_ns),
            snapshot
                .instructions
                .filter(|count| *count != u64::MAX)
                .map_or_else(String::new, |count| count.to_string()),
        ]);
    }
    format!("Snapshot list:\n{}", table.render(false))
}

fn clock(nanos: u64) -> String {
    let (seconds, millis) = (nanos / 1_000_000_000, nanos / 1_000_000 % 1000);
    format!("{:02}:{:02}:{:02}.{millis:03}", seconds / 3600, seconds / 60 % 60, seconds % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_clock_has_milliseconds() {
        assert_eq!(clock(3_661_002_000_000), "01:01:01.002");
    }
}
