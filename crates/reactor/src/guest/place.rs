//! Bytes of a guest, and every way there is to touch them.

use std::sync::atomic::{AtomicU16, AtomicU32, AtomicU64, Ordering};

use super::{DirtyLog, Region};

/// Bytes in one region. Keeps the region mapped for as long as it is held.
#[derive(Clone, Debug)]
pub struct Place {
    region: Region,
    /// In the region.
    offset: usize,
    bytes: usize,
    log: Option<DirtyLog>,
}

/// An atomic load and store of an integer, little endian in memory as all of virtio is.
macro_rules! atomic {
    ($load:ident, $store:ident, $integer:ty, $atomic:ty) => {
        /// Loads a little-endian integer.
        ///
        /// # Panics
        /// If it is not inside, is not aligned, or `order` is none of a load.
        pub fn $load(&self, offset: usize, order: Ordering) -> $integer {
            let address = self.aligned::<$integer>(offset);
            // SAFETY: inside the mapping and aligned. The guest touches it with atomic accesses of
            // its own, or harms its own disk only.
            <$integer>::from_le(unsafe { <$atomic>::from_ptr(address) }.load(order))
        }

        /// Stores a little-endian integer, and records it as dirty.
        ///
        /// # Panics
        /// If it is not inside, is not aligned, or `order` is none of a store.
        pub fn $store(&self, offset: usize, value: $integer, order: Ordering) {
            let address = self.aligned::<$integer>(offset);
            // SAFETY: as for the load.
            unsafe { <$atomic>::from_ptr(address) }.store(value.to_le(), order);
            self.mark(offset, size_of::<$integer>());
        }
    };
}

impl Place {
    /// `bytes` from `offset` on of `region`; `None` if they are not inside.
    pub(super) fn within(region: &Region, offset: u64, bytes: usize, log: Option<&DirtyLog>) -> Option<Self> {
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

    /// The region that it is in.
    pub(super) fn region(&self) -> &Region {
        &self.region
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The guest-physical address of the first.
    pub fn guest_address(&self) -> u64 {
        self.region.guest_address() + self.offset as u64
    }

    /// Whether its region's file shrank under us: what was there is gone and reads as zeroes.
    pub fn is_lost(&self) -> bool {
        self.region.is_lost()
    }

    /// Whether it begins at a multiple of `alignment` in our memory.
    pub fn is_aligned(&self, alignment: usize) -> bool {
        (self.as_ptr() as usize).is_multiple_of(alignment)
    }

    /// A part of it.
    ///
    /// # Panics
    /// If that is not inside: a mistake of ours, never a guest's.
    #[must_use]
    pub fn part(&self, offset: usize, bytes: usize) -> Self {
        self.check(offset, bytes);
        Self { offset: self.offset + offset, bytes, ..self.clone() }
    }

    /// Copies what is there now, once.
    ///
    /// # Panics
    /// If that is not inside.
    pub fn read(&self, offset: usize, into: &mut [u8]) {
        let from = self.check(offset, into.len());
        // SAFETY: `check` has seen that so many bytes are mapped there.
        unsafe { volatile::copy_from(from, into) }
    }

    /// Copies `from` there, and records it as dirty. Does nothing where the region is lost.
    ///
    /// # Panics
    /// If that is not inside.
    pub fn write(&self, offset: usize, from: &[u8]) {
        let to = self.check(offset, from.len());
        if self.is_lost() {
            return;
        }
        // SAFETY: as in `read`.
        unsafe { volatile::copy_to(to, from) }
        self.mark(offset, from.len());
    }

    /// Makes `bytes` of it `byte`, and records them as dirty. Does nothing where the region is
    /// lost.
    ///
    /// # Panics
    /// If they are not inside.
    pub fn fill(&self, offset: usize, bytes: usize, byte: u8) {
        let to = self.check(offset, bytes);
        if self.is_lost() {
            return;
        }
        // SAFETY: as in `read`.
        unsafe { volatile::fill(to, bytes, byte) }
        self.mark(offset, bytes);
    }

    /// Has the processor fetch what is at `offset`, which is about to be read. Another processor
    /// wrote it last, and to get it from there takes as long as half a request. Nothing where that
    /// is not inside.
    pub fn prefetch(&self, offset: usize) {
        if offset < self.bytes {
            fetch::to_read(self.region.0.mapping.at(self.offset + offset));
        }
    }

    /// The same for what is about to be written.
    pub fn prefetch_to_write(&self, offset: usize) {
        if offset < self.bytes {
            fetch::to_write(self.region.0.mapping.at(self.offset + offset));
        }
    }

    atomic!(load_u16, store_u16, u16, AtomicU16);
    atomic!(load_u32, store_u32, u32, AtomicU32);
    atomic!(load_u64, store_u64, u64, AtomicU64);

    /// Records all of it as dirty, where that is asked for: the kernel has written to it.
    pub fn mark_dirty(&self) {
        self.mark(0, self.bytes);
    }

    fn mark(&self, offset: usize, bytes: usize) {
        if let Some(log) = &self.log {
            log.mark(self.guest_address() + offset as u64, bytes as u64);
        }
    }

    /// The address of its first byte in our memory. What is there changes at any time: it is for
    /// the kernel, for volatile and for atomic accesses, and never becomes a reference.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.region.0.mapping.at(self.offset)
    }

    /// The address of `bytes` at `offset`, which are inside.
    fn check(&self, offset: usize, bytes: usize) -> *mut u8 {
        let end = offset.checked_add(bytes);
        assert!(end.is_some_and(|end| end <= self.bytes), "{bytes} bytes at {offset} of {}", self.bytes);
        self.region.0.mapping.at(self.offset + offset)
    }

    /// The address of a `T` at `offset`, which is inside and aligned.
    fn aligned<T>(&self, offset: usize) -> *mut T {
        let address = self.check(offset, size_of::<T>());
        assert!((address as usize).is_multiple_of(size_of::<T>()), "{offset} is not aligned");
        address.cast()
    }
}

/// Copies that the compiler neither repeats nor takes back: each byte is read or written once. In
/// words where the guest's address allows it, and where there are many bytes by the processor's
/// string instructions: the compiler does not know what those do, and for 4 KiB they take a third
/// of the time, as long as `memcpy`.
mod volatile {
    const WORD: usize = size_of::<u64>();
    /// From so many bytes on the string instructions are faster.
    const MANY: usize = 1024;

