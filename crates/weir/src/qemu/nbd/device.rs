//! `--disconnect`: takes a block device of the kernel's NBD client away, whoever serves it, unless
//! somebody uses it.

use std::path::Path;

use anyhow::{Context as _, bail};
use console::print;

use crate::attach;

pub(super) fn disconnect(device: &str) -> anyhow::Result<()> {
    let path = Path::new(device);
    let number = device.strip_prefix("/dev/nbd").and_then(|digits| digits.parse().ok());
    let number =
        number.with_context(|| format!("{device}: is no device of the NBD client (/dev/nbdN is)"))?;
    if !path.exists() {
        bail!("Cannot open {device}: No such file or directory (`modprobe nbd` makes such devices)");
    }
    if !attach::let_go(path)? {
        export::nbd::kernel_client::disconnect(number).with_context(|| format!("Cannot disconnect {device}"))?;
    }
    print(&format!("{device} disconnected\n"))
}
