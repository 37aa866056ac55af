//! Writes: in place if no snapshot shares the cluster, otherwise into new clusters, whose
//! remaining bytes are copied (copy on write).
//!
//! ```text
//!   guest    │░░░░░░░░▓▓▓▓▓▓│▓▓▓▓▓▓▓▓▓▓▓▓▓▓│▓▓▓▓░░░░░░░░░░│      ▓ written   ░ old content, copied
//!   file     │░░░░░░░░▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░│      one write into adjacent clusters
//! ```
//!
//! An allocating write locks its guest clusters exclusively from the lookup until they are linked.
//! Two such writes to one cluster are serialized; writes to different clusters are not. Linking is
//! the last step, so a concurrent read returns the old content.
//!
//! Every write runs in its own task, which continues if the client disconnects: a cancelled write
//! could still be executed by the kernel after its cluster was reused.

use super::{
    InvalidImage, Qcow2Image, compress,
    entry::{ClusterMapping, L1Entry, StandardCluster},
    lookup::GuestMapping,
    luks::SECTOR_BYTES,
    refcounts::{AllocatedRun, FreedContent},
    writeback::UnreferencedRange,
};
use reactor::{
    buffer::{IoBuffer, ReadTarget, Segments},
    error::{Error, Result},
};
use storage::Durability;

/// Allocation of new clusters for a part of a write.
struct ClusterAllocation {
    /// Guest offset of the first cluster.
    guest: u64,
    /// Offset of the first cluster in the file that holds guest data.
    host: u64,
    clusters: u64,
    /// True if the clusters were already assigned to these guest clusters, so they are not freed
    /// after an error.
    is_assigned: bool,
    /// True if the clusters read as zeroes now.
    untouched: bool,
    /// Guest range that is written, including the copied bytes around the request.
    from: u64,
    to: u64,
    /// True if all subclusters become allocated.
    allocates_all: bool,
}

impl Qcow2Image {
    /// Writes `data` at `offset`, which must be inside the disk.
    ///
    /// # Errors
    /// Errors of the file; [`Error::NOT_PERMITTED`] if the image is read-only; [`Error::NO_SPACE`]
    /// if no cluster is free and the file cannot grow.
    pub async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let image = self.clone();
        let write =
            reactor::spawn_detached(async move { image.write_to_end(offset, data, durability).await });
        write.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn write_to_end(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        let length = data.len() as u64;
        {
            let _guard = self.gate.enter().await;
            let image = self.current();
            // Checked under the guard: a resize waits until no request holds one.
            image.check_change(offset, length)?;
            image.record(offset, length).await?;
            image.write_inside(offset, data, durability).await?;
        }
        self.ensure_durable(offset, length, durability).await
    }

    /// Makes a change of a range durable if `durability` or the cache mode requires it. Data
    /// written in place with FUA is durable already; the flush is skipped if its entries are too.
    pub(super) async fn ensure_durable(
        &self,
        offset: u64,
        length: u64,
        durability: Durability,
    ) -> Result<()> {
        let at_once = durability == Durability::Synchronous || self.writes_through;
        if at_once && !self.is_durable(offset, length) {
            return self.flush().await;
        }
        self.limit_unreferenced().await
    }

    /// Writes metadata if many ranges wait for that to be freed.
    pub(super) async fn limit_unreferenced(&self) -> Result<()> {
        if self.pending().has_many_unreferenced() {
            self.write_tables().await?;
            self.free_later();
        }
        Ok(())
    }

    pub(super) async fn write_inside(
        &self,
        mut offset: u64,
        mut data: Segments,
        durability: Durability,
    ) -> Result<()> {
        while !data.is_empty() {
            let piece = self.lookup(offset, data.len() as u64).await?;
            let written = match piece.mapping {
                // In place. No lock: requests of a client to the same bytes at the same time have
                // no order.
                GuestMapping::Data { host, copied: true } => {
                    self.check_inside_file(host, piece.length)?;
                    let rest = data.split_off(piece.length as usize);
                    let part = std::mem::replace(&mut data, rest);
                    if self.cipher.is_some() {
                        Box::pin(self.write_sectors(offset, host, part, durability)).await?;
                    } else {
                        self.write_data(host, part, durability).await?;
                    }
                    piece.length
                }
                _ => Box::pin(self.write_new(offset, &mut data)).await?,
            };
            offset += written;
        }
        Ok(())
    }

