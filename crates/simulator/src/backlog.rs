//! Compact storage of requests that wait behind the first ones of their queue.
//!
//! ```text
//!   arrivals ─► backlog: delta to the previous request ─► the tree's queue: `TREE_REQUESTS` ─► admitted
//!                        1 to 41 bytes each, typically 10   about 120 bytes each
//! ```
//!
//! Requests of one disk and direction are admitted in order, and a tree decides by the first one
//! only. All later ones need no slot in the tree, and in memory they are codes relative to the
//! previous request. All backlogs of a simulation share one [`BacklogMemory`], which bounds their
//! size. Never reorders or drops a request.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use super::request::{RequestOp, SimulatedRequest};

/// Memory limit of all backlogs of a simulation, in bytes: at least 26 million requests; about 100
/// million of a database workload, and 1,000 million sequential ones at one instant.
pub const MAX_BYTES: usize = 1 << 30;
// Unit of allocation and accounting.
const CHUNK_BYTES: usize = 4096;
// A code is its first byte, and four numbers of at most 64 bits in groups of seven.
const MAX_CODE: usize = 1 + 4 * 10;

// First byte of a code: the operation in three bits, and flags for omitted numbers.
const OP_BITS: u8 = 0b111;
const SAME_TIME: u8 = 1 << 3;
const SAME_LENGTH: u8 = 1 << 4;
const SAME_OFFSET: u8 = 1 << 5;
const IN_SEQUENCE: u8 = 1 << 6;
const SAME_CLIENT: u8 = 1 << 7;

/// Memory used by the backlogs of one simulation, on all threads.
#[derive(Clone, Debug, Default)]
pub struct BacklogMemory(Arc<AtomicUsize>);

impl BacklogMemory {
    /// True if [`MAX_BYTES`] are in use: the simulation must end.
    pub fn is_full(&self) -> bool {
        self.0.load(Ordering::Relaxed) >= MAX_BYTES
    }

    #[cfg(test)]
    pub(super) fn bytes(&self) -> usize {
        self.0.load(Ordering::Relaxed)
    }

    fn take(&self) {
        self.0.fetch_add(CHUNK_BYTES, Ordering::Relaxed);
    }

    fn release(&self, chunks: usize) {
        self.0.fetch_sub(chunks * CHUNK_BYTES, Ordering::Relaxed);
    }
}

/// Previous request, which a code is relative to.
#[derive(Debug, Default)]
struct PreviousRequest {
    at_ns: u64,
    offset: u64,
    length: u64,
    client: u32,
}

impl PreviousRequest {
    fn end(&self) -> u64 {
        self.offset.wrapping_add(self.length)
    }

    fn follow(&mut self, request: &SimulatedRequest, client: u32) {
        *self = Self { at_ns: request.at_ns, offset: request.offset, length: request.length, client };
    }
}

/// Queue of requests of one disk, with the clients that sent them.
#[derive(Debug)]
pub(super) struct Backlog {
    memory: BacklogMemory,
    chunks: VecDeque<Vec<u8>>,
    /// Position of the next code in the first chunk.
    at: usize,
    // Both ends keep their own predecessor: codes are relative to the previous request in the
    // queue.
    pushed: PreviousRequest,
    popped: PreviousRequest,
}

impl Backlog {
    pub(super) fn new(memory: &BacklogMemory) -> Self {
        Self {
            memory: memory.clone(),
            chunks: VecDeque::new(),
            at: 0,
            pushed: PreviousRequest::default(),
            popped: PreviousRequest::default(),
        }
    }

    pub(super) fn push(&mut self, request: &SimulatedRequest, client: u32) {
        // A code never crosses chunks, so that `pop` can free a chunk as a whole.
        if self.chunks.back().is_none_or(|last| last.len() + MAX_CODE > CHUNK_BYTES) {
            self.memory.take();
            self.chunks.push_back(Vec::with_capacity(CHUNK_BYTES));
        }
        let Self { chunks, pushed: before, .. } = self;
        let chunk = chunks.back_mut().expect("a chunk with room");
        let first = chunk.len();
        let op = RequestOp::ALL.iter().position(|op| *op == request.op).expect("an operation");
        chunk.push(op as u8);
        let mut number = |flag: u8, is_implied: bool, number: u64| {
            if is_implied { chunk[first] |= flag } else { push_number(chunk, number) }
        };
        // The order of the numbers is that in which `pop` reads them.
        number(SAME_TIME, request.at_ns == before.at_ns, request.at_ns.wrapping_sub(before.at_ns));
        number(SAME_LENGTH, request.length == before.length, request.length);
        number(SAME_CLIENT, client == before.client, client.into());
        if request.offset == before.offset {
            chunk[first] |= SAME_OFFSET;
        // Wrapping: time and offset of hostile traces may be arbitrary.
        } else {
            let ahead = request.offset.wrapping_sub(before.end());
            number(IN_SEQUENCE, ahead == 0, zigzag(ahead));
        }
        before.follow(request, client);
    }

