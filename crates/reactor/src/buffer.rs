//! Aligned, pooled memory for the data of requests.
//!
//! Every buffer begins at a multiple of [`ALIGNMENT`], as O_DIRECT requires. It comes from a pool
//! of the thread: allocating and freeing are a pop and a push. A buffer can be split without
//! copying, so that one merged read can answer several requests.
//!
//! ```text
//!   block (power of two, aligned)     ▕────────────────────────────────▏
//!   two `IoBuffer`s (disjoint views)   ▕──── a ────▏▕──────── b ──────▏
//! ```
//!
//! A buffer may also be a *view* of shared bytes that do not change while it exists. In this way
//! data in memory reaches a client without a copy.
//!
//! A [frozen](IoBuffer::freeze) buffer is immutable and can be read by all threads.
//!
//! Data in a guest's memory is not a buffer: see [`Segment`].
//!
//! Never hands out uninitialised memory: new blocks are zeroed. A reused block holds *old data*, so
//! the code that allocates a buffer must fill all of it before other code reads it (debug builds
//! poison it). Storages zero the part that they cannot fill.

mod segments;
pub mod zero;

use std::{
    alloc::{Layout, alloc_zeroed, dealloc, handle_alloc_error},
    cell::RefCell,
    num::NonZeroUsize,
    ops::{Deref, DerefMut, Range},
    ptr::NonNull,
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use nix::sys::mman::{MapFlags, MmapAdvise, ProtFlags, madvise, mmap_anonymous, munmap};

pub use self::segments::{GuestCopies, ReadTarget, Segment, Segments, guest_copies};

/// Alignment of a buffer's first byte: the largest logical block size of Linux block devices.
pub const ALIGNMENT: usize = 4096;

/// Blocks from 4 KiB (2^12) to 32 MiB (2^25) are pooled by size.
const MIN_CLASS: u32 = 12;
const MAX_CLASS: u32 = 25;
const CLASSES: usize = (MAX_CLASS - MIN_CLASS + 1) as usize;
/// Blocks of up to 16 KiB (2^14) are parts of a slab.
const MAX_SLAB_CLASS: u32 = 14;
const SLAB_BYTES: usize = 64 << 10;

/// Maximum memory that a thread keeps for reuse, in bytes. Deep queues of small requests fit;
/// bursts of huge ones are returned to the allocator.
pub const POOL_BYTES: usize = 16 << 20;

/// The current maximum: see [`set_pool_limit`].
static POOL_LIMIT: AtomicUsize = AtomicUsize::new(POOL_BYTES);

/// Limits the memory that each thread keeps for reuse. Freed allocations of 128 KiB and more are
/// then returned to the system at once.
pub fn set_pool_limit(bytes: usize) {
    POOL_LIMIT.store(bytes.min(POOL_BYTES), Relaxed);
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt changes how later allocations are made and accesses no existing one.
    unsafe {
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_BYTES);
    }
}

/// Size in bytes above which an allocation is a separate mapping. It is glibc's initial value,
/// which glibc raises to the largest size freed so far. With blocks of 2 and 4 MiB alternately, its
/// arenas then kept 420 MB, of which at most 60 MB were in use.
#[cfg(target_env = "gnu")]
const MAPPED_BYTES: libc::c_int = 128 << 10;

