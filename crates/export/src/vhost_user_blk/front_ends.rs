//! Connections of front ends: accepted from a listening socket, or made to a socket of the front
//! end, which is retried.
//!
//! A disk has one front end at a time. A second one is soon rejected, so that a virtual machine
//! that was started twice fails instead of waiting forever. It is not rejected while the current
//! front end is about to disconnect: it then waits until the current rings have ended. A front
//! end that has sent nothing is disconnected as soon as another sends a message, or after
//! `SILENCE_TIMEOUT` if another waits. Without competition it may stay silent, as machines do to
//! which the disk is hot-plugged later.
//!
//! ```text
//!   connects ──► no front end ─────────────────────► served
//!            ──► one is served ────────────────────► rejected, may try again
//!            ──► one is connected and silent ──────► sends: replaces the silent one
//!                                                    silent too: the same, after SILENCE_TIMEOUT
//!            ──► the current one disconnects soon ─► waits, then served
//! ```
//!
//! Never binds a socket, replaces a stale one or takes one from the service manager: the daemon
//! does.

use std::{
    collections::VecDeque,
    future::{Future, pending, poll_fn},
    io,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    pin::pin,
    sync::Arc,
    task::Poll,
};

use policy::time::{Duration, Instant};
use reactor::{
    log_rate_limit::LogRateLimit,
    operation,
    operation::Fd,
    select::{FirstReady, first},
};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recv, shutdown,
        socket_with,
    },
};

use super::{
    device::VhostUserDevice,
    events::{FrontEndEvent, PeerProcess},
};

/// Pause between attempts to connect: doubled from `FIRST_PAUSE` up to `MAX_PAUSE`.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const MAX_PAUSE: Duration = Duration::from_secs(1);
/// Shortest duration of a successful connection.
const MIN_GOOD_DURATION: Duration = Duration::from_secs(1);
/// Time after which a second front end is rejected. A killed front end has disconnected by then:
/// its process ends after its successor has started.
const REJECT_DELAY: Duration = Duration::from_millis(250);
/// Time after which a silent front end is replaced if another waits; equal to the time for one
/// message.
pub(super) const SILENCE_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum number of waiting front ends. Beyond it the oldest is rejected: either it is silent, or
/// the current one is active.
const MAX_WAITING: usize = 16;
/// Pause between attempts to accept while file descriptors or memory are short.
const SHORTAGE_RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// The front ends of one export, in sequence.
#[derive(Debug)]
pub struct FrontEnds {
    /// Export's name in the log.
    id: Arc<str>,
    source: FrontEndSource,
    /// A front end that is already connected.
    first: Option<Fd>,
    /// Front ends that connected while another was served, the oldest first.
    waiting: VecDeque<WaitingFrontEnd>,
    refusals: LogRateLimit,
    silence: Duration,
    /// Receives the events of rejected front ends.
    device: Option<Arc<VhostUserDevice>>,
}

#[derive(Debug)]
struct WaitingFrontEnd {
    socket: Fd,
    since: Instant,
}

#[derive(Debug)]
enum FrontEndSource {
    Listen(Fd),
    /// `last_logged` is the reason that was logged last.
    Connect {
        path: PathBuf,
        pause: Duration,
        last_logged: String,
    },
}

impl FrontEnds {
    /// Front ends of the export `id` that connect to a listening Unix socket.
    pub fn listen(id: &str, listener: Fd) -> Self {
        Self::with_source(id, FrontEndSource::Listen(listener))
    }

    /// A front end that listens at `path`; connects to it whenever possible.
    pub fn call(id: &str, path: PathBuf) -> Self {
        Self::with_source(
            id,
            FrontEndSource::Connect { path, pause: Duration::ZERO, last_logged: String::new() },
        )
    }

    fn with_source(id: &str, source: FrontEndSource) -> Self {
        let (first, waiting, refusals) = Default::default();
        Self { id: id.into(), source, first, waiting, refusals, silence: SILENCE_TIMEOUT, device: None }
    }

    /// Sets a front end that is already connected.
    pub(super) fn set_first(&mut self, socket: Fd) {
        self.first = Some(socket);
    }

    /// Sets the device that receives events.
    pub(super) fn set_device(&mut self, device: &Arc<VhostUserDevice>) {
        self.device = Some(Arc::clone(device));
    }

