//! Raw images: offsets of the disk are offsets of the storage.
//!
//! If the format was probed, a guest must never be able to write a header that changes the
//! result of the next probe; [`probe`](storage::probe) explains the attack. Changes to the
//! first 512 bytes are therefore serialized, merged with the present content and checked; a
//! change that would form a known header fails with EPERM.
//!
//! Never restricts an image whose format was given.

use std::sync::atomic::{AtomicBool, Ordering::Relaxed};

use super::Image;
use reactor::{
    buffer::{IoBuffer, Segments},
    error::{Error, Result},
    ublk::RegisteredData,
};
use storage::{
    Durability, ImageFormat, OpenError, OpenOptions, RangeLocks, ResizeError, Storage, ZeroOptions,
    add_wrappers, open_bottom,
    probe::{HEADER_BYTES, Probed, check_format, probe_header},
};

const HEADER_END: u64 = HEADER_BYTES as u64;

/// A raw image.
#[derive(Debug)]
pub struct RawImage {
    storage: Storage,
    /// Changes only from false to true: see [`RawImage::make_read_only`].
    read_only: AtomicBool,
    /// Serializes changes to the header; `None` if the format was given, which allows any
    /// header.
    header: Option<RangeLocks>,
}

impl RawImage {
    /// Uses `storage` as a disk with arbitrary content.
    pub fn new(storage: Storage) -> Self {
        Self { read_only: AtomicBool::new(storage.read_only()), storage, header: None }
    }

    /// Guards the header if the format was probed (`is_probed`) and the image is writable.
    pub(crate) fn of(storage: Storage, is_probed: bool, read_only: bool) -> Self {
        match (read_only, is_probed) {
            (true, _) => Self::new(storage).read_only(),
            (false, true) => Self::new(storage).with_header_guard(),
            (false, false) => Self::new(storage),
        }
    }

    /// Rejects writes that would make the image look like another format.
    #[must_use]
    pub fn with_header_guard(self) -> Self {
        Self { header: Some(RangeLocks::default()), ..self }
    }

    /// Rejects all writes.
    #[must_use]
    pub fn read_only(self) -> Self {
        self.make_read_only();
        self
    }

    /// Rejects all writes from now on.
    pub(crate) fn make_read_only(&self) {
        self.read_only.store(true, Relaxed);
    }

    pub(crate) fn storage(&self) -> &Storage {
        &self.storage
    }

    pub(super) fn is_read_only(&self) -> bool {
        self.read_only.load(Relaxed)
    }

    /// True if no read or write ever waits, neither for the storage nor for the header's
    /// lock.
    pub(super) fn is_instant(&self) -> bool {
        self.header.is_none() && self.storage.is_instant()
    }

    pub(super) async fn write(&self, offset: u64, data: Segments, durability: Durability) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        if offset < HEADER_END
            && !data.is_empty()
            && let Some(locks) = &self.header
        {
            return Box::pin(self.write_header(locks, offset, data, durability)).await;
        }
        self.storage.write(offset, data, durability).await
    }

    /// Writes like [`RawImage::write`] from a request's pages: see
    /// [`Storage::write_registered`]. `None` if the data must be copied first.
    pub(super) async fn write_registered(
        &self,
        offset: u64,
        buffer: &RegisteredData,
        durability: Durability,
    ) -> Option<Result<()>> {
        // A guarded header is checked on a private copy, see `write_header`.
        if self.is_read_only() || offset < HEADER_END && self.header.is_some() {
            return None;
        }
        self.storage.write_registered(offset, buffer, durability).await
    }

    async fn write_header(
        &self,
        locks: &RangeLocks,
        offset: u64,
        data: Segments,
        durability: Durability,
    ) -> Result<()> {
        let _guard = locks.exclusive(0..HEADER_END).await;
        // One private copy is both checked and written: guest memory may change between the
        // two.
        let data = data.joined();
        let front = data.len().min((HEADER_END - offset) as usize);
        self.check_header(offset, &data[..front]).await?;
        self.storage.write(offset, data.into(), durability).await
    }

    /// Fails with EPERM if `change` at `offset` would make the first sector a known header.
    async fn check_header(&self, offset: u64, change: &[u8]) -> Result<()> {
        let length = self.storage.size_bytes().min(HEADER_END) as usize;
        let end = offset as usize + change.len();
        if end > length {
            return Err(Error::INVALID);
        }
        // Parts of a header may arrive in several writes, so the check covers the merged
        // sector.
        let mut header = IoBuffer::new(length);
        if change.len() < length {
            header = self.storage.read(0, header).await?;
        }
        header[offset as usize..end].copy_from_slice(change);
        match probe_header(&header) {
            Probed::Raw | Probed::Archive(_) => Ok(()),
            Probed::Format(format) => {
                tracing::warn!(
                    image = self.storage.description(),
                    format,
                    "rejected a write that would make a raw image look like another format; use \
                     --format raw to allow it"
                );
                Err(Error::NOT_PERMITTED)
            }
        }
    }

    pub(super) async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        let Some(locks) = self.header.as_ref().filter(|_| offset < HEADER_END && length > 0) else {
            return self.storage.write_zeroes(offset, length, options).await;
        };
        let _guard = locks.exclusive(0..HEADER_END).await;
        self.check_zeroed_header(offset, length).await?;
        self.storage.write_zeroes(offset, length, options).await
    }

    /// See [`Storage::resize`]. Bytes that are cut off read as zeroes when the disk grows
    /// again.
    pub(super) async fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        if self.is_read_only() {
            return Err(ResizeError::ReadOnly);
        }
        let Some(locks) = self.header.as_ref().filter(|_| size_bytes < HEADER_END) else {
            return self.storage.resize(size_bytes).await;
        };
        let _guard = locks.exclusive(0..HEADER_END).await;
        let cut_bytes = self.storage.size_bytes().min(HEADER_END).saturating_sub(size_bytes);
        if cut_bytes > 0 {
            self.check_zeroed_header(size_bytes, cut_bytes).await?;
        }
        self.storage.resize(size_bytes).await
    }

    /// Zeroes can complete a header as well: some signatures contain zero bytes.
    async fn check_zeroed_header(&self, offset: u64, length: u64) -> Result<()> {
        let front = length.min(HEADER_END - offset) as usize;
        self.check_header(offset, &[0; HEADER_BYTES][..front]).await
    }

    pub(super) async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        if self.is_read_only() {
            return Err(Error::NOT_PERMITTED);
        }
        let Some(locks) = self.header.as_ref().filter(|_| offset < HEADER_END && length > 0) else {
            return self.storage.discard(offset, length).await;
        };
        let _guard = locks.exclusive(0..HEADER_END).await;
        // The storage may zero or ignore a discard. The present content is raw by induction,
        // so only the zeroed variant needs a check.
        self.check_zeroed_header(offset, length).await?;
        self.storage.discard(offset, length).await
    }
}

