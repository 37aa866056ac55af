//! I/O operations of the data path, a function for each. Each owns the memory it works on while it
//! is in flight, and returns it.
//!
//! A file descriptor is held as [`Fd`], shared and reference-counted. An operation in flight keeps
//! it open, so its number cannot be reused for another file before the kernel has looked it up.

use std::{
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd},
    sync::{Arc, Condvar, Mutex, PoisonError},
};

use io_uring::{opcode, squeue, types};
use nix::sys::resource::{Resource, getrlimit};
use policy::time::Duration;
use smallvec::SmallVec;

use super::{
    OperationPermit, blocking_threads, priority,
    uring::{MAX_QUEUED_READS, MAX_QUEUED_WRITES, RingOperation},
    worker,
};
use crate::buffer::{IoBuffer, Segment, Segments};

/// An open file, socket or device, shared between threads and operations in flight.
#[derive(Clone, Debug)]
pub struct Fd {
    open: Arc<OpenDescriptor>,
    /// Returned when the operations that hold this clone have completed.
    permit: Option<Arc<OperationPermit>>,
}

#[derive(Debug)]
struct OpenDescriptor {
    /// `None` during drop, and if it is shared.
    fd: Option<OwnedFd>,
    /// The descriptor that this one is another name of.
    shared: Option<Fd>,
    close_hook: Option<Arc<dyn CloseHook>>,
}

/// Callbacks that precede the closing of a file. Callback and close may both block on the file
/// system (a close sends locks and written data to an NFS or FUSE server), so they run on a thread
/// that may block. A [`CloseHook`] is dropped after the file is closed.
pub trait CloseHook: std::fmt::Debug + Send + Sync {
    /// Called at the last use of the file, when no operation on it is in flight.
    fn before_close(&self, fd: BorrowedFd<'_>);
}

/// Number of files being closed on other threads.
static CLOSINGS: Mutex<usize> = Mutex::new(0);
static CLOSED: Condvar = Condvar::new();

/// Blocks until all files that were dropped on non-blocking threads are closed, for `timeout` at
/// most. Returns true if they are.
pub fn wait_for_closings(timeout: Duration) -> bool {
    let closings = CLOSINGS.lock().unwrap_or_else(PoisonError::into_inner);
    let waited = CLOSED.wait_timeout_while(closings, timeout, |closings| *closings > 0);
    *waited.unwrap_or_else(PoisonError::into_inner).0 == 0
}

/// Runs `close`, which may block on a file system, on a thread that may block.
fn close_blocking(close: impl FnOnce() + Send + 'static) {
    if worker::may_block() {
        return close();
    }
    *CLOSINGS.lock().unwrap_or_else(PoisonError::into_inner) += 1;
    blocking_threads::start(move || {
        close();
        *CLOSINGS.lock().unwrap_or_else(PoisonError::into_inner) -= 1;
        CLOSED.notify_all();
    });
}

/// A descriptor passed by another process. It may be of any file, so closing it may block on a file
/// system.
#[derive(Debug)]
pub struct PassedFd(Option<OwnedFd>);

impl PassedFd {
    /// The descriptor, for a caller that closes it without blocking a thread that serves disks.
    pub fn into_owned(mut self) -> OwnedFd {
        self.0.take().expect("taken once")
    }
}

impl From<OwnedFd> for PassedFd {
    fn from(fd: OwnedFd) -> Self {
        Self(Some(fd))
    }
}

impl AsFd for PassedFd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_ref().expect("open until it is dropped").as_fd()
    }
}

impl Drop for PassedFd {
    fn drop(&mut self) {
        if let Some(fd) = self.0.take() {
            close_blocking(move || drop(fd));
        }
    }
}

impl Drop for OpenDescriptor {
    fn drop(&mut self) {
        let (Some(fd), Some(close_hook)) = (self.fd.take(), self.close_hook.take()) else { return };
        close_blocking(move || {
            close_hook.before_close(fd.as_fd());
            drop(fd);
            drop(close_hook);
        });
    }
}

impl Fd {
    /// Creates a descriptor; `close_hook` is called after its last use on any thread.
    pub fn with_close_hook(fd: impl Into<OwnedFd>, close_hook: Arc<dyn CloseHook>) -> Self {
        Self {
            open: Arc::new(OpenDescriptor {
                fd: Some(fd.into()),
                shared: None,
                close_hook: Some(close_hook),
            }),
            permit: None,
        }
    }