/// Returns unused memory to the system: this thread's pooled buffers, and the allocator's free
/// memory. Takes about a millisecond, and later allocations are slower.
pub fn trim() {
    let free_buffers = POOL.with_borrow_mut(|pool| {
        pool.bytes = 0;
        std::mem::take(&mut pool.free)
    });
    drop(free_buffers);
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim may be called at any time and accesses free memory only.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Memory of a buffer. Freed when its last [`IoBuffer`] is dropped, unless the pool keeps it.
struct BufferBlock {
    memory: NonNull<u8>,
    layout: Layout,
    /// The mapping that it is a part of; `None` if it is an allocation.
    slab: Option<Arc<BufferSlab>>,
}

/// A mapping of [`SLAB_BYTES`] that small blocks of one size share. An allocator needs two pages
/// for an aligned block of one page, because its header is in the page before. A slab needs one
/// page for each block that was used.
struct BufferSlab {
    memory: NonNull<u8>,
}

// SAFETY: plain memory without thread affinity, which only the blocks access.
unsafe impl Send for BufferSlab {}
// SAFETY: as above; the slab itself is never accessed.
unsafe impl Sync for BufferSlab {}

impl BufferSlab {
    fn new() -> Arc<Self> {
        let length = NonZeroUsize::new(SLAB_BYTES).expect("a constant above zero");
        // SAFETY: a new anonymous mapping at an address of the kernel's choice replaces nothing.
        let mapping = unsafe {
            mmap_anonymous(None, length, ProtFlags::PROT_READ | ProtFlags::PROT_WRITE, MapFlags::MAP_PRIVATE)
        };
        let layout = Layout::from_size_align(SLAB_BYTES, ALIGNMENT).expect("a constant power of two");
        let memory = mapping.unwrap_or_else(|_| handle_alloc_error(layout));
        Arc::new(Self { memory: memory.cast() })
    }

    /// The blocks of a new slab.
    fn blocks(class: u32) -> impl DoubleEndedIterator<Item = BufferBlock> {
        let slab = Self::new();
        let layout = block_layout(class);
        (0..SLAB_BYTES).step_by(layout.size()).map(move |start| BufferBlock {
            // SAFETY: `start` is inside the mapping.
            memory: unsafe { slab.memory.add(start) },
            layout,
            slab: Some(Arc::clone(&slab)),
        })
    }
}

impl Drop for BufferSlab {
    fn drop(&mut self) {
        // SAFETY: mapped in `new` with this length, and no block refers to it.
        if unsafe { munmap(self.memory.cast(), SLAB_BYTES) }.is_err() {
            // The process has too many mappings to split one: at least the pages are returned.
            // SAFETY: as above.
            let _ = unsafe { madvise(self.memory.cast(), SLAB_BYTES, MmapAdvise::MADV_DONTNEED) };
        }
    }
}

fn block_layout(class: u32) -> Layout {
    Layout::from_size_align(1 << class, ALIGNMENT).expect("a power of two of at most 32 MiB")
}

impl BufferBlock {
    fn with_layout(layout: Layout) -> Self {
        // SAFETY: the layout's size is never zero: `class_of` rounds up to at least 4 KiB.
        let memory = unsafe { alloc_zeroed(layout) };
        let memory = NonNull::new(memory).unwrap_or_else(|| handle_alloc_error(layout));
        Self { memory, layout, slab: None }
    }
}

impl Drop for BufferBlock {
    fn drop(&mut self) {
        if let Some(slab) = &self.slab {
            // Other blocks keep the mapping, so this one's pages are returned by themselves.
            if Arc::strong_count(slab) > 1 {
                // SAFETY: the pages are this block's alone, and no `IoBuffer` refers to it.
                let _ = unsafe { madvise(self.memory.cast(), self.layout.size(), MmapAdvise::MADV_DONTNEED) };
            }
            return;
        }
        // SAFETY: allocated in `with_layout` with the same layout, and no `IoBuffer` refers to it.
        unsafe { dealloc(self.memory.as_ptr(), self.layout) }
    }
}

struct BufferPool {
    free: [Vec<Rc<BufferBlock>>; CLASSES],
    bytes: usize,
}

impl BufferPool {
    fn take(&mut self, class: u32) -> Option<Rc<BufferBlock>> {
        let block = self.free[(class - MIN_CLASS) as usize].pop()?;
        self.bytes -= block.layout.size();
        Some(block)
    }

    /// Keeps an unreferenced block, or frees it if the pool is full.
    fn put(&mut self, block: Rc<BufferBlock>) {
        let size = block.layout.size();
        if self.bytes + size <= POOL_LIMIT.load(Relaxed) {
            self.bytes += size;
            self.free[(class_of(size) - MIN_CLASS) as usize].push(block);
        }
    }

    /// A block of new memory. The other blocks of its slab are kept.
    fn new_block(&mut self, class: u32) -> Rc<BufferBlock> {
        // Without room for the other blocks of a slab, most of it would be mapped in vain.
        if class > MAX_SLAB_CLASS || self.bytes + SLAB_BYTES > POOL_LIMIT.load(Relaxed) {
            return Rc::new(BufferBlock::with_layout(block_layout(class)));
        }
        let mut blocks = BufferSlab::blocks(class).map(Rc::new);
        let first = blocks.next().expect("a slab has several blocks");
        // In reverse, so that the lowest address is the next to be used.
        blocks.rev().for_each(|block| self.put(block));
        first
    }
}

thread_local! {
    static POOL: RefCell<BufferPool> = const { RefCell::new(BufferPool { free: [const { Vec::new() }; CLASSES], bytes: 0 }) };
}

fn class_of(len: usize) -> u32 {
    len.next_power_of_two().trailing_zeros().max(MIN_CLASS)
}

/// Owned bytes, aligned to [`ALIGNMENT`] unless advanced, split off or a [view](IoBuffer::view_of).
///
/// Not `Send`: it returns to the pool of its thread.
pub struct IoBuffer {
    bytes: BufferMemory,
    start: usize,
    len: usize,
    /// True if nothing was written since it was filled with zeroes.
    is_zero: bool,
}

/// Memory that a buffer is a view of.
#[derive(Clone)]
enum BufferMemory {
    /// A block; views of different buffers do not overlap. `Some` until dropped; an `Option` so
    /// that `drop` can move it into the pool.
    Own(Option<Rc<BufferBlock>>),
    SharedSlice(Arc<[u8]>),
    Frozen(Arc<FrozenBuffer>),
}

impl IoBuffer {
    /// `len` bytes with unspecified (old) contents. The caller must fill all of it.
    pub fn new(len: usize) -> Self {
        let class = class_of(len);
        if class > MAX_CLASS {
            let layout =
                Layout::from_size_align(len, ALIGNMENT).expect("request lengths are far below isize::MAX");
            return Self::whole(Rc::new(BufferBlock::with_layout(layout)), len);
        }
        POOL.with_borrow_mut(|pool| match pool.take(class) {
            None => Self::whole(pool.new_block(class), len),
            Some(block) => {
                let mut reused = Self::whole(block, len);
                if cfg!(debug_assertions) {
                    // Makes a storage that forgets to fill it visible in every test of data.
                    reused.fill(0xee);
                }
                reused
            }
        })
    }

    /// A buffer over the first `len` bytes of a block without other references.
    fn whole(block: Rc<BufferBlock>, len: usize) -> Self {
        Self { bytes: BufferMemory::Own(Some(block)), start: 0, len, is_zero: false }
    }

    /// A view of `range`, without copying. The bytes do not change while the buffer exists; writing
    /// to it makes a copy first.
    ///
    /// # Panics
    /// Panics if the range is not inside `bytes`.
    pub fn view_of(bytes: &Arc<[u8]>, range: Range<usize>) -> Self {
        assert!(range.start <= range.end && range.end <= bytes.len(), "{range:?} of {} bytes", bytes.len());
        Self {
            bytes: BufferMemory::SharedSlice(Arc::clone(bytes)),
            start: range.start,
            len: range.len(),
            is_zero: false,
        }
    }

    /// A view of a frozen buffer, without copying; writing to it makes a copy first.
    pub fn view_of_frozen(bytes: &Arc<FrozenBuffer>) -> Self {
        Self { bytes: BufferMemory::Frozen(Arc::clone(bytes)), start: 0, len: bytes.len(), is_zero: false }
    }

    /// `len` zero bytes.
    pub fn zeroed(len: usize) -> Self {
        let mut buffer = Self::new(len);
        buffer.fill(0);
        buffer.known_zero()
    }

    /// Marks the bytes as zero, which the caller must ensure.
    #[must_use]
    pub fn known_zero(mut self) -> Self {
        self.is_zero = true;
        self
    }

    /// True if all bytes are known to be zero without reading them. Bytes of other buffers may be
    /// zero too.
    pub fn is_known_zero(&self) -> bool {
        self.is_zero
    }

    /// A copy of `bytes`.
    pub fn copy_of(bytes: &[u8]) -> Self {
        let mut buffer = Self::new(bytes.len());
        buffer.copy_from_slice(bytes);
        buffer
    }

    /// Length in bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// True if the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Keeps the first `at` bytes and returns the rest, without copying.
    ///
    /// # Panics
    /// Panics if `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        assert!(at <= self.len, "split at {at} of a buffer of {} bytes", self.len);
        let rest = Self {
            bytes: self.bytes.clone(),
            start: self.start + at,
            len: self.len - at,
            is_zero: self.is_zero,
        };
        self.len = at;
        rest
    }

    /// Removes the bytes from `len` on; no effect if there are fewer.
    pub fn truncate(&mut self, len: usize) {
        self.len = self.len.min(len);
    }

    /// Makes the bytes immutable and shareable between threads. Copies only if another buffer is a
    /// view of the same block.
    pub fn freeze(mut self) -> FrozenBuffer {
        let block = match &mut self.bytes {
            BufferMemory::Own(block) => block.take(),
            BufferMemory::SharedSlice(_) | BufferMemory::Frozen(_) => None,
        };
        match block.map(Rc::try_unwrap) {
            Some(Ok(block)) => return FrozenBuffer { block: Some(block), start: self.start, len: self.len },
            Some(Err(block)) => self.bytes = BufferMemory::Own(Some(block)),
            None => {}
        }
        Self::copy_of(&self).freeze()
    }

    /// Removes the first `count` bytes.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub fn advance(&mut self, count: usize) {
        assert!(count <= self.len, "advance by {count} in a buffer of {} bytes", self.len);
        self.start += count;
        self.len -= count;
    }
}

