//! The words of a ring, each loaded or stored once, with the given memory ordering.
//!
//! A [`GuestBytes`] has the same functions. This layer exists for the tests: `access_hook` stops
//! the device before any store and changes memory before any load, and the model tests replace this
//! module by one of `loom` atomics, to explore all interleavings.

pub(super) use std::sync::atomic::{Ordering, fence};

use reactor::guest::GuestBytes;

/// Words of a ring. Offsets are in bytes, inside the memory, and aligned to the word; violations
/// are bugs and panic.
#[derive(Clone, Debug)]
pub(super) struct Cells(GuestBytes);

macro_rules! words {
    ($($load:ident $store:ident $word:ty),*) => {
        $(
            pub(super) fn $load(&self, offset: usize, order: Ordering) -> $word {
                #[cfg(any(test, fuzzing, feature = "meddler"))]
                super::access_hook::call_hook(super::access_hook::RingAccess::Load);
                self.0.$load(offset, order)
            }

            pub(super) fn $store(&self, offset: usize, value: $word, order: Ordering) {
                #[cfg(any(test, fuzzing, feature = "meddler"))]
                super::access_hook::call_hook(super::access_hook::RingAccess::Store);
                self.0.$store(offset, value, order);
            }
        )*
    };
}

impl Cells {
    pub(super) fn new(memory: GuestBytes) -> Self {
        Self(memory)
    }

    words!(load_u16 store_u16 u16, load_u32 store_u32 u32, load_u64 store_u64 u64);

    /// See [`GuestBytes::prefetch`].
    pub(super) fn prefetch(&self, offset: usize) {
        self.0.prefetch(offset);
    }

    pub(super) fn bytes(&self) -> usize {
        self.0.bytes()
    }

    pub(super) fn is_aligned(&self, alignment: usize) -> bool {
        self.0.is_aligned(alignment)
    }

    /// True if the file behind the memory was truncated.
    pub(super) fn is_lost(&self) -> bool {
        self.0.is_lost()
    }
}
