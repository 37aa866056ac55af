//! The snapshot table: a sequence of entries of variable length.
//!
//! Unknown extra data is preserved. Names are bytes: QEMU accepts any, and old images have names
//! that are not UTF-8.
//!
//! Damage affects as few entries as possible: an entry with an invalid L1 table is still decoded,
//! as are all later ones. Only an entry of unknown length ends the table.
//!
//! Never trusts a length before the bytes were read, and reads at most [`MAX_TABLE`].
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Snapshots".

use std::borrow::Cow;

use reactor::error::Result as IoResult;
use storage::Storage;

use crate::qcow2::{
    InvalidImage, MetadataError,
    big_endian::{u16_at, u32_at, u64_at},
    header::{MAX_L1, MAX_SNAPSHOTS, OFFSET_LIMIT, Qcow2Header},
    metadata_io,
};

/// Size limit of the table in bytes, as in QEMU: 1 KiB for each of 65,536 snapshots.
pub const MAX_TABLE: usize = 64 << 20;
// Limit of the extra data of an entry, as in QEMU.
const MAX_EXTRA: usize = 1024;
// Known extra data: size of the VM state, size of the disk, instruction count.
const KNOWN_EXTRA: usize = 24;
const FIXED: usize = 40;
// The table is read in pieces of this many bytes.
const PIECE: usize = 64 << 10;

/// An internal snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct InternalSnapshot {
    /// Offset of its L1 table, a multiple of the cluster size.
    pub l1_offset: u64,
    /// Entries of its L1 table, which has at most 32 MiB.
    pub l1_entries: u32,
    /// Unique id; a decimal number, as in QEMU.
    pub id: Vec<u8>,
    /// Name given by the user.
    pub name: Vec<u8>,
    /// Date in seconds since 1970.
    pub date_s: u32,
    /// Nanoseconds of the date.
    pub date_ns: u32,
    /// Run time of the guest in nanoseconds.
    pub vm_clock_ns: u64,
    /// Size in bytes of the VM state, which is stored after the disk in the snapshot's address
    /// space.
    pub vm_state_bytes: u64,
    /// Size of the disk at that time; `None` in old images, where it equals the present size.
    pub disk_bytes: Option<u64>,
    /// Instruction count of the guest, if it was recorded.
    pub instructions: Option<u64>,
    /// Extra data after the known fields.
    pub extra: Vec<u8>,
}

