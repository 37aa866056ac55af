//! A disk in memory, allocated page by page on first write.
//!
//! ```text
//!   tables  (1, 2, 4, 8 … regions, allocated on first write: a disk can grow, and no table moves)
//!   └─ regions (256 MiB of disk each, allocated on first write)
//!      └─ pages (64 KiB each, allocated on first write; a missing one is a hole, reads as zeroes)
//! ```
//!
//! Each page has its own lock, held while bytes are copied and never across an await, so threads
//! contend only within the same 64 KiB. Reads can avoid the copy: pages are
//! [shared](MemoryStorage::read_shared), and a write to a shared page goes to a copy. A request
//! of several pages is not atomic as a whole, which the contract does not require.
//!
//! A resize needs no lock: it sets the size and then frees the pages beyond it, one by one. A
//! writer checks the size again under the page's lock. It either writes before the page is freed,
//! or sees the new size and fails.
//!
//! Memory is bounded by the size of the disk plus 0.05 % for the tables, and 160 KiB; and by the
//! process's [budget](reactor::memory), to which every page is charged.

use std::{
    iter::repeat_n,
    sync::{
        Arc, LazyLock, OnceLock, PoisonError, RwLock,
        atomic::{
            AtomicU64,
            Ordering::{Relaxed, SeqCst},
            fence,
        },
    },
};

use super::{
    BlockSize, Durability, Extent, MAX_EXTENTS, ZeroOptions, push_extent,
    resize::{self, ResizeError},
    within,
};
use reactor::{
    buffer::{IoBuffer, Segments},
    error::{Error, Result},
    guest::GuestBytes,
    memory::MemoryBudget,
};

const PAGE: u64 = 64 << 10;
const PAGES_PER_REGION: u64 = 4096;
const REGION: u64 = PAGE * PAGES_PER_REGION;
/// Number of pages examined or changed between two yields to other tasks, and covered by one result
/// of block status.
const PAGES_PER_YIELD: u64 = PAGES_PER_REGION;

/// Number of tables of a disk of the largest size. All tables together have one region less than
/// the next power of two.
const TABLES: usize = (MemoryStorage::MAX_SIZE_BYTES / REGION).ilog2() as usize + 1;

type Page = RwLock<Option<Arc<[u8]>>>;
type Region = OnceLock<Box<[Page]>>;

/// The content of holes.
static ZEROES: LazyLock<Arc<[u8]>> = LazyLock::new(zeroed_page);

fn zeroed_page() -> Arc<[u8]> {
    repeat_n(0, PAGE as usize).collect()
}

/// A sparse disk.
#[derive(Debug)]
pub struct MemoryStorage {
    size_bytes: AtomicU64,
    tables: Box<[OnceLock<Box<[Region]>>; TABLES]>,
    /// Bytes of allocated pages.
    allocated_bytes: AtomicU64,
}

impl Drop for MemoryStorage {
    fn drop(&mut self) {
        MemoryBudget::process().release_pages(*self.allocated_bytes.get_mut());
    }
}

/// The part of a request inside one page.
struct PagePiece {
    page: u64,
    start: usize,
    end: usize,
}

impl PagePiece {
    fn is_whole(&self) -> bool {
        self.end - self.start == PAGE as usize
    }
}

/// Splits a range at page boundaries.
fn pieces(offset: u64, length: u64) -> impl Iterator<Item = PagePiece> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let page = at / PAGE;
        let stop = end.min((page + 1) * PAGE);
        let piece = PagePiece { page, start: (at % PAGE) as usize, end: (stop - page * PAGE) as usize };
        at = stop;
        Some(piece)
    })
}

impl MemoryStorage {
    /// Maximum size in bytes (256 TiB): the tables of regions are then 32 MiB.
    pub const MAX_SIZE_BYTES: u64 = 1 << 48;

    /// Creates a disk of `size_bytes`, all holes; `None` above [`MemoryStorage::MAX_SIZE_BYTES`].
    pub fn new(size_bytes: u64) -> Option<Self> {
        if size_bytes > Self::MAX_SIZE_BYTES {
            return None;
        }
        Some(Self {
            size_bytes: AtomicU64::new(size_bytes),
            tables: Box::new([const { OnceLock::new() }; TABLES]),
            allocated_bytes: AtomicU64::new(0),
        })
    }

    /// Index of a region's table, and of the region in it.
    fn locate(region: u64) -> (usize, usize) {
        let table = (region + 1).ilog2();
        (table as usize, (region + 1 - (1 << table)) as usize)
    }

