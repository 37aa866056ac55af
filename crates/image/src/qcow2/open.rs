//! Opens an image: the reads and checks before the first request.
//!
//! Reads the header, the L1 table and the refcount table: 8 bytes for each L2 table and refcount
//! block, so that opening takes about the same time for images of any size. Everything else is
//! read and checked on first use.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use arc_swap::ArcSwap;

use super::{
    InvalidImage, Qcow2Image,
    backing::CurrentBacking,
    big_endian::words,
    bitmap::Recording,
    cache::L2Cache,
    cache_settings::{CacheSettings, CacheSizes, InvalidCache},
    check::{self, Repair},
    entry::EntryFormat,
    file::ImageFile,
    header::{CompressionType, EncryptionMethod, Qcow2Header, autoclear, incompatible},
    l1::L1,
    luks::SectorCipher,
    metadata_io::{self, MetadataError, read_header},
    overlap::MetadataClusters,
    refcounts::{RefcountTable, Refcounts},
    snapshot,
    writeback::PendingMetadata,
};
use reactor::{error::Error, memory::OutOfBudget};
use storage::{RangeLocks, Storage, epoch_gate::EpochGate};

use crate::Image;

/// Components that an image is opened from.
#[derive(Debug)]
pub struct Qcow2Components {
    /// The qcow2 file.
    pub storage: Storage,
    /// Image that unallocated clusters are read from; opened read-only.
    pub backing: Option<Arc<Image>>,
    /// The external data file.
    pub data: Option<Storage>,
    /// Cipher of an encrypted image, with its key.
    pub cipher: Option<SectorCipher>,
    /// Writes nothing, not even marks in the header.
    pub read_only: bool,
    /// Sizes of the metadata caches.
    pub caches: CacheSettings,
}

impl Qcow2Components {
    /// Components of a writable image that consists of one file.
    pub fn of(storage: Storage) -> Self {
        let caches = CacheSettings::default();
        Self { storage, backing: None, data: None, cipher: None, read_only: false, caches }
    }
}

/// Reason why an image cannot be opened.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum OpenFailure {
    /// A structure is invalid.
    #[error("{0} (`weir image check` shows the damage)")]
    Invalid(#[from] InvalidImage),
    /// A read or write of the file failed.
    #[error("{0}")]
    Failed(#[from] Error),
    /// The header marks the image as corrupt.
    #[error(
        "it is marked corrupt (`weir image check --repair` repairs it as far as possible; \
         --read-only opens it unchanged)"
    )]
    Corrupt,
    /// The header marks the refcounts as inconsistent, after lazy refcounts.
    #[error(
        "its refcounts were not written when it was last in use (`weir image check --repair` \
         recomputes them; --read-only opens it unchanged)"
    )]
    Dirty,
    /// The image uses QEMU's legacy AES encryption.
    #[error(
        "it is encrypted with QEMU's legacy AES method, which is insecure (convert it to LUKS with \
         `qemu-img convert`)"
    )]
    LegacyAes,
    /// No snapshot has this id or name.
    #[error("it has no snapshot {0:?} (`weir image snapshot -l` lists all)")]
    NoSnapshot(String),
    /// The image is encrypted and no key was given.
    #[error("it is encrypted with LUKS (give its passphrase)")]
    NoKey,
    /// The image has an external data file that was not given.
    #[error("its external data file was not opened")]
    NoDataFile,
    /// Another process replaced the image or its backing file while it used the image.
    #[error("it was replaced, or has another backing file (open it again)")]
    Changed,
    /// The cache sizes do not suit the image.
    #[error("{0}")]
    Caches(#[from] InvalidCache),
    /// The dirty bitmaps that record writes exceed the memory budget.
    #[error("{0}")]
    Bitmaps(OutOfBudget),
}

/// Purpose of opening an image.
#[derive(Clone, Copy, Debug)]
enum Qcow2Purpose<'a> {
    Disk,
    Handover,
    Maintenance,
    Snapshot(&'a str),
}

