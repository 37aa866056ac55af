//! PLUG HERE: the door of branch `ublk`. `open` makes an `Arc<export::ublk::Server>`, its
//! `serve(…)` future, and gives both to `Entrance::new("x-ublk", address, server, serving, terms)
//! .of_device()`; `attended!(Server, statistics)` ties the server in.

use anyhow::bail;
use settings::Ublk;

use super::{Entrance, Terms};

pub(super) async fn open(settings: &Ublk, terms: &Terms<'_>) -> anyhow::Result<Entrance> {
    let _ = settings;
    bail!("ublk: disk {} cannot be exported so yet", terms.disk.disk.name())
}
