//! Where messages come from and replies go to: `/dev/fuse`, with a ring beside it where there is
//! one, or in tests a kernel in memory.
//!
//! One `read(2)` brings one message, one `write(2)` takes one reply. Neither ever waits: a message
//! is read only where there is one, and a reply goes to memory of whoever asked. So they are plain
//! system calls, and only the waiting goes by the reactor.

use std::{
    io::{IoSlice, IoSliceMut},
    rc::Rc,
};

use reactor::op::{self, Fd};
use rustix::io::Errno;

use super::ring::Ring;
#[cfg(test)]
use super::simulation::kernel::Kernel;

pub(super) enum Channel {
    /// With `O_NONBLOCK`.
    Device(Fd),
    /// The same, where most comes by a ring.
    Ring(Fd, Rc<Ring>),
    #[cfg(test)]
    Simulated(Kernel),
}

/// Why there is no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoMessage {
    /// Not now.
    Yet,
    /// The file system has gone: it was unmounted, or its connection was cut.
    Ever,
    /// The device failed.
    Failed(Errno),
}

impl Channel {
    /// The next message; how long it is.
    pub(super) fn receive(&self, places: &mut [IoSliceMut<'_>]) -> Result<usize, NoMessage> {
        loop {
            let received = match self {
                Self::Device(device) => rustix::io::readv(device, places),
                Self::Ring(device, ring) => receive(device, ring, places),
                #[cfg(test)]
                Self::Simulated(kernel) => kernel.receive(places),
            };
            return match received {
                Ok(length) => Ok(length),
                Err(Errno::AGAIN) => Err(NoMessage::Yet),
                // A request that somebody took back while it was read.
                Err(Errno::NOENT | Errno::INTR) => continue,
                Err(Errno::NODEV | Errno::CONNABORTED) => Err(NoMessage::Ever),
                Err(errno) => Err(NoMessage::Failed(errno)),
            };
        }
    }

    /// Answers a request.
    ///
    /// # Errors
    /// `ENOENT` if nobody waits for it any more.
    pub(super) fn reply(&self, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
        match self {
            Self::Ring(_, ring) if ring.reply(parts) => Ok(()),
            Self::Device(device) | Self::Ring(device, _) => rustix::io::writev(device, parts).map(drop),
            #[cfg(test)]
            Self::Simulated(kernel) => kernel.reply(parts),
        }
    }

    /// Waits until there may be a message, or none any more.
    pub(super) async fn readable(&self) {
        match self {
            // What went wrong shows in the read that follows.
            Self::Device(device) => drop(op::readable_by_one(device).await),
            Self::Ring(_, ring) => ring.readable().await,
            #[cfg(test)]
            Self::Simulated(kernel) => kernel.readable().await,
        }
    }

    /// Nobody takes anything any more, and all that was taken has been answered.
    pub(super) async fn end(&self) {
        if let Self::Ring(_, ring) = self {
            ring.end().await;
        }
    }
}

/// What the device has goes before: it is little, and may be that somebody waits no longer.
fn receive(device: &Fd, ring: &Rc<Ring>, places: &mut [IoSliceMut<'_>]) -> Result<usize, Errno> {
    if ring.is_readable() {
        match rustix::io::readv(device, places) {
            Err(Errno::AGAIN) => ring.was_read(),
            received => return received,
        }
    }
    ring.receive(places).ok_or(Errno::AGAIN)
}
