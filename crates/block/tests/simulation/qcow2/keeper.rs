//! A task that creates and deletes snapshots and writes compressed clusters while clients use the
//! disk.
//!
//! A snapshot always has one content, which a read of the whole disk could have returned while it
//! was created. After a crash it exists if its creation was acknowledged, and does not if its
//! deletion was.

use std::{cell::RefCell, collections::BTreeMap, rc::Rc, sync::Arc};

use block::disk::Disk;
use image::{
    Image, Qcow2Image,
    qcow2::snapshot::{NewSnapshot, SnapshotError},
};
use reactor::{buffer::IoBuffer, error::Error, now, sim, sleep_until};

use super::kind::{Files, ImageKind, disk};
use policy::prefetch::PrefetchConfig;

use crate::{
    client::{Shared, chance, short_time},
    model::Outcome,
};

/// Known snapshots of one image, by name; no name is used twice.
#[derive(Debug, Default)]
pub(crate) struct KnownSnapshots {
    by_name: BTreeMap<String, KnownSnapshot>,
    created: u64,
}

#[derive(Clone, Debug)]
struct KnownSnapshot {
    /// Model time at which its creation began.
    began: u64,
    /// True if its creation was acknowledged, and no deletion has begun.
    certain: bool,
    /// Content when it was first read.
    content: Option<Vec<u8>>,
}

impl KnownSnapshots {
    pub(crate) fn with_first(content: Vec<u8>) -> Self {
        let first = KnownSnapshot { began: 0, certain: true, content: Some(content) };
        Self { by_name: BTreeMap::from([("first".to_owned(), first)]), created: 0 }
    }

    /// Checks the snapshots after a crash: all certain ones exist, no deleted one does, and none
    /// has changed.
    pub(crate) async fn check(&mut self, kind: &ImageKind, files: &Files, shared: &Shared) {
        let image = Qcow2Image::open(kind.in_memory(files, true).await).await.expect("valid");
        let mut found = BTreeMap::new();
        for snapshot in image.snapshots().await.expect("valid") {
            let name = snapshot.name().into_owned();
            let known =
                self.by_name.remove(&name).unwrap_or_else(|| panic!("snapshot {name:?} is there again"));
            let parts = kind.in_memory(files, true).await;
            let content = disk(&Qcow2Image::open_snapshot(parts, &snapshot.id()).await.expect("valid")).await;
            match &known.content {
                Some(old) => assert!(*old == content, "snapshot {name:?} has changed"),
                None => shared.model.borrow().check_read(known.began, 0, &content),
            }
            found.insert(name, KnownSnapshot { certain: true, content: Some(content), ..known });
        }
        let lost: Vec<_> =
            self.by_name.iter().filter(|(_, known)| known.certain).map(|(name, _)| name).collect();
        assert!(lost.is_empty(), "snapshots that were taken are lost: {lost:?}");
        self.by_name = found;
    }
}

/// The task that runs concurrently with the clients.
pub(crate) struct MaintenanceTask {
    pub(crate) kind: ImageKind,
    pub(crate) disk: Arc<Disk>,
    pub(crate) shared: Rc<Shared>,
    pub(crate) snapshots: Rc<RefCell<KnownSnapshots>>,
}

impl MaintenanceTask {
    /// Performs this many operations.
    pub(crate) async fn run(self, operations: usize) {
        for _ in 0..operations {
            sleep_until(now() + short_time()).await;
            match sim::random(|random| random.u8(..3)) {
                0 if self.kind.snapshots => self.take().await,
                1 if self.kind.snapshots => self.delete().await,
                _ if self.kind.compressed => self.write_compressed().await,
                _ => {}
            }
        }
    }

    fn image(&self) -> Qcow2Image {
        match &*self.disk.image() {
            Image::Qcow2(image) => image.clone(),
            Image::Raw(_) => unreachable!("every image here is qcow2"),
        }
    }

    async fn take(&self) {
        let name = {
            let mut snapshots = self.snapshots.borrow_mut();
            snapshots.created += 1;
            let began = self.shared.model.borrow_mut().begin();
            let name = format!("taken {}", snapshots.created);
            snapshots.by_name.insert(name.clone(), KnownSnapshot { began, certain: false, content: None });
            name
        };
        let result = self.image().create_snapshot(NewSnapshot { name: &name, date_s: 1, date_ns: 2 }).await;
        match result {
            Ok(_) => self.snapshots.borrow_mut().by_name.get_mut(&name).expect("just added").certain = true,
            // Small refcounts soon reach their maximum.
            Err(SnapshotError::Refcount { .. }) => {}
            Err(error) => self.failed(&error),
        }
    }

    async fn delete(&self) {
        let name = {
            let mut snapshots = self.snapshots.borrow_mut();
            let count = snapshots.by_name.len();
            if count == 0 {
                return;
            }
            let (name, known) =
                snapshots.by_name.iter_mut().nth(sim::random(|random| random.usize(..count))).expect("there");
            // From now on it may be missing after a crash.
            known.certain = false;
            name.clone()
        };
        match self.image().delete_snapshot(&name).await {
            Ok(()) => drop(self.snapshots.borrow_mut().by_name.remove(&name)),
            // An earlier deletion failed after it had taken effect.
            Err(SnapshotError::NotFound(_)) => {}
            Err(error) => self.failed(&error),
        }
    }

    fn failed(&self, error: &SnapshotError) {
        let is_closed = self.disk.image().is_read_only();
        let is_expected = match error {
            SnapshotError::Failed(Error::IO | Error::NO_SPACE) => true,
            SnapshotError::Failed(Error::NOT_PERMITTED) | SnapshotError::ReadOnly => is_closed,
            _ => false,
        };
        assert!(self.shared.may_fail && is_expected, "{error}");
        self.shared.counts.borrow_mut().failed += 1;
    }

    async fn write_compressed(&self) {
        let cluster = self.kind.options.cluster_bytes as usize;
        let size = self.shared.model.borrow().size_bytes();
        let start = sim::random(|random| random.usize(..size.div_ceil(cluster))) * cluster;
        let range = start..(start + cluster).min(size);
        let (number, data) = if chance(50) {
            (self.shared.model.borrow_mut().begin_zeroes(range.clone()), vec![0; range.len()])
        } else {
            self.shared.model.borrow_mut().begin_write(range.clone())
        };
        // It bypasses the disk, whose prefetch cache would become stale.
        let settings = self.disk.prefetch().settings();
        self.shared.bypassed.set(true);
        self.disk.prefetch().set(PrefetchConfig::off()).expect("valid");
        let result = self.image().write_compressed(start as u64, IoBuffer::copy_of(&data).into()).await;
        self.disk.prefetch().set(settings).expect("it was in force");
        self.shared.bypassed.set(false);
        let outcome = match result {
            Ok(()) => Outcome::Applied,
            Err(error) => {
                let is_closed = error == Error::NOT_PERMITTED && self.disk.image().is_read_only();
                let is_expected = [Error::IO, Error::NO_SPACE].contains(&error) || is_closed;
                assert!(self.shared.may_fail && is_expected, "{error}");
                Outcome::Open
            }
        };
        self.shared.model.borrow_mut().end_change(number, outcome);
    }
}
