//! Preallocation of host clusters for a range of the disk.
//!
//! As in a preallocated new image, clusters are mapped to host clusters that read as zeroes. If
//! the file cannot contain zeroes there, because of encryption or of a backing file's data below,
//! the entry is a zero cluster with a host cluster.
//!
//! Never changes clusters that have a host cluster.

use super::{
    Qcow2Image,
    create::Preallocation,
    entry::{ClusterMapping, StandardCluster},
    refcounts::AllocatedRun,
};
use reactor::{
    buffer::IoBuffer,
    error::{Error, Result},
};
use storage::{Durability, ZeroOptions};

// Size of a write of zeroes, in bytes.
const PIECE: u64 = 2 << 20;

impl Qcow2Image {
    /// Allocates host clusters for the guest clusters from `first` to `last`, which must read as
    /// zeroes. `last` is at most the end of the disk.
    ///
    /// # Errors
    /// As [`Qcow2Image::write`]; some of the clusters may then be allocated.
    pub async fn preallocate(&self, first: u64, last: u64, mode: Preallocation) -> Result<()> {
        if mode == Preallocation::Off || first >= last {
            return Ok(());
        }
        self.check_change(first, last - first)?;
        let image = self.clone();
        let all = reactor::spawn_detached(async move {
            let _guard = image.gate.enter().await;
            let image = image.current();
            image.preallocate_inside(first, last, Some(mode)).await
        });
        all.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    /// Without `mode`, the present content of the file becomes visible.
    pub(super) async fn preallocate_inside(
        &self,
        first: u64,
        last: u64,
        mode: Option<Preallocation>,
    ) -> Result<()> {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let coverage = self.slice_coverage();
        let mut at = first & !(cluster_bytes - 1);
        while at < last {
            // Limited to one slice, so that all entries are linked in one step.
            let end = last.min((at / coverage + 1) * coverage).next_multiple_of(cluster_bytes);
            let _exclusive = self.guest.exclusive(at..end).await;
            self.writable_l2_table(self.l1_index(at)).await?;
            while at < end {
                at += self.allocate_host_clusters(at, end, mode).await? * cluster_bytes;
            }
        }
        Ok(())
    }

    /// Allocates host clusters for the first guest clusters from `guest` on; returns their number.
    async fn allocate_host_clusters(&self, guest: u64, end: u64, mode: Option<Preallocation>) -> Result<u64> {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let is_unmapped =
            |cluster| matches!(cluster, ClusterMapping::Standard(StandardCluster { host: None, .. }));
        let mut wanted = 0;
        while guest + wanted * cluster_bytes < end
            && is_unmapped(self.cluster_at(guest + wanted * cluster_bytes).await?)
        {
            wanted += 1;
        }
        if wanted == 0 {
            return Ok(1);
        }
        let AllocatedRun { offset: host, clusters, untouched } =
            self.allocate_for_write(guest, wanted).await?;
        let placed = async {
            // Zeroes first: once linked, the clusters are visible to the guest.
            if let Some(mode) = mode {
                self.make_zero(host, clusters * cluster_bytes, untouched, mode).await?;
            }
            self.change_entries(guest, clusters, |index, old| {
                ClusterMapping::Standard(self.with_host_cluster(old, host + index * cluster_bytes))
            })
            .await
        };
        let placed = placed.await;
        if placed.is_err() && self.data.is_none() {
            self.free_unlinked(host, clusters * cluster_bytes).await;
        }
        placed.map(|()| clusters)
    }

    fn with_host_cluster(&self, old: ClusterMapping, host: u64) -> StandardCluster {
        let zero = match old {
            ClusterMapping::Standard(StandardCluster { zero, .. }) if zero != 0 => zero,
            // Zeroes in the file would be decrypted to garbage. LUKS requires version 3, which has
            // zero clusters.
            _ if self.cipher.is_some() => self.shape.all(),
            _ => 0,
        };
        // A host cluster does not make subclusters allocated.
        let allocated = if zero == 0 && !self.shape.extended { self.shape.all() } else { 0 };
        StandardCluster { host: Some(host), copied: true, allocated, zero }
    }

    /// Makes the host clusters read as zeroes, by the method of `mode`.
    async fn make_zero(&self, host: u64, length: u64, untouched: bool, mode: Preallocation) -> Result<()> {
        let storage = self.storage();
        // A data file ends at the end of the disk, possibly inside a cluster.
        let end = if self.data.is_some() { (host + length).min(storage.size_bytes()) } else { host + length };
        let zeroes = ZeroOptions {
            may_unmap: mode == Preallocation::Metadata,
            only_if_fast: false,
            durability: Durability::Cached,
        };
        match mode {
            Preallocation::Full => {
                let mut at = host;
                while at < end {
                    let piece = PIECE.min(end - at);
                    storage.write(at, IoBuffer::zeroed(piece as usize).into(), Durability::Cached).await?;
                    at += piece;
                }
                Ok(())
            }
            Preallocation::Metadata if untouched => Ok(()),
            _ => storage.write_zeroes(host, end - host, zeroes).await,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{
        Image, RawImage,
        qcow2::{
            GuestMapping, Qcow2Components,
            check::{Repair, check},
            create::{CreateOptions, create},
            header::BackingReference,
        },
    };
    use reactor::sim;
    use storage::Storage;

    const OLD: u64 = 100 << 10;
    const NEW: u64 = 3 << 20;

    async fn image(options: &CreateOptions) -> Qcow2Image {
        let storage = Storage::memory(512);
        create(&storage, None, options).await.expect("valid");
        let backing = options.backing.as_ref().map(|_| Storage::memory(2 << 20));
        if let Some(backing) = &backing {
            let ones = IoBuffer::copy_of(&[1; 2 << 20]);
            backing.write(0, ones.into(), Durability::Cached).await.expect("memory");
        }
        let backing = backing.map(|storage| Arc::new(Image::Raw(RawImage::of(storage, false, true))));
        Qcow2Image::open(Qcow2Components { backing, ..Qcow2Components::of(storage) }).await.expect("valid")
    }

    fn kinds() -> Vec<CreateOptions> {
        let plain = CreateOptions { size_bytes: OLD, ..CreateOptions::default() };
        let backing = Some(BackingReference { name: "base".into(), format: Some("raw".into()) });
        vec![
            plain.clone(),
            CreateOptions { version: 2, ..plain.clone() },
            CreateOptions { cluster_bytes: 512, refcount_bits: 1, ..plain.clone() },
            CreateOptions { extended_l2: true, ..plain.clone() },
            CreateOptions { extended_l2: true, backing: backing.clone(), ..plain.clone() },
            CreateOptions { backing, ..plain },
        ]
    }

    #[test]
    fn added_clusters_are_allocated_and_read_as_zeroes() {
        for options in kinds() {
            for mode in [Preallocation::Metadata, Preallocation::Falloc, Preallocation::Full] {
                let options = options.clone();
                sim::run(1, async move {
                    let image = image(&options).await;
                    // Leaves freed clusters in the file that contain something other than zeroes.
                    let data = IoBuffer::copy_of(&[7; OLD as usize]);
                    image.write(0, data.into(), Durability::Cached).await.expect("memory");
                    image.discard(0, OLD).await.expect("memory");
                    image.flush().await.expect("memory");
                    image.resize(NEW).await.expect("possible");
                    image.preallocate(OLD, NEW, mode).await.expect("possible");
                    let first = OLD.next_multiple_of(options.cluster_bytes);
                    for piece in image.map(first, NEW - first).await.expect("readable") {
                        let mapping = piece.mapping;
                        let is_preallocated = match mapping {
                            GuestMapping::Data { .. } => true,
                            GuestMapping::Zero { host } => host.is_some(),
                            // The mapping does not distinguish preallocated from unallocated
                            // subclusters.
                            GuestMapping::Unallocated => options.extended_l2,
                            GuestMapping::Compressed { .. } => false,
                        };
                        assert!(is_preallocated, "{options:?} {mode:?}: {mapping:?}");
                    }
                    let mut read = IoBuffer::new((NEW - OLD) as usize);
                    image.read(OLD, read.len()).await.expect("readable").copy_to(&mut read);
                    assert!(read.iter().all(|byte| *byte == 0), "{options:?} {mode:?}");
                    image.close().await.expect("memory");
                    let report = check(image.storage(), Repair::Nothing).await.expect("readable");
                    assert_eq!(
                        (report.corruptions, report.leaks),
                        (0, 0),
                        "{options:?} {mode:?}: {report:?}"
                    );
                });
            }
        }
    }
}
