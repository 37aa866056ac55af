//! Encodes and decodes a block: requests and names.
//!
//! Decoding terminates for arbitrary bytes, and its memory is bounded by [`MAX_BYTES`] and
//! [`MAX_ENTRIES`].

use super::{MAX_BYTES, MAX_ENTRIES, MAX_NAMES, RecordedTimes, RecordingEntry};
use crate::record::RequestOp;

/// Content of a block.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct RecordingBlock {
    /// Number of requests since the previous block that were dropped because the buffer was full.
    pub(super) lost: u64,
    pub(super) disks: Vec<String>,
    pub(super) limits: Vec<String>,
    /// Sorted by arrival.
    pub(super) entries: Vec<RecordingEntry>,
}

const FAILED: u64 = 8;
// Readers without support for it reject the kind, and the block as damaged.
const UNMEASURED: u64 = 16;
const COLUMNS: usize = 8;
// Offsets and lengths are mostly multiples of 4096.
const MAX_SHIFT: u32 = 12;

impl RecordingBlock {
    /// Appends the encoded block.
    pub(super) fn encode(&self, bytes: &mut Vec<u8>) {
        push_column(bytes, self.lost);
        for names in [&self.disks, &self.limits] {
            push_column(bytes, names.len() as u64);
            for name in names {
                push_column(bytes, name.len() as u64);
                bytes.extend_from_slice(name.as_bytes());
            }
        }
        push_column(bytes, self.entries.len() as u64);
        // The shift that loses no bit of any request.
        let shift = self.entries.iter().map(|entry| (entry.offset | entry.length).trailing_zeros()).min();
        let shift = shift.unwrap_or(0).min(MAX_SHIFT);
        push_column(bytes, shift.into());
        // Columns of like numbers compress better than rows.
        for column in self.columns(shift) {
            push_column(bytes, column.len() as u64);
            bytes.extend_from_slice(&column);
        }
    }

    fn columns(&self, shift: u32) -> [Vec<u8>; COLUMNS] {
        let mut columns: [Vec<u8>; COLUMNS] = Default::default();
        // Offsets are relative to the end of the disk's previous request: 0 for sequential access.
        let mut before_ns = 0;
        let mut ends = vec![0_u64; self.disks.len()];
        for entry in &self.entries {
            let end = &mut ends[entry.disk as usize];
            let distance = (entry.offset >> shift).wrapping_sub(*end >> shift).cast_signed();
            let flag = |is_set: bool, flag: u64| if is_set { flag } else { 0 };
            let kind =
                entry.op.code() | flag(entry.has_failed, FAILED) | flag(entry.times.is_none(), UNMEASURED);
            let RecordedTimes { wait_ns, service_ns } = entry.times.unwrap_or_default();
            // The order of the columns is part of the format.
            let numbers = [
                entry.arrival_ns - before_ns,
                wait_ns,
                service_ns,
                zigzag(distance),
                entry.length >> shift,
                kind,
                entry.disk.into(),
                entry.limit.map_or(0, |limit| u64::from(limit) + 1),
            ];
            for (column, number) in columns.iter_mut().zip(numbers) {
                push_column(column, number);
            }
            before_ns = entry.arrival_ns;
            *end = entry.offset + entry.length;
        }
        columns
    }

    /// Decodes a block; `None` if the bytes are invalid.
    pub(super) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes;
        let lost = take_column(&mut rest)?;
        let disks = names(&mut rest)?;
        let limits = names(&mut rest)?;
        let count = usize::try_from(take_column(&mut rest)?).ok().filter(|count| *count <= MAX_ENTRIES)?;
        let shift = u32::try_from(take_column(&mut rest)?).ok().filter(|shift| *shift <= MAX_SHIFT)?;
        let mut columns = [&[][..]; COLUMNS];
        for column in &mut columns {
            *column = part(&mut rest)?;
        }
        // `count` is at most `MAX_ENTRIES` here, so the capacity is bounded.
        let mut entries = Vec::with_capacity(count);
        let mut before_ns = 0_u64;
        let mut ends = vec![0_u64; disks.len()];
        for _ in 0..count {
            let mut numbers = [0; COLUMNS];
            for (number, column) in numbers.iter_mut().zip(&mut columns) {
                *number = take_column(column)?;
            }
            let [arrival, wait_ns, service_ns, distance, length, kind, disk, limit] = numbers;
            let end = ends.get_mut(usize::try_from(disk).ok()?)?;
            let place = (*end >> shift).wrapping_add(unzigzag(distance).cast_unsigned());
            let [offset, length] = [place, length].map(|number| number.checked_mul(1 << shift));
            let times = RecordedTimes { wait_ns, service_ns };
            // Unmeasured times must be 0, so that a block has only one encoding.
            let is_measured = kind & UNMEASURED == 0;
            if !is_measured && times != RecordedTimes::default() {
                return None;
            }
            let entry = RecordingEntry {
                arrival_ns: before_ns.checked_add(arrival)?,
                times: is_measured.then_some(times),
                offset: offset?,
                length: length?,
                op: RequestOp::of_code(kind & !(FAILED | UNMEASURED))?,
                has_failed: kind & FAILED != 0,
                disk: u32::try_from(disk).ok()?,
                limit: limit.checked_sub(1).map(u32::try_from).transpose().ok()?,
            };
            if entry.limit.is_some_and(|limit| limit as usize >= limits.len()) {
                return None;
            }
            before_ns = entry.arrival_ns;
            *end = entry.offset.checked_add(entry.length)?;
            entries.push(entry);
        }
        // Trailing bytes are damage.
        let is_whole = rest.is_empty() && columns.iter().all(|column| column.is_empty());
        is_whole.then_some(Self { lost, disks, limits, entries })
    }
}

impl RequestOp {
    fn code(self) -> u64 {
        Self::ALL.iter().position(|op| *op == self).expect("it is one of all") as u64
    }

    fn of_code(code: u64) -> Option<Self> {
        Self::ALL.get(usize::try_from(code).ok()?).copied()
    }
}

fn names(rest: &mut &[u8]) -> Option<Vec<String>> {
    let count = usize::try_from(take_column(rest)?).ok().filter(|count| *count <= MAX_NAMES)?;
    (0..count).map(|_| String::from_utf8(part(rest)?.to_vec()).ok()).collect()
}

/// Decodes a length and returns that many bytes.
pub(super) fn part<'a>(rest: &mut &'a [u8]) -> Option<&'a [u8]> {
    let length = usize::try_from(take_column(rest)?).ok().filter(|length| *length <= MAX_BYTES)?;
    let (part, remaining) = rest.split_at_checked(length)?;
    *rest = remaining;
    Some(part)
}

pub(super) fn push_column(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

pub(super) fn take_column(rest: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..u64::BITS).step_by(7) {
        let (&byte, remaining) = rest.split_first()?;
        *rest = remaining;
        let bits = u64::from(byte & 0x7f);
        // More bits than 64 are an error; overlong zeroes are accepted.
        if bits << shift >> shift != bits {
            return None;
        }
        number |= bits << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn zigzag(number: i64) -> u64 {
    (number << 1 ^ number >> 63).cast_unsigned()
}

fn unzigzag(number: u64) -> i64 {
    (number >> 1).cast_signed() ^ -(number & 1).cast_signed()
}
