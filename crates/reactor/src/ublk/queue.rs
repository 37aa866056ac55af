//! A queue of a device: what it is asked, and where the data is: in memory that the kernel copies
//! it to and from, or where it was all the time ([`Registered`]).
//!
//! ```text
//!   fetch(tag) ─────────► … a request comes: descriptor(tag); of a write, the data is in data(tag)
//!   commit(tag, result) ► the kernel takes a read's data from there; … the next request of the tag
//! ```
//!
//! One thread fetches all tags of a queue, and goes on doing so: the driver binds them to it.

use std::{
    fs::OpenOptions,
    io,
    path::PathBuf,
    ptr::{NonNull, addr_of},
    rc::Rc,
    sync::{Arc, atomic::AtomicU64},
};

use io_uring::{opcode, types};

use super::{
    super::{op::Fd, uring::Op},
    Dialect, Info, MAX_DEPTH,
    control::CHANNEL,
    feature,
    registered::{Registered, Source},
};
use crate::guest::{Memory, Place, Region};

/// `UBLK_IO_FETCH_REQ` and `UBLK_IO_COMMIT_AND_FETCH_REQ`
const FETCH: u32 = 0x20;
const COMMIT_AND_FETCH: u32 = 0x21;
/// `struct ublksrv_io_cmd`: queue, tag, result, address.
const COMMAND_BYTES: usize = 16;
/// A tag's memory begins at a multiple of it.
const PAGE: usize = 4096;
/// `UBLK_AUTO_BUF_REG_FALLBACK`: a request whose data could not be made a buffer comes all the
/// same, and says so (`UBLK_IO_F_NEED_REG_BUF`).
const FALLBACK: u64 = 1 << 16;
const NOT_REGISTERED: u32 = 1 << 17;

/// What a request asks (`struct ublksrv_io_desc`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Descriptor {
    /// `UBLK_IO_OP_…` in the lowest eight bits, `UBLK_IO_F_…` above them.
    pub operation: u32,
    /// Of 512 bytes.
    pub sectors: u32,
    /// The first of them.
    pub first_sector: u64,
    /// Where we said its data is to go. Not looked at.
    address: u64,
}

impl Descriptor {
    /// One for tests.
    pub fn new(operation: u32, first_sector: u64, sectors: u32) -> Self {
        Self { operation, sectors, first_sector, address: 0 }
    }
}

/// A queue, on the thread that fetches from it.
#[derive(Debug)]
pub struct Queue {
    shared: Rc<Shared>,
    number: u16,
    dialect: Dialect,
}

/// What the kernel works with until the queue's last fetch has ended.
#[derive(Debug)]
struct Shared {
    device: Fd,
    descriptors: Descriptors,
    way: Way,
    depth: u16,
    most_bytes: usize,
}

/// How data comes.
#[derive(Debug)]
enum Way {
    /// Copied by the kernel, to and from this.
    Lent(Memory),
    /// By its pages.
    Registered(Rc<Source>),
}

/// Where the data of a request is.
#[derive(Debug)]
pub enum Data {
    /// In memory of ours.
    Lent(Place),
    /// Where it was.
    Registered(Registered),
}

impl Queue {
    /// The node that requests of a device come through.
    pub fn path(number: u32) -> PathBuf {
        PathBuf::from(format!("{CHANNEL}{number}"))
    }

    /// Opens what requests of a device come through, for all its queues. There is one such process
    /// at a time, and it opens it once.
    ///
    /// # Errors
    /// `ENOENT`: there is no such device, or no node of it. `EBUSY`: somebody has it open.
    pub fn open_device(number: u32) -> io::Result<Fd> {
        OpenOptions::new().read(true).write(true).open(Self::path(number)).map(Fd::from)
    }

    /// A queue of it, with memory for its depth of requests if data is copied there. Counts what is
    /// copied of a device that [need not](Info::is_zero_copy).
    ///
    /// # Errors
    /// As `mmap(2)`.
    ///
    /// # Panics
    /// If there is no such depth.
    pub fn new(device: Fd, info: &Info, number: u16, copied: &Arc<AtomicU64>) -> io::Result<Self> {
        let (depth, most_bytes) = (info.depth, info.most_bytes as usize);
        assert!((1..=MAX_DEPTH).contains(&depth), "{depth} requests");
        let descriptors = Descriptors::map(&device, number, depth)?;
        let way = match info.is_zero_copy() {
            true => Way::Registered(Source::new(&device, info, number, copied)),
            false => {
                let stride = most_bytes.next_multiple_of(PAGE);
                let region = Region::lent(usize::from(depth) * stride)?;
                Way::Lent(Memory::new(vec![region]).expect("one region overlaps no other"))
            }
        };
        let dialect = match info.features & feature::CMD_IOCTL_ENCODE {
            0 => Dialect::Plain,
            _ => Dialect::Ioctl,
        };
        let shared = Shared { device, descriptors, way, depth, most_bytes };
        Ok(Self { shared: Rc::new(shared), number, dialect })
    }

    /// What the request of this tag asks; what an earlier one asked where there is none.
    ///
    /// # Panics
    /// If there is no such tag.
    pub fn descriptor(&self, tag: u16) -> Descriptor {
        assert!(tag < self.shared.depth, "tag {tag}");
        self.shared.descriptors.get(tag)
    }

