//! Requests of a virtio block device (virtio 1.3 § 5.2.6), parsed from chains of descriptors.
//!
//! ```text
//!   readable:  type, priority, sector │ data of a write, or ranges
//!   writable:  data of a read         │ status
//! ```
//!
//! The driver may divide the two rows into descriptors as it likes. The header and the ranges are
//! copied once; the data of a request is not accessed here.
//!
//! An invalid request already has its result: see [`BlkOperation::Completed`] and
//! [`BlkOperation::PartOfBlock`]. So the code that executes requests only sees ranges that lie
//! inside the disk, are permitted, and are whole blocks.
//!
//! virtio counts in sectors of 512 bytes and only recommends that a driver respects `blk_size` (§
//! 5.2.6). Here a request that begins or ends inside a block fails, also from a driver that did not
//! negotiate `VIRTIO_BLK_F_BLK_SIZE`; otherwise an error of the guest stays hidden until its disk
//! moves to a real device with such blocks. QEMU checks the beginning only. Blocks have 512 to 4096
//! bytes, as a guest's kernel accepts no more than a page.

#[cfg(test)]
#[path = "block_tests.rs"]
mod tests;

use reactor::guest::GuestBytes;
use smallvec::SmallVec;

use super::ring::{ChainMemory, ChainTicket, DescriptorChain};

/// Unit of a request's offset and length and of the device's capacity, whatever its block size.
pub const SECTOR_BYTES: u64 = 512;
/// Length of the buffer for the result of GET_ID.
pub const ID_BYTES: usize = 20;

/// Length of the header: type, priority and sector.
const HEADER_BYTES: usize = 16;
/// Length of one range of DISCARD and WRITE_ZEROES: sector, number of sectors, flags.
const RANGE_BYTES: usize = 16;
/// `VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`, the only defined flag.
const UNMAP: u32 = 1;
/// Maximum number of ranges in a request: as many as fit a page.
const MAX_RANGES: usize = 256;

/// `VIRTIO_BLK_T_…`
mod kind {
    pub(super) const IN: u32 = 0;
    pub(super) const OUT: u32 = 1;
    pub(super) const FLUSH: u32 = 4;
    pub(super) const GET_ID: u32 = 8;
    pub(super) const DISCARD: u32 = 11;
    pub(super) const WRITE_ZEROES: u32 = 13;
}

/// Status byte of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum BlkStatus {
    /// `VIRTIO_BLK_S_OK`
    Ok = 0,
    /// `VIRTIO_BLK_S_IOERR`: it failed, or is not permitted.
    IoError = 1,
    /// `VIRTIO_BLK_S_UNSUPP`: the device does not support it.
    Unsupported = 2,
}

/// Properties of the device that the driver has read, against which requests are validated.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BlkDeviceConfig {
    /// Size of the disk. A partial block at the end is not accessible.
    pub bytes: u64,
    /// Granularity of requests (`VIRTIO_BLK_F_BLK_SIZE`): a power of two, at least
    /// [`SECTOR_BYTES`].
    pub block_bytes: u64,
    /// True if requests must not change the disk (`VIRTIO_BLK_F_RO`).
    pub read_only: bool,
    /// Maximum number of descriptors with data in one request (`VIRTIO_BLK_F_SEG_MAX`).
    pub max_segments: u32,
    /// Limits of DISCARD; `None` if it is not offered.
    pub discard: Option<RangeLimits>,
    /// Limits of WRITE_ZEROES; `None` if it is not offered.
    pub write_zeroes: Option<RangeLimits>,
}

/// Limits of a DISCARD or WRITE_ZEROES request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLimits {
    /// Maximum number of sectors in one range.
    pub max_sectors: u32,
    /// Maximum number of ranges in one request; values above 256 count as 256.
    pub max_ranges: u32,
}

/// Range inside the disk, of whole blocks, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlkRange {
    /// Offset in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub bytes: u64,
    /// For WRITE_ZEROES, true if the blocks may be deallocated, as long as they read as zeroes.
    pub may_unmap: bool,
}

