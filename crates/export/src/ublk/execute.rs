//! Execution of requests: each waits for admission, does I/O between the memory lent to the kernel
//! and the disk, and is committed.

use std::{
    future::{Future, poll_fn},
    pin::{Pin, pin},
    rc::Rc,
    task::Poll,
};

use policy::{request::Direction, throttle::Cost};

use super::{
    queue::{Incoming, Queue},
    request::{Kind, Request},
};
use block::disk::Pass;
use reactor::{
    buffer::{Segments, Target},
    error::{Error, Result},
    guest::Place,
    ublk::Data,
};
use storage::{Durability, ZeroOptions};

impl Queue {
    pub(super) async fn carry_out(self: Rc<Self>, incoming: Incoming) {
        match incoming.request.kind {
            Kind::Read | Kind::Write(_) if self.channel.is_zero_copy() => {
                self.move_registered(incoming).await;
            }
            Kind::Read => self.read(incoming).await,
            Kind::Write(durability) => self.write(incoming, durability).await,
            // Boxed, because the future of every read and write would otherwise be as large as the
            // largest arm.
            Kind::Discard | Kind::WriteZeroes { .. } => Box::pin(self.erase(incoming)).await,
            Kind::Flush => {
                let result = Box::pin(self.device.disk().flush_for(Some(&self.patience))).await;
                self.answer(&incoming, result);
            }
            Kind::Refused(error) => self.answer(&incoming, Err(error)),
        }
    }

    async fn read(self: Rc<Self>, incoming: Incoming) {
        let cost = Cost::one(incoming.request.bytes);
        let Some(pass) = self.admit(Direction::Read, cost).await else { return self.put_off(incoming) };
        let target = Target::Here(self.place(&incoming).into());
        let result = self.device.disk().read_to(pass, incoming.request.offset, target).await;
        self.answer(&incoming, result.map(drop));
    }

