//! Requests to a disk that never waits, storage in memory: they are carried out where they are
//! taken, without a future. A third of what a request cost were futures: made, moved, asked once.
//!
//! What has to wait for limits after all goes the usual way: see `execute.rs`.

use policy::{request::Direction, throttle::Cost};
use smallvec::SmallVec;

use super::{
    pieces::is_plain,
    queue::{Incoming, Queue},
};
use crate::intake::Intake;
use ::virtio::block::{Data, Kind};
use block::disk::Pass;
use reactor::{error::Error, guest::Place};

/// As many of a queue's requests are asked about at once, while all others of a group wait.
const MOST_ASKED: usize = 32;

impl Queue {
    /// Carries out all that need not wait; `usual` gets the others.
    pub(super) fn start_now(&self, intake: &mut Intake<Incoming>, mut usual: impl FnMut(Incoming)) {
        let disk = self.device.disk();
        let mut passes: SmallVec<[Option<Pass>; MOST_ASKED]> = SmallVec::new();
        for some in intake.all().chunks(MOST_ASKED) {
            let costs = some.iter().filter_map(task).map(|(direction, _, data)| (direction, cost(data)));
            disk.admit_now(costs, |pass| passes.push(pass));
        }
        let mut passes = passes.into_iter();
        for incoming in intake.all().drain(..) {
            match task(&incoming).and_then(|_| passes.next().flatten()) {
                Some(pass) => self.carry_out_now(incoming, &pass),
                None => usual(incoming),
            }
        }
    }

    fn carry_out_now(&self, incoming: Incoming, pass: &Pass) {
        let disk = self.device.disk();
        let result = match task(&incoming) {
            _ if self.is_lost() => Err(Error::FAULT),
            Some((Direction::Read, offset, data)) => {
                let result = disk.read_now(pass, offset, data).unwrap_or(Err(Error::UNSUPPORTED));
                data.iter().for_each(|place| self.mark(place.guest_address(), place.bytes()));
                result
            }
            Some((Direction::Write, offset, data)) => {
                disk.write_now(pass, offset, data).unwrap_or(Err(Error::UNSUPPORTED))
            }
            None => unreachable!("it has a pass"),
        };
        self.answer(incoming, result);
    }
}

/// What is to be done for a request that may be carried out here.
fn task(incoming: &Incoming) -> Option<(Direction, u64, &Data)> {
    match &incoming.request.kind {
        Kind::Read { offset, into } if is_plain(into) => Some((Direction::Read, *offset, into)),
        Kind::Write { offset, from } if is_plain(from) => Some((Direction::Write, *offset, from)),
        _ => None,
    }
}

fn cost(data: &Data) -> Cost {
    Cost::one(data.iter().map(Place::bytes).sum::<usize>() as u64)
}
