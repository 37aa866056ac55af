//! Population: copies content of the backing chain into the image, which then does not need those
//! images any more.
//!
//! ```text
//!   image      │▓▓▓▓│    │    │    │      unallocated: reads from the chain
//!   removed    │    │▓▓▓▓│0000│    │      data is copied; zeroes become zero clusters
//!   base       │▓▓▓▓│▓▓▓▓│▓▓▓▓│▓▓▓▓│      stays below, if there is one
//! ```
//!
//! It is a write without new data: under the lock of the guest range, what a cluster reads is
//! written to a new cluster, unless another task has allocated one meanwhile. So the content never
//! changes, dirty bitmaps do not record it, and requests are served at any time.
//!
//! Without a base, zeroes need no cluster: an unallocated cluster reads as zeroes then.
//!
//! Never changes a cluster that is allocated or a zero cluster.

use std::{borrow::Cow, ops::Range};

use super::{
    Qcow2Image,
    entry::{ClusterMapping, StandardCluster},
    lookup::GuestMapping,
    write::mask,
};
use reactor::{
    buffer::{ReadTarget, Segments, zero},
    error::{Error, Result},
};

use crate::Image;

/// Largest amount of data that one call of [`Qcow2Image::populate`] has in memory at once, in
/// bytes: a largest cluster.
pub const COPY_BYTES: u64 = 2 << 20;

/// Work of a call of [`Qcow2Image::populate`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Populated {
    /// Bytes that were written as data.
    pub copied_bytes: u64,
}

/// The image that stays below.
#[derive(Clone, Copy, Debug)]
struct Base {
    /// Its depth in the chain of the backing image, which has the depth 1.
    depth: u32,
    size_bytes: u64,
}

