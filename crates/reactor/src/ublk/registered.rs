//! Data of a request in place: in the pages of its bio, such as pages of the page cache or of the
//! process that issued it. The kernel registers them as a buffer of the ring that fetched the
//! request, or at least makes them available for copying.
//!
//! The data is valid until the request is completed. Code that only moves data between a file and
//! the request uses the buffer's index, without a copy. Code that must read or change the data
//! [takes](RegisteredData::copy_out) a copy, or [puts](RegisteredData::copy_in) one back.

use std::{
    io,
    ptr::{without_provenance, without_provenance_mut},
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use io_uring::{opcode, types};
use nix::{
    errno::Errno,
    sys::uio::{pread, pwrite},
};

use super::{
    super::{
        operation::{Durability, Fd, length},
        priority,
        registered_buffers::BufferIndexRange,
        uring::{MAX_QUEUED_READS, MAX_QUEUED_WRITES, RingOperation},
    },
    UblkInfo,
};
use crate::{
    buffer::{IoBuffer, Segments},
    error::{Error, Result},
    guest::GuestBytes,
};

/// An index that no buffer has.
const NO_BUFFER: u16 = u16::MAX;

/// Access to the data of a queue's requests.
#[derive(Debug)]
pub(super) struct RegisteredSource {
    device: Fd,
    queue: u16,
    /// One index for each tag; without them, all data is copied.
    numbers: Option<BufferIndexRange>,
    /// Bytes copied although the device supports zero copy.
    copied: Arc<AtomicU64>,
}

impl RegisteredSource {
    pub(super) fn new(device: &Fd, info: &UblkInfo, queue: u16, copied: &Arc<AtomicU64>) -> Rc<Self> {
        let numbers = BufferIndexRange::take(info.depth);
        if let Err(error) = &numbers {
            let device = info.number;
            tracing::warn!(
                device, queue, %error,
                "the pages of requests cannot be registered as buffers of this ring: data is copied"
            );
        }
        let (device, copied) = (device.clone(), Arc::clone(copied));
        Rc::new(Self { device, queue, numbers: numbers.ok(), copied })
    }

    /// Index of the buffer for the data of a tag's request.
    pub(super) fn number(&self, tag: u16) -> u16 {
        self.numbers.as_ref().map_or(NO_BUFFER, |numbers| numbers.first() + tag)
    }

    /// Data of a tag's request. `is_registered` is true if the kernel has registered it.
    pub(super) fn data(self: &Rc<Self>, tag: u16, bytes: usize, is_registered: bool) -> RegisteredData {
        // `UBLKSRV_IO_BUF_OFFSET`: bits for the queue from 41, for the tag from 25, below them the
        // byte offset.
        let position = (1 << 31) + (i64::from(self.queue) << 41) + (i64::from(tag) << 25);
        let number = Some(self.number(tag)).filter(|number| is_registered && *number != NO_BUFFER);
        let source = Rc::clone(self);
        RegisteredData { bytes, location: DataLocation::Driver { source, position, number } }
    }
}

/// Data of a read or a write, by reference. Belongs to the thread that fetched the request.
#[derive(Clone, Debug)]
pub struct RegisteredData {
    bytes: usize,
    location: DataLocation,
}

#[derive(Clone, Debug)]
enum DataLocation {
    Driver {
        source: Rc<RegisteredSource>,
        /// Offset in the driver's file.
        position: i64,
        /// Index among the ring's buffers, if registered.
        number: Option<u16>,
    },
    Simulated {
        place: GuestBytes,
        is_registered: bool,
        copied: Arc<AtomicU64>,
    },
}

impl RegisteredData {
    /// Data in memory of the issuing process, for simulated storage: accessible like a registered
    /// buffer, or only by copying. `copied` counts copied bytes.
    pub fn simulated(place: GuestBytes, is_registered: bool, copied: &Arc<AtomicU64>) -> Self {
        let (bytes, copied) = (place.bytes(), Arc::clone(copied));
        Self { bytes, location: DataLocation::Simulated { place, is_registered, copied } }
    }

    /// Length in bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Index among the buffers of this thread's ring.
    fn number(&self) -> io::Result<u16> {
        match &self.location {
            DataLocation::Driver { number: Some(number), .. } => Ok(*number),
            _ => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        }
    }

    /// Reads a file at `offset` into the data, after its first `filled` bytes; returns the number
    /// of bytes, 0 at the end of the file.
    ///
    /// # Errors
    /// As `read(2)`; `EFAULT` if the data is not registered as a buffer of this thread's ring.
    pub async fn read_at(&self, fd: &Fd, filled: usize, offset: u64) -> io::Result<usize> {
        // For a registered kernel buffer, the address is an offset from its beginning.
        let (target, target_offset) = (types::Fd(fd.raw()), without_provenance_mut(filled));
        let entry =
            opcode::ReadFixed::new(target, target_offset, length(self.bytes - filled), self.number()?)
                .offset(offset)
                .ioprio(priority::current())
                .build()
                .flags(fd.flags());
        // SAFETY: the kernel owns the buffer itself; the operation owns the descriptor and the
        // index.
        let op =
            unsafe { RingOperation::start(&entry, (fd.clone(), self.clone())) }.submit_at(MAX_QUEUED_READS);
        op.await.0.map(|count| count as usize)
    }

    /// Writes the data to a file at `offset`, except its first `written` bytes; returns the number
    /// of bytes.
    ///
    /// # Errors
    /// As `write(2)`; `EFAULT` as [`RegisteredData::read_at`].
    pub async fn write_at(
        &self,
        fd: &Fd,
        written: usize,
        offset: u64,
        durability: Durability,
    ) -> io::Result<usize> {
        let (target, source_offset) = (types::Fd(fd.raw()), without_provenance(written));
        let entry =
            opcode::WriteFixed::new(target, source_offset, length(self.bytes - written), self.number()?)
                .offset(offset)
                .rw_flags(durability.flags())
                .build()
                .flags(fd.flags());
        // SAFETY: as in `read_at`.
        let op =
            unsafe { RingOperation::start(&entry, (fd.clone(), self.clone())) }.submit_at(MAX_QUEUED_WRITES);
        op.await.0.map(|count| count as usize)
    }

    /// Memory of the data, for simulated storage; `None` if the data can only be copied.
    pub fn place(&self) -> Option<&GuestBytes> {
        match &self.location {
            DataLocation::Simulated { place, is_registered: true, .. } => Some(place),
            DataLocation::Simulated { .. } | DataLocation::Driver { .. } => None,
        }
    }

    /// A copy of the data of a write.
    ///
    /// # Errors
    /// The driver's error if the request is not a write, or was completed.
    pub fn copy_out(&self) -> Result<IoBuffer> {
        let mut copy = IoBuffer::new(self.bytes);
        self.count(self.bytes);
        match &self.location {
            DataLocation::Simulated { place, .. } => place.read(0, &mut copy),
            DataLocation::Driver { source, position, .. } => {
                let mut done = 0;
                while done < copy.len() {
                    let position = position + done as i64;
                    done += moved_bytes(pread(&source.device, &mut copy[done..], position))?;
                }
            }
        }
        Ok(copy)
    }

    /// Copies the data of a read, after its first `at` bytes.
    ///
    /// # Errors
    /// The driver's error if the request is not a read, or was completed.
    ///
    /// # Panics
    /// Panics if the bytes do not fit.
    pub fn copy_in(&self, at: usize, bytes: &[u8]) -> Result<()> {
        assert!(at + bytes.len() <= self.bytes, "{} bytes at {at} of {}", bytes.len(), self.bytes);
        self.count(bytes.len());
        match &self.location {
            DataLocation::Simulated { place, .. } => place.write(at, bytes),
            DataLocation::Driver { source, position, .. } => {
                let mut done = 0;
                while done < bytes.len() {
                    let position = position + (at + done) as i64;
                    done += moved_bytes(pwrite(&source.device, &bytes[done..], position))?;
                }
            }
        }
        Ok(())
    }

    /// As [`RegisteredData::copy_in`] with segments, from the beginning.
    ///
    /// # Errors
    /// As [`RegisteredData::copy_in`].
    pub fn copy_in_segments(&self, data: &Segments) -> Result<()> {
        let mut at = 0;
        for segment in data.iter() {
            self.copy_in(at, &segment.bytes())?;
            at += segment.len();
        }
        Ok(())
    }

    fn count(&self, bytes: usize) {
        let copied = match &self.location {
            DataLocation::Driver { source, .. } => &source.copied,
            DataLocation::Simulated { copied, .. } => copied,
        };
        copied.fetch_add(bytes as u64, Relaxed);
    }
}

/// Number of bytes moved by the driver. A request's data is entirely in memory, so the calls do not
/// block.
fn moved_bytes(result: nix::Result<usize>) -> Result<usize> {
    match result {
        Ok(0) => Err(Error::IO),
        Ok(count) => Ok(count),
        Err(Errno::EINTR) => Ok(0),
        Err(errno) => Err(Error::from_errno(errno as i32)),
    }
}
