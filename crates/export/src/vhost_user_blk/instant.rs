//! Requests to a disk that never waits (storage in memory) complete without a future where they are
//! taken from the ring. A third of a request's cost was creating, moving and polling futures.
//!
//! Requests that have to wait for limits take the usual path: see `execute.rs`.

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

/// Number of requests of one queue that ask for admission together: the lock of the group's tree is
/// held meanwhile.
const MOST_ASKED: usize = 32;

impl Queue {
    /// Executes all requests that are admitted at once; passes the rest to `usual`.
    pub(super) fn start_now(&self, intake: &mut Intake<Incoming>, mut usual: impl FnMut(Incoming)) {
        let disk = self.device.disk();
        let mut passes: SmallVec<[Option<Pass>; MOST_ASKED]> = SmallVec::new();
        for some in intake.all().chunks(MOST_ASKED) {
            let costs = some.iter().filter_map(task).map(|(direction, _, data)| (direction, cost(data)));
            disk.admit_now(costs, |pass| passes.push(pass));
        }
        // Permits are in the order of the requests that `task` accepts, so one iterator assigns
        // them.
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

/// Direction, offset and data of a request that may be executed here.
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
