//! Exports of a disk other than NBD servers, as options of `weir disk add`.

use clap::Args;
use settings::{ExportTarget, FuseConfig, NbdDeviceConfig, UblkConfig, VhostUserBlkConfig};

#[derive(Debug, Args)]
pub(super) struct ExportArgs {
    /// Serve a virtual machine at unix:PATH, over vhost-user-blk; repeatable. Options after commas:
    /// queues=N, queue-size=N, serial=TEXT, logical-block-size=N, discard=off, write-zeroes=off,
    /// write-cache=off, read-only, client (the virtual machine listens at PATH).
    /// The disk is then exported over NBD only with --nbd
    #[arg(long, value_name = "unix:PATH[,…]", value_parser = settings::parse::<VhostUserBlkConfig>)]
    vhost_user_blk: Vec<VhostUserBlkConfig>,
    /// Serve a ublk block device of this host, as --ublk of `weir serve`; repeatable
    #[arg(long, value_name = "N[,…]", num_args = 0..=1, require_equals = true, default_missing_value = "", value_parser = settings::parse::<UblkConfig>)]
    ublk: Vec<UblkConfig>,
    /// Serve the disk as a file over FUSE, as --fuse of `weir serve`; repeatable
    #[arg(long, value_name = "FILE[,…]", value_parser = settings::parse::<FuseConfig>)]
    fuse: Vec<FuseConfig>,
    /// Serve a block device of the kernel's NBD client, as --nbd-device of `weir serve`;
    /// repeatable
    #[arg(long, value_name = "/dev/nbdN[,…]", value_parser = settings::parse::<NbdDeviceConfig>)]
    nbd_device: Vec<NbdDeviceConfig>,
}

impl ExportArgs {
    /// All exports that were given.
    pub(super) fn into_exports(self) -> Vec<ExportTarget> {
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
