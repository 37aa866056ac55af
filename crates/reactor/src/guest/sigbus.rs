//! What happens when a front end's file shrinks while we have it mapped.
//!
//! The kernel answers an access behind a file's new end with SIGBUS, which would end the process
//! and with it the disks of all other guests. The handler here looks whether the address is in a
//! mapping that is watched. If so, zeroes take the place of that mapping's pages from the faulting
//! one to its end, it is marked as lost, and the access is done again. Everything else goes to the
//! handler that was there before.
//!
//! That divides a mapping, and a process has a number of them at most. At that number the whole
//! mapping becomes zeroes, which takes no more of them. The kernel maps nothing at all where one is
//! there beyond the number, so one is kept to be given up then.
//!
//! A handler may interrupt anything, so it takes no lock and no memory: it walks a list whose slots
//! are never freed, and reads each as under a sequence lock. The slot it looks for cannot change
//! under it, as the thread that was interrupted is using that very mapping. Others may change, and
//! are passed over then.

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

/// Slots that come together. Most front ends map one region or two.
const SLOTS: usize = 64;

/// A mapping that is watched, or room for one.
#[derive(Debug)]
struct Slot {
    taken: AtomicBool,
    /// Odd while the rest changes.
    version: AtomicUsize,
    /// Address of the first byte.
    start: AtomicUsize,
    /// In bytes; 0 where nothing is watched.
    length: AtomicUsize,
    /// In what it is mapped, in bytes.
    page: AtomicUsize,
    lost: AtomicBool,
}

struct Chunk {
    slots: [Slot; SLOTS],
    next: AtomicPtr<Chunk>,
}

impl Slot {
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

    /// Only by whoever has taken it.
    fn set(&self, start: usize, length: usize, page: usize) {
        let version = self.version.load(Relaxed);
        self.version.store(version.wrapping_add(1), Relaxed);
        fence(Release);
        self.start.store(start, Relaxed);
        self.length.store(length, Relaxed);
        self.page.store(page, Relaxed);
        self.version.store(version.wrapping_add(2), Release);
    }

    /// Start, length and page, unless they are changing.
    fn get(&self) -> Option<(usize, usize, usize)> {
        let version = self.version.load(Acquire);
        let seen = (self.start.load(Relaxed), self.length.load(Relaxed), self.page.load(Relaxed));
        fence(Acquire);
        (version.is_multiple_of(2) && self.version.load(Relaxed) == version).then_some(seen)
    }
}

impl Chunk {
    const fn new() -> Self {
        Self { slots: [const { Slot::new() }; SLOTS], next: AtomicPtr::new(null_mut()) }
    }

    /// The chunk behind it.
    fn next(&self) -> Option<&'static Self> {
        // SAFETY: what was put there was leaked, so it lives as long as the process.
        unsafe { self.next.load(Acquire).as_ref() }
    }
}

static FIRST: Chunk = Chunk::new();

/// Watched mappings that are lost.
static LOST: AtomicUsize = AtomicUsize::new(0);

/// Whether any watched mapping may be lost. Costs next to nothing.
pub(super) fn is_any_lost() -> bool {
    LOST.load(Relaxed) > 0
}

/// A mapping that is watched until [`Watch::end`].
#[derive(Debug)]
pub(super) struct Watch(&'static Slot);

impl Watch {
    /// Whether a part of it is gone.
    pub(super) fn is_lost(&self) -> bool {
        self.0.lost.load(Relaxed)
    }

    /// Its addresses are about to be somebody else's. To be called once.
    pub(super) fn end(&mut self) {
        self.0.set(0, 0, 0);
        if self.0.lost.swap(false, Relaxed) {
            LOST.fetch_sub(1, Relaxed);
        }
        self.0.taken.store(false, Release);
    }
}

/// Watches the mapping of `length` bytes at `start`, which was made in pages of `page` bytes and
/// begins with one.
pub(super) fn watch(start: usize, length: usize, page: usize) -> Watch {
    install();
    let mut chunk = &FIRST;
    loop {
        let free = chunk.slots.iter().find(|slot| {
            !slot.taken.load(Relaxed) && slot.taken.compare_exchange(false, true, AcqRel, Relaxed).is_ok()
        });
        if let Some(slot) = free {
            slot.set(start, length, page);
            return Watch(slot);
        }
        chunk = chunk.next().unwrap_or_else(|| append(chunk));
    }
}

/// A new chunk behind `last`, or the one that another thread has put there meanwhile.
fn append(last: &Chunk) -> &'static Chunk {
    let new = Box::into_raw(Box::new(Chunk::new()));
    match last.next.compare_exchange(null_mut(), new, AcqRel, Acquire) {
        // SAFETY: it is reached from the list from now on and never freed.
        Ok(_) => unsafe { &*new },
        Err(other) => {
            // SAFETY: made above, and nobody else has seen it.
            drop(unsafe { Box::from_raw(new) });
            // SAFETY: as in `Chunk::next`.
            unsafe { &*other }
        }
    }
}

/// What was done about SIGBUS before we came.
static BEFORE: OnceLock<libc::sigaction> = OnceLock::new();

