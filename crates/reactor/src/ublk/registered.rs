//! The data of a request where it is: in pages of whoever asked, which the kernel has made a buffer
//! of the ring that fetched the request, or at least lets be copied.
//!
//! It stays until the request is answered. Whoever only moves the data between a file and there
//! does so by the buffer's number, and nobody copies. Whoever has to look at it
//! [takes](Registered::take) a copy, or [puts](Registered::put) one there.

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
        buffers::Numbers,
        op::{Durability, Fd, length},
        priority,
        uring::{MOST_READS_HELD_BACK, MOST_WRITES_HELD_BACK, Op},
    },
    Info,
};
use crate::{
    buffer::{Buffer, Segments},
    error::{Error, Result},
    guest::Place,
};

/// A number that no buffer has.
const NO_BUFFER: u16 = u16::MAX;

/// What a queue's requests bring their data by.
#[derive(Debug)]
pub(super) struct Source {
    device: Fd,
    queue: u16,
    /// One for each tag; without, all is copied.
    numbers: Option<Numbers>,
    /// Bytes that were copied although they need not have been.
    copied: Arc<AtomicU64>,
}

impl Source {
    pub(super) fn new(device: &Fd, info: &Info, queue: u16, copied: &Arc<AtomicU64>) -> Rc<Self> {
        let numbers = Numbers::take(info.depth);
        if let Err(error) = &numbers {
            let device = info.number;
            tracing::warn!(device, queue, %error, "requests' pages cannot be buffers of this ring, so their data is copied");
        }
        let (device, copied) = (device.clone(), Arc::clone(copied));
        Rc::new(Self { device, queue, numbers: numbers.ok(), copied })
    }

    /// The number of the buffer that the data of a tag's request is to become.
    pub(super) fn number(&self, tag: u16) -> u16 {
        self.numbers.as_ref().map_or(NO_BUFFER, |numbers| numbers.first() + tag)
    }

    /// The data of a tag's request. `is_registered`: it has become that buffer.
    pub(super) fn data(self: &Rc<Self>, tag: u16, bytes: usize, is_registered: bool) -> Registered {
        // `UBLKSRV_IO_BUF_OFFSET`, 12 bits for the queue, 16 for the tag, 25 for the byte.
        let position = (1 << 31) + (i64::from(self.queue) << 41) + (i64::from(tag) << 25);
        let number = Some(self.number(tag)).filter(|number| is_registered && *number != NO_BUFFER);
        let source = Rc::clone(self);
        Registered { bytes, whereabouts: Whereabouts::Driver { source, position, number } }
    }
}

/// The data of a read or a write, by name. On the thread that fetched it.
#[derive(Clone, Debug)]
pub struct Registered {
    bytes: usize,
    whereabouts: Whereabouts,
}

#[derive(Clone, Debug)]
enum Whereabouts {
    Driver {
        source: Rc<Source>,
        /// In the driver's file.
        position: i64,
        /// Among the ring's buffers, if it is one.
        number: Option<u16>,
    },
    Simulated {
        place: Place,
        is_registered: bool,
        copied: Arc<AtomicU64>,
    },
}

impl Registered {
    /// Data at a place that the one who asks has, for simulated storage: named like a buffer of a
    /// ring, or only to be copied. What is copied is counted.
    pub fn simulated(place: Place, is_registered: bool, copied: &Arc<AtomicU64>) -> Self {
        let (bytes, copied) = (place.bytes(), Arc::clone(copied));
        Self { bytes, whereabouts: Whereabouts::Simulated { place, is_registered, copied } }
    }

    /// How many bytes.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Among the buffers of this thread's ring.
    fn number(&self) -> io::Result<u16> {
        match &self.whereabouts {
            Whereabouts::Driver { number: Some(number), .. } => Ok(*number),
            _ => Err(io::Error::from_raw_os_error(libc::EFAULT)),
        }
    }

