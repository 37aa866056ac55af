//! Snapshots of disks in use, of one disk or of several at one instant.
//!
//! ```text
//!   open overlays ─► flush ─► all gates closed ─► settle ─► internal snapshots ─► switch ─► opened
//!        nothing has changed; a failure leaves each disk as it is ───────────────┘│
//!                                                             cannot fail ────────┘
//! ```
//!
//! External: the disk continues in a new overlay, and its present image is never written again.
//! Internal: the qcow2 image keeps the clusters of the instant.
//!
//! Overlays exist before; this code never creates or removes a file. It runs on the main thread.

mod created;
mod instant;

use std::{
    collections::BTreeSet,
    path::{Path, absolute},
    rc::Rc,
    sync::Arc,
};

use anyhow::{Context as _, bail, ensure};
use api::{TakenSnapshot, TakenSnapshots};
pub(crate) use created::CreatedOverlay;
use image::{
    Image, Qcow2Image,
    open::{check_overlay, is_encrypted},
    qcow2::{CacheSettings, snapshot::InternalSnapshot},
};
use policy::time::Instant;
use reactor::operation::PassedFd;
use settings::ImageLocation;
use storage::{CacheMode, ImageFormat, Storage};

use crate::{
    assemble::DiskAssembly,
    endpoints::HostEndpoint,
    events::{Kind, NewEvent},
    image_opening::OPEN_TIMEOUT,
    loaded_config::LoadedConfig,
    registry::{Registry, RunningDisk, RunningEndpoint, StartingJob},
};

/// Snapshot of one disk.
#[derive(Debug)]
pub(crate) struct SnapshotRequest {
    /// Name of the disk.
    pub(crate) disk: String,
    pub(crate) kind: SnapshotKind,
}

/// Kind of a snapshot, with its parameters.
#[derive(Debug)]
pub(crate) enum SnapshotKind {
    /// The disk continues in this overlay.
    External {
        overlay: ImageLocation,
        /// The overlay's file, which the client has opened.
        descriptor: Option<PassedFd>,
        /// Name of the new node, which from now on names the disk as well.
        node: Option<String>,
    },
    /// The disk continues in the image of this disk, which is not listed any more.
    Node(String),
    /// The image keeps the content under this name.
    Internal(String),
}

/// A snapshot that can be taken.
struct PreparedSnapshot {
    running: Rc<RunningDisk>,
    /// Image of the disk when it was prepared.
    below: Arc<Image>,
    kind: PreparedKind,
    /// Excludes jobs, the removal, a second snapshot of the disk, and exports that depend on its
    /// image. Shared with the task that takes an internal snapshot.
    reserved: Rc<StartingJob>,
}

enum PreparedKind {
    External(PreparedOverlay),
    Internal { image: Qcow2Image, name: String },
}

/// An overlay that is open and checked, without its backing image.
struct PreparedOverlay {
    image: Arc<Image>,
    qcow2: Qcow2Image,
    location: ImageLocation,
    /// Names of its nodes, which are reserved.
    nodes: Vec<String>,
    /// Sizes of its metadata caches.
    caches: CacheSettings,
    /// The disk that it was.
    taken: Option<Box<RunningDisk>>,
}

/// Takes snapshots of all disks at one instant, or none after the deadline.
///
/// # Errors
/// The reason; no disk has changed.
pub(crate) async fn take_snapshots(
    registry: &Rc<Registry>,
    requests: Vec<SnapshotRequest>,
    deadline: Instant,
) -> anyhow::Result<TakenSnapshots> {
    let _guard = registry.lock_structure().await?;
    let mut names = BTreeSet::new();
    for SnapshotRequest { disk, .. } in &requests {
        ensure!(names.insert(disk.clone()), "disk {disk}: named twice (name each disk once)");
    }
    let mut prepared = Vec::new();
    let result = async {
        for request in requests {
            prepared.push(prepare(registry, request).await?);
        }
        instant::take_all(registry, &prepared, deadline).await
    };
    let result = result.await;
    let pause_ns = match result {
        Ok(pause_ns) => pause_ns,
        Err(error) => {
            prepared.into_iter().for_each(|prepared| roll_back(registry, prepared));
            return Err(error);
        }
    };
    // Of all disks before any await: other tasks must find each disk with its present image.
    let before: Vec<_> = prepared.iter().map(|prepared| note_switch(registry, prepared)).collect();
    let mut snapshots = Vec::new();
    for (prepared, image) in prepared.into_iter().zip(before) {
        snapshots.push(conclude(registry, prepared, image, pause_ns).await);
    }
    Ok(TakenSnapshots { snapshots, pause_ns })
}

