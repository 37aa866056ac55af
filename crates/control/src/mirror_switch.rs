//! Moves a disk to the target of its mirror: the answer of the main thread, and what follows.
//!
//! ```text
//!   a mirror asks ─► answer_question: checks, config of the disk ─► switched ─► follow_switch
//! ```
//!
//! Never opens or closes an image.

use std::rc::Rc;

use anyhow::{Context as _, ensure};
use image::open::is_encrypted;
use settings::ImageLocation;

use crate::{
    registry::{Registry, RunningDisk, RunningJob},
    snapshots::{check_cache, check_disk, check_exports},
};

/// Fails if the disk cannot continue on another image.
pub(crate) fn check_movable(registry: &Registry, running: &RunningDisk) -> anyhow::Result<()> {
    let (image, name) = (running.disk.image(), running.disk.name());
    check_disk(running, &image)?;
    check_exports(registry, name)?;
    ensure!(
        running.config().part.is_none(),
        "disk {name}: it is a part of its image, which its config would take of the target too (use \
         `weir backup`)"
    );
    ensure!(
        !is_encrypted(&image),
        "disk {name}: its image is encrypted, and the target would not be (use `weir backup` to a \
         target that may have its data)"
    );
    Ok(())
}

/// Fails if a disk cannot continue on the image of another one, whose config differs.
pub(crate) fn check_node(registry: &Registry, running: &RunningDisk, node: &str) -> anyhow::Result<()> {
    let found = registry.disks.get(node)?;
    check_cache(node, found.config().cache, running)?;
    ensure!(
        found.config().part.is_none(),
        "node {node}: it is a part of its image (add it without offset and size)"
    );
    Ok(())
}

/// Answers the question of a mirror whose target equals the disk, while clients' changes wait:
/// checks what may have changed since its start, and notes the new image of the disk.
pub(crate) fn answer_question(registry: &Rc<Registry>, running: &RunningJob) {
    // A reload or a snapshot may await something between two looks at the image. The mirror asks
    // again.
    let Some(_guard) = registry.lifecycle.structure_lock.try_lock() else { return };
    match PreparedSwitch::prepare(registry, running) {
        Err(error) => {
            running.job.answer(Err(format!("{error:#}")));
        }
        Ok(prepared) if running.job.answer(Ok(())) => prepared.note(registry, running),
        Ok(prepared) => prepared.roll_back(registry, running),
    }
}

/// A switch that nothing prevents at this moment.
struct PreparedSwitch {
    disk: Rc<RunningDisk>,
    location: ImageLocation,
    /// The disk that the target was.
    taken: Option<RunningDisk>,
}

impl PreparedSwitch {
    fn prepare(registry: &Rc<Registry>, running: &RunningJob) -> anyhow::Result<Self> {
        let disk = registry.disks.get(&running.disk)?;
        let name = disk.disk.name();
        let target = running.switch.as_ref().context("the job has no image to switch to")?;
        let image = target.image.upgrade().context("the target is closed")?;
        registry.lifecycle.check_not_ending()?;
        check_movable(registry, &disk)?;
        ensure!(
            !image.storage().has_lost_writes() && !image.is_read_only(),
            "the target cannot be written any more (check its storage, and start again)"
        );
        ensure!(
            image.size_bytes() == disk.disk.size_bytes(),
            "disk {name}: it or the target was resized (start again)"
        );
        // The settings of the disk may have changed the reservation since.
        disk.disk.reserve_memory_for(&[&disk.disk.image(), &image])?;
        let node = running.target_disk.borrow().clone();
        let taken = match node {
            Some(node) => {
                check_node(registry, &disk, &node)?;
                // No target any more, but a disk that nothing uses.
                running.target_disk.take();
                let taken = registry.take_out_disk(&node);
                if taken.is_err() {
                    running.target_disk.replace(Some(node));
                }
                Some(taken?)
            }
            None => None,
        };
        Ok(Self { disk, location: target.location.clone(), taken })
    }

    /// Notes the new image, which the disk is being switched to.
    fn note(self, registry: &Registry, running: &RunningJob) {
        let Self { disk, location, taken } = self;
        disk.set_image(location.clone(), running.format);
        if let Some(taken) = taken {
            let lower = taken.lower_nodes.iter().map(|node| node.name.clone());
            let own = std::iter::once(taken.disk.name().to_string());
            // The last one is the topmost.
            let nodes = lower.chain(own).chain(taken.overlay_nodes()).collect();
            registry.disks.add_overlay_nodes(&disk, nodes);
        }
        registry.note_switched_image(&running.disk, &location, running.format);
    }

    fn roll_back(self, registry: &Rc<Registry>, running: &RunningJob) {
        let Some(taken) = self.taken else { return };
        let node = taken.disk.name().to_string();
        match registry.add_disk(taken) {
            Ok(()) => {
                running.target_disk.replace(Some(node));
            }
            Err(error) => {
                tracing::error!(%error, "a node cannot be added again after a switch that was late");
            }
        }
    }
}

/// Brings the rest of the daemon's state up to date after a mirror has moved its disk.
pub(crate) async fn follow_switch(registry: &Registry, running: &RunningJob) {
    let name = &running.disk;
    let Ok(disk) = registry.disks.get(name) else { return };
    // A client may have changed the settings after the target was opened.
    let wanted = disk.caches.get();
    if disk.has_key("l2-cache-size")
        && let Err(error) = disk.set_caches(wanted).await
    {
        tracing::warn!(disk = name, "the cache sizes of the disk cannot be set: {error:#}");
    }
    if let Err(error) = disk.disk.reserve_memory() {
        tracing::warn!(disk = name, %error, "the memory of a disk cannot be reserved");
    }
    // The target may be on another device.
    if let Err(error) = registry.check_device_of(name) {
        tracing::warn!("{error:#}");
    }
    let pause_ns = running.job.status().pause_ns;
    tracing::info!(disk = name, image = %disk.config().image, pause_ns, "the disk continues on another image");
}
