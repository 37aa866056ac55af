//! The bitmap directory, and the table of each bitmap.
//!
//! Reads no more of the file than the header's rules allow, and returns nothing that QEMU would
//! reject.
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Bitmaps"; the limits beyond it are QEMU's own.

use std::{borrow::Cow, collections::HashSet, ops::RangeInclusive};

use storage::Storage;

use crate::qcow2::{
    InvalidImage, MetadataError,
    big_endian::{u16_at, u32_at, u64_at, words},
    header::{BitmapsExtension, FileRegion, MAX_BITMAP_DIRECTORY, OFFSET_LIMIT, Qcow2Header},
    metadata_io,
};

/// Granularities that QEMU supports, as powers of two: 512 bytes to 2 GiB.
pub const GRANULARITY_BITS: RangeInclusive<u32> = 9..=31;
/// Length limit of a name, in bytes.
pub const MAX_NAME: usize = 1023;
/// Size limit of a bitmap's bits in bytes, as in QEMU.
pub(super) const MAX_BITS: u64 = 512 << 20;
const FIXED: usize = 24;
// The only defined type: dirty tracking.
const DIRTY_TRACKING: u8 = 1;

/// Bits of [`BitmapEntry::flags`].
pub mod flag {
    /// The last program that opened the image did not store the bitmap, so it may be inconsistent.
    pub const IN_USE: u32 = 1 << 0;
    /// The bitmap records writes whenever the image is open for writing.
    pub const AUTO: u32 = 1 << 1;
    /// The bitmap may be used without understanding its extra data.
    pub const EXTRA_COMPATIBLE: u32 = 1 << 2;
    /// All defined flags.
    pub const KNOWN: u32 = IN_USE | AUTO | EXTRA_COMPATIBLE;
}

/// A bitmap, as described by the directory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapEntry {
    /// Offset of its table, a multiple of the cluster size.
    pub table_offset: u64,
    /// Number of entries in its table, one for each cluster of bits.
    pub table_entries: u32,
    /// See [`flag`].
    pub flags: u32,
    /// A bit covers `1 << granularity_bits` bytes of the disk; in [`GRANULARITY_BITS`].
    pub granularity_bits: u32,
    /// Name of 1 to [`MAX_NAME`] bytes, unique in the image.
    pub name: Vec<u8>,
    /// Extra data; preserved.
    pub extra: Vec<u8>,
}

/// Bytes that copies of these bitmaps need in an image of a disk of `size_bytes`: all bits, a
/// table for each, and the directory.
pub fn copied_bytes(bitmaps: &[BitmapEntry], size_bytes: u64, cluster_bytes: u64) -> u64 {
    let (mut bytes, mut directory) = (0, 0);
    for bitmap in bitmaps {
        let bits = size_bytes.div_ceil(1 << bitmap.granularity_bits);
        let clusters = bits.div_ceil(8).div_ceil(cluster_bytes);
        bytes += clusters * cluster_bytes + (clusters * 8).next_multiple_of(cluster_bytes);
        directory += (FIXED + bitmap.name.len()).next_multiple_of(8) as u64;
    }
    bytes + directory.next_multiple_of(cluster_bytes)
}

