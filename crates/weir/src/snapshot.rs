//! `weir snapshot`: the content of disks at one instant stays, in a file or inside the image, while
//! clients continue.
//!
//! ```text
//!   overlays, created and synced here ─► freeze ─► config file ─► daemon: x-weir-snapshot ─► thaw
//! ```
//!
//! The config file is written before the daemon switches to the overlays. An overlay has the
//! content of the present image until then, so a start finds the right content whenever this
//! process or the daemon ends. Without the switch, the config file is restored and the overlays are
//! removed.
//!
//! Never replaces a file.

mod overlay;
mod quiesce;

use std::{path::PathBuf, time::Duration};

use anyhow::{Context as _, anyhow, bail};
use api::TakenSnapshots;
use clap::Args;
use console::{CommandFailure, figures, print, print_json, print_notice, signals::BlockedSignals};
use overlay::NewOverlay;
use quiesce::FrozenGuests;
use serde_json::{Value, json};

use crate::{
    client::{ClientError, ControlAddress, ControlClient, report::DaemonReport},
    settings_command::{NewImage, SaveArgs, SavedImages},
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir snapshot vm1 --save
      vm1.qcow2 keeps the content of this instant. The disk continues in the new overlay vm1.snap-1.qcow2.
  weir snapshot vm1 --to /srv/fast/vm1-monday.qcow2 --save
      The overlay has this name.
  weir snapshot db --disks db-log,db-index --save
      Three disks at one instant, or none.
  weir snapshot vm1 --internal monday
      Inside the qcow2 image. `weir image snapshot -l vm1.qcow2` lists it once the disk is not served.
  weir snapshot vm1 --save --quiesce-command 'virsh-freeze vm1'
      Runs `virsh-freeze vm1 freeze` before, and `virsh-freeze vm1 thaw` after, also if the snapshot fails.

The file that a disk had before is read-only from now on: it is the backing file of the overlay. Never serve it for \
writing and never delete it while an overlay needs it. A disk of a config file needs --save, because the next start \
would otherwise open the old file.
Exit status: 0 taken, 1 nothing has changed or the result is unknown, 2 wrong use of the command line.";

/// Name under which a descriptor is passed, before its number.
const NAME: &str = "weir-snapshot";

/// Longest time in which the daemon may take the snapshots. The client waits longer for the answer.
const LONGEST: Duration = Duration::from_secs(500);

/// Arguments of `weir snapshot`.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArgs {
    /// Disk
    #[arg(value_name = "DISK")]
    disk: String,
    /// Further disks, at the same instant
    #[arg(long, value_name = "DISK", value_delimiter = ',')]
    disks: Vec<String>,
    /// New overlay in which the disk continues [default: IMAGE.snap-N.qcow2 beside its image,
    /// without the extension of IMAGE]
    #[arg(long, value_name = "FILE", conflicts_with = "disks")]
    to: Option<PathBuf>,
    /// Take an internal snapshot with this name, of qcow2 images
    #[arg(long, value_name = "NAME", conflicts_with_all = ["to", "save"])]
    internal: Option<String>,
    /// Shell command that freezes the file systems of the guests when it is run with the word
    /// `freeze`, and thaws them with `thaw`; WEIR_DISKS has the names of the disks
    #[arg(long, value_name = "COMMAND")]
    quiesce_command: Option<String>,
    /// Longest run of the freeze, and longest time from its end to the thaw
    #[arg(
        long,
        value_name = "TIME",
        value_parser = settings::duration,
        default_value = "10s",
        requires = "quiesce_command"
    )]
    quiesce_timeout: Duration,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<ControlAddress>,
    #[command(flatten)]
    save: SaveArgs,
}

pub(crate) fn run(arguments: SnapshotArgs) -> Result<(), CommandFailure> {
    // For the whole run, which is short: an interruption in the middle would leave files behind.
    let _signals = BlockedSignals::block().context("cannot wait for signals")?;
    let mut client = ControlClient::reach(arguments.qmp.clone())?.with_timeout(ControlClient::LONG)?;
    let report = client.status()?;
    let mut disks = vec![arguments.disk.clone()];
    disks.extend(arguments.disks.iter().cloned());
    for (index, disk) in disks.iter().enumerate() {
        if !report.disks.iter().any(|known| known.name == *disk) {
            return Err(anyhow!(report.unknown_disk_error(disk)).into());
        }
        if disks[..index].contains(disk) {
            return Err(CommandFailure::Usage(anyhow!("--disks: {disk} is named twice (name it once)")));
        }
    }
    let taken = match &arguments.internal {
        Some(name) => {
            let snapshots = disks.iter().map(|disk| json!({ "name": disk, "internal": name })).collect();
            Request { arguments: &arguments, disks: &disks, snapshots }.send(client, || Ok(()))?
        }
        None => take_external(&arguments, client, &report, &disks)?,
    };
    if arguments.json {
        return Ok(print_json(&taken)?);
    }
    Ok(print(&describe(&taken))?)
}