/// Address of the byte at `start` of a block.
fn first_byte(block: &Option<Rc<BufferBlock>>, start: usize) -> *mut u8 {
    let block = block.as_ref().expect("present until drop");
    // SAFETY: a buffer's start + len never exceeds its block's size: `whole` sets them so and
    // splitting only narrows.
    unsafe { block.memory.as_ptr().add(start) }
}

impl Deref for IoBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        match &self.bytes {
            // SAFETY: the range lies in the block and is initialised (blocks start zeroed). The
            // range of no other `IoBuffer` overlaps it, so its bytes do not change while `self`
            // is borrowed.
            BufferMemory::Own(block) => unsafe {
                std::slice::from_raw_parts(first_byte(block, self.start), self.len)
            },
            BufferMemory::SharedSlice(bytes) => &bytes[self.start..self.start + self.len],
            BufferMemory::Frozen(bytes) => &bytes[self.start..self.start + self.len],
        }
    }
}

impl DerefMut for IoBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        if let BufferMemory::SharedSlice(_) | BufferMemory::Frozen(_) = self.bytes {
            *self = Self::copy_of(self);
        }
        self.is_zero = false;
        let BufferMemory::Own(block) = &self.bytes else { unreachable!("a copy is owned") };
        // SAFETY: as in `deref`; `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(first_byte(block, self.start), self.len) }
    }
}

