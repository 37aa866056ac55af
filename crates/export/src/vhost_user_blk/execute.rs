//! Carrying out a guest's requests: each waits for its limits, does its I/O between the guest's
//! memory and the disk, and goes back into the ring with its status.

use std::{
    future::{Future, poll_fn},
    mem,
    pin::{Pin, pin},
    rc::Rc,
    task::Poll,
};

use policy::{request::Direction, throttle::Cost};

use super::{
    pieces::is_plain,
    queue::{Incoming, Queue},
};
use crate::intake::Mergeable as _;
use ::virtio::{
    block::{Data, Kind, Request, Status},
    ring::Ticket,
};
use block::disk::Pass;
use reactor::{
    buffer::{Segment, Segments, Target},
    error::{Error, Result},
};
use storage::ZeroOptions;

impl Queue {
    pub(super) async fn carry_out(self: Rc<Self>, incoming: Incoming) {
        if let Err(lost) = self.check_memory() {
            return self.answer(incoming, Err(lost));
        }
        match &incoming.request.kind {
            Kind::Read { into: data, .. } | Kind::Write { from: data, .. } if !is_plain(data) => {
                Box::pin(self.carry_out_in_pieces(incoming)).await;
            }
            Kind::Read { .. } => self.read(incoming).await,
            Kind::Write { .. } => self.write(incoming).await,
            // Apart, because every read and write has room for what is not.
            Kind::Discard(_) | Kind::WriteZeroes(_) => Box::pin(self.erase(incoming)).await,
            Kind::Flush => Box::pin(self.flush(incoming)).await,
            Kind::Id(_) => {
                incoming.request.answer_id(self.device.id());
                incoming.places().iter().for_each(|place| self.mark(place.guest_address(), place.bytes()));
                self.answer(incoming, Ok(()));
            }
            &Kind::Done(status) => self.finish(incoming.ticket, incoming.request, status),
            Kind::PartOfBlock => {
                self.device.tell_part_of_block();
                self.finish(incoming.ticket, incoming.request, Status::IoError);
            }
        }
    }

    async fn flush(&self, incoming: Incoming) {
        let disk = self.device.disk();
        let covered = self.loss.as_ref().map(|loss| (loss, loss.noted()));
        let mut result = disk.flush_for(Some(&self.patience)).await;
        if let Some((loss, noted)) = covered {
            if result.is_ok() {
                loss.flushed(noted, || disk.would_lose());
            }
            if loss.has_happened() {
                self.device.tell_of_loss();
                result = Err(Error::IO);
            }
        }
        self.answer(incoming, result);
    }

    async fn read(&self, mut incoming: Incoming) {
        let cost = Cost::one(incoming.request.bytes());
        let Some(pass) = self.admit(Direction::Read, cost, incoming.must_go).await else {
            return self.give_back(incoming);
        };
        let offset = incoming.candidate().offset;
        let target = Target::Here(self.lend_places(&mut incoming).into_iter().collect());
        let result = self.device.disk().read_to(pass, offset, target).await;
        self.answer_read(incoming, result);
    }

