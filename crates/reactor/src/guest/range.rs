//! A range of bytes in a guest's memory, and all operations on it.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::{DirtyLog, Region};

/// Bytes in one region. Keeps the region mapped.
#[derive(Clone, Debug)]
pub struct GuestBytes {
    region: Region,
    /// Offset in the region.
    offset: usize,
    bytes: usize,
    log: Option<DirtyLog>,
}

/// Defines an atomic load and store of an integer, little endian in memory, as in all of virtio.
macro_rules! atomic {
    ($load:ident, $store:ident, $integer:ty, $atomic:ty) => {
        /// Loads a little-endian integer.
        ///
        /// # Panics
        /// Panics if it is outside, not aligned, or `order` is not valid for a load.
        #[inline]
        pub fn $load(&self, offset: usize, order: Ordering) -> $integer {
            let address = self.aligned::<$integer>(offset);
            // SAFETY: inside the mapping and aligned. A guest that accesses it without atomic
            // operations harms its own disk only.
            <$integer>::from_le(unsafe { <$atomic>::from_ptr(address) }.load(order))
        }

        /// Stores a little-endian integer, and marks it as dirty.
        ///
        /// # Panics
        /// Panics if it is outside, not aligned, or `order` is not valid for a store.
        #[inline]
        pub fn $store(&self, offset: usize, value: $integer, order: Ordering) {
            let address = self.aligned::<$integer>(offset);
            // SAFETY: as for the load.
            unsafe { <$atomic>::from_ptr(address) }.store(value.to_le(), order);
            self.mark(offset, size_of::<$integer>());
        }
    };
}

impl GuestBytes {
    /// `bytes` of `region` from `offset` on; `None` if they are not inside.
    #[inline]
    pub(super) fn in_region(
        region: &Region,
        offset: u64,
        bytes: usize,
        log: Option<&DirtyLog>,
    ) -> Option<Self> {
        let after = region.bytes().checked_sub(offset)?;
        if bytes as u64 > after {
            return None;
        }
        Some(Self { region: region.clone(), offset: offset as usize, bytes, log: log.cloned() })
    }

    /// All of a region.
    pub(super) fn whole(region: Region, log: Option<DirtyLog>) -> Self {
        let bytes = region.0.mapping.bytes();
        Self { region, offset: 0, bytes, log }
    }

    /// The region that contains it.
    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    /// Length in bytes.
    #[inline]
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Guest-physical address of the first byte.
    #[inline]
    pub fn guest_address(&self) -> u64 {
        self.region.guest_address() + self.offset as u64
    }

