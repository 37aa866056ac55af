//! Rings that accept only a list of operations.
//!
//! System call filters do not apply to operations submitted to a ring. Instead the kernel enforces
//! a list (`IORING_REGISTER_RESTRICTIONS`, Linux 5.10): a ring is created disabled, gets its list,
//! and is enabled, after which the list cannot be changed.

use std::io;

use io_uring::{Builder, IoUring, cqueue, opcode, register::Restriction, squeue};

/// Operations of a reactor: those of [`super::operation`] and of ublk queues.
pub(super) const OPERATIONS: [u8; 16] = [
    opcode::Read::CODE,
    opcode::Readv::CODE,
    opcode::ReadFixed::CODE,
    opcode::Write::CODE,
    opcode::Writev::CODE,
    opcode::WriteFixed::CODE,
    opcode::Fsync::CODE,
    opcode::Fallocate::CODE,
    opcode::Fadvise::CODE,
    opcode::Recv::CODE,
    opcode::SendMsg::CODE,
    opcode::Accept::CODE,
    opcode::PollAdd::CODE,
    opcode::AsyncCancel::CODE,
    opcode::Nop::CODE,
    opcode::UringCmd16::CODE,
];

/// Resources that can be registered with a ring after it was enabled (linux/io_uring.h).
pub(super) mod registering {
    pub(in super::super) const EVENTFD: u8 = 4;
    pub(in super::super) const UNREGISTER_EVENTFD: u8 = 5;
    /// `IORING_REGISTER_BUFFERS2`
    pub(in super::super) const BUFFERS: u8 = 15;
    pub(in super::super) const SYNC_CANCEL: u8 = 24;
}

/// Creates a ring that is restricted to these operations, to the flag `IOSQE_ASYNC`, and to
/// registering these resources. If `file_threads` is given, it limits the kernel's threads for
/// operations on files.
///
/// # Errors
/// As `io_uring_setup(2)` and `io_uring_register(2)`.
pub(super) fn build<S: squeue::EntryMarker, C: cqueue::EntryMarker>(
    builder: &mut Builder<S, C>,
    entries: u32,
    file_threads: Option<u32>,
    operations: &[u8],
    registered: &[u8],
) -> io::Result<IoUring<S, C>> {
    let ring = builder.setup_r_disabled().build(entries)?;
    if let Some(threads) = file_threads {
        // Zero leaves the limit of threads for sockets and pipes unchanged.
        ring.submitter().register_iowq_max_workers(&mut [threads, 0])?;
    }
    let operations = operations.iter().map(|code| Restriction::sqe_op(*code));
    let registered = registered.iter().map(|code| Restriction::register_op(*code));
    // The only flag in use, and harmless: `IOSQE_ASYNC`.
    let flags = Restriction::sqe_flags_allowed(squeue::Flags::ASYNC.bits());
    let mut list: Vec<_> = operations.chain(registered).chain([flags]).collect();
    ring.submitter().register_restrictions(&mut list)?;
    ring.submitter().register_enable_rings()?;
    Ok(ring)
}

#[cfg(test)]
mod tests {
    use io_uring::types;

    use super::*;

    fn result(ring: &mut IoUring, entry: &squeue::Entry) -> i32 {
        // SAFETY: the entries of this test point to static data only.
        unsafe { ring.submission().push(entry) }.expect("there is room");
        ring.submit_and_wait(1).expect("it is submitted");
        ring.completion().next().expect("it has ended").result()
    }

    #[test]
    fn unlisted_operation_is_rejected() {
        let mut ring = build(&mut IoUring::builder(), 4, None, &OPERATIONS, &[]).expect("a ring");
        let shadow = c"/etc/shadow";
        let current_directory = types::Fd(libc::AT_FDCWD);
        for entry in [
            opcode::OpenAt::new(current_directory, shadow.as_ptr()).build(),
            opcode::Socket::new(libc::AF_INET, libc::SOCK_STREAM, 0).build(),
            opcode::Connect::new(current_directory, std::ptr::null(), 0).build(),
            opcode::UnlinkAt::new(current_directory, shadow.as_ptr()).build(),
            opcode::Splice::new(current_directory, -1, current_directory, -1, 1).build(),
            // An allowed operation with a flag that is not allowed.
            opcode::Nop::new().build().flags(squeue::Flags::IO_DRAIN),
        ] {
            assert_eq!(result(&mut ring, &entry), -libc::EACCES, "{entry:?}");
        }
        assert_eq!(result(&mut ring, &opcode::Nop::new().build()), 0);
        let asynchronous = opcode::Nop::new().build().flags(squeue::Flags::ASYNC);
        assert_eq!(result(&mut ring, &asynchronous), 0);
        let error = ring.submitter().register_files(&[]).expect_err("it is not in the list");
        assert_eq!(error.raw_os_error(), Some(libc::EACCES));
    }
}