/// Opens the raw image that `spec` names: a path, `memory:SIZE` or `null:SIZE`. For
/// other formats use [`open`](super::open).
///
/// # Errors
/// The cause as a message for users; also if the image is, or looks like, another
/// format.
pub fn open_raw(spec: &str, options: OpenOptions) -> std::result::Result<Image, OpenError> {
    let (bottom, probed) = open_bottom(spec, &options)?;
    if check_format(options.format, probed, spec)? != ImageFormat::Raw {
        return Err(OpenError::new(
            spec,
            "is not a raw image",
            "use --format raw to open any content as raw",
        ));
    }
    let is_probed = options.format.is_none() && matches!(bottom, Storage::File(_));
    let read_only = options.read_only;
    Ok(Image::Raw(RawImage::of(add_wrappers(spec, bottom, options)?, is_probed, read_only)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use reactor::{
        guest::{GuestMemory, Region},
        now, sim, sleep_until, spawn_joinable,
    };
    use storage::{
        align::Align,
        simulated::{Behaviour, SimulatedStorage},
    };

    fn memory() -> RawImage {
        RawImage::new(Storage::memory(4096))
    }

    async fn write(raw: &RawImage, offset: u64, bytes: &[u8]) -> Result<()> {
        let mut data = Segments::from(IoBuffer::copy_of(bytes));
        let second = data.split_off(bytes.len() / 2);
        for part in second.iter() {
            data.push(IoBuffer::copy_of(&part.bytes()));
        }
        raw.write(offset, data, Durability::Cached).await
    }

    #[test]
    fn header_cannot_be_forged_by_one_or_several_writes() {
        sim::run(1, async {
            let raw = memory().with_header_guard();
            let mut sector = [7; 600];
            sector[..4].copy_from_slice(b"QFI\xfb");
            assert_eq!(write(&raw, 0, &sector).await, Err(Error::NOT_PERMITTED));
            assert_eq!(write(&raw, 0, b"QFI").await, Ok(()));
            assert_eq!(write(&raw, 3, b"\xfb").await, Err(Error::NOT_PERMITTED));
            assert_eq!(write(&raw, 2, b"I\xfbxyz").await, Err(Error::NOT_PERMITTED));
            assert_eq!(write(&raw, 512, b"QFI\xfb").await, Ok(()), "a header begins at offset 0");
            let read = raw.storage().read(0, IoBuffer::new(8)).await.expect("memory");
            assert_eq!(read[..], *b"QFI\0\0\0\0\0", "the rejected write changed nothing");
        });
    }

    #[test]
    fn zeroes_and_discards_cannot_complete_a_header() {
        sim::run(1, async {
            let raw = memory().with_header_guard();
            assert_eq!(write(&raw, 0, b"QEDx").await, Ok(()));
            let options =
                ZeroOptions { may_unmap: true, only_if_fast: false, durability: Durability::Cached };
            assert_eq!(raw.write_zeroes(3, 1, options).await, Err(Error::NOT_PERMITTED));
            assert_eq!(raw.discard(3, 1).await, Err(Error::NOT_PERMITTED));
            assert_eq!(raw.write_zeroes(0, 4096, options).await, Ok(()));
        });
    }

    #[test]
    fn a_cut_cannot_complete_a_header() {
        sim::run(1, async {
            let raw = memory().with_header_guard();
            assert_eq!(write(&raw, 0, b"QEDx").await, Ok(()));
            assert_eq!(raw.resize(3).await, Err(ResizeError::Failed(Error::NOT_PERMITTED)));
            assert_eq!(raw.storage().size_bytes(), 4096);
            assert_eq!(raw.resize(4).await, Ok(()));
            assert_eq!(raw.resize(700).await, Ok(()));
            assert_eq!(raw.resize(2).await, Ok(()));
            let raw = memory();
            assert_eq!(write(&raw, 0, b"QEDx").await, Ok(()));
            assert_eq!(raw.resize(3).await, Ok(()), "the format was given, so no guard is active");
        });
    }

    #[test]
    fn two_halves_in_flight_together_do_not_make_a_header() {
        for seed in 0..50 {
            sim::run(seed, async {
                let raw = std::rc::Rc::new(memory().with_header_guard());
                let halves = [(0, &b"QF"[..]), (2, b"I\xfb")].map(|(offset, bytes)| {
                    let raw = std::rc::Rc::clone(&raw);
                    spawn_joinable(async move { write(&raw, offset, bytes).await })
                });
                let mut refused = 0;
                for half in halves {
                    refused += u32::from(half.await.is_err());
                }
                assert_eq!(refused, 1);
            });
        }
    }

    #[test]
    fn concurrent_guest_change_does_not_bypass_the_check() {
        sim::run(1, async {
            let delayed = Storage::memory(4096).delayed("read=1ms".parse().expect("valid"));
            let raw = std::rc::Rc::new(RawImage::new(delayed).with_header_guard());
            let memory = GuestMemory::new(vec![Region::on_heap(0, 0, 8)]).expect("one region");
            let place = memory.range(0, 8).expect("inside");
            place.write(0, b"harmless");
            let writing = {
                let (raw, data) = (std::rc::Rc::clone(&raw), place.clone().into());
                spawn_joinable(async move { raw.write(0, data, Durability::Cached).await })
            };
            // The write has passed its check and waits for the storage; now the guest changes its
            // memory.
            sleep_until(now() + policy::time::Duration::from_micros(500)).await;
            assert!(!writing.is_finished());
            place.write(0, b"QFI\xfbabcd");
            assert_eq!(writing.await, Ok(()));
            let read = raw.storage().read(0, IoBuffer::new(8)).await.expect("memory");
            assert_eq!(read[..], *b"harmless");
        });
    }

    #[test]
    fn registered_data_is_copied_if_it_may_be_a_header() {
        sim::run(1, async {
            let behaviour = Behaviour { block_bytes: 512, ..Behaviour::default() };
            let storage = Storage::Simulated(Align::new(SimulatedStorage::new(vec![0; 4096], behaviour)));
            let image = Image::Raw(RawImage::new(storage).with_header_guard());
            let memory = GuestMemory::new(vec![Region::on_heap(0, 0, 512)]).expect("one region");
            let place = memory.range(0, 512).expect("inside");
            let copied = Arc::default();
            let buffer = RegisteredData::simulated(place.clone(), true, &copied);
            place.write(0, b"QFI\xfb");
            let write = async |offset| image.write_registered(offset, &buffer, Durability::Cached).await;
            assert_eq!(write(0).await, Err(Error::NOT_PERMITTED));
            assert_eq!(copied.load(Relaxed), 512, "a copy is validated");
            assert_eq!(write(512).await, Ok(()));
            assert_eq!(write(4096).await, Err(Error::INVALID));
            assert_eq!(write(1000).await, Ok(()), "an unaligned write is copied");
            assert_eq!(copied.load(Relaxed), 3 * 512);
            let none = RegisteredData::simulated(place.clone(), false, &copied);
            for (buffer, copies) in [(&buffer, 3), (&none, 4)] {
                place.write(0, b"QQQQ");
                assert_eq!(image.read_registered(512, buffer).await, Ok(()));
                let mut found = [0; 4];
                place.read(0, &mut found);
                assert_eq!((&found, copied.load(Relaxed)), (b"QFI\xfb", copies * 512));
            }
        });
    }

    #[test]
    fn header_guard_needs_a_probed_format() {
        sim::run(1, async {
            assert_eq!(write(&memory(), 0, b"QFI\xfb").await, Ok(()));
            let raw = memory().read_only();
            assert_eq!(write(&raw, 0, b"x").await, Err(Error::NOT_PERMITTED));
            assert_eq!(raw.discard(0, 1).await, Err(Error::NOT_PERMITTED));
        });
    }

    #[test]
    fn past_the_end_of_a_tiny_disk_is_an_error() {
        sim::run(1, async {
            let raw = RawImage::new(Storage::memory(100)).with_header_guard();
            assert_eq!(write(&raw, 99, b"xy").await, Err(Error::INVALID));
        });
    }
}
