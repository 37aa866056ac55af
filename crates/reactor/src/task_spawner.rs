//! Starts many futures of one type, most of which complete at the first poll, without a task or an
//! allocation for those.

use std::{
    future::Future,
    pin::Pin,
    task::{Context, Waker},
};

use super::{ReactorDriver, spawn, with_current};

/// Memory in which a future is polled before it becomes a task. Reused for futures that complete at
/// the first poll.
#[derive(Debug)]
pub struct TaskSpawner<F> {
    slot: Option<Pin<Box<Option<F>>>>,
    /// True in simulation: every future becomes a task, because the seed decides the order of
    /// execution.
    is_simulated: bool,
}

impl<F: Future<Output = ()> + 'static> TaskSpawner<F> {
    /// A spawner for this thread.
    ///
    /// # Panics
    /// Panics without a reactor on this thread.
    #[expect(clippy::new_without_default, reason = "a default does not panic")]
    pub fn new() -> Self {
        Self {
            slot: None,
            is_simulated: with_current(|reactor| matches!(reactor.driver, ReactorDriver::Sim(_))),
        }
    }

    /// As [`spawn`]. A future that does not complete is polled a second time, by its task.
    pub fn spawn(&mut self, future: F) {
        if self.is_simulated {
            return spawn(future);
        }
        let mut slot = self.slot.take().unwrap_or_else(|| Box::pin(None));
        slot.set(Some(future));
        // A no-op waker suffices: if the future is pending, its task polls it again and registers
        // its own waker.
        let mut context = Context::from_waker(Waker::noop());
        let poll = slot.as_mut().as_pin_mut().map(|future| future.poll(&mut context));
        if poll.is_none_or(|poll| poll.is_ready()) {
            slot.set(None);
            self.slot = Some(slot);
            return;
        }
        spawn(async move {
            if let Some(future) = slot.as_mut().as_pin_mut() {
                future.await;
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::{cell::Cell, rc::Rc};

    use super::*;
    use crate::{PollingMode, run, yield_now};

    /// Yields `yields` times, then increments `completed`.
    async fn ending(yields: usize, completed: Rc<Cell<usize>>) {
        for _ in 0..yields {
            yield_now().await;
        }
        completed.set(completed.get() + 1);
    }

    #[test]
    fn ready_futures_complete_in_place_and_others_as_tasks() {
        run(PollingMode::Off, async {
            let mut spawner = TaskSpawner::new();
            let completed = Rc::new(Cell::new(0));
            for (yields, at_once) in [(0, 1), (3, 1), (0, 2), (3, 2), (0, 3)] {
                spawner.spawn(ending(yields, Rc::clone(&completed)));
                assert_eq!(completed.get(), at_once);
            }
            while completed.get() < 5 {
                yield_now().await;
            }
        })
        .expect("io_uring works on a test machine");
    }
}