/// Creates the overlays, and switches the disks to them.
fn take_external(
    arguments: &SnapshotArgs,
    mut client: ControlClient,
    report: &DaemonReport,
    disks: &[String],
) -> anyhow::Result<TakenSnapshots> {
    let mut overlays = Vec::new();
    for name in disks {
        let disk = report.disks.iter().find(|known| known.name == *name);
        let disk = disk.context("looked up before")?;
        overlays.push(NewOverlay::create(disk, arguments.to.as_deref(), arguments.save.save)?);
    }
    let image = |overlay: &NewOverlay| NewImage {
        disk: overlay.disk.clone(),
        path: overlay.path.clone(),
        format: "qcow2",
        is_new: true,
    };
    let images = overlays.iter().map(image).collect();
    let mut config = SavedImages::prepare(report, &arguments.save, images)?;
    let mut snapshots = Vec::new();
    for (number, overlay) in overlays.iter().enumerate() {
        let descriptor = format!("{NAME}-{number}");
        client.pass_descriptor(&descriptor, &overlay.file)?;
        let path = overlay.path.display().to_string();
        snapshots.push(json!({ "name": overlay.disk, "overlay": path, "fdname": descriptor }));
    }
    let request = Request { arguments, disks, snapshots };
    match request.send(client, || config.commit()) {
        Ok(taken) => {
            overlays.into_iter().for_each(NewOverlay::keep);
            Ok(taken)
        }
        Err(error) if error.downcast_ref::<UnknownResult>().is_some() => {
            // The daemon may use them.
            overlays.into_iter().for_each(NewOverlay::keep);
            Err(error)
        }
        Err(error) => {
            if let Err(restoring) = config.restore() {
                overlays.into_iter().for_each(NewOverlay::keep);
                bail!(
                    "{error:#}; the config file names the overlays, which are empty and are kept: {restoring:#}"
                );
            }
            Err(error)
        }
    }
}

/// The daemon has not answered: it may have taken the snapshots or not.
#[derive(Debug, thiserror::Error)]
#[error(
    "the result is unknown ({0}); `weir status --json` shows the images of the disks, and an overlay that \
     none of them uses is empty (a start with it is right)"
)]
struct UnknownResult(String);

/// A request to the daemon.
struct Request<'a> {
    arguments: &'a SnapshotArgs,
    disks: &'a [String],
    snapshots: Vec<Value>,
}

impl Request<'_> {
    /// Freezes the guests, calls `commit`, and sends the request; the guests are thawed in any
    /// case.
    fn send(
        self,
        mut client: ControlClient,
        commit: impl FnOnce() -> anyhow::Result<()>,
    ) -> anyhow::Result<TakenSnapshots> {
        let Self { arguments, disks, snapshots } = self;
        let timeout = arguments.quiesce_timeout;
        let mut frozen = None;
        if let Some(command) = &arguments.quiesce_command {
            frozen = Some(FrozenGuests::freeze(command, timeout, disks)?);
        }
        let taken = commit().and_then(|()| {
            // Without a deadline, the daemon could take the snapshots after this process has given
            // up, or after the thaw.
            let deadline = frozen.as_ref().map(FrozenGuests::deadline);
            let (remaining, uptime) = deadline.unwrap_or((LONGEST, None));
            let milliseconds = |time: Duration| u64::try_from(time.as_millis()).unwrap_or(u64::MAX);
            let mut request =
                json!({ "snapshots": snapshots, "deadline-ms": milliseconds(remaining.min(LONGEST)) });
            // The daemon may receive the request late.
            if let Some(uptime) = uptime {
                request["deadline-uptime-ms"] = milliseconds(uptime).into();
            }
            client.execute_typed("x-weir-snapshot", request).map_err(|error| match error {
                ClientError::Rejected(_) => error.into(),
                error => UnknownResult(error.to_string()).into(),
            })
        });
        let thawed = frozen.map_or(Ok(()), FrozenGuests::thaw);
        match (taken, thawed) {
            (Ok(taken), Ok(())) => Ok(taken),
            (Ok(taken), Err(error)) => {
                print_notice(&format!("the snapshots are taken, but {error:#}"));
                Ok(taken)
            }
            (Err(error), Ok(())) => Err(error),
            (Err(error), Err(thawing)) => Err(error.context(format!("{thawing:#}"))),
        }
    }
}

fn describe(taken: &TakenSnapshots) -> String {
    let line = |snapshot: &api::TakenSnapshot| {
        let api::TakenSnapshot { disk, image, backing, internal } = snapshot;
        match (backing, internal) {
            (Some(backing), _) => {
                format!("{disk}: {backing} has the snapshot; the disk continues in {image}\n")
            }
            (None, Some(name)) => format!("{disk}: {image} has the internal snapshot {name:?}\n"),
            (None, None) => format!("{disk}: {image}\n"),
        }
    };
    let lines: String = taken.snapshots.iter().map(line).collect();
    format!("{lines}Changes have waited for {}.\n", figures::time(taken.pause_ns))
}
