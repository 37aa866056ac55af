//! One mapping of a front end's file, or memory of ours in its stead.

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
    Quota, RegionError,
    quota::{self, Share},
    sigbus,
};

/// `HUGETLBFS_MAGIC` of `linux/magic.h`: what `fstatfs(2)` says of a file of huge pages.
const HUGE_PAGES: i64 = 0x9584_58f6;

/// Memory that others change while we use it. Unmapped, or freed, when dropped.
#[derive(Debug)]
pub(super) struct Mapping {
    first: NonNull<u8>,
    bytes: usize,
    kind: Kind,
}

#[derive(Debug)]
enum Kind {
    /// Of a file: whole pages, of which the first byte asked for need not be the first.
    File {
        pages: NonNull<u8>,
        length: usize,
        watch: sigbus::Watch,
        /// For another process, which goes on with it; and where in it the first byte is.
        file: OwnedFd,
        offset: u64,
        _share: Share,
    },
    /// Pages of ours.
    Anonymous,
    Heap(Layout),
}

// SAFETY: memory that no thread has a part in. It is touched by volatile and atomic accesses and by
// the kernel alone, and references to it are never made.
unsafe impl Send for Mapping {}
// SAFETY: as for `Send`.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `bytes` of `file` from `offset` on, shared.
    pub(super) fn of_file(
        file: OwnedFd,
        bytes: u64,
        offset: u64,
        quota: &Quota,
    ) -> Result<Self, RegionError> {
        if bytes == 0 {
            return Err(RegionError::Empty);
        }
        let overflow = || RegionError::Overflow { start: offset, bytes };
        let end = offset.checked_add(bytes).ok_or_else(overflow)?;
        // Only files in memory know seals. Asking another for its length, or touching a page of it,
        // may wait for whoever serves its file system.
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
        let before = offset % page;
        let length = (before + bytes).checked_next_multiple_of(page).ok_or_else(overflow)?;
        let length = usize::try_from(length).map_err(|_| overflow())?;
        let from = libc::off_t::try_from(offset - before).map_err(|_| overflow())?;
        let share = quota.take(length as u64)?;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let pages = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                length,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                from,
            )
        };
        if pages == libc::MAP_FAILED {
            let error = io::Error::last_os_error();
            let has_no_room = error.kind() == io::ErrorKind::OutOfMemory && quota::addresses().is_some();
            return Err(if has_no_room { RegionError::NoAddresses(bytes) } else { error.into() });
        }
        // A core of ours is no place for a guest's data. Where the kernel refuses, it is larger.
        // SAFETY: it changes what a core holds, and nothing else.
        let _ = unsafe { libc::madvise(pages, length, libc::MADV_DONTDUMP) };
        let pages = NonNull::new(pages.cast::<u8>()).expect("the kernel maps nothing at address 0");
        let watch = sigbus::watch(pages.as_ptr() as usize, length, page as usize);
        // SAFETY: `before` is less than a page, and one is mapped at least.
        let first = unsafe { pages.add(before as usize) };
        let kind = Kind::File { pages, length, watch, file, offset, _share: share };
        let mapping = Self { first, bytes: bytes as usize, kind };
        if quota::leaves_room() { Ok(mapping) } else { Err(RegionError::NoAddresses(bytes)) }
    }

    /// `bytes` of new pages, which take no memory before they are touched.
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
        // No core of others' data, and no 2 MiB for a request of one page. Where the kernel
        // refuses, it takes more memory.
        for advice in [libc::MADV_DONTDUMP, libc::MADV_NOHUGEPAGE] {
            // SAFETY: neither changes what is in the pages.
            let _ = unsafe { libc::madvise(pages, bytes, advice) };
        }
        let first = NonNull::new(pages.cast::<u8>()).expect("the kernel maps nothing at address 0");
        Ok(Self { first, bytes, kind: Kind::Anonymous })
    }

    /// Zeroes on the heap.
    pub(super) fn on_heap(bytes: usize) -> Self {
        assert_ne!(bytes, 0, "a region of no bytes");
        let layout = Layout::from_size_align(bytes, 4096).expect("far below isize::MAX");
        // SAFETY: the layout's size is not zero.
        let first = unsafe { alloc_zeroed(layout) };
        let first = NonNull::new(first).unwrap_or_else(|| handle_alloc_error(layout));
        Self { first, bytes, kind: Kind::Heap(layout) }
    }

    /// Its file, and where in it it begins.
    pub(super) fn file(&self) -> Option<(BorrowedFd<'_>, u64)> {
        match &self.kind {
            Kind::File { file, offset, .. } => Some((file.as_fd(), *offset)),
            Kind::Anonymous | Kind::Heap(_) => None,
        }
    }

    /// Its length in bytes, never zero.
    pub(super) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether its file shrank under us.
    pub(super) fn is_lost(&self) -> bool {
        match &self.kind {
            Kind::File { watch, .. } => watch.is_lost(),
            Kind::Anonymous | Kind::Heap(_) => false,
        }
    }

    /// The address of a byte; `offset` may be the length, which is the end.
    pub(super) fn at(&self, offset: usize) -> *mut u8 {
        assert!(offset <= self.bytes, "byte {offset} of a mapping of {}", self.bytes);
        // SAFETY: within the mapping or at its end.
        unsafe { self.first.as_ptr().add(offset) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        match &mut self.kind {
            Kind::File { pages, length, watch, .. } => {
                // First: from here on these addresses may be anybody's.
                watch.end();
                // SAFETY: mapped by `of_file` with this length, and nothing refers to it any more.
                let result = unsafe { libc::munmap(pages.as_ptr().cast(), *length) };
                debug_assert_eq!(result, 0, "{}", io::Error::last_os_error());
            }
            Kind::Anonymous => {
                // SAFETY: mapped by `anonymous` with this length, and nothing refers to it any
                // more.
                let result = unsafe { libc::munmap(self.first.as_ptr().cast(), self.bytes) };
                debug_assert_eq!(result, 0, "{}", io::Error::last_os_error());
            }
            // SAFETY: allocated by `on_heap` with this layout, and nothing refers to it any more.
            Kind::Heap(layout) => unsafe { dealloc(self.first.as_ptr(), *layout) },
        }
    }
}

/// In what the kernel maps this file, in bytes.
fn page_bytes(file: impl AsFd) -> io::Result<u64> {
    let status = fstatfs(&file)?;
    #[allow(clippy::unnecessary_cast, reason = "the type differs between architectures")]
    if status.f_type as i64 == HUGE_PAGES {
        return Ok(u64::try_from(status.f_bsize).unwrap_or(0).max(4096));
    }
    // SAFETY: it asks for a constant.
    let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    Ok(u64::try_from(page).unwrap_or(4096).max(4096))
}