/// State of an open image, shared by the modules of this folder. Reached through [`Qcow2Image`].
#[derive(Debug)]
pub struct Qcow2State {
    pub(super) file: ImageFile,
    pub(super) data: Option<Storage>,
    pub(super) current_backing: CurrentBacking,
    pub(super) cipher: Option<SectorCipher>,
    /// Changes only from false to true: see [`Qcow2Image::make_read_only`].
    pub(super) read_only: AtomicBool,
    /// True if every write is made durable before it completes, even without FUA (cache mode
    /// `writethrough`).
    pub(super) writes_through: bool,
    pub(super) shape: EntryFormat,
    pub(super) l2_bits: u32,
    pub(super) compression: CompressionType,
    pub(super) size: AtomicU64,
    pub(super) l1: ArcSwap<L1>,
    pub(super) cache: ArcSwap<L2Cache>,
    /// Size of a cache entry (a slice of an L2 table), as a power of two.
    pub(super) slice_size_bits: AtomicU64,
    /// Generation of the task that drops unused slices; tasks of earlier generations end.
    cleaning: AtomicU64,
    pub(super) refcounts: Refcounts,
    pub(super) overlap: MetadataClusters,
    pub(super) pending: Mutex<PendingMetadata>,
    /// Dirty bitmaps that record writes.
    pub(super) recording: Recording,
    pub(super) gate: EpochGate,
    /// Guest ranges whose clusters are being changed.
    pub(super) guest: RangeLocks,
    /// Numbers of the L2 tables that are being allocated.
    pub(super) tables: RangeLocks,
    /// Numbers of the slices that are being read.
    pub(super) loading: RangeLocks,
    /// Serializes tasks that write metadata.
    pub(super) writing: RangeLocks,
    /// Serializes tasks that free clusters.
    pub(super) freeing: RangeLocks,
}