    /// The same descriptor, with clones that are counted separately: see
    /// [`Fd::has_reference_count`]. It counts as one clone of `self`.
    pub fn counted_separately(&self) -> Self {
        let shared = Some(Self { open: Arc::clone(&self.open), permit: None });
        Self { open: Arc::new(OpenDescriptor { fd: None, shared, close_hook: None }), permit: None }
    }

    /// A clone that holds a permit until it is dropped and all operations on it have completed.
    pub fn with_permit(&self, permit: OperationPermit) -> Self {
        Self { open: Arc::clone(&self.open), permit: Some(Arc::new(permit)) }
    }

    /// Flags of operations on the file. An operation with a permit is executed by a kernel thread
    /// from the start, because file systems in user space accept non-blocking reads and then block
    /// in their readahead.
    pub(super) fn flags(&self) -> squeue::Flags {
        if self.permit.is_some() { squeue::Flags::ASYNC } else { squeue::Flags::empty() }
    }

    fn owned(&self) -> &OwnedFd {
        match &self.open.shared {
            None => self.open.fd.as_ref().expect("open until it is dropped"),
            Some(shared) => shared.owned(),
        }
    }

    fn target(&self) -> types::Fd {
        types::Fd(self.raw())
    }

    pub(super) fn raw(&self) -> RawFd {
        self.owned().as_raw_fd()
    }

    /// True if both are the same descriptor; false for another descriptor of the same file.
    pub fn is_same(&self, other: &Self) -> bool {
        self.raw() == other.raw()
    }

    /// True if there are exactly `count` clones, including those of operations in flight.
    pub fn has_reference_count(&self, count: usize) -> bool {
        Arc::strong_count(&self.open) == count
    }
}

impl<T: Into<OwnedFd>> From<T> for Fd {
    fn from(fd: T) -> Self {
        let open = OpenDescriptor { fd: Some(fd.into()), shared: None, close_hook: None };
        Self { open: Arc::new(open), permit: None }
    }
}

impl AsFd for Fd {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.owned().as_fd()
    }
}

/// Maximum number of segments in one system call: the kernel's UIO_MAXIOV.
pub const MAX_SEGMENTS: usize = 1024;

/// Length as the kernel's 32 bits. More becomes a short transfer, which callers continue anyway.
pub(super) fn length(bytes: usize) -> u32 {
    u32::try_from(bytes).unwrap_or(1 << 30)
}

/// Segments that the kernel fills. A guest's memory is marked as dirty when the operation has
/// completed, even if its task was dropped.
struct FilledSegments(Segments);

impl FilledSegments {
    fn into_segments(mut self) -> Segments {
        self.0.mark_dirty();
        std::mem::take(&mut self.0)
    }
}

impl Drop for FilledSegments {
    fn drop(&mut self) {
        self.0.mark_dirty();
    }
}

/// Reads at `offset` into `segments`, after their first `filled` bytes, which must not be all;
/// returns the number of bytes, 0 at the end of the file. More than [`MAX_SEGMENTS`] segments, or
/// too many bytes, yield a short read.
pub async fn read_at(
    fd: &Fd,
    mut segments: Segments,
    filled: usize,
    offset: u64,
) -> (io::Result<usize>, Segments) {
    if let [only] = segments.as_mut_slice() {
        let bytes = only.len() - filled;
        let entry = opcode::Read::new(fd.target(), only.target().wrapping_add(filled), length(bytes))
            .offset(offset)
            .ioprio(priority::current())
            .build()
            .flags(fd.flags());
        // SAFETY: a segment's memory keeps its address when the segment moves, and the operation
        // owns segment and descriptor.
        let op = unsafe { RingOperation::start(&entry, (fd.clone(), FilledSegments(segments))) }
            .submit_at(MAX_QUEUED_READS);
        let (result, (_, filled)) = op.await;
        return (result.map(|count| count as usize), filled.into_segments());
    }
    let vectors = IoVectors::to_fill(&mut segments, filled);
    let entry = opcode::Readv::new(fd.target(), vectors.0.as_ptr(), length(vectors.0.len()))
        .offset(offset)
        .ioprio(priority::current())
        .build()
        .flags(fd.flags());
    // SAFETY: the vectors are boxed, and the operation owns the segments they point to.
    let op = unsafe { RingOperation::start(&entry, (fd.clone(), FilledSegments(segments), vectors)) }
        .submit_at(MAX_QUEUED_READS);
    let (result, (_, filled, _)) = op.await;
    (result.map(|count| count as usize), filled.into_segments())
}

/// Durability of a write at its completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// The data may be in a cache until the next [`sync`].
    Cached,
    /// `RWF_DSYNC`: data and the metadata needed to read it are on stable storage.
    Synchronous,
}