    /// Marks the image corrupt and fails if an entry maps data beyond the end of the file.
    fn check_inside_file(&self, host: u64, length: u64) -> Result<()> {
        if self.data.is_none() && host + length > self.file.size_bytes() {
            let message = format!("the cluster at {host:#x} lies beyond the end of the file");
            return Err(self.file.report_invalid(&InvalidImage::new(message)));
        }
        Ok(())
    }

    /// Writes guest data to the file that holds it, after encryption; whole sectors if it is
    /// encrypted.
    async fn write_data(&self, host: u64, data: Segments, durability: Durability) -> Result<()> {
        let mut data = data;
        if let Some(cipher) = &self.cipher {
            let mut sectors = IoBuffer::new(data.len());
            data.copy_to(&mut sectors);
            cipher.encrypt(host / SECTOR_BYTES as u64, &mut sectors)?;
            data = sectors.into();
        }
        if let Some(storage) = &self.data {
            return storage.write(host, data, durability).await;
        }
        self.overlap.check(&self.file, host, data.len() as u64)?;
        self.file.write_data(host, data, durability).await
    }

    /// Writes in place to an encrypted image. Partial sectors are read, modified and written under
    /// an exclusive lock.
    async fn write_sectors(
        &self,
        offset: u64,
        host: u64,
        data: Segments,
        durability: Durability,
    ) -> Result<()> {
        const SECTOR: u64 = SECTOR_BYTES as u64;
        let end = offset + data.len() as u64;
        let (first, last) = (offset & !(SECTOR - 1), end.next_multiple_of(SECTOR));
        if (first, last) == (offset, end) {
            // Shared: whole sectors need no exclusion among themselves, only against
            // read-modify-write.
            let _with_others = self.guest.shared(first..last).await;
            return self.write_data(host, data, durability).await;
        }
        let _exclusive = self.guest.exclusive(first..last).await;
        let mut sectors = IoBuffer::new((last - first) as usize);
        let inside = last.min(self.size_bytes()).saturating_sub(first);
        sectors.fill(0);
        let old = self.read_inside(first, ReadTarget::Anywhere(inside as usize)).await?;
        old.copy_to(&mut sectors[..inside as usize]);
        data.copy_to(&mut sectors[(offset - first) as usize..][..data.len()]);
        self.write_data(host - (offset - first), sectors.into(), durability).await
    }

    /// Writes a front part of `data` to new clusters and removes it from `data`. Returns its
    /// length; 0 if another task allocated the clusters meanwhile, so that the caller looks them
    /// up again.
    async fn write_new(&self, offset: u64, data: &mut Segments) -> Result<u64> {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let first = offset & !(cluster_bytes - 1);
        let coverage = self.slice_coverage();
        // Limited to one slice, so that all entries are linked in one step.
        let end = (offset + data.len() as u64).min((offset / coverage + 1) * coverage);
        let _exclusive = self.guest.exclusive(first..end.next_multiple_of(cluster_bytes)).await;
        self.write_new_locked(offset, end, data).await
    }

    /// As [`Self::write_new`], up to `end` in the same slice. The caller must hold the clusters
    /// exclusively.
    pub(super) async fn write_new_locked(&self, offset: u64, end: u64, data: &mut Segments) -> Result<u64> {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        // The clusters were looked up without the lock; `plan` looks again under it.
        let Some(plan) = self.plan(offset, end).await? else { return Ok(0) };
        let end = end.min(plan.guest + plan.clusters * cluster_bytes).min(plan.to);
        let rest = data.split_off((end - offset) as usize);
        let part = std::mem::replace(data, rest);
        let linked = match self.fill(&plan, offset, part).await {
            // The data is written before the entries refer to it.
            Ok(()) => self.update_mapping(&plan).await.map(|()| end - offset),
            Err(error) => Err(error),
        };
        if linked.is_err() && !plan.is_assigned {
            self.free_unlinked(plan.host, plan.clusters << self.shape.cluster_bits).await;
        }
        linked
    }

    /// Frees clusters that were allocated and never linked; no request can be using them. An error
    /// leaks them.
    pub(super) async fn free_unlinked(&self, offset: u64, length: u64) {
        let clusters = self.clusters_of(offset, length);
        let _ = self
            .refcounts
            .free_clusters(&self.file, &self.overlap, clusters, FreedContent::Data { unmapped: false })
            .await;
    }

