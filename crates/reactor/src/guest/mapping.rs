//! A mapping of a front end's file, or own memory used in its place.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    ptr::NonNull,
};

use rustix::{
    fs::{FileType, fcntl_get_seals, fstat, fstatfs},
    io::Errno,
};

use super::{
    MappingQuota, RegionError,
    quota::{self, QuotaUse},
    sigbus,
};

/// `HUGETLBFS_MAGIC` of `linux/magic.h`, the type of hugetlbfs in `fstatfs(2)`.
const HUGE_PAGES: i64 = 0x9584_58f6;

/// Memory that other processes change while it is in use. Unmapped, or freed, when dropped.
#[derive(Debug)]
pub(super) struct MemoryMapping {
    first: NonNull<u8>,
    bytes: usize,
    kind: MappingKind,
}

#[derive(Debug)]
enum MappingKind {
    /// Whole pages of a file; the first byte requested may lie inside the first page.
    File {
        pages: NonNull<u8>,
        length: usize,
        registration: sigbus::MappingRegistration,
        /// For transfer to another process; and the offset of the first byte.
        file: OwnedFd,
        offset: u64,
        _share: QuotaUse,
    },
    /// Own pages.
    Anonymous,
    Heap(Layout),
}

// SAFETY: memory without thread affinity. It is accessed only by volatile and atomic operations and
// by the kernel, and references to it are never created.
unsafe impl Send for MemoryMapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for MemoryMapping {}

impl MemoryMapping {
    /// Maps `bytes` of `file` from `offset` on, shared.
    pub(super) fn of_file(
        file: OwnedFd,
        bytes: u64,
        offset: u64,
        quota: &MappingQuota,
    ) -> Result<Self, RegionError> {
        if bytes == 0 {
            return Err(RegionError::Empty);
        }
        let overflow = || RegionError::Overflow { start: offset, bytes };
        let end = offset.checked_add(bytes).ok_or_else(overflow)?;
        // Only files in memory support seals. `fstat` of any other file, or access to its pages,
        // may block on the server of its file system.
        if fcntl_get_seals(&file) == Err(Errno::INVAL) {
            return Err(RegionError::NotInMemory);
        }
        let status = fstat(&file).map_err(io::Error::from)?;
        if FileType::from_raw_mode(status.st_mode) != FileType::RegularFile {
            return Err(RegionError::NotAFile);
        }
        let size = u64::try_from(status.st_size).unwrap_or(0);
        if end > size {
            return Err(RegionError::TooShort { end, size });
        }
        let page = page_bytes(&file)?;
        let page_offset = offset % page;
        let length = (page_offset + bytes).checked_next_multiple_of(page).ok_or_else(overflow)?;
        let length = usize::try_from(length).map_err(|_| overflow())?;
        let map_offset = libc::off_t::try_from(offset - page_offset).map_err(|_| overflow())?;
        let share = quota.charge(length as u64)?;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let pages = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                map_offset,
            )
        };
        if pages == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            let has_no_room =
                error.kind() == io::ErrorKind::OutOfMemory && quota::address_space_limit().is_some();
            return Err(if has_no_room { RegionError::NoAddresses(bytes) } else { error.into() });
        }
        // A core dump must not contain a guest's data. If the kernel refuses, it does.
        // SAFETY: this advice changes the contents of core dumps only.
        let _ = unsafe { libc::madvise(pages, length, libc::MADV_DONTDUMP) };
        let pages = NonNull::new(pages.cast::<u8>()).expect("the kernel maps nothing at address 0");
        let watch = sigbus::register(pages.as_ptr() as usize, length, page as usize);
        // SAFETY: `page_offset` is less than a page, and at least one page is mapped.
        let first = unsafe { pages.add(page_offset as usize) };
        let kind = MappingKind::File { pages, length, registration: watch, file, offset, _share: share };
        let mapping = Self { first, bytes: bytes as usize, kind };
        if quota::is_reserve_free() { Ok(mapping) } else { Err(RegionError::NoAddresses(bytes)) }
    }

    /// Maps `bytes` of new pages, whose memory is allocated at the first access.
    pub(super) fn anonymous(bytes: usize) -> io::Result<Self> {
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let pages = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if pages == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        // Guests' data is kept out of core dumps, and a request of one page must not allocate 2
        // MiB. If the kernel refuses, both happen.
        for advice in [libc::MADV_DONTDUMP, libc::MADV_NOHUGEPAGE] {
            // SAFETY: neither advice changes the contents of the pages.
            let _ = unsafe { libc::madvise(pages, bytes, advice) };
        }
        let first = NonNull::new(pages.cast::<u8>()).expect("the kernel maps nothing at address 0");
        Ok(Self { first, bytes, kind: MappingKind::Anonymous })
    }

    /// Zeroes on the heap.
    pub(super) fn on_heap(bytes: usize) -> Self {
        assert_ne!(bytes, 0, "a region of no bytes");
        let layout = Layout::from_size_align(bytes, 4096).expect("far below isize::MAX");
        // SAFETY: the layout's size is not zero.
        let first = unsafe { alloc_zeroed(layout) };
        let first = NonNull::new(first).unwrap_or_else(|| handle_alloc_error(layout));
        Self { first, bytes, kind: MappingKind::Heap(layout) }
    }

    /// The file, and the offset of the first byte in it.
    pub(super) fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.kind {
            MappingKind::File { file, offset, .. } => Some((file.as_fd(), *offset)),
            MappingKind::Anonymous | MappingKind::Heap(_) => None,
        }
    }

    /// Length in bytes, never zero.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// True if the file has shrunk.
    pub(super) fn is_lost(&self) -> bool {
        match &self.kind {
            MappingKind::File { registration, .. } => registration.is_lost(),
            MappingKind::Anonymous | MappingKind::Heap(_) => false,
        }
    }

    /// Address of a byte; `offset` may equal the length.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes, "byte {offset} of a mapping of {}", self.bytes);
        // SAFETY: within the mapping or at its end.
        unsafe { self.first.as_ptr().add(offset) }
    }
}

impl Drop for MemoryMapping {
    fn drop(&mut self) {
        match &mut self.kind {
            MappingKind::File { pages, length, registration, .. } => {
                // First: after `munmap` the kernel may map something else at these addresses.
                registration.unregister();
                // SAFETY: mapped by `of_file` with this length, and nothing refers to it.
                let result = unsafe { libc::munmap(pages.as_ptr().cast(), *length) };
                debug_assert_eq!(result, 0, "{}", io::Error::last_os_error());
            }
            MappingKind::Anonymous => {
                // SAFETY: mapped by `anonymous` with this length, and nothing refers to it.
                let result = unsafe { libc::munmap(self.first.as_ptr().cast(), self.bytes) };
                debug_assert_eq!(result, 0, "{}", io::Error::last_os_error());
            }
            // SAFETY: allocated by `on_heap` with this layout, and nothing refers to it.
            MappingKind::Heap(layout) => unsafe { dealloc(self.first.as_ptr(), *layout) },
        }
    }
}

/// Page size of mappings of this file in bytes.
fn page_bytes(file: impl AsFd) -> io::Result<u64> {
    let status = fstatfs(&file)?;
    #[allow(clippy::unnecessary_cast, reason = "the type differs between architectures")]
    if status.f_type as i64 == HUGE_PAGES {
        return Ok(u64::try_from(status.f_bsize).unwrap_or(0).max(4096));
    }
    // SAFETY: sysconf only returns a constant.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Ok(u64::try_from(page).unwrap_or(4096).max(4096))
}
