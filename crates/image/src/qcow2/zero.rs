//! Zeroes and discards: whole clusters by a change of their entries, the edges by writing.
//!
//! | | cluster that had data | cluster that had none |
//! | --- | --- | --- |
//! | zeroes, may unmap | reads as zeroes, its space is released | reads as zeroes |
//! | zeroes | reads as zeroes, keeps its space | reads as zeroes |
//! | discard | as zeroes that may unmap if there is a backing file; else as if never written | nothing |
//!
//! Version 2 has no entry for zeroes: there they are written, or, without a backing file, the
//! cluster is as if never written.

use super::{
    Qcow2,
    entry::{Cluster, Standard},
    header::autoclear,
};
use reactor::{
    buffer::Buffer,
    error::{Error, Result},
};
use storage::{Durability, ZeroOptions};

/// Zeroes that have to be written are written in such parts.
const ZEROES_AT_ONCE: u64 = 2 << 20;

/// What becomes of whole clusters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Become {
    /// Zeroes; their room may be given back, or is kept.
    Zero { unmap: bool },
    /// Zeroes of its own, also where what is behind the image reads as zeroes.
    OwnZero,
    /// As if never written, which without a backing file reads as zeroes.
    Unallocated,
}

impl Qcow2 {
    /// Makes `length` bytes at `offset` read as zeroes.
    ///
    /// # Errors
    /// As [`Qcow2::write`]; [`Error::UNSUPPORTED`] with `only_if_fast` where they would have to be
    /// written.
    pub async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let image = self.clone();
        let zero = reactor::spawn_to_end(async move {
            {
                let _pass = image.gate.enter().await;
                image.check_change(offset, length)?;
                image.record(offset, length).await?;
                image.zero_inside(offset, length, options).await?;
            }
            image.made_durable(offset, length, options.durability).await
        });
        zero.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    /// Makes whole clusters read as zeroes whatever comes to stand behind the image: `offset` is
    /// where one begins, and the range ends where one or the disk does.
    ///
    /// # Errors
    /// As [`Qcow2::write`]; [`Error::UNSUPPORTED`] in images of version 2, which have no entry for
    /// that.
    pub async fn hide(&self, offset: u64, length: u64) -> Result<()> {
        let image = self.clone();
        let hide = reactor::spawn_to_end(async move {
            let _pass = image.gate.enter().await;
            image.check_change(offset, length)?;
            let (first, last) = image.whole_clusters(offset, offset + length);
            if image.shape.version < 3 || (first, last) != (offset, offset + length) {
                return Err(Error::UNSUPPORTED);
            }
            image.record(offset, length).await?;
            image.change_clusters(first, last, Become::OwnZero).await
        });
        hide.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    pub(super) async fn zero_inside(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        let end = offset + length;
        let (first, last) = self.whole_clusters(offset, end);
        let zero = match self.shape.version {
            3.. => Some(Become::Zero { unmap: options.may_unmap }),
            _ if options.may_unmap && self.backing.is_none() => Some(Become::Unallocated),
            _ => None,
        };
        // A raw data file must hold the zeroes itself.
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

    /// Says that `length` bytes at `offset` are not needed any more. Clusters that are only in part
    /// inside stay.
    ///
    /// # Errors
    /// As [`Qcow2::write`].
    pub async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        let image = self.clone();
        let discard = reactor::spawn_to_end(async move {
            {
                let _pass = image.gate.enter().await;
                image.check_change(offset, length)?;
                image.record(offset, length).await?;
                image.discard_inside(offset, length).await?;
            }
            image.made_durable(offset, length, Durability::Cached).await
        });
        discard.await.unwrap_or(Err(Error::SHUTDOWN))
    }

    async fn discard_inside(&self, offset: u64, length: u64) -> Result<()> {
        let (first, last) = self.whole_clusters(offset, offset + length);
        if first >= last {
            return Ok(());
        }
        if let Some(data) = &self.data {
            // The data file's own affair; what reads as zeroes afterwards or stays is as the
            // mapping says.
            return data.discard(first, last.min(data.size_bytes()).saturating_sub(first)).await;
        }
        let what = match (&self.backing, self.shape.version) {
            (None, _) => Become::Unallocated,
            // Otherwise the backing file's old bytes would come back.
            (Some(_), 3..) => Become::Zero { unmap: true },
            (Some(_), _) => return Ok(()),
        };
        self.change_clusters(first, last, what).await
    }

    /// As if a range of whole clusters had never been written. Only while quiet; what is freed is
    /// given back at once.
    pub(super) async fn forget(&self, first: u64, last: u64) -> Result<()> {
        // So much at a time that what waits to be given back stays small.
        let step = self.slice_covers() * 64;
        let mut at = first;
        while at < last {
            let end = last.min(at.saturating_add(step));
            self.change_clusters(at, end, Become::Unallocated).await?;
            if self.pending().has_much_freed() {
                self.write_everything().await?;
            }
            at = end;
        }
        self.file.may_be_cut();
        self.write_everything().await
    }

    /// The part of a range that is whole clusters; empty, or the wrong way round, if there is none.
    /// The disk's last one is whole to its end.
    fn whole_clusters(&self, offset: u64, end: u64) -> (u64, u64) {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let first = offset.next_multiple_of(cluster_bytes);
        let last = if end == self.size_bytes() { end } else { end & !(cluster_bytes - 1) };
        (first, last)
    }

    async fn write_zero_bytes(&self, mut offset: u64, end: u64, durability: Durability) -> Result<()> {
        while offset < end {
            let length = (end - offset).min(ZEROES_AT_ONCE);
            if !self.is_zero(offset, length).await? {
                let zeroes = Buffer::zeroed(length as usize);
                self.write_inside(offset, zeroes.into(), durability).await?;
            }
            offset += length;
        }
        Ok(())
    }

    /// Changes what whole clusters are, a slice's worth at a time. `last` is a cluster's end, or
    /// the disk's.
    async fn change_clusters(&self, first: u64, last: u64, what: Become) -> Result<()> {
        let cluster_bytes = 1_u64 << self.shape.cluster_bits;
        let covers = self.slice_covers();
        let mut at = first;
        while at < last {
            let end = last.min((at / covers + 1) * covers);
            let clusters = (end - at).div_ceil(cluster_bytes);
            let _own = self.guest.exclusive(at..at + clusters * cluster_bytes).await;
            // Where there is no table, there is nothing to free, and without a backing file nothing
            // to hide.
            let has_table = self.slice_offset(self.slice_number(at)).is_some();
            let hides = match what {
                Become::Unallocated => false,
                Become::Zero { .. } => self.backing_bytes(at) > 0,
                Become::OwnZero => true,
            };
            if has_table || hides {
                self.own_table(self.l1_index(at)).await?;
                self.change_entries(at, clusters, |index, old| {
                    self.changed(old, what, at + index * cluster_bytes)
                })
                .await?;
            }
            at = end;
        }
        Ok(())
    }

    fn changed(&self, old: Cluster, what: Become, guest: u64) -> Cluster {
        let zero = self.shape.all();
        match what {
            Become::Unallocated => Cluster::Standard(Standard::UNALLOCATED),
            Become::OwnZero => Cluster::Standard(Standard { host: None, copied: false, allocated: 0, zero }),
            Become::Zero { unmap } => {
                if old == Cluster::Standard(Standard::UNALLOCATED) && self.backing_bytes(guest) == 0 {
                    return old;
                }
                let kept = match old {
                    // What a snapshot has too cannot be kept for this disk; with a data file the
                    // place is fixed anyway.
                    Cluster::Standard(Standard { host: Some(host), copied: true, .. })
                        if !unmap || self.data.is_some() =>
                    {
                        Some(host)
                    }
                    _ => None,
                };
                Cluster::Standard(Standard { host: kept, copied: kept.is_some(), allocated: 0, zero })
            }
        }
    }
}