    /// Whether data is [`Data::Registered`].
    pub fn is_zero_copy(&self) -> bool {
        matches!(self.shared.way, Way::Registered(_))
    }

    /// The first `bytes` of the data of a tag's request.
    ///
    /// # Panics
    /// If there is no such tag, or it does not have so many.
    pub fn data(&self, tag: u16, bytes: usize) -> Data {
        assert!(tag < self.shared.depth && bytes <= self.shared.most_bytes, "{bytes} bytes of tag {tag}");
        match &self.shared.way {
            Way::Lent(memory) => Data::Lent(self.place(memory, tag, bytes)),
            Way::Registered(source) => {
                let is_registered = self.descriptor(tag).operation & NOT_REGISTERED == 0;
                Data::Registered(source.data(tag, bytes, is_registered))
            }
        }
    }

    fn place(&self, memory: &Memory, tag: u16, bytes: usize) -> Place {
        let address = usize::from(tag) * self.shared.most_bytes.next_multiple_of(PAGE);
        memory.place(address as u64, bytes).expect("inside")
    }

    /// Waits for the first request of a tag. Dropped early, it goes on until the device stops, or
    /// the reactor ends.
    ///
    /// # Errors
    /// `ENODEV`: the device has stopped, and there is nothing more to fetch.
    pub fn fetch(&self, tag: u16) -> impl Future<Output = io::Result<()>> + use<> {
        self.command(FETCH, tag, 0)
    }

    /// Ends the request of a tag, with how many bytes were done or an error number below zero, and
    /// waits for the next as [`Queue::fetch`] does. It is queued at once, whether it is awaited or
    /// not.
    ///
    /// # Errors
    /// As [`Queue::fetch`].
    pub fn commit_and_fetch(&self, tag: u16, result: i32) -> impl Future<Output = io::Result<()>> + use<> {
        self.command(COMMIT_AND_FETCH, tag, result)
    }

    /// Ends once what was queued before has been begun by the kernel: what it refuses at once has
    /// ended.
    pub async fn begun(&self) -> io::Result<()> {
        let entry = opcode::Nop::new().build();
        // SAFETY: the entry refers to nothing.
        let op = unsafe { Op::start(&entry, ()) };
        op.await.0.map(drop)
    }

    fn command(&self, number: u32, tag: u16, result: i32) -> impl Future<Output = io::Result<()>> + use<> {
        let mut command = [0; COMMAND_BYTES];
        command[..2].copy_from_slice(&self.number.to_ne_bytes());
        command[2..4].copy_from_slice(&tag.to_ne_bytes());
        command[4..8].copy_from_slice(&result.to_ne_bytes());
        // `struct ublk_auto_buf_reg`
        let mut buffer = None;
        match &self.shared.way {
            Way::Lent(memory) => {
                let address = self.place(memory, tag, 0).as_ptr() as u64;
                command[8..].copy_from_slice(&address.to_ne_bytes());
            }
            Way::Registered(source) => buffer = Some(u64::from(source.number(tag)) | FALLBACK),
        }
        let target = types::Fd(self.shared.device.raw());
        let code = self.dialect.code(number, true, COMMAND_BYTES);
        let entry = opcode::UringCmd16::new(target, code).cmd(command).addr(buffer).build();
        // SAFETY: memory that is lent, numbers and the descriptor are in `shared`, which is held.
        let op = unsafe { Op::start(&entry, Rc::clone(&self.shared)) }.until_the_ring_ends();
        async { op.await.0.map(drop) }
    }
}

/// The driver's descriptors of a queue, mapped.
#[derive(Debug)]
struct Descriptors {
    first: NonNull<Descriptor>,
    bytes: usize,
}

impl Descriptors {
    fn map(device: &Fd, queue: u16, depth: u16) -> io::Result<Self> {
        // SAFETY: it asks for a constant.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE);
        let room = |depth: u16| (usize::from(depth) * size_of::<Descriptor>()).next_multiple_of(page);
        let bytes = room(depth);
        let offset = usize::from(queue) * room(MAX_DEPTH);
        // SAFETY: a new mapping, at an address of the kernel's choice.
        let first = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes,
                libc::PROT_READ,
                libc::MAP_SHARED | libc::MAP_POPULATE,
                device.raw(),
                offset as libc::off_t,
            )
        };
        if first == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let first = NonNull::new(first.cast()).expect("the kernel maps nothing at address 0");
        Ok(Self { first, bytes })
    }

    /// `tag` is below the depth.
    fn get(&self, tag: u16) -> Descriptor {
        // SAFETY: so many descriptors are mapped.
        let at = unsafe { self.first.as_ptr().add(usize::from(tag)) };
        // SAFETY: mapped and aligned; the kernel changes one only while it is fetched, and any
        // bytes are a descriptor.
        unsafe {
            Descriptor {
                operation: addr_of!((*at).operation).read_volatile(),
                sectors: addr_of!((*at).sectors).read_volatile(),
                first_sector: addr_of!((*at).first_sector).read_volatile(),
                address: 0,
            }
        }
    }
}

impl Drop for Descriptors {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nothing refers to it any more.
        let result = unsafe { libc::munmap(self.first.as_ptr().cast(), self.bytes) };
        debug_assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }
}
