//! Isolation of one file from all others when its file system stops answering.
//!
//! A FUSE file system or a file server may stop answering. The kernel then occupies a thread for
//! each operation and each call in flight, until it answers. So a file has few in flight at once;
//! further requests wait here, where they occupy no thread:
//!
//! ```text
//!   reads, writes, syncs, allocations ─► OPERATIONS at once ─► io_uring, a kernel thread for each
//!   sizes, extents, lengths, locks    ─► CALLS at once      ─► a thread of the pool for each
//! ```
//!
//! Reads and writes on block devices and on the usual local file systems occupy no thread and are
//! not bounded. On all other file systems (FUSE, NFS, CIFS, 9P, …) the kernel executes them on a
//! thread from the start (`IOSQE_ASYNC`), because a non-blocking attempt (`RWF_NOWAIT`) can block
//! on FUSE's readahead.
//!
//! After [`FileIsolation::abandon`], all operations that wait for the file fail with
//! [`Error::TIMED_OUT`]: the file is closed although its file system does not answer. The kernel
//! keeps the memory of operations in flight.

use std::{
    fs,
    future::{Future, poll_fn},
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering::SeqCst},
    },
    task::Poll,
};

use event_listener::Event;
use rustix::fs::fstatfs;

use reactor::{
    OperationPermits,
    error::{Error, Result},
    operation::Fd,
};

/// Maximum number of io_uring operations in flight on one file that occupy a kernel thread each. By
/// default the kernel has four such threads for each processor, shared by all files of a ring.
const OPERATIONS: usize = 64;
/// Magic numbers (linux/magic.h) of file systems on devices of this host, or in its memory: ext2 to
/// ext4, XFS, Btrfs, F2FS, bcachefs, ZFS, tmpfs, ramfs, and overlayfs, whose files are mostly on
/// one of these.
const LOCAL: [u32; 9] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0xca45_1a4e,
    0x2fc1_2fc1,
    0x0102_1994,
    0x8584_58f6,
    0x794c_7630,
];
/// Maximum number of system calls in flight on one file.
const CALLS: usize = 4;
/// Maximum number of health checks in flight on one file. They have their own permits, because
/// other calls may take long on a healthy file system: truncating a large file, for example.
const PINGS: usize = 1;

#[derive(Debug)]
pub(super) struct FileIsolation {
    /// True if reads and writes occupy kernel threads, too.
    occupies_threads: bool,
    operation_slots: Arc<OperationPermits>,
    call_slots: Arc<OperationPermits>,
    ping_slots: Arc<OperationPermits>,
    is_abandoned: AtomicBool,
    abandoned: Event,
}

impl FileIsolation {
    /// Creates the isolation of an open file.
    pub(super) fn for_file(file: &fs::File, is_device: bool) -> Self {
        let is_local = |magic: u32| LOCAL.contains(&magic);
        // The type is a C long, of which file systems use 32 bits.
        let local = is_device || fstatfs(file).is_ok_and(|system| is_local(system.f_type as u32));
        Self {
            occupies_threads: !local,
            operation_slots: OperationPermits::new(OPERATIONS),
            call_slots: OperationPermits::new(CALLS),
            ping_slots: OperationPermits::new(PINGS),
            is_abandoned: AtomicBool::new(false),
            abandoned: Event::new(),
        }
    }

    /// Creates an isolation that treats the file as one on a remote file system.
    #[cfg(test)]
    pub(super) fn remote(file: &fs::File) -> Self {
        Self { occupies_threads: true, ..Self::for_file(file, false) }
    }

    /// Takes all slots for operations.
    #[cfg(test)]
    pub(super) async fn take_all_slots(&self) -> Vec<reactor::OperationPermit> {
        let mut slots = Vec::new();
        while slots.len() < OPERATIONS {
            slots.push(self.operation_slots.acquire().await);
        }
        slots
    }

    /// True if reads and writes must go through [`FileIsolation::operate`].
    pub(super) fn bounds_transfers(&self) -> bool {
        self.occupies_threads
    }

