//! Where front ends come from: a listening socket that they connect to, or a socket of theirs that
//! is connected to, again and again.
//!
//! A disk has one front end at a time. Whoever else connects is soon turned away, so that a machine
//! that was started twice says so instead of waiting for ever. A front end that has gone, or is
//! about to, turns nobody away: the next one waits until its rings have ended. Nor does one that
//! never said anything. It has to go as soon as somebody else does, or after a while if somebody
//! else is there; unless somebody wants its place, it may be silent, as machines are to which a
//! disk is plugged later.
//!
//! ```text
//!   connects ──► nobody here ──────────────────────► served
//!            ──► one is served, and stays ─────────► turned away, and may try again
//!            ──► one is here, and silent ──────────► speaks: that one has to go, then served
//!                                                    silent as well: the same, after a while
//!            ──► the last one hangs up by then ────► waits, then served
//! ```
//!
//! Binding a socket, replacing a stale one and taking one from the service manager are the
//! daemon's.

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
use reactor::{op, op::Fd, seldom::Seldom};
use rustix::{
    io::Errno,
    net::{
        AddressFamily, RecvFlags, Shutdown, SocketAddrUnix, SocketFlags, SocketType, connect, recv, shutdown,
        socket_with,
    },
};

use super::{
    device::Device,
    happening::{Happening, Process},
};
use crate::race::{First, first};

/// Between attempts to connect: doubled from the first to the last.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LONGEST_PAUSE: Duration = Duration::from_secs(1);
/// A connection that lasted for so long was a good one.
const GOOD: Duration = Duration::from_secs(1);
/// By then a front end that was killed has hung up: its process ends after its successor has begun.
const GRACE: Duration = Duration::from_millis(250);
/// So long may a front end that has said nothing keep others out, as long as one may take for a
/// message.
pub(super) const SILENCE: Duration = Duration::from_secs(10);
/// Front ends that wait for the place of another. Of more, the oldest goes: they are silent, or the
/// other is not.
const MOST_WAITING: usize = 16;
/// Between attempts to accept while descriptors or memory are short.
const SHORTAGE: Duration = Duration::from_secs(1);

/// The front ends of one export, one after the other.
#[derive(Debug)]
pub struct FrontEnds {
    /// Of the export, in the log.
    id: Arc<str>,
    way: Way,
    /// One that is connected already.
    first: Option<Fd>,
    /// Those that came after the one that is served, the oldest first.
    waiting: VecDeque<Waiting>,
    refusals: Seldom,
    silence: Duration,
    /// Hears of those that are turned away.
    device: Option<Arc<Device>>,
}

#[derive(Debug)]
struct Waiting {
    socket: Fd,
    since: Instant,
}

#[derive(Debug)]
enum Way {
    Listen(Fd),
    /// With what the log says last of why there is nobody.
    Call {
        path: PathBuf,
        pause: Duration,
        told: String,
    },
}

impl FrontEnds {
    /// Those of the export `id` that connect to a listening Unix socket.
    pub fn listen(id: &str, listener: Fd) -> Self {
        Self::by(id, Way::Listen(listener))
    }

    /// The one that listens at `path`, whenever it does.
    pub fn call(id: &str, path: PathBuf) -> Self {
        Self::by(id, Way::Call { path, pause: Duration::ZERO, told: String::new() })
    }

    fn by(id: &str, way: Way) -> Self {
        let (first, waiting, refusals) = Default::default();
        Self { id: id.into(), way, first, waiting, refusals, silence: SILENCE, device: None }
    }

    /// This one is here already.
    pub(super) fn begin_with(&mut self, socket: Fd) {
        self.first = Some(socket);
    }

    /// They are of this device.
    pub(super) fn belong_to(&mut self, device: &Arc<Device>) {
        self.device = Some(Arc::clone(device));
    }