impl InternalSnapshot {
    /// Name as text.
    pub fn name(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.name)
    }

    /// Id as text.
    pub fn id(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.id)
    }

    /// Returns the index of the snapshot with this id or, failing that, with this name.
    pub fn find(snapshots: &[Self], name: &str) -> Option<usize> {
        let by_id = snapshots.iter().position(|snapshot| snapshot.id == name.as_bytes());
        by_id.or_else(|| snapshots.iter().position(|snapshot| snapshot.name == name.as_bytes()))
    }

    /// Decodes the entry at the start of `bytes` and returns it with its length. `None` if the
    /// entry extends beyond them.
    fn decode(bytes: &[u8]) -> Result<Option<(Self, usize)>, InvalidImage> {
        let Some(fixed) = bytes.get(..FIXED) else { return Ok(None) };
        let (id_length, name_length) = (u16_at(fixed, 12) as usize, u16_at(fixed, 14) as usize);
        let extra_length = u32_at(fixed, 36) as usize;
        if extra_length > MAX_EXTRA {
            return Err(InvalidImage::new(format!("a snapshot has {extra_length} bytes of extra data")));
        }
        let end = FIXED + extra_length + id_length + name_length;
        let Some(variable) = bytes.get(FIXED..end) else { return Ok(None) };
        let (extra, names) = variable.split_at(extra_length);
        let (id, name) = names.split_at(id_length);
        let known = |at: usize| extra.get(at..at + 8).map(|field| u64_at(field, 0));
        let snapshot = Self {
            l1_offset: u64_at(fixed, 0),
            l1_entries: u32_at(fixed, 8),
            id: id.to_vec(),
            name: name.to_vec(),
            date_s: u32_at(fixed, 16),
            date_ns: u32_at(fixed, 20),
            vm_clock_ns: u64_at(fixed, 24),
            vm_state_bytes: known(0).unwrap_or_else(|| u32_at(fixed, 32).into()),
            disk_bytes: known(8),
            instructions: known(16),
            extra: extra.get(KNOWN_EXTRA..).unwrap_or_default().to_vec(),
        };
        Ok(Some((snapshot, end.next_multiple_of(8))))
    }

    /// Checks size and offset of the L1 table against the header's limits.
    ///
    /// # Errors
    /// The table has an impossible size or offset.
    pub fn check(&self, header: &Qcow2Header) -> Result<(), InvalidImage> {
        let (name, offset, bytes) = (self.name(), self.l1_offset, u64::from(self.l1_entries) * 8);
        if bytes > MAX_L1 {
            return Err(InvalidImage::new(format!("snapshot {name:?} has an L1 table of {bytes} bytes")));
        }
        if !offset.is_multiple_of(header.cluster_bytes())
            || offset.checked_add(bytes).is_none_or(|end| end > OFFSET_LIMIT)
        {
            let message =
                format!("the L1 table of snapshot {name:?} at {offset:#x} is not aligned to a cluster");
            return Err(InvalidImage::new(message));
        }
        Ok(())
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        let mut extra = Vec::with_capacity(KNOWN_EXTRA + self.extra.len());
        let short_vm_state = u32::try_from(self.vm_state_bytes);
        // In version 2 the extra data may end after the size of the VM state.
        if self.disk_bytes.is_some() || short_vm_state.is_err() {
            extra.extend(self.vm_state_bytes.to_be_bytes());
        }
        if let Some(disk_bytes) = self.disk_bytes {
            extra.extend(disk_bytes.to_be_bytes());
            if let Some(instructions) = self.instructions {
                extra.extend(instructions.to_be_bytes());
                extra.extend(&self.extra);
            }
        }
        bytes.extend(self.l1_offset.to_be_bytes());
        bytes.extend(self.l1_entries.to_be_bytes());
        bytes.extend((self.id.len() as u16).to_be_bytes());
        bytes.extend((self.name.len() as u16).to_be_bytes());
        bytes.extend(self.date_s.to_be_bytes());
        bytes.extend(self.date_ns.to_be_bytes());
        bytes.extend(self.vm_clock_ns.to_be_bytes());
        // Superseded by the extra data, if present.
        bytes.extend(short_vm_state.unwrap_or(0).to_be_bytes());
        bytes.extend((extra.len() as u32).to_be_bytes());
        bytes.extend(&extra);
        bytes.extend(&self.id);
        bytes.extend(&self.name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
}

/// Encodes the table.
///
/// # Errors
/// The table exceeds QEMU's limit, or a name is too long.
pub fn encode(snapshots: &[InternalSnapshot]) -> Result<Vec<u8>, InvalidImage> {
    let mut bytes = Vec::new();
    for snapshot in snapshots {
        let longest = usize::from(u16::MAX);
        if snapshot.id.len() > longest || snapshot.name.len() > longest {
            return Err(InvalidImage::new("the name of a snapshot has more than 65535 bytes"));
        }
        snapshot.encode(&mut bytes);
        if bytes.len() > MAX_TABLE {
            return Err(InvalidImage::new(format!("the snapshot table would exceed {MAX_TABLE} bytes")));
        }
    }
    Ok(bytes)
}

/// The readable part of a snapshot table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SnapshotTable {
    /// Entries in the order of the table. [`InternalSnapshot::check`] fails for those with an
    /// invalid L1 table.
    pub snapshots: Vec<InternalSnapshot>,
    /// Length of these entries in the file, in bytes.
    pub length_bytes: usize,
    /// Reason why later entries cannot be read.
    pub truncation: Option<InvalidImage>,
}