/// The address of a page that nobody uses, or 0. Shared, so that it never becomes part of a
/// neighbouring mapping.
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
        let mut before = MaybeUninit::zeroed();
        // SAFETY: it only asks, and a sigaction of zeroes is a valid one.
        let before = unsafe {
            libc::sigaction(libc::SIGBUS, null(), before.as_mut_ptr());
            before.assume_init()
        };
        // Before ours is there, as ours looks at it.
        BEFORE.get_or_init(|| before);
        // SAFETY: a sigaction of zeroes is a valid one: no flags, nothing blocked.
        let mut ours: libc::sigaction = unsafe { MaybeUninit::zeroed().assume_init() };
        ours.sa_sigaction = handle as *const () as usize;
        // The handler before us may need the other stack: the standard library's tells of a stack
        // that has overflown.
        ours.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
        // SAFETY: the handler does only what a handler may, as its comments say.
        let result = unsafe { libc::sigaction(libc::SIGBUS, &raw const ours, null_mut()) };
        debug_assert_eq!(result, 0);
    });
}

/// The code of SIGBUS for a page that the processor found to be broken, while it was read
/// (`BUS_MCEERR_AR` of `sigaction(2)`).
const BROKEN_PAGE: c_int = 4;

extern "C" fn handle(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    // SAFETY: the kernel passes a valid `siginfo_t`, and these codes come with an address.
    let (code, address) = unsafe { ((*info).si_code, (*info).si_addr() as usize) };
    if [libc::BUS_ADRERR, BROKEN_PAGE].contains(&code) && replace(address) {
        return;
    }
    // SAFETY: this is what the kernel passed.
    unsafe { pass_on(signal, info, context) }
}

/// Puts zeroes in place of a watched mapping's pages from that of `address` on. False: there is no
/// such mapping, or the kernel has no memory for it.
fn replace(address: usize) -> bool {
    let mut chunk = Some(&FIRST);
    while let Some(Chunk { slots, next: _ }) = chunk {
        for slot in slots {
            let Some((start, length, page)) = slot.get() else { continue };
            let Some(offset) = address.checked_sub(start).filter(|offset| *offset < length) else { continue };
            let offset = offset - offset % page;
            // SAFETY: errno belongs to the code that was interrupted, and is put back.
            let errno = unsafe { libc::__errno_location() };
            // SAFETY: as above.
            let kept = unsafe { *errno };
            if !slot.lost.swap(true, Relaxed) {
                LOST.fetch_add(1, Relaxed);
            }
            // SAFETY: these pages are the mapping's, which is in use by the interrupted thread, so
            // nobody unmaps it meanwhile. Nobody has references to them.
            let replaced = unsafe {
                zeroes(start + offset, length - offset) || {
                    give_up_spare();
                    zeroes(start, length)
                }
            };
            // SAFETY: as above.
            unsafe { *errno = kept };
            return replaced;
        }
        chunk = chunk.and_then(Chunk::next);
    }
    false
}

/// Maps zeroes, with the rights of a watched mapping, over what is there; false if the kernel
/// refuses.
///
/// # Safety
/// These are pages of a watched mapping that nobody unmaps meanwhile.
unsafe fn zeroes(start: usize, length: usize) -> bool {
    // SAFETY: as the caller says. mmap is a mere system call here and takes no lock of the C
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

fn give_up_spare() {
    let spare = SPARE.swap(0, Relaxed);
    if spare != 0 {
        // SAFETY: mapped by `install`, and nobody has used it. munmap is a mere system call, too.
        unsafe { libc::munmap(spare as *mut c_void, 1) };
    }
}

/// Does what would have been done without us.
///
/// # Safety
/// With what the kernel passed to the handler.
unsafe fn pass_on(signal: c_int, info: *mut libc::siginfo_t, context: *mut c_void) {
    let (handler, flags) = BEFORE.get().map_or((libc::SIG_DFL, 0), |it| (it.sa_sigaction, it.sa_flags));
    match handler {
        libc::SIG_DFL | libc::SIG_IGN => {
            // SAFETY: as above.
            let sent = unsafe { (*info).si_code } <= 0;
            if sent && handler == libc::SIG_IGN {
                return;
            }
            // SAFETY: a sigaction of zeroes is the default one. A fault comes again when we return
            // and then ends the process; a signal that was sent has to be sent again.
            unsafe {
                let default: libc::sigaction = MaybeUninit::zeroed().assume_init();
                libc::sigaction(signal, &raw const default, null_mut());
                if sent {
                    libc::raise(signal);
                }
            }
        }
        handler if flags & libc::SA_SIGINFO != 0 => {
            // SAFETY: with this flag it is such a function.
            let handler: extern "C" fn(c_int, *mut libc::siginfo_t, *mut c_void) =
                unsafe { std::mem::transmute(handler) };
            handler(signal, info, context);
        }
        handler => {
            // SAFETY: without that flag it is such a function.
            let handler: extern "C" fn(c_int) = unsafe { std::mem::transmute(handler) };
            handler(signal);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_used_again_and_more_come_where_they_are_needed() {
        // Addresses that nothing is mapped at: these are only looked up.
        let round = || -> Vec<Watch> { (0..3 * SLOTS).map(|page| watch(page << 12, 1, 4096)).collect() };
        let chunks = || std::iter::successors(Some(&FIRST), |chunk| chunk.next()).count();
        for _ in 0..4 {
            for (page, mut watch) in round().into_iter().enumerate() {
                assert_eq!(watch.0.get(), Some((page << 12, 1, 4096)));
                watch.end();
                assert_eq!(watch.0.length.load(Relaxed), 0);
            }
        }
        // Tests beside this one have a few.
        assert!((3..=4).contains(&chunks()), "{} chunks", chunks());
    }

    #[test]
    fn an_address_of_nobody_is_left_alone() {
        assert!(!replace(8));
    }
}
