//! The seam between a queue and the kernel: its real half is the driver's, the other one is in
//! memory, for simulation.

use std::{future::Future, io};

use reactor::ublk::{self, Data, Descriptor};

/// Where a queue's requests come from.
#[derive(Debug)]
pub(super) enum Channel {
    Driver(ublk::Queue),
    #[cfg(test)]
    Simulated(super::simulation::kernel::Channel),
}

/// What a tag does: see [`ublk::Queue::fetch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Fetch,
    /// With the result of the request before.
    Commit(i32),
}

impl Channel {
    /// What the request of a tag asks.
    pub(super) fn descriptor(&self, tag: u16) -> Descriptor {
        match self {
            Self::Driver(queue) => queue.descriptor(tag),
            #[cfg(test)]
            Self::Simulated(queue) => queue.descriptor(tag),
        }
    }

    /// Whether data is where it was: see [`ublk::Queue::is_zero_copy`].
    pub(super) fn is_zero_copy(&self) -> bool {
        match self {
            Self::Driver(queue) => queue.is_zero_copy(),
            #[cfg(test)]
            Self::Simulated(queue) => queue.is_zero_copy(),
        }
    }

    /// Where its data is.
    pub(super) fn data(&self, tag: u16, bytes: usize) -> Data {
        match self {
            Self::Driver(queue) => queue.data(tag, bytes),
            #[cfg(test)]
            Self::Simulated(queue) => queue.data(tag, bytes),
        }
    }

    /// Takes the step at once; the future waits for the tag's next request.
    ///
    /// # Errors
    /// There will be none.
    pub(super) fn step(&self, tag: u16, step: Step) -> impl Future<Output = io::Result<()>> + use<> {
        enum Next<F, C> {
            Fetch(F),
            Commit(C),
            #[cfg(test)]
            Simulated(super::simulation::kernel::Next),
        }
        let next = match (self, step) {
            (Self::Driver(queue), Step::Fetch) => Next::Fetch(queue.fetch(tag)),
            (Self::Driver(queue), Step::Commit(result)) => Next::Commit(queue.commit_and_fetch(tag, result)),
            #[cfg(test)]
            (Self::Simulated(queue), step) => Next::Simulated(queue.step(tag, step)),
        };
        async {
            match next {
                Next::Fetch(next) => next.await,
                Next::Commit(next) => next.await,
                #[cfg(test)]
                Next::Simulated(next) => next.await,
            }
        }
    }

    /// Ends once the kernel has begun what was asked of it before.
    pub(super) async fn begun(&self) -> io::Result<()> {
        match self {
            Self::Driver(queue) => queue.begun().await,
            #[cfg(test)]
            Self::Simulated(_) => Ok(()),
        }
    }
}
