//! A waiting request, as seen by its own thread and by the thread that admits it.
//!
//! ```text
//!   the request's task                    whoever admits
//!   ──────────────────                    ──────────────
//!   poll:  admitted? ── yes ─► done       admit: set admitted, take the waker
//!            │ no                           │
//!            └► leave a waker               └► wake, outside every lock
//! ```
//!
//! Both sides do all of this under the waiter's own lock. So either the task sees that it was
//! admitted, or whoever admits it sees the waker. The lock is the last to be taken, and nothing is
//! called under it.
//!
//! Never decides anything: the [arbiter](super::arbiter) decides when to admit.

use std::task::{Context, Poll, Waker};

use policy::throttle::{Held, Ticket};

use super::sync::{Mutex, MutexGuard};

/// A request that waits.
#[derive(Debug, Default)]
pub(super) struct Waiter(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    admitted: bool,
    held: Option<Held>,
    waker: Option<Waker>,
    position: Option<Position>,
}

/// Where a request waits: which tree's queue, and which request there.
///
/// Tickets of two trees may look alike, and a request moves from one to another with its disk; so
/// the tree is part of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) arbiter: u64,
    pub(super) ticket: Ticket,
}

impl Waiter {
    fn lock(&self) -> MutexGuard<'_, State> {
        // Each change is a single assignment: a panic leaves nothing half done.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Ready once admitted, with what held it; until then the last task that asked is woken.
    pub(super) fn poll(&self, context: &Context<'_>) -> Poll<Option<Held>> {
        let mut state = self.lock();
        if state.admitted {
            return Poll::Ready(state.held);
        }
        let known = state.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker()));
        if !known {
            state.waker = Some(context.waker().clone());
        }
        Poll::Pending
    }

    /// Lets it go, and says what held it. It must have left its queue; called once.
    pub(super) fn admit(&self, held: Option<Held>) {
        let waker = {
            let mut state = self.lock();
            debug_assert!(!state.admitted, "a request was admitted twice");
            (state.admitted, state.held) = (true, held);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Says where it waits now. Called under the lock of that tree, so nothing admits it meanwhile.
    pub(super) fn queued_at(&self, position: Position) {
        self.lock().position = Some(position);
    }

    /// Where it waited last; `None` if it was told that it is admitted.
    ///
    /// It may have left that queue already, by somebody who is about to tell it.
    pub(super) fn waits_at(&self) -> Option<Position> {
        let state = self.lock();
        if state.admitted { None } else { state.position }
    }
}
