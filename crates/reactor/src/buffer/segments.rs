//! Data of requests: pieces of memory that are consecutive on the disk, in this process's own
//! memory or a guest's.
//!
//! A guest can change its memory at any time, so a segment never yields a `&[u8]` of it. Code that
//! passes data on (to the kernel, to another layer) does not read it. Code that must read it (to
//! compress, encrypt, compare, or because the device requires other alignment) copies it first, by
//! [`Segments::joined`], [`Segments::copy_to`] or [`Segment::bytes`], and uses the copy only. These
//! copies are [counted](guest_copies).

use std::{borrow::Cow, cell::Cell};

use smallvec::SmallVec;

use super::IoBuffer;
use crate::guest::GuestBytes;

/// Bytes compared at a time when searching for a byte that is not zero: mostly the first piece has
/// one.
const ZERO_CHECK_BYTES: usize = 512;

/// Copies of this thread between guests' memory and its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GuestCopies {
    /// Number of copies.
    pub count: u64,
    /// Number of bytes copied.
    pub bytes: u64,
}

thread_local! {
    static COPIES: Cell<GuestCopies> = const { Cell::new(GuestCopies { count: 0, bytes: 0 }) };
}

/// Copies of this thread, since its start, between guests' memory and its own that were needed
/// because the data could not be passed on in place. Excludes storage in memory, whose I/O is a
/// copy.
pub fn guest_copies() -> GuestCopies {
    COPIES.get()
}

fn count_copy(bytes: usize) {
    let GuestCopies { count, bytes: before } = COPIES.get();
    COPIES.set(GuestCopies { count: count + 1, bytes: before + bytes as u64 });
}

/// One piece of memory with data of a request.
#[derive(Debug)]
pub enum Segment {
    /// Memory of this process, or a view of shared immutable memory.
    Own(IoBuffer),
    /// A guest's memory.
    Guest(GuestBytes),
}

impl Segment {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Own(buffer) => buffer.len(),
            Self::Guest(place) => place.bytes(),
        }
    }

    /// True if the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// See [`IoBuffer::is_known_zero`]. Always false for a guest's memory.
    pub fn is_known_zero(&self) -> bool {
        matches!(self, Self::Own(buffer) if buffer.is_known_zero())
    }

    /// True if all bytes are zero now. A guest may change its memory immediately afterwards.
    fn is_zero(&self) -> bool {
        let is_zero = |bytes: &[u8]| bytes.iter().all(|&byte| byte == 0);
        match self {
            Self::Own(buffer) => buffer.is_known_zero() || buffer.chunks(ZERO_CHECK_BYTES).all(is_zero),
            Self::Guest(place) => {
                let mut chunk = [0; ZERO_CHECK_BYTES];
                (0..place.bytes()).step_by(ZERO_CHECK_BYTES).all(|at| {
                    let part = &mut chunk[..ZERO_CHECK_BYTES.min(place.bytes() - at)];
                    place.read(at, part);
                    is_zero(part)
                })
            }
        }
    }

    /// The bytes; copied if they are a guest's. Each call reads the guest's memory again, which may
    /// have changed.
    pub fn bytes(&self) -> Cow<'_, [u8]> {
        match self {
            Self::Own(buffer) => Cow::Borrowed(buffer),
            Self::Guest(place) => {
                count_copy(place.bytes());
                let mut copy = vec![0; place.bytes()];
                place.read(0, &mut copy);
                Cow::Owned(copy)
            }
        }
    }

    /// Copies the bytes from `at` on; fills `target`.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub fn read(&self, at: usize, target: &mut [u8]) {
        match self {
            Self::Own(buffer) => target.copy_from_slice(&buffer[at..at + target.len()]),
            Self::Guest(place) => place.read(at, target),
        }
    }

    /// Overwrites the bytes from `at` on with `source`.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub fn write(&mut self, at: usize, source: &[u8]) {
        match self {
            Self::Own(buffer) => buffer[at..at + source.len()].copy_from_slice(source),
            Self::Guest(place) => place.write(at, source),
        }
    }

    /// Zeroes `length` bytes from `at` on.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub fn zero(&mut self, at: usize, length: usize) {
        match self {
            Self::Own(buffer) => buffer[at..at + length].fill(0),
            Self::Guest(place) => place.fill(at, length, 0),
        }
    }

    /// Keeps the first `at` bytes and returns the rest, without copying. Both keep a guest's region
    /// mapped.
    fn split_off(&mut self, at: usize) -> Self {
        match self {
            Self::Own(buffer) => Self::Own(buffer.split_off(at)),
            Self::Guest(place) => {
                let rest = place.part(at, place.bytes() - at);
                *place = place.part(0, at);
                Self::Guest(rest)
            }
        }
    }

    /// Removes the first `count` bytes.
    fn advance(&mut self, count: usize) {
        match self {
            Self::Own(buffer) => buffer.advance(count),
            Self::Guest(place) => *place = place.part(count, place.bytes() - count),
        }
    }

    /// Address from which the kernel reads.
    pub fn source(&self) -> *const u8 {
        match self {
            Self::Own(buffer) => buffer.as_ptr(),
            Self::Guest(place) => place.as_ptr(),
        }
    }

    /// Address to which the kernel writes.
    pub fn target(&mut self) -> *mut u8 {
        match self {
            Self::Own(buffer) => buffer.as_mut_ptr(),
            Self::Guest(place) => place.as_ptr(),
        }
    }
}