    /// True if the region's file has shrunk: the lost part reads as zeroes.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.region.is_lost()
    }

    /// True if its address in this process is a multiple of `alignment`.
    #[inline]
    pub fn is_aligned(&self, alignment: usize) -> bool {
        (self.as_ptr() as usize).is_multiple_of(alignment)
    }

    /// A part of it.
    ///
    /// # Panics
    /// Panics if the part is not inside, which is a bug, never caused by a guest.
    #[must_use]
    #[inline]
    pub fn part(&self, offset: usize, bytes: usize) -> Self {
        self.check(offset, bytes);
        Self { offset: self.offset + offset, bytes, ..self.clone() }
    }

    /// Copies the current contents, reading each byte once.
    ///
    /// # Panics
    /// Panics if the range is not inside.
    #[inline]
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let source = self.check(offset, into.len());
        // SAFETY: `check` has verified that this many bytes are mapped there.
        unsafe { volatile::copy_from(source, into) }
    }

    /// Overwrites the bytes with `from`, and marks them as dirty. Does nothing if the region is
    /// lost.
    ///
    /// # Panics
    /// Panics if the range is not inside.
    #[inline]
    pub fn write(&self, offset: usize, from: &[u8]) {
        let to = self.check(offset, from.len());
        if self.is_lost() {
            return;
        }
        // SAFETY: as in `read`.
        unsafe { volatile::copy_to(to, from) }
        self.mark(offset, from.len());
    }

    /// Sets `bytes` to `byte`, and marks them as dirty. Does nothing if the region is lost.
    ///
    /// # Panics
    /// Panics if the range is not inside.
    pub fn fill(&self, offset: usize, bytes: usize, byte: u8) {
        let to = self.check(offset, bytes);
        if self.is_lost() {
            return;
        }
        // SAFETY: as in `read`.
        unsafe { volatile::fill(to, bytes, byte) }
        self.mark(offset, bytes);
    }

    /// Prefetches the cache line at `offset` for reading. Another processor wrote it last, and
    /// fetching it takes as long as half a request. No effect if it is not inside.
    #[inline]
    pub fn prefetch(&self, offset: usize) {
        if offset < self.bytes {
            fetch::to_read(self.region.0.mapping.at(self.offset + offset));
        }
    }

    /// As [`GuestBytes::prefetch`], for writing.
    #[inline]
    pub fn prefetch_to_write(&self, offset: usize) {
        if offset < self.bytes {
            fetch::to_write(self.region.0.mapping.at(self.offset + offset));
        }
    }

    atomic!(load_u16, store_u16, u16, AtomicU16);
    atomic!(load_u32, store_u32, u32, AtomicU32);
    atomic!(load_u64, store_u64, u64, AtomicU64);

    /// Marks all of it as dirty, if there is a log: the kernel has written to it.
    #[inline]
    pub fn mark_dirty(&self) {
        self.mark(0, self.bytes);
    }

    fn mark(&self, offset: usize, bytes: usize) {
        if let Some(log) = &self.log {
            log.mark(self.guest_address() + offset as u64, bytes as u64);
        }
    }

    /// Address of the first byte in this process. The contents may change at any time: for the
    /// kernel, volatile and atomic accesses only, never for a reference.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.region.0.mapping.at(self.offset)
    }

    /// Address of `bytes` at `offset`, after checking that they are inside.
    #[inline]
    fn check(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{bytes} bytes at {offset} of {}", self.bytes);
        self.region.0.mapping.at(self.offset + offset)
    }

    /// Address of a `T` at `offset`, after checking that it is inside and aligned.
    #[inline]
    fn aligned<T>(&self, offset: usize) -> *mut T {
        let address = self.check(offset, size_of::<T>());
        assert!((address as usize).is_multiple_of(size_of::<T>()), "{offset} is not aligned");
        address.cast()
    }
}

/// Copies that the compiler neither repeats nor omits: each byte is accessed once. Uses words if
/// the guest's address allows it, and the processor's string instructions (inline assembly, opaque
/// to the compiler) for many bytes: for 4 KiB they take a third of the time, as long as `memcpy`.
mod volatile {
    const WORD: usize = size_of::<u64>();
    /// Number of bytes from which string instructions are faster.
    const MANY: usize = 1024;

    /// Iterates over `bytes` bytes at `address`: `word` gets the offset of each aligned word,
    /// `byte` those of the bytes before and after them.
    fn each(address: *const u8, bytes: usize, mut byte: impl FnMut(usize), word: impl FnMut(usize)) {
        let head = ((address as usize).wrapping_neg() % WORD).min(bytes);
        let tail = head + (bytes - head) / WORD * WORD;
        (0..head).for_each(&mut byte);
        (head..tail).step_by(WORD).for_each(word);
        (tail..bytes).for_each(&mut byte);
    }

