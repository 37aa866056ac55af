//! The snapshot table: entries of different lengths, one after the other.
//!
//! Unknown extra data is kept. Names are bytes: QEMU takes any, and old images have some that are
//! not UTF-8.
//!
//! Never trusts a length before the bytes are there, and reads no more of the file than
//! [`LARGEST_TABLE`].
//!
//! Source: QEMU's docs/interop/qcow2.rst, "Snapshots".

use std::borrow::Cow;

use crate::{
    image::qcow2::{
        Invalid, MetadataError,
        big_endian::{u16_at, u32_at, u64_at},
        bytes,
        header::{Header, LARGEST_L1, OFFSET_LIMIT},
    },
    storage::Storage,
};

/// The largest table that QEMU opens, in bytes: 1 KiB for each of the most snapshots.
pub const LARGEST_TABLE: usize = 64 << 20;
/// The most extra data of an entry that QEMU opens.
const LARGEST_EXTRA: usize = 1024;
/// Extra data that is known: size of the machine's state, size of the disk, and how many
/// instructions have run.
const KNOWN_EXTRA: usize = 24;
const FIXED: usize = 40;
/// The table is read in pieces of this many bytes.
const PIECE: usize = 64 << 10;

/// An internal snapshot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Snapshot {
    /// Its L1 table in the file: the beginning of a cluster.
    pub l1_offset: u64,
    /// Entries of its L1 table; the table has 32 MiB at most.
    pub l1_entries: u32,
    /// Unique; a number, as QEMU makes them.
    pub id: Vec<u8>,
    /// What people call it.
    pub name: Vec<u8>,
    /// When it was taken, in seconds since 1970.
    pub date_s: u32,
    /// And nanoseconds.
    pub date_ns: u32,
    /// How long the guest had run, in nanoseconds.
    pub vm_clock_ns: u64,
    /// State of the machine that lies behind the disk in the snapshot, in bytes.
    pub vm_state_bytes: u64,
    /// The disk's size then; `None` is what it is now, in old images.
    pub disk_bytes: Option<u64>,
    /// Instructions that had run, where they were counted.
    pub instructions: Option<u64>,
    /// Extra data behind what is known.
    pub extra: Vec<u8>,
}

