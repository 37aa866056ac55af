//! A stream's window: how much is read ahead at a time, and how early.
//!
//! ```text
//!   reader                    ahead
//!     ├──────── trigger ────────┤            lead is down to `trigger`: read `size` more
//!     ├──────── trigger ────────┼──── size ────┤
//! ```
//!
//! As in AMP (Gill and Bathen, FAST 2007), each stream adapts both values. `size` grows when a
//! chunk was used up, because large requests cost the device less. `trigger` grows when the reader
//! had to wait for data. Both shrink when data was dropped unread. AMP adjusts by a page at a time;
//! here `trigger` grows by `size`, so that readers of slow storage wait less often.

use super::read_ahead::{BLOCK_BYTES, CHUNK_MAX_BYTES};

/// Sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ReadAheadWindow {
    pub(super) size: u64,
    pub(super) trigger: u64,
}

impl ReadAheadWindow {
    /// Initial window of a stream: size `min`, triggered at half of it.
    pub(super) fn new(min: u64, max_bytes: u64) -> Self {
        let size = largest_chunk_size(min, max_bytes);
        Self { size, trigger: size / 2 }.within(max_bytes)
    }

    /// The window, limited to `max_bytes` of read-ahead.
    pub(super) fn within(self, max_bytes: u64) -> Self {
        let size = largest_chunk_size(self.size, max_bytes);
        Self { size, trigger: self.trigger.min(max_bytes.saturating_sub(size)) }
    }

    pub(super) fn grow(&mut self, max_bytes: u64) {
        *self = Self { size: self.size * 2, ..*self }.within(max_bytes);
    }

    pub(super) fn reader_waited(&mut self, max_bytes: u64) {
        *self = Self { trigger: self.trigger + self.size, ..*self }.within(max_bytes);
    }

    pub(super) fn shrink(&mut self) {
        self.size = (self.size / 2).max(BLOCK_BYTES);
        // Less is read ahead, and later.
        self.trigger = self.trigger.min(self.size);
    }
}

/// Largest power of two (as buffers are) up to `requested_bytes` of which two fit into `max_bytes`.
fn largest_chunk_size(requested_bytes: u64, max_bytes: u64) -> u64 {
    let size = requested_bytes.min(max_bytes / 2).clamp(BLOCK_BYTES, CHUNK_MAX_BYTES);
    1 << size.ilog2()
}

#[cfg(test)]
mod tests {
    use super::*;

    const K: u64 = 1 << 10;

    #[test]
    fn window_grows_when_used_up_and_triggers_earlier_after_a_wait() {
        let max_bytes = 2 << 20;
        let mut window = ReadAheadWindow::new(128 * K, max_bytes);
        assert_eq!(window, ReadAheadWindow { size: 128 * K, trigger: 64 * K });
        window.reader_waited(max_bytes);
        assert_eq!(window, ReadAheadWindow { size: 128 * K, trigger: 192 * K });
        for _ in 0..10 {
            window.grow(max_bytes);
            window.reader_waited(max_bytes);
        }
        assert_eq!(window, ReadAheadWindow { size: 1 << 20, trigger: 1 << 20 });
    }

    #[test]
    fn window_shrinks_to_fit_into_memory() {
        let mut window = ReadAheadWindow::new(512 * K, 4 << 20);
        window.shrink();
        assert_eq!(window, ReadAheadWindow { size: 256 * K, trigger: 256 * K });
        for _ in 0..20 {
            window.shrink();
        }
        assert_eq!(window, ReadAheadWindow { size: BLOCK_BYTES, trigger: BLOCK_BYTES });
        assert_eq!(ReadAheadWindow::new(128 * K, 40 * K), ReadAheadWindow { size: 16 * K, trigger: 8 * K });
    }
}