/// Checks the disk, and opens its overlay. Changes nothing but the reservation of memory.
async fn prepare(
    registry: &Rc<Registry>,
    SnapshotRequest { disk: name, kind }: SnapshotRequest,
) -> anyhow::Result<PreparedSnapshot> {
    let running = registry.disks.get(&name)?;
    registry.disks.check_unchanging(&name)?;
    let reserved = Rc::new(registry.jobs.reserve_snapshot(&name)?);
    let below = running.disk.image();
    check_disk(&running, &below)?;
    let kind = match kind {
        SnapshotKind::Internal(snapshot) => {
            let image = internal_image(&running, &below)?;
            let taken = image.snapshots().await.with_context(|| format!("disk {name}"))?;
            ensure!(
                InternalSnapshot::find(&taken, &snapshot).is_none(),
                "disk {name}: it has a snapshot {snapshot:?} already (choose another name)"
            );
            PreparedKind::Internal { image, name: snapshot }
        }
        SnapshotKind::External { overlay, descriptor, node } => {
            check_base(&running, &below)?;
            check_exports(registry, &name)?;
            let caches = running.caches.get();
            let image = Arc::new(open(registry, &running, &overlay, descriptor).await?);
            let qcow2 = check_overlay(&overlay.to_string(), &image, &below).await;
            let qcow2 = qcow2.with_context(|| format!("disk {name}"))?.clone();
            let nodes = Vec::from_iter(node);
            // Another action of the command may have the same name.
            nodes.iter().try_for_each(|node| registry.check_name(node))?;
            registry.disks.reserve_nodes(&nodes);
            let (location, taken) = (overlay, None);
            PreparedKind::External(PreparedOverlay { image, qcow2, location, nodes, caches, taken })
        }
        SnapshotKind::Node(node) => {
            check_base(&running, &below)?;
            check_exports(registry, &name)?;
            PreparedKind::External(take_node(registry, &running, &node, &below).await?)
        }
    };
    let prepared = PreparedSnapshot { running, below, kind, reserved };
    let PreparedSnapshot { running, below, kind: PreparedKind::External(overlay), .. } = &prepared else {
        return Ok(prepared);
    };
    let memory = running.disk.reserve_memory_for(&[&overlay.image, below]);
    if let Err(error) = memory.with_context(|| format!("disk {}", running.disk.name())) {
        roll_back(registry, prepared);
        return Err(error);
    }
    Ok(prepared)
}

/// Fails if the disk cannot continue on the image of a node, because that has another cache mode:
/// clients learn when they connect whether they must flush.
pub(crate) fn check_cache(node: &str, cache: CacheMode, running: &RunningDisk) -> anyhow::Result<()> {
    let needed = running.config().cache;
    ensure!(
        cache == needed,
        "node {node}: it has the cache mode {}, and the disk {} has {} (add it with the same cache options)",
        cache.name(),
        running.disk.name(),
        needed.name()
    );
    Ok(())
}

