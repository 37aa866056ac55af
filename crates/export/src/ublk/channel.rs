//! The seam between a queue and the kernel's driver; in simulation, a driver in memory.

use std::{future::Future, io};

use reactor::ublk::{self, Data, Descriptor};

/// Source of a queue's requests.
#[derive(Debug)]
pub(super) enum Channel {
    Driver(ublk::Queue),
    #[cfg(test)]
    Simulated(super::simulation::kernel::Channel),
}

/// Step of a tag: see [`ublk::Queue::fetch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    Fetch,
    /// Commits the result of the previous request and fetches the next.
    Commit(i32),
}

impl Channel {
    /// Descriptor of a tag's request.
    pub(super) fn descriptor(&self, tag: u16) -> Descriptor {
        match self {
            Self::Driver(queue) => queue.descriptor(tag),
            #[cfg(test)]
            Self::Simulated(queue) => queue.descriptor(tag),
        }
    }

    /// True if data is not copied: see [`ublk::Queue::is_zero_copy`].
    pub(super) fn is_zero_copy(&self) -> bool {
        match self {
            Self::Driver(queue) => queue.is_zero_copy(),
            #[cfg(test)]
            Self::Simulated(queue) => queue.is_zero_copy(),
        }
    }

    /// Location of the request's data.
    pub(super) fn data(&self, tag: u16, bytes: usize) -> Data {
        match self {
            Self::Driver(queue) => queue.data(tag, bytes),
            #[cfg(test)]
            Self::Simulated(queue) => queue.data(tag, bytes),
        }
    }

    /// Submits the step at once; the future waits for the tag's next request.
    ///
    /// # Errors
    /// The device has ended: there will be no further request.
    pub(super) fn step(&self, tag: u16, step: Step) -> impl Future<Output = io::Result<()>> + use<> {
        enum Next<F, C> {
            Fetch(F),
            Commit(C),
            #[cfg(test)]
            Simulated(super::simulation::kernel::Next),
        }
        // Submitted here, not at the first poll, so that the kernel gets all steps of a turn
        // together.
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

    /// Waits until the kernel has accepted all earlier submissions.
    pub(super) async fn begun(&self) -> io::Result<()> {
        match self {
            Self::Driver(queue) => queue.begun().await,
            #[cfg(test)]
            Self::Simulated(_) => Ok(()),
        }
    }
}