impl Durability {
    /// Flags of a write (`RWF_…`).
    pub(super) fn flags(self) -> i32 {
        match self {
            Self::Cached => 0,
            Self::Synchronous => libc::RWF_DSYNC,
        }
    }
}

/// Writes the segments, at most [`MAX_SEGMENTS`], at `offset`; returns the number of bytes.
pub async fn write_at(
    fd: &Fd,
    segments: Segments,
    offset: u64,
    durability: Durability,
) -> (io::Result<usize>, Segments) {
    let flags = durability.flags();
    if let [only] = segments.as_slice() {
        let entry = opcode::Write::new(fd.target(), only.source(), length(only.len()))
            .offset(offset)
            .rw_flags(flags)
            .build()
            .flags(fd.flags());
        // SAFETY: as in `read_at`.
        let op = unsafe { RingOperation::start(&entry, (fd.clone(), segments)) }.submit_at(MAX_QUEUED_WRITES);
        let (result, (_, segments)) = op.await;
        return (result.map(|count| count as usize), segments);
    }
    let vectors = IoVectors::of(&segments);
    let entry = opcode::Writev::new(fd.target(), vectors.0.as_ptr(), length(vectors.0.len()))
        .offset(offset)
        .rw_flags(flags)
        .build()
        .flags(fd.flags());
    // SAFETY: the vectors are boxed and the operation owns the buffers they point to.
    let op =
        unsafe { RingOperation::start(&entry, (fd.clone(), segments, vectors)) }.submit_at(MAX_QUEUED_WRITES);
    let (result, (_, segments, _)) = op.await;
    (result.map(|count| count as usize), segments)
}

/// Flushes all previous writes to stable storage (`fdatasync`).
pub async fn sync(fd: &Fd) -> io::Result<()> {
    let entry = opcode::Fsync::new(fd.target()).flags(types::FsyncFlags::DATASYNC).build();
    // SAFETY: the entry refers to the descriptor only.
    let op = unsafe { RingOperation::start(&entry, fd.clone()) };
    op.await.0.map(drop)
}

/// `fallocate(2)` with `mode` from `FALLOC_FL_…`: zeroes, deallocates or reserves a range.
///
/// # Errors
/// As `fallocate(2)`; `EOPNOTSUPP` if the file system does not support it.
pub async fn allocate(fd: &Fd, mode: i32, offset: u64, length: u64) -> io::Result<()> {
    let entry = opcode::Fallocate::new(fd.target(), length).offset(offset).mode(mode).build();
    // SAFETY: the entry refers to the descriptor only.
    let op = unsafe { RingOperation::start(&entry, fd.clone()) };
    op.await.0.map(drop)
}

/// Hint to the page cache to read a range ahead (`POSIX_FADV_WILLNEED`).
pub async fn read_ahead(fd: &Fd, offset: u64, length: u64) -> io::Result<()> {
    // The kernel takes 32 bits here; a hint may be shortened.
    let length = libc::off_t::from(i32::try_from(length).unwrap_or(i32::MAX));
    let entry = opcode::Fadvise::new(fd.target(), length, libc::POSIX_FADV_WILLNEED).offset(offset).build();
    // SAFETY: the entry refers to the descriptor only.
    let op = unsafe { RingOperation::start(&entry, fd.clone()) };
    op.await.0.map(drop)
}

/// Receives into `buffer` after its first `filled` bytes; returns the number of bytes, 0 if the
/// peer has closed the connection.
///
/// # Panics
/// Panics if the buffer is full.
pub async fn receive(fd: &Fd, mut buffer: IoBuffer, filled: usize) -> (io::Result<usize>, IoBuffer) {
    let free = &mut buffer[filled..];
    assert!(!free.is_empty(), "receiving into no room would look like the peer's end");
    let entry = opcode::Recv::new(fd.target(), free.as_mut_ptr(), length(free.len())).build();
    // SAFETY: as in `read_at`.
    let op = unsafe { RingOperation::start(&entry, (fd.clone(), buffer)) };
    let (result, (_, buffer)) = op.await;
    (result.map(|count| count as usize), buffer)
}

/// Sends the segments in one message; returns the number of bytes.
///
/// # Errors
/// As `sendmsg(2)`; a closed peer is `EPIPE`, never a signal.
pub async fn send(fd: &Fd, segments: Segments) -> (io::Result<usize>, Segments) {
    send_result(start_send(fd, segments)).await
}