impl Drop for IoBuffer {
    fn drop(&mut self) {
        let BufferMemory::Own(block) = &mut self.bytes else { return };
        let Some(block) = block.take() else { return };
        if Rc::strong_count(&block) == 1 {
            return_to_pool(block);
        }
    }
}

/// Returns an unreferenced block to the pool, if it has room, or frees it.
fn return_to_pool(block: Rc<BufferBlock>) {
    if block.layout.size() > 1 << MAX_CLASS {
        return;
    }
    // `try_with`: a buffer may outlive the pool while its thread exits, and is freed then.
    let _ = POOL.try_with(|pool| pool.borrow_mut().put(block));
}

/// Immutable bytes that all threads can read: see [`IoBuffer::freeze`].
pub struct FrozenBuffer {
    /// `Some` until dropped.
    block: Option<BufferBlock>,
    start: usize,
    len: usize,
}

impl FrozenBuffer {
    /// Memory in bytes: the whole block, even if the bytes are a part of it.
    pub fn memory_bytes(&self) -> usize {
        self.block.as_ref().map_or(0, |block| block.layout.size())
    }
}

// SAFETY: the block is plain memory without thread affinity, and nothing else refers to it.
unsafe impl Send for FrozenBuffer {}
// SAFETY: shared references allow reads only.
unsafe impl Sync for FrozenBuffer {}

impl Deref for FrozenBuffer {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        let block = self.block.as_ref().expect("present until drop");
        // SAFETY: the range lies in the block, as it did in the buffer; it is initialised, and
        // nothing writes to it after `freeze`.
        unsafe { std::slice::from_raw_parts(block.memory.as_ptr().add(self.start), self.len) }
    }
}

impl Drop for FrozenBuffer {
    fn drop(&mut self) {
        if let Some(block) = self.block.take() {
            return_to_pool(Rc::new(block));
        }
    }
}

impl std::fmt::Debug for FrozenBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "FrozenBuffer({} bytes)", self.len)
    }
}