    /// Removes the oldest request; `disk` is the disk of this backlog.
    pub(super) fn pop(&mut self, disk: usize) -> Option<(SimulatedRequest, u32)> {
        let chunk = self.chunks.front()?;
        let mut at = self.at;
        let flags = chunk[at];
        at += 1;
        let before = &mut self.popped;
        let mut number = |flag: u8| (flags & flag == 0).then(|| take_number(chunk, &mut at));
        let at_ns = number(SAME_TIME).map_or(before.at_ns, |later| before.at_ns.wrapping_add(later));
        let length = number(SAME_LENGTH).unwrap_or(before.length);
        let client = number(SAME_CLIENT).map_or(before.client, |client| client as u32);
        let offset = if flags & SAME_OFFSET != 0 {
            before.offset
        } else {
            before.end().wrapping_add(number(IN_SEQUENCE).map_or(0, unzigzag))
        };
        let op = RequestOp::ALL[usize::from(flags & OP_BITS)];
        let request = SimulatedRequest { at_ns, disk, op, offset, length };
        before.follow(&request, client);
        self.at = at;
        // Also frees the chunk that `push` still fills; the next request then starts a new one.
        if at == chunk.len() {
            self.chunks.pop_front();
            self.memory.release(1);
            self.at = 0;
        }
        Some((request, client))
    }
}

impl Drop for Backlog {
    fn drop(&mut self) {
        self.memory.release(self.chunks.len());
    }
}

/// Maps small distances in either direction to small numbers.
// ZigZag encoding of Protocol Buffers: 0, −1, 1, −2 become 0, 1, 2, 3.
const fn zigzag(distance: u64) -> u64 {
    (distance << 1) ^ ((distance as i64 >> 63) as u64)
}

/// Inverse of [`zigzag`].
const fn unzigzag(number: u64) -> u64 {
    (number >> 1) ^ (number & 1).wrapping_neg()
}

/// Appends a number in LEB128: seven bits a byte, least significant first; the last byte is below
/// 128.
fn push_number(chunk: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        chunk.push(number as u8 | 0x80);
        number >>= 7;
    }
    chunk.push(number as u8);
}

fn take_number(chunk: &[u8], at: &mut usize) -> u64 {
    let (mut number, mut shift) = (0, 0);
    loop {
        let byte = chunk[*at];
        *at += 1;
        number |= u64::from(byte & 0x7f) << shift;
        shift += 7;
        if byte < 0x80 {
            return number;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_round_trip_in_order() {
        let mut random = fastrand::Rng::with_seed(7);
        let mut at_ns = 0;
        let any = |random: &mut fastrand::Rng| {
            let bits = random.u32(0..=64);
            random.u64(..).checked_shr(bits).unwrap_or(0)
        };
        let requests: Vec<(SimulatedRequest, u32)> = (0..20_000)
            .map(|_| {
                at_ns = u64::max(at_ns, any(&mut random));
                let op = RequestOp::ALL[random.usize(..RequestOp::ALL.len())];
                let offset = any(&mut random);
                let length = any(&mut random).min(u64::MAX - offset);
                (SimulatedRequest { at_ns, disk: 3, op, offset, length }, random.u32(..))
            })
            .collect();
        let memory = BacklogMemory::default();
        let mut backlog = Backlog::new(&memory);
        let mut taken = Vec::new();
        for (number, (request, client)) in requests.iter().enumerate() {
            backlog.push(request, *client);
            if number % 3 == 0 {
                taken.extend(backlog.pop(3));
            }
        }
        taken.extend(std::iter::from_fn(|| backlog.pop(3)));
        assert_eq!(taken, requests);
        assert_eq!(memory.bytes(), 0, "an empty backlog occupies nothing");
    }

    #[test]
    fn similar_requests_take_a_byte_each() {
        let memory = BacklogMemory::default();
        let mut backlog = Backlog::new(&memory);
        let request = |number: u64| SimulatedRequest {
            at_ns: 5,
            disk: 0,
            op: RequestOp::Read,
            offset: number * 512,
            length: 512,
        };
        (0..1_000_000).for_each(|number| backlog.push(&request(number), 1));
        assert!(memory.bytes() < 1_020_000, "{}", memory.bytes());
        // A database workload: arrival in nanoseconds, random offsets in 1 TiB, one length.
        let mut random = fastrand::Rng::with_seed(1);
        let memory = BacklogMemory::default();
        let mut backlog = Backlog::new(&memory);
        for number in 0..100_000_u64 {
            let offset = random.u64(..1 << 28) * 4096;
            let at_ns = number * 100_000 + random.u64(..100_000);
            backlog.push(
                &SimulatedRequest { at_ns, disk: 0, op: RequestOp::Write, offset, length: 4096 },
                u32::MAX,
            );
        }
        assert!(memory.bytes() < 1_200_000, "{}", memory.bytes());
        drop(backlog);
        assert_eq!(memory.bytes(), 0);
    }
}
