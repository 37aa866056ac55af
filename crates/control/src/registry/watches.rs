//! What is heard of a disk while it is listed: that its requests fail, that it has another length,
//! that its cluster has changed its image. Each ends with the disk's entry, and keeps no registry
//! alive.

use std::{rc::Weak, sync::Arc};

use block::disk::Failures;
use event_listener::Event;
use policy::time::Duration;
use storage::rbd::ResizeNotifier;

use super::Registry;
use crate::change::Change;

/// Whoever gives a disk another length, each of its exports sees it: a program may have written
/// behind the end of a file that shows it.
pub(super) async fn tell_sizes(registry: Weak<Registry>, disk: String, resized: Arc<Event>) {
    let mut next = resized.listen();
    loop {
        next.await;
        next = resized.listen();
        let Some(registry) = registry.upgrade() else { return };
        if let Ok(running) = registry.disks.get(&disk) {
            registry.exports.look_at_size(&running);
        }
    }
}

/// Looks at the size of an image whenever its cluster says that somebody has changed it, or, where
/// that says nothing, from time to time.
pub(super) async fn look_at_changes(
    registry: Weak<Registry>,
    disk: String,
    bell: Arc<ResizeNotifier>,
    every: Option<Duration>,
) {
    loop {
        match every {
            // Either has it look.
            Some(every) => drop(reactor::timeout(every, bell.notified()).await),
            None => bell.notified().await,
        }
        let Some(registry) = registry.upgrade() else { return };
        if let Ok(running) = registry.disks.get(&disk)
            && let Err(error) = running.disk.poll_size().await
        {
            tracing::warn!(disk, %error, "cannot determine whether the image was resized");
        }
    }
}

/// Says at once that a disk was stopped, and of other failures the last in a second, as QEMU does:
/// their rate is in the hand of clients.
pub(super) async fn tell_failures(registry: Weak<Registry>, disk: String, failures: Arc<Failures>) {
    let mut failure = failures.next(false).await;
    loop {
        let Some(registry) = registry.upgrade() else { return };
        registry.tell(&Change::Failed { disk: disk.clone(), failure });
        if failure.stops && failures.stopped_by().is_some() && !registry.disks.stopped.replace(true) {
            registry.tell(&Change::Stopped);
        }
        drop(registry);
        failure = match reactor::timeout(Duration::from_secs(1), failures.next(true)).await {
            Ok(failure) => failure,
            Err(_) => failures.next(false).await,
        };
    }
}