    /// The page; `None` if its region has never been written to.
    fn page(&self, number: u64) -> Option<&Page> {
        let (table, index) = Self::locate(number / PAGES_PER_REGION);
        let region = self.tables.get(table)?.get()?[index].get()?;
        Some(&region[(number % PAGES_PER_REGION) as usize])
    }

    fn page_for_writing(&self, number: u64) -> &Page {
        if let Some(page) = self.page(number) {
            return page;
        }
        let (table, index) = Self::locate(number / PAGES_PER_REGION);
        let regions =
            self.tables[table].get_or_init(|| (0..1_u64 << table).map(|_| OnceLock::new()).collect());
        let pages = regions[index].get_or_init(|| (0..PAGES_PER_REGION).map(|_| RwLock::new(None)).collect());
        // Pairs with the fence in `resize`: either the resize sees this region and frees its pages,
        // or the size that is loaded next is the new one.
        fence(SeqCst);
        &pages[(number % PAGES_PER_REGION) as usize]
    }

    /// Calls `f` with the piece's bytes. Allocates the page, with zeroes, if it is a hole;
    /// [`Error::NO_SPACE`] if the process's memory budget is exhausted.
    fn modify_page(&self, piece: &PagePiece, f: impl FnOnce(&mut [u8])) -> Result<()> {
        // A panic in the middle of a copy leaves valid bytes, so poisoning is ignored.
        let mut page = self.page_for_writing(piece.page).write().unwrap_or_else(PoisonError::into_inner);
        if piece.page * PAGE + piece.end as u64 > self.size_bytes() {
            return Err(Error::INVALID);
        }
        if page.is_none() {
            if !MemoryBudget::process().charge_page(PAGE) {
                return Err(Error::NO_SPACE);
            }
            self.allocated_bytes.fetch_add(PAGE, Relaxed);
        }
        // Copies the page if it is shared: references to it keep the old bytes.
        let page = Arc::make_mut(page.get_or_insert_with(zeroed_page));
        f(&mut page[piece.start..piece.end]);
        Ok(())
    }

    /// Makes the piece read as zeroes; frees the page if the piece is the whole page.
    fn zero_or_free(&self, piece: &PagePiece) {
        let Some(page) = self.page(piece.page) else { return };
        let mut page = page.write().unwrap_or_else(PoisonError::into_inner);
        if piece.is_whole() {
            if page.take().is_some() {
                self.allocated_bytes.fetch_sub(PAGE, Relaxed);
                MemoryBudget::process().release_pages(PAGE);
            }
        } else if let Some(page) = &mut *page {
            Arc::make_mut(page)[piece.start..piece.end].fill(0);
        }
    }

    fn is_hole(&self, page: u64) -> bool {
        self.page(page).is_none_or(|page| page.read().unwrap_or_else(PoisonError::into_inner).is_none())
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes.load(Relaxed)
    }

    /// Bytes of allocated pages.
    pub(super) fn allocated_bytes(&self) -> u64 {
        self.allocated_bytes.load(Relaxed)
    }

    pub(super) async fn refresh_size(&self) -> Result<u64> {
        Ok(self.size_bytes())
    }

    pub(super) fn resize(&self, size_bytes: u64) -> std::result::Result<(), ResizeError> {
        resize::check_size(size_bytes, 1)?;
        if size_bytes > Self::MAX_SIZE_BYTES {
            return Err(ResizeError::TooLarge { largest: Self::MAX_SIZE_BYTES });
        }
        // The size before the pages: see `page_for_writing`.
        let old = self.size_bytes.swap(size_bytes, SeqCst);
        fence(SeqCst);
        if size_bytes < old {
            self.free_from(size_bytes, old);
        }
        Ok(())
    }

    /// Makes everything from `start` to `end` read as zeroes, skipping regions that were never
    /// written.
    fn free_from(&self, start: u64, end: u64) {
        let mut at = start;
        while at < end {
            let region_end = (at / REGION + 1) * REGION;
            if self.page(at / PAGE).is_some() {
                for piece in pieces(at, end.min(region_end) - at) {
                    // Up to the end of the page: the rest of the last page is beyond the disk too.
                    self.zero_or_free(&PagePiece { end: PAGE as usize, ..piece });
                }
            }
            at = region_end;
        }
    }

    pub(super) fn description(&self) -> String {
        format!("memory, {} bytes", self.size_bytes())
    }

    pub(super) fn read_only(&self) -> bool {
        false
    }

    pub(super) fn block_size(&self) -> BlockSize {
        BlockSize { minimum: 1, preferred: 4096 }
    }

    pub(super) fn can_zero_fast(&self) -> bool {
        true
    }

