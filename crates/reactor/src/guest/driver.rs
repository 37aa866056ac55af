//! The other side: memory and rings as a guest has them, so that a server can be measured as its
//! guests see it. The driver is libblkio's, by the people of QEMU.
//!
//! ```text
//!   Device ── socket ──► the server         Queue ── ring, slots of memory ──► the server
//!     ├── Queue 0
//!     └── Queue 1 …                          read, write, flush ─► turn ─► what was answered
//! ```
//!
//! A queue belongs to one thread. Each of its requests has a slot: a number, and memory that the
//! server reads from and writes to. Nobody here looks at what a server has written there.
//!
//! The driver trusts a server as a kernel trusts its devices: one that breaks its rings may stop
//! the process. Never waits for an answer but where it says so, and never connects again.

use std::{
    fmt,
    io::{self, ErrorKind},
    mem::MaybeUninit,
    os::fd::{BorrowedFd, OwnedFd},
    sync::{Arc, Mutex, PoisonError},
};

use blkio::{Blkio, Blkioq, Completion, ReqFlags};

/// Descriptors of a request: its header, its data, its status (virtio 1.3 § 5.2.6).
const DESCRIPTORS: usize = 3;
/// Descriptors of a ring: QEMU gives a disk 128 where it is not told otherwise, and servers take
/// 1024 at most. What does not fit waits in the driver.
const RING: std::ops::RangeInclusive<usize> = 128..=1024;
/// Of each slot, in bytes: the largest logical block size of a Linux block device, for servers that
/// pass memory on to one.
const ALIGNMENT: usize = 4096;
/// What the driver says of a connection that the server has ended in an orderly way.
const ENDED: &str = "failed to receive vhost-user message";
/// Answers that one [`Queue::turn`] takes.
const TAKEN: usize = 256;

/// A server's disk, connected to.
pub struct Device {
    driver: Arc<Mutex<Blkio>>,
    about: About,
}

/// What a server says of its disk.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct About {
    /// Its size.
    pub size_bytes: u64,
    /// What offsets and lengths are multiples of.
    pub block_bytes: u64,
    /// Most of one request; `None` where the server does not say.
    pub request_bytes: Option<u64>,
    /// Queues at most.
    pub queues: usize,
    /// Whether it keeps writes in a cache until a flush.
    pub has_cache: bool,
}

/// The memory of one queue's requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Slots {
    /// Requests in flight at most; not 0.
    pub count: usize,
    /// Bytes of a request; not 0.
    pub bytes: usize,
    /// Whether any of them reads.
    pub read: bool,
    /// The byte that is written, if any of them writes.
    pub write: Option<u8>,
}

/// One ring of a started [`Device`], and the memory of its requests.
pub struct Queue {
    /// Goes before `driver`, which has mapped it.
    ring: Blkioq,
    driver: Arc<Mutex<Blkio>>,
    slots: Slots,
    stride: usize,
    /// Where slot 0 is read to, and written from.
    reads: usize,
    writes: usize,
    taken: Box<[MaybeUninit<Completion>]>,
}

impl Device {
    /// Connects, and waits for the server's answers as long as they take.
    ///
    /// # Errors
    /// Nobody there; [`ErrorKind::UnexpectedEof`] where the server ends the connection, as it does
    /// if it serves somebody else; [`ErrorKind::InvalidData`] where it does not speak
    /// vhost-user-blk.
    pub fn connect(path: &str, read_only: bool) -> io::Result<Self> {
        let driver = connected(path, read_only).map_err(said)?;
        let about = about(&driver).map_err(said)?;
        Ok(Self { driver: Arc::new(Mutex::new(driver)), about })
    }

    /// What the server said.
    pub fn about(&self) -> &About {
        &self.about
    }

    /// Shares memory and rings with the server, which may use them until the last queue goes.
    ///
    /// # Errors
    /// What the server refuses: that many queues, rings of that size, writing to a read-only disk.
    pub fn start(self, queues: usize, slots: Slots) -> io::Result<Vec<Queue>> {
        let mut driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner);
        let rings = started(&mut driver, queues, slots.count * DESCRIPTORS).map_err(said)?;
        let stride = slots.bytes.next_multiple_of(ALIGNMENT);
        let area = slots.count * stride;
        let [reads, writes] =
            [slots.read, slots.write.is_some()].map(|some| usize::from(some) * queues * area);
        let region = driver.alloc_mem_region(reads + writes).map_err(said)?;
        if let Some(byte) = slots.write {
            // SAFETY: the region is ours, of that length, and the server does not know it yet.
            unsafe { std::ptr::write_bytes((region.addr + reads) as *mut u8, byte, writes) };
        }
        driver.map_mem_region(&region).map_err(said)?;
        drop(driver);
        let queue = |(number, ring)| Queue {
            ring,
            driver: Arc::clone(&self.driver),
            slots,
            stride,
            reads: region.addr + number * area,
            writes: region.addr + reads + number * area,
            taken: (0..TAKEN).map(|_| MaybeUninit::uninit()).collect(),
        };
        Ok(rings.into_iter().enumerate().map(queue).collect())
    }
}

