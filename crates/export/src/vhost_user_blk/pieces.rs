//! Requests that are not carried out as they are: large ones, of which a guest may ask for 4 GiB at
//! once, and those whose memory a device may not take as it lies, so that it is copied.
//!
//! They go in pieces. Each piece is charged to the process's memory, because it may be copied, and
//! to the disk's limits. Of one queue one large request is under way at a time, so that it does not
//! keep a worker from everybody else.

use std::mem;

use policy::{request::Direction, throttle::Cost};

use super::queue::{Incoming, Queue};
use crate::intake::Mergeable as _;
use ::virtio::block::{Data, Kind, SECTOR_BYTES};
use reactor::{
    buffer::{Segments, Target},
    memory::Account,
};

/// As much at once: no request of a usual guest is larger. Copied within a millisecond or two. In
/// simulation less, so that small requests are in several pieces too.
const PIECE_BYTES: usize = if cfg!(test) { 4 << 10 } else { 4 << 20 };

/// Whether a request with this data is carried out as it is.
pub(super) fn is_plain(data: &Data) -> bool {
    let sector = SECTOR_BYTES as usize;
    let mut bytes = 0;
    data.iter().all(|place| {
        bytes += place.bytes();
        bytes <= PIECE_BYTES && place.is_aligned(sector) && place.bytes().is_multiple_of(sector)
    })
}

/// What is charged until it is dropped.
struct Charge<'a>(&'a Account, u64);

impl Drop for Charge<'_> {
    fn drop(&mut self) {
        self.0.give_back(self.1);
    }
}

impl Queue {
    /// A read or write.
    pub(super) async fn carry_out_in_pieces(&self, incoming: Incoming) {
        let direction = match incoming.request.kind {
            Kind::Read { .. } => Direction::Read,
            _ => Direction::Write,
        };
        let is_large = incoming.request.bytes() > PIECE_BYTES as u64;
        let _turn = if is_large { Some(self.large.exclusive(0..1).await) } else { None };
        if self.is_stopping() && !incoming.must_go {
            return self.give_back(incoming);
        }
        let mut offset = incoming.candidate().offset;
        let mut rest: Segments = incoming.places().iter().cloned().collect();
        let mut must_go = incoming.must_go;
        let mut outcome = Ok(());
        while !rest.is_empty() && outcome.is_ok() {
            let bytes = rest.len().min(PIECE_BYTES);
            let after = rest.split_off(bytes);
            let piece = mem::replace(&mut rest, after);
            let (disk, bytes) = (self.device.disk(), bytes as u64);
            if self.unless_over(disk.memory().take(&self.flow, bytes), must_go).await.is_none() {
                return self.give_back(incoming);
            }
            let _charge = Charge(disk.memory(), bytes);
            let Some(pass) = self.admit(direction, Cost::one(bytes), must_go).await else {
                return self.give_back(incoming);
            };
            must_go = true;
            outcome = match direction {
                Direction::Read => disk.read_to(pass, offset, Target::Here(piece)).await.map(drop),
                Direction::Write => disk.write(pass, offset, piece, self.device.durability()).await,
            };
            offset += bytes;
            // Storage in memory never waits.
            reactor::yield_now().await;
        }
        if direction == Direction::Read {
            // Not after each piece: a log may come in between, and has to know of all of them.
            incoming.places().iter().for_each(|place| self.mark(place.guest_address(), place.bytes()));
        }
        self.answer(incoming, outcome);
    }
}