    /// # Safety
    /// As many bytes as `into` has must be mapped at `from`.
    #[inline]
    pub(super) unsafe fn copy_from(from: *const u8, into: &mut [u8]) {
        let (bytes, into) = (into.len(), into.as_mut_ptr());
        // SAFETY: both have this many bytes.
        if bytes >= MANY && unsafe { string::copy(into, from, bytes) } {
            return;
        }
        // SAFETY: `each` yields only offsets below `bytes`, which both have, and words that are
        // aligned at `from`.
        let copy_byte = |at| unsafe { into.add(at).write(from.add(at).read_volatile()) };
        // SAFETY: as above.
        let copy_word = |at| unsafe {
            let word = from.add(at).cast::<u64>().read_volatile();
            into.add(at).cast::<u64>().write_unaligned(word);
        };
        each(from, bytes, copy_byte, copy_word);
    }

    /// # Safety
    /// As many bytes as `from` has must be mapped at `to`.
    #[inline]
    pub(super) unsafe fn copy_to(to: *mut u8, from: &[u8]) {
        let (bytes, from) = (from.len(), from.as_ptr());
        // SAFETY: both have this many bytes.
        if bytes >= MANY && unsafe { string::copy(to, from, bytes) } {
            return;
        }
        // SAFETY: as in `copy_from`.
        let copy_byte = |at| unsafe { to.add(at).write_volatile(from.add(at).read()) };
        // SAFETY: as in `copy_from`.
        let copy_word = |at| unsafe {
            let word = from.add(at).cast::<u64>().read_unaligned();
            to.add(at).cast::<u64>().write_volatile(word);
        };
        each(to, bytes, copy_byte, copy_word);
    }

    /// # Safety
    /// `bytes` must be mapped at `to`.
    pub(super) unsafe fn fill(to: *mut u8, bytes: usize, byte: u8) {
        // SAFETY: guaranteed by the caller.
        if bytes >= MANY && unsafe { string::fill(to, bytes, byte) } {
            return;
        }
        let value = u64::from_ne_bytes([byte; WORD]);
        // SAFETY: as in `copy_from`.
        let fill_byte = |at| unsafe { to.add(at).write_volatile(byte) };
        // SAFETY: as in `copy_from`.
        let fill_word = |at| unsafe { to.add(at).cast::<u64>().write_volatile(value) };
        each(to, bytes, fill_byte, fill_word);
    }

    /// String instructions. They are restartable: after a fault the registers point at the faulting
    /// byte, so the SIGBUS handler works here too.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    mod string {
        use std::arch::asm;

        /// # Safety
        /// `bytes` must be readable at `from` and writable at `to`, and must not overlap.
        pub(super) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> bool {
            // SAFETY: the caller guarantees both ranges; the direction flag is clear, by the ABI.
            unsafe {
                asm!(
                    "rep movsb",
                    inout("rcx") bytes => _,
                    inout("rdi") to => _,
                    inout("rsi") from => _,
                    options(nostack, preserves_flags)
                );
            }
            true
        }

        /// # Safety
        /// `bytes` must be writable at `to`.
        pub(super) unsafe fn fill(to: *mut u8, bytes: usize, byte: u8) -> bool {
            // SAFETY: as in `copy`.
            unsafe {
                asm!(
                    "rep stosb",
                    inout("rcx") bytes => _,
                    inout("rdi") to => _,
                    in("al") byte,
                    options(nostack, preserves_flags)
                );
            }
            true
        }
    }

    /// No string instructions on this target.
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    mod string {
        pub(super) unsafe fn copy(_: *mut u8, _: *const u8, _: usize) -> bool {
            false
        }

        pub(super) unsafe fn fill(_: *mut u8, _: usize, _: u8) -> bool {
            false
        }
    }
}

/// Prefetch hints. They never fault, whatever the address.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod fetch {
    use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};

    #[inline]
    pub(super) fn to_read(address: *const u8) {
        // SAFETY: a prefetch has no architectural effect.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }

    #[inline]
    pub(super) fn to_write(address: *const u8) {
        // SAFETY: a prefetch has no architectural effect.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) };
    }
}

/// No prefetch hints on this target.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod fetch {
    pub(super) fn to_read(_: *const u8) {}
    pub(super) fn to_write(_: *const u8) {}
}
