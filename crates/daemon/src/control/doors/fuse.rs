//! PLUG HERE: the door of branch `fuse`. `open` makes an `Arc<export::fuse::Server>`, its
//! `serve(…)` future, and gives both to `Entrance::new("fuse", address, server, serving, terms)
//! .of_device()`; `attended!(Server, statistics)` ties the server in.

use anyhow::bail;
use settings::Fuse;

use super::{Entrance, Terms};

pub(super) async fn open(settings: &Fuse, terms: &Terms<'_>) -> anyhow::Result<Entrance> {
    let _ = settings;
    bail!("FUSE: disk {} cannot be exported so yet", terms.disk.disk.name())
}
