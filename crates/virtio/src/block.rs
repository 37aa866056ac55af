//! Requests of a virtio block device (virtio 1.3 § 5.2.6): what a chain of descriptors asks for.
//!
//! ```text
//!   readable:  type, priority, sector │ data of a write, or ranges
//!   writable:  data of a read         │ status
//! ```
//!
//! How the descriptors divide the two rows is the driver's affair. The header and the ranges are
//! copied once; of a guest's data nothing is looked at here.
//!
//! A request that is not valid is one with its answer: see [`Kind::Done`] and
//! [`Kind::PartOfBlock`]. So whoever carries requests out only meets ranges that lie inside the
//! disk, are allowed, and are whole blocks.
//!
//! virtio counts in sectors of 512 bytes and only recommends that a driver respects `blk_size` (§
//! 5.2.6). Here a request that begins or ends inside a block gets an error, also from a driver that
//! did not negotiate `VIRTIO_BLK_F_BLK_SIZE`; otherwise a fault of the guest stays hidden until its
//! disk moves to a real device with such blocks. QEMU checks the beginning only. Blocks have 512 to
//! 4096 bytes, as the kernel of a guest accepts no more than a page.

#[cfg(test)]
#[path = "block_tests.rs"]
mod tests;

use reactor::guest::Place;
use smallvec::SmallVec;

use super::ring::{Chain, Places, Ticket};

/// The unit of a request's offset, its length and the device's capacity, whatever its blocks are.
pub const SECTOR_BYTES: u64 = 512;
/// Bytes that a driver leaves for the answer to GET_ID.
pub const ID_BYTES: usize = 20;

/// Type, priority and sector.
const HEADER_BYTES: usize = 16;
/// One range of DISCARD and WRITE_ZEROES: sector, sectors, flags.
const RANGE_BYTES: usize = 16;
/// `VIRTIO_BLK_WRITE_ZEROES_FLAG_UNMAP`, the only one that there is.
const UNMAP: u32 = 1;
/// More ranges than that are in no request: so many fit a page.
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

/// The last byte of an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Status {
    /// `VIRTIO_BLK_S_OK`
    Ok = 0,
    /// `VIRTIO_BLK_S_IOERR`: it failed, or must not be.
    IoError = 1,
    /// `VIRTIO_BLK_S_UNSUPP`: the device does not know it.
    Unsupported = 2,
}

/// What requests are judged by: what the device told the driver of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Device {
    /// How large it is. A rest that is no block cannot be reached.
    pub bytes: u64,
    /// What requests begin and end at multiples of (`VIRTIO_BLK_F_BLK_SIZE`): a power of two from
    /// [`SECTOR_BYTES`] on.
    pub block_bytes: u64,
    /// No request may change it (`VIRTIO_BLK_F_RO`).
    pub read_only: bool,
    /// The most descriptors with data in one request (`VIRTIO_BLK_F_SEG_MAX`).
    pub max_segments: u32,
    /// DISCARD, if it is offered.
    pub discard: Option<RangeLimits>,
    /// WRITE_ZEROES, if it is offered.
    pub write_zeroes: Option<RangeLimits>,
}

/// What a DISCARD or WRITE_ZEROES may ask for at once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RangeLimits {
    /// Sectors in one range.
    pub max_sectors: u32,
    /// Ranges in one request, at most 256 whatever is said here.
    pub max_ranges: u32,
}

/// Bytes of the disk, inside it, in whole blocks, at least one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Range {
    /// The first.
    pub offset: u64,
    /// How many.
    pub bytes: u64,
    /// Of WRITE_ZEROES: the blocks may be given back, as long as they read as zeroes.
    pub may_unmap: bool,
}

/// Ranges of one request, in its order. They may overlap.
pub type Ranges = SmallVec<[Range; 1]>;

/// Where the data of one request is: mostly in one place. A request is moved often, a [`Places`]
/// is large.
pub type Data = SmallVec<[Place; 1]>;

/// What is to be done.
#[derive(Debug)]
pub enum Kind {
    /// Fill these places from the disk.
    Read {
        /// In bytes.
        offset: u64,
        /// Where to: whole blocks together, at least one.
        into: Data,
    },
    /// Write them to the disk.
    Write {
        /// In bytes.
        offset: u64,
        /// From where: whole blocks together, at least one.
        from: Data,
    },
    /// What was completed before this was taken has to be on the medium.
    Flush,
    /// The disk's name: see [`Request::answer_id`].
    Id(Data),
    /// These bytes are no longer needed.
    Discard(Ranges),
    /// These bytes are to read as zeroes.
    WriteZeroes(Ranges),
    /// Nothing: this is the answer.
    Done(Status),
    /// Nothing, since it begins or ends within a block: it is to fail, and somebody should hear of
    /// it.
    PartOfBlock,
}

