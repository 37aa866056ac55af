//! Told by a library's thread that something has changed: one task looks, when it likes.

use std::{
    future::poll_fn,
    sync::{Mutex, PoisonError},
    task::{Poll, Waker},
};

/// Rung from any thread; twice before somebody hears it counts once.
#[derive(Debug, Default)]
pub struct Bell(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    is_rung: bool,
    waker: Option<Waker>,
}

impl Bell {
    /// Rings it. Wakes whoever waits, and does nothing else.
    pub(super) fn ring(&self) {
        let waker = {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            state.is_rung = true;
            state.waker.take()
        };
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    /// Waits until it is rung, or was since the last time. For one task: a second would take the
    /// first one's place.
    pub async fn rung(&self) {
        poll_fn(|context| {
            let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            if std::mem::take(&mut state.is_rung) {
                return Poll::Ready(());
            }
            state.waker = Some(context.waker().clone());
            Poll::Pending
        })
        .await;
    }
}
