//! The bitmaps of an open image as stored in the file: read, added, removed, cleared, enabled and
//! disabled, merged, and marked as in use.
//!
//! Never overwrites a directory or table that the header refers to, except for the in-use flag.
//! New ones are written elsewhere, one sector of the header switches to them, and then the old
//! ones are freed. A crash leaves the old or the new ones, and leaks.

use super::{
    BitmapCluster, BitmapEntry, DirtyBits, GRANULARITY_BITS, MAX_NAME, decode_table, directory::MAX_BITS,
    encode, encode_table, flag, read,
};
use reactor::{
    error::{Error, Result as IoResult},
    memory::OutOfBudget,
};

use crate::qcow2::{
    InvalidImage, MetadataError, Qcow2Image,
    header::{BitmapsExtension, FileRegion, MAX_BITMAP_DIRECTORY, MAX_BITMAPS, Qcow2Header, autoclear},
    l1::padded,
    metadata_io,
};

/// Reason why an operation on bitmaps failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BitmapError {
    /// No bitmap has this name.
    #[error("there is no bitmap {0:?} (`weir image info` lists all)")]
    NotFound(String),
    /// A bitmap has this name already.
    #[error("there is a bitmap {0:?} already (choose another name, or remove it)")]
    Exists(String),
    /// The bitmap is marked as in use, so it may be inconsistent.
    #[error("the bitmap {0:?} is marked in-use and may be inconsistent (remove it)")]
    InUse(String),
    /// A backup uses the bitmap.
    #[error("the bitmap {0:?} is in use by a backup (wait for its end, or cancel it)")]
    Busy(String),
    /// The bitmap has extra data that weir does not understand.
    #[error("the bitmap {0:?} has extra data of an unknown kind (use the program that created it)")]
    Extra(String),
    /// An invalid value.
    #[error("{0}")]
    InvalidValue(String),
    /// The dirty bitmaps that record writes exceed the memory budget.
    #[error("{0}")]
    Memory(#[from] OutOfBudget),
    /// The image is read-only.
    #[error("it is read-only (open it for writing)")]
    ReadOnly,
    /// A structure is invalid.
    #[error("{0} (`weir image check` shows the damage)")]
    Invalid(#[from] InvalidImage),
    /// A read or write of the file failed.
    #[error("{0}")]
    Failed(#[from] Error),
}

impl From<MetadataError> for BitmapError {
    fn from(error: MetadataError) -> Self {
        match error {
            MetadataError::Invalid(invalid) => Self::Invalid(invalid),
            MetadataError::Storage(error) => Self::Failed(error),
        }
    }
}

// Bytes of bits that are read or written in one request.
const AT_ONCE: usize = 1 << 20;

type Result<T> = std::result::Result<T, BitmapError>;

impl Qcow2Image {
    /// Reads the bitmaps of the directory; none if the bitmaps extension is not marked consistent.
    ///
    /// # Errors
    /// [`BitmapError::Invalid`] and [`BitmapError::Failed`].
    pub async fn bitmaps(&self) -> Result<Vec<BitmapEntry>> {
        self.bitmaps_of(&self.header()).await
    }

    /// Reads the bitmaps that this header refers to.
    pub(super) async fn bitmaps_of(&self, header: &Qcow2Header) -> Result<Vec<BitmapEntry>> {
        match header.bitmaps.filter(|_| header.autoclear & autoclear::BITMAPS != 0) {
            Some(bitmaps) => Ok(read(self.file.storage(), header, bitmaps).await?),
            None => Ok(Vec::new()),
        }
    }

    /// Reads the bits of a bitmap.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn bitmap_bits(&self, name: &str) -> Result<DirtyBits> {
        let entries = self.bitmaps().await?;
        self.read_bits(&entries[find_usable(&entries, name)?], self.size_bytes()).await
    }

    /// Reads the bits of a bitmap for a disk of this size from the file.
    pub(super) async fn read_bits(&self, entry: &BitmapEntry, size_bytes: u64) -> Result<DirtyBits> {
        let cluster_bits = self.shape.cluster_bits;
        self.check_table(entry, size_bytes)?;
        let table = self.bitmap_table(entry).await?;
        // Bounded by the directory's rules, which were checked.
        let mut bits = DirtyBits::new(size_bytes, entry.granularity_bits);
        let mut number = 0;
        while number < table.len() {
            let at = number << cluster_bits;
            number += match table[number] {
                BitmapCluster::Zeroes => 1,
                BitmapCluster::Ones => {
                    bits.fill(at, std::iter::repeat_n(u8::MAX, 1 << cluster_bits));
                    1
                }
                BitmapCluster::Stored(offset) => {
                    let run = run_of(&table[number..], offset, cluster_bits);
                    let read = metadata_io::read(self.file.storage(), offset, run << cluster_bits).await?;
                    bits.fill(at, read.into_iter());
                    run
                }
            };
        }
        Ok(bits)
    }

    /// Fails if the table is too short for a disk of this size.
    pub(super) fn check_table(
        &self,
        entry: &BitmapEntry,
        size_bytes: u64,
    ) -> std::result::Result<(), InvalidImage> {
        let needed = BitmapEntry::entries_for(size_bytes, entry.granularity_bits, self.shape.cluster_bits);
        if needed > entry.table_entries.into() {
            let message =
                format!("the table of bitmap {:?} at {:#x} is too short", entry.name(), entry.table_offset);
            return Err(InvalidImage::new(message));
        }
        Ok(())
    }

    /// Reads a bitmap's table and checks that its entries lie inside the file and differ from each
    /// other.
    pub(super) async fn bitmap_table(&self, entry: &BitmapEntry) -> Result<Vec<BitmapCluster>> {
        let FileRegion { offset, length } = entry.table();
        let cluster_bytes = 1 << self.shape.cluster_bits;
        // The file may end inside its last cluster.
        let file_end = self.file.size_bytes().next_multiple_of(cluster_bytes);
        let invalid =
            |fault: &str| Err(InvalidImage::new(format!("bitmap {:?} {fault}", entry.name())).into());
        if offset.checked_add(length).is_none_or(|end| end > file_end) {
            return invalid("has its table beyond the end of the file");
        }
        let table = decode_table(
            &metadata_io::read(self.file.storage(), offset, length as usize).await?,
            cluster_bytes,
        )?;
        let stored = table.iter().filter_map(|part| match part {
            BitmapCluster::Stored(offset) => Some(*offset),
            BitmapCluster::Zeroes | BitmapCluster::Ones => None,
        });
        let mut stored: Vec<_> = stored.collect();
        stored.sort_unstable();
        if stored.last().is_some_and(|last| last + cluster_bytes > file_end) {
            return invalid("has bits beyond the end of the file");
        }
        if stored.windows(2).any(|pair| pair[0] == pair[1]) {
            return invalid("has the same cluster of bits twice");
        }
        Ok(table)
    }

    /// Adds an empty bitmap that records writes from the next opening of the image on. A bit
    /// covers `1 << granularity_bits` bytes.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn add_bitmap(&self, name: &str, granularity_bits: u32) -> Result<()> {
        let _quiesced = self.quiesce().await?;
        let entries = self.changeable_bitmaps().await?;
        self.check_new(&entries, name, granularity_bits)?;
        let bits = DirtyBits::new(self.size_bytes(), granularity_bits);
        self.add_entry(entries, name, &bits, flag::AUTO).await
    }

    /// Fails unless a bitmap can be added under this name.
    pub(super) fn check_new(&self, entries: &[BitmapEntry], name: &str, granularity_bits: u32) -> Result<()> {
        let invalid = |message: String| Err(BitmapError::InvalidValue(message));
        if entries.iter().any(|entry| entry.name == name.as_bytes()) {
            return Err(BitmapError::Exists(name.to_owned()));
        }
        if name.is_empty() || name.len() > MAX_NAME {
            return invalid(format!("the name has {} bytes; it must have 1 to {MAX_NAME}", name.len()));
        }
        if !GRANULARITY_BITS.contains(&granularity_bits) {
            return invalid(format!("the granularity is 2^{granularity_bits} bytes; it must be 512 to 2G"));
        }
        self.check_granularity(granularity_bits)
    }

    /// Adds a bitmap to these, which are those of the file. Requires exclusive access.
    pub(super) async fn add_entry(
        &self,
        mut entries: Vec<BitmapEntry>,
        name: &str,
        bits: &DirtyBits,
        flags: u32,
    ) -> Result<()> {
        let invalid = |message: String| Err(BitmapError::InvalidValue(message));
        if self.shape.version < 3 {
            return invalid("images of version 2 have no bitmaps (convert it with compat=1.1)".to_owned());
        }
        if entries.len() == MAX_BITMAPS as usize {
            return invalid(format!("the image has the maximum of {MAX_BITMAPS} bitmaps (remove some)"));
        }
        let (table_offset, table_entries) = self.store_bits(bits).await?;
        let granularity_bits = bits.granularity_bits();
        let name = name.as_bytes().to_vec();
        entries.push(BitmapEntry {
            table_offset,
            table_entries,
            flags,
            granularity_bits,
            name,
            extra: Vec::new(),
        });
        self.replace_directory(&entries).await
    }

    /// Fails if the disk needs more bits of this granularity than the format allows.
    fn check_granularity(&self, granularity_bits: u32) -> Result<()> {
        let table = BitmapEntry::entries_for(self.size_bytes(), granularity_bits, self.shape.cluster_bits);
        if table > MAX_BITS >> self.shape.cluster_bits {
            let message = "the disk is too large for this granularity (choose a larger one)";
            return Err(BitmapError::InvalidValue(message.to_owned()));
        }
        Ok(())
    }

    /// Removes a bitmap, even an inconsistent one.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn remove_bitmap(&self, name: &str) -> Result<()> {
        let _quiesced = self.quiesce().await?;
        let mut entries = self.changeable_bitmaps().await?;
        let entry = entries.remove(find(&entries, name)?);
        // The directory no longer refers to the bits.
        self.replace_directory(&entries).await?;
        self.free_bits(&entry).await;
        Ok(())
    }

    /// Clears all bits of a bitmap.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn clear_bitmap(&self, name: &str) -> Result<()> {
        let entries = self.changeable_bitmaps().await?;
        let granularity_bits = entries[find_usable(&entries, name)?].granularity_bits;
        self.check_granularity(granularity_bits)?;
        self.store_bitmap(name, &DirtyBits::new(self.size_bytes(), granularity_bits)).await
    }

    /// Enables or disables recording from the next opening of the image on.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn enable_bitmap(&self, name: &str, enabled: bool) -> Result<()> {
        let _quiesced = self.quiesce().await?;
        let mut entries = self.changeable_bitmaps().await?;
        let found = find_usable(&entries, name)?;
        entries[found].flags = entries[found].flags & !flag::AUTO | if enabled { flag::AUTO } else { 0 };
        self.replace_directory(&entries).await
    }

    /// Adds the marks of `source` to a bitmap; `source` may be of another image and granularity.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn merge_bitmap(&self, name: &str, source: &DirtyBits) -> Result<()> {
        let mut bits = self.bitmap_bits(name).await?;
        merge(name, &mut bits, source)?;
        self.store_bitmap(name, &bits).await
    }

    /// Replaces the bits of a bitmap and clears its in-use flag. `bits` must have the disk's size
    /// and the bitmap's granularity.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn store_bitmap(&self, name: &str, bits: &DirtyBits) -> Result<()> {
        let _quiesced = self.quiesce().await?;
        self.store_entry(name, bits, |flags| flags).await
    }

    /// As [`Qcow2Image::store_bitmap`], with other flags. Requires exclusive access.
    pub(super) async fn store_entry(
        &self,
        name: &str,
        bits: &DirtyBits,
        change: impl FnOnce(u32) -> u32,
    ) -> Result<()> {
        let mut entries = self.changeable_bitmaps().await?;
        let found = find(&entries, name)?;
        if (bits.size_bytes(), bits.granularity_bits())
            != (self.size_bytes(), entries[found].granularity_bits)
        {
            return Err(BitmapError::InvalidValue(format!(
                "these bits do not belong to the bitmap {name:?}"
            )));
        }
        let old = entries[found].clone();
        let (table_offset, table_entries) = self.store_bits(bits).await?;
        entries[found] = BitmapEntry {
            table_offset,
            table_entries,
            flags: change(old.flags & !flag::IN_USE),
            ..old.clone()
        };
        self.replace_directory(&entries).await?;
        self.free_bits(&old).await;
        Ok(())
    }

    pub(super) async fn changeable_bitmaps(&self) -> Result<Vec<BitmapEntry>> {
        if self.is_read_only() { Err(BitmapError::ReadOnly) } else { self.bitmaps().await }
    }

    /// Writes bits and their table to newly allocated clusters. Frees them again if that fails.
    pub(super) async fn store_bits(&self, bits: &DirtyBits) -> Result<(u64, u32)> {
        let mut table = Vec::new();
        let stored = match self.store_parts(bits, &mut table).await {
            Ok(()) => self.store_clusters(&encode_table(&table)).await,
            Err(error) => Err(error),
        };
        match stored {
            Ok(offset) => Ok((offset, table.len() as u32)),
            Err(error) => {
                for part in table {
                    if let BitmapCluster::Stored(offset) = part {
                        let _ = self.change_refcount(offset, 1, -1).await;
                    }
                }
                Err(error.into())
            }
        }
    }

    /// Writes the clusters of bits that are neither all zeroes nor all ones, many at a time, and
    /// appends the table entries.
    async fn store_parts(&self, bits: &DirtyBits, table: &mut Vec<BitmapCluster>) -> IoResult<()> {
        let cluster = 1_usize << self.shape.cluster_bits;
        for piece in bits.bytes().chunks(cluster.max(AT_ONCE)) {
            let is_all = |part: &[u8], value: u8| part.iter().all(|byte| *byte == value);
            let is_stored = |part: &&[u8]| {
                let is_ones = part.len() == cluster && is_all(part, u8::MAX);
                !is_all(part, 0) && !is_ones
            };
            let stored = piece.chunks(cluster).filter(is_stored).collect::<Vec<_>>().concat();
            let mut place = if stored.is_empty() { 0 } else { self.store_clusters(&stored).await? };
            for part in piece.chunks(cluster) {
                // `place` advances through the clusters that were written together above.
                table.push(match part {
                    part if is_stored(&part) => {
                        place += cluster as u64;
                        BitmapCluster::Stored(place - cluster as u64)
                    }
                    [0, ..] => BitmapCluster::Zeroes,
                    _ => BitmapCluster::Ones,
                });
            }
        }
        if table.is_empty() {
            table.push(BitmapCluster::Zeroes);
        }
        Ok(())
    }

    async fn store_clusters(&self, bytes: &[u8]) -> IoResult<u64> {
        let length = bytes.len() as u64;
        let offset = self.allocate(length.div_ceil(1 << self.shape.cluster_bits)).await?;
        match self.write_metadata(offset, &padded(bytes.to_vec())).await {
            Ok(()) => Ok(offset),
            Err(error) => {
                let _ = self.change_refcount(offset, length, -1).await;
                Err(error)
            }
        }
    }

    /// Writes another directory, switches the header to it and frees the old one. After an error
    /// the header refers to the old one.
    pub(super) async fn replace_directory(&self, entries: &[BitmapEntry]) -> Result<()> {
        let header = self.header();
        let directory = encode(entries);
        let length = directory.len() as u64;
        if length > MAX_BITMAP_DIRECTORY {
            return Err(BitmapError::InvalidValue(
                "the bitmap directory is full (remove bitmaps)".to_owned(),
            ));
        }
        let bitmaps = match entries.len() as u32 {
            0 => None,
            count => {
                let offset = self.store_clusters(&directory).await?;
                Some(BitmapsExtension { count, directory: FileRegion { offset, length } })
            }
        };
        // The new directory must be durable before the header refers to it.
        self.flush_metadata().await?;
        self.update_header(|header| {
            header.bitmaps = bitmaps;
            header.autoclear = header.autoclear & !autoclear::BITMAPS
                | if bitmaps.is_some() { autoclear::BITMAPS } else { 0 };
        })
        .await?;
        // Without the autoclear bit the old extension may refer to arbitrary clusters.
        if let Some(old) = header.bitmaps.filter(|_| header.autoclear & autoclear::BITMAPS != 0) {
            let freed = self.change_refcount(old.directory.offset, old.directory.length, -1).await;
            self.warn_of_leak("directory", freed.map_err(Into::into));
        }
        let flushed = self.flush_metadata().await;
        self.warn_of_leak("directory", flushed.map_err(Into::into));
        Ok(())
    }

    /// Logs that unused clusters of bitmaps could not be freed. No error of the caller: the header
    /// refers to the new directory already, so the change has happened.
    fn warn_of_leak(&self, part: &str, freed: Result<()>) {
        if let Err(error) = freed {
            let image = self.description();
            tracing::warn!(image, "the old {part} of the bitmaps could not be freed: {error}");
        }
    }

    /// Frees bits and table of a bitmap that is no longer in the directory. A failure is a leak,
    /// which is logged.
    pub(super) async fn free_bits(&self, entry: &BitmapEntry) {
        let freed = self.try_free_bits(entry).await;
        self.warn_of_leak("table", freed);
    }

    async fn try_free_bits(&self, entry: &BitmapEntry) -> Result<()> {
        let cluster = 1 << self.shape.cluster_bits;
        for part in self.bitmap_table(entry).await? {
            if let BitmapCluster::Stored(offset) = part {
                self.change_refcount(offset, cluster, -1).await?;
            }
        }
        let FileRegion { offset, length } = entry.table();
        self.change_refcount(offset, length, -1).await?;
        Ok(self.flush_metadata().await?)
    }

    /// Marks all bitmaps as in use, because the content of the disk is about to be replaced. QEMU
    /// ignores such bitmaps.
    pub(in crate::qcow2) async fn mark_bitmaps_in_use(&self) -> IoResult<()> {
        match self.bitmap_entries().await? {
            Some(entries) => self.mark_in_use(entries, |_| true).await,
            None => Ok(()),
        }
    }

    /// Reads the directory. If it is invalid, clears the extension's mark in the header and
    /// returns `None`.
    pub(super) async fn bitmap_entries(&self) -> IoResult<Option<Vec<BitmapEntry>>> {
        match self.bitmaps().await {
            Ok(entries) => Ok(Some(entries).filter(|entries| !entries.is_empty())),
            Err(BitmapError::Failed(error)) => Err(error),
            Err(why) => self.mark_inconsistent(&why).await.map(|()| None),
        }
    }

    /// Marks selected bitmaps as in use, durably.
    pub(super) async fn mark_in_use(
        &self,
        mut entries: Vec<BitmapEntry>,
        is_selected: impl Fn(&BitmapEntry) -> bool,
    ) -> IoResult<()> {
        let Some(bitmaps) = self.header().bitmaps else { return Ok(()) };
        entries.iter_mut().filter(|entry| is_selected(entry)).for_each(|entry| entry.flags |= flag::IN_USE);
        let mut directory = encode(&entries);
        // The last entry may lack its padding.
        directory.truncate(bitmaps.directory.length as usize);
        // Written even if nothing changes: a failed attempt may have left its result in the page
        // cache only.
        self.write_metadata(bitmaps.directory.offset, &directory).await?;
        self.file.flush().await
    }

    async fn mark_inconsistent(&self, why: &BitmapError) -> IoResult<()> {
        let image = self.file.storage().description();
        tracing::warn!(image, "its bitmaps are unusable, and are marked inconsistent: {why}");
        self.update_header(|header| header.autoclear &= !autoclear::BITMAPS).await
    }
}

