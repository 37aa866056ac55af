//! The guest's side: memory and rings as in a guest, to measure a server as its guests see it. Uses
//! libblkio, by QEMU's developers.
//!
//! ```text
//!   device ── socket ──► the server         queue ── ring, slots of memory ──► the server
//!     ├── queue 0
//!     └── queue 1 …                          read, write, flush ─► poll ─► completions
//! ```
//!
//! A queue belongs to one thread. Each of its requests has a slot: a number, and memory that the
//! server reads and writes. The driver never reads the data that a server writes there.
//!
//! The driver trusts a server like a kernel trusts its devices: a server that corrupts its rings
//! may abort the process. Only blocks where documented, and never reconnects.

use std::{
    fmt,
    io::{self, ErrorKind},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use blkio::{Blkio, Blkioq, Completion, ReqFlags};

/// Descriptors of a request: header, data, status (virtio 1.3 § 5.2.6).
const DESCRIPTORS: usize = 3;
/// Size of a ring in descriptors: QEMU's default for vhost-user-blk is 128 (256 for virtio-blk),
/// and servers accept 1024 at most. Requests that do not fit wait in the driver.
const RING: std::ops::RangeInclusive<usize> = 128..=1024;
/// Alignment of each slot in bytes, for servers that pass the memory on to a block device: suffices
/// for logical block sizes up to 4 KiB.
const ALIGNMENT: usize = 4096;
/// The driver's message for a connection that the server has closed in an orderly way.
const CLOSED_MESSAGE: &str = "failed to receive vhost-user message";
/// Maximum number of completions of one [`DriverQueue::poll_completions`].
const MAX_COMPLETIONS: usize = 256;

/// A connection to a server's disk.
pub struct DriverDevice {
    driver: Arc<Mutex<Blkio>>,
    properties: DiskProperties,
}

/// Properties of a server's disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DiskProperties {
    /// Size in bytes.
    pub size_bytes: u64,
    /// Alignment of offsets and lengths in bytes.
    pub block_bytes: u64,
    /// Maximum size of one request; `None` if the server does not specify one.
    pub request_bytes: Option<u64>,
    /// Maximum number of queues.
    pub queues: usize,
    /// True if the disk has a write cache that needs flushes.
    pub has_cache: bool,
}

/// Memory for the requests of one queue.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestSlots {
    /// Maximum number of requests in flight; not 0.
    pub count: usize,
    /// Size of a request in bytes; not 0.
    pub bytes: usize,
    /// True if any request reads.
    pub read: bool,
    /// The byte to write, if any request writes.
    pub write: Option<u8>,
}

/// One ring of a started [`DriverDevice`], with memory for its requests.
pub struct DriverQueue {
    /// Must be dropped before `driver`, which owns its mapping.
    ring: Blkioq,
    driver: Arc<Mutex<Blkio>>,
    slots: RequestSlots,
    stride: usize,
    /// Addresses of slot 0 for reads and for writes.
    reads: usize,
    writes: usize,
    /// Completions of the last [`DriverQueue::poll_completions`].
    completions: Box<[MaybeUninit<Completion>]>,
}

impl DriverDevice {
    /// Connects and blocks until the server answers.
    ///
    /// # Errors
    /// Fails if there is no server; with [`ErrorKind::UnexpectedEof`] if the server closes the
    /// connection, for example because it serves another client; with [`ErrorKind::InvalidData`] if
    /// it does not speak vhost-user-blk.
    pub fn connect(path: &str, read_only: bool) -> io::Result<Self> {
        let driver = open_driver(path, read_only).map_err(driver_error)?;
        let properties = disk_properties(&driver).map_err(driver_error)?;
        Ok(Self { driver: Arc::new(Mutex::new(driver)), properties })
    }

    /// Properties of the disk.
    pub fn properties(&self) -> &DiskProperties {
        &self.properties
    }

    /// Shares memory and rings with the server, which may use them until the last queue is dropped.
    ///
    /// # Errors
    /// Fails if the server rejects the number of queues, the size of the rings, or writing to a
    /// read-only disk.
    pub fn start(self, queues: usize, slots: RequestSlots) -> io::Result<Vec<DriverQueue>> {
        let mut driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
        let rings = start_rings(&mut driver, queues, slots.count * DESCRIPTORS).map_err(driver_error)?;
        let stride = slots.bytes.next_multiple_of(ALIGNMENT);
        let area = slots.count * stride;
        let [reads, writes] =
            [slots.read, slots.write.is_some()].map(|is_used| usize::from(is_used) * queues * area);
        let region = driver.alloc_mem_region(reads + writes).map_err(driver_error)?;
        if let Some(byte) = slots.write {
            // SAFETY: the region is owned, has that length, and the server does not know it yet.
            unsafe { std::ptr::write_bytes((region.addr + reads) as *mut u8, byte, writes) };
        }
        driver.map_mem_region(&region).map_err(driver_error)?;
        drop(driver);
        let queue = |(number, ring)| DriverQueue {
            ring,
            driver: Arc::clone(&self.driver),
            slots,
            stride,
            reads: region.addr + number * area,
            writes: region.addr + reads + number * area,
            completions: (0..MAX_COMPLETIONS).map(|_| MaybeUninit::uninit()).collect(),
        };
        Ok(rings.into_iter().enumerate().map(queue).collect())
    }
}

