//! Requests that were not started, encoded as the kernel's messages for another process.
//!
//! So one parser validates requests in both processes, and there is no second encoding. Fields of
//! the original message that are never read are omitted.

use storage::Durability;

use super::{
    incoming::{FuseIncomingRequest, FuseWork},
    message::{FuseOperation, HEADER_BYTES, opcode, valid},
};

/// Encodes a request.
pub(super) fn encode(request: &FuseIncomingRequest) -> Vec<u8> {
    let (operation, data) = match &request.work {
        FuseWork::Read { offset, length } => {
            // Cannot truncate: shorter than the longest request.
            (FuseOperation::Read { offset: *offset, length: *length as u32 }, None)
        }
        // `cached` keeps the write from extending a disk that is shrunk meanwhile.
        FuseWork::Write { offset, data, durability } => {
            (write(*offset, data.len(), flags(*durability), true), Some(data))
        }
        FuseWork::Extend { offset: Some(offset), data, durability, may_grow } => {
            (write(*offset, data.len(), flags(*durability), !may_grow), Some(data))
        }
        FuseWork::Extend { offset: None, data, durability, .. } => {
            // An append without an offset: the new process determines the end.
            (write(0, data.len(), flags(*durability) | libc::O_APPEND as u32, false), Some(data))
        }
        FuseWork::Other(operation) => (*operation, None),
    };
    let mut message = head(request.unique, operation);
    if let Some(data) = data {
        message.extend(data.to_vec());
    }
    let length = message.len() as u32;
    message[..4].copy_from_slice(&length.to_ne_bytes());
    message
}

/// Splits concatenated messages; `None` if they are malformed.
pub(super) fn split(mut bytes: &[u8]) -> Option<Vec<Vec<u8>>> {
    let mut messages = Vec::new();
    while !bytes.is_empty() {
        let length = u32::from_ne_bytes(bytes.get(..4)?.try_into().ok()?);
        let length = usize::try_from(length).ok().filter(|length| *length >= HEADER_BYTES)?;
        let (message, rest) = bytes.split_at_checked(length)?;
        messages.push(message.to_vec());
        bytes = rest;
    }
    Some(messages)
}

fn write(offset: u64, length: usize, flags: u32, cached: bool) -> FuseOperation {
    FuseOperation::Write { offset, length: length as u32, flags, cached }
}

fn flags(durability: Durability) -> u32 {
    if durability == Durability::Synchronous { libc::O_DSYNC as u32 } else { 0 }
}