impl BitmapEntry {
    /// Name as text.
    pub fn name(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.name)
    }

    /// Location of its table.
    pub fn table(&self) -> FileRegion {
        FileRegion { offset: self.table_offset, length: u64::from(self.table_entries) * 8 }
    }

    /// Number of table entries that a bitmap of a disk of this size needs.
    pub fn entries_for(size_bytes: u64, granularity_bits: u32, cluster_bits: u32) -> u64 {
        size_bytes.div_ceil(1 << granularity_bits).div_ceil(8).div_ceil(1 << cluster_bits)
    }

    /// Decodes the entry at the start of `bytes`: the entry, its fault, and its length.
    fn decode(
        bytes: &[u8],
        header: &Qcow2Header,
    ) -> Result<(Self, Option<InvalidImage>, usize), InvalidImage> {
        let cut_off = || InvalidImage::new("the bitmap directory ends inside an entry");
        let fixed = bytes.get(..FIXED).ok_or_else(cut_off)?;
        let field = |at: usize| u32_at(fixed, at);
        let name_length = usize::from(u16_at(fixed, 18));
        let extra_length = field(20) as usize;
        let end = FIXED.checked_add(extra_length).and_then(|end| end.checked_add(name_length));
        let variable = end.and_then(|end| bytes.get(FIXED..end)).ok_or_else(cut_off)?;
        let (extra, name) = variable.split_at(extra_length);
        let entry = Self {
            table_offset: u64_at(fixed, 0),
            table_entries: field(8),
            flags: field(12),
            granularity_bits: fixed[17].into(),
            name: name.to_vec(),
            extra: extra.to_vec(),
        };
        let fault = entry.check(fixed[16], header).err();
        Ok((entry, fault, (FIXED + variable.len()).next_multiple_of(8).min(bytes.len())))
    }

    fn check(&self, kind: u8, header: &Qcow2Header) -> Result<(), InvalidImage> {
        let invalid = |fault: String| Err(InvalidImage::new(format!("bitmap {:?} {fault}", self.name())));
        let FileRegion { offset, length } = self.table();
        if kind != DIRTY_TRACKING {
            return invalid(format!("is of the unknown kind {kind}"));
        }
        if self.name.is_empty() || self.name.len() > MAX_NAME {
            return invalid(format!("has a name of {} bytes", self.name.len()));
        }
        if self.flags & !flag::KNOWN != 0 {
            return invalid(format!("has unknown flags {:#x}", self.flags));
        }
        if self.flags & flag::EXTRA_COMPATIBLE != 0 && self.extra.is_empty() {
            return invalid("has the flag for extra data, but no extra data".to_owned());
        }
        if !GRANULARITY_BITS.contains(&self.granularity_bits) {
            return invalid(format!("has a granularity of 2^{} bytes", self.granularity_bits));
        }
        if length == 0 || length / 8 > MAX_BITS / header.cluster_bytes() || offset == 0 {
            return invalid(format!("has a table of {length} bytes at {offset:#x}"));
        }
        if !offset.is_multiple_of(header.cluster_bytes())
            || offset.checked_add(length).is_none_or(|end| end > OFFSET_LIMIT)
        {
            return invalid(format!("has its table at {offset:#x}, which is not aligned to a cluster"));
        }
        Ok(())
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        bytes.extend(self.table_offset.to_be_bytes());
        bytes.extend(self.table_entries.to_be_bytes());
        bytes.extend(self.flags.to_be_bytes());
        bytes.extend([DIRTY_TRACKING, self.granularity_bits as u8]);
        bytes.extend((self.name.len() as u16).to_be_bytes());
        bytes.extend((self.extra.len() as u32).to_be_bytes());
        bytes.extend(&self.extra);
        bytes.extend(&self.name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
}

/// Encodes the directory.
pub fn encode(entries: &[BitmapEntry]) -> Vec<u8> {
    let mut bytes = Vec::new();
    for entry in entries {
        entry.encode(&mut bytes);
    }
    bytes
}

/// Reads the directory that the header refers to, which must lie inside the file.
///
/// # Errors
/// The first fault of the directory or of an entry, or the storage's error.
pub async fn read(
    storage: &Storage,
    header: &Qcow2Header,
    bitmaps: BitmapsExtension,
) -> Result<Vec<BitmapEntry>, MetadataError> {
    let entries = read_entries(storage, header, bitmaps).await?;
    let sound = entries.into_iter().map(|(entry, fault)| fault.map_or(Ok(entry), Err));
    Ok(sound.collect::<Result<_, _>>()?)
}

/// Like [`read`], with the fault of each entry. Of two bitmaps with one name the second has a
/// fault.
///
/// # Errors
/// The fault of the directory as a whole, or the storage's error.
pub(in crate::qcow2) async fn read_entries(
    storage: &Storage,
    header: &Qcow2Header,
    BitmapsExtension { count, directory }: BitmapsExtension,
) -> Result<Vec<(BitmapEntry, Option<InvalidImage>)>, MetadataError> {
    let FileRegion { offset, length } = directory;
    let is_inside = offset.checked_add(length).is_some_and(|end| end <= storage.size_bytes());
    if length > MAX_BITMAP_DIRECTORY || !is_inside || offset == 0 {
        return Err(InvalidImage::new(format!(
            "the bitmap directory of {length} bytes at {offset:#x} is not inside the file"
        ))
        .into());
    }
    let read = metadata_io::read(storage, offset, length as usize).await?;
    let mut entries = Vec::new();
    let mut names = HashSet::new();
    let mut rest = &read[..];
    while !rest.is_empty() {
        let (entry, fault, end) = BitmapEntry::decode(rest, header)?;
        let is_new = names.insert(entry.name.clone());
        let fault = fault.or_else(|| {
            (!is_new).then(|| InvalidImage::new(format!("two bitmaps have the name {:?}", entry.name())))
        });
        rest = &rest[end..];
        entries.push((entry, fault));
    }
    if entries.len() != count as usize {
        let message =
            format!("the bitmap directory has {} entries, but the header specifies {count}", entries.len());
        return Err(InvalidImage::new(message).into());
    }
    Ok(entries)
}

/// A cluster of bits, as described by a bitmap table.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BitmapCluster {
    /// All zeroes; not stored.
    Zeroes,
    /// All ones; not stored.
    Ones,
    /// Stored at this offset in the file.
    Stored(u64),
}

