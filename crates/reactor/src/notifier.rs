//! Non-blocking signalling of eventfds that other processes share.
//!
//! `write(2)` to an eventfd blocks if its counter is full and it lacks `O_NONBLOCK`. That flag
//! belongs to the shared file description: another process may clear it between a check and the
//! write, and `write(2)` has no flag of its own. The kernel itself never blocks on an eventfd
//! (`eventfd_signal`). Therefore an io_uring completes a no-op, and the kernel signals the eventfd
//! that is registered with that ring.
//!
//! This takes 80 ns longer than a write, as long as checking the flag before it.

use std::{
    cell::RefCell,
    io,
    os::fd::{AsFd as _, AsRawFd as _},
    sync::{Mutex, MutexGuard, PoisonError},
};

use io_uring::{IoUring, opcode};

use super::{
    operation::Fd,
    ring_restrictions::{self, registering},
};

/// Number of spare rings: creating a ring takes long, and so does destroying one; and a sandboxed
/// process may not create rings.
const MAX_SPARE: usize = 16;

/// Maximum number of rings created in advance: a ring takes a descriptor and 12 KiB of kernel
/// memory, and few of the possible queues are ever used.
const MAX_IN_ADVANCE: usize = 1024;

static SPARE: Mutex<SpareRings> =
    Mutex::new(SpareRings { rings: Vec::new(), max_rings: MAX_SPARE, shared: None });

struct SpareRings {
    rings: Vec<IoUring>,
    max_rings: usize,
    /// Ring shared by all notifiers without a ring of their own.
    shared: Option<EventfdRing>,
}

fn spare() -> MutexGuard<'static, SpareRings> {
    // A panic while pushing to a Vec leaves it valid, and one while signalling leaves a ring that
    // is registered again before its next use.
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn build_ring() -> io::Result<IoUring> {
    let registered = [registering::EVENTFD, registering::UNREGISTER_EVENTFD];
    ring_restrictions::build(&mut IoUring::builder(), 1, None, &[opcode::Nop::CODE], &registered)
}

/// Number of descriptors that [`create_spare`] uses for `count` notifiers.
pub fn spare_descriptors(count: usize) -> usize {
    // The spare rings, and the shared one.
    max_spare(count) + 1
}

fn max_spare(count: usize) -> usize {
    count.min(MAX_IN_ADVANCE) + MAX_SPARE
}

/// Creates the rings for `count` notifiers, plus spare ones, so that none has to be created later.
/// Notifiers beyond [`MAX_IN_ADVANCE`] may share one, which takes two more system calls each time.
///
/// # Errors
/// As `io_uring_setup(2)`.
pub fn create_spare(count: usize) -> io::Result<()> {
    let mut spare = spare();
    spare.max_rings = max_spare(count);
    while spare.rings.len() < spare.max_rings {
        spare.rings.push(build_ring()?);
    }
    if spare.shared.is_none() {
        spare.shared = Some(EventfdRing { ring: build_ring()?, registered: None });
    }
    Ok(())
}

/// Signals eventfds. Signalling the same one repeatedly is the cheapest. Owns a descriptor after
/// the first signal.
#[derive(Default)]
pub struct EventfdNotifier(RefCell<Option<EventfdRing>>);

impl EventfdNotifier {
    /// Adds 1 to the counter of an eventfd, unless it is full. Never blocks.
    ///
    /// # Errors
    /// Fails if no descriptor or memory is left, or `event` is not an eventfd.
    pub fn notify(&self, event: &Fd) -> io::Result<()> {
        let mut registered = self.0.borrow_mut();
        let tied = match &mut *registered {
            Some(tied) => tied,
            none => match EventfdRing::unregistered() {
                Ok(ring) => none.insert(ring),
                Err(error) => return spare().shared.as_mut().ok_or(error)?.notify_once(event),
            },
        };
        tied.register(event)?;
        tied.complete_nop()
    }
}

struct EventfdRing {
    ring: IoUring,
    registered: Option<Fd>,
}

impl EventfdRing {
    fn unregistered() -> io::Result<Self> {
        let spare_ring = spare().rings.pop();
        let ring = match spare_ring {
            Some(ring) => ring,
            None => build_ring()?,
        };
        Ok(Self { ring, registered: None })
    }