/// As [`send`], submitted at once with all operations that are queued: for a receiver that can
/// process the message while this thread runs further tasks.
///
/// # Errors
/// As [`send`].
pub async fn send_now(fd: &Fd, segments: Segments) -> (io::Result<usize>, Segments) {
    send_result(start_send(fd, segments).submit_at(1)).await
}

type Sending = RingOperation<(Fd, Segments, Box<SendMessage>)>;

fn start_send(fd: &Fd, segments: Segments) -> Sending {
    let mut message = Box::new(SendMessage::new(IoVectors::of(&segments)));
    let entry = opcode::SendMsg::new(fd.target(), message.header())
        .flags((libc::MSG_NOSIGNAL | libc::MSG_WAITALL) as u32)
        .build();
    // SAFETY: header and vectors are boxed, and the operation owns the buffers they point to.
    unsafe { RingOperation::start(&entry, (fd.clone(), segments, message)) }
}

async fn send_result(op: Sending) -> (io::Result<usize>, Segments) {
    let (result, (_, segments, _)) = op.await;
    (result.map(|count| count as usize), segments)
}

/// Bytes sent on a stream socket that are not delivered. For TCP: bytes that the peer has not
/// acknowledged. For a Unix socket: memory of the data that the peer has not read, including the
/// kernel's overhead, so it may exceed the bytes sent; 0 if the peer has read everything.
///
/// # Errors
/// As `ioctl(2)` with `SIOCOUTQ`; `ENOTTY` or `EOPNOTSUPP` for any other file.
pub fn unread_bytes(fd: &Fd) -> io::Result<usize> {
    let mut count: libc::c_int = 0;
    // SAFETY: SIOCOUTQ (TIOCOUTQ's other name) writes one int, to `count`.
    let result = unsafe { libc::ioctl(fd.raw(), libc::TIOCOUTQ, &raw mut count) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(usize::try_from(count).unwrap_or(0))
}

/// Number of descriptors reserved from clients for the rest of the process: control sockets,
/// images.
const RESERVED_DESCRIPTORS: u64 = 64;
/// Maximum number reserved from clients with many descriptors: see [`has_shared_descriptors`].
pub const MAX_RESERVED_DESCRIPTORS: u64 = 2 * RESERVED_DESCRIPTORS;

/// True if a client may use another descriptor: the lowest free one is not among the last ones of
/// the process's limit. Of a small limit (`ulimit -n`) an eighth is reserved.
pub fn has_client_descriptors() -> bool {
    has_descriptors_beyond(1)
}

/// As [`has_client_descriptors`], for a client that has many: twice as many are reserved, half of
/// them for other clients.
pub fn has_shared_descriptors() -> bool {
    has_descriptors_beyond(2)
}

fn has_descriptors_beyond(reserves: u64) -> bool {
    let Ok((limit, _)) = getrlimit(Resource::RLIMIT_NOFILE) else { return true };
    let reserved = reserves * RESERVED_DESCRIPTORS.min(limit / 8);
    lowest_free().is_none_or(|number| number.saturating_add(reserved) < limit)
}

/// Lower bound of the number of descriptors that the process can still open: those above the lowest
/// free one.
pub fn free_descriptors() -> u64 {
    let Ok((limit, _)) = getrlimit(Resource::RLIMIT_NOFILE) else { return u64::MAX };
    lowest_free().map_or(u64::MAX, |number| limit.saturating_sub(number))
}

/// Sets close-on-exec for all inherited descriptors except the first three: sockets and secrets
/// that a service manager leaves open, which child processes must not inherit.
///
/// # Errors
/// Fails before Linux 5.11: close_range(2) exists since 5.9, this flag since 5.11.
pub fn set_close_on_exec() -> io::Result<()> {
    const CLOSE_RANGE_CLOEXEC: libc::c_uint = 1 << 2;
    // SAFETY: sets a flag of descriptors, and closes none.
    let result = unsafe { libc::syscall(libc::SYS_close_range, 3, libc::c_uint::MAX, CLOSE_RANGE_CLOEXEC) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// The lowest free descriptor; `u64::MAX` if there is none, `None` if it cannot be determined.
fn lowest_free() -> Option<u64> {
    // SAFETY: creates a descriptor, or fails.
    let free = unsafe { libc::fcntl(0, libc::F_DUPFD_CLOEXEC, 0) };
    match u64::try_from(free) {
        Ok(number) => {
            // SAFETY: created above, and owned by nothing else.
            drop(unsafe { OwnedFd::from_raw_fd(free) });
            Some(number)
        }
        Err(_) if io::Error::last_os_error().raw_os_error() == Some(libc::EMFILE) => Some(u64::MAX),
        Err(_) => None,
    }
}

/// Accepts a connection on a listening socket.
pub async fn accept(fd: &Fd) -> io::Result<OwnedFd> {
    let entry = opcode::Accept::new(fd.target(), std::ptr::null_mut(), std::ptr::null_mut())
        .flags(libc::SOCK_CLOEXEC)
        .build();
    // SAFETY: the entry refers to the descriptor only.
    let op = unsafe { RingOperation::start(&entry, fd.clone()) };
    // If the task was dropped, the connection is closed at once, so that the client does not wait
    // until the process ends.
    let op = op.on_orphan(|_, result| drop(accepted(result)));
    let descriptor = op.await.0?;
    accepted(i32::try_from(descriptor).unwrap_or(-1)).ok_or(io::Error::from_raw_os_error(libc::EBADF))
}

/// The descriptor in an accept's result; `None` if it failed.
fn accepted(result: i32) -> Option<OwnedFd> {
    // SAFETY: the kernel has just created this descriptor, and nothing else owns it.
    (result >= 0).then(|| unsafe { OwnedFd::from_raw_fd(result) })
}

/// Cancels this thread's pending operations on `fd` with `ECANCELED`. Each completes either
/// normally or with that error, so no data is lost.
pub fn cancel_all_on(fd: &Fd) {
    let entry = opcode::AsyncCancel2::new(types::CancelBuilder::fd(fd.target()).all()).build();
    // SAFETY: the entry refers to the descriptor only.
    let op = unsafe { RingOperation::start(&entry, fd.clone()) };
    // The result is ignored: the cancelled operations report theirs.
    super::spawn(async { drop(op.await) });
}

/// Waits until `fd` is readable (or has failed).
pub async fn readable(fd: &Fd) -> io::Result<()> {
    poll_once(fd, libc::POLLIN.into(), 0).await
}

/// As [`readable`], if several tasks or processes wait for the same file: for each event the kernel
/// wakes one of them (`EPOLLEXCLUSIVE`).
pub async fn readable_by_one(fd: &Fd) -> io::Result<()> {
    poll_once(fd, libc::POLLIN.into(), libc::EPOLLEXCLUSIVE as u32).await
}

/// Waits until the peer of a socket has shut down its writing side, even if there is unread data.
pub async fn peer_shut_down(fd: &Fd) -> io::Result<()> {
    poll_once(fd, libc::POLLRDHUP.into(), 0).await
}

async fn poll_once(fd: &Fd, events: i32, flags: u32) -> io::Result<()> {
    let entry = opcode::PollAdd::new(fd.target(), events as u32 | flags).build();
    // SAFETY: the entry refers to the descriptor only.
    let op = unsafe { RingOperation::start(&entry, fd.clone()) };
    op.await.0.map(drop)
}

/// Pointers to segments at a stable address: few are stored inline in the box, many in an
/// allocation of their own.
struct IoVectors(Box<SmallVec<[libc::iovec; 8]>>);

impl IoVectors {
    /// Vectors over the bytes of all segments.
    fn of(segments: &Segments) -> Self {
        let vector = |segment: &Segment| libc::iovec {
            iov_base: segment.source().cast_mut().cast(),
            iov_len: segment.len(),
        };
        Self(Box::new(segments.iter().map(vector).collect()))
    }

    /// Vectors over the bytes after the first `filled` ones, for at most [`MAX_SEGMENTS`]
    /// segments.
    fn to_fill(segments: &mut Segments, mut filled: usize) -> Self {
        let vectors = segments.as_mut_slice().iter_mut().filter_map(|segment| {
            let skip = filled.min(segment.len());
            filled -= skip;
            let room = segment.len() - skip;
            let base = segment.target().wrapping_add(skip);
            (room > 0).then_some(libc::iovec { iov_base: base.cast(), iov_len: room })
        });
        Self(Box::new(vectors.take(MAX_SEGMENTS).collect()))
    }
}

struct SendMessage {
    header: libc::msghdr,
    vectors: IoVectors,
}

impl SendMessage {
    fn new(vectors: IoVectors) -> Self {
        // SAFETY: msghdr is a C structure of integers and pointers, and all zeroes mean an empty
        // message.
        let header = unsafe { std::mem::zeroed() };
        Self { header, vectors }
    }

    fn header(&mut self) -> *const libc::msghdr {
        self.header.msg_iov = self.vectors.0.as_mut_ptr();
        self.header.msg_iovlen = self.vectors.0.len();
        &raw const self.header
    }
}
