//! Kinds of block devices for a disk on this host, and their requirements of the host.

use std::{fs::OpenOptions, path::Path};

use anyhow::{anyhow, bail};
use nix::unistd::Uid;
use serde::{Deserialize, Serialize};

use super::host;

/// Kind of device, in order of preference.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum AttachKind {
    Ublk,
    Nbd,
    Fuse,
}

impl AttachKind {
    const ALL: [Self; 3] = [Self::Ublk, Self::Nbd, Self::Fuse];

    /// Description for the message while it attaches.
    pub(super) fn description(self) -> &'static str {
        match self {
            Self::Ublk => "a ublk block device",
            Self::Nbd => "a block device of the kernel's NBD client",
            Self::Fuse if host::may_make_loops() => "a loop device over a FUSE file",
            Self::Fuse if Uid::effective().is_root() => {
                "a FUSE file, without a loop device, as there is no /dev/loop-control (`modprobe \
                 loop`; in a container, pass the devices in)"
            }
            Self::Fuse => "a FUSE file, without a loop device, which only root may make",
        }
    }

    /// Name in `weir attach --list`.
    pub(super) fn name(self) -> &'static str {
        match self {
            Self::Ublk => "ublk",
            Self::Nbd => "nbd",
            Self::Fuse => "fuse",
        }
    }

    /// Reason why this host cannot use it, and the remedy. Loads the driver's module if necessary.
    fn missing(self, by_daemon: bool) -> Option<String> {
        let is_root = Uid::effective().is_root();
        match self {
            Self::Ublk => {
                let control = Path::new("/dev/ublk-control");
                if !control.exists() && !host::load_module("ublk_drv") {
                    return Some(
                        "no ublk: there is no /dev/ublk-control (`modprobe ublk_drv`; without such \
                         a module, the kernel lacks CONFIG_BLK_DEV_UBLK)"
                            .to_owned(),
                    );
                }
                let open = || OpenOptions::new().read(true).write(true).open(control);
                // The daemon opens the control device itself, with its own permissions.
                match by_daemon.then_some(()).or_else(|| open().ok().map(drop)) {
                    Some(()) => None,
                    None => Some(
                        "no ublk: this user may not open /dev/ublk-control (run it as root, or add \
                         a udev rule that permits others)"
                            .to_owned(),
                    ),
                }
            }
            Self::Nbd if !Path::new("/sys/module/nbd").exists() && !host::load_module("nbd") => Some(
                "no NBD: the kernel has no client (`modprobe nbd`; without such a module, the \
                 kernel lacks CONFIG_BLK_DEV_NBD)"
                    .to_owned(),
            ),
            Self::Nbd if !is_root && !by_daemon => {
                Some("no NBD: only root may make its devices (run it as root)".to_owned())
            }
            Self::Nbd => None,
            Self::Fuse => {
                let device = Path::new("/dev/fuse");
                if !device.exists() && !host::load_module("fuse") {
                    return Some(
                        "no FUSE: there is no /dev/fuse (`modprobe fuse`; in a container, pass the \
                         device in)"
                            .to_owned(),
                    );
                }
                let has_access = by_daemon || OpenOptions::new().read(true).write(true).open(device).is_ok();
                (!has_access).then(|| {
                    "no FUSE: this user may not open /dev/fuse (`chmod 0666 /dev/fuse`, as udev \
                     does, or run it as root)"
                        .to_owned()
                })
            }
        }
    }
}

/// The requested kind of device, or the first that works, with the obstacles of all kinds before
/// it.
pub(super) fn choose(
    requested: Option<AttachKind>,
    by_daemon: bool,
) -> anyhow::Result<(AttachKind, Vec<String>)> {
    if let Some(kind) = requested {
        return match kind.missing(by_daemon) {
            None => Ok((kind, Vec::new())),
            Some(why) => Err(anyhow!(why)),
        };
    }
    let mut passed_over = Vec::new();
    for kind in AttachKind::ALL {
        match kind.missing(by_daemon) {
            None => return Ok((kind, passed_over)),
            Some(why) => passed_over.push(why),
        }
    }
    bail!("this host supports no kind of device: {}", passed_over.join("; "))
}
