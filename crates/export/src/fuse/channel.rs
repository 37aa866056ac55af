//! Where messages come from and replies go to: `/dev/fuse`, or in tests a kernel in memory.
//!
//! One `read(2)` brings one message, one `write(2)` takes one reply. Neither ever waits: a message
//! is read only where there is one, and a reply goes to memory of whoever asked. So they are plain
//! system calls, and only the waiting goes by the reactor.

use std::io::{IoSlice, IoSliceMut};

use reactor::op::{self, Fd};
use rustix::io::Errno;

#[cfg(test)]
use super::simulation::kernel::Kernel;

#[derive(Debug)]
pub(super) enum Channel {
    /// With `O_NONBLOCK`.
    Device(Fd),
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
            Self::Device(device) => rustix::io::writev(device, parts).map(drop),
            #[cfg(test)]
            Self::Simulated(kernel) => kernel.reply(parts),
        }
    }

    /// Waits until there may be a message, or none any more.
    pub(super) async fn readable(&self) {
        match self {
            // What went wrong shows in the read that follows.
            Self::Device(device) => drop(op::readable_by_one(device).await),
            #[cfg(test)]
            Self::Simulated(kernel) => kernel.readable().await,
        }
    }
}
