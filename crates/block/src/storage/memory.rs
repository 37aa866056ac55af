//! A disk in memory, allocated page by page as it is written.
//!
//! ```text
//!   regions (256 MiB of disk each, allocated when first written)
//!   └─ pages (64 KiB each, allocated when written; none is a hole and reads as zeroes)
//! ```
//!
//! Each page has its own lock, held while bytes are copied and never across an await, so threads meet only in the same 64 KiB.
//! Reading can do without copying: pages are [lent](Memory::lend), and a write to one that is lent goes to a copy of it.
//! A request of several pages is not atomic as a whole, which the contract does not ask for.
//!
//! Memory is bounded by the size of the disk plus 0.05 % for the tables.

use std::{
    iter::repeat_n,
    sync::{Arc, LazyLock, OnceLock, PoisonError, RwLock},
};

use super::{BlockSize, Durability, Extent, MOST_EXTENTS, ZeroOptions, push_extent, within};
use crate::{
    buffer::{Buffer, Segments},
    error::{Error, Result},
    reactor,
};

const PAGE: u64 = 64 << 10;
const PAGES_PER_REGION: u64 = 4096;
const REGION: u64 = PAGE * PAGES_PER_REGION;
/// Pages looked at or changed between two chances for other tasks, and in one answer about block status.
const PAGES_AT_ONCE: u64 = PAGES_PER_REGION;

type Page = RwLock<Option<Arc<[u8]>>>;

/// What holes are read from.
static ZEROES: LazyLock<Arc<[u8]>> = LazyLock::new(zeroed_page);

fn zeroed_page() -> Arc<[u8]> {
    repeat_n(0, PAGE as usize).collect()
}

/// A sparse disk.
#[derive(Debug)]
pub struct Memory {
    size_bytes: u64,
    regions: Box<[OnceLock<Box<[Page]>>]>,
}

/// A part of a request inside one page.
struct Piece {
    page: u64,
    start: usize,
    end: usize,
}

impl Piece {
    fn is_whole(&self) -> bool {
        self.end - self.start == PAGE as usize
    }
}

/// Splits a range at page boundaries.
fn pieces(offset: u64, length: u64) -> impl Iterator<Item = Piece> {
    let end = offset + length;
    let mut at = offset;
    std::iter::from_fn(move || {
        if at >= end {
            return None;
        }
        let page = at / PAGE;
        let stop = end.min((page + 1) * PAGE);
        let piece = Piece { page, start: (at % PAGE) as usize, end: (stop - page * PAGE) as usize };
        at = stop;
        Some(piece)
    })
}

impl Memory {
    /// Largest size in bytes (256 TiB): the table of regions is then 24 MiB.
    pub const LARGEST: u64 = 1 << 48;

    /// A disk of `size_bytes`, all holes; none if that is above [`Memory::LARGEST`].
    pub fn new(size_bytes: u64) -> Option<Self> {
        if size_bytes > Self::LARGEST {
            return None;
        }
        let regions = (0..size_bytes.div_ceil(REGION)).map(|_| OnceLock::new()).collect();
        Some(Self { size_bytes, regions })
    }

    /// The page, if its region has ever been written to.
    fn page(&self, number: u64) -> Option<&Page> {
        let region = self.regions[(number / PAGES_PER_REGION) as usize].get()?;
        Some(&region[(number % PAGES_PER_REGION) as usize])
    }

    fn page_for_writing(&self, number: u64) -> &Page {
        let index = number / PAGES_PER_REGION;
        let region = self.regions[index as usize].get_or_init(|| {
            let bytes = (self.size_bytes - index * REGION).min(REGION);
            (0..bytes.div_ceil(PAGE)).map(|_| RwLock::new(None)).collect()
        });
        &region[(number % PAGES_PER_REGION) as usize]
    }

    /// Calls `f` with the piece of an allocated page; it is allocated, with zeroes, if need be.
    fn change(&self, piece: &Piece, f: impl FnOnce(&mut [u8])) {
        // A panic while bytes are copied leaves a page of bytes.
        let mut page = self.page_for_writing(piece.page).write().unwrap_or_else(PoisonError::into_inner);
        let page = Arc::make_mut(page.get_or_insert_with(zeroed_page));
        f(&mut page[piece.start..piece.end]);
    }

