//! The instant of a snapshot: what happens while clients' changes wait.
//!
//! All disks wait together and until one deadline, so the pause does not grow with their number.
//! Work on an image that is late continues, since it must not stop in the middle; the snapshot has
//! failed by then, and its remains are undone. Never opens an image.

use std::{
    cell::Cell,
    future::poll_fn,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::Poll,
    time::{SystemTime, UNIX_EPOCH},
};

use anyhow::{Context as _, anyhow, bail, ensure};
use block::disk::{Disk, QuiescedDisk};
use image::{Image, Qcow2Image, qcow2::snapshot::NewSnapshot};
use policy::time::{Duration, Instant};
use reactor::error::Error;

use super::{PreparedKind, PreparedSnapshot, check_exports, check_state};
use crate::registry::{Registry, StartingJob};

/// Longest flush before the gates are closed.
const FLUSH_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest wait for changes in flight of all disks. Clients' changes wait meanwhile.
const QUIESCE_TIMEOUT: Duration = Duration::from_secs(5);
/// Longest wait of clients' changes, from the first gate that closes.
const PAUSE_TIMEOUT: Duration = Duration::from_secs(15);

/// Takes the snapshots, none after `latest`; returns the time for which changes have waited. A
/// failure has changed nothing.
pub(super) async fn take_all(
    registry: &Registry,
    all: &[PreparedSnapshot],
    latest: Instant,
) -> anyhow::Result<u64> {
    // Most unflushed data is written before changes have to wait.
    let flushes = all.iter().map(|PreparedSnapshot { running, below, .. }| async move {
        // Not by the disk, whose flush may wait until it is resumed after an error.
        let flushed = reactor::timeout(FLUSH_TIMEOUT, below.flush()).await.unwrap_or(Err(Error::TIMED_OUT));
        flushed.with_context(|| format!("disk {}: it cannot be flushed", running.disk.name()))
    });
    all_ok(flushes).await?;
    let began = reactor::now();
    let deadline = began + PAUSE_TIMEOUT;
    let quiesced = quiesce(all).await?;
    let settled = all.iter().zip(&quiesced).map(|(prepared, guard)| settle(prepared, guard, deadline));
    all_ok(settled).await?;
    check(registry, all)?;
    ensure!(reactor::now() < latest, "deadline-ms: the time for the snapshots is over (allow a longer time)");
    let internal = InternalSnapshots::of(all);
    internal.take(deadline).await?;
    // Again, after the last await.
    if let Err(error) = check(registry, all) {
        internal.undo();
        return Err(error);
    }
    // Nothing below can fail.
    for (PreparedSnapshot { running, below, kind, .. }, guard) in all.iter().zip(&quiesced) {
        if let PreparedKind::External(overlay) = kind {
            let image = Image::Qcow2(overlay.qcow2.attach_backing(Arc::clone(below)));
            drop(running.disk.switch_image(guard, Arc::new(image)));
        }
    }
    drop(quiesced);
    Ok(reactor::now().nanos_since(began))
}

/// Fails if a disk has changed in a way that prevents its snapshot, or the daemon is stopping: its
/// end closes the images that the disks have.
fn check(registry: &Registry, all: &[PreparedSnapshot]) -> anyhow::Result<()> {
    registry.lifecycle.check_not_ending()?;
    for PreparedSnapshot { running, below, kind, .. } in all {
        check_state(running, below)?;
        if let PreparedKind::External(overlay) = kind {
            let disk = running.disk.name();
            check_exports(registry, disk)?;
            ensure!(
                overlay.image.size_bytes() == running.disk.size_bytes(),
                "disk {disk}: it was resized meanwhile (try again)"
            );
        }
    }
    Ok(())
}

/// Closes the gates of all disks; returns the guards in the order of `all`. No other command waits
/// for several gates, so two commands cannot wait for each other.
async fn quiesce(all: &[PreparedSnapshot]) -> anyhow::Result<Vec<QuiescedDisk<'_>>> {
    all_ok(all.iter().map(|PreparedSnapshot { running, .. }| async move {
        let disk = &running.disk;
        disk.quiesce(QUIESCE_TIMEOUT).await.with_context(|| {
            let (name, seconds) = (disk.name(), QUIESCE_TIMEOUT.as_secs());
            format!("disk {name}: changes in flight did not complete within {seconds} s (check its storage)")
        })
    }))
    .await
}

/// Makes all that a snapshot refers to durable.
async fn settle(
    PreparedSnapshot { running, kind, .. }: &PreparedSnapshot,
    guard: &QuiescedDisk<'_>,
    deadline: Instant,
) -> anyhow::Result<()> {
    let disk = &running.disk;
    let settle = async {
        if let PreparedKind::External(overlay) = kind {
            check_bitmaps(disk).await?;
            // The first flush reaches the device, so the header of the overlay is durable.
            overlay.image.flush().await?;
        }
        disk.flush_quiesced(guard).await.map_err(anyhow::Error::from)
    };
    let settled = reactor::timeout(remaining(deadline), settle).await;
    settled
        .unwrap_or(Err(Error::TIMED_OUT.into()))
        .with_context(|| format!("disk {}: its last changes cannot be written", disk.name()))
}

