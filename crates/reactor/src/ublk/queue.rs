//! A queue of a device: its requests and their data, either in memory that the kernel copies from
//! and to, or in place ([`RegisteredData`]).
//!
//! ```text
//!   fetch(tag) ─────────► … a request arrives: descriptor(tag); data of a write is in data(tag)
//!   commit(tag, result) ► the kernel copies a read's data from there; … the tag's next request
//! ```
//!
//! One thread must fetch all tags of a queue at all times: the driver binds them to it.

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
    super::{operation::Fd, uring::RingOperation},
    CommandEncoding, MAX_DEPTH, UblkInfo,
    control::CHANNEL_PREFIX,
    feature,
    registered::{RegisteredData, RegisteredSource},
};
use crate::guest::{GuestBytes, GuestMemory, Region};

/// `UBLK_IO_FETCH_REQ` and `UBLK_IO_COMMIT_AND_FETCH_REQ`.
const FETCH: u32 = 0x20;
const COMMIT_AND_FETCH: u32 = 0x21;
/// Size of `struct ublksrv_io_cmd`: queue, tag, result, address.
const COMMAND_BYTES: usize = 16;
/// Alignment of a tag's memory.
const PAGE: usize = 4096;
/// `UBLK_AUTO_BUF_REG_FALLBACK`: a request whose data cannot be registered is delivered anyway,
/// with a flag (`UBLK_IO_F_NEED_REG_BUF`).
const FALLBACK: u64 = 1 << 16;
const NOT_REGISTERED: u32 = 1 << 17;

/// A request (`struct ublksrv_io_desc`).
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UblkDescriptor {
    /// `UBLK_IO_OP_…` in the lowest eight bits, `UBLK_IO_F_…` above them.
    pub operation: u32,
    /// Number of sectors of 512 bytes.
    pub sectors: u32,
    /// First sector.
    pub first_sector: u64,
    /// Address of the data as set by this process. Ignored.
    address: u64,
}

impl UblkDescriptor {
    /// A request for tests.
    pub fn new(operation: u32, first_sector: u64, sectors: u32) -> Self {
        Self { operation, sectors, first_sector, address: 0 }
    }
}

/// A queue, on the thread that fetches from it.
#[derive(Debug)]
pub struct UblkQueue {
    shared: Rc<UblkQueueShared>,
    number: u16,
    encoding: CommandEncoding,
}

/// State in use by the kernel until the queue's last fetch has completed.
#[derive(Debug)]
struct UblkQueueShared {
    device: Fd,
    descriptors: MappedDescriptors,
    transfer: DataTransfer,
    depth: u16,
    max_request_bytes: usize,
}

/// Transfer of data.
#[derive(Debug)]
enum DataTransfer {
    /// The kernel copies from and to this memory.
    Copied(GuestMemory),
    /// In place, as registered buffers.
    Registered(Rc<RegisteredSource>),
}

/// Location of a request's data.
#[derive(Debug)]
pub enum UblkData {
    /// In own memory.
    Copied(GuestBytes),
    /// In place.
    Registered(RegisteredData),
}

impl UblkQueue {
    /// Path of the node for a device's requests.
    pub fn path(number: u32) -> PathBuf {
        PathBuf::from(format!("{CHANNEL_PREFIX}{number}"))
    }

    /// Opens the node for a device's requests, for all its queues. One process at a time may have
    /// it open, once.
    ///
    /// # Errors
    /// `ENOENT` if the device or its node is missing; `EBUSY` if it is already open.
    pub fn open_device(number: u32) -> io::Result<Fd> {
        OpenOptions::new().read(true).write(true).open(Self::path(number)).map(Fd::from)
    }

    /// Creates a queue, with memory for its depth of requests if data is copied. `copied` counts
    /// bytes copied although the device [supports zero copy](UblkInfo::is_zero_copy).
    ///
    /// # Errors
    /// As `mmap(2)`.
    ///
    /// # Panics
    /// Panics if the depth is invalid.
    pub fn new(device: Fd, info: &UblkInfo, number: u16, copied: &Arc<AtomicU64>) -> io::Result<Self> {
        let (depth, most_bytes) = (info.depth, info.max_request_bytes as usize);
        assert!((1..=MAX_DEPTH).contains(&depth), "{depth} requests");
        let descriptors = MappedDescriptors::map(&device, number, depth)?;
        let way = match info.is_zero_copy() {
            true => DataTransfer::Registered(RegisteredSource::new(&device, info, number, copied)),
            false => {
                let stride = most_bytes.next_multiple_of(PAGE);
                let region = Region::shared_with_kernel(usize::from(depth) * stride)?;
                DataTransfer::Copied(GuestMemory::new(vec![region]).expect("one region overlaps no other"))
            }
        };
        let encoding = match info.features & feature::CMD_IOCTL_ENCODE {
            0 => CommandEncoding::Legacy,
            _ => CommandEncoding::Ioctl,
        };
        let shared =
            UblkQueueShared { device, descriptors, transfer: way, depth, max_request_bytes: most_bytes };
        Ok(Self { shared: Rc::new(shared), number, encoding })
    }

    /// The request of this tag; an earlier one if there is none.
    ///
    /// # Panics
    /// Panics if the tag is invalid.
    pub fn descriptor(&self, tag: u16) -> UblkDescriptor {
        assert!(tag < self.shared.depth, "tag {tag}");
        self.shared.descriptors.get(tag)
    }

