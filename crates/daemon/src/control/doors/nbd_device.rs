//! The door of the kernel's NBD client: a block device, served over pairs of sockets.

use anyhow::bail;
use settings::NbdDevice;

use super::{Entrance, Terms};

pub(super) async fn open(settings: &NbdDevice, terms: &Terms<'_>) -> anyhow::Result<Entrance> {
    let _ = settings;
    bail!("NBD: disk {} cannot be exported so yet", terms.disk.disk.name())
}