/// A request that can be answered.
#[derive(Debug)]
pub struct Request {
    /// What is to be done.
    pub kind: Kind,
    /// Where the answer goes: one byte.
    status: Place,
    /// Bytes that are writable before it.
    data_bytes: u32,
}

impl Request {
    /// Bytes that it reads or writes of the disk, or discards.
    pub fn bytes(&self) -> u64 {
        match &self.kind {
            Kind::Read { into: places, .. } | Kind::Write { from: places, .. } => sum(places) as u64,
            Kind::Discard(ranges) | Kind::WriteZeroes(ranges) => ranges.iter().map(|range| range.bytes).sum(),
            Kind::Flush | Kind::Id(_) | Kind::Done(_) | Kind::PartOfBlock => 0,
        }
    }

    /// Where the answer goes.
    pub fn status_place(&self) -> &Place {
        &self.status
    }

    /// Answers GET_ID with the beginning of `id`, and zeroes behind it; a request of another kind
    /// is left alone.
    pub fn answer_id(&self, id: &[u8]) {
        let Kind::Id(places) = &self.kind else { return };
        let mut rest = &id[..id.len().min(ID_BYTES)];
        for place in places {
            let (part, after) = rest.split_at(rest.len().min(place.bytes()));
            place.write(0, part);
            place.fill(part.len(), place.bytes() - part.len(), 0);
            rest = after;
        }
    }

    /// Writes the answer. What `Ring::complete` is to be told: how many bytes were written from the
    /// first writable one on (§ 2.7.8.2).
    #[must_use]
    pub fn finish(self, status: Status) -> u32 {
        self.status.write(0, &[status as u8]);
        let fills = matches!(self.kind, Kind::Read { .. } | Kind::Id(_)) && status == Status::Ok;
        // Nobody knows how much a failed read has filled. Where the answer alone is writable, it
        // was written.
        if fills || self.data_bytes == 0 { self.data_bytes + 1 } else { 0 }
    }
}

/// What a chain asks of `device`, and its ticket. No request: it has no room for an answer, and
/// goes back with nothing written.
#[inline]
pub fn parse(chain: Chain, device: &Device) -> (Ticket, Option<Request>) {
    let Chain { ticket, mut places, reads, descriptors, fault } = chain;
    if places.len() == reads {
        return (ticket, None);
    }
    let Some(last) = places.pop() else { return (ticket, None) };
    // No place is empty.
    let before = last.bytes() - 1;
    let status = if before == 0 {
        last
    } else {
        places.push(last.part(0, before));
        last.part(before, 1)
    };
    let data_bytes = sum(&places[reads..]) as u32;
    let judged = match fault {
        Some(_) => Err(Status::IoError.into()),
        None => judge(places, reads, descriptors, device),
    };
    let kind = judged.unwrap_or_else(|refused| match refused {
        Refused::With(status) => Kind::Done(status),
        Refused::PartOfBlock => Kind::PartOfBlock,
    });
    (ticket, Some(Request { kind, status, data_bytes }))
}

/// There is nothing to be done.
#[derive(Clone, Copy)]
enum Refused {
    With(Status),
    /// See [`Kind::PartOfBlock`].
    PartOfBlock,
}

impl From<Status> for Refused {
    fn from(status: Status) -> Self {
        Self::With(status)
    }
}

/// The first `reads` places are readable, those that are writable do not have the answer.
#[inline]
fn judge(mut places: Places, reads: usize, descriptors: usize, device: &Device) -> Result<Kind, Refused> {
    let mut header = [0; HEADER_BYTES];
    let mut readable = &mut places[..reads];
    if !take(&mut readable, &mut header) {
        return Err(Status::IoError.into());
    }
    let taken = reads - readable.len();
    // The priority, at 4, is for nobody.
    let sector = u64::from_le_bytes(header[8..].try_into().expect("eight bytes"));
    let kind = u32::from_le_bytes(header[..4].try_into().expect("four bytes"));
    match kind {
        kind::IN => {
            let into: Data = places.drain(reads..).collect();
            let offset = device.data(&into, sector, descriptors)?;
            Ok(Kind::Read { offset, into })
        }
        kind::OUT => {
            device.changes()?;
            let from: Data = places.drain(taken..reads).collect();
            let offset = device.data(&from, sector, descriptors)?;
            Ok(Kind::Write { offset, from })
        }
        kind::FLUSH => Ok(Kind::Flush),
        kind::GET_ID => Ok(Kind::Id(places.drain(reads..).collect())),
        kind::DISCARD => device.ranges(readable, device.discard, 0).map(Kind::Discard),
        kind::WRITE_ZEROES => device.ranges(readable, device.write_zeroes, UNMAP).map(Kind::WriteZeroes),
        _ => Err(Status::Unsupported.into()),
    }
}