/// Takes a disk out of the registry, whose image becomes an overlay.
async fn take_node(
    registry: &Rc<Registry>,
    running: &RunningDisk,
    node: &str,
    below: &Image,
) -> anyhow::Result<PreparedOverlay> {
    let found = registry.disks.get(node)?;
    let (image, location) = (found.disk.image(), found.config().image.clone());
    let cache = found.config().cache;
    ensure!(
        !found.disk.has_handover(),
        "node {node}: handover: its image may pass to another process at any time (add it without handover)"
    );
    drop(found);
    check_cache(node, cache, running)?;
    let qcow2 = check_overlay(&location.to_string(), &image, below).await?.clone();
    ensure!(
        Arc::ptr_eq(&registry.disks.get(node)?.disk.image(), &image),
        "node {node}: it has another image now (try again)"
    );
    // Fails if it is exported, or otherwise in use.
    let taken = registry.take_out_disk(node)?;
    let lower = taken.lower_nodes.iter().map(|node| node.name.clone());
    // The last one is the topmost.
    let nodes: Vec<_> = lower.chain(std::iter::once(node.to_owned())).chain(taken.overlay_nodes()).collect();
    // So that the node can be added again if the snapshot fails.
    registry.disks.reserve_nodes(&nodes);
    let caches = taken.caches.get();
    Ok(PreparedOverlay { image, qcow2, location, nodes, caches, taken: Some(Box::new(taken)) })
}

/// Undoes the preparation of a snapshot.
fn roll_back(registry: &Rc<Registry>, PreparedSnapshot { running, kind, .. }: PreparedSnapshot) {
    // Less than before, so it fits.
    if let Err(error) = running.disk.reserve_memory() {
        tracing::error!(disk = %running.disk.name(), %error, "the memory of a disk cannot be reserved");
    }
    let PreparedKind::External(PreparedOverlay { nodes, taken, .. }) = kind else { return };
    registry.disks.release_nodes(&nodes);
    if let Some(taken) = taken
        && let Err(error) = registry.add_disk(*taken)
    {
        tracing::error!(%error, "a node cannot be added again after a snapshot that has failed");
    }
}

/// Fails if the state of the disk does not permit that its image is replaced.
pub(crate) fn check_disk(running: &RunningDisk, image: &Image) -> anyhow::Result<()> {
    let disk = &running.disk;
    let name = disk.name();
    ensure!(
        !disk.has_handover(),
        "disk {name}: handover: its image may pass to another process at any time (serve it without \
         handover)"
    );
    ensure!(!image.is_read_only(), "disk {name}: it is read-only, so it does not change (copy its image)");
    check_state(running, image)
}

/// As [`check_disk`], for what may have changed since.
pub(crate) fn check_state(running: &RunningDisk, image: &Image) -> anyhow::Result<()> {
    let name = running.disk.name();
    ensure!(
        running.disk.failures().stopped_by().is_none(),
        "disk {name}: an error has stopped it (`weir resume` continues it)"
    );
    ensure!(
        !image.storage().has_lost_writes(),
        "disk {name}: writes to its image were lost (restart weir, and check the image)"
    );
    ensure!(
        !image.has_changed_below(),
        "disk {name}: another program has changed a backing file (check it, and restart weir)"
    );
    Ok(())
}

/// Fails if the header of an overlay cannot name this image as its backing file.
fn check_base(running: &RunningDisk, image: &Image) -> anyhow::Result<()> {
    let name = running.disk.name();
    let is_file = image.files().all(|storage| storage.path().is_some() && storage.file_identity().is_some());
    ensure!(
        is_file,
        "disk {name}: its image is not a file of this host, which an overlay needs (use `weir backup`)"
    );
    ensure!(
        running.config().part.is_none(),
        "disk {name}: it is a part of its image, and a backing file is a whole image (use `weir backup`)"
    );
    ensure!(
        image.files().all(|storage| !storage.path().is_some_and(|path| path.starts_with("/dev/fdset"))),
        "disk {name}: its image was passed as a descriptor, and an overlay needs its path"
    );
    ensure!(
        !is_encrypted(image),
        "disk {name}: its image is encrypted, and an overlay would not be (use --internal)"
    );
    Ok(())
}

