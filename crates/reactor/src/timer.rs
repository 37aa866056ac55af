//! Timers: wakers in a map ordered by deadline.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
};

use policy::time::{Duration, Instant};

use super::{now, with_current};

/// Wakers by deadline. The number distinguishes timers with equal deadlines and keeps their order.
#[derive(Default)]
pub(super) struct TimerQueue {
    waiting: BTreeMap<(Instant, u64), Waker>,
    next_number: u64,
}

impl TimerQueue {
    pub(super) fn earliest(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(&(deadline, _), _)| deadline)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Removes and returns one timer that is due at `now`.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<Waker> {
        let entry = self.waiting.first_entry()?;
        (entry.key().0 <= now).then(|| entry.remove())
    }
}

/// Future that completes at its deadline.
#[derive(Debug)]
pub struct Sleep {
    deadline: Instant,
    /// Key in the map, once registered.
    number: Option<u64>,
}

impl Sleep {
    pub(super) fn new(deadline: Instant) -> Self {
        Self { deadline, number: None }
    }
}

impl Future for Sleep {
    type Output = ();
    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        if now() >= self.deadline {
            return Poll::Ready(());
        }
        with_current(|reactor| {
            let mut timers = reactor.timers.borrow_mut();
            let number = *self.number.get_or_insert_with(|| {
                timers.next_number += 1;
                timers.next_number
            });
            timers.waiting.insert((self.deadline, number), context.waker().clone());
        });
        Poll::Pending
    }
}

impl Drop for Sleep {
    fn drop(&mut self) {
        let Some(number) = self.number else { return };
        let removed =
            with_current(|reactor| reactor.timers.borrow_mut().waiting.remove(&(self.deadline, number)));
        // Outside of the borrow: a waker may hold the last reference to a task, whose drop may
        // access the timers.
        drop(removed);
    }
}

/// Error: the limit of [`timeout`] has passed.
#[derive(Debug, PartialEq, Eq)]
pub struct Timeout;

/// Waits for `future` for at most `limit`, then drops it.
///
/// # Errors
/// [`Timeout`] if the limit passed first.
pub async fn timeout<T>(limit: Duration, future: impl Future<Output = T>) -> Result<T, Timeout> {
    let mut future = pin!(future);
    let mut sleep = pin!(Sleep::new(now() + limit));
    std::future::poll_fn(|context| {
        if let Poll::Ready(value) = future.as_mut().poll(context) {
            return Poll::Ready(Ok(value));
        }
        sleep.as_mut().poll(context).map(|()| Err(Timeout))
    })
    .await
}
