//! Buffers for one request: payload aligned for O_DIRECT, with room for the reply's header before
//! it.
//!
//! ```text
//!  0 … ┌ header 16 ┬ payload, starts on a page … ┐
//!      └───────────┴─────────────────────────────┘
//!       ◄──────────── one reply, one iovec ──────►
//! ```
//!
//! The header lies directly before the payload, so a reply is one iovec. Buffers move through
//! compio's operations and back, so nothing here is `unsafe`; alignment is found inside an
//! allocation that is one page longer.

use std::cell::RefCell;
use std::rc::Rc;

use compio::buf::{IntoInner, IoBuf, Slice};

/// Satisfies O_DIRECT on every common device, in bytes.
const PAGE: usize = 4096;
/// An NBD simple reply's, in bytes.
pub(crate) const HEADER: usize = 16;
/// Bytes of payload; larger requests allocate for themselves.
const POOLED: usize = 64 << 10;
/// Idle buffers: as many as one connection may have in flight.
const KEPT: usize = 64;

pub(crate) type View = Slice<Box<[u8]>>;

pub(crate) struct Buffer {
    memory: Box<[u8]>,
    /// On a page, and at least [`HEADER`] bytes in.
    payload: usize,
}

impl Buffer {
    fn new(payload: usize) -> Self {
        Self::from_memory(vec![0; payload + HEADER + PAGE].into_boxed_slice())
    }

    /// A `Box`'s bytes never move, so the payload stays where it is.
    fn from_memory(memory: Box<[u8]>) -> Self {
        let payload = HEADER + memory[HEADER..].as_ptr().align_offset(PAGE);
        Self { memory, payload }
    }

    pub(crate) fn from_view(view: View) -> Self {
        Self::from_memory(view.into_inner())
    }

    pub(crate) fn into_payload(self, length: usize) -> View {
        let start = self.payload;
        self.memory.slice(start..start + length)
    }

    pub(crate) fn payload_mut(&mut self, length: usize) -> &mut [u8] {
        &mut self.memory[self.payload..][..length]
    }

    pub(crate) fn into_reply(mut self, header: [u8; HEADER], length: usize) -> View {
        let start = self.payload - HEADER;
        self.memory[start..self.payload].copy_from_slice(&header);
        let end = self.payload + length;
        self.memory.slice(start..end)
    }
}

/// Most recently used first, as that one is still in the processor's cache.
#[derive(Clone, Default)]
pub(crate) struct Pool(Rc<RefCell<Vec<Buffer>>>);

impl Pool {
    /// Contents are whatever was last in it.
    pub(crate) fn take(&self, length: usize) -> Buffer {
        if length > POOLED {
            return Buffer::new(length);
        }
        self.0.borrow_mut().pop().unwrap_or_else(|| Buffer::new(POOLED))
    }

    pub(crate) fn give(&self, buffer: Buffer) {
        let mut idle = self.0.borrow_mut();
        if buffer.memory.len() == POOLED + HEADER + PAGE && idle.len() < KEPT {
            idle.push(buffer);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn payload_is_aligned_and_follows_the_header() {
        let pool = Pool::default();
        for length in [1, 4096, POOLED, POOLED + 1] {
            let buffer = pool.take(length);
            let reply = buffer.into_reply([7; HEADER], length);
            assert_eq!(reply.len(), HEADER + length);
            assert_eq!(reply[HEADER..].as_ptr().align_offset(PAGE), 0);
            assert_eq!(reply[..HEADER], [7; HEADER]);
            pool.give(Buffer::from_view(reply));
        }
    }

    #[test]
    fn pool_keeps_a_bounded_number_and_no_large_ones() {
        let pool = Pool::default();
        let taken: Vec<_> = (0..KEPT + 3).map(|_| pool.take(1)).collect();
        taken.into_iter().for_each(|buffer| pool.give(buffer));
        pool.give(pool.take(POOLED + 1));
        assert_eq!(pool.0.borrow().len(), KEPT);
    }
}
