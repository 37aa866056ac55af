//! Execution of requests: each waits for admission, does I/O between the memory lent to the kernel
//! and the disk, and is committed.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    rc::Rc,
    task::Poll,
};

use policy::{request::Direction, throttle::RequestCost};

use super::{
    queue::{UblkIncomingRequest, UblkIoQueue},
    request::{UblkOperation, UblkRequest},
};
use block::disk::AdmissionPermit;
use reactor::{
    buffer::{ReadTarget, Segments},
    error::{Error, Result},
    guest::GuestBytes,
    ublk::UblkData,
};
use storage::{Durability, ZeroOptions};

impl UblkIoQueue {
    pub(super) async fn execute(self: Rc<Self>, incoming: UblkIncomingRequest) {
        match incoming.request.kind {
            UblkOperation::Read | UblkOperation::Write(_) if self.channel.is_zero_copy() => {
                self.move_registered(incoming).await;
            }
            UblkOperation::Read => self.read(incoming).await,
            UblkOperation::Write(durability) => self.write(incoming, durability).await,
            // Boxed, because the future of every read and write would otherwise be as large as the
            // largest arm.
            UblkOperation::Discard | UblkOperation::WriteZeroes { .. } => {
                Box::pin(self.erase(incoming)).await;
            }
            UblkOperation::Flush => {
                let result = Box::pin(self.device.disk().flush_for(Some(&self.cancel_token))).await;
                self.answer(&incoming, result);
            }
            UblkOperation::Refused(error) => self.answer(&incoming, Err(error)),
        }
    }

    async fn read(self: Rc<Self>, incoming: UblkIncomingRequest) {
        let cost = RequestCost::one(incoming.request.bytes);
        let Some(permit) = self.admit(Direction::Read, cost).await else { return self.postpone(incoming) };
        let target = ReadTarget::Segments(self.buffer(&incoming).into());
        let result = self.device.disk().read_to(permit, incoming.request.offset, target).await;
        self.answer(&incoming, result.map(drop));
    }