    /// Serves front ends with `serve`, one at a time, until an error; dropping the future ends it.
    /// `is_silent` is true while the current front end has sent nothing.
    ///
    /// # Errors
    /// Fails if the listener fails, or the path is too long for a Unix socket.
    pub async fn serve<F: Future<Output = ()>>(
        &mut self,
        is_silent: impl Fn() -> bool,
        mut serve: impl FnMut(Fd) -> F,
    ) -> io::Result<()> {
        loop {
            let socket = match self.first.take() {
                Some(socket) => socket,
                None => self.next().await?,
            };
            let began = reactor::now();
            {
                let mut served = pin!(serve(socket.clone()));
                let mut competitors = pin!(self.reject_competitors(&socket, &is_silent));
                let session_end = poll_fn(|context| match served.as_mut().poll(context) {
                    Poll::Ready(()) => Poll::Ready(Ok(())),
                    // Both are polled, because a competing front end must be handled while one is
                    // served.
                    Poll::Pending => competitors.as_mut().poll(context),
                });
                session_end.await?;
            }
            self.record_duration(began);
        }
    }

    /// Waits for a front end.
    async fn next(&mut self) -> io::Result<Fd> {
        self.waiting.retain(|waiting| !has_hung_up(&waiting.socket));
        // One that has sent a message is preferred over silent ones, which may be no front ends at
        // all.
        let active = self.waiting.iter().position(|waiting| has_sent(&waiting.socket));
        if let Some(waiting) = self.waiting.remove(active.unwrap_or(0)) {
            return Ok(waiting.socket);
        }
        match &mut self.source {
            FrontEndSource::Listen(listener) => Ok(accept(&self.id, listener, &self.refusals).await?.into()),
            FrontEndSource::Connect { path, pause, last_logged } => {
                let address = SocketAddrUnix::new(&*path)?;
                loop {
                    reactor::sleep_until(reactor::now() + *pause).await;
                    *pause = (*pause * 2).clamp(FIRST_PAUSE, MAX_PAUSE);
                    match call(&address) {
                        Ok(socket) => return Ok(socket.into()),
                        // Any error is retried: the front end may start later.
                        Err(error) => {
                            log_once(&self.id, path, last_logged, io::Error::from(error).to_string());
                        }
                    }
                }
            }
        }
    }

    fn record_duration(&mut self, began: Instant) {
        let FrontEndSource::Connect { path, pause, last_logged } = &mut self.source else { return };
        if reactor::now() - began >= MIN_GOOD_DURATION {
            *pause = FIRST_PAUSE;
            last_logged.clear();
        } else {
            log_once(&self.id, path, last_logged, "it hung up at once".to_owned());
        }
    }

    /// Rejects competing front ends; returns only on an error: see [`FrontEnds::serve`].
    async fn reject_competitors(&mut self, current: &Fd, is_silent: impl Fn() -> bool) -> io::Result<()> {
        let FrontEndSource::Listen(listener) = &self.source else { return pending().await };
        let listener = listener.clone();
        let began = reactor::now();
        let mut disconnect = pin!(operation::peer_shut_down(current));
        loop {
            let is_silent = is_silent();
            let timeout = match is_silent {
                true if !has_sent(current) && self.must_make_room(began) => {
                    tracing::warn!(
                        export = %self.id,
                        "a front end that has sent nothing is disconnected, because another one is waiting"
                    );
                    // Fails only if the front end has disconnected meanwhile.
                    let _ = shutdown(current, Shutdown::Both);
                    return pending().await;
                }
                // Checked in short intervals, because the silent front end may send a message.
                true if !self.waiting.is_empty() => REJECT_DELAY.min(began + self.silence - reactor::now()),
                true => Duration::MAX,
                false => self.reject_after(REJECT_DELAY, current),
            };
            let any_message = async {
                match is_silent {
                    true => any_readable(&self.waiting).await,
                    false => pending().await,
                }
            };
            let event = first(disconnect.as_mut(), first(operation::readable(&listener), any_message));
            match reactor::timeout(timeout, event).await {
                Ok(FirstReady::One(_)) => return pending().await,
                Ok(FirstReady::Other(FirstReady::One(readable))) => {
                    readable?;
                    let socket = accept(&self.id, &listener, &self.refusals).await?.into();
                    self.waiting.push_back(WaitingFrontEnd { socket, since: reactor::now() });
                    // Bounded, or a local process could exhaust descriptors by connecting.
                    if self.waiting.len() > MAX_WAITING {
                        self.reject_oldest(current);
                    }
                }
                Ok(FirstReady::Other(FirstReady::Other(()))) | Err(reactor::Timeout) => {}
            }
        }
    }

