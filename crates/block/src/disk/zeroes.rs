//! Writes of nothing but zeroes: looked for where that was asked, and then written as zeroes,
//! which an image can keep without their bytes.

use super::{Discards, Disk, Operation, Pass};
use reactor::error::Result;
use storage::{Durability, ZeroOptions};

/// Whether writes are looked at for zeroes: QEMU's `detect-zeroes` (`BlockdevOptions` in its
/// qapi/block-core.json).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum DetectZeroes {
    /// What is written is written.
    #[default]
    Off,
    /// A write of zeroes alone is a write-zeroes.
    On,
    /// The same, and the storage may have the space back.
    Unmap,
}

impl DetectZeroes {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Off, Self::On, Self::Unmap];

    /// As it is said everywhere.
    pub fn name(self) -> &'static str {
        match self {
            Self::Off => "off",
            Self::On => "on",
            Self::Unmap => "unmap",
        }
    }
}

impl Disk {
    /// Of what is to be written as zeroes, or with zeroes that may be holes.
    pub(super) fn may_unmap(&self, is_asked: bool) -> bool {
        is_asked && self.discards == Discards::Unmap
    }

    /// A write whose data was seen to be zeroes. If a guest changes its memory after that look,
    /// either is what it has written.
    pub(super) async fn write_seen_zeroes(
        &self,
        pass: &Pass,
        range: (u64, u64),
        durability: Durability,
    ) -> Result<()> {
        let may_unmap = self.may_unmap(self.detect_zeroes == DetectZeroes::Unmap);
        let options = ZeroOptions { may_unmap, only_if_fast: false, durability };
        // To those who count, and who are told of an error, it is the write that it was.
        self.zero(Operation::Write, pass, range, options).await
    }

    /// Makes a range read as zeroes.
    pub(super) async fn zero(
        &self,
        operation: Operation,
        pass: &Pass,
        (offset, length): (u64, u64),
        options: ZeroOptions,
    ) -> Result<()> {
        let zero = async || {
            self.prefetch.change(offset, length, self.image.write_zeroes(offset, length, options)).await
        };
        self.done(operation, (offset, length), pass, zero).await
    }
}
