//! Notification from a thread of the library to one task that something has changed.

use std::{
    future::poll_fn,
    sync::{Mutex, PoisonError},
    task::{Poll, Waker},
};

/// Can be raised from any thread; several notifications before the task runs count as one.
#[derive(Debug, Default)]
pub struct ResizeNotifier(Mutex<ResizeNotifierState>);

#[derive(Debug, Default)]
struct ResizeNotifierState {
    is_notified: bool,
    waker: Option<Waker>,
}

impl ResizeNotifier {
    /// Notifies: wakes the waiting task, and does nothing else.
    pub(super) fn notify(&self) {
        let waker = {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            state.is_notified = true;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits for a notification since the last call. For one task only: the waker of a second task
    /// would replace the first one's.
    pub async fn notified(&self) {
        poll_fn(|context| {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if std::mem::take(&mut state.is_notified) {
                return Poll::Ready(());
            }
            state.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