    /// True if the front end connected at `began`, which has sent nothing, has to make room for a
    /// waiting one.
    fn must_make_room(&mut self, began: Instant) -> bool {
        self.waiting.retain(|waiting| !has_hung_up(&waiting.socket));
        let is_long = reactor::now() - began >= self.silence;
        is_long && !self.waiting.is_empty() || self.waiting.iter().any(|waiting| has_sent(&waiting.socket))
    }

    /// Rejects front ends that have waited for `delay`; returns the time until the next one has.
    fn reject_after(&mut self, delay: Duration, current: &Fd) -> Duration {
        let now = reactor::now();
        while let Some(oldest) = self.waiting.front() {
            let until = oldest.since + delay;
            if now < until {
                return until - now;
            }
            self.reject_oldest(current);
        }
        Duration::MAX
    }

    fn reject_oldest(&mut self, current: &Fd) {
        let Some(oldest) = self.waiting.pop_front() else { return };
        if let (Some(suppressed), Some(device)) = (self.refusals.try_log(reactor::coarse_now()), &self.device)
        {
            let (process, connected) = (PeerProcess::of_peer(&oldest.socket), PeerProcess::of_peer(current));
            let (process, connected) = (process.as_ref(), connected.as_ref());
            device.report(&FrontEndEvent::Rejected { process, connected }, suppressed);
        }
    }
}

/// Waits until one of these has sent something or has disconnected.
async fn any_readable(waiting: &VecDeque<WaitingFrontEnd>) {
    let mut readable: Vec<_> =
        waiting.iter().map(|waiting| Box::pin(operation::readable(&waiting.socket))).collect();
    poll_fn(|context| {
        let any = readable.iter_mut().any(|readable| readable.as_mut().poll(context).is_ready());
        if any { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Number of readable bytes, 0 at the end of the stream; `None` if nothing has arrived.
fn peek(socket: &Fd) -> Option<Result<usize, Errno>> {
    match recv(socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Err(Errno::AGAIN | Errno::INTR) => None,
        result => Some(result.map(|(_, bytes)| bytes)),
    }
}

fn has_sent(socket: &Fd) -> bool {
    matches!(peek(socket), Some(Ok(1..)))
}

fn has_hung_up(socket: &Fd) -> bool {
    matches!(peek(socket), Some(Ok(0) | Err(_)))
}

/// Logs why there is no front end at `path`, unless the same reason was logged last.
fn log_once(id: &str, path: &Path, last_logged: &mut String, why: String) {
    if *last_logged != why {
        tracing::warn!(
            export = %id,
            path = %path.display(),
            %why,
            "cannot connect to a front end, retrying every second (does the virtual machine listen \
             there?)"
        );
        *last_logged = why;
    }
}

/// Connects to a listening front end.
fn call(address: &SocketAddrUnix) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, address)?;
    Ok(socket)
}

/// Accepts a front end; retries while file descriptors or memory are short.
async fn accept(id: &str, listener: &Fd, refusals: &LogRateLimit) -> io::Result<OwnedFd> {
    loop {
        let socket = match operation::has_client_descriptors() {
            true => operation::accept(listener).await,
            false => Err(io::Error::from_raw_os_error(libc::EMFILE)),
        };
        let Err(error) = socket else { return socket };
        match error.raw_os_error() {
            Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EFAULT | libc::EOPNOTSUPP) => {
                return Err(error);
            }
            // The front end closed before it was accepted.
            Some(libc::ECONNABORTED | libc::EINTR | libc::EPROTO | libc::EAGAIN) => {}
            _ => {
                if let Some(suppressed) = refusals.try_log(reactor::coarse_now()) {
                    tracing::warn!(
                        export = %id, %error, suppressed,
                        "cannot accept a front end, retrying every second"
                    );
                }
                reactor::sleep_until(reactor::now() + SHORTAGE_RETRY_INTERVAL).await;
            }
        }
    }
}

#[cfg(test)]
#[path = "front_ends_tests.rs"]
mod tests;