/// Fails if an export depends on the image that the disk has now.
pub(crate) fn check_exports(registry: &Registry, disk: &str) -> anyhow::Result<()> {
    ensure!(
        !registry.exports.is_opening_device(disk),
        "disk {disk}: a block device of this host is being created for it (try again)"
    );
    for export in registry.exports.of_disk(disk) {
        let id = &export.id;
        ensure!(
            export.nbd_parameters.as_ref().is_none_or(|parameters| parameters.bitmaps.is_empty()),
            "disk {disk}: the export {id} provides dirty bitmaps, and an overlay has none (remove it first)"
        );
        // After a crash a device is found again by its image, which must be the present one.
        let is_device = match &export.endpoint {
            RunningEndpoint::Separate(endpoint) => {
                matches!(endpoint.host_endpoint(), Some(HostEndpoint::Ublk(_) | HostEndpoint::NbdDevice(_)))
            }
            RunningEndpoint::Nbd(..) => false,
        };
        ensure!(
            !is_device,
            "disk {disk}: the export {id} is a block device of this host, which belongs to the present image \
             (detach it first, or use --internal)"
        );
    }
    Ok(())
}

fn internal_image(running: &RunningDisk, image: &Image) -> anyhow::Result<Qcow2Image> {
    match image {
        Image::Qcow2(qcow2) => Ok(qcow2.clone()),
        Image::Raw(_) => bail!(
            "disk {}: its image is raw, and only qcow2 images have internal snapshots (leave \
             --internal out for an external one)",
            running.disk.name()
        ),
    }
}

/// Opens the overlay with the options of the disk.
async fn open(
    registry: &Registry,
    running: &RunningDisk,
    overlay: &ImageLocation,
    descriptor: Option<PassedFd>,
) -> anyhow::Result<Image> {
    let name = running.disk.name();
    let path = overlay.path().map(Path::to_owned).with_context(|| {
        format!("disk {name}: {overlay}: an overlay is a file (give the path of a qcow2 image)")
    })?;
    if descriptor.is_none() {
        registry.check_image(overlay).await?;
    } else if let Some(root) = registry.image_root().cloned() {
        // A start opens it by its path.
        let checked = reactor::run_blocking(move || root.check(&path)).await;
        checked.with_context(|| format!("disk {name}"))?;
    }
    let options = DiskAssembly::for_registry(registry).overlay_options(&running.current_config(), descriptor);
    let spec = overlay.to_spec()?;
    match reactor::timeout(OPEN_TIMEOUT, image::open::open(&spec, options)).await {
        Ok(opened) => opened.map_err(|error| registry.with_holder_if_lock_error(error.into(), [])),
        Err(_) => bail!("disk {name}: {overlay}: no answer in {} s", OPEN_TIMEOUT.as_secs()),
    }
}

/// Deletes the first internal snapshot of a disk for which `is_wanted` returns true; returns it.
///
/// # Errors
/// The disk's image has no internal snapshots, or cannot be changed.
pub(crate) async fn delete_internal(
    registry: &Registry,
    disk: &str,
    is_wanted: impl Fn(&InternalSnapshot) -> bool,
) -> anyhow::Result<Option<InternalSnapshot>> {
    let _guard = registry.lock_structure().await?;
    let running = registry.disks.get(disk)?;
    let _reserved = registry.jobs.reserve_snapshot(disk)?;
    let image = running.disk.image();
    check_disk(&running, &image)?;
    let qcow2 = internal_image(&running, &image)?;
    let named = || format!("disk {disk}");
    let Some(snapshot) = qcow2.snapshots().await.with_context(named)?.into_iter().find(is_wanted) else {
        return Ok(None);
    };
    qcow2.delete_snapshot(&snapshot.id()).await.with_context(named)?;
    tracing::info!(disk, snapshot = &*snapshot.name(), "an internal snapshot was deleted");
    Ok(Some(snapshot))
}

