//! `QueueRegionSplit`: an entry for each head.

use super::{
    InflightQueueArea, RingError, SIZE_AT, VERSION, VERSION_AT,
    cells::{Cells, Ordering},
    close,
};

pub(super) const HEADER: usize = 16;
const LAST_BATCH_HEAD: usize = 12;
const USED_IDX: usize = 14;

pub(super) const ENTRY: usize = 16;
/// One byte, followed by padding.
const IN_FLIGHT: usize = 0;
const NEXT: usize = 6;
const COUNTER: usize = 8;

/// The area of a split ring.
#[derive(Debug)]
pub(in super::super) struct SplitLog {
    cells: Cells,
    last_batch_head: u16,
    /// Sequence number of the next chain.
    counter: u64,
}

/// Offset of a field of entry `head`.
fn at(head: u16, field: usize) -> usize {
    HEADER + usize::from(head) * ENTRY + field
}

impl SplitLog {
    /// Opens an area next to a used ring with index `published`. Returns the heads that the driver
    /// still waits for, in the order of taking, if the area was in use.
    pub(in super::super) fn open(
        inflight: InflightQueueArea,
        size: u16,
        published: u16,
    ) -> Result<(Self, Option<Vec<u16>>), RingError> {
        let (cells, used) = inflight.open(size, false)?;
        let mut log = Self { cells, last_batch_head: 0, counter: 0 };
        if !used {
            log.begin(size, published);
            return Ok((log, None));
        }
        log.recover(size, published)?;
        let mut heads: Vec<(u64, u16)> = (0..size)
            .filter(|&head| log.cells.load_u16(at(head, IN_FLIGHT), Ordering::Relaxed) & 0xff != 0)
            .map(|head| (log.cells.load_u64(at(head, COUNTER), Ordering::Relaxed), head))
            .collect();
        // By sequence number, which is the order of taking.
        heads.sort_unstable();
        log.counter = heads.last().map_or(0, |&(counter, _)| counter.wrapping_add(1));
        Ok((log, Some(heads.into_iter().map(|(_, head)| head).collect())))
    }

    fn begin(&mut self, size: u16, published: u16) {
        for head in 0..size {
            self.cells.store_u64(at(head, 0), 0, Ordering::Relaxed);
            self.cells.store_u64(at(head, COUNTER), 0, Ordering::Relaxed);
        }
        self.cells.store_u64(0, 0, Ordering::Relaxed);
        self.cells.store_u16(SIZE_AT, size, Ordering::Relaxed);
        self.cells.store_u16(LAST_BATCH_HEAD, 0, Ordering::Relaxed);
        self.cells.store_u16(USED_IDX, published, Ordering::Relaxed);
        // Last: after a crash before this store the area is still new.
        self.cells.store_u16(VERSION_AT, VERSION, Ordering::Release);
    }

    /// Clears the heads that were completed and not cleared.
    fn recover(&mut self, size: u16, published: u16) -> Result<(), RingError> {
        self.last_batch_head = self.cells.load_u16(LAST_BATCH_HEAD, Ordering::Relaxed);
        let logged = self.cells.load_u16(USED_IDX, Ordering::Relaxed);
        // At most one batch can be unfinished: its heads are linked from `last_batch_head`.
        let batch = published.wrapping_sub(logged);
        if batch > size {
            return Err(RingError::Inflight("its index is not that of the used ring"));
        }
        let mut head = self.last_batch_head;
        for _ in 0..batch {
            if head >= size {
                return Err(RingError::Inflight("it names a descriptor outside the ring"));
            }
            self.clear(head);
            head = self.cells.load_u16(at(head, NEXT), Ordering::Relaxed);
        }
        self.cells.store_u16(USED_IDX, published, Ordering::Release);
        Ok(())
    }

    /// Logs that a head is in flight.
    pub(in super::super) fn log_taken(&mut self, head: u16) {
        // The counter before the flag, so that a head in flight always has a place in the order.
        self.cells.store_u64(at(head, COUNTER), self.counter, Ordering::Relaxed);
        self.counter = self.counter.wrapping_add(1);
        self.cells.store_u16(at(head, IN_FLIGHT), 1, Ordering::Release);
    }

    /// Logs that the used index is about to move past a head.
    pub(in super::super) fn begin_publish(&mut self, head: u16) {
        // Linked first: a crash between the stores leaves the old batch valid.
        self.cells.store_u16(at(head, NEXT), self.last_batch_head, Ordering::Release);
        self.cells.store_u16(LAST_BATCH_HEAD, head, Ordering::Release);
        self.last_batch_head = head;
    }

    /// Logs that the used index has moved.
    pub(in super::super) fn end_publish(&mut self, head: u16, published: u16) {
        self.clear(head);
        self.cells.store_u16(USED_IDX, published, Ordering::Release);
    }

    /// Clears a head.
    pub(in super::super) fn clear(&mut self, head: u16) {
        self.cells.store_u16(at(head, IN_FLIGHT), 0, Ordering::Release);
    }

    pub(in super::super) fn close(self) {
        close(&self.cells);
    }
}
