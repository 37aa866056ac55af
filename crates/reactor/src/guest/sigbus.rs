//! Handler for SIGBUS, which the kernel raises if a front end's file shrinks while it is mapped.
//!
//! An access beyond the file's new end raises SIGBUS, which would end the process and with it the
//! disks of all other guests. The handler checks if the address is in a registered mapping. If so,
//! it replaces that mapping's pages from the faulting one to its end by zeroes, marks it as lost,
//! and returns, so that the access is repeated. All other signals go to the previous handler.
//!
//! Replacing pages splits a mapping, and the number of mappings of a process is limited. At the
//! limit the whole mapping is replaced, which needs no additional one. Beyond the limit the kernel
//! refuses any new mapping, so a spare one is kept and released in that case.
//!
//! A signal handler may interrupt any code, so it takes no lock and allocates no memory: it walks a
//! list whose slots are never freed, and reads each by the protocol of a sequence lock. The slot
//! that it searches cannot change, because the interrupted thread is using that mapping. Slots that
//! change at that moment are skipped.

use std::{
    ffi::{c_int, c_void},
    mem::MaybeUninit,
    ptr::{null, null_mut},
    sync::{
        Once, OnceLock,
        atomic::{
            AtomicBool, AtomicPtr, AtomicUsize,
            Ordering::{AcqRel, Acquire, Relaxed, Release},
            fence,
        },
    },
};

/// Slots allocated together. Most front ends map one or two regions.
const SLOTS: usize = 64;

/// A registered mapping, or a free slot.
#[derive(Debug)]
struct MappingSlot {
    taken: AtomicBool,
    /// Sequence number; odd while the fields below change.
    version: AtomicUsize,
    /// Address of the first byte.
    start: AtomicUsize,
    /// Length in bytes; 0 if free.
    length: AtomicUsize,
    /// Page size of the mapping in bytes.
    page: AtomicUsize,
    lost: AtomicBool,
}

struct SlotChunk {
    slots: [MappingSlot; SLOTS],
    next: AtomicPtr<SlotChunk>,
}

impl MappingSlot {
    const fn new() -> Self {
        Self {
            taken: AtomicBool::new(false),
            version: AtomicUsize::new(0),
            start: AtomicUsize::new(0),
            length: AtomicUsize::new(0),
            page: AtomicUsize::new(0),
            lost: AtomicBool::new(false),
        }
    }

    /// Only for the thread that has set `taken`.
    fn set(&self, start: usize, length: usize, page: usize) {
        let version = self.version.load(Relaxed);
        self.version.store(version.wrapping_add(1), Relaxed);
        fence(Release);
        self.start.store(start, Relaxed);
        self.length.store(length, Relaxed);
        self.page.store(page, Relaxed);
        self.version.store(version.wrapping_add(2), Release);
    }

    /// Start, length and page size, unless they are changing.
    fn get(&self) -> Option<(usize, usize, usize)> {
        let version = self.version.load(Acquire);
        let mapping = (self.start.load(Relaxed), self.length.load(Relaxed), self.page.load(Relaxed));
        fence(Acquire);
        (version.is_multiple_of(2) && self.version.load(Relaxed) == version).then_some(mapping)
    }
}

impl SlotChunk {
    const fn new() -> Self {
        Self { slots: [const { MappingSlot::new() }; SLOTS], next: AtomicPtr::new(null_mut()) }
    }

    /// The next chunk.
    fn next(&self) -> Option<&'static Self> {
        // SAFETY: chunks in the list are leaked, so they live as long as the process.
        unsafe { self.next.load(Acquire).as_ref() }
    }
}

static FIRST: SlotChunk = SlotChunk::new();

/// Number of registered mappings that are lost.
static LOST: AtomicUsize = AtomicUsize::new(0);

/// True if any registered mapping is lost. Cheap enough for every access.
pub(super) fn is_any_lost() -> bool {
    LOST.load(Relaxed) > 0
}

