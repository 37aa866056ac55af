//! The bitmaps of an open image: read, added, removed, cleared, enabled and disabled, merged; and marked in use.
//!
//! Never writes over a directory or a table that the header leads to, but for the flag that says that a bitmap is in use: new ones are written
//! elsewhere, the header changes to them in one sector, and then the old ones are freed. A crash leaves the old or the new, and leaks.

use super::{
    Bits, DirtyBits, Entry, GRANULARITY_BITS, LONGEST_NAME, decode_table, directory::MOST_BITS, encode,
    encode_table, flag, read,
};
use crate::{
    error::{Error, Result as IoResult},
    image::qcow2::{
        Invalid, MetadataError, Qcow2,
        header::{Bitmaps, LARGEST_BITMAP_DIRECTORY, MOST_BITMAPS, Place, autoclear},
    },
};

/// Why nothing became of it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BitmapError {
    /// There is none of that name.
    #[error("there is no bitmap {0:?} (`weir image info` lists them)")]
    NotFound(String),
    /// There is one of that name.
    #[error("there is a bitmap {0:?} already (choose another name, or remove it)")]
    Exists(String),
    /// It may be wrong.
    #[error("the bitmap {0:?} was not stored by who used it last, and may be wrong (remove it)")]
    InUse(String),
    /// It has data that only others know.
    #[error("the bitmap {0:?} has extra data that weir does not know (use the program that made it)")]
    Extra(String),
    /// A value that cannot be.
    #[error("{0}")]
    Wrong(String),
    /// Nothing may be changed.
    #[error("it is read-only (open it for writing)")]
    ReadOnly,
    /// Something in the image is wrong.
    #[error("{0} (`weir image check` shows the damage)")]
    Invalid(#[from] Invalid),
    /// The file cannot be read or written.
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

type Result<T> = std::result::Result<T, BitmapError>;

impl Qcow2 {
    /// The bitmaps, as the directory describes them; none where they are not marked right.
    ///
    /// # Errors
    /// [`BitmapError::Invalid`] and [`BitmapError::Failed`].
    pub async fn bitmaps(&self) -> Result<Vec<Entry>> {
        let header = self.header();
        match header.bitmaps.filter(|_| header.autoclear & autoclear::BITMAPS != 0) {
            Some(bitmaps) => Ok(read(self.file.storage(), &header, bitmaps).await?),
            None => Ok(Vec::new()),
        }
    }

    /// What a bitmap marks.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn bitmap_bits(&self, name: &str) -> Result<DirtyBits> {
        let entries = self.bitmaps().await?;
        let entry = &entries[usable(&entries, name)?];
        let mut bits = DirtyBits::new(self.size_bytes(), entry.granularity_bits);
        let cluster = 1 << self.shape.cluster_bits;
        for (number, part) in self.bitmap_table(entry).await?.into_iter().enumerate() {
            let at = number * cluster as usize;
            match part {
                Bits::Zeroes => {}
                Bits::Ones => bits.fill(at, std::iter::repeat_n(u8::MAX, cluster as usize)),
                Bits::Stored(offset) => bits.fill(at, self.read_metadata(offset, cluster).await?.into_iter()),
            }
        }
        Ok(bits)
    }

    async fn bitmap_table(&self, entry: &Entry) -> Result<Vec<Bits>> {
        let Place { offset, length } = entry.table();
        Ok(decode_table(&self.read_metadata(offset, length).await?, 1 << self.shape.cluster_bits)?)
    }

    /// Adds a bitmap that marks nothing, and records what is written from the next time the image is opened. A bit is for
    /// `1 << granularity_bits` bytes.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn add_bitmap(&self, name: &str, granularity_bits: u32) -> Result<()> {
        let _quiet = self.quiesce().await?;
        let mut entries = self.changeable_bitmaps().await?;
        let wrong = |what: String| Err(BitmapError::Wrong(what));
        if self.shape.version < 3 {
            return wrong("an image of version 2 has no bitmaps (compat=1.1 has)".to_owned());
        }
        if entries.iter().any(|entry| entry.name == name.as_bytes()) {
            return Err(BitmapError::Exists(name.to_owned()));
        }
        if name.is_empty() || name.len() > LONGEST_NAME {
            return wrong(format!("a name of {} bytes; 1 to {LONGEST_NAME} are possible", name.len()));
        }
        if !GRANULARITY_BITS.contains(&granularity_bits) {
            return wrong(format!("a granularity of 2^{granularity_bits} bytes; 512 to 2G is possible"));
        }
        let table = Entry::entries_for(self.size_bytes(), granularity_bits, self.shape.cluster_bits).max(1);
        if table > MOST_BITS >> self.shape.cluster_bits {
            return wrong("the disk has too many parts of that granularity (choose a larger one)".to_owned());
        }
        if entries.len() == MOST_BITMAPS as usize {
            return wrong(format!("it has {MOST_BITMAPS} bitmaps, which is the most (remove some)"));
        }
        let bits = DirtyBits::new(self.size_bytes(), granularity_bits);
        let (table_offset, table_entries) = self.store_bits(&bits).await?;
        let name = name.as_bytes().to_vec();
        entries.push(Entry {
            table_offset,
            table_entries,
            flags: flag::AUTO,
            granularity_bits,
            name,
            extra: Vec::new(),
        });
        self.replace_directory(&entries).await
    }

    /// Removes a bitmap, also one that may be wrong.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn remove_bitmap(&self, name: &str) -> Result<()> {
        let _quiet = self.quiesce().await?;
        let mut entries = self.changeable_bitmaps().await?;
        let entry = entries.remove(find(&entries, name)?);
        self.replace_directory(&entries).await?;
        self.free_bits(&entry).await
    }

    /// Has a bitmap mark nothing.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn clear_bitmap(&self, name: &str) -> Result<()> {
        let entries = self.changeable_bitmaps().await?;
        let granularity_bits = entries[usable(&entries, name)?].granularity_bits;
        self.store_bitmap(name, &DirtyBits::new(self.size_bytes(), granularity_bits)).await
    }

    /// Has a bitmap record what is written from the next time the image is opened, or not.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn enable_bitmap(&self, name: &str, enabled: bool) -> Result<()> {
        let _quiet = self.quiesce().await?;
        let mut entries = self.changeable_bitmaps().await?;
        let found = usable(&entries, name)?;
        entries[found].flags = entries[found].flags & !flag::AUTO | if enabled { flag::AUTO } else { 0 };
        self.replace_directory(&entries).await
    }

    /// Has a bitmap mark what `source` marks too; that may be of another image and granularity.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn merge_bitmap(&self, name: &str, source: &DirtyBits) -> Result<()> {
        let mut bits = self.bitmap_bits(name).await?;
        if source.size_bytes() != bits.size_bytes() {
            let (theirs, ours) = (source.size_bytes(), bits.size_bytes());
            let what = format!(
                "the source is of a disk of {theirs} bytes, and {name:?} of {ours} (resize one of them)"
            );
            return Err(BitmapError::Wrong(what));
        }
        bits.merge(source);
        self.store_bitmap(name, &bits).await
    }

    /// Stores what a bitmap marks from now on, of this disk and the bitmap's granularity. It is in use no more.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn store_bitmap(&self, name: &str, bits: &DirtyBits) -> Result<()> {
        let _quiet = self.quiesce().await?;
        let mut entries = self.changeable_bitmaps().await?;
        let found = find(&entries, name)?;
        if (bits.size_bytes(), bits.granularity_bits())
            != (self.size_bytes(), entries[found].granularity_bits)
        {
            return Err(BitmapError::Wrong(format!("these bits are not of the bitmap {name:?}")));
        }
        let old = entries[found].clone();
        let (table_offset, table_entries) = self.store_bits(bits).await?;
        entries[found] =
            Entry { table_offset, table_entries, flags: old.flags & !flag::IN_USE, ..old.clone() };
        self.replace_directory(&entries).await?;
        self.free_bits(&old).await
    }

    async fn changeable_bitmaps(&self) -> Result<Vec<Entry>> {
        if self.is_read_only() { Err(BitmapError::ReadOnly) } else { self.bitmaps().await }
    }

    /// Writes bits and their table to where nothing is.
    async fn store_bits(&self, bits: &DirtyBits) -> Result<(u64, u32)> {
        let cluster = 1_usize << self.shape.cluster_bits;
        let mut table = Vec::new();
        for part in bits.bytes().chunks(cluster) {
            table.push(if part.iter().all(|byte| *byte == 0) {
                Bits::Zeroes
            } else if part.len() == cluster && part.iter().all(|byte| *byte == u8::MAX) {
                Bits::Ones
            } else {
                Bits::Stored(self.store_clusters(part).await?)
            });
        }
        if table.is_empty() {
            table.push(Bits::Zeroes);
        }
        Ok((self.store_clusters(&encode_table(&table)).await?, table.len() as u32))
    }

    async fn store_clusters(&self, bytes: &[u8]) -> IoResult<u64> {
        let cluster = 1_usize << self.shape.cluster_bits;
        let mut whole = bytes.to_vec();
        whole.resize(bytes.len().next_multiple_of(cluster), 0);
        let offset = self.allocate((whole.len() / cluster) as u64).await?;
        self.write_metadata(offset, &whole).await?;
        Ok(offset)
    }

    /// Writes another directory, has the header name it, and frees the old one.
    async fn replace_directory(&self, entries: &[Entry]) -> Result<()> {
        let header = self.header();
        let directory = encode(entries);
        let length = directory.len() as u64;
        if length > LARGEST_BITMAP_DIRECTORY {
            return Err(BitmapError::Wrong("the directory of the bitmaps is full (remove some)".to_owned()));
        }
        let bitmaps = match entries.len() as u32 {
            0 => None,
            count => {
                let offset = self.store_clusters(&directory).await?;
                Some(Bitmaps { count, directory: Place { offset, length } })
            }
        };
        self.flush_metadata().await?;
        self.update_header(|header| {
            header.bitmaps = bitmaps;
            header.autoclear = header.autoclear & !autoclear::BITMAPS
                | if bitmaps.is_some() { autoclear::BITMAPS } else { 0 };
        })
        .await?;
        // One that was not marked right may lie anywhere.
        if let Some(old) = header.bitmaps.filter(|_| header.autoclear & autoclear::BITMAPS != 0) {
            self.change_refcount(old.directory.offset, old.directory.length, -1).await?;
        }
        Ok(self.flush_metadata().await?)
    }

    /// Frees what nothing leads to any more.
    async fn free_bits(&self, entry: &Entry) -> Result<()> {
        let cluster = 1 << self.shape.cluster_bits;
        for part in self.bitmap_table(entry).await? {
            if let Bits::Stored(offset) = part {
                self.change_refcount(offset, cluster, -1).await?;
            }
        }
        let Place { offset, length } = entry.table();
        self.change_refcount(offset, length, -1).await?;
        Ok(self.flush_metadata().await?)
    }

    /// Has every bitmap say that it may be wrong, since nobody records in it what is written from now on. QEMU then uses none of them.
    pub(in crate::image::qcow2) async fn mark_bitmaps_in_use(&self) -> IoResult<()> {
        let header = self.header();
        let Some(bitmaps) = header.bitmaps.filter(|_| header.autoclear & autoclear::BITMAPS != 0) else {
            return Ok(());
        };
        match read(self.file.storage(), &header, bitmaps).await {
            Ok(mut entries) => {
                if entries.iter().all(|entry| entry.flags & flag::IN_USE != 0) {
                    return Ok(());
                }
                entries.iter_mut().for_each(|entry| entry.flags |= flag::IN_USE);
                let mut directory = encode(&entries);
                // The last one's padding may be missing.
                directory.truncate(bitmaps.directory.length as usize);
                self.write_metadata(bitmaps.directory.offset, &directory).await?;
                self.file.flush().await
            }
            Err(MetadataError::Storage(error)) => Err(error),
            Err(MetadataError::Invalid(invalid)) => self.drop_mark(&invalid).await,
        }
    }

    async fn drop_mark(&self, why: &Invalid) -> IoResult<()> {
        let image = self.file.storage().description();
        tracing::warn!(image, "its bitmaps cannot be used, and are marked so: {why}");
        self.update_header(|header| header.autoclear &= !autoclear::BITMAPS).await
    }
}

fn find(entries: &[Entry], name: &str) -> Result<usize> {
    let found = entries.iter().position(|entry| entry.name == name.as_bytes());
    found.ok_or_else(|| BitmapError::NotFound(name.to_owned()))
}

/// One whose bits are right.
fn usable(entries: &[Entry], name: &str) -> Result<usize> {
    let found = find(entries, name)?;
    let entry = &entries[found];
    if entry.flags & flag::IN_USE != 0 {
        return Err(BitmapError::InUse(name.to_owned()));
    }
    if !entry.extra.is_empty() && entry.flags & flag::EXTRA_COMPATIBLE == 0 {
        return Err(BitmapError::Extra(name.to_owned()));
    }
    Ok(found)
}