/// Adds the marks of `source` to those of the bitmap `name`.
pub(super) fn merge(name: &str, bits: &mut DirtyBits, source: &DirtyBits) -> Result<()> {
    let (source_bytes, target_bytes) = (source.size_bytes(), bits.size_bytes());
    if source_bytes != target_bytes {
        return Err(BitmapError::InvalidValue(format!(
            "the source covers {source_bytes} bytes, but {name:?} covers {target_bytes} (resize one of the disks)"
        )));
    }
    bits.merge(source);
    Ok(())
}

pub(super) fn find(entries: &[BitmapEntry], name: &str) -> Result<usize> {
    let found = entries.iter().position(|entry| entry.name == name.as_bytes());
    found.ok_or_else(|| BitmapError::NotFound(name.to_owned()))
}

/// Returns the index of a consistent bitmap.
pub(super) fn find_usable(entries: &[BitmapEntry], name: &str) -> Result<usize> {
    let found = find(entries, name)?;
    entries[found].check_usable().map(|()| found)
}

impl BitmapEntry {
    /// Fails unless the bits are consistent and weir understands all of the entry.
    pub(super) fn check_usable(&self) -> Result<()> {
        if self.flags & flag::IN_USE != 0 {
            return Err(BitmapError::InUse(self.name().into_owned()));
        }
        if !self.extra.is_empty() && self.flags & flag::EXTRA_COMPATIBLE == 0 {
            return Err(BitmapError::Extra(self.name().into_owned()));
        }
        Ok(())
    }
}

/// Number of clusters of bits that are contiguous in the file from the first one on, and read in
/// one request.
fn run_of(table: &[BitmapCluster], first: u64, cluster_bits: u32) -> usize {
    let together = (AT_ONCE >> cluster_bits).max(1);
    let expected = (0..together as u64).map(|index| BitmapCluster::Stored(first + (index << cluster_bits)));
    table.iter().zip(expected).take_while(|(part, expected)| *part == expected).count()
}
