//! The table of registered buffers of a thread's ring: memory that reads and writes refer to by
//! index.
//!
//! A ring has one such table. It is registered at the first use; each user owns a range of indices
//! until it drops it.

use std::{
    io,
    ops::Range,
    rc::{Rc, Weak},
};

use super::{Reactor, ReactorDriver, with_current};

/// Maximum size of a table (`IORING_MAX_REG_BUFFERS`).
const MAX_BUFFERS: u16 = 1 << 14;

#[derive(Debug, Default)]
pub(super) struct RegisteredBufferTable {
    is_registered: bool,
    /// Ranges in use, in ascending order.
    taken: Vec<Range<u16>>,
}

impl RegisteredBufferTable {
    /// Registers the table, if it is not registered yet.
    pub(super) fn register(&mut self, register: impl FnOnce(u32) -> io::Result<()>) -> io::Result<()> {
        if !self.is_registered {
            register(u32::from(MAX_BUFFERS))?;
            self.is_registered = true;
        }
        Ok(())
    }

    /// Allocates `count` consecutive indices and returns the first; `None` if there is no such
    /// range. First fit.
    fn take(&mut self, count: u16) -> Option<u16> {
        let (mut first, mut position) = (0, 0);
        for (index, range) in self.taken.iter().enumerate() {
            if range.start - first >= count {
                break;
            }
            (first, position) = (range.end, index + 1);
        }
        let end = first.checked_add(count).filter(|end| *end <= MAX_BUFFERS)?;
        self.taken.insert(position, first..end);
        Some(first)
    }

    fn free(&mut self, first: u16) {
        self.taken.retain(|range| range.start != first);
    }
}

/// A range of indices in the table of this thread's ring, freed on drop.
#[derive(Debug)]
pub(super) struct BufferIndexRange {
    /// Weak, because the kernel may use the buffers until the ring ends.
    reactor: Weak<Reactor>,
    first: u16,
}

impl BufferIndexRange {
    /// Allocates `count` consecutive indices.
    ///
    /// # Errors
    /// As `io_uring_register(2)`; `ENOBUFS` if no range is free.
    pub(super) fn take(count: u16) -> io::Result<Self> {
        let reactor = with_current(Rc::clone);
        let ReactorDriver::Uring(uring) = &reactor.driver else {
            panic!("a system call was requested in simulation")
        };
        let first = uring.buffers()?.take(count);
        let first = first.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOBUFS))?;
        Ok(Self { reactor: Rc::downgrade(&reactor), first })
    }

    /// The first index.
    pub(super) fn first(&self) -> u16 {
        self.first
    }
}

impl Drop for BufferIndexRange {
    fn drop(&mut self) {
        if let Some(reactor) = self.reactor.upgrade()
            && let ReactorDriver::Uring(uring) = &reactor.driver
            && let Ok(mut table) = uring.buffers()
        {
            table.free(self.first);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::PollingMode;

    #[test]
    fn index_ranges_are_exclusive_until_freed() {
        let mut table = RegisteredBufferTable::default();
        assert_eq!([table.take(128), table.take(64), table.take(128)], [Some(0), Some(128), Some(192)]);
        table.free(128);
        assert_eq!([table.take(65), table.take(60), table.take(4)], [Some(320), Some(128), Some(188)]);
        table.free(0);
        assert_eq!(
            [table.take(MAX_BUFFERS - 385), table.take(129), table.take(128)],
            [Some(385), None, Some(0)]
        );
        assert_eq!(table.take(1), None);
    }

    #[test]
    fn ring_registers_its_table_once() {
        crate::run(PollingMode::Off, async {
            let first = BufferIndexRange::take(4096).expect("the kernel makes it");
            let second = BufferIndexRange::take(4096).expect("it has room");
            assert_eq!([first.first(), second.first()], [0, 4096]);
            drop(first);
            assert_eq!(BufferIndexRange::take(4096).expect("given back").first(), 0);
        })
        .expect("io_uring works");
    }
}
