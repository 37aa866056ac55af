//! What `weir attach` and `weir detach` are told. A disk's options are those of `weir serve`.

use std::path::PathBuf;

use clap::Args;
use settings::{ImageLocation, UblkConfig, arguments::ConfigKeyArgs};

use super::way::Way;
use crate::{added::AttachedDisk, client::Target};

pub(crate) const ATTACH_EXAMPLES: &str = "\
Examples:
  weir attach vm1.qcow2 -f qcow2 --iops-total 2000
      Prints the device, such as /dev/ublkb0. `weir detach vm1` takes it away.
  weir attach vm1.qcow2 -f qcow2 --mount /mnt/vm1
      Mounts what is on the disk; the device goes when /mnt/vm1 is unmounted.
  weir attach vm1.qcow2 -f qcow2 --group gold
      In a group of the daemon that runs here and makes devices, beside its other disks.
  weir attach --list
      What is attached, by whom it is used.
  weir attach --recover
      Goes on with what was attached when the processes behind it were killed.

Of ublk, the kernel's NBD client and FUSE with a loop device it takes the first that this machine has, and tells \
which. docs/devices.md has what each needs.";

pub(crate) const DETACH_EXAMPLES: &str = "\
Examples:
  weir detach vm1
  weir detach /dev/ublkb0
      By its name, its device, or the directory where it is mounted, which is unmounted first.
  weir detach --all

A device that somebody uses stays, and the users are named. With --force it goes all the same: what they have not \
written is lost, and what they ask for fails.";

/// What `weir attach` is told.
#[derive(Debug, Args)]
pub(crate) struct AttachArgs {
    /// A file, a block device, memory:SIZE, null:SIZE, rbd:POOL/IMAGE or the URI of an NBD export
    #[arg(value_name = "IMAGE", value_parser = settings::parse::<ImageLocation>, required_unless_present_any = ["list", "recover"])]
    pub(super) image: Option<ImageLocation>,
    /// What the attachment and its disk are called, at most 31 letters, digits, `.`, `_` and `-`
    /// [default: as the file, without its extension]
    #[arg(long, value_name = "NAME")]
    pub(super) name: Option<String>,
    /// Print what was made as JSON
    #[arg(long)]
    pub(super) json: bool,
    /// By the kernel's ublk driver, and nothing else; N and what may stand behind commas are those
    /// of --ublk of `weir serve`
    #[arg(long, value_name = "N[,…]", num_args = 0..=1, require_equals = true, default_missing_value = "", value_parser = settings::parse::<UblkConfig>, conflicts_with_all = ["nbd_device", "fuse"])]
    pub(super) ublk: Option<UblkConfig>,
    /// By the kernel's NBD client, and nothing else
    #[arg(long, conflicts_with = "fuse")]
    nbd_device: bool,
    /// By FUSE, and a loop device where that may be made, and nothing else
    #[arg(long)]
    fuse: bool,
    /// By a process of its own, though a daemon runs
    #[arg(long, conflicts_with = "qmp")]
    pub(super) alone: bool,
    /// Wait until udev is through with the device
    #[arg(long)]
    pub(super) udev: bool,
    /// Mount what is on the disk at this directory; unmounting it detaches the disk
    #[arg(long, value_name = "DIR")]
    pub(super) mount: Option<PathBuf>,
    /// The file system's type [default: what is found on the disk]
    #[arg(long, value_name = "TYPE", requires = "mount")]
    pub(super) fstype: Option<String>,
    /// Options of mount(8), separated by commas
    #[arg(short = 'o', long, value_name = "OPTIONS", requires = "mount")]
    pub(super) mount_options: Option<String>,
    /// With the manners of mount(8), for `mount -t weir`
    #[arg(long, hide = true, requires = "mount")]
    pub(super) as_mount: bool,
    /// What is done is told all the same
    #[arg(long, hide = true, requires = "as_mount")]
    pub(super) verbose: bool,
    /// Show what is attached
    #[arg(long, conflicts_with_all = ["image", "recover"])]
    pub(super) list: bool,
    /// Go on with what was attached when the processes behind it were killed
    #[arg(long, conflicts_with = "image")]
    pub(super) recover: bool,
    /// The daemon's control socket [default: the one that `weir serve` opens; without a
    /// daemon there that makes devices, a process of its own]
    #[arg(long, value_name = "unix:PATH")]
    pub(super) qmp: Option<Target>,
    #[command(flatten)]
    pub(super) disk: ConfigKeyArgs<AttachedDisk>,
}

impl AttachArgs {
    /// `--list` and `--recover` are about all that is attached.
    ///
    /// # Errors
    /// What else was named.
    pub(super) fn check_without_image(&self) -> Result<(), String> {
        let what = if self.list { "--list" } else { "--recover" };
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
            Some(option) => Err(format!(
                "{option}: is about a disk to be attached, and {what} attaches none (leave one of them out)"
            )),
        }
    }

    /// The one that was asked for.
    pub(super) fn way(&self) -> Option<Way> {
        let asked = [(self.ublk.is_some(), Way::Ublk), (self.nbd_device, Way::Nbd), (self.fuse, Way::Fuse)];
        asked.into_iter().find_map(|(asked, way)| asked.then_some(way))
    }
}

/// What `weir detach` is told.
#[derive(Debug, Args)]
pub(crate) struct DetachArgs {
    /// A name, a device, a file or a directory where one is mounted
    #[arg(value_name = "DEVICE|NAME", required_unless_present = "all")]
    pub(super) what: Vec<PathBuf>,
    /// All that is attached
    #[arg(long, conflicts_with = "what")]
    pub(super) all: bool,
    /// Take it away from whoever uses it
    #[arg(long)]
    pub(super) force: bool,
    /// The daemon's control socket, for devices that `weir serve` made [default: the one that
    /// it opens]
    #[arg(long, value_name = "unix:PATH")]
    pub(super) qmp: Option<Target>,
}
