//! Changes of the bitmaps of an image in use, and their list.
//!
//! ```text
//!                  add             enable            disable          remove
//!   in memory       ├── records ─────┼──── records ─────┤                │
//!   in the file     ├── consistent, or in use from the next change on ──┤
//! ```
//!
//! Each change happens while no request is in flight, and is durable when it completes: it stores
//! the bitmap that it changes as consistent, and the next change of the disk marks it as in use
//! again. So after a crash a bitmap has all marks, or is in use. A bitmap that does not record is
//! only in the file, a transient one only in memory.
//!
//! Never changes a bitmap that a backup uses.

use std::sync::Arc;

use super::{
    BitmapEntry, BitmapError, DirtyBits, RecordingBitmap,
    change::{find, find_usable, merge},
    directory::flag,
};
use reactor::error::Error;

use crate::qcow2::{Qcow2Image, drained::ExclusiveImage};

type Result<T> = std::result::Result<T, BitmapError>;

/// Change of the bitmaps of an image in use.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BitmapChange {
    /// Adds a bitmap.
    Add(NewBitmap),
    /// Removes a bitmap, even an inconsistent one.
    Remove(String),
    /// Clears all marks.
    Clear(String),
    /// Starts or stops the recording.
    Enable {
        /// Name of the bitmap.
        name: String,
        /// True to start.
        is_enabled: bool,
    },
    /// Adds the marks of other bitmaps.
    Merge {
        /// Name of the bitmap that receives the marks.
        name: String,
        /// The other bitmaps. The granularities may differ.
        sources: Vec<MergeSource>,
    },
}

/// Bitmap to be added.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NewBitmap {
    /// Name, which no other bitmap of the image has.
    pub name: String,
    /// A bit covers `1 << granularity_bits` bytes.
    pub granularity_bits: u32,
    /// True if the file contains it.
    pub is_persistent: bool,
    /// True if it records writes.
    pub is_enabled: bool,
    /// True if it marks the whole disk at first; false for no marks.
    pub is_marked: bool,
}

/// Source of marks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MergeSource {
    /// Bitmap of the same image.
    Own(String),
    /// Marks of another image of the same size.
    Bits(DirtyBits),
}

/// State of a bitmap.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BitmapStatus {
    /// Name.
    pub name: String,
    /// Bytes of the disk that a bit covers.
    pub granularity_bytes: u64,
    /// Marked bytes; `None` if the bits are inconsistent or cannot be read.
    pub marked_bytes: Option<u64>,
    /// True if it records writes.
    pub is_recording: bool,
    /// True if the file contains it.
    pub is_persistent: bool,
    /// True if marks may be missing, because a crash prevented that they were stored.
    pub is_inconsistent: bool,
    /// True if a backup uses it.
    pub is_busy: bool,
}

impl ExclusiveImage<'_> {
    /// Changes bitmaps.
    ///
    /// # Errors
    /// [`BitmapError`]; nothing has changed. [`Error::SHUTDOWN`] while another process uses the
    /// image.
    pub async fn change_bitmap(&self, change: &BitmapChange) -> Result<()> {
        let image = self.image;
        if image.is_read_only() {
            return Err(BitmapError::ReadOnly);
        }
        if !image.has_loaded_bitmaps() {
            return Err(Error::SHUTDOWN.into());
        }
        image.flush_all_metadata().await?;
        // First: after a failure the file may have a bitmap that is marked consistent already.
        image.mark_in_use_at_next_change();
        match change {
            BitmapChange::Add(new) => image.add_live(new).await,
            BitmapChange::Remove(name) => image.remove_live(name).await,
            BitmapChange::Clear(name) => image.clear_live(name).await,
            BitmapChange::Enable { name, is_enabled: true } => image.enable_live(name).await,
            BitmapChange::Enable { name, is_enabled: false } => image.disable_live(name).await,
            BitmapChange::Merge { name, sources } => image.merge_live(name, sources).await,
        }
    }
}

