//! Execution of a guest's requests: each waits for admission, does I/O between the guest's memory
//! and the disk, and completes in the ring with a status.

use std::{
    future::{Future, poll_fn},
    mem,
    pin::{Pin, pin},
    rc::Rc,
    task::Poll,
};

use policy::{request::Direction, throttle::RequestCost};

use super::{
    pieces::needs_no_split,
    queue::{VhostUserQueue, VringRequest},
};
use crate::batch::Mergeable as _;
use ::virtio::{
    block::{BlkOperation, BlkRequest, BlkStatus, Data},
    ring::ChainTicket,
};
use block::disk::AdmissionPermit;
use reactor::{
    buffer::{ReadTarget, Segment, Segments},
    error::{Error, Result},
};
use storage::ZeroOptions;

impl VhostUserQueue {
    pub(super) async fn execute(self: Rc<Self>, incoming: VringRequest) {
        if let Err(lost) = self.check_memory() {
            return self.complete_request(incoming, Err(lost));
        }
        match &incoming.request.kind {
            BlkOperation::Read { into: data, .. } | BlkOperation::Write { from: data, .. }
                if !needs_no_split(data) =>
            {
                Box::pin(self.execute_in_pieces(incoming)).await;
            }
            BlkOperation::Read { .. } => self.read(incoming).await,
            BlkOperation::Write { .. } => self.write(incoming).await,
            // Boxed, because the future of every read and write would otherwise be as large as the
            // largest arm.
            BlkOperation::Discard(_) | BlkOperation::WriteZeroes(_) => Box::pin(self.erase(incoming)).await,
            BlkOperation::Flush => Box::pin(self.flush(incoming)).await,
            BlkOperation::Id(_) => {
                incoming.request.write_id(self.device.id());
                incoming
                    .buffers()
                    .iter()
                    .for_each(|segment| self.mark_dirty(segment.guest_address(), segment.bytes()));
                self.complete_request(incoming, Ok(()));
            }
            &BlkOperation::Completed(status) => self.finish(incoming.ticket, incoming.request, status),
            BlkOperation::PartOfBlock => {
                self.device.warn_of_unaligned_request();
                self.finish(incoming.ticket, incoming.request, BlkStatus::IoError);
            }
        }
    }

    async fn flush(&self, incoming: VringRequest) {
        let disk = self.device.disk();
        // Read before the flush begins: it covers only writes that were acknowledged until now.
        let covered = self.loss.as_ref().map(|loss| (loss, loss.recorded_writes()));
        let mut result = disk.flush_for(Some(&self.cancel_token)).await;
        if let Some((loss, recorded_writes)) = covered {
            if result.is_ok() {
                loss.flushed(recorded_writes, || disk.has_volatile_writes());
            }
            // The guest must see an error, or it would rely on writes that a killed process has
            // lost.
            if loss.has_happened() {
                self.device.warn_of_loss();
                result = Err(Error::IO);
            }
        }
        self.complete_request(incoming, result);
    }

    async fn read(&self, mut incoming: VringRequest) {
        let cost = RequestCost::one(incoming.request.bytes());
        let Some(permit) = self.admit(Direction::Read, cost, incoming.must_complete).await else {
            return self.return_request(incoming);
        };
        let offset = incoming.candidate().offset;
        let target = ReadTarget::Segments(self.data_for_disk(&mut incoming).into_iter().collect());
        let result = self.device.disk().read_to(permit, offset, target).await;
        self.answer_read(incoming, result);
    }