impl Device {
    /// Where in the disk these sectors are, in bytes.
    fn place(&self, sector: u64, sectors: u64) -> Result<u64, Refused> {
        let end = sector.checked_add(sectors).ok_or(Status::IoError)?;
        let rest = (sector | sectors) & (self.block_bytes / SECTOR_BYTES - 1);
        // So the product is inside 64 bits.
        match (rest, end > self.bytes / SECTOR_BYTES) {
            (0, false) => Ok(sector * SECTOR_BYTES),
            (0, true) => Err(Status::IoError.into()),
            _ => Err(Refused::PartOfBlock),
        }
    }

    /// Where in the disk the data of a read or write is, in bytes.
    fn data(&self, places: &[Place], sector: u64, descriptors: usize) -> Result<u64, Refused> {
        // Header and answer may have descriptors of their own.
        let most = u64::from(self.max_segments);
        // A buffer may cross from one region of memory into the next, which few do.
        if descriptors.saturating_sub(2) as u64 > most || places.len() as u64 > 2 * most {
            return Err(Status::IoError.into());
        }
        let bytes = sum(places) as u64;
        if !bytes.is_multiple_of(SECTOR_BYTES) {
            return Err(Status::IoError.into());
        }
        let offset = self.place(sector, bytes / SECTOR_BYTES)?;
        // Nothing to do, but not wrong.
        if bytes == 0 { Err(Status::Ok.into()) } else { Ok(offset) }
    }

    fn changes(&self) -> Result<(), Refused> {
        if self.read_only { Err(Status::IoError.into()) } else { Ok(()) }
    }

    /// The ranges of a DISCARD or WRITE_ZEROES; those of no sectors are left out.
    fn ranges(
        &self,
        mut from: &mut [Place],
        limits: Option<RangeLimits>,
        known: u32,
    ) -> Result<Ranges, Refused> {
        let limits = limits.ok_or(Status::Unsupported)?;
        self.changes()?;
        let bytes = sum(from);
        let count = bytes / RANGE_BYTES;
        let most = (limits.max_ranges as usize).min(MAX_RANGES);
        if count == 0 || count > most || !bytes.is_multiple_of(RANGE_BYTES) {
            return Err(Status::IoError.into());
        }
        let mut ranges = Ranges::new();
        for _ in 0..count {
            let mut range = [0; RANGE_BYTES];
            assert!(take(&mut from, &mut range), "counted");
            let (sector, rest) = range.split_at(8);
            let sector = u64::from_le_bytes(sector.try_into().expect("eight bytes"));
            let rest = u64::from_le_bytes(rest.try_into().expect("eight bytes"));
            let (sectors, flags) = (rest as u32, (rest >> 32) as u32);
            if flags & !known != 0 {
                return Err(Status::Unsupported.into());
            }
            if sectors > limits.max_sectors {
                return Err(Status::IoError.into());
            }
            let offset = self.place(sector, u64::from(sectors))?;
            let bytes = u64::from(sectors) * SECTOR_BYTES;
            if bytes > 0 {
                ranges.push(Range { offset, bytes, may_unmap: flags & UNMAP != 0 });
            }
        }
        // Nothing to do, but not wrong.
        if ranges.is_empty() { Err(Status::Ok.into()) } else { Ok(ranges) }
    }
}

fn sum(places: &[Place]) -> usize {
    places.iter().map(Place::bytes).sum()
}

/// Copies from the beginning of `places`, and takes away what was copied. False: they are too
/// short.
fn take(places: &mut &mut [Place], into: &mut [u8]) -> bool {
    let mut rest = std::mem::take(places);
    let mut left = into;
    while !left.is_empty() {
        let Some(place) = rest.first_mut() else { return false };
        let bytes = place.bytes().min(left.len());
        let (part, after) = left.split_at_mut(bytes);
        place.read(0, part);
        left = after;
        if bytes < place.bytes() {
            *place = place.part(bytes, place.bytes() - bytes);
        } else {
            rest = &mut rest[1..];
        }
    }
    *places = rest;
    true
}
