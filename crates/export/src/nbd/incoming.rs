//! A request that has arrived, with its payload.

use policy::merge::{MergeCandidate, MergeOperation};

use super::{
    request::{self, NbdCommand},
    session::{NbdSession, RequestTag},
};
use crate::batch::Mergeable;
use reactor::buffer::IoBuffer;

pub(super) struct NbdIncomingRequest {
    pub(super) tag: RequestTag,
    pub(super) command: NbdCommand,
    /// A write's payload.
    pub(super) data: Option<IoBuffer>,
}

impl NbdIncomingRequest {
    /// True if the payload has not arrived completely.
    pub(super) fn is_unfinished(&self) -> bool {
        self.command.payload_bytes() > 0 && self.data.is_none()
    }

    /// Appends the request as it was received.
    pub(super) fn write(&self, session: &NbdSession, out: &mut Vec<u8>) {
        request::encode(self.tag, self.command, session, out);
        out.extend(self.data.iter().flat_map(|data| data.iter()));
    }
}

impl Mergeable for NbdIncomingRequest {
    fn candidate(&self) -> MergeCandidate {
        match self.command {
            NbdCommand::Read { offset, length, .. } => {
                MergeCandidate { operation: MergeOperation::Read, offset, length: u64::from(length), key: 0 }
            }
            NbdCommand::Write { offset, length, fua } => MergeCandidate {
                operation: MergeOperation::Write,
                offset,
                length: u64::from(length),
                // Writes with different FUA flags are not merged: one I/O has one durability.
                key: u32::from(fua),
            },
            _ => MergeCandidate { operation: MergeOperation::Barrier, offset: 0, length: 0, key: 0 },
        }
    }
}

/// Bytes of memory that a request needs while it is in flight.
pub(super) fn bytes_in_flight(command: NbdCommand) -> usize {
    match command {
        NbdCommand::Read { length, .. } => length as usize,
        command => command.payload_bytes() as usize,
    }
}