impl Qcow2Image {
    /// Allocates what `length` bytes at `offset` read from the images between this one and `base`,
    /// or from all images below this one. Parts beyond the end of the disk are skipped. Whole
    /// clusters are allocated, or whole subclusters if the image has them.
    ///
    /// The result is durable after a flush. A dropped future is completed nonetheless.
    ///
    /// # Errors
    /// [`Error::NOT_PERMITTED`] if the image is read-only; [`Error::INVALID`] if `base` is not in
    /// its chain; or an error of a file. A part of the range is then populated.
    pub async fn populate(&self, offset: u64, length: u64, base: Option<&Image>) -> Result<Populated> {
        let base = match base {
            Some(base) => {
                let mut below = self.backing().into_iter().flat_map(Image::chain);
                let above = below.position(|image| std::ptr::eq(image, base)).ok_or(Error::INVALID)?;
                Some(Base { depth: above as u32 + 1, size_bytes: base.size_bytes() })
            }
            None => None,
        };
        let image = self.clone();
        let populating = reactor::spawn_detached(async move {
            let populated = {
                let _guard = image.gate.enter().await;
                if matches!(image.current(), Cow::Owned(_)) {
                    // A caller that has given up: the chain is another one since.
                    return Ok(Populated::default());
                }
                if image.is_read_only() {
                    return Err(Error::NOT_PERMITTED);
                }
                // Read under the guard: a resize waits until no request holds one.
                let end = offset.saturating_add(length).min(image.size_bytes());
                reactor::in_background(image.populate_inside(offset..end, base)).await?
            };
            image.limit_unreferenced().await?;
            Ok(populated)
        });
        populating.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn populate_inside(&self, range: Range<u64>, base: Option<Base>) -> Result<Populated> {
        let mut populated = Populated::default();
        let mut at = range.start;
        while at < range.end {
            let piece = self.lookup(at, range.end - at).await?;
            let mut end = at + piece.length;
            if piece.mapping == GuestMapping::Unallocated {
                // In one slice, so that each allocation is linked in one step.
                let coverage = self.slice_coverage();
                end = end.min((at / coverage + 1) * coverage);
                populated.copied_bytes += self.populate_locked(at..end, base).await?;
            }
            at = end;
        }
        Ok(populated)
    }

    /// Populates a range in one slice. Returns the number of copied bytes.
    async fn populate_locked(&self, range: Range<u64>, base: Option<Base>) -> Result<u64> {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let (first, end) = self.aligned_range(range.start, range.end, cluster_bytes);
        let _exclusive = self.guest.exclusive(first..end).await;
        let (first, end) = self.aligned_range(range.start, range.end, 1 << self.shape.subcluster_bits());
        let end = end.min(self.size_bytes());
        let mut copied_bytes = 0;
        let mut at = first;
        while at < end {
            // Again, under the lock.
            let piece = self.lookup(at, end - at).await?;
            if piece.mapping == GuestMapping::Unallocated {
                for needed in self.needed(at..at + piece.length, base).await? {
                    copied_bytes += self.populate_needed(needed, base).await?;
                }
            }
            at += piece.length;
        }
        Ok(copied_bytes)
    }

    /// Parts of an unallocated range that are needed from the images that will be removed, in whole
    /// clusters or subclusters.
    async fn needed(&self, range: Range<u64>, base: Option<Base>) -> Result<Vec<Range<u64>>> {
        let unit = 1 << self.shape.subcluster_bits();
        let mut needed: Vec<Range<u64>> = Vec::new();
        let mut add = |part: Range<u64>| {
            let (start, end) = self.aligned_range(part.start, part.end, unit);
            let (start, end) = (start.max(range.start), end.min(range.end));
            match needed.last_mut() {
                Some(last) if start <= last.end => last.end = last.end.max(end),
                _ => needed.push(start..end),
            }
        };
        let backed_end = range.end.min(range.start + self.backing_bytes(range.start));
        let Some(backing) = self.backing().filter(|_| range.start < backed_end) else {
            // Beyond the end of the backing image it reads as zeroes, and the base may be longer.
            if base.is_some_and(|base| range.start < base.size_bytes) {
                add(range.clone());
            }
            return Ok(needed);
        };
        let mut at = range.start;
        while at < backed_end {
            let length = backed_end - at;
            match base {
                None => {
                    for extent in Box::pin(backing.block_status(at, length)).await? {
                        if !extent.zero {
                            add(at..at + extent.length);
                        }
                        at += extent.length;
                    }
                }
                Some(base) => {
                    for run in Box::pin(backing.allocation_depth(at, length)).await? {
                        if (1..base.depth).contains(&run.depth) {
                            add(at..at + run.length);
                        }
                        at += run.length;
                    }
                }
            }
        }
        if base.is_some_and(|base| backed_end < range.end && backed_end < base.size_bytes) {
            add(backed_end..range.end);
        }
        Ok(needed)
    }

    /// Allocates an unallocated range, whole clusters or subclusters. Returns the number of bytes
    /// that were written as data.
    async fn populate_needed(&self, range: Range<u64>, base: Option<Base>) -> Result<u64> {
        let unit = 1_u64 << self.shape.subcluster_bits();
        let mut copied_bytes = 0;
        let mut start = range.start;
        while start < range.end {
            let end = range.end.min((start / COPY_BYTES + 1) * COPY_BYTES);
            let length = (end - start) as usize;
            let data = self.read_inside(start, ReadTarget::Anywhere(length)).await?.joined();
            let runs = zero::runs(&data, start, unit as usize, 0);
            let mut rest = Segments::from(data);
            for (run, is_data) in runs {
                let (offset, length) = (start + run.start as u64, run.len() as u64);
                let after = rest.split_off(run.len());
                let part = std::mem::replace(&mut rest, after);
                match (is_data, base) {
                    (false, None) => {}
                    (false, Some(_)) if self.shape.version >= 3 => {
                        self.link_zeroes(offset..offset + length).await?;
                    }
                    _ => {
                        self.write_unallocated(offset, part).await?;
                        copied_bytes += length;
                    }
                }
            }
            start = end;
        }
        Ok(copied_bytes)
    }

    /// Writes to unallocated clusters, or subclusters.
    async fn write_unallocated(&self, mut offset: u64, mut data: Segments) -> Result<()> {
        let end = offset + data.len() as u64;
        while !data.is_empty() {
            let mut done = self.write_new_locked(offset, end, &mut data).await?;
            if done == 0 {
                // An allocation of several clusters, before this one, included it.
                done = self.lookup(offset, end - offset).await?.length;
                data = data.split_off(done as usize);
            }
            offset += done;
        }
        Ok(())
    }

    /// Makes unallocated clusters, or subclusters, read as zeroes over any backing image.
    async fn link_zeroes(&self, range: Range<u64>) -> Result<()> {
        let shape = self.shape;
        let cluster_bytes = 1_u64 << shape.cluster_bits;
        let (first, end) = self.aligned_range(range.start, range.end, cluster_bytes);
        self.writable_l2_table(self.l1_index(first)).await?;
        self.change_entries(first, (end - first) >> shape.cluster_bits, |index, old| {
            let guest = first + index * cluster_bytes;
            let ClusterMapping::Standard(cluster) = old else { return old };
            let inside = range.start.max(guest) - guest..range.end.min(guest + cluster_bytes) - guest;
            let bits = shape.subcluster_bits();
            let zeroes = mask((inside.start >> bits) as u32, ((inside.end - 1) >> bits) as u32);
            let zero = cluster.zero | (zeroes & !cluster.allocated);
            ClusterMapping::Standard(StandardCluster { zero, ..cluster })
        })
        .await
    }
}
