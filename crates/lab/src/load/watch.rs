//! Observing a load and ending it early, from other threads. Costs the load a flag and a counter.

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
use policy::time::Duration;
use reactor::{now, sleep_until, timeout};

/// Time that an ended load waits for outstanding replies of a server.
const REPLY_TIMEOUT: Duration = Duration::from_secs(5);

/// Ends all loads that have a clone.
#[derive(Clone, Debug)]
pub(crate) struct LoadStop {
    stopped: Arc<AtomicBool>,
    sender: Sender<()>,
    receiver: Receiver<()>,
}

impl Default for LoadStop {
    fn default() -> Self {
        let (sender, receiver) = async_channel::bounded(1);
        Self { stopped: Arc::default(), sender, receiver }
    }
}

impl LoadStop {
    /// Stops the loads. Returns false if they were stopped already.
    pub(crate) fn stop(&self) -> bool {
        // The flag for the hot path, the closed channel for sleeping tasks.
        let first = !self.stopped.swap(true, Ordering::Relaxed);
        self.sender.close();
        first
    }

    pub(crate) fn is_stopped(&self) -> bool {
        self.stopped.load(Ordering::Relaxed)
    }

    pub(super) async fn wait(&self, time: Duration) {
        let _ = timeout(time, self.receiver.recv()).await;
    }

    /// `None` after it is stopped.
    pub(crate) async fn unless_stopped<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        self.unless_stopped_for(Duration::ZERO, future).await
    }

    /// `None` if it has been stopped for [`REPLY_TIMEOUT`]: a server may never reply.
    pub(crate) async fn unless_overdue<T>(&self, future: impl Future<Output = T>) -> Option<T> {
        self.unless_stopped_for(REPLY_TIMEOUT, future).await
    }

    async fn unless_stopped_for<T>(&self, grace: Duration, future: impl Future<Output = T>) -> Option<T> {
        let mut future = pin!(future);
        let mut overdue = pin!(async {
            let _ = self.receiver.recv().await;
            sleep_until(now() + grace).await;
        });
        // The result first: one that is ready at the deadline still counts.
        poll_fn(|context| match future.as_mut().poll(context) {
            Poll::Ready(result) => Poll::Ready(Some(result)),
            Poll::Pending => overdue.as_mut().poll(context).map(|()| None),
        })
        .await
    }
}

#[derive(Clone, Debug, Default)]
pub(crate) struct CompletedCount(Arc<AtomicU64>);

impl CompletedCount {
    pub(super) fn set(&self, count: u64) {
        self.0.store(count, Ordering::Relaxed);
    }

    pub(crate) fn get(&self) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}
