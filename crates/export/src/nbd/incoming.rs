//! A request that has arrived, with its payload.

use policy::merge::{Candidate, Operation};

use super::{request::Command, session::Tag};
use crate::intake::Mergeable;
use block::buffer::Buffer;

pub(super) struct Incoming {
    pub(super) tag: Tag,
    pub(super) command: Command,
    /// A write's payload.
    pub(super) data: Option<Buffer>,
}

impl Mergeable for Incoming {
    fn candidate(&self) -> Candidate {
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

/// Memory a request needs while it is in flight.
pub(super) fn bytes_in_flight(command: Command) -> usize {
    match command {
        Command::Read { length, .. } => length as usize,
        command => command.payload_bytes() as usize,
    }
}
