//! Guest memory, as an export passes it with a request.

use reactor::{
    buffer::Segments,
    guest::{DirtyLog, GuestBytes, GuestMemory, Region},
    sim,
};

/// Value of the bytes around a request's buffers, and in them before a read.
const GUARD: u8 = 0xa5;
const START: u64 = 0x1_0000;
const PAGE: u64 = 4096;

/// Guest memory of one request, with other bytes between its pieces.
pub(crate) struct GuestBuffer {
    memory: GuestMemory,
    log: DirtyLog,
    pieces: Vec<(u64, usize)>,
}

impl GuestBuffer {
    /// Memory for `length` bytes, in one piece or several, at any alignment.
    pub(crate) fn new(length: usize) -> Self {
        let mut pieces = Vec::new();
        let (mut at, mut remaining) = (START, length);
        while remaining > 0 {
            let (gap, piece) = sim::random(|random| {
                let gap = if random.bool() { random.u64(..4) * 512 } else { random.u64(..600) };
                (gap, if random.bool() { remaining } else { random.usize(1..=remaining) })
            });
            pieces.push((at + gap, piece));
            at += gap + piece as u64;
            remaining -= piece;
        }
        let region = Region::on_heap(START, 0, (at - START) as usize + 64);
        let log = DirtyLog::on_heap((at / PAGE / 8) as usize + 1);
        let memory = GuestMemory::new(vec![region]).expect("one region");
        whole(&memory).fill(0, (at - START) as usize + 64, GUARD);
        Self { memory: memory.with_log(Some(log.clone())), log, pieces }
    }

    /// Memory with this content.
    pub(crate) fn holding(bytes: &[u8]) -> Self {
        let buffer = Self::new(bytes.len());
        let mut remaining = bytes;
        for memory in buffer.places() {
            let (piece, tail) = remaining.split_at(memory.bytes());
            memory.write(0, piece);
            remaining = tail;
        }
        buffer
    }

    pub(crate) fn segments(&self) -> Segments {
        self.places().collect()
    }

    fn places(&self) -> impl Iterator<Item = GuestBytes> {
        self.pieces.iter().map(|&(at, length)| self.memory.range(at, length).expect("inside"))
    }

    /// The content after a read. Asserts that no other byte has changed, and that changed pages are
    /// marked as dirty.
    pub(crate) fn found(&self) -> Vec<u8> {
        let memory = whole(&self.memory);
        let mut all = vec![0; memory.bytes()];
        memory.read(0, &mut all);
        let mut found = Vec::new();
        for &(at, length) in &self.pieces {
            let range = (at - START) as usize..(at - START) as usize + length;
            found.extend_from_slice(&all[range.clone()]);
            all[range].fill(GUARD);
            let pages = at / PAGE..=(at + length as u64 - 1) / PAGE;
            assert!(pages.into_iter().all(|page| self.log.is_marked(page * PAGE)), "{at:#x}: not dirty");
        }
        assert!(all.iter().all(|&byte| byte == GUARD), "bytes beside the request's have changed");
        found
    }
}

fn whole(memory: &GuestMemory) -> GuestBytes {
    memory.range(START, memory.regions().next().expect("it has one").bytes() as usize).expect("all of it")
}