    pub(super) async fn read(&self, offset: u64, mut target: Segments) -> Result<Segments> {
        self.check_inside(offset, target.len())?;
        let mut start = offset;
        for segment in target.as_mut_slice() {
            self.visit(start, segment.len(), |at, length, bytes| match bytes {
                Some(bytes) => segment.write(at, bytes),
                None => segment.zero(at, length),
            });
            start += segment.len() as u64;
        }
        Ok(target)
    }

    /// [`MemoryStorage::read`] into guest memory.
    pub(super) fn read_now(&self, offset: u64, into: &[GuestBytes]) -> Result<()> {
        self.check_inside(offset, into.iter().map(GuestBytes::bytes).sum())?;
        let mut start = offset;
        for guest_bytes in into {
            self.visit(start, guest_bytes.bytes(), |at, length, bytes| match bytes {
                Some(bytes) => guest_bytes.write(at, bytes),
                None => guest_bytes.fill(at, length, 0),
            });
            start += guest_bytes.bytes() as u64;
        }
        Ok(())
    }

    fn check_inside(&self, offset: u64, bytes: usize) -> Result<()> {
        if within(offset, bytes as u64, self.size_bytes()) { Ok(()) } else { Err(Error::INVALID) }
    }

    /// Calls `visitor` for each piece of a range, in order, with the piece's offset in the range,
    /// its length and its bytes; `None` for a hole.
    fn visit(&self, start: u64, length: usize, mut visitor: impl FnMut(usize, usize, Option<&[u8]>)) {
        let mut at = 0;
        for piece in pieces(start, length as u64) {
            let length = piece.end - piece.start;
            let page = self.page(piece.page).map(|page| page.read().unwrap_or_else(PoisonError::into_inner));
            let bytes =
                page.as_ref().and_then(|page| page.as_ref()).map(|page| &page[piece.start..piece.end]);
            visitor(at, length, bytes);
            at += length;
        }
    }

    /// References to the bytes that [`MemoryStorage::read`] would return.
    pub(super) fn read_shared(&self, offset: u64, length: usize) -> Option<Segments> {
        if !within(offset, length as u64, self.size_bytes()) {
            return None;
        }
        let mut segments = Segments::default();
        for piece in pieces(offset, length as u64) {
            let page = self.page(piece.page).map(|page| page.read().unwrap_or_else(PoisonError::into_inner));
            let range = piece.start..piece.end;
            segments.push(match page.as_ref().and_then(|page| page.as_ref()) {
                Some(page) => IoBuffer::view_of(page, range),
                None => IoBuffer::view_of(&ZEROES, range).known_zero(),
            });
        }
        Some(segments)
    }

    pub(super) async fn write(&self, offset: u64, data: Segments, _durability: Durability) -> Result<()> {
        self.check_inside(offset, data.len())?;
        let mut start = offset;
        for segment in data.iter() {
            self.overwrite(start, segment.len(), |at, target| segment.read(at, target))?;
            start += segment.len() as u64;
        }
        Ok(())
    }

    /// [`MemoryStorage::write`] from guest memory.
    pub(super) fn write_now(&self, offset: u64, from: &[GuestBytes]) -> Result<()> {
        self.check_inside(offset, from.iter().map(GuestBytes::bytes).sum())?;
        let mut start = offset;
        for guest_bytes in from {
            self.overwrite(start, guest_bytes.bytes(), |at, target| guest_bytes.read(at, target))?;
            start += guest_bytes.bytes() as u64;
        }
        Ok(())
    }

    /// Calls `fill` for each piece of a range, in order, with its offset in the range and its
    /// bytes.
    fn overwrite(&self, start: u64, length: usize, fill: impl Fn(usize, &mut [u8])) -> Result<()> {
        let mut at = 0;
        for piece in pieces(start, length as u64) {
            self.modify_page(&piece, |target| fill(at, target))?;
            at += piece.end - piece.start;
        }
        Ok(())
    }

    pub(super) async fn flush(&self) -> Result<()> {
        Ok(())
    }

