//! Identity of an image and its backing chain. It must not change when another process
//! continues with the disk (upgrade, handover).

use super::Image;
use storage::ImageFormat;

/// Identity of one image of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerIdentity {
    /// Format that it is opened as.
    pub format: ImageFormat,
    /// Offset of the L1 table of an image that is opened read-only; distinguishes internal
    /// snapshots.
    pub table: Option<u64>,
    /// Its file, and its external data file if it has one.
    pub files: Vec<storage::StorageIdentity>,
}

impl Image {
    /// Identities of the image and its backing chain, in order.
    pub fn layers(&self) -> Vec<LayerIdentity> {
        let layer = |image: &Self| LayerIdentity {
            format: image.format(),
            table: match image {
                Self::Qcow2(qcow2) if qcow2.is_read_only() => Some(qcow2.header().l1_offset),
                // The L1 table of a writable image moves when the disk grows, so it is no identity.
                Self::Qcow2(_) | Self::Raw(_) => None,
            },
            files: image.files().map(storage::Storage::identity).collect(),
        };
        self.chain().map(layer).collect()
    }
}
