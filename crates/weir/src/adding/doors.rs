//! Exports of a disk at endpoints of its own, as options of `weir disk add`.

use clap::Args;
use settings::{ExportTarget, FuseConfig, NbdDeviceConfig, UblkConfig, VhostUserBlkConfig};

#[derive(Debug, Args)]
pub(super) struct DoorArgs {
    /// Serve a virtual machine at unix:PATH, over vhost-user-blk; repeatable. Behind commas:
    /// queues=N, queue-size=N, serial=TEXT, logical-block-size=N, discard=off, write-zeroes=off,
    /// write-cache=off, read-only, client (the machine listens there).
    /// NBD is then served only where --nbd says so
    #[arg(long, value_name = "unix:PATH[,…]", value_parser = settings::parse::<VhostUserBlkConfig>)]
    vhost_user_blk: Vec<VhostUserBlkConfig>,
    /// Serve a block device of this host by ublk, as --ublk of `weir serve`; repeatable
    #[arg(long, value_name = "N[,…]", num_args = 0..=1, require_equals = true, default_missing_value = "", value_parser = settings::parse::<UblkConfig>)]
    ublk: Vec<UblkConfig>,
    /// Serve the disk as a file, by FUSE, as --fuse of `weir serve`; repeatable
    #[arg(long, value_name = "FILE[,…]", value_parser = settings::parse::<FuseConfig>)]
    fuse: Vec<FuseConfig>,
    /// Serve a block device of the kernel's NBD client, as --nbd-device of `weir serve`;
    /// repeatable
    #[arg(long, value_name = "/dev/nbdN[,…]", value_parser = settings::parse::<NbdDeviceConfig>)]
    nbd_device: Vec<NbdDeviceConfig>,
}

impl DoorArgs {
    /// Those that were named.
    pub(super) fn all(self) -> Vec<ExportTarget> {
        let Self { vhost_user_blk, ublk, fuse, nbd_device } = self;
        let machines = vhost_user_blk.into_iter().map(ExportTarget::VhostUserBlk);
        let devices = nbd_device.into_iter().map(ExportTarget::NbdDevice);
        machines
            .chain(ublk.into_iter().map(ExportTarget::Ublk))
            .chain(fuse.into_iter().map(ExportTarget::Fuse))
            .chain(devices)
            .collect()
    }
}