    /// True if data is [`UblkData::Registered`].
    pub fn is_zero_copy(&self) -> bool {
        matches!(self.shared.transfer, DataTransfer::Registered(_))
    }

    /// The first `bytes` of the data of a tag's request.
    ///
    /// # Panics
    /// Panics if the tag is invalid, or `bytes` exceeds the maximum size of a request.
    pub fn data(&self, tag: u16, bytes: usize) -> UblkData {
        assert!(
            tag < self.shared.depth && bytes <= self.shared.max_request_bytes,
            "{bytes} bytes of tag {tag}"
        );
        match &self.shared.transfer {
            DataTransfer::Copied(memory) => UblkData::Copied(self.tag_memory(memory, tag, bytes)),
            DataTransfer::Registered(source) => {
                let is_registered = self.descriptor(tag).operation & NOT_REGISTERED == 0;
                UblkData::Registered(source.data(tag, bytes, is_registered))
            }
        }
    }

    fn tag_memory(&self, memory: &GuestMemory, tag: u16, bytes: usize) -> GuestBytes {
        let address = usize::from(tag) * self.shared.max_request_bytes.next_multiple_of(PAGE);
        memory.range(address as u64, bytes).expect("inside")
    }

    /// Waits for the first request of a tag. If the future is dropped, the fetch stays in flight
    /// until the device stops, or the reactor ends.
    ///
    /// # Errors
    /// `ENODEV` if the device has stopped.
    pub fn fetch(&self, tag: u16) -> impl Future<Output = io::Result<()>> + use<> {
        self.command(FETCH, tag, 0)
    }

    /// Completes the request of a tag, with the number of bytes or a negative error number, and
    /// waits for the next one as [`UblkQueue::fetch`] does. The command is queued at once, even if
    /// the future is not awaited.
    ///
    /// # Errors
    /// As [`UblkQueue::fetch`].
    pub fn commit_and_fetch(&self, tag: u16, result: i32) -> impl Future<Output = io::Result<()>> + use<> {
        self.command(COMMIT_AND_FETCH, tag, result)
    }

    /// Waits until the kernel has started all commands queued before; commands that it rejects
    /// immediately have completed.
    pub async fn commands_started(&self) -> io::Result<()> {
        let entry = opcode::Nop::new().build();
        // SAFETY: the entry refers to nothing.
        let op = unsafe { RingOperation::start(&entry, ()) };
        op.await.0.map(drop)
    }

    fn command(&self, number: u32, tag: u16, result: i32) -> impl Future<Output = io::Result<()>> + use<> {
        let mut command = [0; COMMAND_BYTES];
        command[..2].copy_from_slice(&self.number.to_ne_bytes());
        command[2..4].copy_from_slice(&tag.to_ne_bytes());
        command[4..8].copy_from_slice(&result.to_ne_bytes());
        // `struct ublk_auto_buf_reg`.
        let mut buffer = None;
        match &self.shared.transfer {
            DataTransfer::Copied(memory) => {
                let address = self.tag_memory(memory, tag, 0).as_ptr() as u64;
                command[8..].copy_from_slice(&address.to_ne_bytes());
            }
            DataTransfer::Registered(source) => buffer = Some(u64::from(source.number(tag)) | FALLBACK),
        }
        let target = types::Fd(self.shared.device.raw());
        let code = self.encoding.code(number, true, COMMAND_BYTES);
        let entry = opcode::UringCmd16::new(target, code).cmd(command).addr(buffer).build();
        // SAFETY: the memory, the buffer indices and the descriptor are in `shared`, which the
        // operation owns.
        let op = unsafe { RingOperation::start(&entry, Rc::clone(&self.shared)) }.uncancellable();
        async { op.await.0.map(drop) }
    }
}

/// The driver's descriptors of a queue, mapped.
#[derive(Debug)]
struct MappedDescriptors {
    first: NonNull<UblkDescriptor>,
    bytes: usize,
}

impl MappedDescriptors {
    fn map(device: &Fd, queue: u16, depth: u16) -> io::Result<Self> {
        // SAFETY: sysconf only returns a constant.
        let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap_or(PAGE);
        let mapped_bytes =
            |depth: u16| (usize::from(depth) * size_of::<UblkDescriptor>()).next_multiple_of(page);
        let bytes = mapped_bytes(depth);
        let offset = usize::from(queue) * mapped_bytes(MAX_DEPTH);
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

    /// Reads a descriptor; `tag` must be below the depth.
    fn get(&self, tag: u16) -> UblkDescriptor {
        // SAFETY: this many descriptors are mapped.
        let at = unsafe { self.first.as_ptr().add(usize::from(tag)) };
        // SAFETY: mapped and aligned. The kernel changes a descriptor only while its tag is
        // fetched, and any bytes are a valid descriptor.
        unsafe {
            UblkDescriptor {
                operation: addr_of!((*at).operation).read_volatile(),
                sectors: addr_of!((*at).sectors).read_volatile(),
                first_sector: addr_of!((*at).first_sector).read_volatile(),
                address: 0,
            }
        }
    }
}

impl Drop for MappedDescriptors {
    fn drop(&mut self) {
        // SAFETY: mapped by `map` with this length, and nothing refers to it.
        let result = unsafe { libc::munmap(self.first.as_ptr().cast(), self.bytes) };
        debug_assert_eq!(result, 0, "{}", io::Error::last_os_error());
    }
}
