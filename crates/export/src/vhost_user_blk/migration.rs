//! A ring whose disk is being migrated to this host waits until its image is available: the virtual
//! machine already runs here, but the source host may still hold the image.
//!
//! Orders that arrive meanwhile are executed as far as they concern a ring that has not started.

use reactor::select::{FirstReady, first};
use std::{cell::Cell, pin::pin};

use async_channel::Receiver;
use block::disk::{Disk, HoldError};
use policy::time::Duration;

use super::{queue::QueueOrder, session::EventKind, vring::RingSettings, vring_event::VringEvent};

/// Longest wait. The guest is running by then and notices a slow disk.
const IMAGE_TIMEOUT: Duration = Duration::from_secs(30);

/// Replaced events of the ring.
pub(super) type ReplacedEvents = Vec<(EventKind, Option<VringEvent>)>;

/// Waits for the disk's image and applies orders meanwhile. `None` if the ring is to stop.
pub(super) async fn wait_for_image(
    disk: &Disk,
    settings: &mut RingSettings,
    orders: &Receiver<QueueOrder>,
) -> Result<Option<ReplacedEvents>, HoldError> {
    let is_stopped = Cell::new(false);
    let mut hold = pin!(disk.hold(IMAGE_TIMEOUT, || !is_stopped.get()));
    let mut replaced = ReplacedEvents::new();
    let result = loop {
        match first(hold.as_mut(), orders.recv()).await {
            FirstReady::One(result) => break result,
            FirstReady::Other(Ok(QueueOrder::Memory(memory, areas, _in_use))) => {
                // Dropping the sender at the end of this arm confirms that the new memory is in
                // use.
                (settings.memory, settings.areas) = (memory, areas);
            }
            FirstReady::Other(Ok(QueueOrder::Event(kind, event))) => {
                // Only the most recent event of each kind is kept.
                replaced.retain(|(other, _)| *other != kind);
                replaced.push((kind, event));
            }
            FirstReady::Other(Ok(QueueOrder::Stop { .. }) | Err(_)) => {
                is_stopped.set(true);
                // Awaited instead of dropped: if it holds the image by now, that has to be
                // released below.
                break hold.await;
            }
        }
    };
    match result {
        Ok(()) if is_stopped.get() => {
            disk.release().await;
            Ok(None)
        }
        Ok(()) => Ok(Some(replaced)),
        Err(HoldError::Cancelled) => Ok(None),
        Err(error) => Err(error),
    }
}
