//! A client: submits requests to one queue of a server, for measuring it as a guest sees it.
//!
//! ```text
//!   read, write, flush ──► ring          one kick for all requests of a reactor turn
//!          ▲                 ║
//!          └──── woken ◄── pump ◄── call from the server
//! ```
//!
//! While requests are in flight, the ring is polled for [`POLL_TIME`] before the client requests
//! calls. A virtqueue does not report the death of the server, so after [`QUIET`] without a
//! completion the client requests the configuration. If that succeeds, the server is slow; if the
//! connection is closed, the requests in flight fail.
//!
//! Never reconnects, and does not limit the duration of a request.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    io,
    rc::Rc,
    task::{Poll, Waker},
};

use policy::time::Duration;
use reactor::{
    JoinHandle, Signal,
    error::{Error, Result},
    guest::driver::{DriverDevice, DriverQueue, RequestSlots},
    now, operation, run_blocking, spawn_joinable, timeout, yield_now,
};

/// Error of requests after the server has disconnected; [`VhostUserClient::fault`] has the reason.
pub const GONE: Error = Error::from_errno(libc::ENOTCONN);

/// Half of the cost of waking a thread on a virtual machine: docs/decisions/0002.
const POLL_TIME: Duration = Duration::from_micros(20);
const QUIET: Duration = Duration::from_secs(1);

/// Failure to connect or to start the queues.
#[allow(missing_docs, reason = "the messages are self-explanatory")]
#[derive(Debug, thiserror::Error)]
pub enum VhostUserConnectError {
    #[error("cannot connect: {0}")]
    Refused(io::Error),
    #[error("has closed the connection (it serves one client at a time: is another connected?)")]
    Closed,
    #[error("violates the vhost-user protocol: {0} (is it the socket of a vhost-user-blk server?)")]
    Breach(io::Error),
    #[error("did not answer within {0} seconds (it serves one client at a time)")]
    TooLate(u64),
    #[error("is read-only (leave out -w to read)")]
    ReadOnly,
    #[error("did not start its queues: {0}")]
    NotStarted(io::Error),
}

/// Connects to a server.
///
/// # Errors
/// Fails without a server, if it does not serve vhost-user-blk or does not reply within `limit`, or
/// if another client is connected.
pub async fn connect(
    path: &str,
    read_only: bool,
    limit: Duration,
) -> std::result::Result<DriverDevice, VhostUserConnectError> {
    let path = path.to_owned();
    match timeout(limit, run_blocking(move || DriverDevice::connect(&path, read_only))).await {
        Ok(device) => device.map_err(|error| match error.kind() {
            io::ErrorKind::UnexpectedEof => VhostUserConnectError::Closed,
            io::ErrorKind::InvalidData => VhostUserConnectError::Breach(error),
            _ => VhostUserConnectError::Refused(error),
        }),
        Err(_) => Err(VhostUserConnectError::TooLate(limit.as_secs())),
    }
}

/// Starts the queues, each with its own slots.
///
/// # Errors
/// Fails if the server rejects the request or does not reply within `limit`.
pub async fn start(
    device: DriverDevice,
    queues: usize,
    slots: RequestSlots,
    limit: Duration,
) -> std::result::Result<Vec<DriverQueue>, VhostUserConnectError> {
    match timeout(limit, run_blocking(move || device.start(queues, slots))).await {
        Ok(Err(error)) if error.kind() == io::ErrorKind::ReadOnlyFilesystem => {
            Err(VhostUserConnectError::ReadOnly)
        }
        Ok(queues) => queues.map_err(VhostUserConnectError::NotStarted),
        Err(_) => Err(VhostUserConnectError::TooLate(limit.as_secs())),
    }
}

/// Client of one queue, on the reactor where it was created. Dropping it ends the queue.
#[derive(Debug)]
pub struct VhostUserClient {
    requests: Rc<ClientRequests>,
    /// Held because dropping the handle cancels the task.
    _pump: JoinHandle<()>,
    _bell: JoinHandle<()>,
}

#[derive(Debug)]
struct ClientRequests {
    queue: RefCell<DriverQueue>,
    slots: RefCell<Vec<ClientSlot>>,
    free: RefCell<Vec<usize>>,
    /// Number of slots submitted to the server.
    in_flight: Cell<usize>,
    /// Raised for a submission or a call while the pump sleeps.
    wakeup: Signal,
    is_pump_asleep: Cell<bool>,
    fault: RefCell<Option<io::Error>>,
}

#[derive(Debug)]
enum ClientSlot {
    Free,
    Awaited(Option<Waker>),
    /// The caller was dropped; the completion still arrives.
    Abandoned,
    Answered(i32),
}

impl VhostUserClient {
    /// Starts the tasks of the queue.
    ///
    /// # Errors
    /// Fails if no file descriptor is available.
    pub fn start(queue: DriverQueue) -> io::Result<Self> {
        let call_fd = operation::Fd::from(queue.notification_fd()?);
        let count = queue.slots().count;
        let requests = Rc::new(ClientRequests {
            queue: RefCell::new(queue),
            slots: RefCell::new((0..count).map(|_| ClientSlot::Free).collect()),
            free: RefCell::new((0..count).rev().collect()),
            in_flight: Cell::new(0),
            wakeup: Signal::default(),
            is_pump_asleep: Cell::new(true),
            fault: RefCell::default(),
        });
        let pump = spawn_joinable(Rc::clone(&requests).pump());
        let call_task = spawn_joinable(Rc::clone(&requests).forward_calls(call_fd));
        Ok(Self { requests, _pump: pump, _bell: call_task })
    }

