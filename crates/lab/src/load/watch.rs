//! Looking on while a load runs, and ending it early, from other threads.
//!
//! Never makes a load wait: it looks at a flag and stores a number.

use std::{
    future::poll_fn,
    pin::pin,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    task::Poll,
};

use async_channel::{Receiver, Sender};
use block::reactor::{now, sleep_until, timeout};
use policy::time::Duration;

/// How long whoever has ended a load waits for what a server has not answered yet.
const GRACE: Duration = Duration::from_secs(5);

/// Ends loads early: everyone who has a clone of it stops sending.
#[derive(Clone, Debug)]
pub(crate) struct Stop {
    stopped: Arc<AtomicBool>,
    /// Closed with the flag, for those who wait.
    bell: Sender<()>,
    heard: Receiver<()>,
}

impl Default for Stop {
    fn default() -> Self {
        let (bell, heard) = async_channel::bounded(1);
        Self { stopped: Arc::default(), bell, heard }
    }
}

impl Stop {
    /// Says so; false if somebody had said it already.
    pub(crate) fn stop(&self) -> bool {
        let first = !self.stopped.swap(true, Ordering::Relaxed);
        self.bell.close();
        first
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    /// Waits so long, or until it is said.
    pub(super) async fn wait(&self, time: Duration) {
        let _ = timeout(time, self.heard.recv()).await;
    }

    /// Waits for something that may never come, such as a server's answer: once it is said, not
    /// much longer; `None` then.
    pub(super) async fn unless_overdue<T>(&self, awaited: impl Future<Output = T>) -> Option<T> {
        let mut awaited = pin!(awaited);
        let mut overdue = pin!(async {
            let _ = self.heard.recv().await;
            sleep_until(now() + GRACE).await;
        });
        poll_fn(|context| match awaited.as_mut().poll(context) {
            Poll::Ready(result) => Poll::Ready(Some(result)),
            Poll::Pending => overdue.as_mut().poll(context).map(|()| None),
        })
        .await
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Count(Arc<AtomicU64>);

impl Count {
    pub(super) fn set(&self, count: u64) {
        self.0.store(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
