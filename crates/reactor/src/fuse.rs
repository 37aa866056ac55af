//! What the FUSE device can do beyond reading and writing: several descriptors of one file system,
//! and requests that come over io_uring (`linux/fuse.h`, Linux 6.14).
//!
//! ```text
//!   register(entry) ──────────► … a request comes: its header, and of a write the data, are here
//!   commit(entry, request) ───► the kernel takes the reply from there; … the entry's next request
//! ```
//!
//! The kernel has a queue for each processor that there may be, and uses none before each has an
//! entry. What a program asks comes to the queue of the processor that it runs on.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    rc::Rc,
};

use io_uring::{opcode, squeue, types};

use super::{op::Fd, uring::Op};
use crate::guest::{Memory, Place, Region};

/// FUSE_DEV_IOC_CLONE: `_IOR(229, 0, uint32_t)` of linux/fuse.h.
const CLONE: u32 = nix::request_code_read!(229, 0, size_of::<u32>()) as u32;
/// `FUSE_IO_URING_CMD_REGISTER` and `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`
const REGISTER: u32 = 1;
const COMMIT_AND_FETCH: u32 = 2;
/// Memory begins at a multiple of it; a header takes one.
const PAGE: usize = 4096;
/// No machine has so many processors.
const NO_QUEUE: u16 = u16::MAX;