impl SnapshotTable {
    /// Reads the table that the header names: at most [`MAX_SNAPSHOTS`] entries and
    /// [`MAX_TABLE`] bytes. Damage is not an error: see [`SnapshotTable::decode_errors`].
    ///
    /// # Errors
    /// Errors of the storage.
    pub async fn read(storage: &Storage, header: &Qcow2Header) -> IoResult<Self> {
        let mut table = Self::default();
        let mut read = Vec::new();
        for number in 0..header.snapshots.min(MAX_SNAPSHOTS) {
            match next(storage, header, number, table.length_bytes, &mut read).await? {
                Ok((snapshot, length)) => {
                    table.snapshots.push(snapshot);
                    // The last entry may lack its padding.
                    table.length_bytes = (table.length_bytes + length).min(read.len());
                }
                Err(truncation) => {
                    table.truncation = Some(truncation);
                    return Ok(table);
                }
            }
        }
        table.truncation = too_many(header);
        Ok(table)
    }

    /// All faults of the table and its entries.
    pub fn decode_errors(&self, header: &Qcow2Header) -> impl Iterator<Item = InvalidImage> {
        let entries = self.snapshots.iter().filter_map(|snapshot| snapshot.check(header).err());
        entries.chain(self.truncation.clone())
    }
}

/// Returns the entry at byte `at` of the table and its length, or its fault. `read` is the part of
/// the table that was read so far.
async fn next(
    storage: &Storage,
    header: &Qcow2Header,
    number: u32,
    at: usize,
    read: &mut Vec<u8>,
) -> IoResult<Result<(InternalSnapshot, usize), InvalidImage>> {
    loop {
        match InternalSnapshot::decode(&read[at..]) {
            Ok(Some(found)) => return Ok(Ok(found)),
            Ok(None) => {}
            Err(invalid) => {
                return Ok(Err(InvalidImage::new(format!(
                    "entry {number} of the snapshot table: {invalid}"
                ))));
            }
        }
        let place = header.snapshots_offset + read.len() as u64;
        let left = storage.size_bytes().saturating_sub(place).min((MAX_TABLE - read.len()) as u64);
        if left == 0 {
            let at = header.snapshots_offset;
            let message = if read.len() == MAX_TABLE {
                format!("the snapshot table at {at:#x} has more than {MAX_TABLE} bytes, in entry {number}")
            } else {
                format!("the snapshot table at {at:#x} ends inside entry {number}")
            };
            return Ok(Err(InvalidImage::new(message)));
        }
        read.extend(metadata_io::read(storage, place, left.min(PIECE as u64) as usize).await?);
    }
}

/// Fault of a header with more snapshots than QEMU accepts.
pub(in crate::qcow2) fn too_many(header: &Qcow2Header) -> Option<InvalidImage> {
    (header.snapshots > MAX_SNAPSHOTS).then(|| {
        InvalidImage::new(format!(
            "the image has {} snapshots; the maximum is {MAX_SNAPSHOTS}",
            header.snapshots
        ))
    })
}