fn open_driver(path: &str, read_only: bool) -> Result<Blkio, blkio::Error> {
    let mut driver = Blkio::new("virtio-blk-vhost-user")?;
    driver.set_str("path", path)?;
    driver.set_bool("read-only", read_only)?;
    driver.connect()?;
    Ok(driver)
}

fn disk_properties(driver: &Blkio) -> Result<DiskProperties, blkio::Error> {
    let count = |name| driver.get_i32(name).map(|value| u64::try_from(value).unwrap_or(0));
    Ok(DiskProperties {
        size_bytes: driver.get_u64("capacity")?,
        block_bytes: count("request-alignment")?.max(1),
        request_bytes: Some(count("max-segment-len")?).filter(|&bytes| bytes > 0),
        queues: count("max-queues")? as usize,
        has_cache: driver.get_bool("flush-needed")?,
    })
}

fn start_rings(driver: &mut Blkio, queues: usize, descriptors: usize) -> Result<Vec<Blkioq>, blkio::Error> {
    let ring = descriptors.next_power_of_two().clamp(*RING.start(), *RING.end());
    driver.set_i32("num-queues", i32::try_from(queues).unwrap_or(i32::MAX))?;
    driver.set_i32("queue-size", ring as i32)?;
    Ok(driver.start()?.queues)
}

/// Converts a driver's error: keeps the message, and maps the error number where it is
/// reliable. The driver uses EIO for messages that it does not understand.
fn driver_error(error: blkio::Error) -> io::Error {
    let number = error.errno().raw_os_error();
    let kind = match io::Error::from_raw_os_error(number).kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => ErrorKind::UnexpectedEof,
        _ if error.message() == CLOSED_MESSAGE => ErrorKind::UnexpectedEof,
        // EPIPE or ECONNRESET from sending a message, which the driver reports only in its text.
        _ if ["(os error 32)", "(os error 104)"].iter().any(|end| error.message().ends_with(end)) => {
            ErrorKind::UnexpectedEof
        }
        _ if number == libc::EIO => ErrorKind::InvalidData,
        kind => kind,
    };
    match kind {
        ErrorKind::UnexpectedEof => io::Error::new(kind, "the connection was closed"),
        _ => io::Error::new(kind, error.message().to_owned()),
    }
}

impl DriverQueue {
    /// Memory for the requests.
    pub fn slots(&self) -> &RequestSlots {
        &self.slots
    }

    /// Puts a read into the ring; [`DriverQueue::poll_completions`] submits it. `slot` must have no
    /// request in flight.
    pub fn read(&mut self, slot: usize, offset: u64) {
        let data = self.reads + self.slot_offset(slot);
        self.ring.read(offset, data as *mut u8, self.slots.bytes, slot, ReqFlags::empty());
    }

    /// Puts a write into the ring, as [`DriverQueue::read`].
    pub fn write(&mut self, slot: usize, offset: u64) {
        let data = self.writes + self.slot_offset(slot);
        self.ring.write(offset, data as *const u8, self.slots.bytes, slot, ReqFlags::empty());
    }

    /// Puts a flush into the ring, as [`DriverQueue::read`].
    pub fn flush(&mut self, slot: usize) {
        self.ring.flush(slot, ReqFlags::empty());
    }

    fn slot_offset(&self, slot: usize) -> usize {
        assert!(slot < self.slots.count, "a request has a slot");
        slot * self.stride
    }

    /// Notifies the server of new requests if necessary, and calls `on_completion` with slot and
    /// result (0 or an error number) of completed ones; returns their number. Does not block.
    ///
    /// # Errors
    /// Fails if the server cannot be notified.
    pub fn poll_completions(&mut self, mut on_completion: impl FnMut(usize, i32)) -> io::Result<usize> {
        let count = self.ring.do_io(&mut self.completions, 0, None, None).map_err(driver_error)?;
        for completion in &self.completions[..count] {
            // SAFETY: the driver has written the first `count` completions.
            let completion = unsafe { completion.assume_init_ref() };
            on_completion(completion.user_data, -completion.ret);
        }
        Ok(count)
    }

    /// Enables or disables notifications by [`DriverQueue::notification_fd`]. Completions before
    /// the call are not notified: call [`DriverQueue::poll_completions`] afterwards.
    pub fn enable_notifications(&mut self, enabled: bool) {
        self.ring.set_completion_fd_enabled(enabled);
    }

    /// An eventfd for notifications, non-blocking.
    ///
    /// # Errors
    /// Fails if the process has no free descriptor.
    pub fn notification_fd(&self) -> io::Result<OwnedFd> {
        let fd = self.ring.get_completion_fd().expect("not a polled queue");
        // SAFETY: the queue keeps it open.
        unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
    }

    /// A function that queries the server and blocks until it answers, to check that it is alive.
    pub fn liveness_probe(&self) -> impl FnOnce() -> io::Result<()> + Send + 'static {
        let driver = Arc::clone(&self.driver);
        move || {
            let driver = driver.lock().unwrap_or_else(PoisonError::into_inner);
            driver.get_u64("capacity").map(drop).map_err(driver_error)
        }
    }
}

impl fmt::Debug for DriverDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("about", &self.properties).finish_non_exhaustive()
    }
}

impl fmt::Debug for DriverQueue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("slots", &self.slots).finish_non_exhaustive()
    }
}
