//! Requests taken in together: what one receive brought is planned as a whole, and adjacent requests become one I/O.

use std::rc::Rc;

use policy::merge::{Bounds, Candidate, Operation, Planner};

use super::{connection::Connection, request::Command, session::Tag};
use block::{buffer::Buffer, reactor};

/// How far adjacent requests are joined. Longer I/O gains nothing on today's devices (the kernel splits it again), and makes
/// the first of the requests wait for the last.
const MERGE: Bounds = Bounds { segments: 256, bytes: 256 << 10 };

/// A request that was accepted, on its way to the disk.
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

/// Requests taken in together, and the memory to plan their merging.
#[derive(Default)]
pub(super) struct Intake {
    batch: Vec<Incoming>,
    taken: Vec<Option<Incoming>>,
    candidates: Vec<Candidate>,
    planner: Planner,
}

impl Intake {
    /// Takes a request in; it starts with [`Intake::start`].
    pub(super) fn push(&mut self, request: Incoming) {
        self.batch.push(request);
    }

    /// Starts everything that was taken in.
    pub(super) async fn start(&mut self, connection: &Rc<Connection>) {
        if self.batch.len() < 2 {
            if let Some(only) = self.batch.pop() {
                connection.wait_while_congested().await;
                reactor::spawn(Rc::clone(connection).run(only));
            }
            return;
        }
        self.candidates.clear();
        self.candidates.extend(self.batch.iter().map(Incoming::candidate));
        self.taken.extend(self.batch.drain(..).map(Some));
        let plan = self.planner.plan(&self.candidates, MERGE);
        for group in plan.groups() {
            connection.wait_while_congested().await;
            let mut parts = group.iter().map(|&index| self.taken[index].take().expect("planned once"));
            if let [_] = group {
                let only = parts.next().expect("a group of one");
                reactor::spawn(Rc::clone(connection).run(only));
                continue;
            }
            let parts: Vec<Incoming> = parts.collect();
            match parts[0].command {
                Command::Read { .. } => reactor::spawn(Rc::clone(connection).read_merged(parts)),
                _ => reactor::spawn(Rc::clone(connection).write_merged(parts)),
            }
        }
        self.taken.clear();
    }
}

/// Memory a request needs while it is in flight.
pub(super) fn bytes_in_flight(command: Command) -> usize {
    match command {
        Command::Read { length, .. } => length as usize,
        command => command.payload_bytes() as usize,
    }
}