impl From<IoBuffer> for Segment {
    fn from(buffer: IoBuffer) -> Self {
        Self::Own(buffer)
    }
}

impl From<GuestBytes> for Segment {
    fn from(place: GuestBytes) -> Self {
        Self::Guest(place)
    }
}

/// Data of one request, or of several merged into one: segments that are consecutive on the disk.
#[derive(Debug, Default)]
pub struct Segments(SmallVec<[Segment; 1]>);

impl Segments {
    /// Total length in bytes.
    pub fn len(&self) -> usize {
        self.0.iter().map(Segment::len).sum()
    }

    /// True if the total length is zero.
    pub fn is_empty(&self) -> bool {
        self.0.iter().all(Segment::is_empty)
    }

    /// True if all bytes are zero now; a guest may change its part. Stops at the first byte that is
    /// not zero.
    pub fn is_zero(&self) -> bool {
        self.0.iter().all(Segment::is_zero)
    }

    /// Duplicates the data for another attempt: own bytes are copied, guests' memory is shared.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        let duplicate = |segment: &Segment| match segment {
            Segment::Own(buffer) => Segment::Own(IoBuffer::copy_of(buffer)),
            Segment::Guest(place) => Segment::Guest(place.clone()),
        };
        Self(self.iter().map(duplicate).collect())
    }

    /// Appends a segment.
    pub fn push(&mut self, segment: impl Into<Segment>) {
        self.0.push(segment.into());
    }

    /// Appends the segments of `other`.
    pub fn append(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    /// The segments in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = &Segment> {
        self.0.iter()
    }

    /// The segments in order.
    pub fn as_slice(&self) -> &[Segment] {
        &self.0
    }

    /// The segments in order, mutable.
    pub fn as_mut_slice(&mut self) -> &mut [Segment] {
        &mut self.0
    }

    /// Removes the first `count` bytes and the segments that become empty.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub fn advance(&mut self, mut count: usize) {
        let mut used_up = 0;
        for segment in &mut self.0 {
            let step = count.min(segment.len());
            segment.advance(step);
            count -= step;
            if !segment.is_empty() {
                break;
            }
            used_up += 1;
        }
        assert_eq!(count, 0, "advance past the end of the segments");
        self.0.drain(..used_up);
    }

    /// Keeps the first `at` bytes and returns the rest, without copying.
    ///
    /// # Panics
    /// Panics if `at` is beyond the end.
    pub fn split_off(&mut self, at: usize) -> Self {
        let (mut index, mut left) = (0, at);
        while index < self.0.len() && left >= self.0[index].len() {
            left -= self.0[index].len();
            index += 1;
        }
        let mut rest = SmallVec::new();
        if left > 0 {
            assert!(index < self.0.len(), "split at {at} beyond the end of the segments");
            rest.push(self.0[index].split_off(left));
            index += 1;
        }
        rest.extend(self.0.drain(index..));
        Self(rest)
    }

    /// Copies all bytes to the front of `target`.
    ///
    /// # Panics
    /// Panics if `target` is shorter than the segments.
    pub fn copy_to(&self, mut target: &mut [u8]) {
        self.count_copy();
        for segment in &self.0 {
            let (head, tail) = target.split_at_mut(segment.len());
            segment.read(0, head);
            target = tail;
        }
    }

    /// Overwrites the first bytes with `source`.
    ///
    /// # Panics
    /// Panics if there are fewer.
    pub fn copy_from(&mut self, mut source: &[u8]) {
        self.count_copy();
        for segment in &mut self.0 {
            let (head, tail) = source.split_at(source.len().min(segment.len()));
            segment.write(0, head);
            source = tail;
        }
        assert!(source.is_empty(), "{} bytes past the end of the segments", source.len());
    }

    /// Zeroes all bytes.
    pub fn zero(&mut self) {
        for segment in &mut self.0 {
            segment.zero(0, segment.len());
        }
    }

    /// Copies all bytes to a vector.
    pub fn to_vec(&self) -> Vec<u8> {
        let mut bytes = vec![0; self.len()];
        self.copy_to(&mut bytes);
        bytes
    }

    /// All bytes in one buffer; copied unless they are a single buffer of this process.
    #[must_use]
    pub fn joined(mut self) -> IoBuffer {
        if matches!(self.as_slice(), [Segment::Own(_)])
            && let Some(Segment::Own(buffer)) = self.0.pop()
        {
            return buffer;
        }
        let mut joined = IoBuffer::new(self.len());
        self.copy_to(&mut joined);
        joined
    }

    /// Zeroes this process's own memory and leaves guests' memory unchanged.
    pub fn zero_own(&mut self) {
        for segment in &mut self.0 {
            if let Segment::Own(buffer) = segment {
                buffer.fill(0);
            }
        }
    }

    /// Marks guests' memory as dirty for migration: the kernel may have written to all of it.
    pub(crate) fn mark_dirty(&self) {
        for segment in &self.0 {
            if let Segment::Guest(place) = segment {
                place.mark_dirty();
            }
        }
    }

    fn count_copy(&self) {
        if self.0.iter().any(|segment| matches!(segment, Segment::Guest(_))) {
            count_copy(self.len());
        }
    }
}

