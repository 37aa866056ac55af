//! A waiting request, shared by its task and the thread that admits it.
//!
//! ```text
//!   the request's task                    the admitting thread
//!   ──────────────────                    ────────────────────
//!   poll:  admitted? ── yes ─► done       admit: set admitted, take the waker
//!            │ no                           │
//!            └► store the waker             └► wake, outside every lock
//! ```
//!
//! Both sides do this under the waiter's own lock. So either the task sees that its request is
//! admitted, or the admitting thread sees the waker. This lock is the last in the lock order, and
//! no other code is called under it.
//!
//! Never decides anything: the [tree](super::tree) decides when to admit.

use std::task::{Context, Poll, Waker};

use policy::throttle::{LevelCause, QueuedRequestId};

use super::sync::{Mutex, MutexGuard};

/// A waiting request, as its queue and its task share it.
#[derive(Debug, Default)]
pub(super) struct ThrottleWaiter(Mutex<ThrottleWaiterState>);

#[derive(Debug, Default)]
struct ThrottleWaiterState {
    admitted: bool,
    throttle_cause: Option<LevelCause>,
    waker: Option<Waker>,
    position: Option<WaiterPosition>,
}

/// Position of a waiting request: the id of the tree in whose queue it is, and its ticket there.
///
/// Tickets of two trees may be equal, and a disk that moves to another tree takes its waiting
/// requests along; so the tree is part of the position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct WaiterPosition {
    pub(super) tree_id: u64,
    pub(super) ticket: QueuedRequestId,
}

impl ThrottleWaiter {
    fn lock(&self) -> MutexGuard<'_, ThrottleWaiterState> {
        // Each change is a single assignment: a panic cannot leave it inconsistent.
        self.0.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
    }

    /// Returns the throttle cause once the request is admitted. Until then, the waker of the last
    /// caller is woken at the admission.
    pub(super) fn poll(&self, context: &Context<'_>) -> Poll<Option<LevelCause>> {
        let mut state = self.lock();
        if state.admitted {
            return Poll::Ready(state.throttle_cause);
        }
        // Cloning a waker costs atomic operations, and a task usually polls with the same one.
        let is_registered = state.waker.as_ref().is_some_and(|waker| waker.will_wake(context.waker()));
        if !is_registered {
            state.waker = Some(context.waker().clone());
        }
        Poll::Pending
    }

    /// Admits the request and stores its throttle cause. Called once, after the request was removed
    /// from its queue.
    pub(super) fn admit(&self, cause: Option<LevelCause>) {
        let waker = {
            let mut state = self.lock();
            debug_assert!(!state.admitted, "a request was admitted twice");
            (state.admitted, state.throttle_cause) = (true, cause);
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Sets the position of the request. Called under the lock of the position's tree, so that the
    /// request cannot be admitted meanwhile.
    pub(super) fn set_position(&self, position: WaiterPosition) {
        self.lock().position = Some(position);
    }

    /// Last position of the request; `None` if it is admitted.
    ///
    /// Another thread may have removed the request from that queue already, and be about to admit
    /// it.
    pub(super) fn position(&self) -> Option<WaiterPosition> {
        let state = self.lock();
        if state.admitted { None } else { state.position }
    }
}
