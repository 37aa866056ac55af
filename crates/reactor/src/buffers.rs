//! The table of buffers of a thread's ring: memory that the kernel puts there, and that reads and
//! writes name by a number.
//!
//! A ring has one such table. It is made when somebody wants numbers first, and each has a run of
//! them to itself until it lets go.

use std::{
    io,
    ops::Range,
    rc::{Rc, Weak},
};

use super::{Driver, Reactor, with_current};

/// Most that a ring may have (`IORING_MAX_REG_BUFFERS`).
const MOST: u16 = 1 << 14;

#[derive(Debug, Default)]
pub(super) struct Table {
    is_made: bool,
    /// Which are taken, in order.
    taken: Vec<Range<u16>>,
}

impl Table {
    /// Makes it, if there is none yet.
    pub(super) fn make(&mut self, make: impl FnOnce(u32) -> io::Result<()>) -> io::Result<()> {
        if !self.is_made {
            make(u32::from(MOST))?;
            self.is_made = true;
        }
        Ok(())
    }

    /// The first of so many that follow each other; `None` where they are not free.
    fn take(&mut self, count: u16) -> Option<u16> {
        let (mut first, mut place) = (0, 0);
        for (index, range) in self.taken.iter().enumerate() {
            if range.start - first >= count {
                break;
            }
            (first, place) = (range.end, index + 1);
        }
        let end = first.checked_add(count).filter(|end| *end <= MOST)?;
        self.taken.insert(place, first..end);
        Some(first)
    }

    fn give_back(&mut self, first: u16) {
        self.taken.retain(|range| range.start != first);
    }
}

/// Numbers of buffers of this thread's ring, until this is dropped.
#[derive(Debug)]
pub(super) struct Numbers {
    /// The kernel may work with them until the ring ends, so they do not keep it.
    reactor: Weak<Reactor>,
    first: u16,
}

impl Numbers {
    /// So many that follow each other.
    ///
    /// # Errors
    /// As `io_uring_register(2)`; `ENOBUFS`: others have them.
    pub(super) fn take(count: u16) -> io::Result<Self> {
        let reactor = with_current(Rc::clone);
        let Driver::Uring(uring) = &reactor.driver else { panic!("a system call in simulation") };
        let first = uring.buffers()?.take(count);
        let first = first.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOBUFS))?;
        Ok(Self { reactor: Rc::downgrade(&reactor), first })
    }

    /// The first of them.
    pub(super) fn first(&self) -> u16 {
        self.first
    }
}

impl Drop for Numbers {
    fn drop(&mut self) {
        if let Some(reactor) = self.reactor.upgrade()
            && let Driver::Uring(uring) = &reactor.driver
            && let Ok(mut table) = uring.buffers()
        {
            table.give_back(self.first);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Polling;

    #[test]
    fn numbers_are_nobody_elses_until_they_are_given_back() {
        let mut table = Table::default();
        assert_eq!([table.take(128), table.take(64), table.take(128)], [Some(0), Some(128), Some(192)]);
        table.give_back(128);
        assert_eq!([table.take(65), table.take(60), table.take(4)], [Some(320), Some(128), Some(188)]);
        table.give_back(0);
        assert_eq!([table.take(MOST - 385), table.take(129), table.take(128)], [Some(385), None, Some(0)]);
        assert_eq!(table.take(1), None);
    }

    #[test]
    fn a_ring_makes_its_table_once() {
        crate::run(Polling::Off, async {
            let one = Numbers::take(4096).expect("the kernel makes it");
            let other = Numbers::take(4096).expect("it has room");
            assert_eq!([one.first(), other.first()], [0, 4096]);
            drop(one);
            assert_eq!(Numbers::take(4096).expect("given back").first(), 0);
        })
        .expect("io_uring works");
    }
}
