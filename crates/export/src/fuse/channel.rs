//! Source of messages and destination of replies: `/dev/fuse`, or in tests a kernel in memory.
//!
//! One `read(2)` returns one message, one `write(2)` sends one reply. Neither blocks: the
//! descriptor is non-blocking for reads, and a reply is copied to memory of the requesting process.
//! So they are plain system calls; only the wait for readability uses the reactor.

use std::io::{IoSlice, IoSliceMut};

use reactor::operation::{self, Fd};
use rustix::io::Errno;

#[cfg(test)]
use super::simulation::kernel::SimulatedFuseDescriptor;

#[derive(Debug)]
pub(super) enum FuseChannel {
    /// With `O_NONBLOCK`.
    Device(Fd),
    #[cfg(test)]
    Simulated(SimulatedFuseDescriptor),
}

/// Reason why no message was received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NoMessage {
    /// None at the moment.
    Yet,
    /// The file system is gone: it was unmounted, or its connection was aborted.
    Ever,
    /// The device failed.
    Failed(Errno),
}

impl FuseChannel {
    /// Receives the next message; returns its length.
    pub(super) fn receive(&self, buffers: &mut [IoSliceMut<'_>]) -> Result<usize, NoMessage> {
        loop {
            let received = match self {
                Self::Device(device) => rustix::io::readv(device, buffers),
                #[cfg(test)]
                Self::Simulated(kernel) => kernel.receive(buffers),
            };
            return match received {
                Ok(length) => Ok(length),
                Err(Errno::AGAIN) => Err(NoMessage::Yet),
                // ENOENT: the request was interrupted while it was being read.
                Err(Errno::NOENT | Errno::INTR) => continue,
                Err(Errno::NODEV | Errno::CONNABORTED) => Err(NoMessage::Ever),
                Err(errno) => Err(NoMessage::Failed(errno)),
            };
        }
    }

    /// Replies to a request.
    ///
    /// # Errors
    /// `ENOENT` if the request was interrupted and is not waited for any more.
    pub(super) fn reply(&self, parts: &[IoSlice<'_>]) -> Result<(), Errno> {
        match self {
            Self::Device(device) => rustix::io::writev(device, parts).map(drop),
            #[cfg(test)]
            Self::Simulated(kernel) => kernel.reply(parts),
        }
    }

    /// Waits until there may be a message, or the file system is gone.
    pub(super) async fn readable(&self) {
        match self {
            // An error shows in the read that follows.
            Self::Device(device) => drop(operation::readable_by_one(device).await),
            #[cfg(test)]
            Self::Simulated(kernel) => kernel.readable().await,
        }
    }
}