impl IntoIterator for Segments {
    type Item = Segment;
    type IntoIter = smallvec::IntoIter<[Segment; 1]>;

    fn into_iter(self) -> Self::IntoIter {
        self.0.into_iter()
    }
}

impl<S: Into<Segment>> From<S> for Segments {
    fn from(segment: S) -> Self {
        let mut segments = SmallVec::new();
        segments.push(segment.into());
        Self(segments)
    }
}

impl FromIterator<GuestBytes> for Segments {
    fn from_iter<I: IntoIterator<Item = GuestBytes>>(ranges: I) -> Self {
        Self(ranges.into_iter().map(Segment::Guest).collect())
    }
}

/// Destination of a read.
#[derive(Debug)]
pub enum ReadTarget {
    /// No destination: any memory with this number of bytes, shared or new.
    Anywhere(usize),
    /// These segments, usually in a guest's memory.
    Segments(Segments),
}

impl ReadTarget {
    /// Length in bytes.
    pub fn len(&self) -> usize {
        match self {
            Self::Anywhere(length) => *length,
            Self::Segments(segments) => segments.len(),
        }
    }

    /// True if the length is zero.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Duplicates the destination for another attempt. Both attempts may write to it.
    #[must_use]
    pub fn duplicate(&self) -> Self {
        match self {
            Self::Anywhere(length) => Self::Anywhere(*length),
            Self::Segments(segments) => Self::Segments(segments.duplicate()),
        }
    }

    /// Splits off the first `count` bytes.
    ///
    /// # Panics
    /// Panics if there are fewer.
    #[must_use]
    pub fn split_front(&mut self, count: usize) -> Self {
        match self {
            Self::Anywhere(length) => {
                *length = length.checked_sub(count).expect("as many bytes are wanted");
                Self::Anywhere(count)
            }
            Self::Segments(segments) => {
                let rest = segments.split_off(count);
                Self::Segments(std::mem::replace(segments, rest))
            }
        }
    }

    /// Memory for the data; the caller must fill all of it.
    #[must_use]
    pub fn into_memory(self) -> Segments {
        match self {
            Self::Anywhere(length) => IoBuffer::new(length).into(),
            Self::Segments(segments) => segments,
        }
    }

    /// Zeroes at the destination.
    #[must_use]
    pub fn zeroes(self) -> Segments {
        match self {
            Self::Anywhere(length) => IoBuffer::zeroed(length).into(),
            Self::Segments(mut segments) => {
                segments.zero();
                segments
            }
        }
    }

    /// A copy of `bytes` at the destination.
    ///
    /// # Panics
    /// Panics if the lengths differ.
    #[must_use]
    pub fn copy_of(self, bytes: &[u8]) -> Segments {
        assert_eq!(bytes.len(), self.len(), "data of another length than was wanted");
        match self {
            Self::Anywhere(_) => IoBuffer::copy_of(bytes).into(),
            Self::Segments(mut segments) => {
                segments.copy_from(bytes);
                segments
            }
        }
    }