/// Ranges of one request, in their order. They may overlap.
pub type Ranges = SmallVec<[BlkRange; 1]>;

/// Guest memory of one request's data, mostly one piece. The inline capacity is small because
/// requests are moved often and a `ChainMemory` is large.
pub type Data = SmallVec<[GuestBytes; 1]>;

/// Operation of a request.
#[derive(Debug)]
pub enum BlkOperation {
    /// Read from the disk.
    Read {
        /// Offset in bytes.
        offset: u64,
        /// Guest memory to read into: whole blocks in total, at least one.
        into: Data,
    },
    /// Write to the disk.
    Write {
        /// Offset in bytes.
        offset: u64,
        /// Guest memory to write from: whole blocks in total, at least one.
        from: Data,
    },
    /// Flush everything that was completed before this request was taken.
    Flush,
    /// Return the disk's name: see [`BlkRequest::write_id`].
    Id(Data),
    /// Discard these ranges.
    Discard(Ranges),
    /// Make these ranges read as zeroes.
    WriteZeroes(Ranges),
    /// No operation: complete with this status.
    Completed(BlkStatus),
    /// No operation, since it begins or ends inside a block: fail it, and log the violation.
    PartOfBlock,
}

/// A parsed request.
#[derive(Debug)]
pub struct BlkRequest {
    /// Operation to execute.
    pub kind: BlkOperation,
    /// Guest memory of the status byte.
    status: GuestBytes,
    /// Number of writable bytes before the status.
    data_bytes: u32,
}

impl BlkRequest {
    /// Number of bytes of the disk that it reads, writes or discards.
    pub fn bytes(&self) -> u64 {
        match &self.kind {
            BlkOperation::Read { into: segments, .. } | BlkOperation::Write { from: segments, .. } => {
                sum(segments) as u64
            }
            BlkOperation::Discard(ranges) | BlkOperation::WriteZeroes(ranges) => {
                ranges.iter().map(|range| range.bytes).sum()
            }
            BlkOperation::Flush
            | BlkOperation::Id(_)
            | BlkOperation::Completed(_)
            | BlkOperation::PartOfBlock => 0,
        }
    }

    /// Guest memory of the status byte.
    #[inline]
    pub fn status_place(&self) -> &GuestBytes {
        &self.status
    }

    /// Writes the result of GET_ID: `id`, truncated or padded with zeroes. Does nothing for other
    /// requests.
    pub fn write_id(&self, id: &[u8]) {
        let BlkOperation::Id(segments) = &self.kind else { return };
        let mut remaining = &id[..id.len().min(ID_BYTES)];
        for segment in segments {
            let (front, tail) = remaining.split_at(remaining.len().min(segment.bytes()));
            segment.write(0, front);
            segment.fill(front.len(), segment.bytes() - front.len(), 0);
            remaining = tail;
        }
    }

    /// Writes the status. Returns the length for `Virtqueue::complete`: the number of bytes
    /// written, counted from the first writable one (§ 2.7.8.2).
    #[must_use]
    #[inline]
    pub fn finish(self, status: BlkStatus) -> u32 {
        self.status.write(0, &[status as u8]);
        let fills =
            matches!(self.kind, BlkOperation::Read { .. } | BlkOperation::Id(_)) && status == BlkStatus::Ok;
        // The length counts contiguous bytes from the first writable one. How much a failed read
        // has written is unknown, so it is 0. If only the status is writable, its byte counts.
        if fills || self.data_bytes == 0 { self.data_bytes + 1 } else { 0 }
    }
}

