//! `--disconnect`: disconnects a device of the kernel's NBD client, whatever its server, unless it
//! is in use.

use std::path::Path;

use anyhow::{Context as _, bail};
use console::print;

use crate::attach;

pub(super) fn disconnect(device: &str) -> anyhow::Result<()> {
    let path = Path::new(device);
    let number = device.strip_prefix("/dev/nbd").and_then(|digits| digits.parse().ok());
    let number = number.with_context(|| {
        format!("{device}: is not a device of the kernel's NBD client (expected /dev/nbdN)")
    })?;
    if !path.exists() {
        bail!("Cannot open {device}: No such file or directory (`modprobe nbd` makes such devices)");
    }
    // A device of `weir attach` is removed with its keeper and its server.
    if !attach::detach_if_attached(path)? {
        export::nbd::kernel_client::disconnect(number)
            .with_context(|| format!("Cannot disconnect {device}"))?;
    }
    print(&format!("{device} disconnected\n"))
}