impl std::fmt::Debug for IoBuffer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "IoBuffer({} bytes)", self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn buffers_are_aligned_and_reused() {
        let first = IoBuffer::new(5000);
        let address = first.as_ptr() as usize;
        assert_eq!(address % ALIGNMENT, 0);
        drop(first);
        assert_eq!(
            IoBuffer::new(8192).as_ptr() as usize,
            address,
            "same class, so the pooled block is reused"
        );
    }

    #[test]
    fn split_parts_are_disjoint_and_the_block_returns_after_both_are_dropped() {
        let mut head = IoBuffer::zeroed(8192);
        let mut tail = head.split_off(4096);
        head.fill(1);
        tail.fill(2);
        assert!(head.iter().all(|&byte| byte == 1) && tail.iter().all(|&byte| byte == 2));
        let address = head.as_ptr() as usize;
        drop(head);
        assert_ne!(IoBuffer::new(8192).as_ptr() as usize, address, "the tail still lives there");
        drop(tail);
        assert_eq!(IoBuffer::new(8192).as_ptr() as usize, address);
    }

    #[test]
    fn view_is_not_copied_until_written_to() {
        let shared: Arc<[u8]> = Arc::from(&b"abcdef"[..]);
        let mut view = IoBuffer::view_of(&shared, 1..5);
        let mut tail = view.split_off(2);
        assert_eq!((&view[..], &tail[..]), (&b"bc"[..], &b"de"[..]));
        assert_eq!(tail.as_ptr(), shared[3..].as_ptr());
        tail[0] = b'x';
        assert_eq!((&tail[..], &shared[..]), (&b"xe"[..], &b"abcdef"[..]));
        assert_eq!(Arc::strong_count(&shared), 2, "the copy has released its reference");
    }

    #[test]
    fn buffers_are_known_zero_until_written() {
        let mut zeroes = IoBuffer::zeroed(8192);
        let mut rest = zeroes.split_off(4096);
        zeroes.advance(1);
        assert!(zeroes.is_known_zero() && rest.is_known_zero());
        rest[7] = 1;
        assert!(zeroes.is_known_zero() && !rest.is_known_zero());
        assert!(!IoBuffer::copy_of(&zeroes).is_known_zero(), "not scanned yet");
        drop((zeroes, rest));
        assert!(!IoBuffer::new(8192).is_known_zero(), "a block that is used again");
    }

    #[test]
    fn frozen_bytes_are_not_copied_and_return_to_the_pool() {
        let mut buffer = IoBuffer::zeroed(8192);
        buffer.fill(7);
        buffer.advance(4096);
        let address = buffer.as_ptr();
        let frozen = buffer.freeze();
        assert_eq!(frozen.as_ptr(), address);
        std::thread::scope(|scope| {
            scope.spawn(|| assert!(frozen.iter().all(|&byte| byte == 7) && frozen.len() == 4096));
        });
        drop(frozen);
        assert_eq!(IoBuffer::new(8192).as_ptr().wrapping_add(4096), address);
    }

    #[test]
    fn freezing_copies_shared_blocks() {
        let mut head = IoBuffer::zeroed(8192);
        let mut tail = head.split_off(4096);
        let frozen = head.freeze();
        tail.fill(9);
        assert!(frozen.iter().all(|&byte| byte == 0));
        let shared: Arc<[u8]> = Arc::from(&b"abcdef"[..]);
        assert_eq!(&IoBuffer::view_of(&shared, 1..5).freeze()[..], b"bcde");
    }

    #[test]
    fn small_blocks_are_adjacent_and_zero() {
        // On a thread of its own, so that its pool is empty.
        std::thread::spawn(|| {
            let mut addresses: Vec<_> = (0..16)
                .map(|_| POOL.with_borrow_mut(|pool| pool.take(12).unwrap_or_else(|| pool.new_block(12))))
                .map(|block| {
                    // SAFETY: a block of 4 KiB that no buffer refers to.
                    let bytes = unsafe { std::slice::from_raw_parts(block.memory.as_ptr(), 4096) };
                    assert!(bytes.iter().all(|&byte| byte == 0));
                    block.memory.as_ptr() as usize
                })
                .collect();
            addresses.sort_unstable();
            addresses.dedup();
            assert!(addresses.windows(2).all(|pair| pair[1] - pair[0] == 4096), "{addresses:x?}");
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn memory_of_freed_small_blocks_is_returned() {
        std::thread::spawn(|| {
            let kept = IoBuffer::copy_of(&[7; 4096]);
            let other = IoBuffer::copy_of(&[8; 4096]);
            let address = other.as_ptr();
            drop(other);
            trim();
            // SAFETY: `kept` keeps the slab mapped, and no buffer writes to it at the same time.
            let freed = unsafe { std::slice::from_raw_parts(address, 4096) };
            assert!(freed.iter().all(|&byte| byte == 0), "its page was returned to the system");
            assert!(kept.iter().all(|&byte| byte == 7));
        })
        .join()
        .expect("no panic");
    }

    #[test]
    fn the_pool_is_bounded() {
        let many: Vec<_> = (0..64).map(|_| IoBuffer::new(1 << 20)).collect();
        drop(many);
        assert!(POOL.with_borrow(|pool| pool.bytes) <= POOL_BYTES);
    }
}