/// Parses the request of a chain for `device`, and returns it with the chain's ticket. `None` if
/// the chain has no space for the status: it is completed with nothing written.
#[inline]
pub fn parse(chain: DescriptorChain, device: &BlkDeviceConfig) -> (ChainTicket, Option<BlkRequest>) {
    let DescriptorChain { ticket, segments: mut places, reads, descriptors, fault } = chain;
    // No writable byte: there is no space for the status, so the request cannot report any result.
    if places.len() == reads {
        return (ticket, None);
    }
    let Some(last) = places.pop() else { return (ticket, None) };
    // A piece is never empty.
    let leading_bytes = last.bytes() - 1;
    // The driver may put the status behind the data in one descriptor.
    let status = if leading_bytes == 0 {
        last
    } else {
        places.push(last.part(0, leading_bytes));
        last.part(leading_bytes, 1)
    };
    let data_bytes = sum(&places[reads..]) as u32;
    let operation = match fault {
        Some(_) => Err(BlkStatus::IoError.into()),
        None => validate(places, reads, descriptors, device),
    };
    let kind = operation.unwrap_or_else(|rejection| match rejection {
        BlkRejection::With(status) => BlkOperation::Completed(status),
        BlkRejection::PartOfBlock => BlkOperation::PartOfBlock,
    });
    (ticket, Some(BlkRequest { kind, status, data_bytes }))
}

/// Reason why there is no operation.
#[derive(Clone, Copy)]
enum BlkRejection {
    With(BlkStatus),
    /// See [`BlkOperation::PartOfBlock`].
    PartOfBlock,
}

impl From<BlkStatus> for BlkRejection {
    fn from(status: BlkStatus) -> Self {
        Self::With(status)
    }
}

/// Parses and validates a request. The first `reads` pieces are readable; the writable ones do not
/// include the status.
#[inline]
fn validate(
    mut segments: ChainMemory,
    reads: usize,
    descriptors: usize,
    device: &BlkDeviceConfig,
) -> Result<BlkOperation, BlkRejection> {
    let mut header = [0; HEADER_BYTES];
    let mut readable = &mut segments[..reads];
    if !copy_front(&mut readable, &mut header) {
        return Err(BlkStatus::IoError.into());
    }
    let consumed = reads - readable.len();
    // The priority, at offset 4, is ignored.
    let sector = u64::from_le_bytes(header[8..].try_into().expect("eight bytes"));
    let kind = u32::from_le_bytes(header[..4].try_into().expect("four bytes"));
    match kind {
        kind::IN => {
            let into: Data = segments.drain(reads..).collect();
            let offset = device.data_offset(&into, sector, descriptors)?;
            Ok(BlkOperation::Read { offset, into })
        }
        kind::OUT => {
            device.check_writable()?;
            let from: Data = segments.drain(consumed..reads).collect();
            let offset = device.data_offset(&from, sector, descriptors)?;
            Ok(BlkOperation::Write { offset, from })
        }
        kind::FLUSH => Ok(BlkOperation::Flush),
        kind::GET_ID => Ok(BlkOperation::Id(segments.drain(reads..).collect())),
        // No flag is valid for DISCARD (§ 5.2.6.2).
        kind::DISCARD => device.ranges(readable, device.discard, 0).map(BlkOperation::Discard),
        kind::WRITE_ZEROES => {
            device.ranges(readable, device.write_zeroes, UNMAP).map(BlkOperation::WriteZeroes)
        }
        _ => Err(BlkStatus::Unsupported.into()),
    }
}

impl BlkDeviceConfig {
    /// Byte offset of a range of sectors, if it is inside the disk and of whole blocks.
    #[inline]
    fn byte_offset(&self, sector: u64, sectors: u64) -> Result<u64, BlkRejection> {
        let end = sector.checked_add(sectors).ok_or(BlkStatus::IoError)?;
        // Both must be multiples of the block, which is a power of two.
        let misaligned = (sector | sectors) & (self.block_bytes / SECTOR_BYTES - 1);
        // `end` is at most the disk's size in sectors, so the product does not overflow.
        match (misaligned, end > self.bytes / SECTOR_BYTES) {
            (0, false) => Ok(sector * SECTOR_BYTES),
            (0, true) => Err(BlkStatus::IoError.into()),
            _ => Err(BlkRejection::PartOfBlock),
        }
    }