/// Notes the new image of a disk, which has been switched; returns the previous one.
fn note_switch(registry: &Registry, PreparedSnapshot { running, kind, .. }: &PreparedSnapshot) -> String {
    let image = running.config().image.to_string();
    let PreparedKind::External(PreparedOverlay { location, nodes, caches, taken, .. }) = kind else {
        return image;
    };
    running.set_image(location.clone(), ImageFormat::Qcow2);
    if taken.is_some() {
        running.caches.set(*caches);
    }
    registry.disks.add_overlay_nodes(running, nodes.clone());
    registry.note_switched_image(running.disk.name(), location, ImageFormat::Qcow2);
    image
}

/// Brings the rest of the daemon's state up to date after a snapshot, which cannot fail any more.
/// `image` is that before the snapshot.
async fn conclude(
    registry: &Registry,
    PreparedSnapshot { running, below, kind, .. }: PreparedSnapshot,
    image: String,
    pause_ns: u64,
) -> TakenSnapshot {
    let disk = running.disk.name();
    let name = disk.to_string();
    match kind {
        PreparedKind::Internal { name: snapshot, .. } => {
            tracing::info!(%disk, image, snapshot, pause_ns, "an internal snapshot was taken");
            let message = format!("disk {disk}: {image} has the internal snapshot {snapshot:?}");
            let event = NewEvent::new(Kind::SnapshotTaken, message).of_disk(&name);
            registry.events.record(event.with("image", &*image).with("internal", &*snapshot));
            TakenSnapshot { disk: name, image, internal: Some(snapshot), ..TakenSnapshot::default() }
        }
        PreparedKind::External(PreparedOverlay { location, caches, taken, .. }) => {
            // On another thread: releases locks.
            reactor::run_blocking(move || below.make_read_only()).await;
            drop(taken);
            // A client may have changed the settings after the overlay was opened.
            let wanted = running.caches.get();
            if wanted != caches
                && let Err(error) = running.set_caches(wanted).await
            {
                tracing::warn!(%disk, "the cache sizes of the disk cannot be set: {error:#}");
            }
            if let Err(error) = running.disk.reserve_memory() {
                tracing::warn!(%disk, %error, "the memory of a disk cannot be reserved");
            }
            // The overlay may be on another device.
            if let Err(error) = registry.check_device_of(&name) {
                tracing::warn!("{error:#}");
            }
            let overlay = location.to_string();
            tracing::info!(%disk, image = overlay, backing = image, pause_ns, "an external snapshot was taken");
            let message = format!("disk {disk}: {image} is the backing file of its new image {overlay}");
            let event = NewEvent::new(Kind::SnapshotTaken, message).of_disk(&name);
            registry.events.record(event.with("image", &*overlay).with("backing", &*image));
            TakenSnapshot { disk: name, image: overlay, backing: Some(image), internal: None }
        }
    }
}

impl Registry {
    /// Makes the new image that of the disk in the config in force, so that a reload compares the
    /// file with it.
    pub(crate) fn note_switched_image(&self, disk: &str, image: &ImageLocation, format: ImageFormat) {
        let mut loaded = self.loaded.borrow_mut();
        let Some(config) = loaded.as_deref() else { return };
        let Some(at) = config.plan.disks.iter().position(|planned| planned.name == disk) else { return };
        let mut plan = (*config.plan).clone();
        (plan.disks[at].image, plan.disks[at].format) = (image.clone(), Some(format));
        *loaded = Some(Rc::new(LoadedConfig { plan: Rc::new(plan), ..config.clone() }));
    }
}

/// Files of the disk's backing chain, from the top to the base. Storage without a path is
/// described.
pub(crate) fn chain_files(image: &Image) -> Vec<String> {
    let file = |image: &Image| {
        let storage = image.files().next();
        match storage.and_then(Storage::path) {
            Some(path) => absolute(path).map_or_else(|_| path.to_owned(), |path| path.display().to_string()),
            None => storage.map(Storage::description).unwrap_or_default(),
        }
    };
    image.chain().map(file).collect()
}