/// Reads a table that is to be changed, which must have no faults: the snapshots, and its length
/// in bytes.
///
/// # Errors
/// The first fault of the table, or the storage's error.
pub async fn read(
    storage: &Storage,
    header: &Qcow2Header,
) -> Result<(Vec<InternalSnapshot>, usize), MetadataError> {
    let table = SnapshotTable::read(storage, header).await?;
    let fault = table.decode_errors(header).next();
    match fault {
        Some(fault) => Err(fault.into()),
        None => Ok((table.snapshots, table.length_bytes)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::qcow2::create::{CreateOptions, create};
    use reactor::sim;

    fn snapshot(number: u32) -> InternalSnapshot {
        InternalSnapshot {
            l1_offset: 0x50000,
            l1_entries: 4,
            id: number.to_string().into_bytes(),
            name: vec![b'n'; number as usize],
            date_s: 1,
            date_ns: 2,
            vm_clock_ns: 3,
            vm_state_bytes: 1 << 40,
            disk_bytes: Some(1 << 30),
            instructions: Some(u64::MAX),
            extra: vec![7; number as usize % 3],
        }
    }

    async fn image() -> (Storage, Qcow2Header) {
        let storage = Storage::memory(512);
        let options = CreateOptions { size_bytes: 1 << 30, ..CreateOptions::default() };
        let header = create(&storage, None, &options).await.expect("valid");
        (storage, Qcow2Header { snapshots_offset: 0x40000, ..header })
    }

    #[test]
    fn table_round_trips() {
        sim::run(1, async {
            let (storage, header) = image().await;
            let snapshots: Vec<_> = (0..500).map(snapshot).collect();
            let table = encode(&snapshots).expect("short names");
            metadata_io::write(&storage, 0x40000, &table).await.expect("memory");
            let header = Qcow2Header { snapshots: 500, ..header };
            assert_eq!(read(&storage, &header).await, Ok((snapshots, table.len())));
        });
    }

    #[test]
    fn a_large_vm_state_without_a_disk_size_keeps_its_size() {
        sim::run(1, async {
            let (storage, header) = image().await;
            let parts =
                InternalSnapshot { disk_bytes: None, instructions: None, extra: Vec::new(), ..snapshot(1) };
            let small = InternalSnapshot { vm_state_bytes: 77, ..parts.clone() };
            let snapshots = vec![InternalSnapshot { vm_state_bytes: 5 << 30, ..parts }, small];
            let table = encode(&snapshots).expect("short names");
            metadata_io::write(&storage, 0x40000, &table).await.expect("memory");
            let header = Qcow2Header { snapshots: 2, version: 2, ..header };
            assert_eq!(read(&storage, &header).await, Ok((snapshots, table.len())));
        });
    }

    #[test]
    fn truncated_or_wrong_tables_are_rejected() {
        sim::run(1, async {
            let (storage, header) = image().await;
            let message_of =
                |result: Result<_, MetadataError>| result.map(drop).expect_err("wrong").to_string();
            let many = Qcow2Header { snapshots: 3, ..header.clone() };
            assert!(message_of(read(&storage, &many).await).contains("ends inside entry 0"));
            let mut invalid = snapshot(1);
            for (part, change) in [
                ("is not aligned to a cluster", (|s| s.l1_offset = 0x50200) as fn(&mut InternalSnapshot)),
                ("L1 table of", |s| s.l1_entries = u32::MAX),
                ("extra data", |s| s.extra = vec![0; 1024]),
            ] {
                change(&mut invalid);
                let table = encode(&[invalid]).expect("short names");
                metadata_io::write(&storage, 0x40000, &table).await.expect("memory");
                let single = Qcow2Header { snapshots: 1, ..header.clone() };
                assert!(message_of(read(&storage, &single).await).contains(part), "{part}");
                invalid = snapshot(1);
            }
        });
    }

    #[test]
    fn sound_entries_of_a_damaged_table_are_read() {
        sim::run(1, async {
            let (storage, header) = image().await;
            let mut entries: Vec<_> = (1..=5).map(snapshot).collect();
            entries[1].l1_offset = 0x50200;
            entries[3].extra = vec![0; 1024];
            let table = encode(&entries).expect("short names");
            metadata_io::write(&storage, 0x40000, &table).await.expect("memory");
            let header = Qcow2Header { snapshots: 5, ..header };
            let read = SnapshotTable::read(&storage, &header).await.expect("memory");
            assert_eq!(read.snapshots, entries[..3]);
            assert_eq!(read.length_bytes, encode(&entries[..3]).expect("short names").len());
            let faults: Vec<_> = read.decode_errors(&header).map(|fault| fault.to_string()).collect();
            assert_eq!(faults.len(), 2, "{faults:?}");
            assert!(faults[0].contains("is not aligned to a cluster"), "{faults:?}");
            assert!(faults[1].contains("entry 3"), "{faults:?}");
        });
    }

    #[test]
    fn a_table_beyond_the_limits_is_read_up_to_them() {
        sim::run(1, async {
            let (storage, header) = image().await;
            let end = 0x40000 + 40 * u64::from(MAX_SNAPSHOTS + 10);
            metadata_io::grow(&storage, end).await.expect("memory");
            let header = Qcow2Header { snapshots: MAX_SNAPSHOTS + 1, ..header };
            let read = SnapshotTable::read(&storage, &header).await.expect("memory");
            assert_eq!(read.snapshots.len(), MAX_SNAPSHOTS as usize);
            let truncation = read.truncation.expect("one more").to_string();
            assert_eq!(truncation, "the image has 65537 snapshots; the maximum is 65536");
        });
    }
}
