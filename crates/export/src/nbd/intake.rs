//! Requests that one receive brought: adjacent ones become one I/O.

use policy::merge::{Bounds, Candidate, Operation, Planner};

use super::{request::Command, session::Tag};
use block::buffer::Buffer;

/// How far adjacent requests are merged. The kernel splits longer I/O again, and the first request
/// would wait for the last.
const MERGE: Bounds = Bounds { segments: 256, bytes: 256 << 10 };

pub(super) struct Incoming {
    pub(super) tag: Tag,
    pub(super) command: Command,
    /// A write's payload.
    pub(super) data: Option<Buffer>,
}

impl Incoming {
    pub(super) fn candidate(&self) -> Candidate {
        match self.command {
            Command::Read { offset, length, .. } => {
                Candidate { operation: Operation::Read, offset, length: u64::from(length), key: 0 }
            }
            Command::Write { offset, length, fua } => Candidate {
                operation: Operation::Write,
                offset,
                length: u64::from(length),
                key: u32::from(fua),
            },
            _ => Candidate { operation: Operation::Barrier, offset: 0, length: 0, key: 0 },
        }
    }
}

/// One I/O.
pub(super) enum Joined {
    One(Incoming),
    Reads(Vec<Incoming>),
    Writes(Vec<Incoming>),
}

/// A batch of requests, and the memory to plan their merging.
#[derive(Default)]
pub(super) struct Intake {
    batch: Vec<Incoming>,
    taken: Vec<Option<Incoming>>,
    candidates: Vec<Candidate>,
    planner: Planner,
}

impl Intake {
    pub(super) fn push(&mut self, request: Incoming) {
        self.batch.push(request);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batch.is_empty()
    }

    /// The request, if it is the only one.
    pub(super) fn take_only(&mut self) -> Option<Incoming> {
        if self.batch.len() == 1 { self.batch.pop() } else { None }
    }

    pub(super) fn take_joined(&mut self) -> impl Iterator<Item = Joined> {
        let Self { batch, taken, candidates, planner } = self;
        candidates.clear();
        candidates.extend(batch.iter().map(Incoming::candidate));
        taken.clear();
        taken.extend(batch.drain(..).map(Some));
        planner.plan(candidates, MERGE).groups().map(|group| {
            let mut parts = group.iter().map(|&index| taken[index].take().expect("planned once"));
            if let [_] = group {
                return Joined::One(parts.next().expect("a group of one"));
            }
            let parts: Vec<Incoming> = parts.collect();
            match parts[0].command {
                Command::Read { .. } => Joined::Reads(parts),
                _ => Joined::Writes(parts),
            }
        })
    }
}

/// Memory a request needs while it is in flight.
pub(super) fn bytes_in_flight(command: Command) -> usize {
    match command {
        Command::Read { length, .. } => length as usize,
        command => command.payload_bytes() as usize,
    }
}