    /// Makes the piece read as zeroes and frees what it can.
    fn free(&self, piece: &Piece) {
        let Some(page) = self.page(piece.page) else { return };
        let mut page = page.write().unwrap_or_else(PoisonError::into_inner);
        if piece.is_whole() {
            *page = None;
        } else if let Some(page) = &mut *page {
            Arc::make_mut(page)[piece.start..piece.end].fill(0);
        }
    }

    fn is_hole(&self, page: u64) -> bool {
        self.page(page).is_none_or(|page| page.read().unwrap_or_else(PoisonError::into_inner).is_none())
    }

    pub(super) fn size_bytes(&self) -> u64 {
        self.size_bytes
    }

    pub(super) fn refresh_size(&self) -> Result<u64> {
        Ok(self.size_bytes)
    }

    pub(super) fn description(&self) -> String {
        format!("memory, {} bytes", self.size_bytes)
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

    pub(super) async fn read(&self, offset: u64, mut buffer: Buffer) -> Result<Buffer> {
        if !within(offset, buffer.len() as u64, self.size_bytes) {
            return Err(Error::INVALID);
        }
        let mut rest = &mut buffer[..];
        for piece in pieces(offset, rest.len() as u64) {
            let (target, after) = rest.split_at_mut(piece.end - piece.start);
            rest = after;
            let page = self.page(piece.page).map(|page| page.read().unwrap_or_else(PoisonError::into_inner));
            match page.as_ref().and_then(|page| page.as_ref()) {
                Some(page) => target.copy_from_slice(&page[piece.start..piece.end]),
                None => target.fill(0),
            }
        }
        Ok(buffer)
    }

    /// What [`Memory::read`] would read, where it lies.
    pub(super) fn lend(&self, offset: u64, length: usize) -> Option<Segments> {
        if !within(offset, length as u64, self.size_bytes) {
            return None;
        }
        let mut segments = Segments::default();
        for piece in pieces(offset, length as u64) {
            let page = self.page(piece.page).map(|page| page.read().unwrap_or_else(PoisonError::into_inner));
            let page = page.as_ref().and_then(|page| page.as_ref()).unwrap_or(&ZEROES);
            segments.push(Buffer::lent(page, piece.start..piece.end));
        }
        Some(segments)
    }

    pub(super) async fn write(&self, offset: u64, data: Segments, _durability: Durability) -> Result<()> {
        if !within(offset, data.len() as u64, self.size_bytes) {
            return Err(Error::INVALID);
        }
        let mut at = offset;
        for segment in data.iter() {
            let mut rest = &segment[..];
            for piece in pieces(at, rest.len() as u64) {
                let (source, after) = rest.split_at(piece.end - piece.start);
                rest = after;
                self.change(&piece, |target| target.copy_from_slice(source));
            }
            at += segment.len() as u64;
        }
        Ok(())
    }

    pub(super) async fn flush(&self) -> Result<()> {
        Ok(())
    }

    pub(super) async fn write_zeroes(&self, offset: u64, length: u64, options: ZeroOptions) -> Result<()> {
        self.for_each_piece(offset, length, |piece| {
            if options.may_unmap {
                self.free(piece);
            } else {
                self.change(piece, |target| target.fill(0));
            }
        })
        .await
    }

    pub(super) async fn discard(&self, offset: u64, length: u64) -> Result<()> {
        self.for_each_piece(offset, length, |piece| self.free(piece)).await
    }

    /// Ranges come in gigabytes: other tasks get their turn in between.
    async fn for_each_piece(&self, offset: u64, length: u64, mut f: impl FnMut(&Piece)) -> Result<()> {
        if !within(offset, length, self.size_bytes) {
            return Err(Error::INVALID);
        }
        for (count, piece) in (1..).zip(pieces(offset, length)) {
            f(&piece);
            if count % PAGES_AT_ONCE == 0 {
                reactor::yield_now().await;
            }
        }
        Ok(())
    }

    pub(super) async fn block_status(&self, offset: u64, length: u64) -> Result<Vec<Extent>> {
        if length == 0 || !within(offset, length, self.size_bytes) {
            return Err(Error::INVALID);
        }
        let mut extents = Vec::new();
        for piece in pieces(offset, length).take(PAGES_AT_ONCE as usize) {
            let hole = self.is_hole(piece.page);
            let full = extents.len() == MOST_EXTENTS;
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
    use crate::reactor::sim;

    const SIZE: u64 = 4 * PAGE + 1000;

    #[derive(Clone, Debug)]
    enum Step {
        Write(u64, usize, u8),
        Zero(u64, u64, bool),
        Discard(u64, u64),
        Read(u64, usize),
        Status(u64, u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let range = (0..SIZE).prop_flat_map(|offset| (Just(offset), 1..=SIZE - offset));
        (range, any::<u8>(), 0..5).prop_map(|((offset, length), byte, kind)| match kind {
            0 => Step::Write(offset, length as usize, byte),
            1 => Step::Zero(offset, length, byte % 2 == 0),
            2 => Step::Discard(offset, length),
            3 => Step::Read(offset, length as usize),
            _ => Step::Status(offset, length),
        })
    }

    proptest! {
        #[test]
        fn memory_is_an_array_of_bytes(steps in proptest::collection::vec(step(), 1..40)) {
            sim::run(1, async move {
                let memory = Memory::new(SIZE).expect("small");
                let mut model = vec![0_u8; SIZE as usize];
                for step in steps {
                    apply(&memory, &mut model, step).await;
                }
            });
        }
    }

    async fn apply(memory: &Memory, model: &mut [u8], step: Step) {
        match step {
            Step::Write(offset, length, byte) => {
                let mut data = Segments::from(Buffer::copy_of(&vec![byte; length]));
                let second = data.split_off(length / 3);
                let at = offset + data.len() as u64;
                memory.write(offset, data, Durability::Cached).await.expect("inside");
                memory.write(at, second, Durability::Cached).await.expect("inside");
                model[offset as usize..][..length].fill(byte);
            }
            Step::Zero(offset, length, may_unmap) => {
                let options = ZeroOptions { may_unmap, only_if_fast: true, durability: Durability::Cached };
                memory.write_zeroes(offset, length, options).await.expect("inside");
                model[offset as usize..][..length as usize].fill(0);
                let status = memory.block_status(offset, length).await.expect("inside");
                assert!(may_unmap || status.iter().all(|extent| !extent.hole), "asked for without holes");
            }
            Step::Discard(offset, length) => {
                memory.discard(offset, length).await.expect("inside");
                model[offset as usize..][..length as usize].fill(0);
            }
            Step::Read(offset, length) => {
                let read = memory.read(offset, Buffer::new(length)).await.expect("inside");
                assert_eq!(&read[..], &model[offset as usize..][..length]);
                let lent = memory.lend(offset, length).expect("inside");
                let mut bytes = vec![0; length];
                let other = Buffer::copy_of(&read.iter().map(|byte| !byte).collect::<Vec<_>>());
                memory.write(offset, other.into(), Durability::Cached).await.expect("inside");
                lent.copy_to(&mut bytes);
                assert_eq!(bytes, model[offset as usize..][..length], "what is lent stays as it was");
                model[offset as usize..][..length].iter_mut().for_each(|byte| *byte = !*byte);
            }
            Step::Status(offset, length) => {
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
            let memory = Memory::new(3 * PAGE).expect("small");
            let data = || Segments::from(Buffer::copy_of(&vec![1; 3 * PAGE as usize]));
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
            let memory = Memory::new(1 << 40).expect("sparse");
            for page in (0..2000).step_by(2) {
                let byte = Buffer::copy_of(&[1]);
                memory.write(page * PAGE, byte.into(), Durability::Cached).await.expect("inside");
            }
            let status = memory.block_status(0, 1 << 40).await.expect("inside");
            assert_eq!(status.len(), MOST_EXTENTS);
        });
    }

    #[test]
    fn too_large_and_out_of_range_are_refused() {
        assert!(Memory::new(Memory::LARGEST + 1).is_none());
        sim::run(1, async {
            let memory = Memory::new(100).expect("small");
            assert_eq!(memory.read(99, Buffer::new(2)).await.err(), Some(Error::INVALID));
            assert_eq!(memory.discard(u64::MAX, 2).await.err(), Some(Error::INVALID));
        });
    }
}
