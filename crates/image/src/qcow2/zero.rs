//! Zeroing and discarding: whole clusters by a change of their entries, the edges by writes.
//!
//! | | allocated cluster | unallocated cluster |
//! | --- | --- | --- |
//! | zeroes, may unmap | zero cluster, host cluster freed | zero cluster |
//! | zeroes | zero cluster, keeps its host cluster | zero cluster |
//! | discard, with a backing file | zero cluster, host cluster freed | zero cluster |
//! | discard, without one | unallocated, host cluster freed | unchanged |
//!
//! Without a backing file, or beyond its end, an unallocated cluster stays unallocated. With an
//! external data file, discards are passed to that file, and the mapping stays.
//!
//! Version 2 has no zero clusters: zeroes are written or, without a backing file and if unmapping
//! is allowed, the cluster becomes unallocated. A discard has no effect if there is a backing file.

use super::{
    Qcow2Image,
    entry::{ClusterMapping, StandardCluster},
    header::autoclear,
};
use reactor::{
    buffer::IoBuffer,
    error::{Error, Result},
};
use storage::{Durability, ZeroOptions};

// Size of a write of zeroes, in bytes.
const ZEROES_AT_ONCE: u64 = 2 << 20;

/// New state of whole clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ClusterChange {
    /// Zero cluster; with `unmap` its host cluster is freed.
    Zero { unmap: bool },
    /// Zero cluster, even if the backing file reads as zeroes there.
    OwnZero,
    /// Unallocated, which reads as zeroes without a backing file.
    Unallocated,
}

