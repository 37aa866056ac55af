//! A signal from tasks to another task of the same thread that some state has changed.

use std::{
    cell::{Cell, RefCell},
    future::poll_fn,
    task::{Poll, Waker},
};

/// A flag that one task waits for. Repeated raising before it is consumed counts once.
#[derive(Debug, Default)]
pub struct Signal {
    raised: Cell<bool>,
    waiting: RefCell<Option<Waker>>,
}

impl Signal {
    /// Raises the flag and wakes the waiting task.
    pub fn raise(&self) {
        if !self.raised.replace(true) {
            let waiting = self.waiting.take();
            if let Some(waker) = waiting {
                waker.wake();
            }
        }
    }

    /// Waits until the flag is raised, and lowers it. For one task at a time: a second one would
    /// replace the first.
    pub async fn wait(&self) {
        poll_fn(|context| {
            if self.raised.replace(false) {
                return Poll::Ready(());
            }
            *self.waiting.borrow_mut() = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
