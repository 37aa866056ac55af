//! Receive buffer for one message. Its length is unknown before it arrives, and the kernel fails a
//! read with less memory than the longest message needs.
//!
//! ```text
//!   head ▕80▏  small ▕─ 4 KiB ─▏  middle ▕── 60 KiB ──▏  large ▕──── 960 KiB ────▏
//!         ▲            ▲
//!         header       a write's data: aligned, as O_DIRECT requires
//! ```
//!
//! A write takes the tiers that hold its data without a copy, so a small write holds little memory.

use std::io::IoSliceMut;

use smallvec::SmallVec;

use super::{
    message::{FuseRequest, MAX_PARSED_BYTES, MalformedFuseMessage, WRITE_HEAD_BYTES, parse},
    negotiate::MAX_REQUEST_BYTES,
};
use reactor::buffer::{IoBuffer, Segments};

/// Lengths of the tiers; their sum is the longest write.
const TIERS: [usize; 3] = [4 << 10, 60 << 10, MAX_REQUEST_BYTES as usize - (64 << 10)];

pub(super) struct FuseReceiveBuffer {
    head: [u8; WRITE_HEAD_BYTES],
    /// `None` after a write has taken it.
    tiers: [Option<IoBuffer>; TIERS.len()],
}

impl FuseReceiveBuffer {
    pub(super) fn new() -> Self {
        Self { head: [0; WRITE_HEAD_BYTES], tiers: Default::default() }
    }

    /// Memory for `readv`.
    pub(super) fn io_slices(&mut self) -> SmallVec<[IoSliceMut<'_>; 4]> {
        let tiers = self.tiers.iter_mut().zip(TIERS);
        // Replaces only the tiers that earlier writes have taken.
        let tiers = tiers.map(|(tier, bytes)| tier.get_or_insert_with(|| IoBuffer::new(bytes)));
        let buffers = [&mut self.head[..]].into_iter().chain(tiers.map(|tier| &mut tier[..]));
        buffers.map(IoSliceMut::new).collect()
    }

    /// Copies a message into the buffer and parses it.
    pub(super) fn copy(&mut self, message: &[u8]) -> Result<FuseRequest, MalformedFuseMessage> {
        let mut rest = message;
        for mut slice in self.io_slices() {
            let (part, remaining) = rest.split_at(rest.len().min(slice.len()));
            slice[..part.len()].copy_from_slice(part);
            rest = remaining;
        }
        if rest.is_empty() { self.parse(message.len()) } else { Err(MalformedFuseMessage { unique: None }) }
    }

    /// Parses the message of `length` bytes in the buffer.
    pub(super) fn parse(&self, length: usize) -> Result<FuseRequest, MalformedFuseMessage> {
        if length <= WRITE_HEAD_BYTES {
            return parse(&self.head[..length], length);
        }
        let mut bytes = [0; MAX_PARSED_BYTES];
        let parsed = length.min(MAX_PARSED_BYTES);
        bytes[..WRITE_HEAD_BYTES].copy_from_slice(&self.head);
        if let Some(small) = &self.tiers[0] {
            bytes[WRITE_HEAD_BYTES..parsed].copy_from_slice(&small[..parsed - WRITE_HEAD_BYTES]);
        }
        parse(&bytes[..parsed], length)
    }

    /// Takes the first `length` bytes of a write's data.
    pub(super) fn take_data(&mut self, mut length: usize) -> Segments {
        let mut data = Segments::default();
        for tier in &mut self.tiers {
            if length == 0 {
                break;
            }
            if let Some(mut bytes) = tier.take() {
                // Shortened, not copied: the rest of the tier stays allocated until the write has
                // ended.
                bytes.truncate(length);
                length -= bytes.len();
                data.push(bytes);
            }
        }
        data
    }
}

/// Bytes of memory that a write of this length holds.
pub(super) fn charged_bytes(length: usize) -> usize {
    let mut charged = 0;
    for tier in TIERS {
        if length <= charged {
            break;
        }
        charged += tier;
    }
    charged
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn write_takes_the_buffers_that_hold_its_data() {
        let longest = MAX_REQUEST_BYTES as usize;
        let data: Vec<u8> = (0..longest).map(|at| (at % 251) as u8).collect();
        for (length, segments, charged) in [
            (1, 1, 4096),
            (4096, 1, 4096),
            (4097, 2, 65_536),
            (65_536, 2, 65_536),
            (65_537, 3, longest),
            (longest, 3, longest),
        ] {
            let mut receive_buffer = FuseReceiveBuffer::new();
            let mut message = vec![0; WRITE_HEAD_BYTES];
            message.extend(&data[..length]);
            receive_buffer.copy(&message).unwrap_err();
            let taken = receive_buffer.take_data(length);
            assert_eq!(taken.to_vec(), data[..length]);
            assert_eq!((taken.as_slice().len(), charged_bytes(length)), (segments, charged));
            let capacity: usize = receive_buffer.io_slices().iter().map(|slice| slice.len()).sum();
            assert_eq!(capacity, WRITE_HEAD_BYTES + longest, "for the next");
        }
    }
}
