//! Requests to a disk that never waits ([`InstantDisk`]) complete at once when they are taken from
//! the ring, without a future.
//!
//! Requests that have to wait for limits take the usual path: see `execute.rs`.

use policy::{request::Direction, throttle::RequestCost};
use smallvec::SmallVec;

use super::{
    pieces::needs_no_split,
    queue::{VhostUserQueue, VringRequest},
};
use crate::batch::MergeBatch;
use ::virtio::block::{BlkOperation, Data};
use block::disk::{AdmissionPermit, InstantDisk};
use reactor::{error::Error, guest::GuestBytes};

/// Number of requests of one queue that are admitted together: the lock of the group's tree is
/// held meanwhile.
const MAX_ADMISSIONS: usize = 32;

impl VhostUserQueue {
    /// Executes all requests that are admitted at once; passes the rest to `fallback`.
    pub(super) fn execute_immediately(
        &self,
        disk: &InstantDisk<'_>,
        batch: &mut MergeBatch<VringRequest>,
        mut fallback: impl FnMut(VringRequest),
    ) {
        let mut permits: SmallVec<[Option<AdmissionPermit>; MAX_ADMISSIONS]> = SmallVec::new();
        for chunk in batch.all().chunks(MAX_ADMISSIONS) {
            let costs = chunk.iter().filter_map(task).map(|(direction, _, data)| (direction, cost(data)));
            disk.try_admit_batch(costs, |permit| permits.push(permit));
        }
        // Permits are in the order of the requests that `task` accepts, so one iterator assigns
        // them.
        let mut permits = permits.into_iter();
        for incoming in batch.all().drain(..) {
            match task(&incoming).and_then(|_| permits.next().flatten()) {
                Some(permit) => {
                    if let Some(incoming) = self.execute_now(disk, incoming, &permit) {
                        fallback(incoming);
                    }
                }
                None => fallback(incoming),
            }
        }
    }

    /// Returns the request if the disk has ceased to be instant: it must be executed in the usual
    /// way, and is charged again there.
    fn execute_now(
        &self,
        disk: &InstantDisk<'_>,
        incoming: VringRequest,
        permit: &AdmissionPermit,
    ) -> Option<VringRequest> {
        let result = match task(&incoming) {
            _ if self.is_lost() => Some(Err(Error::FAULT)),
            Some((Direction::Read, offset, data)) => {
                let result = disk.read(permit, offset, data);
                data.iter().for_each(|segment| self.mark_dirty(segment.guest_address(), segment.bytes()));
                result
            }
            Some((Direction::Write, offset, data)) => disk.write(permit, offset, data),
            None => unreachable!("it has a pass"),
        };
        match result {
            Some(result) => self.complete_request(incoming, result),
            None => return Some(incoming),
        }
        None
    }
}

/// Direction, offset and data of a request that may be executed here.
fn task(incoming: &VringRequest) -> Option<(Direction, u64, &Data)> {
    match &incoming.request.kind {
        BlkOperation::Read { offset, into } if needs_no_split(into) => Some((Direction::Read, *offset, into)),
        BlkOperation::Write { offset, from } if needs_no_split(from) => {
            Some((Direction::Write, *offset, from))
        }
        _ => None,
    }
}

fn cost(data: &Data) -> RequestCost {
    RequestCost::one(data.iter().map(GuestBytes::bytes).sum::<usize>() as u64)
}