/// Makes `device`, which was just opened, another descriptor of the file system behind `first`:
/// each request is read from one of them, and answered there.
///
/// # Errors
/// As `ioctl(2)`: `EINVAL` where one of them is no FUSE device, or `device` has a file system.
pub fn clone_fuse_device(first: &Fd, device: &OwnedFd) -> io::Result<()> {
    let number = first.as_fd().as_raw_fd().unsigned_abs();
    // SAFETY: the kernel reads one number, from `number`; whatever the descriptors are, it touches
    // no other memory of ours.
    let result = unsafe { libc::ioctl(device.as_raw_fd(), CLONE.into(), &raw const number) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Entries of a file system's queues, on the thread that registers them.
#[derive(Debug)]
pub struct FuseRing {
    shared: Rc<Shared>,
    queues: u16,
}

/// What the kernel works with until the last entry has ended.
#[derive(Debug)]
struct Shared {
    device: Fd,
    memory: Memory,
    /// Of each entry: where its header is, and its data.
    vectors: Box<[[libc::iovec; 2]]>,
    most_bytes: usize,
}

impl FuseRing {
    /// The length of a header (`struct fuse_uring_req_header`).
    pub const HEADER_BYTES: usize = 288;

    /// As many entries for each of the kernel's queues as `depth` says for their number, each with
    /// room for so many bytes of data.
    ///
    /// # Errors
    /// As `mmap(2)`, or nobody knows how many queues there are.
    pub fn new(device: &Fd, depth: fn(u16) -> u16, most_bytes: usize) -> io::Result<Self> {
        let queues = possible_processors()?;
        let stride = PAGE + most_bytes.next_multiple_of(PAGE);
        let entries = usize::from(queues) * usize::from(depth(queues));
        let memory =
            Memory::new(vec![Region::lent(entries * stride)?]).expect("one region overlaps no other");
        let place = |address: usize, bytes| memory.place(address as u64, bytes).expect("inside");
        let vector = |place: &Place| libc::iovec { iov_base: place.as_ptr().cast(), iov_len: place.bytes() };
        let vectors = (0..entries).map(|entry| {
            let header = place(entry * stride, Self::HEADER_BYTES);
            [vector(&header), vector(&place(entry * stride + PAGE, most_bytes))]
        });
        let vectors = vectors.collect();
        Ok(Self { shared: Rc::new(Shared { device: device.clone(), memory, vectors, most_bytes }), queues })
    }

    /// Has the kernel go on without, which waits for it since INIT.
    pub async fn decline(device: &Fd) {
        let entry = entry(device, REGISTER, NO_QUEUE, 0, &[]);
        // SAFETY: the entry refers to the descriptor alone.
        let op = unsafe { Op::start_long(entry, device.clone()) };
        drop(op.await);
    }

    /// How many there are.
    pub fn entries(&self) -> usize {
        self.shared.vectors.len()
    }

    /// Where an entry's header is.
    ///
    /// # Panics
    /// If there is no such entry.
    pub fn header(&self, entry: usize) -> Place {
        self.place(entry, 0, Self::HEADER_BYTES)
    }

    /// The first `bytes` of an entry's data.
    ///
    /// # Panics
    /// If there is no such entry, or it does not have so many.
    pub fn data(&self, entry: usize, bytes: usize) -> Place {
        assert!(bytes <= self.shared.most_bytes, "{bytes} bytes of an entry");
        self.place(entry, PAGE, bytes)
    }

    fn place(&self, entry: usize, offset: usize, bytes: usize) -> Place {
        assert!(entry < self.entries(), "entry {entry}");
        let stride = PAGE + self.shared.most_bytes.next_multiple_of(PAGE);
        self.shared.memory.place((entry * stride + offset) as u64, bytes).expect("inside")
    }

    /// Waits for the first request of an entry. It is queued at once; dropped early, it goes on
    /// until the file system has gone, or the reactor ends.
    ///
    /// # Errors
    /// There will be none: `ENOTCONN` where the file system has gone, others where the kernel does
    /// not want the entry.
    pub fn register(&self, entry: usize) -> impl Future<Output = io::Result<()>> + use<> {
        self.command(REGISTER, entry, 0)
    }

    /// Answers the request that the kernel knows by this number with what is in the entry, and
    /// waits for the next as [`FuseRing::register`] does.
    ///
    /// # Errors
    /// As [`FuseRing::register`].
    pub fn commit(&self, entry: usize, request: u64) -> impl Future<Output = io::Result<()>> + use<> {
        self.command(COMMIT_AND_FETCH, entry, request)
    }

    fn command(
        &self,
        code: u32,
        number: usize,
        request: u64,
    ) -> impl Future<Output = io::Result<()>> + use<> {
        let queue = (number % usize::from(self.queues)) as u16;
        let entry = entry(&self.shared.device, code, queue, request, &self.shared.vectors[number]);
        // SAFETY: the vectors, the memory that they name, and the descriptor are in `shared`, which
        // is held.
        let op = unsafe { Op::start_long(entry, Rc::clone(&self.shared)) }.until_the_ring_ends();
        async { op.await.0.map(drop) }
    }
}

/// A command with `struct fuse_uring_cmd_req`: flags, request, queue.
fn entry(device: &Fd, code: u32, queue: u16, request: u64, vectors: &[libc::iovec]) -> squeue::Entry128 {
    /// Of `len` in `struct io_uring_sqe`.
    const LENGTH_AT: usize = 24;
    let mut command = [0; 80];
    command[8..16].copy_from_slice(&request.to_ne_bytes());
    command[16..18].copy_from_slice(&queue.to_ne_bytes());
    let address = vectors.as_ptr() as u64;
    let entry = opcode::UringCmd80::new(types::Fd(device.raw()), code).cmd(command).addr(Some(address));
    let mut entry = entry.build();
    // SAFETY: an entry is `struct io_uring_sqe`, and this number of it is aligned and inside.
    unsafe { (&raw mut entry).cast::<u8>().add(LENGTH_AT).cast::<u32>().write(vectors.len() as u32) };
    entry
}

/// How many processors the kernel has made room for. It numbers its queues up to there.
fn possible_processors() -> io::Result<u16> {
    let list = std::fs::read_to_string("/sys/devices/system/cpu/possible")?;
    count(list.trim()).ok_or_else(|| io::Error::other("the kernel's list of processors is not understood"))
}

/// Of a list such as `0-3,8`.
fn count(list: &str) -> Option<u16> {
    let mut all = 0_u16;
    for part in list.split(',') {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?);
        all = all.checked_add(last.checked_sub(first)?.checked_add(1)?)?;
    }
    Some(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn processors_are_counted() {
        assert_eq!(count("0"), Some(1));
        assert_eq!(count("0-1"), Some(2));
        assert_eq!(count("0-3,8,10-11"), Some(7));
        for wrong in ["", "3-0", "a", "0-70000", "0-65535"] {
            assert_eq!(count(wrong), None, "{wrong}");
        }
    }
}
