//! The area that records which requests are in flight, so that they are served exactly once when
//! this process has died and another goes on ("Inflight I/O tracking").
//!
//! We make it, the front end keeps it, and brings it back when it connects again. Here are its size
//! and its division into rings; what stands in a ring's part is the ring's own.

use std::{io, os::fd::OwnedFd};

use block::guest::{Memory, Place, Region, RegionError};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};

use super::{
    features::{MAX_QUEUE_SIZE, MAX_QUEUES},
    message::InflightInfo,
};
use crate::virtio::ring::Inflight;

/// Why there is no such area.
#[allow(missing_docs, reason = "each has its message")]
#[derive(Debug, thiserror::Error)]
pub enum InflightError {
    #[error("an in-flight area for {queues} rings of {queue_size}, at most {MAX_QUEUES} of {MAX_QUEUE_SIZE}")]
    Shape { queues: u16, queue_size: u16 },
    #[error("an in-flight area of {is} bytes, its rings need {due}")]
    TooSmall { is: u64, due: u64 },
    #[error("the in-flight area cannot be made: {0}")]
    Make(#[from] io::Error),
    #[error("the in-flight area: {0}")]
    Map(#[from] RegionError),
}

/// Bytes from the beginning of a ring's part to that of the next.
fn part_bytes(queue_size: u16, packed: bool) -> u64 {
    Inflight::bytes(queue_size, packed) as u64
}

/// Makes an area of zeroes; its length in bytes. Its file cannot change its length any more.
///
/// # Errors
/// [`InflightError`].
pub fn create(queues: u16, queue_size: u16, packed: bool) -> Result<(OwnedFd, u64), InflightError> {
    check_shape(queues, queue_size)?;
    let bytes = u64::from(queues) * part_bytes(queue_size, packed);
    let make = || {
        let file = memfd_create("weir-inflight", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, bytes)?;
        fcntl_add_seals(&file, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
        rustix::io::Result::Ok(file)
    };
    Ok((make().map_err(io::Error::from)?, bytes))
}

fn check_shape(queues: u16, queue_size: u16) -> Result<(), InflightError> {
    let right = (1..=MAX_QUEUES).contains(&queues) && (1..=MAX_QUEUE_SIZE).contains(&queue_size);
    if right { Ok(()) } else { Err(InflightError::Shape { queues, queue_size }) }
}

/// An area that a front end has brought.
#[derive(Debug)]
pub struct Area {
    memory: Memory,
    bytes: u64,
    queues: u16,
    queue_size: u16,
}

impl Area {
    /// Maps it.
    ///
    /// # Errors
    /// [`InflightError`], also where its file is shorter than the front end says.
    pub fn map(info: &InflightInfo, file: OwnedFd) -> Result<Self, InflightError> {
        let &InflightInfo { bytes, file_offset, queues, queue_size, .. } = info;
        check_shape(queues, queue_size)?;
        // Which layout its rings will have is not known yet; packed ones need more.
        let due = u64::from(queues) * part_bytes(queue_size, false);
        if bytes < due {
            return Err(InflightError::TooSmall { is: bytes, due });
        }
        // Nobody names it by an address, so it begins at 0.
        let region = Region::map(file, 0, 0, bytes, file_offset)?;
        Ok(Self { memory: Memory::new(vec![region])?, bytes, queues, queue_size })
    }

    /// The part of a ring of `size` descriptors; `None` where the area has no room for it.
    pub fn part(&self, ring: u16, size: u16, packed: bool) -> Option<Place> {
        let each = part_bytes(self.queue_size, packed);
        let begin = u64::from(ring) * each;
        if ring >= self.queues || size > self.queue_size || begin + each > self.bytes {
            return None;
        }
        self.memory.place(begin, Inflight::bytes(size, packed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(bytes: u64, queues: u16, queue_size: u16) -> InflightInfo {
        InflightInfo { bytes, file_offset: 0, queues, queue_size, padded: true }
    }

    #[test]
    fn rings_have_parts_that_do_not_touch() {
        // From the structures of the specification: 16 + 128 · 16, and 32 + 128 · 32, rounded up.
        for (packed, stride) in [(false, 2112), (true, 4160)] {
            let (file, bytes) = create(2, 128, packed).expect("made");
            assert_eq!(bytes, 2 * stride);
            let area = Area::map(&info(bytes, 2, 128), file).expect("mapped");
            let part = |ring, size| area.part(ring, size, packed).map(|part| part.guest_address());
            assert_eq!((part(0, 128), part(1, 128), part(1, 7)), (Some(0), Some(stride), Some(stride)));
            assert_eq!((part(2, 128), part(0, 129)), (None, None));
            let last = area.part(1, 128, packed).expect("it is there");
            assert_eq!(last.bytes() as u64, stride, "up to the end");
        }
    }

    #[test]
    fn a_packed_ring_does_not_fit_where_split_ones_were_asked_for() {
        let (file, bytes) = create(1, 128, false).expect("made");
        let area = Area::map(&info(bytes, 1, 128), file).expect("mapped");
        assert!(area.part(0, 128, false).is_some());
        assert!(area.part(0, 128, true).is_none());
    }

    #[test]
    fn what_a_front_end_says_of_an_area_is_checked() {
        let map = |info: InflightInfo| Area::map(&info, create(1, 4, false).expect("made").0);
        assert!(map(info(128, 1, 4)).is_ok());
        assert!(matches!(map(info(127, 1, 4)), Err(InflightError::TooSmall { is: 127, due: 128 })));
        assert!(matches!(map(info(1 << 40, 1, 4)), Err(InflightError::Map(_))), "longer than its file");
        for (queues, size) in [(0, 4), (1, 0), (257, 4), (1, 32769)] {
            assert!(matches!(map(info(u64::MAX, queues, size)), Err(InflightError::Shape { .. })));
            assert!(create(queues, size, true).is_err());
        }
    }

    #[test]
    fn nobody_can_shorten_an_area_of_ours() {
        let (file, bytes) = create(1, 128, true).expect("made");
        assert!(ftruncate(&file, bytes - 1).is_err());
        assert!(ftruncate(&file, bytes + 1).is_err());
    }
}