/// Fails if a dirty bitmap is in memory only: the disk's next image does not have it.
async fn check_bitmaps(disk: &Disk) -> anyhow::Result<()> {
    let bitmaps = disk.bitmap_statuses().await?;
    if let Some(bitmap) = bitmaps.iter().find(|bitmap| !bitmap.is_persistent) {
        bail!(
            "the dirty bitmap {} is in memory only, and would be lost (remove it, or add it as a \
             persistent one)",
            bitmap.name
        );
    }
    Ok(())
}

fn remaining(deadline: Instant) -> Duration {
    Duration::from_nanos(deadline.nanos_since(reactor::now()))
}

/// Runs futures concurrently to their end; returns the first error in their order.
async fn all_ok<T>(
    futures: impl Iterator<Item = impl Future<Output = anyhow::Result<T>>>,
) -> anyhow::Result<Vec<T>> {
    let mut running: Vec<(Pin<Box<_>>, Option<_>)> = futures.map(|future| (Box::pin(future), None)).collect();
    let results = poll_fn(|context| {
        let mut is_ready = true;
        for (future, result) in running.iter_mut().filter(|(_, result)| result.is_none()) {
            match future.as_mut().poll(context) {
                Poll::Ready(ready) => *result = Some(ready),
                Poll::Pending => is_ready = false,
            }
        }
        match is_ready {
            true => Poll::Ready(running.iter_mut().filter_map(|(_, result)| result.take()).collect()),
            false => Poll::Pending,
        }
    });
    results.await
}

/// Internal snapshots of a command.
struct InternalSnapshots(Rc<Vec<InternalTarget>>);

/// Internal snapshot of one disk.
struct InternalTarget {
    disk: String,
    image: Qcow2Image,
    name: String,
    /// Until its image is not changed any more.
    _reserved: Rc<StartingJob>,
}

impl InternalSnapshots {
    fn of(all: &[PreparedSnapshot]) -> Self {
        let targets = all.iter().filter_map(|PreparedSnapshot { running, kind, reserved, .. }| match kind {
            PreparedKind::Internal { image, name } => Some(InternalTarget {
                disk: running.disk.name().to_string(),
                image: image.clone(),
                name: name.clone(),
                _reserved: Rc::clone(reserved),
            }),
            PreparedKind::External(_) => None,
        });
        Self(Rc::new(targets.collect()))
    }

    /// Takes all or none. If they are late, those that are being taken are deleted afterwards.
    async fn take(&self, deadline: Instant) -> anyhow::Result<()> {
        if self.0.is_empty() {
            return Ok(());
        }
        let (is_late, has_ended) = (Rc::new(Cell::new(false)), Rc::new(Cell::new(false)));
        // Detached: a change of refcounts that stopped in the middle would leak clusters.
        let mut taking = reactor::spawn_detached({
            let (targets, is_late, has_ended) =
                (Rc::clone(&self.0), Rc::clone(&is_late), Rc::clone(&has_ended));
            async move {
                let result = create_all(&targets, &is_late).await;
                has_ended.set(true);
                result
            }
        });
        let taken = match reactor::timeout(remaining(deadline), &mut taking).await {
            Ok(taken) => taken,
            // It ended at the same time.
            Err(_) if has_ended.get() => taking.await,
            Err(_) => {
                is_late.set(true);
                let disks: Vec<_> = self.0.iter().map(|target| &*target.disk).collect();
                bail!(
                    "disk {}: the storage did not answer in time (check it; the snapshot is deleted \
                     once it answers)",
                    disks.join(", ")
                );
            }
        };
        taken.unwrap_or_else(|| Err(Error::SHUTDOWN.into()))
    }

    /// Deletes all, without a wait: clients continue meanwhile.
    fn undo(self) {
        let Self(targets) = self;
        reactor::spawn(async move { delete_all(&targets).await });
    }
}

async fn create_all(targets: &[InternalTarget], is_late: &Cell<bool>) -> anyhow::Result<()> {
    let (date_s, date_ns) = date();
    for (index, InternalTarget { disk, image, name, .. }) in targets.iter().enumerate() {
        let created = image.create_snapshot(NewSnapshot { name, date_s, date_ns }).await;
        let (taken, error) = match created {
            Ok(_) if !is_late.get() => continue,
            Ok(_) => (index + 1, anyhow!("it is late")),
            Err(error) => (index, error.into()),
        };
        delete_all(&targets[..taken]).await;
        return Err(error).with_context(|| format!("disk {disk}: no snapshot {name:?}"));
    }
    Ok(())
}

async fn delete_all(targets: &[InternalTarget]) {
    for InternalTarget { disk, image, name, .. } in targets {
        if let Err(error) = image.delete_snapshot(name).await {
            tracing::error!(
                disk, snapshot = name, %error,
                "a snapshot stays although the command has failed (delete it)"
            );
        }
    }
}

/// Date in seconds since 1970, and nanoseconds.
fn date() -> (u32, u32) {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    // The format has 32 bits, until 2106.
    (u32::try_from(now.as_secs()).unwrap_or(u32::MAX), now.subsec_nanos())
}

#[cfg(test)]
#[path = "instant_tests.rs"]
mod tests;
