//! Allocation status of a disk: data, zero or unallocated, for NBD's block status and `weir image
//! map`.

use super::{
    Qcow2Image,
    lookup::{GuestMapping, MappedRun},
};
use reactor::error::{Error, Result};
use storage::{Extent, MAX_EXTENTS, push_extent};

use crate::ChainDepthRun;

impl Qcow2Image {
    /// Status of a range, backing files included: see
    /// [`Storage::block_status`](storage::Storage::block_status).
    pub async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        if length == 0 || !self.is_inside(offset, length) {
            return Err(Error::INVALID);
        }
        let _guard = self.gate.enter().await;
        let image = self.current();
        let mut extents = Vec::new();
        let mut done = 0;
        while done < length && extents.len() < MAX_EXTENTS {
            let at = offset + done;
            let piece = image.lookup(at, length - done).await?;
            done += image.push_status(&mut extents, at, piece).await?;
        }
        Ok(extents)
    }

    /// Appends the status of a piece, or of its first part, and returns the length of that part.
    async fn push_status(&self, extents: &mut Vec<Extent>, at: u64, piece: MappedRun) -> Result<u64> {
        let length = piece.length;
        let extent = match piece.mapping {
            GuestMapping::Data { .. } | GuestMapping::Compressed { .. } => {
                Extent { length, hole: false, zero: false }
            }
            GuestMapping::Zero { host } => Extent { length, hole: host.is_none(), zero: true },
            GuestMapping::Unallocated => {
                let backed_bytes = self.backing_bytes(at).min(length);
                let Some(backing) = self.backing().filter(|_| backed_bytes > 0) else {
                    push_extent(extents, Extent { length, hole: true, zero: true });
                    return Ok(length);
                };
                let mut sum = 0;
                for extent in Box::pin(backing.block_status(at, backed_bytes)).await? {
                    sum += extent.length;
                    push_extent(extents, extent);
                }
                return Ok(sum);
            }
        };
        push_extent(extents, extent);
        Ok(length)
    }

    /// Mapping of a range in this image alone: contiguous pieces that cover all of it or its first
    /// part.
    pub async fn map(&self, offset: u64, length: u64) -> Result<Vec<MappedRun>> {
        if length == 0 || !self.is_inside(offset, length) {
            return Err(Error::INVALID);
        }
        let _guard = self.gate.enter().await;
        let mut pieces: Vec<MappedRun> = Vec::new();
        let mut done = 0;
        while done < length && pieces.len() < MAX_EXTENTS {
            let piece = self.lookup(offset + done, length - done).await?;
            done += piece.length;
            pieces.push(piece);
        }
        Ok(pieces)
    }

    /// See [`Image::allocation_depth`](crate::Image::allocation_depth). A range beyond the end of
    /// a shorter backing file counts as allocated in the backing file, as in QEMU.
    pub async fn allocation_depth(&self, offset: u64, length: u64) -> Result<Vec<ChainDepthRun>> {
        let mut runs: Vec<ChainDepthRun> = Vec::new();
        let mut push = |length, depth| match runs.last_mut() {
            Some(last) if last.depth == depth => last.length += length,
            _ => runs.push(ChainDepthRun { length, depth }),
        };
        let mut at = offset;
        for MappedRun { length, mapping } in self.map(offset, length).await? {
            match (mapping, self.backing()) {
                (GuestMapping::Unallocated, None) => push(length, 0),
                (GuestMapping::Unallocated, Some(backing)) => {
                    let backed_bytes = self.backing_bytes(at).min(length);
                    let mut reported = 0;
                    if backed_bytes > 0 {
                        for below in Box::pin(backing.allocation_depth(at, backed_bytes)).await? {
                            push(below.length, if below.depth == 0 { 0 } else { below.depth + 1 });
                            reported += below.length;
                        }
                    }
                    // The backing file returned fewer runs than requested: end here, the
                    // caller requests the rest.
                    if reported < backed_bytes {
                        break;
                    }
                    if backed_bytes < length {
                        push(length - backed_bytes, 2);
                    }
                }
                _ => push(length, 1),
            }
            at += length;
        }
        runs.truncate(MAX_EXTENTS);
        Ok(runs)
    }
}
