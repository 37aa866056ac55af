//! How a driver and its device wake each other: an eventfd of the front end. In tests also a count
//! that behaves like one, since a simulation has no descriptors to wait for.

use std::{
    fs,
    io::{self, IoSliceMut},
    os::fd::{AsFd, AsRawFd as _},
};

use reactor::{
    Notifier,
    op::{self, Fd},
};
use rustix::{
    fs::{OFlags, fcntl_getfl, fcntl_setfl},
    io::ReadWriteFlags,
};

/// What the kernel calls an eventfd (`proc_pid_fd(5)`).
const EVENT: &str = "anon_inode:[eventfd]";

/// One event.
#[derive(Clone, Debug)]
pub(super) enum Bell {
    Event(Fd),
    #[cfg(test)]
    Simulated(simulated::Counter),
}

/// What was passed as an event is none, or does not behave as one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("its descriptor is no eventfd")]
pub(super) struct NoEvent;

impl Bell {
    /// Neither hearing nor ringing it waits, whatever flags it came with.
    ///
    /// # Errors
    /// [`NoEvent`]. A file that can always be read would be a bell that never stops, and writing to
    /// one could take for ever.
    pub(super) fn new(event: Fd) -> Result<Self, NoEvent> {
        if !is_event(&event) {
            return Err(NoEvent);
        }
        never_waits(&event).map_err(|_| NoEvent)?;
        Ok(Self::Event(event))
    }

    /// Rings. A counter that is full has not been read, which is as good.
    ///
    /// Only where no descriptor or memory is left to ring without waiting, somebody who fills the
    /// counter and clears `O_NONBLOCK` at the same moment makes it wait until the counter is read.
    pub(super) fn ring(&self, notifier: &Notifier) {
        match self {
            Self::Event(event) => {
                if notifier.ring(event).is_err() && never_waits(event).is_ok() {
                    let _ = rustix::io::write(event, &1_u64.to_ne_bytes());
                }
            }
            #[cfg(test)]
            Self::Simulated(counter) => counter.ring(),
        }
    }

    /// Waits until it has been rung since it was last heard.
    pub(super) async fn heard(&self) -> Result<(), NoEvent> {
        let event = match self {
            Self::Event(event) => event,
            #[cfg(test)]
            Self::Simulated(counter) => return counter.heard().await,
        };
        loop {
            op::readable(event).await.map_err(|_: io::Error| NoEvent)?;
            let mut count = [0; 8];
            match take(event, &mut count) {
                Ok(8) if count != [0; 8] => return Ok(()),
                // Somebody else has heard it.
                Err(rustix::io::Errno::AGAIN | rustix::io::Errno::INTR) => {}
                _ => return Err(NoEvent),
            }
        }
    }
}

/// Whether it is an eventfd. Asked of the kernel alone: to ask a file for its status may wait for
/// whoever serves its file system.
pub(super) fn is_event(event: &impl AsFd) -> bool {
    let name = fs::read_link(format!("/proc/self/fd/{}", event.as_fd().as_raw_fd()));
    name.is_ok_and(|name| name.as_os_str() == EVENT)
}

/// Has nobody wait for the event, unless its front end changes that again.
fn never_waits(event: &Fd) -> rustix::io::Result<()> {
    fcntl_setfl(event, fcntl_getfl(event)? | OFlags::NONBLOCK)
}

/// Reads the count of an eventfd, and waits for none: its front end shares the flags, and may have
/// made it wait again.
fn take(event: &Fd, count: &mut [u8; 8]) -> rustix::io::Result<usize> {
    let into = &mut [IoSliceMut::new(count)];
    match rustix::io::preadv2(event, into, u64::MAX, ReadWriteFlags::NOWAIT) {
        // Kernels before 5.9.
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
    fn ringing_waits_for_nobody_who_has_cleared_the_flag_of_a_full_event() {
        let event = Fd::from(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
        let bell = Bell::new(event.clone()).expect("it is one");
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes()).expect("so much fits");
        fcntl_setfl(&event, fcntl_getfl(&event).expect("flags") - OFlags::NONBLOCK)
            .expect("by the front end");
        bell.ring(&Notifier::default());
        assert!(!fcntl_getfl(&event).expect("flags").contains(OFlags::NONBLOCK), "it was written to");
    }

    #[test]
    fn a_count_that_somebody_else_has_taken_is_not_waited_for() {
        let event = Fd::from(eventfd(0, EventfdFlags::CLOEXEC).expect("an eventfd"));
        Bell::new(event.clone()).expect("it is one");
        fcntl_setfl(&event, fcntl_getfl(&event).expect("flags") - OFlags::NONBLOCK)
            .expect("by the front end");
        let mut count = [0; 8];
        assert_eq!(take(&event, &mut count), Err(Errno::AGAIN));
        rustix::io::write(&event, &3_u64.to_ne_bytes()).expect("there is room");
        assert_eq!((take(&event, &mut count), u64::from_ne_bytes(count)), (Ok(8), 3));
    }
}

#[cfg(test)]
pub(super) mod simulated {
    use std::sync::{
        Arc,
        atomic::{AtomicU64, Ordering::SeqCst},
    };

    use event_listener::Event;

    use super::{Bell, NoEvent};

    /// An eventfd without a descriptor.
    #[derive(Clone, Debug, Default)]
    pub(in super::super) struct Counter(Arc<(AtomicU64, Event)>);

    impl Counter {
        pub(in super::super) fn ring(&self) {
            self.0.0.fetch_add(1, SeqCst);
            self.0.1.notify(usize::MAX);
        }

        pub(in super::super) async fn heard(&self) -> Result<(), NoEvent> {
            loop {
                let rung = self.0.1.listen();
                if self.count() == 0 {
                    rung.await;
                }
                // A descriptor's readiness takes its time, too.
                reactor::yield_now().await;
                if self.0.0.swap(0, SeqCst) > 0 {
                    return Ok(());
                }
            }
        }

        /// Waits until it is rung, and leaves it to whoever hears it.
        pub(in super::super) async fn rung(&self) {
            self.0.1.listen().await;
        }

        /// How often it was rung since it was last heard.
        pub(in super::super) fn count(&self) -> u64 {
            self.0.0.load(SeqCst)
        }

        pub(in super::super) fn bell(&self) -> Bell {
            Bell::Simulated(self.clone())
        }
    }
}