    /// Reads that follow each other on the disk: one I/O into all their places.
    pub(super) async fn read_merged(self: Rc<Self>, parts: Vec<Incoming>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.request.bytes()).collect();
        let Some(pass) = self.admit(Direction::Read, Cost::merged(&lengths), false).await else {
            return parts.into_iter().for_each(|part| self.give_back(part));
        };
        let target = Target::Here(parts.iter().flat_map(Incoming::places).cloned().collect());
        let result = self.device.disk().read_to(pass, parts[0].candidate().offset, target).await;
        match result {
            Ok(_) => {
                for mut part in parts {
                    let places = take_places(&mut part);
                    self.answer_read(part, Ok(places.into_iter().collect()));
                }
            }
            Err(error) => self.retry_apart(parts, error).await,
        }
    }

    /// Which of several merged reads failed is not known, so each is tried alone.
    async fn retry_apart(&self, parts: Vec<Incoming>, error: Error) {
        let disk = self.device.disk();
        tracing::debug!(disk = %disk.name(), %error, requests = parts.len(), "a merged read failed, trying its parts");
        for mut part in parts {
            let cost = Cost::one(part.request.bytes());
            let Some(pass) = self.admit(Direction::Read, cost, part.must_go).await else {
                self.give_back(part);
                continue;
            };
            let offset = part.candidate().offset;
            let target = Target::Here(self.lend_places(&mut part).into_iter().collect());
            let result = disk.retry_read_to(pass, offset, target).await;
            self.answer_read(part, result);
        }
    }

    fn answer_read(&self, incoming: Incoming, result: Result<Segments>) {
        if let Ok(filled) = &result {
            for segment in filled.iter() {
                if let Segment::Guest(place) = segment {
                    self.mark(place.guest_address(), place.bytes());
                }
            }
        }
        self.answer(incoming, result.map(drop));
    }

    async fn write(&self, mut incoming: Incoming) {
        let cost = Cost::one(incoming.request.bytes());
        let Some(pass) = self.admit(Direction::Write, cost, incoming.must_go).await else {
            return self.give_back(incoming);
        };
        let offset = incoming.candidate().offset;
        let data: Segments = self.lend_places(&mut incoming).into_iter().collect();
        let result = self.device.disk().write(pass, offset, data, self.device.durability()).await;
        self.answer(incoming, result);
    }

    /// Writes that follow each other on the disk: one I/O that gathers their places. All fail
    /// together, because a failed write leaves its range undefined anyway.
    pub(super) async fn write_merged(self: Rc<Self>, mut parts: Vec<Incoming>) {
        let lengths: Vec<u64> = parts.iter().map(|part| part.request.bytes()).collect();
        let Some(pass) = self.admit(Direction::Write, Cost::merged(&lengths), false).await else {
            return parts.into_iter().for_each(|part| self.give_back(part));
        };
        let offset = parts[0].candidate().offset;
        let data: Segments = parts.iter_mut().flat_map(|part| self.lend_places(part)).collect();
        let result = self.device.disk().write(pass, offset, data, self.device.durability()).await;
        for part in parts {
            self.answer(part, result);
        }
    }

    /// DISCARD and WRITE_ZEROES, a range at a time.
    async fn erase(&self, incoming: Incoming) {
        let disk = self.device.disk();
        let durability = self.device.durability();
        let (ranges, zeroes) = match &incoming.request.kind {
            Kind::Discard(ranges) => (ranges, false),
            Kind::WriteZeroes(ranges) => (ranges, true),
            _ => unreachable!("one of these two"),
        };
        let mut outcome = Ok(());
        for (index, range) in ranges.iter().enumerate() {
            let must_go = incoming.must_go || index > 0;
            let Some(pass) = self.admit(Direction::Write, Cost::one(range.bytes), must_go).await else {
                return self.give_back(incoming);
            };
            let result = if zeroes {
                let options = ZeroOptions { may_unmap: range.may_unmap, only_if_fast: false, durability };
                disk.write_zeroes(pass, range.offset, range.bytes, options).await
            } else {
                disk.discard(pass, range.offset, range.bytes, durability).await
            };
            outcome = outcome.and(result);
        }
        self.answer(incoming, outcome);
    }

    /// Waits for the disk's limits; `None` as in [`Queue::unless_over`], or if the
    /// guest's memory is lost.
    pub(super) async fn admit(&self, direction: Direction, cost: Cost, must_go: bool) -> Option<Pass> {
        let pass = match must_go {
            true => Box::pin(self.admit_in_the_end(direction, cost)).await,
            false => self.unless_over(self.device.disk().admit(direction, cost), false).await,
        };
        let pass = pass.filter(|_| !self.is_lost());
        pass.map(|pass| pass.while_awaited(&self.patience))
    }

    /// The same for a request that cannot go back: it waits for its limits, unless another process
    /// waits for the export. Then it passes at once, and what comes after it pays for it there. A
    /// guest may reset its device as often as it likes, but it cannot have this happen: it is no
    /// way around limits.
    async fn admit_in_the_end(&self, direction: Direction, cost: Cost) -> Option<Pass> {
        let disk = self.device.disk();
        let is_over = || self.is_abandoned() || self.device.is_resting();
        match self.unless(disk.admit(direction, cost.clone()), is_over).await {
            None if !self.is_abandoned() => Some(disk.admit_anyway(direction, &cost)),
            passed => passed,
        }
    }

    /// Waits for what a request needs; `None` if the queue stops meanwhile, or, where the request
    /// must be carried out, once nobody is there any more.
    pub(super) async fn unless_over<T>(&self, wanted: impl Future<Output = T>, must_go: bool) -> Option<T> {
        self.unless(wanted, || if must_go { self.is_abandoned() } else { self.is_stopping() }).await
    }

    async fn unless<T>(&self, wanted: impl Future<Output = T>, is_over: impl Fn() -> bool) -> Option<T> {
        let mut wanted = pin!(wanted);
        // Made only for a request that has to wait.
        let mut stop = None;
        poll_fn(|context| {
            if let Poll::Ready(had) = wanted.as_mut().poll(context) {
                return Poll::Ready(Some(had));
            }
            loop {
                if is_over() {
                    return Poll::Ready(None);
                }
                let stop_now = stop.get_or_insert_with(|| self.stop.listen());
                if Pin::new(stop_now).poll(context).is_pending() {
                    return Poll::Pending;
                }
                stop = None;
            }
        })
        .await
    }

    /// Fails if memory of the guest has gone.
    fn check_memory(&self) -> Result<()> {
        if self.is_lost() { Err(Error::FAULT) } else { Ok(()) }
    }

    /// A request's places, to be handed on. It has none afterwards, unless it may have to be tried
    /// again.
    fn lend_places(&self, incoming: &mut Incoming) -> Data {
        match self.device.disk().failures().may_hold() {
            true => incoming.places().clone(),
            false => take_places(incoming),
        }
    }

    /// Whether it may have failed only because a queue that stops waits for no disk that an error
    /// has stopped. It is tried again: from the ring, or here, and then it waits for the disk.
    fn is_held(&self, incoming: &Incoming) -> bool {
        let may_wait = self.is_stopping() && !self.is_abandoned() && !incoming.must_go;
        may_wait && self.device.disk().failures().may_hold() && !incoming.is_spent() && !self.is_lost()
    }

    pub(super) fn answer(&self, incoming: Incoming, result: Result<()>) {
        if result.is_err() && self.is_held(&incoming) {
            return self.give_back(incoming);
        }
        let Incoming { ticket, request, .. } = incoming;
        // Most disks never would, and need no turn.
        if let (Kind::Write { .. } | Kind::WriteZeroes(_), Some(loss)) = (&request.kind, &self.loss)
            && self.device.disk().would_lose()
        {
            loss.note(|| self.device.disk().would_lose());
        }
        // What was read or written may not be there.
        let status = match result.and(self.check_memory()) {
            Ok(()) => Status::Ok,
            // Whoever comes next finds it in the in-flight area, and tries it again.
            Err(_) if self.is_abandoned() => return self.forget(ticket),
            Err(Error::UNSUPPORTED) => Status::Unsupported,
            Err(error) => {
                tracing::debug!(disk = %self.device.disk().name(), %error, "a guest's request failed");
                Status::IoError
            }
        };
        self.finish(ticket, request, status);
    }

    fn finish(&self, ticket: Ticket, request: Request, status: Status) {
        let place = request.status_place();
        let (address, bytes) = (place.guest_address(), place.bytes());
        let written = request.finish(status);
        self.mark(address, bytes);
        self.ended(ticket, written);
    }
}

/// Its places. Its length is not known any more.
fn take_places(incoming: &mut Incoming) -> Data {
    match &mut incoming.request.kind {
        Kind::Read { into: places, .. } | Kind::Write { from: places, .. } => mem::take(places),
        _ => unreachable!("planned as reads or writes"),
    }
}