    /// Goes over `bytes` bytes at `address`: `word` gets the offset of each aligned word, `byte`
    /// those of the bytes before and behind them.
    fn each(address: *const u8, bytes: usize, mut byte: impl FnMut(usize), word: impl FnMut(usize)) {
        let head = ((address as usize).wrapping_neg() % WORD).min(bytes);
        let tail = head + (bytes - head) / WORD * WORD;
        (0..head).for_each(&mut byte);
        (head..tail).step_by(WORD).for_each(word);
        (tail..bytes).for_each(&mut byte);
    }

    /// # Safety
    /// So many bytes as `into` has are mapped at `from`.
    pub(super) unsafe fn copy_from(from: *const u8, into: &mut [u8]) {
        let (bytes, into) = (into.len(), into.as_mut_ptr());
        // SAFETY: both have so many bytes.
        if bytes >= MANY && unsafe { string::copy(into, from, bytes) } {
            return;
        }
        // SAFETY: `each` names bytes below `bytes` alone, which both have, and words that are
        // aligned at `from`.
        let byte = |at| unsafe { into.add(at).write(from.add(at).read_volatile()) };
        // SAFETY: as above.
        let word = |at| unsafe {
            let word = from.add(at).cast::<u64>().read_volatile();
            into.add(at).cast::<u64>().write_unaligned(word);
        };
        each(from, bytes, byte, word);
    }

    /// # Safety
    /// So many bytes as `from` has are mapped at `to`.
    pub(super) unsafe fn copy_to(to: *mut u8, from: &[u8]) {
        let (bytes, from) = (from.len(), from.as_ptr());
        // SAFETY: both have so many bytes.
        if bytes >= MANY && unsafe { string::copy(to, from, bytes) } {
            return;
        }
        // SAFETY: as in `copy_from`.
        let byte = |at| unsafe { to.add(at).write_volatile(from.add(at).read()) };
        // SAFETY: as in `copy_from`.
        let word = |at| unsafe {
            let word = from.add(at).cast::<u64>().read_unaligned();
            to.add(at).cast::<u64>().write_volatile(word);
        };
        each(to, bytes, byte, word);
    }

    /// # Safety
    /// So many bytes are mapped at `to`.
    pub(super) unsafe fn fill(to: *mut u8, bytes: usize, byte: u8) {
        // SAFETY: as the caller says.
        if bytes >= MANY && unsafe { string::fill(to, bytes, byte) } {
            return;
        }
        let value = u64::from_ne_bytes([byte; WORD]);
        // SAFETY: as in `copy_from`.
        let byte = |at| unsafe { to.add(at).write_volatile(byte) };
        // SAFETY: as in `copy_from`.
        let word = |at| unsafe { to.add(at).cast::<u64>().write_volatile(value) };
        each(to, bytes, byte, word);
    }

    /// A fault in the middle leaves the registers at the byte in question, so SIGBUS is survived
    /// here too.
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    mod string {
        use std::arch::asm;

        /// # Safety
        /// So many bytes can be read at `from` and written at `to`, and do not overlap.
        pub(super) unsafe fn copy(to: *mut u8, from: *const u8, bytes: usize) -> bool {
            // SAFETY: it does what the caller allows; the direction is forward, as the ABI has it.
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
        /// So many bytes can be written at `to`.
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

    /// There are none.
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

/// Hints for the processor, which never fail, whatever the address is.
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod fetch {
    use std::arch::x86_64::{_MM_HINT_ET0, _MM_HINT_T0, _mm_prefetch};

    #[inline]
    pub(super) fn to_read(address: *const u8) {
        // SAFETY: a hint.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(address.cast()) };
    }

    #[inline]
    pub(super) fn to_write(address: *const u8) {
        // SAFETY: a hint.
        unsafe { _mm_prefetch::<_MM_HINT_ET0>(address.cast()) };
    }
}

/// There are none.
#[cfg(not(all(target_arch = "x86_64", not(miri))))]
mod fetch {
    pub(super) fn to_read(_: *const u8) {}
    pub(super) fn to_write(_: *const u8) {}
}
