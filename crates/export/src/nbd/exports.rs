//! The exports of a running server; they are added and removed while clients negotiate and are
//! served.
//!
//! Only the handshake looks exports up; a connection holds its disk itself. A number is never used
//! twice in a server's life, so a client whose export was removed never gets another one.

use std::{
    collections::{BTreeMap, HashMap},
    sync::Arc,
};

use block::disk::Disk;
use image::qcow2::bitmap::BitmapView;
use policy::{access::AccessRules, time::Duration};
use storage::BlockSize;

use super::{
    catalog::{BlockSizes, ExportInfo, Features},
    proto,
};

/// Time that a handshake waits for the file system to report the size of an image. After it, the
/// client gets the last known size.
const SIZE_TIMEOUT: Duration = Duration::from_secs(1);

/// Detects a resize of the disk's image from outside.
pub(super) async fn refresh_size(disk: &Disk) {
    if let Err(error) = disk.refresh_size_within(SIZE_TIMEOUT).await {
        tracing::warn!(disk = %disk.name(), %error, "cannot determine whether the image was resized");
    }
}

/// A disk as a server offers it.
#[allow(missing_docs, reason = "the names are self-explanatory")]
#[derive(Clone, Debug)]
pub struct NbdServerExport {
    pub name: Arc<str>,
    /// One line for display.
    pub description: Arc<str>,
    pub disk: Arc<Disk>,
    /// Reject writes even if the disk is writable.
    pub read_only: bool,
    /// At most [`MAX_BITMAPS`](super::MAX_BITMAPS) of the image's bitmaps are offered.
    pub bitmaps: Arc<[BitmapView]>,
    /// Clients that may use the export; for all other clients it does not exist.
    pub access: AccessRules,
}

impl NbdServerExport {
    /// Last known properties; [`refresh_size`] detects that the image was resized from outside.
    pub(super) fn info(&self) -> ExportInfo {
        let image = self.disk.image();
        ExportInfo {
            name: Arc::clone(&self.name),
            description: Arc::clone(&self.description),
            size_bytes: self.disk.size_bytes(),
            features: Features {
                read_only: self.read_only || image.is_read_only(),
                flush: true,
                fua: true,
                trim: true,
                write_zeroes: true,
                fast_zero: true,
                dont_fragment: true,
                cache: true,
                // All connections share the disk and its cache, so a flush on one covers the writes
                // of all.
                multi_conn: true,
                // Unknown: the storage may be of any kind.
                rotational: false,
            },
            sizes: block_sizes(image.block_size()),
            bitmaps: self.bitmaps.iter().map(|bitmap| Arc::clone(bitmap.name())).collect(),
        }
    }
}

/// Any alignment is served, so the minimum is one byte; the preferred size is the cheapest.
fn block_sizes(storage: BlockSize) -> BlockSizes {
    let preferred = storage.preferred.clamp(512, 1 << 20);
    BlockSizes::new(1, preferred, proto::DEFAULT_MAX_PAYLOAD).unwrap_or_default()
}

#[derive(Debug, Default)]
pub(super) struct RegisteredExports {
    next: usize,
    by_number: BTreeMap<usize, NbdServerExport>,
    by_name: HashMap<Arc<str>, usize>,
    /// Reserved numbers of exports that are not there yet, by name.
    expected: HashMap<String, usize>,
}

impl RegisteredExports {
    /// Reserves numbers in this order for exports that are added later in any order.
    pub(super) fn reserve(&mut self, names: impl Iterator<Item = String>) {
        for name in names {
            self.expected.insert(name, self.next);
            self.next += 1;
        }
    }

    /// Reserves the former number of a removed export that will be added again.
    pub(super) fn reserve_again(&mut self, name: &str, number: usize) {
        self.expected.insert(name.to_owned(), number);
    }

    /// Releases a reserved number.
    pub(super) fn release(&mut self, name: &str) {
        self.expected.remove(name);
    }

    /// Adds an export and returns its number; `None` if the name is in use.
    pub(super) fn add(&mut self, export: NbdServerExport) -> Option<usize> {
        if self.by_name.contains_key(&export.name) {
            return None;
        }
        let number = self.expected.remove(&*export.name).unwrap_or(self.next);
        // Numbers are never used twice, also if this one was reserved.
        self.next = self.next.max(number + 1);
        self.by_name.insert(Arc::clone(&export.name), number);
        self.by_number.insert(number, export);
        Some(number)
    }

    pub(super) fn remove(&mut self, number: usize) -> Option<NbdServerExport> {
        let export = self.by_number.remove(&number)?;
        self.by_name.remove(&export.name);
        Some(export)
    }

    pub(super) fn get(&self, number: usize) -> Option<&NbdServerExport> {
        self.by_number.get(&number)
    }

    /// Number of the export with this name. The empty name means the default export: the one with
    /// the empty name, or the oldest. While the oldest is only reserved, there is no default
    /// export.
    pub(super) fn find(&self, name: &str) -> Option<usize> {
        let to_come = self.expected.values().min();
        let is_first = |number: &&usize| to_come.is_none_or(|to_come| *number < to_come);
        let default = || if name.is_empty() { self.by_number.keys().next().filter(is_first) } else { None };
        self.by_name.get(name).or_else(default).copied()
    }

    /// First export with a number of at least `from` whose access rules satisfy `is_allowed`.
    pub(super) fn next(
        &self,
        from: usize,
        is_allowed: impl Fn(&AccessRules) -> bool,
    ) -> Option<(usize, ExportInfo)> {
        let mut later = self.by_number.range(from..);
        let next = later.find(|(_, export)| is_allowed(&export.access));
        next.map(|(&number, export)| (number, export.info()))
    }
}
