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
    op::Fd,
    restricted::{self, registering},
};

/// Number of spare rings: creating a ring takes long, and so does destroying one; and a sandboxed
/// process may not create rings.
const MOST_SPARE: usize = 16;

/// Maximum number of rings created in advance: a ring takes a descriptor and 12 KiB of kernel
/// memory, and few of the possible queues are ever used.
const MOST_SET_ASIDE: usize = 1024;

static SPARE: Mutex<Spare> = Mutex::new(Spare { rings: Vec::new(), most: MOST_SPARE, shared: None });

struct Spare {
    rings: Vec<IoUring>,
    most: usize,
    /// Ring shared by all notifiers without a ring of their own.
    shared: Option<Tied>,
}

fn spare() -> MutexGuard<'static, Spare> {
    // A panic while pushing to a Vec leaves it valid, and one while signalling leaves a ring that
    // is registered again before its next use.
    SPARE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn make() -> io::Result<IoUring> {
    let registered = [registering::EVENTFD, registering::UNREGISTER_EVENTFD];
    restricted::build(&mut IoUring::builder(), 1, None, &[opcode::Nop::CODE], &registered)
}

/// Number of descriptors that [`set_aside`] uses for `count` notifiers.
pub fn set_aside_for(count: usize) -> usize {
    // The spare rings, and the shared one.
    most_kept(count) + 1
}

fn most_kept(count: usize) -> usize {
    count.min(MOST_SET_ASIDE) + MOST_SPARE
}

/// Creates the rings for `count` notifiers, plus spare ones, so that none has to be created later.
/// Notifiers beyond [`MOST_SET_ASIDE`] may share one, which takes two more system calls each time.
///
/// # Errors
/// As `io_uring_setup(2)`.
pub fn set_aside(count: usize) -> io::Result<()> {
    let mut spare = spare();
    spare.most = most_kept(count);
    while spare.rings.len() < spare.most {
        spare.rings.push(make()?);
    }
    if spare.shared.is_none() {
        spare.shared = Some(Tied { ring: make()?, event: None });
    }
    Ok(())
}

/// Signals eventfds. Signalling the same one repeatedly is the cheapest. Owns a descriptor after
/// the first signal.
#[derive(Default)]
pub struct Notifier(RefCell<Option<Tied>>);

impl Notifier {
    /// Adds 1 to the counter of an eventfd, unless it is full. Never blocks.
    ///
    /// # Errors
    /// Fails if no descriptor or memory is left, or `event` is not an eventfd.
    pub fn ring(&self, event: &Fd) -> io::Result<()> {
        let mut tied = self.0.borrow_mut();
        let tied = match &mut *tied {
            Some(tied) => tied,
            none => match Tied::to_nothing() {
                Ok(own) => none.insert(own),
                Err(error) => return spare().shared.as_mut().ok_or(error)?.ring_once(event),
            },
        };
        tied.tie(event)?;
        tied.complete()
    }
}

struct Tied {
    ring: IoUring,
    event: Option<Fd>,
}

impl Tied {
    fn to_nothing() -> io::Result<Self> {
        let kept = spare().rings.pop();
        let ring = match kept {
            Some(ring) => ring,
            None => make()?,
        };
        Ok(Self { ring, event: None })
    }

    fn tie(&mut self, event: &Fd) -> io::Result<()> {
        if self.event.as_ref().is_some_and(|tied| tied.is(event)) {
            return Ok(());
        }
        self.untie()?;
        self.ring.submitter().register_eventfd(event.as_fd().as_raw_fd())?;
        self.event = Some(event.clone());
        Ok(())
    }

    fn untie(&mut self) -> io::Result<()> {
        match self.event.take() {
            Some(_) => self.ring.submitter().unregister_eventfd(),
            None => Ok(()),
        }
    }

    /// Signals an event without staying registered with it.
    fn ring_once(&mut self, event: &Fd) -> io::Result<()> {
        self.tie(event)?;
        self.complete()?;
        self.untie()
    }

    fn complete(&mut self) -> io::Result<()> {
        // If the queue is full, it contains an entry of a submission that failed, which suffices.
        // SAFETY: the entry refers to no memory and to no descriptor.
        let _ = unsafe { self.ring.submission().push(&opcode::Nop::new().build()) };
        self.ring.submit()?;
        self.ring.completion().for_each(drop);
        Ok(())
    }
}

impl Drop for Notifier {
    fn drop(&mut self) {
        let Some(mut tied) = self.0.take() else { return };
        if tied.untie().is_err() {
            return;
        }
        let mut spare = spare();
        if spare.rings.len() < spare.most {
            spare.rings.push(tied.ring);
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
    fn each_event_is_rung_as_often_as_asked() {
        let (one, other) = (event(), event());
        for _ in 0..3 {
            let notifier = Notifier::default();
            for event in [&one, &one, &other, &one] {
                notifier.ring(event).expect("it is an eventfd");
            }
            assert_eq!((count(&one), count(&other)), (3, 1));
        }
    }

    #[test]
    fn one_that_is_full_and_would_wait_is_not_waited_for() {
        let full = event();
        rustix::io::write(&full, &(u64::MAX - 1).to_ne_bytes()).expect("so much fits");
        let notifier = Notifier::default();
        for _ in 0..3 {
            notifier.ring(&full).expect("it is an eventfd");
        }
        assert!(count(&full) >= u64::MAX - 1);
    }

    #[test]
    fn a_ring_that_is_shared_keeps_no_event() {
        let (one, other) = (event(), event());
        let mut shared = Tied { ring: make().expect("a ring"), event: None };
        for event in [&one, &other, &one] {
            shared.ring_once(event).expect("it is an eventfd");
        }
        assert_eq!((count(&one), count(&other)), (2, 1));
        assert!(one.has_owners(1) && other.has_owners(1));
        let file = Fd::from(std::fs::File::open("/dev/null").expect("it is there"));
        assert!(shared.ring_once(&file).is_err());
        shared.ring_once(&one).expect("it is an eventfd");
        assert_eq!(count(&one), 1);
    }

    #[test]
    fn many_queues_take_few_rings() {
        set_aside(16 * 1000).expect("rings");
        let spare = spare();
        assert!(spare.rings.len() < set_aside_for(usize::MAX) && spare.shared.is_some());
        assert_eq!(set_aside_for(16 * 1000), set_aside_for(MOST_SET_ASIDE));
    }

    #[test]
    fn what_is_no_eventfd_is_an_error() {
        let file = Fd::from(std::fs::File::open("/dev/null").expect("it is there"));
        let notifier = Notifier::default();
        assert!(notifier.ring(&file).is_err());
        let event = event();
        notifier.ring(&event).expect("it is one");
        assert_eq!(count(&event), 1);
    }
}