    pub(super) async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        self.for_each_piece(offset, length, |piece| {
            if options.may_unmap {
                self.zero_or_free(piece);
                Ok(())
            } else {
                self.modify_page(piece, |target| target.fill(0))
            }
        })
        .await
    }

    pub(super) async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.for_each_piece(offset, length, |piece| {
            self.zero_or_free(piece);
            Ok(())
        })
        .await
    }

    /// Calls `f` for each piece. Ranges may be gigabytes, so it yields to other tasks in between.
    async fn for_each_piece(
        &self,
        offset: u64,
        length: u64,
        mut f: impl FnMut(&PagePiece) -> Result<()>,
    ) -> Result<()> {
        if !within(offset, length, self.size_bytes()) {
            return Err(Error::INVALID);
        }
        for (count, piece) in (1..).zip(pieces(offset, length)) {
            f(&piece)?;
            if count % PAGES_PER_YIELD == 0 {
                reactor::yield_now().await;
            }
        }
        Ok(())
    }

    pub(super) async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        if length == 0 || !within(offset, length, self.size_bytes()) {
            return Err(Error::INVALID);
        }
        let mut extents = Vec::new();
        for piece in pieces(offset, length).take(PAGES_PER_YIELD as usize) {
            let hole = self.is_hole(piece.page);
            let full = extents.len() == MAX_EXTENTS;
            // The limit is reached, but the last extent may still grow by pages of the same status.
            if full && extents.last().is_some_and(|last: &Extent| last.hole != hole) {
                break;
            }
            push_extent(&mut extents, Extent { length: (piece.end - piece.start) as u64, hole, zero: hole });
        }
        Ok(extents)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use reactor::sim;

    const SIZE: u64 = 4 * PAGE + 1000;

    #[derive(Clone, Debug)]
    enum MemoryStep {
        Write(u64, usize, u8),
        Zero(u64, u64, bool),
        Discard(u64, u64),
        Read(u64, usize),
        Status(u64, u64),
    }

    fn step() -> impl Strategy<Value = MemoryStep> {
        let range = (0..SIZE).prop_flat_map(|offset| (Just(offset), 1..=SIZE - offset));
        (range, any::<u8>(), 0..5).prop_map(|((offset, length), byte, kind)| match kind {
            0 => MemoryStep::Write(offset, length as usize, byte),
            1 => MemoryStep::Zero(offset, length, byte % 2 == 0),
            2 => MemoryStep::Discard(offset, length),
            3 => MemoryStep::Read(offset, length as usize),
            _ => MemoryStep::Status(offset, length),
        })
    }

    proptest! {
        #[test]
        fn memory_is_an_array_of_bytes(steps in proptest::collection::vec(step(), 1..40)) {
            sim::run(1, async move {
                let memory = MemoryStorage::new(SIZE).expect("small");
                let mut model = vec![0_u8; SIZE as usize];
                for step in steps {
                    apply(&memory, &mut model, step).await;
                }
            });
        }
    }

    async fn apply(memory: &MemoryStorage, model: &mut [u8], step: MemoryStep) {
        match step {
            MemoryStep::Write(offset, length, byte) => {
                let mut data = Segments::from(IoBuffer::copy_of(&vec![byte; length]));
                let second = data.split_off(length / 3);
                let at = offset + data.len() as u64;
                memory.write(offset, data, Durability::Cached).await.expect("inside");
                memory.write(at, second, Durability::Cached).await.expect("inside");
                model[offset as usize..][..length].fill(byte);
            }
            MemoryStep::Zero(offset, length, may_unmap) => {
                let options = ZeroOptions { may_unmap, only_if_fast: true, durability: Durability::Cached };
                memory.write_zeroes(offset, length, options).await.expect("inside");
                model[offset as usize..][..length as usize].fill(0);
                let status = memory.block_status(offset, length).await.expect("inside");
                assert!(may_unmap || status.iter().all(|extent| !extent.hole), "no holes were requested");
            }
            MemoryStep::Discard(offset, length) => {
                memory.discard(offset, length).await.expect("inside");
                model[offset as usize..][..length as usize].fill(0);
            }
            MemoryStep::Read(offset, length) => {
                let read = memory.read(offset, IoBuffer::new(length).into()).await.expect("inside").joined();
                assert_eq!(&read[..], &model[offset as usize..][..length]);
                let shared = memory.read_shared(offset, length).expect("inside");
                let mut bytes = vec![0; length];
                let other = IoBuffer::copy_of(&read.iter().map(|byte| !byte).collect::<Vec<_>>());
                memory.write(offset, other.into(), Durability::Cached).await.expect("inside");
                shared.copy_to(&mut bytes);
                assert_eq!(bytes, model[offset as usize..][..length], "shared pages keep the old bytes");
                model[offset as usize..][..length].iter_mut().for_each(|byte| *byte = !*byte);
            }
            MemoryStep::Status(offset, length) => {
                let mut at = offset;
                for extent in memory.block_status(offset, length).await.expect("inside") {
                    let covered = &model[at as usize..][..extent.length as usize];
                    assert!(!extent.zero || covered.iter().all(|&byte| byte == 0));
                    at += extent.length;
                }
                assert_eq!(at, offset + length, "few pages: all of them are covered");
            }
        }
    }

    #[test]
    fn discard_frees_and_status_shows_it() {
        sim::run(1, async {
            let memory = MemoryStorage::new(3 * PAGE).expect("small");
            let data = || Segments::from(IoBuffer::copy_of(&vec![1; 3 * PAGE as usize]));
            memory.write(0, data(), Durability::Cached).await.expect("inside");
            memory.discard(PAGE, PAGE).await.expect("inside");
            let extent = |hole| Extent { length: PAGE, hole, zero: hole };
            let status = memory.block_status(0, 3 * PAGE).await;
            assert_eq!(status, Ok(vec![extent(false), extent(true), extent(false)]));
        });
    }

    #[test]
    fn status_is_bounded() {
        sim::run(1, async {
            let memory = MemoryStorage::new(1 << 40).expect("sparse");
            for page in (0..2000).step_by(2) {
                let byte = IoBuffer::copy_of(&[1]);
                memory.write(page * PAGE, byte.into(), Durability::Cached).await.expect("inside");
            }
            let status = memory.block_status(0, 1 << 40).await.expect("inside");
            assert_eq!(status.len(), MAX_EXTENTS);
        });
    }

    #[test]
    fn too_large_and_out_of_range_are_refused() {
        assert!(MemoryStorage::new(MemoryStorage::MAX_SIZE_BYTES + 1).is_none());
        sim::run(1, async {
            let memory = MemoryStorage::new(100).expect("small");
            assert_eq!(memory.read(99, IoBuffer::new(2).into()).await.err(), Some(Error::INVALID));
            assert_eq!(memory.discard(u64::MAX, 2).await.err(), Some(Error::INVALID));
        });
    }

    async fn write(memory: &MemoryStorage, offset: u64, bytes: &[u8]) -> Result<()> {
        memory.write(offset, IoBuffer::copy_of(bytes).into(), Durability::Cached).await
    }

    #[test]
    fn regrown_range_reads_as_zeroes() {
        sim::run(1, async {
            let memory = MemoryStorage::new(4 * PAGE).expect("small");
            write(&memory, PAGE, &[7; 3 * PAGE as usize]).await.expect("inside");
            let cut = PAGE + 512;
            assert_eq!(memory.resize(cut), Ok(()));
            assert_eq!(write(&memory, cut - 1, &[1, 2]).await, Err(Error::INVALID));
            assert_eq!(memory.resize(4 * PAGE), Ok(()));
            let read =
                memory.read(PAGE, IoBuffer::new(3 * PAGE as usize).into()).await.expect("inside").joined();
            assert_eq!(read[..512], [7; 512]);
            assert!(read[512..].iter().all(|&byte| byte == 0));
            assert!(memory.is_hole(2) && memory.is_hole(3), "its memory is free");
        });
    }

    #[test]
    fn it_grows_past_every_table() {
        sim::run(1, async {
            let memory = MemoryStorage::new(512).expect("small");
            assert_eq!(memory.resize(MemoryStorage::MAX_SIZE_BYTES), Ok(()));
            for offset in [0, REGION, 7 * REGION - 1, 1 << 40, MemoryStorage::MAX_SIZE_BYTES - 4] {
                write(&memory, offset, b"here").await.expect("inside");
                let read = memory.read(offset, IoBuffer::new(4).into()).await.expect("inside");
                assert_eq!(read.to_vec(), *b"here");
            }
            let largest = MemoryStorage::MAX_SIZE_BYTES;
            assert_eq!(memory.resize(largest + 512), Err(ResizeError::TooLarge { largest }));
            assert_eq!(memory.resize(0), Err(ResizeError::Unaligned { multiple: 1 }));
            assert_eq!(memory.size_bytes(), largest);
        });
    }

    #[test]
    fn writers_on_other_threads_leave_nothing_past_a_new_end() {
        let memory = MemoryStorage::new(2 * REGION).expect("sparse");
        std::thread::scope(|scope| {
            for thread in 0..2 {
                let memory = &memory;
                scope.spawn(move || {
                    // Directly to the pages, as a write that was checked before the shrink.
                    let mut random = fastrand::Rng::with_seed(thread);
                    for _ in 0..20_000 {
                        let piece =
                            PagePiece { page: random.u64(..2 * PAGES_PER_REGION), start: 0, end: 512 };
                        let _ = memory.modify_page(&piece, |bytes| bytes.fill(1));
                    }
                });
            }
            memory.resize(PAGE).expect("shrinks");
        });
        assert!((1..2 * PAGES_PER_REGION).all(|page| memory.is_hole(page)));
    }
}
