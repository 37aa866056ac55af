//! The data of a request where it is: in pages of whoever asked, which the kernel has made a buffer
//! of the ring that fetched the request, or at least lets be copied.
//!
//! It stays until the request is answered. Whoever only moves the data between a file and there does
//! so by the buffer's [number](Registered::number), and nobody copies. Whoever has to look at it
//! [takes](Registered::take) a copy, or [puts](Registered::put) one there.

use std::{
    rc::Rc,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
};

use nix::{
    errno::Errno,
    sys::uio::{pread, pwrite},
};

use super::queue::Shared;
use crate::{
    buffer::{Buffer, Segments},
    error::{Error, Result},
    guest::Place,
};

/// The data of a read or a write, by name. On the thread that fetched it.
#[derive(Clone, Debug)]
pub struct Registered {
    bytes: usize,
    whereabouts: Whereabouts,
}

#[derive(Clone, Debug)]
enum Whereabouts {
    Driver {
        shared: Rc<Shared>,
        /// In the driver's file.
        position: u64,
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
    pub(super) fn of_driver(shared: &Rc<Shared>, position: u64, number: Option<u16>, bytes: usize) -> Self {
        let whereabouts = Whereabouts::Driver { shared: Rc::clone(shared), position, number };
        Self { bytes, whereabouts }
    }

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

    /// Among the buffers of this thread's ring; `None` where it is none of them.
    pub(crate) fn number(&self) -> Option<u16> {
        match &self.whereabouts {
            Whereabouts::Driver { number, .. } => *number,
            Whereabouts::Simulated { .. } => None,
        }
    }

    /// Where simulated storage finds it.
    pub(crate) fn place(&self) -> Option<&Place> {
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
            Whereabouts::Driver { shared, position, .. } => {
                let mut done = 0;
                while done < copy.len() {
                    let position = *position as libc::off_t + done as libc::off_t;
                    done += moved(pread(&shared.device, &mut copy[done..], position))?;
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
            Whereabouts::Driver { shared, position, .. } => {
                let mut done = 0;
                while done < bytes.len() {
                    let position = *position as libc::off_t + (at + done) as libc::off_t;
                    done += moved(pwrite(&shared.device, &bytes[done..], position))?;
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
            Whereabouts::Driver { shared, .. } => &shared.copied,
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