    /// Decides where the range from `offset` to `end`, or its front part, is written. `None` if
    /// its first subcluster has become writable in place.
    async fn plan(&self, offset: u64, end: u64) -> Result<Option<ClusterAllocation>> {
        self.writable_l2_table(self.l1_index(offset)).await?;
        let shape = self.shape;
        let cluster_bytes = 1_u64 << shape.cluster_bits;
        let first = offset & !(cluster_bytes - 1);
        let old = self.cluster_at(first).await?;
        if let ClusterMapping::Standard(StandardCluster {
            host: Some(host), copied: true, allocated, ..
        }) = old
        {
            let bits = shape.subcluster_bits();
            let start = ((offset - first) >> bits) as u32;
            // Allocated subclusters may be written in place concurrently, so they must not be
            // rewritten here.
            let free = (start..shape.subclusters()).take_while(|number| allocated >> number & 1 == 0).count();
            if free == 0 {
                return Ok(None);
            }
            let end = end.min(first + ((u64::from(start) + free as u64) << bits));
            let (from, to) = self.aligned_range(offset, end, 1 << bits);
            return Ok(Some(ClusterAllocation {
                guest: first,
                host,
                clusters: 1,
                is_assigned: true,
                untouched: false,
                from,
                to,
                allocates_all: false,
            }));
        }
        // A shared cluster that contains data is copied completely; otherwise its other
        // subclusters would be lost.
        let has_data = |cluster: &ClusterMapping| match cluster {
            ClusterMapping::Compressed { .. } => true,
            ClusterMapping::Standard(standard) => standard.allocated != 0,
        };
        let mut is_copied = has_data(&old);
        let mut wanted = 1;
        while first + wanted * cluster_bytes < end {
            let next = self.cluster_at(first + wanted * cluster_bytes).await?;
            if matches!(next, ClusterMapping::Standard(StandardCluster { host: Some(_), copied: true, .. })) {
                break;
            }
            is_copied |= has_data(&next);
            wanted += 1;
        }
        let AllocatedRun { offset: host, clusters, untouched } =
            self.allocate_for_write(first, wanted).await?;
        let end = end.min(first + clusters * cluster_bytes);
        let whole = !shape.extended || is_copied || clusters > 1;
        // Without a copy, only the touched subclusters are written and become allocated.
        let grain = if whole { cluster_bytes } else { 1 << shape.subcluster_bits() };
        let (from, to) = self.aligned_range(offset, end, grain);
        Ok(Some(ClusterAllocation {
            guest: first,
            host,
            clusters,
            is_assigned: self.data.is_some(),
            untouched,
            from,
            to,
            allocates_all: whole,
        }))
    }

    pub(super) async fn allocate_for_write(&self, guest: u64, clusters: u64) -> Result<AllocatedRun> {
        if self.data.is_some() {
            // In an external data file the host offset equals the guest offset.
            return Ok(AllocatedRun { offset: guest, clusters, untouched: false });
        }
        self.refcounts.allocate(&self.file, &self.overlap, clusters).await
    }

    /// The range, extended to multiples of `grain`.
    pub(super) fn aligned_range(&self, offset: u64, end: u64, grain: u64) -> (u64, u64) {
        (offset & !(grain - 1), end.next_multiple_of(grain))
    }

    /// Writes the clusters of a plan: `data`, and the old content around it. Not durable by
    /// itself: the link that follows needs a flush anyway.
    async fn fill(&self, plan: &ClusterAllocation, offset: u64, data: Segments) -> Result<()> {
        let head = self.read_old_content(plan, plan.from, offset).await?;
        let tail = self.read_old_content(plan, offset + data.len() as u64, plan.to).await?;
        let mut start = offset;
        let mut segments = Segments::default();
        if let Some(head) = head {
            start = plan.from;
            segments.append(head);
        }
        segments.append(data);
        if let Some(tail) = tail {
            segments.append(tail);
        }
        self.write_data(plan.host + (start - plan.guest), segments, Durability::Cached).await
    }

