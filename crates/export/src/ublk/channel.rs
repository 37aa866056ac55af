//! The seam between a queue and the kernel's driver; in simulation, a driver in memory.

use std::{future::Future, io};

use reactor::ublk::{self, UblkData, UblkDescriptor};

/// Source of a queue's requests.
#[derive(Debug)]
pub(super) enum UblkChannel {
    Driver(ublk::UblkQueue),
    #[cfg(test)]
    Simulated(super::simulation::kernel::SimulatedUblkChannel),
}

/// Step of a tag: see [`ublk::UblkQueue::fetch`] and [`ublk::UblkQueue::commit_and_fetch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TagStep {
    Fetch,
    /// Commits the result of the previous request and fetches the next.
    Commit(i32),
}

impl UblkChannel {
    /// Descriptor of a tag's request.
    pub(super) fn descriptor(&self, tag: u16) -> UblkDescriptor {
        match self {
            Self::Driver(queue) => queue.descriptor(tag),
            #[cfg(test)]
            Self::Simulated(queue) => queue.descriptor(tag),
        }
    }

    /// True if data is not copied: see [`ublk::UblkQueue::is_zero_copy`].
    pub(super) fn is_zero_copy(&self) -> bool {
        match self {
            Self::Driver(queue) => queue.is_zero_copy(),
            #[cfg(test)]
            Self::Simulated(queue) => queue.is_zero_copy(),
        }
    }

    /// Location of the request's data.
    pub(super) fn data(&self, tag: u16, bytes: usize) -> UblkData {
        match self {
            Self::Driver(queue) => queue.data(tag, bytes),
            #[cfg(test)]
            Self::Simulated(queue) => queue.data(tag, bytes),
        }
    }

    /// Submits the step at once; the future waits for the tag's next request.
    ///
    /// # Errors
    /// Fails if the device has ended: there will be no further request.
    pub(super) fn step(&self, tag: u16, step: TagStep) -> impl Future<Output = io::Result<()>> + use<> {
        enum NextRequest<F, C> {
            Fetch(F),
            Commit(C),
            #[cfg(test)]
            Simulated(super::simulation::kernel::Next),
        }
        // Submitted here, not at the first poll, so that the kernel gets all steps of a turn
        // together.
        let next = match (self, step) {
            (Self::Driver(queue), TagStep::Fetch) => NextRequest::Fetch(queue.fetch(tag)),
            (Self::Driver(queue), TagStep::Commit(result)) => {
                NextRequest::Commit(queue.commit_and_fetch(tag, result))
            }
            #[cfg(test)]
            (Self::Simulated(queue), step) => NextRequest::Simulated(queue.step(tag, step)),
        };
        async {
            match next {
                NextRequest::Fetch(next) => next.await,
                NextRequest::Commit(next) => next.await,
                #[cfg(test)]
                NextRequest::Simulated(next) => next.await,
            }
        }
    }

    /// Waits until the kernel has accepted all earlier submissions.
    pub(super) async fn begun(&self) -> io::Result<()> {
        match self {
            Self::Driver(queue) => queue.commands_started().await,
            #[cfg(test)]
            Self::Simulated(_) => Ok(()),
        }
    }
}
