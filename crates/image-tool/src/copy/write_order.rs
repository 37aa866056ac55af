//! Order of writes: tasks on several threads read ahead, and start their writes one after another.
//! After a failure no further task writes.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    sync::{Mutex, PoisonError},
    task::{Poll, Waker},
};

#[derive(Debug, Default)]
pub(super) struct WriteOrder(Mutex<WriteOrderState>);

#[derive(Debug, Default)]
struct WriteOrderState {
    next: u64,
    ended: bool,
    waiting: Vec<Waker>,
}

impl WriteOrder {
    pub(super) async fn wait(&self, number: u64) -> bool {
        poll_fn(|context| {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if state.ended || state.next == number {
                return Poll::Ready(!state.ended);
            }
            // All waiting tasks are woken at each change: there are at most 64.
            state.waiting.push(context.waker().clone());
            Poll::Pending
        })
        .await
    }

    /// Starts the write of the task whose turn it is, lets the next task start unless the write has
    /// failed, and waits for the write's end.
    pub(super) async fn start<E>(&self, write: impl Future<Output = Result<(), E>>) -> Result<(), E> {
        let mut write = pin!(write);
        let started = poll_fn(|context| Poll::Ready(write.as_mut().poll(context))).await;
        if !matches!(started, Poll::Ready(Err(_))) {
            self.advance();
        }
        match started {
            Poll::Ready(outcome) => outcome,
            Poll::Pending => write.await,
        }
    }

    pub(super) fn advance(&self) {
        self.change(|state| state.next += 1);
    }

    pub(super) fn end(&self) {
        self.change(|state| state.ended = true);
    }

    fn change(&self, change: impl FnOnce(&mut WriteOrderState)) {
        let woken = {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            change(&mut state);
            std::mem::take(&mut state.waiting)
        };
        // Outside the lock: a waker may run arbitrary code.
        for waker in woken {
            waker.wake();
        }
    }
}
