//! Arguments of `weir attach` and `weir detach`. A disk's options are those of `weir serve`.

use std::path::PathBuf;

use clap::Args;
use settings::{ImageLocation, UblkConfig, arguments::ConfigKeyArgs};

use super::kind::AttachKind;
use crate::{added_keys::DiskAttachOptions, client::ControlAddress};

pub(crate) const ATTACH_EXAMPLES: &str = "\
Examples:
  weir attach vm1.qcow2 -f qcow2 --iops-total 2000
      Prints the device, such as /dev/ublkb0. `weir detach vm1` removes it.
  weir attach vm1.qcow2 -f qcow2 --mount /mnt/vm1
      Mounts the file system of the disk. Unmounting /mnt/vm1 removes the device.
  weir attach vm1.qcow2 -f qcow2 --group gold
      In a group of the running daemon, together with its other disks.
  weir attach --list
      Attached disks and their users.
  weir attach --recover
      Restores attached disks whose background processes were killed.

Uses the first of ublk, the kernel's NBD client and FUSE with a loop device that this host supports, and prints \
its choice. docs/devices.md lists the requirements of each.";

pub(crate) const DETACH_EXAMPLES: &str = "\
Examples:
  weir detach vm1
  weir detach /dev/ublkb0
      By name, device or mount point, which is unmounted first.
  weir detach --all

A device in use is not detached, and its users are printed. --force detaches it anyway: data that is not written \
yet is lost, and further requests of its users fail.";

/// Arguments of `weir attach`.
#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// A file, a block device, memory:SIZE, null:SIZE, rbd:POOL/IMAGE or the URI of an NBD export
    #[arg(value_name = "IMAGE", value_parser = settings::parse::<ImageLocation>, required_unless_present_any = ["list", "recover"])]
    pub(super) image: Option<ImageLocation>,
    /// Name of the attachment and its disk: at most 31 letters, digits, `.`, `_` and `-`
    /// [default: the file's name without extension]
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,
    /// Print the result as JSON
    #[arg(long)]
    pub(super) json: bool,
    /// Use the kernel's ublk driver only; N and the options after commas are those of --ublk of
    /// `weir serve`
    #[arg(long, value_name = "N[,…]", num_args = 0..=1, require_equals = true, default_missing_value = "", value_parser = settings::parse::<UblkConfig>, conflicts_with_all = ["nbd_device", "fuse"])]
    pub(super) ublk: Option<UblkConfig>,
    /// Use the kernel's NBD client only
    #[arg(long, conflicts_with = "fuse")]
    nbd_device: bool,
    /// Use FUSE only, with a loop device if one can be made
    #[arg(long)]
    fuse: bool,
    /// Serve it by a private process, even if a daemon runs
    #[arg(long, conflicts_with = "qmp")]
    pub(super) alone: bool,
    /// Wait until udev has processed the device
    #[arg(long)]
    pub(super) udev: bool,
    /// Mount the disk's file system at this directory; unmounting it detaches the disk
    #[arg(long, value_name = "DIR")]
    pub(super) mount: Option<PathBuf>,
    /// Type of the file system [default: detected]
    #[arg(long, value_name = "TYPE", requires = "mount")]
    pub(super) fstype: Option<String>,
    /// Options of mount(8), separated by commas
    #[arg(short = 'o', long, value_name = "OPTIONS", requires = "mount")]
    pub(super) mount_options: Option<String>,
    /// Follow the conventions of mount(8), for `mount -t weir`
    #[arg(long, hide = true, requires = "mount")]
    pub(super) as_mount: bool,
    /// Print messages in spite of --as-mount
    #[arg(long, hide = true, requires = "as_mount")]
    pub(super) verbose: bool,
    /// List attached disks
    #[arg(long, conflicts_with_all = ["image", "recover"])]
    pub(super) list: bool,
    /// Restore attached disks whose background processes were killed
    #[arg(long, conflicts_with = "image")]
    pub(super) recover: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens; a private process
    /// if no daemon there makes devices]
    #[arg(long, value_name = "unix:PATH")]
    pub(super) qmp: Option<ControlAddress>,
    #[command(flatten)]
    pub(super) disk: ConfigKeyArgs<DiskAttachOptions>,
}

impl AttachArgs {
    /// Rejects options about a single disk: `--list` and `--recover` apply to all attachments.
    ///
    /// # Errors
    /// If an option about a disk was given.
    pub(super) fn reject_disk_options(&self) -> Result<(), String> {
        let mode = if self.list { "--list" } else { "--recover" };
        let named = [
            (self.name.is_some(), "--name"),
            (self.ublk.is_some(), "--ublk"),
            (self.nbd_device, "--nbd-device"),
            (self.fuse, "--fuse"),
            (self.alone, "--alone"),
            (self.udev, "--udev"),
            (self.mount.is_some(), "--mount"),
            (self.recover && self.qmp.is_some(), "--qmp"),
        ];
        let named = named.into_iter().filter(|(is_named, _)| *is_named).map(|(_, option)| option.to_owned());
        let of_disk = self.disk.given().map(|(name, _)| format!("--{name}"));
        match named.chain(of_disk).next() {
            None => Ok(()),
            Some(option) => Err(format!("{option}: cannot be used with {mode} (leave one of them out)")),
        }
    }

    /// The kind of device that was requested.
    pub(super) fn requested_kind(&self) -> Option<AttachKind> {
        let requested = [
            (self.ublk.is_some(), AttachKind::Ublk),
            (self.nbd_device, AttachKind::Nbd),
            (self.fuse, AttachKind::Fuse),
        ];
        requested.into_iter().find_map(|(requested, kind)| requested.then_some(kind))
    }
}

/// Arguments of `weir detach`.
#[derive(Debug, Args)]
pub(crate) struct DetachArgs {
    /// Name, device, file or mount point of an attached disk
    #[arg(value_name = "DEVICE|NAME", required_unless_present = "all")]
    pub(super) what: Vec<PathBuf>,
    /// Detach all attached disks
    #[arg(long, conflicts_with = "what")]
    pub(super) all: bool,
    /// Detach it even if it is in use
    #[arg(long)]
    pub(super) force: bool,
    /// Print the outcome for each device as JSON
    #[arg(long)]
    pub(super) json: bool,
    /// The daemon's control socket, for devices exported by `weir serve` [default: the one that
    /// it opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(super) qmp: Option<ControlAddress>,
}