    /// Reason of the disconnect; `None` while the server is connected.
    pub fn fault(&self) -> Option<String> {
        let fault = self.requests.fault.borrow();
        fault.as_ref().map(|fault| format!("the server has disconnected: {fault}"))
    }

    /// Reads one slot's length.
    ///
    /// # Errors
    /// The server's error, or [`GONE`].
    ///
    /// # Panics
    /// With more requests in flight than the queue has slots.
    pub async fn read(&self, offset: u64) -> Result<()> {
        self.requests.request(|queue, slot| queue.read(slot, offset)).await
    }

    /// Writes one slot's length; otherwise as [`VhostUserClient::read`].
    pub async fn write(&self, offset: u64) -> Result<()> {
        self.requests.request(|queue, slot| queue.write(slot, offset)).await
    }

    /// Flushes; otherwise as [`VhostUserClient::read`].
    pub async fn flush(&self) -> Result<()> {
        self.requests.request(DriverQueue::flush).await
    }
}

impl ClientRequests {
    async fn request(&self, send: impl FnOnce(&mut DriverQueue, usize)) -> Result<()> {
        if self.fault.borrow().is_some() {
            return Err(GONE);
        }
        let slot = self.free.borrow_mut().pop().expect("as many slots as requests");
        self.slots.borrow_mut()[slot] = ClientSlot::Awaited(None);
        self.in_flight.set(self.in_flight.get() + 1);
        let taken = ClientSlotInUse { requests: self, slot };
        send(&mut self.queue.borrow_mut(), slot);
        self.wake_pump();
        poll_fn(|context| {
            let mut slots = self.slots.borrow_mut();
            if let ClientSlot::Answered(errno) = slots[taken.slot] {
                return Poll::Ready(if errno == 0 { Ok(()) } else { Err(Error::from_errno(errno)) });
            }
            slots[taken.slot] = ClientSlot::Awaited(Some(context.waker().clone()));
            Poll::Pending
        })
        .await
    }

    async fn pump(self: Rc<Self>) {
        let fault = loop {
            self.wakeup.wait().await;
            self.is_pump_asleep.set(false);
            if let Err(fault) = self.poll_until_idle().await {
                break fault;
            }
            self.is_pump_asleep.set(true);
        };
        *self.fault.borrow_mut() = Some(fault);
        // The server has disconnected: every request in flight fails, and later ones with `GONE`.
        let waiting = 0..self.slots.borrow().len();
        waiting.for_each(|slot| self.answer(slot, GONE.errno()));
    }

    /// Polls until no request is in flight.
    async fn poll_until_idle(&self) -> io::Result<()> {
        let mut idle_since = None;
        while self.in_flight.get() > 0 {
            if self.poll_completions()? > 0 {
                idle_since = None;
            } else {
                let at = now();
                if at - *idle_since.get_or_insert(at) >= POLL_TIME {
                    self.sleep().await?;
                    idle_since = None;
                    continue;
                }
            }
            // Woken callers submit their next requests in the same reactor turn.
            yield_now().await;
        }
        Ok(())
    }

    /// Sleeps until a call arrives or a request is submitted.
    async fn sleep(&self) -> io::Result<()> {
        // Calls are enabled before the last look at the ring: a completion in between raises a
        // call.
        self.queue.borrow_mut().enable_notifications(true);
        let answered = self.poll_completions()?;
        self.is_pump_asleep.set(true);
        let timed_out = answered == 0 && timeout(QUIET, self.wakeup.wait()).await.is_err();
        self.is_pump_asleep.set(false);
        self.queue.borrow_mut().enable_notifications(false);
        if timed_out && self.poll_completions()? == 0 {
            let probe = self.queue.borrow().liveness_probe();
            run_blocking(probe).await?;
        }
        Ok(())
    }

    async fn forward_calls(self: Rc<Self>, call_fd: operation::Fd) {
        while operation::readable(&call_fd).await.is_ok() {
            // May fail because a turn has already read the eventfd.
            let _ = nix::unistd::read(&call_fd, &mut [0; 8]);
            self.wake_pump();
        }
    }

    fn wake_pump(&self) {
        if self.is_pump_asleep.get() {
            self.wakeup.raise();
        }
    }

    /// Submits new requests and takes completions; returns the number of completions.
    fn poll_completions(&self) -> io::Result<usize> {
        self.queue.borrow_mut().poll_completions(|slot, errno| self.answer(slot, errno))
    }

    fn answer(&self, slot: usize, errno: i32) {
        let mut slots = self.slots.borrow_mut();
        let waker = match &mut slots[slot] {
            ClientSlot::Awaited(waker) => waker.take(),
            ClientSlot::Abandoned => {
                // The caller was dropped, so the slot becomes free only now: the device wrote to it
                // until here.
                slots[slot] = ClientSlot::Free;
                self.free.borrow_mut().push(slot);
                self.in_flight.set(self.in_flight.get() - 1);
                return;
            }
            ClientSlot::Free | ClientSlot::Answered(_) => return,
        };
        slots[slot] = ClientSlot::Answered(errno);
        self.in_flight.set(self.in_flight.get() - 1);
        drop(slots);
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

/// A slot in use; freed on drop, or abandoned while the server still has it.
struct ClientSlotInUse<'a> {
    requests: &'a ClientRequests,
    slot: usize,
}

impl Drop for ClientSlotInUse<'_> {
    fn drop(&mut self) {
        let slot = &mut self.requests.slots.borrow_mut()[self.slot];
        *slot = match slot {
            ClientSlot::Answered(_) => {
                self.requests.free.borrow_mut().push(self.slot);
                ClientSlot::Free
            }
            _ => ClientSlot::Abandoned,
        };
    }
}