    /// Executes adjacent reads as one I/O into all their buffers.
    pub(super) async fn read_merged(self: Rc<Self>, parts: Vec<VringRequest>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.request.bytes()).collect();
        let Some(permit) = self.admit(Direction::Read, RequestCost::merged(&lengths), false).await else {
            return parts.into_iter().for_each(|part| self.return_request(part));
        };
        let target = ReadTarget::Segments(parts.iter().flat_map(VringRequest::buffers).cloned().collect());
        let result = self.device.disk().read_to(permit, parts[0].candidate().offset, target).await;
        match result {
            Ok(_) => {
                for mut part in parts {
                    // `read_to` has filled the parts' own buffers in place; only the dirty log has
                    // to be updated.
                    let segments = take_data(&mut part);
                    self.answer_read(part, Ok(segments.into_iter().collect()));
                }
            }
            Err(error) => self.retry_separately(parts, error).await,
        }
    }

    /// Retries each read on its own, because a failed merged read does not show which part failed.
    async fn retry_separately(&self, parts: Vec<VringRequest>, error: Error) {
        let disk = self.device.disk();
        tracing::debug!(disk = %disk.name(), %error, requests = parts.len(), "a merged read failed, trying its parts");
        for mut part in parts {
            let cost = RequestCost::one(part.request.bytes());
            let Some(permit) = self.admit(Direction::Read, cost, part.must_complete).await else {
                self.return_request(part);
                continue;
            };
            let offset = part.candidate().offset;
            let target = ReadTarget::Segments(self.data_for_disk(&mut part).into_iter().collect());
            let result = disk.retry_read_to(permit, offset, target).await;
            self.answer_read(part, result);
        }
    }

    fn answer_read(&self, incoming: VringRequest, result: Result<Segments>) {
        if let Ok(filled) = &result {
            for segment in filled.iter() {
                if let Segment::Guest(guest_bytes) = segment {
                    self.mark_dirty(guest_bytes.guest_address(), guest_bytes.bytes());
                }
            }
        }
        self.complete_request(incoming, result.map(drop));
    }

    async fn write(&self, mut incoming: VringRequest) {
        let cost = RequestCost::one(incoming.request.bytes());
        let Some(permit) = self.admit(Direction::Write, cost, incoming.must_complete).await else {
            return self.return_request(incoming);
        };
        let offset = incoming.candidate().offset;
        let data: Segments = self.data_for_disk(&mut incoming).into_iter().collect();
        let result = self.device.disk().write(permit, offset, data, self.device.durability()).await;
        self.complete_request(incoming, result);
    }

    /// Executes adjacent writes as one gathered I/O. All of them fail together, because a failed
    /// write leaves its range undefined anyway.
    pub(super) async fn write_merged(self: Rc<Self>, mut parts: Vec<VringRequest>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.request.bytes()).collect();
        let Some(permit) = self.admit(Direction::Write, RequestCost::merged(&lengths), false).await else {
            return parts.into_iter().for_each(|part| self.return_request(part));
        };
        let offset = parts[0].candidate().offset;
        let data: Segments = parts.iter_mut().flat_map(|part| self.data_for_disk(part)).collect();
        let result = self.device.disk().write(permit, offset, data, self.device.durability()).await;
        for part in parts {
            self.complete_request(part, result);
        }
    }

    /// Executes DISCARD and WRITE_ZEROES, range by range.
    async fn erase(&self, incoming: VringRequest) {
        let disk = self.device.disk();
        let durability = self.device.durability();
        let (ranges, zeroes) = match &incoming.request.kind {
            BlkOperation::Discard(ranges) => (ranges, false),
            BlkOperation::WriteZeroes(ranges) => (ranges, true),
            _ => unreachable!("one of these two"),
        };
        let mut outcome = Ok(());
        for (index, range) in ranges.iter().enumerate() {
            // After the first range, the request has had effects and cannot go back into the ring.
            let must_complete = incoming.must_complete || index > 0;
            let Some(permit) =
                self.admit(Direction::Write, RequestCost::one(range.bytes), must_complete).await
            else {
                return self.return_request(incoming);
            };
            let result = if zeroes {
                let options = ZeroOptions { may_unmap: range.may_unmap, only_if_fast: false, durability };
                disk.write_zeroes(permit, range.offset, range.bytes, options).await
            } else {
                disk.discard(permit, range.offset, range.bytes, durability).await
            };
            outcome = outcome.and(result);
        }
        self.complete_request(incoming, outcome);
    }

    /// Waits for admission by the disk's limits; `None` as in [`VhostUserQueue::unless_stopping`],
    /// or if the guest's memory is lost.
    pub(super) async fn admit(
        &self,
        direction: Direction,
        cost: RequestCost,
        must_complete: bool,
    ) -> Option<AdmissionPermit> {
        let permit = match must_complete {
            true => Box::pin(self.admit_final(direction, cost)).await,
            false => self.unless_stopping(self.device.disk().admit(direction, cost), false).await,
        };
        let permit = permit.filter(|_| !self.is_lost());
        permit.map(|permit| permit.with_cancel_token(&self.cancel_token))
    }

    /// Waits for admission of a request that cannot go back into the ring. If an upgrade waits for
    /// the export, the request is admitted at once, and later requests pay for it in the new
    /// process. A guest cannot use this to evade limits: it can reset its device, but cannot cause
    /// an upgrade.
    async fn admit_final(&self, direction: Direction, cost: RequestCost) -> Option<AdmissionPermit> {
        let disk = self.device.disk();
        let is_ending = || self.is_abandoned() || self.device.is_quiescing();
        match self.unless(disk.admit(direction, cost.clone()), is_ending).await {
            None if !self.is_abandoned() => Some(disk.charge_unconditionally(direction, &cost)),
            permit => permit,
        }
    }

    /// Waits for a future. `None` if the queue stops, or, for a request that must complete, if the
    /// front end has disconnected.
    pub(super) async fn unless_stopping<T>(
        &self,
        future: impl Future<Output = T>,
        must_complete: bool,
    ) -> Option<T> {
        self.unless(future, || if must_complete { self.is_abandoned() } else { self.is_stopping() }).await
    }

    async fn unless<T>(&self, future: impl Future<Output = T>, is_ending: impl Fn() -> bool) -> Option<T> {
        let mut future = pin!(future);
        // Created only for a request that has to wait.
        let mut stop = None;
        poll_fn(|context| {
            if let Poll::Ready(output) = future.as_mut().poll(context) {
                return Poll::Ready(Some(output));
            }
            loop {
                if is_ending() {
                    return Poll::Ready(None);
                }
                // Registered before the condition is evaluated again, so that a stop in between is
                // not missed.
                let stop_now = stop.get_or_insert_with(|| self.stop.listen());
                if Pin::new(stop_now).poll(context).is_pending() {
                    return Poll::Pending;
                }
                stop = None;
            }
        })
        .await
    }

    /// Fails if memory of the guest was lost (SIGBUS).
    fn check_memory(&self) -> Result<()> {
        if self.is_lost() { Err(Error::FAULT) } else { Ok(()) }
    }

    /// Buffers of a request, to be passed to the disk. Copied instead of moved if the request may
    /// have to be retried.
    fn data_for_disk(&self, incoming: &mut VringRequest) -> Data {
        match self.device.disk().failures().may_wait() {
            true => incoming.buffers().clone(),
            false => take_data(incoming),
        }
    }

    /// True if the request may have failed only because a stopping queue does not wait for a disk
    /// that is stopped by an error. It is retried from the ring, or here, and then waits for the
    /// disk.
    fn may_be_retried(&self, incoming: &VringRequest) -> bool {
        let may_wait = self.is_stopping() && !self.is_abandoned() && !incoming.must_complete;
        may_wait && self.device.disk().failures().may_wait() && !incoming.data_was_moved() && !self.is_lost()
    }

    pub(super) fn complete_request(&self, incoming: VringRequest, result: Result<()>) {
        if result.is_err() && self.may_be_retried(&incoming) {
            return self.return_request(incoming);
        }
        let VringRequest { ticket, request, .. } = incoming;
        // Most disks lose nothing with the process, and need not take the lock in `record_write`.
        if let (BlkOperation::Write { .. } | BlkOperation::WriteZeroes(_), Some(loss)) =
            (&request.kind, &self.loss)
            && self.device.disk().has_volatile_writes()
        {
            loss.record_write(|| self.device.disk().has_volatile_writes());
        }
        // The memory may have been lost during the I/O, so its result is not valid.
        let status = match result.and(self.check_memory()) {
            Ok(()) => BlkStatus::Ok,
            // Stays in the in-flight area: the next process retries it.
            Err(_) if self.is_abandoned() => return self.drop_request(ticket),
            Err(Error::UNSUPPORTED) => BlkStatus::Unsupported,
            Err(error) => {
                tracing::debug!(disk = %self.device.disk().name(), %error, "a guest's request failed");
                BlkStatus::IoError
            }
        };
        self.finish(ticket, request, status);
    }

    fn finish(&self, ticket: ChainTicket, request: BlkRequest, status: BlkStatus) {
        let status_byte = request.status_place();
        let (address, bytes) = (status_byte.guest_address(), status_byte.bytes());
        let written = request.finish(status);
        self.mark_dirty(address, bytes);
        self.complete(ticket, written);
    }
}

/// Moves the buffers out of a request; its length is lost.
fn take_data(incoming: &mut VringRequest) -> Data {
    match &mut incoming.request.kind {
        BlkOperation::Read { into: buffers, .. } | BlkOperation::Write { from: buffers, .. } => {
            mem::take(buffers)
        }
        _ => unreachable!("planned as reads or writes"),
    }
}