/// Decodes a bitmap table.
///
/// # Errors
/// The first invalid entry.
pub fn decode_table(bytes: &[u8], cluster_bytes: u64) -> Result<Vec<BitmapCluster>, InvalidImage> {
    let decode = |raw: u64| match raw {
        0 => Ok(BitmapCluster::Zeroes),
        1 => Ok(BitmapCluster::Ones),
        offset if offset.is_multiple_of(cluster_bytes) && offset < OFFSET_LIMIT => {
            Ok(BitmapCluster::Stored(offset))
        }
        other => Err(InvalidImage::new(format!(
            "a bitmap table has the entry {other:#x}, which does not point to the start of a cluster"
        ))),
    };
    words(bytes).map(decode).collect()
}

/// Encodes a bitmap table.
pub fn encode_table(table: &[BitmapCluster]) -> Vec<u8> {
    let encode = |bits: &BitmapCluster| match bits {
        BitmapCluster::Zeroes => 0_u64,
        BitmapCluster::Ones => 1,
        BitmapCluster::Stored(offset) => *offset,
    };
    table.iter().map(encode).flat_map(u64::to_be_bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::create::{CreateOptions, create};
    use reactor::sim;

    fn entry(number: usize) -> BitmapEntry {
        BitmapEntry {
            table_offset: 0x50000,
            table_entries: 1,
            flags: flag::AUTO,
            granularity_bits: 16,
            name: vec![b'n'; number + 1],
            extra: vec![7; number % 5],
        }
    }

    async fn read_back(entries: &[BitmapEntry], count: u32) -> Result<Vec<BitmapEntry>, MetadataError> {
        let storage = Storage::memory(512);
        let options = CreateOptions { size_bytes: 1 << 30, ..CreateOptions::default() };
        let header = create(&storage, None, &options).await.expect("valid");
        let directory = encode(entries);
        metadata_io::write(&storage, 0x40000, &directory).await.expect("memory");
        let place = FileRegion { offset: 0x40000, length: directory.len() as u64 };
        read(&storage, &header, BitmapsExtension { count, directory: place }).await
    }

    #[test]
    fn directory_round_trips() {
        sim::run(1, async {
            let entries: Vec<_> = (0..100).map(entry).collect();
            assert_eq!(read_back(&entries, 100).await, Ok(entries));
        });
        let table = [BitmapCluster::Zeroes, BitmapCluster::Ones, BitmapCluster::Stored(0x50000)];
        assert_eq!(decode_table(&encode_table(&table), 65_536), Ok(table.to_vec()));
        assert!(decode_table(&0x50200_u64.to_be_bytes(), 65_536).is_err());
    }

    #[test]
    fn invalid_bitmap_entries_are_rejected() {
        sim::run(1, async {
            let altered = |change: fn(&mut BitmapEntry)| {
                let mut invalid = entry(1);
                change(&mut invalid);
                vec![invalid]
            };
            for (part, entries, count) in [
                ("2^8 bytes", altered(|entry| entry.granularity_bits = 8), 1),
                ("name of 0 bytes", altered(|entry| entry.name.clear()), 1),
                ("unknown flags", altered(|entry| entry.flags = 8), 1),
                ("but no extra data", altered(|entry| (entry.flags, entry.extra) = (4, Vec::new())), 1),
                ("not aligned to a cluster", altered(|entry| entry.table_offset = 0x50200), 1),
                ("table of 0 bytes", altered(|entry| entry.table_entries = 0), 1),
                ("two bitmaps", vec![entry(1), entry(1)], 2),
                ("header specifies 2", vec![entry(1)], 2),
            ] {
                let message = read_back(&entries, count).await.expect_err(part).to_string();
                assert!(message.contains(part), "{message}");
            }
        });
    }
}