    /// Byte offset of the data of a read or write.
    #[inline]
    fn data_offset(
        &self,
        segments: &[GuestBytes],
        sector: u64,
        descriptors: usize,
    ) -> Result<u64, BlkRejection> {
        // The header and the status may have their own descriptors.
        let max_segments = u64::from(self.max_segments);
        // A buffer that crosses a border of memory regions has two pieces, which is rare.
        if descriptors.saturating_sub(2) as u64 > max_segments || segments.len() as u64 > 2 * max_segments {
            return Err(BlkStatus::IoError.into());
        }
        let bytes = sum(segments) as u64;
        if !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(BlkStatus::IoError.into());
        }
        // Before the test for an empty request, whose sector must be valid too.
        let offset = self.byte_offset(sector, bytes / SECTOR_BYTES)?;
        // An empty request is valid.
        if bytes == 0 { Err(BlkStatus::Ok.into()) } else { Ok(offset) }
    }

    #[inline]
    fn check_writable(&self) -> Result<(), BlkRejection> {
        if self.read_only { Err(BlkStatus::IoError.into()) } else { Ok(()) }
    }

    /// The ranges of a DISCARD or WRITE_ZEROES, without empty ones.
    fn ranges(
        &self,
        mut from: &mut [GuestBytes],
        limits: Option<RangeLimits>,
        known_flags: u32,
    ) -> Result<Ranges, BlkRejection> {
        let limits = limits.ok_or(BlkStatus::Unsupported)?;
        self.check_writable()?;
        let bytes = sum(from);
        let count = bytes / RANGE_BYTES;
        let max_ranges = (limits.max_ranges as usize).min(MAX_RANGES);
        if count == 0 || count > max_ranges || !bytes.is_multiple_of(RANGE_BYTES) {
            return Err(BlkStatus::IoError.into());
        }
        let mut ranges = Ranges::new();
        for _ in 0..count {
            let mut range = [0; RANGE_BYTES];
            assert!(copy_front(&mut from, &mut range), "counted");
            let (sector, size_and_flags) = range.split_at(8);
            let sector = u64::from_le_bytes(sector.try_into().expect("eight bytes"));
            let size_and_flags = u64::from_le_bytes(size_and_flags.try_into().expect("eight bytes"));
            let (sectors, flags) = (size_and_flags as u32, (size_and_flags >> 32) as u32);
            // Unknown flags make the request unsupported (§ 5.2.6.2), not invalid.
            if flags & !known_flags != 0 {
                return Err(BlkStatus::Unsupported.into());
            }
            if sectors > limits.max_sectors {
                return Err(BlkStatus::IoError.into());
            }
            let offset = self.byte_offset(sector, u64::from(sectors))?;
            let bytes = u64::from(sectors) * SECTOR_BYTES;
            if bytes > 0 {
                ranges.push(BlkRange { offset, bytes, may_unmap: flags & UNMAP != 0 });
            }
        }
        // A request of empty ranges is valid.
        if ranges.is_empty() { Err(BlkStatus::Ok.into()) } else { Ok(ranges) }
    }
}

#[inline]
fn sum(segments: &[GuestBytes]) -> usize {
    segments.iter().map(GuestBytes::bytes).sum()
}

/// Copies from the beginning of `segments`, and removes the copied bytes. False if there are too
/// few.
#[inline]
fn copy_front(segments: &mut &mut [GuestBytes], target: &mut [u8]) -> bool {
    let mut remaining = std::mem::take(segments);
    let mut unfilled = target;
    while !unfilled.is_empty() {
        let Some(segment) = remaining.first_mut() else { return false };
        let bytes = segment.bytes().min(unfilled.len());
        let (front, tail) = unfilled.split_at_mut(bytes);
        segment.read(0, front);
        unfilled = tail;
        if bytes < segment.bytes() {
            *segment = segment.part(bytes, segment.bytes() - bytes);
        } else {
            remaining = &mut remaining[1..];
        }
    }
    *segments = remaining;
    true
}
