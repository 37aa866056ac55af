//! Entry of the fuzz target and of tests: parses arbitrary bytes as a message of the kernel and
//! checks the invariants.

use super::{
    message::{FuseOperation, FuseRequest, MAX_PARSED_BYTES, MalformedFuseMessage, WRITE_HEAD_BYTES, parse},
    negotiate::{InitOutcome, negotiate},
};

/// Parses one message; the first byte selects whether its length field is corrected.
///
/// Parsed values equal the bytes; a message whose length field is wrong is rejected; and the reply
/// to INIT has no flag that the kernel has not offered.
pub fn fuse_message(data: &[u8]) {
    let Some((&traits, rest)) = data.split_first() else { return };
    let mut message = rest.to_vec();
    let length = message.len();
    if traits & 1 == 0
        && let Some(length_field) = message.get_mut(..4)
    {
        length_field.copy_from_slice(&(length as u32).to_ne_bytes());
    }
    // As `FuseReceiveBuffer::parse`, which passes only the head of a long message.
    let parsed = &message[..length.min(MAX_PARSED_BYTES)];
    match parse(parsed, length) {
        Ok(FuseRequest { unique, operation }) => {
            assert_eq!(message[8..16], unique.to_ne_bytes());
            assert_eq!(message[..4], (length as u32).to_ne_bytes());
            match operation {
                FuseOperation::Write { length: bytes, .. } => {
                    assert_eq!(bytes as usize, length - WRITE_HEAD_BYTES, "its data is all there");
                }
                FuseOperation::Init(init) => match negotiate(&init) {
                    InitOutcome::Agreed(reply) => assert_eq!(reply.flags & !init.flags, 0),
                    InitOutcome::RetryVersion(_) => assert!(init.major > 7),
                    InitOutcome::TooOld => assert!(init.major < 7 || init.minor < 28),
                },
                _ => {}
            }
        }
        Err(MalformedFuseMessage { unique }) => assert_eq!(unique.is_some(), length >= 40),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_bytes_are_parsed_or_rejected() {
        let mut random = fastrand::Rng::with_seed(1);
        for _ in 0..20_000 {
            let length = random.usize(..200);
            let mut data: Vec<u8> = (0..length).map(|_| random.u8(..)).collect();
            if let Some(opcode) = data.get_mut(5..9) {
                opcode.copy_from_slice(&random.u32(..64).to_ne_bytes());
            }
            fuse_message(&data);
        }
    }
}