    /// Executes adjacent reads as one I/O into all their buffers.
    pub(super) async fn read_merged(self: Rc<Self>, parts: Vec<UblkIncomingRequest>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.request.bytes).collect();
        let Some(permit) = self.admit(Direction::Read, RequestCost::merged(&lengths)).await else {
            return parts.into_iter().for_each(|part| self.postpone(part));
        };
        let target = ReadTarget::Segments(self.buffers(&parts));
        match self.device.disk().read_to(permit, parts[0].request.offset, target).await {
            Ok(_) => parts.iter().for_each(|part| self.answer(part, Ok(()))),
            Err(error) => self.retry_separately(parts, error).await,
        }
    }

    /// Retries each read on its own, because a failed merged read does not show which part failed.
    async fn retry_separately(self: &Rc<Self>, parts: Vec<UblkIncomingRequest>, error: Error) {
        let disk = self.device.disk();
        tracing::debug!(disk = %disk.name(), %error, requests = parts.len(), "a merged read failed, trying its parts");
        for part in parts {
            let Some(permit) = self.admit(Direction::Read, RequestCost::one(part.request.bytes)).await else {
                self.postpone(part);
                continue;
            };
            let target = ReadTarget::Segments(self.buffer(&part).into());
            let result = disk.retry_read_to(permit, part.request.offset, target).await;
            self.answer(&part, result.map(drop));
        }
    }

    async fn write(self: Rc<Self>, incoming: UblkIncomingRequest, durability: Durability) {
        let cost = RequestCost::one(incoming.request.bytes);
        let Some(permit) = self.admit(Direction::Write, cost).await else { return self.postpone(incoming) };
        let data = self.buffer(&incoming).into();
        let result = self.device.disk().write(permit, incoming.request.offset, data, durability).await;
        self.answer(&incoming, result);
    }

    /// Executes adjacent writes of equal durability as one gathered I/O. All of them fail together,
    /// because a failed write leaves its range undefined anyway.
    pub(super) async fn write_merged(self: Rc<Self>, parts: Vec<UblkIncomingRequest>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.request.bytes).collect();
        let Some(permit) = self.admit(Direction::Write, RequestCost::merged(&lengths)).await else {
            return parts.into_iter().for_each(|part| self.postpone(part));
        };
        let UblkOperation::Write(durability) = parts[0].request.kind else {
            unreachable!("planned as writes")
        };
        let (offset, data) = (parts[0].request.offset, self.buffers(&parts));
        let result = self.device.disk().write(permit, offset, data, durability).await;
        parts.iter().for_each(|part| self.answer(part, result));
    }

    /// Executes a zero-copy read or write.
    async fn move_registered(self: Rc<Self>, incoming: UblkIncomingRequest) {
        let UblkRequest { kind, offset, bytes } = incoming.request;
        let direction = if kind == UblkOperation::Read { Direction::Read } else { Direction::Write };
        let Some(permit) = self.admit(direction, RequestCost::one(bytes)).await else {
            return self.postpone(incoming);
        };
        let UblkData::Registered(data) = self.channel.data(incoming.tag, bytes as usize) else {
            unreachable!("of such a channel")
        };
        let disk = self.device.disk();
        let result = match kind {
            UblkOperation::Write(durability) => {
                disk.write_registered(permit, offset, &data, durability).await
            }
            _ => disk.read_registered(permit, offset, &data).await,
        };
        self.answer(&incoming, result);
    }

    async fn erase(self: Rc<Self>, incoming: UblkIncomingRequest) {
        let (disk, request) = (self.device.disk(), incoming.request);
        let cost = RequestCost::one(request.bytes);
        let Some(permit) = self.admit(Direction::Write, cost).await else { return self.postpone(incoming) };
        let result = match request.kind {
            UblkOperation::WriteZeroes { may_unmap, durability } => {
                let options = ZeroOptions { may_unmap, only_if_fast: false, durability };
                disk.write_zeroes(permit, request.offset, request.bytes, options).await
            }
            _ => disk.discard(permit, request.offset, request.bytes, self.device.rules().durability).await,
        };
        self.answer(&incoming, result);
    }

    /// Lent memory of a read or a write that is copied.
    fn buffer(&self, incoming: &UblkIncomingRequest) -> GuestBytes {
        // `parse` bounds the length by the memory of a tag.
        match self.channel.data(incoming.tag, incoming.request.bytes as usize) {
            UblkData::Copied(buffer) => buffer,
            UblkData::Registered(_) => unreachable!("not of such a channel"),
        }
    }

    fn buffers(&self, parts: &[UblkIncomingRequest]) -> Segments {
        parts.iter().map(|part| self.buffer(part)).collect()
    }

    /// Waits for admission by the disk's limits; `None` if the device is left or quiesces before.
    async fn admit(&self, direction: Direction, cost: RequestCost) -> Option<AdmissionPermit> {
        let mut admission = pin!(self.device.disk().admit(direction, cost));
        // Created only for a request that has to wait: most are admitted at the first poll.
        let mut leave = None;
        let permit = poll_fn(|context| {
            if let Poll::Ready(permit) = admission.as_mut().poll(context) {
                return Poll::Ready(Some(permit));
            }
            loop {
                if self.is_holding_back() {
                    return Poll::Ready(None);
                }
                // Registered before `is_holding_back` is evaluated again, so that a change in
                // between is not missed.
                let leave_now = leave.get_or_insert_with(|| self.leave.listen());
                if Pin::new(leave_now).poll(context).is_pending() {
                    return Poll::Pending;
                }
                leave = None;
            }
        })
        .await;
        permit.map(|permit| permit.with_cancel_token(&self.cancel_token))
    }

    fn answer(self: &Rc<Self>, incoming: &UblkIncomingRequest, result: Result<()>) {
        let result = match result {
            // A read or write is far below 2 GiB. For other requests the driver only checks the
            // sign.
            Ok(()) => i32::try_from(incoming.request.bytes).unwrap_or(i32::MAX),
            // Not committed: the driver issues it again to the process that takes the device over.
            Err(_) if self.is_leaving() => return self.count_out(),
            Err(error) => {
                tracing::debug!(disk = %self.device.disk().name(), %error, "a block device's request failed");
                -error.errno()
            }
        };
        self.commit(incoming.tag, result);
    }
}