impl Snapshot {
    /// The name, for people.
    pub fn name(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.name)
    }

    /// The id, for people.
    pub fn id(&self) -> Cow<'_, str> {
        String::from_utf8_lossy(&self.id)
    }

    /// Which of them has this id, or else this name.
    pub fn find(snapshots: &[Self], name: &str) -> Option<usize> {
        let by_id = snapshots.iter().position(|snapshot| snapshot.id == name.as_bytes());
        by_id.or_else(|| snapshots.iter().position(|snapshot| snapshot.name == name.as_bytes()))
    }

    /// Reads an entry from the front of `bytes`; also how long it is. `None` if it goes on behind
    /// them.
    fn decode(bytes: &[u8], header: &Header) -> Result<Option<(Self, usize)>, Invalid> {
        let Some(fixed) = bytes.get(..FIXED) else { return Ok(None) };
        let (id_length, name_length) = (u16_at(fixed, 12) as usize, u16_at(fixed, 14) as usize);
        let extra_length = u32_at(fixed, 36) as usize;
        if extra_length > LARGEST_EXTRA {
            return Err(Invalid::new(format!("a snapshot has {extra_length} bytes of extra data")));
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
        snapshot.check(header)?;
        Ok(Some((snapshot, end.next_multiple_of(8))))
    }

    fn check(&self, header: &Header) -> Result<(), Invalid> {
        let (name, offset, bytes) = (self.name(), self.l1_offset, u64::from(self.l1_entries) * 8);
        if bytes > LARGEST_L1 {
            return Err(Invalid::new(format!("snapshot {name:?} has an L1 table of {bytes} bytes")));
        }
        if !offset.is_multiple_of(header.cluster_bytes())
            || offset.checked_add(bytes).is_none_or(|end| end > OFFSET_LIMIT)
        {
            let what = format!("snapshot {name:?} has its L1 table at {offset:#x}, where no cluster begins");
            return Err(Invalid::new(what));
        }
        Ok(())
    }

    fn encode(&self, bytes: &mut Vec<u8>) {
        let mut extra = Vec::with_capacity(KNOWN_EXTRA + self.extra.len());
        if let Some(disk_bytes) = self.disk_bytes {
            extra.extend(self.vm_state_bytes.to_be_bytes());
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
        // Superseded by the extra data, where there is any.
        bytes.extend(u32::try_from(self.vm_state_bytes).unwrap_or(0).to_be_bytes());
        bytes.extend((extra.len() as u32).to_be_bytes());
        bytes.extend(&extra);
        bytes.extend(&self.id);
        bytes.extend(&self.name);
        bytes.resize(bytes.len().next_multiple_of(8), 0);
    }
}

/// The table's bytes.
///
/// # Errors
/// If they are more than QEMU reads, or a name is too long to be written.
pub fn encode(snapshots: &[Snapshot]) -> Result<Vec<u8>, Invalid> {
    let mut bytes = Vec::new();
    for snapshot in snapshots {
        let longest = usize::from(u16::MAX);
        if snapshot.id.len() > longest || snapshot.name.len() > longest {
            return Err(Invalid::new("the name of a snapshot has more than 65535 bytes"));
        }
        snapshot.encode(&mut bytes);
        if bytes.len() > LARGEST_TABLE {
            return Err(Invalid::new(format!("a snapshot table of more than {LARGEST_TABLE} bytes")));
        }
    }
    Ok(bytes)
}

/// Reads the table that the header names: the snapshots, and how many bytes the table has.
///
/// # Errors
/// What is wrong with it, or the storage's error.
pub async fn read(storage: &Storage, header: &Header) -> Result<(Vec<Snapshot>, usize), MetadataError> {
    let mut snapshots = Vec::new();
    let mut read = Vec::new();
    let mut at = 0;
    for number in 0..header.snapshots {
        loop {
            if let Some((snapshot, length)) = Snapshot::decode(&read[at..], header)? {
                snapshots.push(snapshot);
                // Its padding may be missing from the last one.
                at = (at + length).min(read.len());
                break;
            }
            let place = header.snapshots_offset + read.len() as u64;
            let left = storage.size_bytes().saturating_sub(place).min((LARGEST_TABLE - read.len()) as u64);
            if left == 0 {
                let what = format!(
                    "the snapshot table at {:#x} ends inside entry {number}",
                    header.snapshots_offset
                );
                return Err(Invalid::new(what).into());
            }
            read.extend(bytes::read(storage, place, left.min(PIECE as u64) as usize).await?);
        }
    }
    Ok((snapshots, at))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        image::qcow2::create::{CreateOptions, create},
        reactor::sim,
    };

    fn snapshot(number: u32) -> Snapshot {
        Snapshot {
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

    async fn image() -> (Storage, Header) {
        let storage = Storage::memory(512);
        let options = CreateOptions { size_bytes: 1 << 30, ..CreateOptions::default() };
        let header = create(&storage, None, &options).await.expect("valid");
        (storage, Header { snapshots_offset: 0x40000, ..header })
    }

    #[test]
    fn what_is_written_is_read() {
        sim::run(1, async {
            let (storage, header) = image().await;
            let snapshots: Vec<_> = (0..500).map(snapshot).collect();
            let table = encode(&snapshots).expect("short names");
            bytes::write(&storage, 0x40000, &table).await.expect("memory");
            let header = Header { snapshots: 500, ..header };
            assert_eq!(read(&storage, &header).await, Ok((snapshots, table.len())));
        });
    }

    #[test]
    fn what_is_cut_off_or_wrong_is_refused() {
        sim::run(1, async {
            let (storage, header) = image().await;
            let said = |result: Result<_, MetadataError>| result.map(drop).expect_err("wrong").to_string();
            let many = Header { snapshots: 3, ..header.clone() };
            assert!(said(read(&storage, &many).await).contains("ends inside entry 0"));
            let mut wrong = snapshot(1);
            for (part, change) in [
                ("where no cluster begins", (|s| s.l1_offset = 0x50200) as fn(&mut Snapshot)),
                ("L1 table of", |s| s.l1_entries = u32::MAX),
                ("extra data", |s| s.extra = vec![0; 1024]),
            ] {
                change(&mut wrong);
                let table = encode(&[wrong]).expect("short names");
                bytes::write(&storage, 0x40000, &table).await.expect("memory");
                let one = Header { snapshots: 1, ..header.clone() };
                assert!(said(read(&storage, &one).await).contains(part), "{part}");
                wrong = snapshot(1);
            }
        });
    }
}