    fn register(&mut self, event: &Fd) -> io::Result<()> {
        if self.registered.as_ref().is_some_and(|registered| registered.is_same(event)) {
            return Ok(());
        }
        self.unregister()?;
        self.ring.submitter().register_eventfd(event.as_fd().as_raw_fd())?;
        self.registered = Some(event.clone());
        Ok(())
    }

    fn unregister(&mut self) -> io::Result<()> {
        match self.registered.take() {
            Some(_) => self.ring.submitter().unregister_eventfd(),
            None => Ok(()),
        }
    }

    /// Signals an event without staying registered with it.
    fn notify_once(&mut self, event: &Fd) -> io::Result<()> {
        self.register(event)?;
        self.complete_nop()?;
        self.unregister()
    }

    fn complete_nop(&mut self) -> io::Result<()> {
        // If the queue is full, it contains an entry of a submission that failed, which suffices.
        // SAFETY: the entry refers to no memory and to no descriptor.
        let _ = unsafe { self.ring.submission().push(&opcode::Nop::new().build()) };
        self.ring.submit()?;
        self.ring.completion().for_each(drop);
        Ok(())
    }
}

impl Drop for EventfdNotifier {
    fn drop(&mut self) {
        let Some(mut ring) = self.0.take() else { return };
        if ring.unregister().is_err() {
            return;
        }
        let mut spare = spare();
        if spare.rings.len() < spare.max_rings {
            spare.rings.push(ring.ring);
        }
    }
}

#[cfg(test)]
mod tests {
    use nix::sys::eventfd::{EfdFlags, EventFd};

    use super::*;

    fn event() -> Fd {
        Fd::from(EventFd::from_value_and_flags(0, EfdFlags::EFD_CLOEXEC).expect("an eventfd"))
    }

    fn count(event: &Fd) -> u64 {
        let mut count = [0; 8];
        assert_eq!(rustix::io::read(event, &mut count), Ok(8));
        u64::from_ne_bytes(count)
    }

    #[test]
    fn each_eventfd_is_signalled_once_per_request() {
        let (first, second) = (event(), event());
        for _ in 0..3 {
            let notifier = EventfdNotifier::default();
            for event in [&first, &first, &second, &first] {
                notifier.notify(event).expect("it is an eventfd");
            }
            assert_eq!((count(&first), count(&second)), (3, 1));
        }
    }

    #[test]
    fn full_eventfd_does_not_block() {
        let full = event();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("so much fits");
        let notifier = EventfdNotifier::default();
        for _ in 0..3 {
            notifier.notify(&full).expect("it is an eventfd");
        }
        assert!(count(&full) >= u64::MAX - 1);
    }

    #[test]
    fn shared_notifier_keeps_no_event() {
        let (first, second) = (event(), event());
        let mut shared = EventfdRing { ring: build_ring().expect("a ring"), registered: None };
        for event in [&first, &second, &first] {
            shared.notify_once(event).expect("it is an eventfd");
        }
        assert_eq!((count(&first), count(&second)), (2, 1));
        assert!(first.has_reference_count(1) && second.has_reference_count(1));
        let file = Fd::from(std::fs::File::open("/dev/null").expect("it is there"));
        assert!(shared.notify_once(&file).is_err());
        shared.notify_once(&first).expect("it is an eventfd");
        assert_eq!(count(&first), 1);
    }

    #[test]
    fn many_queues_take_few_rings() {
        create_spare(16 * 1000).expect("rings");
        let spare = spare();
        assert!(spare.rings.len() < spare_descriptors(usize::MAX) && spare.shared.is_some());
        assert_eq!(spare_descriptors(16 * 1000), spare_descriptors(MAX_IN_ADVANCE));
    }

    #[test]
    fn non_eventfd_is_an_error() {
        let file = Fd::from(std::fs::File::open("/dev/null").expect("it is there"));
        let notifier = EventfdNotifier::default();
        assert!(notifier.notify(&file).is_err());
        let event = event();
        notifier.notify(&event).expect("it is one");
        assert_eq!(count(&event), 1);
    }
}