    /// Present content of a range for copying, or `None` if it need not be written.
    async fn read_old_content(
        &self,
        plan: &ClusterAllocation,
        from: u64,
        to: u64,
    ) -> Result<Option<Segments>> {
        if from >= to {
            return Ok(None);
        }
        // Bytes of the last cluster beyond the end of the disk are zeroes.
        let inside = to.min(self.size_bytes()).saturating_sub(from);
        // A data file ends at the end of the disk, possibly inside a cluster.
        let to = if self.data.is_some() { from + inside } else { to };
        if from == to {
            return Ok(None);
        }
        let is_zero = self.is_zero(from, inside).await?;
        // Zeroes in the file would decrypt to garbage.
        if is_zero && plan.untouched && self.cipher.is_none() {
            return Ok(None);
        }
        let mut data = if is_zero {
            Segments::from(IoBuffer::zeroed(inside as usize))
        } else {
            self.read_inside(from, ReadTarget::Anywhere(inside as usize)).await?
        };
        if from + inside < to {
            data.push(IoBuffer::zeroed((to - from - inside) as usize));
        }
        Ok(Some(data))
    }

    /// Maps the guest clusters of a plan to its host clusters.
    async fn update_mapping(&self, plan: &ClusterAllocation) -> Result<()> {
        let shape = self.shape;
        self.change_entries(plan.guest, plan.clusters, |index, old| {
            let host = plan.host + (index << shape.cluster_bits);
            let first = plan.guest + (index << shape.cluster_bits);
            let bits = shape.subcluster_bits();
            let touched = if plan.allocates_all || !shape.extended {
                shape.all()
            } else {
                mask(
                    ((plan.from.max(first) - first) >> bits) as u32,
                    ((plan.to - 1 - first) >> bits) as u32 % 32,
                )
            };
            let (allocated, zero) = match old {
                ClusterMapping::Standard(StandardCluster { allocated, zero, .. }) if !plan.allocates_all => {
                    (allocated, zero)
                }
                _ => (0, 0),
            };
            ClusterMapping::Standard(StandardCluster {
                host: Some(host),
                copied: true,
                allocated: allocated | touched,
                zero: zero & !touched,
            })
        })
        .await
    }

    /// Changes the entries of `clusters` guest clusters from `guest` on, all in one slice,
    /// atomically. Clusters that are no longer referenced are queued to be freed. The caller must
    /// hold the guest range exclusively and have called [`Self::writable_l2_table`].
    pub(super) async fn change_entries(
        &self,
        guest: u64,
        clusters: u64,
        change: impl Fn(u64, ClusterMapping) -> ClusterMapping,
    ) -> Result<()> {
        let shape = self.shape;
        let number = self.slice_number(guest);
        loop {
            self.slice(number).await?;
            let mut pending = self.pending();
            // From here to the end no await: the lock of `PendingMetadata` makes the change atomic
            // for readers and for writeback. The slice may have been evicted between loading and
            // locking.
            let Some(slice) = self.cache.load().get(number) else { continue };
            for index in 0..clusters {
                let at = self.entry_in_slice(guest) + index as usize;
                let (raw, map) = slice.get(at, shape.extended);
                let offset = guest + (index << shape.cluster_bits);
                let old =
                    self.decode_at(offset, raw, map).map_err(|invalid| self.file.report_invalid(&invalid))?;
                let new = change(index, old);
                if new == old {
                    continue;
                }
                let (raw, map) = shape.encode(new);
                slice.set(at, shape.extended, raw, map);
                if let Some(freed) = self.unreferenced_clusters(old, new) {
                    pending.add_unreferenced(freed);
                }
                pending.mark_dirty(&slice);
            }
            return Ok(());
        }
    }

    /// The part of the file that `old` refers to and `new` does not.
    fn unreferenced_clusters(&self, old: ClusterMapping, new: ClusterMapping) -> Option<UnreferencedRange> {
        let host = |cluster: ClusterMapping| match cluster {
            ClusterMapping::Standard(standard) => standard.host,
            ClusterMapping::Compressed { .. } => None,
        };
        match old {
            ClusterMapping::Compressed { offset, length } => (new != old).then_some(UnreferencedRange {
                offset,
                length,
                content: FreedContent::Compressed,
            }),
            ClusterMapping::Standard(_) if self.data.is_some() || host(old) == host(new) => None,
            ClusterMapping::Standard(_) => {
                let length = 1 << self.shape.cluster_bits;
                let held = FreedContent::Data { unmapped: host(new).is_none() };
                host(old).map(|offset| UnreferencedRange { offset, length, content: held })
            }
        }
    }