/// Encodes a message before its data, with a length of 0.
fn head(unique: u64, operation: FuseOperation) -> Vec<u8> {
    let (opcode, length) = match operation {
        FuseOperation::Read { .. } => (opcode::READ, 40),
        FuseOperation::Write { .. } => (opcode::WRITE, 40),
        FuseOperation::SetAttributes(_) => (opcode::SETATTR, 88),
        FuseOperation::GetAttributes => (opcode::GETATTR, 16),
        FuseOperation::Open { .. } => (opcode::OPEN, 8),
        FuseOperation::Allocate { .. } => (opcode::FALLOCATE, 32),
        FuseOperation::Seek { .. } => (opcode::LSEEK, 24),
        // SYNC is the only other operation with I/O.
        _ => (opcode::FSYNC, 16),
    };
    let mut bytes = vec![0; HEADER_BYTES + length];
    let mut store = |at: usize, number: &[u8]| bytes[at..at + number.len()].copy_from_slice(number);
    store(4, &opcode.to_ne_bytes());
    store(8, &unique.to_ne_bytes());
    let mut u32 = |at: usize, number: u32| store(HEADER_BYTES + at, &number.to_ne_bytes());
    match operation {
        FuseOperation::Read { length, .. } => u32(16, length),
        FuseOperation::Write { length, flags, cached, .. } => {
            u32(16, length);
            u32(20, cached.into());
            u32(32, flags);
        }
        FuseOperation::SetAttributes(changes) => {
            let flag_if = |present: bool, bit| if present { bit } else { 0 };
            let (mode, uid, gid) = (changes.mode, changes.uid, changes.gid);
            u32(
                0,
                flag_if(changes.size.is_some(), valid::SIZE)
                    | flag_if(mode.is_some(), valid::MODE)
                    | flag_if(uid.is_some(), valid::UID)
                    | flag_if(gid.is_some(), valid::GID),
            );
            for (at, number) in [(68, mode), (76, uid), (80, gid)] {
                u32(at, number.unwrap_or_default());
            }
        }
        FuseOperation::Open { flags } => u32(0, flags),
        FuseOperation::Allocate { mode, .. } => u32(24, mode),
        FuseOperation::Seek { whence, .. } => u32(16, whence),
        _ => {}
    }
    let mut u64 = |at: usize, number: u64| store(HEADER_BYTES + at, &number.to_ne_bytes());
    match operation {
        FuseOperation::Read { offset, .. }
        | FuseOperation::Write { offset, .. }
        | FuseOperation::Seek { offset, .. } => {
            u64(8, offset);
        }
        FuseOperation::Allocate { offset, length, .. } => {
            u64(8, offset);
            u64(16, length);
        }
        FuseOperation::SetAttributes(changes) => u64(16, changes.size.unwrap_or_default()),
        _ => {}
    }
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use reactor::buffer::{IoBuffer, Segments};

    use super::{
        super::message::{AttributeChanges, FuseRequest, parse},
        *,
    };

    fn round_trip(work: FuseWork) -> (Vec<u8>, FuseOperation) {
        let bytes = encode(&FuseIncomingRequest { unique: 78, charged_bytes: 0, work });
        let FuseRequest { unique, operation } = parse(&bytes, bytes.len()).expect("it is one");
        assert_eq!((unique, split(&bytes)), (78, Some(vec![bytes.clone()])));
        (bytes, operation)
    }

    proptest! {
        #[test]
        fn an_encoded_request_is_parsed_as_before(
            offset: u64,
            number: u64,
            value: u32,
            changes in proptest::array::uniform3(proptest::option::of(any::<u32>())),
            size: Option<u64>,
        ) {
            let [mode, uid, gid] = changes;
            for operation in [
                FuseOperation::SetAttributes(AttributeChanges { size, mode, uid, gid }),
                FuseOperation::Open { flags: value },
                FuseOperation::GetAttributes,
                FuseOperation::Sync,
                FuseOperation::Allocate { offset, length: number, mode: value },
                FuseOperation::Seek { offset, whence: value },
            ] {
                prop_assert_eq!(round_trip(FuseWork::Other(operation)).1, operation);
            }
            let length = value as usize;
            prop_assert_eq!(round_trip(FuseWork::Read { offset, length }).1, FuseOperation::Read { offset, length: value });
        }

        #[test]
        fn malformed_messages_are_not_split(bytes: Vec<u8>) {
            if let Some(messages) = split(&bytes) {
                prop_assert_eq!(messages.concat(), bytes);
            }
        }
    }

    #[test]
    fn writes_keep_data_offset_and_append_flag() {
        let data = || Segments::from(IoBuffer::copy_of(b"weir"));
        let durability = Durability::Synchronous;
        let (bytes, operation) = round_trip(FuseWork::Write { offset: 4096, data: data(), durability });
        assert!(bytes.ends_with(b"weir"));
        assert_eq!(operation, write(4096, 4, libc::O_DSYNC as u32, true));
        let durability = Durability::Cached;
        let extend = |offset, may_grow| FuseWork::Extend { offset, data: data(), durability, may_grow };
        assert_eq!(round_trip(extend(Some(9), true)).1, write(9, 4, 0, false));
        assert_eq!(round_trip(extend(Some(9), false)).1, write(9, 4, 0, true));
        for may_grow in [true, false] {
            assert_eq!(round_trip(extend(None, may_grow)).1, write(0, 4, libc::O_APPEND as u32, false));
        }
        assert_eq!(split(&[bytes.clone(), bytes[..50].to_vec()].concat()), None);
        assert_eq!(split(&[0; 80]), None);
    }
}
