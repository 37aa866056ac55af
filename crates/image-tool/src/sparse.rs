//! Detects qcow2 files whose clusters may be holes, as with preallocated metadata; `measure` then
//! inspects the allocation of the file as well, as QEMU does.
//!
//! Reads only the refcounts. Damaged refcounts affect an estimate and nothing else.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use anyhow::Context as _;
use image::qcow2::header::Qcow2Header;
use reactor::buffer::IoBuffer;
use storage::Storage;

use super::opening::{self, OpenMode};

// Bytes of refcounts that are read at a time, a multiple of every cluster size.
const STEP_BYTES: u64 = 2 << 20;

/// True if far more clusters of the file at `path` are in use than its file system has allocated:
/// at least one ninth and two clusters more. This is QEMU's rule.
pub(super) async fn is_sparse(path: &Path, header: &Qcow2Header) -> anyhow::Result<bool> {
    if opening::is_remote_or_null(path) || header.has_data_file() || header.encryption.is_some() {
        return Ok(false);
    }
    let name = path.display();
    let metadata = fs::metadata(path).with_context(|| format!("{name}: cannot be read"))?;
    let allocated = metadata.blocks() * 512 / header.cluster_bytes();
    let threshold = (allocated * 10 / 9).max(allocated + 2);
    let storage = opening::storage(path, OpenMode { force_share: true, ..OpenMode::default() })?;
    let in_use = clusters_in_use(&storage, header).await;
    Ok(in_use.with_context(|| format!("{name}: its refcounts cannot be read"))? >= threshold)
}

/// Number of clusters of the file with a nonzero refcount.
async fn clusters_in_use(storage: &Storage, header: &Qcow2Header) -> reactor::error::Result<u64> {
    let (cluster_bytes, size) = (header.cluster_bytes(), storage.size_bytes());
    let refcount_bits = 1_u64 << header.refcount_order;
    let (mut left, mut in_use) = (size.div_ceil(cluster_bytes), 0);
    let mut at = header.refcount_table_offset;
    let table_end = at.saturating_add(u64::from(header.refcount_table_clusters) * cluster_bytes);
    while at < table_end.min(size) && left > 0 {
        let length = STEP_BYTES.min(table_end.min(size) - at);
        let table = storage.read(at, IoBuffer::new(length as usize)).await?;
        for entry in table.as_chunks::<8>().0 {
            // A refcount block is one cluster; its entries cover this number of clusters.
            let covered = (cluster_bytes * 8 / refcount_bits).min(left);
            let offset = u64::from_be_bytes(*entry);
            // A block outside the file is skipped: this is an estimate, not a check.
            if offset != 0 && offset.checked_add(cluster_bytes).is_some_and(|end| end <= size) {
                let bytes = (covered * refcount_bits).div_ceil(8);
                let block = storage.read(offset, IoBuffer::new(bytes as usize)).await?;
                in_use += nonzero(&block, refcount_bits);
            }
            left -= covered;
        }
        at += length;
    }
    Ok(in_use)
}

/// Number of nonzero integers of `bits` bits.
fn nonzero(block: &[u8], bits: u64) -> u64 {
    if bits >= 8 {
        let numbers = block.chunks((bits / 8) as usize);
        return numbers.filter(|number| number.iter().any(|&byte| byte != 0)).count() as u64;
    }
    let mask = (1_u8 << bits) - 1;
    // Entries below 8 bits start at the least significant bit, but their order does not matter
    // here.
    let in_byte = |byte: u8| (0..8).step_by(bits as usize).filter(|at| byte >> at & mask != 0).count() as u64;
    block.iter().map(|&byte| in_byte(byte)).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refcounts_of_every_width_are_counted() {
        for (bits, block, count) in [
            (1, &[0b1000_0001, 0, 0xff][..], 10),
            (2, &[0b0100_0011], 2),
            (4, &[0x10, 0x11], 3),
            (8, &[0, 9, 0, 1], 2),
            (16, &[0, 1, 0, 0, 1, 0], 2),
            (64, &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0], 1),
        ] {
            assert_eq!(nonzero(block, bits), count, "{bits} bits");
        }
    }
}
