//! Tasks that watch a disk of the registry: its failed requests, changes of its size, and changes
//! of its image by another client of the Ceph cluster. Each task ends with the disk's entry, and
//! holds no strong reference to the registry.

use std::{rc::Weak, sync::Arc};

use block::disk::Failures;
use event_listener::Event;
use policy::time::Duration;
use storage::rbd::ResizeNotifier;

use super::Registry;
use crate::change::RegistryChange;

/// Notifies all exports of a disk after any change of its size, including one by a write beyond the
/// end of its file.
pub(super) async fn watch_size(registry: Weak<Registry>, disk: String, resized: Arc<Event>) {
    let mut next = resized.listen();
    loop {
        next.await;
        next = resized.listen();
        let Some(registry) = registry.upgrade() else { return };
        if let Ok(running) = registry.disks.get(&disk) {
            registry.exports.refresh_size(&running);
        }
    }
}

/// Probes the size of an image after each notification of its cluster, and also at intervals if the
/// cluster sends none.
pub(super) async fn watch_image_changes(
    registry: Weak<Registry>,
    disk: String,
    notifier: Arc<ResizeNotifier>,
    poll_interval: Option<Duration>,
) {
    loop {
        match poll_interval {
            // Timeout and notification have the same effect.
            Some(every) => drop(reactor::timeout(every, notifier.notified()).await),
            None => notifier.notified().await,
        }
        let Some(registry) = registry.upgrade() else { return };
        if let Ok(running) = registry.disks.get(&disk)
            && let Err(error) = running.disk.poll_size().await
        {
            tracing::warn!(disk, %error, "cannot determine whether the image was resized");
        }
    }
}

/// Reports immediately that a disk stopped. Other failures are reported at most once a second, as
/// in QEMU, because clients could cause any number of them; the last one is reported.
pub(super) async fn watch_failures(registry: Weak<Registry>, disk: String, failures: Arc<Failures>) {
    let mut failure = failures.next(false).await;
    loop {
        let Some(registry) = registry.upgrade() else { return };
        registry.notify(&RegistryChange::Failed { disk: disk.clone(), failure });
        if failure.stops && failures.stopped_by().is_some() && !registry.disks.stopped.replace(true) {
            registry.notify(&RegistryChange::Stopped);
        }
        // Not held during the wait: it would keep the registry alive.
        drop(registry);
        failure = match reactor::timeout(Duration::from_secs(1), failures.next(true)).await {
            Ok(failure) => failure,
            Err(_) => failures.next(false).await,
        };
    }
}