impl Qcow2Image {
    /// Opens an image.
    ///
    /// # Errors
    /// [`OpenFailure`]. The file is then unchanged, except for a repair of refcounts.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub async fn open(parts: Qcow2Components) -> Result<Self, OpenFailure> {
        Self::open_for(parts, Qcow2Purpose::Disk).await
    }

    /// Opens an image to change its snapshots or bitmaps. Needs no key and no other file, and
    /// leaves bitmaps unchanged; guest data must not be read or written.
    ///
    /// # Errors
    /// As [`Qcow2Image::open`].
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub async fn open_for_maintenance(storage: Storage) -> Result<Self, OpenFailure> {
        Self::open_for(Qcow2Components::of(storage), Qcow2Purpose::Maintenance).await
    }

    /// Opens an internal snapshot, by id or name, as a read-only disk.
    ///
    /// # Errors
    /// As [`Qcow2Image::open`]; [`OpenFailure::NoSnapshot`] if there is no such snapshot.
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub async fn open_snapshot(parts: Qcow2Components, name: &str) -> Result<Self, OpenFailure> {
        Self::open_for(Qcow2Components { read_only: true, ..parts }, Qcow2Purpose::Snapshot(name)).await
    }

    /// Opens an image that another process may still use. Reads only its header; the image must
    /// not be used before [`Qcow2Image::take_over`].
    ///
    /// # Errors
    /// As [`Qcow2Image::open`].
    ///
    /// # Panics
    /// Panics outside a reactor.
    pub(crate) async fn open_for_handover(parts: Qcow2Components) -> Result<Self, OpenFailure> {
        Self::open_for(parts, Qcow2Purpose::Handover).await
    }

    async fn open_for(parts: Qcow2Components, purpose: Qcow2Purpose<'_>) -> Result<Self, OpenFailure> {
        let Qcow2Components { storage, backing, data, cipher, read_only, caches } = parts;
        let mut header = read_header(&storage).await?;
        let is_dirty =
            header.incompatible & (incompatible::DIRTY | incompatible::CORRUPT) == incompatible::DIRTY;
        let is_handover = matches!(purpose, Qcow2Purpose::Handover);
        if is_dirty && !is_handover && !read_only && !storage.read_only() {
            // A program that crashed while it used lazy refcounts left them unwritten. QEMU repairs
            // them on open as well.
            tracing::info!(image = storage.description(), "refcounts were not written; recomputing them");
            check::check(&storage, Repair::All).await?;
            header = read_header(&storage).await?;
        }
        if let Qcow2Purpose::Snapshot(name) = purpose
            // A snapshot replaces size and L1 table of the header before any table is read.
            && !snapshot::select_snapshot(&storage, &mut header, name).await?
        {
            return Err(OpenFailure::NoSnapshot(name.to_owned()));
        }
        let first = metadata_io::read(&storage, 0, header.cluster_bytes() as usize).await?;
        let read_only = read_only || storage.read_only();
        let is_maintenance = matches!(purpose, Qcow2Purpose::Maintenance);
        // The process that uses the image now may still change the corrupt and dirty bits;
        // `take_over` reads and checks them again.
        let is_check_deferred = read_only || is_handover;
        check_openable(
            &header,
            is_check_deferred,
            is_maintenance || data.is_some(),
            is_maintenance || cipher.is_some(),
        )?;
        let sizes = caches.sizes(&header)?;
        let shape = EntryFormat {
            cluster_bits: header.cluster_bits,
            extended: header.has_subclusters(),
            data_file: header.has_data_file(),
            version: header.version,
        };
        let writes_through = storage.writes_through();
        let file = ImageFile::new(storage, header.clone(), &first);
        drop(first);
        let ResidentTables { l1, refcounts: table, regions: places } = match is_handover {
            true => ResidentTables::none(shape),
            false => ResidentTables::read(&file, &header, shape).await?,
        };
        let overlap = MetadataClusters::new(header.cluster_bits, &places);
        // A writable image with overlapping metadata would damage itself; a read-only one stays
        // readable.
        if !read_only {
            overlap.check_disjoint(&places)?;
        }
        let refcounts = Refcounts::new(&header, table, sizes.refcount_bytes);
        let state = Arc::new(Qcow2State {
            file,
            data,
            current_backing: CurrentBacking::default(),
            cipher,
            read_only: AtomicBool::new(read_only),
            writes_through,
            shape,
            compression: header.compression,
            l2_bits: header.l2_bits(),
            size: AtomicU64::new(header.size_bytes),
            l1: ArcSwap::from_pointee(l1),
            cache: ArcSwap::from_pointee(L2Cache::new(sizes.l2_bytes, sizes.entry_bytes)),
            slice_size_bits: AtomicU64::new(u64::from(sizes.entry_bytes.trailing_zeros())),
            cleaning: AtomicU64::new(0),
            refcounts,
            overlap,
            pending: Mutex::default(),
            recording: Recording::default(),
            gate: EpochGate::default(),
            guest: RangeLocks::default(),
            tables: RangeLocks::default(),
            loading: RangeLocks::default(),
            writing: RangeLocks::default(),
            freeing: RangeLocks::default(),
        });
        let image = Self { state, below: None, generation: 0 }.replace_link(backing);
        if !read_only && !is_handover {
            image.prepare(&header, is_maintenance).await?;
        }
        image.keep_cache_clean(caches.clean_interval);
        Ok(image)
    }

    /// Brings the file into the state that must precede the first write.
    pub(super) async fn prepare(&self, header: &Qcow2Header, keeps_bitmaps: bool) -> Result<(), OpenFailure> {
        // The specification: a program that writes must clear the autoclear bits that it does not
        // support.
        if header.autoclear & !autoclear::KNOWN != 0 {
            self.file.update_header(|header| header.autoclear &= autoclear::KNOWN).await?;
        }
        if !keeps_bitmaps {
            self.load_recorded_bitmaps().await?.map_err(OpenFailure::Bitmaps)?;
        }
        // The last cluster may be incomplete, and a guest may write to its end.
        Ok(self.file.pad_to_cluster(header.cluster_bytes()).await?)
    }

    /// Starts a task that drops unused slices at each `interval`, and ends the previous one. A
    /// zero interval only ends it.
    fn keep_cache_clean(&self, interval: policy::time::Duration) {
        let generation = self.cleaning.fetch_add(1, Relaxed) + 1;
        if interval.is_zero() {
            return;
        }
        // A weak reference, so that the task does not keep the image open.
        let state = Arc::downgrade(&self.state);
        reactor::spawn(async move {
            let mut last_clock = 0;
            loop {
                reactor::sleep_until(reactor::now() + interval).await;
                let Some(state) = state.upgrade() else { return };
                // It uses the caches only.
                let image = Self { state, below: None, generation: 0 };
                if image.cleaning.load(Relaxed) != generation {
                    return;
                }
                let _pending = image.pending();
                last_clock = image.cache.load().drop_unused(last_clock);
            }
        });
    }

    /// Changes the sizes of the caches and the cleaning interval. Cached metadata is dropped and
    /// read again on demand.
    ///
    /// # Errors
    /// [`OpenFailure::Caches`], with the previous sizes in force; or metadata cannot be written.
    pub async fn set_caches(&self, settings: CacheSettings) -> Result<CacheSizes, OpenFailure> {
        let sizes = settings.sizes(&self.file.header())?;
        // No request is in flight while caches and slice size change: a slice's number depends on
        // both.
        let _quiesced = self.quiesce().await?;
        let _pending = self.pending();
        self.slice_size_bits
            .store(u64::from(sizes.entry_bytes.trailing_zeros()), std::sync::atomic::Ordering::Release);
        self.cache.store(Arc::new(L2Cache::new(sizes.l2_bytes, sizes.entry_bytes)));
        self.refcounts.set_cache_bytes(sizes.refcount_bytes);
        self.keep_cache_clean(settings.clean_interval);
        Ok(sizes)
    }
}

