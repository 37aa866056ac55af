//! A request that has arrived, with its payload.

use policy::merge::{Candidate, Operation};

use super::{
    request::{self, Command},
    session::{Session, Tag},
};
use crate::intake::Mergeable;
use reactor::buffer::Buffer;

pub(super) struct Incoming {
    pub(super) tag: Tag,
    pub(super) command: Command,
    /// A write's payload.
    pub(super) data: Option<Buffer>,
}

impl Incoming {
    /// True if the payload has not arrived completely.
    pub(super) fn is_unfinished(&self) -> bool {
        self.command.payload_bytes() > 0 && self.data.is_none()
    }

    /// Appends the request as it was received.
    pub(super) fn write(&self, session: &Session, out: &mut Vec<u8>) {
        request::encode(self.tag, self.command, session, out);
        out.extend(self.data.iter().flat_map(|data| data.iter()));
    }
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
                // Writes with different FUA flags are not merged: one I/O has one durability.
                key: u32::from(fua),
            },
            _ => Candidate { operation: Operation::Barrier, offset: 0, length: 0, key: 0 },
        }
    }
}

/// Bytes of memory that a request needs while it is in flight.
pub(super) fn bytes_in_flight(command: Command) -> usize {
    match command {
        Command::Read { length, .. } => length as usize,
        command => command.payload_bytes() as usize,
    }
}
