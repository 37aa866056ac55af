//! A thread with a reactor that runs the jobs it is sent. A daemon has one or a few, and gives each
//! connection to one of them.

use std::{cell::Cell, future::Future, io, sync::Arc, thread};

use super::{
    Driver, Figures, Polling, RingTotals,
    executor::{Arrival, Remote},
    run, spawn, with_current,
};

thread_local! {
    static IS_WORKER: Cell<bool> = const { Cell::new(false) };
}

/// Whether this thread is a [`Worker`]'s: one that requests run on for as long as there are any.
pub fn is_worker() -> bool {
    IS_WORKER.get()
}

/// A thread that runs a reactor until it is stopped.
pub struct Worker {
    remote: Arc<Remote>,
    figures: Arc<Figures>,
    thread: thread::JoinHandle<io::Result<()>>,
    stop: async_channel::Sender<()>,
}

impl Worker {
    /// Starts a thread called `name`.
    ///
    /// # Errors
    /// As [`run`], or where no thread can be had.
    pub fn start(name: &str, polling: Polling) -> io::Result<Self> {
        let (stop, stopped) = async_channel::bounded::<()>(1);
        let (announce, announced) = std::sync::mpsc::channel();
        let thread = thread::Builder::new().name(name.to_owned()).spawn(move || {
            IS_WORKER.set(true);
            run(polling, async move {
                let parts = with_current(|reactor| {
                    let Driver::Uring(uring) = &reactor.driver else { unreachable!("it runs for real") };
                    (Arc::clone(reactor.executor.remote()), Arc::clone(&uring.figures))
                });
                // The receiver waits for this very message, so it is still there.
                let _ = announce.send(parts);
                // An error means that the Worker was dropped; either way it is time to stop.
                let _ = stopped.recv().await;
            })
        })?;
        match announced.recv() {
            Ok((remote, figures)) => Ok(Self { remote, figures, thread, stop }),
            // The thread ended before it could announce itself, so it has the reason.
            Err(_) => match thread.join() {
                Ok(Err(error)) => Err(error),
                Ok(Ok(())) | Err(_) => Err(io::Error::other("the worker thread ended as it started")),
            },
        }
    }

    /// Makes a future on the worker's thread and runs it there as a task.
    pub fn spawn<F: Future<Output = ()> + 'static>(&self, make: impl FnOnce() -> F + Send + 'static) {
        self.remote.send(Arrival::Job(Box::new(move || spawn(make()))));
    }

    /// The name it was started with.
    pub fn name(&self) -> &str {
        self.thread.thread().name().unwrap_or_default()
    }

    /// What its reactor has done so far.
    pub fn figures(&self) -> RingTotals {
        self.figures.totals()
    }

    /// Ends the thread and waits for it; [`run`] says what becomes of tasks that are left. Workers
    /// that share groups of disks stop together: a group's timer may live on any of them.
    ///
    /// # Errors
    /// What [`run`] returned.
    ///
    /// # Panics
    /// With the worker's own panic, if it had one.
    pub fn stop(self) -> io::Result<()> {
        self.stop.close();
        match self.thread.join() {
            Ok(result) => result,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    }
}