    /// Reads a file at `offset` into it, behind its first `filled` bytes; returns how many bytes, 0
    /// at the end of the file.
    ///
    /// # Errors
    /// As `read(2)`; `EFAULT`: it is no buffer of this thread's ring.
    pub async fn read_at(&self, fd: &Fd, filled: usize, offset: u64) -> io::Result<usize> {
        // Of a buffer that is the kernel's, an address is how far it is from the beginning.
        let (target, room) = (types::Fd(fd.raw()), without_provenance_mut(filled));
        let entry = opcode::ReadFixed::new(target, room, length(self.bytes - filled), self.number()?)
            .offset(offset)
            .ioprio(priority::current())
            .build()
            .flags(fd.flags());
        // SAFETY: the kernel holds the buffer itself, and the descriptor is held with its number.
        let op = unsafe { Op::start(&entry, (fd.clone(), self.clone())) }.soon(MOST_READS_HELD_BACK);
        op.await.0.map(|count| count as usize)
    }

    /// Writes it to a file at `offset`, but for its first `written` bytes; returns how many bytes.
    ///
    /// # Errors
    /// As `write(2)`; `EFAULT` as [`Registered::read_at`].
    pub async fn write_at(
        &self,
        fd: &Fd,
        written: usize,
        offset: u64,
        durability: Durability,
    ) -> io::Result<usize> {
        let (target, rest) = (types::Fd(fd.raw()), without_provenance(written));
        let entry = opcode::WriteFixed::new(target, rest, length(self.bytes - written), self.number()?)
            .offset(offset)
            .rw_flags(durability.flags())
            .build()
            .flags(fd.flags());
        // SAFETY: as in `read_at`.
        let op = unsafe { Op::start(&entry, (fd.clone(), self.clone())) }.soon(MOST_WRITES_HELD_BACK);
        op.await.0.map(|count| count as usize)
    }

    /// Where simulated storage finds it.
    pub fn place(&self) -> Option<&Place> {
        match &self.whereabouts {
            Whereabouts::Simulated { place, is_registered: true, .. } => Some(place),
            Whereabouts::Simulated { .. } | Whereabouts::Driver { .. } => None,
        }
    }

    /// A copy of what is to be written.
    ///
    /// # Errors
    /// What the driver says: the request is none of a write, or has been answered.
    pub fn take(&self) -> Result<Buffer> {
        let mut copy = Buffer::new(self.bytes);
        self.count(self.bytes);
        match &self.whereabouts {
            Whereabouts::Simulated { place, .. } => place.read(0, &mut copy),
            Whereabouts::Driver { source, position, .. } => {
                let mut done = 0;
                while done < copy.len() {
                    let position = position + done as i64;
                    done += moved(pread(&source.device, &mut copy[done..], position))?;
                }
            }
        }
        Ok(copy)
    }

    /// Copies what was read there, behind its first `at` bytes.
    ///
    /// # Errors
    /// What the driver says: the request is none of a read, or has been answered.
    ///
    /// # Panics
    /// If there is no room for so many bytes.
    pub fn put(&self, at: usize, bytes: &[u8]) -> Result<()> {
        assert!(at + bytes.len() <= self.bytes, "{} bytes at {at} of {}", bytes.len(), self.bytes);
        self.count(bytes.len());
        match &self.whereabouts {
            Whereabouts::Simulated { place, .. } => place.write(at, bytes),
            Whereabouts::Driver { source, position, .. } => {
                let mut done = 0;
                while done < bytes.len() {
                    let position = position + (at + done) as i64;
                    done += moved(pwrite(&source.device, &bytes[done..], position))?;
                }
            }
        }
        Ok(())
    }

    /// The same with segments, from its beginning on.
    ///
    /// # Errors
    /// As [`Registered::put`].
    pub fn put_all(&self, data: &Segments) -> Result<()> {
        let mut at = 0;
        for segment in data.iter() {
            self.put(at, &segment.bytes())?;
            at += segment.len();
        }
        Ok(())
    }

    fn count(&self, bytes: usize) {
        let copied = match &self.whereabouts {
            Whereabouts::Driver { source, .. } => &source.copied,
            Whereabouts::Simulated { copied, .. } => copied,
        };
        copied.fetch_add(bytes as u64, Relaxed);
    }
}

/// How much of it the driver has moved. It has all of a request's data in memory, so nothing is
/// waited for.
fn moved(result: nix::Result<usize>) -> Result<usize> {
    match result {
        Ok(0) => Err(Error::IO),
        Ok(count) => Ok(count),
        Err(Errno::EINTR) => Ok(0),
        Err(errno) => Err(Error::from_errno(errno as i32)),
    }
}