/// Tables that are held in memory completely.
pub(super) struct ResidentTables {
    pub(super) l1: L1,
    pub(super) refcounts: RefcountTable,
    /// Offsets and lengths of all metadata, for the overlap check.
    pub(super) regions: Vec<(u64, u64)>,
}

impl ResidentTables {
    fn none(shape: EntryFormat) -> Self {
        Self { l1: L1::empty(shape), refcounts: RefcountTable::default(), regions: Vec::new() }
    }

    pub(super) async fn read(
        file: &ImageFile,
        header: &Qcow2Header,
        shape: EntryFormat,
    ) -> Result<Self, OpenFailure> {
        let l1_bytes = file.read(header.l1_offset, u64::from(header.l1_entries) * 8).await?;
        let l1 = L1::parse(header.l1_offset, &l1_bytes, shape, file.size_bytes())?;
        let refcounts = read_refcount_table(file, header).await?;
        let cluster_bytes = header.cluster_bytes();
        let regions = [
            (0, cluster_bytes),
            (header.l1_offset, u64::from(header.l1_entries) * 8),
            (header.refcount_table_offset, refcounts.entries() as u64 * 8),
            (header.snapshots_offset, u64::from(header.snapshots)),
            header.encryption.map_or((0, 0), |place| (place.offset, place.length)),
        ];
        let tables = l1.tables().chain(refcounts.blocks().map(|(_, offset)| offset));
        let regions = regions.into_iter().chain(tables.map(|offset| (offset, cluster_bytes))).collect();
        Ok(Self { l1, refcounts, regions })
    }
}

impl From<MetadataError> for OpenFailure {
    fn from(error: MetadataError) -> Self {
        match error {
            MetadataError::Invalid(invalid) => Self::Invalid(invalid),
            MetadataError::Storage(error) => Self::Failed(error),
        }
    }
}

pub(super) fn check_openable(
    header: &Qcow2Header,
    read_only: bool,
    has_data: bool,
    has_key: bool,
) -> Result<(), OpenFailure> {
    match header.crypt {
        EncryptionMethod::None => {}
        EncryptionMethod::Aes => return Err(OpenFailure::LegacyAes),
        EncryptionMethod::Luks if has_key => {}
        EncryptionMethod::Luks => return Err(OpenFailure::NoKey),
    }
    if header.has_data_file() && !has_data {
        return Err(OpenFailure::NoDataFile);
    }
    if read_only {
        return Ok(());
    }
    if header.incompatible & incompatible::CORRUPT != 0 {
        return Err(OpenFailure::Corrupt);
    }
    if header.incompatible & incompatible::DIRTY != 0 {
        return Err(OpenFailure::Dirty);
    }
    snapshot::too_many(header).map_or(Ok(()), |too_many| Err(too_many.into()))
}

async fn read_refcount_table(file: &ImageFile, header: &Qcow2Header) -> Result<RefcountTable, OpenFailure> {
    let length = u64::from(header.refcount_table_clusters) << header.cluster_bits;
    let bytes = file.read(header.refcount_table_offset, length).await?;
    let mut table = RefcountTable::empty(bytes.len() / 8);
    for (index, offset) in words(&bytes).enumerate() {
        let end = offset.checked_add(header.cluster_bytes());
        if !offset.is_multiple_of(header.cluster_bytes())
            || offset != 0 && end.is_none_or(|end| end > file.size_bytes())
        {
            return Err(InvalidImage::new(format!(
                "refcount block {index} at {offset:#x} is beyond the end of the file, or not \
                 aligned to a cluster"
            ))
            .into());
        }
        table.set(index, offset);
    }
    Ok(table)
}
