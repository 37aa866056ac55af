//! Requests to a disk that never waits, storage in memory: they are carried out where they are
//! taken, without a future. A third of what a request cost were futures: made, moved and asked once.
//!
//! What has to wait for limits after all goes the usual way: see `execute.rs`.

use policy::{request::Direction, throttle::Cost};

use super::{
    execute::take_places,
    pieces::is_plain,
    queue::{Incoming, Queue},
};
use crate::{intake::Intake, virtio::block::Kind};
use block::{
    buffer::{Segments, guest_copies},
    error::Error,
};

impl Queue {
    /// Carries out all that need not wait; `usual` gets the others.
    pub(super) fn start_now(&self, intake: &mut Intake<Incoming>, mut usual: impl FnMut(Incoming)) {
        let before = guest_copies().count;
        for incoming in intake.take_all() {
            if let Some(incoming) = self.carry_out_now(incoming) {
                usual(incoming);
            }
        }
        self.device.count_copies_since(before);
    }

    /// Gives back what would have to wait.
    fn carry_out_now(&self, mut incoming: Incoming) -> Option<Incoming> {
        let (direction, offset) = match &incoming.request.kind {
            Kind::Read { offset, into } if is_plain(into) => (Direction::Read, *offset),
            Kind::Write { offset, from } if is_plain(from) => (Direction::Write, *offset),
            _ => return Some(incoming),
        };
        if self.is_lost() {
            return Some(incoming);
        }
        let disk = self.device.disk();
        let Some(pass) = disk.admit_now(direction, &Cost::one(incoming.request.bytes())) else {
            return Some(incoming);
        };
        let data: Segments = take_places(&mut incoming).into_iter().collect();
        match direction {
            Direction::Read => {
                let result = disk.read_now(&pass, offset, data).unwrap_or(Err(Error::UNSUPPORTED));
                self.answer_read(incoming, result);
            }
            Direction::Write => {
                let result = disk.write_now(&pass, offset, &data).unwrap_or(Err(Error::UNSUPPORTED));
                self.answer(incoming, result);
            }
        }
        None
    }
}