    /// Executes adjacent reads as one I/O into all their buffers.
    pub(super) async fn read_merged(self: Rc<Self>, parts: Vec<Incoming>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.request.bytes).collect();
        let Some(pass) = self.admit(Direction::Read, Cost::merged(&lengths)).await else {
            return parts.into_iter().for_each(|part| self.put_off(part));
        };
        let target = Target::Here(self.places(&parts));
        match self.device.disk().read_to(pass, parts[0].request.offset, target).await {
            Ok(_) => parts.iter().for_each(|part| self.answer(part, Ok(()))),
            Err(error) => self.retry_apart(parts, error).await,
        }
    }

    /// Retries each read on its own, because a failed merged read does not show which part failed.
    async fn retry_apart(self: &Rc<Self>, parts: Vec<Incoming>, error: Error) {
        let disk = self.device.disk();
        tracing::debug!(disk = %disk.name(), %error, requests = parts.len(), "a merged read failed, trying its parts");
        for part in parts {
            let Some(pass) = self.admit(Direction::Read, Cost::one(part.request.bytes)).await else {
                self.put_off(part);
                continue;
            };
            let target = Target::Here(self.place(&part).into());
            let result = disk.retry_read_to(pass, part.request.offset, target).await;
            self.answer(&part, result.map(drop));
        }
    }

    async fn write(self: Rc<Self>, incoming: Incoming, durability: Durability) {
        let cost = Cost::one(incoming.request.bytes);
        let Some(pass) = self.admit(Direction::Write, cost).await else { return self.put_off(incoming) };
        let data = self.place(&incoming).into();
        let result = self.device.disk().write(pass, incoming.request.offset, data, durability).await;
        self.answer(&incoming, result);
    }

    /// Executes adjacent writes of equal durability as one gathered I/O. All of them fail together,
    /// because a failed write leaves its range undefined anyway.
    pub(super) async fn write_merged(self: Rc<Self>, parts: Vec<Incoming>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.request.bytes).collect();
        let Some(pass) = self.admit(Direction::Write, Cost::merged(&lengths)).await else {
            return parts.into_iter().for_each(|part| self.put_off(part));
        };
        let Kind::Write(durability) = parts[0].request.kind else { unreachable!("planned as writes") };
        let (offset, data) = (parts[0].request.offset, self.places(&parts));
        let result = self.device.disk().write(pass, offset, data, durability).await;
        parts.iter().for_each(|part| self.answer(part, result));
    }

    /// Executes a zero-copy read or write.
    async fn move_registered(self: Rc<Self>, incoming: Incoming) {
        let Request { kind, offset, bytes } = incoming.request;
        let direction = if kind == Kind::Read { Direction::Read } else { Direction::Write };
        let Some(pass) = self.admit(direction, Cost::one(bytes)).await else { return self.put_off(incoming) };
        let Data::Registered(data) = self.channel.data(incoming.tag, bytes as usize) else {
            unreachable!("of such a channel")
        };
        let disk = self.device.disk();
        let result = match kind {
            Kind::Write(durability) => disk.write_registered(pass, offset, &data, durability).await,
            _ => disk.read_registered(pass, offset, &data).await,
        };
        self.answer(&incoming, result);
    }

    async fn erase(self: Rc<Self>, incoming: Incoming) {
        let (disk, request) = (self.device.disk(), incoming.request);
        let cost = Cost::one(request.bytes);
        let Some(pass) = self.admit(Direction::Write, cost).await else { return self.put_off(incoming) };
        let result = match request.kind {
            Kind::WriteZeroes { may_unmap, durability } => {
                let options = ZeroOptions { may_unmap, only_if_fast: false, durability };
                disk.write_zeroes(pass, request.offset, request.bytes, options).await
            }
            _ => disk.discard(pass, request.offset, request.bytes, self.device.rules().durability).await,
        };
        self.answer(&incoming, result);
    }

    /// Lent memory of a read or a write that is copied.
    fn place(&self, incoming: &Incoming) -> Place {
        // `parse` bounds the length by the memory of a tag.
        match self.channel.data(incoming.tag, incoming.request.bytes as usize) {
            Data::Lent(place) => place,
            Data::Registered(_) => unreachable!("not of such a channel"),
        }
    }

    fn places(&self, parts: &[Incoming]) -> Segments {
        parts.iter().map(|part| self.place(part)).collect()
    }

    /// Waits for admission by the disk's limits; `None` if the device is left or quiesces before.
    async fn admit(&self, direction: Direction, cost: Cost) -> Option<Pass> {
        let mut pass = pin!(self.device.disk().admit(direction, cost));
        // Created only for a request that has to wait: most are admitted at the first poll.
        let mut leave = None;
        let pass = poll_fn(|context| {
            if let Poll::Ready(pass) = pass.as_mut().poll(context) {
                return Poll::Ready(Some(pass));
            }
            loop {
                if self.holds_back() {
                    return Poll::Ready(None);
                }
                // Registered before `holds_back` is evaluated again, so that a change in between is
                // not missed.
                let leave_now = leave.get_or_insert_with(|| self.leave.listen());
                if Pin::new(leave_now).poll(context).is_pending() {
                    return Poll::Pending;
                }
                leave = None;
            }
        })
        .await;
        pass.map(|pass| pass.while_awaited(&self.patience))
    }

    fn answer(self: &Rc<Self>, incoming: &Incoming, result: Result<()>) {
        let result = match result {
            // A read or write is far below 2 GiB. For other requests the driver only checks the
            // sign.
            Ok(()) => i32::try_from(incoming.request.bytes).unwrap_or(i32::MAX),
            // Not committed: the driver issues it again to the process that takes the device over.
            Err(_) if self.is_leaving() => return self.forget(),
            Err(error) => {
                tracing::debug!(disk = %self.device.disk().name(), %error, "a block device's request failed");
                -error.errno()
            }
        };
        self.commit(incoming.tag, result);
    }
}
