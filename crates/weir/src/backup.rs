//! `weir backup`: copies a disk of the running daemon, with its content at the start, to another
//! image while clients use it.
//!
//! This process creates the file, so that it belongs to the user and the daemon needs no permission
//! for its directory. It removes the file if the daemon rejects the backup, or reports that the job
//! has failed or was cancelled.

use std::path::PathBuf;

use clap::Args;
use console::CommandFailure;
use settings::ImageLocation;
use storage::ImageFormat;

use crate::{
    client::ControlAddress,
    disk_copy::{BackupMarks, CopyKind, CopyRequest},
    jobs::JobLimitArgs,
};

pub(crate) const EXAMPLES: &str = "\
Examples:
  weir backup vm1 --to /backup/vm1.qcow2
      The content of this instant, while the machine runs. Uses spare capacity only.
  weir backup vm1 --to /backup/vm1.raw --bps-total 50M
      At most 50 MiB a second.
  weir backup vm1 --to nbd://backup-host/vm1 --weight 50
      To an NBD server, with half of the share of a disk with the default weight 100.
  weir backup vm1 --to /backup/vm1.qcow2 --detach
      In the background: `weir jobs` shows it.
  weir backup vm1 --to monday.qcow2 --bitmap daily
      A full backup. From its instant on, the bitmap records what changes.
  weir backup vm1 --to tuesday.qcow2 --bitmap daily --incremental --backing monday.qcow2
      The changes since, as an overlay of the last backup.

Changes that clients make during the backup first copy the old data into a buffer of 64 MiB. If the target is so slow \
that the buffer is full, the backup fails, and the clients continue. Ctrl-C cancels the backup. After a \
failure or Ctrl-C the new file is removed, except with --detach, or if the daemon does not report the end.
Exit status: 0 complete, 1 failed or cancelled, 2 wrong use of the command line.";

/// Arguments of `weir backup`.
#[derive(Debug, Args)]
pub(crate) struct BackupArgs {
    /// Disk to copy
    #[arg(value_name = "DISK")]
    disk: String,
    /// Target: a new file, a block device, the URI of an NBD export, or rbd:POOL/IMAGE
    #[arg(long, value_name = "IMAGE", value_parser = settings::parse::<ImageLocation>)]
    to: ImageLocation,
    /// Format of the target: raw or qcow2 [default: qcow2 for a new file *.qcow2, else raw]
    #[arg(long, short, value_name = "FORMAT", value_parser = settings::parse::<ImageFormat>)]
    format: Option<ImageFormat>,
    /// Bitmap of the disk that begins anew at the instant of the backup; added if it does not exist
    #[arg(long, value_name = "BITMAP")]
    bitmap: Option<String>,
    /// Copy only the parts that the bitmap marks
    #[arg(long, requires = "bitmap")]
    incremental: bool,
    /// Last backup, the backing file of a new incremental one: a qcow2 file if its name ends in
    /// .qcow2, else raw
    #[arg(long, value_name = "FILE", requires = "incremental")]
    backing: Option<PathBuf>,
    #[command(flatten)]
    limits: JobLimitArgs,
    /// Id of the job [default: backup-DISK, or backup-DISK-2, ... if it is in use]
    #[arg(long, value_name = "JOB")]
    id: Option<String>,
    /// Do not wait for the end
    #[arg(long)]
    detach: bool,
    /// Print the job as JSON
    #[arg(long)]
    json: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens]
    #[arg(long, value_name = "unix:PATH")]
    qmp: Option<ControlAddress>,
}

pub(crate) fn run(arguments: BackupArgs) -> Result<(), CommandFailure> {
    let BackupArgs { disk, to, format, bitmap, incremental, backing, limits, id, detach, json, qmp } =
        arguments;
    let marks = BackupMarks { bitmap, is_incremental: incremental, backing };
    let kind = CopyKind::Backup(marks);
    CopyRequest { kind, disk, to, format, limits, id, detach, json, qmp }.run()
}
