//! The dirty log of live migration: a bitmap of the pages of a guest that were written to.

use std::{
    os::fd::{BorrowedFd, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicU8, Ordering::SeqCst},
    },
};

use super::{MappingQuota, RegionError, mapping::MemoryMapping};

/// Bytes of a guest's memory for each bit (`VHOST_LOG_PAGE` of the vhost-user specification,
/// independent of the host's page size).
const PAGE_BYTES: u64 = 4096;

/// The bitmap of `VHOST_USER_SET_LOG_BASE`: one bit for each page of guest-physical memory,
/// starting with the lowest bit of the first byte. This side sets bits, the front end clears them.
#[derive(Clone, Debug)]
pub struct DirtyLog(Arc<MemoryMapping>);

impl DirtyLog {
    /// Maps `bytes` of bitmap in `file` from `offset` on. Keeps the descriptor, and counts in
    /// `quota`, until it is unmapped.
    ///
    /// # Errors
    /// As [`Region::map`](super::Region::map).
    pub fn map(file: OwnedFd, bytes: u64, offset: u64, quota: &MappingQuota) -> Result<Self, RegionError> {
        Ok(Self(Arc::new(MemoryMapping::of_file(file, bytes, offset, quota)?)))
    }

    /// A clean bitmap on the heap, for tests, simulation, fuzzing and Miri.
    ///
    /// # Panics
    /// Panics if it is empty.
    pub fn on_heap(bytes: usize) -> Self {
        Self(Arc::new(MemoryMapping::on_heap(bytes)))
    }

    /// Marks the pages of `bytes` guest-physical bytes from `address` on. Call it after writing
    /// them: a front end that sees the mark must see the bytes. Pages beyond the bitmap are not
    /// marked; the front end guarantees that it covers all memory.
    pub fn mark(&self, address: u64, bytes: u64) {
        let Some(last) = bytes.checked_sub(1) else { return };
        let mut page = address / PAGE_BYTES;
        let last = address.saturating_add(last).min(self.pages() * PAGE_BYTES - 1) / PAGE_BYTES;
        while page <= last {
            // One byte of the bitmap at a time.
            let end = last.min(page | 7);
            let bits = (0xff_u8 << (page % 8)) & (0xff_u8 >> (7 - end % 8));
            // Also if the bits are set already: the front end may have copied the page between that
            // mark and this write, and be about to clear it.
            self.byte(page).fetch_or(bits, SeqCst);
            page = end + 1;
        }
    }

    /// True if the page of this guest-physical address is marked.
    pub fn is_marked(&self, address: u64) -> bool {
        let page = address / PAGE_BYTES;
        page < self.pages() && self.byte(page).load(SeqCst) & 1 << (page % 8) != 0
    }

    /// The file, the offset of the bitmap in it, and its length in bytes; `None` on the heap.
    pub fn file(&self) -> Option<(BorrowedFd<'_>, u64, u64)> {
        let (file, offset) = self.0.file()?;
        Some((file, offset, self.0.bytes() as u64))
    }

    /// True if the file has shrunk, so that marks are lost.
    pub fn is_lost(&self) -> bool {
        self.0.is_lost()
    }

    /// Number of pages covered by the bitmap.
    fn pages(&self) -> u64 {
        self.0.bytes() as u64 * 8
    }

    fn byte(&self, page: u64) -> &AtomicU8 {
        assert!(page < self.pages(), "page {page} of {}", self.pages());
        // SAFETY: within the mapping, which lives as long as `self`. Other processes access it with
        // atomic operations too.
        unsafe { AtomicU8::from_ptr(self.0.at((page / 8) as usize)) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_match_a_naive_loop() {
        for (address, bytes) in [(0, 1), (4095, 2), (4096, 4096), (0x7fff, 2), (5000, 100_000), (0, 0)] {
            let log = DirtyLog::on_heap(8);
            log.mark(address, bytes);
            for page in 0..64 {
                let touched = bytes > 0 && address / 4096 <= page && page <= (address + bytes - 1) / 4096;
                assert_eq!(log.is_marked(page * 4096), touched, "page {page} of {address}+{bytes}");
            }
        }
    }

    #[test]
    fn pages_beyond_the_log_are_not_marked() {
        let log = DirtyLog::on_heap(1);
        log.mark(7 * 4096, u64::MAX);
        log.mark(8 * 4096, 1);
        log.mark(u64::MAX, u64::MAX);
        assert!(log.is_marked(7 * 4096) && !log.is_marked(6 * 4096) && !log.is_marked(8 * 4096));
    }
}
