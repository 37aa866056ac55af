//! The throttle layer: requests of a group's disks wait here until the group's limits let them pass.
//!
//! ```text
//!   request ──► unlimited? ──────────────────────────────► pass
//!                  │ no
//!                  ▼
//!             lock group ─► may pass now ────────────────► pass
//!                  │ must wait
//!                  ▼
//!             task sleeps ◄── woken by: the group's timer │ new limits │ another admission
//! ```
//!
//! Disks of one group may run on several threads. They share the decision state behind a lock that is held for tens of
//! nanoseconds and never across an `.await`; a group has at most one timer that matters, armed by whichever thread first sees that
//! somebody has to wait.
//!
//! Never reorders a disk's requests of one direction, and never drops one: a request whose task is dropped takes itself back.

use std::{
    future::Future,
    pin::Pin,
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicBool, Ordering},
    },
    task::{Context, Poll, Waker},
};

use policy::{
    request::Direction,
    throttle::{Admission, Cost, Counters, Decision, Invalid, Limits, MemberId, Share, Ticket},
    time::Instant,
};

use crate::reactor;

/// Disks that share one set of limits.
#[derive(Debug)]
pub struct Group {
    name: Arc<str>,
    state: Mutex<State>,
    /// No limit is set: nothing has to be asked or counted, so the lock is not taken.
    unlimited: AtomicBool,
}

#[derive(Debug)]
struct State {
    policy: policy::throttle::Group<Arc<Waiter>>,
    /// When the timer in force fires. One that was armed for later still fires, and finds nothing to do.
    timer: Option<Instant>,
}

/// A request that waits: the group admits it, its task notices.
#[derive(Debug, Default)]
struct Waiter {
    admitted: AtomicBool,
    waker: Mutex<Option<Waker>>,
}

impl Waiter {
    fn lock(&self) -> MutexGuard<'_, Option<Waker>> {
        self.waker.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn admit(&self) {
        // Release: pairs with the Acquire in `Passage::poll`.
        self.admitted.store(true, Ordering::Release);
        let waker = self.lock().take();
        if let Some(waker) = waker {
            waker.wake();
        }
    }
}

impl Group {
    /// A group with these limits and no members.
    ///
    /// # Errors
    /// [`Invalid`] names the setting and the rule it breaks.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn new(name: &str, limits: Limits) -> Result<Arc<Self>, Invalid> {
        let policy = policy::throttle::Group::new(limits, reactor::now())?;
        Ok(Arc::new(Self {
            name: name.into(),
            state: Mutex::new(State { policy, timer: None }),
            unlimited: AtomicBool::new(limits.is_unlimited()),
        }))
    }

    /// The group's name; of a disk without a group, the disk's.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The limits in force.
    pub fn limits(&self) -> Limits {
        *self.lock().policy.limits()
    }

    /// What has passed while a limit was set.
    pub fn counters(&self) -> Counters {
        self.lock().policy.counters()
    }

    /// Puts other limits in force, also for the requests that wait: those that may pass do so at once.
    ///
    /// # Errors
    /// [`Invalid`] names the setting and the rule it breaks; the limits stay as they were.
    ///
    /// # Panics
    /// Outside a reactor.
    pub fn set_limits(self: &Arc<Self>, limits: Limits) -> Result<(), Invalid> {
        let mut state = self.lock();
        state.policy.set_limits(limits, reactor::now())?;
        self.unlimited.store(limits.is_unlimited(), Ordering::Relaxed);
        self.advance_and_arm(state);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        // A panic under the lock is a bug in policy; the counts it leaves may be off, but nothing dangles.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Admits whatever may pass by now. Returns when a timer has to fire for the next, if none is armed that does.
    fn advance(&self, mut state: MutexGuard<'_, State>) -> Option<Instant> {
        let now = reactor::now();
        let mut admitted = Vec::new();
        let until = loop {
            match state.policy.poll(now) {
                Decision::Admit(waiter) => admitted.push(waiter),
                Decision::Wait { until } => break Some(until),
                Decision::Idle => break None,
            }
        };
        let armed = until.filter(|&until| state.timer.is_none_or(|timer| until < timer));
        if armed.is_some() {
            state.timer = armed;
        }
        drop(state);
        for waiter in admitted {
            waiter.admit();
        }
        armed
    }

    fn advance_and_arm(self: &Arc<Self>, state: MutexGuard<'_, State>) {
        if let Some(until) = self.advance(state) {
            reactor::spawn(Arc::clone(self).fire_at(until));
        }
    }

    async fn fire_at(self: Arc<Self>, mut instant: Instant) {
        loop {
            reactor::sleep_until(instant).await;
            let mut state = self.lock();
            if state.timer == Some(instant) {
                state.timer = None;
            }
            match self.advance(state) {
                Some(next) => instant = next,
                None => return,
            }
        }
    }
}

/// A disk's membership in its group. Leaves when dropped.
#[derive(Debug)]
pub struct Member {
    group: Arc<Group>,
    id: MemberId,
}

impl Member {
    /// Joins `group` with an equal share.
    pub fn join(group: &Arc<Group>) -> Self {
        let id = group.lock().policy.join(Share::default());
        Self { group: Arc::clone(group), id }
    }

    /// The group.
    pub fn group(&self) -> &Arc<Group> {
        &self.group
    }

    /// Waits until a request of this direction and cost may pass, and charges it.
    pub async fn admit(&self, direction: Direction, cost: Cost) {
        // Relaxed: a request that just misses new limits is one that came before them.
        if self.group.unlimited.load(Ordering::Relaxed) {
            return;
        }
        let Some(passage) = self.ask(direction, cost) else { return };
        passage.await;
    }

    /// `None` if it may pass at once.
    fn ask(&self, direction: Direction, cost: Cost) -> Option<Passage> {
        let now = reactor::now();
        let mut state = self.group.lock();
        if state.policy.pass(self.id, direction, &cost, now) {
            return None;
        }
        let waiter = Arc::new(Waiter::default());
        match state.policy.request(self.id, direction, cost, Arc::clone(&waiter), now) {
            Admission::Admitted(_) => None,
            Admission::Queued(ticket) => {
                self.group.advance_and_arm(state);
                Some(Passage { group: Arc::clone(&self.group), waiter, ticket })
            }
        }
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        // Its requests hold the disk, which holds this: when it goes, nothing of it waits.
        let waiting = self.group.lock().policy.leave(self.id);
        debug_assert!(waiting.is_empty(), "a disk left its group while requests of it waited");
    }
}

/// A request waiting to pass.
struct Passage {
    group: Arc<Group>,
    waiter: Arc<Waiter>,
    ticket: Ticket,
}

impl Future for Passage {
    type Output = ();
    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        let mut waker = self.waiter.lock();
        if self.waiter.admitted.load(Ordering::Acquire) {
            return Poll::Ready(());
        }
        *waker = Some(context.waker().clone());
        Poll::Pending
    }
}

impl Drop for Passage {
    fn drop(&mut self) {
        if !self.waiter.admitted.load(Ordering::Acquire) {
            let mut state = self.group.lock();
            drop(state.policy.cancel(self.ticket));
        }
    }
}