impl Qcow2Image {
    /// States of all bitmaps, first those in the file.
    ///
    /// # Errors
    /// [`BitmapError`]: the directory cannot be read.
    pub async fn bitmap_statuses(&self) -> Result<Vec<BitmapStatus>> {
        // Excludes changes of the directory.
        let _guard = self.gate.enter().await;
        let mut statuses = Vec::new();
        let entries = self.bitmaps().await?;
        let recorded = Vec::clone(&self.recorded());
        for entry in &entries {
            statuses.push(match recorded.iter().find(|recorded| recorded.name() == entry.name) {
                Some(recorded) => recorded.status(),
                None => self.stored_status(entry).await,
            });
        }
        let transient = recorded.iter().filter(|recorded| !recorded.is_persistent());
        statuses.extend(transient.map(|recorded| recorded.status()));
        Ok(statuses)
    }

    async fn stored_status(&self, entry: &BitmapEntry) -> BitmapStatus {
        let is_inconsistent = entry.flags & flag::IN_USE != 0;
        let bits = match is_inconsistent {
            true => None,
            false => self.read_bits(entry, self.size_bytes()).await.ok(),
        };
        BitmapStatus {
            name: entry.name().into_owned(),
            granularity_bytes: 1 << entry.granularity_bits,
            marked_bytes: bits.map(|bits| bits.marked_bytes()),
            is_recording: false,
            is_persistent: true,
            is_inconsistent,
            is_busy: false,
        }
    }

    /// Marks of a bitmap, of an image in use or not.
    ///
    /// # Errors
    /// [`BitmapError`].
    pub async fn live_bitmap_bits(&self, name: &str) -> Result<DirtyBits> {
        let _guard = self.gate.enter().await;
        self.bits_inside(name).await
    }

    /// As [`Qcow2Image::live_bitmap_bits`], for a caller that excludes changes of the directory.
    async fn bits_inside(&self, name: &str) -> Result<DirtyBits> {
        match self.recorded_bitmap(name) {
            Some(recorded) => {
                check_idle(&recorded)?;
                Ok(recorded.all_marks())
            }
            None => self.bitmap_bits(name).await,
        }
    }

    async fn add_live(&self, new: &NewBitmap) -> Result<()> {
        let NewBitmap { name, granularity_bits, is_persistent, is_enabled, is_marked } = new;
        let entries = self.changeable_bitmaps().await?;
        self.check_new(&entries, name, *granularity_bits)?;
        if self.recorded_bitmap(name).is_some() {
            return Err(BitmapError::Exists(name.clone()));
        }
        let is_in_memory = *is_enabled || !is_persistent;
        let memory = is_in_memory.then(|| self.reserve_bits(*granularity_bits)).transpose()?;
        let mut bits = DirtyBits::new(self.size_bytes(), *granularity_bits);
        if *is_marked {
            bits.mark(0..self.size_bytes());
        }
        if *is_persistent {
            let flags = if *is_enabled { flag::AUTO } else { 0 };
            self.add_entry(entries, name, &bits, flags).await?;
        }
        if let Some(memory) = memory {
            let added = RecordingBitmap::new(name.as_bytes(), &bits, *is_persistent, memory);
            added.set_enabled(*is_enabled);
            self.change_recorded(|recorded| recorded.push(Arc::new(added)));
        }
        Ok(())
    }

    async fn remove_live(&self, name: &str) -> Result<()> {
        let recorded = self.recorded_bitmap(name);
        recorded.as_deref().map_or(Ok(()), check_idle)?;
        let mut entries = self.changeable_bitmaps().await?;
        let removed = match (find(&entries, name), &recorded) {
            (Ok(at), _) => Some(entries.remove(at)),
            (Err(_), Some(_)) => None,
            (Err(unknown), None) => return Err(unknown),
        };
        if removed.is_some() {
            self.replace_directory(&entries).await?;
        }
        self.forget(name);
        if let Some(entry) = removed {
            self.free_bits(&entry).await;
        }
        Ok(())
    }