    /// Serves front ends by `serve`, one at a time, for ever; dropping the future ends it.
    /// `is_silent` tells whether the one that is served has yet to say anything.
    ///
    /// # Errors
    /// The socket cannot be listened on, or has a path that none can have.
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
                let mut others = pin!(self.turn_away_others(&socket, &is_silent));
                let over = poll_fn(|context| match served.as_mut().poll(context) {
                    Poll::Ready(()) => Poll::Ready(Ok(())),
                    Poll::Pending => others.as_mut().poll(context),
                });
                over.await?;
            }
            self.lasted(began);
        }
    }

    /// Waits for a front end.
    async fn next(&mut self) -> io::Result<Fd> {
        self.waiting.retain(|waiting| !has_hung_up(&waiting.socket));
        let speaks = self.waiting.iter().position(|waiting| has_spoken(&waiting.socket));
        if let Some(waiting) = self.waiting.remove(speaks.unwrap_or(0)) {
            return Ok(waiting.socket);
        }
        match &mut self.way {
            Way::Listen(listener) => Ok(accept(&self.id, listener, &self.refusals).await?.into()),
            Way::Call { path, pause, told } => {
                let address = SocketAddrUnix::new(&*path)?;
                loop {
                    reactor::sleep_until(reactor::now() + *pause).await;
                    *pause = (*pause * 2).clamp(FIRST_PAUSE, LONGEST_PAUSE);
                    match call(&address) {
                        Ok(socket) => return Ok(socket.into()),
                        // Whatever is there, or is missing: the right one may come.
                        Err(error) => tell(&self.id, path, told, io::Error::from(error).to_string()),
                    }
                }
            }
        }
    }

    fn lasted(&mut self, began: Instant) {
        let Way::Call { path, pause, told } = &mut self.way else { return };
        if reactor::now() - began >= GOOD {
            *pause = FIRST_PAUSE;
            told.clear();
        } else {
            tell(&self.id, path, told, "it hung up at once".to_owned());
        }
    }

    /// Never ends but with an error: see [`FrontEnds::serve`].
    async fn turn_away_others(&mut self, current: &Fd, is_silent: impl Fn() -> bool) -> io::Result<()> {
        let Way::Listen(listener) = &self.way else { return pending().await };
        let listener = listener.clone();
        let began = reactor::now();
        let mut gone = pin!(op::hung_up(current));
        loop {
            let is_silent = is_silent();
            let patience = match is_silent {
                true if !has_spoken(current) && self.is_to_go(began) => {
                    tracing::warn!(
                        export = %self.id,
                        "a front end that has said nothing is disconnected: another wants its place"
                    );
                    // Of one that has hung up meanwhile, that is all there is to do.
                    let _ = shutdown(current, Shutdown::Both);
                    return pending().await;
                }
                // It may speak.
                true if !self.waiting.is_empty() => GRACE.min(began + self.silence - reactor::now()),
                true => Duration::MAX,
                false => self.turn_away_after(GRACE, current),
            };
            let speaks = async {
                match is_silent {
                    true => any_readable(&self.waiting).await,
                    false => pending().await,
                }
            };
            let news = first(gone.as_mut(), first(op::readable(&listener), speaks));
            match reactor::timeout(patience, news).await {
                Ok(First::One(_)) => return pending().await,
                Ok(First::Other(First::One(came))) => {
                    came?;
                    let socket = accept(&self.id, &listener, &self.refusals).await?.into();
                    self.waiting.push_back(Waiting { socket, since: reactor::now() });
                    if self.waiting.len() > MOST_WAITING {
                        self.turn_away_oldest(current);
                    }
                }
                Ok(First::Other(First::Other(()))) | Err(reactor::Timeout) => {}
            }
        }
    }

    /// Whether one that has said nothing since it `began` has to go for one that waits.
    fn is_to_go(&mut self, began: Instant) -> bool {
        self.waiting.retain(|waiting| !has_hung_up(&waiting.socket));
        let is_long = reactor::now() - began >= self.silence;
        is_long && !self.waiting.is_empty() || self.waiting.iter().any(|waiting| has_spoken(&waiting.socket))
    }

    /// Turns away who has waited for so long; when the next one will have.
    fn turn_away_after(&mut self, patience: Duration, current: &Fd) -> Duration {
        let now = reactor::now();
        while let Some(oldest) = self.waiting.front() {
            let until = oldest.since + patience;
            if now < until {
                return until - now;
            }
            self.turn_away_oldest(current);
        }
        Duration::MAX
    }

    fn turn_away_oldest(&mut self, current: &Fd) {
        let Some(oldest) = self.waiting.pop_front() else { return };
        if let (Some(left_out), Some(device)) = (self.refusals.line(reactor::recently()), &self.device) {
            let (process, connected) = (Process::of(&oldest.socket), Process::of(current));
            let (process, connected) = (process.as_ref(), connected.as_ref());
            device.tell(&Happening::TurnedAway { process, connected }, left_out);
        }
    }
}

/// Waits until one of these has said something, or has hung up.
async fn any_readable(waiting: &VecDeque<Waiting>) {
    let mut readable: Vec<_> =
        waiting.iter().map(|waiting| Box::pin(op::readable(&waiting.socket))).collect();
    poll_fn(|context| {
        let any = readable.iter_mut().any(|readable| readable.as_mut().poll(context).is_ready());
        if any { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// What is there to be read: `None` if nothing has come yet.
fn look(socket: &Fd) -> Option<Result<usize, Errno>> {
    match recv(socket, &mut [0; 1], RecvFlags::PEEK | RecvFlags::DONTWAIT) {
        Err(Errno::AGAIN | Errno::INTR) => None,
        came => Some(came.map(|(_, bytes)| bytes)),
    }
}

fn has_spoken(socket: &Fd) -> bool {
    matches!(look(socket), Some(Ok(1..)))
}

fn has_hung_up(socket: &Fd) -> bool {
    matches!(look(socket), Some(Ok(0) | Err(_)))
}

/// Says why there is no front end at `path`, unless that was `told` last.
fn tell(id: &str, path: &Path, told: &mut String, why: String) {
    if *told != why {
        tracing::warn!(
            export = %id,
            path = %path.display(),
            %why,
            "no front end can be connected to, trying again every second (does the machine listen there?)"
        );
        *told = why;
    }
}

/// Connects to a front end that listens.
fn call(address: &SocketAddrUnix) -> Result<OwnedFd, Errno> {
    let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    connect(&socket, address)?;
    Ok(socket)
}

/// Accepts a front end, and tries again while there are no descriptors or no memory for it.
async fn accept(id: &str, listener: &Fd, refusals: &Seldom) -> io::Result<OwnedFd> {
    loop {
        let socket = match op::descriptors_left() {
            true => op::accept(listener).await,
            false => Err(io::Error::from_raw_os_error(libc::EMFILE)),
        };
        let Err(error) = socket else { return socket };
        match error.raw_os_error() {
            Some(libc::EBADF | libc::EINVAL | libc::ENOTSOCK | libc::EFAULT | libc::EOPNOTSUPP) => {
                return Err(error);
            }
            // It gave up before it was accepted.
            Some(libc::ECONNABORTED | libc::EINTR | libc::EPROTO | libc::EAGAIN) => {}
            _ => {
                if let Some(left_out) = refusals.line(reactor::recently()) {
                    tracing::warn!(export = %id, %error, left_out, "cannot accept a front end, trying again every second");
                }
                reactor::sleep_until(reactor::now() + SHORTAGE).await;
            }
        }
    }
}

#[cfg(test)]
#[path = "front_ends_tests.rs"]
mod tests;
