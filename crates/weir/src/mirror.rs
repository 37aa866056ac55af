//! `weir mirror`: copies a disk of the running daemon to another image and keeps it equal, until
//! `weir job complete` moves the disk there.
//!
//! The target's file is created and removed as by `weir backup`. It stays once the job is ready.

use clap::Args;
use console::CommandFailure;
use settings::ImageLocation;
use storage::ImageFormat;

use crate::{
    client::ControlAddress,
    disk_copy::{CopyKind, CopyRequest},
    jobs::JobLimitArgs,
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir mirror vm1 --to /new/vm1.qcow2
      Copies the disk while its machine runs, and waits until the copy follows it.
  weir job complete mirror-vm1 --save
      The disk continues on /new/vm1.qcow2, also after a restart. Changes wait for at most 100 ms.
  weir mirror vm1 --to /new/vm1.raw --weight 50 --detach
      In the background, with half of the share of a disk with the default weight 100.

The target has the size of the disk. Until the job is completed, the disk stays on its image, and a failure of the \
target ends the job only: `weir job cancel mirror-vm1` ends it too. Before the copy follows the disk, Ctrl-C cancels \
the mirror and the new file is removed.
Exit status: 0 the copy follows the disk, 1 failed or cancelled, 2 wrong use of the command line.";

/// Arguments of `weir mirror`.
#[derive(Debug, Args)]
pub(crate) struct MirrorArgs {
    /// Disk to copy
    #[arg(value_name = "DISK")]
    disk: String,
    /// Target: a new file, a block device, the URI of an NBD export, or rbd:POOL/IMAGE
    #[arg(long, value_name = "IMAGE", value_parser = settings::parse::<ImageLocation>)]
    to: ImageLocation,
    /// Format of the target: raw or qcow2 [default: qcow2 for a new file *.qcow2, else raw]
    #[arg(long, short, value_name = "FORMAT", value_parser = settings::parse::<ImageFormat>)]
    format: Option<ImageFormat>,
    #[command(flatten)]
    limits: JobLimitArgs,
    /// Id of the job [default: mirror-DISK]
    #[arg(long, value_name = "JOB")]
    id: Option<String>,
    /// Do not wait until the copy follows the disk
    #[arg(long)]
    detach: bool,
    /// Print the job as JSON
    #[arg(long)]
    json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<ControlAddress>,
}

pub(crate) fn run(arguments: MirrorArgs) -> Result<(), CommandFailure> {
    let MirrorArgs { disk, to, format, limits, id, detach, json, qmp } = arguments;
    CopyRequest { kind: CopyKind::Mirror, disk, to, format, limits, id, detach, json, qmp }.run()
}
