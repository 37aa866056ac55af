//! Asynchronous mutex of reloads and of tasks that list unavailable disks.

use std::cell::Cell;

use event_listener::Event;

#[derive(Debug, Default)]
pub struct Turns {
    is_taken: Cell<bool>,
    freed: Event,
}

/// Guard; releases the mutex when dropped.
pub struct Turn<'a>(&'a Turns);

impl Turns {
    pub(crate) fn is_taken(&self) -> bool {
        self.is_taken.get()
    }

    /// Acquires the mutex; `None` if it is held.
    pub fn try_take(&self) -> Option<Turn<'_>> {
        (!self.is_taken.replace(true)).then(|| Turn(self))
    }

    /// Waits for the mutex.
    pub(crate) async fn take(&self) -> Turn<'_> {
        loop {
            // Registered before the attempt, or a release in between would be missed.
            let freed = self.freed.listen();
            if let Some(turn) = self.try_take() {
                return turn;
            }
            freed.await;
        }
    }
}

impl Drop for Turn<'_> {
    fn drop(&mut self) {
        self.0.is_taken.set(false);
        self.0.freed.notify(1);
    }
}

#[cfg(test)]
mod tests {
    use std::rc::Rc;

    use reactor::sim;

    use super::*;

    #[test]
    fn one_at_a_time_has_a_turn_and_who_waits_has_the_next() {
        sim::run(1, async {
            let turns = Rc::new(Turns::default());
            let turn = turns.try_take().expect("nobody has it");
            assert!(turns.is_taken() && turns.try_take().is_none());
            let waiting = Rc::clone(&turns);
            let waiting = reactor::spawn_joinable(async move { drop(waiting.take().await) });
            reactor::yield_now().await;
            // The waiting task has run, and is blocked by the guard.
            assert!(!waiting.is_finished());
            drop(turn);
            waiting.await;
            assert!(!turns.is_taken());
        });
    }
}
