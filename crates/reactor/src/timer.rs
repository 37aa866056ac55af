//! Timers: tasks that wait for an instant, in an ordered map. The reactor asks for the earliest and
//! fires those that are due.

use std::{
    collections::BTreeMap,
    future::Future,
    pin::{Pin, pin},
    task::{Context, Poll, Waker},
};

use policy::time::{Duration, Instant};

use super::{now, with_current};

/// Waiting tasks by deadline; the number tells timers of one instant apart and keeps them in order
/// of arrival.
#[derive(Default)]
pub(super) struct Timers {
    waiting: BTreeMap<(Instant, u64), Waker>,
    next_number: u64,
}

impl Timers {
    pub(super) fn earliest(&self) -> Option<Instant> {
        self.waiting.first_key_value().map(|(&(deadline, _), _)| deadline)
    }

    pub(super) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// One timer due at `now`, removed.
    pub(super) fn pop_due(&mut self, now: Instant) -> Option<Waker> {
        let entry = self.waiting.first_entry()?;
        (entry.key().0 <= now).then(|| entry.remove())
    }
}

/// Ready once its deadline has passed.
#[derive(Debug)]
pub struct Sleep {
    deadline: Instant,
    /// The key in the map while registered.
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
        // Outside the borrow: the last reference to a task may go with its waker.
        drop(removed);
    }
}

/// The time given to [`timeout`] ran out.
#[derive(Debug, PartialEq, Eq)]
pub struct Timeout;

/// Waits for `future`, but not longer than `limit`; then it is dropped.
///
/// # Errors
/// [`Timeout`] when the time ran out first.
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