    async fn clear_live(&self, name: &str) -> Result<()> {
        let old = match self.recorded_bitmap(name) {
            Some(recorded) => return self.set_marks(&recorded, &recorded.no_marks()).await,
            None => self.bitmap_bits(name).await?,
        };
        let none = DirtyBits::new(old.size_bytes(), old.granularity_bits());
        self.store_entry(name, &none, |flags| flags).await
    }

    async fn enable_live(&self, name: &str) -> Result<()> {
        if let Some(recorded) = self.recorded_bitmap(name) {
            check_idle(&recorded)?;
            recorded.set_enabled(true);
            return Ok(());
        }
        let mut entries = self.changeable_bitmaps().await?;
        let at = find_usable(&entries, name)?;
        let memory = self.reserve_bits(entries[at].granularity_bits)?;
        let bits = self.read_bits(&entries[at], self.size_bytes()).await?;
        entries[at].flags |= flag::AUTO;
        self.replace_directory(&entries).await?;
        let enabled = RecordingBitmap::new(name.as_bytes(), &bits, true, memory);
        self.change_recorded(|recorded| recorded.push(Arc::new(enabled)));
        Ok(())
    }

    async fn disable_live(&self, name: &str) -> Result<()> {
        let Some(recorded) = self.recorded_bitmap(name) else {
            let mut entries = self.changeable_bitmaps().await?;
            let at = find_usable(&entries, name)?;
            entries[at].flags &= !flag::AUTO;
            return self.replace_directory(&entries).await;
        };
        check_idle(&recorded)?;
        if !recorded.is_persistent() {
            recorded.set_enabled(false);
            return Ok(());
        }
        // As in `set_marks`.
        recorded.set_changed();
        self.store_entry(name, &recorded.all_marks(), |flags| flags & !flag::AUTO).await?;
        self.forget(name);
        Ok(())
    }

    async fn merge_live(&self, name: &str, sources: &[MergeSource]) -> Result<()> {
        let recorded = self.recorded_bitmap(name);
        let mut bits = self.bits_inside(name).await?;
        // One source at a time is in memory.
        for source in sources {
            match source {
                MergeSource::Own(source) => merge(name, &mut bits, &self.bits_inside(source).await?)?,
                MergeSource::Bits(source) => merge(name, &mut bits, source)?,
            }
        }
        match recorded {
            Some(recorded) => self.set_marks(&recorded, &bits).await,
            None => self.store_entry(name, &bits, |flags| flags).await,
        }
    }

    /// Replaces the marks of a bitmap in memory, and of its file if it is there.
    async fn set_marks(&self, recorded: &RecordingBitmap, bits: &DirtyBits) -> Result<()> {
        check_idle(recorded)?;
        if recorded.is_persistent() {
            // First: after a failure the marks of the file are unknown, so a later store writes
            // those of memory.
            recorded.set_changed();
            self.store_entry(&String::from_utf8_lossy(recorded.name()), bits, |flags| flags).await?;
        }
        recorded.replace(bits);
        Ok(())
    }

    /// Removes a bitmap from memory.
    fn forget(&self, name: &str) {
        self.change_recorded(|recorded| recorded.retain(|other| other.name() != name.as_bytes()));
    }
}

impl RecordingBitmap {
    fn status(&self) -> BitmapStatus {
        let (bits, earlier) = self.live_bits();
        BitmapStatus {
            name: String::from_utf8_lossy(self.name()).into_owned(),
            granularity_bytes: 1 << bits.granularity_bits(),
            marked_bytes: Some(bits.marked_bytes_of_union(earlier.as_deref())),
            is_recording: self.is_enabled(),
            is_persistent: self.is_persistent(),
            is_inconsistent: false,
            is_busy: self.is_busy(),
        }
    }
}

fn check_idle(recorded: &RecordingBitmap) -> Result<()> {
    match recorded.is_busy() {
        true => Err(BitmapError::Busy(String::from_utf8_lossy(recorded.name()).into_owned())),
        false => Ok(()),
    }
}
