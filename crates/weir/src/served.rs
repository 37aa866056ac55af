//! The disk that a running daemon serves from an image, for commands of `weir image` that find the
//! image locked.
//!
//! Never connects to a daemon other than the default one, and changes it only through its own
//! commands.

use std::{
    fs,
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
};

use anyhow::anyhow;
use api::DiskStatus;
use image_tool::ServedDisk;
use nix::sys::socket::{getsockopt, sockopt::PeerCredentials};
use serde_json::json;

use crate::client::{ClientError, ControlAddress, ControlClient};

/// The daemon's disk with this image. The daemon is that of `WEIR_QMP`, or the default one. `None`
/// if it does not run, does not respond, or has no such disk.
pub(crate) fn find(image: &Path) -> Option<ServedDisk> {
    let image = image.canonicalize().ok()?;
    let target = ControlAddress::choose(None).ok()?;
    let mut client = ControlClient::connect(&target).ok()?;
    let report = client.status().ok()?;
    let from = working_directory(&target);
    // Compares canonical paths: both sides may use links or relative paths.
    let is_image = |disk: &DiskStatus| {
        let path = from.as_ref().map_or_else(|| PathBuf::from(&disk.image), |from| from.join(&disk.image));
        path.canonicalize().is_ok_and(|path| path == image)
    };
    let disk = report.status.disks.into_iter().find(is_image)?;
    let (name, format) = (disk.name.clone(), disk.format);
    let resize = move |size: u64| {
        let result = client.execute("block_resize", json!({ "node-name": disk.name, "size": size }));
        result.map(drop).map_err(|error| match error {
            // The error names QMP's argument, which the command line does not have.
            ClientError::Rejected(message) => {
                match message.strip_prefix(&format!("Parameter 'size' ({size}) ")) {
                    Some(rule) => anyhow!("{size} bytes {rule}"),
                    None => anyhow!(message),
                }
            }
            error => error.into(),
        })
    };
    Some(ServedDisk {
        name,
        daemon: target.to_string(),
        format,
        size_bytes: disk.size,
        resize: Box::new(resize),
    })
}

/// Working directory of the daemon, to resolve its relative paths; `None` without permission.
fn working_directory(target: &ControlAddress) -> Option<PathBuf> {
    let peer = getsockopt(&UnixStream::connect(target.path()).ok()?, PeerCredentials).ok()?;
    fs::read_link(format!("/proc/{}/cwd", peer.pid())).ok()
}