    /// Present entry of the guest cluster at `offset`.
    pub(super) async fn cluster_at(&self, offset: u64) -> Result<ClusterMapping> {
        let Some(slice) = self.slice(self.slice_number(offset)).await? else {
            return Ok(ClusterMapping::Standard(StandardCluster::UNALLOCATED));
        };
        let (raw, map) = slice.get(self.entry_in_slice(offset), self.shape.extended);
        self.decode_at(offset, raw, map).map_err(|invalid| self.file.report_invalid(&invalid))
    }

    /// Ensures that the L2 table exists and is not shared: allocates one, or copies a snapshot's.
    pub(super) async fn writable_l2_table(&self, index: usize) -> Result<()> {
        if self.l1.load().get(index).copied {
            return Ok(());
        }
        let _lock = self.tables.exclusive(index as u64..index as u64 + 1).await;
        let old = self.l1.load().get(index);
        if old.copied {
            return Ok(());
        }
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let allocated = self.refcounts.allocate(&self.file, &self.overlap, 1).await?;
        let initialized = async {
            // A copy leaves the refcounts of data clusters alone: they count disk and snapshots,
            // not tables.
            if old.offset != 0 {
                let table = self.file.read(old.offset, cluster_bytes).await?;
                self.file.write(allocated.offset, &table).await
            } else if allocated.untouched {
                Ok(())
            } else {
                self.file.write(allocated.offset, &vec![0; cluster_bytes as usize]).await
            }
        };
        if let Err(error) = initialized.await {
            self.free_unlinked(allocated.offset, cluster_bytes).await;
            return Err(error);
        }
        // Protected from now on; the L1 entry below makes the table reachable.
        self.overlap.add(allocated.offset, cluster_bytes);
        let mut pending = self.pending();
        self.l1.load().set(index, L1Entry { offset: allocated.offset, copied: true });
        pending.new_table(index);
        if old.offset != 0 {
            pending.add_unreferenced(UnreferencedRange {
                offset: old.offset,
                length: cluster_bytes,
                content: FreedContent::Metadata,
            });
        }
        Ok(())
    }

    /// Writes a whole cluster (or the disk's incomplete last one) compressed, or uncompressed if
    /// compression saves nothing.
    ///
    /// # Errors
    /// As [`Qcow2Image::write`]; [`Error::INVALID`] if the range is not one cluster;
    /// [`Error::UNSUPPORTED`] with an external data file, and for an encrypted image, because the
    /// format stores compressed clusters unencrypted.
    pub async fn write_compressed(&self, offset: u64, data: Segments) -> Result<()> {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let length = data.len() as u64;
        self.check_change(offset, length)?;
        let is_last = offset + length == self.size_bytes();
        // Only the last cluster of the disk may be incomplete.
        let is_whole = length == cluster_bytes || is_last && 0 < length && length < cluster_bytes;
        if !offset.is_multiple_of(cluster_bytes) || !is_whole {
            return Err(Error::INVALID);
        }
        if self.data.is_some() || self.cipher.is_some() {
            return Err(Error::UNSUPPORTED);
        }
        let mut cluster = vec![0; cluster_bytes as usize];
        data.copy_to(&mut cluster);
        let kind = self.compression;
        let packed = reactor::run_computation(move || compress::compress(kind, &cluster)).await;
        let Some(packed) = packed else { return self.write(offset, data, Durability::Cached).await };
        let image = self.clone();
        let write = reactor::spawn_detached(async move {
            let _guard = image.gate.enter().await;
            let image = image.current();
            image.check_change(offset, length)?;
            image.record(offset, length).await?;
            image.write_packed(offset, packed).await
        });
        write.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn write_packed(&self, guest: u64, packed: Vec<u8>) -> Result<()> {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let _exclusive = self.guest.exclusive(guest..guest + cluster_bytes).await;
        self.writable_l2_table(self.l1_index(guest)).await?;
        let length = packed.len() as u64;
        let offset = self.refcounts.allocate_bytes(&self.file, &self.overlap, length).await?;
        // The order is that of `write_new`: data, then the entry.
        let written = async {
            self.file.write_data(offset, IoBuffer::copy_of(&packed).into(), Durability::Cached).await?;
            self.change_entries(guest, 1, |_, _| ClusterMapping::Compressed { offset, length }).await
        };
        let result = written.await;
        if result.is_err() {
            self.free_unlinked(offset, length).await;
        }
        result
    }
}

/// Bits `first` to `last`, inclusive.
pub(super) fn mask(first: u32, last: u32) -> u32 {
    (u32::MAX >> (31 - last)) & (u32::MAX << first)
}