    /// Runs an operation on the file once a slot is free. The slot is attached to the descriptor
    /// that `operate` receives, so the kernel holds it until it has finished.
    ///
    /// # Errors
    /// Errors of `operate`; [`Error::TIMED_OUT`] after [`FileIsolation::abandon`].
    pub(super) async fn operate<T>(&self, fd: &Fd, operate: impl AsyncFnOnce(Fd) -> Result<T>) -> Result<T> {
        self.unless_abandoned(async {
            let fd = fd.with_permit(self.operation_slots.acquire().await);
            operate(fd).await
        })
        .await
    }

    /// Runs a system call that may block, on another thread, once a slot is free.
    ///
    /// # Errors
    /// Errors of `call`; [`Error::TIMED_OUT`] after [`FileIsolation::abandon`].
    pub(super) async fn call<T: Send + 'static>(
        &self,
        fd: &Fd,
        call: impl FnOnce(&Fd) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.call_with_permit(&self.call_slots, fd, call).await
    }

    /// Runs a health check: a system call as by [`FileIsolation::call`], with its own slot.
    ///
    /// # Errors
    /// As [`FileIsolation::call`].
    pub(super) async fn ping<T: Send + 'static>(
        &self,
        fd: &Fd,
        call: impl FnOnce(&Fd) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.call_with_permit(&self.ping_slots, fd, call).await
    }

    async fn call_with_permit<T: Send + 'static>(
        &self,
        permits: &Arc<OperationPermits>,
        fd: &Fd,
        call: impl FnOnce(&Fd) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let fd = fd.clone();
        self.unless_abandoned(async {
            let permit = permits.acquire().await;
            reactor::run_blocking(move || {
                // The permit moves to the thread: after `abandon` the call still occupies it.
                let _permit = permit;
                call(&fd)
            })
            .await
        })
        .await
    }

    /// Fails the operations and calls that wait for the file, and all later ones.
    pub(super) fn abandon(&self) {
        self.is_abandoned.store(true, SeqCst);
        self.abandoned.notify(usize::MAX);
    }

    pub(super) fn is_abandoned(&self) -> bool {
        self.is_abandoned.load(SeqCst)
    }

    async fn unless_abandoned<T>(&self, work: impl Future<Output = Result<T>>) -> Result<T> {
        // Listens before checking the flag, or a notification in between would be missed.
        let mut abandonment = pin!(self.abandoned.listen());
        if self.is_abandoned() {
            return Err(Error::TIMED_OUT);
        }
        let mut work = pin!(work);
        // The work is polled first: a result that is ready wins over `abandon`.
        poll_fn(|context| match work.as_mut().poll(context) {
            Poll::Ready(result) => Poll::Ready(result),
            Poll::Pending => abandonment.as_mut().poll(context).map(|()| Err(Error::TIMED_OUT)),
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::*;
    use reactor::{PollingMode, run, spawn_joinable, yield_now};

    #[test]
    fn ping_succeeds_while_all_call_slots_are_busy() {
        run(PollingMode::Off, async {
            let file = tempfile::tempfile().expect("there is room");
            let isolation = std::rc::Rc::new(FileIsolation::for_file(&file, false));
            let fd = Fd::from(file);
            let (mut ends, mut tasks) = (Vec::new(), Vec::new());
            for _ in 0..CALLS {
                let (end_sender, end_receiver) = mpsc::channel::<()>();
                let (isolation, fd) = (std::rc::Rc::clone(&isolation), fd.clone());
                ends.push(end_sender);
                tasks.push(spawn_joinable(async move {
                    isolation
                        .call(&fd, move |_| {
                            let _ = end_receiver.recv();
                            Ok(())
                        })
                        .await
                }));
            }
            while isolation.call_slots.free() > 0 {
                yield_now().await;
            }
            assert_eq!(isolation.ping(&fd, |_| Ok(7)).await, Ok(7));
            drop(ends);
            for task in tasks {
                assert_eq!(task.await, Ok(()));
            }
        })
        .expect("io_uring works on a test machine");
    }
}