impl Qcow2Image {
    /// Makes `length` bytes at `offset` read as zeroes.
    ///
    /// # Errors
    /// As [`Qcow2Image::write`]; [`Error::UNSUPPORTED`] with `only_if_fast` if zeroes would have to
    /// be written.
    pub async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let image = self.clone();
        let zero = reactor::spawn_detached(async move {
            {
                let _guard = image.gate.enter().await;
                let image = image.current();
                image.check_change(offset, length)?;
                image.record(offset, length).await?;
                image.zero_inside(offset, length, options).await?;
            }
            image.ensure_durable(offset, length, options.durability).await
        });
        zero.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    /// Makes whole clusters read as zeroes regardless of any later backing file. `offset` must be
    /// the start of a cluster; the range must end at a cluster or at the end of the disk.
    ///
    /// # Errors
    /// As [`Qcow2Image::write`]; [`Error::UNSUPPORTED`] for version 2, which has no zero clusters.
    pub async fn write_zero_clusters(&self, offset: u64, length: u64) -> Result<()> {
        let image = self.clone();
        let hide = reactor::spawn_detached(async move {
            let _guard = image.gate.enter().await;
            let image = image.current();
            image.check_change(offset, length)?;
            let (first, last) = image.whole_clusters(offset, offset + length);
            if image.shape.version < 3 || (first, last) != (offset, offset + length) {
                return Err(Error::UNSUPPORTED);
            }
            image.record(offset, length).await?;
            image.change_clusters(first, last, ClusterChange::OwnZero).await
        });
        hide.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    pub(super) async fn zero_inside(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let end = offset + length;
        let (first, last) = self.whole_clusters(offset, end);
        let zero = match self.shape.version {
            3.. => Some(ClusterChange::Zero { unmap: options.may_unmap }),
            _ if options.may_unmap && self.backing().is_none() => Some(ClusterChange::Unallocated),
            _ => None,
        };
        // A raw data file must itself contain the zeroes.
        let is_raw = self.data.is_some() && self.file.header().autoclear & autoclear::RAW_DATA_FILE != 0;
        let Some(zero) = zero.filter(|_| !is_raw) else {
            if options.only_if_fast {
                return Err(Error::UNSUPPORTED);
            }
            return self.write_zero_bytes(offset, end, options.durability).await;
        };
        if first >= last {
            return self.write_zero_bytes(offset, end, options.durability).await;
        }
        self.change_clusters(first, last, zero).await?;
        self.write_zero_bytes(offset, first, options.durability).await?;
        self.write_zero_bytes(last, end, options.durability).await
    }

    /// Discards `length` bytes at `offset`. Clusters that are only partly inside are kept.
    ///
    /// # Errors
    /// As [`Qcow2Image::write`].
    pub async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let image = self.clone();
        let discard = reactor::spawn_detached(async move {
            {
                let _guard = image.gate.enter().await;
                let image = image.current();
                image.check_change(offset, length)?;
                image.record(offset, length).await?;
                image.discard_inside(offset, length).await?;
            }
            image.ensure_durable(offset, length, Durability::Cached).await
        });
        discard.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn discard_inside(&self, offset: u64, length: u64) -> Result<()> {
        let (first, last) = self.whole_clusters(offset, offset + length);
        if first >= last {
            return Ok(());
        }
        if let Some(data) = &self.data {
            // Passed on to the data file. The mapping does not change: the range reads as before
            // or as zeroes.
            return data.discard(first, last.min(data.size_bytes()).saturating_sub(first)).await;
        }
        let change = match (self.backing(), self.shape.version) {
            (None, _) => ClusterChange::Unallocated,
            // Otherwise the content of the backing file would become visible again.
            (Some(_), 3..) => ClusterChange::Zero { unmap: true },
            (Some(_), _) => return Ok(()),
        };
        self.change_clusters(first, last, change).await
    }

    /// Makes a range of whole clusters unallocated and frees it at once. Requires that no request
    /// is in flight.
    pub(super) async fn unmap_clusters(&self, first: u64, last: u64) -> Result<()> {
        // In steps, to bound the number of clusters that wait to be freed.
        let step = self.slice_coverage() * 64;
        let mut at = first;
        while at < last {
            let end = last.min(at.saturating_add(step));
            self.change_clusters(at, end, ClusterChange::Unallocated).await?;
            if self.pending().has_many_unreferenced() {
                self.flush_all_metadata().await?;
            }
            at = end;
        }
        self.file.allow_truncation();
        self.flush_all_metadata().await
    }

    /// The whole clusters of a range, first to last; not ascending if there are none. The disk's
    /// last cluster is whole if the range reaches the end of the disk.
    fn whole_clusters(&self, offset: u64, end: u64) -> (u64, u64) {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let first = offset.next_multiple_of(cluster_bytes);
        let last = if end == self.size_bytes() { end } else { end & !(cluster_bytes - 1) };
        (first, last)
    }

    async fn write_zero_bytes(&self, mut offset: u64, end: u64, durability: Durability) -> Result<()> {
        while offset < end {
            let length = (end - offset).min(ZEROES_AT_ONCE);
            // Does not allocate a cluster that reads as zeroes already.
            if !self.is_zero(offset, length).await? {
                let zeroes = IoBuffer::zeroed(length as usize);
                self.write_inside(offset, zeroes.into(), durability).await?;
            }
            offset += length;
        }
        Ok(())
    }

    /// Changes the state of whole clusters, one slice at a time. `last` is the end of a cluster or
    /// of the disk.
    async fn change_clusters(&self, first: u64, last: u64, change: ClusterChange) -> Result<()> {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let coverage = self.slice_coverage();
        let mut at = first;
        while at < last {
            let end = last.min((at / coverage + 1) * coverage);
            let clusters = (end - at).div_ceil(cluster_bytes);
            let _exclusive = self.guest.exclusive(at..at + clusters * cluster_bytes).await;
            // Without an L2 table there is nothing to free, and without a backing file nothing to
            // hide.
            let has_table = self.slice_offset(self.slice_number(at)).is_some();
            let hides_backing = match change {
                ClusterChange::Unallocated => false,
                ClusterChange::Zero { .. } => self.backing_bytes(at) > 0,
                ClusterChange::OwnZero => true,
            };
            if has_table || hides_backing {
                self.writable_l2_table(self.l1_index(at)).await?;
                self.change_entries(at, clusters, |index, old| {
                    self.mapping_after(old, change, at + index * cluster_bytes)
                })
                .await?;
            }
            at = end;
        }
        Ok(())
    }

    fn mapping_after(&self, old: ClusterMapping, change: ClusterChange, guest: u64) -> ClusterMapping {
        let zero = self.shape.all();
        match change {
            ClusterChange::Unallocated => ClusterMapping::Standard(StandardCluster::UNALLOCATED),
            ClusterChange::OwnZero => {
                ClusterMapping::Standard(StandardCluster { host: None, copied: false, allocated: 0, zero })
            }
            ClusterChange::Zero { unmap } => {
                if old == ClusterMapping::Standard(StandardCluster::UNALLOCATED)
                    && self.backing_bytes(guest) == 0
                {
                    return old;
                }
                let kept_host =
                    match old {
                        // A host cluster that a snapshot shares cannot be kept; in a data file the
                        // offset is fixed anyway.
                        ClusterMapping::Standard(StandardCluster {
                            host: Some(host), copied: true, ..
                        }) if !unmap || self.data.is_some() => Some(host),
                        _ => None,
                    };
                ClusterMapping::Standard(StandardCluster {
                    host: kept_host,
                    copied: kept_host.is_some(),
                    allocated: 0,
                    zero,
                })
            }
        }
    }
}
