//! What an image really is, with all that is behind it: what must be the same where another process
//! goes on with a disk.

use super::Image;
use storage::Format;

/// One image of a chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Layer {
    /// How its bytes are read.
    pub format: Format,
    /// Of an image that is only read: where the table of its clusters begins, which tells internal
    /// snapshots apart.
    pub table: Option<u64>,
    /// Its own, and of its data file if it has one.
    pub files: Vec<storage::Identity>,
}

impl Image {
    /// The image, and one after the other those that it reads from where it has nothing itself.
    pub fn layers(&self) -> Vec<Layer> {
        let layer = |image: &Self| Layer {
            format: image.format(),
            table: match image {
                Self::Qcow2(qcow2) if qcow2.is_read_only() => Some(qcow2.header().l1_offset),
                // It moves as an image grows.
                Self::Qcow2(_) | Self::Raw(_) => None,
            },
            files: image.files().map(storage::Storage::identity).collect(),
        };
        self.chain().map(layer).collect()
    }
}
