//! Tasks of a job (`JobTasks`): their number and their first failure.
//!
//! Never starts or cancels a task.

use std::cell::{Cell, RefCell};

use event_listener::Event;

/// Tasks that work on a job, on one thread.
#[derive(Debug)]
pub(crate) struct JobTasks<E> {
    /// Number of tasks that have not ended.
    running: Cell<usize>,
    failure: RefCell<Option<E>>,
    ended: Event,
}

impl<E: Clone> JobTasks<E> {
    /// For `count` tasks, each of which must [end](JobTasks::end).
    pub(crate) fn new(count: usize) -> Self {
        Self { running: Cell::new(count), failure: RefCell::new(None), ended: Event::new() }
    }

    /// A task has ended.
    pub(crate) fn end(&self, result: Result<(), E>) {
        if let Err(error) = result {
            self.failure.borrow_mut().get_or_insert(error);
        }
        self.running.set(self.running.get() - 1);
        self.ended.notify(usize::MAX);
    }

    /// Waits until all tasks have ended, or one has failed.
    pub(crate) async fn all_ended(&self) -> Result<(), E> {
        loop {
            let listener = self.ended.listen();
            if let Some(error) = self.failure.borrow().clone() {
                return Err(error);
            }
            if self.running.get() == 0 {
                return Ok(());
            }
            listener.await;
        }
    }
}