fn connected(path: &str, read_only: bool) -> Result<Blkio, blkio::Error> {
    let mut driver = Blkio::new("virtio-blk-vhost-user")?;
    driver.set_str("path", path)?;
    driver.set_bool("read-only", read_only)?;
    driver.connect()?;
    Ok(driver)
}

fn about(driver: &Blkio) -> Result<About, blkio::Error> {
    let count = |name| driver.get_i32(name).map(|value| u64::try_from(value).unwrap_or(0));
    Ok(About {
        size_bytes: driver.get_u64("capacity")?,
        block_bytes: count("request-alignment")?.max(1),
        request_bytes: Some(count("max-segment-len")?).filter(|&bytes| bytes > 0),
        queues: count("max-queues")? as usize,
        has_cache: driver.get_bool("flush-needed")?,
    })
}

fn started(driver: &mut Blkio, queues: usize, descriptors: usize) -> Result<Vec<Blkioq>, blkio::Error> {
    let ring = descriptors.next_power_of_two().clamp(*RING.start(), *RING.end());
    driver.set_i32("num-queues", i32::try_from(queues).unwrap_or(i32::MAX))?;
    driver.set_i32("queue-size", ring as i32)?;
    Ok(driver.start()?.queues)
}

/// The driver's message, and of its error number what can be told apart. EIO is its own, for what
/// it does not understand.
fn said(error: blkio::Error) -> io::Error {
    let number = error.errno().raw_os_error();
    let kind = match io::Error::from_raw_os_error(number).kind() {
        ErrorKind::BrokenPipe | ErrorKind::ConnectionReset => ErrorKind::UnexpectedEof,
        _ if error.message() == ENDED => ErrorKind::UnexpectedEof,
        // The number is that of a message which could not be sent.
        _ if ["(os error 32)", "(os error 104)"].iter().any(|end| error.message().ends_with(end)) => {
            ErrorKind::UnexpectedEof
        }
        _ if number == libc::EIO => ErrorKind::InvalidData,
        kind => kind,
    };
    match kind {
        ErrorKind::UnexpectedEof => io::Error::new(kind, "it has closed the connection"),
        _ => io::Error::new(kind, error.message().to_owned()),
    }
}

impl Queue {
    /// Its memory.
    pub fn slots(&self) -> &Slots {
        &self.slots
    }

    /// Puts a read into the ring, which the server learns of by [`Queue::turn`]. `slot` must have
    /// no request in flight.
    pub fn read(&mut self, slot: usize, offset: u64) {
        let data = self.reads + self.place(slot);
        self.ring.read(offset, data as *mut u8, self.slots.bytes, slot, ReqFlags::empty());
    }

    /// As [`Queue::read`].
    pub fn write(&mut self, slot: usize, offset: u64) {
        let data = self.writes + self.place(slot);
        self.ring.write(offset, data as *const u8, self.slots.bytes, slot, ReqFlags::empty());
    }

    /// As [`Queue::read`].
    pub fn flush(&mut self, slot: usize) {
        self.ring.flush(slot, ReqFlags::empty());
    }

    fn place(&self, slot: usize) -> usize {
        assert!(slot < self.slots.count, "a request has a slot");
        slot * self.stride
    }

    /// Tells the server of new requests, if it wants to be told, and calls `answered` with slot and
    /// result (0 or an error number) of those that are done; returns how many. Does not wait.
    ///
    /// # Errors
    /// If the server cannot be told.
    pub fn turn(&mut self, mut answered: impl FnMut(usize, i32)) -> io::Result<usize> {
        let count = self.ring.do_io(&mut self.taken, 0, None, None).map_err(said)?;
        for completion in &self.taken[..count] {
            // SAFETY: these the driver has written.
            let completion = unsafe { completion.assume_init_ref() };
            answered(completion.user_data, -completion.ret);
        }
        Ok(count)
    }

    /// Asks the server to ring the [`Queue::bell`] at the next answer, or not to. Answers from
    /// before do not ring: take a turn afterwards.
    pub fn listen(&mut self, listen: bool) {
        self.ring.set_completion_fd_enabled(listen);
    }

    /// An eventfd that does not block.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn bell(&self) -> io::Result<OwnedFd> {
        let fd = self.ring.get_completion_fd().expect("not a polled queue");
        // SAFETY: the queue keeps it open.
        unsafe { BorrowedFd::borrow_raw(fd) }.try_clone_to_owned()
    }

    /// Asks the server something, and waits for its answer: whether it is still there.
    pub fn ask(&self) -> impl FnOnce() -> io::Result<()> + Send + 'static {
        let driver = Arc::clone(&self.driver);
        move || {
            let driver = driver.lock().unwrap_or_else(PoisonError::into_inner);
            driver.get_u64("capacity").map(drop).map_err(said)
        }
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device").field("about", &self.about).finish_non_exhaustive()
    }
}

impl fmt::Debug for Queue {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Queue").field("slots", &self.slots).finish_non_exhaustive()
    }
}