/// A mapping that is registered until [`MappingRegistration::unregister`].
#[derive(Debug)]
pub(super) struct MappingRegistration(&'static MappingSlot);

impl MappingRegistration {
    /// True if a part of it is lost.
    pub(super) fn is_lost(&self) -> bool {
        self.0.lost.load(Relaxed)
    }

    /// Unregisters the mapping, before its addresses are reused. Call it once.
    pub(super) fn unregister(&mut self) {
        self.0.set(0, 0, 0);
        if self.0.lost.swap(false, Relaxed) {
            LOST.fetch_sub(1, Relaxed);
        }
        self.0.taken.store(false, Release);
    }
}

/// Registers the mapping of `length` bytes at `start`, which begins with a page of `page` bytes.
pub(super) fn register(start: usize, length: usize, page: usize) -> MappingRegistration {
    install();
    let mut chunk = &FIRST;
    loop {
        let free = chunk.slots.iter().find(|slot| {
            !slot.taken.load(Relaxed) && slot.taken.compare_exchange(false, true, AcqRel, Relaxed).is_ok()
        });
        if let Some(slot) = free {
            slot.set(start, length, page);
            return MappingRegistration(slot);
        }
        chunk = chunk.next().unwrap_or_else(|| append(chunk));
    }
}

/// Appends a new chunk after `last`, or returns the one that another thread has appended meanwhile.
fn append(last: &SlotChunk) -> &'static SlotChunk {
    let new = Box::into_raw(Box::new(SlotChunk::new()));
    match last.next.compare_exchange(null_mut(), new, AcqRel, Acquire) {
        // SAFETY: reachable from the list from now on, and never freed.
        Ok(_) => unsafe { &*new },
        Err(other) => {
            // SAFETY: created above, and not visible to any other thread.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: as in `SlotChunk::next`.
            unsafe { &*other }
        }
    }
}

/// The previous action for SIGBUS.
static PREVIOUS_ACTION: OnceLock<libc::sigaction> = OnceLock::new();

/// Address of an unused page, or 0. Shared, so that the kernel never merges it with a neighbouring
/// mapping.
static SPARE: AtomicUsize = AtomicUsize::new(0);

fn install() {
    static INSTALLED: Once = Once::new();
    INSTALLED.call_once(|| {
        let flags = libc::MAP_SHARED | libc::MAP_ANONYMOUS;
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let spare = unsafe { libc::mmap(null_mut(), 1, libc::PROT_NONE, flags, -1, 0) };
        if spare != libc::MAP_FAILED {
            SPARE.store(spare as usize, Relaxed);
        }
        let mut previous = MaybeUninit::zeroed();
        // SAFETY: only queries; a zeroed sigaction is valid.
        let previous = unsafe {
            libc::sigaction(libc::SIGBUS, null(), previous.as_mut_ptr());
            previous.assume_init()
        };
        // Before the new handler is installed, which reads it.
        PREVIOUS_ACTION.get_or_init(|| previous);
        // SAFETY: a zeroed sigaction is valid: no flags, empty mask.
        let mut action: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        action.sa_sigaction = handle as *const () as usize;
        // SA_ONSTACK because the previous handler may need the alternate stack: the standard
        // library's reports stack overflows.
        action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler is async-signal-safe, as its comments explain.
        let result = unsafe { libc::sigaction(libc::SIGBUS, &raw const action, null_mut()) };
        debug_assert_eq!(result, 0);
    });
}

/// Code of SIGBUS for a page with a hardware memory error (`BUS_MCEERR_AR` of `sigaction(2)`).
const BROKEN_PAGE: c_int = 4;

extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`, and these codes include an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if [libc::BUS_ADRERR, BROKEN_PAGE].contains(&code) && replace_by_zeroes(address) {
        return;
    }
    // SAFETY: the arguments are those that the kernel passed.
    unsafe { call_previous(signal, info, context) }
}

/// Replaces a registered mapping's pages by zeroes, from that of `address` on. Returns false if
/// there is no such mapping, or the kernel has no memory.
fn replace_by_zeroes(address: usize) -> bool {
    let mut chunk = Some(&FIRST);
    while let Some(SlotChunk { slots, next: _ }) = chunk {
        for slot in slots {
            let Some((start, length, page)) = slot.get() else { continue };
            let Some(offset) = address.checked_sub(start).filter(|offset| *offset < length) else { continue };
            let offset = offset - offset % page;
            // SAFETY: errno belongs to the interrupted code, and is restored below.
            let errno = unsafe { libc::__errno_location() };
            // SAFETY: the address of this thread's errno is valid.
            let saved_errno = unsafe { *errno };
            if !slot.lost.swap(true, Relaxed) {
                LOST.fetch_add(1, Relaxed);
            }
            // SAFETY: the pages belong to the mapping, which the interrupted thread is using, so it
            // is not unmapped meanwhile. There are no references to them.
            let replaced = unsafe {
                map_zeroes(start + offset, length - offset) || {
                    release_spare();
                    map_zeroes(start, length)
                }
            };
            // SAFETY: the address of this thread's errno is valid.
            unsafe { *errno = saved_errno };
            return replaced;
        }
        chunk = chunk.and_then(SlotChunk::next);
    }
    false
}

/// Maps zeroes, with the access rights of a registered mapping, over existing pages; returns false
/// if the kernel refuses.
///
/// # Safety
/// The pages must be those of a registered mapping that is not unmapped meanwhile.
unsafe fn map_zeroes(start: usize, length: usize) -> bool {
    // SAFETY: guaranteed by the caller. mmap is a plain system call and takes no lock of the C
    // library.
    let result = unsafe {
        libc::mmap(
            start as *mut c_void,
            length,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | libc::MAP_FIXED,
            -1,
            0,
        )
    };
    result != libc::MAP_FAILED
}

fn release_spare() {
    let spare = SPARE.swap(0, Relaxed);
    if spare != 0 {
        // SAFETY: mapped by `install` and unused. munmap is a plain system call too.
        unsafe { libc::munmap(spare as *mut c_void, 1) };
    }
}

/// Executes the previous action.
///
/// # Safety
/// The arguments must be those that the kernel passed to the handler.
unsafe fn call_previous(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let (handler, flags) =
        PREVIOUS_ACTION.get().map_or((libc::SIG_DFL, 0), |action| (action.sa_sigaction, action.sa_flags));
    match handler {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: `info` is valid: the caller passes the kernel's.
            let sent = unsafe { (*info).si_code } <= 0;
            if sent && handler == libc::SIG_IGN {
                return;
            }
            // SAFETY: a zeroed sigaction is the default action. A fault recurs on return and then
            // ends the process; a signal sent by a process must be raised again.
            unsafe {
                let default: libc::sigaction = MaybeUninit::zeroed().assume_init();
                libc::sigaction(signal, &raw const default, null_mut());
                if sent {
                    libc::raise(signal);
                }
            }
        }
        handler if flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with SA_SIGINFO the handler has this signature.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without SA_SIGINFO the handler has this signature.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_reused_and_allocated_on_demand() {
        // Addresses without a mapping: slots are only looked up here.
        let round = || -> Vec<MappingRegistration> {
            (0..3 * SLOTS).map(|page| register(page << 12, 1, 4096)).collect()
        };
        let chunks = || std::iter::successors(Some(&FIRST), |chunk| chunk.next()).count();
        for _ in 0..4 {
            for (page, mut registration) in round().into_iter().enumerate() {
                assert_eq!(registration.0.get(), Some((page << 12, 1, 4096)));
                registration.unregister();
                assert_eq!(registration.0.length.load(Relaxed), 0);
            }
        }
        // Concurrent tests use some slots.
        assert!((3..=4).contains(&chunks()), "{} chunks", chunks());
    }

    #[test]
    fn unregistered_address_is_ignored() {
        assert!(!replace_by_zeroes(8));
    }
}