    /// The bytes of `buffer` at the destination; moved instead of copied if there is none.
    ///
    /// # Panics
    /// As [`ReadTarget::copy_of`].
    #[must_use]
    pub fn accept(self, buffer: IoBuffer) -> Segments {
        match self {
            Self::Anywhere(_) => buffer.into(),
            target @ Self::Segments(_) => target.copy_of(&buffer),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::guest::{GuestMemory, Region};

    /// Guest memory with these bytes.
    fn place(bytes: &[u8]) -> GuestBytes {
        let memory = GuestMemory::new(vec![Region::on_heap(0, 0, bytes.len() + 3)]).unwrap();
        let place = memory.range(3, bytes.len()).unwrap();
        place.write(0, bytes);
        place
    }

    /// Own, guest's and own memory.
    fn mixed() -> Segments {
        let mut segments = Segments::from(IoBuffer::copy_of(b"abcd"));
        segments.push(place(b"efgh"));
        segments.push(IoBuffer::copy_of(b"ijkl"));
        segments
    }

    #[test]
    fn segments_split_and_advance_at_any_offset() {
        for at in 0..=12 {
            let mut segments = mixed();
            let rest = segments.split_off(at);
            assert_eq!(segments.to_vec(), &b"abcdefghijkl"[..at]);
            assert_eq!(rest.to_vec(), &b"abcdefghijkl"[at..]);
            for count in 0..=at {
                let mut segments = segments.duplicate();
                segments.advance(count);
                assert_eq!(segments.to_vec(), &b"abcdefghijkl"[count..at]);
            }
        }
    }

    #[test]
    fn a_part_keeps_its_region() {
        let mut segments = Segments::from(place(b"abcdef"));
        let mut rest = segments.split_off(2);
        drop(segments);
        rest.advance(1);
        rest.copy_from(b"xyz");
        assert_eq!(rest.to_vec(), b"xyz");
    }

    #[test]
    fn duplicate_shares_guest_memory_and_copies_own() {
        let mut first = mixed();
        let second = first.duplicate();
        first.copy_from(b"ABCDEFGHIJKL");
        assert_eq!(second.to_vec(), b"abcdEFGHijkl");
    }

    #[test]
    fn single_own_buffer_is_joined_without_a_copy() {
        let buffer = IoBuffer::copy_of(b"abcd");
        let address = buffer.as_ptr();
        assert_eq!(Segments::from(buffer).joined().as_ptr(), address);
        assert_eq!(mixed().joined()[..], *b"abcdefghijkl");
        assert_eq!(Segments::from(place(b"ab")).joined()[..], *b"ab");
        assert!(Segments::default().joined().is_empty());
    }

    #[test]
    fn nonzero_bytes_are_found_anywhere() {
        let zeroes = || {
            let mut segments = Segments::from(IoBuffer::zeroed(700));
            segments.push(place(&[0; 1500]));
            segments.push(IoBuffer::copy_of(&[0; 800]));
            segments
        };
        assert!(zeroes().is_zero());
        assert!(Segments::default().is_zero());
        for at in [0, 1, 511, 512, 699, 700, 1211, 1212, 2199, 2200, 2999] {
            let mut segments = zeroes();
            let mut bytes = vec![0; 3000];
            bytes[at] = 0x80;
            segments.copy_from(&bytes);
            assert!(!segments.is_zero(), "byte {at}");
        }
    }

    #[test]
    fn guest_copies_are_counted() {
        let copied = |expected: u64, operation: &dyn Fn()| {
            let before = guest_copies();
            operation();
            let after = guest_copies();
            let bytes = if expected > 0 { 12 } else { 0 };
            assert_eq!((after.count - before.count, after.bytes - before.bytes), (expected, bytes));
        };
        copied(1, &|| drop(mixed().to_vec()));
        copied(1, &|| drop(mixed().joined()));
        copied(1, &|| mixed().copy_from(b"abcdefghijkl"));
        copied(1, &|| drop(Segment::from(place(b"abcdefghijkl")).bytes()));
        copied(1, &|| drop(ReadTarget::Segments(mixed()).copy_of(b"abcdefghijkl")));
        copied(0, &|| drop(ReadTarget::Segments(mixed()).zeroes()));
        copied(0, &|| drop(mixed().duplicate()));
        copied(0, &|| drop(Segments::from(IoBuffer::zeroed(12)).to_vec()));
        copied(0, &|| drop(ReadTarget::Anywhere(12).copy_of(b"abcdefghijkl")));
    }

    #[test]
    fn read_target_receives_the_data() {
        let bytes = b"ABCDEFGHIJKL";
        let target = mixed();
        let place = target.as_slice()[1].bytes().into_owned();
        assert_eq!(place, b"efgh");
        let mut target = ReadTarget::Segments(target);
        let front = target.split_front(5);
        assert_eq!((front.len(), target.len()), (5, 7));
        assert_eq!(front.copy_of(&bytes[..5]).to_vec(), b"ABCDE");
        assert_eq!(target.accept(IoBuffer::copy_of(&bytes[5..])).to_vec(), b"FGHIJKL");
        let mut target = ReadTarget::Anywhere(12);
        assert_eq!((target.split_front(5).into_memory().len(), target.len()), (5, 7));
        let buffer = IoBuffer::copy_of(b"1234567");
        let address = buffer.as_ptr();
        assert_eq!(target.accept(buffer).joined().as_ptr(), address, "moved");
        assert!(ReadTarget::Anywhere(3).zeroes().as_slice()[0].is_known_zero());
        assert_eq!(ReadTarget::Segments(mixed()).zeroes().to_vec(), [0; 12]);
    }
}
