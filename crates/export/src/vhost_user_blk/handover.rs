//! A ring of a disk that is handed over waits until its image is there: the machine has moved here,
//! and what has it at the other end of the migration may not be through.
//!
//! Orders that come meanwhile are carried out as far as they concern a ring that has not begun.

use std::{cell::Cell, pin::pin};

use async_channel::Receiver;
use block::disk::{Disk, NotHeld};
use policy::time::Duration;

use super::{bell::Bell, queue::Order, session::EventKind, vring::RingSettings};
use crate::race::{First, first};

/// For how long. By then the front end has its guest running, which notices that its disk is slow.
const PATIENCE: Duration = Duration::from_secs(30);

/// What has become of the ring's events.
pub(super) type Rewired = Vec<(EventKind, Option<Bell>)>;

/// Holds the disk for a ring. `None` if the ring is to stop.
pub(super) async fn held(
    disk: &Disk,
    settings: &mut RingSettings,
    orders: &Receiver<Order>,
) -> Result<Option<Rewired>, NotHeld> {
    let is_over = Cell::new(false);
    let mut hold = pin!(disk.hold(PATIENCE, || !is_over.get()));
    let mut rewired = Rewired::new();
    let held = loop {
        match first(hold.as_mut(), orders.recv()).await {
            First::One(held) => break held,
            First::Other(Ok(Order::Memory(memory, places, _in_use))) => {
                (settings.memory, settings.places) = (memory, places);
            }
            First::Other(Ok(Order::Event(kind, bell))) => {
                rewired.retain(|(other, _)| *other != kind);
                rewired.push((kind, bell));
            }
            First::Other(Ok(Order::Stop { .. }) | Err(_)) => {
                is_over.set(true);
                break hold.await;
            }
        }
    };
    match held {
        Ok(()) if is_over.get() => {
            disk.let_go().await;
            Ok(None)
        }
        Ok(()) => Ok(Some(rewired)),
        Err(NotHeld::GivenUp) => Ok(None),
        Err(error) => Err(error),
    }
}
