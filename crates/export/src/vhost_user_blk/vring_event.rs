//! Notification between a driver and its device: an eventfd of the front end (kick, call, error).
//! In tests also a simulated counter, because a simulation has no file descriptors to wait for.

use std::{
    fs,
    io::{self, IoSliceMut},
    os::fd::{AsFd, AsRawFd as _},
};

use reactor::{
    EventfdNotifier,
    operation::{self, Fd},
};
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::ReadWriteFlags,
};

/// The kernel's name of an eventfd (`proc_pid_fd(5)`).
const EVENT: &str = "anon_inode:[eventfd]";

/// One event.
#[derive(Clone, Debug)]
pub(super) enum VringEvent {
    Event(Fd),
    #[cfg(test)]
    Simulated(simulated::SimulatedEvent),
}

/// The descriptor is no eventfd, or does not behave as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its descriptor is no eventfd")]
pub(super) struct NotAnEventfd;

impl VringEvent {
    /// Wraps an eventfd and sets `O_NONBLOCK`, so that neither direction ever blocks.
    ///
    /// # Errors
    /// [`NotAnEventfd`] for any other file: one that is always readable would signal forever, and a
    /// write could block.
    pub(super) fn new(event: Fd) -> Result<Self, NotAnEventfd> {
        if !is_eventfd(&event) {
            return Err(NotAnEventfd);
        }
        set_nonblocking(&event).map_err(|_| NotAnEventfd)?;
        Ok(Self::Event(event))
    }

    /// Signals the eventfd. A full counter has not been read yet, which is equivalent.
    ///
    /// Blocks only if no descriptor or memory is left for a non-blocking submission, and the front
    /// end fills the counter and clears `O_NONBLOCK` at the same moment.
    pub(super) fn signal(&self, notifier: &EventfdNotifier) {
        match self {
            Self::Event(event) => {
                // The notifier does not depend on O_NONBLOCK, whose flag the front end shares. The
                // write below does, so the flag is set again first.
                if notifier.notify(event).is_err() && set_nonblocking(event).is_ok() {
                    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
                }
            }
            #[cfg(test)]
            Self::Simulated(counter) => counter.signal(),
        }
    }

    /// Waits for a signal since the last call.
    pub(super) async fn wait(&self) -> Result<(), NotAnEventfd> {
        let event = match self {
            Self::Event(event) => event,
            #[cfg(test)]
            Self::Simulated(counter) => return counter.wait().await,
        };
        loop {
            operation::readable(event).await.map_err(|_: io::Error| NotAnEventfd)?;
            let mut count = [0; 8];
            match read_nowait(event, &mut count) {
                // Signalled at least once since the last read; one read covers all of them.
                Ok(8) if count != [0; 8] => return Ok(()),
                // Another reader has consumed the count, or the call was interrupted.
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                _ => return Err(NotAnEventfd),
            }
        }
    }
}

/// True for an eventfd. Reads the link in /proc, because `fstat` on an arbitrary descriptor may
/// wait for the server of its file system.
pub(super) fn is_eventfd(event: &impl AsFd) -> bool {
    let name = fs::read_link(format!("/proc/self/fd/{}", event.as_fd().as_raw_fd()));
    name.is_ok_and(|name| name.as_os_str() == EVENT)
}

/// Sets `O_NONBLOCK`; the front end shares the flag and may clear it again.
fn set_nonblocking(event: &Fd) -> rustix::io::Result<()> {
    fcntl_setfl(event, fcntl_getfl(event)? | OFlags::NONBLOCK)
}

/// Reads the count of an eventfd without blocking, even if the front end has cleared `O_NONBLOCK`.
fn read_nowait(event: &Fd, count: &mut [u8; 8]) -> rustix::io::Result<usize> {
    let into = &mut [IoSliceMut::new(count)];
    match rustix::io::preadv2(event, into, u64::MAX, ReadWriteFlags::NOWAIT) {
        // Kernels before 5.9 lack RWF_NOWAIT for eventfds.
        Err(rustix::io::Errno::OPNOTSUPP) => rustix::io::read(event, count),
        taken => taken,
    }
}

#[cfg(test)]
mod tests {
    use rustix::{
        event::{EventfdFlags, eventfd},
        fs::{OFlags, fcntl_getfl, fcntl_setfl},
        io::Errno,
    };

    use super::*;

    #[test]
    fn signalling_a_full_blocking_eventfd_does_not_wait() {
        let event = Fd::from(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
        let vring_event = VringEvent::new(event.clone()).expect("it is one");
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).expect("so much fits");
        fcntl_setfl(&event, fcntl_getfl(&event).expect("flags") - OFlags::NONBLOCK)
            .expect("by the front end");
        vring_event.signal(&EventfdNotifier::default());
        assert!(!fcntl_getfl(&event).expect("flags").contains(OFlags::NONBLOCK), "it was written to");
    }

    #[test]
    fn stolen_eventfd_count_does_not_block() {
        let event = Fd::from(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
        VringEvent::new(event.clone()).expect("it is one");
        fcntl_setfl(&event, fcntl_getfl(&event).expect("flags") - OFlags::NONBLOCK)
            .expect("by the front end");
        let mut count = [0; 8];
        assert_eq!(read_nowait(&event, &mut count), Err(Errno::AGAIN));
        rustix::io::write(&event, &3_u64.to_ne_bytes()).expect("there is room");
        assert_eq!((read_nowait(&event, &mut count), u64::from_ne_bytes(count)), (Ok(8), 3));
    }
}

#[cfg(test)]
pub(super) mod simulated {
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    };

    use event_listener::Event;

    use super::{NotAnEventfd, VringEvent};

    /// An eventfd without a descriptor.
    #[derive(Clone, Debug, Default)]
    pub(in super::super) struct SimulatedEvent(Arc<(AtomicU64, Event)>);

    impl SimulatedEvent {
        pub(in super::super) fn signal(&self) {
            self.0.0.fetch_add(1, SeqCst);
            self.0.1.notify(usize::MAX);
        }

        pub(in super::super) async fn wait(&self) -> Result<(), NotAnEventfd> {
            loop {
                let rung = self.0.1.listen();
                if self.count() == 0 {
                    rung.await;
                }
                // Yields, because the readiness of a descriptor is not reported at once either.
                reactor::yield_now().await;
                if self.0.0.swap(0, SeqCst) > 0 {
                    return Ok(());
                }
            }
        }

        /// Waits for the next signal and leaves it to be consumed by `wait`.
        pub(in super::super) async fn next_signal(&self) {
            self.0.1.listen().await;
        }

        /// Number of signals since the last one was consumed.
        pub(in super::super) fn count(&self) -> u64 {
            self.0.0.load(SeqCst)
        }

        pub(in super::super) fn vring_event(&self) -> VringEvent {
            VringEvent::Simulated(self.clone())
        }
    }
}
